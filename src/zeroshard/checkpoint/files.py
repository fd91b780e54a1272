"""A checkpoint's files: written beside the target, published by one rename, read block by block, every byte checked.

    step-100/
      manifest.json            {"digest": xxh3-128 of the rest, "manifest": {...}}, canonical JSON
      rank00000.safetensors    the tensors that rank 0 wrote; the format of the safetensors library
      rank00001.safetensors

The manifest is the authority: it says where each tensor's bytes lie, and holds a digest of every block of every file.
Digests guard against damage, not against forgery. Nothing here, or anywhere in reading a checkpoint, runs code from it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import json
import mmap
import os
import re
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..arithmetic.hashing import digest
from ..errors import CheckpointError, UserError, check_local
from .dtypes import DTYPES
from .others import OURS, other
from .staging import clean, discard, owner, place_beside, sync, temporary

if TYPE_CHECKING:
    from torch import Tensor

    from ..tiers.tier import Part

BLOCK = 4 << 20  # bytes under one digest
THREADS = 2  # that read: while one waits for the disk, another digests
MANIFEST, MANIFEST_LIMIT = "manifest.json", 64 << 20  # bytes: the digests of 5 TiB, and what a forged one may cost
FILE = re.compile(r"rank[0-9]{5}\.safetensors")
OPEN = 256  # most files that a reader has open if it opens them on demand: a process may have 1,024
_PREFIX = '{{"digest":"{}","manifest":'


class Written(NamedTuple):
    """One file as it lies on disk: its size, a digest per block, and where each tensor's bytes begin."""

    nbytes: int
    digests: list[str]
    offsets: dict[str, int]


def absolute(path: object) -> Path:
    """Return the absolute path. Raises `UserError` for what is no local path."""
    name = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    if not isinstance(name, str) or not name or "\0" in name:
        raise UserError("this is no path", expected="a str or a Path", got=repr(path), instead='"ckpt/step-100"')
    check_local(name)
    return Path(name).absolute()


def part_of(file: str) -> str:
    """Return the name of the JSON file that lists what a rank's file holds, if the manifest does not (`parts.py`)."""
    return file.removesuffix(".safetensors") + ".json"


def write_tensors(path: Path, tensors: Mapping[str, Tensor | Part]) -> Written:
    """Write a safetensors file, and have it on the disk when this returns."""
    from ..arithmetic.digests import raw
    from ..tiers.tier import present

    header: dict[str, Any] = {}
    at = 0
    for name, tensor in tensors.items():
        nbytes = tensor.numel() * tensor.itemsize
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format wants tensors aligned
    start = 8 + len(text)
    with _NewFile(path) as file:
        file.write(memoryview(len(text).to_bytes(8, "little") + text))
        for tensor in tensors.values():
            with present(tensor) as here:
                file.write(raw(here.detach().cpu().contiguous()))
    return Written(
        file.nbytes, file.digests, {name: start + entry["data_offsets"][0] for name, entry in header.items()}
    )


