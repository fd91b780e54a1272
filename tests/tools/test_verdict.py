"""The first lines of `zeroshard plan`: a verdict, and a line of Python that does what was planned."""

import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import zeroshard
from zeroshard import Comm, Layout, Offload, Precision
from zeroshard.cli.config import InputError
from zeroshard.cli.main import app

BF16 = Precision(param_dtype=torch.bfloat16, cast_inputs=True)
JOB = f"{Path(__file__).parents[2]}/examples/job.py:job"
CLUSTER = "--params 8e9 --preset zeroshard --ranks 64 --machine a100-ethernet"
NARROW = Precision(param_dtype=torch.bfloat16, grad_dtype=torch.bfloat16, cast_inputs=True)


@pytest.fixture
def planned(monkeypatch, capsys):
    """(the verdict, the line to paste) of a command line, on a terminal of 80 columns."""

    def first(words, columns=80):
        monkeypatch.setenv("COLUMNS", str(columns))
        app(["plan", "--full", *words.split()], standalone_mode=False)
        before, _, _ = capsys.readouterr().out.partition("\nPlan\n")
        assert all(len(line) <= 80 for line in before.splitlines())
        verdict, _, line = before.partition("zero = ")
        return " ".join(verdict.split()), line

    return first


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        ("--params 7B --ranks 8 --preset zeroshard", {"stage": 3, "precision": BF16}),
        ("--params 7B --ranks 8 --preset zeroshard --gpu h100-80", {"stage": 1, "precision": BF16}),
        ("--params 7B --preset zeroshard-bf16-grads --stage 2", {"stage": 2, "precision": NARROW}),
        ("--params 7B --preset paper --stage 2", {"stage": 2, "precision": NARROW}),
        ("--params 7B --preset paper", {"stage": 3, "precision": dataclasses.replace(NARROW, store_params=True)}),
        ("--params 7B --preset deepspeed", {"stage": 3, "precision": dataclasses.replace(BF16, store_params=True)}),
        ("--params 7B --preset fp32", {"stage": 3}),
        (
            "--params 7B --preset fp32 --prefetch 2 --optimizer-in-backward --offload-optimizer nvme",
            {
                "stage": 3, "optimizer_in_backward": True, "comm": Comm(prefetch=2),
                "offload": Offload(optimizer="nvme", path="/a/local/disk"),
            },
        ),
        (
            "--params 7B --precision bf16-states16-drawn --stage 2",
            {
                "stage": 2,
                "precision": dataclasses.replace(BF16, states={"*": torch.bfloat16}, rounding="stochastic"),
            },
        ),
        (f"{CLUSTER} --gpu-mem 12GB", {"stage": 3, "precision": BF16, "comm": Comm(replicas=8, optimizer="all")}),
        (f"{JOB} --ranks 2 --stage 1 --precision bf16", {"stage": 1, "precision": BF16}),
        (
            f"{JOB} --ranks 2 --align 256 --bucket-mib 1 --recompute --whole *.linear1.weight --reduce int8",
            {
                "stage": 3, "comm": Comm(reduce="int8"),
                "layout": Layout(align=256, bucket_mib=1.0, recompute=True, whole=("*.linear1.weight",)),
            },
        ),
        (
            f"{JOB} --ranks 2 --matrices *.self_attn.in_proj_weight=3,*.linear?.weight=2",
            {
                "stage": 3,
                "layout": Layout(matrices={"*.self_attn.in_proj_weight": 3, "*.linear?.weight": 2}),
            },
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_the_line_is_the_call_that_was_planned(planned, words, arguments):
    """Executed as it is printed, with a `shard` that keeps what it is given."""
    _, line = planned(words)
    called = []
    package = SimpleNamespace(
        shard=lambda *model, **how: called.append((model, how)),
        Precision=Precision, Layout=Layout, Comm=Comm, Offload=Offload,
    )  # fmt: skip
    exec(f"zero = {line}", {"zeroshard": package, "torch": torch, "model": "model", "optimizer": "optimizer"})
    assert called == [(("model", "optimizer"), arguments)]


def test_the_line_of_a_config_reads_it(planned, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2}}')
    _, line = planned(f"{JOB} --ranks 2 --config ds.json")
    (said,) = re.findall(r'\*\*zeroshard\.settings\("(.*)"\)', line)
    assert zeroshard.settings(said)["stage"] == 2
    for words in (f"{JOB} --prefetch 2", f"{JOB} --offload-optimizer cpu", "--params 7B --ranks 8"):  # another plan
        assert planned(f"{words} --config ds.json")[1] == ""


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            "--params 7B",
            "Stage 3 holds 112.00 GB on one rank at rest, 1.12 times less than stage 0. --gpu h100-80 says what fits.",
        ),
        (
            "--params 7B --ranks 8",
            "Stage 3 holds 14.00 GB on each of 8 ranks at rest, 9 times less than stage 0. --gpu h100-80 says what fits.",
        ),
        (
            "--params 7B --ranks 8 --gpu-mem 80GB",
            "Stage 1, all on the device: the fastest that fits on each of 8 ranks, 0.51 to 1.2 s a step, bound by device; "
            "65.17 of 80.00 GB on the device, with activations of 2,048 tokens.",
        ),
        (
            "--params 7B --ranks 8 --gpu-mem 12GB",
            "Stage 3, 50 % of optimizer states in host memory, the device steps, the optimizer in backward, layers "
            "recomputed: the fastest that fits on each of 8 ranks, ",
        ),
        (
            "--params 7B --ranks 8 --gpu-mem 80GB --stage 1",
            "Stage 1 fits: 55.13 of 80.00 GB on each of 8 ranks at the peak of a step, 24.87 to spare; the rest is for "
            "activations.",
        ),
        (
            "--params 7B --gpu-mem 20GB --host-mem 1GiB",
            "Nothing fits on one rank: all that a rank holds is ",
        ),
        (
            "--params 7B --ranks 8 --stage 2 --offload-optimizer cpu --host-mem 10GB",
            "Stage 2 holds 17.50 GB on the device, 10.50 GB in host memory on each of 8 ranks at rest; host memory does "
            "not suffice.",
        ),
        (
            f"{JOB} --ranks 2 --gpu-mem 1GiB",
            "Stage 1, all on the device, the optimizer in backward: the fastest that fits on each of 2 ranks, ",
        ),
    ],
)
def test_the_verdict_is_in_figures(planned, words, says):
    if "B" in words and "--params" in words:
        words += " --preset zeroshard"
    verdict, line = planned(words)
    assert verdict.startswith(says)
    assert bool(line) is ("not suffice" not in says and "Nothing" not in says)


