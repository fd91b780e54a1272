"""What asks which rank it is, for as long as a world runs; outside of its threads all of it is as before.

torch.distributed   its globals, the making of groups, and how ranks that torchrun started meet: `group.py`
zeroshard           `time`, `threading` and `select` of each module that waits; and whom `watch.py` asks
"""

from __future__ import annotations

import contextlib
import inspect
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from zeroshard import api as _api  # noqa: F401  (with it all modules of zeroshard that wait)
from zeroshard.ranks import groups, watch

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


class _Threading(_Else):
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


def _places() -> Iterator[tuple[Any, str, Any]]:
    shims = [(time, _Time(time)), (threading, _Threading(threading)), (select, _Select(select))]
    for name, module in list(sys.modules.items()):
        if name.startswith("zeroshard."):
            for plain, shim in shims:
                if vars(module).get(plain.__name__) is plain:
                    yield module, plain.__name__, shim
    yield os, "_exit", _ends(os._exit)
    yield os, "kill", _kills(os.kill)
    yield os, "fork", _not_inside(os.fork)
    yield signal, "raise_signal", _not_inside(signal.raise_signal)
    yield watch, "_ask", _ask(watch._ask)
    yield groups, "Watch", _Watch
    yield c10d, "_world", _Distributed(c10d._world)
    yield c10d, "_new_process_group_helper", _new_group(c10d._new_process_group_helper)
    yield c10d, "rendezvous", _rendezvous(c10d.rendezvous)


@contextlib.contextmanager
def installed() -> Iterator[None]:
    with contextlib.ExitStack() as undo:
        for module, name, value in list(_places()):
            undo.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, value)
        yield
