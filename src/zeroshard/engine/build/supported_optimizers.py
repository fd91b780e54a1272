"""The optimizers that can be sharded, and how: facts per class, and refusals by name.

The parameters of an elementwise optimizer may be cut anywhere, those of one that works in blocks only between blocks,
those of one of whole tensors nowhere; the layout cuts them so. The optimizer's class says which kind it is:
`elementwise = True`, `block = 256` or `whole = True`.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import UserError
from ...hooks import features, first
from ...layout.partition import WHOLE, Partition, together
from ...layout.stacked import stacked
from ...layout.stage import Degree
from ...policies.layout import Layout
from ...policies.offload import Offload
from ...validation import python_number
from ..step.attributes import check_attributes
from ..step.fragment import check_cut, updated
from ..step.guarded_state import inside
from ..step.optim import Binding
from ..weights.bucket import Bucket
from ..weights.unit import Managed, named_tensors
from .optimizer_trial import check_kept, check_states

ELEMENTWISE = {"SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "NAdam", "RAdam", "Adamax", "ASGD", "Rprop"}
WHOLE_TENSORS = {"Adafactor", "Muon"}
BY_TENSOR = ELEMENTWISE | WHOLE_TENSORS  # the update of a tensor depends on no other
# Of other packages: how many elements, counted from a tensor's start, are updated together. torchao and bitsandbytes
# quantize blocks of 256 or 128, but no tensor of fewer than 4096 elements.
TOGETHER = {
    "bitsandbytes": {
        f"{paged}{kind}{bits}": 4096
        for paged in ("", "Paged")
        for kind in ("Adam", "AdamW", "Lion")
        for bits in ("8bit", "32bit", "")
    },
    "lion_pytorch": {"Lion": 1},
    "schedulefree": {"AdamWScheduleFree": 1, "RAdamScheduleFree": 1, "SGDScheduleFree": 1},
    "torchao": dict.fromkeys(("Adam8bit", "AdamW8bit", "Adam4bit", "AdamW4bit", "AdamFp8", "AdamWFp8"), 4096),
}
COUNTING = {"schedulefree"}  # packages whose optimizers count in their groups how often they were called
WRAPPERS = {"accelerate.optimizer": "optimizer", "lightning.fabric.wrappers": "_optimizer"}


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer inside other libraries' wrappers: these have no hooks of their own."""
    for kind in type(optimizer).__mro__:
        if kind.__module__ in WRAPPERS:
            return unwrapped(getattr(optimizer, WRAPPERS[kind.__module__]))
    return optimizer


