"""Which tests run when. Every test is in one set; plain `pytest`, and a test named on the command line, know no sets.

    make test   every test function, with every value of every parameter at least once
    make full   the other combinations of their parameters, and what is marked `full` by hand
    make slow   what is marked `slow` by hand

A grid of four stages and four worlds has sixteen tests, of which `make test` runs four: each stage once and each world once. Which
stage meets which world differs between functions, and never between runs.
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import pytest

Case = Mapping[str, Hashable]  # a test's parameters: name -> value
COLLECTED = pytest.StashKey[list[Any]]()  # all tests, before pytest leaves any out
FEW = 2  # ranks: fewer share nothing, more cost more
RANKS = ("world", "ranks")  # names of parameters that are a number of ranks


def cover(cases: Sequence[Case], name: str) -> list[int]:
    """Which of a function's `cases` hold every value of every parameter, as few as a greedy choice finds, with few ranks."""
    cases = [{key: repr(value) for key, value in case.items()} for case in cases]
    order = list(range(len(cases)))
    random.Random(name).shuffle(order)
    cost = [sum(abs(int(case[key]) - FEW) for key in RANKS if case.get(key, "").isdigit()) for case in cases]
    order.sort(key=cost.__getitem__)
    missing = {item for case in cases for item in case.items()}
    chosen = []
    while missing or not chosen:
        best = max(order, key=lambda at: len(missing & cases[at].items()))  # the first of equals
        chosen.append(best)
        missing -= cases[best].items()
    return sorted(chosen)


def function(item: Any) -> str:
    """The name of its function: the test's without its parameters."""
    return item.nodeid.partition("[")[0]


def by_hand(item: Any) -> bool:
    return any(item.get_closest_marker(mark) for mark in ("full", "slow"))


def mark(items: Sequence[Any]) -> None:
    """Mark `full` what `make test` leaves out of a grid. Of the items that were collected: a test asked for by name stays."""
    grids: dict[str, list[Any]] = {}
    for item in items:
        if not by_hand(item) and hasattr(item, "callspec"):
            grids.setdefault(function(item), []).append(item)
    for name, grid in grids.items():
        kept = set(cover([item.callspec.params for item in grid], name))
        for at, item in enumerate(grid):
            if at not in kept:
                item.add_marker(pytest.mark.full)
