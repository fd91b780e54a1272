"""Precision is said, not guessed: which dtype each state has, what is cast where, and GradScaler without a word changed.

`plain` is the definition in plain PyTorch, one process for all ranks: per backward each rank's gradient is cast to the
dtype it travels in, added in rank order in fp32 (or wider), kept in the accumulator's dtype, divided once; masters step,
parameters are their cast.
"""

from __future__ import annotations

import contextlib
import fnmatch
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import models
import norms
import ranks
import reference
import test_optimizer
import zeroshard
from zeroshard import Layout, Precision
from zeroshard.errors import UserError

STAGES = (0, 1, 2, 3)
SIZES = (7, 29, 11, 5)
LOW = (torch.bfloat16, torch.float16)
HALF = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}

OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
}


def squares(model, batch):
    """The loss in fp32, the input in the dtype of the model's first floating parameter."""
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    return F.mse_loss(model(batch[0].to(dtype)).float(), batch[1])


class Plain:
    """Parameters, masters and accumulators as `precision` names them, in one process."""

    def __init__(self, model, make, world, precision=None, warm=0):
        precision = precision or Precision()
        self.model, self.world = model, world
        self.named = dict(model.named_parameters())
        self.optimizer = make(model.parameters())
        for step in range(warm):
            self.backward(step)
            for parameter in self.named.values():
                parameter.grad = self.average(parameter)
            self.optimizer.step()
            self.optimizer.zero_grad()
        state, self.optimizer.state = self.optimizer.state, type(self.optimizer.state)(dict)
        self.masters, self.grad_dtype, self.reduce_dtype = {}, {}, {}
        for name, p in self.named.items():
            asked = Precision() if any(fnmatch.fnmatchcase(name, each) for each in precision.keep) else precision
            dtype = asked.param_dtype or p.dtype if p.is_floating_point() else p.dtype
            self.grad_dtype[name] = asked.grad_dtype or (torch.float32 if dtype in LOW else dtype)
            self.reduce_dtype[name] = asked.reduce_dtype or dtype
            master = asked.master_dtype or (torch.float32 if dtype in LOW else dtype)
            self.masters[name] = nn.Parameter(p.detach().to(master).clone(), requires_grad=p.requires_grad)
            if p in state:
                self.optimizer.state[self.masters[name]] = {
                    key: value.to(master) if value.dim() else value for key, value in state[p].items()
                }
            p.data = p.data.to(dtype)
        self.optimizer.param_groups[0]["params"][:] = list(self.masters.values())

    def backward(self, step, scaler=None, change=None, before=None):
        """All ranks' micro-batches; leaves each rank's gradients apart."""
        self.pieces = []
        for rank in range(self.world):
            if before:
                before(step, rank)
            loss = squares(self.model, models.batch("mlp", step, rank))
            loss = change(self.model, loss, step, rank, self.world) if change else loss
            (scaler.scale(loss) if scaler else loss).backward()
            self.pieces.append({name: p.grad for name, p in self.named.items()})
            self.model.zero_grad()

    def average(self, parameter=None):
        """The averaged gradients, bound to the masters; with a parameter, that parameter's in its own dtype."""
        for name, p in self.named.items():
            pieces = [piece[name] for piece in self.pieces if piece[name] is not None]
            if parameter is p:
                return sum(piece.float() for piece in pieces).to(p.dtype).div_(self.world)
            if parameter is None:
                self.masters[name].grad = None
            if parameter is None and pieces:
                wide = torch.float32 if self.grad_dtype[name] in LOW else self.grad_dtype[name]
                running = pieces[0].to(self.reduce_dtype[name]).to(wide)
                for piece in pieces[1:]:
                    running = running + piece.to(self.reduce_dtype[name]).to(wide)
                total = running.to(self.grad_dtype[name]).div_(self.world)
                self.masters[name].grad = total.to(self.masters[name].dtype)
        return None

    @torch.no_grad()
    def write_back(self):
        for name, p in self.named.items():
            p.copy_(self.masters[name])

    def found(self):
        return {
            "weights": reference.weights(self.model),
            "masters": {n: m.detach().clone() for n, m in self.masters.items()},
        }


def difference(zero, model, optimizer, want):
    """Empty, or the first difference of the weights, or of this rank's part of the masters."""
    with zero.gathered():
        weights = reference.weights(model)
    if text := reference.first_difference(weights, want["weights"]):
        return text
    held = iter(optimizer.param_groups[0]["params"])
    for name in want["masters"]:
        bucket, slot = zero.partition.find(name)
        first, last = bucket.fragment(slot, zero.rank) if zero.stage else (0, slot.numel)
        if last > first:
            mine = {name: next(held).detach().reshape(-1)}
            if text := reference.first_difference(mine, {name: want["masters"][name].reshape(-1)[first:last]}):
                return f"master {text}"
    return ""


