"""A simulated step on a clock: when each collective would begin and end, and how long compute would wait for it.

Compute runs on one stream, collectives on another, in the order the engine launched them. A collective begins when it
is launched and the link is free; whoever waits for it waits until it ends. Nothing is measured here: the times are
those of `machines`, so a timeline is as good as its machine's numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import UserError
from ..events import Event
from ..stage import Seat
from .machines import Machine

TRAVELS = ("gather", "reduce", "relay", "share")


@dataclass(frozen=True)
class Slice:
    """One thing on the timeline, in seconds since it began."""

    stream: str  # "compute" or "link"
    verb: str
    unit: str | None
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """One step, from the end of the step before it. Seconds.

    step: the whole. compute: forward and backward. summing: contributions in rank order. optimizer: reading and writing
    its states. exposed: waiting for collectives. moving: collectives under way, hidden or not.
    """

    step: float
    compute: float
    summing: float
    optimizer: float
    exposed: float
    moving: float
    slices: list[Slice]

    def tokens_per_second(self, tokens: int) -> float:
        """Of one GPU, for `tokens` in its micro-batches of one step."""
        return tokens / self.step


def replay(
    events: Sequence[Event],
    machine: Machine,
    *,
    ranks: int,
    updated_nbytes: int,
    ordered: bool = True,
    steps: int = 1,
    replica: int = 0,
    replicas: int = 1,
    along: Mapping[int, Seat] | None = None,
) -> Timeline:
    """Put recorded steps on a clock; what is reported is the last of them.

    ranks: of a team, the one of `replica` among `replicas`. updated_nbytes: bytes that the optimizers' step reads and
    writes on this rank. steps: how many optimizers. along: of the buckets along an axis a seat on it. ordered:
    reductions are exchanges and a sum in rank order (else the backend's reduce-scatter, a ring).
    """
    turns = sorted(
        [(event.start, 0, number) for number, event in enumerate(events)]
        + [(event.end, 1, number) for number, event in enumerate(events) if event.end and event.verb in TRAVELS]
    )
    clock = _Clock(machine, ranks, replica, replicas, ordered, along or {})
    marks: list[tuple[float, ...]] = []
    for _, ends, number in turns:
        event = events[number]
        if event.verb in TRAVELS and event.logical:
            clock.wait(number, event) if ends else clock.launch(number, event)
        elif event.verb == "compute":
            clock.run(event.logical / (machine.flops * machine.efficiency))
        elif event.verb == "step":
            clock.update(2 * updated_nbytes / machine.memory_bandwidth / steps)
            marks.append((clock.now, clock.exposed, clock.moving, clock.compute, clock.summing))
    marks = marks[steps - 1 :: steps]  # of several optimizers the last ends a step
    if len(marks) < 2:
        raise UserError("a timeline needs two recorded steps", got=len(marks), instead="simulate(...) as it is")
    began, ended = marks[-2][0], marks[-1][0]
    _, exposed, moving, compute, summing = (after - before for before, after in zip(*marks[-2:], strict=True))
    slices = [
        Slice(s.stream, s.verb, s.unit, max(s.start - began, 0.0), s.end - began) for s in clock.slices if s.end > began
    ]
    return Timeline(
        ended - began,
        compute,
        summing,
        2 * updated_nbytes / machine.memory_bandwidth,
        exposed,
        moving,
        slices,
    )


def chrome(line: Timeline, rank: int) -> dict[str, Any]:
    """The step as a Chrome trace: what the rank computes, and beside it what its link carries. Microseconds."""
    out: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}, simulated"}}
    ]
    for tid, stream in enumerate(("compute", "link")):
        out.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": tid, "args": {"name": stream}})
        for piece in line.slices:
            if piece.stream == stream:
                name = piece.verb if piece.unit is None else f"{piece.verb} {piece.unit or 'root'}"
                times = {"ts": 1e6 * piece.start, "dur": 1e6 * (piece.end - piece.start)}
                out.append({"ph": "X", "name": name, "cat": piece.verb, "pid": rank, "tid": tid, **times})
    return {"otherData": {"made_by": "zeroshard"}, "traceEvents": out, "displayTimeUnit": "ms"}


class _Clock:
    def __init__(
        self, machine: Machine, ranks: int, replica: int, replicas: int, ordered: bool, along: Mapping[int, Seat]
    ) -> None:
        self.machine, self.ranks, self.ordered = machine, ranks, ordered
        self.along = along
        self.replica, self.replicas = replica, replicas
        self.now = self.exposed = self.moving = self.compute = self.summing = 0.0
        self.slices: list[Slice] = []
        self._link_free = 0.0
        self._ends: dict[int, float] = {}

    def run(self, seconds: float) -> None:
        self.slices.append(Slice("compute", "compute", None, self.now, self.now + seconds))
        self.now += seconds
        self.compute += seconds

    def update(self, seconds: float) -> None:
        self.slices.append(Slice("compute", "step", None, self.now, self.now + seconds))
        self.now += seconds

    def launch(self, number: int, event: Event) -> None:
        exchange = event.verb == "reduce" and self.ordered
        if event.verb == "relay":
            last = self.replica == self.replicas - 1
            back = event.sent // (self.replicas - 1) if last else event.received - event.logical * (self.replica > 0)
            seconds, busy = self.machine.relay_seconds(event.logical, back, self.replicas, self.ranks)
        else:
            machine, ranks = self.machine, self.ranks
            sits = None if event.bucket is None else self.along.get(event.bucket)
            if event.verb == "share":  # a whole replica lies between two of its ranks
                machine, ranks = replace(machine, gpus=max(machine.gpus // ranks, 1)), self.replicas
            elif sits is not None:  # fewer of its ranks are on one node: those between are of other teams
                machine, ranks = replace(machine, gpus=max(machine.gpus // sits.stride, 1)), sits.size
            time_of = machine.exchange_seconds if exchange else machine.ring_seconds
            seconds = busy = 0.0 if self._unsent(event) else time_of(event.logical, ranks)
        start = max(self.now, self._link_free)
        self._link_free, self._ends[number] = start + busy, start + seconds
        self.moving += seconds
        self.slices.append(Slice("link", event.verb, event.unit, start, start + seconds))

    def _unsent(self, event: Event) -> bool:
        """Do ranks read it in each other's memory?"""
        return self.ranks > 1 and event.verb in ("gather", "reduce") and not (event.sent or event.received)

    def wait(self, number: int, event: Event) -> None:
        late = self._ends.get(number, self.now) - self.now
        if late > 0:
            self.exposed += late
            self.now += late
        if self._unsent(event) or (
            event.verb == "reduce" and self.ordered
        ):  # every rank's contribution is read once and added to the sum
            seconds = event.logical / self.machine.memory_bandwidth
            self.now += seconds
            self.summing += seconds
