"""Coordinates of ranks: a grid whose axes have names, and the ranks that lie on one line of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

Piece = TypeVar("Piece")
LONGEST_AXIS = 8  # ranks that meet directly


class Grid(NamedTuple):
    """Ranks on a grid whose axes have names, the slowest first: neighbours on the last axis are neighbours as ranks."""

    axes: tuple[tuple[str, int], ...] = (("shard", 1),)  # names and lengths

    @property
    def ranks(self) -> int:
        return math.prod(length for _, length in self.axes)

    def length(self, axis: str) -> int:
        return dict(self.axes)[axis]

    def stride(self, axis: str) -> int:
        """Return the distance in ranks between two neighbours on an axis."""
        behind = [name for name, _ in self.axes].index(axis) + 1
        return math.prod(length for _, length in self.axes[behind:])

    def coordinate(self, rank: int, axis: str) -> int:
        return rank // self.stride(axis) % self.length(axis)

    def line(self, rank: int, axis: str) -> range:
        """Return the ranks that differ from this one on one axis only, in order."""
        stride, length = self.stride(axis), self.length(axis)
        first = rank - self.coordinate(rank, axis) * stride
        return range(first, first + length * stride, stride)

    def lines(self, axis: str) -> list[range]:
        """Return all lines along an axis, in the order of their first ranks."""
        return [self.line(rank, axis) for rank in range(self.ranks) if not self.coordinate(rank, axis)]

    def in_rank_order(self, axis: str, pieces: Sequence[Sequence[Piece]]) -> list[Piece]:
        """Merge pieces that came along an axis into rank order.

        pieces: for each line, a list by position. Of one line alone it is in order.
        """
        if len(pieces) == 1:
            return [*pieces[0]]
        lines = zip(self.lines(axis), pieces, strict=True)
        found = {rank: piece for line, own in lines for rank, piece in zip(line, own, strict=True)}
        return [found[rank] for rank in sorted(found)]


def axes(ranks: int) -> tuple[int, ...]:
    """Return the axis lengths of a grid of `ranks` ranks, each at most `LONGEST_AXIS` where the factors allow it.

    Along an axis of length f every rank sends f - 1 messages. 1,024 ranks are (8, 8, 8, 2): 22 messages, not 1,023.
    """
    factors: list[int] = []
    left, divisor = ranks, 2
    while left > 1:
        if divisor * divisor > left:
            divisor = left
        while left % divisor == 0:
            factors.append(divisor)
            left //= divisor
        divisor += 1
    lengths: list[int] = []
    for factor in sorted(factors, reverse=True):
        fitting = [at for at, length in enumerate(lengths) if length * factor <= LONGEST_AXIS]
        if fitting:
            lengths[fitting[0]] *= factor
        else:
            lengths.append(factor)
    return tuple(lengths)


def messages(ranks: int) -> int:
    """Return how many messages each rank sends in a meeting of all: one to each of the others on every axis."""
    return sum(length - 1 for length in axes(ranks))
