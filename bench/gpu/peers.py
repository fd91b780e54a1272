"""Step: steps of all devices together, of zeroshard and of FSDP2 and DDP beside it, with clipping and without.

Each row is a set of processes of its own, so that one that runs out of memory ends no other. Devices are waited for
before and after some steps, never between them; the slowest rank counts. A rehearsal on the emulated device runs what
is not zeroshard on the CPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zeroshard
from zeroshard import Comm, Precision

from ..backends import Trainer, ddp, fsdp2, plain
from ..model import GPT, LEARNING_RATE, Size, batch
from .place import Place, ranks, synchronize
from .record import Record

SIZES = {
    "1B": Size(20, 2048, 16, 32768, sequences=1),
    "7B": Size(32, 4096, 32, 32768, sequences=1),
    "tiny": Size(2, 32, 2, 64, sequences=1),
}
TOKENS = 8192  # of a rank in a step
LENGTHS, CLIP = (2048, 4096, 8192), 1.0
LARGE = 4  # ranks that the states of 7B are spread over, at least


def _ours(model: nn.Module, *, stage: int, comm: Comm = Comm(), compiled: bool = False) -> Trainer:  # noqa: B008
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    zeroshard.shard(model, optimizer, stage=stage, precision=Precision(param_dtype=torch.bfloat16), comm=comm)
    return plain(torch.compile(model) if compiled else model, optimizer)


BACKENDS: dict[str, Callable[..., Trainer]] = {
    "zeroshard 1": partial(_ours, stage=1),
    "zeroshard 3": partial(_ours, stage=3),
    "zeroshard 3, native sums": partial(_ours, stage=3, comm=Comm(reduce="native")),
    "zeroshard 3, 2 replicas": partial(_ours, stage=3, comm=Comm(replicas=2)),
    "zeroshard 3, compiled": partial(_ours, stage=3, compiled=True),
    "FSDP2, sums in fp32": partial(fsdp2.build, low=True, reshard=True, wide=True),
    "FSDP2, sums in bf16": partial(fsdp2.build, low=True, reshard=True),
    "DDP": partial(ddp.build, low=True),
}


def run(record: Record) -> None:
    place = record.place
    world = place.worlds[-1] if place.full else 2
    if place.share:
        record.skip("all", "times of ranks that share a device are of no worth")
        return
    for size in ("1B", "7B") if place.full else ("tiny",):
        for name in BACKENDS:
            here = Place("cpu", place.count) if place.kind == "emu" and not name.startswith("zeroshard") else place
            if why := _impossible(name, size, world, place):
                record.skip(f"{size}, {name}", why)
            else:
                case = f"{size}, {world} ranks, {name}" + ", on the CPU" * (here is not place)
                record.measure(case, _slowest, here, world, name, size, place.full)


def _impossible(name: str, size: str, world: int, place: Place) -> str:
    if "compiled" in name and not place.full:
        return f"nothing is compiled for {place.kind}"
    if "replicas" in name and world % 2:
        return f"{world} ranks are no two replicas"
    if size == "7B" and (world < LARGE or name == "DDP"):
        return "its states do not fit"
    return ""


def _slowest(place: Place, world: int, name: str, size: str, full: bool) -> list[dict[str, Any]]:
    """By length and clipping."""
    found = place.run(world, train, name, size, full, timeout=600.0, deterministic=False)
    return [max(rows, key=lambda row: row["step ms"]) for rows in zip(*found, strict=True)]


def train(kind: str, name: str, size: str, full: bool) -> list[dict[str, Any]]:
    lengths, steps = (LENGTHS, 10) if full else ((16,), 1)
    whole = SIZES[size]._replace(tokens=max(lengths))
    torch.manual_seed(0)
    with torch.device(kind):
        model = GPT(whole)
    trainer = BACKENDS[name](model)
    rows = []
    for tokens in lengths:
        shape = whole._replace(tokens=tokens, sequences=ranks.world() * max(TOKENS // tokens if full else 1, 1))
        for clip in (False, True):
            seconds, host = _timed(kind, trainer, model, shape, clip, steps)
            row = {"tokens": tokens, "clip": clip, "step ms": round(1e3 * seconds, 2), "host ms": round(1e3 * host, 2)}
            row["tokens/s of a rank"] = round(shape.sequences // ranks.world() * tokens / seconds)
            rows.append(row | _memory(kind))
    return rows


def _timed(kind: str, trainer: Trainer, model: GPT, shape: Size, clip: bool, steps: int) -> tuple[float, float]:
    """Seconds of a step, with the devices' work and until this host had queued it."""
    mine = [_tokens(shape, number).to(kind) for number in range(steps + 1)]
    _step(trainer, model, mine[-1], clip)
    if kind != "cpu":
        torch.get_device_module(kind).reset_peak_memory_stats()
    synchronize(kind)
    dist.barrier() if kind == "cpu" else dist.all_reduce(torch.zeros(1, device=kind))
    synchronize(kind)
    since = time.perf_counter()
    for tokens_BT in mine[:-1]:
        _step(trainer, model, tokens_BT, clip)
    host = time.perf_counter() - since
    synchronize(kind)
    return (time.perf_counter() - since) / steps, host / steps


def _tokens(shape: Size, number: int) -> torch.Tensor:
    return batch(shape, number, ranks.rank(), ranks.world())


def _step(trainer: Trainer, model: GPT, tokens_BT: torch.Tensor, clip: bool) -> None:
    trainer.backward(tokens_BT)
    if clip:
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    trainer.update()


def _memory(kind: str) -> dict[str, int]:
    """The most that tensors took, what the allocator kept, and what is taken beside it, as by NCCL."""
    if kind == "cpu":
        return {}
    module = torch.get_device_module(kind)
    found = {"allocated": module.max_memory_allocated()}
    if kind == "cuda":
        free, total = module.mem_get_info()
        found |= {"reserved": module.memory_reserved(), "beside": total - free - module.memory_reserved()}
    return found
