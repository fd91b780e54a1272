"""The four gates of `zeroshard verify`: which runs they are tried by, which bug each of them catches, and what is told."""

from __future__ import annotations

import json
import os

import pytest

import jobs
from test_verify import question, warm  # noqa: F401
from zeroshard.cli import gates, machine
from zeroshard.cli.config import InputError
from zeroshard.cli.main import app
from zeroshard.cli.outcomes import Cell, Twice, outcomes
from zeroshard.cli.question import Difference

NAMES = [
    "fixed-environment repeatability", "baseline equivalence", "restart replay", "configuration independence",
]  # fmt: skip
ONE = ("--ranks", "1,2", "--stage", "2", "--bucket-mib", "small", "--steps", "2")


def everything(full=False, given=(), slow="", **more):
    return gates.everything(question(accumulate=1, **more), given, full=full, folder="/tmp", slow=slow)


# ----------------------------------------------------------------------------------------------------------- which runs


def test_any_two_values_that_can_meet_meet_in_a_run():
    """Of 1 to 4 ranks, 4 stages, 2 bucket sizes, overlap, 3 tiers, replicas, hosts, 3 transports and 6 formats."""
    plan = everything()
    met = {pair for trial in plan.trials for pair in trial.meetings}
    assert met == plan.possible
    values = {axis: {trial.axes[axis] for trial in plan.trials} for axis in plan.trials[0].axes}
    assert {axis: len(found) for axis, found in values.items()} == {
        "ranks": 4, "stage": 4, "bucket MiB": 2, "overlap": 2, "tier": 3, "replicas": 2, "hosts": 2, "optimizer over": 2,
        "transport": 3, "format": 6,
    }  # fmt: skip
    assert len(plan.trials) < 60  # of thousands
    assert plan.own.steps == 2 and ("ranks 5 to 8", "they take --full, or --ranks") in plan.untried


def test_full_takes_every_combination_in_the_jobs_own_format():
    """And the job's own steps, up to eight ranks, with what is named as it is named."""
    plan = everything(full=True, given={"stage"}, stages=(3,))
    assert (plan.own.ranks, plan.own.stages, plan.own.steps) == (tuple(range(1, 9)), (3,), 2)
    own = {(trial.ranks, trial.configuration) for trial in plan.trials if trial.format == "fp32"}
    for ranks in plan.own.ranks:
        assert {(ranks, each) for each in plan.own.configurations(ranks)} <= own
    assert len(plan.questions) == 6 and not plan.untried


def test_what_is_named_is_all_that_is_tried():
    asked = question(ranks=(2, 3))
    plan = gates.asked(asked)
    assert [(trial.ranks, trial.configuration) for trial in plan.trials] == [
        (ranks, each) for ranks in (2, 3) for each in asked.configurations(ranks)
    ]


def test_formats_that_take_too_long_here_are_said_and_left_out():
    plan = everything(slow="no arithmetic for it")
    assert set(plan.questions) == {"fp32", "fp32-fp8", "fp32 with int8 gradients"}
    assert ("format bf16", "no arithmetic for it; --precision bf16 tries it") in plan.untried


@pytest.mark.parametrize(
    ("counts", "base", "others"),
    [((1, 2, 3, 4), 2, [1, 4]), ((3,), 3, []), ((1,), 1, []), ((4, 8), 4, []), ((3, 5), 3, [])],
)
def test_a_run_is_stopped_on_few_ranks_and_resumed_on_others(counts, base, others):
    """On others with as many micro-batches a step: with one for each of 4 ranks, 8 cannot have half of one."""
    plan = gates.asked(question(ranks=counts, accumulate=2 if counts != (4, 8) else 1))
    launches = [(ranks, [trial.kind for trial in trials if trial.kind != "grid"]) for ranks, trials in plan.launches()]
    assert launches[:2] == [(base, ["record"]), (base, ["again", "resumed"])]
    assert [ranks for ranks, kinds in launches[2:] if kinds == ["resumed"]] == others


# -------------------------------------------------------------------------------------------------- which bug is caught


