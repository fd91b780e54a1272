"""What is looked at before anything is built: can this model and optimizer be sharded, and do all ranks agree?

A rank that must refuse says so to the others first, so that all of them raise instead of waiting for it.
"""

from __future__ import annotations

import dataclasses
import math
import weakref
from typing import Any, NamedTuple, NoReturn

import torch
import xxhash
from torch import Tensor, nn

from ..errors import PeerError, UserError
from ..layout import Layout, Partition
from ..numerics import Precision, as_bytes, dense, parts, simulated
from ..ranks.agreement import Group
from ..ranks.comm import Comm
from ..tiers.tier import Offload
from .buffer import Buffer
from .fragment import check_cut
from .optim import Binding, words
from .unit import Managed

ELEMENTWISE = {"SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "NAdam", "RAdam", "Adamax", "ASGD", "Rprop"}
WHOLE_TENSORS = {"Adafactor", "Muon"}
BY_TENSOR = ELEMENTWISE | WHOLE_TENSORS  # what happens to a tensor depends on no other
# Of other packages: how many elements, counted from a tensor's start, are updated together. torchao quantizes blocks of
# 256 or 128, but nothing of what has fewer than 4096 elements.
TOGETHER = {
    "lion_pytorch": {"Lion": 1},
    "schedulefree": {"AdamWScheduleFree": 1, "RAdamScheduleFree": 1, "SGDScheduleFree": 1},
    "torchao": dict.fromkeys(("Adam8bit", "AdamW8bit", "Adam4bit", "AdamW4bit", "AdamFp8", "AdamWFp8"), 4096),
}
WRAPPERS = {"accelerate.optimizer": "optimizer", "lightning.fabric.wrappers": "_optimizer"}


def unwrapped(optimizer: Any) -> Any:
    """The optimizer whose step updates the parameters: others' wrappers have no hooks of their own."""
    for kind in type(optimizer).__mro__:
        if kind.__module__ in WRAPPERS:
            return unwrapped(getattr(optimizer, WRAPPERS[kind.__module__]))
    return optimizer


def check_model(model: nn.Module) -> None:
    """Refuse what would reduce the gradients a second time, and parameters that are cut already."""
    for name, module in model.named_modules():
        where = f"module {name!r}" if name else "the model itself"
        if isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            refuse_wrapper(type(module).__name__, where)
        if any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__):  # importing it takes a second
            refuse_wrapper("fully_shard", where)
    for name, param in model.named_parameters():
        if hasattr(param, "device_mesh"):
            raise UserError(
                "a parameter is a DTensor, cut by parallelize_module or distribute_tensor already",
                where=f"parameter {name!r}",
                expected="a plain tensor: zeroshard works beside no tensor parallelism yet",
                got=f"{param.placements} on {param.device_mesh}",  # type: ignore[attr-defined]
                instead="shard(model, ...) of the plain model",
            )


def refuse_wrapper(kind: str, where: str) -> NoReturn:
    raise UserError(
        f"{kind} and zeroshard would both reduce the gradients",
        where=where,
        expected="the plain model",
        got=kind,
        instead=f"shard(model, ...) without {kind}: stage 0 is for DDP, stage 3 for FSDP",
    )


def check_parameters(managed: list[Managed]) -> None:
    """Refuse, by name, parameters that cannot be cut."""
    for record in managed:
        if record.param.grad is not None:
            raise UserError(
                "a parameter already has a gradient",
                where=f"parameter {record.name!r}",
                instead="optimizer.zero_grad() before shard(...)",
            )
        if (
            isinstance(record.param, nn.parameter.UninitializedParameter)
            or dispatches(record.param)
            or record.param.is_complex()
            or record.param.layout is not torch.strided
        ):
            raise UserError(
                "this kind of parameter cannot be sharded",
                where=f"parameter {record.name!r}",
                expected="a dense real tensor",
                got=f"{type(record.param).__name__} {record.param.dtype} {record.param.layout}",
                instead=f"Layout(ignore=[{record.name!r}]), or store it as real numbers in a plain tensor",
            )


def dispatches(tensor: Tensor) -> bool:
    """Does its class answer torch's operations by itself? Then its numbers are elsewhere, in whatever form."""
    own = type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__
    return own and not simulated(tensor)


