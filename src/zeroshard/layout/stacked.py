"""Fused weights: which matrices a parameter's rows stack, as `Layout.matrices` says. Imports no torch.

An optimizer of whole tensors, such as Muon, updates a query, a key and a value otherwise than the matrix of all three.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ..errors import UserError
from .partition import Named, matching

if TYPE_CHECKING:
    from ..policies.layout import Layout


def stacked(parameters: Named, layout: Layout) -> dict[str, tuple[int, ...]]:
    """Return {name: shape of each of its stacked matrices}, for the parameters that `Layout.matrices` names.

    parameters: {name: (all of its names, shape)}. Raises `UserError` for patterns that match nothing, and for rows that
    are no such number of matrices.
    """
    names = {name: others for name, (others, _) in parameters.items()}
    found: dict[str, tuple[int, ...]] = {}
    for pattern, count in layout.matrices.items():
        for name in matching(names, [pattern], "Layout.matrices"):
            shape = parameters[name][1]
            dims, rows = (3, 1) if count == "first" else (2, int(count))
            if len(shape) != dims or not math.prod(shape) or shape[0] % rows:
                raise UserError(
                    "the rows of a parameter are not so many equal matrices",
                    where=f"parameter {name!r}, Layout(matrices={{{pattern!r}: {count!r}}})",
                    expected="three dimensions" if count == "first" else f"two dimensions, rows in {rows} parts",
                    got=f"shape {shape}",
                    instead="a pattern that leaves it out, or another number",
                )
            matrix = shape[1:] if count == "first" else (shape[0] // rows, *shape[1:])
            if found.setdefault(name, matrix) != matrix:
                raise UserError(
                    "two patterns say otherwise how many matrices a parameter stacks",
                    where=f"parameter {name!r}, Layout(matrices={{{pattern!r}: {count!r}}})",
                    got=f"matrices of {found[name]} and of {matrix}",
                    instead="one pattern for it",
                )
    return found
