"""A bucket as the modules compute with it: the whole of it in one storage, and the parameters as views of that.

    state      parameters' class   memory                      methods that lead to it
    RELEASED   guarded             none (see `placeholder`)        release
    ARRIVING   guarded             full, being written         gather
    GUARDED    guarded             full                        land, close
    OPEN       plain               full                        open

Parameters that are replicated on the device (`resident`) start OPEN and leave it only while an updated copy is
arriving. All others, sharded or resting in another tier, are gathered for use and released after it.

Note *memory is given back when nothing else holds it*: gathering takes memory from the tier and makes the parameters
views of it, releasing gives it back for others to write to. So a bucket is released only if nothing but our own views
holds the storage (its use count is the baseline) and no parameter has more references than before. If autograd may have
saved a parameter itself, references in C++ count too, where every graph holds its leaves. Memory that is kept for such
a reason counts as not gathered: the next use gathers again, into the same memory.

Note *the program keeps what it has replaced*: after `old = param.data; param.data = other` plain PyTorch leaves `old`
as it is, so that `param.data = old` brings it back. Our parameters lie in one memory, where a copy of `other` would
overwrite `old`. So if anything may hold that memory, the bucket moves to new memory and leaves the old one to it.

Note *no way leads to memory that is gone*: some C++ functions of torch bypass the guard's Python class. So a released
parameter itself points at `placeholder`; the guard answers what its strides are.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import gc
import operator
import sys
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...arithmetic.sums import simulated
from ...errors import UserError
from ...layout.partition import BucketPlan, slot_at
from ...tiers.tier import DeviceTier
from .guard import flip, unflip


class GatheredState(enum.Enum):
    RELEASED = enum.auto()
    ARRIVING = enum.auto()
    GUARDED = enum.auto()
    OPEN = enum.auto()


_LEGAL = {
    (GatheredState.RELEASED, GatheredState.ARRIVING),
    (GatheredState.ARRIVING, GatheredState.GUARDED),
    (GatheredState.GUARDED, GatheredState.ARRIVING),
    (GatheredState.GUARDED, GatheredState.OPEN),
    (GatheredState.GUARDED, GatheredState.RELEASED),
    (GatheredState.OPEN, GatheredState.GUARDED),
}


def _references(params: list[Any]) -> list[int]:
    """Count Python references to parameters, less the one of torch's own while C++ (a graph, say) holds the tensor."""
    return [sys.getrefcount(param) - (_CPP_COUNTS and param._use_count() > 1) for param in params]


def _cpp_counts() -> bool:
    probe = nn.Parameter(torch.zeros(1, device="cpu"))
    alone = sys.getrefcount(probe)
    graph = probe * 2
    counted = sys.getrefcount(probe) > alone
    del graph
    return counted


_CPP_COUNTS = _cpp_counts()


@functools.cache
def placeholder(device: torch.device) -> Tensor:
    """Return the bytes that all elements of all released parameters share: NaN in any floating dtype."""
    return _made(device)


def _made(device: torch.device) -> Tensor:
    return torch.full((16,), 0xFF, dtype=torch.uint8, device=device)


def home(full: Tensor, device: torch.device) -> Tensor:
    # A simulation has a placeholder of its own: its tensors must not outlive it.
    return (_made if simulated(full) else placeholder)(device)


def alias(flat: Tensor) -> Tensor:
    """Return the same memory under another storage object, which does not count as a reference to the first.

    A process group's threads drop their tensors a moment after they report completion. If these references counted,
    a bucket could sometimes not be released.
    """
    if simulated(flat):
        return flat
    storage = flat.untyped_storage()
    other: Any = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), flat.device, storage.nbytes())
    return torch.empty(0, dtype=flat.dtype, device=flat.device).set_(
        other, flat.storage_offset(), flat.shape, flat.stride()
    )


