"""Choices of a seed, and a digest of them and their effects. Without a seed nothing is drawn."""

from __future__ import annotations

import hashlib
import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

NEVER = math.inf
SHOWN = 40  # events that are kept in words


@dataclass(frozen=True)
class Odds:
    """Probabilities of what a seed draws.

    At each point at which a rank could hand on the baton
        hand_on: it does so though it need not. rush: the clock goes on to the end of the next wait though ranks could
        go on. collect: garbage is collected. end: the rank ends, as by kill -9. pause: it does nothing for one of
        `pauses` virtual seconds, and answers no question, or only its main thread does nothing.
    At each line of zeroshard's
        interrupt: `KeyboardInterrupt`. sweep: garbage is collected.
    inside: garbage is collected inside a copy of a container that `comm/`, `engine/`, `tiers/`, `features/` or
        `checkpoint/` makes.
    memory: at each allocation of a tensor there, that there is none left.
    At each call of a file or folder by `checkpoint/` or `tiers/`
        disk: it fails. short: a write takes fewer bytes. power: all ranks end at once, and with them what is not on
        disk.

    late: for how many points a message that could land stays away, one of these for each message; NEVER is until it is
    waited for or no rank can go on. most: faults in all; collections are none.
    """

    hand_on: float = 0.1
    late: tuple[float, ...] = (0, 3, 30, 300, NEVER)
    rush: float = 0.0
    collect: float = 0.0
    end: float = 0.0
    pause: float = 0.0
    pauses: tuple[float, ...] = (1, 10, 25, 60, 300)
    interrupt: float = 0.0
    sweep: float = 0.0
    inside: float = 0.0
    memory: float = 0.0
    disk: float = 0.0
    short: float = 0.0
    power: float = 0.0
    most: int = 2


class Draws:
    """The choices of one run."""

    def __init__(self, seed: int | None, odds: Odds, *, strict: bool) -> None:
        self.seed, self.odds = seed, odds
        self._lateness = NEVER if strict else 0  # where nothing is drawn
        self._random = random.Random(seed)
        self._digest = hashlib.sha256()
        self.events: deque[str] = deque(maxlen=SHOWN)
        self.before: tuple[str, ...] = ()  # the last ones before what may be a failure
        self.struck: list[str] = []  # faults
        self.armed = True  # do faults strike?
        self._until = {"interrupt": self._gap(odds.interrupt), "sweep": self._gap(odds.sweep)}  # lines of zeroshard's
        self.lines = min(self._until.values())  # until the next of them
        self.traces = self.lines < NEVER

    def chance(self, probability: float) -> bool:
        return self.seed is not None and probability > 0 and self._random.random() < probability

    def one_of(self, things: Sequence[Any]) -> Any:
        """One of them; the first where nothing is drawn."""
        return things[0] if self.seed is None or len(things) == 1 else self._random.choice(things)

    def lateness(self) -> float:
        """Points for which a message stays away once it could land."""
        return self._lateness if self.seed is None else self._random.choice(self.odds.late)

    def strikes(self, probability: float) -> bool:
        """Does a fault strike?"""
        return self.armed and len(self.struck) < self.odds.most and self.chance(probability)

    @property
    def collects(self) -> bool:
        """Is garbage collected?"""
        return self.seed is not None and self.odds.collect + self.odds.sweep + self.odds.inside > 0

    @property
    def at_lines(self) -> bool:
        """Can anything happen at a line of zeroshard's from here on?"""
        return self.armed and self.traces and (self.odds.sweep > 0 or len(self.struck) < self.odds.most)

    def line(self) -> str:
        """`lines` lines of zeroshard's have begun: what happens there, if anything does."""
        passed, due = min(self._until.values()), ""
        for what, until in self._until.items():
            self._until[what] = until - passed
            if until == passed and not due:
                self._until[what], due = self._gap(getattr(self.odds, what)), what
        self.lines = min(self._until.values())
        return due if due == "sweep" or len(self.struck) < self.odds.most else ""

    def _gap(self, probability: float) -> float:
        if self.seed is None or not probability:
            return NEVER
        return 1 + int(math.log(1 - self._random.random()) / math.log(1 - probability))

    def note(self, words: str) -> None:
        """An event of the schedule: the same seed makes the same events in the same order."""
        self._digest.update(f"{words}\n".encode())
        self.events.append(words)

    def fails(self, words: str, kind: str) -> None:
        """Note a possible failure, in words that need not be the same from the same seed; its kind is."""
        self.note(kind)
        self.events.append(words)
        self.before = self.before or tuple(self.events)

    def strike(self, words: str) -> None:
        self.struck.append(words)
        self.note(words)

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()[:16]
