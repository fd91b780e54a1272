"""`zeroshard plan JOB --check`: the plan beside a run of the engine on local ranks, byte by byte.

zeroshard plan train:job --check --ranks 2   this process: simulates every rank at every stage, then compares
  └─ zeroshard check-rank FOLDER (x 2)       trains three steps at each stage and writes what its ledger says
"""

from __future__ import annotations

import ctypes
import gc
import json
import tempfile
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from zeroshard.cli import launch, processor, screen
from zeroshard.cli.config import InputError, Launch, offload_of
from zeroshard.cli.policies import policies
from zeroshard.cli.working import Working
from zeroshard.events import DEVICE, Ledger

AT_REST = "at rest"
ACTIVATIONS, FORWARD_ENDS = "activations", ", as forward ends"
AWAY = (ACTIVATIONS, "staged activations")
PROCESS, INSIDE = "measured: process", "measured: in a step"
MEASURED = (PROCESS, INSIDE)


@dataclass(frozen=True)
class Check:
    """Settings of the job that is run and compared."""

    job: str
    ranks: int
    stages: tuple[int, ...]
    accumulate: int = 1
    no_sync: bool = False
    offload: dict[str, str] = field(default_factory=dict)  # {state: where it rests}, as on the command line
    options: dict[str, Any] = field(default_factory=dict)  # of the other policies, likewise

    def settings(self, folder: str, stage: int) -> dict[str, Any]:
        """Make the policies for `shard` and `simulate`; files go to `folder`."""
        from zeroshard.comm.shared_memory import possible

        offload = offload_of(self.offload, folder if "nvme" in self.offload.values() else "")
        made = policies(self.options) | {"offload": offload}
        try:
            possible()
        except OSError:  # here ranks send messages, and the simulation has to know
            made["comm"] = made["comm"].on_accelerators()
        return made


def check(asked: Check, *, as_json: bool = False) -> int:
    """Run, compare and print; return exit code 0 where every byte is as predicted, 1 where one is not."""
    if Launch.from_environment():
        raise InputError("plan --check starts its own ranks; run it without torchrun")
    launch.check_ranks(asked.ranks)
    if (slow := processor.slow(asked.options.get("precision", "fp32"))) and not as_json:
        screen.say(f"  [yellow]{slow}[/yellow]")
    rows = compare(asked, lines=not as_json)
    if isinstance(rows, int):
        return rows
    if as_json:
        print(json.dumps({"check": asdict(asked), "rows": rows}, indent=2))
    else:
        show(rows)
    return launch.FAILED if any(row["difference"] for row in rows if row["what"] not in MEASURED) else 0


def compare(asked: Check, *, lines: bool = True) -> list[dict[str, Any]] | int:
    """Return rows of predicted, held and difference for every stage and rank, or the exit code of failed ranks."""
    with Working(("stages of ranks simulated", len(asked.stages) * asked.ranks), lines=lines) as counts:
        return _compared(asked, counts)


