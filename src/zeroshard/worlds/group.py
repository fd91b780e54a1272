"""`torch.distributed` between the ranks of a world: a process group, and the store in which they meet."""

# What torch declares of these classes names overloads; c10d calls them as here.
# mypy: disable-error-code="override, assignment, misc, call-arg, name-defined, arg-type"

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from .messages import Flight, Payload, Work, put, reduced

if TYPE_CHECKING:
    from .world import World

Parts = dict[int, list[Payload]]  # by rank


class Group(dist.ProcessGroup):
    """A process group whose messages are copies in memory."""

    bound_device_id = None

    def __init__(self, world: World, name: str, members: Sequence[int], own: int, limit: float) -> None:
        """members: their ranks in the world. limit: of each message, in virtual seconds."""
        super().__init__(own, len(members))
        self.world, self.members, self.limit = world, members, limit
        self._own, self._name = own, name
        made, key = world.ranks[members[own]].groups, (name, *members)
        made[key] = made.get(key, 0) + 1
        self._key = (*key, made[key])
        self._launched = 0
        self._sent: dict[tuple[int, ...], int] = {}
        self.options = types.SimpleNamespace(_timeout=timedelta(seconds=limit))
        self._everyone = range(len(members))

    group_name = property(lambda self: self._name)
    group_desc = property(lambda self: "world")
    _device_types = property(lambda self: [torch.device("cpu")])

    def name(self) -> str:
        return "gloo"

    getBackendName = name

    def size(self) -> int:
        return len(self.members)

    def rank(self) -> int:
        return self._own

    def _get_sequence_number_for_group(self) -> int:
        return self._launched

    def _get_backend(self, device: Any) -> Any:
        return self

    def _has_hooks(self) -> bool:
        return False

    def shutdown(self) -> None:
        pass

    abort = shutdown

    def _fly(
        self,
        what: str,
        needs: Iterable[int],
        gives: Sequence[Tensor],
        takes: Sequence[Tensor],
        write: Callable[[Parts], object],
        message: tuple[int, ...] = (),
    ) -> Work:
        """message: from whom to whom, with which tag, and which of those it is; where two ranks take part."""
        self._launched += not message
        key = (*self._key, message or self._launched)
        flights = self.world.flights
        flight = flights.setdefault(key, Flight(2 if message else len(self.members)))
        work = Work(self, f"{what} {key[-1]} of group {self._name}", flight, needs, gives, takes, write).launched()
        if len(flight.works) == flight.size:
            del flights[key]
        return work

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Work:
        root, tensors = (0 if opts is None else opts.rootRank), list(tensors)
        if root == self._own:
            return self._fly("broadcast", [], tensors, [], _nothing)
        return self._fly("broadcast", [root], [], tensors, lambda parts: _each(tensors, parts[root]))

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Work:
        op, tensors = ("SUM" if opts is None else opts.reduceOp), list(tensors)

        def write(parts: Parts) -> None:
            _each(tensors, [reduced(each, op) for each in zip(*(parts[rank] for rank in self._everyone), strict=True)])

        return self._fly("all_reduce", self._everyone, tensors, [], write)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> Work:
        if opts.rootRank != self._own:
            return self._fly("all_reduce", [], list(tensors), [], _nothing)
        return self.allreduce(tensors, opts)

    def all_gather_single(self, everyone: Tensor, own: Tensor, opts: Any = None) -> Work:
        return self._fly(
            "all_gather", self._everyone, [own], [everyone],
            lambda parts: _in_turn(everyone, [parts[rank][0] for rank in self._everyone]),
        )  # fmt: skip

    _allgather_base = all_gather_into_tensor = all_gather_single

    def allgather(self, everyone: list[list[Tensor]], own: list[Tensor], opts: Any = None) -> Work:
        def write(parts: Parts) -> None:
            for at, row in enumerate(everyone):
                _each(row, [parts[rank][at] for rank in self._everyone])

        return self._fly("all_gather", self._everyone, list(own), [each for row in everyone for each in row], write)

    def allgather_into_tensor_coalesced(self, everyone: list[Tensor], own: list[Tensor], opts: Any = None) -> Work:
        return [self.all_gather_single(*each) for each in zip(everyone, own, strict=True)][-1]

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def all_to_all_single(self, into: Tensor, send: Tensor, comes: Any, goes: Any, opts: Any = None) -> Work:
        ranks = len(self.members)
        goes = list(goes) or [send.size(0) // ranks if send.dim() else 0] * ranks
        return self._fly(
            "all_to_all", self._everyone, send.split(goes), [into],
            lambda parts: _in_turn(into, [parts[rank][self._own] for rank in self._everyone]),
        )  # fmt: skip

    alltoall_base = all_to_all_single

    def alltoall(self, into: list[Tensor], send: list[Tensor], opts: Any = None) -> Work:
        return self._fly(
            "all_to_all", self._everyone, list(send), list(into),
            lambda parts: _each(into, [parts[rank][self._own] for rank in self._everyone]),
        )  # fmt: skip

    def reduce_scatter_single(self, into: Tensor, send: Tensor, opts: Any = None) -> Work:
        return self.reduce_scatter([into], [list(send.detach().view(-1).chunk(len(self.members)))], opts)

    _reduce_scatter_base = reduce_scatter_tensor = reduce_scatter_single

    def reduce_scatter(self, into: list[Tensor], send: list[list[Tensor]], opts: Any = None) -> Work:
        op = "SUM" if opts is None else opts.reduceOp
        return self._fly(
            "reduce_scatter", self._everyone, list(send[0]), list(into),
            lambda parts: put(into[0], reduced([parts[rank][self._own] for rank in self._everyone], op)),
        )  # fmt: skip

    def gather(self, into: list[list[Tensor]], own: list[Tensor], opts: Any = None) -> Work:
        if opts.rootRank != self._own:
            return self._fly("gather", [], list(own), [], _nothing)
        return self._fly(
            "gather", self._everyone, list(own), list(into[0]),
            lambda parts: _each(into[0], [parts[rank][0] for rank in self._everyone]),
        )  # fmt: skip

    def scatter(self, into: list[Tensor], send: list[list[Tensor]], opts: Any = None) -> Work:
        gives = list(send[0]) if opts.rootRank == self._own else []
        return self._fly(
            "scatter", [opts.rootRank], gives, list(into), lambda parts: put(into[0], parts[opts.rootRank][self._own])
        )

    def barrier(self, opts: Any = None) -> Work:
        return self._fly("barrier", self._everyone, [], [], _nothing)

    def send(self, tensors: list[Tensor], target: int, tag: int) -> Work:
        return self._fly("message", [], list(tensors), [], _nothing, self._message(self._own, target, tag))

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Work:
        into = list(tensors)
        message = self._message(source, self._own, tag)
        return self._fly("message", [source], [], into, lambda parts: _each(into, parts[source]), message)

    def _message(self, *way: int) -> tuple[int, ...]:
        number = self._sent[way] = self._sent.get(way, 0) + 1
        return (*way, number)


def _nothing(parts: Parts) -> None:
    pass


def _each(tensors: Sequence[Tensor], parts: Sequence[Payload]) -> None:
    for into, part in zip(tensors, parts, strict=True):
        put(into, part)


def _in_turn(into: Tensor, parts: Sequence[Payload]) -> None:
    """One behind the other."""
    at = 0
    for part in parts:
        put(into, part, at)
        at += part.nbytes


class Store(dist.Store):
    """The store in which the ranks of a world meet."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._schedule, self._held = world.schedule, dict[str, bytes]()

    def set(self, key: str, value: Any) -> None:
        self._schedule.moves()
        self._held[key] = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._held[key]

    def add(self, key: str, amount: int) -> int:
        number = int(self._held.get(key, b"0")) + amount
        if amount or key not in self._held:
            self.set(key, str(number))
        return number

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        if self._held.get(key, b"").decode() == expected:
            self.set(key, desired)
        return self._held.get(key, expected.encode())

    def check(self, keys: list[str]) -> bool:
        self._schedule.point("asks the store")
        return all(key in self._held for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        limit = 300.0 if timeout is None else timeout.total_seconds()
        why = f"waits for {', '.join(keys)} in the store"
        if not self._schedule.wait(lambda: all(key in self._held for key in keys), limit, why):
            raise dist.DistStoreError(f"wait timeout after {1000 * limit:.0f}ms, keys: {keys}")

    def delete_key(self, key: str) -> bool:
        return self._held.pop(key, None) is not None

    def num_keys(self) -> int:
        return len(self._held)
