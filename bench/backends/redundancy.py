"""DistributedDataParallel with torch's ZeroRedundancyOptimizer: optimizer state and masters sharded, by tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from ..model import LEARNING_RATE
from . import Trainer, plain
from .masters import MasterAdamW


def build(model: nn.Module, *, low: bool) -> Trainer:
    if low:
        model.to(torch.bfloat16)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    made: dict[str, Any] = (
        {"optimizer_class": MasterAdamW} if low else {"optimizer_class": torch.optim.AdamW, "fused": True}
    )
    return plain(wrapped, ZeroRedundancyOptimizer(wrapped.parameters(), lr=LEARNING_RATE, **made))
