"""Places where CPython looks for signals: after a call, where a loop goes back, where a function begins and goes on.

An interrupt between two lines without one of these is none that a program can meet, nor is one that leaves out what a
`with` or a `finally` does at its end.
"""

from __future__ import annotations

import dis
import itertools
from types import CodeType
from typing import Any

_LOOKS = ("CALL", "RESUME", "JUMP_BACKWARD", "POP_JUMP_BACKWARD", "JUMP_ABSOLUTE")  # what these names begin with


def can_come(code: CodeType, since: int, at: int) -> bool:
    """Tell if a signal can end a function before a line as it would end it in the line before.

    since: the instruction with which the line before began, or after which the function goes on; -1 before its first
    line. at: with which this line begins.
    """
    if since < 0:
        return _handler(code, at) is None
    line = itertools.takewhile(
        lambda each: each.offset == since or each.starts_line is None,
        (each for each in dis.get_instructions(code) if each.offset >= since),
    )
    looks = [each.offset for each in line if each.opname.startswith(_LOOKS)]
    return bool(looks) and _handler(code, looks[-1]) == _handler(code, at)


def _handler(code: CodeType, at: int) -> Any:
    """Return where an exception of an instruction is handled in its function; None: nowhere, or not known."""
    table: Any = getattr(dis, "_parse_exception_table", lambda _: ())(code)
    return next((entry.target for entry in table if entry.start <= at < entry.end), None)
