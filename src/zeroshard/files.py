"""A checkpoint's files: written beside, published by one rename, read back block by block with every byte checked.

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
import fcntl
import json
import mmap
import os
import re
import shutil
import stat
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
import xxhash
from torch import Tensor

from .errors import CheckpointError

BLOCK = 4 << 20  # bytes under one digest
MANIFEST, MANIFEST_LIMIT = "manifest.json", 1 << 30
FILE = re.compile(r"rank\d{5}\.safetensors")
DTYPES = {  # as safetensors spells them
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


class Written(NamedTuple):
    """One file as it lies on disk: its size, a digest per block, and where each tensor's bytes begin."""

    nbytes: int
    digests: list[str]
    offsets: dict[str, int]


def digest(data: Any) -> str:
    return str(xxhash.xxh3_128_hexdigest(data.encode() if isinstance(data, str) else data))


def raw(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy."""
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy() if tensor.numel() else numpy.empty(0, numpy.uint8)
    return memoryview(array)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> Written:
    """Write a safetensors file, and have it on the disk when this returns."""
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
            file.write(raw(tensor.detach().cpu().contiguous()))
    return Written(
        file.nbytes, file.digests, {name: start + entry["data_offsets"][0] for name, entry in header.items()}
    )


class _NewFile:
    """A file under way to the disk, a block at a time and past the page cache: to fill that costs more than to write.

    Where a filesystem or disk knows no such way (O_DIRECT), blocks go through the cache. Leaving waits for the disk.
    """

    def __init__(self, path: Path) -> None:
        self.nbytes = 0
        self.digests: list[str] = []
        self._buffer = memoryview(mmap.mmap(-1, BLOCK))  # O_DIRECT wants memory, offset and length in whole pages
        self._filled = 0
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        with contextlib.suppress(OSError):
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, os.O_DIRECT)

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
            self._buffer[self._filled : self._filled + taken] = view[:taken]
            view, self._filled = view[taken:], self._filled + taken
            if self._filled == BLOCK:
                self._flush()

    def _flush(self) -> None:
        if self._filled:
            self.digests.append(digest(self._buffer[: self._filled]))
            at, pages = self.nbytes, self._buffer[: -(-self._filled // mmap.PAGESIZE) * mmap.PAGESIZE]
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
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, 0)  # not in pages of this size
            return os.pwrite(self._descriptor, pages, at)


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    text = canonical(manifest)
    with open(folder / MANIFEST, "x", encoding="utf-8") as file:
        file.write(f'{{"digest":"{digest(text)}","manifest":{text}}}')
        file.flush()
        os.fsync(file.fileno())
    _sync(folder)


def canonical(value: Any) -> str:
    """The one text of a manifest, which its digest is of."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def publish(beside: Path, path: Path) -> None:
    """Make the folder `beside` appear at `path` by one rename; what was there before goes away."""
    try:
        os.rename(beside, path)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        _exchange(beside, path)
        shutil.rmtree(beside)
    _sync(path.parent)


def remove(path: Path) -> None:
    """Remove a published folder: all of it leaves its name at once, so a crash leaves nothing half-removed there."""
    aside = path.parent / f".{path.name}.saving-{uuid.uuid4().hex}"
    os.rename(path, aside)
    shutil.rmtree(aside)


def _exchange(one: Path, other: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if libc.renameat2(here, os.fsencode(one), here, os.fsencode(other), exchange):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(other))


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- reading --------------------------------------------------------------------------------------------------------


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest, if its digest is right. Its content is checked by whoever uses it."""
    path = folder / MANIFEST
    try:
        descriptor = _open(path)
        try:
            size = os.fstat(descriptor).st_size
            if size > MANIFEST_LIMIT:
                raise damaged(path, f"at most {MANIFEST_LIMIT:,} bytes", f"{size:,} bytes")
            with os.fdopen(os.dup(descriptor), "rb") as file:
                text = file.read(size + 1).decode("utf-8")
        finally:
            os.close(descriptor)
        whole = json.loads(text, object_pairs_hook=_once, parse_constant=_no_constant)
        manifest = whole["manifest"]
        content = canonical(manifest)
        if text != f'{{"digest":"{digest(content)}","manifest":{content}}}':
            raise damaged(path, "the digest in its first line", "another content")
    except FileNotFoundError:
        raise CheckpointError(
            "no complete checkpoint here", where=str(folder), expected=MANIFEST, got="no such file",
            instead="the folder that zero.save(...) was given",
        ) from None  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise damaged(path, "a manifest as zeroshard writes it", f"{type(error).__name__}: {error}") from error
    if not isinstance(manifest, dict):
        raise damaged(path, "an object", type(manifest).__name__)
    return manifest


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) != len(pairs):
        raise ValueError("a key appears twice")
    return dict(pairs)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _open(path: Path) -> int:
    """A regular file, not a link to one, and not a pipe that would never answer."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise damaged(path, "a regular file", "something else")
    return descriptor


def damaged(path: Path, expected: object, got: object) -> CheckpointError:
    return CheckpointError(
        "a checkpoint's file is damaged", where=str(path), expected=expected, got=got,
        instead="load an earlier checkpoint, or copy this one again",
    )  # fmt: skip


class Reader:
    """Checked reading of the files of one checkpoint. Keeps the last block, so that neighbours cost one read."""

    def __init__(self, folder: Path, files: Mapping[str, Any]) -> None:
        """files: {name: {"nbytes": int, "digests": [hex, ...]}}. Raises where that is not so, contents aside."""
        self.folder = folder
        self._files = files
        self._open: dict[str, int] = {}
        self._last: tuple[str, int, bytes] = ("", -1, b"")
        self._seen: set[tuple[str, int]] = set()
        for name, facts in files.items():
            path = folder / name
            if not FILE.fullmatch(name):
                raise damaged(folder / MANIFEST, "file names like rank00000.safetensors", repr(name))
            blocks = -(-facts["nbytes"] // BLOCK)
            if len(facts["digests"]) != blocks:
                raise damaged(folder / MANIFEST, f"{blocks} digests of {name}", len(facts["digests"]))
            try:
                self._open[name] = _open(path)
            except OSError as error:
                raise damaged(path, "a file that can be read", error.strerror) from error
            size = os.fstat(self._open[name]).st_size
            if size != facts["nbytes"]:
                raise damaged(path, f"{facts['nbytes']:,} bytes", f"{size:,} bytes")

    def close(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()

    def read(self, name: str, offset: int, into: memoryview) -> None:
        """Fill `into` with the bytes at `offset`, each from a block whose digest is right."""
        at = 0
        while at < into.nbytes:
            block, skip = divmod(offset + at, BLOCK)
            part = memoryview(self._block(name, block))[skip : skip + into.nbytes - at]
            into[at : at + part.nbytes] = part
            at += part.nbytes

    def check_rest(self, part: int, parts: int) -> None:
        """Check every block that was not read, or this reader's share of them."""
        for number, name in enumerate(sorted(self._files)):
            for block in range(len(self._files[name]["digests"])):
                if (number + block) % parts == part and (name, block) not in self._seen:
                    self._block(name, block)

    def _block(self, name: str, block: int) -> bytes:
        if self._last[:2] != (name, block):
            nbytes = min(BLOCK, self._files[name]["nbytes"] - block * BLOCK)
            data = os.pread(self._open[name], nbytes, block * BLOCK)
            found = digest(data)
            if len(data) != nbytes or found != self._files[name]["digests"][block]:
                where = f"digest {self._files[name]['digests'][block]} of block {block}"
                raise damaged(self.folder / name, where, found)
            self._seen.add((name, block))
            self._last = name, block, data
        return self._last[2]


def clean(parent: Path, prefix: str) -> None:
    """Remove what saves that were killed have left beside."""
    for leftover in parent.glob(f".{prefix}.saving-*"):
        shutil.rmtree(leftover, ignore_errors=True)