def _compared(asked: Check, counts: Working) -> list[dict[str, Any]] | int:
    counts.now(f"before them {screen.many(asked.ranks, 'local rank')} in training")
    from zeroshard.planner import built
    from zeroshard.planner.simulate import STEPS, simulate

    with tempfile.TemporaryDirectory(prefix="zeroshard-check-") as name:
        (Path(name) / "check.json").write_text(json.dumps(asdict(asked)))
        if code := launch.start_ranks(["check-rank", name], asked.ranks):
            return code
        held = [json.loads((Path(name) / f"rank{rank}.json").read_text()) for rank in range(asked.ranks)]
    rows: list[dict[str, Any]] = []
    for number, stage in enumerate(asked.stages):
        for rank in range(asked.ranks):
            counts.now(f"stage {stage}, rank {rank}", number * asked.ranks + rank)
            run = simulate(
                asked.job, ranks=asked.ranks, rank=rank, stage=stage,
                accumulate=asked.accumulate, no_sync=asked.no_sync, **asked.settings(".", stage),
            )  # fmt: skip
            found = held[rank][str(stage)]
            tiers = _tiers(built.predict_tiers(run.zero), run.ledger)
            for tier in dict.fromkeys([*tiers, *found["tiers"]]):
                rest, there = tiers.get(tier, {}), found["tiers"].get(tier, {})
                where = "" if tier == DEVICE else f" in {tier}"
                for state in dict.fromkeys([*rest, *there]):
                    rows.append(_row(stage, rank, f"{state}{where}", rest.get(state, 0), there.get(state, 0)))
                rows.append(_row(stage, rank, f"{AT_REST}{where}", sum(rest.values()), sum(there.values())))
            for tier in dict.fromkeys([*run.away, *found["away"]]):
                what = f"{ACTIVATIONS} in {tier}{FORWARD_ENDS}"
                rows.append(_row(stage, rank, what, run.away.get(tier, 0), found["away"].get(tier, 0)))
            for verb in ("read", "write") if asked.offload else ():
                moved = run.ledger.traffic[verb].logical if verb in run.ledger.traffic else 0
                rows.append(_row(stage, rank, f"{verb} in {STEPS} steps", moved, found["moved"][verb]))
            peaks = {phase: most.total for phase, most in run.ledger.phases.items()}
            for phase in dict.fromkeys([*peaks, *found["peaks"]]):
                rows.append(_row(stage, rank, f"peak in {phase}", peaks.get(phase, 0), found["peaks"].get(phase, 0)))
            most = max(peaks.values())
            rows.append(_row(stage, rank, PROCESS, most, found["process"]))
            rows.append(_row(stage, rank, INSIDE, 0, found["step"]))
    return rows


def _tiers(states: Mapping[str, Mapping[str, int]], ledger: Ledger) -> dict[str, dict[str, int]]:
    """Add to the states at rest the room in files that activations keep for the next forward, and its buffers."""
    kept = {tier: {what: held[what] for what in AWAY if held.get(what)} for tier, held in ledger.tiers.items()}
    return {tier: {**states.get(tier, {}), **kept.get(tier, {})} for tier in dict.fromkeys([*states, *kept])}


def _row(stage: int, rank: int, what: str, predicted: int, held: int) -> dict[str, Any]:
    return {
        "stage": stage, "rank": rank, "what": what, "predicted": predicted, "held": held, "difference": held - predicted
    }  # fmt: skip


def show(rows: list[dict[str, Any]]) -> None:
    """Print totals at rest, moved activations and the highest peak of each stage and rank; others if they differ."""
    highest: dict[tuple[int, int], int] = {}
    for row in rows:
        if row["what"].startswith("peak"):
            place = row["stage"], row["rank"]
            highest[place] = max(highest.get(place, 0), row["predicted"])
    table = screen.new_table("Predicted and held, in bytes", "stage", "rank", "what", "predicted", "held", "difference")
    last: tuple[str, str] | None = None
    for row in rows:
        place = row["stage"], row["rank"]
        most = row["what"].startswith("peak") and row["predicted"] == highest.get(place)
        if most:
            del highest[place]
        shown = row["what"].startswith(AT_REST) or row["what"].endswith(FORWARD_ENDS)
        if row["what"] in MEASURED or not (shown or most or row["difference"]):
            continue
        at = (str(row["stage"]), str(row["rank"]))
        if last is not None and last[0] != at[0]:
            table.add_section()
        cells = (f"{row['predicted']:,}", f"{row['held']:,}", f"{row['difference']:+,}" if row["difference"] else "0")
        table.add_row(*(at if at != last else ("", "")), row["what"], *cells)
        last = at
    screen.wide(table)
    measured = screen.new_table(
        "Measured beside it: this process, in bytes", "stage", "rank", "peak over its start", "the ledger's peak",
        "difference", "most in a step",
    )  # fmt: skip
    inside = {(row["stage"], row["rank"]): row["held"] for row in rows if row["what"] == INSIDE}
    for row in rows:
        if row["what"] == PROCESS:
            most = inside[row["stage"], row["rank"]]
            numbers = (f"{row['held']:,}", f"{row['predicted']:,}", f"{row['difference']:+,}", f"{most:,}")
            measured.add_row(str(row["stage"]), str(row["rank"]), *numbers)
    screen.wide(measured)
    screen.say("  [dim]measured: activations, libraries and what operators take while they run are in it[/dim]")
    wrong = [row for row in rows if row["difference"] and row["what"] not in MEASURED]
    if wrong:
        first = f"stage {wrong[0]['stage']}, rank {wrong[0]['rank']}, {wrong[0]['what']}"
        screen.say(f"  [bold red]{len(wrong)} rows differ[/bold red], the first: {first}")
    else:
        screen.say("  [bold green]held = predicted, at rest and at every peak, to the byte[/bold green]")


