"""The same order or an error: what ranks do differently is either harmless, or named on all of them at once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ranks as rank_processes
import reference
import zeroshard
from zeroshard.errors import PeerError


class Swapped(nn.Module):
    """Two Linear layers of one shape, and a call to them in either order."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x, *, swap: bool):
        first, second = (self.b, self.a) if swap else (self.a, self.b)
        return second(torch.tanh(first(x)))


def x(rank: int):
    return torch.randn(3, 16, generator=torch.Generator().manual_seed(rank))


def swapped(stage: int | None):
    """The weights after three steps in which rank 1 calls the two in the other order; stage None: by FSDP2."""
    torch.manual_seed(0)
    model, rank = Swapped(), rank_processes.rank()
    zero = None
    if stage is None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (2,))
        for module in (model.a, model.b, model):
            fully_shard(module, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        zero = zeroshard.shard(model, optimizer, stage=stage)
    for _ in range(3):
        optimizer.zero_grad()
        model(x(rank), swap=rank == 1).square().sum().backward()
        optimizer.step()
    if zero is None:
        return {name: param.full_tensor().detach() for name, param in model.named_parameters()}
    with zero.gathered():
        return reference.weights(model)


def unsharded():
    torch.manual_seed(0)
    model = Swapped()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        for rank in range(2):
            model(x(rank), swap=rank == 1).square().sum().backward()
        for param in model.parameters():
            param.grad.div_(2)
        optimizer.step()
    return reference.weights(model)


@pytest.mark.row(5)
def test_two_swapped_layers_of_one_shape(ranks, stage):
    """Rank 1 calls two layers of equal shape in the other order: every rank computes with the right one, at any stage."""
    for weights in ranks.run(2, swapped, stage):
        assert reference.first_difference(weights, unsharded()) == ""


@pytest.mark.row(5)
def test_what_fsdp2_makes_of_two_swapped_layers(ranks):
    """The same program under FSDP2 ends without an error and with other weights: its gathers are matched by order."""
    (weights, _) = ranks.run(2, swapped, None)
    assert reference.first_difference(weights, unsharded()) != ""


# --- settings that drift apart while training runs ------------------------------------------------------------------------


def train(model, optimizer) -> None:
    optimizer.zero_grad()
    model(x(0), swap=False).square().sum().backward()


def drifting(what: str, stage: int):
    torch.manual_seed(0)
    model, one = Swapped(), rank_processes.rank() == 1
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    zero = zeroshard.shard(model, optimizer, stage=stage)
    train(model, optimizer)
    optimizer.step()
    if what == "a learning rate":
        optimizer.param_groups[0]["lr"] = 0.05 if one else 0.1
    elif what == "an option that is a tensor":
        optimizer.param_groups[0]["lr"] = torch.tensor(0.1 + 1e-6 * one)
    elif what == "betas":
        optimizer.param_groups[0]["betas"] = (0.9, 0.98 if one else 0.999)
    train(model, optimizer)
    if what == "the largest norm":
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1 + one)
    elif what == "the largest value":
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.1 + one)
    elif what == "a factor" and one:
        for param in model.parameters():
            param.grad.mul_(0.5)
    with zero.gathered():
        before = reference.weights(model)
    try:
        optimizer.step()
    except PeerError as error:
        with zero.gathered():
            return reference.first_difference(reference.weights(model), before), str(error)
    return "no error", ""


NAMED = {
    "a learning rate": "'lr' of group 0 is 0.05",
    "an option that is a tensor": "'lr' of group 0 is 0.10000",
    "betas": "0.98",
    "the largest norm": "scaled by ['mul_.Tensor ",
    "the largest value": "clamp",
    "a factor": "mul_.Tensor 0.5",
}


@pytest.mark.row(9)
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("what", NAMED)
def test_settings_that_drift_apart_are_refused_at_the_next_step(ranks, what, stage):
    """An option or an edit that differs between ranks: an error on each that shows both, and no weight has changed."""
    for changed, error in ranks.run(2, drifting, what, stage, group_timeout=20):
        assert changed == "", error
        assert "rank 0 is at step 2" in error and "rank 1 is at step 2" in error
        assert NAMED[what] in error and "rank 0: " in error and "rank 1: " in error, error
