"""What asks which rank it is, for as long as a world runs; outside of its threads all of it is as before.

torch.distributed   its globals, the making of groups, and how ranks that torchrun started meet: `group.py`
zeroshard           `time`, `threading`, `select`, futures and threads of each module that waits, whom `watch.py` asks, and
                    where a seed can bring a fault: calls of files, allocations of tensors, copies of containers
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import inspect
import os
import select
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from zeroshard import api as _api  # noqa: F401  (with it all modules of zeroshard that wait)
from zeroshard.ranks import groups, watch

from . import disk
from .draws import Draws
from .group import Group
from .rank import GONE, SILENT
from .schedule import Task, here


class _Else:
    """A module, or an object, of which some names are another thing in a world."""

    def __init__(self, plain: Any) -> None:
        self.__dict__["_plain"] = plain

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)


class _Distributed(_Else):
    """torch's `_World`: of the rank that asks."""

    def __getattr__(self, name: str) -> Any:
        task = here()
        return getattr(self._plain if task is None else task.rank.distributed, name)

    def __setattr__(self, name: str, value: Any) -> None:
        task = here()
        setattr(self._plain if task is None else task.rank.distributed, name, value)


class _Time(_Else):
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
        self.ident = None

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


class _Future(concurrent.futures.Future[Any]):
    """What a thread of a rank's pool is to answer."""

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


class _Futures(_Else):
    def wait(self, futures: Any) -> None:
        for future in futures:
            future.exception()


class _Concurrent(_Else):
    futures = _Futures(concurrent.futures)


class _Threading(_Else):
    def enumerate(self) -> list[Any]:
        """The threads of this rank, not of the process."""
        task = here()
        if task is None:
            return threading.enumerate()
        return [each for each in task.schedule.tasks if each.rank is task.rank and not each.done]

    def Thread(self, target: Any = None, name: str = "", args: Any = (), daemon: Any = None) -> Any:
        task = here()
        if task is None or name == "watch":  # which waits for questions on a socket, where nobody asks
            return threading.Thread(target=target, name=name, args=args, daemon=daemon)
        return _Thread(task, target, args, name)


class _Poll(_Else):
    def poll(self, milliseconds: float) -> Any:
        task = here()
        if task is not None and milliseconds:
            ready = lambda: bool(self._plain.poll(0))  # noqa: E731
            task.schedule.wait(ready, milliseconds / 1000, "waits for ranks that share memory")
        return self._plain.poll(milliseconds if task is None else 0)


class _Select(_Else):
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
            return plain(addresses, message)
        known = {each.address: each for each in watch._watches}
        answers = {}
        for rank, address in addresses.items():
            other = known.get(tuple(address))
            if other is None or other.of is None or other.of.away:
                silent = other is not None and other.of is not None and other.of.away == SILENT
                answers[rank] = watch.Answer(watch.SILENT if silent else watch.GONE)
            else:
                said = watch.json.dumps({**message, "token": address[2]})
                answers[rank] = watch._understood(watch._answer(watch.weakref.ref(other), watch.json.loads(said)))
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
        name, tag, members = ask["group_name"], ask["pg_tag"], list(ask["global_ranks_in_group"])
        if members and task.rank.number not in members:
            return dist.GroupMember.NON_GROUP_MEMBER, None
        if tag and (existing := c10d._find_pg_by_ranks_and_tag(tag, members)):
            return existing, c10d._world.pg_map[existing][1]
        world, store = task.rank.world, dist.PrefixStore(f"{name}/", ask["store"])
        members = members or list(range(ask["group_size"]))
        group = Group(world, name, members, ask["group_rank"], ask["timeout"].total_seconds())
        config = str(c10d.BackendConfig(c10d.Backend(ask["backend"])))
        tags = {"pg_tag": f"user:{tag}"} if tag else {"add_to_default_tag": True}
        c10d._register_pg_in_world(
            group, backend_name="gloo", store=store, group_name=name, backend_config=config, **tags
        )
        return group, store

    return made


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
            raise RuntimeError(f"{signal.Signals(number).name} would come to the process of all ranks of a world")

    return kill


def _not_inside(plain: Callable[..., Any]) -> Callable[..., Any]:
    def refused(*args: Any) -> Any:
        if here() is not None:
            raise RuntimeError(f"{plain.__name__} is for the process of all ranks of a world")
        return plain(*args)

    return refused


