"""Detection of lost and silent ranks, and of what each rank is doing, when a collective does not complete.

Every rank keeps a thread asleep in `accept`, on a socket of its own. A rank whose collective failed asks all peers
concurrently, by messages outside the collectives, what they are doing:

    refused, or cut off    the process has ended
    no answer              it is stopped, or holds the interpreter, or its host cannot be reached
    an answer              what it waits for, or that it waits for no rank; and the error it had, if it had one

A rank that finds a culprit tells the others, which may be waiting for a rank that is alive; they look at `alarm` while
they wait. While nothing is wrong, no rank asks, except in a save that takes long; so the watch costs a sleeping thread.
The ranks learn of each other's sockets through the store in which they met, before anything else. So a rank that ends
from then on is named, even while the ranks make connections.

A question carries the token that the asked rank gave out when the group was made. Anything else that comes to that port
is not answered.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import secrets
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn

from ..errors import PeerError
from ..finalizers import at_end_of
from .departed import Departed

log = logging.getLogger("zeroshard")

PATIENCE = 10.0  # seconds, after which a rank that waits for others to come says so
LONG = 5.0  # seconds, after which a rank says how far it is
ANSWERS = 1.0  # seconds that a peer has to answer
AT_ONCE = 256  # questions that a rank has under way
TRIES = 5  # questions in a row that a peer must leave unanswered, where the network may have lost one
_LONGEST = 1 << 20  # bytes of a question or an answer

GONE = "is gone: its process has ended"
ENDED = "has ended: its program came to its end, without an error that it knew of"
SILENT = "is silent: it is stopped, holds the interpreter, or its host cannot be reached"


Address = tuple[str, int, str]  # host, port, token


class Answer(NamedTuple):
    """A peer's answer about itself. `silence` is "" if it answered, else why it did not."""

    silence: str
    doing: str = ""
    waits: bool = False  # for other ranks, in a collective
    failed: bool = False  # one of its collectives did not complete either
    posted: str = ""  # its posting for the levelling that it was asked about
    left: Departed | None = None  # what it has left, if it was looked at
    launched: tuple[int, ...] = ()  # how many collectives it has launched, by stream: see `Groups.launched`
    sums: int = 0  # that it has begun in the backward that is running
    parted: str = ""  # the last backward in which it has learnt that the ranks differ


