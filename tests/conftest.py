"""What every test gets: one thread, fixed seeds, a hard time-out, and warm rank processes (`import ranks`)."""

import gc
import os
import random
import signal
import sys
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: bits depend on the number of threads
os.environ["MKL_NUM_THREADS"] = "1"
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ.setdefault("RES_OPTIONS", "timeout:1")  # TCPStore asks the name server who 127.0.0.1 is, and waits for it
os.environ.pop("COLUMNS", None)  # workers of pytest-xdist say 80, and commands would wrap what they print to a pipe
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # ranks, reference, models

import hypothesis
import pytest
import torch

import ranks as rank_processes
import selection
from zeroshard.policies import comm

comm.AUTO = "gloo"  # in worker.py too: a test that does not say how ranks exchange is one of messages

pytest_plugins = ["seconds", "zeroshard.testing.plugin"]
INSTEAD = pytest.StashKey()  # what runs ranks in place of processes, with --worlds
TEST_TIMEOUT = 300  # seconds; a run on ranks has its own, shorter one
LONGEST = {  # the longest files start first, or one of xdist's workers ends alone with one of them
    "test_bits", "test_checkpoint", "test_claims", "test_cli", "test_clipping", "test_emuccl", "test_emulated_faults",
    "test_emulated_grid", "test_experts", "test_explain", "test_fitting", "test_fp8", "test_gradients", "test_harness",
    "test_in_backward", "test_inputs", "test_int8", "test_layout", "test_mesh", "test_modes",
    "test_modules", "test_offload", "test_optimizer", "test_overheads", "test_page", "test_planner", "test_precision",
    "test_resume", "test_shared_memory", "test_simulate", "test_split", "test_tensor_parallel", "test_verify",
}  # fmt: skip
MARKERS = {
    "dist": "runs on several rank processes (set by itself on tests that use the `ranks` or `world` fixture)",
    "full": "left to `make full`: set by itself on what `make test` need not run (selection.py), or by hand: over a second",
    "heavy": "takes five seconds or more each time: `make full` has one test of the function, if `make test` has none",
    "processes": "runs its ranks in processes, with --worlds too",
    "pairs": "left to `make pairs`: of its parameters only two values together are new (set by itself)",
    "once": "has its ranks in processes with --once: the one of its function's tests in `make full` that has (set by itself)",
    "gpu": "needs a CUDA device, skipped without one",
    "row": "proves these rows of tests/trust-table.md, as a name with rowN in it does",
    "trainers": "needs Accelerate, Transformers, Lightning, Ray or optimizers of other packages: `make trainers`",
    "referee": "needs the versions of other engines that `make referee` installs, skipped without them",
    "slow": "left to `make slow`: by hand, or a combination of three and more values; skipped with --fast",
}

