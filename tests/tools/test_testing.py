"""`zeroshard.testing`: its mark and its options, as a project's own pytest sees them.

Few runs of pytest show all of it: one of tests as they are, one that records logs by fresh seeds under pytest-xdist, one
that compares by a named seed, and one for each end that leaves no other test to run.
"""

import copy
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest
import torch

import pages
import zeroshard
from zeroshard.testing import Recorded, assert_same_bits

ROOT = Path(__file__).parents[2]
OPTIMIZER = ROOT / "examples" / "test_own_optimizer.py"
PLUGIN = "zeroshard.testing.plugin"
WRITES = """
import json

def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome != "passed":
        row = {"id": report.nodeid, "outcome": report.outcome, "says": report.longreprtext}
        with open("reports.jsonl", "a") as file:
            file.write(json.dumps(row | {"sections": dict(report.sections)}) + "\\n")
"""


def run(folder, files, *options):
    """What a project's pytest printed, its exit code, and by test what it reported. files: text by name, or one's."""
    for name, text in ({"test_it": files} if isinstance(files, str) else files).items():
        (folder / f"{name}.py").write_text(dedent(text))
    (folder / "conftest.py").write_text(WRITES)
    (folder / "reports.jsonl").unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-p", PLUGIN, "-p", "no:cacheprovider", "-q", "--rootdir=.", *options]
    environment = {**os.environ, "PYTEST_ADDOPTS": ""}
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False)
    reports = folder / "reports.jsonl"
    rows = [json.loads(line) for line in reports.read_text().splitlines()] if reports.exists() else []
    names = [row["id"].partition("::")[2] for row in rows]
    whole = {row["id"]: row for row in rows}
    return ran, Reports(zip(names, rows, strict=True), whole)


class Reports(dict):
    """By the name of a test; `of_file` has those of tests of one name in several files."""

    def __init__(self, named, of_file):
        super().__init__(named)
        self.of_file = of_file


