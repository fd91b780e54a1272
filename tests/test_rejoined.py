"""Muon beside tensor parallelism: each rank of the tensor axis updates the whole matrix and keeps its part.

The reference is plain torch on the ranks of one tensor axis, as in test_tensor_parallel: it accumulates every data rank's
micro-batches, makes each DTensor and its gradient whole, and lets a plain optimizer update that.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import selection
import zeroshard
from test_tensor_parallel import content, loss_of, mesh_of, model_of, own, together, weights
from test_whole import Shampoo
from zeroshard import Comm, Layout, Offload, Precision
from zeroshard.errors import UserError

if torch.__version__ < "2.12":  # as in test_tensor_parallel
    pytestmark = pytest.mark.processes


def optimizers_of(params, kind=None):
    """Of matrices, with a learning rate that depends on the whole shape; and of all else."""
    params = list(params)
    matrices, others = [p for p in params if p.dim() == 2], [p for p in params if p.dim() != 2]
    kind = kind or (lambda p: torch.optim.Muon(p, lr=0.02, weight_decay=0.1, adjust_lr_fn="original"))
    return [kind(matrices), torch.optim.AdamW(others, lr=0.01)]


def alone(tp, dp, steps, dtype=torch.float32, backwards=2):
    """Masters and sums in fp32, of whole tensors."""
    mesh = init_device_mesh("cpu", (tp,), mesh_dim_names=("tp",))["tp"]
    model = model_of(mesh, dtype=dtype)
    masters = [nn.Parameter(whole(p).float().clone()) for p in model.parameters()]
    optimizers = optimizers_of(masters)
    for step in range(steps):
        sums = [torch.zeros_like(own(p), dtype=torch.float32) for p in model.parameters()]
        for micro in range(backwards * dp):
            model.zero_grad()
            loss_of(model, step, micro).backward()
            for p, into in zip(model.parameters(), sums, strict=True):
                into += p.grad.redistribute(placements=p.placements).to_local() if isinstance(p, DTensor) else p.grad
        for p, master, grad in zip(model.parameters(), masters, sums, strict=True):
            master.grad = whole(p, grad / dp)
        for optimizer in optimizers:
            optimizer.step()
        with torch.no_grad():
            for p, master in zip(model.parameters(), masters, strict=True):
                part = distribute_tensor(master.detach(), mesh, p.placements) if isinstance(p, DTensor) else master
                own(p).copy_(own(part))
    return {name: own(p).clone() for name, p in model.named_parameters()}


def whole(p, value=None):
    """The whole tensor of a parameter, or of this rank's part of something like it."""
    value = own(p) if value is None else value
    return DTensor.from_local(value, p.device_mesh, p.placements).full_tensor() if isinstance(p, DTensor) else value


def sharded(world, tp, stage, seed=0, dtype=None, kind=None, **options):
    mesh = mesh_of(world, tp) if tp else None
    model = model_of(mesh["tp"] if tp else None, seed, dtype or torch.float32)
    optimizers = optimizers_of(model.parameters(), kind)
    precision = None if dtype is None else Precision(param_dtype=dtype, cast_inputs=False)
    comm = Comm(group=mesh["dp"]) if tp else None
    return model, optimizers, zeroshard.shard(model, optimizers, stage=stage, comm=comm, precision=precision, **options)


def train(model, optimizers, zero, steps, first=0):
    for step in range(first, first + steps):
        for backward in range(2):
            loss_of(model, step, backward * zero.world_size + zero.rank).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def trained(world, tp, stage, dtype, layout, offload, folder):
    offload = Offload(**offload, path=folder) if "nvme" in offload.values() else Offload(**offload)
    model, optimizers, zero = sharded(world, tp, stage, dtype=dtype, layout=layout, offload=offload)
    train(model, optimizers, zero, 3)
    states = [state for state in optimizers[0].state.values() if state]
    momenta = sum(state["momentum_buffer"].numel() for state in states)
    return weights(model, zero), momenta, zero.ledger().held.get("gather", 0)


def same(told, want):
    return all(torch.equal(each[name], want[rank % 2][name]) for rank, each in enumerate(told) for name in each)


@pytest.mark.heavy
@pytest.mark.parametrize("stage", selection.STAGES)
def test_muon_has_the_bits_of_plain_muon_on_whole_matrices(ranks, tmp_path, stage):
    """Of rows and of columns that are cut, on two data ranks beside two tensor ranks. A rank keeps the momentum of its
    parts alone, and nothing stays gathered."""
    want = ranks.run(2, alone, 2, 2, 3)
    told = ranks.run(4, trained, 4, 2, stage, None, Layout(bucket_mib=0.002), {}, tmp_path)
    assert same([found for found, *_ in told], want) and not any(gathered for *_, gathered in told)
    matrices = sum(tensor.numel() for tensor in told[0][0].values() if tensor.dim() == 2)
    assert sum(told[rank][1] for rank in (0, 2)) == matrices * (1 if stage else 2)


