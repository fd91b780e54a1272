"""Try an optimizer of a class that is not known, before anything is sharded: what it keeps, and whether it may be cut.

A checkpoint has an optimizer's states of parameters and the options of its groups. A class of another package may keep
more: a count of its steps as an attribute, a state that belongs to no parameter. A resumed run would then silently
differ. And a class that says `elementwise = True` may take a norm of the tensor, or decay only tensors of two
dimensions. So a twin of the optimizer is stepped on small parameters, which shows what a step changes. Another twin is
stepped on half of each parameter, in one dimension, as a rank has it. A twin's last two steps have very small and very
large gradients: a norm may count only above a threshold, or below one.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import random
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ...arithmetic.digests import fingerprint
from ...arithmetic.sums import same_bits, simulated
from ...comm.own_collectives import OwnCollectives, refused
from ...device import ask, random_states_kept
from ...errors import UserError
from ..step.fragment import is_state, twin_of, uncompiled, updated
from ..step.optimizer_hooks import own_step
from .kept_by_order import Kept, cure, kept_by_order, refuse_order, tensors_of
from .kept_by_order import small as stand_in

log = logging.getLogger("zeroshard")

_NOTES = {"bitsandbytes": ("initialized", "_cpu_paged_warned")}  # by package: attributes that a resumed run makes anew
STEPS = 3  # of usual gradients, since some count to two before they act
FAINT, LOUD = 1e-9, 1e6  # factors on these gradients, in two more steps
LARGEST = 4096  # elements of an attribute's tensor, or members of its list, that a twin gets a copy of
SMALL = 8  # elements of a stand-in along each of its first two dimensions


def check_kept(optimizer: torch.optim.Optimizer, number: int, *, alone: bool, by_element: bool) -> None:
    """Refuse an optimizer that keeps what a step changes in attributes, or states of no parameter.

    alone: has each rank all of every parameter? Else a step of the twin that calls a collective is refused too.
    by_element: are its parameters cut at any element? Then its states must be, too.
    """
    where = f"{type(optimizer).__name__}, optimizer {number}"
    check_states(optimizer, where)
    _check_kinds(optimizer, where)
    kept = kept_by_order(optimizer)
    if not alone:
        refuse_order(kept, where)
    twin = _twin(optimizer)
    if twin is None:
        return
    before, given = _attributes(twin), [_comparable(vars(param)) for param in updated(twin)]
    watch = OwnCollectives(where, lambda: True)
    try:
        with (
            contextlib.nullcontext() if alone else watch.refused(),
            contextlib.nullcontext() if alone else _Sends(where),
        ):
            _step(twin)
    except UserError:
        raise
    except Exception:  # of a step that needs more than small parameters with gradients: nothing is known
        return
    check_states(twin, where)
    _check_kinds(twin, where)
    draws = not alone and _draws(optimizer, twin)  # then two trials cannot be compared
    if not (alone or draws):
        _check_tensors(optimizer, twin, where)
    if not alone:
        _check_without(optimizer, where)
    if by_element:
        _check_elements(twin, where)
    if by_element and not draws:
        _check_halves(optimizer, twin, where)
    after, held = _attributes(twin), [_comparable(vars(param)) for param in updated(twin)]
    package = type(optimizer).__module__.partition(".")[0]
    declared = {*getattr(optimizer, "unsaved", ()), *_NOTES.get(package, ())}
    for name in sorted(after):
        if name not in declared and after[name] != before.get(name):
            raise UserError(
                "an optimizer keeps what a step changes in an attribute, and a checkpoint would not have it",
                where=f"{where}, attribute {name!r}",
                expected="states in optimizer.state[param], or options in the groups",
                got=_said(before.get(name), after[name]),
                instead=_instead(optimizer, name, kept),
            )
    for was, now in zip(given, held, strict=True):
        for name in sorted(now.keys() - declared):
            if now[name] != was.get(name):
                raise UserError(
                    "an optimizer keeps what a step changes in an attribute of its parameters, and a checkpoint would "
                    "not have it",
                    where=f"{where}, attribute {name!r} of a parameter",
                    expected="states in optimizer.state[param]",
                    got=_said(was.get(name), now[name]),
                    instead=f"self.state[p][{name!r}] in place of p.{name}; or, if a resumed run does not need it, say "
                    f"so on the class: unsaved = ({name!r},)",
                )


def _said(before: Any, after: Any) -> str:
    """Say in words how a value that can be compared has changed."""
    told = []
    for value in (before, after):
        first = value[0] if isinstance(value, list) and value else value
        tensor = isinstance(first, tuple) and isinstance(first[2], bytes)
        told.append(
            f"{'tensors, the first' * (first is not value)} of shape {first[1]}" if tensor else f"{value!s:.60}"
        )
    if told[0] == told[1]:
        return f"{told[0].strip()}, with other values after a trial's steps"
    return f"{told[0].strip()} before a trial's steps, {told[1].strip()} after"


def _instead(optimizer: Any, name: str, kept: list[Kept]) -> str:
    """Say where else to keep what a step changes in an attribute of this name."""
    if set(map(id, tensors_of(getattr(optimizer, name, None)))) & set(map(id, updated(optimizer))):
        return (
            f"walk self.param_groups in step(): these are this rank's parts, which no list of parameters has, such as "
            f"self.{name}; or, if a step does not use it, say so on the class: unsaved = ({name!r},)"
        )
    state = any(each.name == name for each in kept)
    place = cure(name) if state else f"keep it in optimizer.param_groups[0][{name!r}]"
    return f"{place}; or, if a resumed run does not need it, say so on the class: unsaved = ({name!r},)"


def check_states(optimizer: Any, where: str, *, held: bool = True) -> None:
    """Refuse states that are no parameter's: a checkpoint has no place for them, and ranks may differ in them.

    held: must the groups hold each state's parameter? One that was taken out may have left its state there.
    """
    own = set(map(id, updated(optimizer)))
    for key, value in optimizer.state.items():
        if not is_state(key, value) or (held and value and id(key) not in own):
            raise UserError(
                "an optimizer keeps a state that belongs to none of its parameters, and a checkpoint would not have it",
                where=f"{where}, optimizer.state[{'a tensor' if isinstance(key, Tensor) else f'{key!r:.60}'}]",
                expected="optimizer.state[param] = {name: value}",
                got=f"{type(value).__name__} {value!r:.60}",
                instead="keep it as an option of a group: optimizer.param_groups[0][name] = a number or text",
            )


def _check_kinds(optimizer: Any, where: str) -> None:
    """Refuse states that a checkpoint could not hold: neither tensors nor numbers or text."""
    unsaved = getattr(optimizer, "unsaved", ())  # of which a save refuses what it cannot hold
    for state in optimizer.state.values():
        for name, value in state.items() if isinstance(state, Mapping) else ():
            if name not in unsaved and not isinstance(value, (Tensor, int, float, str, type(None))):
                own = sorted(vars(value)) if hasattr(value, "__dict__") else []
                raise UserError(
                    "an optimizer keeps a state that is neither a tensor nor a number or text, and a checkpoint could "
                    "not hold it",
                    where=f"{where}, optimizer.state[param][{name!r}]",
                    expected="tensors, numbers, text, True, False or None, each a state by itself",
                    got=f"{type(value).__name__}{f' with {own}' if own else ''}"[:200],
                    instead=f"what it holds as states: self.state[p]['{name}_{own[0] if own else 0}'] = a tensor or a "
                    f"number; or, for a run that is never saved, say so on the class: unsaved = ({name!r},)",
                )


def _check_elements(twin: Any, where: str) -> None:
    """Refuse states that are neither one number nor one element for each of the parameter's."""
    for param, state in twin.state.items():
        for name, value in state.items():
            if not isinstance(value, Tensor) and isinstance(value, (int, float, str, bool, type(None))):
                continue
            if not isinstance(value, Tensor) or (value.numel() != 1 and value.shape != param.shape):
                got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
                raise UserError(
                    "an optimizer says that it is elementwise, and keeps a state that cannot be cut with its parameter",
                    where=f"{where}, optimizer.state[param][{name!r}]",
                    expected=f"a tensor of the parameter's shape ({tuple(param.shape)} here), or one number",
                    got=got,
                    instead="whole = True on the class in place of elementwise = True, or a state for each element",
                )


