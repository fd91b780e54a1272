"""Names that answer for the rank that asks, for as long as a world runs; outside of its threads all is as before.

torch.distributed   its globals, the making of groups, and how ranks that torchrun started meet: `group.py`
zeroshard           `time`, `threading`, `select`, futures and threads of each module that waits; whom `watch.py` asks
Python              threads that a rank starts, forks and signals: what only a process has is refused by name
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import inspect
import json
import os
import re
import select
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from .. import api as _api  # noqa: F401  (with it all modules of zeroshard that wait)
from ..comm import groups, watch
from ..errors import StateError, UserError
from .group import Group
from .rank import GONE, SILENT
from .schedule import Task, here

SIGNALS = "a signal comes to all of them"


class Else:
    """A module, or an object, of which some names are another thing in a world."""

    def __init__(self, plain: Any) -> None:
        self.__dict__["_plain"] = plain

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)


class _Distributed(Else):
    """torch's `_World`: of the rank that asks."""

    def _of(self) -> Any:
        task = here()
        if task is not None:
            return task.rank.distributed
        if rank := getattr(threading.current_thread(), "_of_rank", None):
            raise StateError(
                f"a thread that {rank} has started calls torch.distributed: in zeroshard.world(...) only the thread of "
                "the rank itself may; call it there, or run the program with torchrun"
            )
        return self._plain

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._of(), name, value)


class _Time(Else):
    def monotonic(self) -> float:
        task = here()
        return time.monotonic() if task is None else task.schedule.clock

    def sleep(self, seconds: float) -> None:
        task = here()
        if task is None:
            time.sleep(seconds)
        else:
            task.schedule.wait(lambda: False, seconds, f"sleeps for {seconds:g} s")


class _Thread:
    """A thread of a rank."""

    def __init__(self, task: Task, target: Callable[..., Any], args: tuple[Any, ...], name: str) -> None:
        self._of, self._target, self.name = task, lambda: target(*args), name
        self._task: Task | None = None
        self.ident: int | None = None

    def start(self) -> None:
        of = self._of
        self._task = Task(of.schedule, of.rank, self._target, f"{self.name} of rank {of.rank.number}")
        self.ident = self._task.thread.ident

    def is_alive(self) -> bool:
        self._of.schedule.point("asks for a thread")
        return self._task is not None and not self._task.done

    def join(self, timeout: float | None = None) -> None:
        other = self._task
        if other is not None:
            self._of.schedule.wait(lambda: other.done, timeout, f"waits for its thread {self.name}")


class _Idle:
    """A thread that would wait for questions on a socket, where no rank asks."""

    def start(self) -> None:
        pass


class _Future(concurrent.futures.Future[Any]):
    """The answer of a thread of a rank's pool."""

    def result(self, timeout: float | None = None) -> Any:
        self._wait()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._wait()
        return super().exception(timeout)

    def _wait(self) -> None:
        if (task := here()) is not None and not task.schedule.wait(self.done, None, "waits for a thread of its pool"):
            raise RuntimeError("the world ended before it came")


class _Pool:
    """A pool of threads of a rank: one for each call."""

    def __init__(self, of: Task) -> None:
        self._of, self._futures = of, list[_Future]()

    def submit(self, call: Callable[..., Any], *args: Any) -> _Future:
        future = _Future()

        def work() -> None:
            try:
                future.set_result(call(*args))
            except BaseException as error:
                future.set_exception(error)

        self._futures = [*(each for each in self._futures if not each.done()), future]
        Task(self._of.schedule, self._of.rank, work, f"a thread of rank {self._of.rank.number}")
        return future

    def map(self, call: Callable[..., Any], things: Any) -> Iterator[Any]:
        futures = [self.submit(call, each) for each in things]
        return (future.result() for future in futures)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        for future in self._futures if wait and here() is not None else ():
            future.exception()


def _pool(*args: Any, **named: Any) -> Any:
    task = here()
    return concurrent.futures.ThreadPoolExecutor(*args, **named) if task is None else _Pool(task)


class _Futures(Else):
    def wait(self, futures: Any) -> None:
        for future in futures:
            future.exception()


class _Concurrent(Else):
    futures = _Futures(concurrent.futures)


