"""The optimizer in backward: each bucket is stepped as its reduction lands, and its gradients' memory is given back.

A gradient then exists from the moment its sum begins until its bucket is updated: a rank holds one bucket's
gradients at a time. The price: no code can read or change gradients before they are used, so clipping, scaling, adding
up several backwards and skipping a step are refused. `optimizer.step()` ends the step that backward has made.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..comm.transport import Work
from ..engine.build.supported_optimizers import BY_TENSOR, by_bucket
from ..engine.gradients.accumulator import Accumulator
from ..engine.gradients.gradient import Gradients
from ..engine.gradients.subscriber import Subscriber
from ..engine.step.optim import Binding
from ..engine.step.schedule import Schedule
from ..engine.weights.bucket import Bucket, publish
from ..engine.weights.guard import weak
from ..engine.weights.transaction import Transaction
from ..errors import StateError, TierError, UserError
from ..hooks import Feature
from ..layout.partition import BucketPlan
from ..tiers.tier import DeviceTier, OnDevice, Rest, Tier

if TYPE_CHECKING:
    from ..engine.build.assembly import Assembly
    from ..engine.engine import Engine

_LOOP = "loss.backward(); optimizer.step(); optimizer.zero_grad()"
_ELSE = "or shard(...) without optimizer_in_backward=True"
# Ids of the last graph tasks that began at a GradScaler's loss; several, since each thread may run one.
_scaled: deque[int] = deque(maxlen=1024)


class Passing(OnDevice):
    """One state of one bucket that rests nowhere: it is in memory from the first `here()` until it is cleared."""

    on_demand = True

    def __init__(self, tier: DeviceTier, state: str, numel: int, dtype: torch.dtype) -> None:
        super().__init__(torch.empty(0, dtype=dtype, device=tier.device))
        self._of, self._state, self._numel = tier, state, numel
        self._none = self.tensor

    @contextlib.contextmanager
    def here(self, *, changed: bool = True, fresh: bool = False) -> Iterator[Tensor]:
        """Reserve memory at the first use, with arbitrary content: every element that is read must be written first."""
        if self.tensor is self._none:
            self.tensor = self._of.reserve(self._state, self._numel, self._none.dtype, zeroed=False)
        yield self.tensor

    def clear(self) -> None:
        """Give its memory back."""
        if self.tensor is not self._none:
            tensor, self.tensor = self.tensor, self._none
            self._of.give_back(self._state, tensor)


class PassingTier(Tier):
    """The device's memory, for as long as a state is needed."""

    name = "passing"
    on_device = True

    def __init__(self, tier: DeviceTier) -> None:
        self._tier = tier
        self.device = tier.device
        self.ledger = tier.ledger

    def rest(self, state: str, bucket: int, numel: int, dtype: torch.dtype) -> Rest:
        return Passing(self._tier, state, numel, dtype)


