"""Gradients after they are reduced: the accumulators, and `p.grad` as the user sees it.

After backward every rank holds its shard of each bucket's running sum (`Accumulator.sum`), at every stage alike.
`p.grad` is a `ShardedGrad`: a tensor of the parameter's shape without memory of its own, that knows where the sum
lies. It answers what gradient clipping, scaling and zeroing ask, exactly and the same on every rank; whatever it
cannot answer it refuses, with the remedy.

The sum is divided by the number of ranks late, because (a / 3) * 3 is not a: reading divides a copy, only editing or
stepping divides in place. Where nothing is lost by it (`divides_exactly`) it is divided whenever something has landed.
"""

from __future__ import annotations

import contextlib
import math
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn

from ..errors import StateError, TierError
from ..layout import Slot
from ..numerics import (
    BLOCK,
    BlockMap,
    add_to_bins,
    add_to_maxima,
    average_,
    block_sums,
    empty_bins,
    roots_from_bins,
    sums_from_bins,
    sums_in,
)
from ..ranks.agreement import Group
from ..ranks.transport import Work
from .buffer import Buffer
from .flat import Flat

aten = torch.ops.aten


class Accumulator:
    """The running sum of one bucket's gradients since they were last cleared, this rank's shard of it."""

    def __init__(self, buffer: Buffer, ranks: int) -> None:
        assert buffer.gradients is not None
        self.buffer = buffer
        self.bucket = buffer.bucket
        self.sum: Flat = buffer.gradients
        self.entries: list[Entry] = []  # of the bucket's parameters
        self.ranks = ranks
        self.filled = False  # has anything been added since the gradients were cleared?
        self.averaged = False  # has the sum been divided by the number of ranks already?
        self.spread = False  # has every rank the whole average? (replicated optimizer state needs it)
        self.rounded = False  # does a sum that rests in a file stand for the average that a step took of it in memory?
        self.local: Tensor | None = None  # full-size sum of what backward under no_sync left unreduced
        self._blocks: BlockMap | None = None

    def fragment(self, index: int) -> Tensor:
        """This rank's elements of one slot of the sum, 1-D (possibly empty); inside sum.here()."""
        return self.sum.fragment(self.bucket.slots[index])

    def zero(self, index: int) -> None:
        with self.sum.here():
            self.fragment(index).zero_()

    def holds(self, tensor: Tensor | None) -> bool:
        """Is this the accumulator's own memory, which contributions may be put together in while it is empty?"""
        return self.sum.on_device and tensor is self.sum.tensor

    def average(self, *, kept: bool = True) -> None:
        """Turn the sum into the average, in place; one that is not to be `kept` ends with `forget_step`."""
        if not self.averaged:
            with self.sum.here(changed=kept):
                average_(self.sum.own, self.ranks)
            self.averaged = True

    def forget_step(self, *, averaged: bool) -> None:
        """What a step made of it in memory nobody else needs: writing that to its file would be for nothing.

        averaged: does the average rest there, and not the sum that the step divided?
        """
        self.sum.rest.forget()
        self.averaged, self.spread, self.rounded = averaged, False, not averaged

    def spread_average(self, *, kept: bool = True) -> Work:
        """Launch the gather of the whole average, where the optimizer's state is replicated and asks for it."""
        self.average(kept=kept)
        if self.buffer.place.optimizer or self.spread:
            return Work()
        self.spread = True
        return self.sum.spread(self.buffer.tier.device, kept=kept)

    @property
    def for_step(self) -> Tensor:
        """The averaged gradient of what this rank's optimizer updates, 1-D; inside sum.here()."""
        return self.sum.of(*self.buffer.updated)

    def undo_average(self) -> None:
        """Back to a sum, because more is to be added. Exact where the number of ranks is a power of two."""
        self.spread = False
        if (self.averaged or self.rounded) and self.ranks > 1:
            with self.sum.here():
                if not self.averaged:
                    average_(self.sum.own, self.ranks)
                self.sum.own.mul_(self.ranks)
        self.averaged = self.rounded = False

    def clear(self) -> None:
        self.filled = self.averaged = self.spread = self.rounded = False

    def blocks(self) -> BlockMap:
        """Which of the shard's blocks belongs to which entry of the book."""
        if self._blocks is None:
            parts = [slot.slice_of(*self.buffer.owned) for slot in self.bucket.slots]
            parts_of = zip(self.entries, parts, strict=True)
            spans = [(entry.number, part.start, part.stop) for entry, part in parts_of if part.stop]
            self._blocks = BlockMap(self.sum.own.numel(), min(BLOCK, self.buffer.align), spans, self.sum.own.device)
            self.buffer.tier.ledger.hold("norms", self._blocks.nbytes)
        return self._blocks


