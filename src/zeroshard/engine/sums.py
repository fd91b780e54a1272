"""The verb `sum`: every rank's contribution to a bucket becomes the average, where its owner's gradients rest.

    room     memory for this rank's contribution, for gradients to be written to
    send     it goes to the shards' owners, as its codec says
    land     what came is added up in rank order, and handed on where several replicas are summed
    store    the average is where it rests, and memory serves others

All memory of messages is taken and given back here. `due` names the oldest sum, if more than so many are under way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..device import Event, asynchronous
from ..errors import TierError
from ..headroom import LEAVING
from ..numerics import divides_exactly, fold, simulated
from ..ranks.agreement import Group
from ..ranks.comm import Comm
from ..ranks.transport import Work
from ..tiers.tier import DeviceTier
from .accumulator import Accumulator
from .contribution import Contribution, State
from .scratch import Scratch
from .subscriber import Subscriber


class Delivery:
    """The way of one bucket's sum to where it rests. By default this rank adds up all that it is made of."""

    first = last = True  # does this rank begin the sum, and divide it?

    def __init__(self, running: Tensor | None = None, average: Tensor | None = None) -> None:
        """running: where it is added up, else where it rests. average: what replaces the sum that rests, if that is
        elsewhere."""
        self.running, self.average = running, average
        self.came = self.back = Work()  # `running` from others, for this rank to add to; and `average`

    def receive(self) -> None:
        """Launch the receive of `running`, if other ranks begin the sum."""

    def hand_on(self) -> None:
        """Send what this rank has added to, if other ranks wait for it."""


@dataclass
class Sent:
    """One bucket's contributions on their way to the owners, and the sum on its way to where it rests."""

    contribution: Contribution
    work: Work
    receive: Tensor
    delivery: Delivery

    def here(self) -> bool:
        """Tell if all contributions that this rank adds up have come."""
        if not self.work.done():
            return False
        self.delivery.receive()
        return self.delivery.came.done()


