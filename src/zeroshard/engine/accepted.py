"""Which optimizers can be sharded, and how: facts per class, and what is refused of an optimizer by name.

An elementwise optimizer may be cut anywhere, one that works in blocks between them, one of whole tensors nowhere.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UserError
from ..layout import Partition
from ..tiers.tier import Offload
from .buffer import Buffer
from .fragment import check_cut
from .optim import Binding
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
