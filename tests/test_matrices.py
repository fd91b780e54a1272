"""Parameters that stack matrices: an optimizer of whole matrices has each by itself, as if it were a parameter."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import ranks
import reference
import zeroshard
from test_whole import Shampoo
from zeroshard import Comm, Layout, Offload
from zeroshard.errors import UserError
from zeroshard.planner.built import predict_tiers

WIDTH, HEAD = 24, 16
FUSED = Layout(matrices={"*.qkv.weight": 3}, bucket_mib=0.005)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * HEAD, bias=False), nn.Linear(HEAD, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return x + self.out(torch.softmax(q @ k.T, dim=-1) @ v)


class Experts(nn.Module):
    """Two experts' weights in one tensor of three dimensions, and a pair in one of two."""

    def __init__(self):
        super().__init__()
        self.stack, self.pair = nn.Parameter(torch.randn(2, 16, 24) / 5), nn.Parameter(torch.randn(2 * 24, 16) / 5)

    def forward(self, x):
        return sum(torch.tanh(x @ w.T) @ p.T for w, p in zip(self.stack, self.pair.chunk(2), strict=True))


def built():
    torch.manual_seed(7)
    return nn.Sequential(*(Block() for _ in range(2)))


def loss(model, step):
    x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(step))
    return model(x).square().mean()


KINDS = {"Muon": lambda p: torch.optim.Muon(p, lr=0.02), "Shampoo": Shampoo}


def optimizers_of(kind, model, matrices=None):
    matrices = [p for p in model.parameters() if p.dim() == 2] if matrices is None else matrices
    return [KINDS[kind](matrices), torch.optim.AdamW([p for p in model.parameters() if p.dim() == 1], lr=0.01)]


def apart(kind):
    """Weights of a plain process whose optimizer has a parameter for each matrix."""
    model, parts = built(), []
    for block in model:
        for weight, number in ((block.qkv.weight, 3), (block.out.weight, 1)):
            parts += [(nn.Parameter(each), weight, at) for at, each in enumerate(weight.data.chunk(number))]
    optimizers = optimizers_of(kind, model, [part for part, _, _ in parts])
    for step in range(3):
        model.zero_grad()
        loss(model, step).backward()
        for part, weight, at in parts:
            part.grad = weight.grad[at * len(part) : (at + 1) * len(part)]
        for optimizer in optimizers:
            optimizer.step()
    return reference.weights(model)


def trained(kind, stages, want, tier, folder):
    """{stage: the first difference from `want`, or from the predicted bytes}."""
    found = {}
    for stage in stages:
        model = built()
        optimizers = optimizers_of(kind, model)
        offload = Offload(optimizer=tier, path=folder if tier == "nvme" else None) if tier else None
        zero = zeroshard.shard(model, optimizers, stage=stage, layout=FUSED, offload=offload)
        for step in range(3):
            loss(model, step).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        tiers = {t: {s: n for s, n in each.items() if n} for t, each in zero.ledger().tiers.items()}
        held = {t: each for t, each in tiers.items() if each}
        with zero.gathered():
            text = reference.first_difference(reference.weights(model), want)
        if text or held != predict_tiers(zero):
            found[stage] = text or (held, predict_tiers(zero))
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tier", ["", "cpu", "nvme"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_stacked_matrices_equal_parameters_of_their_own(kind, tier, world, tmp_path):
    """At stages 0-3, in each tier, weights have the bits of a plain process whose optimizer has them chunked, and bytes
    are as planned."""
    stages = (1, 3) if tier else (0, 1, 2, 3)
    assert ranks.run(world, trained, kind, stages, apart(kind), tier, str(tmp_path)) == [{}] * world


def stacks_of(layout, stages, want):
    found = {}
    for stage in stages:
        model = experts()
        optimizer = Shampoo(model.parameters())
        zero = zeroshard.shard(model, optimizer, stage=stage, layout=layout)
        train(model, [optimizer], range(3))
        with zero.gathered():
            found[stage] = reference.first_difference(reference.weights(model), want)
    return found


def experts():
    torch.manual_seed(3)
    return Experts()


@pytest.mark.parametrize("world", [1, 2, 4])
def test_an_index_of_the_first_dimension_is_a_matrix(world):
    """[E, a, b] is E matrices for an optimizer of matrices, at every stage, with the bits of E parameters."""
    model = experts()
    parts = [(nn.Parameter(w), model.stack, at) for at, w in enumerate(model.stack.data)]
    parts += [(nn.Parameter(w), model.pair, at) for at, w in enumerate(model.pair.data.chunk(2))]
    optimizer = Shampoo([part for part, _, _ in parts])
    for step in range(3):
        model.zero_grad()
        loss(model, step).backward()
        for part, weight, at in parts:
            part.grad = weight.grad.view(2, *part.shape)[at]
        optimizer.step()
    layout = Layout(matrices={"stack": "first", "pair": 2})
    want = reference.weights(model)
    assert ranks.run(world, stacks_of, layout, (0, 1, 2, 3), want) == [dict.fromkeys(range(4), "")] * world


