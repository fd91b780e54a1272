"""`run`: a function on each rank of a world."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ranks import worker
from zeroshard.testing import failures
from zeroshard.worlds.draws import Draws, Odds
from zeroshard.worlds.rank import GONE, Rank
from zeroshard.worlds.schedule import Task, Unwind
from zeroshard.worlds.world import World

from .disk import Disk
from .faults import faulty


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
    made = World(world, seed=seed, odds=odds, strict=strict)
    made.disk = Disk()  # type: ignore[attr-defined]
    schedule, draws = made.schedule, made.schedule.draws

    def process(rank: Rank) -> Any:
        worker.sit(rank.number, world)
        worker.reset_global_state()
        if group == "env":
            rank.launched()
        elif group:
            limit = timedelta(seconds=group_timeout)
            dist.init_process_group("gloo", store=made.store, rank=rank.number, world_size=world, timeout=limit)
        return fn(*args, **kwargs)

    mains = made.perform(process, timeout=timeout, also=faulty)
    late = made.late
    if ran is not None:
        ran.digest, ran.events, ran.struck = draws.digest, tuple(draws.events), tuple(draws.struck)
        ran.before, ran.disk = draws.before, made.disk  # type: ignore[attr-defined]
        ran.hand_overs, ran.clock = schedule.hand_overs, schedule.clock
    outcomes = [_outcome(task, late, schedule.stuck) for task in mains]
    for task in mains:
        task.error = None  # with its traceback, and all that the frames in it held
    made.close()
    failed = [rank for rank, each in enumerate(outcomes) if isinstance(each, failures.Raised)]
    what = (
        late or "; ".join(made.complaints) or (failed and schedule.stuck and f"no rank could go on: {schedule.stuck}")
    )
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
