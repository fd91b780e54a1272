"""The running sum of one bucket's gradients, and what is known of each parameter that adds to it.

After backward every rank holds its shard of each bucket's running sum (`Accumulator.sum`), at every stage alike.

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
        self.local: Tensor | None = None  # full-size sum of what backward under no_sync left unreduced
        self.aside: Tensor | None = None  # this rank's shard of `sum`, while `local` lies where it was
        self._blocks: BlockMap | None = None

    @property
    def own(self) -> Tensor:
        """This rank's shard of the sum, 1-D; inside sum.here()."""
        return self.sum.own if self.aside is None else self.aside

    def fragment(self, index: int) -> Tensor:
        """This rank's elements of one slot of the sum, 1-D (possibly empty); inside sum.here()."""
        return self.own[self.bucket.slots[index].slice_of(*self.buffer.owned)]

    def zero(self, index: int) -> None:
        if self.filled:  # else there is no sum, and what lies there may be `local`
            with self.sum.here():
                self.fragment(index).zero_()

    def average(self, *, kept: bool = True) -> None:
        """Turn the sum into the average, in place; one that is not to be `kept` ends with `forget_step`."""
        if not self.averaged:
            with self.sum.here(changed=kept):
                average_(self.sum.own, self.ranks)
            self.averaged = True

    def forget_step(self, *, averaged: bool) -> None:
        """What a step made of it in memory nobody else needs: writing that to its file would be for nothing.

        averaged: does the average rest there, and not the sum that the step divided?
        """
        self.sum.rest.forget()
        self.averaged, self.spread, self.rounded = averaged, False, not averaged

    def spread_average(self, *, kept: bool = True) -> Work:
        """Launch the gather of the whole average, where the optimizer's state is replicated and asks for it."""
        self.average(kept=kept)
        if self.buffer.placements.optimizer or self.spread:
            return Work()
        self.spread = True
        return self.sum.redistribute(kept=kept)

    @property
    def for_step(self) -> Tensor:
        """The averaged gradient of what this rank's optimizer updates, 1-D; inside sum.here()."""
        return self.sum.of(*self.buffer.updated)

    def undo_average(self) -> None:
        """Back to a sum, because more is to be added. Exact where the number of ranks is a power of two."""
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
        """Which of the shard's blocks belongs to which entry of the book."""
        if self._blocks is None:
            parts = [slot.slice_of(*self.buffer.owned) for slot in self.bucket.slots]
            parts_of = zip(self.entries, parts, strict=True)
            spans = [(entry.number, part.start, part.stop) for entry, part in parts_of if part.stop]
            self._blocks = BlockMap(self.sum.own.numel(), min(BLOCK, self.buffer.align), spans, self.sum.own.device)
            self.buffer.tier.ledger.hold("norms", self._blocks.nbytes)
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
    fragments: list[nn.Parameter] = field(default_factory=list)  # what that optimizer holds of it on this rank
    displaced: Tensor | None = None  # what `p.grad` was when autograd was about to add to it


class Updater:
    """Who uses each average as it comes: by itself nobody, for they wait for a step."""

    early = False

    def words(self, *, local: bool) -> str:
        """A backward begins, `local` under no_sync: what of it ranks must have alike."""
        return ""

    def prepare(self) -> None:
        """All ranks are at it."""

    def landed(self, accumulator: Accumulator, having: set[int]) -> None:
        """A bucket's sum is here. having: the numbers of its gradients, those that some rank has."""

    def due(self, allowed: int) -> Work | None:
        """What brings the oldest average to all ranks, if there are more than so many that were not used."""
        return None

    def update_first(self) -> None:
        """Use the oldest average."""

    def catch_up(self, allowed: int) -> None:
        """Use the oldest ones, until there are no more than so many."""
        while self.due(allowed) is not None:
            self.update_first()

    def ended(self) -> None:
        """A backward is through."""

    def abort(self) -> None:
        """It is not, and will not be."""
