"""Step: what the engine costs over plain PyTorch on one device, and what host memory and files cost over its own.

    python -m bench.gpu.speed [--size 1B] [--folder DIR] [--device cpu --size tiny]

A GPT in bfloat16 with fp32 masters, one rank, so that nothing is sent and what is left is the engine. Every row trains
in turn with plain PyTorch, round after round; its ratio is to plain's in the same round. The device is waited for
before and after a round, never in it, so that the host runs ahead as it does in a training; "host ms" is what it takes
for itself. The bound of a row whose optimizer is in host memory: the most of the device's own step, the bytes it moves
at the measured speed of the bus, and the step of the same optimizer on the CPU alone.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import zeroshard
from zeroshard import Offload, Precision

from .. import report
from ..backends import fsdp2, plain
from ..backends.masters import MasterAdamW
from ..model import GPT, LEARNING_RATE, SIZES, Size, batch
from .links import best
from .place import GROUPS, synchronize
from .record import Record

SIZES_HERE = {**SIZES, "1B": Size(20, 2048, 16, 32768, sequences=8, tokens=1024)}
HOST = {"optimizer": "cpu", "gradients": "cpu"}
EVERYTHING = {**HOST, "parameters": "cpu"}
ROWS: dict[str, dict[str, Any]] = {
    "plain": {},
    **{f"stage {stage}": {"stage": stage} for stage in range(4)},
    "plain, clipped": {"clip": 1.0},
    "stage 3, clipped": {"stage": 3, "clip": 1.0},
    "FSDP2": {"fsdp2": True},
    "FSDP2, clipped": {"fsdp2": True, "clip": 1.0},
    "stage 3, compiled": {"stage": 3, "compiled": True},
    "stage 2, optimizer in host memory": {"stage": 2, "offload": {**HOST, "step": "host"}},
    "stage 2, optimizer in host memory, stepped on the device": {"stage": 2, "offload": HOST},
    "stage 3, all in host memory": {"stage": 3, "offload": {**EVERYTHING, "step": "host"}},
    "stage 3, all in host memory, stepped on the device": {"stage": 3, "offload": EVERYTHING},
    "stage 3, optimizer in files": {"stage": 3, "offload": {"optimizer": "nvme", "step": "host"}},
    "stage 3, optimizer in files, stepped on the device": {"stage": 3, "offload": {"optimizer": "nvme"}},
}


class Row:
    """One way to train, built, with what it holds."""

    def __init__(self, options: dict[str, Any], size: Size, device: torch.device, folder: str) -> None:
        self.size, self.device, self.number = size, device, 0
        self.clip = options.get("clip")
        torch.manual_seed(0)
        with device:  # a billion numbers are drawn faster there
            self.model = model = GPT(size)
        self.numel = sum(param.numel() for param in model.parameters())
        self.zero = None
        if "fsdp2" in options:
            if not dist.is_initialized():
                dist.init_process_group(GROUPS[device.type], store=dist.HashStore(), rank=0, world_size=1)
            self.trainer = fsdp2.build(model, low=True, reshard=True, wide=True)
            return
        if "stage" not in options:
            model.to(torch.bfloat16)
            self.trainer = plain(model, MasterAdamW(model.parameters(), lr=LEARNING_RATE))
            return
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
        places = options.get("offload", {})
        offload = Offload(**places, path=folder if "nvme" in places.values() else None)
        precision = Precision(param_dtype=torch.bfloat16)
        self.zero = zeroshard.shard(model, optimizer, stage=options["stage"], precision=precision, offload=offload)
        self.trainer = plain(torch.compile(model) if options.get("compiled") else model, optimizer)

    def steps(self, count: int) -> tuple[float, float]:
        """Seconds of each, with the device's work and until the host had queued it."""
        batches = [batch(self.size, self.number + at, 0, 1).to(self.device) for at in range(count)]
        self.number += count
        synchronize(self.device.type)
        since = time.perf_counter()
        for tokens_BT in batches:
            self.trainer.backward(tokens_BT)
            if self.clip is not None:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
            self.trainer.update()
        queued = time.perf_counter() - since
        synchronize(self.device.type)
        return (time.perf_counter() - since) / count, queued / count


