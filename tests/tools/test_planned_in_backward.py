"""What is predicted of the optimizer in backward: gradients that rest nowhere, and what of them passes at once."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import ranks as on_ranks
import zeroshard
from flat import plan_of
from test_planned_replicas import wide
from zeroshard import Comm, Machine, Offload, Precision
from zeroshard.errors import UserError
from zeroshard.layout.states import placements
from zeroshard.planner.instants import ItemSizes, instants

JOBS = Path(__file__).parents[1] / "jobs.py"
PASSING = ("reduce", "gradients", "upcast")


def most_passing(stage, overlap, dtype):
    """By the ledger of a real run: the most that passed of sums and messages at once; and what is planned."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(48 + 16 * n, 64 + 16 * n, bias=False)) for n in range(6)))
    zero = zeroshard.shard(
        model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage, comm=Comm(overlap=overlap),
        precision=Precision(param_dtype=dtype, cast_inputs=dtype is not None), optimizer_in_backward=True,
    )  # fmt: skip
    zero._engine.reduction.pause = 60.0
    zero.record()
    for _ in range(3):
        model(torch.ones(2, 48, requires_grad=True)).float().sum().backward()
        zero._engine.bindings[0].optimizer.step()
        model.zero_grad()
    held, most = {}, 0
    for _, _, state, nbytes in zero._engine.ledger.record.held:
        held[state] = nbytes
        most = max(most, sum(held.get(each, 0) for each in PASSING))
    wide = 4 if dtype is None else 2
    sizes = ItemSizes(wide, 4, wide, 4, in_backward=True)
    in_flight = {} if overlap else {"in_flight": 0}
    place = placements(stage, in_backward=True)
    found = instants(zero.partition, place, sizes, zero.rank, **in_flight)
    return most, max(sum(instant.nbytes.get(each, 0) for each in PASSING) for instant in found)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("overlap", [True, False])
def test_what_passes_is_what_shapes_alone_say(ranks, world, stage, overlap, dtype):
    """Sums, copies of them in the masters' dtype, and messages, at once."""
    for held, planned in ranks.run(world, most_passing, stage, overlap, dtype):
        assert held == planned


def test_a_plan_leaves_resting_gradients_out():
    plan = partial(plan_of, params=7e9, ranks=8, preset="zeroshard", units=32)
    ordinary, early = plan(), plan(optimizer_in_backward=True)
    for one, other in zip(ordinary.stages, early.stages, strict=True):
        assert one.total - other.total == one.states["gradients"] and other.states.get("gradients", 0) == 0
        assert other.peak < one.peak
        assert other.traffic == one.traffic
    assert [stage.formula for stage in early.stages] == ["14", "2 + 12/N", "2 + 12/N", "12/N"]
    bucket = 24 * 2**20 // 2  # elements of the largest
    passing = [max(i.nbytes.get("gradients", 0) for i in stage.instants) for stage in early.stages]
    assert passing == [2 * 4 * bucket, *[4 * bucket // 8] * 3]


@pytest.mark.parametrize(
    "settings", [{"accumulate": 2}, {"no_sync": True}, {"offload": Offload(gradients="cpu")}], ids=str
)
def test_what_a_run_refuses_is_not_planned(settings):
    with pytest.raises(UserError, match="with the optimizer in backward"):
        plan_of(params=1e6, ranks=2, optimizer_in_backward=True, **settings)


def test_gradients_that_are_said_to_rest_on_the_device_are_no_others():
    """In whatever words, for a plan and for a run."""
    for nowhere in (0.0, {"device": 1.0}, {"cpu": 0.0}):
        offload = Offload(gradients=nowhere)
        zeroshard.plan(1e6, Machine(ranks=2), optimizer_in_backward=True, offload=offload)
        model = nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters())
        zeroshard.shard(model, optimizer, optimizer_in_backward=True, offload=offload)


@pytest.mark.full
def test_the_jobs_own_plan():
    plain, early = (
        zeroshard.plan(wide, Machine(ranks=2), stage=2, optimizer_in_backward=each) for each in (False, True)
    )
    assert plain.stages[0].states["gradients"] == plain.stages[0].total - early.stages[0].total
    assert early.stages[0].formula == "4 + 8/N"


@pytest.mark.full
def test_verify_compares_it_with_plain_pytorch():
    """What cannot run so is said at once."""
    command = partial(on_ranks.command, "verify", "--ranks", 2, "--optimizer-in-backward", "--steps", 2)
    done = command(f"{JOBS}:mlp", "--accumulate", 1, "--bucket-mib", "small", "--stage", "0,3")
    assert "fp32, the optimizer in backward" in done.stdout and "fails" not in done.stdout
    assert done.returncode == 0
    assert "Try --accumulate 1" in command(f"{JOBS}:mlp").stderr
    assert "with --clip 1.0 it cannot" in command(f"{JOBS}:mlp", "--accumulate", 1, "--clip", 1).stderr
    refused = command(f"{JOBS}:unknown_optimizer", "--accumulate", 1)
    assert refused.returncode and "does not know whether this optimizer is elementwise" in refused.stderr


def test_the_guide_says_what_plan_says():
    guide = " ".join(
        (Path(__file__).parents[2] / "docs" / "offload.md").read_text().split()
    )  # lines may break anywhere
    plan = partial(plan_of, params=7e9, ranks=8, preset="zeroshard", units=32)
    for stage in (1, 3):
        ordinary, early = (plan(stage=stage, optimizer_in_backward=each).stages[0].peak for each in (False, True))
        assert f"{early / 1e9:.2f} GB instead of {ordinary / 1e9:.2f} at stage {stage}" in guide
