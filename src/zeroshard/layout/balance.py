"""The owners of what is never cut: whole tensors and matrices are dealt to ranks by the work of updating them."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping

Piece = tuple[str, int]  # of what is never cut: a parameter's name, and a run's number; a whole parameter is run 0


def owners(loads: Mapping[Piece, tuple[int, int]], ranks: int) -> dict[Piece, int]:
    """Assign what is never cut to ranks: the longest work first, each to a rank with least work so far.

    loads: (work, elements) of each piece.
    """
    least = [(0, 0, rank) for rank in range(ranks)]  # (work, elements, rank), as a heap
    found = {}
    for piece in sorted(loads, key=lambda piece: -loads[piece][0]):
        done, held, rank = least[0]
        heapq.heapreplace(least, (done + loads[piece][0], held + loads[piece][1], rank))
        found[piece] = rank
    return found


def work(shape: tuple[int, ...]) -> int:
    """Count the multiplications of one of Muon's Newton-Schulz iterations for a matrix; for a vector, its elements.

    With sides s and l, s the shorter: s*s*l for X X^T, s*s*s for its square, s*s*l for the product with X.
    """
    numel = math.prod(shape)
    if len(shape) < 2 or not numel:
        return numel
    short, long = sorted((shape[0], numel // shape[0]))
    return short * short * (2 * long + short)
