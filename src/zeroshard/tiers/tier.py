"""Tiers, in which states rest: the device, host memory, or (nvme.py) files. `offload.py` says which, state by state.

A tier makes *rests*. A `Rest` is one state of one bucket: in memory it is a tensor and nothing more; in a file it is
brought to memory for as long as a block `with rest.here():` runs, and written back. Code that computes with a state
uses such a block, and need not know which tier it is in.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..arithmetic.sums import same_bits, simulated
from ..comm.reduce_pipeline import Memory
from ..comm.transport import Team, Work
from ..device import DeviceEvent, Leaving, asynchronous, blank, copies, event, pin, sent
from ..events import DEVICE, HOST, Ledger
from ..layout.limits import LEAVING, PIECES
from ..layout.partition import BucketPlan
from .pool import Pool, zeros


class Rest:
    """One state of one bucket at rest in memory: `tensor`, 1-D, always there."""

    on_device = False  # does `tensor` lie in memory that the device computes with?
    on_demand = False  # is `tensor` there only inside `here()`?
    pinned = False  # does the device copy from and to it by itself, with no wait of the host?
    gives = False  # do `give` and `take` need no `here()` around them?
    coded = False  # does it rest in another format than `tensor` has?
    lands_at_once = False  # must a gather into it land before the program goes on?

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor = tensor

    @contextlib.contextmanager
    def here(self, *, changed: bool = True, fresh: bool = False) -> Iterator[Tensor]:
        """Bring `tensor` to memory for the block; if `changed`, keep its changes afterwards. May nest.

        fresh: all of it will be written, so its old content need not be brought.
        """
        yield self.tensor

    @contextlib.contextmanager
    def some(self, start: int, stop: int, *, changed: bool) -> Iterator[Tensor]:
        """Bring elements [start, stop) to memory for the block, as `here` does."""
        with self.here(changed=changed) as tensor:
            yield tensor[start:stop]

    def ahead(self) -> None:
        """Begin to bring it to memory, because it will soon be used."""

    def behind(self) -> None:
        """Begin to put back what was changed, because it will not be used soon."""

    def take(self, start: int, values: Tensor, *, fresh: bool) -> DeviceEvent:
        """Replace elements from `start` on by values of the device. Do not change those before the returned event.

        fresh: no other elements of this rest count.
        """
        with self.here(fresh=fresh) as tensor:
            tensor[start : start + values.numel()].copy_(values)
        return event(values.device)

    def give(self, start: int, to: Tensor) -> None:
        """Fill `to`, of the device, with elements from `start` on, in the order of the current stream."""
        self.bring(start, to).wait()

    def bring(self, start: int, to: Tensor) -> DeviceEvent:
        """Begin to fill `to`, of the device, with elements from `start` on. It is filled at the event."""
        with self.here(changed=False) as tensor:
            to.copy_(tensor[start : start + to.numel()])
        return event(to.device)

    def take_each(self, parts: Sequence[tuple[int, Tensor]]) -> DeviceEvent:
        """`take` several runs of (start, values). No other elements of this rest count."""
        return [self.take(start, values, fresh=True) for start, values in parts][-1]

    def give_each(self, parts: Sequence[tuple[int, Tensor]]) -> None:
        """`give` several runs of (start, to)."""
        for start, to in parts:
            self.give(start, to)

    def gather(self, team: Team, plan: BucketPlan, state: str) -> Work:
        """Bring every owner's elements to all ranks of the team, here, where the whole bucket rests."""
        return team.gather(self.tensor, plan, state)

    def forget(self) -> None:
        """Drop changes in memory without writing them back: the content at rest counts."""

    def clear(self) -> None:
        """Take note that its content does not count any more."""

    def same_as(self, tensor: Tensor) -> bool:
        """Tell if the bits of `tensor` are the ones that rest here."""
        return same_bits(tensor.to(self.tensor.device), self.tensor)

    def at_rest(self, part: Part) -> Part:
        """Return the elements of a part of this rest in the format in which they rest, as checkpoints have them."""
        return part


class OnDevice(Rest):
    """A rest in the memory that the device computes with."""

    on_device = True


class Pinned(Rest):
    """A rest in host memory, with which a device copies asynchronously: `here` waits until the copies are through."""

    pinned = gives = True

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor)
        self._written = self._read = DeviceEvent()  # the ends of the device's last write here, and last read

    @contextlib.contextmanager
    def here(self, *, changed: bool = True, fresh: bool = False) -> Iterator[Tensor]:
        self._written.finish()
        if changed:
            self._read.finish()
        yield self.tensor

    def take(self, start: int, values: Tensor, *, fresh: bool) -> DeviceEvent:
        self._read.wait()  # earlier takes need no wait: they are in the same stream
        self._written = sent(self.tensor[start : start + values.numel()], values)
        return self._written

    def bring(self, start: int, to: Tensor) -> DeviceEvent:
        self._written.wait()
        self._read = sent(to, self.tensor[start : start + to.numel()])
        return self._read

    def same_as(self, tensor: Tensor) -> bool:
        self._written.finish()
        return super().same_as(tensor)