class InBackward(Subscriber):
    """Updates one model's weights inside backward, and refuses what that makes impossible.

    An update is part of a step, as an optimizer's own is: an exception may leave it half done (`Updates`).
    """

    early = True
    step: Updates
    second = "used by the optimizer in backward", "or shard(...) without optimizer_in_backward=True"

    def __init__(
        self, bindings: Sequence[Binding], gradients: Gradients, schedule: Schedule, check_edits: Callable[[], None]
    ) -> None:
        self.bindings = bindings
        self.gradients = gradients
        self.schedule = schedule
        self.group = gradients.group
        self._check_edits = check_edits
        self._unit_of = {id(bucket): unit for unit in schedule.units for bucket in unit.buckets}
        self._landed: list[tuple[Accumulator, set[int], Work]] = []  # the oldest first
        self.step = Updates()
        self._words: list[str] = []  # the options that it steps with, optimizer by optimizer
        self.awaited: set[int] = set()  # numbers of the optimizers whose step() is to end what a backward has done
        gradients.refuse = _gone
        cover_scalers()

    # --- a backward -------------------------------------------------------------------------------------------------

    def words(self, *, local: bool) -> str:
        """Return the optimizer options that this backward steps with; report what it may not do."""
        self._check_edits()
        trouble = self._trouble(local)
        if trouble is not None:
            self.group.report(trouble)
        for binding in self.bindings:
            binding.report_divided()
            binding.check_states()
        self._words = [binding.options.words() for binding in self.bindings]
        return repr(self._words)

    def _trouble(self, local: bool) -> StateError | None:
        number = self.group.numbers["backward"] + 1
        where = f"rank {self.group.rank}, backward {number}, step {self.group.progress.steps + 1}"
        shown = [entry for entry in self.gradients.entries if entry.updater is not None]
        if self.awaited:
            which = f"optimizer {min(self.awaited)}" if len(self.bindings) > 1 else "the optimizer"
            return StateError(
                "a second backward in one step: with the optimizer in backward the first has updated the weights",
                where=where,
                expected=f"one backward per step: {_LOOP}",
                got=f"no step() of {which} since the last backward",
                instead=f"call it; in place of adding up micro-batches, larger batches, {_ELSE}",
            )
        if self.gradients.having(shown):
            return StateError(
                "gradients were not cleared, and with the optimizer in backward nothing can be added to them",
                where=where,
                expected=f"one backward per step: {_LOOP}",
                instead=f"optimizer.zero_grad() before this backward, {_ELSE}",
            )
        if local:
            what, instead = "no_sync() adds up gradients", "leave no_sync() out"
        elif torch._C._current_graph_task_id() in _scaled:
            what, instead = "a GradScaler scaled this loss", "Precision(param_dtype=torch.bfloat16), which needs none"
        elif self.schedule.averages_in:
            what, instead = "the weights are the averages", "leave average.swapped() first"
        elif any(unit.open_calls for unit in self.schedule.units):
            what, instead = "a forward of the model is running", "call backward after the model's forward"
        else:
            return None
        return StateError(
            f"{what}, and with the optimizer in backward each gradient is used as it comes",
            where=where,
            instead=f"{instead}, {_ELSE}",
        )

    def prepare(self) -> None:
        """Follow groups and clear gradients, once all ranks are at the same backward with the same options."""
        for binding in self.bindings:
            binding.follow_groups()
        self.gradients.hide(self.gradients.entries)  # also gradients cleared on one side only, or of no optimizer

    def averaged(self, accumulator: Accumulator, having: set[int]) -> None:
        """Update this rank's part of a bucket; if all ranks update all of it, gather its average first."""
        bucket = accumulator.bucket
        if bucket.placements.optimizer or bucket.team.size == 1:
            self._update(accumulator, having)
            return
        with accumulator.sum.here():  # also of a bucket of which this rank has no part
            self._landed.append((accumulator, having, accumulator.spread_average()))

    def due(self, allowed: int) -> Work | None:
        return self._landed[0][2] if len(self._landed) > allowed else None

    def next(self) -> None:
        accumulator, having, work = self._landed[0]
        work.wait()
        self._update(accumulator, having)
        self._landed.pop(0)

    @torch.no_grad()
    def _update(self, accumulator: Accumulator, having: set[int]) -> None:
        bucket, unit = accumulator.bucket, self._unit_of[id(accumulator.bucket)]
        bindings = [binding for binding in self.bindings if _updates(binding, accumulator, having)]
        if bindings:
            bucket.land()
            bucket.rebind()
            if not bucket.resident and not unit.pinned:  # its weights are not needed any more in this backward
                bucket.close()
                bucket.release()
            bucket.edits.keep(asked=False)  # the update has masters follow, and makes older graphs stale
            self.step.buckets.append(bucket)
            for binding in bindings:
                try:
                    _step(binding, accumulator, having)
                except TierError as error:
                    self.group.report(error)  # the peers have further reductions to get through
            bucket.gathered.current &= bucket.resident
        accumulator.clear()

    def ended(self) -> None:
        """Send all that this backward has updated to every rank."""
        publish(sorted(self.step.buckets, key=_index), overlap=self.schedule.settings.overlap)
        for unit in self.schedule.units:
            if unit.pinned:
                unit.gather(wait=True)
        if self.step.begun:
            self.awaited = {binding.number for binding in self.bindings}
        if self.group.failed is None:  # else the step stays half done, and all ranks hear of it at their next meeting
            self.step.abandon()

    # --- a step -----------------------------------------------------------------------------------------------------

    def before_step(self, number: int, *, closure: bool) -> None:
        """Report a call of `optimizer.step()` that asks for what cannot be done any more."""
        where, words = f"optimizer {number}, rank {self.group.rank}", self.bindings[number].options.words()
        mine = [entry for entry in self.gradients.entries if entry.updater == number]
        trouble: StateError | None = None
        if closure:
            trouble = StateError(
                "a closure asks for more than one backward in a step, and the optimizer is in backward",
                where=where,
                instead=f"{_LOOP}, {_ELSE}",
            )
        elif number in self.awaited and words != self._words[number]:
            trouble = StateError(
                "the options of an optimizer changed between backward and step(), and backward has used them already",
                where=where,
                expected=self._words[number],
                got=words,
                instead=f"set learning rates before backward: scheduler.step() after optimizer.step(); {_ELSE}",
            )
        elif number not in self.awaited and self.gradients.having(mine):
            trouble = StateError(
                "a second step() after one backward: its gradients were used, and are gone",
                where=where,
                expected=_LOOP,
                instead=f"one step() for each backward, {_ELSE}",
            )
        if trouble is not None:
            self.group.report(trouble)

    def step_begun(self, number: int) -> None:
        self.awaited.discard(number)

    def passes_over(self, buckets: Sequence[Bucket]) -> bool:
        return True  # backward has made the update

    def between_steps(self, what: str) -> None:
        """Refuse a call if backward has updated and step() has not ended the step."""
        if self.awaited and what != "loading":
            raise StateError(
                f"{what} between backward, which has updated the weights, and optimizer.step(), which ends the step",
                where=f"rank {self.group.rank}, step {self.group.progress.steps + 1}",
                instead="call it after optimizer.step()",
            )

    def loaded(self) -> None:
        self.awaited.clear()

    # --- an exception -----------------------------------------------------------------------------------------------

    def abandon(self) -> None:
        self._landed.clear()


