"""Agreement over many ranks: rows travel along the axes of a grid, and all are shown only where two differ."""

from __future__ import annotations

import math
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import ranks as rank_processes
import zeroshard
from zeroshard import Comm, Layout
from zeroshard.comm import agreement
from zeroshard.errors import PeerError
from zeroshard.layout import mesh
from zeroshard.policies.comm import Simulated

ROW = 8 * agreement.ROW  # bytes


@pytest.mark.parametrize("world", [1, 2, 3, 4, 6, 7, 8, 9, 12, 16, 60, 64, 1000, 1021, 1024, 4096])
def test_every_rank_lies_on_one_line_of_each_axis(world):
    """The lines of an axis split the ranks, and two ranks that share one list the same ranks."""
    assert math.prod(agreement.axes(world)) == world
    everyone = [agreement.lines(world, rank) for rank in range(world)]
    for axis, length in enumerate(agreement.axes(world)):
        found = [tuple(lying[axis]) for lying in everyone]
        assert all(rank in line and len(line) == length for rank, line in enumerate(found))
        assert sorted(rank for line in set(found) for rank in line) == list(range(world))


@pytest.mark.parametrize(("world", "messages"), [(2, 1), (4, 3), (8, 7), (16, 8), (64, 14), (1024, 22), (4096, 28)])
@pytest.mark.parametrize(("stage", "exchanges"), [(0, 4), (1, 4), (2, 4), (3, 5)])
def test_messages_of_a_simulated_step(world, messages, stage, exchanges):
    """A forward meets once (twice at stage 3), a backward twice, a step once; each row goes along every axis."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero = zeroshard.shard(model, optimizer, stage=stage, comm=Comm(group=Simulated(0, world)))
    for _ in range(2):  # the first step negotiates what it gathers
        before = zero.ledger().traffic.get("control")
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
    after = zero.ledger().traffic["control"]
    assert after.calls - before.calls == exchanges
    assert after.sent - before.sent == exchanges * messages * ROW


@contextmanager
def short_axes(longest):
    usual, mesh.LONGEST_AXIS = mesh.LONGEST_AXIS, longest
    try:
        yield
    finally:
        mesh.LONGEST_AXIS = usual


class Branches(nn.Module):
    """Ranks use different layers, so that gathers are negotiated and rows differ at the end of backward."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x, which):
        for at in which:
            x = torch.tanh(self.blocks[at](x))
        return x


def over_short_axes(longest, stage, alike):
    """The weights after three steps, exchanged along axes of at most so many ranks; and how many axes there are."""
    rank = rank_processes.rank()
    with short_axes(longest):
        torch.manual_seed(0)
        model = Branches()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        zero = zeroshard.shard(model, optimizer, stage=stage, layout=Layout(bucket_mib=0.001))
        axes = len(zero._engine.group._groups.axes)
        for step in range(3):
            which = range(3) if alike else [(rank + step) % 3, (rank * step) % 3]
            model(torch.full((2, 16), 0.1 * (rank + 1)), which).square().sum().backward()
            zero.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        with zero.gathered():
            return axes, {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.full
@pytest.mark.parametrize("alike", [True, False], ids=["alike", "branching"])
@pytest.mark.parametrize(("world", "longest", "axes"), [(4, 2, 2), (6, 3, 2)])
@pytest.mark.parametrize("stage", [1, 3])
def test_how_rows_travel_changes_no_bit(ranks, world, longest, axes, stage, alike):
    direct = ranks.run(world, over_short_axes, 8, stage, alike)
    along = ranks.run(world, over_short_axes, longest, stage, alike)
    assert [found for found, _ in direct] == [1] * world and [found for found, _ in along] == [axes] * world
    for (_, got), (_, want) in zip(along, direct, strict=True):
        assert all(torch.equal(got[name], want[name]) for name in want)


def one_forward_more(longest):
    """What every rank hears where one of them is a forward ahead."""
    with short_axes(longest):
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        zero = zeroshard.shard(model, optimizer, stage=1)
        model(torch.ones(1, 4))
        with pytest.raises(PeerError) as caught:
            if zero.rank == 2:
                model(torch.ones(1, 4))
            else:
                optimizer.step()
        return str(caught.value)


@pytest.mark.row(6)
def test_ranks_that_differ_are_named_whichever_way_rows_travel(ranks):
    direct, along = (ranks.run(4, one_forward_more, longest) for longest in (8, 2))
    assert along == direct
    for told in along:
        assert "rank 0 is at step 1; rank 1 is at step 1; rank 2 is at forward 2; rank 3 is at step 1" in told
