"""`zero.batches`: the same micro-batches of a step, and the same bits, at any number of ranks and after any restart."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import signal
import weakref

import pytest
import torch
from torch import nn

import ranks
import reference
import zeroshard
from zeroshard import Comm, Layout, Offload, Precision
from zeroshard.errors import CheckpointError, PeerError, StateError, UserError

SAMPLES, PER_STEP, SIZE = 101, 6, 3  # six steps: the last one has four micro-batches, and its last only two samples
SETTINGS = {"per_step": PER_STEP, "size": SIZE, "seed": 5}
SMALL = Layout(bucket_mib=0.001)


class Data(torch.utils.data.Dataset):
    """Numbers of samples, and what a model computes with."""

    def __init__(self, samples=SAMPLES):
        self.values = torch.randn(samples, 8, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.values)

    def __getitem__(self, at):
        return at, self.values[at]


def made(stage, dropout=0.3, **settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(dropout), nn.GELU(), nn.Linear(16, 8), nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return model, optimizer, zeroshard.shard(model, optimizer, stage=stage, **settings)


def loss(model, values):
    return model(values.to(next(model.parameters()).dtype)).square().mean()


def weights(zero):
    with zero.gathered():
        return {name: parameter.detach().clone() for name, parameter in zero.model.named_parameters()}


def run(stage, epochs=2, dropout=0.3, given=SETTINGS, **settings):
    model, optimizer, zero = made(stage, dropout, **settings)
    batches = zero.batches(Data(), **given)
    seen = []
    for _ in range(epochs):
        for step in batches:
            for numbers, values in step:
                seen.append((zero._engine.reduction.silent, numbers.tolist()))
                loss(model, values).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return weights(zero), seen


def plain(seen, counts):
    """The same micro-batches in plain PyTorch: gradients are added up, and divided once."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.0), nn.GELU(), nn.Linear(16, 8), nn.Linear(8, 4))
    optimizer, data, left = torch.optim.AdamW(model.parameters(), lr=0.05), Data(), iter(seen)
    for count in counts:
        for _ in range(count):
            loss(model, data.values[next(left)[1]]).backward()
        for parameter in model.parameters():
            parameter.grad.div_(count)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return reference.weights(model)


EVERYWHERE = [
    pytest.param(world, stage, marks=() if (world, stage) in {(2, 1), (3, 2), (5, 3)} else pytest.mark.full)
    for world in (2, 3, 4, 5, 6, 7, 8)
    for stage in (0, 1, 2, 3)
]


@pytest.fixture(scope="module")
def alone():
    """One rank's weights with dropout and without, and its micro-batches."""
    return run(0), run(0, dropout=0.0)


@pytest.mark.row(108)
@pytest.mark.parametrize(("world", "stage"), EVERYWHERE)
def test_any_number_of_ranks_has_the_bits_of_one(alone, world, stage):
    """With dropout, over two epochs whose steps no number of ranks divides; and each computes what is its own."""
    (want, all_of_them), _ = alone
    told = ranks.run(world, run, stage)
    for got, _ in told:
        assert reference.first_difference(want, got) == ""
    rounds = [seen for _, seen in told]
    counted = [numbers for each in zip(*rounds, strict=True) for silent, numbers in each if not silent]
    assert counted == [numbers for _, numbers in all_of_them]


@pytest.mark.row(108)
def test_one_rank_has_the_bits_of_plain_pytorch(alone):
    _, (got, seen) = alone
    assert reference.first_difference(plain(seen, 2 * [6, 6, 6, 6, 6, 4]), got) == ""
    epochs = [sorted(itertools.chain(*(numbers for _, numbers in seen[at : at + 34]))) for at in (0, 34)]
    assert epochs == 2 * [list(range(SAMPLES))] and seen[:34] != seen[34:]
    assert [len(numbers) for _, numbers in seen[:34]] == [3] * 33 + [2]


WAYS = {
    "bf16": {"precision": Precision(param_dtype=torch.bfloat16)},
    "replicas": {"comm": Comm(replicas=2)},
    "host": {"offload": Offload(optimizer="cpu", gradients="cpu"), "layout": SMALL},
    "recompute": {"layout": Layout(recompute=True)},
    "shared": {"comm": Comm(transport="shared")},
}


