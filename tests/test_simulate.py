"""A simulated rank is the real one without values: the same bytes, the same order, on one process."""

import dataclasses

import pytest
import torch

import models
import reference
from zeroshard import Comm, Layout, Precision, shard
from zeroshard.errors import UserError
from zeroshard.planner.machines import MACHINES, machine
from zeroshard.planner.simulate import simulate
from zeroshard.planner.timeline import replay

CASES = {
    "gpt": {},
    "gpt-tied": {"tied": True},
    "gpt-checkpoint": {"checkpoint": "nonreentrant"},
    "gpt-reentrant": {"checkpoint": "reentrant"},
    "mlp": {},
    "degenerate": {},
    "lora": {},
}


def job(case, dtype=None):
    kind = case.split("-")[0]

    def parts():
        return {
            "model": models.build(kind, **CASES[case]),
            "optimizer": lambda params: torch.optim.AdamW(params, lr=1e-3),
            "batch": lambda step, index: models.batch(kind, step, index),
            "loss": lambda model, batch: models.loss(kind, model, batch),
        }

    return parts


def told(zero):
    """What must be equal: bytes at rest and at the peak of each phase, traffic, and the order of things."""
    ledger = zero.ledger()
    moves = ("gather", "reduce", "release", "forward", "backward", "recompute", "step")
    return (
        {state: n for state, n in ledger.held.items() if n},
        {phase: (peak.total, peak.held) for phase, peak in ledger.phases.items()},
        {verb: t for verb, t in ledger.traffic.items() if verb in ("gather", "reduce")},
        [(e.verb, e.unit, e.bucket, e.logical, e.sent, e.received) for e in zero.events() if e.verb in moves],
    )


