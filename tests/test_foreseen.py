"""The norm that a program asks for at each step is computed where its backward ends: fewer meetings, the same bits."""

from __future__ import annotations

import math

import pytest
import torch

import models
import ranks
import zeroshard
from zeroshard.errors import PeerError

GPT = {"hidden": 12, "layers": 2}
STAGES = (0, 2, 3)


def sharded(stage, **options):
    model = models.build("gpt", **GPT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer, zeroshard.shard(model, optimizer, stage=stage, **options)


def backward(model, number):
    models.loss("gpt", model, models.batch("gpt", number, ranks.rank())).backward()


def clip(model, order=2.0):
    return torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type=order)


def controls(zero):
    traffic = zero.ledger().traffic.get("control")
    return 0 if traffic is None else traffic.calls


# --- what it saves ----------------------------------------------------------------------------------------------------

LOOPS = {
    "clips": lambda model, at: clip(model),
    "clips by the largest": lambda model, at: clip(model, math.inf),
    "clips by an order that no 32 bits hold": lambda model, at: clip(model, 0.7),
    "clips after the second of two backwards": lambda model, at: [backward(model, 10 + at), clip(model)],
    "scales first": lambda model, at: [[each.grad.mul_(0.5) for each in model.parameters()], clip(model)],
    "asks for two norms": lambda model, at: [clip(model, math.inf), clip(model)],
    "clips in every second step": lambda model, at: clip(model) if at % 2 else None,
}
# Meetings, sums and maxima of a step beyond those of its backwards and its update, from the third step on.
BEYOND = {
    "clips": [1, 1, 1, 1],
    "clips by the largest": [1, 1, 1, 1],
    "clips by an order that no 32 bits hold": [2, 2, 2, 2],
    "clips after the second of two backwards": [1, 1, 1, 1],
    "scales first": [2, 2, 2, 2],
    "asks for two norms": [3, 3, 3, 3],
    "clips in every second step": [1, 2, 1, 2],
}


def counted(stage, loop):
    """The control messages of each step from the third on, the same of a step that asks nothing, and all weights."""
    model, optimizer, zero = sharded(stage)
    found = []
    for step in range(6):
        before = controls(zero)
        backward(model, step)
        LOOPS[loop](model, step)
        optimizer.step()
        optimizer.zero_grad()
        found.append(controls(zero) - before)
    plain = []
    for step in range(2):
        before = controls(zero)
        for at in range(1 + ("two backwards" in loop)):
            backward(model, step + 10 * at)
        optimizer.step()
        optimizer.zero_grad()
        plain.append(controls(zero) - before)
    return [each - plain[1] for each in found[2:]]


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("stage", STAGES)
def test_a_step_asks_for_its_norm_where_its_backward_ends(loop, stage):
    assert ranks.run(2, counted, stage, loop) == [BEYOND[loop]] * 2


# --- the bits ---------------------------------------------------------------------------------------------------------


def trained(stage, loop, foreseen):
    model, optimizer, zero = sharded(stage)
    if not foreseen:
        zero._engine.gradients.foreseen.wish = lambda **_: 0
    for step in range(6):
        backward(model, step)
        LOOPS[loop](model, step)
        optimizer.step()
        optimizer.zero_grad()
    with zero.gathered():
        return [each.detach().clone() for each in model.parameters()]


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("stage", STAGES)
def test_the_bits_are_those_of_a_norm_that_is_asked_for(loop, stage):
    with_it, without = (ranks.run(2, trained, stage, loop, foreseen)[0] for foreseen in (True, False))
    assert all(map(torch.equal, with_it, without))


# --- ranks that differ ------------------------------------------------------------------------------------------------


def differs(stage, who):
    model, optimizer, _ = sharded(stage)
    for step in range(4):
        backward(model, step)
        if step < 3 or ranks.rank() == who:
            clip(model)
        try:
            optimizer.step()
        except PeerError as error:
            return step, str(error)
        optimizer.zero_grad()
    return None


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_that_clips_no_more_is_named_before_weights_change(stage, who):
    for step, said in ranks.run(2, differs, stage, who):
        assert step == 3 and "the ranks are not doing the same thing" in said
        assert f"rank {who}: scaled by [" in said and f"rank {1 - who}: scaled by []" in said


def logs(stage):
    """Only one rank looks at the norm: in plain PyTorch nothing comes of it."""
    model, optimizer, _ = sharded(stage)
    for step in range(4):
        backward(model, step)
        if step < 3 or ranks.rank():
            torch.nn.utils.get_total_norm([each.grad for each in model.parameters()])
        try:
            optimizer.step()
        except PeerError as error:
            return str(error)
        optimizer.zero_grad()
    return ""


def test_a_rank_that_alone_looks_at_the_norm_is_named():
    for said in ranks.run(2, logs, 2):
        assert "rank 1: scaled by ['what a norm of order 2.0 decides']" in said
