"""What the ranks of a team move: one-dimensional tensors, each rank's own part of a bucket.

    verb       moves                                             over torch.distributed (`process_group.py`)
    gather     every rank's shard into everybody's full bucket   N broadcasts in place (gloo); all_gather_single (NCCL)
    reduce     every rank's contribution to each shard's owner   all_to_all_single, summed by `numerics.fold`

A *team* is the ranks that shard a bucket among themselves. A rank's `position` in it says which shard is its own.
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

from .events import Event, Ledger, ends


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

    def __init__(self, ledger: Ledger, device: torch.device, position: int = 0, size: int = 1) -> None:
        self.ledger = ledger
        self.device = device
        self.position = position
        self.size = size

    def gather(self, full: Tensor, bounds: Sequence[int], state: str, bucket: int) -> Work:
        """full[bounds[r]:bounds[r+1]] becomes that of position r, on every rank, in place."""
        nbytes = full.numel() * full.itemsize
        own = self.own(bounds) * full.itemsize
        event = count(self.ledger, self.size, "gather", nbytes, own * (self.size - 1), nbytes - own, state, bucket)
        return Work(self._gather(full, bounds), event, lambda handle: self._wait("gather", bucket, handle))

    def own(self, bounds: Sequence[int]) -> int:
        """The number of elements in this rank's own shard."""
        return bounds[self.position + 1] - bounds[self.position]

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
        return self.size if self.size > 2 else self.arriving

    def contributions(self, send: Tensor, receive: Tensor, bounds: Sequence[int]) -> list[Tensor]:
        """Each rank's contribution to the own shard, in rank order, once a reduction is through."""
        own = self.own(bounds)
        pieces = list(receive[: self.arriving * own].view(self.arriving, own).unbind(0)) if self.arriving else []
        if self.arriving < self.size:
            pieces.insert(self.position, send[bounds[self.position] : bounds[self.position + 1]])
        return pieces

    def reduce(self, send: Tensor, receive: Tensor, bounds: Sequence[int], bucket: int) -> Work:
        """receive (`room` x own shard, 1-D) gets `arriving` contributions to the own shard, in rank order."""
        own = self.own(bounds)
        event = self._count_reduce(send, own, bucket)
        handles = self._reduce(send, receive[: self.arriving * own], bounds)
        return Work(handles, event, lambda handle: self._wait("reduce", bucket, handle))

    def reduce_native(self, send: Tensor, receive: Tensor, bucket: int) -> Work:
        """receive (own shard) gets the backend's sum of all contributions."""
        event = self._count_reduce(send, receive.numel(), bucket)
        return Work(self._reduce_native(send, receive), event, lambda handle: self._wait("reduce", bucket, handle))

    def _count_reduce(self, send: Tensor, own: int, bucket: int) -> Event | None:
        nbytes, own = send.numel() * send.itemsize, own * send.itemsize
        received = own * (self.size - 1)
        return count(self.ledger, self.size, "reduce", nbytes, nbytes - own, received, "gradients", bucket)

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
