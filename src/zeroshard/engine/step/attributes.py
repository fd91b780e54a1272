"""The attributes that a program gives to parameters, as `p.lr_scale` or `p.mask`; its optimizer reads them at parts.

A tensor of the parameter's shape is cut as a state is cut; the part is a view of it wherever it is contiguous and on
the device of the part, so that writes to the program's tensor reach the optimizer. One number, and anything that is no
tensor, is the same object.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from ...errors import UserError
from .fragment import Fragment

OWN = "_zeroshard"  # the engine's own attribute of a parameter


class Given(NamedTuple):
    """A parameter, its fragments on this rank, and the attributes that it had when they got them."""

    param: nn.Parameter
    fragments: list[Fragment]
    attributes: dict[str, Any]


class Attributes:
    """The attributes of the parameters that one optimizer updates."""

    def __init__(self, where: str, *, strict: bool) -> None:
        """strict: may the optimizer read any of them? Then a tensor that cannot be cut is refused."""
        self._where = where
        self._strict = strict
        self._given: dict[int, Given] = {}  # by parameter's id

    def give(self, param: nn.Parameter, fragments: list[Fragment]) -> None:
        """Give a parameter's attributes to its fragments, in place of those that it gave them before."""
        before, now = self._given.get(id(param)), dict(vars(param))
        for fragment in fragments:
            held = vars(fragment.param)
            for name in () if before is None else before.attributes.keys() - now.keys():
                held.pop(name, None)
            held |= {name: _part(value, fragment) for name, value in now.items() if _fits(name, value, fragment)}
        self._given[id(param)] = Given(param, fragments, now)

    def follow(self) -> None:
        """Give attributes anew that the program has set, replaced or deleted since, and refuse those of no use.

        Raises `UserError` for a tensor that is neither of the parameter's shape nor one number.
        """
        for param, fragments, known in list(self._given.values()):
            now = vars(param)
            if len(now) == len(known) == 1 or (
                len(now) == len(known) and all(now.get(name, param) is value for name, value in known.items())
            ):
                continue
            for name, value in now.items() if self._strict else ():
                if name != OWN and not hasattr(value, OWN) and not all(_fits(name, value, each) for each in fragments):
                    slot = fragments[0].slot
                    raise refusal(f"{self._where}, parameter {slot.name!r}, attribute {name!r}", slot.shape, value)
            self.give(param, fragments)


def check_attributes(param: nn.Parameter, where: str) -> None:
    """Refuse tensors among the attributes of a parameter that may be cut, if they cannot be cut with it."""
    for name, value in vars(param).items() if param.requires_grad else ():
        given = isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
        if given and value.numel() != 1 and value.shape != param.shape:
            raise refusal(f"{where}, attribute {name!r}", tuple(param.shape), value)


def refusal(where: str, shape: tuple[int, ...], value: Tensor) -> UserError:
    return UserError(
        "a parameter has a tensor as an attribute that cannot be cut with it, and the optimizer gets parts",
        where=where,
        expected=f"one number, or the parameter's shape {shape}",
        got=f"shape {tuple(value.shape)}",
        instead="value.expand_as(p).contiguous(), or whole = True on the optimizer's class, whose tensors are not cut",
    )


def _fits(name: str, value: Any, fragment: Fragment) -> bool:
    """Tell if a fragment gets this attribute. A tensor of another shape is for whole parameters only."""
    if name == OWN or not isinstance(value, Tensor):
        return name != OWN
    if hasattr(value, OWN):  # a sharded parameter
        return False
    if value.numel() == 1 or tuple(value.shape) == fragment.slot.shape:
        return True
    slot = fragment.slot
    none = not fragment.elements.numel and not fragment.bucket.plan.cuts(slot)  # another rank has all of it
    return not slot.matrix and (fragment.elements.numel == slot.numel or none)


def _part(value: Any, fragment: Fragment) -> Any:
    """Return a fragment's part of an attribute: the elements that it has of a tensor of the parameter's shape."""
    shape = fragment.slot.shape
    if not isinstance(value, Tensor) or value.numel() == 1 or tuple(value.shape) != shape:
        return value
    if fragment.param.shape == value.shape and fragment.param.device == value.device:
        return value
    flat = value.detach().reshape(-1)[fragment.elements.start : fragment.elements.stop]
    return flat.view(fragment.param.shape).to(fragment.param.device)
