"""A simulated rank is the real one without values: the same bytes, the same order, on one process."""

import copy
import dataclasses
import importlib.util
import json
import os
import re
import resource
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from walkthroughs import texts

import models
import ranks
import reference
import training
import zeroshard
from flat import plan_of
from zeroshard import Comm, Layout, Machine, Model, Precision, Step, shard
from zeroshard.cli import check, processor
from zeroshard.cli.policies import precision_of
from zeroshard.cli.simulate import _show_clock
from zeroshard.errors import UserError
from zeroshard.explain import stacked_mlp
from zeroshard.planner import built, predict_states
from zeroshard.planner.machines import MACHINES, machine
from zeroshard.planner.simulate import PASSING, facts, moments, simulate
from zeroshard.planner.timeline import replay
from zeroshard.policies import comm

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("published", ROOT / "bench" / "published.py")
published = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(published)

CASES = {
    "gpt": {},
    "gpt-tied": {"tied": True},
    "gpt-checkpoint": {"checkpoint": "nonreentrant"},
    "gpt-reentrant": {"checkpoint": "reentrant"},
    "mlp": {},
    "degenerate": {},
    "lora": {},
}


def model_of(case):
    return partial(training.job, case.split("-")[0], partial(torch.optim.AdamW, lr=1e-3), **CASES[case])


def told(zero):
    """What must be equal: bytes at rest and at the peak of each phase, traffic, and the order of things."""
    ledger = zero.ledger()
    moves = ("gather", "reduce", "release", "copy", "forward", "backward", "recompute", "step")
    return (
        {state: n for state, n in ledger.held.items() if n},
        {phase: (peak.total, peak.held) for phase, peak in ledger.phases.items()},
        {verb: t for verb, t in ledger.traffic.items() if verb in ("gather", "reduce")},
        [(e.verb, e.unit, e.bucket, e.logical, e.sent, e.received) for e in zero.events() if e.verb in moves],
    )


