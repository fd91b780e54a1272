"""Logs of runs: equal where the bits are, and planted mistakes are told by kind; of plain loops, DDP, FSDP2, zeroshard."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pages
import ranks
import zeroshard
from zeroshard.cli.diff import _show_steps
from zeroshard.errors import StateError, UserError
from zeroshard.runlog.parting import LOOK, part
from zeroshard.runlog.read import read, ulps_between

ROOT = Path(__file__).parents[2]
STEPS, MICRO = 3, 4  # micro-batches of a step, over all ranks


def build(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))


def batch(step, index):
    generator = torch.Generator().manual_seed(100 * step + index)
    return torch.randn(8, 16, generator=generator), torch.randn(8, 4, generator=generator)


def plain(folder, mistake=""):
    """A loop on one rank, with a mistake planted from its second step on, where it can be."""
    model = build(seed=mistake == "start")
    weight_decay = 0.0 if mistake == "weight decay" else 0.1
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=weight_decay)
    with zeroshard.RunLog(folder, model, optimizer) as log:
        for step in range(STEPS):
            planted = mistake if step else ""
            for index in range(MICRO):
                if planted == "micro-batches" and index == 1:
                    continue
                at = MICRO - 1 - index if planted == "order" else index
                x, y = batch(step, at + 50 * (planted == "data"))
                loss = F.mse_loss(model(x), y)
                share = 1 + index / 10 if planted == "weights of micro-batches" else 4.0 if planted == "factor" else 1.0
                (loss * share / MICRO).backward()
                log.backward(loss)
                if planted == "accumulation" and index < MICRO - 1:
                    optimizer.zero_grad()
            grads = [param.grad for param in model.parameters()]
            if planted == "a cast":
                for grad in grads:
                    grad.copy_(grad.bfloat16())
            if planted == "order of a sum":
                for grad in grads:
                    grad.mul_(1 + 2e-7)
            if planted == "clipping":
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            if planted == "no gradient":
                model[0].bias.grad = None
            if planted == "gradients":
                grads[0].add_(torch.randn(32, 16, generator=torch.Generator().manual_seed(1)))
            if planted == "learning rate":
                optimizer.param_groups[0]["lr"] = 2e-2
            if planted == "update":
                optimizer.param_groups[0]["betas"] = (0.5, 0.5)
            optimizer.step()
            optimizer.zero_grad()


PLAIN = [
    "start", "weight decay", "micro-batches", "order", "data", "weights of micro-batches", "factor", "accumulation",
    "a cast", "order of a sum", "clipping", "no gradient", "gradients", "learning rate", "update",
]  # fmt: skip


@pytest.fixture(scope="module")
def right(tmp_path_factory):
    folder = tmp_path_factory.mktemp("right") / "run"
    plain(folder)
    return folder


@pytest.mark.parametrize("mistake", PLAIN)
def test_a_planted_mistake_is_told_by_kind(right, tmp_path, mistake):
    """Whichever run comes first, at the step where it was planted."""
    plain(tmp_path / "wrong", mistake)
    runs = read(right), read(tmp_path / "wrong")
    for found in (part(*runs), part(*reversed(runs))):
        assert found.kind == mistake
        step = (
            0
            if mistake == "start"
            else 1
            if mistake == "weight decay"
            else 2
            if mistake in ("learning rate", "update")
            else 1
        )
        assert found.step == step
    assert part(runs[0], runs[0]) is None


def on_ranks(folder, engine, mistake=""):
    rank, world = ranks.rank(), ranks.world()
    model, zero = build(seed=rank if mistake == "replicas" else 0), None
    if engine == "DDP" and mistake != "replicas":
        model = nn.parallel.DistributedDataParallel(model)
    if engine == "FSDP2":
        from torch.distributed.fsdp import fully_shard

        for module in (model[0], model[2], model):
            fully_shard(module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    if engine.startswith("stage"):
        zero = zeroshard.shard(model, optimizer, stage=int(engine[-1]))
    with zeroshard.RunLog(folder, model, optimizer, zero=zero) as log:
        for step in range(STEPS):
            for turn in range(MICRO // world):
                last = turn == MICRO // world - 1
                x, y = batch(step, turn * world + rank * (mistake != "same data"))
                counts = 0.0 if mistake == "a rank" and rank == 1 else 1 / world if mistake == "factor" else 1.0
                quiet = mistake == "quiet" and not last
                if engine == "FSDP2":
                    model.set_requires_gradient_sync(not quiet)
                with model.no_sync() if quiet and engine == "DDP" else contextlib.nullcontext():
                    loss = F.mse_loss(model(x), y)
                    (loss * counts * world / MICRO).backward()
                log.backward(loss)
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize(
    "stage", [0, pytest.param(1, marks=pytest.mark.full), pytest.param(2, marks=pytest.mark.full), 3]
)
def test_a_sharded_run_has_the_log_of_a_plain_one(right, tmp_path, stage):
    ranks.run(2, on_ranks, tmp_path / "ours", f"stage {stage}")
    assert part(read(right), read(tmp_path / "ours")) is None


CASES = [
    ("DDP", "", "order of a sum"), ("DDP", "same data", "same data"), ("DDP", "a rank", "a rank"),
    ("DDP", "factor", "factor"), ("DDP", "replicas", "replicas"), ("FSDP2", "", "order of a sum"),
    ("FSDP2", "a rank", "a rank"),
]  # fmt: skip


@pytest.mark.parametrize(("engine", "mistake", "kind"), CASES)
def test_runs_of_other_engines_part_by_the_same_kinds(right, tmp_path, engine, mistake, kind):
    ranks.run(2, on_ranks, tmp_path / "theirs", engine, mistake)
    found = part(read(right), read(tmp_path / "theirs"))
    assert found.kind == kind
    if kind == "a rank":
        assert "of rank 1 are missing" in found.says and "backward 1, backward 3" in found.says
    if kind == "factor":
        assert "0.5 times" in found.says and found.says.endswith("the ranks, 2")
    if kind == "order of a sum":
        assert 0 < found.ulps < 100


@pytest.mark.parametrize("engine", ["DDP", "FSDP2"])
def test_a_missing_no_sync_is_found(tmp_path, engine, command, monkeypatch):
    """Two runs of one engine that differ in nothing else: each backward's sum is sent, or one for all of them."""
    for name in ("quiet", ""):
        ranks.run(2, on_ranks, tmp_path / (name or "each"), engine, name)
    found = part(read(tmp_path / "quiet"), read(tmp_path / "each"))
    assert found.kind == "no_sync"
    assert found.says.startswith(f"ranks add up after each backward in {tmp_path / 'each'}")
    if engine == "FSDP2":  # docs/diff.md, of a larger model
        runs = tmp_path / "runs"
        runs.mkdir()
        for name, told in (("each", "new"), ("quiet", "good")):
            (tmp_path / name).rename(runs / told)
        monkeypatch.chdir(tmp_path)
        _, told, _ = command("diff", "runs/new", "runs/good")
        block = pages.shown("diff.md", "$ zeroshard diff runs/new").partition("\n")[2]
        assert pages.is_shown(block, told, pages.DIGITS, "ULPs?"), told


