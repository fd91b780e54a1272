"""One step of the 260-parameter transformer at every stage, run on two ranks and told in the words of `web/DATA.md`.

`run260.capture` runs on each rank and returns what JSON can hold. `assemble` puts the ranks together, and refuses to
where the stages do not agree in every bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import zeroshard
from zeroshard.explain.document import matrix
from zeroshard.explain.recording import peak_of, together, traffic_of
from zeroshard.layout.stage import STAGES
from zeroshard.planner.recipes import PRESETS
from zeroshard.policies.layout import Layout

from . import transformer260
from .frames import backward_frames
from .owned import (  # fmt: skip
    Spans,
    around,
    bounds_of_ranks,
    numel_of,
    of_ranks,
    optimizer_at,
    parameters_at,
    place_in,
    starts_of,
)
from .run260 import GROUPINGS, LEARNING_RATE, STEPS, plain_weights
from .transformer260 import TENSORS
from .words260 import TITLES, corrections, says


def assemble(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Make the `Transformer` document from what `capture` returned on each rank."""
    runs = {name: [by_stage(rank[name]) for rank in ranks] for name in ("bf16", "float64")}
    values = {name: values_of(run) for name, run in runs.items()}
    layout = runs["bf16"][0][0]["layout"]
    cuts = bounds_of_ranks(layout)
    own = of_ranks(layout)
    starts = starts_of(layout)
    stages = [stage_of(stage, [rank[stage] for rank in runs["bf16"]], own, values["bf16"]) for stage in STAGES]
    whole = stages[0]["nbytes"]
    later = [by_stage(rank["later"]) for rank in ranks]
    for stage in stages:
        stage["saved"] = 1 - stage["nbytes"] / whole
        stage["later"] = [rank[stage["stage"]] for rank in later]
    trained_at = [by_stage(rank["trained"]) for rank in ranks]
    plain_result = plain_weights()
    difference = max(
        abs(a - b) for rank in trained_at for stage in STAGES for a, b in zip(rank[stage], plain_result, strict=True)
    )
    return {
        "title": "260 parameters on two ranks",
        "ranks": len(ranks),
        "numel": cuts[-1],
        "layout": layout,
        "dims": {
            "width": transformer260.WIDTH, "heads": transformer260.HEADS, "inner": transformer260.INNER,
            "words": transformer260.WORDS, "tokens": transformer260.TOKENS,
        },
        "tensors": _tensors(starts, own),
        "cuts": cuts,
        "optimizer": {"name": "Adam", "lr": LEARNING_RATE, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8},
        "batches": _batches(),
        "injected": ["W_q"],
        "runs": values,
        "stages": stages,
        "backward": {
            how: _grouping([rank["singly"] if how == "tensor" else by_stage(rank["bf16"])[2] for rank in ranks])
            for how in GROUPINGS
        },
        "plain": {"steps": STEPS, "equal": difference == 0, "max_difference": difference},
        "timing": [row for stage in STAGES for row in _timing(stage, runs["bf16"][0][stage])],
        "unsent": one_of([rank["unsent"] for rank in ranks], "local gradients"),
        "unchanged": [
            at
            for at, (old, new) in enumerate(
                zip(values["bf16"]["parameters"], values["bf16"]["parameters_after"], strict=True)
            )
            if old == new
        ],
        "corrections": corrections(values["float64"], values["bf16"], cuts, starts, ranks[0]["unsent"]),
    }  # fmt: skip


def _tensors(starts: Sequence[tuple[int, int]], own: Sequence[Spans]) -> list[dict[str, Any]]:
    return [
        {
            "symbol": entry.symbol, "name": entry.name, "layer": entry.layer, "shape": list(entry.shape),
            "start": start, "numel": stop - start, "origin": entry.origin,
            "owners": [
                [rank, max(low, start) - start, min(high, stop) - start]
                for rank, spans in enumerate(own)
                for low, high in spans
                if low < stop and start < high
            ],
        }
        for entry, (start, stop) in zip(TENSORS, starts, strict=True)
    ]  # fmt: skip


