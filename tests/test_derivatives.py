"""Derivatives of derivatives, and the transforms of `torch.func`: plain PyTorch's bits at every stage."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import func, nn
from torch.autograd import forward_ad
from torch.distributed._composable import checkpoint as composable
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
    x = torch.randn(3, 7, generator=torch.Generator().manual_seed(index))
    return x.requires_grad_() if wanted else x


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


# --- torch.func -------------------------------------------------------------------------------------------------------


def own_weights() -> dict[str, torch.Tensor]:
    return {name: 1.5 * param.detach() for name, param in build().named_parameters()}


def along(model, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


def energy(model):
    return lambda x: model(x).square().sum()


TRANSFORMS = {
    "grad": lambda model, x: func.grad(energy(model))(x),
    "grad of grad": lambda model, x: func.grad(lambda x: func.grad(energy(model))(x).square().sum())(x),
    "vjp": lambda model, x: func.vjp(model, x)[1](torch.ones(3, 1))[0],
    "jvp": lambda model, x: func.jvp(model, (x,), (torch.ones_like(x),))[1],
    "dual numbers": along,
    "jacrev": lambda model, x: func.jacrev(model)(x),
    "jacfwd": lambda model, x: func.jacfwd(model)(x),
    "hessian": lambda model, x: func.hessian(energy(model))(x),
    "vmap": lambda model, x: func.vmap(model)(x),
    "vmap of grad": lambda model, x: func.vmap(func.grad(energy(model)))(x),
    "functional call": lambda model, x: func.functional_call(model, own_weights(), x),
    "grad of functional call": lambda model, x: func.grad(
        lambda weights: func.functional_call(model, weights, x).square().sum()
    )(own_weights())["blocks.1.0.weight"],
}


def transformed(stage: int) -> list[str]:
    """Each transform of a sharded model, what comes of its result's backward, and of the steps after it."""
    rank, world = rank_and_world()
    wrong = []
    for name, transform in TRANSFORMS.items():
        want, want_optimizer = build(), None
        want_optimizer = sgd(want)
        model = build()
        optimizer = sgd(model)
        zero = zeroshard.shard(model, optimizer, stage=stage, layout=Layout(bucket_mib=1e-3))
        for step in range(2):
            for index in range(world):
                result = transform(want, points(10 * step + index, wanted=False))
                if index == rank:
                    expected = result.detach()
                (result.square().sum() + energy(want)(points(index))).backward()
            for param in want.parameters():
                param.grad.div_(world)
            want_optimizer.step()
            want_optimizer.zero_grad()
            got = transform(model, points(10 * step + rank, wanted=False))
            if not (torch.equal(got, expected) and got.requires_grad == result.requires_grad):
                wrong.append(f"{name}: the result")
            (got.square().sum() + energy(model)(points(rank))).backward()
            optimizer.step()
            optimizer.zero_grad()
            got = result = None
        with torch.no_grad():
            model(points(0))
        if zero.ledger().held.get("gather", 0):
            wrong.append(f"{name}: {zero.ledger().held}")
        with zero.gathered():
            differs = reference.first_difference(reference.weights(model), reference.weights(want))
        wrong += [f"{name}: {differs}"] if differs else []
    return wrong


@pytest.mark.row(81)
@pytest.mark.parametrize("world", [1, 2])
def test_transforms_of_the_model_are_plain_pytorchs(ranks, world, stage):
    """Their results, the gradients through these, and the weights after two steps; then nothing is gathered."""
    assert ranks.run(world, transformed, stage) == [[]] * world


def kept_over_a_step(stage: int) -> None:
    """`vjp` gives a function that may be called later: before a step it is right, after one it raises."""
    model, want = build(), build()
    optimizer = sgd(model)
    zero = zeroshard.shard(model, optimizer, stage=stage)
    x = points(0, wanted=False)
    ones = torch.ones(3, 1)
    out, pull = func.vjp(model, x)
    model(points(1)).sum().backward()  # gathers again
    assert torch.equal(pull(ones)[0], func.vjp(want, x)[1](ones)[0])
    through = func.grad(energy(model))(x)
    model(points(1)).sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        through.sum().backward()
    del out, pull, through
    gc.collect()
    with torch.no_grad():
        model(x)
    assert zero.ledger().held.get("gather", 0) == 0


@pytest.mark.row(81)
def test_what_a_transform_keeps_is_right_until_the_weights_change(ranks, stage):
    """As in plain PyTorch; and the memory that it kept is given back with it."""
    ranks.run(2, kept_over_a_step, stage)


class Force(nn.Module):
    """Differentiates by `torch.func` inside its own forward."""

    def __init__(self):
        super().__init__()
        self.field = build()

    def forward(self, x):
        return func.grad(energy(self.field))(x)


def forces(stage: int) -> str:
    rank, world = rank_and_world()
    want, model = Force(), Force()
    wants, optimizer = sgd(want), sgd(model)
    zero = zeroshard.shard(model, optimizer, stage=stage, layout=Layout(bucket_mib=1e-3))
    for step in range(2):
        for index in range(world):
            want(points(10 * step + index, wanted=False)).square().sum().backward()
        for param in want.parameters():
            if param.grad is not None:
                param.grad.div_(world)
        model(points(10 * step + rank, wanted=False)).square().sum().backward()
        for each in (wants, optimizer):
            each.step()
            each.zero_grad()
    assert zero.ledger().held.get("gather", 0) == 0
    with zero.gathered():
        return reference.first_difference(reference.weights(model), reference.weights(want))