def real(case, stage, options):
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    parts = model_of(case)()
    model = parts["model"]
    optimizer = parts["optimizer"](model.parameters())
    zero = shard(model, optimizer, stage=stage, **options)
    for step in range(3):
        if step == 1:
            zero.record(1 << 20)
        parts["loss"](model, parts["batch"](step, 0 * world + rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return told(zero)


def simulated(case, stage, options, ranks, rank):
    return told(simulate(model_of(case), ranks=ranks, rank=rank, stage=stage, **options).zero)


OPTIONS = {
    "fp32": {},
    "bf16": {"precision": Precision(param_dtype=torch.bfloat16)},
    "no-overlap": {"comm": Comm(overlap=False)},
    "prefetch 2": {"comm": Comm(prefetch=2, release_after_forward=False)},
    "small buckets": {"layout": Layout(bucket_mib=0.002)},
    "model bounds": {"layout": Layout(bounds="model")},
}


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("case", "stage"),
    [
        pytest.param(
            case,
            stage,
            marks=[pytest.mark.slow] * (case not in ("gpt", "gpt-checkpoint") and stage in (0, 2))
            + [pytest.mark.full] * (stage in (0, 2)),
        )
        for case in CASES
        for stage in range(4)
    ],
)
def test_simulated_equals_real(ranks, stage, case):
    """Rest, peaks, traffic and order of every rank, to the byte."""
    for rank, outcome in enumerate(ranks.run(2, real, case, stage, {})):
        assert outcome == simulated(case, stage, {}, 2, rank)


@pytest.mark.heavy
@pytest.mark.full
@pytest.mark.parametrize(
    "world", [1, pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("options", OPTIONS)
def test_simulated_equals_real_at_any_rank_count(ranks, world, options):
    """Each rank of one, two, three and four, where shards are uneven and some are empty, with other settings."""
    for rank, outcome in enumerate(ranks.run(world, real, "gpt", 3, OPTIONS[options])):
        assert outcome == simulated("gpt", 3, OPTIONS[options], world, rank)


@pytest.mark.slow
def test_a_difference_would_be_seen():
    """The comparison above is of everything: another stage, prefetch or rank gives another outcome."""
    one = simulated("gpt", 3, {}, 3, 0)
    for other in (
        ("gpt", 2, {}, 3, 0),
        ("gpt", 3, OPTIONS["no-overlap"], 3, 0),
        ("gpt", 3, {}, 3, 2),
        ("gpt", 3, {}, 4, 0),
    ):
        assert simulated(*other) != one
    assert simulated("gpt", 3, {}, 3, 0) == one


def test_what_needs_values_is_refused():
    """A loss that reads a number cannot be simulated, and says so."""

    def branches():
        parts = model_of("mlp")()
        loss = parts["loss"]
        return parts | {"loss": lambda model, batch: loss(model, batch) * (2 if loss(model, batch).item() > 0 else 1)}

    with pytest.raises(UserError, match="needs values"):
        simulate(branches, ranks=2)
    for wrong in (
        {"ranks": 0},
        {"ranks": 2, "rank": 2},
        {"ranks": 2, "rank": -1},
        {"ranks": 1.5},
        {"ranks": 2, "accumulate": 0},
    ):
        with pytest.raises(UserError):
            simulate(model_of("mlp"), **wrong)
    with pytest.raises(UserError, match="needs the job's loss"):
        simulate(
            lambda: {"model": models.build("mlp")} | {k: model_of("mlp")()[k] for k in ("optimizer", "batch")}, ranks=2
        )


@pytest.mark.full
def test_a_simulation_leaves_nothing_behind():
    """Real training afterwards is what it was, in the same process."""

    def trained():
        parts = model_of("gpt")()
        optimizer = parts["optimizer"](parts["model"].parameters())
        zero = shard(parts["model"], optimizer)
        for step in range(2):
            parts["loss"](parts["model"], parts["batch"](step, 0)).backward()
            optimizer.step()
            optimizer.zero_grad()
        with zero.gathered():
            return reference.weights(parts["model"])

    before = trained()
    simulate(model_of("gpt"), ranks=64, rank=63)
    assert reference.first_difference(trained(), before) == ""
    model = models.build("gpt")
    shard(model, None)
    assert (
        torch.Tensor(
            model.blocks[0].attention.weight if hasattr(model.blocks[0], "attention") else next(model.parameters())
        )
        .isnan()
        .all()
    )


@pytest.mark.full
@pytest.mark.parametrize("stage", [1, 3])
def test_a_timeline_adds_up(stage):
    """Exposed waiting is what is left of the step; free links hide everything, slow ones nothing."""
    run = simulate(model_of("gpt"), ranks=16, stage=stage)
    at_once = dict.fromkeys(("launch", "kernel", "drain", "message"), 0.0)
    free = dataclasses.replace(MACHINES["a100"], **at_once)
    fast = dataclasses.replace(free, link=1e30, network=1e30, link_latency=0, network_latency=0)
    updated = 10**6
    for cluster in (MACHINES["a100"], free, fast):
        line = replay(run.events, cluster, ranks=16, updated_nbytes=updated, ordered=False, facts=facts(run.zero))
        parts = line.compute + line.summing + line.optimizer + line.exposed + line.overhead
        assert line.step == pytest.approx(parts, rel=1e-9)
        assert (line.overhead > 0) == (cluster.launch > 0) and line.asked.launches > 0 and line.meetings > 0
        assert line.compute == pytest.approx(run.flops / (cluster.flops * cluster.efficiency), rel=1e-12)
        for stream in ("compute", "link"):  # one thing at a time
            ends = 0.0
            for piece in sorted((s for s in line.slices if s.stream == stream), key=lambda s: s.start):
                assert piece.start >= ends - 1e-12
                ends = piece.end
    assert line.exposed == pytest.approx(0.0, abs=1e-15)
    slow = dataclasses.replace(free, flops=1e30)
    line = replay(run.events, slow, ranks=16, updated_nbytes=0, ordered=False)
    assert line.exposed == pytest.approx(line.step, rel=1e-6)
    with pytest.raises(UserError, match="two recorded steps"):
        replay([], slow, ranks=16, updated_nbytes=0)


def test_collectives_take_what_their_bytes_and_hops_take():
    """The formulas at three sizes, by hand: inside a node, over nodes, and every rank to every rank."""
    m = MACHINES["a100"]
    assert m.ring_seconds(8e9, 8) == pytest.approx(7 * 2e-6 + 7e9 / 300e9)
    assert m.ring_seconds(16e9, 16) == pytest.approx(14 * 2e-6 + 2 * 6e-6 + 15e9 / 200e9)
    assert m.exchange_seconds(8e9, 8) == pytest.approx(2e-6 + 7e9 / 300e9)
    assert m.exchange_seconds(16e9, 16) == pytest.approx(6e-6 + 8e9 / 25e9)
    assert m.ring_seconds(1e9, 1) == m.exchange_seconds(1e9, 1) == 0.0
    with pytest.raises(UserError, match="did you mean 'a100'"):
        machine("a10")


# ------------------------------------------------------------------------------------------------- plans of a user's job

EXAMPLE = str(ROOT / "examples" / "job.py") + ":job"


@pytest.mark.heavy
@pytest.mark.full
@pytest.mark.parametrize("stage", [pytest.param(None, id="all", marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.slow), "bf16"])
def test_a_plan_of_a_job(precision, stage):
    """At rest as the ledger of a simulated step says, the peak at a named part of the step, activations beside."""
    found = zeroshard.plan(
        EXAMPLE, Machine(ranks=2), step=Step(accumulate=2), stage=stage, precision=precision_of(precision)
    )
    assert [stage.stage for stage in found.stages] == ([0, 1, 2, 3] if stage is None else [stage])
    assert found.parameters == 27_936
    for stage in found.stages:
        run = simulate(
            EXAMPLE, ranks=2, rank=stage.rank, stage=stage.stage, accumulate=2, precision=precision_of(precision)
        )
        held = {state: n for state, n in run.ledger.held.items() if n and state not in PASSING}
        assert dict(stage.states) == held
        assert stage.total == sum(held.values())
        assert stage.peak == max(peak.total for phase, peak in run.ledger.phases.items())
        assert stage.peak == stage.total + max(instant.total for instant in stage.instants)
        assert any(
            instant.name == stage.peak_at and stage.total + instant.total == stage.peak for instant in stage.instants
        )
        assert stage.activations == run.activations > 0
        assert stage.working == run.working >= run.activations
    json.dumps(found.json())
    totals = [stage.total for stage in found.stages]
    assert totals == sorted(totals, reverse=True)


@pytest.mark.full
def test_a_plan_of_a_job_answers():
    """Whether it fits with what its operators hold beside it."""
    fits = zeroshard.plan(EXAMPLE, Machine(ranks=4, gpu_mem="4MiB"))
    assert all(stage.fits for stage in fits.stages) and fits.fitting.best.way.offload is None


@pytest.mark.slow
def test_a_plan_of_a_job_that_does_not_fit_names_the_fastest_way_that_does():
    tight = zeroshard.plan(EXAMPLE, Machine(ranks=4, gpu_mem="750KiB"), stage=1)
    assert [stage.fits for stage in tight.stages] == [False]
    assert tight.fitting.best.way.recompute and tight.fitting.best.need.device <= 750 * 1024


class Made:
    def __call__(self):
        return training.job("mlp")


def block():
    """One block of many layers: what recomputation saves in forward it needs again in backward."""
    torch.manual_seed(0)
    layers = [layer for _ in range(10) for layer in (nn.Linear(64, 64), nn.Tanh())]
    return {
        "model": nn.Sequential(nn.ModuleList([nn.Sequential(*layers)])[0], nn.Linear(64, 1)),
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.1),
        "batch": lambda step, index: torch.ones(2000, 64),
        "loss": lambda model, x: model(x).sum(),
    }


@pytest.mark.full
def test_recomputation_is_not_free():
    """Nine tenths of the activations go, but the most that operators hold at once hardly changes with a single block."""
    plain, again = (simulate(block, ranks=2, layout=Layout(recompute=each)) for each in (False, True))
    layer = 2000 * 64 * 4
    assert again.activations <= 3 * layer < 10 * layer <= plain.activations
    assert again.working >= 10 * layer


def two():
    parts = block()

    def optimizers(params):
        first, *rest = params
        return [torch.optim.SGD([first], lr=0.1), torch.optim.AdamW(rest, lr=0.1)]

    return parts | {"optimizer": optimizers}


@pytest.mark.full
def test_two_optimizers_make_one_step():
    """The clock and the instants are of a whole step, not of what lies between two optimizers."""
    one, both = simulate(block, ranks=4), simulate(two, ranks=4)
    lines = [replay(run.events, MACHINES["a100"], ranks=4, updated_nbytes=0, steps=run.steps) for run in (one, both)]
    assert lines[0].compute == lines[1].compute > 0 and lines[0].moving == lines[1].moving > 0
    names = [name for name, _ in moments(both)]
    assert names[0] == "init" and any(name.startswith("backward of") for name in names) and names.count("step") == 2


def test_what_counts_as_compute_and_tokens():
    """Recurrent layers count their matrices at every step of a sequence; masks and labels are no tokens."""

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.out = nn.LSTM(6, 11, batch_first=True), nn.Linear(11, 3)

        def forward(self, x):
            return self.out(self.lstm(x)[0][:, -1])

    def job():
        return {
            "model": Recurrent(),
            "optimizer": lambda params: torch.optim.SGD(params, lr=0.1),
            "batch": lambda step, index: (
                torch.ones(2, 4, 6),
                torch.zeros(2, dtype=torch.int64),
                torch.ones(2, 4, 4) > 0,
            ),
            "loss": lambda model, batch: model(batch[0]).sum(),
        }

    run = simulate(job, ranks=2)
    forward = 2 * 2 * 4 * (44 * 6 + 44 * 11)
    assert run.flops >= 3 * forward
    assert run.tokens == 0


def on_meta():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 30), nn.Linear(30, 8))
    return block() | {"model": model, "batch": lambda step, index: torch.ones(3, 8)}


