"""`p.grad` as the user sees it: a tensor of the parameter's shape that knows where the sum lies.

It answers what gradient clipping, scaling and zeroing ask, exactly and the same on every rank. It refuses every other
operation, with the remedy.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor
from torch.utils._foreach_utils import _foreach_supported_types

from ...comm.agreement import Group
from ...device import ask
from ...errors import StateError, without_own_lines
from ...layout.shard_dim import Elements
from ..weights.guard import not_given
from .accumulator import Accumulator, Entry
from .grad_scaler import by_accumulator, unscale

aten = torch.ops.aten


_AVERAGED = "leave it out if it is over the ranks of shard(...), as backward has averaged; else p.grad.full_tensor()"


class Keeper(Protocol):
    """The part of the engine that makes gradients ready for questions: nothing is left under way or unreduced."""

    def recover(self) -> None:
        """End a backward that an exception ended."""

    def flush(self) -> None:
        """Reduce the sums that backwards under no_sync left on this rank."""

    def judge(self, overflow: bool) -> None:
        """Hear the verdict of a GradScaler, the same on every rank."""


class Book(Protocol):
    """The book of all gradients, as one gradient needs it."""

    group: Group
    keeper: Keeper
    entries: list[Entry]
    uncalled: set[int]  # numbers of optimizers that are in a step and have not called its closure yet
    refuse: Callable[[str, object], StateError] | None  # makes the error if backward uses gradients up

    def norms(self, entry: Entry, order: float) -> Sequence[Tensor]:
        """Return the norm of each whole gradient, 0-d fp32, the same on every rank. entry: one whose norm is asked."""

    def full(self, entry: Entry) -> Tensor:
        """Gather the whole averaged gradient of one parameter, on every rank."""

    def hold(self, accumulator: Accumulator, act: Callable[[], None]) -> None:
        """Call `act` with the sum in memory, unless it cannot be brought there. Report a `TierError` to all ranks."""

    def displace(self, entry: Entry, grad: ShardedGrad) -> None:
        """Keep what `p.grad` shows, because autograd is about to add to it."""

    def note_edit(self, what: str, number: Any) -> None:
        """Note that gradients are edited by a number: if it differs between ranks, the next step reports it."""

    def in_host_memory(self, other: Tensor) -> Tensor:
        """Copy an edit's operand to host memory, where the gradients rest; if it edits many of them, copy it once."""

    def forget_answers(self) -> None:
        """Drop answers to questions about gradients, because these change."""


_DATA: Any = torch.Tensor.data


