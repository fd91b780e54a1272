"""Tensors that are never cut, beside others that are: optimizers of whole matrices at every stage and number of ranks."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn

import models
import ranks
import reference
import training
import zeroshard
from test_checkpoint import joined, same
from test_optimizer import check
from zeroshard import Comm, Layout, Machine, Model, Offload
from zeroshard.checkpoint.content import model_state, pieces
from zeroshard.errors import UserError
from zeroshard.planner.built import predict_tiers
from zeroshard.planner.simulate import simulate

SIZES = (7, 131, 37, 5)


class Shampoo(torch.optim.Optimizer):
    """A user's own: of each matrix the sums of G G^T and G^T G, by whose inverse fourth roots a gradient is multiplied."""

    whole = True

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                assert param.dim() == 2, param.shape
                state = self.state[param]
                if not state:
                    state |= {
                        key: torch.eye(size) * 1e-3 for key, size in zip(("rows", "columns"), param.shape, strict=True)
                    }
                    state["step"] = torch.tensor(0.0)
                state["step"] += 1
                state["rows"] += param.grad @ param.grad.T
                state["columns"] += param.grad.T @ param.grad
                param.sub_(root(state["rows"]) @ param.grad @ root(state["columns"]), alpha=group["lr"])


def root(matrix):
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values.clamp(min=1e-6).pow(-0.25)) @ vectors.T


def optimizers_of(kind, model):
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() != 2]
    return {
        "Muon": lambda: [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(vectors, lr=0.01)],
        "Muon of one": lambda: [
            torch.optim.Muon(matrices[1:2], lr=0.02),
            torch.optim.AdamW([*vectors, matrices[0], matrices[2]]),
        ],
        "Shampoo": lambda: [Shampoo(matrices), torch.optim.AdamW(vectors, lr=0.01)],
        "Adafactor": lambda: [torch.optim.Adafactor(model.parameters(), lr=0.05, weight_decay=0.01)],
    }[kind]()


KINDS = ("Muon", "Muon of one", "Shampoo", "Adafactor")


def trained_whole(engine, kind, layout):
    model = models.build("mlp", sizes=SIZES)
    optimizers = optimizers_of(kind, model)
    engine.shard(model, optimizers, layout=layout)
    for step in range(3):
        engine.backward(model, step)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return model


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "world", [pytest.param(1, marks=pytest.mark.full), 2, 3, pytest.param(4, marks=pytest.mark.full)]
)
def test_whole_matrices_equal_plain_torch(kind, world):
    """At stages 0-3 on 1 to 4 ranks, weights and every state have the bits of the plain process."""
    check(trained_whole, kind, None, world=world)


@pytest.mark.heavy
@pytest.mark.full
@pytest.mark.parametrize("bounds", ["model", "tensor"])
def test_other_bounds_cut_the_rest(bounds):
    for kind in KINDS:
        check(trained_whole, kind, Layout(bounds=bounds, bucket_mib=0.002))


def held(zero):
    tiers = {tier: {state: n for state, n in each.items() if n} for tier, each in zero.ledger().tiers.items()}
    return {tier: each for tier, each in tiers.items() if each}


def in_files(kind, stage, folder):
    """Weights after three steps, everything on the device and in files."""
    found = []
    for offload in (None, Offload(optimizer="nvme", gradients="cpu", path=folder)):
        model = models.build("mlp", sizes=SIZES)
        optimizers = optimizers_of(kind, model)
        zero = zeroshard.shard(model, optimizers, stage=stage, offload=offload)
        for number in range(3):
            models.loss("mlp", model, models.batch("mlp", number, ranks.rank())).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        with zero.gathered():
            found.append(reference.weights(model))
    return reference.first_difference(*found), held(zero) == predict_tiers(zero) or (held(zero), predict_tiers(zero))


@pytest.mark.parametrize("kind", ["Muon", "Shampoo"])
@pytest.mark.parametrize("stage", [1, 3])
def test_whole_matrices_in_files(kind, tmp_path, stage):
    """Stepped bucket by bucket, with the bits of the device, and held as planned."""
    assert ranks.run(2, in_files, kind, stage, str(tmp_path)) == [("", True)] * 2


def laid_out(stage, layout, kind):
    model = models.build("mlp", sizes=SIZES)
    zero = zeroshard.shard(model, optimizers_of(kind, model), stage=stage, layout=layout)
    shapes = [tuple(p.shape) for each in zero._engine.optimizer_members() for p in each[1]["params"] if p.numel()]
    return (
        sorted(slot.name for b in zero.partition.buckets if b.whole for slot in b.slots),
        zero.partition.cut_tensors(),
        shapes,
    )


