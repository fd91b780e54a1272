"""The ledger of bytes held and moved on a rank, and the record of events.

A *state* is what the bytes are for ("parameters", "gradients", "master", an optimizer's own names, and in passing
"gather", "prefetch", "reduce", ...); a *verb* is what happened ("gather", "reduce", "release", ...); a *phase* is what
the loop is doing ("init", "forward", "backward", "reduce", "step", "gather", "save", "export", or
"between" them).

The ledger always counts. Events are recorded only when asked for, into a ring that forgets the oldest.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from html import escape

from .finalizers import at_end_of

DEVICE, HOST, NVME, SHARED = "device", "host", "nvme", "shared"  # tiers; the last counts one copy for a whole host


@dataclass
class Traffic:
    """The bytes that one verb has moved so far, in the three conventions of the literature.

    `logical` is the size of the message itself; `sent` what this rank had to send, as in
    "(N-1)/N of the buffer"; `sent_and_received` adds what it took in. `shared`: what it read from the memory of other
    ranks of its host instead, for which nothing is sent.
    """

    calls: int = 0
    logical: int = 0
    sent: int = 0
    sent_and_received: int = 0
    shared: int = 0


@dataclass(slots=True)
class Event:
    """Something that happened on this rank. Times in nanoseconds of `time.perf_counter_ns`; `end` is 0 until it ended.

    A collective ends once the program has waited for it: that is no later than its result was needed. `waited`: for how
    many nanoseconds the program stood still until then.
    """

    verb: str
    state: str  # what the bytes are for; "" where nothing moved
    bucket: int | None
    unit: str | None
    logical: int
    sent: int
    received: int
    start: int
    end: int = 0
    waited: int = 0


@dataclass(frozen=True)
class Peak:
    """The most bytes held at once on the device in one phase, all states together, and what they were."""

    total: int
    held: dict[str, int]


class Record:
    """The last events, and the last changes of what is held."""

    def __init__(self, limit: int, tiers: Mapping[str, Mapping[str, int]]) -> None:
        """Start with what is held now, by tier and state."""
        self.events: deque[Event] = deque(maxlen=limit)
        now = time.perf_counter_ns()
        started = [(now, tier, state, nbytes) for tier, held in tiers.items() for state, nbytes in held.items()]
        self.held: deque[tuple[int, str, str, int]] = deque(
            started, maxlen=limit
        )  # (time, tier, state, bytes from then on)


@dataclass
class Ledger:
    """Bytes held now and at most, and bytes moved. One per rank.

    held: bytes now, by state. tiers: the same, by tier and state. peak: the most there ever were of one state.
    phases: the most held at once on the device in each phase. traffic: by verb. waited: nanoseconds that the program
    stood still for other ranks so far; on a GPU the device waits for gathers and reductions, which is not in it.
    """

    held: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    peak: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    traffic: dict[str, Traffic] = field(default_factory=lambda: defaultdict(Traffic))
    tiers: dict[str, dict[str, int]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(int)))
    phases: dict[str, Peak] = field(default_factory=dict)
    record: Record | None = None
    waited: int = 0

    def __post_init__(self) -> None:
        # On CUDA the backward hooks run on autograd's own threads. A signal's handler may look at it anywhere.
        self._lock = threading.RLock()
        self._ended: deque[tuple[str, int, str]] = deque()  # bytes of objects that ended, not counted yet
        self._running: list[tuple[str, Event | None]] = []
        self._most = sum(self.held.values())  # most held on the device in the running phase
        self._total = self._most

    def _repr_html_(self) -> str:
        """Return a table for notebooks: bytes held by state and tier, and the most in each phase."""
        rows = {f"{state}, {tier}": n for tier, held in self.tiers.items() for state, n in held.items() if n}
        rows |= {f"peak in {phase}, {DEVICE}": peak.total for phase, peak in self.phases.items()}
        cells = "".join(f"<tr><td>{escape(what)}</td><td>{nbytes:,}</td></tr>" for what, nbytes in rows.items())
        return f"<table><tr><th>what</th><th>bytes</th></tr>{cells}</table>"

    # --- what is held -----------------------------------------------------------------------------------------------

    def hold(self, state: str, nbytes: int, tier: str = DEVICE) -> None:
        """Count `nbytes` more (or, negative, fewer) bytes held for `state`."""
        with self._lock:
            if self._ended:
                self._count_ended()
            if nbytes:
                self._count(state, nbytes, tier)

    def hold_while(self, thing: object, state: str, nbytes: int, tier: str = DEVICE) -> Callable[[], None]:
        """Count `nbytes` for as long as `thing` lives, or until what this returns is called."""
        self.hold(state, nbytes, tier)
        end = at_end_of(thing, self._ended.append, (state, -nbytes, tier))

        def over() -> None:
            end()
            self.hold(state, 0)

        return over

    def _count_ended(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                self._count(*self._ended.popleft())

    def _count(self, state: str, nbytes: int, tier: str) -> None:
        self.held[state] += nbytes
        self.tiers[tier][state] += nbytes
        self._total += nbytes if tier == DEVICE else 0
        self.peak[state] = max(self.peak[state], self.held[state])
        if self._total > self._most:
            self._note_peak()
        if self.record is not None:
            self.record.held.append((time.perf_counter_ns(), tier, state, self.tiers[tier][state]))

    def rename(self, state: str, other: str, nbytes: int) -> None:
        """Move bytes held for `state` to `other`: at no moment are they counted for both."""
        self.hold(state, -nbytes)
        self.hold(other, nbytes)

    def _note_peak(self) -> None:
        self._most = self._total
        if self._most > (self.phases[phase].total if (phase := self.phase) in self.phases else 0):
            self.phases[phase] = Peak(self._total, {state: n for state, n in self.tiers[DEVICE].items() if n})

    # --- phases -----------------------------------------------------------------------------------------------------

    @property
    def phase(self) -> str:
        return next((phase for phase, _ in reversed(self._running)), "between")  # also asked by the watch's thread

    def begin(self, phase: str) -> None:
        """Begin a phase. Phases nest: a closure's forward lies inside its step."""
        with self._lock:
            self._running.append((phase, self.note(phase)))
            self._most = 0
            self._note_peak()

    def end(self, phase: str) -> None:
        """End a phase, and every phase inside it that an exception left running; nothing if it is not running."""
        with self._lock:
            if any(running == phase for running, _ in self._running):
                ended = ""
                while ended != phase:
                    ended, event = self._running.pop()
                    ends(event)
                self._most = 0
                self._note_peak()

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        self.begin(phase)
        try:
            yield
        finally:
            self.end(phase)

    # --- what happened ----------------------------------------------------------------------------------------------

    def move(
        self,
        verb: str,
        *,
        logical: int,
        sent: int,
        received: int,
        state: str = "",
        bucket: int | None = None,
        shared: int = 0,
    ) -> Event | None:
        """Count one collective of `logical` bytes. The event, if one is recorded, ends when `ends` is told."""
        with self._lock:
            traffic = self.traffic[verb]
            traffic.calls += 1
            traffic.logical += logical
            traffic.sent += sent
            traffic.sent_and_received += sent + received
            traffic.shared += shared
        return self.note(verb, state=state, bucket=bucket, logical=logical, sent=sent, received=received)

    def note(
        self,
        verb: str,
        *,
        state: str = "",
        bucket: int | None = None,
        unit: str | None = None,
        logical: int = 0,
        sent: int = 0,
        received: int = 0,
    ) -> Event | None:
        """Record that something begins now, if events are recorded at all."""
        if self.record is None:
            return None
        event = Event(verb, state, bucket, unit, logical, sent, received, time.perf_counter_ns())
        self.record.events.append(event)
        return event

    @contextlib.contextmanager
    def copied(self, state: str, bucket: int, nbytes: int, *, leaves: bool = False) -> Iterator[None]:
        """Note a copy that runs inside the block. leaves: from the device, so its bytes are `sent`; else to it."""
        event = self.note("copy", state=state, bucket=bucket, logical=nbytes, sent=nbytes if leaves else 0)
        yield
        ends(event)

    def snapshot(self) -> Ledger:
        """Return a copy that no longer changes."""
        with self._lock:
            self._count_ended()
            return Ledger(
                dict(self.held),
                dict(self.peak),
                {verb: replace(t) for verb, t in self.traffic.items()},
                {tier: dict(held) for tier, held in self.tiers.items()},
                dict(self.phases),
                waited=self.waited,
            )


def ends(event: Event | None) -> None:
    """Set the end of an event, if one was recorded and has not ended yet."""
    if event is not None and not event.end:
        event.end = time.perf_counter_ns()
