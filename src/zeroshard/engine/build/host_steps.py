"""Warnings of steps on the host, beside an accelerator, that take longer than they need to."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

import torch

from ...device import asynchronous
from ...events import DEVICE
from ...policies.offload import Offload

log = logging.getLogger("zeroshard")


def warn_of_slow_steps(optimizers: Sequence[torch.optim.Optimizer], offload: Offload, device: torch.device) -> None:
    """Warn of optimizers that step on the host in many passes over its memory, and of cores that no rank uses."""
    if not asynchronous(device) or offload.stepped_there or offload.tiers("optimizer") == {DEVICE: 1.0}:
        return
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        if any(group.get("fused", True) in (None, False) for group in optimizer.param_groups):
            log.warning(
                "%s steps in host memory, in a pass for each of its operations: %s(..., fused=True)", kind, kind
            )
    ranks, cores = int(os.environ.get("LOCAL_WORLD_SIZE") or 1), len(os.sched_getaffinity(0))
    if (threads := torch.get_num_threads()) < cores // ranks:
        log.warning(
            "a rank's optimizer steps in host memory with %d of this machine's %d cores, and has %d ranks beside it: "
            "OMP_NUM_THREADS=%d", threads, cores, ranks - 1, cores // ranks,
        )  # fmt: skip
