"""One copy of the parameters for all ranks of a host, which compute with it in place, as on the device.

Each owner writes its shard into memory that all ranks of the host read. What a rank writes outside its shard stays
private, as in a copy of its own, until the next gather drops it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..comm.launch_log import Launch
from ..comm.shared_memory import Exchange, join
from ..comm.transport import Team, Work
from ..device import ask
from ..errors import UserError
from ..events import SHARED, Ledger
from ..hooks import Feature
from ..layout.partition import BucketPlan
from ..tiers.tier import OnDevice, Rest, Tier

if TYPE_CHECKING:
    from ..engine.build.assembly import Assembly


class OneCopy(OnDevice):
    """One bucket's parameters in memory that all ranks of a team read. A gather moves nothing."""

    lands_at_once = True  # landing drops what this rank has written itself

    def __init__(self, tensor: Tensor, pages: Pages | None) -> None:
        """pages: those that the tensor lies in, if several ranks really run; else None."""
        super().__init__(tensor)
        self._pages = pages

    def gather(self, team: Team, plan: BucketPlan, state: str) -> Work:
        itemsize = self.tensor.itemsize
        sent = plan.shard_numel(team.position) * (team.size - 1) * itemsize
        event = team.count("gather", plan.numel * itemsize, sent, 0, state, plan.index)
        first, last = (bound * itemsize for bound in plan.shard(team.position))
        handles = [self._pages.publish(first, last)] if self._pages else []
        return Work(handles, event, lambda handle: team.wait("gather", plan.index, handle))


class Pages:
    """The pages of one bucket that all ranks map: see `shared_memory.Whole`.

    Once all owners have written to the shared pages, a rank drops its private pages, which would hide what others
    have written.
    """

    def __init__(self, exchange: Exchange, bucket: int, nbytes: int) -> None:
        self._exchange = exchange
        self._bucket = bucket
        self._nbytes = nbytes
        self._window, self._own = exchange.whole(nbytes)
        exchange.joins["publish", bucket] = self._take_part

    def tensor(self, dtype: torch.dtype) -> Tensor:
        """Return all pages as a 1-D tensor; this rank's writes to it are private."""
        return self._own[: self._nbytes].view(dtype)

    def publish(self, first: int, last: int) -> Any:
        """Copy this rank's bytes [first, last) to the shared pages; once all ranks have, drop its private pages."""
        self._window[first:last].copy_(self._own[first:last])
        return self._exchange.tell("publish", self._bucket, self._nbytes, lambda posted: self.forget())

    def _take_part(self, stream: Any, what: Launch, own: Tensor, first: int) -> None:
        """Join a `publish` that others have launched, in a levelling. own: this rank's bytes, from `first` on."""
        self._window[first : first + own.numel()].copy_(own)
        join(stream, what, None, lambda posted: self.forget())

    def private(self) -> list[tuple[int, int]]:
        """Return the runs of bytes [first, last) that this rank has written to since they were last dropped."""
        address, pages = self._own.data_ptr(), self._own.numel() // mmap.PAGESIZE
        with open("/proc/self/pagemap", "rb", buffering=0) as table:
            told = os.pread(table.fileno(), 8 * pages, 8 * (address // mmap.PAGESIZE))
        words = torch.frombuffer(bytearray(told), dtype=torch.int64)
        # Of the kernel's 64 bits the last says "in memory", the one before "swapped", the one before "of a file".
        written = ((words < 0) | (words >> 62 & 1).bool()) & ~(words >> 61 & 1).bool()
        padded = torch.nn.functional.pad(written.to(torch.int8), (1, 1))
        edges = padded.diff()
        bounds = (ask(edges == edge).nonzero().flatten() for edge in (1, -1))
        starts, ends = (ask(each).tolist() for each in bounds)
        return [(first * mmap.PAGESIZE, last * mmap.PAGESIZE) for first, last in zip(starts, ends, strict=True)]

    def forget(self) -> None:
        """Drop private pages, so that this rank reads again what all ranks share."""
        libc = ctypes.CDLL(None, use_errno=True)
        for first, last in self.private():
            place = ctypes.c_void_p(self._own.data_ptr() + first)
            if libc.madvise(place, ctypes.c_size_t(last - first), mmap.MADV_DONTNEED):
                raise OSError(ctypes.get_errno(), "private pages of shared parameters could not be given back")


class SharedTier(Tier):
    """Memory that all ranks of a team read, and of which each owner writes its shard."""

    name = SHARED
    on_device = True
    meets = True  # from the end of a step on ranks write memory that others read

    def __init__(self, team: Team, ledger: Ledger) -> None:
        self._team = team
        self.device = team.device
        self.ledger = ledger

    def rest(self, state: str, bucket: int, numel: int, dtype: torch.dtype) -> Rest:
        nbytes, exchange = numel * dtype.itemsize, self._team.memory
        pages = Pages(exchange, bucket, nbytes) if exchange else None
        rest = OneCopy(pages.tensor(dtype) if pages else torch.zeros(numel, dtype=dtype, device=self.device), pages)
        self.ledger.hold(state, nbytes, SHARED)
        return rest


class SharedParametersFeature(Feature):
    name = "one copy per host"
    page = "offload.md"

    def check(self, assembly: Assembly, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Refuse one copy if teams hold different parts of the parameters, or off the CPU."""
        if not assembly.offload.once:
            return
        group, plans = assembly.group, assembly.partition.buckets
        apart = any(group.team_of(plan) is not group.team for plan in plans)
        if apart or group.device.type != "cpu":
            parts = "parameters along an axis of the mesh" if apart else f"on {group.device}"
            raise UserError(
                "one copy of the parameters for a host is for the CPU, and for parameters that all ranks shard",
                got=f"Offload(parameters='shared'), {parts}",
                instead="Offload()",
            )

    def tier(self, name: str, assembly: Assembly, largest: dict[str, int], nbytes: int) -> SharedTier | None:
        return SharedTier(assembly.group.team, assembly.group.ledger) if name == SHARED else None


FEATURE = SharedParametersFeature()
