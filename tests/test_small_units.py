"""Many small blocks: neighbours become one unit, which stays gathered from one block's forward to the next one's."""

from __future__ import annotations

import json
import re

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ranks as rank_processes
import reference
import zeroshard
from zeroshard import Comm, Layout
from zeroshard.engine.weights.guard import Guarded
from zeroshard.engine.weights.unit import find_units
from zeroshard.errors import ReleasedError
from zeroshard.layout.partition import LARGE, MANY, joined
from zeroshard.planner import units as planned

BLOCKS = MANY + 4
WIDTH = 48  # LARGE // (48 * 48) is 28: one unit of 29 blocks, and one of the rest


class Deep(nn.Module):
    """Blocks of one list, or of two; and in what order a forward uses them."""

    def __init__(self, how="in order", width=WIDTH, blocks=BLOCKS):
        super().__init__()
        self.how = how
        self.first = nn.Linear(6, width)
        self.blocks = nn.ModuleList([nn.Linear(width, width, bias=False) for _ in range(blocks)])
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(blocks if how == "in turns" else 0)])
        self.last = nn.Linear(width, 2)

    def block(self, at, x):
        y = self.blocks[at](x)
        return torch.tanh(self.norms[at](y) if self.norms else y)

    def forward(self, x, rank=0):
        x, order = self.first(x), list(range(len(self.blocks)))
        if self.how == "backwards":
            order.reverse()
        if self.how == "another order on each rank":
            order = order[rank:] + order[:rank]
        if self.how == "some are left out":
            order = order[rank % 2 :: 2]
        if self.how == "one twice":
            order.insert(1, 0)
        for at in order:
            if self.how == "checkpointed":
                x = checkpoint(self.block, at, x, use_reentrant=False)
            elif self.how == "weights are read":
                x = self.block(at, x) + x @ self.blocks[at].weight.mT
            else:
                x = self.block(at, x)
        return self.last(x)


HOWS = (
    "in order", "in turns", "backwards", "another order on each rank", "some are left out", "one twice", "checkpointed",
    "weights are read",
)  # fmt: skip


def batch(step, rank):
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def trained(how, stage, layout=None, comm=None, steps=3):
    """Return the losses and the weights; and of the last step the units that were gathered in forward, in order."""
    torch.manual_seed(0)
    model = Deep(how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    zero = zeroshard.shard(model, optimizer, stage=stage, layout=layout, comm=comm)
    losses = []
    for step in range(steps):
        zero.record()
        loss = model(batch(step, zero.rank), zero.rank).square().mean()
        gathered = [event.unit for event in zero.events() if event.verb == "gather"]
        loss.backward()
        losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    with zero.gathered():
        return losses, reference.weights(model), gathered


def assert_same(got, want):
    for (losses, weights, _), (wanted, plain, _) in zip(got, want, strict=True):
        assert losses == wanted
        reference.assert_same(weights, plain)


def alone(how):
    return Layout(units=["blocks.*", "norms.*"] if how == "in turns" else ["blocks.*"])


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.full), 3])
def test_the_bits_are_those_of_a_unit_for_each_block(how, stage):
    want = rank_processes.run(2, trained, how, 0, alone(how))
    assert_same(rank_processes.run(2, trained, how, stage), want)


@pytest.mark.parametrize("how", ["in order", "one twice", "another order on each rank"])
@pytest.mark.parametrize(
    "settings",
    [Comm(release_after_forward=False), Comm(overlap=False), Comm(prefetch=3)],
    ids=["kept", "waited", "ahead"],
)
def test_whatever_is_gathered_ahead_or_kept(how, settings):
    want = rank_processes.run(2, trained, how, 0, alone(how))
    assert_same(rank_processes.run(2, trained, how, 3, None, settings), want)


FIRST, SECOND = "blocks.0 to blocks.28", "blocks.29 to blocks.35"


@pytest.mark.parametrize(
    ("how", "wanted"),
    [
        ("in order", ["", FIRST, SECOND]),
        ("backwards", ["", SECOND, FIRST]),
        ("in turns", ["", FIRST, "norms.0 to norms.35", SECOND]),
        ("one twice", ["", FIRST, SECOND]),
    ],
)
def test_a_forward_gathers_each_unit_once(how, wanted):
    """Not once for each block: also where two lists take turns."""
    for *_, gathered in rank_processes.run(2, trained, how, 3):
        assert gathered == wanted


def called_by_the_loop(stage, layout=None):
    """The program's own loop over blocks, without the model's forward."""
    torch.manual_seed(0)
    model = Deep()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero = zeroshard.shard(model, optimizer, stage=stage, layout=layout)
    for step in range(2):
        x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + zero.rank))
        for block in model.blocks:
            x = block(x).tanh()
        x.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    held = zero.ledger().held["gather"] if stage == 3 else 0
    with zero.gathered():
        return reference.weights(model), held


def test_blocks_can_be_called_one_by_one():
    """As with a unit for each: whether a program runs does not depend on the size of its blocks."""
    want = rank_processes.run(2, called_by_the_loop, 0, alone(""))
    got = rank_processes.run(2, called_by_the_loop, 3)
    for (weights, held), (plain, _) in zip(got, want, strict=True):
        reference.assert_same(weights, plain)
        assert held == 0


