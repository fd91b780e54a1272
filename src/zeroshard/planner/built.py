"""Bytes that a built engine will hold on this rank, as `zero.ledger()` counts them after an optimizer step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..events import DEVICE, NVME
from ..layout.partition import BucketPlan, Slot
from ..layout.states import Resting, resting
from .optimizers import Shown, asked_with, probe
from .states import Holding, Kept, Seats, Tiers

if TYPE_CHECKING:
    from ..api import Zero


def predict_tiers(zero: Zero) -> Tiers:
    """Predict {tier: {state: bytes}} once the optimizer has stepped, as `zero.ledger().tiers` counts them."""
    return holding(zero).tiers()


def predict_states(zero: Zero) -> dict[str, int]:
    """Predict {state: bytes} of all tiers together, as `zero.ledger().held` counts them."""
    return holding(zero).states()


def rows(zero: Zero) -> int:
    """Return the rows of the mesh of ranks: replicas, or hosts."""
    return zero.replicas * zero.hosts


def holding(zero: Zero, *, beside: bool | None = None) -> Holding:
    """Return the `Holding` of this rank once the optimizer has stepped. beside: does the model train on an accelerator,
    beside which host memory is another tier? None: if it is on one."""
    from ..arithmetic.fp8 import grids
    from ..engine.step.fragment import file_name

    precision = zero._engine.precision

    def rests(bucket: BucketPlan) -> Resting:
        scales = sum(tiles.number for tiles in grids(bucket, precision.scaling)) if bucket.fp8 else 0
        return resting(
            bucket, precision.formats(bucket), zero.placements, zero._engine.resting[bucket.index],
            one_memory=zero._engine.device.type == "cpu", accumulated=not zero._engine.asked.in_backward,
            averaged=zero._engine.moving is not None, scales=scales,
        )  # fmt: skip

    beside = zero._engine.device.type != "cpu" if beside is None else beside
    offload = zero._engine.offload.stepping(accelerator=beside, split=precision.split_master)
    there = beside and offload.stepped_there
    members: dict[tuple[int, str], int] = {}
    groups: list[tuple[Any, dict[str, Any]]] = []
    numbers: dict[int, int] = {}  # by the optimizer's id
    for optimizer, group, places in zero._engine.optimizer_members():
        numbers.setdefault(id(optimizer), len(numbers))
        groups.append((optimizer, group))
        members.update({(bucket.index, slot.name): len(groups) - 1 for bucket, slot in places})
    probed: dict[tuple[int, Any, tuple[int, ...]], dict[str, Shown]] = {}

    def kept(bucket: BucketPlan, slot: Slot) -> Kept:
        if (bucket.index, slot.name) not in members:
            return {}
        number = members[bucket.index, slot.name]
        optimizer, group = groups[number]
        key = number, precision.stepped(zero._engine.formats(bucket).master), asked_with(optimizer, slot.together)
        if key not in probed:
            probed[key] = probe(optimizer, group, key[1], key[2])
        rests_as = precision.of_bucket(bucket).state
        found = {state: each.at_rest(rests_as(state)).kept(slot.together) for state, each in probed[key].items()}
        number = numbers[id(optimizer)]
        at = zero._engine.resting[bucket.index]["optimizer"]
        if at == NVME or (there and at != DEVICE) or narrow(bucket):
            return {file_name(state, number) if each[1] == 1 else state: each for state, each in found.items()}
        return found

    def narrow(bucket: BucketPlan) -> bool:
        return precision.of_bucket(bucket).decodes(precision.formats(bucket).master)

    seats, resting_in = Seats(zero._engine.group.team.seat, zero._engine.group.axis_team.seat), zero._engine.resting
    return Holding(zero.partition, zero.placements, seats, rests, kept, resting_in, there=there, narrow=narrow)