# ------------------------------------------------------------------------------------------------- which dtype each has


class Casting(models.Mixed):
    """Parameters of three dtypes; casts between its layers to whatever dtype these have."""

    def forward(self, x):
        x = torch.tanh(self.first(x.to(self.first.weight.dtype)))
        x = self.second(x.to(self.second.weight.dtype)) * self.gain
        return self.third(x.to(self.third.weight.dtype))


class Sensitive(nn.Module):
    """The gradient of the last bias alone grows with `self.factor`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = models.mlp(SIZES)
        self.factor = 0.0

    def forward(self, x):
        term = self.layers[4].bias * self.factor
        return self.layers(x) + (term - term.detach())  # nothing, but for its gradient


def seeded(make):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make()


BUILD = {
    "fp32": lambda: models.build("mlp", sizes=SIZES),
    "bf16": lambda: models.build("mlp", sizes=SIZES).bfloat16(),
    "fp16": lambda: models.build("mlp", sizes=SIZES).half(),
    "fp64": lambda: models.build("mlp", sizes=SIZES).double(),
    "mixed": lambda: seeded(Casting),
}
SETTINGS = {
    "own": Precision(),
    "param bf16": Precision(param_dtype=torch.bfloat16),
    "param fp16": Precision(param_dtype=torch.float16),
    "grad bf16": Precision(param_dtype=torch.bfloat16, grad_dtype=torch.bfloat16),
    "reduce fp32": Precision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "reduce bf16": Precision(reduce_dtype=torch.bfloat16),
    "master bf16": Precision(param_dtype=torch.bfloat16, master_dtype=torch.bfloat16),
    "master fp64": Precision(master_dtype=torch.float64),
    "kept": Precision(*[torch.bfloat16] * 4, keep=["second.w*", "third.*"]),
}
CASES = [
    *((build, "own") for build in BUILD),
    *(("fp32", setting) for setting in SETTINGS if setting not in ("own", "kept")),
    ("bf16", "grad bf16"),
    ("fp64", "param bf16"),
    ("mixed", "param bf16"),
    ("mixed", "master fp64"),
    ("mixed", "kept"),
]


def differences(build, setting, want, warm=0, steps=3, stages=STAGES):
    """{(stage, layout): difference}, of those that differ, after `steps` steps."""
    found = {}
    for stage in stages:
        for layout in (Layout(), Layout(bucket_mib=0.0005)):
            model = BUILD[build]()
            optimizer = OPTIMIZERS["adamw"](model.parameters())
            apart = Plain(model, OPTIMIZERS["adamw"], 1)
            for step in range(warm):
                models_gradients(model, apart, step)
                optimizer.step()
                optimizer.zero_grad()
            zero = zeroshard.shard(model, optimizer, stage=stage, layout=layout, precision=SETTINGS[setting])
            for step in range(steps):
                squares(model, models.batch("mlp", warm + step, ranks.rank())).backward()
                optimizer.step()
                optimizer.zero_grad()
            if text := difference(zero, model, optimizer, want):
                found[stage, layout.bucket_mib] = text
    return found


def models_gradients(model, apart, step):
    """What the warm steps of `Plain` see: every rank's batches, averaged."""
    apart.world, apart.named = ranks.world(), dict(model.named_parameters())
    apart.backward(step)
    for parameter in apart.named.values():
        parameter.grad = apart.average(parameter)


@pytest.mark.heavy
@pytest.mark.row(20)
@pytest.mark.parametrize(("build", "setting"), CASES, ids=lambda each: each)
def test_every_state_has_the_dtype_it_was_given(build, setting, stage):
    """Weights and masters after 3 steps on 3 ranks, at every stage and in one or many buckets, are those of the
    definition with the same parameter, reduction, gradient and master dtypes."""
    apart = Plain(BUILD[build](), OPTIMIZERS["adamw"], 3, SETTINGS[setting])
    for step in range(3):
        apart.backward(step)
        apart.average()
        apart.optimizer.step()
        apart.write_back()
    assert ranks.run(3, differences, build, setting, apart.found(), stages=(stage,)) == [{}] * 3


@pytest.mark.heavy
@pytest.mark.full
@pytest.mark.parametrize(("build", "setting"), [("fp32", "param bf16"), ("bf16", "own")], ids=lambda each: each)
def test_a_stepped_optimizer_keeps_its_state_in_another_precision(build, setting):
    """State of an optimizer that had stepped goes on in the masters' dtype, as `load_state_dict` would cast it."""
    apart = Plain(BUILD[build](), OPTIMIZERS["adamw"], 2, SETTINGS[setting], warm=2)
    for step in range(2, 5):
        apart.backward(step)
        apart.average()
        apart.optimizer.step()
        apart.write_back()
    assert ranks.run(2, differences, build, setting, apart.found(), 2) == [{}] * 2


EVERYWHERE = {setting: precision for setting, precision in SETTINGS.items() if not precision.keep}


