"""pytest's hooks: `@pytest.mark.ranks(2, 3)` runs a test's body on each rank, once for each number of ranks.

The fixture `recorded` compares what such a test logs, or any other one, with a log in the repository.

pytest loads this file in every project of an environment that has zeroshard, so it imports torch with the first test
that runs on ranks, and adds nothing to any other test.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Generator
from typing import Any

import pytest

from ..errors import UserError
from .asked import Asked, asked, check_function, sizes
from .failures import RankFailure
from .recorded import OPTION, Recorded, folder_of

SIZE = "_ranks"  # the parameter of a test that is its number of ranks
SEEDS = 1 << 32
FRESH = "fresh"
NURSERY: pytest.StashKey[Any] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--ranks-seed`."""
    group = parser.getgroup("zeroshard", "tests on ranks")
    group.addoption(
        "--ranks-seed",
        metavar="SEED",
        help="the seed that draws the schedule of tests on ranks, such as one that a failure names; "
        "fresh: another one for each test. Otherwise each test has a seed of its own, the same in every run",
    )

    group.addoption(
        OPTION,
        action="store_true",
        help="keep the logs of tests that take the fixture `recorded` where they differ from those that are kept",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Tell of the mark, and check the options."""
    config.addinivalue_line(
        "markers",
        "ranks(*numbers, seed=None, timeout=60, group=True, processes=False): run the test's body on each rank, "
        "once for each number of ranks (zeroshard.testing)",
    )
    seed = config.getoption("--ranks-seed")
    if seed is not None and seed != FRESH and not (seed.isascii() and seed.isdigit()):
        raise pytest.UsageError(f"--ranks-seed={seed}: expected an integer of at least 0, or {FRESH}")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test of each number of ranks, and refuse what cannot run on ranks before anything runs."""
    mark = metafunc.definition.get_closest_marker("ranks")
    if mark is None:
        return
    try:
        numbers = sizes(mark.args)
        asked(mark.kwargs)
        check_function(metafunc.function, _arguments(metafunc.definition))
    except UserError as error:
        pytest.fail(f"{metafunc.definition.nodeid}: {error}", pytrace=False)
    metafunc.fixturenames.append(SIZE)
    metafunc.parametrize(SIZE, numbers, ids=[f"ranks{number}" for number in numbers])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse the mark where pytest does not call the body itself: it would run on no rank, and pass."""
    for item in items:
        numbers = getattr(getattr(item, "callspec", None), "params", {})
        if item.get_closest_marker("ranks") is not None and SIZE not in numbers:
            raise pytest.UsageError(
                f"{item.nodeid}: pytest.mark.ranks is for functions and methods of classes, not of unittest.TestCase"
            )


def pytest_collection_finish(session: pytest.Session) -> None:
    """Fork the nursery of ranks that are processes, before a test leaves threads in this one."""
    marks = (item.get_closest_marker("ranks") for item in session.items)
    if session.config.option.collectonly or not any(mark and mark.kwargs.get("processes") for mark in marks):
        return
    try:
        from .processes import Nursery

        nursery = session.config.stash[NURSERY] = Nursery()
    except UserError as error:
        raise pytest.UsageError(str(error)) from error
    session.config.add_cleanup(nursery.close)


@pytest.fixture
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """Log a run that must have the bits of the one that is kept in the folder `recorded` beside the test."""
    now = tmp_path_factory.mktemp("recorded") / "run"
    return Recorded(str(folder_of(request.path, request.node.nodeid)), str(now))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Compare what a test has logged with what is kept of it."""
    result = yield
    run = getattr(item, "funcargs", {}).get("recorded")
    if isinstance(run, Recorded):
        try:
            says = run.compare(anew=item.config.getoption(OPTION))
        except UserError as error:
            says = str(error)
        if says is not None:
            pytest.fail(says, pytrace=False)
    return result


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a marked test's body on its ranks."""
    mark = pyfuncitem.get_closest_marker("ranks")
    if mark is None:
        return None
    try:
        from . import threads
    except ImportError as error:
        pytest.fail(f"pytest.mark.ranks: {error}. pip install '.[testing]' in a clone of zeroshard", pytrace=False)

    options = asked(mark.kwargs)
    arguments = {name: pyfuncitem.funcargs[name] for name in _arguments(pyfuncitem)}
    number: Any = pyfuncitem.callspec.params[SIZE]
    debugs = bool(pyfuncitem.config.getoption("usepdb", False) or pyfuncitem.config.getoption("trace", False))
    ran: Any
    try:
        if options.processes:
            ran = pyfuncitem.config.stash[NURSERY].run(number, pyfuncitem.obj, arguments, options)
        else:
            seed = _seed(pyfuncitem, options)
            ran = threads.run(number, pyfuncitem.obj, arguments, options, seed=seed, debugs=debugs)
    except UserError as error:
        pytest.fail(str(error), pytrace=False)
    pyfuncitem.add_report_section("call", "ranks", ran.says)
    if isinstance(ran.error, RankFailure):
        pytest.fail(str(ran.error), pytrace=False)
    if ran.error is not None:
        raise ran.error
    return True


def _arguments(function: Any) -> tuple[str, ...]:
    """Return the names of what pytest passes to a test's function."""
    names: tuple[str, ...] = function._fixtureinfo.argnames
    return names


def _seed(item: pytest.Function, options: Asked) -> int:
    said = item.config.getoption("--ranks-seed")
    if said == FRESH:
        return random.SystemRandom().randrange(SEEDS)
    if said is not None:
        return int(said)
    if options.seed is not None:
        return options.seed
    return int.from_bytes(hashlib.sha256(item.nodeid.encode()).digest()[:4], "little")
