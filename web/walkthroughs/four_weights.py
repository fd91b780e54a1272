"""The network of four weights from the article that implements ZeRO by hand (2 August 2025 edition).

    layer 1   h = w1*x1 + w2*x2,  a = ReLU(h)        owned by GPU 0
    layer 2   y = w3*a + w4                          owned by GPU 1
    loss      (y - t)^2 / 2

With activation checkpointing. The article's prose first keeps `a` after layer 1 and then discards it; both readings
are here: `checkpointing="whole"` (neither h nor a is kept, what its backward pass does) and "layers" (a is kept).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WEIGHTS = {"layer1.w1": 2.0, "layer1.w2": -3.0, "layer2.w3": 1.0, "layer2.w4": 0.5}
LEARNING_RATE = 0.1

Seen = list[tuple[str, float]]


class Flow:
    """The gradients of the loss with respect to what is computed on the way to it."""

    def __init__(self) -> None:
        self.gradients: dict[str, float] = {}

    def watched(self, name: str, value: Tensor) -> Tensor:
        if value.requires_grad:
            value.register_hook(lambda gradient: self.gradients.__setitem__(name, gradient.item()))
        return value


class Sample(NamedTuple):
    x: tuple[float, float]
    t: float


SAMPLES = (Sample((1.0, 3.0), 5.0), Sample((2.0, 1.0), 7.0))  # of GPU 0 and GPU 1


class Layer1(nn.Module):
    def __init__(self, seen: Seen, flow: Flow) -> None:
        super().__init__()
        self.flow = flow
        self.w1 = nn.Parameter(torch.tensor(WEIGHTS["layer1.w1"]))
        self.w2 = nn.Parameter(torch.tensor(WEIGHTS["layer1.w2"]))
        self.seen = seen

    def forward(self, x: Tensor) -> Tensor:
        h = self.flow.watched("h", self.w1 * x[0] + self.w2 * x[1])
        self.seen.append(("h", h.item()))
        a = self.flow.watched("a", torch.relu(h))
        self.seen.append(("a", a.item()))
        return a


class Layer2(nn.Module):
    def __init__(self, seen: Seen, flow: Flow) -> None:
        super().__init__()
        self.flow = flow
        self.w3 = nn.Parameter(torch.tensor(WEIGHTS["layer2.w3"]))
        self.w4 = nn.Parameter(torch.tensor(WEIGHTS["layer2.w4"]))
        self.seen = seen

    def forward(self, a: Tensor) -> Tensor:
        y = self.flow.watched("y", self.w3 * a + self.w4)
        self.seen.append(("y", y.item()))
        return y


class FourWeights(nn.Module):
    """`seen` records h, a and y as they are computed, recomputation in backward included; `flow` their gradients."""

    def __init__(self, checkpointing: Literal["none", "layers", "whole"] = "whole") -> None:
        super().__init__()
        self.seen: Seen = []
        self.checkpointing = checkpointing
        self.flow = Flow()
        self.layer1 = Layer1(self.seen, self.flow)
        self.layer2 = Layer2(self.seen, self.flow)

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpointing == "whole":
            return checkpoint(lambda x: self.layer2(self.layer1(x)), x, use_reentrant=False)  # type: ignore[no-any-return]
        if self.checkpointing == "layers":
            a = checkpoint(self.layer1, x, use_reentrant=False)
            return checkpoint(self.layer2, a, use_reentrant=False)  # type: ignore[no-any-return]
        return self.layer2(self.layer1(x))  # type: ignore[no-any-return]


def loss(model: nn.Module, sample: Sample, dtype: torch.dtype) -> Tensor:
    y = model(torch.tensor(sample.x, dtype=dtype))
    return 0.5 * (y - sample.t) ** 2  # type: ignore[no-any-return]
