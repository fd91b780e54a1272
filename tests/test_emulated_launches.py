"""How many kernels the engine launches, and when it launches each of them first, on the emulated accelerator."""

from __future__ import annotations

import sys
from collections import Counter

import pytest
import torch
from torch import nn

import emulated
import ranks
import zeroshard
from emulated import sites
from emulated.device import device
from zeroshard import Comm, Layout, Precision
from zeroshard.engine.gradients import sums

WIDTH, BLOCKS = 16, 4
DTYPES = {"fp32": None, "bf16": torch.bfloat16}
SUMS = (
    "kernels/warm_up.py",
    "engine/gradients/contribution.py",
    "engine/gradients/sums.py",
    "engine/gradients/accumulator.py",
    "arithmetic/sums.py",
    "arithmetic/exact_norms.py",
)


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(BLOCKS))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def sharded(stage, dtype, **settings):
    torch.manual_seed(0)
    model = Blocks().to("emu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    settings = {"precision": Precision(param_dtype=DTYPES[dtype]), **settings}
    return model, optimizer, zeroshard.shard(model, optimizer, stage=stage, **settings)


def one_step(model, optimizer, number, backwards=1):
    for index in range(backwards):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * number + 10 * index + ranks.rank()))
        model(x.to("emu", next(model.parameters()).dtype)).square().sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


class Kernels:
    """The kernels that the engine's sums launch from now on: name and dtypes of each."""

    def __init__(self):
        self._launch, self.found = device().launch, Counter()
        device().launch = self._noted

    def _noted(self, name, run, accesses=(), queue=None):
        accesses = list(accesses)
        (frame, *_) = sites.stack(sys._getframe(1)) or [None]
        if queue is None and frame is not None and str(frame).startswith(SUMS):
            self.found[(name, *(str(place.dtype) for place, _ in accesses))] += 1
        return self._launch(name, run, accesses, queue)

    def take(self):
        taken, self.found = self.found, Counter()
        return taken


def first_launches(stage, dtype, comm):
    kernels = Kernels()
    model, optimizer, _ = sharded(stage, dtype, comm=comm)
    before = kernels.take()
    for number in range(2):
        one_step(model, optimizer, number, backwards=2)
    return sorted(kernels.take().keys() - before.keys())


@pytest.mark.parametrize(("world", "replicas"), [(2, 1), pytest.param(3, 3, marks=pytest.mark.full)])
@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp32", marks=pytest.mark.full)])
def test_what_sums_and_norms_launch_was_launched_by_shard(world, replicas, dtype):
    """Its first launch loads a kernel, and may wait for all that the device has: then for messages too."""
    assert emulated.run(world, first_launches, 2, dtype, Comm(replicas=replicas)) == [[]] * world


SUMMED = (
    "arithmetic/sums.py:fold",
    "arithmetic/sums.py:average_",
    "engine/gradients/contribution.py",
    "comm/launch_log.py",
)


def launched(stage, dtype, backwards):
    """Kernels and collectives of a step's gathers and sums; how many buckets, and parameters, there are."""
    model, optimizer, zero = sharded(stage, dtype)
    assert zero._engine.layout == Layout().on(accelerator=True)
    one_step(model, optimizer, 0, backwards)
    with emulated.counted() as counts:
        one_step(model, optimizer, 1, backwards)
    found = Counter()
    for (site, name), number in counts.launches.items():
        if site.startswith(SUMMED):
            found[site.rpartition(":")[2], name] += number
    return len(zero.partition.buckets), dict(found)


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.full), 3])
def test_a_bucket_costs_so_many_launches(world):
    """Of a unit of four parameters, in one backward: two gathers, a copy for each gradient, an exchange, and its sum
    with one addition for each contribution."""
    per_bucket = {
        ("launch", "all_gather_single"): 2,
        ("launch", "all_to_all_single"): 1,
        ("add", "copy"): 4,
        ("fold", "copy"): 1,
        ("fold", "add_"): world - 1,
    }
    for buckets, found in emulated.run(world, launched, 3, "bf16", 1):
        assert buckets == BLOCKS
        assert found.pop(("launch", "allreduce")) == 1  # of all norms
        averages = {key: found.pop(key) for key in [*found] if key[0] == "average_"}  # of norms and clips as well
        assert found == {key: BLOCKS * number for key, number in per_bucket.items()}
        assert sum(averages.values()) <= 2 * BLOCKS


def streams_of_sums(stage, backwards):
    """By stream, how many kernels of a step's sums ran there."""
    model, optimizer, _ = sharded(stage, "bf16")
    one_step(model, optimizer, 0, backwards)
    launch, found = device().launch, Counter()

    def noted(name, run, accesses=(), queue=None):
        if any("arithmetic/sums.py" in str(frame) and str(frame).endswith("fold") for frame in sites.stack()):
            found["backward's" if device().current is device().machine.default else device().current.name] += 1
        return launch(name, run, accesses, queue)

    device().launch = noted
    try:
        one_step(model, optimizer, 1, backwards)
    finally:
        device().launch = launch
    return dict(found)


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.full), 3])
def test_sums_are_made_in_a_stream_of_their_own(stage):
    for found in emulated.run(2, streams_of_sums, stage, 2):
        assert len(found) == 1
        assert "backward's" not in found


def without(where, stage):
    """Train with the waits for the stream of sums left out: of memory that serves again, or of all that the end has."""
    if where == "again":
        sums._Messages.again = lambda self, memory: memory
    else:
        sums.Sums.join = lambda self: None
        sums._Messages.give_back = lambda self, state, memory: self._tier.give_back(state, memory)
    model, optimizer, _ = sharded(stage, "bf16")
    for number in range(2):
        one_step(model, optimizer, number, backwards=2)


@pytest.mark.parametrize("where", ["again", "end"])
def test_each_wait_for_the_stream_of_sums_is_needed(where):
    """The race detector finds what would be used, or freed, too early."""
    with pytest.raises(ranks.RankFailure, match="Race: (nothing orders two uses of bytes|memory is freed)"):
        emulated.run(2, without, where, 3)
