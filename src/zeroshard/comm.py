"""The only caller of `torch.distributed`: one-dimensional tensors over one group of ranks, or over no group at all.

    verb        moves                                             issued as
    gather      every rank's shard into everybody's full bucket   N broadcasts in place (gloo); all_gather_single (NCCL)
    reduce      every rank's contribution to each shard's owner   all_to_all_single, summed by `numerics.fold`
    broadcast   one rank's tensor to all                          broadcast
    control     a few integers, so that ranks agree               all_gather / all_reduce on CPU tensors over gloo

Gathers, reductions and control use process groups of their own: each is ordered in itself, and none can be
mistaken for another. Control runs on gloo and CPU tensors even beside NCCL, so agreeing never waits for the device.

Named hazard, *sizes must meet*: two ranks in collectives of different size abort the process in gloo, without an
exception. So every control collective starts with a header of fixed size (`meet`), which says what the rank is
about to do; only ranks that say the same go on.

Why not the backend's reduce-scatter: gloo's is an all-reduce inside (twice the bytes), and its order of summation
depends on where an element lies in the buffer; see docs/decisions/ordered-sum.md.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from .errors import PeerError, UserError, nearest
from .events import Event, Ledger, ends

Reduce = Literal["ordered", "native"]


@dataclass(frozen=True)
class Comm:
    """How ranks talk.

    group: the process group to shard over (None: all ranks; one process alone needs none). A 1-D `DeviceMesh` is
        taken as its group.
    timeout: seconds after which a silent peer is an error (None: torch's default, 30 minutes).
    reduce: "ordered" sums gradients in rank order (same bits at every stage and bucket size); "native" uses the
        backend's reduce-scatter, whose order is its own business, and needs equal shards.
    overlap: gathers and reductions run behind compute. Off, each is waited for where it is launched (a reduction only
        for a moment, lest ranks that drop different layers wait for each other): same bits.
    prefetch: how many units ahead of use are gathered.
    release_after_forward: False keeps sharded parameters gathered until backward has used them.
    """

    group: Any = None
    timeout: float | None = None
    reduce: Reduce = "ordered"
    overlap: bool = True
    prefetch: int = 1
    release_after_forward: bool = True

    def __post_init__(self) -> None:
        if self.reduce not in get_args(Reduce):
            raise UserError(
                "Comm.reduce is not a known way", got=repr(self.reduce), instead=nearest(self.reduce, get_args(Reduce))
            )
        for name in ("overlap", "release_after_forward"):
            if type(getattr(self, name)) is not bool:
                raise UserError(
                    f"Comm.{name} is a yes or a no", expected="True or False", got=repr(getattr(self, name))
                )
        if type(self.prefetch) is not int or self.prefetch < 0:
            raise UserError(
                "Comm.prefetch counts units",
                expected="0, 1, 2, ...",
                got=repr(self.prefetch),
                instead="Comm(prefetch=1)",
            )
        if self.timeout is not None and not (isinstance(self.timeout, (int, float)) and self.timeout > 0):
            raise UserError(
                "Comm.timeout is a positive number of seconds", got=repr(self.timeout), instead="Comm(timeout=600)"
            )
        if self.prefetch and not self.overlap:
            # Without overlap a prefetch would only hold memory longer; the pair is not a contradiction worth an error.
            object.__setattr__(self, "prefetch", 0)


class Simulated(NamedTuple):
    """Stands for a process group in `Comm.group`: rank `rank` of `ranks` that exist only in arithmetic."""

    rank: int
    ranks: int


class Work:
    """A collective under way: `wait()` for it, or ask whether it is `done()`."""

    def __init__(self, handles: Sequence[Any] = (), event: Event | None = None) -> None:
        self._handles = list(handles)
        self._event = event
        self._held: Tensor | None = None

    def done(self) -> bool:
        return all(handle.is_completed() for handle in self._handles)

    def wait(self) -> None:
        since = time.perf_counter_ns()
        while self._handles:
            _named(self._handles[0].wait)
            self._handles.pop(0)
        self.stood_still(since)
        ends(self._event)
        self._held = None
        _holding.discard(self)

    def stood_still(self, since: int) -> None:
        """The program has done nothing but wait for this, since that time of `perf_counter_ns`."""
        if self._event is not None and not self._event.end:
            self._event.waited += time.perf_counter_ns() - since

    def hold(self, tensor: Tensor) -> None:
        """Keep the memory that the collective works on alive until it is through, even if its owner is dropped."""
        self._held = tensor
        _holding.add(self)


_holding: set[Work] = set()


# What a rank can be about to do when it meets the others; the numbers travel in the header.
MEETINGS = (
    "construction", "forward", "forward without grad", "backward", "backward under no_sync", "end of backward",
    "choosing what to gather", "step", "a question about gradients", "gathered()", "leaving gathered()",
    "saving", "loading", "exporting",
)  # fmt: skip


class Group:
    """One rank's end of the group, and what it counts. By itself it sends nothing.

    With one rank there is nothing to send. With more it is rank `rank` of a simulation, whose peers all do the same.
    """

    backend: str = "none"

    def __init__(self, ledger: Ledger, device: torch.device, rank: int = 0, ranks: int = 1) -> None:
        self.ledger = ledger
        self.device = device
        self.rank = rank
        self.ranks = ranks

    # --- verbs of data ----------------------------------------------------------------------------------------------

    def gather(self, full: Tensor, bounds: Sequence[int], state: str, bucket: int) -> Work:
        """full[bounds[r]:bounds[r+1]] becomes rank r's, on every rank, in place."""
        nbytes = full.numel() * full.itemsize
        own = (bounds[self.rank + 1] - bounds[self.rank]) * full.itemsize
        event = self._count("gather", nbytes, own * (self.ranks - 1), nbytes - own, state, bucket)
        return Work(self._gather(full, bounds), event)

    def reduce(self, send: Tensor, receive: Tensor, bounds: Sequence[int], bucket: int) -> Work:
        """receive (ranks x own shard, 1-D) gets each rank's contribution to the own shard, in rank order."""
        event = self._count_reduce(send, bounds[self.rank + 1] - bounds[self.rank], bucket)
        return Work(self._reduce(send, receive, bounds), event)

    def reduce_native(self, send: Tensor, receive: Tensor, bucket: int) -> Work:
        """receive (own shard) gets the backend's sum of all contributions."""
        event = self._count_reduce(send, receive.numel(), bucket)
        return Work(self._reduce_native(send, receive), event)

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """tensor becomes the source rank's, everywhere."""
        nbytes = tensor.numel() * tensor.itemsize
        if nbytes:
            mine = self.rank == source
            event = self._count("broadcast", nbytes, nbytes if mine else 0, 0 if mine else nbytes)
            self._broadcast(tensor, source)
            ends(event)

    def _gather(self, full: Tensor, bounds: Sequence[int]) -> list[Any]:
        return []

    def _reduce(self, send: Tensor, receive: Tensor, bounds: Sequence[int]) -> list[Any]:
        if self.ranks == 1:
            receive.copy_(send)
        return []

    def _reduce_native(self, send: Tensor, receive: Tensor) -> list[Any]:
        if self.ranks == 1:
            receive.copy_(send)
        return []

    def _broadcast(self, tensor: Tensor, source: int) -> None:
        pass

    # --- verbs of agreement -----------------------------------------------------------------------------------------

    def meet(self, what: str, number: int, *same: int) -> None:
        """Agree that every rank is at the same thing, down to the (at most three) integers that say which.

        Raises `PeerError` on every rank, naming who is where, when they are not.
        """
        self.poll(what, number, *same)

    def poll(self, what: str, number: int, *mine: int) -> list[tuple[int, ...]]:
        """Agree as `meet` does; the integers may differ, and every rank gets those of all, in rank order."""
        self._count_control(8 * _HEADER)
        return [mine]

    def flags(self, mine: bytes) -> bytes:
        """Elementwise maximum over the ranks of as many small numbers on each."""
        self._count_control(len(mine))
        return mine

    def maximum(self, tensor: Tensor) -> None:
        """Elementwise maximum over the ranks of a CPU tensor, in place."""
        self._count_control(tensor.numel() * tensor.itemsize)

    def total(self, tensor: Tensor) -> None:
        """Elementwise sum over the ranks of a CPU tensor of integers, in place."""
        self._count_control(tensor.numel() * tensor.itemsize)

    def describe(self, facts: Any) -> list[Any]:
        """Every rank's JSON-able `facts`, in rank order."""
        return [facts]

    def problems(self, mine: str | None) -> list[str]:
        """What every rank that has a problem says of it, so that all of them can raise."""
        return [f"rank {rank}: {problem}" for rank, problem in enumerate(self.describe(mine)) if problem]

    def apart(self) -> Group:
        """The same ranks with a control group of their own, for a thread that agrees behind the training.

        Collective where it is made, the first time. Nothing else orders it, and it waits half an hour at least: ranks
        may take very different times to write.
        """
        return self

    # --- what they count --------------------------------------------------------------------------------------------

    def _count(
        self, verb: str, nbytes: int, sent: int, received: int, state: str = "", bucket: int | None = None
    ) -> Event | None:
        if self.ranks == 1:
            return self.ledger.note(verb, state=state, bucket=bucket, logical=nbytes)
        return self.ledger.move(verb, logical=nbytes, sent=sent, received=received, state=state, bucket=bucket)

    def _count_reduce(self, send: Tensor, own: int, bucket: int) -> Event | None:
        nbytes, own = send.numel() * send.itemsize, own * send.itemsize
        return self._count("reduce", nbytes, nbytes - own, own * (self.ranks - 1), "gradients", bucket)

    def _count_control(self, nbytes: int) -> Event | None:
        return self._count("control", nbytes, nbytes, nbytes * (self.ranks - 1)) if self.ranks > 1 else None


_HEADER = 6
LEAVING = 10.0  # seconds that a rank whose program ends waits for the others


class ProcessGroup(Group):
    """The same verbs over `torch.distributed`."""

    def __init__(self, ledger: Ledger, device: torch.device, groups: _Groups) -> None:
        super().__init__(ledger, device, dist.get_rank(groups.parent), dist.get_world_size(groups.parent))
        self._groups = groups
        self.backend = str(dist.get_backend(groups.gathers))
        self._global = dist.get_process_group_ranks(groups.parent)
        groups.engines += 1
        self._engine = groups.engines  # models sharded over one group are told apart by the order of their making

    def _gather(self, full: Tensor, bounds: Sequence[int]) -> list[Any]:
        raw = full.view(torch.uint8)
        cuts = [bound * full.itemsize for bound in bounds]
        if self.backend == "nccl" and len({high - low for low, high in pairwise(cuts)}) == 1:
            own_part = raw[cuts[self.rank] : cuts[self.rank + 1]]
            return [_named(_all_gather, raw, own_part, group=self._groups.gathers, async_op=True)]
        return [
            _named(dist.broadcast, raw[low:high], self._global[source], group=self._groups.gathers, async_op=True)
            for source, (low, high) in enumerate(pairwise(cuts))
            if high > low
        ]

    def _reduce(self, send: Tensor, receive: Tensor, bounds: Sequence[int]) -> list[Any]:
        own = [bounds[self.rank + 1] - bounds[self.rank]] * self.ranks
        splits = [high - low for low, high in pairwise(bounds)]
        group = self._groups.reductions
        return [_named(dist.all_to_all_single, receive, send, own, splits, group=group, async_op=True)]

    def _reduce_native(self, send: Tensor, receive: Tensor) -> list[Any]:
        return [_named(_reduce_scatter, receive, send, group=self._groups.reductions, async_op=True)]

    def _broadcast(self, tensor: Tensor, source: int) -> None:
        _named(dist.broadcast, tensor.view(torch.uint8), self._global[source], group=self._groups.gathers)

    def meet(self, what: str, number: int, *same: int) -> None:
        self._exchange(what, number, same, compared=_HEADER)

    def poll(self, what: str, number: int, *mine: int) -> list[tuple[int, ...]]:
        return [tuple(row[3 : 3 + len(mine)]) for row in self._exchange(what, number, mine, compared=3)]

    def _exchange(self, what: str, number: int, integers: tuple[int, ...], *, compared: int) -> list[list[int]]:
        header = torch.zeros(_HEADER, dtype=torch.int64)
        header[: 3 + len(integers)] = torch.tensor((self._engine, MEETINGS.index(what), number, *integers))
        everyone = torch.empty(self.ranks * _HEADER, dtype=torch.int64)
        event = self._count_control(8 * _HEADER)
        _named(_all_gather, everyone, header, group=self._groups.control)
        ends(event)
        rows: list[list[int]] = everyone.view(self.ranks, _HEADER).tolist()
        if any(row[:compared] != rows[0][:compared] for row in rows):
            detail = all(row[1:3] == rows[0][1:3] for row in rows)
            where = "; ".join(
                f"rank {rank} is at {MEETINGS[row[1]]} {row[2]}" + (f" of model {row[0]}, {row[3:]}" if detail else "")
                for rank, row in enumerate(rows)
            )
            raise PeerError(
                "the ranks are not doing the same thing",
                where=where,
                expected="the same forwards, backwards, steps and questions on every rank, in the same order",
                instead="as many batches on every rank, and zeroshard's collective methods on all of them, alike",
            )
        return rows

    def flags(self, mine: bytes) -> bytes:
        tensor = torch.frombuffer(bytearray(mine), dtype=torch.uint8) if mine else torch.empty(0, dtype=torch.uint8)
        self.maximum(tensor)
        return bytes(tensor.tolist())

    def maximum(self, tensor: Tensor) -> None:
        self._all_reduce(tensor, dist.ReduceOp.MAX)

    def total(self, tensor: Tensor) -> None:
        self._all_reduce(tensor, dist.ReduceOp.SUM)

    def _all_reduce(self, tensor: Tensor, op: Any) -> None:
        event = self._count_control(tensor.numel() * tensor.itemsize)
        _named(dist.all_reduce, tensor, op, group=self._groups.control)
        ends(event)

    def describe(self, facts: Any) -> list[Any]:
        text = torch.frombuffer(bytearray(json.dumps(facts).encode()), dtype=torch.uint8)
        lengths = [row[0] for row in self.poll("construction", 0, text.numel())]
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: text.numel()] = text
        everyone = torch.empty(self.ranks * max(lengths), dtype=torch.uint8)
        _named(_all_gather, everyone, padded, group=self._groups.control)
        rows = everyone.view(self.ranks, -1)
        return [json.loads(bytes(rows[rank, :length].tolist())) for rank, length in enumerate(lengths)]

    def apart(self) -> Group:
        other = copy.copy(self)
        other._groups = self._groups.apart()
        return other


