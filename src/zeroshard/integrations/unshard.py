"""`zero.unshard()`: the model and its optimizers as plain PyTorch has them, with all values, on every rank.

Everything that changes hands is collected first, from what a checkpoint would write; only when every rank has all of
it, anything is changed. So a rank holds the whole model and its states beside its shards for a moment.
"""

from __future__ import annotations

import gc
import signal
import threading
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from ..arithmetic.sums import as_bytes
from ..checkpoint.content import ModelState, Piece, agreed_kinds, model_state, pieces, told_kinds, values
from ..checkpoint.manifest import AVERAGE, VALUE, own_name
from ..comm.all_or_none import Together
from ..engine.build.tensor_parallel import replace_dtensors
from ..engine.step import optimizer_hooks
from ..engine.step.fragment import made_of
from ..engine.step.guarded_state import guard
from ..engine.weights.guard import unflip
from ..errors import StateError, UserError
from ..tiers.tier import Part, present

if TYPE_CHECKING:
    from ..api import Zero
    from ..engine.engine import Engine
    from ..engine.step.optim import Binding
    from ..engine.weights.unit import Unit

ENGINE = ("zeroshard.engine.", "zeroshard.features.")  # the modules whose hooks go
Found = dict[str, dict[str, Any]]  # by parameter and state: the whole tensor, or a number


class Unsharded:
    """The stand-in for the engine in a handle that was unsharded: every use raises `StateError`."""

    managed = ()  # `repr(zero)` counts them

    def __getattr__(self, name: str) -> NoReturn:
        raise StateError(
            "this model was unsharded: it and its optimizer are plain PyTorch's again",
            instead="zero = zeroshard.shard(model, optimizer, ...), which gives another handle",
        )


def unshard(zero: Zero) -> None:
    """Unshard on every rank, or on none."""
    _unshard(zero)
    gc.collect()  # hooks, bindings and buckets refer to each other: their memory would stay until the next time


@torch.inference_mode(False)  # the tensors made here are trained
@torch.no_grad()
def _unshard(zero: Zero) -> None:
    engine = zero._engine
    engine.meet_for_checkpoint("unsharding")
    running = model_state(engine)
    _check(running)
    found = _collect(running)
    whole = {record.name: found[record.name].pop(VALUE) for record in running.managed}
    for binding in engine.bindings:
        _free_optimizer(binding, found)
    engine.gradients.hide(engine.gradients.entries)
    for unit in engine.units:
        _free_unit(unit)
    for module in engine.model.modules():
        _forget_hooks(module.__dict__)
    for record in engine.managed:
        _free_parameter(record.param, whole[record.name])
    if engine.batches is not None:
        engine.batches.retired = "the model was unsharded"
    _let_go(zero, engine)


# --- what there is --------------------------------------------------------------------------------------------------


def _check(running: ModelState) -> None:
    """Refuse, on every rank, states and modules that would not become plain ones again."""
    with _everywhere(running):
        for binding in running.bindings:
            states = binding.optimizer.state.values()
            for key in dict.fromkeys(key for state in states for key, value in state.items() if made_of(value)):
                name = type(binding.optimizer).__name__
                raise UserError(f"{name} keeps {key!r} as a tensor that is made of others: {_INSTEAD}")
        for module in running.model.modules():
            forward = getattr(module.__dict__.get("forward"), "func", None)
            if getattr(forward, "__module__", "") == replace_dtensors.__module__:
                raise UserError(f"{type(module).__name__} has parameters that tensor parallelism has cut: {_INSTEAD}")


_INSTEAD = "zero.save(path), then build both anew and zeroshard.shard(...).load(path)"


def _everywhere(running: ModelState) -> Together:
    what = "the model was not unsharded, and is as it was"
    return Together(running.group, lambda told: UserError(what, got="; ".join(told)))


def _collect(running: ModelState) -> Found:
    """Send every piece of every rank to all ranks, and return the whole tensors of this rank's model."""
    block = _everywhere(running)
    with block:
        block.answer = told_kinds(running)
    told = block.answers
    with block:
        running.kinds = agreed_kinds(told)
        managed = {record.name for record in running.managed}
        mine = [piece for piece in pieces(running) if piece.parameter in managed and piece.state != AVERAGE]
        numbers = [[name, own_name(state), number] for name, state, number in values(running) if name in managed]
        block.answer = [[_label(piece) for piece in mine], numbers]
    everyone = block.answers
    found: Found = {}
    with block:
        for record in running.managed:
            shape = running.places[record.name][1].shape
            found[record.name] = {VALUE: torch.zeros(shape, dtype=record.dtype, device=running.group.device)}
    for rank, (labels, plain) in enumerate(everyone):
        for at, label in enumerate(labels):
            _send(running, found, rank, label, mine[at] if rank == running.group.rank else None, block)
        for name, key, number in plain:
            found[name][key] = number
    with block:
        pass
    return found


def _label(piece: Piece) -> list[Any]:
    """Return what other ranks must know of a piece to receive it, JSON-able."""
    tensor = piece.tensor
    on_cpu = isinstance(tensor, Part) or tensor.device.type == "cpu"
    dtype = str(tensor.dtype).removeprefix("torch.")
    shape = [tensor.numel()] if piece.start is not None else list(tensor.shape)
    return [piece.parameter, piece.state, piece.start, shape, dtype, piece.grain, on_cpu]


