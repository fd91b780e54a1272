"""What a seed decides, and a digest of what came of it. Without a seed nothing is drawn."""

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
    """How probable is what a seed draws, at each point at which a rank could hand on the baton.

    hand_on: it does so though it need not. late: for how many points a message that could land stays away, one of these
    for each message; NEVER is until it is waited for or nobody can go on. rush: the clock goes on to the end of the next
    wait though ranks could go on. collect: garbage is collected. end: the rank ends, as by kill -9.
    interrupt: `KeyboardInterrupt`; at each line of zeroshard's, not at points. most: interrupts in all.
    """

    hand_on: float = 0.1
    late: tuple[float, ...] = (0, 3, 30, 300, NEVER)
    rush: float = 0.0
    collect: float = 0.0
    end: float = 0.0
    interrupt: float = 0.0
    most: int = 2


class Draws:
    """The choices of one run."""

    def __init__(self, seed: int | None, odds: Odds, *, strict: bool) -> None:
        self.seed, self.odds = seed, odds
        self._lateness = NEVER if strict else 0  # where nothing is drawn
        self._random = random.Random(seed)
        self._digest = hashlib.sha256()
        self.events: deque[str] = deque(maxlen=SHOWN)
        self.struck: list[str] = []  # faults
        self._interrupted = 0
        self.lines = self._gap()  # of zeroshard's until the next interrupt

    def chance(self, probability: float) -> bool:
        return self.seed is not None and probability > 0 and self._random.random() < probability

    def one_of(self, things: Sequence[Any]) -> Any:
        """One of them; the first where nothing is drawn."""
        return things[0] if self.seed is None or len(things) == 1 else self._random.choice(things)

    def lateness(self) -> float:
        """Points for which a message stays away once it could land."""
        return self._lateness if self.seed is None else self._random.choice(self.odds.late)

    def interrupts(self) -> bool:
        """A line of zeroshard's begins: is it interrupted?"""
        self.lines -= 1
        if self.lines > 0:
            return False
        self._interrupted += 1
        self.lines = self._gap() if self._interrupted < self.odds.most else NEVER
        return True

    def _gap(self) -> float:
        if self.seed is None or not self.odds.interrupt:
            return NEVER
        return 1 + int(math.log(1 - self._random.random()) / math.log(1 - self.odds.interrupt))

    def note(self, words: str) -> None:
        """An event of the schedule: the same seed makes the same events in the same order."""
        self._digest.update(f"{words}\n".encode())
        self.events.append(words)

    def strike(self, words: str) -> None:
        self.struck.append(words)
        self.note(words)

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()[:16]
