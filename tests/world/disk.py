"""The disk of a world: calls of files and folders that fail or fall short as a seed draws it, and what a loss of power leaves.

The files are real ones. Noted is what nobody has had written to the disk yet (`fsync`): of that a loss of power leaves any
beginning, and a folder that was renamed may have its old name again.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zeroshard.worlds.rank import GONE
from zeroshard.worlds.schedule import Schedule, Unwind, here

SECTOR = 512  # bytes: of a write past the page cache what is written is whole ones
ERRORS = (errno.ENOSPC, errno.EIO)
WRITES = ("pwrite", "pwritev", "posix_fallocate", "fsync", "ftruncate", "rename", "mkdir")


class Disk:
    """What of one run is not on the disk yet."""

    def __init__(self) -> None:
        self._unwritten: dict[tuple[int, int], None] = {}  # files, by device and number
        self._renamed: list[tuple[Path, Path]] = []

    def wrote(self, descriptor: int) -> None:
        self._unwritten[_which(os.fstat(descriptor))] = None

    def renamed(self, one: Any, other: Any) -> None:
        self._renamed.append((Path(one), Path(other)))

    def synced(self, descriptor: int) -> None:
        seen = os.fstat(descriptor)
        self._unwritten.pop(_which(seen), None)
        self._renamed = [each for each in self._renamed if not _is(each[1].parent, seen)]

    def lose(self, folder: str, seed: int) -> None:
        """The power is gone: of what is not on the disk in this folder any part may be."""
        draw = random.Random(seed)
        for place in sorted(path for path in Path(folder).rglob("*") if path.is_file()):
            if _which(place.stat()) in self._unwritten:
                os.truncate(place, draw.choice((0, place.stat().st_size // 2, place.stat().st_size)))
        for one, other in reversed(self._renamed):
            if other.exists() and not one.exists() and draw.random() < 0.5:
                os.rename(other, one)


def _which(seen: os.stat_result) -> tuple[int, int]:
    return seen.st_dev, seen.st_ino


def _is(folder: Path, seen: os.stat_result) -> bool:
    return not folder.exists() or _which(folder.stat()) == _which(seen)


class Calls:
    """`os` for modules that write files, and what of `shutil` they use."""

    def __getattr__(self, name: str) -> Any:
        plain = getattr(os, name)
        return _drawn(name, plain) if name in WRITES else plain

    def rmtree(self, *args: Any, **named: Any) -> None:
        """Of `shutil`: who is gone tidies nothing up."""
        if (task := here()) is not None and task.rank.away == GONE:
            raise Unwind
        shutil.rmtree(*args, **named)

    def preadv(self, descriptor: int, into: Any, at: int) -> int:
        if (task := here()) is not None:
            _fails(task.schedule, "preadv", (errno.EIO,))
        return os.preadv(descriptor, into, at)


def _drawn(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **named: Any) -> Any:
        task = here()
        if task is None:
            return plain(*args, **named)
        schedule, disk = task.schedule, task.rank.world.disk
        _fails(schedule, name, ERRORS)
        if name.startswith("pwrite"):
            disk.wrote(args[0])
            args = _shorter(schedule, *args)
        answer = plain(*args, **named)
        if name == "rename":
            disk.renamed(*args)
        elif name == "fsync":
            disk.synced(args[0])
        return answer

    return call


def lose_power(schedule: Schedule) -> None:
    """All ranks end."""
    for task in schedule.tasks:
        task.rank.away = GONE
    if (me := here()) is not None:
        schedule._hand_on(me)


def _fails(schedule: Schedule, name: str, numbers: tuple[int, ...]) -> None:
    if (task := here()) is not None and task.rank.away == GONE:
        raise Unwind
    schedule.point(f"calls {name}")
    odds, draws = schedule.draws.odds, schedule.draws
    if schedule.strikes(odds.power, f"loses its power where it calls {name}, as all ranks do"):
        lose_power(schedule)
    if schedule.strikes(odds.disk, f"gets an error where it calls {name}"):
        number = draws.one_of(numbers)
        raise OSError(number, os.strerror(number))


def _shorter(schedule: Schedule, descriptor: int, parts: Any, at: int) -> tuple[Any, ...]:
    view = parts[0] if isinstance(parts, list) else parts
    whole = view.nbytes
    if whole >= 2 * SECTOR and schedule.strikes(schedule.draws.odds.short, f"writes half of {whole} bytes"):
        view = view[: whole // 2 // SECTOR * SECTOR]
    return descriptor, [view] if isinstance(parts, list) else view, at


def opens(path: Any, mode: str = "r", *args: Any, **named: Any) -> Any:
    """`open` for modules that write files."""
    task = here()
    if task is not None and mode != "r":
        _fails(task.schedule, "open", ERRORS)
    file = open(path, mode, *args, **named)  # noqa: SIM115 (the caller's)
    if task is not None and mode != "r":
        task.rank.world.disk.wrote(file.fileno())
    return file
