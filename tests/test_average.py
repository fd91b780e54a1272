"""`zero.average`: the bits of torch's AveragedModel, sharded, in any tier; swapped in, saved, loaded, exported."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import models
import ranks
import reference
import zeroshard
from test_whole import held
from zeroshard import Comm, Offload, Precision
from zeroshard.errors import CheckpointError, StateError, UserError
from zeroshard.planner.built import predict_tiers

SIZES = (7, 131, 37, 5)
DECAY = 0.8


def made(stage, **settings):
    model = models.build("mlp", sizes=SIZES)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    zero = zeroshard.shard(model, optimizer, stage=stage, **settings)
    return model, optimizer, zero, zero.average(DECAY)


def train_and_average(model, optimizer, average, numbers):
    """Four micro-batches a step, however many ranks there are."""
    each = 4 // ranks.world()
    for number in numbers:
        for turn in range(each):
            (
                models.loss("mlp", model, models.batch("mlp", number, turn * ranks.world() + ranks.rank())) / each
            ).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update()


def plain(steps):
    model = models.build("mlp", sizes=SIZES)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    for number in range(steps):
        for turn in range(4):
            models.loss("mlp", model, models.batch("mlp", number, turn)).backward()
        for parameter in model.parameters():
            parameter.grad.div_(4)
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
    return reference.weights(model), reference.weights(average.module)


def weights(zero):
    with zero.gathered():
        return {name: parameter.detach().clone() for name, parameter in zero.model.named_parameters()}


def averaged(stage, where, folder):
    model, optimizer, zero, average = made(
        stage, offload=where and Offload(path=folder if "nvme" in where.values() else None, **where)
    )
    train_and_average(model, optimizer, average, range(3))
    after = weights(zero)
    with average.swapped():
        swapped = weights(zero)
        loss = models.loss("mlp", model, models.batch("mlp", 0, 0)).item()
    assert held(zero) == predict_tiers(zero)
    assert not reference.first_difference(weights(zero), after)
    train_and_average(model, optimizer, average, range(3, 5))
    with average.swapped():
        return after, swapped, loss, weights(zero)


@pytest.mark.parametrize("where", [{}, {"optimizer": "cpu"}, {"optimizer": "nvme", "parameters": "nvme"}], ids=str)
def test_the_average_is_that_of_torch(where, tmp_path):
    """Weights and averages have plain torch's bits at every stage and in every tier, swapped in and out between; held as
    planned: a part of each rank's."""
    (now, mean), (_, later) = plain(3), plain(5)
    for stage in (0, 1, 3) if where else (0, 1, 2, 3):
        for after, swapped, loss, last in ranks.run(2, averaged, stage, where or None, str(tmp_path)):
            reference.assert_same(after, now)
            reference.assert_same(swapped, mean)
            reference.assert_same(last, later)
            model = models.build("mlp", sizes=SIZES)
            model.load_state_dict(mean)
            assert loss == models.loss("mlp", model, models.batch("mlp", 0, 0)).item()


def in_bf16(stage):
    model, optimizer, zero, average = made(stage, precision=Precision(param_dtype=torch.bfloat16, cast_inputs=True))
    train_and_average(model, optimizer, average, range(3))
    before = weights(zero)
    with average.swapped():
        swapped = weights(zero)
    return before, swapped, weights(zero), {state for state in held(zero)["device"] if "average" in state}


@pytest.mark.full
def test_with_masters_these_are_averaged():
    """In fp32, and cast where they are swapped in; the same at every stage."""
    found = [each for stage in (0, 1, 2, 3) for each in ranks.run(2, in_bf16, stage)]
    for before, swapped, after, states in found:
        reference.assert_same(before, after)
        reference.assert_same(swapped, found[0][1])
        assert states == {"average"}
        assert reference.first_difference(before, swapped)


def saved(stage, folder, numbers, load=None):
    model, optimizer, zero, average = made(stage)
    if load is not None:
        assert zero.load(load).skipped == []
    train_and_average(model, optimizer, average, numbers)
    zero.save(folder)
    with average.swapped():
        zero.export(f"{folder}.exported")
        return weights(zero)


