"""Parameters of which each rank holds only some rows, such as experts: `Layout.along`.

The ranks along one axis of a mesh hold the same rows: they are the team that shards these rows (`comm/mesh.py`).
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..engine.build.supported_optimizers import in_blocks
from ..engine.step.fragment import updated
from ..engine.weights.unit import Managed, matching
from ..errors import UserError
from ..hooks import Feature
from ..policies.layout import Layout

if TYPE_CHECKING:
    from ..engine.build.assembly import Assembly


def parameters_along(managed: Sequence[Managed], layout: Layout) -> set[str]:
    """Return the names of the parameters that `Layout.along` shards along its axis, or refuse one that cannot be."""
    found = matching([*managed], [*layout.along], "Layout.along")
    for record in (record for record in managed if record.name in found):
        of = f"parameter {record.name!r}"
        others = [n for n in record.names if not any(fnmatch.fnmatchcase(n, pattern) for pattern in layout.along)]
        if others:
            raise UserError(
                "a parameter is sharded along an axis under one of its names, and not under another",
                where=of,
                got=f"{others} too",
                instead="patterns in Layout.along that match all of its names, or none",
            )
        if not record.param.dim():
            raise UserError(
                "a parameter along an axis is some rows of a tensor, and this one has no rows",
                where=of,
                expected="one dimension or more, of which the first counts over all ranks",
                got="a single number",
                instead=f"torch.zeros(1) in place of it, or a pattern in Layout.along that leaves {record.name!r} out",
            )
        if record.param.is_meta:
            raise UserError(
                "a parameter along an axis is on meta, where every rank would get the same first values",
                where=of,
                expected="this rank's rows of the tensor",
                got="no values",
                instead="make these parameters on a real device, from the rows that are this rank's",
            )
    return found


def check_rows(optimizer: Any, rows: Sequence[tuple[str, int]]) -> None:
    """Refuse, by name, an optimizer that updates more elements together than a rank has.

    rows: names and elements of the parameters of which a rank has some rows.
    """
    parted = [name for name, numel in rows if not in_blocks(optimizer, numel)]
    if parted:
        raise UserError(
            "this optimizer works on whole tensors or blocks, and of this one a rank has some rows only",
            where=f"{type(optimizer).__name__}, parameter {parted[0]!r} in Layout.along",
            instead="another optimizer for it, beside this one for the others: shard(model, [muon, adamw]); or, if "
            "a rank's rows are whole matrices, Layout(matrices={name: how many})",
        )


class ExpertsFeature(Feature):
    name = "experts"
    page = "meshes.md"

    def axes(self, managed: Sequence[Managed], layout: Layout) -> dict[str, str]:
        return dict.fromkeys(parameters_along(managed, layout), layout.axis)

    def check(self, assembly: Assembly, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Refuse optimizers that need more of a tensor than a rank's rows."""
        if assembly.group.axis_team.seat.parts == 1:
            return
        numel = {
            slot.name: slot.numel
            for each in assembly.partition.buckets
            if each.axis
            for slot in each.slots
            if not slot.matrix and slot.cut is None  # `check_parts` checks the others
        }
        names = {id(record.param): record.name for record in assembly.managed}
        for optimizer in optimizers:
            trained = [names.get(id(param), "") for param in updated(optimizer)]
            check_rows(optimizer, [(name, numel[name]) for name in trained if name in numel])


FEATURE = ExpertsFeature()
