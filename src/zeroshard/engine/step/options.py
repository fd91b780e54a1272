"""The options of an optimizer's groups in words that ranks can compare: each rank updates its own part by them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...arithmetic.sums import simulated
from ...comm.agreement import OPTION
from ...device import ask
from ...validation import python_number


class Options:
    """The options of one optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer, check: Callable[[], None]) -> None:
        """check: refuses options that a checkpoint could not hold."""
        self._optimizer = optimizer
        self._check = check
        self._known: list[Any] = []
        self._words = ""

    def words(self) -> str:
        """Return all options, group by group, as one text; it checks them if they may have changed."""
        now = [value for group in self._optimizer.param_groups for value in _options(group).values()]
        if not same(now, self._known) or not all(map(_fixed, now)):  # the others may have changed in place
            self._known = now
            self._check()
            told = [
                {key: words(value) for key, value in _options(group).items()} for group in self._optimizer.param_groups
            ]
            self._words = repr(told)
        return self._words

    def facts(self) -> list[str]:
        """Return `words`, a line for each option."""
        return [
            f"{OPTION}{key!r} of group {number} is {words(value)!r}"
            for number, group in enumerate(self._optimizer.param_groups)
            for key, value in _options(group).items()
        ]


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def same(now: list[Any], before: list[Any]) -> bool:
    """Tell if two lists hold the very same objects, in the same order."""
    return len(now) == len(before) and all(map(operator.is_, now, before))


def _fixed(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))


def words(value: Any) -> Any:
    """Return what ranks can compare of an option: its content, or only the kind of an object or a device's tensor."""
    value = python_number(value)
    if _fixed(value):
        return value
    if isinstance(value, Tensor):  # asking a device for it would wait for the device
        return ask(value).tolist() if value.is_cpu and not simulated(value) else f"{value.dtype} {value.shape}"
    if type(value) in (list, tuple):
        return type(value)(map(words, value))
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [words(each) for each in value]
    if isinstance(value, dict):
        return {repr(key): words(each) for key, each in value.items()}
    return type(value).__name__
