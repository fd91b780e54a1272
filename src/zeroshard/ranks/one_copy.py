"""One copy of a bucket's parameters for all ranks of a host, and a rank's private pages of it."""

from __future__ import annotations

import ctypes
import mmap
import os

import torch
from torch import Tensor

from ..device import ask


class Copy:
    """One copy of a bucket for all ranks of a host, twice in this rank's address space.

    window: what all ranks read; an owner writes its shard there. own: the same, until this rank writes into it: such
    a page is private from then on (MAP_PRIVATE), so that an edit is this rank's alone, as in a copy of its own. When
    all owners have written, private pages are dropped, or edits would hide what others have written.
    """

    def __init__(self, window: Tensor, own: Tensor) -> None:
        self.window = window
        self.own = own

    def private(self) -> list[tuple[int, int]]:
        """Return the runs of bytes [first, last) that this rank has written to since they were last dropped."""
        address, pages = self.own.data_ptr(), self.own.numel() // mmap.PAGESIZE
        with open("/proc/self/pagemap", "rb", buffering=0) as table:
            told = os.pread(table.fileno(), 8 * pages, 8 * (address // mmap.PAGESIZE))
        words = torch.frombuffer(bytearray(told), dtype=torch.int64)
        # Of the kernel's 64 bits the last says "in memory", the one before "swapped", the one before "of a file".
        written = ((words < 0) | (words >> 62 & 1).bool()) & ~(words >> 61 & 1).bool()
        padded = torch.nn.functional.pad(written.to(torch.int8), (1, 1))
        edges = padded.diff()
        starts, ends = (ask(edges == edge).nonzero().flatten().tolist() for edge in (1, -1))
        return [(first * mmap.PAGESIZE, last * mmap.PAGESIZE) for first, last in zip(starts, ends, strict=True)]

    def forget(self) -> None:
        """Drop private pages, so that this rank reads again what all ranks share."""
        libc = ctypes.CDLL(None, use_errno=True)
        for first, last in self.private():
            place = ctypes.c_void_p(self.own.data_ptr() + first)
            if libc.madvise(place, ctypes.c_size_t(last - first), mmap.MADV_DONTNEED):
                raise OSError(ctypes.get_errno(), "private pages of shared parameters could not be given back")