OTHERWISE = {
    "bf16 weights": (torch.bfloat16, {}, {}),
    "one vector": (None, {"bounds": "model"}, {}),
    "no tensor cut": (None, {"bounds": "tensor"}, {}),
    "in files": (None, {}, {"optimizer": "nvme", "parameters": "nvme", "gradients": "cpu"}),
}


@pytest.mark.heavy
@pytest.mark.full
@pytest.mark.parametrize("how", OTHERWISE)
def test_masters_cuts_and_tiers_change_no_bit(ranks, tmp_path, how):
    dtype, layout, offload = OTHERWISE[how]
    want = ranks.run(2, alone, 2, 2, 3, dtype or torch.float32)
    told = ranks.run(4, trained, 4, 2, 3, dtype, Layout(**layout), offload, tmp_path)
    assert same([found for found, *_ in told], want)


def saved(folder):
    model, optimizers, zero = sharded(4, 2, 2)
    train(model, optimizers, zero, 2)
    zero.save(folder / "ckpt")
    at = weights(model, zero)
    train(model, optimizers, zero, 1, first=2)
    return at, weights(model, zero)


def loaded(tp, stage, folder, to):
    """Weights as they were loaded, and after another step. to: another checkpoint, of what was loaded."""
    model, optimizers, zero = sharded(4, tp, stage, seed=3)
    assert zero.load(folder / "ckpt").skipped == []
    zero.save(to)
    at = weights(model, zero)
    train(model, optimizers, zero, 1, first=2)
    return at, weights(model, zero)


def test_a_checkpoint_loads_into_any_number_of_tensor_ranks(ranks, tmp_path):
    """Momentum is saved as elements of the whole matrix: into plain, 1, 2 and 4 ranks, and back. On two a resumed run has
    the bits of the one that went on."""
    told = ranks.run(4, saved, tmp_path)
    wrote, states = together([at for at, _ in told], 2), content(tmp_path / "ckpt")
    assert {"momentum_buffer", "exp_avg"} < {state for _, state in states}
    for tp, stage in ((0, 3), (1, 1), (2, 3), (4, 0)):
        found = ranks.run(4, loaded, tp, stage, tmp_path, tmp_path / f"{tp}")
        again, there = content(tmp_path / f"{tp}"), together([at for at, _ in found], tp)
        assert all(torch.equal(there[name], wrote[name]) for name in wrote), tp
        assert again.keys() == states.keys() and all(torch.equal(again[key], states[key]) for key in states), tp
        if tp == 2:
            assert same([after for _, after in found], [after for _, after in told])


# ------------------------------------------------------------------------------------------------------- fused matrices


class Stacks(torch.optim.Muon):
    """Muon, which takes no tensor of three dimensions to begin with."""

    whole = True

    def __init__(self, params):
        torch.optim.Optimizer.__init__(
            self, params, torch.optim.Muon([nn.Parameter(torch.zeros(1, 1))], lr=0.02).defaults
        )


class Fused(nn.Module):
    """Of query, key and value in one weight, and of experts in one tensor, a tensor rank has its part of each."""

    def __init__(self, mesh):
        super().__init__()
        torch.manual_seed(5)
        for name, shape, cut in (
            ("qkv", (48, 12), 0),
            ("out", (24, 16), 1),
            ("experts", (4, 12, 12), 0),
            ("wide", (2, 12, 12), 2),
        ):
            setattr(self, name, nn.Parameter(distribute_tensor(torch.randn(shape) / 4, mesh, [Shard(cut)])))

    def forward(self, x):
        for weight in (self.experts, self.wide):
            for each in weight.full_tensor():
                x = x + torch.tanh(x @ each)
        return (x @ self.qkv.full_tensor().T).square().mean() + (
            x[:, :8] @ self.out.full_tensor().T[:8]
        ).square().mean()


FUSED = Layout(matrices={"qkv": 3, "out": 2, "experts": "first", "wide": "first"})


def inputs(step, micro):
    return torch.randn(6, 12, generator=torch.Generator().manual_seed(100 * step + micro))


def fused(stage):
    """What differs between this rank's parts and those of plain Muon on each whole matrix, given the same gradients."""
    mesh = mesh_of(4, 2)
    model = Fused(mesh["tp"])
    twin = Fused(mesh["tp"])
    masters = {
        name: [nn.Parameter(each.clone()) for each in matrices(name, own(p), mesh)]
        for name, p in twin.named_parameters()
    }
    optimizer, plain = Stacks(model.parameters()), Stacks([each for of in masters.values() for each in of])
    zero = zeroshard.shard(model, optimizer, stage=stage, layout=FUSED, comm=Comm(group=mesh["dp"]))
    for step in range(3):
        model(inputs(step, zero.rank)).backward()
        for name, p in model.named_parameters():
            for master, grad in zip(masters[name], matrices(name, p.grad.full_tensor(), mesh), strict=True):
                master.grad = grad.clone()
        for each in (optimizer, plain):
            each.step()
            each.zero_grad()
    found = []
    with zero.gathered():
        for name, p in model.named_parameters():
            for master, mine in zip(masters[name], matrices(name, p.detach(), mesh), strict=True):
                found += [name] * (not torch.equal(master, mine))
    return found