def dtypes():
    found = []
    for stage in STAGES:
        for build, make in BUILD.items():
            for setting, precision in EVERYWHERE.items():
                model = make()
                model.register_buffer("table", torch.ones(3, dtype=torch.float64))
                own = {name: p.dtype for name, p in model.named_parameters()}
                optimizer = OPTIMIZERS["adamw"](model.parameters())
                zero = zeroshard.shard(model, optimizer, stage=stage, precision=precision)
                wanted = precision.param_dtype
                assert {n: p.dtype for n, p in model.named_parameters()} == {n: wanted or d for n, d in own.items()}
                with zero.gathered():
                    assert {n: p.dtype for n, p in model.named_parameters()} == {n: wanted or d for n, d in own.items()}
                assert model.table.dtype == torch.float64  # buffers are never converted
                for bucket in zero.partition.buckets:
                    param = wanted or own[bucket.slots[0].name]
                    got = zero._engine.formats(bucket)
                    assert got.computed == param, (build, setting)
                    assert got.gradients == precision.grad_dtype or (
                        got.gradients == (torch.float32 if param in LOW else param) and not precision.grad_dtype
                    )
                    assert got.master == precision.master_dtype or (
                        got.master == (torch.float32 if param in LOW else param) and not precision.master_dtype
                    )
                masters = {p.dtype for p in optimizer.param_groups[0]["params"]}
                assert masters == {
                    zero._engine.formats(bucket).master
                    for bucket in zero.partition.buckets
                    if bucket.shard_numel(zero.rank) or not stage
                }
                held = zero.ledger().held
                expected = sum(
                    (bucket.shard_numel(zero.rank) if stage else bucket.numel)
                    * zero._engine.formats(bucket).master.itemsize
                    for bucket in zero.partition.buckets
                    if zero._engine.formats(bucket).master != zero._engine.formats(bucket).computed
                )
                assert held.get("master", 0) == expected, (stage, build, setting)
                found.append((stage, build, setting))
    return len(found)


def kept():
    precision = Precision(param_dtype=torch.bfloat16, keep=["2.*"])
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    zero = zeroshard.shard(model, torch.optim.AdamW(model.parameters()), precision=precision, layout=Layout(units=()))
    with pytest.raises(UserError, match=r"(?s)Precision\.keep matches no parameter.*'router'"):
        zeroshard.shard(nn.Linear(4, 4), None, precision=Precision(param_dtype=torch.bfloat16, keep=["router"]))
    return [(bucket.dtype, [slot.name for slot in bucket.slots], bucket.size) for bucket in zero.partition.buckets]


def test_what_is_kept_has_buckets_of_its_own_over_all_ranks():
    others = [f"{layer}.{part}" for layer in (0, 1, 3) for part in ("weight", "bias")]
    buckets = [("torch.bfloat16", others, 2), ("torch.float32", ["2.weight", "2.bias"], 2)]
    assert ranks.run(2, kept) == [buckets] * 2


@pytest.mark.full
def test_parameters_keep_their_dtype_unless_asked():
    """Parameters have their own dtype or the one asked for, gradients and masters the documented one, buffers always
    their own; master bytes are held only where the master's dtype is not the parameter's."""
    assert ranks.run(2, dtypes) == [len(STAGES) * len(BUILD) * len(EVERYWHERE)] * 2


def seeds():
    for stage in STAGES:
        for asked in (True, False):
            model = models.build("mlp", sizes=SIZES)
            fp32 = reference.weights(model)
            if not asked:
                model.bfloat16()
            optimizer = OPTIMIZERS["sgd"](model.parameters())
            precision = Precision(param_dtype=torch.bfloat16) if asked else Precision()
            zero = zeroshard.shard(model, optimizer, stage=stage, precision=precision)
            want = {
                "weights": {name: weight.bfloat16() for name, weight in fp32.items()},
                "masters": {name: weight if asked else weight.bfloat16().float() for name, weight in fp32.items()},
            }
            assert difference(zero, model, optimizer, want) == ""


def test_masters_are_seeded_from_the_weights_that_came_in():
    """An fp32 model asked to compute in bf16 keeps its fp32 weights as masters, unrounded; a bf16 model has none."""
    ranks.run(3, seeds)


def one_copy():
    for stage in STAGES:
        model = models.build("mlp", sizes=SIZES)
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        zero = zeroshard.shard(model, optimizer, stage=stage)
        storages = {p.untyped_storage().data_ptr() for p in optimizer.param_groups[0]["params"]}
        if stage < 3:  # the optimizer updates the very memory that the model computes with
            assert storages <= {p.untyped_storage().data_ptr() for p in model.parameters()}
        squares(model, models.batch("mlp", 0, ranks.rank())).backward()
        optimizer.step()
        held = zero.ledger().held
        numel = sum(b.shard_numel(zero.rank) if stage == 3 else b.numel for b in zero.partition.buckets)
        assert "master" not in held
        assert held["parameters"] == 4 * numel
        assert {p.untyped_storage().data_ptr() for p in optimizer.param_groups[0]["params"]} == storages


