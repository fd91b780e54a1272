"""Ranks with different numbers of batches: the contribution of one that has none left is zero."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import norms
import ranks as rank_processes
import reference
import selection
import zeroshard
from zeroshard import Comm, Precision
from zeroshard.errors import StateError

LENGTHS = {2: [[3, 1], [1, 3], [2, 2]], 3: [[1, 3, 2], [4, 1, 1]], 1: [[2]]}


class Net(nn.Module):
    """`extra` is used by every second batch only."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.extra = nn.Linear(6, 6)

    def forward(self, x, use):
        y = self.body(x)
        return self.extra(y) if use else y


def batches(rank: int, length: int):
    generator = torch.Generator().manual_seed(rank)
    for index in range(length):
        yield torch.randn(4, 6, generator=generator), (rank + index) % 2


def trainer(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def joined(lengths: list[int], stage: int, accumulate: int = 1, **options):
    rank = rank_processes.rank()
    model = Net()
    optimizer, scheduler = trainer(model)
    zero = zeroshard.shard(model, optimizer, stage=stage, **options)
    for count, (x, use) in enumerate(zero.join(batches(rank, lengths[rank])), 1):
        model(x, use).square().mean().backward()
        if count % accumulate == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    with zero.gathered():
        return reference.weights(model), count


def plain(lengths: list[int], accumulate: int = 1):
    """One process that adds up what the ranks have, in their order, and divides by their number."""
    model = Net()
    optimizer, scheduler = trainer(model)
    loaders = [list(batches(rank, length)) for rank, length in enumerate(lengths)]
    for index in range(max(lengths)):
        for loader in loaders:
            if index < len(loader):
                model(*loader[index]).square().mean().backward()
        if (index + 1) % accumulate == 0:
            grads = [param.grad for param in model.parameters() if param.grad is not None]
            for grad in grads:
                grad.div_(len(lengths))
            reference.clip_(grads, 0.1, norm=norms.total)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return reference.weights(model)


@pytest.mark.row(80)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("stage", selection.STAGES)
@pytest.mark.parametrize("world", LENGTHS)
def test_a_rank_without_batches_contributes_zero(ranks, world, stage, accumulate):
    """The sum of those that have one, divided by the number of ranks; a layer that no such rank used gets none."""
    for lengths in LENGTHS[world]:
        wanted = plain(lengths, accumulate)
        for weights, count in ranks.run(world, joined, lengths, stage, accumulate):
            assert count == max(lengths)
            assert reference.first_difference(weights, wanted) == "", lengths


@pytest.mark.row(80)
@pytest.mark.parametrize(
    "options",
    [{"comm": Comm(overlap=False)}, {"comm": Comm(reduce="native")}, {"precision": Precision(nonfinite="raise")}],
    ids=["in turn", "native", "nonfinite"],
)
def test_a_rank_without_batches_contributes_zero_however_they_talk(ranks, options):
    wanted = plain([3, 1])
    for weights, _ in ranks.run(2, joined, [3, 1], 3, **options):
        assert reference.first_difference(weights, wanted) == ""


def joined_under_no_sync(lengths: list[int], stage: int):
    rank = rank_processes.rank()
    model = Net()
    optimizer, _ = trainer(model)
    zero = zeroshard.shard(model, optimizer, stage=stage)
    with zero.no_sync():
        for x, use in zero.join(batches(rank, lengths[rank])):
            model(x, use).square().mean().backward()
    optimizer.step()
    with zero.gathered():
        return reference.weights(model)


@pytest.mark.row(80)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_rank_without_batches_adds_nothing_under_no_sync(ranks, stage):
    """Each rank's own sum is sent once: with one batch there is nothing more in it than that batch's."""
    model = Net()
    optimizer, _ = trainer(model)
    model(*next(batches(0, 1))).square().mean().backward()
    own = [None if param.grad is None else param.grad.clone() for param in model.parameters()]
    optimizer.zero_grad()
    for x, use in batches(1, 3):
        model(x, use).square().mean().backward()
    for param, first in zip(model.parameters(), own, strict=True):
        param.grad = (param.grad if first is None else first + param.grad).div_(2)
    optimizer.step()
    for weights in ranks.run(2, joined_under_no_sync, [1, 3], stage):
        assert reference.first_difference(weights, reference.weights(model)) == ""


def buffers_of(lengths: list[int], stage: int):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rank, seen = rank_processes.rank(), []
    zero = zeroshard.shard(model, optimizer, stage=stage)
    for x, _ in zero.join(batches(rank, lengths[rank])):
        model(x).square().mean().backward()
        seen.append(model[1].running_mean.clone())
        optimizer.step()
        optimizer.zero_grad()
    return seen, model[1].running_mean.clone()


@pytest.mark.row(80)
@pytest.mark.parametrize("stage", [1, 3])
def test_buffers_are_those_of_a_rank_that_has_a_batch(ranks, stage):
    """Rank 0 has run out: what its repeated batch makes of running statistics counts nowhere, on it neither."""
    (_, first), (seen, second) = ranks.run(2, buffers_of, [1, 3], stage)
    assert torch.equal(first, second) and torch.equal(second, seen[-1])


def empty(length: int, more: bool):
    model = Net()
    optimizer, _ = trainer(model)
    zero = zeroshard.shard(model, optimizer)
    rank = rank_processes.rank()
    try:
        for x, use in zero.join(batches(rank, length if rank == 0 else 0)):
            model(x, use).square().mean().backward()
    except StateError as error:
        return str(error)
    for index, (x, use) in enumerate(zero.join(batches(rank, 2))):
        model(x, use).square().mean().backward()
        if index == 0 and more:
            break
    return model.body[0].weight.grad is not None


@pytest.mark.row(80)
def test_a_rank_without_any_batch_is_an_error_on_all(ranks):
    for said in ranks.run(2, empty, 3, False, group_timeout=100.0, timeout=30.0):
        assert said.startswith("a rank has no batch at all") and "where: rank 1" in said


@pytest.mark.row(80)
@pytest.mark.parametrize("more", [False, True], ids=["to the end", "left early"])
def test_loops_without_batches_end_at_once_and_others_may_be_left(ranks, more):
    assert ranks.run(2, empty, 0, more, group_timeout=100.0, timeout=30.0) == [True, True]
