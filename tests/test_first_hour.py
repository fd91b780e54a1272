"""`make gpu`: steps that go on after whatever ends one, and leave what they have found."""

from __future__ import annotations

import json
import sys
import tarfile

import pytest
from bench.gpu import __main__ as runner
from bench.gpu import bundle, steps
from bench.gpu.place import Place
from bench.gpu.record import Record, Wrong
from bench.gpu.steps import STEPS

PLACE = Place("emu", 1)


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
    bundle.write(tmp_path)
    page = (tmp_path / "gpu.md").read_text()
    assert page.startswith("# On 1 x emu, ")
    assert "| 0 | good | passed | 0.0 | 1 | 0 | ! |" in page and "| 1 | bad | failed | 0.0 | 1 | 1 | ! |" in page
    assert "- measured: a case: 2.5\n" in page and "- failed: a case: not so\n" in page
    with tarfile.open(tmp_path / "gpu.tar.gz") as tar:
        assert tar.getnames() == ["gpu/00-good.json", "gpu/01-bad.json", "gpu/gpu.md"]


def test_the_page_has_the_table_of_steps():
    """`python -m bench.gpu.steps` writes it."""
    page = steps.PAGE.read_text()
    assert steps.OPENING in page and steps.written(page) == page


@pytest.mark.slow
def test_steps_are_rehearsed_on_the_emulated_device(tmp_path, monkeypatch):
    """Two of them, whole: what they write has its fields, and nothing in it failed."""
    monkeypatch.setattr(sys, "argv", ["bench.gpu", "--device", "emu", "--out", str(tmp_path), "--step", "0", "2"])
    assert runner.main() == 0
    for number in (0, 2):
        told = json.loads((tmp_path / STEPS[number].file).read_text())
        assert (told["step"], told["device"], told["verdict"]) == (number, "emu", "passed")
        assert {row["verdict"] for row in told["rows"]} <= {"passed", "measured", "skipped"}
        assert all({"case", "verdict", "found"} <= row.keys() for row in told["rows"])
    assert (tmp_path / "gpu.tar.gz").exists()
