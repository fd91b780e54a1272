"""emuccl: a backend of torch.distributed for the emulated device, with NCCL's rules.

    one stream per communicator     a collective starts there after what the current stream had at its launch
    Work.wait()                     the current stream waits, and not the host
    Work.wait(timeout)              the host waits; if time runs out since the launch, the communicator is ABORTED
    Work.is_completed()             a query of an event
    the first collective            connects, and blocks the host until all members have come to theirs
    tensors of the CPU              are refused, unless the group has a backend for them ("cpu:gloo,emu:emuccl")
    abort()                         ends what is under way, then waits until the whole device is idle
    destroy_process_group()         flushes: the host waits until all that was launched is through, or aborted
    init_process_group(device_id=)  later groups are split from the world's communicator, by all of its ranks
    new_group(pg_options=)          limits channels, of which each takes memory of the device for each peer

What NCCL leaves to luck is checked: all members launch the same collectives of the same sizes in the same order. A
collective under way takes one of the device's slots until the others' parts have come, as it takes multiprocessors.

Its sums go in rank order, each in the dtype that is sent; NCCL's order is unspecified. An abort is this rank's own.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zeroshard.device import limited

from . import sites
from .counts import total
from .device import Device
from .memory import POISON, Place
from .streams import Deadlock, Item, Mark
from .wire import Wire

CHANNELS = 32  # by which an exchange connects two ranks, unless a group's options say fewer
CHANNEL = 14 << 20  # bytes of the device that one of them takes
_KEPT = 64  # headers of collectives that are through, with which late ones are compared


class Aborted(dist.DistBackendError):  # type: ignore[misc]
    """The communicator was aborted on this rank: nothing of it will ever be through."""


class Message(Item):
    """A collective on its communicator's stream: it sends its parts when it starts, and lands when the others' came."""

    is_message = True

    def __init__(
        self,
        communicator: Communicator,
        header: tuple[Any, ...],
        gives: dict[int, list[Place]],
        expects: dict[int, int],
        land: Callable[[dict[int, bytes]], None],
        lies: Sequence[Place],
    ) -> None:
        """gives: to each rank, what it is sent. expects: from each rank that it cannot end without, so many bytes. lies:
        where what comes lies; after an abort that may hold anything."""
        super().__init__(str(header[0]), lambda: None)
        self.communicator, self.header, self.gives, self.expects, self.land = communicator, header, gives, expects, land
        self.lies = lies
        self.number = 0
        self.urged = False

    def start(self) -> None:
        if not self.communicator.aborted:
            for rank in self.communicator.others:
                parts = [_bytes(place.open()) for place in self.gives.get(rank, ())]
                self.communicator.send(rank, "part", self.number, self.header, payload=b"".join(parts))

    def finished(self) -> bool:
        if self.communicator.aborted:
            for place in self.lies:
                spoil(place.open())
            return True
        parts = self.communicator.parts.get(self.number, {})
        for rank, (header, part) in parts.items():
            if header != self.header or (rank in self.expects and len(part) != self.expects[rank]):
                raise RuntimeError(
                    f"ranks are in different collectives, number {self.number} of {self.communicator}: rank "
                    f"{self.communicator.rank} in {self.header}, expecting {self.expects.get(rank, 0)} bytes of rank "
                    f"{rank}; that in {header}, sending {len(part)}"
                )
        if not self.expects.keys() <= parts.keys():
            return False
        self.land({rank: part for rank, (_, part) in parts.items()})
        self.communicator.landed(self.number, self.header)
        return True


class Communicator:
    """What a group of ranks has launched of its collectives, on a stream of its own."""

    def __init__(self, device: Device, wire: Wire, key: str, addresses: Sequence[str], rank: int) -> None:
        self.device, self.wire, self.key, self.addresses, self.rank = device, wire, key, addresses, rank
        self.others = [other for other in range(len(addresses)) if other != rank]
        self.queue = device.machine.queue(f"emuccl {key}", messages=True)
        self.aborted = ""  # why
        self.launched = 0
        self.parts: dict[int, dict[int, tuple[Any, bytes]]] = {}  # by number of the collective and rank, what has come
        self.headers: dict[int, Any] = {}  # of those that are through
        self._wanted = 0  # up to which collective another rank waits for this one
        self._marks: dict[int, Mark] = {}
        self._who = -2 - len(device.machine.queues)

    def send(self, rank: int, kind: str, *facts: Any, payload: bytes = b"") -> None:
        self.wire.send(self.addresses[rank], kind, self.key, self.rank, *facts, payload=payload)

    def launch(self, message: Message, accesses: list[tuple[Place, bool]]) -> Mark:
        machine = self.device.machine
        with machine.lock:
            self.launched += 1
            message.number = self.launched
            self.device.wait_on(self.queue, self.device.current.end())
            mark = self.device.launch(message.name, message, accesses, self.queue)
            self._marks[message.number] = mark
            self._run_wanted()
            return mark

    def came(self, rank: int, number: int, header: Any, part: bytes) -> None:
        with self.device.machine.lock:
            before = self.headers.get(number)
            if before is None:
                self.parts.setdefault(number, {})[rank] = header, part
            elif before != header:
                self.device.machine.fail(
                    f"ranks are in different collectives, number {number} of {self}: rank {self.rank} was in {before}, "
                    f"rank {rank} in {header}"
                )
            self.device.machine.notice()

    def landed(self, number: int, header: Any) -> None:
        self.parts.pop(number, None)
        self.headers[number] = header
        self.headers.pop(number - _KEPT, None)
        self._marks.pop(number - _KEPT, None)

    def wanted(self, rank: int, number: int, _: bytes) -> None:
        with self.device.machine.lock:
            self._wanted = max(self._wanted, number)
            self._run_wanted()

    def _run_wanted(self) -> None:
        mark = self._marks.get(min(self._wanted, self.launched))
        if mark is not None and not mark.reached:
            self.device.machine.want(self._who, (mark,))

    def abort(self, why: str) -> None:
        with self.device.machine.lock:
            self.aborted = self.aborted or why
            self.device.machine.notice()

    def __repr__(self) -> str:
        return f"communicator {self.key!r}"


def _urge(item: Any) -> None:
    """Tell the ranks whose parts are missing that this one waits for them."""
    if not item.urged:
        item.urged = True
        for rank in item.expects.keys() - item.communicator.parts.get(item.number, {}).keys():
            item.communicator.send(rank, "want", item.number)


class Work(dist.Work):  # type: ignore[misc]
    """A collective that was launched."""

    def __init__(self, communicator: Communicator, mark: Mark, message: Message, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._communicator, self._mark, self._message = communicator, mark, message
        self._tensors: Sequence[Tensor] = tensors  # until the program's stream comes after it
        self._made = time.monotonic()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Let the current stream wait. timeout: let the host wait as well, and abort the communicator at its end."""
        device = self._communicator.device
        device.wait_on(device.current, self._mark)
        if timeout is not None and timeout > timedelta(0):
            total.drains[sites.site(), "wait with a time-out"] += 1
            if not device.wait_for(self._mark, deadline=self._made + timeout.total_seconds()):
                self._communicator.abort(
                    f"{self._message.name}, number {self._message.number}, ran for more than {timeout.total_seconds()} s "
                    "before timing out"
                )
            self._refuse_aborted()  # without a time-out nobody looks
        self._tensors = ()
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return bool(self._communicator.aborted) or self._communicator.device.query(self._mark)

    def is_success(self) -> bool:
        return self.is_completed() and not self._communicator.aborted

    def exception(self) -> Any:
        return Aborted(self._communicator.aborted) if self._communicator.aborted else None

    def result(self) -> list[Tensor]:
        return list(self._tensors)

    def get_future(self) -> Any:
        future: Any = torch.futures.Future()
        future.set_result(list(self._tensors))
        return future

    def _refuse_aborted(self) -> None:
        if self._communicator.aborted:
            raise Aborted(f"{self._communicator} was aborted on rank {dist.get_rank()}: {self._communicator.aborted}")


