"""What an optimizer of torch keeps of a parameter: it is asked, by one step of a twin on a tiny tensor."""

from __future__ import annotations

import collections
import math
from typing import Any, NamedTuple

from ..errors import UserError


class Shown(NamedTuple):
    """One state of an optimizer as it showed itself. sides: None where it is like the parameter; else its shape, with
    -1 - i in place of the parameter's dimension i."""

    dtype: Any
    sides: tuple[int, ...] | None

    def shape(self, of: tuple[int, ...]) -> tuple[int, ...]:
        sized = of or (1,)
        return of if self.sides is None else tuple(sized[-1 - side] if side < 0 else side for side in self.sides)

    def kept(self, of: tuple[int, ...]) -> tuple[int, bool]:
        """(bytes, per element?) for a parameter of that shape."""
        if self.sides is None:
            return self.dtype.itemsize, True
        return self.dtype.itemsize * math.prod(self.shape(of)), False


PRIMES = (2, 3, 5, 7, 11, 13, 17)  # sizes that a state's shape gives away


def takes_whole_tensors(optimizer: Any) -> bool:
    """Does an optimizer look at a tensor's shape? Then it is asked with a tensor of as many dimensions."""
    return getattr(optimizer, "whole", False) is True or any(
        base.__name__ in ("Adafactor", "Muon") for base in type(optimizer).__mro__
    )


def probe(optimizer: Any, group: dict[str, Any], dtype: Any, dimensions: int = 1, kind: Any = None) -> dict[str, Shown]:
    """{state: what it is} after one step of a twin with the user's class (or `kind`), options and a tiny parameter.

    The optimizer itself is not touched. Raises `UserError` where it cannot step on such a parameter.
    """
    import torch

    shape = PRIMES[: max(dimensions, 1)]  # as fragments have at least one
    with torch._subclasses.fake_tensor.unset_fake_temporarily():
        param = torch.nn.Parameter(torch.zeros(shape, dtype=dtype))
        param.grad = torch.ones_like(param)
        kind = type(optimizer) if kind is None else kind
        twin = object.__new__(kind)
        twin.__dict__.update(optimizer.__dict__)
        twin.state, twin.param_groups = collections.defaultdict(dict), [{**group, "params": [param]}]
        twin._optimizer_step_pre_hooks = collections.OrderedDict()
        twin._optimizer_step_post_hooks = collections.OrderedDict()
        try:
            kind.step(twin)  # not twin.step: a scheduler has bound that of the optimizer itself
        except Exception as error:
            raise UserError(
                "the optimizer could not be asked what it keeps",
                where=f"{kind.__name__}.step() on a parameter of shape {shape}",
                got=f"{type(error).__name__}: {error}",
                instead="an optimizer that steps without a closure",
            ) from error
    found = {}
    for key, value in twin.state[param].items():
        if isinstance(value, torch.Tensor):
            like = tuple(value.shape) == shape
            sides = tuple(-1 - shape.index(side) if side in shape else side for side in value.shape)
            found[key] = Shown(value.dtype, None if like else sides)
    return found


def of_torch(name: str) -> tuple[dict[str, int], dict[str, int]] | None:
    """({state: bytes per element}, {state: bytes per tensor}) of a `torch.optim` class, named in any case, in fp32.

    None where torch has no such class.
    """
    import torch

    kinds: dict[str, Any] = {
        key.lower(): kind
        for key, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    }
    kind = kinds.get(name.lower().removeprefix("torch.optim."))
    if kind is None:
        return None
    dimensions = 2 if kind.__name__ in ("Adafactor", "Muon") else 1
    optimizer = kind([torch.nn.Parameter(torch.zeros(PRIMES[:dimensions]))])
    asked = probe(optimizer, optimizer.param_groups[0], torch.float32, dimensions)
    each = {state: found.dtype.itemsize for state, found in asked.items() if found.sides is None}
    if any(found.sides for found in asked.values()):
        raise UserError(
            "this optimizer's states depend on the shapes of the tensors", got=kind.__name__, instead="plan train:job"
        )
    return each, {state: found.dtype.itemsize for state, found in asked.items() if found.sides == ()}