@pytest.mark.parametrize("stage", [0, 3])
def test_a_model_on_meta(stage):
    """What is built on the meta device is materialised in a simulation as in a run."""
    run = simulate(on_meta, ranks=2, stage=stage)
    assert run.ledger.held["parameters"] == {0: 4096, 3: 2048}[stage]  # two units of 512 elements, padding included


class Packed(nn.Parameter):
    """Two numbers in a byte, as bitsandbytes has them: not to be made of a tensor without values."""

    def __new__(cls, data, scales):
        made = torch.Tensor._make_subclass(cls, data, False)
        made.scales = scales
        return made


class Linear4(nn.Module):
    def __init__(self):
        super().__init__()
        codes = torch.randint(256, (64, 32), dtype=torch.uint8)
        assert codes.sum() > 0  # which asks for values
        self.packed = Packed(codes, SimpleNamespace(of=torch.rand(64, 1)))
        self.bias = nn.Parameter(torch.zeros(64))

    def forward(self, x):
        codes = self.packed.view(torch.uint8)
        weight = torch.cat([codes & 15, codes >> 4], 1) / 15 * self.packed.scales.of
        return nn.functional.linear(x, weight, self.bias)


def packed(model):
    return block() | {"model": model, "batch": lambda step, index: torch.ones(3, 64)}


def held_by(stage):
    parts = packed(Linear4())
    optimizer = parts["optimizer"](parts["model"].parameters())
    zero = zeroshard.shard(parts["model"], optimizer, stage=stage)
    parts["loss"](parts["model"], parts["batch"](0, 0)).backward()
    optimizer.step()
    return {state: n for state, n in zero.ledger().held.items() if n}


@pytest.mark.parametrize("stage", [0, 3])
def test_a_model_that_is_made_with_values(stage):
    """The job returns a function that makes it; then its tensors have none, nor has what hangs on them."""
    with pytest.raises(UserError, match="function raised"):
        simulate(lambda: packed(Linear4()), ranks=2, stage=stage)
    run = simulate(lambda: packed(Linear4), ranks=2, stage=stage)
    assert {state: n for state, n in run.ledger.held.items() if n} == ranks.run(2, held_by, stage)[0]
    weight = run.zero.model.packed
    assert isinstance(weight, FakeTensor)
    assert isinstance(weight.scales.of, FakeTensor)


