"""Which tests run when. Every test is in one set; plain `pytest`, and a test named on the command line, know no sets.

    make test   every test function of the engine: with every value of its parameters where it stays in pytest's own
                process, which costs milliseconds; once where it starts ranks or a command. At which stage and on how many ranks differs: a file's
                functions share them out, so that each file still runs at every stage and every number of ranks that it has
                What takes seconds at each stage (`STAGES`) runs at 1 and 3
    make tools  the same of tools/: commands, planner, page, texts, trainers, formats of others
    make full   every value of every parameter that `make test` has not, and what is marked `full` by hand: tests of over
                a second; and of each function on ranks one test in processes. Of a function that is marked `heavy`, whose
                tests take five seconds each and more, one test, if `make test` has none
    make pairs  any two values of two parameters of a test that starts ranks, where `make full` has not both in one test
    make slow   what is marked `slow` by hand, the other tests of `heavy` functions, and all other combinations of three
                and more parameters

What a function runs with never differs between runs.

Ranks are threads of pytest's process (`--worlds`), which takes less of the processor's time, but for tests whose claim is
about processes: files of `PROCESSES`, and tests marked `processes`. `make full` runs one test of each function of the others
in processes too (`--once`), and `make slow` all of them.
"""

from __future__ import annotations

import inspect
import itertools
import random
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import PurePosixPath
from types import CodeType, FunctionType
from typing import Any

import pytest

import ranks

COLLECTED = pytest.StashKey[list[Any]]()  # all tests, before pytest leaves any out
RANKS = ("world", "ranks")  # names of parameters that are a number of ranks
SHARED = ("stage", *RANKS)  # parameters whose values the functions of a file share out
STAGES = [
    pytest.param(stage, marks=[pytest.mark.full] * (stage in (0, 2))) for stage in range(4)
]  # of what takes seconds
BY_HAND = {"test_claims"}  # files that say themselves which of their tests are `full`
FEW = 2  # ranks: fewer share nothing, more cost more
PROCESSES = {  # files whose ranks have to be processes: with memory, sockets, signals or a device of their own
    "test_budgets", "test_checkpoint_faults", "test_compile", "test_delays", "test_derivatives", "test_device",
    "test_emuccl", "test_emulated", "test_emulated_activations", "test_emulated_faults", "test_emulated_grid", "test_emulated_launches",
    "test_emulated_offload", "test_emulated_streams", "test_ended", "test_faults", "test_harness",
    "test_hosts", "test_interrupts", "test_late", "test_launcher", "test_lost_ranks", "test_memory",
    "test_modes", "test_network", "test_other_device", "test_races", "test_seconds",
    "test_selection", "test_shared_memory", "test_signals", "test_watching", "test_world",
}  # fmt: skip


def cover(tests: Sequence[set[Any]], order: Sequence[int]) -> list[int]:
    """Which `tests` have all that any of them has, as few as a greedy choice finds; of equals, the first in `order`."""
    missing: set[Any] = set().union(*tests)
    chosen = []
    while missing:
        best = max(order, key=lambda at: len(missing & tests[at]))  # the first of equals
        chosen.append(best)
        missing -= tests[best]
    return sorted(chosen)


def function(item: Any) -> str:
    """The name of its function: the test's without its parameters."""
    return item.nodeid.partition("[")[0]


def parameters(item: Any) -> dict[str, str]:
    return {name: repr(value) for name, value in getattr(getattr(item, "callspec", None), "params", {}).items()}


def by_hand(item: Any) -> bool:
    return any(item.get_closest_marker(mark) for mark in ("full", "slow", "gpu"))


def needs_processes(item: Any) -> bool:
    """Whether its ranks have to be processes; those of tools/ are, which have commands of their own."""
    file = PurePosixPath(item.nodeid.partition("::")[0])
    return file.stem in PROCESSES or "tools" in file.parts or item.get_closest_marker("processes") is not None


