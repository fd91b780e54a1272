"""The transport of a team whose ranks are all on one host: nothing is sent, each rank reads the others' memory.

    verb      what is shared                              a notice says    and the others
    gather    a copy of the own shard                     POSTED           copy it into their whole bucket, and say READ
    reduce    all of this rank's contributions            POSTED           add up their shard of them, and say READ

The operations, operands and order are those of any other transport, so the bits are the same. Memory that all ranks
have READ is used again. It has no name (memfd): whatever ends a rank, even kill -9, the memory is gone with the last
process that maps it. Seals keep it from being shrunk under a reader. If the system has no room, making the memory
fails, not writing to it.

Launches are counted and can be joined as `launch_log.py` says: a rank that stands in shares zeros, or its own shard. A
`Flight` is posted after it was counted, and posted again if an interrupt came between: a rank that has heard of it does
not heed it twice.
"""

from __future__ import annotations

import fcntl
import os
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import UserError
from ..layout.limits import aligned
from ..layout.partition import BucketPlan
from ..layout.stage import Seat
from .host_peers import DROPPED, MEMORY, POSTED, READ, WHOLE, Descriptor, Neighbours, Notice, meet
from .launch_log import Launch, Stream

KEPT = 256 << 20  # bytes of unused memory that are kept at most
Land = Callable[[dict[int, Notice]], None]


