"""A simulated step on a clock: when each collective would begin and end, and how long compute would wait for it.

Compute runs on one stream, collectives on another, in the order the engine launched them. A collective begins when it
is launched and the link is free; a rank that waits for it waits until it ends. The host has a clock of its own and runs
ahead of the device: each launch, each wait for the device and each meeting of all ranks takes it on, and the device
stands still where it has caught up with the host. Nothing is measured here: the times are those of `machines`, so a
timeline is as good as its machine's numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import UserError
from ..events import Event
from ..layout.stage import Seat
from .machines import Cluster
from .overheads import (
    NONE,
    Facts,
    Overhead,
    copied,
    folded,
    gathered,
    handed_on,
    looked_at,
    released,
    sent,
    stepped,
    total,
)

TRAVELS = ("gather", "reduce", "relay", "share")
FORWARDS = ("forward", "recompute")
ENDING = (*TRAVELS, *FORWARDS)  # events whose end counts too


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
    its states. exposed: waiting for collectives. moving: collectives under way, hidden or not. overhead: the engine's
    small kernels, and where the device waits for the host. asked, meetings: how much of it there is in the step.
    """

    step: float
    compute: float
    summing: float
    optimizer: float
    exposed: float
    moving: float
    slices: list[Slice]
    overhead: float = 0.0
    asked: Overhead = NONE
    meetings: int = 0

    def tokens_per_second(self, tokens: int) -> float:
        """Return the tokens per second of one GPU, with `tokens` in its micro-batches of one step."""
        return tokens / self.step


def replay(
    events: Sequence[Event],
    machine: Cluster,
    *,
    ranks: int,
    updated_nbytes: int,
    ordered: bool = True,
    steps: int = 1,
    replica: int = 0,
    replicas: int = 1,
    along: Mapping[int, Seat] | None = None,
    facts: Mapping[int, Facts] | None = None,
) -> Timeline:
    """Put recorded steps on a clock and return the last of them.

    ranks: in this rank's team, that of `replica` among `replicas`. updated_nbytes: bytes that the optimizers' step
    updates on this rank: it reads and writes them. steps: how many optimizers. along: {bucket that is sharded along an
    axis: the seat on it}. ordered: reductions are exchanges and a sum in rank order (else the backend's reduce-scatter,
    a ring). facts: {bucket: what its launches depend on}; without them the host just launches the job's operators and
    meets other ranks.
    """
    turns = sorted(
        [(event.start, 0, number) for number, event in enumerate(events)]
        + [(event.end, 1, number) for number, event in enumerate(events) if event.end and event.verb in ENDING]
    )
    clock = _Clock(machine, ranks, replica, replicas, ordered, along or {}, facts or {}, _of_units(events))
    marks: list[tuple[float, ...]] = []
    for _, ends, number in turns:
        event = events[number]
        clock.ask(event, through=bool(ends))
        if event.verb in TRAVELS and event.logical:
            clock.wait(number, event) if ends else clock.launch(number, event)
        elif event.verb == "compute":
            clock.run(event.logical / (machine.flops * machine.efficiency))
        elif event.verb == "step":
            clock.update(2 * updated_nbytes / machine.memory_bandwidth / steps)
            asked = (clock.asked.launches, clock.asked.drains, clock.meetings)
            marks.append((clock.now, clock.exposed, clock.moving, clock.compute, clock.summing, clock.overhead, *asked))
    marks = marks[steps - 1 :: steps]  # of several optimizers the last ends a step
    if len(marks) < 2:
        raise UserError("a timeline needs two recorded steps", got=len(marks), instead="simulate(...) as it is")
    began, ended = marks[-2][0], marks[-1][0]
    differences = (after - before for before, after in zip(*marks[-2:], strict=True))
    _, exposed, moving, compute, summing, overhead, launches, drains, meetings = differences
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
        overhead,
        Overhead(int(launches), int(drains)),
        int(meetings),
    )


def _of_units(events: Sequence[Event]) -> dict[str, set[int]]:
    """Return {unit: the buckets that are gathered for it}."""
    found: dict[str, set[int]] = {}
    for event in events:
        if event.verb == "gather" and event.unit is not None and event.bucket is not None:
            found.setdefault(event.unit, set()).add(event.bucket)
    return found


