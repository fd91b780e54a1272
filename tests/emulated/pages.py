"""Pinned pages of the host while the device copies: the host may not touch them, and an access of it is a race.

A copy between the device and pinned memory runs late. From its launch until the host has waited for it, its pages are
locked against the host by `mprotect`: against everything if the device writes there, against writes if it reads there.
So an access is found whoever makes it, also an operator in C++ on a thread of its own, and whatever it reads or writes.
The processor faults, the handler notes who did it, and opens the pages, so that the program goes on; the next call of the
device raises the `Race`. What one page has of two copies counts as one piece.

A system call on locked pages does not fault: it fails with EFAULT ("Bad address").

Named hazard, *a handler in Python*: the fault comes in the middle of an operator's loop, which holds no lock of Python's
or of malloc's. The handler takes none but the interpreter's.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from . import sites
from .memory import Block, Place
from .races import Race
from .streams import Mark, Queue

PAGE = mmap.PAGESIZE
_NONE, _READ, _OPEN = 0, mmap.PROT_READ, mmap.PROT_READ | mmap.PROT_WRITE
_SIGSEGV, _SA_SIGINFO, _SA_NODEFER = 11, 4, 0x40000000
_ADDRESS = 16  # of `si_addr` in a `siginfo_t` of Linux with 64 bits
_libc: Any = ctypes.CDLL(None, use_errno=True)
_mprotect = _libc.mprotect
_mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


class _Action(ctypes.Structure):
    """A `struct sigaction` of glibc."""

    _fields_ = [
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ulong * 16),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    ]


class Region(Block):
    """Pinned memory of the host, as the race detector sees a block of the device's."""

    def __init__(self, address: int, nbytes: int, queue: Queue) -> None:
        self.base, self.nbytes, self.queue = address, nbytes, queue
        self.stack, self.freed, self.used_by, self.stretches = sites.stack(), None, set(), []
        self.born = 0  # before anything that a stream does

    def holds(self, low: int, high: int) -> bool:
        return self.base <= low and high <= self.base + self.nbytes


class Use(NamedTuple):
    """By a copy that the host has not waited for."""

    mark: Mark
    low: int  # bytes, whole pages
    high: int
    writes: bool  # does the device write there, or read?
    stack: sites.Stack


class Pages:
    """The pinned memory of one process, as its device and its host use it."""

    def __init__(self, queue: Queue, *, on: bool) -> None:
        """queue: any stream. on: is an access of the host's an error?"""
        self.on = on
        self._queue = queue
        self._regions: list[Region] = []
        self._uses: list[Use] = []
        self._met: list[str] = []  # races that were not raised yet
        self._open = 0  # how many of the emulator's own accesses go on
        self._handler = _HANDLER(self._fault)
        if on:
            action = _Action(ctypes.cast(self._handler, ctypes.c_void_p), flags=_SA_SIGINFO | _SA_NODEFER)
            assert _libc.sigaction(_SIGSEGV, ctypes.byref(action), None) == 0

    def pin(self, address: int, nbytes: int) -> None:
        self._regions.append(Region(address, nbytes, self._queue))

    def unpin(self, address: int) -> None:
        """Forget them: they are given back. A copy that still runs then is a race."""
        for region in [each for each in self._regions if each.base == address]:
            self._regions.remove(region)
            last = address + region.nbytes
            under_way = [u for u in self._uses if u.low < last and address < u.high and not u.mark.reached]
            if self.on and under_way:
                self._met.append(
                    "pinned memory is unpinned while a copy uses it:\n    the copy, launched at\n"
                    f"{sites.words(under_way[0].stack)}\n    unpinned at\n{sites.words(sites.stack())}\n"
                    "    instead: keep it until an event after the copy is reached"
                )
            self._uses = [use for use in self._uses if use.high <= address or last <= use.low]
            self._protect(address // PAGE * PAGE, -(-last // PAGE) * PAGE, _OPEN)

    def place(self, tensor: torch.Tensor) -> Place | None:
        """Return where a tensor of the host lies in pinned memory; None if it does not."""
        low = tensor.data_ptr()
        found = next((each for each in self._regions if each.holds(low, low + tensor.nbytes)), None)
        return found and Place(found, low, tuple(tensor.size()), tuple(tensor.stride()), tensor.dtype)

    def will_read(self, place: Place) -> bool:
        """Does a copy that has not run yet read this memory?"""
        low, high = place.address, place.address + place.reach
        return any(not u.writes and not u.mark.reached and u.low < high and low < u.high for u in self._uses)

    def launched(self, mark: Mark, stack: sites.Stack, accesses: Iterable[tuple[Place, bool]]) -> None:
        """Lock the pinned memory that a kernel uses. mark: when it is through."""
        for place, writes in accesses:
            if isinstance(place.block, Region) and place.reach:
                low = place.address // PAGE * PAGE
                high = -(-(place.address + place.reach) // PAGE) * PAGE
                self._uses.append(Use(mark, low, high, writes, stack))
                self._lock(low, high)

    def waited(self, clock: dict[int, int]) -> None:
        """Open what the host may touch again. clock: up to where it has seen each stream to be through."""
        over = [use for use in self._uses if clock.get(use.mark.stream.number, 0) >= use.mark.position]
        if over:
            self._uses = [use for use in self._uses if use not in over]
            for use in over:
                self._lock(use.low, use.high)

    def raise_met(self) -> None:
        """Raise what was met since the last call."""
        if self._met:
            raise Race(self._met.pop(0))

    def __enter__(self) -> None:
        """Open all pages for the emulator's own accesses: those of the device, and those that fill memory with NaN."""
        self._open += 1
        if self._open == 1:
            for use in self._uses:
                self._protect(use.low, use.high, _OPEN)

    def __exit__(self, *_: object) -> None:
        self._open -= 1
        if not self._open:
            for use in [*self._uses]:
                self._lock(use.low, use.high)

    def _lock(self, low: int, high: int) -> None:
        """Give pages the protection that all uses of them ask for."""
        if self._open:
            return
        uses = [use for use in self._uses if use.low < high and low < use.high]
        edges = sorted({low, high, *(min(max(edge, low), high) for use in uses for edge in (use.low, use.high))})
        for first, last in itertools.pairwise(edges):
            over = [use.writes for use in uses if use.low <= first and last <= use.high]
            self._protect(first, last, _OPEN if not over else _NONE if any(over) else _READ)

    def _protect(self, low: int, high: int, how: int) -> None:
        if self.on and _mprotect(low, high - low, how):
            raise OSError(ctypes.get_errno(), f"mprotect: {os.strerror(ctypes.get_errno())}")

    def _fault(self, number: int, info: int, context: int) -> None:
        """Note who touched locked pages, and open them. Any other fault ends the process, as it would without us."""
        address = ctypes.c_size_t.from_address(info + _ADDRESS).value
        found = [use for use in self._uses if use.low <= address < use.high]
        if not found:
            if not any(each.holds(address, address + 1) for each in self._regions):
                _libc.signal(number, None)  # the default: the same instruction faults again
            return  # else another thread has opened them meanwhile
        use = found[-1]
        self._uses = [each for each in self._uses if each not in found]
        for each in found:
            self._protect(each.low, each.high, _OPEN)
        self._met.append(
            f"the host touches pinned memory that a copy {'writes' if use.writes else 'reads'}, and did not wait for it:\n"
            f"    the copy, launched at\n{sites.words(use.stack)}\n    touched at\n{sites.words(sites.stack())}\n"
            "    instead: let the host wait for an event after the copy"
        )
