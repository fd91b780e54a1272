"""Operators of torch on the device: each is shaped at once, and its computation queued on the current stream.

A kernel is the CPU's own operator on the same memory, run late. What its results look like is asked of that operator
with zeros in place of what nobody knows yet, and remembered: their types and strides are the CPU's to the last detail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.utils.deterministic
from torch import Tensor

from . import sites
from .counts import total
from .device import Device
from .memory import Place
from .streams import drained

CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
aten = torch.ops.aten
# What asks the device for a number or a size, so that the host waits, as CUDA's operators do.
ASKING = {
    "equal", "nonzero", "is_nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive",
    "repeat_interleave.Tensor", "bincount", "histc", "linalg_inv", "linalg_solve", "linalg_cholesky", "cholesky",
}  # fmt: skip
DIVISIONS = "division by a number"  # for `Device.rounds_otherwise`: by its reciprocal, as CUDA's
# Operators of which torch has composite kernels that would come before the fallback, and CUDA one kernel.
FUSED = ("aten::_foreach_", "aten::_fused_", "aten::_amp_")


class Written(NamedTuple):
    """A result that is an argument: the `number`-th of those that are written."""

    number: int


class Made(NamedTuple):
    """A result that is a new tensor."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class Plan:
    """What there is to know of an operator before its arguments."""

    def __init__(self, op: Any) -> None:
        schema = op._schema
        self.op = op
        self.name = schema.name.partition("::")[2]
        overload = f"{self.name}.{op._overloadname}"
        self.arguments = [(each.name, _written(each)) for each in schema.arguments]
        self.written = {each.name for each in schema.arguments if _written(each)}
        self.is_view = not self.written and any(each.alias_info is not None for each in schema.arguments)
        self.returns = len(schema.returns)
        self.answers_list = self.returns == 1 and str(schema.returns[0].type).startswith("List")
        self.answers_many = self.returns > 1 or self.answers_list
        self.asks = self.name in ASKING or overload in ASKING
        self.draws = torch.Tag.nondeterministic_seeded in op.tags
        self.takes_generator = any(each.name == "generator" for each in schema.arguments)
        self.indexes = self.name in ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put")
        self.tensors = {each.name for each in schema.arguments if str(each.type) in ("Tensor", "Optional[Tensor]")}
        self.shapes: dict[Any, Any] = {}

    def __call__(self, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """On the CPU. A number in a tensor's place is Python's, which has less to say of the result's type."""
        numbers = any(isinstance(value, (int, float, complex)) and name in self.tensors for (name, _), value in zip(self.arguments, args, strict=False))  # fmt: skip
        return (self.op.overloadpacket if numbers else self.op)(*args, **kwargs)


def _written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


class Operators:
    """Answers for every operator that torch is asked for on the device."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._plans: dict[Any, Plan] = {}
        self._special: dict[str, Callable[..., Any]] = {
            "empty": self._empty,
            "empty_strided": self._empty_strided,
            "_copy_from": self._copy,
            "_copy_from_and_resize": self._copy_and_resize,
            "_local_scalar_dense": self._item,
            "resize_": self._resize,
            "record_stream": self._record_stream,
            "native_dropout": self._dropout,
            "is_set_to": lambda a, b: (a.data_ptr(), a.size(), a.stride()) == (b.data_ptr(), b.size(), b.stride()),
            "is_pinned": lambda *_: False,
        }
        self._views = {"set_", "detach", "alias", "_unsafe_view", "detach_", "squeeze_", "unsqueeze_", "t_", "transpose_",
                       "as_strided_", "lift_fresh"}  # fmt: skip

    def __call__(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        plan = self._plans.get(op)
        if plan is None:
            plan = self._plans[op] = Plan(op)
        if self.device.memory.ended:
            self.device.settle()
        if plan.name in self._special:
            return self._special[plan.name](*args, **kwargs)
        if plan.is_view or plan.name in self._views:
            return op.redispatch(CPU, *args, **kwargs)
        return self._launch(plan, args, kwargs)

    # --- memory and copies ------------------------------------------------------------------------------------------------

    def _empty(self, size: Any, *, dtype: Any = None, memory_format: Any = None, **_: Any) -> Tensor:
        like = torch.empty(size, device="meta", **({} if memory_format is None else {"memory_format": memory_format}))
        return self._empty_strided(size, like.stride(), dtype=dtype)

    def _empty_strided(self, size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> Tensor:
        made = self.device.new(size, stride, dtype or torch.get_default_dtype())
        if (
            made.numel()
            and torch.are_deterministic_algorithms_enabled()
            and torch.utils.deterministic.fill_uninitialized_memory
        ):
            place = self.device.memory.place(made)  # by a kernel, as CUDA's `empty` does
            fill = (
                float("nan")
                if made.is_floating_point()
                else True
                if made.dtype is torch.bool
                else torch.iinfo(made.dtype).max
            )
            self.device.launch("fill of empty memory", lambda: place.open().fill_(fill), [(place, True)])
        return made

    def _resize(self, tensor: Tensor, size: Any, **_: Any) -> Tensor:
        stride = torch.empty(size, device="meta").stride()
        nbytes = torch.empty(size, device="meta").numel() * tensor.dtype.itemsize
        if tensor.untyped_storage().nbytes() >= nbytes + tensor.storage_offset() * tensor.dtype.itemsize:
            return aten.set_.source_Storage_storage_offset.redispatch(
                CPU, tensor, tensor.untyped_storage(), tensor.storage_offset(), [*size], [*stride]
            )
        return self.device.new(size, stride, tensor.dtype, into=tensor)

    def _record_stream(self, tensor: Tensor, stream: torch.Stream) -> None:
        self.device.memory.place(tensor).block.used_by.add(self.device.machine.queues[stream.stream_id])

    def _copy(self, source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
        """Between host and device the host waits, unless asked not to, and then too for pages that can be swapped out."""
        device, on_device = self.device, target.device.type == "emu"
        from_device = source.device.type == "emu"
        reads: Any = (
            device.memory.place(source) if from_device else device.pages.place(source) if non_blocking else None
        )
        if reads is None:
            reads = source.detach().clone()
        pinned = device.pages.place(target) if non_blocking and not on_device else None
        writes: Any = device.memory.place(target) if on_device else pinned or target.detach()
        if pinned is not None and not device.pages.will_read(pinned):
            with device.machine.lock, device.pages:
                target.detach().fill_(-1 if not target.is_floating_point() else float("nan"))  # nobody may read it yet

        def run() -> None:
            with device.pages:
                _opened(writes).copy_(_opened(reads))

        if source.device.type != target.device.type:
            moved = "to the device" if on_device else "to the host"
            total.nbytes[sites.site(), moved] += target.numel() * target.itemsize
        device.launch("copy", run, [(each, each is writes) for each in (reads, writes) if isinstance(each, Place)])
        if not from_device and not non_blocking:
            drained("copy to the device")
            device.wait_for_current()
        elif not on_device and pinned is None:
            drained("copy to the host")
            device.wait_for_current()
        return target

    def _copy_and_resize(self, source: Tensor, target: Tensor) -> Tensor:
        if target.size() != source.size():
            target.resize_(source.size())
        return self._copy(source, target)

    def _item(self, tensor: Tensor) -> Any:
        place, found = self.device.memory.place(tensor), []
        self.device.launch("item", lambda: found.append(place.open().item()), [(place, False)])
        drained("item")
        self.device.wait_for_current()
        return found[0]

    def _dropout(self, tensor: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
        """As the CPU's: the operator takes no generator."""
        if train is False or p == 0:
            return tensor.clone(), torch.ones_like(tensor, dtype=torch.bool)
        mask = torch.empty_like(tensor, dtype=torch.bool).bernoulli_(1 - p)
        return tensor.mul(mask).mul_(1 / (1 - p) if p < 1 else 0.0), mask

    # --- kernels ------------------------------------------------------------------------------------------------------------

    def _launch(self, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        device = self.device
        accesses: list[tuple[Place, bool]] = []
        written: list[Tensor] = []
        key: list[Any] = []
        own: list[Any] = []
        own_kwargs: dict[str, Any] = {}
        for (name, writes), value in zip(plan.arguments, args, strict=False):
            own.append(self._taken(plan, name, value, writes, accesses, written, key))
        for name, writes in plan.arguments[len(args) :]:
            if name in kwargs:
                key.append(name)
                own_kwargs[name] = self._taken(plan, name, kwargs[name], writes, accesses, written, key)
        masks = plan.indexes and any(
            isinstance(each, Place) and each.dtype in (torch.bool, torch.uint8) for each in own[1]
        )
        if plan.asks or (masks and not (plan.name != "index" and args[2].numel() == 1)):
            return self._ask(plan, own, own_kwargs, accesses, written)
        state = None
        if plan.draws:
            if not plan.takes_generator:
                raise RuntimeError(f"{plan.name} draws random numbers, and takes no generator")
            own_kwargs["generator"] = generator = kwargs.get("generator") or device.generator
            state = generator.get_state()  # where the kernel will begin; finding the shapes draws as many
        shapes = self._shapes(plan, own, own_kwargs, key, written)
        results: list[Any] = []
        fills: list[tuple[int, Place]] = []
        for at, shape in enumerate(shapes):
            if isinstance(shape, Made):
                results.append(device.new(*shape))
                fills.append((at, device.memory.place(results[-1])))
            else:
                results.append(written[shape.number] if isinstance(shape, Written) else shape)
        if plan.written:  # also what had no size before, as an `out=` may
            accesses = [(place, writes) for place, writes in accesses if not writes]
            accesses += [(device.memory.place(each), True) for each in written]

        def run() -> None:
            if state is not None:
                own_kwargs["generator"] = torch.Generator().set_state(state)
            if plan.name in ("div", "div_") and DIVISIONS in device.rounds_otherwise and not isinstance(own[1], Place):
                got = _times_the_reciprocal(_opened(own[0]), own[1], in_place=plan.name == "div_")
            else:
                got = plan(_opened(own), _opened(own_kwargs))
            for at, place in fills:
                place.open().copy_(got[at] if plan.answers_many else got)
            if plan.name in device.rounds_otherwise:
                _nudge(_opened(own[0]))

        device.launch(plan.name, run, accesses + [(place, True) for _, place in fills])
        if plan.answers_many:
            return results if plan.answers_list else tuple(results)
        return results[0] if plan.returns else None

    def _taken(
        self,
        plan: Plan,
        name: str,
        value: Any,
        writes: bool,
        accesses: list[tuple[Place, bool]],
        written: list[Tensor],
        key: list[Any],
    ) -> Any:
        """An argument as the kernel holds it: places in place of tensors, and numbers of host memory as they are now."""
        if isinstance(value, Tensor):
            if writes:
                written.append(value)
            if value.device.type == "emu":
                place = self.device.memory.place(value)
                accesses.append((place, writes))
                key.append((place.size, place.stride, place.dtype))
                return place
            if (value.dim() and not plan.indexes) or writes:
                raise RuntimeError(
                    f"{plan.name}: expected all tensors to be on the same device, but found at least two devices, "
                    f"emu:0 and {value.device}: the argument {name!r}"
                )
            key.append((tuple(value.size()), value.dtype))
            return value.detach().clone()
        if isinstance(value, (list, tuple)):
            key.append(len(value))
            return [self._taken(plan, name, each, writes, accesses, written, key) for each in value]
        if name == "device" or (isinstance(value, torch.device) and value.type == "emu"):
            return torch.device("cpu")
        key.append(value)
        return value

    def _shapes(
        self, plan: Plan, own: list[Any], own_kwargs: dict[str, Any], key: list[Any], written: list[Tensor]
    ) -> list[Any]:
        """What the results are: remembered by what is known of the arguments."""
        try:
            known = None if plan.draws else plan.shapes.get(tuple(key))
        except TypeError:  # what cannot be a key
            known, key = None, []
        if known is not None:
            return known
        found, lasting = self._tried(plan, own, own_kwargs, written)
        if key and lasting and not plan.draws:
            plan.shapes[tuple(key)] = found
        return found

    def _tried(
        self, plan: Plan, own: list[Any], own_kwargs: dict[str, Any], written: list[Tensor]
    ) -> tuple[list[Any], bool]:
        """Run the operator on zeros, else on nothing. Also: may it be remembered?"""
        with torch.no_grad():
            try:
                stand_ins = _like(own, "cpu"), _like(own_kwargs, "cpu")
                got = plan(*stand_ins)
            except Exception:
                if plan.draws:
                    raise
                stand_ins = _like(own, "meta"), {**_like(own_kwargs, "meta"), **_on_meta(own_kwargs)}
                got = plan(*stand_ins)
        same = True
        ours = [*_tensors_written(plan, *stand_ins)]
        for real, stand_in in zip(written, ours, strict=True):
            if real.size() != stand_in.size():  # `out=` of another size
                same = False
                self.device.new(tuple(stand_in.size()), tuple(stand_in.stride()), real.dtype, into=real)
        if not same:  # the kernel has to be given what it is now
            _replaced(own, own_kwargs, plan, iter(map(self.device.memory.place, written)))
        answers = [*got] if plan.answers_many else [got] * plan.returns
        found: list[Any] = []
        for answer in answers:
            at = [number for number, each in enumerate(ours) if each is answer]
            if at:
                found.append(Written(at[0]))
            elif isinstance(answer, Tensor):
                found.append(Made(tuple(answer.size()), tuple(answer.stride()), answer.dtype))
            else:
                found.append(answer)
        return found, same

    def _ask(
        self, plan: Plan, own: list[Any], own_kwargs: dict[str, Any], accesses: list[Any], written: list[Tensor]
    ) -> Any:
        """Run it now: the host goes on only with its answer."""
        got: list[Any] = []
        self.device.launch(plan.name, lambda: got.append(plan(_opened(own), _opened(own_kwargs))), accesses)
        drained(plan.name)
        self.device.wait_for_current()
        if written:
            return written[0]
        return self._sent(got[0])

    def _sent(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(map(self._sent, value))
        if not isinstance(value, Tensor):
            return value
        made = self.device.new(tuple(value.size()), tuple(value.stride()), value.dtype)
        self.device.memory.place(made).open().copy_(value)
        return made


def _times_the_reciprocal(value: Tensor, divisor: Any, *, in_place: bool) -> Tensor:
    """As CUDA divides by a number, or by one of the host's: `BinaryDivTrueKernel.cu` says that it may lose a bit."""
    wide = torch.float32 if value.dtype.itemsize < 4 else value.dtype
    found = value.to(wide) * (torch.ones((), dtype=wide) / divisor)
    return value.copy_(found) if in_place else found.to(value.dtype)


def _nudge(written: Tensor | list[Tensor]) -> None:
    """By so much that one sees it in 16 bits too."""
    for each in written if isinstance(written, list) else [written]:
        each.mul_(1 + 2**-9)


def _opened(value: Any) -> Any:
    if isinstance(value, Place):
        return value.open()
    if isinstance(value, list):
        return [_opened(each) for each in value]
    if isinstance(value, dict):
        return {name: _opened(each) for name, each in value.items()}
    return value


def _like(value: Any, device: str) -> Any:
    """Tensors of zeros in place of the device's."""
    if isinstance(value, Place):
        return torch.empty_strided(value.size, value.stride, dtype=value.dtype, device=device).zero_()
    if isinstance(value, list):
        return [_like(each, device) for each in value]
    if isinstance(value, dict):
        return {name: _like(each, device) for name, each in value.items()}
    if isinstance(value, Tensor) and device == "meta":
        return value if not value.dim() else value.to("meta")
    return value


def _on_meta(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {"device": torch.device("meta")} if "device" in kwargs else {}


def _tensors_written(plan: Plan, own: list[Any], own_kwargs: dict[str, Any]) -> Iterator[Tensor]:
    pairs = [(name, value) for (name, _), value in zip(plan.arguments, own, strict=False)] + [*own_kwargs.items()]
    for name, value in pairs:
        if name in plan.written:
            if isinstance(value, list):
                yield from value
            elif value is not None:
                yield value


def _replaced(own: list[Any], own_kwargs: dict[str, Any], plan: Plan, places: Iterator[Place]) -> None:
    def each(value: Any) -> Any:
        return [next(places) for _ in value] if isinstance(value, list) else value if value is None else next(places)

    for at, ((name, _), value) in enumerate(zip(plan.arguments, own, strict=False)):
        if name in plan.written:
            own[at] = each(value)
    for name, value in own_kwargs.items():
        if name in plan.written:
            own_kwargs[name] = each(value)