def test_fp32_parameters_need_no_second_copy():
    """The fragments of fp32 parameters are views of the parameters at rest; nothing is held as master."""
    ranks.run(2, one_copy)


def stored(**precision):
    """Bytes of parameters at rest at stage 3: with one of two layers frozen, and with both trained."""
    layers = (nn.Linear(16, 16, bias=False) for _ in range(2))  # of two blocks each: no rank has padding
    model = nn.Sequential(*layers).to(precision.pop("own", torch.float32))
    model[0].requires_grad_(False)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    zero = zeroshard.shard(model, optimizer, stage=3, precision=Precision(**precision))
    frozen = zero.ledger().held.get("parameters", 0)
    model[0].requires_grad_(True)
    for _ in range(2):
        F.mse_loss(model(torch.ones(4, 16, dtype=model[0].weight.dtype)).float(), torch.ones(4, 16)).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert all(
            bucket.codec.of_masters != bool(zero.ledger().held.get("parameters")) for bucket in zero._engine.buckets
        )
    return frozen, zero.ledger().held.get("parameters", 0)


@pytest.mark.parametrize(
    ("precision", "nbytes"),
    [
        ({"param_dtype": torch.bfloat16}, (256, 0)),  # of 512 parameters 256 are frozen, and one rank has half of each
        ({"param_dtype": torch.bfloat16, "store_params": True}, (512, 512)),
        ({}, (1024, 1024)),  # there is no master
        ({"own": torch.float32, "master_dtype": torch.bfloat16}, (1024, 1024)),  # which is less exact
        ({"own": torch.float16, "master_dtype": torch.bfloat16}, (512, 512)),  # neither holds the other
        ({"own": torch.bfloat16}, (256, 0)),
    ],
    ids=["bf16", "store_params", "fp32", "fp32 master bf16", "fp16 master bf16", "built in bf16"],
)
def test_masters_stand_for_sharded_parameters(precision, nbytes):
    """At stage 3 parameters rest beside masters only where asked, or where the masters are less exact; frozen ones have
    no master, until they are trained."""
    assert ranks.run(2, partial(stored, **precision)) == [nbytes] * 2


class Writes(torch.autograd.Function):
    """Doubles its saved weight in backward; then reads the parameter, which opens it."""

    @staticmethod
    def forward(ctx, x, weight, module):
        ctx.save_for_backward(x, weight)
        ctx.module = module
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad_x = grad @ weight
        with torch.no_grad():
            weight.mul_(2)
            ctx.module.weight.sum()
        return grad_x, grad.t() @ x, None


class Written(nn.Linear):
    def forward(self, x):
        return Writes.apply(x, self.weight, self)


@pytest.mark.parametrize("stored", [False, True], ids=["cast", "stored"])
def test_a_write_into_a_saved_weight_that_is_read_afterwards_stays(stored):
    """In backward, at stage 3: whoever looks for edits must not take what the read finds for what was gathered."""
    torch.manual_seed(0)
    model = nn.Sequential(Written(4, 4, bias=False), Written(4, 4, bias=False))
    zero = zeroshard.shard(
        model, torch.optim.SGD(model.parameters(), lr=0.0), stage=3, layout=Layout(align=1),
        precision=Precision(param_dtype=torch.bfloat16, store_params=stored),
    )  # fmt: skip
    with zero.gathered():
        before = reference.weights(model)
    model(torch.ones(2, 4, dtype=torch.bfloat16)).float().sum().backward()
    with zero.gathered():
        after = reference.weights(model)
    assert all(torch.equal(after[name], 2 * before[name]) for name in before)


def test_a_frozen_parameter_of_8_bits_needs_no_master():
    """Whatever dtype masters are to have: torch promotes nothing to or from 8-bit floats."""
    model = nn.Linear(4, 4)
    model.scale = nn.Parameter(torch.zeros(4, dtype=torch.float8_e4m3fn), requires_grad=False)
    optimizer = torch.optim.SGD([model.weight, model.bias], lr=0.1)
    zero = zeroshard.shard(model, optimizer, stage=3, precision=Precision(master_dtype=torch.float64))
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert zero.ledger().held["parameters"] == 128  # the 8-bit ones, padded to a block
    assert zero.ledger().held["master"] == 8 * 2 * 128


def eighth(trained=True):
    """A layer whose weight has 8 bits."""
    model = seeded(lambda: nn.Linear(7, 5))
    weight = model.weight.detach().to(torch.float8_e4m3fn)
    model.weight = nn.Parameter(weight, requires_grad=trained)
    return model


