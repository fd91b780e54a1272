"""Beside tensor parallelism: ranks are dp * TP + tp; zeroshard shards what a rank has of each DTensor along dp.

The reference is plain torch on the ranks of one tensor axis, which accumulates every data rank's micro-batches.
"""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import selection
import zeroshard
from norms import BLOCK, total
from zeroshard import Comm, Layout, Offload, Precision
from zeroshard.checkpoint.manifest import Saved
from zeroshard.cli.reference import in_8_bits
from zeroshard.errors import PeerError, UserError
from zeroshard.integrations.export import Wanted, export_saved
from zeroshard.planner import predict_states

if torch.__version__ < "2.12":  # a DTensor on a second thread ends the process of its CUDA build where no GPU is
    pytestmark = pytest.mark.processes
WIDTH, HEADS, HIDDEN, WORDS = 16, 4, 24, 20


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x):
        # After ColwiseParallel a rank has some of the heads.
        q, k, v = (each(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for each in (self.wq, self.wk, self.wv))
        scores = (q @ k.transpose(-1, -2) / 2).softmax(-1)
        return self.wo((scores @ v).transpose(1, 2).flatten(2))


class Feed(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w3 = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(WIDTH, HIDDEN)
        self.w2 = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """A Llama's."""

    def __init__(self):
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention, self.feed_forward = Attention(), Feed()

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.RMSNorm(WIDTH)
        self.output = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


PLAN = {
    "attention.wq": ColwiseParallel,
    "attention.wk": ColwiseParallel,
    "attention.wv": ColwiseParallel,
    "attention.wo": RowwiseParallel,
    "feed_forward.w1": ColwiseParallel,
    "feed_forward.w3": ColwiseParallel,
    "feed_forward.w2": RowwiseParallel,
}


def model_of(mesh, seed=0, dtype=torch.float32, sequence=False):
    """Cut over the mesh of the tensor axis; whole without one. sequence: norms see some of the positions each."""
    torch.manual_seed(seed)
    model = Llama().to(dtype)
    if mesh is not None:
        for layer in model.layers:
            plan = {name: kind() for name, kind in PLAN.items()}
            if sequence:
                plan |= {"attention_norm": SequenceParallel(), "ffn_norm": SequenceParallel()}
                plan |= {name: RowwiseParallel(output_layouts=Shard(1)) for name in ("attention.wo", "feed_forward.w2")}
                for name in ("attention", "feed_forward"):
                    plan[name] = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
            parallelize_module(layer, mesh, plan)
        embedded = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1) if sequence else None)
        whole = {"embed": embedded, "output": ColwiseParallel(output_layouts=Replicate())}
        if sequence:
            whole["norm"] = SequenceParallel()
            whole["output"] = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
        parallelize_module(model, mesh, whole)
    return model


def loss_of(model, step, micro):
    tokens = torch.randint(WORDS, (2, 6), generator=torch.Generator().manual_seed(1000 * step + micro))
    return nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), tokens.roll(1, 1).flatten())


