"""What the planner says of tiers beside what the engine holds and moves there, to the byte."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from torch import nn

import ranks
import zeroshard
from flat import plan_of
from zeroshard import Machine, Model, Offload, Precision
from zeroshard.cli.config import InputError, offload_of, places
from zeroshard.features import nvme
from zeroshard.layout.stage import STATES
from zeroshard.planner import disk, files, predict_tiers
from zeroshard.planner.built import holding
from zeroshard.planner.files import closed_moves, moves

WIDTH, LAYERS, STEPS = 20, 5, 3
BF16 = Precision(param_dtype=torch.bfloat16, cast_inputs=True)
TIERS = ("device", "cpu", "nvme")
MIXED = [(0.4, {"nvme": 0.5, "cpu": 0.3}, {"nvme": 0.6}), ({"nvme": 0.5}, 0.5, {"cpu": 0.2, "nvme": 0.4})]
EACH = [*zip(TIERS, TIERS, TIERS, strict=True), *zip(TIERS, TIERS[1:] + TIERS[:1], TIERS[2:] + TIERS[:2], strict=True)]


def offload(where, path):
    on_disk = any(each == "nvme" or isinstance(each, dict) for each in where)
    return Offload(*where, path=path if on_disk else None)


PATIENT = zeroshard.Comm(timeout=60)  # a disk that others use may take its time


def frozen_first(path):
    """Bytes of the buffers before and after the largest bucket is unfrozen, as predicted and held; and the weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    model[0].requires_grad_(requires_grad=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    settings = None if path is None else Offload(gradients="nvme", optimizer="nvme", path=path)
    layout = zeroshard.Layout(units=["*"])
    zero = zeroshard.shard(model, optimizer, precision=BF16, offload=settings, layout=layout, comm=PATIENT)
    seen = []
    for step in range(4):
        if step == 2:
            seen.append((predict_tiers(zero).get("host", {}).get("staging"), zero.ledger().held["staging"]))
            model[0].requires_grad_()
        model(torch.full((2, 64), 0.1 * step)).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    seen.append(zero.ledger().held["staging"])
    with zero.gathered():
        return seen, [param.detach().clone() for param in model.parameters()]


def test_a_frozen_bucket_has_no_room_in_buffers_until_it_is_unfrozen(tmp_path):
    """No gradients, masters or states: buffers have a page each, and those that meet it grow."""
    ((said, held), after), weights = frozen_first(tmp_path)
    small, large = nvme.aligned(4 * (64 * 8 + 128)), nvme.aligned(4 * (64 * 64 + 128))
    assert said == held == 4 * nvme.STAGING_ROOMS * small
    assert held + 4 * (large - small) <= after <= 4 * nvme.STAGING_ROOMS * large
    assert all(map(torch.equal, weights, frozen_first(None)[1]))


# ------------------------------------------------------------------------------------------------------------- plans


def planned(where, path, **settings):
    return plan_of(offload=offload(where, path), **{"params": 1e9, "ranks": 4, **settings})


@pytest.mark.parametrize("where", [*EACH, *MIXED], ids=str)
def test_a_plan_of_tiers_is_the_plan_shared_out(where, tmp_path):
    """No byte is lost between tiers; peaks and savings are the device's; buffers and copies come on top."""
    plain, found = (
        zeroshard.plan(Model(1e9, preset="paper"), Machine(ranks=4)),
        planned(where, tmp_path, preset="paper"),
    )
    parts = {kind: found.offload.tiers(kind) for kind in STATES}
    for before, stage in zip(plain.stages, found.stages, strict=True):
        assert {state: n for state, n in stage.states.items() if state != "staging"} == before.states
        for kind, state in (("parameters", "parameters"), ("gradients", "gradients"), ("optimizer", "v")):
            for tier in ("device", "host", "nvme"):
                share = stage.tiers.get(tier, {}).get(state, 0) / before.states[state]
                assert share == pytest.approx(parts[kind].get(tier, 0), abs=1e-6)
        assert stage.most == stage.device == sum(stage.tiers.get("device", {}).values())
        assert stage.saved == pytest.approx(1 - stage.device / plain.stages[0].total, abs=1e-9)
        assert stage.files == sum(stage.tiers.get("nvme", {}).values())
        buffers = stage.states.get("staging", 0)
        assert (buffers > 0) == (stage.files > 0)
        assert stage.host == sum(stage.tiers.get("host", {}).values())


def test_weights_updated_elsewhere_have_masters_on_a_gpu(tmp_path):
    """In fp32 there is none otherwise; the optimizer in host memory updates a copy there."""
    found = zeroshard.plan(Model(1000, preset="fp32"), offload=Offload(optimizer="cpu")).stages[3]
    assert found.tiers["host"] == {"master": 4000, "m": 4000, "v": 4000}
    assert (
        "master"
        not in zeroshard.plan(Model(1000, preset="fp32"), offload=Offload("cpu", "cpu", "cpu")).stages[3].states
    )


@pytest.mark.parametrize("where", [("nvme", "nvme", "nvme"), ("nvme", "cpu", "cpu")], ids=str)
def test_the_closed_form_of_a_steps_files_is_the_replay_without_what_buffers_still_hold(where, stage, tmp_path):
    """All that is written, and at most three slots of a file more read in each of two passes over it."""
    widths = [256] * 40
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(*pair, bias=False)) for pair in itertools.pairwise(widths)))
    optimizer = torch.optim.AdamW(blocks.parameters())
    zero = zeroshard.shard(blocks, optimizer, stage=stage, precision=BF16, offload=offload(where, tmp_path))
    held = predict_tiers(zero)["nvme"]
    exact = moves(holding(zero))
    closed = closed_moves(held, zero.placements, mastered=True)
    slot = 256 * 256 * 4
    assert closed.written == exact.written
    assert 0 <= closed.read - exact.read <= 3 * 2 * slot * len(held)


