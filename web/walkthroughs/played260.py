"""The steps of the 260 parameters that play beside the texts' own: either cut, the second step, 2, 4 and 8 ranks.

Two ranks are those of `run260.capture`, whose values every rank is checked against. Four and eight have micro-batches
of their own, and show where things are, what is sent and what is held.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zeroshard.layout.stage import STAGES

from .owned import of_ranks
from .walk260 import by_stage, one_of, recorded, stage_of, values_of
from .words260 import TITLES, says


def assemble(
    ranks: Sequence[dict[str, Any]], wider: Sequence[Sequence[dict[str, Any]]], first: dict[str, Any]
) -> dict[str, Any]:
    """Return what the `Transformer` document has beside the `first` step's values: `wider` is of 4 ranks and of 8."""
    return {"second": _second(ranks, first), "played": [*_of_two(ranks, first), *_of_more(wider)]}


def _second(ranks: Sequence[dict[str, Any]], first: dict[str, Any]) -> dict[str, Any]:
    """Return the values of the second step, which begins where the first ended. They are those of either cut."""
    found = {
        "bf16": values_of([by_stage(rank["played"]["model"]["2"]) for rank in ranks], first["bf16"]),
        "float64": values_of([by_stage(rank["second"]) for rank in ranks], first["float64"]),
    }
    layers = values_of([by_stage(rank["played"]["layers"]["2"]) for rank in ranks], first["bf16"])
    one_of([layers, found["bf16"]], "values of either cut")
    return found


def _of_two(ranks: Sequence[dict[str, Any]], first: dict[str, Any]) -> list[dict[str, Any]]:
    found = []
    for cut, steps in ranks[0]["played"].items():
        for step in map(int, steps):
            runs = [by_stage(rank["played"][cut][str(step)]) for rank in ranks]
            values = values_of(runs, first["bf16"] if step > 1 else None)
            layout = runs[0][0]["layout"]
            own = of_ranks(layout)
            stages = [stage_of(stage, [run[stage] for run in runs], own, values) for stage in STAGES]
            found.append(_played(cut, step, layout, stages))
    return found


def _of_more(wider: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    found = []
    for team in wider:
        for cut in team[0]:
            runs = [by_stage(rank[cut]) for rank in team]
            stages = [_recorded(stage, [run[stage] for run in runs]) for stage in STAGES]
            found.append(_played(cut, 2, runs[0][0]["layout"], stages))
    return found


def _played(cut: str, step: int, layout: dict[str, Any], stages: list[dict[str, Any]]) -> dict[str, Any]:
    for stage in stages:
        stage["saved"] = 1 - stage["nbytes"] / stages[0]["nbytes"]
    return {"cut": cut, "ranks": layout["ranks"], "step": step, "layout": layout, "stages": stages}


def _recorded(stage: int, ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Describe a stage of a second step without its values."""
    names = ["start", "forward", "backward", "gathered gradients", "stepped", "gathered parameters", "rest"]
    if STAGES[stage].optimizer:
        names.remove("gathered gradients")
    if not STAGES[stage].optimizer or STAGES[stage].parameters:
        names.remove("gathered parameters")
    moments = [{"key": name, "title": TITLES[name], "says": says(stage, name, 2, len(ranks))} for name in names]
    return recorded(stage, ranks) | {"moments": moments}
