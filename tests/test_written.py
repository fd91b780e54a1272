"""Weights that a forward writes: the same values on every rank, or all ranks are told at the next step."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import emulated
import ranks
import zeroshard
from zeroshard.errors import PeerError

STAGES = (0, 1, 2, 3)


class Norm(nn.Module):
    """ActNorm of Glow: its first forward sets the weights from the batch."""

    def __init__(self, size, how):
        super().__init__()
        self.loc, self.how, self.done = nn.Parameter(torch.zeros(size)), how, False

    def forward(self, x):
        if not self.done or self.how == "always":
            mean = -x.detach().mean(0)
            if self.how == "sent":
                dist.broadcast(mean, 0)
            with torch.no_grad():
                (self.loc.data if self.how == "data" else self.loc).copy_(mean)
            self.done = True
        return x + self.loc


def train(stage, how, *, size=256, apart=True, device="cpu", first=0):
    """What the ranks hear, at which step, and the weights that they have at the end."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, size), Norm(size, how), nn.Linear(size, 4)).to(device)
    model[1].done = bool(first)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    zero = zeroshard.shard(model, optimizer, stage=stage)
    if how == "gathered":
        with zero.gathered(write_from=0), torch.no_grad():
            model(torch.full((2, 4), 1.0 + ranks.rank(), device=device))
    for step in range(3):
        if first and step == first:
            model[1].done = False
        model(torch.full((2, 4), 1.0 + apart * ranks.rank(), device=device)).square().mean().backward()
        try:
            optimizer.step()
        except PeerError as error:
            return step, str(error)
        optimizer.zero_grad()
    with zero.gathered():
        return [each.detach().cpu().clone() for each in model.parameters()]


def same(found, weights):
    return all(torch.equal(one, other) for rank in found for one, other in zip(rank, weights, strict=True))


def on_a_device(stage):
    return train(stage, "data", device="emu")


@pytest.mark.row(68)
@pytest.mark.parametrize("size", [256, 4])  # small ones join a unit; each rank has a part, or one rank has all
@pytest.mark.parametrize("how", ["param", "data"])
@pytest.mark.parametrize("stage", STAGES)
def test_other_values_on_each_rank_are_named_at_the_step(stage, how, size):
    for step, said in ranks.run(2, train, stage, how, size=size):
        assert step == 0 and "a forward wrote 1.loc " in said and "0.weight" not in said
        assert "torch.distributed.broadcast(value, 0) before it writes" in said


@pytest.mark.row(68)
@pytest.mark.parametrize("stage", STAGES)
def test_so_they_are_after_many_steps(stage):
    for step, said in ranks.run(2, train, stage, "param", first=2):
        assert step == 2 and "a forward wrote 1.loc " in said


@pytest.mark.parametrize("how", ["param", "data", "always"])
def test_equal_values_are_nobodys_business(how):
    found = [ranks.run(2, train, stage, how, apart=False) for stage in STAGES]
    assert same([*found[0], *found[3]], found[1][0])


@pytest.mark.parametrize("how", ["sent", "gathered"])
def test_what_the_error_says_to_write_instead(how):
    found = [ranks.run(2, train, stage, how) for stage in STAGES]
    assert same([rank for run in found for rank in run], found[0][0])


@pytest.mark.row(68)
@pytest.mark.parametrize("stage", [1, 3])
def test_on_a_device_the_first_forward_is_looked_at(stage):
    for step, said in emulated.run(2, on_a_device, stage):
        assert step == 0 and "a forward wrote 1.loc " in said
