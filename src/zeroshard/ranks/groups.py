"""The process groups that ranks use: how ranks come together, how the groups are made, and how ranks leave.

Gathers, reductions and control have a group each, so that each is ordered in itself. Making a group waits for all of
its ranks. So these first tell each other, through the store in which they met, where each can be asked.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import resource
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ..errors import Error, PeerError, UserError
from ..stage import Seat
from .agreement import axes, lines
from .calls import Call
from .comm import Comm
from .launcher import could_not_meet, find_master
from .streams import Stream
from .watch import Attended, Watch, attend, cannot_come, come_together, host_towards, waits

LEAVING = 10.0  # seconds that a rank whose program ends waits for the others


def start(settings: Comm, device: torch.device) -> None:
    timeout = None if settings.timeout is None else timedelta(seconds=settings.timeout)
    find_master(os.environ)
    try:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timeout)
    except (RuntimeError, ValueError, OSError) as error:
        raise could_not_meet(os.environ, error) from error
    process = os.getpid()

    def finish() -> None:
        # A gloo process that leaves right after its last collective can abort peers that still read from it. But one
        # that an exception ends must not wait for peers that wait for it: then its own error is what they need. Nor one
        # that has lost a peer: the store may be where it cannot be reached, and answers no question in time then.
        if os.getpid() == process and dist.is_initialized() and not waits():  # a fork's connections are its parent's
            lost = any(groups.loss is not None for made in _made.values() for groups in made.values())
            if dist.get_backend() == "gloo" and not lost and not hasattr(sys, "last_value"):
                with contextlib.suppress(RuntimeError):  # a peer is gone already; its own error says more
                    _leave_together()
            dist.destroy_process_group()

    atexit.register(finish)


def _leave_together() -> None:
    # Through the store and not by a collective: one that peers never join could not be given up.
    store, deadline = dist.distributed_c10d._get_default_store(), time.monotonic() + LEAVING
    store.add("zeroshard/leaving", 1)
    while store.add("zeroshard/leaving", 0) < dist.get_world_size() and time.monotonic() < deadline:
        time.sleep(0.01)


LONGEST = timedelta(minutes=30)  # of a wait, where nobody says; of one for ranks that write at least
DESCRIPTORS = 16  # that stay free beside what the groups take


def _touch_all(parent: Any, ranks: int) -> Any:
    """A collective in which each rank waits for each: by gloo's connections a rank that has ended shows at once.

    Where the group has no gloo there are no connections before the first real collective, and nothing to tell by.
    """
    with contextlib.suppress(RuntimeError, AttributeError):
        if isinstance(parent._get_backend(torch.device("cpu")), dist.ProcessGroupGloo):
            there, back = (torch.zeros(ranks, dtype=torch.uint8, device="cpu") for _ in range(2))
            return dist.all_to_all_single(back, there, group=parent, async_op=True)
    return None


def _broken(connections: Any) -> bool:
    if connections is not None and connections.is_completed():
        try:
            connections.wait()
        except RuntimeError:
            return True
    return False


def _descriptors() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _free_descriptors() -> int:
    return _descriptors() - len(os.listdir("/dev/fd"))


def _nothing() -> dict[str, Any]:
    return {"doing": "no collective yet, or no model any more", "waits": False, "failed": False}


def _timeout(parent: Any) -> timedelta | None:
    """How long the user's own group waits: `new_group` would wait half an hour whatever that is."""
    with contextlib.suppress(AttributeError, RuntimeError, IndexError):
        own: timedelta = parent._get_backend(parent._device_types[0]).options._timeout
        return own
    return None


def _store() -> tuple[str, int] | None:
    """Where the ranks met, which is a place that all of them can reach."""
    store: Any = dist.distributed_c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return (store.host, store.port) if hasattr(store, "host") else None


def _last_words(groups: weakref.ref[Groups]) -> None:
    """A program that an exception ends says so to the others, before its connections break.

    And whoever asks a program at its end is refused: a thread would not get to answer any more.
    """
    own, error = groups(), getattr(sys, "last_value", None)
    if own is not None:
        if error is not None and own.loss is None:
            own.watch.tell({own.watch.rank: f"ended by {type(error).__name__}: {error}"[:2000]})
        own.watch.close()