class Options:
    """What `new_group(pg_options=)` takes for this backend, as `dist.ProcessGroupNCCL.Options` is for NCCL."""

    def __init__(self, max_ctas: int) -> None:
        self.max_ctas = max_ctas
        self._timeout = dist.default_pg_timeout


taken: dict[str, int] = {}  # by communicator, the bytes of the device that its exchanges took


class Emuccl(dist.ProcessGroup):
    """A process group, also of two backends: torch gives one that Python makes no second one beside it."""

    def __init__(self, device: Device, wire: Wire, options: Any, host: Any, asked: Options | None) -> None:
        """host: the group's backend for tensors of the CPU, if it has one. asked: the program's `pg_options`."""
        super().__init__(options.group_rank, options.group_size)
        self._device, self._wire, self._host = device, wire, host
        self._store, self._key = options.store, str(options.group_id)
        self._limit: timedelta = options.timeout
        self.asked = asked
        if asked is not None and asked._timeout != options.timeout:  # of which torch warns
            raise ValueError(f"pg_options have time-out {asked._timeout}, the group {options.timeout}")
        self._communicators: dict[str, Communicator] = {}
        self._ended = ""

    # --- what torch asks of a group and of its backend -----------------------------------------------------------------

    supports_splitting = True
    supports_coalescing = False

    def getBackendName(self) -> str:
        return "emuccl"

    name = getBackendName

    @property
    def group_name(self) -> str:
        return self._key

    @property
    def options(self) -> Any:
        made = dist.ProcessGroupGloo._Options()
        made._timeout = self._limit
        return made

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("emu")] + [torch.device("cpu")] * (self._host is not None)

    def _get_backend(self, device: torch.device) -> Any:
        if torch.device(device).type == "emu":
            return self
        if self._host is None:
            raise RuntimeError(f"No backend type associated with device type {torch.device(device).type}")
        return self._host

    def _has_hooks(self) -> bool:
        return False

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self._limit = timeout

    set_timeout = _set_default_timeout

    def eager_connect_single_device(self, device: Any) -> None:
        self._communicator()

    def perform_nocolor_split(self, device: Any) -> None:
        self._split()

    def _split(self) -> None:
        """All ranks of the world take part, members of the new group or not."""
        store, world = dist.distributed_c10d._get_default_store(), range(dist.get_world_size())
        made = store.add(f"emuccl/split/{dist.get_rank()}", 1)
        store.set(f"emuccl/split/{made}/{dist.get_rank()}", b"here")
        self._meet(
            store, [f"emuccl/split/{made}/{rank}" for rank in world], f"split {made} of the world's communicator"
        )

    def _meet(self, store: Any, keys: list[str], what: str) -> None:
        try:
            store.wait(keys, self._limit)
        except (RuntimeError, dist.DistStoreError) as error:
            absent = [key.rpartition("/")[2] for key in keys if not store.check([key])]
            raise dist.DistBackendError(
                f"emuccl: {what}: ranks {', '.join(absent)} did not come within {self._limit.total_seconds():.0f} s"
            ) from error

    def abort(self) -> None:
        """End all that is under way, of this rank, and free the communicators' memory: until the whole device is idle.

        Nothing comes after that wait: a program that counts on it would have a race where memory is kept.
        """
        self._ended = "it was aborted"
        for each in self._communicators.values():
            each.abort("the program aborted the group")
        if self._communicators:
            self._device.settle()
            machine = self._device.machine
            try:
                machine.wait([queue.end() for queue in machine.queues])
            except Deadlock as error:
                with machine.lock:
                    machine.fail(f"an abort waits for the device, and {error}")
                raise

    def shutdown(self) -> None:
        """It flushes: the host waits for all that was launched."""
        for each in self._communicators.values():
            if not each.aborted:
                total.drains[sites.site(), "shutdown"] += 1
                self._device.wait_for(each.queue.end())
        self._ended = self._ended or "it was shut down"

    def _communicator(self, pair: tuple[int, int] | None = None) -> Communicator:
        """Of all members, or of two that send to one another; made by its first use, which waits for all of them."""
        key = self._key if pair is None else f"{self._key}, {min(pair)} and {max(pair)}"
        if self._ended:
            raise Aborted(f"the group {key!r}: {self._ended}")
        if key not in self._communicators:
            members = range(self.size()) if pair is None else sorted(pair)
            self._store.set(f"{key}/{self.rank()}", self._wire.address)
            keys = [f"{key}/{rank}" for rank in members]
            self._meet(self._store, keys, f"connecting {key!r}")
            addresses = [self._store.get(each).decode() for each in keys]
            made = Communicator(self._device, self._wire, key, addresses, members.index(self.rank()))
            for rank in made.others:
                self._wire.peers[addresses[rank]] = f"rank {members[rank]} of {self._key!r}"
            with self._device.machine.lock:
                self._communicators[key] = _all[key] = made
                for kind, facts in _early.pop(key, ()):
                    getattr(made, kind)(*facts)
        if self._communicators[key].aborted:
            raise Aborted(f"{self._communicators[key]} was aborted: {self._communicators[key].aborted}")
        return self._communicators[key]

    # --- collectives -----------------------------------------------------------------------------------------------------

    def _on_host(self, tensors: Sequence[Tensor]) -> bool:
        kinds = {tensor.device.type for tensor in tensors}
        if kinds == {"emu"}:
            if not all(tensor.is_contiguous() for tensor in tensors):
                raise ValueError("Tensors must be contiguous")
            return False
        if kinds == {"cpu"} and self._host is not None:
            return True
        raise RuntimeError(f"No backend type associated with device type {', '.join(sorted(kinds - {'emu'}))}")

    def _post(
        self,
        header: tuple[Any, ...],
        gives: dict[int, list[Tensor]],
        expects: dict[int, int],
        land: Callable[[dict[int, bytes]], None],
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        lies: Sequence[Place],
        pair: tuple[int, int] | None = None,
    ) -> Work:
        """gives: to other ranks. expects: of other ranks, so many bytes. land: takes what these sent, late. lies: where."""
        communicator, place = self._communicator(pair), self._device.memory.place
        members = range(self.size()) if pair is None else sorted(pair)
        message = Message(
            communicator,
            header,
            {members.index(rank): [place(each) for each in tensors] for rank, tensors in gives.items()},
            {members.index(rank): nbytes for rank, nbytes in expects.items()},
            lambda parts: land({members[rank]: part for rank, part in parts.items()}),
            lies,
        )
        total.nbytes[sites.site(), "sent"] += sum(_nbytes(tensors) for tensors in gives.values())
        accesses = [(place(each), False) for each in reads] + [(place(each), True) for each in writes]
        mark = communicator.launch(message, accesses)
        return Work(communicator, mark, message, (*reads, *writes))

    def _move(
        self,
        header: tuple[Any, ...],
        gives: dict[int, list[Tensor]],
        takes: dict[int, list[Tensor]],
        pair: tuple[int, int] | None = None,
    ) -> Work:
        """Tensors by the rank that they go to and come from, of this one's own too."""
        own, place = self.rank(), self._device.memory.place
        here = [(place(a), place(b)) for a, b in zip(gives.get(own, ()), takes.get(own, ()), strict=True)]
        into = {rank: [place(each) for each in tensors] for rank, tensors in takes.items() if rank != own}

        def land(parts: dict[int, bytes]) -> None:
            for source, target in here:
                if source.address != target.address:
                    target.open().copy_(source.open())
            for rank, places in into.items():
                _fill([each.open() for each in places], parts[rank])

        return self._post(
            header,
            {rank: tensors for rank, tensors in gives.items() if rank != own},
            {rank: _nbytes(tensors) for rank, tensors in takes.items() if rank != own},
            land,
            [each for tensors in gives.values() for each in tensors],
            [each for tensors in takes.values() for each in tensors],
            [place for places in into.values() for place in places],
            pair,
        )

    def _reduce(
        self, header: tuple[Any, ...], op: Any, pieces: Sequence[Tensor], owners: Sequence[int], into: Tensor | None
    ) -> Work:
        """The sum over all ranks of piece `i` goes to rank `owners[i]`, and there into `into`. All may own one piece."""
        own, place, operation = self.rank(), self._device.memory.place, _operation(op)
        gives = {rank: [piece] for piece, rank in zip(pieces, owners, strict=True) if rank != own}
        mine = next((piece for piece, rank in zip(pieces, owners, strict=True) if rank == own), None)
        others = [rank for rank in range(self.size()) if rank != own and mine is not None]
        source, target = (None, None) if mine is None or into is None else (place(mine), place(into))

        def land(parts: dict[int, bytes]) -> None:
            if source is not None and target is not None:
                first = source.open().clone()
                found = [first if rank == own else _tensor(parts[rank], first) for rank in range(self.size())]
                target.open().copy_(_combined(found, operation).view(target.size))

        writes = [into] if into is not None else []
        expects = {rank: _nbytes([mine]) for rank in others} if mine is not None else {}
        lies = [target] if target is not None else []
        return self._post((*header, operation), gives, expects, land, pieces, writes, lies)

    def broadcast(self, tensors: list[Tensor], opts: Any = None, **_: Any) -> Any:
        if self._on_host(tensors):
            return self._host.broadcast(tensors, opts)
        root = 0 if opts is None else opts.rootRank
        header = ("broadcast", *_looks(tensors), root)
        if self.rank() == root:
            return self._move(header, {rank: tensors for rank in range(self.size()) if rank != root}, {})
        return self._move(header, {}, {root: tensors})

    def allreduce(self, tensors: list[Tensor], opts: Any = None, **_: Any) -> Any:
        if self._on_host(tensors):
            return self._host.allreduce(tensors, opts)
        (tensor,), everyone = tensors, range(self.size())
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        return self._reduce(("allreduce", *_looks(tensors)), op, [tensor] * self.size(), everyone, tensor)

    def reduce(self, tensors: list[Tensor], opts: Any = None, **_: Any) -> Any:
        if self._on_host(tensors):
            return self._host.reduce(tensors, opts)
        into = tensors[0] if self.rank() == opts.rootRank else None
        return self._reduce(("reduce", *_looks(tensors), opts.rootRank), opts.reduceOp, tensors, [opts.rootRank], into)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None, **_: Any) -> Any:
        if self._on_host([*inputs, *outputs[0]]):
            return self._host.allgather(outputs, inputs, opts)
        gives = dict.fromkeys(range(self.size()), inputs)
        return self._move(("allgather", *_looks(inputs)), gives, {r: [each] for r, each in enumerate(outputs[0])})

    def all_gather_single(self, output: Tensor, own: Tensor, opts: Any = None, **_: Any) -> Any:
        if self._on_host([output, own]):
            return (getattr(self._host, "all_gather_single", None) or self._host._allgather_base)(output, own, opts)
        pieces = output.view(-1).chunk(self.size())
        gives = {rank: [own] for rank in range(self.size())}
        return self._move(("all_gather_single", *_looks([own])), gives, {r: [each] for r, each in enumerate(pieces)})

    _allgather_base = all_gather_single

    def reduce_scatter_single(self, output: Tensor, whole: Tensor, opts: Any = None, **_: Any) -> Any:
        if self._on_host([output, whole]):
            host = getattr(self._host, "reduce_scatter_single", None) or self._host._reduce_scatter_base
            return host(output, whole, opts)
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        pieces = whole.view(-1).chunk(self.size())
        return self._reduce(("reduce_scatter_single", *_looks([output])), op, pieces, range(self.size()), output)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None, **_: Any) -> Any:
        if self._on_host([*outputs, *inputs[0]]):
            return self._host.reduce_scatter(outputs, inputs, opts)
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        return self._reduce(("reduce_scatter", *_looks(inputs[0])), op, inputs[0], range(self.size()), outputs[0])

    def all_to_all_single(
        self, output: Tensor, given: Tensor, receives: Any = None, sends: Any = None, opts: Any = None, **_: Any
    ) -> Any:
        """receives, sends: how many rows come from and go to each rank; empty: as many each."""
        if self._on_host([output, given]):
            host = getattr(self._host, "all_to_all_single", None) or self._host.alltoall_base
            return host(output, given, receives, sends, opts)
        ranks = range(self.size())
        sends, receives = (
            [*rows] or [len(tensor) // self.size()] * self.size()
            for tensor, rows in ((given, sends or ()), (output, receives or ()))
        )
        gives = {rank: [piece] for rank, piece in zip(ranks, given.split(sends), strict=True)}
        takes = {rank: [piece] for rank, piece in zip(ranks, output.split(receives), strict=True)}
        taken[self._key] = (len(ranks) - 1) * CHANNEL * (CHANNELS if self.asked is None else self.asked.max_ctas)
        return self._move(("all_to_all_single", str(given.dtype)), gives, takes)

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None, **_: Any) -> Any:
        if self._on_host([*outputs, *inputs]):
            return self._host.alltoall(outputs, inputs, opts)
        gives, takes = ({rank: [each] for rank, each in enumerate(tensors)} for tensors in (inputs, outputs))
        return self._move(("alltoall", str(inputs[0].dtype)), gives, takes)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None, **_: Any) -> Any:
        if self._on_host([*inputs, *(outputs[0] if outputs else ())]):
            return self._host.gather(outputs, inputs, opts)
        takes = {rank: [each] for rank, each in enumerate(outputs[0])} if self.rank() == opts.rootRank else {}
        return self._move(("gather", *_looks(inputs), opts.rootRank), {opts.rootRank: inputs}, takes)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None, **_: Any) -> Any:
        if self._on_host([*outputs, *(inputs[0] if inputs else ())]):
            return self._host.scatter(outputs, inputs, opts)
        gives = {rank: [each] for rank, each in enumerate(inputs[0])} if self.rank() == opts.rootRank else {}
        return self._move(("scatter", *_looks(outputs), opts.rootRank), gives, {opts.rootRank: outputs})

    def send(self, tensors: list[Tensor], to: int, tag: int = 0, **_: Any) -> Any:
        if self._on_host(tensors):
            return self._host.send(tensors, to, tag)
        return self._move(("a message", *_looks(tensors), to), {to: tensors}, {}, pair=(self.rank(), to))

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0, **_: Any) -> Any:
        if self._on_host(tensors):
            return self._host.recv(tensors, source, tag)
        header = ("a message", *_looks(tensors), self.rank())
        return self._move(header, {}, {source: tensors}, pair=(self.rank(), source))

    def barrier(self, opts: Any = None, **_: Any) -> Any:
        """A sum of one number; as NCCL's, it makes the host wait for it too."""
        work = self.allreduce([torch.zeros(1, device="emu")])
        total.drains[sites.site(), "barrier"] += 1
        work._communicator.device.wait_for(work._mark)
        return work


