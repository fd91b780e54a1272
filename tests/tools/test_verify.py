"""`zeroshard verify`: what it finds equal, what it must catch, and what it says to input it cannot use."""

import json
import os
import re
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

import jobs
import pages
import ranks
from zeroshard.cli import compare, launch, processor, reference, verify
from zeroshard.cli.config import InputError
from zeroshard.cli.gates import GATES
from zeroshard.cli.main import app
from zeroshard.cli.outcomes import Cell
from zeroshard.cli.question import Difference, Question
from zeroshard.cli.verify import DIED, notes
from zeroshard.errors import UserError
from zeroshard.planner import job

ROOT = Path(__file__).parents[2]
EXAMPLE, JOBS, PAGE = ROOT / "examples" / "job.py", ROOT / "tests" / "jobs.py", ROOT / "docs" / "verify.md"
LIMIT = 240  # seconds a command may take before it counts as hung
ONE = ("--ranks", "2", "--bucket-mib", "24")  # two configurations, with and without overlap, at two ranks


run = partial(ranks.command, timeout=LIMIT, cwd=ROOT / "tests")


def check_rank(folder):
    try:
        compare.check_rank(Path(folder), ranks.rank(), ranks.world())
    finally:
        jobs.undo()  # these processes go on to other tests


@pytest.fixture
def warm(monkeypatch, capsys):
    """`warm(name, *words)`: the command in this process, its ranks in warm ones; exit code and the object of --json."""

    def start_ranks(command, world):
        name, folder = command
        assert name == "verify-rank"
        ranks.run(world, check_rank, folder, group="env")
        return 0

    def run(name, *words):
        code = app(["verify", *([f"jobs:{name}"] if name else []), *words, "--json"], standalone_mode=False)
        shown = capsys.readouterr()
        assert shown.err == ""
        return code, json.loads(shown.out)

    monkeypatch.setattr(launch, "start_ranks", start_ranks)
    yield run
    jobs.undo()


# --------------------------------------------------------------------------------------------------------- what is equal


@pytest.mark.full
def test_split_masters_are_verified_where_they_are_split(warm):
    """At stage 3 on the device masters rest alone: nothing is split there, and it is said."""
    words = ("--ranks", "2", "--stage", "2,3", "--steps", "2", "--bucket-mib", "small", "--precision", "bf16-split")
    code, found = warm("mlp", *words)
    assert (code, found["equal"]) == (0, True)
    assert [note for note in found["notes"] if "nothing is split there" in note]


@pytest.mark.full
def test_weights_in_8_bits_are_verified_against_plain_pytorch_that_rounds(warm):
    words = ("--ranks", "2", "--stage", "1,3", "--steps", "2", "--bucket-mib", "small", "--precision", "fp32-fp8")
    code, found = warm("mlp", *words)
    assert (code, found["equal"]) == (0, True)


@pytest.mark.heavy
@pytest.mark.full
@pytest.mark.row(111)
@pytest.mark.parametrize("word", ["fp32-states16", "fp32-states16-drawn", "bf16-states16-drawn"])
def test_states_in_16_bits_are_verified_against_plain_pytorch_that_rounds_them(warm, word):
    words = ("--ranks", "1,2", "--stage", "0,3", "--steps", "2", "--bucket-mib", "small", "--precision", word)
    code, found = warm("mlp", *words)
    assert (code, found["equal"]) == (0, True)


@pytest.mark.full
@pytest.mark.row(111)
def test_states_that_are_rounded_otherwise_are_seen(warm, monkeypatch):
    """By the bits of another step: the second step's loss, or its weights, differ."""
    plain = reference.in_16_bits
    monkeypatch.setattr(reference, "in_16_bits", lambda *given: plain(*given[:-1], given[-1] + 1))
    words = ("--ranks", "1", "--stage", "2", "--steps", "3", "--bucket-mib", "small")
    code, found = warm("mlp", *words, "--precision", "fp32-states16-drawn")
    assert (code, found["equal"]) == (1, False)
    assert min(each["difference"]["step"] for each in found["results"] if each["difference"]) == 2