class _Sends(TorchDispatchMode):
    """Refuses collectives that are dispatched operators, as those of `torch.distributed._functional_collectives`."""

    def __init__(self, where: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.where = where

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in function.namespace:
            raise refused(self.where, function.__name__)
        return function(*args, **(kwargs or {}))


def _draws(optimizer: torch.optim.Optimizer, twin: Any) -> bool:
    """Tell if an update draws random numbers: another seed gives other bits. twin: after its steps."""
    again = _twin(optimizer)
    assert again is not None
    _step(again, seed=1)
    return _differ(twin, again)


def _check_tensors(optimizer: torch.optim.Optimizer, twin: Any, where: str) -> None:
    """Refuse an optimizer that updates the last tensor differently without the others: each rank has other tensors.

    twin: after its steps.
    """
    alone = _twin(optimizer, last=True)
    assert alone is not None
    try:
        _step(alone)
    except Exception:  # of a step that needs several tensors: nothing is known
        return
    if not same_bits(updated(alone)[0].detach(), updated(twin)[-1].detach()) or _options(alone) != _options(twin):
        raise UserError(
            "an optimizer updates a tensor otherwise beside others than alone, and each rank holds other tensors",
            where=where,
            expected="each tensor updated, and each option changed, whatever else is in the groups",
            instead="shard(..., stage=0); a norm of all gradients by torch.nn.utils.clip_grad_norm_("
            "model.parameters(), ...) before step()",
        )


def _check_without(optimizer: torch.optim.Optimizer, where: str) -> None:
    """Refuse a step that fails where a parameter has no gradient: a rank has none of a parameter that others update."""
    twin = _twin(optimizer)
    assert twin is not None
    updated(twin)[-1].grad = None
    try:
        _step(twin)
    except Exception as error:
        raise UserError(
            "an optimizer's step fails on a parameter without a gradient, and a rank has none of what others update",
            where=where,
            got=f"{type(error).__name__}: {error}"[:200],
            instead="if param.grad is None: continue, in its step(), as torch's own have it; or shard(..., stage=0)",
        ) from error


def _check_halves(optimizer: torch.optim.Optimizer, twin: Any, where: str) -> None:
    """Refuse an optimizer that updates half of a tensor alone differently from the whole. twin: after its steps."""
    halves = _twin(optimizer, halves=True)
    assert halves is not None
    try:
        _step(halves)
    except Exception as error:
        raise UserError(
            "an optimizer says that it is elementwise, and its step fails on a part of a tensor, in one dimension",
            where=where,
            got=f"{type(error).__name__}: {error}"[:200],
            instead="whole = True on the class in place of elementwise = True",
        ) from error
    if _differ(twin, halves):
        raise UserError(
            "an optimizer says that it is elementwise, and updates the half of a tensor otherwise than the whole",
            where=where,
            expected="each element updated by its own value, gradient and states, whatever the tensor's shape",
            instead="whole = True on the class in place of elementwise = True: then no tensor of its is cut",
        )


def _differ(whole: Any, other: Any) -> bool:
    """Tell if the bits of parameters (the elements that `other` has), one-number states or options differ."""
    if _options(whole) != _options(other):
        return True
    for a, b in zip(updated(whole), updated(other), strict=True):
        if not same_bits(a.detach().reshape(-1)[: b.numel()], b.detach().reshape(-1)):
            return True
        for key, value in whole.state.get(a, {}).items():
            one = not isinstance(value, Tensor) or value.numel() == 1 < a.numel()
            if one and _comparable(value) != _comparable(other.state.get(b, {}).get(key)):
                return True
    return False


def _twin(optimizer: torch.optim.Optimizer, *, halves: bool = False, last: bool = False) -> Any:
    """Return a copy of an optimizer that holds small parameters with gradients; None if it cannot be copied.

    halves: the first half of each, in one dimension. last: the last parameter alone.
    """
    params = updated(optimizer)
    if not params or any(simulated(param) or param.is_meta for param in params):
        return None
    small: dict[int, Tensor] = {id(param): _small(param, halves=halves) for param in params}
    small |= {id(each.tensor): stand_in(each.tensor, small[id(each.param)]) for each in kept_by_order(optimizer)}
    own = {key: value for key, value in vars(optimizer).items() if key not in _torchs()}
    if not all(_simple(value, small) for value in own.values()):
        log.debug("%s holds more than numbers and small tensors: it was not tried", type(optimizer).__name__)
        return None
    kept, groups = copy.deepcopy((own, optimizer.param_groups), {**small})
    if last:
        groups = [{**groups[-1], "params": groups[-1]["params"][-1:]}]
    twin = twin_of(optimizer, groups, type(optimizer))
    twin.__dict__.update(kept)
    held = {id(param) for param in updated(twin)}
    for param in params:
        made = small[id(param)]
        vars(made).update(_made_small(vars(param), param, made))
        if id(made) in held and optimizer.state.get(param):
            twin.state[made] = _made_small(optimizer.state[param], param, made)
    return twin


def _made_small(named: Mapping[str, Any], param: Tensor, made: Tensor) -> dict[str, Any]:
    """Return attributes or states of a parameter for the small one: those of its shape in the small one's, copies of
    others, none of what no copy can be made of."""
    found = {}
    for name, value in named.items():
        if isinstance(value, Tensor) and not value.is_meta and value.shape == param.shape:
            found[name] = stand_in(value, made)
        elif _simple(value, {}):
            found[name] = copy.deepcopy(value)
    return found


def _simple(value: Any, small: Mapping[int, Any]) -> bool:
    """Tell if a copy of an attribute shares nothing with the program: numbers, text, small tensors, module-level
    functions, and lists and dicts of these. Through a model, an inner optimizer or a method, the twin's step would
    change the program's own run."""
    if id(value) in small or isinstance(value, (int, float, complex, str, bytes, type(None))):
        return True
    if isinstance(value, (torch.dtype, torch.device)):
        return True
    if isinstance(value, Tensor):
        return value.numel() <= LARGEST and value.grad_fn is None and not hasattr(value, "_zeroshard")
    if isinstance(value, Mapping):
        return len(value) <= LARGEST and all(_simple(each, small) for pair in value.items() for each in pair)
    if isinstance(value, (list, tuple, set)):
        return len(value) <= LARGEST and all(_simple(each, small) for each in value)
    return isinstance(value, types.FunctionType) and value.__closure__ is None


def _small(param: Tensor, *, halves: bool) -> nn.Parameter:
    """Return a small parameter with a gradient, of as many dimensions; with `halves` its first half, in one dimension.

    Whole or half, it fills the vector registers of any processor, unless it has one element: a kernel may round the
    elements after the last full vector differently, and that is no reason to refuse an optimizer.
    """
    shape = (SMALL, SMALL, *[1] * (param.dim() - 2)) if param.dim() > 1 else (SMALL * SMALL,) * param.dim()
    values = torch.linspace(-1.0, 1.0, SMALL * SMALL if shape else 1, device=param.device)
    values, slope = (each.to(param.dtype) for each in (values.sin(), values.cos() * 0.01))
    if halves and shape:
        shape, values, slope = (len(values) // 2,), values[: len(values) // 2], slope[: len(slope) // 2]
    made = nn.Parameter(values.reshape(shape).clone(), param.requires_grad)
    made.grad = slope.reshape(shape).clone()
    return made


def _step(twin: Any, seed: int = 0) -> None:
    step = own_step(type(twin))  # no hooks: those of all optimizers count the run's steps
    with uncompiled(), _seeded(seed, updated(twin)[0].device):
        for factor in (*[1.0] * STEPS, FAINT, LOUD):
            with torch.no_grad():
                given = [(p, p.grad, p.detach().to(p.grad.dtype)) for p in updated(twin) if p.grad is not None]
                for param, grad, _ in given:
                    param.grad = grad * _within(factor, grad.dtype)
            step(twin)
            with torch.no_grad():  # another gradient, since some optimizers keep the change between two gradients
                for param, grad, before in given:
                    param.grad = grad.mul_(-0.5).add_(before, alpha=0.25)


def _within(factor: float, dtype: torch.dtype) -> float:
    """Return a factor that leaves numbers around 0.01 to 1 finite, and no zeros, in a dtype."""
    numbers = torch.finfo(dtype)
    return float(min(max(factor, numbers.tiny**0.5), numbers.max**0.5))


def _options(optimizer: Any) -> Any:
    """Return the options of an optimizer's last group, as values that can be compared."""
    return _comparable({name: value for name, value in optimizer.param_groups[-1].items() if name != "params"})


@contextlib.contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed all random numbers for the block, and give the program its own back."""
    before, numpy = random.getstate(), sys.modules.get("numpy.random")
    drawn = numpy.get_state() if numpy else None
    try:
        with random_states_kept(device):
            random.seed(seed)
            torch.manual_seed(seed)
            if numpy:
                numpy.seed(seed)
            yield
    finally:
        random.setstate(before)
        if numpy:
            numpy.set_state(drawn)


def _attributes(optimizer: Any) -> dict[str, Any]:
    """Return an optimizer's own attributes, as values that can be compared."""
    own = {key: value for key, value in vars(optimizer).items() if key not in _torchs() and not callable(value)}
    return {key: _comparable(value) for key, value in own.items()}


def _comparable(value: Any) -> Any:
    if isinstance(value, Tensor):
        held = value.detach()
        bits = fingerprint(ask(held).contiguous()) if held.numel() > 1 else ask(held).tolist()
        return "tensor", tuple(held.shape), bits
    if isinstance(value, Mapping):
        return {key: _comparable(each) for key, each in value.items() if isinstance(key, (str, int))}
    if isinstance(value, (list, tuple)):
        return [_comparable(each) for each in value]
    return value if isinstance(value, (int, float, str, bool, type(None))) else type(value).__name__


@functools.cache
def _torchs() -> set[str]:
    """Return the names of what torch itself and its schedulers keep in an optimizer."""
    plain = torch.optim.SGD([nn.Parameter(torch.zeros(1, device="cpu"))])
    return {*vars(plain), "_opt_called", "_step_count"}
