"""`Together`: one way in which a problem of one rank becomes every rank's error."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from ..errors import Error, UserError
from .agreement import Group


def problem_of(error: Exception) -> str:
    """Return an error in words, with its type if it is not one of zeroshard's."""
    return f"{error}" if isinstance(error, Error) else f"{type(error).__name__}: {error}"


class Together:
    """A block that fails on all ranks or on none: they meet at its end, and raise if it failed on one of them.

        with Together(group, lambda told: CheckpointError("not saved", got="; ".join(told))) as block:
            block.answer = write()
        block.answers    # every rank's

    Several blocks, one after the other, may use one `Together`. The others hear of an `Exception` only: an interrupt
    propagates, and the ranks recover from it as anywhere else.
    """

    def __init__(
        self,
        group: Group,
        wrong: Callable[[list[str]], Error],
        *,
        said: Callable[[Exception], str] = problem_of,
        own: bool = False,
    ) -> None:
        """wrong: makes the error to raise from ["rank 1: ...", ...]. own: raise this rank's own error as it is."""
        self.group, self.wrong, self.said, self.own = group, wrong, said, own
        self.failed: Exception | None = None  # this rank's first exception
        self.answer: Any = None  # JSON-able, of the block that is under way
        self.answers: list[Any] = []
        self.told = False  # have all ranks heard that it failed on one?

    def __enter__(self) -> Together:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> bool:
        if error is not None and not isinstance(error, Exception):
            return False
        self.failed = self.failed or error
        answer, self.answer = self.answer, None  # so that the next block does not send it again
        everyone = self.group.describe([None if self.failed is None else self.said(self.failed), answer])
        self.answers = [answer for _, answer in everyone]
        told = [f"rank {rank}: {problem}" for rank, (problem, _) in enumerate(everyone) if problem]
        self.told = bool(told)
        if self.failed is not None and self.own:
            raise self.failed
        if told:
            raise self.wrong(told)
        return True

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Note a failure without a meeting: until the block, this rank must still join the other ranks' collectives."""
        try:
            yield
        except Exception as error:
            self.failed = self.failed or error


def first_writes(group: Group, path: object, write: Callable[[], None]) -> None:
    """Write a file on rank 0, and raise on every rank if that fails."""
    with Together(group, lambda told: UserError("the file was not written", where=f"{path}", got=told[0]), said=str):
        if group.rank == 0:
            write()
