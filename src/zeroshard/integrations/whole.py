"""A sharded model's whole weights in one process, as trainers write them into files of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..api import Zero

OWN = "_zeroshard_zero"  # where a model that a trainer has sharded has its Zero
FOLDER = "zeroshard"  # in a trainer's checkpoint: what zero.save wrote


def whole_state(zero: Zero) -> dict[str, Any]:
    """The model's `state_dict()` on the CPU of rank 0, ties kept; on the other ranks nothing. Collective."""
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
