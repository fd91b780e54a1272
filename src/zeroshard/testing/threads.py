"""A test's body on ranks that are threads of pytest's process, in an order that a seed draws.

Each rank finds itself launched as by torchrun, in a process group of its own world, with random numbers that begin as
those of a fresh process that has called `manual_seed(0)`, whatever tests ran before.
"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy
import torch
import torch.distributed as dist

from ..errors import UserError
from ..worlds.output import by_rank
from ..worlds.rank import Rank
from ..worlds.schedule import Task, Unwind
from ..worlds.world import World
from .asked import Asked
from .failures import NO_FAILURES, Raised, RankFailure


class Ran(NamedTuple):
    """The end of a test's body on its ranks. error: what the test raises; says: what is shown beside it."""

    error: BaseException | None
    says: str


def run(
    ranks: int, body: Callable[..., Any], arguments: Mapping[str, Any], asked: Asked, *, seed: int, debugs: bool
) -> Ran:
    """Call `body(**arguments)` on each rank. debugs: no time is too long, since ranks may stop at a prompt.

    Raises `UserError` for an argument that ranks cannot share.
    """
    own = vars(body.__self__).items() if hasattr(body, "__self__") else ()  # of a class of tests
    for name, value in (*arguments.items(), *((f"self.{name}", value) for name, value in own)):
        check_shared(name, value)
    made = World(ranks, seed=seed)
    for rank in made.ranks:
        rank.launched()
        rank.registers.filters = [*warnings.filters]  # those of the test: an error for a warning is one on ranks too

    def process(rank: Rank) -> None:
        random.seed(0)
        numpy.random.seed(0)
        torch.manual_seed(0)
        if asked.group:
            dist.init_process_group("gloo", store=made.store, rank=rank.number, world_size=ranks)
        body(**arguments)

    try:
        with by_rank():
            tasks = made.perform(process, timeout=math.inf if debugs else asked.timeout, busy=1)
        return _ended(made, tasks)
    finally:
        made.close()


def check_shared(name: str, value: Any) -> None:
    """Refuse a fixture's value that each rank needs one of its own of: all threads get the same object."""
    inside = [*value.values()] if isinstance(value, dict) else [*value] if isinstance(value, (list, tuple)) else []
    for each in (value, *inside):
        leaf = isinstance(each, torch.Tensor) and each.requires_grad
        if leaf or isinstance(each, (torch.nn.Module, torch.optim.Optimizer)):
            raise UserError(
                f"the fixture {name!r} gives all ranks the same {type(each).__name__}, and each needs one of its own",
                instead="build it inside the test, or let the fixture return the function that builds it",
            )


def _ended(made: World, tasks: list[Task]) -> Ran:
    schedule, draws = made.schedule, made.schedule.draws
    again = f"schedule {draws.digest}, drawn by seed {draws.seed}: --ranks-seed={draws.seed} draws it again"
    raised, left = schedule.raised, [task for task in tasks if isinstance(task.error, Unwind) or not task.done]
    if not raised and not left:
        return Ran(None, again)
    lines = [_one_line(task) for task in raised[1:]]
    if schedule.stuck:
        lines.append(f"no rank could go on: {schedule.stuck}")
    if not raised:
        outcomes = [_hung(task, made) if task in left else None for task in tasks]
        named = ", ".join(str(rank) for rank, outcome in enumerate(outcomes) if outcome)
        what = made.late or f"no rank could go on: {schedule.stuck}"
        return Ran(RankFailure(f"hung on rank {named} of {made.size}: {what}", outcomes), again)
    first = raised[0]
    error = first.error
    assert error is not None
    where = f"raised on {first.name} of {made.size}"
    if type(error).__name__ in NO_FAILURES and any(type(task.error) is not type(error) for task in tasks):
        error = RankFailure(f"{first.name} of {made.size} skips the test, and not all do: {error}", [])
    else:
        error.add_note(where)
    for task in tasks:
        task.error = None  # with its traceback, and all that the frames in it held
    return Ran(error, "\n".join([where, *lines, again]))


def _hung(task: Task, made: World) -> Raised:
    kind = "Hung" if made.late else "Deadlock"
    return Raised(kind, task.doing(), made.stacks.get(task.name, ""), (kind,))


def _one_line(task: Task) -> str:
    said = str(task.error).splitlines() or [""]
    return f"then on {task.name}: {type(task.error).__name__}: {said[0]}"
