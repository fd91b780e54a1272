"""What a command is doing until it answers, on standard error: live lines on a terminal, plain ones elsewhere.

  12 s: ranks to simulate (rank 511) 1 of 3, about 24 s left

Standard output has the answer alone. Nothing may be printed there while the lines live.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, Task, TextColumn, TimeRemainingColumn

from zeroshard.cli.output import OutputError
from zeroshard.errors import visible

FIRST, EVERY, LATER = 2.0, 10.0, 0.2  # seconds until the first plain line; between two, or this part of all so far
BAR, NUMBERS = 10, 20  # columns of a terminal: a count, seconds left, and what is between
LOOK = 0.25  # seconds between two looks at what other processes have done


class Working:
    """A few counts that go up. tasks: of each its name, and how much there is to do; None where nothing is counted.

    lines: also where standard error is no terminal. look: called now and then, to count what others have done.
    """

    def __init__(self, *tasks: tuple[str, int | None], lines: bool = True, look: Callable[[], None] | None = None):
        self._console = Console(stderr=True, highlight=False, markup=False)
        # Not `is_terminal`, which FORCE_COLOR makes true of a log.
        self._live = self._console.file.isatty() and not self._console.is_dumb_terminal
        self._lines, self._look = lines and not self._live, look
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=BAR),
            TextColumn("{task.fields[count]}"),
            TimeRemainingColumn(compact=True, elapsed_when_finished=True),
            TextColumn("{task.fields[now]}", markup=False),
            console=self._console,
            transient=True,
            disable=not self._live,
        )
        for name, total in tasks:
            self._bars.add_task(visible(name), total=total, now="", count=_count(0, total))
        widest = max(len(name) for name, _ in tasks)
        self._room = max(self._console.width - widest - BAR - NUMBERS, 0) if self._live else None  # for `now`
        self._start, self._ended = time.monotonic(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="working", daemon=True)

    def __enter__(self) -> Working:
        self._bars.start()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()
        self._bars.stop()

    def now(self, doing: str, done: int = 0, *, of: int | None = None, task: int = 0) -> None:
        """Say what is being done, and how much of a task has been; `of`: how much it is by now."""
        total = self._bars.tasks[task].total if of is None else of
        self._bars.update(
            self._bars.tasks[task].id,
            now=visible(doing)[: self._room],
            completed=done,
            total=total,
            count=_count(done, total),
        )

    def say(self, line: str) -> None:
        """Print a line that stays, where there is no terminal: on one the counts say it."""
        if self._lines:
            with suppress(OutputError):
                self._console.print(line, soft_wrap=True)

    def _watch(self) -> None:
        due = self._start + FIRST
        while not self._ended.wait(LOOK):
            if self._look is not None:
                self._look()
            if time.monotonic() >= due:
                seconds = time.monotonic() - self._start
                due = time.monotonic() + max(EVERY, LATER * seconds)
                self.say(self._line(seconds))

    def _line(self, seconds: float) -> str:
        tasks = self._bars.tasks
        begun = [task for task in tasks if not task.finished and (task.completed or task.fields["now"])]
        words = ", ".join(map(_told, begun or tasks[:1]))
        done, total = sum(task.completed for task in tasks), sum(task.total or 0 for task in tasks)
        left = f", about {seconds * (total - done) / done:.0f} s left" if done else ""
        return f"{seconds:4.0f} s: {words}{left}"


def _count(done: int, total: float | None) -> str:
    return "" if total is None else f"{done} of {total:.0f}"


def _told(task: Task) -> str:
    now = f" ({task.fields['now']})" if task.fields["now"] else ""
    return f"{task.description}{now} {task.fields['count']}".rstrip()
