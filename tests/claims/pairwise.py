"""A pairwise covering array: few cases, in which every two choices of different settings meet if they go together."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

Case = tuple[int, ...]  # for each setting the number of its choice; 0 goes with all choices of other settings
Pair = frozenset[tuple[int, int]]  # two choices, each as (setting, number)


def pairs(case: Case) -> set[Pair]:
    return set(map(frozenset, itertools.combinations(enumerate(case), 2)))


def draw(sizes: Sequence[int], legal: Callable[[Case], bool], seed: int = 0) -> list[Case]:
    """Return cases for all pairs but those that are in no legal case. The same ones for the same seed.

    sizes: how many choices each setting has. A case begins with a pair that is missing and choices that go with all;
    then each other setting, in a drawn order, takes the choice that adds most pairs.
    """
    rng = random.Random(seed)
    order = [
        ((a, i), (b, j))
        for a, b in itertools.combinations(range(len(sizes)), 2)
        for i, j in itertools.product(range(sizes[a]), range(sizes[b]))
    ]
    missing: set[Pair] = set(map(frozenset, order))
    rng.shuffle(order)
    cases: list[Case] = []
    for pair in order:
        if frozenset(pair) not in missing:
            continue
        if (case := _begun(sizes, legal, dict(pair))) is None:
            continue
        for at in rng.sample(range(len(sizes)), len(sizes)):
            if at not in dict(pair):
                others = [case[:at] + (choice,) + case[at + 1 :] for choice in rng.sample(range(sizes[at]), sizes[at])]
                others.sort(key=lambda each, at=at: -_added(each, at, missing))
                case = next(each for each in others if legal(each))
        cases.append(case)
        missing -= pairs(case)
    return cases


def _begun(sizes: Sequence[int], legal: Callable[[Case], bool], fixed: dict[int, int]) -> Case | None:
    """A legal case with two choices, and one other where these need it."""
    first = tuple(fixed.get(at, 0) for at in range(len(sizes)))
    if legal(first):
        return first
    third = ((at, choice) for at, size in enumerate(sizes) if at not in fixed for choice in range(1, size))
    found = (first[:at] + (choice,) + first[at + 1 :] for at, choice in third)
    return next(filter(legal, found), None)


def _added(case: Case, at: int, missing: set[Pair]) -> int:
    return sum(frozenset(((at, case[at]), other)) in missing for other in enumerate(case) if other[0] != at)
