"""Hooks on steps of torch's optimizers, and the closure among a step's arguments."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from ...errors import StateError


def stay_last(optimizer: Any, ours: int) -> None:
    # A pre hook of the user's may change gradients, weights or the closure: ours runs after it, even if it is newer.
    register = optimizer.register_step_pre_hook

    def register_before_ours(hook: Any) -> Any:
        handle = register(hook)
        optimizer._optimizer_step_pre_hooks.move_to_end(ours)
        return handle

    optimizer.register_step_pre_hook = register_before_ours


def hook_steps(kind: Any) -> None:
    """Wrap `step` of every class in the optimizer's MRO, as torch wraps that of a class at the first object of it,
    so that `super().step()` runs the hooks in any case."""
    for each in kind.__mro__:
        step = vars(each).get("step")
        if each is not torch.optim.Optimizer and step is not None and not getattr(step, "hooked", False):
            each.step = torch.optim.Optimizer.profile_hook_step(step)
            each.step.hooked = True


def own_step(kind: Any) -> Any:
    """Return the `step` of an optimizer's class without the hooks that torch wraps around it."""
    step = kind.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def closure_at(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | str | None:
    """Return where in a step's arguments its closure is: the one of that name, else the first that can be called.

    Steps of optimizers outside torch take other arguments. If what is in the closure's place is no closure: None.
    """
    if len(args) == 1 and not kwargs:
        return None
    names = list(inspect.signature(type(optimizer).step).parameters)
    if "closure" in kwargs:
        where: list[int | str] = ["closure"]
    elif "closure" in names:
        where = [at for at in [names.index("closure")] if at < len(args)]
    else:
        where = [*range(1, len(args)), *kwargs]
    return next((at for at in where if callable(args[at] if isinstance(at, int) else kwargs[at])), None)


def refuse_alone(what: str, *_: Any) -> None:
    raise StateError(
        f"{what} of a sharded optimizer holds only this rank's fragments",
        instead="zero.save(path) and zero.load(path); with zero.gathered(): model.state_dict() for the weights alone",
    )