class ShardedGrad(Tensor):
    """`p.grad` of a managed parameter (or the `.grad` of an optimizer fragment outside `step()`).

    Has the shape, dtype and device of its parameter and no memory. `full_tensor()` gathers the real thing.
    """

    # A weak reference to the book, and a number instead of the entry: C++ holds p.grad, and the garbage collector sees
    # no cycles there.
    _weak_book: weakref.ref[Book]
    _number: int
    _elements: Elements | None  # if it is a fragment's: those of the slot

    @staticmethod
    def __new__(cls, book: Book, entry: Entry, like: Tensor, elements: Elements | None = None) -> ShardedGrad:
        return torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=like.device)

    def __init__(self, book: Book, entry: Entry, like: Tensor, elements: Elements | None = None) -> None:
        self._weak_book = weakref.ref(book)
        self._number = entry.number
        self._elements = elements

    @property
    def _is_fragment(self) -> bool:
        return self._elements is not None

    @property
    def _is_part(self) -> bool:
        """Tell if it is a fragment's gradient, except that of a whole parameter, which at stage 0 every rank has."""
        entry = self._entry
        whole = self._elements is None or self._elements.numel == entry.slot.numel
        return not whole or (self._is_fragment and bool(entry.accumulator.bucket.placements.optimizer))

    @property
    def _own(self) -> slice:
        """Where its elements lie among those of its slot whose average this rank has."""
        if self._elements is None:
            return slice(None)
        owned, (start, stop) = self._entry.slot.within(*self._entry.accumulator.bucket.owned), self._elements
        low = min(max(start, owned.start), owned.stop)
        return slice(low - owned.start, max(low, min(stop, owned.stop)) - owned.start)

    @property
    def _book(self) -> Book:
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
        """Return `what` alone, the new `p.grad` to be reduced, if autograd is adding it to this gradient; else None."""
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
        """The entry, if this is still its gradient; else raises: a kept handle must not speak for a later backward."""
        entry = self._entry
        if self._book.refuse is not None:
            raise self._book.refuse(entry.slot.name, "a question or an edit")
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
        if self._book.refuse is not None:
            return self._book.refuse(self._entry.slot.name, what)
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
            expected="clip_grad_norm_, clip_grad_value_, GradScaler, zero_, elementwise edits in place by numbers and "
            "tensors, as p.grad.mul_(mask), and p.grad[index] = value",
            instead=_AVERAGED if "c10d" in getattr(what, "namespace", "") else self._remedy(),
        )

    def _remedy(self) -> str:
        if not self._is_fragment and (advice := not_given(self._entry.param)):
            return advice
        if self._entry.updater is None:
            return "shard(model, optimizer), if this is a step: no optimizer that shard(...) was given updates it"
        if self._is_fragment:
            return (
                "read it inside step(), where it is this rank's gradient; or p.grad.full_tensor() of the model's own p"
            )
        return (
            "p.grad.full_tensor() on every rank, or p.grad.to_local() for this rank's elements; in an optimizer's own "
            "step() walk self.param_groups, where these are"
        )

    @property
    def data(self) -> Tensor:
        """The gradient as torch shows it without history; what is set here becomes the gradient, as by `copy_`."""
        return _DATA.__get__(self)  # type: ignore[no-any-return]

    @data.setter
    def data(self, value: Tensor) -> None:
        if not (isinstance(value, ShardedGrad) and value._number == self._number):  # p.grad.data *= 2
            self.copy_(value)

    def tolist(self) -> NoReturn:  # torch refuses these two itself, but says no remedy
        raise self._cannot("tolist()")

    def numpy(self, *, force: bool = False) -> NoReturn:
        raise self._cannot("numpy()")

    def __setitem__(self, index: Any, value: Any) -> None:
        """Write a number or a tensor to an index, as in a plain gradient. Every rank must write the same."""
        if self._is_fragment:
            raise self._cannot("an index")
        shape, device = self._entry.slot.shape, self.device
        chosen = torch.zeros(shape, dtype=torch.bool, device=device)
        chosen[index] = True
        if isinstance(value, Tensor) and value.dim():
            values = torch.zeros(shape, dtype=value.dtype, device=device)
            values[index] = value
            _edit(_choose, self, [chosen, values], {})
        else:
            fill = aten.masked_fill_.Tensor if isinstance(value, Tensor) else aten.masked_fill_.Scalar
            _edit(fill, self, [chosen, value], {})

    def full_tensor(self) -> Tensor:
        """Gather the whole averaged gradient, a plain tensor in the accumulation dtype. Collective: all ranks call."""
        return self._book.full(self._current)

    def to_local(self) -> Tensor:
        """Return this rank's elements of the averaged gradient, a 1-D copy that cannot be written to.

        Collective only if no_sync left sums to reduce.
        """
        self._book.keeper.flush()
        return ReadOnly.of(self._current.accumulator.read(self._entry.position)[self._own], self._entry.slot.name)

    def editable(self) -> Tensor:
        """Return this rank's elements, averaged, to be changed in place; inside its accumulator's sum.here()."""
        entry = self._current
        self._book.keeper.flush()
        self._book.forget_answers()
        entry.accumulator.edit()
        return entry.accumulator.fragment(entry.position)[self._own]

    @classmethod
    @without_own_lines
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten.detach.default:
            return args[0]
        if func in (aten.linalg_vector_norm.default, aten._foreach_norm.Scalar):
            return _norm(func, *args, **kwargs)
        if func is aten._amp_foreach_non_finite_check_and_unscale_.default:
            if args[0][0]._book.refuse is not None:
                raise args[0][0]._cannot("a GradScaler")
            return unscale(args[0][0]._book, *args)
        if func in (aten.add_.Tensor, aten.add.Tensor) and isinstance(args[0], ShardedGrad):
            alone = args[0]._makes_way(func, args[1])
            if alone is not None:
                return alone
        if func in _INTO and kwargs.get("out") is args[0]:
            func, kwargs = _INTO[func], {key: value for key, value in kwargs.items() if key != "out"}
        if func in _INDEX_FILL and isinstance(args[0], ShardedGrad) and -args[0].dim() <= args[1] < args[0].dim():
            args[0][(slice(None),) * (args[1] % args[0].dim()) + (args[2],)] = args[3]
            return args[0]
        if func in _ELEMENTWISE and isinstance(args[0], ShardedGrad):
            _edit(func, args[0], args[1:], kwargs)
            return args[0]
        if func in _FOREACH:  # the list may also hold gradients of parameters that are not managed
            scaled = _scale_buckets(_FOREACH[func], *args, **kwargs)
            for number, grad in enumerate(args[0]):
                if id(grad) in scaled:
                    continue
                others = [a[number] if isinstance(a, (list, tuple)) else a for a in args[1:]]
                if isinstance(grad, ShardedGrad):
                    _edit(_FOREACH[func], grad, others, kwargs)
                else:
                    _FOREACH[func](grad, *others, **kwargs)
            return None
        first = next(leaf for leaf in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(leaf, ShardedGrad))
        raise first._cannot(func)


