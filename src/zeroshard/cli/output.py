"""Standard output and standard error: the one place where a failed write becomes an error that names its stream.

zeroshard plan > /dev/full    zeroshard: standard output cannot be written: No space left on device     exit code 1
zeroshard plan | head -1      nothing is said, as by any program whose reader has read enough          exit code 141
"""

from __future__ import annotations

import codecs
import errno
import io
import os
import select
import sys
from typing import Any, TextIO

from zeroshard.errors import Error

# What tables and bars are drawn with, where a terminal or a pipe knows no more than ASCII; the rest becomes escapes.
PLAIN = {"█": "@", "▓": "%", "▒": "+", "░": "-", "━": "=", "─": "-", "…": "...", "µ": "u"}
PLAIN |= dict(zip("▁▂▃▄▅▆▇", "_.,-=+*", strict=True))


class OutputError(Error):
    """A stream cannot be written: an `OSError` could be about any file, and Rich ends the program where a pipe ends."""

    def __init__(self, name: str, number: int) -> None:
        super().__init__(f"standard {name} cannot be written: {os.strerror(number)}")
        self.left = number == errno.EPIPE  # the reader has


class _Stream(io.FileIO):
    """A descriptor that stays open. Writes after a failure are dropped, for Python flushes its streams as it ends."""

    def __init__(self, name: str, descriptor: int) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self.told, self.failed = name, False

    def write(self, data: bytes | bytearray | memoryview) -> int:  # type: ignore[override]
        if self.failed:
            return len(data)
        rest = memoryview(data).cast("B")
        try:
            while rest:  # without a buffer above, nothing else writes the rest
                if (written := super().write(rest)) is None:  # the reader is behind, and the stream does not wait
                    select.select([], [self], [])
                rest = rest[written or 0 :]
        except OSError as error:
            self.failed = True
            raise OutputError(self.told, error.errno or errno.EIO) from error
        return len(data)


def take_over() -> None:
    """Set both streams up for a command. Raises `OutputError` where standard output is closed."""
    codecs.register_error("zeroshard", _plain)
    sys.stderr = _wrapped(sys.stderr, "error")
    if sys.stdout is None:  # `>&-`: the number may be another file's by now
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        raise OutputError("output", errno.EBADF)
    sys.stdout = _wrapped(sys.stdout, "output")


def _wrapped(stream: TextIO | None, name: str) -> TextIO:
    if stream is None:
        return open(os.devnull, "w")
    if not isinstance(stream, io.TextIOWrapper):  # a test's, or a notebook's
        return stream
    stream.flush()
    try:
        raw: Any = _Stream(name, stream.fileno())
    except io.UnsupportedOperation:  # in memory: a program's that calls a command
        stream.reconfigure(errors="zeroshard")
        return stream
    return io.TextIOWrapper(
        raw if stream.write_through else io.BufferedWriter(raw),
        encoding=stream.encoding, errors="zeroshard",
        line_buffering=stream.line_buffering, write_through=stream.write_through,
    )  # fmt: skip


def flush() -> None:
    """Write what waits. Raises `OutputError`."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


def _plain(error: UnicodeError) -> tuple[str | bytes, int]:
    if isinstance(error, UnicodeEncodeError) and error.object[error.start] in PLAIN:
        return PLAIN[error.object[error.start]], error.start + 1
    return codecs.backslashreplace_errors(error)
