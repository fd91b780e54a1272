"""A model on the CPU that is sharded onto another device, of which CI has one (plain_device): each body in a process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import reference
import zeroshard
from test_undo import Boom, Tripwire, armed, facts
from zeroshard import Precision

HERE = Path(__file__).parent
STAGES = (0, 1, 2, 3)


class Net(nn.Module):
    """Tied and frozen weights, a buffer, an attribute and a hook on parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.register_buffer("shift", torch.randn(6))
        self.last.weight = self.first.weight
        self.middle.bias.requires_grad_(False)
        self.first.bias.mine = "kept"
        self.heard: list[torch.Tensor] = []
        self.first.bias.register_hook(lambda gradient: self.heard.append(gradient.cpu()))

    def forward(self, x):
        return self.last(self.middle((self.first(x) + self.shift.to(x.dtype)).tanh()))


def build(*, stepped):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if stepped:
        train(model, optimizer, "cpu", 0)
    return model, optimizer


def train(model, optimizer, device, step):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(4, 6, generator=generator).to(device)
    model(x.to(model.first.weight.dtype)).float().square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def moved(stepped, precision):
    """Per stage the weights, the buffers and what a hook heard, of a model that was on the CPU when it was sharded."""
    found = []
    for stage in STAGES:
        model, optimizer = build(stepped=stepped)
        held = [id(parameter) for parameter in model.parameters()]
        zero = zeroshard.shard(model, optimizer, stage=stage, precision=precision, device="emu")
        for step in (1, 2):
            train(model, optimizer, "emu", step)
        assert [id(parameter) for parameter in model.parameters()] == held
        assert {each.device.type for each in (*model.parameters(), *model.buffers())} == {"emu"}
        assert model.first.bias.mine == "kept"
        assert model.last.weight is model.first.weight
        with zero.gathered():
            found.append({name: each.cpu() for name, each in model.state_dict().items()})
        found[-1] |= {f"heard {at}": each for at, each in enumerate(model.heard)}
    return found


def all_moved():
    for stepped in (False, True):
        for dtype in (None, torch.bfloat16):
            precision = Precision(param_dtype=dtype)
            first, *others = moved(stepped, precision)
            for other in others:
                reference.assert_same(other, first)
            if dtype is None:
                model, optimizer = build(stepped=stepped)
                for step in (1, 2):
                    train(model, optimizer, "cpu", step)
                want = dict(model.state_dict()) | {f"heard {at}": each for at, each in enumerate(model.heard)}
                reference.assert_same(first, want)


def undone():
    for stage in STAGES:
        model, optimizer = build(stepped=True)
        before = facts(model, optimizer)
        for at in (1, 200, 600, 1000):
            with pytest.raises(Boom):
                armed(model, optimizer, Tripwire(at, "line"), stage=stage, device="emu")
            for what, now in zip(before, facts(model, optimizer), strict=True):
                assert what == now, (stage, at)


def in_a_process(body):
    code = f"import plain_device, test_other_device; test_other_device.{body.__name__}()"
    environment = os.environ | {"PYTHONPATH": f"{HERE}:{os.pathsep.join(sys.path)}"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


def test_a_model_on_the_cpu_is_sharded_onto_another_device():
    """Parameters stay the same objects with their ties, hooks and attributes; the bits are those of plain PyTorch at
    every stage, with states of steps before and without."""
    in_a_process(all_moved)


@pytest.mark.full
@pytest.mark.row(78)
def test_a_shard_onto_another_device_that_fails_leaves_the_model_on_the_cpu():
    in_a_process(undone)
