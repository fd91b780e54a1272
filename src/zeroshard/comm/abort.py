"""Blocking calls that run concurrently. Their threads start in advance: at a program's end Python 3.12 starts none."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping

log = logging.getLogger("zeroshard")
_process = 0  # the pid that has the threads: a fork has none
_threads = 0
_calls: queue.SimpleQueue[tuple[int, Callable[[], None], threading.Event]]


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
        self._done = {key: threading.Event() for key in calls}
        # One call of C: an interrupt leaves none out.
        deque(map(_calls.put, zip(calls, calls.values(), self._done.values(), strict=True)), maxlen=0)

    @property
    def late(self) -> list[int]:
        """The keys of calls that have not returned."""
        return [key for key, done in self._done.items() if not done.is_set()]

    def wait(self, limit: float) -> None:
        """Wait until all calls have returned, at most `limit` seconds. An interrupt is raised only after that."""
        deadline, interrupt = time.monotonic() + limit, None
        while True:
            try:
                while (late := self.late) and time.monotonic() < deadline:
                    self._done[late[0]].wait(0.05)
                break
            except BaseException as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt


_under_way: dict[int, list[threading.Event]] = {}  # by key, the events to set when the call has returned
_lock = threading.Lock()  # guards `_under_way`; only the threads below take it, where no signal comes


def _serve(calls: queue.SimpleQueue[tuple[int, Callable[[], None], threading.Event]]) -> None:
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
                each.set()
        del call, done  # an idle thread keeps nothing alive
