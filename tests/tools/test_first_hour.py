"""`make gpu`: steps that go on after whatever ends one, and leave what they have found."""

from __future__ import annotations

import json
import math
import sys
import tarfile

import pytest
import torch
from bench.gpu import __main__ as runner
from bench.gpu import arithmetic, bundle, steps, training
from bench.gpu.place import Place
from bench.gpu.record import Record, Wrong
from bench.gpu.steps import STEPS

PLACE = Place("emu", 1)
REHEARSED = ("machine", "arithmetic", "speed")  # by the suite; all of them by `make gpu DEVICE=emu`


def raises(error):
    raise error


def test_a_row_that_fails_ends_nothing(tmp_path):
    """The file is whole after each row: what runs, what is wrong by itself, and what raises."""
    path = tmp_path / "00-x.json"
    record = Record(path, PLACE, step=0, name="x", asks="?", decides="!")
    assert json.loads(path.read_text())["verdict"] == "under way"
    assert record.case("fine", lambda: {"bytes": 3}) == {"bytes": 3}
    assert record.case("wrong", raises, Wrong("another bit")) is None
    record.case("broken", raises, KeyError("w"))
    record.skip("absent", "no such tool")
    assert json.loads(path.read_text())["verdict"] == "under way"
    record.write()
    told = json.loads(path.read_text())
    assert (told["verdict"], told["device"], told["devices"], told["decides"]) == ("failed", "emu", 1, "!")
    assert [row["verdict"] for row in told["rows"]] == ["passed", "failed", "failed", "skipped"]
    assert told["rows"][1]["found"] == "another bit"
    assert told["rows"][2]["found"].endswith("KeyError: 'w'\n")
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize(
    ("program", "minutes", "ended"), [("echo dying; exit 3", 1, "exit code 3"), ("sleep 60", 0, "ended after 0 s")]
)
def test_a_step_that_dies_or_hangs_has_a_file_that_says_so(tmp_path, monkeypatch, program, minutes, ended):
    shell = tmp_path / "python"
    shell.write_text(f"#!/bin/sh\n{program}\n")
    shell.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(shell))
    step = STEPS[0]._replace(minutes=minutes)
    monkeypatch.setattr(steps, "STEPS", [step])
    told = runner.one(step, PLACE, tmp_path)
    assert (told["verdict"], told["ended"], told["rows"]) == ("failed", ended, [])
    assert told["output"] == ("dying\n" if minutes else "")
    assert json.loads((tmp_path / step.file).read_text()) == told


def test_a_step_that_takes_more_devices_is_skipped(tmp_path, monkeypatch):
    step = STEPS[0]._replace(least=2)
    monkeypatch.setattr(steps, "STEPS", [step])
    told = runner.one(step, PLACE, tmp_path)
    assert (told["verdict"], told["rows"][0]["found"]) == ("skipped", "it takes 2 devices, and there is 1")


def test_all_of_it_is_one_page_and_one_tar(tmp_path):
    for number, (name, call) in enumerate({"good": lambda: 2.5, "bad": lambda: raises(Wrong("not so"))}.items()):
        record = Record(tmp_path / f"0{number}-{name}.json", PLACE, step=number, name=name, asks="?", decides="!")
        record.measure("a case", call)
        record.write()
    said = bundle.write(tmp_path)
    page = (tmp_path / "gpu.md").read_text()
    assert page.startswith("# On 1 x emu, ")
    assert "| 0 | good | passed | 0.0 | 1 | 0 | ! |" in page and "| 1 | bad | failed | 0.0 | 1 | 1 | ! |" in page
    assert "- measured: a case: 2.5\n" in page and "- failed: a case: not so\n" in page
    with tarfile.open(said.rpartition(" in ")[2]) as tar:
        assert tar.getnames() == ["gpu/00-good.json", "gpu/01-bad.json", "gpu/gpu.md"]


def test_another_bit_on_the_device_is_found():
    made = iter([torch.tensor([1.0, 2.0, math.nan]), torch.tensor([1.0, 2.0000002, math.nan])])
    with pytest.raises(Wrong, match=r"a sum: 1 of 3 elements differ, first at 1: 2.00000023\d* on cpu, 2.0 on the CPU"):
        arithmetic._compare("cpu", lambda put: {"a sum": next(made)})
    want = training.Run([[1.0, 2.0], [3.0, 4.0]], [0.5], {"w": torch.zeros(3)})
    training.compare(want, want)
    for got, said in [
        (want._replace(losses=[[1.0, 2.0], [3.0, 4.5]]), "step 1: losses"),
        (want._replace(norms=[0.25]), "norms"),
        (want._replace(weights={"w": -torch.zeros(3)}), "w: 3 of 3 elements differ"),
    ]:
        with pytest.raises(Wrong, match=said):
            training.compare(got, want)


def test_the_page_has_the_table_of_steps():
    """`python -m bench.gpu.steps` writes it."""
    page = steps.PAGE.read_text()
    assert steps.OPENING in page and steps.written(page) == page


@pytest.mark.slow
def test_steps_are_rehearsed_on_the_emulated_device(tmp_path, monkeypatch):
    """Some of them, whole: what they write has its fields, and nothing in it failed."""
    numbers = [step.number for step in STEPS if step.name in REHEARSED]
    words = ["--device", "emu", "--out", str(tmp_path), "--step", *map(str, numbers)]
    monkeypatch.setattr(sys, "argv", ["bench.gpu", *words])
    assert runner.main() == 0
    for number in numbers:
        told = json.loads((tmp_path / STEPS[number].file).read_text())
        assert (told["step"], told["device"], told["verdict"]) == (number, "emu", "passed")
        assert {row["verdict"] for row in told["rows"]} <= {"passed", "measured", "skipped"}
        assert all({"case", "verdict", "found"} <= row.keys() for row in told["rows"])
    assert len([*tmp_path.glob("gpu-*.tar.gz")]) == 1
