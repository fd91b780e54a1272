"""The delivery of sums over several replicas: each adds to what the one before has summed up, and the last divides.

The first replica begins with what its accumulator holds and adds its ranks' contributions; each next one goes on with
what comes, unrounded; the last divides, rounds, and sends the result to all. These are the operations, the operands and
the order that one replica of as many ranks has, so their number never changes a bit (`numerics.fold`).

Waits go only from a replica to those before it, and for the average to the last: relays cannot wait for each other in a
circle. Receives are launched with the reduction; in a device's queue, where they take processors of it for as long as
they wait, only when this rank's part is there, bucket by bucket in the order of reductions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..events import Event
from ..features import Feature
from ..flow import Scratch
from ..layout import Bucket
from ..numerics import running_dtype
from ..ranks.transport import Team, Work
from .accumulator import Accumulator
from .sums import Delivery


class Relay(Delivery):
    """One shard's sum on its way from replica to replica, and the average on its way back."""

    running: Tensor
    average: Tensor

    def __init__(self, team: Team, bucket: Bucket, running: Tensor, average: Tensor) -> None:
        """Begin to receive, unless a device's queue would wait for that.

        running: own shard, 1-D, in `numerics.running_dtype`. It gets what the replica before has summed up.
        average: own shard, 1-D, in the accumulator's dtype. It gets what the last replica sends to all.
        """
        super().__init__(running, average)
        seat, self.team, self.bucket = team.seat, team, bucket
        self.first, self.last = seat.replica == 0, seat.replica == seat.replicas - 1
        on, back = running.numel() * running.itemsize, average.numel() * average.itemsize
        sent = back * (seat.replicas - 1) if self.last else on
        received = (not self.first) * on + (not self.last) * back
        self._event = team.ledger.move(
            "relay", logical=on, sent=sent, received=received, state="gradients", bucket=bucket.index
        )
        self._receives = not self.first
        self._coming: list[Any] | None = [] if self.last else None
        self._handed_on = False
        if not team.queued:
            self.receive()
            self._coming = self._average()

    def receive(self) -> None:
        """Launch the receive of what the replicas before this one have summed up."""
        if self._receives:
            self._receives = False
            self.came = self._work(self.team.hand_on(self.running, self.team.seat.replica - 1))

    def hand_on(self) -> None:
        """Send `running` on, with this replica's contributions in it; or, on the last replica, `average` to all."""
        if self._handed_on:
            return
        self._handed_on = True
        team = self.team
        sent = team.hand_back(self.average) if self.last else team.hand_on(self.running, team.seat.replica)
        self.back = self._work([*self._average(), *sent], self._event)

    def _average(self) -> list[Any]:
        return self.team.hand_back(self.average) if self._coming is None else self._coming

    def _work(self, handles: list[Any], event: Event | None = None) -> Work:
        return Work(handles, event, lambda handle: self.team.wait("relay", self.bucket.index, handle))


def relayed(accumulator: Accumulator, scratch: Scratch[Tensor]) -> Delivery:
    """Return the delivery of one bucket's sum, if replicas hand it on and this rank has a part of it."""
    buffer, team = accumulator.buffer, accumulator.buffer.team
    own = accumulator.bucket.shard_numel(team.position)
    if team.seat.summed == 1 or not own:
        return Delivery()
    running = scratch.take(own, running_dtype(buffer.grad_dtype))
    # The average comes straight to where the sum rests: it cannot come before that was read.
    return Relay(team, accumulator.bucket, running, accumulator.landing(scratch.take))


class _Manifest(Feature):
    name = "replicas"
    page = "meshes.md"

    def delivery(self, team: Team) -> Callable[[Accumulator, Scratch[Tensor]], Delivery] | None:
        return relayed if team.seat.summed > 1 else None


FEATURE = _Manifest()
