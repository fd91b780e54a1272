"""`Departed`: what a rank has left, so that whoever waits for it knows that it will not come.

Suppose an exception takes one rank out of a forward, a backward or a step. The program catches it there, and then meets
the other ranks by a collective of its own: a vote before it tries again. The others wait for that rank in the engine,
and its next verb of zeroshard's, which would tell them, comes after the vote. So a rank whose wait does not end looks
at some of the ranks that it waits for, by the watch (`watch.py`). Each of these answers with a fact about itself:

    open       an exception has ended a transaction or a verb: the rank launches nothing of that model before all have
               levelled it
    stands in  its program waits for the asking rank in a collective of its own: a vote, or a broadcast from that rank
    forward    that model's last forward raised, and was ended on all ranks together: no backward can follow that one

A rank stops waiting only if the other one has not launched the collective that it waits for (`keeps`). So nothing
stops where all ranks raise the same exception at the same place: the first to raise has launched each collective that
the others wait for before they come to that place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

WAITS = "its program waits for "  # how the words begin for a rank that stands in a collective of its program's
LOOKS = 16  # ranks that a waiting rank looks at, at a time: it tells all the others what it finds


class Departed(NamedTuple):
    """What a rank has left, in words for the others' errors; the words are "" for nothing."""

    open: str = ""
    stands_in: str = ""
    forward: str = ""
    counts: Sequence[int] = ()  # collectives launched so far, by the place of their stream

    def keeps(self, place: int, number: int, *, backward: bool) -> str:
        """Return why this rank will not launch the collective that another one waits for; "" if it has, or still may.

        place, number: of the collective: its stream's place, and its number in that stream, counted from 1.
        backward: does it begin a backward that no rank has come to yet? A rank whose last forward raised never will.
        """
        if place < len(self.counts) and self.counts[place] >= number:
            return ""
        if self.open or not (self.stands_in or backward):
            return self.open
        return ", and ".join(each for each in (self.forward, self.stands_in) if each)


def next_looked_at(members: Sequence[int], own: int, turn: int) -> list[int]:
    """Return the ranks that a rank looks at, from the one after it on. turn: how often it has looked before.

    If all wait for one rank, some of them look at it first; one that waits alone comes to all in turn.
    """
    at = members.index(own)
    others = [*members[at + 1 :], *members[:at]]
    return [others[(turn * LOOKS + each) % len(others)] for each in range(min(LOOKS, len(others)))]
