"""The command: its refusals, its files, its launchers, its end. Every run here is a real process."""

import hashlib
import json
import math
import os
import platform
import pydoc_data.topics
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import ranks
import zeroshard as package
from ranks import alive
from zeroshard.checkpoint.manifest import Saved
from zeroshard.cli import demo, difference, processor, screen
from zeroshard.cli.config import SIZES, Launch, RunConfig, Size, in_options
from zeroshard.cli.data import Corpus, standard_library
from zeroshard.cli.model import GPT, complete_line
from zeroshard.cli.train import train, warmup_then_cosine
from zeroshard.errors import UserError
from zeroshard.planner.simulate import STEPS as SIMULATED
from zeroshard.planner.simulate import simulate

TEXT = pydoc_data.topics.__file__
STEPS = 12
SHORT = ["--data", TEXT, "--batch", "2", "--steps", str(STEPS)]
README = (Path(__file__).parents[2] / "README.md").read_text()
LIMIT = 240  # seconds a command may take before it counts as hung


def environment(**more):
    launched = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return {**{name: value for name, value in os.environ.items() if name not in launched}, **more}


zeroshard = partial(ranks.command, timeout=LIMIT)


def bits(run):
    """What two runs must share: the weights' digest, and every loss and gradient norm."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    digest = hashlib.sha256((run / "model.safetensors").read_bytes()).hexdigest()
    return digest, [line["loss"] for line in lines], [line["grad_norm"] for line in lines]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One short run on two ranks at stage 3, whose bits the other ways to start it must repeat."""
    out = tmp_path_factory.mktemp("train") / "run"
    done = zeroshard("train", *SHORT, "--ranks", 2, "--save-every", 5, "--out", out)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return out, done.stdout


# ----------------------------------------------------------------------------------------------------------- bad input


@pytest.fixture
def files(tmp_path):
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "junk.bin").write_bytes(bytes(range(256)))
    (tmp_path / "latin.txt").write_bytes("caf\u00e9".encode("latin-1"))
    (tmp_path / "short.txt").write_text("short")
    return tmp_path


@pytest.mark.row(64)
@pytest.mark.parametrize(
    ("words", "says"),
    {
        "no such file": ("--data {files}/none.txt", "--data {files}/none.txt: no such file"),
        "second file": (f"--data {TEXT} {{files}}/none.txt", "--data {files}/none.txt: no such file"),
        "directory": ("--data {files}", "is a directory; name its files"),
        "empty file": ("--data {files}/empty.txt", "--data {files}/empty.txt: the file is empty"),
        "binary": ("--data {files}/junk.bin", "not a text file (byte 0x00 at offset 0)"),
        "not utf-8": ("--data {files}/latin.txt", "not a text file (byte 0xe9 at offset 3); expected UTF-8"),
        "too short": ("--data {files}/short.txt", "--data has 5 bytes in all, and one sequence needs 65"),
        "ranks 0": ("--ranks 0", "--ranks must be at least 1, got 0"),
        "stage 4": ("--stage 4", "--stage must be 0, 1, 2 or 3, got 4"),
        "timeout 0": ("--timeout 0", "--timeout must be a positive number of seconds, up to a billion, got 0.0"),
        "replicas 3": (
            "--ranks 4 --replicas 3",
            "--replicas must divide --ranks 4, got 3; instead: --ranks 6, or --replicas 1",
        ),
        "replicas of one rank": ("--replicas 2", "must divide --ranks 1, got 2; instead: --ranks 2, or --replicas 1"),
        "over all at stage 0": ("--stage 0 --optimizer-over all", "--optimizer-over all takes --stage 1, 2 or 3"),
        "steps -1": ("--steps -1", "--steps must be at least 1, got -1"),
        "lr 0": ("--lr 0", "--lr must be a number above 0, got 0.0; for 'tiny' try 0.006"),
        "lr nan": ("--lr nan", "--lr must be a number above 0, got nan"),
        "precision": ("--precision fp8", "'fp8' is not one of 'fp32', 'bf16'"),
        "grad-dtype": ("--grad-dtype fp16", "'fp16' is not one of 'fp32', 'bf16'"),
        "size": (
            "--size huge",
            "zeroshard: Invalid value for '--size': 'huge' is not one of 'tiny', 'deep', 'small', 'medium'.",
        ),
        "steps word": ("--steps many", "Invalid value for '--steps'"),
        "unknown option": ("--stag 3", "No such option: --stag"),
        "save-every -1": ("--save-every -1", "--save-every must be at least 0, got -1"),
        "seed": (f"--seed {2**63}", f"--seed must be at most {2**63 - 1}, got {2**63}"),
        "batch": ("--batch 1000000000", "--batch must be at most 65536, got 1000000000"),
        "out of a variable that is not set": ("--out=", "--out is empty; leave it out, or give it a value"),
        "keep 0": ("--keep 0", "--keep must be at least 1, got 0"),
        "resume nothing": ("--resume {files}/none", "--resume {files}/none: no such folder"),
        "resume no run": ("--resume {files}", "--resume {files}: neither a run with checkpoints nor a checkpoint"),
        "out is a file": ("--out {files}/short.txt", "--out {files}/short.txt: cannot be written to"),
    }.values(),
    ids=lambda value: value.split(" ")[0] if value.startswith("--data") else None,
)
def test_bad_input_is_one_line_and_exit_code_2(files, words, says):
    done = zeroshard("train", *words.format(files=files).split())
    assert (done.returncode, done.stdout) == (2, "")
    assert says.format(files=files) in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("words", ["--version", "plan --help", "plan --params 7B", "plan --params 7B --json"])
