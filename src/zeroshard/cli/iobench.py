"""`zeroshard io-bench`: a disk's speed in the engine's own pattern, and what that allows a model.

    read    slot after slot, the next one under way
    write   slot after slot, behind
    both    an optimizer's step: slot k + 1 on its way in, slot k - 1 on its way out

Beside each, in turn with it, the same system calls without the engine: the same blocks, threads and buffers.
"""

from __future__ import annotations

import concurrent.futures
import json
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.markup import escape

from zeroshard.checkpoint.staging import put
from zeroshard.cli import screen
from zeroshard.cli.config import InputError, one_line, within
from zeroshard.errors import TierError, UserError
from zeroshard.events import Ledger
from zeroshard.features import nvme
from zeroshard.layout.limits import BUFFERS
from zeroshard.planner.answer import Plan
from zeroshard.planner.disk import FORMAT, Disk
from zeroshard.planner.plan import plan
from zeroshard.planner.quantities import count
from zeroshard.planner.question import from_flat
from zeroshard.policies.offload import Offload

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
            raise InputError(f"--block must be whole pages of {mmap.PAGESIZE} bytes, got {self.block}")
        for name, value in {"depth": self.depth, "rounds": self.rounds}.items():
            within(name, value, 1)
        if self.nbytes < 4 * self.slot:
            raise InputError(f"--size must be at least {4 * self.slot:,} bytes, four blocks, got {self.nbytes:,}")

    @property
    def slot(self) -> int:
        return max(self.block, min(SLOT, self.nbytes // 4) // self.block * self.block)

    @property
    def slots(self) -> int:
        return self.nbytes // self.slot


def measure(setup: Setup) -> dict[str, Any]:
    """Measure {"disk": bytes per second by pattern, "raw": the same without the engine, ...}, medians of all rounds."""
    with _tuned(setup):
        try:
            tier = nvme.NvmeTier(
                Offload(optimizer="nvme", path=setup.folder), 0, torch.device("cpu"), Ledger(),
                {"parameters": 0, "gradients": 0, "optimizer": setup.slot}, setup.nbytes,
            )  # fmt: skip
            rests: list[Any] = [tier.rest(STATE, at, setup.slot, torch.uint8) for at in range(setup.slots)]
        except TierError as error:
            raise InputError(one_line(error)) from error
        file = rests[0].file
        if not setup.direct:
            tier.told = True  # no warning about what was asked for
            file._give_up_direct(OSError("asked for"))
        with _Raw(setup, file._direct) as raw:
            ways = {"disk": lambda pattern: _engine(rests, pattern), "raw": raw.run}
            for way in ways.values():
                way("write")  # so that there is something to read
            took: dict[tuple[str, str], list[float]] = {}
            for _ in range(setup.rounds):
                for pattern in PATTERNS:
                    for name, way in ways.items():
                        took.setdefault((name, pattern), []).append(_seconds(way, pattern))
    moved = {pattern: setup.slot * setup.slots * (1 + (pattern == "both")) for pattern in PATTERNS}
    rates = {
        name: {pattern: moved[pattern] / statistics.median(took[name, pattern]) for pattern in PATTERNS}
        for name in ways
    }
    return {"format": FORMAT, **rates, "settings": {**asdict(setup), "direct": file._direct, "slot": setup.slot}}


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


class _Raw:
    """A pass without the engine: the same blocks and calls, as many threads, and as many buffers of a slot."""

    def __init__(self, setup: Setup, direct: bool) -> None:
        self.setup = setup
        self.direct = direct

    def __enter__(self) -> _Raw:
        self.file = tempfile.NamedTemporaryFile(dir=self.setup.folder, prefix="zeroshard-io-bench-")
        flags = os.O_RDWR | (os.O_DIRECT if self.direct else 0)
        self.descriptor = os.open(self.file.name, flags)
        os.posix_fallocate(self.descriptor, 0, self.setup.slot * self.setup.slots)
        self.buffers = [memoryview(mmap.mmap(-1, self.setup.slot)) for _ in range(BUFFERS)]
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


# --- what it allows -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """A model whose step's files are on the disk. sharing: ranks that use this disk at once."""

    params: str
    ranks: int
    stage: int
    tokens: int | None
    offload: Offload
    sharing: int = 1

    def __post_init__(self) -> None:
        within("sharing", self.sharing, 1)

    def planned(self, **changes: Any) -> Plan:
        asked = {"ranks": self.ranks, "stage": self.stage, "offload": self.offload, "preset": "zeroshard", **changes}
        of, on, step, rest = from_flat({"params": self.params, **asked})
        return plan(of, on, step=step, **rest)

    def allowed(self, disk: Disk, **changes: Any) -> tuple[float, float | None]:
        """Return (seconds of a step's files, tokens per second of all ranks that this allows)."""
        found = self.planned(**changes)
        seconds = disk.seconds(found.stages[0].moves) * self.sharing
        ranks, backwards = changes.get("ranks", self.ranks), changes.get("accumulate", 1)
        return seconds, self.tokens and self.tokens * ranks * backwards / seconds


def changes(model: Model, disk: Disk) -> list[tuple[str, float, float | None]]:
    """List (what, seconds, tokens/s): first as it is, then with changes that would raise it."""
    half = {"nvme": 0.5, "cpu": 0.5}
    twice = Disk(2 * disk.read, 2 * disk.write, 2 * disk.both)
    found = [("as it is", *model.allowed(disk))]
    if model.offload.tiers("optimizer").get("nvme", 0) == 1:
        found.append(("half of the optimizer's states in host memory",
                      *model.allowed(disk, offload=replace(model.offload, optimizer=half))))  # fmt: skip
    if model.offload.tiers("gradients").get("nvme") or model.offload.tiers("parameters").get("nvme"):
        only = replace(model.offload, gradients="cpu", parameters="device")
        if only.tiers("optimizer").get("nvme"):
            found.append(("only the optimizer's states in files", *model.allowed(disk, offload=only)))
    found.append(("four backwards per step instead of one", *model.allowed(disk, accumulate=4)))
    if model.stage:
        found.append(("twice the ranks, each with its share of a disk", *model.allowed(disk, ranks=2 * model.ranks)))
    found.append(("two such disks, striped", *model.allowed(twice)))
    return found


def io_bench(setup: Setup, model: Model | None, *, out: str | None, as_json: bool) -> None:
    """Measure, write and print. Raises `InputError` for what cannot be measured."""
    if not Path(setup.folder).is_dir():
        raise InputError(f"there is no folder {setup.folder!r} to measure the disk of")
    found = measure(setup)
    disk = Disk(**found["disk"])
    if model is not None:
        try:
            rows = changes(model, disk)
        except UserError as error:
            raise InputError(one_line(error)) from error
        found["model"] = [{"what": what, "seconds": seconds, "tokens_per_second": rate} for what, seconds, rate in rows]
    if out is not None:
        try:
            put(out, json.dumps(found, indent=2) + "\n", '"format": "zeroshard io-bench ')
        except OSError as error:
            raise InputError(f"cannot write {out}: {error.strerror}") from error
    if as_json:
        print(json.dumps(found, indent=2))
        return
    _show(setup, found, model)
    if out is not None:
        screen.say(f"\n  in {out}, for zeroshard plan --disk {out}")


def _show(setup: Setup, found: dict[str, Any], model: Model | None) -> None:
    how = "past the page cache" if found["settings"]["direct"] else "through the page cache, which answers reads itself"
    screen.opening(
        f"The disk of {escape(setup.folder)}",
        {
            "calls": f"{setup.block:,} bytes, {setup.depth} at once, {how}",
            "file": f"{setup.slots} slots of {setup.slot:,} bytes; {setup.rounds} rounds, the median of each",
        },
    )
    table = screen.new_table("Bytes per second", "pattern", "engine", "the calls alone", "engine / calls")
    for pattern in PATTERNS:
        mine, theirs = found["disk"][pattern], found["raw"][pattern]
        table.add_row(pattern, f"{mine:,.0f}", f"{theirs:,.0f}", f"{mine / theirs:.2f}")
    screen.wide(table)
    screen.say("  [dim]both: read and written together, at once, as an optimizer's step does[/dim]")
    if model is None:
        return
    numel = count(model.params)
    title = f"{numel:,} parameters, stage {model.stage}, {screen.ranks_text(model.ranks)}: a step's files"
    table = screen.new_table(title, "", "seconds", *(["tokens/s of all ranks"] if model.tokens else []))
    table.columns[0].justify = "left"
    for row in found["model"]:
        rate = [f"{row['tokens_per_second']:,.0f}"] if model.tokens else []
        table.add_row(row["what"], f"{row['seconds']:.3g}", *rate)
    screen.wide(table)
    screen.say("  [dim]bounds: what the disk allows if nothing else takes longer; recipe zeroshard, 18 bytes[/dim]")
