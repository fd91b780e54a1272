"""Guards against reading a parameter that is not gathered: it would read NaN, or memory that is no more.

Two ways lead to it, and each has a guard.

*Python.* While a parameter is not open, its class is flipped to a `Parameter` subclass whose `__torch_function__`
answers metadata (shape, dtype, hooks, ...) and otherwise calls `touch`, which opens the parameter or raises. It is
what torch's own `UninitializedParameter` does. An open parameter is a plain `nn.Parameter` and costs nothing.

*C++.* Tensors that autograd saves for backward never pass Python. While a unit's forward runs in grad mode, a pair of
`saved_tensors_hooks` keeps, instead of a parameter (or a view of one), a `SavedWeight` note of where it was;
unpacking the note gathers the unit. Three hazards, each met below:

- Only the topmost pair of hooks runs, so ours passes tensors that are no weights to the pair below; activation
  checkpointing is such a pair, and without this every activation would be kept. Weights are passed on too:
  checkpointing counts them, and a pair of the program's may round them. If that pair returns tensors in a weight's own
  memory, notes are kept in their place.
- Hooks switch autograd's own version check off, so versions are compared here.
- A step between forward and backward would silently use new weights, so notes carry the weights' generation.

`torch.func` allows no hooks: ours are popped while it runs (`_without_ours`). Autograd then saves the parameter
itself, so its memory stays until no graph holds it (`Source.unnoted`). What the engine does inside a transform, it does
`outside` of it: a tensor made inside would be one of the transform's own wrappers, and gone with it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ...device import current
from ...errors import ReleasedError, StateError
from ...layout.partition import BucketPlan, slot_at
from .modes import outside

_GETTERS = (
    "shape", "dtype", "device", "layout", "requires_grad", "is_leaf", "grad", "grad_fn", "is_cuda", "is_cpu", "is_meta",
    "is_sparse", "is_quantized", "is_nested", "is_mps", "is_xpu", "ndim", "name", "names", "_version", "itemsize",
    "nbytes", "_backward_hooks", "_post_accumulate_grad_hooks", "output_nr", "retains_grad", "_cdata",
    "_base", "grad_dtype",
)  # fmt: skip
_SETTERS = ("grad", "requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks", "grad_dtype")
_METHODS = (
    "size", "dim", "numel", "nelement", "element_size", "get_device",
    "is_floating_point", "is_complex", "is_signed", "requires_grad_", "register_hook", "ndimension", "is_pinned",
    "register_post_accumulate_grad_hook", "__len__", "__hash__", "is_inference", "_use_count", "is_same_size",
)  # fmt: skip
_METADATA = frozenset(
    [getattr(torch.Tensor, name).__get__ for name in _GETTERS if hasattr(torch.Tensor, name)]
    + [getattr(torch.Tensor, name).__set__ for name in _SETTERS if hasattr(torch.Tensor, name)]
    + [getattr(torch.Tensor, name).__delete__ for name in ("grad",)]
    + [getattr(torch.Tensor, name) for name in _METHODS if hasattr(torch.Tensor, name)]
    + [torch.numel, torch.is_floating_point, torch.is_complex, torch._has_compatible_shallow_copy_type]
)
_CONVERSIONS = {
    torch.Tensor.cpu: "cpu", torch.Tensor.cuda: "cuda", torch.Tensor.float: torch.float32,
    torch.Tensor.double: torch.float64, torch.Tensor.half: torch.float16, torch.Tensor.bfloat16: torch.bfloat16,
}  # fmt: skip
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_STRIDES = frozenset({torch.Tensor.stride, torch.Tensor.storage_offset, torch.Tensor.is_contiguous})


class Guarded:
    """Mixed in front of a parameter's own class while it is not open. `_zeroshard` is its `Place`."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _STRIDES:
            return func(args[0]._zeroshard.view, *args[1:], **kwargs)
        if func is torch.Tensor.__repr__:
            return _describe(args[0])
        if _changes_nothing(func, args, kwargs):
            return args[0]
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Guarded):
                try:
                    leaf._zeroshard.touch(leaf)  # type: ignore[attr-defined]
                except ReleasedError as error:
                    if (refused := _refused_conversion(func, args, kwargs)) is not None:
                        raise refused from error.__cause__
                    raise
        return func(*args, **kwargs)


