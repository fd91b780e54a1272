"""The commonest mistakes of a first hour: each error says what to write, whole, and what it says works."""

from __future__ import annotations

import re

import pytest
import torch

import zeroshard
from zeroshard import Comm, Layout, Offload, Precision
from zeroshard.engine.guard import ReleasedError
from zeroshard.errors import StateError, UserError

STAGES = (0, 1, 2, 3)


def made():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
    return model, torch.optim.AdamW(model.parameters())


def instead(error):
    """What an error says to write instead."""
    return str(error.value).rpartition("  instead: ")[2]


@pytest.mark.parametrize(
    ("name", "given", "meant"),
    [
        ("precision", "bf16", Precision(param_dtype=torch.bfloat16)),
        ("precision", "BF16", Precision(param_dtype=torch.bfloat16)),
        ("precision", "bf16-mixed", Precision(param_dtype=torch.bfloat16)),
        ("precision", torch.bfloat16, Precision(param_dtype=torch.bfloat16)),
        ("precision", torch.float16, Precision(param_dtype=torch.float16)),
        ("precision", 16, Precision(param_dtype=torch.float16)),
        ("precision", "fp8", Precision(param_dtype=torch.bfloat16, fp8=True)),
        ("precision", torch.float32, Precision()),
        ("offload", "cpu", Offload(optimizer="cpu")),
        ("offload", True, Offload(optimizer="cpu")),
        ("offload", "nvme", Offload(optimizer="nvme", path="a folder on a local disk")),
        ("layout", 25, Layout(bucket_mib=25)),
        ("comm", "gloo", Comm(transport="gloo")),
        ("comm", "native", Comm(reduce="native")),
        ("comm", "nccl", Comm()),
    ],
)
def test_a_word_in_a_policys_place_names_the_policy_that_is_meant(name, given, meant):
    """Whole, so that it can be pasted: what stands there is that policy."""
    with pytest.raises(UserError, match=f"{name}= takes a zeroshard.{type(meant).__name__}") as error:
        zeroshard.shard(*made(), **{name: given})
    said = instead(error).removeprefix(f"{name}=")
    policy = said[: said.rindex(")") + 1] if given != "nccl" else said.partition(",")[0]
    assert eval(policy, {"zeroshard": zeroshard, "torch": torch}) == meant


@pytest.mark.parametrize("given", ["quickly", {"param_dtype": "bf16"}, Precision])
def test_what_means_no_policy_names_its_class(given):
    with pytest.raises(UserError) as error:
        zeroshard.shard(*made(), precision=given)
    assert instead(error) == "precision=zeroshard.Precision(...)"


def test_a_model_without_its_optimizer_is_refused():
    """None has to be said: an optimizer that is made afterwards would update no shards."""
    model, optimizer = made()
    with pytest.raises(UserError, match="shard takes the optimizer too") as error:
        zeroshard.shard(model, stage=3)
    assert instead(error).startswith("shard(model, optimizer, ...); or shard(model, None, ...)")
    assert zeroshard.shard(model, optimizer, stage=3).stage == 3
    assert zeroshard.shard(made()[0], None, stage=3).stage == 3


@pytest.mark.parametrize("device", ["cuda", "cuda:3", "xpu"])
def test_a_device_that_is_not_there_is_named_with_a_line_for_any_machine(device):
    if torch.accelerator.is_available():
        pytest.skip("this machine has an accelerator")
    with pytest.raises(UserError, match="there is no such device") as error:
        zeroshard.shard(*made(), device=device)
    assert f"finds no {device.partition(':')[0]} device on this machine" in str(error.value)
    name, _, line = instead(error).partition("=")
    assert (name, eval(line, {"torch": torch})) == ("device", torch.device("cpu"))


def test_a_device_beyond_the_last_one_is_named(monkeypatch):
    class Two:
        is_available = staticmethod(lambda: True)
        device_count = staticmethod(lambda: 2)

    monkeypatch.setattr(torch, "get_device_module", lambda device: Two)
    with pytest.raises(UserError, match="got: cuda:2 of 2, which count from cuda:0"):
        zeroshard.shard(*made(), device="cuda:2")


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("convert", ["to", "bfloat16", "half"])
def test_a_model_converted_behind_shard_is_told_of_precision(stage, convert):
    """At stage 3 where it is converted, at the others where it is used next; and so it trains in that dtype."""
    dtype = torch.float16 if convert == "half" else torch.bfloat16
    model, optimizer = made()
    zeroshard.shard(model, optimizer, stage=stage)
    with pytest.raises((ReleasedError, StateError), match="converted or moved") as error:
        model.to(dtype) if convert == "to" else getattr(model, convert)()
        model(torch.ones(4, 8))
    said = f"shard(..., precision=Precision(param_dtype={dtype})); or model.to(...) before shard(...)"
    assert instead(error).startswith(said)
    assert f"expected: torch.float32 on cpu\n  got: {dtype} on cpu" in str(error.value)
    model, optimizer = made()
    (policy,) = re.findall(r"precision=(.*?\))\)", instead(error))
    zeroshard.shard(model, optimizer, stage=stage, precision=eval(policy, {"Precision": Precision, "torch": torch}))
    model(torch.ones(4, 8, dtype=dtype)).float().sum().backward()
    optimizer.step()
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
