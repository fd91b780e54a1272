"""Contents of another system's checkpoint, as a reader has found them, written as one of ours. No ranks, no model.

Tensors are read one after the other while they are written: never more than one of them is in memory.
"""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..checkpoint.content import _option
from ..checkpoint.dtypes import DTYPES
from ..checkpoint.files import absolute, make_room, publish, write_manifest, write_tensors
from ..checkpoint.manifest import FORMAT, UNCUT, VALUE, check_loads, finite, orders, plain, state_name
from ..checkpoint.staging import discard, owner, place_beside, temporary
from ..engine.build.supported_optimizers import check_option
from ..errors import CheckpointError, UserError, nearest

FILE = "rank00000.safetensors"


class Lazy(NamedTuple):
    """A tensor that is read when it is written; not at all where it is `odd`."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]
    odd: str = ""  # its kind, if a checkpoint has no place for it; its shape is not known then


def one_name(name: object) -> bool:
    """Tell whether a name is one of something in a folder, and no way out of it."""
    return isinstance(name, str) and bool(name) and Path(name).name == name and name not in (".", "..")


def of(tensor: Tensor) -> Lazy:
    kind = odd(tensor)
    return Lazy(() if kind else tuple(tensor.shape), tensor.dtype, lambda: tensor, kind)


def odd(tensor: Tensor) -> str:
    """Name a tensor's kind if a checkpoint has no place for it, else "". Some kinds cannot even tell their shape."""
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.layout is not torch.strided:
        return str(tensor.layout)
    if tensor.is_meta:
        return "a tensor on meta, which has no values"
    return "" if tensor.dtype in DTYPES else str(tensor.dtype)


def refuse_odd(where: str, lazy: Lazy) -> None:
    kind = lazy.odd or ("" if lazy.dtype in DTYPES else str(lazy.dtype))
    if kind:
        raise CheckpointError(
            "this kind of tensor cannot be saved", where=where, got=kind,
            expected="a dense tensor, of a dtype that safetensors has",
        )  # fmt: skip


@dataclass
class Hints:
    """Hints of the user about what a checkpoint may leave open."""

    optimizer: str | None = None  # its class
    buffers: Sequence[str] = ()  # names or patterns
    tied: Mapping[str, str] = field(default_factory=dict)  # another name -> the parameter


@dataclass
class Found:
    """The contents of a checkpoint that a reader has found."""

    source: str
    stage: int
    values: dict[str, Lazy] = field(default_factory=dict)  # parameter -> its master, or itself
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)  # parameter -> its own, where that is another
    aliases: dict[str, list[str]] = field(default_factory=dict)  # parameter -> its other names
    states: dict[str, dict[str, Lazy]] = field(default_factory=dict)
    plain: dict[str, dict[str, Any]] = field(default_factory=dict)  # states that are None, text, True or False
    groups: list[tuple[list[str], dict[str, Any]]] = field(default_factory=list)  # (parameters, options)
    buffers: dict[str, Lazy] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def leave_out(self, key: object, why: str) -> None:
        self.notes.append(f"{key} is left out: it cannot be written as plain data ({why})")

    def is_buffer(self, name: str, tensor: Lazy, hints: Hints) -> bool:
        """Tell whether a tensor that no optimizer knows is a buffer: not floating-point, or named by a hint."""
        return not tensor.dtype.is_floating_point or any(fnmatchcase(name, pattern) for pattern in hints.buffers)


class _Stream(Mapping[str, Tensor]):
    """Tensors to be written: shapes first, on meta, and then the values one after the other."""

    def __init__(self, tensors: Mapping[str, Lazy]) -> None:
        self._tensors = tensors

    def __getitem__(self, key: str) -> Tensor:
        return torch.empty(self._tensors[key].shape, dtype=self._tensors[key].dtype, device="meta")

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def values(self) -> Any:
        for key, lazy in self._tensors.items():
            try:
                found = lazy.read().detach().contiguous()
            except (OSError, RuntimeError, LookupError, TypeError, ValueError, AttributeError) as error:
                if isinstance(error, CheckpointError):
                    raise
                raise CheckpointError(
                    "a tensor cannot be read", where=key, got=f"{type(error).__name__}: {error}"
                ) from error
            if (tuple(found.shape), found.dtype) != (lazy.shape, lazy.dtype):
                raise CheckpointError(
                    "a tensor is not as its checkpoint says", where=key, expected=f"{lazy.shape} {lazy.dtype}",
                    got=f"{tuple(found.shape)} {found.dtype}",
                )  # fmt: skip
            yield found