@pytest.mark.full
def test_gradients_in_8_bits_are_verified_against_plain_pytorch_that_rounds_them(warm):
    """Also on one rank with more micro-batches; and it is said that the reference is not the run without."""
    words = ("--ranks", "1,2", "--stage", "0,3", "--steps", "2", "--bucket-mib", "small", "--reduce", "int8")
    code, found = warm("mlp", *words)
    assert (code, found["equal"]) == (0, True)
    assert "each one's gradient rounded in the same way" in found["notes"][0]


@pytest.mark.full
def test_without_a_job_the_three_scenarios_of_a_text_are_run(warm):
    """Its model on 2 ranks, a narrow one on 3 and 4, and 4,251 parameters, which 2 and 4 do not divide; in bf16."""
    code, found = warm(None, "--stage", "1", "--bucket-mib", "24", "--steps", "2", "--accumulate", "1")
    assert (code, found["equal"]) == (0, True)
    told = [
        (each["scenario"], each["job"].partition(":")[2], each["settings"]["precision"], each["settings"]["ranks"])
        for each in found["scenarios"]
    ]
    assert told == [
        ("basic", "default", "bf16", [2]), ("more ranks", "narrow", "bf16", [3, 4]),
        ("padding", "padding", "bf16", [2, 3, 4]),
    ]  # fmt: skip
    assert all(row["result"] == "equal" for each in found["scenarios"] for row in each["results"])
    assert [len(each["results"]) for each in found["scenarios"]] == [2, 4, 7]
    _, found = warm(None, "--ranks", "2", "--stage", "1", "--bucket-mib", "24", "--steps", "1", "--precision", "fp32")
    assert {(each["settings"]["precision"], *each["settings"]["ranks"]) for each in found["scenarios"]} == {("fp32", 2)}


def test_quick_is_a_few_runs_of_the_first_scenario_after_the_facts_of_the_machine(monkeypatch, capsys):
    """What is named beside it is tried in its place."""
    asked, shown = [], []
    monkeypatch.setattr(verify, "judged", lambda plan, **_: (asked.append(plan.own), (0, {"gates": []}))[1])
    monkeypatch.setattr(verify, "_show_machine", lambda: shown.append("facts"))
    for words in ((), ("--json",), ("--ranks", "3", "--steps", "5"), ("jobs:mlp",), ("jobs:mlp", "--stage", "1")):
        assert app(["verify", *words, "--quick"], standalone_mode=False) == 0
    assert shown == 4 * ["facts"]  # not beside --json, whose environment has them
    assert [(each.job.split(":")[1], each.ranks, each.stages, each.buckets, each.steps) for each in asked] == [
        ("default", (2,), (0, 3), ("24",), 2),
        ("default", (2,), (0, 3), ("24",), 2),
        ("default", (3,), (0, 3), ("24",), 5),
        ("mlp", (2,), (0, 3), ("24",), 2),
        ("mlp", (2,), (1,), ("24",), 2),
    ]
    with pytest.raises(InputError, match="^--quick tries little, and --full all"):
        app(["verify", "jobs:mlp", "--quick", "--full"], standalone_mode=False)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_gates_of_a_gpt_with_dropout_and_tied_weights(tmp_path):
    """All four, at 1 to 4 ranks and in six formats; what is printed is what the page shows, in 80 columns."""
    (command, *shown) = re.findall(r"^\$ zeroshard (.*?)^```", PAGE.read_text(), re.M | re.S)[0].rstrip().splitlines()
    done = run(*command.split(), "--out", tmp_path, cwd=ROOT, timeout=2 * LIMIT)
    assert done.returncode == 0
    assert sorted(line.partition(":")[0] for line in done.stderr.splitlines()) == [
        f"gate {number}, {gate.name}" for number, gate in enumerate(GATES, start=1)
    ]
    printed = [line.rstrip() for line in done.stdout.strip().splitlines()]
    slow = processor.computes_bf16() is False  # then formats of 16 bits are left out, and said to be
    if not slow:
        assert [line for line in printed if "GPUs" not in line] == [line for line in shown if "GPUs" not in line]
    assert max(map(len, printed)) <= 80
    found = json.loads((tmp_path / "verify.json").read_text())
    assert (found["schema"], found["equal"], {each["result"] for each in found["gates"]}) == (1, True, {"holds"})
    formats = {"fp32", "fp32-fp8", "fp32 with int8 gradients", "bf16", "bf16-split", "bf16-fp8"}
    assert {each["format"] for each in found["results"]} == {
        each for each in formats if not (slow and each.startswith("bf16"))
    }


