"""One bucket's update by the optimizer's own `step`, with the gradients of all others hidden."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Protocol

import torch

from ...comm.own_collectives import OwnCollectives
from ...events import Ledger, ends
from ..gradients.accumulator import Accumulator
from ..weights.bucket import Bucket
from ..weights.modes import seen
from .fragment import Fragment, States
from .optimizer_grads import Averages
from .optimizer_hooks import own_step


class Around(Protocol):
    """A wrapper around an optimizer's own step that shows it more of a parameter than this rank has."""

    def takes(self, bucket: Bucket) -> bool:
        """Tell if it wraps the steps of this bucket."""

    def shown(self, fragments: Sequence[Fragment]) -> contextlib.AbstractContextManager[None]:
        """Show the optimizer these fragments' whole parameters, for one step."""


class Alone:
    """The way to step one optimizer bucket by bucket."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        states: States,
        averages: Averages,
        ledger: Ledger,
        watch: OwnCollectives | None,
    ) -> None:
        self._optimizer = optimizer
        self._states = states
        self._averages = averages
        self._ledger = ledger
        self._watch = watch
        self.around: Around | None = None
        self.stepping = False  # does the optimizer's own `step` run? It may call its base class's, which torch hooks

    def wants(self, bucket: Bucket) -> bool:
        """Tell if a bucket must be stepped separately, wherever its states rest."""
        return self.around is not None and self.around.takes(bucket)

    def step(self, bucket: Bucket, accumulator: Accumulator, given: set[int]) -> None:
        """Update one bucket. given: the ids of the fragments that are to have a gradient, in this bucket or another."""
        fragments = self._states.of(bucket)
        with self._states.present(bucket):
            if bucket.edits.seed_master(asked=False):
                bucket.changed()
            if not bucket.sums_come:
                accumulator.spread_average(kept=not accumulator.sum.on_demand).wait()
            with self._states.decoded(bucket):
                self._averages.give(fragments, given)
                self._step(fragments)
                for fragment in fragments:
                    fragment.param.grad = None
            self._averages.drop_copies()
            self.write_back(bucket)
            bucket.codec.look()

    def _step(self, fragments: Sequence[Fragment]) -> None:
        watched = contextlib.nullcontext() if self._watch is None else self._watch.refused()
        with contextlib.nullcontext() if self.around is None else self.around.shown(fragments), watched, seen():
            self.stepping = True
            try:
                own_step(type(self._optimizer))(self._optimizer)
            finally:
                self.stepping = False
        self._states.replaced(fragments, inside=True)

    def write_back(self, bucket: Bucket) -> None:
        """Cast a bucket's masters to its parameters, and mark its weights as new."""
        if bucket.codec.beside:
            first, last = bucket.updated
            with bucket.parameters.here(fresh=bucket.placements.together):
                nbytes = (last - first) * bucket.dtype.itemsize
                copied = self._ledger.note("copy", state="master", bucket=bucket.plan.index, logical=nbytes)
                bucket.write_back()
                ends(copied)
        bucket.changed()