class Updates(Transaction):
    """The buckets that a backward has updated and not sent yet. An exception does not drop them: the end of the
    backward does."""

    def __init__(self) -> None:
        self.buckets: list[Bucket] = []

    @property
    def begun(self) -> bool:
        return bool(self.buckets)

    def running(self) -> bool:
        return True

    def torn(self) -> bool:
        return self.begun

    def abandon(self) -> None:
        self.buckets.clear()


def _gone(name: str, what: object) -> StateError:
    return StateError(
        "a gradient is gone: with the optimizer in backward it was used and its memory given back",
        where=f"gradient of {name!r}",
        expected="nothing between loss.backward() and optimizer.step() that reads, clips or scales gradients, and "
        "zero_grad() with set_to_none=True",
        got=f"{what}",
        instead="leave it out; or shard(...) without optimizer_in_backward=True",
    )


def _updates(binding: Binding, accumulator: Accumulator, having: set[int]) -> bool:
    """Tell if an optimizer updates a parameter of this bucket that has a gradient. having: numbers of the gradients."""
    return any(entry.updater == binding.number and entry.number in having for entry in accumulator.entries)


def _step(binding: Binding, accumulator: Accumulator, having: set[int]) -> None:
    """Step one bucket by its optimizer."""
    given = {which for which, entry in binding.averages.entry_of.items() if entry.number in having}
    binding.alone.step(accumulator.bucket, accumulator, given)
    binding.averages.begin()  # the averages that it has given are used up
    binding.states.followed(accumulator.bucket)
    binding.states.count(changed=True)


def _index(bucket: Bucket) -> int:
    return bucket.plan.index


def check_in_backward(optimizers: list[Any]) -> None:
    """Refuse optimizers that need all gradients at once, and a call without an optimizer."""
    if not optimizers:
        raise UserError(
            "optimizer_in_backward=True without an optimizer: nothing is stepped",
            instead="shard(model, optimizer, optimizer_in_backward=True)",
        )
    for optimizer in optimizers:
        if not by_bucket(optimizer):
            raise UserError(
                "the optimizer in backward goes bucket by bucket, which this optimizer may not allow",
                where=type(optimizer).__name__,
                expected=f"one of {sorted(BY_TENSOR)}, or an attribute elementwise = True on the class",
                instead="leave optimizer_in_backward=True out, or set elementwise = True if each element is updated by "
                "itself",
            )


def cover_scalers() -> None:
    """Hook every loss that a `GradScaler` scales, so that its backward is known: scaled gradients must not be used.

    The class is changed, for the whole process: a scaler knows no model, so its objects are not known here, and may be
    made before or after `shard`. The hook writes one number, which only a backward of a model with its optimizer in
    backward reads.
    """
    scaler: Any = torch.amp.GradScaler
    plain = scaler.scale
    if hasattr(plain, "covered"):
        return

    @functools.wraps(plain)
    def scale(self: Any, outputs: Any) -> Any:
        scaled = plain(self, outputs)
        for leaf in tree_leaves(scaled) if self.is_enabled() else ():
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(_note_scaled)
        return scaled

    scale.covered = True  # type: ignore[attr-defined]
    scaler.scale = scale


def _note_scaled(grad: Tensor) -> None:
    _scaled.append(torch._C._current_graph_task_id())


class OptimizerInBackwardFeature(Feature):
    name = "the optimizer in backward"
    page = "offload.md#the-optimizer-in-backward"

    def check(self, assembly: Assembly, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        if assembly.asked.in_backward:
            check_in_backward([*optimizers])

    def tiers(self, assembly: Assembly, plan: BucketPlan, at: dict[str, Tier]) -> dict[str, Tier]:
        return {"gradients": PassingTier(assembly.tier)} if assembly.asked.in_backward else {}

    def subscriber(self, engine: Engine) -> InBackward | None:
        if not engine.asked.in_backward:
            return None
        return InBackward(engine.bindings, engine.gradients, engine.schedule, weak(engine.check_edits))


FEATURE = OptimizerInBackwardFeature()
