"""What `plan` is asked of: any form of a model, a machine and a step; what each refuses; arguments of before."""

import inspect
import json
from functools import partial
from pathlib import Path

import pytest
import torch

import zeroshard
from zeroshard import Comm, Layout, Machine, Model, Offload, Precision, Step
from zeroshard.cli.config import in_options
from zeroshard.errors import UserError
from zeroshard.planner.question import KINDS, PLACES, call, flat, from_flat


def test_plan_takes_at_most_twelve_arguments():
    assert len(inspect.signature(zeroshard.plan).parameters) <= 12


def train():
    """Stands for a job's function: it is never called."""
    raise AssertionError


@pytest.mark.parametrize(
    ("model", "form"),
    [
        (7e9, "params"),
        (1, "params"),
        ("7B", "params"),
        ("7e9", "params"),
        ("7_000_000", "params"),
        (Path("nowhere"), "shapes"),
        ("folder", "shapes"),
        ("folder/with:colon", "shapes"),
        ("nowhere.json", "shapes"),
        ("a:b.safetensors", "shapes"),
        ("nowhere.safetensors.index.json", "shapes"),
        (train, "job"),
        (partial(train), "job"),
        ("train:job", "job"),
        ("path/to/train.py:job", "job"),
    ],
    ids=lambda value: type(value).__name__ if callable(value) else f"{value}",  # the same in each of xdist's workers
)
def test_a_model_is_known_by_what_it_looks_like(tmp_path, monkeypatch, model, form):
    (tmp_path / "folder" / "with:colon").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert Model.of(model) == Model(**{form: model})


def test_each_form_is_planned(tmp_path):
    """Equal to what a `Model` of the same says."""
    path = tmp_path / "m.json"
    path.write_text('{"blocks.0.w": [8, 8], "w": [8]}')
    assert zeroshard.plan("72") == zeroshard.plan(72) == zeroshard.plan(Model(72))
    assert zeroshard.plan(path).stages == zeroshard.plan(str(path)).stages == zeroshard.plan(Model(shapes=path)).stages
    assert zeroshard.plan(str(path)).parameters == 72 and zeroshard.plan(str(path)).layout is not None


@pytest.mark.parametrize("model", ["nothing", "7G", "", None, True, [7], Machine(), torch.float32], ids=str)
def test_anything_else_is_refused_with_all_three_forms(model):
    with pytest.raises(UserError, match="plan takes a model") as refused:
        zeroshard.plan(model)
    for form in ('plan("7B")', 'plan("model.safetensors")', 'plan("train:job")'):
        assert form in str(refused.value)


