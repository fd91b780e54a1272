"""A feature that takes part in backwards and steps: it hears of their beginnings and ends, and of each bucket's sum.

    prepare     all ranks are at the beginning of the same backward
    begin       it has begun: gradients that the program cleared are zero
    summed      this rank has added up its shard of a bucket, and all contributions still lie beside the sum
    averaged    this rank has its part of the average, where that rests; or has reported why not
    ended       all of the backward's averages are there
    before_step, step_begun, passes_over    a step of an optimizer
    abandon     an exception ended the backward, or what came before it

One that uses averages as they come (`early`) has a queue of its own: `due` and `next`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ...comm.transport import Work
from ..weights.bucket import Bucket
from ..weights.transaction import Transaction
from .accumulator import Accumulator


class Subscriber:
    """The base of such features, which by default do nothing."""

    looks = False  # does it read contributions? Then the sum does not overwrite this rank's own
    early = False  # does it use up averages in backward?
    second: tuple[str, str] | None = None  # for the error of a second gradient: what became of the first, and a remedy
    skipped = 0  # steps that it passed over
    last: Any = None  # what it found last: why it passed over a step
    step: Transaction | None = None  # its part of a step, if an exception may leave that half done

    def words(self, *, local: bool) -> str:
        """Describe, as a backward begins (`local`: under no_sync), what must be equal on all ranks for this feature."""
        return ""

    def prepare(self) -> None:
        """Make ready for a backward, once all ranks are at its beginning."""

    def begin(self) -> None:
        """Begin a backward."""

    def summed(self, accumulator: Accumulator, pieces: Sequence[Tensor], total: Tensor) -> None:
        """Hear of a sum. pieces: contributions to this rank's shard, in rank order; total: their sum, together with the
        sum that they were added to."""

    def averaged(self, accumulator: Accumulator, having: set[int]) -> None:
        """Hear of an average. having: the numbers of the gradients that some rank has."""

    def due(self, allowed: int) -> Work | None:
        """Return the work that brings the oldest average to all ranks, if more than `allowed` are not used yet."""
        return None

    def next(self) -> None:
        """Use the oldest average."""

    def ended(self) -> None:
        """End a backward that is complete."""

    def before_step(self, number: int, *, closure: bool) -> None:
        """Report what a step of an optimizer may not do. closure: it was called with one."""

    def step_begun(self, number: int) -> None:
        """Take note that all ranks have begun a step of an optimizer."""

    def passes_over(self, buckets: Sequence[Bucket]) -> bool:
        """Decide, before an update of these buckets, if the update is skipped: the same answer on every rank."""
        return False

    def judge(self, overflow: bool) -> None:
        """Hear a `GradScaler`'s verdict, the same on every rank: on overflow it will pass over the step."""

    def between_steps(self, what: str) -> None:
        """Refuse a call that belongs between two steps, if this feature is in the middle of one."""

    def loaded(self) -> None:
        """Forget what was under way: all weights were loaded."""

    def uncounted(self, wrap: Callable[..., Any], leave_out: Callable[[Tensor], None]) -> None:
        """Let a simulation, which counts tensors that operators make, leave out the memory that the ledger counts.

        wrap: wraps a call that takes such memory. leave_out: to be called with tensors that came to rest in place.
        """

    @property
    def mark(self) -> int:
        """A number that ranks compare as they meet for a checkpoint; -1: none."""
        return -1

    def abandon(self) -> None:
        """End a backward that an exception has ended."""