def test_output_that_cannot_be_written_is_one_line(words):
    """A full disk and a closed descriptor are failures with a name; a reader that has left is none, and hears nothing."""
    command = [sys.executable, "-m", "zeroshard", *words.split()]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, env=environment(), stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (
        1,
        "zeroshard: standard output cannot be written: No space left on device\n",
    )
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, env=environment(), stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")
    closed = ["sh", "-c", 'exec "$@" >&-', "sh", *command]
    done = subprocess.run(closed, env=environment(), stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, "zeroshard: standard output cannot be written: Bad file descriptor\n")


def test_a_refusal_that_cannot_be_said_keeps_its_exit_code():
    command = [sys.executable, "-m", "zeroshard", "plan", "--params", "0"]
    with open("/dev/full", "w") as full:
        assert subprocess.run(command, env=environment(), stderr=full).returncode == 2


def test_ranks_must_be_those_of_the_launcher():
    place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    place |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    done = zeroshard("train", "--ranks", 3, **place)
    assert done.returncode == 2
    assert done.stderr == "zeroshard: --ranks 3, but torchrun started 2 ranks; leave --ranks out under torchrun\n"
    assert zeroshard("demo", **place).stderr == "zeroshard: demo starts its own ranks; run it without torchrun\n"


@pytest.mark.full
def test_what_only_a_rank_can_refuse_is_one_line_too(tmp_path):
    done = zeroshard("train", *SHORT, "--ranks", 2, "--device", "cuda", "--out", tmp_path, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    assert done.stderr == (
        "zeroshard: --device cuda: 2 ranks on this machine need a GPU each, and torch sees 0; "
        "write --device cpu, or start fewer ranks\n"
    )


# ----------------------------------------------------------------------------------------------------------------- help


def test_the_version_and_suggestions_of_commands_that_users_have():
    versions = f"zeroshard {package.__version__}, torch {torch.__version__}, Python {platform.python_version()}, Linux-"
    assert zeroshard("--version").stdout.startswith(versions)
    said = zeroshard("explan").stderr
    assert said == "zeroshard: No such command 'explan'. Did you mean 'explain', 'plan'?\n"
    assert zeroshard().returncode == 2
    assert "-rank" not in zeroshard("--help").stdout  # what a command starts for itself


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (UserError("gpu_mem: a budget", got="'80'", instead="80GiB"), "--gpu-mem: a budget; got: '80'; instead: 80GiB"),
        (UserError("no such stage", got="5", instead="stage=3"), "no such stage; got: 5; instead: --stage 3"),
        (UserError("no such stage", got="5", instead="Layout(stage=3)"), "no such stage; got: 5; instead: --stage 3"),
        (UserError("stage and bytes both", instead="bytes="), "--stage and --bytes both; instead: --bytes"),
        (UserError("no such file", where="/a/gpu_mem.json"), "no such file; where: /a/gpu_mem.json"),
        (UserError("a stage of bytes", got="gpu_mem='x'"), "a stage of bytes; got: --gpu-mem x"),
    ],
)
def test_errors_of_commands_speak_of_options(error, said):
    assert in_options(error, ("gpu_mem", "stage", "bytes")) == said


@pytest.mark.parametrize("size", SIZES)
def test_the_header_knows_the_models_size(size):
    """Before torch is loaded."""
    with torch.device("meta"):
        assert SIZES[size].numel == sum(param.numel() for param in GPT(SIZES[size]).parameters())


# --------------------------------------------------------------------------------------------------------- what it does


