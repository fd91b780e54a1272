"""Coordinates of ranks on a grid with named axes, beside NumPy's, and the teams that lie along its axes."""

import itertools

import numpy
import pytest

from zeroshard.layout.mesh import Grid
from zeroshard.layout.stage import seat, seat_on

LENGTHS = [*itertools.product((1, 2, 3), (1, 2, 4), (1, 5))]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_ranks_lie_as_in_an_array_of_their_shape(lengths):
    """Every coordinate, every line through a rank, and all lines along an axis by their first ranks."""
    grid = Grid(tuple(zip("abc", lengths, strict=True)))
    ranks = numpy.arange(grid.ranks).reshape(lengths)
    assert grid.ranks == ranks.size
    for at, axis in enumerate("abc"):
        along = numpy.moveaxis(ranks, at, -1).reshape(-1, lengths[at])
        assert [[*line] for line in grid.lines(axis)] == sorted(along.tolist())
        for rank, place in enumerate(numpy.ndindex(*lengths)):
            assert grid.coordinate(rank, axis) == place[at]
            assert [[*grid.line(rank, axis)]] == [line for line in along.tolist() if rank in line]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_what_came_along_an_axis_is_merged_in_rank_order(lengths):
    grid = Grid(tuple(zip("abc", lengths, strict=True)))
    for axis in "abc":
        assert grid.in_rank_order(axis, [[*line] for line in grid.lines(axis)]) == [*range(grid.ranks)]
    assert grid.in_rank_order("b", ["xyz"]) == ["x", "y", "z"]


@pytest.mark.parametrize(("ranks", "replicas"), [(1, 1), (6, 1), (6, 2), (6, 3), (8, 4)])
def test_replicas_follow_one_another(ranks, replicas):
    """r = replica * size + position."""
    size = ranks // replicas
    seats = [seat(rank, ranks, replicas) for rank in range(ranks)]
    assert [(each.replica, each.position) for each in seats] == [divmod(rank, size) for rank in range(ranks)]
    for rank, each in enumerate(seats):
        assert each.members(rank) == range(rank // size * size, rank // size * size + size)
        assert each.everyones() == seats
        assert len(each.teams()) == replicas


@pytest.mark.parametrize("axes", [{"dp": 2, "tp": 3}, {"pp": 2, "dp": 3, "tp": 2}, {"dp": 4}], ids=str)
def test_teams_along_an_axis_are_numbered_by_their_first_ranks(axes):
    ranks = int(numpy.prod([*axes.values()]))
    for name in axes:
        seats = [seat_on(rank, axes, name) for rank in range(ranks)]
        for rank, each in enumerate(seats):
            team = each.teams()[each.part]
            assert team[each.position] == rank and team == each.members(rank)
            assert (each.size, each.parts) == (axes[name], ranks // axes[name])
        assert seats[0].everyones() == (seats if ranks > axes[name] else seats[0].everyones())