class ReadOnly(Tensor):
    """A copy of a gradient that refuses writes: they would not change the gradient. Tensors made from it are plain."""

    _name: str

    @staticmethod
    def of(tensor: Tensor, name: str) -> ReadOnly:
        made = torch.Tensor._make_subclass(ReadOnly, tensor)
        made._name = name
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    @without_own_lines
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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
        return ask(self.clone()).tolist()  # torch refuses this of a subclass

    def numpy(self, *, force: bool = False) -> Any:
        """Return a read-only array of a copy."""
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
        if grad._elements is not None and grad._is_part:
            raise StateError(
                "the norm of an optimizer's fragment is only a part of its parameter's",
                where=f"gradient of {grad._entry.slot.name!r}",
                instead="torch.nn.utils.clip_grad_norm_ of the model's own parameters, all of them or those of a group",
            )
    if dim is not None or keepdim:
        raise StateError(
            "a sharded gradient has a norm as a whole only",
            where=f"gradient of {grads[0]._entry.slot.name!r}",
            got=f"dim={dim}",
            instead="p.grad.full_tensor().norm(dim=...) on every rank",
        )
    answers: dict[Any, Sequence[Tensor]] = {}  # by book: one question for all gradients
    for grad, entry in zip(grads, _entries(grads), strict=True):
        if grad._weak_book not in answers:
            answers[grad._weak_book] = grad._book.norms(entry, float(order))
    norms = [
        answers[grad._weak_book][grad._number]
        if isinstance(grad, ShardedGrad)
        else torch.linalg.vector_norm(grad, order, dtype=dtype)
        for grad in several
    ]
    return norms if isinstance(what, (list, tuple)) else norms[0]


