"""What ranks do together, in verbs: one-dimensional tensors over one group of ranks, or over no group at all.

    verb        moves                                             over torch.distributed (`process_group.py`)
    gather      every rank's shard into everybody's full bucket   N broadcasts in place (gloo); all_gather_single (NCCL)
    reduce      every rank's contribution to each shard's owner   all_to_all_single, summed by `numerics.fold`
    broadcast   one rank's tensor to all                          broadcast
    control     a few integers, so that ranks agree               all_gather / all_reduce on CPU tensors over gloo

Why not the backend's reduce-scatter: gloo's is an all-reduce inside (twice the bytes), and its order of summation
depends on where an element lies in the buffer; see docs/decisions/ordered-sum.md.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, NoReturn, get_args

import torch
from torch import Tensor

from .errors import Error, PeerError, UserError, nearest
from .events import Event, Ledger, ends

Reduce = Literal["ordered", "native"]


@dataclass(frozen=True)
class Comm:
    """How ranks talk.

    group: the process group to shard over (None: all ranks; one process alone needs none). A 1-D `DeviceMesh` is
        taken as its group.
    timeout: seconds after which a silent peer is an error (None: the process group's own, which is 30
        minutes by default; a dead one is an error at once in any case).
    reduce: "ordered" sums gradients in rank order (same bits at every stage and bucket size); "native" uses the
        backend's reduce-scatter, whose order is its own business, and needs equal shards.
    overlap: gathers and reductions run behind compute. Off, each is waited for where it is launched (a reduction only
        for a moment, lest ranks that drop different layers wait for each other): same bits.
    prefetch: how many units ahead of use are gathered.
    release_after_forward: False keeps sharded parameters gathered until backward has used them.
    """

    group: Any = None
    timeout: float | None = None
    reduce: Reduce = "ordered"
    overlap: bool = True
    prefetch: int = 1
    release_after_forward: bool = True

    def __post_init__(self) -> None:
        if self.reduce not in get_args(Reduce):
            raise UserError(
                "Comm.reduce is not a known way", got=repr(self.reduce), instead=nearest(self.reduce, get_args(Reduce))
            )
        for name in ("overlap", "release_after_forward"):
            if type(getattr(self, name)) is not bool:
                raise UserError(
                    f"Comm.{name} is a yes or a no", expected="True or False", got=repr(getattr(self, name))
                )
        if type(self.prefetch) is not int or self.prefetch < 0:
            raise UserError(
                "Comm.prefetch counts units",
                expected="0, 1, 2, ...",
                got=repr(self.prefetch),
                instead="Comm(prefetch=1)",
            )
        known = isinstance(self.timeout, (int, float)) and 0 < self.timeout <= 10**9
        if self.timeout is not None and not known:
            raise UserError(
                "Comm.timeout is a positive number of seconds, up to a billion",
                got=repr(self.timeout),
                instead="Comm(timeout=600)",
            )
        if self.prefetch and not self.overlap:
            # Without overlap a prefetch would only hold memory longer; the pair is not a contradiction worth an error.
            object.__setattr__(self, "prefetch", 0)


class Simulated(NamedTuple):
    """Stands for a process group in `Comm.group`: rank `rank` of `ranks` that exist only in arithmetic."""

    rank: int
    ranks: int


class Work:
    """A collective under way: `wait()` for it, or ask whether it is `done()`."""

    def __init__(
        self, handles: Sequence[Any] = (), event: Event | None = None, wait: Callable[[Any], None] | None = None
    ) -> None:
        self._handles = list(handles)
        self._event = event
        self._wait = wait
        self._held: Tensor | None = None

    def done(self) -> bool:
        return all(handle.is_completed() for handle in self._handles)

    def wait(self) -> None:
        since = time.perf_counter_ns()
        while self._handles:
            assert self._wait is not None
            self._wait(self._handles[0])
            self._handles.pop(0)
        self.stood_still(since)
        ends(self._event)
        self._held = None
        _holding.discard(self)

    def stood_still(self, since: int) -> None:
        """The program has done nothing but wait for this, since that time of `perf_counter_ns`."""
        if self._event is not None and not self._event.end:
            self._event.waited += time.perf_counter_ns() - since

    def hold(self, tensor: Tensor) -> None:
        """Keep the memory that the collective works on alive until it is through, even if its owner is dropped."""
        self._held = tensor
        _holding.add(self)


_holding: set[Work] = set()


# What a rank can be about to do when it meets the others; the numbers travel in the header.
MEETINGS = (
    "construction", "forward", "forward without grad", "backward", "backward under no_sync", "end of backward",
    "choosing what to gather", "step", "end of step", "a question about gradients", "gathered()", "leaving gathered()",
    "saving", "loading", "exporting", "writing a trace", "explaining", "telling the others",
)  # fmt: skip
# engine, meeting, number, steps completed, three integers of the meeting's own, reductions launched, failed?
HEADER = 9


class Group:
    """One rank's end of the group, and what it counts. By itself it sends nothing.

    With one rank there is nothing to send. With more it is rank `rank` of a simulation, whose peers all do the same.
    """

    backend: str = "none"

    def __init__(self, ledger: Ledger, device: torch.device, rank: int = 0, ranks: int = 1) -> None:
        self.ledger = ledger
        self.device = device
        self.rank = rank
        self.ranks = ranks
        self.failed: Error | None = None  # what the other ranks are to hear at the next agreement
        self.units: list[str] = []  # by bucket, the unit's name
        self.turn = 0, 0  # in the script of gathers: how many are launched, of how many
        self.trouble = ""  # an exception that this rank alone may have had
        self.steps = 0  # that optimizers have completed
        # Told how many reductions this rank is behind the others, before it hears that they do different things.
        self.on_disagreement: Callable[[int], None] = lambda behind: None

    # --- verbs of data ----------------------------------------------------------------------------------------------

    def gather(self, full: Tensor, bounds: Sequence[int], state: str, bucket: int) -> Work:
        """full[bounds[r]:bounds[r+1]] becomes rank r's, on every rank, in place."""
        nbytes = full.numel() * full.itemsize
        own = (bounds[self.rank + 1] - bounds[self.rank]) * full.itemsize
        event = self._count("gather", nbytes, own * (self.ranks - 1), nbytes - own, state, bucket)
        return Work(self._gather(full, bounds), event, functools.partial(self._wait, "gather", bucket))

    @property
    def arriving(self) -> int:
        """How many contributions to the own shard a reduction brings.

        This rank's own stays where it is, in what is sent, if that is at either end of it: what is sent must be of a
        piece. Elsewhere it is copied as the others are.
        """
        return self.ranks - (self.rank in (0, self.ranks - 1))

    @property
    def room(self) -> int:
        """For how many contributions to the own shard there is room: on all ranks the same, and what a bucket takes."""
        return self.ranks if self.ranks > 2 else self.arriving

    def contributions(self, send: Tensor, receive: Tensor, bounds: Sequence[int]) -> list[Tensor]:
        """Each rank's contribution to the own shard, in rank order, once a reduction is through."""
        own = bounds[self.rank + 1] - bounds[self.rank]
        pieces = list(receive[: self.arriving * own].view(self.arriving, own).unbind(0)) if self.arriving else []
        if self.arriving < self.ranks:
            pieces.insert(self.rank, send[bounds[self.rank] : bounds[self.rank + 1]])
        return pieces

    def reduce(self, send: Tensor, receive: Tensor, bounds: Sequence[int], bucket: int) -> Work:
        """receive (`room` x own shard, 1-D) gets `arriving` contributions to the own shard, in rank order."""
        own = bounds[self.rank + 1] - bounds[self.rank]
        event = self._count_reduce(send, own, bucket)
        receive = receive[: self.arriving * own]
        return Work(self._reduce(send, receive, bounds), event, functools.partial(self._wait, "reduce", bucket))

    def reduce_native(self, send: Tensor, receive: Tensor, bucket: int) -> Work:
        """receive (own shard) gets the backend's sum of all contributions."""
        event = self._count_reduce(send, receive.numel(), bucket)
        return Work(self._reduce_native(send, receive), event, functools.partial(self._wait, "reduce", bucket))

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """tensor becomes the source rank's, everywhere."""
        nbytes = tensor.numel() * tensor.itemsize
        if nbytes:
            mine = self.rank == source
            event = self._count("broadcast", nbytes, nbytes if mine else 0, 0 if mine else nbytes)
            self._broadcast(tensor, source)
            ends(event)

    def _gather(self, full: Tensor, bounds: Sequence[int]) -> list[Any]:
        return []

    def _reduce(self, send: Tensor, receive: Tensor, bounds: Sequence[int]) -> list[Any]:
        return []

    def _reduce_native(self, send: Tensor, receive: Tensor) -> list[Any]:
        if self.ranks == 1:
            receive.copy_(send)
        return []

    def _broadcast(self, tensor: Tensor, source: int) -> None:
        pass

    def _wait(self, verb: str, bucket: int | None, handle: Any) -> None:
        pass

    @property
    def lost(self) -> bool:
        """Did a collective fail for good? Then no other can succeed."""
        return False

    def give_up(self, error: BaseException) -> None:
        """This rank cannot take part in a collective that others may be in already: nobody shall wait for it."""

    # --- verbs of agreement -----------------------------------------------------------------------------------------

    def meet(self, what: str, number: int, *same: int, facts: Callable[[], str] = str) -> None:
        """Agree that every rank is at the same thing, down to the (at most three) integers that say which.

        Raises `PeerError` on every rank, naming who is where, when they are not. facts: the integers in words.
        """
        self.poll(what, number, *same)

    def poll(self, what: str, number: int, *mine: int) -> list[tuple[int, ...]]:
        """Agree as `meet` does; the integers may differ, and every rank gets those of all, in rank order."""
        self._count_control(8 * HEADER)
        if self.failed is not None:
            self._fail(behind=0)
        return [mine]

    def flags(self, mine: bytes) -> bytes:
        """Elementwise maximum over the ranks of as many small numbers on each."""
        self._count_control(len(mine))
        return mine

    def maximum(self, tensor: Tensor) -> None:
        """Elementwise maximum over the ranks of a CPU tensor, in place."""
        self._count_control(tensor.numel() * tensor.itemsize)

    def total(self, tensor: Tensor) -> None:
        """Elementwise sum over the ranks of a CPU tensor of integers, in place."""
        self._count_control(tensor.numel() * tensor.itemsize)

    def describe(self, facts: Any, what: str = "telling the others") -> list[Any]:
        """Every rank's JSON-able `facts`, in rank order. what: the meeting that this is."""
        return [facts]

    def problems(self, mine: str | None) -> list[str]:
        """What every rank that has a problem says of it, so that all of them can raise."""
        return [f"rank {rank}: {problem}" for rank, problem in enumerate(self.describe(mine)) if problem]

    def report(self, error: Error) -> None:
        """Something failed here while peers go on to wait for this rank: raise at the next agreement, on every rank."""
        self.failed = self.failed or error

    def _fail(self, behind: int) -> NoReturn:
        """Something was reported on some rank: all of them raise."""
        mine, self.failed = self.failed, None
        told = self.problems(None if mine is None else str(mine))
        self.on_disagreement(behind)
        self.failed = None  # what fails while all that was under way ends is no news
        if mine is not None:
            raise mine
        raise PeerError("another rank failed", got="; ".join(told), instead="mend that, and load the last checkpoint")

    def apart(self) -> Group:
        """The same ranks with a control group of their own, for a thread that agrees behind the training.

        Collective where it is made, the first time. Nothing else orders it, and it waits half an hour at least: ranks
        may take very different times to write.
        """
        return self

    # --- what they count --------------------------------------------------------------------------------------------

    def _count(
        self, verb: str, nbytes: int, sent: int, received: int, state: str = "", bucket: int | None = None
    ) -> Event | None:
        if self.ranks == 1:
            return self.ledger.note(verb, state=state, bucket=bucket, logical=nbytes)
        return self.ledger.move(verb, logical=nbytes, sent=sent, received=received, state=state, bucket=bucket)

    def _count_reduce(self, send: Tensor, own: int, bucket: int) -> Event | None:
        nbytes, own = send.numel() * send.itemsize, own * send.itemsize
        return self._count("reduce", nbytes, nbytes - own, own * (self.ranks - 1), "gradients", bucket)

    def _count_control(self, nbytes: int) -> Event | None:
        return self._count("control", nbytes, nbytes, nbytes * (self.ranks - 1)) if self.ranks > 1 else None
