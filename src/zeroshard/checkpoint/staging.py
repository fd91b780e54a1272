"""The folder a save works in: beside its target, named by the process that owns it, and removed when that ends.

    run/.step-100.saving-<machine>-<process>-<start>-<chance>      until it is renamed to run/step-100

A signal that would end the process removes it first. SIGKILL or a loss of power leave it. Then the next save beside it
removes it, since its name says whether its owner can still be alive: at once, or after a day if the owner ran on
another machine, in another container, or before a restart of this machine.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import signal
import threading
import time
import uuid
from pathlib import Path
from types import FrameType
from typing import Any

import xxhash

from ..errors import UserError, check_local

LEFTOVER = re.compile(r"\..+\.saving-([0-9a-f]{16})-([0-9]+)-([0-9]+)-[0-9a-f]{8}")
ABANDONED = 86400.0  # seconds without a write, after which another machine's folder counts as a leftover
ENDINGS = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)
)  # Ctrl-C unwinds by itself, and nothing can be done about SIGKILL


def place_beside(path: Path, owner: str) -> Path:
    """Return the folder that a save works in until it publishes at `path`."""
    return path.parent / f".{path.name}.saving-{owner}"


def owner() -> str:
    """Name this process uniquely: the machine since its start, process number, process start, and random digits.

    By that a leftover's name says whether its save can still be under way.
    """
    return f"{_machine()}-{os.getpid()}-{_started(os.getpid()) or 0}-{uuid.uuid4().hex[:8]}"


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        names = os.readlink("/proc/self/ns/pid")  # a container's process numbers are its own
        return xxhash.xxh3_128_hexdigest((boot + names).encode())[:16]
    except OSError:
        return uuid.uuid4().hex[:16]  # no owner can be looked up on this system, so leftovers go by their age


def _started(process: int) -> int | None:
    """Return when a process started, in clock ticks after the machine; None if it does not run (any more)."""
    try:
        state, *fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else int(fields[18])


_temporary: set[Path] = set()  # folders of this process, until they are published or removed
if hasattr(os, "register_at_fork"):  # not on Windows, where nothing forks
    os.register_at_fork(after_in_child=_temporary.clear)  # a child's end is not its parent's


def temporary(folder: Path) -> Path:
    """Have a folder, existing or not yet, removed if a signal ends this process before `discard`. Returns it."""
    _temporary.add(folder)
    _handle(signal.SIG_DFL, _end)
    return folder


def discard(folder: Path) -> None:
    """Remove a folder as far as that goes; a later save cleans up what stays, also after an interrupt."""
    try:
        _remove(folder)
    finally:
        _temporary.discard(folder)
        release_signals()


def release_signals() -> None:
    """Give signals their default action back, unless a folder of this process is still temporary."""
    if not _temporary:
        _handle(_end, signal.SIG_DFL)


def abandon() -> None:
    """Remove every temporary folder, on any thread, because the process is about to end."""
    for folder in list(_temporary):
        aside = folder.with_name(f".{folder.name}")
        with contextlib.suppress(OSError):
            os.rename(folder, aside)  # a thread or rank that still writes there can neither publish it nor add to it
            sync(folder.parent)  # it may be the checkpoint that another has just replaced
        _remove(aside)


def _handle(old: Any, new: Any) -> None:
    """Replace signal handlers that are `old` by `new`: on the main thread, which alone can, and never a user's."""
    if threading.current_thread() is threading.main_thread():
        for number in ENDINGS:
            if signal.getsignal(number) is old:
                signal.signal(number, new)


def _end(number: int, frame: FrameType | None) -> None:
    abandon()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(128 + number)  # the first process of a container ignores signals that it does not handle


def _remove(folder: Path) -> None:
    with contextlib.suppress(OSError):  # `rmtree` raises it nevertheless if a folder cannot be listed
        shutil.rmtree(folder, ignore_errors=True)


def put(path: str | os.PathLike[str], text: str, ours: str) -> None:
    """Write a file beside `path` and put it there by one rename.

    Only a file that has `ours` in it is replaced. Raises `UserError` where anything else is there.
    """
    check_local(path)
    place = Path(path)
    if os.path.lexists(place) and (
        place.is_symlink() or not place.is_file() or ours.encode() not in place.read_bytes()
    ):
        raise UserError(
                "writing here would replace what zeroshard did not write", where=str(path),
                instead="another name, or remove it yourself",
            )  # fmt: skip
    beside = place.with_name(f"{place.name}.{os.getpid()}.tmp")
    with open(beside, "x", encoding="utf-8") as file:
        file.write(text)
    os.replace(beside, place)


def sync(folder: Path) -> None:
    """Flush to disk which files were made, renamed or removed in a folder."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def clean(parent: Path) -> None:
    """Remove what saves of dead owners have left in this folder."""
    for folder in parent.iterdir():
        if under_way(folder) is False:
            _remove(folder)


def under_way(folder: Path) -> bool | None:
    """Tell if a save can still be working in this folder. None: no save works in a folder of this name.

    A save of this process can while its folder is in `_temporary`; a save of another machine, until `ABANDONED` seconds
    have passed without a write.
    """
    match = LEFTOVER.fullmatch(folder.name)
    if match is None or folder.is_symlink() or not folder.is_dir():
        return None
    machine, process, started = match.groups()
    if machine == _machine():
        alive = _started(int(process)) == int(started)
        return alive and (int(process) != os.getpid() or any(each.name == folder.name for each in _temporary))
    return time.time() - _last_write(folder) <= ABANDONED


def _last_write(folder: Path) -> float:
    """Return when something in a folder was last written, in seconds since 1970; infinity if it is just removed."""
    with contextlib.suppress(OSError):  # its save has just removed it
        return max(each.stat().st_mtime for each in (folder, *folder.iterdir()))
    return math.inf
