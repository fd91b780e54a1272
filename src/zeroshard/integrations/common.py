"""Helpers that the integrations of trainers share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..api import Zero
from ..engine.unit import named_tensors

OWN = "_zeroshard_zero"  # the attribute that holds the Zero of a model that a trainer has sharded
FOLDER = "zeroshard"  # in a trainer's checkpoint: what zero.save wrote


def whole_state(zero: Zero) -> dict[str, Any]:
    """Return the model's `state_dict()` on the CPU of rank 0, ties kept; on the other ranks nothing. Collective."""
    with zero.gathered():
        if zero.rank:
            return {}
        copies: dict[Any, Tensor] = {}

        def copy(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            place = value.data_ptr(), value.shape, value.dtype
            if place not in copies:
                copies[place] = value.detach().to("cpu", copy=True)
            return copies[place]

        with torch.no_grad():
            return {name: copy(value) for name, value in zero.model.state_dict().items()}


def params_of(zero: Zero, optimizer: Any) -> Iterator[nn.Parameter]:
    """Yield the model's parameters that an optimizer updates on any rank: its groups hold only this rank's part."""
    params: dict[str, Any] = dict(named_tensors(zero.model))
    for each, _, places in zero.optimizer_members():
        if each is optimizer:
            yield from (params[slot.name] for _, slot in places)
