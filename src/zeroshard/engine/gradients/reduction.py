"""Gradients on their way: counted as they appear, sent in one order, folded into the accumulators.

A bucket is ready when every trainable parameter in it has its gradient (counted by post-accumulate hooks, not by
module hooks, which fire too early when inputs need no gradient). Ready buckets are sent in one agreed order on every
rank, whatever order autograd finishes in. At the end of backward the ranks exchange which parameters got a gradient
anywhere and send the rest, with zeros where a rank has none.

Named hazard, *a second gradient*: inside a re-entrant checkpoint a parameter can receive a gradient more than once
in one backward (three segments that share a weight, say). Such a bucket waits for the end of the outermost backward.

Named hazard, *never wait before the end*: if a rank waits for a reduction, while a peer waits for this rank to join a
gather, or at the end of its backward, both wait for ever. So a rank that pauses for a sum asks the others, and goes on
if one of them waits for it: that sum cannot come yet, and going on costs bytes and no time. A rank cannot see all such
waits (those in a collective of the program's own, say), so a pause is also bounded in time, counted from when this
rank's own device has come that far. After one pause in vain, a backward pauses no more. If a pause ran out of time and
the ranks differed, pauses last an eighth until the ranks are alike again, since they will differ again. If the ranks
were alike, a rank was only slow, and the next backward pauses as long as the first did.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

from ...comm.agreement import Group
from ...comm.reduce_pipeline import Scratch
from ...comm.transport import Work
from ...device import DeviceEvent, event
from ...layout.limits import IN_FLIGHT
from ...policies.comm import Comm
from ...tiers.tier import DeviceTier
from ..weights.bucket import Bucket
from ..weights.unit import profiled
from .accumulator import Accumulator, Entry
from .contribution import Contribution, ContributionState, not_dense, second_gradient
from .gradient import Gradients
from .sharded_grad import ShardedGrad
from .subscriber import Subscriber
from .sums import Delivery, Sums

PAUSE = 0.5  # seconds that backward pauses at most for the oldest reduction
ASKS = 0.016  # seconds until a pausing rank first asks the others, if ranks were alike; then it asks ever more rarely
RARELY = 1.0  # seconds between two questions, at most
MOST = 2  # gradients of a parameter in one backward: two or more
REDUCED = "reduced", "or repeat the step: from now on they wait for the end"
UNHURRIED = 60.0  # the pause where held memory is compared with a plan: it must not depend on how busy a machine is


class Standstill:
    """One pause of backward for the oldest reduction, and why it ends before that has come."""

    def __init__(self, group: Group, own: DeviceEvent | None, pause: float, asks: float) -> None:
        """own: the event that this rank's device must reach before others can be late; by default, all work so far."""
        self._group = group
        self._pause = pause
        self._own = own or event(group.device)
        self._deadline: float | None = None
        self._asks, self._asked = asks, time.monotonic()

    def begun(self) -> bool:
        """Tell if this rank's device has reached `own`, so that only other ranks can be late."""
        if self._deadline is None and self._own.is_completed():
            self._deadline = time.monotonic() + self._pause
        return self._deadline is not None

    def in_vain(self) -> str:
        """Return why the pause ends in vain: "time" is up, or "parted" if ranks differ; "" while it goes on."""
        now = time.monotonic()
        if now > self._asked + self._asks:
            if self._group.parted():
                return "parted"
            self._asks, self._asked = min(4 * self._asks, RARELY), time.monotonic()
        return "time" if self._deadline is not None and now > self._deadline else ""