def test_what_a_plan_refuses(tmp_path):
    for settings, says in (
        ({"step_time": 1.0}, "nothing rests in any"),
        ({"offload": Offload(optimizer="nvme", path=tmp_path), "step_time": 0}, "counts seconds"),
        ({"offload": Offload(optimizer="nvme", path=tmp_path), "tokens": 5}, "what the disk moves"),
        ({"disk_read": 3.2, "disk_write": 2}, "Machine.disk_read is about files"),
        (
            {"offload": Offload(optimizer="nvme", path=tmp_path), "disk": tmp_path / "no"},
            "a budget of memory is a number",
        ),
    ):
        with pytest.raises(zeroshard.Error, match=says):
            plan_of(params=1e6, preset="paper", **settings)


def test_a_disk_says_how_long_a_steps_files_take(tmp_path):
    """10 bytes read and 4 written: 8 go both ways at once, as fast as the slower, and 6 more are read alone."""
    moves = files.Moves(10, 4)
    assert disk.Disk(read=3, write=5).seconds(moves) == 8 / 3 + 6 / 3
    assert disk.Disk(read=5, write=2).seconds(moves) == 8 / 2 + 6 / 5
    assert disk.wear(moves, step_time=2.0) == 4 * 43200
    offload = Offload(optimizer="nvme", path=tmp_path)
    plan = plan_of(params="1e9", stage=3, offload=offload, disk_read=3, disk_write=1.5, tokens=4096)
    (stage,) = plan.stages
    assert (stage.moves, plan.seconds(stage)) == (files.Moves(12 * 10**9, 12 * 10**9), 16.0)
    assert plan.tokens_per_second(stage) == 4096 / 16


# ----------------------------------------------------------------------------------------------------------- commands


def run(*words, code=0):
    """What the command prints."""
    done = ranks.command(*words, timeout=120, cwd=Path(__file__).parents[2], COLUMNS="200")
    assert done.returncode == code, done.stderr
    return done.stdout if code == 0 else done.stderr


