"""Threads that hand on a baton: who runs, when virtual time passes, and who waits for what when no rank can go on.

Exactly one thread of a world runs, the one that has the baton, so nothing here needs a lock. It hands the baton on
where it waits (`wait`), where it ends, and, as a seed draws it, where it could (`point`).

Time passes only when no rank can go on: to the end of the next wait. zeroshard waits in slices, so where nothing has
happened for a while time goes in longer and longer steps, but never past a message's own time-out.
"""

from __future__ import annotations

import gc
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .draws import NEVER, Draws
from .rank import GONE, SILENT, Rank
from .signals import can_come

QUIET = 1.0  # virtual seconds in which nothing happens, after which the ranks count as waiting for each other
LONGEST = 0.003  # virtual seconds that a message which could land stays away while ranks sleep
_HERE = str(Path(__file__).parent)
_ZEROSHARD = str(Path(__file__).parents[1])
_own = threading.local()


def here() -> Task | None:
    """The thread of a world that this is, or None."""
    return getattr(_own, "task", None)


class Unwind(BaseException):
    """Ends a thread whose world is over."""


class Wait(NamedTuple):
    """A condition that a thread waits for."""

    ready: Callable[[], bool]
    until: float
    why: str


class Task:
    """A thread of a rank."""

    def __init__(
        self, schedule: Schedule, rank: Rank, call: Callable[[], Any], name: str, *, main: bool = False
    ) -> None:
        self.schedule, self.rank, self.name, self.main = schedule, rank, name, main
        self.waits: Wait | None = None
        self.stands_still = 0.0  # until then
        self.done = False
        self.value: Any = None
        self.error: BaseException | None = None
        self._call: Callable[[], Any] | None = call
        self._baton = threading.Lock()
        self._baton.acquire()
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        schedule.tasks[:] = [*(each for each in schedule.tasks if each.main or not each.done), self]
        self.thread.start()

    def go(self) -> None:
        """Get the baton."""
        self._baton.release()

    def stop(self) -> None:
        """Wait for the baton."""
        self._baton.acquire()

    def able(self, clock: float) -> bool:
        if self.done or self.rank.away or self.stands_still > clock:
            return False
        return self.waits is None or clock >= self.waits.until or self.waits.ready()

    def doing(self) -> str:
        """In words, with the innermost place outside of torch and of this folder."""
        if self.done:
            return f"{self.name} has returned" if self.error is None else f"{self.name} raised {self.error!r:.200}"
        if self.rank.away:
            return f"{self.name} {self.rank.away}"
        what = "runs" if self.waits is None else self.waits.why
        frame = sys._current_frames().get(self.thread.ident or 0)
        ours = ("/torch/", "/threading.py", f"{_HERE}/")
        stack = [each for each in traceback.extract_stack(frame) if not any(part in each.filename for part in ours)]
        places = [f"{Path(each.filename).name}:{each.lineno} in {each.name}" for each in stack[-3:]]
        return f"{self.name} {what}" + (f" ({', '.join(reversed(places))})" if places else "")

    def _run(self) -> None:
        _own.task = self
        torch.set_num_threads(1)
        torch._C._distributed_c10d._set_thread_isolation_mode(True)  # type: ignore[attr-defined]  # its table of groups is each thread's own then
        for group, name in self.rank.distributed.pg_names.items():
            torch._C._distributed_c10d._register_process_group(name, group)
        self.stop()
        try:
            if self.schedule.over:
                raise Unwind
            if self.main:
                self.schedule.trace_lines()
            assert self._call is not None
            self.value = self._call()
        except BaseException as error:
            self.error = error
            if not isinstance(error, Unwind):
                if self.main:
                    self.schedule.raised.append(self)
                kind = f"{self.name} raises {type(error).__name__}"
                self.schedule.draws.fails(f"{kind}: {error}", kind)
        finally:
            sys.settrace(None)
            self._call = None
            self.done = True
            self.schedule.end()