def connect(settings: Comm, ledger: Ledger, device: torch.device) -> Group:
    """This rank's end of the group that `settings` names, starting `torch.distributed` where nobody has.

    Under a launcher (`RANK` and `WORLD_SIZE` set) the default process group is made here and ended at exit.
    """
    parent = settings.group
    if isinstance(parent, Simulated):
        return Group(ledger, device, parent.rank, parent.ranks)
    if hasattr(parent, "get_group") and hasattr(parent, "ndim"):
        if parent.ndim != 1:
            raise UserError(
                "only a one-dimensional DeviceMesh can be sharded over",
                expected="ndim 1",
                got=f"ndim {parent.ndim} {parent.mesh_dim_names}",
                instead='Comm(group=mesh["shard"])',
            )
        parent = parent.get_group()
    if parent is None:
        if not dist.is_available() or not (dist.is_initialized() or int(os.environ.get("WORLD_SIZE", "1")) > 1):
            return Group(ledger, device)
        if not dist.is_initialized():
            _start(settings, device)
        parent = dist.group.WORLD
    if parent != dist.GroupMember.NON_GROUP_MEMBER and not isinstance(parent, dist.ProcessGroup):
        raise UserError(
            "Comm.group is not a process group",
            expected="a torch.distributed process group or a one-dimensional DeviceMesh",
            got=repr(parent),
            instead="Comm(group=torch.distributed.new_group([...]))",
        )
    if parent == dist.GroupMember.NON_GROUP_MEMBER or dist.get_rank(parent) < 0:
        raise UserError(
            "this rank is not a member of the process group",
            where=f"rank {dist.get_rank()}",
            instead="call shard(...) on members of the group only",
        )
    if dist.get_world_size(parent) == 1:
        return Group(ledger, device)
    return ProcessGroup(ledger, device, _groups(parent, settings.timeout))


