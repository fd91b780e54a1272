"""`zeroshard verify`: the user's job at every stage, bucket size and overlap, against the job without zeroshard.

zeroshard verify                           the scenarios of a published text, one after the other
zeroshard verify train:job --ranks 2,3     this process: plain runs into a temporary folder, then the grid
  ├─ zeroshard verify-rank FOLDER (x 2)    every configuration on two ranks, one line of results-2.jsonl each
  └─ zeroshard verify-rank FOLDER (x 3)    the same on three
"""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.markup import escape
from rich.table import Table

from zeroshard.cli import launch, screen
from zeroshard.cli.config import InputError, Launch
from zeroshard.cli.question import Configuration, Difference, Question

WIDEST = 1000  # columns of a grid: a log wants its lines whole, and a terminal wraps them


class Cell(NamedTuple):
    """The result of one configuration on one number of ranks."""

    ranks: int
    configuration: Configuration
    result: str  # equal, different, failed, or not run (something before it failed)
    difference: Difference | None = None

    @property
    def text(self) -> str:
        return self.difference.place if self.difference else self.result


# The tests of the article on ZeRO-1 in three layers, each with the numbers of ranks it is run on. Of its three
# scenarios only the padding one is described; the others are its listing's own model, and a narrow one on more ranks.
SCENARIOS = (
    ("basic", "zeroshard.explain.stacked_mlp:default", (2,)),
    ("more ranks", "zeroshard.explain.stacked_mlp:narrow", (3, 4)),
    ("padding", "zeroshard.explain.stacked_mlp:padding", (2, 3, 4)),
)


def verify_scenarios(question: Question, *, ranks: tuple[int, ...] | None, as_json: bool = False) -> int:
    """Run the article's scenarios one after the other; return 0 where all are equal. ranks: in place of their own."""
    told: list[dict[str, Any]] = []
    code = 0
    for name, job, own in SCENARIOS:
        if not as_json:
            screen.say(f"\n[bold]Scenario: {name}[/bold]")
        on = ranks or own
        copies = tuple(count for count in question.replicas if any(each % count == 0 for each in on))
        hosts = tuple(count for count in question.hosts if any(each % count == 0 for each in on))
        failed = verify(replace(question, job=job, ranks=on, replicas=copies, hosts=hosts), as_json=as_json, told=told)
        if failed not in (0, launch.FAILED):
            return failed
        code = code or failed
        if as_json:
            told[-1] = {"scenario": name, **told[-1]}
    if as_json:
        print(json.dumps({"equal": not code, "scenarios": told}))
    return code


def verify(question: Question, *, as_json: bool = False, told: list[dict[str, Any]] | None = None) -> int:
    """Run the grid and print it; return exit code 0 where every cell is equal, else 1. Raises `UserError`.

    told: a list that gets the object of `as_json` in place of standard output.
    """
    if Launch.from_environment():
        raise InputError("verify starts its own ranks; run it without torchrun")
    launch.check_ranks(max(question.ranks))  # before plain runs of as many micro-batches
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch reads it; see launch.start_ranks
    from zeroshard.cli import compare

    with tempfile.TemporaryDirectory(prefix="zeroshard-verify-") as name:
        folder, trains = Path(name), True
        for ranks in question.ranks:
            plain = compare.run_plain_twice(question, ranks, question.folder_of(folder, ranks))
            if plain.difference:
                return _report_the_job_itself(question, plain.difference, as_json, told)
            question = replace(question, buffers=plain.buffers)
            trains = trains and plain.trains
        question.save(folder)
        cells: list[Cell] = []
        for ranks in question.ranks:
            code = launch.start_ranks(["verify-rank", str(folder)], ranks)
            if code in (launch.BAD_INPUT, launch.INTERRUPTED):
                return code
            cells += _read(question, folder, ranks)
    said = notes(question, cells, trains)
    if as_json:
        _tell(_record(question, cells, said), told)
    else:
        _show(question, cells, said)
    return launch.FAILED if any(cell.result != "equal" for cell in cells) else 0


def _tell(record: dict[str, Any], told: list[dict[str, Any]] | None) -> None:
    if told is None:
        print(json.dumps(record))
    else:
        told.append(record)


def verify_rank(folder: str) -> None:
    """Run one rank, started by `verify`."""
    place = Launch.from_environment()
    if place is None:
        raise InputError("verify-rank is what zeroshard verify starts; run zeroshard verify module:function")
    launch.end_at_once_when_told(launched=True)
    from zeroshard.cli.compare import check_rank

    launch.alone(check_rank, Path(folder), place.rank, place.ranks)


def _read(question: Question, folder: Path, ranks: int) -> list[Cell]:
    """Read the cells of one number of ranks. Ranks that failed have written lines for what they finished."""
    path = question.results(folder, ranks)
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    cells = []
    for number, configuration in enumerate(question.configurations(ranks)):
        if number < len(lines):
            found = json.loads(lines[number])["difference"]
            difference = Difference(**found) if found else None
            cells.append(Cell(ranks, configuration, "different" if difference else "equal", difference))
        else:
            cells.append(Cell(ranks, configuration, "failed" if number == len(lines) else "not run"))
    return cells


# --- what is shown --------------------------------------------------------------------------------------------------


