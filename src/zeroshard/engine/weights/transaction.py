"""Transactions: work of all ranks together, from a beginning to an end; an exception may leave it between the two.

    transaction          is on the stack while       an exception leaves behind
    Forward              its outermost call runs     frames: modules that are open, gathered units
    Backward             autograd runs its task      gradients under way, sums of which a part is missing
    Binding (a step)     `optimizer.step()` runs     weights, of which some may be updated
    Updates              its backward does           weights that were updated in backward, and not sent

The next of them, and every verb of zeroshard's, recovers first: all that are begun and do not run are abandoned, on all
ranks together (`Schedule.recover`).
"""

from __future__ import annotations

from ...comm.frames import Call


class Transaction:
    """A transaction is begun as long as it has a call, and runs as long as that is on a thread's stack."""

    call: Call | None = None

    @property
    def begun(self) -> bool:
        """True from its beginning to its end, and after an exception until it is abandoned."""
        return self.call is not None

    def running(self) -> bool:
        """Tell if it is still on a stack: if it is begun and not, an exception has ended it."""
        return self.call is not None and self.call.running()

    def left(self) -> bool:
        """Tell on any thread, also of another one's, if an exception has ended it: it is begun and not running."""
        call = self.call
        # Whatever ends normally lets go of its call before it leaves the stack.
        return call is not None and not call.running() and self.call is call

    def elsewhere(self) -> bool:
        """Tell if another thread runs it."""
        return self.call is not None and self.call.elsewhere()

    def torn(self) -> bool:
        """Tell if it has begun to write weights, and has not written all of them."""
        return False

    def abandon(self) -> None:
        """Drop what an exception has left of it, if anything; all ranks have ended what they had launched."""