def _start(settings: Comm, device: torch.device) -> None:
    import atexit

    timeout = None if settings.timeout is None else timedelta(seconds=settings.timeout)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timeout)

    def finish() -> None:
        # A gloo process that leaves right after its last collective can abort peers that still read from it. But one
        # that an exception ends must not wait for peers that wait for it: then its own error is what they need.
        if dist.is_initialized():
            if dist.get_backend() == "gloo" and not hasattr(sys, "last_value"):
                with contextlib.suppress(RuntimeError):  # a peer is gone already; its own error says more
                    _leave_together()
            dist.destroy_process_group()

    atexit.register(finish)


def _leave_together() -> None:
    # Through the store and not by a collective: one that peers never join could not be given up.
    store, deadline = dist.distributed_c10d._get_default_store(), time.monotonic() + LEAVING
    store.add("zeroshard/leaving", 1)
    while store.add("zeroshard/leaving", 0) < dist.get_world_size() and time.monotonic() < deadline:
        time.sleep(0.01)


PATIENT = timedelta(minutes=30)


class _Groups:
    def __init__(self, parent: Any, timeout: float | None) -> None:
        ranks = dist.get_process_group_ranks(parent)
        options: dict[str, Any] = {"ranks": ranks, "use_local_synchronization": True}
        if timeout is not None:
            options["timeout"] = timedelta(seconds=timeout)
        backend = dist.get_backend(parent)
        self._parent = weakref.ref(parent)
        self.gathers = dist.new_group(backend=backend, **options)
        self.reductions = dist.new_group(backend=backend, **options)
        self.control = dist.new_group(backend="gloo", **options)
        self._patient = {**options, "timeout": max(PATIENT, options.get("timeout", PATIENT))}
        self._apart: _Groups | None = None
        self.engines = 0

    @property
    def parent(self) -> Any:
        return self._parent()

    def apart(self) -> _Groups:
        if self._apart is None:
            self._apart = copy.copy(self)
            self._apart.control = dist.new_group(backend="gloo", **self._patient)
        return self._apart


# The three groups of a parent are made once: making them anew for every engine would leak sockets.
_made: weakref.WeakKeyDictionary[Any, dict[float | None, _Groups]] = weakref.WeakKeyDictionary()


def _groups(parent: Any, timeout: float | None) -> _Groups:
    made = _made.setdefault(parent, {})
    if timeout not in made:
        made[timeout] = _Groups(parent, timeout)
    return made[timeout]


def _named(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a torch.distributed call; a lost or silent peer becomes a `PeerError`."""
    try:
        with warnings.catch_warnings():
            return call(*args, **kwargs)
    except (RuntimeError, ValueError) as error:
        rank = dist.get_rank() if dist.is_initialized() else "?"
        raise PeerError(
            "a collective did not complete: a peer is gone, silent, or raised an error of its own",
            where=f"rank {rank}",
            got=str(error).splitlines()[0],
            instead="read the first error among all ranks' output; Comm(timeout=...) sets how long to wait",
        ) from error


# torch 2.13 renamed these two; the old names warn there and the new ones are missing before.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
