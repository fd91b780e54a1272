"""The numbers of five published texts on ZeRO, each beside the one that the planner computes.

    A  "ZeRO-1: A Concrete Walkthrough"                    260 parameters on 2 GPUs, 7B on 8
    B  a deep dive into ZeRO-1, with code: zero_optim_toy  K replicas of the optimizer, a profile of 1.34B on 4
    C  an article that implements ZeRO by hand             four weights, 7.5B on 64
    D  "ZeRO-2: A Concrete Walkthrough"                    260 parameters on 2 GPUs, 7B on 8
    E  "ZeRO: Zero Redundancy Optimizer"                   bytes per parameter, 64 GPUs, Offload and Infinity

Where a text differs from arithmetic, its line says so, and a correction says why. A figure that is cited and not
computed says so too.
"""

from __future__ import annotations

from . import a, b, c, d, e
from .lines import Line, Table, Text

__all__ = ["Line", "Table", "Text", "text"]

TEXTS = {"A": a.text, "B": b.text, "C": c.text, "D": d.text, "E": e.text}


def text(letter: str) -> Text:
    """Recompute one of the five texts, "A" to "E"."""
    return TEXTS[letter]()
