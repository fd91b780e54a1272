"""Backward stands still for the oldest sum only while that may come: ranks that differ cost bytes, and no time."""

from __future__ import annotations

import random
import time
from collections import Counter

import pytest
import torch
from torch import nn

import ranks
import reference
import zeroshard
from zeroshard import Comm
from zeroshard.device import DeviceEvent
from zeroshard.engine.gradients import reduction, sums

WIDTH, BLOCKS, STEPS = 8, 8, 4


class Chain(nn.Module):
    """Blocks of which each batch goes through some, behind a tower that some batches skip."""

    def __init__(self):
        super().__init__()
        self.tower = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x, tower, keep):
        for block in self.tower if tower else ():
            x = x + block(x)
        for number in keep:
            x = x + self.blocks[number](x)
        return self.head(x)


def route(plan, step, rank, ranks_):
    """(does it see the tower?, its blocks in their order), for one rank's batch."""
    draw = random.Random(f"{plan} {step} {rank}")
    everything = list(range(BLOCKS))
    if plan == "alike":
        return True, everything
    if plan == "tower":  # now and then, and each by itself
        return bool((step + rank) % 2), everything
    if plan == "one":  # one rank of all
        return rank != step % ranks_, everything
    if plan == "order":  # all of it, but one after the other as each likes
        return True, draw.sample(everything, BLOCKS)
    return draw.random() < 0.5, [each for each in everything if draw.random() < 0.6]


def loss_of(model, plan, step, rank, world):
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))
    return model(x, *route(plan, step, rank, world)).square().sum()


def made():
    torch.manual_seed(0)
    model = Chain()
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def plain(plan, world):
    """The weights of one process that goes through all ranks' batches."""
    model, optimizer = made()
    for step in range(STEPS):
        for rank in range(world):
            loss_of(model, plan, step, rank, world).backward()
        for param in model.parameters():
            if param.grad is not None:
                param.grad.div_(world)
        optimizer.step()
        optimizer.zero_grad()
    return reference.weights(model)


def trained(plan, stage, comm, late=None):
    """(why pauses were in vain, the weights, the most bytes held in backwards). late: by rank, how much in each block."""
    model, optimizer = made()
    zero = zeroshard.shard(model, optimizer, stage=stage, comm=comm)
    zero._engine.reduction.pause = reduction.UNHURRIED  # one that ran out of time would take a minute
    if late:
        for block in model.blocks:
            block[0].register_full_backward_hook(lambda *_: reduction.time.sleep(late[ranks.rank()] * reduction.ASKS))
    for step in range(STEPS):
        loss_of(model, plan, step, ranks.rank(), ranks.world()).backward()
        optimizer.step()
        optimizer.zero_grad()
    with zero.gathered():
        return zero._engine.reduction.in_vain, reference.weights(model), zero.ledger().phases["backward"].total


GLOO = {"stage0": (0, Comm(transport="gloo")), "stage3": (3, Comm(transport="gloo"))}
SHARED = {"shared0": (0, Comm()), "shared3": (3, Comm())}
REPLICAS = {"replicas": (2, Comm(replicas=2, transport="gloo"))}


@pytest.mark.heavy
@pytest.mark.parametrize(
    "plan", ["tower", "one", "order", "drawn", pytest.param("drawn again", marks=pytest.mark.full)]
)
@pytest.mark.parametrize(
    ("world", "where"),
    [(2, GLOO | SHARED), (3, GLOO), (4, REPLICAS), pytest.param(9, GLOO, marks=pytest.mark.full)],
    ids=["two", "three", "replicas", "a grid of nine"],
)
def test_ranks_that_differ_do_not_wait_for_sums_that_cannot_come(plan, world, where):
    """Not one of their pauses runs out of time, and the bits are those of one process."""
    want = plain(plan, world)
    for stage, comm in where.values():
        for in_vain, weights, _ in ranks.run(world, trained, plan, stage, comm):
            assert in_vain["time"] == 0, (stage, comm)
            reference.assert_same(weights, want)


def differing(plan, stage):
    return trained(plan, stage, Comm(transport="gloo"))[0]


@pytest.mark.parametrize("stage", [1, 3])
def test_a_rank_that_others_wait_for_is_told_of_it(stage):
    """Where it could not be, the minute would pass: so the test above claims something."""
    assert sum(each["parted"] for each in ranks.run(2, differing, "tower", stage)) > 0


@pytest.mark.parametrize("late", [(0, 3), (3, 0), (0, 0.5, 3)], ids=["the last", "the first", "two"])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_slow_rank_of_ranks_that_do_the_same_is_waited_for(late, stage):
    """However often the others ask: not one goes on without it, and they hold what they hold where none is slow."""
    comm = Comm(transport="gloo")
    quick, slow = (ranks.run(len(late), trained, "alike", stage, comm, each) for each in (None, late))
    for (_, weights, most), (in_vain, same, held) in zip(quick, slow, strict=True):
        assert in_vain == Counter()
        assert held == most
        reference.assert_same(same, weights)


class Late(DeviceEvent):
    """One that a device comes to after some time."""

    def __init__(self, *_):
        self.due = time.monotonic() + 0.02

    def is_completed(self):
        return time.monotonic() > self.due


def behind_its_host(stage):
    """Why pauses were in vain, of one rank whose device is late, bucket by bucket, and how many events there were."""
    made_, send = [], sums.Sums.send

    def sends(self, contribution):
        send(self, contribution)
        self._sent[-1].work.after(self._sent[-1].own)
        made_.append(self._sent[-1].own)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sums, "event", Late)
        patch.setattr(sums.Sums, "send", sends)
        model, optimizer = made()
        zero = zeroshard.shard(model, optimizer, stage=stage)
        zero._engine.reduction.pause = 0.001
        loss_of(model, "alike", 0, 0, 1).backward()
        return zero._engine.reduction.in_vain, len(made_)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_device_that_is_behind_its_host_is_waited_for_without_limit(stage):
    """What the own device has still to do is no delay of another rank, though it takes longer than the pause."""
    ((in_vain, sent),) = ranks.run(1, behind_its_host, stage)
    assert in_vain == Counter()
    assert sent > reduction.IN_FLIGHT
