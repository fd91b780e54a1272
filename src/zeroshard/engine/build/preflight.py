"""Checks before anything is built: can this model and optimizer be sharded, and do all ranks agree?

A rank that must refuse tells the others first, so that all of them raise instead of waiting for it.
"""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple, NoReturn

import torch
import xxhash
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.spectral_norm import SpectralNorm

from ...arithmetic.sums import as_bytes, dense, parts, simulated
from ...comm.agreement import Group
from ...device import ask
from ...device import describe as device_facts
from ...errors import PeerError, UserError
from ...layout.partition import BLOCK, Partition, plain_name
from ...policies.comm import Comm
from ...policies.layout import Layout
from ...policies.offload import Offload
from ...policies.precision import Precision
from ..step.options import words
from ..weights.unit import Managed, named_tensors

log = logging.getLogger("zeroshard")


def check_model(model: nn.Module) -> None:
    """Refuse lazy modules, and wrappers that would reduce the gradients a second time."""
    for name, tensor in named_tensors(model):
        if is_lazy(tensor):
            raise UserError(
                "a lazy module has not made its parameters and buffers yet, which its first call makes",
                where=f"{'parameter' if isinstance(tensor, nn.Parameter) else 'buffer'} {name!r}",
                got=type(tensor).__name__,
                instead="with torch.no_grad(): model(a batch), once before shard(...), on every rank",
            )
    for name, module in model.named_modules():
        where = f"module {name!r}" if name else "the model itself"
        if isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            refuse_wrapper(type(module).__name__, where)
        if any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__):  # importing it takes a second
            refuse_wrapper("fully_shard", where)


def refuse_wrapper(kind: str, where: str) -> NoReturn:
    raise UserError(
        f"{kind} and zeroshard would both reduce the gradients",
        where=where,
        expected="the plain model",
        got=kind,
        instead=f"shard(model, ...) without {kind}: stage 0 is for DDP, stage 3 for FSDP",
    )


def warn_of_order(managed: list[Managed]) -> None:
    """Warn of parameters whose elements lie in another order in memory, by which kernels round otherwise."""
    if found := [record.name for record in managed if not record.param.is_contiguous()]:
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        log.warning(
            "parameter %r%s is not contiguous, and sharded weights are: products may differ from plain PyTorch's in "
            "their last bits. For equal bits, in both programs: p.data = p.data.contiguous()", found[0], more,
        )  # fmt: skip


def check_parameters(managed: list[Managed]) -> None:
    """Refuse, by name, parameters that cannot be cut."""
    for record in managed:
        if record.param.grad is not None:
            raise UserError(
                "a parameter already has a gradient",
                where=f"parameter {record.name!r}",
                instead="optimizer.zero_grad() before shard(...)",
            )
        for module, name in record.owners:
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
                own = record.names[record.owners.index((module, name))]
                raise UserError(
                    "max_norm edits the rows that a forward looks up, on each rank others",
                    where=f"parameter {own!r}, {type(module).__name__}(max_norm={module.max_norm})",
                    expected="max_norm=None",
                    instead=f"module.max_norm = None, and after each step, on every rank: with zero.gathered({own!r}), "
                    f"torch.no_grad(): weight.copy_(weight.renorm({module.norm_type}, 0, {module.max_norm})), which "
                    "bounds every row",
                )
        if dispatches(record.param) or record.param.is_complex() or record.param.layout is not torch.strided:
            raise UserError(
                "this kind of parameter cannot be sharded",
                where=f"parameter {record.name!r}",
                expected="a dense real tensor",
                got=f"{type(record.param).__name__} {record.param.dtype} {record.param.layout}",
                instead=_plain_instead(record.name, record.param),
            )


def _plain_instead(name: str, param: nn.Parameter) -> str:
    if hasattr(param, "__tensor_flatten__") and not param.requires_grad:  # as torchao's weights of 4 and 8 bits
        return (
            f"Layout(ignore=[{name!r}]), which keeps all of it on every rank and out of checkpoints; or before shard "
            "torch._functorch._aot_autograd.subclass_parametrization.unwrap_tensor_subclass_parameters(model), which "
            "makes plain parameters of what it consists of"
        )
    if hasattr(param, "fsdp_pre_all_gather"):  # FSDP2 asks it what to send
        return (
            "a plain tensor, which shard(..., precision=Precision(fp8=[...])) gathers in 8 bits; of torchao's linears "
            "Float8LinearConfig(enable_fsdp_float8_all_gather=False)"
        )
    ignored = f"Layout(ignore=[{name!r}]), which keeps all of it on every rank"
    ignored += ", where the program averages its gradient" * param.requires_grad
    if param.is_complex():
        return f"nn.Parameter(torch.view_as_real(weight)), and torch.view_as_complex(...) in forward; or {ignored}"
    return f"a plain tensor of its numbers; or {ignored}"