class _Copied(type):
    """The class of what stands for `tuple`, `list`, `set` or `dict` where copies are made."""

    plain: Any

    def __call__(cls, *args: Any, **named: Any) -> Any:
        task = here()
        if task is None or not args or task.schedule.draws.odds.inside == 0:
            return cls.plain(*args, **named)
        return cls.plain(_walked(args[0], f"a {cls.plain.__name__}"), **named)

    def __instancecheck__(cls, thing: Any) -> bool:
        return isinstance(thing, cls.plain)

    def __subclasscheck__(cls, other: Any) -> bool:
        return issubclass(other, cls.plain)

    def __getitem__(cls, of: Any) -> Any:
        return cls.plain[of]

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.plain, name)


def _walked(things: Any, where: str) -> Any:
    """As C walks through it: it begins, and then allocates, which is where the collector may run."""
    task = here()
    assert task is not None
    if isinstance(things, dict):  # copied as one
        task.schedule.collects(where)
        return things
    walk = iter(things)
    task.schedule.collects(where)
    return walk


def _copied(plain: Any) -> Any:
    return _Copied(plain.__name__, (), {"plain": plain})


def _sorted(things: Any, **named: Any) -> list[Any]:
    if here() is None:
        return sorted(things, **named)
    return sorted(_walked(things, "a sorted list"), **named)


_COPIES = {**{plain.__name__: _copied(plain) for plain in (tuple, list, set, dict)}, "sorted": _sorted}
_ALLOCATE = ("empty", "zeros", "empty_like", "zeros_like", "cat", "empty_strided", "full")


class _Torch(_Else):
    """torch where memory may be wanting."""

    def __getattr__(self, name: str) -> Any:
        plain = getattr(self._plain, name)
        return _allocates(name, plain) if name in _ALLOCATE else plain


def _allocates(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **named: Any) -> Any:
        task = here()
        if task is not None and task.main:
            caller = sys._getframe(1).f_code.co_name
            if task.schedule.strikes(task.schedule.draws.odds.memory, f"has no memory for torch.{name} in {caller}"):
                raise MemoryError(f"drawn: torch.{name} in {caller}")
        return plain(*args, **named)

    return call


def _places(draws: Draws) -> Iterator[tuple[Any, str, Any]]:
    shims = [(time, _Time(time)), (threading, _Threading(threading)), (select, _Select(select)),
             (concurrent, _Concurrent(concurrent))]  # fmt: skip
    for name, module in list(sys.modules.items()):
        if not name.startswith("zeroshard."):
            continue
        room, held = name.split(".")[1], vars(module)
        for plain, shim in shims:
            if held.get(plain.__name__) is plain:
                yield module, plain.__name__, shim
        if held.get("ThreadPoolExecutor") is concurrent.futures.ThreadPoolExecutor:
            yield module, "ThreadPoolExecutor", _pool
        if room in ("checkpoint", "tiers") and draws.seed is not None:
            if held.get("os") is os:
                yield module, "os", disk.Calls()
            if held.get("shutil") is shutil:
                yield module, "shutil", disk.Calls()
            yield module, "open", disk.opens
        rooms = ("ranks", "engine", "tiers", "checkpoint")
        if draws.odds.memory and room in (*rooms, "device") and held.get("torch") is torch:
            yield module, "torch", _Torch(torch)
        # Not where a type is compared with the class itself.
        compared = name in ("zeroshard.engine.undo", "zeroshard.engine.options")
        if room in rooms and draws.seed is not None and draws.odds.inside and not compared:
            for copied, shim in _COPIES.items():
                yield module, copied, shim
    yield os, "_exit", _ends(os._exit)
    yield os, "kill", _kills(os.kill)
    yield os, "fork", _not_inside(os.fork)
    yield signal, "raise_signal", _not_inside(signal.raise_signal)
    yield watch, "_ask", _ask(watch._ask)
    yield groups, "Watch", _Watch
    yield c10d, "_world", _Distributed(c10d._world)
    yield c10d, "_new_process_group_helper", _new_group(c10d._new_process_group_helper)
    yield c10d, "rendezvous", _rendezvous(c10d.rendezvous)


_NOTHING = object()


def _put_back(module: Any, name: str, value: Any) -> None:
    if value is _NOTHING:
        delattr(module, name)
    else:
        setattr(module, name, value)


@contextlib.contextmanager
def installed(draws: Draws) -> Iterator[None]:
    with contextlib.ExitStack() as undo:
        for module, name, value in list(_places(draws)):
            undo.callback(_put_back, module, name, getattr(module, name, _NOTHING))
            setattr(module, name, value)
        yield