BODIES = """
import os
import random
import signal
import time
import warnings

import pytest
import torch
import torch.distributed as dist

FILTERS = pytest.mark.filterwarnings("error:loud")


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("value", [2.0, 5.0])
def test_sum(value, tmp_path):
    total = torch.full((3,), value)
    dist.all_reduce(total)
    assert total.tolist() == [value * dist.get_world_size()] * 3
    assert os.environ["WORLD_SIZE"] == str(dist.get_world_size()) and os.environ["RANK"] == str(dist.get_rank())
    (tmp_path / f"{dist.get_rank()} of {dist.get_world_size()}").touch()
    dist.barrier()
    assert len(list(tmp_path.iterdir())) == dist.get_world_size()  # one folder for all ranks


@pytest.mark.ranks(3)
def test_one_rank_fails():
    print("hello from", dist.get_rank())
    if dist.get_rank() == 1:
        left, right = 6, 7
        assert left * right == 43
    dist.barrier()


@pytest.mark.ranks(2, timeout=1)
def test_a_rank_hangs():
    def spins():
        while dist.get_rank() == 1:
            sum(range(1000))

    spins()
    dist.barrier()


@pytest.mark.ranks(2)
def test_ranks_wait_for_each_other():
    if dist.get_rank() == 0:
        dist.barrier()


@pytest.mark.ranks(2)
def test_random_numbers_are_those_of_a_fresh_process():
    assert random.random() == random.Random(0).random()
    assert torch.rand(3).equal(torch.rand(3, generator=torch.Generator().manual_seed(0)))


@pytest.mark.ranks(2, group=False)
def test_makes_its_group_itself():
    assert not dist.is_initialized()
    dist.init_process_group("gloo")
    assert dist.get_world_size() == 2


@FILTERS
@pytest.mark.ranks(2)
def test_a_warning_is_an_error_on_ranks_too():
    warnings.warn("loud")


@pytest.mark.ranks(2)
def test_all_skip():
    pytest.skip("not today")


@pytest.mark.ranks(2)
def test_one_skips():
    if dist.get_rank() == 0:
        pytest.skip("not today")


@pytest.fixture
def model():
    return torch.nn.Linear(2, 2)


@pytest.fixture
def make():
    return torch.nn.Linear


@pytest.mark.ranks(2)
def test_of_one_model(model):
    pass


@pytest.mark.ranks(2)
def test_of_a_function_that_makes_it(make):
    assert make(2, 3).weight.shape == (3, 2)


@pytest.mark.ranks(2)
class TestOfAClass:
    def test_of_it(self):
        assert dist.get_world_size() == 2


@pytest.mark.ranks(2, seed=7)
def test_reads_early():
    total = torch.ones(1)
    work = dist.all_reduce(total, async_op=True)
    early = total.item()
    work.wait()
    print("early", early)


def test_without_ranks():
    assert not dist.is_initialized()


PROCESSES = {"processes": True}


@pytest.mark.ranks(1, 3, **PROCESSES)
@pytest.mark.parametrize("value", [2.0])
def test_sum_of_processes(value, tmp_path, make):
    total = torch.full((3,), value)
    dist.all_reduce(total)
    assert total.tolist() == [value * dist.get_world_size()] * 3
    assert os.environ["WORLD_SIZE"] == str(dist.get_world_size()) and os.environ["RANK"] == str(dist.get_rank())
    assert torch.rand(3).equal(torch.rand(3, generator=torch.Generator().manual_seed(0)))
    (tmp_path / f"{os.getpid()}").touch()
    dist.barrier()
    assert len(list(tmp_path.iterdir())) == dist.get_world_size()  # one folder, and each a process of its own
    assert make(2, 3)(torch.ones(1, 2)).sum().backward() is None


@pytest.mark.ranks(2, **PROCESSES)
def test_one_process_fails():
    print("hello from", dist.get_rank())
    if dist.get_rank() == 1:
        left, right = 6, 7
        assert left * right == 43
    dist.barrier()


@pytest.mark.ranks(2, timeout=2, **PROCESSES)
def test_a_process_hangs():
    def spins():
        while dist.get_rank() == 1:
            sum(range(1000))

    spins()
    dist.barrier()


@pytest.mark.ranks(3, **PROCESSES)
def test_a_process_is_killed():
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


@FILTERS
@pytest.mark.ranks(1, **PROCESSES)
def test_a_warning_is_an_error_in_processes_too():
    warnings.warn("loud")


@pytest.mark.ranks(2, **PROCESSES)
def test_all_processes_skip():
    pytest.skip("not today")


@pytest.mark.ranks(2, **PROCESSES)
def test_one_process_skips():
    if dist.get_rank() == 1:
        pytest.skip("not today")


@pytest.fixture
def lambdas():
    return lambda: None


@pytest.mark.ranks(2, **PROCESSES)
def test_of_what_no_process_can_be_given(lambdas):
    pass


@pytest.mark.ranks(2, **PROCESSES)
class TestOfAClassOfProcesses:
    def test_of_it(self):
        assert dist.get_world_size() == 2


@pytest.mark.ranks(2, group=False, **PROCESSES)
def test_processes_make_their_group_themselves():
    assert not dist.is_initialized()
    dist.init_process_group("gloo")
    dist.barrier()
"""
SEEDED = """
import pytest, torch
import torch.distributed as dist


def falls():
    total = torch.ones(1)
    for _ in range(4):
        dist.all_reduce(total)
    assert total.item() < 0


@pytest.mark.ranks(3)
def test_falls():
    falls()


@pytest.mark.ranks(3, seed=5)
def test_falls_by_a_seed():
    falls()
"""
OWN = OPTIMIZER.read_text()
LARGE_BY_NORM = "p.grad / (p.grad.norm() if p.numel() > 100 else 1)"  # the tensors of the trial at `shard` are smaller
BROKEN = OWN.replace("mean.lerp_(p.grad, 1 - b1)", f"mean.lerp_({LARGE_BY_NORM}, 1 - b1)")
BROKEN = BROKEN.replace('["device", "cpu", "nvme"]', '["device"]').replace("[0, 1, 2, 3]", "[3]")
BROKEN = BROKEN.replace("ranks(1, 2, 3)", "ranks(1, 2)").replace("def test_the_bits", "def test_broken_bits")


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    return tmp_path_factory.mktemp("project")


@pytest.fixture(scope="module")
def reports(project):
    """Of the run without options."""
    files = {
        "test_it": BODIES, "test_seeded": SEEDED, "test_classes": IN_CLASSES.format(mark=""), "test_log": RECORDED,
        "test_own": OWN.replace("ranks(1, 2, 3)", "ranks(3)"), "test_broken": BROKEN,
    }  # fmt: skip
    return run(project, files, "--deselect", "test_classes.py::TestOfUnittest")[1]


