"""Lines that begin with the rank that printed them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from .schedule import here


class _Stream:
    """A stream of text that says which rank a line is of; what no rank prints passes unchanged."""

    def __init__(self, plain: Any) -> None:
        self.__dict__["_plain"] = plain
        self.__dict__["_begun"] = []  # the rank whose line has no end yet

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)

    def write(self, text: str) -> int:
        task = here()
        rank = None if task is None else task.rank.number
        for line in text.splitlines(keepends=True):
            if self._begun and self._begun != [rank]:
                self._plain.write("\n")
                self._begun.clear()
            if not self._begun and rank is not None:
                self._plain.write(f"[rank {rank}] ")
            self._plain.write(line)
            self._begun[:] = [] if line.endswith("\n") else [rank]
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)


@contextlib.contextmanager
def by_rank() -> Iterator[None]:
    """Name the rank before each line of standard output and standard error."""
    out, error = _Stream(sys.stdout), _Stream(sys.stderr)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        yield
