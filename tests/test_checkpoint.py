"""A checkpoint loads into any ranks, stage, bounds and precision, bit for bit, or into nothing at all."""

import itertools
import json
import math
import os
import random
import re
import shutil
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy
import pytest
import torch

import models
import reference
import zeroshard
from zeroshard import Layout, Precision
from zeroshard.checkpoint.manifest import check_loads
from zeroshard.errors import CheckpointError, PeerError, StateError, UserError

CASES = {
    "gpt": {"tied": True},
    "degenerate": {},
    "lora": {},
}


def build(case, stage, *, bounds="unit", bucket_mib=24.0, dtype=None, optimizer="adamw", align=128):
    model = models.build(case, **CASES.get(case, {}))
    make = {
        "adamw": partial(torch.optim.AdamW, lr=1e-2),
        "sgd": partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
        "groups": lambda ps: torch.optim.Adam([{"params": [p], "lr": 1e-3 * (i + 1)} for i, p in enumerate(ps)]),
    }[optimizer]
    made = make(list(model.parameters()))
    zero = zeroshard.shard(
        model, made, stage=stage, layout=Layout(bounds=bounds, bucket_mib=bucket_mib, align=align),
        precision=Precision(param_dtype=dtype, cast_inputs=case != "gpt") if dtype else None,
    )  # fmt: skip
    return model, made, zero


def rank_and_world():
    if torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