def mesh_of(world, tp):
    return init_device_mesh("cpu", (world // tp, tp), mesh_dim_names=("dp", "tp"))


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def sharded(world, tp, stage=3, seed=0, dtype=torch.float32, sequence=False, **options):
    """tp: 0 is a plain model over all ranks."""
    mesh = mesh_of(world, tp) if tp else None
    model = model_of(mesh["tp"] if tp else None, seed, dtype, sequence)
    optimizer = optimizer_of(model)
    comm = Comm(group=mesh["dp"]) if tp else None
    return model, optimizer, zeroshard.shard(model, optimizer, stage=stage, comm=comm, **options)


def train(model, optimizer, zero, steps, first=0, backwards=2, clip=0.5):
    norms = []
    for step in range(first, first + steps):
        for backward in range(backwards):
            loss_of(model, step, backward * zero.world_size + zero.rank).backward()
        if clip:
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms


def weights(model, zero):
    """By name, what this rank has of each."""
    with zero.gathered():
        return {name: p.detach().clone() for name, p in model.named_parameters()}


def own(p):
    return p.detach().to_local() if isinstance(p, DTensor) else p.detach()


def alone(tp, dp, steps, backwards=2):
    """torch's tensor parallelism and nothing else: its ranks accumulate the micro-batches of all data ranks."""
    model = model_of(init_device_mesh("cpu", (tp,), mesh_dim_names=("tp",))["tp"])
    optimizer = optimizer_of(model)
    for step in range(steps):
        optimizer.zero_grad()
        for micro in range(backwards * dp):
            loss_of(model, step, micro).backward()
        for p in model.parameters():
            p.grad.div_(dp)
        optimizer.step()
    return {name: own(p).clone() for name, p in model.named_parameters()}


def in_blocks(p, grad):
    """A gradient in the order in which its squares are added: every part of it from its own start."""
    if not isinstance(p, DTensor):
        return grad
    whole = DTensor.from_local(grad, p.device_mesh, p.placements).full_tensor()
    parts = whole.chunk(p.device_mesh.size(), p.placements[0].dim) if p.placements[0].is_shard() else [whole]
    return torch.cat([nn.functional.pad(part.reshape(-1), (0, -part.numel() % BLOCK)) for part in parts])


def reference(tp, dp, steps, dtype, sequence, backwards=2, rounds=lambda name, p, master: master):
    """As `alone`, by hand: masters and sums in fp32, each gradient as its parameter is placed; clipped. And the norms.

    rounds: what a rank computes with, of its part of a master.
    """
    mesh = init_device_mesh("cpu", (tp,), mesh_dim_names=("tp",))["tp"]
    model = model_of(mesh, dtype=dtype, sequence=sequence)
    masters = [nn.Parameter(own(p).float()) for p in model_of(mesh, dtype=dtype, sequence=sequence).parameters()]
    optimizer, norms = torch.optim.AdamW(masters, lr=1e-2), []

    @torch.no_grad()
    def write_back():
        for (name, p), master in zip(model.named_parameters(), masters, strict=True):
            own(p).copy_(rounds(name, p, master.detach()))

    write_back()
    for step in range(steps):
        sums = [torch.zeros_like(master) for master in masters]
        for micro in range(backwards * dp):
            model.zero_grad()
            loss_of(model, step, micro).backward()
            for p, into in zip(model.parameters(), sums, strict=True):
                into += p.grad.redistribute(placements=p.placements).to_local() if isinstance(p, DTensor) else p.grad
        for master, grad in zip(masters, sums, strict=True):
            master.grad = grad / dp
        norm = total([in_blocks(p, m.grad) for p, m in zip(model.parameters(), masters, strict=True)])
        norms.append(norm.item())
        torch.nn.utils.clip_grads_with_norm_(masters, 0.5, norm)
        optimizer.step()
        write_back()
    return {name: own(p).clone() for name, p in model.named_parameters()}, norms


# ----------------------------------------------------------------------------------------------------------------- bits


def unclipped(stage):
    model, optimizer, zero = sharded(4, 2, stage, layout=Layout(bucket_mib=0.001))
    train(model, optimizer, zero, 2, clip=None)
    return weights(model, zero)


@pytest.mark.row(98)
@pytest.mark.parametrize("stage", selection.STAGES)
def test_two_data_ranks_beside_two_tensor_ranks_have_the_bits_of_the_tensor_ranks_alone(ranks, stage):
    want = ranks.run(2, alone, 2, 2, 2)
    for rank, found in enumerate(ranks.run(4, unclipped, stage)):
        assert all(torch.equal(tensor, want[rank % 2][name]) for name, tensor in found.items())


def clipped(stage, dtype, sequence):
    precision = None if dtype == torch.float32 else Precision(param_dtype=dtype, cast_inputs=False)
    model, optimizer, zero = sharded(4, 2, stage, dtype=dtype, sequence=sequence, precision=precision)
    return train(model, optimizer, zero, 2), weights(model, zero)


@pytest.mark.processes
@pytest.mark.row(98)
@pytest.mark.parametrize(("dtype", "sequence"), [(torch.float32, True), (torch.bfloat16, False)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", [1, 3])
def test_norms_count_every_element_once_and_norm_weights_stay_equal(ranks, stage, dtype, sequence):
    """Clipped by the norm of all parts. With sequence parallelism norm weights are DTensors that every rank has whole,
    with gradients that torch adds up over the tensor axis."""
    want = ranks.run(2, reference, 2, 2, 2, dtype, sequence)
    for rank, (norms, found) in enumerate(ranks.run(4, clipped, stage, dtype, sequence)):
        assert norms == want[rank % 2][1]
        assert all(torch.equal(tensor, want[rank % 2][0][name]) for name, tensor in found.items())


LINEAR = ("wq.weight", "wk.weight", "wv.weight", "wo.weight", "w1.weight", "w2.weight", "w3.weight", "output.weight")


def rounds_the_whole(name, p, master):
    """A part of the whole tensor at one scale, as one process rounds it."""
    if not name.endswith(LINEAR):
        return master
    whole = DTensor.from_local(master, p.device_mesh, p.placements).full_tensor()
    return distribute_tensor(in_8_bits(whole), p.device_mesh, p.placements).to_local()


def rounds_rows(name, p, master):
    """Each row of this rank's part by itself: of columns a row of the whole tensor has a scale for each part."""
    return torch.stack([*map(in_8_bits, master)]) if name.endswith(LINEAR) else master


def rounded_reference(scaling):
    rounds = {"tensor": rounds_the_whole, "1x128": rounds_rows}[scaling]
    return reference(2, 2, 2, torch.float32, False, rounds=rounds)


def in_8_bits_at(stage, scaling):
    precision = Precision(fp8=True, scaling=scaling)
    model, optimizer, zero = sharded(4, 2, stage, precision=precision, layout=Layout(bucket_mib=0.001))
    norms = train(model, optimizer, zero, 2)
    between = {state: nbytes for state, nbytes in zero.ledger().held.items() if nbytes}
    return norms, weights(model, zero), predict_states(zero), between


@pytest.mark.heavy
@pytest.mark.row(98, 104)
@pytest.mark.parametrize("scaling", ["tensor", "1x128"])
@pytest.mark.parametrize("stage", selection.STAGES)
def test_weights_in_8_bits_have_the_bits_of_tensor_ranks_that_round_alike(ranks, stage, scaling):
    """One scale of a tensor is that of all its parts, as one process has it; tiles are those of a rank's part."""
    want = ranks.run(2, rounded_reference, scaling)
    for rank, (norms, found, predicted, between) in enumerate(ranks.run(4, in_8_bits_at, stage, scaling)):
        assert norms == want[rank % 2][1]
        assert all(torch.equal(tensor, want[rank % 2][0][name]) for name, tensor in found.items())
        assert predicted == {state: between[state] for state in predicted}


def saved_in_8_bits(tp, folder, load):
    model, optimizer, zero = sharded(4, tp, 3, seed=0 if not load else 3, precision=Precision(fp8=True))
    if load:
        zero.load(folder)
    else:
        train(model, optimizer, zero, 2)
        zero.save(folder)
    with zero.gathered():
        return {name: own(p).clone() for name, p in model.named_parameters()}


@pytest.mark.full
@pytest.mark.row(99, 104)
def test_a_checkpoint_in_8_bits_loads_beside_any_number_of_tensor_ranks(ranks, tmp_path):
    """Files hold masters of whole tensors, and a tensor's scale does not depend on how it is cut."""
    parts = ranks.run(4, saved_in_8_bits, 2, tmp_path, False)
    (whole, *_) = ranks.run(4, saved_in_8_bits, 0, tmp_path, True)
    four = ranks.run(4, saved_in_8_bits, 4, tmp_path, True)
    rows = ("wo.weight", "w2.weight")
    for name, tensor in whole.items():
        cut = 1 if name.endswith(rows) else 0
        for told, tp in ((parts, 2), (four, 4)):
            mine = [told[at][name] for at in range(tp)]
            found = mine[0] if mine[0].shape == tensor.shape else torch.cat(mine, cut)
            assert torch.equal(found, tensor), (name, tp)


# ----------------------------------------------------------------------------------------------- who holds and moves what


def held(stage):
    model, optimizer, zero = sharded(4, 2, stage)
    train(model, optimizer, zero, 1)
    loss = loss_of(model, 1, zero.rank)
    between = zero.ledger().held
    loss.backward()
    owners = {name: zero.owners(name) for name in ("norm.weight", "layers.0.attention.wq.weight")}
    return predict_states(zero), between, owners, (zero.rank, zero.world_size)


@pytest.mark.full
@pytest.mark.parametrize("stage", [0, 3])
def test_memory_is_that_of_each_ranks_part_and_weights_are_released_between_forward_and_backward(ranks, stage):
    told = ranks.run(4, held, stage)
    assert [place for *_, place in told] == [(0, 2), (0, 2), (1, 2), (1, 2)]  # of the data, which micro-batches go by
    for predicted, between, owners, _ in told:
        assert predicted == {state: between.get(state, 0) for state in predicted}
        assert not between.get("gather", 0) and not between.get("prefetch", 0)  # graphs hold notes of DTensors
        cut, copied = owners["layers.0.attention.wq.weight"], owners["norm.weight"]
        if stage:
            half = WIDTH * WIDTH // 2
            assert [(o.rank, o.start, o.stop) for o in cut] == [(0, 0, half), (1, half, 2 * half)]  # a unit's first
            assert sum(o.stop - o.start for o in copied) == 2 * WIDTH


# ----------------------------------------------------------------------------------------------------------- checkpoints


def saved(world, tp, stage, folder, dtype):
    precision = Precision(param_dtype=dtype, cast_inputs=False)
    model, optimizer, zero = sharded(world, tp, stage, precision=precision)
    train(model, optimizer, zero, 2)
    zero.save(folder / "ckpt")
    zero.export(folder / "weights")
    return weights(model, zero)


def loaded(world, tp, stage, folder, to, dtype):
    model, _, zero = sharded(world, tp, stage, seed=3, precision=Precision(param_dtype=dtype, cast_inputs=False))
    assert zero.load(folder / "ckpt").skipped == []
    found = weights(model, zero)
    zero.save(to)
    return found


CUTS = {"embed": 0, "wq": 0, "wk": 0, "wv": 0, "w1": 0, "w3": 0, "output": 0, "wo": 1, "w2": 1}


def together(told, tp):
    """Whole tensors, of what every tensor rank has of them."""
    found = {}
    for name, tensor in told[0].items():
        cut = CUTS.get(name.split(".")[-2]) if not name.endswith("w2.bias") else None
        found[name] = tensor if cut is None or tp < 2 else torch.cat([each[name] for each in told[:tp]], cut)
    return found


def content(folder):
    """Every state of a checkpoint, whole."""
    with Saved.open(folder) as saved:
        return {key: saved.interval(key, 0, parts[-1].stop) for key, parts in saved.cut.items()}


@pytest.mark.row(99)
@pytest.mark.parametrize(("tp", "dtype"), [(0, None), (2, torch.bfloat16)], ids=["from plain", "from two"])
def test_a_checkpoint_loads_into_any_number_of_tensor_ranks(ranks, tmp_path, tp, dtype):
    """Parts of rows and of columns, values and optimizer states: 2 into plain, 1, 2 and 4, and back; exported whole."""
    wrote = together(ranks.run(4, saved, 4, tp, 2, tmp_path, dtype), tp)
    states = content(tmp_path / "ckpt")
    assert {state for _, state in states} == {"value", "exp_avg", "exp_avg_sq"}
    version = json.loads((tmp_path / "ckpt" / "manifest.json").read_text())["manifest"]["version"]
    assert version == (2 if tp else 1)  # what has no strips is read by every zeroshard
    for other, stage in ((0, 3), (1, 1), (2, 3), (4, 0)):
        to = tmp_path / f"{other}"
        told = together(ranks.run(4, loaded, 4, other, stage, tmp_path, to, dtype), other)
        assert all(torch.equal(told[name], wrote[name]) for name in wrote), other
        again = content(to)
        assert again.keys() == states.keys() and all(torch.equal(again[key], states[key]) for key in states), other
    exported = load_file(next((tmp_path / "weights").glob("*.safetensors")))
    assert all(torch.equal(exported[name], wrote[name]) for name in wrote)
    with Saved.open(tmp_path / "ckpt") as checkpoint:
        export_saved(checkpoint, tmp_path / "later", Wanted(10**9, dtype, False))
    exported = load_file(next((tmp_path / "later").glob("*.safetensors")))
    assert all(torch.equal(exported[name], wrote[name]) for name in wrote)


def filled(folder):
    mesh = mesh_of(4, 2)
    model = model_of(mesh["tp"], seed=5)
    zero = zeroshard.load(model, folder, optimizer_of(model), comm=Comm(group=mesh["dp"]))
    return weights(model, zero)


@pytest.mark.row(99)
def test_weights_of_a_folder_of_hugging_faces_fill_each_rank_with_its_parts(ranks, tmp_path):
    want = {name: p.detach() for name, p in model_of(None).named_parameters()}
    save_file(want, tmp_path / "model.safetensors")
    found = together(ranks.run(4, filled, tmp_path), 2)
    assert all(torch.equal(found[name], want[name]) for name in want)


def flipped(folder):
    model, optimizer, zero = sharded(4, 2, 3)
    train(model, optimizer, zero, 1)
    if torch.distributed.get_rank() == 1:
        bucket = model.norm.weight._zeroshard.bucket
        with bucket.updating.here() as own:
            own[0] += 1
    try:
        zero.save(folder / "ckpt")
    except PeerError as error:
        return str(error)
    return "saved"


@pytest.mark.full
@pytest.mark.row(98)
def test_copies_that_differ_between_tensor_ranks_are_named_at_the_next_save(ranks, tmp_path):
    for said in ranks.run(4, flipped, tmp_path):
        assert "different copies" in said and "shard 0 of" in said and "ranks 0 and 1" in said


# -------------------------------------------------------------------------------------------------------------- the rest


def rested(layout, offload, folder):
    path = {"path": folder} if "nvme" in offload.values() else {}
    model, optimizer, zero = sharded(4, 2, 3, layout=Layout(**layout), offload=Offload(**offload, **path))
    train(model, optimizer, zero, 2, clip=None)
    return weights(model, zero)


OTHERWISE = {
    "one vector": ({"bounds": "model"}, {}),
    "forwards again": ({"recompute": True, "units": ["layers.*", "output", "embed"]}, {}),
    "in files": ({}, {"optimizer": "nvme", "parameters": "nvme", "gradients": "cpu"}),
}


@pytest.mark.heavy
@pytest.mark.full
@pytest.mark.row(98)
@pytest.mark.parametrize("how", OTHERWISE)
def test_cuts_tiers_and_recomputation_change_no_bit(ranks, tmp_path, how):
    want = ranks.run(2, alone, 2, 2, 2)
    for rank, found in enumerate(ranks.run(4, rested, *OTHERWISE[how], tmp_path)):
        assert all(torch.equal(tensor, want[rank % 2][name]) for name, tensor in found.items())


def refused(which):
    mesh = mesh_of(4, 2)
    model = model_of(mesh["tp"])
    optimizer, options = optimizer_of(model), {"comm": Comm(group=mesh["dp"])}
    if which == "no mesh":
        options = {}
    elif which == "replicas":
        options = {"comm": Comm(group=mesh["dp"], replicas=2)}
    elif which == "ignored":
        options |= {"layout": Layout(ignore=["output.weight"])}
    elif which == "uneven":
        model.output.weight = nn.Parameter(distribute_tensor(torch.ones(WORDS + 1, WIDTH), mesh["tp"], [Shard(0)]))
    elif which == "whole":
        optimizer = torch.optim.Adafactor(model.parameters())
        options |= {"stage": 0}
    before = dict(model.named_parameters())
    try:
        zeroshard.shard(model, optimizer, **options)
    except UserError as error:
        same = {name: p for name, p in model.named_parameters() if p is before[name]}
        return str(error), len(same) == len(before), optimizer.param_groups[0]["params"][0] is before["embed.weight"]
    return "sharded"


REFUSED = {
    "no mesh": 'Comm(group=mesh["dp"])',
    "replicas": "replicas, and hosts, are not supported beside tensor parallelism",
    "ignored": "a parameter that is sharded",
    "uneven": "a size that 2 ranks divide",
    "whole": "keeps states of a matrix that are not one number for each element",
}


@pytest.mark.row(98)
@pytest.mark.parametrize("which", REFUSED)
def test_what_cannot_be_sharded_is_refused_and_the_model_stays_what_it_was(ranks, which):
    for said, same, held in ranks.run(4, refused, which):
        assert REFUSED[which] in said and (held or which == "whole") and same
