"""The verb `sum`: all ranks' contributions to a bucket become the average, where the shard owners' gradients rest.

    room     take memory for this rank's contribution, to which gradients are written
    send     send the contribution to the shards' owners, encoded by its codec
    land     add up what came, in rank order, and hand the sum on if several replicas are summed
    store    put the average where it rests, and give its memory back for other sums

`Flow` decides in which order sums go on, and which memory their messages take, keep and give back.

On a device with streams, sums run in a stream of their own, in parallel with backward's. Backward's stream waits for
that stream before the memory of messages is used again, and at the end. Before the end sums never wait for another
rank: a sum begins only when all that it needs has come. Else this rank's device, while it waits, could not take part in
a gather that the other rank may be waiting for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...arithmetic.sums import divides_exactly, fold, simulated
from ...comm.agreement import Group
from ...comm.reduce_pipeline import Flow, Memory, Scratch
from ...comm.transport import Work
from ...device import DeviceEvent, asynchronous, behind, event, streams
from ...errors import TierError
from ...layout.limits import LEAVING
from ...policies.comm import Comm
from ...tiers.tier import DeviceTier
from .accumulator import Accumulator
from .contribution import Contribution, ContributionState
from .subscriber import Subscriber


class Delivery:
    """The path of one bucket's sum to where it rests. By default this rank adds up all contributions."""

    first = last = True  # does this rank begin the sum, and divide it?
    start: Tensor | None = None  # the sum that this rank adds to, if that is not its accumulator's
    apart = False  # does each replica keep only a part of the earlier sum, and of the average?

    def __init__(self, running: Tensor | None = None, average: Tensor | None = None) -> None:
        """running: the memory to add up in; None for where the sum rests. average: memory for the average that
        replaces the resting sum, if it is made elsewhere."""
        self.running, self.average = running, average
        self.came = self.back = Work()  # the receives of `running`, for this rank to add to, and of `average`
        self.beside: list[Tensor] = []  # other memory that it takes, until the average is there

    @property
    def into(self) -> Tensor | None:
        """The memory that this rank adds up in, if that is not where the sum rests."""
        return self.average if self.last else self.running

    def receive(self) -> None:
        """Launch the receive of `running`, if other ranks begin the sum."""

    def send(self) -> None:
        """Send what this rank has added to, if other ranks wait for it."""


SUMS = "sums"  # the stream in which a device adds them up


class _Messages(Memory[Tensor]):
    """The device's memory for messages, used again in backward once sums are done with it."""

    def __init__(self, tier: DeviceTier) -> None:
        self._tier = tier
        self.through = DeviceEvent()  # after all sums so far

    def reserve(self, state: str, numel: int, dtype: Any, *, zeroed: bool = True) -> Tensor:
        return self._tier.reserve(state, numel, dtype, zeroed=zeroed)

    def give_back(self, state: str, memory: Tensor) -> None:
        self.through.wait()
        self._tier.give_back(state, memory)

    def again(self, memory: Tensor) -> Tensor:
        self.through.wait()
        return memory

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Launch what is inside in the stream of sums, after all that backward has launched so far."""
        with behind(SUMS, self._tier.device):
            try:
                yield
            finally:
                self.through = event(self._tier.device)


@dataclass
class Sent:
    """One bucket's contributions on their way to the owners, and the sum on its way to where it rests."""

    contribution: Contribution
    work: Work
    receive: Tensor
    delivery: Delivery
    own: DeviceEvent  # the point that this rank's device reaches before it sends its part

    @property
    def running(self) -> Tensor | None:
        return self.delivery.running

    @property
    def awaited(self) -> Work:
        """The work that it waits for: contributions that this rank adds up, or the average."""
        return self.work if self.contribution.state is ContributionState.SENT else self.delivery.back

    def here(self) -> bool:
        """Tell if all has come that it needs to go on."""
        here = self.awaited.done()
        if here and self.contribution.state is ContributionState.SENT:
            self.delivery.receive()
            return self.delivery.came.done()
        return here


