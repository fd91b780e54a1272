"""A disk's speed, as it is told or assumed, and the time that a step's reads and writes take on it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from ..errors import UserError
from .files import Moves

GB = 1e9
DAY = 24 * 60 * 60  # seconds


@dataclass(frozen=True)
class Disk:
    """Bytes per second that a disk reads and writes. size: bytes of one rank's share, if it is told. assumed: nobody
    has told the speed."""

    read: float
    write: float
    size: int | None = None
    assumed: bool = False

    def seconds(self, moves: Moves) -> float:
        """Return the fewest seconds that a step's files take, as much as possible read and written at once.

        While both go on, the disk moves as many bytes per second, of both together, as the slower of the two alone.
        """
        shared = min(moves.read, moves.written)
        alone = (moves.read - shared) / self.read + (moves.written - shared) / self.write
        return 2 * shared / min(self.read, self.write) + alone

    def json(self) -> dict[str, float | None]:
        return asdict(self)


ASSUMED = Disk(3 * GB, 2 * GB, assumed=True)  # an NVMe drive of which only the size is told


def told(size: int | None, read: float | None, write: float | None) -> Disk | None:
    """Return the disk of a size in bytes and of speeds in GB/s, ASSUMED's without both; None if nothing is told."""
    if read is None or write is None:
        return None if size is None else Disk(ASSUMED.read, ASSUMED.write, size, assumed=True)
    return Disk(read * GB, write * GB, size)


def check_speeds(read: object, write: object) -> None:
    """Raise `UserError` for a speed that is no number of GB/s, and for one of the two alone."""
    speeds = {"disk_read": read, "disk_write": write}
    for name, speed in speeds.items():
        if speed is not None and not (isinstance(speed, (int, float)) and 0 < speed < math.inf):
            raise UserError(f"Machine.{name} counts GB/s", got=repr(speed), instead=f"Machine({name}=3.2)")
    if (read is None) != (write is None):
        what = "what a disk reads and what it writes are told together, in GB/s"
        got = ", ".join(f"{name}={speed!r}" for name, speed in speeds.items() if speed is not None)
        raise UserError(what, got=got, instead="Machine(disk_read=3.2, disk_write=2.1)")


def wear(moves: Moves, step_time: float) -> int:
    """Return the bytes that one rank writes in a day of steps of `step_time` seconds."""
    return round(moves.written * DAY / step_time)
