"""Everything that a run shows: opening lines, live progress, tables of bytes, on a terminal or in a log."""

from __future__ import annotations

import math
import os
import re
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement, measure_renderables
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from zeroshard.errors import visible
from zeroshard.planner.timeline import TRAVELS

RANKS_SHOWN = 4
FOLD = 80
CURVE, BARS = 32, "▁▂▃▄▅▆▇█"  # of a run's losses
LOG_LINES = 10  # progress lines of a whole run where there is no terminal to draw a bar on

console = Console(highlight=False)
_unwrapped = Console(highlight=False, width=1000)


def nbytes_text(nbytes: float) -> str:
    """Write bytes: `2097152` -> `2.00 MiB`; exact below one KiB."""
    if nbytes < 1024:
        return f"{nbytes:.0f} B"
    power = min(int(math.log2(nbytes)) // 10, 3)
    return f"{nbytes / 1024**power:.2f} {'KMG'[power - 1]}iB"


class Amount:
    """Bytes in one answer: in the unit that suits the largest, or, for a largest of 0, to the last digit."""

    def __init__(self, largest: int) -> None:
        self.power = next((power for power in (3, 2, 1) if largest >= 1000**power), 0)
        letter = " KMG"[self.power].strip()
        self.unit = f"{letter}B" if self.power else "bytes"
        self.units = (self.unit, f"{letter or 'G'}iB")  # of `both`

    def __call__(self, nbytes: int) -> str:
        """Write bytes in the unit: `38.50`; `< 0.01` for what would be 0.00."""
        if not self.power or not nbytes:
            return f"{nbytes:,}"
        text = f"{nbytes / 1000**self.power:,.2f}"
        return "< 0.01" if nbytes and text.strip("-") == "0.00" else text

    def both(self, nbytes: int) -> tuple[str, str]:
        """Write bytes in the unit, and in the like power of 1024."""
        return self(nbytes), f"{nbytes / 1024 ** (self.power or 3):,.2f}"


def shown(told: Any) -> Any:
    """Make texts from a file, in any containers, safe to print: no character of them steers the terminal."""
    if isinstance(told, str):
        return visible(told).replace("\n", "\\n")
    if isinstance(told, Mapping):
        return {shown(key): shown(value) for key, value in told.items()}
    return [shown(each) for each in told] if isinstance(told, (list, tuple)) else told


def many(number: int, word: str, plural: str = "s") -> str:
    return f"{number:,} {word}{plural * (number != 1)}"


def ranks_text(ranks: int) -> str:
    return "1 rank" if ranks == 1 else f"{ranks} ranks"


def columns() -> int | None:
    """Return the width of the terminal, or what COLUMNS says; None for a log, whose lines stay whole for `grep`."""
    return console.width if console.is_terminal or os.environ.get("COLUMNS") else None


def say(line: str, indent: int | None = None) -> None:
    """Print one line; on a terminal wrapped between words, at `indent` (None: as far as the line itself begins)."""
    text, width = Text.from_markup(line), columns()
    for part in text.split("\n", allow_blank=True) or [text]:
        if width is None:
            console.print(part, soft_wrap=True)
        else:
            at = len(part.plain) - len(part.plain.lstrip(" ")) if indent is None else indent
            wrapped(part, width, at)


def wrapped(text: Text, width: int, indent: int) -> None:
    """Print a line, wrapped between words; its lines after the first begin at `indent`. A longer word stays whole."""
    start, before = 0, 0
    breaks: list[int] = []
    for first, last in (word.span() for word in re.finditer(r"\S+", text.plain)):
        if last - start > (width - indent if breaks else width) and before > (start if breaks else indent):
            breaks.append(start := first)
        before = last
    for number, part in enumerate(text.divide(breaks)):
        part.rstrip()
        console.print(Text.assemble(" " * indent, part) if number else part, soft_wrap=True)


def folded(text: str, first: str = "", rest: str | None = None, *, style: str = "") -> None:
    """Print a sentence in lines of at most 80 columns, whatever the terminal. first, rest: what stands before lines."""
    lines = textwrap.wrap(
        text, FOLD, initial_indent=first, subsequent_indent=first if rest is None else rest, break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip
    for line in lines:
        say(f"[{style}]{escape(line)}[/{style}]" if style else escape(line))


def opening(title: str, facts: Mapping[str, str]) -> None:
    say(f"\n[bold]{title}[/bold]")
    told(facts)


def told(facts: Mapping[str, str]) -> None:
    """Print facts, one below the other, their names before them."""
    for name, fact in facts.items():
        say(f"  [dim]{name:<6}[/dim] {fact}", 9)


class Live:
    """Progress of one run: a bar on a terminal, a line now and then elsewhere."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._log_every = max(1, steps // LOG_LINES)
        self._logged = 0
        self._bar = Progress(
            TextColumn("  "),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(compact=True),
            console=console,
            disable=not console.is_terminal,
            refresh_per_second=2,
        )
        self._task = self._bar.add_task("", total=steps, numbers="")

    def __enter__(self) -> Live:
        console.print()
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bar.stop()

    def show(self, done: int, *, loss: float, tokens_per_s: float, held_nbytes: int) -> None:
        numbers = f"loss {loss:.3f}  {tokens_per_s:,.0f} tokens/s  {nbytes_text(held_nbytes)} held"
        self._bar.update(self._task, completed=done, numbers=numbers)
        due = self._logged == 0 or done // self._log_every > self._logged // self._log_every
        if not console.is_terminal and (due or done == self._steps):
            console.print(f"  step {done:>5}/{self._steps}  {numbers}")
            self._logged = done


def ledger(ranks: Sequence[Mapping[str, Any]], steps: int) -> None:
    """Print the tables of bytes and messages, and whether the prediction held; `ranks` as in `ledger.json`."""
    wide(_bytes_table(ranks))
    off = [f"{state} of rank {rank}" for rank, entry in enumerate(ranks) for state in _off(entry)]
    if off:
        say(f"  [bold red]held differs from predicted:[/bold red] {', '.join(off)}")
    else:
        say(f"  [green]held = predicted on {ranks_text(len(ranks))}, to the byte[/green]{_beside(ranks)}")
    wide(_traffic_table(ranks[0]["traffic"], steps))


def closing(
    ranks: Sequence[Mapping[str, Any]],
    steps: int,
    *,
    losses: Sequence[float],
    speed: tuple[float, float],
    weights: Path,
    checkpoint: Path,
    run: Path,
) -> None:
    """Print what a run that has ended was, and the next command; `ranks` as in `ledger.json`.

    losses: of each step. speed: seconds of a step and tokens per second, of the step in the middle.
    """
    held = [sum(entry["held"].get(state, 0) for state in entry["predicted"]) for entry in ranks]
    sent, shared = (
        sum(ranks[0]["traffic"].get(verb, {}).get(how, 0) for verb in TRAVELS) // steps for how in ("sent", "shared")
    )
    read = f"; it read {shared:,} bytes of the others' through shared memory" if shared else ""
    off = [f"{state} of rank {rank}" for rank, entry in enumerate(ranks) for state in _off(entry)]
    verdict = f"[green]held = predicted on {ranks_text(len(ranks))}, to the byte[/green]{_beside(ranks)}"
    if off:
        verdict = f"[bold red]held differs from predicted:[/bold red] {', '.join(off)}"
    say("")
    facts = {
        "loss": f"{losses[0]:.3f} -> {losses[-1]:.3f} in {many(steps, 'step')}  [cyan]{curve(losses)}[/cyan]",
        "speed": f"{speed[0]:.3g} s a step, {speed[1]:,.0f} tokens/s",
        "states": f"{max(held):,} bytes per rank; {verdict}",
        "sent": f"{sent:,} bytes of parameters and gradients per step by rank 0{read}",
        "saved": f"{escape(str(weights))} and {escape(str(checkpoint))}",
        "next": f"[bold]zeroshard explain {escape(shlex.quote(str(run)))}[/bold]",
    }
    told(facts)


def curve(numbers: Sequence[float]) -> str:
    """Draw numbers as a row of bars, each of the mean of its part of them; those that are not finite as gaps."""
    bars = min(CURVE, len(numbers))
    parts = [numbers[len(numbers) * at // bars : len(numbers) * (at + 1) // bars] for at in range(bars)]
    means = [sum(part) / len(part) for part in parts]
    finite = [mean for mean in means if math.isfinite(mean)] or [0.0]
    least, range_ = min(finite), (max(finite) - min(finite)) or 1.0
    heights = [(mean - least) / range_ * (len(BARS) - 1) if math.isfinite(mean) else None for mean in means]
    return "".join(" " if height is None else BARS[round(height)] for height in heights)


def _bytes_table(ranks: Sequence[Mapping[str, Any]]) -> Table:
    """Make the table of what each rank was predicted to hold, holds at rest, and held at its peak."""
    table = new_table("Model state per rank, in bytes", "rank", "state", "predicted", "held", "peak")
    for rank, entry in enumerate(ranks[:RANKS_SHOWN]):
        predicted, held, peak = entry["predicted"], entry["held"], entry["peak"]
        for at, state in enumerate(predicted):
            cells = (predicted[state], held.get(state, 0), peak.get(state, 0))
            table.add_row("" if at else str(rank), state, *(f"{cell:,}" for cell in cells))
        total = sum(predicted.values()), sum(held.get(state, 0) for state in predicted)
        table.add_row("", "[bold]total[/bold]", *(f"[bold]{cell:,}[/bold]" for cell in total), "")
        for state in peak.keys() - predicted.keys():
            kind = "beside these" if held.get(state) else "passing"
            table.add_row("", f"[dim]{state}, {kind}[/dim]", "", f"{held.get(state, 0):,}", f"{peak[state]:,}")
        table.add_section()
    if len(ranks) > RANKS_SHOWN:
        table.caption = f"and {len(ranks) - RANKS_SHOWN} more ranks in ledger.json"
    return table


def _traffic_table(traffic: Mapping[str, Mapping[str, int]], steps: int) -> Table:
    """Make the table of what rank 0 moved in the whole run, by verb."""
    table = new_table("Bytes moved by rank 0", "verb", "calls", "logical", "sent", "sent + received", "sent per step")
    for verb, moved in traffic.items():
        columns = ("calls", "logical", "sent", "sent_and_received")
        table.add_row(verb, *(f"{moved[column]:,}" for column in columns), nbytes_text(moved["sent"] / steps))
    return table


BESIDE = {"lent": "copies that other ranks read in shared memory", "norms": "a map for the norm of gradients"}


def _beside(ranks: Sequence[Mapping[str, Any]]) -> str:
    """Say what ranks hold beside the states of the model, which alone are predicted: buffers, made when needed."""
    more: dict[str, int] = {}
    for entry in ranks:
        for state in entry["held"].keys() - entry["predicted"].keys():
            more[state] = max(more.get(state, 0), entry["held"][state])
    said = [f"{BESIDE.get(state, state)}, up to {nbytes:,} bytes" for state, nbytes in sorted(more.items()) if nbytes]
    return f"; beside parameters, gradients and optimizer: {'; '.join(said)}" if said else ""


def _off(entry: Mapping[str, Any]) -> list[str]:
    predicted, held = entry["predicted"], entry["held"]
    return [state for state, nbytes in predicted.items() if held.get(state, 0) != nbytes]


LEFT = {
    "rank",
    "state",
    "verb",
    "stage",
    "what",
    "line",
    "change",
    "unit",
    "fits",
    "at",
    "name",
    "shape",
    "dtype",
    "a",
    "b",
}  # columns of words


def wide(table: Table) -> None:
    """Print a blank line and a table."""
    console.print()
    show(table)


def show(table: Table) -> None:
    """Print a table, its last column wrapped on a terminal. Where that is not enough, the terminal wraps its rows."""
    last, width, options = table.columns[-1], columns(), _unwrapped.options
    words = measure_renderables(_unwrapped, options, [last.header, *last.cells])
    least = Measurement.get(_unwrapped, options, table).maximum - words.maximum + words.minimum
    (_unwrapped if width is None or least > width else console).print(table)


def new_table(title: str, *columns: str) -> Table:
    """Make a table: words to the left, numbers to the right, no lines around."""
    # Unbroken: Rich would wrap a title at the width of its table.
    unbroken = Text(title, style="bold not italic", no_wrap=True, overflow="ignore")
    table = Table(title=unbroken, title_justify="left", header_style="dim", box=None, pad_edge=False)
    for at, column in enumerate(columns, start=1):
        table.add_column(column, justify="left" if column in LEFT else "right", no_wrap=at < len(columns))
    return table
