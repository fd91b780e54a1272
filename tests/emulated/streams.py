"""What was launched on each stream and has not run, and which of it runs next.

The device is a thread that runs only what somebody waits for, and what a drawn `Order` adds to that: all else stays
late. It knows two kinds of work. A *kernel* is through when it was started; a *message* is started, and is through when
the other ranks' parts have come (`emuccl.py`). Each stream runs one item after the other.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any, NamedTuple

import torch

from . import sites
from .counts import total

PATIENCE = 20.0  # seconds in which nothing can run before a wait is given up


class DeviceError(RuntimeError):
    """A kernel failed, long after its launch; as on a GPU, nothing runs after it."""


class Deadlock(RuntimeError):
    """The host waits for what can never run."""


class Mark(NamedTuple):
    """A point in a stream: reached once so many of its items are through."""

    stream: Queue
    position: int
    clock: dict[int, int]  # by a stream's number, up to where it is through by then: see `races.py`

    @property
    def reached(self) -> bool:
        return self.stream.through >= self.position


class Item:
    """A kernel: the call that is it, and who launched it."""

    is_message = False

    def __init__(self, name: str, run: Callable[[], Any], *, holds: Any = None) -> None:
        """holds: memory that it reads and writes, which stays until it is through."""
        self.name, self.run, self.holds = name, run, holds
        self.stack: sites.Stack = ()
        self.started = False

    def ready(self) -> bool:
        return True

    def start(self) -> None:
        self.run()

    def finished(self) -> bool:
        """Asked after its start: does the stream go on?"""
        return True

    def __str__(self) -> str:
        return f"{self.name}, launched at\n{sites.words(self.stack)}"


class Barrier(Item):
    """Keeps a stream from going on before another one has reached a mark."""

    def __init__(self, mark: Mark) -> None:
        super().__init__("wait for an event", lambda: None)
        self.mark = mark

    def ready(self) -> bool:
        return self.mark.reached


class Queue:
    """What was launched on a stream and is not through; the first of it may have been started."""

    def __init__(self, number: int, name: str, device: int = 0) -> None:
        """device: its index. Tensors are on device 0: whatever is put on another one's stream is ordered with nothing."""
        self.number, self.name, self.device = number, name, device
        self.items: deque[Item] = deque()
        self.issued = self.through = 0
        self.messages = False  # is it a communicator's?
        self.clock: dict[int, int] = {}  # what its next item comes after

    def end(self) -> Mark:
        return Mark(self, self.issued, {**self.clock, self.number: self.issued})

    def add(self, item: Item) -> Mark:
        self.items.append(item)
        self.issued += 1
        return self.end()

    def __repr__(self) -> str:
        return f"stream {self.name!r}"


STYLES = ("late", "compute first", "messages first", "starved", "drawn")


class Order:
    """Who runs next, drawn from a seed. None: only what somebody waits for, the oldest stream first.

    late: only what somebody waits for, in a drawn order. compute first, messages first: also what nobody waits for, of
    that kind. starved: all but one stream, which waits until it is needed. drawn: anything that can run.
    """

    def __init__(self, seed: int | None, style: str | None = None) -> None:
        self.seed = seed
        self._draw = random.Random(seed)
        self.style = style or (self._draw.choice(STYLES) if seed is not None else "late")
        self._victim = self._draw.randrange(4)
        self.early = 0.0 if seed is None else self._draw.choice((0.0, 0.0, 0.02, 0.3))  # chance of an item per launch

    def pick(self, able: list[Queue], needed: dict[Queue, int]) -> Queue | None:
        """Of streams that can go on. needed: up to where somebody waits for them; empty: nobody waits."""
        wanted = [queue for queue in able if queue.through < needed.get(queue, 0)]
        others = [queue for queue in able if queue not in wanted]
        if self.style == "compute first":
            first = [queue for queue in others if not queue.messages]
        elif self.style == "messages first":
            first = [queue for queue in others if queue.messages]
        elif self.style == "starved":
            first = [queue for queue in others if queue.number % 4 != self._victim]
        else:
            first = others if self.style == "drawn" else []
        if self.style in ("compute first", "messages first") and first:
            wanted = []
        choice = wanted + first if needed else first or able
        if not choice:
            return None
        return choice[0] if self.seed is None else self._draw.choice(choice)

    def acts_early(self) -> bool:
        return self.early > 0 and self._draw.random() < self.early

    def __repr__(self) -> str:
        return f"Order({self.seed}: {self.style}, {self.early} early)"