def step(case, model, optimizer, number, total=4):
    """One step over `total` micro-batches, however many ranks there are."""
    rank, world = rank_and_world()
    losses = []
    for turn in range(total // world):
        loss = models.loss(case, model, models.batch(case, number, turn * world + rank)) / (total // world)
        loss.backward()
        losses.append(loss.detach())
    optimizer.step()
    optimizer.zero_grad()


def digest(model, optimizer, zero):
    """Everything that counts, gathered to one description equal at any layout: weights, masters and states by name."""
    pieces = {}
    for piece in zeroshard.checkpoint.content.pieces(zeroshard.checkpoint.content.model_state(zero._engine)):
        pieces[piece.parameter, piece.state, piece.start] = piece.tensor.clone()
    with zero.gathered():
        weights = reference.weights(model)
    buffers = {name: tensor.clone() for name, tensor in model.named_buffers()}
    options = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return weights, pieces, buffers, options


def joined(outcomes):
    """The ranks' pieces put together: {(parameter, state): whole tensor}."""
    pieces = {}
    for _, mine, _, _ in outcomes:
        for (name, state, start), tensor in mine.items():
            pieces.setdefault((name, state), []).append((start or 0, tensor))
    return {
        key: torch.cat([t.reshape(-1) for _, t in sorted(parts, key=lambda p: p[0])]) for key, parts in pieces.items()
    }


def same(a, b):
    whole, other = joined(a), joined(b)
    assert whole.keys() == other.keys()
    for key in whole:
        assert whole[key].dtype == other[key].dtype and torch.equal(whole[key], other[key]), key
    assert reference.first_difference(a[0][0], b[0][0]) == ""
    assert all(torch.equal(a[0][2][name], b[0][2][name]) for name in a[0][2])
    assert a[0][3] == b[0][3]


def saves(case, path, stage, options, steps=3):
    model, optimizer, zero = build(case, stage, **options)
    for number in range(steps):
        step(case, model, optimizer, number)
    zero.save(path, extra={"position": steps})
    return digest(model, optimizer, zero)


def loads(case, path, stage, options, more=0):
    model, optimizer, zero = build(case, stage, **options)
    step(case, model, optimizer, 99)  # something to be replaced
    loaded = zero.load(path)
    assert loaded.skipped == []
    found = digest(model, optimizer, zero)
    for number in range(loaded.extra["position"], loaded.extra["position"] + more):
        step(case, model, optimizer, number)
    return found if not more else digest(model, optimizer, zero)


WORLDS = [(2, 3), (3, 1), (1, 4), (4, 2), (2, 2)]


@pytest.mark.row(45)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("saved", "loaded"), WORLDS)
@pytest.mark.parametrize("pair", range(4))
def test_any_ranks_and_stage_into_any(ranks, tmp_path, pair, case, saved, loaded):
    """Masters, weights, optimizer states, steps, buffers and options, bit for bit."""
    pairs = list(itertools.product(range(4), range(4)))
    random.Random(f"{case}{saved}{loaded}").shuffle(pairs)
    stage_saved, stage_loaded = pairs[pair]
    options = {"dtype": torch.bfloat16 if saved % 2 == 0 else None}
    written = ranks.run(saved, saves, case, tmp_path, stage_saved, options | {"bounds": "model"})
    same(ranks.run(loaded, loads, case, tmp_path, stage_loaded, options | {"bucket_mib": 0.002}), written)


@pytest.mark.parametrize("optimizer", ["sgd", "groups"])
def test_other_optimizers(ranks, tmp_path, optimizer):
    options = {"optimizer": optimizer}
    written = ranks.run(2, saves, "gpt", tmp_path / "a", 2, options)
    same(ranks.run(3, loads, "gpt", tmp_path / "a", 3, options | {"bounds": "tensor"}), written)


@pytest.mark.row(45)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_resumed_training_is_the_training_that_never_stopped(ranks, tmp_path, dtype):
    """Four ranks, then two, then one, with the same micro-batches a step: the same bits as without stopping."""
    straight = ranks.run(4, saves, "gpt", tmp_path / "straight", 3, {"dtype": dtype}, 9)
    ranks.run(4, saves, "gpt", tmp_path / "a", 3, {"dtype": dtype}, 3)
    resumed = ranks.run(2, resumes, tmp_path / "a", tmp_path / "b", 1, {"dtype": dtype}, 3)
    resumed = ranks.run(1, resumes, tmp_path / "b", tmp_path / "c", 2, {"dtype": dtype, "bounds": "model"}, 3)
    same(resumed, straight)


def resumes(path, other, stage, options, more):
    model, optimizer, zero = build("gpt", stage, **options)
    position = zero.load(path).extra["position"]
    for number in range(position, position + more):
        step("gpt", model, optimizer, number)
    zero.save(other, extra={"position": position + more})
    return digest(model, optimizer, zero)


def test_a_scheduler_and_a_scaler_travel_in_extra(tmp_path):
    model, optimizer, zero = build("mlp", 3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    for number in range(3):
        step("mlp", model, optimizer, number, total=1)
        scheduler.step()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    scaler.scale(torch.ones(()))
    scaler.update(new_scale=512.0)
    tensor = torch.arange(5, dtype=torch.int64)
    note = [1, (2.5, None), {"x": tensor}]
    zero.save(tmp_path / "a", extra={"scheduler": scheduler, "scaler": scaler, "note": note, "inf": float("inf")})
    model, optimizer, zero = build("mlp", 2)
    fresh = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    extra = zero.load(tmp_path / "a").extra
    fresh.load_state_dict(extra["scheduler"])
    other = torch.amp.GradScaler("cpu")
    other.load_state_dict(extra["scaler"])
    assert other.state_dict() == scaler.state_dict() and other.state_dict()["scale"] == 512.0
    assert fresh.get_last_lr() == scheduler.get_last_lr() == [optimizer.param_groups[0]["lr"]]
    assert (
        extra["inf"] == float("inf")
        and extra["note"][:2] == [1, (2.5, None)]
        and torch.equal(extra["note"][2]["x"], tensor)
    )
    for bad, kind in ((lambda: 0, "function"), (numpy.ones(2), "ndarray"), (1j, "complex")):
        with pytest.raises(CheckpointError, match=f"(?s)cannot be written as plain data.*extra.bad.deep.*{kind}"):
            zero.save(tmp_path / "b", extra={"bad": {"deep": bad}})
    assert not (tmp_path / "b").exists() and sorted(p.name for p in tmp_path.iterdir()) == ["a"]


def moves_on_after_inference_mode(path, fresh):
    model, optimizer, zero = build("gpt", 3, dtype=torch.bfloat16)
    step("gpt", model, optimizer, 0)
    with torch.inference_mode():
        zero.save(path)
    if fresh:
        model, optimizer, zero = build("gpt", 1, dtype=torch.bfloat16)
    with torch.inference_mode():
        zero.load(path)
        saving = zero.save(f"{path}-behind", asynchronous=True)
    step("gpt", model, optimizer, 1)
    saving.wait()
    return digest(model, optimizer, zero)


@pytest.mark.full
@pytest.mark.parametrize("fresh", [False, True])
def test_training_goes_on_after_a_load_in_inference_mode(ranks, tmp_path, fresh):
    straight = ranks.run(2, saves, "gpt", tmp_path / "a", 3, {"dtype": torch.bfloat16}, 2)
    same(ranks.run(2, moves_on_after_inference_mode, tmp_path / "b", fresh), straight)


def random_states(path):
    _, _, zero = build("mlp", 3)
    random.seed(5)
    torch.manual_seed(5 + zero.rank)
    zero.save(path)
    want = random.random(), torch.rand(3).tolist()
    random.seed(6)
    torch.manual_seed(6)
    zero.load(path)
    return want == (random.random(), torch.rand(3).tolist())


def test_random_states_are_each_ranks_own(ranks, tmp_path):
    assert ranks.run(2, random_states, tmp_path / "a") == [True, True]


# ------------------------------------------------------------------------------------------------------ ignored parameters


class WithScale(torch.nn.Module):
    """Whose `scale` and `table` a layout may ignore: one number, and a matrix that need not be contiguous."""

    def __init__(self, *, transposed=False):
        super().__init__()
        self.body = models.build("mlp")
        self.scale = torch.nn.Parameter(torch.tensor(1.5))
        table = torch.linspace(0, 1, 35).view(7, 5)
        self.table = torch.nn.Parameter(table.t().contiguous().t() if transposed else table)

    def forward(self, x):
        return self.body(x) * self.scale + x @ self.table


def with_scale(stage, ignore, *, transposed=False, alike=True):
    """Two steps, on the same batches on all ranks if gradients that nobody averages are to be alike."""
    model = WithScale(transposed=transposed)
    optimizer = torch.optim.AdamW([{"params": model.body.parameters()}, {"params": [model.table, model.scale]}], lr=0.1)
    zero = zeroshard.shard(model, optimizer, stage=stage, layout=Layout(ignore=ignore))
    for number in range(2):
        models.loss("mlp", model, models.batch("mlp", number, 0 if alike else zero.rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, zero


IGNORED = ["scale", "table"]


def saves_with_scale(path, stage, ignore, extra=None):
    model, optimizer, zero = with_scale(stage, ignore, transposed=True)
    zero.save(path, extra)
    return digest(model, optimizer, zero)


def loads_with_scale(path, stage, ignore, weights_only):
    """Into a model that has moved on, whose ignored parameters have gradients; or into one on the meta device."""
    model, optimizer, zero = with_scale(stage, ignore, transposed=bool(weights_only))
    if weights_only:
        with torch.device("meta"):
            model = WithScale()
        optimizer = torch.optim.AdamW(
            [{"params": model.body.parameters()}, {"params": [model.table, model.scale]}], lr=0.1
        )
        zero = zeroshard.load(model, path, optimizer, stage=stage, layout=Layout(ignore=ignore))
        return digest(model, optimizer, zero)
    for param in model.parameters():
        with torch.no_grad(), zero.gathered():
            param.add_(zero.rank + 1)
    models.loss("mlp", model, models.batch("mlp", 9, zero.rank)).backward()
    zero.load(path)
    assert all(param.grad is None for param in model.parameters())
    return digest(model, optimizer, zero)


@pytest.mark.parametrize("weights_only", [False, True], ids=["load", "meta"])
@pytest.mark.parametrize(
    ("saved", "loaded"), [(IGNORED, IGNORED), (IGNORED, []), ([], IGNORED), (["table"], ["scale"])]
)
def test_ignored_parameters_are_saved_and_loaded_like_others(ranks, tmp_path, saved, loaded, weights_only):
    written = ranks.run(2, saves_with_scale, tmp_path / "a", 3, saved)
    assert {"scale", "table"} <= {name for _, pieces, _, _ in written for name, *_ in pieces}
    same(ranks.run(3, loads_with_scale, tmp_path / "a", 2, loaded, weights_only), written)
    manifest = json.loads((tmp_path / "a" / "manifest.json").read_text())["manifest"]
    for name in saved:
        numel = {"scale": 1, "table": 35}[name]
        found = [fragment for fragment in manifest["fragments"] if fragment[0] == name]
        cut = [f[1:4] for f in found if f[2] is not None]
        assert sorted(cut) == [[state, 0, numel] for state in ("exp_avg", "exp_avg_sq", "value")]
        assert {f[-1] for f in found} == {"rank00000.safetensors"} and len(found) == 4
    assert sorted(manifest["optimizers"][0]["groups"][1]["parameters"]) == IGNORED


def ranks_differ(path):
    model, optimizer, zero = with_scale(1, IGNORED, alike=False)
    with pytest.raises(
        CheckpointError, match="(?s)value of parameter '(scale|table)'.*same bits.*average its gradients"
    ):
        zero.save(path)
    torch.distributed.barrier()
    assert list(path.parent.iterdir()) == []
    for param in (model.scale, model.table):
        torch.distributed.broadcast(param.detach(), 0)
        for value in optimizer.state[param].values():
            torch.distributed.broadcast(value, 0)
    zero.save(path)
    with torch.no_grad():
        if zero.rank == 1:
            optimizer.state[model.scale]["exp_avg"].add_(1)
    with pytest.raises(CheckpointError, match="exp_avg of parameter 'scale'"):
        zero.save(path, asynchronous=True)
    return True


def test_ignored_parameters_that_differ_between_ranks_are_refused_by_name(ranks, tmp_path):
    assert ranks.run(2, ranks_differ, tmp_path / "a") == [True, True]


# ---------------------------------------------------------------------------------------------------------- all or nothing


class Raising:
    def state_dict(self):
        raise LookupError("no such key in the user's object")


def cannot_describe(path):
    """What a rank is asked to save and cannot is an error on all of them, before anything is written."""
    model, _, zero = build("mlp", 3)
    told = []
    for extra, buffer in (({"user": Raising()} if zero.rank == 1 else {}, None), ({}, torch.ones(2).to_sparse())):
        model.register_buffer("odd", buffer)
        with pytest.raises(CheckpointError) as error:
            zero.save(path, extra)
        told.append(str(error.value))
    assert "rank 1: LookupError: no such key in the user's object" in told[0]
    assert "rank 0: this kind of tensor cannot be saved" in told[1] and "buffer 'odd'" in told[1]
    assert list(path.parent.iterdir()) == []
    model.register_buffer("odd", torch.tensor([1 + 2j, 3 - 4j]))
    model.register_buffer("eighth", torch.tensor([0.5, 448]).to(torch.float8_e4m3fn))
    zero.save(path)
    model.odd.zero_()
    model.eighth.zero_()
    zero.load(path)
    return model.odd.tolist(), model.eighth.float().tolist()


def test_what_one_rank_cannot_save_is_an_error_on_all(ranks, tmp_path):
    assert ranks.run(2, cannot_describe, tmp_path / "a") == [([1 + 2j, 3 - 4j], [0.5, 448.0])] * 2


ASKED = {  # how, what rank 0 asks, what rank 1 asks, and what both are told
    "asynchronous": ("save", {"asynchronous": True}, {}, "zero.save(...), asynchronous=\n"),
    "keep": ("save", {"keep": 1}, {"keep": 3}, "1 on rank 0; 3 on rank 1"),
    "keep none": ("save", {}, {"keep": 3}, "None on rank 0; 3 on rank 1"),
    "name": ("save", {"path": "b"}, {"path": "c"}, "'b' on rank 0; 'c' on rank 1"),
    "wrong keep": ("save", {}, {"keep": 0}, "keep= counts checkpoints"),
    "wrong path": ("save", {"path": 5}, {}, "this is no path"),
    "an address": ("save", {}, {"path": "s3://bucket/run"}, "this is an address"),
    "wrong extra": ("save", {"extra": 5}, {}, "extra= is saved by its keys"),
    "strict": ("load", {"strict": False}, {}, "False on rank 0; True on rank 1"),
    "wrong strict": ("load", {"strict": "no"}, {}, "strict= must be True or False"),
    "overwrite": ("export", {"overwrite": True}, {}, "zero.export(...), overwrite=\n"),
    "dtype": ("export", {"dtype": torch.float16}, {"dtype": torch.bfloat16}, "torch.float16 on rank 0"),
    "wrong file_nbytes": ("export", {"file_nbytes": 0}, {}, "file_nbytes counts bytes"),
    "wrong folder": ("latest", {}, {"path": None}, "this is no path"),
    "other folders": ("latest", {"path": ""}, {"path": "nowhere/run"}, "the ranks look into different folders"),
    "trace": ("trace", {}, {"path": 5}, "this is no path"),
    "explain": ("explain", {}, {"path": None}, "'a' on rank 0; None on rank 1"),
    "load_weights": ("load_weights", {"path": 5}, {}, "this is no path"),
}


def asks_differently(folder):
    """By name of a case the error of this rank; nothing is written, and nobody waits."""
    (folder / "run").mkdir(exist_ok=True)
    _, _, zero = build("mlp", 3)
    for name in ("old", "older", "a"):
        zero.save(folder / "run" / name)
    found = {}
    for name, (how, *asked, _) in ASKED.items():
        given = dict(asked[zero.rank])
        path = given.pop("path", "a")
        path = folder / "run" / path if isinstance(path, str) and "//" not in path else path
        call = partial(zeroshard.load, models.build("mlp")) if how == "load_weights" else getattr(zero, how)
        with pytest.raises(zeroshard.Error) as error:
            call(path, **given)
        found[name] = type(error.value), str(error.value).replace("on another rank", "")
    assert zero.load(folder / "run" / "a").extra == {}
    return found, sorted(each.name for each in (folder / "run").iterdir())


@pytest.mark.row(9)
def test_ranks_that_ask_differently_are_told_before_anything_is_done(ranks, tmp_path):
    """Not least: of two `keep`s rank 0's counted, and of `asynchronous` on one rank nobody heard until a time-out."""
    (first, left), (second, _) = ranks.run(2, asks_differently, tmp_path, group_timeout=20)
    assert left == ["a", "old", "older"] and first.keys() == second.keys() == ASKED.keys()
    for name, (*_, told) in ASKED.items():
        assert first[name][0] is second[name][0], name
        assert told in first[name][1] and told in second[name][1], (first[name], second[name])


def in_folders_of_their_own(folder, asynchronous):
    own = folder / f"rank{rank_and_world()[0]}"
    own.mkdir()
    _, _, zero = build("mlp", 3)
    os.chdir(own)
    with pytest.raises(CheckpointError) as error:
        zero.save("run/a", asynchronous=asynchronous).wait()
    zero.save(folder / "b")
    with pytest.raises(CheckpointError) as missing:
        zero.load("../b" if zero.rank == 0 else "b")
    return str(error.value), str(missing.value), sorted(str(each) for each in own.rglob("*"))


@pytest.mark.processes
@pytest.mark.parametrize("asynchronous", [False, True])
def test_ranks_that_save_to_a_relative_path_in_different_folders(ranks, tmp_path, asynchronous):
    """Both places are named on both ranks, and nothing stays in either."""
    first, second = ranks.run(2, in_folders_of_their_own, tmp_path, asynchronous)
    assert first[:2] == second[:2] and first[2] == [f"{tmp_path}/rank0/run"] and second[2] == []
    assert f"{tmp_path}/rank0/run/a" in first[0] and f"{tmp_path}/rank1/run/a" in first[0]
    assert "rank 0 loads" in first[1] and f"{tmp_path}/rank1/b" in first[1]


def taken_out(path, stage, how):
    """Rank 0's part of a parameter, whose other part is rank 1's, leaves its group."""
    model = torch.nn.Sequential(torch.nn.Linear(13, 170), torch.nn.Linear(170, 13))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9 if how == "moved" else 0)
    zero = zeroshard.shard(model, optimizer, stage=stage)
    model(torch.ones(2, 13)).sum().backward()
    optimizer.step()
    zero.save(path)
    held = optimizer.param_groups[0]["params"]
    if how == "all":
        held.clear()
        return zero.save(path).path.name
    if zero.rank == 0 or how == "moved":
        out = held.pop(-1 if zero.rank == 0 else 1)  # rank 1 has the whole of '0.bias'
    if how == "moved":
        optimizer.add_param_group({"params": [out], "lr": 0.5})
    with pytest.raises((StateError, PeerError)) as error:
        zero.save(path)
    return str(error.value)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("how", ["taken", "moved", "all"])
def test_a_part_that_leaves_its_group_on_some_ranks_is_named(ranks, tmp_path, stage, how):
    """By a save too, before anything is written."""
    for said in ranks.run(2, taken_out, tmp_path / "a", stage, how):
        if how == "all":
            assert said == "a"
        else:
            assert "an optimizer's group was divided by what it holds" in said and "optimizer 0, rank" in said


def refused(path, message, rank_of_damage=None):
    model, optimizer, zero = build("gpt", 3)
    step("gpt", model, optimizer, 7)
    before = digest(model, optimizer, zero)
    with pytest.raises(CheckpointError, match=message):
        zero.load(path)
    after = digest(model, optimizer, zero)
    assert reference.first_difference(before[0], after[0]) == ""
    assert all(torch.equal(before[1][key], after[1][key]) for key in before[1])
    step("gpt", model, optimizer, 8)
    return True


def write(ranks, path):
    ranks.run(2, saves, "gpt", path, 3, {})
    return path


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    import ranks

    return write(ranks, tmp_path_factory.mktemp("checkpoint") / "a")


DAMAGE = {
    "missing": lambda file: file.unlink(),
    "empty": lambda file: file.write_bytes(b""),
    "truncated": lambda file: file.write_bytes(file.read_bytes()[:-1]),
    "extended": lambda file: file.write_bytes(file.read_bytes() + b"\0"),
    "link": lambda file: (file.rename(file.with_suffix(".moved")), file.symlink_to(file.with_suffix(".moved"))),
    "swapped": lambda file: shutil.copy(
        file.parent / ("rank00000.safetensors" if "1" in file.name else "rank00001.safetensors"), file
    ),
}


@pytest.mark.parametrize("how", DAMAGE)
@pytest.mark.parametrize("name", ["rank00000.safetensors", "rank00001.safetensors", "manifest.json"])
def test_damaged_files_change_nothing_on_any_rank(ranks, tmp_path, checkpoint, how, name):
    path = shutil.copytree(checkpoint, tmp_path / "a")
    DAMAGE[how](path / name)
    assert ranks.run(2, refused, path, "rank|digest|damaged|no complete checkpoint|regular file") == [True, True]


def test_no_flipped_bit_loads_silently(tmp_path, checkpoint):
    """Two hundred bits anywhere in any file, the manifest and the parts this rank does not need included."""
    path = shutil.copytree(checkpoint, tmp_path / "a")
    _, _, zero = build("gpt", 3)
    generator = random.Random(0)
    for name in sorted(file.name for file in path.iterdir()):
        right = (path / name).read_bytes()
        for _ in range(70):
            wrong = bytearray(right)
            wrong[generator.randrange(len(wrong))] ^= 1 << generator.randrange(8)
            (path / name).write_bytes(wrong)
            with pytest.raises(CheckpointError):
                zero.load(path)
        (path / name).write_bytes(right)
    zero.load(path)


def changed_meanwhile(path):
    """Rank 1's file changes when all is checked and nothing is read: says what every rank is told."""
    _, _, zero = build("gpt", 3)
    commit = zeroshard.checkpoint.loading.commit

    def late(engine, staged):
        if zero.rank == 1:
            file = path / "rank00001.safetensors"
            file.write_bytes(file.read_bytes()[:-1] + b"x")
        torch.distributed.barrier()
        commit(engine, staged)

    zeroshard.checkpoint.loading.commit = late
    try:
        with pytest.raises(CheckpointError, match=r"holds only some of it[\s\S]*rank \d: [\s\S]*changed meanwhile"):
            zero.load(path)
    finally:
        zeroshard.checkpoint.loading.commit = commit
    return True


def test_a_file_that_changes_between_check_and_read_is_an_error_on_all_ranks(ranks, tmp_path, checkpoint):
    assert ranks.run(2, changed_meanwhile, shutil.copytree(checkpoint, tmp_path / "a")) == [True, True]


def test_states_are_read_into_the_tensors_that_are_there(tmp_path):
    model, optimizer, zero = build("gpt", 3)
    step("gpt", model, optimizer, 0)
    before = {name: state["exp_avg"] for name, state in named_states(optimizer)}
    kept = {name: tensor.clone() for name, tensor in before.items()}
    zero.save(tmp_path / "a")
    step("gpt", model, optimizer, 1)
    assert any(not torch.equal(before[name], kept[name]) for name in kept)
    zero.load(tmp_path / "a")
    for name, state in named_states(optimizer):
        assert state["exp_avg"] is before[name]
        assert torch.equal(state["exp_avg"], kept[name])


def named_states(optimizer):
    return list(enumerate(optimizer.state[param] for group in optimizer.param_groups for param in group["params"]))


def another_model(path):
    model = models.build("gpt", hidden=12)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero = zeroshard.shard(model, optimizer)
    with pytest.raises(CheckpointError) as error:
        zero.load(path)
    assert "has shape" in str(error.value) and "optimizer 0 is SGD, saved was AdamW" in str(error.value)
    assert "head.weight" in str(error.value)
    assert str(error.value).count("\n    ") >= 5  # all at once
    return len(zero.load(path, strict=False).skipped) >= 5


def test_another_model_is_refused_with_all_differences(ranks, checkpoint):
    assert ranks.run(2, another_model, checkpoint) == [True, True]


def cannot_write(path):
    model, optimizer, zero = build("mlp", 3)
    step("mlp", model, optimizer, 0, total=2)
    zero.save(path)
    before = sorted(p.name for p in Path(path).parent.iterdir())
    write_tensors = zeroshard.checkpoint.saving.write_tensors
    if zero.rank == 1:
        zeroshard.checkpoint.saving.write_tensors = full
    try:
        with pytest.raises(CheckpointError, match=r"rank 1: .*No space left"):
            zero.save(path)
    finally:
        zeroshard.checkpoint.saving.write_tensors = write_tensors
    assert sorted(p.name for p in Path(path).parent.iterdir()) == before
    zero.load(path)
    step("mlp", model, optimizer, 1, total=2)
    return True


def full(*_):
    raise OSError(28, "No space left on device")


def test_a_rank_that_cannot_write_fails_all_and_harms_nothing(ranks, tmp_path):
    assert ranks.run(2, cannot_write, tmp_path / "a") == [True, True]


def test_saving_over_a_checkpoint_replaces_it(tmp_path):
    """One rename: the old one until then, the new one after."""
    _, _, zero = build("mlp", 3)
    zero.save(tmp_path / "a", extra={"n": 1})
    zero.save(tmp_path / "a", extra={"n": 2})
    assert zero.load(tmp_path / "a").extra == {"n": 2}
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_the_files_are_what_they_say(checkpoint):
    """Readable by the safetensors library; the manifest is plain JSON; nothing is written twice."""
    from safetensors import safe_open

    manifest = json.loads((checkpoint / "manifest.json").read_text())["manifest"]
    assert (manifest["format"], manifest["version"], manifest["ranks"]) == ("zeroshard checkpoint", 1, 2)
    seen = set()
    for name in manifest["files"]:
        with safe_open(checkpoint / name, "pt") as file:
            keys = set(file.keys())
            assert keys
            for key in keys:
                file.get_tensor(key)
    for parameter, state, start, *_ in manifest["fragments"]:
        assert (parameter, state, start) not in seen
        seen.add((parameter, state, start))


def test_where_a_checkpoint_is_refused():
    _, _, zero = build("mlp", 3)
    with zero.gathered(), pytest.raises(StateError, match="inside forward, backward or gathered"):
        zero.save("nowhere")
    with pytest.raises(CheckpointError, match="no complete checkpoint here"):
        zero.load("no/such/folder")
    assert issubclass(CheckpointError, zeroshard.Error) and not issubclass(CheckpointError, UserError)


class Named(torch.optim.Optimizer):
    """Momentum whose states have other optimizers' names for numbers, and a count in a tensor of one element."""

    elementwise = True

    def __init__(self, params, names=("mu", "value", "step", "a/b"), count="eta", lr=0.1):
        self.names, self.count = names, count
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in (param for param in group["params"] if param.grad is not None):
                state = self.state[param]
                if not state:
                    state.update({name: torch.zeros_like(param) for name in self.names}, **{self.count: torch.zeros(1)})
                state[self.count] += 1
                for number, name in enumerate(self.names, start=1):
                    state[name].mul_(0.5).add_(param.grad, alpha=number)
                    param.sub_(state[name], alpha=group["lr"] * state[self.count].item())


class Odd(torch.nn.Module):
    """Parameters without dimensions and of one element beside larger ones, some with names of two meanings."""

    SIZES: ClassVar = {
        "none": (),
        "one": (1,),
        "b/c": (3,),
        "c": (130,),
        "matrix": (40, 5),
        "empty": (0,),
        "ignored": (),
    }

    def __init__(self, *names):
        super().__init__()
        for at, name in enumerate(names or self.SIZES, start=1):
            size = self.SIZES[name]
            self.register_parameter(name, torch.nn.Parameter(torch.arange(1.0, math.prod(size) + 1).view(size) / at))

    def forward(self, scale):
        return sum((param * param).sum() * scale for param in self.parameters())


def named(stage, layout, names=(), optimizer=Named, offload=None):
    model = Odd(*names)
    made = optimizer(list(model.parameters()))
    zero = zeroshard.shard(model, made, stage=stage, layout=Layout(**layout), offload=offload)
    return model, made, zero


def named_steps(model, made, numbers):
    for number in numbers:
        model(torch.tensor(0.01 * (number + 1))).backward()
        made.step()
        made.zero_grad()


def named_job(path, stage, layout, names=(), *, load=False, save=True, offload=None):
    """Two steps and a checkpoint, or the two steps that follow one."""
    if "ignore" in layout and not names:
        layout = {**layout, "ignore": ["ignored"]}
    model, made, zero = named(stage, layout, names, offload=offload)
    if load == "over":
        named_steps(model, made, [7])
    if load:
        zero.load(path)
    named_steps(model, made, [2, 3] if load else [0, 1])
    if save:
        zero.save(path)
    with zero.gathered():
        return reference.weights(model)


def named_plainly(names=()):
    model = Odd(*names)
    made = Named(list(model.parameters()))
    named_steps(model, made, range(4))
    return reference.weights(model)


LAYOUTS = {
    "unit": {}, "align 1": {"align": 1}, "model": {"bounds": "model", "align": 1}, "tensor": {"bounds": "tensor"},
    "ignored": {"ignore": ["ignored"]},
}  # fmt: skip


@pytest.mark.heavy
@pytest.mark.full
@pytest.mark.row(71)
@pytest.mark.parametrize("load", [True, "over"], ids=["fresh", "over"])
@pytest.mark.parametrize(("one", "other"), list(itertools.pairwise([*LAYOUTS, "unit"])))
def test_states_are_known_by_their_shapes_whatever_their_names(ranks, tmp_path, one, other, load):
    """Also of parameters of one element or none: saved and loaded at other ranks, stages and layouts, to the bit."""
    plain = named_plainly()
    for world, there, stage, next_stage in ((2, 4, 3, 1), (4, 1, 1, 2), (1, 2, 0, 3)):
        path = tmp_path / f"{world}"
        ranks.run(world, named_job, path, stage, LAYOUTS[one])
        for found in ranks.run(there, named_job, path, next_stage, LAYOUTS[other], load=load, save=False):
            assert reference.first_difference(found, plain) == "", (world, there)


@pytest.mark.full
@pytest.mark.row(71)
@pytest.mark.parametrize("names", [("none",), ("one",), ("none", "one"), ("c",)], ids=str)
def test_states_where_nothing_but_one_shape_is_there(ranks, tmp_path, names):
    plain = named_plainly(names)
    ranks.run(2, named_job, tmp_path / "a", 3, {"align": 1}, names)
    for layout in ({"bounds": "tensor"}, {"align": 1}):
        for found in ranks.run(4, named_job, tmp_path / "a", 2, layout, names, load=True, save=False):
            assert reference.first_difference(found, plain) == ""


@pytest.mark.row(71)
def test_states_of_any_name_rest_in_files_too(ranks, tmp_path):
    plain = named_plainly()
    disk = zeroshard.Offload(optimizer="nvme", path=tmp_path)
    ranks.run(2, named_job, tmp_path / "a", 2, {"align": 1}, offload=disk)
    for found in ranks.run(1, named_job, tmp_path / "a", 0, {}, load="over", save=False, offload=disk):
        assert reference.first_difference(found, plain) == ""


class PerPart(Named):
    """Keeps one number for whatever part of a parameter it is given, or has a state for some of them alone."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.holds = object()  # so that `shard` does not try it, which would refuse it

    @torch.no_grad()
    def step(self, closure=None):
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                if self.count == "part":
                    self.state[param] = {"part": param.sum()}
                elif param[0] == 1:
                    self.state[param] = {"first": 1}


def per_part(path, count):
    model, made, zero = named(1, {}, ("matrix",), lambda params: PerPart(params, count=count))
    named_steps(model, made, [0])
    zero.save(path)


@pytest.mark.row(71)
@pytest.mark.parametrize(("count", "what"), [("part", r"'part' of parameter 'matrix'"), ("first", "1; nothing")])
def test_what_differs_between_the_parts_of_a_parameter_is_refused_at_save(ranks, tmp_path, count, what):
    with pytest.raises(ranks.RankFailure) as failure:
        ranks.run(2, per_part, tmp_path / "a", count)
    assert [raised.type for raised in failure.value.outcomes] == ["CheckpointError"] * 2
    assert all(re.search(what, raised.message) for raised in failure.value.outcomes)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.row(71)
@pytest.mark.parametrize(
    ("key", "value", "what"),
    [
        (3, torch.ones(()), "got: 3"),
        ("best", math.inf, "inf"),
        ("deep", {"a": 1}, "dict"),
        ("c", torch.ones(2) * 1j, ""),
    ],
    ids=["number", "infinite", "nested", "complex"],
)
def test_a_state_that_no_load_would_take_is_refused_at_save(tmp_path, key, value, what):
    _, made, zero = named(1, {}, ("matrix",))
    made.state[made.param_groups[0]["params"][0]] = {key: value.to(torch.complex128) if key == "c" else value}
    with pytest.raises(CheckpointError, match=f"matrix[^$]*{what}"):
        zero.save(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_what_is_about_to_be_written_is_called_no_damaged_file(checkpoint):
    manifest = json.loads((checkpoint / "manifest.json").read_text())["manifest"]
    lost = next(each for each in manifest["fragments"] if each[1] == "value")
    manifest["fragments"].remove(lost)
    with pytest.raises(CheckpointError, match="could be saved and not loaded again") as error:
        check_loads(checkpoint, manifest)
    assert repr(lost[0]) in str(error.value) and "damaged" not in str(error.value)


ANY_NAMES = [
    "..",
    "gradients",
    "a/../b",
    "a\0b",
    "\x1b[31m",
    "für",
    "\ud800",
    "value",
    "optimizer:value",
    "n" * 5000,
    "__metadata__",
]


@pytest.mark.row(71)
def test_names_of_any_kind_are_kept_apart(tmp_path):
    """Of parameters and of states: what is saved under them is what is loaded."""

    def make():
        model = torch.nn.Module()
        for at, name in enumerate(name for name in ANY_NAMES if "." not in name):
            model.register_parameter(name, torch.nn.Parameter(torch.full((2,), float(at))))
        model.forward = lambda scale: sum((param * param).sum() * scale for param in model.parameters())
        made = Named(list(model.parameters()), ANY_NAMES)
        return model, made, zeroshard.shard(model, made, stage=1)

    model, made, zero = make()
    named_steps(model, made, [0, 1])
    zero.save(tmp_path / "a")
    other, others, another = make()
    another.load(tmp_path / "a")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    for a, b in zip(made.param_groups[0]["params"], others.param_groups[0]["params"], strict=True):
        assert made.state[a].keys() == others.state[b].keys() == {*ANY_NAMES, "eta"}
        assert all(torch.equal(made.state[a][key], others.state[b][key]) for key in made.state[a])