class _NewFile:
    """A new file, written a block at a time and past the page cache: filling the cache costs more than writing.

    Where a filesystem or disk knows no such way (O_DIRECT), blocks go through the cache. Leaving waits for the disk.
    """

    def __init__(self, path: Path) -> None:
        self.nbytes = 0
        self.digests: list[str] = []
        self._block = memoryview(mmap.mmap(-1, BLOCK))  # O_DIRECT wants memory, offset and length in whole pages
        self._filled = 0
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        import fcntl

        self._set = functools.partial(fcntl.fcntl, self._descriptor, fcntl.F_SETFL)
        with contextlib.suppress(OSError):
            self._set(os.O_DIRECT)

    def __enter__(self) -> _NewFile:
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        try:
            if kind is None:
                self._flush()
                os.ftruncate(self._descriptor, self.nbytes)
                os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)

    def write(self, view: memoryview) -> None:
        while view.nbytes:
            taken = min(view.nbytes, BLOCK - self._filled)
            self._block[self._filled : self._filled + taken] = view[:taken]
            view, self._filled = view[taken:], self._filled + taken
            if self._filled == BLOCK:
                self._flush()

    def _flush(self) -> None:
        if self._filled:
            self.digests.append(digest(self._block[: self._filled]))
            at, pages = self.nbytes, self._block[: -(-self._filled // mmap.PAGESIZE) * mmap.PAGESIZE]
            self.nbytes, self._filled = self.nbytes + self._filled, 0
            while pages.nbytes:
                done = self._put(pages, at)
                pages, at = pages[done:], at + done

    def _put(self, pages: memoryview, at: int) -> int:
        try:
            return os.pwrite(self._descriptor, pages, at)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._set(0)  # no O_DIRECT with such pages
            return os.pwrite(self._descriptor, pages, at)


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    text = canonical(manifest)
    if len(text) + len(_PREFIX.format("-" * 32)) + 1 > MANIFEST_LIMIT:
        raise CheckpointError(
            "the manifest would be too long to be read", where=str(folder),
            expected=f"at most {MANIFEST_LIMIT:,} bytes", got=f"{len(text):,}",
            instead="fewer lists and numbers in extra: tensors instead",
        )  # fmt: skip
    with open(folder / MANIFEST, "x", encoding="utf-8") as file:
        file.write(_PREFIX.format(digest(text)) + text + "}")
        file.flush()
        os.fsync(file.fileno())
    sync(folder)


def canonical(value: Any) -> str:
    """Return the JSON text of a value, spelled in the one way that digests are taken of."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def make_room(beside: Path, path: Path) -> None:
    """Remove dead saves' leftovers, and make the folder `beside`. Raises where `path` holds what is the user's."""
    path.parent.mkdir(parents=True, exist_ok=True)
    clean(path.parent)
    if path.exists():
        _check_ours(path, path, foreign)
    beside.mkdir()


def foreign(folder: Path) -> list[str]:
    """List the entries of a folder that no save wrote: all of them, unless it has a manifest of ours."""
    if not _is_ours(folder / MANIFEST):
        return sorted(os.listdir(folder))
    with os.scandir(folder) as entries:
        others = [
            entry.name
            for entry in entries
            if not (entry.name == MANIFEST or OURS.fullmatch(entry.name)) or not entry.is_file(follow_symlinks=False)
        ]
    return sorted(others)


def _is_ours(manifest: Path) -> bool:
    """Tell if a manifest begins as a save writes it."""
    try:
        with manifest.open("rb") as file:
            return re.match(rb'\{"digest":"[0-9a-f]{32}","manifest":', file.read(64)) is not None
    except (FileNotFoundError, IsADirectoryError):
        return False


def _check_ours(folder: Path, path: Path, others: Callable[[Path], list[str]]) -> None:
    """Raise `CheckpointError` if a folder, which is or was at `path`, holds what no save wrote (`others` lists it)."""
    if found := others(folder):
        raise CheckpointError(
            "writing here would remove what zeroshard did not write", where=str(path),
            expected="what it wrote, or nothing", got=f"{found[:5]} too", instead="a folder of its own",
        )  # fmt: skip


def publish(beside: Path, path: Path, others: Callable[[Path], list[str]] = foreign) -> None:
    """Make `beside` appear at `path` by one rename, in place of what was there; or raise, with all as it was.

    others: lists the entries of a folder that must not be removed. They may have come since the save began.
    """
    exchange = False
    try:
        os.rename(beside, path)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        exchange = True
        _check_ours(path, path, others)
        _exchange(beside, path)
        try:
            _check_ours(beside, path, others)  # files may have come in the last moment
        except BaseException:
            _exchange(beside, path)
            raise
    try:
        sync(path.parent)
    except OSError:
        (_exchange if exchange else os.rename)(path, beside)
        raise
    # Only now: before, a loss of power could have brought back the old folder's name, with nothing in it.
    discard(beside)


def remove(path: Path) -> list[str]:
    """Remove a published checkpoint: all of it leaves its name at once, so a crash leaves nothing half-removed there.

    It stays if it holds entries that no save wrote. Returns these.
    """
    if found := foreign(path):
        return found
    aside = place_beside(path, owner())
    os.rename(path, aside)
    if found := foreign(aside):  # files that came in the last moment
        os.rename(aside, path)
        return found
    discard(temporary(aside))
    return []


def _exchange(one: Path, other: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if libc.renameat2(here, os.fsencode(one), here, os.fsencode(other), exchange):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(other))


# --- reading --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[int]:
    """Open a folder and yield its descriptor, which stays one checkpoint even if another folder takes its name."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise _nothing(folder, f"{error.strerror}") from None
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def replaced(folder: Path, descriptor: int) -> bool:
    """Tell if another folder has come to this name since `descriptor` was opened."""
    try:
        return not os.path.samestat(os.stat(folder), os.fstat(descriptor))
    except OSError:
        return False


def read_manifest(folder: Path, descriptor: int) -> dict[str, Any]:
    """Return the manifest, once its digest is checked. `manifest.Saved` checks its content."""
    path = folder / MANIFEST
    try:
        with os.fdopen(open_regular(path, descriptor), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > MANIFEST_LIMIT:
                raise damaged(path, f"at most {MANIFEST_LIMIT:,} bytes", f"{size:,} bytes")
            text = file.read(size + 1)
        start = len(_PREFIX.format("-" * 32))
        content = text[start:-1]
        if text[:start] + text[-1:] != (_PREFIX.format(digest(content)) + "}").encode():
            raise damaged(path, f"digest {digest(content)}, which its content has", repr(text[:start])[2:-1])
        manifest = json.loads(content)
        if canonical(manifest).encode() != content:  # so no key is there twice, and nothing is spelled in two ways
            raise damaged(path, "canonical JSON", "another spelling")
    except FileNotFoundError:
        raise _nothing(folder, "no such file") from None
    except (OSError, ValueError, RecursionError) as error:
        raise damaged(path, "a manifest as zeroshard writes it", f"{type(error).__name__}: {error}") from error
    if not isinstance(manifest, dict):
        raise damaged(path, "an object", type(manifest).__name__)
    return manifest


def _nothing(folder: Path, got: str) -> CheckpointError:
    if (found := other(folder)) is not None:
        return CheckpointError(
            f"{found.what}, and no checkpoint of zeroshard",
            where=str(folder),
            expected=MANIFEST,
            got=got,
            instead=found.instead,
        )
    inside = next((path for path in sorted(folder.glob(f"*/{MANIFEST}"))), None)
    newest = f"; of those inside the newest, zero.load(zero.latest({str(folder)!r}))"
    return CheckpointError(
        "no complete checkpoint here", where=str(folder), expected=MANIFEST, got=got,
        instead=f"the folder that zero.save(...) was given{newest if inside is not None else ''}",
    )  # fmt: skip


def open_regular(path: Path, folder: int) -> int:
    """Open a regular file in the folder for reading: not a link to one, and not a pipe that would never answer."""
    descriptor = os.open(path.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise damaged(path, "a regular file", "something else")
    return descriptor


def damaged(path: Path, expected: object, got: object) -> CheckpointError:
    return CheckpointError(
        "a checkpoint's file is damaged", where=str(path), expected=f"{expected}"[:500], got=f"{got}"[:500],
        instead="load an earlier checkpoint, or copy this one again",
    )  # fmt: skip


def _batches(names: Iterable[str]) -> Iterator[set[str]]:
    all_of_them = iter(names)
    while batch := set(islice(all_of_them, OPEN)):
        yield batch


def _blocks(name: str, offset: int, nbytes: int) -> list[tuple[str, int]]:
    return [(name, block) for block in range(offset // BLOCK, -(-(offset + nbytes) // BLOCK))]


class Reader:
    """Reads the files of one checkpoint: first checks blocks through a scratch block, then reads them into place.

    So nothing is held besides what is loaded. The second reading comes from the page cache, which costs a fifth of
    keeping the bytes in fresh memory. `unchanged` checks that both readings saw the same files.
    """

    def __init__(
        self, folder: Path, descriptor: int, files: Mapping[str, Any], tell: Callable[[str], None] | None = None
    ) -> None:
        """Open the files, and raise `CheckpointError` if one is missing, surplus, or not of its size.

        files: {name: {"nbytes": int, "digests": [hex, ...]}}. tell: puts a file's digests into `files`: then each is
        opened when it is first read, and at most `OPEN` of them are open at once. Else all are open from here on, so
        that no rename changes what is read.
        """
        self.folder = folder
        self._files = files
        self._tell = tell
        self.descriptor = os.dup(descriptor)
        self._open: dict[str, int] = {}
        self._written: dict[str, tuple[int, int]] = {}  # file -> which it is, and when it was written, as first opened
        self._wanted: set[tuple[str, int]] = set()  # blocks, each a file and a number
        self._seen: set[tuple[str, int]] = set()  # those that are checked
        self._later: list[tuple[str, int, memoryview]] = []
        self._stopped = False  # no thread goes on
        self._threads = ThreadPoolExecutor(THREADS)  # digests, copies and the disk leave Python's lock alone
        self._own = threading.local()
        known = {*files} if tell is None else {*files, *map(part_of, files)}
        try:
            for name in files:
                if not FILE.fullmatch(name):
                    raise damaged(folder / MANIFEST, "file names like rank00000.safetensors", repr(name))
                if tell is None:
                    self._add(name)
            for name in sorted(os.listdir(descriptor)):
                if OURS.fullmatch(name) and name not in known:
                    raise damaged(folder / name, "only files that the manifest lists", "a file of another checkpoint")
        except BaseException:
            self.close()
            raise

    def _add(self, name: str) -> None:
        if self._tell is not None:
            self._tell(name)
        path, facts = self.folder / name, self._files[name]
        blocks = -(-facts["nbytes"] // BLOCK)
        if len(facts["digests"]) != blocks:
            raise damaged(self.folder / MANIFEST, f"{blocks} digests of {name}", len(facts["digests"]))
        try:
            self._open[name] = open_regular(path, self.descriptor)
        except OSError as error:
            raise damaged(path, "a file that can be read", error.strerror) from error
        seen = os.fstat(self._open[name])
        if self._written.setdefault(name, (seen.st_ino, seen.st_mtime_ns)) != (seen.st_ino, seen.st_mtime_ns):
            raise damaged(path, "a file that no program writes to", "one that was changed meanwhile")
        if seen.st_size != facts["nbytes"]:
            raise damaged(path, f"{facts['nbytes']:,} bytes", f"{seen.st_size:,} bytes")

    def _have_open(self, names: set[str]) -> None:
        if self._tell is None or names <= self._open.keys():
            return
        if len(self._open) + len(names) > OPEN:
            for name in self._open.keys() - names:
                os.close(self._open.pop(name))
        for name in sorted(names - self._open.keys()):
            self._add(name)

    def check_there(self) -> None:
        """Raise `CheckpointError` unless every file can be opened and has its size."""
        for name in self._files:
            self._have_open({name})

    def close(self) -> None:
        self._stopped = True  # also of a check that Ctrl-C has left
        self._threads.shutdown(cancel_futures=True)
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def check_share(self, part: int, parts: int) -> None:
        """Check this reader's part of all blocks. Raises `CheckpointError` for a wrong digest.

        If as many ranks load as have saved, each mostly checks what it will read.
        """
        count = {name: -(-self._files[name]["nbytes"] // BLOCK) for name in sorted(self._files)}
        blocks = [(name, block) for name, many in count.items() for block in range(many)]
        self._check(blocks[len(blocks) * part // parts : len(blocks) * (part + 1) // parts])

    def want(self, name: str, offset: int, nbytes: int) -> None:
        """Note the blocks that hold these bytes for `check_wanted`: many at once are checked faster."""
        self._wanted.update(_blocks(name, offset, nbytes))

    def check_wanted(self) -> None:
        self._check(sorted(self._wanted))

    def read(self, name: str, offset: int, into: memoryview, *, later: bool = False) -> None:
        """Fill `into` with the bytes at `offset`, once their blocks are checked; `later`: when `finish` is called."""
        self._check(_blocks(name, offset, into.nbytes))
        self._later += [(name, offset + at, into[at : at + BLOCK]) for at in range(0, into.nbytes, BLOCK)]
        if not later:
            self.finish()

    def finish(self) -> None:
        """Read all that `read(later=True)` has put off."""
        parts, self._later = self._later, []
        self._side_by_side(self._read_part, parts)

    def unchanged(self) -> None:
        """Raise `CheckpointError` if a file was written to since it was opened."""
        for name, written in self._written.items():
            self._have_open({name})
            seen = os.fstat(self._open[name])
            if (seen.st_ino, seen.st_mtime_ns) != written:
                raise damaged(self.folder / name, "a file that no program writes to", "one that was changed meanwhile")

    def _side_by_side(self, call: Callable[..., None], items: Sequence[tuple[Any, ...]]) -> None:
        """Call for every item, each thread a share: handing them over one by one costs a fifth of a block's time.

        Each item begins with its file's name. At most as many files at once as may be open.
        """
        if self._tell is None:
            self._on_threads(call, items)
            return
        for names in _batches(dict.fromkeys(name for name, *_ in items)):
            self._have_open(names)
            self._on_threads(call, [item for item in items if item[0] in names])

    def _on_threads(self, call: Callable[..., None], items: Sequence[tuple[Any, ...]]) -> None:
        shares = [items[thread::THREADS] for thread in range(min(THREADS, len(items)))]

        def do(share: Sequence[tuple[Any, ...]]) -> None:
            try:
                for item in share:
                    if not self._stopped:
                        call(*item)
            except BaseException:
                self._stopped = True
                raise

        for _ in self._threads.map(do, shares) if len(shares) > 1 else map(do, shares):
            pass

    def _check(self, blocks: Sequence[tuple[str, int]]) -> None:
        self._side_by_side(self._check_block, [block for block in blocks if block not in self._seen])

    def _check_block(self, name: str, block: int) -> None:
        if not hasattr(self._own, "scratch"):
            self._own.scratch = memoryview(bytearray(BLOCK))
        scratch = self._own.scratch
        nbytes = min(BLOCK, self._files[name]["nbytes"] - block * BLOCK)
        try:
            data = scratch[: os.preadv(self._open[name], [scratch[:nbytes]], block * BLOCK)]
        except OSError as error:
            raise damaged(self.folder / name, "a file that can be read", error.strerror) from error
        found, expected = digest(data), self._files[name]["digests"][block]
        if data.nbytes != nbytes or found != expected:
            raise damaged(self.folder / name, f"digest {expected} of block {block}", found)
        self._seen.add((name, block))

    def _read_part(self, name: str, offset: int, into: memoryview) -> None:
        while into.nbytes:
            got = os.preadv(self._open[name], [into], offset)
            if not got:
                raise damaged(self.folder / name, f"{into.nbytes:,} bytes at {offset:,}", "its end")
            into, offset = into[got:], offset + got
