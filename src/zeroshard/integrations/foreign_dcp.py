"""Checkpoints of `torch.distributed.checkpoint`, as FSDP2's users save them, and whole state dicts in a `.pt` file.

The model's and the optimizer's entries are told by what is in them, whatever they are called.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.dtypes import DTYPES
from ..errors import CheckpointError, Error, UserError
from .foreign import Found, Hints, Lazy, of, one_name, plain_only, refuse_odd, shared_names
from .pickles import read_metadata, read_torch


def read_folder(place: Path, hints: Hints) -> Found:
    """Read a folder with a .metadata."""
    with _as_written(place, "this is no folder as torch.distributed.checkpoint writes it"):
        return _found("torch.distributed.checkpoint", _nested(place), hints)


def read_file(path: Path, hints: Hints) -> Found:
    """Read a file of `torch.save`: a model's `state_dict()`, alone or beside an optimizer's."""
    content = read_torch(path, path)
    if not isinstance(content, Mapping):
        raise UserError("this holds no state dict", where=str(path), got=type(content).__name__)
    with _as_written(path, "this is no file of state dicts"):
        return _found(f"{path.name}", _lazy(content), hints, ties=shared_names(_tensors(content)))


@contextlib.contextmanager
def _as_written(path: Path, else_: str) -> Iterator[None]:
    """Turn any exception of reading a source, which may hold anything, into an error that names it."""
    try:
        yield
    except Error:
        raise
    except Exception as error:
        raise CheckpointError(else_, where=str(path), got=f"{type(error).__name__}: {error}"[:300]) from error


def _tensors(content: Any) -> dict[str, Tensor]:
    """Collect all tensors but an optimizer's, each under the last of its keys."""
    found: dict[str, Tensor] = {}
    for key, value in content.items():
        if isinstance(value, Tensor):
            found[str(key)] = value
        elif isinstance(value, Mapping) and "param_groups" not in value:
            found |= _tensors(value)
    return found


def _lazy(content: Any) -> Any:
    if isinstance(content, Tensor):
        return of(content)
    if isinstance(content, Mapping):
        return {key: _lazy(value) for key, value in content.items()}
    return content


# --- DCP's folder -----------------------------------------------------------------------------------------------------


def _nested(place: Path) -> dict[str, Any]:
    """Rebuild the dict that was saved, its tensors to be read later."""
    metadata = read_metadata(place / ".metadata")
    where: dict[str, list[Any]] = {}
    for index, info in metadata.storage_data.items():
        if not one_name(info.relative_path):
            raise CheckpointError(
                "a part lies outside of its folder", where=str(place), got=repr(info.relative_path)[:100]
            )
        if getattr(info, "transform_descriptors", None):
            raise UserError("compressed parts are not read", where=str(place), got=info.transform_descriptors)
        where.setdefault(index.fqn, []).append((getattr(index, "offset", None), info))
    nested: dict[str, Any] = {}
    for key, told in metadata.state_dict_metadata.items():
        path = (metadata.planner_data or {}).get(key, (key,))
        if hasattr(told, "chunks"):
            value: Any = _chunked(place, key, told, where.get(key, []))
        else:
            ((_, info),) = where[key]
            value = read_torch(_bytes(place, info), place / info.relative_path)
        inner = nested
        for step in path[:-1]:
            inner = inner.setdefault(step, {})
        inner[path[-1]] = value
    found: dict[str, Any] = _lists(nested)
    return found


def _lists(content: Any) -> Any:
    """Turn {0: ..., 1: ...}, which DCP makes of a list with tensors, into it. Keys of a dict DCP makes text."""
    if not isinstance(content, dict):
        return content
    inner = {key: _lists(value) for key, value in content.items()}
    if (
        inner
        and all(isinstance(key, int) for key in inner)
        and not any(isinstance(each, dict) for each in inner.values())
    ):
        return [inner[key] for key in sorted(inner)]
    return inner


def _bytes(place: Path, info: Any) -> bytes:
    with open(place / info.relative_path, "rb") as file:
        file.seek(int(info.offset))
        return file.read(int(info.length))


def _chunked(place: Path, key: str, told: Any, parts: list[tuple[Any, Any]]) -> Lazy:
    shape, dtype = tuple(map(int, told.size)), told.properties.state[0]
    places = {tuple(offset or (0,) * len(shape)): info for offset, info in parts}
    sizes = {tuple(map(int, chunk.offsets)): tuple(map(int, chunk.sizes)) for chunk in told.chunks}
    if sum(map(math.prod, sizes.values())) != math.prod(shape) or not all(
        at in places for at, size in sizes.items() if math.prod(size)
    ):
        raise CheckpointError("parts of a tensor are missing", where=f"{key} in {place}", expected=shape, got=sizes)

    def read() -> Tensor:
        out = torch.empty(shape, dtype=dtype, device="cpu")
        for at, size in sizes.items():
            if math.prod(size):
                part = read_torch(_bytes(place, places[at]), place / places[at].relative_path)
                box = out
                for dimension, (start, length) in enumerate(zip(at, size, strict=True)):
                    box = box.narrow(dimension, start, length)
                if not isinstance(part, Tensor) or (part.shape, part.dtype) != (box.shape, dtype):
                    raise CheckpointError("a part is not as its metadata says", where=f"{key} in {place}")
                box.copy_(part)
        return out

    return Lazy(shape, dtype, read, "" if dtype in DTYPES else str(dtype))


