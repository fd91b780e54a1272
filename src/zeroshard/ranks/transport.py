"""What the ranks of a team move: one-dimensional tensors, each rank's own part of a bucket.

    verb       moves                                             over torch.distributed (`process_group.py`)
    gather     every rank's shard into everybody's full bucket   N broadcasts in place (gloo); all_gather_single (NCCL)
    reduce     every rank's contribution to each shard's owner   all_to_all_single, summed by `numerics.fold`

A *team* is the ranks that shard a bucket among themselves. A rank's `position` in it says which shard is its own
(`stage.Seat`).
Agreement between all ranks, whatever they shard, is in `agreement.py`.

Why not the backend's reduce-scatter: gloo's is an all-reduce inside (twice the bytes), and its order of summation
depends on where an element lies in the buffer; see docs/decisions/ordered-sum.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..events import Event, Ledger, ends
from ..headroom import room
from ..layout import Bucket
from ..stage import ALONE, Seat


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


class Team:
    """One rank's end of a team, and what it counts. By itself it sends nothing.

    With one rank there is nothing to send. With more it is one position of a simulation, whose peers all do the same.
    """

    def __init__(self, ledger: Ledger, device: torch.device, seat: Seat = ALONE) -> None:
        self.ledger = ledger
        self.device = device
        self.seat = seat
        self.position = seat.position
        self.size = seat.size

    def gather(self, full: Tensor, bucket: Bucket, state: str) -> Work:
        """Each shard of `full`, a whole bucket, becomes that of its owner, on every rank, in place."""
        nbytes, own = full.numel() * full.itemsize, bucket.shard_numel(self.position) * full.itemsize
        sent, received = own * (self.size - 1), nbytes - own
        event = count(self.ledger, self.size, "gather", nbytes, sent, received, state, bucket.index)
        return Work(self._gather(full, bucket.bounds), event, lambda handle: self._wait("gather", bucket.index, handle))

    @property
    def arriving(self) -> int:
        """How many contributions to the own shard a reduction brings.

        This rank's own contribution stays where it is, in what is sent, if that is at either end of it: what is sent
        must be contiguous. Elsewhere it is copied as the others are.
        """
        return self.size - (self.position in (0, self.size - 1))

    @property
    def room(self) -> int:
        """For how many contributions to the own shard there is room: on all ranks the same, and what a bucket takes."""
        return room(self.size)

    def contributions(self, send: Tensor, receive: Tensor, bucket: Bucket) -> list[Tensor]:
        """Each rank's contribution to the own shard, in rank order, once a reduction is through."""
        first, last = bucket.shard(self.position)
        arrived = receive[: self.arriving * (last - first)]
        pieces = list(arrived.view(self.arriving, last - first).unbind(0)) if self.arriving else []
        if self.arriving < self.size:
            pieces.insert(self.position, send[first:last])
        return pieces

    def reduce(self, send: Tensor, receive: Tensor, bucket: Bucket) -> Work:
        """receive (`room` x own shard, 1-D) gets `arriving` contributions to the own shard, in rank order."""
        event = self._count_reduce(send, bucket)
        receive = receive[: self.arriving * bucket.shard_numel(self.position)]
        return self._reduction(self._reduce(send, receive, bucket.bounds), event, bucket)

    def reduce_native(self, send: Tensor, receive: Tensor, bucket: Bucket) -> Work:
        """receive (own shard) gets the backend's sum of all contributions."""
        event = self._count_reduce(send, bucket)
        return self._reduction(self._reduce_native(send, receive), event, bucket)

    def _count_reduce(self, send: Tensor, bucket: Bucket) -> Event | None:
        nbytes, own = send.numel() * send.itemsize, bucket.shard_numel(self.position) * send.itemsize
        sent, received = nbytes - own, own * (self.size - 1)
        return count(self.ledger, self.size, "reduce", nbytes, sent, received, "gradients", bucket.index)

    def _reduction(self, handles: list[Any], event: Event | None, bucket: Bucket) -> Work:
        return Work(handles, event, lambda handle: self._wait("reduce", bucket.index, handle))

    def _gather(self, full: Tensor, bounds: Sequence[int]) -> list[Any]:
        return []

    def _reduce(self, send: Tensor, receive: Tensor, bounds: Sequence[int]) -> list[Any]:
        return []

    def _reduce_native(self, send: Tensor, receive: Tensor) -> list[Any]:
        if self.size == 1:
            receive.copy_(send)
        return []

    def _wait(self, verb: str, bucket: int, handle: Any) -> None:
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
    """Count a collective of so many ranks. One rank alone moves nothing, and only notes that it would have."""
    if ranks == 1:
        return ledger.note(verb, state=state, bucket=bucket, logical=nbytes)
    return ledger.move(verb, logical=nbytes, sent=sent, received=received, state=state, bucket=bucket)