class Held(NamedTuple):
    """A tensor of the model's, and where in memory it is: bytes [start, stop) of a device."""

    device: str
    start: int
    stop: int
    order: int  # of registration, parameters before buffers
    kind: str
    name: str
    tensor: Tensor


def check_memory(model: nn.Module, managed: list[Managed]) -> None:
    """Refuse, by name, parameters and buffers that lie in one memory: sharded, each would get memory of its own."""
    moved = {id(record.param) for record in managed}
    named: list[tuple[str, str, Tensor]] = [("parameter", *each) for each in model.named_parameters()]
    named += [("buffer", *each) for each in model.named_buffers()]
    held = [
        Held(str(tensor.device), tensor.data_ptr(), tensor.data_ptr() + _reach(tensor), order, kind, name, tensor)
        for order, (kind, name, tensor) in enumerate(named)
        if not isinstance(tensor, (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer))
        if tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_meta)
        if tensor.numel() and type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
    ]
    near: list[Held] = []
    for each in sorted(held, key=lambda each: each[:2]):
        near = [other for other in near if other.device == each.device and other.stop > each.start]
        for other in near:
            if ({id(each.tensor), id(other.tensor)} & moved) and _share(other.tensor, each.tensor):
                first, second = sorted((each, other), key=lambda each: each.order)
                tie = (
                    f"{second.name} = {first.name}, one nn.Parameter, ties them; " if second.kind == first.kind else ""
                )
                raise UserError(
                    f"a {second.kind} lies in a parameter's memory, but sharded each gets memory of its own",
                    where=f"{second.kind} {second.name!r} and parameter {first.name!r}",
                    instead=f"{tie}{first.name}.detach().clone() is a copy",
                )
        near.append(each)


def check_buffers(model: nn.Module) -> None:
    """Refuse, by name, buffers of a kind whose content cannot be told."""
    for name, tensor in model.named_buffers():
        if not isinstance(tensor, nn.parameter.UninitializedBuffer) and parts(tensor) is None:
            raise UserError(
                "this kind of buffer can neither be sent to the other ranks nor compared",
                where=f"buffer {name!r}",
                expected="a dense, sparse or nested tensor, or a subclass with __tensor_flatten__",
                got=f"{type(tensor).__name__} {tensor.dtype} {tensor.layout}",
                instead="an attribute that is not registered as a buffer, alike on all ranks",
            )


class Contents:
    """What buffers hold that are made of several tensors, sparse ones say: nobody sends these, so all must be alike."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], list[int], str]] = {}  # by id

    def of(self, tensor: Tensor) -> str:
        """Kind and digest. Looked at again where a version counter has moved."""
        found = parts(tensor) or []
        versions = [tensor._version, *(part._version for part in found)]
        known = self._known.get(id(tensor))
        if known is not None and known[0]() is tensor and known[1] == versions:
            return known[2]
        hashed = xxhash.xxh3_128()
        for part in found:
            hashed.update(f"{tuple(part.shape)} {part.dtype}".encode())
            if part.numel() and not (part.is_meta or simulated(part)):
                content: Any = as_bytes(part.detach()).cpu().numpy()
                hashed.update(content)
        said = f"{type(tensor).__name__} {tensor.dtype} {tensor.layout} of content {hashed.hexdigest()}"
        self._known[id(tensor)] = weakref.ref(tensor), versions, said
        return said


def _reach(tensor: Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last."""
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (steps + 1) * tensor.itemsize


