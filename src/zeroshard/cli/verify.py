"""`zeroshard verify`: the four gates of the user's own job, by runs of it without zeroshard, sharded, and resumed.

zeroshard verify                           the scenarios of a published text, one after the other
zeroshard verify train:job --ranks 2,3     this process: plain runs into a temporary folder, then each launch of ranks
  ├─ zeroshard verify-rank FOLDER (x 2)    every configuration on two ranks, a line of results-0.jsonl each
  ├─ zeroshard verify-rank FOLDER (x 3)    the same on three
  └─ zeroshard verify-rank FOLDER (x 2)    one of them again, and resumed, in new processes
"""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.markup import escape

from zeroshard.cli import gates, launch, processor, screen
from zeroshard.cli.config import InputError, Launch, one_line
from zeroshard.cli.gates import GATES, Plan, Trial
from zeroshard.cli.outcomes import (
    DIFFERENT,
    EQUAL,
    FAILED,
    FAILS,
    HOLDS,
    NOT_RUN,
    REFUSED,
    UNTRIED,
    Cell,
    Outcome,
    Twice,
    gates_of,
    outcomes,
)
from zeroshard.cli.question import Configuration, Difference, Question
from zeroshard.cli.working import Working
from zeroshard.errors import UserError

SCHEMA = 1  # of the object of --json

# The tests of the article on ZeRO-1 in three layers, each with the numbers of ranks it is run on. Of its three
# scenarios only the padding one is described; the others are its listing's own model, and a narrow one on more ranks.
SCENARIOS = (
    ("basic", "zeroshard.explain.stacked_mlp:default", (2,)),
    ("more ranks", "zeroshard.explain.stacked_mlp:narrow", (3, 4)),
    ("padding", "zeroshard.explain.stacked_mlp:padding", (2, 3, 4)),
)

DIED = "a rank died after its last result, which counts as failed: standard error says which rank, and how it ended"
FILE = "verify.json"  # of --out


def verify_scenarios(
    question: Question, *, ranks: tuple[int, ...] | None, quick: bool = False, as_json: bool = False, out: str = ""
) -> int:
    """Run the article's scenarios one after the other; return 0 where all are equal.

    ranks: in place of their own. quick: the facts of this machine, and the first scenario alone.
    """
    _check(out)
    told: list[dict[str, Any]] = []
    code = 0
    if quick and not as_json:
        _show_machine()
    for name, job, own in SCENARIOS[: 1 if quick else None]:
        if not as_json:
            screen.say(f"\n[bold]Scenario: {name}[/bold]")
        on = ranks or own
        copies = tuple(count for count in question.replicas if any(each % count == 0 for each in on))
        hosts = tuple(count for count in question.hosts if any(each % count == 0 for each in on))
        own_question = replace(question, job=job, ranks=on, replicas=copies, hosts=hosts)
        failed, record = judged(gates.asked(own_question), as_json=as_json)
        if record is None:
            return failed
        code = code or failed
        told.append({"scenario": name, **record})
    whole = {"schema": SCHEMA, "equal": not code, "scenarios": told}
    if as_json:
        print(json.dumps(whole))
    if out:
        _write(out, whole)
    return code


def verify(
    question: Question,
    given: Collection[str] | None = None,
    *,
    full: bool = False,
    quick: bool = False,
    as_json: bool = False,
    out: str = "",
) -> int:
    """Try the gates and print their table; return exit code 0 where all that ran hold, else 1. Raises `UserError`.

    given: the options that the command line has; None, or any of `gates.SETTINGS` without `full`: every combination
    of these, and no more. quick: print the facts of this machine too. out: a folder for verify.json.
    """
    _check(out)
    if quick and not as_json:
        _show_machine()
    with tempfile.TemporaryDirectory(prefix="zeroshard-files-") as files:
        if full or (given is not None and not gates.SETTINGS & set(given)):
            slow = processor.slow("bf16").partition(":")[0]
            plan = gates.everything(question, given or (), full=full, folder=files, slow=slow)
        else:
            plan = gates.asked(question)
        code, record = judged(plan, as_json=as_json)
    if record is not None:
        if as_json:
            print(json.dumps(record))
        if out:
            _write(out, record)
    return code


