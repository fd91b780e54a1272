"""`Layout.recompute`: backward computes again what a unit's forward did not save, by torch's own checkpoint."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from ..arithmetic.sums import same_bits
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

    def run(call: _Call, *args: Any, **kwargs: Any) -> Any:
        entered = segment.begin()
        try:
            if not entered:
                return forward(*args, **kwargs)
            with call.as_it_was(args, kwargs) as (args, kwargs):
                return forward(*args, **kwargs)
        finally:
            segment.end(entered)

    def again(*args: Any, **kwargs: Any) -> Any:
        # Neither a transform of torch.func nor the tensors of a `functional_call` are there any more when backward
        # computes again: such a call keeps its activations.
        if transformed() or not segment.has_own_weights():
            return forward(*args, **kwargs)
        call = _Call(module, segment.buffers, args, kwargs)
        output = checkpoint(functools.partial(run, call), *args, use_reentrant=False, **kwargs)
        call.end()
        return output

    unit.forward, module.forward = forward, torch.compiler.disable(again)


class _Segment:
    """The begin and end of a forward that torch runs twice. The module refers to it: it must not keep the engine
    alive."""

    def __init__(self, unit: Unit, schedule: Schedule) -> None:
        self._unit = unit
        (self._module,) = unit.modules
        self._schedule = weakref.ref(schedule)
        named = [(each, name) for each in self._module.modules() for name in each._parameters]
        self.buffers = _Buffers()
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


class _Call:
    """What one call of a module found, so that it finds the same when backward runs it again: the modes of modules, the
    buffers that it writes (running means, counters), and which of its arguments are one object."""

    @outside
    def __init__(self, module: nn.Module, buffers: _Buffers, args: Any, kwargs: Any) -> None:
        self._modes = [(each, each.training) for each in module.modules()]
        places: dict[int, int] = {}
        leaves = tree_flatten((args, kwargs))[0]
        # Of each argument, the place of the first that is the same tensor: torch restores each as an object of its own.
        self._firsts = [
            places.setdefault(id(leaf), at) if isinstance(leaf, Tensor) else at for at, leaf in enumerate(leaves)
        ]
        self._buffers, self._found = buffers, buffers.copies(module)

    @outside
    def end(self) -> None:
        """Keep copies of the buffers only that the call may have written."""
        self._found = self._buffers.written(self._found)

    @contextlib.contextmanager
    def as_it_was(self, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
        """Give modules their modes and buffers of then, and return the arguments with those that were one object."""
        leaves, tree = tree_flatten((args, kwargs))
        modes = [(each, each.training) for each, _ in self._modes]
        now = [(each, name, each._buffers[name]) for each, name, _, _ in self._found]
        try:
            _set(self._modes)
            for each, name, _, copy in self._found:
                each._buffers[name] = _clone(copy)  # another backward may need the copy once more
            yield tree_unflatten([leaves[at] for at in self._firsts], tree)
        finally:
            for each, name, buffer in now:
                each._buffers[name] = buffer
            _set(modes)


Found = list[tuple[nn.Module, str, Tensor, Tensor]]  # a module, the name of a buffer of its own, the buffer, and a copy


class _Buffers:
    """Which buffers of one module its forward writes. A large one is copied only if the first call wrote to it: a mask
    or a table is mostly as large as activations are. So a large one that only later calls write is not put back."""

    SMALL = 1 << 16  # bytes up to which a buffer is copied at each call

    def __init__(self) -> None:
        self._written: dict[tuple[int, str], bool] = {}  # by module's id and name; none is known before the first call

    def copies(self, module: nn.Module) -> Found:
        """Copy the buffers that a call may write."""
        return [
            (each, name, buffer, _clone(buffer))
            for each in module.modules()
            for name, buffer in each._buffers.items()
            if buffer is not None and (buffer.nbytes <= self.SMALL or self._written.get((id(each), name), True))
        ]

    def written(self, found: Found) -> Found:
        """Return what of this a call has written, or may have."""
        kept = []
        for each, name, buffer, copy in found:
            if buffer.nbytes > self.SMALL:
                known = self._written.get((id(each), name))
                if not known:
                    known = each._buffers.get(name) is not buffer or not same_bits(buffer, copy)
                    self._written[id(each), name] = known
                if not known:
                    continue
            kept.append((each, name, buffer, copy))
        return kept


@outside
def _clone(buffer: Tensor) -> Tensor:
    return buffer.detach().clone()


def _set(modes: list[tuple[nn.Module, bool]]) -> None:
    """Put modules into training or evaluation mode, each by itself."""
    for each, training in modes:
        each.training = training


class RecomputeFeature(Feature):
    name = "recompute"
    page = "offload.md#recomputed-activations"

    def ready(self, engine: Engine) -> None:
        for unit in engine.units:
            if unit.recomputed:
                recompute(unit, engine.schedule)


FEATURE = RecomputeFeature()
