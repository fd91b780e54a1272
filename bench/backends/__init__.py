"""One file per library, each with the code that its documentation has a user write: build(model, low=...) -> Trainer.

low: parameters and reductions in bfloat16, with fp32 masters, as far as the library has them.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..model import loss_of


class Trainer(NamedTuple):
    """A training step in two halves."""

    backward: Callable[[Tensor], Tensor]  # tokens -> this rank's loss
    update: Callable[[], None]


class Backend(NamedTuple):
    module: str
    options: Mapping[str, Any] = MappingProxyType({})
    needs: str = "torch"
    bf16_only: bool = False
    least: int = 1  # ranks


BACKENDS = {
    "limit": Backend("limit"),
    "zeroshard 0": Backend("ours", {"stage": 0}),
    "zeroshard 1": Backend("ours", {"stage": 1}),
    "zeroshard 2": Backend("ours", {"stage": 2}),
    "zeroshard 3": Backend("ours", {"stage": 3}),
    **{
        f"zeroshard {stage}, bf16 gradients": Backend("ours", {"stage": stage, "low_gradients": True}, bf16_only=True)
        for stage in (1, 2, 3)
    },
    **{f"zeroshard {stage}, 2 replicas": Backend("ours", {"stage": stage, "replicas": 2}, least=4) for stage in (2, 3)},
    **{
        f"zeroshard {stage}, shared memory": Backend("ours", {"stage": stage, "transport": "shared"})
        for stage in (1, 2, 3)
    },
    **{
        f"zeroshard {stage}, one copy": Backend("ours", {"stage": stage, "transport": "shared", "once": True})
        for stage in (1, 2)
    },
    "DDP": Backend("ddp"),
    "DDP + ZeroRedundancyOptimizer": Backend("redundancy"),
    "FSDP2, no reshard": Backend("fsdp2", {"reshard": False}),
    "FSDP2": Backend("fsdp2", {"reshard": True}),
    "FSDP2, HSDP of 2 replicas, no reshard": Backend("fsdp2", {"reshard": False, "replicas": 2}, least=4),
    "FSDP2, HSDP of 2 replicas": Backend("fsdp2", {"reshard": True, "replicas": 2}, least=4),
    "DeepSpeed 1": Backend("deepspeed", {"stage": 1}, needs="deepspeed"),
    "DeepSpeed 2": Backend("deepspeed", {"stage": 2}, needs="deepspeed"),
    "DeepSpeed 3": Backend("deepspeed", {"stage": 3}, needs="deepspeed"),
    "fairscale ShardedDDP + OSS": Backend("fairscale", needs="fairscale"),
}


def installed() -> list[str]:
    return [name for name, backend in BACKENDS.items() if importlib.util.find_spec(backend.needs)]


def load(name: str) -> Callable[..., Trainer]:
    """build(model, low=...) of this back-end, all its libraries imported."""
    backend = BACKENDS[name]
    return functools.partial(importlib.import_module(f".{backend.module}", __name__).build, **backend.options)


def plain(model: nn.Module, optimizer: torch.optim.Optimizer) -> Trainer:
    """The loop that every torch user writes."""

    def backward(tokens_BT: Tensor) -> Tensor:
        loss = loss_of(model, tokens_BT)
        loss.backward()
        return loss.detach()

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Trainer(backward, update)