@pytest.mark.full
def test_the_page_shows_what_is_printed_of_a_difference():
    block = pages.shown("verify.md", "$ zeroshard verify tests/jobs.py")
    command, _, told = block.partition("\n")
    done = run(*command.removeprefix("$ zeroshard ").split(), cwd=ROOT)
    assert done.returncode == 1 and pages.is_shown(told, done.stdout), done.stdout


@pytest.mark.full
def test_sixteen_bit_weights_and_clipping(warm):
    """bf16, clipped, by the module's name: what one process with fp32 masters and fp32 sums gives."""
    words = ("--ranks", "1,2,3", "--stage", "1,2", "--bucket-mib", "small", "--precision", "bf16", "--clip", "0.2")
    code, found = warm("dropout", *words)
    assert (code, found["equal"]) == (0, True)
    assert [each["ranks"] for each in found["results"]] == [1] * 5 + [2] * 4 + [3] * 4
    assert {(each["result"], each["difference"]) for each in found["results"]} == {("equal", None)}
    assert found["results"][4]["accumulate"] == 4  # 1 rank x 4 is 2 ranks x 2


@pytest.mark.full
def test_buffers_that_training_changes(warm):
    """One process has no counterpart for rank 0's running statistics, so the stages are held against stage 0."""
    code, found = warm("batch_norm", "--ranks", "1,2", "--stage", "3", "--bucket-mib", "24")
    assert (code, found["equal"]) == (0, True)
    assert [(each["ranks"], each["reference"]) for each in found["results"]] == [
        (1, "plain PyTorch"), (1, "plain PyTorch"), (2, "stage 0"), (2, "stage 0"),
    ]  # fmt: skip
    assert "training changes buffers (2.running_mean, 2.running_var, " in found["notes"][0]


@pytest.mark.slow
@pytest.mark.timeout(420)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", [f"{EXAMPLE}:job", f"{JOBS}:dropout"])
def test_the_whole_grid(name, precision):
    """All that is compared by default, at 2, 3 and 4 ranks, with clipping."""
    done = run("verify", name, "--precision", precision, "--clip", "0.5", timeout=400)
    assert done.returncode == 0
    assert "gate 4, configuration independence: holds, 49 of 49 runs equal\n" in done.stderr
    assert "configuration independence       holds      49 of 49" in done.stdout


# ------------------------------------------------------------------------------------------------------- what is caught


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("bug", "first"),
    {
        "last_micro_batch_dropped": "0.weight",
        "padding_summed_into_the_next_parameter": "0.bias",  # the first parameter stays right
        "average_divided_twice": "0.weight",
    }.items(),
)
def test_a_known_bug_of_a_peer_is_caught(warm, bug, first):
    """Both configurations of both stages name step 1, the parameter, its element, and the rank that owns it."""
    code, found = warm(bug, *ONE, "--stage", "0,2")
    assert (code, found["equal"]) == (1, False)
    assert [(each["stage"], each["overlap"]) for each in found["results"]] == [
        (0, True), (0, False), (2, True), (2, False),
    ]  # fmt: skip
    for each in found["results"]:
        place = each["difference"]
        assert (each["result"], place["step"], place["what"], place["element"]) == ("different", 1, first, 0)
        assert place["rank"] == place["owner"] in (0, 1)
        assert float(place["got"]) != float(place["want"])
    code, found = warm("mlp", *ONE, "--stage", "0,2")  # the same without the bug
    assert (code, found["equal"]) == (0, True)