def test_a_trained_parameter_of_8_bits_is_refused_or_converted():
    """torch sums, updates and clips none: it is named at once, also where it is unfrozen later. Converted as the error
    says, it trains as a model of the same values does."""
    says = r"(?s)fewer than 16 bits cannot be trained.*'weight'.*float8_e4m3fn.*param_dtype=torch.bfloat16"
    model = eighth()
    with pytest.raises(UserError, match=says):
        zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert model.weight.dtype == torch.float8_e4m3fn and model.weight.shape == (5, 7)
    model = eighth(trained=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zeroshard.shard(model, optimizer, stage=2)
    model.weight.requires_grad_()
    with pytest.raises(UserError, match=says):
        optimizer.step()
    found = []
    for make in (eighth, lambda: eighth().float()):
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        zero = zeroshard.shard(model, optimizer, precision=Precision(param_dtype=torch.bfloat16))
        for step in range(3):
            squares(model, models.batch("mlp", step, 0)).backward()
            optimizer.step()
            optimizer.zero_grad()
        with zero.gathered():
            found.append(reference.weights(model))
    reference.assert_same(*found)


# ------------------------------------------------------------------------------------------------------------- fp16

SCALES = {"init_scale": 2.0**8, "growth_interval": 2, "growth_factor": 2.0, "backoff_factor": 0.5}
STEPS = 8


def overflow(model, loss, step, rank, world):
    """Steps 1, 4 and 5 overflow: on the last rank, on the first, on both."""
    at = {1: {world - 1}, 4: {0}, 5: {0, world - 1}}
    return loss * 1e7 if rank in at.get(step, ()) else loss


def factor(step, rank, world):
    """What `Sensitive` overflows by, at steps 1 and 4."""
    return 1e4 if (step, rank) in {(1, world - 1), (4, 0)} else 0.0


def scaled_plain(world, kind, how):
    model = BUILD["fp16"]()
    apart = Plain(model, OPTIMIZERS[kind], world)
    scaler = torch.amp.GradScaler("cpu", **SCALES)
    scales, steps = [], []
    apart.optimizer.register_step_post_hook(lambda *_: steps.append(len(scales)))
    for step in range(STEPS):
        apart.backward(step, scaler, overflow)
        apart.average()
        if how != "step":
            scaler.unscale_(apart.optimizer)
        if how == "clip":
            reference.clip_([m.grad for m in apart.masters.values()], 0.3, norms.total)
        scaler.step(apart.optimizer)
        scaler.update()
        apart.write_back()
        scales.append(scaler.get_scale())
    return apart.found() | {"scales": scales, "steps": steps}


def scaled(kind, how, want, stages=STAGES):
    found = {}
    for stage in stages:
        model = BUILD["fp16"]()
        optimizer = OPTIMIZERS[kind](model.parameters())
        zero = zeroshard.shard(model, optimizer, stage=stage)
        scaler = torch.amp.GradScaler("cpu", **SCALES)
        scales, steps = [], []
        optimizer.register_step_post_hook(lambda *_, steps=steps, scales=scales: steps.append(len(scales)))
        for step in range(STEPS):
            loss = squares(model, models.batch("mlp", step, ranks.rank()))
            scaler.scale(overflow(model, loss, step, ranks.rank(), ranks.world())).backward()
            if how != "step":
                scaler.unscale_(optimizer)
            if how == "clip":
                nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
        text = difference(zero, model, optimizer, want)
        if text or (scales, steps) != (want["scales"], want["steps"]):
            found[stage] = text or (scales, steps)
    return found


@pytest.mark.row(14)
@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("adamw", "step"),
        ("adamw", "clip"),
        ("fused", "step"),
        ("fused", "clip"),
        ("sgd", "unscale"),
        ("fused", "unscale"),
    ],
    ids=lambda each: each,
)
@pytest.mark.parametrize("world", [1, 2, 3], ids=lambda world: f"ranks{world}")
def test_grad_scaler_unmodified(world, kind, how, stage):
    """torch.amp.GradScaler with and without `unscale_`, with clipping after it, and with the fused step that unscales
    itself: overflows on one rank skip the step on all; scales, steps taken, weights and masters are plain PyTorch's."""
    want = scaled_plain(world, kind, how)
    assert len(set(want["scales"])) > 2  # the script both grows and backs off
    if kind != "fused":
        assert want["steps"] == [0, 2, 3, 6, 7]
    assert ranks.run(world, scaled, kind, how, want, stages=(stage,)) == [{}] * world


def two_optimizers(model_or_masters):
    parameters = list(model_or_masters)
    return [torch.optim.AdamW(parameters[:4], lr=0.01), torch.optim.SGD(parameters[4:], lr=0.05)]