def test_a_run_leaves_its_files(run):
    """run.json, metrics.jsonl, ledger.json, explain.json and weights that the plain model loads; held equals predicted."""
    out, shown = run
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["step-00000010", "step-00000012"]
    assert sorted(path.name for path in out.iterdir()) == [
        "checkpoints",
        "explain.json",
        "ledger.json",
        "metrics.jsonl",
        "model.safetensors",
        "run.json",
    ]
    record = json.loads((out / "run.json").read_text())
    assert record["config"]["stage"] == 3
    assert record["config"]["lr"] == SIZES["tiny"].lr
    assert record["torch"] == torch.__version__
    assert record["data"] == {
        "files": 1,
        "bytes": os.path.getsize(TEXT),
        "sha256": hashlib.sha256(
            f"topics.py\0{os.path.getsize(TEXT)}\0".encode() + Path(TEXT).read_bytes()
        ).hexdigest(),
    }
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert all(set(line) == {"step", "loss", "grad_norm", "lr", "tokens_per_s"} for line in lines)
    assert abs(lines[0]["loss"] - math.log(256)) < 1  # untrained: about as good as guessing one byte of 256
    assert lines[-1]["loss"] < lines[0]["loss"]
    ranks = json.loads((out / "ledger.json").read_text())["ranks"]
    assert len(ranks) == 2
    for entry in ranks:
        assert {state: entry["held"][state] for state in entry["predicted"]} == entry["predicted"]
        assert {state for state, nbytes in entry["held"].items() if nbytes} - entry["predicted"].keys() == {"norms"}
    norms = "; beside parameters, gradients and optimizer: a map for the norm of gradients, up to "
    norms += f"{max(entry['held']['norms'] for entry in ranks):,} bytes"
    sent, shared = (sum(ranks[0]["traffic"][verb][how] for verb in ("gather", "reduce")) for how in ("sent", "shared"))
    read = f"; it read {shared // STEPS:,} bytes of the others' through shared memory" if shared else ""
    assert bool(sent) != bool(shared)
    said = shown.splitlines()
    assert said.index("  starting 2 ranks ...") < said.index(f"  started on cpu, torch {torch.__version__}")
    per_second = statistics.median(line["tokens_per_s"] for line in lines)
    assert said[-6:] == [
        f"  loss   {lines[0]['loss']:.3f} -> {lines[-1]['loss']:.3f} in {STEPS} steps  "
        + screen.curve([line["loss"] for line in lines]),
        f"  speed  {2 * 2 * SIZES['tiny'].context / per_second:.3g} s a step, {per_second:,.0f} tokens/s",
        f"  states {sum(ranks[0]['predicted'].values()):,} bytes per rank; held = predicted on 2 ranks, to the byte"
        + norms,
        f"  sent   {sent // STEPS:,} bytes of parameters and gradients per step by rank 0{read}",
        f"  saved  {out / 'model.safetensors'} and {out / 'checkpoints' / 'step-00000012'}",
        f"  next   zeroshard explain {out}",
    ]
    live = re.findall(r"step +(\d+)/\d+  loss (\d+\.\d+)", shown)
    assert live[-1][0] == str(STEPS)
    assert live == [(step, f"{lines[int(step) - 1]['loss']:.3f}") for step, _ in live]
    GPT(SIZES["tiny"]).load_state_dict(load_file(out / "model.safetensors"))


@pytest.mark.full
def test_one_rank_that_adds_up_two_micro_batches_gives_the_same_bits(run, tmp_path):
    """At stage 0, without any launcher, and at stage 3 on two ranks: one micro-batch is one, whoever computes it."""
    out = tmp_path / "one"
    done = zeroshard("train", *SHORT, "--accumulate", 2, "--stage", 0, "--out", out)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert "Model state per rank" not in done.stdout
    assert bits(out) == bits(run[0])


@pytest.mark.full
def test_recomputing_gives_the_same_bits_and_a_gather_more_per_block(run, tmp_path):
    """`--recompute`: also with two bytes per parameter less for gradients, where `--grad-dtype bf16` asks for that."""
    out = tmp_path / "again"
    done = zeroshard("train", *SHORT, "--ranks", 2, "--recompute", "--no-report", "--out", out)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert bits(out) == bits(run[0])
    verbs = [
        set(json.loads((each / "explain.json").read_text())["run"]["recording"]["verbs"]) for each in (run[0], out)
    ]
    assert verbs[1] - verbs[0] == {"recompute"}


@pytest.mark.parametrize(
    ("says", "computes"),
    [
        ("processor\t: 0\nflags\t\t: fpu avx512f avx512_bf16 amx_tile\n", True),
        ("processor\t: 0\nflags\t\t: fpu avx2 avx512f avx512bw\n", False),
        ("processor\t: 0\nFeatures\t: fp asimd i8mm bf16\n", True),
        ("processor\t: 0\nBogoMIPS\t: 243.75\n", None),
    ],
    ids=["x86", "x86 without", "ARM", "says nothing"],
)
def test_a_processor_without_bf16_is_known_and_fp32_recommended(says, computes, tmp_path, monkeypatch):
    monkeypatch.setattr(processor, "CPUINFO", tmp_path / "cpuinfo")
    assert processor.computes_bf16() is None
    processor.CPUINFO.write_text(says)
    assert processor.computes_bf16() is computes
    assert ("use --precision fp32" in processor.slow("bf16-split")) == (computes is False)
    assert processor.slow("fp32") == processor.slow("bf16", "cuda") == ""


