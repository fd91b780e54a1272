"""An engine's launches of collectives and waits for them, and recovery of all ranks after an interrupt.

Named hazard, *a wait for the dead*: gloo reports a dead peer only to the ranks that wait for that very peer, and wakes
no other rank before its time-out. So ranks wait in slices. Between two slices they look at `watch.alarm`, and Python
handles signals.

If an interrupt takes a rank out of work in which others wait for it, the rank calls all of them to a levelling before
it does anything else: see `launch_log.py`. If its program does something else first, the others look for that rank:
see `departed.py`.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import time
import weakref
import zlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from ..errors import PeerError, StateError
from ..events import Ledger
from .abort import BY_ITSELF, Ending
from .agreement import Progress, refuse_forked
from .departed import LOOKS, WAITS, next_looked_at
from .frames import Call
from .groups import Groups, launches
from .launch_log import Launch, Stream, prune
from .shared_memory import SharedStream, join_launched
from .watch import ENDED, GONE, PATIENCE

SLICE = timedelta(seconds=0.2)  # of a wait; between two, alarms and signals are seen
EVERY_RANK = (
    "every rank calls the model, steps and saves; of loaders of unequal length, for batch in zero.join(loader): ...; "
    "or with zero.gathered(): ... any of them calls it, without grad"
)
STATE, THROUGH = "state", "through"  # are posted at a levelling's begin and end
HEEDS = round(BY_ITSELF / SLICE.total_seconds())  # slices, after which calls to a levelling are seen too
SELDOM = round(PATIENCE / SLICE.total_seconds())  # slices from one look at other ranks to the next, at most


class Link:
    """One engine's way to launch collectives and wait for them, and to find the rank to blame if one fails."""

    def __init__(self, groups: Groups, ledger: Ledger, progress: Progress) -> None:
        self.groups = groups
        self.ledger = ledger
        self.progress = progress
        self.rank = dist.get_rank(groups.parent)
        self.process = os.getpid()
        self.behind = False  # does a thread behind the training use it? It has no interrupts, and hears of none
        self.saves = False  # True for a save, in which ranks may write for as long as they need
        self.engine = groups.number()  # models sharded over one group are told apart by the order of their making
        self._weak = weakref.ref(self)

    def launch(self, stream: Stream, what: Launch, call: Callable[..., Any], *args: Any) -> Any:
        """Launch a collective by a function of C with its arguments. what: describes it, so that others can join."""
        if os.getpid() != self.process:
            refuse_forked(self.process, self.rank)
        if not dist.is_initialized():
            raise StateError(
                "the process group is gone",
                where=f"rank {self.rank}: {self.doing()}",
                instead="torch.distributed.destroy_process_group() after the last use of the model",
            )
        if self.interrupted or (stream.queued and self.groups.ends):
            self.heed()
        if stream.levels is not None:
            stream.levels.settle()
        try:
            return stream.launch(what, call, *args)
        except (RuntimeError, ValueError) as error:
            if stream.queued and self.groups.ends:  # it was aborted in between
                self.heed()
            raise self._loss(error) from None

    def broadcast(self, stream: Stream, part: Tensor, source: int, whole: Launch, low: int) -> Any:
        """Launch a broadcast of `part`, which begins at byte `low` of `whole`: (bucket, state, bytes).

        source: the sender's rank among all processes.
        """
        root = dist.get_group_rank(stream.group, source)
        what = "broadcast", self.engine, *whole, low, low + part.numel(), root
        return self.launch(stream, what, *broadcast(stream, part, root))

    def wait(self, verb: str, bucket: int | None, handle: Any, *, queued: bool = False, ahead: bool = False) -> None:
        """Wait for a collective. queued: it runs in a device's queue. For buckets, and for what may go `ahead`, only
        the queue waits; for all else this thread waits."""
        if os.getpid() != self.process:
            refuse_forked(self.process, self.rank)
        levels = self.groups.gathers.levels
        if levels is not None and not self.behind and verb not in ("gather", "share"):
            levels.settle()  # launch second levels of gathers: another rank may wait for them before it comes here
        self.groups.speaker = self._weak
        self.progress.awaited = verb, bucket
        within = self.groups.call
        if not self.behind and (within is None or not within.running()):
            self.groups.call = Call()  # in waits of a verb it stays the verb's call
        since = time.perf_counter_ns()
        if queued and (ahead or bucket is not None):
            self._wait_for(handle)  # the device's queue waits, not this thread
        else:
            self._wait_in_slices(handle, queued=queued)
        if queued and self.groups.ends:  # an aborted collective counts as completed, with arbitrary data
            self.heed()
        self.progress.awaited = None
        if not self.behind:
            self.ledger.waited += time.perf_counter_ns() - since
            self.groups.call = within
            prune(self.groups.levelling)  # a thread behind the training prunes its own

    def _wait_in_slices(self, handle: Any, *, queued: bool, levelling: bool = False) -> None:
        asked, looks, turn = time.monotonic(), HEEDS, 0
        for slices in itertools.count(1):
            error: Exception = RuntimeError("it did not come in time")
            try:
                if not queued and handle.wait(SLICE):  # False: shared memory was not posted in this slice
                    return
            except (RuntimeError, ValueError) as failed:
                if failed.__traceback__ is not None and failed.__traceback__.tb_next is not None:
                    raise  # a signal's handler has failed, not the collective
                error = failed
            if handle.is_completed() or (queued and _completes(handle)):
                self._wait_for(handle)  # it failed, or ended after the slice did
                return
            late = queued and time.monotonic() > asked + self.groups.limit  # other handles fail by themselves
            if self.groups.watch.alarm or self.lost or late:
                raise self._loss(error) from None
            if self.saves and time.monotonic() > asked + self.groups.limit:
                if self.groups.watch.lost_ranks():  # a rank that still writes answers
                    raise self._loss(error) from None
                asked = asked if self.groups.watch.unheard else time.monotonic()
            # Not at once: if all ranks raise the same exception, a slower rank gets to its own, because the others have
            # launched all that it waits for until then. Only a wait for a launch that never comes does not end.
            if not levelling and (slices >= HEEDS or self.interrupted):
                self.heed()
            if slices == looks and not (levelling or self.behind):
                looks, turn = looks + min(looks, SELDOM), turn + self._look(handle, turn)

    def _wait_for(self, handle: Any) -> None:
        try:
            handle.wait()
        except (RuntimeError, ValueError) as error:
            raise self._loss(error) from None  # whose message has the error's words if no rank can be blamed

    # --- interrupts -------------------------------------------------------------------------------------------------

    def begin(self, call: Call) -> None:
        """Begin a verb that is not inside another one. If an interrupt left an earlier verb, level that and raise."""
        if self.behind:
            return
        if self.lost:
            raise self._loss(RuntimeError("an earlier collective did not complete"))
        self.heed()
        self.groups.call = call

    def end(self) -> None:
        if not self.behind:
            self.groups.call = None

    @property
    def interrupted(self) -> bool:
        """True if an exception left a verb in its middle."""
        call = self.groups.call  # read once: the watch's thread asks too, and a verb that ends drops its call first
        return call is not None and not call.running() and self.groups.call is call

    def heed(self) -> None:
        """Take part in a levelling, if a rank has called for one, and raise `PeerError` to tell of it."""
        groups = self.groups
        if self.behind:
            return
        left = self.left_by_others
        if left and self.rank not in left and not self.interrupted:
            self._leave(left)
        if not (left or groups.watch.called > groups.levellings or groups.ends or self.interrupted):
            return
        where = f"rank {self.rank}: {self.doing()}"
        whys = self.level("an exception ended what it was at" * self.interrupted)
        raise PeerError(
            "a rank was interrupted: all ranks have ended the same collectives",
            where=where,
            got="; ".join(whys),
            instead="try again on every rank, from zero_grad() or the call that was interrupted; or end the program",
        )

    @property
    def left_by_others(self) -> dict[int, str]:
        """The ranks that others have stopped waiting for before the next levelling, and why."""
        return self.groups.watch.left.get(self.groups.levellings + 1, {})

    def _look(self, handle: Any, turn: int) -> bool:
        """Look at some of the ranks that a wait is for, and raise `PeerError` if one of them will not come."""
        groups, found = self.groups, None
        for place, stream in enumerate(groups.levelling):
            if (number := stream.number_of(handle)) is not None:
                found = place, number, stream
        if found is None or len(found[2].members) == 1:
            return False
        place, number, stream = found
        verb = self.progress.awaited[0] if self.progress.awaited else ""
        backward = verb.startswith("backward") and not self.progress.left
        looked_at = next_looked_at(stream.members, self.rank, turn)
        told = groups.watch.look(looked_at, groups.ranks[self.rank], self.engine, launches())
        if stream.lazy and any(each.silence == GONE for each in told.values()):
            # Gloo waits for a rank that has ended before the two were connected, some versions beyond the time-out
            # (pytorch/gloo issue 520).
            raise self._loss(RuntimeError("a rank has ended, and was not connected yet"))
        left = {rank: each.left.keeps(place, number, backward=backward) for rank, each in told.items() if each.left}
        if left := {rank: why for rank, why in left.items() if why}:
            groups.watch.say_left(groups.levellings + 1, left)
            self._leave(left)
        return True

    def _look_at_absent(self, absent: list[int]) -> None:
        """Leave a levelling to this rank's next verb if one of the `absent` ranks waits for this rank elsewhere."""
        told = self.groups.watch.look(absent[:LOOKS], self.groups.ranks[self.rank], self.engine, launches())
        if left := {rank: each.left.stands_in for rank, each in told.items() if each.left and each.left.stands_in}:
            self._leave(left)

    def _leave(self, left: dict[int, str]) -> NoReturn:
        """Stop waiting, because other ranks have left what this rank waits for. This rank's next verb levels it.

        Not now: the others come to a levelling only after what their programs do first, perhaps with this rank.
        """
        groups, where = self.groups, f"rank {self.rank}: {self.doing()}"
        if groups.queued:  # this device may wait for what the others never launch, and their vote for this device
            groups.end(groups.levellings + 1)
        groups.call = groups.call or Call()
        again = (
            "catch this error here and the other rank's error there, vote if you like, "
            "and try again on every rank, from zero_grad() or the call that was left; or end the program"
        )
        waits = all(why.startswith(WAITS) for why in left.values())  # then no rank need have raised an error
        raise PeerError(
            "another rank waits for this one in a collective of its program's, and this one for it in zeroshard's"
            if waits
            else "another rank has left what this rank is at, which all ranks do together",
            where=where,
            got="; ".join(f"rank {rank}: {why}" for rank, why in sorted(left.items())),
            instead=f"{EVERY_RANK}; if a forward calls that collective and uses other units on each rank, as experts: "
            "Layout(units=[...]) with the module that calls it in place of those inside, which are then gathered "
            f"before it begins. After an error on the other rank: {again}"
            if waits
            else again,
        )

    def level(self, why: str) -> list[str]:
        """End what is under way on all ranks. Returns the reasons of the ranks that had to end something."""
        groups, watch = self.groups, self.groups.watch
        number = groups.levellings + 1
        ending = groups.end(number) if groups.queued else None
        if ending is not None:
            ending.wait()
        if (number, STATE) not in watch.posted:  # else this goes on with a levelling that an interrupt ended
            streams = [[each.count, each.last, [*each.members]] for each in groups.levelling]
            groups.alive = {each: (group, group.party) for each, group in sorted(groups.engines.items())}
            models = {each: group.told() for each, (group, _) in groups.alive.items()}
            told = {"why": why, "streams": streams, "engines": models}
            watch.posted[number, STATE] = packed(told | {"spreads": groups.spreads})
        states, engines = [unpacked(posted) for posted in self._posted(number, STATE)], groups.alive
        at_place = [[each["streams"][at] for each in states] for at in groups.sums]
        # For any sums, also those that this rank has no part in: either all ranks drop gradients, or none does.
        uneven = any(there[rank][0] != own[0] for there in at_place for own in there for rank in own[2])
        ours = []
        for at, stream in enumerate(groups.levelling):
            found = [states[rank]["streams"][at] for rank in stream.members if at < len(states[rank]["streams"])]
            most, last = max(found, key=lambda each: int(each[0]))[:2]
            if stream.queued:
                continue
            ours.append(stream)
            if most - stream.count > len(last):
                raise self._loss(RuntimeError(f"{most - stream.count} collectives behind the others"))
            for what in last[len(last) - (most - stream.count) :]:
                self._join(stream, what)
        for handle in [handle for stream in ours for handle in stream.under_way]:
            self._wait_in_slices(handle, queued=False, levelling=True)
        spreads = any(each["spreads"] for each in states)
        if ending is not None and (cut := self._begin_anew(ending, [each["streams"] for each in states])):
            # Data that was on its way may be arbitrary now, also at rest: gradients, or numbers that scaled them.
            uneven, spreads = uneven or not cut <= {"parameters", ""}, True
        watch.posted[number, THROUGH] = THROUGH
        self._posted(number, THROUGH)
        for stream in ours:
            stream.discard()
        for engine, (group, _) in engines.items():
            group.levelled([each["engines"][str(engine)] for each in states if str(engine) in each["engines"]], uneven)
        for heard in [each for each in watch.posted if each[0] < number]:  # all ranks have these by now
            watch.posted.pop(heard, None)
        groups.spreads = spreads
        groups.call, self.progress.awaited, groups.levellings = Call(), None, number
        for engine, (group, _) in engines.items() if spreads else ():
            if all(each["engines"].get(str(engine), {}).get("alive") for each in states):
                group.spread()
        groups.call, groups.spreads, groups.alive = None, False, {}
        return [f"rank {rank}: {each['why']}" for rank, each in enumerate(states) if each["why"]]

    def _begin_anew(self, ending: Ending, states: list[list[list[Any]]]) -> set[str]:
        """Make the groups of a device's queues anew, unless all that was launched there gets through by itself.

        Returns the states of which something was cut off; for sums, "gradients".
        """
        groups = self.groups
        cut = {
            "gradients" if at in groups.sums else state_of(what)
            for streams in states
            for place, at in enumerate(groups.queues)
            for count, last, members in [streams[at]]
            for what in last[len(last) - max(count - ending.limits.get((place, tuple(members)), count), 0) :]
        }
        try:
            if ending.error is not None:
                raise ending.error
            if cut and not ending.over:
                ending.end()
                groups.begin_anew(ending, [[streams[at] for at in groups.queues] for streams in states])
        except (RuntimeError, OSError, PeerError) as error:
            raise self._loss(error) from error
        ending.over = True
        return cut

    def _posted(self, number: int, what: str) -> list[str]:
        """Return what every rank has posted for a levelling, once all have. At the levelling's end, a rank that is
        gone counts as through."""
        ranks, passed = dist.get_world_size(self.groups.parent), THROUGH if what == THROUGH else ""
        try:
            limit, wanting = self.groups.limit, self._look_at_absent
            return self.groups.watch.all_posted(number, what, ranks, limit, passed, wanting)
        except PeerError:  # of `_look_at_absent`
            raise
        except RuntimeError as error:
            raise self._loss(error) from error

    def _join(self, stream: Stream, what: Launch) -> None:
        """Join a collective that others have launched, with memory in which only this rank's parameters are valid."""
        verb, engine, bucket, *facts = what
        group: Any = self.groups.engines.get(engine)
        groups = self.groups
        if isinstance(stream, SharedStream):
            return self._lend(stream, what, group)
        control = group is None or stream not in groups.of_data
        at = torch.device("cpu") if control else group.device
        try:
            if verb == "broadcast":
                state, nbytes, low, high, source = facts
                whole = _own(group, bucket, state, nbytes, at)
                stream.launch(what, *broadcast(stream, whole[low:high], source))
            elif verb == "all_gather":
                nbytes, _ = facts  # of no weights: those are gathered so in a device's queue alone
                own = torch.zeros(nbytes, dtype=torch.uint8, device=at)
                stream.launch(what, *all_gather(stream, own.repeat(len(stream.members)), own))
            elif verb == "all_reduce":
                numel, dtype, op = facts
                stream.launch(what, *all_reduce(stream, torch.zeros(numel, dtype=getattr(torch, dtype), device=at), op))
            elif verb == "exchange":
                dtype, numels, out = facts
                shard, part = (torch.zeros(sum(numels), dtype=getattr(torch, dtype), device=at) for _ in range(2))
                stream.launch(what, *exchange(stream, self.rank, shard, part, numels, out=out))
            else:
                cut = group.party.travelling(bucket)
                team = group.team_of(cut)
                send = torch.zeros(cut.numel, dtype=getattr(torch, facts[0]), device=at)
                receive = send.new_zeros(cut.shard_numel(team.position) * (team.arriving if verb == "reduce" else 1))
                stream.launch(what, *(team.to_owners if verb == "reduce" else team.scatter)(send, receive, cut))
        except (RuntimeError, AttributeError) as error:
            raise self._loss(RuntimeError(f"cannot take part in {what}: {error}")) from error

    def _lend(self, stream: SharedStream, what: Launch, group: Any) -> None:
        verb, _, bucket, state, nbytes = what
        whole = group.party.recovery_copy(bucket, state) if group is not None and group.party and state else None
        own = None
        if whole is not None and whole.numel() * whole.itemsize == nbytes:
            cut = group.party.plan(bucket)
            first, last = cut.shard(group.team_of(cut).position)
            own = whole[first:last].view(torch.uint8)
            if join := group.team_of(cut).memory.joins.get((verb, bucket)):
                join(stream, what, own, first * whole.itemsize)
                return
        join_launched(stream, what, own)

    @property
    def lost(self) -> bool:
        return self.groups.loss is not None

    def give_up(self, error: BaseException) -> None:
        if not self.lost:
            why = f"gave up: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            self.groups.loss = f"rank {self.rank} {why}"
            self.groups.watch.tell({self.rank: why})  # before peers see connections end
            self.groups.abort()

    def doing(self) -> str:
        return self.progress.words(self.ledger.phase)

    def about(self) -> dict[str, Any]:
        return {
            "doing": self.doing(),
            "waits": bool(self.progress.awaited) and not self.interrupted,
            "failed": self.lost,
            **self.groups.progress(),
        }

    def _loss(self, error: Exception) -> PeerError:
        """Make the error for a collective that did not complete, naming the ranks to blame as far as they are known."""
        groups, watch = self.groups, self.groups.watch
        if groups.loss is None:
            groups.loss, groups.alive = "", {}  # from now on peers that ask hear that this rank has failed
            answers = watch.ask()
            culprits = watch.alarm or {rank: answer.silence for rank, answer in answers.items() if answer.silence}
            if not watch.alarm and culprits:
                watch.tell(culprits)
            groups.abort()
            blamed = culprits or {
                rank: "did not come" for rank, answer in answers.items() if not (answer.waits or answer.failed)
            }
            groups.loss = "; ".join(f"rank {rank} {what}" for rank, what in sorted(blamed.items()))
            groups.seen = "; ".join(
                f"rank {rank}: {answer.doing or answer.silence}"
                for rank, answer in sorted(answers.items())
                if rank not in culprits
            )
        words = [groups.seen] * bool(groups.seen) + [str(error).splitlines()[0]] * (not groups.loss)
        return PeerError(
            f"a collective did not complete: {groups.loss or 'a peer had an error of its own'}",
            where=f"rank {self.rank}: {self.doing()}",
            got="; ".join(words) or None,
            instead=EVERY_RANK
            if ENDED in groups.loss and GONE not in groups.loss
            else "read the first error among all ranks' output, end the program, and load the last checkpoint; "
            "Comm(timeout=...) sets how long to wait for a silent rank",
        )


