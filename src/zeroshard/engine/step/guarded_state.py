"""`optimizer.state` of a sharded model has states of this rank's fragments, and none of the model's own parameters.
A program that asks for the state of one of these gets a `StateError` that says so."""

from __future__ import annotations

import collections
from collections.abc import Container, Iterator
from typing import Any

import torch

from ...errors import StateError


class GuardedState(collections.defaultdict[Any, Any]):
    """The states by parameter. A copy guards nothing."""

    own: Container[int] = frozenset()  # ids of the model's own parameters

    def _check(self, key: Any) -> None:
        if id(key) in self.own and not dict.__contains__(self, key):
            raise StateError(
                "optimizer.state was asked for a parameter of the model, and has states of this rank's parts",
                where=f"parameter {key._zeroshard.name!r}",
                instead="optimizer.state[p] of the p in optimizer.param_groups: this rank's elements; to change the "
                "states of some parameters zero.unshard(), and shard again",
            )

    def __missing__(self, key: Any) -> Any:
        self._check(key)
        return super().__missing__(key)

    def __contains__(self, key: object) -> bool:
        self._check(key)
        return super().__contains__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        self._check(key)
        return super().get(key, default)

    def pop(self, key: Any, *default: Any) -> Any:
        self._check(key)
        return super().pop(key, *default)


def guard(optimizer: Any, own: Container[int]) -> None:
    """Guard an optimizer's states, and those of optimizers inside it that share them, against look-ups of parameters
    with these ids. Without ids, make the states a plain dict again."""
    before = optimizer.state
    made = GuardedState(dict, before) if own else collections.defaultdict(dict, before)
    if isinstance(made, GuardedState):
        made.own = own
    optimizer.state = made
    for _, _, inner in inside(optimizer):
        if inner.state is before:
            inner.state = made


def inside(optimizer: Any) -> Iterator[tuple[str, Any, torch.optim.Optimizer]]:
    """Yield each optimizer that another one keeps in an attribute, with the attribute's name and value: the optimizer
    itself, or a list, a tuple or a dict of some."""
    for name, value in vars(optimizer).items():
        held = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
        for inner in held:
            if isinstance(inner, torch.optim.Optimizer):
                yield name, value, inner
