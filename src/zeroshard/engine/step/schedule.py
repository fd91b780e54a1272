"""From hooks to ordered actions: when units are gathered, opened, guarded and released.

    forward    unit's pre-hook: gather, open          post-hook: guard, release
    backward   saved weight unpacked: gather          released once its gradients are there, or two units later
    recompute  (checkpointing) as forward             post-hook: guard, never release. `Layout.recompute` puts a
                                                       checkpoint around a unit's forward, inside its hooks

`backward.py` says when a backward begins and ends.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from ...comm.frames import Call
from ...errors import PeerError, ReleasedError, StateError
from ...layout.partition import BucketPlan, plain_name
from ...policies.comm import Comm
from ...policies.precision import Precision
from ..gradients.backward import Backward, backward_is_running
from ..gradients.gradient import Gradients
from ..gradients.reduction import Reduction
from ..weights.bucket import Bucket
from ..weights.forward import Forward, Frame
from ..weights.gather_order import GatherOrder
from ..weights.guard import SavedTensors, forward_called, not_given, weak
from ..weights.modes import outside, refuse_inside
from ..weights.tracing import end_graph, untraced
from ..weights.transaction import Transaction
from ..weights.unit import Unit, profiled
from ..weights.written import Written

log = logging.getLogger("zeroshard")

# What dynamo says where it is not to break a graph.
NO_GRAPH = "zeroshard gathers and releases weights between graphs: compile blocks, or leave fullgraph=True out"


class ForwardWatcher(Protocol):
    """The part of the engine that watches edits of the model and its optimizers between the hooks."""

    sends_always: bool  # are buffers sent before forwards that do not train, too?

    def before_forward(self, training: bool, *, compared: bool) -> None:
        """Prepare a forward that begins. compared: all ranks begin it and have compared what must be equal; else this
        rank may run it alone."""

    def alike(self, training: bool) -> tuple[int, Callable[[], str]]:
        """Return a digest of what must be equal on all ranks in a forward, and what makes a text of changes since they
        last agreed."""

    def notice(self, *, replaced: bool = False) -> bool:
        """Notice writes to optimizers' fragments outside a step, and tell if there are any. replaced: look also for
        replaced memory, which takes longer."""

    def publish(self) -> None:
        """Send buckets whose fragments were edited on any rank to every rank. All ranks call it together."""

    def steps(self) -> Sequence[Transaction]:
        """Return the steps that may be under way: one for each optimizer."""

    def moved(self, bucket: Bucket) -> None:
        """Point optimizers' fragments at the memory in which a bucket's parameters rest now."""

    def boundary(self) -> None:
        """Run actions that belong between two steps, where all ranks are at the same place."""


class Rounds(Protocol):
    """Forwards of which ranks make different numbers: all ranks take part in each."""

    def begin(self, unit: int) -> None:
        """Meet all ranks before a forward of this one. unit: the index of the unit that it entered through."""


class Schedule:
    """The hooks of one sharded model on one rank.

    Half of its names are hooks and their actions; the others are for recovery with all ranks after an exception
    (`Party`).
    """

    def __init__(
        self,
        watcher: ForwardWatcher,
        units: list[Unit],
        gradients: Gradients,
        reduction: Reduction,
        saved: SavedTensors,
        settings: Comm,
        precision: Precision,
    ) -> None:
        self.watcher = watcher
        self.units = units
        self.gradients = gradients
        self.reduction = reduction
        self.group = group = gradients.group
        self.ledger = group.ledger
        self.settings = settings
        self.gather_order = GatherOrder(units, group, prefetch=settings.prefetch, overlap=settings.overlap)
        self.saved = saved
        self.releases = self.saves = any(unit.released for unit in units)  # saves: do hooks keep what autograd saves?
        self.backward = Backward(units, gradients, reduction, self.gather_order, self.meet, releases=self.releases)
        self._cast_to = precision.param_dtype
        self._cast_everywhere = precision.cast_inputs == "units"  # and not only where a forward of the model begins
        self.written = Written()
        self.forward = Forward(units, saved, self.ledger, releases=settings.release_after_forward)
        self.rounds: Rounds | None = None  # while ranks may make different numbers of forwards
        self.averages_in = False  # are the weights a moving average's, for a while?
        group.party = self
        self._buckets = [bucket for unit in units for bucket in unit.buckets]
        self._unit_of = {id(bucket): unit for unit in units for bucket in unit.buckets}
        reader = _WeakSchedule(self)
        untraced()
        for unit in units:
            for bucket in unit.buckets:
                bucket.reader = reader
            # Not to be compiled: a hook acts differently from call to call, and opens parameters that graphs may hold.
            enter, leave = (torch.compiler.disable(weak(h, unit), reason=NO_GRAPH) for h in (self.enter, self.leave))
            for module in unit.modules:
                if precision.cast_inputs:
                    cast = torch.compiler.disable(weak(self.cast_inputs, inside=True), reason=NO_GRAPH)
                    module.register_forward_pre_hook(cast, prepend=True, with_kwargs=True)
                module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
                module.register_forward_hook(leave, always_call=True)

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """Wrap a meeting, after which edits of fragments that any rank made before it are published to every rank."""
        self.group.news = self.watcher.notice()
        with self.group.as_one():
            try:
                yield
            finally:
                self.group.news = False
            if self.group.heard:
                self.watcher.publish()

    def meet(self, what: str, number: int, *same: int, facts: Callable[[], str] = str) -> None:
        with self.telling():
            self.group.meet(what, number, *same, facts=facts)

    # --- forward ----------------------------------------------------------------------------------------------------

    def enter(self, unit: Unit, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Begin a unit's forward: gather it and open it."""
        self._refuse_export()
        recompute = backward_is_running()
        self.group.hear_crossed()
        if not recompute and self._elsewhere(unit):
            self.group.cross()
        if recompute:
            self.backward.event()
            self.backward.needs(unit, again=True)  # before units are gathered
        elif not self.forward.running():
            self.group.refuse_within()
            if torch.is_grad_enabled() and self.rounds is None:
                self.watcher.boundary()
            with self.group.as_one():
                self._begin_forward(unit, module)
            self.forward.call = Call(nn.Module._call_impl)
        # The frame is there before anything is opened: an interrupt may come at any moment.
        frame = Frame(unit, module, recompute, self.saved.inputs(args, kwargs))
        self.forward.begin(frame)
        self.forward.keep_no_casts(frame)
        self.forward.come_to(unit)
        for needed in (unit, *unit.borrows):
            self._demand(needed)
            frame.opened.append(needed)
            needed.open_calls += 1
            needed.open()
        if not recompute and (torch.is_grad_enabled() or self.forward.grad):
            unit.called(module)
            if module.training and self.group.ranks > 1:
                frame.look = self.written.look(unit, module)
        if self.saves and torch.is_grad_enabled():
            frame.pushed = self.saved.push()
        verb = "recompute" if recompute else "forward"
        frame.event = self.ledger.note(verb, unit=unit.name)
        range_ = profiled(verb, unit.name)
        range_.__enter__()
        frame.profiled = range_

    def cast_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Cast floating inputs to the parameters' dtype, right after `enter`."""
        if self._cast_everywhere or (len(self.forward.frames) == 1 and not self.forward.frames[0].again):
            return tree_map_only(Tensor, self._cast, (args, kwargs))  # type: ignore[no-any-return]
        return None

    def _elsewhere(self, unit: Unit | None = None) -> bool:
        """Tell if another thread computes with this model. False if its forward has this thread compute `unit`, a part
        of that forward."""
        if self.forward.elsewhere():
            frames = self.forward.frames
            if unit is None or not frames or unit is frames[0].unit:
                return True
            return all(each not in unit.modules for module in frames[0].unit.modules for each in module.modules())
        return any(each.call.elsewhere() for each in self.transactions if each.call is not None)

    def leave(self, unit: Unit, module: nn.Module, args: Any, output: Any) -> None:
        """End a unit's forward, after its normal end or an exception."""
        refused = not backward_is_running() and self._elsewhere(unit)
        if not refused and (running := self.forward.of(unit)):  # else it was refused before it began
            # After a lost collective there is nothing to wait for, and the error being raised has said so.
            with contextlib.suppress(PeerError) if self.group.lost else contextlib.nullcontext():
                if (look := running[-1].look) is not None:
                    self.written.end(look)
                frame = self.forward.unwind(unit)
                if not (frame.again or self.forward.frames):
                    self._end_forward(output)

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._cast_to) if tensor.is_floating_point() else tensor

    def _begin_forward(self, unit: Unit, module: nn.Module) -> None:
        self.recover()
        self.forward.grad = torch.is_grad_enabled()
        training = self.watcher.sends_always or (self.forward.grad and module.training)
        # A rank may run a forward alone if it gathers and sends nothing.
        quiet = not (self.forward.grad or self.watcher.sends_always)
        alone = quiet and self.releases and any(each.pinned for each in self.units)
        if alone and (missing := [each for each in (unit, *unit.borrows) if each.released and not each.pinned]):
            self._say_missing(missing[0])
            alone = False
        self.forward.alone = unit if alone else None
        compared = self.rounds is None and (not quiet or (self.releases and not alone))
        if self.rounds is not None and not alone and (self.releases or not quiet):
            self.rounds.begin(unit.index)
        elif compared:
            self._meet_for_forward(unit, training)
        elif self.watcher.notice() and (
            self.group.failed or any(bucket.placements.optimizer for each in self.units for bucket in each.buckets)
        ):
            self.group.progress.trouble = (
                "an optimizer's part of the weights was edited on this rank: before a forward without grad every rank "
                "enters `with zero.gathered():`, where that becomes every rank's weights"
            )
            # A rank may evaluate alone, but not with weights of which others hold an edited part.
            self.meet("publishing edits", self.group.numbers["forward"])
        self.ledger.begin("forward")
        try:
            self.watcher.before_forward(training, compared=compared)
            if self.forward.alone is None:
                self.flush_pinned()
        except BaseException:
            self.ledger.end("forward")
            raise
        if self.releases and self.forward.alone is None:
            self.gather_order.begin((self.forward.kind, unit.index))

    def _meet_for_forward(self, unit: Unit, training: bool) -> None:
        alike, words = self.watcher.alike(training)
        self.meet(self.forward.kind, self.group.number("forward"), unit.index, training, alike, facts=words)

    def _say_missing(self, unit: Unit) -> None:
        """Note, for the error if other ranks are at something else, that this rank's forward needs this unit."""
        what = f"the weights of {unit.name!r}" if unit.name else "weights of the model's own"
        self.group.progress.trouble = f"this rank's forward needs {what}, which gathered() did not name"

    def _demand(self, unit: Unit) -> None:
        """Gather a unit that is needed now. A forward of this rank alone that must gather becomes one of all ranks."""
        if self.forward.alone is not None and unit.released and not unit.pinned:
            begun, self.forward.alone = self.forward.alone, None
            self._say_missing(unit)
            with self.group.as_one():
                if self.rounds is not None:
                    self.rounds.begin(begun.index)
                else:
                    self._meet_for_forward(begun, False)
                    self.watcher.before_forward(False, compared=True)
                self.flush_pinned()
                self.gather_order.begin((self.forward.kind, begun.index))
        self.gather_order.demand(unit)

    def _end_forward(self, output: Any) -> None:
        try:
            self._finish_forward(output)
        finally:
            self.ledger.end("forward")

    def _finish_forward(self, output: Any) -> None:
        error = sys.exc_info()[1]
        raised = error is not None and not isinstance(error, PeerError)
        if raised:
            forward = f"forward {self.group.numbers['forward']}"
            self.group.progress.trouble = f"{forward} raised {type(error).__name__}: {error}"
        # After an error that all ranks raise, or an interrupt, this would only wait again: the next verb recovers.
        if self.gather_order.active and not (getattr(error, "agreed", False) or self.group.interrupted):
            self.gather_order.finish()
        backwards = self.group.numbers["backward"]
        if raised and self.forward.whole != backwards:  # else an earlier forward may still have its backward
            self.group.progress.left = self.group.progress.trouble
        elif error is None and self.forward.grad:
            self.forward.whole = backwards
        for unit in self.units:
            if unit.touched:
                unit.close()
                unit.touched = self.forward.grad
            if self.settings.release_after_forward or not self.forward.grad:
                unit.release()
        if self.forward.grad:
            for leaf in tree_leaves(output):
                if isinstance(leaf, Tensor) and leaf.requires_grad and not leaf.is_leaf:
                    leaf.register_hook(weak(self.backward.event))
        self.forward.grad = False

    def flush_pinned(self) -> None:
        """Copy edits made so far inside gathered() to the shards, or the coming gathers would undo them."""
        for unit in self.units:
            if unit.pinned:
                for bucket in unit.released:
                    bucket.edits.follow()

    def _refuse_export(self) -> None:
        """Refuse to be traced or exported: the program that torch makes would have no weights, or only this rank's."""
        tracing = torch._C._get_tracing_state() is not None
        if tracing or torch.compiler.is_exporting():
            raise StateError(
                "a sharded model cannot be traced or exported as a program",
                where="torch.jit.trace" if tracing else "torch.export",
                instead="zero.unshard() on every rank first: the model is plain then, and may be sharded again",
            )

    # --- touches and saved weights ----------------------------------------------------------------------------------

    def touch(self, bucket: Bucket, index: int) -> None:
        """Gather and open a guarded parameter that Python reads; raise `ReleasedError` outside forward and backward."""
        unit = self._unit_of[id(bucket)]
        if bucket.resident:
            unit.open()
            return
        if backward_is_running():
            self.backward.event()
        elif not self.forward.frames:
            name = bucket.plan.slots[index].name
            end_graph(f"zeroshard's parameter {name!r}, which is not gathered", NO_GRAPH)
            raise ReleasedError(
                "a sharded parameter was read while it is not gathered",
                where=f"parameter {name!r}, rank {self.group.rank}",
                expected="the model's own forward or backward",
                instead=not_given(bucket.params[index])
                or forward_called([module for each in self.units for module in each.modules])
                or "with zero.gathered(): ...   (on every rank). Call parts of the model through its forward"
                f"{self._own_units(unit, name)}; "
                "move or convert it before shard(...)",
            )
        self._demand(unit)
        unit.touched = True
        unit.open()

    def _own_units(self, unit: Unit, name: str) -> str:
        """Return advice on how modules of the root unit's could be called by themselves; "" for other units."""
        root = unit.modules[0]
        callable_ = [
            f"{plain_name(path)}."
            for path, module in root.named_modules()
            if module is not root and not isinstance(module, (nn.ModuleList, nn.ModuleDict))
        ]
        slots = [slot.name for bucket in unit.buckets for slot in bucket.plan.slots]
        outermost = {slot: next((path for path in callable_ if slot.startswith(path)), "") for slot in slots}
        if unit.name or not outermost[name]:
            return ""
        innermost = next(path for path in reversed(callable_) if name.startswith(path))
        wanted = [*outermost.values(), innermost]  # the program may call the part itself, or what it is in
        names = [each for other in self.units for each in other.names] + [each[:-1] for each in wanted]
        units = dict.fromkeys(re.sub(r"\.\d+$", ".*", each) for each in names if each)
        return f", or make what is called by itself a unit: Layout(units={json.dumps([*units])})"

    def moved(self, bucket: Bucket) -> None:
        """Tell the watcher that a bucket's parameters rest in other memory now."""
        self.watcher.moved(bucket)

    def fetch(self, bucket: Bucket) -> None:
        """Gather a bucket of which autograd needs a saved weight."""
        if backward_is_running():
            self.backward.event()
        unit = self._unit_of[id(bucket)]
        self.backward.needs(unit)
        if bucket.ready and not unit.ahead:
            return
        if not self.gather_order.active:
            raise StateError(
                "a saved weight was read outside forward and backward",
                where=f"parameter {bucket.plan.slots[0].name!r}",
                instead="with zero.gathered(): ...   (on every rank)",
            )
        self.gather_order.demand(unit)

    # --- an exception -----------------------------------------------------------------------------------------------

    @property
    def transactions(self) -> list[Transaction]:
        """Everything that all ranks end together after an exception, the outermost first."""
        return [*self.watcher.steps(), self.backward]

    def recover(self) -> None:
        """End what an exception in the last forward, backward or step left under way, with all ranks."""
        self.group.check_process()
        self.group.check_stream()
        refuse_inside("a call of zeroshard's, or a step,")
        self.watcher.notice(replaced=True)  # before anything is released: that would undo writes
        if self.forward.begun and not self.forward.running():
            self.forward.abandon()  # an interrupt went past every hook
        segment = self.gather_order.active and not (self.forward.begun or self.backward.begun)
        left = any(each.begun and not each.running() for each in self.transactions)
        if self.group.interrupted or segment or left:
            self.group.level(self._trouble())
        elif self.group.missed:
            kept = self.reduction.kept()
            self.group.level("its program did not come to what the others were at")
            if kept - self.reduction.kept():
                raise PeerError(
                    "the ranks have dropped their gradients: others have left what this rank did not come to",
                    where=f"rank {self.group.rank}, step {self.group.progress.steps + 1}",
                    expected="forwards, backwards, steps and the program's own collectives in one order on all ranks",
                    instead="try again on every rank, from zero_grad()",
                )

    def _trouble(self) -> str:
        """Return what other ranks are told of an exception on this rank."""
        if self.backward.begun:
            return self.backward.trouble
        return self.group.progress.trouble or f"an exception ended what came after {self.group.progress.met}"

    def left(self) -> str:
        if self.backward.left():
            return self.backward.trouble
        if self.forward.left():
            return f"an exception ended forward {self.group.numbers['forward']}"
        ended = any(each.left() for each in self.watcher.steps())
        return f"an exception ended step {self.group.progress.steps + 1}" if ended else ""

    def unsettled(self) -> bool:
        return self.reduction.busy or any(each.begun for each in self.transactions)

    def edits(self) -> str:
        return repr(self.gradients.edits)

    def plan(self, index: int) -> BucketPlan:
        return next(bucket.plan for bucket in self._buckets if bucket.plan.index == index)

    def travelling(self, index: int) -> BucketPlan:
        return self.reduction.contributions[index].codec.plan

    def recovery_copy(self, bucket: int, state: str) -> Tensor | None:
        found = [each for each in self._buckets if each.plan.index == bucket and state == "parameters"]
        return found[0].codec.recovery_copy() if found else None

    def levelled(self, drop: bool) -> None:
        self.gather_order.forget()
        for unit in self.units:
            for bucket in unit.buckets:  # do not use gathered weights again: a rank that stood in may have sent some
                bucket.gathered.current &= bucket.resident
        self.reduction.order = sorted(self.reduction.contributions, reverse=True)
        if drop:
            self.reduction.abort()
        for each in self.transactions:
            if each.torn():
                torn = f"an exception ended step {self.group.progress.steps + 1} while it updated the weights"
                if self.group.ranks > 1:
                    self.group.torn = torn
                else:
                    log.warning("%s: one rank goes on, as in plain PyTorch; zero.load(...) has those of a step", torn)
            each.abandon()

    def spread(self) -> None:
        for bucket in self._buckets:
            bucket.publish(overlap=False)

    # --- what else gathers ------------------------------------------------------------------------------------------

    def before_step(self) -> None:
        """Prepare for an optimizer's step, which changes the weights."""
        self.group.hear_crossed()
        if self._elsewhere():
            self.group.cross()
        self.recover()
        self.flush_pinned()

    def after_step(self) -> None:
        """Drop gathered copies of older weights, and gather anew those that the user holds by `gathered()`."""
        for unit in self.units:
            unit.calls.clear()
            unit.touched = False
            for bucket in unit.released:
                bucket.gathered.current = False
            if unit.pinned:
                unit.gather(wait=True)
            unit.release()

    @contextlib.contextmanager
    def pin(self, units: list[Unit]) -> Iterator[None]:
        """Hold units open, for `gathered()`. Every rank calls it with the same units."""
        pinned, pushed = [], False
        try:
            with self.group.as_one():
                for unit in units:
                    if self.gather_order.active:
                        self.gather_order.demand(unit)
                    elif not unit.ready:
                        unit.gather(wait=not self.settings.overlap)
                    pinned.append(unit)
                    unit.pinned += 1
            for unit in units:
                unit.open()
            # What is computed with the weights here, a penalty say, saves them for a backward that may come later.
            pushed = self.releases and torch.is_grad_enabled() and not backward_is_running() and self.saved.push()
            yield
        finally:
            if pushed:
                self.saved.pop()
            for unit in pinned:
                unit.pinned -= 1


class _WeakSchedule:
    """The buckets' weak reference to the schedule: parameters refer to buckets, and must not keep the engine alive."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = weakref.ref(schedule)

    @outside
    def touch(self, bucket: Bucket, position: int) -> None:
        schedule = self._schedule()
        if schedule is not None:
            schedule.touch(bucket, position)

    def moved(self, bucket: Bucket) -> None:
        schedule = self._schedule()
        if schedule is not None:
            schedule.moved(bucket)

    def fetch(self, bucket: Bucket) -> None:
        schedule = self._schedule()
        if schedule is not None:
            schedule.fetch(bucket)
