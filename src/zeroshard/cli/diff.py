"""`zeroshard diff`: the first difference of two runs' logs, and of what kind it is."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape

from zeroshard.cli import launch, screen
from zeroshard.cli.config import InputError, one_line
from zeroshard.cli.working import Working
from zeroshard.errors import UserError
from zeroshard.runlog.parting import Parting, part, step_by_step
from zeroshard.runlog.read import Run, read
from zeroshard.runlog.traced import Traced

FOLDED = 8  # steps alike, one after the other, that are one line
FAR = 1 << 23  # ULPs: another power of two


def diff(first: str, second: str, *, as_json: bool) -> int:
    """Print where two runs part; return exit code 0 where they are equal, else 1."""
    try:
        with Working(("comparing logs", None), lines=not as_json):
            runs = [read(Path(folder)) for folder in (first, second)]
            found = part(*runs)
    except UserError as error:
        raise InputError(one_line(error)) from error
    steps = [_steps(run) for run in runs]
    if as_json:
        told = None if found is None else {**found._asdict(), "traced": found.traced and found.traced._asdict()}
        processors = [run.first.processor for run in runs]
        print(
            json.dumps(
                {
                    "equal": found is None,
                    "steps": min(steps),
                    "processors": processors,
                    "closed": [run.closed for run in runs],
                    "first_difference": _finite(told),
                    "step_by_step": step_by_step(*runs),
                },
                indent=2,
                allow_nan=False,
            )
        )
    else:
        _show(runs, found)
    return 0 if found is None else launch.FAILED


def _finite(told: Any) -> Any:
    """Return it with numbers that JSON has not as text."""
    if isinstance(told, float) and not math.isfinite(told):
        return str(told)
    if isinstance(told, dict):
        return {name: _finite(each) for name, each in told.items()}
    return [*map(_finite, told)] if isinstance(told, (list, tuple)) else told


def _steps(run: Run) -> int:
    return sum(step.gradients is not None for step in run.first.steps)


def _show(runs: list[Run], found: Parting | None) -> None:
    for run in runs:
        log = run.first
        facts = [screen.many(_steps(run), "step"), screen.ranks_text(log.ranks), screen.many(len(log.shapes), "tensor")]
        if len({each.first.processor for each in runs}) > 1:
            facts.append(log.processor or "a processor of a kind that was not logged")
        screen.say(f"{escape(screen.shown(run.folder))}  {', '.join(facts)}")
    steps = min(map(_steps, runs))
    for run in (run for run in runs if not run.closed):
        screen.say(
            f"[yellow]not closed[/yellow]: {escape(screen.shown(run.folder))} lacks the weights after its last step. "
            "Write with RunLog(...) as log:, or log.close()"
        )
    _show_steps(step_by_step(*runs))
    if found is None:
        screen.say(f"[bold green]the same bits[/bold green] in all {screen.many(steps, 'step')}")
        return
    where = f"step {found.step}, {found.what}"
    if found.name is not None:
        where += f": {found.name}"
        if found.names > 1:
            where += f", and {screen.many(found.names - 1, 'tensor')} more"
    screen.say(f"[bold red]they part[/bold red] at {escape(where)}")
    if found.values is not None or found.name is not None:
        screen.say(f"  {_values(found)}")
    if found.traced is not None:
        already = "" if found.traced.alike else ", which was given other numbers already"
        screen.say(f"  first call that differs: {escape(screen.shown(found.traced.place))}{already}")
        screen.say(f"    {_values(found.traced)}")
    screen.say(f"  [bold]{escape(found.kind)}[/bold]: {escape(found.says)}")
    screen.say(f"  look at: {escape(found.look)}")


def _show_steps(counts: Sequence[dict[str, int]]) -> None:
    """Print a line for each step: what of it is equal in both runs, and how much is not."""
    table = screen.new_table(
        "Step by step, and the weights that each begins with", "step", "weights", "losses", "gradients"
    )
    at = 0
    while at < len(counts):
        alike = next((next for next in range(at, len(counts)) if counts[next] != counts[at]), len(counts))
        last = alike if alike - at > FOLDED else at + 1
        cells = [f"[red]{count} differ[/red]" if count else "[green]equal[/green]" for count in counts[at].values()]
        steps = f"{at:,} to {last - 1:,}" if last > at + 1 else f"{at:,}" if len(cells) > 1 else "after them"
        table.add_row(steps, *cells, *["-"] * (3 - len(cells)))
        at = last
    screen.show(table)


def _values(found: Parting | Traced) -> str:
    if found.values is None:
        return "in elements that the logs do not have; their digests differ"
    x, y = found.values
    element = f"element {found.element:,}: " if found.element is not None else ""
    ulps = f", {screen.many(found.ulps, 'ULP')} apart" if found.ulps is not None and found.ulps < FAR else ""
    return f"{element}{x!r} and {y!r}{ulps}"
