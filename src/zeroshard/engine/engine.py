"""All parts of one sharded model on one rank, and what they do together: before a forward, before a step, on request.

`Engine` puts the parts together. Parts do not call each other directly: each asks the engine, through a protocol of its
own, which it gets when it is made.
"""

from __future__ import annotations

import contextlib
import logging
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from ..comm.agreement import Group
from ..comm.mesh import connect
from ..device import asynchronous, at_the_end
from ..errors import PeerError, StateError, UserError
from ..events import Ledger
from ..finalizers import at_end_of
from ..hooks import answering, check_present, editing, features, first
from ..layout.partition import BucketPlan, Slot
from ..layout.states import Formats, placements
from ..policies.comm import Comm
from ..policies.incompatible import refuse, settings
from ..policies.layout import Layout
from ..policies.offload import Offload
from ..policies.precision import Precision
from ..tiers.tier import give_back_late
from .build.assembly import Assembly
from .build.consistency import Alike, joined
from .build.preflight import Structure, check_trained, refuse_wrapper
from .build.rollback import Before
from .build.supported_optimizers import by_bucket, check_added, check_options, sends
from .build.tensor_parallel import mesh_of
from .gradients.backward import backward_is_running
from .gradients.contribution import Contribution, Division
from .gradients.gradient import Gradients
from .gradients.reduction import Reduction
from .gradients.sums import Delivery
from .step.guarded_state import guard
from .step.optim import Binding
from .step.schedule import Schedule
from .weights.bucket import Bucket, Place, publish
from .weights.codec import Values
from .weights.guard import (
    cover_constructors,
    keep_fast_paths,
    keep_graphs,
    refuse_copy,
    refuse_load,
    refuse_state_dict,
    said_at_shard,
    weak,
)
from .weights.modes import seen, unseen
from .weights.transaction import Transaction
from .weights.unit import Managed, Unit, units_named

log = logging.getLogger("zeroshard")
Batch = TypeVar("Batch")

COMPARING = "comparing replicas"  # a meeting


class Checkpoints(Protocol):
    """What the ranks wait for and compare as they meet for a checkpoint: `checkpoint/meeting.py`."""

    def unfinished(self) -> int:
        """Count this rank's saves that run in the background, and for which nobody has waited yet."""

    def wait(self, group: Group) -> None:
        """Wait for these saves on all ranks."""

    def compare(self, engine: Engine, buckets: Sequence[Bucket]) -> None:
        """Compare what several ranks hold of these buckets."""