def block_of(optimizer: Any) -> int | None:
    """Return how many elements, counted from a tensor's start, an optimizer updates together; `WHOLE`, or None: not
    known."""
    kind = type(optimizer)
    if kind.__module__.startswith("torch.optim"):
        return 1 if kind.__name__ in ELEMENTWISE else WHOLE if kind.__name__ in WHOLE_TENSORS else None
    block = 1 if getattr(optimizer, "elementwise", False) else getattr(kind, "block", None)
    block = WHOLE if getattr(optimizer, "whole", False) is True else block
    known = TOGETHER.get(kind.__module__.partition(".")[0], {}).get(kind.__name__)
    if known and (smallest := getattr(getattr(optimizer, "args", None), "min_8bit_size", 0)) > known:
        known = -(-smallest // known) * known  # bitsandbytes': no smaller tensor has states of 8 bits
    return block if isinstance(block, int) else known


_HOOKS = [f"_optimizer_{at}_hooks" for at in ("step_pre", "step_post", "state_dict_pre", "load_state_dict_pre")]


def check_named(optimizer: Any) -> None:
    """Refuse states whose keys are names and not parameters: nobody could tell which rank's states count."""
    check_states(optimizer, type(optimizer).__name__, held=False)


def _check_made(optimizer: Any) -> None:
    """Refuse an optimizer that has no hooks of steps, since its class never called that of torch."""
    if any(name not in vars(optimizer) for name in _HOOKS):
        raise UserError(
            "an optimizer's class does not call torch.optim.Optimizer.__init__, so its steps have no hooks",
            where=type(optimizer).__name__,
            instead="super().__init__(params, defaults) in its __init__; around another optimizer "
            "super().__init__(inner.param_groups, inner.defaults), and self.state = inner.state",
        )


def _check_inside(optimizer: Any) -> None:
    """Refuse an optimizer that wraps another without sharing its states: no checkpoint would hold the inner states."""
    for name, value, inner in inside(optimizer):
        if inner.state is not optimizer.state:
            share = f"for inner in self.{name}{'.values()' * isinstance(value, dict)}: inner.state = self.state"
            share = f"self.state = self.{name}.state" if value is inner else share
            raise UserError(
                "an optimizer inside this one keeps states of its own, which no checkpoint would hold",
                where=f"{type(optimizer).__name__}.{name}, {type(inner).__name__}",
                instead=f"{share} in its __init__, one dict for all; or shard(model, ...) with the optimizers "
                "inside, and what is around them in your loop",
            )


def _check_overrides(optimizer: Any) -> None:
    """Refuse options that bitsandbytes keeps by parameters' ids: its optimizer gets parts, which have other ids."""
    manager = getattr(optimizer, "mng", None)
    if found := getattr(manager, "pid2config", None) or getattr(manager, "module_weight_config_triple", None):
        raise UserError(
            "bitsandbytes' GlobalOptimManager has options for single parameters, and their shards are others",
            where=type(optimizer).__name__, got=f"{len(found)} overrides (StableEmbedding makes one)",
            instead="torch.nn.Embedding, and an optimizer of 32 bits beside it for what needs that",
        )  # fmt: skip


def _check_tables(optimizer: Any, records: Mapping[int, Managed]) -> None:
    """Refuse an optimizer's tables that are keyed by parameter: its step gets parts of parameters, which are no keys.

    records: of all parameters, by their id.
    """
    held = {f".{name}": value for name, value in vars(optimizer).items() if name not in ("state", "param_groups")}
    for number, group in enumerate(optimizer.param_groups):
        held |= {f".param_groups[{number}][{name!r}]": value for name, value in group.items() if name != "params"}
    for name, value in held.items():
        for key in value if isinstance(value, (dict, set, frozenset)) else ():
            record = records.get(key if type(key) is int else id(key))
            if record is not None:
                raise UserError(
                    "an optimizer looks parameters up by their identity, and a step gets this rank's parts of them",
                    where=f"{type(optimizer).__name__}{name}, parameter {record.name!r}",
                    instead="an attribute of the parameter, set before shard(...), which its parts have too, such as "
                    "p.lr_scale; or an option of its group",
                )


def blocks(managed: list[Managed], optimizers: list[Any], layout: Layout, *, replicated: bool) -> dict[str, int]:
    """Return, by parameter, the length of the blocks that `layout` and its optimizer let no cut divide; or `WHOLE`.

    replicated: each rank updates all of every parameter, so no optimizer limits the cuts. Nor does it if the layout
    cuts no tensor.
    """
    shapes = {record.name: (record.names, tuple(record.param.shape)) for record in managed}
    stacks = stacked(shapes, layout)
    found = together(shapes, layout, stacks)
    records = {id(record.param): record for record in managed}
    for optimizer in optimizers:
        if isinstance(optimizer, torch.optim.Optimizer):
            _check_made(optimizer)
            check_named(optimizer)
            _check_inside(optimizer)
            _check_tables(optimizer, records)
        _check_overrides(optimizer)
        _check_matrices(optimizer, [records[id(p)].name for p in updated(optimizer) if id(p) in records], stacks)
    for optimizer in () if replicated or layout.bounds == "tensor" else optimizers:
        for record in (records.get(id(param)) for param in updated(optimizer)):
            block = block_of(optimizer)
            if record is not None and block is not None and record.name not in stacks:
                # Some keep other states of a tensor that is no multiple of the block. It stays whole: its parts may be
                # multiples.
                needed = WHOLE if block and record.param.numel() % block else block
                if block == WHOLE and found.get(record.name):
                    raise UserError(
                        "this optimizer works on whole tensors, and Layout.align says to cut one between blocks",
                        where=f"{type(optimizer).__name__}, parameter {record.name!r}",
                        got=f"align={dict(layout.blocks)}",
                        instead="a pattern in Layout.align that leaves it out",
                    )
                found[record.name] = math.lcm(found.get(record.name, 1), needed)
    return found


def _check_matrices(optimizer: Any, names: list[str], stacks: Container[str]) -> None:
    """Refuse stacked matrices for an optimizer of blocks: it counts blocks from a tensor's start, not a matrix's."""
    found = [name for name in names if name in stacks]
    if found and (block_of(optimizer) or 1) > 1:
        raise UserError(
            "this optimizer works on blocks of elements, and Layout.matrices gives it each matrix by itself",
            where=f"{type(optimizer).__name__}, parameter {found[0]!r}",
            instead="a pattern in Layout.matrices that leaves it out, or an optimizer of whole tensors or elements",
        )


def by_bucket(optimizer: Any) -> bool:
    """Tell if an optimizer may be stepped one bucket after the other."""
    if type(optimizer).__module__.partition(".")[0] in COUNTING:
        return False
    known = type(optimizer).__module__.startswith("torch.optim") and type(optimizer).__name__ in BY_TENSOR
    known |= block_of(optimizer) in (1, WHOLE) or isinstance(getattr(type(optimizer), "block", None), int)
    return bool(getattr(optimizer, "elementwise", known))


def sends(optimizer: Any) -> bool:
    """Tell if an optimizer may call collectives inside `step()`: those that are known send nothing."""
    kind = type(optimizer)
    return not (
        kind.__module__.startswith("torch.optim")
        or kind.__name__ in TOGETHER.get(kind.__module__.partition(".")[0], {})
    )


def check_offload(optimizers: list[Any], offload: Offload) -> None:
    """Refuse optimizers that cannot be stepped bucket by bucket, if states rest off the device."""
    stays = offload.automatic or replace(offload, step=None) in (Offload(), Offload(parameters="shared"))
    check_by_bucket(() if stays else optimizers)


def check_by_bucket(optimizers: Sequence[Any]) -> None:
    """Refuse optimizers that cannot be stepped bucket by bucket."""
    for optimizer in optimizers:
        if not by_bucket(optimizer):
            raise UserError(
                "states in another tier or in 16 bits, and split masters, go bucket by bucket, which this optimizer "
                "may not allow",
                where=type(optimizer).__name__,
                expected=f"one of {sorted(BY_TENSOR)}, or an attribute elementwise = True on the class",
                instead="Offload(), no split_master, no Precision.states and no Precision.rounding; or set "
                "elementwise = True if each element is updated by itself",
            )


def check_added(
    model: nn.Module,
    layout: Layout,
    buckets: list[Bucket],
    bindings: list[Binding],
    optimizer: Any,
    added: list[nn.Parameter],
) -> None:
    """Refuse a parameter from `add_param_group` after `shard` that is not the model's, is updated already, or may be
    cut where this optimizer cannot have a cut."""
    ignored = {id(param) for param in model.parameters() if not hasattr(param, "_zeroshard")}
    held = {id(param) for binding in bindings for group in binding.optimizer.param_groups for param in group["params"]}
    parts = [fragment for binding in bindings for fragment in binding.fragments if id(fragment.param) in held]
    updated = {(part.bucket.plan.index, part.position) for part in parts}
    updated -= set().union(*(binding.membership.frozen for binding in bindings))  # which the program may have left out
    for param in added:
        place = getattr(param, "_zeroshard", None)
        if id(param) not in ignored and not (place is not None and any(place.bucket is own for own in buckets)):
            raise UserError(_FOREIGN, where=f"a group that was added, shape {tuple(param.shape)}", instead=_TOGETHER)
        if place is not None and (place.bucket.plan.index, place.position) in updated:
            raise UserError(_TWICE, where=f"a group that was added, parameter {place.name!r}", instead=_ONCE)
        if place is not None and place.bucket.plan.slots[place.position].cut is not None:
            check_parts(optimizer, [place.name])
        if place is not None and place.bucket.placements.optimizer:
            plan, slot = place.bucket.plan, place.bucket.plan.slots[place.position]
            _check_matrices(optimizer, [slot.name], {slot.name} if slot.matrix else ())
            block, told = block_of(optimizer), plan.block != 1 or plan.size == 1 or layout.bounds == "tensor"
            spread = place.bucket.placements.optimizer is Degree.ALL and not plan.whole
            may_cut = plan.cuts(slot) or spread or (block is None and not told)  # wherever cuts happen to be
            if may_cut and not (block and plan.block % block == 0 and slot.numel % block == 0):
                raise UserError(
                    "a parameter was given to an optimizer after shard(...), which may have cut it where this "
                    "optimizer needs all of it, or blocks of it",
                    where=f"{type(optimizer).__name__}, a group that was added, parameter {place.name!r}",
                    instead=f"give it the parameter before shard(...), or Layout(whole=[{place.name!r}])",
                )


_FOREIGN = "the optimizer holds a parameter that is not the model's"
_TOGETHER = "put all trained modules under one nn.Module and shard that; or take it out of its group and states"
_TWICE = "two groups or optimizers hold the same parameter"
_ONCE = "give each parameter to one group of one optimizer"


def check_optimizers(
    model: nn.Module,
    managed: list[Managed],
    optimizers: list[Any],
    partition: Partition,
    blocks: dict[str, int],
    over: Degree,
    layout: Layout,
) -> None:
    """Refuse optimizers of the wrong kind, parameters that are not the model's, and parameters held twice.

    If a team has several ranks, an optimizer of unknown kind is refused by what may be cut, never by where the cuts
    happen to be: so neither the model's size nor another number of ranks changes the answer.

    blocks: by parameter, the length of the blocks that are not cut, if the layout or its optimizer names one. over: the
    ranks that the optimizers' states are sharded over.
    """
    replicated, spread = not over, over is Degree.ALL
    names = {id(record.param): record.name for record in managed}
    places = {slot.name: (plan, slot) for plan in partition.buckets for slot in plan.slots}
    for number, optimizer in enumerate(optimizers):
        slots = [places[names[id(param)]] for param in updated(optimizer) if id(param) in names]
        held = [slot.name for plan, slot in slots if plan.cuts(slot) or (spread and not plan.whole)]
        may_cut = [slot.name for plan, slot in slots if (plan.size > 1 and layout.bounds != "tensor") or spread]
        undeclared = [name for name in may_cut if not (replicated or name in blocks)]
        check_parts(optimizer, [slot.name for _, slot in slots if slot.cut is not None])
        check_optimizer(optimizer, partition, undeclared, replicated=replicated)
        check_options(optimizer, number)
        if sends(optimizer):  # a class that is not known
            alone = replicated or not (spread or any(plan.size > 1 for plan, _ in slots))
            by_element = bool(may_cut) and not replicated and block_of(optimizer) == 1
            for param in () if replicated else updated(optimizer):
                if (name := names.get(id(param))) in may_cut and blocks.get(name) != WHOLE:
                    check_attributes(param, f"{type(optimizer).__name__}, optimizer {number}, parameter {name!r}")
            check_kept(optimizer, number, alone=alone, by_element=by_element)
        for param in () if replicated else (each for each in updated(optimizer) if names.get(id(each)) in held):
            for key, value in optimizer.state.get(param, {}).items():
                check_cut(optimizer, names[id(param)], tuple(param.shape), key, value)
    known = set(names) | {id(param) for param in model.parameters()}
    seen: set[int] = set()
    for number, optimizer in enumerate(optimizers):
        for at, group in enumerate(optimizer.param_groups):
            for position, param in enumerate(group["params"]):
                where = f"optimizer {number}, group {at}, parameter {position}"
                if id(param) not in known:
                    raise UserError(_FOREIGN, where=f"{where}, shape {tuple(param.shape)}", instead=_TOGETHER)
                if id(param) in seen:
                    own = names.get(id(param)) or next(n for n, p in named_tensors(model) if p is param)
                    raise UserError(_TWICE, where=f"{where}, which is {own!r}", instead=_ONCE)
                seen.add(id(param))


def check_options(optimizer: Any, number: int) -> None:
    """Refuse options of an optimizer's groups that a checkpoint could not hold."""
    for at, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key not in ("params", "param_names"):
                check_option(f"optimizer {number}, group {at}, option {key!r}", value)


def check_option(where: str, value: Any) -> None:
    """Refuse options that a checkpoint could not hold: its manifest is JSON."""
    value = python_number(value)
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for each in value:
            check_option(where, each)
    elif not (
        value is None
        or isinstance(value, (bool, str, float))
        or (isinstance(value, int) and -(1 << 63) <= value < 1 << 63)
        or (isinstance(value, Tensor) and value.numel() == 1)
    ):
        raise UserError(
            "an optimizer's option could not be saved",
            where=where,
            expected="a number, text, True, False, None, a tensor of one number, or lists and dicts of these",
            got=f"{type(value).__name__} {value!r:.60}",
            instead="tolist() of an array, hex() of a large integer; anything else in an attribute of the optimizer, "
            "which is not saved",
        )


def in_blocks(optimizer: Any, numel: int) -> bool:
    """Tell if `numel` elements are whole blocks of an optimizer. True also if its block length is not known."""
    block = block_of(optimizer)
    return block is None or (block != WHOLE and numel % block == 0)


def check_parts(optimizer: Any, parted: list[str]) -> None:
    """Refuse, by name, an optimizer that needs more of a tensor than the part of it that a rank has.

    parted: the names of its parameters that tensor parallelism has cut.
    """
    if parted and block_of(optimizer) != 1 and not first(each.rejoins(optimizer) for each in features()):
        raise UserError(
            "this optimizer may not update each element by itself, and of some tensors a rank has a part",
            where=f"{type(optimizer).__name__}, parameter {parted[0]!r} is cut by tensor parallelism",
            expected=f"Muon, one of {sorted(ELEMENTWISE)}, or a class with elementwise = True or whole = True",
            instead="an elementwise optimizer, as AdamW, or one of whole tensors, as Muon",
        )


def _optimizer_inside(wrapper: Any) -> str:
    """Say what to give `shard` in place of an object that is no optimizer: the optimizer inside it, if it has one."""
    for name, value in vars(wrapper).items() if hasattr(wrapper, "__dict__") else ():
        if isinstance(value, torch.optim.Optimizer):
            return f"the optimizer inside it, shard(model, wrapper.{name}); your loop goes on with the wrapper's step()"
    return "optimizer = torch.optim.AdamW(model.parameters()); shard(model, optimizer)"


def check_optimizer(optimizer: Any, partition: Partition, undeclared: list[str], *, replicated: bool) -> None:
    """Refuse, by name, an optimizer that updates a fragment differently from that part of the whole tensor.

    undeclared: the parameters that it updates and this stage may cut, if nobody has declared where a cut may be.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(
            "not an optimizer",
            expected="a torch.optim.Optimizer, a sequence of them, or None",
            got=type(optimizer).__name__,
            instead=_optimizer_inside(optimizer),
        )
    name = type(optimizer).__name__
    is_torch = type(optimizer).__module__.startswith("torch.optim")
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
    block = block_of(optimizer)
    if block is None and undeclared and not (is_torch and name == "LBFGS"):
        raise UserError(
            "zeroshard does not know whether this optimizer is elementwise",
            where=f"{name}, which updates parameter {undeclared[0]!r}",
            expected=f"one of {sorted(BY_TENSOR)}, or an attribute of the class that says how it updates",
            instead=f"{name}.elementwise = True if each element is updated by itself, {name}.whole = True if a tensor "
            "is updated as a whole, block = 256 if 256 elements are; or Layout(whole=[...]), Layout(align={...})",
        )
    if partition.align < 128 and any(group.get("fused") for group in optimizer.param_groups):
        raise UserError(
            "fused kernels depend on where a vector starts",
            expected="Layout(align=128)",
            got=f"align={partition.align} and fused=True",
            instead="fused=False, or the default align",
        )
