"""The four policies of a command line: options of `plan`, `simulate`, `train` and `verify` as arguments of `shard`.

Imports torch only where a precision or an offload is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

from zeroshard.cli.config import InputError, Precision
from zeroshard.errors import UserError, nearest
from zeroshard.planner.options import ARGUMENTS, OPTIONS
from zeroshard.policies.comm import Comm
from zeroshard.policies.layout import Layout

if TYPE_CHECKING:
    from zeroshard.policies import precision

NAMES = {*OPTIONS, *ARGUMENTS, "precision"}  # of all options that a policy has


def precision_of(word: str | None, grad_dtype: str | None = None, fp8: str | None = None) -> precision.Precision | None:
    """Make the `Precision` of --precision, --grad-dtype and --fp8; None where none asks for anything.

    "fp32": the model's own dtypes; "bf16": bfloat16 parameters with fp32 masters, floating inputs cast; "bf16-split":
    the same with split masters. "fp32-fp8" and "bf16-fp8": with the weights of linear layers in 8 bits. With
    "-states16" optimizer states rest in 16 bits, rounded to nearest; with "-states16-drawn" they are rounded at random.
    grad_dtype: what gradients are added up in. fp8: patterns of the parameters in 8 bits, with commas between.
    """
    for name, value, words in (
        ("precision", word, get_args(Precision)),
        ("grad_dtype", grad_dtype, ("fp32", "bf16")),
    ):
        if value not in (None, *words):
            raise UserError(f"no such {name}", got=repr(value), instead=nearest(str(value), words))
    computed, _, rest = (word or "fp32").partition("-")
    if fp8 is not None and rest not in ("", "fp8"):
        raise UserError(
            "fp8 and precision both say how parameters rest", got=f"precision={word!r}, fp8={fp8!r}",
            instead=f'precision="{computed}"',
        )  # fmt: skip
    if computed == "fp32" and not rest and grad_dtype is None and fp8 is None:
        return None
    import torch

    from zeroshard.policies import precision

    low = computed == "bf16"
    return precision.Precision(
        param_dtype=torch.bfloat16 if low else None,
        grad_dtype=None if grad_dtype is None else {"fp32": torch.float32, "bf16": torch.bfloat16}[grad_dtype],
        cast_inputs=low,
        split_master=rest == "split",
        fp8=rest == "fp8" if fp8 is None else READ["fp8"](fp8),
        states={"*": torch.bfloat16} if rest.startswith("states16") else {},
        rounding="stochastic" if rest.endswith("-drawn") else "nearest",
    )


def layout_of(options: Mapping[str, Any]) -> Layout:
    """Make the `Layout` of the options that are given."""
    return Layout(**given_of("Layout", options))


def comm_of(options: Mapping[str, Any]) -> Comm:
    """Make the `Comm` of the options that are given."""
    return Comm(**given_of("Comm", options))


def given_of(policy: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return {field: value} of the options of a policy that are given."""
    return {
        field: READ[name](options[name]) if name in READ and isinstance(options[name], str) else options[name]
        for name, (kind, field) in OPTIONS.items()
        if kind == policy and options.get(name) is not None
    }


def policies(options: Mapping[str, Any]) -> dict[str, Any]:
    """Make the arguments of `shard` that a command's options are, but for `stage` and `offload`."""
    return {
        "precision": precision_of(options.get("precision"), options.get("grad_dtype"), options.get("fp8")),
        "layout": layout_of(options),
        "comm": comm_of(options),
        **{name: bool(options.get(name)) for name in ARGUMENTS},
    }


def _blocks(text: str) -> int | dict[str, int]:
    """Parse --align: a number, or "*.experts.*=256,*.out.weight=128"."""
    parts = [each.rpartition("=") for each in text.split(",")]
    if any(not number.isdecimal() for _, _, number in parts) or (len(parts) > 1 and not all(each[1] for each in parts)):
        raise InputError(f"--align takes a number, or PATTERN=NUMBER with commas between; got {text!r}")
    if not parts[0][1]:
        return int(text)
    return {pattern: int(number) for pattern, _, number in parts}


def _matrices(text: str) -> dict[str, int | Literal["first"]]:
    """Parse --matrices: "*.qkv.weight=3,*.experts.*=first"."""
    parts = [each.rpartition("=") for each in text.split(",")]
    if not all(pattern and (count == "first" or count.isdecimal()) for pattern, _, count in parts):
        raise InputError(f"--matrices takes PATTERN=NUMBER or PATTERN=first, with commas between; got {text!r}")
    return {pattern: "first" if count == "first" else int(count) for pattern, _, count in parts}


READ: Mapping[str, Callable[[str], Any]] = {  # options whose text is not yet the field's value
    "align": _blocks,
    "experts": lambda pattern: {pattern: "edp"},
    "fp8": lambda patterns: tuple(patterns.split(",")),
    "matrices": _matrices,
    "whole": lambda patterns: tuple(patterns.split(",")),
}
