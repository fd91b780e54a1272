"""Go on with sums in their order, and take, keep and give back the memory of their messages.

    sent      this rank's contribution is on its way, and others' are coming
    landed    this rank has added its part; others may have to add theirs
    stored    the average is where it rests

The engine runs it with tensors, and the planner with numbers of bytes. Imports neither torch nor anything distributed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from ..layout.limits import POOLED

M = TypeVar("M")


class Memory(Protocol[M]):
    """The memory that messages lie in."""

    def reserve(self, state: str, numel: int, dtype: Any, *, zeroed: bool = True) -> M: ...

    def give_back(self, state: str, memory: M) -> None: ...

    def again(self, memory: M) -> M:
        """Return memory for this rank's next message: the last one's, or other memory if a rank still reads that."""
        return memory


class Scratch(Generic[M]):
    """Memory of messages, kept for the next one of its size and counted under one name."""

    def __init__(self, memory: Memory[M], state: str) -> None:
        self._memory = memory
        self._state = state
        self._kept: list[tuple[int, Any, M]] = []  # (numel, dtype, memory); the longest kept first
        self._taken: list[tuple[int, Any, M]] = []  # and not given back

    def take(self, numel: int, dtype: Any) -> M:
        """Return 1-D memory with arbitrary content: every element that is read must be written first."""
        fitting = [at for at, each in enumerate(self._kept) if each[:2] == (numel, dtype)]
        if fitting:
            taken = self._memory.again(self._kept[fitting[0]][2])
            self._kept.pop(fitting[0])
        else:
            taken = self._memory.reserve(self._state, numel, dtype, zeroed=False)
        if numel:
            self._taken.append((numel, dtype, taken))
        return taken

    def give_back(self, memory: M | None) -> bool:
        """Return memory that was taken here, and tell if it was: foreign memory and second returns are ignored."""
        if taken := [at for at, each in enumerate(self._taken) if each[2] is memory]:
            self._kept.append(self._taken.pop(taken[0]))
            self.trim(POOLED)  # more would pile up where no two buckets are of one size
        return bool(taken)

    def give_back_all(self) -> None:
        for *_, memory in [*self._taken]:
            self.give_back(memory)

    def trim(self, keep: int = 0) -> None:
        """Give unused memory back, but for that of the last `keep` messages."""
        while len(self._kept) > keep:
            self._memory.give_back(self._state, self._kept.pop(0)[2])


class UnderWay(Protocol):
    """One bucket's sum on its way, and its memory."""

    @property
    def receive(self) -> Any: ...  # what other ranks send, until it has landed

    @property
    def running(self) -> Any: ...  # what ranks add to in turn, until the average is stored


S = TypeVar("S", bound=UnderWay)


class Flow(Generic[S, M]):
    """The sums of one model's buckets, while they are under way, the oldest first.

    Subclasses say what landing and storing are.
    """

    def __init__(self, memory: Memory[M], sends: Memory[M] | None, waiting: int) -> None:
        """sends: memory of contributions, if apart. waiting: how many more sums may be under way once this rank's part
        is in them."""
        self.scratch = Scratch(memory, "reduce")
        self.sends = self.scratch if sends is None else Scratch(sends, "reduce")
        self._waiting = waiting
        self._sent: list[S] = []
        self._landed: list[S] = []

    def land(self, each: S) -> None:
        """Add up what has come for a sum."""

    def landed(self, each: S) -> None:
        """Give back the memory of this rank's contribution."""

    def wait(self, each: S) -> None:
        """Wait for an average."""

    def store(self, each: S) -> None:
        """Put an average where it rests, and give back its memory."""

    def begin(self, each: S) -> None:
        """Take note that a sum is under way."""
        self._sent.append(each)

    def oldest(self, allowed: int) -> tuple[S, Callable[[], None]] | None:
        """Return the oldest sum, if more than `allowed` are under way, and how to go on with it."""
        if len(self._landed) > allowed + self._waiting:
            return self._landed[0], self._store_oldest
        if len(self._sent) > allowed:
            return self._sent[0], self._land_oldest
        return None

    @property
    def under_way(self) -> bool:
        return bool(self._sent or self._landed)

    def next(self) -> None:
        """Go on with the oldest sum."""
        (self._land_oldest if self._sent else self._store_oldest)()

    def _land_oldest(self) -> None:
        each = self._sent[0]  # stays in the list until it has landed: an exception may come anytime
        self.land(each)
        self._landed.append(each)
        self.scratch.give_back(each.receive)
        self.landed(each)
        self._sent.pop(0)
        if each.running is None and len(self._landed) == 1:
            # Nothing of this sum is on its way, but it is not stored before the sums ahead of it: if averages are
            # gathered, all ranks of a team gather in one order, and other ranks may have a part of this sum.
            self._store(self._landed.pop())

    def _store_oldest(self) -> None:
        self.wait(self._landed[0])  # an interrupt may come here: then it is still under way
        self._store(self._landed.pop(0))

    def _store(self, each: S) -> None:
        self.wait(each)
        self.scratch.give_back(each.running)
        self.store(each)

    def drop_all(self) -> None:
        """Drop all that is under way."""
        self._landed, self._sent = [], []

    def trim(self) -> None:
        """Give unused memory back."""
        for each in (self.scratch, self.sends):
            each.trim()

    def give_back_all(self) -> None:
        for each in (self.scratch, self.sends):
            each.give_back_all()
