"""The end of collectives in devices' queues, when an interrupted rank will never launch its part of some.

A rank that ran ahead may wait for its device, in `loss.item()` say, while the device waits for a collective that the
interrupted rank never launched. So the host of such a rank can neither be asked nor stand in for another. But a
collective in a device's queue can be aborted; then the device goes on, with arbitrary content in memory. On a thread of
its own each rank

    1  posts what it has launched, and launches no more
    2  finds from all postings which collectives complete by themselves, and waits for these: earlier steps are made of
       them
    3  posts that these are through. Once all have posted that, no rank needs what another has sent, and it aborts the
       rest

Once all hosts have come, they make the groups anew and go on with the levelling (`collectives.py`). If all ranks have
launched the same, nothing is aborted.

Named hazard, *an abort on one rank alone*: NCCL's own watchdog ends a process whose communicator a peer has left. So
all ranks abort when all have posted, and none before.

A call that aborts may block for long. Aborts of several groups run concurrently (`AtOnce`).
"""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .launch_log import Stream
from .watch import Watch

log = logging.getLogger("zeroshard")
BY_ITSELF = 0.6  # seconds for a rank's host to come, by itself, to a levelling that it was called to
LAUNCHED, DRAINED = "launched", "drained"  # what is posted
At = tuple[int, tuple[int, ...]]  # a stream's place among those of a rank, and its members
# For each stream: how many were launched, its members, and (number, place among all launches) of those under way.
Told = list[tuple[int, list[int], list[tuple[int, int]]]]


def complete(told: Sequence[Told]) -> dict[At, int]:
    """Return, for each stream, the number of its last collective that completes by itself. told: by each rank.

    A collective does if all members have launched it, and if no member's device has to get through one before it that
    does not complete.
    """
    found: dict[At, int] = {}
    for streams in told:
        for place, (count, members, _) in enumerate(streams):
            at = place, tuple(members)
            found[at] = min(count, found.get(at, count))
    shortened = True
    while shortened:
        shortened = False
        for streams in told:
            launches = [
                (order, number, (place, tuple(members)))
                for place, (_, members, under_way) in enumerate(streams)
                for number, order in under_way
            ]
            stuck = min((order for order, number, at in launches if number > found[at]), default=None)
            for order, number, at in launches:
                if stuck is not None and order > stuck and number <= found[at]:
                    found[at], shortened = number - 1, True
    return found


class Ending:
    """The end of all collectives in devices' queues, in one levelling."""

    def __init__(
        self, number: int, watch: Watch, ranks: int, streams: Sequence[Stream], limit: float, abort: Callable[[], None]
    ) -> None:
        """streams: this rank's, in its device's queues. limit: seconds to wait for any rank."""
        self.number, self.streams = number, streams
        self.limits: dict[At, int] = {}
        self.aborted = self.over = False  # over: can the groups be used again?
        self.error: Exception | None = None
        self.anew: Any = None  # the call that remakes groups
        self._watch, self._ranks, self._limit, self._abort = watch, ranks, limit, abort
        self._thread = threading.Thread(target=self._run, name="ending", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait for the thread. A signal's handler may end this, and then it is called again."""
        while self._thread.is_alive():
            self._thread.join(0.05)

    def _run(self) -> None:
        try:
            mine = [(stream.count, [*stream.members], stream.order) for stream in self.streams]
            self._watch.posted[self.number, LAUNCHED] = json.dumps(mine)
            told = [json.loads(each) for each in self._all_posted(LAUNCHED)]
            self.limits = complete(told)
            if any(
                count > self.limits[place, tuple(members)]
                for each in told
                for place, (count, members, _) in enumerate(each)
            ):
                self.end()
        except Exception as error:
            self.error = error
            self._abort()  # this rank's host may wait for its device

    def _drain(self) -> None:
        deadline = time.monotonic() + self._limit
        for place, stream in enumerate(self.streams):
            for handle in stream.before(self.limits[place, tuple(stream.members)]):
                while not handle.is_completed():
                    if time.monotonic() > deadline or self._watch.alarm:
                        raise RuntimeError("what all ranks have launched did not get through")
                    time.sleep(0.001)
        self._watch.posted[self.number, DRAINED] = DRAINED
        self._all_posted(DRAINED)

    def _all_posted(self, what: str) -> list[str]:
        return self._watch.all_posted(self.number, what, self._ranks, self._limit)

    def end(self) -> None:
        """Abort the collectives that do not get through, together with all ranks."""
        if not self.aborted:
            self._drain()
            self._abort()
            self.aborted = True


# Threads for calls that block. They start in advance: at a program's end Python 3.12 starts none.
_process = 0  # the pid that has the threads: a fork has none
_threads = 0
Done = list[None]  # empty until a call has returned. An event has a lock, which an interrupt may leave locked
_calls: queue.SimpleQueue[tuple[int, Callable[[], None], Done]]


def prepare(count: int) -> None:
    """Start threads until `count` calls can run concurrently."""
    global _process, _threads, _calls
    if _process != os.getpid():
        _process, _threads, _calls = os.getpid(), 0, queue.SimpleQueue()
    while _threads < count:
        threading.Thread(target=_serve, args=(_calls,), name="at once", daemon=True).start()
        _threads += 1


class AtOnce:
    """Calls that run concurrently. They must raise nothing.

    If a call with the same key is under way, this object waits for that one and makes none. So two objects with the
    same calls take no threads from each other.
    """

    def __init__(self, calls: Mapping[int, Callable[[], None]]) -> None:
        if _process != os.getpid():
            raise RuntimeError("the threads for calls at once are those of the process that forked this one")
        self._done: dict[int, Done] = {key: [] for key in calls}
        # One call of C: an interrupt leaves none out.
        deque(map(_calls.put, zip(calls, calls.values(), self._done.values(), strict=True)), maxlen=0)

    @property
    def late(self) -> list[int]:
        """The keys of calls that have not returned."""
        return [key for key, done in self._done.items() if not done]

    def wait(self, limit: float) -> None:
        """Wait until all calls have returned, at most `limit` seconds. An interrupt is raised only after that."""
        deadline, interrupt = time.monotonic() + limit, None
        while True:
            try:
                while self.late and time.monotonic() < deadline:
                    time.sleep(0.002)
                break
            except BaseException as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt


_under_way: dict[int, list[Done]] = {}  # by key, whom to tell when the call has returned
_lock = threading.Lock()  # guards `_under_way`; only the threads below take it, where no signal comes


def _serve(calls: queue.SimpleQueue[tuple[int, Callable[[], None], Done]]) -> None:
    while True:
        key, call, done = calls.get()
        with _lock:
            joined = key in _under_way
            _under_way.setdefault(key, []).append(done)
        if not joined:
            try:
                call()
            except Exception:
                log.exception("zeroshard: a call that must raise nothing has raised")
            with _lock:
                ended = _under_way.pop(key)
            for each in ended:
                each.append(None)
        del call, done  # an idle thread keeps nothing alive