def check_rank(folder: str) -> None:
    """Train a little at every stage on one rank, started by `check`, and write what it held."""
    place = Launch.from_environment()
    if place is None:
        raise InputError("check-rank is what zeroshard plan --check starts; run zeroshard plan module:function --check")
    launch.end_at_once_when_told(launched=True)
    launch.alone(_train_all, Path(folder), place)


def _train_all(folder: Path, place: Launch) -> None:
    settings = json.loads((folder / "check.json").read_text())
    asked = Check(**{**settings, "stages": tuple(settings["stages"])})
    _train(asked, asked.stages[0], place, folder)  # first, as libraries take memory once that is not this job's
    found = {stage: _train(asked, stage, place, folder) for stage in asked.stages}
    (folder / f"rank{place.rank}.json").write_text(json.dumps(found))


def _train(asked: Check, stage: int, place: Launch, folder: Path) -> dict[str, Any]:
    import torch

    import zeroshard
    from zeroshard.engine.gradients.reduction import UNHURRIED
    from zeroshard.planner.job import build
    from zeroshard.planner.simulate import STEPS

    gc.collect()
    with suppress(OSError, AttributeError):  # give back what earlier stages left in the allocator
        ctypes.CDLL(None).malloc_trim(0)
    start = _memory("VmRSS")
    _reset_peak()
    torch.manual_seed(0)
    job = build(asked.job)
    job.need("optimizer", "batch", "loss")
    optimizers = job.optimizers()
    zero = zeroshard.shard(job.model, optimizers, stage=stage, **asked.settings(str(folder / "files"), stage))
    zero._engine.reduction.pause = UNHURRIED
    most = inside = 0
    for step in range(STEPS):
        for turn in range(asked.accumulate):
            local = asked.no_sync and turn < asked.accumulate - 1
            with zero.no_sync() if local else nullcontext():
                loss = job.loss_of(job.batch(step, turn * place.ranks + place.rank))
                away = {tier: held[ACTIVATIONS] for tier, held in zero.ledger().tiers.items() if held.get(ACTIVATIONS)}
                loss.backward()
                del loss
        before, most = _memory("VmRSS"), max(most, _memory("VmHWM"))
        _reset_peak()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        inside = max(inside, _memory("VmHWM") - before)
    for bucket in zero._engine.buckets:  # until here memory may be lent to other ranks
        bucket.land()
    ledger = zero.ledger()
    return {
        "tiers": {tier: {state: n for state, n in held.items() if n} for tier, held in ledger.tiers.items()},
        "moved": {verb: ledger.traffic[verb].logical if verb in ledger.traffic else 0 for verb in ("read", "write")},
        "peaks": {phase: peak.total for phase, peak in ledger.phases.items()},
        "away": away,
        "process": max(most, _memory("VmHWM")) - start,
        "step": inside,
    }


def _memory(line: str) -> int:
    """Read the bytes of one line of /proc/self/status; 0 where there is none."""
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            return next(int(text.split()[1]) * 1024 for text in file if text.startswith(f"{line}:"))
    except (OSError, StopIteration):
        return 0


def _reset_peak() -> None:
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")
    except OSError:
        return  # then the peak is that of the whole process so far
