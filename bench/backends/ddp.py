"""torch's DistributedDataParallel; in bfloat16 with an AdamW that keeps fp32 masters."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..model import LEARNING_RATE
from . import Trainer, optimizers_of, plain
from .masters import adamw


def build(model: nn.Module, *, low: bool, muon: bool = False) -> Trainer:
    """muon: of matrices, in fp32 only: this one keeps no masters."""
    assert not (low and muon)
    if low:
        model.to(torch.bfloat16)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if muon:
        return plain(wrapped, *optimizers_of(wrapped, muon=True))
    return plain(wrapped, adamw(wrapped.parameters(), low=low, lr=LEARNING_RATE))
