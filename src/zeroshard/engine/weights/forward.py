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
from .written import Look


@dataclasses.dataclass(eq=False)
class Frame:
    """One running forward of a unit."""

    unit: Unit
    module: nn.Module  # the unit's module that was called
    again: bool  # is it computed once more, in backward?
    inputs: Any = None  # of its call, in the form that a feature keeps if it needs them
    look: Look | None = None  # at what it writes
    opened: list[Unit] = dataclasses.field(default_factory=list)
    pushed: bool = False
    cached: bool | None = None  # if it switches autocast's cache: was that on before?
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
        self.alone: Unit | None = None  # its first unit, if this rank may run it alone
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

    def of(self, unit: Unit) -> list[Frame]:
        """Return this unit's forwards that run on this thread, the innermost last."""
        thread = threading.get_ident()
        return [frame for frame in self.frames if frame.unit is unit and frame.thread == thread]

    def begin(self, frame: Frame) -> None:
        """Begin a forward inside the running ones. On another thread it must be of a submodule of the innermost one."""
        self.frames.append(frame)  # before the check: if two threads are here at once, one sees the other's
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
        """Let go of units that are held open for their next module, except `unit` and the unit that was left last.

        So each unit is gathered once if a model calls its modules in order, or modules of two lists in turns.
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
        """Leave the innermost forward of `unit`, and the forwards inside it that an interrupt kept from ending."""
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
        """Switch autocast's cache off in a forward without grad of released weights: each use casts them anew.

        The cache keeps a 16-bit copy of each weight until autocast ends, so it would hold copies of all released
        weights. It must not be cleared instead, because it belongs to the thread and not to the model: autograd adds up
        a weight's gradients in 16 bits at the one copy, and another model may share copies between two forwards.

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
        self.grad = False
        self.ledger.end("forward")
