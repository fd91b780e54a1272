"""The manifest of a checkpoint, checked before anything believes it; nothing here knows of a running model.

    step-1/
      manifest.json            {"digest": "<xxh3-128 of the manifest's text>", "manifest": {...}}
      rank00000.safetensors    what rank 0 wrote, as the safetensors library writes and reads it
      rank00001.safetensors

The manifest is canonical JSON (sorted keys, no spaces). Its entries:

    format, version, saved, ranks, stage,     what wrote it, and when (ns since 1970); device: an accelerator's name and
      torch, threads, python, device            what its arithmetic depends on
    number      one more than the largest in the folder it was saved in: the order of checkpoints; not in earlier ones
    seed, rng   what `micro_batch_rng` starts from; per rank Python's, NumPy's and torch's states
    no_sync     how many ranks added up gradients by themselves, since the start or the last load; not in earlier ones
    parameters  name -> shape, dtype (as safetensors spells it), names (all of a tied parameter's), strips (below)
    fragments   lists of parameter, state, start, stop, dtype, shape, byte offset, file
    grains      lists of parameter, state, elements: states with one number for so many of the parameter's
    narrow      lists of parameter, state, dtype: values and states that rest in a narrower format, and the dtype in
                  which the optimizer computes with them
    values      lists of parameter, state, number: what optimizers keep beside tensors
    files       name -> nbytes, digests: the xxh3-128 of every 4 MiB, in hexadecimal
    buffers     name -> file, shape, dtype, offset; rank 0's
    local_buffers   name -> a list by rank of such entries, or null where the rank has none: buffers that differ
    optimizers  per optimizer class and groups: parameters by name, options ({"float": "inf"} for an infinity or NaN),
                  tensors: shape and dtype of those options that are tensors, not in earlier ones; steps: how many it
                  has done, if states are rounded by that number
    extra, extra_tensors, extra_file    what the user saved along: {"map": ...}, {"list": ...}, {"tensor": name}, ...

A fragment with a start and a stop holds elements [start, stop) of the flat parameter (for a state in `grains`, of that
state). The fragments of one state of one parameter cover it once. With start and stop null it is a tensor of its own
shape, such as a step count. State "value" is the parameter's fp32 master if it has one, else the parameter; an
optimizer's own state of that name is written "optimizer:value". Whether a state has an element for each of the
parameter's follows from its shape, never from its name. Reading intersects intervals: who wrote what does not matter.

Version 2 is for checkpoints with `strips` or `grains`, 3 for those in parts (parts.py), 4 for those with
`local_buffers`, in parts or not, and 5 for those with `narrow`, with all else or not; older readers refuse them.

    rows                 "strips" of a parameter that tensor parallelism cut on a later dimension than the first: [rows,
    |--part 0--|--part 1--|   run, parts]. Its intervals count part by part, as ranks hold them: all of part 0, row by
    |--part 0--|--part 1--|   row, then all of part 1. A reader may ask in other strips, if it cuts otherwise.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import re
import warnings
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import CheckpointError, UserError
from ..layout.partition import plain_name
from ..layout.shard_dim import ONE_STRIP, Strips
from ..validation import python_number
from .dtypes import TORCH_DTYPES
from .files import BLOCK, MANIFEST, Reader, canonical, damaged, opened, read_manifest, replaced
from .parts import nearest, rank_of, read_part

if TYPE_CHECKING:
    import torch
    from torch import Tensor

FORMAT, VERSION = "zeroshard checkpoint", 2
UNCUT = 1  # the version of checkpoints without `strips`, which readers that know of none read too
IN_PARTS = 3  # the version in which each rank's part lists what its file holds: see `parts.py`
LOCAL = 4  # the version that lists each rank's own buffers; it is in parts if it has "cut"
NARROW = 5  # the version with states that rest in a narrower format than their optimizer computes in
READ = UNCUT, VERSION, IN_PARTS, LOCAL, NARROW
NAMING = {"parameters", "fragments", "grains", "narrow", "cut", "values", "buffers", "local_buffers", "optimizers"}
CHUNK = 1 << 20  # elements converted at a time
VALUE = "value"  # of a parameter: its master, or itself
AVERAGE = "average"  # of its values
APART = re.compile(r"(optimizer:)*(value|average)")  # an optimizer's own states of these names get one prefix more
INTEGER_BITS = 10_000  # Python reads these as text: its limit of 4,300 digits is above
DIMENSIONS = 64  # more than any tensor has: a shape of millions is an attack


class Stored(NamedTuple):
    """The place of one interval's bytes, or one whole tensor's: file, offset, shape, dtype."""

    start: int
    stop: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    file: str
    offset: int


class Parameter(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype
    names: list[str]  # all of a tied parameter's
    strips: Strips = ONE_STRIP


@dataclass
class Saved:
    """One checkpoint, opened: its manifest checked in every name, interval and place, and its elements to read."""

    folder: Path
    descriptor: int  # of the folder, to open its files; -1: it is about to be written
    manifest: dict[str, Any]
    alone: bool = True  # does one process read all of it at once? Else ranks' parts are read on demand
    parameters: dict[str, Parameter] = field(default_factory=dict)
    states: dict[str, list[str]] = field(default_factory=dict)  # parameter -> names of its optimizer states
    cut: dict[tuple[str, str], list[Stored]] = field(default_factory=dict)  # (parameter, state) -> its intervals so far
    dtypes: dict[tuple[str, str], torch.dtype] = field(default_factory=dict)  # of states that are cut
    holders: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)  # ranks of its first and last element
    files: dict[str, dict[str, Any]] = field(default_factory=dict)  # {name: {"nbytes": int, "digests": [hex, ...]}}
    grains: dict[tuple[str, str], int] = field(default_factory=dict)  # elements per element of such a state
    computed: dict[tuple[str, str], torch.dtype] = field(default_factory=dict)  # of states that rest in a narrower one
    whole: dict[tuple[str, str], Stored] = field(default_factory=dict)
    values: dict[tuple[str, str], Any] = field(default_factory=dict)
    buffers: dict[str, Stored] = field(default_factory=dict)  # rank 0's
    differing: dict[str, list[Stored | None]] = field(default_factory=dict)  # each rank's, if they differ
    extra: dict[str, Stored] = field(default_factory=dict)  # tensors that the user saved along

    def __post_init__(self) -> None:
        try:
            if self.descriptor >= 0 and any(plain_name(name) != name for name in self.manifest.get("parameters", ())):
                self.manifest |= {key: _without_compile(self.manifest[key]) for key in NAMING & self.manifest.keys()}
            self._check()
            if self.descriptor >= 0:
                tell = self._told if self._parted else None
                self.reader = Reader(self.folder, self.descriptor, self.files, tell)
                if self.alone:
                    self.everything()
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise self.damage("a manifest as zeroshard writes it", f"{type(error).__name__}: {error}") from error

    def damage(self, expected: object, got: object) -> CheckpointError:
        if self.descriptor < 0:
            return CheckpointError(
                "this could be saved and not loaded again", where=str(self.folder), expected=f"{expected}"[:500],
                got=f"{got}"[:500], instead="other names or numbers",
            )  # fmt: skip
        return damaged(self.folder / "manifest.json", expected, got)

    @property
    def _parted(self) -> bool:
        version = self.manifest["version"]
        return bool(version == IN_PARTS or (version in (LOCAL, NARROW) and "cut" in self.manifest))

    def _check(self) -> None:
        manifest = self.manifest
        if manifest["format"] != FORMAT or type(manifest["version"]) is not int or manifest["version"] not in READ:
            raise CheckpointError(
                "this checkpoint is of a format that is not read here", where=str(self.folder),
                expected=f"{FORMAT} {' or '.join(map(str, READ))}",
                got=f"{manifest['format']} {manifest['version']}"[:100], instead="the zeroshard that wrote it",
            )  # fmt: skip
        parted = self._parted
        for file, facts in manifest["files"].items():
            self._count(facts["nbytes"])
            self.files[file] = {"nbytes": facts["nbytes"]} if parted else facts
            if parted:
                self._count(facts["part"][0]), self._text(facts["part"][1])
        for name, entry in manifest["parameters"].items():
            names = [self._text(each) for each in self._list(entry["names"])]
            shape, dtype = self._shape(entry["shape"]), TORCH_DTYPES[entry["dtype"]]
            self.parameters[name] = Parameter(shape, dtype, names, self._strips(shape, entry.get("strips")))
        self._check_fragments()
        self._check_values()
        for name, state, value in self._list(manifest["values"]):
            key = self._key(name, state)
            if key in self.values or key in self.cut or key in self.whole or isinstance(value, (dict, list)):
                raise self.damage(f"one {state} of {name!r}, a number", repr(value))
            self.values[key] = value
        self._check_buffers()
        for name, shape, dtype, offset in self._list(manifest["extra_tensors"]):
            if self._text(name) in self.extra:
                raise self.damage(f"one tensor {name!r} in extra", "several")
            self.extra[name] = self._stored(shape, dtype, manifest["extra_file"], offset)
        if not parted:  # else as each part is read
            named = [(*key, part) for key, parts in self.cut.items() for part in parts]
            self._check_files([*self.files], named + self._beside)
        self._check_optimizers()
        for name, state in (*self.cut, *self.whole, *self.values):
            if state == VALUE and (name, state) not in self.cut:
                raise self.damage(f"a value of {name!r} that can be cut", "another")
            if state not in (VALUE, AVERAGE):
                self.states.setdefault(name, []).append(state)
        if (moving := manifest.get("average")) is not None:
            self._count(moving["updates"])
            if not (isinstance(moving["decay"], (int, float)) and 0 <= moving["decay"] < 1):
                raise self.damage("an average's decay", repr(moving["decay"])[:50])
        if (place := manifest.get("batches")) is not None:
            for name in ("seed", "per_step", "size", "shuffle", "drop_last", "reseed", "samples", "epoch", "step"):
                self._count(place[name], 1 << 63)
        self._count(manifest["saved"], 1 << 63)
        self._count(manifest.get("number", 0), 1 << 63), self._count(manifest.get("no_sync", 0))
        self._count(manifest["seed"], 1 << 64)
        self._count(manifest["stage"]), self._count(manifest["threads"])
        self._text(manifest["torch"]), self._text(manifest["python"])
        random = manifest["files"] if parted else self._list(manifest["rng"])
        if len(random) != self._count(manifest["ranks"]):
            raise self.damage("random states of every rank", len(random))
        if not isinstance(unplain(manifest["extra"], dict.fromkeys(self.extra)), dict):
            raise self.damage("a map in extra", "something else")

    def _check_buffers(self) -> None:
        """Check that each buffer is listed once: rank 0's, which is every rank's, or each rank's own."""

        def stored(entry: dict[str, Any]) -> Stored:
            return self._stored(entry["shape"], entry["dtype"], entry["file"], entry["offset"])

        manifest = self.manifest
        self.buffers = {name: stored(entry) for name, entry in manifest["buffers"].items()}
        for name, ranks in self._of_ranks().items():
            if name in self.buffers or len(self._list(ranks)) != manifest["ranks"]:
                raise self.damage(f"buffer {name!r} once, or of each rank", len(ranks))
            self.differing[name] = [None if each is None else stored(each) for each in ranks]
        self.buffers |= {name: each[0] for name, each in self.differing.items() if each[0] is not None}

    def _of_ranks(self) -> dict[str, Any]:
        """Return the entries of buffers that differ between ranks."""
        found: dict[str, Any] = self.manifest["local_buffers"] if self.manifest["version"] == LOCAL else {}
        return self.manifest.get("local_buffers", {}) if self.manifest["version"] == NARROW else found

    def _check_fragments(self) -> None:
        """Check that every element of every state that is cut lies in exactly one place."""
        for name, state, grain in self._list(self.manifest.get("grains", [])):
            key = self._key(name, state)
            cut = self.parameters[name].strips != ONE_STRIP
            if self.grains.setdefault(key, self._count(grain)) != grain or grain < 2 or state == VALUE or cut:
                raise self.damage(f"one size of the blocks of {state} of {name!r}", grain)
        for name, state, dtype, first, last in self._list(self.manifest["cut"]) if self._parted else ():
            if self.dtypes.setdefault(self._key(name, state), TORCH_DTYPES[dtype]) is not TORCH_DTYPES[dtype]:
                raise self.damage(f"one dtype of {state} of {name!r}", dtype)
            self.cut[name, state], self.holders[name, state] = [], (self._count(first), self._count(last))
        for name, state, start, stop, dtype, shape, offset, file in self._list(self.manifest["fragments"]):
            bounds = (0, 0) if (start, stop) == (None, None) else (self._count(start), self._count(stop))
            stored = self._stored(shape, dtype, file, offset, *bounds)
            key = self._key(name, state)
            if start is None:
                if key in self.whole or key in self.cut:
                    raise self.damage(f"one {state} of {name!r}", "several")
                self.whole[key] = stored
            else:
                if stored.shape != (stored.stop - stored.start,) or key in self.whole:
                    raise self.damage(f"intervals of {state} of {name!r}", stored)
                self.cut.setdefault(key, []).append(stored)
                self.dtypes.setdefault(key, stored.dtype)
        for name, state, dtype in self._list(self.manifest["narrow"]) if self.manifest["version"] == NARROW else ():
            key, computed = self._key(name, state), TORCH_DTYPES[dtype]
            wider = key in self.cut and computed.itemsize > self.dtypes[key].itemsize
            if not wider or self.computed.setdefault(key, computed) is not computed or state == AVERAGE:
                raise self.damage(f"{state} of {name!r} in a narrower format than {dtype}", self.dtypes.get(key))
        if not self._parted:
            self._check_whole()

    def _check_whole(self) -> None:
        for (name, state), parts in self.cut.items():
            parts.sort(key=lambda part: part.start)
            ends = [0, *(part.stop for part in parts)]
            count = self._elements((name, state))
            if [part.start for part in parts] != ends[:-1] or ends[-1] != count or len({p.dtype for p in parts}) > 1:
                raise self.damage(f"all {count} elements of {state} of {name!r}, each once", ends)

    def _elements(self, key: tuple[str, str]) -> int:
        return -(-numel(self.parameters[key[0]].shape) // self.grains.get(key, 1))

    # --- what each rank says of its own file ------------------------------------------------------------------------

    def _told(self, file: str) -> None:
        """Read a rank's part, once. Raises `CheckpointError` for what no save writes."""
        if rank_of(file) not in self._unread:
            return
        part = read_part(self.folder, self.reader.descriptor, file, self.manifest["files"][file]["part"])
        try:
            found = [each for each in self._beside if each[2].file == file]
            for name, state, start, stop, offset in self._list(part["fragments"]):
                key = self._key(name if name in self.parameters else _without_compile(name), state)
                stored = self._interval(self.dtypes[key], file, offset, start, stop)
                self._add(key, stored)
                found.append((*key, stored))
            digests = [self._text(each) for each in self._list(part["digests"])]
            if part["nbytes"] != self.files[file]["nbytes"]:
                raise self.damage(f"{self.files[file]['nbytes']:,} bytes of {file}", part["nbytes"])
            self._check_files([file], found)
            self.files[file] |= {"digests": digests, "rng": part["rng"]}
            del self._unread[rank_of(file)]
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise self.damage(f"what a rank says of {file}", f"{type(error).__name__}: {error}") from error

    def _add(self, key: tuple[str, str], stored: Stored) -> None:
        parts = self.cut[key]
        at = len(parts)
        if parts and parts[-1].start > stored.start:
            at = bisect_right(parts, stored.start, key=lambda part: part.start)
        before, after = parts[at - 1] if at else None, parts[at] if at < len(parts) else None
        free = (before is None or before.stop <= stored.start) and (after is None or stored.stop <= after.start)
        if not (free and stored.start < stored.stop <= self._elements(key)):
            raise self.damage(f"{self._elements(key)} elements of {key[1]} of {key[0]!r}, each once", stored[:2])
        parts.insert(at, stored)

    def everything(self) -> None:
        """Read every rank's part, and check that every element of every state that is cut lies in exactly one place."""
        if self._unread:
            for file in [*self._unread.values()]:
                self._told(file)
            self._check_whole()
            self.reader.check_there()

    @functools.cached_property
    def _unread(self) -> dict[int, str]:
        """Files whose parts (`parts.py`) were not read yet, by the rank that wrote them."""
        return {rank_of(file): file for file, facts in self.files.items() if "digests" not in facts}

    def _cover(self, key: tuple[str, str], low: int, high: int) -> None:
        """Read ranks' parts until they list elements [low, high) of a cut state: first those beside what was found."""
        while self._unread and (at := self._reached(key, low)) < high:
            self._told(self._unread[self._next(key, at)])
            if not self._unread:
                self._check_whole()

    def _next(self, key: tuple[str, str], at: int) -> int:
        """Choose the rank whose part to read for element `at`: mostly ranks hold a state in rank order."""
        parts = self.cut[key]
        after = bisect_right(parts, at, key=lambda part: part.start)
        low = rank_of(parts[after - 1].file) if after else -1
        high = rank_of(parts[after].file) if after < len(parts) else len(self.files)
        if after and parts[after - 1].stop == at:
            return nearest(self._unread, low + 1, low, high)
        first, last = self.holders[key]
        near = first + (last + 1 - first) * (at + 0.5) / self._elements(key) - 0.5
        return nearest(self._unread, min(max(near, low + 1), high - 1), low, high)

    def _reached(self, key: tuple[str, str], low: int) -> int:
        """Return the first element from `low` on that no part read so far has."""
        parts = self.cut.get(key, [])
        for part in parts[bisect_right(parts, low, key=lambda part: part.stop) :]:
            if part.start > low:
                break
            low = part.stop
        return low

    def rng(self, rank: int) -> Any:
        """Return the random states of a rank that saved."""
        if not self._parted:
            return self.manifest["rng"][rank]
        self._told(file := f"rank{rank:05d}.safetensors")
        return self.files[file]["rng"]

    def _check_values(self) -> None:
        """Check that every parameter with elements has saved values, of its dtype or of another floating-point one."""
        for name, entry in self.parameters.items():
            saved = self.dtypes.get((name, VALUE))
            if bool(numel(entry.shape)) != (saved is not None):
                raise self.damage(f"a value of {name!r}", "another" if saved else "none")
            held = {saved or entry.dtype, entry.dtype}
            if len(held) > 1 and not all(dtype.is_floating_point for dtype in held):
                raise self.damage(f"a value of {name!r} in {entry.dtype}, or its master", saved)

    @functools.cached_property
    def _beside(self) -> list[tuple[str, str, Stored]]:
        """Tensors stored whole: (parameter, state, place), and ("", name, place) of buffers and of `extra`."""
        stored = [(*key, each) for key, each in self.whole.items()]
        others = [(name, each) for name, ranks in self.differing.items() for each in ranks[1:] if each is not None]
        return stored + [("", name, each) for name, each in (*self.buffers.items(), *others, *self.extra.items())]

    def buffer(self, name: str, rank: int) -> Stored | None:
        """Return where a rank's buffer of this name is, or None if the rank had none."""
        return self.differing[name][rank] if name in self.differing else self.buffers.get(name)

    def buffers_for(self, rank: int, ranks: int) -> dict[str, Stored]:
        """Return the buffers for one of so many ranks: those that differed between ranks only where as many saved."""
        as_many = ranks == self.manifest["ranks"]
        names = dict.fromkeys([*self.buffers, *(self.differing if as_many else ())])
        found = {name: self.buffer(name, rank) for name in names if as_many or name not in self.differing}
        return {name: stored for name, stored in found.items() if stored is not None}

    def _check_files(self, files: Sequence[str], named: list[tuple[str, str, Stored]]) -> None:
        """Check that tensors in these files do not overlap, and that no file is larger than its tensors need.

        named: all that these files hold. If two tensors shared bytes, a small file could fill the memory. If a file
        could be larger than its tensors and their names, a sparse one of a few bytes of disk would take hours to read.
        """
        spans = sorted((s.file, s.offset, s.offset + nbytes(s)) for *_, s in named if numel(s.shape))
        for (file, _, stop), (other, start, _) in pairwise(spans):
            if file == other and start < stop:
                raise self.damage("tensors one after the other", f"two at byte {start} of {file}")
        room = dict.fromkeys(files, 64)
        for first, second, stored in named:  # 12: the most that JSON makes of a character
            room[stored.file] += nbytes(stored) + 256 + 12 * (len(first) + len(second)) + 20 * len(stored.shape)
        for each, most in room.items():
            if (found := self.files[each]["nbytes"]) > most:
                raise self.damage(f"{each} with at most {most:,} bytes, for its tensors", f"{found:,}")

    @property
    def optimizers(self) -> list[dict[str, Any]]:
        """What is told of each optimizer, its options as they were."""
        found: list[dict[str, Any]] = _read(self.manifest["optimizers"])
        return found

    def _check_optimizers(self) -> None:
        for told in self._list(self.manifest["optimizers"]):
            self._text(told["class"])
            self._count(told.get("steps", 0))
            for group in self._list(told["groups"]):
                for name in self._list(group["parameters"]):
                    self._text(name)
                group["options"].keys()
                for key, (shape, dtype) in group.get("tensors", {}).items():
                    if numel(self._shape(shape)) != 1 or TORCH_DTYPES[dtype] is None or key not in group["options"]:
                        raise self.damage("an option that is a tensor of one number", key)

    def _count(self, value: Any, limit: int = 1 << 48) -> int:
        if type(value) is not int or not 0 <= value < limit:
            raise self.damage("a count", repr(value)[:50])
        return value

    def _text(self, value: Any) -> str:
        if not isinstance(value, str):
            raise self.damage("a name", repr(value)[:100])
        return value

    def _list(self, value: Any) -> list[Any]:
        if not isinstance(value, list):
            raise self.damage("a list", repr(value)[:100])
        return value

    def _shape(self, value: Any) -> tuple[int, ...]:
        if len(self._list(value)) > DIMENSIONS:
            raise self.damage(f"a shape of at most {DIMENSIONS} sizes", f"{len(value)} sizes")
        return tuple(self._count(size) for size in value)

    def _strips(self, shape: tuple[int, ...], value: Any) -> Strips:
        if value is None:
            return ONE_STRIP
        found = Strips(*(self._count(each) for each in self._list(value)))
        fitting = [cut for cut, size in enumerate(shape) if found.parts and not size % found.parts]
        if not any(Strips.of(shape, cut, found.parts) == found for cut in fitting):
            raise self.damage(f"strips of a tensor of shape {shape}", value)
        return found

    def _key(self, name: Any, state: Any) -> tuple[str, str]:
        if name not in self.parameters:
            raise self.damage("states of the parameters it lists", repr(name)[:100])
        return name, self._text(state)

    def _stored(self, shape: Any, dtype: Any, file: Any, offset: Any, start: int = 0, stop: int = 0) -> Stored:
        stored = Stored(start, stop, self._shape(shape), TORCH_DTYPES[dtype], self._text(file), self._count(offset))
        if stored.offset + nbytes(stored) > self.manifest["files"][file]["nbytes"]:
            raise self.damage(f"tensors inside {file}", f"offset {offset}, shape {stored.shape}")
        return stored

    def _interval(self, dtype: torch.dtype, file: str, offset: Any, start: Any, stop: Any) -> Stored:
        """Return the place of elements [start, stop) of a cut state: a cheaper `_stored`, since there are many."""
        count, at = self._count(stop) - self._count(start), self._count(offset)
        if count < 0 or at + count * dtype.itemsize > self.files[file]["nbytes"]:
            raise self.damage(f"tensors inside {file}", f"offset {offset}, elements {start} to {stop}")
        return Stored(start, stop, (count,), dtype, file, at)

    # --- reading, every byte from a block whose digest is right -----------------------------------------------------

    def want(self, key: tuple[str, str], start: int, stop: int, strips: Strips = ONE_STRIP) -> None:
        """Note elements [start, stop) of a parameter's state for the reader to check with all else that is wanted.

        strips: what start and stop count in, here and below.
        """
        for part, low, high, _ in self._parts(key, start, stop, strips):
            offset = part.offset + (low - part.start) * part.dtype.itemsize
            self.reader.want(part.file, offset, (high - low) * part.dtype.itemsize)

    def interval(self, key: tuple[str, str], start: int, stop: int) -> Tensor:
        """Read elements [start, stop) of a parameter's state, as saved. 1-D, on the CPU."""
        out = _empty(stop - start, self.dtypes[key])
        self.fill(key, start, out)
        return out

    def fill(
        self, key: tuple[str, str], start: int, out: Tensor, strips: Strips = ONE_STRIP, *, later: bool = False
    ) -> None:
        """Read elements from `start` on of a parameter's state into `out`, 1-D, from all files that hold some of them.

        later: wait for the reader's `finish`, if neither dtype nor device changes on the way.
        """
        for part, low, high, at in self._parts(key, start, start + out.numel(), strips):
            place = out.detach()[at : at + high - low]
            offset = part.offset + (low - part.start) * part.dtype.itemsize
            if place.device.type == "cpu" and place.dtype == part.dtype and place.is_contiguous():
                self.reader.read(part.file, offset, _raw(place), later=later)
                continue
            scratch = _empty(min(place.numel(), CHUNK), part.dtype)
            for piece in place.split(CHUNK):
                self.reader.read(part.file, offset, _raw(scratch[: piece.numel()]))
                piece.copy_(scratch[: piece.numel()])
                offset += piece.numel() * part.dtype.itemsize

    def _parts(
        self, key: tuple[str, str], start: int, stop: int, strips: Strips
    ) -> Iterator[tuple[Stored, int, int, int]]:
        """Yield (a stored interval, its elements [low, high) that are wanted, where these begin among all wanted)."""
        at = 0
        runs = [*self.runs(key[0], start, stop, strips)]
        for first, last in runs if key in self.cut else ():
            self._cover(key, first, last)
        parts = self.cut.get(key, [])
        ends = [part.stop for part in parts]
        for first, last in runs:
            for part in parts[bisect_right(ends, first) :]:
                low, high = max(part.start, first), min(part.stop, last)
                if low >= high:
                    break
                yield part, low, high, at + low - first
            at += last - first

    def runs(self, name: str, start: int, stop: int, strips: Strips) -> Iterator[tuple[int, int]]:
        """Yield elements [start, stop), counted in `strips`, as intervals in the order in which they were saved."""
        mine = self.parameters[name].strips
        if mine == strips:
            yield start, stop
        else:
            for low, high in strips.rows_of(start, stop):
                yield from mine.parts_of(low, high)

    def read(self, stored: Stored) -> Tensor:
        """Read a tensor that was saved whole."""
        out = _empty(stored.shape, stored.dtype)
        self.reader.read(stored.file, stored.offset, _raw(out))
        return out

    def blocks(self, stored: Stored) -> Iterator[tuple[int, Tensor]]:
        """Yield the elements that one file holds of a tensor, a block at a time: (flat index of the first; 1-D)."""
        numel_each, last = BLOCK // stored.dtype.itemsize, numel(stored.shape)
        for first in range(0, last, numel_each):
            out = _empty(min(numel_each, last - first), stored.dtype)
            self.reader.read(stored.file, stored.offset + first * stored.dtype.itemsize, _raw(out))
            yield stored.start + first, out

    @classmethod
    @contextlib.contextmanager
    def open(cls, folder: Path, *, alone: bool = True) -> Iterator[Saved]:
        """Open the checkpoint in `folder`. Raises `CheckpointError` if it is incomplete or contradicts its manifest.

        alone: does this process read all of it, and not one of many ranks its share?
        """
        saved = None
        while saved is None:
            with opened(folder) as descriptor:
                try:
                    manifest = read_manifest(folder, descriptor)
                    saved = cls(folder, descriptor, manifest, alone)
                except CheckpointError:
                    if not replaced(folder, descriptor):  # else a save has taken its place: read what that wrote
                        raise
        try:
            yield saved
        finally:
            saved.reader.close()


def _without_compile(value: Any) -> Any:
    """Return entries of a manifest with the names that they would have without `torch.compile`."""
    if isinstance(value, dict):
        return {plain_name(key): _without_compile(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_without_compile(each) for each in value]
    return plain_name(value) if isinstance(value, str) else value


def _empty(shape: int | tuple[int, ...], dtype: torch.dtype) -> Tensor:
    import torch

    return torch.empty(shape, dtype=dtype, device="cpu")


def _raw(tensor: Tensor) -> memoryview:
    from ..arithmetic.digests import raw

    return raw(tensor)


def check_loads(folder: Path, manifest: dict[str, Any]) -> None:
    """Raise `CheckpointError` for a manifest that no load would take, before it is written."""
    Saved(folder, -1, json.loads(canonical(manifest)))


def state_name(parameter: str, key: Any) -> str:
    """Return the manifest's name of an optimizer's state `key`, which must not pass for the parameter's value."""
    if not isinstance(key, str):
        raise CheckpointError(
            "an optimizer's state has a name that is no text", where=f"parameter {parameter!r}", got=repr(key),
            instead='self.state[p]["name"] in the optimizer\'s class',
        )  # fmt: skip
    return f"optimizer:{key}" if APART.fullmatch(key) else key


def own_name(state: str) -> str:
    """Return the optimizer's name of a saved state: `state_name` undone."""
    return state.removeprefix("optimizer:") if APART.fullmatch(state) else state


def by_number(name: str) -> list[tuple[int, str]]:
    """Return a sorting key that puts blocks.2 before blocks.10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def numel(shape: tuple[int, ...]) -> int:
    return math.prod(shape)


def nbytes(stored: Stored) -> int:
    return numel(stored.shape) * stored.dtype.itemsize


_known: dict[str, tuple[tuple[int, ...], int, int]] = {}  # of each manifest seen: which file that was, its order


def orders(folder: Path, *, say: bool) -> list[tuple[int, int, str]]:
    """Return (number, time, name) of the checkpoints in a folder, by their manifests; links and folders without one are
    passed over.

    A save takes the number after the largest beside it: clocks are set back, numbers are not. Checkpoints of earlier
    versions have none, which counts as 0; between equal numbers the time decides. say: warn of damaged manifests.
    """
    found = []
    with os.scandir(folder) as listed:
        entries = [*listed]
    for entry in entries:
        path = Path(entry.path)
        if entry.name.startswith(".") or not entry.is_dir(follow_symlinks=False) or not (path / MANIFEST).exists():
            continue
        try:
            with opened(path) as descriptor:
                facts = os.stat(MANIFEST, dir_fd=descriptor)
                which = facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns
                if _known.get(entry.path, ((),))[0] != which:  # a manifest is some megabytes to read
                    _known[entry.path] = which, *order(read_manifest(path, descriptor))
                _, number, saved = _known[entry.path]
                found.append((number, saved, path.name))
        except (CheckpointError, OSError, LookupError, TypeError, ValueError) as error:
            if say:
                warnings.warn(f"zeroshard passes over a damaged checkpoint. {error}", stacklevel=3)
    return found


def order(manifest: Mapping[str, Any]) -> tuple[int, int]:
    """Return (number, time) of a checkpoint, by which earlier and later ones are ordered."""
    return int(manifest.get("number", 0)), int(manifest["saved"])


def siblings(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, the last saved first. Warns of those whose manifest is damaged."""
    return [folder / name for *_, name in sorted(orders(folder, say=True), reverse=True)]


def finite(value: Any) -> Any:
    """Return plain data for JSON, which has neither infinity nor NaN: {"float": "inf"} stands for one."""
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [finite(each) for each in value]
    return {"float": repr(value)} if isinstance(value, float) and not math.isfinite(value) else value


def _read(value: Any) -> Any:
    """Return what `finite` was given."""
    if isinstance(value, list):
        return [_read(each) for each in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1 and value.get("float") in ("nan", "inf", "-inf"):
        return float(value["float"])
    return {key: _read(each) for key, each in value.items()}


def plain(where: str, value: Any, tensors: dict[str, Tensor]) -> Any:
    """Convert what the user saves along to JSON: objects by their `state_dict()`, tensors by a reference."""
    from torch import Tensor

    if hasattr(value, "state_dict") and callable(value.state_dict):
        return plain(where, value.state_dict(), tensors)
    if isinstance(value, Tensor):
        tensors[where] = value.detach()
        return {"tensor": where}
    if isinstance(value, Mapping):
        if not all(isinstance(key, (str, int)) for key in value):
            instead = "a list of pairs, list(value.items()), or keys of text"
            raise UserError(
                "extra holds a key that is neither text nor a number", where=where, got=list(value)[:5], instead=instead
            )
        pairs = [[key, plain(f"{where}.{key}", inner, tensors)] for key, inner in value.items()]
        return {"map": pairs}
    if isinstance(value, (list, tuple)):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [plain(f"{where}.{at}", inner, tensors) for at, inner in enumerate(value)]}
    value = python_number(value)
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    if isinstance(value, int) and value.bit_length() > INTEGER_BITS:
        raise UserError(
            "extra holds an integer that JSON does not",
            where=where,
            got=f"{value.bit_length()} bits",
            instead="hex(value)",
        )
    if isinstance(value, (str, int, float, bool, type(None))):
        return value
    raise UserError(
        "extra holds what cannot be written as plain data", where=where, got=type(value).__name__,
        instead="numbers, text, lists, dicts, tensors, or objects with state_dict()",
    )  # fmt: skip


def unplain(value: Any, tensors: Mapping[str, Any]) -> Any:
    """Return what `plain` was given. Raises ValueError, TypeError or LookupError for what `plain` does not write."""
    if not isinstance(value, (dict, list)):
        return value
    kind, inner = next(iter(value.items())) if isinstance(value, dict) and len(value) == 1 else ("", None)
    if kind == "tensor":
        return tensors[str(inner)]
    if kind == "float" and inner in ("nan", "inf", "-inf"):
        return float(inner)
    if kind not in ("map", "list", "tuple") or not isinstance(inner, list):
        raise ValueError(f"extra holds {value!r:.100}")
    if kind == "map":
        made = {key: unplain(each, tensors) for key, each in inner if isinstance(key, (str, int))}
        if len(made) != len(inner):
            raise ValueError(f"extra holds a map with keys that are twice there, or no keys: {inner!r:.100}")
        return made
    items = [unplain(each, tensors) for each in inner]
    return tuple(items) if kind == "tuple" else items