def test_a_kind_of_processor_is_what_kernels_are_chosen_by(tmp_path, monkeypatch):
    """Not its clock, nor the order of its flags, nor how many cores it has."""
    monkeypatch.setattr(processor, "CPUINFO", tmp_path / "cpuinfo")
    assert processor.kind() == ""
    kinds = []
    for flags, mhz, cores in (("fma avx2", 2000, 1), ("avx2 fma", 3000, 2), ("fma avx512f", 2000, 1)):
        one = f"processor\t: 0\nvendor_id\t: A\nmodel\t: 7\ncpu MHz\t: {mhz}\nflags\t\t: {flags}\n"
        processor.CPUINFO.write_text("\n".join([one] * cores))
        kinds.append(processor.kind())
    assert kinds[0] == kinds[1] != kinds[2]


@pytest.mark.full
def test_gradients_are_added_up_in_what_was_asked(tmp_path):
    done = zeroshard("train", *SHORT, "--precision", "bf16", "--grad-dtype", "bf16", "--out", tmp_path / "thin")
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert "bf16, bf16 gradients" in done.stdout
    assert ("no bf16 arithmetic" in done.stdout) == (processor.computes_bf16() is False)
    (rank,) = json.loads((tmp_path / "thin" / "ledger.json").read_text())["ranks"]
    assert 2 * rank["held"]["gradients"] == rank["held"]["master"]


# -------------------------------------------------------------------------------------------------------------- resume


def stopped(run, path):
    """A copy of a run as it would lie there, had it been killed in step 12 while it wrote a line."""
    shutil.copytree(run, path)
    shutil.rmtree(path / "checkpoints" / "step-00000012")
    for name in ("ledger.json", "model.safetensors"):
        (path / name).unlink()
    lines = (path / "metrics.jsonl").read_text().splitlines()
    (path / "metrics.jsonl").write_text("\n".join([*lines[:11], lines[11][:20]]))
    return path


def test_a_resumed_run_is_the_run_that_never_stopped(run, tmp_path):
    """Two ranks, stopped, then one that does the micro-batches of both; its curve goes on where the checkpoint was."""
    out = stopped(run[0], tmp_path / "run")
    done = zeroshard("train", "--resume", out, "--ranks", 1, "--stage", 2)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert f"resumed from {out / 'checkpoints' / 'step-00000010'}, saved on 2 ranks" in done.stdout
    assert "not those of a run that never stopped" not in done.stdout
    assert bits(out) == bits(run[0])
    steps = [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, STEPS + 1))
    config = json.loads((out / "run.json").read_text())["config"]
    assert (config["ranks"], config["accumulate"], config["stage"], config["steps"]) == (1, 2, 2, STEPS)
    with Saved.open(run[0] / "checkpoints" / "step-00000012") as a, Saved.open(out / "checkpoints/step-00000012") as b:
        assert {row.name for row in difference.compare(a, b)} == {
            f"extra.run.{name}" for name in ("out", "stage", "ranks", "accumulate", "resume", "report")
        } - {"extra.run.report"}