def test_a_job_that_does_not_repeat_itself_is_told_apart(capsys):
    """Then zeroshard is not what differs: no rank is started, gate 1 fails, and the others say why they were not tried."""
    assert app(["verify", "jobs:unsteady", *ONE], standalone_mode=False) == 1
    shown = capsys.readouterr().out
    says = "the job does not repeat itself: two runs without zeroshard differ at step 1, loss of micro-batch 0: "
    assert says in re.sub(r"\s+", " ", shown)
    assert re.findall(r"^([1-4])  .*? {2,}(holds|fails|not tried)", shown, re.M) == [
        ("1", "fails"), ("2", "not tried"), ("3", "not tried"), ("4", "not tried"),
    ]  # fmt: skip
    assert shown.count("all of it: two runs without zeroshard differ") == 3


@pytest.mark.full
def test_a_job_that_looks_at_its_rank(warm):
    code, found = warm("by_rank", *ONE, "--stage", "1")
    places = [(d["step"], d["what"], d["rank"]) for d in (each["difference"] for each in found["results"])]
    assert (code, places) == (1, [(1, "loss of micro-batch 1", 1)] * 2)
    assert "seems to depend on the rank or process" in found["notes"][-1]


@pytest.mark.full
def test_a_rank_that_fails_ends_its_column():
    """Alone it raises, in the second run of the first configuration; a failure at once, not after the time-out."""
    done = run("verify", "jobs:fails_on_rank_1", *ONE, "--stage", "0", "--steps", 2)
    assert done.returncode == 1
    assert "ArithmeticError: only here" in done.stderr
    assert "1 failed, 1 not run\n" in done.stdout
    assert re.search(r"^4  configuration independence +fails +0 of 2$", done.stdout, re.MULTILINE)


@pytest.mark.slow
def test_a_rank_that_dies_after_its_last_result_fails_it():
    """By a signal at its exit, in every launch: what it wrote before is equal, and its last result counts as failed."""
    done = run("verify", "jobs:dies_at_the_end", *ONE, "--stage", "0", "--steps", 2, "--json")
    found = json.loads(done.stdout)
    assert (done.returncode, found["equal"]) == (1, False)
    assert "zeroshard: rank 1 ended by signal 9; all ranks were ended" in done.stderr
    assert [each["result"] for each in found["results"]] == ["equal", "failed"]
    assert found["results"][-1]["why"] == found["notes"][-1] == DIED


@pytest.mark.parametrize(("last", "equal"), [(False, 2), (True, 1)], ids=["all end well", "one dies"])
def test_ranks_that_end_badly_after_all_results_fail_the_last(warm, monkeypatch, last, equal):
    """The exit code of the ranks is looked at beside what they have written."""
    ends_well = launch.start_ranks
    monkeypatch.setattr(launch, "start_ranks", lambda *asked: ends_well(*asked) or int(last))
    code, found = warm("mlp", *ONE, "--stage", "0", "--steps", "1")
    assert code == int(last)
    assert [each["result"] for each in found["results"]].count("equal") == equal
    assert (DIED in found["notes"]) == last


