"""Refuse collectives of an optimizer's own inside `step()`.

Some optimizers are written for replicated parameters: each rank updates every n-th matrix and gathers the others, as
does the Muon of Keller Jordan, which many programs have copied. With sharded states, the lists of ranks hold different
parameters, so what such a step gathers would land in the wrong ones. The optimizers that zeroshard knows send nothing;
any other class is watched.

Only the calls of `torch.distributed` that reach a process group's Python methods are seen, in the step's own thread.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from ..errors import UserError

_SENDING = (
    "allreduce", "allreduce_coalesced", "broadcast", "reduce", "allgather", "_allgather_base", "allgather_coalesced",
    "allgather_into_tensor_coalesced", "all_gather_single", "all_gather_single_coalesced", "gather", "scatter",
    "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "reduce_scatter_single",
    "reduce_scatter_single_coalesced", "alltoall", "alltoall_base", "all_to_all_single", "send", "recv",
    "recv_anysource",
)  # fmt: skip


_watching: dict[int, OwnCollectives] = {}  # by thread, while it may be inside an optimizer's own update
_before: list[tuple[type, str, Any]] = []  # the original methods of the process groups' classes
_lock = threading.Lock()


class OwnCollectives:
    """The watch over one optimizer's own update, on one rank."""

    def __init__(self, where: str, running: Callable[[], bool]) -> None:
        """where: the optimizer's class and number, and the rank. running: does a step of it run on this thread?"""
        self.where = where
        self.running = running
        self._inside = False  # True if the update is known to run, whatever `running` says
        self._thread: int | None = None

    def begin(self) -> None:
        """Refuse collectives on this thread from now on, until `end`, or until an exception leaves the step."""
        self.end()
        with _lock:
            self._thread = threading.get_ident()
            _watching[self._thread] = self
            if not _before:
                _install()

    def end(self) -> None:
        if self._thread is not None:
            with _lock:
                if _watching.get(self._thread) is self:
                    del _watching[self._thread]
                self._thread = None
                if not _watching:
                    _remove()

    def updates(self) -> bool:
        """Tell if the update runs: in a block of `refused`, or in a step that no exception has left."""
        return self._inside or self.running()

    @contextlib.contextmanager
    def refused(self) -> Iterator[None]:
        """Refuse collectives inside the block."""
        self._inside = True
        self.begin()
        try:
            yield
        finally:
            self.end()
            self._inside = False


def _install() -> None:
    """Put the watch before the methods of all process groups' classes."""
    groups = dist.distributed_c10d._world.pg_map if dist.is_initialized() else ()
    for kind in {dist.ProcessGroup, *map(type, groups)}:
        for name in _SENDING:
            original = vars(kind).get(name)
            if original is not None:
                _before.append((kind, name, original))
                setattr(kind, name, _refusing(original, name))


def _remove() -> None:
    while _before:
        kind, name, original = _before.pop()
        setattr(kind, name, original)


def _refusing(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        watch = _watching.get(threading.get_ident())
        if watch is not None and watch.updates():
            raise refused(watch.where, name.strip("_"))
        return original(*args, **kwargs)

    return call


def refused(where: str, name: str) -> UserError:
    """Return the error for a collective of an optimizer's own."""
    return UserError(
        "an optimizer calls a collective inside step(), and each rank holds other parts of the parameters",
        where=where,
        expected="an update of the parameters that its groups hold, without messages",
        got=name,
        instead="step every parameter in the groups and send nothing: zeroshard deals whole matrices to ranks and "
        "sends what they update. Or torch.optim.Muon, or shard(..., stage=0)",
    )
