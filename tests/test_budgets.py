"""What a step costs an accelerator: how often the host waits for it, and how many kernels it launches."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from itertools import product

import pytest
import torch
from torch import nn

import emulated
import models
import ranks
import reference
import zeroshard
from test_emulated import DTYPES, GPT, STAGES, loss, on, optimizer
from zeroshard import Layout, Precision, device


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x).tanh()
        return x


def shard(model, where, stage, dtype=None, **layout):
    model = model.to(where)
    adam = optimizer(model.parameters())
    settings = Layout(bucket_mib=0.01, **layout)
    return adam, zeroshard.shard(model, adam, stage=stage, precision=Precision(param_dtype=dtype), layout=settings)


# --- edits --------------------------------------------------------------------------------------------------------------------


def edited(where, stage, dtype):
    """The weights after steps in which a forward has edited its own, and the program others between two."""
    adam, zero = shard(model := Net(), where, stage, dtype)
    edits = [lambda p: p.data.mul_(1.5), lambda p: p.add_(0.25), lambda p: setattr(p, "data", p.data * 0.5)]

    @torch.no_grad()
    def edit(module, *_):
        for param in module.parameters():
            edits[step](param)

    model.blocks[0].register_forward_pre_hook(edit)
    for step in range(3):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(8 * step + ranks.rank()))
        model(x.to(where, dtype)).float().square().sum().backward()
        with zero.gathered() if stage == 3 else nullcontext():
            edit(model.blocks[1])
        before = Counter(device.asked)
        adam.step()
        adam.zero_grad()
        first = {"engine.weights.written._told"} if step == 0 else set()  # what a first forward has written is compared
        assert set(device.asked - before) <= first
    with zero.gathered():
        return reference.weights(model)


def edits_are_taken():
    for dtype, stage in product(DTYPES.values(), STAGES):
        reference.assert_same(edited("emu", stage, dtype), edited("cpu", stage, dtype))


@pytest.mark.full
@pytest.mark.parametrize("world", [1, 2], ids="ranks{}".format)
def test_a_device_takes_what_was_edited_without_being_asked(world):
    """Edits in a forward and between steps have the bits that they have on the CPU, and a step but the first asks nothing."""
    emulated.run(world, edits_are_taken, seed=world, timeout=120)


# --- what a step asks ---------------------------------------------------------------------------------------------------------


def nothing_is_asked(stages):
    """Of a step with two backwards that clips and prints nothing; the first one makes what is kept."""
    for dtype, stage in product(DTYPES.values(), stages):
        adam, _ = shard(model := Net(), "emu", stage, dtype)
        x = torch.randn(4, 6).to("emu", dtype)
        for _ in range(3):
            before = Counter(device.asked)
            with emulated.counted() as counts:
                for _ in range(2):
                    model(x).float().square().sum().backward()
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                adam.step()
                adam.zero_grad()
        assert not counts.drains and before == device.asked, (dtype, stage, counts.drains, device.asked - before)
        assert norm.device.type == "emu" and norm.item() > 0


@pytest.mark.row(107)
@pytest.mark.parametrize(
    ("world", "stages"),
    [(2, (0, 3)), pytest.param(2, (1, 2), marks=pytest.mark.full), pytest.param(1, STAGES, marks=pytest.mark.full)],
)
def test_a_step_that_clips_waits_for_the_device_nowhere(world, stages):
    emulated.run(world, nothing_is_asked, stages, seed=world, timeout=120)


# --- GradScaler ---------------------------------------------------------------------------------------------------------------


def scaled():
    """What the verdict of one step asks, beside what GradScaler asks itself; and the steps that are passed over."""
    adam, _ = shard(model := Net(), "emu", 3)
    scaler = torch.amp.GradScaler("emu", init_scale=2.0, growth_interval=100)
    found, skipped = [], []
    for step in range(3):
        x = torch.full((4, 6), float("inf") if step == 1 else 1.0, device="emu")
        scaler.scale(model(x).square().sum() if step == 1 else model(x).sum()).backward()
        before = Counter(device.asked)
        with emulated.counted() as counts:
            scaler.unscale_(adam)
        found.append((sum((device.asked - before).values()), counts.drains.total()))
        weights = [param.clone() for param in adam.param_groups[0]["params"]]
        scaler.step(adam)
        scaler.update()
        adam.zero_grad()
        skipped.append(all(map(torch.equal, weights, adam.param_groups[0]["params"])))
    return found, skipped, scaler.get_scale()


@pytest.mark.row(107)
@pytest.mark.full
def test_a_grad_scaler_asks_for_its_verdict_once():
    assert emulated.run(1, scaled) == [([(1, 1)] * 3, [False, True, False], 1.0)]


# --- buffers ------------------------------------------------------------------------------------------------------------------


class Normed(Net):
    """With buffers that torch writes to uncounted, one that the program writes to past the count, and a constant."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("book", torch.zeros(2, 3).t())
        self.register_buffer("table", torch.linspace(0, 1, 6))

    def forward(self, x):
        if self.training:
            self.book.data.add_(1 + ranks.rank())
        return super().forward(self.norm(x)) * self.table


