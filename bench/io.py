"""A disk's speed in the engine's own pattern, as `zeroshard plan` takes it: `python -m bench.io FOLDER`.

read    slot after slot, the next one under way
write   slot after slot, behind
both    an optimizer's step: slot k + 1 on its way in, slot k - 1 on its way out; bytes of both

Beside each, in turn with it, the same system calls without the engine: the same blocks, threads and buffers. The file
is gone at the end.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zeroshard import Offload
from zeroshard.events import Ledger
from zeroshard.features import nvme
from zeroshard.layout.limits import STAGING_ROOMS
from zeroshard.planner.quantities import budget

from . import report

PATTERNS = ("read", "write", "both")
SLOT = 24 << 20  # bytes of one bucket's state, of the default layout
STATE = "exp_avg"  # the file's name


@dataclass(frozen=True)
class Setup:
    """Settings of a measurement. nbytes: of the file. block: bytes of a system call. depth: how many at once."""

    folder: str
    nbytes: int
    block: int
    depth: int
    direct: bool
    rounds: int = 3

    def __post_init__(self) -> None:
        if self.block < mmap.PAGESIZE or self.block % mmap.PAGESIZE:
            raise SystemExit(f"--block must be whole pages of {mmap.PAGESIZE} bytes, got {self.block}")
        if self.nbytes < 4 * self.slot:
            raise SystemExit(f"--size must be at least {4 * self.slot:,} bytes, four blocks, got {self.nbytes:,}")

    @property
    def slot(self) -> int:
        return max(self.block, min(SLOT, self.nbytes // 4) // self.block * self.block)

    @property
    def slots(self) -> int:
        return self.nbytes // self.slot


def measure(setup: Setup) -> tuple[dict[str, dict[str, list[float]]], bool]:
    """({way: {pattern: bytes per second, round by round}}, did the calls go past the page cache?)."""
    with _tuned(setup):
        tier = nvme.NvmeTier(
            Offload(optimizer="nvme", path=setup.folder), 0, torch.device("cpu"), Ledger(),
            {"parameters": 0, "gradients": 0, "optimizer": setup.slot}, setup.nbytes,
        )  # fmt: skip
        rests: list[Any] = [tier.rest(STATE, at, setup.slot, torch.uint8) for at in range(setup.slots)]
        file = rests[0].file
        if not setup.direct:
            tier.told = True  # no warning about what was asked for
            file._give_up_direct(OSError("asked for"))
        with Raw(setup, file._direct) as raw:
            ways = {"engine": lambda pattern: _engine(rests, pattern), "calls": raw.run}
            for way in ways.values():
                way("write")  # so that there is something to read
            rates: dict[str, dict[str, list[float]]] = {name: {pattern: [] for pattern in PATTERNS} for name in ways}
            for _ in range(setup.rounds):
                for pattern in PATTERNS:
                    moved = setup.slot * setup.slots * (1 + (pattern == "both"))
                    for name, way in ways.items():
                        rates[name][pattern].append(moved / _seconds(way, pattern))
    return rates, file._direct


@contextmanager
def _tuned(setup: Setup) -> Iterator[None]:
    before = nvme.BLOCK, nvme.THREADS
    nvme.BLOCK, nvme.THREADS = setup.block, setup.depth
    try:
        yield
    finally:
        nvme.BLOCK, nvme.THREADS = before


def _seconds(way: Callable[[str], None], pattern: str) -> float:
    start = time.perf_counter()
    way(pattern)
    return time.perf_counter() - start


def _engine(rests: list[Any], pattern: str) -> None:
    """Make one pass over a file as a step does, until the last byte is written."""
    for at, rest in enumerate(rests):
        if pattern != "write":
            for coming in rests[at : at + 2]:
                coming.ahead()
        with rest.here(changed=pattern != "read", fresh=pattern == "write"):
            pass
        rest.behind()
    concurrent.futures.wait([future for rest in rests for future in rest.writing])


class Raw:
    """A pass without the engine: the same blocks and calls, as many threads, and as many buffers of a slot."""

    def __init__(self, setup: Setup, direct: bool) -> None:
        self.setup = setup
        self.direct = direct

    def __enter__(self) -> Raw:
        self.file = tempfile.NamedTemporaryFile(dir=self.setup.folder, prefix="bench-io-")
        flags = os.O_RDWR | (os.O_DIRECT if self.direct else 0)
        self.descriptor = os.open(self.file.name, flags)
        os.posix_fallocate(self.descriptor, 0, self.setup.slot * self.setup.slots)
        self.buffers = [memoryview(mmap.mmap(-1, self.setup.slot)) for _ in range(STAGING_ROOMS)]
        self.threads = ThreadPoolExecutor(self.setup.depth)
        return self

    def __exit__(self, *error: object) -> None:
        self.threads.shutdown()
        os.close(self.descriptor)
        self.file.close()

    def run(self, pattern: str) -> None:
        under_way: list[list[Future[None]]] = [[] for _ in self.buffers]
        for at in range(self.setup.slots):
            number = at % len(self.buffers)
            _wait(under_way[number])
            moves = {"read": [os.preadv], "write": [os.pwritev], "both": [os.preadv, os.pwritev]}[pattern]
            if pattern == "both" and at:  # the slot before has been read: write it while this one comes
                self._turn(under_way[(at - 1) % len(self.buffers)], at - 1)
            under_way[number] = self._submit(moves[0], at)
        if pattern == "both":
            last = self.setup.slots - 1
            self._turn(under_way[last % len(self.buffers)], last)
        for futures in under_way:
            _wait(futures)

    def _turn(self, futures: list[Future[None]], at: int) -> None:
        _wait(futures)
        futures[:] = self._submit(os.pwritev, at)

    def _submit(self, call: Callable[..., int], at: int) -> list[Future[None]]:
        buffer, setup = self.buffers[at % len(self.buffers)], self.setup
        return [
            self.threads.submit(self._move, call, buffer[start : start + setup.block], at * setup.slot + start)
            for start in range(0, setup.slot, setup.block)
        ]

    def _move(self, call: Callable[..., int], part: memoryview, place: int) -> None:
        while part.nbytes:
            done = call(self.descriptor, [part], place)
            part, place = part[done:], place + done


def _wait(futures: list[Future[None]]) -> None:
    for future in futures:
        future.result()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", metavar="FOLDER", help="on the disk to measure")
    parser.add_argument("--size", default="1GiB", help="of the file that is read and written")
    parser.add_argument("--block", default=f"{nvme.BLOCK >> 20}MiB", help="what one system call moves")
    parser.add_argument("--depth", type=int, default=nvme.THREADS, help="system calls at once")
    parser.add_argument("--buffered", action="store_true", help="through the page cache, and not past it (O_DIRECT)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=report.RESULTS)
    options = parser.parse_args()
    size, block = (budget(getattr(options, name), f"--{name}") for name in ("size", "block"))
    setup = Setup(options.folder, size, block, options.depth, not options.buffered, options.rounds)
    rates, direct = measure(setup)
    rows = [
        {
            "pattern": pattern,
            "GB/s": report.spread([rate / 1e9 for rate in rates["engine"][pattern]]),
            "the calls alone, GB/s": report.spread([rate / 1e9 for rate in rates["calls"][pattern]]),
        }
        for pattern in PATTERNS
    ]
    read, write = (statistics.median(rates["engine"][pattern]) / 1e9 for pattern in ("read", "write"))
    how = "past the page cache" if direct else "through the page cache, which answers reads itself"
    notes = [
        f"{setup.slots} slots of {setup.slot:,} bytes; {setup.depth} calls of {setup.block:,} bytes at once, {how}.",
        f"{setup.rounds} interleaved rounds: medians, with least and most.",
        f"zeroshard plan --disk-read {read:.3g} --disk-write {write:.3g}",
    ]
    report.write(options.out, "io", {"rates": rates}, rows, notes)


if __name__ == "__main__":
    main()
