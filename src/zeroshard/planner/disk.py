"""A disk's measured speed, and the time that a step's reads and writes take on it.

`zeroshard io-bench DIR` measures and writes the file; `zeroshard plan --disk FILE` and `Machine(disk=...)` read it.
"""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ..errors import UserError
from .files import Moves
from .quantities import budget

FORMAT = "zeroshard io-bench 1"
DAY = 24 * 60 * 60  # seconds


@dataclass(frozen=True)
class Disk:
    """Bytes per second in the engine's own pattern. both: read and written together, while both go on at once.

    size: bytes of one rank's share, if it is told. measured: by io-bench, or assumed?
    """

    read: float
    write: float
    both: float
    size: int | None = None
    measured: bool = True

    def seconds(self, moves: Moves) -> float:
        """Return the fewest seconds that a step's files take, as much as possible read and written at once."""
        shared = min(moves.read, moves.written)
        alone = (moves.read - shared) / self.read + (moves.written - shared) / self.write
        return 2 * shared / self.both + alone

    def json(self) -> dict[str, float | None]:
        return asdict(self)


ASSUMED = Disk(3e9, 2e9, 2e9, measured=False)  # an NVMe drive of which only the size is told


def told(text: str | os.PathLike[str]) -> Disk:
    """Return the disk of a size such as "1TB", whose speed is assumed, or of a file that `zeroshard io-bench` wrote.

    Raises `UserError` for neither.
    """
    if re.fullmatch(r"\s*[0-9.]+\s*[A-Za-z]*\s*", str(text)) and not Path(text).exists():
        return replace(ASSUMED, size=budget(str(text), "Machine.disk"))
    return load(text)


def load(path: str | os.PathLike[str]) -> Disk:
    """Read a file that `zeroshard io-bench` wrote. Raises `UserError` for any other."""
    where, instead = str(path), "zeroshard io-bench DIR --out disk.json"
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError("what a disk moves cannot be read", where=where, got=str(error), instead=instead) from error
    rates = found.get("disk") if isinstance(found, dict) and found.get("format") == FORMAT else None
    if not isinstance(rates, dict) or set(rates) != {"read", "write", "both"}:
        raise UserError("this file does not say what a disk moves", where=where, expected=FORMAT, instead=instead)
    for name, rate in rates.items():
        if type(rate) not in (int, float) or not (0 < rate < math.inf):
            raise UserError("a disk moves a number of bytes per second", where=f"{where}, {name}", got=repr(rate))
    return Disk(**rates)


def wear(moves: Moves, step_time: float) -> int:
    """Return the bytes that one rank writes in a day of steps of `step_time` seconds."""
    return round(moves.written * DAY / step_time)
