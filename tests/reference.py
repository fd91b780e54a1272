"""What zeroshard must equal, in plain PyTorch: `zeroshard verify` and the tests share one implementation."""

from __future__ import annotations

from torch import Tensor

from zeroshard.cli.reference import (
    History,
    accumulate,
    accumulate_with_masters,
    bits,
    clip_,
    first_unequal,
    loop,
    weights,
)

__all__ = [
    "History",
    "accumulate",
    "accumulate_with_masters",
    "assert_same",
    "bits",
    "clip_",
    "first_difference",
    "loop",
    "weights",
]


def first_difference(got: dict[str, Tensor], want: dict[str, Tensor]) -> str:
    """Return one line on the first difference; empty if the names are the same and `first_unequal` finds nothing."""
    if got.keys() != want.keys():
        return f"names differ: {sorted(got.keys() ^ want.keys())}"
    for name, tensor in want.items():
        if found := first_unequal(got[name], tensor):
            at, have, should, count = found
            return f"{name}: {count}, first at {at}: {have} instead of {should}"
    return ""


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    __tracebackhide__ = True
    difference = first_difference(got, want)
    assert not difference, difference
