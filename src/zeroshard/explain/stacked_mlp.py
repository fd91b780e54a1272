"""The test model of the article on ZeRO-1 as Buffer, DDP and Distributed Optimizer: residual MLP blocks.

hidden 13 x 3 layers have 4,251 parameters, which neither 2 nor 4 divides: the article's test of padding. Jobs for the
commands that ask for one by name, with Adam and the sum of all outputs as the loss, as there:

    default    the listing's defaults, 3 layers of 512: 6,299,136 parameters
    narrow     3 layers of 64
    padding    the article's test of padding
    profile    the article's own: 10 layers of 4,096, 1,342,382,080 parameters
    whole      the same on the meta device: each rank makes one block at a time, and files can hold all states
    scaled     the same at an eighth of the width: 20,997,120 parameters, for a run on one machine

    zeroshard simulate zeroshard.explain.stacked_mlp:profile --ranks 4 --stage 1 --precision bf16 --grad-dtype bf16
    zeroshard plan zeroshard.explain.stacked_mlp:scaled --ranks 4 --stage 1 --precision bf16 --grad-dtype bf16 --check
    zeroshard plan zeroshard.explain.stacked_mlp:whole --ranks 4 --stage 1 --precision bf16 --grad-dtype bf16 \\
        --offload nvme --check
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class MLP(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(hidden, hidden * 4)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden * 4, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))  # type: ignore[no-any-return]


class StackedMLP(nn.Module):
    def __init__(self, hidden: int = 512, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList([MLP(hidden) for _ in range(layers)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


ROWS = 4  # of a micro-batch


def job(hidden: int, layers: int, *, alike: bool = False) -> dict[str, Any]:
    """Make a job. alike: has every rank the same micro-batch, as in the article's tests?"""

    def batch(step: int, index: int) -> Tensor:
        seed = 1000 * step + (0 if alike else index)
        return torch.randn(ROWS, hidden, generator=torch.Generator().manual_seed(seed))

    return {
        "model": StackedMLP(hidden, layers),
        "optimizer": lambda params: torch.optim.Adam(params, lr=1e-3),
        "batch": batch,
        "loss": lambda model, x: model(x).sum(),
    }


def default() -> dict[str, Any]:
    return job(512, 3, alike=True)


def narrow() -> dict[str, Any]:
    return job(64, 3, alike=True)


def padding() -> dict[str, Any]:
    return job(13, 3, alike=True)


def profile() -> dict[str, Any]:
    return job(4096, 10)


def whole() -> dict[str, Any]:
    with torch.device("meta"):
        return job(4096, 10)


def scaled() -> dict[str, Any]:
    return job(512, 10)
