"""The text a run trains on, and the micro-batches drawn from it."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import sysconfig
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from zeroshard.cli.config import InputError, one_line
from zeroshard.errors import UserError, check_local

# Installed packages differ from one machine to the next, and tests hold deliberately broken text.
NOT_THE_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})


@dataclass(frozen=True)
class Corpus:
    """All files' bytes, one after the other."""

    text: npt.NDArray[np.uint8]
    files: int
    sha256: str  # over names, lengths and contents, in order

    def micro_batch(self, *, seed: int, step: int, index: int, sequences: int, context: int) -> npt.NDArray[np.int64]:
        """Draw (sequences, context + 1) bytes by the arguments alone, so that any rank can repeat any micro-batch.

        Philox counts instead of remembering: its stream starts where (step, index) says. `random_raw` because
        numpy promises that those bits never change between releases, which it does not for `integers`.
        """
        draws = np.random.Philox(key=seed, counter=[0, 0, step, index]).random_raw(sequences)
        starts = (draws % np.uint64(len(self.text) - context)).astype(np.int64)
        windows: npt.NDArray[np.int64] = self.text[starts[:, None] + np.arange(context + 1)].astype(np.int64)
        return windows

    def record(self) -> dict[str, Any]:
        return {"files": self.files, "bytes": len(self.text), "sha256": self.sha256}


def standard_library() -> list[Path]:
    """List Python's own library without its tests: some 700 files, 12 MB of code, on every machine with Python."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return sorted(path for path in root.rglob("*.py") if NOT_THE_LIBRARY.isdisjoint(path.relative_to(root).parts))


def read_corpus(paths: Sequence[str], *, context: int) -> Corpus:
    """Read `paths`, or the standard library where there are none; refuse what cannot be trained on."""
    files = [Path(path) for path in paths] or standard_library()
    contents = [_read_text(path) for path in files] if paths else [path.read_bytes() for path in files]
    text = np.frombuffer(b"".join(contents), dtype=np.uint8)
    if len(text) <= context:
        raise InputError(f"--data has {len(text)} bytes in all, and one sequence needs {context + 1}: give more text")
    return Corpus(text, len(files), _digest(zip(files, contents, strict=True)))


# The files of a run. Its settings are moved last: until then the other files are known to be a run's.
RUN_FILES = ("metrics.jsonl", "ledger.json", "explain.json", "model.safetensors", "checkpoints", "run.json")


def holds_run(out: str | Path) -> bool:
    """Tell whether `zeroshard train` wrote to a folder."""
    try:
        found = json.loads((Path(out) / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(found, dict) and {"config", "zeroshard"} <= found.keys()


def make_writable(out: str) -> None:
    """Make the run directory, and try whether it takes a file: permissions alone do not tell (full, read-only).

    Refuses a folder that has files of a run's names but no run: they would be replaced.
    """
    try:
        check_local(out)
    except UserError as error:
        raise InputError(f"--out {out}: {one_line(error)}") from None
    if not holds_run(out) and (found := [name for name in RUN_FILES if os.path.lexists(Path(out) / name)]):
        raise InputError(
            f"--out {out}: holds {', '.join(found)}, which no run of zeroshard train wrote; name another folder"
        )
    try:
        Path(out).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise InputError(f"--out {out}: cannot be written to ({error.strerror})") from None


def _read_text(path: Path) -> bytes:
    try:
        if not stat.S_ISREG(mode := path.stat().st_mode) and not stat.S_ISDIR(mode):  # a pipe may never end
            raise InputError(f"--data {path}: no regular file; copy what it gives into one")
        content = path.read_bytes()
    except FileNotFoundError:
        raise InputError(f"--data {path}: no such file") from None
    except IsADirectoryError:
        raise InputError(f"--data {path}: is a directory; name its files, for example {path}/*.txt") from None
    except OSError as error:
        raise InputError(f"--data {path}: cannot be read ({error.strerror})") from None
    if not content:
        raise InputError(f"--data {path}: the file is empty")
    offset = content.find(0)
    try:
        content.decode()
    except UnicodeDecodeError as error:
        offset = error.start if offset < 0 else min(offset, error.start)
    if offset >= 0:
        raise InputError(
            f"--data {path}: not a text file (byte 0x{content[offset]:02x} at offset {offset}); expected UTF-8 text"
        )
    return content


def _digest(files: Iterable[tuple[Path, bytes]]) -> str:
    digest = hashlib.sha256()
    for path, content in files:
        digest.update(f"{path.name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()
