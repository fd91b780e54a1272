"""Where a seed brings a fault about: calls of files, allocations of tensors, copies of containers."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from zeroshard.worlds.draws import Draws
from zeroshard.worlds.install import Else, modules, replaced
from zeroshard.worlds.schedule import here

from . import disk


class _Copied(type):
    """The class of what stands for `tuple`, `list`, `set` or `dict` where copies are made."""

    plain: Any

    def __call__(cls, *args: Any, **named: Any) -> Any:
        task = here()
        if task is None or not args or task.schedule.draws.odds.inside == 0:
            return cls.plain(*args, **named)
        return cls.plain(_walked(args[0], f"a {cls.plain.__name__}"), **named)

    def __instancecheck__(cls, thing: Any) -> bool:
        return isinstance(thing, cls.plain)

    def __subclasscheck__(cls, other: Any) -> bool:
        return issubclass(other, cls.plain)

    def __getitem__(cls, of: Any) -> Any:
        return cls.plain[of]

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.plain, name)


def _walked(things: Any, where: str) -> Any:
    """As C walks through it: it begins, and then allocates, which is where the collector may run."""
    task = here()
    assert task is not None
    if isinstance(things, dict):  # copied as one
        task.schedule.collects(where)
        return things
    walk = iter(things)
    task.schedule.collects(where)
    return walk


def _copied(plain: Any) -> Any:
    return _Copied(plain.__name__, (), {"plain": plain})


def _sorted(things: Any, **named: Any) -> list[Any]:
    if here() is None:
        return sorted(things, **named)
    return sorted(_walked(things, "a sorted list"), **named)


_COPIES = {**{plain.__name__: _copied(plain) for plain in (tuple, list, set, dict)}, "sorted": _sorted}
_ALLOCATE = ("empty", "zeros", "empty_like", "zeros_like", "cat", "empty_strided", "full")


class _Torch(Else):
    """torch where memory may be wanting."""

    def __getattr__(self, name: str) -> Any:
        plain = getattr(self._plain, name)
        return _allocates(name, plain) if name in _ALLOCATE else plain


def _allocates(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **named: Any) -> Any:
        task = here()
        if task is not None and task.main:
            caller = sys._getframe(1).f_code.co_name
            if task.schedule.strikes(task.schedule.draws.odds.memory, f"has no memory for torch.{name} in {caller}"):
                raise MemoryError(f"drawn: torch.{name} in {caller}")
        return plain(*args, **named)

    return call


def _places(draws: Draws) -> Iterator[tuple[Any, str, Any]]:
    for name, module in modules() if draws.seed is not None else ():
        room, held = name.split(".")[1], vars(module)
        if room in ("checkpoint", "tiers", "features"):
            if held.get("os") is os:
                yield module, "os", disk.Calls()
            if held.get("shutil") is shutil:
                yield module, "shutil", disk.Calls()
            yield module, "open", disk.opens
        rooms = ("comm", "engine", "tiers", "features", "checkpoint")
        if draws.odds.memory and room in (*rooms, "device") and held.get("torch") is torch:
            yield module, "torch", _Torch(torch)
        # Not where a type is compared with the class itself.
        compared = name in ("zeroshard.engine.build.rollback", "zeroshard.engine.step.options")
        if room in rooms and draws.odds.inside and not compared:
            for copied, shim in _COPIES.items():
                yield module, copied, shim


def faulty(draws: Draws) -> AbstractContextManager[None]:
    """Faults can strike within this context, where something is drawn."""
    return replaced(_places(draws))
