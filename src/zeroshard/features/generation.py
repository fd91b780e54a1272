"""Forwards without grad of which ranks make different numbers, as generation of texts of different lengths does.

At stage 3 every rank takes part in every forward, since each owns a part of the weights. So inside `generating()` each
forward is a round of all ranks: a rank that makes none more answers, until no rank makes one more.

    rank 0   forward  forward  forward            leaves the block
    rank 1   forward  answers  answers            leaves it too

An answer gathers what the forward gathers and computes nothing: the same segment of `gather_order.py`, in which this
rank needs no unit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..errors import StateError
from ..hooks import Feature

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from ..engine.step.schedule import Schedule

ROUND = "generating"  # a meeting
_GOES_ON, _IS_THROUGH = 1, 0


class Rounds:
    """The forwards of one block `generating()` on one rank."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule, self._group = schedule, schedule.group

    def begin(self, unit: int) -> None:
        """Begin a forward that this rank makes, with all ranks. unit: the index of the unit that it entered through.

        Raises `StateError` for a forward in grad mode.
        """
        if self._schedule.forward.grad or self._schedule.watcher.sends_always:
            grad = self._schedule.forward.grad
            raise StateError(
                "a forward inside generating() in which ranks share more than weights",
                where=f"rank {self._group.rank}, " + ("in grad mode" if grad else "before which buffers are sent"),
                expected="forwards without grad, of which each rank makes as many as it needs",
                instead="with torch.no_grad(): ... around them; train after the block"
                if grad
                else 'Layout(buffers="broadcast") or "local", with which forwards without grad send no buffers',
            )
        self._round(_GOES_ON, unit)

    def answer(self) -> None:
        """Take part in the forwards of other ranks, until no rank makes one more."""
        schedule = self._schedule
        while (unit := self._round(_IS_THROUGH, 0)) is not None:
            schedule.flush_pinned()
            if schedule.releases:
                schedule.gather_order.begin((schedule.forward.kind, unit))
                schedule.gather_order.finish()
            for each in schedule.units:
                each.release()

    def _round(self, goes_on: int, unit: int) -> int | None:
        """Meet all ranks. Return the index of the unit through which those that go on enter; None if none does."""
        self._schedule.recover()
        with self._schedule.telling():
            told = self._group.poll(ROUND, self._group.number(ROUND), goes_on, unit)
        entered = {index for going, index in told if going}
        if len(entered) > 1:  # every rank has heard the same
            error = StateError(
                "the ranks call different parts of the model inside generating()",
                where=f"rank {self._group.rank}",
                got=", ".join(repr(self._schedule.units[index].name or "the model") for index in sorted(entered)),
                instead="the same module on every rank; ranks that are through call none",
            )
            error.agreed = True
            raise error
        return next(iter(entered), None)


class GenerationFeature(Feature):
    name = "forwards of which ranks make different numbers"
    page = "guide.md#generation"

    def generating(self, engine: Engine) -> contextlib.AbstractContextManager[None]:
        return _generating(engine.schedule)


@contextlib.contextmanager
def _generating(schedule: Schedule) -> Iterator[None]:
    group = schedule.group
    group.refuse_within()
    if schedule.rounds is not None or schedule.forward.begun:
        raise StateError(
            "generating() inside " + ("another one" if schedule.rounds is not None else "a forward"),
            where=f"rank {group.rank}",
            instead="one block around all forwards without grad of this model",
        )
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
            group.progress.trouble = f"generating() raised {type(error).__name__}: {error}"
            group.left = True  # between two of its meetings: the next verb levels, and the others hear why
        raise
    finally:
        schedule.rounds = None


FEATURE = GenerationFeature()