# ------------------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--ranks 0", "--ranks must be at least 1 each, got 0"),
        ("--ranks 2,-3", "--ranks must be at least 1 each, got -3"),
        ("--ranks two", "--ranks takes whole numbers between commas, as in 1,2,3; got 'two'"),
        ("--stage 4", "--stage must be of 0, 1, 2 and 3, got 4"),
        ("--steps 0", "--steps must be at least 1, got 0"),
        ("--accumulate -1", "--accumulate must be at least 1, got -1"),
        ("--seed -1", "--seed must be at least 0, got -1"),
        ("--clip -1", "--clip must be a number above 0, got -1.0"),
        ("--timeout 0", "--timeout must be a number above 0, got 0.0"),
        ("--bucket-mib smal", "--bucket-mib: 'smal' is no size; did you mean 'small'? (one of: small, 24, 0.5)"),
        ("--bucket-mib -1", "--bucket-mib must be above 0 MiB, got -1"),
        ("--replicas 4 --ranks 2,3", "--replicas must divide one of --ranks each, got 4 for [2, 3]"),
        ("--replicas 2 --ranks 2,3", "--replicas: one must divide 3 of --ranks, got [2]"),
        ("--bucket-mib nan", "--bucket-mib must be above 0 MiB, got nan"),
    ],
)
def test_settings_that_cannot_be(words, says):
    with pytest.raises(InputError) as error:
        app(["verify", "jobs:mlp", *words.split()], standalone_mode=False)
    assert str(error.value) == says