class Engine:
    """One sharded model on one rank. Its many names are its parts, and the questions these ask each other."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: list[torch.optim.Optimizer],
        stage: int,
        precision: Precision,
        offload: Offload,
        layout: Layout,
        comm: Comm,
        device: torch.device,
        init: Callable[[nn.Module], None] | None,
        checkpoints: Checkpoints,
        **others: bool,
    ) -> None:
        """others: settings that no policy has, by their names in `Settings`."""
        placements(stage)  # refuses what is no stage
        asked = settings(stage, precision, layout, comm, offload, **others)
        refuse(asked.placing)
        check_present(asked)
        comm = offload.reached_by(comm)
        if owned := [name for name, tensor in model.named_parameters() if hasattr(tensor, "_zeroshard")]:
            raise UserError(
                "this model, or a part of it, is sharded already",
                where=f"parameter {owned[0]!r}",
                instead="shard it once, as a whole: models that share modules as nn.ModuleList([a, b]), with a list of "
                "their optimizers; zero.unshard() makes model and optimizer plain again, in a notebook say",
            )
        self.stage, self.model, self.ledger, self.checkpoints = stage, model, Ledger(), checkpoints
        layout = layout.on(accelerator=asynchronous(device))
        self.precision, self.layout, self.comm, self.device, self.offload = precision, layout, comm, device, offload
        self.ledger.begin("init")
        give_back_late()
        at_end_of(self, at_the_end(device))
        self.group = connect(comm, self.ledger, device, layout.axis, mesh := mesh_of(model, comm))
        self.asked = asked = asked.seated(self.group.team.seat)
        refuse(asked.placing)
        check_present(asked)
        parts = Assembly(model, stage, precision, offload, self.group, mesh, asked)
        before: Before | None = None if mesh is None else Before(model, optimizers)
        try:
            parts.plan(optimizers, layout, comm)
            self.offload, self.asked = parts.offload, parts.asked
            before = before or Before(model, optimizers)
            self._assemble(parts, before, optimizers, init)
            self.ledger.end("init")
            self.group.meet("construction", 1)  # all or none
            for binding in self.bindings:
                guard(binding.optimizer, binding.own)
        except BaseException as error:
            if not parts.told:
                self.group.give_up(error)
            if before is not None:
                before.restore(error)
            raise

    def _assemble(
        self,
        parts: Assembly,
        before: Before,
        optimizers: list[torch.optim.Optimizer],
        init: Callable[[nn.Module], None] | None,
    ) -> None:
        """Change the model and the optimizers; what fails in here is undone."""
        model, comm, precision, team = self.model, self.comm, self.precision, self.group.team
        team.by_levels = first(each.gathers(team) for each in features())
        parts.reserve()
        parts.build(init, before)
        self.partition, self.seed, self.placements = parts.partition, parts.seed, parts.placements
        self.managed, self.units, self.buckets = parts.managed, parts.units, parts.buckets
        self.tier, self.tiers, self.resting, self.tensors = parts.tier, parts.tiers, parts.resting, parts.tensors
        self._furthest = 0  # the most steps of any rank when ranks last met for a checkpoint
        self.moving: Any = None  # the average of its weights, if there is one
        self.batches: Any = None  # its micro-batches, if it gives them out
        self.position: dict[str, int] | None = None  # a loaded one, until batches are made
        self.on_signal: dict[int, Callable[[], object]] = {}  # actions once all ranks have heard of a signal
        self._stepped = 0  # steps completed when a forward that trains last began
        self.gradients = Gradients(self.group, self)
        deliver = first(each.delivery(team) for each in features()) or (lambda *_: Delivery())
        self.reduction = Reduction(self.gradients, self.group, self.tier, comm, deliver)
        for bucket in self.buckets:
            if bucket.plan.trainable:
                self._train(bucket)
        self.sends_always = self.layout.buffers == "always"
        self.schedule = Schedule(self, self.units, self.gradients, self.reduction, parts.saved, comm, precision)
        self.schedule.backward.hook_gradients()
        parts_of_a_step = self.buckets, self.gradients, self.schedule
        self.bindings: list[Binding] = []
        for number, each in enumerate(optimizers):
            watched = self.group.ranks > 1 and bool(self.placements.optimizer) and sends(each)
            alone = by_bucket(each)
            self.bindings.append(Binding(self, each, number, *parts_of_a_step, by_bucket=alone, watched=watched))
        for feature in features():
            feature.ready(self)
            if (subscriber := feature.subscriber(self)) is not None:
                self.reduction.subscribers.append(subscriber)
        self._structure = Structure(model)
        self.comparing = Alike(model, self.managed, self.group, self.layout)
        self._known = self._traits()
        self._guard_modules()
        keep_fast_paths(model)
        keep_graphs(model)
        if self.schedule.releases:
            cover_constructors()
        for binding in self.bindings:
            binding.states.count()
        for bucket in self.buckets:
            if bucket.resident:
                bucket.gathered.note_holders()
        # The hooks hold the engine weakly; the model keeps it alive.
        object.__setattr__(model, "_zeroshard_engine", self)

    def _guard_modules(self) -> None:
        """Refuse what would copy, read or write modules as if all of their weights were here."""
        for module in (module for unit in self.units for module in unit.modules):
            module.__dict__["__reduce_ex__"] = refuse_copy  # deepcopy, pickle and torch.save call it first
            if self.placements.parameters:
                module.register_state_dict_pre_hook(refuse_state_dict)
                module.register_load_state_dict_pre_hook(refuse_load)
            elif self.placements.optimizer:
                module.register_state_dict_pre_hook(weak(self._refuse_mixture))

    def _train(self, bucket: Bucket) -> None:
        """Enter a bucket whose parameters receive gradients."""
        codec = first(each.message(bucket.plan, self.asked) for each in features()) or Values(
            bucket.plan, bucket.reduce_dtype
        )
        division = first(each.division(bucket, self.asked) for each in features()) or Division()
        self.reduction.add(Contribution(self.gradients.add(bucket), self.units[bucket.plan.unit], codec, division))

    # --- what its parts ask of each other ---------------------------------------------------------------------------

    def recover(self) -> None:
        """End the forward or backward that an exception left under way."""
        self.schedule.recover()

    def flush(self) -> None:
        """Reduce the sums that backwards under no_sync left on this rank."""
        self.reduction.flush()

    def judge(self, overflow: bool) -> None:
        """Hear a GradScaler's verdict, which is the same on every rank."""
        for each in self.reduction.subscribers:
            each.judge(overflow)

    def check_options(self, optimizer: torch.optim.Optimizer, number: int) -> None:
        """Refuse options that a checkpoint could not hold."""
        check_options(optimizer, number)

    def check_added(self, optimizer: torch.optim.Optimizer, added: list[nn.Parameter]) -> None:
        """Refuse parameters of an added group that this optimizer cannot update."""
        check_added(self.model, self.layout, self.buckets, self.bindings, optimizer, added)

    # --- before each forward and step -------------------------------------------------------------------------------

    def before_forward(self, training: bool, *, compared: bool) -> None:
        around = nn.parallel.DistributedDataParallel._active_ddp_module
        if around is not None:
            refuse_wrapper(type(around).__name__, "around the sharded model")
        if compared:
            self.comparing.met()
        self._notice_edits_of_structure(called=True)
        if training:
            self.comparing.send_buffers()

    def alike(self, training: bool) -> tuple[int, Callable[[], str]]:
        """Digest what must be equal on every rank in a forward; and a text of what changed since they last agreed."""
        return self.comparing.digest(training)

    def before_step(self) -> None:
        """Follow edits of the model's structure and of the optimizers' groups."""
        self._notice_edits_of_structure()
        for binding in self.bindings:
            binding.follow_groups()

    def check_edits(self) -> None:
        for feature in answering("check_edits"):
            feature.check_edits(self.buckets, self.group)

    def _notice_edits_of_structure(self, *, called: bool = False) -> None:
        """Refuse modules and parameters replaced or converted since `shard`; follow frozen and unfrozen ones.

        called: by a forward.
        """
        name = self._structure.difference(called=called)
        if name is not None:
            raise StateError(
                "a parameter or module of a sharded model was replaced, swapped, removed or added",
                where=repr(name),
                instead="edit weights in place, inside `with zero.gathered():`, or change the model before shard(...), "
                "or between zero.unshard() and another shard(...), by .to(...) too under "
                "torch.__future__.set_swap_module_params_on_conversion(True); "
                "torch.func.functional_call takes tensors that are no nn.Parameter",
            )
        now = self._traits()
        if now == self._known:
            return
        changed: dict[tuple[int, int], bool] = {}  # by bucket and position: is it trained now?
        for record, (dtype, device, trainable), (_, _, was) in zip(self.managed, now, self._known, strict=True):
            own = record.param._zeroshard.bucket.dtype  # type: ignore[attr-defined]
            if dtype is not own or device != self.device:
                raise StateError(
                    "a sharded parameter was converted or moved",
                    where=f"parameter {record.name!r}",
                    expected=f"{own} on {self.device}",
                    got=f"{dtype} on {device}",
                    instead=said_at_shard(
                        dtype if dtype is not own else None, device if device != self.device else None
                    ),
                )
            if trainable != was:
                place: Place = record.param._zeroshard  # type: ignore[attr-defined]
                changed[place.bucket.plan.index, place.position] = trainable
        for binding in self.bindings if changed else ():
            binding.membership.freeze(changed)
        for record, (_, _, trainable), (_, _, was) in zip(self.managed, now, self._known, strict=True):
            if trainable and not was:
                self._unfreeze(record)
        self._known = now

    def notice(self, *, replaced: bool = False) -> bool:
        noticed = [binding.notice(replaced=replaced) for binding in self.bindings]  # all of them look
        return any(noticed)

    def moved(self, bucket: Bucket) -> None:
        """Make the optimizers' fragments views of the memory where a bucket's parameters rest now."""
        for binding in self.bindings:
            binding.retarget(bucket)

    def refuse_within(self) -> None:
        """Refuse to begin inside a collective operation or a step: a signal's handler may call anything anywhere."""
        self.group.refuse_within(busy=any(binding.busy for binding in self.bindings))

    def formats(self, plan: BucketPlan) -> Formats[torch.dtype]:
        """Return the dtypes of a bucket's states."""
        return self.buckets[plan.index].formats

    def optimizer_members(
        self,
    ) -> Iterator[tuple[torch.optim.Optimizer, dict[str, Any], list[tuple[BucketPlan, Slot]]]]:
        """Yield (optimizer, group, the parameters it updates on whichever rank) of every group of every optimizer."""
        for binding in self.bindings:
            for group in binding.optimizer.param_groups:
                places = [member.place for member in binding.members if member.group is group]
                yield binding.optimizer, group, [(p.bucket.plan, p.bucket.plan.slots[p.position]) for p in places]

    def steps(self) -> Sequence[Transaction]:
        return [*self.bindings, *filter(None, [each.step for each in self.reduction.subscribers])]

    def boundary(self) -> None:
        """Save, if a signal was heard, at the first training forward after a step, just before that forward begins."""
        if any(unit.pinned for unit in self.units):
            return  # inside gathered() nothing can be saved: the next forward outside is the boundary
        before, self._stepped = self._stepped, self.group.progress.steps
        if before != self._stepped and (save := self.on_signal.get(self.group.signalled)):
            save()
            self.on_signal.clear()

    def publish(self) -> None:
        """Send buckets whose fragments were edited on any rank to every rank, as after a step."""
        mine = set().union(*(binding.edited for binding in self.bindings))
        edited = self.group.flags(bytes(bucket.plan.index in mine for bucket in self.buckets))
        if any(unit.pinned for unit in self.units):
            raise StateError(
                "an optimizer's part of the parameters was edited inside gathered(), where the parameters are edited",
                instead="edit it before or after gathered(): optimizer.eval() and the like too",
            )
        for binding in self.bindings:
            binding.edited.clear()
        published = [bucket for bucket, flag in zip(self.buckets, edited, strict=True) if flag]
        publish(published, overlap=self.comm.overlap, outside=True)
        self._compare([each for each in published if not (each.placements.optimizer and each.team.seat.sole)])

    def _refuse_mixture(self, module: nn.Module, *_: Any) -> None:
        """Refuse a `state_dict()` that would mix edited and older weights, for it asks no other rank."""
        if self.notice(replaced=True):
            raise StateError(
                "an optimizer's part of the weights was edited: state_dict() would hold edited and older weights",
                where=f"module {type(module).__name__}, rank {self.group.rank}",
                instead="with zero.gathered(): model.state_dict()   (on every rank)",
            )

    def _traits(self) -> list[tuple[torch.dtype, torch.device, bool]]:
        """Return (dtype, device, requires_grad) of every parameter, to notice edits of these."""
        params = [record.param for record in self.managed]
        with torch._C.DisableTorchFunctionSubclass():
            return [(param.dtype, param.device, param.requires_grad) for param in params]

    def _check_stays(self, record: Managed, bucket: Bucket) -> None:
        """Refuse to train what was frozen at `shard`, if an accelerator's optimizer would then step it elsewhere."""
        away = asynchronous(self.device) and not bucket.tiers["optimizer"].on_device
        if away and (bucket.tiers["parameters"].on_device or self.offload.stepped_there):
            raise StateError(
                "a parameter is to be trained that was frozen at shard(...), and its optimizer's states rest elsewhere",
                where=f"parameter {record.name!r}, on {self.device}",
                instead="requires_grad_(True) before shard(...), and freeze it then; or zero.unshard() and shard again",
            )

    def _unfreeze(self, record: Managed) -> None:
        """Make a bucket trainable as a whole that was frozen at construction: see docs/decisions/unfreezing.md."""
        bucket: Bucket = record.param._zeroshard.bucket  # type: ignore[attr-defined]
        if self.gradients.of_bucket(bucket.plan.index) is None:
            check_trained(record.name, bucket.dtype)
            self._check_stays(record, bucket)
            bucket.reserve_gradients()
            bucket.reserve_master()
            self._train(bucket)
            for binding in self.bindings:
                binding.retarget(bucket)
        self.schedule.backward.hook_gradients()
        for binding in self.bindings:
            binding.follow_groups(again=True)

    # --- on request -------------------------------------------------------------------------------------------------

    def join(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """`Zero.join`."""
        return joined(batches, self.comparing, self.schedule, self.reduction)

    @contextlib.contextmanager
    def gathered(self, *what: nn.Module | str, write_from: int | None = None) -> Iterator[None]:
        """`Zero.gathered`."""
        with unseen(), self._gathered(what, write_from), seen():
            yield

    @contextlib.contextmanager
    def _gathered(self, what: Sequence[nn.Module | str], write_from: int | None) -> Iterator[None]:
        if write_from is not None and not (type(write_from) is int and 0 <= write_from < self.group.ranks):
            last = self.group.ranks - 1
            instead = "write_from=0, on every rank"
            raise UserError("write_from names a rank", expected=f"0 to {last}", got=repr(write_from), instead=instead)
        if backward_is_running():
            instead = "touch the parameter, or gather before backward"
            raise StateError("gathered() inside backward cannot be answered", instead=instead)
        units = units_named(self.model, self.managed, self.units, what)
        self.refuse_within()
        self.schedule.recover()
        self.check_edits()
        which = zlib.crc32(repr([unit.index for unit in units]).encode())
        with self.group.as_one():
            self.schedule.meet("gathered()", len(units), which, -1 if write_from is None else write_from)
            for unit in units:
                unit.land()
        self.ledger.begin("gather")
        try:
            with self.schedule.pin(units), editing(units):
                parted = False
                try:
                    yield
                except PeerError as error:
                    parted = error.parted
                    raise
                finally:
                    if not (self.group.interrupted or self.group.lost or parted):
                        with self.group.as_one():
                            self._leave_gathered(units, write_from)
        finally:
            self.ledger.end("gather")
            if not self.schedule.gather_order.active:
                for unit in units:
                    unit.release()

    @torch.no_grad()
    def _leave_gathered(self, units: list[Unit], write_from: int | None) -> None:
        self.notice(replaced=True)
        with self.schedule.telling():
            differ = self.comparing.differ(units, asked=write_from is None)
        several = not (self.group.team.seat.sole or self.placements.two_levels)  # several own a shard, and may differ
        if self.group.rank == 0 and differ:
            log.warning(
                "the ranks leave gathered() with different weights: "
                + ("rank 0's count. " if several else "of each element its owner's counts, a mixture. ")
                + "Make the same edits on every rank, or say whose count: zero.gathered(write_from=0)"
            )
        if several and differ:
            write_from = 0
        seen_to = {index for feature in features() for index in feature.leaving(units, write_from)}
        buckets = (bucket for unit in units for bucket in unit.buckets)
        for bucket in (bucket for bucket in buckets if bucket.plan.index not in seen_to):
            bucket.rebind()
            if write_from is not None:
                self.group.torn = "an exception ended gathered(write_from=...) while the weights were sent"
                self.group.give_all(bucket.full, bucket.plan, write_from)
            bucket.edits.follow()
            if write_from is not None and bucket.master is not None and not bucket.placements.optimizer:
                bucket.master.give_all(write_from)  # masters may differ where their casts agree
            if not bucket.placements.parameters and write_from is None:
                # Whatever each rank did to its copy, the owner's edit of every element is the one that counts.
                bucket.send().wait()
            elif write_from is not None:
                bucket.parameters.settle()
        self.group.torn = ""
        self.comparing.written()

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def meet_for_checkpoint(self, what: str, *, weights: bool = True) -> None:
        self.schedule.recover()
        if backward_is_running() or self.schedule.gather_order.active or any(unit.pinned for unit in self.units):
            instead = "after step; in place of a signal's handler, zero.save_on(signal.SIGUSR1, path=...)"
            raise StateError(f"{what} inside forward, backward or gathered()", instead=instead)
        for each in self.reduction.subscribers:
            each.between_steps(what)
        self.before_step()
        if what != "loading":
            self.check_edits()
        mark = max((each.mark for each in self.reduction.subscribers), default=-1)
        with self.schedule.telling():
            mine = self.group.progress.steps, self.checkpoints.unfinished(), mark
            told = self.group.poll(what, self.group.number("checkpoint"), *mine)
        self._furthest = max(steps for steps, _, _ in told)
        for feature in features():
            feature.met(what, [mark for _, _, mark in told])
        if what != COMPARING and any(saving for _, saving, _ in told):
            self.checkpoints.wait(self.group)
        for bucket in self.buckets:
            bucket.land()
            bucket.rebind()
            if weights and (bucket.resident or bucket.ready):
                bucket.edits.follow()
        if what != "loading":
            self._compare(self.buckets)

    def _compare(self, buckets: list[Bucket]) -> None:
        with self.ledger.during("compare"):
            for bucket in buckets:
                bucket.land()
            self.checkpoints.compare(self, buckets)

    def loaded(self) -> None:
        """Bring the engine's notes in line with loaded weights: all ranks hold those of one step again."""
        self.group.torn, self.group.progress.steps = "", self._furthest
        self.schedule.backward.was_local = False
        publish([bucket for bucket in self.buckets if bucket.codec.agrees], overlap=False, outside=True)
        self.comparing.written()
        self.gradients.hide(self.gradients.entries)
        for each in self.reduction.subscribers:
            each.loaded()
        for unit in self.units:
            unit.release()