@pytest.mark.parametrize(
    ("bug", "results"),
    {
        "mlp": ("holds", "holds", "holds", "holds"),
        "momentum_that_is_not_resumed": ("holds", "holds", "fails", "holds"),
        "average_divided_twice": ("holds", "fails", "holds", "fails"),
        "sums_that_are_raced_for": ("fails", "fails", "fails", "fails"),
    }.items(),
)
def test_each_gate_catches_its_own_bugs(warm, bug, results):  # noqa: F811
    code, found = warm(bug, *ONE, *(("--ranks", "2") if bug.startswith("average") else ()))  # by one it is none
    assert [each["name"] for each in found["gates"]] == NAMES
    assert tuple(each["result"] for each in found["gates"]) == results
    assert (code, found["equal"]) == (int("fails" in results), "fails" not in results)
    for each in found["gates"]:
        different = [run["difference"] for run in each["runs"] if run["result"] == "different"]
        assert all(set(one) >= {"step", "what", "rank", "got", "want"} for one in different)
        assert bool(different) == (each["result"] == "fails")
    if bug == "momentum_that_is_not_resumed":  # the step after the stop, on the ranks of before and on others
        assert [(run["what"][:7], run["difference"]["step"]) for run in found["gates"][2]["runs"]] == [
            ("2 ranks", 2), ("1 rank,", 2),
        ]  # fmt: skip


def test_of_one_step_there_is_nothing_to_resume(warm):  # noqa: F811
    code, found = warm("mlp", *ONE[:-1], "1")
    restart = found["gates"][2]
    assert (code, restart["result"], restart["runs"]) == (0, "not tried", [])
    assert restart["not_tried"] == [{"what": "a stop", "why": "of one step there is no half: --steps 2 or more"}]


@pytest.mark.full
def test_changing_buffers_leave_the_baseline_untried_but_on_one_rank(warm):  # noqa: F811
    code, found = warm("batch_norm", *ONE)
    baseline = found["gates"][1]
    assert (code, baseline["result"], baseline["held"]) == (0, "holds", 1)
    (untried,) = baseline["not_tried"]
    assert untried["what"] == "2 ranks" and untried["why"].startswith("training changes buffers (2.running_mean")


# ---------------------------------------------------------------------------------------------------------- what is told


def judged(*results, **more):
    """The gates of cells with these results, of the job's own runs first."""
    plan = gates.asked(question(ranks=(2,), **more))
    cells = [
        Cell(2, trial.configuration, result, None, trial, "it cannot be" if result == "refused" else "")
        for trial, result in zip(plan.trials, results, strict=False)
    ]
    return outcomes(plan, [Twice("fp32", 2, None)], cells, "this machine has none")


def test_a_refused_run_is_no_run_and_its_reason_is_told():
    configuration = judged("equal", "refused", "equal", "refused")[3]
    assert (configuration.result, configuration.held, len(configuration.runs)) == ("holds", 2, 2)
    told = dict(configuration.untried)
    (what,) = (each for each, why in told.items() if why == "it cannot be")
    assert what == "2 ranks, stage 0, buckets 24 MiB, overlap off, fp32 (and 1 more)"
    assert told["GPUs"] == "this machine has none"


@pytest.mark.parametrize("result", ["different", "failed", "not run"])
def test_one_run_that_is_not_equal_fails_its_gate(result):
    configuration = judged("equal", "equal", result)[3]
    assert (configuration.result, configuration.held) == ("fails", 2)
    assert configuration.axes["bucket MiB"] == {"24": [2, 2], "small": [0, 1]}


def test_a_plain_run_that_differs_fails_gate_1_and_leaves_the_others_untried():
    differs = Difference(1, 0, "loss of micro-batch 0", 0, None, "1.0", "2.0", "")
    found = outcomes(gates.asked(question()), [Twice("fp32", 2, differs)], [], "")
    assert [each.result for each in found] == ["fails", *["not tried"] * 3]


def test_the_object_is_written(warm, tmp_path):  # noqa: F811
    code, found = warm("mlp", *ONE, "--out", str(tmp_path / "new"))
    assert json.loads((tmp_path / "new" / "verify.json").read_text()) == found
    assert set(found) == {"schema", "job", "equal", "gates", "environment", "settings", "notes", "results"}
    assert set(found["gates"][0]) == {"key", "name", "claim", "result", "held", "runs", "not_tried"}
    assert os.listdir(tmp_path / "new") == ["verify.json"]
    assert found["environment"].keys() == machine.facts().keys()
    assert code == 0


def test_a_folder_that_cannot_be_made_is_refused_before_anything_runs(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="--out: no folder can be made at "):
        app(["verify", "jobs:mlp", "--out", str(tmp_path / "file" / "more")], standalone_mode=False)
    jobs.undo()


def test_full_takes_a_job():
    with pytest.raises(InputError, match="^--full is of a job of yours"):
        app(["verify", "--full"], standalone_mode=False)
