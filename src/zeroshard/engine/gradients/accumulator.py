"""The running sum of one bucket's gradients, and an entry for each parameter that adds to it.

After backward every rank holds its shard of each bucket's running sum (`Accumulator.sum`), at every stage; or, where
the optimizer is sharded over all replicas, its part of the shard.

The sum is divided by the number of ranks late, because (a / 3) * 3 is not a: reading divides a copy, only editing or
stepping divides in place. Where the division loses no bits (`divides_exactly`), each sum is divided as it lands.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...arithmetic.sums import average_
from ...comm.transport import Work
from ...layout.partition import Slot
from ..weights.bucket import Bucket
from ..weights.flat import Flat


class Holds(enum.Enum):
    """What the memory of a bucket's sum holds of the gradients added since they were last cleared."""

    NOTHING = enum.auto()  # arbitrary numbers: no gradient was added yet
    SUM = enum.auto()
    AVERAGE = enum.auto()  # the sum divided by the number of ranks
    GATHERED = enum.auto()  # the average, of all ranks' shards (replicated optimizer state needs it)


_LEGAL = {
    (Holds.NOTHING, Holds.SUM),  # a sum landed
    (Holds.SUM, Holds.SUM),
    (Holds.AVERAGE, Holds.SUM),  # it is added to
    (Holds.GATHERED, Holds.SUM),
    (Holds.NOTHING, Holds.AVERAGE),  # a sum landed, divided
    (Holds.SUM, Holds.AVERAGE),
    (Holds.AVERAGE, Holds.AVERAGE),
    (Holds.GATHERED, Holds.AVERAGE),  # it was edited
    (Holds.AVERAGE, Holds.GATHERED),
    *((holds, Holds.NOTHING) for holds in Holds),
}