def _conversion(func: Any, args: Any, kwargs: Any) -> tuple[torch.device | None, torch.dtype | None, Any] | None:
    """Return (device, dtype, memory format) of a conversion as `module.to(...)` makes it; None for what is none."""
    if func in _CONVERSIONS and len(args) == 1 and not kwargs:
        args = *args, _CONVERSIONS[func]
    elif func is not torch.Tensor.to and not (func is torch.Tensor.type and isinstance(args[-1], torch.dtype)):
        return None
    try:
        device, dtype, _, memory_format = torch._C._nn._parse_to(*args[1:], **kwargs)
    except (TypeError, RuntimeError):  # copy=True, say
        return None
    return device, dtype, memory_format


def _refused_conversion(func: Any, args: Any, kwargs: Any) -> ReleasedError | None:
    """Return the error for a call that converts or moves a parameter that is not gathered; None for other calls."""
    if (found := _conversion(func, args, kwargs)) is None:
        return None
    device, dtype, memory_format = found
    with torch._C.DisableTorchFunctionSubclass():
        own_dtype, own_device = args[0].dtype, args[0].device
    dtype, device = dtype or own_dtype, device or own_device
    if (dtype, device) == (own_dtype, own_device):
        return ReleasedError(
            "a sharded parameter was given another memory format while it is not gathered",
            where=f"parameter {args[0]._zeroshard.name!r}",
            got=f"{memory_format}",
            instead="leave it out: weights lie contiguous in their bucket, and inputs may have any memory format",
        )
    said = said_at_shard(dtype if dtype is not own_dtype else None, device if device != own_device else None)
    return ReleasedError(
        "a sharded parameter was converted or moved while it is not gathered",
        where=f"parameter {args[0]._zeroshard.name!r}",
        expected=f"{own_dtype} on {own_device}",
        got=f"{dtype} on {device}",
        instead=f"{said}; to read it, with zero.gathered(): ...   (on every rank)",
    )


def said_at_shard(dtype: torch.dtype | None, device: torch.device | None) -> str:
    """Return advice on how to get a sharded model of another dtype, on another device, or both."""
    said = [f"precision=Precision(param_dtype={dtype})"] * (dtype is not None)
    said += [f'device="{device}"'] * (device is not None)
    return f"shard(..., {', '.join(said)}); or model.to(...) before shard(...)"