def all_frozen():
    parts = block()
    parts["model"].requires_grad_(False)
    return parts


BAD = {
    "tuple": lambda: block() | {"loss": lambda model, x: (model(x).sum(), 1)},
    "vector": lambda: block() | {"loss": lambda model, x: model(x)},
    "frozen": all_frozen,
    "raises": lambda: block() | {"loss": lambda model, x: model(x[:, :3])},
}


@pytest.mark.parametrize("name", BAD)
def test_a_job_that_cannot_train_is_refused(name):
    with pytest.raises(UserError, match="nothing to call backward on|fails under simulation"):
        simulate(BAD[name], ranks=2)


DRAWS = """
import numpy
import torch
from torch import nn
from torch.nn import functional as F

T = 8
DATA = numpy.arange(1000, dtype=numpy.uint16) % 50


def job(draw=lambda i: torch.from_numpy(DATA[i : i + T].astype(numpy.int64))):
    def get_batch(step, index):
        ix = torch.randint(len(DATA) - T, (4,))
        return [torch.stack([draw(i + later) for i in ix]) for later in (0, 1)]

    def loss(model, batch):
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    model = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 50))
    return {"model": model, "optimizer": torch.optim.AdamW, "batch": get_batch, "loss": loss}


def of_tensors():
    data = torch.arange(1000) % 50
    return job(lambda i: data[i : i + T])


def elsewhere():
    def get_batch(step, index):
        x, y = (part.to("meta") for part in parts["batch"](step, index))
        made = torch.zeros(4, T, dtype=torch.int64, device="meta")
        assert all(type(each) is not torch.Tensor for each in (x, y, made))  # nothing is kept there
        return (x + made).cpu(), y.cpu()

    return (parts := job()) | {"batch": get_batch}


def beyond():
    return job(lambda i: DATA[5000])


def reads_a_value():
    data = torch.arange(1000)
    return job(lambda i: data[: int(data[9])])


def wrong_loss():
    return job() | {"loss": lambda model, batch: model(batch[0])[:, :, 50]}
"""


def test_batches_are_drawn_with_values(tmp_path):
    """Data that is cut where drawn numbers say, as nanoGPT's: by numpy, of tensors, and sent to another device."""
    path = tmp_path / "draws.py"
    path.write_text(DRAWS)
    torch.manual_seed(1)
    before, drawn = torch.get_rng_state(), set()
    for name in ("job", "of_tensors", "elsewhere"):
        run = simulate(f"{path}:{name}", ranks=2)
        drawn.add((run.tokens, run.flops, run.activations))
    assert len(drawn) == 1 and run.tokens == 4 * 8
    assert torch.equal(torch.get_rng_state(), before)
    assert zeroshard.plan(f"{path}:job", Machine(ranks=2)).parameters == 50 * 16 + 16 * 50 + 50


@pytest.mark.parametrize(
    ("name", "what", "line"),
    [
        ("beyond", "the job's batch raised.*IndexError: index 5000", "return job(lambda i: DATA[5000])"),
        ("reads_a_value", "the job's batch raised.*data read by numpy", "return job(lambda i: data[: int(data[9])])"),
        ("wrong_loss", "the job fails under simulation.*IndexError", "model(batch[0])[:, :, 50]"),
    ],
)
def test_a_job_that_raises_is_told_its_own_line(tmp_path, name, what, line):
    path = tmp_path / "draws.py"
    path.write_text(DRAWS)
    number = next(at for at, text in enumerate(DRAWS.splitlines(), 1) if line in text)
    with pytest.raises(UserError, match=f"(?s){what}") as raised:
        simulate(f"{path}:{name}", ranks=2)
    assert f"{path}:{number} in " in str(raised.value)


def test_a_machine_of_ones_own(tmp_path):
    """A JSON file of the same fields; whatever is missing, unknown or of another kind is named."""
    told = dataclasses.asdict(MACHINES["h100"]) | {"name": "mine", "network": 1e9}
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(told))
    assert machine(str(path)) == dataclasses.replace(MACHINES["h100"], name="mine", network=1e9)
    for change, said in (
        ({"links": 3}, "just these fields"),
        ({"flops": "fast"}, "another kind"),
        ({"gpus": -1}, "another kind"),
        ({"link": 0}, "cannot be 0"),
        ({"drain": -1}, "another kind"),
    ):
        path.write_text(json.dumps(told | change))
        with pytest.raises(UserError, match=said):
            machine(str(path))
    older = {name: value for name, value in told.items() if name not in ("launch", "kernel", "drain", "message")}
    path.write_text(json.dumps(older))
    assert machine(str(path)) == dataclasses.replace(MACHINES["h100"], name="mine", network=1e9)
    path.write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        machine(str(path))


