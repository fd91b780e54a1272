"""What refusals say to write instead, written: each works, at every stage, with plain PyTorch's bits where there are any."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ranks as rank_processes
import reference
import zeroshard
from zeroshard import Layout
from zeroshard.errors import CheckpointError, PeerError, StateError, UserError


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))


def adam(params):
    return torch.optim.AdamW(params, lr=0.01)


def batch(step, rank):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))


def plain(edit=lambda model, optimizer: None, world=2, make=mlp):
    """Plain PyTorch's weights after two steps, in which one process runs all ranks' micro-batches."""
    model = make()
    optimizer = adam(model.parameters())
    for step in range(2):
        for rank in range(world):
            model(batch(step, rank)).square().mean().backward()
        for param in model.parameters():
            param.grad.div_(world)
        edit(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return reference.weights(model)


def weights(zero):
    with zero.gathered():
        return reference.weights(zero.model)


# ------------------------------------------------------------------------------------------------------- gradients set


def set_gradients(stage):
    """Gradients of `torch.autograd.grad`, put into p.grad, are refused; given to backward, they are averaged."""
    model = mlp()
    optimizer = adam(model.parameters())
    zero = zeroshard.shard(model, optimizer, stage=stage)
    params = list(model.parameters())
    told = ""
    for step in range(2):
        with zero.gathered():
            gradients = torch.autograd.grad(model(batch(step, zero.rank)).square().mean(), params)
        if not step:
            for param, gradient in zip(params, gradients, strict=True):
                param.grad = gradient
            with pytest.raises(StateError, match=r"torch\.autograd\.backward\(params, tensors\)") as error:
                optimizer.step()
            told = f"{error.value}"
            for param in params:
                param.grad = None
        with zero.gathered():
            torch.autograd.backward(params, gradients)
        optimizer.step()
        optimizer.zero_grad()
    assert "copy_" not in told
    return weights(zero)


def test_gradients_of_ones_own_go_through_backward(ranks, stage):
    for found in ranks.run(2, set_gradients, stage):
        reference.assert_same(found, plain())


def replaced(stage):
    """A gradient that backward left and the program replaces is refused; edited in place, it is used."""
    model = mlp()
    optimizer = adam(model.parameters())
    zero = zeroshard.shard(model, optimizer, stage=stage)
    model(batch(0, zero.rank)).square().mean().backward()
    first = next(model.parameters())
    first.grad = first.grad.full_tensor() * 0.5
    with pytest.raises(StateError, match=r"p\.grad\.copy_\(tensor\) in place of p\.grad = tensor"):
        optimizer.step()
    optimizer.zero_grad()
    for step in range(2):
        model(batch(step, zero.rank)).square().mean().backward()
        for param in model.parameters():
            param.grad.copy_(param.grad.full_tensor() * 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return weights(zero)


def test_a_gradient_is_edited_in_place_of_replaced(ranks, stage):
    halved = plain(lambda model, _: [param.grad.mul_(0.5) for param in model.parameters()])
    for found in ranks.run(2, replaced, stage):
        reference.assert_same(found, halved)


EDITS = {
    "nan_to_num": lambda g: torch.nan_to_num(g, nan=0.0, posinf=1e5, neginf=-1e5, out=g),
    "mul": lambda g: torch.mul(g, 0.5, out=g),
    "div": lambda g: torch.div(g, torch.tensor(3.0), out=g),
    "add": lambda g: torch.add(g, 0.25, out=g),
    "sub": lambda g: torch.sub(g, 0.25, out=g),
    "clamp": lambda g: torch.clamp(g, -0.001, 0.001, out=g),
    "clip": lambda g: torch.clip(g, min=-0.001, out=g),
    "neg": lambda g: torch.neg(g, out=g),
    "sign": lambda g: torch.sign(g, out=g),
}


def edited(stage, name):
    model = mlp()
    optimizer = adam(model.parameters())
    zero = zeroshard.shard(model, optimizer, stage=stage)
    for step in range(2):
        model(batch(step, zero.rank)).square().mean().backward()
        for param in model.parameters():
            assert EDITS[name](param.grad) is param.grad
        optimizer.step()
        optimizer.zero_grad()
    return weights(zero)


@pytest.mark.parametrize("name", EDITS)
def test_out_of_the_gradient_itself_is_an_edit_in_place(ranks, stage, name):
    """StyleGAN's `torch.nan_to_num(p.grad, out=p.grad)`, and the others of which there is one in place."""
    want = plain(lambda model, _: [EDITS[name](param.grad) for param in model.parameters()])
    for found in ranks.run(2, edited, stage, name):
        reference.assert_same(found, want)


# ------------------------------------------------------------------------------------------------------------ fragments