# --- what is what -----------------------------------------------------------------------------------------------------


def _found(source: str, nested: dict[str, Any], hints: Hints, ties: Mapping[str, str] | None = None) -> Found:
    found, rest = Found(source, 3), {}
    models: dict[str, dict[str, Lazy]] = {}
    optimizers: list[dict[str, Any]] = []

    def walk(where: str, content: dict[str, Any]) -> None:
        if own := [key for key in content if f".{key}".endswith("._extra_state")]:
            found.notes.append(f"{', '.join(own[:5])} left out: modules' get_extra_state() is in no checkpoint here")
            content = {key: value for key, value in content.items() if key not in own}
        if "state" in content and "param_groups" in content:
            optimizers.append(content)
        elif any(str(key).startswith("param_groups.") for key in content):
            optimizers.append(_unflattened(content))
        elif content and all(isinstance(value, Lazy) for value in content.values()):
            models[where] = content
        else:
            for key, value in content.items():
                if isinstance(value, dict):
                    walk(f"{where}{key}.", value)
                elif kind := _odd_in(value):
                    found.leave_out(f"{where}{key}", f"{kind} in it")
                else:
                    rest[f"{where}{key}"] = _read(value)

    walk("", nested)
    if len(models) != 1 or len(optimizers) > 1:
        raise UserError(
            "one model and at most one optimizer are read", where=source,
            expected="a dict of nothing but tensors, by name, alone or under a key of its own",
            got=f"{len(models)} models {sorted(models)[:5]}, {len(optimizers)} optimizers",
        )  # fmt: skip
    ((_, model),) = models.items()
    _model(found, model, optimizers[0] if optimizers else None, hints, ties or {})
    plain_only(rest, found)
    return found


def _odd_in(value: Any) -> str:
    """Name what keeps a value out of a checkpoint, else "". A list may hold tensors where DCP wrote it."""
    if isinstance(value, Lazy):
        return value.odd
    try:
        return next(filter(None, map(_odd_in, value)), "") if type(value) is list else ""
    except RecursionError:
        return "a list that is in itself"


def _read(value: Any) -> Any:
    if isinstance(value, Lazy):
        return value.read()
    return [_read(each) for each in value] if type(value) is list else value


def _unflattened(content: dict[str, Any]) -> dict[str, Any]:
    """Nest `state.NAME.exp_avg` and `param_groups.NAME.lr`, as `flatten_optimizer_state_dict` writes them, again."""
    state: dict[str, dict[str, Any]] = {}
    options: dict[str, dict[str, Any]] = {}
    for key, value in content.items():
        kind, _, rest = str(key).partition(".")
        name, _, what = rest.rpartition(".")
        if kind not in ("state", "param_groups"):
            raise CheckpointError(
                "a flattened optimizer has an entry that is neither a state nor an option", got=repr(key)[:100],
                expected="state.NAME.STATE, param_groups.NAME.OPTION",
            )  # fmt: skip
        {"state": state, "param_groups": options}[kind].setdefault(name, {})[what] = value
    groups: list[dict[str, Any]] = []
    for name, told in options.items():
        same = next((group for group in groups if {k: v for k, v in group.items() if k != "params"} == told), None)
        if same is None:
            groups.append({**told, "params": [name]})
        else:
            same["params"].append(name)
    return {"state": state, "param_groups": groups}


def _model(
    found: Found, model: dict[str, Lazy], optimizer: dict[str, Any] | None, hints: Hints, ties: Mapping[str, str]
) -> None:
    groups = list(_groups(optimizer["param_groups"])) if optimizer else []
    for name, lazy in model.items():
        if not isinstance(name, str):
            raise CheckpointError("a tensor's name is no text", where=found.source, got=repr(name)[:100])
        refuse_odd(name, lazy)
    names = _named(groups, model, hints, ties)
    grouped = {name for members, _ in names for name in members}
    for name, lazy in model.items():
        if name in hints.tied:
            continue
        if name not in grouped and ties.get(name) not in grouped and found.is_buffer(name, lazy, hints):
            found.buffers[name] = lazy  # under each of its names, as a model has it
            continue
        other = ties.get(name) or (_twin(name, lazy, model, grouped) if grouped else None)
        if other is not None:
            first, second = sorted((name, other), key=list(model).index)
            found.aliases.setdefault(first, []).append(second)
            if grouped and not ties:
                found.notes.append(f"{name} has the bits of {other}, and no optimizer: taken as another name of it")
        else:
            found.values[name] = lazy
    rename = {other: first for first, others in found.aliases.items() for other in others}
    for other, first in rename.items():
        if other in found.values:
            found.values[first] = found.values.pop(other)
    found.values = {name: found.values[name] for name in model if name in found.values}
    for members, options in names:
        found.groups.append(([rename.get(name, name) for name in members], options))
    if optimizer is not None:
        numbers = dict(_numbers(groups, names))
        kept = optimizer["state"]
        if not isinstance(kept, Mapping) or not all(isinstance(states, Mapping) for states in kept.values()):
            raise CheckpointError(
                "an optimizer's states are not as torch writes them", where=found.source,
                expected="a dict for each parameter", got=repr(kept)[:100],
            )  # fmt: skip
        for key, states in kept.items():
            known: Any = numbers.get(key, key)
            _keep(found, rename.get(known, known), states)
        if unknown := [key for key in found.states if key not in found.values]:
            found.notes.append(f"states of {unknown[:5]} are left out: no group has these parameters")


