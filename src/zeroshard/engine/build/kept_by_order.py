"""Find what an optimizer keeps in an attribute of its own for its parameters, one tensor for each, in their order.

Such are masks, anchors or momentum, in a list that its step walks beside the parameters. Sharded, a rank's groups hold
parts of some of the parameters, so that the list would be paired with other parameters than the program's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...arithmetic.sums import simulated
from ...errors import UserError
from ..step.fragment import updated


class Kept(NamedTuple):
    """A tensor that an optimizer keeps for one of its parameters, and the attribute that it is in."""

    name: str
    tensor: Tensor
    param: Tensor


def kept_by_order(optimizer: torch.optim.Optimizer) -> list[Kept]:
    """Return the tensors of each attribute whose tensors have the shapes of parameters, in the parameters' order.

    Tensors may leave out parameters of other shapes, as where matrices alone have a mask; a single tensor must be for
    the only parameter. Numbers are no evidence: at least one tensor has several elements. What the class says is
    `unsaved` is its own affair.
    """
    params = updated(optimizer)
    own, unsaved = set(map(id, params)), getattr(optimizer, "unsaved", ())
    found = []
    for name, value in vars(optimizer).items():
        tensors = list(tensors_of(value)) if name not in ("state", "param_groups", *unsaved) else []
        if any(id(each) in own for each in tensors) or all(each.numel() < 2 for each in tensors):
            continue
        shapes = {each.shape for each in tensors}
        if len(tensors) == len(params) or 1 < len(tensors) == sum(param.shape in shapes for param in params):
            rest = iter(params)  # each tensor takes the next parameter of its shape
            pairs = [(each, next((p for p in rest if p.shape == each.shape), None)) for each in tensors]
            matched = [Kept(name, each, param) for each, param in pairs if param is not None]
            found += matched if len(matched) == len(tensors) else []
    return found


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of lists, tuples and dicts in their order, those inside each other too."""
    if isinstance(value, Tensor):
        if not (simulated(value) or value.is_meta):
            yield value
    elif isinstance(value, (list, tuple, Mapping)):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_of(each)


def refuse_order(kept: list[Kept], where: str) -> None:
    """Refuse attributes that hold a tensor for each parameter: a rank's groups hold parts of some of them."""
    for name, tensor, _ in kept[:1]:
        raise UserError(
            "an optimizer keeps a tensor for each parameter in an attribute, and a step would pair them with other "
            "parameters: its groups hold this rank's parts",
            where=f"{where}, attribute {name!r}",
            expected="optimizer.state[param] = {name: tensor}, which zeroshard cuts and saves with the parameter",
            got=f"{sum(each.name == name for each in kept)} tensors in the parameters' order, the first of shape "
            f"{tuple(tensor.shape)}",
            instead=cure(name),
        )


def cure(name: str) -> str:
    """Return the code that keeps a parameter's tensor as its state in place of an attribute of this name."""
    return f"self.state[p][{name!r}] = its tensor, for each p of self.param_groups in __init__, and read it in step()"


def small(tensor: Tensor, like: Tensor) -> Tensor:
    """Return a small tensor of the shape of `like` that stands in for one of a parameter's shape: its first elements,
    again and again where it has too few."""
    numel = like.numel()
    flat = tensor.detach().reshape(-1)[:numel]
    repeats = -(-numel // max(flat.numel(), 1))
    return flat.repeat(repeats)[:numel].reshape(like.shape) if flat.numel() else flat.new_zeros(like.shape)
