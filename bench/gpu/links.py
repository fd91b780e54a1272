"""Step: what moves how fast: between host and device, in the engine's own kernels, and between ranks by size.

At the end `machine.json`, for `zeroshard plan --machine machine.json`: what was measured, and the rest of the kind of
machine that is nearest by its devices' name.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from zeroshard import device
from zeroshard.arithmetic import exact_norms, kernel_dispatch, sums
from zeroshard.kernels import fused
from zeroshard.planner.machines import MACHINES, machine

from .place import compiler_of, ranks, synchronize, verbs
from .record import Record

FILE = "machine.json"
TIMES = 5
MIB = 1 << 20
CONTRIBUTIONS = (1, 2, 8, 64)


def run(record: Record) -> None:
    place = record.place
    sizes = [MIB // 16, MIB, 16 * MIB, 256 * MIB] if place.full else [4096, MIB // 16]
    moved = record.measure("host and device", lambda: place.run(1, transfers, sizes, deterministic=False)[0])
    record.measure("folds and norms", lambda: place.run(1, kernels, sizes, deterministic=False)[0])
    record.measure("the same by kernels of our own", lambda: place.run(1, own_kernels, sizes, deterministic=False)[0])
    sent = None
    for world in place.worlds if place.full else [2]:
        body = partial(place.run, world, collectives, sizes, timeout=600.0, deterministic=False)
        sent = record.measure(f"{world} ranks", lambda body=body: body()[0]) or sent
    if place.count < 2:
        record.skip("between ranks", "there is one device")
    elif moved and sent:
        record.case(FILE, _fit, record, moved, sent, sizes[-1])


def best(kind: str, call: Callable[[], Any]) -> float:
    """Seconds, the least of some, after one."""
    took = []
    for _ in range(TIMES + 1):
        synchronize(kind)
        since = time.perf_counter()
        call()
        synchronize(kind)
        took.append(time.perf_counter() - since)
    return min(took[1:])


def transfers(kind: str, sizes: list[int]) -> dict[str, Any]:
    """Bytes per second, by size."""
    found: dict[str, Any] = {}
    for nbytes in sizes:
        there, other = (
            torch.zeros(nbytes, dtype=torch.uint8, device=kind),
            torch.ones(nbytes, dtype=torch.uint8, device=kind),
        )
        row = {"device to itself": 2 * nbytes / best(kind, lambda a=there, b=other: a.copy_(b))}
        for name, here in _host(kind, nbytes).items():
            row[f"to the device, {name}"] = nbytes / best(kind, lambda a=there, b=here: a.copy_(b, non_blocking=True))
            row[f"to the host, {name}"] = nbytes / best(kind, lambda a=here, b=there: a.copy_(b, non_blocking=True))
        found[f"{nbytes:,}"] = {name: round(rate) for name, rate in row.items()}
    (first, *_) = device.accelerators() or [None]
    return found | ({"hardware": device.hardware(first)} if first is not None else {})


def _host(kind: str, nbytes: int) -> dict[str, torch.Tensor]:
    found = {"pageable": torch.zeros(nbytes, dtype=torch.uint8)}
    if kind == "cuda":
        found["pinned"] = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)
    return found


def kernels(kind: str, sizes: list[int]) -> dict[str, Any]:
    """Seconds of a fold of so many contributions in bfloat16 to a shard of so many bytes in fp32, and of its norm."""
    found: dict[str, Any] = {}
    for nbytes in sizes:
        numel = nbytes // 4 // 128 * 128
        total, row = torch.zeros(numel, device=kind), {}
        blocks = exact_norms.BlockMap(numel, 128, [(0, 0, numel)], total.device)
        for count in CONTRIBUTIONS:
            pieces = [torch.ones(numel, dtype=torch.bfloat16, device=kind)] * count
            row[f"fold of {count}"] = best(kind, lambda a=total, b=pieces: sums.fold(a, b, start=None, over=len(b)))
        row["norm"] = best(kind, lambda a=total, b=blocks: exact_norms.block_sums(a, b, 1, 2.0))
        found[f"{nbytes:,}"] = row
    return found


def own_kernels(kind: str, sizes: list[int]) -> dict[str, Any]:
    """Seconds of the same where `ZEROSHARD_KERNELS=1` has replaced torch's operations."""
    compiler_of(kind)
    place = torch.empty(0, device=kind).device
    kernel_dispatch.stand_ins |= {(name, place): call for name, call in fused.build(place).stand_ins.items()}
    return kernels(kind, sizes)


def collectives(kind: str, sizes: list[int]) -> dict[str, dict[str, float]]:
    """Seconds, of the slowest rank, by verb and by the bytes of the whole."""
    world, found = ranks.world(), {}
    gather, scatter = verbs.all_gather_single, verbs.reduce_scatter_single
    for nbytes in sizes:
        part = nbytes // 4 // world
        whole, other = torch.zeros(world * part, device=kind), torch.zeros(world * part, device=kind)
        own = whole[ranks.rank() * part : (ranks.rank() + 1) * part]
        moves: dict[str, Callable[[], Any]] = {
            "gather": partial(gather, whole, own),
            "exchange": partial(dist.all_to_all_single, other, whole),
            "reduce-scatter": partial(scatter, torch.zeros(part, device=kind), whole),
            "broadcast": partial(dist.broadcast, whole, 0),
        }
        for name, call in moves.items():
            took = torch.tensor([best(kind, call)], dtype=torch.float32, device=kind)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            found.setdefault(name, {})[f"{nbytes:,}"] = took.item()
    return found


def _fit(record: Record, moved: dict[str, Any], sent: dict[str, dict[str, float]], largest: int) -> dict[str, Any]:
    """From gathers: N - 1 parts of N travel, in N - 1 hops."""
    world = record.place.worlds[-1] if record.place.full else 2
    hardware, key = moved.get("hardware") or {}, f"{largest:,}"
    name = str(hardware.get("name") or "").lower()
    base = next((each for each in MACHINES.values() if each.name in name), MACHINES["h100"])
    told = asdict(base) | {
        "name": "this machine",
        "gpus": record.place.count,
        "memory": hardware.get("memory") or base.memory,
        "memory_bandwidth": moved[key]["device to itself"],
        "link": round((world - 1) / world * largest / sent["gather"][key]),
        "link_latency": min(sent["gather"].values()) / (world - 1),
        "source": f"measured: memory, link and its latency on {world} ranks; the rest is {base.name}'s",
    }
    path = record.path.parent / FILE
    path.write_text(json.dumps(told, indent=2) + "\n")
    machine(str(path))  # the planner reads it
    return told
