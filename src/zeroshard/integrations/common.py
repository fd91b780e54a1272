"""Helpers that the integrations of trainers share."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..api import Zero
from ..engine.weights.unit import named_tensors
from ..errors import UserError

OWN = "_zeroshard_zero"  # the attribute that holds the Zero of a model that a trainer has sharded
FOLDER = "zeroshard"  # in a trainer's checkpoint: what zero.save wrote


def refuse_misspelt(kind: type, given: Mapping[str, Any]) -> None:
    """Raise `UserError` for an argument that no class of a trainer's takes and that is nearly one which they take.

    kind: the trainer's class. given: what it is to hand on. An argument that is like none is left to the trainer.
    """
    taken: dict[str, None] = {}
    for each in kind.__mro__:
        if "__init__" in vars(each) and each is not object:
            parameters = inspect.signature(each.__init__).parameters.values()  # type: ignore[misc]
            names = [param.name for param in parameters if param.kind not in (param.VAR_KEYWORD, param.VAR_POSITIONAL)]
            taken |= dict.fromkeys(names)
    taken.pop("self", None)
    for name, value in given.items():
        if name not in taken and (close := difflib.get_close_matches(name, taken, n=1, cutoff=0.7)):
            raise UserError(
                f"{kind.__name__} takes no such argument",
                got=f"{name}={value!r}",
                instead=f"did you mean {close[0]}={value!r}?",
            )


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
    for each, _, places in zero._engine.optimizer_members():
        if each is optimizer:
            yield from (params[slot.name] for _, slot in places)
