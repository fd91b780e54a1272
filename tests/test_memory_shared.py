"""Parameters and buffers that lie in one memory, or whose numbers lie elsewhere: exactly plain PyTorch's, or refused."""

from __future__ import annotations

import contextlib
import gc
import random

import pytest
import torch
from torch import nn

import ranks as rank_processes
import reference
import zeroshard
from zeroshard import Layout, Offload, Precision
from zeroshard.errors import UserError


class Wrapped(torch.Tensor):
    """Holds its numbers in another tensor, as quantized weights do."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = torch.utils._pytree.tree_map_only(Wrapped, lambda each: each.inner, (args, kwargs or {}))
        return torch.utils._pytree.tree_map_only(torch.Tensor, Wrapped, func(*args, **kwargs))


def two():
    return nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)})


def with_parameter(model, make):
    model["b"].weight = nn.Parameter(make(model["a"].weight.data))
    return model


def with_data(model, make):
    model["b"].weight.data = make(model["a"].weight.data)
    return model


def with_buffer(model, make):
    model["b"].register_buffer("view", make(model["a"].weight.data))
    return model


def columns(model):
    whole = torch.randn(8, 16)
    model["a"].weight, model["b"].weight = nn.Parameter(whole[:, :8]), nn.Parameter(whole[:, 8:])
    return model


def flat(model):
    whole = torch.randn(144)
    for layer, start in (("a", 0), ("b", 72)):
        model[layer].weight.data = whole[start : start + 64].view(8, 8)
        model[layer].bias.data = whole[start + 64 : start + 72]
    return model


REFUSED = {
    "a parameter made of another's data": (lambda: with_parameter(two(), lambda data: data), "b.weight' and parameter 'a.weight"),
    "data assigned": (lambda: with_data(two(), lambda data: data), "b.weight' and parameter 'a.weight"),
    "a transposed view": (lambda: with_data(two(), lambda data: data.t()), "b.weight' and parameter 'a.weight"),
    "a part": (lambda: with_parameter(two(), lambda data: data[2:4]), "b.weight' and parameter 'a.weight"),
    "every other column": (lambda: with_parameter(two(), lambda data: data[:, ::2]), "b.weight' and parameter 'a.weight"),
    "another dtype": (lambda: with_parameter(two(), lambda data: data.view(torch.bfloat16)), "b.weight' and parameter 'a.weight"),
    "a NumPy array": (lambda: with_data(two(), lambda data: torch.from_numpy(data.numpy())), "b.weight' and parameter 'a.weight"),
    "a buffer": (lambda: with_buffer(two(), lambda data: data), "buffer 'b.view' and parameter 'a.weight'"),
    "a buffer that is a row": (lambda: with_buffer(two(), lambda data: data[3]), "buffer 'b.view' and parameter 'a.weight'"),
}  # fmt: skip


def refused(make, match, stage):
    model = make()
    before = reference.weights(model)
    with pytest.raises(UserError, match=match) as caught:
        zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage)
    reference.assert_same(reference.weights(model), before)
    return str(caught.value)


@pytest.mark.row(67)
@pytest.mark.parametrize("what", REFUSED)
def test_what_lies_in_a_parameters_memory_is_refused_by_name(stage, what):
    """Two parameters over one memory have two gradients and two states, so they are not tied either."""
    said = refused(*REFUSED[what], stage)
    assert "clone()" in said and (("ties them" in said) is not what.startswith("a buffer"))


def refused_on_one(stage):
    model = two()
    if rank_processes.rank() == 1:
        with_data(model, lambda data: data)
    with pytest.raises(zeroshard.Error, match=r"b.weight' and parameter 'a.weight"):
        zeroshard.shard(model, None, stage=stage)


@pytest.mark.row(67)
def test_a_memory_shared_on_one_rank_is_refused_on_all(ranks, stage):
    ranks.run(2, refused_on_one, stage)


HARMLESS = {
    "columns of one matrix": columns,
    "parts of one flat tensor": flat,
    "an LSTM": lambda model: nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8), "c": nn.LSTM(8, 8)}),
    "nothing in it": lambda model: with_parameter(model, lambda data: data[:0]),
    "a copy": lambda model: with_parameter(model, torch.clone),
    "two buffers in one memory": lambda model: with_buffer(
        with_buffer(model, torch.clone), lambda data: model["b"].view
    ),
}


def harmless(what, stage):
    torch.manual_seed(0)
    model = HARMLESS[what](two())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    zero = zeroshard.shard(model, optimizer, stage=stage) if stage is not None else None
    for step in range(2):
        x = torch.randn(3, 8, generator=torch.Generator().manual_seed(step))
        model["a"](x).square().sum().backward() if zero is None else _call(zero, model, x)
        optimizer.step()
        optimizer.zero_grad()
    if zero is None:
        return reference.weights(model)
    with zero.gathered():
        return reference.weights(model)


def _call(zero, model, x):
    with zero.gathered():
        model["a"](x).square().sum().backward()


@pytest.mark.row(67)
@pytest.mark.parametrize("what", HARMLESS)
def test_disjoint_views_of_one_memory_train_with_plain_pytorchs_bits(stage, what):
    reference.assert_same(harmless(what, stage), harmless(what, None))


@pytest.mark.row(67)
def test_a_wrapped_parameter_is_refused_by_name_unless_it_is_ignored(stage):
    """Its numbers lie in another tensor, which would neither be sharded nor follow."""
    model = two()
    model["b"].weight = nn.Parameter(Wrapped(torch.randn(8, 8)))
    assert "Wrapped" in refused(lambda: model, r"this kind of parameter.*(?s:.)*'b.weight'", stage)
    zeroshard.shard(
        model, torch.optim.SGD(model["a"].parameters(), lr=0.1), stage=stage, layout=Layout(ignore=["b.weight"])
    )


def replaced_later(stage, how):
    model = two()
    zero = zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage)
    with pytest.raises(UserError, match=r"model's own weights(?s:.)*b.weight"), zero.gathered():
        weight = model["b"].weight
        weight.data = model["a"].weight.data if how == "another's" else weight.data.t()


@pytest.mark.row(67)
@pytest.mark.parametrize("how", ["another's", "its own, transposed"])
def test_data_replaced_by_a_view_of_the_model_is_refused(ranks, stage, how):
    """After shard(...) it could not be tied, and would be a copy without a word."""
    ranks.run(2, replaced_later, stage, how)


# --- what a program keeps of memory that it replaces -------------------------------------------------------------------

KEEP = {
    "tensor": (lambda data: data, lambda kept: kept),
    "flattened": (lambda data: data.view(-1), lambda kept: kept),
    "of NumPy": (lambda data: data.numpy(), torch.from_numpy),
    "alias of an alias": (lambda data: data.detach().t(), lambda kept: kept.t()),
}


def swapped(stage, seed, how, within=True, **settings):
    """Swap drawn parameters' `.data` and bring them back, as the averages of weights do that most repositories copy.

    Asserts at each point that what the program has kept is what it was. Returns the weights after each swap.
    """
    drawn = random.Random(seed)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    zero = zeroshard.shard(model, optimizer, stage=stage, **settings) if stage is not None else None
    swapping = zero.gathered if zero is not None and within else contextlib.nullcontext
    looking = contextlib.nullcontext if zero is None else zero.gathered
    keep, back = KEEP[how]
    kept, seen = {}, []

    def same():
        for name, (memory, values) in kept.items():
            assert torch.equal(back(memory).reshape(-1), values.reshape(-1)), name

    for block in range(5):
        aliases = {}
        with swapping(), torch.no_grad():
            for name, param in model.named_parameters():
                drew = drawn.random()
                if name in kept and drew < 0.5:
                    param.data = back(kept.pop(name)[0]).view(param.shape)
                elif name not in kept and drew < 0.5:
                    kept[name] = keep(param.data), param.data.clone()
                    param.data = torch.full_like(param, drawn.random())
                elif drew > 0.8:
                    aliases[name] = param.data  # of one that stays: a view of it, also where its neighbours go
            for alias in aliases.values():
                alias.mul_(1.25)
        with looking():
            seen.append(reference.weights(model))
        same()
        if not within:
            for alias in aliases.values():
                alias.mul_(1.25)
        for source in range(2) if zero is None else [zero.rank]:
            x = torch.randn(3, 8, generator=torch.Generator().manual_seed(10 * block + source))
            (model(x.to(model[0].weight.dtype)).float().square().mean() / (2 if zero is None else 1)).backward()
        optimizer.step()
        optimizer.zero_grad()
        same()
    return seen


@pytest.mark.heavy
@pytest.mark.row(67)
@pytest.mark.parametrize("how", KEEP)
@pytest.mark.parametrize("seed", range(4))
def test_memory_that_a_program_has_replaced_stays_what_it_was(ranks, stage, how, seed):
    """`backup[name] = param.data; param.data = other; ...; param.data = backup[name]`, inside gathered(), and outside
    of it where the parameters are whole on every rank: plain PyTorch's bits, of drawn parameters."""
    for within in (True, False)[: 1 + (stage < 3)]:
        want = swapped(None, seed, how, within)
        for got in ranks.run(2, swapped, stage, seed, how, within):
            for mine, its in zip(got, want, strict=True):
                reference.assert_same(mine, its)