@pytest.mark.full
def test_an_optimizer_over_all_trains_the_same_run(run, tmp_path):
    """Two replicas of one rank that share the optimizer, stopped, and resumed by one rank: the bits of one replica."""
    words = (
        *SHORT,
        "--ranks",
        2,
        "--replicas",
        2,
        "--optimizer-over",
        "all",
        "--save-every",
        5,
        "--out",
        tmp_path / "a",
    )
    done = zeroshard("train", *words)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert "in 2 replicas, the optimizer over all" in done.stdout
    assert bits(tmp_path / "a") == bits(run[0])
    (group,) = json.loads((tmp_path / "a" / "explain.json").read_text())["run"]["groups"]
    assert (group["teams"], group["spread"]) == ([[0], [1]], True)
    traffic = json.loads((tmp_path / "a" / "ledger.json").read_text())["ranks"][0]["traffic"]
    sent = sum(traffic[verb]["sent"] for verb in ("gather", "reduce", "relay", "share") if verb in traffic)
    assert traffic["relay"]["sent"] and f"{sent // STEPS:,} bytes of parameters and gradients per step" in done.stdout
    out = stopped(tmp_path / "a", tmp_path / "b")
    assert zeroshard("train", "--resume", out, "--ranks", 1, "--stage", 0).returncode == 0
    assert bits(out) == bits(run[0])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--lr 0.1", "--lr 0.1: the run in {out} has 0.006; leave --lr out"),
        pytest.param(
            "--size small", "--size small: the run in {out} has tiny; leave --size out", marks=pytest.mark.full
        ),
        pytest.param("--seed 3", "--seed 3: the run in {out} has 0", marks=pytest.mark.full),
        pytest.param("--batch 4", "--batch 4: the run in {out} has 2", marks=pytest.mark.full),
        pytest.param("--precision bf16", "--precision bf16: the run in {out} has fp32", marks=pytest.mark.full),
        pytest.param(
            "--grad-dtype bf16",
            "--grad-dtype bf16: the run in {out} has fp32; leave --grad-dtype out",
            marks=pytest.mark.full,
        ),
    ],
    ids=lambda text: text if text.startswith("--") else "",
)
def test_what_would_make_it_another_run_is_refused(run, tmp_path, words, says):
    """In one line, exit code 2, and with every file of the run as it was."""
    out = stopped(run[0], tmp_path / "run")
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    done = zeroshard("train", "--resume", out, "--ranks", 1, *words.split())
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done
    assert says.format(out=out) in done.stderr
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    (out / "checkpoints" / "step-00000010" / "manifest.json").write_text("{}")
    assert "no checkpoint of zeroshard train in it" in zeroshard("train", "--resume", out).stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--steps 10", "step-00000010: all 10 steps are done; for more give --steps, above 10\n"),
        (f"--data {__file__}", "the data is not the run's (sha256 "),
        ("--data none", "--data none: no such file"),
    ],
)
def test_what_the_ranks_find_out_is_refused_as_well(run, tmp_path, words, says):
    out = stopped(run[0], tmp_path / "run")
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    done = zeroshard("train", "--resume", out, *words.split())
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done
    assert says in done.stderr
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


@pytest.mark.slow
def test_resuming_a_killed_run_passes_over_a_damaged_checkpoint(run, tmp_path):
    """Killed outright while it trains, its newest checkpoint damaged; from two ranks to three: other micro-batches."""
    out = tmp_path / "run"
    command = [
        sys.executable,
        "-m",
        "zeroshard",
        "train",
        *SHORT,
        "--ranks",
        "2",
        "--save-every",
        "5",
        "--out",
        str(out),
    ]
    command[command.index("--steps") + 1] = "1000000"
    launcher = subprocess.Popen([*command, "--keep", "3"], env=environment(), stdout=subprocess.DEVNULL)
    newest = out / "checkpoints" / "step-00000025"
    while not newest.exists():
        assert launcher.poll() is None
        time.sleep(0.05)
    ranks = [int(pid) for pid in Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()]
    for pid in [launcher.pid, *ranks]:
        os.kill(pid, signal.SIGKILL)
    launcher.wait()
    (last, *_) = sorted((path for path in (out / "checkpoints").glob("step-*")), reverse=True)
    step = int(last.name[5:]) - 5
    data = bytearray((last / "rank00001.safetensors").read_bytes())
    data[-1] ^= 1
    (last / "rank00001.safetensors").write_bytes(data)
    done = zeroshard("train", "--resume", out, "--ranks", 3, "--steps", step + 3)
    assert done.returncode == 0, done.stderr
    assert "passes over a damaged checkpoint" in done.stderr
    assert f"resumed from {last.parent / f'step-{step:08d}'}, saved on 2 ranks" in done.stdout
    assert "3 micro-batches a step, 2 before: the losses are not those of a run that never stopped" in done.stdout
    assert f"{step + 3} steps, 1000000 before: the learning rate goes on as in a run of {step + 3}" in done.stdout
    steps = [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, step + 4))


def torchrun(*words):
    command = [sys.executable, "-m", "torch.distributed.run", *map(str, words)]
    return subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(*processes):
    try:
        for process in processes:
            said, _ = process.communicate(timeout=LIMIT)
            assert process.returncode == 0, said
    finally:
        for process in processes:
            process.kill()


@pytest.mark.full
def test_under_torchrun(run, tmp_path):
    """`torchrun --standalone` starts the very same ranks."""
    finish(torchrun("--standalone", "--nproc-per-node", 2, "-m", "zeroshard", "train", *SHORT, "--out", tmp_path))
    assert bits(tmp_path) == bits(run[0])