def not_given(param: Tensor) -> str:
    """Return advice if an optimizer that `shard` was not given is stepping the whole parameter; else ""."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        who = frame.f_locals.get("self")
        groups = getattr(who, "param_groups", []) if isinstance(who, torch.optim.Optimizer) else []
        if any(each is param for group in groups for each in group["params"]):
            return (
                f"shard(model, optimizer) with this {type(who).__name__}, or a list of all optimizers; after a phase "
                "with another one zero.unshard() on every rank first"
            )
        frame = frame.f_back
    return ""


def forward_called(modules: Collection[nn.Module]) -> str:
    """Return advice if the program called the `forward` of one of these modules, and not the module; else ""."""
    frame: FrameType | None = sys._getframe(1)
    found = ""
    while frame is not None:
        who = frame.f_locals.get("self")
        own = getattr(type(who).forward, "__code__", None) if isinstance(who, nn.Module) else None
        if frame.f_code is own and any(who is each for each in modules):
            found = type(who).__name__  # the outermost, in which the others may be called so
            if frame.f_code.co_flags & inspect.CO_GENERATOR:
                return (
                    f"a list in place of what the forward of {found} yields, which runs after its call is over; or the "
                    "loop over its outputs, and their backward, in with zero.gathered(): ...   (on every rank)"
                )
        frame = frame.f_back
    return found and (
        f"call the {found} itself, as module(...): module.forward(...) passes over the hooks that gather its weights. "
        "Or with zero.gathered(): ...   (on every rank)"
    )


def _changes_nothing(func: Any, args: Any, kwargs: Any) -> bool:
    """Tell if this is a conversion that would leave the parameter as it is."""
    if func == _SET_DATA:
        return args[0] is args[1]
    if (found := _conversion(func, args, kwargs)) is None:
        return False
    device, dtype, memory_format = found
    with torch._C.DisableTorchFunctionSubclass():
        own_device, own_dtype = args[0].device, args[0].dtype
    stays = device is None or device.type == own_device.type
    if device is not None and own_device.index is not None and stays:
        stays = current(device).index == own_device.index
    return stays and dtype in (None, own_dtype) and memory_format in (None, torch.preserve_format)


def _describe(param: Any) -> str:
    what = f"Parameter {param._zeroshard.name!r} of shape {tuple(param.shape)}, {param.dtype}"
    return f"{what}, sharded by zeroshard and not gathered now"


@functools.cache
def guarded_class(plain: type) -> type:
    """Return the guarded subclass of a parameter class."""
    return type(f"Guarded{plain.__name__}", (Guarded, plain), {"_plain": plain})


def flip(param: nn.Parameter) -> None:
    """Guard a parameter: Python can no longer read its data."""
    if not isinstance(param, Guarded):
        param.__class__ = guarded_class(param.__class__)


def unflip(param: nn.Parameter) -> None:
    """Make it a plain parameter again."""
    if isinstance(param, Guarded):
        param.__class__ = param._plain  # type: ignore[attr-defined]


@functools.cache
def cover_constructors() -> None:
    """Have C++ functions of torch that bypass the guard's class touch guarded parameters, once any can be released.

    Types and descriptors cannot be wrapped: `torch.Tensor(p)`, `torch.FloatTensor(p)` and `tensor.data = p` of a
    released parameter give NaN.
    """
    with torch.device("cpu"):  # torch notes which functions such a context applies to, before some are wrapped here
        torch.empty(0, device="cpu")
    places = (
        (torch._C, "_to_dlpack"),
        (torch.utils.dlpack, "to_dlpack"),
        (torch, "to_dlpack"),
        (torch, "tensor"),
        (torch.Tensor, "new_tensor"),
        (torch.Tensor, "as_subclass"),
        (torch._functorch.eager_transforms, "_wrap_for_grad"),
        (torch._functorch.eager_transforms, "_wrap_functional_tensor"),
        (torch._functorch.vmap, "_add_batch_dim"),
    )
    for owner, name in places:
        original = getattr(owner, name, None)
        if original is not None:
            setattr(owner, name, _asking(original))
    graph = torch.autograd.graph
    graph.disable_saved_tensors_hooks = _without_ours(graph.disable_saved_tensors_hooks)
    graph.saved_tensors_hooks.__exit__ = _below_ours(graph.saved_tensors_hooks.__exit__)  # type: ignore[method-assign]


def _asking(original: Any) -> Any:
    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        for argument in args:
            if isinstance(argument, Guarded):
                argument._zeroshard.touch(argument)  # type: ignore[attr-defined]
        return original(*args, **kwargs)

    return function


_WITH_FAST_PATHS = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)


def keep_fast_paths(model: nn.Module) -> None:
    """Let torch's fused evaluation of attention run at every stage if it runs at one.

    Its modules leave the fused path for one with other results (entirely others at padded positions) if their
    parameters, or their first layer's, are of a subclass: so a hook opens these parameters first. A single layer also
    leaves it if any module in it has hooks, as units have. If none has, its unit is open already, and the layer gets no
    hook here.
    """
    without: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            inside = [*module.modules()]
            if not any(each._forward_hooks or each._forward_pre_hooks for each in inside):
                without.update(inside)
    for module in model.modules():
        if isinstance(module, _WITH_FAST_PATHS) and module not in without:
            module.register_forward_pre_hook(_open_for_fast_path)


def _open_for_fast_path(module: Any, args: Any) -> None:
    if module.training or torch.compiler.is_compiling():
        return
    asked = module.layers[0] if isinstance(module, nn.TransformerEncoder) else module
    params = [*asked.parameters()]
    if torch.is_grad_enabled() and any(param.requires_grad for param in params):
        return  # a plain model does not take it here
    _open(params)


def _open(params: Sequence[nn.Parameter]) -> None:
    for param in params:
        if isinstance(param, Guarded):  # touching one opens all of its bucket
            param._zeroshard.touch(param)  # type: ignore[attr-defined]


def keep_graphs(model: nn.Module) -> None:
    """Let a compiled part of a unit run the same graph when `torch.utils.checkpoint` runs it again in backward.

    There its parameters would still be guarded, so a graph made for plain ones would not fit, and another graph saves
    its tensors in another order: torch then reads one for another. So a hook opens these parameters first.
    """
    from torch._dynamo.eval_frame import OptimizedModule

    for module in model.modules():
        if isinstance(module, OptimizedModule):
            module.register_forward_pre_hook(_open_for_graph)


def _open_for_graph(module: nn.Module, args: Any) -> None:
    if torch._C._current_graph_task_id() == -1 or torch.compiler.is_compiling():
        return
    params: list[Any] = [param for param in module.parameters() if isinstance(param, Guarded)]
    if len({param._zeroshard.bucket.plan.unit for param in params}) == 1:  # units inside it open their own
        _open(params)


# --- what autograd saves --------------------------------------------------------------------------------------------


class Source(Protocol):
    """The bucket that a note points into, as the note needs it."""

    plan: BucketPlan
    params: list[nn.Parameter]
    starts: list[int]  # of slots
    generation: int
    unnoted: bool  # may autograd have saved a parameter itself?
    reader: Any

    @property
    def full(self) -> Tensor: ...

    @property
    def ready(self) -> bool: ...

    def land(self) -> None: ...


def _fetch(source: Source) -> None:
    """Gather the weights for autograd, or raise `StateError`."""
    source.reader.fetch(source)
    if not source.ready:
        raise StateError(
            "a weight needed by backward could not be gathered",
            where=f"parameter {source.plan.slots[0].name!r}",
            instead="run backward on every rank",
        )
    source.land()


def _version_of(source: Source, slot: int) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return source.params[slot]._version


class SavedWeight(NamedTuple):
    """A note in place of a parameter (or a view of one): where it was. A tensor again once its unit is gathered."""

    keeper: SavedTensors
    source: Source
    dtype: torch.dtype
    offset: Any
    size: torch.Size
    stride: tuple[int, ...]
    conj: bool
    neg: bool
    slot: int
    version: int
    generation: int

    @outside
    def restore(self) -> Tensor:
        _fetch(self.source)
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1:
            # A graph of the backward itself is wanted (create_graph=True): what the running node saves of a weight is
            # a note too. Autograd gives each node a stack of hooks of its own, so this one need not be popped.
            self.keeper.push()
        version = _version_of(self.source, self.slot)
        if self.generation != self.source.generation or self.version != version:
            raise StateError(
                "a weight was changed between forward and backward by an inplace operation",
                where=f"parameter {self.source.plan.slots[self.slot].name!r}",
                expected=f"version {self.version} of generation {self.generation}",
                got=f"version {version} of generation {self.source.generation}",
                instead="call backward before optimizer.step() or any edit of the weights",
            )
        with torch.no_grad():
            flat = self.source.full
            if self.dtype != flat.dtype:
                nbytes = flat.nbytes // self.dtype.itemsize * self.dtype.itemsize
                flat = flat.view(torch.uint8)[:nbytes].view(self.dtype)
            # Views share their base's version counter: so a write into this one shows.
            view = flat.as_strided(self.size, self.stride, self.offset)
            view = view.conj() if self.conj else view
            return torch._neg_view(view) if self.neg else view


class SavedPart(NamedTuple):
    """A note in place of a saved `DTensor` (`tensor_parallel.py`): its local tensor's note, and how to remake it."""

    note: SavedNote
    made: Callable[..., Tensor]
    spec: Any

    def restore(self) -> Tensor:
        return self.made(self.note.restore(), self.spec, requires_grad=False)


