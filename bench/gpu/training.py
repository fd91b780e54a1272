"""What is trained where bits are compared: a small GPT, sharded, and in plain torch on the same device."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import zeroshard
from zeroshard import Layout, Offload, Precision
from zeroshard.cli import reference
from zeroshard.reference import total_norm

from ..model import GPT, Size, loss_of
from .place import ranks
from .record import Wrong

SIZE = Size(2, 32, 2, 64, sequences=2, tokens=16)
DTYPES = {"fp32": None, "bf16": torch.bfloat16}
STEPS, CLIP = 2, 0.5
Loss = Callable[[torch.nn.Module, Tensor], Tensor]
Make = Callable[[Any], Any]  # of parameters one optimizer, or several


class WithBuffer(GPT):
    """Its buffer is sent before a forward, as that of rotary embeddings is. trip: called in each forward."""

    def __init__(self, size: Size = SIZE) -> None:
        super().__init__(size)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, size.vocabulary))
        self.trip: Callable[[Tensor], Tensor] = lambda logits: logits

    def reset_parameters(self) -> None:
        torch.nn.init.normal_(self.places, std=0.02)
        torch.nn.init.constant_(self.scale, 1.0)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return self.trip(super().forward(tokens_BT)) * self.scale


class Run(NamedTuple):
    losses: list[list[float]]
    norms: list[float]
    weights: dict[str, Tensor]


def build(kind: str) -> WithBuffer:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return WithBuffer().to(kind)


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, fused=True)


def batches(kind: str) -> Callable[[int, int], Tensor]:
    def batch(step: int, index: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * step + index)
        return torch.randint(SIZE.vocabulary, (SIZE.sequences, SIZE.tokens + 1), generator=generator).to(kind)

    return batch


def plain(
    kind: str,
    dtype: str,
    world: int = 1,
    backwards: int = 1,
    steps: int = STEPS,
    *,
    loss: Loss = loss_of,
    make: Make = adam,
    clip: float | None = CLIP,
    prepare: Callable[[GPT], None] = lambda model: None,
    **rounds: Any,
) -> Run:
    """One process that takes all ranks' micro-batches one after the other.

    loss, make (of optimizers), clip, prepare (called with the model): as `sharded` takes them. rounds: of
    `reference.accumulate_with_masters`, in 16 bits.
    """
    model = build(kind)
    prepare(model)
    settings: Any = {"world": world, "backwards": backwards, "steps": steps, "clip": clip, "norm": total_norm}
    if DTYPES[dtype] is None:
        optimizer = reference.as_one(make(model.parameters()))
        history = reference.accumulate(model, optimizer, batches(kind), loss, **settings)
    else:
        history, _ = reference.accumulate_with_masters(
            model, make, batches(kind), loss, dtype=DTYPES[dtype], **settings, **rounds
        )
    return run_of(history, model)


def shard(
    kind: str,
    dtype: str,
    stage: int,
    *,
    make: Make = adam,
    prepare: Callable[[GPT], None] = lambda model: None,
    **settings: Any,
) -> tuple[WithBuffer, Any, Any]:
    """layout, comm and the rest as `zeroshard.shard` takes them."""
    model = build(kind)
    prepare(model)
    optimizer = make(model.parameters())
    settings = {"layout": Layout(bucket_mib=0.02), "precision": Precision(param_dtype=DTYPES[dtype]), **settings}
    return model, optimizer, zeroshard.shard(model, optimizer, stage=stage, **settings)


def sharded(
    kind: str,
    dtype: str,
    stage: int,
    backwards: int = 1,
    steps: int = STEPS,
    *,
    loss: Loss = loss_of,
    clip: float | None = CLIP,
    **settings: Any,
) -> Run:
    """Of this rank: its own losses, and all weights."""
    model, optimizer, zero = shard(kind, dtype, stage, **settings)
    history = reference.loop(
        model, reference.as_one(optimizer), batches(kind), loss, zero.rank, zero.world_size, backwards,
        steps=steps, clip=clip,
    )  # fmt: skip
    with zero.gathered():
        return run_of(history, model)


def in_tier(kind: str, dtype: str, stage: int, tier: str, **settings: Any) -> Run:
    """With all states in host memory, or in files. settings: of `Offload`."""
    with tempfile.TemporaryDirectory() as folder:
        places: Any = dict.fromkeys(("parameters", "gradients", "optimizer"), tier)
        return sharded(
            kind, dtype, stage, offload=Offload(**places, **settings, path=folder if tier == "nvme" else None)
        )


def run_of(history: reference.History, model: torch.nn.Module) -> Run:
    return Run(history.losses, [float(each) for each in history.norms], weights(model))


def weights(model: torch.nn.Module) -> dict[str, Tensor]:
    """On the CPU."""
    return {name: each.cpu() for name, each in reference.weights(model).items()}


def same_weights(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    """Raise `Wrong` at the first difference."""
    if different := reference.first_difference(got, want):
        raise Wrong(different)


def compare(got: Run, want: Run, world: int | None = None) -> None:
    """want: of plain torch, with the losses of all ranks that trained. Raises `Wrong` at the first difference."""
    rank, world = ranks.rank(), world or ranks.world()
    for step, losses in enumerate(got.losses):
        if losses != want.losses[step][rank::world]:
            raise Wrong(f"step {step}: losses {losses} instead of {want.losses[step][rank::world]}")
    if got.norms != want.norms:
        raise Wrong(f"norms {got.norms} instead of {want.norms}")
    same_weights(got.weights, want.weights)
