"""Optimizer states in files and in host memory beside what disk and memory allow: `python -m bench.offload`.

One process, in each round every way once, one after the other; a ratio compares two ways of one round. A model of
equal linear layers is stepped again and again with the same gradients; nothing but the step is on the clock.

Files, the model in bf16: 24 bytes per parameter, masters and AdamW's two states in and out.

step, states in files         `optimizer.step()`, until the last byte is written
its files alone               the same moves by the engine, in the same order, and nothing computed
its arithmetic alone          `optimizer.step()` with the same states in host memory
slow step, its arithmetic     both again with the arithmetic done a dozen times, so that it takes as long as files do
the calls alone               as many bytes by preadv and pwritev, block size and threads the engine's, without it
queued, D times B             the kernel's own queue (io_submit), D blocks of B bytes at once, one thread

What is hidden is (files alone + arithmetic alone - step) / the smaller of the two, of the slow step: once is so
much less than the files that the disk's own scatter would be all one sees.

Host memory, the model in fp32: 28 bytes per parameter; parameter, gradient and two states read, all but one written.

step, states in host memory   the optimizer's states and the gradients there, bucket by bucket
torch                         the same optimizer on plain tensors
DeepSpeedCPUAdam              compiled when it is first used; left out where it is not installed
copy, triad, in place         1-D tensors of torch; the fastest of the three is the bound
"""

from __future__ import annotations

import argparse
import concurrent.futures
import ctypes
import importlib.util
import itertools
import mmap
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import zeroshard
from zeroshard import Layout, Offload, Precision
from zeroshard.features import nvme

from . import report
from .io import Raw, Setup
from .ranks import Ranks

WIDTH = 2048
SLOT = 4 * WIDTH * WIDTH
NVME = 24  # bytes per parameter that an optimizer's step moves between files and memory
HOST = 28  # and between memory and processor
QUEUES = ((4, 4 << 20), (8, 1 << 20), (32, 1 << 20))  # how many blocks at once, of how many bytes
TIMES = 12
SUBMIT = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2)}  # io_setup, io_destroy, io_getevents, io_submit


class _Control(ctypes.Structure):
    """struct iocb of linux/aio_abi.h."""

    _fields_ = (
        ("data", ctypes.c_uint64), ("key", ctypes.c_uint32), ("flags", ctypes.c_uint32), ("opcode", ctypes.c_uint16),
        ("priority", ctypes.c_int16), ("descriptor", ctypes.c_uint32), ("buffer", ctypes.c_uint64),
        ("nbytes", ctypes.c_uint64), ("offset", ctypes.c_int64), ("reserved", ctypes.c_uint64),
        ("more", ctypes.c_uint32), ("event", ctypes.c_uint32),
    )  # fmt: skip


class _Done(ctypes.Structure):
    """struct io_event."""

    _fields_ = (
        ("data", ctypes.c_uint64),
        ("control", ctypes.c_uint64),
        ("got", ctypes.c_int64),
        ("got2", ctypes.c_int64),
    )


class Queue:
    """A file read and written block by block, `depth` blocks on their way at once: the kernel's asynchronous I/O.

    By system calls, so that no library need be there. Raises OSError where the kernel has none of it.
    """

    def __init__(self, descriptor: int, nbytes: int, depth: int, block: int) -> None:
        self._descriptor, self._blocks, self._depth, self._block = descriptor, nbytes // block, depth, block
        if platform.machine() not in SUBMIT:
            raise OSError(f"no numbers of system calls for {platform.machine()}")
        self._call = ctypes.CDLL(None, use_errno=True).syscall
        self._setup, self._destroy, self._get, self._submit = SUBMIT[platform.machine()]
        self._context = ctypes.c_uint64()
        self._checked(self._setup, ctypes.c_long(depth), ctypes.byref(self._context))
        self._memory = mmap.mmap(-1, depth * block)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._controls = (_Control * depth)()
        for at, control in enumerate(self._controls):
            control.data, control.descriptor = at, descriptor
            control.buffer, control.nbytes = start + at * block, block

    def _checked(self, number: int, *arguments: Any) -> int:
        got: int = self._call(ctypes.c_long(number), *arguments)
        if got < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return got

    def run(self) -> None:
        """Each block is read and, from the same memory, written back."""
        coming = itertools.count()
        running = sum(self._next(control, coming) for control in self._controls)
        done = (_Done * self._depth)()
        while running:
            got = self._checked(
                self._get, self._context, ctypes.c_long(1), ctypes.c_long(self._depth), done, ctypes.c_void_p()
            )
            for each in done[:got]:
                if each.got != self._block:
                    raise OSError(-each.got, os.strerror(max(-each.got, 0)))
                control = self._controls[each.data]
                if control.opcode == 0:
                    self._start(control, opcode=1)
                else:
                    running -= not self._next(control, coming)

    def _next(self, control: Any, coming: Iterator[int]) -> bool:
        at = next(coming)
        if at < self._blocks:
            control.offset = at * self._block
            self._start(control, opcode=0)
        return at < self._blocks

    def _start(self, control: Any, *, opcode: int) -> None:
        control.opcode = opcode
        self._checked(self._submit, self._context, ctypes.c_long(1), ctypes.byref(ctypes.pointer(control)))

    def close(self) -> None:
        self._checked(self._destroy, self._context)