class SavedItself(NamedTuple):
    """A saved tensor that is no weight, with no other pair of hooks to take it: kept, with the version it had."""

    tensor: Tensor
    version: int

    @classmethod
    def of(cls, tensor: Tensor) -> SavedItself:
        # detach, because returning an op's own output would tie a reference cycle through its graph.
        return cls(tensor.detach(), tensor._version)

    def restore(self) -> Tensor:
        check_version(self.tensor, self.version, self.tensor.dtype, self.tensor.shape)
        return self.tensor


def check_version(tensor: Tensor, version: int, dtype: torch.dtype, shape: torch.Size) -> None:
    """Raise PyTorch's error if a saved tensor was edited since. tensor: any that shares its version counter."""
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"{dtype} {list(shape)} is at version {tensor._version}; "
            f"expected version {version} instead."
        )


class OuterHooks(NamedTuple):
    """The result of the pair of hooks below ours for a tensor, and its function that restores the tensor."""

    packed: Any
    unpack: Callable[[Any], Tensor]

    def restore(self) -> Tensor:
        return self.unpack(self.packed)


class PackedWeight(NamedTuple):
    """What the program's pair of hooks returned for a weight, with notes in place of tensors in the weight's memory."""

    leaves: list[Any]
    tree: Any
    unpack: Callable[[Any], Tensor]

    def restore(self) -> Tensor:
        leaves = [each.restore() if isinstance(each, (SavedWeight, SavedPart)) else each for each in self.leaves]
        return self.unpack(tree_unflatten(leaves, self.tree))