class Halves(nn.Module):
    """Matrices for Muon, vectors and a matrix of another shape for Adafactor; a tied weight and a frozen part."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(20, 30, bias=False), nn.Linear(30, 20, bias=False)
        self.norm, self.frozen, self.out = nn.LayerNorm(20), nn.Linear(20, 20), nn.Linear(20, 20, bias=False)
        self.frozen.requires_grad_(False)
        self.again = self.out.weight

    def forward(self, x):
        return self.out(self.norm(self.frozen(self.second(torch.relu(self.first(x))))))


def halves():
    model = Halves()
    matrices = [model.first.weight, model.second.weight]
    others = [model.out.weight, *model.norm.parameters()]
    return {
        "model": model,
        "optimizer": lambda params: [torch.optim.Muon(matrices), torch.optim.Adafactor(others)],
        "batch": lambda step, index: torch.ones(3, 20),
        "loss": lambda model, x: model(x).square().mean(),
    }


@pytest.mark.full
@pytest.mark.parametrize(
    "name", ["halves", "groups", *(pytest.param(name, marks=pytest.mark.slow) for name in ("amsgrad", "rprop"))]
)
def test_other_optimizers_and_parts(warm, name):
    """Whole-tensor optimizers side by side, ties, frozen parts, groups: every byte as predicted on two real ranks."""
    rows = check.compare(
        check.Check(job=f"{__file__}:{name}", ranks=2, stages=(0, 1, 2, 3), options={"bounds": "tensor", "prefetch": 0})
    )
    assert {row["what"] for row in rows} >= {"at rest", "parameters", "gradients", "peak in backward"}
    assert [row for row in rows if row["difference"] and row["what"] not in check.MEASURED] == []


def _with(optimizer):
    def parts():
        return halves() | {"optimizer": lambda params: optimizer([p for p in params if p.requires_grad])}

    return parts


amsgrad = _with(lambda params: torch.optim.AdamW(params, amsgrad=True))
rprop = _with(torch.optim.Rprop)
groups = _with(
    lambda params: torch.optim.SGD([{"params": params[:2], "momentum": 0.9}, {"params": params[2:]}], lr=0.1)
)


def test_what_links_carry():
    """By hand: 16 ranks in nodes of 8, 8 P bytes gathered once and reduced once."""
    plan = zeroshard.plan(Model(16e6, preset="paper"), Machine(ranks=16, gpus_per_node=8), stage=1)
    gathered = reduced = 2 * 16_000_000
    assert plan.stages[0].links == (gathered * 15 // 16 + reduced * 7 // 16, gathered * 15 // 128 + reduced * 8 // 16)
    inside = zeroshard.plan(Model(16e6, preset="paper"), Machine(ranks=8, gpus_per_node=8), stage=1).stages[0]
    assert inside.links == (inside.traffic.total.sent, 0)


def test_any_optimizer_of_torch_can_be_named():
    """The class itself is asked; what depends on shapes needs a job."""
    for name, states_of, total in (
        ("RMSprop", {"square_avg"}, 12),
        ("torch.optim.NAdam", {"exp_avg", "exp_avg_sq"}, 16),
    ):
        recipe = zeroshard.plan(Model(8, preset="paper", optimizer=name), Machine(ranks=2)).recipe
        assert (set(recipe.optimizer) - {"master"}, recipe.total) == (states_of, total)
    with pytest.raises(UserError, match="depend on the shapes"):
        zeroshard.plan(Model(8, preset="paper", optimizer="Adafactor"))
    with pytest.raises(UserError, match="did you mean 'adamw'"):
        zeroshard.plan(Model(8, preset="paper", optimizer="adamm"))


@pytest.mark.full
def test_prefetch_is_planned():
    peaks = [zeroshard.plan(EXAMPLE, Machine(ranks=2), stage=3, comm=Comm(prefetch=n)).stages[0] for n in (0, 1)]
    held = [max(i.nbytes.get("prefetch", 0) for i in stage.instants) for stage in peaks]
    assert held[0] == 0 < held[1]
    with pytest.raises(UserError, match="prefetch counts units"):
        zeroshard.plan(EXAMPLE, comm=Comm(prefetch=-1))


def test_a_check_simulates_messages_where_memory_cannot_be_shared(monkeypatch):
    asked = check.Check("jobs:mlp", 2, (2,), options={"transport": "auto"})
    assert asked.settings("", 2)["comm"].transport == "auto"
    monkeypatch.delattr(os, "memfd_create")
    assert asked.settings("", 2)["comm"].transport == "gloo"


def test_a_job_s_ranks_share_memory_by_default_on_one_host(monkeypatch):
    """On the CPU, if the plan is not of several nodes; a simulation on a machine with GPUs has messages."""
    monkeypatch.setattr(comm, "AUTO", "auto")
    job = "jobs:mlp"

    def sent(plan):
        return plan.stages[0].traffic.reduce.sent

    default, shared, gloo = (
        zeroshard.plan(job, Machine(ranks=4), stage=2, comm=each)
        for each in (None, Comm(transport="shared"), Comm(transport="gloo"))
    )
    assert default.stages == shared.stages and sent(default) == 0 < sent(gloo)
    assert (
        zeroshard.plan(job, Machine(ranks=4, gpus_per_node=2), stage=2).stages[0].traffic
        == zeroshard.plan(job, Machine(ranks=4, gpus_per_node=2), stage=2, comm=Comm(transport="gloo"))
        .stages[0]
        .traffic
    )
    assert sent(zeroshard.plan(job, Machine(ranks=16, cluster="a100"), stage=2)) > 0


@pytest.mark.parametrize("make", [partial(training.job, "mlp"), Made(), lambda: training.job("mlp")])
def test_whatever_can_be_called_without_arguments_is_a_job(make):
    """Named after the function inside a partial, or the class that is called."""
    name = {partial: "job", Made: "Made"}.get(type(make), "<lambda>")
    assert simulate(make, ranks=2).job == zeroshard.plan(make, Machine(ranks=2), stage=1).source == name


@pytest.mark.slow
def test_a_plan_is_the_same_each_time():
    """Storages come and go at the same addresses: what is known of one is not said of the next."""
    first, *others = (simulate(EXAMPLE, ranks=4, stage=3, comm=Comm(transport="shared")) for _ in range(6))
    assert {(run.activations, run.working) for run in others} == {(first.activations, first.working)}


def test_a_plan_of_a_job_refuses_what_it_cannot_use():
    for settings, word in (
        ({"preset": "paper"}, "preset"),
        ({"comm": Comm(replicas=2)}, "replicas"),  # of one rank
        ({"precision": "bf16"}, "precision= is a Precision"),
        ({"params": 7}, "one of"),
    ):
        with pytest.raises(UserError, match=word):
            plan_of(job=EXAMPLE, **settings)
    with pytest.raises(UserError, match="activations, of jobs"):
        zeroshard.plan(Model(7e9, preset="paper"), layout=Layout(recompute=True))
    with pytest.raises(UserError, match="cannot be imported"):
        zeroshard.plan("no.such.module:job")


command = partial(ranks.command, timeout=240, cwd=ROOT)


@pytest.mark.full
@pytest.mark.parametrize("stages", [pytest.param(range(4), id="all", marks=pytest.mark.slow), [2]])
def test_predicted_equals_held_on_real_ranks(stages):
    """`zeroshard plan --check`: every state and every peak of every rank at every stage, to the byte."""
    words = ["--ranks", 2, "--check", "--json", "--accumulate", 2, "--no-sync", "--precision", "bf16"]
    done = command("plan", EXAMPLE, *words, *(["--stage", *stages] if len(stages) == 1 else []))
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    rows = json.loads(done.stdout)["rows"]
    compared = [row for row in rows if not row["what"].startswith("measured")]
    assert {(row["stage"], row["rank"]) for row in compared} == {(s, r) for s in stages for r in range(2)}
    assert all(row["difference"] == 0 for row in compared)
    whats = {row["what"] for row in compared}
    assert {
        "at rest",
        "parameters",
        "gradients",
        "master",
        "exp_avg",
        "step",
        "peak in forward",
        "peak in reduce",
    } <= whats
    assert all(row["held"] > 0 for row in rows if row["what"] == "measured: process")


PROFILE = ["--ranks", "4", "--stage", "1", "--precision", "bf16", "--grad-dtype", "bf16"]


@pytest.mark.full
def test_the_texts_profile_is_simulated_with_gradients_in_bf16():
    """1,342,382,080 parameters: 2.50 + 2.50 + 3 x 1.25 GiB, and Adam's counters of the 10 tensors that rank 0 has some of,
    where a bucket is a unit; with fp32 gradients 2.50 more."""
    numel = 1_342_382_080
    for words, per_parameter in ((PROFILE, 7), (PROFILE[:6], 9)):
        done = command("simulate", "zeroshard.explain.stacked_mlp:profile", *words, "--json")
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        (rank,) = json.loads(done.stdout)["simulated"]
        assert sum(rank["held"].values()) == per_parameter * numel + 4 * 10
        assert f"{per_parameter * numel / 2**30:.2f}" == {7: "8.75", 9: "11.25"}[per_parameter]


@pytest.mark.full
def test_the_texts_profile_in_8_bits_and_its_checkpoint_are_what_text_b_is_answered_with():
    """The page's tables of text B have them, computed without torch; the engine holds and sends so many bytes."""
    run = simulate(stacked_mlp.profile, ranks=4, stage=1, precision=precision_of("bf16-fp8", "bf16"))
    said = {line.what: line.value for table in texts.text("B").tables[-2:] for line in table.lines}
    held = {state: nbytes for state, nbytes in run.ledger.held.items() if nbytes}
    held.pop("step")
    assert (held["scales"], held["parameters"]) == (
        said["scales, a byte for each weight tensor"], said["ZeRO-1: parameters"] * 2**30,
    )  # fmt: skip
    assert said["weights, a byte each"] * 2**30 + said["biases, bf16"] == held["parameters"]
    assert sum(held.values()) == said["ZeRO-1: total"] * 2**30
    gathers = [event.logical for event in run.events if event.verb == "gather"]  # of two steps
    assert sum(gathers) == 2 * said["all-gather after the step, of all ranks' parts"] * 2**30
    begin = sum(
        slot.within(*bucket.shard(0)).start == 0 and slot.within(*bucket.shard(0)).numel > 0
        for bucket in run.zero.partition.buckets
        for slot in bucket.slots
    )
    assert built.holding(run.zero).snapshot() - 4 * begin == said["written by each of 4 ranks"] * 2**30  # counters
    assert said["master, m and v in files, once"] == 4 * said["written by each of 4 ranks"]


