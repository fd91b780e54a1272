"""The process groups that ranks use: how they are made once ranks have come together, and how ranks leave.

Gathers, reductions and control have a group each, so that each is ordered in itself. Making a group waits for all of
its ranks. So the ranks first tell each other, through the store in which they met, where each can be asked.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import os
import resource
import sys
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from ..device import asynchronous, current, finish, free, limited
from ..errors import Error, PeerError, UserError
from ..hooks import features
from ..layout.limits import CHANNELS
from ..layout.stage import Seat
from ..policies.comm import Comm, Transport, mesh_told
from .abort import BY_ITSELF, AtOnce, Ending, prepare
from .agreement import lines
from .departed import WAITS, Departed
from .frames import Call
from .launch_log import Stream
from .launcher import could_not_meet, find_master
from .shared_memory import SharedStream, cannot_share, share
from .watch import ENDED, GONE, PATIENCE, Attended, Watch, attend, cannot_come, come_together, host_towards, still_waits

log = logging.getLogger("zeroshard")
LATER = timedelta(minutes=1)  # how much later than ours a device queue's time-outs come
CONNECTING = 4 << 20  # bytes of a collective for which backends connect ranks as for large ones
LEAVING = 10.0  # seconds that a rank whose program ends waits for the others
_TORCHS = dist.is_initialized.__code__.co_filename  # the path in its compiled code, wherever the file lies now
_OF_ALL = ("all_", "barrier", "monitored_barrier", "reduce_scatter")  # no rank gets through these before all have come
_OF_SOURCE = ("broadcast", "scatter")  # no other rank gets through these before their source has come
ABORTING = 10.0  # seconds in which aborts return, unless the device waits for something else


def start(settings: Comm, device: torch.device) -> None:
    timeout = None if settings.timeout is None else timedelta(seconds=settings.timeout)
    find_master(os.environ)
    saying = threading.Timer(PATIENCE, _say_waiting, (timeout or dist.default_pg_timeout,))
    saying.daemon = True
    saying.start()
    try:
        # Told of the device, torch makes communicators at once and splits groups from them, which is faster. They share
        # no memory: `split_share` is 0 by default.
        backend, own = dist.get_default_backend_for_device(device), current(device) if asynchronous(device) else None
        dist.init_process_group(backend, timeout=timeout, device_id=own)
    except Error:  # from a world, which says what it cannot do
        raise
    except (RuntimeError, ValueError, OSError) as error:
        raise could_not_meet(os.environ, error) from error
    finally:
        saying.cancel()
    process = os.getpid()

    def finish() -> None:
        # A gloo process that exits right after its last collective can abort peers that still read from it. But a
        # process that an exception ends must not wait for peers that wait for it: they need its error. Nor must one
        # that has lost a peer wait: the store may be out of reach, and then answers no question in time.
        if (
            os.getpid() == process and dist.is_initialized() and not still_waits()
        ):  # a fork's connections are its parent's
            lost = any(groups.loss is not None for made in _made.values() for groups in made.values())
            if dist.get_backend() == "gloo" and not lost and not hasattr(sys, "last_value"):
                with contextlib.suppress(RuntimeError, OSError):  # a peer is gone already; its own error says more
                    _leave_together()
            gone = [groups for made in _made.values() for groups in made.values() if groups.aborted]
            if gone and _end_queues():  # what is queued for a rank that is gone never ends
                dist.distributed_c10d._abort_process_group()
            elif not gone:
                dist.destroy_process_group()

    atexit.register(finish)


def _say_waiting(limit: timedelta) -> None:
    """Log that this rank waits: there is no group yet in which others could be asked, or could say that they do not
    come."""
    log.warning(
        "rank %s of %s waits for the others in torch.distributed.init_process_group, %g s at most (Comm(timeout=...)): "
        "every rank calls shard(...), and one that has ended before is not noticed here",
        os.environ["RANK"], os.environ["WORLD_SIZE"], limit.total_seconds(),
    )  # fmt: skip


def _leave_together() -> None:
    """Wait until all ranks come to their ends, or all others have ended: an exception may have ended one."""
    # Through the store and not by a collective: one that peers never join could not be given up.
    store, begun, patience = dist.distributed_c10d._get_default_store(), time.monotonic(), 0.2
    store.add("zeroshard/leaving", 1)
    while store.add("zeroshard/leaving", 0) < dist.get_world_size() and time.monotonic() < begun + LEAVING:
        if time.monotonic() > begun + patience:
            patience *= 2
            if _all_have_ended():
                return
        time.sleep(0.01)


def _all_have_ended() -> bool:
    watches = [groups.watch for made in _made.values() for groups in made.values()]
    answers = [answer for watch in watches for answer in watch.ask().values()]
    return bool(answers) and all(answer.silence in (GONE, ENDED) for answer in answers)


LONGEST = timedelta(minutes=30)  # a wait's limit if no time-out is set; the least one for ranks that write checkpoints
DESCRIPTORS = 16  # descriptors to leave free besides those of the groups


def _touch_all(parent: Any, ranks: int) -> Any:
    """Launch a collective in which every rank waits for every other: gloo's connections show at once if a rank has
    ended.

    Return None for a group without gloo, which has no connections before its first real collective.
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