@dataclass(eq=False)
class Entry:
    """One trainable parameter in the book of gradients."""

    number: int
    param: nn.Parameter
    accumulator: Accumulator
    position: int  # of its slot in the bucket
    slot: Slot
    updater: int | None = None  # the number of the optimizer that updates it, on some rank
    fragments: list[nn.Parameter] = field(default_factory=list)  # what that optimizer holds of it on this rank
    displaced: ShardedGrad | None = None  # what `p.grad` was when autograd was about to add to it


class Keeper(Protocol):
    """Who brings gradients into a state in which questions can be answered."""

    def recover(self) -> None:
        """End a backward that an exception ended."""

    def settle(self) -> None:
        """Reduce what backwards under no_sync left."""

    def judge(self, overflow: bool) -> None:
        """Hear the verdict of a GradScaler, the same on every rank."""


class Gradients:
    """The book of all gradients: who has one, and the answers to questions about them."""

    def __init__(self, group: Group, keeper: Keeper) -> None:
        self.group = group
        self.keeper = keeper
        self.accumulators: list[Accumulator] = []
        self._of_bucket: dict[int, Accumulator] = {}  # by the bucket's index
        self.entries: list[Entry] = []
        self.stand_ins: dict[int, nn.Parameter] = {}  # optimizer number -> its first fragment on this rank
        self.uncalled: set[int] = set()  # numbers of the optimizers in a step whose closure was not called yet
        self._edits: list[str] = []  # by which numbers gradients were scaled, clamped, ... since the last step
        self._edited_with: Any = None
        self._displaced: list[Entry] = []  # those with something in `displaced`
        self.made: dict[int, ShardedGrad] = {}  # what parameters and fragments show, by id: while these are the same
        self._judged: Tensor | None = None  # the found_inf that already has all ranks' verdict
        self._questions = 0
        self._answers: dict[float, Tensor] = {}

    def add(self, buffer: Buffer) -> Accumulator:
        """Enter a bucket whose parameters receive gradients."""
        accumulator, slots = Accumulator(buffer, self.group.ranks), buffer.bucket.slots
        for index, (param, slot) in enumerate(zip(buffer.params, slots, strict=True)):
            accumulator.entries.append(Entry(len(self.entries) + index, param, accumulator, index, slot))
        self.entries += accumulator.entries
        self.accumulators.append(accumulator)
        self._of_bucket[buffer.bucket.index] = accumulator
        return accumulator

    def of_bucket(self, index: int) -> Accumulator | None:
        """The accumulator of a bucket; None while the bucket is frozen."""
        return self._of_bucket.get(index)

    def forget_answers(self) -> None:
        self._answers.clear()

    def show(self, entries: Iterable[Entry]) -> None:
        """Make `p.grad` the sharded gradient."""
        with torch._C.DisableTorchFunctionSubclass():
            for entry in entries:
                if not isinstance(entry.param.grad, ShardedGrad):
                    entry.param.grad = self.shown(entry, entry.param, is_fragment=False)
                for fragment in entry.fragments:
                    fragment.grad = self.shown(entry, fragment, is_fragment=True)
                # GradScaler wants to see a gradient in each optimizer, also on a rank that owns nothing of any.
                if not entry.fragments and entry.updater in self.stand_ins:
                    stand_in = self.stand_ins[entry.updater]
                    if stand_in.grad is None:
                        stand_in.grad = self.shown(entry, stand_in, is_fragment=True)

    def shown(self, entry: Entry, holder: nn.Parameter, *, is_fragment: bool) -> ShardedGrad:
        """What a parameter or a fragment shows as its gradient, made once: making it takes longer than all else here.

        A parameter's that somebody else has kept is made anew: a kept one must not speak for a later backward.
        """
        kept = not is_fragment and sys.getrefcount(self.made.get(id(holder))) > 2  # by the table, and for the question
        known = self.made.get(id(holder))
        if known is None or kept or known._number != entry.number:
            known = self.made[id(holder)] = ShardedGrad(self, entry, holder, is_fragment=is_fragment)
        return known

    def take(self, numbers: Iterable[int]) -> dict[int, Tensor | None]:
        """What these parameters have in `p.grad`, which is None then."""
        while self._displaced:
            self._displaced.pop().displaced = None
        with torch._C.DisableTorchFunctionSubclass():
            taken = {number: self.entries[number].param.grad for number in numbers}
            for number in taken:
                self.entries[number].param.grad = None
        return taken

    def put_back(self, taken: dict[int, Tensor | None], got: Sequence[int]) -> None:
        """What was taken is there again, but where something was got instead; `taken` keeps none of it."""
        while taken:
            number, grad = taken.popitem()
            if not got[number]:
                self.entries[number].param.grad = grad

    def set_aside(self, number: int) -> Tensor | None:
        """A gradient came before it was known that a backward runs: that, and `p.grad` is what it was before."""
        entry, early = self.entries[number], None
        with torch._C.DisableTorchFunctionSubclass():
            if not isinstance(entry.param.grad, ShardedGrad):
                early, entry.param.grad, entry.displaced = entry.param.grad, entry.displaced, None
        return early

    def displace(self, entry: Entry, grad: ShardedGrad) -> None:
        """Autograd is about to add to what `p.grad` shows: see `set_aside`."""
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
        """The numbers of those that have a gradient. Clearing or replacing `p.grad` counts."""
        with torch._C.DisableTorchFunctionSubclass():
            grads = [entry.param.grad for entry in entries]
        for entry, grad in zip(entries, grads, strict=True):
            if grad is not None and not (isinstance(grad, ShardedGrad) and grad._number == entry.number):
                raise StateError(
                    "a sharded gradient was replaced by another tensor",
                    where=f"parameter {entry.slot.name!r}",
                    expected="the ShardedGrad that backward left here, edited in place",
                    got=type(grad).__name__,
                    instead="p.grad.copy_(tensor)",
                )
        return {entry.number for entry, grad in zip(entries, grads, strict=True) if grad is not None}

    def note_edit(self, what: str, number: Any) -> None:
        """Gradients are edited by a number: the same on every rank, or the next step says so.

        One after the other by the same number counts once: ranks may hold different parameters. What is on another
        device is not looked at, which would wait for the device.
        """
        if number is self._edited_with or (isinstance(number, Tensor) and (number.numel() > 1 or not number.is_cpu)):
            return
        self._edited_with = number
        edit = f"{what} {float(number)}"
        if edit not in self._edits[-1:]:
            self._edits.append(edit)

    def take_edits(self) -> list[str]:
        edits, self._edits, self._edited_with = self._edits, [], None
        return edits

    # --- questions: every rank asks, one collective answers for all parameters --------------------------------------

    def ask(self) -> None:
        """Agree that every rank is asking; reduce first what was only summed locally."""
        self.keeper.settle()
        self.agree()

    def agree(self) -> None:
        self.keeper.recover()
        self.group.meet("a question about gradients", self._questions + 1)
        self._questions += 1

    def norm(self, entry: Entry, order: float) -> Tensor:
        """0-d fp32 tensor: the norm of one parameter's whole gradient, the same on every rank."""
        if order not in self._answers:
            if not order > 0.0:
                raise StateError(
                    "this norm of a sharded gradient is not defined",
                    where=f"gradient of {entry.slot.name!r}",
                    expected="an order above 0, or inf",
                    got=f"order {order}",
                    instead="norm_type=2.0, 1.0 or float('inf')",
                )
            self._answers[order] = self._norms(order)
        return self._answers[order][entry.number]

    def _norms(self, order: float) -> Tensor:
        self.ask()
        device = self.entries[0].param.device
        bins = empty_bins(len(self.entries), device, sums_in(order))
        maxima = torch.zeros(len(self.entries), dtype=torch.int32, device=device)
        for accumulator in self._filled():
            with self.reporting(), accumulator.sum.here(changed=False):
                blocks = accumulator.blocks()
                sums = block_sums(accumulator.sum.own, blocks, 1 if accumulator.averaged else self.group.ranks, order)
                owner, sums = blocks.owner.to(device), sums.to(device)
                if order == math.inf:
                    add_to_maxima(maxima, owner, sums)
                else:
                    add_to_bins(bins, owner, sums)
        if order == math.inf:
            agreed = maxima.cpu()
            self.group.maximum(agreed)
            return agreed.view(torch.float32).to(device)
        agreed = bins.cpu()
        self.group.total(agreed)
        if sums_in(order) is torch.float64:
            return roots_from_bins(agreed, order).to(torch.float32).to(device)
        sums = sums_from_bins(agreed)
        return (sums.sqrt() if order == 2.0 else sums).to(torch.float32).to(device)

    @contextlib.contextmanager
    def reporting(self) -> Iterator[None]:
        """What fails inside is an error on every rank, at the next agreement: the step's at the latest."""
        try:
            yield
        except TierError as error:
            self.group.report(error)

    def _filled(self) -> Iterator[Accumulator]:
        """Those that hold a sum of which this rank has a part, the next one under way to memory."""
        found = [
            each for each in self.accumulators if each.filled and each.bucket.shard_numel(self.group.team.position)
        ]
        for accumulator, after in zip(found, [*found[1:], None], strict=False):
            with self.reporting():
                accumulator.sum.ahead()
                if after is not None:
                    after.sum.ahead()
            yield accumulator

    def full(self, entry: Entry) -> Tensor:
        """The whole averaged gradient of one parameter, on every rank."""
        self.ask()
        accumulator, buffer = entry.accumulator, entry.accumulator.buffer
        first, last = buffer.owned
        whole = torch.zeros(buffer.bucket.numel, dtype=buffer.grad_dtype, device=buffer.full.device)
        with self.reporting(), accumulator.sum.here(changed=False):
            whole[first:last].copy_(accumulator.sum.own)
        if not accumulator.averaged:
            average_(whole[first:last], self.group.ranks)
        self.group.team.gather(whole, buffer.bucket, "gradients").wait()
        if accumulator.sum.away:  # on some rank it may not have come
            self.agree()
        return whole[entry.slot.start : entry.slot.stop].view(entry.slot.shape).clone()

    def unscale(self, grads: Sequence[ShardedGrad], found_inf: Tensor, inv_scale: Tensor) -> None:
        """What `GradScaler` does to a list of gradients, with one verdict for all ranks.

        It calls once per dtype that it sees, which differs over the ranks: so the first call with a new `found_inf`
        settles the verdict for everything that the optimizer updates.
        """
        if found_inf is not self._judged:
            self.ask()
            self._judged = found_inf
            mine = [entry for entry in self.entries if entry.updater == grads[0]._entry.updater]
            having = self.having(mine)
            finite = all(self._finite(entry) for entry in mine if entry.number in having)
            agreed = torch.tensor([0 if finite else 1], dtype=torch.uint8, device="cpu")
            self.group.maximum(agreed)
            found_inf.fill_(max(float(agreed), float(found_inf)))
            self.keeper.judge(bool(agreed))
        self.note_edit("unscale", inv_scale)
        by_accumulator: dict[int, list[ShardedGrad]] = {}
        for grad in grads:
            by_accumulator.setdefault(id(grad._entry.accumulator), []).append(grad)
        for together in by_accumulator.values():
            with self.reporting(), together[0]._entry.accumulator.sum.here():
                fragments = [fragment for fragment in (grad.editable() for grad in together) if fragment.numel()]
                for fragment in fragments[:1]:  # where the accumulator rests elsewhere, so must these
                    found, inverse = found_inf.to(fragment.device), inv_scale.to(fragment.device)
                    aten._amp_foreach_non_finite_check_and_unscale_(fragments, found, inverse)

    def _finite(self, entry: Entry) -> bool:
        with self.reporting(), entry.accumulator.sum.here(changed=False):
            return bool(entry.accumulator.fragment(entry.position).isfinite().all())
        return False


