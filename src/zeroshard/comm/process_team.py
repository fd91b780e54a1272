"""The verbs of `transport.py` between processes: over `torch.distributed`, or through memory that they share."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from ..events import Ledger
from ..layout.partition import BucketPlan
from ..layout.stage import Seat
from .collectives import Link, all_gather, dtype_name, to_each
from .launch_log import Stream
from .shared_memory import Exchange, Messages, SharedStream
from .transport import Team


class ProcessTeam(Team):
    """The verbs of data over `torch.distributed`."""

    def __init__(
        self,
        ledger: Ledger,
        device: torch.device,
        link: Link,
        sits: Seat,
        streams: Sequence[Stream],
        shared: Sequence[SharedStream] = (),
    ) -> None:
        """streams: of gathers and of reductions. shared: the same two, if they go through shared memory."""
        super().__init__(ledger, device, sits, shares=bool(shared))
        self.link = link
        self.queued = link.groups.queued
        self._gathers, self._reductions = streams
        self.gathering = [streams[0], *shared[:1]]
        self._global = [link.groups.ranks[rank] for rank in sits.members(link.rank)]  # the team's
        self.memory = Exchange(link, sits, [*sits.members(link.rank)], shared) if self.shares else None

    def messages(self, tier: Any) -> Any:
        return tier if self.memory is None else Messages(self.memory.host, tier)

    def contributions(self, send: Tensor, receive: Tensor, plan: BucketPlan, sources: int = 1) -> list[Tensor]:
        if self.memory is None:
            return super().contributions(send, receive, plan, sources)
        return self.memory.contributions(send, plan, sources)

    def _gather(self, full: Tensor, plan: BucketPlan, state: str) -> list[Any]:
        if self.size == 1:
            return []
        if self.memory is not None:
            return self.memory.gather(full, plan, state)
        raw, link, stream = full.view(torch.uint8), self.link, self._gathers
        cuts = [bound * full.itemsize for bound in plan.bounds]
        if self.queued and len({high - low for low, high in pairwise(cuts)}) == 1:
            own = raw[cuts[self.position] : cuts[self.position + 1]]
            what = "all_gather", link.engine, plan.index, own.numel(), state
            return [link.launch(stream, what, *all_gather(stream, raw, own))]
        told = plan.index, state, raw.numel()
        return [
            link.broadcast(stream, raw[low:high], source, told, low)
            for source, (low, high) in zip(self._global, pairwise(cuts), strict=True)
            if high > low
        ]

    def to_owners(self, send: Tensor, receive: Tensor, plan: BucketPlan) -> tuple[Any, ...]:
        """Return the call that sends every rank's contribution to each shard to the shard's owner."""
        bounds = plan.bounds
        own = [bounds[self.position + 1] - bounds[self.position]] * self.size
        splits = [high - low for low, high in pairwise(bounds)]
        if self.arriving < self.size:
            send = send[bounds[1] :] if self.position == 0 else send[: bounds[-2]]
            own[self.position] = splits[self.position] = 0
        return to_each(self._reductions, send, receive, splits, own)

    def scatter(self, send: Tensor, receive: Tensor, plan: BucketPlan) -> tuple[Any, ...]:
        """Return the call that sends the backend's sum of all contributions to each shard's owner."""
        group, options = self._reductions.group, c10d.ReduceScatterOptions()
        options.asyncOp = True
        return getattr(group, "reduce_scatter_single", None) or group._reduce_scatter_base, receive, send, options

    def _reduce(self, send: Tensor, receive: Tensor, plan: BucketPlan, sources: int) -> list[Any]:
        if self.size == 1:
            return []
        if self.memory is not None:
            return self.memory.reduce(send, plan)
        what, link = ("reduce", self.link.engine, plan.index, dtype_name(send.dtype)), self.link
        return [
            link.launch(self._reductions, what, *self.to_owners(sent, came, plan))
            for sent, came in self._by_source(send, receive, plan, sources)
        ]

    def _reduce_native(self, send: Tensor, receive: Tensor, plan: BucketPlan) -> list[Any]:
        if self.size == 1:
            return super()._reduce_native(send, receive, plan)
        what, link = ("reduce natively", self.link.engine, plan.index, dtype_name(send.dtype)), self.link
        return [link.launch(self._reductions, what, *self.scatter(send, receive, plan))]

    def _broadcast(self, tensor: Tensor, position: int) -> list[Any]:
        if self.size == 1:
            return []
        raw = tensor.view(torch.uint8)
        return [self.link.broadcast(self._gathers, raw, self._global[position], (-1, "", raw.numel()), 0)]

    def wait(self, verb: str, bucket: int | None, handle: Any) -> None:
        self.link.wait(verb, bucket, handle, queued=self.queued)