def check_trained(name: str, dtype: torch.dtype) -> None:
    """Refuse to train a parameter in a format that neither sums nor optimizers compute in."""
    if dtype.is_floating_point and dtype.itemsize < 2:
        raise UserError(
            "a parameter of fewer than 16 bits cannot be trained as it is",
            where=f"parameter {name!r}",
            expected="a floating dtype of 16 bits or more, or requires_grad=False",
            got=dtype,
            instead="Precision(param_dtype=torch.bfloat16), which begins with the values that the parameter has; with "
            "fp8=True it rests in 8 bits again",
        )


def dispatches(tensor: Tensor) -> bool:
    """Tell if a tensor's class has its own `__torch_dispatch__`: then its numbers lie elsewhere, in any form."""
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
    """Refuse, by name, tensors of a model that lie in one memory: sharded, each would get memory of its own."""
    moved = {id(record.param) for record in managed}
    named: list[tuple[str, str, Tensor]] = [("parameter", *each) for each in model.named_parameters()]
    named += [("buffer", *each) for each in model.named_buffers()]
    registered = {id(tensor) for _, _, tensor in named}
    named += [("attribute", *each) for each in _attributes(model) if id(each[1]) not in registered]
    named = [(kind, plain_name(name), each) for kind, name, each in named]
    held = [
        Held(str(tensor.device), tensor.data_ptr(), tensor.data_ptr() + _reach(tensor), order, kind, name, tensor)
        for order, (kind, name, tensor) in enumerate(named)
        if tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_meta)
        if tensor.numel() and type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
        if kind != "attribute" or _has_memory(tensor)
    ]
    near: list[Held] = []
    for each in sorted(held, key=lambda each: each[:2]):
        near = [other for other in near if other.device == each.device and other.stop > each.start]
        for other in near:
            if ({id(each.tensor), id(other.tensor)} & moved) and _share(other.tensor, each.tensor):
                first, second = sorted((each, other), key=lambda each: each.order)
                tie = {
                    "parameter": f"{second.name} = {first.name}, one nn.Parameter, ties them; ",
                    "attribute": f"read {first.name} in forward, where its values are wanted, and delete "
                    "the attribute before shard(...); ",
                }.get(second.kind, "")
                article = "an" if second.kind == "attribute" else "a"
                raise UserError(
                    f"{article} {second.kind} lies in a parameter's memory, but sharded each gets memory of its own",
                    where=f"{second.kind} {second.name!r} and parameter {first.name!r}",
                    instead=f"{tie}{first.name}.detach().clone() is a copy",
                )
        near.append(each)