def _loops() -> set[int]:
    """The threads of this process in which gloo waits for messages, where the system tells."""
    found = set()
    for thread in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError):  # it has just ended
            if (thread / "comm").read_bytes() == b"gloo_tcp_loop\n":
                found.add(int(thread.name))
    return found


def _new_group(**options: Any) -> Any:
    """A process group whose gloo threads stop nobody when a message wakes them: docs/decisions/batch-threads.md."""
    before = _loops()
    group = dist.new_group(**options)
    for thread in _loops() - before:
        with contextlib.suppress(OSError):  # not allowed here: slower, and no worse
            if os.sched_getscheduler(thread) == os.SCHED_OTHER:
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
    return group


def _pairs(sits: Seat) -> list[list[int]]:
    """The pairs of replicas that follow one another which a rank is in: those that an even one begins, then the others.

    torch names a group by how many a process has, so all ranks make as many: one that has no pair in a turn, alone.
    """
    found = []
    for first in range(min(sits.replicas - 1, 2)):
        at = sits.replica - (sits.replica - first) % 2
        found.append([at, at + 1] if 0 <= at < sits.replicas - 1 else [sits.replica])
    return found


class Speaker(Protocol):
    """Who can say what this rank is doing."""

    def about(self) -> dict[str, Any]:
        """The fields of `watch.Answer`."""