@pytest.mark.full
@pytest.mark.parametrize("way", WAYS)
def test_other_settings_have_the_bits_of_one_rank(way):
    """Four ranks, of which two are silent in the last round."""
    settings = {name: value for name, value in WAYS[way].items() if name != "comm"}
    want, _ = run(2, **settings)
    for got, _ in ranks.run(4, run, 2, **WAYS[way]):
        assert reference.first_difference(want, got) == ""


def test_what_is_given_is_what_was_asked_for():
    """Without shuffling and with drop_last: whole steps in order; the program's own draws are as if none were inside."""
    model, optimizer, zero = made(1)
    batches = zero.batches(Data(), per_step=4, size=5, shuffle=False, drop_last=True)
    torch.manual_seed(3)
    drawn, steps = [], []
    for step in batches:
        drawn.append(torch.rand(1).item())
        steps.append([numbers.tolist() for numbers, values in step if loss(model, values).backward() is None])
        optimizer.step()
        optimizer.zero_grad()
    torch.manual_seed(3)
    assert drawn == [torch.rand(1).item() for _ in drawn]
    assert len(batches) == len(steps) == 5 and (batches.epoch, batches.step) == (1, 0)
    assert [number for step in steps for numbers in step for number in numbers] == list(range(100))


def until(stage, steps, folder, save):
    """A run of two epochs that stops after so many steps, or goes on from there."""
    model, optimizer, zero = made(stage)
    if not save:
        zero.load(folder)
    batches = zero.batches(Data(), **SETTINGS)
    done = 0
    while batches.epoch < 2:
        for step in batches:
            for _, values in step:
                loss(model, values).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            done += 1
            if save and done == steps:
                zero.save(folder)
                return (batches.epoch, batches.step), {}
    return done, weights(zero)


@pytest.mark.row(108)
@pytest.mark.parametrize(("first", "then"), [(3, 2), pytest.param(2, 5, marks=pytest.mark.full)])
@pytest.mark.parametrize("steps", [2, 6, 9])
def test_a_run_goes_on_at_another_number_of_ranks(alone, tmp_path, first, then, steps):
    """From the middle of an epoch, from its end, and from the second one: the bits of the run that never stopped."""
    (want, _), _ = alone
    folder = str(tmp_path / "checkpoint")
    place = (1, 3) if steps == 9 else (0, steps)
    assert {told for told, _ in ranks.run(first, until, 2, steps, folder, True)} == {place}
    for done, got in ranks.run(then, until, 3, steps, folder, False):
        assert done == 12 - steps
        assert reference.first_difference(want, got) == ""


def other_place(folder):
    """What a load says to other batches; made before and after it, and where differences are passed over."""
    _, _, zero = made(1)
    zero.batches(Data(), **SETTINGS | {"size": 2})
    with pytest.raises(CheckpointError) as before:
        zero.load(folder)
    skipped = zero.load(folder, strict=False).skipped
    place = zero.batches(Data(), **SETTINGS | {"size": 2})
    _, _, other = made(1)
    assert other.load(folder).batches["step"] == 2
    with pytest.raises(UserError) as after:
        other.batches(Data(90), **SETTINGS)
    return str(before.value), skipped, (place.epoch, place.step), str(after.value)


def test_a_place_in_other_data_is_refused(tmp_path):
    folder = str(tmp_path / "checkpoint")
    until(1, 2, folder, True)
    before, skipped, place, after = other_place(folder)
    assert "zero.batches(size=) is 2, saved was 3" in before and "nothing was changed" in before
    assert skipped == ["zero.batches(size=) is 2, saved was 3"] and place == (0, 0)
    assert "zero.batches(samples=) is 90, saved was 101" in after


def test_an_exception_in_a_step_leaves_the_step_to_be_done_again(alone):
    (want, _), _ = alone
    model, optimizer, zero = made(2)
    batches, failed = zero.batches(Data(), **SETTINGS), 0
    while batches.epoch < 2:
        try:
            for step in batches:
                for at, (_, values) in enumerate(step):
                    loss(model, values).backward()
                    if batches.step == 3 and at == 2 and failed < 2:
                        failed += 1
                        raise OSError("a disk")
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        except OSError:
            optimizer.zero_grad()
    assert failed == 2 and reference.first_difference(want, weights(zero)) == ""