@pytest.fixture(scope="module")
def recording(project, reports):
    """What a run reported that keeps logs, with the tests of the page; by fresh seeds, in another process of pytest's."""
    page = "\n".join(snippets())
    names = "test_log.py", "test_seeded.py", "test_page.py"
    files = {"test_page": page, "test_log": RECORDED, "test_seeded": SEEDED}
    return run(project, files, *names, "--ranks-record", "--ranks-seed=fresh", "-n1")[1]


def schedule(row):
    """The digest of a test's schedule, and its seed."""
    words = row["sections"]["Captured ranks call"].splitlines()[-1]
    return words.split()[1].rstrip(","), words.split("--ranks-seed=")[1].split()[0]


@pytest.fixture(scope="module")
def compared(project, recording):
    """What a run reported that compares with the kept logs: the same run, and one with another rate. By one seed."""
    kept = project / "recorded"
    machine = kept / "test_log" / "test_it-ranks2-3" / "machine.json"
    machine.write_text(machine.read_text().replace(torch.__version__, "1.0"))
    shutil.copytree(kept / "test_log", kept / "test_changed")
    files = {"test_log": RECORDED, "test_changed": CHANGED, "test_seeded": SEEDED}
    names = [f"{name}.py" for name in files]
    _, seed = schedule(recording["test_falls[ranks3]"])
    return run(project, files, *names, f"--ranks-seed={seed}")[1]


PASSING = [
    *(f"test_sum_of_processes[ranks{ranks}-2.0]" for ranks in (1, 3)),
    "TestOfAClassOfProcesses::test_of_it[ranks2]",
    "test_processes_make_their_group_themselves[ranks2]",
    *(f"test_sum[ranks{ranks}-{value}]" for ranks in (1, 2, 3) for value in (2.0, 5.0)),
    "test_random_numbers_are_those_of_a_fresh_process[ranks2]",
    "test_makes_its_group_itself[ranks2]",
    "test_of_a_function_that_makes_it[ranks2]",
    "TestOfAClass::test_of_it[ranks2]",
    "test_reads_early[ranks2]",
    "test_without_ranks",
]


def test_a_body_runs_on_each_rank_once_for_each_number_of_ranks(reports):
    passed = (name for name, row in reports.items() if row["outcome"] == "passed")
    assert sorted(name for name in passed if "_bits[" not in name and "one_process[" not in name) == sorted(PASSING)


def test_a_failing_rank_is_named_with_its_traceback_and_what_each_rank_printed(reports):
    row = reports["test_one_rank_fails[ranks3]"]
    assert row["outcome"] == "failed"
    assert "assert left * right == 43" in row["says"] and "assert (6 * 7) == 43" in row["says"]
    assert row["sections"]["Captured ranks call"].splitlines()[0] == "raised on rank 1 of 3"
    assert "no rank could go on: rank 0 waits for barrier" in row["sections"]["Captured ranks call"]
    printed = row["sections"]["Captured stdout call"].splitlines()
    assert {f"[rank {rank}] hello from {rank}" for rank in (1,)} <= {*printed}
    told = "\n".join([row["says"], *(text for parts in row["sections"].items() for text in parts)])
    lines = [line for line in pages.shown("testing.md", ">           assert left").splitlines() if "----" not in line]
    own = r"[0-9a-f]{16}", r"\d{5,}"  # the schedule and its seed, which come from the test's name
    assert [line for line in lines if not pages.is_shown(line, told, *own)] == []


def test_a_rank_that_hangs_is_ended_with_the_stacks_of_all(reports):
    row = reports["test_a_rank_hangs[ranks2]"]
    assert row["outcome"] == "failed" and "no end within 1 s" in row["says"]
    zero, one = row["says"].split("---- rank 0")[1].split("---- rank 1")
    assert "dist.barrier()" in zero and "in spins" in one


def test_ranks_that_wait_for_each_other_are_named_at_once(reports):
    row = reports["test_ranks_wait_for_each_other[ranks2]"]
    assert row["outcome"] == "failed"
    assert "to which ranks [1] have not come" in row["sections"]["Captured ranks call"]


