"""What the planner says of tiers beside what the engine holds and moves there, to the byte."""

import itertools

import pytest
import torch
from torch import nn

import zeroshard
from zeroshard import Offload, Precision, nvme
from zeroshard.planner import predict_tiers, states
from zeroshard.planner.files import predict_moves
from zeroshard.planner.simulate import simulate

WIDTH, LAYERS, STEPS = 20, 5, 3
BF16 = Precision(param_dtype=torch.bfloat16, cast_inputs=True)
TIERS = ("device", "cpu", "nvme")
MIXED = [(0.4, {"nvme": 0.5, "cpu": 0.3}, {"nvme": 0.6}), ({"nvme": 0.5}, 0.5, {"cpu": 0.2, "nvme": 0.4})]
EACH = [*zip(TIERS, TIERS, TIERS, strict=True), *zip(TIERS, TIERS[1:] + TIERS[:1], TIERS[2:] + TIERS[:2], strict=True)]


def job():
    """Equal units and a last one that is not; every unit's backward needs its weights."""
    torch.manual_seed(0)
    widths = [WIDTH] * LAYERS + [7]
    blocks = (nn.Sequential(nn.Linear(*pair), nn.Tanh()) for pair in itertools.pairwise(widths))
    return {
        "model": nn.Sequential(*blocks),
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        "batch": lambda step, index: torch.randn(4, WIDTH, requires_grad=True),
        "loss": lambda model, batch: model(batch).float().square().mean(),
    }


def offload(where, path):
    on_disk = any(each == "nvme" or isinstance(each, dict) for each in where)
    return Offload(*where, path=path if on_disk else None)


def bytes_of(tiers):
    return {tier: found for tier, states in tiers.items() if (found := {s: n for s, n in states.items() if n})}


def moved(ledger):
    return tuple(ledger.traffic[verb].logical if verb in ledger.traffic else 0 for verb in ("read", "write"))


def train(stage, where, precision, path, accumulate=1):
    """(predicted, held, predicted moves, moved in the last step) of this rank."""
    parts = job()
    optimizer = parts["optimizer"](parts["model"].parameters())
    zero = zeroshard.shard(parts["model"], optimizer, stage=stage, precision=precision, offload=offload(where, path))
    before = after = (0, 0)
    for step in range(STEPS):
        before = after
        for index in range(accumulate):
            parts["loss"](parts["model"], parts["batch"](step, index)).backward()
        optimizer.step()
        optimizer.zero_grad()
        after = moved(zero.ledger())
    said = predict_tiers(zero), tuple(predict_moves(zero, accumulate=accumulate))
    return said, (bytes_of(zero.ledger().tiers), (after[0] - before[0], after[1] - before[1]))


def train_all(cases, path):
    return [train(*case, path) for case in cases]


def grid(stages, wheres):
    return [(stage, where, precision) for stage, where, precision in itertools.product(stages, wheres, (None, BF16))]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_what_is_held_in_each_tier_and_moved_is_as_predicted(ranks, world, stage, tmp_path):
    """Parameters, gradients and optimizer each in each tier, in two precisions; and fractions of them."""
    cases = grid([stage], [("nvme", "nvme", "nvme"), *MIXED] if world > 1 else [*EACH, *MIXED])
    for found in ranks.run(world, train_all, cases, tmp_path):
        for case, (said, held) in zip(cases, found, strict=True):
            assert said == held, case


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_tier_of_every_state(ranks, world, stage, tmp_path):
    cases = grid([stage], [*itertools.product(TIERS, TIERS, TIERS), *MIXED])
    for found in ranks.run(world, train_all, cases, tmp_path):
        for case, (said, held) in zip(cases, found, strict=True):
            assert said == held, case


@pytest.mark.parametrize("where", [("nvme", "nvme", "nvme"), MIXED[0]], ids=["nvme", "mixed"])
def test_a_simulation_makes_no_files_and_counts_what_a_run_counts(where, stage, tmp_path):
    settings = {"stage": stage, "precision": BF16, "offload": offload(where, tmp_path / "none")}
    run = simulate(job, ranks=1, **settings)
    assert not (tmp_path / "none").exists()
    _, (held, last) = train(stage, where, BF16, tmp_path / "run")
    assert bytes_of(run.ledger.tiers) == held
    steps = [event for event in run.events if event.verb == "step"]
    events = [event for event in run.events if event.start > steps[-2].end]
    assert tuple(sum(e.logical for e in events if e.verb == verb) for verb in ("read", "write")) == last


def test_the_planner_knows_the_engines_constants():
    assert (states.BUFFERS, states.STAGING) == (nvme.BUFFERS, "staging")
    assert [states.pages(nbytes) for nbytes in (0, 1, 5000)] == [nvme.aligned(nbytes) for nbytes in (0, 1, 5000)]