@pytest.mark.row(81)
def test_a_transform_inside_forward(ranks, stage):
    """`torch.func` refuses to run among hooks on saved tensors; those of a sharded model step aside for it."""
    assert ranks.run(2, forces, stage) == ["", ""]


OF_WEIGHTS = {
    "grad": lambda model: func.grad(lambda weight: weight.square().sum())(model.head.weight),
    "vjp": lambda model: func.vjp(torch.exp, model.head.weight)[0],
    "jvp": lambda model: func.jvp(torch.exp, (model.head.weight,), (torch.ones(1, 5),))[1],
    "tangent": lambda model: func.jvp(torch.exp, (torch.ones(1, 5),), (model.head.weight,))[1],
    "jacfwd": lambda model: func.jacfwd(torch.exp)(model.head.weight),
    "vmap": lambda model: func.vmap(torch.exp)(model.head.weight),
    "functionalize": lambda model: func.functionalize(torch.exp)(model.head.weight),
    "closed over": lambda model: func.grad(lambda x: (x * model.head.weight).sum())(torch.ones(1, 5)),
    "all of them": lambda model: func.grad(
        lambda weights: func.functional_call(model, weights, points(0, wanted=False)).square().sum()
    )(dict(model.named_parameters()))["head.weight"],
    "linearize": lambda model: func.linearize(model, points(0, wanted=False))[1](torch.ones(3, 7)),
}


def refused(what: str) -> tuple[str, str]:
    """A transform of weights that are not there; the remedy; and the steps after both."""
    transform = OF_WEIGHTS[what]
    weights = []
    for refuse in (False, True):
        model = build()
        optimizer = sgd(model)
        zero = zeroshard.shard(model, optimizer, stage=3)
        said = ""
        if refuse:
            with pytest.raises(zeroshard.Error, match=r"(?s)parameter '.*rank \d.*with zero\.gathered\(\)") as raised:
                transform(model)
            said = type(raised.value).__name__
            with zero.gathered():
                assert torch.equal(transform(model), transform(build()))
        for index in range(2):
            energy(model)(points(index)).backward()
            optimizer.step()
            optimizer.zero_grad()
        with zero.gathered():
            weights.append(reference.weights(model))
    return said, reference.first_difference(*weights)


@pytest.mark.row(81)
@pytest.mark.parametrize("what", OF_WEIGHTS)
def test_transforms_of_weights_that_are_not_there_are_refused_and_the_remedy_works(ranks, what):
    """By the parameter's name, before any memory is touched: the steps after it have the bits of a run without it."""
    assert ranks.run(2, refused, what) == [("ReleasedError", "")] * 2


def calls_inside(stage: int) -> list[str]:
    model = build()
    optimizer = sgd(model)
    zero = zeroshard.shard(model, optimizer, stage=stage)
    energy(model)(points(0)).backward()
    said = []

    def gathered(x):
        with zero.gathered():
            return x.sum()

    def stepped(x):
        optimizer.step()
        return x.sum()

    def sharded(x):
        zeroshard.shard(build(), None)
        return x.sum()

    for call in (gathered, stepped, sharded):
        with pytest.raises(zeroshard.Error) as raised:
            func.grad(call)(torch.ones(3))
        said.append(str(raised.value))
    optimizer.step()
    energy(model)(points(0)).backward()
    return said


@pytest.mark.row(81)
def test_what_moves_memory_between_ranks_is_refused_inside_a_transform(ranks, stage):
    """gathered(), a step, shard(): an error that says to call it around the transform."""
    for said in ranks.run(2, calls_inside, stage):
        assert all("inside a transform of torch.func" in each and "around the transform" in each for each in said), said


# --- checkpointing by a module's own hooks ----------------------------------------------------------------------------


def composed(when: str, stage: int, early_stop: bool) -> str:
    """`torch.distributed._composable.checkpoint` on some blocks, before or after `shard`."""
    rank, world = rank_and_world()

    def recompute(model):
        for block in model.blocks[:2]:
            composable(block, early_stop=early_stop)

    want, model = build(), build()
    wants, optimizer = sgd(want), sgd(model)
    if when == "before":
        recompute(model)
    zero = zeroshard.shard(model, optimizer, stage=stage, layout=Layout(bucket_mib=1e-3))
    if when == "after":
        recompute(model)
    for step in range(2):
        for index in range(world):
            energy(want)(points(10 * step + index)).backward()
        for param in want.parameters():
            param.grad.div_(world)
        energy(model)(points(10 * step + rank)).backward()
        for each in (wants, optimizer):
            each.step()
            each.zero_grad()
    assert zero.ledger().held.get("gather", 0) == 0
    with zero.gathered():
        return reference.first_difference(reference.weights(model), reference.weights(want))


@pytest.mark.row(24)
@pytest.mark.parametrize("early_stop", [True, False], ids=["early stop", "whole"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_checkpointing_by_a_modules_hooks(ranks, stage, when, early_stop):
    """Its hooks lie above ours in forward and below them when it recomputes: the same bits, everything released."""
    assert ranks.run(2, composed, when, stage, early_stop) == ["", ""]