# --- optimizers -------------------------------------------------------------------------------------------------------


def optimizer_class(found: Found, hints: Hints) -> str | None:
    """Name the optimizer's class, by a hint or by its states; None where there are no groups."""
    if not found.groups:
        return None
    if hints.optimizer is not None:
        kinds = [name for name, kind in vars(torch.optim).items() if isinstance(kind, type) and name != "Optimizer"]
        if hints.optimizer not in kinds:
            raise UserError(
                "torch.optim has no such class", got=hints.optimizer, instead=nearest(hints.optimizer, kinds)
            )
        return hints.optimizer
    kept = {state for states in (*found.states.values(), *found.plain.values()) for state in states}
    decoupled = [options.get("decoupled_weight_decay", options.get("adam_w_mode")) for _, options in found.groups]
    if {"exp_avg", "exp_avg_sq"} <= kept <= {"exp_avg", "exp_avg_sq", "step", "max_exp_avg_sq"}:
        if all(each is None for each in decoupled):
            found.notes.append("it says neither Adam nor AdamW: taken as AdamW; --optimizer Adam says otherwise")
        return "Adam" if all(each is False for each in decoupled) else "AdamW"
    if kept <= {"momentum_buffer"} and all("momentum" in options for _, options in found.groups):
        return "SGD"
    raise UserError(
        "it does not say of which class its optimizer is", where=found.source, got=f"states {sorted(kept)}",
        instead="--optimizer NAME, a class of torch.optim; or --weights",
    )  # fmt: skip


def _options(kind: str, saved: Mapping[str, Any], found: Found) -> dict[str, Any]:
    """Return the options that torch's own class has; leave others out, with a note."""
    if unnamed := [key for key in saved if not isinstance(key, str)]:
        raise CheckpointError("an optimizer's option has a name that is no text", where=found.source, got=unnamed[:5])
    own = getattr(torch.optim, kind)([nn.Parameter(torch.zeros(1, 1, device="cpu"))]).param_groups[0]
    left = sorted(saved.keys() - own.keys() - {"params", "param_names", "step", "initial_lr"})
    if (
        left
        and (note := f"options that torch.optim.{kind} does not have are left out: {', '.join(left)}")
        not in found.notes
    ):
        found.notes.append(note)
    options = {key: saved.get(key, value) for key, value in own.items() if key not in ("params", "param_names")}
    if "initial_lr" in saved:  # put there by schedulers
        options["initial_lr"] = saved["initial_lr"]
    for key, value in options.items():
        try:
            check_option(key, value)
        except UserError as error:
            raise CheckpointError(
                "an optimizer's option cannot be written", where=f"option {key!r} in {found.source}",
                got=f"{type(value).__name__} {value!r:.60}", instead="--weights, which leaves the optimizer out",
            ) from error  # fmt: skip
    return {key: _option(value) for key, value in options.items()}


def steps(found: Found, names: Sequence[str], step: Any) -> None:
    """Give parameters a step count of their own, as torch keeps it, where their system keeps one for all."""
    number = float(step.item() if isinstance(step, Tensor) else step)
    for name in names:
        found.states.setdefault(name, {})["step"] = of(torch.tensor(number, device="cpu"))


# --- out --------------------------------------------------------------------------------------------------------------


