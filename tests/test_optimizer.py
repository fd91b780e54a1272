"""The optimizer stays the user's: any elementwise `torch.optim` class, with its groups, options, hooks and schedulers.

A scenario is a function of an `Engine`: it builds a model and an optimizer, hands them to `engine.shard`, and trains.
With a stage the engine is zeroshard on one rank; without one it is plain PyTorch in one process, which runs all ranks'
micro-batches and averages. Weights, optimizer state and whatever else the scenario notes must be equal with `==`.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import importlib
import math
import random
import re
import warnings
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import models
import ranks
import reference
import zeroshard
from ranks import RankFailure
from zeroshard import Layout, Offload, Precision
from zeroshard.engine.build.supported_optimizers import block_of, by_bucket
from zeroshard.errors import CheckpointError, PeerError, StateError, UserError
from zeroshard.planner import predict_states

STAGES = (0, 1, 2, 3)
SIZES = (7, 131, 37, 5)  # no tensor is a multiple of the block; at 2 and 3 ranks cuts fall inside tensors


class Engine:
    """Plain PyTorch (no stage), or zeroshard on this rank: what a scenario trains with."""

    def __init__(self, world: int, stage: int | None = None) -> None:
        self.world, self.stage = world, stage
        self.zero: Any = None
        self.groups: list[tuple[torch.optim.Optimizer, int, list[str]]] = []
        self.notes: list[Any] = []

    def shard(self, model, optimizer, **options):
        optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else optimizer or []
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        for each in optimizers:
            for number, group in enumerate(each.param_groups):
                self.groups.append((each, number, [names[id(parameter)] for parameter in group["params"]]))
        if self.stage is not None:
            self.zero = zeroshard.shard(model, optimizer, stage=self.stage, **options)
        return self.zero

    def gathered(self):
        return self.zero.gathered() if self.zero else contextlib.nullcontext()

    def backward(self, model, step, name="mlp"):
        """One micro-batch per rank; returns the mean of the ranks' losses, the same on every rank."""
        if self.zero:
            loss = models.loss(name, model, models.batch(name, step, ranks.rank()))
            loss.backward()
            losses = [torch.zeros(()) for _ in range(self.world)]
            dist.all_gather(losses, loss.detach())
            return torch.stack(losses).mean()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(self.world)  # what was kept goes on being a sum
        losses = []
        for rank in range(self.world):
            losses.append(models.loss(name, model, models.batch(name, step, rank)))
            losses[-1].backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(self.world)
        return torch.stack(losses).mean().detach()

    def train(self, model, optimizer, steps, name="mlp"):
        for step in steps:
            self.backward(model, step, name)
            optimizer.step()
            optimizer.zero_grad()

    def states(self, whole):
        """{(parameter, state key): this rank's values, 1-D}; from plain PyTorch's state (`whole`) the same elements."""
        found = {}
        for optimizer, number, names in self.groups:
            held = iter(optimizer.param_groups[number]["params"])
            for name in names:
                bucket, slot = self.zero.partition.find(name)
                first, last = bucket.fragment(slot, self.zero.rank) if self.stage else (0, slot.numel)
                if last > first:
                    state = optimizer.state[next(held)]
                    assert state.keys() == whole[name].keys(), (name, state.keys(), whole[name].keys())
                    for key, value in state.items():
                        want = torch.as_tensor(whole[name][key])
                        want = want.reshape(-1)[first:last] if want.numel() == slot.numel and want.dim() else want
                        if difference := reference.first_difference(
                            {key: torch.as_tensor(value).reshape(want.shape)}, {key: want}
                        ):
                            found[name, key] = difference
        return found


def plain(scenario, world, *args):
    """What plain PyTorch ends with: (weights, optimizer state by name, notes)."""
    ranks.reset_global_state()
    engine = Engine(world)
    model = scenario(engine, *args)
    state = {}
    for optimizer, number, names in engine.groups:
        for name, parameter in zip(names, optimizer.param_groups[number]["params"], strict=False):
            state[name] = {
                k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in optimizer.state[parameter].items()
            }
    return reference.weights(model), state, engine.notes


def compare(scenario, stages, want, args, compare_state):
    """{stage: the first difference from plain PyTorch on this rank}."""
    found = {}
    for stage in stages:
        ranks.reset_global_state()
        engine = Engine(ranks.world(), stage)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model = scenario(engine, *args)
        with engine.zero.gathered():
            weights = reference.weights(model)
        text = reference.first_difference(weights, want[0])
        text = text or (str(engine.states(want[1]) or "") if compare_state else "")
        if text or engine.notes != want[2]:
            found[stage] = text or f"noted {engine.notes} instead of {want[2]}"
    return found


references = {}  # what plain PyTorch ends with, by what it was asked: the same for all stages


def check(scenario, *args, world=3, stages=STAGES, state=True):
    """The scenario on `world` ranks, at all stages, equals plain PyTorch."""
    asked = scenario, world, repr(args)
    if asked not in references:
        references[asked] = plain(scenario, world, *args)
    want = references[asked]
    assert ranks.run(world, compare, scenario, stages, want, args, state) == [{}] * world


# -------------------------------------------------------------------------------------------- every elementwise optimizer

KINDS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "SGD nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, maximize=True),
    "SGD foreach": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, foreach=True),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01, fused=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.01),
    "Adam foreach": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
    "Adam fused": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, fused=True),
    "AdamW amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "AdamW tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), foreach=False),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, lr_decay=0.1, initial_accumulator_value=0.1),
    "Adagrad foreach": lambda p: torch.optim.Adagrad(p, lr=0.05, foreach=True),
    "Adagrad fused": lambda p: torch.optim.Adagrad(p, lr=0.05, fused=True),
    "RMSprop centered": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.5),
    "RMSprop foreach": lambda p: torch.optim.RMSprop(p, lr=0.01, foreach=True),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0, weight_decay=0.01),
    "Adadelta foreach": lambda p: torch.optim.Adadelta(p, lr=1.0, foreach=True),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01, decoupled_weight_decay=True, weight_decay=0.01),
    "NAdam foreach": lambda p: torch.optim.NAdam(p, lr=0.01, foreach=True),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "RAdam foreach": lambda p: torch.optim.RAdam(p, lr=0.01, foreach=True),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "Adamax foreach": lambda p: torch.optim.Adamax(p, lr=0.01, foreach=True),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.05, t0=2.0),
    "ASGD foreach": lambda p: torch.optim.ASGD(p, lr=0.05, t0=2.0, foreach=True),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "Rprop foreach": lambda p: torch.optim.Rprop(p, lr=0.01, foreach=True),
}


def training(engine, kind, warm, name="mlp", options=None, layout=None, precision=None):
    """`warm` steps before shard (on all ranks' data, on every rank alike), then three after it."""
    model = models.build(name, **({"sizes": SIZES} if options is None else options))
    optimizer = KINDS[kind](model.parameters())
    Engine(engine.world).train(model, optimizer, range(warm), name)
    engine.shard(model, optimizer, layout=layout, precision=precision)
    engine.train(model, optimizer, range(warm, warm + 3), name)
    return model


FRESH_AND_WARM = [(kind, warm) for kind in KINDS for warm in (0, 2) if warm or not kind.endswith(("foreach", "fused"))]


@pytest.mark.parametrize("stages", [(0, 3), (1, 2)], ids=str)
@pytest.mark.parametrize(("kind", "warm"), FRESH_AND_WARM)
def test_every_elementwise_optimizer_equals_plain_torch(kind, warm, stages):
    """Weights and optimizer state at stages 0-3 on 3 ranks equal plain PyTorch's, from a fresh optimizer and from one
    that had already stepped twice (foreach and fused kernels: the latter alone), whose state is kept, scalars too."""
    check(training, kind, warm, stages=stages)


@pytest.mark.heavy
@pytest.mark.full
@pytest.mark.parametrize("world", [1, 2], ids=lambda world: f"ranks{world}")
def test_every_elementwise_optimizer_at_one_and_two_ranks(world):
    """The same at one and at two ranks, one kernel of each class, fresh."""
    kinds = [
        "SGD momentum",
        "Adam",
        "AdamW fused",
        "Adagrad",
        "RMSprop centered",
        "Adadelta",
        "NAdam",
        "RAdam",
        "Adamax",
        "ASGD",
        "Rprop",
    ]
    want = {kind: plain(training, world, kind, 0) for kind in kinds}
    assert ranks.run(world, several_kinds, want) == [{kind: {} for kind in kinds}] * world


def several_kinds(want):
    return {kind: compare(training, STAGES, each, (kind, 0), True) for kind, each in want.items()}


@pytest.mark.full
@pytest.mark.row(18)
def test_tensors_of_every_size_keep_their_state():
    """Zero-element, 0-d and one-element parameters, at more ranks than elements: state as plain PyTorch has it."""
    args = ("Adam", 2, "degenerate", {})
    check(training, *args)
    check(training, "SGD momentum", 2, "tiny", {})


# ---------------------------------------------------------------------------------------------------- whole-tensor ones


def whole_tensors(engine, kind, layout):
    model = models.build("mlp", sizes=SIZES)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() != 2]
    if kind == "Adafactor":
        optimizers = [torch.optim.Adafactor(model.parameters(), lr=0.05, weight_decay=0.01)]
    elif kind == "Muon":
        optimizers = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(vectors, lr=0.01)]
    elif kind == "Muon of one matrix":  # most ranks own nothing of it
        optimizers = [torch.optim.Muon(matrices[1:2], lr=0.02), torch.optim.Adafactor([*vectors, matrices[2]], lr=0.05)]
    else:
        optimizers = [Unknown(model.parameters())]
    engine.shard(model, optimizers, layout=layout)
    for step in range(3):
        engine.backward(model, step)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return model


class Unknown(torch.optim.Optimizer):
    """A user's own optimizer, not elementwise: each tensor moves by its gradient over that gradient's norm."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad * (group["lr"] / (param.grad.norm() + 1e-6)))


class Known(torch.optim.Optimizer):
    """A user's own optimizer that says of itself that it is elementwise."""

    elementwise = True

    def __init__(self, params):
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    state["sign"] = state.get("sign", torch.zeros_like(param)).mul_(0.5).add_(param.grad.sign())
                    param.sub_(state["sign"] * group["lr"])


class Together(torch.optim.Optimizer):
    """A user's own optimizer that updates blocks of 256 elements together, as quantized states do."""

    block = 256

    def __init__(self, params):
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    for grad, flat in zip(param.grad.reshape(-1).split(256), param.view(-1).split(256), strict=True):
                        flat.sub_(grad * (group["lr"] / grad.abs().max()))


def lion(params):
    return pytest.importorskip("lion_pytorch").Lion(params, lr=0.01, weight_decay=0.1)


def schedule_free(params):
    optimizer = pytest.importorskip("schedulefree").AdamWScheduleFree(params, lr=0.01, warmup_steps=2)
    optimizer.train()
    return optimizer


KINDS |= {"Known": Known, "Together": Together, "Lion": lion, "schedule-free": schedule_free}
BLOCKS = {"sizes": (7, 256, 256, 5)}  # every tensor of over 256 elements is a multiple of that


@pytest.mark.heavy
@pytest.mark.parametrize("kind", ["Adafactor", "Muon", "Muon of one matrix", "Unknown"])
def test_whole_tensor_optimizers_where_nothing_is_cut(kind):
    """Under `bounds="tensor"` and `whole=["*"]` at every stage, at stage 0, and at one rank, Adafactor, Muon and unknown
    classes equal plain PyTorch."""
    check(whole_tensors, kind, Layout(bounds="tensor"), state=kind != "Unknown")
    check(whole_tensors, kind, Layout(whole=["*"]), stages=(1, 3), state=kind != "Unknown")
    check(whole_tensors, kind, None, stages=(0,), state=kind != "Unknown")
    check(whole_tensors, kind, None, world=1, state=kind != "Unknown")