def bus(device: torch.device, numel: int = 1 << 26) -> float:
    """Bytes per second between pinned host memory and the device, the slower way."""
    there = torch.zeros(numel, device=device)
    here = torch.zeros(numel, pin_memory=device.type == "cuda")
    slowest = max(best(device.type, lambda: there.copy_(here)), best(device.type, lambda: here.copy_(there)))
    return numel * 4 / slowest


def cpu_step(numel: int) -> float:
    """Seconds of fused AdamW on the CPU over so many elements."""
    count = min(numel, 1 << 26)
    param = torch.nn.Parameter(torch.zeros(count))
    param.grad = torch.ones(count)
    optimizer = torch.optim.AdamW([param], fused=True)
    optimizer.step()
    return best("cpu", optimizer.step) * numel / count


def measure(kind: str, name: str, size: str, folder: str, rounds: int, steps: int) -> dict[str, Any]:
    """One row beside plain PyTorch."""
    device, whole = torch.device(kind), SIZES_HERE[size]
    first, held = Row(ROWS["plain"], whole, device, folder), None
    both = [first, first if name == "plain" else Row(ROWS[name], whole, device, folder)]
    medians: list[list[float]] = [[], []]
    hosts: list[float] = []
    for row in both:
        row.steps(2)  # optimizers make their state, compilers compile
    for number in range(rounds):
        for at in (0, 1) if number % 2 else (1, 0):
            seconds, host = both[at].steps(steps)
            medians[at].append(seconds)
            hosts += [host] * at
    mine = both[1]
    if mine.zero is not None:
        ledger = mine.zero.ledger()
        held = {tier: sum(states.values()) for tier, states in ledger.tiers.items() if any(states.values())}
    ratio = [ours / base for base, ours in zip(*medians, strict=True)]
    row = {
        "row": name,
        "step ms": round(1e3 * statistics.median(medians[1]), 2),
        "host ms": round(1e3 * statistics.median(hosts), 2),
        "over plain": report.spread(ratio),
    }
    if "offload" in ROWS[name] and "nvme" not in ROWS[name]["offload"].values():
        moved = 4 * mine.numel  # gradients out, parameters in, two bytes each
        bound = max(statistics.median(medians[0]), moved / bus(device), cpu_step(mine.numel))
        row["over its bound"] = f"{statistics.median(medians[1]) / bound:.2f}"
    else:
        row["over its bound"] = "-"
    row["tokens/s"] = round(whole.sequences * whole.tokens / statistics.median(medians[1]))
    row["held"] = ", ".join(f"{tier} {count:,}" for tier, count in (held or {}).items()) or "-"
    return row


def run(record: Record) -> None:
    place = record.place
    size, rounds, steps = ("1B", 5, 5) if place.full else ("tiny", 1, 2)
    with tempfile.TemporaryDirectory() as folder:
        for name in ROWS:
            if ROWS[name].get("compiled") and not place.full:
                record.skip(name, f"nothing is compiled for {place.kind}")
                continue
            if ROWS[name].get("fsdp2") and place.kind == "emu":
                record.skip(name, "FSDP2 knows no emulated device")
                continue
            body = (measure, name, size, folder, rounds, steps)
            record.measure(name, lambda body=body: place.run(1, *body, timeout=600, deterministic=False)[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", choices=SIZES_HERE, default="1B")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--folder", help="on a local disk, for files (default: a temporary one)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--out", type=Path, default=report.RESULTS)
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.exit(2, "no CUDA device here: --device cpu --size tiny tries the program itself\n")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        rows = []
        for name in options.rows:
            rows.append(measure(options.device, name, options.size, folder, options.rounds, options.steps))
            if device.type == "cuda":
                torch.cuda.empty_cache()
    facts = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "size": SIZES_HERE[options.size],
        "rounds": options.rounds,
    }
    notes = [
        f"{facts['device']}, {options.rounds} rounds of {options.steps} steps in turn with plain PyTorch.",
        "plain: bfloat16 parameters, fp32 masters, fused AdamW (backends/masters.py).",
    ]
    report.write(options.out, "speed", facts, rows, notes)


if __name__ == "__main__":
    main()
