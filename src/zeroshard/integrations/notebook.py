"""What a notebook shows of a ledger and of a plan: one table each, without styles or scripts of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..events import Ledger
    from ..planner.answer import Plan


def of_ledger(ledger: Ledger) -> str:
    held = [
        (tier, state, f"{nbytes:,}")
        for tier, states in ledger.tiers.items()
        for state, nbytes in states.items()
        if nbytes
    ]
    peaks = [("device", f"peak in {phase}", f"{peak.total:,}") for phase, peak in ledger.phases.items()]
    return _table(("tier", "what", "bytes"), held + peaks)


def of_plan(plan: Plan) -> str:
    fits = {True: "fits", False: "too much", None: ""}
    states = dict.fromkeys(state for each in plan.stages for state in each.states)
    rows = [
        (
            f"stage {each.stage}",
            *(f"{each.states.get(state, 0):,}" for state in states),
            f"{each.total:,}",
            fits[each.fits],
        )
        for each in plan.stages
    ]
    return _table(("bytes per rank at rest", *states, "total", ""), rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    return f"<table>{row(head, 'th')}{''.join(row(cells, 'td') for cells in rows)}</table>"