class Sums(Flow[Sent, Tensor]):
    """The sums of one model's buckets, while they are under way."""

    def __init__(
        self,
        group: Group,
        tier: DeviceTier,
        settings: Comm,
        subscribers: Sequence[Subscriber],
        deliver: Callable[[Accumulator, Scratch[Tensor]], Delivery],
        stored: Callable[[Contribution], None],
    ) -> None:
        """deliver: makes each sum's delivery. stored: called with each contribution whose average is where it rests."""
        self._memory = _Messages(tier)
        sends = group.team.messages(tier) if group.team.shares else None
        super().__init__(self._memory, sends, group.team.seat.waiting)
        self.group = group
        self._streams = streams(tier.device)
        self.native = settings.reduce == "native"
        self._sends_values = settings.reduce == "ordered" and group.ranks > 1
        self._subscribers = subscribers
        self._deliver = deliver
        self._stored = stored
        self.apart = True  # does the device make sums in a stream of their own?
        self._leaving: list[tuple[DeviceEvent, Tensor]] = []  # averages on their way from the device to where they rest

    # --- this rank's contribution -----------------------------------------------------------------------------------

    def room(self, contribution: Contribution, *, local: bool = False) -> None:
        """Give a contribution memory to be filled: full-size, in the dtype that it is sent in.

        local: under no_sync, in the gradients' dtype.
        """
        if contribution.state is ContributionState.ABSENT:
            contribution.fill(self._room(contribution, local=local), local=local)
        elif contribution.state is ContributionState.KEPT:
            # no_sync promises two passes in all: what it added up is sent together with the next backward's gradients.
            contribution.move(ContributionState.FILLING)

    def _room(self, contribution: Contribution, *, local: bool) -> Tensor:
        accumulator, bucket = contribution.accumulator, contribution.bucket
        dtype = bucket.grad_dtype if local else bucket.reduce_dtype
        # A full-size accumulator also serves as the memory of contributions, which have its size. A sum that it holds
        # already is copied elsewhere first. If a feature asks whose contribution spoiled a sum, the sum must not
        # overwrite this rank's own contribution.
        elsewhere = bucket.placements.gradients or not accumulator.sum.on_device or contribution.sources > 1
        holds = accumulator.filled or (self._sends_values and any(each.looks for each in self._subscribers))
        if elsewhere or self.group.team.shares or (holds and not local) or dtype != bucket.grad_dtype:
            return self.sends.take(contribution.plan.numel * contribution.sources, dtype)
        if holds:
            accumulator.set_aside(self.scratch.take)
        return accumulator.sum.tensor

    def drop(self, contribution: Contribution) -> None:
        """Give back the memory of a contribution, sent or not."""
        self._give_back(contribution, ContributionState.ABSENT)

    def _give_back(self, contribution: Contribution, state: ContributionState) -> None:
        for transient in (contribution.accumulator.aside, contribution.memory):
            if transient is not None and not self.scratch.give_back(transient):
                self.sends.give_back(transient)
        contribution.accumulator.aside = contribution.memory = None
        contribution.end(state)

    def send(self, contribution: Contribution) -> None:
        """Send a contribution to the owners of its shards."""
        self.room(contribution)
        accumulator, team, plan = contribution.accumulator, contribution.bucket.team, contribution.codec.plan
        send, own = contribution.encode(self.sends), plan.shard_numel(team.position)
        own_part = event(self.group.device)
        if self.native:
            receive = self.scratch.take(own, send.dtype)
            work = team.reduce_native(send, receive, plan)
        else:
            receive = self.scratch.take(own * team.room * contribution.sources, send.dtype)
            work = team.reduce(send, receive, plan, contribution.sources)
        contribution.move(ContributionState.SENT)
        self.begin(Sent(contribution, work, receive, self._deliver(accumulator, self.scratch), own_part))

    # --- the sum ----------------------------------------------------------------------------------------------------

    def land(self, sent: Sent) -> None:
        accumulator, delivery = sent.contribution.accumulator, sent.delivery
        own = accumulator.plan.shard_numel(accumulator.bucket.team.position)
        if own and delivery.running is None and self._staged(accumulator):
            delivery.average = self.scratch.take(own, accumulator.bucket.grad_dtype)
        with self._beside():
            sent.work.wait()
            delivery.receive()
            delivery.came.wait()
            self._add(sent)
            sent.work.used()
            delivery.send()

    def _add(self, sent: Sent) -> None:
        accumulator, delivery, receive = sent.contribution.accumulator, sent.delivery, sent.receive
        # Where the division is exact, the sum is divided as it lands: that saves the step a pass over memory.
        divided = divides_exactly(accumulator.bucket.grad_dtype, receive.dtype, accumulator.divisor)
        if delivery.first and not delivery.apart and not (divided and accumulator.averaged):
            accumulator.undo_average()
        own = accumulator.plan.shard_numel(accumulator.bucket.team.position)
        if own:
            nothing = contextlib.nullcontext()
            try:
                begun = accumulator.sum.here(changed=delivery.last, fresh=not accumulator.filled)
                # Does the fold read or write the resting sum?
                adds = delivery.first and (accumulator.filled or delivery.average is None)
                adds &= not (self._staged(accumulator) or delivery.apart)
                # Adding up where the sum rests off the device copies from the device.
                leaves = adds and delivery.into is None and not accumulator.sum.on_device
                nbytes = own * accumulator.sum.dtype.itemsize
                with begun if adds else nothing, accumulator.sum.copied(nbytes, leaves=True) if leaves else nothing:
                    if not simulated(receive):
                        self._fold(sent, divided=divided)
            except TierError as error:
                self.group.report(error)  # the peers have further reductions to get through
        accumulator.land(averaged=divided)

    def landed(self, sent: Sent) -> None:
        self._give_back(sent.contribution, ContributionState.LANDED)

    def _fold(self, sent: Sent, *, divided: bool) -> None:
        """Add all contributions to this shard to the sum that came or, on the first replica, to the accumulator's."""
        accumulator, delivery = sent.contribution.accumulator, sent.delivery
        into = delivery.into
        rests = delivery.last and accumulator.aside is not None and not delivery.apart
        total = accumulator.own if into is None or rests else into
        begins = delivery.first and not delivery.apart
        start = self._start(accumulator, total) if begins else delivery.start
        times = accumulator.divisor if begins and accumulator.averaged else 1
        pieces = [piece.to(total.device) for piece in self._pieces(sent)]
        fold(total, pieces, start=start, times=times, over=accumulator.divisor if delivery.last and divided else 1)
        for subscriber in self._subscribers:
            subscriber.summed(accumulator, pieces, total)
        if total is accumulator.aside:
            accumulator.sum.own.copy_(total)

    def _pieces(self, sent: Sent) -> list[Any]:
        """Return each rank's contribution to this rank's shard, in rank order; or the backend's sum of them."""
        contribution = sent.contribution
        if self.native or contribution.memory is None:
            return [sent.receive]
        team, codec = contribution.bucket.team, contribution.codec
        pieces = team.contributions(contribution.memory, sent.receive, codec.plan, contribution.sources)
        return [codec.decode(piece) for piece in pieces]

    @staticmethod
    def _staged(accumulator: Accumulator) -> bool:
        """Tell if sums are made on an accelerator, in rank order as anywhere, and then brought to where they rest."""
        return not accumulator.sum.rest.on_device and asynchronous(accumulator.bucket.team.device)

    def _start(self, accumulator: Accumulator, total: Tensor) -> Tensor | None:
        """Return the accumulator's sum on the device of `total`; None if it holds none."""
        if not accumulator.filled:
            return None
        if self._staged(accumulator):
            accumulator.sum.give(total)
            return total
        return accumulator.own.to(total.device)

    # --- the average ------------------------------------------------------------------------------------------------

    def wait(self, sent: Sent) -> None:
        if sent.running is not None:
            with self._beside():
                sent.delivery.back.wait()

    def store(self, sent: Sent) -> None:
        accumulator, average = sent.contribution.accumulator, sent.delivery.average
        unused = [average, *sent.delivery.beside]  # an average that could not be put where it rests, for one
        with self._beside():
            if sent.delivery.apart and average is not None:
                for each in self._subscribers:
                    each.summed(accumulator, (), average)
            try:
                if average is not None and not accumulator.sum.on_device:
                    self._leaving.append((accumulator.sum.take(average, fresh=True), average))
                    unused[0] = None
                accumulator.sum.behind()
            except TierError as error:
                self.group.report(error)
        if average is not None and unused[0] is None:
            self.leave(LEAVING * self._staged(accumulator))
        for memory in unused:
            self.scratch.give_back(memory)
        self._stored(sent.contribution)

    def _beside(self) -> contextlib.AbstractContextManager[None]:
        """Launch the block's work in the stream of sums, unless averages are used as they come."""
        return self._memory.beside() if self.apart and self._streams else contextlib.nullcontext()

    def join(self) -> None:
        """Let what the program launches from now on come after all sums."""
        self._memory.through.wait()

    def leave(self, allowed: int) -> None:
        """Give back the memory of averages that leave the device, but for the latest `allowed` of them."""
        while len(self._leaving) > allowed:
            through, average = self._leaving.pop(0)
            through.wait()
            self.scratch.give_back(average)

    def abandon(self) -> None:
        """Drop all that is under way, once all ranks have ended what they had launched."""
        self.drop_all()
        self.join()
        self.leave(0)
