"""Parameters along an axis of the mesh, such as experts: each team shards its rows of a tensor, among its own ranks.

Ranks are edp * EP + ep. The reference is plain torch in one process: it holds all rows, computes the gradient that each
rank would, and adds those up in rank order, for the rows of each ep coordinate over the ranks that have them.
"""

from __future__ import annotations

import fnmatch
import functools
import logging
import math
import os
import signal
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import selection
import zeroshard
from norms import total
from ranks import RankFailure
from zeroshard import Comm, Layout, Offload, Precision
from zeroshard.cli.reference import in_8_bits
from zeroshard.errors import CheckpointError, NotFiniteError, PeerError, UserError
from zeroshard.explain.reading import read
from zeroshard.explain.run import record_step
from zeroshard.planner import predict_states
from zeroshard.planner.simulate import simulate

EXPERTS, WIDTH = 4, 12
ALONG = {"*.experts.*": "edp"}
MESHES = ((2, 1), (2, 2), (4, 1), (4, 2), (4, 4))  # ranks, ep


class Experts(nn.Module):
    """Rows [first, first + local) of tensors that have one row for each expert."""

    def __init__(self, whole, first, local):
        super().__init__()
        self.weight = nn.Parameter(whole["weight"][first : first + local].clone())
        self.bias = nn.Parameter(whole["bias"][first : first + local].clone())

    def forward(self, x):
        y = torch.einsum("td,edf->etf", x, self.weight) + self.bias[:, None]
        if hasattr(self, "spoil"):  # the gradient of one element
            one = self.weight[self.spoil] * 0
            one.register_hook(lambda grad: grad * math.nan)
            y = y + one
        return y


class Block(nn.Module):
    def __init__(self, first, local):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS)
        whole = {"weight": torch.randn(EXPERTS, WIDTH, WIDTH) / 4, "bias": torch.randn(EXPERTS, WIDTH) / 4}
        self.experts = Experts(whole, first, local)
        self.first, self.local, self.idle = first, local, False

    def forward(self, x):
        y = self.norm(x)
        if self.idle:
            return x + y
        share = self.router(y).softmax(-1)[:, self.first : self.first + self.local]
        return x + torch.einsum("te,etf->tf", share, self.experts(y))


def model_of(ep, size, seed=0):
    """With the rows of one ep coordinate. Of one seed all coordinates draw the same numbers."""
    torch.manual_seed(seed)
    local = EXPERTS // size
    blocks = nn.Sequential(*(Block(ep * local, local) for _ in range(3)))
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), blocks, nn.Linear(WIDTH, 3))


def loss_of(model, step, micro, dtype=torch.float32):
    data = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(1000 * step + micro)).to(dtype)
    return model(data).float().square().mean()


