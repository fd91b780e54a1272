"""The call on a thread's stack that a hook or a verb between ranks belongs to, and whether it still runs.

A forward, a step or a verb that an interrupt left never gets to its end. The next one finds what it left behind, and
must tell whether it runs inside that call, perhaps on another thread, or after it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


class Call:
    """A running call, held by its frame.

    made_by: a function of torch's; the call is then the innermost one of that function's file, seen from a hook.
    Without it the frame is the given one, or that of the function that makes this."""

    def __init__(self, made_by: Callable[..., Any] | None = None, frame: FrameType | None = None) -> None:
        frame = frame or sys._getframe(1)
        if made_by is not None:
            file = made_by.__code__.co_filename
            while frame.f_code.co_filename != file and frame.f_back is not None:
                frame = frame.f_back
        self._frame = frame  # held, so that no other frame can be taken for it
        self._thread = threading.get_ident()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Call) and other._frame is self._frame

    __hash__ = None  # type: ignore[assignment]

    def running(self) -> bool:
        """Tell if the call is still on its thread's stack."""
        if threading.get_ident() == self._thread:
            return self._below(sys._getframe(1))
        while True:
            top = sys._current_frames().get(self._thread)
            # That thread goes on meanwhile: a frame that has returned has no caller any more.
            if (found := self._below(top)) or top is sys._current_frames().get(self._thread):
                return found

    def elsewhere(self) -> bool:
        """Tell if the call runs on another thread than this."""
        return threading.get_ident() != self._thread and self.running()

    def _below(self, frame: FrameType | None) -> bool:
        while frame is not None and frame is not self._frame:
            frame = frame.f_back
        return frame is not None
