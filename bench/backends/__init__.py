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

from ..model import LEARNING_RATE, loss_of


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

SETTINGS = {  # of `bench.pairs`, which no table of back-ends has
    "zeroshard 3, stored": Backend("ours", {"stage": 3, "formats": {"store_params": True}}),
    "zeroshard 3, weights in 8 bits": Backend("ours", {"stage": 3, "formats": {"fp8": True}}),
    "zeroshard 2, split masters": Backend("ours", {"stage": 2, "formats": {"split_master": True}}),
    "zeroshard 3, Muon": Backend("ours", {"stage": 3, "muon": True}),
    "DDP, Muon": Backend("ddp", {"muon": True}),
    "FSDP2, Muon": Backend("fsdp2", {"reshard": True, "muon": True}),
}


def installed() -> list[str]:
    return [name for name, backend in BACKENDS.items() if importlib.util.find_spec(backend.needs)]


def load(name: str) -> Callable[..., Trainer]:
    """build(model, low=...) of this back-end, all its libraries imported."""
    backend = {**BACKENDS, **SETTINGS}[name]
    return functools.partial(importlib.import_module(f".{backend.module}", __name__).build, **backend.options)


def optimizers_of(model: nn.Module, *, muon: bool = False) -> list[torch.optim.Optimizer]:
    """AdamW of everything; or Muon of the blocks' matrices, and AdamW of the rest."""
    named = {name.removeprefix("module."): param for name, param in model.named_parameters()}
    matrices = [param for name, param in named.items() if muon and name.startswith("blocks.") and param.dim() == 2]
    others = [param for param in named.values() if not any(param is matrix for matrix in matrices)]
    adamw = torch.optim.AdamW(others, lr=LEARNING_RATE, fused=True)
    return [torch.optim.Muon(matrices, lr=LEARNING_RATE), adamw] if muon else [adamw]


def plain(model: nn.Module, *optimizers: torch.optim.Optimizer) -> Trainer:
    """The loop that every torch user writes."""

    def backward(tokens_BT: Tensor) -> Tensor:
        loss = loss_of(model, tokens_BT)
        loss.backward()
        return loss.detach()

    def update() -> None:
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return Trainer(backward, update)
