"""`Layout.recompute`: backward computes again what a unit's forward did not save, by torch's own checkpoint."""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..engine.gradients.backward import backward_is_running
from ..engine.step.schedule import Schedule
from ..engine.weights.modes import outside, transformed
from ..engine.weights.unit import Unit
from ..hooks import Feature

if TYPE_CHECKING:
    from ..engine.engine import Engine


def recompute(unit: Unit, schedule: Schedule) -> None:
    """Put a checkpoint around the unit's forward, inside its hooks."""
    (module,) = unit.modules
    forward, segment = module.forward, _Segment(unit, schedule)

    def run(modes: list[tuple[nn.Module, bool]], *args: Any, **kwargs: Any) -> Any:
        entered = segment.begin()
        before = [(each, each.training) for each, _ in modes] if entered else []
        try:
            _set(modes)
            return forward(*args, **kwargs)
        finally:
            _set(before)
            segment.end(entered)

    def again(*args: Any, **kwargs: Any) -> Any:
        # Neither a transform of torch.func nor the tensors of a `functional_call` are there any more when backward
        # computes again: such a call keeps its activations.
        if transformed() or not segment.has_own_weights():
            return forward(*args, **kwargs)
        modes = [(each, each.training) for each in module.modules()]
        return checkpoint(functools.partial(run, modes), *args, use_reentrant=False, **kwargs)

    unit.forward, module.forward = forward, torch.compiler.disable(again)


class _Segment:
    """The begin and end of a forward that torch runs twice. The module refers to it: it must not keep the engine
    alive."""

    def __init__(self, unit: Unit, schedule: Schedule) -> None:
        self._unit = unit
        (self._module,) = unit.modules
        self._schedule = weakref.ref(schedule)
        named = [(each, name) for each in self._module.modules() for name in each._parameters]
        self._own = [(each, name, each._parameters[name]) for each, name in named]

    def has_own_weights(self) -> bool:
        """Tell if the module's parameters are its own: `torch.func.functional_call` puts others in their place."""
        return all(each._parameters.get(name) is param for each, name, param in self._own)

    @outside
    def begin(self) -> bool | None:
        """Enter the unit if backward recomputes it, and return True. Else push our saved-tensor hooks over torch's,
        which would keep weights, and return False. None if neither was needed or allowed."""
        schedule, unit = self._schedule(), self._unit
        if schedule is None:
            return None
        if backward_is_running() and not schedule.forward.inside(unit):
            try:
                schedule.enter(unit, self._module, (), {})  # torch runs this again, and not the module with its hooks
            except BaseException:
                self.end(True)
                raise
            return True
        return False if schedule.releases and schedule.saved.push() else None

    @outside
    def end(self, entered: bool | None) -> None:
        schedule = self._schedule()
        if schedule is not None and entered:
            schedule.leave(self._unit, self._module, (), None)
        elif schedule is not None and entered is not None:
            schedule.saved.pop()


def _set(modes: list[tuple[nn.Module, bool]]) -> None:
    """Put modules into training or evaluation mode, each by itself."""
    for each, training in modes:
        each.training = training


class RecomputeFeature(Feature):
    name = "recompute"
    page = "memory.md#recomputed-activations"

    def ready(self, engine: Engine) -> None:
        for unit in engine.units:
            if unit.recomputed:
                recompute(unit, engine.schedule)


FEATURE = RecomputeFeature()