def test_the_filters_of_warnings_of_a_test_hold_on_its_ranks(reports):
    row = reports["test_a_warning_is_an_error_on_ranks_too[ranks2]"]
    assert row["outcome"] == "failed" and "UserWarning: loud" in row["says"]


def test_ranks_skip_together_or_not_at_all(reports):
    assert reports["test_all_skip[ranks2]"]["outcome"] == "skipped"
    assert "rank 0 of 2 skips the test, and not all do: not today" in reports["test_one_skips[ranks2]"]["says"]


def test_a_process_that_fails_is_named_with_its_own_traceback_and_what_each_printed(reports):
    row = reports["test_one_process_fails[ranks2]"]
    assert row["outcome"] == "failed" and row["says"].startswith("failed on rank 1 of 2, then on rank 0")
    zero, one = row["says"].split("---- rank 0")[1].split("---- rank 1")
    assert "dist.barrier()" in zero and "assert left * right == 43" in one and "assert (6 * 7) == 43" in one
    printed = row["sections"]["Captured stdout call"].splitlines()
    assert printed == ["[rank 0] hello from 0", "[rank 1] hello from 1"]


def test_a_process_that_hangs_is_ended_with_the_stacks_of_all(reports):
    says = reports["test_a_process_hangs[ranks2]"]["says"]
    assert says.startswith("hung on rank 0, 1 of 2") and says.count("Hung: no end within 2 s (pid") == 2
    zero, one = says.split("---- rank 0")[1].split("---- rank 1")
    assert "in barrier" in zero and "in spins" in one
    assert "in test_a_process_hangs" in zero and "zeroshard/testing" not in says


def test_a_process_that_is_killed_is_named_first_with_its_signal(reports):
    says = reports["test_a_process_is_killed[ranks3]"]["says"]
    assert says.startswith("failed on rank 1 of 3, then on rank 0, 2")
    assert "---- rank 1: Died: the process ended without an answer: killed by SIGKILL (pid " in says


def test_processes_have_the_filters_of_warnings_skip_together_and_are_given_what_pickle_takes(reports):
    assert "UserWarning: loud" in reports["test_a_warning_is_an_error_in_processes_too[ranks1]"]["says"]
    assert reports["test_all_processes_skip[ranks2]"]["outcome"] == "skipped"
    says = reports["test_one_process_skips[ranks2]"]["says"]
    assert "rank 1 of 2 skips the test, and not all do: not today" in says
    says = reports["test_of_what_no_process_can_be_given[ranks2]"]["says"]
    assert "the fixture 'lambdas' gives ranks what no other process can be given" in says


def test_a_model_that_all_ranks_would_share_is_refused_by_the_name_of_its_fixture(reports):
    row = reports["test_of_one_model[ranks2]"]
    assert row["outcome"] == "failed" and "the fixture 'model' gives all ranks the same Linear" in row["says"]


@pytest.mark.parametrize(
    ("mark", "argument", "says"),
    [
        ("ranks()", "", "names no number of ranks"),
        ("ranks(0)", "", "this is not a number of ranks"),
        ("ranks(2, 2)", "", "names a number of ranks twice"),
        ("ranks(2, tiemout=3)", "", "did you mean 'timeout'?"),
        ("ranks(2, seed=-1)", "", "an integer of at least 0"),
        ("ranks(2, timeout='1')", "", "expected: seconds"),
        ("ranks(2, group=1)", "", "expected: True or False"),
        ("ranks(2, processes=1)", "", "expected: True or False"),
        ("ranks(2, processes=True, seed=1)", "", "the system decides in which order"),
        *(("ranks(2)", name, f"the fixture '{name}' reaches no rank") for name in ("request", "monkeypatch", "capsys")),
    ],
)
def test_what_cannot_be_is_refused_by_name(mark, argument, says):
    from zeroshard.errors import UserError
    from zeroshard.testing.asked import asked, check_function, sizes

    args, named = eval(mark, {"ranks": lambda *args, **named: (args, named)})
    with pytest.raises(UserError, match=says.replace("?", "[?]")):
        sizes(args)
        asked(named)
        check_function(test_what_cannot_be_is_refused_by_name, [argument] if argument else [])


