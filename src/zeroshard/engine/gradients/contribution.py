"""This rank's contribution to one bucket's sum, in one backward: which gradients have come, and where they lie.

    state     its memory                         what leads to it
    ABSENT    none                               a backward begins, or gradients were cleared
    FILLING   gradients are written to it        the first gradient; or other ranks have one, and it holds zeros
    KEPT      what backwards under no_sync left  the end of such a backward; it outlives the beginning of the next
    SENT      other ranks read it                it is sent
    LANDED    none: it is in this rank's sum     it was added up

A gradient that comes while a contribution is SENT or LANDED is a second one: see `second_gradient`.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...comm.reduce_pipeline import Scratch
from ...errors import StateError
from ..weights.bucket import Bucket
from ..weights.codec import Message
from ..weights.unit import Unit
from .accumulator import Accumulator, Entry


class ContributionState(enum.Enum):
    ABSENT = enum.auto()
    FILLING = enum.auto()
    KEPT = enum.auto()
    SENT = enum.auto()
    LANDED = enum.auto()


_LEGAL = {
    (ContributionState.ABSENT, ContributionState.FILLING),
    (ContributionState.FILLING, ContributionState.KEPT),
    (ContributionState.FILLING, ContributionState.SENT),
    (ContributionState.KEPT, ContributionState.FILLING),
    (ContributionState.SENT, ContributionState.LANDED),
    *(
        (state, ContributionState.ABSENT) for state in ContributionState
    ),  # an exception ended its backward, or its gradients were cleared
}


class Division:
    """The parts of each gradient that are sent one by one. By default there is one: all of it."""

    def __init__(self, sources: int = 1) -> None:
        self.sources = sources

    def forget(self, param: Any) -> None:
        """Forget what is left of a parameter's gradient from an earlier backward."""

    def parts(self, param: Any, grad: Tensor) -> Sequence[Tensor]:
        """Return each source's part of a parameter's gradient."""
        return (grad,)


class Contribution:
    """One bucket in one backward: the gradients it has, those it waits for, and the memory that they are sent from."""

    def __init__(self, accumulator: Accumulator, unit: Unit, codec: Message, division: Division) -> None:
        self.accumulator = accumulator
        self.entries = accumulator.entries
        self.bucket: Bucket = accumulator.bucket
        self.plan = accumulator.plan
        self.unit = unit
        self.codec = codec
        self._division = division
        self.sources = division.sources
        self.state = ContributionState.ABSENT
        self.memory: Tensor | None = None  # full-size, for each source
        self.local = False  # did it begin under no_sync? It was zeroed, and all gradients are added to it
        self.received: dict[int, int] = {}  # slot index -> gradients received
        self.missing: set[int] = set()  # slot indices that it waits for
        self.all_wanted = True  # does every parameter want a gradient?
        self.hold = False  # more gradients may come: send it at the end
        self.most: int | None = None  # the most gradients of one slot in the last backward; None before the first

    # --- its life ---------------------------------------------------------------------------------------------------

    def move(self, state: ContributionState) -> None:
        assert (self.state, state) in _LEGAL, f"{self.plan.index}: {self.state} -> {state}"
        self.state = state

    def begin(self) -> None:
        """Begin a backward: wait for every parameter that requires a gradient and has elements."""
        if self.state is not ContributionState.KEPT:
            self.move(ContributionState.ABSENT)
        self.received.clear()
        # A module that was called more than once may give its parameters as many gradients.
        self.hold = max([self.most or 0, *self.unit.calls.values()]) > 1
        for entry in self.entries if self.sources > 1 else ():
            self._division.forget(entry.param)
        with torch._C.DisableTorchFunctionSubclass():
            wanting = [param.requires_grad for param in self.bucket.params]
        slots = self.plan.slots
        self.all_wanted = all(wanting)
        self.missing = {at for at, wants in enumerate(wanting) if wants and slots[at].numel}

    def fill(self, memory: Tensor, *, local: bool) -> None:
        """Begin to fill this memory. local: under no_sync, in the gradients' dtype."""
        if local:
            memory.zero_()
        self.memory, self.local = memory, local
        self.move(ContributionState.FILLING)

    def encode(self, scratch: Scratch[Tensor]) -> Tensor:
        """Return this rank's contribution as it is sent, with zeros for gradients that did not come."""
        values = self.memory
        assert values is not None
        if not self.local:
            for position in range(len(self.plan.slots)):
                if position not in self.received:
                    self.zero(position)
        sent = self.codec.encode(values, scratch.take)
        if sent is not values:
            scratch.give_back(values)
            self.memory, self.local = sent, False
        return sent

    def end(self, state: ContributionState) -> None:
        """Take note that its memory was given back: it is in the sum (LANDED), or nowhere (ABSENT)."""
        self.local = False
        self.move(state)

    @property
    def launched(self) -> bool:
        """True once it was sent in this backward."""
        return self.state in (ContributionState.SENT, ContributionState.LANDED)

    @property
    def unsent(self) -> bool:
        """True if it holds gradients of backwards under no_sync, to be sent together with the next backward's."""
        return self.local and not self.launched

    @property
    def complete(self) -> bool:
        """True once every parameter that wants a gradient has it, and no more may come in this backward."""
        return not (self.missing or self.hold)

    # --- its elements -----------------------------------------------------------------------------------------------

    def _place(self, position: int, source: int) -> Tensor:
        """Return a source's place for the gradient of one slot, in its parameter's shape and strides."""
        assert self.memory is not None
        slot, strides = self.plan.slots[position], self.bucket.gathered.strides[position]
        return self.memory.as_strided(slot.shape, strides, slot.start + source * self.plan.numel)

    def add(self, entry: Entry, grad: Tensor) -> None:
        """Add one gradient of a parameter, or write it if none was there."""
        position = entry.position
        write = Tensor.add_ if self.received[position] > 1 or self.local else Tensor.copy_
        for source, part in enumerate((grad,) if self.sources == 1 else self._division.parts(entry.param, grad)):
            write(self._place(position, source), part)
        self.missing.discard(position)

    def zero(self, position: int) -> None:
        """Zero the gradient of one slot."""
        for source in range(self.sources):
            self._place(position, source).zero_()


def not_dense(grad: Tensor, name: str) -> StateError:
    """Make the error for a gradient that is not dense (`torch.strided`)."""
    return StateError(
        "sparse gradients cannot be sharded",
        where=f"parameter {name!r}",
        expected="a dense gradient",
        got=str(grad.layout),
        instead="nn.Embedding(..., sparse=False)",
    )


def second_gradient(names: list[str], first: str, or_else: str) -> StateError:
    """Make the error for a gradient that came after its bucket was sent. first: what was done with the first one."""
    return StateError(
        f"a parameter received a second gradient from a re-entrant checkpoint after its first was {first}",
        where=f"parameters {names}",
        instead=f"checkpoint(..., use_reentrant=False), {or_else}",
    )
