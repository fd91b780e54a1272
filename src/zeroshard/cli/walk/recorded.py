"""The last recorded step of a run: what each unit held, what moved, where the peak was."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.markup import escape

from zeroshard.cli import screen

from .pieces import bytes_by_state, heading, prose, say, show

BAR = 52  # characters at most
UNITS_SHOWN = 24
NORMS = (
    "norms: the map from elements to parameters, for the norm of gradients. It is made when that norm is first asked "
    "for and stays; the prediction does not have it."
)

SHARED = ": ranks of one host send no data, and read the others' parts of the logical bytes where they lie"


def run(of: dict[str, Any]) -> None:
    """Print which rank holds what, where the peak comes from, and what the step waited for."""
    heading(of["title"])
    table = screen.new_table("Bytes per rank at rest", "rank", "state", "predicted", "held", "most")
    for one in of["summary"][: screen.RANKS_SHOWN]:
        predicted = one["predicted"] or {}
        for at, state in enumerate(dict.fromkeys([*predicted, *one["held"]])):
            cells = (predicted.get(state), one["held"].get(state, 0), one["most"].get(state, 0))
            table.add_row("" if at else f"{one['rank']}", state, *("" if n is None else f"{n:,}" for n in cells))
        table.add_section()
    if len(of["summary"]) > screen.RANKS_SHOWN:
        table.caption = f"and {len(of['summary']) - screen.RANKS_SHOWN} more ranks"
    show(table)
    for one in of["summary"][: screen.RANKS_SHOWN]:
        if set(one["tiers"]) != {"device"}:
            shares = ", ".join(f"{tier} {sum(held.values()):,}" for tier, held in one["tiers"].items())
            say(f"  rank {one['rank']}, by tier: {shares}", markup=False)
    if any("norms" in one["held"] for one in of["summary"]):
        prose(NORMS, 2)
    _units(of)
    recording = of["recording"]
    if recording is None:
        say("\nNo step was recorded: zero.record() before the steps, on every rank")
    else:
        _step(recording, of["layout"]["units"])
        _exchanged(of)
    if of["curves"]:
        _curve(of["curves"])


def _units(of: dict[str, Any]) -> None:
    layout = of["layout"]
    numel = [0] * len(layout["units"])
    tensors = [0] * len(layout["units"])
    for bucket in layout["buckets"]:
        for _, shape, _ in layout["slots"][bucket["first"] : bucket["last"]]:
            numel[bucket["unit"]] += math.prod(shape)
            tensors[bucket["unit"]] += 1
    table = screen.new_table("Units, the largest first", "unit", "tensors", "elements", "share")
    order = sorted((unit for unit, count in enumerate(tensors) if count), key=lambda unit: -numel[unit])
    for unit in order[:UNITS_SHOWN]:
        name = escape(layout["units"][unit]) or "(root)"
        table.add_row(name, f"{tensors[unit]:,}", f"{numel[unit]:,}", f"{100 * numel[unit] / of['numel']:.1f} %")
    if len(order) > UNITS_SHOWN:
        table.caption = f"and {len(order) - UNITS_SHOWN} more"
    show(table)


def _step(recording: dict[str, Any], units: Sequence[str]) -> None:
    for rank in recording["ranks"][: screen.RANKS_SHOWN]:
        took = (rank["span"][1] - rank["span"][0]) / 1e6
        waited = rank["waited"] / 1e6
        say(
            f"\n[bold]The recorded step on rank {rank['rank']}[/bold]: {took:.1f} ms, of which it stood still for "
            f"{waited:.1f} ms ({100 * waited / took if took else 0:.0f} %)"
        )
        for at, (name, start, end) in enumerate(rank["phases"]):
            around = [
                other for n, (other, first, last) in enumerate(rank["phases"]) if n != at and first <= start < last
            ]
            inside = f", in the time of {around[-1]}" if around else ""
            say(f"  {name:<9} {(end - start) / 1e6:8.1f} ms{inside}", markup=False)
        for line in _peak(rank["peak"]) if rank["peak"] else ():
            say(f"  {line}", markup=False)
        _longest(recording, rank, units)
    if recording["note"]:
        say(f"  [dim]{escape(recording['note'])}[/dim]")


def _exchanged(of: dict[str, Any]) -> None:
    """Print what rank 0 exchanged with other ranks in the step, and how."""
    table = screen.new_table("What the step exchanged, rank 0", "verb", "calls", "logical", "sent", "sent + received")
    for row in of["traffic"]:
        columns = ("calls", "logical", "sent", "sent_and_received")
        table.add_row(row["verb"], *(f"{row[column]:,}" for column in columns))
    if of["traffic"]:
        show(table)
        how = f"  by {of['facts'].get('backend', 'messages')}"
        say(how + (SHARED if "shared memory" in how else ""), markup=False)


def _peak(peak: Mapping[str, Any]) -> Iterable[str]:
    """Yield lines on where the device held most, which of it is always there, and why the rest was."""
    yield f"the device holds most {peak['where']}: {peak['total']:,} bytes"
    if peak["rests"]:
        yield f"  {sum(peak['rests'].values()):,} there all the time: {bytes_by_state(peak['rests'])}"
    for state, why in peak["why"].items():
        yield f"  {peak['held'][state] - peak['rests'].get(state, 0):,} {state}: {why}"


def _longest(recording: dict[str, Any], rank: dict[str, Any], units: Sequence[str]) -> None:
    """Print the messages that the rank stood still for, longest first."""
    waiting = sorted((move for move in rank["moves"] if move[9]), key=lambda move: -move[9])[:5]
    for move in waiting:
        what = f"{recording['verbs'][move[0]]} {recording['states'][move[1]]}".strip()
        of = f" of {units[move[3]] or 'the root'}" if move[3] >= 0 else ""
        what = "the other ranks to agree" if what == "control" else f"{what}{of}, {move[4]:,} bytes"
        say(f"  waited {move[9] / 1e6:7.2f} ms for {what}", markup=False)


def _curve(curves: dict[str, Any]) -> None:
    if not curves["rows"]:
        return
    table = screen.new_table("First and last steps", *curves["columns"])
    rows = curves["rows"]
    for row in rows if len(rows) <= 6 else [*rows[:3], *rows[-3:]]:
        table.add_row(*("" if value is None else f"{value:g}" for value in row))
    show(table)