_ELEMENTWISE = {
    aten.mul_.Tensor, aten.mul_.Scalar, aten.div_.Tensor, aten.div_.Scalar, aten.add_.Tensor, aten.add_.Scalar,
    aten.sub_.Tensor, aten.sub_.Scalar, aten.clamp_.default, aten.clamp_min_.default, aten.clamp_max_.default,
    aten.zero_.default, aten.neg_.default, aten.sign_.default, aten.nan_to_num_.default, aten.fill_.Scalar,
    aten.copy_.default, aten.masked_fill_.Scalar, aten.masked_fill_.Tensor,
}  # fmt: skip
_SCALES = {aten.mul_.Tensor, aten.mul_.Scalar, aten.div_.Tensor, aten.div_.Scalar}
_INDEX_FILL = {aten.index_fill_.int_Scalar, aten.index_fill_.int_Tensor}
_INTO = {  # with out= the gradient itself, as nan_to_num(p.grad, out=p.grad): an edit in place by another name
    aten.mul.out: aten.mul_.Tensor,
    aten.mul.Scalar_out: aten.mul_.Scalar,
    aten.div.out: aten.div_.Tensor,
    aten.div.Scalar_out: aten.div_.Scalar,
    aten.add.out: aten.add_.Tensor,
    aten.add.Scalar_out: aten.add_.Scalar,
    aten.sub.out: aten.sub_.Tensor,
    aten.sub.Scalar_out: aten.sub_.Scalar,
    aten.clamp.out: aten.clamp_.default,
    aten.clamp_min.out: aten.clamp_min_.default,
    aten.clamp_max.out: aten.clamp_max_.default,
    aten.neg.out: aten.neg_.default,
    aten.sign.out: aten.sign_.default,
    aten.nan_to_num.out: aten.nan_to_num_.default,
}
_FOREACH = {
    aten._foreach_mul_.Scalar: aten.mul_.Scalar,
    aten._foreach_mul_.Tensor: aten.mul_.Tensor,
    aten._foreach_mul_.List: aten.mul_.Tensor,
    aten._foreach_mul_.ScalarList: aten.mul_.Scalar,
    aten._foreach_div_.Scalar: aten.div_.Scalar,
    aten._foreach_div_.Tensor: aten.div_.Tensor,
    aten._foreach_div_.List: aten.div_.Tensor,
    aten._foreach_div_.ScalarList: aten.div_.Scalar,
    aten._foreach_add_.Scalar: aten.add_.Scalar,
    aten._foreach_add_.List: aten.add_.Tensor,
    aten._foreach_add_.ScalarList: aten.add_.Scalar,
    aten._foreach_sub_.ScalarList: aten.sub_.Scalar,
    aten._foreach_sub_.Scalar: aten.sub_.Scalar,
    aten._foreach_sub_.List: aten.sub_.Tensor,
    aten._foreach_copy_.default: aten.copy_.default,
    aten._foreach_neg_.default: aten.neg_.default,
    aten._foreach_sign_.default: aten.sign_.default,
    aten._foreach_zero_.default: aten.zero_.default,
    aten._foreach_clamp_min_.Scalar: aten.clamp_min_.default,
    aten._foreach_clamp_max_.Scalar: aten.clamp_max_.default,
}


def _entries(grads: Sequence[ShardedGrad]) -> list[Entry]:
    """Return the entries of gradients, as `_current` does, in one go."""
    with torch._C.DisableTorchFunctionSubclass():
        known = [(grad, grad._weak_book() or grad._book) for grad in grads]
        return [
            entry if book.refuse is None and (entry := book.entries[grad._number]).param.grad is grad else grad._current
            for grad, book in known
        ]


def _scale_buckets(func: Any, grads: Sequence[Any], *numbers: Any, **kwargs: Any) -> set[int]:
    """Multiply or divide by one number, bucket by bucket, where all gradients of a bucket are among these. Returns the
    ids of those that are done."""
    done: set[int] = set()
    if func not in _SCALES or len(numbers) != 1 or isinstance(numbers[0], (list, tuple)) or kwargs:
        return done
    (number,) = numbers
    if isinstance(number, Tensor) and (isinstance(number, ShardedGrad) or number.dim()):
        return done
    whole = [grad for grad in grads if isinstance(grad, ShardedGrad) and grad._elements is None]
    groups = by_accumulator(zip(_entries(whole), whole, strict=True))
    for book in dict.fromkeys(grad._book for grad in whole):
        book.note_edit(func.__name__, number)
        book.keeper.flush()
        book.forget_answers()
    for accumulator, group in groups:
        if sorted([grad._number for grad in group]) != [entry.number for entry in accumulator.entries]:
            continue

        def edit(book: Book = group[0]._book, accumulator: Accumulator = accumulator) -> None:
            accumulator.edit()
            own = accumulator.own
            func(own, book.in_host_memory(number) if isinstance(number, Tensor) and own.is_cpu else number)

        group[0]._book.hold(accumulator, edit)
        done |= set(map(id, group))
    return done