@pytest.mark.full
@pytest.mark.parametrize(
    "words",
    [
        pytest.param((), marks=pytest.mark.slow),  # the page's own run: test_explain
        pytest.param(("--recompute",), marks=pytest.mark.slow),
        ("--accumulate", 3, "--no-sync"),
    ],
    ids=lambda words: words[:1],
)
def test_the_texts_profile_is_held_as_planned_at_a_scale_that_fits(words):
    """Four real ranks: every state at rest and every peak, to the byte, also while they accumulate."""
    done = command("plan", "zeroshard.explain.stacked_mlp:scaled", *PROFILE, *words, "--check", "--json", timeout=300)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    rows = [row for row in json.loads(done.stdout)["rows"] if not row["what"].startswith("measured")]
    assert {row["rank"] for row in rows} == {0, 1, 2, 3} and all(row["difference"] == 0 for row in rows)
    rest = [row["held"] for row in rows if row["what"] == "at rest"]
    counters = [nbytes - 7 * 20_997_120 for nbytes in rest]  # 4 bytes for each tensor that a rank owns a part of
    assert len(counters) == 4 and all(0 < nbytes < 4 * 40 for nbytes in counters)


def checked_on_the_page():
    """The command of docs/planning.md that runs local ranks, and what it shows of their bytes."""
    page = (ROOT / "docs" / "planning.md").read_text()
    ((words, shown),) = re.findall(r"^```\n\$ zeroshard (plan .* --check)\n((?:.|\n)*?)^```$", page, re.MULTILINE)
    return words, shown.splitlines()


