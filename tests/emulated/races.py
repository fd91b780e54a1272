"""Who may touch which bytes: an error where nothing orders two uses of them, whatever order they happened to run in.

Every stream has a clock: for each other stream, up to where that is through before the next item here begins. Waiting
for an event joins clocks, and so does the host when it waits: whatever it launches later comes after what it saw. Each
block of memory remembers its bytes in stretches, with their last writer and who has read them since. So a use is
compared with the uses before it when it is *launched*, and both are named, also where their kernels run in the order
that was meant.

The host is one: threads of a program that meet by locks are not told apart. What it does with pinned memory is seen by
`pages.py`, and what it does with other memory of its own is not. A view whose rows lie apart is looked at row by row up to `ROWS`, and beyond that as one piece.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from . import sites
from .memory import Block, Place
from .streams import Machine, Mark, Queue

ROWS = 64


class Race(RuntimeError):
    """Two uses of the same bytes, of which one writes, and nothing that orders them."""


class Use(NamedTuple):
    """By an item of a stream."""

    queue: Queue
    position: int
    name: str
    stack: sites.Stack

    def before(self, clock: dict[int, int]) -> bool:
        return clock.get(self.queue.number, 0) >= self.position


class Stretch:
    """Bytes of a block with one history."""

    __slots__ = ("high", "low", "reads", "write")

    def __init__(self, low: int, high: int, write: Use | None, reads: dict[int, Use]) -> None:
        """reads: since the last write, the last of each stream."""
        self.low, self.high, self.write, self.reads = low, high, write, reads

    def part(self, low: int, high: int) -> Stretch:
        return Stretch(max(low, self.low), min(high, self.high), self.write, dict(self.reads))

    def like(self, other: Stretch) -> bool:
        return self.high == other.low and self.write is other.write and self.reads == other.reads


class Detector:
    """Compares each use of memory with those before it."""

    def __init__(self, machine: Machine, *, on: bool) -> None:
        self.machine, self.on = machine, on
        self.host: dict[int, int] = {}  # what the host has seen to be through

    def joined(self, queue: Queue, mark: Mark) -> None:
        """From now on this stream comes after that mark."""
        _join(queue.clock, mark.clock)

    def host_waited(self, marks: Iterable[Mark]) -> None:
        for mark in marks:
            _join(self.host, mark.clock)

    def launched(self, queue: Queue, name: str, stack: sites.Stack, accesses: list[tuple[Place, bool]]) -> None:
        """The stream's next item: it must come after all uses of what it touches."""
        _join(queue.clock, self.host)
        if not self.on:
            return
        use = Use(queue, queue.issued + 1, name, stack)
        clock = {**queue.clock, queue.number: queue.issued}
        for place, writes in accesses:
            for low, high in stretches(place):
                self._touch(place.block, low, high, use, clock, writes)

    def freed(self, block: Block, stack: sites.Stack) -> None:
        """Its memory goes to the next that asks in the stream it came from: all its uses have to be through by then."""
        if not self.on:
            return
        clock = {**block.queue.clock, block.queue.number: block.queue.issued}
        _join(clock, self.host)
        for stretch in block.stretches:
            for use in (stretch.write, *stretch.reads.values()):
                if use is not None and not use.before(clock) and use.queue not in block.used_by:
                    raise Race(
                        f"memory is freed while {use.queue} uses it: {use.name}, launched at\n{sites.words(use.stack)}\n"
                        f"    freed, in {block.queue}, at\n{sites.words(stack)}\n    allocated at\n"
                        f"{sites.words(block.stack)}\n    instead: let {block.queue} wait for an event of {use.queue} "
                        "before the last reference goes, or tensor.record_stream(...)"
                    )

    def _touch(self, block: Block, low: int, high: int, use: Use, clock: dict[int, int], writes: bool) -> None:
        if not block.stretches:
            born = Use(block.queue, block.born, "the allocation", block.stack)
            block.stretches = [Stretch(0, max(block.nbytes, 16), born, {})]
        kept: list[Stretch] = []
        for stretch in block.stretches:
            if stretch.high <= low or high <= stretch.low:
                _add(kept, stretch)
                continue
            if stretch.low < low:
                _add(kept, stretch.part(stretch.low, low))
            inside = stretch.part(low, high)
            self._compare(block, inside, use, clock, writes)
            if writes:
                inside.write, inside.reads = use, {}
            else:
                inside.reads[use.queue.number] = use
            _add(kept, inside)
            if high < stretch.high:
                _add(kept, stretch.part(high, stretch.high))
        block.stretches = kept

    def _compare(self, block: Block, stretch: Stretch, use: Use, clock: dict[int, int], writes: bool) -> None:
        for before, wrote in [(stretch.write, True), *((read, False) for read in stretch.reads.values() if writes)]:
            if before is None or before is use or before.position == 0 or before.before(clock):
                continue
            did = "uses" if before.name == "the allocation" else "writes" if wrote else "reads"
            raise Race(
                f"nothing orders two uses of bytes {stretch.low:,} to {stretch.high:,} of a block of {block.nbytes:,}:\n"
                f"    {use.name} in {use.queue} {'writes' if writes else 'reads'} what {before.name} in {before.queue} "
                f"{did}\n    {before.name}, launched at\n{sites.words(before.stack)}\n    {use.name}, launched at\n"
                f"{sites.words(use.stack)}\n    allocated at\n{sites.words(block.stack)}\n    instead: an event after "
                f"the first, and a wait of {use.queue} for it before the second"
            )


def _join(clock: dict[int, int], other: dict[int, int]) -> None:
    for number, position in other.items():
        if clock.get(number, 0) < position:
            clock[number] = position


def _add(kept: list[Stretch], stretch: Stretch) -> None:
    if kept and kept[-1].like(stretch):
        kept[-1].high = stretch.high
    else:
        kept.append(stretch)


def stretches(place: Place) -> Iterator[tuple[int, int]]:
    """The bytes of a tensor in its block, from ... to."""
    start, item = place.address - place.block.base, place.dtype.itemsize
    if 0 in place.size:
        return
    dims = sorted((step, n) for n, step in zip(place.size, place.stride, strict=True) if n > 1 and step)
    length = 1  # elements that lie side by side
    while dims and dims[0][0] <= length:
        step, n = dims.pop(0)
        length += (n - 1) * step
    rows: list[Any] = [0]
    for step, n in dims:
        if len(rows) * n > ROWS:
            yield start, start + place.reach
            return
        rows = [row + at * step for at in range(n) for row in rows]
    for row in sorted(rows):
        yield start + row * item, start + (row + length) * item
