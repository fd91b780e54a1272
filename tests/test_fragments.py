"""What a program writes to the parameters in `optimizer.param_groups`, outside `step()`, counts on every rank or is refused."""

from __future__ import annotations

import functools
import random
import time

import pytest
import torch
from torch import nn

import ranks as rank_processes
import reference
import zeroshard
from zeroshard import Comm, Offload, Precision
from zeroshard.comm import shared_memory
from zeroshard.errors import PeerError, StateError
from zeroshard.features import shared_parameters


class Averaging(torch.optim.Optimizer):
    """As schedule-free SGD does: the weights are those to train at in train mode, and an average of them in eval mode."""

    elementwise = True

    def __init__(self, params, lr=0.1, how="in place"):
        super().__init__(params, {"lr": lr})
        self.training, self.how = True, how

    def _mix(self, weight):
        for group in self.param_groups:
            for p in group["params"]:
                if "z" in self.state[p]:
                    if self.how == "in place":
                        p.lerp_(self.state[p]["z"], weight)
                    else:
                        p.data = p.data.lerp(self.state[p]["z"], weight)

    @torch.no_grad()
    def eval(self):
        if self.training:
            self._mix(-0.25)
        self.training = False

    @torch.no_grad()
    def train(self):
        if not self.training:
            self._mix(0.2)
        self.training = True

    @torch.no_grad()
    def step(self, closure=None):
        assert self.training
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    z = state.setdefault("z", p.detach().clone())
                    p.lerp_(z, 0.1)
                    z.sub_(p.grad, alpha=group["lr"])
                    p.sub_(p.grad, alpha=0.5 * group["lr"])


class Blocks(nn.Module):
    def __init__(self, width=24, blocks=3):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def x(step, index=0, dtype=torch.float32):
    return torch.randn(4, 24, generator=torch.Generator().manual_seed(100 * step + index)).to(dtype)


def looped(world, stage, how="in place", look="forward", dtype=None, seen=None, **options):
    """A loop that evaluates between steps: [what the evaluations answered, the weights at the end].

    look: what comes first after the edit. With no stage it is plain PyTorch, on the micro-batches of all ranks.
    """
    torch.manual_seed(0)
    model = Blocks()
    optimizer = Averaging(model.parameters(), how=how)
    zero, rank, own = None, 0, dtype or torch.float32
    if stage is not None:
        zero = zeroshard.shard(model, optimizer, stage=stage, precision=Precision(param_dtype=dtype), **options)
        rank = zero.rank
    answers = []
    for step in range(3):
        for index in [rank] if zero else range(world):
            model(x(step, index, own)).float().square().sum().backward()
        if zero is None:
            for p in model.parameters():
                p.grad /= world
        optimizer.step()
        optimizer.zero_grad()
        optimizer.eval()
        if look == "gathered" and zero:
            with zero.gathered():
                answers.append(reference.weights(model))
        elif look == "gathered":
            answers.append(reference.weights(model))
        elif look == "training forward":
            answers.append({"out": model(x(9, 0, own)).detach().clone()})
        else:
            with torch.no_grad():
                answers.append({"out": model(x(9, 0, own)).clone()})
        optimizer.train()
    if zero is None:
        return [*answers, reference.weights(model)]
    with zero.gathered():
        return [*answers, reference.weights(model)]


def assert_equal(got, want):
    for mine, its in zip(got, want, strict=True):
        reference.assert_same(mine, its)


