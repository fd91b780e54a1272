"""Plans, pages and looks at checkpoints where torch is not installed, and off Linux; all else says what it needs."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ranks
import zeroshard
from zeroshard import Machine, Model
from zeroshard.errors import UserError
from zeroshard.planner import clock, gpus
from zeroshard.planner.machines import KNOWN_BY, MACHINES

ROOT = Path(__file__).parents[2]
NEEDS = "needs torch and numpy and safetensors: pip install '.[torch]' in a clone of zeroshard"
ELSEWHERE = "runs on Linux only, and this is {}; `zeroshard plan` and `explain` work here"
MAC = ", and `ckpt inspect` and `ckpt verify`"


def said(platform, *words):
    """(The last line, the exit code) of the command there."""
    command = [sys.executable, ROOT / "tests" / "laptop.py", platform, *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    return (ranks.untimed(done.stderr) or done.stdout).rstrip().splitlines()[-1], done.returncode


@pytest.mark.heavy
@pytest.mark.parametrize("platform", ["linux", "darwin", "win32"])
@pytest.mark.parametrize(
    "words",
    [
        "--params 70B --ranks 64 --units 80 --gpu h200 --offload-optimizer cpu",
        "--params 7B --ranks 8 --machine h100",
        "--shapes docs/shapes/gpt2 --ranks 8 --optimizer adam-8bit",
    ],
)
def test_a_plan_needs_no_torch_and_no_linux(platform, words):
    """The same answer, to the last letter."""
    there = subprocess.run(
        [sys.executable, ROOT / "tests" / "laptop.py", platform, "plan", *words.split(), "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    here = subprocess.run(
        [sys.executable, "-m", "zeroshard", "plan", *words.split(), "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert there.stdout == here.stdout and len(there.stdout) > 1000


def made(tmp_path):
    model = torch.nn.Linear(8, 8)
    zero = zeroshard.shard(model, torch.optim.AdamW(model.parameters()), stage=1)
    zero.save(tmp_path / "saved")
    return tmp_path / "saved"


@pytest.mark.parametrize("words", ["ckpt inspect", "ckpt inspect --json", "ckpt verify"])
def test_checkpoints_are_looked_at_and_checked_without_torch(tmp_path, words):
    """On Linux and macOS, with what is said where torch is; a damaged byte is found there too."""
    path = made(tmp_path)
    here = subprocess.run([sys.executable, "-m", "zeroshard", *words.split(), path], capture_output=True, check=True)
    for platform in ("linux", "darwin"):
        command = [sys.executable, ROOT / "tests" / "laptop.py", platform, *words.split(), path]
        there = subprocess.run(command, capture_output=True, timeout=60, check=True)
        assert there.stdout == here.stdout
    if words == "ckpt verify":
        file = path / "rank00000.safetensors"
        file.write_bytes(file.read_bytes()[:-1] + b"x")
        there = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        unbroken = " ".join(there.stdout.split())  # where its lines break depends on the length of tmp_path
        assert (there.returncode, "block 0 (bytes 0 to" in unbroken) == (1, True)


def test_the_page_is_written_without_torch(tmp_path):
    """The same bytes as where torch is, of the walkthroughs."""
    pages = []
    for platform in ("linux", "darwin", "win32"):
        assert said(platform, "explain", "--out", tmp_path / platform)[1] == 0
        pages.append((tmp_path / platform).read_bytes())
    subprocess.run([sys.executable, "-m", "zeroshard", "explain", "--out", tmp_path / "here"], check=True, timeout=60)
    assert {*pages} == {(tmp_path / "here").read_bytes()}
    assert said("linux", "explain", "--json")[1] == 0


def test_all_else_says_what_it_needs():
    assert said("linux", "train") == (f"zeroshard: zeroshard train {NEEDS}", 2)
    assert said("linux", "plan", "a:b") == (f"zeroshard: zeroshard plan for this {NEEDS}", 2)
    assert said("linux", "ckpt", "export", "x", "y") == (f"zeroshard: zeroshard ckpt {NEEDS}", 2)
    assert said("win32", "ckpt", "inspect", "x") == (f"zeroshard: zeroshard ckpt {ELSEWHERE.format('win32')}", 2)
    assert said("darwin", "train") == (f"zeroshard: zeroshard train {ELSEWHERE.format('darwin')}{MAC}", 2)
    assert said("win32", "verify", "a:b") == (f"zeroshard: zeroshard verify {ELSEWHERE.format('win32')}", 2)
    for platform in ("linux", "darwin", "win32"):
        assert said(platform, "verify", "--help")[1] == said(platform, "--version")[1] == 0


@pytest.mark.parametrize(("platform", "says"), [("darwin", ELSEWHERE.format("darwin") + MAC), ("linux", NEEDS)])
def test_what_trains_says_what_it_needs_when_it_is_asked_for(monkeypatch, platform, says):
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert zeroshard.plan and zeroshard.Layout
    with pytest.raises(ImportError) as error:
        _ = zeroshard.shard
    assert str(error.value) == f"zeroshard.shard {says}"


def test_an_older_torch_is_refused(monkeypatch):
    """Than the oldest that is installed with it."""
    oldest = ".".join(map(str, zeroshard.OLDEST))
    assert f'"torch>={oldest},' in (ROOT / "pyproject.toml").read_text()
    monkeypatch.setattr("torch.__version__", "2.10.1+cpu")
    with pytest.raises(ImportError, match="zeroshard.shard needs torch 2.11 or newer, and this is 2.10.1"):
        _ = zeroshard.shard


def test_a_gpu_by_name_is_what_tensors_can_have_of_it():
    plan = zeroshard.plan(Model(7e9, units=32), Machine(ranks=8, gpu="H100-80"))
    limit = int((79.1 * 2**30 - 2.5 * 2**30 - 7 * 16 * 14 * 2**20) * 0.97)
    assert plan.gpu_mem == limit == gpus.usable("h100-80", 8) == gpus.usable("h100-80", 1024)
    assert [stage.fits for stage in plan.stages] == [stage.peak <= limit for stage in plan.stages]
    assert plan.notes[0] == gpus.note("H100-80", 8) and "2.5 GiB are assumed" in plan.notes[0]
    assert "1.53 for exchanges between GPUs of a node" in plan.notes[0]
    assert zeroshard.plan(7, Machine(gpu="h100")).gpu_mem == int((79.1 * 2**30 - 2.5 * 2**30) * 0.97)
    on_four = Machine(gpu="h100", ranks=16, gpus_per_node=4)
    assert zeroshard.plan(7, on_four).gpu_mem == int((79.1 * 2**30 - 2.5 * 2**30 - 3 * 16 * 14 * 2**20) * 0.97)
    with pytest.raises(UserError, match="instead: a100-80 or a100-40"):
        zeroshard.plan(7, Machine(gpu="a100"))
    with pytest.raises(UserError, match="did you mean 'h200'.*gpu_mem="):
        zeroshard.plan(7, Machine(gpu="h201"))
    with pytest.raises(UserError, match="both say how much memory"):
        zeroshard.plan(7, Machine(gpu="h200", gpu_mem="80GiB"))


@pytest.mark.parametrize("name", gpus.GPUS)
def test_every_gpu_has_a_source_and_is_filled_by_one_rule(name):
    """Its memory is less than its maker's binary GB, and the part for tensors is what the docstring says of all."""
    gpu = gpus.GPUS[name]
    assert gpu.source.startswith(("NVIDIA ", "AMD ")) and name == name.lower()
    assert 0 < gpu.flops < 1e16 and 0 < gpu.bandwidth < 1e13
    assert gpus.usable(name) == int((gpu.gib * 2**30 - 2.5 * 2**30) * 0.97) < gpu.gib * 2**30
    assert zeroshard.plan(7, Machine(gpu=name)).gpu_mem == gpus.usable(name)
    assert clock.CARDS[name][:2] == (gpu.flops, gpu.bandwidth)  # by which the clock of a plan goes too
    assert gpus.note(name).startswith(f"{name}: {gpu.gib} GiB, of which tensors get ")


