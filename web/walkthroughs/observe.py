"""Observation of a small run while it happens: a clock of ticks, and one rank's tensors at named moments of a step.

Named hazard, *inside the engine*: the moment between Adam and the gather, when ranks hold old and new parameters, lies
inside `optimizer.step()`. So an observer wraps its own engine's gathers. Only the small models of this package are
watched that way.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from zeroshard import events
from zeroshard.api import Zero
from zeroshard.engine.gradients.reduction import UNHURRIED
from zeroshard.explain.document import numbers
from zeroshard.explain.recording import Told, one_step

_EVENTS: Any = events


@contextlib.contextmanager
def ticking() -> Iterator[None]:
    """Let the record of events inside count its notes instead of reading a clock, so that every run is the same."""
    ticks = itertools.count(1)
    before, library = _EVENTS.time, torch._C._get_mkldnn_enabled()  # its kernels' bits differ by processor
    _EVENTS.time = SimpleNamespace(perf_counter_ns=lambda: next(ticks))
    try:
        torch._C._set_mkldnn_enabled(False)
        yield
    finally:
        torch._C._set_mkldnn_enabled(library)
        _EVENTS.time = before


def tick() -> int:
    return int(_EVENTS.time.perf_counter_ns())


class Observer:
    """One rank's engine under observation. `moments`: (name, tick), in order; `seen`: what the tensors were then.

    `zero.record()` begins the record, before the first moment.
    """

    def __init__(self, zero: Zero) -> None:
        self.zero = zero
        self.moments: list[tuple[str, int]] = []
        self.seen: dict[str, dict[str, list[Any]]] = {}
        zero._engine.reduction.pause = UNHURRIED

    def look(self, name: str) -> None:
        """Note the moment, with the parameters and gradients that this rank has: flat, bucket after bucket."""
        self.zero.ledger()  # counts what the optimizer has made since
        self.moments.append((name, tick()))
        buckets = self.zero._engine.buckets
        resting = [bucket.parameters.tensor.to(bucket.dtype) for bucket in buckets]
        held = [bucket.gradients.tensor for bucket in buckets if bucket.gradients is not None]
        self.seen[name] = {
            "parameters": [value for tensor in resting for value in numbers(tensor)],
            "gradients": [value for tensor in held for value in numbers(tensor)],
        }

    @contextlib.contextmanager
    def watching_gathers(self) -> Iterator[None]:
        """Take a look called "stepped" before the first gather of parameters inside."""
        team: Any = self.zero._engine.group.team
        gather = team.gather

        def watched(full: Any, bucket: Any, state: str) -> Any:
            if state == "parameters" and "stepped" not in self.seen:
                self.look("stepped")
            return gather(full, bucket, state)

        team.gather = watched
        try:
            yield
        finally:
            del team.gather

    def land(self) -> None:
        """Wait for every gather that is arriving."""
        for bucket in self.zero._engine.buckets:
            bucket.land()

    def told(self) -> dict[str, Any]:
        """Return what was recorded between the first moment and the last, JSON-able."""
        record = self.zero._engine.ledger.record
        assert record is not None
        units = [unit.name for unit in self.zero._engine.units]
        told = Told(self.zero.rank, self.zero.events(), list(record.held))
        span = self.moments[0][1], self.moments[-1][1]
        return one_step(told, span) | {"moments": self.moments, "seen": self.seen, "unit_names": units}
