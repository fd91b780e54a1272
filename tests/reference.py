"""What zeroshard must equal, in plain PyTorch: `zeroshard verify` and the tests share one implementation."""

from __future__ import annotations

from torch import Tensor

from zeroshard.cli.reference import (
    History,
    accumulate,
    accumulate_with_masters,
    bits,
    clip_,
    first_difference,
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


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    __tracebackhide__ = True
    difference = first_difference(got, want)
    assert not difference, difference