class Part(NamedTuple):
    """Elements [start, stop) of what rests, in a shape: a tensor that need not be in memory."""

    rest: Rest
    start: int
    stop: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    def numel(self) -> int:
        return self.stop - self.start

    def cut(self, start: int, stop: int) -> Part:
        """Return elements [start, stop) of this part, 1-D."""
        return Part(self.rest, self.start + start, self.start + stop, (stop - start,), self.dtype)

    def plain(self) -> Tensor | Part:
        """Return the tensor itself if it is always in memory, else this part."""
        moves = self.rest.on_demand or self.rest.pinned
        return self if moves else self.rest.tensor[self.start : self.stop].view(self.shape)

    @contextlib.contextmanager
    def here(self, *, changed: bool = False) -> Iterator[Tensor]:
        with self.rest.some(self.start, self.stop, changed=changed) as tensor:
            yield tensor.view(self.shape)


@contextlib.contextmanager
def present(tensor: Tensor | Part, *, changed: bool = False) -> Iterator[Tensor]:
    """Bring a tensor to memory for the block, wherever it rests."""
    if isinstance(tensor, Part):
        with tensor.here(changed=changed) as found:
            yield found
    else:
        yield tensor


@dataclass
class Steps:
    """The steps of one optimizer: how many it has done, and whether one runs now. Some formats round by the count.

    saved: does a checkpoint have the count?
    """

    done: int = 0
    running: bool = False
    saved: bool = False


class Tier(Protocol):
    """Storage for states: zero-filled when reserved, unless said otherwise, counted by state until given back."""

    name: str
    on_device: bool = False  # does what rests here lie in memory that the device computes with?
    on_demand: bool = False  # does what rests here lie in memory only while it is used?
    meets: bool = False  # after a step that writes here, must each rank wait until all have written?
    decodes: torch.dtype | None = None  # the dtype in which an optimizer updates what rests in a narrower one
    device: torch.device  # where the tensors of this tier's rests are, while in memory
    ledger: Ledger

    def rest(self, state: str, bucket: int, numel: int, dtype: torch.dtype) -> Rest:
        """Reserve room for one state of one bucket, zeros."""
        ...

    def of(self, key: str, steps: Steps) -> Tier:
        """Return the tier for an optimizer's own state, which may rest in another format there. key: its name."""
        return self

    def decoded(self, updated: Tensor, steps: Steps) -> contextlib.AbstractContextManager[Tensor]:
        """Decode what an optimizer updates for one step of a bucket, and round it after that; see `decodes`."""
        raise AssertionError(f"parameters are updated as they rest, {self.name}")

    def give_up(self, state: str, rests: Sequence[Rest]) -> None:
        """Give back the room of some of this tier's rests."""
        raise AssertionError(f"{state} stays where it is, {self.name}")

    @contextlib.contextmanager
    def renewed(self) -> Iterator[None]:
        """Allow all that rests here to be written anew inside, also after a failure."""
        yield


