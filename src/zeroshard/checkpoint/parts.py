"""A JSON file per rank that lists what the rank's own file holds, where a manifest of all of it would be too long.

    step-100/
      manifest.json            of each rank's file its size, and the size and digest of its part, the JSON file
      rank00000.json           {"digests": [...], "fragments": [...], "nbytes": ..., "rng": {...}}, canonical JSON
      rank00000.safetensors

A fragment here is [parameter, state, start, stop, offset]. The manifest says once for all ranks which dtype a state
has, and which ranks have its first and its last element. A rank that loads begins with the part that would list its
elements if all ranks had equally many, and reads on from there until the parts list all that it wants. If shards are
cut evenly, a rank of N reads one part in N, and two or three more.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ..arithmetic.hashing import digest
from ..errors import CheckpointError
from .files import MANIFEST_LIMIT, canonical, damaged, open_regular, part_of

INLINE = 64  # ranks, up to which the manifest says it all


def write_part(folder: Path, file: str, part: dict[str, Any]) -> list[Any]:
    """Write a rank's part, and have it on the disk. Returns [bytes, digest], for the manifest."""
    text = canonical(part).encode()
    if len(text) > MANIFEST_LIMIT:
        raise CheckpointError(
            "what one rank saves would be too long to be read", where=str(folder / part_of(file)),
            expected=f"at most {MANIFEST_LIMIT:,} bytes", got=f"{len(text):,}", instead="more ranks, or larger buckets",
        )  # fmt: skip
    with open(folder / part_of(file), "xb") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())
    return [len(text), digest(text)]


def read_part(folder: Path, descriptor: int, file: str, told: Sequence[Any]) -> dict[str, Any]:
    """Return a rank's part, once its size and digest are those in the manifest. `Saved` checks its content."""
    path, (nbytes, expected) = folder / part_of(file), told
    try:
        with os.fdopen(open_regular(path, descriptor), "rb") as opened:
            if (size := os.fstat(opened.fileno()).st_size) != nbytes or size > MANIFEST_LIMIT:
                raise damaged(path, f"{nbytes:,} bytes", f"{size:,} bytes")
            text = opened.read(size + 1)
        if (found := digest(text)) != expected:
            raise damaged(path, f"digest {expected}", found)
        part = json.loads(text)
        if canonical(part).encode() != text:  # so no key is there twice
            raise damaged(path, "canonical JSON", "another spelling")
    except (OSError, ValueError, RecursionError) as error:
        raise damaged(path, "a part as zeroshard writes it", f"{type(error).__name__}: {error}") from error
    if not isinstance(part, dict):
        raise damaged(path, "an object", type(part).__name__)
    return part


def rank_of(file: str) -> int:
    """Return the rank that wrote a file, from the file's name."""
    return int(file[4:9])


def nearest(unread: Iterable[int], near: float, low: int, high: int) -> int:
    """Return the unread rank nearest to `near`; one between `low` and `high`, if there is any."""
    return min(unread, key=lambda number: (not low < number < high, abs(number - near)))