def test_the_rest_of_the_model_is_still_cut():
    """What Muon updates has one owner, in its own shape; what AdamW updates is cut beside it. At stage 0, where every rank
    updates everything, nothing needs to be whole."""
    whole = ["0.weight", "2.weight", "4.weight"]
    for stage, expected in ((0, []), (1, whole), (3, whole)):
        found = ranks.run(2, laid_out, stage, None, "Muon")
        assert all(names == expected for names, _, _ in found)
        assert all(cut for _, cut, _ in found) and not set(expected) & set(found[0][1])
        if stage:
            assert sorted(shape for _, _, shapes in found for shape in shapes if len(shape) == 2) == [
                (5, 37),
                (37, 131),
                (131, 7),
            ]
    (whole, cut, _), _ = ranks.run(2, laid_out, 3, Layout(whole=["*.bias"]), "Muon of one")
    assert whole == ["0.bias", "2.bias", "2.weight", "4.bias"]
    assert cut == ["0.weight", "4.weight"]


# --------------------------------------------------------------------------------------------------------- checkpoints


def digest(model, zero):
    found = {(p.parameter, p.state, p.start): p.tensor.clone() for p in pieces(model_state(zero._engine))}
    with zero.gathered():
        return reference.weights(model), found, {}, []


def steps_of(kind, stage, layout, path, numbers, load=None):
    """Four micro-batches a step, however many ranks; then what there is of the model, by name."""
    model = models.build("mlp", sizes=SIZES)
    optimizers = optimizers_of(kind, model)
    zero = zeroshard.shard(model, optimizers, stage=stage, layout=layout)
    if load is not None:
        assert zero.load(load).skipped == []
    each = 4 // ranks.world()
    for number in numbers:
        for turn in range(each):
            (
                models.loss("mlp", model, models.batch("mlp", number, turn * ranks.world() + ranks.rank())) / each
            ).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    zero.save(path)
    return digest(model, zero)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["Muon", "Shampoo", "Adafactor"])
def test_checkpoints_of_whole_matrices_load_at_any_ranks_and_stage(kind, tmp_path):
    """Four ranks, then two, then one: the bits of the training that never stopped, at other stages and bounds."""
    straight = ranks.run(4, steps_of, kind, 3, None, tmp_path / "straight", range(3))
    ranks.run(4, steps_of, kind, 2, None, tmp_path / "a", range(1))
    ranks.run(2, steps_of, kind, 3, Layout(whole=["*"]), tmp_path / "b", range(1, 2), tmp_path / "a")
    resumed = ranks.run(1, steps_of, kind, 0, Layout(bounds="tensor"), tmp_path / "c", range(2, 3), tmp_path / "b")
    same(resumed, straight)
    assert joined(resumed).keys() == joined(straight).keys()


# ------------------------------------------------------------------------------------------------------------- planner


def job_of(kind):
    parts = training.job("mlp", sizes=SIZES)
    return parts | {"optimizer": lambda _: optimizers_of(kind, parts["model"])}


def held_and_planned(kind, stage):
    model = models.build("mlp", sizes=SIZES)
    optimizers = optimizers_of(kind, model)
    zero = zeroshard.shard(model, optimizers, stage=stage)
    for number in range(2):
        models.loss("mlp", model, models.batch("mlp", number, ranks.rank())).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return held(zero), predict_tiers(zero)


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_the_planner_knows_whole_tensors_to_the_byte(kind):
    """On every rank: what is held, what the built engine predicts, and what the simulation of that rank holds."""
    for stage in (1, 3):
        for rank, (ledger, planned) in enumerate(ranks.run(3, held_and_planned, kind, stage)):
            assert ledger == planned
            run = simulate(lambda: job_of(kind), ranks=3, rank=rank, stage=stage)
            assert predict_tiers(run.zero) == planned


