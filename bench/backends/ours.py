"""zeroshard, with its defaults; with gradients that rest in bfloat16, as all the peers keep them; or with replicas."""

from __future__ import annotations

import torch
from torch import nn

import zeroshard

from ..model import LEARNING_RATE
from . import Trainer, plain


def build(model: nn.Module, *, low: bool, stage: int, low_gradients: bool = False, replicas: int = 1) -> Trainer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    dtype = torch.bfloat16 if low else None
    precision = zeroshard.Precision(param_dtype=dtype, grad_dtype=dtype if low_gradients else None)
    zeroshard.shard(model, optimizer, stage=stage, precision=precision, comm=zeroshard.Comm(replicas=replicas))
    return plain(model, optimizer)
