"""Bugs of other engines, each as its job in examples/referee shows it: `make referee`. The page lists the same jobs and pins."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import pages
from zeroshard.runlog.parting import part
from zeroshard.runlog.read import read

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "referee"
PAGE = ROOT / "docs" / "referee.md"
ENGINES = Path(sys.prefix) / "engines"
MISSING = "missing in theirs: backward"

JOBS = {  # step, first tensor, kind, and how what diff says begins
    "deepspeed_7718": (0, "0.weight", "micro-batches", f"{MISSING} 0, backward 1"),
    "deepspeed_7967": (0, "0.weight", "micro-batches", f"{MISSING} 2, backward 3, backward 4, backward 5"),
    "deepspeed_7981": (0, "0.weight", "micro-batches", f"{MISSING} 0, backward 1"),
    "deepspeed_8152": (0, "0.weight", "gradients", "the gradients differ by more than weights of micro-batches"),
    "deepspeed_8382": (0, "0.weight", "gradients", "the gradients differ by more than weights of micro-batches"),
    "lightning_19987": (1, "0.weight", "factor", "gradients in theirs are 0.5 times those in right: the micro-batches, 2"),
    "open_instruct_1498": (0, "0.weight", "micro-batches", f"{MISSING} 0, backward 1"),
    "transformers_37766": (0, "embedding.weight", "weights of micro-batches", "they count otherwise in theirs: backward 0 0.625,"),
    "transformers_46731": (0, "embedding.weight", "factor", "gradients in theirs are 4 times those in right"),
    "verl_7493": (0, "0.weight", "weights of micro-batches", "they count otherwise in theirs: backward 0 0.5,"),
}  # fmt: skip
FIXED = (None, "order of a sum", "losses")  # rounding; and the Trainer logs a loss after another division


@pytest.mark.referee
@pytest.mark.skipif(not ENGINES.exists(), reason="make referee")
@pytest.mark.parametrize("job", JOBS)
def test_a_job_shows_its_bug(job, tmp_path):
    command = [sys.executable, FOLDER / f"{job}.py", tmp_path / "runs"]
    path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=280, check=False, env={**os.environ, "PYTHONPATH": path}
    )
    assert done.returncode == 0, done.stderr
    runs = {folder.name: read(folder) for folder in (tmp_path / "runs").iterdir() if folder.name != "trainer"}
    step, name, kind, says = JOBS[job]
    found = part(runs["right"], runs["theirs"])
    said = found.says.replace(f"{tmp_path / 'runs'}/", "")
    assert (found.step, found.what, found.name, found.kind) == (step, "gradients", name, kind)
    assert said.startswith(says)
    assert part(runs["right"], runs["zeroshard"]) is None
    if "fixed" in runs:
        fixed = part(runs["right"], runs["fixed"])
        assert (fixed and fixed.kind) in FIXED
    assert pages.is_shown(shown(job), done.stdout, pages.DIGITS), done.stdout


def shown(job):
    """What the page shows of a job's output."""
    (report,) = re.findall(rf"^### [^\n]*`{job}`.*?(?=^##|\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (block,) = re.findall(r"^```text\n(.*?)^```", report, re.MULTILINE | re.DOTALL)
    return block


def test_the_page_the_folder_and_the_pins_agree():
    jobs = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "shared")
    assert jobs == sorted(JOBS) == sorted(re.findall(r"^### .*?`(\w+)`", PAGE.read_text(), re.MULTILINE))
    lines = (FOLDER / "engines.txt").read_text().splitlines()
    engines = {line.split()[0] for line in lines}
    pinned = {line for line in (FOLDER / "requirements.txt").read_text().splitlines() if line[0] != "#"}
    assert all("==" in pin for pin in pinned | {pin for line in lines for pin in line.split()})
    used = set()
    for job in jobs:
        told = (FOLDER / f"{job}.py").read_text()
        versions = re.findall(r'"(\w+==[\d.]+)"', told)
        assert versions and set(versions) <= engines | pinned, job
        assert len(told.splitlines()) < 50
        used |= set(versions)
        report = re.search(rf"^### [^\n]*`{job}`.*?(?=^##|\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL)[0]
        words = " ".join(report.split()).replace("PyTorch", "torch").replace("DeepSpeed", "deepspeed")
        assert all(version.replace("==", " ") in words for version in versions), job
        assert f"/{job.rpartition('_')[2]}" in report
        assert says_the_same(JOBS[job], shown(job)), job
    assert engines <= used


def says_the_same(expected, block):
    step, name, kind, says = expected
    told = " ".join(block.split())
    return f"they part at step {step}, gradients: {name}" in told and f"{kind}: {says}" in told