def judged(plan: Plan, *, as_json: bool) -> tuple[int, dict[str, Any] | None]:
    """Run a plan and show its table, unless as_json; return the exit code and the object, None without a result."""
    if Launch.from_environment():
        raise InputError("verify starts its own ranks; run it without torchrun")
    launch.check_ranks(max(trial.ranks for trial in plan.trials))  # before plain runs of as many micro-batches
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch reads it; see launch.start_ranks
    with (
        tempfile.TemporaryDirectory(prefix="zeroshard-verify-") as name,
        _Counts(plan, Path(name), lines=not as_json) as counts,
    ):
        twice = counts.twice
        trains = _plain(plan, counts)
        cells: list[Cell] = []
        if not any(each.difference for each in twice if each.format == plan.own.format):
            plan.save(Path(name))
            counts.total()
            for number, (ranks, trials) in enumerate(plan.launches()):
                code = _launch(plan, counts, number, ranks, trials, cells)
                if code in (launch.BAD_INPUT, launch.INTERRUPTED):
                    return code, None
    from zeroshard.device import accelerators

    found = outcomes(plan, twice, cells, "" if accelerators() else "this machine has none")
    order = {trial: number for number, trial in enumerate(plan.trials)}
    grid = sorted((cell for cell in cells if cell.trial in order), key=lambda cell: order[cell.trial])  # type: ignore[index]
    said = notes(plan.own, grid, trains) if cells else _unsteady(twice)
    said += [DIED] * any(cell.why == DIED for cell in cells)
    code = launch.FAILED if any(outcome.result == FAILS for outcome in found) else 0
    if not as_json:
        _show(plan.own, found, grid, said)
    return code, _record(plan.own, found, grid, said)


class _Counts:
    """What has been run so far, gate by gate, as a thread counts it in the files that ranks write."""

    def __init__(self, plan: Plan, folder: Path, *, lines: bool) -> None:
        self.plan, self.folder = plan, folder
        self.twice: list[Twice] = []
        self.launched: list[tuple[Path, list[Trial]]] = []
        self.alone = ""  # what runs in one process now
        self._totals, self._decided = [0] * len(GATES), [""] * len(GATES)
        self._working = Working(*((gate.name, None) for gate in GATES), lines=lines, look=self._look)

    def __enter__(self) -> _Counts:
        self.total()
        self._working.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._working.__exit__(*error)
        self._look()

    def total(self) -> None:
        """Count what there is to run; plain runs may have shown what cannot be."""
        counted = Counter(
            gate for _, trials in self.plan.launches() for trial in trials for gate in gates_of(self.plan, trial)
        )
        plain = sum(map(len, self.plan.needs().values()))
        self._totals = [counted[gate] + (max(plain, len(self.twice)) if gate == 0 else 0) for gate in range(len(GATES))]

    def _look(self) -> None:
        ended: list[list[bool]] = [[] for _ in GATES]
        tried = {0: self.alone}
        ended[0] += [each.difference is None for each in self.twice]
        for path, trials in self.launched:
            lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
            for trial, line in zip(trials, lines, strict=False):
                for at in gates_of(self.plan, trial):
                    ended[at].append(json.loads(line)["difference"] is None)
            tried = {at: str(next) for next in trials[len(lines) :][:1] for at in gates_of(self.plan, next)}
        for number, (gate, equal, total) in enumerate(zip(GATES, ended, self._totals, strict=True)):
            result = FAILS if not all(equal) else HOLDS if equal and len(equal) >= total else ""
            self._working.now(result or tried.get(number, ""), len(equal), of=total, task=number)
            if result and result != self._decided[number]:
                self._working.say(f"gate {number + 1}, {gate.name}: {result}, {sum(equal)} of {len(equal)} runs equal")
                self._decided[number] = result


def _plain(plan: Plan, counted: _Counts) -> bool:
    """Run the job without zeroshard, twice for each format and number of ranks; drop from the plan what cannot be.

    Return whether any parameter changed in the job's own.
    """
    counted.alone = "importing torch"
    from zeroshard.cli import compare

    folder, twice, trains = counted.folder, counted.twice, True
    for key, counts in plan.needs().items():
        question = plan.questions[key]
        target, dropped = plan.folder(folder, key), False
        for ranks in counts:
            counted.alone = f"{key}, the micro-batches of {screen.ranks_text(ranks)}, in one process"
            try:
                plain = compare.run_plain_twice(question, ranks, target / f"plain-{ranks}")
            except UserError as error:
                if key == plan.own.format:
                    raise
                plan.untried.append((f"format {key}", one_line(error)))
                dropped = True
                break
            twice.append(Twice(key, ranks, plain.difference))
            dropped = plain.difference is not None
            if dropped:
                break
            question = plan.questions[key] = replace(question, buffers=plain.buffers)
            trains = trains and (plain.trains or key != plan.own.format)
        if dropped and key == plan.own.format:
            break
        plan.trials = [
            trial
            for trial in plan.trials
            if trial.format != key or not (dropped or (question.buffers and trial.configuration.plain != trial.ranks))
        ]
    return trains