def _ignore(number: int) -> None:
    pass


def _left_nothing(rank: int, engine: int, launched: Mapping[str, int]) -> Departed:
    return Departed()


def members_of(group: Any) -> list[int]:
    """Return a group's ranks, by their number in the program."""
    return dist.get_process_group_ranks(dist.group.WORLD if group is None else group)


def launches() -> dict[str, int]:
    """Return how many collectives this rank has launched in each of the program's groups, by the group's name."""
    told: dict[str, int] = {}
    group: Any
    for group in dist.distributed_c10d._world.pg_map if dist.is_initialized() else ():
        with contextlib.suppress(RuntimeError):  # of a backend that does not count
            told[group.group_name] = group._get_sequence_number_for_group()
    return told


def stands_in(thread: int, rank: int, launched: Mapping[str, int]) -> str:
    """Return the collective in which a thread's program waits for a rank, in words; "" if in none.

    rank: its number in the program. launched: `launches()` of that rank, which is not waited for in a collective that
    it has launched. A device's collective is not seen, because the call does not wait for it.
    """
    frame: FrameType | None = sys._current_frames().get(thread)
    while frame is not None:
        code = frame.f_code
        name, here = code.co_name, frame.f_locals
        if code.co_filename == _TORCHS and name.startswith((*_OF_ALL, *_OF_SOURCE)) and "group" in code.co_varnames:
            group: Any = here.get("group")
            whom = "all ranks" if name.startswith(_OF_ALL) else f"rank {rank}"
            try:
                # A call that has not come to its collective, or is through it, may not have looked its group up.
                found = group is not None and rank in members_of(group)
                found = found and launched.get(group.group_name, 0) < group._get_sequence_number_for_group()
                if name.startswith(_OF_SOURCE):
                    found = found and here["group_src"] == dist.get_group_rank(group, rank)
            except (KeyError, ValueError, RuntimeError):  # the group is being made, or is gone
                found = False
            return f"{WAITS}{whom} in torch.distributed.{name}" if found else ""
        frame = frame.f_back
    return ""


def _timeout(parent: Any) -> timedelta | None:
    """Return the time-out of the user's own group: `new_group` would wait half an hour whatever that is."""
    with contextlib.suppress(AttributeError, RuntimeError, IndexError):
        own: timedelta = parent._get_backend(parent._device_types[0]).options._timeout
        return own
    return None


def _store() -> tuple[str, int] | None:
    """Return host and port of the store in which ranks met, which all of them can reach; None if it has none."""
    store: Any = dist.distributed_c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return (store.host, store.port) if hasattr(store, "host") else None


