"""Gradients on their way: counted as they appear, sent in one order, folded into the accumulators.

A bucket is ready when every trainable parameter in it has its gradient (counted by post-accumulate hooks, not by
module hooks, which fire too early when inputs need no gradient). Ready buckets are sent in one agreed order on every
rank, whatever order autograd finishes in. At the end of backward the ranks exchange which parameters got a gradient
anywhere and send the rest, with zeros where a rank has none.

Named hazard, *a second gradient*: inside a re-entrant checkpoint a parameter can receive a gradient more than once
in one backward (three segments that share a weight, say). Such a bucket waits for the end of the outermost backward.

Named hazard, *never wait before the end*: a rank that waits for a reduction, while a peer waits for it to take part
in a gather, waits for ever. So until backward ends, waiting here is bounded, and given up for the rest of the backward
once it did not help. If the ranks differed in that backward it is an eighth until they do not, since they will differ
again. If they did not, a rank was only slow, and the next backward waits as long as the first did.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable

import torch
from torch import Tensor

from ..device import Event, asynchronous
from ..errors import TierError
from ..events import DEVICE
from ..headroom import IN_FLIGHT, LEAVING
from ..numerics import divides_exactly, fold, launch_once, running_dtype, simulated
from ..ranks.agreement import Group
from ..ranks.comm import Comm
from ..ranks.transport import Relay, Work
from ..tiers.tier import DeviceTier
from .accumulator import Accumulator, Entry, Updater
from .buffer import Buffer
from .finite import Finite
from .gradient import Gradients
from .pending import Pending, Scratch, Sent, check_dense, second_gradient
from .sharded_grad import ShardedGrad
from .unit import Unit, profiled

PAUSE = 0.5  # seconds that backward pauses at most for the oldest reduction
MOST = 2  # gradients of one parameter in a backward, or more
UNHURRIED = 60.0  # where what is held is compared with a plan, which must not depend on how busy a machine is


class Reduction:
    """The pipeline from `p.grad` to `Accumulator.sum` for all of a model's buckets."""

    def __init__(
        self, gradients: Gradients, group: Group, tier: DeviceTier, settings: Comm, finite: Finite, *, apart: bool
    ) -> None:
        """apart: gradients of parameters along an axis are sent source by source."""
        self._apart = apart
        self.finite = finite
        self.gradients = gradients
        self.group = group
        self.settings = settings
        self.pending: dict[int, Pending] = {}  # bucket index -> pending
        self.pending_of: list[Pending] = []  # by number of entry
        self.order: list[int] = []  # bucket indices, in the order they are sent
        self._next = 0
        self._under_way: list[Sent] = []  # until this rank has added its part
        self._relayed: list[Sent] = []  # and from then on until it has the average
        self._leaving: list[tuple[Event, Tensor]] = []  # averages on their way from the device to where they rest
        self.scratch = Scratch(tier, "reduce")
        # What is sent lies where other ranks can read it, if they do.
        self.sends = Scratch(group.team.messages(tier), "reduce") if group.team.shares else self.scratch
        self._local = False
        self.silent = False  # does this rank's part of all gradients count as zero? (`Zero.join`)
        self._flushing = False
        self._pauses = True
        self.pause = PAUSE
        self._shortened = 1  # by this factor, since ranks were seen to wait for each other in vain
        self._again: list[Entry] = []
        self.updater = Updater()
        self._got = b""  # how many gradients each parameter got on the rank that got most, once that is known
        self._hidden: dict[int, Tensor | None] = {}  # by entry number, the p.grad that makes way

    def add(self, accumulator: Accumulator, unit: Unit) -> None:
        index = accumulator.bucket.index
        sources, codes = accumulator.buffer.team.seat.parts if self._apart else 1, self.settings.reduce == "int8"
        self.pending[index] = pending = Pending(accumulator, unit, sources=sources, codes=codes)
        self.pending_of += [pending] * len(accumulator.buffer.params)
        self.order = sorted(self.pending, reverse=True)

    def launch_once(self) -> None:
        """Let the device load what backwards will launch, before it waits for messages: see `numerics.launch_once`."""
        if not asynchronous(self.group.device):
            return
        buffers = [pending.buffer for pending in self.pending.values()]
        for sums, sent, master in sorted({(b.grad_dtype, b.reduce_dtype, b.formats.master) for b in buffers}, key=str):
            like = torch.empty(0, dtype=sums, device=self.group.device)
            if not simulated(like):
                launch_once(like, sent, master, self.group.sources)

    # --- one backward -----------------------------------------------------------------------------------------------

    def kept(self) -> set[int]:
        """Return the numbers of the gradients that another backward would add to: those that were not cleared."""
        return self.gradients.having([entry for each in self.pending.values() for entry in self._summed(each)])

    def _summed(self, pending: Pending) -> list[Entry]:
        accumulator = pending.accumulator
        if not accumulator.filled and accumulator.local is None:
            return []
        return accumulator.entries

    def begin(self, kept: set[int], *, local: bool) -> None:
        """Start counting. kept: as above. local: under no_sync, contributions are added up here and not sent."""
        self._local, self._next, self._pauses, self._got = local, 0, True, b""
        self._again.clear()
        self.gradients.forget_answers()
        for pending in self.pending.values():
            pending.received.clear()
            pending.launched = pending.hold = False
            for entry in pending.entries if pending.sources > 1 else ():
                entry.param._zeroshard.apart = None  # type: ignore[attr-defined]
            self._notice_cleared(pending, kept)
            pending.expect()
            # What is not trained any more may be needed further on, and must not change before.
            pending.hold = self.updater.early and not pending.all_wanted
        self.finite.begin()
        self._hidden = self.gradients.take(kept)

    def _notice_cleared(self, pending: Pending, kept: set[int]) -> None:
        """Zero the sums of gradients that the user cleared since, singly or all together."""
        accumulator, entries = pending.accumulator, self._summed(pending)
        if not any(entry.number in kept for entry in entries):
            self.gradients.hide(entries)
            accumulator.clear()
            self._drop(pending)
            return
        for entry in entries:
            cleared = entry.fragments and all(fragment.grad is None for fragment in entry.fragments)
            if entry.number in kept and cleared:
                accumulator.zero(entry.position)  # each owner of a part sees its own fragment cleared
            if entry.number not in kept:
                self.gradients.hide([entry])
                accumulator.zero(entry.position)
                if accumulator.local is not None:
                    for place in pending.places(accumulator.local, entry.position):
                        place.zero_()

    def arrived(self, entry: Entry, pending: Pending, aside: Tensor | None, *, nested: bool) -> bool:
        """Add a parameter's gradient, set aside or in `p.grad`, to its bucket's contribution. Returns if it did."""
        param = entry.param
        with torch._C.DisableTorchFunctionSubclass():
            grad = param.grad if aside is None else aside
            if grad is None or isinstance(grad, ShardedGrad):
                return False  # the hook fires also when nothing was added
            param.grad = None
        check_dense(grad, entry.slot.name)
        if self.silent:
            return False
        at = entry.position
        before = pending.received.get(at, 0)
        pending.received[at] = before + 1
        if pending.launched:
            self._again.append(entry)
            return False
        send = self._send_buffer(pending) if pending.send is None else pending.send
        grad = grad.detach() if grad.requires_grad else grad  # where backward's own graph is wanted
        for place, each in zip(pending.places(send, at), pending.by_source(entry, grad), strict=True):
            if before or send is pending.accumulator.local:
                place.add_(each)
            else:
                place.copy_(each)
        pending.missing.discard(at)
        if pending.unit.calls > 1 or (nested and pending.most != 1) or (pending.most or 0) > 1:
            pending.hold = True
        if not pending.missing and not self._local:
            self._send_ready()
        return True

    def complete(self, buffer: Buffer) -> bool:
        """Tell if all of a bucket's parameters have their gradients, and no more may come in this backward."""
        pending = self.pending.get(buffer.bucket.index)
        return pending is not None and pending.all_wanted and pending.complete

    def _send_buffer(self, pending: Pending) -> Tensor:
        """Return the memory for this rank's contribution: full-size, in the dtype that it is sent in."""
        accumulator, buffer = pending.accumulator, pending.buffer
        # A full-size accumulator doubles as the place to put contributions: they are of its size. What it holds already
        # has to go aside; and where it may be asked whose contribution spoiled a sum, the own one must outlive that.
        placed, sources = buffer.placements.gradients, pending.sources
        elsewhere = placed or not accumulator.sum.on_device or sources > 1 or self.group.team.shares
        numel = buffer.bucket.numel * sources
        asked = self.finite.on and self.group.ranks > 1 and self.settings.reduce == "ordered"
        if self._local and accumulator.local is None:
            if elsewhere:
                accumulator.local = self.sends.take(numel, buffer.grad_dtype)
            else:
                if accumulator.filled or asked:
                    accumulator.undo_average()
                    own = self.scratch.take(accumulator.own.numel(), buffer.grad_dtype)
                    accumulator.aside = own.copy_(accumulator.own)
                accumulator.local = accumulator.sum.tensor
            accumulator.local.zero_()
        if accumulator.local is not None:
            # no_sync promised two passes in all: what it added up travels with the next backward's gradients.
            pending.send = accumulator.local
        elif pending.send is None:
            elsewhere = elsewhere or accumulator.filled or asked
            if not elsewhere and buffer.grad_dtype == buffer.reduce_dtype:
                pending.send = accumulator.sum.tensor
            else:
                pending.send = self.sends.take(numel, buffer.reduce_dtype)
        return pending.send

    def _send_ready(self) -> None:
        while self._next < len(self.order):
            pending = self.pending[self.order[self._next]]
            if not (pending.complete and pending.received):
                return
            self._next += 1
            self._send(pending)
            self._make_room()

    def _send(self, pending: Pending) -> None:
        accumulator, buffer = pending.accumulator, pending.buffer
        send = self._send_buffer(pending)
        if send is not accumulator.local:
            pending.fill(send)
        team, bucket = buffer.team, pending.message
        with profiled("reduce", pending.unit.name):
            send, own = pending.encoded(send, self.sends), bucket.shard_numel(team.position)
            if self.settings.reduce == "native":
                receive = self.scratch.take(own, send.dtype)
                work = team.reduce_native(send, receive, bucket)
            else:
                receive = self.scratch.take(own * team.room * pending.sources, send.dtype)
                work = team.reduce(send, receive, bucket, pending.sources)
        pending.launched = True
        self._under_way.append(Sent(pending, work, receive, self._relay(accumulator)))

    def _relay(self, accumulator: Accumulator) -> Relay:
        """Make the relay that takes one bucket's sum from this rank to the other replicas."""
        bucket, buffer = accumulator.bucket, accumulator.buffer
        team = buffer.team
        if team.seat.summed == 1:
            return team.relay(bucket, None, None)
        own = bucket.shard_numel(team.position)
        running = self.scratch.take(own, running_dtype(buffer.grad_dtype))
        # What replaces a shard of the sum comes straight to where that rests: it cannot come before that was read.
        average = accumulator.sum.own if accumulator.sum.on_device else self.scratch.take(own, buffer.grad_dtype)
        return team.relay(bucket, running, average)

    def _make_room(self) -> None:
        """While too much is under way, fold the oldest; wait for it, within bounds.

        By count and not by what has come in already, so that the bytes held are known before the run.
        """
        allowed = IN_FLIGHT if self.settings.overlap else 0
        deadline = time.monotonic() + self.pause / self._shortened
        while due := self._due(allowed):
            here, work, then = due
            if here():
                then()
            elif not self._pauses:
                return
            elif time.monotonic() > deadline:
                self._pauses = False
            else:
                since = time.perf_counter_ns()
                time.sleep(0.0001)
                work.stood_still(since)

    def _due(self, allowed: int) -> tuple[Callable[[], bool], Work, Callable[[], None]] | None:
        """Return the oldest reduction if too many are in flight: (is it done?, its Work, how to finish it)."""
        if (rest := self.updater.due(min(allowed, 1))) is not None:
            return rest.done, rest, self.updater.update_first
        if len(self._relayed) > allowed + self.group.team.seat.replicas:
            back = self._relayed[0].relay.back
            return back.done, back, self._store_first
        if len(self._under_way) > allowed:
            return self._under_way[0].here, self._under_way[0].work, self._land_first
        return None

    def _land_first(self) -> None:
        sent = self._under_way[0]  # until it has landed: an exception may come at any moment
        sent.work.wait()
        sent.relay.receive()
        sent.relay.came.wait()
        accumulator, relay, receive = sent.accumulator, sent.relay, sent.receive
        own, staged = accumulator.bucket.shard_numel(accumulator.buffer.team.position), self._sums_staged(accumulator)
        if own and relay.running is None and staged:
            relay.average = self.scratch.take(own, accumulator.buffer.grad_dtype)
        # Where nothing is lost by it the sum is divided as it lands, which saves a step a pass of its own.
        divided = divides_exactly(accumulator.buffer.grad_dtype, receive.dtype, self.group.sources)
        if relay.first and not (divided and accumulator.averaged):
            accumulator.undo_average()
        if own:
            try:
                begun = accumulator.sum.here(changed=relay.last, fresh=not accumulator.filled)
                # Is added to what rests, or into it?
                adds = relay.first and (accumulator.filled or relay.average is None) and not staged
                with begun if adds else contextlib.nullcontext():
                    if not simulated(receive):
                        self._fold(sent, divided=divided)
            except TierError as error:
                self.group.report(error)  # the peers have further reductions to get through
        sent.work.used()
        accumulator.filled, accumulator.averaged, accumulator.spread = True, divided, False
        relay.hand_on()
        self._relayed.append(sent)
        self.scratch.give_back(receive)
        self._drop(sent.pending)
        self._under_way.pop(0)
        if relay.running is None and len(self._relayed) == 1:
            # Not before the sums ahead of it, though nothing of it is on its way: where each average is gathered, all
            # ranks of a team gather in one order, and other ranks may have a part of this one.
            self._store(self._relayed.pop())

    def _fold(self, sent: Sent, *, divided: bool) -> None:
        """Add this rank's contributions to what came, or, on the first replica, to what there is."""
        accumulator, relay = sent.accumulator, sent.relay
        into = relay.running if not relay.last else relay.average
        total = accumulator.own if into is None or (relay.last and accumulator.aside is not None) else into
        start = relay.running if not relay.first else self._start(accumulator, total)
        times = self.group.sources if relay.first and accumulator.averaged else 1
        pieces = [piece.to(total.device) for piece in sent.pieces(native=self.settings.reduce == "native")]
        fold(total, pieces, start=start, times=times, over=self.group.sources if relay.last and divided else 1)
        self.finite.look_at_gradient(accumulator, pieces, total)
        if total is accumulator.aside:
            accumulator.sum.own.copy_(total)

    @staticmethod
    def _sums_staged(accumulator: Accumulator) -> bool:
        """Tell if sums are made on an accelerator, in rank order as anywhere, and then brought to where they rest."""
        return accumulator.sum.rest.tier != DEVICE and asynchronous(accumulator.buffer.team.device)

    def _start(self, accumulator: Accumulator, total: Tensor) -> Tensor | None:
        """Return the sum that there is already, where `total` will be made."""
        if not accumulator.filled:
            return None
        if self._sums_staged(accumulator):
            accumulator.sum.give(total)
            return total
        return accumulator.own.to(total.device)

    def _store_first(self) -> None:
        self._relayed[0].relay.back.wait()  # an interrupt may come here: then it is still under way
        self._store(self._relayed.pop(0))

    def _store(self, sent: Sent) -> None:
        """Finish a reduction whose average has landed: put that where it rests, and give memory back."""
        accumulator, relay = sent.accumulator, sent.relay
        relay.back.wait()
        self.scratch.give_back(relay.running)
        average = relay.average
        with self.gradients.reporting():
            if average is not None and not accumulator.sum.on_device:
                self._leaving.append((accumulator.sum.take(average, fresh=True), average))
                average = None
                self._leave(LEAVING * self._sums_staged(accumulator))
            accumulator.sum.behind()
        self.scratch.give_back(average)  # one that could not be put where it rests
        came, got = sent.pending.received, self._got
        having = {e.number for e in accumulator.entries if (got[e.number] if got else e.position in came)}
        self.updater.landed(accumulator, having)

    def _leave(self, allowed: int) -> None:
        """Let the memory of averages that leave the device serve others, but for so many."""
        while len(self._leaving) > allowed:
            through, average = self._leaving.pop(0)
            through.wait()
            self.scratch.give_back(average)

    def _land_all(self) -> None:
        while self._under_way or self._relayed:
            (self._land_first if self._under_way else self._store_first)()
            self.updater.catch_up(1)
        self.updater.catch_up(0)
        self._leave(0)

    def _drop(self, pending: Pending) -> None:
        """Give back the memory of this rank's contribution, sent or not."""
        accumulator = pending.accumulator
        for transient in (accumulator.aside, accumulator.local if pending.send is None else pending.send):
            self.scratch.give_back(transient)
            self.sends.give_back(transient)
        accumulator.aside = accumulator.local = pending.send = None

    # --- its end ----------------------------------------------------------------------------------------------------

    def received(self) -> bytes:
        """Count the gradients that each parameter got in this backward: 0, 1, or 2 for too many."""
        mask = bytearray(len(self.gradients.entries))
        for pending in self.pending.values():
            for position in pending.received:
                mask[pending.entries[position].number] = 1
        for entry in self._again:
            mask[entry.number] = 2
        return bytes(mask)

    def finish(self, received: bytes, *, usual: bool) -> None:
        """End the backward: exchange which parameters got a gradient anywhere, send the rest, wait for all of it, and
        show the gradients.

        usual: every parameter got one gradient on every rank, so there is nothing to exchange.
        """
        for pending in self.pending.values():
            if pending.received:
                pending.most = max(pending.received.values())
        got = least = received
        if not usual:  # the second half says how few
            told = self.group.flags(received + bytes(MOST - each for each in received))
            got, least = told[: len(received)], bytes(MOST - each for each in told[len(received) :])
        if got == least:  # the ranks were alike
            self._shortened = 1
        elif not self._pauses:
            self._shortened = 8
        if 2 in got:
            names = [entry.slot.name for entry in self.gradients.entries if got[entry.number] == 2]
            self.group.level("")
            raise second_gradient(names, stepped=self.updater.early)
        self._got, with_gradient = got, set()
        for index, pending in self.pending.items():
            # What no_sync kept goes with this backward, whatever it used: when it goes must not depend on the bucket.
            if pending.accumulator.local is not None or any(got[e.number] for e in pending.entries):
                with_gradient.add(index)
        if self._local:
            for index in with_gradient:
                self._send_buffer(self.pending[index])
        else:
            for index in self.order[self._next :]:
                if index in with_gradient:
                    self._send(self.pending[index])
            self._land_all()
        for pending in self.pending.values():
            pending.send = None
        self._trim()
        # Buckets that had a gradient on no rank go last next time, so that they do not hold the others back.
        self.order = sorted(self.pending, key=lambda index: (index not in with_gradient, -index))
        self.gradients.put_back(self._hidden, got)  # autograd.grad(), for one, takes gradients without adding them
        self.gradients.show(entry for entry in self.gradients.entries if got[entry.number])
        self.updater.ended()

    def _trim(self) -> None:
        self.scratch.trim()
        self.sends.trim()

    @property
    def busy(self) -> bool:
        """True while sums are on their way, and after an exception ended that."""
        return self._flushing or bool(self._under_way or self._relayed)

    def flush(self) -> None:
        """Send what no_sync left unsent, because gradients are used before another backward would send them."""
        pending = [index for index, pending in self.pending.items() if pending.accumulator.local is not None]
        if not pending:
            return
        self.gradients.forget_answers()
        self.gradients.agree()
        with self.group.ledger.during("reduce"):
            self._flushing = True
            for index in sorted(pending, reverse=True):
                self._send(self.pending[index])
            self._land_all()
            self._flushing = False
            self._trim()

    def abort(self) -> None:
        """Drop all gradients after a backward failed half-way: what it added cannot be told from what was there.

        Nothing is on its way any more: all ranks have ended what they had launched.
        """
        self._relayed, self._under_way, self._flushing = [], [], False
        self._leave(0)
        self.updater.abort()
        for pending in self.pending.values():
            self._drop(pending)
            pending.received.clear()
            pending.accumulator.clear()
        self.scratch.give_back_all()
        self.sends.give_back_all()
        self.gradients.hide(self.gradients.entries)
        self.gradients.forget_answers()
        self.gradients.take_edits()
        self._hidden.clear()
        self._trim()
        logging.getLogger("zeroshard").warning("a backward ended by an exception: all gradients were dropped")
