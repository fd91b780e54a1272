"""The verbs of `agreement.py` between processes, over `torch.distributed`.

Gathers, reductions and control use process groups of their own: each is ordered in itself, and none can be
mistaken for another. Control runs on gloo and CPU tensors even beside NCCL, so agreeing never waits for the device.

Named hazard, *sizes must meet*: two ranks in collectives of different size abort the process in gloo, without an
exception. So control collectives start with a row of fixed size (`meet`), which says what the rank is about to do; only
ranks that say the same go on, to collectives whose sizes that has settled.
"""

from __future__ import annotations

import copy
import functools
import json
import logging
import operator
import weakref
import zlib
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ..device import ask
from ..errors import PeerError, without_own_lines
from ..events import ends
from ..finalizers import at_end_of
from .agreement import FROZEN, LEAVING, LOADING, OPTION, SENT, TELLING, WROTE, Group, lines
from .collectives import Link, all_gather, all_reduce, dtype_name
from .frames import Call
from .launch_log import Stream, let_go
from .process_team import ProcessTeam

log = logging.getLogger("zeroshard")
_CHOOSING = "choosing what to gather"
_ALIKE, _OWN, _FLAGS = 4, 7, 8  # places in a row: where the meeting's own integers begin and end, and the flags
_CALLS = "forward", "forward without grad"
_FAILED, _NEWS, _TORN, _SIGNALLED = 1, 2, 4, 8  # bits of flags; the last times a signal's number
Verb = TypeVar("Verb", bound=Callable[..., Any])


def _number(meeting: str) -> int:
    return zlib.crc32(meeting.encode())


def _instead(meetings: set[int], *, steps: bool, trouble: str) -> str:
    """Return advice for ranks that are at these different meetings. steps: their numbers of completed steps differ."""
    if steps:
        return "zero.load(...) the last checkpoint: an optimizer or a load did not get to its end on every rank"
    if len(meetings) > 1 and (_number(_CALLS[1]) in meetings or {_number(LEAVING), _number(_CALLS[0])} <= meetings):
        return (
            "every rank calls the model; or with zero.generating(): ... each as often as it needs to, without grad; or "
            "with zero.gathered(): ... any of them, without grad, what it gathers"
        )
    if len(meetings) > 1 and _number("generating") in meetings:
        return "on every rank the same blocks zero.generating(), with nothing in them but forwards without grad"
    if SENT in trouble:
        return 'Layout(buffers="local"), with which each rank keeps its own; else the same buffers on every rank'
    if trouble.partition(": ")[2].startswith(OPTION):
        return (
            "the same options on every rank: give schedulers what all ranks agree on, such as a loss that "
            "torch.distributed.all_reduce has averaged"
        )
    if WROTE in trouble:
        return (
            "the same values on every rank: in the forward torch.distributed.broadcast(value, 0) before it writes; or "
            "the first forward in with zero.gathered(write_from=0):, and rank 0's count"
        )
    if FROZEN in trouble:
        return "requires_grad_(...) of the same parameters on every rank, before the same step"
    if trouble:
        return "fix that, or try the step again on every rank until it works"
    if {_number("backward"), _number("step")} <= meetings:  # after as many forwards
        return (
            "a loss with a graph through the model, and its backward, on every rank: 0 * output.sum() where a rank has "
            "nothing to learn from its batch; or no step on any rank"
        )
    return (
        "as many batches on every rank, or for batch in zero.join(loader): ...; "
        "and zeroshard's collective methods on all of them"
    )


