"""Warnings of steps on the host, beside an accelerator, that take longer than they need to, or have other bits."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from ...device import asynchronous
from ...policies.offload import Offload

log = logging.getLogger("zeroshard")

NODES = Path("/sys/devices/system/node")  # Linux: a folder for each part of memory, with the cores that are near it


def warn_of_host_steps(asked: Offload, found: Offload) -> None:
    """Say that the host steps what the program did not ask to be stepped there, with other bits than the device's."""
    if asked.step != found.step == "host":
        log.warning(
            "split masters are stepped in host memory, with the bits of the CPU's optimizer: "
            'Offload(step="host") says so, and whole masters are stepped on the device'
        )


def warn_of_slow_steps(optimizers: Sequence[torch.optim.Optimizer], offload: Offload, device: torch.device) -> None:
    """Warn of optimizers that step on the host in many passes over its memory, and of cores that no rank uses."""
    if not asynchronous(device) or offload.stepped_there or not offload.leaves:
        return
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        if any(group.get("fused", True) in (None, False) for group in optimizer.param_groups):
            log.warning(
                "%s steps in host memory, in a pass for each of its operations: %s(..., fused=True)", kind, kind
            )
    mine = os.sched_getaffinity(0)
    ranks, cores = int(os.environ.get("LOCAL_WORLD_SIZE") or 1), len(mine)
    if (threads := torch.get_num_threads()) < cores // ranks:
        log.warning(
            "a rank's optimizer steps in host memory with %d of this machine's %d cores, and has %d ranks beside it: "
            "OMP_NUM_THREADS=%d", threads, cores, ranks - 1, cores // ranks,
        )  # fmt: skip
    if (spread := sum(bool(near & mine) for near in numa_nodes())) > 1:
        log.warning(
            "a rank's optimizer steps in host memory with cores of %d NUMA nodes, which reach each other's memory "
            "slowly: torchrun --numa-binding=node", spread,
        )  # fmt: skip


def numa_nodes() -> Iterator[set[int]]:
    """Yield the cores of each NUMA node of this machine, none where the system does not tell."""
    for path in NODES.glob("node*/cpulist"):
        ends = [part.split("-") for part in path.read_text(encoding="ascii").strip().split(",") if part]
        yield {core for first, *last in ends for core in range(int(first), int((last or [first])[0]) + 1)}
