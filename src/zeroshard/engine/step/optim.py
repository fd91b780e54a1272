"""The user's own `torch.optim` object, bound to this rank's fragments.

The optimizer never learns that anything is sharded. Its `param_groups` keep their options and order; in place of each
parameter they hold this rank's *fragment* of it: a parameter that is a view of the fp32 master, or of the resting
parameter where none is needed. Everything elementwise just works, and its state is sharded because the fragments are.

Roads not taken: an optimizer of our own (the user's class, options and kernels would be lost); one flat tensor per
shard (per-group options would be lost, and fused kernels give different bits on whole tensors); subclassing the
user's class (schedulers and scalers hold the object they were given).
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ...comm.agreement import WROTE
from ...comm.frames import Call
from ...comm.own_collectives import OwnCollectives
from ...errors import StateError, TierError, UserError, without_own_lines
from ..gradients.accumulator import Entry
from ..gradients.backward import backward_is_running
from ..gradients.gradient import Gradients
from ..weights.bucket import Bucket, Place, publish
from ..weights.evidence import told
from ..weights.modes import unseen
from ..weights.tracing import traced
from ..weights.transaction import Transaction
from .attributes import Attributes
from .bucket_step import Alone
from .fragment import Fragment, Member, Shapes, States, by_parameter, fixed_shapes
from .membership import Membership
from .optimizer_grads import Averages
from .optimizer_hooks import closure_at, hook_steps, refuse_alone, stay_last
from .options import Options, same
from .schedule import NO_GRAPH, Schedule

_STEP = torch.optim.Optimizer.profile_hook_step  # calls the hooks and, between them, the optimizer's own step


class StepWatcher(Protocol):
    """The part of the engine that watches edits of the model and of all its optimizers."""

    def before_step(self) -> None:
        """Notice edits since the last step. All ranks are at this step."""

    def check_edits(self) -> None:
        """Report edits that nothing can follow, before all ranks meet."""

    def check_options(self, optimizer: torch.optim.Optimizer, number: int) -> None:
        """Refuse options that a checkpoint could not hold."""

    def check_added(self, optimizer: torch.optim.Optimizer, added: list[nn.Parameter]) -> None:
        """Refuse parameters of an added group that this optimizer cannot update."""


class Binding(Transaction):
    """One optimizer's hooks, fragments and place in a step."""

    def __init__(
        self,
        watcher: StepWatcher,
        optimizer: torch.optim.Optimizer,
        number: int,
        buckets: list[Bucket],
        gradients: Gradients,
        schedule: Schedule,
        *,
        by_bucket: bool,
        watched: bool,
    ) -> None:
        """by_bucket: may it be stepped one bucket after the other? watched: must its own collectives be refused?"""
        self.watcher = watcher
        self.optimizer = optimizer
        self.number = number
        self.buckets = buckets
        self.gradients = gradients
        self.schedule = schedule
        self.group = gradients.group
        self.subscribers = schedule.reduction.subscribers
        self.by_bucket = by_bucket  # it may be stepped one bucket after the other
        self.fragments: list[Fragment] = []
        self.members: list[Member] = []  # every parameter this optimizer updates, on whichever rank
        self._groups: list[dict[str, Any]] = []  # its groups when they were last looked through
        self._held: list[nn.Parameter] = []  # and the parameters in them
        self.membership = Membership()
        self._grouping = 0  # a digest of which parameter is in which group
        self.own = {id(param) for bucket in buckets for param in bucket.params}
        self._entries: list[Entry] = []  # the gradients of its members
        self.averages = Averages(gradients)
        self.options = Options(optimizer, self._check_options)
        self._marks: int | None = None  # `_versions` when the running step was about to update; -1: it updates already
        self._updated: list[Bucket] = []  # what the running step updates
        self._together: list[Bucket] = []  # of these, what is not stepped one by one
        self.edited: set[int] = set()  # buckets whose fragments were written to outside a step: the others must hear it
        self._skips = False  # does the running step pass over its update?
        self._lent = False  # does the closure run, which is the program's code?
        self._bound_now = False  # has the running step its gradients? With a closure, only after that has run
        self.states = States(optimizer, number, self.group)
        where = f"{type(optimizer).__name__}, optimizer {number}, rank {self.group.rank}"
        self.watch = OwnCollectives(where, self.running) if watched else None
        self.attributes = Attributes(where, strict=watched)
        self.alone = Alone(optimizer, self.states, self.averages, self.group.ledger, self.watch)
        self.adopt(broadcast_state=True)
        hook_steps(type(optimizer))
        # Not to be compiled: they talk to ranks. `torch.compile(optimizer.step)` compiles the update between them.
        begin, after = (torch.compiler.disable(unseen()(h), reason=NO_GRAPH) for h in (self._before, self._after))

        @traced
        @without_own_lines
        def before(*given: Any) -> Any:
            return begin(*given, compiled=torch.compiler.is_compiling())

        stay_last(optimizer, optimizer.register_step_pre_hook(before).id)
        handle = optimizer.register_step_post_hook(after)
        # The user's post hooks, also earlier ones, see the updated parameters.
        optimizer._optimizer_step_post_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]
        optimizer.register_state_dict_pre_hook(functools.partial(refuse_alone, "optimizer.state_dict()"))
        optimizer.register_load_state_dict_pre_hook(functools.partial(refuse_alone, "optimizer.load_state_dict()"))
        optimizer.zero_grad = functools.partial(self._zero_grad, optimizer.zero_grad)  # type: ignore[method-assign]

    # --- fragments in place of parameters ---------------------------------------------------------------------------

    def follow_groups(self, *, again: bool = False) -> None:
        """Adopt parameters that were added to the groups, and forget removed ones. again: also if nothing was added."""
        if (self._unedited() and not again) or self.report_divided():
            return
        held = {*map(id, self._held), *(id(part.param) for each in self.membership for part in each.fragments)}
        self.membership.follow(self.optimizer.param_groups)
        self.members = self.membership.members
        self.watcher.check_added(self.optimizer, [param for param in self._holds() if id(param) not in held])
        self.adopt()

    def _holds(self) -> list[nn.Parameter]:
        return [param for group in self.optimizer.param_groups for param in group["params"]]

    def _unedited(self) -> bool:
        return same(self._holds(), self._held) and same(self.optimizer.param_groups, self._groups)

    def report_divided(self) -> bool:
        """Report an edit that divided a group's fragments among groups, before anything follows it; tell if one did."""
        if self._unedited() or (found := self.membership.divided(self.optimizer.param_groups)) is None:
            return False
        parts, groups = found
        numbers = [at for at, group in enumerate(self.optimizer.param_groups) if any(group is each for each in groups)]
        self.group.report(
            StateError(
                "an optimizer's group was divided by what it holds, which are this rank's parts of parameters",
                where=f"optimizer {self.number}, rank {self.group.rank}",
                expected=f"all {len(parts.fragments)} parts that were in one group in one group again, or in none",
                got=f"some of them in group {' and '.join(map(str, numbers))}",
                instead="take the group out of optimizer.param_groups, and optimizer.add_param_group(...) for the "
                "model's own parameters; or p.requires_grad_(False) for those that are not to be trained",
            )
        )
        return True

    def adopt(self, *, broadcast_state: bool = False) -> None:
        """Put fragments in place of full parameters in the groups: all at construction, later those of
        `add_param_group`."""
        fixed = fixed_shapes(self.optimizer)
        for group in self.optimizer.param_groups:
            params: list[nn.Parameter] = group["params"]
            if not any(hasattr(param, "_zeroshard") for param in params):
                continue
            made = [
                self._fragment(param, group, fixed, broadcast=broadcast_state) if hasattr(param, "_zeroshard") else None
                for param in params
            ]
            kept = [
                (each, at)
                for at, fragments in enumerate(made)
                for each in ([params[at]] if fragments is None else fragments)
                if fragments is None or each.numel()
            ]
            # A group must not be empty: schedulers, scalers and some step functions look at its first parameter. And
            # `membership` follows a group by the fragments in it, so ignored parameters alone are not enough.
            if all(made[at] is None for _, at in kept):
                kept.append(next((fragments[0], at) for at, fragments in enumerate(made) if fragments))
            if "param_names" in group:
                group["param_names"] = [group["param_names"][at] for _, at in kept]
            params[:] = [param for param, _ in kept]  # in place: LBFGS, for one, keeps this very list
        before = self.fragments
        self._held, self._groups = self._holds(), list(self.optimizer.param_groups)
        self.membership.follow(self._groups)
        held = set(map(id, self._held))
        self.members = self.membership.members
        self.fragments = [fragment for fragment in self.membership.fragments if id(fragment.param) in held]
        self._forget({id(fragment.param) for fragment in before} - {id(fragment.param) for fragment in self.fragments})
        numbers = {id(group): number for number, group in enumerate(self._groups)}
        grouped = [(m.place.bucket.plan.index, m.place.position, numbers[id(m.group)]) for m in self.members]
        self._grouping = zlib.crc32(repr(sorted(grouped)).encode())
        self.states.follow(self.fragments)
        self.gradients.made.clear()
        self.averages.enter((fragment, self._entry(fragment)) for fragment in self.fragments)
        self._entries = [entry for entry in (self._entry(member.place) for member in self.members) if entry is not None]
        for entry in self._entries:
            entry.updater = self.number
        if self.fragments:
            self.gradients.stand_ins[self.number] = self.fragments[0].param

    def _forget(self, gone: set[int]) -> None:
        """Forget what the book of gradients knows of fragments that are in no group any more. gone: their ids."""
        for entry in self.gradients.entries:
            if entry.updater == self.number:
                entry.updater = None
            if gone:
                entry.fragments[:] = [param for param in entry.fragments if id(param) not in gone]
        for number in gone:
            self.gradients.elements.pop(number, None)

    def _fragment(
        self, param: nn.Parameter, group: dict[str, Any], fixed: Shapes, *, broadcast: bool
    ) -> list[nn.Parameter]:
        place: Place = param._zeroshard  # type: ignore[attr-defined]
        fragments = self.membership.take(place)  # of a parameter that has left, and comes back
        again = {id(fragment.param) for fragment in fragments}
        for other in self.optimizer.param_groups if again else ():  # a frozen parameter's may still be in a group
            other["params"][:] = [each for each in other["params"] if id(each) not in again]
        with torch._C.DisableTorchFunctionSubclass():
            for fragment in fragments:
                fragment.param.requires_grad_(param.requires_grad)
                self.states.point(fragment)
            fragments = fragments or self.states.fragments(place, requires_grad=param.requires_grad)
        self.attributes.give(param, fragments)
        self.membership.add(place, fragments, group)
        state = dict.pop(self.optimizer.state, param, None)
        for fragment in fragments if state else ():
            kept = {
                key: self.states.cut(fragment, key, value, group, fixed=fixed, broadcast=broadcast)
                for key, value in state.items()
            }
            if fragment.param.numel():
                self.optimizer.state[fragment.param] = kept
        return [fragment.param for fragment in fragments]

    def retarget(self, bucket: Bucket) -> None:
        """Make a bucket's fragments views of its masters, which it has just got."""
        self.states.retarget(bucket)

    @torch.no_grad()
    def notice(self, *, replaced: bool = False) -> bool:
        """Notice fragments that were written to outside a step; tell if other ranks must hear of any.

        What rests on this rank follows at once. replaced: look also for fragments whose `.data` was replaced.
        """
        written = self.states.written() + (self.states.replaced(self.fragments) if replaced else [])
        self.states.followed()
        for bucket in written:
            self.edited.add(bucket.plan.index)
            if bucket.updating.on_demand:
                bucket.absent(1).fill_(torch.nan)  # repair it: torch lets the program `fill_` absent elements
                if any(step.begun for step in self.schedule.watcher.steps()):
                    continue  # the writer was a step that an exception ended
                self.group.report(
                    StateError(
                        "an optimizer's part of the parameters was edited while it rests elsewhere, or in halves",
                        where=f"optimizer {self.number}, unit {self.group.progress.units[bucket.plan.index]!r}",
                        instead="edit the model's parameters inside `with zero.gathered():`, or keep optimizer states "
                        'whole where it steps: Offload(optimizer="cpu", step="host"), no split_master',
                    )
                )
                continue
            with self.gradients.reporting():
                self.alone.write_back(bucket)
            bucket.gathered.current &= bucket.resident
        return bool(self.edited)

    def _entry(self, of: Fragment | Place) -> Entry | None:
        """Return a parameter's entry in the book of gradients; None while its bucket is frozen."""
        accumulator = self.gradients.of_bucket(of.bucket.plan.index)
        return None if accumulator is None else accumulator.entries[of.position]

    # --- a step -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _before(
        self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, compiled: bool
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if compiled and any(self._by_itself(bucket) for bucket in self.buckets):
            raise StateError(
                "torch.compile(optimizer.step), where buckets are stepped one after the other, which is not compiled",
                where=f"optimizer {self.number}, rank {self.group.rank}",
                expected="states on the device, none of them rounded by a Precision, and gradients in the "
                "dtype that the optimizer updates",
                instead="optimizer.step() without torch.compile",
            )
        if self._nested():
            return None
        if backward_is_running():
            raise StateError(
                "optimizer.step() inside backward: the gradients are not summed over the ranks yet",
                where=f"optimizer {self.number}, rank {self.group.rank}",
                instead="optimizer.step() after loss.backward(), from no hook of a parameter; with "
                "shard(..., optimizer_in_backward=True) backward has updated all parameters by then",
            )
        self._watch(False)  # of a step that an exception left
        self.call, self._bound_now = Call(_STEP), False
        self.group.ledger.end("step")  # of a step that an exception left
        self.group.ledger.begin("step")
        self.gradients.uncalled.discard(self.number)
        at = closure_at(optimizer, args, kwargs)
        for each in self.subscribers:
            each.before_step(self.number, closure=at is not None)
        self._begin()
        for each in self.subscribers:
            each.step_begun(self.number)
        if at is None:
            self._bind()
            self._watch()
            return None
        closure = args[at] if isinstance(at, int) else kwargs[at]

        def bound(*inner: Any, **options: Any) -> Any:
            self.gradients.uncalled.discard(self.number)
            with torch.no_grad(), unseen():
                for bucket in self._together:
                    self.alone.write_back(bucket)
                self._show(self.fragments)
            self._lent = True
            self._watch(False)
            try:
                loss = closure(*inner, **options)
            finally:
                self._lent = False
            with torch.no_grad(), unseen():
                self.gradients.keeper.flush()
                self._bind()
            self._watch()
            return loss

        self.gradients.uncalled.add(self.number)
        if isinstance(at, int):
            return (*args[:at], bound, *args[at + 1 :]), kwargs
        return args, {**kwargs, at: bound}

    def _watch(self, begins: bool = True) -> None:
        """Begin, or end, to refuse collectives of the optimizer's own."""
        if self.watch is not None:
            (self.watch.begin if begins else self.watch.end)()

    @property
    def busy(self) -> bool:
        return self.running() and not self._lent

    def torn(self) -> bool:
        return self._marks is not None and self._versions() != self._marks

    def abandon(self) -> None:
        """Drop a step that an exception ended: it had not begun to update, or all was loaded anew."""
        self.call = self._marks = None
        self._watch(False)

    def _versions(self) -> int:
        """Count the writes so far to all that a step updates: fragments and states."""
        held = [fragment.param for fragment in self.fragments]
        states = [value for _, state in by_parameter(self.optimizer) for value in state.values()]
        counting = [each for each in (*held, *states) if isinstance(each, Tensor) and not each.is_inference()]
        return len(states) + sum([each._version for each in counting])

    def _nested(self) -> bool:
        """Tell if a running step of the same optimizer calls this one (`super().step()`: torch hooks both)."""
        if self.alone.stepping:
            return True
        return self._bound_now and self.call is not None and Call(_STEP) != self.call and self.call.running()

    def _begin(self) -> None:
        self.schedule.before_step()
        self.watcher.check_edits()
        self.report_divided()
        self.check_states()
        options, edits, number = self.options.words(), self.gradients.edits, self.group.number(f"step {self.number}")
        having, wrote = sorted(self.gradients.having(self._entries)), self.schedule.written.take()
        self.schedule.meet(
            "step", number, self.number, zlib.crc32(f"{options} {self._grouping}".encode()),
            zlib.crc32(repr((edits, having, wrote)).encode()),
            facts=lambda: "\n".join(
                [
                    f"{len(having)} of {len(self._entries)} parameters have gradients", f"scaled by {edits[-3:]}",
                    *(WROTE + each for each in wrote), *self.options.facts(),
                    f"digest of what is in which group {self._grouping:x}",
                ]
            ),
        )  # fmt: skip
        self.gradients.take_edits()
        self.gradients.keeper.flush()
        self.watcher.before_step()
        for bucket in () if any(each.early for each in self.subscribers) else self.buckets:
            bucket.land()
            bucket.rebind()
            if not self._by_itself(bucket) and bucket.edits.seed_master(asked=False):
                bucket.changed()

    def check_states(self) -> None:
        """Give fragments what the program has set as attributes of its parameters, and report states that it has set
        for these: a step uses fragments' states."""
        try:
            self.attributes.follow()
        except UserError as error:
            self.group.report(error)  # the others are on their way to this step
        added = set(map(id, self._holds())) if any(id(key) in self.own for key in self.optimizer.state) else set()
        strays: list[Any] = [key for key in self.optimizer.state if id(key) in self.own - added]
        for param in strays:
            del self.optimizer.state[param]
        if strays:
            self.group.report(
                StateError(
                    "optimizer.state was given a parameter of the model, and has states of this rank's parts",
                    where=f"optimizer {self.number}, parameter {strays[0]._zeroshard.name!r}, rank {self.group.rank}",
                    instead="optimizer.state[p] of the p in optimizer.param_groups; to change the states of some "
                    "parameters zero.unshard(), and shard again",
                )
            )

    def _check_options(self) -> None:
        try:
            self.watcher.check_options(self.optimizer, self.number)
        except UserError as error:
            self.group.report(error)  # the others are on their way to this step

    def _bind(self) -> None:
        """Step the buckets that are stepped one by one, then give all other fragments their averaged gradients. Do
        neither if this step is to be skipped."""
        self._skips = any(each.passes_over(self.buckets) for each in self.subscribers)
        filled = [accumulator for accumulator in self.gradients.accumulators if accumulator.filled]
        for work in [each.spread_average() for each in filled if not each.bucket.by_itself]:
            work.wait()
        having = self.gradients.having(self._entries)
        # Buckets that have gradients for this optimizer on any rank.
        updated = {id(e.accumulator.bucket) for e in self._entries if e.number in having and e.accumulator.filled}
        self._updated = [bucket for bucket in self.buckets if id(bucket) in updated and not self._skips]
        averages = self.averages
        shown = averages.hide(self.fragments)
        averages.drop_copies()  # of a step that an exception left
        before, self._bound_now = averages.begin(), True
        # The gradient exists on some rank, and the optimizer's groups show it: the program may clear either one.
        given = {which for which, entry in averages.entry_of.items() if which in shown and entry.number in having}
        one_by_one = [bucket for bucket in self._updated if self._by_itself(bucket)]
        self._together = [bucket for bucket in self._updated if bucket not in one_by_one]
        self._marks = -1 if one_by_one else self._versions()
        try:
            with told(one_by_one):
                for at, bucket in enumerate(one_by_one):
                    for coming in one_by_one[at : at + 2]:
                        self.states.ahead(coming)
                    self._step_alone(bucket, given)
        except TierError as error:
            self.group.report(error)  # the peers will meet this rank after the step
        except BaseException:  # the optimizer's own: as with plain torch, a step that raised may be repeated
            averages.take_back(before)
            for fragment in self.fragments:
                fragment.param.grad = shown.get(id(fragment.param))
            raise
        for bucket in self._together:
            averages.give(self.states.of(bucket), given)

    def _by_itself(self, bucket: Bucket) -> bool:
        """Tell if a bucket is stepped separately: offloaded ones, and, if the optimizer allows it, those whose step
        needs copies of gradients or whole matrices, so that not all copies exist at once."""
        return bucket.by_itself or (self.by_bucket and (bucket.upcast or self.alone.wants(bucket)))

    def _step_alone(self, bucket: Bucket, given: set[int]) -> None:
        """Step one bucket by the optimizer's own `step`, the gradients of all others hidden; then write it back."""
        accumulator = self.gradients.of_bucket(bucket.plan.index)
        assert accumulator is not None
        averaged = accumulator.averaged  # the resting sum is divided
        accumulator.sum.behind()
        try:
            self.alone.step(bucket, accumulator, given)
        finally:
            if accumulator.sum.on_demand or bucket.sums_come:
                accumulator.forget_step(averaged=averaged)

    @torch.no_grad()
    def _after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._nested():
            return
        self._watch(False)
        self._bound_now = False
        replaced = {bucket.plan.index for bucket in self.states.replaced(self.fragments)}
        self.edited |= replaced - {bucket.plan.index for bucket in self._updated}
        self.states.followed()
        self.gradients.uncalled.discard(self.number)
        for bucket in self._together:
            self.alone.write_back(bucket)
        if any(bucket.meets for bucket in self._updated):
            self.group.meet("end of step", self.group.numbers[f"step {self.number}"], self.number)
        publish(self._updated, overlap=self.schedule.settings.overlap)
        self.schedule.after_step()
        given = self.averages.begin()
        self._show(
            [each for each in self.fragments if self._skips or id(each.param) in given or not each.param.numel()]
        )
        self.averages.drop_copies()
        self.states.count(changed=True)
        self.states.steps.done += 1
        self.call = self._marks = None
        self.group.progress.steps += 1
        self.group.ledger.end("step")

    def _show(self, fragments: Sequence[Fragment]) -> None:
        self.averages.show(fragments, self.gradients.having(self._entries))

    def _zero_grad(self, original: Callable[..., None], set_to_none: bool = True) -> None:
        original(set_to_none=set_to_none)
        if set_to_none:
            self.gradients.hide(self._entries)