class _Threading(Else):
    def enumerate(self) -> list[Any]:
        """The threads of this rank, not of the process."""
        task = here()
        if task is None:
            return threading.enumerate()
        return [each for each in task.schedule.tasks if each.rank is task.rank and not each.done]

    def Thread(self, target: Any = None, name: str = "", args: Any = (), daemon: Any = None) -> Any:
        task = here()
        if task is None:
            return threading.Thread(target=target, name=name, args=args, daemon=daemon)
        return _Idle() if name == "watch" else _Thread(task, target, args, name)


class _Poll(Else):
    def poll(self, milliseconds: float) -> Any:
        task = here()
        if task is not None and milliseconds:
            ready = lambda: bool(self._plain.poll(0))  # noqa: E731
            task.schedule.wait(ready, milliseconds / 1000, "waits for ranks that share memory")
        return self._plain.poll(milliseconds if task is None else 0)


class _Select(Else):
    def poll(self) -> Any:
        return select.poll() if here() is None else _Poll(select.poll())


class _Watch(watch.Watch):
    """One that knows whose it is."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        task = here()
        self.of = None if task is None else task.rank


def _ask(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Questions to other ranks are calls: the thread that answers is that of who asks."""

    def ask(addresses: dict[int, Any], message: dict[str, Any]) -> dict[int, Any]:
        task = here()
        if task is None:
            asked: dict[int, Any] = plain(addresses, message)
            return asked
        known: dict[Any, Any] = {each.address: each for each in watch._watches}
        answers = {}
        for rank, address in addresses.items():
            other = known.get(tuple(address))
            if other is None or other.of is None or other.of.away:
                silent = other is not None and other.of is not None and other.of.away == SILENT
                answers[rank] = watch.Answer(watch.SILENT if silent else watch.GONE)
            else:
                said = json.dumps({**message, "token": address[2]})
                answers[rank] = watch._understood(watch._answer(weakref.ref(other), json.loads(said)) or b"")
        if message:
            task.schedule.moves()
        task.schedule.point("asks the others")
        return answers

    return ask


def _new_group(plain: Callable[..., Any]) -> Callable[..., Any]:
    parameters = inspect.signature(plain)

    def made(*args: Any, **named: Any) -> Any:
        task, given = here(), parameters.bind(*args, **named)
        if task is None:
            return plain(*args, **named)
        given.apply_defaults()
        ask = given.arguments
        backend = str(ask["backend"])
        if not {"gloo", "undefined", "none"} & set(re.split(r"[^a-z]+", backend.lower())):
            raise UserError(
                f"a process group with backend {backend!r} on {task.rank}: ranks of zeroshard.world(...) send through "
                'host memory, as "gloo" does; keep the model on the CPU, or run the program with torchrun'
            )
        name, tag, members = ask["group_name"], ask["pg_tag"], list(ask["global_ranks_in_group"])
        if members and task.rank.number not in members:
            return dist.GroupMember.NON_GROUP_MEMBER, None
        if tag and (existing := c10d._find_pg_by_ranks_and_tag(tag, members)):
            return existing, c10d._world.pg_map[existing][1]
        world, store = task.rank.world, c10d.PrefixStore(f"{name}/", ask["store"])
        members = members or list(range(ask["group_size"]))
        group = Group(world, name, members, ask["group_rank"], ask["timeout"].total_seconds())
        _register(group, store, name, str(c10d.BackendConfig(c10d.Backend(ask["backend"]))), tag)
        return group, store

    return made


def _register(group: Group, store: Any, name: Any, config: str, tag: str) -> None:
    """Enter a group into torch's tables of this rank, as torch does for each that it makes: 2.11 has no call for it."""
    world, enter = c10d._world, c10d._register_process_group  # type: ignore[attr-defined]
    world.pg_map[group] = ("gloo", store)
    world.pg_names[group] = name
    world.pg_backend_config[group] = config
    enter(name, group)
    key = f"user:{tag}" if tag else f"ptd:{name}"
    for each in (key,) if tag else ("", key):
        world.tags_to_pg.setdefault(each, []).append(group)
    world.pg_to_tag[group] = key


def _members_of(plain: Callable[..., Any]) -> Callable[..., Any]:
    """A group of another rank is not in the asking rank's tables, and knows its members itself."""
    return lambda group: [*group.members] if isinstance(group, Group) else plain(group)


