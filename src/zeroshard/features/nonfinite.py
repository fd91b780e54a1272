"""The first NaN or infinity: on which rank, in which step, micro-batch, parameter and element.

The search is where it costs least: in this rank's shard of a bucket's sum, once its reduction has landed (a sum over a
NaN or an infinity is not finite). All ranks' contributions are still in memory then, so the rank that it came from is
known without a second run. A finding counts until its gradient is cleared, or edited to a finite number. Parameters are
searched only once a gradient is not finite: a spoiled parameter that is used spoils gradients at once.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..arithmetic.sums import finite, simulated
from ..comm.agreement import Group
from ..device import ask
from ..engine.gradients.accumulator import Accumulator
from ..engine.gradients.subscriber import Subscriber
from ..engine.weights.bucket import Bucket
from ..errors import NotFiniteError
from ..hooks import Feature

if TYPE_CHECKING:
    from ..engine.engine import Engine

IN_A_ROW = 10  # skipped steps after which every further ten are warned of
log = logging.getLogger("zeroshard")


class Finding(NamedTuple):
    """The first NaN or infinity that was found.

    micro_batch: which backward since the last step, from 1; 0 for a parameter, which was spoiled before that step.
    rank: the rank whose contribution it was; -1 if every contribution was finite and only their sum is not, or if
        `Comm(reduce="native")` did not show us the contributions.
    element: of the parameter, counted flat.
    """

    step: int
    micro_batch: int
    rank: int
    parameter: str
    element: int
    value: str

    def __str__(self) -> str:
        what = f"element {self.element} of parameter {self.parameter!r} is {self.value}"
        if not self.micro_batch:
            return f"{what} since before step {self.step}, by an update or an edit, on rank {self.rank}"
        whose = f"rank {self.rank}" if self.rank >= 0 else "the sum over the ranks"
        return f"{what} in the gradient of micro-batch {self.micro_batch} of step {self.step}, on {whose}"


def _place(finding: Finding) -> tuple[str, int, int]:
    return finding.parameter, finding.element, finding.micro_batch


def first_nonfinite(flat: Tensor) -> int | None:
    """Return the index of the first element of a 1-D tensor that is NaN or infinite; None if all are finite."""
    if simulated(flat) or not flat.numel() or ask(flat.sum(dtype=torch.float32).isfinite()):
        return None  # a finite sum has only finite terms; the reverse need not hold, since sums overflow
    bad = flat.isfinite().logical_not_()
    return int(ask(bad.to(torch.uint8).argmax())) if ask(bad.any()) else None


class Finite(Subscriber):
    """The first NaN or infinity that this rank has seen, and what all ranks do about it."""

    def __init__(self, group: Group, action: str) -> None:
        self.group = group
        self.action = action
        self.looks = action != "ignore"
        self.skipped = 0  # steps, also those that a GradScaler skipped
        self.last: Finding | None = None  # that the ranks have agreed on
        self._in_a_row = 0
        self._micro_batch = 0
        self._seen: Finding | None = None  # in what this rank owns
        self._passed: dict[tuple[str, int, int], tuple[Accumulator, Finding]] = {}  # in sums that this rank hands on
        self._lies: tuple[Accumulator, int, int] | None = None  # where `_seen` lies: slot and element of its fragment

    def begin(self) -> None:
        """Count a backward that begins, and forget a finding whose gradient is gone."""
        self._micro_batch += 1
        self._forgive()

    def _forgive(self) -> None:
        self._passed = {place: found for place, found in self._passed.items() if found[0].filled}
        if self._lies is not None:
            accumulator, index, at = self._lies
            with accumulator.sum.here(changed=False):
                if ask(accumulator.fragment(index)[at].isfinite()) or not accumulator.filled:
                    self._seen = self._lies = None

    def summed(self, accumulator: Accumulator, pieces: Sequence[Tensor], total: Tensor) -> None:
        """Look for a NaN or infinity in a sum that this rank owns; in one that it hands on, note it for the owners,
        which can no longer see whose it was."""
        if not self.looks:
            return
        if accumulator.sum.by_part and pieces:
            plan, seat = accumulator.plan, accumulator.bucket.team.seat
            begin, end = plan.shard(seat.position)
            if self._is_finite(total, [slot.slice_of(begin, end) for slot in plan.slots]):
                return
            for first, last in plan.portions(seat):
                if found := self._find(accumulator, pieces, total, begin, first, last):
                    self._passed.setdefault(_place(found[0]), (accumulator, found[0]))
        elif self._seen is None:
            first, last = accumulator.sum.owned
            if found := self._find(accumulator, pieces, total, first, first, last):
                self._seen, index, at = found
                self._lies = accumulator, index, at

    def _find(
        self, accumulator: Accumulator, pieces: Sequence[Tensor], total: Tensor, begin: int, first: int, last: int
    ) -> tuple[Finding, int, int] | None:
        """Return what is found in bucket elements [first, last), its slot, and the element of that slot's fragment.

        pieces, total: they hold these elements and others, from bucket element `begin` on.
        """
        bucket, slots = accumulator.bucket, accumulator.plan.slots
        seat, total = bucket.team.seat, total[first - begin : last - begin]
        if self._is_finite(total, [slot.slice_of(first, last) for slot in slots]):
            return None
        for index, slot in enumerate(slots):
            part, where = slot.within(first, last), slot.slice_of(first, last)
            fragment = total[where]
            at = first_nonfinite(fragment)
            if at is not None:
                rank = -1
                whose = seat.members(self.group.rank) if len(pieces) == seat.size else range(self.group.ranks)
                if len(pieces) == len(whose):
                    there = slice(where.start + first - begin, where.stop + first - begin)
                    theirs = [float(ask(piece[there][at])) for piece in pieces]
                    found = (position for position, value in enumerate(theirs) if not abs(value) < torch.inf)
                    rank = next((whose[position] for position in found), -1)
                step, value = self.group.progress.steps + 1, str(float(ask(fragment[at])))
                element = bucket.among(slot).element(part.start + at)
                return Finding(step, self._micro_batch, rank, slot.name, element, value), index, at
        return None

    @staticmethod
    def _is_finite(total: Tensor, places: Sequence[slice]) -> bool:
        """Tell if gradients are finite. Padding may hold anything, and is left out."""
        found = [part for part in map(total.__getitem__, places) if part.numel()]
        if not found or simulated(total):
            return True
        if total.is_cpu:  # where sums are the faster way
            return all(first_nonfinite(part) is None for part in found)
        return bool(ask(finite(found)))

    def _spoiled(self, buckets: Sequence[Bucket]) -> Finding | None:
        """Find the first NaN or infinity among this rank's parameters."""
        for bucket in buckets:
            with bucket.updating.here(changed=False):
                found = self._spoiled_in(bucket) if bucket.target.is_floating_point() else None
            if found is not None:
                return found
        return None

    def _spoiled_in(self, bucket: Bucket) -> Finding | None:
        first, last = bucket.updated
        for slot in bucket.plan.slots:
            part = slot.within(first, last)
            fragment = bucket.target[slot.slice_of(first, last)]
            at = first_nonfinite(fragment) if part.numel else None
            if at is not None:
                value = str(float(ask(fragment[at])))
                element = bucket.among(slot).element(part.start + at)
                return Finding(self.group.progress.steps + 1, 0, self.group.rank, slot.name, element, value)
        return None

    def passes_over(self, buckets: Sequence[Bucket]) -> bool:
        """Decide, before an update, if it is skipped: the same answer on every rank, or the same `NotFiniteError`."""
        self._micro_batch = 0
        if not self.looks:
            return False
        self._forgive()
        if not any(self.group.flags(bytes([self._seen is not None]))):
            self._in_a_row = 0
            self._passed.clear()
            return False
        passed = [found for _, found in self._passed.values()]
        told: list[Any] = self.group.describe((self._spoiled(buckets) or self._seen, passed))
        self._passed.clear()
        found = [Finding(*own) for own, _ in told if own is not None]
        # Each replica has an owner of the element. The owner whose own team sent the value knows its rank; or, where
        # replicas own parts, a rank that has handed it on.
        self.last = min(found, key=lambda finding: (finding.micro_batch, finding.rank < 0))
        for witness in (Finding(*each) for _, theirs in told for each in theirs):
            if self.last.rank < 0 <= witness.rank and _place(witness) == _place(self.last):
                self.last = witness
        if self.action == "raise" or not self.last.micro_batch:
            raise NotFiniteError(
                "a gradient is not finite: nothing was updated"
                if self.last.micro_batch
                else "a parameter is not finite any more",
                where=str(self.last),
                instead='fix that, or Precision(nonfinite="skip") to pass over such steps'
                if self.last.micro_batch
                else "zero.load(...) the last checkpoint, and a smaller learning rate",
            )
        self._skip(str(self.last))
        return True

    def judge(self, overflow: bool) -> None:
        """Hear a `GradScaler`'s verdict, the same on every rank: on overflow it will skip the step."""
        if overflow:
            self._skip("its scaled gradients are not finite")
        else:
            self._in_a_row = 0

    def _skip(self, why: str) -> None:
        """Count a step that all ranks pass over, and log it on rank 0."""
        self.skipped += 1
        self._in_a_row += 1
        if self.group.rank == 0:
            log.warning("step %d was skipped: %s", self.group.progress.steps + 1, why)
            if self._in_a_row % IN_A_ROW == 0:
                log.warning("%d steps in a row were skipped: this model is not training", self._in_a_row)


class NonfiniteFeature(Feature):
    name = "the search for NaN, and the count of steps passed over"
    page = "precision.md"

    def subscriber(self, engine: Engine) -> Finite:
        return Finite(engine.group, engine.asked.nonfinite)


FEATURE = NonfiniteFeature()
