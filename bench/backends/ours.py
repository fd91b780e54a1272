"""zeroshard, with its defaults."""

from __future__ import annotations

import torch
from torch import nn

import zeroshard

from ..model import LEARNING_RATE
from . import Trainer, plain


def build(model: nn.Module, *, low: bool, stage: int) -> Trainer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    precision = zeroshard.Precision(param_dtype=torch.bfloat16 if low else None)
    zeroshard.shard(model, optimizer, stage=stage, precision=precision)
    return plain(model, optimizer)