def clipped(stage):
    """fairseq's and SAM's way: by the optimizer's groups."""
    model = mlp()
    optimizer = adam(model.parameters())
    zero = zeroshard.shard(model, optimizer, stage=stage)
    for step in range(2):
        model(batch(step, zero.rank)).square().mean().backward()
        params = [param for group in optimizer.param_groups for param in group["params"]]
        if stage:
            with pytest.raises(StateError, match=r"clip_grad_norm_ of the model.s own parameters"):
                torch.nn.utils.clip_grad_norm_(params, 0.05)
            params = model.parameters()
        torch.nn.utils.clip_grad_norm_(params, 0.05)
        optimizer.step()
        optimizer.zero_grad()
    return weights(zero)


def test_an_optimizers_groups_are_clipped_where_nothing_is_cut(ranks):
    """At stage 0; else the refusal's line does it, with the same bits."""
    (first, *others), *more = (ranks.run(2, clipped, stage) for stage in (0, 1, 2, 3))
    for found in (each for runs in (others, *more) for each in runs):
        reference.assert_same(found, first)


def stepped_in_a_hook(stage):
    model = mlp()
    each = {param: adam([param]) for param in model.parameters()}
    zeroshard.shard(model, list(each.values()), stage=stage)
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda param: each[param].step())
    with pytest.raises(StateError, match="optimizer_in_backward=True"):
        model(batch(0, 0)).square().mean().backward()
    model = mlp()
    each = {param: adam([param]) for param in model.parameters()}
    zero = zeroshard.shard(model, list(each.values()), stage=stage, optimizer_in_backward=True)
    for step in range(2):
        model(batch(step, zero.rank)).square().mean().backward()
        for optimizer in each.values():
            optimizer.step()
            optimizer.zero_grad()
    return weights(zero)


def test_a_step_in_a_parameters_hook_names_the_setting_that_does_it(ranks, stage):
    for found in ranks.run(2, stepped_in_a_hook, stage):
        reference.assert_same(found, plain())


# -------------------------------------------------------------------------------------------------------------- buffers


class Rotary(nn.Module):
    """Its table grows with the input, as the caches of many models do."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("cache", torch.zeros(0, 8), persistent=False)

    def forward(self, x):
        if len(self.cache) < len(x):
            self.register_buffer("cache", torch.arange(len(x) * 8).float().view(-1, 8).cos(), persistent=False)
        return self.layer(x) + self.cache[: len(x)]


def grows(stage, where):
    found = {}
    for layout in (None, Layout(buffers="local")):
        torch.manual_seed(0)
        model = Rotary()
        if where == "at shard" and rank_processes.rank():
            model.register_buffer("more", torch.ones(3))
        try:
            zero = zeroshard.shard(model, adam(model.parameters()), stage=stage, layout=layout)
            for step in range(3):
                model(torch.ones(3 + (2 * step + 3 * zero.rank) % 5, 8)).square().mean().backward()
            found[layout is None] = ""
        except PeerError as error:
            found[layout is None] = f"{error}"
    return found


@pytest.mark.parametrize("where", ["at shard", "in forward"])
def test_buffers_that_differ_name_the_layout_that_lets_them(ranks, stage, where):
    for found in ranks.run(2, grows, stage, where):
        assert 'Layout(buffers="local")' in found[True] and ("more" if where == "at shard" else "cache") in found[True]
        assert found[False] == ""


# -------------------------------------------------------------------------------------------------------------- weights


def new_head(folder):
    body = nn.ModuleDict({"body": nn.Linear(8, 8)})
    zeroshard.shard(body, None, stage=1).export(folder, overwrite=True)
    with torch.device("meta"):
        model = nn.ModuleDict({"body": nn.Linear(8, 8), "head": nn.Linear(8, 2)})
    with pytest.raises(CheckpointError, match=r"(?s)'head.weight' is not in the folder.*strict=False.*init="):
        zeroshard.load(model, folder)
    with torch.device("meta"):
        model = nn.ModuleDict({"body": nn.Linear(8, 8), "head": nn.Linear(8, 2)})
    zero = zeroshard.load(model, folder, strict=False)
    return bool(weights(zero)["head.weight"].any())


def test_a_folder_without_the_new_head_names_strict(ranks, tmp_path):
    assert ranks.run(2, new_head, tmp_path / "base") == [True, True]


# ----------------------------------------------------------------------------------------------------------------- data


def test_columns_by_name_are_refused_with_the_two_ways_to_rows():
    model = mlp()
    zero = zeroshard.shard(model, adam(model.parameters()))
    data = {"x": torch.randn(6, 8), "y": torch.arange(6)}
    with pytest.raises(UserError, match=r"TensorDataset\(\*data\.values\(\)\).*dict\(zip\(data, row\)\)"):
        zero.batches(data, per_step=2)
    rows = [dict(zip(data, row, strict=True)) for row in zip(*data.values(), strict=True)]
    for dataset in (torch.utils.data.TensorDataset(*data.values()), rows, dict(enumerate(rows))):
        step = next(iter(zero.batches(dataset, per_step=2, size=3, shuffle=False)))
        first = next(iter(step))
        x = first["x"] if isinstance(first, dict) else first[0]
        assert torch.equal(x, data["x"][:3])
