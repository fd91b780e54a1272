"""The book of all gradients: which parameters have one, and the answers to questions about them.

A question about one gradient is a question about all: every rank asks, and one collective answers for all parameters.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...arithmetic.sums import average_
from ...comm.agreement import Group
from ...device import ask, blank
from ...errors import StateError, TierError
from ...layout.shard_dim import Elements
from ..weights.bucket import Bucket
from .accumulator import Accumulator, Entry
from .foreseen import Foreseen
from .norms import norms
from .sharded_grad import Keeper, ShardedGrad


class Gradients:
    """The book of all gradients: which parameters have one, and the answers to questions about them.

    Half of its methods are about which parameters show a gradient, the others answer questions. One collective answers
    a question for all gradients, so the answers must know which parameters show one: hence both are here.
    """

    def __init__(self, group: Group, keeper: Keeper) -> None:
        self.group = group
        self.keeper = keeper
        self.accumulators: list[Accumulator] = []
        self._of_bucket: dict[int, Accumulator] = {}  # by the bucket's index
        self.entries: list[Entry] = []
        self.stand_ins: dict[int, nn.Parameter] = {}  # optimizer number -> its first fragment on this rank
        self.uncalled: set[int] = set()  # numbers of optimizers that are in a step and have not called its closure yet
        self.refuse: Callable[[str, object], StateError] | None = None  # makes the error if backward uses gradients up
        self._edits: list[str] = []  # edits by a number (gradients scaled, clamped, ...) since the last step
        self._edited_with: Any = None
        self._asked: tuple[Tensor, int, Tensor] | None = None  # the last tensor brought to host, its version, the copy
        self._displaced: list[Entry] = []  # the entries whose `displaced` is set
        self.elements: dict[int, Elements] = {}  # by the fragment's id: which elements of its slot it has
        self.made: dict[int, ShardedGrad] = {}  # by id of a parameter or fragment: what it shows as its gradient
        self.judged: Tensor | None = None  # a GradScaler's found_inf that already has all ranks' verdict
        self.foreseen = Foreseen()
        self._answers: dict[float, Sequence[Tensor]] = {}

    def add(self, bucket: Bucket) -> Accumulator:
        """Enter a bucket whose parameters receive gradients."""
        accumulator, slots = Accumulator(bucket, self.group.sources), bucket.plan.slots
        for index, (param, slot) in enumerate(zip(bucket.params, slots, strict=True)):
            accumulator.entries.append(Entry(len(self.entries) + index, param, accumulator, index, slot))
        self.entries += accumulator.entries
        self.accumulators.append(accumulator)
        self._of_bucket[bucket.plan.index] = accumulator
        return accumulator

    def of_bucket(self, index: int) -> Accumulator | None:
        """Return the accumulator of a bucket; None while the bucket is frozen."""
        return self._of_bucket.get(index)

    def forget_answers(self) -> None:
        self._answers.clear()
        self.foreseen.changed()

    @contextlib.contextmanager
    def keeping_answers(self) -> Iterator[None]:
        """Keep answers over a backward inside, whose gradients are dropped."""
        answers, fresh = dict(self._answers), self.foreseen.fresh
        try:
            yield
        finally:
            self._answers, self.foreseen.fresh = answers, fresh

    def show(self, entries: Iterable[Entry]) -> None:
        """Make `p.grad` the sharded gradient."""
        with torch._C.DisableTorchFunctionSubclass():
            for entry in entries:
                if not isinstance(entry.param.grad, ShardedGrad):
                    entry.param.grad = self.shown(entry, entry.param)
                for fragment in entry.fragments:
                    fragment.grad = self.shown(entry, fragment, self.elements[id(fragment)])
                # GradScaler expects a gradient in each optimizer, also on a rank that owns no element of any.
                if not entry.fragments and entry.updater in self.stand_ins:
                    stand_in = self.stand_ins[entry.updater]
                    if stand_in.grad is None:
                        stand_in.grad = self.shown(entry, stand_in, Elements(0, 0))

    def shown(self, entry: Entry, holder: nn.Parameter, elements: Elements | None = None) -> ShardedGrad:
        """Return the ShardedGrad of a parameter or fragment. It is made once: making it takes longer than all the rest.

        elements: the elements of its slot that a fragment has.

        If the program holds a parameter's ShardedGrad, a new one is made: a kept one must not speak for a later
        backward.
        """
        kept = elements is None and sys.getrefcount(self.made.get(id(holder))) > 2  # 2: by the table and getrefcount
        known = self.made.get(id(holder))
        if known is None or kept or known._number != entry.number:
            known = self.made[id(holder)] = ShardedGrad(self, entry, holder, elements)
        return known

    def take(self, numbers: Iterable[int]) -> dict[int, Tensor | None]:
        """Take these parameters' `p.grad`, which is None then, and return them by number."""
        while self._displaced:
            self._displaced.pop().displaced = None
        with torch._C.DisableTorchFunctionSubclass():
            taken = {number: self.entries[number].param.grad for number in numbers}
            for number in taken:
                self.entries[number].param.grad = None
        return taken

    def put_back(self, taken: dict[int, Tensor | None], got: Sequence[int]) -> None:
        """Restore the taken `p.grad` of parameters that got no gradient since. It empties `taken`."""
        while taken:
            number, grad = taken.popitem()
            if not got[number]:
                self.entries[number].param.grad = grad

    def set_aside(self, number: int) -> Tensor | None:
        """Take a gradient that came before its backward was known to run, and restore `p.grad` from before it.

        Returns None if `p.grad` is still a sharded gradient.
        """
        entry, aside = self.entries[number], None
        with torch._C.DisableTorchFunctionSubclass():
            if not isinstance(entry.param.grad, ShardedGrad):
                aside, entry.param.grad, entry.displaced = entry.param.grad, entry.displaced, None
        return aside

    def displace(self, entry: Entry, grad: ShardedGrad) -> None:
        """Keep what `p.grad` shows, because autograd is about to add to it: see `set_aside`."""
        entry.displaced = grad
        self._displaced.append(entry)

    def hide(self, entries: Iterable[Entry]) -> None:
        """Make `p.grad` None, on the optimizers' side too."""
        with torch._C.DisableTorchFunctionSubclass():
            for entry in entries:
                entry.param.grad = None
                for fragment in entry.fragments:
                    fragment.grad = None

    def having(self, entries: Sequence[Entry]) -> set[int]:
        """Return the numbers of entries that have a gradient. Raises `StateError` if `p.grad` is another tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            grads = [entry.param.grad for entry in entries]
        for entry, grad in zip(entries, grads, strict=True):
            if grad is not None and not (isinstance(grad, ShardedGrad) and grad._number == entry.number):
                filled = entry.accumulator.filled  # by this parameter's gradient, or another's of its bucket
                raise StateError(
                    "a sharded gradient was replaced by another tensor",
                    where=f"parameter {entry.slot.name!r}",
                    expected="the ShardedGrad that backward left here, edited in place",
                    got=type(grad).__name__,
                    instead="p.grad.copy_(tensor) in place of p.grad = tensor; where p.grad was None, "
                    * filled
                    + "torch.autograd.backward(params, tensors) with each rank's own, which averages them (at stage 3 "
                    "in zero.gathered(), as torch.autograd.grad is)"
                    + "; no backward has left a gradient here"
                    * (not filled),
                )
        return {entry.number for entry, grad in zip(entries, grads, strict=True) if grad is not None}

    def note_edit(self, what: str, number: Any) -> None:
        """Note that gradients are edited by a number: if it differs between ranks, the next step reports it.

        Edits of one gradient after the other by the same number count once: ranks may hold different parameters.
        A number on a device is not looked at, since that would wait for the device.
        """
        if number is self._edited_with or (isinstance(number, Tensor) and (number.numel() > 1 or not number.is_cpu)):
            return
        self._edited_with = number
        edit = f"{what} {float(number)}"
        if edit not in self._edits[-1:]:
            self._edits.append(edit)

    def in_host_memory(self, other: Tensor) -> Tensor:
        """Copy an edit's operand to host memory, where the gradients rest; if it edits many of them, copy it once."""
        if other.is_cpu:
            return other
        asked = self._asked
        if asked is None or asked[0] is not other or asked[1] != other._version:
            asked = self._asked = other, other._version, ask(other)
        return asked[2]

    @property
    def edits(self) -> list[str]:
        """The edits of gradients by a number since the last step, or since gradients were dropped."""
        return list(self._edits)

    def take_edits(self) -> None:
        self.foreseen.stepped()
        self._edits, self._edited_with, self._asked = [], None, None

    # --- questions: every rank asks, one collective answers for all parameters --------------------------------------

    def ask(self) -> None:
        """Agree that every rank is asking; reduce first what was only summed locally."""
        self.keeper.flush()
        self.agree()

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        """Ask, and use the answer, as one operation of all ranks."""
        with self.group.as_one():
            self.ask()
            yield

    def agree(self) -> None:
        self.keeper.recover()
        self.group.meet("a question about gradients", self.group.number("question"))

    def norms(self, entry: Entry, order: float) -> Sequence[Tensor]:
        """Return the norm of each whole gradient, 0-d fp32, the same on every rank. entry: one whose norm is asked."""
        if order not in self._answers:
            if not order > 0.0:
                raise StateError(
                    "this norm of a sharded gradient is not defined",
                    where=f"gradient of {entry.slot.name!r}",
                    expected="an order above 0, or inf",
                    got=f"order {order}",
                    instead="norm_type=2.0, 1.0 or float('inf')",
                )
            with self.asking():
                self._answers[order] = norms(self, order).unbind()
            self.foreseen.asked(order)
        elif self.foreseen.used(order):
            self._edits.append(f"what a norm of order {order} decides")  # the step names a rank that did not ask
        return self._answers[order]

    def foresee(self, wishes: set[int]) -> None:
        """Compute the norm that all ranks expect their programs to ask for, if they expect the same one."""
        if (order := self.foreseen.agreed(wishes)) is not None:
            self._answers[order] = norms(self, order).unbind()

    @contextlib.contextmanager
    def reporting(self) -> Iterator[None]:
        """Report a `TierError` inside to all ranks, which raise at their next agreement: the step's at the latest."""
        try:
            yield
        except TierError as error:
            self.group.report(error)

    def hold(self, accumulator: Accumulator, act: Callable[[], None], *, changed: bool = True) -> None:
        """Call `act` with the sum in memory, unless it cannot be brought there. Report a `TierError` to all ranks."""
        with self.reporting(), accumulator.sum.here(changed=changed):
            act()

    def full(self, entry: Entry) -> Tensor:
        """Gather the whole averaged gradient of one parameter, on every rank."""
        with self.asking():
            return self._full(entry)

    def _full(self, entry: Entry) -> Tensor:
        accumulator, slot = entry.accumulator, entry.slot
        whole = blank(accumulator.plan.numel, accumulator.sum.dtype, self.group.device)
        first, last = accumulator.sum.owned
        accumulator.sum.copy(first, own := whole[first:last])
        if not accumulator.averaged:  # on this rank: an edit of some parameters divides it only on ranks that hold them
            average_(own, accumulator.divisor)
        accumulator.sum.send(whole).wait()
        if accumulator.sum.on_demand:  # a rank may have failed to bring its part
            self.agree()
        return whole[slot.start : slot.stop].view(slot.shape).clone()