class Watch:
    """This rank's end of the watch: it asks peers, and answers them on a thread of its own."""

    def __init__(self, rank: int, host: str, about: Callable[[], dict[str, Any]]) -> None:
        """about: what this rank is doing, as the fields of `Answer`; called on the watch's own thread."""
        self.rank = rank
        self.alarm: dict[int, str] = {}  # rank -> what became of it: none of these will come to any collective
        self.peers: dict[int, Address] = {}  # by rank: those that have come so far
        self.called = 0  # the last levelling that a rank has called for: see `launch_log.py`
        self.posted: dict[tuple[int, str], str] = {}  # this rank's postings, by levelling and subject
        self.alarmed: Callable[[], object] = lambda: None  # called at an alarm, on the watch's own thread
        self.summoned: Callable[[int], object] = lambda number: None  # called for each call to a levelling, there too
        # By levelling, the ranks that others have stopped waiting for, and why: all ranks come to that levelling.
        self.left: dict[int, dict[int, str]] = {}
        # Called on that thread too, when a rank looks at this one: see `look` for what it is called with.
        self.looked_at: Callable[[int, int, Mapping[str, int]], Departed] = lambda rank, engine, launched: Departed()
        self.ended: frozenset[int] = frozenset()  # ranks whose programs came to their ends
        self.unheard: dict[int, int] = {}  # by rank, how many questions in a row it has not answered: see `lost_ranks`
        self._about = about
        # All ranks may ask at once; the kernel has a limit of its own.
        self._server = socket.create_server((host, 0), backlog=4096)
        self.address = (host, int(self._server.getsockname()[1]), secrets.token_hex(8))
        thread = threading.Thread(target=_serve, args=(self._server, weakref.ref(self)), name="watch", daemon=True)
        thread.start()
        # A blocked accept returns when the socket is shut down, not when it is closed.
        self.close = at_end_of(self, _close, self._server)
        _watches.add(self)

    def ask(self, ranks: Iterable[int] = ()) -> dict[int, Answer]:
        """Ask these peers, by default every one, and return the answers by rank."""
        return self._named(_ask({rank: self.peers[rank] for rank in ranks}, {})) if ranks else self._send({})

    def tell(self, culprits: dict[int, str]) -> None:
        """Say to every peer which ranks will not come any more, and why."""
        self._send({"alarm": culprits})

    def look(self, ranks: Iterable[int], own: int, engine: int, launched: Mapping[str, int]) -> dict[int, Answer]:
        """Ask ranks what they have left, and return the answers by rank.

        own: this rank's number in the program. engine: the number of the one that waits. launched: this rank's
        collectives so far, by the program's groups.
        """
        message = {"looks": own, "engine": engine, "launched": {**launched}}
        return self._named(_ask({rank: self.peers[rank] for rank in ranks}, message))

    def say_left(self, number: int, left: dict[int, str]) -> None:
        """Tell every peer, before this rank's program hears of it, that this rank no longer waits for these ranks.

        number: the levelling that all ranks come to next.
        """
        self._note_left(number, left)
        self._send({"left": left, "before": number})

    def _note_left(self, number: int, left: dict[int, str]) -> None:
        """Keep the first message for each levelling. When a rank leaves something before levelling n, all ranks have
        come to levelling n - 2: so what was left before that one, or an earlier one, is forgotten."""
        self.left.setdefault(number, left)
        for before in [each for each in tuple(self.left) if each < number - 1]:
            self.left.pop(before, None)  # the watch's own thread may have done so

    def say_ended(self) -> None:
        """Tell every peer that this rank's program comes to its end, and will not answer any more."""
        self._send({"ended": self.rank})

    def _send(self, message: dict[str, Any]) -> dict[int, Answer]:
        others = {rank: address for rank, address in self.peers.items() if rank != self.rank}
        return self._named(_ask(others, message))

    def _named(self, answers: dict[int, Answer]) -> dict[int, Answer]:
        """Mark, among the ranks that are gone, those whose programs came to a normal end."""
        gone = {rank for rank, answer in answers.items() if answer.silence == GONE}
        return answers | dict.fromkeys(gone & self.ended, Answer(ENDED))

    def call(self, number: int, what: str, ranks: Iterable[int]) -> dict[int, Answer]:
        """Call ranks to a levelling, and return their answers, with what each has posted about `what`."""
        return _ask({rank: self.peers[rank] for rank in ranks}, {"level": number, "what": what})

    def all_posted(
        self,
        number: int,
        what: str,
        ranks: int,
        limit: float,
        passed: str = "",
        wanting: Callable[[list[int]], object] = lambda absent: None,
    ) -> list[str]:
        """Return what every rank has posted for a levelling, once all have.

        passed: what counts as the posting of a rank that is gone. Without it a lost rank raises `RuntimeError`, as does
        one that has not posted within `limit` seconds. wanting: called now and then with the ranks that have not.
        """
        heard, deadline = {self.rank: self.posted[number, what]}, time.monotonic() + limit
        asks = time.monotonic() + ANSWERS
        while absent := [rank for rank in range(ranks) if rank not in heard]:
            answers = self.call(number, what, absent)
            heard |= {rank: answer.posted for rank, answer in answers.items() if answer.posted}
            gone = [rank for rank, answer in answers.items() if answer.silence == GONE or rank in self.alarm]
            if passed:
                heard |= dict.fromkeys(gone, passed)
            elif self.alarm or gone:
                raise RuntimeError(f"ranks {absent} did not come to levelling {number}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"ranks {absent} did not come to levelling {number}")
            if len(heard) < ranks and time.monotonic() > asks:
                wanting([rank for rank in absent if rank not in heard])
                asks = time.monotonic() + ANSWERS
            time.sleep(0.01 * (len(heard) < ranks))
        return [heard[rank] for rank in range(ranks)]

    def blame(self) -> dict[int, str]:
        """Return the ranks that will not come any more, and why, as far as peers can be asked."""
        found = self.alarm or {rank: answer.silence for rank, answer in self.ask().items() if answer.silence}
        return self.alarm or found  # a rank that gave the alarm meanwhile, and then ended, is not the one to blame

    def lost_ranks(self) -> dict[int, str]:
        """Return `blame` for a wait that only takes long: a silent rank is lost after `TRIES` unanswered questions."""
        found = self.blame()
        self.unheard = {rank: self.unheard.get(rank, 0) + 1 for rank in found if found[rank] == SILENT}
        return {rank: what for rank, what in found.items() if self.unheard.get(rank, TRIES) >= TRIES}

    def hear(self, message: dict[str, Any]) -> dict[str, Any]:
        """Take a peer's message, and return the answer to it."""
        if message.get("token") != self.address[2]:
            return {}
        if told := message.get("alarm"):
            self.alarm = {int(rank): str(what) for rank, what in told.items()} | self.alarm
            self.alarmed()
        if "ended" in message:
            self.ended |= {int(message["ended"])}
        if told := message.get("left"):
            self._note_left(int(message["before"]), {int(rank): str(why) for rank, why in told.items()})
        if number := int(message.get("level", 0)):
            self.called = max(self.called, number)
            self.summoned(number)
        told = self._about() | {"posted": self.posted.get((number, str(message.get("what", ""))), "")}
        if "looks" in message:
            launched = {str(name): int(number) for name, number in message.get("launched", {}).items()}
            told |= {"left": self.looked_at(int(message["looks"]), int(message["engine"]), launched)}
        return told


_watches: weakref.WeakSet[Watch] = weakref.WeakSet()


def _forked() -> None:
    """Close the watch in a forked child: it does not speak for its parent, and its open port would outlive that."""
    for watch in _watches:
        watch.peers = {}
        watch._server.close()  # its own descriptor; to shut the socket down would end the parent's


os.register_at_fork(after_in_child=_forked)


# --- before there are groups of their own -----------------------------------------------------------------------------


def come_together(
    watch: Watch, store: Any, at: str, ranks: int, cut_off: Callable[[], bool], limit: float, alike: str = ""
) -> None:
    """Learn every rank's address. Raises `PeerError` if a rank has ended before it came, or cannot go on.

    at: a name in the store that has not been used yet. alike: what every rank must say. cut_off: tells if a
    connection to any rank has ended, the only trace of a rank that died before it came.
    """
    keys, trouble, everyone = [f"{at}/{rank}" for rank in range(ranks)], f"{at}/trouble", f"{at}/everyone"
    store.set(keys[watch.rank], json.dumps([watch.address, alike]))
    if store.add(f"{at}/came", 1) == ranks:  # the last one reads what all have set: the others ask for one key each
        store.set(everyone, json.dumps([json.loads(store.get(key)) for key in keys]))
    deadline, pause, ended, said = time.monotonic() + limit, 0.001, False, False
    while not (complete := store.check([everyone])):
        ended = cut_off()
        if ended or watch.alarm or store.check([trouble]) or time.monotonic() > deadline:
            break
        if not said and time.monotonic() > deadline - limit + PATIENCE:
            said = True
            absent = [rank for rank, key in enumerate(keys) if not store.check([key])]
            log.warning(
                "rank %s waits in shard(...) for ranks %s, %g s at most (Comm(timeout=...)): they have not come to it",
                watch.rank, absent, limit,
            )  # fmt: skip
        time.sleep(pause)
        pause = min(2 * pause, 0.1)
    if complete:
        told = dict(enumerate(json.loads(store.get(everyone))))
    else:
        told = {rank: json.loads(store.get(key)) for rank, key in enumerate(keys) if store.check([key])}
    watch.peers = {rank: tuple(address) for rank, (address, _) in told.items()}
    if store.check([trouble]):
        raise PeerError("another rank cannot shard its model", got=store.get(trouble).decode())
    if not complete:
        absent = [rank for rank in range(ranks) if rank not in told]
        late = "has not come to shard(...)" + (", and one that has not has ended" if ended else "")
        lose(watch, watch.blame() or dict.fromkeys(absent, GONE if ended and len(absent) == 1 else late))
    if any(said != alike for _, said in told.values()):
        words = ", ".join(f"rank {rank} {said}" for rank, (_, said) in told.items())
        raise PeerError(
            "the ranks are given different meshes or transports", expected="the same on every rank", got=words
        )


def cannot_come(store: Any, at: str, rank: int, why: str) -> None:
    """Tell the ranks that come together that this one does not, and why."""
    store.set(f"{at}/trouble", f"rank {rank}: {why}")


def attend(watch: Watch, call: Callable[[], Any], say: Callable[[float], object] = lambda waited: None) -> Any:
    return Attended(call).attend(watch, say)


class Attended:
    """A call that waits for other ranks and could not be ended, so it runs on a thread that no interrupt ends."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._ended: list[Any] = []
        self._thread = threading.Thread(target=self._work, args=(call,), name="groups", daemon=True)
        self._thread.start()

    def _work(self, call: Callable[[], Any]) -> None:
        try:
            self._ended.append((call(), None))
        except BaseException as error:
            self._ended.append((None, error))

    def attend(self, watch: Watch, say: Callable[[float], object] = lambda waited: None) -> Any:
        """Wait for the call and return its value. Raises `PeerError`, and gives the call up, if a rank has ended.

        say: called with the seconds waited so far, now and then, and more and more seldom, once they are over `LONG`.
        """
        begun = asked = time.monotonic()
        patience = ANSWERS
        while self._thread.is_alive() and not watch.alarm:
            self._thread.join(0.1)
            if time.monotonic() > asked + patience:
                if lost := watch.lost_ranks():
                    lose(watch, lost)
                if (waited := time.monotonic() - begun) > LONG:
                    say(waited)
                asked, patience = time.monotonic(), ANSWERS if watch.unheard else 2 * patience
        value, error = self._ended[0] if self._ended else (None, None)
        if self._ended and error is None:
            return value
        if (lost := watch.blame()) or error is None:
            lose(watch, lost, error)
        watch.tell({watch.rank: f"gave up: {error}"})
        raise error


def still_waits() -> bool:
    """Tell if a call that was given up still waits: it holds the store and the process group until its time-out."""
    return any(thread.name == "groups" for thread in threading.enumerate())


def lose(watch: Watch, lost: dict[int, str], error: BaseException | None = None) -> NoReturn:
    """Tell all ranks that came that these are lost, and raise `PeerError`."""
    if not watch.alarm:
        watch.tell(lost)
    raise PeerError(
        "the ranks could not come together: " + "; ".join(f"rank {rank} {what}" for rank, what in sorted(lost.items())),
        where=f"rank {watch.rank}: in shard(...), with ranks {sorted(watch.peers)} there",
        got=error,
        instead="read the first error among all ranks' output; every rank calls shard(...), and Comm(timeout=...) sets "
        "how long they wait for each other. End a rank that has not come: it hears of this only once it does, or when "
        "what it waits for in torch.distributed runs out of time",
    ) from error


class _Asked:
    """A question on its way to one peer, and what has come of its answer."""

    def __init__(self, rank: int, address: Address) -> None:
        self.rank, (host, port, self.token) = rank, address
        self.until = time.monotonic() + ANSWERS
        self.answer = b""
        self.connection = socket.socket()
        self.connection.setblocking(False)
        number = self.connection.connect_ex((host, port))
        if number not in (0, errno.EINPROGRESS):
            self.connection.close()
            raise OSError(number, os.strerror(number))

    def send(self, message: dict[str, Any]) -> None:
        if number := self.connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(number, os.strerror(number))
        self.connection.sendall(json.dumps({**message, "token": self.token}).encode() + b"\n")

    def hear(self) -> Answer | None:
        """Take in what has come; return the answer once all of it has."""
        part = self.connection.recv(_LONGEST)
        self.answer += part
        more = part and not part.endswith(b"\n") and len(self.answer) < _LONGEST
        return None if more else _understood(self.answer)


def _ask(addresses: dict[int, Address], message: dict[str, Any]) -> dict[int, Answer]:
    """Ask all addresses on this thread, for an interpreter on its way out cannot start another; `AT_ONCE` at a time,
    for a process may often have no more than 1,024 files open."""
    answers: dict[int, Answer] = {}
    unasked = [*addresses][::-1]
    with selectors.DefaultSelector() as selector:

        def answered(asked: _Asked, answer: Answer) -> None:
            answers[asked.rank] = answer
            selector.unregister(asked.connection)
            asked.connection.close()

        try:
            while unasked or selector.get_map():
                while unasked and len(selector.get_map()) < AT_ONCE:
                    rank = unasked.pop()
                    try:
                        asked = _Asked(rank, addresses[rank])
                        selector.register(asked.connection, selectors.EVENT_WRITE, asked)
                    except OSError as error:
                        if error.errno in (errno.EMFILE, errno.ENFILE) and selector.get_map():
                            unasked.append(rank)  # asked once one of these has ended
                            break
                        answers[rank] = _failed(error)
                under_way: list[_Asked] = [key.data for key in selector.get_map().values()]
                now = time.monotonic()
                for asked in under_way:
                    if asked.until <= now:
                        answered(asked, Answer(SILENT))
                for key, event in selector.select(max(min((e.until for e in under_way), default=now) - now, 0.0)):
                    asked = key.data
                    try:
                        if event & selectors.EVENT_WRITE:
                            asked.send(message)
                            selector.modify(asked.connection, selectors.EVENT_READ, asked)
                        elif (answer := asked.hear()) is not None:
                            answered(asked, answer)
                    except OSError as error:
                        answered(asked, _failed(error))
        finally:
            for key in [*selector.get_map().values()]:
                key.data.connection.close()
    return answers


def _failed(error: OSError) -> Answer:
    ended = isinstance(error, (ConnectionRefusedError, ConnectionResetError, BrokenPipeError))
    return Answer(GONE if ended else f"cannot be reached: {error.strerror or error}")


def _understood(line: bytes) -> Answer:
    if not line:
        return Answer(GONE)  # it ended between the question and the answer
    with suppress(ValueError, TypeError, KeyError):
        told = json.loads(line)
        left = Departed(*told["left"]) if "left" in told else None
        said = str(told["doing"]), bool(told["waits"]), bool(told["failed"]), str(told.get("posted", ""))
        launched = tuple(int(each) for each in told.get("launched", ()))
        return Answer("", *said, left, launched, int(told.get("sums", 0)), str(told.get("parted", "")))
    return Answer("cannot be asked: another program answers at its address")


def _serve(server: socket.socket, watch: weakref.ref[Watch]) -> None:
    while True:
        try:
            connection, _ = server.accept()
        except OSError:
            return
        with suppress(OSError, ValueError, TypeError, AttributeError), connection:
            connection.settimeout(ANSWERS)
            message = json.loads(_line(connection))
            if (answer := _answer(watch, message)) is None:
                return
            connection.sendall(answer)


def _answer(watch: weakref.ref[Watch], message: dict[str, Any]) -> bytes | None:
    own = watch()  # not held after this call, because the calling thread then sleeps in `accept`
    return None if own is None else json.dumps(own.hear(message)).encode() + b"\n"


def _line(connection: socket.socket) -> bytes:
    received = b""
    while not received.endswith(b"\n") and len(received) < _LONGEST:
        part = connection.recv(_LONGEST)
        if not part:
            break
        received += part
    return received


def _close(server: socket.socket) -> None:
    with suppress(OSError):
        server.shutdown(socket.SHUT_RDWR)
    server.close()


def host_towards(peer: tuple[str, int] | None) -> str:
    """Return this host's address on the way to `peer`, or the loopback if there is none. Sends nothing."""
    if peer is not None:
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(peer)
            return str(probe.getsockname()[0])
    return "127.0.0.1"
