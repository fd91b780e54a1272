"""Formats of 8 bits and split masters in plans of shapes and of a number: what a job of these shapes is planned to hold."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from torch import nn

import zeroshard
from flat import plan_of
from test_planner import CONFIGS
from zeroshard import Comm, Layout, Machine, Offload, Precision
from zeroshard.cli.config import InputError
from zeroshard.cli.plan import show_plan
from zeroshard.errors import UserError
from zeroshard.layout.states import placements
from zeroshard.planner import formats, states
from zeroshard.planner.instants import instants, item_sizes

BF16 = {"param_dtype": torch.bfloat16}
LINEAR = ["*.0.weight", "*[0-9].weight"]
FORMATS = {
    "fp32": (Precision(param_dtype=torch.float32), "ordered"),
    "bf16": (Precision(**BF16), "ordered"),
    "bf16-grads": (Precision(**BF16, grad_dtype=torch.bfloat16, reduce_dtype=torch.float32), "ordered"),
    "stored": (Precision(**BF16, store_params=True), "ordered"),
    "split": (Precision(**BF16, split_master=True), "ordered"),
    "fp8": (Precision(**BF16, fp8=LINEAR), "ordered"),
    "fp8-tiles": (Precision(**BF16, fp8=LINEAR, scaling="1x128"), "ordered"),
    "fp32-fp8": (Precision(fp8=["1.*.weight", "*2.0.weight"], scaling="128x128"), "ordered"),
    "int8": (Precision(param_dtype=torch.float32), "int8"),
    "int8-split": (Precision(**BF16, split_master=True), "int8"),
    "states16": (Precision(param_dtype=torch.float32, states={"*": torch.bfloat16}), "ordered"),
    "one-state16": (Precision(**BF16, states={"exp_avg": torch.bfloat16}, rounding="stochastic"), "ordered"),
    "states16-split": (Precision(**BF16, split_master=True, states={"*": torch.bfloat16}), "ordered"),
    "states16-fp8": (Precision(**BF16, fp8=LINEAR, states={"*": torch.bfloat16}), "ordered"),
    "int8-fp8": (Precision(**BF16, fp8=LINEAR), "int8"),
}
NAMES = {"exp_avg": "m", "exp_avg_sq": "v"}
SIZES = (40, 64, 72, 48)


def model_of():
    return nn.Sequential(
        *(
            nn.Sequential(nn.Linear(n, 2 * n), nn.LayerNorm(2 * n), nn.Linear(2 * n, m))
            for n, m in itertools.pairwise(SIZES)
        )
    )


def job():
    model = model_of()

    def batch(step, rank):
        return torch.ones(2, SIZES[0], requires_grad=True)

    return {
        "model": model,
        "optimizer": lambda params: torch.optim.AdamW(params),
        "batch": batch,
        "loss": lambda model, x: model(x.to(next(model.parameters()).dtype)).float().sum(),
    }


@pytest.fixture
def shapes(tmp_path):
    path = tmp_path / "m.json"
    path.write_text(json.dumps({name: list(param.shape) for name, param in model_of().named_parameters()}))
    return path


def bytes_of(plan):
    """Stage by stage: the fullest rank's bytes at rest, and the bytes it gathers and sums in a step."""
    return {
        stage.stage: (
            {NAMES.get(state, state): nbytes for state, nbytes in stage.states.items() if nbytes},
            (stage.total, stage.buckets, stage.slots, stage.snapshot),
            (stage.traffic.gather, stage.traffic.reduce),
        )
        for stage in plan.stages
    }


@pytest.mark.heavy
@pytest.mark.row(58, 102, 104, 105)
@pytest.mark.parametrize("accumulate", [{}, {"accumulate": 2, "no_sync": True}], ids=["", "no-sync"])
@pytest.mark.parametrize("which", FORMATS)
def test_shapes_are_planned_as_a_job_of_these_shapes(shapes, which, accumulate):
    """Every state at every stage, and what a step gathers and sums, to the byte."""
    precision, reduce = FORMATS[which]
    asked = {"ranks": 3, "precision": precision, "layout": Layout(bucket_mib=0.01), **accumulate}
    comm = Comm(reduce=reduce, transport="gloo")
    of_job = plan_of(job=job, comm=comm, **asked)
    of_shapes = plan_of(shapes=shapes, comm=comm, **asked)
    want = bytes_of(of_job)
    found = {stage.stage: stage for stage in of_shapes.stages}
    for stage, (held, counts, moved) in bytes_of(of_shapes).items():
        padding = found[stage].states.get("padding", 0)
        assert counts == want[stage][1]
        assert moved == want[stage][2]
        assert sum(held.values()) == sum(want[stage][0].values())
        assert padding or held == want[stage][0]