hypothesis.settings.register_profile("zeroshard", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("zeroshard")


def pytest_addoption(parser):
    parser.addoption("--fast", action="store_true", help="skip tests marked slow: make test and make full together")
    parser.addoption("--worlds", nargs="?", const="plain", metavar="HOW",
                     help="run ranks as threads of pytest's process where they need not be processes; strict, or a seed that draws the schedule")  # fmt: skip
    parser.addoption("--once", action="store_true", help="with --worlds: but one test of each function in processes")
    parser.addoption("--order", type=int, default=None, metavar="SEED", help="seed of the test order; 0: as written")


def pytest_configure(config):
    for name, meaning in MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")
    if hasattr(config, "workerinput"):
        config.option.order = config.workerinput["order"]
    if config.getoption("--order") is None:
        config.option.order = random.SystemRandom().randrange(1, 10_000)
    if config.getoption("--worlds"):
        from world.instead import instead_of_processes

        config.stash[INSTEAD] = instead_of_processes(config.getoption("--worlds"))
    config.option.loadscopereorder = False  # xdist's own order is by the number of a file's tests


def pytest_configure_node(node):
    """All of xdist's workers must see one order."""
    node.workerinput["order"] = node.config.option.order


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Each test's ranks, from its first fixture on, are what --worlds makes of them."""
    once = item.config.getoption("--once") and item.get_closest_marker("once")
    instead = None if once or selection.needs_processes(item) else item.config.stash.get(INSTEAD, None)
    rank_processes.pool.instead = instead
    return (yield)


def pytest_report_header(config):
    return f"test order: --order {config.option.order}"


@pytest.hookimpl(tryfirst=True)  # before -m looks at marks
def pytest_collection_modifyitems(config, items):
    selection.mark(items)
    config.stash[selection.COLLECTED] = list(items)
    _shuffle(items, config.option.order)
    for item in items:
        if {"ranks", "world"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.dist)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if item.get_closest_marker("slow") and config.getoption("--fast"):
            item.add_marker(pytest.mark.skip(reason="--fast"))
        if item.get_closest_marker("timeout") is None and not config.getoption("timeout", None):
            item.add_marker(pytest.mark.timeout(TEST_TIMEOUT))


def pytest_report_teststatus(report, config):
    """Print a failure's name where it happens: a run that is stopped at a time limit prints no summary."""
    if report.failed and config.get_verbosity() == 0:
        kind = "failed" if report.when == "call" else "error"
        return kind, f"\n{kind} {report.nodeid}\n", kind.upper()
    return None


def pytest_collection_finish():
    """A collection inside a test walks what the tests made, not torch and the tests themselves, which takes 0.3 s each."""
    gc.collect()
    gc.freeze()


def _shuffle(items, seed):
    """Long files first, else in random order, and so a file's tests, which stay together for its fixtures' sake."""
    if seed:
        generator = random.Random(seed)
        paths = sorted({item.path for item in items})
        place = {path: (path.stem not in LONGEST, generator.random()) for path in paths}
        items.sort(key=lambda item: (place[item.path], generator.random()))


@pytest.fixture(autouse=True)
def _fresh_global_state():
    rank_processes.reset_global_state()


@pytest.fixture
def ranks():
    """The module `ranks`; a test that asks for it this way is marked `dist`."""
    return rank_processes


@pytest.fixture(params=[1, 2, 3, 4], ids=lambda world: f"ranks{world}")
def world(request):
    """Runs the test at 1, 2, 3 and 4 ranks."""
    return request.param


@pytest.fixture(params=[0, 1, 2, 3], ids=lambda stage: f"stage{stage}")
def stage(request):
    """Runs the test at stages 0 to 3."""
    return request.param


def pytest_terminal_summary(terminalreporter, config):
    if config.getoption("--worlds"):
        from world.instead import counted

        terminalreporter.write_line(
            f"runs on ranks: {counted['worlds']} in worlds, {counted['processes']} in processes"
        )


def pytest_sessionfinish(session):
    rank_processes.shutdown()
    if session.config.getoption("--worlds") and hasattr(session.config, "workeroutput"):  # one of pytest-xdist's
        from world.instead import counted

        session.config.workeroutput["runs on ranks"] = dict(counted)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """Add up what each of pytest-xdist's workers counted."""
    if node.config.getoption("--worlds"):
        from world.instead import counted

        counted.update(getattr(node, "workeroutput", {}).get("runs on ranks", {}))


def check_rank(folder):
    from zeroshard.cli.check import _train_all
    from zeroshard.cli.config import Launch

    _train_all(Path(folder), Launch.from_environment())


@pytest.fixture
def warm(monkeypatch):
    """The ranks of `plan --check` are processes that need not import torch."""
    from zeroshard.cli import launch

    def start_ranks(command, world):
        name, folder = command
        assert name == "check-rank"
        rank_processes.run(world, check_rank, folder, group="env", timeout=120)
        return 0

    monkeypatch.setattr(launch, "start_ranks", start_ranks)


@pytest.fixture
def command(monkeypatch, capsys):
    """(exit code, standard output, standard error) of a command of zeroshard's, in this process."""
    from zeroshard.cli.main import main

    monkeypatch.setattr(signal, "signal", lambda *_: None)

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["zeroshard", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        assert not torch.distributed.is_initialized()
        out, error = capsys.readouterr()
        return ended.value.code, out, rank_processes.untimed(error)

    return run