def _made(nbytes: int) -> tuple[Tensor, Descriptor]:
    """Make memory without a name, with all of its pages reserved."""
    memory = Descriptor(os.memfd_create("zeroshard", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    os.posix_fallocate(memory.number, 0, nbytes)
    fcntl.fcntl(memory.number, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return _mapped(memory.number, nbytes), memory


def _mapped(descriptor: int, nbytes: int, *, shared: bool = True) -> Tensor:
    # By its path, because torch then keeps the mapping without a descriptor.
    try:
        return torch.from_file(f"/proc/self/fd/{descriptor}", shared=shared, size=nbytes, dtype=torch.uint8)
    except RuntimeError as error:
        raise OSError(f"memory cannot be mapped: {str(error).splitlines()[0]}") from error


def possible() -> None:
    """Raise `OSError` if memory cannot be shared on this system."""
    if not all(hasattr(module, name) for module, name in ((os, "memfd_create"), (fcntl, "F_ADD_SEALS"))):
        raise OSError("this system has no memory without a name (memfd_create)")
    _made(aligned(1))


class Block:
    """A piece of this rank's memory that others may read: one message at a time."""

    def __init__(self, number: int, memory: Tensor) -> None:
        self.number = number
        self.memory = memory
        self.readers: set[int] = set()  # ranks that have not read the last message yet
        self.flight: Flight | None = None  # of that message


class Whole(NamedTuple):
    """One piece of memory that all ranks of a team map, twice in this rank's address space.

    window: what all of them read and write. own: the same memory, but a page that this rank writes into is private from
    then on (MAP_PRIVATE).
    """

    window: Tensor
    own: Tensor


class Host:
    """The memory that this rank shares on its host, and the others' memory that they share with it."""

    def __init__(self, rank: int, neighbours: Neighbours, limit: float) -> None:
        self.rank = rank
        self.limit = limit  # seconds that a rank may be silent
        self.neighbours = neighbours
        self.neighbours.heard = self._hear
        self.streams: list[SharedStream] = []
        self.flights: dict[tuple[int, int], Flight] = {}  # that this rank has not read to the end
        self._blocks: dict[int, Block] = {}  # by address
        self._idle: list[Block] = []  # the longest idle first
        self._made = 0
        self._lent: dict[tuple[int, int], Block] = {}  # by stream and number, until all have read it
        self._theirs: dict[tuple[int, int], Tensor] = {}  # by rank and number of its block
        self._posted: dict[tuple[int, int], dict[int, Notice]] = defaultdict(dict)  # by stream and number
        self.wholes: dict[tuple[int, int], Whole] = {}  # by rank that made it and number, until it is taken
        self._last: dict[tuple[int, int], int] = {}  # by stream and rank, the number that it posted last

    # --- own memory -------------------------------------------------------------------------------------------------

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return 1-D memory with arbitrary content that others can read."""
        nbytes = aligned(numel * dtype.itemsize)
        for stream in self.streams:  # what an interrupt kept from being posted; else its memory counts as read
            stream.post()
        if not numel:
            return torch.empty(0, dtype=dtype, device="cpu")
        fitting = [each for each in self._idle if nbytes <= each.memory.numel() <= nbytes + nbytes // 4]
        free = [each for each in fitting if not each.readers]
        if fitting and not free:
            self.neighbours.listen()
            free = [each for each in fitting if not each.readers]
        if free:
            block = min(free, key=lambda each: each.memory.numel())
            self._idle.remove(block)
        else:
            block = self._make(nbytes)
        return block.memory[: numel * dtype.itemsize].view(dtype)

    def _make(self, nbytes: int) -> Block:
        try:
            memory, descriptor = _made(nbytes)
        except OSError as error:
            raise MemoryError(f"the system has no {nbytes:,} bytes for memory that ranks share: {error}") from error
        self._made += 1
        block = self._blocks[memory.data_ptr()] = Block(self._made, memory)
        for rank in self.neighbours.lines:
            self.neighbours.tell(rank, Notice(MEMORY, block=block.number, nbytes=nbytes), descriptor)
        return block

    def again(self, tensor: Tensor) -> Tensor:
        """Return memory for a new message: the same if all have read the last one there, else other."""
        block = self._blocks.get(tensor.data_ptr())
        if block is None or not block.readers:
            return tensor
        taken = self.take(tensor.numel(), tensor.dtype)
        self._idle.append(block)
        return taken

    def free(self, tensor: Tensor) -> None:
        """Take memory back that this rank does not use any more; others may still read what was posted from it."""
        block = self._blocks.get(tensor.data_ptr())
        if block is None or any(block is each for each in self._idle):
            return
        self._idle.append(block)
        while sum(each.memory.numel() for each in self._idle) > KEPT:
            unread = [each for each in self._idle if not each.readers]
            if not unread:
                return
            self._idle.remove(unread[0])
            del self._blocks[unread[0].memory.data_ptr()]
            for rank in self.neighbours.lines:
                self.neighbours.tell(rank, Notice(DROPPED, block=unread[0].number))

    def block(self, tensor: Tensor) -> Block | None:
        return self._blocks.get(tensor.data_ptr())

    def make_whole(self, number: int, nbytes: int, others: Sequence[int]) -> None:
        """Make one piece of memory for all ranks, in the collective of this number, and hand it to the others."""
        try:
            window, descriptor = _made(nbytes)
        except OSError as error:
            raise MemoryError(f"the system has no {nbytes:,} bytes for parameters that ranks share: {error}") from error
        self.wholes[self.rank, number] = Whole(window, _mapped(descriptor.number, nbytes, shared=False))
        for rank in others:
            self.neighbours.tell(rank, Notice(WHOLE, block=number, nbytes=nbytes), descriptor)

    # --- what others say --------------------------------------------------------------------------------------------

    def _hear(self, rank: int, notice: Notice, memory: int) -> None:
        at = notice.stream, notice.number
        if notice.kind == WHOLE:
            both = (_mapped(memory, notice.nbytes, shared=shared) for shared in (True, False))
            self.wholes[rank, notice.block] = Whole(*both)
        elif notice.kind == MEMORY:
            if (rank, notice.block) not in self._theirs:
                self._theirs[rank, notice.block] = _mapped(memory, notice.nbytes)
        elif notice.kind == POSTED:
            if notice.number > self._last.get((notice.stream, rank), 0):
                self._posted[at][rank] = notice
                self._last[notice.stream, rank] = notice.number
        elif notice.kind == READ:
            if at in self._lent:
                self._lent[at].readers.discard(rank)
                if not self._lent[at].readers:
                    del self._lent[at]
        else:
            self._theirs.pop((rank, notice.block), None)

    def post(self, flight: Flight, what: int, block: Block | None, nbytes: int) -> None:
        """Tell all ranks of a stream what this rank shares."""
        at = flight.at
        self.flights[at] = flight
        number = 0
        if block is not None:
            if block.flight is not flight:  # else posted again after an interrupt: some may have read it since
                block.readers, self._lent[at], block.flight = set(flight.peers), block, flight
            number = block.number
        for rank in flight.peers:
            self.neighbours.tell(rank, Notice(POSTED, at[0], what, at[1], number, nbytes))
        self.neighbours.listen()

    def go_on(self) -> None:
        """Copy the shards that have arrived in gathers under way, so that other ranks may use their memory again."""
        for stream in self.streams:
            stream.post()
        for flight in [*self.flights.values()]:
            flight.copy()

    def posted(self, at: tuple[int, int]) -> dict[int, Notice]:
        return self._posted.get(at, {})

    def theirs(self, rank: int, notice: Notice) -> Tensor:
        """Return the memory that a rank shares in a message, as bytes."""
        return self._theirs[rank, notice.block][: notice.nbytes]

    def read(self, flight: Flight) -> None:
        """Tell all that this rank has read what they shared."""
        for rank in flight.peers:
            self.neighbours.tell(rank, Notice(READ, flight.at[0], 0, flight.at[1]))

    def forget(self, flight: Flight) -> None:
        self._posted.pop(flight.at, None)
        self.flights.pop(flight.at, None)


class Flight:
    """One collective. It is through when all others have posted their parts and, in a gather, these were copied.

    It has `wait` and `is_completed` as torch's own handles have, so that lost or silent ranks are noticed as ever.
    """

    def __init__(self, stream: SharedStream, tensor: Tensor | None, land: Land | None, what: int, number: int) -> None:
        """tensor: what this rank shares. land: copies what came, after which this rank reads it no more."""
        self.host = stream.host
        self.at = stream.index, number
        self.peers = [rank for rank in stream.members if rank != stream.host.rank]
        self._tensor = tensor
        self._land = land
        self._what = what
        self._posted = False
        self._since = 0.0
        self._why = ""  # why it cannot complete
        self.finished = False

    def post(self) -> None:
        if not self._posted:
            tensor = self._tensor
            block = None if tensor is None else self.host.block(tensor)
            nbytes = 0 if tensor is None else tensor.numel() * tensor.itemsize
            self.host.post(self, self._what, block, nbytes)
            self._posted, self._tensor = True, None

    def _arrived(self) -> bool:
        return self.finished or len(self.host.posted(self.at)) == len(self.peers)

    def _fails(self) -> bool:
        """Tell if it will never be completed, and keep the reason."""
        posted = self.host.posted(self.at)
        for rank in self.peers:
            notice = posted.get(rank)
            if notice is not None and notice.what != self._what:
                self._why = f"rank {rank} shares something else: the ranks do not do the same"
            elif notice is None and self.host.neighbours.lines[rank].gone:
                self._why = f"the connection to rank {rank} has ended"
            elif notice is None and self._since and time.monotonic() > self._since + self.host.limit:
                self._why = f"rank {rank} shared nothing in {self.host.limit:g} s"
        return bool(self._why)

    def is_completed(self) -> bool:
        """Tell if there is nothing to wait for any more, because it is through or never will be."""
        if not self._posted:  # an interrupt came before the post: others still wait for it, whatever they have shared
            return False
        if not self._arrived():
            self.host.neighbours.listen()
        return self._arrived() or self._fails()

    def wait(self, limit: timedelta | None = None) -> bool:
        """Wait for the others, at most `limit`, and tell if this is through.

        Without a `limit`, raises `RuntimeError` if it never will be.
        """
        if self.finished:
            return True
        self.post()
        now = time.monotonic()
        self._since = self._since or now
        ends = now + (self.host.limit if limit is None else limit.total_seconds())
        self.host.neighbours.listen()
        while not self._arrived() and not self._fails() and (left := ends - time.monotonic()) > 0:
            self.host.neighbours.listen(left)
        if self._fails() and not self.finished:
            if limit is None:
                raise RuntimeError(self._why)
            return False
        self.copy()
        return self._arrived()

    def copy(self) -> None:
        """Land what the others share, once all of it has come."""
        if self._land is not None and not self.finished and self._arrived() and not self._fails():
            self._land(self.host.posted(self.at))
            self.read()

    def read(self) -> None:
        """Tell the others that what they share was used, so that they may use its memory again."""
        if not self.finished:
            self.host.read(self)
            self.finished = True  # set before what arrived is forgotten: after an interrupt nothing waits for it again
        self._land = None
        self.host.forget(self)

    def pieces(self, dtype: torch.dtype) -> dict[int, Tensor]:
        """Return what each of the others shares, by rank; valid until `read`."""
        return {rank: self.host.theirs(rank, notice).view(dtype) for rank, notice in self.host.posted(self.at).items()}


class SharedStream(Stream):
    """The collectives of one team through memory, in one order."""

    def __init__(self, host: Host, members: Sequence[int]) -> None:
        super().__init__(None, members)
        self.host = host
        self.index = len(host.streams)
        host.streams.append(self)

    def launch(self, what: Launch, call: Callable[..., Any], *args: Any) -> Any:
        self.host.go_on()
        flight = super().launch(what, call, *args, zlib.crc32(repr(tuple(what)).encode()), self.count + 1)
        flight.post()
        return flight

    def post(self) -> None:
        """Post flights that were counted and that an interrupt has kept from being posted."""
        for flight in super().under_way:
            flight.post()

    @property
    def under_way(self) -> list[Any]:
        """The handles under way, and the posted flights that this rank has not read to the end."""
        mine = [flight for at, flight in self.host.flights.items() if at[0] == self.index]
        return [*mine, *(each for each in super().under_way if not any(each is one for one in mine))]

    def let_go(self, engine: int) -> None:
        """Do nothing: asking if a flight is through listens for notices, which may not happen at an arbitrary point."""

    def discard(self) -> None:
        for flight in self.under_way:
            flight.read()


def share(
    store: Any, at: str, rank: int, ranks: int, teams: Sequence[Sequence[int]], limit: float
) -> tuple[list[SharedStream], str]:
    """Return streams of gathers and of reductions for each of a rank's teams; or none, and the reason, the same on all
    ranks."""
    peers = sorted({peer for team in teams for peer in team} - {rank})
    neighbours, why = meet(store, at, rank, ranks, peers, possible, limit)
    if neighbours is None:
        return [], why
    host = Host(rank, neighbours, limit)
    return [SharedStream(host, team) for team in teams for _ in ("gathers", "reductions")], ""


def cannot_share(rank: int, why: str) -> UserError:
    """Make the error for ranks that must share memory, and cannot."""
    return UserError(
        "the ranks cannot share memory",
        where=f"rank {rank}",
        expected="all ranks that shard together on one Linux host, of one user, in one container",
        got=why,
        instead='Comm(transport="gloo"); or Comm(replicas=...), one replica for each host',
    )


class Messages:
    """Memory of messages, counted as `tier.DeviceTier` counts its own."""

    def __init__(self, host: Host, tier: Any) -> None:
        self._host = host
        self._tier = tier

    def reserve(self, state: str, numel: int, dtype: torch.dtype, *, zeroed: bool = True) -> Tensor:
        assert not zeroed
        tensor = self._host.take(numel, dtype)
        self._tier.ledger.hold(state, numel * dtype.itemsize)
        return tensor

    def give_back(self, state: str, tensor: Tensor) -> None:
        self._tier.ledger.hold(state, -tensor.numel() * tensor.itemsize)
        self._host.free(tensor)

    def again(self, tensor: Tensor) -> Tensor:
        return self._host.again(tensor)


class Exchange:
    """The gathers and reductions of one engine's team through shared memory."""

    def __init__(self, link: Any, sits: Seat, members: Sequence[int], streams: Sequence[SharedStream]) -> None:
        """streams: of gathers and of reductions. members: in order of their positions."""
        self._link = link
        self._sits = sits
        self._members = members
        self._gathers, self._reductions = streams
        self.host = self._gathers.host
        # By verb and bucket: the call that joins such a collective in a levelling, if others have launched it.
        self.joins: dict[tuple[str, int], Callable[[SharedStream, Launch, Tensor, int], None]] = {}

    def gather(self, full: Tensor, plan: BucketPlan, state: str) -> list[Any]:
        raw = full.view(torch.uint8)
        places = [raw[low * full.itemsize : high * full.itemsize] for low, high in pairwise(plan.bounds)]
        into = [(rank, place) for rank, place in zip(self._members, places, strict=True) if place.numel()]
        own = places[self._sits.position]
        what = "lend", self._link.engine, plan.index, state, raw.numel()
        lent, host = self.host.take(own.numel(), torch.uint8), self.host

        def land(posted: dict[int, Notice]) -> None:
            for rank, place in into:
                if rank != host.rank:
                    place.copy_(host.theirs(rank, posted[rank])[: place.numel()])

        try:
            lent.copy_(own)
            return [self.launch(self._gathers, what, lent, land)]
        finally:
            self.host.free(lent)

    def reduce(self, send: Tensor, plan: BucketPlan) -> list[Any]:
        what = "lend", self._link.engine, plan.index, "", send.numel() * send.itemsize
        return [self.launch(self._reductions, what, send, None)]

    def whole(self, nbytes: int) -> Whole:
        """Return one piece of memory for all ranks of the team, of at least so many bytes; all of them call it."""
        nbytes = aligned(max(nbytes, 1))
        first, number = self._members[0], self._gathers.count + 1
        if self.host.rank == first:
            self.host.make_whole(number, nbytes, [rank for rank in self._members if rank != first])
        flight = self.launch(self._gathers, ("whole", self._link.engine, -1, "", nbytes), None, None)
        self._link.wait("one copy", None, flight)
        flight.read()
        return self.host.wholes.pop((first, number))

    def tell(self, verb: str, bucket: int, nbytes: int, land: Land) -> Flight:
        """Launch a gather of a bucket in which nothing is lent: `land` is called once all ranks have launched it."""
        return self.launch(self._gathers, (verb, self._link.engine, bucket, "parameters", nbytes), None, land)

    def launch(self, stream: SharedStream, what: Launch, lent: Tensor | None, land: Land | None) -> Flight:
        flight: Flight = self._link.launch(stream, what, Flight, stream, lent, land)
        if self.host.neighbours.clogged:
            self._link.wait("a notice", None, Told(self.host))
        return flight

    def contributions(self, send: Tensor, plan: BucketPlan, sources: int) -> list[Tensor]:
        """Return each rank's contribution to this rank's shard, in rank order, once a reduction is through."""
        first, last = plan.shard(self._sits.position)
        block = self.host.block(send)
        pieces = {} if block is None or block.flight is None else block.flight.pieces(send.dtype)
        sent = [send if rank == self.host.rank else pieces[rank] for rank in self._members]
        starts = [source * plan.numel for source in range(sources)]
        return self._sits.grid.in_rank_order(
            self._sits.axis, [[piece[at + first : at + last] for piece in sent] for at in starts]
        )


class Told:
    """A handle that is through when the kernel has taken all notices: then no other rank waits for this one."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._since = time.monotonic()

    def is_completed(self) -> bool:
        return not self._host.neighbours.clogged or time.monotonic() > self._since + self._host.limit

    def wait(self, limit: timedelta | None = None) -> bool:
        ends = time.monotonic() + (0.0 if limit is None else limit.total_seconds())
        self._host.neighbours.listen()
        while self._host.neighbours.clogged and time.monotonic() < ends:
            self._host.neighbours.listen(0.01)
        if limit is None and self._host.neighbours.clogged:
            raise RuntimeError(f"a rank heeds no notice for {self._host.limit:g} s")
        return not self._host.neighbours.clogged


def join(stream: SharedStream, what: Launch, lent: Tensor | None, land: Land | None) -> None:
    """Join a collective that others have launched."""
    stream.launch(what, Flight, stream, lent, land)


def join_launched(stream: SharedStream, what: Launch, own: Tensor | None) -> None:
    """Join a collective that others have launched. own: this rank's shard if others wait for it; else zeros."""
    nbytes = what[-1]
    lent = stream.host.take(nbytes, torch.uint8)
    lent.zero_()
    if own is not None:
        lent[: own.numel()].copy_(own)
    join(stream, what, lent, None)
    stream.host.free(lent)