def _share(a: Tensor, b: Tensor) -> bool:
    """Is there an element of both? Views may alternate, as the columns of one matrix."""
    first = min(a.data_ptr(), b.data_ptr())
    if a.itemsize != b.itemsize or (a.data_ptr() - b.data_ptr()) % a.itemsize:
        return True
    starts = [(tensor.data_ptr() - first) // tensor.itemsize for tensor in (a, b)]
    room = max(start + _reach(tensor) // tensor.itemsize for start, tensor in zip(starts, (a, b), strict=True))
    seen = torch.zeros(room, dtype=torch.bool, device="cpu")
    seen.as_strided(a.shape, a.stride(), starts[0]).fill_(True)
    return bool(seen.as_strided(b.shape, b.stride(), starts[1]).any())


def check_settings(partition: Partition, layout: Layout, comm: Comm) -> None:
    """Refuse settings that contradict each other."""
    if comm.reduce == "native" and not partition.even:
        raise UserError(
            "the backend's reduce-scatter needs shards of one size",
            got=f"bounds={layout.bounds!r}",
            instead='Comm(reduce="ordered"), or Layout(bounds="unit")',
        )


def block_of(optimizer: Any) -> int | None:
    """How many elements this optimizer updates together, counted from a tensor's start; None: it is not known."""
    kind = type(optimizer)
    if kind.__module__.startswith("torch.optim"):
        return 1 if kind.__name__ in ELEMENTWISE else None
    block = 1 if getattr(optimizer, "elementwise", False) else getattr(kind, "block", None)
    known = TOGETHER.get(kind.__module__.partition(".")[0], {}).get(kind.__name__)
    return block if isinstance(block, int) else known


def by_bucket(optimizer: Any) -> bool:
    """May this optimizer be stepped one bucket after the other?"""
    known = type(optimizer).__module__.startswith("torch.optim") and type(optimizer).__name__ in BY_TENSOR
    return bool(getattr(optimizer, "elementwise", known or block_of(optimizer) == 1))


def check_offload(optimizers: list[Any], offload: Offload) -> None:
    """Refuse optimizers that cannot be stepped bucket by bucket."""
    for optimizer in optimizers if offload != Offload() else ():
        if not by_bucket(optimizer):
            raise UserError(
                "states in another tier are stepped one bucket after the other, and this optimizer may not allow that",
                where=type(optimizer).__name__,
                expected=f"one of {sorted(BY_TENSOR)}, or an attribute elementwise = True on the class",
                instead="Offload(), or set elementwise = True if each element is updated by itself",
            )


def check_added(model: nn.Module, buffers: list[Buffer], bindings: list[Binding], added: list[nn.Parameter]) -> None:
    """Refuse what `add_param_group` brought after `shard`, where it is not the model's or is updated already."""
    ignored = {id(param) for param in model.parameters() if not hasattr(param, "_zeroshard")}
    updated = {id(member.place) for binding in bindings for member in binding.members}
    for param in added:
        place = getattr(param, "_zeroshard", None)
        if id(param) not in ignored and not (place is not None and any(place.buffer is own for own in buffers)):
            raise UserError(_FOREIGN, where=f"a group that was added, shape {tuple(param.shape)}", instead=_TOGETHER)
        if place is not None and id(place) in updated:
            raise UserError(_TWICE, where=f"a group that was added, parameter {place.name!r}", instead=_ONCE)


_FOREIGN = "the optimizer holds a parameter that is not the model's"
_TOGETHER = "put all trained modules under one nn.Module and shard that"
_TWICE = "two groups or optimizers hold the same parameter"
_ONCE = "give each parameter to one group of one optimizer"


def check_optimizers(
    model: nn.Module, managed: list[Managed], optimizers: list[Any], partition: Partition, *, replicated: bool
) -> None:
    """Refuse optimizers of the wrong kind, parameters that are not the model's, and parameters held twice."""
    for number, optimizer in enumerate(optimizers):
        check_optimizer(optimizer, partition, replicated=replicated)
        check_options(optimizer, number)
    owned = {id(record.param) for record in managed}
    known = owned | {id(param) for param in model.parameters()}
    seen: set[int] = set()
    for number, optimizer in enumerate(optimizers):
        for at, group in enumerate(optimizer.param_groups):
            for position, param in enumerate(group["params"]):
                where = f"optimizer {number}, group {at}, parameter {position}"
                if id(param) not in known:
                    raise UserError(_FOREIGN, where=where, instead=_TOGETHER)
                if id(param) in seen:
                    raise UserError(_TWICE, where=where, instead=_ONCE)
                seen.add(id(param))
    for optimizer in optimizers:
        for record in managed:
            for key, value in optimizer.state.get(record.param, {}).items():
                check_cut(optimizer, record.name, tuple(record.param.shape), key, value)


def check_options(optimizer: Any, number: int) -> None:
    """Refuse options of an optimizer's groups that a checkpoint could not hold."""
    for at, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key not in ("params", "param_names"):
                check_option(f"optimizer {number}, group {at}, option {key!r}", value)


def check_option(where: str, value: Any) -> None:
    """Refuse options that a checkpoint could not hold: its manifest is JSON."""
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for each in value:
            check_option(where, each)
    elif not (
        value is None
        or isinstance(value, (bool, int, str))
        or (isinstance(value, float) and math.isfinite(value))
        or (isinstance(value, Tensor) and value.numel() == 1)
    ):
        raise UserError(
            "an optimizer's option could not be saved",
            where=where,
            expected="a finite number, text, True, False, None, a tensor of one number, or lists and dicts of these",
            got=f"{type(value).__name__} {value!r:.60}",
            instead="keep it in an attribute of the optimizer, which is not saved",
        )


def check_optimizer(optimizer: Any, partition: Partition, *, replicated: bool) -> None:
    """Refuse, by name, an optimizer whose update of a fragment is not the fragment of its update."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(
            "not an optimizer",
            expected="a torch.optim.Optimizer, a sequence of them, or None",
            got=type(optimizer).__name__,
            instead="optimizer = torch.optim.AdamW(model.parameters()); shard(model, optimizer)",
        )
    name = type(optimizer).__name__
    is_torch = type(optimizer).__module__.startswith("torch.optim")
    cut = [] if replicated else partition.cut_tensors()
    where = f"{name}, parameter {cut[0]!r} is cut" if cut else name
    if is_torch and name == "SparseAdam":
        raise UserError(
            "SparseAdam needs sparse gradients, which cannot be sharded",
            got=name,
            instead="torch.optim.Adam with nn.Embedding(..., sparse=False)",
        )
    if is_torch and name == "LBFGS" and not replicated:
        raise UserError(
            "LBFGS takes inner products over all parameters, so its state cannot be sharded",
            got=name,
            instead="shard(..., stage=0)",
        )
    if is_torch and name in WHOLE_TENSORS and cut:
        raise UserError(
            "this optimizer works on whole tensors",
            where=where,
            instead='shard(..., layout=Layout(bounds="tensor")), or stage=0',
        )
    known = is_torch and name in BY_TENSOR | {"LBFGS"}
    block = block_of(optimizer)
    odd = [each for each in cut if block and (partition.find(each)[1].numel % block or partition.align % block)]
    if not known and block and odd:
        raise UserError(
            f"this optimizer updates blocks of {block} elements, and a cut would fall into one",
            where=f"{name}, parameter {odd[0]!r} is cut",
            expected=f"Layout(align={block}), and a multiple of that many elements",
            got=f"align={partition.align}, and {partition.find(odd[0])[1].numel} elements",
            instead=f'Layout(align={block}), or Layout(bounds="tensor") where tensors are no multiple',
        )
    if not known and cut and block is None:
        raise UserError(
            "zeroshard does not know whether this optimizer is elementwise",
            where=where,
            expected=f"one of {sorted(ELEMENTWISE)}, or an attribute elementwise = True on the class",
            instead="set elementwise = True if each element is updated by itself, block = 256 if 256 elements are "
            'together, else layout=Layout(bounds="tensor")',
        )
    if partition.align < 128 and any(group.get("fused") for group in optimizer.param_groups):
        raise UserError(
            "fused kernels depend on where a vector starts",
            expected="Layout(align=128)",
            got=f"align={partition.align} and fused=True",
            instead="fused=False, or the default align",
        )


def describe(
    model: nn.Module,
    managed: list[Managed],
    units: list[str],
    optimizers: list[torch.optim.Optimizer],
    policies: tuple[Precision, Layout, Comm, Offload],
    device: torch.device,
) -> dict[str, Any]:
    """Everything that must be alike on all ranks, in words and numbers, in the order of registration."""
    precision, layout, comm, offload = policies
    names = {id(record.param): record.name for record in managed}
    facts: dict[str, Any] = {
        "torch build": torch.__version__,
        "intra-op threads": torch.get_num_threads(),
        "precision": repr(precision),
        "layout": repr(layout),
        "comm": repr(dataclasses.replace(comm, group=None)),
        "offload": repr(dataclasses.replace(offload, path=None if offload.path is None else "")),  # a disk of its own
        "device type": device.type,
    }
    for record in managed:
        param = record.param
        kind = f"{tuple(param.shape)} {param.dtype} requires_grad={param.requires_grad} names={record.names}"
        facts[f"parameter {record.name!r}"] = kind
    for name, tensor in model.named_buffers():
        kind = f"{tuple(tensor.shape)} {tensor.dtype}" if dense(tensor) else Contents().of(tensor)
        facts[f"buffer {name!r}"] = kind
    facts["units"] = units
    for number, optimizer in enumerate(optimizers):
        for at, group in enumerate(optimizer.param_groups):
            where = f"optimizer {number} ({type(optimizer).__name__}) group {at}"
            facts[f"{where} parameters"] = [names.get(id(param), "ignored") for param in group["params"]]
            # An object's address differs from rank to rank, and says nothing.
            facts |= {
                f"{where} {key}": repr(words(value))
                for key, value in group.items()
                if key not in ("params", "param_names")
            }
            for param in group["params"]:
                if state := optimizer.state.get(param):
                    kinds = {
                        key: f"{value.dtype} {tuple(value.shape)}"
                        if isinstance(value, Tensor)
                        else type(value).__name__
                        for key, value in state.items()
                    }
                    facts[f"{where} state of {names.get(id(param), 'ignored')!r}"] = kinds
    return facts


def ask_all(group: Group, facts: dict[str, Any], problem: Exception | None) -> list[dict[str, Any]]:
    """Every rank's facts, and what keeps it from sharding its model."""
    kind = "" if problem is None or isinstance(problem, UserError) else f"{type(problem).__name__}: "
    said = None if problem is None else f"{kind}{problem}"
    return group.describe({"problem": said, "seed": torch.initial_seed(), **facts}, "construction")


def agree(told: list[dict[str, Any]], problem: Exception | None) -> int:
    """Raise on every rank if one must refuse or is about to build something else; name the first difference.

    Answers with rank 0's seed, which need not be everyone's.
    """
    everyone, seed = [{**each, "seed": None} for each in told], int(told[0]["seed"])
    if problem is not None:
        raise problem
    for rank, theirs in enumerate(everyone):
        if theirs["problem"] is not None:
            raise PeerError("another rank cannot shard its model", where=f"rank {rank}", got=theirs["problem"])
    for rank, theirs in enumerate(everyone):
        # Units and optimizers last: they differ wherever parameters do, which say more.
        keys = dict.fromkeys([*everyone[0], *theirs])
        for key in sorted(keys, key=lambda key: key.startswith(("units", "optimizer "))):
            if everyone[0].get(key) != theirs.get(key):
                raise PeerError(
                    "the ranks are about to build different things",
                    where=key,
                    expected=f"{everyone[0].get(key, 'nothing of that name')} (rank 0)",
                    got=f"{theirs.get(key, 'nothing of that name')} (rank {rank})",
                    instead="build the same model, optimizer and settings on every rank; set OMP_NUM_THREADS alike",
                )
        for first, other in zip(everyone[0], theirs, strict=True):
            if first == other:
                continue
            raise PeerError(
                "the ranks register their parameters in different orders",
                where=other,
                expected=f"{first} (rank 0)",
                got=f"{other} (rank {rank})",
                instead="build the model the same way on every rank",
            )
    return seed


class Structure:
    """What the module tree looked like when it was sharded, to notice what was replaced, removed or added since."""

    def __init__(self, model: nn.Module) -> None:
        tables: list[tuple[str, dict[str, Any]]] = [
            (f"{path}." if path else "", table)
            for path, module in model.named_modules()
            for table in (module._parameters, module._modules)
        ]
        self._entries = [(table, key, value, prefix + key) for prefix, table in tables for key, value in table.items()]
        self._lengths = [(table, len(table), prefix) for prefix, table in tables]

    def difference(self, *, called: bool = False) -> str | None:
        """The name of the first parameter or module that is not what it was, or None.

        called: in a forward, tensors may stand in for parameters: that is `torch.func.functional_call`.
        """
        for table, key, value, name in self._entries:
            now = table.get(key)
            stands_in = called and isinstance(now, Tensor) and not isinstance(now, nn.Parameter)
            if now is not value and not stands_in:
                return name
        for table, length, prefix in self._lengths:
            if len(table) != length:
                return prefix + list(table)[-1]
        return None