def _own(group: Any, bucket: int, state: str, nbytes: int, at: torch.device) -> Tensor:
    """Return all bytes of a bucket, with this rank's shard of a state valid; zeros if the bytes belong to no state."""
    whole: Tensor | None = group.party.recovery_copy(bucket, state) if group is not None and state else None
    if whole is None or whole.numel() * whole.itemsize != nbytes:
        return torch.zeros(nbytes, dtype=torch.uint8, device=at)
    return whole.view(torch.uint8)


def _completes(handle: Any) -> bool:
    """Tell if a collective completes within one slice, by polling: if a wait runs out of time, NCCL aborts all of the
    group's collectives."""
    deadline, pause = time.monotonic() + SLICE.total_seconds(), 1e-5
    while not handle.is_completed():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 1e-3)
    return True


def packed(told: dict[str, Any]) -> str:
    """Pack a posting into text, compressed: a posting of thousands of similar collectives must fit into an answer."""
    return base64.b85encode(zlib.compress(json.dumps(told).encode())).decode()


def unpacked(posted: str) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(zlib.decompress(base64.b85decode(posted)))
    return told


def state_of(what: Launch) -> str:
    """Return the state that a gather or a broadcast moves."""
    return str(what[3] if what[0] == "broadcast" else what[-1])


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# Each returns a function of C and its arguments: see *counted is launched* in `launch_log.py`.