def _last_words(groups: weakref.ref[Groups]) -> None:
    """Tell the other ranks how this program ends, and by which exception, before its connections break.

    After an exception, wait for nothing: collectives in the device's queue may be for a rank that has heard of the
    exception. At a normal end, wait until all of them are through.

    Then close the watch, so that later questions are refused: its thread would not get to answer any more.
    """
    own, error = groups(), getattr(sys, "last_value", None)
    if own is not None:
        if own.loss is None and os.getpid() == own.process:
            if error is None:
                with contextlib.suppress(RuntimeError):  # a device's error that the program has caught
                    own.get_through()
                if not own.aborted:
                    with contextlib.suppress(OSError):
                        own.watch.say_ended()
            else:
                own.watch.tell({own.watch.rank: f"ended by {type(error).__name__}: {error}"[:2000]})
                own.abort()
        own.watch.close()


def _loops() -> set[int]:
    """Return the threads of this process in which gloo waits for messages, if these have names: not on torch 2.11."""
    found = set()
    for thread in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError):  # it has just ended
            if (thread / "comm").read_bytes() == b"gloo_tcp_loop\n":
                found.add(int(thread.name))
    return found


_LAZY = "TORCH_GLOO_LAZY_INIT"  # connects two ranks when they first send each other something


def _new_group(*, lazy: bool = False, alone: bool = False, **options: Any) -> Any:
    """Make a process group whose gloo threads interrupt no other when a message wakes them:
    docs/decisions/batch-threads.md.

    lazy: connect no ranks in advance: a thousand ranks cannot have a connection between any two of them.
    alone: other ranks of the program make no group. So it is not split from the group of all ranks, where the split
        would wait for all; torch splits if `init_process_group` was told of a device. A gloo group is not split
        either: torch would ask it for a backend of that device, and gloo has one for CPUs, and by CUDA for GPUs.
    """
    before, said, everyones = _loops(), os.environ.get(_LAZY), dist.group.WORLD
    device = None if everyones is None else everyones.bound_device_id
    unbound = alone or options["backend"] == "gloo"
    try:
        if lazy:
            os.environ[_LAZY] = "1"
        if unbound and everyones is not None:
            everyones.bound_device_id = None
        group = dist.new_group(**options)
    finally:
        if lazy and said is None:
            del os.environ[_LAZY]
        elif lazy and said is not None:
            os.environ[_LAZY] = said
        if unbound and everyones is not None:
            everyones.bound_device_id = device
    for thread in _loops() - before:
        with contextlib.suppress(OSError):  # not allowed here: slower, and no worse
            if os.sched_getscheduler(thread) == os.SCHED_OTHER:
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
    return group


def backend_for(device: torch.device, parent: Any) -> str:
    """Return the backend that moves this device's tensors between ranks: the group's own for that kind of device, or
    torch's default for it."""
    told = [pair.split(":") for pair in dist.get_backend_config(parent).split(",")]
    own = next((name for kind, name in told if kind == device.type), None)
    try:
        return own or dist.get_default_backend_for_device(device)
    except ValueError as error:
        raise UserError(
            "no backend is known that moves tensors of this device between ranks",
            got=f"device {device}, a process group of {dist.get_backend_config(parent)}",
            instead=f'torch.distributed.init_process_group("cpu:gloo,{device.type}:...")',
        ) from error


class Wanted(NamedTuple):
    """A process group that a rank is to be in."""

    use: str
    backend: str
    members: Sequence[int]  # their ranks among the ranks of the model
    lazy: bool = False  # are connections made only where something is sent?
    sums: bool = False  # do sums go through it?
    exchanges: bool = False  # does each rank send different bytes to every other rank?

    @property
    def sockets(self) -> int:
        """The most sockets that this group takes: if lazy, those along rings and trees; else one to each member."""
        return 3 + (2 * len(self.members).bit_length() if self.lazy else len(self.members))

    def made(self, everyone: Sequence[int], options: dict[str, Any], *, queued: bool) -> Any:
        """Make the group. everyone: all of the model's ranks, by their number in the program. queued: see `Groups`."""
        ranks = [everyone[rank] for rank in self.members]
        if queued and "timeout" in options:  # so that zeroshard has named lost ranks before the program is ended
            options = {**options, "timeout": options["timeout"] + LATER}
        if self.exchanges and self.backend in limited:
            asked = limited[self.backend](CHANNELS)
            asked._timeout = options.get("timeout", asked._timeout)  # torch warns where the two differ
            options = {**options, "pg_options": asked}
        return _new_group(lazy=self.lazy, backend=self.backend, **{**options, "ranks": ranks})


