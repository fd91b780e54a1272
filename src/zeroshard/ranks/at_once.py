"""Calls that block, made at once. Their threads are started ahead: at a program's end Python 3.12 starts none."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Sequence

_process = 0  # that has the threads: a fork has none
_threads = 0
_calls: queue.SimpleQueue[tuple[Callable[[], None], threading.Event]]


def prepare(count: int) -> None:
    """Start threads until so many calls can be made at once."""
    global _process, _threads, _calls
    if _process != os.getpid():
        _process, _threads, _calls = os.getpid(), 0, queue.SimpleQueue()
    while _threads < count:
        threading.Thread(target=_serve, args=(_calls,), name="at once", daemon=True).start()
        _threads += 1


def at_once(calls: Sequence[Callable[[], None]]) -> None:
    """Make calls that raise nothing, no more than was prepared for, and wait until all have returned."""
    assert _process == os.getpid() and len(calls) <= _threads, (len(calls), _threads)
    done = [threading.Event() for _ in calls]
    for call, each in zip(calls, done, strict=True):
        _calls.put((call, each))
    for each in done:
        each.wait()


def _serve(calls: queue.SimpleQueue[tuple[Callable[[], None], threading.Event]]) -> None:
    while True:
        call, done = calls.get()
        try:
            call()
        finally:
            done.set()