@pytest.mark.slow
def test_a_check_compares_tiers_and_what_files_moved():
    words = ("plan", "examples/job.py:job", "--ranks", 2, "--stage", 3, "--offload-optimizer", "nvme", "--check")
    rows = json.loads(run(*words, "--offload-gradients", "cpu", "--json"))["rows"]
    exact = [row for row in rows if not row["what"].startswith("measured")]
    assert [row for row in exact if row["difference"]] == []
    held = {row["what"]: row["held"] for row in exact if row["rank"] == 0}
    assert held["at rest in nvme"] == held["exp_avg in nvme"] + held["exp_avg_sq in nvme"] > 0
    assert {"at rest", "at rest in host", "gradients in host", "read in 3 steps", "write in 3 steps"} <= set(held)


@pytest.mark.parametrize("tier", [pytest.param("cpu", marks=pytest.mark.full), "nvme"])
def test_a_check_compares_activations_that_rest_in_a_tier(tier):
    """As forward ends, what keeps their room in files, and what they moved."""
    words = ("plan", "examples/job.py:job", "--ranks", 1, "--stage", 3, "--check", "--json")
    rows = json.loads(run(*words, "--offload-activations", tier))["rows"]
    exact = {row["what"]: row for row in rows if not row["what"].startswith("measured")}
    assert [what for what, row in exact.items() if row["difference"]] == []
    at = {"cpu": "host"}.get(tier, tier)
    moved = exact[f"activations in {at}, as forward ends"]["held"]
    assert moved > 0  # by all layers but the last, with which backward begins
    kept = {what: row["held"] for what, row in exact.items() if what == "activations in nvme"}
    assert kept == ({"activations in nvme": moved} if tier == "nvme" else {})
    written = exact["write in 3 steps"]["held"]
    assert written == (3 * moved if tier == "nvme" else 0)


@pytest.mark.full
def test_verify_adds_tiers_to_its_grid(tmp_path):
    words = ("verify", "tests/jobs.py:mlp", "--ranks", 1, "--stage", "1,3", "--steps", 2, "--bucket-mib", "small")
    found = json.loads(run(*words, "--offload", "cpu,nvme", "--offload-path", tmp_path, "--json"))
    assert found["equal"]
    cells = [(cell["stage"], cell["tier"]) for cell in found["results"]]
    assert cells[4:] == [(1, "cpu"), (3, "cpu"), (1, "nvme"), (3, "nvme")]
    assert {tier for _, tier in cells[:4]} == {"device"}
    assert list(tmp_path.iterdir()) == []
    assert "go together" in run(*words, "--offload", "nvme", code=2)


def test_train_takes_tiers(tmp_path):
    (tmp_path / "text").write_text("a line of text\n" * 100)
    words = ("train", "--steps", 2, "--batch", 1, "--data", tmp_path / "text", "--out", tmp_path / "run")
    run(
        *words,
        "--offload",
        "nvme",
        "--offload-gradients",
        0.5,
        "--offload-activations",
        "nvme",
        "--offload-path",
        tmp_path / "files",
    )
    (rank,) = json.loads((tmp_path / "run" / "ledger.json").read_text())["ranks"]
    assert {state for state, n in rank["tiers"]["nvme"].items() if n} == {
        "parameters",
        "exp_avg",
        "exp_avg_sq",
        "activations",
    }
    assert rank["predicted"] == {state: n for state, n in rank["held"].items() if n and state in rank["predicted"]}
    assert list((tmp_path / "files").iterdir()) == []


@pytest.mark.full
def test_a_resumed_run_keeps_its_tiers(tmp_path):
    """Unless others are given; a folder for files goes with the last state in files."""
    (tmp_path / "text").write_text("a line of text\n" * 100)
    words = ("train", "--ranks", 1, "--batch", 1, "--data", tmp_path / "text", "--out", tmp_path / "run")
    files = ("--offload-activations", "nvme", "--offload-path", tmp_path / "files")
    run(*words, "--steps", 1, "--offload-optimizer", "nvme", *files)

    def resumed(*more):
        run("train", "--resume", tmp_path / "run", *more)
        config = json.loads((tmp_path / "run" / "run.json").read_text())["config"]
        return {name: where for name, where in config.items() if name.startswith("offload_") and where}

    kept = {"offload_optimizer": "nvme", "offload_activations": "nvme", "offload_path": str(tmp_path / "files")}
    assert resumed("--steps", 2) == kept
    assert resumed("--steps", 3, "--offload-gradients", "cpu") == {**kept, "offload_gradients": "cpu"}
    assert resumed("--steps", 4, "--offload", "cpu", "--offload-activations", "cpu") == {
        f"offload_{what}": "cpu" for what in (*STATES, "activations")
    }