def kept_twice(stage):
    """A swap while an alias of a neighbour is kept, then a second one once the alias is gone."""
    model = two()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero = zeroshard.shard(model, optimizer, stage=stage)
    first, second = model["a"].weight, model["a"].bias  # in one bucket
    with zero.gathered(), torch.no_grad():
        kept = first.data
        first.data = torch.zeros_like(first)
        alias = second.data
    with zero.gathered():
        pass
    del alias
    with zero.gathered(), torch.no_grad():
        first.data = kept
        kept, values = second.data, second.data.clone()
        second.data = torch.ones_like(second)
    assert torch.equal(kept, values)
    with zero.gathered():
        assert torch.equal(second, torch.ones_like(second))


@pytest.mark.row(67)
def test_memory_is_kept_again_after_an_alias_of_a_neighbour(ranks, stage):
    """What the program held at a swap does not count as the engine's at the next one."""
    ranks.run(2, kept_twice, stage)


OTHERS = {
    "masters": {"precision": Precision(param_dtype=torch.bfloat16)},
    "split": {"precision": Precision(param_dtype=torch.bfloat16, split_master=True)},
    "8 bits": {"precision": Precision(fp8=True)},
    "host": {"offload": Offload(parameters="cpu", gradients="cpu", optimizer="cpu")},
    "one vector": {"layout": Layout(bounds="model", units=())},
}