class Machine:
    """The streams of one rank's device, and the thread that runs what is on them."""

    def __init__(self, order: Order, slots: int, patience: float = PATIENCE) -> None:
        """slots: messages under way at one time that leave no room for a kernel, as on a GPU's multiprocessors."""
        self.order, self.slots, self.patience = order, slots, patience
        self.default = Queue(0, "default")
        self.queues = [self.default]
        self.error: DeviceError | None = None
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self._wanted: dict[int, tuple[Mark, ...]] = {}  # by who waits
        self._early = 0  # items to run that nobody waits for
        self._running = False
        self._thread = 0  # the identity of the thread that runs items
        self._idle = False  # can nothing run, as far as the thread has looked?
        self.progressed = time.monotonic()
        self.report: Callable[[], str] = self.state  # what to say in a deadlock; emuccl asks the other ranks too
        self._polled: tuple[Any, ...] = ()
        self._launched = self._asked = 0
        self.urge: Callable[[Item], None] = lambda item: None  # tell the other ranks that this one is waited for

    def queue(self, name: str, *, messages: bool = False, device: int = 0) -> Queue:
        with self.lock:
            self.queues.append(Queue(len(self.queues), name, device))
            self.queues[-1].messages = messages
            return self.queues[-1]

    # --- the host's side ----------------------------------------------------------------------------------------------

    def launch(self, queue: Queue, item: Item) -> Mark:
        with self.lock:
            if self.error is not None:
                raise self.error
            mark = queue.add(item)
            self._launched += 1
            if threading.get_ident() == self._thread:  # in a finaliser that Python ran here: nobody else runs items
                return mark
            if self.order.acts_early():
                self._early += 1
                self._wake()
                while self._early and self.error is None and not self._idle:
                    self.changed.wait(0.05)
                self._early = 0
            return mark

    def wait(self, marks: Iterable[Mark], deadline: float | None = None) -> bool:
        """Run what these need. False: the deadline came first."""
        mine = tuple(marks)
        if all(mark.reached for mark in mine) and self.error is None:
            return True
        assert threading.get_ident() != self._thread, "a kernel, or a finaliser in its thread, waits for the device"
        with self.lock:
            me = threading.get_ident()
            self._wanted[me] = mine
            self.progressed = time.monotonic()
            self._wake()
            try:
                while self.error is None and not all(mark.reached for mark in mine):
                    now = time.monotonic()
                    if deadline is not None and now >= deadline:
                        return False
                    if now > self.progressed + self.patience:
                        raise Deadlock(f"nothing has run for {self.patience:.0f} s\n{self.report()}")
                    self.changed.wait(0.05 if deadline is None else min(0.05, deadline - now))
            finally:
                del self._wanted[me]
            if self.error is not None:
                raise self.error
            return True

    def poll(self, mark: Mark) -> bool:
        """Is it reached? A program that asks again, and launches nothing in between, waits: then it is run."""
        with self.lock:
            if self.error is not None:
                raise self.error
            if mark.reached:
                return True
            point = mark.stream, mark.position, self._launched
            self._asked = self._asked + 1 if point == self._polled else 0
            self._polled = point
            if self._asked > 1:
                self.want(-1, (mark,))
            return False

    def want(self, who: int, marks: tuple[Mark, ...]) -> None:
        """Run what these need, while no thread of this rank waits for it. who: a negative number."""
        with self.lock:
            self._wanted[who] = marks
            self._wake()

    def _wake(self) -> None:
        self._idle = False
        if not self._running:
            self._running = True
            threading.Thread(target=self._serve, name="emu", daemon=True).start()
        self.changed.notify_all()

    def notice(self) -> None:
        """Something has come from another rank."""
        with self.lock:
            self._idle = False
            self.changed.notify_all()

    # --- the device's side --------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        torch.set_grad_enabled(False)
        self._thread = threading.get_ident()
        with self.lock:
            while True:
                for who in [who for who, marks in self._wanted.items() if who < 0 and all(m.reached for m in marks)]:
                    del self._wanted[who]
                if not (self._early or self._waited()) or self.error is not None or not self._step():
                    self._idle = True
                    self.changed.notify_all()
                    self.changed.wait()
                else:
                    self.progressed = time.monotonic()
                    self._early = max(self._early - 1, 0)
                    if not self._early:
                        self.changed.notify_all()

    def _waited(self) -> bool:
        """Does anybody wait for what has not run? Whoever waited may not have woken up yet."""
        return any(not mark.reached for marks in self._wanted.values() for mark in marks)

    def needed(self) -> dict[Queue, int]:
        """Up to where each stream has to run, for all that somebody waits for."""
        found: dict[Queue, int] = {}
        todo = [mark for marks in self._wanted.values() for mark in marks]
        while todo:
            queue, position, _ = todo.pop()
            from_ = max(found.get(queue, 0), queue.through)
            if position <= from_:
                continue
            found[queue] = position
            for item in islice(queue.items, from_ - queue.through, position - queue.through):
                if isinstance(item, Barrier):
                    todo.append(item.mark)
        return found

    def _step(self) -> bool:
        """Run one item, or note that one has ended. False: nothing can run."""
        needed = self.needed()
        for queue in self.queues:  # which costs nothing, so it is not for the order to say
            if queue.items and queue.items[0].started and self._try(queue.items[0].finished, queue.items[0]):
                self._through(queue)
                return True
        full = sum(queue.items[0].started for queue in self.queues if queue.items) >= self.slots
        able = [
            queue
            for queue in self.queues
            if queue.items
            and not queue.items[0].started
            and queue.items[0].ready()
            and (not full or isinstance(queue.items[0], Barrier))
        ]
        queue = self.order.pick(able, needed)
        if queue is None:
            for each in needed:
                if each.items and each.items[0].started:
                    self.urge(each.items[0])
            return False
        item = queue.items[0]
        item.started = True
        if self._try(item.start, item) is not False and self._try(item.finished, item):
            self._through(queue)
        return True

    def _try(self, call: Callable[[], Any], item: Item) -> Any:
        try:
            return call()
        except Exception as error:
            self.error = DeviceError(f"a kernel failed: {type(error).__name__}: {error}\n    {item}")
            self.error.__cause__ = error
            return False

    def fail(self, why: str) -> None:
        """Nothing runs any more; whoever waits hears why."""
        self.error = DeviceError(why)
        self.changed.notify_all()

    def _through(self, queue: Queue) -> None:
        queue.items.popleft()
        queue.through += 1

    def state(self) -> str:
        """What runs, and what could not."""
        lines = []
        for queue in self.queues:
            if queue.items:
                head = queue.items[0]
                how = "under way" if head.started else "ready" if head.ready() else "waits for an event"
                lines.append(f"    {queue}: {len(queue.items)} not through, the first {how}: {head}")
        under_way = sum(queue.items[0].started for queue in self.queues if queue.items)
        if under_way >= self.slots:
            lines.append(f"    {under_way} messages under way leave no room for kernels: slots={self.slots}")
        return "\n".join(lines)


def drained(what: str) -> None:
    """Count that the host waits."""
    total.drains[sites.site(), what] += 1
