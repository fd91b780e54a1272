"""Begin and end forwards of units: a frame for each that runs, the innermost last."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ...errors import StateError
from ...events import Event, Ledger, ends
from .guard import SavedTensors
from .transaction import Transaction
from .unit import Unit


@dataclasses.dataclass(eq=False)
class Frame:
    """One running forward of a unit."""

    unit: Unit
    module: nn.Module  # of the unit's, the one that was called
    again: bool  # is it computed once more, in backward?
    inputs: Any = None  # of its call, as a feature that asks for them refers to them
    opened: list[Unit] = dataclasses.field(default_factory=list)
    pushed: bool = False
    cached: bool | None = None  # did autocast keep casts before it, if it does not inside?
    event: Event | None = None
    profiled: contextlib.AbstractContextManager[Any] = dataclasses.field(default_factory=contextlib.nullcontext)
    thread: int = dataclasses.field(default_factory=threading.get_ident)


class Forward(Transaction):
    """The running forward of one sharded model on one rank, if there is one; its call is the outermost module's."""

    def __init__(self, units: Sequence[Unit], saved: SavedTensors, ledger: Ledger, *, releases: bool) -> None:
        """releases: does a unit's forward release its weights?"""
        self.units = units
        self.saved = saved
        self.ledger = ledger
        self.releases = releases
        self.frames: list[Frame] = []
        self.grad = False  # was it called in grad mode?
        self.whole = -1  # how many backwards had begun when the last forward in grad mode ended without an exception
        self.alone: Unit | None = None  # the unit that it begins with, if no other rank need take part in it
        self._held: list[Unit] = []  # units of several modules that stay open between their modules' forwards
        self._last: Unit | None = None  # the unit that it left last

    @property
    def begun(self) -> bool:
        return bool(self.frames)

    def left(self) -> bool:
        return super().left() and self.begun

    @property
    def kind(self) -> str:
        return "forward" if self.grad else "forward without grad"

    def has(self, unit: Unit) -> bool:
        """Tell if a forward of this unit runs on this thread."""
        return any(frame.unit is unit and frame.thread == threading.get_ident() for frame in self.frames)

    def begin(self, frame: Frame) -> None:
        """Begin a forward inside those that run. Another thread may compute a part of one, but not beside a third."""
        self.frames.append(frame)  # first: two threads may be here at once, and one of them sees the other's
        at = self.frames.index(frame)
        if not at or (other := self.frames[at - 1]).thread == frame.thread:
            return
        if frame.module is other.module or all(each is not frame.module for each in other.module.modules()):
            self.frames.remove(frame)
            raise StateError(
                "two threads compute parts of one forward at once",
                where=f"units {other.unit.name!r} and {frame.unit.name!r}",
                expected="one part after the other: units are gathered and released in one order",
                instead="call them one after the other, on one thread",
            )

    def inside(self, unit: Unit) -> bool:
        """Tell if the innermost running forward is this unit's."""
        return bool(self.frames) and self.frames[-1].unit is unit

    def come_to(self, unit: Unit) -> None:
        """Let go of units that are held for their next module, but for this one and the one that was left last.

        So each is gathered once where a model uses its modules in order, or those of two lists in turns.
        """
        for each in [each for each in self._held if each is not unit and each is not self._last]:
            self._held.remove(each)
            self._let_go(each)

    def _leave(self, unit: Unit) -> None:
        """Let go of a unit, or hold it for its next module while the forward of the model goes on."""
        self._last = unit
        if not (unit.joined and self.frames):
            self._let_go(unit)
        elif unit not in self._held:
            self._held.append(unit)

    def _let_go(self, unit: Unit) -> None:
        unit.close()
        if self.releases:
            unit.release()

    def unwind(self, unit: Unit | None) -> Frame:
        """Leave the innermost forward of `unit`, and with it those inside it that an interrupt never let end."""
        while self.frames:
            frame = self.frames.pop()
            frame.profiled.__exit__(None, None, None)
            ends(frame.event)
            if frame.pushed:
                self.saved.pop()
            for needed in frame.opened:
                needed.open_calls -= 1
                if frame.again:
                    needed.close()
                else:
                    self._leave(needed)
            if frame.cached is not None:
                torch.set_autocast_cache_enabled(frame.cached)
            if frame.unit is unit:
                break
        if not self.frames:
            self.call = self.alone = self._last = None
            while self._held:
                self._let_go(self._held.pop())
        return frame

    def keep_no_casts(self, frame: Frame) -> None:
        """Have autocast cast released weights anew at each use, in a forward without grad.

        Its cache keeps a 16-bit copy of each weight until autocast ends: then without grad it is all that it holds of
        released weights. It is the thread's and not the model's, so it must not be cleared: autograd adds up a weight's
        gradients in 16 bits at its one copy, and another model may share copies between two forwards.

        With grad the cache stays on, also in a forward with grad inside one without.
        """
        before = next((each.cached for each in self.frames if each.cached is not None), None)
        if torch.is_grad_enabled():
            keeps = before if before is not None else torch.is_autocast_cache_enabled()
        else:
            keeps = torch.is_autocast_cache_enabled() and not frame.unit.released
        if keeps != (now := torch.is_autocast_cache_enabled()):
            frame.cached = now
            torch.set_autocast_cache_enabled(keeps)

    def abandon(self) -> None:
        self.unwind(None)
        self.ledger.end("forward")
