"""Saving what the ranks hold, and loading it into any number of ranks, stage, bounds and precision.

Every rank writes the elements it owns under the layout, of each parameter's *value* (the master where there is one,
else the parameter) and of each optimizer state; what is replicated is split the same way, so everything is written
once. A saved tensor is a flat interval of a parameter, and loading intersects intervals: nothing depends on who wrote
what. Reading happens in two halves. First every rank reads, checks and puts aside all it needs, and the ranks agree
that all of them could; only then does any of them change a byte.
"""

from __future__ import annotations

import os
import platform
import random
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn

from .buffer import Buffer
from .comm import Group
from .errors import CheckpointError, PeerError, UserError
from .files import (
    DTYPES,
    TORCH_DTYPES,
    Reader,
    canonical,
    clean,
    damaged,
    digest,
    publish,
    raw,
    read_manifest,
    write_manifest,
    write_tensors,
)
from .optim import SCALARS, Binding, Fragment
from .unit import Managed

FORMAT, VERSION = "zeroshard checkpoint", 1
VALUE = "value"  # of a parameter: its master, or itself
EXTRA = "extra"  # tensors among what the user saves along


@dataclass
class Engine:
    """What of a sharded model is saved and loaded."""

    model: nn.Module
    managed: list[Managed]
    buffers: list[Buffer]
    bindings: list[Binding]
    group: Group
    stage: int
    places: dict[str, tuple[Buffer, int]] = field(default_factory=dict)  # parameter -> its buffer and slot

    def __post_init__(self) -> None:
        for buffer in self.buffers:
            for position, slot in enumerate(buffer.bucket.slots):
                self.places[slot.name] = buffer, position


class Piece(NamedTuple):
    """Elements [start, stop) of one state of one parameter, 1-D; or, with start None, a tensor of its own shape."""

    parameter: str
    state: str
    start: int | None
    stop: int | None
    tensor: Tensor

    @property
    def key(self) -> str:
        return f"{self.state}/{self.parameter}"


# --- saving ---------------------------------------------------------------------------------------------------------


def save(engine: Engine, path: str | os.PathLike[str], extra: Mapping[str, Any] | None) -> None:
    """Write a checkpoint at `path`, or leave everything as it is and raise on every rank."""
    target, group = Path(path).absolute(), engine.group
    outcome = group.describe({"token": uuid.uuid4().hex, "path": target.name})
    beside = target.parent / f".{target.name}.saving-{outcome[0]['token']}"
    facts: dict[str, Any] = {"problem": None}
    tensors: dict[str, Tensor] = {}
    told = None
    try:
        told = _plain("extra", dict(extra or {}), tensors)
        if group.rank == 0:
            target.parent.mkdir(parents=True, exist_ok=True)
            clean(target.parent, target.name)
            beside.mkdir()
    except (OSError, UserError) as error:
        facts["problem"] = f"{error}"
    _agree(group, facts["problem"], target)
    try:
        facts |= _write_own(engine, beside, tensors)
    except (OSError, CheckpointError) as error:
        facts["problem"] = f"{error}"
    everyone = group.describe(facts)
    problems = [f"rank {rank}: {told['problem']}" for rank, told in enumerate(everyone) if told["problem"]]
    published = None
    if group.rank == 0 and not problems:
        try:
            write_manifest(beside, _manifest(engine, everyone, told))
            publish(beside, target)
        except (OSError, ValueError) as error:
            published = f"{error}"
    if group.rank == 0 and (problems or published):
        shutil.rmtree(beside, ignore_errors=True)
    _agree(group, "; ".join(problems) or published, target)


def _agree(group: Group, problem: str | None, target: Path) -> None:
    """Raise on every rank if one has a problem."""
    told = [f"rank {rank}: {each}" for rank, each in enumerate(group.describe(problem)) if each]
    if told:
        raise CheckpointError(
            "the checkpoint was not saved; the one before it and the training are as they were",
            where=str(target), got=told[0], instead="make room or name another folder, and save again",
        )  # fmt: skip