def _launch(plan: Plan, counts: _Counts, number: int, ranks: int, trials: list[Trial], cells: list[Cell]) -> int:
    """Start ranks for some trials, and add their results."""
    folder = counts.folder
    needed = {trial.against for trial in trials if trial.kind in ("again", "resumed")}
    ended = {
        cell.trial.against for cell in cells if cell.trial and cell.trial.kind == "record" and cell.result == EQUAL
    }
    trials = [trial for trial in trials if trial.against in ended | {trial.against} - needed]
    if not trials:
        return 0
    name = f"results-{number}.jsonl"
    gates.Launch(name, plan.half, [(plan.folder(folder, each.format).name, each) for each in trials]).save(folder)
    path = folder / name
    counts.launched.append((path, trials))
    code = launch.start_ranks(["verify-rank", str(folder)], ranks)
    # Ranks that failed have written lines for what they finished.
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    for at, trial in enumerate(trials):
        if at < len(lines):
            found = json.loads(lines[at])
            difference = Difference(**found["difference"]) if found["difference"] else None
            result = REFUSED if found["refused"] else DIFFERENT if difference else EQUAL
            cells.append(Cell(ranks, trial.configuration, result, difference, trial, found["refused"]))
        else:
            cells.append(Cell(ranks, trial.configuration, FAILED if at == len(lines) else NOT_RUN, None, trial))
    if code and len(lines) >= len(trials):
        cells[-1] = cells[-1]._replace(result=FAILED, difference=None, why=DIED)
    return code


def verify_rank(folder: str) -> None:
    """Run one rank, started by `verify`."""
    place = Launch.from_environment()
    if place is None:
        raise InputError("verify-rank is what zeroshard verify starts; run zeroshard verify module:function")
    launch.end_at_once_when_told(launched=True)
    from zeroshard.cli.compare import check_rank

    launch.alone(check_rank, Path(folder), place.rank, place.ranks)


# --- what is shown --------------------------------------------------------------------------------------------------


def notes(question: Question, cells: Sequence[Cell], trains: bool) -> list[str]:
    """List notes: what each cell was compared with, and what to know before believing it."""
    said = []
    alone = "plain PyTorch in one process, the same micro-batches one after the other"
    alone += ", each one's gradient rounded in the same way" * (question.reduce == "int8")
    if len({cell.trial.format for cell in cells if cell.trial}) > 1:
        alone += "; for each format in that format"
    if question.buffers and max(question.ranks) > 1:
        names = ", ".join(question.buffers[:3]) + (", ..." if len(question.buffers) > 3 else "")
        said.append(
            f"reference: stage 0 without overlap, because training changes buffers ({names}) and every rank gets rank "
            f"0's, which one plain process has no counterpart for" + (f"; at 1 rank {alone}" * (1 in question.ranks))
        )
    else:
        said.append(f"reference: {alone}")
    if question.elastic:
        said.append(
            f"elastic: {question.elastic * question.accumulate} micro-batches a step at fewer ranks, as at "
            f"{question.elastic}; stage {max(question.stages)}"
        )
    if question.precision == "bf16-split" and any(question.masters_alone(cell.configuration) for cell in cells):
        said.append("stage 3 on the device: masters alone rest of sharded parameters, and nothing is split there")
    if "all" in question.optimizer_over and (0 in question.stages or 1 in question.replicas):
        said.append("--optimizer-over all needs several replicas, and stage 1, 2 or 3")
    if not trains:
        said.append("no parameter changed in all these steps: equal bits say little about gradients here")
    for ranks in question.ranks:
        found = [cell.difference for cell in cells if cell.ranks == ranks and cell.result != REFUSED]
        if ranks > 1 and found and all(each and each.step == 1 and each.element is None for each in found):
            said.append(
                f"at {ranks} ranks every loss differs before the first update: the job's model, batch or loss seems to "
                f"depend on the rank or process, not on (step, index) alone"
            )
    return said


def _unsteady(twice: Sequence[Twice]) -> list[str]:
    """Say that two plain runs differ, so that no comparison with a third would mean anything."""
    difference = next(each.difference for each in twice if each.difference)
    place = difference.place.rpartition(", rank")[0]  # there is only one process
    return [
        f"the job does not repeat itself: two runs without zeroshard differ at {place}: {difference.values}; "
        f"make model, batch and loss depend on nothing but (step, index) and the generators of torch, numpy and random"
    ]


def _show_machine() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch reads it; see launch.start_ranks
    from zeroshard.cli import machine

    machine.show(machine.facts())


COLOURS = {HOLDS: "green", FAILS: "bold red", UNTRIED: "yellow"}