def test_what_no_line_can_say_has_none(planned):
    """Another system's bytes, and experts, whose mesh is the program's."""
    for words in ("--preset megatron-fp16", "--bytes parameters=1,gradients=1", "--optimizer adamw-24bit-master"):
        assert planned(f"--params 7B {words}")[1] == ""


SCREEN = 24  # lines of a terminal
BRIEF = {
    "--params 7B --ranks 8": "A rank's GB\nstage  bytes/param  at rest  sent a step\n",
    "--params 7B --ranks 8 --gpu-mem 24GiB --stage 3":
        "A rank's GB, of 25.77\nstage  bytes/param  at rest  at the peak  sent a step  to spare  fits\n"
        "3             16/N    14.00        17.94        36.75      7.83  fits\n",
    "--params 7B --ranks 8 --gpu h100-80": "s a step  device  host  files  way",
    "--params 13B --gpu 4090 --host-mem 32GiB": "with a disk of 0.25 TB for each rank:",
    "--params 1e9 --stage 3 --offload-optimizer nvme": "at rest  on the device  host  files  sent a step\n",
    f"{CLUSTER} --gpu-mem 12GB": "3                 8             all            4.00",
}  # fmt: skip


@pytest.mark.parametrize("words", BRIEF)
def test_the_answer_is_on_one_screen_and_the_rest_in_full(monkeypatch, capsys, words):
    """The same verdict and line, one table, and where the rest is."""
    printed = {}
    monkeypatch.setenv("COLUMNS", "80")
    for full in (False, True):
        app(["plan", *words.split(), *["--full"] * full], standalone_mode=False)
        printed[full] = "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines()) + "\n"
    brief, table = printed[False], BRIEF[words]
    assert len(brief.splitlines()) <= SCREEN and table in brief
    assert printed[True].startswith(brief.partition("A rank's GB" if "of one GPU" not in brief else "On 8 nodes")[0])
    assert brief.splitlines()[-1].strip() == (
        "--full says more: of each state, the peak, messages, and what is assumed"
    )


def test_a_check_takes_no_full_plan():
    with pytest.raises(InputError, match="--check runs a job; leave out --full"):
        app(["plan", JOB, "--check", "--full"], standalone_mode=False)


def test_a_trainers_bf16_is_planned_by_its_own_name(planned, capsys):
    """Autocast over fp32: 4 + 4 + 8 bytes, at stage 1 over 8 ranks 9 where bf16 with masters takes 7.5."""
    stages = {}
    for preset in ("trainer-bf16", "fp32", "zeroshard"):
        app(["plan", "--params", "7B", "--ranks", "8", "--preset", preset, "--json"], standalone_mode=False)
        stages[preset] = json.loads(capsys.readouterr().out)["stages"]
    assert stages["trainer-bf16"] == stages["fp32"]
    assert [stages[preset][1]["total"] / 7e9 for preset in ("trainer-bf16", "zeroshard")] == [9.0, 7.5]
    assert planned("--params 7B --ranks 8 --preset trainer-bf16") == planned("--params 7B --ranks 8 --preset fp32")
