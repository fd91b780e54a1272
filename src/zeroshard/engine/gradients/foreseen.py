"""The norm that a program asks for after its backward, as it did before its last step: asked for at the backward's end.

A program that clips would meet the other ranks at the end of its backward, and again to ask for the norm. So in the
first meeting ranks say which norm they expect to be asked for. If all expect the same one, they compute it there, and
clipping finds the answer. If the program does not ask this time, a norm was computed in vain, once.
"""

from __future__ import annotations

import struct


class Foreseen:
    """What one rank expects. Ranks may expect different things: they vote at each backward's end."""

    def __init__(self) -> None:
        self._backwards = 0  # that reduced gradients, since the last step
        self.fresh = False  # are gradients as the last backward left them, and nothing asked about them yet?
        # After how many backwards since a step a norm was asked for, and its order.
        self._expected: tuple[int, float] | None = None
        self._unused: float | None = None  # order of the norm that was computed in advance, until it is asked for

    def wish(self, *, local: bool, alone: bool) -> int:
        """Return the norm to compute at the end of this backward, as an integer for a meeting: 0 is none.

        local: it reduces nothing. alone: there is no rank to meet.
        """
        if local or alone:
            return 0
        self._backwards, self.fresh = self._backwards + 1, True
        expected = self._expected
        return 0 if expected is None or expected[0] != self._backwards else _bits(expected[1])

    def agreed(self, wishes: set[int]) -> float | None:
        """Return the order of the norm that all ranks wish for."""
        self._unused = None if len(wishes) > 1 or wishes == {0} else _order(*wishes)
        return self._unused

    def changed(self) -> None:
        """Note that gradients change: a norm of before is not what the program will ask for."""
        self.fresh = False

    def asked(self, order: float) -> None:
        """Note that all ranks have met to ask for a norm."""
        if self.fresh and _order(_bits(order)) == order:
            self._expected = self._backwards, order
        self.fresh = False

    def used(self, order: float) -> bool:
        """Tell if this answer was computed in advance, the first time that it is asked for."""
        first, self.fresh = self._unused == order, False
        if first:
            self._unused = None
        return first

    def stepped(self) -> None:
        """Note that a step begins: the next backward is the first one since."""
        self._backwards = 0
        if self._unused is not None:
            self._expected = self._unused = None


def _bits(order: float) -> int:
    return int(struct.unpack("I", struct.pack("f", order))[0])


def _order(bits: int) -> float:
    return float(struct.unpack("f", struct.pack("I", bits))[0])
