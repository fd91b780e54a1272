"""The running backward: its begin, its end, and its work at each gradient.

The first event of a backward, of any kind, begins it; a callback of the autograd engine ends it. A callback queued
inside a nested backward (re-entrant checkpointing) runs at the nested end, so it then hooks the node that is being
evaluated and queues itself again, until it runs at the end of the outermost one.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable

from ...comm.frames import Call
from ...errors import StateError
from ...events import Event, ends
from ..weights.gather_order import GatherOrder
from ..weights.guard import weak
from ..weights.tracing import backward_is_compiled
from ..weights.transaction import Transaction
from ..weights.unit import Unit
from .accumulator import Entry
from .gradient import Gradients
from .reduction import Reduction

log = logging.getLogger("zeroshard")


def _is_ours(hook: Callable[..., Any]) -> bool:
    """Tell if a hook is this package's, as those of a replay are."""
    module = getattr(getattr(hook, "func", hook), "__module__", None) or ""
    return module.partition(".")[0] == __name__.partition(".")[0]


def backward_is_running() -> bool:
    """Tell if this thread is inside the autograd engine."""
    return torch._C._current_graph_task_id() != -1


class Backward(Transaction):
    """The running backward of one sharded model on one rank, if there is one."""

    def __init__(
        self,
        units: list[Unit],
        gradients: Gradients,
        reduction: Reduction,
        gather_order: GatherOrder,
        meet: Callable[..., None],
        *,
        releases: bool,
    ) -> None:
        """meet: makes the ranks agree that a backward begins. releases: does it gather the weights of some units?"""
        self.units = units
        self.gradients = gradients
        self.reduction = reduction
        self.group = gradients.group
        self.ledger = gradients.group.ledger
        self.local = False  # inside no_sync()
        self.was_local = False  # has a backward run under no_sync() since weights were loaded?
        self._gather_order = gather_order
        self._meet = meet
        self._releases = releases
        self._task: int | None = None  # autograd's graph task of this backward
        self._ending: weakref.ref[Callable[[], None]] | None = None  # its callback, which only autograd holds
        self._own_segment = False  # did it begin a segment of gathers? (not inside a forward)
        self._recent: list[Unit] = []  # units gathered in it, oldest first
        self._at: tuple[Unit, Event | None] | None = None  # the unit that it is working on
        self._warned = False  # of a hook that may update weights?
        self._warned_of_sums = False  # of a hook that may expect what several backwards add up to?
        self._hooked: dict[int, int] = {}  # by entry number, our hook's id in the parameter's table of hooks

    @property
    def begun(self) -> bool:
        return self._task is not None

    @property
    def trouble(self) -> str:
        """The message to other ranks if an exception ended this backward."""
        return f"an exception ended backward {self.group.numbers['backward']}"

    @property
    def _goes_on(self) -> bool:
        """True if it has begun and autograd holds the callback that ends it, which an exception would have dropped."""
        return self._task is not None and self._ending is not None and self._ending() is not None

    def hook_gradients(self) -> None:
        """Watch every trainable parameter's gradient. Called again after parameters were unfrozen."""
        for entry in self.gradients.entries:
            if entry.param.requires_grad and entry.number not in self._hooked:
                hook = weak(self._after_accumulation, entry.number)
                self._hooked[entry.number] = entry.param.register_post_accumulate_grad_hook(hook).id

    def _stay_last(self) -> None:
        """Move our hooks behind those that the user registered later: those see the gradient before we take it."""
        with torch._C.DisableTorchFunctionSubclass():
            for number, ours in self._hooked.items():
                hooks = self.gradients.entries[number].param._post_accumulate_grad_hooks
                if next(reversed(hooks)) != ours:
                    hooks[ours] = hooks.pop(ours)

    @contextlib.contextmanager
    def holding_back(self) -> Iterator[None]:
        """Let backwards inside add up gradients on this rank only."""
        before, self.local = self.local, True
        try:
            yield
        finally:
            self.local = before

    # --- its beginning ----------------------------------------------------------------------------------------------

    def event(self, *_: Any) -> None:
        """Begin the backward at its first event, whatever that is."""
        if self._goes_on:
            return
        if backward_is_compiled():
            raise StateError(
                "backward is compiled: gradients are added up inside its graph, where no sharded model sees them",
                where="torch._dynamo.config.compiled_autograd, or compiled_autograd._enable(...)",
                instead="compile the model or its forward alone, by torch.compile",
            )
        self.group.check_stream()
        if self.begun:
            self.group.level(self.trouble)
        self.call = Call(torch.autograd.backward)
        kept, kind = self.reduction.kept(), "backward under no_sync" if self.local else "backward"
        words = "".join(each.words(local=self.local) for each in self.reduction.subscribers)
        which = zlib.crc32(repr((sorted(kept), words)).encode())
        facts = f"{len(kept)} parameters have gradients that this backward adds to" + f"; options {words}" * bool(words)
        with self.group.as_one():
            self._meet(kind, self.group.number("backward"), which, facts=lambda: facts)
            for each in self.reduction.subscribers:
                each.prepare()
            self._recent.clear()
            self._stay_last()
            if kept and not self._warned_of_sums:
                self._warn_of_sums(kept)
            self._task = torch._C._current_graph_task_id()
            self.reduction.begin(kept, local=self.local)
            self.was_local |= self.local
        self._own_segment = self._releases and not self._gather_order.active
        if self._own_segment:
            self._gather_order.begin(("backward", 0))
        self.ledger.begin("backward")
        self._queue_end(weak(self._end))

    # --- under way --------------------------------------------------------------------------------------------------

    def needs(self, unit: Unit, *, again: bool = False) -> None:
        """Take note that backward has come to this unit, and release units that it used before the last two. again: its
        forward runs again, before its own backward begins."""
        if self.ledger.record is not None and not again:
            self._work_on(unit)
        if self.begun and (not self._recent or self._recent[-1] is not unit):
            self._recent = [*(other for other in self._recent if other is not unit), unit]
            for done in self._recent[:-2]:
                done.release()  # except for buckets to which something still refers
            self._recent = self._recent[-2:]

    def _work_on(self, unit: Unit | None) -> None:
        """Record, if events are recorded, that backward has come to this unit, or to none."""
        if self.ledger.record is not None and (self._at is None or self._at[0] is not unit):
            if self._at is not None:
                ends(self._at[1])
            running = unit is not None and self.begun
            self._at = (unit, self.ledger.note("backward", unit=unit.name)) if unit is not None and running else None

    def _after_accumulation(self, number: int, param: nn.Parameter) -> None:
        """Reduce a parameter's gradient. It is complete, unless another (nested) backward adds to it."""
        if self.group.crossed is not None:
            self.group.hear_crossed()
        aside = None
        if not self._goes_on:
            aside = self.gradients.set_aside(number)
            self.event()
        contribution = self.reduction.of_entry[number]
        unit = contribution.unit
        if self.ledger.record is not None:
            self._work_on(unit)
        nested = torch._C._current_graph_task_id() != self._task
        entry = self.gradients.entries[number]
        added = self.reduction.arrived(entry, contribution, aside, nested=nested)
        if not added and entry.updater is None and not self._warned:
            self._warn_of_updates(entry)
        if added and not contribution.missing and all(self.reduction.complete(bucket) for bucket in unit.buckets):
            unit.release()

    def _warn_of_updates(self, entry: Entry) -> None:
        """Warn, once, of a hook that took a gradient away that no optimizer awaits: it may have updated the weight."""
        with torch._C.DisableTorchFunctionSubclass():
            taken = entry.param.grad is None and len(entry.param._post_accumulate_grad_hooks or ()) > 1
        if taken and self.group.ranks > 1:
            self._warned = True
            log.warning(
                "a hook took the gradient of parameter %r away inside backward, where it is this rank's own: an update "
                "of the weight by it differs on each rank. shard(model, optimizer, optimizer_in_backward=True) updates "
                "by the average, as backward goes on",
                entry.slot.name,
            )

    def _warn_of_sums(self, kept: set[int]) -> None:
        """Warn, once, of the program's hook on a gradient that this backward adds to: it sees what this one adds."""
        for number in sorted(kept & self._hooked.keys()):
            entry = self.gradients.entries[number]
            with torch._C.DisableTorchFunctionSubclass():
                hooks = {**(entry.param._post_accumulate_grad_hooks or {})}
            if any(key != self._hooked[number] and not _is_ours(hook) for key, hook in hooks.items()):
                self._warned_of_sums = True
                log.warning(
                    "the hook after the gradient of parameter %r sees what this backward adds, and not the sum with "
                    "earlier backwards of the step, which rests in shards: read or edit p.grad between the last "
                    "backward and step()",
                    entry.slot.name,
                )
                return

    # --- its end ----------------------------------------------------------------------------------------------------

    def _queue_end(self, end: Callable[[], None]) -> None:
        # Only autograd holds the callback: it lives exactly as long as the backward that will call it.
        self._ending = weakref.ref(end)
        Variable._execution_engine.queue_callback(end)

    def _end(self) -> None:
        if not self.begun:
            return
        node = torch._C._current_autograd_node()
        if node is not None:
            # The end of a nested backward: come back when the node that runs it is through.
            handles: list[Any] = []
            end = (self._ending and self._ending()) or weak(self._end)

            def again(*_: Any) -> None:
                handles.pop().remove()
                self._task = torch._C._current_graph_task_id()
                self._queue_end(end)

            handles.append(node.register_hook(again))
            return
        # After an exception below, the backward is still begun.
        received = self.reduction.received()
        usual = received.count(1) == len(received)
        vote = usual + 2 * self.gradients.foreseen.wish(local=self.local, alone=self.group.ranks == 1)
        if self._own_segment:
            votes = self._gather_order.finish(vote)
        else:
            votes = {told for (told,) in self.group.poll("end of backward", self.group.numbers["backward"], vote)}
        self._work_on(None)
        with self.ledger.during("reduce"):
            self.reduction.finish(received, usual=all(each % 2 for each in votes))
        self._release_all()
        self.gradients.foresee({each // 2 for each in votes})
        self._task = self.call = None
        self.ledger.end("backward")
        for unit in self.units:
            unit.backward_ended()

    def running(self) -> bool:
        return self.begun and backward_is_running()

    def left(self) -> bool:
        # The call alone does not tell: on a device, hooks run on a thread of autograd's, which has no call of backward.
        return self.begun and not self._goes_on and super().left()

    def abandon(self) -> None:
        if self.begun:
            self._task = self.call = None
            self._release_all()
            self._work_on(None)
            self.ledger.end("backward")
            for unit in self.units:
                unit.calls.clear()  # a step that is tried again counts its own forwards

    def _release_all(self) -> None:
        self._recent.clear()
        for unit in self.units:
            unit.touched = False
            unit.close()
            unit.release()