@pytest.mark.parametrize(
    ("name", "says"),
    {
        "jobs": "a job is named module:function\n  got: 'jobs'",
        "jobs:mlq": "got: 'mlq'\n  instead: did you mean 'mlp'?",
        "no_such_module:job": "ModuleNotFoundError: No module named 'no_such_module'",
        "{tests}/job.py:mlp": "the job's file does not exist\n  where: {tests}/job.py\n  instead: did you mean '{tests}/jobs.py'?",
        "jobs:without_loss": "this question needs the job's loss",
        "jobs:misspelt": "got: 'optimiser'\n  instead: did you mean 'optimizer'?",
        "jobs:cannot_be_built": " in cannot_be_built\n  got: OSError: no such corpus",
        "jobs:cannot_be_trained": "jobs:cannot_be_trained, loss(model, batch(0, 0)), or its backward\n  got: RuntimeError",
    }.items(),
)  # fmt: skip
def test_jobs_that_cannot_be(name, says):
    with pytest.raises(UserError) as error:
        app(["verify", name.format(tests=JOBS.parent), *ONE], standalone_mode=False)
    assert says.format(tests=JOBS.parent) in str(error.value)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("jobs:mlp --stage 5", "zeroshard: --stage must be of 0, 1, 2 and 3, got 5\n"),
        ("jobs:mlp --stag 1", "No such option: --stag"),
        ("jobs:mlp --precision fp8", "'fp8' is not one of 'fp32', 'bf16'"),
        ("jobs:cannot_be_built", "zeroshard: the job's function raised; where: jobs:cannot_be_built(), "),
        pytest.param(
            "jobs:products --ranks 2 --stage 1",
            "zeroshard: stage 1, buckets small, overlap on: zeroshard does not know whether this optimizer is elementwise",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(words, says):
    done = run("verify", *words.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr and done.stderr.count("\n") == 1


def test_ranks_are_its_own(monkeypatch):
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match="^verify starts its own ranks; run it without torchrun$"):
        app(["verify", "jobs:mlp"], standalone_mode=False)


# ----------------------------------------------------------------------------------------------------------------- parts


def question(**more):
    settings = {
        "job": "jobs:mlp", "ranks": (1, 2, 3), "stages": (0, 3), "buckets": ("24", "small"), "steps": 2, "accumulate": 2,
        "precision": "fp32", "clip": None, "seed": 0, "timeout": 60.0,
    }  # fmt: skip
    return Question(**{**settings, **more})


def test_a_question_survives_its_file(tmp_path):
    asked = question(clip=0.5, buffers=("a",))
    asked.save(tmp_path)
    assert Question.load(tmp_path) == asked


def test_hosts_and_replicas_are_both_tried():
    """Where no single host is asked for, one replica on one host is left out."""

    def meshes(**more):
        return {(count, over) for _, count, over in question(ranks=(4,), **more).meshes(4)}

    assert meshes(hosts=(2,)) == {(2, "hosts")}
    assert meshes(hosts=(2,), replicas=(1, 2)) == {(2, "hosts"), (2, "team")}
    assert meshes(hosts=(1, 2), replicas=(1, 2)) == {(2, "hosts"), (1, "team"), (2, "team")}


@pytest.mark.parametrize(
    ("more", "most"),
    [
        ({"ranks": (1, 2, 3)}, 2),
        ({"ranks": (2, 4, 3, 1)}, 4),
        ({"ranks": (3, 4)}, None),  # nothing to compare 4 with
        ({"accumulate": 3}, None),  # a third of a loss is not exact
        ({"buffers": ("a",)}, None),
    ],
)
def test_where_fewer_ranks_must_equal_more(more, most):
    asked = question(**more)
    assert asked.elastic == most
    for world in asked.ranks:
        extra = [each for each in asked.configurations(world) if each.plain != world]
        if most is None or world == 3 or world == most:
            assert extra == []
        else:
            ((stage, _, _, accumulate, plain, tier, *_),) = extra
            assert (stage, accumulate * world, plain, tier) == (3, asked.accumulate * most, most, "device")


def test_replicas_are_compared_like_stages():
    """Each number of them where it divides the ranks, over the whole grid."""
    asked = question(ranks=(4, 2, 3), replicas=(1, 2, 4), tiers=("cpu",))
    grid = {world: asked.configurations(world) for world in asked.ranks}
    assert {world: {each.replicas for each in found} for world, found in grid.items()} == {
        4: {1, 2, 4}, 2: {1, 2}, 3: {1},
    }  # fmt: skip
    each = 2 * 2 * 2 + 2  # stages x buckets x overlap, and stages in host memory
    assert [len(grid[world]) for world in (4, 2, 3)] == [3 * each, 2 * each + 1, each]
    assert "2 replicas" in str(grid[2][each])
    assert "replicas" not in str(grid[2][0])


@pytest.mark.full
def test_replicas_are_held_against_plain_torch(warm):
    words = ("--ranks", "3,4", "--replicas", "1,2", "--stage", "1,3", "--bucket-mib", "small", "--steps", "2")
    code, found = warm("dropout", *words)
    assert (code, found["equal"]) == (0, True)
    counts = [(each["ranks"], each["replicas"]) for each in found["results"]]
    assert counts == [(3, 1)] * 4 + [(4, 1)] * 4 + [(4, 2)] * 4


def test_an_optimizer_over_all_is_compared_like_replicas():
    """At stages 1 to 3, of several replicas; what it is of one replica, or at stage 0, the team's run has been."""
    asked = question(ranks=(4, 2), replicas=(1, 2), stages=(0, 1, 2, 3), optimizer_over=("team", "all"), tiers=("cpu",))
    grid = asked.configurations(4)
    over = {(each.stage, each.replicas, each.tier) for each in grid if each.over == "all"}
    assert over == {(stage, 2, tier) for stage in (1, 2, 3) for tier in ("device", "cpu")}
    assert {(each.stage, each.replicas) for each in grid if each.over == "team"} == {
        (stage, count) for stage in range(4) for count in (1, 2)
    }
    (one, *_) = (each for each in grid if each.over == "all")
    assert str(one).endswith("2 replicas, optimizer over all")
    alone = question(ranks=(4,), replicas=(2,), stages=(0, 1, 2, 3), optimizer_over=("all",))
    assert {each.stage for each in alone.configurations(4)} == {1, 2, 3}
    third = next(each for each in grid if each.over == "all" and each.stage == 3 and each.tier == "device")
    assert not asked.masters_alone(third)
    assert asked.masters_alone(third._replace(over="team"))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"optimizer_over": ("al",)}, "must be of team and all, got 'al'"),
        ({"optimizer_over": ()}, "must be of team and all, got ''"),
        ({"optimizer_over": ("all",), "ranks": (4,)}, "takes several --replicas and --stage 1, 2 or 3; on 4 ranks"),
        ({"optimizer_over": ("all",), "ranks": (4,), "replicas": (2,), "stages": (0,)}, "stages [0]"),
    ],
)
def test_what_cannot_be_compared_over_all_is_refused(more, said):
    with pytest.raises(InputError) as caught:
        question(**more)
    assert said in str(caught.value)