def verb(method: Verb) -> Verb:
    """Decorate a verb of agreement: from its first message to its last no other verb may come between."""

    @functools.wraps(method)
    def called(self: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        if not self._link.behind:
            self.hear_crossed()
            if self._groups.call is not None and self._groups.call.elsewhere():
                self.cross()
            self.refuse_within(busy=self._groups.call is not None and self._groups.call.running(), around=False)
        self._link.begin(Call())
        answer = method(self, *args, **kwargs)
        self._link.end()  # not after an exception: then a levelling ends the call
        return answer

    return cast(Verb, without_own_lines(called))


class ProcessGroup(Group):
    """The verbs of agreement over `torch.distributed`."""

    def __init__(self, team: ProcessTeam, link: Link, axis_team: ProcessTeam | None) -> None:
        parent = link.groups.parent
        super().__init__(team, dist.get_rank(parent), dist.get_world_size(parent), axis_team)
        self._link = link
        self._groups = link.groups
        self._global = dist.get_process_group_ranks(parent)
        self._stream, self._axes = link.groups.control, link.groups.axes
        self.progress = link.progress
        self.backend = link.groups.backend
        self._groups.engines[link.engine] = self
        at_end_of(self, let_go, self._groups.levelling, link.engine)

    @property
    def interrupted(self) -> bool:
        return self.left or self._link.interrupted or bool(self.progress.left and self._link.left_by_others)

    @property
    def missed(self) -> bool:
        return self.rank in self._link.left_by_others

    def left_open(self, engine: int) -> str:
        """Return what an exception has ended here, in words, if all ranks level it before this rank launches anything
        of an engine."""
        own, party = engine == self._link.engine, self.party
        if own and party is not None and (found := party.left()):
            return found
        ended = (own and self.left) or self._link.interrupted
        return f"an exception ended what came after {self.progress.met or 'shard(...)'}" if ended else ""

    @property
    def launched(self) -> tuple[int, int]:
        return sum([stream.count for stream in self._groups.levelling]), self._groups.levellings

    def level(self, why: str) -> None:
        self._link.level(why)

    def told(self) -> dict[str, Any]:
        """Return what this rank tells the others of this model at a levelling."""
        unsettled, edits = (self.party.unsettled(), self.party.edits()) if self.party is not None else (False, "")
        told = {"numbers": self.numbers, "unsettled": unsettled, "edits": edits, "signalled": self.signalled}
        return told | {"alive": self.party is not None}

    def levelled(self, told: list[dict[str, Any]], uneven: bool) -> None:
        """Reset this model once all that was under way has ended on all ranks. told: by each rank (`told`).

        uneven: some sums lack a rank's part, so gradients are dropped.
        """
        for what in {what for each in told for what in each["numbers"]}:
            self.numbers[what] = max(each["numbers"].get(what, 0) for each in told)
        self.left, self.signalled = False, max(each["signalled"] for each in told)
        self.progress.left = ""
        if self.party is not None:
            differ = len({each["edits"] for each in told}) > 1
            self.party.levelled(uneven or differ or any(each["unsettled"] for each in told))

    def spread(self) -> None:
        """Send owners' updates once more, because they may not have reached all ranks. All ranks do it, by model."""
        if self.party is not None:
            self.party.spread()

    @property
    def lost(self) -> bool:
        return self._link.lost

    def give_up(self, error: BaseException) -> None:
        self._link.give_up(error)

    @verb
    def _broadcast(self, tensor: Tensor, source: int, ahead: bool) -> None:
        raw = tensor.view(torch.uint8)
        # The device's backend may refuse tensors of the host.
        stream = self._groups.broadcasts if tensor.device.type == self.device.type else self._stream
        handle = self._link.broadcast(stream, raw, self._global[source], (-1, "", raw.numel()), 0)
        self._link.wait("a broadcast", None, handle, queued=stream.queued, ahead=ahead)

    @verb
    def meet(self, what: str, number: int, *same: int, facts: Callable[[], str] = str) -> None:
        self._exchange(what, number, same, compared=_OWN, facts=facts)

    @verb
    def poll(self, what: str, number: int, *mine: int) -> list[tuple[int, ...]]:
        rows = self._exchange(what, number, mine, compared=_ALIKE)
        return [tuple(row[_ALIKE : _ALIKE + len(mine)]) for row in rows]

    def _exchange(
        self, what: str, number: int, integers: tuple[int, ...], *, compared: int, facts: Callable[[], str] = str
    ) -> list[list[int]]:
        """Return every rank's row, in rank order; one row if all are equal and there are many ranks.

        Raises `PeerError` on all ranks if rows differ in the first `compared` integers.
        """
        event = self._count_rows()
        at = f"{what} {number}"
        mends = what.startswith((LOADING, TELLING))  # at these meetings ranks need not hold the weights of one step
        own = [self._link.engine, _number(what), number, 0 if mends else self.progress.steps, *integers]
        own += [0] * (_OWN - len(own))
        flags = _FAILED * (self.failed is not None) + _NEWS * self.news + _TORN * bool(self.torn)
        flags += _SIGNALLED * (self.signal if self.signal != self.signalled else 0)  # until all have heard of it
        rows = self._rows([*own, self._groups.levellings, flags], at)
        ends(event)
        self.heard = any(row[_FLAGS] & _NEWS for row in rows)
        self.signalled = max(self.signalled, *(row[_FLAGS] // _SIGNALLED for row in rows))
        if any(row[_FLAGS] & _FAILED for row in rows):
            self._link.end()
            self.fail()
        torn = not mends and any(row[_FLAGS] & _TORN for row in rows)
        if torn or any(row[:compared] != rows[0][:compared] for row in rows):
            self._disagree(rows, at, facts, torn=torn)
        self.progress.met = at
        if what != _CHOOSING:  # in which a rank whose forward raised still takes part, to the forward's end
            self.progress.trouble = self.progress.left = ""
        return rows

    def _rows(self, own: list[int], at: str) -> list[list[int]]:
        """Exchange rows along each axis of the grid; gather all rows of all ranks only if two differ."""
        if len(self._axes) == 1:
            return self._gathered(own, self._axes[0], at)
        differ = 0
        for axis in self._axes:
            rows = self._gathered([*own, differ], axis, at)
            differ = int(any(row != [*own, 0] for row in rows))
        if not differ:
            return [own]
        return self._gathered(own, self._stream, at)

    def _gathered(self, own: list[int], stream: Stream, at: str) -> list[list[int]]:
        row = torch.tensor(own, dtype=torch.int64, device="cpu")
        everyone = self._everyones(row.view(torch.uint8), stream, at).view(torch.int64)
        rows: list[list[int]] = everyone.view(-1, len(own)).tolist()
        return rows

    def _everyones(self, own: Tensor, stream: Stream, at: str) -> Tensor:
        everyone = torch.empty(len(stream.members) * own.numel(), dtype=torch.uint8, device="cpu")
        what = "all_gather", self._link.engine, -1, own.numel(), ""
        self._link.wait(at, None, self._link.launch(stream, what, *all_gather(stream, everyone, own)))
        return everyone

    def _disagree(self, rows: list[list[int]], at: str, facts: Callable[[], str], *, torn: bool) -> None:
        detail = all(row[1:_ALIKE] == rows[0][1:_ALIKE] for row in rows)
        steps = torn or any(row[3] != rows[0][3] for row in rows)
        said = self.torn or self.progress.trouble or detail * facts()
        told = [text.partition("\n") for text in self._tell(f"{at}\n{said}")]
        where = "; ".join(
            f"rank {rank} is at {meeting}"
            + (f" after {row[3]} steps" if steps else "")
            + (f" of model {row[0]}, {row[_ALIKE:_OWN]}" if detail else "")
            for rank, (row, (meeting, _, _)) in enumerate(zip(rows, told, strict=True))
        )
        facts_of = [said.split("\n") for _, _, said in told]
        alike = set.intersection(*map(set, facts_of))
        different = ["; ".join(fact for fact in each if fact not in alike) for each in facts_of]
        if not any(different):
            different = ["; ".join(each) for each in facts_of]
        trouble = [f"rank {rank}: {said}" for rank, said in enumerate(different) if said]
        self._link.level("")
        error = PeerError(
            "the ranks do not hold the weights of one step" if torn else "the ranks are not doing the same thing",
            where=where,
            expected="the same forwards, backwards, steps and questions on every rank, in the same order",
            got="; ".join(trouble) or None,
            instead=_instead({row[1] for row in rows}, steps=steps, trouble="; ".join(trouble)),
        )
        error.parted = any(row[1] == _number(LEAVING) for row in rows)
        raise error

    @verb
    def flags(self, mine: bytes) -> bytes:
        tensor = torch.tensor([*mine], dtype=torch.uint8, device="cpu")
        self._all_reduce(tensor, "MAX")
        return tensor.numpy().tobytes()

    @verb
    def maximum(self, tensor: Tensor) -> Tensor:
        return self._all_reduce(tensor, "MAX")

    @verb
    def total(self, tensor: Tensor) -> Tensor:
        return self._all_reduce(tensor, "SUM")

    def _all_reduce(self, tensor: Tensor, how: str) -> Tensor:
        """Reduce a tensor over all ranks. A device's tensor is reduced in its queue, and only the queue waits: a lost
        collective is found at this rank's next meeting."""
        queued = self._groups.queued and not tensor.is_cpu
        stream, tensor = (self._groups.broadcasts, tensor) if queued else (self._stream, ask(tensor))
        event = self._count_control(tensor.numel() * tensor.itemsize)
        what = "all_reduce", self._link.engine, -1, tensor.numel(), dtype_name(tensor.dtype), how
        handle = self._link.launch(stream, what, *all_reduce(stream, tensor, how))
        self._link.wait(f"what follows {self.progress.met}", None, handle, queued=queued, ahead=queued)
        ends(event)
        return tensor

    @verb
    def describe(self, facts: Any, what: str = TELLING) -> list[Any]:
        text = json.dumps(facts).encode()
        lengths = [row[_ALIKE] for row in self._exchange(what, 0, (len(text),), compared=_ALIKE)]
        return [json.loads(told) for told in self._texts(text, lengths * (self.ranks // len(lengths)))]

    def _texts(self, mine: bytes, lengths: list[int]) -> list[bytes]:
        padded = torch.zeros(max(*lengths, 1), dtype=torch.uint8, device="cpu")
        padded[: len(mine)] = torch.frombuffer(bytearray(mine or b"\0"), dtype=torch.uint8)[: len(mine)]
        rows = self._everyones(padded, self._stream, f"what follows {self.progress.met}").view(self.ranks, -1)
        return [rows[rank, :length].numpy().tobytes() for rank, length in enumerate(lengths)]

    def _tell(self, trouble: str) -> list[str]:
        """Return what each rank tells of itself, once they have found that they do different things."""
        texts = self._texts(trouble.encode()[:999], [999] * self.ranks)
        return [text.rstrip(b"\0").decode(errors="replace") for text in texts]

    def begun_sums(self, number: int) -> None:
        self._groups.sums_begun = number

    def parted(self) -> bool:
        """Tell if ranks differ in what they do in this backward: ask those on this rank's lines of the grid.

        They differ if one of them waits for a collective that this rank has not launched, and yet has begun fewer
        sums. Ranks that do the same begin sums, and launch all else, in one order: then a rank that has begun fewer
        sums has launched no more. So the answer is never wrong, also if a message is late, and as many bytes are held
        as were planned. A rank that knows that they differ tells whoever asks it: after a few rounds all know.
        """
        groups, watch, number = self._groups, self._groups.watch, f"{self._link.engine} {self.numbers['backward']}"
        if not (groups.parted == number or watch.alarm or watch.called > groups.levellings):
            mine, begun = groups.launched, groups.sums_begun
            answers = watch.ask({rank for line in lines(self.ranks, self.rank) for rank in line} - {self.rank})
            if not any(
                each.silence
                or each.parted == number
                or (each.waits and each.sums < begun and any(map(operator.gt, each.launched, mine)))
                for each in answers.values()
            ):
                return False
        groups.parted = number
        return True

    def for_saves(self, *, behind: bool) -> Group:
        other = copy.copy(self)
        other._stream = self._groups.for_saves(behind=behind)
        other._axes = [other._stream]
        other._link = copy.copy(self._link)
        other._link.behind, other._link.saves = behind, True
        other._link._weak = weakref.ref(other._link)  # which says what the save waits for
        other._link.progress = other.progress = copy.copy(self.progress)
        return other
