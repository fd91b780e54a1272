"""Facts of this machine that explain other bits, slow runs and memory that is refused; None where nothing tells one."""

from __future__ import annotations

import contextlib
import os
import platform
import resource
from collections.abc import Callable
from typing import Any

import torch
from rich.markup import escape

import zeroshard
from zeroshard import device
from zeroshard.cli import launch, processor, screen
from zeroshard.errors import visible

PREFIXES = ("CUBLAS_", "CUDA_", "GLOO_", "MKL_", "NCCL_", "NVIDIA_TF32_", "OMP_", "PYTORCH_", "TORCH_")


def facts() -> dict[str, Any]:
    """Collect what `verify` writes as its environment. processor: equal where libraries choose the same kernels.

    All sizes are in bytes; a limit that is None is none. memory: of the machine, or what a container may take.
    """
    return {
        "zeroshard": zeroshard.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "NCCL": device.nccl(),
        "processor": processor.kind(),
        "processor_name": processor.name(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "computes_bf16": processor.computes_bf16(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": int(os.environ.get("OMP_NUM_THREADS") or torch.get_num_threads()),
        "memory": _tried(launch.memory_of_machine),
        "free_memory": _tried(lambda: launch.memory_told()["MemAvailable"]),
        "dev_shm": _tried(lambda: _size(os.statvfs("/dev/shm"))),
        "locked_memory": _limit(resource.RLIMIT_MEMLOCK),
        "open_files": _limit(resource.RLIMIT_NOFILE),
        "devices": [device.hardware(each) | device.describe(each) for each in device.accelerators()],
        "variables": {name: value for name, value in sorted(os.environ.items()) if name.startswith(PREFIXES)},
    }


def show(found: dict[str, Any]) -> None:
    """Print facts in a few lines."""
    sizes = {name: screen.nbytes_text(size) for name, size in found.items() if type(size) is int}
    bf16 = {True: "bf16", False: "no bf16", None: None}[found["computes_bf16"]]
    lines = {
        "torch": [found["torch"], f"Python {found['python']}", found["NCCL"] and f"NCCL {found['NCCL']}"],
        "cpu": [found["processor_name"], screen.many(found["cores"], "core"), found["instructions"], bf16],
        "memory": [
            f"{sizes.get('free_memory', 'unknown')} free of {sizes.get('memory', 'unknown')}",
            f"/dev/shm {sizes.get('dev_shm', 'absent')}",
            f"locked {'up to ' + sizes['locked_memory'] if 'locked_memory' in sizes else 'without limit'}",
            f"open files {'without limit' if found['open_files'] is None else format(found['open_files'], ',')}",
        ],
    }
    for at, each in enumerate(found["devices"]):
        lines[f"gpu {at}"] = [each["name"], each["memory"] and screen.nbytes_text(each["memory"])]
    if not found["devices"]:
        lines["gpu"] = ["none that torch sees"]
    lines["set"] = [" ".join(f"{name}={value}" for name, value in found["variables"].items()) or "nothing that matters"]
    told = {name: escape(visible(", ".join(filter(None, words)))) for name, words in lines.items()}
    screen.opening(f"This machine, for zeroshard {found['zeroshard']}", told)


def _size(room: os.statvfs_result) -> int:
    return room.f_blocks * room.f_frsize


def _limit(which: int) -> int | None:
    limit, _ = resource.getrlimit(which)
    return None if limit == resource.RLIM_INFINITY else limit


def _tried(ask: Callable[[], int]) -> int | None:
    with contextlib.suppress(OSError, ValueError, KeyError):
        return ask()
    return None
