"""Streams: this rank's launches in each process group, so that all ranks recover in the same way after an interrupt.

Every rank launches the same collectives in a process group, in the same order: the launches of one rank are a
prefix of another's. An exception, such as Ctrl-C or out of memory, can take a rank out of that at any point, and others
then wait for its part. Its next verb calls all ranks to a *levelling*, by messages outside the collectives
(`watch.py`):

    1  each rank posts how far it is in every stream, and what it has launched last
    2  once all have posted, each launches what another rank has launched and it has not, with stand-in memory
    3  each waits for these collectives, and for all ranks to be here: a program that ends now leaves no rank waiting
    4  each forgets what it was in the middle of, and counts its meetings on from the furthest rank's numbers

A rank that waits does nothing else then, so stand-in data is never used. Afterwards the ranks are at one point, and can
try again. If a levelling is interrupted itself, the next verb goes on with it.

In a device's queue no rank stands in: see `abort.py`.

Named hazard, *counted is launched*: Python runs signal handlers between any two of its instructions. So a collective is
launched and counted by one call of C: after an exception it is counted exactly if it was sent.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import count, tee
from operator import methodcaller
from typing import Any

KEPT = 2048  # collectives that a rank remembers in each stream: others may be so far behind
completed = methodcaller("is_completed")  # of a handle
Launch = tuple[Any, ...]  # a verb and what it takes to join it; JSON-able


# Its number, what it is, a list of its handle (empty once that was let go of), its place among all streams' launches.
InFlight = tuple[int, Launch, list[Any], int]


def prune(streams: Sequence[Stream]) -> None:
    for stream in streams:
        if stream._flights:
            stream.prune()


def let_go(streams: Sequence[Stream], engine: int) -> None:
    """Let go of an ended model's handles and memory. Called anywhere, so it changes no stream: see `finalizers.py`."""
    for stream in streams:
        stream.let_go(engine)


class Stream:
    """The collectives of one process group."""

    def __init__(
        self,
        group: Any,
        members: Sequence[int],
        *,
        behind: bool = False,
        queued: bool = False,
        lazy: bool = False,
        places: Iterator[int] | None = None,
    ) -> None:
        """members: their ranks among the ranks of the model. behind: only a thread behind the training uses it.
        queued: its collectives run in a device's queue, which waits for them, and not a thread. places: numbers the
        launches of all such streams together. lazy: are ranks connected when they first send each other something?"""
        self.group = group
        self._places = places or count()
        self.queued, self.lazy = queued, lazy
        self.members = members
        self.behind = behind
        self.levels: Any = None  # launches what has to come before anything else: see `features/two_level.py`
        self._flights: deque[InFlight] = deque()
        self._landed: deque[tuple[int, Launch]] = deque(maxlen=KEPT)

    @property
    def count(self) -> int:
        """The number of collectives launched so far."""
        last: Sequence[Any] = tuple(self._flights) or self._landed
        return int(last[-1][0]) if last else 0

    def launch(self, what: Launch, call: Callable[..., Any], *args: Any) -> Any:
        """Launch a collective by `call`, a function of C, so that no signal comes between it and its number."""
        if self._flights:
            self.prune()
        handle = map(list, zip(map(call, *zip(args, strict=True)), strict=True))
        flights, mine = tee(zip((self.count + 1,), (what,), handle, self._places, strict=False))
        self._flights.extend(flights)
        # If it is through by now, a signal's handler may have pruned it.
        return next(mine)[2][0]

    def prune(self) -> None:
        """Let go of the handles of collectives that are through, and of the memory that these hold.

        A signal's handler may call it inside itself. It is not called at an object's end.
        """
        for flight in tuple(self._flights):
            if not all(map(completed, flight[2])):
                return
            if not self._landed or self._landed[-1][0] < flight[0]:
                self._landed.append(flight[:2])  # after an interrupt here it is in both, with one number
            with contextlib.suppress(ValueError):  # a handler was faster
                self._flights.remove(flight)

    def let_go(self, engine: int) -> None:
        for _, what, handle, _ in tuple(self._flights):
            if what[1] == engine and all(map(completed, handle)):
                handle.clear()

    def discard(self) -> None:
        """End a levelling: what has come will not be used."""
        if self.levels is not None:
            self.levels.drop()

    @property
    def last(self) -> list[Launch]:
        """The last launches (at most `KEPT`), the newest at the end."""
        numbered = dict([*self._landed, *(flight[:2] for flight in tuple(self._flights))])
        return list(numbered.values())[-KEPT:]

    @property
    def under_way(self) -> list[Any]:
        return [each for _, _, handle, _ in tuple(self._flights) for each in handle]

    def before(self, number: int) -> list[Any]:
        """Return the handles of collectives under way, up to this number."""
        return [each for at, _, handle, _ in tuple(self._flights) if at <= number for each in handle]

    def number_of(self, handle: Any) -> int | None:
        """Return the number of a collective under way, by its handle."""
        return next((at for at, _, held, _ in tuple(self._flights) if any(each is handle for each in held)), None)

    @property
    def order(self) -> list[tuple[int, int]]:
        """(number, place among the launches of all streams) of each collective under way. Read on any thread."""
        flights = tuple(self._flights)
        return [(at, place) for at, _, handle, place in flights if not all(map(completed, handle))]

    def resume(self, group: Any, most: int) -> None:
        """Go on in `group`, now that nothing is under way, with numbers after `most`, the most of any rank."""
        self._landed.append((most, ()))
        self._flights.clear()
        self.group = group
