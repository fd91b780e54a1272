"""DeepSpeed's engine, with its default sizes; in bfloat16 by its own switch."""

from __future__ import annotations

import os

os.environ["DS_ACCELERATOR"] = "cpu"  # read as it is imported

import deepspeed
import torch
from torch import Tensor, nn

from ..model import LEARNING_RATE, loss_of
from . import Trainer


def build(model: nn.Module, *, low: bool, stage: int) -> Trainer:
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": stage},
            "bf16": {"enabled": low},
            "steps_per_print": 1 << 30,
        },
        dist_init_required=False,
    )

    def backward(tokens_BT: Tensor) -> Tensor:
        loss = loss_of(engine, tokens_BT)
        engine.backward(loss)
        return loss.detach()

    return Trainer(backward, engine.step)
