"""The options of `@pytest.mark.ranks(...)`, and the fixtures that reach no rank. Needs neither torch nor pytest."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from ..errors import UserError, nearest

MARK = "@pytest.mark.ranks"
MOST = 64  # ranks: more threads than this are a mistake, such as a seed in the place of a size
TIMEOUT = 60.0
REFUSED = {  # pytest's own fixtures that are about the process in which the test runs, and what to write instead
    "request": "a fixture that takes request and returns what the test needs of it",
    "monkeypatch": "a fixture that takes monkeypatch and changes what it has to, before the ranks begin",
    "capsys": "what ranks print is captured, and shown by rank where the test fails; return values to look at",
    "capsysbinary": "what ranks print is captured, and shown by rank where the test fails",
    "capfd": "what ranks print is captured, and shown by rank where the test fails",
    "capfdbinary": "what ranks print is captured, and shown by rank where the test fails",
    "caplog": "a logging.Handler that the test adds on its rank",
    "recwarn": "warnings.catch_warnings(record=True) or pytest.warns inside the test",
    "pytester": "a test without ranks",
    "testdir": "a test without ranks",
    "subtests": "pytest.mark.parametrize, or numbers of ranks in the mark",
    "record_property": "a test without ranks",
    "record_xml_attribute": "a test without ranks",
    "record_testsuite_property": "a test without ranks",
}


@dataclass(frozen=True)
class Asked:
    """The options of a mark: `@pytest.mark.ranks(2, 3, seed=7)`.

    seed: of the schedule; None: one of the test's own. timeout: seconds, after which ranks count as hung. group: is the
    process group made before the test's body runs? processes: is each rank a process of its own, and not a thread?
    """

    seed: int | None = None
    timeout: float = TIMEOUT
    group: bool = True
    processes: bool = False


def sizes(given: tuple[Any, ...]) -> tuple[int, ...]:
    """Return the numbers of ranks that a mark names. Raises `UserError` for what are none."""
    if not given:
        raise UserError(f"{MARK}() names no number of ranks", instead=f"{MARK}(2), or {MARK}(1, 2, 3)")
    for each in given:
        if type(each) is not int or not 1 <= each <= MOST:
            raise UserError(
                f"{MARK}: this is not a number of ranks",
                got=repr(each),
                expected=f"1 to {MOST}",
                instead=f"{MARK}(1, 2, 3)",
            )
    if len({*given}) != len(given):
        raise UserError(f"{MARK} names a number of ranks twice", got=given)
    return given


def asked(named: Mapping[str, Any]) -> Asked:
    """Return the options of a mark. Raises `UserError` for one that there is not, or whose value is none."""
    known = [each.name for each in fields(Asked)]
    for name in named:
        if name not in known:
            raise UserError(f"{MARK}(..., {name}=...): there is no such option", instead=nearest(name, known))
    made = Asked(**named)
    if made.seed is not None and (type(made.seed) is not int or made.seed < 0):
        raise UserError(
            f"{MARK}(..., seed=...)", got=repr(made.seed), expected="an integer of at least 0", instead="seed=7"
        )
    if type(made.timeout) not in (int, float) or not 0 < made.timeout < math.inf:
        raise UserError(f"{MARK}(..., timeout=...)", got=repr(made.timeout), expected="seconds", instead="timeout=60")
    for name in ("group", "processes"):
        if type(getattr(made, name)) is not bool:
            raise UserError(f"{MARK}(..., {name}=...)", got=repr(getattr(made, name)), expected="True or False")
    if made.processes and made.seed is not None:
        raise UserError(
            f"{MARK}(..., processes=True): the system decides in which order processes go on, and no seed",
            got=f"seed={made.seed}",
            instead="leave seed out, or processes",
        )
    return made


def check_function(function: Callable[..., Any], arguments: Iterable[str]) -> None:
    """Refuse a test whose body ranks cannot run, and fixtures that mean something in pytest's own process only."""
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise UserError(
            f"{MARK} on a coroutine", expected="a function", instead="asyncio.run(...) inside the test, on each rank"
        )
    if getattr(function, "is_hypothesis_test", False):
        raise UserError(
            f"{MARK} on a test of hypothesis': each rank would draw examples of its own",
            instead="pytest.mark.parametrize, or random numbers from a seed that is an argument of the test",
        )
    for name in arguments:
        if name in REFUSED:
            raise UserError(f"the fixture {name!r} reaches no rank", instead=REFUSED[name])
