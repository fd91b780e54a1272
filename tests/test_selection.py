"""What `make test`, `full`, `pairs` and `slow` run: every test in one of them, every claim in the first."""

from __future__ import annotations

import itertools
import re
import sys
import types
from collections import Counter, defaultdict
from functools import partial
from pathlib import Path

import hypothesis
import pytest
from hypothesis import strategies as st

import ranks
import selection

MAKEFILE = (Path(__file__).parents[1] / "Makefile").read_text()
SETS = {name: re.search(rf'^{name}:.*\n.*pytest -m "?([\w ()]+?)"?(?: -|$)', MAKEFILE, re.MULTILINE)[1] for name in ("test", "full", "pairs", "slow")}  # fmt: skip


def sets(item):
    """The targets that run it, by the marks that its own target's `-m` asks for."""
    marks = {name: item.get_closest_marker(name) is not None for name in ("full", "pairs", "slow", "once")}
    return [name for name, asked in SETS.items() if eval(asked, {}, marks)]


@pytest.fixture
def collected(request):
    """All tests that pytest found, those that `-m` or `-k` then left out too."""
    return request.config.stash[selection.COLLECTED]


def test_every_test_is_in_exactly_one_set(collected):
    """But of each function that has its ranks in worlds `make full` runs one test in processes, one of its own or of
    `make test`'s."""
    once = {item.nodeid for item in collected if item.get_closest_marker("once")}
    found = {item.nodeid: sets(item) for item in collected}
    wrong = {test: of for test, of in found.items() if len(of) != 1 and not (test in once and of == ["test", "full"])}
    assert wrong == {}
    assert not any(item.nodeid in once and selection.needs_processes(item) for item in collected)
    threads = [item for item in collected if {"test", "full"} & {*found[item.nodeid]} and selection.starts_ranks(item)]
    threads = [item for item in threads if not selection.needs_processes(item) and not item.get_closest_marker("gpu")]
    in_processes = Counter(selection.function(item) for item in threads if item.nodeid in once)
    assert {selection.function(item): in_processes[selection.function(item)] for item in threads} == {**in_processes}
    assert {*in_processes.values()} <= {1}


def test_make_test_runs_every_function(collected):
    """One at least of its tests, unless every one of them is marked by hand."""
    functions = defaultdict(list)
    for item in collected:
        functions[selection.function(item)].append(item)
    left_out = [found for found in functions.values() if not any("test" in sets(item) for item in found)]
    assert [item.nodeid for found in left_out for item in found if not selection.by_hand(item)] == []


def test_make_test_runs_every_value_and_in_each_file_every_stage_and_number_of_ranks(collected):
    """Every value of a function's parameters where it starts no ranks; where all with that are marked by hand, none."""
    has, quick = defaultdict(list), set()
    for item in collected:
        file = item.nodeid.partition("::")[0]
        for each in selection.has(item):
            if not selection.by_hand(item):
                has[file, each].append(item)
            if "test" in sets(item):
                quick.add((file, each))
    assert [each for each in has if each not in quick] == []


def test_make_test_is_a_part(collected):
    """A choice that chose everything would pass the tests above."""
    assert sum("test" in sets(item) for item in collected) < len(collected) / 2 or len(collected) < 1000


def in_process():
    return [1 for _ in range(2)]


def on_ranks():
    def inner():
        return ranks.run(1, in_process)

    return inner()


command = partial(ranks.command, timeout=10)


@pytest.mark.parametrize(
    ("test", "starts"),
    [
        (in_process, False),
        (on_ranks, True),
        (lambda: in_process(), False),
        (lambda: on_ranks(), True),
        (lambda: command("plan"), True),
    ],
)
def test_what_starts_ranks_is_known_from_what_it_calls(test, starts):
    """By itself, in a function inside it, in a function of the file, and by a command."""
    found = Found("f", function=test, module=sys.modules[__name__])
    assert selection.starts_ranks(found) is starts
    fixtures = Found("f", function=in_process, module=sys.modules[__name__], fixturenames=["world"])
    assert selection.starts_ranks(fixtures)


def grid(test, file="a.py", **parameters):
    """The tests of a function for every combination of its parameters' values."""
    return [
        Found(
            f"{file}::{test.__name__}[{'-'.join(map(str, case))}]",
            function=test,
            **dict(zip(parameters, case, strict=True)),
        )
        for case in itertools.product(*parameters.values())
    ]


def kept(items):
    selection.mark(items)
    return [item.callspec.params for item in items if not item.marks & {"full", "pairs", "slow"}]


