"""The four gates, judged: the results of their runs, what each was tried by, and what was left out and why."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from zeroshard.cli.gates import GATES, Gate, Plan, Trial
from zeroshard.cli.question import Configuration, Difference

HOLDS, FAILS, UNTRIED = "holds", "fails", "not tried"
EQUAL, DIFFERENT, FAILED, NOT_RUN, REFUSED = "equal", "different", "failed", "not run", "refused"


class Cell(NamedTuple):
    """The result of one configuration on one number of ranks."""

    ranks: int
    configuration: Configuration
    result: str  # equal, different, failed, not run (something before it failed), refused
    difference: Difference | None = None
    trial: Trial | None = None
    why: str = ""  # it was refused


class Twice(NamedTuple):
    """Two plain runs of the same, and their difference."""

    format: str
    ranks: int
    difference: Difference | None


class Result(NamedTuple):
    """One run of a gate, in words."""

    what: str
    result: str
    difference: Difference | None = None


@dataclass
class Outcome:
    """The result of a gate. tried: lines of what its runs were. untried: (what, why) of what it has left out."""

    gate: Gate
    runs: list[Result]
    tried: list[str]
    untried: list[tuple[str, str]] = field(default_factory=list)
    axes: dict[str, dict[str, list[int]]] = field(default_factory=dict)  # {axis: {value: [equal runs, runs]}}

    @property
    def held(self) -> int:
        return sum(run.result == EQUAL for run in self.runs)

    @property
    def result(self) -> str:
        if not self.runs:
            return UNTRIED
        return HOLDS if self.held == len(self.runs) else FAILS

    def record(self) -> dict[str, Any]:
        """Make its object of `--json`."""
        runs = [{**run._asdict(), "difference": run.difference and run.difference._asdict()} for run in self.runs]
        untried = [{"what": what, "why": why} for what, why in self.untried]
        told = {**self.gate._asdict(), "result": self.result, "held": self.held, "runs": runs, "not_tried": untried}
        return told | ({"axes": self.axes} if self.axes else {})


def outcomes(plan: Plan, twice: Sequence[Twice], cells: Sequence[Cell], machine: str) -> list[Outcome]:
    """Judge the gates. machine: what this one cannot try, such as "this machine has no GPU"; else empty."""
    if any(each.difference for each in twice if each.format == plan.own.format):  # no comparison means anything then
        why = [("all of it", "two runs without zeroshard differ")]
        return [_repeatability(plan, twice, ()), *(Outcome(gate, [], [], list(why)) for gate in GATES[1:])]
    return [
        _repeatability(plan, twice, cells),
        _baseline(plan, cells),
        _restart(plan, cells),
        _configuration(plan, cells, machine),
    ]


def gates_of(plan: Plan, trial: Trial) -> tuple[int, ...]:
    """Return the gates that a run is tried for, by their places in `GATES`."""
    first = trial.format == plan.own.format and trial.configuration == plan.own.first_of(trial.ranks)
    based = (1,) if first and plan.own.reference(trial.ranks) == "plain PyTorch" else ()
    return {"again": (0,), "resumed": (2,), "grid": (*based, 3)}.get(trial.kind, ())


def _of(gate: int, plan: Plan, cells: Iterable[Cell]) -> list[Cell]:
    return [cell for cell in cells if cell.trial and gate in gates_of(plan, cell.trial)]


def _repeatability(plan: Plan, twice: Sequence[Twice], cells: Iterable[Cell]) -> Outcome:
    again = _of(0, plan, cells)
    runs = [
        Result(f"one process, {each.format}, the micro-batches of {_ranks([each.ranks])}", *_found(each.difference))
        for each in twice
    ]
    runs += [Result(f"{cell.trial}, in new processes", cell.result, cell.difference) for cell in again]
    formats = len({each.format for each in twice})
    tried = [f"one process without zeroshard, with the micro-batches of {_ranks({each.ranks for each in twice})}"]
    tried[0] += f", in {formats} formats" * (formats > 1)
    tried += [f"{cell.trial}: again in new processes" for cell in again]
    return Outcome(GATES[0], runs, tried, [] if again else [("the sharded run again", "there was none before")])


def _baseline(plan: Plan, cells: Iterable[Cell]) -> Outcome:
    firsts = _of(1, plan, cells)
    runs = [Result(str(cell.trial), cell.result, cell.difference) for cell in firsts if cell.result != REFUSED]
    tried = [f"{_ranks(cell.ranks for cell in firsts)}, {firsts[0].configuration}"] if firsts else []
    others = [ranks for ranks in plan.own.ranks if plan.own.reference(ranks) != "plain PyTorch"]
    untried = [(_ranks(others), f"training changes buffers ({_few(plan.own.buffers)})")] if others else []
    return Outcome(GATES[1], runs, tried, untried)


def _restart(plan: Plan, cells: Iterable[Cell]) -> Outcome:
    asked = _of(2, plan, cells)
    resumed = [cell for cell in asked if cell.result != REFUSED]
    runs = [Result(str(cell.trial), cell.result, cell.difference) for cell in resumed]
    own = [cell for cell in resumed if cell.trial and cell.trial.against == f"kept-{cell.ranks}"]
    stopped = f"stopped after step {plan.half} of {plan.own.steps}"
    tried = [f"{cell.trial}: {stopped}, resumed in new processes" for cell in own]
    tried += [f"that checkpoint resumed on {cell.trial}" for cell in resumed if cell not in own]
    untried = [(f"resumed on {cell.trial}", cell.why) for cell in asked if cell.result == REFUSED]
    if not plan.half:
        untried.append(("a stop", "of one step there is no half: --steps 2 or more"))
    elif not own:
        untried.append(("a stop", "the run that was to be stopped did not end"))
    elif len(own) == len(resumed):
        why = "it takes two numbers of ranks, and of micro-batches, that are powers of two"
        untried.append(("a resume on other ranks", why))
    return Outcome(GATES[2], runs, tried, untried)


def _configuration(plan: Plan, cells: Iterable[Cell], machine: str) -> Outcome:
    grid = _of(3, plan, cells)
    axes: dict[str, dict[str, list[int]]] = {}
    ran = [cell for cell in grid if cell.result != REFUSED]
    for cell in ran:
        for axis, value in (cell.trial.axes if cell.trial else {}).items():
            counts = axes.setdefault(axis, {}).setdefault(value, [0, 0])
            counts[0] += cell.result == EQUAL
            counts[1] += 1
    for axis in ("ranks", "stage", "replicas", "hosts"):
        axes[axis] = dict(sorted(axes.get(axis, {}).items(), key=lambda each: int(each[0])))
    runs = [Result(f"{cell.trial}, {cell.trial and cell.trial.format}", cell.result, cell.difference) for cell in ran]
    untried = list(plan.untried)
    refused: dict[str, list[Trial]] = {}
    for cell in grid:
        if cell.result == REFUSED and cell.trial:
            refused.setdefault(cell.why, []).append(cell.trial)
    for why, (first, *rest) in refused.items():
        untried.append((f"{first}, {first.format}{f' (and {len(rest)} more)' if rest else ''}", why))
    if plan.chosen == "pairs":
        met = {pair for cell in ran if cell.trial for pair in cell.trial.meetings}
        possible = len(plan.possible | met)
        untried.append(
            ("other combinations", f"{len(met):,} of {possible:,} pairs of values met in a run; --full tries more")
        )
    elif plan.chosen == "all":
        untried.append(
            ("other combinations", "transports, tiers and other formats meet each value of the rest in pairs")
        )
    elif plan.chosen == "asked":
        untried.append(
            ("other values", "this command names those to try; without names, or with --full, there are more")
        )
    if machine:
        untried.append(("GPUs", machine))
    untried.append(("several machines", "verify starts its ranks on this one"))
    return Outcome(GATES[3], runs, [], untried, axes)


def _found(difference: Difference | None) -> tuple[str, Difference | None]:
    return (DIFFERENT if difference else EQUAL), difference


def _ranks(counts: Iterable[int]) -> str:
    found = sorted(set(counts))
    return f"{_few([str(each) for each in found], most=8)} rank{'s' * (found != [1])}"


def _few(names: Sequence[str], most: int = 3) -> str:
    some = [*names[:most]]
    if len(names) > most:
        return ", ".join([*some, "..."])
    return some[0] if len(some) == 1 else f"{', '.join(some[:-1])} and {some[-1]}"
