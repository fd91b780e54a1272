"""The running sum of one bucket's gradients, and an entry for each parameter that adds to it.

After backward every rank holds its shard of each bucket's running sum (`Accumulator.sum`), at every stage; or, where
the optimizer is sharded over all replicas, its part of the shard.

The sum is divided by the number of ranks late, because (a / 3) * 3 is not a: reading divides a copy, only editing or
stepping divides in place. Where nothing is lost by it (`divides_exactly`) it is divided whenever something has landed.
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
from ..weights.buffer import Buffer
from ..weights.flat import Flat


class Holds(enum.Enum):
    """The content of the memory of a bucket's sum, of gradients since they were last cleared."""

    NOTHING = enum.auto()  # arbitrary numbers: none has been added
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

    def __init__(self, buffer: Buffer, divisor: int) -> None:
        """divisor: the number that the sum is divided by, of ranks unless something else says how many it adds up."""
        assert buffer.gradients is not None
        self.buffer = buffer
        self.bucket = buffer.bucket
        self.sum: Flat = buffer.gradients
        self.entries: list[Entry] = []  # of the bucket's parameters
        self.divisor = divisor
        self.holds = Holds.NOTHING
        self.rounded = False  # does a sum that rests in a file stand for the average that a step took of it in memory?
        self.aside: Tensor | None = None  # what this rank owns of `sum`, while a contribution lies where it was
        self.blocks: Any = None  # its map from blocks to entries, once a norm was asked for: `norms.py`

    def _move(self, holds: Holds) -> None:
        assert (self.holds, holds) in _LEGAL, f"{self.bucket.index}: {self.holds} -> {holds}"
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
        """Take memory for what is owned, if that does not rest on the device."""
        first, last = self.buffer.owned
        return None if self.sum.on_device else take(last - first, self.sum.dtype)

    def landing(self, take: Callable[[int, torch.dtype], Tensor]) -> Tensor:
        """Return where an average arrives that replaces what is owned: where that rests, if on the device."""
        found = self._elsewhere(take)
        return self.sum.own if found is None else found

    def kept(self, take: Callable[[int, torch.dtype], Tensor]) -> Tensor:
        """Return what is owned of the sum, undivided, on the device: where it rests, or in memory that `take` makes.

        Whether it is an average is known to this rank alone: an edit of some parameters divides it where these are.
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
        return self.own[self.bucket.slots[index].slice_of(*self.buffer.owned)]

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
        """Turn the sum into the average, in place; one that is not to be `kept` ends with `forget_step`."""
        if self.holds is Holds.SUM:
            with self.sum.here(changed=kept):
                average_(self.sum.own, self.divisor)
            self._move(Holds.AVERAGE)

    def land(self, *, averaged: bool) -> None:
        """Take note that a sum has landed. averaged: divided already."""
        self._move(Holds.AVERAGE if averaged else Holds.SUM)

    def edit(self) -> None:
        """Turn the sum into the average, which is about to change on this rank: no other knows it then."""
        self.average()
        if self.filled:
            self._move(Holds.AVERAGE)

    def forget_step(self, *, averaged: bool) -> None:
        """Drop what a step made of the sum in memory, without writing it to its file: nothing else needs it.

        averaged: does the average rest there, and not the sum that the step divided?
        """
        self.sum.rest.forget()
        if self.filled:  # else an exception has ended the step, and all gradients were dropped
            self._move(Holds.AVERAGE if averaged else Holds.SUM)
            self.rounded = not averaged

    def spread_average(self, *, kept: bool = True) -> Work:
        """Launch the gather of the whole average, if the optimizer's state is replicated and so needs it."""
        self.average(kept=kept)
        if self.buffer.placements.optimizer or self.holds is not Holds.AVERAGE:
            return Work()
        self._move(Holds.GATHERED)
        work = self.sum.redistribute(kept=kept)
        with self.sum.here(changed=False):  # whoever steps is inside already, from before it came
            return work

    @property
    def for_step(self) -> Tensor:
        """The averaged gradient of what this rank's optimizer updates, 1-D; inside sum.here()."""
        return self.sum.of(*self.buffer.updated)

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
        """Copy what is owned of the sum to memory that `take` makes, so that its own may hold a contribution."""
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
