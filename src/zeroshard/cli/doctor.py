"""`zeroshard doctor`: this machine's facts, and which claims hold on it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.markup import escape

import zeroshard
from zeroshard.cli import machine, screen
from zeroshard.cli.claims import FAILS, HOLDS, UNTRIED, Claim, claims
from zeroshard.cli.config import InputError, Launch
from zeroshard.errors import visible

FORMAT = "zeroshard doctor 1"
COLOURS = {HOLDS: "green", UNTRIED: "yellow", FAILS: "bold red"}


def doctor(folder: str, *, as_json: bool) -> int:
    """Print facts and claims; return 1 if a claim fails. Raises `InputError` for a folder that takes no files."""
    if Launch.from_environment():
        raise InputError("doctor looks at one machine, in one process; run it without torchrun")
    place = Path(folder or tempfile.gettempdir())
    try:
        tempfile.TemporaryDirectory(prefix="zeroshard-doctor-", dir=place).cleanup()
    except OSError as error:
        said = f"{str(place)!r} takes no files: {error.strerror}; name a folder on the disk that files would go to"
        raise InputError(said) from error
    found, tried = machine.facts(place), claims(place)
    if as_json:
        told = {
            "format": FORMAT,
            "zeroshard": zeroshard.__version__,
            **found,
            "claims": [asdict(each) for each in tried],
        }
        print(json.dumps(told, indent=2))
    else:
        _show(found, tried)
    return int(any(each.verdict == FAILS for each in tried))


def _show(found: dict[str, Any], tried: Sequence[Claim]) -> None:
    facts = {name: escape(visible(words)) for name, words in machine.lines(found)}
    screen.opening(f"This machine, for zeroshard {zeroshard.__version__}", facts)
    if found["accelerators"]["topology"]:
        screen.say(f"\n{escape(visible(found['accelerators']['topology']))}")
    screen.say("\n[bold]What is claimed[/bold]")
    wide = max(map(len, COLOURS))
    for each in tried:
        colour = COLOURS[each.verdict]
        screen.say(f"  [{colour}]{each.verdict:<{wide}}[/{colour}]  {escape(each.claim)}", wide + 4)
        instead = f"; instead: {each.instead}" if each.instead and each.verdict != HOLDS else ""
        screen.say(f"  {'':<{wide}}  [dim]{escape(visible(each.why + instead))}[/dim]", wide + 4)