def _keep(found: Found, name: Any, states: Mapping[str, Any]) -> None:
    """Keep a parameter's states: numbers as tensors, as torch's optimizers do; None, text and truths as they are."""
    tensors = found.states.setdefault(name, {})
    for state, value in states.items():
        if isinstance(value, Lazy):
            tensors[state] = value
        elif value is None or isinstance(value, (bool, str)):
            found.plain.setdefault(name, {})[state] = value
        elif isinstance(value, float) or (isinstance(value, int) and abs(value) < 1 << 63):
            tensors[state] = of(torch.tensor(float(value), device="cpu"))
        else:
            raise CheckpointError(
                "an optimizer keeps something that is neither a tensor nor a number",
                where=f"state {state!r} of parameter {name!r}", got=f"{type(value).__name__} {value!r:.60}",
            )  # fmt: skip


def _groups(told: Any) -> Iterator[dict[str, Any]]:
    """Yield the optimizer's groups, whose lists may come from DCP as {0: ..., 1: ...}."""
    for group in _listed(told, "groups", Mapping):
        members, names = _listed(group.get("params"), "parameters", (str, int)), group.get("param_names")
        if names is not None and len(_listed(names, "names of parameters", str)) != len(members):
            raise CheckpointError("an optimizer's group has not a name for each parameter", got=repr(names)[:100])
        yield {**group, "params": members}


def _listed(told: Any, what: str, kinds: Any) -> list[Any]:
    found = list(told.values()) if isinstance(told, Mapping) else told
    if not isinstance(found, (list, tuple)) or not all(isinstance(each, kinds) for each in found):
        raise CheckpointError(
            f"an optimizer's {what} are not as torch writes them", expected="a list of them", got=repr(told)[:100]
        )
    return list(found)


def _named(
    groups: list[dict[str, Any]], model: dict[str, Lazy], hints: Hints, ties: Mapping[str, str]
) -> list[tuple[list[str], dict[str, Any]]]:
    """Return (names, options) of each group. Raises if an optimizer numbers parameters that cannot be told."""
    found = []
    for group in groups:
        options = {
            key: value.read() if isinstance(value, Lazy) else value
            for key, value in group.items()
            if key not in ("params", "param_names")
        }
        members = group.get("param_names") or group["params"]
        if not all(isinstance(name, str) for name in members):
            params = [
                name
                for name, lazy in model.items()
                if name not in ties and name not in hints.tied and not Found("", 3).is_buffer(name, lazy, hints)
            ]
            if len(groups) > 1 or len(params) != len(members):
                raise UserError(
                    "an optimizer numbers its parameters, and which ones these are is not said",
                    got=f"{len(groups)} groups, {len(members)} numbers, {len(params)} parameters",
                    instead="names, as torch's get_state_dict(model, optimizer) has them; --buffer NAME; or --weights",
                )  # fmt: skip
            members = params
        if unknown := [name for name in members if name not in model]:
            raise CheckpointError("an optimizer has a parameter that the model has not", got=unknown[:5])
        found.append((list(members), options))
    return found


def _numbers(groups: list[dict[str, Any]], names: list[tuple[list[str], dict[str, Any]]]) -> Iterator[tuple[Any, str]]:
    for group, (members, _) in zip(groups, names, strict=True):
        yield from zip(group["params"], members, strict=True)
        yield from zip(map(str, group["params"]), members, strict=True)  # DCP makes text of a dict's keys


def _twin(name: str, lazy: Lazy, model: dict[str, Lazy], grouped: set[str]) -> str | None:
    """Find a trained parameter with the bits of a tensor that no optimizer knows: DCP writes tied ones twice."""
    if name in grouped or math.prod(lazy.shape) < 2 or not lazy.dtype.is_floating_point:
        return None
    candidates = [
        each for each in model if each in grouped and (model[each].shape, model[each].dtype) == (lazy.shape, lazy.dtype)
    ]
    if not candidates:
        return None
    own = lazy.read()
    return next((each for each in candidates if torch.equal(model[each].read(), own)), None)
