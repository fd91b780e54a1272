"""The ranks of one host that share memory: how they find each other, and the notices that they send while they work.

They meet through abstract local sockets. Each rank tells the others its socket's name and a token through the store in
which all ranks met. A rank with another boot id, user or network namespace cannot reach that socket, and counts as on
another host. All ranks hear of it, so that all of them choose the same.

A notice is one message of 32 bytes. It may carry a descriptor of memory, which is how memory without a name is handed
over. The kernel delivers notices in order, wakes a sleeping receiver, and tells at once when a peer's process has
ended.

Named hazard, *a notice that an interrupt swallows*: Python runs signal handlers between any two of its instructions. So
a notice goes from the kernel to the inbox in one call of C, leaves the inbox after it was heeded, and does no harm if
it is heeded or sent twice.
"""

from __future__ import annotations

import array
import contextlib
import errno
import json
import operator
import os
import secrets
import select
import socket
import struct
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from .frames import Call

MEMORY, POSTED, READ, DROPPED, WHOLE = 1, 2, 3, 4, 5  # kinds of notices
_PACKED = struct.Struct("<BBxxIQQQ")
_ROOM = 1 << 22  # bytes of notices that the kernel is asked to keep for a peer that computes
_HELLO = 1.0  # seconds that a stranger has to say who it is
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class Notice(NamedTuple):
    """A message from one rank to another about shared memory or a collective."""

    kind: int
    stream: int = 0  # which of the streams that both are in
    what: int = 0  # a checksum of the collective's description
    number: int = 0  # of the collective in its stream
    block: int = 0  # of the sender's memory
    nbytes: int = 0


class Descriptor:
    """An open descriptor of memory, which closes once no rank has to be told of it any more."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self.number)


class Line:
    """The connection to one rank."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _ROOM)
        self.connection = connection
        self.gone = False
        self.outbox: deque[tuple[bytes, Descriptor | None]] = deque()
        self.inbox: deque[tuple[bytes, list[Any], int, Any]] = deque()
        flags = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
        receive = partial(connection.recvmsg, _PACKED.size, socket.CMSG_SPACE(4), flags)
        self._coming = takewhile(operator.itemgetter(0), iter(receive, None))  # to the end of the connection

    def __del__(self) -> None:
        self.connection.close()

    def flush(self) -> None:
        while self.outbox:
            notice, memory = self.outbox[0]
            rights = [] if memory is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, _integers(memory.number))]
            try:
                self.connection.sendmsg([notice], rights)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno == errno.ETOOMANYREFS:  # descriptors on their way: their receivers take them soon
                    return
                self.gone = True
                self.outbox.clear()
                return
            self.outbox.popleft()

    def receive(self) -> None:
        for _ in range(2):  # notices that a peer sent before a reset come after the error of the reset
            try:
                self.inbox.extend(self._coming)
            except BlockingIOError:
                return
            except OSError:
                continue
            break
        self.gone = True


class Neighbours:
    """This rank's connections to the ranks that it shares memory with."""

    def __init__(self, connections: dict[int, socket.socket]) -> None:
        """connections: by rank."""
        self.lines = {rank: Line(connection) for rank, connection in connections.items()}
        self.heard: Callable[[int, Notice, int], None] = lambda rank, notice, memory: None
        self._ranks = {line.connection.fileno(): rank for rank, line in self.lines.items()}
        self._poll = select.poll()
        for number in self._ranks:
            self._poll.register(number, select.POLLIN)
        self._listens: Call | None = None
        _all.add(self)

    def tell(self, rank: int, notice: Notice, memory: Descriptor | None = None) -> None:
        line = self.lines[rank]
        if not line.gone:
            line.outbox.append((_PACKED.pack(*notice), memory))

    @property
    def clogged(self) -> bool:
        """True if the kernel has not taken some notices yet, because a peer has not read those before."""
        return any(line.outbox for line in self.lines.values())

    def listen(self, seconds: float = 0.0) -> None:
        """Send waiting notices, and heed those that have come. If none has come, wait at most `seconds`."""
        if self._listens is not None and self._listens.running():
            return  # inside itself, in a signal's handler
        self._listens = Call()
        for line in self.lines.values():
            line.flush()
        for rank, line in self.lines.items():  # notices that an interrupt has left in the inbox
            self._heed(rank, line)
        wait = min(seconds, 0.01) if self.clogged else seconds
        for number, _ in self._poll.poll(1000 * wait):
            line = self.lines[self._ranks[number]]
            line.receive()
            self._heed(self._ranks[number], line)
            if line.gone:
                with contextlib.suppress(KeyError):  # an interrupted call has done it
                    self._poll.unregister(number)
        self._listens = None

    def _heed(self, rank: int, line: Line) -> None:
        while line.inbox:
            data, rights, *_ = line.inbox[0]
            memory = array.array("i", rights[0][2])[0] if rights else -1
            self.heard(rank, Notice(*_PACKED.unpack(data)), memory)
            line.inbox.popleft()
            if memory >= 0:
                os.close(memory)

    def close(self) -> None:
        for line in self.lines.values():
            line.connection.close()


