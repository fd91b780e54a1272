"""The same training through zeroshard and its peers, interleaved: `python -m bench.train`; `--quick` takes a minute.

Each back-end is a set of rank processes, one thread each, that train when told to and sleep otherwise. In a round,
every back-end of a group trains a few steps in turn; a group always has the limit in it (the same work without
communication, `backends/limit.py`), and a back-end's ratio is its median step over the limit's in the same round.
Machines are noisy: compare ratios, not milliseconds. How many back-ends make a group is up to the memory that is free.
Ranks are bound to cores, as torch's own launcher for CPUs does it (`torch.backends.xeon.run_cpu`), lest one rank's
communication takes the other's core; `--free` leaves that out.

CPU             processor time of a rank's step, communication threads included: what a busy machine cannot hide
fresh MB        memory that a step touches for the first time, which costs the kernel ten times a copy
wire B/param    bytes this rank's TCP sockets sent per step and parameter, from the kernel's own count (TCP_INFO)
share B/param   the same as rest, of which memory that several processes have counts in parts (proportional set size)
rest B/param    resident memory over the process's before the model was built, after backward, gradients and all
peak B/param    the most resident at any time from the first step on, over the same
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import resource
import socket
import stat
import statistics
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from zeroshard.cli.launch import memory_told
from zeroshard.cli.processor import computes_bf16

from . import backends, report
from .model import GPT, SIZES, batch
from .ranks import Ranks

DTYPES = ["fp32"] if computes_bf16() is False else ["bf16", "fp32"]  # that are measured unless others are named
SENT = 200  # where struct tcp_info has tcpi_bytes_sent


class Step(NamedTuple):
    seconds: float
    cpu: float  # seconds of processor time, this process's
    fresh: int  # bytes of memory touched for the first time
    loss: float


class Held:
    """One rank of one back-end."""

    def __init__(self, name: str, size: str, low: bool) -> None:
        self.size = SIZES[size]
        build = backends.load(name)
        _touch_libraries()
        self._baseline, self._share = _resident("VmRSS"), _proportional()
        torch.manual_seed(0)
        model = GPT(self.size)
        self._numel = sum(param.numel() for param in model.parameters())
        self._train = build(model, low=low)
        self._steps = 0
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew

    def steps(self, count: int) -> list[Step]:
        done = []
        for _ in range(count):
            tokens_BT = self._batch()
            used, started = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
            loss = self._train.backward(tokens_BT)
            self._train.update()
            seconds, now = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF)
            cpu = now.ru_utime - used.ru_utime + now.ru_stime - used.ru_stime
            done.append(Step(seconds, cpu, (now.ru_minflt - used.ru_minflt) * resource.getpagesize(), loss.item()))
        return done

    def count(self) -> dict[str, float]:
        """One step, not timed: bytes per parameter."""
        before = _settled()
        self._train.backward(self._batch())
        ctypes.CDLL(None).malloc_trim(0)
        rest, share = _resident("VmRSS") - self._baseline, _proportional() - self._share
        self._train.update()
        peak, wire = _resident("VmHWM") - self._baseline, _settled() - before
        counts = {"wire": wire, "rest": rest, "share": share, "peak": peak}
        return {name: count / self._numel for name, count in counts.items()}

    def numel(self) -> int:
        return self._numel

    def _batch(self) -> torch.Tensor:
        self._steps += 1
        return batch(self.size, self._steps, dist.get_rank(), dist.get_world_size())


def _touch_libraries() -> None:
    """Whatever a first forward, backward, step and collective load is not the model's memory."""
    layer = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    for dtype in (torch.float32, torch.bfloat16):
        torch.nn.functional.linear(torch.ones(4, 64, dtype=dtype), layer.weight.to(dtype)).sum().backward()
    optimizer.step()
    dist.all_reduce(torch.ones(1))


def _proportional() -> int:
    """Bytes of this process's memory; of what several have each has its part."""
    text = Path("/proc/self/smaps_rollup").read_text()
    return int(text.split("\nPss:")[1].split()[0]) * 1024


def _resident(field: str) -> int:
    """VmRSS, or VmHWM, its most: bytes."""
    text = Path("/proc/self/status").read_text()
    return int(text.split(f"{field}:")[1].split()[0]) * 1024


def connections() -> Iterator[socket.socket]:
    """This process's TCP sockets, each as a copy to be closed."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own descriptor is gone
            if stat.S_ISSOCK(os.stat(int(name)).st_mode):
                found = socket.socket(fileno=os.dup(int(name)))
                if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
                    yield found
                else:
                    found.close()


def sent_by(connection: socket.socket) -> int:
    """Bytes that it has sent, each once: the kernel sends some again where a receiver is late."""
    facts = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    sent, again = struct.unpack_from("<QQ", facts, SENT)
    return int(sent - again)


def _sent() -> int:
    """Bytes that this process's TCP connections have sent."""
    total = 0
    for connection in connections():
        with connection:
            total += sent_by(connection)
    return total


def _settled() -> int:
    """The same, once nothing more is sent behind the step's back."""
    before = -1
    while (now := _sent()) != before:
        before = now
        time.sleep(0.1)
    return now