def write(found: Found, path: str | os.PathLike[str], hints: Hints) -> None:
    """Write a checkpoint at `path`, which appears once it is whole. Raises `CheckpointError` or `UserError`."""
    target = absolute(path)
    _tie(found, hints)
    tensors: dict[str, Lazy] = {}
    entries: list[tuple[str, str, bool]] = []  # (parameter, state, has it an element for each of the parameter's?)
    for name, value in found.values.items():
        if math.prod(value.shape):
            tensors[f"{VALUE}/{name}"] = Lazy((math.prod(value.shape),), value.dtype, _flat(value))
            entries.append((name, VALUE, True))
        for key, lazy in found.states.get(name, {}).items():
            state = state_name(name, key)
            cut = lazy.shape == value.shape and key != "step"
            flat = Lazy((math.prod(lazy.shape),), lazy.dtype, _flat(lazy)) if cut else lazy
            tensors[f"{state}/{name}"] = flat
            entries.append((name, state, cut))
    tensors |= {f"buffer/{name}": lazy for name, lazy in found.buffers.items()}
    saved_along: dict[str, Tensor] = {}
    extra = plain("extra", found.extra, saved_along)
    tensors |= {f"extra/{name}": of(tensor) for name, tensor in saved_along.items()}
    for key, lazy in tensors.items():
        refuse_odd(key, lazy)
    manifest = {**_head(found, optimizer_class(found, hints)), "extra": extra}
    beside = temporary(place_beside(target, owner()))
    try:
        make_room(beside, target)
        written = write_tensors(beside / FILE, _Stream(tensors))
        at = written.offsets

        def where(key: str) -> list[Any]:
            return [DTYPES[tensors[key].dtype], list(tensors[key].shape), at[key]]

        fragments = []
        for name, state, cut in entries:
            key = f"{state}/{name}"
            bounds = [0, tensors[key].shape[0]] if cut else [None, None]
            fragments.append([name, state, *bounds, *where(key), FILE])
        manifest |= {
            "number": 1 + max((number for number, *_ in orders(target.parent, say=False)), default=0),
            "fragments": fragments,
            "files": {FILE: {"nbytes": written.nbytes, "digests": written.digests}},
            "buffers": {
                name: dict(zip(("dtype", "shape", "offset"), where(f"buffer/{name}"), strict=True)) | {"file": FILE}
                for name in found.buffers
            },
            "extra_tensors": [
                [name, list(tensor.shape), DTYPES[tensor.dtype], at[f"extra/{name}"]]
                for name, tensor in saved_along.items()
            ],
        }
        check_loads(target, manifest)
        write_manifest(beside, manifest)
        publish(beside, target)
    finally:
        discard(beside)


def _flat(lazy: Lazy) -> Callable[[], Tensor]:
    return lambda: lazy.read().reshape(-1)


def _tie(found: Found, hints: Hints) -> None:
    for alias, name in hints.tied.items():
        if name not in found.values:
            raise UserError("--tied names no parameter", got=name, instead=nearest(name, found.values))
        for kept in (found.values, found.states, found.plain, found.dtypes):
            kept.pop(alias, None)
        if alias not in found.aliases.setdefault(name, []):
            found.aliases[name].append(alias)
        found.groups = [([each for each in names if each != alias], options) for names, options in found.groups]


def _head(found: Found, kind: str | None) -> dict[str, Any]:
    """Make the head of the manifest, of 0 ranks, which no run has: there are no random states in it."""
    groups = [
        {"parameters": names, "options": finite(_options(kind, options, found))}
        for names, options in found.groups
        if kind
    ]
    return {
        "format": FORMAT, "version": UNCUT, "saved": time.time_ns(), "ranks": 0, "stage": found.stage, "seed": 0,
        "torch": torch.__version__, "threads": torch.get_num_threads(), "python": platform.python_version(),
        "parameters": {
            name: {
                "shape": list(value.shape),
                "dtype": DTYPES[found.dtypes.get(name, value.dtype)],
                "names": [name, *found.aliases.get(name, [])],
            }
            for name, value in found.values.items()
        },
        "optimizers": [{"class": kind, "groups": groups}] if kind else [],
        "values": [
            [name, state_name(name, key), value]
            for name in found.values
            for key, value in found.plain.get(name, {}).items()
        ],
        "extra_file": FILE, "rng": [],
    }  # fmt: skip


def plain_only(values: Mapping[str, Any], found: Found) -> None:
    """Take what else is in a file as far as it is plain data; note what is left out."""
    for key, value in values.items():
        tensors: dict[str, Tensor] = {}
        try:
            plain(str(key), value, tensors)
            why = next((f"{kind} in it" for kind in map(odd, tensors.values()) if kind), "")
        except (UserError, RecursionError) as error:
            why = str(error).splitlines()[0]
        if why:
            found.leave_out(key, why)
        else:
            found.extra[str(key)] = value


def shared_names(module: dict[str, Tensor]) -> dict[str, str]:
    """Find names of one and the same memory: {another: the first}."""
    first: dict[Any, str] = {}
    found = {}
    for name, tensor in module.items():
        if not odd(tensor) and tensor.numel():
            place = tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg()
            if first.setdefault(place, name) != name:
                found[name] = first[place]
    return found
