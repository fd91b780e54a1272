"""A question to the planner, once its settings are checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Literal, NamedTuple

from ..events import DEVICE
from ..layout.limits import IN_FLIGHT
from ..layout.partition import UNIT_MIB, Partition
from ..layout.stage import ALONE, STAGES, STATES, Placements, Seat, seat_on
from ..layout.states import TIERS, placements
from ..policies.comm import Comm
from ..policies.layout import Layout
from . import states, transformer
from .disk import Disk
from .recipes import Fractions, Recipe
from .transformer import Body, Held

if TYPE_CHECKING:
    from ..policies.offload import Offload
    from ..policies.precision import Precision


class Asked(NamedTuple):
    """The settings of a plan, checked. Policies that load torch are None where they are as by default."""

    ranks: int
    stages: tuple[int, ...]
    recipe: Recipe
    layout: Layout
    comm: Comm
    precision: Precision | None = None
    offload: Offload | None = None
    gpu_mem: int | None = None
    accumulate: int = 1
    no_sync: bool = False
    units: int | None = None
    gpus_per_node: int | None = None
    host_mem: int | None = None
    disk: Disk | None = None
    step_time: float | None = None
    tokens: int | None = None
    batch: int | None = None
    seq: int | None = None
    gpu: str | None = None
    accelerator: bool = False  # is the device one, so that sums leave it through pinned memory?
    ep: int = 1  # among how many ranks the parameters of `Layout.along` are divided

    def axes(self, ranks: int) -> dict[str, int]:
        """Return the axes of a mesh of so many ranks, where experts are divided; else {}."""
        return {self.layout.axis: ranks // self.ep, "ep": self.ep} if self.experts else {}

    def along(self, rank: int, ranks: int) -> Seat:
        """Return a rank's seat among those that hold the same experts; `ALONE` without experts."""
        return seat_on(rank, self.axes(ranks), self.layout.axis) if self.experts else ALONE

    @property
    def experts(self) -> Mapping[str, str]:
        """Return {name pattern: axis} of parameters that are divided among `ep` ranks."""
        return self.layout.along

    @property
    def tokens_at_once(self) -> int | None:
        """Count the tokens of a micro-batch; None where nobody has told."""
        if self.batch is None and self.seq is None:
            return None
        return (self.batch or transformer.BATCH) * (self.seq or transformer.SEQ)

    def activations(self, body: Body) -> Held:
        """Return what a micro-batch holds of activations."""
        assert self.tokens_at_once is not None
        moved = self.offload is not None and self.offload.activations != "device"
        return body.held(
            self.tokens_at_once, itemsize=float(self.recipe.computed or self.recipe.parameters),
            recompute=bool(self.layout.recompute), moved=moved,
        )  # fmt: skip

    @property
    def once(self) -> bool:
        """Does one copy of the parameters serve all ranks of a host?"""
        return self.offload is not None and self.offload.once

    @property
    def stepped_there(self) -> bool:
        """Are states that rest elsewhere stepped on the device?"""
        told = self.offload
        return told is not None and told.stepping(accelerator=self.accelerator, split=self.recipe.split).stepped_there

    def spread(self, stage: int) -> bool:
        """Tell whether the optimizer is sharded over all replicas, or hosts, at a stage: never at stage 0."""
        over = self.comm.two_levels or self.comm.optimizer == "all"
        return over and self.copies > 1 and bool(STAGES[stage].optimizer)

    def placements(self, stage: int) -> Placements:
        return placements(
            stage, spread=self.spread(stage), once=self.once, in_backward=self.recipe.in_backward,
            hosts=self.comm.two_levels,
        )  # fmt: skip

    @property
    def copies(self) -> int:
        """The rows of the mesh of ranks: replicas, or hosts."""
        return self.comm.rows or 1

    def talk(self, stage: int) -> Comm:
        """Return how a job's ranks talk at a stage: on accelerators by messages, whatever "auto" is elsewhere."""
        over: Literal["team", "all"] = "all" if self.comm.optimizer == "all" and stage else "team"
        accelerators = self.by_unit or self.gpus_per_node is not None or self.gpu_mem is not None
        told = self._reaching.on_accelerators() if accelerators else self.comm
        return replace(told, optimizer=over)

    @property
    def shared(self) -> bool:
        """Do ranks that shard together read each other's memory? Of a number and shapes: only if told to."""
        return self._reaching.wanted == "shared"

    @property
    def _reaching(self) -> Comm:
        """The settings of ranks that reach what rests."""
        return self.comm if self.offload is None else self.offload.reached_by(self.comm)

    @property
    def in_flight(self) -> int:
        """Count the reductions that may be under way: none where each is waited for at once."""
        return IN_FLIGHT if self.comm.overlap else 0

    @property
    def by_unit(self) -> bool:
        """Is a bucket all of a unit, as on accelerators without a given size?"""
        return self.layout.bucket_mib == UNIT_MIB

    @property
    def alone(self) -> Asked:
        """The same question of one replica whose ranks send each other messages directly."""
        return self._replace(comm=replace(self.comm, replicas=None, hosts=None))

    def resting(self, cut: Partition) -> states.At | None:
        """Return the tier of each state for each bucket; None where all rest on the device."""
        return None if self.offload is None else self.offload.buckets(cut.buckets)

    @property
    def fractions(self) -> Fractions:
        """Return {tier: {kind of states: the fraction of its bytes there}}."""
        parts = {kind: {DEVICE: 1.0} if self.offload is None else self.offload.tiers(kind) for kind in STATES}
        return {
            tier: {kind: Fraction(part.get(tier, 0)).limit_denominator(10**6) for kind, part in parts.items()}
            for tier in TIERS
        }