def _write_own(engine: Engine, beside: Path, extra: dict[str, Tensor]) -> dict[str, Any]:
    """This rank's file, and what the manifest has to say of it."""
    name = f"rank{engine.group.rank:05d}.safetensors"
    own = list(pieces(engine))
    tensors = {piece.key: piece.tensor for piece in own}
    buffers: dict[str, dict[str, Any]] = {}
    if engine.group.rank == 0:
        for key, tensor in _persistent(engine.model):
            buffers[key] = {"file": name, "shape": list(tensor.shape), "dtype": DTYPES[tensor.dtype]}
            tensors[f"buffer/{key}"] = tensor
        tensors |= {f"{EXTRA}/{key}": tensor for key, tensor in extra.items()}
    written = write_tensors(beside / name, tensors)
    for key, entry in buffers.items():
        entry["offset"] = written.offsets[f"buffer/{key}"]
    return {
        "file": name,
        "nbytes": written.nbytes,
        "digests": written.digests,
        "fragments": [
            [*p[:4], DTYPES[p.tensor.dtype], list(p.tensor.shape), written.offsets[p.key]] for p in own
        ],
        "values": list(_values(engine)),
        "buffers": buffers,
        "extra": [
            [key, list(t.shape), DTYPES[t.dtype], written.offsets[f"{EXTRA}/{key}"]] for key, t in extra.items()
        ] * (engine.group.rank == 0),
        "rng": _rng_states(),
    }  # fmt: skip


def pieces(engine: Engine) -> Iterator[Piece]:
    for buffer in engine.buffers:
        first = buffer.updated[0]
        for slot in buffer.bucket.slots:
            own = slot.within(*buffer.owned)
            if own.numel:
                start = slot.start + own.start - first
                yield Piece(slot.name, VALUE, own.start, own.stop, buffer.target[start : start + own.numel])
    for binding in engine.bindings:
        for fragment, _part, own in _owned(binding):
            for key, value in binding.optimizer.state.get(fragment.param, {}).items():
                yield from _state_piece(fragment, key, value, _part, own)


def _owned(binding: Binding) -> Iterator[tuple[Fragment, Any, Any]]:
    """(fragment, the interval it holds, the interval this rank writes), in its slot's elements."""
    for fragment in binding.fragments:
        slot = fragment.buffer.bucket.slots[fragment.position]
        part, own = slot.within(*fragment.buffer.updated), slot.within(*fragment.buffer.owned)
        if part.numel and own.numel:
            yield fragment, part, own


def _state_piece(fragment: Fragment, key: str, value: Any, part: Any, own: Any) -> Iterator[Piece]:
    name = fragment.buffer.bucket.slots[fragment.position].name
    if isinstance(value, Tensor):
        if value.numel() == part.numel and key not in SCALARS:
            flat = value.detach().reshape(-1)[own.start - part.start : own.stop - part.start]
            yield Piece(name, key, own.start, own.stop, flat)
        elif own.start == 0:  # one number, or a shape of its own: its first element's owner writes it
            yield Piece(name, key, None, None, value.detach())


def _values(engine: Engine) -> Iterator[list[Any]]:
    """[parameter, state, number]: what optimizers keep beside tensors."""
    for binding in engine.bindings:
        for fragment, _part, own in _owned(binding):
            for key, value in binding.optimizer.state.get(fragment.param, {}).items():
                if not isinstance(value, Tensor) and own.start == 0:
                    name = fragment.buffer.bucket.slots[fragment.position].name
                    if not isinstance(value, (int, float, str, bool, type(None))):
                        raise CheckpointError(
                            "this optimizer keeps something that is neither a tensor nor a number",
                            where=f"{type(binding.optimizer).__name__}.state of {name!r}, key {key!r}",
                            got=type(value).__name__,
                        )
                    yield [name, key, value]


