"""The closed form: bytes that a rank holds at rest, from three numbers and a recipe. Needs neither torch nor a model.

    state         bytes per parameter, one rank holds
    replicated    b * P
    sharded       b * ceil(P / N): one flat vector, padded to a multiple of the ranks N, cut evenly

With K replicas a team has N/K ranks, and what is sharded over all of them is a Kth of each team's shard, rounded up.

Rule of padding: every rank reserves ceil(P / N) elements of whatever is sharded, and what no parameter fills lies at
the end, on the last rank. So it is the last rank that is shown, with padding as a row of its own; totals are equal on
all ranks. Which states are sharded is read from `stage.STAGES`.
"""

from __future__ import annotations

import math

from ..layout.stage import Degree, Placements
from .recipes import PADDING, Recipe


def share(numel: int, ranks: int) -> int:
    """Return the elements each rank reserves of a vector that is padded to a multiple of the ranks."""
    return -(-numel // ranks)


def reserves(numel: int, ranks: int, replicas: int = 1) -> dict[Degree, tuple[int, int]]:
    """Return (elements each rank reserves of a state, those that parameters fill on the last rank), by its degree.

    ranks: of each replica.
    """
    team = share(numel, ranks)
    own = max(numel - (ranks - 1) * team, 0)
    part = share(team, replicas)
    return {
        Degree.RANK: (numel, numel),
        Degree.TEAM: (team, own),
        Degree.ALL: (part, max(own - (replicas - 1) * part, 0)),
    }


def at_rest(numel: int, ranks: int, placements: Placements, recipe: Recipe, replicas: int = 1) -> dict[str, int]:
    """Return {state: bytes} of the last rank, which has the padding; all ranks' sums are equal. ranks: per replica."""
    each = reserves(numel, ranks, replicas)
    held: dict[str, int] = {}
    padding = 0
    for state, nbytes, degree in recipe.states(placements):
        reserved, filled = each[degree]
        held[state] = math.ceil(filled * nbytes)
        padding += math.ceil(reserved * nbytes) - held[state]
    if padding:
        held[PADDING] = padding
    return held


def total(numel: int, ranks: int, placements: Placements, recipe: Recipe, replicas: int = 1) -> int:
    """Return the bytes that every rank holds at rest."""
    return sum(at_rest(numel, ranks, placements, recipe, replicas).values())


def largest(ranks: int, placements: Placements, recipe: Recipe, limit: int, replicas: int = 1) -> int:
    """Return the most parameters whose states fit into `limit` bytes per rank at rest (0: none)."""
    each = sum(nbytes for _, nbytes, _ in recipe.states(placements))
    if not each:
        return 0
    low, high = 0, math.ceil(limit * ranks * replicas / each) + ranks * replicas
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if total(middle, ranks, placements, recipe, replicas) <= limit else (low, middle - 1)
    return low
