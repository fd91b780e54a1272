"""The test model of the article on ZeRO-1 as Buffer, DDP and Distributed Optimizer: residual MLP blocks.

hidden 13 x 3 layers have 4,251 parameters, which neither 2 nor 4 divides: the article's test of padding.
"""

from __future__ import annotations

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