def test_gpus_newer_than_h100_are_known():
    """By GiB that torch's out-of-memory errors name of them: 139.80, 178.35, 191.69 and 31.34 at the least."""
    assert {name: gpus.GPUS[name].gib for name in ("h200", "b200", "mi300x", "5090")} == {
        "h200": 139.8, "b200": 178.3, "mi300x": 191.5, "5090": 31.3,
    }  # fmt: skip


@pytest.mark.parametrize("name", MACHINES)
def test_every_cluster_is_of_a_known_gpu_and_has_a_source(name):
    """Its memory, peak and bandwidth are one row's of `GPUS`; an efficiency that no run gave is said to be assumed."""
    machine = MACHINES[name]
    alike = [
        gpu
        for gpu in gpus.GPUS.values()
        if (int(gpu.gib * 2**30), gpu.flops, gpu.bandwidth) == (machine.memory, machine.flops, machine.memory_bandwidth)
    ]
    assert len(alike) == 1
    part = f"{machine.efficiency:.0%}".replace("%", " %")
    assert f"{part} of peak" in machine.source or "39 TFLOP/s on one GPU" in machine.source or name == "a100-ethernet"
    assert "assumed where the source says so" in KNOWN_BY["efficiency"]
    for command in ("plan", "simulate"):
        assert name in help_of(command)


@functools.cache
def help_of(command):
    """All of a command's help, on wide lines, as a shell would show it."""
    shell = {**os.environ, "COLUMNS": "200"}
    words = [sys.executable, "-m", "zeroshard", command, "--help"]
    return subprocess.run(words, capture_output=True, text=True, check=True, timeout=60, env=shell).stdout
