"""Forwards without grad of which ranks make different numbers, as generation of texts of different lengths does.

At stage 3 every rank takes part in every forward, since each owns a part of the weights. So inside `generating()` each
forward is a round of all ranks: a rank that makes none more answers, until no rank makes one more.

    rank 0   forward  forward  forward            leaves the block
    rank 1   forward  answers  answers            leaves it too

An answer gathers what the forward gathers and computes nothing: the same segment of `gather_order.py`, in which this
rank needs no unit. If ranks enter a round through different units, it is one of them after the other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..engine.weights.modes import seen, unseen
from ..errors import PeerError, StateError
from ..hooks import Feature

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from ..engine.step.schedule import Schedule

ROUND = "generating"  # a meeting
_THROUGH, _GOES_ON, _RAISED = 0, 1, 2  # what a rank tells in a round


class Rounds:
    """The forwards of one block `generating()` on one rank."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule, self._group = schedule, schedule.group

    def begin(self, unit: int) -> None:
        """Begin a forward that this rank makes, with all ranks. unit: the index of the unit that it entered through.

        Raises `StateError` for a forward in grad mode, `PeerError` if another rank has left the block by an exception.
        """
        if self._schedule.forward.grad:
            self._schedule.forward.grad = False
            raise StateError(
                "a forward in grad mode inside generating()",
                where=f"rank {self._group.rank}",
                expected="forwards without grad, of which each rank makes as many as it needs",
                instead="with torch.no_grad(): ... around them; train after the block",
            )
        while (first := self._round(_GOES_ON, unit)) not in (unit, None):
            self._take_part(first)

    def answer(self) -> None:
        """Take part in the forwards of other ranks, until no rank makes one more."""
        while (unit := self._round(_THROUGH)) is not None:
            self._take_part(unit)

    def give_up(self, error: Exception) -> None:
        """Tell the other ranks that this rank leaves the block by an exception: they leave it too."""
        with contextlib.suppress(PeerError):  # which all raise
            self._round(_RAISED, words=f"{type(error).__name__}: {error}")

    def _take_part(self, unit: int) -> None:
        """Gather what other ranks' forward needs that entered through this unit."""
        schedule = self._schedule
        with self._group.as_one():
            schedule.flush_pinned()
            schedule.gather_order.begin(("forward without grad", unit))
            schedule.gather_order.finish()
            for each in schedule.units:
                each.release()

    def _round(self, tells: int, unit: int = 0, words: str | None = None) -> int | None:
        """Meet all ranks. Return the index of the unit whose forward is next; None if no rank makes one more."""
        self._schedule.recover()
        with self._schedule.telling():
            told = self._group.poll(ROUND, self._group.number(ROUND), tells, unit)
        if any(each[0] == _RAISED for each in told):
            raise PeerError(
                "a rank has left generating() by an exception",
                where=f"rank {self._group.rank}",
                got="; ".join(self._group.problems(words)),
                instead="fix that, or try again on every rank",
            )
        return min((index for tells, index in told if tells == _GOES_ON), default=None)


class GenerationFeature(Feature):
    name = "forwards of which ranks make different numbers"
    page = "guide.md#generation"

    def generating(self, engine: Engine) -> contextlib.AbstractContextManager[None]:
        return _outside_modes(engine.schedule)


@contextlib.contextmanager
def _outside_modes(schedule: Schedule) -> Iterator[None]:
    with unseen(), _generating(schedule), seen():
        yield


@contextlib.contextmanager
def _generating(schedule: Schedule) -> Iterator[None]:
    group = schedule.group
    group.refuse_within()
    if schedule.rounds is not None or schedule.forward.running():
        raise StateError(
            "generating() inside " + ("another one" if schedule.rounds is not None else "a forward"),
            where=f"rank {group.rank}",
            instead="one block around all forwards without grad of this model",
        )
    if schedule.watcher.sends_always:
        raise StateError(
            "generating() of a model whose ranks send buffers before every forward",
            where=f"rank {group.rank}",
            got='Layout(buffers="always")',
            instead='Layout(buffers="broadcast") or "local", with which forwards without grad send no buffers',
        )
    with group.as_one():
        schedule.recover()
        alike, words = schedule.watcher.alike(False)
        schedule.meet("begin of generating", group.number("begin of generating"), alike, facts=words)
        schedule.watcher.before_forward(False, compared=True)
    schedule.rounds = rounds = Rounds(schedule)
    try:
        yield
        rounds.answer()
    except BaseException as error:
        if not getattr(error, "agreed", False):
            if isinstance(error, Exception) and not (schedule.gather_order.active or group.interrupted):
                rounds.give_up(error)
            else:  # the next verb levels, and the others hear why
                group.progress.trouble = f"generating() raised {type(error).__name__}: {error}"
                group.left = True
        raise
    finally:
        schedule.rounds = None


FEATURE = GenerationFeature()