def mesh_of(world, ep):
    return init_device_mesh("cpu", (world // ep, ep), mesh_dim_names=("edp", "ep"))


def sharded(world, ep, stage, seed=0, optimizer=torch.optim.AdamW, layout=None, **options):
    mesh = mesh_of(world, ep)
    model = model_of(mesh.get_local_rank("ep"), ep, seed)
    one = optimizer(model.parameters(), lr=1e-2)
    layout = Layout(along=ALONG, **(layout or {}))
    return model, one, zeroshard.shard(model, one, stage=stage, layout=layout, comm=Comm(group=mesh), **options)


def train(model, optimizer, zero, steps, first=0, backwards=2, dtype=torch.float32):
    norms = []
    for step in range(first, first + steps):
        for backward in range(backwards):
            loss_of(model, step, backward * zero.world_size + zero.rank, dtype).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms


def weights(model, zero):
    """By name, this rank's own rows."""
    with zero.gathered():
        return {name: p.detach().clone() for name, p in model.named_parameters()}


@functools.cache
def plain(world, ep, steps, backwards=2, dtype=torch.float32, rounds=lambda name, rows: rows):
    """All rows, in one process: the gradients of every rank's micro-batches, added up in rank order.

    rounds: what a rank computes with, of its rows of a master.
    """
    whole = model_of(0, 1)
    masters = dict(whole.named_parameters())
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    norms = []
    for step in range(steps):
        models = [model_of(at, ep) for at in range(ep)]
        local = EXPERTS // ep
        sums = {name: torch.zeros_like(p) for name, p in masters.items()}
        with torch.no_grad():
            for at, model in enumerate(models):
                for name, p in model.named_parameters():
                    rows = masters[name][at * local : (at + 1) * local] if ".experts." in name else masters[name]
                    p.copy_(rounds(name, rows))
                model.to(dtype)
        for backward in range(backwards):
            for rank in range(world):
                at = rank % ep
                models[at].zero_grad()
                loss_of(models[at], step, backward * world + rank, dtype).backward()
                for name, p in models[at].named_parameters():
                    into = sums[name][at * local : (at + 1) * local] if ".experts." in name else sums[name]
                    into += p.grad.float()
        for name, p in masters.items():
            p.grad = sums[name] / world
        norm = total([p.grad for p in masters.values()])
        torch.nn.utils.clip_grads_with_norm_(whole.parameters(), 0.3, norm)
        norms.append(norm.item())
        optimizer.step()
    return {name: p.detach() for name, p in masters.items()}, norms


def rows_of(whole, name, at, ep):
    local = EXPERTS // ep
    return whole[name][at * local : (at + 1) * local] if ".experts." in name else whole[name]


# ----------------------------------------------------------------------------------------------------------------- bits


def weights_and_norms(world, ep, stage, precision, layout, dtype):
    model, optimizer, zero = sharded(world, ep, stage, seed=0, precision=precision, layout=layout)
    norms = train(model, optimizer, zero, 3, dtype=dtype)
    return weights(model, zero), norms


@pytest.mark.row(94)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", selection.STAGES)
@pytest.mark.parametrize(("world", "ep"), MESHES)
def test_bits_are_those_of_plain_torch_at_every_stage(ranks, world, ep, stage, dtype):
    """Weights and norms, `==`: two backwards a step, divided by all micro-batches, clipped by all rows' norm."""
    want, norms = plain(world, ep, 3, dtype=dtype)
    precision = None if dtype == torch.float32 else Precision(param_dtype=dtype)
    runs = ranks.run(world, weights_and_norms, world, ep, stage, precision, {"bucket_mib": 0.001}, dtype)
    for rank, (found, said) in enumerate(runs):
        assert said == norms
        for name, tensor in found.items():
            assert torch.equal(tensor, rows_of(want, name, rank % ep, ep).to(dtype)), name


IN_8_BITS = ("1.*.experts.*weight", "2.weight")


def rounded(scaling, name, rows):
    """In plain words: each expert by itself, or each row; a matrix that all ranks shard too."""
    if not any(fnmatch.fnmatchcase(name, pattern) for pattern in IN_8_BITS):
        return rows
    if scaling == "128x128":  # a rank's rows fit into one
        return in_8_bits(rows)
    tensors = rows if rows.dim() > 2 else [rows]
    return torch.stack(
        [torch.stack([*map(in_8_bits, t)]) if scaling == "1x128" else in_8_bits(t) for t in tensors]
    ).view(rows.shape)


ROUNDED = {scaling: functools.partial(rounded, scaling) for scaling in ("tensor", "1x128", "128x128")}


def in_8_bits_at(world, ep, stage, precision, layout):
    model, optimizer, zero = sharded(world, ep, stage, seed=0, precision=precision, layout=layout)
    before = weights(model, zero)
    norms = train(model, optimizer, zero, 3)
    after = weights(model, zero)
    ledger = {state: nbytes for state, nbytes in zero.ledger().held.items() if nbytes}
    return before, after, norms, predict_states(zero), ledger


@pytest.mark.heavy
@pytest.mark.row(94, 104)
@pytest.mark.parametrize("scaling", ROUNDED)
@pytest.mark.parametrize("stage", selection.STAGES)
@pytest.mark.parametrize(("world", "ep"), MESHES)
def test_experts_in_8_bits_have_the_bits_of_plain_torch_that_rounds_each_by_itself(ranks, world, ep, stage, scaling):
    """Before the first step and after the third, beside a matrix that all ranks shard. Planned to the byte.

    An expert has its own scale, or its rows have, so the reference is the same for every number of groups.
    """
    want, norms = plain(world, ep, 3, rounds=ROUNDED[scaling])
    precision = Precision(fp8=IN_8_BITS, scaling=scaling)
    runs = ranks.run(world, in_8_bits_at, world, ep, stage, precision, {"bucket_mib": 0.001})
    first = {name: p.detach() for name, p in model_of(0, 1).named_parameters()}
    for rank, (before, after, said, predicted, ledger) in enumerate(runs):
        assert said == norms
        for name, tensor in after.items():
            rounds = ROUNDED[scaling]
            assert torch.equal(before[name], rounds(name, rows_of(first, name, rank % ep, ep))), name
            assert torch.equal(tensor, rounds(name, rows_of(want, name, rank % ep, ep))), name
        assert predicted == {state: ledger[state] for state in predicted}
        local = EXPERTS // ep
        each = {"tensor": 3 * local + 1, "1x128": 3 * local * WIDTH + 3, "128x128": 3 + 1}[scaling]
        assert ledger["scales"] == each


def edited_in_8_bits(stage, write_from):
    model, optimizer, zero = sharded(4, 2, stage, precision=Precision(fp8=IN_8_BITS))
    train(model, optimizer, zero, 1)
    before = weights(model, zero)
    with zero.gathered(write_from=write_from), torch.no_grad():
        if zero.rank % 2 == 0:
            model[1][1].experts.weight[1, 2, 3] = 88.0
    edited = weights(model, zero)
    train(model, optimizer, zero, 1, first=1)
    return before, edited, weights(model, zero)


@pytest.mark.row(94, 104)
@pytest.mark.parametrize("write_from", [None, 0], ids=["by-all", "by-one"])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_an_edit_of_one_teams_expert_changes_the_scale_of_that_expert_alone(ranks, stage, write_from):
    """Nothing of the other team's, whose scale has the same place in its bucket; on all ranks that have it the same."""
    told = ranks.run(4, edited_in_8_bits, stage, write_from)
    name = "1.1.experts.weight"
    for rank, (before, edited, after) in enumerate(told):
        assert all(torch.equal(after[n], told[rank % 2][2][n]) for n in after)
        changed = {n for n in before if not torch.equal(before[n], edited[n])}
        assert changed == ({name} if rank % 2 == 0 else set())
        if changed:
            assert edited[name][1, 2, 3] == 88.0 and torch.equal(edited[name][0], before[name][0])
            smallest = edited[name][1][edited[name][1] != 0].abs().min()
            assert smallest >= 2.0**-2 * 2.0**-9  # the least of 8 bits at a scale of 1/4


def listed_in_8_bits(ep, stage, folder, load):
    model, optimizer, zero = listed(
        4, ep, stage, seed=3 if load else 0, precision=Precision(fp8=["*.experts.*.weight"])
    )
    if load:
        zero.load(folder)
    else:
        train(model, optimizer, zero, 2)
        zero.save(folder)
    here = weights(model, zero)
    train(model, optimizer, zero, 1, first=2)
    return here, weights(model, zero)


def masters_of(folder, ep, precision):
    model, _, zero = sharded(4, ep, 1, seed=3, precision=precision)
    zero.load(folder)
    return weights(model, zero)


@pytest.mark.full
@pytest.mark.row(95, 104)
def test_checkpoints_of_experts_in_8_bits_load_into_other_groups_and_formats(ranks, tmp_path):
    """Files hold masters, so two groups of 8 bits go into one and four, at the same scales; and into fp32 unrounded."""
    wrote = ranks.run(4, saved_in_8_bits, 2, 3, tmp_path / "stacked")
    whole = together(wrote, 2)
    masters = together(ranks.run(4, masters_of, tmp_path / "stacked", 2, None), 2)
    assert all(torch.equal(ROUNDED["tensor"](name, rows), whole[name]) for name, rows in masters.items())
    assert not all(torch.equal(rows, whole[name]) for name, rows in masters.items())
    for ep in (1, 4):
        found = ranks.run(4, masters_of, tmp_path / "stacked", ep, Precision(fp8=IN_8_BITS))
        assert all(torch.equal(tensor, whole[name]) for name, tensor in together(found, ep).items())


def saved_in_8_bits(ep, stage, folder):
    model, optimizer, zero = sharded(4, ep, stage, precision=Precision(fp8=IN_8_BITS))
    train(model, optimizer, zero, 2)
    zero.save(folder)
    return weights(model, zero)


@pytest.mark.full
@pytest.mark.row(95, 104)
def test_a_list_of_experts_in_8_bits_goes_on_at_any_number_of_groups(ranks, tmp_path):
    """Each is a module, and a tensor of its own: the loaded weights are those saved, whichever rank has them."""
    wrote = ranks.run(4, listed_in_8_bits, 2, 3, tmp_path, False)

    def by_number(told, ep):
        found = {}
        for at in range(ep):
            for name, tensor in told[at][0].items():
                words = name.split(".")
                if "experts" in words:
                    place = words.index("experts") + 1
                    words[place] = str(int(words[place]) + at * (EXPERTS // ep))
                found[".".join(words)] = tensor
        return found

    want = by_number(wrote, 2)
    for ep, stage in ((1, 0), (2, 1), (4, 3)):
        found = by_number(ranks.run(4, listed_in_8_bits, ep, stage, tmp_path, True), ep)
        assert found.keys() == want.keys() and all(torch.equal(found[name], want[name]) for name in want)


def in_tier(world, ep, where, folder):
    path = {"path": folder} if where == "nvme" else {}
    offload = Offload(optimizer=where, gradients=where, parameters=where, **path)
    found = []
    for stage in (1, 3):
        model, optimizer, zero = sharded(world, ep, stage, offload=offload)
        train(model, optimizer, zero, 3)
        found.append(weights(model, zero))
    return found


@pytest.mark.heavy
@pytest.mark.full
@pytest.mark.row(94)
@pytest.mark.parametrize("where", ["cpu", "nvme"])
def test_tiers_change_no_bit(ranks, tmp_path, where):
    want, _ = plain(4, 2, 3)
    for rank, stages in enumerate(ranks.run(4, in_tier, 4, 2, where, tmp_path)):
        for found in stages:
            assert all(torch.equal(tensor, rows_of(want, name, rank % 2, 2)) for name, tensor in found.items())


def in_layout(layout, comm):
    mesh = mesh_of(4, 2)
    model = model_of(mesh.get_local_rank("ep"), 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    layout, comm = Layout(along=ALONG, **layout), Comm(group=mesh, **comm)
    zero = zeroshard.shard(model, optimizer, stage=3, layout=layout, comm=comm)
    train(model, optimizer, zero, 3)
    return weights(model, zero)


LAYOUTS = {
    "cut as one vector": ({"bounds": "model"}, {}),
    "never cut": ({"bounds": "tensor"}, {}),
    "one bucket a unit": ({"bucket_mib": 24}, {"prefetch": 2}),
    "no overlap": ({}, {"overlap": False}),
}


@pytest.mark.row(94)
@pytest.mark.parametrize("which", LAYOUTS)
def test_layout_and_overlap_change_no_bit(ranks, which):
    want, _ = plain(4, 2, 3)
    for rank, found in enumerate(ranks.run(4, in_layout, *LAYOUTS[which])):
        assert all(torch.equal(tensor, rows_of(want, name, rank % 2, 2)) for name, tensor in found.items())


# ----------------------------------------------------------------------------------------------- who holds and moves what


def held(stage):
    model, optimizer, zero = sharded(4, 2, stage, seed=7 if torch.distributed.get_rank() else 0)
    train(model, optimizer, zero, 1)
    buckets = [b for b in zero.partition.buckets if b.axis]
    others = [b for b in zero.partition.buckets if not b.axis]
    assert {b.size for b in buckets} == {2} and {b.size for b in others} == {4}
    assert not {s.name for b in buckets for s in b.slots if ".experts." not in s.name}
    zero.record()
    optimizer.zero_grad()
    loss_of(model, 0, 0).backward()
    reduced = {e.bucket: e.sent for e in zero.events() if e.verb == "reduce" and e.bucket is not None}
    for bucket in zero.partition.buckets:
        team = zero.rank // 2 if bucket.axis else zero.rank
        assert reduced[bucket.index] == 4 * (bucket.numel - bucket.shard_numel(team))
    return zero.owners("1.1.experts.weight"), predict_states(zero), {k: v for k, v in zero.ledger().held.items() if v}


@pytest.mark.row(97)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_memory_and_bytes_are_those_of_each_ones_own_team(ranks, stage):
    """An expert's state is shared by the ranks along the axis only, and its elements count over all experts."""
    rows = EXPERTS * WIDTH * WIDTH
    for owners, predicted, ledger in ranks.run(4, held, stage):
        assert predicted == {state: ledger.get(state, 0) for state in predicted}
        if stage:
            assert sorted((o.start, o.stop) for o in owners)[0][0] == 0
            assert sum(o.stop - o.start for o in owners) == rows
            assert {o.rank: o.start // (rows // 2) for o in owners} == {0: 0, 1: 1, 2: 0, 3: 1}
        else:
            assert [(o.start, o.stop) for o in owners] == [(0, rows // 2), (rows // 2, rows)] * 2


def begun():
    model, _, zero = sharded(4, 2, 3, seed=torch.distributed.get_rank())
    return weights(model, zero)


@pytest.mark.full
def test_first_values_come_from_rank_0_and_of_experts_from_their_own_first_rank(ranks):
    told = ranks.run(4, begun)
    for rank, found in enumerate(told):
        want = dict(model_of(rank % 2, 2, seed=rank % 2).named_parameters())
        want |= {n: p for n, p in model_of(0, 2, seed=0).named_parameters() if ".experts." not in n}
        assert all(torch.equal(tensor, want[name]) for name, tensor in found.items())


# ----------------------------------------------------------------------------------------------------------- checkpoints


def saved(world, ep, stage, folder, precision):
    model, optimizer, zero = sharded(world, ep, stage, precision=precision)
    train(model, optimizer, zero, 2)
    zero.save(folder / "ckpt", asynchronous=True).wait()
    zero.export(folder / "weights")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of pickles, once in a process
        dcp.save({"app": zero}, checkpoint_id=folder / "dcp")
    return weights(model, zero)


def loaded(world, ep, stage, folder, precision, how):
    model, optimizer, zero = sharded(world, ep, stage, seed=3, precision=precision)
    if how == "ckpt":
        zero.load(folder / "ckpt")
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load({"app": zero}, checkpoint_id=folder / "dcp")
    before = weights(model, zero)
    train(model, optimizer, zero, 1, first=2)
    return before, weights(model, zero)


def together(told, ep):
    """All rows, by name, from what every rank has of them."""
    names = told[0]
    return {
        name: torch.cat([told[at][name] for at in range(ep)]) if ".experts." in name else told[0][name]
        for name in names
    }


@pytest.mark.heavy
@pytest.mark.full
@pytest.mark.row(95)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("ep", [1, 2, 4])
def test_a_checkpoint_loads_into_any_number_of_expert_groups(ranks, tmp_path, ep, dtype):
    """Experts by their index among all of them: EP 1, 2, 4 into each other and into other stages; exported whole."""
    precision = Precision(param_dtype=dtype, cast_inputs=dtype is not None)
    wrote = together(ranks.run(4, saved, 4, ep, 2, tmp_path, precision), ep)
    stepped = {}
    for other, stage, how in ((1, 3, "ckpt"), (2, 1, "ckpt"), (4, 0, "ckpt"), (2, 3, "dcp"), (4, 2, "dcp")):
        told = ranks.run(4, loaded, 4, other, stage, tmp_path, precision, how)
        found = together([before for before, _ in told], other)
        assert all(torch.equal(found[name], wrote[name]) for name in wrote), (other, how)
        stepped.setdefault(other, []).append(together([after for _, after in told], other))
    for first, *others in stepped.values():  # the optimizer's states came along: by any way the same next step
        assert all(torch.equal(first[name], each[name]) for each in others for name in first)
    with safe_open(next((tmp_path / "weights").glob("*.safetensors")), "pt") as file:
        assert all(torch.equal(file.get_tensor(name), wrote[name]) for name in wrote)


def alone(folder):
    model = model_of(0, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    zero = zeroshard.shard(model, optimizer, stage=0)
    zero.load(folder / "ckpt")
    state = {
        f"{name} {key}": value
        for name, p in zip([n for n, _ in model.named_parameters()], optimizer.param_groups[0]["params"], strict=True)
        for key, value in optimizer.state[p].items()
    }
    return weights(model, zero), state


@pytest.mark.full
@pytest.mark.row(95)
def test_states_go_with_their_experts_into_a_plain_model_of_all(ranks, tmp_path):
    """One process that holds all experts gets each one's moments and the step, from four ranks in groups of two."""
    ranks.run(4, saved, 4, 2, 3, tmp_path, None)
    ((found, states),) = ranks.run(1, alone, tmp_path)
    want, _ = plain(4, 2, 2)
    assert all(torch.equal(found[name], want[name]) for name in want)
    ranks.run(4, saved, 4, 1, 3, tmp_path / "one", None)
    ((_, others),) = ranks.run(1, alone, tmp_path / "one")
    assert states.keys() == others.keys() and len(states) == 3 * len(found)
    assert all(states[key].shape == others[key].shape for key in states)
    moments = states["1.0.experts.weight exp_avg"]
    assert moments.shape == (EXPERTS, WIDTH, WIDTH) and all(rows.any() for rows in moments)


# -------------------------------------------------------------------------------------------- modules in a list, as saved


class One(nn.Module):
    def __init__(self, weight, bias):
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight.clone()), nn.Parameter(bias.clone())

    def forward(self, x):
        return x @ self.weight + self.bias


class Listed(nn.ModuleList):
    """The same experts, each a module of its own."""

    unused = ()

    def forward(self, x):
        return torch.stack([expert(x) * (at not in self.unused) for at, expert in enumerate(self)])


def listed(world, ep, stage, unused=(), **options):
    mesh = init_device_mesh("cpu", (world // ep, ep), mesh_dim_names=("edp", "ep"))
    model = model_of(mesh.get_local_rank("ep"), ep, options.pop("seed", 0))
    for block in model[1]:
        block.experts = Listed(One(*pair) for pair in zip(block.experts.weight, block.experts.bias, strict=True))
        for at in unused:
            block.experts[at].requires_grad_(False)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    layout = Layout(along=ALONG, bucket_mib=0.001)
    return (
        model,
        optimizer,
        zeroshard.shard(model, optimizer, stage=stage, layout=layout, comm=Comm(group=mesh), **options),
    )


def by_expert(model, optimizer, ep, at):
    """{name with the number among all experts: its value and what the optimizer has of it}, of one ep coordinate."""
    found, params = {}, [p for group in optimizer.param_groups for p in group["params"]]
    for (name, p), fragment in zip(model.named_parameters(), params, strict=True):
        words = name.split(".")
        if "experts" in words:
            words[words.index("experts") + 1] = str(int(words[words.index("experts") + 1]) + at * (EXPERTS // ep))
        kept = {key: value.clone() for key, value in optimizer.state[fragment].items()}
        found[".".join(words)] = {"value": p.detach().clone()} | {k: v.view(-1) for k, v in kept.items()}
    return found


def saved_as_list(ep, stage, folder):
    model, optimizer, zero = listed(4, ep, stage)
    train(model, optimizer, zero, 2)
    zero.save(folder)
    return by_expert(model, optimizer, ep, zero.rank % ep) if stage == 0 else None


def loaded_from_list(ep, stage, folder):
    model, optimizer, zero = listed(4, ep, stage, seed=3)
    zero.load(folder)
    if stage:
        zero.save(folder / "again")
        return None
    return by_expert(model, optimizer, ep, zero.rank % ep)


def all_experts(told):
    return {name: kept for each in told for name, kept in each.items()}


def same(found, want):
    assert found.keys() == want.keys()
    for name, kept in want.items():
        assert found[name].keys() == kept.keys() >= {"value", "exp_avg", "exp_avg_sq", "step"}
        assert all(torch.equal(found[name][key], kept[key]) for key in kept), name


@pytest.mark.heavy
@pytest.mark.row(95)
@pytest.mark.parametrize("ep", [1, 2, 4])
def test_experts_in_a_list_load_into_any_number_of_groups(ranks, tmp_path, ep):
    """Each expert by its number among all: values, moments and steps; and on from there to another stage and back."""
    want = all_experts(ranks.run(4, saved_as_list, ep, 0, tmp_path / "a"))
    assert len({name for name in want if "experts" in name}) == 3 * EXPERTS * 2
    for other in (1, 2, 4):
        same(all_experts(ranks.run(4, loaded_from_list, other, 0, tmp_path / "a")), want)
    other = {1: 4, 2: 1, 4: 2}[ep]
    ranks.run(4, loaded_from_list, other, 3, tmp_path / "a")
    same(all_experts(ranks.run(4, loaded_from_list, ep, 0, tmp_path / "a" / "again")), want)


def stepped_apart(folder):
    model, optimizer, zero = listed(4, 1, 2, unused=(0,))
    train(model, optimizer, zero, 1)
    zero.save(folder)


def not_merged(folder):
    _, _, zero = listed(4, 2, 2)
    with pytest.raises(CheckpointError) as caught:
        zero.load(folder)
    return str(caught.value)


def test_experts_that_were_not_stepped_alike_are_not_one_parameter(ranks, tmp_path):
    ranks.run(4, stepped_apart, tmp_path / "a")
    for said in ranks.run(4, not_merged, tmp_path / "a"):
        assert "have different steps" in said
        assert "experts.0" in said


def in_groups(folder):
    """A group of its own for expert 3 of four, which is expert 1 of the second half."""
    mesh = init_device_mesh("cpu", (4, 1), mesh_dim_names=("edp", "ep"))
    model = model_of(0, 1)
    for block in model[1]:
        block.experts = Listed(One(*pair) for pair in zip(block.experts.weight, block.experts.bias, strict=True))
    apart = [p for name, p in model.named_parameters() if ".experts.3." in name]
    rest = [p for name, p in model.named_parameters() if ".experts.3." not in name]
    optimizer = torch.optim.AdamW([{"params": rest}, {"params": apart, "lr": 1e-3}], lr=1e-2)
    zero = zeroshard.shard(model, optimizer, stage=1, layout=Layout(along=ALONG), comm=Comm(group=mesh))
    train(model, optimizer, zero, 1)
    zero.save(folder)


@pytest.mark.full
def test_a_list_in_several_groups_is_refused_at_another_ep(ranks, tmp_path):
    ranks.run(4, in_groups, tmp_path / "a")
    assert all("in several groups of an optimizer" in said for said in ranks.run(4, not_merged, tmp_path / "a"))


def other_depth(folder):
    layers = [nn.Linear(4, 8, bias=False) for _ in range(4)]
    zero = zeroshard.shard(nn.ModuleList(layers), None, stage=3)
    zero.save(folder)
    zero = zeroshard.shard(nn.ModuleList([nn.Linear(4, 4, bias=False) for _ in range(8)]), None, stage=3)
    with pytest.raises(CheckpointError) as caught:
        zero.load(folder)
    return str(caught.value)


def test_layers_in_a_list_are_no_experts(ranks, tmp_path):
    """As many elements in twice as many layers are another model."""
    for said in ranks.run(2, other_depth, tmp_path / "a"):
        assert "has shape (4, 4), saved was (8, 4)" in said


# ---------------------------------------------------------------------------------------------------- what is not alike


def spoiled(stage):
    model, optimizer, zero = sharded(4, 2, stage, precision=Precision(nonfinite="raise"))
    if zero.rank == 3:
        model[1][1].experts.spoil = 1, 2, 3
    loss_of(model, 0, zero.rank).backward()
    with pytest.raises(NotFiniteError):
        optimizer.step()
    return zero.nonfinite


@pytest.mark.full
@pytest.mark.row(96)
def test_a_nan_of_an_expert_is_named_by_rank_and_by_its_element_among_all_experts(ranks):
    element = (3 * WIDTH + 2) * WIDTH + 3  # of expert 3: the second of the second group
    for stage in (0, 2, 3):
        for found in ranks.run(4, spoiled, stage):
            assert (found.rank, found.parameter, found.element) == (3, "1.1.experts.weight", element)


def flipped(stage, at):
    model, optimizer, zero = sharded(4, 2, stage)
    train(model, optimizer, zero, 1)
    zero.check_replicas()  # groups differ from each other, and may
    if zero.rank == at:
        with torch.no_grad():
            model[1][2].experts.bias[1, 3] = 0.25
    with pytest.raises(PeerError) as caught:
        zero.check_replicas()
    return str(caught.value)


@pytest.mark.row(96)
@pytest.mark.full
def test_experts_that_differ_between_the_ranks_that_share_them_are_named(ranks):
    for stage in (0, 1, 2):
        for at, pair, part in ((2, "0 and 2", 0), (3, "1 and 3", 1)):
            for message in ranks.run(4, flipped, stage, at):
                assert f"part {part} of parameter '1.2.experts.bias', ranks {pair}" in message


def edited(stage, write_from):
    model, _, zero = sharded(4, 2, stage)
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("zeroshard").addHandler(handler)
    with zero.gathered(write_from=write_from), torch.no_grad():
        model[1][0].experts.weight.fill_(float(zero.rank if write_from is not None else zero.rank % 2))
        model[0].weight.fill_(float(zero.rank if write_from is not None else 5))
    logging.getLogger("zeroshard").removeHandler(handler)
    zero.check_replicas()
    found = weights(model, zero)
    return found["1.0.experts.weight"].unique().tolist(), found["0.weight"].unique().tolist(), messages


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_edits_are_each_groups_own_and_write_from_names_a_rank_in_each(ranks, stage):
    """Groups may be given different values; of a rank that is named, its own group's and its like's in the others."""
    for rank, (experts, others, messages) in enumerate(ranks.run(4, edited, stage, None)):
        assert (experts, others, messages) == ([rank % 2], [5], [])
    for rank, (experts, others, messages) in enumerate(ranks.run(4, edited, stage, 3)):
        assert (experts, others, messages) == ([2 + rank % 2], [3], [])


def unused(stage):
    """Experts of one group are not used in a backward, by one rank or by all of it."""
    found = []
    for idle in ((1,), (1, 3)):
        model, optimizer, zero = sharded(4, 2, stage, layout={"bucket_mib": 0.001})
        for step in range(2):
            model[1][1].idle = zero.rank in idle
            loss_of(model, step, zero.rank).backward()
            found.append([p.grad is None for p in model.parameters()])
            optimizer.step()
            optimizer.zero_grad()
        found.append(weights(model, zero))
    return found


@pytest.mark.row(94)
@pytest.mark.full
def test_experts_that_got_no_token_anywhere_in_their_group(ranks):
    """Rows of one tensor get a gradient together, or none of them does: as in one process that holds all of it."""
    for stage in (0, 3):
        told = ranks.run(4, unused, stage)
        assert all(not any(each) for found in told for each in found if isinstance(each, list))
        for found in told:
            for each, same in zip(found, told[0], strict=True):
                if isinstance(each, dict):
                    assert all(torch.equal(each[n], same[n]) for n in each if ".experts." not in n)


# ---------------------------------------------------------------------------------------------------------------- faults


def interrupted(stage, at):
    model, optimizer, zero = sharded(4, 2, stage)
    train(model, optimizer, zero, 1)
    if zero.rank == at:
        handle = model[1][1].experts.register_full_backward_hook(raises)
    errors = []
    while len(errors) < 3:
        try:
            train(model, optimizer, zero, 1, first=1)
            break
        except (ArithmeticError, PeerError) as error:
            errors.append(type(error).__name__)
            optimizer.zero_grad()
            if zero.rank == at:
                handle.remove()
    return errors, weights(model, zero)


def raises(*_):
    raise ArithmeticError("on this rank alone")


@pytest.mark.row(96)
@pytest.mark.full
def test_a_backward_that_raised_on_one_rank_can_be_tried_again(ranks):
    want, _ = plain(4, 2, 2)
    for stage, at in ((0, 3), (2, 0), (3, 1), (3, 2)):
        for rank, (errors, found) in enumerate(ranks.run(4, interrupted, stage, at)):
            assert errors == (["ArithmeticError"] if rank == at else ["PeerError"])
            assert all(torch.equal(tensor, rows_of(want, name, rank % 2, 2)) for name, tensor in found.items())


def killed():
    model, optimizer, zero = sharded(4, 2, 3)
    train(model, optimizer, zero, 1)
    if zero.rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    train(model, optimizer, zero, 1, first=1)


@pytest.mark.row(96)
def test_a_rank_that_died_is_named_in_every_group(ranks):
    with pytest.raises(RankFailure) as caught:
        ranks.run(4, killed, timeout=60)
    assert str(caught.value).count("rank 3 is gone") >= 3


def tied():
    model = model_of(0, 2)
    model[1][0].norm.weight = model[1][0].experts.spare = nn.Parameter(torch.ones(WIDTH))
    return model


REFUSED = {
    "no such axis": ({"along": {"*.experts.*": "dep"}}, {}, None, "no axis of that name"),
    "no mesh": ({}, {"group": None}, None, "whose axes have names"),
    "no names": ({}, {"group": "unnamed"}, None, "whose axes have names"),
    "replicas": ({}, {"replicas": 2}, None, "beside several replicas, or hosts, is not supported"),
    "matches nothing": ({"along": {"*.expert.*": "edp"}}, {}, None, "Layout.along matches no parameter"),
    "tied": ({}, {}, tied, "under one of its names, and not under another"),
    "meta": ({}, {}, lambda: model_of(0, 2).to("meta"), "is on meta"),
    "other rows": ({}, {}, lambda: model_of(0, 4 if torch.distributed.get_rank() else 2), "build different things"),
}


def refused(which):
    layout, comm, model, _ = REFUSED[which]
    unnamed = comm.get("group", "") == "unnamed"
    group = init_device_mesh("cpu", (2, 2)) if unnamed else None if "group" in comm else mesh_of(4, 2)
    with pytest.raises((UserError, PeerError)) as caught:
        zeroshard.shard(
            (model or (lambda: model_of(0, 2)))(), None, stage=3, layout=Layout(**({"along": ALONG} | layout)),
            comm=Comm(**comm | {"group": group}),
        )  # fmt: skip
    return str(caught.value)


@pytest.mark.parametrize("which", REFUSED)
def test_what_cannot_be_is_refused_by_name(ranks, which):
    assert all(REFUSED[which][3] in message for message in ranks.run(4, refused, which))


def test_weights_of_other_programs_are_refused_where_a_rank_has_some_rows(tmp_path):
    with pytest.raises(UserError, match="fills whole tensors"):
        zeroshard.load(model_of(0, 2), tmp_path, layout=Layout(along=ALONG))


def test_along_takes_patterns_and_one_axis():
    for along in ({"a": "edp", "b": "ep"}, {"a": 1}, {"a": ""}, "edp", ["a"]):
        with pytest.raises(UserError, match=r"Layout\.along takes name patterns, and one axis"):
            Layout(along=along)


def given_differently():
    mesh = init_device_mesh("cpu", (2, 2) if torch.distributed.get_rank() else (4, 1), mesh_dim_names=("edp", "ep"))
    with pytest.raises(PeerError) as caught:
        zeroshard.shard(model_of(0, 2), None, layout=Layout(along=ALONG), comm=Comm(group=mesh))
    return str(caught.value)


def pages(stage, folder):
    model, optimizer, zero = sharded(4, 2, stage)
    zero.record(1 << 16)
    train(model, optimizer, zero, 2)
    record_step(zero, folder)
    zero.explain(folder / "page.html")
    return {name: zero.owners(name, "optimizer") for name, _ in model.named_parameters()}


@pytest.mark.parametrize("stage", [1, 3])
def test_the_page_shows_who_has_which_rows(ranks, tmp_path, stage):
    """Teams, parts and elements in the document are those of `owners`, which counts in all rows."""
    owners = ranks.run(4, pages, stage, tmp_path)[0]
    run = read(tmp_path)
    experts = sum(math.prod(owner_shape) for owner_shape in ((EXPERTS, WIDTH, WIDTH), (EXPERTS, WIDTH))) * 3
    numel = sum(p.numel() for p in model_of(0, 1).parameters())
    assert run["numel"] == numel
    assert [(g["axis"], g["rows"], g["spread"], g["numel"], g["teams"]) for g in run["groups"]] == [
        ("", False, False, numel - experts, [[0, 1, 2, 3]]),
        ("edp", True, False, experts, [[0, 2], [1, 3]]),
    ]
    assert [one["numel"] for one in run["summary"]] == [
        sum(o.stop - o.start for of in owners.values() for o in of if o.rank == rank) for rank in range(4)
    ]
    for bucket in run["layout"]["buckets"]:
        size, stride, parts = (bucket.get(key, default) for key, default in (("size", 4), ("stride", 1), ("parts", 1)))
        bounds = bucket.get("bounds") or [bucket["share"] * at for at in range(size + 1)]
        for name, shape, start in run["layout"]["slots"][bucket["first"] : bucket["last"]]:
            found = set()
            for rank in range(4):
                position, part = rank // stride % size, rank // (stride * size) * stride + rank % stride
                low, high = max(bounds[position], start), min(bounds[position + 1], start + math.prod(shape))
                offset = part * math.prod(shape) - start if parts > 1 else -start
                found |= {(rank, low + offset, high + offset)} if low < high else set()
            assert found == {(o.rank, o.start, o.stop) for o in owners[name]}


# ------------------------------------------------------------------------------------------------------------- simulated


def divided():
    model = model_of(0, 2)
    return {
        "model": model,
        "optimizer": lambda params: torch.optim.AdamW(params, lr=1e-2),
        "batch": lambda step, index: torch.randn(5, WIDTH),
        "loss": lambda model, batch: model(batch).square().mean(),
    }


def run_of_four(stage):
    model, optimizer, zero = sharded(4, 2, stage)
    for _ in range(3):
        train(model, optimizer, zero, 1, backwards=1)
    ledger = zero.ledger()
    moved = {verb: (each.calls, each.sent) for verb, each in ledger.traffic.items() if verb in ("gather", "reduce")}
    return {state: nbytes for state, nbytes in ledger.held.items() if nbytes and state != "norms"}, moved


@pytest.mark.heavy
@pytest.mark.row(97)
@pytest.mark.full
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_simulated_rank_holds_and_moves_what_a_real_one_does(ranks, stage):
    for rank, (held, moved) in enumerate(ranks.run(4, run_of_four, stage)):
        run = simulate(divided, ranks=4, rank=rank, stage=stage, layout=Layout(along=ALONG), mesh={"edp": 2, "ep": 2})
        assert {s: n for s, n in run.ledger.held.items() if n and s != "norms"} == held
        traffic = run.ledger.traffic
        assert {verb: (traffic[verb].calls, traffic[verb].sent) for verb in moved} == moved


@pytest.mark.full
def test_a_mesh_of_a_thousand_ranks():
    """16 teams of 64 along the axis: what a rank holds of the experts is 1/64 of its rows, of all else 1/1,024."""
    run = simulate(divided, ranks=1024, rank=1023, layout=Layout(along=ALONG), mesh={"edp": 64, "ep": 16})
    assert {(b.size, b.axis) for b in run.zero.partition.buckets} == {(64, "edp"), (1024, "")}
    assert run.zero._engine.group.axis_team.seat.part == 15
    assert predict_states(run.zero) == {s: run.ledger.held.get(s, 0) for s in predict_states(run.zero)}
    with pytest.raises(UserError, match="multiply to its ranks"):
        simulate(divided, ranks=1024, layout=Layout(along=ALONG), mesh={"edp": 64, "ep": 8})
