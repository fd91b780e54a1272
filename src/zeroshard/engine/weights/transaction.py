"""Transactions: work of all ranks together, from a beginning to an end; an exception may leave it between the two.

    transaction          is on the stack while       an exception leaves behind
    Forward              its outermost call runs     frames: modules that are open, gathered units
    Backward             autograd runs its task      gradients under way, sums of which a part is missing
    Binding (a step)     `optimizer.step()` runs     weights, of which some may be updated
    Updates              its backward runs           weights that were updated in backward, and not sent

The next transaction, and every verb of zeroshard's, recovers first: all transactions that have begun and do not run any
more are abandoned, on all ranks together (`Schedule.recover`).
"""

from __future__ import annotations

from ...comm.frames import Call


class Transaction:
    """A transaction: begun as long as `call` is set, and running as long as that call is on a thread's stack."""

    call: Call | None = None

    @property
    def begun(self) -> bool:
        """True from its beginning to its end, and after an exception until it is abandoned."""
        return self.call is not None

    def running(self) -> bool:
        """Tell if its call is on a stack. If it has begun and does not run, an exception ended it."""
        return self.call is not None and self.call.running()

    def left(self) -> bool:
        """Tell, from any thread, if an exception has ended it on its own thread: begun and not running."""
        call = self.call
        # A transaction that ends normally clears `call` before that leaves the stack.
        return call is not None and not call.running() and self.call is call

    def elsewhere(self) -> bool:
        """Tell if another thread runs it."""
        return self.call is not None and self.call.elsewhere()

    def torn(self) -> bool:
        """Tell if it has begun to write weights, and has not written all of them."""
        return False

    def abandon(self) -> None:
        """Drop what an exception has left of it, if anything; all ranks have ended what they had launched."""