def mistakes(which):
    """What is said to each mistake, on this rank."""
    model, optimizer, zero = made(1)
    batches = zero.batches(Data(), **SETTINGS)

    def backward(values, factor=1.0):
        (loss(model, values) * factor).backward()

    if which == "other gradients":
        backward(Data().values[:3])
    try:
        for step in batches:
            if which == "a step left out":
                continue
            if which == "a list":
                step = list(step)
            for _, values in zero.join(step) if which == "join" else step:
                with zero.no_sync() if which == "no_sync" else contextlib.nullcontext():
                    backward(values)
                if which == "two backwards":
                    backward(values)
                if which == "a new call":
                    zero.batches(Data(), **SETTINGS | {"seed": 6})
            if which == "one more":
                backward(values)
            if which == "unshard":
                zero.unshard()
            optimizer.step()
            if which != "never cleared":
                optimizer.zero_grad()
        return ""
    except (StateError, PeerError) as error:
        return str(error)


@pytest.mark.parametrize(
    ("which", "said"),
    [
        ("no_sync", "no_sync() adds up each rank's micro-batches first"),
        ("other gradients", "gradients of another step are there"),
        ("never cleared", "gradients of another step are there"),
        ("two backwards", "a second backward with one micro-batch"),
        ("a list", "a micro-batch is for one backward"),
        ("join", "zero.join(...) inside the loop"),
        ("one more", "a backward after the loop"),
        ("a step left out", "a step begins before all micro-batches of the last one were used"),
        ("a new call", "these batches give out nothing any more: zero.batches(...) was called again"),
        ("unshard", "these batches give out nothing any more: the model was unsharded"),
    ],
)
def test_what_would_make_bits_depend_on_the_ranks_is_refused(which, said):
    for told in ranks.run(4, mistakes, which):
        assert said in told and "of epoch 1" in told, told


def ordinary(how):
    """The norm of an ordinary backward on half the data after a loop was left, beside one without any batches."""
    model, optimizer, zero = made(1, dropout=0.0)
    try:
        for step in zero.batches(Data(), **SETTINGS):
            for _, values in step:
                loss(model, values).backward()
                if how == "break":
                    break
                if how == "error":
                    raise OSError
            break
    except OSError:
        pass
    optimizer.zero_grad()
    values = Data().values[zero.rank :: zero.world_size]
    loss(model, values).backward()
    found = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    other, _, _ = made(1, dropout=0.0)
    loss(other, values).backward()
    return float(found), float(torch.nn.utils.get_total_norm([p.grad for p in other.parameters()]))


@pytest.mark.parametrize("how", ["break", "error", "whole"])
def test_an_ordinary_backward_afterwards_is_divided_by_the_ranks(how):
    for found, want in ranks.run(4, ordinary, how):
        assert found == want


def interrupted(folder, how):
    """Steps that were made, of a run that something interrupts once, and which then goes on."""
    model, optimizer, zero = made(2)
    if how == "signal":
        zero.save_on(signal.SIGUSR1, path=folder)
    batches, trained, once = zero.batches(Data(), **SETTINGS), [], True
    while batches.epoch < 2:
        try:
            for step in batches:
                for _, values in step:
                    loss(model, values).backward()
                    if how == "inside" and len(trained) == 3 and once:
                        raise KeyboardInterrupt
                if how == "before the step" and len(trained) == 3 and once:
                    raise KeyboardInterrupt
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                trained.append((batches.epoch, batches.step))
                optimizer.zero_grad()
                if how == "rollback" and len(trained) == 2:
                    zero.save(folder)
                if how == "rollback" and len(trained) == 4 and once:
                    once = False
                    zero.load(folder)
                    trained = trained[:2]
                if how == "signal" and len(trained) == 3 and once:
                    once = False
                    os.kill(os.getpid(), signal.SIGUSR1)
        except KeyboardInterrupt:
            once = False
            optimizer.zero_grad()
            zero.save(folder)  # as at Ctrl-C: its place is the last step that was made
            zero.load(folder)
    if how == "signal":
        _, _, other = made(2)
        place = other.load(folder).batches
        assert (place["epoch"], place["step"]) in {(0, 3), (0, 4)}
    return trained, weights(zero)


@pytest.mark.parametrize(
    "how",
    ["inside", "before the step", "rollback", pytest.param("signal", marks=[pytest.mark.processes, pytest.mark.full])],
)
def test_every_step_is_made_once_whatever_interrupts_it(alone, tmp_path, how):
    (want, _), _ = alone
    for trained, got in ranks.run(3, interrupted, str(tmp_path / "checkpoint"), how):
        assert trained == [(epoch, step) for epoch in (0, 1) for step in range(1, 7)]
        assert reference.first_difference(want, got) == ""