def test_an_average_is_saved_loaded_by_other_ranks_and_exported(tmp_path):
    _, mean = plain(4)
    ranks.run(4, saved, 3, tmp_path / "a", range(1))
    ranks.run(2, saved, 1, tmp_path / "b", range(1, 3), tmp_path / "a")
    for found in ranks.run(1, saved, 2, tmp_path / "c", range(3, 4), tmp_path / "b"):
        reference.assert_same(found, mean)
    (path,) = (tmp_path / "c.exported").glob("*.safetensors")
    reference.assert_same(load_file(path), mean)


def without(folder):
    model = models.build("mlp", sizes=SIZES)
    zero = zeroshard.shard(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    with pytest.raises(CheckpointError, match=r"average of the weights has decay None, saved was 0\.8"):
        zero.load(folder)
    assert zero.load(folder, strict=False).skipped


def refused(stage, folder):
    model, optimizer, zero, average = made(stage)
    with pytest.raises(StateError, match="nothing was averaged yet"), average.swapped():
        pass
    with pytest.raises(StateError, match="has an average already"):
        zero.average(DECAY)
    train_and_average(model, optimizer, average, range(1))
    zero.save(folder)
    with average.swapped():
        for act in (optimizer.step, average.update, lambda: zero.save(folder), lambda: average.swapped().__enter__()):
            with pytest.raises(StateError, match="while the weights are the averages"):
                act()
    if ranks.rank():
        average.update()
    with pytest.raises(StateError, match=r"averaged different numbers of steps(?s:.*)\[1, 2\]"):
        zero.save(folder)


def test_what_is_refused_of_an_average(tmp_path):
    ranks.run(2, refused, 3, tmp_path / "saved")
    ranks.run(2, without, tmp_path / "saved")
    zero = zeroshard.shard(models.build("mlp", sizes=SIZES), None)
    for decay in (1, -0.1, "0.9", None):
        with pytest.raises(UserError, match="no decay of an average"):
            zero.average(decay)


def with_split_masters(stage):
    model, optimizer, zero, average = made(
        stage, precision=Precision(param_dtype=torch.bfloat16, cast_inputs=True, split_master=True)
    )
    train_and_average(model, optimizer, average, range(3))
    before = weights(zero)
    with average.swapped():
        swapped = weights(zero)
    assert held(zero) == predict_tiers(zero)
    return before, swapped, weights(zero), average.updates


def test_split_masters_are_averaged_as_whole_ones(tmp_path):
    """The bits of masters that rest whole."""
    want = ranks.run(2, in_bf16, 1)[0]
    for before, swapped, after, _ in ranks.run(2, with_split_masters, 1):
        reference.assert_same(before, want[0])
        reference.assert_same(swapped, want[1])
        reference.assert_same(after, before)


def over_replicas(stage, over, where, folder):
    offload = Offload(path=folder, **where) if where else None
    model, optimizer, zero, average = made(
        stage, comm=Comm(replicas=2, optimizer=over), offload=offload,
        precision=Precision(param_dtype=torch.bfloat16, cast_inputs=True),
    )  # fmt: skip
    train_and_average(model, optimizer, average, range(3))
    before = weights(zero)
    with average.swapped():
        swapped = weights(zero)
    assert held(zero) == predict_tiers(zero)
    return before, swapped, weights(zero)


@pytest.mark.full
@pytest.mark.parametrize("over", ["team", "all"])
def test_averages_of_replicas(over, tmp_path):
    """Each replica's, or a part of each rank's: the bits of one replica, in files too."""
    one = ranks.run(4, in_bf16, 1)[0]
    for stage, where in ((1, {}), (3, {}), (3, {"optimizer": "nvme", "parameters": "nvme"})):
        for before, swapped, after in ranks.run(4, over_replicas, stage, over, where, str(tmp_path)):
            reference.assert_same(before, one[0])
            reference.assert_same(swapped, one[1])
            reference.assert_same(after, before)
