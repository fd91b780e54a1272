"""Copies that differ between ranks are named: at each save, after a noticed edit, and on request."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zeroshard
from zeroshard import Offload, Precision
from zeroshard.errors import PeerError


class Noisy(torch.optim.Optimizer):
    """Draws its step from the rank's own generator."""

    elementwise = True

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p].setdefault("drawn", torch.zeros_like(p)).normal_()
                    p.add_(self.state[p]["drawn"], alpha=group["lr"])


def made(stage, optimizer=torch.optim.AdamW, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    one = optimizer(model.parameters(), lr=0.1)
    zero = zeroshard.shard(model, one, stage=stage, **options)
    torch.manual_seed(zero.rank)
    return model, one, zero


def one_step(model, optimizer):
    model(torch.ones(2, 16)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


ASKS = {
    "on request": lambda zero, folder: zero.check_replicas(),
    "save": lambda zero, folder: zero.save(folder / "ckpt"),
    "asynchronous save": lambda zero, folder: zero.save(folder / "ckpt", asynchronous=True).wait(),
    "export": lambda zero, folder: zero.export(folder / "weights"),
    "state_dict": lambda zero, folder: zero.state_dict(),
}


def loaded_on_one(stage, ask, folder, precision, offload):
    model, optimizer, zero = made(stage, precision=precision, offload=offload)
    one_step(model, optimizer)
    ASKS[ask](zero, folder / "first")
    if zero.rank == 1:
        with torch.no_grad():
            model[1].weight[3, 5] = 0.25
    with pytest.raises(PeerError) as caught:
        ASKS[ask](zero, folder / "second")
    with zero.gathered(write_from=0):
        pass
    ASKS[ask](zero, folder / "third")
    return str(caught.value), sorted(path.name for path in folder.glob("second/*"))


@pytest.mark.row(68)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("ask", ASKS)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_weights_changed_on_one_rank_are_named_to_the_element(ranks, tmp_path, ask, dtype, stage):
    """At stages 0-2, on every rank, and nothing is written; rank 0's weights given to all, it goes on."""
    folder = tmp_path / str(stage)
    told = ranks.run(
        2, loaded_on_one, stage, ask, folder, Precision(param_dtype=dtype, cast_inputs=dtype is not None), Offload()
    )
    for message, written in told:
        assert "parameter '1.weight', ranks 0 and 1" in message
        assert "element 53 is" in message and "got: element 53 is 0.25 (rank 1)" in message
        assert written == []


@pytest.mark.row(68)
def test_replicas_in_other_tiers_are_compared_too(ranks, tmp_path):
    for number, where in enumerate(({"optimizer": "cpu"}, {"optimizer": "nvme", "path": tmp_path})):
        told = ranks.run(2, noisy, 0, Offload(**where), tmp_path / str(number))
        assert all("'0.weight', ranks 0 and 1" in message for message in told)


def noisy(stage, offload, folder):
    model, optimizer, zero = made(stage, Noisy, offload=offload)
    zero.check_replicas()
    one_step(model, optimizer)
    if stage:
        zero.save(folder)
        return ""
    with pytest.raises(PeerError) as caught:
        zero.save(folder)
    assert not folder.exists()
    return str(caught.value)


@pytest.mark.row(68)
def test_an_optimizer_that_draws_its_own_numbers_is_named_where_it_is_replicated(ranks, stage, tmp_path):
    """At stage 0 each rank would go its own way; at stages 1-3 each element has one owner, and that is right."""
    for message in ranks.run(2, noisy, stage, Offload(), tmp_path / "ckpt"):
        assert ("parameter '0.weight', ranks 0 and 1" in message) is (stage == 0)


def lone_state(kind):
    model, optimizer, zero = made(0)
    one_step(model, optimizer)
    if zero.rank == 1:
        state = optimizer.state[optimizer.param_groups[0]["params"][0]]
        if kind == "an element":
            state["exp_avg"][2, 3] = 7.0
        elif kind == "a count":
            state["step"] += 1
        elif kind == "one more":
            state["mine"] = 3
        else:
            state["exp_avg"] = state["exp_avg"].double()
    with pytest.raises(PeerError) as caught:
        zero.check_replicas()
    return str(caught.value)


STATES = {
    "an element": ("state 'exp_avg'", "element 35 is 7.0 (rank 1)"),
    "a count": ("state 'step'", "element 0 is 2.0 (rank 1)"),
    "one more": ("state 'mine'", "3 (rank 1)"),
    "another dtype": ("state 'exp_avg'", "torch.float64"),
}


@pytest.mark.row(68)
@pytest.mark.parametrize("kind", STATES)
def test_optimizer_states_that_differ_are_named_at_stage_0(ranks, kind):
    name, got = STATES[kind]
    for message in ranks.run(3, lone_state, kind):
        assert f"{name} of parameter '0.weight', ranks 0 and 1" in message and got in message


def edited_alone():
    """At stage 0 an optimizer's part is the parameters themselves, all of them: one rank edits it."""
    model, optimizer, zero = made(0)
    if zero.rank == 1:
        with torch.no_grad():
            optimizer.param_groups[0]["params"][0][1, 1] = 4.0
    with pytest.raises(PeerError, match=r"(?s)parameter '0.weight', ranks 0 and 1.*element 17 is 4.0 \(rank 1\)"):
        model(torch.ones(2, 16))
    with zero.gathered(write_from=0):
        pass
    one_step(model, optimizer)
    zero.check_replicas()


@pytest.mark.row(68)
def test_an_edit_of_one_ranks_copy_is_named_at_the_next_forward(ranks):
    ranks.run(2, edited_alone)


def counted(stage):
    model, optimizer, zero = made(stage)
    one_step(model, optimizer)
    zero.record()
    before = sum(each.calls for verb, each in zero.ledger().traffic.items() if verb == "control")
    zero.check_replicas()
    calls = sum(each.calls for verb, each in zero.ledger().traffic.items() if verb == "control") - before
    compared = [event.logical for event in zero.events() if event.verb == "compare"]
    return calls, sum(compared), "compare" in zero.ledger().phases


@pytest.mark.row(68)
def test_a_check_takes_two_small_meetings_and_is_in_the_record(ranks, stage):
    """One to begin, one with the digests. What it reads is what is replicated, to the byte."""
    weights = 2 * 512 * 4  # a weight, a bias, and what makes two even shards of them
    states = 2 * (2 * (256 + 16) * 4 + 2 * 4)
    expected = {0: weights + states, 1: weights, 2: weights, 3: 0}[stage]
    assert ranks.run(2, counted, stage) == [(2, expected, True)] * 2
    assert ranks.run(1, counted, stage) == [(0, 0, True)]


def written_on_one(stage):
    """What each rank hears when rank 1 alone writes weights outside `gathered()`, and whether the remedy works."""
    model, optimizer, zero = made(stage)
    one_step(model, optimizer)
    with torch.no_grad():
        if zero.rank == 1:
            model[1].weight.zero_()
        model(torch.ones(2, 16))  # an evaluation compares nothing, and hides nothing
    with pytest.raises(PeerError) as caught:
        one_step(model, optimizer)
    with pytest.raises(PeerError):  # not only once
        one_step(model, optimizer)
    with zero.gathered(write_from=0):
        pass
    one_step(model, optimizer)
    zero.check_replicas()
    return str(caught.value)


@pytest.mark.row(68)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_weights_written_to_on_one_rank_are_named_at_the_next_forward(ranks, stage):
    """A step would make a mixture of them, which no later look could tell from training."""
    for told in ranks.run(2, written_on_one, stage):
        assert "rank 1: edited: '1.weight'" in told