def _send(
    running: ModelState, found: Found, source: int, label: list[Any], piece: Piece | None, block: Together
) -> None:
    """Broadcast one piece of one rank; every rank keeps the elements of its own part of the parameter."""
    name, state, start, shape, dtype, grain, on_cpu = label
    sent = torch.empty(shape, dtype=getattr(torch, dtype), device=running.group.device)
    if piece is not None:
        with block.noting(), present(piece.tensor) as tensor:
            sent.copy_(tensor.reshape(shape))
    content = as_bytes(sent)
    running.group.broadcast(content, source)
    sent = content.view(sent.dtype).view(shape)
    key = state if state == VALUE else own_name(state)
    bucket, slot = running.places[name]
    if start is None:  # one number, or a shape of its own
        if bucket.team.seat.parts == 1 or source in bucket.team.seat.members(running.group.rank):
            found[name][key] = sent.cpu() if on_cpu else sent
        return
    numel, first = -(-slot.numel // grain), bucket.among(slot).offset // grain
    if key not in found[name]:  # as load_state_dict leaves it: in the parameter's shape, and in its dtype
        cast = grain == 1 and sent.is_floating_point()
        like = found[name][VALUE].dtype if cast else sent.dtype
        found[name][key] = torch.zeros(slot.shape if grain == 1 else (numel,), dtype=like, device=sent.device)
    low, high = max(start, first), min(start + sent.numel(), first + numel)
    if high > low:
        found[name][key].view(-1)[low - first : high - first] = sent[low - start : high - start]


# --- plain again ----------------------------------------------------------------------------------------------------


def _free_optimizer(binding: Binding, found: Found) -> None:
    """Put the model's parameters into an optimizer's groups, with whole states; remove what `shard` put around it."""
    optimizer: Any = binding.optimizer
    fragments = {id(each.param) for each in binding.fragments}
    for each in [fragment for parts in binding.membership for fragment in parts.fragments]:  # those that left it too
        optimizer.state.pop(each.param, None)
    for group in optimizer.param_groups:
        places = [member.place for member in binding.members if member.group is group]
        left_alone = [param for param in group["params"] if id(param) not in fragments]  # by Layout.ignore
        if "param_names" in group:
            kept = zip(group["params"], group["param_names"], strict=True)
            names = [name for param, name in kept if id(param) not in fragments]
            group["param_names"] = [*(place.name for place in places), *names]
        group["params"][:] = [*(place.bucket.params[place.position] for place in places), *left_alone]
        for place in places:
            if state := found[place.name]:
                param = place.bucket.params[place.position]
                optimizer.state[param] = state
    guard(optimizer, ())
    _forget_hooks(optimizer.__dict__)
    for name in ("zero_grad", "register_step_pre_hook"):
        method = optimizer.__dict__.get(name)
        if getattr(method, "__module__", None) == optimizer_hooks.__name__:
            del optimizer.__dict__[name]
        elif getattr(method, "func", None) == binding._zero_grad:
            del optimizer.__dict__[name]
            if (before := method.args[0]) != getattr(optimizer, name):
                setattr(optimizer, name, before)


def _free_unit(unit: Unit) -> None:
    for module in unit.modules:
        module.__dict__.pop("__reduce_ex__", None)
    if unit.forward is not None:  # `Layout.recompute` has replaced it
        (module,) = unit.modules
        del module.__dict__["forward"]
        if unit.forward != module.forward:
            module.__dict__["forward"] = unit.forward


def _forget_hooks(fields: dict[str, Any]) -> None:
    """Remove the engine's hooks from a module or optimizer, and what other tables note about these hooks."""
    tables = [table for name, table in fields.items() if "hooks" in name and isinstance(table, dict)]
    ours = {number for table in tables for number, hook in table.items() if _made_there(hook)}
    for table in tables:
        for number in ours:
            table.pop(number, None)


def _made_there(hook: Any) -> bool:
    while (inner := getattr(hook, "hook", None) or getattr(hook, "func", None)) is not None:  # torch's, partial's
        hook = inner
    return str(getattr(hook, "__module__", "")).startswith(ENGINE)


def _free_parameter(param: Any, value: torch.Tensor) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        unflip(param)
        param.data, param.grad = value, None
        del param._zeroshard
        table = param._post_accumulate_grad_hooks
        for number in [number for number, hook in (table or {}).items() if _made_there(hook)]:
            del table[number]
        if not table:
            param._post_accumulate_grad_hooks = None


def _let_go(zero: Zero, engine: Engine) -> None:
    """Take the engine out of model, handle and signal handlers, so that its memory is freed."""
    model: nn.Module = engine.model
    del model.__dict__["_zeroshard_engine"]
    gone: Any = Unsharded()
    if engine.moving is not None:
        engine.moving._schedule = gone  # an average of shards that are no more
    if threading.current_thread() is threading.main_thread():
        for number, handler in zero._handlers.items():
            signal.signal(number, handler)
    zero._handlers.clear()
    zero._engine = gone
