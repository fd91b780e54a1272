"""The running sum of one bucket's gradients, and an entry for each parameter that adds to it.

After backward every rank holds its shard of each bucket's running sum (`Accumulator.sum`), at every stage.

The sum is divided by the number of ranks late, because (a / 3) * 3 is not a: reading divides a copy, only editing or
stepping divides in place. Where nothing is lost by it (`divides_exactly`) it is divided whenever something has landed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, nn

from ..layout import Slot
from ..numerics import BLOCK, BlockMap, average_
from ..ranks.transport import Work
from .buffer import Buffer
from .flat import Flat


class Accumulator:
    """The running sum of one bucket's gradients since they were last cleared, this rank's shard of it."""

    def __init__(self, buffer: Buffer, ranks: int) -> None:
        assert buffer.gradients is not None
        self.buffer = buffer
        self.bucket = buffer.bucket
        self.sum: Flat = buffer.gradients
        self.entries: list[Entry] = []  # of the bucket's parameters
        self.ranks = ranks
        self.filled = False  # has anything been added since the gradients were cleared?
        self.averaged = False  # has the sum been divided by the number of ranks already?
        self.spread = False  # has every rank the whole average? (replicated optimizer state needs it)
        self.rounded = False  # does a sum that rests in a file stand for the average that a step took of it in memory?
        self.local: Tensor | None = None  # full-size sum of gradients that backward under no_sync left unreduced
        self.aside: Tensor | None = None  # this rank's shard of `sum`, while `local` lies where it was
        self._blocks: BlockMap | None = None

    @property
    def own(self) -> Tensor:
        """This rank's shard of the sum, 1-D; inside sum.here()."""
        return self.sum.own if self.aside is None else self.aside

    def fragment(self, index: int) -> Tensor:
        """Return this rank's elements of one slot of the sum, 1-D (possibly empty); inside sum.here()."""
        return self.own[self.bucket.slots[index].slice_of(*self.buffer.owned)]

    def zero(self, index: int) -> None:
        if self.filled:  # else there is no sum, and its memory may hold `local`
            with self.sum.here():
                self.fragment(index).zero_()

    def average(self, *, kept: bool = True) -> None:
        """Turn the sum into the average, in place; one that is not to be `kept` ends with `forget_step`."""
        if not self.averaged:
            with self.sum.here(changed=kept):
                average_(self.sum.own, self.ranks)
            self.averaged = True

    def forget_step(self, *, averaged: bool) -> None:
        """Drop what a step made of the sum in memory, without writing it to its file: nothing else needs it.

        averaged: does the average rest there, and not the sum that the step divided?
        """
        self.sum.rest.forget()
        self.averaged, self.spread, self.rounded = averaged, False, not averaged

    def spread_average(self, *, kept: bool = True) -> Work:
        """Launch the gather of the whole average, if the optimizer's state is replicated and so needs it."""
        self.average(kept=kept)
        if self.buffer.placements.optimizer or self.spread:
            return Work()
        self.spread = True
        work = self.sum.redistribute(kept=kept)
        with self.sum.here(changed=False):  # whoever steps is inside already, from before it came
            return work

    @property
    def for_step(self) -> Tensor:
        """The averaged gradient of what this rank's optimizer updates, 1-D; inside sum.here()."""
        return self.sum.of(*self.buffer.updated)

    def undo_average(self) -> None:
        """Turn the average into a sum again, to add to it. Exact if the number of ranks is a power of two."""
        self.spread = False
        if (self.averaged or self.rounded) and self.ranks > 1:
            with self.sum.here():
                if not self.averaged:
                    average_(self.sum.own, self.ranks)
                self.sum.own.mul_(self.ranks)
        self.averaged = self.rounded = False

    def clear(self) -> None:
        self.filled = self.averaged = self.spread = self.rounded = False
        if self.sum.passing:
            self.sum.rest.forget()

    def blocks(self) -> BlockMap:
        """Return the map from the shard's blocks to entries of the book of gradients, made once."""
        if self._blocks is None:
            parts = (slot.slice_of(*self.buffer.owned) for slot in self.bucket.slots)
            spans = [(e.number, p.start, p.stop) for e, p in zip(self.entries, parts, strict=True) if p.stop]
            made = BlockMap(self.sum.own.numel(), min(BLOCK, self.buffer.align), spans, self.sum.own.device)
            self.buffer.tier.ledger.hold_while(made, "norms", made.nbytes)
            self._blocks = made
        return self._blocks


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


class Updater:
    """The policy for averages that arrive during a backward: by default they wait for the optimizer's step."""

    early = False

    def words(self, *, local: bool) -> str:
        """Describe, as a backward begins (`local`: under no_sync), what must be equal on all ranks for this policy."""
        return ""

    def prepare(self) -> None:
        """Begin a backward, once all ranks have begun it."""

    def landed(self, accumulator: Accumulator, having: set[int]) -> None:
        """Take note that a bucket's sum has landed. having: the numbers of the gradients that some rank has."""

    def due(self, allowed: int) -> Work | None:
        """Return the work that brings the oldest average to all ranks, if more than `allowed` are not used yet."""
        return None

    def update_first(self) -> None:
        """Use the oldest average."""

    def catch_up(self, allowed: int) -> None:
        """Use the oldest averages, until no more than `allowed` are left."""
        while self.due(allowed) is not None:
            self.update_first()

    def ended(self) -> None:
        """End a backward that is complete."""

    def abort(self) -> None:
        """End a backward that an exception has ended."""