class Slow(torch.optim.AdamW):
    """As much arithmetic as `TIMES` steps."""

    elementwise = True

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for _ in range(TIMES):
            super().step()


class Model:
    """A model under the engine whose optimizer steps at any time: gradients stay, and so do the states' places."""

    def __init__(self, layers: int, offload: Offload, *, low: bool, kind: Any = torch.optim.AdamW) -> None:
        with torch.device("meta"):
            model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
        self.optimizer = kind(model.parameters(), lr=1e-4, fused=True)
        dtype = torch.bfloat16 if low else torch.float32
        self.zero = zeroshard.shard(
            model, self.optimizer, precision=Precision(param_dtype=dtype), offload=offload,
            layout=Layout(units=["*"]), device="cpu",
        )  # fmt: skip
        model(torch.randn(1, WIDTH, dtype=dtype)).float().square().mean().backward()
        self.step()  # makes the states

    def step(self) -> None:
        self.optimizer.step()
        self.drain()

    def rests(self) -> list[list[Any]]:
        """What a step brings from files, bucket by bucket."""
        (binding,) = self.zero._engine.bindings
        return [binding.states.moving(bucket) for bucket in self.zero._engine.buckets]

    def move(self) -> None:
        """A step's moves between files and memory, without what they are for."""
        buckets = self.rests()
        for at, bucket in enumerate(buckets):
            for coming in itertools.chain(*buckets[at : at + 2]):
                coming.ahead()
            with ExitStack() as here:
                for rest in bucket:
                    here.enter_context(rest.here())
            for rest in bucket:
                rest.behind()
        self.drain()

    def drain(self) -> None:
        futures = [future for rest in itertools.chain(*self.rests()) for future in getattr(rest, "writing", ())]
        for future in concurrent.futures.wait(futures).done:
            future.result()

    def moved(self) -> int:
        traffic = self.zero.ledger().traffic
        return sum(traffic[verb].logical for verb in ("read", "write") if verb in traffic)