def test_a_step_that_a_scaler_passes_over_is_over():
    """Before the next one is asked for: a checkpoint does not have it done again."""
    model, optimizer, zero = made(1)
    scaler, batches, places = torch.amp.GradScaler("cpu", init_scale=2.0), zero.batches(Data(), **SETTINGS), []
    for step in batches:
        for _, values in step:
            scaler.scale(loss(model, values) * (float("inf") if batches.step == 2 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        places.append(batches.step)
    assert places == [1, 2, 3, 4, 5, 6] and scaler.get_scale() == 1.0


def lagging():
    """What a rank hears when another one tries a step again that this one has made."""
    model, optimizer, zero = made(1)
    batches, once = zero.batches(Data(), **SETTINGS), True
    try:
        while batches.epoch < 1:
            try:
                for step in batches:
                    for _, values in step:
                        loss(model, values).backward()
                    if zero.rank and batches.step == 1 and once:
                        once = False
                        raise OSError
                    optimizer.step()
                    optimizer.zero_grad()
            except OSError:
                optimizer.zero_grad()
    except PeerError as error:
        return str(error)
    return ""


def test_ranks_at_different_steps_are_named():
    for told in ranks.run(2, lagging):
        assert "the ranks are not doing the same thing" in told and "rank 1 is at" in told, told


def test_batches_made_anew_for_an_epoch_go_on(alone, tmp_path):
    """And a place that was loaded is kept by a save, if no batches were made since."""
    (want, _), _ = alone
    model, optimizer, zero = made(1)
    for epoch in range(2):
        for step in zero.batches(Data(), **SETTINGS):
            for _, values in step:
                loss(model, values).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        zero.save(tmp_path / f"epoch{epoch}")
    assert reference.first_difference(want, weights(zero)) == ""
    _, _, other = made(1)
    place = other.load(tmp_path / "epoch0").batches
    other.save(tmp_path / "again")
    assert made(1)[2].load(tmp_path / "again").batches == place and place["epoch"] * 6 + place["step"] == 6
    _, _, third = made(1)
    third.save(tmp_path / "none")
    batches = third.batches(Data(), **SETTINGS)
    with pytest.raises(CheckpointError, match="none did in the run that was saved"):
        third.load(tmp_path / "none")
    assert (batches.epoch, batches.step) == (0, 0)


def test_arguments_that_cannot_be_are_refused():
    _, _, zero = made(1)
    for given, said in (
        ({"per_step": 0}, "zero.batches(per_step=) is a whole number from 1 up"),
        ({"per_step": 2, "size": 2.0}, "zero.batches(size=) is a whole number from 1 up"),
        ({"per_step": 2, "batch_size": 4, "sampler": None}, "batch_size=, sampler="),
        ({"per_step": 200, "drop_last": True}, "the samples are not enough for one step"),
    ):
        with pytest.raises(UserError) as error:
            zero.batches(Data(), **given)
        assert said in str(error.value)
    for settings, said in (
        ({"precision": Precision(param_dtype=torch.bfloat16, grad_dtype=torch.bfloat16)}, "sums in torch.bfloat16"),
        ({"comm": Comm(reduce="native")}, "an order of its own"),
    ):
        with pytest.raises(UserError, match=said):
            made(1, **settings)[2].batches(Data(), per_step=2)
    with pytest.raises(UserError, match="a dataset with len"):
        zero.batches(iter([1, 2]), per_step=2)


def test_nothing_is_kept_of_a_model_that_is_dropped():
    model, optimizer, zero = made(2)
    for step in zero.batches(Data(), **SETTINGS):
        for _, values in step:
            loss(model, values).backward()
        optimizer.step()
        optimizer.zero_grad()
    engine = weakref.ref(zero._engine)
    del model, optimizer, zero, step, values
    gc.collect()
    assert engine() is None


def asked_otherwise():
    _, _, zero = made(1)
    with pytest.raises(PeerError) as error:
        zero.batches(Data(), per_step=2 + ranks.rank())
    return str(error.value)


def test_ranks_that_ask_for_other_batches_are_named():
    for told in ranks.run(2, asked_otherwise):
        assert "2 on rank 0" in told and "3 on rank 1" in told and "per_step" in told, told


@pytest.mark.full
@pytest.mark.processes
def test_workers_of_a_loader_change_nothing(alone):
    (want, _), _ = alone
    got, _ = run(1, given=SETTINGS | {"num_workers": 2, "prefetch_factor": 4})
    assert reference.first_difference(want, got) == ""