class Reduction:
    """The pipeline from `p.grad` to `Accumulator.sum` for all of a model's buckets."""

    def __init__(
        self,
        gradients: Gradients,
        group: Group,
        tier: DeviceTier,
        settings: Comm,
        deliver: Callable[[Accumulator, Scratch[Tensor]], Delivery],
    ) -> None:
        self.subscribers: list[Subscriber] = []
        self.gradients = gradients
        self.group = group
        self.settings = settings
        self.contributions: dict[int, Contribution] = {}  # by bucket index
        self.of_entry: list[Contribution] = []  # by number of entry
        self.order: list[int] = []  # bucket indices, in the order they are sent
        self._next = 0
        self.sums = Sums(group, tier, settings, self.subscribers, deliver, self._averaged)
        self._local = False
        self.divisor = group.sources  # what sums are divided by, if they begin in this backward
        self.silent = False  # does this rank's part of all gradients count as zero? (`Zero.join`)
        self._flushing = False
        self._pauses = True
        self.pause = PAUSE
        self._shortened = 1  # pauses are shorter by this factor, since ranks waited for each other in vain
        self._asks = ASKS
        self.in_vain = Counter[str]()  # the number of pauses in vain, by reason
        self._late = False  # did a pause of this backward run out of time?
        self._again: list[Entry] = []
        self._got = b""  # how many gradients each parameter got on the rank that got most, once that is known
        self._hidden: dict[int, Tensor | None] = {}  # by entry number, the p.grad taken in backward

    def add(self, contribution: Contribution) -> None:
        """Take in a bucket whose parameters receive gradients."""
        self.contributions[contribution.plan.index] = contribution
        self.of_entry += [contribution] * len(contribution.entries)
        self.order = sorted(self.contributions, reverse=True)

    # --- one backward -----------------------------------------------------------------------------------------------

    def kept(self) -> set[int]:
        """Return the numbers of the gradients that another backward would add to: those that were not cleared."""
        return self.gradients.having([entry for each in self.contributions.values() for entry in self._summed(each)])

    def _summed(self, contribution: Contribution) -> list[Entry]:
        return contribution.entries if contribution.accumulator.filled or contribution.unsent else []

    def begin(self, kept: set[int], *, local: bool) -> None:
        """Start counting. kept: from `kept`. local: under no_sync, contributions are added up here and not sent."""
        self._local, self._next, self._pauses, self._late, self._got = local, 0, True, False, b""
        self.group.begun_sums(0)
        self._again.clear()
        self.gradients.forget_answers()
        self.sums.apart = not any(each.early for each in self.subscribers)
        for contribution in self.contributions.values():
            contribution.begin()
            self._notice_cleared(contribution, kept)
            if not contribution.accumulator.filled:
                contribution.accumulator.divisor = self.divisor
            # No early update: backward may still need the bucket's frozen parameters, which must not change before.
            contribution.hold |= not (self.sums.apart or contribution.all_wanted)
        for each in self.subscribers:
            each.begin()
        self._hidden = self.gradients.take(kept)

    def _notice_cleared(self, contribution: Contribution, kept: set[int]) -> None:
        """Zero the sums of gradients that the user cleared since, singly or all together."""
        accumulator, entries = contribution.accumulator, self._summed(contribution)
        if not (kept and any(entry.number in kept for entry in entries)):
            self.gradients.hide(entries)
            accumulator.clear()
            self.sums.drop(contribution)
            return
        for entry in entries:
            cleared = entry.fragments and all(fragment.grad is None for fragment in entry.fragments)
            if entry.number in kept and cleared:
                accumulator.zero(entry.position)  # each owner of a part sees its own fragment cleared
            if entry.number not in kept:
                self.gradients.hide([entry])
                accumulator.zero(entry.position)
                if contribution.unsent:
                    contribution.zero(entry.position)

    def arrived(self, entry: Entry, contribution: Contribution, aside: Tensor | None, *, nested: bool) -> bool:
        """Add a parameter's gradient, set aside or in `p.grad`, to its bucket's contribution. Returns if it did."""
        param = entry.param
        with torch._C.DisableTorchFunctionSubclass():
            grad = param.grad if aside is None else aside
            if grad is None or isinstance(grad, ShardedGrad):
                return False  # the hook fires also when nothing was added
            param.grad = None
        if grad.layout is not torch.strided:
            raise not_dense(grad, entry.slot.name)
        if self.silent:
            return False
        received = contribution.received
        received[entry.position] = received.get(entry.position, 0) + 1
        if contribution.state is not ContributionState.FILLING:
            if contribution.launched:
                self._again.append(entry)
                return False
            self.sums.room(contribution, local=self._local)
        contribution.add(entry, grad.detach() if grad.requires_grad else grad)  # it does under create_graph=True
        contribution.hold |= nested and contribution.most != 1
        if not contribution.missing and not self._local:
            self._send_ready()
        return True

    def complete(self, bucket: Bucket) -> bool:
        """Tell if all of a bucket's parameters have their gradients, and no more may come in this backward."""
        contribution = self.contributions.get(bucket.plan.index)
        return contribution is not None and contribution.all_wanted and contribution.complete

    def _send_ready(self) -> None:
        while self._next < len(self.order):
            contribution = self.contributions[self.order[self._next]]
            if not (contribution.complete and contribution.received):
                return
            self._next += 1
            self._send(contribution)
            self._make_room()

    def _send(self, contribution: Contribution) -> None:
        with profiled("reduce", contribution.unit.name):
            self.sums.send(contribution)
        self.group.begun_sums(self._next)

    def _make_room(self) -> None:
        """While too many sums are under way, go on with the oldest one; pause for it, within bounds.

        The limit counts all sums, also those that have come already, so that the bytes held are known before the run.
        """
        allowed = IN_FLIGHT if self.settings.overlap else 0
        stands: Standstill | None = None
        while due := self._due(allowed):
            here, own, work, then = due
            if (stands is None or stands.begun()) and here():
                then()
                stands = None
                continue
            if not self._pauses:
                return
            since = time.perf_counter_ns()
            stands = stands or Standstill(self.group, own, self.pause / self._shortened, self._asks)
            if why := stands.in_vain():
                self._pauses, self._late = False, why == "time"
                self.in_vain[why] += 1
            else:
                time.sleep(0.0001)
            work.stood_still(since)

    def _due(self, allowed: int) -> tuple[Callable[[], bool], DeviceEvent | None, Work, Callable[[], None]] | None:
        """Return, of the oldest sum if more than `allowed` are under way: has it come?, the event before this rank's
        part, its Work, and how to go on with it."""
        for each in self.subscribers:
            if (work := each.due(min(allowed, 1))) is not None:
                return work.done, None, work, each.next
        found = self.sums.oldest(allowed)
        return found and (found[0].here, found[0].own, found[0].awaited, found[1])

    def _averaged(self, contribution: Contribution) -> None:
        came, got = contribution.received, self._got
        having = {e.number for e in contribution.entries if (got[e.number] if got else e.position in came)}
        for each in self.subscribers:
            each.averaged(contribution.accumulator, having)

    def _land_all(self) -> None:
        while self.sums.under_way:
            self.sums.next()
            self._catch_up(1)
        self._catch_up(0)
        self.sums.join()
        self.sums.leave(0)

    def _catch_up(self, allowed: int) -> None:
        """Let features use the oldest averages, until no more than `allowed` are left."""
        for each in self.subscribers:
            while each.due(allowed) is not None:
                each.next()

    # --- its end ----------------------------------------------------------------------------------------------------

    def received(self) -> bytes:
        """Count the gradients that each parameter got in this backward: 0, 1, or 2 for too many."""
        mask = bytearray(len(self.gradients.entries))
        for contribution in self.contributions.values():
            for position in contribution.received:
                mask[contribution.entries[position].number] = 1
        for entry in self._again:
            mask[entry.number] = 2
        return bytes(mask)

    def finish(self, received: bytes, *, usual: bool) -> None:
        """End the backward: exchange which parameters got a gradient anywhere, send the rest, wait for all of it, and
        show the gradients.

        usual: every parameter got one gradient on every rank, so there is nothing to exchange.
        """
        for contribution in self.contributions.values():
            if contribution.received:
                contribution.most = max(contribution.received.values())
        got = least = received
        if not usual:  # the second half yields the minimum
            told = self.group.flags(received + bytes(MOST - each for each in received))
            got, least = told[: len(received)], bytes(MOST - each for each in told[len(received) :])
        if got == least:  # the ranks were alike
            self._shortened, self._asks = 1, min(2 * self._asks, ASKS)
        else:
            self._shortened, self._asks = 8 if self._late else self._shortened, ASKS / 16
        if 2 in got:
            names = [entry.slot.name for entry in self.gradients.entries if got[entry.number] == 2]
            self.group.level("")
            used = next((each.second for each in self.subscribers if each.second), REDUCED)
            raise second_gradient(names, *used)
        self._got, with_gradient = got, set()
        for index, contribution in self.contributions.items():
            # What no_sync kept is sent with this backward, whatever that used: when it is sent must not depend on the
            # bucket.
            if contribution.unsent or any(got[e.number] for e in contribution.entries):
                with_gradient.add(index)
        if self._local:
            for contribution in (self.contributions[index] for index in with_gradient):
                if not contribution.launched:  # a question about gradients in this backward may have sent it
                    self.sums.room(contribution, local=True)
                    contribution.move(ContributionState.KEPT)
        else:
            for index in self.order[self._next :]:
                if index in with_gradient:
                    self._send(self.contributions[index])
            self._land_all()
        self.sums.trim()
        # Buckets that had a gradient on no rank go last next time, so that they do not hold the others back.
        self.order = sorted(self.contributions, key=lambda index: (index not in with_gradient, -index))
        self.gradients.put_back(self._hidden, got)  # autograd.grad(), for one, takes gradients without adding them
        self.gradients.show([entry for entry in self.gradients.entries if got[entry.number]])
        for each in self.subscribers:
            each.ended()

    @property
    def busy(self) -> bool:
        """True while sums are on their way, and after an exception ended that."""
        return self._flushing or self.sums.under_way

    def flush(self) -> None:
        """Send what no_sync left unsent, because gradients are used before another backward would send them."""
        kept = [index for index, contribution in self.contributions.items() if contribution.unsent]
        if not kept:
            return
        self.gradients.forget_answers()
        self.gradients.agree()
        with self.group.ledger.during("reduce"):
            self._flushing = True
            for index in sorted(kept, reverse=True):
                self._send(self.contributions[index])
            self._land_all()
            self._flushing = False
            self.sums.trim()

    def abort(self) -> None:
        """Drop all gradients after a backward failed half-way: what it added cannot be told from what was there.

        Nothing is on its way any more: all ranks have ended what they had launched.
        """
        self._flushing = False
        self.sums.abandon()
        for each in self.subscribers:
            each.abandon()
        for contribution in self.contributions.values():
            self.sums.drop(contribution)
            contribution.received.clear()
            contribution.accumulator.clear()
        self.sums.give_back_all()
        self.gradients.hide(self.gradients.entries)
        self.gradients.forget_answers()
        self.gradients.take_edits()
        self._hidden.clear()
        self.sums.trim()
        logging.getLogger("zeroshard").warning("an exception ended a backward or a step: all gradients were dropped")