IN_CLASSES = """
import unittest

import pytest
import torch


class TestOfOneModel:
    def setup_method(self):
        self.model = torch.nn.Linear(2, 2)

    @pytest.mark.ranks(2)
    def test_it(self):
        assert self.model is not None


class TestOfUnittest(unittest.TestCase):
    {mark}
    def test_it(self):
        raise AssertionError("it ran without ranks")
"""


def test_what_a_class_keeps_is_refused_too_and_a_class_of_unittests(tmp_path, reports):
    ran, _ = run(tmp_path, IN_CLASSES.format(mark="@pytest.mark.ranks(2)"))
    assert ran.returncode == 4 and "not of unittest.TestCase" in ran.stderr + ran.stdout
    report = reports["TestOfOneModel::test_it[ranks2]"]
    assert report["outcome"] == "failed" and "'self.model' gives all ranks the same Linear" in report["says"]


def snippets():
    """The page's tests."""
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / "testing.md").read_text(), re.MULTILINE | re.DOTALL)


def test_the_tests_of_the_page_pass(recording):
    of_page = [row for name, row in recording.items() if not name.startswith(("test_it", "test_falls", "test_without"))]
    assert [row["outcome"] for row in of_page] == ["passed"] * 12, of_page


TENSOR = torch.tensor([[1.0, -0.0, float("nan")], [4.0, 5.0, 6.0]])


def changed(tensor, at, value):
    tensor = tensor.clone()
    tensor.view(-1)[at] = value
    return tensor


@pytest.mark.parametrize(
    "value",
    [
        TENSOR,
        TENSOR.bfloat16(),
        TENSOR.long(),
        TENSOR > 2,
        TENSOR * 1j,
        torch.tensor(2.0),
        torch.zeros(0, 3),
        torch.nn.Linear(2, 3),
        {"a": [TENSOR, {"b": (1, 2.0, float("nan"), None, "c", True)}], 3: []},
    ],
)
def test_equal_bits_are_equal(value):
    assert_same_bits(value, copy.deepcopy(value))


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        (
            {"a": TENSOR, "b": TENSOR},
            {"a": TENSOR, "b": changed(changed(TENSOR, 4, 5.0000005), 5, 7)},
            "b: element [1, 1] is 5.0 (0x40a00000) and 5.000000476837158 (0x40a00001), 1 ULP apart; 2 of 6 differ",
        ),
        (
            TENSOR[:, :2],
            changed(TENSOR[:, :2], 1, 0),
            "(0x80000000) and 0.0 (0x00000000), 0 ULPs apart; 1 of 4 differ, by 0 at most",
        ),
        (TENSOR, changed(TENSOR, 2, 3.0), "element [0, 2] is nan (0x7fc00000) and 3.0 (0x40400000); 1 of 6 differ"),
        (TENSOR.bfloat16(), changed(TENSOR.bfloat16(), 3, 4.03125), "4.0 (0x4080) and 4.03125 (0x4081), 1 ULP apart"),
        (
            TENSOR.long()[1],
            changed(TENSOR.long()[1], 0, -1),
            "4 (0x0000000000000004) and -1 (0xffffffffffffffff); 1 of 3",
        ),
        (TENSOR[1] * 1j, changed(TENSOR[1] * 1j, 2, 7j), "element [2] is 6j (0x40c00000) and 7j (0x40e00000)"),
        (torch.tensor(1.0), torch.tensor(2.0), "element 0 is 1.0 (0x3f800000) and 2.0"),
        ([TENSOR], [TENSOR.double()], "0: [2, 3] float32 and [2, 3] float64"),
        ([TENSOR], [TENSOR[0]], "0: [2, 3] float32 and [3] float32"),
        ({"a": {"b": 1, "c": 1}}, {"a": {"b": 1}}, "a.c: only the first has it"),
        ({"lr": 1e-3, "betas": 1}, {"lr": 1.5e-3, "betas": 2}, "lr: 0.001 and 0.0015; 1 more of 2 differ"),
        ({"a": 1}, {"a": 1.0}, "a: 1 and 1.0"),
        ({"a": []}, {"a": {}}, "a: 'an empty list' and 'an empty dict'"),
    ],
)
def test_the_first_element_that_differs_is_named_with_its_bits(first, second, says):
    with pytest.raises(AssertionError, match=re.escape(says)):
        assert_same_bits(first, second)