def _nbytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


def _looks(tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    """What all ranks must have alike of a collective's tensors."""
    return str(tensors[0].dtype).removeprefix("torch."), sum(tensor.numel() for tensor in tensors)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def spoil(tensor: Tensor) -> None:
    if tensor.numel():
        tensor.view(-1).view(torch.uint8).fill_(POISON)


def _tensor(part: bytes, like: Tensor) -> Tensor:
    found = torch.empty(like.size(), dtype=like.dtype, device="cpu")
    _fill([found], part)
    return found


def _fill(tensors: Sequence[Tensor], part: bytes) -> None:
    start = 0
    for tensor in tensors:
        nbytes = tensor.numel() * tensor.itemsize
        if nbytes:
            raw = torch.frombuffer(bytearray(part[start : start + nbytes]), dtype=torch.uint8)
            tensor.view(-1).view(torch.uint8).copy_(raw)
        start += nbytes


_OPERATIONS = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


def _operation(op: Any) -> str:
    return next(name for name in _OPERATIONS if op == getattr(dist.ReduceOp, name))


def _combined(pieces: list[Tensor], operation: str) -> Tensor:
    """In rank order, rounded at each step as what is sent is."""
    result = functools.reduce(_OPERATIONS[operation], pieces)
    return result / len(pieces) if operation == "AVG" else result


# --- making groups ----------------------------------------------------------------------------------------------------

_all: dict[str, Communicator] = {}
_early: dict[str, list[tuple[str, tuple[Any, ...]]]] = {}  # came before this rank had made the communicator


def register(device: Device, folder: str | None = None) -> None:
    """Let `init_process_group("emuccl")` and `new_group(backend="emuccl")` make groups for this device."""
    wire = Wire(device.machine, folder)

    def deliver(kind: str) -> Callable[..., None]:
        def taken(key: str, *facts: Any) -> None:
            with device.machine.lock:
                if key not in _all:
                    _early.setdefault(key, []).append((kind, facts))
                else:
                    getattr(_all[key], kind)(*facts)

        return taken

    wire.taken |= {"part": deliver("came"), "want": deliver("wanted")}
    device.machine.urge = _urge

    def make(options: Any, given: Any) -> Emuccl:
        asked: Any = sys._getframe(1).f_locals  # of torch's: it tells a backend nothing of those beside it
        config = asked["backend_config"].get_device_backend_map()
        host = None
        if config.get("cpu") == "gloo":
            store = dist.PrefixStore("emuccl/host", options.store)
            host = dist.ProcessGroupGloo(store, options.group_rank, options.group_size, options.timeout)
        made = Emuccl(device, wire, options, host, given)
        if asked["device_id"] is not None:
            made.bound_device_id = asked["device_id"]
        world = dist.distributed_c10d._get_default_group() if dist.is_initialized() else None
        if world is not None and world.bound_device_id is not None:
            made._split()
        return made

    class Told(dist.distributed_c10d._DistributedBackendOptions):  # type: ignore[misc]
        split_from: Any = None  # from torch 2.14 on that takes a backend in C++ only, which this one is not

    dist.distributed_c10d._DistributedBackendOptions = Told  # type: ignore[misc]
    os.environ["TORCH_FR_BUFFER_SIZE"] = "0"  # from 2.15 on torch records any group, and asks C++ for this one's name
    limited["emuccl"] = Options
    dist.Backend.register_backend("emuccl", make, extended_api=True, devices=["emu"])
