"""The policies of a plan and of a command line: the same objects as `shard` takes, from the same words everywhere."""

import pytest
import torch

from flat import plan_of
from zeroshard import Comm, Layout, Precision
from zeroshard.cli.policies import NAMES, policies, precision_of
from zeroshard.errors import UserError
from zeroshard.planner.options import OPTIONS, in_policies

NOTHING = {"precision": None, "layout": Layout(), "comm": Comm(), "optimizer_in_backward": False}
NUMBER = {"params": 1000, "ranks": 4}


@pytest.mark.parametrize("name", OPTIONS)
def test_an_argument_that_a_policy_has_now_says_which(name):
    with pytest.raises(UserError, match=f"no {name}") as refused:
        plan_of(**NUMBER, **{name: 2})
    assert f"instead: {in_policies(name)}" in str(refused.value)
    policy, _, call = in_policies(name).partition("=")
    values = {"reduce": "'int8'", "transport": "'shared'", "bounds": "'tensor'", "grad_dtype": "torch.bfloat16"}
    made = eval(call.replace("...", values.get(name, "True" if name == "overlap" else "2")))
    assert type(made).__name__.lower() == policy  # what it says can be written


def test_an_argument_that_never_was_is_pythons_error():
    with pytest.raises(TypeError, match="unexpected keyword argument 'rank'"):
        plan_of(**NUMBER, rank=2)


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        ({"precision": Precision(nonfinite="skip")}, "Precision.nonfinite"),
        ({"precision": Precision(grad_dtype=torch.bfloat16)}, "Precision.grad_dtype"),
        ({"layout": Layout(recompute=True)}, "Layout.recompute"),
        ({"layout": Layout(units=["blocks.*"])}, "Layout.units"),
        ({"layout": Layout(ignore=["w"])}, "Layout.ignore"),
        ({"comm": Comm(release_after_forward=False)}, "Comm.release_after_forward"),
        ({"comm": Comm(reduce="native")}, "Comm.reduce"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_only_a_jobs_plan_counts_is_refused_of_a_number_and_of_shapes(tmp_path, policy, says):
    (tmp_path / "m.json").write_text('{"blocks.0.w": [8, 8], "w": [8]}')
    for model in ({"params": 1000}, {"shapes": tmp_path / "m.json"}):
        with pytest.raises(
            UserError, match=rf"^{says}\b.*: (for jobs only|it is about activations, of jobs, or of so many tokens)"
        ):
            plan_of(**model, ranks=4, **policy)


def test_a_group_is_of_a_run():
    with pytest.raises(UserError, match="Comm.group is of a run"):
        plan_of(**NUMBER, comm=Comm(group=object()))


@pytest.mark.parametrize("prefetch", [0, 3])
def test_a_zero_is_given_too(prefetch):
    assert policies({"prefetch": prefetch})["comm"] == Comm(prefetch=prefetch)


def test_policies_as_by_default_change_nothing(tmp_path):
    (tmp_path / "m.json").write_text('{"blocks.0.w": [8, 8], "w": [8]}')
    for model in ({"params": 1000}, {"shapes": tmp_path / "m.json"}):
        plain = plan_of(**model, ranks=4)
        assert plan_of(**model, ranks=4, precision=Precision(), layout=Layout(), comm=Comm()) == plain


def test_options_without_a_value_are_policies_as_by_default():
    assert policies({}) == policies(dict.fromkeys(NAMES)) == NOTHING


def test_an_option_is_a_field_of_its_policy():
    given = {
        "bounds": "tensor", "align": "*.w=256", "bucket_mib": 2.5, "checkpoint": True, "whole": "a,b", "experts": "*.x",
        "matrices": "*.qkv=3,*.y=first",
        "prefetch": 3, "replicas": 2, "hosts": 1, "transport": "shared", "optimizer_over": "all", "timeout": 5.0, "overlap": True,
        "reduce": "ordered", "precision": "bf16", "grad_dtype": "bf16", "fp8": "*.w,*.v", "optimizer_in_backward": True,
    }  # fmt: skip
    assert {*given} == NAMES
    assert policies(given) == {
        "precision": Precision(torch.bfloat16, grad_dtype=torch.bfloat16, cast_inputs=True, fp8=("*.w", "*.v")),
        "layout": Layout(
            "tensor",
            2.5,
            {"*.w": 256},
            recompute=True,
            whole=("a", "b"),
            along={"*.x": "edp"},
            matrices={"*.qkv": 3, "*.y": "first"},
        ),
        "comm": Comm(prefetch=3, replicas=2, hosts=1, transport="shared", optimizer="all", timeout=5.0),
        "optimizer_in_backward": True,
    }


@pytest.mark.parametrize(
    ("words", "made"),
    [
        (("fp32", "fp32"), Precision(grad_dtype=torch.float32)),
        (("bf16",), Precision(torch.bfloat16, cast_inputs=True)),
        (("fp32-fp8",), Precision(fp8=True)),
        (("bf16-split",), Precision(torch.bfloat16, cast_inputs=True, split_master=True)),
        (("fp32-fp8", None, "*.w"), Precision(fp8=("*.w",))),
        (("fp32-states16",), Precision(states={"*": torch.bfloat16})),
        (
            ("bf16-states16-drawn",),
            Precision(torch.bfloat16, cast_inputs=True, states={"*": torch.bfloat16}, rounding="stochastic"),
        ),
        (("bf16-fp8", "bf16"), Precision(torch.bfloat16, grad_dtype=torch.bfloat16, cast_inputs=True, fp8=True)),
    ],
)
def test_words_of_a_precision(words, made):
    assert precision_of(*words) == made


@pytest.mark.parametrize(("words", "says"), [(("fp8",), "no such precision"), (("bf16", "fp8"), "no such grad_dtype")])
def test_other_words_are_refused(words, says):
    with pytest.raises(UserError, match=says):
        precision_of(*words)
