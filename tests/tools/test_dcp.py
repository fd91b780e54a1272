"""torch.distributed.checkpoint writes and reads a sharded model like any other, FSDP2's and plain tensors included."""

import math
import pickle
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import state_dict as torch_state_dict

import models
import reference
import zeroshard
from test_checkpoint import IGNORED, WithScale, build, digest, same, step, with_scale
from zeroshard.errors import CheckpointError, UserError
from zeroshard.integrations.boxes import boxes
from zeroshard.integrations.dcp import _warn

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


@given(shape=st.lists(st.integers(1, 5), max_size=4), data=st.data())
def test_an_interval_is_its_boxes(shape, data):
    """Each element once, in order; each box contiguous in memory; no more boxes than needed."""
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    whole = torch.arange(numel).view(shape)
    found = list(boxes(shape, start, stop))
    seen = []
    for box in found:
        part = whole
        for dimension, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
            part = part.narrow(dimension, offset, size)
        assert part.reshape(-1).tolist() == list(range(box.start, box.stop))
        seen += range(box.start, box.stop)
    assert seen == list(range(start, stop)) and len(found) <= max(1, 2 * len(shape) - 1)


def quietly(function, *args, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*args, **kwargs)


def saves(case, folder, stage, options):
    model, optimizer, zero = build(case, stage, **options)
    for number in range(3):
        step(case, model, optimizer, number)
    quietly(dcp.save, {"app": zero}, checkpoint_id=folder)
    return digest(model, optimizer, zero)


def loads(case, folder, stage, options):
    model, optimizer, zero = build(case, stage, **options)
    if options.get("used", True):
        step(case, model, optimizer, 99)
    quietly(dcp.load, {"app": zero}, checkpoint_id=folder)
    return digest(model, optimizer, zero)


PLACES = [(2, 3, 3, 0), (3, 1, 1, 2), (1, 0, 2, 3), (4, 2, 2, 1)]


@pytest.mark.parametrize(("saved", "stage", "loaded", "other"), PLACES)
@pytest.mark.parametrize("case", ["gpt", "degenerate", "lora"])
def test_any_ranks_and_stage_into_any(ranks, tmp_path, case, saved, stage, loaded, other):
    """The same bits as `zero.save` and `zero.load`: masters, states, steps, buffers and options."""
    dtype = torch.bfloat16 if saved % 2 == 0 else None
    written = ranks.run(saved, saves, case, tmp_path / "a", stage, {"dtype": dtype, "bounds": "model"})
    same(ranks.run(loaded, loads, case, tmp_path / "a", other, {"dtype": dtype, "bucket_mib": 0.002}), written)


def fresh(folder, optimizer):
    """An optimizer that has not stepped loads one that has, and its own nothing."""
    model, made, zero = build("gpt", 3, optimizer=optimizer)
    quietly(dcp.save, {"app": zero}, checkpoint_id=folder / "none")
    quietly(dcp.load, {"app": zero}, checkpoint_id=folder / "none")
    nothing = not any(made.state.values())
    for number in range(2):
        step("gpt", model, made, number)
    quietly(dcp.save, {"app": zero}, checkpoint_id=folder / "two")
    first = digest(model, made, zero)
    model, made, zero = build("gpt", 1, optimizer=optimizer)
    quietly(dcp.load, {"app": zero}, checkpoint_id=folder / "two")
    return nothing, first, digest(model, made, zero)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "groups"])
def test_an_optimizer_that_has_not_stepped(ranks, tmp_path, optimizer):
    outcomes = ranks.run(2, fresh, tmp_path, optimizer)
    assert all(nothing for nothing, _, _ in outcomes)
    same([second for _, _, second in outcomes], [first for _, first, _ in outcomes])


def saves_with_scale(folder, ignore):
    model, optimizer, zero = with_scale(3, ignore, transposed=True)
    quietly(dcp.save, {"app": zero}, checkpoint_id=folder)
    return digest(model, optimizer, zero)


def loads_with_scale(folder, ignore):
    model, optimizer, zero = with_scale(2, ignore, alike=False, transposed=True)
    quietly(dcp.load, {"app": zero}, checkpoint_id=folder)
    return digest(model, optimizer, zero)


@pytest.mark.parametrize(("saved", "loaded"), [(IGNORED, IGNORED), (IGNORED, []), ([], IGNORED)])
def test_ignored_parameters_are_saved_and_loaded_like_others(ranks, tmp_path, saved, loaded):
    written = ranks.run(2, saves_with_scale, tmp_path / "a", saved)
    same(ranks.run(3, loads_with_scale, tmp_path / "a", loaded), written)
    plain = WithScale()
    quietly(dcp.load, {"app": {"model": plain.state_dict()}}, checkpoint_id=tmp_path / "a")
    assert reference.first_difference(reference.weights(plain), written[0][0]) == ""


def moves_on_after_inference_mode(folder):
    model, optimizer, zero = build("gpt", 3)
    step("gpt", model, optimizer, 0)
    with torch.inference_mode():
        quietly(dcp.save, {"app": zero}, checkpoint_id=folder)
        quietly(dcp.load, {"app": zero}, checkpoint_id=folder)
    step("gpt", model, optimizer, 1)
    return digest(model, optimizer, zero)


def straight_on():
    model, optimizer, zero = build("gpt", 3)
    for number in range(2):
        step("gpt", model, optimizer, number)
    return digest(model, optimizer, zero)


@pytest.mark.full
def test_training_goes_on_after_a_load_in_inference_mode(ranks, tmp_path):
    same(ranks.run(2, moves_on_after_inference_mode, tmp_path / "a"), ranks.run(2, straight_on))