@pytest.mark.slow
def test_under_two_torchrun_agents(run, tmp_path):
    """Two machines' agents, here both on this one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    agent = ["--nnodes", 2, "--nproc-per-node", 1, "--rdzv-backend", "c10d", "--rdzv-id", port]
    agent += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1", "-m", "zeroshard", "train", *SHORT]
    finish(torchrun(*agent, "--out", tmp_path), torchrun(*agent, "--out", tmp_path))
    assert bits(tmp_path) == bits(run[0])


@pytest.mark.full
def test_a_rank_under_torchrun_with_bad_input_says_so_once(tmp_path):
    process = torchrun("--standalone", "--nproc-per-node", 2, "-m", "zeroshard", "train", "--data", tmp_path / "none")
    said, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 1  # torchrun's own
    assert said.count(f"zeroshard: --data {tmp_path / 'none'}: no such file") == 1


@pytest.mark.full
@pytest.mark.timeout(600)
def test_demo(tmp_path):
    done = zeroshard("demo", "--steps", STEPS, "--out", tmp_path, timeout=2 * LIMIT)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    digest, losses, norms = bits(tmp_path / "stage3")
    assert bits(tmp_path / "stage0") == bits(tmp_path / "resumed") == (digest, losses, norms)
    assert (tmp_path / "stage3" / "zero.html").stat().st_size < 1_100_000
    memory, equal, resumed, planned, writes, page = done.stdout.strip().splitlines()[-6:]
    held = []
    for stage in (3, 0):
        rank_0 = json.loads((tmp_path / f"stage{stage}" / "ledger.json").read_text())["ranks"][0]
        held.append(sum(rank_0["held"][state] for state in rank_0["predicted"]))
    assert memory.split() == (
        f"memory rank 0 holds {held[0]:,} bytes of model state at stage 3, {held[1]:,} at stage 0: 2.00 times".split()
    )
    weights = f"all weights equal (sha256 {digest[:16]})"
    assert equal.split() == f"bits stages 3 and 0: {STEPS} losses, {STEPS} gradient norms, {weights}".split()
    where = "from step 11, saved on 2 ranks at stage 3, on 1 rank at stage 1"
    assert resumed.split() == f"resumed {where}: 1 loss, 1 gradient norm, {weights}".split()
    assert re.fullmatch(r"  planned \d+ predictions, at rest and at every peak of 4 stages: held to the byte", planned)
    assert writes.startswith("  writes  def ") and page == f"  page    {tmp_path / 'stage3' / 'zero.html'}"


DEEP = SIZES["deep"]


def deep():
    def batch(step, index):
        return torch.zeros(1, DEEP.context + 1, dtype=torch.int64)

    return {
        "model": GPT(DEEP), "optimizer": lambda params: torch.optim.AdamW(params, lr=DEEP.lr), "batch": batch,
        "loss": lambda model, x: model(x[:, :-1], x[:, 1:]),
    }  # fmt: skip


@pytest.mark.parametrize("stage", range(4))
def test_the_readmes_table_is_of_the_deep_model_on_four_ranks(stage):
    """Rank 0's bytes, simulated; at the peak the run also held 8 bytes for each 128 elements, for the norm that clips."""
    run = simulate(deep, ranks=4, rank=0, stage=stage)
    rest, sent = sum(run.ledger.held.values()), sum(run.ledger.traffic[verb].sent for verb in ("gather", "reduce"))
    sharded = simulate(deep, ranks=4, rank=0, stage=3).ledger.held["parameters"] // 4
    peak = max(phase.total for phase in run.ledger.phases.values()) + sharded // 128 * 8
    row = f"| {stage} | {rest:,}( bytes)? | {rest:,} | {peak:,} | {sent // SIMULATED:,} |"
    assert re.search(row.replace("|", r"\|"), README)


def changed_by_one_bit(run, folder, what):
    """A copy of a run in which one weight, or one loss, is the next number."""
    shutil.copytree(run, folder)
    if what == "weights":
        weights = load_file(folder / "model.safetensors")
        weights["norm.weight"].view(torch.int32)[7] ^= 1
        save_file(weights, folder / "model.safetensors")
    if what == "loss":
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        lines[3]["loss"] = math.nextafter(lines[3]["loss"], 9.0)
        (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ("nothing", f"The bits are equal: {STEPS} losses and norms, and all weights."),
        ("weights", "the weights are different."),
        ("loss", "The bits differ from step 4 on: losses "),
    ],
)
def test_two_runs_are_compared(run, tmp_path, changed, says):
    """On the page, what each held, sent and lost; there and in the terminal, whether one bit differs."""
    other = changed_by_one_bit(run[0], tmp_path / "other", changed)
    out = tmp_path / "two.html"
    done = zeroshard("explain", run[0], other, "--out", out, COLUMNS="300")
    assert (done.returncode, done.stderr) == (0, "")
    path, sentence = done.stdout.splitlines()
    assert path.startswith(str(out)) and says in sentence
    data = json.loads(re.search(r'id="data">(.*?)</script>', out.read_text())[1])
    told = json.loads((run[0] / "explain.json").read_text())["run"]
    assert {key: data["run"][key] for key in told if key != "curves"} == {
        key: told[key] for key in told if key != "curves"
    }
    assert data["compared"]["names"] == [str(run[0]), str(other)]
    assert data["compared"]["equal"] is (changed == "nothing")
    assert (data["compared"]["differs"] or {}).get("step") == {"loss": 4}.get(changed)
    assert zeroshard("explain", run[0], tmp_path).returncode == 2
    assert "got 3 folders" in zeroshard("explain", run[0], other, other).stderr


