"""`zeroshard diff`: the first difference of two runs' logs, and of what kind it is."""

from __future__ import annotations

import json
from pathlib import Path

from rich.markup import escape

from zeroshard.cli import launch, screen
from zeroshard.cli.config import InputError, one_line
from zeroshard.errors import UserError
from zeroshard.runlog.parting import Parting, part
from zeroshard.runlog.read import Run, read

FAR = 1 << 23  # ULPs: another power of two


def diff(first: str, second: str, *, as_json: bool) -> int:
    """Print where two runs part; return exit code 0 where they are equal, else 1."""
    try:
        runs = [read(Path(folder)) for folder in (first, second)]
        found = part(*runs)
    except UserError as error:
        raise InputError(one_line(error)) from error
    steps = [_steps(run) for run in runs]
    if as_json:
        told = None if found is None else found._asdict()
        print(json.dumps({"equal": found is None, "steps": min(steps), "first_difference": told}, indent=2))
    else:
        _show(runs, found)
    return 0 if found is None else launch.FAILED


def _steps(run: Run) -> int:
    return sum(step.gradients is not None for step in run.first.steps)


def _show(runs: list[Run], found: Parting | None) -> None:
    for run in runs:
        log = run.first
        facts = screen.many(_steps(run), "step"), screen.ranks_text(log.ranks), screen.many(len(log.shapes), "tensor")
        screen.say(f"{escape(screen.shown(run.folder))}  {', '.join(facts)}")
    steps = min(map(_steps, runs))
    if found is None:
        screen.say(f"[bold green]the same bits[/bold green] in all {screen.many(steps, 'step')}")
        return
    where = f"step {found.step}, {found.what}"
    if found.name is not None:
        where += f": {found.name}"
        if found.names > 1:
            where += f", and {screen.many(found.names - 1, 'tensor')} more"
    screen.say(f"[bold red]they part[/bold red] at {escape(where)}")
    if found.values is not None:
        x, y = found.values
        element = f"element {found.element:,}: " if found.element is not None else ""
        ulps = f", {found.ulps:,} ULPs apart" if found.ulps is not None and found.ulps < FAR else ""
        screen.say(f"  {element}{x!r} and {y!r}{ulps}")
    elif found.name is not None:
        screen.say("  in elements that the logs do not have; their digests differ")
    screen.say(f"  [bold]{escape(found.kind)}[/bold]: {escape(found.says)}")
    screen.say(f"  look at: {escape(found.look)}")