class Accumulator:
    """The running sum of one bucket's gradients since they were last cleared: what this rank owns of it."""

    def __init__(self, bucket: Bucket, divisor: int) -> None:
        """divisor: what the sum is divided by: the number of ranks, unless a feature sets another number of addends."""
        assert bucket.gradients is not None
        self.bucket = bucket
        self.plan = bucket.plan
        self.sum: Flat = bucket.gradients
        self.entries: list[Entry] = []  # of the bucket's parameters
        self.divisor = divisor
        self.holds = Holds.NOTHING
        self.rounded = False  # has a step divided a copy of the sum, while what rests is still undivided?
        self.aside: Tensor | None = None  # a copy of what is owned of `sum`, while a contribution uses the memory
        self.blocks: Any = None  # the map from blocks to entries, made when a norm is first asked for: `norms.py`

    def _move(self, holds: Holds) -> None:
        assert (self.holds, holds) in _LEGAL, f"{self.plan.index}: {self.holds} -> {holds}"
        self.holds = holds

    @property
    def filled(self) -> bool:
        """True once something was added since gradients were cleared."""
        return self.holds is not Holds.NOTHING

    @property
    def averaged(self) -> bool:
        """True if the sum has been divided."""
        return self.holds in (Holds.AVERAGE, Holds.GATHERED)

    @property
    def own(self) -> Tensor:
        """The elements of the sum that this rank owns, 1-D; inside sum.here()."""
        return self.sum.own if self.aside is None else self.aside

    def _elsewhere(self, take: Callable[[int, torch.dtype], Tensor]) -> Tensor | None:
        """Take memory for the owned elements; return None if the sum rests on the device."""
        first, last = self.bucket.owned
        return None if self.sum.on_device else take(last - first, self.sum.dtype)

    def landing(self, take: Callable[[int, torch.dtype], Tensor]) -> Tensor:
        """Return memory for an average that replaces the owned elements: the sum's own, if that is on the device."""
        found = self._elsewhere(take)
        return self.sum.own if found is None else found

    def kept(self, take: Callable[[int, torch.dtype], Tensor]) -> Tensor:
        """Return the owned elements of the undivided sum, on the device: in the sum's memory, or in memory from `take`.

        Only this rank knows if its sum is divided: an edit of some parameters divides it on the ranks that hold them.
        """
        found = self._elsewhere(take)
        if found is None:
            self.undo_average()
            return self.own
        self.sum.copy(self.sum.owned[0], found)
        if self.averaged or self.rounded:
            self._multiply(found)
        return found

    def fragment(self, index: int) -> Tensor:
        """Return this rank's elements of one slot of the sum, 1-D (possibly empty); inside sum.here()."""
        return self.own[self.plan.slots[index].slice_of(*self.bucket.owned)]

    def read(self, index: int) -> Tensor:
        """Return a copy of this rank's elements of one slot of the average, 1-D."""
        with self.sum.here(changed=False):
            found = self.fragment(index).clone()
        if not self.averaged:
            average_(found, self.divisor)
        return found

    def zero(self, index: int) -> None:
        if self.filled:  # else there is no sum, and its memory may hold a contribution
            with self.sum.here():
                self.fragment(index).zero_()

    def average(self, *, kept: bool = True) -> None:
        """Turn the sum into the average, in place. If not `kept`, it is not written back: `forget_step` must follow."""
        if self.holds is Holds.SUM:
            with self.sum.here(changed=kept):
                average_(self.sum.own, self.divisor)
            self._move(Holds.AVERAGE)

    def land(self, *, averaged: bool) -> None:
        """Take note that a sum has landed. averaged: divided already."""
        self._move(Holds.AVERAGE if averaged else Holds.SUM)

    def edit(self) -> None:
        """Turn the sum into the average, because this rank is about to edit it: other ranks' copies become outdated."""
        self.average()
        if self.filled:
            self._move(Holds.AVERAGE)

    def forget_step(self, *, averaged: bool) -> None:
        """Drop a step's changes to the sum in memory, without writing them to where it rests: nothing else needs them.

        averaged: is what rests the average, and not the undivided sum that the step divided?
        """
        self.sum.rest.forget()
        if self.filled:  # else an exception has ended the step, and all gradients were dropped
            self._move(Holds.AVERAGE if averaged else Holds.SUM)
            self.rounded = not averaged

    def spread_average(self, *, kept: bool = True) -> Work:
        """Launch the gather of the whole average, if the optimizer's state is replicated and so needs it."""
        self.average(kept=kept)
        if self.bucket.placements.optimizer or self.holds is not Holds.AVERAGE:
            return Work()
        self._move(Holds.GATHERED)
        work = self.sum.redistribute(kept=kept)
        with self.sum.here(changed=False):  # waits for its copy: the step entered here() before the average came
            return work

    @property
    def for_step(self) -> Tensor:
        """The averaged gradient of what this rank's optimizer updates, 1-D; inside sum.here()."""
        return self.sum.of(*self.bucket.updated)

    def undo_average(self) -> None:
        """Turn the average into a sum again, to add to it. Exact if the divisor is a power of two."""
        if (self.averaged or self.rounded) and self.divisor > 1:
            with self.sum.here():
                self._multiply(self.sum.own)
        if self.filled:
            self._move(Holds.SUM)
        self.rounded = False

    def _multiply(self, own: Tensor) -> None:
        if not self.averaged:
            average_(own, self.divisor)
        own.mul_(self.divisor)

    def set_aside(self, take: Callable[[int, torch.dtype], Tensor]) -> None:
        """Copy the owned elements of the sum to memory from `take`, so that the sum's memory may hold contributions."""
        self.undo_average()
        self.aside = take(self.own.numel(), self.sum.dtype).copy_(self.own)

    def clear(self) -> None:
        self._move(Holds.NOTHING)
        self.rounded = False
        self.sum.rest.clear()


@dataclass(eq=False)
class Entry:
    """One trainable parameter in the book of gradients."""

    number: int
    param: nn.Parameter
    accumulator: Accumulator
    position: int  # of its slot in the bucket
    slot: Slot
    updater: int | None = None  # the number of the optimizer that updates it, on some rank
    fragments: list[nn.Parameter] = field(default_factory=list)  # that optimizer's fragments of it on this rank
    displaced: Tensor | None = None  # `p.grad` when autograd was about to add to it
