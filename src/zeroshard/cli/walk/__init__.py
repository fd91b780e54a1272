"""The page's document in the terminal: the walkthroughs, and the last recorded step of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.markup import escape

from zeroshard.cli import screen

from .others import four, layers, overview
from .pieces import heading, prose, say, show
from .recorded import run
from .transformer import find_element, one_stage, transformer

OWN_STEP = "zero.html#transformer?cut=model&step=1&stage=1"  # web/src/lib/route.svelte.ts

__all__ = ["find_element", "run", "walkthroughs"]


def walkthroughs(built_in: dict[str, Any], element: str, stage: int | None = None) -> None:
    """Print all walkthroughs, or one stage. Raises `InputError` where there is no such element or stage."""
    chosen = find_element(built_in["transformer"], element)
    if stage is not None:
        one_stage(built_in["transformer"], stage)
        return
    titles = (
        f"{letter}: {text['title'].removeprefix(f'Text {letter}: ')}" for letter, text in built_in["texts"].items()
    )
    say(f"Five published texts explain ZeRO with numbers, and notes say where one of them slips. {'. '.join(titles)}.")
    say(f"On the page, which `zeroshard explain` writes, the step that A and D print is {OWN_STEP}")
    transformer(built_in["transformer"], *chosen)
    four(built_in["four"])
    layers(built_in["layers"])
    overview(built_in["overview"])
    for letter, text in built_in["texts"].items():
        _tables(letter, text)


def _tables(letter: str, text: Mapping[str, Any]) -> None:
    """Print a text's own numbers beside the recomputed ones, as `zeroshard plan --text` does."""
    heading(f"Text {letter}: {text['title']}")
    for table in text["tables"]:
        shown = screen.new_table(table["title"], "line", "text says", "recomputed", "unit", "")
        for line in table["lines"]:
            value = line["value"]
            told = value if isinstance(value, str) else f"{int(value):,}" if value == int(value) else f"{value:.6g}"
            differs = "" if line["agrees"] else "[red]differs[/red]"
            shown.add_row(escape(line["what"]), line["text_says"] or "-", told, line["unit"], differs)
        show(shown)
    for correction in text["corrections"]:
        prose(f"- {correction}", 2)
