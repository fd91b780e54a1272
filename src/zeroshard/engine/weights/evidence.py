"""Evidence of edits that a device keeps, of weights whose masters are stepped on the host.

Nobody compares weights on the host, which would take longer than the step itself. The device digests a bucket's weights
when they are the masters' cast, and again before a step, or before they are released. Whether the digests differ is
noted there, in a byte that all buckets of a step send to the host in one copy. Only weights that differ are brought to
the host, or compared there, and followed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...arithmetic.digests import fingerprint
from ...device import DeviceEvent, ask, event

if TYPE_CHECKING:
    from ...tiers.tier import DeviceTier
    from .bucket import Bucket


class Evidence:
    """What a device knows of one bucket's weights since they were last the cast of the masters."""

    def __init__(self, tier: DeviceTier) -> None:
        self._tier = tier
        # A digest of the masters' cast, and whether weights that differ were seen since. Made once, so that a stream
        # that is late never reads memory that has another owner by now.
        self._notes: Tensor | None = None
        self._known = False  # is there such a digest?
        self._edited = False  # does the host know of an edit, or must it assume one?
        self._noted = DeviceEvent()  # after the last write of the notes
        self.heard: bool | None = None  # what the device has told of the running step: was there an edit?

    def agree(self, params: Tensor | None) -> None:
        """Take note that these weights, on the device, are the masters' cast. None: so will be those that come next."""
        self._edited, self._known = False, params is not None
        if params is not None:
            notes = self._begin()
            notes[0], notes[1] = _digest(params), 0
            self._noted = event(self._tier.device)

    def came(self, params: Tensor) -> None:
        """Take note of weights that came to the device, the first of them since masters were cast."""
        if not (self._known or self._edited):
            self.agree(params)

    def assume(self) -> None:
        """Take note of an edit that the host knows of, or cannot rule out."""
        self._edited = True

    def look(self, params: Tensor) -> None:
        """Have the device compare these weights."""
        if not self._known:
            self._edited = True
        elif not self._edited:
            notes = self._begin()
            notes[1] |= notes[0] != _digest(params)
            self._noted = event(self._tier.device)

    def _begin(self) -> Tensor:
        if self._notes is None:
            self._notes = torch.zeros(2, dtype=torch.int64, device=self._tier.device)
        self._noted.wait()
        return self._notes

    def answer(self) -> bool | Tensor:
        """Tell if there was an edit; if only the device knows, as a number there."""
        if self._edited or not self._known:
            return self._edited
        return self._begin()[1]


@contextlib.contextmanager
def told(buckets: Sequence[Bucket]) -> Iterator[None]:
    """Have the device tell, in one copy for which the host waits, which of these buckets' weights were edited. Inside
    `Evidence.heard` has the answer."""
    asked = [each for bucket in buckets if (each := bucket.edits.looked()) is not None]
    try:
        noted = []
        for evidence in asked:
            answer = evidence.answer()
            if isinstance(answer, bool):
                evidence.heard = answer
            else:
                noted.append((evidence, answer))
        if noted:
            found = buckets[0].tier.fetch(torch.stack([answer for _, answer in noted]), torch.uint8)
            for (evidence, _), edited in zip(noted, ask(found).tolist(), strict=True):
                evidence.heard = bool(edited)
        yield
    finally:
        for evidence in asked:
            evidence.heard = None


def _digest(params: Tensor) -> Tensor:
    found = fingerprint(params, anywhere=True)
    assert isinstance(found, Tensor), f"weights on {params.device} have no digest there"
    return found
