"""Agreement between all ranks of a model, and the facts that one rank tells the others of itself.

    verb        what every rank learns                           over torch.distributed (`process_group.py`)
    meet        that all are at the same thing                   one exchange of a row of integers
    poll        the same, and every rank's own integers          one exchange of a row of integers
    flags       the largest of each rank's small numbers         all_reduce of CPU tensors over gloo
    maximum     elementwise maximum                              all_reduce, of a device's tensors in its queue
    total       elementwise sum of integers                      the same
    describe    every rank's facts, as JSON                      all_gather of their lengths, then of the text
    broadcast   one rank's tensor                                broadcast

A row has the same size on every rank (see *sizes must meet* in `process_group.py`), and says what the rank is about to
do. The verbs without a row follow a meeting, which has agreed on their sizes. Ranks that do different things all raise,
and each hears what the others are at.

In the usual case all rows are equal, and then no rank needs to see all of them. So beyond a few ranks the rows travel
along the axes of a grid (`axes`): the messages of a rank then grow with a sum of small factors and not with the number
of ranks. Only if rows differ are all of them sent to every rank.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from ..device import captured
from ..errors import Error, PeerError, StateError, UserError
from ..events import Event, Ledger, ends
from ..layout.mesh import Grid, axes, messages
from ..layout.partition import BucketPlan
from .frames import Call
from .transport import Team, count

# engine, meeting, its number, completed steps, three integers of the meeting's own, levellings, and flag bits
ROW = 9
LOADING, TELLING, LEAVING = "loading", "telling the others", "leaving gathered()"  # meetings
SENT = "buffers that are sent: "  # begins the facts of a forward about buffers that rank 0 sends
FROZEN = "frozen parameters: "  # begins a rank's list of what it does not train
WROTE = "a forward wrote "  # begins each fact of a step about weights that forwards wrote
OPTION = "optimizer option "  # begins each fact of a step about an option of its groups


def lines(ranks: int, rank: int) -> list[list[int]]:
    """Return, for each axis of the grid, the ranks that lie on one line with this rank, in order."""
    lengths = axes(ranks)
    grid = Grid(tuple((str(number), length) for number, length in reversed([*enumerate(lengths)])))
    return [[*grid.line(rank, str(number))] for number in range(len(lengths))]


@dataclasses.dataclass
class Progress:
    """The progress of one rank, which it tells the others if something is wrong."""

    steps: int = 0  # that optimizers have completed
    turn: tuple[int, int] = (0, 0)  # in the order of gathers: (launched, of how many)
    trouble: str = ""  # an exception that this rank alone may have had
    left: str = ""  # that exception, once it has ended a forward, which all ranks then ended together
    units: list[str] = dataclasses.field(default_factory=list)  # by bucket, the unit's name
    met: str = ""  # the last meeting
    awaited: tuple[str, int | None] | None = None  # the collective it waits for, and of which bucket

    def words(self, phase: str) -> str:
        """Describe this progress for an error. phase: of the ledger."""
        moment = f"step {self.steps + 1}, in {phase if phase != 'between' else 'the loop'}"
        trouble = f"; {self.trouble}" if self.trouble else ""
        if awaited := self.awaited:  # read once: the watch's thread asks too
            verb, bucket = awaited
            unit = "" if bucket is None else f" of unit {self._unit(bucket)!r}"
            turn = f", turn {self.turn[0]} of {self.turn[1]} of the script" if verb == "gather" and self.turn[1] else ""
            return f"{moment}, waiting for {verb}{unit}{turn}{trouble}"
        return f"{moment}, not waiting for other ranks; its last meeting was {self.met}{trouble}"

    def _unit(self, bucket: int) -> str:
        return self.units[bucket] if bucket < len(self.units) else f"bucket {bucket}"


def refuse_forked(process: int, rank: int) -> None:
    """Refuse to work in a forked child, which is no rank: it has its parent's connections and none of its threads."""
    if os.getpid() != process:
        raise StateError(
            "a forked child cannot use its parent's sharded model",
            where=f"process {os.getpid()}, a child of rank {rank}, process {process}",
            instead="use it in the process that called shard(...); where children compute, give them a copy of the "
            "weights (with zero.gathered(): model.state_dict()), or make them with the spawn method",
        )


