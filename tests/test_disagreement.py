"""Ranks that do different things are named at once, and what one rank's user does behind our back still counts."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import models
import ranks as rank_processes
import reference
import zeroshard
from zeroshard.errors import PeerError, StateError


def three(stage: int, optimizer=torch.optim.SGD, seed: int = 0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16))
    made = optimizer(model.parameters(), lr=0.1)
    return model, made, zeroshard.shard(model, made, stage=stage)


def x(index: int = 0):
    return torch.randn(3, 16, generator=torch.Generator().manual_seed(index))


# --- ranks that differ --------------------------------------------------------------------------------------------------


def differing(what: str, stage: int):
    rank = rank_processes.rank()
    model, optimizer, zero = three(stage)
    if what == "gathered":
        with zero.gathered(model[rank]):
            pass
    elif what == "write_from":
        with zero.gathered(write_from=rank):
            pass
    elif what == "entry":
        model[rank](x())
    elif what == "engines":
        other = three(stage, seed=1)[0]
        for each in (model, other) if rank == 0 else (other, model):
            each(x())
    elif what == "optimizers":
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
        optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model]
        zeroshard.shard(model, optimizers, stage=stage)
        model(x()).sum().backward()
        for optimizer in optimizers if rank == 0 else reversed(optimizers):
            optimizer.step()
    elif what == "training":
        model = models.build("batchnorm")
        zeroshard.shard(model, None, stage=stage)
        model.train(rank == 0)
        model(models.batch("batchnorm", 0, 0)[0])
    elif what == "one forward more":
        model = models.build("batchnorm")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        zeroshard.shard(model, optimizer, stage=stage)
        for _ in range(1 + rank):
            out = model(models.batch("batchnorm", 0, 0)[0])
        out.sum().backward()


CASES = ["gathered", "write_from", "entry", "engines", "optimizers", "training", "one forward more"]


@pytest.mark.row(5)
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("what", CASES)
def test_ranks_that_differ_are_named_on_every_rank(ranks, what, stage):
    """Other units, writers, models, optimizers, modes or counts: a PeerError on both ranks, before anything is mixed."""
    for outcome in ranks.run(2, differing, what, stage, expect_errors=True, group_timeout=20):
        assert outcome.type == PeerError.__name__, outcome
        assert "rank 0 is at" in outcome.message and "rank 1 is at" in outcome.message


class Growing(nn.Sequential):
    """With a cache as long as the longest batch that this rank has seen."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.register_buffer("cache", torch.ones(3), persistent=False)
        self.register_buffer("mine", torch.full((8,), 7.0))

    def forward(self, value):
        if len(value) > len(self.cache):
            self.cache = torch.ones(len(value))
        return super().forward(value) * self.cache[: len(value), None]