_all: weakref.WeakSet[Neighbours] = weakref.WeakSet()


def _forked() -> None:
    """Close the connections in a forked child: it is no rank, and its copies would hide the end of its parent."""
    for neighbours in _all:
        neighbours.close()


os.register_at_fork(after_in_child=_forked)


def _integers(*numbers: int) -> bytes:
    return array.array("i", numbers).tobytes()


# --- how they find each other -----------------------------------------------------------------------------------------


def meet(
    store: Any, at: str, rank: int, ranks: int, peers: Sequence[int], memory: Callable[[], None], limit: float
) -> tuple[Neighbours | None, str]:
    """Connect to `peers`; or return None and the reason why not, which all ranks hear: then none connects.

    at: a name in the store that has not been used yet. memory: tries whether there can be memory to share, and raises
    `OSError` where not. Waits for all ranks, `limit` seconds at most.
    """
    deadline = time.monotonic() + limit
    server, own, why = None, ("", -1, "", secrets.token_hex(16)), ""
    try:
        memory()
        server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        server.bind(f"\0zeroshard-{secrets.token_hex(16)}")
        server.listen(max(len(peers), 16))
        own = (_BOOT.read_text().strip(), os.geteuid(), server.getsockname().hex(), own[3])
    except (OSError, AttributeError) as error:
        why = f"rank {rank} cannot share memory: {error}"
    told = _exchange(store, f"{at}/place", rank, ranks, (*own, why), deadline)
    connections: dict[int, socket.socket] = {}
    found: Neighbours | None = None
    try:
        why = why or _elsewhere(own, told, peers)
        for peer in [peer for peer in peers if peer < rank and not why]:
            try:
                connections[peer] = _call(told[peer], rank)
            except OSError as error:
                why = f"rank {rank} cannot reach rank {peer} by a local socket ({error.strerror or error}): another "
                why += "network namespace, or container"
        whys = [each for each in _exchange(store, f"{at}/reached", rank, ranks, why, deadline) if each]
        if whys:
            return None, whys[0]
        assert server is not None
        while missing := [peer for peer in peers if peer > rank and peer not in connections]:
            server.settimeout(max(deadline - time.monotonic(), 0.01))
            try:
                peer, connection = _accept(server, own[3])
            except TimeoutError:
                raise OSError(errno.ETIMEDOUT, f"ranks {missing} did not come to share memory") from None
            if peer in missing:
                connections[peer] = connection
        found = Neighbours(connections)
        return found, ""
    finally:
        for connection in connections.values() if found is None else ():
            connection.close()
        if server is not None:
            server.close()


def _exchange(store: Any, at: str, rank: int, ranks: int, mine: Any, deadline: float) -> list[Any]:
    """Put `mine` into the store, and return what every rank has put there, in rank order."""
    keys = [f"{at}/{each}" for each in range(ranks)]
    store.set(keys[rank], json.dumps(mine))
    pause = 0.001
    while not store.check(keys):
        if time.monotonic() > deadline:
            raise OSError(errno.ETIMEDOUT, "the ranks did not say in time whether they can share memory")
        time.sleep(pause)
        pause = min(2 * pause, 0.1)
    return [json.loads(store.get(key)) for key in keys]


def _elsewhere(own: Sequence[Any], told: Sequence[Sequence[Any]], peers: Sequence[int]) -> str:
    """Return why a peer cannot share memory with this rank; "" if all can."""
    for peer in peers:
        boot, user, _, _, why = told[peer]
        if why:
            return str(why)
        if boot != own[0]:
            return f"rank {peer} is on another host"
        if user != own[1]:
            return f"rank {peer} is another user's"
    return ""


def _call(place: Sequence[Any], rank: int) -> socket.socket:
    """Connect to a peer, and send it the token that it gave out, and this rank's number."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(_HELLO)
        connection.connect(bytes.fromhex(place[2]))
        connection.send(f"{place[3]} {rank}".encode())
        return connection
    except BaseException:
        connection.close()
        raise


def _accept(server: socket.socket, token: str) -> tuple[int, socket.socket]:
    """Accept the next connection, and return its rank; -1 for a stranger: any program of this host can connect."""
    connection, _ = server.accept()
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    connection.settimeout(_HELLO)
    with contextlib.suppress(OSError, ValueError):
        said, rank = connection.recv(128).decode().split()
        if secrets.compare_digest(said, token) and struct.unpack("3i", credentials)[1] == os.geteuid():
            return int(rank), connection
    connection.close()
    return -1, connection