def test_functions_on_ranks_share_out_the_stages_and_ranks_of_their_file():
    """Sixteen combinations of each of two functions: four tests in all, with each stage and each number of ranks once."""
    worlds = range(1, 5)
    found = kept(grid(on_ranks, stage=range(4), world=worlds) + grid(lambda: on_ranks(), stage=range(4), world=worlds))
    assert sorted(case["stage"] for case in found) == [0, 1, 2, 3]
    assert sorted(case["world"] for case in found) == [1, 2, 3, 4]


def test_what_may_run_on_any_number_of_ranks_runs_on_two():
    others = [types.FunctionType(on_ranks.__code__, globals(), f"f{at}") for at in range(20)]
    worlds = [case["world"] for case in kept([item for f in others for item in grid(f, kind="ab", world=range(1, 5))])]
    assert [worlds.count(world) for world in range(1, 5)] == [1, 17, 1, 1]


def values_in(items, size, *without):
    """Any `size` values that are together in one of the tests that none of these marks leaves out."""
    cases = [sorted(item.callspec.params.items()) for item in items if not item.marks & set(without)]
    return len(cases), {each for case in cases for each in itertools.combinations(case, size)}


def test_every_value_is_in_what_is_not_left_to_pairs_and_any_two_in_what_is_not_slow():
    """Of 64 combinations 4 have every value, and 16 at least any two; of two parameters 16 are all that there are."""
    for parameters in ({"kind": "abcd", "how": "wxyz", "stage": range(4)}, {"kind": "abcd", "how": "wxyz"}):
        found = grid(on_ranks, **parameters)
        selection.mark(found)
        for size, marks, least, most in ((1, ("pairs", "slow"), 4, 7), (2, ("slow",), 16, 24)):
            count, met = values_in(found, size, *marks)
            assert least <= count <= most
            assert met == values_in(found, size)[1]
    for whole in (grid(in_process, kind="abcd", how="wxyz", stage=range(4)), grid(on_ranks, kind="abcd")):
        selection.mark(whole)
        assert not any(item.marks & {"pairs", "slow"} for item in whole)


def test_a_table_that_starts_no_ranks_runs_whole():
    assert len(kept(grid(in_process, case=range(30)))) == 30
    assert len(kept(grid(in_process, stage=range(4), world=range(1, 5)))) == 4
    assert len(kept(grid(on_ranks, case=range(30)))) == 1


def test_the_choice_is_the_same_every_time():
    first, again = (kept(grid(on_ranks, case=range(9), stage=range(4))) for _ in range(2))
    assert first == again


@hypothesis.given(st.lists(st.sets(st.integers(0, 9), min_size=1), min_size=1), st.randoms())
def test_a_cover_has_everything_and_no_test_in_vain(tests, random):
    """Each test that is chosen brings at least one thing that those chosen before it lack."""
    order = random.sample(range(len(tests)), len(tests))
    chosen = selection.cover(tests, order)
    assert chosen == sorted(set(chosen))
    assert set().union(*(tests[at] for at in chosen)) == set().union(*tests)
    assert len(chosen) <= len(set().union(*tests))


class Found:
    """As much of a collected test as the selection looks at."""

    def __init__(self, nodeid, *marks, function=None, module=None, fixturenames=(), **params):
        self.nodeid, self.marks, self.callspec = nodeid, set(marks), types.SimpleNamespace(params=params)
        self.function, self.module, self.fixturenames = (
            function or in_process,
            module or sys.modules[__name__],
            fixturenames,
        )
        self._fixtureinfo = types.SimpleNamespace(name2fixturedefs={})

    def get_closest_marker(self, name):
        return name if name in self.marks else None

    def add_marker(self, mark):
        self.marks.add(mark.name)


def test_marks_by_hand_stay_and_what_they_leave_is_covered():
    """A value whose other tests are slow is not lost; a test asked for by its name is never thinned away."""
    grid = [Found(f"f[{a}-{b}]", *(["slow"] if a else []), a=a, b=b) for a in (0, 1) for b in (0, 1, 2)]
    selection.mark(grid)
    assert [sorted(item.marks) for item in grid] == [[], [], [], ["slow"], ["slow"], ["slow"]]
    for item in (Found("f[0-0]", a=0, b=0), Found("f[]")):
        selection.mark([item])
        assert item.marks == set()


def test_of_heavy_ones_full_has_one_at_most():
    """None where `make test` has one of the same function; all others are for `make slow`."""
    shared = [Found(f"a.py::f[{a}]", "heavy", function=on_ranks, a=a) for a in range(5)]
    by_hand = [Found(f"a.py::g[{a}]", "heavy", "full", function=on_ranks, a=a) for a in range(5)]
    selection.mark(shared + by_hand)
    assert Counter(tuple(sets(item)) for item in shared) == {("test", "full"): 1, ("slow",): 4}  # `once`, in processes
    assert Counter(tuple(sets(item)) for item in by_hand) == {("full",): 1, ("slow",): 4}
