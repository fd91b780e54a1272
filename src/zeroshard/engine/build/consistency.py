"""State that all ranks must share when a forward begins: what is frozen, unedited weights, and the model's buffers.

Buffers are sent from one rank to all before forwards that train (`Layout.buffers`). So that ranks agree on what is
sent, buffers' names, shapes and dtypes are part of the digest that all compare when a forward begins.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ...arithmetic.digests import fingerprint
from ...arithmetic.sums import as_bytes, dense, write_bytes
from ...comm.agreement import FROZEN, LEAVING, SENT, Group
from ...device import ask
from ...errors import StateError
from ...layout.partition import plain_name
from ...policies.layout import Layout
from ..gradients.reduction import Reduction
from ..step.schedule import Schedule
from ..weights.unit import Managed, Unit
from .preflight import Contents

Batch = TypeVar("Batch")

# Buffers that a normalization saves for backward and does not use there, and of whose writes autograd counts none.
STATISTICS = ("running_mean", "running_var")


class Alike:
    """This rank's state that all ranks must share, and which of it was equal when they last met."""

    def __init__(self, model: nn.Module, managed: list[Managed], group: Group, layout: Layout) -> None:
        self.source = 0  # the rank whose buffers count
        self._model = model
        self._managed = managed
        self._group = group
        self._layout = layout
        self._sending: dict[str, Tensor] = {}  # buffers, before a forward that trains
        self._content = Contents()  # of buffers that are made of several tensors
        self._now: dict[str, Any] = {}  # the facts that `digest` has found
        self._found: dict[str, Any] = {}  # those that were alike when this rank last met the others
        self.written()

    def digest(self, training: bool) -> tuple[int, Callable[[], str]]:
        """Digest everything that ranks must share; and a text of what changed since they last agreed."""
        if self._group.ranks == 1:
            return 0, str
        with torch._C.DisableTorchFunctionSubclass():
            now: dict[str, Any] = {"frozen": [each.name for each in self._managed if not each.param.requires_grad]}
        now["edited"] = self._edited_here()
        named = self._model.named_buffers() if training and self._layout.buffers != "local" else ()
        self._sending = {}
        for name, tensor in ((plain_name(name), tensor) for name, tensor in named):
            if not dense(tensor):
                now[name] = self._content.of(tensor)
            elif tensor.numel() and not tensor.is_meta:
                self._sending[name] = tensor
                now[name] = tuple(tensor.shape), tensor.dtype
        self._now, found = now, self._found
        return zlib.crc32(repr(now).encode()), lambda: _words({k: v for k, v in now.items() if v != found.get(k)})

    def met(self) -> None:
        """Take note that all ranks have the same digest."""
        self._found |= self._now
        self.written()

    def written(self) -> None:
        """Take note that all ranks have every write to parameters so far."""
        self._wrote = self._writes()

    def _edited_here(self) -> list[str]:
        """List replicated parameters that the program on this rank has written to since ranks last agreed on these."""
        asked = zip(self._managed, self._writes(), self._wrote, strict=True)
        return [record.name for record, writes, before in asked if writes != before]

    def _writes(self) -> list[int]:
        """Count, for each parameter, writes by the program and not by the engine; 0 for one that is not resident."""
        with torch._C.DisableTorchFunctionSubclass():
            return [
                record.param._version - bucket.generation
                if (place := record.param.__dict__.get("_zeroshard")) and (bucket := place.bucket).resident
                else 0  # 0 also for a parameter that was swapped: `Structure` names it
                for record in self._managed
            ]

    def send_buffers(self) -> None:
        """Send the source rank's buffers to all. Equal ones are not written, so autograd's versions stay; nor does it
        count writes to statistics, so that a forward may come between another and its backward.

        All are sent each time: version counters do not show writes by a batch norm or through `.data`, and only on the
        CPU can bits be compared without a wait. A device does all of it in its queue.
        """
        sending, self._sending = self._sending, {}
        if not sending:
            return
        with torch.inference_mode(False), torch.no_grad():
            own = [as_bytes(tensor) for tensor in sending.values()]
            raw = torch.cat(own)
            self._group.broadcast(raw, self.source, ahead=True)
            if self._group.rank == self.source:
                return
            parts = raw.split([each.numel() for each in own])
            for (name, tensor), theirs in zip(sending.items(), parts, strict=True):
                write_bytes(tensor, theirs, counted=name.rpartition(".")[2] not in STATISTICS)

    def differ(self, units: list[Unit], *, asked: bool) -> bool:
        """Tell if ranks' weights differ as they leave gathered(). asked: if not, return False: one rank's count."""
        found = [weights_digest(units, on_axis=each) if asked else 0 for each in (False, True)]
        told = self._group.poll(LEAVING, len(units), *found)
        teams = self._group.axis_team.seat.teams() if len(told) > 1 else []
        return len({each[0] for each in told}) > 1 or any(len({told[r] for r in team}) > 1 for team in teams)


def _words(changed: dict[str, Any]) -> str:
    own = {begin: changed.pop(key) for key, begin in (("frozen", FROZEN), ("edited", "edited: ")) if key in changed}
    told = [f"{begin}{', '.join(map(repr, names)) or 'none'}" for begin, names in own.items()]
    return "; ".join(told + [f"{SENT}{changed}"] * bool(changed))


def weights_digest(units: list[Unit], *, on_axis: bool) -> int:
    """Digest the units' gathered weights: those of buckets that all ranks share, or of buckets along an axis."""
    buckets = [bucket for unit in units for bucket in unit.buckets if bool(bucket.plan.axis) == on_axis]
    # Of a copy on the CPU: a device gives no fingerprint, and ranks that differ would look alike.
    found = [fingerprint(ask(bucket.full)) for bucket in buckets]
    return zlib.crc32(repr(found).encode())


def joined(batches: Iterable[Batch], alike: Alike, schedule: Schedule, reduction: Reduction) -> Iterator[Batch]:
    """Yield batches as `Zero.join` says: a rank that has none left repeats its last one, and adds zero to gradients."""
    none: Any = object()
    last, iterator, group = none, iter(batches), reduction.group
    try:
        while True:
            batch = next(iterator, none)
            last = last if batch is none else batch
            schedule.recover()
            with group.as_one():
                told = group.poll("joining", group.number("joining"), batch is not none, last is not none)
                having = [rank for rank, (has, _) in enumerate(told) if has]
                if not having:
                    alike.digest(True)
                    alike.send_buffers()
                    return
            if empty := [f"rank {rank}" for rank, (_, had) in enumerate(told) if not had]:
                raise StateError(
                    "a rank has no batch at all, so it cannot take part in what the others do with theirs",
                    where=", ".join(empty),
                    expected="one batch or more on every rank",
                    instead="divide the data so that every rank has some",
                )
            alike.source, reduction.silent = having[0], batch is none
            yield last
            reduction.silent = False
    finally:
        alike.source, reduction.silent = 0, False
