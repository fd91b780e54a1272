"""The verbs by which ranks of a team move data: one-dimensional tensors, each rank's own part of a bucket.

    verb       moves                                             over torch.distributed (`process_team.py`)
    gather     every rank's shard into each full bucket          N broadcasts in place (gloo); all_gather_single (NCCL)
    reduce     every rank's contribution to each shard's owner   all_to_all_single, summed by `sums.fold`

A *team* is the ranks that shard a bucket among themselves. A rank's `position` in it says which shard is its own
(`stage.Seat`).
Replicas have verbs of their own, along the other axis of the mesh: `replicate_axis.py`.
Agreement between all ranks, whatever they shard, is in `agreement.py`. If all ranks of a team are on one host, gathers
and reductions may go through memory that they share instead: `shared_memory.py`.

Why not the backend's reduce-scatter: gloo's is an all-reduce inside (twice the bytes), and its order of summation
depends on where an element lies in the message; see docs/decisions/ordered-sum.md.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..device import DeviceEvent
from ..events import Event, Ledger, ends
from ..hooks import features, first
from ..layout.limits import room
from ..layout.partition import BucketPlan
from ..layout.stage import ALONE, Seat
from .launch_log import completed

if TYPE_CHECKING:
    from .replicate_axis import Column
    from .shared_memory import Exchange

LENT = "lent"  # a state in the ledger: memory that this rank holds for others to read


class Work:
    """A collective under way: `wait()` for it, or ask whether it is `done()`."""

    def __init__(
        self,
        handles: Sequence[Any] = (),
        event: Event | None = None,
        wait: Callable[[Any], None] | None = None,
        *,
        shares: bool = False,
    ) -> None:
        """shares: its results lie in the memory of other ranks, until `used` is called."""
        self._handles = list(handles)
        self._event = event
        self._wait = wait
        self._held: Tensor | None = None
        self._shared = list(handles) if shares else []
        self._over: Callable[[], None] | None = None
        self._after: DeviceEvent | None = None

    def after(self, through: DeviceEvent) -> Work:
        """Let this be through no earlier than the event `through`. Returns itself."""
        self._after = through
        return self

    def done(self) -> bool:
        return (self._after is None or self._after.is_completed()) and all(map(completed, self._handles))

    def wait(self) -> None:
        since = time.perf_counter_ns()
        while self._handles:
            assert self._wait is not None
            self._wait(self._handles[0])
            self._handles.pop(0)
        if self._after is not None:
            self._after.wait()
        if self._event is not None:
            self.stood_still(since)
            ends(self._event)
        self._held = None
        _holding.pop(self, None)
        if self._over is not None:
            self._over()

    def used(self) -> None:
        """Tell other ranks that this rank no longer reads the results, which lie in their memory."""
        while self._shared:
            self._shared[0].read()
            self._shared.pop(0)

    def lends(self, ledger: Ledger, nbytes: int) -> None:
        """Count, in the ledger, the memory that other ranks read from, until this is through or dropped."""
        self._over = ledger.hold_while(self, LENT, nbytes)

    def stood_still(self, since: int) -> None:
        """Count the time since `since` (`perf_counter_ns`), in which the program did nothing but wait for this."""
        if self._event is not None and not self._event.end:
            self._event.waited += time.perf_counter_ns() - since

    def hold(self, tensor: Tensor) -> None:
        """Keep the memory that the collective works on alive until it is through, even if its owner is dropped."""
        for dropped in [work for work in tuple(_holding) if work.done()]:
            _holding.pop(dropped, None)
        self._held = tensor
        _holding[self] = None


_holding: dict[Work, None] = {}  # under way, or through and not waited for; in the order of their launch


class Team:
    """One rank's handle on a team, and its counts of bytes. This class itself sends nothing.

    With one rank there is nothing to send. With more, it is one position of a simulation, whose peers all do the same.
    """

    def __init__(self, ledger: Ledger, device: torch.device, seat: Seat = ALONE, *, shares: bool = False) -> None:
        """shares: all of its ranks read each other's memory, so that nothing is sent."""
        self.shares = shares and seat.size > 1
        self.ledger = ledger
        self.device = device
        self.seat = seat
        self.position = seat.position
        self.size = seat.size
        # The number of contributions to this rank's shard that a reduction brings. This rank's own stays in the sent
        # tensor if it lies at either end of it, because what is sent must be contiguous. Elsewhere it is copied too.
        self.arriving = self.size - (self.position in (0, self.size - 1))
        self.memory: Exchange | None = None  # lets its ranks read each other's memory
        self.queued = False  # does a device's queue wait for collectives, and not a thread?
        # Gathers a bucket if each rank has only a part of its shard: `features/two_level.py`.
        self.by_levels: Callable[[Team, Tensor, BucketPlan, str], Work] | None = None

    @functools.cached_property
    def column(self) -> Column:
        """This rank's column, the ranks of its position in all replicas; asked for only if replicas are summed."""
        found = first(each.column(self) for each in features())
        assert found is not None
        return found

    def gather(self, full: Tensor, plan: BucketPlan, state: str) -> Work:
        """Gather a whole bucket in place: each shard of `full` becomes that of its owner, on every rank."""
        nbytes, own = full.numel() * full.itemsize, plan.shard_numel(self.position) * full.itemsize
        sent, received = own * (self.size - 1), nbytes - own
        event = self.count("gather", nbytes, sent, received, state, plan.index)
        handles = self._gather(full, plan, state)
        work = Work(handles, event, functools.partial(self.wait, "gather", plan.index))
        if self.shares:
            work.lends(self.ledger, own)
        return work

    def messages(self, tier: Any) -> Any:
        """Return the memory that messages are taken from: the tier's, or memory that other ranks can read."""
        return tier

    @property
    def room(self) -> int:
        """The number of contributions to its shard that a rank reserves memory for: the same on all ranks."""
        return 0 if self.shares else room(self.size)

    def contributions(self, send: Tensor, receive: Tensor, plan: BucketPlan, sources: int = 1) -> list[Tensor]:
        """Return each rank's contribution to this rank's shard, in rank order, once a reduction is through.

        With several sources, a rank's contributions are those of the ranks at its position in the team of each part.
        """
        first, last = plan.shard(self.position)
        found: list[list[Tensor]] = []
        for sent, came in self._by_source(send, receive, plan, sources):
            pieces = list(came.view(self.arriving, last - first).unbind(0)) if self.arriving else []
            if self.arriving < self.size:
                pieces.insert(self.position, sent[first:last])
            found.append(pieces)
        return self.seat.grid.in_rank_order(self.seat.axis, found)

    def _by_source(self, send: Tensor, receive: Tensor, plan: BucketPlan, sources: int) -> list[tuple[Tensor, Tensor]]:
        """Return for each source the tensor that is sent, and the memory that contributions arrive in."""
        own = plan.shard_numel(self.position)
        room, came = receive.numel() // sources, self.arriving * own
        return [
            (send[at * plan.numel : (at + 1) * plan.numel], receive[at * room : at * room + came])
            for at in range(sources)
        ]

    def reduce(self, send: Tensor, receive: Tensor, plan: BucketPlan, sources: int = 1) -> Work:
        """Send every rank's contribution to each shard to the shard's owner.

        receive (`room` x this rank's shard, 1-D) gets `arriving` contributions to this rank's shard, in rank order. If
        there are several sources, `send` and `receive` hold a part for each, one after the other.
        """
        event = self._count_reduce(send, plan, sources)
        return self._reduction(self._reduce(send, receive, plan, sources), event, plan)

    def reduce_native(self, send: Tensor, receive: Tensor, plan: BucketPlan) -> Work:
        """Reduce by the backend: receive (this rank's shard) gets its sum of all contributions."""
        event = self._count_reduce(send, plan)
        return self._reduction(self._reduce_native(send, receive, plan), event, plan)

    def broadcast(self, tensor: Tensor, position: int) -> None:
        """Copy the tensor of the rank at a position to every rank of the team."""
        nbytes = tensor.numel() * tensor.itemsize
        sent, received = (nbytes, 0) if self.position == position else (0, nbytes)
        event = count(self.ledger, self.size, "broadcast", nbytes, sent, received)
        handles = self._broadcast(tensor, position) if nbytes else []
        Work(handles, event, lambda handle: self.wait("a broadcast", None, handle)).wait()

    def _count_reduce(self, send: Tensor, plan: BucketPlan, sources: int = 1) -> Event | None:
        nbytes, own = send.numel() * send.itemsize, plan.shard_numel(self.position) * send.itemsize * sources
        sent, received = nbytes - own, own * (self.size - 1)
        return self.count("reduce", nbytes, sent, received, "gradients", plan.index)

    def count(self, verb: str, nbytes: int, sent: int, received: int, state: str, bucket: int) -> Event | None:
        """Count a collective of the team."""
        if self.shares:
            return self.ledger.move(
                verb, logical=nbytes, sent=0, received=0, state=state, bucket=bucket, shared=received
            )
        return count(self.ledger, self.size, verb, nbytes, sent, received, state, bucket)

    def _reduction(self, handles: list[Any], event: Event | None, plan: BucketPlan) -> Work:
        return Work(handles, event, functools.partial(self.wait, "reduce", plan.index), shares=self.shares)

    def _broadcast(self, tensor: Tensor, position: int) -> list[Any]:
        return []

    def _gather(self, full: Tensor, plan: BucketPlan, state: str) -> list[Any]:
        return []

    def _reduce(self, send: Tensor, receive: Tensor, plan: BucketPlan, sources: int) -> list[Any]:
        return []

    def _reduce_native(self, send: Tensor, receive: Tensor, plan: BucketPlan) -> list[Any]:
        if self.size == 1:
            receive.copy_(send)
        return []

    def wait(self, verb: str, bucket: int | None, handle: Any) -> None:
        pass


def count(
    ledger: Ledger,
    ranks: int,
    verb: str,
    nbytes: int,
    sent: int,
    received: int,
    state: str = "",
    bucket: int | None = None,
) -> Event | None:
    """Count a collective of `ranks` ranks. One rank alone moves nothing, and only notes that it would have."""
    if ranks == 1:
        return ledger.note(verb, state=state, bucket=bucket, logical=nbytes)
    return ledger.move(verb, logical=nbytes, sent=sent, received=received, state=state, bucket=bucket)
