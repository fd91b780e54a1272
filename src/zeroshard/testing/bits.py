"""`assert_same_bits`: two results of a training, bit for bit, and the first element in which they differ."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import UserError
from ..runlog.parting import part
from ..runlog.read import Run, read, ulps_between

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def assert_same_bits(first: Any, second: Any) -> None:
    """Raise `AssertionError` unless two results are the same, bit for bit.

    first, second: both of one kind. Tensors, modules, optimizers, and mappings, lists and tuples of these and of plain
        values, such as state dicts; or two folders that `zeroshard.RunLog` wrote. 0.0 and -0.0 differ, and so do two
        NaNs whose bits do. A tensor's device is not compared; its shape and dtype are.

    The error names the first tensor that differs, its first such element, both values with their bits, and how far
    they are apart in ULPs. Raises `UserError` for what has no bits to compare.

    Examples:
        >>> zeroshard.testing.assert_same_bits(torch.ones(3), torch.ones(3))
    """
    __tracebackhide__ = True
    if all(isinstance(each, (str, os.PathLike)) for each in (first, second)):
        says = parted(read(Path(first)), read(Path(second)))
    else:
        says = _first_difference(first, second)
    if says is not None:
        raise AssertionError(says)


# --- values -----------------------------------------------------------------------------------------------------------


def _first_difference(first: Any, second: Any) -> str | None:
    mine, theirs = dict(_leaves("", first)), dict(_leaves("", second))
    for name in {**mine, **theirs}:
        if name not in mine or name not in theirs:
            return f"{name}: only the {'second' if name in theirs else 'first'} has it"
    differing = [name for name, value in mine.items() if _differ(value, theirs[name])]
    if not differing:
        return None
    name = differing[0]
    more = f"; {len(differing) - 1} more of {len(mine)} differ" if len(differing) > 1 else ""
    return f"{name or 'the values'}: {_words(mine[name], theirs[name])}{more}"


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (torch.nn.Module, torch.optim.Optimizer)):
        value = value.state_dict()
    if isinstance(value, Mapping):
        inside = [(str(key), each) for key, each in value.items()]
    elif isinstance(value, (list, tuple)):
        inside = [(str(at), each) for at, each in enumerate(value)]
    elif value is None or isinstance(value, (Tensor, bool, int, float, complex, str, bytes)):
        yield name, value.detach() if isinstance(value, Tensor) else value
        return
    else:
        raise UserError(
            f"assert_same_bits: a {type(value).__name__} has no bits to compare", where=name or None,
            expected="tensors, modules, optimizers, plain values, and mappings, lists and tuples of them; or two "
            "folders that zeroshard.RunLog wrote",
        )  # fmt: skip
    if not inside:
        yield name, f"an empty {type(value).__name__}"
    for key, each in inside:
        yield from _leaves(f"{name}.{key}" if name else key, each)


def _differ(x: Any, y: Any) -> bool:
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        return type(x) is not type(y) or repr(x) != repr(y)  # repr: -0.0 is not 0.0, and nan is nan
    return x.dtype != y.dtype or x.shape != y.shape or not torch.equal(_bits(x), _bits(y))


def _bits(tensor: Tensor) -> Tensor:
    """Return a tensor's elements as integers on the host, 1D; a complex one's as pairs of them."""
    flat = tensor.cpu().contiguous().reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    return flat.view(INTEGERS[flat.itemsize])


def _words(x: Any, y: Any) -> str:
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        return f"{_short(x)} and {_short(y)}"
    if x.dtype != y.dtype or x.shape != y.shape:
        return f"{[*x.shape]} {_dtype(x)} and {[*y.shape]} {_dtype(y)}"
    a, b = _bits(x), _bits(y)
    places = (a != b).nonzero().reshape(-1)
    at, one, two = int(places[0]), a[places[0]], b[places[0]]
    flat = at // (2 if x.is_complex() else 1)
    index = [int(each) for each in torch.unravel_index(torch.tensor(flat, device="cpu"), x.shape)] if x.dim() else []
    values = [tensor.detach().cpu().reshape(-1)[flat].item() for tensor in (x, y)]
    digits = 2 * one.itemsize
    shown = [
        f"{value!r} (0x{int(bits) & (1 << (4 * digits)) - 1:0{digits}x})"
        for value, bits in zip(values, (one, two), strict=True)
    ]
    ulps = ulps_between(values[0], values[1], _dtype(x)) if x.is_floating_point() else None
    apart = f", {ulps:,} ULP{'s' * (ulps != 1)} apart" if ulps is not None else ""
    largest = _largest(x, y)
    return (
        f"element {index or flat} is {shown[0]} and {shown[1]}{apart}; {len(places):,} of {a.numel():,} differ{largest}"
    )


def _largest(x: Tensor, y: Tensor) -> str:
    wide = torch.complex128 if x.is_complex() else torch.float64
    distance = float((x.detach().cpu().to(wide) - y.detach().cpu().to(wide)).abs().max())
    return f", by {distance:.3g} at most" if math.isfinite(distance) else ""


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _short(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {[*value.shape]} {_dtype(value)}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# --- logs of runs -----------------------------------------------------------------------------------------------------


def parted(a: Run, b: Run) -> str | None:
    """Tell where two runs part, and of what kind that is; None where all that they logged is the same."""
    found = part(a, b)
    if found is None:
        for what, mine, theirs in (
            ("ranks", len(a.logs), len(b.logs)), ("steps", _steps(a), _steps(b)),
        ):  # fmt: skip
            if mine != theirs:
                return f"the runs have {mine} and {theirs} {what}: {a.folder}, {b.folder}"
        return None
    lines = [f"the runs part at step {found.step}, {found.what}" + (f": {found.name}" if found.name else "")]
    if found.values is not None:
        x, y = found.values
        element = "" if found.element is None else f"element {found.element:,}: "
        ulps = "" if found.ulps is None else f", {found.ulps:,} ULP{'s' * (found.ulps != 1)} apart"
        lines.append(f"  {element}{_hex(x)} and {_hex(y)}{ulps}")
    elif found.name is not None:
        lines.append("  in elements that the logs do not have; their digests differ")
    if found.names > 1:
        lines.append(f"  and {found.names - 1} more tensor{'s' * (found.names > 2)}")
    return "\n".join([*lines, f"  {found.kind}: {found.says}", f"  look at: {found.look}"])


def _steps(run: Run) -> int:
    return sum(step.gradients is not None for step in run.first.steps)


def _hex(value: float) -> str:
    return f"{value!r} ({float(value).hex()})"