CONTROL = ("control", "axis")  # uses of CPU tensors


def _wanted(rank: int, ranks: int, sits: Seat, on_axis: Seat | None, backend: str) -> list[Wanted]:
    """List all groups of a rank. On every rank a group for one use has the same place."""
    everyone, team, lying = range(ranks), [*sits.members(rank)], lines(ranks, rank)
    found = [Wanted("gather", backend, team), Wanted("reduce", backend, team, sums=True, exchanges=True)]
    found += [Wanted("control", "gloo", everyone, lazy=len(lying) > 1)]
    if len(lying) > 1:  # beyond a few ranks rows are exchanged along the axes of a grid
        found += [Wanted("axis", "gloo", line) for line in lying]
    if len(team) < ranks:
        found.append(Wanted("broadcast", backend, everyone))
    for feature in features():
        found += feature.groups(sits, ranks, backend)
    if on_axis:
        others = [*on_axis.members(rank)]
        found.append(Wanted("gather on axis", backend, others))
        found.append(Wanted("reduce on axis", backend, others, sums=True, exchanges=True))
    return found


class Speaker(Protocol):
    """An object that can tell what this rank is doing."""

    def about(self) -> dict[str, Any]:
        """Return the fields of `watch.Answer`."""


def _end_one(group: Any) -> None:
    with contextlib.suppress(RuntimeError):  # it has failed already
        group.abort()


def _in_queues() -> dict[int, Callable[[], None]]:
    """Return the call that aborts each process group in a device's queue, the program's own groups included."""
    ends: dict[int, Callable[[], None]] = {}
    for group in tuple(dist.distributed_c10d._world.pg_map):
        told = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
        for kind in [kind for kind, backend in told.items() if kind != "cpu" and backend != "gloo"]:
            ends[id(group)] = partial(_end_one, group if len(told) == 1 else group._get_backend(torch.device(kind)))
    return ends


def _end_queues() -> bool:
    """End what is under way in devices' queues, the program's own collectives included. Returns False if some hang."""
    ends = _in_queues()
    with contextlib.suppress(RuntimeError):  # a program at its end starts no threads, and has those of its last shard()
        prepare(len(ends))
    aborts = AtOnce(ends)
    try:
        aborts.wait(ABORTING)
    finally:
        if aborts.late:
            found = [name for group, name in dist.distributed_c10d._world.pg_names.items() if id(group) in aborts.late]
            log.error("zeroshard: %g s after their aborts these process groups still hang: %s", ABORTING, found)
    return not aborts.late


