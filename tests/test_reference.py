"""The reference engine, `zeroshard.reference`: one file of ZeRO, whose bits the engine has."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import models
import ranks
import reference
import zeroshard
import zeroshard.reference
from zeroshard import Layout
from zeroshard.errors import UserError

LOSS = partial(models.loss, "gpt")
STEPS = 3


def trained(engine, world, stage, bucket_mib, backwards, dtype, path=None):
    """Weights and norms after a few clipped steps, of `zeroshard` or of `zeroshard.reference`."""
    model = models.build("gpt", hidden=12, layers=2).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    zero = engine.shard(model, optimizer, stage=stage, layout=Layout(bucket_mib=bucket_mib))
    if path is not None and path.exists():
        zero.load(path)
    norms = []
    for step in range(STEPS):
        for micro in range(backwards):
            batch = models.batch("gpt", step, micro * world + ranks.rank())
            (LOSS(model, batch) / backwards).backward()
        norms.append(float(zero.clip_grad_norm_(0.5)))
        optimizer.step()
        optimizer.zero_grad()
    if path is not None and not path.exists():
        zero.save(path)
    with zero.gathered():
        return reference.weights(model), norms


def both(*settings):
    """Where the engine's bits are others than the reference's, and the norms of both."""
    (want, norms), (got, again) = (trained(engine, *settings) for engine in (zeroshard.reference, zeroshard))
    return reference.first_difference(got, want), norms == again, len({*norms}) == STEPS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("backwards", [1, 2])
@pytest.mark.parametrize("bucket_mib", [0.003, 24.0], ids=["many", "units"])
@pytest.mark.parametrize("world", [1, 2, 3], ids=lambda world: f"ranks{world}")
def test_the_engine_has_the_bits_of_the_reference(world, stage, bucket_mib, backwards, dtype):
    assert ranks.run(world, both, world, stage, bucket_mib, backwards, dtype) == [("", True, True)] * world


def goes_on(path, stage):
    """A step after a load, or after a save where there is nothing to load, on the same batch on every rank."""
    saved = path.exists()
    model = models.build("gpt", hidden=12, layers=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    zero = zeroshard.reference.shard(model, optimizer, stage=stage)
    for step in range(2 if saved else 0, 3):
        if step == 2:
            zero.load(path) if saved else zero.save(path)
        LOSS(model, models.batch("gpt", step, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    with zero.gathered():
        return reference.weights(model)


@pytest.mark.parametrize("other", [0, 1, 2, 3])
@pytest.mark.parametrize("world", [1, 4])
def test_the_reference_loads_at_any_stage_and_number_of_ranks(tmp_path, world, stage, other):
    want = ranks.run(2, goes_on, tmp_path / "saved", stage)[0]
    for got in ranks.run(world, goes_on, tmp_path / "saved", other):
        reference.assert_same(got, want)


def at_rest(stage):
    """Elements that each rank holds between steps: parameters, sums, what the optimizer updates; and of the model."""
    model = models.build("gpt", hidden=12, layers=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero = zeroshard.reference.shard(model, optimizer, stage=stage)
    LOSS(model, models.batch("gpt", 0, ranks.rank())).backward()
    held = [[each.full if stage < 3 else each.shard, each.sums] for each in zero.buckets]
    parameters, sums = (sum(each[at].numel() for each in held) for at in (0, 1))
    released = all(each.full is None for each in zero.buckets)
    updated = sum(each.param.numel() for each in zero.fragments)
    return parameters, sums, updated, released, sum(each.plan.numel for each in zero.buckets)


def test_a_rank_holds_what_the_stage_says(stage):
    found = ranks.run(2, at_rest, stage)
    whole = found[0][-1]
    for at, sharded in ((0, stage == 3), (1, stage >= 2)):
        assert sum(each[at] for each in found) == (whole if sharded else 2 * whole)
    assert all(each[3] is (stage == 3) for each in found)
    counts = [each[2] for each in found]
    assert len({*counts}) == 1 if stage == 0 else sum(counts) <= whole


def unusual(stage, kind):
    """Where the engine's bits are others than the reference's."""
    found = []
    for engine in (zeroshard.reference, zeroshard):
        model = models.build(kind)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        zero = engine.shard(model, optimizer, stage=stage)
        for step in range(STEPS):
            models.loss(kind, model, models.batch(kind, step, ranks.rank())).backward()
            optimizer.step()
            optimizer.zero_grad()
        with zero.gathered():
            found.append(reference.weights(model))
    want, got = found
    return reference.first_difference(got, want)


@pytest.mark.parametrize("kind", ["unused", "mlp", "shared"])
def test_models_with_unused_and_shared_parameters(kind, stage):
    assert ranks.run(2, unusual, stage, kind) == ["", ""]


def test_what_it_cannot_is_refused():
    model = torch.nn.Linear(2, 2)
    with pytest.raises(UserError, match="no such stage"):
        zeroshard.reference.shard(model, torch.optim.SGD(model.parameters()), stage=4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with pytest.raises(UserError, match="has states already"):
        zeroshard.reference.shard(model, optimizer)
