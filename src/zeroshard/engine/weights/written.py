"""Weights that a forward writes, as an initialization from its first batch does: every rank must write the same values.

If ranks write different ones, each element's owner counts, and all ranks would go on with a mixture. So the next step
compares what forwards wrote. Of each unit the first training forward is looked at in whole, since writes through
`p.data` move no version counter. Later only version counters tell, and only on the CPU: to ask a device is to wait.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ...arithmetic.digests import fingerprint
from ...arithmetic.sums import simulated
from ...device import ask
from .bucket import Bucket
from .unit import Unit

Content = list[bytes | Tensor | None]  # of each slot of a bucket, a digest; on a device it stays there


class Look:
    """One forward of a unit, from where its weights are opened."""

    def __init__(self, unit: Unit, *, first: bool) -> None:
        self.unit = unit
        self.versions = [_versions(bucket) for bucket in unit.buckets]
        self.before = [_content(bucket) for bucket in unit.buckets] if first else None


class Written:
    """What forwards of one model have written on this rank since the last step."""

    def __init__(self) -> None:
        self._looked: set[int] = set()  # modules by id: each has a unit of the model's
        self._found: dict[int, tuple[Bucket, Content, Content | None]] = {}  # by bucket: now, and as it was opened

    def look(self, unit: Unit, module: nn.Module) -> Look | None:
        """Begin to look at a training forward of a module of a unit, whose weights are open."""
        if unit.pinned:  # inside gathered() edits are compared as it ends
            return None
        first = id(module) not in self._looked
        self._looked.add(id(module))
        return Look(unit, first=first) if first or all(bucket.full.is_cpu for bucket in unit.buckets) else None

    def end(self, look: Look) -> None:
        """Take note of what the forward has written; its unit's weights are still open."""
        for at, bucket in enumerate(look.unit.buckets):
            if bucket.plan.axis:
                continue  # ranks along an axis have different weights
            before = None if look.before is None else look.before[at]
            if before is not None or _versions(bucket) != look.versions[at]:
                _, _, earlier = self._found.get(bucket.plan.index, (None, None, before))
                self._found[bucket.plan.index] = bucket, _content(bucket), earlier

    def take(self) -> list[str]:
        """Return a line for each parameter that forwards have written since the last step: name and digest."""
        found, self._found = [*self._found.values()], {}
        return [line for each in found for line in _lines(*each)]


def _versions(bucket: Bucket) -> list[int]:
    with torch._C.DisableTorchFunctionSubclass():
        return [param._version for param in bucket.params]


def _content(bucket: Bucket) -> Content:
    return [_digest(bucket.full[slot.start : slot.stop]) for slot in bucket.plan.slots]


def _digest(part: Tensor) -> bytes | Tensor | None:
    if part.is_cpu or simulated(part):
        return fingerprint(part)
    return part.detach().view(torch.int16 if part.itemsize > 1 else torch.int8).sum(dtype=torch.int64)


def _lines(bucket: Bucket, now: Content, before: Content | None) -> Iterable[str]:
    told, was = _told(now), None if before is None else _told(before)
    for at, slot in enumerate(bucket.plan.slots):
        if told[at] is not None and (was is None or told[at] != was[at]):
            yield f"{slot.name} {told[at]}"


def _told(content: Content) -> list[str | None]:
    """Return digests as text; a device is asked once for all of a bucket."""
    there = [each for each in content if isinstance(each, Tensor)]
    if there:
        return [f"{each:x}" for each in ask(torch.stack(there)).tolist()]
    return [None if each is None else each.hex()[:8] for each in content if not isinstance(each, Tensor)]
