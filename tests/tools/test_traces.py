"""Traces of run logs: the first module that computes otherwise, on another processor or by a planted kernel."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pages
import zeroshard
from zeroshard.cli.main import app
from zeroshard.errors import UserError
from zeroshard.runlog.parting import part
from zeroshard.runlog.read import read

# What each rank of two processors runs: weights and inputs are drawn as integers, so that all start from equal bits.
JOB = """
import sys, torch, zeroshard
from torch import nn

kind, folder = sys.argv[1:]
generator = torch.Generator().manual_seed(0)
drawn = lambda *shape: torch.randint(-512, 512, shape, generator=generator) / 256
middle = {"softmax": nn.Softmax(-1), "gelu": nn.GELU("tanh"), "tanh": nn.Tanh()}[kind]
model = nn.Sequential(nn.Linear(64, 64), middle, nn.Linear(64, 4))
with torch.no_grad():
    for param in model.parameters():
        param.copy_(drawn(*param.shape) / 16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with zeroshard.RunLog(folder, model, optimizer, trace=True, samples=4096) as log:
    for step in range(2):
        loss = model(drawn(16, 64)).square().mean()
        loss.backward()
        log.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
"""


class Block(nn.Module):
    """A module that computes between its own: a mistake there is its own."""

    def __init__(self):
        super().__init__()
        self.first, self.act, self.last = nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 2)
        self.slip = ""

    def forward(self, x):
        hidden = self.act(self.first(x))
        if self.slip == "between":
            hidden = hidden * (1 + 2**-22)
        return self.last(hidden)


class Other(torch.autograd.Function):
    """The identity, whose backward rounds otherwise."""

    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        return gradient * (1 + 2**-22)


def train(folder, slip="", trace=True):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), Block())
    model[1].slip = slip
    if slip == "act":
        model[1].act.register_forward_hook(lambda module, args, output: output * (1 + 2**-22))
    if slip == "backward of act":
        model[1].act.register_forward_pre_hook(lambda module, args: (Other.apply(args[0]),))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with zeroshard.RunLog(folder, model, optimizer, trace=trace, samples=64) as log:
        for step in range(2):
            for turn in range(2):
                x = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + turn + (slip == "data")))
                loss = F.mse_loss(model(x), torch.ones(3, 2)) * (2 if slip == "factor" else 1)
                loss.backward()
                log.backward(loss)
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize(
    ("slip", "kind", "direction", "module", "alike"),
    [
        ("act", "kernel", "forward", "1.act", True),
        ("between", "kernel", "forward", "1", True),
        ("backward of act", "kernel", "backward", "1.act", True),
        ("data", "data", "forward", "0", False),
        ("factor", "factor", "backward", "1.last", False),
    ],
)
def test_the_first_call_that_differs_is_named(tmp_path, slip, kind, direction, module, alike):
    """Where it was given the same, it is the kind; where it was not, the kind stays what the numbers say."""
    for name, planted in (("right", ""), ("wrong", slip)):
        train(tmp_path / name, planted)
    found = part(read(tmp_path / "right"), read(tmp_path / "wrong"))
    traced = found.traced
    assert (found.kind, found.step) == (kind, 0)
    assert (traced.direction, traced.module, traced.alike, traced.call, traced.rank) == (direction, module, alike, 0, 0)
    if alike:
        assert 1 <= traced.ulps <= 4
        assert f"{traced.direction} of {module} (" in found.says


def test_a_trace_has_each_call_in_order_and_changes_no_bit(tmp_path):
    """Forward from the inside out, backward from the end; the same weights as without."""
    for trace in (True, False):
        train(tmp_path / str(trace), trace=trace)
    traced, plain = (read(tmp_path / name) for name in ("True", "False"))
    assert part(traced, plain) is None
    calls = traced.first.steps[0].calls
    names = ["0", "1.first", "1.act", "1.last", "1", ""]
    backward = ["1.last", "1", "", "1.act", "1.first", "0"]
    one = [("forward", name) for name in names] + [("backward", name) for name in backward]
    assert [(call.direction, call.module) for call in calls] == one * 2
    assert [call.call for call in calls] == [0] * 12 + [1] * 12
    assert calls[1].inputs == [calls[0].outputs[0].digest]
    assert plain.first.steps[0].calls == []


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, which compiling imports
def test_traces_of_compiled_models_are_refused(tmp_path):
    model = nn.Sequential(torch.compile(nn.Linear(2, 2)))
    with pytest.raises(UserError, match="the modules of a compiled model do not run one by one"):
        zeroshard.RunLog(tmp_path / "run", model, trace=True)


def instructions():
    """The sets of instructions that torch has kernels for here, from the fewest on."""
    found = ["default", "avx2", "avx512"]
    own = torch.backends.cpu.get_cpu_capability().lower()
    return found[: found.index(own) + 1] if own in found else [own]


def on(kinds, kind, tmp_path):
    for capability in kinds:
        env = {**os.environ, "ATEN_CPU_CAPABILITY": capability, "OMP_NUM_THREADS": "1"}
        words = [sys.executable, "-c", JOB, kind, str(tmp_path / capability)]
        subprocess.run(words, env=env, check=True, timeout=120)
    return [str(tmp_path / capability) for capability in kinds]


@pytest.mark.heavy
@pytest.mark.full
@pytest.mark.parametrize(
    ("kinds", "kind", "named"),
    [(("default", "avx2"), "gelu", "GELU"), (("avx2", "avx512"), "softmax", "Softmax")],
)
def test_of_two_processors_the_first_module_that_differs_is_named(tmp_path, capsys, monkeypatch, kinds, kind, named):
    """The same job on two sets of instructions. The matrix product before it is MKL's, and has the same bits on both."""
    if not set(kinds) <= set(instructions()):
        pytest.skip(f"this processor has {instructions()}")
    runs = on(kinds, kind, tmp_path)
    assert app(["diff", *runs, "--json"], standalone_mode=False) == 1
    found = json.loads(capsys.readouterr().out)
    first = found["first_difference"]
    assert found["processors"] == [each.upper() for each in kinds]
    assert first["kind"] == "kernel" and first["step"] == 0
    assert (first["traced"]["module"], first["traced"]["kind"], first["traced"]["alike"]) == ("1", named, True)
    assert first["traced"]["ulps"] >= 1
    app(["diff", *runs], standalone_mode=False)
    shown = capsys.readouterr().out
    assert f"first call that differs: forward of 1 ({named}), call 0 of rank 0" in shown
    assert all(f", {each.upper()}" in shown for each in kinds)
    if kind == "softmax":
        monkeypatch.chdir(tmp_path)
        Path("runs").symlink_to(tmp_path)
        app(["diff", *(f"runs/{each}" for each in kinds)], standalone_mode=False)
        assert pages.is_shown(pages.shown("diff.md", "runs/avx2"), capsys.readouterr().out, pages.DIGITS, "ULPs?")