def one_of_two(want):
    found = {}
    for stage in STAGES:
        model = seeded(Sensitive).half()
        optimizers = two_optimizers(model.parameters())
        zero = zeroshard.shard(model, optimizers, stage=stage)
        scaler = torch.amp.GradScaler("cpu", **SCALES)
        scales, steps = [], [0, 0]
        for number, optimizer in enumerate(optimizers):
            optimizer.register_step_post_hook(partial(count, steps, number))
        for step in range(6):
            model.factor = factor(step, ranks.rank(), ranks.world())
            scaler.scale(squares(model, models.batch("mlp", step, ranks.rank()))).backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
            model.zero_grad()
            scales.append(scaler.get_scale())
        with zero.gathered():
            weights = reference.weights(model)
        text = reference.first_difference(weights, want["weights"])
        if text or (scales, steps) != (want["scales"], want["steps"]):
            found[stage] = text or (scales, steps)
    return found


def count(steps, number, *_):
    steps[number] += 1


@pytest.mark.full
def test_grad_scaler_decides_per_optimizer():
    """Two optimizers, an overflow in the gradients of one: that one skips on all ranks, the other steps, as in torch."""
    world = 3
    model = seeded(Sensitive).half()
    apart = Plain(model, OPTIMIZERS["sgd"], world)
    optimizers = two_optimizers(apart.masters.values())
    scaler = torch.amp.GradScaler("cpu", **SCALES)
    scales, steps = [], [0, 0]
    for number, optimizer in enumerate(optimizers):
        optimizer.register_step_post_hook(partial(count, steps, number))
    for step in range(6):
        apart.backward(step, scaler, before=lambda step, rank: setattr(model, "factor", factor(step, rank, world)))
        apart.average()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        apart.write_back()
        scales.append(scaler.get_scale())
    assert steps == [6, 4]
    want = apart.found() | {"scales": scales, "steps": steps}
    assert ranks.run(world, one_of_two, want) == [{}] * world


UNEVEN = {
    # Ranks whose fragments are of different dtypes, or of parameters without a gradient, or empty.
    "mixed": (BUILD["mixed"], Layout(bounds="tensor")),
    "unused": (partial(models.build, "unused"), Layout(bounds="tensor")),
    "mostly unused": (lambda: seeded(partial(Seldom, 12)), Layout(bounds="tensor")),
    "tiny": (partial(models.build, "tiny"), Layout()),
    "degenerate": (partial(models.build, "degenerate"), Layout()),
}


class Seldom(nn.Module):
    """The first and the last of many equal layers are used: ranks in the middle own no gradient at all."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(layers))

    def forward(self, x):
        return self.layers[-1](torch.tanh(self.layers[0](x)))[:, :5]


def infinite(model, value, step, rank, world):
    """Steps 1 and 3 overflow, on one rank each."""
    return value * float("inf") if (step, rank) in {(1, 2), (3, 0)} else value


def uneven(name, want):
    found = {}
    make, layout = UNEVEN[name]
    for stage in STAGES:
        model = make()
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        zero = zeroshard.shard(model, optimizer, stage=stage, layout=layout)
        scaler = torch.amp.GradScaler("cpu", **SCALES)
        scales = []
        for step in range(6):
            value = squares(model, models.batch("mlp", step, ranks.rank()))
            scaler.scale(infinite(model, value, step, ranks.rank(), 3)).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
        with zero.gathered():
            text = reference.first_difference(reference.weights(model), want["weights"])
        if text or scales != want["scales"]:
            found[stage] = text or scales
    return found


@pytest.mark.heavy
@pytest.mark.full
@pytest.mark.row(12)
@pytest.mark.parametrize("name", UNEVEN)
def test_grad_scaler_where_ranks_hold_different_things(name):
    """Ranks that own other dtypes than their peers, only parameters without gradients, or nothing, decide alike."""
    make, _ = UNEVEN[name]
    apart = Plain(make(), OPTIMIZERS["adamw"], 3)
    scaler = torch.amp.GradScaler("cpu", **SCALES)
    scales = []
    for step in range(6):
        apart.backward(step, scaler, infinite)
        apart.average()
        scaler.unscale_(apart.optimizer)
        scaler.step(apart.optimizer)
        scaler.update()
        apart.write_back()
        scales.append(scaler.get_scale())
    assert ranks.run(3, uneven, name, apart.found() | {"scales": scales}) == [{}] * 3


# ------------------------------------------------------------------------------------------- integers, bools and buffers


def integers(want, stages=STAGES):
    for stage in stages:
        for precision in (Precision(), Precision(param_dtype=torch.bfloat16)):
            model = models.build("integers")
            before = {
                n: t.clone()
                for n, t in [*model.named_parameters(), *model.named_buffers()]
                if not t.is_floating_point()
            }
            optimizer = OPTIMIZERS["adamw"](model.parameters())
            zero = zeroshard.shard(model, optimizer, stage=stage, precision=precision)
            for step in range(3):
                squares(model, models.batch("mlp", step, ranks.rank())).backward()
                optimizer.step()
                optimizer.zero_grad()
            before["calls"] = torch.tensor(3)
            with zero.gathered():
                now = {n: t for n, t in [*model.named_parameters(), *model.named_buffers()] if n in before}
                reference.assert_same(now, before)
                if precision == Precision():
                    reference.assert_same(reference.weights(model), want)


@pytest.mark.row(20)
def test_integers_and_bools_are_untouched(stage):
    """int and bool parameters and buffers keep dtype and value at every stage, also where floats become bf16."""
    apart = Plain(models.build("integers"), OPTIMIZERS["adamw"], 3)
    for step in range(3):
        apart.backward(step)
        apart.average()
        apart.optimizer.step()
        apart.write_back()
    ranks.run(3, integers, apart.found()["weights"], stages=(stage,))


# -------------------------------------------------------------------------------------------------------------- autocast


def under_autocast(name, model, batch):
    with torch.autocast("cpu", torch.bfloat16):
        return models.loss(name, model, batch)


def autocast(checkpoint, want, stages=STAGES):
    found = {}
    for stage in stages:
        model = models.build("gpt", hidden=12, layers=2, checkpoint=checkpoint)
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        zero = zeroshard.shard(model, optimizer, stage=stage)
        history = reference.loop(
            model, optimizer, partial(models.batch, "gpt"), partial(under_autocast, "gpt"),
            ranks.rank(), ranks.world(), 2, steps=3, clip=0.5,
        )  # fmt: skip
        with zero.gathered():
            assert {p.dtype for p in model.parameters()} == {torch.float32}
            text = reference.first_difference(reference.weights(model) | {"norms": torch.stack(history.norms)}, want)
        if text:
            found[stage] = text
    return found


@pytest.mark.parametrize("checkpoint", [None, "nonreentrant", "reentrant"])
def test_autocast_composes(checkpoint, stage):
    """fp32 weights under `torch.autocast(bfloat16)`, recomputed or not, two micro-batches per step and clipping: plain
    PyTorch's bits."""
    model = models.build("gpt", hidden=12, layers=2)
    history = reference.accumulate(
        model, OPTIMIZERS["adamw"](model.parameters()), partial(models.batch, "gpt"), partial(under_autocast, "gpt"),
        2, 2, steps=3, clip=0.5, norm=norms.total,
    )  # fmt: skip
    want = reference.weights(model) | {"norms": torch.stack(history.norms)}
    assert ranks.run(2, autocast, checkpoint, want, stages=(stage,)) == [{}] * 2