def raises_between(stage):
    """An exception in the middle of a unit, and the step again."""
    torch.manual_seed(0)
    model = Deep()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero = zeroshard.shard(model, optimizer, stage=stage)
    broken = model.blocks[5].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(batch(0, zero.rank))
    broken.remove()
    held = zero.ledger().held.get("gather", 0)
    model(batch(0, zero.rank)).square().mean().backward()
    optimizer.step()
    with zero.gathered():
        return reference.weights(model), held


def test_an_exception_between_two_blocks_leaves_nothing_gathered():
    want = rank_processes.run(2, raises_between, 0)
    for (weights, held), (plain, _) in zip(rank_processes.run(2, raises_between, 3), want, strict=True):
        reference.assert_same(weights, plain)
        assert held == 0


def names(*counted):
    return [f"{name}.{at}" for name, count in counted for at in range(count)]


def test_neighbours_join_until_they_have_as_many_elements_as_a_large_one():
    few, many = names(("a", MANY)), names(("a", MANY), ("b", 3))
    assert joined(few, [5] * MANY) == [[at] for at in range(MANY)]
    assert joined(many, [5] * len(many)) == [list(range(MANY)), [MANY, MANY + 1, MANY + 2]]  # lists do not join
    halves = joined(many, [LARGE // 2] * len(many))
    assert halves == [*([at, at + 1] for at in range(0, MANY, 2)), [MANY, MANY + 1], [MANY + 2]]
    assert joined(many, [LARGE] * len(many)) == [[at] for at in range(len(many))]
    mixed = [LARGE if at == 7 else 5 for at in range(len(many))]
    assert joined(many, mixed)[:3] == [list(range(7)), [7], list(range(8, MANY))]


def told_of_units():
    """What a module of the root's that is called by itself says to write, sharded as it says; and what a unit's name
    gathers."""
    model = Deep()
    zero = zeroshard.shard(model, torch.optim.SGD(model.parameters()), stage=3)
    with zero.gathered("blocks.0 to blocks.28"):
        held = [not isinstance(block.weight, Guarded) for block in model.blocks]
    with pytest.raises(ReleasedError) as error:
        model.first(torch.ones(3, 6))
    again = Deep()
    advice = re.search(r"Layout\(units=(\[.*?\])\)", f"{error.value}")[1]
    zeroshard.shard(again, torch.optim.SGD(again.parameters()), stage=3, layout=Layout(units=json.loads(advice)))
    return held, json.loads(advice), again.first(torch.ones(3, 6)).shape


def test_what_names_a_unit_of_several_blocks_can_be_written():
    held, advice, shape = rank_processes.run(1, told_of_units)[0]
    assert held == [True] * 29 + [False] * (BLOCKS - 29)
    assert (advice, shape) == (["blocks.*", "first", "last"], (3, WIDTH))


def called_by_parts():
    """What a model is told whose parts are called by themselves, as an actor and its critics are; sharded as it says."""

    def trained(**settings):
        torch.manual_seed(0)
        parts = nn.ModuleDict({"actor": Deep(blocks=3), "critics": nn.ModuleList([Deep(blocks=3), Deep(blocks=3)])})
        zero = zeroshard.shard(parts, torch.optim.SGD(parts.parameters()), stage=3, **settings)
        x = torch.ones(3, 6)
        (parts["actor"](x) + parts["critics"][0](x) + parts["critics"][1](x)).sum().backward()
        return zero

    with pytest.raises(ReleasedError) as error:
        trained()
    advice = json.loads(re.search(r"Layout\(units=(\[.*?\])\)", f"{error.value}")[1])
    trained(layout=Layout(units=advice))
    return advice


def test_one_advice_names_all_parts_that_are_called_by_themselves():
    """Not one of their modules at a time."""
    (advice,) = rank_processes.run(1, called_by_parts)
    assert {"actor", "critics.*"} <= {*advice}


@pytest.mark.parametrize("how", ["in order", "in turns"])
@pytest.mark.parametrize("width", [4, WIDTH, 300])
@pytest.mark.parametrize("blocks", [3, MANY, MANY + 1])
def test_the_planner_finds_the_same_units(how, width, blocks):
    model = Deep(how, width, blocks)
    shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
    found = find_units(model, Layout())
    assert ["" if name == "the root" else name for name in planned.unit_names(shapes)] == [name for name, _ in found]
    assert planned.units_of_several(shapes) == {at for at, unit in enumerate(found) if len(unit.modules) > 1}
    own = {f"{path}.{name}": at for at, unit in enumerate(found[1:], 1) for path, m in unit.modules for name, _ in
           m.named_parameters()}  # fmt: skip
    assert planned.units_of(shapes) == dict.fromkeys(shapes, 0) | own


@pytest.mark.parametrize(
    "layout", [Layout(recompute=True), Layout(recompute=["blocks.3"]), alone("")], ids=["all", "one", "named"]
)
def test_units_that_are_named_stay_single(layout):
    assert [name for name, _ in find_units(Deep(), layout)] == ["", *(f"blocks.{at}" for at in range(BLOCKS))]