def chrome(line: Timeline, rank: int) -> dict[str, Any]:
    """Return the step as a Chrome trace in microseconds: what the rank computes, and what its link carries."""
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
        self, machine: Cluster, ranks: int, replica: int, replicas: int, ordered: bool, along: Mapping[int, Seat],
        facts: Mapping[int, Facts], units: Mapping[str, set[int]],
    ) -> None:  # fmt: skip
        self.machine, self.ranks, self.ordered = machine, ranks, ordered
        self.along = along
        self.facts, self._of_unit, self._again = facts, units, set[int]()
        self.replica, self.replicas = replica, replicas
        self.host = self.now = self.exposed = self.moving = self.compute = self.summing = self.overhead = 0.0
        self.asked, self.meetings = NONE, 0
        self.slices: list[Slice] = []
        self._link_free = 0.0
        self._ends: dict[int, float] = {}

    def ask(self, event: Event, *, through: bool) -> None:
        """Charge the clock what the engine asks of host and device at an event. through: at its end?"""
        verb, of = event.verb, None if event.bucket is None else self.facts.get(event.bucket)
        if verb == "control":
            self.meetings += 1
            self.host += self.machine.meeting_seconds(self.ranks * self.replicas)
        elif verb in FORWARDS and through and event.unit is not None:  # not the phase of that name
            used = [self.facts[at] for at in self._of_unit.get(event.unit, ()) if at in self.facts]
            self._launch(total(map(looked_at, used)))
        elif verb == "step":
            self._again.clear()
            self._launch(total(map(stepped, self.facts.values())))
        elif of is None:
            return
        elif verb == "copy":
            self._launch(copied())
        elif verb == "release":
            self._launch(released())
        elif verb == "gather" and not through:
            self._launch(gathered(of))
        elif verb == "relay" and not through:
            self._launch(handed_on(of, again=event.bucket in self._again))
        elif verb == "reduce" and not through:
            self._launch(sent(of))
        elif verb == "reduce":
            assert event.bucket is not None
            self._launch(folded(of, again=event.bucket in self._again))
            self._again.add(event.bucket)

    def _launch(self, asked: Overhead) -> None:
        self.asked += asked
        self.host += asked.launches * self.machine.launch
        self._idle()
        self.now += asked.launches * self.machine.kernel
        self.overhead += asked.launches * self.machine.kernel
        if asked.drains:  # from here on the device waits for each launch, until the host is ahead again
            self.host = max(self.host, self.now) + asked.drains * self.machine.drain

    def _idle(self) -> None:
        """Let the device wait until the host has launched the next kernel."""
        late = self.host - self.now
        if late > 0:
            self.overhead += late
            self.now += late

    def run(self, seconds: float) -> None:
        self.host += self.machine.launch
        self._idle()
        self.slices.append(Slice("compute", "compute", None, self.now, self.now + seconds))
        self.now += seconds
        self.compute += seconds

    def update(self, seconds: float) -> None:
        self._idle()
        self.slices.append(Slice("compute", "step", None, self.now, self.now + seconds))
        self.now += seconds

    def launch(self, number: int, event: Event) -> None:
        exchange = event.verb == "reduce" and self.ordered
        if event.verb == "relay":
            seconds, busy = self._relay(event)
        else:
            machine, ranks = self.machine, self.ranks
            sits = None if event.bucket is None else self.along.get(event.bucket)
            if event.verb == "share":  # a whole replica lies between two of its ranks
                machine, ranks = replace(machine, gpus=max(machine.gpus // ranks, 1)), self.replicas
            elif sits is not None:  # fewer of its ranks are on one node: those between are of other teams
                machine, ranks = replace(machine, gpus=max(machine.gpus // sits.grid.stride(sits.axis), 1)), sits.size
            time_of = machine.exchange_seconds if exchange else machine.ring_seconds
            seconds = busy = 0.0 if self._unsent(event) else time_of(event.logical, ranks)
        start = max(self.now, self._link_free)
        self._link_free, self._ends[number] = start + busy, start + seconds
        self.moving += seconds
        self.slices.append(Slice("link", event.verb, event.unit, start, start + seconds))

    def _relay(self, event: Event) -> tuple[float, float]:
        """Return the time of a relay, and how long of that this rank's link is busy."""
        first, last, others = self.replica == 0, self.replica == self.replicas - 1, self.replicas - 1
        again = event.bucket in self._again
        of = None if event.bucket is None else self.facts.get(event.bucket)
        if of is None or not of.by_part:
            back = event.sent // others if last else event.received - event.logical * (not first)
            return self.machine.relay_seconds(event.logical, back, self.replicas, self.ranks)
        # The last sends each other replica its part, one after the other; to the first parts of an earlier sum come so.
        part = event.received - event.logical * (not first) if not last else event.sent // (others + again)
        part //= self.replicas if first and again else 1
        relay = self.machine.relay_seconds(event.logical, others * part, self.replicas, self.ranks)
        collected, _ = self.machine.relay_seconds(0, others * part, 1, self.replicas * self.ranks)
        return relay[0] + again * collected, relay[1]

    def _unsent(self, event: Event) -> bool:
        """Tell whether ranks read it in each other's memory, so that nothing is sent."""
        return self.ranks > 1 and event.verb in ("gather", "reduce") and not (event.sent or event.received)

    def wait(self, number: int, event: Event) -> None:
        late = self._ends.get(number, self.now) - self.now
        if late > 0:
            self.exposed += late
            self.now += late
        if event.verb == "reduce":  # which the host waits for itself
            self.host = max(self.host, self._ends.get(number, self.host))
        if self._unsent(event) or (
            event.verb == "reduce" and self.ordered
        ):  # every rank's contribution is read once and added to the sum
            seconds = event.logical / self.machine.memory_bandwidth
            self.now += seconds
            self.summing += seconds