def alone(what: str, stage: int, one: int):
    """What the others cannot see, done on rank `one` in its second step; everything else is alike."""
    rank = rank_processes.rank()
    torch.manual_seed(0)
    model = Growing(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16))
    model[0].requires_grad_(what != "unfrozen")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero = zeroshard.shard(model, optimizer, stage=stage)
    said = ""

    def run(step: int, odd: bool):
        long = torch.ones(50, 16) if odd and what == "a longer buffer" else x(rank)
        if odd and what == "unfrozen":
            model[0].requires_grad_(True)
        model(long).square().mean().backward()
        if odd and what.startswith("cleared"):
            optimizer.zero_grad()
        if what == "cleared, then more":
            model(x(rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for step in range(3):
        try:
            run(step, odd=step == 1 and rank == one)
        except PeerError as error:
            said = str(error)
            model[0].requires_grad_(what != "unfrozen")
            optimizer.zero_grad()
            model.cache = torch.ones(3)
    with zero.gathered():
        return said, reference.weights(model)


@pytest.mark.row(6)
@pytest.mark.parametrize("one", [0, 1])
@pytest.mark.parametrize("what", ["cleared", "cleared, then more", "unfrozen", "a longer buffer"])
def test_what_one_rank_alone_has_done_is_named_on_both(ranks, what, stage, one):
    """Cleared gradients, an unfrozen parameter, a buffer that has grown: an error on both ranks, and no half update.

    Caught, the ranks go on alike.
    """
    first, second = ranks.run(2, alone, what, stage, one, group_timeout=20)
    word = {"unfrozen": "frozen parameters: ", "a longer buffer": "'cache': ((50,)"}.get(
        what, "parameters have gradients"
    )
    assert word in first[0] and word in second[0]
    assert f"rank {one}: " in first[0]
    assert reference.first_difference(first[1], second[1]) == ""


def one_edits(stage: int, how: str):
    """Rank 0 alone loads weights in gathered(); what the log says on this rank."""
    model, _, zero = three(stage)
    weights = {name: torch.ones(16, 16) if "weight" in name else torch.ones(16) for name, _ in model.named_parameters()}
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("zeroshard").addHandler(handler)
    try:
        with zero.gathered(write_from=0 if how == "write_from" else None):
            if zero.rank == 0 or how == "all":
                model.load_state_dict(weights)
    finally:
        logging.getLogger("zeroshard").removeHandler(handler)
    with zero.gathered():
        ones = sum(int((param == 1).sum()) for param in model.parameters())
    return said, ones


@pytest.mark.processes  # each rank has a log of its own
@pytest.mark.parametrize("how", ["one", "write_from", "all"])
def test_edits_of_one_rank_alone_are_said_to_mix(ranks, stage, how):
    """The owner's edit of every element counts: where ranks edit differently rank 0 warns, and only there."""
    (said, ones), (other, same) = ranks.run(2, one_edits, stage, how)
    assert ones == same and (ones == 3 * (16 * 16 + 16)) == (how != "one")
    assert len(said) == (how == "one") and other == []
    assert all("write_from" in line for line in said)


# --- gradients touched in unusual ways ------------------------------------------------------------------------------------


def taken(stage: int):
    """autograd.grad() between backward and step takes gradients without adding them, or clearing what was there."""
    model, _optimizer, zero = three(stage)
    model(x(1)).square().sum().backward()
    before = [p.grad.full_tensor() for p in model.parameters()]
    with zero.gathered():
        found = torch.autograd.grad(model(x(2)).square().sum(), list(model.parameters()))
    assert all(torch.isfinite(g).all() for g in found)
    after = [p.grad.full_tensor() for p in model.parameters()]
    return all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_autograd_grad_leaves_accumulated_gradients(ranks, stage):
    """As in plain PyTorch."""
    assert ranks.run(2, taken, stage) == [True, True]


def failed_backward(stage: int, pending: bool):
    """A backward that raises, then another graph's backward and a step: as if the first had never been."""

    def run(fail: bool):
        model, optimizer, zero = three(stage)
        model(x(9)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if fail:
            if pending:
                with zero.no_sync():
                    model(x(8)).square().sum().backward()
            second = model(x(1)).square().sum()
            hidden = model[0](x(3))
            hidden.register_hook(lambda grad: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                model[2](model[1](hidden)).sum().backward()
            optimizer.zero_grad()
            second.backward()
        else:
            model(x(1)).square().sum().backward()
        optimizer.step()
        with zero.gathered():
            return reference.weights(model)

    return reference.first_difference(run(True), run(False))


@pytest.mark.row(4)
@pytest.mark.parametrize("pending", [False, True], ids=["", "no_sync pending"])
def test_a_backward_after_one_that_failed(ranks, stage, pending):
    """The failed one's traces are dropped, with what was accumulated before it, on every rank alike."""
    assert ranks.run(2, failed_backward, stage, pending) == ["", ""]


class ClearsItself(torch.optim.SGD):
    elementwise = True

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None


def self_clearing(stage: int, dtype):
    def run(cls):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)).to(dtype)
        optimizer = cls(model.parameters(), lr=0.1)
        zero = zeroshard.shard(model, optimizer, stage=stage)
        for index in range(3):
            model(x(index).to(dtype)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        with zero.gathered():
            return reference.weights(model)

    return reference.first_difference(run(ClearsItself), run(torch.optim.SGD))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_an_optimizer_that_clears_gradients_inside_its_step(ranks, stage, dtype):
    """What the step updated is written back and gathered all the same."""
    assert ranks.run(2, self_clearing, stage, dtype) == ["", ""]


def cleared_in_groups(stage: int):
    model, optimizer, zero = three(stage)
    with zero.gathered():
        before = reference.weights(model)
    model(x(1)).square().sum().backward()
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = None
    optimizer.step()
    with zero.gathered():
        unmoved = reference.first_difference(reference.weights(model), before)
    model(x(2)).square().sum().backward()
    grads = {str(i): p.grad.full_tensor() for i, p in enumerate(model.parameters())}
    optimizer.zero_grad()
    model(x(2)).square().sum().backward()
    again = {str(i): p.grad.full_tensor() for i, p in enumerate(model.parameters())}
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.zeros_like(p)
    with pytest.raises(StateError, match="param_groups"):
        optimizer.step()
    return unmoved, reference.first_difference(grads, again)


def test_gradients_cleared_or_replaced_in_param_groups(ranks, stage):
    """Cleared there: no step, and the next backward starts from nothing. Replaced there: refused."""
    assert ranks.run(2, cleared_in_groups, stage) == [("", "")] * 2


def stale_handles(stage: int):
    model, optimizer, _ = three(stage)
    model(x(1)).square().sum().backward()
    kept = model[0].weight.grad
    optimizer.zero_grad()
    model(x(2)).square().sum().backward()
    for use in (kept.full_tensor, kept.to_local, kept.norm, lambda: kept.mul_(2)):
        with pytest.raises(StateError, match="read p.grad again"):
            use()
    model[0].weight.grad = model[1].weight.grad
    with pytest.raises(StateError, match="replaced"):
        optimizer.step()
    return True


def test_a_kept_gradient_handle_speaks_for_nothing_else(ranks, stage):
    """After clearing and another backward, or under another parameter, it is refused."""
    assert ranks.run(2, stale_handles, stage) == [True, True]


# ------------------------------------------------------------------------------------------- a rank that ends by itself


ALONE = """
import sys, torch, zeroshard, zeroshard.comm.groups
zeroshard.comm.groups.LEAVING = 2.0
model = torch.nn.Linear(4, 4)
zero = zeroshard.shard(model, torch.optim.SGD(model.parameters(), 0.1))
if zero.rank == 1:
    {how}
model(torch.ones(1, 4)).sum().backward()
"""


@pytest.mark.full
@pytest.mark.row(3)
@pytest.mark.parametrize(
    "how",
    ["raise ArithmeticError('only here')", pytest.param("sys.exit(3)", marks=pytest.mark.slow)],
    ids=["exception", "exit"],
)
def test_a_rank_that_ends_alone_ends_the_others(tmp_path, how):
    """At its end a rank waits for the others, but not for ever, and not at all where an exception ends it."""
    script = tmp_path / "alone.py"
    script.write_text(ALONE.format(how=how))
    # The launcher ends the others once it has seen that one is gone: not before they have said why.
    launch = "-m torch.distributed.run --standalone --monitor-interval 3 --nproc-per-node 2"
    command = [*launch.split(), str(script)]
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=150, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 1
    said = "rank 1 ended by ArithmeticError: only here" if "raise" in how else "rank 1 has ended"
    assert f"a collective did not complete: {said}" in done.stderr
