"""`zeroshard.world`: ranks as threads of this process, and functions called on all of them."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import inspect
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from ..checkpoint import staging
from ..checkpoint.saving import Saving
from ..comm import groups, transport
from ..errors import PeerError, StateError, UserError
from .draws import Draws, Odds
from .group import Group, Store
from .install import installed
from .output import by_rank
from .rank import Rank, Registers
from .schedule import Schedule, Task, Unwind, here

BUSY = 20  # times as long as what the processor is needed for a run may take where others need it too
LEFT = 5.0  # seconds that threads have to end once a run is over
_running = threading.Lock()  # the process has one environment and one set of random numbers


def world(ranks: int, *, seed: int | None = None) -> World:
    """Make ranks 0 to `ranks - 1`, each a thread of this process, that find themselves launched as by torchrun.

    ranks: how many.
    seed: draws which rank goes on and when each message lands; the same seed draws the same again. None: a rank goes on
        until it must wait for another one.

    Raises `UserError` for a number of ranks or a seed that is none.

    Examples:
        >>> with zeroshard.world(4) as world:
        ...     world.run(lambda step: step * torch.distributed.is_available(), 3)  # on each rank, in rank order
        [3, 3, 3, 3]
    """
    for name, value, least in (("ranks", ranks, 1), ("seed", seed, 0)):
        if value is None and name == "seed":
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise UserError(
                f"world({name}={value!r}): expected an integer of at least {least}, such as zeroshard.world(4, seed=7)"
            )
    made = World(ranks, seed=seed)
    for rank in made.ranks:
        rank.launched()
    return made


class World:
    """Ranks of one process. `zeroshard.world` makes one.

    Between two calls of `run` the ranks keep their process groups, environment and random numbers, so that a model
    sharded by one call can be trained by the next.
    """

    def __init__(self, ranks: int, *, seed: int | None = None, odds: Odds | None = None, strict: bool = False) -> None:
        """odds, strict: for tests; see `draws.Odds` and `messages.Work`."""
        self.size, self.strict = ranks, strict
        self.schedule = Schedule(Draws(seed, odds or Odds(), strict=strict))
        self.store = Store(self)
        self.flights: dict[Any, Any] = {}  # collectives to which not all of their ranks have come
        self.complaints: list[str] = []  # about memory of messages under way
        self.ranks = [Rank(number) for number in range(ranks)]
        for rank in self.ranks:
            rank.world = self
        self.ended = ""  # why, where it is over
        self._holding: dict[Any, None] = {}
        self._untold: list[Saving] = []

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"zeroshard.world({self.size})" + (f": {self.ended}" if self.ended else "")

    def run(self, function: Callable[..., Any], /, *args: Any, **named: Any) -> list[Any]:
        """Call a function on each rank. Returns what each returned, in rank order.

        function: the same on each rank.
        args, named: its arguments.

        All ranks get the same objects, not copies of them. What they print begins with their rank. Raises what the
        first rank that failed has raised, with a note of which rank that was; `PeerError` where ranks wait for each
        other and none can go on, with where each waits. The world has ended then.

        Examples:
            >>> with zeroshard.world(2) as world:
            ...     world.run(lambda: int(os.environ["RANK"]))
            [0, 1]
        """
        if here() is not None:
            raise StateError("world.run() inside a rank: call it outside of the function that ranks run")
        if self.ended:
            raise StateError(
                f"world.run() after the world ended ({self.ended}): make another one by zeroshard.world(...)"
            )
        _check_function(function)
        if not _running.acquire(blocking=False):
            raise StateError("another world runs in this process: one zeroshard.world runs at a time")
        try:
            with by_rank():
                tasks = self.perform(lambda rank: function(*args, **named))
        except BaseException as error:
            self.close(f"{type(error).__name__} in the process that runs it")
            raise
        finally:
            _running.release()
        raised = self.schedule.raised
        if raised or any(isinstance(task.error, Unwind) for task in tasks):
            self._fail(raised, tasks)
        values = [task.value for task in tasks]
        for task in tasks:
            task.value = None  # the program's, and not kept here
        return values

    def close(self, why: str = "closed") -> None:
        """End the ranks: their process groups go, and this world runs nothing any more.

        why: what a later call of `run` names as the reason.

        Examples:
            >>> world = zeroshard.world(2)
            >>> world.close()
        """
        self.ended = self.ended or why
        self.flights.clear()
        self.ranks = []
        for task in self.schedule.tasks:
            task.value = None
        for parent in [each for each in groups._made if isinstance(each, Group) and each.world is self]:
            del groups._made[parent]  # which a process keeps until its end
        if self.schedule.draws.seed is not None:
            gc.collect()

    def _fail(self, raised: list[Task], tasks: list[Task]) -> None:
        stuck, seed = self.schedule.stuck, self.schedule.draws.seed
        again = "" if seed is None else f"; zeroshard.world({self.size}, seed={seed}) draws this schedule again"
        where = f"no rank could go on: {stuck}" if stuck else ""
        if not raised:
            self.close(where)
            raise PeerError(where + again)
        first, *others = raised
        error = first.error
        assert error is not None
        words = f"{type(error).__name__} on {first.name} of {self.size}"
        self.close(words)
        notes = [f"raised on {first.name} of {self.size}{again}", *([where] if where else [])]
        for task in others:
            said = str(task.error).splitlines() or [""]
            notes.append(f"then on {task.name}: {type(task.error).__name__}: {said[0]}")
        for note in notes:
            error.add_note(note)
        for task in tasks:
            task.error = None  # with its traceback, and all that the frames in it held
        raise error

    def perform(
        self,
        call: Callable[[Rank], Any],
        *,
        timeout: float = math.inf,
        busy: float = BUSY,
        also: Callable[[Draws], AbstractContextManager[None]] = lambda draws: contextlib.nullcontext(),
    ) -> list[Task]:
        """Call it on each rank until all have ended, or none can go on. Returns each rank's main thread.

        timeout: seconds of the processor, after which `late` says why the run was ended, and `stacks` where each rank
        was. busy: so many times as long may pass. also: what else is installed.
        """
        schedule, self.late, self.stacks = self.schedule, "", dict[str, str]()
        schedule.begin()
        with installed(), also(schedule.draws), self._restoring():
            for rank in self.ranks:
                Task(schedule, rank, partial(call, rank), f"rank {rank.number}", main=True)
            mains = schedule.tasks[:]
            schedule.start()
            try:
                worked, begun = time.process_time(), time.monotonic()
                while not schedule.ended.wait(0.5):  # the machine may be busy with something else
                    if time.process_time() - worked > timeout or time.monotonic() - begun > busy * timeout:
                        self.late = f"no end within {timeout:g} s: {schedule.words()}"
                        self.stacks = schedule.stacks()
                        break
            finally:
                if not schedule.ended.is_set():
                    _stop(schedule)
                deadline = time.monotonic() + LEFT
                for task in schedule.tasks:
                    task.thread.join(max(deadline - time.monotonic(), 0))
        return mains

    def complain(self, what: str) -> None:
        """Note what is wrong with a message's memory."""
        self.complaints.append(what)
        self.schedule.draws.fails(what, what)

    @contextlib.contextmanager
    def _restoring(self) -> Iterator[None]:
        """Keep what this process has one of as it was, whatever the ranks do to it, and theirs until the next run."""
        outside, hook, collects, threads = Registers(), sys.excepthook, gc.isenabled(), torch.get_num_threads()
        untold, holding, temporary = Saving._untold[:], dict(transport._holding), set(staging._temporary)
        Saving._untold[:] = self._untold
        transport._holding.clear()
        transport._holding.update(self._holding)
        staging._temporary.clear()  # those of ranks that end stay
        drawn = self.schedule.draws.seed is not None
        if drawn:
            gc.collect()
            if self.schedule.draws.collects:
                gc.freeze()  # what was there before need not be looked at: that takes 0.2 s each time
            gc.disable()  # when garbage is collected is the seed's to say
        try:
            yield
        finally:
            if self.schedule.holder is not None:
                self.schedule.holder.registers.save()
                self.schedule.holder = None
            outside.load()
            sys.excepthook = hook
            if torch.get_num_threads() != threads:  # to set them, though they are as many, ends OpenMP's
                torch.set_num_threads(threads)
            self._untold, self._holding = Saving._untold[:], dict(transport._holding)
            Saving._untold[:] = untold
            transport._holding.clear()
            transport._holding.update(holding)
            staging._temporary.clear()
            staging._temporary.update(temporary)
            if collects:
                gc.enable()


def _check_function(function: Any) -> None:
    """Refuse what a call does not run to its end."""
    if not callable(function):
        raise UserError(f"world.run({function!r}): expected a function, such as world.run(train, 3)")
    kinds = inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction
    if any(is_kind(function) for is_kind in kinds):
        raise UserError(
            f"world.run({getattr(function, '__name__', function)}): a call of it runs nothing yet: it is a generator "
            "or a coroutine. Give a function that runs it, such as lambda: asyncio.run(train())"
        )


def _stop(schedule: Schedule) -> None:
    """End a run from outside: the rank that runs at its next instruction, and the others after it."""
    schedule.over = True
    deadline = time.monotonic() + LEFT
    while not schedule.ended.is_set() and time.monotonic() < deadline:
        task = schedule.current
        if task is not None and not task.done and task.thread.ident:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(task.thread.ident), ctypes.py_object(Unwind))
        schedule.ended.wait(0.2)