def measure(names: list[str], size: str, low: bool, world: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per back-end, the limit first."""
    rows: dict[str, dict[str, Any]] = {}

    def can(backend: backends.Backend) -> bool:
        return (low or not backend.bf16_only) and world >= backend.least

    others = [name for name in names if name != "limit" and can(backends.BACKENDS[name])]
    together = _together(size, world)
    for first in range(0, len(others), together):
        for row in group(["limit", *others[first : first + together]], size, low, world, options):
            rows.setdefault(row["back-end"], row)
    return list(rows.values())


def _together(size: str, world: int) -> int:
    """Back-ends beside the limit that fit in seven tenths of the free memory, at 30 bytes a parameter at most."""
    available = memory_told()["MemAvailable"]
    numel = sum(param.numel() for param in _on_meta(size).parameters())
    return max(int(0.7 * available / (world * (30 * numel + (300 << 20)))) - 1, 1)


def _on_meta(size: str) -> GPT:
    with torch.device("meta"):
        return GPT(SIZES[size])


def group(names: list[str], size: str, low: bool, world: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per back-end; ratios are over the first."""
    held = {name: Ranks(world, Held, name, size, low, bound=not options.free) for name in names}
    for ranks in held.values():
        ranks("steps", 2)  # the first has optimizers make their state
    medians: dict[str, list[float]] = {name: [] for name in names}
    cpu: dict[str, list[float]] = {name: [] for name in names}
    fresh: dict[str, list[float]] = {name: [] for name in names}
    losses: dict[str, list[float]] = {name: [] for name in names}
    for number in range(options.rounds):
        for at in range(len(names)):
            name = names[(number + at) % len(names)]
            done = held[name]("steps", options.steps + 1)
            times = [max(step.seconds for step in ranks) for ranks in zip(*done, strict=True)]
            medians[name].append(statistics.median(times[1:]))  # the first finds another's data in the caches
            cpu[name].append(statistics.median(step.cpu for ranks in done for step in ranks[1:]))
            fresh[name].append(statistics.median(step.fresh for ranks in done for step in ranks[1:]))
            losses[name] += [statistics.fmean(step.loss for step in ranks) for ranks in zip(*done, strict=True)]
    rows = []
    for name in names:
        counts = held[name]("count")
        most = {key: max(count[key] for count in counts) for key in counts[0]}
        ratios = [mine / least for mine, least in zip(medians[name], medians[names[0]], strict=True)]
        worked = [mine / least for mine, least in zip(cpu[name], cpu[names[0]], strict=True)]
        rows.append(
            {
                "model": size, "dtype": "bf16" if low else "fp32", "ranks": world, "back-end": name,
                "step ms": round(1e3 * statistics.median(medians[name])), "over the limit": report.spread(ratios),
                "CPU over the limit": report.spread(worked), "fresh MB": round(statistics.median(fresh[name]) / 1e6, 1),
                **{f"{key} B/param": round(value, 2) for key, value in most.items()},
                "losses": losses[name],
            }
        )  # fmt: skip
        held[name].close()
    return rows


def compare_losses(rows: list[dict[str, Any]]) -> None:
    """Instead of its losses, a row says its last and how they compare with stage 0's."""
    losses = {row["back-end"]: row.pop("losses") for row in rows}
    reference = losses.get("zeroshard 0")
    for row in rows:
        mine = losses[row["back-end"]]
        row["final loss"] = f"{mine[-1]:.6f}"
        if row["back-end"] == "limit" or reference is None:
            row["against zeroshard's"] = "-"
        else:
            row["against zeroshard's"] = "same bits" if mine == reference else f"{mine[-1] - reference[-1]:+.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="10M parameters, one dtype, 2 ranks, 2 rounds, six back-ends"
    )
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["69M", "10M"])
    parser.add_argument("--dtypes", nargs="+", choices=["bf16", "fp32"], default=DTYPES)
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--backends", nargs="+", choices=backends.installed(), default=backends.installed())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="timed steps of a back-end in a round")
    parser.add_argument("--free", action="store_true", help="ranks run on whichever cores the kernel picks")
    parser.add_argument("--out", type=Path, default=report.RESULTS)
    options = parser.parse_args()
    if options.quick:
        options.sizes, options.dtypes, options.ranks, options.rounds = ["10M"], DTYPES[:1], [2], 2
        options.backends = ["limit", "zeroshard 0", "zeroshard 1", "zeroshard 3", "DDP", "FSDP2"]
    rows = []
    for size in options.sizes:
        for dtype in options.dtypes:
            for world in options.ranks:
                case = measure(options.backends, size, dtype == "bf16", world, options)
                compare_losses(case)
                rows += case
                _report(options, rows)  # so far: an hour that is interrupted is not lost


def _report(options: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    facts = {
        "rounds": options.rounds,
        "steps": options.steps,
        "bound": not options.free,
        "sizes": {name: SIZES[name] for name in options.sizes},
    }
    notes = [
        f"{options.rounds} interleaved rounds of {options.steps} timed steps: medians, least and most ratio.",
        "Every rank runs where the kernel puts it." if options.free else "Every rank is bound to one core.",
        "limit: the same work without communication: forward, backward, AdamW on 1/N of every parameter.",
        "All: fused AdamW, gloo, one thread per rank. bf16: bfloat16 parameters and reductions, fp32 masters. DDP, "
        "ZeroRedundancyOptimizer and fairscale have them from an AdamW that keeps masters (backends/masters.py), FSDP2 "
        "from its MixedPrecisionPolicy, DeepSpeed from its bf16 switch.",
        "Replicas: at 4 ranks, 2 of 2 ranks each. HSDP is what torch calls that: fully_shard over a mesh of two axes.",
    ]
    report.write(options.out, "train-quick" if options.quick else "train", facts, rows, notes)


if __name__ == "__main__":
    main()