def _pieces(entry: Entry) -> list[Any]:
    """Return the axis of a parameter's team and the elements that each rank owns, to compare two parameters."""
    plan, seat = entry.accumulator.plan, entry.accumulator.bucket.team.seat
    cuts = [plan.shard(position) for position in range(plan.size)]
    if entry.accumulator.sum.by_part:
        cuts = [cut for at in range(plan.size) for cut in plan.portions(seat._replace(position=at))]
    return [plan.axis, *(entry.slot.within(*each) for each in cuts)]


def _choose(mine: Tensor, chosen: Tensor, values: Tensor) -> None:
    mine.copy_(torch.where(chosen, values, mine))


def _spreads(shape: Sequence[int], whole: Sequence[int]) -> bool:
    """Tell if a tensor of a shape can be broadcast to a whole shape."""
    return len(shape) <= len(whole) and all(
        own in (1, all_) for own, all_ in zip(reversed(shape), reversed(whole), strict=False)
    )


def _edit(func: Any, grad: ShardedGrad, others: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Apply an elementwise op in place to this rank's elements, and cut tensors of the gradient's shape to them."""
    entry = grad._entry
    part = entry.slot.within(*entry.accumulator.bucket.owned)

    def cut(other: Any) -> Any:
        if not isinstance(other, Tensor) or (other.numel() == 1 and other.dim() == 0):
            return other
        if isinstance(other, ShardedGrad) and other._is_fragment == grad._is_fragment:
            if _pieces(other._entry) == _pieces(entry) and other.shape == grad.shape:
                return other.to_local()
            raise StateError(
                "two sharded gradients that are cut differently cannot be combined",
                where=f"gradients of {entry.slot.name!r} and {other._entry.slot.name!r}",
                expected=f"{tuple(grad.shape)}, of the same elements on each rank",
                got=f"{tuple(other.shape)}",
                instead="p.grad.add_(q.grad.full_tensor()), or the like, on every rank",
            )
        shape = tuple(grad.shape)  # of an optimizer's fragment: this rank's elements
        if not _spreads(other.shape, shape):
            raise StateError(
                "a sharded gradient can be edited by numbers and by tensors that broadcast to its shape",
                where=f"gradient of {entry.slot.name!r}",
                expected=shape,
                got=tuple(other.shape),
                instead="a tensor of that shape"
                + "; or edit p.grad of the model's own p by one of the parameter's shape" * grad._is_fragment,
            )
        if grad._elements is not None:
            own, skipped = grad._own, part.start - grad._elements.start
            return other.broadcast_to(shape).reshape(-1)[own.start + skipped : own.stop + skipped]
        return other.broadcast_to(shape).reshape(-1)[part.start : part.stop]

    if not grad._is_fragment:
        for other in others:
            if isinstance(other, (int, float)) or (isinstance(other, Tensor) and other.dim() == 0):
                grad._book.note_edit(func.__name__, other)
    others = [cut(other) for other in others]

    def edit() -> None:
        mine, here = grad.editable(), others
        if mine.is_cpu:  # also of a model on a device, whose gradients rest in host memory
            here = [grad._book.in_host_memory(other) if isinstance(other, Tensor) else other for other in others]
        func(mine, *here, **kwargs)

    grad._book.hold(entry.accumulator, edit)


# With it torch's clipping asks for all norms at once, and scales all gradients at once: DTensor is in this list too.
if ShardedGrad not in _foreach_supported_types:
    _foreach_supported_types.append(ShardedGrad)  # type: ignore[arg-type]
