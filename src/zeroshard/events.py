"""What is held and what was sent: the ledger, and the counters that `comm` fills.

A *state* is what the bytes are for ("parameters", "gradients", "master", "gather", "reduce", ...);
a *verb* is what moved them ("gather", "reduce", "broadcast", "control").
"""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import dataclass, field, replace


@dataclass
class Traffic:
    """What one verb has moved so far, in the three conventions of the literature.

    `logical` is the size of the message itself; `sent` what this rank had to send, as in
    "(N-1)/N of the buffer"; `sent_and_received` adds what it took in.
    """

    calls: int = 0
    logical: int = 0
    sent: int = 0
    sent_and_received: int = 0


@dataclass
class Ledger:
    """Bytes held now and at most, by state, and bytes moved, by verb. One per rank."""

    held: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    peak: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    traffic: dict[str, Traffic] = field(default_factory=lambda: defaultdict(Traffic))

    def __post_init__(self) -> None:
        # On CUDA the backward hooks run on autograd's own threads.
        self._lock = threading.Lock()

    def hold(self, state: str, nbytes: int) -> None:
        """Count `nbytes` more (or, negative, fewer) bytes held for `state`."""
        with self._lock:
            self.held[state] += nbytes
            self.peak[state] = max(self.peak[state], self.held[state])

    def move(self, verb: str, *, logical: int, sent: int, received: int) -> None:
        """Count one collective of `logical` bytes."""
        with self._lock:
            traffic = self.traffic[verb]
            traffic.calls += 1
            traffic.logical += logical
            traffic.sent += sent
            traffic.sent_and_received += sent + received

    def snapshot(self) -> Ledger:
        """A copy that no longer changes."""
        with self._lock:
            return Ledger(dict(self.held), dict(self.peak), {verb: replace(t) for verb, t in self.traffic.items()})