class Schedule:
    """Decide which thread of a world runs, message by message and wait by wait."""

    def __init__(self, draws: Draws) -> None:
        self.draws = draws
        self.flying: list[Any] = []  # messages that have not landed
        self.landing: list[Any] = []  # of these, what could
        self.asleep = False  # is a rank SILENT for a while?
        self.clock = 0.0
        self.moved = 0.0  # when something last happened that could let somebody go on
        self.hand_overs = 0
        self.begin()

    def begin(self) -> None:
        """Forget the threads of the run before."""
        self.tasks: list[Task] = []
        self.raised: list[Task] = []  # main threads that ended by an exception, in the order in which they did
        self.current: Task | None = None
        self.holder: Rank | None = None  # whose registers the process has
        self.over = False
        self.ended = threading.Event()
        self.stuck = ""  # who waits for what, since nothing happens any more
        self._within = False  # a draw, or what it brought about

    def start(self) -> None:
        self.holder, self.current = self.tasks[0].rank, self.tasks[0]
        self.holder.registers.load()
        self.tasks[0].go()

    # --- what a thread calls ------------------------------------------------------------------------------------------

    def moves(self) -> None:
        """Something has happened that could let others go on."""
        self.moved = self.clock

    def point(self, where: str) -> None:
        """The running thread could hand on the baton here."""
        if self.draws.seed is None:
            return
        me = here()
        if me is None or self.over or me is not self.current or self._within:
            return  # nothing is drawn where the collector ends objects: in which order is not the seed's
        self._draw(me, where)
        if self.draws.chance(self.draws.odds.hand_on):
            self._hand_on(me)
        else:
            self._deliver()

    def wait(self, ready: Callable[[], bool], limit: float | None, why: str) -> bool:
        """Wait until `ready()`, for so many virtual seconds at most. Returns whether it is so."""
        me = here()
        if me is None or me is not self.current or self._within:  # a handle that outlived its world, or an object's end
            return ready()
        if self.over:
            raise Unwind
        until = NEVER if limit is None else self.clock + limit
        self._draw(me, why)
        if self.draws.chance(self.draws.odds.hand_on):
            self._hand_on(me)
        while not ready():
            if self.clock >= until:
                return False
            me.waits = Wait(ready, until, why)
            try:
                self._hand_on(me)
            finally:
                me.waits = None
        return True

    def end(self) -> None:
        """The running thread has come to its end."""
        self.moves()
        task = None if self.over else self._next()
        if task is None:
            self.over = True
            task = next((each for each in self.tasks if not each.done), None)
        if task is None:
            self.ended.set()
        else:
            self._give(task)

    def tell(self, words: str) -> None:
        """An event, in words of the running thread's own."""
        if (me := here()) is not None and me is self.current:
            self.draws.note(f"{me.name} {words}")

    def collects(self, where: str) -> None:
        """The running thread copies a container."""
        me = here()
        if me is None or self.over or me is not self.current or self._within:
            return
        if self.draws.chance(self.draws.odds.inside):
            self._collect(me, f"inside a copy in {where}")

    def strikes(self, probability: float, what: str) -> bool:
        """Does a fault strike the running thread here?"""
        me = here()
        if me is None or self.over or me is not self.current or self._within or not self.draws.strikes(probability):
            return False
        self.draws.strike(f"{me.name} {what}")
        return True

    def leave(self, rank: Rank, away: str) -> None:
        """A rank is gone or silent from now on: no rank hears of it any more."""
        rank.away = away
        self.moves()
        if (me := here()) is not None and me.rank is rank:
            self._hand_on(me)

    def launch(self, work: Any, can: list[Any]) -> None:
        """A message begins its way. can: those that can land from now on."""
        self.moves()
        self.flying.append(work)
        self.landing += can
        for each in can:
            if each.patience <= 0 or (each.wanted and self.draws.seed is None):
                self._land(each)

    def words(self) -> str:
        return "; ".join(task.doing() for task in self.tasks if task.main or not task.done)

    def stacks(self) -> dict[str, str]:
        """Return the stacks of threads that have not ended, by their names, as tracebacks print them."""
        frames = sys._current_frames()
        left = [(task.name, frames.get(task.thread.ident or 0)) for task in self.tasks if not task.done]
        return {name: "".join(traceback.format_stack(frame)) for name, frame in left if frame is not None}

    # --- who goes on --------------------------------------------------------------------------------------------------

    def _hand_on(self, me: Task) -> None:
        task = self._next()
        if task is None:
            self.over = True
        elif task is not me:
            self._give(task)
            me.stop()
        if self.over:
            raise Unwind

    def _give(self, task: Task) -> None:
        if self.holder is not None:  # else the run is over, and a thread that is left ends
            if task.rank is not self.holder:
                self.holder.registers.save()
                task.rank.registers.load()
            self.holder = task.rank
        self.current = task
        self.hand_overs += 1
        why = f", which {task.waits.why}" if task.waits else ""
        self.draws.note(f"{self.clock:.4f} s: {task.name} goes on{why}")
        task.go()

    def _next(self) -> Task | None:
        """Choose who goes on; None where no rank is left, or none ever could."""
        while True:
            if self.asleep:
                self._wake()
            if self.landing:
                self._deliver()
            if self.draws.chance(self.draws.odds.rush) and (then := self._soonest(messages=False)) < NEVER:
                self.clock = then
            clock = self.clock
            if able := [task for task in self._in_turn() if not task.done and task.able(clock)]:
                chosen: Task = self.draws.one_of(able)
                return chosen
            if all(task.done or (task.rank.away and not task.rank.until) for task in self.tasks):
                return None
            then = self._soonest()
            due = [each for each in self.landing if each.wanted or then > each.since + LONGEST]
            if due:
                self._land(self.draws.one_of(due))
            elif then == NEVER:
                self.stuck = self.stuck or self.words()
                return None
            else:
                self._pass_time(then)

    def _wake(self) -> None:
        for task in self.tasks:
            rank = task.rank
            if rank.until and rank.until <= self.clock:
                rank.until, rank.away = 0.0, "" if rank.away == SILENT else rank.away
                self.moves()
                self.draws.note(f"{self.clock:.4f} s: rank {rank.number} is awake again")

    def _in_turn(self) -> list[Task]:
        at = self.tasks.index(self.current) + 1 if self.current in self.tasks else 0
        return self.tasks[at:] + self.tasks[:at]

    def _soonest(self, *, messages: bool = True) -> float:
        """Return the time at which the next wait ends by itself."""
        here = [task for task in self.tasks if not task.done]
        waits = [task.waits.until for task in here if task.waits and not task.rank.away]
        waits += [max(task.rank.until, task.stands_still) for task in here]
        dies = [each.dies for each in self.flying] if messages else []
        return min((each for each in waits + dies if each > self.clock), default=NEVER)

    def _pass_time(self, then: float) -> None:
        idle, dies = self.clock - self.moved, [each.dies for each in self.flying if each.dies > self.clock]
        if idle > QUIET:
            pauses = [max(task.rank.until, task.stands_still) for task in self.tasks if not task.done]
            then = max(then, min([self.clock + idle, *dies, *(each for each in pauses if each > self.clock)]))
        if idle > QUIET or then in dies:
            self.stuck = self.stuck or self.words()
        self.clock = then

    # --- messages and faults ------------------------------------------------------------------------------------------

    def _deliver(self) -> None:
        """Messages come a point nearer."""
        if self.draws.seed is not None:
            for each in self.landing[:]:
                each.patience -= 1
                if each.patience < 0 or (each.wanted and self.draws.chance(0.5)):
                    self._land(each)

    def _land(self, work: Any) -> None:
        self.flying.remove(work)
        self.landing.remove(work)
        self.moves()
        self.stuck = ""
        try:
            work.land()
        except Exception as error:  # else it is the running thread's, or ends the one that chooses who goes on
            work.fails(error)
        self.draws.note(f"{self.clock:.4f} s: {work} {'fails' if work.failed else 'lands'}")

    def lost(self, work: Any) -> None:
        """A message has failed."""
        if work in self.flying:
            self.flying.remove(work)
            if work in self.landing:
                self.landing.remove(work)
            self.moves()

    def _draw(self, me: Task, where: str) -> None:
        odds, draws = self.draws.odds, self.draws
        if draws.traces and me.main and draws.at_lines is (sys.gettrace() is None):
            self.trace_lines()  # or not any more; and the interpreter drops what has raised
        if draws.chance(odds.collect):
            self._collect(me, f"where it {where}")
        if not (odds.end or odds.pause) or not me.main or any(task.rank.away for task in self.tasks):
            return
        if draws.strikes(odds.end):
            draws.strike(f"rank {me.rank.number} ends where it {where}")
            self.leave(me.rank, GONE)
        if draws.strikes(odds.pause):
            seconds, silent = draws.one_of(odds.pauses), draws.one_of((True, False))
            what = "is stopped" if silent else "stands still"
            draws.strike(f"rank {me.rank.number} {what} for {seconds:g} virtual seconds where it {where}")
            if silent:
                me.rank.until, self.asleep = self.clock + seconds, True
                self.leave(me.rank, SILENT)
            else:
                me.stands_still = self.clock + seconds
                self._hand_on(me)

    def _collect(self, me: Task, where: str) -> None:
        self.draws.note(f"{me.name} collects garbage {where}")
        self._within, traced = True, sys.gettrace()
        sys.settrace(None)  # in which order objects end is not the seed's
        try:
            gc.collect()
        finally:
            self._within = False
            sys.settrace(traced)

    def trace_lines(self) -> None:
        """Interrupt this thread, or collect garbage, at drawn lines of zeroshard's: from here on, or not any more."""
        draws, me = self.draws, here()
        if not draws.at_lines:
            if draws.traces:
                sys.settrace(None)
            return
        assert me is not None

        def call(frame: Any, event: str, _: Any) -> Any:
            code, since = frame.f_code, frame.f_lasti
            ours = code.co_filename.startswith(_ZEROSHARD) and not code.co_filename.startswith(_HERE)
            if not ours or code.co_name == "<module>":
                return None

            def line(frame: Any, event: str, _: Any) -> Any:
                nonlocal since
                if event == "line":
                    draws.lines -= 1
                    if draws.lines <= 0:
                        self._at_line(me, frame, since)
                    since = frame.f_lasti
                return line

            return line

        sys.settrace(call)

    def _at_line(self, me: Task, frame: Any, since: int) -> None:
        if self.over or self._within or not self.draws.armed or not can_come(frame.f_code, since, frame.f_lasti):
            self.draws.lines = 1  # at the next one
            return
        what = self.draws.line()
        place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"
        if what == "sweep":
            self._collect(me, f"at {place}")
        elif what:
            self.draws.strike(f"rank {me.rank.number} is interrupted at {place}")
            raise KeyboardInterrupt
