"""States that rest in files: read ahead of their use, written behind it, in a fixed amount of memory.

    parameters  gradients  master  exp_avg  ...   one file per state and rank; in it a slot per bucket, in whole pages

The files have no names: whatever ends a rank, kill -9 too, its room on the disk is free the moment it is gone.

A file has `STAGING_ROOMS` page-aligned rooms in memory, whatever the model's size. While bucket k is computed with,
bucket k + 1 is on its way in and bucket k - 1 on its way out. Blocks go past the page cache (O_DIRECT) by `os.preadv`
and `os.pwritev` on a few threads: the disk then moves bytes while Python's lock is free.

Every failure here raises an error that names rank and file. From then on nothing is read, so that no stale state is
ever used; `zero.load` starts afresh.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import errno
import fcntl
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..arithmetic.digests import raw
from ..arithmetic.hashing import digest
from ..arithmetic.sums import same_bits, simulated
from ..device import DeviceEvent, ask, sent
from ..errors import TierError
from ..events import HOST, NVME, Ledger, ends
from ..finalizers import at_end_of
from ..hooks import Feature
from ..layout.limits import STAGING_ROOMS, aligned
from ..policies.offload import Offload
from ..tiers.tier import Rest, Tier, pages

if TYPE_CHECKING:
    from ..engine.build.assembly import Assembly

BLOCK = 4 << 20  # bytes that one system call moves
_MAKE_HOLE = 3  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE in linux/falloc.h
THREADS = 4  # reads and writes of a step are under way at once, and a disk likes a queue


class NvmeTier(Tier):
    """This rank's state files."""

    name = NVME
    on_demand = True
    meets = True  # a file that cannot be written is the failure of all ranks
    device = torch.device("cpu")
    counted_as = "staging"  # the name under which the ledger counts its files' rooms

    def __init__(
        self, offload: Offload, rank: int, compute: torch.device, ledger: Ledger, largest: dict[str, int], nbytes: int
    ) -> None:
        """largest: for each state of `Offload`, the bytes of the largest shard that will rest here. nbytes: of all
        shards that will, without optimizer states: a disk with less room is refused."""
        self.rank = rank
        self.compute = compute
        self.ledger = ledger
        self.digests = offload.digests
        self.failed: TierError | None = None
        self.told = False  # logged: the filesystem takes no direct I/O
        self._largest = largest
        self._files: dict[str, StateFile] = {}
        self.threads: ThreadPoolExecutor | None = None
        self.folder: Path | None = None
        if not simulated(torch.empty(0, device="cpu")):
            assert offload.path is not None
            self.folder = self._folder(Path(offload.path).absolute(), nbytes)
            self._start()

    @property
    def nbytes(self) -> int:
        """Bytes of its files on the disk."""
        return sum(file.nbytes for file in self._files.values())

    def _start(self) -> None:
        self.threads = ThreadPoolExecutor(THREADS, thread_name_prefix="zeroshard nvme")
        at_end_of(self, _end, os.getpid(), self.threads, at_exit=True)

    def quiesce(self) -> None:
        """Wait for all transfers, also for one that an exception kept from being noted."""
        if self.threads is not None:
            self.threads.shutdown()
            self._start()

    def _folder(self, folder: Path, nbytes: int) -> Path:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            disk = os.statvfs(folder)
            if (free := disk.f_bavail * disk.f_frsize) < nbytes:
                needs = f"{nbytes:,} and room for the optimizer's states are needed"
                raise OSError(errno.ENOSPC, f"{free:,} bytes are free; {needs}")
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            raise self.error("Offload.path cannot hold files", str(folder), error.strerror or str(error)) from error
        return folder

    def rest(self, state: str, bucket: int, numel: int, dtype: torch.dtype) -> Rest:
        if state not in self._files:
            kind = state if state in self._largest else "optimizer"
            self._files[state] = StateFile(self, state, self._largest[kind])
        rest = self._files[state].slot(bucket, numel, dtype)
        self.ledger.hold(state, numel * dtype.itemsize, NVME)  # not before there is room
        return rest

    def give_up(self, state: str, rests: Sequence[Rest]) -> None:
        for rest in rests:
            assert isinstance(rest, FileRest)
            rest.file.give_up(rest)
            self.ledger.hold(state, -rest.nbytes, NVME)

    def error(self, what: str, where: str, got: str, instead: str | None = None) -> TierError:
        return TierError(what, where=f"rank {self.rank}, {where}", got=got, instead=instead)

    def fail(self, file: StateFile, error: Exception) -> TierError:
        """Make the error for a state that could not be moved, and refuse all reads from now on."""
        got = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
        self.failed = self.failed or self.error(
            f"the state {file.state!r} could not be moved between memory and its file", str(self.folder), got,
            "repair the disk, and zero.load the last checkpoint",
        )  # fmt: skip
        return self.failed

    @contextlib.contextmanager
    def renewed(self) -> Iterator[None]:
        """Allow all that rests here to be rewritten inside, also after a failure; if the rewrite fails, the old failure
        counts again."""
        failed, self.failed = self.failed, None
        if failed is not None:
            for file in self._files.values():
                file.forget()
        try:
            yield
        except BaseException:
            self.failed = self.failed or failed
            raise


