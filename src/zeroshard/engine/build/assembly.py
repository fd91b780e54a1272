"""From a plain model to its parts on one rank: units, buckets, the tiers that states rest in, buckets of parameters.

Nothing of the model changes before every rank has agreed that it can and will do the same.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...arithmetic.sums import as_bytes, dense, same_bits, write_bytes
from ...comm.agreement import Group
from ...comm.all_or_none import Together
from ...device import asynchronous
from ...errors import PeerError
from ...events import DEVICE, HOST, NVME
from ...hooks import check_present, features, first, present
from ...layout.partition import BucketPlan, Partition, Spec, partition
from ...layout.stacked import stacked
from ...layout.stage import STATES
from ...layout.states import placements, resting
from ...policies.comm import Comm
from ...policies.incompatible import Settings, gradients_of, refuse
from ...policies.layout import Layout
from ...policies.offload import Offload
from ...policies.precision import Precision
from ...tiers.tier import DeviceTier, HostTier, Tier
from ..weights.bucket import Bucket, Place
from ..weights.codec import Plain
from ..weights.guard import SavedTensors
from ..weights.unit import (
    Found,
    Initialiser,
    Managed,
    Unit,
    borrowed,
    check_initialisers,
    find_units,
    managed_parameters,
    matching,
    materialise,
    named_tensors,
)
from .host_steps import warn_of_host_steps, warn_of_slow_steps
from .preflight import (
    OWN,
    agree,
    ask_all,
    check_buffers,
    check_memory,
    check_model,
    check_parameters,
    check_settings,
    check_trained,
    describe,
    givers,
    warn_of_order,
)
from .rollback import Before
from .supported_optimizers import blocks, check_offload, check_optimizers
from .tensor_parallel import TensorParallel, check_tensors, replace_dtensors


@dataclass
class Assembly:
    """The parts of a model that is being sharded, in the order in which they are made."""

    model: nn.Module
    stage: int
    precision: Precision
    offload: Offload
    group: Group
    mesh: Any = None  # of the axis along which tensor parallelism has cut parameters
    asked: Settings = field(default_factory=Settings)
    layout: Layout = field(init=False)
    comm: Comm = field(init=False)
    managed: list[Managed] = field(init=False)
    specs: list[Spec] = field(init=False)  # of the parameters
    partition: Partition = field(init=False)
    seed: int = field(init=False)  # of all random numbers, agreed on
    units: list[Unit] = field(default_factory=list)
    resting: list[dict[str, str]] = field(default_factory=list)  # for each bucket, the tier of each state
    tiers: dict[str, Tier] = field(default_factory=dict)
    buckets: list[Bucket] = field(default_factory=list)
    saved: SavedTensors = field(default_factory=SavedTensors)
    tensors: TensorParallel = field(default_factory=TensorParallel)
    givers: dict[str, int | None] = field(default_factory=dict)  # see `preflight.givers`
    native: bool = False  # does the backend add up gradients?
    own_buffers: bool = False  # does each rank keep buffers of its own?
    kept: dict[str, Any] = field(default_factory=dict)  # what features have made for all buckets together
    told: bool = False  # do all ranks know of an exception that is raised now?

    def __post_init__(self) -> None:
        self.placements = placements(self.stage, **self.asked.placed)
        self.tier = DeviceTier(self.group.device, self.group.ledger)

    def plan(self, optimizers: list[torch.optim.Optimizer], layout: Layout, comm: Comm) -> None:
        """Find units and parameters, lay them out, and make sure that every rank can and will do the same."""
        problem: Exception | None = None
        self.layout, self.comm = layout, comm
        self.native, self.own_buffers = comm.reduce == "native", layout.buffers == "local"
        facts: dict[str, Any] = {}
        found: list[Found] = []
        try:
            refuse(self.asked)
            check_model(self.model)
            check_tensors(self.model, self.mesh, layout, comm)
            if self.mesh is not None:
                self.tensors = replace_dtensors(self.model, optimizers, self.mesh, comm.group.mesh_dim_names[0])
            found = find_units(self.model, layout)
            self.managed = managed_parameters(self.model, found, layout)
            check_parameters(self.managed)
            if self.group.rank == 0:
                warn_of_order(self.managed)
            check_memory(self.model, self.managed)
            check_buffers(self.model)
            replicated, axis_team = not self.placements.optimizer, self.group.axis_team
            block = blocks(self.managed, optimizers, layout, replicated=replicated)
            self.specs = self._specs(layout, block)
            self.partition = partition(self.specs, layout, self.group.team.size, axis_team.size)
            check_settings(self.partition, layout, comm, self.precision)
            over = self.placements.optimizer
            check_optimizers(self.model, self.managed, optimizers, self.partition, block, over, layout)
            check_offload(optimizers, self.offload)
            for feature in features():
                feature.check(self, optimizers)
            names, policies = [unit.name for unit in found], (self.precision, layout, comm, self.offload)
            facts = describe(self.model, self.managed, names, optimizers, policies, self.group.device)
            facts |= self.asked.told
            facts[OWN] = first(each.budgets(self) for each in features())
        except Exception as error:
            problem = error
        told = ask_all(self.group, facts, problem)
        self.told = True
        self.seed = agree(told, problem)
        self.givers = givers(told)
        self.told = False
        for at, (name, modules) in enumerate(found):
            paths, own = zip(*modules, strict=True)
            self.units.append(Unit(at, name, paths, own, recomputed=layout.recomputes(name)))
        for unit, others in zip(self.units, borrowed(found, self.managed), strict=True):
            unit.borrows = [self.units[other] for other in others]
        self.group.progress.units = [self.units[plan.unit].name or "the model" for plan in self.partition.buckets]
        self.told = True  # what is refused now, every rank refuses
        if (
            offload := first(each.offload(self, optimizers, [each[OWN] for each in told]) for each in features())
        ) is not None:
            self.offload = offload
            self.asked = self.asked._replace(gradients=gradients_of(offload), files=offload.in_files)
            check_present(self.asked)
        self.told = False
        asked, accelerator = self.offload, asynchronous(self.group.device)
        there = accelerator and present("features.device_step")
        self.offload = asked.stepping(accelerator=there, split=self.precision.split_master)
        if accelerator and self.group.rank == 0:
            warn_of_host_steps(asked, self.offload)
        warn_of_slow_steps(optimizers, self.offload, self.group.device)

    def _specs(self, layout: Layout, block: dict[str, int]) -> list[Spec]:
        specs, axes = [], first(each.axes(self.managed, layout) for each in features()) or {}
        matching(self.managed, self.precision.keep, "Precision.keep")
        stacks = stacked({r.name: (r.names, tuple(r.param.shape)) for r in self.managed}, layout)
        fp8 = first(each.chosen(self.managed, self.precision) for each in features()) or ()
        for r in self.managed:
            kept = self.precision.keeps(r.names)
            dtype = self.precision.of(kept=kept).param(r.param.dtype)
            cut = self.tensors.cuts.get(id(r.param))
            axis = axes.get(r.name, "") if cut is None else self.tensors.axis
            shape, trainable = tuple(r.param.shape), r.param.requires_grad
            if trainable:
                check_trained(r.name, dtype)
            together = block.get(r.name, 1)
            kind = shape, str(dtype), dtype.itemsize
            specs.append(
                Spec(r.name, *kind, r.unit, trainable, axis, kept, together, cut, r.name in fp8, stacks.get(r.name, ()))
            )
        return specs

    def reserve(self) -> None:
        """Make the tiers, and choose one for each state of each bucket. Raises on every rank if one has no disk for
        files."""
        group = self.group
        self.tiers = {DEVICE: self.tier, HOST: HostTier(group.device, group.ledger)}
        self.resting = self.offload.buckets(self.partition.buckets)
        largest, nbytes = dict.fromkeys(STATES, 0), 0
        for plan, at in zip(self.partition.buckets, self.resting, strict=True):
            formats, seat = self.precision.formats(plan), group.team_of(plan).seat
            rests = resting(plan, formats, self.placements, at, one_memory=group.device.type == "cpu")
            for kind, size in rests.largest(plan, seat, self.placements, at, NVME).items():
                largest[kind] = max(largest[kind], size)
            for row in rests.rows:
                if row.tier == NVME:
                    low, high = plan.held(seat, row.degree)
                    nbytes += row.nbytes(high - low)
        what = "another rank cannot use its Offload.path"
        named = {name for at in self.resting for name in at.values()} | (
            {"activations"} if self.offload.saved_in_files else set()
        )
        for name in sorted(named - {*self.tiers}):
            block = Together(group, lambda told: PeerError(what, got="; ".join(told)), own=True)
            try:
                with block:
                    made = first(each.tier(name, self, largest, nbytes) for each in features())
                    assert made is not None, name  # `check_present` has refused it
                    self.tiers[name] = made
            finally:
                self.told = block.told

    def build(self, init: Callable[[nn.Module], None] | None, before: Before) -> None:
        """Build the buckets unit by unit, so that a model on meta never takes more than its shards and one unit.

        A tensor on meta on some ranks only gets its values from the first rank that has them, all others from rank 0.

        before: is told which tensors are written to, and which old data need no longer be held.
        """
        by_name = {record.name: record for record in self.managed}
        modules = _own_modules(self.units)
        initialise = Initialiser(self.model, init)
        plans = {unit.index: [b for b in self.partition.buckets if b.unit == unit.index] for unit in self.units}
        named = {name: id(each) for name, each in named_tensors(self.model)}
        fresh = {named[name] for name, giver in self.givers.items() if giver is None}
        given = {named[name]: giver for name, giver in self.givers.items() if giver is not None}
        lacking = {id(each) for each in (*self.model.parameters(), *self.model.buffers()) if each.is_meta}
        if fresh:
            check_initialisers([pair for unit in self.units for pair in modules[unit.index]], initialise, fresh)
            state = torch.get_rng_state()
            self.group.broadcast(state)
            torch.set_rng_state(state)
        # A parameter belongs to the unit that registers it first: built in order, no unit meets a half-built parameter.
        for unit in self.units:
            flats, memory = self._memory_for_meta(plans[unit.index], by_name)
            materialise(modules[unit.index], self.group.device, initialise, memory, fresh)
            for module in (module for _, module in modules[unit.index]):
                self._place_buffers(module, before, given, lacking)
            for plan in plans[unit.index]:
                params = [by_name[slot.name].param for slot in plan.slots]
                tiers = {state: self.tiers[name] for state, name in self.resting[plan.index].items()}
                for feature in features():
                    tiers |= feature.tiers(self, plan, tiers)
                align, placed = self.partition.align, self.placements
                codec = first(each.codec(self, plan) for each in features()) or Plain
                where = self.group, self.tier, tiers, self.saved
                bucket = Bucket(plan, params, align, placed, self.precision, *where, codec=codec, native=self.native)
                for index, param in enumerate(params):
                    param._zeroshard = Place(bucket, index)  # type: ignore[attr-defined]
                bucket.adopt(flats.pop(plan.index, None), [given.get(id(param), 0) for param in params])
                bucket.parameters.settle()
                if bucket.resident:
                    for param in params:
                        before.replaced(param)
                unit.buckets.append(bucket)
                self.buckets.append(bucket)
        self.buckets.sort(key=lambda bucket: bucket.plan.index)
        gathered = [bucket.gathered for bucket in self.buckets]
        frozen = gc.get_freeze_count()  # once: it walks all objects
        for each in gathered:
            each.of_model, each.frozen = gathered, frozen

    def _memory_for_meta(
        self, plans: list[BucketPlan], by_name: dict[str, Managed]
    ) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """Return flat storage by bucket, and each parameter's part of it by the parameter's id.

        Parameters on meta are materialised where they will lie, so that a unit does not take its memory twice.
        """
        flats: dict[int, Tensor] = {}
        memory: dict[int, Tensor] = {}
        for plan in plans:
            params = [by_name[slot.name].param for slot in plan.slots]
            if all(param.is_meta for param in params) and len({param.dtype for param in params}) == 1:
                flats[plan.index] = flat = torch.zeros(plan.numel, dtype=params[0].dtype, device=self.group.device)
                for param, slot in zip(params, plan.slots, strict=True):
                    memory[id(param)] = flat[slot.start : slot.stop].view(slot.shape)
        return flats, memory

    def _place_buffers(self, module: nn.Module, before: Before, given: dict[int, int], lacking: set[int]) -> None:
        """Move a module's buffers to the device, and send those of rank 0 to all ranks.

        With `Layout(buffers="local")` each rank keeps its own buffers; only a buffer that was on meta on a rank gets
        its values from another rank. given: by a buffer's id, the rank that sends it, if not rank 0. lacking: the ids
        of the buffers that were on meta on this rank.
        """
        for name, tensor in sorted(module._buffers.items()):  # ranks may have other buffers, but send in one order
            if tensor is not None:
                giver, own = given.get(id(tensor), 0), self.own_buffers and id(tensor) not in lacking
                sends = not self.own_buffers or id(tensor) in given
                module._buffers[name] = tensor = tensor.to(self.group.device)
                if sends and dense(tensor) and tensor.numel():  # the others are alike on all ranks: `describe` compares
                    sent = as_bytes(tensor).clone()
                    self.group.broadcast(sent, giver)
                    if not own and not same_bits(sent, as_bytes(tensor)):
                        before.keep(tensor)
                        write_bytes(tensor, sent)


def _own_modules(units: list[Unit]) -> dict[int, list[tuple[str, nn.Module]]]:
    """Return each unit's own modules: those below it and not below a unit inside it. A shared module counts once."""
    inner = {id(module): unit.index for unit in units for module in unit.modules}
    owned: dict[int, list[tuple[str, nn.Module]]] = {unit.index: [] for unit in units}
    seen: set[int] = set()

    def walk(path: str, module: nn.Module, index: int) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        index = inner.get(id(module), index)
        owned[index].append((path, module))
        for name, child in module.named_children():
            walk(f"{path}.{name}" if path else name, child, index)

    (root,) = units[0].modules
    walk("", root, 0)
    return owned