def _attributes(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors that modules have as plain attributes, also in a list, tuple or dict, each with its name.

    But for what torch's own modules make anew: spectral norm before each forward, recurrent layers for their kernels.
    """
    for path, module in model.named_modules():
        own = {hook.name for hook in module._forward_pre_hooks.values() if isinstance(hook, SpectralNorm)}
        own |= {"_flat_weights"} if isinstance(module, nn.RNNBase) else set()
        prefix = f"{path}." * bool(path)
        for name, value in vars(module).items():
            if name in own:
                continue
            if isinstance(value, Tensor):
                yield prefix + name, value
            several: Any = value.items() if isinstance(value, dict) else ()
            several = enumerate(value) if isinstance(value, (list, tuple)) else several
            for key, each in several:
                if isinstance(each, Tensor):
                    yield f"{prefix}{name}[{key!r}]", each


def _has_memory(tensor: Tensor) -> bool:
    try:
        return tensor.data_ptr() >= 0
    except RuntimeError:  # a wrapper, such as torch.func's
        return False


def check_buffers(model: nn.Module) -> None:
    """Refuse, by name, buffers of a kind whose content can neither be sent nor compared."""
    for name, tensor in model.named_buffers():
        if parts(tensor) is None:
            raise UserError(
                "this kind of buffer can neither be sent to the other ranks nor compared",
                where=f"buffer {name!r}",
                expected="a dense, sparse or nested tensor, or a subclass with __tensor_flatten__",
                got=f"{type(tensor).__name__} {tensor.dtype} {tensor.layout}",
                instead="an attribute that is not registered as a buffer, equal on all ranks",
            )


class Contents:
    """Digests of buffers made of several tensors (sparse ones, say): never sent, so all ranks' must be equal."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], list[int], str]] = {}  # by id

    def of(self, tensor: Tensor) -> str:
        """Return a buffer's kind and digest as text. It is digested again only if a version counter has moved."""
        found = parts(tensor) or []
        versions = [tensor._version, *(part._version for part in found)]
        known = self._known.get(id(tensor))
        if known is not None and known[0]() is tensor and known[1] == versions:
            return known[2]
        hashed = xxhash.xxh3_128()
        for part in found:
            hashed.update(f"{tuple(part.shape)} {part.dtype}".encode())
            if part.numel() and not (part.is_meta or simulated(part)):
                content: Any = ask(as_bytes(part.detach())).numpy()
                hashed.update(content)
        said = f"{type(tensor).__name__} {tensor.dtype} {tensor.layout} of content {hashed.hexdigest()}"
        self._known[id(tensor)] = weakref.ref(tensor), versions, said
        return said


def _reach(tensor: Tensor) -> int:
    """Return the bytes from a tensor's first element to the end of its last."""
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (steps + 1) * tensor.itemsize


def _share(a: Tensor, b: Tensor) -> bool:
    """Tell if an element is in both tensors. Views may alternate, as the columns of one matrix."""
    first = min(a.data_ptr(), b.data_ptr())
    if a.itemsize != b.itemsize or (a.data_ptr() - b.data_ptr()) % a.itemsize:
        return True
    starts = [(tensor.data_ptr() - first) // tensor.itemsize for tensor in (a, b)]
    room = max(start + _reach(tensor) // tensor.itemsize for start, tensor in zip(starts, (a, b), strict=True))
    seen = torch.zeros(room, dtype=torch.bool, device="cpu")
    seen.as_strided(a.shape, a.stride(), starts[0]).fill_(True)
    return bool(ask(seen.as_strided(b.shape, b.stride(), starts[1]).any()))


def check_settings(partition: Partition, layout: Layout, comm: Comm, precision: Precision) -> None:
    """Refuse settings that contradict each other."""
    for plan in (plan for plan in partition.buckets if plan.trainable and not plan.whole):
        own = getattr(torch, plan.dtype.removeprefix("torch."))
        updated = precision.of_bucket(plan).stepped(precision.of_bucket(plan).master(own))
        if partition.align < BLOCK and layout.bounds != "tensor" and updated.itemsize < 4:
            raise UserError(
                "optimizers' 16-bit kernels round elsewhere where a cut ends a vector",
                where=f"parameter {plan.slots[0].name!r}",
                expected="Layout(align=128), or fp32 masters",
                got=f"align={partition.align}, and updates in {updated}",
                instead='the default align, Precision() without master_dtype, or rounding="stochastic" beside it',
            )
    if comm.reduce == "native" and not partition.even:
        raise UserError(
            "the backend's reduce-scatter needs shards of one size",
            got=f"bounds={layout.bounds!r}"
            + ", and tensors that are never cut" * any(b.whole for b in partition.buckets),
            instead='Comm(reduce="ordered"), or Layout(bounds="unit") and no whole tensors',
        )


ABSENT = "on meta"  # a key of a rank's facts: the parameters and buffers that it has no values of
OWN = "budgets"  # another key: the budgets of this rank's machine, where `shard` chooses the `Offload`
_LOCAL = 'Layout(buffers="local") for buffers that are each rank\'s own; else the same one on every rank'
LOCAL = "own buffers"  # another key: the kinds of buffers that are each rank's own, which may differ


def describe(
    model: nn.Module,
    managed: list[Managed],
    units: list[str],
    optimizers: list[torch.optim.Optimizer],
    policies: tuple[Precision, Layout, Comm, Offload],
    device: torch.device,
) -> dict[str, Any]:
    """Describe everything that must be equal on all ranks, in words and numbers, in the order of registration."""
    precision, layout, comm, offload = policies
    names = {id(record.param): record.name for record in managed}
    facts: dict[str, Any] = {
        "torch build": torch.__version__,
        "intra-op threads": torch.get_num_threads(),
        "precision": repr(precision),
        "layout": repr(layout),
        "comm": repr(dataclasses.replace(comm, group=None)),
        "offload": repr(_anywhere(offload)),
        "device type": device.type,
        **{f"device: {what}": said for what, said in device_facts(device).items()},
    }
    for record in managed:
        param = record.param
        kind = f"{tuple(param.shape)} {param.dtype} requires_grad={param.requires_grad} names={record.names}"
        facts[f"parameter {record.name!r}"] = kind
    facts[LOCAL], local = {}, layout.buffers == "local"
    for name, tensor in ((plain_name(name), each) for name, each in model.named_buffers()):
        kind = f"{tuple(tensor.shape)} {tensor.dtype}" if dense(tensor) else Contents().of(tensor)
        (facts[LOCAL] if local else facts)[f"buffer {name!r}"] = kind
    facts["units"] = units
    facts[ABSENT] = [name for name, each in named_tensors(model) if each.is_meta]
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


def _anywhere(offload: Offload) -> Offload:
    """Return the settings that must be equal on all ranks, which have disks and memory of their own."""
    path = None if offload.path is None else ""
    return dataclasses.replace(offload, path=path, gpu_mem=None, host_mem=None, disk=None)


def ask_all(group: Group, facts: dict[str, Any], problem: Exception | None) -> list[dict[str, Any]]:
    """Gather every rank's facts, and the problem that keeps it from sharding its model."""
    kind = "" if problem is None or isinstance(problem, UserError) else f"{type(problem).__name__}: "
    said = None if problem is None else f"{kind}{problem}"
    return group.describe({"problem": said, "seed": torch.initial_seed(), **facts}, "construction")


def agree(told: list[dict[str, Any]], problem: Exception | None) -> int:
    """Raise on every rank if one must refuse or is about to build something else; name the first difference.

    Answers with rank 0's seed, which need not be everyone's.
    """
    may_differ = dict.fromkeys(("seed", ABSENT, LOCAL, OWN))
    everyone, seed = [{**each, **may_differ} for each in told], int(told[0]["seed"])
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
                    instead=_LOCAL
                    if key.startswith("buffer ")
                    else "build the same model, optimizer and settings on every rank, and set one OMP_NUM_THREADS",
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


def givers(told: list[dict[str, Any]]) -> dict[str, int | None]:
    """Return, for each tensor that some ranks have on meta, the first rank that has its values; None if none has.

    Refuses, on every rank, parameters that would not be sent because they are not sharded.
    """
    absent = [set(each[ABSENT]) for each in told]
    found = {}
    for name in dict.fromkeys(name for each in told for name in each[ABSENT]):
        kinds = [each[LOCAL].get(f"buffer {name!r}") for each in told]
        if len(set(kinds)) > 1:
            raise PeerError(
                "a buffer of each rank's own is on meta on some ranks, and no other rank's fits all of these",
                where=f"buffer {name!r}", got="; ".join(f"rank {rank}: {kind}" for rank, kind in enumerate(kinds)),
                instead="values of it on every rank that has it, before shard(...)",
            )  # fmt: skip
        having, lacking = ([r for r, names in enumerate(absent) if (name in names) is lacks] for lacks in (False, True))
        found[name] = having[0] if having else None
        if having and f"parameter {name!r}" not in told[0] and f"buffer {name!r}" not in {**told[0], **told[0][LOCAL]}:
            raise PeerError(
                "a parameter that is not sharded is on meta on some ranks, and no rank sends it",
                where=f"parameter {name!r}",
                got=f"values on rank {having[0]}, none on rank {lacking[0]}",
                instead="values of it on every rank, or Layout(ignore=...) without it",
            )
    return found


class Structure:
    """The module tree as it was sharded, to notice what was replaced, removed or added since."""

    def __init__(self, model: nn.Module) -> None:
        tables: list[tuple[str, dict[str, Any]]] = [
            (f"{path}." if path else "", table)
            for path, module in model.named_modules()
            for table in (module._parameters, module._modules)
        ]
        self._entries = [(table, key, value, prefix + key) for prefix, table in tables for key, value in table.items()]
        self._managed = {id(value) for _, _, value, _ in self._entries if hasattr(value, "_zeroshard")}
        self._lengths = [(table, len(table), prefix) for prefix, table in tables]

    def difference(self, *, called: bool = False) -> str | None:
        """Return the name of the first parameter or module that is not what it was, or None.

        called: in a forward, tensors may stand in for parameters: that is `torch.func.functional_call`.
        """
        for table, key, value, name in self._entries:
            now = table[key] if key in table else None  # noqa: SIM401  a scripted module's table has no `get`
            stands_in = called and isinstance(now, Tensor) and not isinstance(now, nn.Parameter)
            if (now is not value and not stands_in) or (
                id(value) in self._managed and not hasattr(value, "_zeroshard")
            ):
                return name
        for table, length, prefix in self._lengths:
            if len(table) != length:
                return prefix + list(table)[-1]
        return None