def starts_ranks(item: Any) -> bool:
    """Whether it starts ranks or a command: a fixture or function of its file that it uses calls `ranks`, or it does."""
    if {"ranks", "world"} & set(item.fixturenames):
        return True
    here = vars(item.module)
    fixtures = [each[-1].func for each in item._fixtureinfo.name2fixturedefs.values()]
    todo = [item.function, *(each for each in fixtures if each.__module__ == item.module.__name__)]
    seen: set[str] = set()
    while todo:
        names = set(_names(todo.pop().__code__)) - seen
        seen |= names
        for name in names & here.keys():
            value = here[name].func if isinstance(here[name], partial) else inspect.unwrap(here[name])
            if value is ranks or getattr(value, "__module__", None) == ranks.run.__module__:
                return True
            if isinstance(value, FunctionType):
                todo.append(value)
    return False


def _names(code: CodeType) -> Iterator[str]:
    """What a function, and each function inside it, looks up outside."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def has(item: Any) -> set[Any]:
    """What is lost where neither this test nor another with the same runs: its function, values of parameters."""
    values = parameters(item).items()
    if starts_ranks(item):
        return {function(item)} | {value for value in values if value[0] in SHARED}
    return {function(item)} | {(function(item), *value) for value in values}


def mark(items: Sequence[Any]) -> None:
    """Mark `full` what `make test` leaves out. Of the items that were collected: a test asked for by name stays."""
    files: dict[str, list[Any]] = {}
    for item in items:
        if not by_hand(item):
            files.setdefault(item.nodeid.partition("::")[0], []).append(item)
    for name, found in files.items():
        order = list(range(len(found)))
        random.Random(name).shuffle(order)
        order.sort(key=lambda at: _many_ranks(found[at]))
        whole = PurePosixPath(name).stem in BY_HAND
        kept = {*order} if whole else set(cover([has(item) for item in found], order))
        for at, item in enumerate(found):
            if at not in kept:
                item.add_marker(pytest.mark.full)
    _leave_heavy_ones_to_slow([item for item in items if item.get_closest_marker("heavy")])
    functions: dict[str, list[Any]] = {}
    for item in items:
        if starts_ranks(item) and not any(item.get_closest_marker(mark) for mark in ("slow", "gpu")):
            functions.setdefault(function(item), []).append(item)
    for name, found in functions.items():
        _leave_to_pairs_and_slow(name, found)


def _leave_heavy_ones_to_slow(items: Sequence[Any]) -> None:
    """Mark `slow` all but one test of each of their functions that `make test` leaves out, and that one too if it has
    another."""
    functions: dict[str, list[Any]] = {}
    for item in items:
        if not any(item.get_closest_marker(mark) for mark in ("slow", "gpu")):
            functions.setdefault(function(item), []).append(item)
    for name, found in functions.items():
        left_out = [item for item in found if item.get_closest_marker("full")]
        random.Random(name).shuffle(left_out)
        for item in left_out if len(left_out) < len(found) else left_out[1:]:
            item.add_marker(pytest.mark.slow)


def _leave_to_pairs_and_slow(name: str, found: Sequence[Any]) -> None:
    """Mark tests of one function on ranks: `pairs` where it brings two values together, and no value that is new; `slow`
    where it brings nothing. Mark `once` the one whose ranks `make full` runs in processes: of its own, if it has one."""
    order = list(range(len(found)))
    random.Random(name).shuffle(order)
    kept = quick = {at for at, item in enumerate(found) if not item.get_closest_marker("full")}
    for mark, size in ((pytest.mark.pairs, 1), (pytest.mark.slow, 2)):
        groups = [{name, *itertools.combinations(sorted(parameters(item).items()), size)} for item in found]
        met: set[Any] = set().union(*(groups[at] for at in kept))
        kept = kept | set(cover([each - met for each in groups], order))
        for at in {*order} - kept:
            found[at].add_marker(mark)
    in_full = [at for at in order if found[at].get_closest_marker("full") and not found[at].get_closest_marker("pairs")]
    for at in (in_full or sorted(quick))[:1]:
        if not needs_processes(found[at]):
            found[at].add_marker(pytest.mark.once)


def _many_ranks(item: Any) -> int:
    values = parameters(item)
    return sum(abs(int(values[name]) - FEW) for name in RANKS if values.get(name, "").isdigit())