class SavedNote(Protocol):
    """A note that autograd holds instead of a tensor."""

    def restore(self) -> Tensor: ...


def _unpack(note: SavedNote) -> Tensor:
    return note.restore()


class _Packing(functools.partial[Any]):
    """The pack function of one of our pairs of hooks. Its argument is the pair below that, or None."""

    keeper: SavedTensors


Pair = tuple[Any, Any]  # hooks: what packs a tensor, and what unpacks it


class SavedTensors:
    """The pairs of hooks, and the stack discipline of pushing and popping them."""

    def __init__(self) -> None:
        self.default: Callable[[Tensor], SavedNote] = outside(
            SavedItself.of
        )  # for tensors that are no weights, without another pair of hooks
        self.inputs: Callable[[Any, Any], Any] = lambda args, kwargs: None  # how a forward's frame keeps its inputs
        self._sources: dict[int, Source] = {}
        self._pack = torch.compiler.disable(self._pack)  # type: ignore[method-assign]  # graphs pass their own tensors
        self._alone = self._pair(None)

    def _pair(self, below: Pair | None) -> Pair:
        packing = _Packing(self._pack, below)
        packing.keeper = self
        return packing, _unpack

    def _has(self, pair: Pair) -> bool:
        return _is_ours(pair) and pair[0].keeper is self

    def watch(self, source: Source) -> None:
        """Keep tensors in this bucket's storage as notes from now on."""
        self._sources[source.full.untyped_storage()._cdata] = source
        source.unnoted = not _allowed()

    def forget(self, source: Source) -> None:
        """Forget a bucket that is about to give its storage up: another may soon be at that address."""
        self._sources.pop(source.full.untyped_storage()._cdata, None)

    def push(self) -> bool:
        """Push the pair of hooks that keeps notes. Returns False if hooks are forbidden here."""
        if not _allowed():
            self.stop_noting()
            return False
        top = _top()
        if top is None:
            pair = self._alone
        else:
            pair = top if self._has(top) else self._pair(top)
        torch._C._autograd._push_saved_tensors_default_hooks(*pair)
        return True

    def pop(self) -> None:
        """Pop our topmost pair. A pair that the program enters in one module and leaves in another stays above it."""
        above = _pop_while(lambda pair: not self._has(pair))
        if _top() is not None:
            torch._C._autograd._pop_saved_tensors_default_hooks()
        _put_back(above)

    def stop_noting(self) -> None:
        """Take note that graphs will hold parameters themselves, in every bucket that is gathered."""
        for source in self._sources.values():
            source.unnoted = True

    def _pack(self, below: Any, tensor: Tensor) -> SavedNote:
        source = self._source_of(tensor)
        if source is None:
            return self.default(tensor) if below is None else OuterHooks(below[0](tensor), below[1])
        while below is not None and _is_ours(below):  # another model's: the weight is not that model's
            below = below[0].args[0]
        if below is None:
            return self._note(tensor, source)
        if getattr(below[0], "__module__", "") == "torch.utils.checkpoint":
            # Checkpointing counts what is saved, and must count the same in forward and when it recomputes: if a
            # module's hook pushed it, it is above our pair in one of the two and below it in the other.
            below[0](tensor)
            return self._note(tensor, source)
        leaves, tree = tree_flatten(below[0](tensor))
        for at, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                of = self._source_of(leaf)
                leaves[at] = leaf if of is None else self._note(leaf, of)
            elif not isinstance(leaf, (int, float, complex, str, bytes, type(None))):
                source.unnoted = True  # an object that may hold the weight's memory
        return PackedWeight(leaves, tree, below[1])

    def _source_of(self, tensor: Tensor) -> Source | None:
        """Return the bucket in whose memory a tensor (or a `DTensor`'s local one) lies; None if it is in none."""
        tensor = _local(tensor)
        return self._sources.get(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else None

    def _note(self, tensor: Tensor, source: Source) -> SavedNote:
        if (local := _local(tensor)) is not tensor:
            return SavedPart(self._note(local, source), type(tensor), tensor._spec)  # type: ignore[attr-defined]
        offset = tensor.storage_offset()
        slot = slot_at(source.starts, offset * tensor.itemsize // source.full.itemsize)
        return SavedWeight(
            self,
            source,
            tensor.dtype,
            offset,
            tensor.size(),
            tensor.stride(),
            tensor.is_conj(),
            tensor.is_neg(),
            slot,
            _version_of(source, slot),
            source.generation,
        )


def _local(tensor: Tensor) -> Tensor:
    """Return the local tensor of a `DTensor`, else the tensor itself."""
    local = getattr(tensor, "_local_tensor", None)
    return local if isinstance(local, Tensor) and hasattr(tensor, "_spec") else tensor


def _top() -> Pair | None:
    """Return the topmost pair of hooks, which is the one that runs; None if there is none."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def _pop_while(wanted: Callable[[Pair], bool]) -> list[Pair]:
    """Pop pairs of hooks as long as the topmost is wanted. Returns them, the topmost first."""
    popped: list[Pair] = []
    while (top := _top()) is not None and wanted(top):
        torch._C._autograd._pop_saved_tensors_default_hooks()
        popped.append(top)
    return popped


def _put_back(popped: list[Pair]) -> None:
    for pair in reversed(popped):
        torch._C._autograd._push_saved_tensors_default_hooks(*pair)


def _is_ours(pair: Pair) -> bool:
    return isinstance(pair[0], _Packing)


def _allowed() -> bool:
    """Tell if hooks may be pushed."""
    return bool(torch._C._autograd._saved_tensors_hooks_is_enabled())  # type: ignore[attr-defined]


def _without_ours(forbid: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `torch.autograd.graph.disable_saved_tensors_hooks`, which refuses if there are any hooks, to pop ours
    first."""

    @functools.wraps(forbid)
    @contextlib.contextmanager
    def without_ours(message: str) -> Iterator[None]:
        pairs = _pop_while(_is_ours)
        for packing, _ in pairs:
            packing.keeper.stop_noting()
        try:
            with forbid(message):
                yield
        finally:
            _put_back(pairs)

    return without_ours


def _below_ours(leave: Callable[..., None]) -> Callable[..., None]:
    """Wrap the exit of `torch.autograd.graph.saved_tensors_hooks`, which pops the topmost pair, so that it pops the
    program's pair: if the block ends inside another module than it began in, our pair is above the program's."""

    @functools.wraps(leave)
    def below_ours(hooks: Any, *exception: Any) -> None:
        pairs = _pop_while(_is_ours)
        try:
            leave(hooks, *exception)
        finally:
            for packing, _ in reversed(pairs):
                packing.keeper.push()  # another pair, because what is below it is another

    return below_ours


def weak(method: Callable[..., Any], *args: Any, inside: bool = False) -> Callable[..., Any]:
    """Make a hook that calls a method as long as its object lives; outside of transforms, unless `inside`.

    Hooks of tensors live in C++, where the garbage collector sees no cycles: they must not keep the engine alive.
    """
    reference, function = weakref.ref(method.__self__), method.__func__  # type: ignore[attr-defined]

    def hook(*given: Any) -> Any:
        owner = reference()
        return None if owner is None else function(owner, *args, *given)

    return hook if inside else outside(hook)


def refuse_copy(protocol: Any) -> NoReturn:
    raise StateError(
        "a sharded model cannot be copied or pickled",
        instead="copy it before shard(...), or, for its weights alone, with zero.gathered(): model.state_dict()",
    )


def refuse_state_dict(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    _refuse(module, "state_dict() of a sharded model would hold nothing", "model.state_dict()")


def refuse_load(module: nn.Module, *_: Any) -> None:
    _refuse(module, "load_state_dict() into a sharded model would change nothing", "model.load_state_dict(state)")


def _refuse(module: nn.Module, what: str, call: str) -> None:
    if any(isinstance(param, Guarded) for param in module.parameters()):
        instead = f"with zero.gathered(): {call}   (on every rank)"
        raise StateError(what, where=f"module {type(module).__name__}", instead=instead)
