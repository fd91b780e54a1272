"""Begin and end forwards of units: a frame for each that runs, the innermost last."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from ..events import Event, Ledger, ends
from .guard import SavedTensors
from .transaction import Transaction
from .unit import Unit


@dataclasses.dataclass
class Frame:
    """One running forward of a unit."""

    unit: Unit
    again: bool  # is it computed once more, in backward?
    inputs: Any = None  # of its call, as a feature that asks for them refers to them
    opened: list[Unit] = dataclasses.field(default_factory=list)
    pushed: bool = False
    event: Event | None = None
    profiled: contextlib.AbstractContextManager[Any] = dataclasses.field(default_factory=contextlib.nullcontext)


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
        self.alone: Unit | None = None  # the unit that it begins with, if no other rank need take part in it

    @property
    def begun(self) -> bool:
        return bool(self.frames)

    @property
    def kind(self) -> str:
        return "forward" if self.grad else "forward without grad"

    def has(self, unit: Unit) -> bool:
        """Tell if a forward of this unit runs."""
        return any(frame.unit is unit for frame in self.frames)

    def inside(self, unit: Unit) -> bool:
        """Tell if the innermost running forward is this unit's."""
        return bool(self.frames) and self.frames[-1].unit is unit

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
                needed.close()
                if not frame.again and self.releases:
                    needed.release()
            if not self.grad:
                self._drop_casts(frame.unit)
            if frame.unit is unit:
                break
        if not self.frames:
            self.call = self.alone = None
        return frame

    def _drop_casts(self, unit: Unit) -> None:
        """Clear autocast's cache, which keeps a 16-bit copy of each weight until autocast ends, after a forward without
        grad: the cache is then all that it holds of released weights.

        Never in a forward with grad, checkpointed ones included: autograd adds up a weight's gradients in 16 bits at
        its one copy, so each further copy changes the bits. A graph that waits for its backward may share them, too.
        """
        if unit.released and not any(each.calls for each in self.units):
            torch.clear_autocast_cache()

    def abandon(self) -> None:
        self.unwind(None)
        self.ledger.end("forward")
