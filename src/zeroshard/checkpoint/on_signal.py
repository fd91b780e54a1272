"""A checkpoint on a signal: its handler sets a flag, a step's row tells all ranks, and they save before the next."""

from __future__ import annotations

import logging
import signal as _signal
import threading
from signal import Signals
from typing import Any

from ..errors import UserError
from . import saving

log = logging.getLogger("zeroshard")


def save_on(zero: Any, signal: int, path: Any, extra: Any, keep: int | None) -> None:
    """`Zero.save_on`."""
    if threading.current_thread() is not threading.main_thread():
        raise UserError("only the main thread can handle signals", instead="zero.save_on(...) where the program starts")
    saving.check_signal(signal)
    if path is not None:
        saving.asked(path, None, asynchronous=False, keep=keep)
    elif extra is not None or keep is not None:
        raise UserError("save_on(..., None) saves nothing, and extra= and keep= say how", instead="a path")
    if extra is not None and not callable(extra):
        instead = "extra=lambda: {...}"
        raise UserError("extra= is called when the signal has come", got=repr(extra), instead=instead)
    group, before = zero._engine.group, _signal.getsignal(signal)

    def note(number: int, frame: Any) -> None:
        group.signal = number

    def save() -> None:
        if path is not None:
            zero.save(path, None if extra is None else extra(), keep=keep)
            if zero.rank == 0:
                log.warning("%s: saved %s after step %d", Signals(signal).name, path, group.progress.steps)
        for number, handler in zero._handlers.items():
            _signal.signal(number, handler)

    zero._handlers.setdefault(signal, before)
    _signal.signal(signal, note)
    if not zero._engine.on_signal:  # armed anew: what came before was answered
        group.signal = group.signalled = 0
    zero._engine.on_signal[int(signal)] = save