def _show(question: Question, found: Sequence[Outcome], cells: Sequence[Cell], said: Sequence[str]) -> None:
    steps, batches = screen.many(question.steps, "step"), screen.many(question.accumulate, "micro-batch", "es")
    counted = f"{steps} of {batches} per rank, {question.precision}"
    counted += ", gradients sent in 8 bits" * (question.reduce == "int8")
    clip = "" if question.clip is None else f", clipped at {question.clip}"
    early = ", the optimizer in backward" if question.optimizer_in_backward else ""
    screen.say(f"\n[bold]{escape(question.job)}[/bold]: {counted}{clip}{early}\n")
    screen.say(f"[dim]   {'gate':<33}{'result':<11}equal runs[/dim]")
    for number, outcome in enumerate(found, start=1):
        result = f"[{COLOURS[outcome.result]}]{outcome.result:<11}[/{COLOURS[outcome.result]}]"
        count = f"{outcome.held} of {len(outcome.runs)}" if outcome.runs else ""
        screen.say(f"{number}  {outcome.gate.name:<33}{result}{count}".rstrip())
        for line in outcome.tried:
            screen.folded(line, "     ")
        for axis, values in outcome.axes.items():
            screen.folded(f"{axis:<16}" + _values(values), "     ", " " * 21)
    untried = [(outcome, *each) for outcome in found for each in outcome.untried]
    if untried:
        screen.say("\n[dim]   not tried[/dim]")
    for outcome, what, why in untried:
        screen.folded(f"{found.index(outcome) + 1}  {what}: {why}", "", "     ")
    screen.say("")
    for note in said:
        screen.folded(note, style="dim")
    _show_differences(found, cells)
    failed = [outcome.gate.name for outcome in found if outcome.result == FAILS]
    held = sum(outcome.result == HOLDS for outcome in found)
    if failed:
        screen.folded(f"{len(failed)} of {len(found)} gates fail: {', '.join(failed)}", style="bold red")
    elif held == len(found):
        runs = sum(len(outcome.runs) for outcome in found if outcome.gate is not GATES[1])  # whose runs are gate 4's
        screen.say(f"[bold green]all {held} gates hold: {runs} runs are equal, bit for bit[/bold green]")
    else:
        screen.say(f"[bold yellow]{held} of {len(found)} gates hold, and the others were not tried[/bold yellow]")


def _values(counts: Mapping[str, list[int]]) -> str:
    """List an axis's values; beside one of several that some run failed with, how many did not."""
    return ", ".join(
        value if equal == runs or len(counts) == 1 else f"{value} ({equal} of {runs} equal)"
        for value, (equal, runs) in counts.items()
    )


def _show_differences(found: Sequence[Outcome], cells: Sequence[Cell]) -> None:
    alike: dict[tuple[int, Difference], list[Configuration]] = {}
    for cell in cells:
        if cell.difference:
            alike.setdefault((cell.ranks, cell.difference), []).append(cell.configuration)
    for (ranks, difference), configurations in alike.items():
        more = f" (and {len(configurations) - 1} more)" if len(configurations) > 1 else ""
        where = f"{screen.ranks_text(ranks)}, {configurations[0]}{more}"
        screen.folded(f"{where}: {difference.place}: {difference.values}", "", "   ")
    for outcome in (found[0], found[2]):
        for run in outcome.runs:
            if run.difference and outcome.untried[:1] != [("all of it", "two runs without zeroshard differ")]:
                screen.folded(
                    f"{outcome.gate.name}: {run.what}: {run.difference.place}: {run.difference.values}", "", "   "
                )
    counts = {result: sum(cell.result == result for cell in cells) for result in (FAILED, NOT_RUN)}
    if any(counts.values()):
        screen.say(", ".join(f"{count} {result}" for result, count in counts.items() if count))


# --- what is written ------------------------------------------------------------------------------------------------


def _record(question: Question, found: Sequence[Outcome], cells: Sequence[Cell], said: Sequence[str]) -> dict[str, Any]:
    """Make the one object of `--json`."""
    from zeroshard.cli import machine

    return {
        "schema": SCHEMA,
        "job": question.job,
        "equal": bool(cells) and all(outcome.result != FAILS for outcome in found),
        "gates": [outcome.record() for outcome in found],
        "environment": machine.facts(),  # what gate 1 calls a fixed environment
        "settings": asdict(question),
        "notes": list(said),
        "results": [
            {
                "ranks": cell.ranks,
                "format": cell.trial.format if cell.trial else question.format,
                "reference": question.reference(cell.ranks),
                **{k: v for k, v in cell.configuration._asdict().items() if k != "plain"},
                "result": cell.result,
                "difference": None if cell.difference is None else cell.difference._asdict(),
                "why": cell.why,
            }
            for cell in cells
        ],
    }


def _check(out: str) -> None:
    """Make the folder of --out, before anything runs. What an earlier command left there says nothing of this one."""
    try:
        if out:
            Path(out).mkdir(parents=True, exist_ok=True)
            (Path(out) / FILE).unlink(missing_ok=True)
    except OSError as error:
        raise InputError(f"--out: no folder can be made at {out}: {error.strerror}") from error


def _write(out: str, record: dict[str, Any]) -> None:
    path = Path(out) / FILE
    try:
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(f"--out: {path} cannot be written: {error.strerror}") from error