@pytest.mark.full
def test_simulate_says_what_each_tier_holds_and_what_files_move():
    words = (
        "simulate",
        "examples/job.py:job",
        "--ranks",
        4,
        "--offload-optimizer",
        "nvme",
        "--offload-gradients",
        "cpu",
    )
    (found,) = json.loads(run(*words, "--json"))["simulated"]
    elements = found["layout"]["fullest_rank_elements"]
    tiers, each = found["tiers"], 4 * elements
    assert tiers["device"] == {"parameters": each}
    assert (tiers["host"].pop("staging") > 0, tiers["host"].pop("step") > 0, tiers["host"]) == (
        True,
        True,
        {"gradients": each},
    )
    assert tiers["nvme"] == {"exp_avg": each, "exp_avg_sq": each}
    assert found["files"]["write"] == 2 * each
    assert found["time"]["optimizer"] == 0
    assert "Where it rests, in bytes" in run(*words) and "Where it rests" not in run(*words[:4])


def two_layers():
    return {
        "model": lambda: nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)),
        "optimizer": lambda params: torch.optim.AdamW(params),
        "batch": lambda step, index: torch.ones(4, 64),
        "loss": lambda model, batch: model(batch).sum(),
    }


@pytest.mark.parametrize("step", [None, "host"])
def test_a_jobs_plan_on_the_cpu_says_what_rooms_a_gpu_has_beside(step):
    """Three of each state's largest bucket, or as many as there are: what `predict` counts on an accelerator."""
    found = zeroshard.plan(two_layers, Machine(ranks=2), offload=Offload(optimizer="cpu", step=step))
    (note,) = [each for each in found.notes if each.startswith("as on a CPU")]
    padded = (64 * 64 + 64 + 255) // 256 * 256  # both layers' buckets are as large, whole at stage 0
    rooms = f"; states that it steps pass through up to {2 * 3 * 4 * padded:,} bytes of its own memory"
    assert note.endswith("have masters" + rooms * (step is None))


def test_activations_are_for_jobs():
    said = run("plan", "--params", "7B", "--offload-activations", "cpu", code=2)
    assert "zeroshard: --offload-activations" in said
    assert "of jobs, or of so many tokens; instead: --batch 1, --seq 2048 beside it" in said


@pytest.mark.parametrize(
    ("given", "path", "says"),
    [
        ({"offload": "nvme"}, "", "--offload-parameters nvme needs a folder on a disk: --offload-path DIR"),
        ({"optimizer": "disk"}, "", "--offload-optimizer names no tier.*instead: device, cpu, nvme or a fraction"),
        ({"optimizer": "cpu"}, "x", "--offload-path is for files"),
        ({"offload": "0.5"}, "", "--offload must be cpu or nvme"),
        ({"activations": "nvme"}, "", "--offload-activations nvme needs a folder on a disk: --offload-path DIR"),
        ({"activations": "0.5"}, "", "--offload-activations names a tier; got: 0.5; instead: device, cpu or nvme$"),
    ],
)
def test_what_the_options_refuse(given, path, says):
    with pytest.raises(InputError, match=says):
        offload_of(places(given.pop("offload", ""), **given), path)


def test_what_the_options_say():
    assert places("nvme", optimizer="0.5", gradients="device") == {"parameters": "nvme", "optimizer": "0.5"}
    assert offload_of({"parameters": "nvme", "optimizer": "0.5"}, "x") == Offload("nvme", "device", 0.5, path="x")
    assert offload_of({}, "") == Offload()
