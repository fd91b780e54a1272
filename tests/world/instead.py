"""`--worlds`: what `ranks.run` would run in processes runs in worlds, as it is."""

from __future__ import annotations

import functools
import pickle
import sys
from collections import Counter
from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest

from zeroshard.testing.failures import Raised

from .running import run

counted = Counter(worlds=0, processes=0)


def instead_of_processes(said: str) -> Callable[..., list[Any] | None]:
    """What takes the place of `ranks.run`. said: "plain", "strict", or a seed."""
    if said not in ("plain", "strict") and not said.isdigit():
        raise pytest.UsageError(f"--worlds takes plain, strict or a seed, and not {said!r}: name files before it")
    options: dict[str, Any] = {"strict": said == "strict", "seed": int(said) if said.isdigit() else None}

    def instead(
        world: int, fn: Callable[..., Any], *args: Any, backend: str, spent: bool, **how: Any
    ) -> list[Any] | None:
        """None: only processes can do that."""
        if spent or backend != "gloo":
            counted["processes"] += 1
            return None
        counted["worlds"] += 1
        call = pickle.dumps((fn, args, how.pop("kwargs")))  # each rank has arguments of its own, as a process has

        @functools.wraps(fn, updated=())
        def own() -> bytes:
            function, mine, named = pickle.loads(call)
            return pickle.dumps(function(*mine, **named))

        _reset()
        before = _verbs()
        outcomes = run(world, own, **how, **options)
        _reset()
        after = _verbs()
        left = [" ".join(key) for key, verb in before.items() if after.get(key) is not verb]
        assert not left, f"{fn.__name__} leaves {left} as ranks changed them in turn: mark its test `processes`"
        return [each if isinstance(each, Raised) else pickle.loads(each) for each in outcomes]

    return instead


def _verbs() -> dict[tuple[str, ...], Any]:
    """The package's functions and methods: ranks that replace one put back what another rank had replaced."""
    found: dict[tuple[str, ...], Any] = {}
    for module in [name for name in sys.modules if name.startswith("zeroshard.")]:
        for name, thing in vars(sys.modules[module]).items():
            if isinstance(thing, FunctionType):
                found[module, name] = thing
            elif isinstance(thing, type) and thing.__module__ == module:
                found |= {(module, name, verb): of for verb, of in vars(thing).items() if isinstance(of, FunctionType)}
    return found


def _reset() -> None:
    if "models" in sys.modules:
        sys.modules["models"].reset()