class Groups:
    """What all engines over one process group share."""

    def __init__(self, parent: Any, timeout: float | None, sits: Seat, along: Seat | None) -> None:
        """sits: in the team of all parameters but those along an axis, which have one of their own."""
        ranks = dist.get_process_group_ranks(parent)
        options: dict[str, Any] = {"ranks": ranks, "use_local_synchronization": True}
        limit = _timeout(parent) if timeout is None else timedelta(seconds=timeout)
        if limit is not None:
            options["timeout"] = limit
        backend = dist.get_backend(parent)
        self._parent = weakref.ref(parent)
        # Beyond a few ranks rows are exchanged along the axes of a grid.
        lying = lines(len(ranks), dist.get_rank(parent))
        grid = [{**options, "ranks": [ranks[at] for at in line]} for line in lying if len(lying) > 1]
        own_team, others = ([*each.members(dist.get_rank(parent))] if each else [] for each in (sits, along))
        team, axis = ({**options, "ranks": [ranks[at] for at in each]} for each in (own_team, others))
        copies = ranks[sits.position :: sits.size]
        self.seat = sits
        self._for_saves = {**options, "timeout": max(LONGEST, options.get("timeout", LONGEST))}
        self._apart: dict[bool, Attended] = {}
        self._engines = 0
        self.engines: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # by number, its `Group`
        self.call: Call | None = None  # the verb that this rank is in
        self.levelled = 0  # levellings so far
        self.limit = (limit or LONGEST).total_seconds()
        self.speaker: Callable[[], Speaker | None] = lambda: None  # the engine that waited last
        self.loss: str | None = None  # why a collective did not complete
        self.seen = ""  # what the other ranks said then
        about = weakref.WeakMethod(self._about)
        try:
            self.watch = self._come_together(parent, sits, along, self.limit, lambda: (about() or _nothing)())
            atexit.register(_last_words, weakref.ref(self))
            wanted = [(backend, team), (backend, team), ("gloo", options), *(("gloo", line) for line in grid)]
            pairs = _pairs(sits)
            wanted += [(backend, {**options, "ranks": [copies[at] for at in pair]}) for pair in pairs]
            wanted += [(backend, {**options, "ranks": copies}), (backend, options)] if pairs else []
            wanted += [(backend, axis), (backend, axis)] if along else []
            made = attend(self.watch, lambda: [_new_group(backend=each, **of) for each, of in wanted])
        except (RuntimeError, OSError) as error:
            if isinstance(error, Error):
                raise
            where = f"rank {dist.get_rank(parent)}"
            raise PeerError("the ranks could not come together", where=where, got=error) from error
        everyone = range(len(ranks))
        of: list[Sequence[int]] = [own_team, own_team, everyone]
        of += lying if len(lying) > 1 else []
        copied = everyone[sits.position :: sits.size]
        of += [[copied[at] for at in pair] for pair in pairs] + ([copied, everyone] if pairs else [])
        of += [others, others] if along else []
        # On every rank a kind of group has the same place.
        self.streams = [Stream(group, members) for group, members in zip(made, of, strict=True)]
        self.gathers, self.reductions, self.control, *rest = self.streams
        self.along = tuple(rest[-2:]) if along else (self.gathers, self.reductions)  # those of the axis
        rest = rest[:-2] if along else rest
        axes_, relays = rest[: len(grid)], rest[len(grid) :]
        self.broadcasts = relays.pop() if pairs else self.gathers  # among all ranks
        self.copies = relays[-1] if pairs else self.gathers  # among those of this position
        # By the first of the two replicas.
        self.pairs = {pair[0]: stream for pair, stream in zip(pairs, relays, strict=False) if len(pair) == 2}
        sums = (self.reductions, *([self.along[1]] if along else []), *relays)
        self.sums = [self.streams.index(stream) for stream in sums]
        self.axes = axes_ or [self.control]

    @staticmethod
    def _come_together(
        parent: Any, sits: Seat, along: Seat | None, limit: float, about: Callable[[], dict[str, Any]]
    ) -> Watch:
        """Wait until every rank is here and knows where to ask the others: making groups, none could be asked."""
        rank, ranks, name = dist.get_rank(parent), dist.get_world_size(parent), str(parent.group_name)
        store = dist.distributed_c10d._get_default_store()
        # The store may outlive a process group, and its ranks come together once for each time-out.
        at = f"zeroshard/{name}/{store.add(f'zeroshard/{name}/came/{rank}', 1)}"
        connections = _touch_all(parent, ranks)
        lengths = [sits.size, sits.size, ranks, *(axes(ranks) if len(axes(ranks)) > 1 else ())]
        lengths += [2, 2, sits.replicas, ranks] if sits.replicas > 1 else []
        lengths += [along.size, along.size] if along else []
        free, needed = _free_descriptors(), DESCRIPTORS + sum(length + 3 for length in lengths)
        if free < needed:
            few = UserError(
                "too few file descriptors are left for the connections to the other ranks",
                where=f"rank {rank}",
                expected=f"{needed}, as every rank holds connections to each of {ranks} ranks",
                got=f"{free} of {_descriptors()}",
                instead="ulimit -n 65536 before the program starts",
            )
            cannot_come(store, at, rank, str(few))
            raise few
        watch = Watch(rank, host_towards(_store()), about)
        alike = f"has replicas={sits.replicas}" + (
            f" and {along.parts} teams of {along.size} along an axis" if along else ""
        )
        come_together(watch, store, at, ranks, lambda: _broken(connections), limit, alike)
        if connections is not None:
            attend(watch, connections.wait)
        return watch

    def _about(self) -> dict[str, Any]:
        speaker = self.speaker()
        return _nothing() if speaker is None else speaker.about()

    @property
    def parent(self) -> Any:
        return self._parent()

    def number(self) -> int:
        """Of the next model that is sharded over this."""
        self._engines += 1
        return self._engines

    @property
    def levelling(self) -> list[Stream]:
        """Those that take part in it: a save behind the training goes on."""
        return [stream for stream in self.streams if not stream.behind]

    def apart(self, *, behind: bool) -> Stream:
        """For saves. Made once of each kind, also where an interrupt ends the wait for it."""
        if behind not in self._apart:
            self._apart[behind] = Attended(lambda: dist.new_group(backend="gloo", **self._for_saves))
        group = self._apart[behind].attend(self.watch)
        if all(group is not stream.group for stream in self.streams):
            self.streams.append(Stream(group, self.control.members, behind=behind))
        return next(stream for stream in self.streams if stream.group is group)


# The groups of a parent are made once: making them anew for every engine would leak sockets. Those in which a
# collective was lost serve nobody any more.
_made: weakref.WeakKeyDictionary[Any, dict[Any, Groups]] = weakref.WeakKeyDictionary()


def groups_of(parent: Any, timeout: float | None, sits: Seat, along: Seat | None = None) -> Groups:
    made, key = _made.setdefault(parent, {}), (timeout, sits.replicas, along)
    if key not in made or made[key].loss is not None:
        made[key] = Groups(parent, timeout, sits, along)
    return made[key]