@pytest.mark.full
def test_the_page_shows_what_a_check_predicts(monkeypatch):
    """Every total at rest and every highest peak of docs/planning.md's table, on both ranks at all stages."""
    monkeypatch.setattr(comm, "AUTO", "auto")
    words, (_, _, *rows, last) = checked_on_the_page()
    job = words.split()[1]
    cells = [row.split()[-3:] for row in rows]
    assert [held for _, held, _ in cells] == [predicted for predicted, _, _ in cells]
    assert {difference for _, _, difference in cells} == {"0"}
    assert last.startswith("held = predicted")
    predicted = []
    for stage in range(4):
        for rank in range(2):
            run = simulate(job, ranks=2, rank=rank, stage=stage)
            peak = max(most.total for most in run.ledger.phases.values())
            predicted += [f"{sum(predict_states(run.zero).values()):,}", f"{peak:,}"]
    assert [predicted for predicted, _, _ in cells] == predicted


@pytest.mark.slow
def test_the_page_shows_what_a_check_prints():
    """The whole table again, from local ranks."""
    words, shown = checked_on_the_page()
    done = command(*words.split(), COLUMNS="90", TERM="dumb")
    assert (done.returncode, done.stderr) == (0, "")
    printed = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    first = printed.index(shown[0].strip())
    assert printed[first : first + len(shown) - 1] == [line.strip() for line in shown[:-1]]
    assert printed[-1] == shown[-1]


def test_a_wrong_prediction_is_seen(warm, monkeypatch, capsys):
    """One byte too many, and the command says where and fails."""
    asked = check.Check(job=EXAMPLE, ranks=1, stages=(2,))
    rows = check.compare(asked)
    assert all(row["difference"] == 0 for row in rows if row["what"] not in check.MEASURED)
    right = built.predict_tiers

    def wrong(zero):
        (device,) = (tiers := right(zero)).values()
        return tiers | {"device": device | {"gradients": device["gradients"] + 1}}

    monkeypatch.setattr(built, "predict_tiers", wrong)
    assert check.check(asked) == 1
    assert "the first: stage 2, rank 0, gradients" in capsys.readouterr().out


@pytest.mark.full
def test_a_check_in_bf16_says_once_where_the_processor_has_none(warm, monkeypatch, capsys, tmp_path):
    (tmp_path / "cpuinfo").write_text("flags : fpu avx2\n")
    monkeypatch.setattr(processor, "CPUINFO", tmp_path / "cpuinfo")
    for precision, times in (("fp32", 0), ("bf16", 1)):
        assert check.check(check.Check(job=EXAMPLE, ranks=1, stages=(0,), options={"precision": precision})) == 0
        assert capsys.readouterr().out.count("no bf16 arithmetic") == times


@pytest.mark.full
def test_the_simulate_command(tmp_path):
    """Two ranks of 1,024: bytes as integers, messages that add up, and a trace that opens."""
    trace = tmp_path / "trace.json"
    words = ("simulate", EXAMPLE, "--ranks", 1024, "--rank", "0,1023", "--machine", "h100", "--trace", trace)
    done = command(*words, "--json")
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    for found in json.loads(done.stdout)["simulated"]:
        assert found["predicted"] == found["held"]
        kept = sum(n for state, n in found["held"].items() if state not in ("gradients",))
        # Padding is held but not saved; every rank's file, and the manifest.
        assert found["checkpoint"]["files"] == 1025 and 0 <= found["checkpoint"]["bytes"] <= kept
        assert found["peak"]["total"] >= sum(found["held"].values())
        assert sum(each["logical"] * each["per_step"] for each in found["collectives"]) == sum(
            moved["logical"] for moved in found["traffic"].values()
        )
        clock = found["time"]
        assert clock["step"] == pytest.approx(
            clock["compute"] + clock["summing"] + clock["optimizer"] + clock["exposed"] + clock["overhead"]
        )
        assert found["host"]["launches"] > 0 and found["host"]["meetings"] == found["control"]["calls"]
        assert found["native"] < clock["step"]  # between nodes
    for rank in (0, 1023):
        events = json.loads((tmp_path / f"trace.json.rank{rank}").read_text())["traceEvents"]
        assert {event["pid"] for event in events} == {rank}
        assert {event["name"].split()[0] for event in events if event["ph"] == "X"} >= {
            "compute",
            "gather",
            "reduce",
            "step",
        }
    shown = command(*words[:4])
    assert "A step on the clock" in shown.stdout and "tokens/s" in shown.stdout


