"""The `.grad` of an optimizer's fragments: inside a step the averages, else what the model's parameters show."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from ...arithmetic.sums import average_
from ...errors import StateError
from ..gradients.accumulator import Accumulator, Entry
from ..gradients.gradient import Gradients
from ..gradients.sharded_grad import ShardedGrad
from ..weights.bucket import Bucket
from .fragment import Fragment


class Averages:
    """The gradients of one optimizer's fragments on this rank."""

    def __init__(self, gradients: Gradients) -> None:
        self._gradients = gradients
        self.entry_of: dict[int, Entry] = {}  # by fragment's id
        self.given: dict[int, Tensor] = {}  # by fragment's id, the average that the running step has given it
        self._views: dict[int, Tensor] = {}  # by fragment's id, where its averaged gradient always lies
        self._copies: dict[int, tuple[Bucket, Tensor]] = {}  # by bucket, of its averages in the fragments' dtype

    def begin(self) -> dict[int, Tensor]:
        """Begin a step, which has given no average yet. Returns what the last step gave, for `take_back`."""
        before, self.given = self.given, {}
        return before

    def take_back(self, before: dict[int, Tensor]) -> None:
        """Restore what the last step gave (`before`), because this step raised and may be repeated."""
        self.given = before

    def enter(self, entries: Iterable[tuple[Fragment, Entry | None]]) -> None:
        """Set the fragments, each with the entry of the parameter whose gradient it has a part of."""
        self.entry_of, self._views = {}, {}
        for fragment, entry in entries:
            if entry is not None:
                self.entry_of[id(fragment.param)] = entry
                self._gradients.elements[id(fragment.param)] = fragment.elements
                if not any(param is fragment.param for param in entry.fragments):
                    entry.fragments.append(fragment.param)
                    if self._gradients.having([entry]):
                        self._gradients.show([entry])

    def hide(self, fragments: Sequence[Fragment]) -> dict[int, Tensor]:
        """Take the gradients off the fragments, and return them by the fragment's id."""
        grads = [fragment.param.grad for fragment in fragments]
        for fragment, grad in zip(fragments, grads, strict=True):
            if not (grad is None or isinstance(grad, ShardedGrad) or grad is self.given.get(id(fragment.param))):
                raise StateError(
                    "a gradient in optimizer.param_groups was replaced by a tensor",
                    where=f"parameter {fragment.slot.name!r}",
                    instead="edit p.grad of the model's parameter in place",
                )
        for fragment in fragments:
            fragment.param.grad = None
        return {id(each.param): grad for each, grad in zip(fragments, grads, strict=True) if grad is not None}

    def show(self, fragments: Iterable[Fragment], having: set[int]) -> None:
        """Let fragments show what the model's parameters show. having: the numbers of entries that have a gradient."""
        for fragment in fragments:
            entry = self.entry_of.get(id(fragment.param))
            if entry is not None:
                has = entry.number in having
                fragment.param.grad = self._gradients.shown(entry, fragment.param, fragment.elements) if has else None

    def give(self, fragments: Iterable[Fragment], which: set[int]) -> None:
        """Give averages to the fragments that are to have one: `which`, by id."""
        for fragment in fragments:
            param, own = fragment.param, id(fragment.param)
            # An empty fragment only stands in for a group: Muon, for one, refuses its shape.
            if own in which and param.numel():
                known = self._views.get(own)
                grad = self._average(fragment, self.entry_of[own]) if known is None else known
                self.given[own] = param.grad = grad

    def _average(self, fragment: Fragment, entry: Entry) -> Tensor:
        """Return a fragment's averaged gradient in its shape, dtype and device: a view of the accumulator if it can be,
        made once."""
        param, accumulator = fragment.param, entry.accumulator
        own, part = accumulator.for_step, fragment.own
        if own.device != param.device:
            return self._copied(accumulator, own, param)[part].view(param.shape)
        if accumulator.sum.on_demand and not accumulator.sum.rest.on_device:
            return own[part].to(param.dtype).view(param.shape)
        if own.dtype != param.dtype:
            return self._copied(accumulator, own, param)[part].view(param.shape)
        average = own[part].view(param.shape)
        return average if accumulator.sum.on_demand else self._views.setdefault(id(param), average)

    def _copied(self, accumulator: Accumulator, own: Tensor, like: Tensor) -> Tensor:
        """Return a copy of a bucket's averages in the dtype and on the device of `like`, kept until the step is over.

        Its memory is not from malloc: the optimizer's first step would allocate states above it, and freeing it would
        leave a hole of its size in the heap, for good.
        """
        bucket = accumulator.bucket
        if bucket.plan.index not in self._copies:
            self._copies[bucket.plan.index] = bucket, self._copy(accumulator, own, like)
        return self._copies[bucket.plan.index][1]

    def _copy(self, accumulator: Accumulator, own: Tensor, like: Tensor) -> Tensor:
        bucket, tier = accumulator.bucket, accumulator.bucket.tier
        if like.device != tier.device:
            return tier.fetch(own, like.dtype)
        copy = tier.reserve("upcast", own.numel(), like.dtype, zeroed=False)
        if own.device == like.device:
            return copy.copy_(own)
        if bucket.sums_come:
            accumulator.sum.copy(bucket.updated[0], copy)
            if not accumulator.averaged:
                average_(copy, accumulator.divisor)
            return copy
        tier.send(copy, own)
        return copy

    def drop_copies(self) -> None:
        while self._copies:
            bucket, copy = self._copies.popitem()[1]
            if copy.device == bucket.tier.device:
                bucket.tier.give_back("upcast", copy)