def notes(question: Question, cells: list[Cell], trains: bool) -> list[str]:
    """List notes: what each cell was compared with, and what to know before believing it."""
    said = []
    alone = "plain PyTorch in one process, the same micro-batches one after the other"
    alone += ", each one's gradient rounded alike" * (question.reduce == "int8")
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
        said.append("over all: not of one replica, whose ranks are all, nor at stage 0, where each keeps all states")
    if not trains:
        said.append("no parameter changed in all these steps: equal bits say little about gradients here")
    for ranks in question.ranks:
        found = [cell.difference for cell in cells if cell.ranks == ranks]
        if ranks > 1 and found and all(each and each.step == 1 and each.element is None for each in found):
            said.append(
                f"at {ranks} ranks every loss differs before the first update: the job's model, batch or loss seems to "
                f"depend on the rank or process, not on (step, index) alone"
            )
    return said


def _show(question: Question, cells: list[Cell], said: list[str]) -> None:
    steps, batches = screen.many(question.steps, "step"), screen.many(question.accumulate, "micro-batch", "es")
    counted = f"{steps} of {batches} per rank, {question.precision}"
    counted += ", gradients sent in 8 bits" * (question.reduce == "int8")
    clip = "" if question.clip is None else f", clipped at {question.clip}"
    early = ", the optimizer in backward" if question.optimizer_in_backward else ""
    screen.say(f"\n[bold]{escape(question.job)}[/bold]: {counted}{clip}{early}\n")
    columns = [screen.ranks_text(ranks) for ranks in question.ranks]
    tiers = ["tier"] if question.tiers else []
    rows = {configuration.over for configuration in question.rows()}
    copies = ["replicas"] if question.replicas != (1,) or question.hosts != (1,) else []
    over = ["optimizer over"] if rows != {"team"} else []
    table = Table(
        *copies, *over, "stage", "bucket MiB", "overlap", *tiers, *columns, box=None, pad_edge=False, header_style="dim"
    )
    found = {(cell.ranks, cell.configuration._replace(plain=0)): cell for cell in cells}
    for configuration in question.rows():
        stage, bucket, overlap = configuration[:3]
        rests = [configuration.tier] if question.tiers else []
        count = [str(configuration.replicas)] if copies else []
        count += [configuration.over] if over else []
        row = [found.get((ranks, configuration)) for ranks in question.ranks]
        cells_text = [_cell_text(cell) if cell else "" for cell in row]
        table.add_row(*count, str(stage), bucket, "on" if overlap else "off", *rests, *cells_text)
    elastic = {cell.ranks: cell for cell in cells if cell.configuration.plain != cell.ranks}
    if elastic and question.elastic:
        row_text = [_cell_text(elastic[ranks]) if ranks in elastic else "" for ranks in question.ranks]
        row_text[question.ranks.index(question.elastic)] = "[dim]the reference[/dim]"
        table.add_section()
        table.add_row(*[""] * len(copies + over), "elastic", "", "", *([""] if question.tiers else []), *row_text)
    screen.console.print(table, width=WIDEST, crop=False, no_wrap=True)
    screen.say("")
    for note in said:
        screen.say(f"[dim]{escape(note)}[/dim]")
    alike: dict[tuple[int, Difference], list[Configuration]] = {}
    for cell in cells:
        if cell.difference:
            alike.setdefault((cell.ranks, cell.difference), []).append(cell.configuration)
    for (ranks, difference), configurations in alike.items():
        more = f" (and {len(configurations) - 1} more)" if len(configurations) > 1 else ""
        where = f"{screen.ranks_text(ranks)}, {configurations[0]}{more}"
        screen.say(escape(f"{where}: {difference.place}: {difference.values}"))
    counts = Counter(cell.result for cell in cells)
    if set(counts) == {"equal"}:
        screen.say(f"[bold green]all {len(cells)} are equal, bit for bit[/bold green]")
    else:
        screen.say("[bold red]" + ", ".join(f"{count} {result}" for result, count in counts.items()) + "[/bold red]")


def _cell_text(cell: Cell) -> str:
    return f"[green]{cell.text}[/green]" if cell.result == "equal" else f"[red]{escape(cell.text)}[/red]"


def _report_the_job_itself(
    question: Question, difference: Difference, as_json: bool, told: list[dict[str, Any]] | None
) -> int:
    """Report that two plain runs differ, so that no comparison with a third would mean anything."""
    place = difference.place.rpartition(", rank")[0]  # there is only one process
    note = (
        f"the job does not repeat itself: two runs without zeroshard differ at {place}: {difference.values}; "
        f"make model, batch and loss depend on nothing but (step, index) and the generators of torch, numpy and random"
    )
    if as_json:
        _tell(_record(question, [], [note]), told)
    else:
        screen.say(escape(note))
    return launch.FAILED


def _record(question: Question, cells: list[Cell], said: list[str]) -> dict[str, Any]:
    """Make the one object of `--json`."""
    return {
        "job": question.job,
        "equal": bool(cells) and all(cell.result == "equal" for cell in cells),
        "settings": asdict(question),
        "notes": said,
        "results": [
            {
                "ranks": cell.ranks,
                "reference": question.reference(cell.ranks),
                **{k: v for k, v in cell.configuration._asdict().items() if k != "plain"},
                "result": cell.result,
                "difference": None if cell.difference is None else cell.difference._asdict(),
            }
            for cell in cells
        ],
    }
