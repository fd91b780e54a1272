"""Every public name says what its parameters are, what it raises, and how it is used: examples are run."""

import doctest
import inspect
import os
import re
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import zeroshard
from zeroshard.integrations.settings import Settings
from zeroshard.testing import Recorded, assert_same_bits
from zeroshard.worlds.world import World

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
METHODS = {f"Zero.{name}": method for name, method in vars(zeroshard.Zero).items() if not name.startswith("_")}
BESIDE = {"Settings": Settings, "World.run": World.run, "World.close": World.close,
          "Recorded.log": Recorded.log, "assert_same_bits": assert_same_bits}  # fmt: skip
NAMES = {**{name: getattr(zeroshard, name) for name in zeroshard.__all__}, **METHODS, **BESIDE}
FIELD = re.compile(r"^ *(\w+(?:, \w+)*): ", re.MULTILINE)
# Beside what every call of a sharded model raises (`Zero`), or nothing, as they only tell what is there.
RAISE_NOTHING = {"Zero.no_sync", "Zero.ledger", "Zero.metrics", "World.close", "Error", "Settings"}


def said(what):
    return inspect.getdoc(what) or ""


def parameters(what):
    if isinstance(what, property) or what is zeroshard.Zero:
        return set()  # `shard` makes it
    return {name for name in inspect.signature(what).parameters if name != "self"}


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_is_explained(name):
    told = {each for match in FIELD.finditer(said(NAMES[name])) for each in match[1].split(", ")}
    assert parameters(NAMES[name]) - told == set()


@pytest.mark.parametrize("name", [name for name, what in NAMES.items() if not isinstance(what, property)])
def test_errors_are_named(name):
    assert name in RAISE_NOTHING or re.search(r"[Rr]aises? .*`\w+Error`", said(NAMES[name]).replace("\n", " "))


def test_only_public_names_are_on_the_page():
    """No more of `Zero` than its own text lists, and all of `zeroshard.__all__`."""
    listed = set(re.findall(r"\b\w+\b", re.search(r"in a step.*?\n\n", said(zeroshard.Zero), re.DOTALL)[0]))
    assert {name.removeprefix("Zero.") for name in METHODS} - {"seed"} <= listed
    assert {name for name in zeroshard.__all__ if f"::: zeroshard.{name}\n" not in PAGE} == set()


def scope(name, tmp_path):
    """What the examples find: a model of one layer, its optimizer, batches, and what `shard` returned of these."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    found = {"batch": torch.ones(4, 8), "loader": [torch.ones(4, 8)] * 3, "served": {}}
    found |= {"model": model, "optimizer": optimizer, "dcp": dcp, "os": os, "signal": signal}
    if name == "load":
        zeroshard.shard(torch.nn.Linear(8, 8), None).export("weights")
    if name in METHODS:
        zero = found["zero"] = zeroshard.shard(model, optimizer)

        def forward_backward(batch):
            loss = model(batch).square().mean()
            loss.backward()
            return loss.item()

        found["forward_backward"] = forward_backward
        assert zero.world_size == 1
    if name == "Recorded.log":
        found["recorded"] = Recorded(tmp_path / "now", tmp_path / "kept")
    return found | {"torch": torch, "zeroshard": zeroshard}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore:torch.distributed")
def test_examples_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    handlers = {each: signal.getsignal(each) for each in (signal.SIGTERM,)}
    test = doctest.DocTestParser().get_doctest(said(NAMES[name]), scope(name, tmp_path), name, None, 0)
    assert test.examples
    told = []
    try:
        ran = doctest.DocTestRunner().run(test, out=told.append)
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)
    assert ran.failed == 0, "".join(told)