@pytest.mark.parametrize(
    ("command", "option"), [("explain", "--text"), ("explain", "--stage"), ("explain", "--element"), ("plan", "--text")]
)
def test_the_page_is_not_told_in_the_terminal(command, option):
    done = zeroshard(command, option)
    assert (done.returncode, done.stdout) == (2, "") and f"No such option: {option}" in done.stderr


def test_tables_without_colours_in_a_narrow_terminal():
    """NO_COLOR and the width hold; prose is wrapped, and nothing is paged."""
    asked = {"FORCE_COLOR": "1", "COLUMNS": "70"}
    words = ("--params", "7B", "--ranks", "64", "--machine", "dgx-2", "--gpu-mem", "20GB", "--full")
    coloured, plain = (zeroshard("plan", *words, **asked, **more) for more in ({}, {"NO_COLOR": "1"}))
    assert (plain.returncode, plain.stderr) == (0, "")
    assert set(re.findall(r"\x1b\[(\d+)", coloured.stdout)) == {"0", "1", "2", *map(str, range(31, 37))}
    assert set(re.findall(r"\x1b\[(\d+)", plain.stdout)) == {"0", "1", "2"}  # bold and dim, no colour
    lines = re.sub(r"\x1b\[\d+m", "", plain.stdout).splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("  - "))
    reasons = lines[at : lines.index("", at)]
    starts = [line[:4].strip() for line in reasons]
    assert starts[:2] == ["-", ""] and starts.count("-") == 4 and set(starts) == {"-", ""}
    assert max(map(len, reasons)) <= 70


@pytest.mark.full
@pytest.mark.parametrize("changed", ["weights", "loss"])
def test_demo_says_where_one_bit_differs(run, tmp_path, changed):
    assert demo.same_bits(run[0], shutil.copytree(run[0], tmp_path / "same"), "both").equal
    equal, words = demo.same_bits(run[0], changed_by_one_bit(run[0], tmp_path / "other", changed), "both")
    assert not equal and {"weights": "weights different", "loss": "at step 4"}[changed] in words


def test_demo_names_the_first_prediction_that_differs():
    rows = [{"stage": 2, "rank": 1, "what": "at rest", "difference": each} for each in (0, 8)]
    assert demo._planned(rows) == (False, "1 of 2 predictions differ, the first at stage 2, rank 1, at rest: +8 bytes")


# -------------------------------------------------------------------------------------------------------------- its end


BUSY_RENDEZVOUS = """
from torch.distributed.elastic.rendezvous import dynamic_rendezvous as rendezvous
class Always(rendezvous._PeriodicTimer):
    def __init__(self, interval, *work):
        super().__init__(interval / 1_000_000, *work)
rendezvous._PeriodicTimer = Always
from zeroshard.cli.main import main
main()
"""


@pytest.mark.full
def test_an_interrupt_says_one_line_whichever_thread_lets_go_of_the_rendezvous(tmp_path):
    """torch's keep-alive thread is nearly always at work here: it must not be the one that ends its rendezvous."""
    command = [sys.executable, "-c", BUSY_RENDEZVOUS, "train", "--data", TEXT, "--ranks", "2", "--steps", "1000000"]
    launcher = subprocess.Popen(
        [*command, "--out", str(tmp_path)], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        while "tokens/s" not in (line := launcher.stdout.readline()):
            assert line, launcher.communicate()
        launcher.send_signal(signal.SIGINT)
        _, said = launcher.communicate(timeout=LIMIT)
        assert (launcher.returncode, said) == (130, "zeroshard: interrupted; all ranks have ended\n")
    finally:
        launcher.kill()


@pytest.mark.full
@pytest.mark.row(60)
@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, *(pytest.param(number, marks=pytest.mark.slow) for number in (signal.SIGTERM, signal.SIGKILL))],
    ids=lambda number: number.name,
)
def test_a_signal_ends_all_ranks(tmp_path, number):
    """Ctrl-C and SIGTERM: exit code 130, one line. Killed outright, the launcher cannot tell its ranks; they notice."""
    command = [sys.executable, "-m", "zeroshard", "train", "--data", TEXT, "--ranks", "2", "--steps", "1000000"]
    launcher = subprocess.Popen(
        [*command, "--out", str(tmp_path)], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    ranks = []
    try:
        while "step" not in (line := launcher.stdout.readline()) or "tokens/s" not in line:
            assert line, launcher.communicate()
        ranks = [int(pid) for pid in Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()]
        assert len(ranks) == 2
        launcher.send_signal(number)
        _, said = launcher.communicate(timeout=LIMIT)
        if number == signal.SIGKILL:
            for _ in range(LIMIT * 10):  # until the ranks have noticed; the loop's end is the hard time-out
                if not any(map(alive, ranks)):
                    break
                time.sleep(0.1)
        else:
            assert (launcher.returncode, said) == (130, "zeroshard: interrupted; all ranks have ended\n")
        assert [pid for pid in ranks if alive(pid)] == []
    finally:
        for pid in [launcher.pid, *ranks]:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)


