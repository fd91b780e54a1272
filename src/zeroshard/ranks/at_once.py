"""Calls that block, made at once. Their threads are started ahead: at a program's end Python 3.12 starts none."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

log = logging.getLogger("zeroshard")
_process = 0  # that has the threads: a fork has none
_threads = 0
_calls: queue.SimpleQueue[tuple[Callable[[], None], threading.Event]]


def prepare(count: int) -> None:
    """Start threads for so many calls more: each user's calls may wait for another's."""
    global _process, _threads, _calls
    if _process != os.getpid():
        _process, _threads, _calls = os.getpid(), 0, queue.SimpleQueue()
    for _ in range(count):
        threading.Thread(target=_serve, args=(_calls,), name="at once", daemon=True).start()
        _threads += 1


def at_once(calls: Sequence[Callable[[], None]], limit: float = 60.0) -> bool:
    """Make calls at once, and wait until all have returned; they must raise nothing.

    Returns False if one has not returned after `limit` seconds; it goes on. An interrupt is raised once all have.
    """
    if _process != os.getpid():
        raise RuntimeError("the threads for calls at once are those of the process that forked this one")
    done = [threading.Event() for _ in calls]
    deque(map(_calls.put, zip(calls, done, strict=True)), maxlen=0)  # one call of C: an interrupt leaves none out
    deadline, interrupt = time.monotonic() + limit, None
    while (late := [each for each in done if not each.is_set()]) and time.monotonic() < deadline:
        try:
            late[0].wait(0.05)
        except BaseException as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt
    return not late


def _serve(calls: queue.SimpleQueue[tuple[Callable[[], None], threading.Event]]) -> None:
    while True:
        call, done = calls.get()
        try:
            call()
        except Exception:
            log.exception("zeroshard: a call that must raise nothing has raised")
        finally:
            done.set()
            del call, done  # an idle thread keeps nothing alive
