"""Names under `torch.compile` and `checkpoint_wrapper`: a model that was wrapped before `shard`, whole or in parts, is
called as a plain one."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import ranks as rank_processes
import reference
import zeroshard
from test_checkpoint_forgeries import forge, manifest_of
from test_checkpoint_parts import forge_part, in_parts, part_of_rank
from zeroshard import Layout
from zeroshard.errors import UserError

HOW = ["plain", "whole", "inside", "checkpoint"]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(6, 8)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(2)])
        self.head = nn.Linear(8, 8, bias=False)
        self.head.weight = self.blocks[0][0].weight  # tied

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.head(x)


def build(how):
    torch.manual_seed(0)
    model = Net()
    if how == "inside":
        for at, block in enumerate(model.blocks):
            model.blocks[at] = torch.compile(block, backend="eager")
    if how == "checkpoint":
        for at, block in enumerate(model.blocks):
            model.blocks[at] = checkpoint_wrapper(block)
    return torch.compile(model, backend="eager") if how == "whole" else model


def shard(how, stage=3, **layout):
    model = build(how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer, zeroshard.shard(model, optimizer, stage=stage, layout=Layout(**layout))


def plainly(weights):
    return {
        name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", ""): tensor
        for name, tensor in weights.items()
    }


def saves(how, folder):
    model, optimizer, zero = shard(how)
    model(torch.ones(4, 6) * (1 + rank_processes.rank())).square().mean().backward()
    optimizer.step()
    zero.save(folder / how)
    zero.export(folder / f"{how} exported")
    units = [unit.name for unit in zero._engine.units]
    with zero.gathered("blocks.0.0.weight", "head"), zero.gathered():
        return plainly(reference.weights(model)), units


def loads(how, path):
    model, _, zero = shard(how, 1)
    assert zero.load(path).skipped == []
    with zero.gathered():
        return plainly(reference.weights(model))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compiled")
    return folder, {how: rank_processes.run(2, saves, how, folder)[0] for how in HOW}


@pytest.mark.row(45)
def test_checkpoints_exports_and_units_have_the_same_names(saved):
    from safetensors.torch import load_file

    folder, found = saved
    asked = "parameters", "buffers", "optimizers"
    want = {key: manifest_of(folder / "plain")[key] for key in asked}
    keys = load_file(folder / "plain exported" / "model.safetensors").keys()
    for how in HOW:
        text = json.dumps({key: manifest_of(folder / how)[key] for key in asked}, sort_keys=True)
        assert "_orig_mod" not in text and "_checkpoint_wrapped_module" not in text
        assert sorted(manifest_of(folder / how)["parameters"]) == sorted(want["parameters"])
        assert manifest_of(folder / how)["optimizers"] == want["optimizers"]
        assert sorted(manifest_of(folder / how)["buffers"]) == sorted(want["buffers"])
        assert load_file(folder / f"{how} exported" / "model.safetensors").keys() == keys
        assert found[how][1] == found["plain"][1] == ["", "blocks.0", "blocks.1"]
        reference.assert_same(found[how][0], found["plain"][0])


@pytest.mark.row(45)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("by", HOW)
def test_each_loads_what_the_others_saved(saved, how, by):
    folder, found = saved
    for weights in rank_processes.run(3, loads, how, folder / by):
        reference.assert_same(weights, found[by][0])


def prefixed(value):
    if isinstance(value, dict):
        return {prefixed(key): each for key, each in value.items()}
    return f"_orig_mod.{value}"


@pytest.mark.row(45)
@pytest.mark.parametrize("inline", [64, 0], ids=["one manifest", "in parts"])
def test_a_checkpoint_with_compiled_names_still_loads(tmp_path, inline):
    """As all of a compiled model were until names were told apart."""
    want = rank_processes.run(2, in_parts, saves, "whole", tmp_path, inline=inline)[0][0]
    path = tmp_path / "whole"
    old = manifest_of(path)
    for key in ("parameters", "buffers"):
        old[key] = prefixed(old[key])
    for entry in old["parameters"].values():
        entry["names"] = [prefixed(name) for name in entry["names"]]
    for key in {"fragments", "grains", "values", "cut"} & old.keys():
        old[key] = [[prefixed(name), *rest] for name, *rest in old[key]]
    for group in (group for optimizer in old["optimizers"] for group in optimizer["groups"]):
        group["parameters"] = [prefixed(name) for name in group["parameters"]]
    forge(path, old)
    for rank in range(2 if inline == 0 else 0):
        part = part_of_rank(path, rank)
        part["fragments"] = [[prefixed(name), *rest] for name, *rest in part["fragments"]]
        forge_part(path, rank, part)
    for how in HOW:
        for weights in rank_processes.run(2, loads, how, path):
            reference.assert_same(weights, want)


def loads_weights(how, folder):
    model = build(how)
    zero = zeroshard.load(model, folder)
    with zero.gathered():
        return plainly(reference.weights(model))


@pytest.mark.parametrize("how", HOW)
def test_weights_with_compiled_names_fill_a_model(saved, tmp_path, how):
    """Such as `compiled.state_dict()` has, written by anything."""
    from safetensors.torch import load_file, save_file

    folder, found = saved
    tensors = load_file(folder / "plain exported" / "model.safetensors")
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    save_file({prefixed(name): tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    for path in (tmp_path, folder / "plain exported"):
        for weights in rank_processes.run(2, loads_weights, how, path):
            reference.assert_same(weights, found["plain"][0])


def patterns(how):
    """Patterns of plain names match, and an error names plain ones."""
    _, optimizer, zero = shard(how, 2, ignore=["embed.bias"], whole=["blocks.1.0.*"], units=["blocks.*", "head"])
    units = [unit.name for unit in zero._engine.units]
    with pytest.raises(UserError, match=r"did you mean|one of") as error:
        shard(how, 2, whole=["block.1.0.*"])
    assert "_orig_mod" not in f"{error.value}"
    return units, len(optimizer.param_groups)


@pytest.mark.parametrize("how", ["whole", "inside"])
def test_patterns_are_of_plain_names(how):
    assert rank_processes.run(2, patterns, how) == rank_processes.run(2, patterns, "plain")
