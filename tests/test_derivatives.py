"""Derivatives of derivatives, and the transforms of `torch.func`: plain PyTorch's bits at every stage."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import reference
import zeroshard
from zeroshard import Layout


class Field(nn.Module):
    """A small smooth network; `recomputed` says whether its blocks are checkpointed."""

    def __init__(self, recomputed: bool = False):
        super().__init__()
        self.recomputed = recomputed
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(into, out), nn.Tanh()) for into, out in ((7, 13), (13, 11), (11, 5))
        )
        self.head = nn.Linear(5, 1)

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputed else block(x)
        return self.head(x)


def build(recomputed: bool = False) -> Field:
    torch.manual_seed(0)
    return Field(recomputed)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def points(index: int, *, wanted: bool = True) -> torch.Tensor:
    return torch.randn(3, 7, generator=torch.Generator().manual_seed(index)).requires_grad_(wanted)


def slope(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(y.sum(), x, create_graph=True)[0]


def rank_and_world() -> tuple[int, int]:
    if not torch.distributed.is_initialized():
        return 0, 1
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def difference(loss, stage: int, recomputed: bool = False, steps: int = 3) -> str:
    """`loss(model, index).backward()` and a step, several times: the first difference from plain PyTorch."""
    rank, world = rank_and_world()
    want = build(recomputed)
    optimizer = sgd(want)
    for step in range(steps):
        for index in range(world):
            loss(want, 10 * step + index).backward()
        for param in want.parameters():
            param.grad.div_(world)
        optimizer.step()
        optimizer.zero_grad()
    model = build(recomputed)
    optimizer = sgd(model)
    zero = zeroshard.shard(model, optimizer, stage=stage, layout=Layout(bucket_mib=1e-3))
    for step in range(steps):
        loss(model, 10 * step + rank).backward()
        assert zero.ledger().held.get("gather", 0) == 0
        optimizer.step()
        optimizer.zero_grad()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    with zero.gathered():
        return reference.first_difference(reference.weights(model), reference.weights(want))


# --- gradients of gradients, outside of forward -----------------------------------------------------------------------


def penalty_then_forward(model, index):
    """A gradient penalty, and after it another forward of the same weights."""
    x = points(index)
    return slope(model(x), x).square().sum() + model(x.detach() + 1).sum()


def two_penalties(model, index):
    """R1 and R2 in one backward, as GANs have them."""
    real, fake = points(index), points(100 + index)
    scores = model(real), model(fake)
    penalties = [slope(score, x).square().sum() for score, x in zip(scores, (real, fake), strict=True)]
    return sum(penalties) + (scores[0] - scores[1]).sum()


def between(model, index):
    """WGAN-GP: a penalty at points between real and fake ones, after both were scored."""
    real, fake = points(index, wanted=False), points(100 + index, wanted=False)
    middle = (0.3 * real + 0.7 * fake).requires_grad_()
    distance = model(fake).sum() - model(real).sum()
    return distance + (slope(model(middle), middle).norm(dim=1) - 1).square().sum()


def equation(model, index):
    """A physics-informed residual: second derivatives of the output, and the output at the boundary."""
    x = points(index)
    u = model(x)
    first = slope(u, x)
    second = sum(slope(first[:, at], x)[:, at] for at in range(2))
    return (second + u[:, 0]).square().sum() + model(torch.zeros(1, 7)).square().sum()


@pytest.mark.row(23)
@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("loss", [penalty_then_forward, two_penalties, between, equation], ids=lambda f: f.__name__)
@pytest.mark.parametrize("world", [1, 2])
def test_gradients_of_gradients_beside_other_forwards(ranks, world, stage, loss, recomputed):
    """Plain PyTorch's bits, and nothing is gathered after it, though backward's own graph saves weights."""
    assert ranks.run(world, difference, loss, stage, recomputed) == [""] * world


def stepped_between(stage: int) -> tuple[str, int]:
    """A step between a penalty's graph and its backward; what is gathered before that step."""
    model = build()
    optimizer = sgd(model)
    zero = zeroshard.shard(model, optimizer, stage=stage)
    x = points(0)
    penalty = slope(model(x), x).square().sum()
    held = zero.ledger().held.get("gather", 0)
    model(points(1)).sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation|was changed between forward"):
        penalty.backward()
    return held


@pytest.mark.row(23, 28)
def test_a_step_before_the_backward_of_a_penalty_raises(ranks, stage):
    """As in plain PyTorch; and the graph of a penalty keeps no weight in memory."""
    assert ranks.run(2, stepped_between, stage) == [0, 0]


def stashed(stage: int) -> str:
    """A view of a weight leaves the forward, is computed with outside, and another forward comes before backward."""

    class Leaky(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(7, 7), nn.Linear(7, 7)])

        def forward(self, x):
            for block in self.blocks:
                x = torch.tanh(block(x))
            return x, self.blocks[0].weight[:3]

    def loss(model, index):
        x, view = model(points(index))
        product = (view * points(index, wanted=False)).exp().sum()
        return product + x.sum() + model(points(index + 1))[0].sum()

    torch.manual_seed(0)
    want = Leaky()
    optimizer = sgd(want)
    rank, world = rank_and_world()
    for index in range(world):
        loss(want, index).backward()
    for param in want.parameters():
        param.grad.div_(world)
    optimizer.step()
    torch.manual_seed(0)
    model = Leaky()
    optimizer = sgd(model)
    zero = zeroshard.shard(model, optimizer, stage=stage)
    loss(model, rank).backward()
    optimizer.step()
    with zero.gathered():
        return reference.first_difference(reference.weights(model), reference.weights(want))


@pytest.mark.row(22)
def test_gathering_weights_again_is_no_edit_of_them(ranks, stage):
    """A view of a weight that outlives its forward may be used, and differentiated through, beside other forwards."""
    assert ranks.run(2, stashed, stage) == ["", ""]
