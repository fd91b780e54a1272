"""What torch's modes do to a sharded model, and ours on an accelerator: the table of docs/gpus.md, row by row."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import emulated
import ranks
import reference
import zeroshard
from zeroshard import Layout, Precision
from zeroshard.errors import StateError

WIDTH, BLOCKS, STAGES = 8, 4, (0, 1, 2, 3)


class Net(nn.Module):
    def __init__(self, reentrant=None):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS))
        self.reentrant = reentrant

    def forward(self, x):
        for block in self.blocks:
            x = (block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)).tanh()
        return x


def shard(model, stage, *, lr=1e-2, layout=None, **settings):
    adam = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)
    return adam, zeroshard.shard(model, adam, stage=stage, layout=layout or Layout(units=["blocks.*"]), **settings)


# --- autocast ---------------------------------------------------------------------------------------------------------


class Casts(TorchDispatchMode):
    """How many 16-bit copies of weights are alive."""

    def __init__(self):
        super().__init__()
        self.alive = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for each in tree_leaves(made):
            if isinstance(each, torch.Tensor) and each.dtype is torch.bfloat16 and each.numel() == WIDTH * WIDTH:
                storage = each.untyped_storage()
                if storage._cdata not in self.alive:
                    self.alive.add(storage._cdata)
                    weakref.finalize(storage, self.alive.discard, storage._cdata)
        return made


def casts_alive(stage, *, train=True, recompute=False, reentrant=None, cache=True):
    """After a forward, inside the autocast that it ran in."""
    model, casts = Net(reentrant), Casts()
    shard(model, stage, layout=Layout(units=["blocks.*"], recompute=["blocks.*"] * recompute))
    x = torch.randn(4, WIDTH, requires_grad=reentrant is True)
    with casts, torch.autocast("cpu", torch.bfloat16, cache_enabled=cache), torch.set_grad_enabled(train):
        out = model(x)
        alive = len(casts.alive)
    if train:
        out.sum().backward()
    return alive


@pytest.mark.parametrize(
    "settings",
    [{"train": False}, {"recompute": True}, {"reentrant": False}, {"reentrant": True}],
    ids=["no_grad", "Layout.recompute", "checkpoint", "reentrant"],
)
def test_autocast_keeps_no_16_bit_copies_of_released_weights(settings):
    """Its cache would keep all of them, where autograd keeps none: without grad, and where backward recomputes."""
    assert casts_alive(3, **settings) <= 1


@pytest.mark.parametrize("stage", STAGES)
def test_autocast_leaves_autograds_16_bit_copies(stage):
    """Autograd keeps what backward multiplies by, of all blocks but the first, with autocast's cache and without; where
    nothing is released, the cache serves a loop without grad."""
    assert casts_alive(stage) == BLOCKS
    assert casts_alive(stage, cache=False) == BLOCKS - 1
    assert casts_alive(stage, train=False) == (BLOCKS if stage < 3 else 0)


def shared_in_a_graph(stage):
    """Gradients of weights that two forwards of one autocast share, with one without grad between them."""
    model = Net()
    adam, zero = shard(model, stage, lr=0.5)
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(3))
    with torch.autocast("cpu", torch.bfloat16):
        first = model(x)
        with torch.no_grad():
            model(x)
        (first.sum() + model(2 * x).sum()).backward()
    adam.step()
    with zero.gathered():
        return reference.weights(model)


@pytest.mark.full
def test_weights_that_two_graphs_of_one_autocast_share_have_plain_torchs_bits():
    """The shared copy's gradients are summed in 16 bits: so it must be one and the same for both."""
    model = Net()
    adam = torch.optim.AdamW(model.parameters(), lr=0.5, fused=True)
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(3))
    with torch.autocast("cpu", torch.bfloat16):
        (model(x).sum() + model(2 * x).sum()).backward()
    adam.step()
    for stage in STAGES:
        reference.assert_same(shared_in_a_graph(stage), reference.weights(model))


# --- graphs of a device -------------------------------------------------------------------------------------------------


def step(model, adam, x):
    model(x).square().sum().backward()
    adam.step()
    adam.zero_grad()


def refused(call, *args):
    with torch.emu.capture(), pytest.raises(StateError, match="cannot be captured as a graph"):
        call(*args)


def captured(stages):
    for stage in stages:
        found = []
        for capture in (False, True):
            model = Net().to("emu")
            adam, zero = shard(model, stage)
            x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(ranks.rank())).to("emu")
            step(model, adam, x)
            if capture:
                refused(model, x)
            loss = model(x).square().sum()
            if capture:
                refused(loss.backward)
                loss = model(x).square().sum()
            loss.backward()
            if capture:
                refused(adam.step)
            adam.step()
            adam.zero_grad()
            with zero.gathered():
                found.append(reference.weights(model))
        reference.assert_same(*found)


@pytest.mark.parametrize(
    ("world", "stages"), [(1, (0, 3)), pytest.param(2, STAGES, marks=pytest.mark.full)], ids=["1", "2"]
)
def test_a_step_is_not_captured(world, stages):
    """Forward, backward and step say so before anything is launched; the step goes on outside with the same bits."""
    emulated.run(world, captured, stages)


# --- deterministic algorithms -------------------------------------------------------------------------------------------


def fills(stage, dtype):
    """By the engine, of memory that is written next: in a backward, and in the rest of a step, which clips."""
    model = Net().to("emu")
    adam, _ = shard(model, stage, precision=Precision(param_dtype=dtype))
    x = torch.randn(4, WIDTH).to("emu", dtype)
    torch.use_deterministic_algorithms(True)
    for _ in range(2):
        with emulated.counted() as backward:
            model(x).square().sum().backward()
        with emulated.counted() as rest:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            adam.step()
            adam.zero_grad()
    torch.use_deterministic_algorithms(False)
    assert torch.utils.deterministic.fill_uninitialized_memory
    with emulated.counted() as of_programs:
        torch.use_deterministic_algorithms(True)
        torch.empty(3, device="emu")
        torch.use_deterministic_algorithms(False)
    assert of_programs.launches.total() == 1
    return [
        sum(n for (site, what), n in counts.launches.items() if what == FILL and not site.startswith("test_modes.py"))
        for counts in (backward, rest)
    ]


FILL = "fill of empty memory"


@pytest.mark.parametrize(
    ("stage", "dtype"), [(3, None)] + [pytest.param(s, torch.bfloat16, marks=pytest.mark.full) for s in STAGES]
)
def test_deterministic_algorithms_fill_no_message(stage, dtype):
    """What torch fills of ours is small: in a norm, once for a bucket with padding, and nine times."""
    first, second = emulated.run(2, fills, stage, dtype)
    assert first == [0, BLOCKS + 9] and second == [0, 8]
