"""The processor seconds of test files: what a test's descendants took is its own, whoever ran it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
BURN = "import time\nwhile time.process_time() < 0.1: pass"
TESTS = f"""
import subprocess, sys
import pytest

@pytest.mark.parametrize("case", [1, 2])
def test_of_a_child(case):
    subprocess.run([sys.executable, "-S", "-c", {BURN!r}], check=True)

def test_of_a_grandchild_that_goes_on():
    child = "import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', sys.argv[1]]); print(flush=True); sys.stdin.read()"
    process = subprocess.Popen([sys.executable, "-S", "-c", child, {BURN!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"\\n"  # the grandchild has ended, its parent lives: nobody waited for it here
    globals()["kept"] = process

def test_that_ends_it():
    kept.communicate()
"""


@pytest.mark.parametrize(
    "workers",
    [pytest.param((), id="alone"), pytest.param(("-n", "2", "--dist", "loadfile"), marks=pytest.mark.full, id="xdist")],
)
def test_a_files_processor_seconds_are_those_of_all_its_processes(tmp_path, workers):
    for name in ("test_a.py", "test_b.py"):
        (tmp_path / name).write_text(TESTS)
    words = ["-m", "pytest", "-q", "-p", "seconds", "-p", "no:cacheprovider", "--seconds", "found/here.json", *workers]
    ended = subprocess.run(
        [sys.executable, *words],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(HERE)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stdout
    found = json.loads((tmp_path / "found" / "here.json").read_text())
    assert {file: each["tests"] for file, each in found["files"].items()} == {"test_a.py": 4, "test_b.py": 4}
    for file in ("test_a.py", "test_b.py"):
        functions = {name.partition("::")[2]: spent for name, spent in found["functions"].items() if file in name}
        assert len(functions) == 3
        assert (
            functions["test_of_a_child"] >= 0.16
        )  # twice the 0.1 that a child uses up, less what a clock's tick hides
        assert functions["test_of_a_grandchild_that_goes_on"] >= 0.08
        assert found["files"][file]["seconds"] >= 0.24
    assert found["seconds"] == pytest.approx(sum(each["seconds"] for each in found["files"].values()), abs=0.1)
    assert re.search(r"processor seconds: \d+ of tests, \d+ of collecting: found/here.json", ended.stdout)
