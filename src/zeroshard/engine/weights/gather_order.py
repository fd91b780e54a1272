"""The order of gathers that all ranks follow.

A *segment* is one forward of the root, or one backward. Within a segment all ranks launch the gathers of the known
*sequence*, the one that the last segment of that kind launched, in its order. A rank that needs a unit launches the
sequence up to that unit's turn, so it takes part in every gather before it. After it, gathers are negotiated in
rounds: each rank names one unit or says that it is done, and all named units are gathered, until all ranks are done.

So ranks that drop layers, branch or reorder differently cost bytes, never a hang or a mix-up. The price is two small
control collectives per segment, on the CPU; the last one of a backward also tells if all ranks call it usual.

    rank 0 needs   a b   d        launches  a b c d | done
    rank 1 needs   a   c d e      launches  a b c d | e      (rank 0, done, takes part in e)
    next sequence  a b c d e      (what no rank used is left out)
"""

from __future__ import annotations

from ...comm.agreement import Group
from .unit import Unit

Kind = tuple[str, int]  # of a segment: forward or backward, and the unit it entered through

_NOBODY = -1


class GatherOrder:
    """Launches gathers in an order that is the same on all ranks."""

    def __init__(self, units: list[Unit], group: Group, *, prefetch: int, overlap: bool) -> None:
        self.units = units
        self.group = group
        self.prefetch = prefetch
        self.overlap = overlap
        self.kind: Kind | None = None
        self._known: dict[Kind, list[int]] = {}
        self._sequence: list[int] = []
        self._used: list[bool] = []
        self._at = 0  # how much of the sequence is launched
        self._unused: list[Unit] = []  # gathered for other ranks alone, the oldest first

    @property
    def active(self) -> bool:
        return self.kind is not None

    def begin(self, kind: Kind) -> None:
        """Begin a segment. The caller has agreed with the other ranks that they begin it too."""
        self.kind = kind
        self._number = self.group.number("segment")
        self._sequence = list(self._known.get(kind, ()))
        self._used = [False] * len(self._sequence)
        self._at = 0

    def demand(self, unit: Unit) -> None:
        """Launch the gather of a unit that this rank needs now, unless it was launched before; and prefetch others."""
        if not unit.released or (not unit.ahead and unit.ready):
            return
        with self.group.as_one():
            if not (unit.ahead and unit.ready):
                self._reach(unit)
            unit.ahead -= 1
            unit.claim()
            self._mark_used(unit)
            if self.overlap:
                while self._at < len(self._sequence) and sum([each.ahead > 0 for each in self.units]) < self.prefetch:
                    self._launch_next()

    def finish(self, vote: int = 0) -> set[int]:
        """Take part in everything the other ranks still need; remember the sequence for next time.

        vote: of this rank, which the last round carries for the caller. Returns the votes of all ranks.
        """
        with self.group.as_one():
            while self._at < len(self._sequence):
                self._launch_unused()
            votes = self._negotiate(None, vote)
        if self.kind is not None:
            self._known[self.kind] = self._sequence
        self.kind = None
        self._unused.clear()
        for unit in self.units:
            unit.ahead = 0
        return votes

    def forget(self) -> None:
        """Forget all sequences after a segment ended in its middle: ranks may have come to know different ones."""
        self.kind = None
        self._known.clear()
        self._unused.clear()
        for unit in self.units:
            unit.ahead = 0

    # --- the order --------------------------------------------------------------------------------------------------

    def _reach(self, unit: Unit) -> None:
        if unit.index in self._sequence[self._at :]:
            stop = self._sequence.index(unit.index, self._at) + 1
        else:
            stop = len(self._sequence)
        while self._at < stop:
            self._launch_next(unit)
        if not unit.ahead:
            self._negotiate(unit)

    def _launch_next(self, wanted: Unit | None = None) -> None:
        unit = self.units[self._sequence[self._at]]
        self.group.progress.turn = self._at + 1, len(self._sequence)
        unit.gather(wait=not self.overlap, ahead=unit is not wanted)
        self._at += 1
        unit.ahead += 1

    def _launch_unused(self) -> None:
        """Launch the next gather, of a unit that this rank does not need. Such units take no more memory at once than
        those of a rank that uses them: one, and as many as are gathered ahead."""
        while len(self._unused) > self.prefetch:
            oldest = self._unused.pop(0)
            oldest.ahead = 0
            oldest.release()
        unit = self.units[self._sequence[self._at]]
        held = unit.ready
        self._launch_next()
        if not held:
            self._unused.append(unit)

    def _mark_used(self, unit: Unit) -> None:
        for at in range(self._at):
            if self._sequence[at] == unit.index and not self._used[at]:
                self._used[at] = True
                return

    # --- after the sequence -----------------------------------------------------------------------------------------

    def _negotiate(self, wanted: Unit | None, vote: int = 0) -> set[int]:
        """Hold rounds of naming units, until `wanted` is gathered or, with None, until every rank is done.

        Returns all ranks' votes in the last round, in which all of them are done.
        """
        while True:
            names = _NOBODY if wanted is None else wanted.index
            idle = int(not all(self._used))
            told = self.group.poll("choosing what to gather", self._number, names, idle, vote)
            named = list(dict.fromkeys(names for names, _, _ in told if names != _NOBODY))
            for index in named:
                self._sequence.append(index)
                self._used.append(False)
                if wanted is None:
                    self._launch_unused()
                else:
                    self._launch_next(wanted)
            if wanted is not None:
                return set()
            if not named:
                if self._sequence and all(idle for _, idle, _ in told):
                    self._drop_unused()
                return {vote for _, _, vote in told}

    def _drop_unused(self) -> None:
        used = self.group.flags(bytes(self._used))
        self._sequence = [index for index, keep in zip(self._sequence, used, strict=True) if keep]