def _end(process: int, threads: ThreadPoolExecutor) -> None:
    """Shut the threads down without a wait: see *the collector runs anywhere* in `finalizers.py`. Transfers under way
    hold the tier, and an interpreter that ends waits for its threads itself."""
    if os.getpid() == process:  # and not a fork of it
        threads.shutdown(wait=False, cancel_futures=True)


class _Room:
    """A room in memory of a file, with the `FileRest` whose bytes it has."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.view: Any = None
        self.holder: FileRest | None = None
        self.work: list[Future[None]] = []


class StateFile:
    """One state of all buckets of one rank."""

    def __init__(self, tier: NvmeTier, state: str, largest: int) -> None:
        self.tier = tier
        self.state = state
        self.nbytes = 0
        self._largest = aligned(largest)
        self._slots: list[FileRest] = []
        self._free: list[tuple[int, int]] = []  # runs of bytes [first, last) that slots have given up
        self._rooms: list[_Room] = []  # the one used longest ago first
        self._descriptor = -1
        if tier.folder is not None:
            try:
                file = tempfile.TemporaryFile(dir=tier.folder, buffering=0)  # noqa: SIM115 (open as long as the run)
            except OSError as error:
                raise tier.fail(self, error) from error
            self._descriptor = file.fileno()
            at_end_of(self, file.close, at_exit=True)
            self._direct = True
            try:
                fcntl.fcntl(self._descriptor, fcntl.F_SETFL, os.O_DIRECT)
            except OSError as error:
                self._give_up_direct(error)

    def slot(self, bucket: int, numel: int, dtype: torch.dtype) -> FileRest:
        """Reserve room on the disk for one bucket now: a full disk is an error before a step depends on it."""
        size = aligned(numel * dtype.itemsize)
        at = next((at for at, free in enumerate(self._free) if free[1] - free[0] >= size), None)
        offset = self.nbytes if at is None else self._free[at][0]
        rest = FileRest(self, offset, bucket, numel, dtype)
        self._largest = max(self._largest, size)
        if self._descriptor >= 0 and size:
            try:
                os.posix_fallocate(self._descriptor, offset, size)
            except OSError as error:
                needs = OSError(error.errno, f"{error.strerror} ({size:,} bytes more are needed)")
                raise self.tier.fail(self, needs) from error
        if at is None:
            self.nbytes += size
        else:
            self._free[at] = offset + size, self._free[at][1]
        self._slots.append(rest)
        return rest

    def give_up(self, rest: FileRest) -> None:
        """Give the room of one bucket back to the disk, once nothing reads or writes it."""
        concurrent.futures.wait([*rest.writing, *(rest.room.work if rest.room is not None else ())])
        if rest.room is not None:
            rest.room.holder, rest.room = None, None
        self._slots = [each for each in self._slots if each is not rest]
        first, last = rest.offset, rest.offset + aligned(rest.nbytes)
        if self._descriptor >= 0 and last > first:
            libc = ctypes.CDLL(None)  # a filesystem that makes no holes keeps the room, for the next slot
            libc.fallocate(self._descriptor, _MAKE_HOLE, ctypes.c_long(first), ctypes.c_long(last - first))
        for low, high in [each for each in self._free if each[1] == first or each[0] == last]:
            self._free.remove((low, high))
            first, last = min(low, first), max(high, last)
        self._free.append((first, last))

    def forget(self) -> None:
        """Drop the contents of the rooms and of the file, and wait for transfers under way."""
        for rest in self._slots:
            concurrent.futures.wait(rest.writing)
            rest.written, rest.writing = False, []
        for room in self._rooms:
            for future in room.work:
                future.exception()
            room.work.clear()
            if room.holder is not None:
                room.holder.room, room.holder.dirty, room.holder = None, False, None

    # --- rooms ------------------------------------------------------------------------------------------------------

    def fetch(self, rest: FileRest, *, fresh: bool = False) -> None:
        """Give a rest a room, and begin to read its bytes into that, unless all of it will be written (`fresh`)."""
        if self.tier.failed is not None:
            raise self.tier.failed
        room = self._room()
        if room.holder is not None:
            self.write(room.holder)
            room.holder.room = None
        if room.memory.numel() < rest.nbytes:  # of a bucket that was frozen when the room was made
            self.wait(room)
            self._make(room)
        room.holder, rest.room = rest, room
        try:
            if rest.written and not fresh:
                self._transfer(rest, "read", self._read)
            elif not fresh:
                self.wait(room)
                room.memory[: rest.nbytes].zero_()
        except BaseException:  # its bytes are not there
            room.holder, rest.room = None, None
            raise

    def _room(self) -> _Room:
        idle = [room for room in self._rooms if room.holder is None or not room.holder.depth]
        if len(self._rooms) < STAGING_ROOMS and all(room.holder is not None for room in idle):
            self._rooms.append(room := _Room())  # first: if an interrupt lost the room, its memory would stay counted
            self._make(room)
            return room
        if not idle:
            raise AssertionError(f"all {STAGING_ROOMS} rooms of {self.state} are in use at once")
        # First one that is free, then one that need not be written, then the one used longest ago.
        room = min(idle, key=lambda room: (room.holder is not None, room.holder is not None and room.holder.dirty))
        self._rooms = [*(each for each in self._rooms if each is not room), room]
        return room

    def _make(self, room: _Room) -> None:
        size, simulation = self._largest, self._descriptor < 0
        memory = torch.empty(size, dtype=torch.uint8, device="cpu") if simulation else pages(size, self.tier.compute)
        view = None if simulation else raw(memory)
        self.tier.ledger.hold(self.tier.counted_as, size - room.memory.numel(), HOST)
        room.view, room.memory = view, memory  # both or, where an interrupt came, neither

    def write(self, rest: FileRest) -> None:
        if rest.dirty:
            self._transfer(rest, "write", self._write)
            rest.dirty, rest.written = False, True  # what an exception kept from the file is still to be written

    def wait(self, room: _Room) -> None:
        errors = [error for error in (future.exception() for future in room.work) if error is not None]
        room.work = []
        if errors:
            raise self.tier.fail(self, errors[0] if isinstance(errors[0], Exception) else OSError("interrupted"))

    # --- transfers --------------------------------------------------------------------------------------------------

    def _transfer(self, rest: FileRest, verb: str, move: Callable[..., None]) -> None:
        room, size = rest.room, aligned(rest.nbytes)
        assert room is not None
        sent, received = (rest.nbytes, 0) if verb == "write" else (0, rest.nbytes)
        event = self.tier.ledger.move(
            verb, logical=rest.nbytes, sent=sent, received=received, state=self.state, bucket=rest.bucket
        )
        if self.tier.threads is None or not size:
            ends(event)
            return
        before = [*room.work, *rest.writing]  # must end before, without an error
        try:
            parts = [
                self.tier.threads.submit(_after, before, move, rest, at, room.view[at : min(at + BLOCK, size)])
                for at in range(0, size, BLOCK)
            ]
            parts[-1].add_done_callback(lambda _: ends(event))
        except BaseException:
            self.tier.quiesce()
            raise
        room.work += parts
        rest.writing = parts if verb == "write" else []

    def _read(self, rest: FileRest, at: int, into: Any) -> None:
        place, view = rest.offset + at, into
        while view.nbytes:
            got = self._call(os.preadv, view, place)
            if not got:
                raise OSError(f"the file ends at {os.fstat(self._descriptor).st_size:,} of {self.nbytes:,} bytes")
            view, place = view[got:], place + got
        expected = rest.digests.get(at)
        if expected is not None and self.tier.digests:
            found = digest(into[: rest.nbytes - at])
            if found != expected:
                raise OSError(f"block {at // BLOCK} of bucket {rest.bucket} has digest {found}, written was {expected}")

    def _write(self, rest: FileRest, at: int, part: Any) -> None:
        if self.tier.digests or self.state == "parameters":
            rest.digests[at] = digest(part[: rest.nbytes - at])
        place = rest.offset + at
        while part.nbytes:
            done = self._call(os.pwritev, part, place)
            part, place = part[done:], place + done

    def _call(self, call: Callable[..., int], view: Any, place: int) -> int:
        try:
            return call(self._descriptor, [view], place)
        except OSError as error:
            if error.errno != errno.EINVAL or not self._direct:
                raise
            self._give_up_direct(error)
            return call(self._descriptor, [view], place)

    def _give_up_direct(self, error: OSError) -> None:
        self._direct = False
        told, self.tier.told = self.tier.told, True
        with contextlib.suppress(OSError):
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, 0)
        if not told:
            logging.getLogger("zeroshard").warning(
                "%s: this filesystem takes no direct I/O (%s); states go through the page cache, which is slower",
                self.tier.folder, error.strerror,
            )  # fmt: skip


def _after(before: list[Future[None]], move: Callable[..., None], *args: Any) -> None:
    for future in before:
        future.result()
    move(*args)


class FileRest(Rest):
    """One state of one bucket in its file."""

    on_demand = True

    def __init__(self, file: StateFile, offset: int, bucket: int, numel: int, dtype: torch.dtype) -> None:
        self.file = file
        self.offset = offset
        self.bucket = bucket
        self.numel = numel
        self.dtype = dtype
        self.nbytes = numel * dtype.itemsize
        self.room: _Room | None = None
        self.depth = 0
        self.dirty = False
        self.written = False
        self.writing: list[Future[None]] = []  # perhaps still under way, from a room that another rest has by now
        self.digests: dict[int, str] = {}  # by place in the slot, of the bytes last written there

    @property
    def tensor(self) -> Tensor:  # type: ignore[override]
        if not self.nbytes:
            return torch.empty(0, dtype=self.dtype, device="cpu")
        if not self.depth or self.room is None:
            raise AssertionError(f"{self.file.state} of bucket {self.bucket} is not here")
        return self.room.memory[: self.nbytes].view(self.dtype)

    @contextlib.contextmanager
    def here(self, *, changed: bool = True, fresh: bool = False) -> Iterator[Tensor]:
        if not self.nbytes:
            yield torch.empty(0, dtype=self.dtype, device="cpu")
            return
        if self.room is None:
            self.file.fetch(self, fresh=fresh)
        assert self.room is not None
        self.file.wait(self.room)
        self.depth += 1
        try:
            yield self.tensor
        finally:
            self.dirty |= changed
            self.depth -= 1

    def ahead(self) -> None:
        if self.room is None and self.nbytes:
            self.file.fetch(self)

    def behind(self) -> None:
        if self.room is not None and not self.depth:
            self.file.write(self)

    def take(self, start: int, values: Tensor, *, fresh: bool) -> DeviceEvent:
        with self.here(fresh=fresh) as tensor:
            return self._until(sent(tensor[start : start + values.numel()], values))

    def bring(self, start: int, to: Tensor) -> DeviceEvent:
        with self.here(changed=False) as tensor:
            return self._until(sent(to, tensor[start : start + to.numel()]))

    def take_each(self, parts: Sequence[tuple[int, Tensor]]) -> DeviceEvent:
        with self.here(fresh=True) as tensor:
            return self._until([sent(tensor[start : start + each.numel()], each) for start, each in parts][-1])

    def give_each(self, parts: Sequence[tuple[int, Tensor]]) -> None:
        with self.here(changed=False) as tensor:
            self._until([sent(to, tensor[start : start + to.numel()]) for start, to in parts][-1]).wait()

    def _until(self, through: DeviceEvent) -> DeviceEvent:
        """Note that the device uses the room until this event: the room's next user waits, as for a read."""
        if self.room is not None and self.file.tier.threads is not None and not through.is_completed():
            self.room.work.append(self.file.tier.threads.submit(through.finish))
        return through

    def forget(self) -> None:
        assert not (self.depth or self.dirty)
        if self.room is not None:
            self.room.holder, self.room = None, None

    def same_as(self, tensor: Tensor) -> bool:
        """Compare bits; by digests if the bytes are in the file: to read them would double what a step reads."""
        if simulated(tensor):
            return True
        concurrent.futures.wait(self.writing)
        if self.room is not None or not self.digests:
            with self.here(changed=False) as mine:
                return same_bits(tensor.to(mine.device), mine)
        view = raw(ask(tensor).contiguous())
        return all(digest(view[at : at + BLOCK]) == found for at, found in self.digests.items())


class NvmeFeature(Feature):
    name = "states in files"
    page = "offload.md"

    def tier(self, name: str, assembly: Assembly, largest: dict[str, int], nbytes: int) -> NvmeTier | None:
        group = assembly.group
        if name != NVME:
            return None
        return NvmeTier(assembly.offload, group.rank, group.device, group.ledger, largest, nbytes)


FEATURE = NvmeFeature()