def real(case, stage, options):
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    parts = job(case)()
    model = parts["model"]
    optimizer = parts["optimizer"](model.parameters())
    zero = shard(model, optimizer, stage=stage, **options)
    for step in range(3):
        if step == 1:
            zero.record(1 << 20)
        parts["loss"](model, parts["batch"](step, 0 * world + rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return told(zero)


def simulated(case, stage, options, ranks, rank):
    return told(simulate(job(case), ranks=ranks, rank=rank, stage=stage, **options).zero)


OPTIONS = {
    "fp32": {},
    "bf16": {"precision": Precision(param_dtype=torch.bfloat16)},
    "no-overlap": {"comm": Comm(overlap=False)},
    "prefetch 2": {"comm": Comm(prefetch=2, release_after_forward=False)},
    "small buckets": {"layout": Layout(bucket_mib=0.002)},
    "model bounds": {"layout": Layout(bounds="model")},
}


@pytest.mark.parametrize("case", CASES)
def test_simulated_equals_real(ranks, stage, case):
    """Rest, peaks, traffic and order of every rank, to the byte."""
    for rank, outcome in enumerate(ranks.run(2, real, case, stage, {})):
        assert outcome == simulated(case, stage, {}, 2, rank)


@pytest.mark.parametrize("options", OPTIONS)
def test_simulated_equals_real_at_any_rank_count(ranks, world, options):
    """Each rank of one, two, three and four, where shards are uneven and some are empty, with other settings."""
    for rank, outcome in enumerate(ranks.run(world, real, "gpt", 3, OPTIONS[options])):
        assert outcome == simulated("gpt", 3, OPTIONS[options], world, rank)


def test_a_difference_would_be_seen():
    """The comparison above is of everything: another stage, prefetch or rank gives another outcome."""
    one = simulated("gpt", 3, {}, 3, 0)
    for other in (
        ("gpt", 2, {}, 3, 0),
        ("gpt", 3, OPTIONS["no-overlap"], 3, 0),
        ("gpt", 3, {}, 3, 2),
        ("gpt", 3, {}, 4, 0),
    ):
        assert simulated(*other) != one
    assert simulated("gpt", 3, {}, 3, 0) == one


def test_what_needs_values_is_refused():
    """A loss that reads a number cannot be simulated, and says so."""

    def branches():
        parts = job("mlp")()
        loss = parts["loss"]
        return parts | {"loss": lambda model, batch: loss(model, batch) * (2 if loss(model, batch).item() > 0 else 1)}

    with pytest.raises(UserError, match="needs values"):
        simulate(branches, ranks=2)
    for wrong in (
        {"ranks": 0},
        {"ranks": 2, "rank": 2},
        {"ranks": 2, "rank": -1},
        {"ranks": 1.5},
        {"ranks": 2, "accumulate": 0},
    ):
        with pytest.raises(UserError):
            simulate(job("mlp"), **wrong)
    with pytest.raises(UserError, match="needs the job's loss"):
        simulate(lambda: {"model": models.build("mlp")} | {k: job("mlp")()[k] for k in ("optimizer", "batch")}, ranks=2)


def test_a_simulation_leaves_nothing_behind():
    """Real training afterwards is what it was, in the same process."""

    def trained():
        parts = job("gpt")()
        optimizer = parts["optimizer"](parts["model"].parameters())
        zero = shard(parts["model"], optimizer)
        for step in range(2):
            parts["loss"](parts["model"], parts["batch"](step, 0)).backward()
            optimizer.step()
            optimizer.zero_grad()
        with zero.gathered():
            return reference.weights(parts["model"])

    before = trained()
    simulate(job("gpt"), ranks=64, rank=63)
    assert reference.first_difference(trained(), before) == ""
    model = models.build("gpt")
    shard(model, None)
    assert (
        torch.Tensor(
            model.blocks[0].attention.weight if hasattr(model.blocks[0], "attention") else next(model.parameters())
        )
        .isnan()
        .all()
    )


@pytest.mark.parametrize("stage", [1, 3])
def test_a_timeline_adds_up(stage):
    """Exposed waiting is what is left of the step; free links hide everything, slow ones nothing."""
    run = simulate(job("gpt"), ranks=16, stage=stage)
    fast = dataclasses.replace(MACHINES["a100"], link=1e30, network=1e30, link_latency=0, network_latency=0)
    updated = 10**6
    for cluster in (MACHINES["a100"], fast):
        line = replay(run.events, cluster, ranks=16, updated_nbytes=updated, ordered=False)
        assert line.step == pytest.approx(line.compute + line.optimizer + line.exposed, rel=1e-12)
        assert line.compute == pytest.approx(run.flops / (cluster.flops * cluster.efficiency), rel=1e-12)
        for stream in ("compute", "link"):  # one thing at a time
            ends = 0.0
            for piece in sorted((s for s in line.slices if s.stream == stream), key=lambda s: s.start):
                assert piece.start >= ends - 1e-12
                ends = piece.end
    assert line.exposed == pytest.approx(0.0, abs=1e-15)
    slow = dataclasses.replace(MACHINES["a100"], flops=1e30)
    line = replay(run.events, slow, ranks=16, updated_nbytes=0, ordered=False)
    assert line.exposed == pytest.approx(line.step, rel=1e-6)
    with pytest.raises(UserError, match="two recorded steps"):
        replay([], slow, ranks=16, updated_nbytes=0)


def test_collectives_take_what_their_bytes_and_hops_take():
    """The formulas at three sizes, by hand: inside a node, over nodes, and every rank to every rank."""
    m = MACHINES["a100"]
    assert m.ring_seconds(8e9, 8) == pytest.approx(7 * 2e-6 + 7e9 / 300e9)
    assert m.ring_seconds(16e9, 16) == pytest.approx(14 * 2e-6 + 2 * 6e-6 + 15e9 / 200e9)
    assert m.exchange_seconds(8e9, 8) == pytest.approx(2e-6 + 7e9 / 300e9)
    assert m.exchange_seconds(16e9, 16) == pytest.approx(6e-6 + 8e9 / 25e9)
    assert m.ring_seconds(1e9, 1) == m.exchange_seconds(1e9, 1) == 0.0
    with pytest.raises(UserError, match="did you mean 'a100'"):
        machine("a10")