# ---------------------------------------------------------------------------------------------------------------- parts


def test_every_size_is_an_option():
    assert get_args(Size) == tuple(SIZES)


def test_a_config_survives_the_command_line():
    """The ranks get the settings as options; what they parse is what was meant."""
    config = RunConfig(
        out="run/x y", data=("a.txt", "b.txt"), stage=2, ranks=3, steps=7, batch=5, accumulate=2, precision="bf16",
        size="small", lr=1e-3 / 3, seed=11, device="cpu", report=False, save_every=3, keep=4, resume="run/z",
        grad_dtype="bf16", recompute=True,
        offload_parameters="cpu", offload_gradients="0.5", offload_optimizer="nvme", offload_path="run/files",
        offload_activations="cpu", offload_step="device",
    )  # fmt: skip
    words = config.command()
    assert words[0] == "train"
    options = {}
    for at, word in enumerate(words):
        if word.startswith("--") and at + 1 < len(words) and not words[at + 1].startswith("--"):
            options.setdefault(word, []).append(words[at + 1])
    assert options["--data"] == ["a.txt", "b.txt"]
    assert float(options["--lr"][0]) == config.lr
    assert {"--no-report", "--recompute"} <= set(words)
    assert set(options) == {f"--{name.replace('_', '-')}" for name in config.__dataclass_fields__} - {
        "--report", "--recompute"
    }  # fmt: skip
    assert "--resume" not in replace(config, resume="").command()


def test_the_time_out_is_that_of_every_wait(monkeypatch):
    def shard(*_, comm, **__):
        raise LookupError(comm.timeout)

    monkeypatch.setattr("zeroshard.shard", shard)
    config = RunConfig(
        out="run", data=(), stage=2, ranks=1, steps=1, batch=1, accumulate=1, precision="fp32", size="tiny", lr=0.1,
        seed=0, device="cpu", report=False, save_every=0, keep=1, resume="", timeout=77.0,
    )  # fmt: skip
    with pytest.raises(LookupError, match="77.0"):
        train(config, Launch(rank=0, ranks=1, local_rank=0, local_ranks=1), Corpus(np.zeros(99, np.uint8), 1, ""))


def test_a_micro_batch_is_a_function_of_its_arguments():
    corpus = Corpus(np.arange(200, dtype=np.uint8), 1, "")
    place = {"seed": 1, "step": 2, "index": 3, "sequences": 50, "context": 9}
    first = corpus.micro_batch(**place)
    assert first.shape == (50, 10)
    assert (first == corpus.micro_batch(**place)).all()
    assert (np.diff(first, axis=1) == 1).all()  # windows of consecutive bytes
    for name in ("seed", "step", "index"):
        assert (corpus.micro_batch(**{**place, name: place[name] + 1}) != first).any()
    starts = np.concatenate([corpus.micro_batch(**{**place, "step": step})[:, 0] for step in range(100)])
    assert set(starts) == set(range(200 - 9))  # every window can be drawn, none leaves the text


@pytest.mark.full
def test_the_standard_library_is_text_without_tests():
    files = standard_library()
    assert len(files) > 300
    assert files == sorted(files)
    assert not any({"test", "tests", "site-packages"} & set(path.parts[-3:-1]) for path in files)


def test_learning_rate():
    factor = warmup_then_cosine(100)
    assert [factor(0), factor(9), factor(10), factor(55)] == [0.1, 1.0, 1.0, 0.55]
    assert math.isclose(factor(100), 0.1)  # the cosine of pi is exact, 0.55 - 0.45 is not
    assert warmup_then_cosine(1)(0) == 1.0


@pytest.mark.full
def test_a_sampled_line_is_repeatable_and_ends():
    """The same seed gives the same text; it ends at the line's end or at the given length."""
    torch.manual_seed(0)
    model = GPT(SIZES["tiny"])

    def sample(seed):
        generator = torch.Generator().manual_seed(seed)
        return complete_line(model, "def ", most=70, temperature=0.7, generator=generator)

    assert sample(1) == sample(1) != sample(2)
    assert sample(1).startswith("def ")
    torch.nn.init.zeros_(model.head.weight)
    torch.nn.init.ones_(model.norm.bias)
    model.head.weight.detach()[ord("\n")] = 1.0  # now every line ends at once
    assert sample(1) == "def"


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (5 * 2**30, "5.00 GiB")]
)
def test_nbytes_text(nbytes, text):
    assert screen.nbytes_text(nbytes) == text
