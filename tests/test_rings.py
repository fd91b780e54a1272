"""Features can be taken out: without its files a build does all that does not ask for it, and refuses what does by name."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import zeroshard
from without import MISSING
from zeroshard import hooks

PACKAGE = Path(zeroshard.__file__).parent
HERE = Path(__file__).parent
BESIDE = {
    "features.int8_gradients": ["arithmetic/int8.py"],
    "features.replica_chain": ["comm/replicate_axis.py"],
    "features.automatic_offload": ["planner/choosing.py"],
    "features.state_formats": ["arithmetic/narrow.py", "arithmetic/philox.py"],
}  # files that are a feature's too; the planner counts by arithmetic/fp8.py
# Steps at all stages, gradients, norms, construction and checkpoints.
WITHOUT = [
    "test_bits.py", "test_gradients.py", "test_clipping.py", "test_construct.py", "test_checkpoint.py", "test_precision.py",
]  # fmt: skip
# Beside a feature that another one might be taken for: tensor parallelism has replicas of what is not cut.
ALSO = {"features.replica_chain": ["test_tensor_parallel.py"]}
ASKING = {"features.nonfinite": 1, "features.nvme": 1}  # of these tests ask for it, and `without.py` skips them
# The arguments of `shard` that ask for it.
ASKS = {
    "features.nonfinite": 'precision=zeroshard.Precision(nonfinite="raise")',
    "kernels.fused": '**(os.environ.__setitem__("ZEROSHARD_KERNELS", "1") or {})',
    "features.activations": 'offload=zeroshard.Offload(activations="cpu")',
    "features.recompute": "layout=zeroshard.Layout(recompute=True)",
    "features.fp8_parameters": "precision=zeroshard.Precision(param_dtype=torch.bfloat16, fp8=True)",
    "features.split_master": "precision=zeroshard.Precision(param_dtype=torch.bfloat16, split_master=True)",
    "features.int8_gradients": 'comm=zeroshard.Comm(reduce="int8")',
    "features.replica_chain": "comm=zeroshard.Comm(group=Simulated(0, 2), replicas=2)",
    "features.two_level": "comm=zeroshard.Comm(group=Simulated(0, 2), hosts=2)",
    "features.nvme": 'offload=zeroshard.Offload(optimizer="nvme", path="/tmp")',
    "features.device_step": 'offload=zeroshard.Offload(optimizer="cpu", step="device")',
    "features.state_formats": 'precision=zeroshard.Precision(states={"*": torch.bfloat16})',
    "features.automatic_offload": 'offload=zeroshard.Offload("auto", gpu_mem="1GB")',
    "features.shared_parameters": "comm=zeroshard.Comm(group=Simulated(0, 2)), offload=zeroshard.Offload(parameters='shared')",
    "features.experts": 'layout=zeroshard.Layout(along={"*": "ep"})',
    "features.per_source_gradients": 'layout=zeroshard.Layout(along={"*": "ep"}, apart=True)',
    "features.optimizer_in_backward": "optimizer_in_backward=True",
}


def built_without(names, folder):
    """A copy of the package from which some features' files were taken."""
    shutil.copytree(PACKAGE, folder / "zeroshard", ignore=shutil.ignore_patterns("__pycache__"))
    for name in names:
        for file in [f"{name.replace('.', '/')}.py", *BESIDE.get(name, [])]:
            (folder / "zeroshard" / file).unlink()
    return {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}


def test_every_feature_that_settings_can_ask_for_has_a_program_here():
    assert {name for name, (words, _) in hooks.FILES.items() if words} == {
        *ASKS,
        "features.moving_average",
        "features.batches",
        "features.replay",
        "features.generation",
    }


@pytest.mark.parametrize(
    "name",
    [name if name == "features.replica_chain" else pytest.param(name, marks=pytest.mark.full) for name in hooks.FILES],
)
def test_a_build_without_a_feature_refuses_what_asks_for_it(name, tmp_path):
    """Before anything is built. What does not ask for it trains."""
    program = textwrap.dedent(f"""
        import os, sys, torch, zeroshard
        from zeroshard.policies.comm import Simulated

        def train(**settings):
            model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            zero = zeroshard.shard(model, optimizer, **settings)
            model(torch.ones(2, 8, dtype=next(model.parameters()).dtype)).sum().backward()
            optimizer.step()

        train(stage=3)
        assert zeroshard.__file__.startswith({str(tmp_path)!r})
        assert len(zeroshard.hooks.features()) == {len(hooks.FILES) - 1}
        if {ASKS.get(name, "")!r}:
            try:
                zeroshard.shard(torch.nn.Linear(8, 8), None, stage=2, {ASKS.get(name, "")})
            except zeroshard.Error as error:
                print(error)
    """)
    run = [sys.executable, "-c", program]
    told = subprocess.run(
        run, env=built_without([name], tmp_path), capture_output=True, text=True, timeout=60, check=False
    )
    assert told.returncode == 0, told.stderr
    if name in ASKS:  # others are asked for by a call, or by a device alone
        assert "without a feature that the settings ask for" in told.stdout
        assert f"expected: zeroshard/{name.replace('.', '/')}.py" in told.stdout


def passes_without(names, folder):
    """Tests that ask for a feature are skipped by `without.py`, and are known."""
    env = built_without(names, folder)
    select = ["-m", "not slow and not full", "--worlds=plain", "-p", "no:cacheprovider", "-p", "without", "-q", "-rs"]
    also = [file for name in names for file in ALSO.get(name, []) if len(names) == 1]
    run = [sys.executable, "-m", "pytest", *select, *WITHOUT, *also]
    told = subprocess.run(run, cwd=HERE, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert told.returncode == 0, told.stdout[-3000:]
    skipped = sum(int(count) for count in re.findall(rf"SKIPPED \[(\d+)\].*{MISSING}", told.stdout))
    assert skipped == sum(ASKING.get(name, 0) for name in names)
    assert int(re.search(r"(\d+) passed", told.stdout)[1]) > 170 - skipped


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_tests_of_the_rest_pass_without_any_feature(tmp_path):
    passes_without([*hooks.FILES], tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", hooks.FILES)
def test_the_tests_of_the_rest_pass_without_one_feature(name, tmp_path):
    passes_without([name], tmp_path)


@pytest.mark.heavy
@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("features.moving_average", "average(0.9)"),
        ("features.replay", "replay(print)"),
        ("features.generation", "generating()"),
    ],
)
def test_a_build_without_a_feature_refuses_its_call(name, call, tmp_path):
    program = f"import torch, zeroshard; zeroshard.shard(torch.nn.Linear(4, 4), None, stage=2).{call}"
    env = built_without([name], tmp_path)
    told = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    file, verb = name.replace(".", "/"), call.partition("(")[0]
    assert f"expected: zeroshard/{file}.py" in told.stderr and f"zero.{verb}(...)" in told.stderr


def test_manifests_name_themselves_and_a_page():
    """Each has a name, a page of the documents, and answers at least one hook."""
    found = [importlib.import_module(f"zeroshard.{name}").FEATURE for name in hooks.FILES]
    assert len({feature.name for feature in found}) == len(found) == len(hooks.features())
    for feature in found:
        answered = {name for name in vars(type(feature)) if not name.startswith("_")} - {"name", "page"}
        assert answered and answered <= set(vars(hooks.Feature)), feature.name
        assert (HERE.parent / "docs" / feature.page.partition("#")[0]).exists(), feature.page