class Groups:
    """The process groups, streams and watch that all engines over one process group share."""

    sums_begun = 0  # by this rank, in the backward that began last
    _connects = 0, 0.0  # the place, among the queues, of the group that is being connected, and since when
    parted = ""  # the last backward in which this rank has learnt that the ranks differ

    def __init__(
        self,
        parent: Any,
        device: torch.device,
        timeout: float | None,
        sits: Seat,
        on_axis: Seat | None,
        transport: Transport,
    ) -> None:
        """sits: the seat in the team of all parameters not along an axis. on_axis: the seat in the team of the
        others."""
        ranks, rank = dist.get_process_group_ranks(parent), dist.get_rank(parent)
        alone = len(ranks) < dist.get_world_size()
        options: dict[str, Any] = {"ranks": ranks, "use_local_synchronization": True, "alone": alone}
        limit = _timeout(parent) if timeout is None else timedelta(seconds=timeout)
        if limit is not None:
            options["timeout"] = limit
        self.device = device
        self.backend = backend_for(device, parent)
        # True if the device's queue waits for data, and not this thread. Gloo moves even a GPU's data through the host.
        self.queued = asynchronous(device) and self.backend != "gloo"
        self._wanted = wanted = _wanted(rank, len(ranks), sits, on_axis, self.backend)
        self.ranks, self._options = ranks, options
        # The places of the streams in a device's queue.
        self.queues = [at for at, each in enumerate(wanted) if self.queued and each.use not in CONTROL]
        self._parent = weakref.ref(parent)
        self.process, self.seat, self._engines = os.getpid(), sits, 0
        self._thread = threading.get_ident()  # the program's own
        self._for_saves = {**options, "timeout": max(LONGEST, options.get("timeout", LONGEST))}
        self._save_streams: dict[bool, Attended] = {}
        self.streams: list[Stream] = []
        self.levelling: list[Stream] = []  # those that take part in a levelling: see `_add`
        self.engines: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # by number, its `Group`
        # Models at a levelling, kept alive to its end, so that all ranks agree on which models are alive.
        self.alive: dict[int, tuple[Any, Any]] = {}
        self.call: Call | None = None  # the verb that this rank is in
        self.levellings = 0  # so far
        self.spreads = False  # must owners' updates still be sent anew after a levelling?
        self._ending: Ending | None = None  # of the last levelling that this rank was called to
        self._summoned: dict[int, float] = {}  # by levelling, the time of the first call
        self._lock, self._aborting = threading.Lock(), threading.RLock()
        self.limit = (limit or LONGEST).total_seconds()
        self.speaker: Callable[[], Speaker | None] | None = None  # the engine that waited last
        self.loss: str | None = None  # why a collective did not complete
        self.aborted = False  # were the data groups in devices' queues aborted?
        self.seen = ""  # what the other ranks said then
        about = weakref.WeakMethod(self._about)
        alike = mesh_told(sits)
        alike += f" and {on_axis.parts} teams of {on_axis.size} along an axis" if on_axis else ""
        alike += "" if transport == "gloo" else f" and transport={transport!r}"
        needed = sum(each.sockets for each in wanted) + sits.size * (transport == "shared")  # "auto" can do without
        left = self._prepare() if self.queued else None
        try:
            self.watch = self._come_together(parent, alike, needed, self.limit, lambda: (about() or _nothing)())
            self._answer()
            atexit.register(_last_words, weakref.ref(self))
            made = attend(self.watch, lambda: self._make(range(len(wanted))))
        except (RuntimeError, OSError) as error:
            if isinstance(error, Error):
                raise
            raise PeerError("the ranks could not come together", where=f"rank {rank}", got=error) from error
        self._use(made)
        self._say_taken(left)
        if transport != "gloo":
            self._share(parent, transport)

    def _answer(self) -> None:
        """Let the watch call these groups as long as they are alive."""
        abort, summon = weakref.WeakMethod(self.abort), weakref.WeakMethod(self._summon)
        left = weakref.WeakMethod(self._left)
        self.watch.alarmed = lambda: (abort() or _nothing)()
        self.watch.summoned = lambda number: (summon() or _ignore)(number)
        self.watch.looked_at = lambda *asked: (left() or _left_nothing)(*asked)

    def _prepare(self) -> int | None:
        """Take what connecting needs, and return the bytes of the device that are left for it to take."""
        prepare(len(_in_queues()) + len(self.queues))
        self._connecting = torch.zeros(2 * CONNECTING, dtype=torch.uint8, device=self.device)
        finish(self.device)
        return free(self.device)

    def _say_taken(self, left: int | None) -> None:
        """Log on rank 0, once for all models over these groups, what they took. left: what `_prepare` has returned."""
        now = free(self.device) if left is not None and self.watch.rank == 0 else None
        if left is not None and now is not None:
            log.info(
                "rank 0 has connected its %s groups of %s: they took %s bytes of %s, of which %s are free",
                len(self.queues), self.backend, left - now, self.device, now,
            )  # fmt: skip

    def _use(self, made: Sequence[Any]) -> None:
        places = itertools.count()
        for at, (each, group) in enumerate(zip(self._wanted, made, strict=True)):
            self._add(Stream(group, each.members, queued=at in self.queues, lazy=each.lazy, places=places))
        self._name(self._wanted)
        if self.queued:
            attend(self.watch, lambda: self._connect([made[at] for at in self.queues]), self._say_connecting)

    def _make(self, which: Sequence[int], **options: Any) -> list[Any]:
        return [
            self._wanted[at].made(self.ranks, {**self._options, **options}, queued=at in self.queues) for at in which
        ]

    def _connect(self, groups: Sequence[Any]) -> None:
        """Make the backend connect the ranks now, group by group, in the same order on all ranks.

        A backend connects ranks in the first collective of a kind and size, and waits there for all of its ranks. In a
        backward these ranks may wait for each other by other means.
        """
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        for place, (at, group) in enumerate(zip(self.queues, groups, strict=True)):
            use, members = self._wanted[at].use, self._wanted[at].members
            self._connects = place + 1, time.monotonic()
            if len(members) == 1:
                continue
            for numel in (1, CONNECTING // len(members)):
                whole, other = (half[: len(members) * numel] for half in self._connecting.chunk(2))
                if use.startswith("gather"):
                    gather(whole, whole.view(len(members), numel)[members.index(self.watch.rank)], group=group)
                if self._wanted[at].exchanges:
                    dist.all_to_all_single(whole, other, group=group)
                if not use.startswith("reduce"):
                    dist.broadcast(whole, dist.get_global_rank(group, 0), group=group)
                if self.streams[at] is self.broadcasts:
                    dist.all_reduce(whole, group=group)
        finish(self.device)
        dist.all_reduce(torch.zeros(1, device="cpu"), group=self.control.group)

    def _say_connecting(self, waited: float) -> None:
        """Log how far connecting is: the first exchange of hundreds of ranks takes minutes (NVIDIA/nccl-tests 78)."""
        place, since = self._connects
        of = self._wanted[self.queues[place - 1]]
        log.warning(
            "rank %s connects ranks in shard(...) since %.0f s: %s group %s of %s (%s, %s ranks) since %.0f s",
            self.watch.rank, waited, self.backend, place, len(self.queues), of.use, len(of.members),
            time.monotonic() - since,
        )  # fmt: skip

    def _name(self, wanted: Sequence[Wanted]) -> None:
        """Set an attribute for each stream that every engine uses; `named` has all streams, by use."""
        self.named = found = defaultdict[str, list[Stream]](list)
        for each, stream in zip(wanted, self.streams, strict=True):
            found[each.use].append(stream)
        (self.gathers,), (self.reductions,), (self.control,) = found["gather"], found["reduce"], found["control"]
        self.axes = found["axis"] or [self.control]
        gathers, reductions = found["gather on axis"] or [self.gathers], found["reduce on axis"] or [self.reductions]
        self.axis_streams = (*gathers, *reductions)
        (self.broadcasts,) = found["broadcast"] or [self.gathers]
        self.of_data = [stream for use, streams in found.items() if use not in CONTROL for stream in streams]
        self.sums = [at for at, each in enumerate(wanted) if each.sums]  # of the streams
        self.shared: list[SharedStream] = []  # of gathers and reductions; then those of the axis

    def _share(self, parent: Any, transport: Transport) -> None:
        """Share memory inside all teams, if all ranks can."""
        rank, ranks, name = self.watch.rank, dist.get_world_size(parent), f"zeroshard/{parent.group_name}/memory"
        store = dist.distributed_c10d._get_default_store()
        at, teams = f"{name}/{store.add(f'{name}/{rank}', 1)}", [self.gathers.members, self.axis_streams[0].members]
        teams = [team for at, team in enumerate(teams) if len(team) > 1 and team not in teams[:at]]
        found, why = attend(self.watch, lambda: share(store, at, rank, ranks, teams, self.limit))
        if why and transport == "shared":
            raise cannot_share(rank, why)
        if why and rank == 0:
            log.info("ranks send messages and share no memory: %s", why)
        self.shared = found
        self.sums += [len(self.streams) + at for at in range(1, len(found), 2)]
        self._add(*found)

    @staticmethod
    def _come_together(
        parent: Any, alike: str, needed: int, limit: float, about: Callable[[], dict[str, Any]]
    ) -> Watch:
        """Wait until every rank is here and knows where to ask the others: else none could be asked while groups are
        made.

        alike: what must be equal in the groups of all ranks. needed: file descriptors that the groups take.
        """
        rank, ranks, name = dist.get_rank(parent), dist.get_world_size(parent), str(parent.group_name)
        store = dist.distributed_c10d._get_default_store()
        # The store may outlive a process group, and the group's ranks come together once for each time-out.
        at = f"zeroshard/{name}/{store.add(f'zeroshard/{name}/came/{rank}', 1)}"
        connections = _touch_all(parent, ranks)
        free, needed = _free_descriptors(), DESCRIPTORS + needed
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
        come_together(watch, store, at, ranks, lambda: _broken(connections), limit, alike)
        if connections is not None:
            attend(watch, connections.wait)
        return watch

    def _about(self) -> dict[str, Any]:
        speaker = None if self.speaker is None else self.speaker()
        return _nothing() if speaker is None else speaker.about()

    def _left(self, rank: int, engine: int, launched: Mapping[str, int]) -> Departed:
        """Return what this rank has left. rank: the one that asks, by its number in the program. engine: the number of
        the one that waits there. launched: how many collectives that rank has launched in each group. Called on the
        watch's thread.

        What this rank has left of another model keeps it from nothing of this one: only that model's next verb levels
        it. A verb that was left is different, because the next verb of any model levels that.
        """
        models = [each for each in (reference() for reference in self.engines.valuerefs()) if each is not None]
        found = next((words for words in (each.left_open(engine) for each in models) if words), "")
        own = self.engines.get(engine)
        forward = "" if own is None else own.progress.left
        # Read the counts last: if something was left above and is not levelled, nothing was launched since.
        return Departed(
            found, stands_in(self._thread, rank, launched), forward, [stream.count for stream in self.levelling]
        )

    @property
    def parent(self) -> Any:
        return self._parent()

    def get_through(self) -> None:
        """Wait at the program's end for what devices' queues hold. If a rank is gone, that never ends: abort it."""
        handles = [each for at in self.queues for each in self.streams[at].under_way]
        begun, patience = time.monotonic(), 0.2
        while not (self.aborted or all(handle.is_completed() for handle in handles)):
            waited = time.monotonic() - begun
            if waited > patience:
                patience *= 2
                if waited > self.limit or any(each.silence == GONE for each in self.watch.ask().values()):
                    self.abort()
            time.sleep(0.001)

    def abort(self) -> None:
        """End the collectives in devices' queues, because a rank is gone that they wait for."""
        if not self.queues:
            return
        with self._aborting:  # the watch's thread and the program's may both come here
            if not self.aborted:
                self._abort()
                self.aborted = True

    def _abort(self) -> None:
        """Abort all groups in devices' queues concurrently.

        One after the other would never end: to free a communicator's memory, CUDA waits for all that runs on the
        device, also the kernels of the next communicator, which only their own abort ends. torch aborts in a thread of
        its own, which NCCL's group calls do not reach. If the device waits for a collective of the program's own, or of
        other models, that one is ended as well: no rank could go on otherwise.
        """
        aborts = AtOnce({id(each.group): partial(_end_one, each.group) for each in self.streams if each.queued})
        try:
            aborts.wait(ABORTING)
        finally:
            if aborts.late:
                log.warning(
                    "zeroshard: rank %s has aborted its collectives, and after %g s its device still waits for others: "
                    "all process groups in devices' queues are aborted, the program's own too",
                    self.watch.rank, ABORTING,
                )  # fmt: skip
                for other in [other for made in _made.values() for other in made.values() if other is not self]:
                    other.cut_off()
                _end_queues()

    def cut_off(self) -> None:
        """Tell all ranks that these collectives are aborted with those of other groups: their data may be arbitrary."""
        if self.queues and self.loss is None:
            mine = {self.watch.rank: "aborted them with those of other groups on its device"}
            lost = self.watch.blame() or mine
            self.loss, self.aborted = "; ".join(f"rank {rank} {what}" for rank, what in sorted(lost.items())), True
            self.watch.tell(lost)

    # --- a levelling: after an exception all ranks end the same collectives ----------------------------------------

    @property
    def ends(self) -> bool:
        """True while collectives in devices' queues are being ended, so that none may be launched there."""
        ending = self._ending
        return ending is not None and not ending.over

    def _summon(self, number: int) -> None:
        """End devices' queues if a rank keeps calling for a levelling and this rank's host has not heard it."""
        if self.queued and number == self.levellings + 1:
            first = self._summoned.setdefault(number, time.monotonic())
            if time.monotonic() > first + BY_ITSELF:
                self.end(number)

    def end(self, number: int) -> Ending:
        with self._lock:
            if self._ending is None or self._ending.number != number:
                streams = [self.streams[at] for at in self.queues]
                self._ending = Ending(number, self.watch, len(self.ranks), streams, self.limit, self._abort)
            return self._ending

    def begin_anew(self, ending: Ending, states: Sequence[Sequence[Sequence[Any]]]) -> None:
        """Make the groups of devices' queues anew, once everything has ended on all ranks, which are here.

        states: by rank and stream; each begins with how many collectives were launched.

        torch keeps the old groups to its own end: it names new groups by how many there are, and old names stay taken
        in the store. The new ones are not split from the group of all ranks, in which the program may have something
        under way.
        """
        finish(self.device)  # aborted collectives write nothing any more
        ending.anew = ending.anew or Attended(self._make_anew)
        for place, (at, group) in enumerate(zip(self.queues, ending.anew.attend(self.watch), strict=True)):
            stream = self.streams[at]
            stream.resume(group, max(states[rank][place][0] for rank in stream.members))

    def _make_anew(self) -> list[Any]:
        made = self._make(self.queues, alone=True)
        self._connect(made)
        return made

    @property
    def launched(self) -> list[int]:
        """The numbers of collectives launched so far, by stream; 0 for streams of sums and behind the training. Ranks
        that do the same launch all other collectives, and begin sums, in one common order."""
        return [0 if at in self.sums or each.behind else each.count for at, each in enumerate(self.streams)]

    def progress(self) -> dict[str, Any]:
        """Return how far this rank has come, as fields of `watch.Answer`. Called on the watch's thread."""
        launched = self.launched  # read before `sums_begun`: a later launch may have come after more sums
        return {"launched": launched, "sums": self.sums_begun, "parted": self.parted}

    def number(self) -> int:
        """Return a number for the next model that is sharded over these groups."""
        self._engines += 1
        return self._engines

    def _add(self, *streams: Stream) -> None:
        """Add streams. All take part in a levelling, but a save's behind the training, which goes on."""
        self.streams += streams
        self.levelling += [stream for stream in streams if not stream.behind]

    def for_saves(self, *, behind: bool) -> Stream:
        """Return the control stream for saves, made once for each kind, even if an interrupt ends the wait for it."""
        if behind not in self._save_streams:
            self._save_streams[behind] = Attended(
                lambda: _new_group(lazy=len(self.axes) > 1, backend="gloo", **self._for_saves)
            )
        group = self._save_streams[behind].attend(self.watch)
        if all(group is not stream.group for stream in self.streams):
            self._add(Stream(group, self.control.members, behind=behind))
        return next(stream for stream in self.streams if stream.group is group)


# The groups of a parent are made once: making them anew for every engine would leak sockets. Those in which a
# collective was lost are not used again.
_made: weakref.WeakKeyDictionary[Any, dict[Any, Groups]] = weakref.WeakKeyDictionary()


def groups_of(
    parent: Any,
    device: torch.device,
    timeout: float | None,
    sits: Seat,
    on_axis: Seat | None = None,
    transport: Transport = "gloo",
) -> Groups:
    made, key = _made.setdefault(parent, {}), (device, timeout, sits, on_axis, transport)
    if key not in made or made[key].loss is not None:
        made[key] = Groups(parent, device, timeout, sits, on_axis, transport)
    elif made[key].queued:
        prepare(len(_in_queues()))  # the program may have made more
    return made[key]