@pytest.mark.full
def test_an_optimizer_over_all_is_held_against_plain_torch(warm):
    words = (
        "--ranks",
        "4",
        "--replicas",
        "1,2",
        "--optimizer-over",
        "all,team",
        "--bucket-mib",
        "small",
        "--steps",
        "2",
    )
    code, found = warm("dropout", *words, "--stage", "0,3")
    assert (code, found["equal"]) == (0, True)
    runs = [(each["stage"], each["replicas"], each["over"]) for each in found["results"][::2]]
    assert runs == [(0, 1, "team"), (3, 1, "team"), (3, 2, "all"), (0, 2, "team"), (3, 2, "team")]
    assert any(note.startswith("--optimizer-over all needs several replicas") for note in found["notes"])


def test_equal_means_bits():
    """-0.0 is not 0.0, NaN is NaN, and another dtype or shape is another tensor."""
    tensor = torch.tensor([0.0, torch.nan, 1.0])
    assert reference.first_unequal(tensor, tensor.clone()) is None
    assert reference.first_unequal(tensor, torch.tensor([-0.0, torch.nan, 2.0])) == (
        0, "0.0", "-0.0", "2 of 3 elements differ",
    )  # fmt: skip
    assert reference.first_unequal(tensor.half(), tensor)[1:3] == ("torch.float16 (3,)", "torch.float32 (3,)")


def test_the_first_difference_names_the_rank_to_look_at():
    """The rank whose copy differs, or, where all copies are wrong alike, the owner of the element."""
    weight = Difference(2, 5, "w", 0, 7, "1.0", "2.0", "", owner=2)
    loss = Difference(3, 0, "loss of micro-batch 1", 1, None, "1.0", "2.0", "")
    assert compare.first_of([None, None]) is None
    assert compare.first_of([None, weight._replace(rank=1), weight._replace(rank=2)]).rank == 1
    assert compare.first_of([weight, weight._replace(rank=1)]).rank == 2
    assert compare.first_of([loss, weight._replace(rank=1)]).what == "w"  # step 2 comes before step 3


def test_what_a_reader_should_know_is_said():
    """Other data per rank, buffers that change, and a job that does not train, each beside the grid."""
    asked = question(ranks=(2,))
    loss = Difference(1, 1, "loss of micro-batch 1", 1, None, "1.0", "2.0", "")
    all_losses = [Cell(2, each, "different", loss) for each in asked.configurations(2)]
    assert "depend on the rank or process" in notes(asked, all_losses, True)[-1]
    assert len(notes(asked, [*all_losses[1:], Cell(2, asked.configurations(2)[0], "equal")], True)) == 1
    assert "no parameter changed" in notes(asked, [], False)[-1]
    (note,) = notes(question(ranks=(1, 2), buffers=("running_mean",)), [], True)
    assert "stage 0 without overlap, because training changes buffers (running_mean)" in note
    assert note.endswith("; at 1 rank plain PyTorch in one process, the same micro-batches one after the other")


def test_a_job_by_path(tmp_path, monkeypatch):
    """A file is loaded once, under no installed module's name, and finds its neighbours."""
    (tmp_path / "neighbour_of_json.py").write_text("ANSWER = 42")
    (tmp_path / "json.py").write_text("from neighbour_of_json import ANSWER\ndef job(): return ANSWER\n")
    monkeypatch.setattr(sys, "path", [*sys.path])
    function = job.find(f"{tmp_path}/json.py:job")
    assert function() == 42
    assert job.find(f"{os.path.relpath(tmp_path)}/json.py:job") is function
    assert sys.modules["json"] is json


def test_help_tells_the_contract(capsys):
    app(["verify", "--help"], standalone_mode=False)
    shown = capsys.readouterr().out
    assert all(part in shown for part in ("model", "optimizer(params)", "batch(step, index)", "loss(model, batch)"))
