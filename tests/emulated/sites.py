"""Who called: the frames of a program, without those of torch and of this package."""

from __future__ import annotations

import functools
import os
import sys
import threading
import weakref
from types import FrameType
from typing import NamedTuple

import torch

_HERE = os.path.dirname(os.path.abspath(__file__))
_OURS = (os.path.dirname(os.path.abspath(torch.__file__)), _HERE, os.path.join(os.path.dirname(_HERE), "ranks"))
_OWN = tuple(folder + os.sep for folder in _OURS)
_DEPTH = 12
AUTOGRAD = "autograd"  # where C++ calls: its device thread has no frames of Python


class Frame(NamedTuple):
    path: str
    function: str
    line: int

    def __str__(self) -> str:
        return f"{_short(self.path)}:{self.line} {self.function}"


Stack = tuple[Frame, ...]  # the innermost first


@functools.cache
def _foreign(path: str) -> bool:
    """Is it neither torch's nor ours, nor code without a file?"""
    return not path.startswith((*_OWN, "<", threading.__file__, weakref.__file__))


@functools.cache
def _short(path: str) -> str:
    _, inside, rest = path.rpartition(f"{os.sep}zeroshard{os.sep}")
    return rest if inside else os.path.basename(path)


def stack(frame: FrameType | None = None) -> Stack:
    """The program's frames above this call, or from this frame on."""
    found: list[Frame] = []
    frame = frame or sys._getframe(1)
    while frame is not None and len(found) < _DEPTH:
        code = frame.f_code
        if _foreign(code.co_filename):
            found.append(Frame(code.co_filename, code.co_name, frame.f_lineno))
        frame = frame.f_back
    return tuple(found)


def site() -> str:
    """The first of these frames, as "file:function": the file from the package on, or its bare name."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if _foreign(code.co_filename):
            return f"{_short(code.co_filename)}:{code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return AUTOGRAD


def words(frames: Stack) -> str:
    """The frames, one a line."""
    return "\n".join(f"      {frame}" for frame in frames) or f"      {AUTOGRAD}"