def chain():
    """A unit is one bucket, and backward sums them one after the other."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(48 + 16 * n, 64 + 16 * n, bias=False)) for n in range(6)))


def passed_by_the_engine(stage, which):
    """What a rank holds after a step; by the ledger, the most that passes of each state."""
    precision, reduce = FORMATS[which]
    model = chain()
    optimizer = torch.optim.AdamW(model.parameters())
    comm = Comm(reduce=reduce, transport="gloo", prefetch=1)
    zero = zeroshard.shard(model, optimizer, stage=stage, precision=precision, comm=comm)
    zero._engine.reduction.pause = 60.0
    zero.record()
    for _ in range(2):
        x = torch.ones(2, 48, requires_grad=True, dtype=next(model.parameters()).dtype)
        model(x).float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    held, passed = {}, dict.fromkeys(("gather", "reduce", "joined", "decoded"), 0)
    for _, _, state, nbytes in zero._engine.ledger.record.held:
        held[state] = nbytes
        now = {"gather": held.get("gather", 0) + held.get("prefetch", 0)}
        passed = {each: max(most, now.get(each, held.get(each, 0))) for each, most in passed.items()}
    rests = {NAMES.get(state, state): nbytes for state, nbytes in zero.ledger().held.items() if nbytes}
    return rests, passed, zero.partition


@pytest.mark.row(58, 102, 104, 105)
@pytest.mark.parametrize("which", FORMATS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_rests_and_passes_is_what_a_run_holds(ranks, stage, which):
    """On each of two ranks: every state, and the most of gathers, of messages, of split masters that are joined, and of
    states in 16 bits that are decoded."""
    precision, reduce = FORMATS[which]
    recipe = formats.sent_by(formats.engines(precision, None), Comm(reduce=reduce))
    for rank, (held, passed, cut) in enumerate(ranks.run(2, passed_by_the_engine, stage, which)):
        planned = states.of_recipe(cut, placements(stage), rank, recipe).states()
        assert planned == {state: held[state] for state in planned} and not {"scales", "master"} & (
            held.keys() - planned
        )
        found = instants(cut, placements(stage), item_sizes(recipe), rank)
        assert {each: max(instant.nbytes.get(each, 0) for instant in found) for each in passed} == passed


@pytest.mark.parametrize("which", ["split", "int8-split", "int8", "states16"])
def test_a_number_is_planned_as_shapes_that_divide_evenly(tmp_path, which):
    """At rest in every tier, and what a step gathers and sums."""
    path = tmp_path / "m.json"
    path.write_text(json.dumps({"a": [1024, 1024], "b": [1024, 1024]}))
    precision, reduce = FORMATS[which]
    for offload in (None, Offload(optimizer="cpu", gradients="cpu"), Offload(parameters="cpu")):
        asked = {"ranks": 4, "precision": precision, "comm": Comm(reduce=reduce), "offload": offload}
        number, shapes = plan_of(params=2 << 20, **asked), plan_of(shapes=path, **asked)
        for one, other in zip(number.stages, shapes.stages, strict=True):
            for held in other.tiers.values():
                held.pop("step", None)  # a counter of each tensor
            assert one.tiers == other.tiers and one.formula == other.formula
            assert (one.traffic.gather, one.traffic.reduce) == (other.traffic.gather, other.traffic.reduce)


def test_a_config_tells_which_weights_are_those_of_linear_layers(tmp_path):
    """All of a llama's matrices but the embedding: the head too, unless it is tied."""
    table = dict(CONFIGS["Llama-3-8B"][1], num_hidden_layers=2, vocab_size=1000)
    precision = Precision(**BF16, fp8=True)
    for tied in (False, True):
        (tmp_path / "config.json").write_text(json.dumps(table | {"tie_word_embeddings": tied}))
        (found,) = zeroshard.plan(tmp_path, stage=1, precision=precision).stages
        embedded, norms = 1000 * 4096, 5 * 4096
        matrices = 2 * (4096 * (4096 + 1024) * 2 + 3 * 4096 * 14336) + embedded * (not tied)
        assert found.states["parameters"] == matrices + 2 * (embedded + norms)
        assert found.states["scales"] == 2 * 7 + (not tied)