def train(model, optimizers, steps):
    for step in steps:
        loss(model, step).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def saved_and_loaded(folder, stage):
    """What differs between a run's weights and those of runs from its checkpoint: loaded with matrices, and saved again
    without."""
    found, plain = [], Layout(bucket_mib=0.005)
    for name, layout, load in (
        ("run", FUSED, ""), ("resumed", FUSED, "run"), ("without", plain, "run"), ("again", FUSED, "without"),
    ):  # fmt: skip
        model = built()
        optimizers = optimizers_of("Muon", model)
        zero = zeroshard.shard(model, optimizers, stage=stage, layout=layout)
        if load:
            zero.load(f"{folder}/{load}")
        else:
            train(model, optimizers, range(2))
        zero.save(f"{folder}/{name}")
        if name != "without":
            train(model, optimizers, range(2, 4))
            with zero.gathered():
                found.append(reference.weights(model))
    return [reference.first_difference(each, found[0]) for each in found[1:]]


@pytest.mark.parametrize("stage", [0, 3])
def test_checkpoints_load_with_and_without_matrices(stage, tmp_path):
    """A state of each matrix is saved as elements of the parameter's: with matrices or without, resumed runs have the
    bits of one that went on."""
    assert ranks.run(2, saved_and_loaded, str(tmp_path), stage) == [["", ""]] * 2


REFUSED = [
    ({"*.qkv.weight": 5}, "so many equal matrices"),
    ({"*.qkv.bias": 3}, "matches no parameter"),
    ({"*.out.bias": 1}, "so many equal matrices"),
    ({"*.out.weight": "first"}, "so many equal matrices"),
    ({"*.qkv.weight": 3, "0.*.weight": 1}, "say otherwise"),
    ({"*.qkv.weight": 0}, "takes name patterns"),
    ({"*.qkv.weight": True}, "takes name patterns"),
    (["*.qkv.weight"], "takes name patterns"),
]


def refused(matrices, **settings):
    model = built()
    try:
        zeroshard.shard(model, optimizers_of("Muon", model), layout=Layout(matrices=matrices, **settings))
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("matrices", "says"), REFUSED)
def test_what_does_not_fit_is_refused(matrices, says):
    assert says in ranks.run(1, refused, matrices)[0]


def refused_whole():
    return refused({"*.qkv.weight": 3}, whole=["*.qkv.weight"])


def test_another_word_on_cuts_is_refused():
    assert "another setting says where" in ranks.run(1, refused_whole)[0]


def edited(layout):
    """Tell if halving the gradient of each of the optimizer's parameters has halved the whole once."""
    model = built()
    optimizers = optimizers_of("Muon", model)
    zeroshard.shard(model, optimizers, stage=2, layout=layout)
    loss(model, 0).backward()
    grad = model[0].qkv.weight.grad
    before = grad.full_tensor().clone()
    for param in optimizers[0].param_groups[0]["params"]:
        param.grad.mul_(0.5)
    return torch.equal(grad.full_tensor(), before * 0.5)


def test_each_matrix_shows_its_own_gradient():
    assert ranks.run(2, edited, FUSED) == [True] * 2


def torchs_checkpoint(layout):
    model = built()
    zero = zeroshard.shard(model, optimizers_of("Muon", model), stage=3, layout=layout)
    try:
        zero.state_dict()
    except UserError as error:
        return str(error)


def test_torchs_checkpoint_is_refused_on_every_rank():
    """One of four ranks has none of the three matrices."""
    one, *others = ranks.run(4, torchs_checkpoint, FUSED)
    assert "its matrices have several" in one and others == [one] * 3


class Rows(nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.experts = nn.Parameter(torch.randn(2 * 16, 24) / 5)

    def forward(self, x):
        return torch.tanh(x @ self.experts.T)


def of_experts(stage):
    """What differs between this rank's rows, two matrices, and what Muon makes of them as plain parameters."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep"))
    model = Rows(mesh["ep"].get_local_rank())
    parts = [nn.Parameter(each.clone()) for each in model.experts.data.chunk(2)]
    optimizers = [torch.optim.Muon(params, lr=0.02) for params in (model.parameters(), parts)]
    layout = Layout(along={"experts": "edp"}, matrices={"experts": 2})
    zero = zeroshard.shard(model, optimizers[0], stage=stage, layout=layout, comm=Comm(group=mesh))
    for step in range(3):
        loss(model, step).backward()
        for part, grad in zip(parts, model.experts.grad.full_tensor().chunk(2), strict=True):
            part.grad = grad.clone()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with zero.gathered():
        weight = model.experts.detach().clone()
    return tuple(weight.shape), torch.equal(weight, torch.cat([part.detach() for part in parts]))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_experts_are_whole_matrices_of_a_rank(stage):
    """Muon, refused for rows of a tensor, updates a rank's rows where these are matrices, inside the experts' team."""
    assert ranks.run(4, of_experts, stage) == [((32, 24), True)] * 4