# ------------------------------------------------------------------------------------------------------------ cast_inputs


class Seeing(nn.Module):
    """Notes the dtypes that its forward was given, nested ones and keywords included."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 5)
        self.saw: list[torch.dtype] = []

    def forward(self, x, more, *, scale, flag=True):
        self.saw = [x.dtype, more["a"][0].dtype, more["tokens"].dtype, scale.dtype, more["mask"].dtype]
        return self.linear(x) * scale


def cast():
    found = []
    for stage in STAGES:
        for option in (False, True):
            model = Seeing()
            torch.manual_seed(0)
            optimizer = OPTIMIZERS["sgd"](model.parameters())
            precision = Precision(param_dtype=torch.bfloat16, cast_inputs=option)
            zeroshard.shard(model, optimizer, stage=stage, precision=precision)
            more = {
                "a": (torch.ones(2, dtype=torch.float64),),
                "tokens": torch.tensor([1]),
                "mask": torch.tensor([True]),
            }
            refused = pytest.raises(RuntimeError, match="dtype") if not option else contextlib.nullcontext()
            with refused:
                model(torch.ones(2, 7), more, scale=torch.tensor(2.0)).sum().backward()
            found.append(model.saw)
            assert more["a"][0].dtype == torch.float64  # the caller's own tensors are not changed
    return found


def test_whether_inputs_are_cast_is_said():
    """Without `cast_inputs` inputs arrive as they are, and torch says what does not fit; with it, floating inputs of
    the root (nested and by keyword too) arrive in `param_dtype`, integers and bools as they are."""
    kept = [torch.float32, torch.float64, torch.int64, torch.float32, torch.bool]
    cast_ = [torch.bfloat16, torch.bfloat16, torch.int64, torch.bfloat16, torch.bool]
    assert ranks.run(2, cast) == [[kept, cast_] * 4] * 2


def cast_by_hand():
    found = []
    for stage in STAGES:
        runs = []
        for option in (False, True):
            model = models.build("mlp", sizes=SIZES)
            optimizer = OPTIMIZERS["adamw"](model.parameters())
            precision = Precision(param_dtype=torch.bfloat16, cast_inputs=option)
            zero = zeroshard.shard(model, optimizer, stage=stage, precision=precision)
            for step in range(2):
                x, y = models.batch("mlp", step, ranks.rank())
                F.mse_loss(model(x if option else x.bfloat16()).float(), y).backward()
                optimizer.step()
                optimizer.zero_grad()
            with zero.gathered():
                runs.append(reference.weights(model))
        found.append(reference.first_difference(*runs))
    return found


def test_casting_inputs_is_casting_by_hand():
    """`cast_inputs` gives the bits of `model(x.to(param_dtype))`."""
    assert ranks.run(2, cast_by_hand) == [[""] * 4] * 2


class Widening(nn.Module):
    """Computes in fp32 between its blocks, as a norm or a position in fp32 would."""

    def __init__(self, by_hand: bool, recomputed: bool) -> None:
        super().__init__()
        self.by_hand, self.recomputed = by_hand, recomputed
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = x.bfloat16() if self.by_hand else x
            x = checkpoint(block, x, use_reentrant=False) if self.recomputed else block(x)
            x = torch.tanh(x.float())
        return x


def cast_at_units(recomputed):
    found = []
    for stage in STAGES:
        for by_hand in (True, False):
            torch.manual_seed(0)
            model = Widening(by_hand, recomputed)
            optimizer = OPTIMIZERS["adamw"](model.parameters())
            precision = Precision(param_dtype=torch.bfloat16, cast_inputs=False if by_hand else "units")
            zero = zeroshard.shard(model, optimizer, stage=stage, precision=precision)
            for step in range(2):
                x = torch.randn(3, 7, generator=torch.Generator().manual_seed(10 * step + ranks.rank()))
                model(x).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            with zero.gathered():
                found.append(reference.weights(model))
    return [reference.first_difference(each, found[0]) for each in found]


@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "checkpointed"])
def test_casting_inputs_of_units_is_casting_each_by_hand(recomputed):
    """`cast_inputs="units"` gives the bits of `block(x.to(param_dtype))`, at every stage, also when recomputed."""
    assert ranks.run(2, cast_at_units, recomputed) == [[""] * 8] * 2


@pytest.mark.row(64)
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"param_dtype": "bf16"}, "param_dtype"),
        ({"grad_dtype": torch.int64}, "grad_dtype"),
        ({"master_dtype": torch.float8_e4m3fn}, "master_dtype"),
        ({"reduce_dtype": torch.complex64}, "reduce_dtype"),
        ({"cast_inputs": True}, "param_dtype"),
        ({"param_dtype": torch.bfloat16, "cast_inputs": "no"}, "cast_inputs"),
        ({"param_dtype": torch.bfloat16, "cast_inputs": "unit"}, "(?s)cast_inputs.*did you mean 'units'"),
        ({"cast_inputs": "units"}, "param_dtype"),
        ({"store_params": 1}, "store_params"),
        (
            {"param_dtype": torch.bfloat16, "keep": "router"},
            r"(?s)keep takes patterns.*keep=\['router'\]",
        ),
        ({"keep": ["router"]}, "keep takes patterns"),
    ],
)
def test_contradictory_precisions_are_refused(options, says):
    """What is not a floating dtype of 16 bits or more, and `cast_inputs` without anything to cast to."""
    with pytest.raises(UserError, match=says):
        Precision(**options)


# ---------------------------------------------------------------------------- the user's optimizer, in lower precision

SCENARIOS = {
    "groups": (test_optimizer.groups, ()),
    "unfrozen": (test_optimizer.unfreezing, ("held",)),
    "first layer unfrozen": (test_optimizer.first_unfrozen, ()),
    "added": (test_optimizer.unfreezing, ("added",)),
    "hooks": (test_optimizer.hooked, ()),
    "gradients edited before": (test_optimizer.editing, ("before", "gradients")),
    "gradients edited after": (test_optimizer.editing, ("after", "gradients")),
    "weights edited before": (test_optimizer.editing, ("before", "weights")),
    "weights edited after": (test_optimizer.editing, ("after", "weights")),
}


def in_bf16(name):
    scenario, args = SCENARIOS[name]
    runs = []
    for stage, stored in [*((stage, False) for stage in STAGES), (3, True)]:
        engine = test_optimizer.Engine(ranks.world(), stage)
        precision = Precision(param_dtype=torch.bfloat16, cast_inputs=True, store_params=stored)
        model = scenario(engine, *args, precision=precision)
        with engine.zero.gathered():
            runs.append((reference.weights(model), engine.notes))
    return [reference.first_difference(weights, runs[0][0]) or notes != runs[0][1] for weights, notes in runs]


@pytest.mark.full
@pytest.mark.processes  # one scenario hooks all optimizers of the process
@pytest.mark.parametrize("name", SCENARIOS)
def test_optimizer_scenarios_in_bf16(name):
    """Param groups, unfreezing, hooks and edits with bf16 parameters and fp32 masters: equal over stages, and whether
    sharded parameters are stored beside their masters or cast from them."""
    assert ranks.run(3, in_bf16, name) == [[False] * 5] * 3
