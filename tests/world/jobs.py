"""Training on the ranks of a world."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zeroshard
from zeroshard import Layout


def built(stage: int) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(2)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer, zeroshard.shard(model, optimizer, stage=stage, layout=Layout(bucket_mib=0.0005))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, zero: Any, number: int) -> None:
    optimizer.zero_grad()
    for micro in range(2):
        generator = torch.Generator().manual_seed(100 * number + 10 * micro + dist.get_rank())
        x = nn.functional.dropout(torch.randn(4, 8, generator=generator), 0.25)  # of the global generator
        model(x).square().sum().backward()
    zero.clip_grad_norm_(5.0)
    optimizer.step()


def weights(model: nn.Module, zero: Any) -> bytes:
    with zero.gathered():
        return torch.cat([param.detach().reshape(-1) for param in model.parameters()]).numpy().tobytes()


def train(stage: int, folder: str = "", *, steps: int = 3) -> bytes:
    """The weights after a few steps; with a folder, also after a save behind the training, a load and one step again."""
    model, optimizer, zero = built(stage)
    for number in range(steps):
        step(model, optimizer, zero, number)
        if folder and number == 1:
            saving = zero.save(f"{folder}/at", asynchronous=True)
    if folder:
        saving.wait()
        zero.load(f"{folder}/at")
        step(model, optimizer, zero, steps)
    return weights(model, zero)
