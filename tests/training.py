"""One training for tests of features: a sharded GPT of many small buckets, and steps over the same micro-batches."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

import models
import reference
import zeroshard
from zeroshard import Comm, Layout

GPT = {"hidden": 24, "layers": 2}
SMALL = Layout(bucket_mib=0.005)
PATIENT = Comm(timeout=60)
ADAMW = partial(torch.optim.AdamW, lr=1e-2)


def job(name: str = "gpt", optimizer: Any = ADAMW, **options: Any) -> dict[str, Any]:
    """The parts of a job, as `plan`, `simulate` and `verify` take them, of a model of `models`."""
    return {
        "model": models.build(name, **options),
        "optimizer": optimizer,
        "batch": partial(models.batch, name),
        "loss": partial(models.loss, name),
    }


def sharded(stage: int, *, options: Any = GPT, optimizer: Any = ADAMW, device: str = "cpu", **settings: Any) -> Any:
    """(model, optimizer, zero). settings: arguments of `shard`."""
    model = models.build("gpt", **options).to(device)
    made = optimizer(model.parameters())
    return model, made, zeroshard.shard(model, made, stage=stage, **{"layout": SMALL, "comm": PATIENT} | settings)


def step(
    model: Any, optimizer: Any, zero: Any, number: int, *, every: int = 4, backwards: int | None = None,
    clip: float | None = 0.5, no_sync: bool = False,
) -> list[float]:  # fmt: skip
    """Take a step of `every` micro-batches on all ranks together, or so many `backwards` on each.

    Returns this rank's losses, and the norm if it clips.
    """
    losses, backwards, device = [], backwards or every // zero.world_size, next(model.parameters()).device
    for turn in range(backwards):
        batch = models.batch("gpt", number, turn * zero.world_size + zero.rank)
        loss = models.loss("gpt", model, tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), batch))
        with zero.no_sync() if no_sync and turn < backwards - 1 else contextlib.nullcontext():
            (loss / backwards).backward()
        losses.append(loss.item())
    if clip:
        losses.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip).item())
    optimizer.step()
    optimizer.zero_grad()
    return losses


def trained(
    stage: int, *, steps: int = 3, backwards: int | None = None, no_sync: bool = False, **settings: Any
) -> Any:  # fmt: skip
    """(losses and norms of each step, weights, bytes held by tier and state)."""
    model, optimizer, zero = sharded(stage, **settings)
    losses = [step(model, optimizer, zero, number, backwards=backwards, no_sync=no_sync) for number in range(steps)]
    held = {tier: {s: n for s, n in found.items() if n} for tier, found in zero.ledger().tiers.items()}
    with zero.gathered():
        return losses, reference.weights(model), held
