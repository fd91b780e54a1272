"""A question to the planner, once its settings are checked."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, Literal, NamedTuple

from ..engine.refused import Settings, gradients_of, refuse
from ..errors import UserError
from ..events import DEVICE
from ..layout import Partition
from ..ranks.comm import Over, Reduce
from ..stage import ALONE, STAGES, STATES, Placements, Seat, placements, seat_along
from . import states
from .disk import Disk
from .recipes import Recipe

if TYPE_CHECKING:
    from ..tiers.tier import Offload


class Asked(NamedTuple):
    """The settings of a plan, checked."""

    ranks: int
    stages: tuple[int, ...]
    recipe: Recipe
    gpu_mem: int | None
    accumulate: int
    no_sync: bool
    replicas: int | None
    units: int | None
    prefetch: int
    gpus_per_node: int | None
    precision: Literal["fp32", "bf16", "bf16-split", "fp32-fp8", "bf16-fp8"]
    grad_dtype: Literal["fp32", "bf16"] | None
    checkpoint: bool
    offload: Offload | None = None
    host_mem: int | None = None
    disk: Disk | None = None
    step_time: float | None = None
    tokens: int | None = None
    experts: str = ""  # a pattern of parameters that are divided among `ep` ranks
    ep: int = 1
    shared: bool = False  # do ranks that shard together read each other's memory?
    over: Over = "team"  # which ranks the optimizer is sharded over, of several replicas
    reduce: Reduce = "ordered"
    by_unit: bool = False  # is a bucket all of a unit, as on accelerators, where nobody has given its size?

    def axes(self, ranks: int) -> dict[str, int]:
        """Return the axes of a mesh of so many ranks, where experts are divided; else {}."""
        return {"edp": ranks // self.ep, "ep": self.ep} if self.experts else {}

    def along(self, rank: int, ranks: int) -> Seat:
        """Return a rank's seat among those that hold the same experts; `ALONE` without experts."""
        return seat_along(rank, self.axes(ranks), "edp") if self.experts else ALONE

    @property
    def once(self) -> bool:
        """Does one copy of the parameters serve all ranks of a host?"""
        return self.offload is not None and self.offload.once

    def spread(self, stage: int) -> bool:
        """Tell whether the optimizer is sharded over all replicas at a stage: never at stage 0."""
        return self.over == "all" and self.copies > 1 and bool(STAGES[stage].optimizer)

    def placements(self, stage: int) -> Placements:
        return placements(stage, spread=self.spread(stage), once=self.once, in_backward=self.recipe.in_backward)

    @property
    def copies(self) -> int:
        return self.replicas or 1

    def resting(self, cut: Partition) -> states.At | None:
        """Return the tier of each state for each bucket; None where all rest on the device."""
        return None if self.offload is None else self.offload.buckets(cut.buckets)

    def shares(self, tier: str) -> dict[str, Fraction]:
        """Return {state: fraction of its bytes in a tier}."""
        if self.offload is None:
            return dict.fromkeys(STATES, Fraction(tier == DEVICE))
        parts = {kind: self.offload.tiers(kind).get(tier, 0.0) for kind in STATES}
        return {kind: Fraction(part).limit_denominator(10**6) for kind, part in parts.items()}


def check_in_backward(accumulate: int, offload: Offload | None, *, no_sync: bool, asked: bool) -> None:
    """Refuse settings that need gradients to outlast backward, where the optimizer in backward is asked for."""
    if not asked:
        return
    if accumulate > 1 or no_sync:
        raise UserError(
            "with the optimizer in backward gradients are used as they come, and nothing is added up",
            got=f"accumulate={accumulate}" + ", no_sync=True" * no_sync,
            instead="accumulate=1, or without optimizer_in_backward",
        )
    if offload is not None:
        refuse(Settings(in_backward=True, once=offload.once, gradients=gradients_of(offload)))