@pytest.mark.full
def test_a_plan_says_how_even_whole_tensors_are_and_which_replicas_leave_no_rank_idle(tmp_path):
    found = zeroshard.plan(lambda: job_of("Muon"), Machine(ranks=2), stage=3)
    assert found.json()["whole"]["tensors"] == 3 and found.json()["whole"]["idle"] == 0
    idle = zeroshard.plan(lambda: job_of("Muon"), Machine(ranks=8), stage=1)
    assert (idle.whole.idle, idle.whole.replicas) == (5, 4)
    assert any("--replicas 4, Comm(replicas=4)" in note and "5 of 8 ranks" in note for note in idle.notes)
    assert zeroshard.plan(lambda: job_of("Muon"), Machine(ranks=8), stage=1, comm=Comm(replicas=4)).whole.idle == 0
    shapes = tmp_path / "shapes.json"
    shapes.write_text(json.dumps({"h.0.w": [64, 64], "h.0.b": [64], "h.1.w": [64, 64], "h.1.b": [64]}))
    assert zeroshard.plan(shapes, Machine(ranks=2), stage=1).whole is None
    told = zeroshard.plan(shapes, Machine(ranks=2), stage=1, layout=Layout(whole=["h.0.w", "h.1.w"])).whole
    assert (told.tensors, told.idle, told.work) == (2, 0, 1.0)
    with pytest.raises(UserError, match="Layout.whole matches no parameter"):
        zeroshard.plan(shapes, Machine(ranks=2), layout=Layout(whole=["w"]))


def test_cuts_fall_between_the_blocks_that_a_layout_names(tmp_path):
    """Multiples of the block, of a tensor in a bucket of such, and of 128; no more padding than the plan says."""
    shapes = {name: list(p.shape) for name, p in models.build("mlp", sizes=(7, 96, 40, 5)).named_parameters()}
    (tmp_path / "shapes.json").write_text(json.dumps(shapes))
    for align, cut in (({"2.weight": 96}, 384), ({"2.*": 40}, 640), ({"*.weight": 1}, 128)):
        partition = ranks.run(3, blocks_of, Layout(align=align))[0]
        bucket, slot = partition.find("2.weight")
        cuts = [each - slot.start for each in bucket.bounds if slot.start < each < slot.stop]
        assert cuts and all(each % cut == 0 for each in cuts)
        plan = zeroshard.plan(
            Model(shapes=tmp_path / "shapes.json", preset="fp32"), Machine(ranks=3), stage=1, layout=Layout(align=align)
        )
        padding = sum(each.padding for each in partition.buckets)
        assert any(note == f"padding over all ranks: {padding:,} elements" for note in plan.notes)
    assert (
        ranks.run(2, blocks_of, Layout(align={"2.weight": 96, "*.weight": 35, "*.bias": 5}))[0]
        .find("2.weight")[0]
        .whole
    )


