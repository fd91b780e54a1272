"""The delivery of sums over several replicas: each adds to what the one before has summed up, and the last divides.

The first replica begins with what its accumulator holds and adds its ranks' contributions; each later one continues
from the unrounded sum that it receives; the last divides, rounds, and sends the result to all. Operations, operands and
order are those of one replica of as many ranks, so the number of replicas never changes a bit (`sums.fold`).

Where each replica keeps only a part of the shard's sum (`Placements.owned`), the last replica sends each one its part.
A sum that continues an earlier one begins at the first replica, which collects the parts of all.

A replica waits only for the ones before it, and for the average only for the last: relays cannot wait for each other in
a circle. Receives are launched with the reduction. In a device's queue, where a waiting receive occupies processors of
the device, they are launched only when this rank's part is there, bucket by bucket in the order of reductions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..arithmetic.sums import running_dtype
from ..comm.groups import Wanted
from ..comm.process_team import ProcessTeam
from ..comm.reduce_pipeline import Scratch
from ..comm.replicate_axis import Column, ProcessColumn, wanted
from ..comm.transport import Team, Work
from ..engine.gradients.accumulator import Accumulator
from ..engine.gradients.sums import Delivery
from ..events import Event
from ..hooks import Feature
from ..layout.partition import BucketPlan
from ..layout.stage import Seat


class Relay(Delivery):
    """One shard's sum on its way from replica to replica, and the average on its way back."""

    running: Tensor
    average: Tensor

    def __init__(self, team: Team, plan: BucketPlan, running: Tensor, average: Tensor) -> None:
        """Begin to receive, unless a device's queue would wait for that.

        running: own shard, 1-D, in `sums.running_dtype`. It gets what the replica before has summed up.
        average: what this rank keeps of it, 1-D, in the accumulator's dtype. It gets what the last replica sends.
        """
        super().__init__(running, average)
        seat, self.team, self.plan = team.seat, team, plan
        self.column: Column = team.column
        self.first, self.last = seat.replica == 0, seat.replica == seat.replicas - 1
        if not self.first:
            self.start = running
        self._event = self._counted()
        self._receives = not self.first
        self._coming: list[Any] | None = [] if self.last else None
        self._handed_on = False
        if not team.queued:
            self.receive()
            self._coming = self._average()

    def _counted(self) -> Event | None:
        """Count the bytes that this rank sends and receives."""
        on, back = _bytes(self.running), _bytes(self.average)
        sent = back * (self.team.seat.replicas - 1) if self.last else on
        return self._count(sent, (not self.first) * on + (not self.last) * back)

    def _count(self, sent: int, received: int) -> Event | None:
        on = _bytes(self.running)
        return self.team.ledger.move(
            "relay", logical=on, sent=sent, received=received, state="gradients", bucket=self.plan.index
        )

    def receive(self) -> None:
        """Launch the receive of what the replicas before this one have summed up."""
        if self._receives:
            self._receives = False
            self.came = self._work(self.column.hand_on(self.running, self.team.seat.replica - 1))

    def send(self) -> None:
        """Send `running` on, with this replica's contributions in it; or, on the last replica, `average` to all."""
        if self._handed_on:
            return
        self._handed_on = True
        sent = self._give() if self.last else self.column.hand_on(self.running, self.team.seat.replica)
        self.back = self._work([*self._average(), *sent], self._event)

    def _average(self) -> list[Any]:
        return self._give() if self._coming is None else self._coming

    def _give(self) -> list[Any]:
        """Launch what brings the average from the last replica."""
        return self.column.hand_back(self.average)

    def _work(self, handles: list[Any], event: Event | None = None) -> Work:
        return Work(handles, event, lambda handle: self.team.wait("relay", self.plan.index, handle))


class RelayOfParts(Relay):
    """A relay of a shard of which each replica keeps a part: the first collects the parts, and the last sends them out.

    A rank sends its part of an earlier sum as the new one begins: no average can come before all that it is made of.
    """

    apart = True

    def __init__(
        self, team: Team, plan: BucketPlan, running: Tensor, average: Tensor, whole: Tensor, kept: Tensor | None
    ) -> None:
        """whole: memory for the shard in the accumulator's dtype: for an earlier sum on the first replica, for the
        average on the last; `running` itself if that has the dtype. Other replicas do not use it.

        kept: this rank's undivided part of an earlier sum that this one continues; None if it begins at zero. Its
        memory must not change until this rank has handed the sum on.
        """
        self._whole, self._kept = whole, kept
        self._numels = [last - first for first, last in plan.portions(team.seat)]
        self._collecting = [] if kept is None else team.column.exchange(whole, kept, self._numels, out=False)
        super().__init__(team, plan, running, average)
        if self.first and kept is not None:
            self.start, self.came = whole, self._work(self._collecting)

    @property
    def into(self) -> Tensor:
        return self._whole if self.last else self.running

    def _counted(self) -> Event | None:
        on, part = _bytes(self.running), _bytes(self.average)
        others = self.plan.shard_numel(self.team.position) * self.average.itemsize - part
        begins = self._kept is not None
        sent = (others if self.last else on) + (begins and not self.first) * part
        received = (not self.first) * on + (not self.last) * part + (begins and self.first) * others
        return self._count(sent, received)

    def _average(self) -> list[Any]:
        return [*self._collecting, *super()._average()]

    def _give(self) -> list[Any]:
        if self.team.queued:  # else no wait is needed: no average comes before the first replica has all parts
            self._work(self._collecting).wait()
        return self.column.exchange(self._whole, self.average, self._numels, out=True)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.itemsize


def relayed(accumulator: Accumulator, scratch: Scratch[Tensor]) -> Delivery:
    """Return the delivery of one bucket's sum, if replicas hand it on and this rank has a part of it."""
    bucket, team, plan = accumulator.bucket, accumulator.bucket.team, accumulator.plan
    own = plan.shard_numel(team.position)
    if team.seat.summed == 1 or not own:
        return Delivery()
    running = scratch.take(own, running_dtype(bucket.grad_dtype))
    if bucket.placements.by_part:
        return _of_parts(accumulator, scratch, running)
    # The average comes straight to where the sum rests: it cannot come before that was read.
    return Relay(team, plan, running, accumulator.landing(scratch.take))


def _of_parts(accumulator: Accumulator, scratch: Scratch[Tensor], running: Tensor) -> RelayOfParts:
    bucket, beside = accumulator.bucket, []

    def take(numel: int, of: torch.dtype) -> Tensor:
        beside.append(scratch.take(numel, of))
        return beside[-1]

    seat, whole = bucket.team.seat, running
    ends = seat.replica == seat.replicas - 1 or (seat.replica == 0 and accumulator.filled)
    if ends and running.dtype != bucket.grad_dtype:
        whole = take(running.numel(), bucket.grad_dtype)
    kept = accumulator.kept(take) if accumulator.filled else None
    found = RelayOfParts(bucket.team, accumulator.plan, running, accumulator.landing(scratch.take), whole, kept)
    found.beside = beside
    return found


class RelayFeature(Feature):
    name = "replicas"
    page = "meshes.md"

    def groups(self, sits: Seat, ranks: int, backend: str) -> list[Wanted]:
        return wanted(sits, ranks, backend)

    def column(self, team: Team) -> Column | None:
        if team.seat.summed == 1:
            return None
        return ProcessColumn(team, team.link) if isinstance(team, ProcessTeam) else Column(team)

    def delivery(self, team: Team) -> Callable[[Accumulator, Scratch[Tensor]], Delivery] | None:
        return relayed if team.seat.summed > 1 else None


FEATURE = RelayFeature()