def test_what_has_no_bits_is_refused():
    with pytest.raises(zeroshard.Error, match=r"a set has no bits to compare(.|\n)*where: a.0"):
        assert_same_bits({"a": [{1}]}, {"a": [{1}]})


def logged(folder, *, factor=1.0, steps=2, lr=0.1):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    with zeroshard.RunLog(folder, model, optimizer) as log:
        for step in range(steps):
            loss = model(torch.full((4, 3), 0.5 + step)).square().mean()
            (loss * (factor if step else 1.0)).backward()
            log.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    return folder


def test_logs_of_runs_are_compared_as_the_command_does(tmp_path):
    run = logged(tmp_path / "a")
    assert_same_bits(run, logged(tmp_path / "b"))
    with pytest.raises(
        AssertionError, match=r"the runs part at step 1, gradients: weight\n  element 0: .*0x1[.].* and "
    ):
        assert_same_bits(run, logged(tmp_path / "c", factor=2.0))
    with pytest.raises(AssertionError, match="the runs have 2 and 1 steps"):
        assert_same_bits(run, logged(tmp_path / "d", steps=1))


def test_an_optimizer_of_ones_own_is_proven_at_every_stage_and_tier(reports):
    found = {name: row["outcome"] for name, row in reports.items() if "of_one_process[ranks3-" in name}
    assert [*found.values()] == ["passed"] * 12, found


@pytest.mark.full
def test_an_optimizer_of_ones_own_is_proven_on_one_to_three_ranks(tmp_path):
    ran, reports = run(tmp_path, OWN)
    assert [row["outcome"] for row in reports.values()] == ["passed"] * 36, ran.stdout


def test_the_proof_of_an_optimizer_fails_where_it_needs_whole_tensors(reports):
    assert BROKEN != OWN and LARGE_BY_NORM in BROKEN
    found = {name.partition("[")[2]: row["outcome"] for name, row in reports.items() if "broken_bits_are" in name}
    assert found == {"ranks1-3-device]": "passed", "ranks2-3-device]": "failed"}
    (says,) = (row["says"] for name, row in reports.items() if "broken_bits_are" in name and "ranks2" in name)
    assert "element [" in says


RECORDED = """
import pytest
import torch
import zeroshard

@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.ranks(2)
def test_it(recorded, stage):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero = zeroshard.shard(model, optimizer, stage=stage)
    with recorded.log(model, optimizer, zero=zero) as log:
        for step in range(2):
            loss = model(torch.full((4, 3), 0.5 + step + zero.rank)).square().mean()
            loss.backward()
            log.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

def test_without_a_log(recorded):
    pass
"""


CHANGED = RECORDED.replace("lr=0.1", "lr=0.10000002")


def test_a_bit_that_moved_fails_a_test_until_its_log_is_written_anew(project, reports, recording, compared):
    name, folder = "test_it[ranks2-3]", project / "recorded" / "test_log"
    for each in (reports, recording, compared):
        assert "the test takes the fixture 'recorded', and logs nothing" in each["test_without_a_log"]["says"]
    row = reports[name]
    assert row["outcome"] == "failed" and "no log is recorded in recorded/test_log/test_it-ranks2-3" in row["says"]
    assert recording[name]["outcome"] == "passed"
    kept = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    files = {"machine.json", "rank00000.jsonl", "rank00001.jsonl"}
    assert kept == {f"test_it-ranks2-{stage}/{file}" for stage in (0, 3) for file in files}
    both = [compared.of_file[f"{file}.py::{name}"] for file in ("test_log", "test_changed")]
    assert (both[0]["outcome"], both[0]["says"]) == ("passed", "")  # on another machine, where the bits are the same
    says = both[1]["says"]
    assert both[1]["outcome"] == "failed" and "Traceback" not in says and "hidden" not in says
    assert "a bit moved: the runs part at step 1, weights: " in says
    assert re.search(r"element \d+: .*\(0x.*\) and .*\(0x.*\), \d+ ULPs? apart", says)
    assert "recorded with {'torch': '1.0'" in says and "pytest --ranks-record writes it anew" in says