def _rendezvous(plain: Callable[..., Any]) -> Callable[..., Any]:
    def rendezvous(*args: Any, **named: Any) -> Iterator[Any]:
        task = here()
        if task is None:
            yield from plain(*args, **named)
        else:
            yield task.rank.world.store, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    return rendezvous


def _ends(plain: Callable[..., Any]) -> Callable[..., Any]:
    """`os._exit`: the process that ends is a rank."""

    def end(code: int) -> None:
        task = here()
        if task is None:
            plain(code)
        else:
            task.schedule.leave(task.rank, GONE)

    return end


def _kills(plain: Callable[..., Any]) -> Callable[..., Any]:
    """`os.kill` of a rank's own process."""

    def kill(pid: int, number: int) -> None:
        task = here()
        if task is None or pid != os.getpid():
            plain(pid, number)
        elif number in (signal.SIGKILL, signal.SIGSTOP):
            task.schedule.leave(task.rank, GONE if number == signal.SIGKILL else SILENT)
        else:
            raise _needs_processes(f"os.kill(..., {signal.Signals(number).name})", SIGNALS)

    return kill


def _not_inside(module: Any, name: str, why: str) -> Callable[..., Any]:
    plain = getattr(module, name)

    def refused(*args: Any) -> Any:
        if here() is not None:
            raise _needs_processes(f"{module.__name__}.{name}", why)
        return plain(*args)

    return refused


def _needs_processes(what: str, why: str) -> StateError:
    task = here()
    assert task is not None
    return StateError(
        f"{what} on {task.rank}: ranks of zeroshard.world(...) are threads of one process, and {why}. Instead: "
        "DataLoader(num_workers=0), no signals; or run the program with torchrun, where each rank is a process"
    )


def _starts(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Threads that a rank's program starts run beside all ranks: they have no rank of their own."""

    def start(thread: threading.Thread) -> None:
        task = here()
        if task is not None:
            thread._of_rank = str(task.rank)  # type: ignore[attr-defined]
        plain(thread)

    return start


def _places() -> Iterator[tuple[Any, str, Any]]:
    shims = [(time, _Time(time)), (threading, _Threading(threading)), (select, _Select(select)),
             (concurrent, _Concurrent(concurrent))]  # fmt: skip
    for _, module in modules():
        held = vars(module)
        for plain, shim in shims:
            if held.get(plain.__name__) is plain:
                yield module, plain.__name__, shim
        if held.get("ThreadPoolExecutor") is concurrent.futures.ThreadPoolExecutor:
            yield module, "ThreadPoolExecutor", _pool
    yield threading.Thread, "start", _starts(threading.Thread.start)
    yield os, "_exit", _ends(os._exit)
    yield os, "kill", _kills(os.kill)
    yield os, "fork", _not_inside(os, "fork", "a fork would copy all of them, and run one")
    for name in ("raise_signal", "alarm", "setitimer"):  # a handler cannot be set off the main thread anyway
        yield signal, name, _not_inside(signal, name, SIGNALS)
    yield watch, "_ask", _ask(watch._ask)
    yield groups, "Watch", _Watch
    yield groups, "members_of", _members_of(groups.members_of)
    yield groups, "_loops", set[int]  # gloo's threads: no rank here has one, and looking through all takes 0.1 s a run
    yield c10d, "_world", _Distributed(c10d._world)
    yield c10d, "_new_process_group_helper", _new_group(c10d._new_process_group_helper)
    yield c10d, "rendezvous", _rendezvous(c10d.rendezvous)  # type: ignore[attr-defined]


def modules() -> list[tuple[str, Any]]:
    """zeroshard's modules but those of worlds, by name."""
    ours = [(name, module) for name, module in sys.modules.items() if name.startswith("zeroshard.")]
    return [(name, module) for name, module in ours if not name.startswith(__package__)]


_NOTHING = object()


def _put_back(module: Any, name: str, value: Any) -> None:
    if value is _NOTHING:
        delattr(module, name)
    else:
        setattr(module, name, value)


def installed() -> AbstractContextManager[None]:
    """Let torch, Python and zeroshard answer for the rank that asks, within this context."""
    return replaced(_places())


@contextlib.contextmanager
def replaced(places: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Give names of modules other values, and theirs back."""
    with contextlib.ExitStack() as undo:
        for module, name, value in list(places):
            undo.callback(_put_back, module, name, getattr(module, name, _NOTHING))
            setattr(module, name, value)
        yield
