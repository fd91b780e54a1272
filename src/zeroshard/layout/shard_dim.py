"""Runs of elements, and how a tensor that is cut on any dimension lies in them. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Elements(NamedTuple):
    """[start, stop) of a slot, in the slot's own flat coordinates: a fragment, as arithmetic."""

    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


class Strips(NamedTuple):
    """The layout of a tensor's parts, if it is cut on one dimension: each row of the whole has one run of each part.

    Elements are counted flat: part by part, as parts hold them, or row by row, as the whole tensor does.
    """

    rows: int
    run: int
    parts: int

    @classmethod
    def of(cls, shape: Sequence[int], cut: int, parts: int) -> Strips:
        """Return the strips of a tensor that is cut on dimension `cut` into equal parts. shape: of the whole.

        Cut on its first dimension a tensor is one row, and both ways of counting are the same.
        """
        rows = math.prod(shape[:cut])
        return cls(rows, math.prod(shape[cut:]) // parts, parts) if rows != 1 and parts > 1 else ONE_STRIP

    def rows_of(self, start: int, stop: int) -> Iterator[Elements]:
        """Yield elements [start, stop), counted part by part, as runs counted row by row."""
        while start < stop:
            part, rest = divmod(start, self.rows * self.run)
            row, at = divmod(rest, self.run)
            numel = min(self.run - at, stop - start) if self.parts > 1 else stop - start
            first = (row * self.parts + part) * self.run + at if self.parts > 1 else start
            yield Elements(first, first + numel)
            start += numel

    def parts_of(self, start: int, stop: int) -> Iterator[Elements]:
        """Yield elements [start, stop), counted row by row, as runs counted part by part."""
        other = self._replace(rows=self.parts, parts=self.rows) if self.parts > 1 else self
        return other.rows_of(start, stop)


ONE_STRIP = Strips(1, 1, 1)


class Among(NamedTuple):
    """A tensor whose parts several teams have, as one of them sees it.

    shape: of the whole tensor. offset: the element at which the team's part begins, counted part by part.
    """

    shape: tuple[int, ...]
    offset: int
    strips: Strips

    def element(self, at: int) -> int:
        """Return the flat index of the part's element `at`, counted row by row."""
        return next(self.strips.rows_of(self.offset + at, self.offset + at + 1)).start