def broadcast(stream: Stream, part: Tensor, source: int) -> tuple[Any, ...]:
    options = c10d.BroadcastOptions()
    options.rootRank, options.rootTensor, options.asyncOp = source, 0, True
    return stream.group.broadcast, [part], options


def all_gather(stream: Stream, everyone: Tensor, own: Tensor) -> tuple[Any, ...]:
    options = c10d.AllgatherOptions()  # type: ignore[attr-defined]
    options.asyncOp = True
    # torch 2.13 renamed this one and two below; the old names warn there and the new ones are missing before.
    return getattr(stream.group, "all_gather_single", None) or stream.group._allgather_base, everyone, own, options


def all_reduce(stream: Stream, tensor: Tensor, how: str) -> tuple[Any, ...]:
    options = c10d.AllreduceOptions()
    options.reduceOp, options.asyncOp = getattr(dist.ReduceOp, how), True
    return stream.group.allreduce, [tensor], options


def to_each(stream: Stream, send: Tensor, receive: Tensor, sent: list[int], came: list[int]) -> tuple[Any, ...]:
    group, options = stream.group, c10d.AllToAllOptions()
    options.asyncOp = True
    return getattr(group, "all_to_all_single", None) or group.alltoall_base, receive, send, came, sent, options


def exchange(stream: Stream, own: int, whole: Tensor, part: Tensor, numels: list[int], *, out: bool) -> tuple[Any, ...]:
    """Return the call by which the first rank gets all ranks' parts in its `whole`; numels: their elements, by rank.

    out: instead, each rank gets its part of the last rank's `whole`. The first elements of `part` are used, and of
    `whole` on the rank that has it."""
    mine, root = stream.members.index(own), len(numels) - 1 if out else 0
    all_of_it = [numel * (mine == root) for numel in numels]
    one = [numels[mine] * (at == root) for at in range(len(numels))]
    whole, part = whole[: sum(all_of_it)], part[: numels[mine]]
    return to_each(stream, whole, part, all_of_it, one) if out else to_each(stream, part, whole, one, all_of_it)
