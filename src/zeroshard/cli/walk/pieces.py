"""Parts that a walk is printed with: sentences, headings, tables, corrections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from zeroshard.cli import screen

STATES = ("parameters", "gradients", "master", "exp_avg", "exp_avg_sq", "step")  # in this order, then any others


def say(line: str, *, markup: bool = True) -> None:
    screen.say(line if markup else escape(line))


def prose(text: str, indent: int) -> None:
    """Print sentences, wrapped at the terminal's width."""
    screen.console.print(Padding(Text(text, style="dim"), (0, 0, 0, indent), expand=False))


def heading(title: str) -> None:
    screen.console.print()
    screen.console.rule(f"[bold]{escape(title)}[/bold]", align="left")
    screen.console.print()


def show(table: Table) -> None:
    screen.wide(table)


def bytes_by_state(held: Mapping[str, int]) -> str:
    order = [state for state in STATES if state in held]
    return ", ".join(f"{state} {held[state]:,}" for state in dict.fromkeys([*order, *held]))


def corrections(of: dict[str, Any], *places: str) -> None:
    for correction in of["corrections"]:
        if correction["at"] in places:
            say(f"  [yellow]text {correction['text']} says[/yellow] {escape(correction['says'])}")
            prose(correction["right"], 4)