@pytest.mark.row(66)
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("look", ["forward", "training forward", "gathered"])
@pytest.mark.parametrize("how", ["in place", "data replaced"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_fragments_edited_between_steps_have_plain_pytorchs_bits(ranks, stage, how, look, overlap, world):
    """By eval() and train() of an optimizer, at the next forward or gathered() of any kind, at 1, 2 and 3 ranks."""
    want = looped(world, None, how, look)
    for got in ranks.run(world, looped, world, stage, how, look, comm=Comm(overlap=overlap)):
        assert_equal(got, want)


@pytest.mark.row(66)
@pytest.mark.parametrize("look", ["forward", "gathered"])
def test_edited_masters_have_the_same_bits_at_every_stage(ranks, look):
    """Of bf16 parameters: what is edited is the masters, and the weights are their cast."""
    (want,) = ranks.run(1, looped, 1, 0, "in place", look, torch.bfloat16)
    for stage in range(4):
        (got,) = ranks.run(1, looped, 1, stage, "in place", look, torch.bfloat16)
        assert_equal(got, want)
    (want, other) = ranks.run(2, looped, 2, 0, "in place", look, torch.bfloat16)
    assert_equal(other, want)
    for stage in (1, 2, 3):
        for got in ranks.run(2, looped, 2, stage, "in place", look, torch.bfloat16):
            assert_equal(got, want)


@pytest.mark.row(66)
@pytest.mark.parametrize("offload", [{"optimizer": "cpu"}, {"optimizer": 0.5, "parameters": "cpu", "gradients": "cpu"}])
@pytest.mark.parametrize("look", ["forward", "gathered"])
def test_edited_fragments_in_host_memory_count_too(ranks, stage, look, offload):
    """Whatever of them rests there, with the bits of plain PyTorch."""
    want = looped(2, None, "in place", look)
    for got in ranks.run(2, looped, 2, stage, "in place", look, offload=Offload(**offload)):
        assert_equal(got, want)


def late(function, draw):
    @functools.wraps(function)
    def delayed(*args):
        time.sleep(draw.random() * 0.004)
        return function(*args)

    return delayed


def looped_late(seed, *args, **options):
    """`looped`, where this rank is drawn to be late whenever it shares something, hears of it, or drops pages of its own."""
    draw = random.Random(seed + rank_processes.rank())
    places = [(shared_memory.Flight, "post"), (shared_memory.Flight, "copy"), (shared_parameters.Pages, "forget")]
    before = [(owner, name, getattr(owner, name)) for owner, name in places]
    try:
        for owner, name, function in before:
            setattr(owner, name, late(function, draw))
        return looped(*args, **options)
    finally:
        for owner, name, function in before:
            setattr(owner, name, function)


@pytest.mark.processes  # it delays functions of the package
@pytest.mark.row(66)
@pytest.mark.parametrize("look", ["forward", "training forward", "gathered"])
@pytest.mark.parametrize("how", ["in place", "data replaced"])
@pytest.mark.parametrize("sharded", [1, 2, 3])
@pytest.mark.parametrize(("world", "dtype"), [(2, None), (3, None), (2, torch.bfloat16)])
def test_fragments_edited_beside_one_copy_are_not_dropped(ranks, sharded, how, look, world, dtype):
    """Pages that a rank wrote itself go when all owners have written: before anybody can edit, however late a rank is."""
    once = Offload(parameters="shared")
    want = looped(world, None, how, look) if dtype is None else None
    for seed in (1, 2):
        found = ranks.run(world, looped_late, 10 * seed, world, sharded, how, look, dtype, offload=once)
        want = want or ranks.run(world, looped, world, 1, how, look, dtype)[0]
        for got in found:
            assert_equal(got, want)


def made(stage=1, **options):
    torch.manual_seed(0)
    model = Blocks()
    optimizer = Averaging(model.parameters())
    return model, optimizer, zeroshard.shard(model, optimizer, stage=stage, **options)


def step_once(model, optimizer):
    model(x(0)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def on_disk(stage, folder, how):
    model, optimizer, zero = made(stage, offload=Offload(optimizer="nvme", parameters="nvme", path=folder))
    step_once(model, optimizer)
    with zero.gathered():
        before = reference.weights(model)
    with torch.no_grad():
        for param in optimizer.param_groups[0]["params"]:
            if how == "filled":
                param.zero_()
            else:
                param.data = torch.zeros_like(param)
    with pytest.raises((StateError, PeerError), match=r"rests elsewhere"):
        model(x(1))
    step_once(*made(stage)[:2])  # what stands for absent elements is NaN again
    with zero.gathered():
        reference.assert_same(reference.weights(model), before)
    step_once(model, optimizer)
    return True


@pytest.mark.row(66)
@pytest.mark.parametrize("how", ["filled", "replaced"])
def test_fragments_in_files_refuse_edits_on_every_rank(ranks, stage, tmp_path, how):
    """They are not in memory: torch refuses most writes, and the next forward the others; no weight has changed."""
    assert ranks.run(2, on_disk, stage, tmp_path, how) == [True, True]


def inside_gathered(stage, notices):
    model, optimizer, zero = made(stage)
    step_once(model, optimizer)
    with pytest.raises(StateError, match=r"inside gathered.*(?s:.)*before or after gathered"), zero.gathered():
        optimizer.eval()
        if notices == "a forward":
            model(x(1))
    optimizer.train()
    step_once(model, optimizer)


@pytest.mark.row(66)
@pytest.mark.parametrize("notices", ["a forward", "the end"])
def test_fragments_edited_inside_gathered_are_refused_on_every_rank(ranks, stage, notices):
    """There the parameters themselves are edited: of two edits of one weight none could be said to be the last."""
    ranks.run(2, inside_gathered, stage, notices)


def between(stage):
    model, optimizer, _ = made(stage)
    step_once(model, optimizer)
    out = model(x(1)).square().sum()
    optimizer.eval()
    with pytest.raises((StateError, RuntimeError), match="modified by an inplace|changed between forward and backward"):
        out.backward()
    optimizer.train()
    step_once(model, optimizer)


@pytest.mark.row(66)
def test_fragments_edited_between_forward_and_backward_raise_as_in_plain_pytorch(ranks, stage):
    ranks.run(2, between, stage)


def asked_alone(stage, how):
    """Rank 0 alone looks at the model after all ranks have edited. Returns whether it is an error there."""
    model, optimizer, zero = made(stage)
    step_once(model, optimizer)
    optimizer.eval()
    if how == "published first":
        with zero.gathered():
            pass
    if zero.rank == 0 and how == "state_dict":
        if stage in (1, 2):
            with pytest.raises(StateError, match=r"zero\.gathered"):
                model.state_dict()
        elif stage == 0:
            model.state_dict()
    elif zero.rank == 0:
        with torch.no_grad():
            model(x(1))
    optimizer.train()
    step_once(model, optimizer)


@pytest.mark.row(66)
@pytest.mark.parametrize("how", ["state_dict", "published first", "forward"])
@pytest.mark.parametrize("each", [0, 1, 2])
def test_one_rank_that_evaluates_alone_never_mixes_weights(ranks, how, each):
    """Without agreement it would see its own part edited and the others' not: an error that names both ranks."""
    outcomes = ranks.run(2, asked_alone, each, how, expect_errors=True)
    if how == "forward" and each:
        for outcome in outcomes:
            assert outcome.type == PeerError.__name__
            assert "rank 0 is at publishing edits" in outcome.message and "rank 1 is at" in outcome.message
    else:
        assert outcomes == [None, None]


class Reassigning(torch.optim.Optimizer):
    """Replaces `.data` in its step, as old code does; evaluates its closure at a point of its own."""

    elementwise = True

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        if closure is not None:
            for p in self.param_groups[0]["params"]:
                p.mul_(0.5)
            with torch.enable_grad():
                closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = p.data - group["lr"] * p.grad


def reassigned(stage, closes, offload):
    torch.manual_seed(0)
    model = Blocks()
    optimizer = Reassigning(model.parameters())
    options = {} if stage is None else {"stage": stage, "offload": Offload(**offload)}
    zero = None if stage is None else zeroshard.shard(model, optimizer, **options)
    for step in range(2):

        def closure(step=step):
            optimizer.zero_grad()
            loss = model(x(step)).square().sum()
            loss.backward()
            return loss

        if closes:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    if zero is None:
        return reference.weights(model)
    with zero.gathered():
        return reference.weights(model)


@pytest.mark.row(66)
@pytest.mark.parametrize("closes", [False, True], ids=["step", "closure"])
def test_a_step_that_replaces_data_or_edits_before_its_closure_counts(ranks, stage, closes):
    """With the bits of plain PyTorch: what a step does to `.data`, and to weights that its closure then computes with."""
    want = reassigned(None, closes, {})
    for got in ranks.run(2, reassigned, stage, closes, {}):
        reference.assert_same(got, want)


@pytest.mark.row(66)
def test_a_step_on_one_bucket_after_the_other_may_replace_data(ranks, stage, tmp_path):
    """In host memory and in files, where each bucket is stepped by itself."""
    want = reassigned(None, False, {})
    for offload in ({"optimizer": "cpu"}, {"optimizer": "nvme", "path": str(tmp_path)}):
        for got in ranks.run(2, reassigned, stage, False, offload):
            reference.assert_same(got, want)


def control_calls(stage):
    model, optimizer, zero = made(stage)
    step_once(model, optimizer)
    before = zero.ledger().traffic["control"].calls
    step_once(model, optimizer)
    return zero.ledger().traffic["control"].calls - before


@pytest.mark.row(66)
def test_looking_for_edits_takes_no_collective(ranks, stage):
    """Meetings carry the news: a forward, the backward, its end and the step (and gathers at stage 3) are all there are."""
    expected = {0: 4, 1: 4, 2: 4}
    for calls in ranks.run(2, control_calls, stage):
        assert calls == expected.get(stage, calls)
