"""Step: what a training step asks of the device: kernels launched, and times that the host waits for it.

A step with clipping asks for one number of its own, the norm; whatever else makes the host wait is the engine's. On
CUDA they are counted by torch's profiler, whose traces stay beside this step's file, and once more with every wait an
error; on the emulated device by its own counters.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from zeroshard import device
from zeroshard.layout.stage import STAGES

from ..backends import fsdp2, plain
from . import training
from .place import ROOT, ranks, synchronize
from .record import Record, Wrong

WAITS = ("Synchronize", "cudaMemcpy")  # of the runtime's calls, those for which a host waits


def run(record: Record) -> None:
    folder = str(record.path.parent.absolute())
    for stage in STAGES:
        record.measure(f"stage {stage}, one step", lambda stage=stage: record.place.run(1, counted, stage, folder)[0])
        record.case(f"stage {stage}, the engine asks nothing", lambda stage=stage: record.place.run(1, quiet, stage)[0])
    if record.place.kind == "cuda":
        record.case("CSAN, torch's sanitizer of streams, at stage 3", _sanitized)
    else:
        record.skip("CSAN, torch's sanitizer of streams", "it knows CUDA's; the emulated device has one, always on")


def _trained(kind: str, stage: int | None) -> Any:
    """A step that can be taken again, after two. stage: None for FSDP2."""
    if stage is None:
        model = training.build(kind)
        trainer = fsdp2.build(model, low=True, reshard=True, wide=True)
    else:
        model, optimizer, _ = training.shard(kind, "bf16", stage)
        trainer = plain(model, optimizer)
    batch = training.batches(kind)
    tokens = [batch(number, 0) for number in range(6)]

    def step(number: int) -> None:
        trainer.backward(tokens[number])
        torch.nn.utils.clip_grad_norm_(model.parameters(), training.CLIP)
        trainer.update()

    step(0), step(1)
    synchronize(kind)
    return step


def counted(kind: str, stage: int | None, folder: str) -> dict[str, Any]:
    step = _trained(kind, stage)
    before = Counter(device.asked)
    if kind == "emu":
        import emulated

        with emulated.counted() as counts:
            step(2)
        return {"launches": counts.launches.total(), "waits": counts.drains.total(),
                "waits by site": counts.by_site(counts.drains), "asked": device.asked - before}  # fmt: skip
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities[: 1 + (kind == "cuda")]) as profile:
        step(2)
        synchronize(kind)
    if ranks.world() == 1:
        profile.export_chrome_trace(f"{folder}/trace-stage-{stage}.json")
    events = Counter({event.key: event.count for event in profile.key_averages()})
    waits = {name: count for name, count in events.items() if name.startswith("cuda") and any(w in name for w in WAITS)}
    launches = sum(count for name, count in events.items() if "LaunchKernel" in name)
    copies = sum(count for name, count in events.items() if name.startswith("Memcpy"))
    return {"launches": launches, "copies": copies, "waits": waits, "asked": device.asked - before}


def quiet(kind: str, stage: int) -> dict[str, int]:
    """No wait at all is the engine's: it reads a device's numbers by `device.ask` and `device.equal` alone."""
    step = _trained(kind, stage)
    before = Counter(device.asked)
    if kind == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        step(2), step(3)
    finally:
        if kind == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    asked = device.asked - before
    if kind != "cpu" and asked:
        raise Wrong(f"in two steps: {dict(asked)}")
    return dict(asked)


def _sanitized() -> str:
    """Of reads and writes that no event orders, torch's own: it does not see NCCL's stream."""
    program = "from bench.gpu import training; training.sharded('cuda', 'bf16', 3)"
    variables = {**os.environ, "TORCH_CUDA_SANITIZER": "1"}
    words = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(words, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    if done.returncode or "CSAN" in done.stderr:
        raise Wrong(done.stderr)
    return f"{Path(sys.executable).name} ended with 0, and said nothing"