@functools.cache
def keep_freed_memory() -> None:
    """Have malloc keep what is freed for the next step, up to 256 MiB: see docs/decisions/freed-memory.md.

    It does so for glibc's malloc only, and not if the environment configures malloc.
    """
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return
    trim_threshold, mmap_threshold = -1, -3  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD in malloc.h
    with contextlib.suppress(AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(mmap_threshold, 32 << 20)  # the most that mallopt takes; more than any CPU bucket
        libc.mallopt(trim_threshold, 256 << 20)


class DeviceTier(Tier, Memory[Tensor]):
    """Plain tensors on the compute device."""

    name = DEVICE
    on_device = True

    def __init__(self, device: torch.device, ledger: Ledger) -> None:
        if device.type == "cpu":
            keep_freed_memory()
        self.device = device
        self.ledger = ledger
        own = device.type == "cpu" and not simulated(
            torch.empty(0, device="cpu")
        )  # elsewhere torch's own allocator keeps memory
        self._pool = Pool() if own else None
        self.leaving = Leaving(LEAVING)  # weights on their way to where they rest
        self._pieces: list[tuple[Tensor, DeviceEvent]] = []  # pinned memory of the host, and until when it is read

    def reserve(self, state: str, numel: int, dtype: torch.dtype, *, zeroed: bool = True) -> Tensor:
        """Return a 1-D tensor of zeros, or with arbitrary content if not `zeroed`, counted under `state`."""
        if zeroed:
            tensor = zeros(numel, dtype) if self._pool else torch.zeros(numel, dtype=dtype, device=self.device)
        else:
            tensor = self._pool.take(numel, dtype) if self._pool else blank(numel, dtype, self.device)
        self.ledger.hold(state, numel * dtype.itemsize)  # not before there is memory
        return tensor

    def give_back(self, state: str, tensor: Tensor) -> None:
        """Stop counting a tensor, which may not be used any more. Its memory is kept, or goes when the caller drops
        it."""
        self.ledger.hold(state, -tensor.numel() * tensor.itemsize)
        if self._pool:
            self._pool.give_back(tensor)

    def leave(self, state: str, tensor: Tensor) -> None:
        """Stop counting a tensor, and leave its memory to the program, which keeps it."""
        self.ledger.hold(state, -tensor.numel() * tensor.itemsize)
        if self._pool:
            self._pool.leave(tensor)

    def rest(self, state: str, bucket: int, numel: int, dtype: torch.dtype) -> Rest:
        return OnDevice(self.reserve(state, numel, dtype))

    def send(self, to: Tensor, values: Tensor) -> None:
        """Fill `to`, of the device, with values of the host, in the order of the current stream. The values are cast on
        the host, so that the smaller number of bytes is copied."""
        through = sent(to, self._piece(to.numel(), to.dtype).copy_(values))
        through.wait()
        self._pieces[-1] = self._pieces[-1][0], through

    def fetch(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """Copy values of the device to the host, and wait. The copy is valid until the next fetch but one."""
        piece = self._piece(values.numel(), dtype)
        cast = values.to(dtype)  # held until it was read: memory that is dropped may be reused at once
        sent(piece, cast).finish()
        return piece

    def _piece(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return the pinned piece that was used longest ago, once the device has read it."""
        if len(self._pieces) < PIECES:
            self._pieces.insert(0, (torch.empty(0, dtype=torch.uint8, device="cpu"), DeviceEvent()))
        memory, through = self._pieces[0]
        through.finish()
        if memory.numel() < (nbytes := numel * dtype.itemsize):
            grown = pages(nbytes, self.device)
            self.ledger.hold("staging", grown.numel() - memory.numel(), HOST)
            memory = grown
        self._pieces[:] = [*self._pieces[1:], (memory, DeviceEvent())]
        return memory[:nbytes].view(dtype)


class HostTier(Tier):
    """Host memory: if the device is a GPU, pinned and exactly as large as asked (torch's own rounds up by half)."""

    name = HOST
    device = torch.device("cpu")

    def __init__(self, compute: torch.device, ledger: Ledger) -> None:
        self.compute = compute
        self.ledger = ledger

    def rest(self, state: str, bucket: int, numel: int, dtype: torch.dtype) -> Rest:
        nbytes = numel * dtype.itemsize
        if not asynchronous(self.compute):  # its memory is the host's already
            rest = Rest(torch.zeros(numel, dtype=dtype, device="cpu"))
        else:
            rest = Pinned(pages(nbytes, self.compute)[:nbytes].view(dtype))
        self.ledger.hold(state, nbytes, HOST)
        return rest

    def give_up(self, state: str, rests: Sequence[Rest]) -> None:
        for rest in rests:
            with rest.here():  # no device copies from or to it any more
                self.ledger.hold(state, -rest.tensor.nbytes, HOST)


class _Pages(mmap.mmap):
    """Anonymous memory that unpins itself when it goes. While the device may still copy from or to it, it stays."""

    unpin: Any = None
    compute = torch.device("cpu")

    def __del__(self) -> None:
        if self.unpin is None:
            return
        under_way = []
        with contextlib.suppress(Exception):  # the interpreter, or the device, has come to its end
            under_way = copies(self.compute)
        if under_way:
            _late.append((self, under_way))
        else:
            self.unpin()


_late: deque[tuple[_Pages, list[Any]]] = deque()  # pages of engines that went before their copies were through


def give_back_late() -> None:
    """Give back the pages whose copies are through by now."""
    for _ in range(len(_late)):
        with contextlib.suppress(IndexError):  # another thread took it
            memory, under_way = _late.popleft()
            if all(each.query() for each in under_way):
                memory.unpin()
            else:
                _late.append((memory, under_way))


def pages(nbytes: int, compute: torch.device) -> Tensor:
    """Return a uint8 tensor of zeros in whole pages of host memory of its own, pinned if the device is a GPU."""
    give_back_late()
    memory = _Pages(-1, max(-(-nbytes // mmap.PAGESIZE), 1) * mmap.PAGESIZE)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    memory.unpin, memory.compute = pin(tensor, compute), compute
    return tensor