def test_the_command_says_where_and_why(right, tmp_path, command):
    plain(tmp_path / "wrong", "factor")
    plain(tmp_path / "again")
    code, told, _ = command("diff", right, tmp_path / "again")
    assert (code, told.splitlines()[-1]) == (0, "the same bits in all 3 steps")
    assert [line.split() for line in told.splitlines()[4:-1]] == [
        *([str(step), "equal", "equal", "equal"] for step in range(STEPS)), ["after", "them", "equal", "-", "-"],
    ]  # fmt: skip
    code, told, _ = command("diff", right, tmp_path / "wrong")
    assert code == 1
    assert "they part at step 1, gradients: 0.weight, and 3 tensors more" in told
    assert f"look at: {LOOK['factor']}" in told
    steps = [re.split("  +", line.strip()) for line in told.splitlines()[4:8]]
    assert steps[:2] == [["0", "equal", "equal", "equal"], ["1", "equal", "equal", "4 differ"]]
    assert steps[2] == ["2", "4 differ", "4 differ", "4 differ"] and steps[3] == ["after them", "4 differ", "-", "-"]
    code, told, _ = command("diff", right, tmp_path / "wrong", "--json")
    found = json.loads(told)
    assert (code, found["equal"], found["first_difference"]["kind"]) == (1, False, "factor")
    assert found["first_difference"]["element"] == 0
    assert found["step_by_step"][1] == {"weights": 0, "losses": 0, "gradients": 4}
    for folders, words in (((right, tmp_path), "no run log here"), ((tmp_path / "x", right), "no run log here")):
        code, _, said = command("diff", *folders)
        assert code == 2
        assert words in said


def test_a_log_that_was_not_closed_is_said_to_lack_its_last_update(right, tmp_path, command):
    for name in ("left", "closed"):
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 if name == "left" else 0.2)
        log = zeroshard.RunLog(tmp_path / name, model, optimizer)
        loss = model(batch(0, 0)[0]).square().mean()
        loss.backward()
        log.backward(loss)
        optimizer.step()
        log._file.close() if name == "left" else log.close()
    code, told, _ = command("diff", tmp_path / "left", tmp_path / "closed")
    said = " ".join(told.split())
    assert code == 0 and "the same bits in all 1 step" in said
    assert (
        f"not closed: {tmp_path / 'left'} lacks the weights after its last step" in said
        and said.count("not closed") == 1
    )
    code, told, _ = command("diff", tmp_path / "left", tmp_path / "closed", "--json")
    assert json.loads(told)["closed"] == [False, True]
    assert "not closed" not in command("diff", right, right)[1]


