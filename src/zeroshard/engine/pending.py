"""One bucket's gradients in one backward: which have come, what is sent, and the memory of messages.

`Pending` counts until a bucket's gradients are complete. `Sent` is its contributions on their way. `Scratch` is the
memory of both, taken again and again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .. import int8
from ..errors import StateError
from ..headroom import POOLED
from ..layout import Bucket
from ..ranks.transport import Relay, Work
from ..tiers.tier import MessageMemory
from .accumulator import Accumulator, Entry
from .buffer import Buffer, Place
from .unit import Unit


@dataclass
class Pending:
    """One bucket in one backward: the gradients it has, those it waits for, and this rank's contribution."""

    accumulator: Accumulator
    unit: Unit
    send: Tensor | None = None  # full-size, this rank's contribution
    received: dict[int, int] = field(default_factory=dict)  # slot index -> gradients received
    missing: set[int] = field(default_factory=set)  # slot indices that it waits for
    all_wanted: bool = True  # does every parameter want a gradient?
    launched: bool = False
    hold: bool = False  # may receive again: wait for the end
    sources: int = 1  # whose parts of each gradient are sent one by one
    codes: bool = False  # are gradients sent as codes of 8 bits?
    most: int | None = None  # gradients a slot received in the last backward; None before the first

    @property
    def bucket(self) -> Bucket:
        return self.accumulator.bucket

    @property
    def buffer(self) -> Buffer:
        return self.accumulator.buffer

    @property
    def entries(self) -> list[Entry]:
        return self.accumulator.entries

    def places(self, send: Tensor, position: int) -> list[Tensor]:
        """Return each source's place for the gradient of one slot, in its parameter's shape and strides."""
        slot, strides = self.bucket.slots[position], self.buffer.gathered.strides[position]
        starts = [slot.start + source * self.bucket.numel for source in range(self.sources)]
        return [send.as_strided(slot.shape, strides, start) for start in starts]

    def fill(self, send: Tensor) -> None:
        """Write zeros to the places of slots that got no gradient."""
        for index in range(len(self.bucket.slots)):
            for place in self.places(send, index) if index not in self.received else ():
                place.zero_()

    def by_source(self, entry: Entry, grad: Tensor) -> Sequence[Tensor]:
        """Return each source's part of a gradient (`Layout.apart`); the whole of it if it is not sent by source."""
        if self.sources == 1:
            return [grad]
        place: Place = entry.param._zeroshard  # type: ignore[attr-defined]
        apart, place.apart = place.apart, None
        if apart is None or len(apart) != self.sources:
            raise StateError(
                "a gradient did not come source by source, as Layout(apart=True) has promised",
                where=f"parameter {entry.slot.name!r}",
                expected=f"those of {self.sources} sources, one for each group",
                got="their sum" if apart is None else f"those of {len(apart)}",
                instead=f"zeroshard.apart(parameter, {self.sources}) in the model's forward, for the parameter",
            )
        return apart.unbind(0)

    @property
    def message(self) -> Bucket:
        """The bucket in elements of what is sent: of codes, in bytes."""
        return int8.coded(self.bucket) if self.codes else self.bucket

    def encoded(self, values: Tensor, scratch: Scratch) -> Tensor:
        """Return this rank's contribution as it is sent. If that is codes, the gradients' memory is given back."""
        if not self.codes:
            return values
        send = scratch.take(self.message.numel, int8.BYTE)
        int8.encode_(send, values, self.bucket)
        scratch.give_back(values)
        self.send, self.accumulator.local = send, None
        return send

    def expect(self) -> None:
        """Begin a backward: wait for every parameter that requires a gradient and has elements."""
        with torch._C.DisableTorchFunctionSubclass():
            wanting = [param.requires_grad for param in self.buffer.params]
        slots = self.bucket.slots
        self.all_wanted = all(wanting)
        self.missing = {at for at, wants in enumerate(wanting) if wants and slots[at].numel}

    @property
    def complete(self) -> bool:
        """True once every parameter that wants a gradient has it, and no more may come in this backward."""
        return not (self.missing or self.hold)


def check_dense(grad: Tensor, name: str) -> None:
    """Refuse a gradient that has no place for every element."""
    if grad.layout is not torch.strided:
        raise StateError(
            "sparse gradients cannot be sharded",
            where=f"parameter {name!r}",
            expected="a dense gradient",
            got=str(grad.layout),
            instead="nn.Embedding(..., sparse=False)",
        )


def second_gradient(names: list[str], *, stepped: bool) -> StateError:
    """Make the error for a gradient that came after its bucket's sum was complete.

    stepped: the optimizer in backward may have used that sum already.
    """
    first, or_else = "reduced", "or repeat the step: from now on they wait for the end"
    if stepped:
        first, or_else = "used by the optimizer in backward", "or shard(...) without optimizer_in_backward=True"
    return StateError(
        f"a parameter received a second gradient from a re-entrant checkpoint after its first was {first}",
        where=f"parameters {names}",
        instead=f"checkpoint(..., use_reentrant=False), {or_else}",
    )


@dataclass
class Sent:
    """One bucket's contributions on their way to the owners, and the owners' sums on theirs to other replicas."""

    pending: Pending
    work: Work
    receive: Tensor
    relay: Relay

    @property
    def accumulator(self) -> Accumulator:
        return self.pending.accumulator

    def pieces(self, *, native: bool) -> list[Any]:
        """Return each rank's contribution to this rank's shard, in rank order; or the backend's sum of them."""
        pending = self.pending
        if native or pending.send is None:
            return [self.receive]
        team = pending.buffer.team
        pieces = team.contributions(pending.send, self.receive, pending.message, pending.sources)
        return [int8.Coded(piece) for piece in pieces] if pending.codes else pieces

    def here(self) -> bool:
        """Tell if all contributions that this rank adds up have come."""
        if not self.work.done():
            return False
        self.relay.receive()
        return self.relay.came.done()


class Scratch:
    """Memory of messages on the device, kept for the next one of its size and counted under one name."""

    def __init__(self, tier: MessageMemory, state: str) -> None:
        self._tier = tier
        self._state = state
        self._kept: list[Tensor] = []  # the longest kept first
        self._taken: list[Tensor] = []  # and not given back

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return 1-D memory with arbitrary content: every element that is read must be written first."""
        fitting = [at for at, each in enumerate(self._kept) if each.numel() == numel and each.dtype == dtype]
        if fitting:
            taken = self._tier.again(self._kept[fitting[0]])
            self._kept.pop(fitting[0])
        else:
            taken = self._tier.reserve(self._state, numel, dtype, zeroed=False)
        if numel:
            self._taken.append(taken)
        return taken

    def give_back(self, tensor: Tensor | None) -> None:
        """Return memory that was taken here; foreign tensors and second returns are ignored."""
        if taken := [at for at, each in enumerate(self._taken) if each is tensor]:
            self._kept.append(self._taken.pop(taken[0]))
            self.trim(POOLED)  # more would pile up where no two buckets are of one size

    def give_back_all(self) -> None:
        for tensor in [*self._taken]:
            self.give_back(tensor)

    def trim(self, keep: int = 0) -> None:
        """Give unused memory back to the tier, but for the last `keep` messages."""
        while len(self._kept) > keep:
            self._tier.give_back(self._state, self._kept.pop(0))