def test_the_parts_of_a_step_are_drawn_one_after_the_other(capsys):
    parts = {"compute": 4.0, "summing": 1.0, "optimizer": 2.0, "exposed": 3.0, "overhead": 0.0}
    host = {"launches": 1, "drains": 0, "meetings": 1, "launches_of_a_clip": 1}
    clock = {**parts, "step": 10.0, "moving": 3.0, "tokens_per_second": None}
    _show_clock({"time": clock, "host": host, "native": None})
    drawn = [re.search(r"\d u?s( *\u2588*)", line)[1].rstrip() for line in capsys.readouterr().out.splitlines()[2:8]]
    assert [(each.count(" ") - 2, each.count("\u2588")) for each in drawn if each] == [
        (0, 16), (16, 4), (20, 8), (28, 12), (0, 40),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("gpu", "name"), [("h100-80", "h100"), ("a100-80", "a100"), ("mi300x", "mi300x"), ("h200", "h200")]
)
def test_a_machine_has_its_gpus_name_too(gpu, name):
    """Of that memory: there is no a100 of 40 GB."""
    assert machine(gpu) is MACHINES[name]
    with pytest.raises(UserError, match="no such machine"):
        machine("a100-40")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("simulate", EXAMPLE, "--ranks", 0), "ranks is a number of at least 1"),
        (("simulate", EXAMPLE, "--ranks", 10**9), "--ranks must be at most 1048576"),
        (("plan", EXAMPLE, "--accumulate", 10**9), "--accumulate must be at most 1024"),
        (("simulate", EXAMPLE, "--rank", 8), "no such rank"),
        (("simulate", EXAMPLE, "--rank", "x"), "--rank takes whole numbers"),
        (("simulate", EXAMPLE, "--stage", 4), "no such ZeRO stage"),
        (("simulate", EXAMPLE, "--machine", "a10"), "did you mean 'a100'"),
        (("simulate", "examples/job.py:jbo"), "did you mean 'job'"),
        (("simulate", EXAMPLE, "--reduce", "orderd"), "did you mean 'ordered'"),
        (("plan", EXAMPLE, "--precision", "bf8"), "did you mean 'bf16'"),
        (("plan", EXAMPLE, "--check", "--gpu-mem", "1GiB"), "leave out --gpu-mem"),
        (("plan", "--check"), "name one: train:job"),
        (("plan", EXAMPLE, "--check", "--ranks", 0), "at least 1"),
        (("plan", EXAMPLE, "--preset", "paper"), "a job says itself what it holds"),
    ],
)
def test_bad_input_is_one_line(words, said):
    done = command(*words)
    assert done.returncode == 2
    assert said in done.stderr and done.stderr.count("\n") == 1, done.stderr


@pytest.mark.slow
def test_a_model_of_seven_billion_on_1024_ranks():
    """The LLaMA shape that the documentation quotes, within the memory it says."""
    run = simulate(
        published.job(32_000, 2048, 1, width=4096, blocks=32, inner=11_008, heads=32, shared=32, gated=True), ranks=1024
    )
    assert sum(param.numel() for param in run.zero.model.parameters()) == 6_738_411_520
    assert predict_states(run.zero) == {s: n for s, n in run.ledger.held.items() if n and s not in PASSING}
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 4 * 2**20  # KiB


def test_the_documentation_quotes_the_published_table():
    """docs/simulation.md shows what bench/published.py wrote, errors as they are."""
    page = (ROOT / "docs" / "simulation.md").read_text()
    rows = json.loads((ROOT / "bench" / "results" / "published.json").read_text())["rows"]
    assert len(rows) >= 3
    for row in rows:
        cells = (
            row["what"],
            f"{row['published']:g} {row['unit']}",
            f"{row['simulated']:g}",
            f"{row['error_percent']:+g} %",
        )
        assert f"| {' | '.join(cells)} |" in page, cells
        source = row["source"].split(":")[0].split(",")[0]
        assert source == "the same" or source in page


def wide_units():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(2048, 2048), nn.Linear(2048, 2048)) for _ in range(2)))
    return {
        "model": model,
        "optimizer": lambda params: torch.optim.AdamW(params, lr=1e-3),
        "batch": lambda step, index: torch.zeros(2, 2048),
        "loss": lambda model, x: model(x).square().mean(),
    }


def test_a_plan_for_a_cluster_has_the_buckets_that_a_model_on_accelerators_has():
    """A unit is one bucket there; on the CPU its two matrices are in two."""
    (planned,) = zeroshard.plan(wide_units, Machine(ranks=2, cluster="h100"), stage=3).stages
    (without,) = zeroshard.plan(wide_units, Machine(ranks=2), stage=3).stages
    assert (planned.buckets, without.buckets) == (2, 4)


def copied(deep):
    """A job of two equal blocks: the second is a copy of the first, as `nn.TransformerEncoder` makes it, or is built."""

    def job():
        first = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
        second = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
        return {
            "model": nn.Sequential(nn.ModuleList([first, copy.deepcopy(first) if deep else second]), nn.Identity()),
            "optimizer": lambda parameters: torch.optim.AdamW(parameters),
            "batch": lambda step, index: torch.ones(4, 16),
            "loss": lambda model, batch: model[0][1](model[0][0](batch)).sum(),
        }

    return job


def test_a_module_that_was_deepcopied_is_simulated_as_one_that_was_built():
    """Views of its weights are known as such: they are gathered again for backward, and are no activations."""
    told = [
        (run.activations, {phase: peak.held for phase, peak in run.ledger.phases.items()})
        for run in (simulate(copied(deep), ranks=2, rank=0, stage=3) for deep in (False, True))
    ]
    assert told[0] == told[1]
