"""What the engine asks of a device: as many launches and waits as `planner.overheads` says, counted where there is one."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.distributed as dist

import emulated
import models
import ranks
import zeroshard
from test_emulated import GPT, STAGES, optimizer
from zeroshard import Comm, Precision
from zeroshard.planner import overheads
from zeroshard.planner.machines import MACHINES
from zeroshard.planner.overheads import Overhead
from zeroshard.planner.simulate import facts
from zeroshard.planner.timeline import replay
from zeroshard.planner.ways import meetings

OWN = (
    "engine/",
    "features/",
    "comm/",
    "arithmetic/",
    "device",
    "tiers/",
)  # where the package's own launches are asked for

OPTIMIZER = "engine/step/bucket_step.py:step"  # where it calls the program's own optimizer, bucket by bucket


def step(stage, dtype, comm=None, recompute=False, backwards=1, clip=False, grad_dtype=None):
    """(what one step asked of the device, what is said that it asks by its events, and by their numbers)."""
    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    model = models.build("gpt", **GPT).to("emu")
    adam = optimizer(model.parameters())
    zero = zeroshard.shard(
        model, adam, stage=stage, precision=Precision(param_dtype=dtype, grad_dtype=grad_dtype), comm=comm,
        layout=zeroshard.Layout(recompute=recompute),
    )  # fmt: skip
    for number in range(4):  # the clock needs two, and the first negotiates
        if number == 2:
            zero.record()
        torch.emu.synchronize()
        with emulated.counted() as counts:
            for at in range(backwards):
                batch = models.batch("gpt", number, world * at + rank)
                models.loss("gpt", model, tuple(each.to("emu") for each in batch)).backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            adam.step()
            adam.zero_grad()
        torch.emu.synchronize()
    known = facts(zero)
    sits = zero._engine.group.team.seat
    line = replay(
        zero.events(), MACHINES["h100"], ranks=sits.size, replica=sits.replica, replicas=sits.replicas,
        updated_nbytes=0, facts=known,
    )  # fmt: skip
    gathers = 2 * backwards if stage == 3 else 1
    again = [recompute and zero._engine.units[bucket.unit].name != "" for bucket in zero.partition.buckets]
    closed = overheads.total(
        overheads.step(of, gathers=gathers, reductions=backwards, forwards=backwards * (1 + more))
        for of, more in zip(known.values(), again, strict=True)
    )
    if clip:
        norm = overheads.total(map(overheads.clipped, known.values())) + overheads.CLIP
        return _own(counts), line.asked + norm, closed + norm
    return _own(counts), line.asked, closed


def _own(counts):
    launches, drains = (
        sum(n for site, n in counts.by_site(counter).items() if site.startswith(OWN) and site != OPTIMIZER)
        for counter in (counts.launches, counts.drains)
    )
    return Overhead(launches, drains)


def every(cases):
    return [step(**case) for case in cases]


BF16 = {"dtype": torch.bfloat16}
MORE = {
    "accumulated": [{"stage": stage, **dtype, "backwards": 2} for stage in (0, 3) for dtype in ({"dtype": None}, BF16)],
    "recomputed": [{"stage": 3, **BF16, "recompute": True}],
    "clipped": [{"stage": stage, **dtype, "clip": True} for stage in (0, 3) for dtype in ({"dtype": None}, BF16)],
    "native": [{"stage": 2, **BF16, "comm": Comm(reduce="native")}],
    "replicas": [{"stage": 3, **dtype, "comm": Comm(replicas=2)} for dtype in ({"dtype": None}, BF16)],
    "narrow": [{"stage": 2, **BF16, "grad_dtype": torch.bfloat16}],
}


def alike(world, cases):
    for found in emulated.run(world, every, cases, timeout=120):
        for case, (counted, said, closed) in zip(cases, found, strict=True):
            assert counted == said == closed, case


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("world", "dtype"),
    [
        pytest.param(world, dtype, marks=[pytest.mark.full] * ((world, dtype) != (2, torch.bfloat16)))
        for world in (1, 2, 3, 4) for dtype in (None, torch.bfloat16)
    ],
)  # fmt: skip
def test_a_step_asks_for_as_many_launches_and_waits_as_are_said(world, dtype):
    alike(world, [{"stage": stage, "dtype": dtype} for stage in STAGES])


@pytest.mark.heavy
@pytest.mark.full
@pytest.mark.parametrize("what", MORE)
def test_so_it_does_whatever_the_step_is(what):
    alike(2, MORE[what])


# --- meetings ---------------------------------------------------------------------------------------------------------


def met(device, recompute):
    """By stage, backwards and whether it clips: how many meetings a step records, and how many the planner says."""
    found = {}
    for stage, backwards, clips in product(STAGES, (1, 3), (False, True)):
        model = models.build("gpt", **GPT).to(device)
        adam = optimizer(model.parameters())
        zero = zeroshard.shard(model, adam, stage=stage, layout=zeroshard.Layout(recompute=recompute))
        for number in range(3):  # the first negotiates
            if number == 2:
                zero.record()
            for at in range(backwards):
                batch = models.batch("gpt", number, ranks.world() * at + ranks.rank())
                models.loss("gpt", model, tuple(each.to(device) for each in batch)).backward()
            if clips:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            adam.step()
            adam.zero_grad()
        recorded = sum(event.verb == "control" for event in zero.events())
        found[stage, backwards, clips] = recorded, meetings(sharded=stage == 3, backwards=backwards, clips=clips)
    return found


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("run", "device", "recompute"),
    [
        pytest.param(ranks.run, "cpu", False, id="host"),
        pytest.param(ranks.run, "cpu", True, id="host-recomputed", marks=pytest.mark.full),
        pytest.param(emulated.run, "emu", False, id="device", marks=pytest.mark.full),
    ],
)
def test_a_step_has_as_many_meetings_as_the_planner_says(run, device, recompute):
    for found in run(2, met, device, recompute, timeout=240):  # 48 steps, and a device takes its time
        assert {case: recorded for case, (recorded, _) in found.items()} == {c: said for c, (_, said) in found.items()}
