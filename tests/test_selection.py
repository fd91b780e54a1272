"""What `make test`, `make full` and `make slow` run: every test in one of them, every claim in the first."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import hypothesis
import pytest
from hypothesis import strategies as st

import selection

MAKEFILE = (Path(__file__).parents[1] / "Makefile").read_text()
SETS = {name: re.search(rf'^{name}:.*\n.*pytest -m "?([\w ]+?)"?(?: -|$)', MAKEFILE, re.MULTILINE)[1] for name in ("test", "full", "slow")}  # fmt: skip


def sets(item):
    """The targets that run it, by the marks that its own target's `-m` asks for."""
    marks = {name: item.get_closest_marker(name) is not None for name in ("full", "slow")}
    return [name for name, asked in SETS.items() if eval(asked, {}, marks)]


@pytest.fixture
def collected(request):
    """All tests that pytest found, those that `-m` or `-k` then left out too."""
    return request.config.stash[selection.COLLECTED]


def test_every_test_is_in_exactly_one_set(collected):
    assert {item.nodeid: sets(item) for item in collected if len(sets(item)) != 1} == {}


def test_make_test_runs_every_function(collected):
    """One at least of its tests, unless every one of them is marked by hand."""
    functions = defaultdict(list)
    for item in collected:
        functions[selection.function(item)].append(item)
    left_out = [found for found in functions.values() if not any("test" in sets(item) for item in found)]
    assert [item.nodeid for found in left_out for item in found if not selection.by_hand(item)] == []


def test_make_test_runs_every_value_of_every_parameter(collected):
    """Unless every test with that value is marked by hand."""
    values, quick = defaultdict(list), set()
    for item in collected:
        for name, value in getattr(getattr(item, "callspec", None), "params", {}).items():
            key = (selection.function(item), name, repr(value))
            if not selection.by_hand(item):
                values[key].append(item)
            if sets(item) == ["test"]:
                quick.add(key)
    assert [key for key in values if key not in quick] == []


def test_a_grid_is_thinned_to_its_longest_side():
    """Sixteen tests of four stages and four worlds become four; two functions need not pair them alike."""
    grid = [{"stage": stage, "world": world} for stage in range(4) for world in range(1, 5)]
    pairings = set()
    for name in "abcdef":
        kept = [grid[at] for at in selection.cover(grid, name)]
        assert (len(kept), len({case["stage"] for case in kept}), len({case["world"] for case in kept})) == (4, 4, 4)
        assert kept == [grid[at] for at in selection.cover(grid, name)]
        pairings.add(str(kept))
    assert len(pairings) > 1


def test_what_need_not_run_on_many_ranks_runs_on_two():
    cases = [{"case": case, "world": world} for case in range(20) for world in range(1, 5)]
    worlds = [cases[at]["world"] for at in selection.cover(cases, "")]
    assert [worlds.count(world) for world in range(1, 5)] == [1, 17, 1, 1]


@hypothesis.given(st.lists(st.fixed_dictionaries({name: st.integers(0, 3) for name in "abc"}), min_size=1), st.text())
def test_a_cover_has_every_value_and_nothing_twice(cases, name):
    """Any table of cases, grids with holes too. A case more brings at least one value that the others lack."""
    kept = selection.cover(cases, name)
    assert kept == sorted(set(kept))
    for key in "abc":
        assert {cases[at][key] for at in kept} == {case[key] for case in cases}
    assert len(kept) <= sum(len({case[key] for case in cases}) for key in "abc") - 2


class Found:
    """As much of a collected test as the selection looks at."""

    def __init__(self, nodeid, *marks, **params):
        self.nodeid, self.marks, self.callspec = nodeid, set(marks), SimpleNamespace(params=params)

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
