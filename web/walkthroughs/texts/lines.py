"""A text's number beside the recomputed one: a line. Lines make tables, tables and corrections a text."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import NamedTuple

from zeroshard.layout.partition import Partition
from zeroshard.layout.stage import STAGES
from zeroshard.planner import closed, traffic
from zeroshard.planner.instants import instants, item_sizes
from zeroshard.planner.quantities import number, plain
from zeroshard.planner.recipes import PRESETS

PAPER = PRESETS["paper"]
GB, GIB = 10**9, 2**30
Values = tuple[Fraction, ...]


class Line(NamedTuple):
    """One number, a row of numbers or a formula.

    says: the text's own number, None where it gives none; "> 2" and "~2" for a number, "1, 2, ..." for the first of a
    row. exact: must agree without rounding, because the text draws a conclusion from the number.
    """

    what: str
    says: str | None
    value: Fraction | Values | str
    unit: str = ""
    exact: bool = False

    @property
    def agrees(self) -> bool:
        """Is the text right, after rounding to its digits?"""
        if self.says is None:
            return True
        if isinstance(self.value, str):
            return self.says == self.value
        if isinstance(self.value, tuple):
            said = [word.strip() for word in self.says.removesuffix("...").split(",") if word.strip()]
            return all(self._is(value, says) for value, says in zip(self.value, said, strict=False))
        if self.says.startswith("> "):
            return self.value > Fraction(self.says.removeprefix("> "))
        return self._is(self.value, self.says.removeprefix("~").replace(",", ""))

    def _is(self, value: Fraction, said: str) -> bool:
        says = Decimal(said)
        if self.exact:
            return value == Fraction(says)
        scale = 10 ** max(-int(says.as_tuple().exponent), 0)
        rounded = Fraction(math.floor(abs(value) * scale + Fraction(1, 2)), scale)  # halves away from zero
        return (-rounded if value < 0 else rounded) == Fraction(says)

    def json(self) -> dict[str, object]:
        shown = ", ".join(map(number, self.value)) if isinstance(self.value, tuple) else self.value
        value = plain(shown) if isinstance(shown, Fraction) else shown
        return {"what": self.what, "text_says": self.says, "value": value, "unit": self.unit, "agrees": self.agrees}


class Table(NamedTuple):
    title: str
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class Text:
    """A text. corrections: where it differs from arithmetic, and what is cited here and not computed."""

    letter: str
    title: str
    tables: tuple[Table, ...]
    corrections: tuple[str, ...]

    def json(self) -> dict[str, object]:
        return {
            "text": self.letter,
            "title": self.title,
            "recipe": PAPER.name,
            "tables": [{"title": table.title, "lines": [line.json() for line in table.lines]} for table in self.tables],
            "corrections": list(self.corrections),
        }


def table(title: str, *lines: Line | Iterable[Line]) -> Table:
    flat = [one for line in lines for one in ([line] if isinstance(line, Line) else line)]
    return Table(title, tuple(flat))


def line(what: str, says: str | None, value: Fraction | int | str, unit: str = "", *, exact: bool = False) -> Line:
    return Line(what, says, value if isinstance(value, str) else Fraction(value), unit, exact)


def row(what: str, says: str | None, values: Iterable[Fraction | float], unit: str = "") -> Line:
    """Make a line of a row of numbers."""
    return Line(what, says, tuple(Fraction(value) for value in values), unit)


# ------------------------------------------------------------------------------------------- what several texts ask for


def held(stage: int, numel: int, ranks: int, unit: int = 1) -> dict[str, Fraction]:
    """Count {state, or "total": bytes per rank over `unit`}, by the paper's recipe."""
    rows = closed.at_rest(numel, ranks, STAGES[stage], PAPER)
    return {
        **{state: Fraction(nbytes, unit) for state, nbytes in rows.items()},
        "total": Fraction(sum(rows.values()), unit),
    }


def saving(stage: int, numel: int, ranks: int) -> Fraction:
    """Count by how many percent a stage holds less than stage 0."""
    return 100 * (1 - held(stage, numel, ranks)["total"] / held(0, numel, ranks)["total"])


def stage_lines(stage: int, numel: int, ranks: int, says: dict[str, str], unit: tuple[str, int]) -> list[Line]:
    states = held(stage, numel, ranks, unit[1])
    return [line(f"stage {stage}: {state}", says.get(state), nbytes, unit[0]) for state, nbytes in states.items()]


def message_lines(name: str, stage: int, says: tuple[str, str, str]) -> list[Line]:
    """Count the messages of the 260 parameters on two ranks at a stage."""
    moved = traffic.per_step(260, 2, STAGES[stage], PAPER)
    return [
        line(f"{name}: reduce-scatter, logical", says[0], moved.reduce.logical, "B"),
        line(f"{name}: all-gather, logical", says[1], moved.gather.logical, "B"),
        line(f"{name}: total, logical", says[2], moved.total.logical, "B"),
        line(f"{name}: total, sent per rank", None, moved.total.sent, "B"),
        line(f"{name}: total, sent + received", None, moved.total.sent_and_received, "B"),
    ]


def backward_lines(cut: Partition, numel: int) -> list[Line]:
    """Count the bytes in the first backward at stages 1 and 2, when Adam has no m and v yet."""
    lines = []
    for stage in (1, 2):
        found = instants(cut, STAGES[stage], item_sizes(PAPER), 0)
        passing = max(each.nbytes.get("reduce", 0) for each in found)
        states = held(stage, numel, 2)
        rest = states["parameters"] + states["gradients"] + states["master"]
        lines += [
            line(f"stage {stage}: parameters, gradients, masters", None, rest, "B"),
            line(f"stage {stage}: buffers of reductions, at most", None, passing, "B"),
            line(f"stage {stage}: peak", None, rest + passing, "B"),
        ]
    return lines


FULL_7B = {"parameters": "14.0", "gradients": "14.0", "master": "28.0", "m": "28.0", "v": "28.0", "total": "112.0"}
CUT_7B = {**FULL_7B, "master": "3.5", "m": "3.5", "v": "3.5"}
IN_BACKWARD = "here stage 1 reduces during backward, bucket by bucket, as stage 2 does."
PASSES = "Every pass sends (N-1)/N of its bytes per rank: 2 Psi is 2(N-1)/N Psi on a ring, 3 Psi is 3(N-1)/N Psi."