def buffers_after(where):
    """What six forwards leave; on the device with the constant in two graphs of one backward."""
    adam, _ = shard(model := Normed(), where, 3)
    xs = [
        torch.randn(4, 6, generator=torch.Generator().manual_seed(8 * at + ranks.rank())).to(where) for at in range(6)
    ]
    for step in range(3):
        before = Counter(device.asked)
        with emulated.counted() as counts:
            for some in [xs[2 * step : 2 * step + 2]] if where == "emu" else [[xs[2 * step]], [xs[2 * step + 1]]]:
                sum(model(x).sum() for x in some).backward()
            adam.step()
            adam.zero_grad()
    assert not counts.drains and before == device.asked, (counts.drains, device.asked - before)
    return {name: buffer.cpu() for name, buffer in model.named_buffers()}


def buffers_are_sent():
    got, want = buffers_after("emu"), buffers_after("cpu")
    reference.assert_same(got, want)
    # The source's of five forwards, and its own of the last.
    assert got["book"].unique().tolist() == [6.0 + ranks.rank()]


@pytest.mark.full
def test_buffers_go_to_all_ranks_in_the_devices_queue():
    """What every rank has of them is what it has on the CPU, whoever wrote and however, and nothing is asked."""
    emulated.run(2, buffers_are_sent, seed=3)


# --- launches -----------------------------------------------------------------------------------------------------------------


def launches(stage):
    """The engine's own of a step of two backwards that clips; of so many buckets and parameters."""
    adam, _ = shard(model := models.build("gpt", **GPT), "emu", stage, torch.bfloat16)
    for step in range(2):
        batches = [on("emu")(step, 2 * ranks.rank() + micro) for micro in range(2)]
        with emulated.counted() as counts:
            for batch in batches:
                loss(model, batch).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            adam.step()
            adam.zero_grad()
    ours = {site: n for site, n in counts.by_site(counts.launches).items() if site.startswith(OURS)}
    return sum(ours.values()), len(model._zeroshard_engine.buckets), len([*model.parameters()]), ours


OURS = ("engine/", "comm/", "tiers/", "features/", "arithmetic/sums.py", "arithmetic/exact_norms.py", "device.py")
# Of each bucket in each backward: exchange 1, sum of two ranks 3; at stage 3 two gathers of a cast and a collective, two
# placeholders, and 4 that take edits. Of each bucket in each step: norm 16, scaled 1, average 1; before stage 3 edits 4, cast and
# gather 2. Of a step: the rest of the norm.
OF_A_BACKWARD, OF_A_STEP, ONCE = dict.fromkeys(STAGES, 4) | {3: 14}, dict.fromkeys(STAGES, 24) | {3: 18}, 44


@pytest.mark.full
@pytest.mark.parametrize("stage", STAGES)
def test_launches_are_so_many_for_each_bucket(stage):
    """And one for each parameter in a backward, to be sent."""
    for found, buckets, parameters, ours in emulated.run(2, launches, stage, seed=stage):
        want = 2 * (buckets * OF_A_BACKWARD[stage] + parameters) + buckets * OF_A_STEP[stage] + ONCE
        assert found == want, ours
