"""A page about a user's run of any size, put together from every rank's record.

A large model is shown by its units, then buckets, then tensors; where an element lies is arithmetic on the layout. So
the document grows with tensors and messages of one step, never with elements or steps.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..comm.all_or_none import first_writes
from ..errors import StateError, UserError
from ..layout.partition import BucketPlan
from ..layout.stage import Degree, Seat
from ..planner import predict_states
from ..planner.states import owned
from .document import Page, built_in, document
from .reading import FORMAT, RECORDED, VERSION, curves
from .recording import E4M3, Clock, Told, began_before, last_step, layout_json, one_step, shorten, together, traffic_of

if TYPE_CHECKING:
    from ..api import Zero

SHARING = ", data through shared memory"  # of the fact "backend"; the page and the terminal look for it
RANKS_SHOWN = 8  # ranks whose step is shown in full; each other has a line
MACHINES = ("torch", "threads")  # facts about the machine


def explain(
    zero: Zero, path: str | os.PathLike[str] | None, metrics: Sequence[Mapping[str, float]] | None = None
) -> Page:
    """Write and return the page of a run; see `Zero.explain`."""
    if problems := zero._engine.group.problems(_no_number(() if metrics is None else metrics)):
        raise UserError("metrics are numbers", where=problems, instead='{"step": step, "loss": loss.item()}')
    run = gather(zero)
    run["curves"] = None if metrics is None else curves(metrics)
    page = Page(document(walkthroughs=built_in(), run=run))
    if path is not None:
        first_writes(zero._engine.group, path, lambda: page.write(path))
    return page


def gather(zero: Zero, *, clock: Clock = "ns") -> dict[str, Any]:
    """Collect a `Run` without curves, the same on every rank. Collective.

    clock: "tick" where the record counts (`ticking`); then facts about the machine are left out.
    """
    record = zero._engine.ledger.record
    span = None if record is None else last_step(zero.events())
    silent = zero._engine.group.describe(record is None, "explaining")
    if any(silent) and not all(silent):
        raise StateError(
            "some ranks have recorded and others have not",
            where=f"ranks {[rank for rank, none in enumerate(silent) if none]}",
            instead="zero.record() on every rank, before the steps",
        )
    step, notes = None, []
    traffic: list[dict[str, Any]] = []
    if record is not None and span is not None:
        step = one_step(Told(zero.rank, zero.events(), list(record.held)), span)
        if clock == "ns":
            step["shift"] = time.time_ns() - time.perf_counter_ns()  # to the wall clock, which ranks share
        else:
            step["waited"] = 0
        traffic = traffic_of(step["moves"], span[0])
        notes = shorten(step)
        if not began_before(record, span[0]):
            notes.append("the record was too short for the whole step: zero.record(limit) with more")
    summaries = zero._engine.group.describe({"summary": _summary(zero, step), "traffic": traffic, "notes": notes})
    summary = [each["summary"] for each in summaries]
    shown = _shown(summary) if step is not None else []
    steps = zero._engine.group.describe(step if zero.rank in shown else None)
    units = [unit.name for unit in zero._engine.units]
    along, sits = zero._engine.group.axis_team.seat, zero._engine.group.team.seat
    recording = None
    if shown:
        notes = [note for each in summaries for note in each["notes"]]
        if len(shown) < zero.world_size:
            notes.append(f"of {zero.world_size} ranks {len(shown)} are shown in full")
        if zero.hosts > 1:
            notes.append("of each shard a host has a part, and shards are drawn whole; bytes are those of the parts")
        recording = together([one for one in steps if one is not None], units, clock=clock, notes=notes)
    return {
        "title": f"{type(zero.model).__name__}, stage {zero.stage}, {zero.world_size} "
        f"rank{'s' * (zero.world_size != 1)}"
        + f" in {zero.replicas} replicas" * (zero.replicas > 1)
        + f" on {zero.hosts} hosts" * (zero.hosts > 1),
        "stage": zero.stage,
        "ranks": zero.world_size,
        "placements": zero.placements.sharded(),
        "numel": sum(_numel(bucket, along) for bucket in zero.partition.buckets),
        "facts": {name: fact for name, fact in _facts(zero).items() if clock == "ns" or name not in MACHINES},
        "dtypes": _dtypes(zero),
        "layout": _resting(
            zero, layout_json(zero.partition, units, along, sits, spread=zero.placements.optimizer is Degree.ALL)
        ),
        "groups": _groups(zero),
        "summary": summary,
        "recording": recording,
        "traffic": summaries[0]["traffic"],
        "curves": None,
    }


def _resting(zero: Zero, layout: dict[str, Any]) -> dict[str, Any]:
    """Return the layout with the tier of each state of a bucket that does not rest on the device."""
    for told, bucket in zip(layout["buckets"], zero._engine.buckets, strict=True):
        tiers = {state: tier.name for state, tier in bucket.tiers.items() if not tier.on_device}
        if tiers:
            told["rests"] = tiers
    return layout


def _numel(bucket: BucketPlan, along: Seat) -> int:
    """Count a bucket's parameters, with the rows of all ranks."""
    return (bucket.numel - bucket.padding) * (along.parts if bucket.axis else 1)