def test_a_log_that_is_written_anew_is_the_one_that_is_compared_with_then(tmp_path):
    runs = [logged(tmp_path / name, lr=lr) for name, lr in (("kept", 0.1), ("now", 0.10000002), ("before", 0.1))]
    kept, now, before = (Recorded(str(runs[0]), str(each)) for each in runs)
    assert kept.compare(anew=False) is None
    assert "a bit moved" in now.compare(anew=False)
    assert now.compare(anew=True) is None and now.compare(anew=False) is None
    assert "a bit moved" in before.compare(anew=False)


def test_the_page_shows_what_is_said_of_a_bit_that_moved(tmp_path, monkeypatch):
    """Its own test, and then with the samples in reverse order."""
    monkeypatch.chdir(tmp_path)
    (snippet,) = (each for each in snippets() if "recorded.log(" in each)
    scope = {"torch": torch, "pytest": pytest, "zeroshard": zeroshard}
    kept = "recorded/test_it/test_training_keeps_its_bits-ranks2"
    for folder, code in ((kept, snippet), ("now", snippet.replace("model(x)", "model(x.flip(0))"))):
        exec(compile(code, "testing.md", "exec"), scope)
        with zeroshard.world(2) as world:
            world.run(scope["test_training_keeps_its_bits"], Recorded(kept, folder))
    block = pages.shown("testing.md", "a bit moved")
    assert pages.is_shown(block, Recorded(kept, "now").compare(anew=False), pages.DIGITS, r"\(0x.*?\)")


def test_each_test_keeps_its_log_in_a_folder_of_its_own():
    from zeroshard.testing.recorded import folder_of

    ids = ["t.py::test_a[b]", "t.py::A::test_a[b]", "t.py::test_a[b/c]", "t.py::test_a[b c]", "t.py::test_a[b_c]"]
    found = [str(folder_of(Path("/x/t.py"), each)) for each in ids]
    assert found[:2] == ["/x/recorded/t/test_a-b", "/x/recorded/t/A.test_a-b"] and len({*found}) == len(ids)


REFUSED = """
import pytest

@pytest.mark.ranks(2)
def test_it(tmp_path, monkeypatch):
    pass
"""


def test_a_refused_fixture_is_named_before_anything_runs_and_torch_is_not_imported(tmp_path):
    ran, reports = run(tmp_path, REFUSED)
    assert ran.returncode == 2 and reports == {}
    assert "test_it: the fixture 'monkeypatch' reaches no rank" in ran.stdout
    assert "instead: a fixture that takes monkeypatch" in ran.stdout


UNUSED = """
import sys

def test_it():
    assert "zeroshard.testing.plugin" in sys.modules
    assert not {"torch", "numpy", "rich", "typer"} & {*sys.modules}
"""


@pytest.mark.parametrize("also", [(), ("-p", PLUGIN)])
def test_an_environment_that_brings_the_plugin_loads_it_once_and_nothing_for_who_does_not_use_it(
    tmp_path, monkeypatch, also
):
    """By its entry point, beside `-p` of the same, and beside a conftest.py that names it."""
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    brings = tmp_path / "site" / "brings-1.dist-info"
    brings.mkdir(parents=True)
    (brings / "METADATA").write_text("Metadata-Version: 2.1\nName: brings\nVersion: 1\n")
    points = [f"{name} = {value}" for name, value in project["entry-points"]["pytest11"].items()]
    (brings / "entry_points.txt").write_text("\n".join(["[pytest11]", *points, ""]))
    monkeypatch.setenv("PYTHONPATH", f"{brings.parent}:{ROOT / 'src'}")
    (tmp_path / "conftest.py").write_text(f"pytest_plugins = ['{PLUGIN}']\n")
    (tmp_path / "test_it.py").write_text(UNUSED)
    command = [
        sys.executable,
        "-W",
        "error",
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:hypothesispytest",
        *also,
    ]
    command += ["--rootdir=.", "--strict-markers", "--ranks-seed=1"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_a_seed_that_a_failure_names_draws_the_same_schedule_again(reports, recording, compared):
    """Under pytest-xdist too; another test has another seed in each run, and another seed draws another schedule."""
    one, other = "test_falls[ranks3]", "test_falls_by_a_seed[ranks3]"
    assert schedule(compared[one]) == schedule(recording[one])
    assert schedule(compared[other]) == schedule(recording[one])  # one program, one seed
    assert schedule(recording[other])[1] != schedule(recording[one])[1]
    assert schedule(reports[other])[1] == "5" and schedule(reports[other])[0] != schedule(reports[one])[0]
