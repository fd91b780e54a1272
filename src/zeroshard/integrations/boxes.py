"""A flat interval of a tensor as boxes of its shape, which is how other formats read and write parts of tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Box(NamedTuple):
    """Elements [start, stop) of a flat tensor that are a box of its shape."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    stop: int


def boxes(shape: Sequence[int], start: int, stop: int, first: int = 0) -> Iterator[Box]:
    """Yield the fewest boxes that are elements [start, stop) of a tensor of that shape: at most 2 * dimensions - 1.

    first: the index of the tensor's first element in a tensor that it is a slice of.
    """
    if start >= stop:
        return
    if not shape:
        yield Box((), (), first, first + 1)
        return
    row = math.prod(shape[1:])
    while start < stop:
        at, skip = divmod(start, row)
        rows = 0 if skip else (stop - start) // row
        if rows:
            yield Box((at, *(0 for _ in shape[1:])), (rows, *shape[1:]), first + start, first + start + rows * row)
            start += rows * row
        else:
            end = min(stop, (at + 1) * row)
            for inner in boxes(shape[1:], skip, end - at * row, first + at * row):
                yield inner._replace(offsets=(at, *inner.offsets), sizes=(1, *inner.sizes))
            start = end
