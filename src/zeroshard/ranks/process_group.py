"""The verbs of `transport.py` and `agreement.py` between processes, over `torch.distributed`.

Gathers, reductions and control use process groups of their own: each is ordered in itself, and none can be
mistaken for another. Control runs on gloo and CPU tensors even beside NCCL, so agreeing never waits for the device.

Named hazard, *sizes must meet*: two ranks in collectives of different size abort the process in gloo, without an
exception. So every control collective starts with a row of fixed size (`meet`), which says what the rank is
about to do; only ranks that say the same go on.

Named hazard, *a wait for the dead*: gloo tells of a dead peer only the ranks that wait for that very peer, and wakes no
rank before its time-out. So ranks wait in slices, and between two look at `watch.alarm`; Python's signals are seen too.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import weakref
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import PeerError, StateError, UserError
from ..events import Ledger, ends
from ..stage import seat
from .agreement import Group, Progress, refuse_forked
from .comm import Comm, Simulated
from .groups import Groups, groups_of, start
from .launcher import ranks_to_join
from .transport import Team

log = logging.getLogger("zeroshard")
_CHOOSING = "choosing what to gather"
_ALIKE, _OWN, _FLAGS = 4, 7, 8  # where in a row the meeting's own integers begin and end, and the last
_FAILED, _NEWS = 1, 2
SLICE = timedelta(seconds=0.2)  # of a wait; between two, alarms and signals are seen


class Link:
    """How one engine launches collectives and waits for them, and who is to blame when one does not complete."""

    def __init__(self, groups: Groups, ledger: Ledger, progress: Progress) -> None:
        self.groups = groups
        self.ledger = ledger
        self.progress = progress
        self.rank = dist.get_rank(groups.parent)
        self.process = os.getpid()
        self.backend = str(dist.get_backend(groups.gathers))
        self.reductions = 0  # launched so far
        self._weak = weakref.ref(self)

    def launch(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        refuse_forked(self.process, self.rank)
        if not dist.is_initialized():
            raise StateError(
                "the process group is gone",
                where=f"rank {self.rank}: {self.doing()}",
                instead="torch.distributed.destroy_process_group() after the last use of the model",
            )
        try:
            return call(*args, async_op=True, **kwargs)
        except (RuntimeError, ValueError) as error:
            raise self._loss(error) from error

    def wait(self, verb: str, bucket: int | None, handle: Any) -> None:
        refuse_forked(self.process, self.rank)
        self.groups.speaker = self._weak
        self.progress.waits = verb, bucket
        try:
            if self.backend == "nccl" and bucket is not None:
                handle.wait()  # the device's stream waits, not this thread
            else:
                self._wait_in_slices(handle)
        except (RuntimeError, ValueError) as error:
            if isinstance(error, PeerError):
                raise
            raise self._loss(error) from error
        self.progress.waits = None

    def _wait_in_slices(self, handle: Any) -> None:
        while True:
            try:
                handle.wait(SLICE)
                return
            except RuntimeError as error:
                if handle.is_completed():
                    handle.wait()  # it failed, or ended after the slice did
                    return
                if self.groups.watch.alarm or self.lost:
                    raise self._loss(error) from error

    @property
    def lost(self) -> bool:
        return self.groups.loss is not None

    def give_up(self, error: BaseException) -> None:
        if not self.lost:
            why = f"gave up: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            self.groups.loss = f"rank {self.rank} {why}"
            self.groups.watch.tell({self.rank: why})

    def doing(self) -> str:
        return self.progress.words(self.ledger.phase)

    def about(self) -> dict[str, Any]:
        return {"doing": self.doing(), "waits": bool(self.progress.waits), "failed": self.lost}

    def _loss(self, error: Exception) -> PeerError:
        """The error for a collective that did not complete: who is to blame, as far as it can be found out."""
        groups, watch = self.groups, self.groups.watch
        if groups.loss is None:
            groups.loss = ""  # whoever asks from now on hears that this rank has failed
            answers = watch.ask()
            culprits = watch.alarm or {rank: answer.silence for rank, answer in answers.items() if answer.silence}
            if not watch.alarm and culprits:
                watch.tell(culprits)
            blamed = culprits or {
                rank: "did not come" for rank, answer in answers.items() if not (answer.waits or answer.failed)
            }
            groups.loss = "; ".join(f"rank {rank} {what}" for rank, what in sorted(blamed.items()))
            groups.seen = "; ".join(
                f"rank {rank}: {answer.doing or answer.silence}" for rank, answer in sorted(answers.items())
            )
        return PeerError(
            f"a collective did not complete: {groups.loss or 'a peer had an error of its own'}",
            where=f"rank {self.rank}: {self.doing()}",
            got=f"{groups.seen}; {str(error).splitlines()[0]}",
            instead="read the first error among all ranks' output, end the program, and load the last checkpoint; "
            "Comm(timeout=...) sets how long to wait for a silent rank",
        )


class ProcessTeam(Team):
    """The verbs of data over `torch.distributed`."""

    def __init__(self, ledger: Ledger, device: torch.device, link: Link) -> None:
        super().__init__(ledger, device, link.groups.seat)
        self._link = link
        first = self.seat.replica * self.size
        everyone = dist.get_process_group_ranks(link.groups.parent)
        self._global = everyone[first : first + self.size]  # the team's
        self._copies = everyone[self.position :: self.size]  # those at this position of each replica

    def _gather(self, full: Tensor, bounds: Sequence[int]) -> list[Any]:
        if self.size == 1:
            return []
        raw, group = full.view(torch.uint8), self._link.groups.gathers
        cuts = [bound * full.itemsize for bound in bounds]
        if self._link.backend == "nccl" and len({high - low for low, high in pairwise(cuts)}) == 1:
            own_part = raw[cuts[self.position] : cuts[self.position + 1]]
            return [self._link.launch(_all_gather, raw, own_part, group=group)]
        return [
            self._link.launch(dist.broadcast, raw[low:high], self._global[source], group=group)
            for source, (low, high) in enumerate(pairwise(cuts))
            if high > low
        ]

    def _reduce(self, send: Tensor, receive: Tensor, bounds: Sequence[int]) -> list[Any]:
        own = [bounds[self.position + 1] - bounds[self.position]] * self.size
        splits = [high - low for low, high in pairwise(bounds)]
        if self.arriving < self.size:
            send = send[bounds[1] :] if self.position == 0 else send[: bounds[-2]]
            own[self.position] = splits[self.position] = 0
        self._link.reductions += 1
        if self.size == 1:
            return []
        group = self._link.groups.reductions
        return [self._link.launch(dist.all_to_all_single, receive, send, own, splits, group=group)]

    def _reduce_native(self, send: Tensor, receive: Tensor) -> list[Any]:
        self._link.reductions += 1
        if self.size == 1:
            return super()._reduce_native(send, receive)
        return [self._link.launch(_reduce_scatter, receive, send, group=self._link.groups.reductions)]

    # A broadcast, and not a message: gloo breaks the connection when one has waited for a message for a while.
    def _hand_on(self, running: Tensor, source: int) -> list[Any]:
        group = self._link.groups.pairs[source]
        return [self._link.launch(dist.broadcast, running.view(torch.uint8), self._copies[source], group=group)]

    def _hand_back(self, average: Tensor) -> list[Any]:
        group = self._link.groups.copies
        return [self._link.launch(dist.broadcast, average.view(torch.uint8), self._copies[-1], group=group)]

    def _wait(self, verb: str, bucket: int, handle: Any) -> None:
        self._link.wait(verb, bucket, handle)


class ProcessGroup(Group):
    """The verbs of agreement over `torch.distributed`."""

    def __init__(self, team: ProcessTeam, link: Link) -> None:
        parent = link.groups.parent
        super().__init__(team, dist.get_rank(parent), dist.get_world_size(parent))
        self._link = link
        self._groups = link.groups
        self.progress = link.progress
        self.backend = link.backend
        self._global = dist.get_process_group_ranks(parent)
        self._groups.engines += 1
        self._engine = self._groups.engines  # models sharded over one group are told apart by the order of their making

    @property
    def lost(self) -> bool:
        return self._link.lost

    def give_up(self, error: BaseException) -> None:
        self._link.give_up(error)

    def _broadcast(self, tensor: Tensor, source: int) -> None:
        group = self._groups.broadcasts
        handle = self._link.launch(dist.broadcast, tensor.view(torch.uint8), self._global[source], group=group)
        self._link.wait("a broadcast", None, handle)

    def meet(self, what: str, number: int, *same: int, facts: Callable[[], str] = str) -> None:
        self._exchange(what, number, same, compared=_OWN, facts=facts)

    def poll(self, what: str, number: int, *mine: int) -> list[tuple[int, ...]]:
        rows = self._exchange(what, number, mine, compared=_ALIKE)
        return [tuple(row[_ALIKE : _ALIKE + len(mine)]) for row in rows]

    def _exchange(
        self, what: str, number: int, integers: tuple[int, ...], *, compared: int, facts: Callable[[], str] = str
    ) -> list[list[int]]:
        """Every rank's row, in rank order; where all rows are equal, the one."""
        event = self._count_rows()
        at = f"{what} {number}"
        own = [self._engine, zlib.crc32(what.encode()), number, self.progress.steps, *integers]
        own += [0] * (_OWN - len(own))
        flags = _FAILED * (self.failed is not None) + _NEWS * self.news
        rows = self._rows([*own, self._link.reductions, flags], at)
        ends(event)
        self.heard = any(row[_FLAGS] & _NEWS for row in rows)
        if any(row[_FLAGS] & _FAILED for row in rows):
            self._fail(max(row[_OWN] for row in rows) - self._link.reductions)
        if any(row[:compared] != rows[0][:compared] for row in rows):
            self._disagree(rows, at, facts)
        self.progress.met = at
        if what != _CHOOSING:  # at which a rank whose forward raised takes part to its end
            self.progress.trouble = ""
        return rows

    def _rows(self, own: list[int], at: str) -> list[list[int]]:
        """One exchange on each axis of the grid; all rows of all ranks only where two differ."""
        if len(self._groups.axes) == 1:
            return self._gathered(own, self._groups.axes[0], at)
        differ = 0
        for axis in self._groups.axes:
            rows = self._gathered([*own, differ], axis, at)
            differ = int(any(row != [*own, 0] for row in rows))
        if not differ:
            return [own]
        return self._gathered(own, self._groups.control, at)

    def _gathered(self, own: list[int], group: Any, at: str) -> list[list[int]]:
        row = torch.tensor(own, dtype=torch.int64, device="cpu")
        everyone = torch.empty(dist.get_world_size(group) * len(own), dtype=torch.int64, device="cpu")
        self._control(_all_gather, everyone, row, at=at, group=group)
        rows: list[list[int]] = everyone.view(-1, len(own)).tolist()
        return rows

    def _disagree(self, rows: list[list[int]], at: str, facts: Callable[[], str]) -> None:
        detail = all(row[1:_ALIKE] == rows[0][1:_ALIKE] for row in rows)
        steps = any(row[3] != rows[0][3] for row in rows)
        told = [text.partition("\n") for text in self._tell(f"{at}\n{self.progress.trouble or detail * facts()}")]
        where = "; ".join(
            f"rank {rank} is at {meeting}"
            + (f" after {row[3]} steps" if steps else "")
            + (f" of model {row[0]}, {row[_ALIKE:_OWN]}" if detail else "")
            for rank, (row, (meeting, _, _)) in enumerate(zip(rows, told, strict=True))
        )
        trouble = [f"rank {rank}: {said}" for rank, (_, _, said) in enumerate(told) if said]
        self.on_disagreement(max(row[_OWN] for row in rows) - self._link.reductions)
        raise PeerError(
            "the ranks are not doing the same thing",
            where=where,
            expected="the same forwards, backwards, steps and questions on every rank, in the same order",
            got="; ".join(trouble) or None,
            instead="zero.load(...) in a new run: an optimizer did not finish its step on every rank"
            if steps
            else "mend that, or try the step again on every rank until it works"
            if trouble
            else "as many batches on every rank, and zeroshard's collective methods on all of them, alike",
        )

    def flags(self, mine: bytes) -> bytes:
        tensor = (
            torch.frombuffer(bytearray(mine), dtype=torch.uint8)
            if mine
            else torch.empty(0, dtype=torch.uint8, device="cpu")
        )
        self.maximum(tensor)
        return tensor.numpy().tobytes()

    def maximum(self, tensor: Tensor) -> None:
        self._all_reduce(tensor, dist.ReduceOp.MAX)

    def total(self, tensor: Tensor) -> None:
        self._all_reduce(tensor, dist.ReduceOp.SUM)

    def _all_reduce(self, tensor: Tensor, op: Any) -> None:
        event = self._count_control(tensor.numel() * tensor.itemsize)
        self._control(dist.all_reduce, tensor, op, at=f"what follows {self.progress.met}")
        ends(event)

    def describe(self, facts: Any, what: str = "telling the others") -> list[Any]:
        text = json.dumps(facts).encode()
        lengths = [row[0] for row in self.poll(what, 0, len(text))]
        return [json.loads(told) for told in self._texts(text, lengths * (self.ranks // len(lengths)))]

    def _texts(self, mine: bytes, lengths: list[int]) -> list[bytes]:
        padded = torch.zeros(max(*lengths, 1), dtype=torch.uint8, device="cpu")
        padded[: len(mine)] = torch.frombuffer(bytearray(mine or b"\0"), dtype=torch.uint8)[: len(mine)]
        everyone = torch.empty(self.ranks * padded.numel(), dtype=torch.uint8, device="cpu")
        self._control(_all_gather, everyone, padded, at=f"what follows {self.progress.met}")
        rows = everyone.view(self.ranks, -1)
        return [rows[rank, :length].numpy().tobytes() for rank, length in enumerate(lengths)]

    def _tell(self, trouble: str) -> list[str]:
        """What each rank says for itself, once they have found that they do different things."""
        texts = self._texts(trouble.encode()[:999], [999] * self.ranks)
        return [text.rstrip(b"\0").decode(errors="replace") for text in texts]

    def _control(self, call: Callable[..., Any], *args: Any, at: str, group: Any = None) -> None:
        self._link.wait(at, None, self._link.launch(call, *args, group=group or self._groups.control))

    def apart(self) -> Group:
        other = copy.copy(self)
        other._groups = self._groups.apart()
        other._link = copy.copy(self._link)
        other._link.groups = other._groups
        other._link.progress = other.progress = copy.copy(self.progress)
        return other


def connect(settings: Comm, ledger: Ledger, device: torch.device) -> Group:
    """This rank's end of the group that `settings` names, starting `torch.distributed` where nobody has.

    Under a launcher (`RANK` and `WORLD_SIZE` set) the default process group is made here and ended at exit.
    """
    parent = settings.group
    if isinstance(parent, Simulated):
        sits = seat(parent.rank, parent.ranks, settings.replicas or 1)
        return Group(Team(ledger, device, sits), parent.rank, parent.ranks)
    replicas = settings.replicas or 1
    if hasattr(parent, "get_group") and hasattr(parent, "ndim"):
        replicas = _replicas_of(parent, settings)
        parent = parent.get_group() if parent.ndim == 1 else _everyone_of(parent)
    if parent is None:
        if not (dist.is_available() and dist.is_initialized()):
            if ranks_to_join(os.environ) == 1:
                return Group(Team(ledger, device, seat(0, 1, replicas)))
            start(settings, device)
        parent = dist.group.WORLD
    if parent != dist.GroupMember.NON_GROUP_MEMBER and not isinstance(parent, dist.ProcessGroup):
        raise UserError(
            "Comm.group is not a process group",
            expected="a torch.distributed process group, or a DeviceMesh of one axis or two",
            got=repr(parent),
            instead="Comm(group=torch.distributed.new_group([...]))",
        )
    if parent == dist.GroupMember.NON_GROUP_MEMBER or dist.get_rank(parent) < 0:
        raise UserError(
            "this rank is not a member of the process group",
            where=f"rank {dist.get_rank()}",
            instead="call shard(...) on members of the group only",
        )
    sits = seat(dist.get_rank(parent), dist.get_world_size(parent), replicas)
    if dist.get_world_size(parent) == 1:
        return Group(Team(ledger, device))
    link = Link(groups_of(parent, settings.timeout, sits), ledger, Progress())
    return ProcessGroup(ProcessTeam(ledger, device, link), link)


def _replicas_of(mesh: Any, settings: Comm) -> int:
    """Of a `DeviceMesh`: its first axis replicates and its second shards, as with FSDP2; one of one axis shards."""
    if mesh.ndim > 2:
        raise UserError(
            "a DeviceMesh of more than two axes cannot be sharded over",
            expected="one axis, which shards, or two, of which the first replicates",
            got=f"{mesh.ndim} axes {mesh.mesh_dim_names}",
            instead='Comm(group=mesh["replicate", "shard"])',
        )
    replicas = int(mesh.size(0)) if mesh.ndim == 2 else 1
    if settings.replicas not in (None, replicas):
        raise UserError(
            "Comm.replicas contradicts the DeviceMesh",
            expected=f"replicas={replicas}, the length of its first axis",
            got=f"replicas={settings.replicas}",
            instead="Comm(group=mesh)",
        )
    ranks = mesh.mesh.flatten().tolist()
    if ranks != sorted(ranks):
        raise UserError(
            "the ranks of a DeviceMesh must ascend, row by row",
            got=f"{mesh.mesh.tolist()}",
            instead=f"torch.distributed.device_mesh.init_device_mesh(..., {tuple(mesh.shape)})",
        )
    return replicas


def _everyone_of(mesh: Any) -> Any:
    """The process group of all ranks of a mesh of two axes."""
    if mesh.mesh.numel() == dist.get_world_size():
        return dist.group.WORLD
    return mesh._flatten().get_group()


# torch 2.13 renamed these two; the old names warn there and the new ones are missing before.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
