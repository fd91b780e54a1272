"""`run`: a function on each rank of a world."""

from __future__ import annotations

import ctypes
import gc
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ranks import failures, worker
from zeroshard.checkpoint.saving import Saving
from zeroshard.ranks import transport

from .disk import Disk
from .draws import Draws, Odds
from .group import Store
from .install import installed
from .rank import GONE, Rank, Registers
from .schedule import Schedule, Task, Unwind, here

BUSY = 20  # times as long as what the processor is needed for a run may take where others need it too
LEFT = 5.0  # seconds that threads have to end once a run is over


class World:
    """The ranks of one run."""

    def __init__(self, size: int, draws: Draws, *, strict: bool) -> None:
        self.size, self.strict = size, strict
        self.schedule = Schedule(draws)
        self.store = Store(self)
        self.disk = Disk()
        self.flights: dict[Any, Any] = {}  # collectives to which not all of their ranks have come
        self.complaints: list[str] = []
        self.ranks = [Rank(number) for number in range(size)]
        for rank in self.ranks:
            rank.world = self

    def complain(self, what: str) -> None:
        self.complaints.append(what)
        self.schedule.draws.fails(what, what)


class Ran:
    """What one run was: filled in by `run(..., ran=...)`."""

    digest = ""  # of the schedule
    events: tuple[str, ...] = ()  # the last ones
    before: tuple[str, ...] = ()  # the last ones before what may be a failure, if anything was
    disk: Disk  # and what is not written there
    struck: tuple[str, ...] = ()  # faults that were drawn
    hand_overs = 0
    clock = 0.0  # virtual seconds


def run(
    world: int,
    fn: Callable[..., Any],
    *args: Any,
    group: bool | str = True,
    group_timeout: float = 1800.0,
    timeout: float = 60.0,
    expect_errors: bool = False,
    strict: bool = False,
    seed: int | None = None,
    odds: Odds | None = None,
    ran: Ran | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Call `fn(*args, **kwargs)` on ranks 0..world-1 and return their values in rank order. As `ranks.run`, but for:

    group_timeout: in virtual seconds. timeout: in real ones of the processor, of the whole run.
    strict: what has not landed is poisoned, what is under way is checked, and messages land as late as they may.
    seed, odds: what is drawn, and how probable it is. ran: where to note what the run was.
    """
    __tracebackhide__ = True
    name = getattr(fn, "__name__", repr(fn))
    made = World(world, Draws(seed, odds or Odds(), strict=strict), strict=strict)
    schedule, draws = made.schedule, made.schedule.draws

    def process(rank: Rank) -> Any:
        worker.sit(rank.number, world)
        worker.reset_global_state()
        _open(made, rank, group, group_timeout)
        return fn(*args, **kwargs)

    late = ""
    with installed(draws), _apart(collects=draws.collects):
        for rank in made.ranks:
            Task(schedule, rank, lambda rank=rank: process(rank), f"rank {rank.number}", main=True)
        mains = schedule.tasks[:]
        schedule.start()
        try:
            worked, begun = time.process_time(), time.monotonic()
            while not schedule.ended.wait(0.5):  # the machine may be busy with something else
                if time.process_time() - worked > timeout or time.monotonic() - begun > BUSY * timeout:
                    late = f"no end within {timeout:g} s: {schedule.words()}"
                    break
        finally:
            if not schedule.ended.is_set():
                _stop(schedule)
            for task in schedule.tasks:
                task.thread.join(LEFT)
    if ran is not None:
        ran.digest, ran.events, ran.struck = draws.digest, tuple(draws.events), tuple(draws.struck)
        ran.before, ran.disk = draws.before, made.disk
        ran.hand_overs, ran.clock = schedule.hand_overs, schedule.clock
    outcomes = [_outcome(task, late, schedule.stuck) for task in mains]
    for task in mains:
        task.error = None  # with its traceback, and all that the frames in it held
    failed = [rank for rank, each in enumerate(outcomes) if isinstance(each, failures.Raised)]
    what = late or "; ".join(made.complaints) or (failed and schedule.stuck and f"nobody could go on: {schedule.stuck}")
    hung = late or any(outcomes[rank].type == "Deadlock" for rank in failed)
    if hung or made.complaints or (failed and not expect_errors):
        where = (
            f"{name} failed on rank {', '.join(map(str, failed))} of {world}" if failed else f"{name} on {world} ranks"
        )
        raise failures.RankFailure(where + (f": {what}" if what else "") + _again(draws), outcomes)
    return outcomes


def _again(draws: Draws) -> str:
    return (
        ""
        if draws.seed is None
        else f" (seed {draws.seed}, schedule {draws.digest}; {'; '.join(draws.struck) or 'no faults'})"
    )


def _open(world: World, rank: Rank, group: bool | str, limit: float) -> None:
    if group == "env":  # as torchrun does
        rank.registers.environment.update(
            (name.encode(), str(value).encode()) for name, value in {
                "RANK": rank.number, "LOCAL_RANK": rank.number, "WORLD_SIZE": world.size,
                "LOCAL_WORLD_SIZE": world.size, "GROUP_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1,
                "TORCHELASTIC_RUN_ID": "ranks", "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": 0,
            }.items()
        )  # fmt: skip
    elif group:
        dist.init_process_group(
            "gloo", store=world.store, rank=rank.number, world_size=world.size, timeout=timedelta(seconds=limit)
        )


class _apart:
    """This process is as it was after the run, whatever the ranks did to what it has one of."""

    def __init__(self, *, collects: bool) -> None:
        self._freezes = collects

    def __enter__(self) -> None:
        assert here() is None, "a world inside a rank of another one"
        self._registers, self._hook, self._collects = Registers(), sys.excepthook, gc.isenabled()
        self._untold = Saving._untold[:]
        self._holding = dict(transport._holding)
        transport._holding.clear()
        gc.collect()
        if self._freezes:
            gc.freeze()  # what was there before need not be looked at: that takes 0.2 s each time
        gc.disable()  # when garbage is collected is the seed's to say

    def __exit__(self, *_: object) -> None:
        self._registers.load()
        sys.excepthook = self._hook
        Saving._untold[:] = self._untold
        transport._holding.clear()
        transport._holding.update(self._holding)
        gc.collect()
        if self._collects:
            gc.enable()


def _stop(schedule: Schedule) -> None:
    """End a run from outside: whoever runs at its next instruction, and the others after it."""
    schedule.over = True
    deadline = time.monotonic() + LEFT
    while not schedule.ended.is_set() and time.monotonic() < deadline:
        task = schedule.current
        if task is not None and not task.done and task.thread.ident:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(task.thread.ident), ctypes.py_object(Unwind))
        schedule.ended.wait(0.2)


def _outcome(task: Task, late: str, stuck: str) -> Any:
    error = task.error
    if error is None and task.done:
        return task.value
    if isinstance(error, Unwind) or not task.done:
        kind = "Died" if task.rank.away == GONE else "Hung" if late else "Deadlock"
        words = {"Died": "the rank ended without an answer", "Hung": late, "Deadlock": stuck}[kind]
        return failures.Raised(kind, words, "", (kind,))
    text = "".join(traceback.format_exception(error))
    return failures.Raised(type(error).__name__, str(error), text, tuple(each.__name__ for each in type(error).__mro__))
