"""A small job under a drawn schedule and drawn faults: a seed says all of it, and says it again.

Claims. The job (`training.py`) ends with the bits of the run that was left alone, and holds as many bytes of each state; or,
where a fault struck, with a named error on every rank that is left. Then what it has saved counts: a new run goes on with it,
not before the last step that a rank knew to be saved, and ends with the same bits. Never a hang, another error, or a
checkpoint lost.
"""

from __future__ import annotations

import functools
import logging
import os
import random
import tempfile
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

import interrupts
from zeroshard.testing.failures import Raised, RankFailure
from zeroshard.worlds.draws import Odds

from .running import Ran, run
from .training import CONFIGS, Settings, faults, train

# By name, of which one is drawn for a case; the odds are for a run of some hundred points and calls, and 30,000 lines.
FAULTS = {
    "none": [Odds()],
    "collections": [Odds(collect=0.002, inside=0.005), Odds(inside=0.015), Odds(sweep=0.0001)],
    "time-outs": [Odds(rush=0.02)],
    "pauses": [Odds(pause=0.001), Odds(pause=0.005, pauses=(0.5, 5))],
    "interrupts": [Odds(interrupt=0.00002), Odds(interrupt=0.0002)],
    "memory": [Odds(memory=0.003), Odds(memory=0.02)],
    "disk": [Odds(disk=0.03, short=0.1), Odds(disk=0.005), Odds(short=0.3)],
    "ends": [Odds(end=0.001)],
    "power": [Odds(power=0.05), Odds(power=0.02), Odds(power=0.005)],
}
SAME = "the same bits"
# An interrupt between two lines of these leaves a count beside what it counts: files, and functions by their whole name.
COUNTING = (
    "events.py", "in reserve", "in rest", "in take", "in give_back", "in take_memory", "in give_back_memory",
    "in _memory", "in _make", "in count",
)  # fmt: skip
LIMIT = 30.0  # virtual seconds of a collective


class Case(NamedTuple):
    """What a seed says."""

    seed: int
    settings: Settings
    faults: str
    odds: Odds
    armed: bool  # do faults strike from the first line on, or once the first checkpoint is there?

    @staticmethod
    def of(seed: int) -> Case:
        draw = random.Random(seed)
        settings, kind = Settings.of(draw.randrange(CONFIGS)), draw.choice([*FAULTS])
        return Case(seed, settings, kind, draw.choice(FAULTS[kind]), draw.random() < 0.1)

    def __str__(self) -> str:
        return f"seed {self.seed}: faults: {self.faults}; {self.settings}"


def _train(settings: Settings, folder: str, saved: dict[int, int], *, armed: bool = False, resume: bool = False) -> Any:
    for name in ("zeroshard", "torch"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    faults(strike=armed)
    try:
        return train(settings, folder, saved, resume=resume)
    except (KeyboardInterrupt, MemoryError):  # before it trains: the program ends
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
        named = self.outcome.startswith("named")
        return not (self.outcome.startswith(SAME) or named) or (named and not self.ran.struck)


@functools.cache
def alone(number: int) -> list[dict[str, Any]]:
    """The run that was left alone. Of 96 settings, so that most are there already."""
    settings = Settings.of(number)
    with tempfile.TemporaryDirectory() as folder:
        return run(settings.ranks, _train, settings, folder, {}, group_timeout=LIMIT)


def find(seed: int) -> Found:
    """Run a case, after the same one left alone."""
    case, ran = Case.of(seed), Ran()
    settings, saved = case.settings, dict[int, int]()
    loggers = [logging.getLogger(name) for name in ("zeroshard", "torch")]
    levels = [each.level for each in loggers]
    try:
        try:
            before = alone(settings.number)
        except RankFailure as failure:
            return Found(case, "fails when it is left alone", str(failure), ran)
        if not all("bits" in each for each in before):
            return Found(case, "fails when it is left alone", f"{before}", ran)
        with tempfile.TemporaryDirectory() as folder:
            try:
                outcomes = run(
                    settings.ranks, _train, settings, folder, saved, armed=case.armed, seed=seed, odds=case.odds, ran=ran,
                    expect_errors=True, group_timeout=LIMIT,
                )  # fmt: skip
            except RankFailure as failure:
                return Found(case, "hung, or changed what was under way", str(failure), ran)
            outcome, words = _judged(outcomes, before, ran.struck)
            left = sorted(os.listdir(f"{folder}/saved")) if os.path.isdir(f"{folder}/saved") else []
            if outcome.startswith((SAME, "named")):
                if all(isinstance(each, dict) for each in outcomes) and any(".saving-" in name for name in left):
                    outcome, words = "half a checkpoint stays", f"{left}"
                elif not outcome.startswith(SAME) or case.faults in ("disk", "power"):
                    if case.faults == "power":
                        ran.disk.lose(folder, seed)
                    outcome, words = _goes_on(case, folder, saved, before, outcome)
    finally:
        for each, level in zip(loggers, levels, strict=True):
            each.setLevel(level)
    return Found(case, outcome, words, ran)


def _goes_on(case: Case, folder: str, saved: dict[int, int], before: list[Any], outcome: str) -> tuple[str, str]:
    """A new run takes up what this one has left."""
    known = max(saved.values(), default=-1)
    try:
        later = run(case.settings.ranks, _train, case.settings, folder, {}, resume=True, group_timeout=LIMIT)
    except RankFailure as failure:
        return "nothing goes on after it", str(failure)
    if any("ended" in each for each in later):
        return "nothing goes on after it", f"{later}"
    if known >= 0 and later[0]["begun"] < known:
        return "a checkpoint is lost", f"step {known} was saved, and a new run begins after {later[0]['begun']}"
    then, words = _judged(later, before)
    return (outcome, "") if then.startswith(SAME) else (f"after it: {then}", words)


def _is_counting(words: str) -> bool:
    return any(words.endswith(each) if each.startswith("in ") else each in words for each in COUNTING)


def _judged(outcomes: list[Any], alone: list[dict[str, Any]], struck: Sequence[str] = ()) -> tuple[str, str]:
    left = [each for each in outcomes if isinstance(each, Raised) and each.type != "Died"]
    if left:
        return "not named", "\n".join(f"{each.type}: {each.message}\n{each.traceback}" for each in left)
    cases = []
    for outcome, before in zip(outcomes, alone, strict=True):
        if not isinstance(outcome, dict):
            continue
        cases.append(case := dict(outcome))
        if "bits" in case:
            want, got = before["bits"], case.pop("bits")
            case["differs"] = [name for name in want if not torch.equal(got[name], want[name])]
            held = case.pop("held")
            # Not what was gathered: a message of another rank's that has not landed yet keeps the memory that it is sent
            # from, here as with gloo. And a run that went on has not asked for all that makes this one hold something.
            states = {*held, *before["held"]} - {"gather", "prefetch"}
            counts = not case["begun"] and not any(_is_counting(words) for words in struck)
            case["leaks"] = [(what, held.get(what), before["held"].get(what)) for what in sorted(states)
                             if counts and held.get(what) != before["held"].get(what)]  # fmt: skip
    return interrupts.judged(cases) if cases else ("named by nobody: no rank is left", "")
