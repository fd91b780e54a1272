"""`Zero.average`: a moving average of the weights, sharded as the optimizer's states are, and resting where they do."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..engine.gradients.subscriber import Subscriber
from ..engine.step.schedule import Schedule
from ..engine.weights.bucket import Bucket, publish
from ..engine.weights.flat import Flat
from ..engine.weights.guard import weak
from ..engine.weights.modes import unseen
from ..errors import StateError, UserError
from ..hooks import Feature
from ..layout.partition import Slot
from ..tiers.tier import Part

if TYPE_CHECKING:
    from ..engine.engine import Engine

EXCHANGING = "exchanging weights and averages"  # a meeting


class MovingAverage:
    """Keeps mean = mean + (weights - mean) * (1 - decay) for every trained parameter; the first mean is the weights.

    It averages what the optimizer updates, masters where there are any, in its dtype: each rank its own part, without
    communication. The bits are those of `torch.optim.swa_utils.AveragedModel` with `get_ema_multi_avg_fn(decay)`.
    """

    def __init__(
        self,
        decay: float,
        buckets: list[Bucket],
        schedule: Schedule,
        optimizers: Iterable[torch.optim.Optimizer],
        meet: Callable[[str], None],
    ) -> None:
        """meet: has all ranks agree that they exchange now, outside forward and backward."""
        if not isinstance(decay, (int, float)) or not 0 <= decay < 1:
            expected = "a number from 0 to less than 1"
            raise UserError("no decay of an average", expected=expected, got=repr(decay), instead="zero.average(0.999)")
        schedule.meet("average()", 1, zlib.crc32(repr(float(decay)).encode()))
        self.decay = float(decay)
        self.updates = 0
        self._buckets = buckets
        self._meet = meet
        self._overlap = schedule.settings.overlap
        self._means: dict[int, Flat] = {}  # by bucket
        self._schedule = schedule
        for bucket in self._trained():
            self.mean(bucket)
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(lambda *_: self.refuse_swapped("optimizer.step()"))

    def _trained(self) -> list[Bucket]:
        return [bucket for bucket in self._buckets if bucket.gradients is not None]

    def mean(self, bucket: Bucket) -> Flat:
        """Return the average of a bucket, where it rests. It is reserved at the first call."""
        index = bucket.plan.index
        if index not in self._means:
            self._means[index] = bucket.reserve("average", bucket.updating.dtype, bucket.placements.optimizer)
            if self.updates:  # unfrozen since: the average of weights that did not change is these weights
                with self._means[index].here(fresh=True) as mean, bucket.updating.here(changed=False):
                    mean.copy_(bucket.target)
        return self._means[index]

    def part(self, bucket: Bucket, slot: Slot, start: int, stop: int) -> Part | None:
        """Return elements [start, stop) of a parameter's average, wherever they rest; None if it was never trained."""
        if bucket.gradients is None or bucket.plan.index < 0:
            return None
        return self.mean(bucket).part(slot.start + start, slot.start + stop)

    @unseen()
    @torch.no_grad()
    def update(self) -> None:
        """Take the weights as they are now into the average: after each `optimizer.step()`, on every rank."""
        self.refuse_swapped("average.update()")
        for bucket in self._trained():
            first, last = bucket.updated
            parts = [slot.slice_of(first, last) for slot in bucket.plan.slots]
            parts = [part for part in parts if part.stop > part.start]
            flat = self.mean(bucket)
            with flat.here(fresh=not self.updates) as mean, bucket.updating.here(changed=False):
                means, weights = ([whole[part] for part in parts] for whole in (mean, bucket.target))
                if not self.updates:
                    mean.copy_(bucket.target)
                elif parts:  # tensor by tensor: a kernel's last elements may round otherwise than those before
                    torch._foreach_lerp_(means, weights, 1 - self.decay)
            flat.behind()
        self.updates += 1

    @contextlib.contextmanager
    def swapped(self) -> Iterator[None]:
        """Use the averages as the model's weights inside, on every rank, to evaluate or `zero.export`; then swap back.

        No step and no `zero.save` inside. Collective: every rank enters and leaves.
        """
        self.refuse_swapped("average.swapped()")
        if not self.updates:
            raise StateError("nothing was averaged yet", instead="average.update() after optimizer.step()")
        self._exchange()
        self._schedule.averages_in = True
        try:
            yield
        finally:
            self._exchange()
            self._schedule.averages_in = False

    def refuse_swapped(self, what: str) -> None:
        if self._schedule.averages_in:
            raise StateError(f"{what} while the weights are the averages", instead="leave average.swapped() first")

    @unseen()
    @torch.no_grad()
    def _exchange(self) -> None:
        self._meet(EXCHANGING)
        trained = self._trained()
        for bucket in trained:
            with self.mean(bucket).here() as mean, bucket.updating.here():
                kept: Tensor = bucket.target.clone()
                bucket.target.copy_(mean)
                mean.copy_(kept)
                if bucket.codec.beside:
                    with bucket.parameters.here(fresh=bucket.rests == bucket.updated):
                        bucket.write_back()
        publish(trained, overlap=self._overlap, outside=True)


class _Averaging(Subscriber):
    """The average's subscriber: takes part when all ranks meet."""

    def __init__(self, average: MovingAverage) -> None:
        self._average = average

    @property
    def mark(self) -> int:
        return self._average.updates

    def between_steps(self, what: str) -> None:
        if what in ("saving", "loading"):
            self._average.refuse_swapped(what)


class MovingAverageFeature(Feature):
    name = "the moving average"
    page = "guide.md#weights"

    def average(self, decay: float, engine: Engine) -> MovingAverage:
        optimizers = [binding.optimizer for binding in engine.bindings]
        if engine.precision.rounds_updates:
            raise UserError(
                "an average moves by less than bfloat16 shows, and parameters that are rounded at random have no "
                "float32 copy",
                where="zero.average(...)",
                got='Precision(master_dtype=torch.bfloat16, rounding="stochastic")',
                instead="Precision() without master_dtype",
            )
        made = MovingAverage(decay, engine.buckets, engine.schedule, optimizers, weak(engine.meet_for_checkpoint))
        engine.reduction.subscribers.append(_Averaging(made))
        return made

    def met(self, what: str, marks: Sequence[int]) -> None:
        if what != "loading" and len(set(marks)) > 1:
            raise StateError(
                "the ranks averaged different numbers of steps",
                got=[*marks],
                instead="zero.average(decay) and average.update() on every rank",
            )


FEATURE = MovingAverageFeature()