@pytest.mark.heavy
@pytest.mark.row(67)
@pytest.mark.parametrize("other", OTHERS)
def test_it_stays_in_every_format_and_tier_too(ranks, stage, other):
    """The same, where parameters rest elsewhere or in another format: the program asserts what it has kept."""
    for seed in range(2):
        ranks.run(2, swapped, stage, seed, "tensor", **OTHERS[other])


def kept_beside(stage):
    """Of two parameters in one bucket of over 1 MiB one is replaced; an array of the other, and what is held then."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(600, 600), nn.Linear(600, 600))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero = zeroshard.shard(model, optimizer, stage=stage, layout=Layout(units=()))
    pool = zero._engine.tier._pool
    used, arrays = [], []
    for _ in range(3):
        with zero.gathered(), torch.no_grad():
            arrays.append((model[0].weight.detach().numpy(), model[0].weight.detach().clone()))
            backup = model[1].weight.data
            model[1].weight.data = torch.zeros(600, 600)
        del backup
        gc.collect()
        zero.ledger()
        used.append(len(pool._used))
    assert all((torch.from_numpy(array) == values).all() for array, values in arrays)
    arrays.clear()
    return used


@pytest.mark.row(67)
def test_a_bucket_that_moved_leaves_nothing_behind(stage):
    """No block of the pool is kept for a bucket that has left it; an array of a neighbour goes on reading its values."""
    used = rank_processes.run(2, kept_beside, stage)
    assert all(each == [each[0]] * 3 for each in used), used


def frozen():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    zero = zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=1)
    gc.freeze()
    try:
        with pytest.raises(UserError, match=r"gc.freeze(?s:.)*'1.weight'(?s:.)*clone"), zero.gathered():
            backup = model[1].weight.data
            model[1].weight.data = torch.zeros(8, 8)
        del backup
    finally:
        gc.unfreeze()


@pytest.mark.row(67)
def test_views_that_the_collector_does_not_show_are_not_passed_over():
    rank_processes.run(1, frozen)


def swapped_in_shared_memory():
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero = zeroshard.shard(model, optimizer, stage=1, offload=Offload(parameters="shared"))
    with pytest.raises(UserError, match=r"ranks share(?s:.)*'weight'(?s:.)*clone"), zero.gathered():
        backup = model.weight.data
        model.weight.data = torch.zeros(8, 8)
    del backup


@pytest.mark.row(67)
def test_memory_that_ranks_share_cannot_be_left_to_one_program(ranks):
    ranks.run(2, swapped_in_shared_memory)