def _persistent(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for path, module in model.named_modules():
        for name, tensor in module._buffers.items():
            if tensor is not None and name not in module._non_persistent_buffers_set:
                yield (f"{path}.{name}" if path else name), tensor


def _manifest(engine: Engine, everyone: Sequence[dict[str, Any]], extra: Any) -> dict[str, Any]:
    fragments = [[*entry, told["file"]] for told in everyone for entry in told["fragments"]]
    return {
        "format": FORMAT,
        "version": VERSION,
        "ranks": engine.group.ranks,
        "stage": engine.stage,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "parameters": {
            record.name: {
                "shape": list(record.param.shape),
                "dtype": DTYPES[record.param.dtype],
                "names": record.names,
            }
            for record in engine.managed
        },
        "fragments": fragments,
        "values": [value for told in everyone for value in told["values"]],
        "files": {told["file"]: {"nbytes": told["nbytes"], "digests": told["digests"]} for told in everyone},
        "buffers": everyone[0]["buffers"],
        "optimizers": [_options(binding) for binding in engine.bindings],
        "extra": extra,
        "extra_tensors": everyone[0]["extra"],
        "extra_file": everyone[0]["file"],
        "rng": [told["rng"] for told in everyone],
    }


def _options(binding: Binding) -> dict[str, Any]:
    """An optimizer's class, and its groups by the names of their parameters."""
    groups = []
    for number, group in enumerate(binding.optimizer.param_groups):
        options = {}
        for key, value in group.items():
            if key not in ("params", "param_names"):
                value = float(value) if isinstance(value, Tensor) else value
                options[key] = list(value) if isinstance(value, tuple) else value
        names = [m.place.buffer.bucket.slots[m.place.position].name for m in binding.members if m.group == number]
        groups.append({"parameters": names, "options": options})
    return {"class": type(binding.optimizer).__name__, "groups": groups}


def _plain(where: str, value: Any, tensors: dict[str, Tensor]) -> Any:
    """JSON for whatever the user saves along: objects by their `state_dict()`, tensors by a reference."""
    if hasattr(value, "state_dict") and callable(value.state_dict):
        return _plain(where, value.state_dict(), tensors)
    if isinstance(value, Tensor):
        tensors[where] = value.detach()
        return {"tensor": where}
    if isinstance(value, Mapping):
        if not all(isinstance(key, (str, int)) for key in value):
            raise UserError("extra holds a key that is neither text nor a number", where=where, got=list(value)[:5])
        pairs = [[key, _plain(f"{where}.{key}", inner, tensors)] for key, inner in value.items()]
        return {"map": pairs}
    if isinstance(value, (list, tuple)):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [_plain(f"{where}.{at}", inner, tensors) for at, inner in enumerate(value)]}
    if (isinstance(value, float) and value != value) or value in (float("inf"), float("-inf")):
        return {"float": repr(value)}
    if isinstance(value, (str, int, float, bool, type(None))):
        return value
    raise UserError(
        "extra holds what cannot be written as plain data", where=where, got=type(value).__name__,
        instead="numbers, text, lists, dicts, tensors, or objects with state_dict()",
    )  # fmt: skip


