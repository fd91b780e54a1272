"""Collectives under way: what each rank has put in, and what lands where.

A message is read when it lands, as gloo reads it: who changes it before has sent the change. It is moved as bytes, by
no operation of torch's: that would depend on the modes of whichever thread has the baton, and count as an edit.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import UserError
from .rank import GONE

if TYPE_CHECKING:
    from .group import Group

ENDED = "the world ended before it came"
POISON = 0xFF  # bytes of which every floating-point number is NaN


class Payload:
    """Memory that a rank has put in."""

    def __init__(self, tensor: Tensor) -> None:
        if tensor.device.type != "cpu":
            raise UserError(
                f"a message on {tensor.device}: ranks of zeroshard.world(...) send through host memory; keep the model "
                "on the CPU, or run the program with torchrun"
            )
        self._keep: Any = tensor if tensor.is_contiguous() else tensor.detach().contiguous()
        self.dtype, self.nbytes, self.address = tensor.dtype, tensor.numel() * tensor.itemsize, self._keep.data_ptr()

    def bytes(self) -> bytes:
        return ctypes.string_at(self.address, self.nbytes) if self.nbytes else b""

    def detach(self) -> None:
        """Keep what it holds now, whatever becomes of the memory."""
        if self.nbytes:
            self._keep = ctypes.create_string_buffer(self.bytes(), self.nbytes)
            self.address = ctypes.addressof(self._keep)

    def tensor(self) -> Tensor:
        if not self.nbytes:
            return torch.empty(0, dtype=self.dtype, device="cpu")
        return torch.frombuffer(bytearray(self.bytes()), dtype=self.dtype)


def put(into: Tensor, part: Payload, at: int = 0) -> None:
    """Write it into a tensor, from that byte on."""
    if not into.is_contiguous():
        aside(lambda: into.detach().copy_(part.tensor().view(into.shape)))
    elif part.nbytes:
        ctypes.memmove(into.data_ptr() + at, part.address, part.nbytes)


def aside(call: Callable[[], Any]) -> Any:
    """Call it on a thread that is in none of torch's modes."""
    return _aside.submit(call).result()


_aside = ThreadPoolExecutor(1)


_ADD: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SUM": torch.add, "AVG": torch.add, "PRODUCT": torch.mul, "MAX": torch.maximum, "MIN": torch.minimum,
    "BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor,
}  # fmt: skip


def reduced(parts: Sequence[Payload], op: Any) -> Payload:
    """All of them in one, in the order of the ranks."""
    name = str(getattr(op, "op", op)).rpartition(".")[2]

    def reduce() -> Payload:
        total = parts[0].tensor()
        for part in parts[1:]:
            total = _ADD[name](total, part.tensor())
        return Payload(total / len(parts) if name == "AVG" else total)

    total: Payload = aside(reduce)
    return total


