"""The first call of a module in which two runs' traces differ, and whether the cause lies in it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from .read import Call, Run, Value, places, ulps_between

FORWARD, BACKWARD = "forward", "backward"
Keyed = dict[tuple[str, str, int, int], Call]


class Traced(NamedTuple):
    """A call of a module whose output, or the gradient of whose inputs, is not the other run's."""

    direction: str
    module: str  # its dotted name; "" is the model
    kind: str  # its class
    call: int  # of this module in the step, from 0
    rank: int
    alike: bool  # its inputs, or the gradients of its outputs, are the other run's: it computes otherwise
    output: int  # which of its outputs
    element: int | None = None
    values: tuple[float, float] | None = None
    ulps: int | None = None

    @property
    def place(self) -> str:
        return f"{self.direction} of {self.module or 'the model'} ({self.kind}), call {self.call} of rank {self.rank}"


def first_call(a: Run, b: Run, number: int) -> Traced | None:
    """Return the first call of a step that differs; None without traces of as many ranks, or without a difference."""
    if len(a.logs) != len(b.logs):
        return None
    found = [
        _first(rank, mine.steps[number].calls, theirs.steps[number].calls, a.first.samples)
        for rank, (mine, theirs) in enumerate(zip(a.logs, b.logs, strict=True))
        if number < min(len(mine.steps), len(theirs.steps))
    ]
    told = [each for each in found if each is not None]
    # A rank in which a call computes otherwise tells more than one that was given other numbers by it.
    return min(told, key=lambda each: (not each.alike, each.rank), default=None)


def _first(rank: int, mine: Sequence[Call], theirs: Sequence[Call], samples: int) -> Traced | None:
    other = {call.key: call for call in theirs}
    for call in mine:
        like = other.get(call.key)
        if like is None or _bits(call) == _bits(like):
            continue
        if call.direction == FORWARD:
            cause = _around(call, mine, other) if call.inputs != like.inputs else call
        else:
            cause = _after(call, mine, other)
        named = cause or call
        at = next((at for at, (x, y) in enumerate(zip(call.outputs, like.outputs, strict=False)) if x[:2] != y[:2]), 0)
        where = call.direction, named.module, named.kind, named.call, rank, cause is not None, max(at, call.output)
        if at < min(len(call.outputs), len(like.outputs)):
            return Traced(*where, *_element(call.outputs[at], like.outputs[at], samples))
        return Traced(*where)
    return None


def _bits(call: Call) -> list[tuple[str, str]]:
    return [(value.digest, value.dtype) for value in call.outputs]


def _around(call: Call, mine: Sequence[Call], other: Keyed) -> Call | None:
    """Find the module around a call that was given the same in both runs: what it computes itself differs first."""
    later = mine[mine.index(call) + 1 :]
    above = [each for each in later if each.direction == FORWARD and _contains(each.module, call.module)]
    return next((each for each in above if each.key in other and each.inputs == other[each.key].inputs), None)


def _contains(module: str, name: str) -> bool:
    return module != name and (not module or name.startswith(f"{module}."))


def _after(call: Call, mine: Sequence[Call], other: Keyed) -> Call | None:
    """Find the call that took this one's output, if the gradients of all that did are equal: its backward differs."""
    forward = {each.key: each for each in mine if each.direction == FORWARD}
    backward = {each.key: each for each in mine if each.direction == BACKWARD}
    own = forward.get((FORWARD, call.module, call.call, 0))
    given = own.outputs[call.output].digest if own else ""
    takers = [each for each in forward.values() if given in each.inputs]
    for taker in takers:
        keys = [key for key in backward if key[1:3] == taker.key[1:3]]
        if not keys or any(key not in other or _bits(backward[key]) != _bits(other[key]) for key in keys):
            return None
    return takers[0] if takers else None


def _element(mine: Value, theirs: Value, samples: int) -> tuple[int | None, tuple[float, float] | None, int | None]:
    for at, (x, y) in enumerate(zip(mine.samples, theirs.samples, strict=False)):
        if x != y and not (math.isnan(x) and math.isnan(y)):
            ulps = ulps_between(x, y, mine.dtype) if mine.dtype == theirs.dtype else None
            return places(mine.numel, samples)[at], (x, y), ulps
    return None, None, None
