"""The elements of the flat vector that each rank owns under a layout, and those it has at a moment of a step.

The flat vector is all buckets end to end. A rank owns one span of it where the whole model is cut, and one in each
module where each module is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from zeroshard.layout.stage import STAGES

Spans = Sequence[tuple[int, int]]  # [start, stop), in order, none of them empty


def of_ranks(layout: dict[str, Any]) -> list[list[tuple[int, int]]]:
    """List the spans of each rank; those that touch are one."""
    found: list[list[tuple[int, int]]] = [[] for _ in range(layout["ranks"])]
    base = 0
    for bucket in layout["buckets"]:
        for rank, spans in enumerate(found):
            start, stop = (base + min(_bound(bucket, at), bucket["numel"]) for at in (rank, rank + 1))
            if spans and spans[-1][1] == start:
                spans[-1] = spans[-1][0], stop
            elif start < stop:
                spans.append((start, stop))
        base += bucket["numel"]
    return found


def bounds_of_ranks(layout: dict[str, Any]) -> list[int]:
    """List the bounds of the ranks' parts in the flat vector of a model that is cut whole (no bucket is padded)."""
    cuts = [0, *(spans[-1][1] for spans in of_ranks(layout))]
    assert cuts[-1] == numel_of(layout)
    return cuts


def numel_of(layout: dict[str, Any]) -> int:
    return sum(bucket["numel"] for bucket in layout["buckets"])


def _bound(bucket: dict[str, Any], rank: int) -> int:
    return int(bucket["bounds"][rank]) if "bounds" in bucket else int(bucket["share"]) * rank


def starts_of(layout: dict[str, Any]) -> list[tuple[int, int]]:
    """List [start, stop) of every slot in the flat vector."""
    found = []
    base = 0
    for bucket in layout["buckets"]:
        for _, shape, start in layout["slots"][bucket["first"] : bucket["last"]]:
            numel = int(torch.Size(shape).numel())
            found.append((base + start, base + start + numel))
        base += bucket["numel"]
    return found


def place_in(spans: Spans, element: int) -> int:
    """Return where an element of these spans lies when they stand end to end."""
    before = 0
    for start, stop in spans:
        if start <= element < stop:
            return before + element - start
        before += stop - start
    raise AssertionError(f"element {element} is in none of {spans}")


def around(own: Spans, numel: int, inside: str, rest: str | None) -> list[list[Any]]:
    """List the intervals of a rank's spans, and of what lies between them where it has that as well."""
    found: list[list[Any]] = []
    at = 0
    for start, stop in own:
        if rest is not None and at < start:
            found.append([at, start, rest])
        found.append([start, stop, inside])
        at = stop
    if rest is not None and at < numel:
        found.append([at, numel, rest])
    return found


def parameters_at(stage: int, name: str, own: Spans, numel: int) -> list[list[Any]]:
    """List the intervals of the flat vector whose parameters this rank has, from before ("old") or after the step."""
    place = STAGES[stage]
    if name in ("gathered parameters", "rest") or (name == "stepped" and not place.optimizer):
        return around(own, numel, "new", None) if place.parameters else [[0, numel, "new"]]
    if name == "stepped":
        return around(own, numel, "new", None if place.parameters else "old")
    return around(own, numel, "old", None) if place.parameters else [[0, numel, "old"]]


def optimizer_at(stage: int, name: str, own: Spans, numel: int, step: int) -> list[list[int]]:
    """List the intervals of which this rank has m and v: from the end of the first step on."""
    if step == 1 and name not in ("stepped", "gathered parameters", "rest"):
        return []
    return [[*span] for span in own] if STAGES[stage].optimizer else [[0, numel]]