def point(tensor: Any, data: Tensor) -> None:
    """Set `tensor.data = data`, also between two devices of which torch refuses that: the CPU and a plug-in's, say."""
    if torch._has_compatible_shallow_copy_type(tensor, data):
        tensor.data = data
        return
    hooks = tensor._backward_hooks, tensor._post_accumulate_grad_hooks  # in the C++ tensor, which is swapped
    data = data.data  # with a version counter of its own
    other = nn.Parameter(data, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else data
    torch._C._swap_tensor_impl(tensor, other)
    tensor._backward_hooks, tensor._post_accumulate_grad_hooks = hooks


class Gathered:
    """The gathered copy of one bucket on one rank, its parameters as views of it, and the state of both."""

    def __init__(self, plan: BucketPlan, params: list[nn.Parameter], dtype: torch.dtype, tier: DeviceTier) -> None:
        self.plan = plan
        self.params = params
        self.dtype = dtype
        self.tier = tier
        self.of_model: Sequence[Gathered] = (self,)  # those of all buckets
        self.frozen = 0  # number of objects that gc.freeze() hid before sharding: none has views of this
        self.state = GatheredState.OPEN
        self.current = True  # are these the weights that a gather would bring?
        self.full: Tensor
        self.views: list[Tensor]  # the parameters in `full`
        self.strides = [torch.empty(slot.shape, device="meta").stride() for slot in plan.slots]
        self.nbytes = plan.numel * dtype.itemsize
        self.counted = "gather"  # what the ledger calls the memory
        self._references: list[int] = []
        self._uses = 0

    def place(self, full: Tensor) -> None:
        """Put the parameters into `full`, at construction."""
        self._placeholder = home(full, full.device)
        absent = self._placeholder.view(self.dtype)[0]
        self._absent = [absent.expand(slot.shape) for slot in self.plan.slots]
        self._shapes = self._views_of(torch.empty(self.plan.numel, dtype=self.dtype, device="meta"))
        for param, absent in zip(self.params, self._absent, strict=True):
            point(param, absent)  # on this device, whichever it was on
        self._lie_in(full)

    def _lie_in(self, full: Tensor) -> None:
        self.full, self.views = full, self._views_of(full)
        self._point(self.views)

    def _views_of(self, flat: Tensor) -> list[Tensor]:
        """Return the parameters as views of a tensor of the whole bucket, at the start of its storage."""
        laid_out = zip(self.plan.slots, self.strides, strict=True)
        return [flat.as_strided(slot.shape, strides, slot.start) for slot, strides in laid_out]

    def _point(self, tensors: list[Tensor]) -> None:
        """Make the parameters share the memory of `tensors`."""
        with torch._C.DisableTorchFunctionSubclass():
            for param, tensor in zip(self.params, tensors, strict=True):
                param.data = tensor

    # --- states -----------------------------------------------------------------------------------------------------

    @property
    def released(self) -> bool:
        return self.state is GatheredState.RELEASED

    @property
    def ready(self) -> bool:
        """True if the current weights are gathered, or on their way."""
        return self.state is not GatheredState.RELEASED and self.current

    def _move(self, state: GatheredState) -> None:
        if state is not self.state and (self.state, state) not in _LEGAL:
            raise AssertionError(f"a bucket went from {self.state} to {state}")
        self.state = state

    def take_memory(self, *, ahead: bool) -> None:
        """Take memory to gather into. ahead: it counts as prefetched until it is used."""
        before, self.counted = self.counted, "prefetch" if ahead else "gather"
        if self.views is self._shapes:
            self._lie_in(self.tier.reserve(self.counted, self.plan.numel, self.dtype, zeroed=False))
        else:  # memory is still held, after an exception in a gather or release: some parameters may point elsewhere
            self._point(self.views)
            self.tier.ledger.rename(before, self.counted, self.nbytes)
        self.note_holders()

    def note_holders(self) -> None:
        # Counted while nothing is gathered: references that exist now are from before any use of the weights.
        self._uses = self._holders()
        self._references = _references(self.params)

    def arriving(self) -> None:
        """Take note that new weights are on their way. Open parameters stay open, and are overwritten while in use."""
        if self.state is not GatheredState.OPEN:
            self._move(GatheredState.ARRIVING)
        self.current = True

    def landed(self) -> None:
        """Take note that arriving weights are complete."""
        if self.state is GatheredState.ARRIVING:
            self._move(GatheredState.GUARDED)

    def open(self) -> bool:
        """Make guarded parameters plain. Returns if they were guarded before.

        An interrupt here or in `close` may leave parameters guarded although the bucket is open, which a touch repairs
        (`Place.touch`). It never leaves a parameter readable although the bucket is not open.
        """
        if self.state is not GatheredState.GUARDED:
            return False
        self._move(GatheredState.OPEN)
        for param in self.params:
            unflip(param)
        return True

    def close(self) -> None:
        """Guard the parameters; the data stays."""
        for param in self.params:
            flip(param)
        self._move(GatheredState.GUARDED)

    def claim(self) -> None:
        """Count prefetched memory as gathered from now on, because it is used."""
        if self.counted == "prefetch":
            self.counted = "gather"
            if not self.released:
                self.tier.ledger.rename("prefetch", "gather", self.nbytes)

    def held(self) -> bool:
        """Tell if anything but the engine holds the memory, or a parameter that points at it."""
        if self._holders() > self._uses:
            return True
        references = _references(self.params)
        return references != self._references and any(map(operator.gt, references, self._references))

    def _holders(self) -> int:
        """Count the tensors that lie in the memory, also those in C++."""
        return torch._C._storage_Use_Count(self.full.untyped_storage()._cdata)

    def in_graphs(self) -> bool:
        """Tell if C++ holds a parameter beside Python, as a graph does."""
        params: list[Any] = list(self.params)
        return any(param._use_count() > 1 for param in params)

    def give_back_memory(self) -> None:
        """Point the parameters at the placeholder, and give the memory back to the tier."""
        self._move(GatheredState.RELEASED)
        self._point(self._absent)
        self._placeholder.fill_(0xFF)  # repair it: torch allows the program's `fill_` on an expanded element
        full, self.full, self.views = self.full, self._placeholder.view(self.dtype)[:1], self._shapes
        self.tier.give_back(self.counted, full)  # last: its next user must not share it with the parameters

    # --- replaced by the user ---------------------------------------------------------------------------------------

    def replaced(self) -> list[int]:
        """Return the slots whose parameter's `.data` the program has set to memory of its own.

        Raises `UserError` for data of another kind, or in the memory of the model's own weights.
        """
        found: list[int] = []
        if self.released or simulated(self.full):
            return found
        with torch._C.DisableTorchFunctionSubclass():
            for index, (param, view) in enumerate(zip(self.params, self.views, strict=True)):
                if param.data_ptr() != view.data_ptr() or not param.is_contiguous():
                    self._check_replaced(index, param.data)
                    found.append(index)
        if not found:  # an optimizer may have dropped fragments: then fewer hold it
            self._uses = min(self._uses, self._holders())
        return found

    def _check_replaced(self, index: int, data: Tensor) -> None:
        slot = self.plan.slots[index]
        memory = data.untyped_storage().data_ptr()
        if any(memory == each.full.untyped_storage().data_ptr() for each in self.of_model):
            raise UserError(
                "a sharded parameter's data was replaced by the memory of the model's own weights",
                where=f"parameter {slot.name!r}",
                expected="memory of its own",
                got=f"a view of {tuple(data.shape)} elements of a sharded parameter",
                instead="param.copy_(...) under torch.no_grad(), or tie the parameters before shard(...)",
            )
        if data.shape != slot.shape or data.dtype != self.dtype or data.device != self.full.device:
            raise UserError(
                "a sharded parameter's data was replaced by something of another kind",
                where=f"parameter {slot.name!r}",
                expected=f"{slot.shape} {self.dtype} on {self.full.device}",
                got=f"{tuple(data.shape)} {data.dtype} on {data.device}",
                instead="convert or move the model before zeroshard.shard(...), or pass precision= and device=",
            )

    def kept(self, replaced: Sequence[int]) -> bool:
        """Tell if the program may hold the memory that it has replaced: `backup[name] = param.data`, say."""
        return self._holders() > self._uses - len(replaced)

    def rebind(self, replaced: Sequence[int]) -> None:
        """Copy the replaced `.data` of these slots into the bucket, and make the parameters views of it again."""
        with torch._C.DisableTorchFunctionSubclass():
            for index in replaced:
                param, view = self.params[index], self.views[index]
                view.copy_(param.data)
                param.data = view

    def move(self, full: Tensor, replaced: Sequence[int]) -> Callable[[], None]:
        """Move the bucket to the memory `full`, 1-D, with the same weights; `replaced` as in `rebind`.

        What the program holds of replaced data stays as it is: note *the program keeps what it has replaced*. Returns
        a function to call once no tensor of the engine lies in the old memory. It moves the views that the program may
        hold of parameters that were not replaced, so that they are views of these again.
        """
        left = {index for index, slot in enumerate(self.plan.slots) if slot.numel and index not in replaced}
        if left and gc.get_freeze_count() > self.frozen:
            raise UserError(
                "a parameter's data was replaced, and gc.freeze() hides what the program keeps of its neighbours",
                where=f"parameter {self.plan.slots[replaced[0]].name!r}",
                instead="keep param.data.clone() before param.data = ..., or replace .data before gc.freeze()",
            )
        full.copy_(self.full)
        old = self.full.untyped_storage()
        self.full, self.views = full, self._views_of(full)
        with torch._C.DisableTorchFunctionSubclass():
            for index, param in enumerate(self.params):
                if index not in replaced:
                    param.data = self.views[index]
        self.rebind(replaced)

        def follow() -> None:
            self._uses = self._holders()  # so far the engine's only
            for tensor in _tensors_in(old) if left else ():
                self._follow(tensor, left)

        return follow

    def _follow(self, tensor: Any, left: Container[int]) -> None:
        """Move a tensor from the old memory to the new one, if it is of a parameter that was not replaced (in `left`).

        A NumPy array that refers to the tensor still reads the old memory, so the tensor keeps the old memory alive.
        """
        index = slot_at([slot.start for slot in self.plan.slots], int(tensor.storage_offset()))
        if index in left and tensor.dtype == self.dtype and tensor.grad_fn is None:
            old: Any = tensor.detach()
            old._zeroshard_before = getattr(tensor, "_zeroshard_before", None)  # of an earlier move
            tensor.data = self.full.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
            tensor._zeroshard_before = old


def _tensors_in(storage: torch.UntypedStorage) -> Iterator[Any]:
    """Return the tensors of Python that lie in this storage. Looks at every object of the process that the garbage
    collector knows."""
    with torch._C.DisableTorchFunctionSubclass():
        for each in gc.get_objects():
            if issubclass(type(each), Tensor) and each.layout is torch.strided and each.device == storage.device:
                with contextlib.suppress(RuntimeError):  # of a subclass without memory of its own
                    if each.untyped_storage()._cdata == storage._cdata:
                        yield each