@pytest.mark.parametrize(
    ("kind", "fields", "says"),
    [
        (Model, {}, "Model takes one of params, shapes and job; got: none of them"),
        (Model, {"params": 7, "job": "a:b"}, "got: params and job"),
        (Model, {"params": 0.5}, "Model.params: a positive whole number"),
        (Model, {"shapes": 7}, "Model.shapes is a path"),
        (Model, {"job": 7}, "Model.job is a function, or its name"),
        (Model, {"job": "a:b", "preset": "paper"}, "Model.preset: a job says itself what it holds"),
        (Model, {"job": "a:b", "bytes": "parameters=2", "optimizer": "sgd"}, "Model.bytes and Model.optimizer: a job"),
        (Model, {"params": 7, "preset": "paper", "bytes": "parameters=2"}, "Model.preset and Model.bytes both say"),
        (Model, {"params": 7, "optimizer": 7}, "Model.optimizer is a text"),
        (Model, {"params": 7, "units": 0}, "instead: Model(units=1)"),
        (Model, {"shapes": "m.json", "units": 3}, "Model.units stand for shapes"),
        (
            Machine,
            {"ranks": 0},
            "Machine.ranks must be a whole number of at least 1; got: 0; instead: Machine(ranks=1)",
        ),
        (Machine, {"ranks": 8.0}, "Machine.ranks must be a whole number"),
        (Machine, {"gpu": "h100", "gpu_mem": "80GiB"}, "Machine.gpu and Machine.gpu_mem both say"),
        (Machine, {"gpu": "h201"}, "no such GPU"),
        (Machine, {"gpu": 80}, 'a GPU is named; got: 80; instead: Machine(gpu="h100-80")'),
        (Machine, {"gpu_mem": "80"}, "Machine.gpu_mem: a budget of memory"),
        (Machine, {"host_mem": "80"}, "Machine.host_mem: a budget of memory"),
        (Machine, {"disk": 7}, "Machine.disk: a budget of memory"),
        (
            Machine,
            {"disk_read": 0, "disk_write": 1},
            "Machine.disk_read counts GB/s; got: 0; instead: Machine(disk_read=3.2)",
        ),
        (Machine, {"disk_read": 1.0, "disk_write": "2"}, "Machine.disk_write counts GB/s"),
        (
            Machine,
            {"disk_write": 1},
            "are told together, in GB/s; got: disk_write=1; instead: Machine(disk_read=3.2, disk_write=2.1)",
        ),
        (Machine, {"gpus_per_node": 0}, "instead: Machine(gpus_per_node=1)"),
        (Machine, {"cluster": 7}, "Machine.cluster is a name"),
        (Machine, {"ep": 0}, "instead: Machine(ep=1)"),
        (Step, {"accumulate": 0}, "instead: Step(accumulate=1)"),
        (Step, {"no_sync": 1}, "Step.no_sync is True or False"),
        (Step, {"batch": 0}, "instead: Step(batch=1)"),
        (Step, {"seq": "2K"}, "Step.seq must be a whole number"),
        (Step, {"seconds": 0}, "Step.seconds counts seconds"),
        (Step, {"tokens": 0.5}, "Step.tokens: a positive whole number"),
    ],
)
def test_each_part_refuses_what_it_cannot_be(kind, fields, says):
    with pytest.raises(UserError) as refused:
        kind(**fields)
    assert says in "; ".join(line.strip().rstrip(";") for line in str(refused.value).splitlines())


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"model": "7B", "machine": 8}, "machine= is a Machine"),
        ({"model": "7B", "step": 8}, "step= is a Step"),
        ({"model": "7B", "machine": Machine(ranks=1 << 21)}, "Machine.ranks must be at most 1048576"),
        ({"model": "m.json", "machine": Machine(ranks=1 << 14)}, "Machine.ranks must be at most 8192"),
        ({"model": "7B", "machine": Machine(gpus_per_node=1 << 21)}, "Machine.gpus_per_node must be at most"),
        ({"model": "7B", "machine": Machine(gpus_per_node=8), "comm": Comm(transport="shared")}, "Machine.gpus_per_node asks"),
        ({"model": "7B", "machine": Machine(disk="1TB")}, "Machine.disk is about files"),
        ({"model": "7B", "step": Step(seconds=1.0)}, "Step.seconds is about files"),
        ({"model": "7B", "machine": Machine(ep=2)}, "Layout.along and Machine.ep belong together"),
        ({"model": "7B", "machine": Machine(cluster="a1000")}, "no such machine"),
        ({"model": "a:b", "step": Step(seq=2)}, "Step.seq stands for a job"),
        ({"model": Model(7, preset="paper"), "precision": Precision(param_dtype=torch.bfloat16)}, "Model.preset and precision"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_names_its_fields(asked, says):
    with pytest.raises(UserError) as refused:
        zeroshard.plan(**asked)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ({"params": "7B", "ranks": 8}, 'plan("7B", Machine(ranks=8))'),
        ({"ranks": 8}, 'plan("7B", Machine(ranks=8))'),
        ({"model": "a:b", "ranks": 8}, 'plan("a:b", Machine(ranks=8))'),
        ({"model": train, "gpu": "h100"}, 'plan(train, Machine(gpu="h100"))'),
        ({"shapes": Path("m.json"), "machine": "a100"}, 'plan("m.json", Machine(cluster="a100"))'),
        ({"shapes": "nowhere", "step_time": 2.5}, 'plan(Model(shapes="nowhere"), step=Step(seconds=2.5))'),
        ({"params": 7e9, "preset": "paper"}, 'plan(Model(params=7000000000.0, preset="paper"))'),
        (
            {"model": 7, "machine": Machine(ranks=4), "step": Step(batch=2), "seq": 3, "gpu_mem": "8GB"},
            'plan(7, Machine(ranks=4, gpu_mem="8GB"), step=Step(batch=2, seq=3))',
        ),
        (
            {"params": 7, "no_sync": True, "stage": 2, "comm": Comm(replicas=2), "offload": Offload(optimizer="cpu")},
            'plan(7, step=Step(no_sync=True), stage=2, comm=Comm(replicas=2), offload=Offload(optimizer="cpu"))',
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_argument_of_before_says_the_call_to_write(before, now):
    with pytest.raises(UserError, match="plan takes a model, a machine and a step") as refused:
        zeroshard.plan(**before)
    assert str(refused.value).endswith(f"instead: {now}")
    names = {name: getattr(zeroshard, name) for name in ("Model", "Machine", "Step", "Comm", "Offload")}
    eval(f"f({now.removeprefix('plan(')}", {"f": lambda *_, **__: None, "train": train, **names})  # it can be written


@pytest.mark.parametrize("name", sorted(PLACES))
def test_each_argument_of_before_has_a_place(name):
    """All but the policies', which `planner.options` has."""
    kind, field = PLACES[name]
    model = () if name in KINDS else (9,)
    with pytest.raises(UserError, match=f"got: {name}=") as refused:
        zeroshard.plan(*model, **{name: "2" if name == "machine" else 2})  # there is one now, of another kind
    _, _, now = str(refused.value).partition("instead: ")
    now = now.replace('"2"', "2")
    assert f"{kind.__name__}({field}=2)" in now or f"{kind.__name__}(params=9, {field}=2)" in now or now == "plan(2)"


def test_flat_settings_are_three_parts_and_the_rest():
    settings = {
        "params": "7B",
        "preset": "paper",
        "ranks": 8,
        "machine": "a100",
        "step_time": 2.0,
        "gpu": None,
        "stage": 3,
    }
    model, machine, step, rest = from_flat(settings)
    assert (model, machine) == (Model("7B", preset="paper"), Machine(ranks=8, cluster="a100"))
    assert (step, rest) == (Step(seconds=2.0), {"stage": 3})
    assert flat(model, machine, step) == {k: v for k, v in settings.items() if k not in ("gpu", "stage")}
    wanted = 'plan(Model(params="7B", preset="paper"), Machine(ranks=8, cluster="a100"), step=Step(seconds=2.0))'
    assert call(flat(model, machine, step), {}) == wanted


@pytest.mark.parametrize(
    ("said", "in_words"),
    [
        ("Machine.gpus_per_node: not planned", "--gpus-per-node: not planned"),
        ("Model.preset and precision both say", "--preset and --precision both say"),
        ("Comm.replicas: Machine.cluster compares them", "--replicas: --machine compares them"),
        ("no such GPU; instead: Machine(gpu_mem=\"80GiB\")", "no such GPU; instead: --gpu-mem 80GiB"),
        ("Step.seconds counts seconds; instead: Step(seconds=2.5)", "--step-time counts seconds; instead: --step-time 2.5"),
        ('name a job, or Model(..., preset="paper")', "name a job, or --preset paper"),
        ("Step(batch=1, seq=2048) beside it", "--batch 1, --seq 2048 beside it"),
        ("Layout.along and Machine.ep belong together", "--experts and --ep belong together"),
    ],
)  # fmt: skip
def test_the_command_names_options_where_a_field_is_named(said, in_words):
    names = (
        "gpus_per_node",
        "preset",
        "precision",
        "replicas",
        "machine",
        "gpu",
        "gpu_mem",
        "step_time",
        "batch",
        "seq",
    )
    assert in_options(UserError(said), (*names, "experts", "ep")) == in_words


def test_one_machine_serves_many_plans(tmp_path):
    """Of any form of a model."""
    machine = Machine(ranks=4, gpus_per_node=2)
    (tmp_path / "m.json").write_text(json.dumps({"w": [8, 8]}))
    for model in (64, tmp_path / "m.json"):
        (found,) = zeroshard.plan(model, machine, stage=1, layout=Layout()).stages
        assert found.links is not None