def test_many_steps_alike_are_one_line(capsys):
    equal, differs = ({"weights": 0, "losses": 0, "gradients": count} for count in (0, 2))
    _show_steps([*[equal] * 1200, differs, *[differs] * 7, {"weights": 2}])
    lines = capsys.readouterr().out.splitlines()[2:]
    assert [re.split("  +", line.strip())[0] for line in lines] == [
        "0 to 1,199",
        *(f"{step:,}" for step in range(1200, 1208)),
        "after them",
    ]


def test_the_page_shows_what_the_command_prints(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "diff.md").read_text()
    program, shown = (re.search(rf"```{kind}\n(.*?)```", page, re.DOTALL)[1] for kind in ("python", "console"))
    exec(compile(program, "diff.md", "exec"), {})
    asked, answer = shown.split("\n", 1)
    code, told, _ = command(*asked.split()[2:])
    assert (code, digits_cut(told)) == (1, digits_cut(answer))


def digits_cut(text):
    """The text with numbers in four digits: the others are the processor's."""
    return re.sub(r"\d+\.\d+", lambda number: f"{float(number[0]):.4g}", text)


def test_what_is_no_log_is_refused(right, tmp_path):
    folder = tmp_path / "run"
    model = nn.Linear(2, 2)
    log = zeroshard.RunLog(folder, model)
    with pytest.raises(UserError, match="a run's log already"):
        zeroshard.RunLog(folder, model)
    with pytest.raises(UserError, match="logs of two models"):
        part(read(right), read(folder))
    log.close()
    with pytest.raises(StateError, match="closed"):
        log.gradients()
    path = folder / "rank00000.jsonl"
    text = path.read_text()
    for wrong in (
        "",
        "{}\n",
        text.replace("run log", "letter"),
        text.replace('"step":0', '"step":7') + text.splitlines()[1],
    ):
        path.write_text(wrong)
        with pytest.raises(UserError, match="run's log"):
            read(folder)
    path.write_text(text + '{"step": 1, "loss')  # killed while it wrote
    assert len(read(folder).first.steps) == 1
    path.rename(folder / "rank00001.jsonl")
    with pytest.raises(UserError, match="not the log of one run"):
        read(folder)


def short(folder, loss, last=1.0):
    model = nn.Linear(2, 2)
    nn.init.ones_(model.weight)
    nn.init.constant_(model.bias, float("nan"))
    with zeroshard.RunLog(folder, model) as log:
        for step in range(2):
            for param in model.parameters():
                param.grad = torch.full_like(param, last if step else 1.0)
            log.backward(loss)
            log.gradients()


def test_infinite_gradients_are_no_rounding(tmp_path, command):
    for name, last in (("a", 2.0), ("infinite", float("inf"))):
        short(tmp_path / name, 1.0, last)
    found = part(read(tmp_path / "a"), read(tmp_path / "infinite"))
    assert found.kind == "gradients"
    told = json.loads(command("diff", tmp_path / "a", tmp_path / "infinite", "--json")[1], parse_constant=pytest.fail)
    assert told["first_difference"]["values"] == [2.0, "inf"]


def test_a_closed_log_takes_no_part_in_what_comes_after(tmp_path):
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with zeroshard.RunLog(tmp_path / "run", model, optimizer, trace=True) as log:
        loss = model(batch(0, 0)[0]).square().mean()
        loss.backward()
        log.backward(loss)
        optimizer.step()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    model(batch(0, 1)[0]).square().mean().backward()
    optimizer.step()
    assert len(read(tmp_path / "run").first.steps) == 2


def test_equal_gradients_hide_no_other_loss_and_no_later_step(tmp_path):
    """What is no number in both runs is equal; and then the steps behind it are looked at, too."""
    for name, arguments in {"a": (1.0,), "half": (0.5,), "nan": (float("nan"),), "late": (float("nan"), 2.0)}.items():
        short(tmp_path / name, *arguments)
    a, half, nan, late = (read(tmp_path / name) for name in ("a", "half", "nan", "late"))
    assert part(a, a) is None
    assert part(nan, read(tmp_path / "nan")) is None
    assert (part(a, half).kind, part(a, half).values) == ("losses", (1.0, 0.5))
    assert (part(nan, late).kind, part(nan, late).step) == ("factor", 1)


def test_numbers_between_two():
    assert ulps_between(1.0, 1.0 + 2**-23, "float32") == 1
    assert ulps_between(-1e-45, 1e-45, "float32") == 2
    assert ulps_between(1.0, 1.0 + 2**-7, "bfloat16") == 1
    assert ulps_between(1.0, 2.0, "float64") == 2**52
    assert ulps_between(float("nan"), 1.0, "float32") is None
