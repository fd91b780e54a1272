"""torch's DistributedDataParallel; in bfloat16 with an AdamW that keeps fp32 masters."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..model import LEARNING_RATE
from . import Trainer, plain
from .masters import adamw


def build(model: nn.Module, *, low: bool) -> Trainer:
    if low:
        model.to(torch.bfloat16)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return plain(wrapped, adamw(wrapped.parameters(), low=low, lr=LEARNING_RATE))