class Rowwise(torch.optim.Optimizer):
    """A user's own, of which nothing is known: each row moves by its gradient over that gradient's norm."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    rows = param.grad.reshape(-1, group["row"])
                    state = self.state[param]
                    state["seen"] = state.get("seen", torch.zeros_like(param)) + param.grad
                    param.sub_((rows / (rows.norm(dim=1, keepdim=True) + 1e-6)).view_as(param), alpha=0.05)


def row_by_row(engine):
    model = models.build("mlp", sizes=(7, 96, 40, 5))
    optimizer = Rowwise([{"params": [p], "row": p.shape[-1]} for p in model.parameters()], {})
    engine.shard(
        model, optimizer, layout=Layout(align={"0.weight": 7, "2.weight": 96, "4.weight": 40}, whole=["*.bias"])
    )
    engine.train(model, optimizer, range(3))
    return model


def test_an_optimizer_of_rows_equals_plain_torch():
    """Cut between rows, as `align` says: what is not known of the class, the layout says of its parameters."""
    check(row_by_row)


def blocks_of(layout):
    model = models.build("mlp", sizes=(7, 96, 40, 5))
    return zeroshard.shard(model, torch.optim.AdamW(model.parameters()), stage=1, layout=layout).partition


# -------------------------------------------------------------------------------------------------------------- errors


def refused():
    def attempt(make, added=None, **layout):
        model = models.build("mlp", sizes=SIZES)
        optimizers = make(model)
        try:
            zeroshard.shard(model, optimizers, layout=Layout(**layout))
            if added is not None:
                optimizers[0].add_param_group({"params": [dict(model.named_parameters())[added]]})
                models.loss("mlp", model, models.batch("mlp", 0, 0)).backward()
                optimizers[0].step()
        except UserError as error:
            return str(error)
        return ""

    def of_one(model):
        return [torch.optim.Muon([model[2].weight])]

    return {
        "pattern": attempt(lambda model: None, whole=["0.wieght"]),
        "added": attempt(of_one, added="0.weight"),
        "nothing": attempt(lambda model: None, align={"3.weight": 7}),
        "both": attempt(lambda model: None, align={"*.weight": 7}, whole=["0.*"]),
        "large": attempt(lambda model: None, align={"*.bias": 37}),
        "muon": attempt(of_one, align={"2.weight": 37}),
        "added whole": attempt(of_one, added="0.weight", whole=["0.weight"]),
    }


def test_what_is_refused_of_whole_tensors():
    for found in ranks.run(2, refused):
        assert "Layout.whole matches no parameter" in found["pattern"] and "0.weight" in found["pattern"]
        assert (
            "was given to an optimizer after shard" in found["added"]
            and "'0.weight'" in found["added"]
            and "Layout(whole=" in found["added"]
        )
        assert found["added whole"] == ""
        assert "Layout.align matches no parameter" in found["nothing"]
        assert "never cut, and cut between blocks" in found["both"] and "'0.weight'" in found["both"]
        assert "a block is larger than the tensor" in found["large"] and "Layout(whole=['4.bias'])" in found["large"]
        assert "whole tensors" in found["muon"] and "Muon, parameter '2.weight'" in found["muon"]
    with pytest.raises(UserError, match=r"Layout\(whole=\['a'\]\)"):
        Layout(whole="a")
    for align in ({"a": 0}, {"a": 1.5}, {1: 2}):
        with pytest.raises(UserError, match=r"Layout\.align takes name patterns"):
            Layout(align=align)


class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts, self.gate = nn.Linear(8, 8), nn.Linear(8, 8)


def rows_only():
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("edp", "ep"))
    model = Rows()
    with pytest.raises(UserError, match=r"a rank has some rows only(?s:.*)Adafactor, parameter 'experts.weight'"):
        zeroshard.shard(
            model, torch.optim.Adafactor(model.parameters()), comm=zeroshard.Comm(group=mesh),
            layout=Layout(along={"experts.*": "edp"}),
        )  # fmt: skip


def test_rows_of_a_tensor_are_not_all_of_it():
    ranks.run(2, rows_only)


# --- optimizers that send messages themselves -----------------------------------------------------------------------------


class Gathering(torch.optim.Optimizer):
    """The Muon of one file that many programs have copied: each rank updates every n-th matrix, and all gather them."""

    whole = True

    def __init__(self, params, lr=0.02, sends=None):
        super().__init__(params, {"lr": lr})
        self.sends = sends

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=group["lr"])
        SENDS[self.sends](self.param_groups[0]["params"][0])
        return loss


SENDS = {
    None: lambda param: None,
    "all_gather": lambda param: dist.all_gather([torch.empty_like(param) for _ in range(2)], param),
    "all_reduce": lambda param: dist.all_reduce(param),
    "broadcast": lambda param: dist.broadcast(param, 0),
    "all_gather_into_tensor": lambda param: dist.all_gather_into_tensor(torch.cat([param, param]), param),
    "functional": lambda param: functional.wait_tensor(functional.all_gather_tensor(param, 0, dist.group.WORLD)),
    "send": lambda param: dist.send(param, 1) if dist.get_rank() == 0 else dist.recv(param, 0),
}


def of_its_own(sends, stage, offload, closure):
    model = models.build("mlp", sizes=(8, 8, 8, 8))
    matrices, vectors = ([p for p in model.parameters() if (p.dim() == 2) is two] for two in (True, False))
    optimizers = [Gathering(matrices, sends=sends), torch.optim.SGD(vectors, lr=0.1)]
    zeroshard.shard(model, optimizers, stage=stage, offload=Offload(optimizer=offload))

    def loss():
        dist.all_reduce(torch.ones(1))  # the program's own: it may send what it likes, also inside a closure
        found = model(torch.ones(2, 8)).square().mean()
        found.backward()
        return found

    if not closure:
        loss()
    optimizers[0].step(loss if closure else None)
    optimizers[1].step()
    dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize("offload", ["device", "cpu"])
@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.processes
@pytest.mark.parametrize("sends", SENDS)
def test_an_optimizer_that_sends_messages_in_its_step_is_refused_by_name(stage, sends, closure, offload):
    """At stages 1 to 3 a rank's list has other matrices than its peers': what is gathered would land in the wrong ones."""
    if closure and offload == "cpu":
        pytest.skip("a closure and a step by buckets do not go together")
    if stage == 0 or sends is None:
        ranks.run(2, of_its_own, sends, stage, offload, closure)
        return
    with pytest.raises(ranks.RankFailure, match="calls a collective inside step(?s:.)*Gathering, optimizer 0"):
        ranks.run(2, of_its_own, sends, stage, offload, closure)