class Sums:
    """The sums of one model's buckets, while they are under way."""

    def __init__(
        self,
        group: Group,
        tier: DeviceTier,
        settings: Comm,
        subscribers: Sequence[Subscriber],
        deliver: Callable[[Accumulator, Scratch], Delivery],
        stored: Callable[[Contribution], None],
    ) -> None:
        """deliver: makes each sum's delivery. stored: called with each contribution whose average is where it rests."""
        self.group = group
        self.native = settings.reduce == "native"
        self._sends_values = settings.reduce == "ordered" and group.ranks > 1
        self._subscribers = subscribers
        self._deliver = deliver
        self._stored = stored
        self.scratch = Scratch(tier, "reduce")
        # What is sent lies where other ranks can read it, if they do.
        self.sends = Scratch(group.team.messages(tier), "reduce") if group.team.shares else self.scratch
        self._under_way: list[Sent] = []  # until this rank has added its part
        self._summed: list[Sent] = []  # and from then on until it has the average
        self._leaving: list[tuple[Event, Tensor]] = []  # averages on their way from the device to where they rest

    # --- this rank's contribution -----------------------------------------------------------------------------------

    def room(self, contribution: Contribution, *, local: bool = False) -> None:
        """Give a contribution memory to be filled: full-size, in the dtype that it is sent in.

        local: under no_sync, in the gradients' dtype.
        """
        if contribution.state is State.ABSENT:
            contribution.fill(self._room(contribution, local=local), local=local)
        elif contribution.state is State.KEPT:
            # no_sync promised two passes in all: what it added up travels with the next backward's gradients.
            contribution.move(State.FILLING)

    def _room(self, contribution: Contribution, *, local: bool) -> Tensor:
        accumulator, buffer = contribution.accumulator, contribution.buffer
        dtype = buffer.grad_dtype if local else buffer.reduce_dtype
        # A full-size accumulator doubles as the place to put contributions: they are of its size. What it holds already
        # has to go aside; and where it may be asked whose contribution spoiled a sum, the own one must outlive that.
        elsewhere = buffer.placements.gradients or not accumulator.sum.on_device or contribution.sources > 1
        holds = accumulator.filled or (self._sends_values and any(each.looks for each in self._subscribers))
        if elsewhere or self.group.team.shares or (holds and not local) or dtype != buffer.grad_dtype:
            return self.sends.take(contribution.bucket.numel * contribution.sources, dtype)
        if holds:
            accumulator.set_aside(self.scratch.take)
        return accumulator.sum.tensor

    def drop(self, contribution: Contribution) -> None:
        """Give back the memory of a contribution, sent or not."""
        self._give_back(contribution)
        contribution.end(State.ABSENT)

    def _give_back(self, contribution: Contribution) -> None:
        for transient in (contribution.accumulator.aside, contribution.memory):
            self.scratch.give_back(transient)
            self.sends.give_back(transient)
        contribution.accumulator.aside = contribution.memory = None

    def send(self, contribution: Contribution) -> None:
        """Send a contribution to the owners of its shards."""
        self.room(contribution)
        accumulator, team, bucket = contribution.accumulator, contribution.buffer.team, contribution.codec.bucket
        send, own = contribution.encode(self.sends), bucket.shard_numel(team.position)
        if self.native:
            receive = self.scratch.take(own, send.dtype)
            work = team.reduce_native(send, receive, bucket)
        else:
            receive = self.scratch.take(own * team.room * contribution.sources, send.dtype)
            work = team.reduce(send, receive, bucket, contribution.sources)
        contribution.move(State.SENT)
        self._under_way.append(Sent(contribution, work, receive, self._deliver(accumulator, self.scratch)))

    # --- the sum ----------------------------------------------------------------------------------------------------

    def due(self, allowed: int) -> tuple[Callable[[], bool], Work, Callable[[], None]] | None:
        """Return the oldest sum if more than `allowed` are under way: (is it here?, its Work, how to go on with it)."""
        if len(self._summed) > allowed + self.group.team.seat.replicas:
            back = self._summed[0].delivery.back
            return back.done, back, self._store_first
        if len(self._under_way) > allowed:
            return self._under_way[0].here, self._under_way[0].work, self._land_first
        return None

    @property
    def under_way(self) -> bool:
        return bool(self._under_way or self._summed)

    def next(self) -> None:
        """Wait for the oldest sum, and go on with it."""
        (self._land_first if self._under_way else self._store_first)()

    def _land_first(self) -> None:
        sent = self._under_way[0]  # until it has landed: an exception may come at any moment
        sent.work.wait()
        sent.delivery.receive()
        sent.delivery.came.wait()
        accumulator, delivery, receive = sent.contribution.accumulator, sent.delivery, sent.receive
        own, staged = accumulator.bucket.shard_numel(accumulator.buffer.team.position), self._staged(accumulator)
        if own and delivery.running is None and staged:
            delivery.average = self.scratch.take(own, accumulator.buffer.grad_dtype)
        # Where nothing is lost by it the sum is divided as it lands, which saves a step a pass of its own.
        divided = divides_exactly(accumulator.buffer.grad_dtype, receive.dtype, self.group.sources)
        if delivery.first and not (divided and accumulator.averaged):
            accumulator.undo_average()
        if own:
            try:
                begun = accumulator.sum.here(changed=delivery.last, fresh=not accumulator.filled)
                # Is added to what rests, or into it?
                adds = delivery.first and (accumulator.filled or delivery.average is None) and not staged
                with begun if adds else contextlib.nullcontext():
                    if not simulated(receive):
                        self._fold(sent, divided=divided)
            except TierError as error:
                self.group.report(error)  # the peers have further reductions to get through
        sent.work.used()
        accumulator.land(averaged=divided)
        delivery.hand_on()
        self._summed.append(sent)
        self.scratch.give_back(receive)
        self._give_back(sent.contribution)
        sent.contribution.end(State.LANDED)
        self._under_way.pop(0)
        if delivery.running is None and len(self._summed) == 1:
            # Not before the sums ahead of it, though nothing of it is on its way: where each average is gathered, all
            # ranks of a team gather in one order, and other ranks may have a part of this one.
            self._store(self._summed.pop())

    def _fold(self, sent: Sent, *, divided: bool) -> None:
        """Add this rank's contributions to what came, or, on the first replica, to what there is."""
        accumulator, delivery = sent.contribution.accumulator, sent.delivery
        into = delivery.running if not delivery.last else delivery.average
        total = accumulator.own if into is None or (delivery.last and accumulator.aside is not None) else into
        start = delivery.running if not delivery.first else self._start(accumulator, total)
        times = self.group.sources if delivery.first and accumulator.averaged else 1
        pieces = [piece.to(total.device) for piece in self._pieces(sent)]
        fold(total, pieces, start=start, times=times, over=self.group.sources if delivery.last and divided else 1)
        for subscriber in self._subscribers:
            subscriber.summed(accumulator, pieces, total)
        if total is accumulator.aside:
            accumulator.sum.own.copy_(total)

    def _pieces(self, sent: Sent) -> list[Any]:
        """Return each rank's contribution to this rank's shard, in rank order; or the backend's sum of them."""
        contribution = sent.contribution
        if self.native or contribution.memory is None:
            return [sent.receive]
        team, codec = contribution.buffer.team, contribution.codec
        pieces = team.contributions(contribution.memory, sent.receive, codec.bucket, contribution.sources)
        return [codec.decode(piece) for piece in pieces]

    @staticmethod
    def _staged(accumulator: Accumulator) -> bool:
        """Tell if sums are made on an accelerator, in rank order as anywhere, and then brought to where they rest."""
        return not accumulator.sum.rest.on_device and asynchronous(accumulator.buffer.team.device)

    def _start(self, accumulator: Accumulator, total: Tensor) -> Tensor | None:
        """Return the sum that there is already, where `total` will be made."""
        if not accumulator.filled:
            return None
        if self._staged(accumulator):
            accumulator.sum.give(total)
            return total
        return accumulator.own.to(total.device)

    # --- the average ------------------------------------------------------------------------------------------------

    def _store_first(self) -> None:
        self._summed[0].delivery.back.wait()  # an interrupt may come here: then it is still under way
        self._store(self._summed.pop(0))

    def _store(self, sent: Sent) -> None:
        """Finish a sum whose average has landed: put that where it rests, and give memory back."""
        accumulator, delivery = sent.contribution.accumulator, sent.delivery
        delivery.back.wait()
        self.scratch.give_back(delivery.running)
        average = delivery.average
        try:
            if average is not None and not accumulator.sum.on_device:
                self._leaving.append((accumulator.sum.take(average, fresh=True), average))
                average = None
                self.leave(LEAVING * self._staged(accumulator))
            accumulator.sum.behind()
        except TierError as error:
            self.group.report(error)
        self.scratch.give_back(average)  # one that could not be put where it rests
        self._stored(sent.contribution)

    def leave(self, allowed: int) -> None:
        """Let the memory of averages that leave the device serve others, but for so many."""
        while len(self._leaving) > allowed:
            through, average = self._leaving.pop(0)
            through.wait()
            self.scratch.give_back(average)

    # --- its memory -------------------------------------------------------------------------------------------------

    def trim(self) -> None:
        """Give unused memory back to the tier."""
        self.scratch.trim()
        self.sends.trim()

    def abandon(self) -> None:
        """Drop all that is under way, once all ranks have ended what they had launched."""
        self._summed, self._under_way = [], []
        self.leave(0)

    def give_back_all(self) -> None:
        self.scratch.give_back_all()
        self.sends.give_back_all()
