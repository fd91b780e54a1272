"""The badge of `zeroshard verify --out`: a picture for a README, of a few hundred bytes, that asks no server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

GREEN, YELLOW, RED, GREY = "#2e7d32", "#9a6700", "#c62828", "#4a4a4a"
WIDTH, MARGIN, HEIGHT = 6.4, 10, 20  # pixels of an average letter at 11 pixels, beside a text, and of the badge


def of_gates(gates: Sequence[Mapping[str, Any]]) -> str:
    """Draw the badge of gates' objects, as `--json` has them: "bits | 4 of 4 gates", or which of them fails."""
    failed = list(dict.fromkeys(gate["name"] for gate in gates if gate["result"] == "fails"))
    held = sum(gate["result"] == "holds" for gate in gates)
    if failed:
        return drawn("bits", f"{failed[0]} fails", RED)
    return drawn("bits", f"{held} of {len(gates)} gates hold", GREEN if held == len(gates) else YELLOW)


def drawn(left: str, right: str, colour: str) -> str:
    """Draw two words beside each other, the second on a colour. Each has `textLength`: as wide in any font."""
    widths = [len(text) * WIDTH for text in (left, right)]
    edge = widths[0] + 2 * MARGIN
    whole = edge + widths[1] + 2 * MARGIN
    says = escape(f"{left}: {right}")
    fit = 'lengthAdjust="spacingAndGlyphs"'
    words = "".join(
        f'<text x="{start + MARGIN:g}" y="14" textLength="{width:g}" {fit}>{escape(text)}</text>'
        for text, start, width in ((left, 0.0, widths[0]), (right, edge, widths[1]))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{whole:g}" height="{HEIGHT}" role="img" aria-label="{says}">'
        f'<title>{says}</title><clipPath id="r"><rect width="{whole:g}" height="{HEIGHT}" rx="3"/></clipPath>'
        f'<g clip-path="url(#r)"><rect width="{edge:g}" height="{HEIGHT}" fill="{GREY}"/>'
        f'<rect x="{edge:g}" width="{whole - edge:g}" height="{HEIGHT}" fill="{colour}"/></g>'
        f'<g fill="#fff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">{words}</g></svg>\n'
    )