def _unplain(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    makers: dict[str, Callable[[Any], Any]] = {
        "tensor": lambda name: tensors[name],
        "map": lambda pairs: {key: _unplain(each, tensors) for key, each in pairs},
        "list": lambda items: [_unplain(each, tensors) for each in items],
        "tuple": lambda items: tuple(_unplain(each, tensors) for each in items),
        "float": float,
    }
    return makers[kind](inner)


def _rng_states() -> dict[str, Any]:
    kind, keys, *rest = numpy.random.get_state(legacy=True)
    version, numbers, gauss = random.getstate()
    states = {
        "python": [version, list(numbers), gauss],
        "numpy": [kind, numpy.asarray(keys).tobytes().hex(), *rest],
        "torch": bytes(torch.get_rng_state().tolist()).hex(),
    }
    if torch.cuda.is_available():
        states["cuda"] = bytes(torch.cuda.get_rng_state().tolist()).hex()
    return states


# --- loading --------------------------------------------------------------------------------------------------------


class Loaded(NamedTuple):
    """What `zero.load` answers. extra: what was saved along. skipped: differences that `strict=False` passed over.

    ranks: the number of ranks that saved it; random states are restored where this run has as many.
    """

    extra: dict[str, Any]
    skipped: list[str]
    ranks: int


class Stored(NamedTuple):
    """Where the bytes of one interval, or of one whole tensor, lie."""

    start: int
    stop: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    file: str
    offset: int


@dataclass
class Index:
    """A manifest, checked: every name, interval and place in a file is as it must be."""

    folder: Path
    manifest: dict[str, Any]
    parameters: dict[str, dict[str, Any]] = field(default_factory=dict)
    cut: dict[tuple[str, str], list[Stored]] = field(default_factory=dict)  # (parameter, state) -> its intervals
    whole: dict[tuple[str, str], Stored] = field(default_factory=dict)
    values: dict[tuple[str, str], Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        try:
            self._read()
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise self.damage("a manifest as zeroshard writes it", f"{type(error).__name__}: {error}") from error

    def damage(self, expected: object, got: object) -> CheckpointError:
        return damaged(self.folder / "manifest.json", expected, got)

    def _read(self) -> None:
        manifest = self.manifest
        if manifest["format"] != FORMAT or manifest["version"] != VERSION:
            raise CheckpointError(
                "this checkpoint is of a format that is not read here", where=str(self.folder),
                expected=f"{FORMAT} {VERSION}", got=f"{manifest['format']} {manifest['version']}",
                instead="the zeroshard that wrote it",
            )  # fmt: skip
        for name, entry in manifest["parameters"].items():
            shape = tuple(self._count(size) for size in entry["shape"])
            names = [self._text(each) for each in entry["names"]]
            self.parameters[name] = {"shape": shape, "dtype": TORCH_DTYPES[entry["dtype"]], "names": names}
        for name, state, start, stop, dtype, shape, offset, file in manifest["fragments"]:
            stored = Stored(
                0 if start is None else self._count(start),
                0 if stop is None else self._count(stop),
                tuple(self._count(size) for size in shape),
                TORCH_DTYPES[dtype],
                self._text(file),
                self._count(offset),
            )
            self._inside(stored)
            if name not in self.parameters:
                raise self.damage("fragments of the parameters it lists", repr(name))
            key = name, self._text(state)
            if start is None:
                if key in self.whole or key in self.cut:
                    raise self.damage(f"one {state} of {name!r}", "several")
                self.whole[key] = stored
            else:
                if stored.shape != (stored.stop - stored.start,) or key in self.whole:
                    raise self.damage(f"intervals of {state} of {name!r}", entry)
                self.cut.setdefault(key, []).append(stored)
        for (name, state), parts in self.cut.items():
            parts.sort(key=lambda part: part.start)
            ends = [0, *(part.stop for part in parts)]
            numel = _numel(self.parameters[name]["shape"])
            if [part.start for part in parts] != ends[:-1] or ends[-1] != numel or len({p.dtype for p in parts}) > 1:
                raise self.damage(f"all {numel} elements of {state} of {name!r}, each once", ends)
        for name, entry in self.parameters.items():
            if _numel(entry["shape"]) and (name, VALUE) not in self.cut:
                raise self.damage(f"a value of {name!r}", "none")
        for name, state, value in manifest["values"]:
            self.values[self._text(name), self._text(state)] = value
        if len(manifest["rng"]) != self._count(manifest["ranks"]):
            raise self.damage("random states of every rank", len(manifest["rng"]))

    def _count(self, value: Any) -> int:
        if type(value) is not int or not 0 <= value < 1 << 48:
            raise self.damage("a count", repr(value)[:50])
        return value

    def _text(self, value: Any) -> str:
        if not isinstance(value, str):
            raise self.damage("a name", repr(value)[:100])
        return value

    def _inside(self, stored: Stored) -> None:
        files = self.manifest["files"]
        if stored.file not in files:
            raise self.damage("a file it lists", repr(stored.file)[:100])
        if stored.offset + _numel(stored.shape) * stored.dtype.itemsize > files[stored.file]["nbytes"]:
            raise self.damage(f"tensors inside {stored.file}", f"offset {stored.offset}, shape {stored.shape}")

    def stored(self, entry: Mapping[str, Any]) -> Stored:
        """A whole tensor's place, from a manifest's entry."""
        shape = tuple(self._count(size) for size in entry["shape"])
        stored = Stored(
            0, 0, shape, TORCH_DTYPES[entry["dtype"]], self._text(entry["file"]), self._count(entry["offset"])
        )
        self._inside(stored)
        return stored


def _numel(shape: tuple[int, ...]) -> int:
    numel = 1
    for size in shape:
        numel *= size
    return numel


@dataclass
class Staged:
    """All that this rank is going to change, read and checked, before anything is changed."""

    values: dict[str, Tensor] = field(default_factory=dict)  # parameter -> the elements that rest on this rank
    masters: dict[str, Tensor] = field(default_factory=dict)
    states: list[tuple[Binding, nn.Parameter, dict[str, Any]]] = field(default_factory=list)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    groups: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)


def load(engine: Engine, path: str | os.PathLike[str], *, strict: bool) -> Loaded:
    """Read, check and agree; then change everything, on all ranks."""
    folder, group = Path(path).absolute(), engine.group
    problem, differences, staged, index = None, [], Staged(), None
    try:
        index = Index(folder, read_manifest(folder))
        differences = _differences(engine, index)
        if not (differences and strict):
            staged = _stage(engine, index)
    except (CheckpointError, OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
        problem = f"{error}" if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
    seen = None if index is None else digest(canonical(index.manifest))
    everyone = group.describe({"problem": problem, "differences": differences, "manifest": seen})
    for rank, told in enumerate(everyone):
        if told["problem"]:
            raise CheckpointError(
                "the checkpoint was not loaded; nothing was changed", where=f"rank {rank}", got=told["problem"]
            )
        if strict and told["differences"]:
            raise CheckpointError(
                "the checkpoint is of another model or optimizer; nothing was changed",
                where=str(folder),
                got="".join(f"\n    {each}" for each in told["differences"]),
                instead="load(..., strict=False) skips these, and says so",
            )
        if told["manifest"] != everyone[0]["manifest"]:
            raise PeerError(
                "the ranks see different checkpoints", where=f"rank {rank}", expected=str(folder), got="another one"
            )
    assert index is not None
    _commit(engine, staged)
    if index.manifest["ranks"] == group.ranks:
        _restore_rng(index.manifest["rng"][group.rank])
    return Loaded(staged.extra, differences, index.manifest["ranks"])


def _differences(engine: Engine, index: Index) -> list[str]:
    """Everything in which the checkpoint and this model differ, in words."""
    found = []
    mine = {record.name: record for record in engine.managed}
    for name, record in mine.items():
        saved = index.parameters.get(name)
        if saved is None:
            found.append(f"parameter {name!r} is not in the checkpoint")
        elif saved["shape"] != tuple(record.param.shape):
            found.append(f"parameter {name!r} has shape {tuple(record.param.shape)}, saved was {saved['shape']}")
        elif sorted(saved["names"]) != sorted(record.names):
            found.append(f"parameter {name!r} is tied as {record.names}, saved was {saved['names']}")
    found += [f"saved parameter {name!r} is not in the model" for name in index.parameters if name not in mine]
    buffers = dict(_persistent(engine.model))
    saved_buffers = index.manifest["buffers"]
    found += [f"buffer {name!r} is not in the checkpoint" for name in buffers if name not in saved_buffers]
    for name, entry in saved_buffers.items():
        if name not in buffers:
            found.append(f"saved buffer {name!r} is not in the model")
        elif list(buffers[name].shape) != entry["shape"] or DTYPES[buffers[name].dtype] != entry["dtype"]:
            found.append(
                f"buffer {name!r} is {tuple(buffers[name].shape)} {DTYPES[buffers[name].dtype]}, saved was {entry}"
            )
    return found + _group_differences(engine, index)


def _group_differences(engine: Engine, index: Index) -> list[str]:
    if not engine.bindings:
        return []
    saved = index.manifest["optimizers"]
    if len(saved) != len(engine.bindings):
        return [f"{len(engine.bindings)} optimizers, saved were {len(saved)}"]
    found = []
    for number, (binding, told) in enumerate(zip(engine.bindings, saved, strict=True)):
        mine = _options(binding)
        if mine["class"] != told["class"]:
            found.append(f"optimizer {number} is {mine['class']}, saved was {told['class']}")
        for at, group in enumerate(mine["groups"]):
            match = _match(group, told["groups"])
            if match is None:
                found.append(
                    f"optimizer {number}: no saved group holds just what group {at} does, {group['parameters'][:3]}"
                )
            elif match["options"].keys() != group["options"].keys():
                other = sorted(match["options"].keys() ^ group["options"].keys())
                found.append(f"optimizer {number}, group {at}: options {other} are only on one side")
    return found


def _match(group: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    wanted = sorted(group["parameters"])
    return next((each for each in groups if sorted(each["parameters"]) == wanted), None)


def _stage(engine: Engine, index: Index) -> Staged:
    staged, manifest = Staged(), index.manifest
    reader = Reader(index.folder, manifest["files"])
    try:
        for record in engine.managed:
            saved = index.parameters.get(record.name)
            if saved is not None and saved["shape"] == tuple(record.param.shape):
                _stage_parameter(engine, index, reader, record.name, staged)
        for name, tensor in _persistent(engine.model):
            entry = manifest["buffers"].get(name)
            if entry and entry["shape"] == list(tensor.shape) and entry["dtype"] == DTYPES[tensor.dtype]:
                staged.buffers[name] = _read(reader, index.stored(entry))
        for binding, told in zip(engine.bindings, manifest["optimizers"], strict=False):
            for group, mine in zip(binding.optimizer.param_groups, _options(binding)["groups"], strict=True):
                match = _match(mine, told["groups"])
                if match is not None:
                    staged.groups.append((group, match["options"]))
        extra = {
            key: _read(
                reader, index.stored({"shape": shape, "dtype": dtype, "file": manifest["extra_file"], "offset": offset})
            )
            for key, shape, dtype, offset in manifest["extra_tensors"]
        }
        staged.extra = _unplain(manifest["extra"], extra)
        reader.check_rest(engine.group.rank, engine.group.ranks)
    finally:
        reader.close()
    return staged


def _stage_parameter(engine: Engine, index: Index, reader: Reader, name: str, staged: Staged) -> None:
    buffer, position = engine.places[name]
    slot = buffer.bucket.slots[position]
    updated = slot.within(*buffer.updated)
    resting = slot.within(*buffer.owned) if buffer.place.parameters else slot.within(0, buffer.bucket.numel)
    staged.values[name] = _interval(index, reader, (name, VALUE), resting.start, resting.stop)
    if buffer.master is not None:
        staged.masters[name] = _interval(index, reader, (name, VALUE), updated.start, updated.stop)
    for binding in engine.bindings:
        for fragment in binding.fragments:
            if fragment.buffer is buffer and fragment.position == position and fragment.param.numel():
                keys = [state for parameter, state in (*index.cut, *index.whole, *index.values) if parameter == name]
                group = next(g for g in binding.optimizer.param_groups if any(p is fragment.param for p in g["params"]))
                states = {
                    key: _state(index, reader, (name, key), updated, fragment.param, group)
                    for key in dict.fromkeys(keys)
                    if key != VALUE
                }
                staged.states.append((binding, fragment.param, states))


def _state(
    index: Index, reader: Reader, key: tuple[str, str], part: Any, like: nn.Parameter, group: Mapping[str, Any]
) -> Any:
    if key in index.values:
        return index.values[key]
    if key in index.cut:
        flat = _interval(index, reader, key, part.start, part.stop)
        flat = flat.to(like.device, like.dtype if flat.is_floating_point() else flat.dtype)
        return flat.view(like.shape)
    tensor = _read(reader, index.whole[key])
    on_device = group.get("fused") or group.get("capturable") or tensor.dim()
    return tensor.to(like.device) if on_device else tensor


def _interval(index: Index, reader: Reader, key: tuple[str, str], start: int, stop: int) -> Tensor:
    """Elements [start, stop) of a state, put together from whatever pieces hold them. 1-D, on the CPU."""
    parts = index.cut.get(key, [])
    out = torch.empty(stop - start, dtype=parts[0].dtype if parts else torch.float32)
    for part in parts:
        low, high = max(part.start, start), min(part.stop, stop)
        if low < high:
            offset = part.offset + (low - part.start) * part.dtype.itemsize
            reader.read(part.file, offset, raw(out[low - start : high - start]))
    return out


def _read(reader: Reader, stored: Stored) -> Tensor:
    out = torch.empty(stored.shape, dtype=stored.dtype)
    reader.read(stored.file, stored.offset, raw(out))
    return out


@torch.no_grad()
def _commit(engine: Engine, staged: Staged) -> None:
    for name, value in staged.values.items():
        buffer, position = engine.places[name]
        slot = buffer.bucket.slots[position]
        if buffer.place.parameters:
            part, target, first = slot.within(*buffer.owned), buffer.shard, buffer.owned[0]
        else:
            part, target, first = slot.within(0, slot.stop), buffer.full, 0
        if part.numel:
            at = slot.start + part.start - first
            target[at : at + part.numel].copy_(value)
        if name in staged.masters:
            part, first = slot.within(*buffer.updated), buffer.updated[0]
            assert buffer.master is not None
            if part.numel:
                at = slot.start + part.start - first
                buffer.master[at : at + part.numel].copy_(staged.masters[name])
    for binding, param, states in staged.states:
        if states:
            binding.optimizer.state[param] = states
        else:
            binding.optimizer.state.pop(param, None)
    for group, options in staged.groups:
        for key, value in options.items():
            if isinstance(group.get(key), Tensor):
                group[key].fill_(value)
            else:
                group[key] = tuple(value) if isinstance(value, list) and isinstance(group.get(key), tuple) else value
    for name, tensor in _persistent(engine.model):
        if name in staged.buffers:
            tensor.copy_(staged.buffers[name])
    for buffer in engine.buffers:
        buffer.fresh = buffer.fresh and not buffer.place.parameters
        buffer.changed()


def _restore_rng(states: Mapping[str, Any]) -> None:
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, *rest = states["numpy"]
    numpy.random.set_state((kind, numpy.frombuffer(bytes.fromhex(keys), dtype=numpy.uint32), *rest))
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(states["torch"]), dtype=torch.uint8))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.frombuffer(bytearray.fromhex(states["cuda"]), dtype=torch.uint8))
