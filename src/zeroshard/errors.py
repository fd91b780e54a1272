"""The exception tree, and the one way its messages are built.

    Error
    ├── UserError      (also ValueError)    a setting, argument, model or optimizer that cannot work
    ├── StateError     (also RuntimeError)  a call at a moment when it cannot be answered
    │   └── ReleasedError                   a released parameter was touched outside forward and backward
    ├── TierError      (also RuntimeError)  a state's file cannot be made, read or written
    ├── CheckpointError (also RuntimeError) files that cannot be written, are damaged, or do not fit this model
    ├── NotFiniteError (also ArithmeticError) a gradient or parameter is NaN or infinite
    ├── CorruptionError (also RuntimeError) a rank computes wrongly, and no error says so
    └── PeerError      (also RuntimeError)  the ranks disagree, or one of them is gone

Every one of them says what failed, where, what was expected, what was found, and what to write instead.
"""

from __future__ import annotations

import difflib
import functools
import os
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any


def one_line(message: object) -> str:
    """Join an error's lines to one, for logs and `grep`."""
    return "; ".join(line.strip() for line in str(message).splitlines())


class Error(Exception):
    """Base of everything zeroshard raises on purpose.

    Reads as one line per fact:

    what: what failed.
    where: the rank, parameter, file or setting.
    expected: what would have been right.
    got: what was found.
    instead: what to write instead.

    `agreed` is True for an error that every rank raises together.

    Examples:
        >>> try:
        ...     zeroshard.shard(model, optimizer, stage=4)
        ... except zeroshard.Error as error:
        ...     print(error)
        no such ZeRO stage
          expected: 0, 1, 2 or 3
          got: 4
          instead: shard(..., stage=3)
    """

    agreed = False  # do all ranks raise it together, so that none waits for a rank that has raised it already?

    def __init__(
        self, what: str, *, where: object = None, expected: object = None, got: object = None, instead: object = None
    ) -> None:
        facts = {"where": where, "expected": expected, "got": got, "instead": instead}
        lines = [what, *(f"  {key}: {fact}" for key, fact in facts.items() if fact is not None)]
        super().__init__(visible("\n".join(lines)))


class UserError(Error, ValueError):
    """A setting, argument, model or optimizer that cannot work as given."""


class StateError(Error, RuntimeError):
    """A call at a moment when it cannot be answered."""


class ReleasedError(StateError):
    """A released parameter was touched where it cannot be gathered."""


class TierError(Error, RuntimeError):
    """A file that a state rests in cannot be made, read or written: what the model holds is not to be trusted."""

    agreed = True


class CheckpointError(Error, RuntimeError):
    """A checkpoint cannot be written, is damaged or incomplete, or is of another model."""


class NotFiniteError(Error, ArithmeticError):
    """A gradient or a parameter is NaN or infinite, and `Precision(nonfinite="raise")` asked to hear of it."""


class CorruptionError(Error, RuntimeError):
    """Ranks got different bits of one micro-batch (`zero.replay`): silent data corruption.

    found: one `replay.Corruption` for each micro-batch and rank, the same on all ranks.
    """

    agreed = True
    found: Sequence[Any] = ()


class PeerError(Error, RuntimeError):
    """The ranks disagree about what they are doing, or one of them is gone."""

    agreed = True
    parted = False  # were some ranks leaving `gathered()` when they found that? Then it is left without another meeting


def without_own_lines(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate an entry point of the engine: drop the engine's own lines from the traceback of a `PeerError`. What
    failed is on another rank; the program's own line is all that this rank can tell of it."""

    @functools.wraps(function)
    def entered(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except PeerError as error:
            raise error.with_traceback(None) from error.__cause__

    return entered


def visible(text: str) -> str:
    """Escape every character that does not print, line ends aside: a file's names must not steer a terminal."""
    if text.isascii() and text.replace("\n", "").isprintable():
        return text
    return "".join(c if c == "\n" or c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def check_local(path: str | os.PathLike[str]) -> None:
    """Refuse an address where a file or folder of this machine is meant: it would become a folder called `s3:`."""
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", os.fspath(path)):
        raise UserError(
            "this is an address, and not a path of this machine",
            got=os.fspath(path),
            expected="a local or mounted folder",
            instead='dcp.save({"app": zero}, storage_writer=FsspecWriter("s3://...")), FsspecReader to load, both of '
            "torch.distributed.checkpoint.fsspec_filesystem (before torch 2.15 _fsspec_filesystem); or write to a "
            "folder, and copy that",
        )


def nearest(word: object, choices: Iterable[str]) -> str:
    """Return `did you mean 'model'? (one of: unit, model, tensor)`, for settings with a closed list of values."""
    choices = list(choices)
    close = difflib.get_close_matches(str(word), choices, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}(one of: {', '.join(choices)})"
