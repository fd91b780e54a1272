"""The device's memory: blocks of host memory, found by address, and filled with 0xFF once their stream has freed them.

0xFF is NaN in every floating format and -1 in integers: memory is so when it is new, and again after its release has
come up in its stream, as if another tensor lived there by then.

Named hazard, *a finaliser only notes*: storages end wherever Python collects, also inside the launch of a kernel. What
their end does to streams is done by the next call of the device.
"""

from __future__ import annotations

import bisect
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import sites
from .counts import total
from .streams import Queue

POISON = 0xFF
QUARANTINE = 1 << 22  # bytes of freed memory that no new block takes, so that a use of it is known for what it is
GRAIN = 512  # bytes that a GPU's allocator rounds up to
_CPU, _DEVICE = torch.device("cpu"), torch.device("privateuseone:0")  # its name before it has one
_DISPATCH_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_SET = torch.ops.aten.set_.source_Storage_storage_offset


class UseAfterFree(RuntimeError):
    """A kernel is given memory that was freed before its launch."""


class Block:
    """One allocation."""

    def __init__(self, nbytes: int, queue: Queue) -> None:
        self.nbytes, self.queue = nbytes, queue  # the stream that was current: the release is ordered in it
        self.memory = torch.full((max(nbytes, 16),), POISON, dtype=torch.uint8, device=_CPU)
        self.base = self.memory.data_ptr()
        self.stack = sites.stack()
        self.freed: sites.Stack | None = None
        self.used_by: set[Queue] = set()  # other streams that the program has told of it: `Tensor.record_stream`
        self.stretches: list[Any] = []  # who touched which bytes last: `races.py`
        self.born = queue.issued  # what the stream had launched by then, which may still use the memory's last tenant

    def poison(self) -> None:
        self.memory.fill_(POISON)


class Place(NamedTuple):
    """Where a tensor lies: what a kernel holds of it, which is no tensor of the device."""

    block: Block
    address: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def reach(self) -> int:
        """Bytes from the first element to the end of the last."""
        if 0 in self.size:
            return 0
        return (1 + sum((n - 1) * step for n, step in zip(self.size, self.stride, strict=True))) * self.dtype.itemsize

    def open(self) -> Tensor:
        """The same memory as a tensor of the CPU."""
        storage: Any = torch._C._construct_storage_from_data_pointer(self.address, _CPU, self.reach)  # type: ignore[attr-defined]
        return torch.empty(0, dtype=self.dtype, device=_CPU).set_(storage, 0, self.size, self.stride)


class Memory:
    """All blocks of a device, and those freed of late."""

    def __init__(self) -> None:
        self.ended: deque[tuple[Block, sites.Stack]] = deque()  # noted by finalisers
        self.allocated = self.peak = 0
        self._blocks: dict[int, Block] = {}
        self._bases: list[int] = []
        self._quarantine: deque[Block] = deque()
        self._quarantined = 0

    def new(
        self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, queue: Queue, into: Tensor | None = None
    ) -> Tensor:
        """A tensor of the device. into: a tensor that is to lie there in place of a new one."""
        reach = (1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) if all(size) else 0) * dtype.itemsize
        block = Block(reach, queue)
        storage: Any = torch._C._construct_storage_from_data_pointer(block.base, _DEVICE, max(reach, 16))  # type: ignore[attr-defined]
        weakref.finalize(storage, self._note, block).atexit = False
        self._blocks[block.base] = block
        bisect.insort(self._bases, block.base)
        self.allocated += -(-reach // GRAIN) * GRAIN
        self.peak = max(self.peak, self.allocated)
        if reach:
            where = sites.site()
            total.allocations[where, str(dtype)] += 1
            total.nbytes[where, "allocated"] += reach
        tensor = torch._C._acc.create_empty_tensor((0,), dtype) if into is None else into  # type: ignore[attr-defined]
        return _SET.redispatch(_DISPATCH_CPU, tensor, storage, 0, [*size], [*stride])

    def _note(self, block: Block) -> None:
        self.ended.append((block, sites.stack()))

    def end(self, block: Block, stack: sites.Stack) -> None:
        """From now on a launch that is given it is an error."""
        block.freed = stack
        self.allocated -= -(-block.nbytes // GRAIN) * GRAIN
        self._quarantine.append(block)
        self._quarantined += block.nbytes
        while self._quarantined > QUARANTINE:
            old = self._quarantine.popleft()
            self._quarantined -= old.nbytes
            del self._blocks[old.base]
            del self._bases[bisect.bisect_left(self._bases, old.base)]

    def place(self, tensor: Tensor) -> Place:
        """Where it lies, also where its storage is one that owns nothing, made from an address."""
        address, size = tensor.data_ptr(), tuple(tensor.size())
        base = tensor.untyped_storage().data_ptr()
        block = self._blocks.get(base) or self._around(base)
        if not address:  # no elements
            address = base + tensor.storage_offset() * tensor.dtype.itemsize
        if block is None or (block.freed is not None and tensor.numel()):
            raise UseAfterFree(
                f"use after free: a tensor of {size} elements, {tensor.dtype}, given to a kernel at\n"
                f"{sites.words(sites.stack())}\n    lies in memory that was freed"
                + (
                    " long before"
                    if block is None
                    else f" at\n{sites.words(block.freed or ())}\n    and allocated at\n{sites.words(block.stack)}"
                )
            )
        return Place(block, address, size, tuple(tensor.stride()), tensor.dtype)

    def _around(self, address: int) -> Block | None:
        at = bisect.bisect_right(self._bases, address) - 1
        block = self._blocks[self._bases[at]] if at >= 0 else None
        return block if block is not None and address < block.base + max(block.nbytes, 16) else None