class ShardedGrad(Tensor):
    """`p.grad` of a managed parameter (or the `.grad` of an optimizer fragment outside `step()`).

    Has the shape, dtype and device of its parameter and no memory. `full_tensor()` gathers the real thing.
    """

    # Weak, and a number instead of the entry: p.grad is a reference in C++, where the collector sees no cycles.
    _weak_book: weakref.ref[Gradients]
    _number: int
    _is_fragment: bool

    @staticmethod
    def __new__(cls, book: Gradients, entry: Entry, like: Tensor, *, is_fragment: bool) -> ShardedGrad:
        return torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=like.device)

    def __init__(self, book: Gradients, entry: Entry, like: Tensor, *, is_fragment: bool) -> None:
        self._weak_book = weakref.ref(book)
        self._number = entry.number
        self._is_fragment = is_fragment

    @property
    def _book(self) -> Gradients:
        book = self._weak_book()
        if book is None:
            raise StateError(
                "this gradient belongs to a sharded model that is gone",
                instead="keep the model while its gradients are used",
            )
        return book

    @property
    def _entry(self) -> Entry:
        return self._book.entries[self._number]

    def _makes_way(self, func: Any, what: Tensor) -> Tensor | None:
        """If it is autograd that adds to this, then to nothing: what comes is a gradient by itself, to be reduced."""
        param = self._entry.param
        if getattr(torch._C._current_autograd_node(), "variable", None) is not param:
            return None
        self._book.displace(self._entry, self)
        what = what.clone()
        if func is aten.add_.Tensor:
            with torch._C.DisableTorchFunctionSubclass():
                param.grad = what
        return what

    @property
    def _current(self) -> Entry:
        """The entry, if this is still its gradient: a kept handle must not speak for a later backward."""
        entry = self._entry
        with torch._C.DisableTorchFunctionSubclass():
            holders = [entry.param.grad, *(fragment.grad for fragment in entry.fragments)]
        if not any(holder is self for holder in holders) and not self._is_fragment:
            raise StateError(
                "this gradient was cleared, or another backward has added to it since",
                where=f"gradient of {entry.slot.name!r}",
                instead="read p.grad again, or keep p.grad.full_tensor()",
            )
        return entry

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ShardedGrad({self._entry.slot.name!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def _cannot(self, what: object) -> StateError:
        if self._entry.updater in self._book.uncalled:
            return StateError(
                "the optimizer reads gradients before it calls the closure that its step was given",
                where=f"gradient of {self._entry.slot.name!r}",
                expected="closure() first: gradients are divided and bound when it returns",
                got=f"{what}",
                instead="call closure() yourself, then optimizer.step() without it",
            )
        return StateError(
            f"a sharded gradient cannot answer {what}",
            where=f"gradient of {self._entry.slot.name!r}",
            expected="clip_grad_norm_, clip_grad_value_, GradScaler, zero_ and elementwise edits in place",
            instead="p.grad.full_tensor() on every rank, or p.grad.to_local() for this rank's elements"
            if self._entry.updater is not None
            else "shard(model, optimizer), if this is a step: no optimizer that shard(...) was given updates it",
        )

    def tolist(self) -> NoReturn:  # torch refuses these two itself, but says no remedy
        raise self._cannot("tolist()")

    def numpy(self, *, force: bool = False) -> NoReturn:
        raise self._cannot("numpy()")

    def full_tensor(self) -> Tensor:
        """The whole averaged gradient, a plain tensor in the accumulation dtype. Collective: call it on every rank."""
        return self._book.full(self._current)

    def to_local(self) -> Tensor:
        """This rank's elements of the averaged gradient, a 1-D copy that cannot be written to.

        Collective only where no_sync left something.
        """
        self._book.keeper.settle()
        with self._current.accumulator.sum.here(changed=False):
            local = self._entry.accumulator.fragment(self._entry.position).clone()
        if not self._entry.accumulator.averaged:
            average_(local, self._book.group.ranks)
        return ReadOnly.of(local, self._entry.slot.name)

    def editable(self) -> Tensor:
        """This rank's elements, averaged, to be changed in place; inside its accumulator's sum.here()."""
        entry = self._current
        self._book.keeper.settle()
        self._book.forget_answers()
        entry.accumulator.average()
        entry.accumulator.spread = False
        return entry.accumulator.fragment(entry.position)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if func is aten.detach.default:
            return args[0]
        if func in (aten.linalg_vector_norm.default, aten._foreach_norm.Scalar):
            return _norm(func, *args, **kwargs)
        if func is aten._amp_foreach_non_finite_check_and_unscale_.default:
            return args[0][0]._book.unscale(*args)
        if func in (aten.add_.Tensor, aten.add.Tensor) and isinstance(args[0], ShardedGrad):
            alone = args[0]._makes_way(func, args[1])
            if alone is not None:
                return alone
        if func in _ELEMENTWISE and isinstance(args[0], ShardedGrad):
            _edit(func, args[0], args[1:], kwargs)
            return args[0]
        if func in _FOREACH:  # in a list with gradients of parameters that are not managed, perhaps
            for number, grad in enumerate(args[0]):
                others = [a[number] if isinstance(a, (list, tuple)) else a for a in args[1:]]
                if isinstance(grad, ShardedGrad):
                    _edit(_FOREACH[func], grad, others, kwargs)
                else:
                    _FOREACH[func](grad, *others, **kwargs)
            return None
        first = next(leaf for leaf in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(leaf, ShardedGrad))
        raise first._cannot(func)


class ReadOnly(Tensor):
    """A copy of a gradient, to which nobody may write: it would change nothing. What is computed from it is plain."""

    _name: str

    @staticmethod
    def of(tensor: Tensor, name: str) -> ReadOnly:
        made = torch.Tensor._make_subclass(ReadOnly, tensor)
        made._name = name
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        declared = func._schema.arguments
        given = [*zip(declared, args, strict=False), *((a, kwargs[a.name]) for a in declared if a.name in kwargs)]
        for argument, value in given:
            if argument.alias_info is not None and argument.alias_info.is_write:
                for leaf in torch.utils._pytree.tree_leaves(value):
                    if isinstance(leaf, ReadOnly):
                        raise leaf._refusal(func)
        with torch._C._DisableTorchDispatch():
            made = func(*args, **kwargs)
        source = next(leaf for leaf in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(leaf, ReadOnly))
        aliases = [each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns]
        if any(aliases):  # a view
            made = torch.utils._pytree.tree_map_only(Tensor, lambda view: cls.of(view, source._name), made)
        return made

    def _refusal(self, func: Any) -> StateError:
        return StateError(
            f"to_local() gives a copy of a gradient, and {func} would change nothing but the copy",
            where=f"gradient of {self._name!r}",
            instead="edit p.grad in place, or write to p.grad.to_local().clone()",
        )

    def tolist(self) -> Any:
        return self.clone().tolist()  # torch refuses this of a subclass

    def numpy(self, *, force: bool = False) -> Any:
        """Read-only as well."""
        array = self.clone().numpy(force=force)
        array.flags.writeable = False
        return array

    def __array__(self, dtype: Any = None) -> Any:
        array = self.numpy()
        return array if dtype is None else array.astype(dtype)

    def __deepcopy__(self, memo: Any) -> Any:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)


def _norm(
    func: Any, what: Any, order: float = 2.0, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    several = what if isinstance(what, (list, tuple)) else [what]
    grads = [grad for grad in several if isinstance(grad, ShardedGrad)]
    for grad in grads:
        if grad._is_fragment:
            raise StateError(
                "the norm of an optimizer's fragments is only this rank's part of it",
                where=f"gradient of {grad._entry.slot.name!r}",
                instead="torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)",
            )
    if dim is not None or keepdim:
        raise StateError(
            "a sharded gradient has a norm as a whole only",
            where=f"gradient of {grads[0]._entry.slot.name!r}",
            got=f"dim={dim}",
            instead="p.grad.full_tensor().norm(dim=...) on every rank",
        )
    norms = [
        grad._book.norm(grad._current, float(order))
        if isinstance(grad, ShardedGrad)
        else torch.linalg.vector_norm(grad, order, dtype=dtype)
        for grad in several
    ]
    return norms if isinstance(what, (list, tuple)) else norms[0]


_ELEMENTWISE = {
    aten.mul_.Tensor, aten.mul_.Scalar, aten.div_.Tensor, aten.div_.Scalar, aten.add_.Tensor, aten.add_.Scalar,
    aten.sub_.Tensor, aten.sub_.Scalar, aten.clamp_.default, aten.clamp_min_.default, aten.clamp_max_.default,
    aten.zero_.default, aten.neg_.default, aten.sign_.default, aten.nan_to_num_.default, aten.fill_.Scalar,
    aten.copy_.default,
}  # fmt: skip
_FOREACH = {
    aten._foreach_mul_.Scalar: aten.mul_.Scalar,
    aten._foreach_mul_.Tensor: aten.mul_.Tensor,
    aten._foreach_div_.Scalar: aten.div_.Scalar,
    aten._foreach_zero_.default: aten.zero_.default,
    aten._foreach_clamp_min_.Scalar: aten.clamp_min_.default,
    aten._foreach_clamp_max_.Scalar: aten.clamp_max_.default,
}


def _pieces(entry: Entry, ranks: int) -> list[Any]:
    """Which elements of a parameter each rank owns."""
    bucket = entry.accumulator.buffer.bucket
    return [bucket.fragment(entry.slot, rank) for rank in range(ranks)]


def _edit(func: Any, grad: ShardedGrad, others: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Apply an elementwise op in place to this rank's elements; tensors of the gradient's shape are cut alike."""
    entry = grad._entry
    part, ranks = entry.slot.within(*entry.accumulator.buffer.owned), grad._book.group.ranks

    def cut(other: Any) -> Any:
        if not isinstance(other, Tensor) or (other.numel() == 1 and other.dim() == 0):
            return other
        if isinstance(other, ShardedGrad) and other._is_fragment == grad._is_fragment:
            if _pieces(other._entry, ranks) == _pieces(entry, ranks) and other.shape == grad.shape:
                return other.to_local()
            raise StateError(
                "two sharded gradients that are not cut alike cannot be combined",
                where=f"gradients of {entry.slot.name!r} and {other._entry.slot.name!r}",
                expected=f"{tuple(grad.shape)}, of the same elements on each rank",
                got=f"{tuple(other.shape)}",
                instead="p.grad.add_(q.grad.full_tensor()), or the like, on every rank",
            )
        if tuple(other.shape) != entry.slot.shape or grad._is_fragment:
            raise StateError(
                "a sharded gradient can be edited by scalars and by tensors of its own shape",
                where=f"gradient of {entry.slot.name!r}",
                expected=entry.slot.shape,
                got=tuple(other.shape),
                instead="broadcast it first",
            )
        return other.reshape(-1)[part.start : part.stop]

    if not grad._is_fragment:
        for other in others:
            if isinstance(other, (int, float)) or (isinstance(other, Tensor) and other.dim() == 0):
                grad._book.note_edit(func.__name__, other)
    others = [cut(other) for other in others]
    with grad._book.reporting(), entry.accumulator.sum.here():
        func(grad.editable(), *others, **kwargs)