def matrices(name, part, mesh):
    """The whole matrices that a parameter stacks, of one tensor rank's part of each; its own experts."""
    count, dim = {"qkv": (3, 0), "out": (2, 1), "experts": (0, None), "wide": (0, 1)}[name]
    pieces = [each.contiguous() for each in (part.chunk(count) if count else part)]
    if dim is None:
        return pieces
    return [DTensor.from_local(each, mesh["tp"], [Shard(dim)]).full_tensor().contiguous() for each in pieces]


@pytest.mark.parametrize("stage", selection.STAGES)
def test_each_matrix_of_a_fused_weight_is_whole_for_its_update(ranks, stage):
    """Rows of three matrices of which a rank has a part each, columns of two, experts that a rank has whole, and experts
    cut on their last dimension."""
    assert ranks.run(4, fused, stage) == [[]] * 4


# --------------------------------------------------------------------------------------------------------- what is refused


class Raising(torch.optim.Muon):
    """Muon that raises in its step after it has updated, when told to."""

    whole, raises = True, False

    def step(self, closure=None):
        super().step(closure)
        if self.raises:
            raise ArithmeticError("told to")


def raised():
    """Whether shapes and values are what they were after a step that raised, and the states that are there."""
    model, optimizers, zero = sharded(4, 2, 0, kind=lambda p: Raising(p, lr=0.02))
    loss_of(model, 0, zero.rank).backward()
    before = weights(model, zero)
    optimizers[0].raises = True
    with pytest.raises(ArithmeticError):
        optimizers[0].step()
    params = optimizers[0].param_groups[0]["params"]
    shapes = [tuple(p.shape) for p in params] == [tuple(own(p).shape) for p in model.parameters() if p.dim() == 2]
    states = [state for state in optimizers[0].state.values() if state]
    return shapes, all(torch.equal(p, before[name]) for name, p in model.named_parameters()), states


@pytest.mark.full
def test_after_a_step_that_raised_each_rank_has_its_parts_again(ranks):
    assert ranks.run(4, raised) == [(True, True, [])] * 4


class Stubborn(Raising):
    """Its step wants a closure."""

    def step(self, closure):
        closure()


class Blocks(torch.optim.SGD):
    block = 16


REFUSED = {
    "factors": (Shampoo, {}, "rows: (5, 5), columns: (7, 7)"),
    "unasked": (Stubborn, {}, "could not be asked what it keeps"),
    "backward": (None, {"optimizer_in_backward": True}, "in backward ranks could do so in different orders"),
    "blocks": (Blocks, {}, "may not update each element by itself"),
}


def refused(which):
    kind, options, _ = REFUSED[which]
    try:
        sharded(4, 2, 1, kind=kind, **options)
    except UserError as error:
        return str(error)
    return "sharded"


@pytest.mark.parametrize("which", REFUSED)
def test_what_cannot_be_whole_is_refused(ranks, which):
    for said in ranks.run(4, refused, which):
        assert (REFUSED[which][2] in said and "'embed.weight'" in said) or which in ("factors", "unasked")


def added(kind):
    """What comes of a matrix that is cut and was added to an optimizer after `shard`, at stage 0, where all have all."""
    mesh = mesh_of(4, 2)
    model = model_of(mesh["tp"])
    late, vectors = model.output.weight, [p for p in model.parameters() if p.dim() == 1]
    others = [p for p in model.parameters() if p.dim() == 2 and p is not late]
    if kind == "Blocks":
        others += [p for p in vectors if p is not model.norm.weight]
        optimizers = [Blocks([model.norm.weight], lr=0.1), torch.optim.AdamW(others)]
    else:
        optimizers = [torch.optim.Muon(others, lr=0.02), torch.optim.AdamW(vectors, lr=0.01)]
    zero = zeroshard.shard(model, optimizers, stage=0, comm=Comm(group=mesh["dp"]))
    optimizers[0].add_param_group({"params": [model.output.weight]})
    try:
        train(model, optimizers, zero, 2)
    except UserError as error:
        return str(error)
    return weights(model, zero)


def together_from_the_start():
    model, optimizers, zero = sharded(4, 2, 0, kind=lambda p: torch.optim.Muon(p, lr=0.02))
    train(model, optimizers, zero, 2)
    return weights(model, zero)


@pytest.mark.full
def test_a_matrix_added_later_is_whole_too_or_refused(ranks):
    assert all("may not update each element by itself" in said for said in ranks.run(4, added, "Blocks"))
    assert same(ranks.run(4, added, "Muon"), ranks.run(4, together_from_the_start))
