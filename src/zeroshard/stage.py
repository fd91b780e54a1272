"""The ZeRO stages as data: which of the three model states is split over the ranks.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020), section 5.
Nothing else in the package knows what a stage is; it asks the placement of the state it handles.
"""

from __future__ import annotations

from typing import NamedTuple

from .errors import UserError


class Placements(NamedTuple):
    """For each model state: is it sharded over the ranks (True) or replicated on every rank (False)?"""

    parameters: bool
    gradients: bool
    optimizer: bool


STAGES = {
    0: Placements(parameters=False, gradients=False, optimizer=False),
    1: Placements(parameters=False, gradients=False, optimizer=True),
    2: Placements(parameters=False, gradients=True, optimizer=True),
    3: Placements(parameters=True, gradients=True, optimizer=True),
}


def placements(stage: int) -> Placements:
    """The row of the table. Raises `UserError` for anything but 0, 1, 2, 3."""
    if type(stage) is not int or stage not in STAGES:
        raise UserError("no such ZeRO stage", expected="0, 1, 2 or 3", got=repr(stage), instead="shard(..., stage=3)")
    return STAGES[stage]