class Flight:
    """One collective of all its ranks."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.works: dict[int, Work] = {}

    def comes(self, work: Work) -> list[Work]:
        """A rank has come to it. Returns the works that can land since then."""
        self.works[work.rank] = work
        work.missing.difference_update(self.works)
        can = [] if work.missing else [work]
        for each in self.works.values():
            if work.rank in each.missing:
                each.missing.discard(work.rank)
                if not each.missing and not each.failed:
                    can.append(each)
        return can


class Work(dist.Work):
    """One rank's part of a collective: the handle that it waits with."""

    def __init__(
        self,
        group: Group,
        name: str,
        flight: Flight,
        needs: Iterable[int],
        gives: Sequence[Tensor],
        takes: Sequence[Tensor],
        write: Callable[[dict[int, list[Payload]]], object],
    ) -> None:
        """needs: the ranks without whose parts it cannot land. write: writes all ranks' parts into `takes`."""
        super().__init__()
        self.group, self.name, self.flight, self.rank = group, name, flight, group.rank()
        self.needs, self._write = set(needs) - {self.rank}, write
        self.missing = set(self.needs)  # of these, who has not come
        self.gives = [Payload(each) for each in gives]
        self._lies = [(each, each.data_ptr()) for each in (*gives, *takes) if each.numel()]
        self.schedule = group.world.schedule
        self.landed, self.failed, self.wanted = False, "", False
        self.since, self.dies = self.schedule.clock, self.schedule.clock + group.limit
        self.patience = self.schedule.draws.lateness()
        self._sums: list[int] = []
        if group.world.strict:
            self._guard(takes)

    def __str__(self) -> str:
        return f"{self.name} on rank {self.rank}"

    def _guard(self, takes: Sequence[Tensor]) -> None:
        """Guard memory under way: what is to come may not be read, what is sent may not be changed."""
        sent = [part.bytes() for part in self.gives]
        for each in takes:
            if each.is_contiguous() and each.numel():
                ctypes.memset(each.data_ptr(), POISON, each.numel() * each.itemsize)
        for part, held in zip(self.gives, sent, strict=True):  # it may lie inside
            if held:
                ctypes.memmove(part.address, held, len(held))
        self._sums = [zlib.crc32(each) for each in sent]

    def launched(self) -> Work:
        self.schedule.launch(self, self.flight.comes(self))
        return self

    def land(self) -> None:
        complain = self.group.world.complain
        self.landed = True
        if any(each.data_ptr() != place or not each.untyped_storage().nbytes() for each, place in self._lies):
            complain(f"memory of {self} was given back while it was under way")
            for part in self.gives:
                part.nbytes = 0
            return
        if any(zlib.crc32(part.bytes()) != held for part, held in zip(self.gives, self._sums, strict=False)):
            complain(f"memory of {self} was changed while it was under way")
        others = [each for rank, each in self.flight.works.items() if rank != self.rank]
        last = len(others) + 1 == self.flight.size and all(each.landed for each in others)
        for part in () if last else self.gives:  # sent, and the sender's again
            part.detach()
        self._write({rank: self.flight.works[rank].gives for rank in self.needs | {self.rank}})
        self._lies = []
        if last:  # else only the collector could free it: it refers to itself
            self.flight.works.clear()

    def fails(self, error: Exception) -> None:
        """Note that it cannot land."""
        self.landed = False
        together = [work for _, work in sorted(self.flight.works.items())]
        works = ", ".join(f"{each} gives {sum(part.nbytes for part in each.gives)} bytes" for each in together)
        self.failed = f"do all ranks call the same, with the same sizes? {works} ({type(error).__name__}: {error})"

    def _ended(self) -> bool:
        """Has it landed, or failed?"""
        if not (self.landed or self.failed):
            ranks = self.group.world.ranks
            if not ranks:
                self.failed = ENDED
            elif self.missing and any(ranks[self.group.members[each]].away == GONE for each in self.missing):
                self.failed = "Connection closed by peer"
            elif self.schedule.clock >= self.dies:
                self.failed = f"Timed out waiting {1000 * self.group.limit:.0f}ms for recv operation to complete"
            if self.failed:
                self.schedule.lost(self)
        return self.landed or bool(self.failed)

    def is_completed(self) -> bool:
        self.schedule.point("polls")
        return self._ended()

    def is_success(self) -> bool:
        return self.landed

    def wait(self, timeout: timedelta | None = None) -> bool:
        limit, self.wanted = timeout.total_seconds() if timeout else None, True
        if self.schedule.draws.seed is None and not (self.missing or self.landed or self.failed):
            self.schedule._land(self)
        absent = [self.group.members[each] for each in sorted(self.missing)]
        self.schedule.wait(
            self._ended, limit, f"waits for {self.name}" + (f", to which ranks {absent} have not come" * bool(absent))
        )
        if not self.landed and limit is None:
            raise RuntimeError(self.failed or ENDED)
        return (
            self.landed
        )  # False, not an exception: `link._wait_in_slices` takes one with a Python frame for a signal's

    def get_future(self) -> Any:
        self.wait()
        future: Any = torch.futures.Future()
        future.set_result([])
        return future
