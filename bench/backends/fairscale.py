"""fairscale's ShardedDataParallel and OSS, its stage 2; in bfloat16 with an AdamW that keeps fp32 masters."""

from __future__ import annotations

from typing import Any

import torch
from fairscale.nn.data_parallel import ShardedDataParallel
from fairscale.optim.oss import OSS
from torch import nn

from ..model import LEARNING_RATE
from . import Trainer, plain
from .masters import MasterAdamW


def build(model: nn.Module, *, low: bool) -> Trainer:
    if low:
        model.to(torch.bfloat16)
    made: dict[str, Any] = {"optim": MasterAdamW} if low else {"optim": torch.optim.AdamW, "fused": True}
    optimizer = OSS(model.parameters(), lr=LEARNING_RATE, **made)
    return plain(ShardedDataParallel(model, optimizer), optimizer)