def _groups(zero: Zero) -> list[dict[str, Any]]:
    """Describe the teams in which ranks share buckets; [] where all ranks share everything."""
    along, sits = zero._engine.group.axis_team.seat, zero._engine.group.team.seat
    found = []
    for what, seat in {"": sits, zero._engine.layout.axis or "": along}.items():
        own = [bucket for bucket in zero.partition.buckets if bool(bucket.axis) == bool(what)]
        if not sits.mirrored and own and (sits.replicas > 1 or along.parts > 1):
            found.append(
                {
                    "axis": what, "buckets": len(own), "numel": sum(_numel(bucket, along) for bucket in own),
                    "teams": [list(team) for team in seat.teams()], "rows": bool(what),
                    "spread": zero.placements.optimizer is Degree.ALL,
                }
            )  # fmt: skip
    return found


def record_step(zero: Zero, folder: Path) -> None:
    """Write the last recorded step of every rank into a run's folder, for `read`. Collective; rank 0 writes."""
    run = gather(zero)
    if zero.rank == 0:
        text = json.dumps({"format": FORMAT, "version": VERSION, "run": run}, allow_nan=False, separators=(",", ":"))
        beside = folder / f"{RECORDED}.part"
        beside.write_text(text + "\n", encoding="utf-8")
        os.replace(beside, folder / RECORDED)


def _summary(zero: Zero, step: dict[str, Any] | None) -> dict[str, Any]:
    ledger = zero.ledger()
    try:
        predicted: dict[str, int] | None = predict_states(zero)
    except UserError:  # an optimizer that only steps with a closure cannot be asked what it keeps
        predicted = None
    return {
        "rank": zero.rank,
        "numel": owned(zero.partition, zero._engine.group.axis_team.seat)[zero.rank % zero.partition.ranks].numel,
        "held": _some(ledger.held),
        "predicted": predicted,
        "tiers": {tier: rests for tier, held in ledger.tiers.items() if (rests := _some(held))},
        "most": _some(ledger.peak),
        "phases": {phase: {"total": most.total, "held": most.held} for phase, most in ledger.phases.items()},
        "step": None if step is None else step["span"][1] - step["span"][0],
        "waited": None if step is None else step["waited"],
        "peak": None if step is None or step["peak"] is None else step["peak"]["total"],
    }


def _some(held: Mapping[str, int]) -> dict[str, int]:
    return {state: nbytes for state, nbytes in held.items() if nbytes}


def _shown(summary: Sequence[Mapping[str, Any]]) -> list[int]:
    """Choose the ranks to show: the first, the one with the highest peak, those that waited most and least, others."""
    ranks: list[int] = [one["rank"] for one in summary]

    def most(key: str) -> int:
        return max(ranks, key=lambda rank: summary[rank][key] or 0)

    least = min(ranks, key=lambda rank: summary[rank]["waited"] or 0)
    return list(dict.fromkeys([0, most("peak"), most("waited"), least, *ranks]))[:RANKS_SHOWN]


def _facts(zero: Zero) -> dict[str, Any]:
    import torch  # not on top: reading a recorded step needs no torch

    layout, comm = zero._engine.layout, zero._engine.comm
    shares = any(moved.shared for moved in zero.ledger().traffic.values())
    return {
        "torch": str(torch.__version__),
        "device": str(zero._engine.device),
        "threads": torch.get_num_threads(),
        "backend": zero._engine.group.backend + SHARING * shares,
        "bounds": layout.bounds,
        "bucket_mib": layout.bucket_mib,
        "align": layout.base,
        "reduce": comm.reduce,
        "overlap": "on" if comm.overlap else "off",
        "prefetch": comm.prefetch,
    }


def _dtypes(zero: Zero) -> list[dict[str, Any]]:
    counts: dict[tuple[str, ...], int] = {}
    for bucket in zero.partition.buckets:
        formats = zero._engine.formats(bucket)
        kinds = (formats.computed, formats.gradients, formats.master)
        param, *others = (str(dtype).removeprefix("torch.") for dtype in kinds)
        if bucket.fp8:
            scaling = zero._engine.precision.scaling
            part = "tensor" if scaling == "tensor" else f"tile of {scaling}"
            param = f"{E4M3}: a byte each, and one for the scale of each {part}; computes in {param}"
        names = (param, *others)
        counts[names] = counts.get(names, 0) + 1
    return [
        {"parameters": names[0], "gradients": names[1], "master": names[2], "buckets": count}
        for names, count in counts.items()
    ]


def _no_number(metrics: Sequence[Mapping[str, Any]]) -> str | None:
    """Name the first entry that a curve cannot be drawn through; None if there is none."""
    if not (isinstance(metrics, Sequence) and all(isinstance(row, Mapping) for row in metrics)):
        return f"a {type(metrics).__name__}, where a list with a dict for each step was expected"
    entries = ((number, *entry) for number, row in enumerate(metrics) for entry in row.items())
    wrong = (f"row {row}, {key!r}: {type(n).__name__}" for row, key, n in entries if type(n) not in (int, float))
    return next(wrong, None)