def test_an_optimizer_may_say_that_it_is_elementwise(stage):
    """A user's class with `elementwise = True` is cut like any other, its state included."""
    check(training, "Known", 2, stages=(stage,))


@pytest.mark.full
def test_an_optimizer_may_say_which_elements_it_updates_together():
    """One with `block = 256` is cut at such blocks, at which it has plain PyTorch's bits, whatever the layout's `align`;
    a tensor that is no multiple of them is not cut."""
    check(training, "Together", 1, "mlp", BLOCKS)
    check(training, "Together", 0, stages=(1, 3))
    check(training, "Together", 0, "mlp", BLOCKS, Layout(bounds="model", align=1), stages=(2,))


@pytest.mark.parametrize("kind", ["Lion", "schedule-free"])
@pytest.mark.trainers
def test_elementwise_optimizers_of_other_packages_are_known(kind):
    pytest.importorskip({"Lion": "lion_pytorch", "schedule-free": "schedulefree"}[kind])
    check(training, kind, 1)


def eagerly(function, **_):
    """In place of torch.compile, which takes a minute for a step of torchao's."""
    return function


def quantized(package, kind, stage, path=None, load=None, steps=3):
    """Weights after some steps of four micro-batches each; of plain torch where there is no stage."""
    optimizers = importlib.import_module(f"{package}.optim")

    with mock.patch("torch.compile", eagerly):
        model = models.build("mlp", sizes=(7, 1024, 1024, 5))
        optimizer = getattr(optimizers, kind)(model.parameters(), lr=0.01)
        zero = None if stage is None else zeroshard.shard(model, optimizer, stage=stage, layout=Layout(bounds="model"))
        if load is not None:
            assert zero.load(load).skipped == []
        first, world = 0 if load is None else 2, 1 if stage is None else ranks.world()
        for step in range(first, steps):
            for turn in range(4 // world):
                index = turn * world + (0 if stage is None else ranks.rank())
                (models.loss("mlp", model, models.batch("mlp", step, index)) / (4 // world)).backward()
            optimizer.step()
            optimizer.zero_grad()
        if path is not None:
            zero.save(path)
        if zero is not None and steps > 0:
            told = {state: n for tiers in zero.ledger().tiers.values() for state, n in tiers.items() if n}
            assert told == predict_states(zero)
        with zero.gathered() if zero else contextlib.nullcontext():
            states = [each for state in optimizer.state.values() for each in state.values()]
            return reference.weights(model), {(type(each).__name__, str(getattr(each, "dtype", ""))) for each in states}


QUANTIZED = [
    ("bitsandbytes", "AdamW8bit"),
    *(
        pytest.param(package, kind, marks=pytest.mark.slow)
        for package, kind in (
            ("bitsandbytes", "PagedAdamW8bit"), ("bitsandbytes", "Lion8bit"), ("bitsandbytes", "AdamW"),
            ("torchao", "AdamW8bit"), ("torchao", "AdamW4bit"), ("torchao", "AdamWFp8"),
        )
    ),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:Paged optimizers")
@pytest.mark.parametrize(("package", "kind"), QUANTIZED)
@pytest.mark.trainers
def test_quantized_states_of(package, kind, tmp_path):
    """Cut where blocks end, they have the plain optimizer's bits at any ranks and stage, checkpoints between included,
    and are held as planned."""
    pytest.importorskip(package)
    want, kinds = quantized(package, kind, None)
    quantizes = any(name.startswith("OptimState") for name, _ in kinds) or ("Tensor", "torch.uint8") in kinds
    assert quantizes == (kind != "AdamW")
    for world, stage in ((2, 3), (4, 1), (2, 0)):
        for weights, _ in ranks.run(world, quantized, package, kind, stage):
            reference.assert_same(weights, want)
    ranks.run(4, quantized, package, kind, 3, tmp_path / "a", None, 2)
    for world, stage in ((2, 2), (1, 0)):
        for weights, _ in ranks.run(world, quantized, package, kind, stage, None, tmp_path / "a"):
            reference.assert_same(weights, want)


@pytest.mark.trainers
def test_options_of_bitsandbytes_are_kept_or_refused():
    """The least tensor that has states of 8 bits is a block's length; options by a parameter's id have no shard to go to."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    weight = [torch.nn.Parameter(torch.zeros(8))]
    assert block_of(bitsandbytes.optim.AdamW8bit(weight)) == 4096
    assert block_of(bitsandbytes.optim.AdamW8bit(weight, min_8bit_size=10_000)) == 12_288
    model = bitsandbytes.nn.StableEmbedding(64, 64)
    with pytest.raises(UserError, match="GlobalOptimManager"):
        zeroshard.shard(model, bitsandbytes.optim.AdamW8bit(model.parameters()))


@pytest.mark.trainers
def test_quantized_weights_of_torchao_are_named():
    """Refused by name, or left alone; then they stay out of checkpoints, by name too."""
    quantization = pytest.importorskip("torchao.quantization")
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 4))
    quantization.quantize_(model[0], quantization.Int8WeightOnlyConfig())
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model[1].parameters())
    with pytest.raises(UserError, match="parameter '0.weight'(?s:.*)got: Int8Tensor(?s:.*)unwrap_tensor_subclass_par"):
        zeroshard.shard(model, optimizer)
    zero = zeroshard.shard(model, optimizer, layout=Layout(ignore=["0.weight"]))
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    with pytest.raises(CheckpointError, match="cannot be saved(?s:.*)parameter '0.weight'"):
        zero.save("none")


def float8(stages, **options):
    """Weights after three steps of two micro-batches, with `torchao.float8` linears; of plain torch where no stage is."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    found = []
    for stage in stages:
        torch.manual_seed(5)
        model = torch.nn.Sequential(torch.nn.Linear(32, 48), torch.nn.GELU(), torch.nn.Linear(48, 16, bias=False))
        convert_to_float8_training(model, config=Float8LinearConfig(emulate=True, **options))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        zero = (
            None if stage is None else zeroshard.shard(model, optimizer, stage=stage, layout=Layout(bucket_mib=0.002))
        )
        for step in range(3):
            for source in (0, 1) if zero is None else (zero.rank,):
                batch = torch.randn(16, 32, generator=torch.Generator().manual_seed(2 * step + source))
                (model(batch).square().mean() / (2 if zero is None else 1)).backward()
            optimizer.step()
            optimizer.zero_grad()
        with zero.gathered() if zero else contextlib.nullcontext():
            found.append((type(model[0]).__name__, reference.weights(model)))
    return found


@pytest.mark.filterwarnings("ignore")  # torchao's, of what it was built for
@pytest.mark.trainers
def test_float8_linears_of_torchao():
    """Products in 8 bits, by torchao before `shard`, have plain torch's bits at stages 0-3."""
    pytest.importorskip("torchao")
    ((kind, want),) = ranks.run(1, float8, (None,))[0]
    assert kind == "Float8Linear"
    for found in ranks.run(2, float8, (0, 1, 2, 3)):
        for _, weights in found:
            reference.assert_same(weights, want)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.trainers
def test_weights_that_torchao_gathers_for_fsdp_are_refused_by_name():
    """Its subclass casts in FSDP2's own gather; here `Precision(fp8=...)` is what gathers bytes."""
    pytest.importorskip("torchao")
    with pytest.raises(RankFailure, match=r"(?s)parameter '0\.weight'.*WeightWithDynamicFloat8CastTensor.*fp8="):
        ranks.run(1, float8, (3,), enable_fsdp_float8_all_gather=True)


def test_an_optimizer_that_counts_its_calls_is_called_once_a_step():
    """schedulefree's count steps in their groups: bucket by bucket they counted each step several times."""
    kind = type("AdamWScheduleFree", (torch.optim.AdamW,), {"__module__": "schedulefree.adamw_schedulefree"})
    model = models.build("mlp", sizes=SIZES)
    optimizer = kind(model.parameters())
    assert not by_bucket(optimizer) and by_bucket(Known(model.parameters())) and by_bucket(Together(model.parameters()))
    with pytest.raises(UserError, match="go bucket by bucket(?s:.*)AdamWScheduleFree"):
        zeroshard.shard(model, optimizer, offload=Offload(optimizer="cpu"))


def lbfgs(engine, line_search):
    model = models.build("mlp", sizes=SIZES)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn=line_search)
    engine.shard(model, optimizer)
    for step in range(3):

        def closure(step=step):
            optimizer.zero_grad()
            loss = engine.backward(model, step)
            engine.notes.append(loss.item())
            return loss

        engine.notes.append(optimizer.step(closure).item())
    return model


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_lbfgs_at_stage_0(line_search):
    """LBFGS evaluates its closure as often, at the same points and with the same losses as plain PyTorch."""
    check(lbfgs, line_search, stages=(0,), state=False)


# -------------------------------------------------------------------------------------------------------------- refusals


def refusals():
    """{what was tried: the message}; empty where nothing was refused."""

    def attempt(optimizer_of, **options):
        model = models.build("mlp", sizes=SIZES)
        try:
            zeroshard.shard(model, optimizer_of(model), **options)
        except UserError as error:
            return str(error)
        return ""

    class AdamW(torch.optim.AdamW):
        """Of a known name, but not torch's."""

    found = {}
    for stage in STAGES:
        found["SparseAdam", stage] = attempt(lambda m: torch.optim.SparseAdam(m.parameters()), stage=stage)
        found["LBFGS", stage] = attempt(lambda m: torch.optim.LBFGS(m.parameters()), stage=stage)
        found["Adafactor", stage] = attempt(lambda m: torch.optim.Adafactor(m.parameters()), stage=stage)
        found["Muon", stage] = attempt(
            lambda m: torch.optim.Muon([p for p in m.parameters() if p.dim() == 2]), stage=stage
        )
        found["Unknown", stage] = attempt(lambda m: Unknown(m.parameters()), stage=stage)
        found["AdamW", stage] = attempt(lambda m: AdamW(m.parameters()), stage=stage)
    for bounds in ("unit", "model", "tensor"):
        found["SparseAdam", bounds] = attempt(
            lambda m: torch.optim.SparseAdam(m.parameters()), layout=Layout(bounds=bounds)
        )
        found["LBFGS", bounds] = attempt(lambda m: torch.optim.LBFGS(m.parameters()), layout=Layout(bounds=bounds))
    found["fused"] = attempt(lambda m: torch.optim.AdamW(m.parameters(), fused=True), layout=Layout(align=1))
    found["string"] = attempt(lambda m: "adamw")
    found["class"] = attempt(lambda m: torch.optim.AdamW)
    found["in a list"] = attempt(lambda m: [torch.optim.AdamW(m.parameters()), None])
    found["foreign"] = attempt(lambda m: torch.optim.AdamW([*m.parameters(), nn.Parameter(torch.ones(3))]))
    found["twice"] = attempt(lambda m: [torch.optim.AdamW(m.parameters()), torch.optim.SGD(m[0].parameters())])
    return found


@pytest.mark.parametrize("world", [1, 2], ids=lambda world: f"ranks{world}")
def test_what_cannot_be_cut_is_refused_by_name(world):
    """SparseAdam always; LBFGS unless nothing is sharded; unknown classes where a tensor may be cut. Not Adafactor and
    Muon, whose tensors are not. The message names the class, and a tensor that it updates, and says what works."""
    for found in ranks.run(world, refusals):
        for (what, where), text in ((key, text) for key, text in found.items() if isinstance(key, tuple)):
            cut = where in ("unit", "model", "tensor") or where > 0
            refused = what == "SparseAdam" or (what == "LBFGS" and cut)
            refused |= what in ("Unknown", "AdamW") and cut and world > 1
            assert bool(text) == refused, (what, where, text)
            assert not refused or what in text
            assert not refused or "instead" in text
        if world > 1:
            for what in ("Unknown", "AdamW"):
                assert "weight" in found[what, 3]
                assert "Layout(whole=[...]), Layout(align={...})" in found[what, 3]
            assert "elementwise = True" in found["Unknown", 3] and "whole = True" in found["Unknown", 3]
        assert "stage=0" in found["LBFGS", 1]
        assert "sparse=False" in found["SparseAdam", 0]
        assert "fused=False" in found["fused"]
        assert "str" in found["string"]
        assert "type" in found["class"]
        assert "NoneType" in found["in a list"]
        assert "optimizer 0, group 0, parameter 6" in found["foreign"]
        assert "optimizer 1, group 0, parameter 0, which is '0.weight'" in found["twice"]


class Rows(torch.optim.Optimizer):
    """Muon's kind: it needs matrices, and gives each parameter a gradient."""

    def __init__(self, params, lr=0.02):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
                norm = p.grad.reshape(len(p), -1).pow(2).sum(1).sqrt().clamp_min(1e-3)
                p.sub_(group["lr"] * p.grad / norm.view(-1, *[1] * (p.dim() - 1)))


class WholeRows(Rows):
    whole = True


def square(width):
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(3) for layer in (nn.Linear(width, width), nn.Tanh())])


def by_width(stage, layout):
    """Which widths of a model an optimizer that says nothing of itself is refused at, when it is given and later."""
    found = {}
    for width in (4, 8, 12, 16, 24, 32, 64):
        model = square(width)
        matrices = [p for p in model.parameters() if p.dim() == 2]
        try:
            zeroshard.shard(model, Rows(matrices), stage=stage, layout=layout)
            found[width] = ""
        except UserError as error:
            found[width] = f"{error}"
        later, first = square(width), nn.Linear(2, 2)
        model = nn.Sequential(first, later)
        optimizer = Rows(first.parameters()) if stage == 0 or found[width] == "" else None
        if optimizer is not None:
            zeroshard.shard(model, optimizer, stage=stage, layout=layout)
            optimizer.add_param_group({"params": [later[0].weight]})
    return found


@pytest.mark.parametrize(
    ("world", "stage", "layout", "starts"),
    [
        (2, 1, None, False),
        (2, 2, None, False),
        (3, 3, None, False),
        (2, 0, None, True),
        (1, 3, None, True),
        (2, 3, Layout(bounds="tensor"), True),
        (2, 3, Layout(whole=["*"]), True),
    ],
)
def test_whether_an_unknown_class_starts_does_not_depend_on_where_cuts_fall(world, stage, layout, starts):
    """At no width of the model, though at some nothing is cut; and the words name the class, a parameter and the line."""
    for found in ranks.run(world, by_width, stage, layout):
        assert {told == "" for told in found.values()} == {starts}
        for told in filter(None, found.values()):
            assert "Rows.elementwise = True" in told and "Rows.whole = True" in told and "'0.weight'" in told


def owns_nothing(stage, layout):
    """Train with matrices of which there are fewer than ranks, so that a rank has no part in their optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(4, 6, 3), nn.Flatten(), nn.Linear(12, 8))
    optimizer = [
        WholeRows([model[0].weight]),
        torch.optim.SGD([model[2].weight, model[2].bias], lr=0.1),
    ]
    zero = None if stage is None else zeroshard.shard(model, optimizer, stage=stage, layout=layout)
    for _ in range(2):
        model(torch.ones(2, 4, 4)).square().mean().backward()
        for each in optimizer:
            each.step()
            each.zero_grad()
    with contextlib.nullcontext() if zero is None else zero.gathered():
        return [p.detach().clone() for p in model.parameters() if p is not model[0].bias], [
            p.dim() for p in optimizer[0].param_groups[0]["params"]
        ]


@pytest.mark.parametrize("layout", [None, Layout(bounds="tensor")], ids=["", "tensor"])
def test_a_rank_that_owns_none_of_a_groups_tensors_runs_its_step(stage, layout):
    """On a tensor of as many dimensions, without elements: by a class that takes each for what it was given."""
    want, _ = owns_nothing(None, None)
    for found, dims in ranks.run(2, owns_nothing, stage, layout):
        assert dims == [3]
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, want, strict=True))


def around(engine, shares):
    """The Lookahead of many repositories, made as the refusal says."""

    class Lookahead(torch.optim.Optimizer):
        elementwise = True

        def __init__(self, inner, k=2, alpha=0.5):
            if shares is not None:
                super().__init__(inner.param_groups, inner.defaults)
            self.inner, self.k, self.alpha = inner, k, alpha
            self.param_groups = inner.param_groups
            self.param_groups[0]["count"] = 0  # an option of a group is saved
            self.defaults = inner.defaults
            self.state = inner.state if shares else collections.defaultdict(dict)

        def step(self, closure=None):
            self.inner.step()
            self.param_groups[0]["count"] += 1
            for p in (p for group in self.param_groups for p in group["params"]):
                slow = self.state[p].setdefault("slow", p.detach().clone())
                if self.param_groups[0]["count"] % self.k == 0:
                    with torch.no_grad():
                        slow.lerp_(p, self.alpha)
                        p.copy_(slow)

    model = models.build("mlp", sizes=SIZES)
    optimizer = Lookahead(torch.optim.AdamW(model.parameters(), lr=0.01))
    engine.shard(model, optimizer)
    engine.train(model, optimizer, range(4))
    return model


def test_an_optimizer_around_another_trains_and_is_saved_as_the_refusal_says(stage):
    check(around, True, stages=(stage,))


def refuses_around(shares):
    model = nn.Linear(3, 3)

    class Engine:
        def shard(self, model, optimizer):
            zeroshard.shard(model, optimizer, stage=3)

        def train(self, *_):
            raise AssertionError("accepted")

    with pytest.raises(UserError) as error:
        around(Engine(), shares)
    assert model is not None
    return f"{error.value}"


def test_an_optimizer_without_torchs_init_or_with_states_inside_is_refused_by_name():
    for shares, says in ((None, "super().__init__(inner.param_groups"), (False, "self.state = self.inner.state")):
        for told in ranks.run(2, refuses_around, shares):
            assert "Lookahead" in told and says in told


class Several(torch.optim.Optimizer):
    """Two optimizers in a list, with states of their own or, as the refusal says, all in one dict."""

    elementwise = True

    def __init__(self, params, shares):
        params = [*params]
        super().__init__(params, {})
        self.parts = [torch.optim.AdamW(params[:2], lr=0.1), torch.optim.SGD(params[2:], lr=0.1, momentum=0.9)]
        self.param_groups = [group for inner in self.parts for group in inner.param_groups]
        if shares:
            for inner in self.parts:
                inner.state = self.state

    def step(self, closure=None):
        for inner in self.parts:
            inner.step()


def in_a_list(engine, shares):
    model = models.build("mlp", sizes=SIZES)
    optimizer = Several(model.parameters(), shares)
    engine.shard(model, optimizer)
    engine.train(model, optimizer, range(3))
    return model


def test_optimizers_in_a_list_train_as_the_refusal_says(stage):
    check(in_a_list, True, stages=(stage,))
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    with pytest.raises(UserError, match=r"for inner in self\.parts: inner\.state = self\.state"):
        zeroshard.shard(model, Several(model.parameters(), False))


class Bare(torch.optim.Optimizer):
    """A step without `if p.grad is None: continue`, of plain SGD."""

    elementwise = True

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"])


def sharded_bare(stage):
    model = models.build("mlp", sizes=SIZES)
    try:
        zeroshard.shard(model, Bare(model.parameters()), stage=stage)
    except UserError as error:
        return f"{error}"
    return ""


def test_a_step_that_needs_every_gradient_is_refused_by_name():
    """Where ranks update parts: one that updates nothing of a parameter has no gradient of it. At stage 0 all have."""
    for stage in (1, 2, 3):
        for told in ranks.run(2, sharded_bare, stage):
            assert "Bare, optimizer 0" in told and "TypeError" in told and "if param.grad is None: continue" in told
    assert ranks.run(2, sharded_bare, 0) == ["", ""] and ranks.run(1, sharded_bare, 3) == [""]


def sparse():
    """A gradient that turns out to be sparse."""
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2))
    zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=2)
    with pytest.raises(StateError, match=r"(?s)sparse gradients.*'0\.weight'.*sparse=False"):
        model(torch.tensor([1, 2])).sum().backward()


@pytest.mark.row(20)
def test_sparse_gradients_are_refused_by_name():
    """An embedding with sparse=True names itself and the remedy in its first backward, on every rank."""
    ranks.run(2, sparse)


# ---------------------------------------------------------------------------------------------------------- param groups


def groups(engine, precision=None):
    model = models.build("mlp", sizes=SIZES)
    optimizer = torch.optim.AdamW(
        [
            {"params": [model[0].weight], "lr": 0.02, "betas": (0.8, 0.95)},
            {"params": [model[0].bias, model[2].bias, model[4].bias], "weight_decay": 0.0, "eps": 1e-6},
            {"params": [("last", model[4].weight), ("middle", model[2].weight)], "amsgrad": True},
        ][:2]
        + [{"params": [model[4].weight, model[2].weight], "amsgrad": True}],
        lr=0.005,
        weight_decay=0.1,
    )
    engine.shard(model, optimizer, precision=precision)
    for step in range(4):
        engine.backward(model, step)
        optimizer.param_groups[1]["lr"] *= 0.5  # options may be changed at any time
        optimizer.step()
        optimizer.zero_grad()
    engine.notes = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return model


@pytest.mark.parametrize("world", [1, 2, 3], ids=lambda world: f"ranks{world}")
def test_param_groups_keep_their_options(world, stage):
    """Groups with their own lr, betas, eps, weight decay and amsgrad, one of which has no element on some ranks."""
    check(groups, world=world, stages=(stage,))


def named(engine):
    model = models.build("mlp", sizes=SIZES)
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.05)
    engine.shard(model, optimizer)
    engine.train(model, optimizer, range(2))
    if engine.zero:
        group = optimizer.param_groups[0]
        assert len(group["param_names"]) == len(group["params"]) > 0
        assert set(group["param_names"]) <= {name for name, _ in model.named_parameters()}
    return model


def test_named_parameters_keep_their_names(stage):
    """An optimizer over `named_parameters()` goes on naming the parameters that it holds a part of."""
    check(named, stages=(stage,))


def unfreezing(engine, how, precision=None):
    """Two steps with a frozen part, two with it trained, one with it frozen again."""
    model = models.build("mlp", sizes=SIZES)
    part = model[2]
    part.requires_grad_(False)
    outside = how != "held"
    trained = [p for p in model.parameters() if not (outside and any(p is q for q in part.parameters()))]
    optimizer = torch.optim.SGD(trained, lr=0.05, momentum=0.9, weight_decay=0.01)
    engine.shard(model, optimizer, precision=precision)
    engine.train(model, optimizer, range(2))
    part.requires_grad_(True)
    if outside:
        optimizer.add_param_group({"params": list(part.parameters()), "lr": 0.01, "nesterov": True})
    engine.notes.append([len(optimizer.param_groups), [group["lr"] for group in optimizer.param_groups]])
    if how == "zero_grad first":
        optimizer.zero_grad()
    engine.train(model, optimizer, range(2, 4))
    part.requires_grad_(False)
    engine.train(model, optimizer, range(4, 5))
    return model


@pytest.mark.row(26)
@pytest.mark.parametrize("how", ["held", "added", "zero_grad first"])
def test_frozen_parameters_are_unfrozen_and_added(how, stage):
    """A part frozen at construction, then unfrozen and given to `add_param_group` (or held all along), then frozen
    again: as in plain PyTorch."""
    check(unfreezing, how, stages=(stage,), state=False)


def first_unfrozen(engine, precision=None):
    """The first layer frozen and held: on some ranks its part stands in for the whole group."""
    model = models.build("mlp", sizes=SIZES)
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    engine.shard(model, optimizer, precision=precision)
    engine.train(model, optimizer, range(2))
    model[0].requires_grad_(True)
    engine.train(model, optimizer, range(2, 4))
    return model


def test_what_stands_in_for_a_group_may_be_unfrozen(stage):
    """It is shown gradients before and after (and in bf16 gets masters: test_precision runs the same)."""
    check(first_unfrozen, stages=(stage,), state=False)


def added_with_scheduler(engine):
    """A scheduler and a frozen group: the added group is scheduled from its own rate on."""
    model = models.build("mlp", sizes=SIZES)
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02)
    engine.shard(model, optimizer)
    engine.train(model, optimizer, range(2))
    model[0].requires_grad_(True)
    optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.01})
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for step in range(2, 5):
        engine.train(model, optimizer, [step])
        scheduler.step()
        engine.notes.append(scheduler.get_last_lr())
    return model


def test_a_scheduler_over_an_added_group(stage):
    """A scheduler made after `add_param_group`, before the next step, sees both groups."""
    check(added_with_scheduler, stages=(stage,), state=False)


def added_wrongly(stage):
    model = models.build("mlp", sizes=SIZES)
    optimizer, other = (torch.optim.SGD(model[at].parameters(), lr=0.1) for at in (0, 2))
    zeroshard.shard(model, [optimizer, other], stage=stage)
    model(models.batch("mlp", 0, 0)[0]).sum().backward()
    said = []
    foreign = nn.Sequential(nn.Linear(3, 3))
    zeroshard.shard(foreign, None, stage=0)
    for params in (model[0], model[2], nn.Linear(3, 3), foreign):
        optimizer.add_param_group({"params": list(params.parameters())})
        with pytest.raises(UserError) as raised:
            optimizer.step()
        said.append(str(raised.value))
        del optimizer.param_groups[1:]
    optimizer.step()
    return said


@pytest.mark.parametrize("world", [1, 2], ids=lambda world: f"ranks{world}")
def test_groups_that_are_added_later_are_checked_like_the_first(world, stage):
    """A parameter that this or another optimizer updates already, or that is not the model's, is refused by name."""
    for twice, others, plain, foreign in ranks.run(world, added_wrongly, stage):
        assert "two groups or optimizers hold the same parameter" in twice and "'0.weight'" in twice
        assert "two groups or optimizers hold the same parameter" in others and "'2.weight'" in others
        assert "not the model's" in plain and "not the model's" in foreign
        assert "or take it out of its group and states" in plain


def without_a_group(path):
    def built(which):
        model = models.build("mlp", sizes=SIZES)
        linear = [model[at] for at in (0, 2, 4)]
        groups = [{"params": linear[at].parameters(), "lr": 0.1 * (at + 1)} for at in which]
        optimizer = torch.optim.SGD(groups, momentum=0.9)
        return model, optimizer, zeroshard.shard(model, optimizer)

    def train(model, optimizer):
        model(models.batch("mlp", 0, 0)[0]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        model.zero_grad()

    model, optimizer, zero = built([0, 1, 2])
    train(model, optimizer)
    del optimizer.param_groups[0]
    train(model, optimizer)
    optimizer.param_groups = [dict(group) for group in optimizer.param_groups]  # as some wrappers do
    zero.save(path)
    model, optimizer, zero = built([1, 2])
    for group in optimizer.param_groups:
        group["lr"] = 5.0
    zero.load(path)
    return [group["lr"] for group in optimizer.param_groups]


def test_a_group_that_was_removed_is_forgotten(tmp_path):
    """Its parameters are updated no more, and a checkpoint gives the other groups their own options."""
    assert ranks.run(2, without_a_group, tmp_path / "ckpt") == [[0.1 * 2, 0.1 * 3]] * 2


def put_back(optimizer, model, step):
    if step == 1:
        optimizer.add_param_group({"params": optimizer.param_groups.pop(1)["params"], "lr": 0.01})


def put_back_by_the_models_own(optimizer, model, step):
    if step == 1:
        optimizer.param_groups.pop(1)
        optimizer.add_param_group({"params": [*model[2].parameters(), *model[4].parameters()], "lr": 0.01})


def divided_by_the_models_own(optimizer, model, step):
    if step == 1:
        optimizer.param_groups.pop(1)
        for part, rate in ((model[2], 0.01), (model[4], 0.03)):
            optimizer.add_param_group({"params": part.parameters(), "lr": rate})


def other_dict(optimizer, model, step):
    if step == 1:
        optimizer.param_groups.append(dict(optimizer.param_groups.pop(1), lr=0.01))


def set_to_the_models_own(optimizer, model, step):
    if step == 1:
        optimizer.param_groups[1]["params"] = [*model[2].parameters()]


def away_for_two_steps(optimizer, model, step):
    if step == 1:
        optimizer.param_groups.pop(1)
        for part in (model[2], model[4]):
            part.requires_grad_(False)
    if step == 3:
        for part in (model[2], model[4]):
            part.requires_grad_(True)
        optimizer.add_param_group({"params": [*model[2].parameters(), *model[4].parameters()]})


def frozen_ones_left_out(optimizer, model, step):
    if step == 1:
        model[4].requires_grad_(False)
        for group in optimizer.param_groups:
            group["params"] = [param for param in group["params"] if param.requires_grad]


def backwards(optimizer, model, step):
    if step == 1:
        optimizer.param_groups.reverse()


def unfrozen_into_other_groups(optimizer, model, step):
    """The first layer is frozen at first; then the groups are made anew."""
    if step == 0:
        model[0].requires_grad_(False)
    if step == 2:
        model[0].requires_grad_(True)
        optimizer.param_groups.clear()
        for params in ([*model[0].parameters(), *model[2].parameters()], model[4].parameters()):
            optimizer.add_param_group({"params": params, "lr": 0.01})


def left_out_and_back(optimizer, model, step):
    """The program's own frozen parameters leave their group, and come back once they are trained again."""
    if step == 1:
        model[4].requires_grad_(False)
        for group in optimizer.param_groups:
            group["params"] = [param for param in group["params"] if param.requires_grad]
    if step == 3:
        model[4].requires_grad_(True)
        optimizer.add_param_group({"params": model[4].parameters(), "lr": 0.01})


def filtered_by_what_is_trained(optimizer, model, step):
    if step == 0:
        model[2].requires_grad_(False)
    if step == 1:
        model[2].requires_grad_(True)
    if step == 3:
        for group in optimizer.param_groups:
            group["params"] = [param for param in group["params"] if param.requires_grad]


def put_back_as_it_was(optimizer, model, step):
    if step == 1:
        model[4].kept = optimizer.param_groups.pop(1)
    if step == 3:
        optimizer.param_groups.append(model[4].kept)


EDITED_GROUPS = [unfrozen_into_other_groups, left_out_and_back, filtered_by_what_is_trained, put_back_as_it_was, put_back, put_back_by_the_models_own, divided_by_the_models_own, other_dict, set_to_the_models_own,
                 away_for_two_steps, frozen_ones_left_out, backwards]  # fmt: skip


def with_edited_groups(engine, edit):
    model = models.build("mlp", sizes=SIZES)
    groups = [
        {"params": model[0].parameters()},
        {"params": [*model[2].parameters(), *model[4].parameters()], "lr": 0.02},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.005)
    engine.shard(model, optimizer)
    for step in range(5):
        engine.train(model, optimizer, [step])
        model.zero_grad()
        edit(optimizer, model, step)
    if engine.zero and edit is frozen_ones_left_out:
        assert not any(
            param is part
            for part in model[4].parameters()
            for group in optimizer.param_groups
            for param in group["params"]
        )
    return model


@pytest.mark.parametrize("edit", EDITED_GROUPS, ids=lambda edit: edit.__name__)
def test_groups_are_edited_in_mid_run_as_in_plain_pytorch(edit, stage):
    """Also the states of parameters that leave an optimizer and come back, which torch keeps."""
    check(with_edited_groups, edit, stages=(stage,), state=False)


def saved_after_edits(edit, stage, path):
    """The weights of a run whose groups are edited, and of one that is saved and loaded after the last edit."""
    found = []
    for at in ("straight", "saved"):
        model = models.build("mlp", sizes=SIZES)
        groups = [{"params": model[0].parameters()}, {"params": [*model[2].parameters(), *model[4].parameters()]}]
        optimizer = torch.optim.AdamW(groups, lr=0.02)
        zero = zeroshard.shard(model, optimizer, stage=stage)
        for step in range(6):
            models.loss("mlp", model, models.batch("mlp", step, ranks.rank())).backward()
            optimizer.step()
            model.zero_grad()
            optimizer.zero_grad()
            edit(optimizer, model, step)
            if step == 4 and at == "saved":
                zero.save(path)
                zero.load(path)
        with zero.gathered():
            found.append(reference.weights(model))
    return reference.first_difference(*found)


@pytest.mark.parametrize("edit", EDITED_GROUPS, ids=lambda edit: edit.__name__)
def test_a_save_after_groups_were_edited_loads(edit, stage, tmp_path):
    assert ranks.run(2, saved_after_edits, edit, stage, tmp_path / "saved") == ["", ""]


def copied_beside_an_ignored_one(stage):
    """A group that has an ignored parameter, and none of which this rank has a part, is copied."""
    model = models.build("mlp", sizes=SIZES)
    groups = [{"params": [model[0].weight, model[4].bias]}, {"params": [model[0].bias, *model[2].parameters()]}]
    optimizer = torch.optim.AdamW(groups, lr=0.02)
    zero = zeroshard.shard(model, optimizer, stage=stage, layout=Layout(ignore=["0.weight"]))
    for step in range(3):
        models.loss("mlp", model, models.batch("mlp", step, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step < 2:
            optimizer.param_groups[:] = [dict(group, lr=0.01) for group in optimizer.param_groups]
    return sorted(place[1].name for *_, places in zero._engine.optimizer_members() for place in places)


def test_a_group_with_an_ignored_parameter_is_followed(stage):
    names = ["0.bias", "2.bias", "2.weight", "4.bias"]
    assert ranks.run(3, copied_beside_an_ignored_one, stage) == [names] * 3


class Scaled(torch.optim.Optimizer):
    """SGD with a rate for each parameter, which is an attribute of it."""

    elementwise = True

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(param.grad, alpha=-group["lr"] * getattr(param, "lr_scale", 1.0))


def scaled(engine):
    model = models.build("mlp", sizes=SIZES)
    for number, param in enumerate(model.parameters()):
        if number % 2:
            param.lr_scale = 0.1 * number
    optimizer = Scaled(model.parameters(), 0.05)
    engine.shard(model, optimizer)
    engine.train(model, optimizer, range(3))
    return model


def test_an_optimizer_sees_attributes_of_parameters(stage):
    check(scaled, stages=(stage,), state=False)


class Attributed(torch.optim.SGD):
    """SGD that multiplies each parameter by its attribute `mask`, a tensor of its shape, and by `scale`, of one number."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.mul_(getattr(param, "mask", 1.0)).mul_(getattr(param, "scale", 1.0))


def attributed(engine, **says):
    """Attributes that are set, written to, replaced and deleted between steps."""
    torch.manual_seed(1)
    model = models.build("mlp", sizes=SIZES)
    for number, param in enumerate(model.parameters()):
        param.mask = torch.arange(param.numel()).view(param.shape) % (number + 2) > 0
        param.scale = torch.tensor(0.9 + 0.01 * number)
    optimizer = type("Attributed", (Attributed,), says)(model.parameters(), 0.05, momentum=0.9)
    engine.shard(model, optimizer)
    engine.train(model, optimizer, range(2))
    weight, bias = model[2].weight, model[2].bias
    weight.mask.logical_not_()
    bias.mask = torch.full(bias.shape, 0.5)
    engine.train(model, optimizer, range(2, 4))
    del weight.mask, bias.scale
    bias.mask.fill_(0.25)
    weight.scale = 0.75
    engine.train(model, optimizer, range(4, 6))
    return model


@pytest.mark.parametrize("says", [{"elementwise": True}, {"whole": True}], ids=["elementwise", "whole"])
def test_an_optimizer_sees_tensors_that_are_attributes_of_parameters(stage, says):
    """Those of the parameter's shape are cut with it, and all are followed from step to step."""
    check(functools.partial(attributed, **says), stages=(stage,), state=False)


def of_another_shape(stage, when, **says):
    model = models.build("mlp", sizes=SIZES)
    optimizer = type("Attributed", (Attributed,), says)(model.parameters(), 0.05)
    weight = model[2].weight
    if when == "before":
        weight.mask = torch.ones(len(weight), 1)
    zeroshard.shard(model, optimizer, stage=stage)
    weight.mask = torch.ones(len(weight), 1)
    models.loss("mlp", model, models.batch("mlp", 0, 0)).backward()
    optimizer.step()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_tensor_of_another_shape_at_a_parameter_that_is_cut_is_refused(when):
    said = r"attribute that cannot be cut(?s:.)*parameter '2.weight', attribute 'mask'(?s:.)*got: shape \(\d+, 1\)"
    with pytest.raises(RankFailure, match=said):
        ranks.run(2, of_another_shape, 3, when, elementwise=True)


@pytest.mark.parametrize("each", [0, 1, pytest.param(3, marks=pytest.mark.full)])
def test_a_tensor_of_another_shape_at_a_parameter_that_is_not_cut_works(each):
    ranks.run(2, of_another_shape, each, "before", whole=True)


def seen_in_a_step(stage):
    """How many parts of a parameter an optimizer of whole tensors sees with its attribute of another shape."""
    model = models.build("mlp", sizes=SIZES)
    optimizer = type("Attributed", (Attributed,), {"whole": True})(model.parameters(), 0.05)
    model[2].weight.mask = torch.ones(len(model[2].weight), 1)
    zeroshard.shard(model, optimizer, stage=stage, layout=zeroshard.Layout(align=1))
    return sum(hasattr(part, "mask") for part in optimizer.param_groups[0]["params"] if part.numel())


@pytest.mark.parametrize("each", [0, 1])
def test_whole_parts_have_such_a_tensor_wherever_bounds_lie(each):
    found = ranks.run(2, seen_in_a_step, each)
    assert sum(found) == (2 if each == 0 else 1)


def followed(stage, in_backward):
    torch.manual_seed(1)
    model = models.build("mlp", sizes=SIZES)
    optimizer = type("Attributed", (Attributed,), {"elementwise": True})(model.parameters(), 0.05)
    zero = zeroshard.shard(model, optimizer, stage=stage, optimizer_in_backward=in_backward)
    for step in range(3):
        model[2].weight.scale = 1.0 - 0.25 * step
        models.loss("mlp", model, models.batch("mlp", step, ranks.rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
    with zero.gathered():
        return {name: each.clone() for name, each in model.named_parameters()}


def test_attributes_are_followed_in_backward_too():
    for stepped, early in zip(ranks.run(2, followed, 1, False), ranks.run(2, followed, 1, True), strict=True):
        assert all(torch.equal(early[name], each) for name, each in stepped.items())


TABLES = {
    ".scales": lambda optimizer, param: setattr(optimizer, "scales", {param: 0.1}),
    ".by_id": lambda optimizer, param: setattr(optimizer, "by_id", {id(param): 0.1}),
    ".special": lambda optimizer, param: setattr(optimizer, "special", {param}),
    ".param_groups[0]['special']": lambda optimizer, param: optimizer.param_groups[0].update(special={param}),
}


@pytest.mark.parametrize("name", TABLES)
def test_an_optimizer_with_a_table_by_parameter_is_refused(name, stage):
    """No part of a parameter is in it: the step would go on without."""
    model = models.build("mlp", sizes=SIZES)
    optimizer = Scaled(model.parameters(), 0.05)
    TABLES[name](optimizer, model[2].weight)
    with pytest.raises(UserError, match=rf"(?s)by their identity.*Scaled{re.escape(name)}.*'2.weight'.*p.lr_scale"):
        zeroshard.shard(model, optimizer, stage=stage)


def in_inference_mode(engine, steps):
    model = models.build("mlp", sizes=SIZES)
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    with torch.inference_mode(not steps):
        engine.shard(model, optimizer)
    for step in range(3):
        engine.backward(model, step)
        with torch.inference_mode(steps):
            optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize("steps", [True, False], ids=["steps", "shard"])
def test_steps_and_shard_in_inference_mode(steps, stage):
    check(in_inference_mode, steps, stages=(stage,), state=False)


def divided(stage, how, path):
    """What a step says after a group was divided by the parts that it holds; and that it works once that is undone."""
    model = models.build("mlp", sizes=SIZES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero = zeroshard.shard(model, optimizer, stage=stage)
    held = optimizer.param_groups[0]["params"]
    whole = list(held)
    if how == "moved":
        optimizer.add_param_group({"params": [held.pop()], "lr": 0.5})
    else:
        held.pop()
    model(models.batch("mlp", 0, 0)[0]).sum().backward()
    with pytest.raises((StateError, PeerError)) as error:
        zero.save(path) if how == "saved" else optimizer.step()
    del optimizer.param_groups[1:]
    held[:] = whole
    optimizer.zero_grad()
    model(models.batch("mlp", 0, 0)[0]).sum().backward()
    optimizer.step()
    return str(error.value)


@pytest.mark.parametrize("how", ["moved", "left out", "saved"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_group_that_is_divided_by_its_parts_is_refused(how, stage, tmp_path):
    """Each rank has other parts, and would divide it elsewhere."""
    for said in ranks.run(2, divided, stage, how, tmp_path / "saved"):
        assert "an optimizer's group was divided by what it holds" in said
        assert "add_param_group(...) for the model's own parameters" in said


ASKED = {
    "set": lambda optimizer, param: optimizer.state.__setitem__(param, {}),
    "asked": lambda optimizer, param: optimizer.state[param]["exp_avg"].zero_(),  # as ReLoRA's reset does
    "in": lambda optimizer, param: param in optimizer.state,
    "get": lambda optimizer, param: optimizer.state.get(param, {}),
    "pop": lambda optimizer, param: optimizer.state.pop(param, None),
}


def asked_for_states(stage, how):
    model = models.build("mlp", sizes=SIZES)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    zeroshard.shard(model, optimizer, stage=stage)
    for step in range(3):
        model(models.batch("mlp", 0, 0)[0]).sum().backward()
        if step == 1:
            with pytest.raises((StateError, PeerError)) as error:
                ASKED[how](optimizer, model[2].weight)
                optimizer.step()
        optimizer.step()
        optimizer.zero_grad()
    return str(error.value), any(key is model[2].weight for key in optimizer.state)


@pytest.mark.parametrize("how", ASKED)
def test_states_of_the_models_own_parameters_are_refused(how, stage):
    """They are nobody's: what is reset there goes on as it was."""
    for said, kept in ranks.run(2, asked_for_states, stage, how):
        assert (
            re.search(r"optimizer\.state was (asked for|given) a parameter of the model", said) and "'2.weight'" in said
        )
        assert not kept


def around_states(stage):
    """An optimizer inside another asks for states of the parts that it updates, and a plain model again for its own."""
    model = models.build("mlp", sizes=SIZES)
    inner = torch.optim.AdamW(model.parameters(), lr=0.1)
    outer = Around(inner)
    zero = zeroshard.shard(model, outer, stage=stage)
    model(models.batch("mlp", 0, 0)[0]).sum().backward()
    outer.step()
    assert inner.state is outer.state
    assert all(len(inner.state[p]) == 3 for group in outer.param_groups for p in group["params"] if p.numel())
    with pytest.raises(StateError, match=r"asked for a parameter of the model(?s:.)*'2.weight'"):
        inner.state.get(model[2].weight)
    zero.unshard()
    assert inner.state is outer.state and type(inner.state) is collections.defaultdict
    assert len(inner.state[model[2].weight]) == 3 and not inner.state.get(None)


class Around(torch.optim.Optimizer):
    elementwise = True

    def __init__(self, inner):
        super().__init__(inner.param_groups, inner.defaults)
        self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state

    @torch.no_grad()
    def step(self, closure=None):
        return self.inner.step()


def test_states_are_guarded_in_an_optimizer_inside_another_too(stage):
    ranks.run(2, around_states, stage)


def decayed(engine):
    """Coupled weight decay, and a mask, by group: of the parameters that the optimizer holds."""
    model = models.build("mlp", sizes=SIZES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    engine.shard(model, optimizer)
    for step in range(3):
        engine.backward(model, step)
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad.add_(param.detach(), alpha=0.1)
                param.grad.mul_((param.detach() > 0).to(param.dtype))
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize("world", [1, 2, 3])
def test_gradients_of_an_optimizers_parts_are_edited_by_these(world):
    check(decayed, world=world)


def unlike(stage):
    """The options of rank 1 are others, as a scheduler makes them that is given each rank's own loss."""
    model = models.build("mlp", sizes=SIZES)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    zero = zeroshard.shard(model, optimizer, stage=stage)
    optimizer.param_groups[0]["lr"] = np.float32(0.5) if zero.rank else np.float32(0.25)
    model(models.batch("mlp", 0, 0)[0]).sum().backward()
    with pytest.raises(PeerError) as error:
        optimizer.step()
    return str(error.value)


def test_an_option_that_differs_is_named_alone(stage):
    """Also if it is a number of NumPy's; and what to write where a scheduler has made it."""
    for said in ranks.run(2, unlike, stage):
        got = "optimizer option 'lr' of group 0 is"
        assert f"rank 0: {got} 0.25; rank 1: {got} 0.5" in said and "weight_decay" not in said
        assert "give schedulers what all ranks agree on" in said and "all_reduce" in said


def numbers_kept(stage, path):
    """Options that are no plain finite numbers, saved and loaded where they are others."""

    def build(**options):
        model = models.build("mlp", sizes=SIZES)
        optimizer = torch.optim.AdamW([{"params": model.parameters(), **options}])
        zero = zeroshard.shard(model, optimizer, stage=stage)
        model(models.batch("mlp", 0, 0)[0]).sum().backward()
        optimizer.step()
        return zero, optimizer.param_groups[0]

    given = {
        "lr": np.float64(0.1), "weight_decay": np.float32(0.25), "betas": (np.float64(0.5), np.float32(0.75)),
        "cap": math.inf, "least": -math.inf, "unset": math.nan, "count": np.int64(3), "odd": {"high": [math.inf]},
    }  # fmt: skip
    build(**given)[0].save(path)
    others = given | {"lr": 0.5, "weight_decay": 0.5, "betas": (0.25, 0.25), "cap": 1.0, "unset": 2.0, "count": 5}
    zero, group = build(**others)
    assert zero.load(path).skipped == []
    assert [group[name] for name in ("lr", "weight_decay", "betas", "cap", "least", "count", "odd")] == [
        0.1, 0.25, (0.5, 0.75), math.inf, -math.inf, 3, {"high": [math.inf]},
    ]  # fmt: skip
    assert math.isnan(group["unset"])
    zero, group = build(**given)
    assert zero.load(path).skipped == []
    return [type(group[name]) for name in ("lr", "weight_decay", "count", "cap")]


def test_options_of_numpy_and_infinities_are_saved_and_loaded(stage, tmp_path):
    assert ranks.run(2, numbers_kept, stage, tmp_path / "saved") == [[float, float, int, float]] * 2


def inside_backward(stage):
    """torch's tutorial on a step in a hook of each parameter."""
    model = models.build("mlp", sizes=SIZES)
    optimizers = {param: torch.optim.SGD([param], lr=0.1) for param in model.parameters()}
    zeroshard.shard(model, list(optimizers.values()), stage=stage)
    for param, optimizer in optimizers.items():
        param.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
    with pytest.raises(StateError, match=r"step\(\) inside backward"):
        model(models.batch("mlp", 0, 0)[0]).sum().backward()


def test_a_step_inside_backward_is_refused(stage):
    """The gradients are not summed then; it had stepped with none, and nothing trained."""
    ranks.run(2, inside_backward, stage)


def made_too_late(stage):
    """An optimizer that shard() never saw."""
    model = models.build("mlp", sizes=SIZES)
    zeroshard.shard(model, None, stage=stage)
    optimizer = torch.optim.AdamW(model.parameters())
    model(models.batch("mlp", 0, 0)[0]).sum().backward()
    with pytest.raises(StateError, match=r"shard\(model, optimizer\)"):
        optimizer.step()


def test_an_optimizer_made_after_shard_is_told_where_it_belongs(stage):
    ranks.run(2, made_too_late, stage)


def refused_late():
    """Five numbers of a whole tensor, of which a rank would get a part."""
    model = models.build("mlp", sizes=SIZES)
    optimizer = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        optimizer.state[param] = {"five": torch.zeros(5)}
    kinds = [type(param) for param in model.parameters()]
    with pytest.raises(UserError, match="state that cannot be cut"):
        zeroshard.shard(model, optimizer)
    assert [type(param) for param in model.parameters()] == kinds
    zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_state_that_cannot_be_cut_is_refused_before_anything_changes():
    """After the refusal the model is plain and can be sharded with another optimizer."""
    ranks.run(2, refused_late)


ODD = {
    "a function": lambda: object(),
    "an array": np.zeros(3),
    "a set": {1, 2},
    "a dict with numbers as keys": {"scales": {1: 2.0}},
    "a list of tensors": [torch.ones(3)],
    "an object in a tuple": (1, (2, object())),
}


def with_an_odd_option(kind, stage):
    model = models.build("mlp", sizes=SIZES)
    optimizer = torch.optim.SGD([{"params": model.parameters(), "scale": ODD[kind]}], lr=0.1)
    with pytest.raises(UserError, match=r"(?s)could not be saved.*optimizer 0, group 0, option 'scale'"):
        zeroshard.shard(model, optimizer, stage=stage)
    del optimizer.param_groups[0]["scale"]
    zeroshard.shard(model, optimizer, stage=stage)


@pytest.mark.row(69)
@pytest.mark.parametrize("kind", ODD)
def test_options_that_no_checkpoint_could_hold_are_refused_at_once(kind, stage):
    """And not at the first save, hours later."""
    ranks.run(2, with_an_odd_option, kind, stage)


def nested():
    return {"pairs": ((1, 2.5), [3, (4, None)]), "named": {"beta": (0.5, "x"), "on": True}, "scale": torch.tensor(2.0)}


def kept_options(folder, changed):
    model = models.build("mlp", sizes=SIZES)
    optimizer = torch.optim.SGD([{"params": model.parameters(), **nested()}], lr=0.1)
    zero = zeroshard.shard(model, optimizer, stage=2)
    group = optimizer.param_groups[0]
    if not changed:
        group["pairs"], group["named"] = ((9, 9.5), [9, (9, None)]), {"beta": (0.25, "y"), "on": False}
        group["scale"].fill_(9.0)
        zero.load(folder)
    else:
        zero.save(folder)
    return {key: group[key] for key in nested()}


@pytest.mark.row(69)
def test_nested_tuples_lists_and_dicts_load_as_they_were_saved(tmp_path):
    for got in ranks.run(2, kept_options, tmp_path / "ckpt", True) + ranks.run(
        1, kept_options, tmp_path / "ckpt", False
    ):
        assert got == nested()


IN_PLACE = {
    "a list": lambda group: group["betas"].__setitem__(0, 0.5),
    "a dict": lambda group: group["named"].update(beta=3.0),
    "a list in a tuple": lambda group: group["pair"][1].append(2),
    "a tensor": lambda group: group["scale"].fill_(3.0),
    "a tensor in a list": lambda group: group["scales"][0].fill_(3.0),
}


def edited_in_place(kind, stage):
    model = models.build("mlp", sizes=SIZES)
    options = {"betas": [0.9, 0.99], "named": {"beta": 1.0}, "pair": (1, [1])}
    options |= {"scale": torch.tensor(1.0), "scales": [torch.tensor(1.0)]}
    optimizer = torch.optim.SGD([{"params": model.parameters(), **options}], lr=0.1)
    zero = zeroshard.shard(model, optimizer, stage=stage)
    for _ in range(2):  # alike on all ranks it is nothing
        IN_PLACE[kind](optimizer.param_groups[0])
        models.loss("mlp", model, models.batch("mlp", 0, 0)).backward()
        optimizer.step()
    if zero.rank == 1:
        optimizer.param_groups[0]["betas"][1] = 0.5
        options["named"]["beta"] = 7.0
        options["scales"][0].fill_(7.0)
    models.loss("mlp", model, models.batch("mlp", 0, 0)).backward()
    with zero.gathered():
        before = reference.weights(model)
    with pytest.raises(zeroshard.Error, match="not doing the same thing"):
        optimizer.step()
    with zero.gathered():
        reference.assert_same(reference.weights(model), before)


@pytest.mark.row(70)
@pytest.mark.parametrize("kind", IN_PLACE)
def test_options_edited_in_place_on_one_rank_are_named_before_anything_changes(kind, stage):
    """Compared by content at each step: lists, dicts and tensors as well."""
    ranks.run(2, edited_in_place, kind, stage)


# ------------------------------------------------------------------------------------------ an optimizer that had stepped


def other_state():
    """Rank 0's state counts: the ranks had stepped on different data. Returns [first difference per stage]."""
    found = []
    for stage in STAGES:
        results = []
        for seed in (ranks.rank(), 0):
            model = models.build("mlp", sizes=SIZES)
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            for step in range(2):
                models.loss("mlp", model, models.batch("mlp", step, seed)).backward()
                optimizer.step()
                optimizer.zero_grad()
            zero = zeroshard.shard(model, optimizer, stage=stage)
            for step in range(2, 4):
                models.loss("mlp", model, models.batch("mlp", step, ranks.rank())).backward()
                optimizer.step()
                optimizer.zero_grad()
            with zero.gathered():
                results.append(reference.weights(model))
        found.append(reference.first_difference(*results))
    return found


@pytest.mark.row(8)
def test_rank_0s_optimizer_state_counts():
    """Ranks that stepped apart before `shard` start from rank 0's weights and rank 0's state."""
    assert ranks.run(3, other_state) == [[""] * 4] * 3


def unequal_state(kind):
    """Rank 0's optimizer has stepped, the others' has not (or the other way round, or with other keys)."""
    model = models.build("mlp", sizes=SIZES)
    amsgrad = kind == "other keys" and ranks.rank() == 1
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, amsgrad=amsgrad)
    if kind == "other keys" or (ranks.rank() == 0) == (kind == "only rank 0"):
        models.loss("mlp", model, models.batch("mlp", 0, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for group in optimizer.param_groups:
        group["amsgrad"] = False
    with pytest.raises(PeerError, match=r"(?s)state of '0\.weight'.*rank 0.*rank [12]"):
        zeroshard.shard(model, optimizer, stage=2)


@pytest.mark.row(9)
@pytest.mark.parametrize("kind", ["only rank 0", "all but rank 0", "other keys"])
def test_ranks_with_different_kinds_of_state_are_refused(kind):
    """An optimizer that has stepped on some ranks only, or has other state there, is refused by name on every rank."""
    ranks.run(3, unequal_state, kind)


# ------------------------------------------------------------------------------------------------------------ schedulers

SCHEDULERS = {
    "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, [lambda step: 0.9**step, lambda step: 1.0 / (1 + step)]),
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=[0.05, 0.02], total_steps=12),
    "ReduceLROnPlateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=1),
    "CosineAnnealingLR": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=4, eta_min=1e-4),
}


def scheduled(engine, name, when, kind):
    model = models.build("mlp", sizes=SIZES)
    classes = {
        "AdamW": partial(torch.optim.AdamW, lr=0.01),
        "SGD": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    }
    optimizer = classes[kind]([{"params": model[0].parameters()}, {"params": model[2:].parameters()}])
    if when == "before":
        scheduler = SCHEDULERS[name](optimizer)
    engine.shard(model, optimizer)
    if when == "after":
        scheduler = SCHEDULERS[name](optimizer)
    metrics = [1.0, 0.9, 0.9, 0.95, 0.99, 0.99]  # two plateaus
    for step in range(6):
        loss = engine.backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
        if name == "ReduceLROnPlateau":
            scheduler.step(loss.item() if kind == "SGD" else metrics[step])
        else:
            scheduler.step()
        engine.notes.append(
            [(group["lr"], group.get("betas"), group.get("momentum")) for group in optimizer.param_groups]
        )
    return model


@pytest.mark.row(15)
@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_schedulers_built_before_or_after(name, when, kind, stage):
    """Rates, cycled momenta and weights are plain PyTorch's, without a warning, wherever the scheduler was built."""
    check(scheduled, name, when, kind, world=2, stages=(stage,))


# ---------------------------------------------------------------------------------------------------- hooks and closures


def hooked(engine, precision=None):
    """Step hooks registered before and after shard, local and global: each notes who ran and the weights it saw."""
    model = models.build("mlp", sizes=SIZES)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def note(who, opt, args, kwargs):
        assert opt is optimizer
        assert args[0] is optimizer
        with engine.gathered():
            engine.notes.append((who, model[0].weight[0].tolist(), model[4].bias.tolist()))

    handles = [
        register_optimizer_step_pre_hook(partial(note, "global pre")),
        register_optimizer_step_post_hook(partial(note, "global post")),
    ]
    optimizer.register_step_pre_hook(partial(note, "pre before"))
    optimizer.register_step_post_hook(partial(note, "post before"))
    removed = optimizer.register_step_post_hook(partial(note, "removed"))
    engine.shard(model, optimizer, precision=precision)
    optimizer.register_step_pre_hook(partial(note, "pre after"))
    optimizer.register_step_post_hook(partial(note, "post after"))
    removed.remove()
    try:
        engine.train(model, optimizer, range(3))
    finally:
        for handle in handles:
            handle.remove()
    assert len(engine.notes) == 3 * 6
    return model


@pytest.mark.processes
def test_step_hooks_run_once_and_see_the_right_weights(stage):
    """Pre hooks see the old weights and post hooks the new ones, once per step and in plain PyTorch's order."""
    check(hooked, stages=(stage,))


def editing(engine, when, what, precision=None):
    """A pre hook that changes every gradient, or every weight, right before the step."""
    model = models.build("mlp", sizes=SIZES)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    @torch.no_grad()
    def edit(opt, args, kwargs):
        if what == "gradients":
            for parameter in model.parameters():
                parameter.grad.mul_(0.25)
                parameter.grad.clamp_(-0.01, 0.01)
        elif what == "clip":
            nn.utils.clip_grad_value_(model.parameters(), 0.02)
        else:
            with engine.gathered():
                for parameter in model.parameters():
                    parameter.mul_(0.5)

    if when == "before":
        optimizer.register_step_pre_hook(edit)
    engine.shard(model, optimizer, precision=precision)
    if when == "after":
        optimizer.register_step_pre_hook(edit)
    engine.train(model, optimizer, range(3))
    return model


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("what", ["gradients", "clip", "weights"])
def test_edits_in_a_pre_hook_count(when, what, stage):
    """What a step pre hook does to gradients or weights counts in that very step, wherever it was registered."""
    check(editing, when, what, stages=(stage,))


def closures(engine, kind, keyword):
    """`step(closure)`: evaluated once per step, with clipping inside; its loss is returned."""
    model = models.build("mlp", sizes=SIZES)
    optimizer = KINDS[kind](model.parameters())
    engine.shard(model, optimizer)
    calls = []
    for step in range(3):

        def closure(step=step):
            calls.append(step)
            optimizer.zero_grad()
            loss = engine.backward(model, step)
            nn.utils.clip_grad_value_(model.parameters(), 0.01)
            return loss

        loss = optimizer.step(closure=closure) if keyword else optimizer.step(closure)
        engine.notes.append(loss.item())
    assert calls == [0, 1, 2]
    return model


@pytest.mark.parametrize("kind", ["SGD momentum", "AdamW fused", "Rprop foreach"])
@pytest.mark.parametrize("keyword", [False, True], ids=["", "keyword"])
def test_closures(kind, keyword, stage):
    """A closure runs once per step, its clipped gradients are the ones used, and its loss comes back."""
    check(closures, kind, keyword, world=2 if keyword else 3, stages=(stage,))


# -------------------------------------------------------------------------------------------------------------- zero_grad


def zeroing(engine, side, to_none):
    """Steps with, without and after clearing gradients; one step that nothing went backward before."""
    model = models.build("unused")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)
    engine.shard(model, optimizer)

    def clear():
        {"model": model, "optimizer": optimizer}[side].zero_grad(set_to_none=to_none)
        engine.notes.append([parameter.grad is None for parameter in model.parameters()])

    engine.backward(model, 0, "unused")
    optimizer.step()
    optimizer.step()  # the same gradients again
    clear()
    optimizer.step()  # zeros still decay and move by momentum; None leaves alone
    engine.backward(model, 1, "unused")
    clear()
    engine.backward(model, 2, "unused")  # the gradients of step 1 are gone
    model.blocks[0].weight.grad = None  # one alone
    optimizer.step()
    clear()
    clear()
    engine.backward(model, 3, "unused")
    model.blocks[2].zero_grad(set_to_none=to_none)  # a part
    engine.notes.append([parameter.grad is None for parameter in model.parameters()])
    optimizer.step()
    return model


@pytest.mark.row(30)
@pytest.mark.parametrize("to_none", [True, False], ids=["none", "zeros"])
@pytest.mark.parametrize("side", ["model", "optimizer"])
@pytest.mark.parametrize("world", [1, 3])
def test_zero_grad_from_either_side(world, side, to_none, stage):
    """Cleared to None or to zeros, all or some: what the next steps do is what plain PyTorch does."""
    check(zeroing, side, to_none, world=world, stages=(stage,))


def forgotten(engine):
    """Gradients that were stepped with and not cleared go on adding up."""
    model = models.build("mlp", sizes=SIZES)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine.shard(model, optimizer)
    for step in range(4):
        engine.backward(model, step)
        optimizer.step()
        if step == 2:
            optimizer.zero_grad()
    return model


def test_gradients_add_up_when_they_are_not_cleared(stage):
    """Averaged gradients kept over a step, and more added: plain PyTorch's sum (2 ranks: exact)."""
    check(forgotten, world=2, stages=(stage,))


# ------------------------------------------------------------------------------------------------------------ state_dict


def state_dicts():
    messages = []
    for stage in STAGES:
        model = models.build("mlp", sizes=SIZES)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        before = optimizer.state_dict()
        zeroshard.shard(model, optimizer, stage=stage)
        engine = Engine(ranks.world(), stage)
        engine.zero = True
        for ask in (optimizer.state_dict, partial(optimizer.load_state_dict, before)):
            engine.train(model, optimizer, [0])
            with pytest.raises(StateError) as caught:
                ask()
            messages.append(str(caught.value))
        engine.train(model, optimizer, [1])  # nothing is broken by having asked
    return messages


def test_state_dict_is_refused_with_the_remedy():
    """`optimizer.state_dict()` and `load_state_dict()` hold only fragments: refused at every stage, before and after
    a step, and training goes on."""
    for messages in ranks.run(2, state_dicts):
        assert ["load_state_dict()" in text for text in messages] == [False, True] * 4
        assert all("state_dict()" in text and "instead" in text and "gathered()" in text for text in messages)


# ----------------------------------------------------------------------------------------------- several optimizers, none


def several(engine, kind):
    """Two optimizers; the second steps every second time only, on gradients that add up meanwhile."""
    model = models.build("mlp", sizes=SIZES)
    first = torch.optim.AdamW(model[:3].parameters(), lr=0.01)
    second = torch.optim.SGD(model[3:].parameters(), lr=0.05, momentum=0.9)
    engine.shard(model, kind([first, second]))
    for step in range(4):
        engine.backward(model, step)
        first.step()
        first.zero_grad()
        engine.notes.append([parameter.grad is None for parameter in model.parameters()])
        if step % 2:
            second.step()
            second.zero_grad()
    return model


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_sequence_of_optimizers(kind, stage):
    """Each optimizer steps and clears its own parameters, when it is asked to (2 ranks: sums of averages are exact)."""
    check(several, kind, world=2, stages=(stage,))


def alternating(engine):
    """Two optimizers in turn over one model, as in adversarial training."""
    model = models.build("gpt", hidden=12, layers=2)
    first = torch.optim.AdamW(model.blocks.parameters(), lr=0.01)
    second = torch.optim.Adam([p for n, p in model.named_parameters() if not n.startswith("blocks")], lr=0.01)
    engine.shard(model, [first, second])
    for step in range(4):
        engine.backward(model, step, "gpt")
        (second if step % 2 else first).step()
        model.zero_grad()
    return model


@pytest.mark.full
def test_optimizers_in_turn(stage):
    """A step of one optimizer leaves the other's weights alone, also within one bucket."""
    check(alternating, stages=(stage,))


def partly(engine):
    """Some trainable parameters belong to no optimizer: they have gradients, and keep their values."""
    model = models.build("mlp", sizes=SIZES)
    optimizer = torch.optim.AdamW([model[0].weight, model[4].bias], lr=0.01)
    engine.shard(model, optimizer)
    for step in range(3):
        engine.backward(model, step)
        optimizer.step()
        engine.notes.append([parameter.grad is None for parameter in model.parameters()])
        model.zero_grad()
    return model


def test_parameters_without_an_optimizer(stage):
    """Trainable parameters that no optimizer holds get gradients, and no update."""
    check(partly, stages=(stage,))


def without_optimizer(want):
    """[per stage: outputs equal plain PyTorch's?, gradients equal?, bytes of master and gradients of a frozen model]."""
    found = []
    for stage in STAGES:
        for empty in (None, [], ()):
            model = models.build("gpt", hidden=12, layers=2)
            zero = zeroshard.shard(model, empty, stage=stage)
            model.eval()
            with torch.no_grad():
                same = torch.equal(model(models.batch("gpt", 0, 0)[0]), want["output"])
            model.train()
            models.loss("gpt", model, models.batch("gpt", 0, ranks.rank())).backward()
            gradients = {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}
            found.append((same, reference.first_difference(gradients, want["gradients"])))
            del zero
        frozen = models.build("gpt", hidden=12, layers=2).requires_grad_(False)
        ledger = zeroshard.shard(frozen, None, stage=stage, precision=Precision(param_dtype=torch.bfloat16)).ledger()
        with torch.inference_mode():
            frozen(models.batch("gpt", 0, 0)[0])
        found.append((ledger.held.get("master", 0), ledger.held.get("gradients", 0)))
    return found


@pytest.mark.row(19)
@pytest.mark.parametrize("world", [1, 3], ids=lambda world: f"ranks{world}")
def test_without_an_optimizer(world):
    """`shard(model, None)`: outputs and averaged gradients are plain PyTorch's; a frozen model holds nothing more than
    its parameters."""
    model = models.build("gpt", hidden=12, layers=2)
    want = {"output": model(models.batch("gpt", 0, 0)[0]).detach()}
    Engine(world).backward(model, 0, "gpt")
    want["gradients"] = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert ranks.run(world, without_optimizer, want) == [([(True, "")] * 3 + [(0, 0)]) * 4] * world


# --- what else a step may take -----------------------------------------------------------------------------------------


class TakesMore(torch.optim.SGD):
    """Has something else in the closure's place, and passes nothing on."""

    elementwise = True

    def step(self, closure=None, kept=None):
        super().step()
        kept.append(closure)


class TakesFirst(torch.optim.SGD):
    """Takes its closure in another place."""

    elementwise = True

    def step(self, scale, closure=None, *, kept=None):
        kept.append(scale)
        return super().step(closure)


class TakesLoss(torch.optim.SGD):
    """Calls its closure something else."""

    elementwise = True

    def step(self, compute, kept=None):
        return super().step(compute)


class Ignores(torch.optim.SGD):
    """Takes a closure and never calls it."""

    elementwise = True

    def step(self, closure=None, kept=None):
        return super().step()


class Reads(torch.optim.Optimizer):
    """Reads gradients itself, before it calls its closure."""

    elementwise = True

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(param.grad, alpha=-group["lr"])
        return closure and closure()


STEPS = {
    "a number in its place": (TakesMore, lambda optimizer, closure, kept: optimizer.step(0, kept=kept)),
    "no closure": (TakesFirst, lambda optimizer, closure, kept: optimizer.step(2.0, kept=kept)),
    "second": (TakesFirst, lambda optimizer, closure, kept: optimizer.step(2.0, closure, kept=kept)),
    "by name": (TakesFirst, lambda optimizer, closure, kept: optimizer.step(2.0, closure=closure, kept=kept)),
    "one that it ignores": (Ignores, lambda optimizer, closure, kept: optimizer.step(closure)),
    "another name": (TakesLoss, lambda optimizer, closure, kept: optimizer.step(closure)),
    "by another name": (TakesLoss, lambda optimizer, closure, kept: optimizer.step(compute=closure)),
}


def stepped_with(which, stage):
    kind, step = STEPS[which]

    def train(model, indices, zero=None):
        optimizer = kind(model.parameters(), lr=0.1)
        if zero is not None:
            zero = zeroshard.shard(model, optimizer, stage=stage)
        kept = []

        def closure():
            optimizer.zero_grad()
            for index in indices:
                models.loss("mlp", model, models.batch("mlp", 0, index)).backward()
            if zero is None:
                for param in model.parameters():
                    param.grad.div_(len(indices))

        for _ in range(2):
            closure()
            step(optimizer, closure, kept)
        if zero is None:
            return reference.weights(model), kept
        with zero.gathered():
            return reference.weights(model), kept

    want, told = train(models.build("mlp"), range(2))
    got, kept = train(models.build("mlp"), [torch.distributed.get_rank()], zero=True)
    assert kept == told
    return reference.first_difference(got, want)


@pytest.mark.row(84)
@pytest.mark.parametrize("which", STEPS)
def test_a_step_may_take_other_things_than_a_closure(ranks, which, stage):
    """The closure is what the optimizer's own step calls so, or what can be called; anything else is handed on."""
    assert ranks.run(2, stepped_with, which, stage) == ["", ""]


def read_too_early(stage):
    model = models.build("mlp")
    optimizer = Reads(model.parameters(), lr=0.1)
    zeroshard.shard(model, optimizer, stage=stage)
    models.loss("mlp", model, models.batch("mlp", 0, 0)).backward()
    with pytest.raises(zeroshard.Error) as raised:
        optimizer.step(lambda: None)
    optimizer.step()  # the remedy
    return str(raised.value)


@pytest.mark.row(84)
def test_an_optimizer_that_reads_gradients_before_its_closure_is_named(ranks, stage):
    """What it reads are gradients that nothing was done to; the error says what to call instead."""
    for said in ranks.run(2, read_too_early, stage):
        assert "closure" in said and "then optimizer.step()" in said and "gradient of '0." in said, said


def option_that_comes_later(world: int):
    """What each rank hears at the step after the last rank alone got an option that no checkpoint could hold."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero = zeroshard.shard(model, optimizer, stage=2)
    if zero.rank == world - 1:
        optimizer.param_groups[0]["note"] = object()
    model(torch.ones(1, 4)).sum().backward()
    with pytest.raises(zeroshard.Error) as caught:
        optimizer.step()
    return str(caught.value)


@pytest.mark.row(69)
@pytest.mark.parametrize("world", [1, 2])
def test_options_that_come_later_are_refused_at_the_step_on_every_rank(world):
    for told in ranks.run(world, option_that_comes_later, world):
        assert "an optimizer's option could not be saved" in told
        assert "optimizer 0, group 0, option 'note'" in told


# --- what a checkpoint would not have ---------------------------------------------------------------------------------------


class Keeping(torch.optim.Optimizer):
    """Elementwise, and keeps more than states of parameters and options of groups."""

    elementwise = True

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "steps": 0})
        self.table, self.steps, self.total = [], 0, torch.zeros(())

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=group["lr"])
                    self.keep(group, param)

    def keep(self, group, param):
        """Keep nothing more."""


def keeping(what):
    def keep(self, group, param):
        if what == "an option of a group":
            group["steps"] += param is group["params"][0]
        elif what == "a state of each element":
            self.state[param]["twice"] = param.detach() * 2
        elif what == "a count":
            self.steps += 1
        elif what == "a tensor":
            self.total += param.sum()
        elif what == "a list":
            self.table.append(len(self.table))
        elif what == "a state of no parameter":
            self.state["k"] = torch.ones(1)
        elif what == "a state that is no element's":
            self.state[param]["two"] = torch.zeros(2, *param.shape)
        elif what == "every third step":
            self._seen = getattr(self, "_seen", 0) + 1
            if self._seen % 3 == 0:
                self.steps += 1

    return type("Keeping", (Keeping,), {"keep": keep})


def kept_by(what, stage, **said):
    model = models.build("mlp", sizes=SIZES)
    optimizer = type("Keeping", (keeping(what),), said)(model.parameters())
    before = {key: repr(value) for key, value in vars(optimizer).items()}
    zero = zeroshard.shard(model, optimizer, stage=stage)
    assert {key: repr(vars(optimizer)[key]) for key in ("table", "steps", "total")} == {
        key: before[key] for key in ("table", "steps", "total")
    }
    models.loss("mlp", model, models.batch("mlp", 0, zero.rank)).backward()
    optimizer.step()


REFUSED = {
    "a count": "attribute 'steps'",
    "a tensor": "attribute 'total'",
    "a list": "attribute 'table'",
    "every third step": "attribute '_seen'",
    "a state of no parameter": r"optimizer.state\['k'\]",
}


@pytest.mark.row(66)
@pytest.mark.parametrize("what", REFUSED)
def test_what_no_checkpoint_would_have_is_refused_before_anything_is_sharded(stage, what):
    """And the optimizer itself was not stepped. On the class a program may say what a resumed run does not need."""
    with pytest.raises(RankFailure, match=f"a checkpoint would not have it(?s:.)*{REFUSED[what]}"):
        ranks.run(2, kept_by, what, stage)
    if what not in ("a state of no parameter", "every third step"):
        ranks.run(2, partial(kept_by, unsaved=("steps", "table", "total")), what, stage)


@pytest.mark.row(66)
def test_a_state_that_cannot_be_cut_is_refused_of_an_elementwise_optimizer(stage):
    what = "a state that is no element's"
    if stage == 0:
        ranks.run(2, kept_by, what, stage)
        return
    with pytest.raises(RankFailure, match=r"cannot be cut with its parameter(?s:.)*\['two'\](?s:.)*whole = True"):
        ranks.run(2, kept_by, what, stage)


NOT_BY_ELEMENT = {
    "a norm": lambda param: param.grad / (param.grad.norm() + 1),
    "a mean": lambda param: param.grad - param.grad.mean(),
    "rows": lambda param: param.grad / (1 + param.grad.abs().amax(-1, keepdim=True)),
    "dimensions": lambda param: param.grad * param.dim(),
    "a product": lambda param: param.grad @ param.grad.T @ param.grad if param.dim() == 2 else param.grad,
}


def updated_by(what, stage, says):
    def keep(self, group, param):
        param.sub_(NOT_BY_ELEMENT[what](param))

    model = models.build("mlp", sizes=SIZES)
    optimizer = type("Keeping", (Keeping,), {"keep": keep, "elementwise": False, says: True})(model.parameters())
    zero = zeroshard.shard(model, optimizer, stage=stage)
    models.loss("mlp", model, models.batch("mlp", 0, zero.rank)).backward()
    optimizer.step()


@pytest.mark.row(66)
@pytest.mark.parametrize("what", NOT_BY_ELEMENT)
def test_a_class_that_is_not_elementwise_as_it_says_is_refused(stage, what):
    """By trying it on a tensor and on half of it. Where nothing is cut, and as an optimizer of whole tensors, it runs."""
    ranks.run(2, updated_by, what, stage, "whole")
    if stage == 0:
        ranks.run(2, updated_by, what, stage, "elementwise")
        return
    with pytest.raises(RankFailure, match=r"says that it is elementwise, and (updates|its step)(?s:.)*whole = True"):
        ranks.run(2, updated_by, what, stage, "elementwise")


def norm_of_all(optimizer, param):
    grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    return param.grad / (1 + torch.stack([grad.norm() for grad in grads]).norm())


def norm_above(least):
    """Clips by the norm of all gradients where that is more, as LAMB and Adan do."""

    def clipped(optimizer, param):
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        return param.grad / (torch.stack([grad.norm() for grad in grads]).norm() / least).clamp(min=1.0)

    return clipped


def norm_below(most):
    """Has a floor under the norm of all gradients."""

    def raised(optimizer, param):
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        return param.grad * (most / torch.stack([grad.norm() for grad in grads]).norm()).clamp(min=1.0)

    return raised


def estimated(optimizer, param):
    """Keeps what it estimates over all tensors as an option of their group, as Prodigy does."""
    group = optimizer.param_groups[-1]
    group["estimate"] = group.get("estimate", 0.0) + param.grad.abs().sum().item()
    return param.grad


TOGETHER = {
    "a norm of all": norm_of_all,
    "a norm of all above 10": norm_above(10.0),
    "a norm of all above 10,000": norm_above(10_000.0),
    "a norm of all below a thousandth": norm_below(1e-3),
    "an option of a group": estimated,
    "its place": lambda optimizer, param: (
        param.grad / (1 + next(at for at, p in enumerate(optimizer.param_groups[0]["params"]) if p is param))
    ),
}


def updated_together(what, stage, says):
    def keep(self, group, param):
        param.sub_(TOGETHER[what](self, param))

    model = models.build("mlp", sizes=SIZES)
    own = {"keep": keep, "elementwise": False} | ({} if says == "nothing" else {says: True})
    optimizer = type("Keeping", (Keeping,), own)(model.parameters())
    layout = Layout(bounds="tensor") if says == "nothing" else None  # where a class needs to say nothing
    zero = zeroshard.shard(model, optimizer, stage=stage, layout=layout)
    models.loss("mlp", model, models.batch("mlp", 0, zero.rank)).backward()
    optimizer.step()


@pytest.mark.row(66)
@pytest.mark.parametrize("what", TOGETHER)
@pytest.mark.parametrize("says", ["elementwise", "whole", "nothing"])
def test_an_update_that_mixes_tensors_is_refused_where_ranks_hold_different_ones(stage, says, what):
    """As detectron2's AdamW, which clips inside its step: a rank's groups hold some of the tensors."""
    if stage == 0:
        ranks.run(2, updated_together, what, stage, says)
        return
    with pytest.raises(RankFailure, match="otherwise beside others than alone(?s:.)*stage=0"):
        ranks.run(2, updated_together, what, stage, says)


class Noisy(Keeping):
    """Langevin's: elementwise, and draws its own numbers."""

    def keep(self, group, param):
        param.add_(torch.randn_like(param), alpha=0.01)


class Holding(Keeping):
    """Reaches the run by an attribute: `held` is set by a test."""

    def keep(self, group, param):
        if callable(getattr(self, "held", None)):
            self.held()


def tried(how):
    torch.manual_seed(3)
    random.seed(3)
    model = models.build("mlp", sizes=SIZES)
    optimizer = (Noisy if how == "noise" else Holding)(model.parameters())
    if how == "a method":
        optimizer.held = optimizer.shrink = lambda: [p.mul_(0.5) for g in optimizer.param_groups for p in g["params"]]
    elif how == "a model":
        optimizer.held = model
    elif how == "a bound method":
        optimizer.held = functools.partial(optimizer.zero_grad)
    counted = []
    handle = register_optimizer_step_post_hook(lambda *_: counted.append(1))
    before, drawn = reference.weights(model), (torch.get_rng_state(), random.getstate())
    try:
        zero = zeroshard.shard(model, optimizer, stage=1)
    finally:
        handle.remove()
    assert counted == []
    assert torch.equal(torch.get_rng_state(), drawn[0])
    assert random.getstate() == drawn[1]
    with zero.gathered():
        reference.assert_same(reference.weights(model), before)


@pytest.mark.row(66)
@pytest.mark.parametrize("how", ["noise", "a method", "a model", "a bound method"])
def test_the_trial_of_an_optimizer_leaves_the_run_as_it_is(how):
    """Weights, random numbers and hooks of all optimizers; an update that draws numbers is not refused for them."""
    ranks.run(1, tried, how)
    if how == "noise":
        ranks.run(2, tried, how)


@pytest.mark.row(66)
@pytest.mark.parametrize("what", ["nothing", "an option of a group", "a state of each element"])
def test_what_a_checkpoint_has_is_not_refused(stage, what):
    ranks.run(2, kept_by, what, stage)