REFUSED = {
    "fp8 of a number": ({"params": 7e9, "precision": Precision(fp8=True)}, "a number of parameters does not tell"),
    "patterns of a number": ({"params": 7e9, "precision": Precision(fp8=["*"])}, "a number of parameters does not tell"),
    "fp8 of names": ({"precision": Precision(fp8=True)}, "(?s)names and shapes do not tell.*patterns"),
    "no such": ({"precision": Precision(fp8=["*.wieght"])}, "(?s)fp8 matches no parameter.*wieght"),
    "preset too": ({"precision": Precision(fp8=LINEAR), "preset": "paper"}, "preset and precision both say"),
    "bytes too": ({"precision": Precision(**BF16), "bytes": "parameters=2,gradients=2"}, "bytes and precision both say"),
    "kept": ({"precision": Precision(**BF16, keep=["*"])}, "Precision.keep: for jobs only"),
    "skipped": ({"precision": Precision(nonfinite="skip")}, "Precision.nonfinite: for jobs only"),
    "gradients of what": ({"precision": Precision(grad_dtype=torch.bfloat16)}, "Precision.grad_dtype: for jobs only"),
    "own masters": ({"precision": Precision(**BF16, split_master=True), "optimizer": "pure-bf16"}, "are fp32"),
    "split in backward": (
        {"precision": Precision(**BF16, split_master=True), "optimizer_in_backward": True}, "for jobs only",
    ),
    "no such state": ({"precision": Precision(states={"exp_avg_sqq": torch.bfloat16})}, "(?s)does not keep.*exp_avg_sq"),
    "no states": ({"params": 7e9, "precision": Precision(states={"*": torch.bfloat16}), "optimizer": "sgd"}, "does not keep"),
    "states beside bf16": (
        {"precision": Precision(**BF16, states={"*": torch.bfloat16}), "optimizer": "pure-bf16"}, "updates in float32",
    ),
    "native": ({"comm": Comm(reduce="native")}, "Comm.reduce: for jobs only"),
    "codes between blocks": ({"comm": Comm(reduce="int8"), "layout": Layout(align=64)}, "no cut may fall inside"),
    "codes of experts": (
        {"comm": Comm(reduce="int8"), "ranks": 2, "ep": 2, "layout": Layout(along={"1.1.weight": "edp"})}, "an expert",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_shapes_or_a_number_do_not_tell_is_refused(shapes, name):
    given, says = REFUSED[name]
    with pytest.raises(UserError, match=says):
        plan_of(**{} if "params" in given else {"shapes": shapes}, **given)


def test_the_command_takes_formats_of_shapes_and_of_a_number(shapes, capsys):
    def planned(*words):
        show_plan(as_json=True, **dict(words))
        return json.loads(capsys.readouterr().out)

    at = ("stage", 1), ("ranks", 2)
    (found,) = planned(("shapes", str(shapes)), ("precision", "bf16"), ("fp8", "*.0.weight,*.2.weight"), *at)["stages"]
    of_python = zeroshard.plan(
        shapes, Machine(ranks=2), stage=1, precision=Precision(**BF16, fp8=("*.0.weight", "*.2.weight"))
    )
    assert found["states"] == of_python.json()["stages"][0]["states"]
    whole = planned(("params", "1e9"), ("precision", "fp32"), *at)["recipe"]["bytes_per_parameter"]
    assert whole == {"parameters": 4, "gradients": 4, "m": 4, "v": 4}
    split = planned(("params", "1e9"), ("precision", "bf16-split"), ("reduce", "int8"), *at)["recipe"]
    assert (split["bytes_per_parameter"]["master"], split["sent"]) == (2.125, 1.03125)
    with pytest.raises(InputError, match="a number of parameters does not tell"):
        planned(("params", "1e9"), ("precision", "bf16-fp8"))
