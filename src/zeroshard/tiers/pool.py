"""Memory on the CPU: short-lived, for gathered buckets and messages, kept from step to step; and zeros that stay.

Each block is mapped by itself and does not come from malloc. glibc up to 2.37 cannot use a freed aligned block again
for the same size (it looks for a few bytes more, to align what it finds), so buckets that come and go make its heap
grow with every step; and memory that malloc returns to the kernel is faulted in again at a tenth of the speed of warm
memory.
"""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

SMALLEST = 1 << 20  # bytes; below, malloc does well
KEPT = 256 << 20  # bytes of unused memory that are kept at most


def zeros(numel: int, dtype: torch.dtype) -> Tensor:
    """Return zeros, 1-D on the CPU, that take memory only where written: at stage 1 that is a part of the gradients."""
    nbytes = numel * dtype.itemsize
    if nbytes < SMALLEST:
        return torch.zeros(numel, dtype=dtype, device="cpu")
    return torch.frombuffer(_block(nbytes), dtype=dtype, count=numel)


def _block(nbytes: int) -> mmap.mmap:
    try:
        return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"the system has no {nbytes:,} bytes for weights or gradients: {error}") from error


class Pool:
    """Blocks of memory, given out and taken back."""

    def __init__(self) -> None:
        self._used: dict[int, mmap.mmap] = {}  # by address
        self._idle: list[mmap.mmap] = []  # the longest idle first

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a 1-D tensor on the CPU with arbitrary content."""
        nbytes = numel * dtype.itemsize
        if nbytes < SMALLEST:
            return torch.empty(numel, dtype=dtype, device="cpu")
        # A larger block serves too, if not much of it goes to waste.
        fitting = [block for block in self._idle if nbytes <= len(block) <= nbytes + nbytes // 4]
        if fitting:
            block = min(fitting, key=len)
            self._idle.remove(block)
        else:
            block = _block(nbytes)
        tensor = torch.frombuffer(block, dtype=dtype, count=numel)
        self._used[tensor.data_ptr()] = block
        return tensor

    def give_back(self, tensor: Tensor) -> None:
        """Take back a tensor's memory, which no code uses any more. Until then the pool keeps it, even without the
        tensor."""
        block = self._used.pop(tensor.data_ptr(), None)
        if block is not None:
            self._idle.append(block)
            while sum(map(len, self._idle)) > KEPT:
                self._idle.pop(0)

    def leave(self, tensor: Tensor) -> None:
        """Forget a tensor's memory: it goes when nothing refers to the tensor any more."""
        self._used.pop(tensor.data_ptr(), None)
