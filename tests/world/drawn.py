"""Training under a drawn schedule and drawn faults: a seed says all of it, and says it again.

A case is the training of `tests/interrupts.py`: each rank tries again what an exception ended, and loads the newest
checkpoint where it is told to. It ends with the bits of the run that was left alone, and holds as many bytes of each state;
or, where a fault struck, with a named error on every rank that is left. Never with a hang, another error, or other bits.
"""

from __future__ import annotations

import logging
import os
import random
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import interrupts
from ranks.failures import Raised, RankFailure

from .draws import Odds
from .running import Ran, run

FAULTS = {
    "none": Odds(),
    "collections": Odds(collect=0.003),
    "time-outs": Odds(rush=0.02),
    "interrupts": Odds(interrupt=0.00005),
    "ends": Odds(end=0.0005),
}
SAME = "the same bits"


class Case(NamedTuple):
    """What a seed says."""

    seed: int
    ranks: int
    stage: int
    faults: str
    settings: Callable[..., dict[str, Any]]

    @staticmethod
    def of(seed: int) -> Case:
        draw = random.Random(seed)
        ranks, stage, faults = draw.choice((2, 2, 3)), draw.randrange(4), draw.choice([*FAULTS])
        return Case(seed, ranks, stage, faults, draw.choice((interrupts.plain, interrupts.formats)))

    def __str__(self) -> str:
        return f"seed {self.seed}: {self.ranks} ranks, stage {self.stage}, {self.settings.__name__} settings, faults: {self.faults}"


class _Alone:
    """Stands for what interrupts training at waits: here the world does."""

    def __init__(self) -> None:
        self.plan: dict[int, Any] = {}
        self.seen, self.raised = 0, list[str]()
        self.handler: Any = None


def _train(case: Case, folder: str) -> dict[str, Any]:
    for name in ("zeroshard", "torch"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        return interrupts.train(case.stage, case.seed, _Alone(), folder, case.settings)
    except KeyboardInterrupt:  # before it trains: the program ends
        os._exit(3)
        raise AssertionError("a rank that has ended goes on") from None


class Found(NamedTuple):
    """What became of a case."""

    case: Case
    outcome: str
    words: str
    ran: Ran

    @property
    def wrong(self) -> bool:
        return not self.outcome.startswith((SAME, "named")) or (
            self.outcome.startswith("named") and not self.ran.struck
        )


def find(seed: int) -> Found:
    """Run a case, after the same one left alone."""
    case, ran, odds = Case.of(seed), Ran(), FAULTS[Case.of(seed).faults]
    loggers = [logging.getLogger(name) for name in ("zeroshard", "torch")]
    levels = [each.level for each in loggers]
    try:
        with tempfile.TemporaryDirectory() as folder:
            alone = run(case.ranks, _train, case, f"{folder}/alone")
            try:
                outcomes = run(
                    case.ranks, _train, case, f"{folder}/drawn", seed=seed, odds=odds, ran=ran, expect_errors=True,
                    group_timeout=30.0,
                )  # fmt: skip
            except RankFailure as failure:
                return Found(case, "hung, or changed what was under way", str(failure), ran)
    finally:
        for each, level in zip(loggers, levels, strict=True):
            each.setLevel(level)
    return Found(case, *_judged(outcomes, alone), ran)


def _judged(outcomes: list[Any], alone: list[dict[str, Any]]) -> tuple[str, str]:
    left = [each for each in outcomes if isinstance(each, Raised) and each.type != "Died"]
    if raised := [each for each in left if not each.isa("Error")]:
        return "not named", "\n".join(f"{each.type}: {each.message}\n{each.traceback}" for each in raised)
    cases = [each for each in outcomes if isinstance(each, dict)]
    if left:
        return "named before the first step", ""
    if not cases:
        return "named by nobody: no rank is left", ""
    for each, before in zip(outcomes, alone, strict=True):
        if isinstance(each, dict) and "bits" in each:
            want, got = before["bits"], each.pop("bits")
            each["differs"] = [name for name in want if not torch.equal(got[name], want[name])]
            held = each.pop("held")
            each["leaks"] = [(what, held.get(what), before["held"].get(what)) for what in sorted({*held, *before["held"]})
                             if held.get(what) != before["held"].get(what)]  # fmt: skip
    return interrupts.judged(cases)