class Party(Protocol):
    """The part of an engine that a levelling (all ranks recover, `launch_log.py`) may find in the middle of work."""

    def unsettled(self) -> bool:
        """Tell if a reduction or a transaction is under way."""

    def left(self) -> str:
        """Return, in words, what an exception has ended here that no levelling has ended yet. Called on any thread."""

    def edits(self) -> str:
        """Return the edits of gradients by numbers, as text that ranks compare."""

    def plan(self, index: int) -> BucketPlan: ...

    def travelling(self, index: int) -> BucketPlan:
        """Return the plan of a bucket, counted in the elements that its gradients are sent as."""

    def recovery_copy(self, bucket: int, state: str) -> Tensor | None:
        """Return a whole bucket of a state, 1-D, with this rank's shard valid, because other ranks wait for that."""

    def levelled(self, drop: bool) -> None:
        """Reset the engine after a levelling: nothing is under way any more. drop: drop all gradients."""

    def spread(self) -> None:
        """Send owners' updates to every rank once more, because they were cut off on their way."""


class Group:
    """One rank's handle on the group of all ranks of a model, and its counts of messages. This class sends nothing.

    With one rank there is nothing to agree on. With more, it is one rank of a simulation, whose peers all do the same.
    It has many methods, because all that ranks agree on goes through it: the verbs, and the facts that they carry.
    """

    backend: str = "none"

    def __init__(self, team: Team, rank: int = 0, ranks: int = 1, axis_team: Team | None = None) -> None:
        """team: the ranks that shard together. axis_team: the ranks that shard the parameters along an axis."""
        self.ledger: Ledger = team.ledger
        self.device: torch.device = team.device
        self.team = team
        self.axis_team = axis_team or team
        self.process = os.getpid()
        self.rank = rank
        self.ranks = ranks
        self.sources = team.seat.sources  # how many ranks' gradients are added up
        self.progress = Progress()
        self.failed: Error | None = None  # the error that other ranks are to hear of at the next agreement
        self.news = False  # were fragments written on this rank? The others hear of it at the next meeting
        self.heard = False  # True if any rank had such news at the last meeting
        self._party: weakref.ref[Party] | None = None  # none while the model is being sharded
        self.numbers: dict[str, int] = defaultdict(int)  # of meetings, by kind
        self._inside: Call | None = None  # the function under way whose several meetings belong together
        self.left = False  # True if an exception ended such a function between two of its meetings
        self.torn = ""  # why this rank's weights do not belong to a completed step
        self.crossed: tuple[int, str] | None = None  # id and name of a thread that found another thread in a call
        self.signal = 0  # number of a signal that came to this rank, for all to hear of
        self.signalled = 0  # the signal of any rank

    @property
    def lost(self) -> bool:
        """True if a collective failed for good: then no other can succeed."""
        return False

    def give_up(self, error: BaseException) -> None:
        """Tell other ranks not to wait for this one, which cannot take part in a collective that they may be in."""

    def check_process(self) -> None:
        refuse_forked(self.process, self.rank)

    def check_stream(self) -> None:
        """Raise `StateError` while a graph of the device is recorded."""
        if captured(self.device):
            raise StateError(
                "a sharded model's forward, backward and step cannot be captured as a graph of the device",
                where=f"rank {self.rank}, inside torch.{self.device.type}.graph(...) or what captures as it does",
                expected="steps that the host runs: ranks meet on it, it counts gradients and gives memory back, and a "
                "graph repeats kernels alone",
                instead="the same loop without a graph; torch.compile of blocks launches fewer kernels",
            )

    @property
    def party(self) -> Party | None:
        return None if self._party is None else self._party()

    @party.setter
    def party(self, party: Party) -> None:
        self._party = weakref.ref(party)  # parameters refer to this, and must not keep the engine alive

    def number(self, what: str) -> int:
        """Count the next meeting of a kind before it is sent, so that no two share a number, and return its number."""
        self.numbers[what] += 1
        return self.numbers[what]

    @property
    def interrupted(self) -> bool:
        """True if an exception ended something in which other ranks wait for this one."""
        return self.left

    @property
    def missed(self) -> bool:
        """True if other ranks have given up a wait because this rank did not come."""
        return False

    @property
    def launched(self) -> tuple[int, int]:
        """The numbers of collectives launched and of levellings so far."""
        return 0, 0

    def level(self, why: str) -> None:
        """End all that is under way, on all ranks, because an exception ended it on this one."""
        self.left = False
        if self.party is not None:
            self.party.levelled(self.party.unsettled())

    @contextlib.contextmanager
    def as_one(self) -> Iterator[None]:
        """Wrap verbs that belong together: after an exception between the first and the last, `level` must follow."""
        (launched, levelled), around, self._inside = self.launched, self._inside, Call(frame=sys._getframe(2))
        try:
            yield
        except PeerError:  # then nothing is under way, or the group is lost for good
            raise
        except BaseException:
            self.left |= self.launched[0] != launched and self.launched[1] == levelled
            raise
        finally:
            self._inside = around

    def cross(self) -> NoReturn:
        """Raise on this thread because another one is in a call of the same model; that one raises at its next call."""
        self.crossed = threading.get_ident(), threading.current_thread().name
        self._refuse_threads(self.crossed[1])

    def hear_crossed(self) -> None:
        """Raise if another thread found this one in a call of the same model."""
        if (crossed := self.crossed) is not None and crossed[0] != threading.get_ident():
            self.crossed = None
            self._refuse_threads(crossed[1])

    def _refuse_threads(self, other: str) -> NoReturn:
        raise StateError(
            "two threads use one sharded model at the same time",
            where=f"rank {self.rank}, noticed by thread {other!r}, told to thread {threading.current_thread().name!r}",
            expected="one thread at a time: weights, gradients and messages between ranks are of one call",
            instead="evaluate between two steps, on the thread that trains; or give the other thread a copy of the "
            "model, from with zero.gathered(): model.state_dict()",
        )

    def refuse_within(self, *, busy: bool = False, around: bool = True) -> None:
        """Refuse to begin a collective operation inside another. busy: one runs. around: look for `as_one` too."""
        self.hear_crossed()
        if around and self._inside is not None and self._inside.elsewhere():
            self.cross()
        if busy or (around and self._inside is not None and self._inside.running()):
            raise StateError(
                "a call of zeroshard's inside another one, in which other ranks take part",
                where=f"rank {self.rank}, which met the others last at {self.progress.met}",
                expected="handlers of signals that only note the signal: they run wherever it finds the program",
                instead="zero.save_on(signal.SIGUSR1, path=...), and all ranks save at the end of a step",
            )

    def broadcast(self, tensor: Tensor, source: int = 0, *, ahead: bool = False) -> None:
        """Copy the source rank's tensor to all ranks. ahead: where a device's queue can wait for it, this thread
        does not."""
        nbytes = tensor.numel() * tensor.itemsize
        if nbytes:
            mine = self.rank == source
            sent, received = (nbytes, 0) if mine else (0, nbytes)
            event = count(self.ledger, self.ranks, "broadcast", nbytes, sent, received)
            self._broadcast(tensor, source, ahead)
            ends(event)

    def _broadcast(self, tensor: Tensor, source: int, ahead: bool) -> None:
        pass

    def team_of(self, plan: BucketPlan) -> Team:
        """Return the team of ranks that shard a bucket."""
        return self.axis_team if plan.axis else self.team

    def give_all(self, tensor: Tensor, plan: BucketPlan, source: int = 0) -> None:
        """Copy the source rank's tensor, a whole bucket, to all ranks.

        For a bucket along an axis, every team gets the tensor of its own rank at the source's position.
        """
        if plan.axis:
            self.axis_team.broadcast(tensor, self.axis_team.seat.position_of(source))
        else:
            self.broadcast(tensor, source)

    # --- verbs of agreement -----------------------------------------------------------------------------------------

    def meet(self, what: str, number: int, *same: int, facts: Callable[[], str] = str) -> None:
        """Agree that every rank is at the same thing, down to the (at most three) integers that say which.

        Raises `PeerError` on every rank, naming who is where, when they are not. facts: the integers in words, a
        line each; the error has the lines in which ranks differ.
        """
        self.poll(what, number, *same)

    def poll(self, what: str, number: int, *mine: int) -> list[tuple[int, ...]]:
        """Agree as `meet` does, but the integers may differ. Return the integers of all ranks, in rank order.

        If they are equal on all ranks, the list may hold them once.
        """
        ends(self._count_rows())
        self.heard, self.signalled = self.news, max(self.signalled, self.signal)
        if self.torn and what != LOADING:
            raise StateError(self.torn, instead="zero.load(...) the last checkpoint")
        if self.failed is not None:
            self.fail()
        return [mine]

    def flags(self, mine: bytes) -> bytes:
        """Return the elementwise maximum over the ranks of small numbers; every rank gives equally many."""
        ends(self._count_control(len(mine)))
        return mine

    def maximum(self, tensor: Tensor) -> Tensor:
        """Return the elementwise maximum over the ranks: in place if the process group can reach the tensor."""
        ends(self._count_control(tensor.numel() * tensor.itemsize))
        return tensor

    def total(self, tensor: Tensor) -> Tensor:
        """Return the elementwise sum of integers over the ranks: in place if the process group can reach the tensor."""
        ends(self._count_control(tensor.numel() * tensor.itemsize))
        return tensor

    def describe(self, facts: Any, what: str = TELLING) -> list[Any]:
        """Return every rank's JSON-able `facts`, in rank order. what: the meeting that this is."""
        return [facts]

    def problems(self, mine: str | None) -> list[str]:
        """Return the problems of all ranks that have one, so that all of them can raise."""
        return [f"rank {rank}: {problem}" for rank, problem in enumerate(self.describe(mine)) if problem]

    def begun_sums(self, number: int) -> None:
        """Take note, for ranks that ask, how many sums this rank has begun in the backward that is running."""

    def parted(self) -> bool:
        """Ask other ranks, while this rank waits for a sum, whether the ranks differ in the running backward: then the
        sum may not come before this rank goes on."""
        return False

    def same(self, verb: str, ask: Callable[[], dict[str, Any]]) -> None:
        """Compare ranks' arguments before anything is done. Raises on all ranks if they differ, or are wrong on one.

        ask: returns the arguments by name; raises if one of them is wrong.
        """
        mine: dict[str, str] = {}
        wrong: Exception | None = None
        try:
            mine = {name: repr(value) for name, value in ask().items()}
        except Exception as error:  # the other ranks must hear of it
            wrong = error
        told = self.describe([mine, None if wrong is None else f"{wrong}"], f"{TELLING} of {verb}")
        if wrong is not None:
            raise wrong
        if said := [f"rank {rank}: {problem}" for rank, (_, problem) in enumerate(told) if problem]:
            raise UserError(f"another rank asks {verb} for what cannot be", got="; ".join(said))
        for name in mine:
            ranks: dict[str, list[str]] = defaultdict(list)
            for rank, (asked, _) in enumerate(told):
                ranks[asked[name]].append(f"{rank}")
            if len(ranks) > 1:
                got = [
                    f"{value} on rank {', '.join(who[:5])}{', ...' * (len(who) > 5)}" for value, who in ranks.items()
                ]
                raise PeerError(
                    "the ranks ask for different things",
                    where=f"{verb}, {name}=",
                    expected="the same on every rank",
                    got="; ".join(got),
                )

    def report(self, error: Error) -> None:
        """Keep an error to raise on every rank at the next agreement, because peers go on to wait for this rank."""
        self.failed = self.failed or error

    def fail(self) -> NoReturn:
        """Raise on every rank, because an error was reported on one."""
        mine, self.failed = self.failed, None
        told = self.problems(None if mine is None else str(mine))
        self.level("")
        self.failed = None  # errors in ending all that was under way need not be reported
        if mine is not None:
            raise mine
        raise PeerError("another rank failed", got="; ".join(told), instead="fix that, and load the last checkpoint")

    def for_saves(self, *, behind: bool) -> Group:
        """Return the same ranks with a control group of their own, for a save. behind: for a thread behind training.

        Collective the first time, when that group is made. No other group orders it, and its waits last half an hour
        at least, because ranks may take very different times to write. A rank that cannot be asked is still named at
        the time-out.
        """
        return self

    # --- what they count --------------------------------------------------------------------------------------------

    def _count_rows(self) -> Event | None:
        """Count an exchange of rows: one message to each of the others on every line of the grid."""
        return self._count_control(8 * ROW, messages(self.ranks))

    def _count_control(self, nbytes: int, messages: int = 1) -> Event | None:
        if self.ranks == 1:
            return None
        return count(self.ledger, self.ranks, "control", nbytes, nbytes * messages, nbytes * messages)