class Files:
    """The ways of the first table."""

    def __init__(self, layers: int, folder: str) -> None:
        self._close = ExitStack()
        here = self._close.enter_context(tempfile.TemporaryDirectory(dir=folder, prefix="bench-"))
        on_disk = Model(layers, Offload(optimizer="nvme", path=here), low=True)
        in_memory = Model(layers, Offload(optimizer="cpu"), low=True)
        slow_on_disk = Model(layers, Offload(optimizer="nvme", path=here), low=True, kind=Slow)
        slow = Model(layers, Offload(optimizer="cpu"), low=True, kind=Slow)
        self.numel = layers * WIDTH * WIDTH
        before = on_disk.moved()
        on_disk.step()
        self.moved = on_disk.moved() - before
        setup = _Calls(here, NVME // 2 * self.numel, nvme.BLOCK, nvme.THREADS, direct=True)
        raw = self._close.enter_context(Raw(setup, direct=on_disk.rests()[0][0].rest.file._direct))
        raw.run("write")
        self.ways: dict[str, Callable[[], None]] = {
            "step, states in files": on_disk.step,
            "its files alone": on_disk.move,
            "its arithmetic alone": in_memory.step,
            "slow step": slow_on_disk.step,
            "slow step's arithmetic alone": slow.step,
            "the calls alone": lambda: raw.run("both"),
        }
        for depth, block in QUEUES:
            try:
                queue = Queue(raw.descriptor, setup.nbytes, depth, block)
            except OSError:
                continue  # its rows are missing, and a note says so
            self._close.callback(queue.close)
            self.ways[f"queued, {depth} times {block >> 20} MiB"] = queue.run

    def __del__(self) -> None:
        self._close.close()

    def facts(self) -> tuple[list[str], int, int]:
        return list(self.ways), self.numel, self.moved

    def run(self, way: str) -> tuple[float, float]:
        return _timed(self.ways[way])


class _Calls(Setup):
    """As the engine's slots are: one layer's state in fp32."""

    @property
    def slot(self) -> int:
        return SLOT


class Memory:
    """The ways of the second table."""

    def __init__(self, layers: int, threads: int) -> None:
        torch.set_num_threads(threads)
        self.numel = layers * WIDTH * WIDTH
        engine = Model(layers, Offload(optimizer="cpu", gradients="cpu"), low=False)
        a, b, c = (torch.ones(self.numel) for _ in range(3))
        self.ways: dict[str, tuple[int, Callable[[], Any]]] = {  # bytes per element, and what moves them
            "step, states in host memory": (HOST, engine.step),
            "torch": (HOST, _plain(layers, torch.optim.AdamW, fused=True).step),
            "copy": (8, lambda: a.copy_(b)),
            "triad": (12, lambda: torch.add(b, c, alpha=2.0, out=a)),
            "in place": (12, lambda: a.add_(b)),
        }
        if importlib.util.find_spec("deepspeed") is not None:
            self.ways["DeepSpeedCPUAdam"] = (HOST, _deepspeed(layers).step)
        for _, way in self.ways.values():
            way()

    def facts(self) -> tuple[dict[str, int], int]:
        return {way: nbytes for way, (nbytes, _) in self.ways.items()}, self.numel

    def run(self, way: str) -> tuple[float, float]:
        with torch.no_grad():
            return _timed(self.ways[way][1])


def _plain(layers: int, optimizer: Callable[..., Any], **options: Any) -> Any:
    params = [nn.Parameter(torch.zeros(WIDTH * WIDTH)) for _ in range(layers)]
    for param in params:
        param.grad = torch.full_like(param, 1e-3)
    return optimizer(params, lr=1e-4, **options)


def _deepspeed(layers: int) -> Any:
    os.environ["DS_ACCELERATOR"] = "cpu"  # read as it is imported
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return _plain(layers, DeepSpeedCPUAdam)


def _timed(way: Callable[[], Any]) -> tuple[float, float]:
    """Seconds on the clock, and of this process's threads."""
    cpu, clock = time.process_time(), time.perf_counter()
    way()
    return time.perf_counter() - clock, time.process_time() - cpu


class Taken(NamedTuple):
    """Of each way, round by round."""

    clock: dict[str, list[float]]
    cpu: dict[str, list[float]]

    def ratios(self, way: str, other: str) -> list[float]:
        return [b / a for a, b in zip(self.clock[way], self.clock[other], strict=True)]

    def best(self, ways: list[str]) -> str:
        return min(ways, key=lambda way: statistics.median(self.clock[way]))


def measure(held: Any, ways: list[str], rounds: int) -> Taken:
    taken = Taken({way: [] for way in ways}, {way: [] for way in ways})
    for number in range(rounds):
        for at in range(len(ways)):
            way = ways[(number + at) % len(ways)]
            ((clock, cpu),) = held("run", way)
            taken.clock[way].append(clock)
            taken.cpu[way].append(cpu)
    return taken


@contextmanager
def _process(threads: int, make: Callable[..., Any], *args: Any) -> Iterator[Any]:
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = str(threads)  # DeepSpeed's own OpenMP reads it as it is loaded
    try:
        held = Ranks(1, make, *args)
        held("facts")  # after which it has been read
    finally:
        os.environ.pop("OMP_NUM_THREADS")
        if before is not None:
            os.environ["OMP_NUM_THREADS"] = before
    yield held
    held.close()


def files(layers: int, rounds: int, folder: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    with _process(1, Files, layers, folder) as held:
        ((ways, numel, moved),) = held("facts")
        taken = measure(held, ways, rounds)
    step, alone, _, slow, compute, calls, *queues = ways
    raw = NVME * numel // SLOT * SLOT
    nbytes = dict.fromkeys((calls, *queues), raw) | dict.fromkeys((step, alone, slow), moved)

    def over(way: str, other: str) -> list[float]:
        """Bytes per second of one over the other's."""
        return [ratio * nbytes[way] / nbytes[other] for ratio in taken.ratios(way, other)]

    rows = [_row("files", way, nbytes.get(way), taken, over(way, calls) if way in nbytes else None) for way in ways]
    thirds = zip(*(taken.clock[way] for way in (alone, compute, slow)), strict=True)
    return rows, {
        "numel": numel,
        "bytes": moved,
        "step / the calls alone": over(step, calls),
        "hidden": [(io + work - both) / min(io, work) for io, work, both in thirds],
        "best queue": taken.best(queues) if queues else None,
        "step / the best queue": over(step, taken.best(queues)) if queues else None,
        "seconds": taken.clock,
        "cpu": taken.cpu,
    }


def memory(layers: int, rounds: int, threads: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    with _process(threads, Memory, layers, threads) as held:
        ((nbytes, numel),) = held("facts")
        taken = measure(held, list(nbytes), rounds)
    bounds = ("copy", "triad", "in place")
    best = max(bounds, key=lambda way: nbytes[way] / statistics.median(taken.clock[way]))
    rows = [
        _row(f"memory, {threads} thread" + "s" * (threads > 1), way, nbytes[way] * numel, taken,
             [ratio * nbytes[way] / nbytes[best] for ratio in taken.ratios(way, best)])
        for way in nbytes
    ]  # fmt: skip
    step, theirs = "step, states in host memory", "DeepSpeedCPUAdam"
    return rows, {
        "numel": numel,
        "bound": best,
        "step / the bound": [ratio * nbytes[step] / nbytes[best] for ratio in taken.ratios(step, best)],
        "step / torch": taken.ratios(step, "torch"),
        "step / DeepSpeedCPUAdam": taken.ratios(step, theirs) if theirs in nbytes else None,
        "seconds": taken.clock,
        "cpu": taken.cpu,
    }


def _row(where: str, way: str, nbytes: int | None, taken: Taken, over: list[float] | None) -> dict[str, Any]:
    seconds = statistics.median(taken.clock[way])
    return {
        "where": where,
        "way": way,
        "seconds": round(seconds, 3),
        "CPU seconds": round(statistics.median(taken.cpu[way]), 3),
        "GB/s": "" if nbytes is None else round(nbytes / seconds / 1e9, 2),
        "of the bound": "" if over is None else report.spread(over),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=12, help=f"of {WIDTH}^2 parameters each")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, len(os.sched_getaffinity(0))], help="of memory")
    parser.add_argument("--where", type=Path, default=Path(tempfile.gettempdir()), help="a folder on a local disk")
    parser.add_argument("--out", type=Path, default=report.RESULTS)
    options = parser.parse_args()
    rows, of_files = files(options.layers, options.rounds, str(options.where))
    facts: dict[str, Any] = {"rounds": options.rounds, "files": of_files, "memory": {}}
    for threads in dict.fromkeys(options.threads):
        more, facts["memory"][threads] = memory(options.layers, options.rounds, threads)
        rows += more
    report.write(options.out, "offload", facts, rows, _notes(facts))


def _notes(facts: dict[str, Any]) -> list[str]:
    of_files = facts["files"]
    notes = [
        f"{of_files['numel']:,} parameters, {facts['rounds']} rounds; medians, with least and most.",
        f"files: {of_files['bytes']:,} bytes a step; the bound is the calls alone, {nvme.THREADS} threads of blocks of "
        f"{nvme.BLOCK >> 20} MiB. The step reaches {report.spread(of_files['step / the calls alone'])} of it.",
        f"Of the slow step's files and arithmetic, {report.spread(of_files['hidden'])} of the smaller is hidden.",
    ]
    if of_files["best queue"] is None:
        notes.append("queued: left out, this kernel takes no io_submit.")
    else:
        notes.append(
            f"The best queue, {of_files['best queue']}: the step reaches "
            f"{report.spread(of_files['step / the best queue'])} of it."
        )
    for threads, found in facts["memory"].items():
        theirs = found["step / DeepSpeedCPUAdam"]
        said = "not installed" if theirs is None else f"{report.spread(theirs)} times as fast as it"
        notes.append(
            f"memory, {threads} thread{'s' * (threads > 1)}: the bound is {found['bound']}; the step reaches "
            f"{report.spread(found['step / the bound'])} of it, {report.spread(found['step / torch'])} of plain "
            f"torch's speed; beside DeepSpeedCPUAdam: {said}."
        )
    return notes


if __name__ == "__main__":
    main()
