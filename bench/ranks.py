"""Rank processes that stay: each holds one object, sleeps, and calls the object's methods when told to."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist


class Ranks:
    """`world` processes of one thread each, joined by gloo; every one holds what `make(*args)` returned there."""

    def __init__(self, world: int, make: Callable[..., Any], *args: Any, bound: bool = False) -> None:
        """make: a function that a new process can import. Its arguments are sent by pickle. Returns before it ran.

        bound: each rank has a (logical) core to itself, communication threads and all, as far as there are enough.
        """
        cores = sorted(os.sched_getaffinity(0)) if bound else []
        self._store = tempfile.TemporaryDirectory(prefix="bench-")
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world):
            ours, theirs = context.Pipe()
            core = cores[rank % len(cores)] if bound else None
            given = (theirs, rank, world, f"{self._store.name}/store", core, make, args)
            process = context.Process(target=_serve, args=given, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._made = False

    def __call__(self, method: str, *args: Any) -> list[Any]:
        """What each rank's object answers, in rank order. Raises RuntimeError with the first rank's traceback."""
        if not self._made:
            self._answers()
            self._made = True
        for pipe in self._pipes:
            pipe.send((method, args))
        return self._answers()

    def _answers(self) -> list[Any]:
        answers: dict[Any, Any] = {}
        while len(answers) < len(self._pipes):
            for pipe in wait([pipe for pipe in self._pipes if pipe not in answers]):
                try:
                    answers[pipe], problem = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    problem = "the process is gone"
                if problem is not None:
                    self._end()  # the others may wait for this one for ever
                    raise RuntimeError(f"rank {self._pipes.index(pipe)}: {problem}")
        return [answers[pipe] for pipe in self._pipes]

    def close(self) -> None:
        self("close")
        self._end()

    def _end(self) -> None:
        for process in self._processes:
            process.terminate()
            process.join()
        self._store.cleanup()


def _serve(
    pipe: Connection, rank: int, world: int, store: str, core: int | None, make: Callable[..., Any], args: Any
) -> None:
    if core is not None:
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.sched_setaffinity(int(thread), {core})
    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{world}", "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)  # DeepSpeed calls what torch has since renamed
    try:
        dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
        held = make(*args)
        pipe.send((None, None))
        while True:
            method, given = pipe.recv()
            if method == "close":
                del held
                dist.barrier()  # a gloo process that leaves first can abort its peers
                pipe.send((None, None))
                pipe.recv()  # until the end of everything
            pipe.send((getattr(held, method)(*given), None))
    except EOFError:
        pass
    except BaseException:
        pipe.send((None, traceback.format_exc()))
        pipe.recv()