def _batches() -> list[dict[str, Any]]:
    return [
        {
            "micro_batch": "AB"[rank], "rank": rank, "x": matrix(batch.x), "x_origin": batch.x_origin,
            "targets": batch.targets.tolist(), "targets_origin": batch.targets_origin,
        }
        for rank, batch in enumerate(transformer260.batches(torch.float64))
    ]  # fmt: skip


def by_stage(found: dict[Any, Any]) -> dict[int, Any]:
    """Return the table with stages as numbers: JSON has turned them into strings."""
    return {int(stage): value for stage, value in found.items()}


def _flat(layout: dict[str, Any], ranks: Sequence[Sequence[Sequence[Any]]]) -> list[Any]:
    """Join the ranks' shards of every bucket to a flat vector."""
    return [value for bucket in range(len(layout["buckets"])) for rank in ranks for value in rank[bucket]]


def one_of(values: Sequence[Any], what: str) -> Any:
    """Return the value that all of them have. Raises `AssertionError` where one differs: the page would be false."""
    for value in values[1:]:
        if value != values[0]:
            raise AssertionError(f"{what} differ between stages or ranks")
    return values[0]


def values_of(ranks: Sequence[dict[int, dict[str, Any]]], first: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return one set of values for all four stages, which must agree; after those of the `first` step."""
    layout = ranks[0][0]["layout"]
    starts = {slot[0]: start for slot, (start, _) in zip(layout["slots"], starts_of(layout), strict=True)}

    def kept(stage: int, what: str, when: str = "kept") -> list[Any]:
        flat: list[Any] = [None] * numel_of(layout)
        for rank in ranks:
            for fragment in rank[stage][when]:
                first = starts[fragment["name"]] + fragment["start"]
                flat[first : first + len(fragment[what])] = fragment[what]
        return flat

    at = {what: one_of([kept(stage, what) for stage in STAGES], what) for what in ("master", "exp_avg", "exp_avg_sq")}
    some = [rank[0] for rank in ranks]
    masters = [rank[stage]["before"] for stage in STAGES for rank in ranks]
    if first is not None:
        masters = [first["master_after"], *(kept(stage, "master", "kept_before") for stage in STAGES)]
        assert some[0]["told"]["seen"]["start"]["parameters"] == first["parameters_after"]
    sums = one_of([_flat(layout, [rank[stage]["sums"] for rank in ranks]) for stage in STAGES], "sums")
    averages = one_of([_flat(layout, [rank[stage]["averages"] for rank in ranks]) for stage in STAGES], "averages")
    return {
        "dtype": some[0]["dtypes"],
        "forward": [one_of([rank[stage]["forward"] for stage in STAGES], "forward values") for rank in ranks],
        "parameters": some[0]["told"]["seen"]["start"]["parameters"],
        "master": one_of(masters, "masters"),
        "gradients": [one_of([rank[stage]["gradients"] for stage in STAGES], "gradients") for rank in ranks],
        "sum": sums,
        "average": averages,
        "exp_avg": at["exp_avg"],
        "exp_avg_sq": at["exp_avg_sq"],
        "step": 1 if first is None else first["step"] + 1,
        "master_after": at["master"],
        "parameters_after": one_of([rank[stage]["after"] for stage in STAGES for rank in ranks], "new parameters"),
    }


def recorded(stage: int, ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Describe one stage of a step by its bytes and messages. `nbytes`: of the rank that holds most."""
    told = [rank["told"] for rank in ranks]
    return {
        "stage": stage,
        "placements": STAGES[stage].sharded(),
        "formula": PRESETS["paper"].formula(STAGES[stage]),
        "predicted": [rank["predicted"] for rank in ranks],
        "held": [rank["held"] for rank in ranks],
        "nbytes": max(sum(n for state, n in rank["held"].items() if state != "step") for rank in ranks),
        "traffic": [traffic_of(rank["moves"], rank["span"][0]) for rank in told],
        "recording": together(told, told[0]["unit_names"], clock="tick"),
    }


def stage_of(
    stage: int, ranks: Sequence[dict[str, Any]], own: Sequence[Spans], values: dict[str, Any]
) -> dict[str, Any]:
    """Describe one stage of a step. What every rank has at each moment is checked against the values."""
    numel = numel_of(ranks[0]["layout"])
    found = recorded(stage, ranks)
    return found | {
        "owners": {
            state: [
                [rank, *span, "device"] for rank, spans in enumerate(own) for span in (spans if cut else [(0, numel)])
            ]
            for state, cut in found["placements"].items()
        },
        "moments": _moments(stage, ranks, own, values, numel),
    }


def _moments(
    stage: int, ranks: Sequence[dict[str, Any]], own: Sequence[Spans], values: dict[str, Any], numel: int
) -> list[dict[str, Any]]:
    names = [name for name, _ in ranks[0]["told"]["moments"]]
    ticks = [dict(rank["told"]["moments"]) for rank in ranks]
    spread = [_end_of(rank["told"], "gradients") for rank in ranks]
    if all(spread):  # where the optimizer's state is replicated, the averages travel inside the step
        names.insert(names.index("backward") + 1, "gathered gradients")
        for found, at in zip(ticks, spread, strict=True):
            found["gathered gradients"] = at
    origin = min(rank["told"]["span"][0] for rank in ranks)
    return [
        {
            "key": name,
            "title": TITLES[name],
            "says": says(stage, name, values["step"]),
            "ranks": [
                _moment(stage, name, rank["told"], ticks[number], names, own[number], numel, origin, values)
                for number, rank in enumerate(ranks)
            ],
        }
        for name in names
    ]


def _end_of(told: dict[str, Any], state: str) -> int:
    """Return when the last gather of a state had arrived; 0 where there was none."""
    return max((move[8] for move in told["moves"] if move[0] == "gather" and move[1] == state), default=0)


def _moment(
    stage: int,
    name: str,
    told: dict[str, Any],
    ticks: dict[str, int],
    names: Sequence[str],
    own: Spans,
    numel: int,
    origin: int,
    values: dict[str, Any],
) -> dict[str, Any]:
    at = ticks[name]
    before = ticks[names[names.index(name) - 1]] if names.index(name) else at
    held: dict[str, int] = {}
    for when, _, state, nbytes in told["held"]:
        if when <= at:
            held[state] = nbytes
    since = [change for change in told["held"] if change[0] <= at]
    passed = [change for change in since if change[0] > before]
    start = {(tier, state): nbytes for when, tier, state, nbytes in since if when <= before}
    window = [[before, *place, nbytes] for place, nbytes in start.items()] + passed
    peak = peak_of(window, (before, at), told["phases"], told["units"], told["moves"])
    if peak is not None:
        names_of = told["unit_names"]
        unit = -1 if peak["unit"] is None else names_of.index(peak["unit"])
        peak = {**peak, "at": peak["at"] - origin, "unit": unit}
    moves = [number for number, move in enumerate(told["moves"]) if before < move[7] <= at]
    found = {
        "at": at - origin,
        "held": {state: nbytes for state, nbytes in held.items() if nbytes},
        "peak": peak,
        "parameters": parameters_at(stage, name, own, numel),
        "gradients": _gradients(stage, name, own, numel),
        "optimizer": optimizer_at(stage, name, own, numel, values["step"]),
        "moves": [moves[0], moves[-1] + 1] if moves else [0, 0],
    }
    if name in told["seen"]:
        _check(found, told["seen"][name], own, values, told["rank"], stage)
    return found


def _gradients(stage: int, name: str, own: Spans, numel: int) -> list[list[Any]]:
    """List the intervals whose gradients this rank has: its "own", the "sum" of all ranks, or the "average"."""
    place = STAGES[stage]
    if name in ("start", "forward", "rest"):
        return []
    if not place.optimizer and name != "backward":
        return [[0, numel, "average"]]
    return around(own, numel, "sum" if name == "backward" else "average", None if place.gradients else "own")


def _check(
    moment: dict[str, Any],
    seen: dict[str, list[Any]],
    own: Spans,
    values: dict[str, Any],
    rank: int,
    stage: int,
) -> None:
    """Check the tensors seen at a moment against the layout's intervals. Raises `AssertionError`."""
    vectors = {
        "old": values["parameters"], "new": values["parameters_after"], "own": values["gradients"][rank],
        "sum": values["sum"], "average": values["average"],
    }  # fmt: skip
    for state in ("parameters", "gradients"):
        if not moment[state]:
            continue
        sharded = getattr(STAGES[stage], state)
        for start, stop, what in moment[state]:
            first = place_in(own, start) if sharded else start
            if seen[state][first : first + stop - start] != vectors[what][start:stop]:
                raise AssertionError(f"stage {stage}, rank {rank}: {state} [{start}, {stop}) are not {what!r}")


def _grouping(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Describe backward, reduction by reduction in the run's order: elements by layout, bytes by the ledger."""
    layout = ranks[0]["layout"]
    symbols = {entry.name: entry.symbol for entry in TENSORS}
    specs = [
        zeroshard.layout.partition.Spec(slot[0], tuple(slot[1]), "bfloat16", 2, number, True)
        for number, bucket in enumerate(layout["buckets"])
        for slot in layout["slots"][bucket["first"] : bucket["last"]]
    ]
    laid_out = zeroshard.layout.partition.partition(specs, Layout(bounds="model", align=1), layout["ranks"])
    reductions = [[move for move in rank["told"]["moves"] if move[0] == "reduce"] for rank in ranks]
    order = one_of([[move[2] for move in moves] for moves in reductions], "the order of reductions")
    groups = [[slot[0] for slot in layout["slots"][bucket["first"] : bucket["last"]]] for bucket in layout["buckets"]]
    assert order == list(range(len(groups)))[::-1], order  # `backward_frames` goes through the model backwards
    frames = [backward_frames(laid_out, rank, groups) for rank in range(layout["ranks"])]
    found = []
    for number, per_rank in enumerate(zip(*frames, strict=True)):
        at = [moves[number][7] for moves in reductions]
        found.append(
            {
                "names": list(per_rank[0].names),
                "symbols": [symbols[name] for name in per_rank[0].names],
                "ranks": [
                    {
                        "whole": frame.whole, "transient": frame.transient, "kept": frame.kept,
                        "engine": {
                            state: _held_at(ranks[rank]["told"]["held"], state, at[rank])
                            for state in ("gradients", "reduce")
                        },
                    }
                    for rank, frame in enumerate(per_rank)
                ],
            }
        )  # fmt: skip
    columns = ("whole", "transient", "kept")
    peak = {
        column: [max(frame["ranks"][rank][column] for frame in found) for rank in range(layout["ranks"])]
        for column in columns
    }
    return {"frames": found, "peak": peak}


def _held_at(held: Sequence[Sequence[Any]], state: str, at: int) -> int:
    return next((nbytes for when, _, name, nbytes in reversed(held) if name == state and when <= at), 0)


def _timing(stage: int, rank: dict[str, Any]) -> list[dict[str, Any]]:
    """Count what each verb moved in each phase of the step, on rank 0."""
    told = rank["told"]
    rows: dict[tuple[str, str, str], dict[str, Any]] = {}
    for verb, state, _, _, logical, sent, _, start, *_ in told["moves"]:
        if verb in ("gather", "reduce"):
            phase = next((p[0] for p in told["phases"] if p[1] <= start < p[2]), "between")
            row = rows.setdefault(
                (verb, state, phase),
                {"stage": stage, "verb": verb, "state": state, "phase": phase, "calls": 0, "logical": 0, "sent": 0},
            )
            row["calls"] += 1
            row["logical"] += logical
            row["sent"] += sent
    return list(rows.values())
