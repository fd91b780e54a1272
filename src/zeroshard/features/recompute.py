"""`Layout.recompute`: backward computes again what a unit's forward did not save, by torch's own checkpoint."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
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

    def run(*args: Any, **kwargs: Any) -> Any:
        entered = segment.begin()
        try:
            return forward(*args, **kwargs)
        finally:
            segment.end(entered)

    def again(*args: Any, **kwargs: Any) -> Any:
        if transformed():  # torch's checkpoint and torch.func do not go together: this call keeps its activations
            return forward(*args, **kwargs)
        return checkpoint(run, *args, use_reentrant=False, **kwargs)

    unit.forward, module.forward = forward, torch.compiler.disable(again)


class _Segment:
    """The begin and end of a forward that torch runs twice. The module refers to it: it must not keep the engine
    alive."""

    def __init__(self, unit: Unit, schedule: Schedule) -> None:
        self._unit = unit
        (self._module,) = unit.modules
        self._schedule = weakref.ref(schedule)

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


class RecomputeFeature(Feature):
    name = "recompute"
    page = "memory.md#recomputed-activations"

    def ready(self, engine: Engine) -> None:
        for unit in engine.units:
            if unit.recomputed:
                recompute(unit, engine.schedule)


FEATURE = RecomputeFeature()
