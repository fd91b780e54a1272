"""States that an optimizer of torch keeps of a parameter, shown by one step of a twin on a tiny tensor."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from ..errors import UserError


class Shown(NamedTuple):
    """One state of an optimizer, as the twin's step has shown it.

    sides: None where the state grows with the parameter; else its shape, with -1 - i for the parameter's dimension i.
    grain: how many elements of the parameter share one of the state, where `sides` is None.
    """

    dtype: Any
    sides: tuple[int, ...] | None
    grain: int = 1

    def shape(self, of: tuple[int, ...]) -> tuple[int, ...]:
        if self.grain > 1:
            return (-(-math.prod(of) // self.grain),)
        sized = of or (1,)
        return of if self.sides is None else tuple(sized[-1 - side] if side < 0 else side for side in self.sides)

    def at_rest(self, dtype: Any) -> Shown:
        """Return the state as it rests if `Precision.states` gives it this dtype: that of one that is fp32 for each
        element."""
        import torch

        narrow = self.sides is None and self.grain == 1 and self.dtype is torch.float32
        return self._replace(dtype=dtype) if narrow else self

    def kept(self, of: tuple[int, ...]) -> tuple[int, int]:
        """Return (bytes, elements that they are for; 0: the whole tensor) for a parameter of shape `of`."""
        if self.sides is None:
            return self.dtype.itemsize, self.grain
        return self.dtype.itemsize * math.prod(self.shape(of)), 0


PRIMES = (2, 3, 5, 7, 11, 13, 17)  # of the tiny parameter: each tells its dimension in a state's shape
BLOCKS = 7  # in the tiny parameter of an optimizer that updates blocks


def asked_with(optimizer: Any, of: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a tiny parameter that shows what the optimizer keeps of one of shape `of`."""
    from ..engine.build.supported_optimizers import block_of

    if takes_whole_tensors(optimizer):
        return PRIMES[: max(len(of), 1)]
    block, numel = block_of(optimizer) or 1, math.prod(of)
    if block == 1:
        return PRIMES[:1]
    return (numel if numel % block and numel < BLOCKS * block else BLOCKS * block + numel % block,)


def takes_whole_tensors(optimizer: Any) -> bool:
    """Tell whether an optimizer looks at a tensor's shape: then it is asked with a tensor of as many dimensions."""
    return getattr(optimizer, "whole", False) is True or any(
        base.__name__ in ("Adafactor", "Muon") for base in type(optimizer).__mro__
    )


def probe(
    optimizer: Any, group: dict[str, Any], dtype: Any, shape: tuple[int, ...] = PRIMES[:1], kind: Any = None
) -> dict[str, Shown]:
    """Step a twin with the user's class (or `kind`), options and a tiny parameter once; return the states it makes.

    shape: that parameter's, see `asked_with`. Raises `UserError` where the optimizer cannot step on it.
    """
    import torch

    from ..engine.build.supported_optimizers import block_of
    from ..engine.step.fragment import fresh_states, planes

    with torch._subclasses.fake_tensor.unset_fake_temporarily():
        param = torch.nn.Parameter(torch.zeros(shape, dtype=dtype))
        param.grad = torch.ones_like(param)
        try:
            states = planes(fresh_states(optimizer, group, param, kind))
        except Exception as error:
            raise UserError(
                "the optimizer could not be asked what it keeps",
                where=f"{(kind or type(optimizer)).__name__}.step() on a parameter of shape {shape}",
                got=f"{type(error).__name__}: {error}",
                instead="an optimizer that steps without a closure",
            ) from error
    block = block_of(optimizer) or 1
    grains: dict[str, int] = {}
    if block > 1 and shape[0] >= block:
        if shape[0] % block:  # a state with one element per block is told where all blocks are full
            grains = {k: s.grain for k, s in probe(optimizer, group, dtype, (BLOCKS * block,), kind).items()}
        else:
            numels = {key: value.numel() for key, value in states.items() if isinstance(value, torch.Tensor)}
            grains = {k: shape[0] // n for k, n in numels.items() if n and n % BLOCKS == 0 and shape[0] % n == 0}
    found = {}
    for key, value in states.items():
        if isinstance(value, torch.Tensor):
            grain = grains.get(key, 1)
            like = tuple(value.shape) == tuple(shape) or (grain > 1 and value.numel() == -(-shape[0] // grain))
            sides = tuple(-1 - shape.index(side) if side in shape else side for side in value.shape)
            found[key] = Shown(value.dtype, None if like else sides, grain if like else 1)
    return found


def of_torch(name: str) -> tuple[dict[str, int], dict[str, int]] | None:
    """Return ({state: bytes per element}, {state: bytes per tensor}) in fp32 of a `torch.optim` class, in any case.

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
    asked = probe(optimizer, optimizer.param_groups[0], torch.float32, PRIMES[:dimensions])
    each = {state: found.dtype.itemsize for state, found in asked.items() if found.sides is None}
    if any(found.sides for found in asked.values()):
        raise UserError(
            "this optimizer's states depend on the shapes of the tensors", got=kind.__name__, instead="plan train:job"
        )
    return each, {state: found.dtype.itemsize for state, found in asked.items() if found.sides == ()}