def saves_behind(folder, stage):
    """dcp.async_save, with steps taken while it writes; the state as it was asked for."""
    model, optimizer, zero = build("gpt", stage)
    group = torch.distributed.new_group(backend="gloo")  # the thread's own: the default group is busy with the training
    for number in range(3):
        step("gpt", model, optimizer, number)
    asked = digest(model, optimizer, zero)
    saving = quietly(dcp.async_save, {"app": zero}, checkpoint_id=folder, process_group=group)
    for number in range(3, 5):
        step("gpt", model, optimizer, number)
    saving.result()
    return asked, digest(model, optimizer, zero)


@pytest.mark.parametrize(("stage", "loaded", "other"), [(3, 1, 0), (1, 3, 3)])
def test_async_save_has_the_state_of_its_call(ranks, tmp_path, stage, loaded, other):
    outcomes = ranks.run(2, saves_behind, tmp_path / "a", stage)
    same(ranks.run(loaded, loads, "gpt", tmp_path / "a", other, {}), [asked for asked, _ in outcomes])
    with pytest.raises(AssertionError):
        same(*([outcome[each] for outcome in outcomes] for each in (0, 1)))  # and the training went on


def test_what_async_save_cannot_take_is_named(tmp_path):
    _, _, zero = build("gpt", 3)
    state = quietly(zero.state_dict)
    with pytest.raises(UserError, match="no other process(?s:.*)thread"):
        pickle.dumps(state)
    with pytest.raises(UserError, match="this rank's pieces"):
        state["model"]["embed.weight"].new_empty(3)


class App:
    """What FSDP2's users write around `get_state_dict`."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def state_dict(self):
        model, optim = torch_state_dict.get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optim}

    def load_state_dict(self, state):
        torch_state_dict.set_state_dict(
            self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
        )


def with_fsdp(folder):
    """(our weights and states, FSDP2's after loading ours, ours after loading FSDP2's)"""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, optimizer, zero = build("gpt", 3)
    for number in range(2):
        step("gpt", model, optimizer, number)
    quietly(dcp.save, {"app": zero}, checkpoint_id=folder / "ours")
    with zero.gathered():
        ours = reference.weights(model)
    other = models.build("gpt", seed=5, tied=True)
    mesh = init_device_mesh("cpu", (2,))
    for block in other.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(other, mesh=mesh)
    adam = torch.optim.AdamW(other.parameters(), lr=1e-4)
    app = App(other, adam)
    quietly(dcp.load, {"app": app}, checkpoint_id=folder / "ours")
    theirs = {name: param.full_tensor().detach() for name, param in other.named_parameters()}
    moments = {name: adam.state[param]["exp_avg"].full_tensor().clone() for name, param in other.named_parameters()}
    quietly(dcp.save, {"app": app}, checkpoint_id=folder / "theirs")
    again, optimizer, zero = build("gpt", 2)
    quietly(dcp.load, {"app": zero}, checkpoint_id=folder / "theirs")
    back = digest(again, optimizer, zero)
    return ours, theirs, moments, adam.param_groups[0]["lr"], back


@pytest.mark.full
def test_fsdp2_loads_ours_and_we_load_fsdp2s(ranks, tmp_path):
    outcomes = ranks.run(2, with_fsdp, tmp_path)
    ours, theirs, moments, lr, back = outcomes[0]
    assert lr == 1e-2
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items()) and len(theirs) > 10
    assert reference.first_difference(back[0], ours) == ""
    states = {}
    for _, pieces, _, _ in (outcome[4] for outcome in outcomes):
        for (name, state, start), tensor in pieces.items():
            states.setdefault((name, state), []).append((start or 0, tensor))
    for name, tensor in moments.items():
        mine = torch.cat([t for _, t in sorted(states[name, "exp_avg"], key=lambda part: part[0])])
        assert torch.equal(mine, tensor.reshape(-1)), name
        assert states[name, "step"][0][1].item() == 2


def test_plain_tensors_load_it(tmp_path):
    """In the right shapes, without zeroshard."""
    model, optimizer, zero = build("gpt", 3)
    step("gpt", model, optimizer, 0)
    quietly(dcp.save, {"app": zero}, checkpoint_id=tmp_path / "a")
    wanted = models.build("gpt", seed=3, tied=True)
    state = {"app": {"model": wanted.state_dict()}}
    quietly(dcp.load, state, checkpoint_id=tmp_path / "a")
    with zero.gathered():
        assert reference.first_difference(reference.weights(wanted), reference.weights(model)) == ""


def test_what_dcp_has_not_read_is_refused_and_changes_nothing(tmp_path):
    model, optimizer, zero = build("gpt", 3)
    step("gpt", model, optimizer, 0)
    before = digest(model, optimizer, zero)
    _warn.cache_clear()
    with pytest.warns(UserWarning, match="pickle"):
        state = zero.state_dict()
    with pytest.raises(CheckpointError, match="not read by torch.distributed.checkpoint"):
        zero.load_state_dict(state)
    with pytest.raises(UserError, match="this rank's pieces"):
        state["model"]["embed.weight"] + 1
    same([digest(model, optimizer, zero)], [before])
    quietly(dcp.save, {"app": zero}, checkpoint_id=tmp_path / "a")
    other = zeroshard.shard(models.build("gpt", hidden=12), None)
    with pytest.raises(dcp.api.CheckpointException, match="Size mismatch"):
        quietly(dcp.load, {"app": other}, checkpoint_id=tmp_path / "a")
