"""Try an optimizer of a class that is not known, before anything is sharded: what it keeps, and whether it may be cut.

A checkpoint has an optimizer's states of parameters and the options of its groups. A class of another package may keep
more: a count of its steps as an attribute, a state that belongs to no parameter. A resumed run would then silently be
another one. And a class that says `elementwise = True` may take a norm of the tensor, or decay what has two dimensions.
A twin of the optimizer is stepped three times on small parameters, and shows what a step changes; another one on a half
of each, in one dimension, as a rank has it.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..device import ask
from ..digests import fingerprint
from ..errors import UserError
from ..numerics import same_bits, simulated
from ..ranks.own_collectives import OwnCollectives

_NOTES = {"bitsandbytes": ("initialized", "_cpu_paged_warned")}  # of these packages, which a resumed run makes anew
STEPS = 3  # some count to two before they act
SMALL = 8  # elements of a stand-in along each of its first two dimensions


def check_kept(optimizer: torch.optim.Optimizer, number: int, *, alone: bool, by_element: bool) -> None:
    """Refuse an optimizer that keeps what a step changes in attributes, or states of no parameter.

    alone: has each rank all of every parameter? Else a step of the twin that calls a collective is refused too.
    by_element: are its parameters cut at any element? Then its states must be, too.
    """
    where = f"{type(optimizer).__name__}, optimizer {number}"
    _check_states(optimizer, where)
    twin = _twin(optimizer)
    if twin is None:
        return
    before = _attributes(twin)
    watch = OwnCollectives(where, lambda: True)
    try:
        with contextlib.nullcontext() if alone else watch.refused():
            _step(twin)
    except UserError:
        raise
    except Exception:  # of a step that needs more than small parameters with gradients: nothing is known
        return
    _check_states(twin, where)
    if by_element:
        _check_elements(twin, where)
        _check_halves(optimizer, twin, where)
    after = _attributes(twin)
    package = type(optimizer).__module__.partition(".")[0]
    declared = {*getattr(optimizer, "unsaved", ()), *_NOTES.get(package, ())}
    for name in sorted(after):
        if name not in declared and after[name] != before.get(name):
            raise UserError(
                "an optimizer keeps what a step changes in an attribute, and a checkpoint would not have it",
                where=f"{where}, attribute {name!r}",
                expected="states in optimizer.state[param], or options in the groups",
                got=f"{before.get(name)!s:.60} before {STEPS} steps, {after[name]!s:.60} after",
                instead=f"keep it in optimizer.param_groups[0][{name!r}]; or, if a resumed run does not need it, "
                f"say so on the class: unsaved = ({name!r},)",
            )


def _check_states(optimizer: Any, where: str) -> None:
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    for key, value in optimizer.state.items():
        if not isinstance(key, Tensor) or (value and id(key) not in held) or not isinstance(value, Mapping):
            raise UserError(
                "an optimizer keeps a state that belongs to none of its parameters, and a checkpoint would not have it",
                where=f"{where}, optimizer.state[{'a tensor' if isinstance(key, Tensor) else repr(key)}]",
                expected="optimizer.state[param] = {name: value}",
                instead="keep it as an option of a group: optimizer.param_groups[0][name] = a number or text",
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


def _check_halves(optimizer: torch.optim.Optimizer, twin: Any, where: str) -> None:
    """Refuse an update that is another one where half of a tensor is updated by itself. twin: after its steps."""
    again, halves = _twin(optimizer), _twin(optimizer, halves=True)
    assert again is not None and halves is not None
    _step(again)
    if _differ(twin, again):  # it draws random numbers: nothing can be compared
        return
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
    """Tell if parameters, as far as `other` has them, or states of one number have other bits."""
    mine, its = ([p for group in each.param_groups for p in group["params"]] for each in (whole, other))
    for a, b in zip(mine, its, strict=True):
        if not same_bits(a.detach().reshape(-1)[: b.numel()], b.detach().reshape(-1)):
            return True
        for key, value in whole.state.get(a, {}).items():
            one = not isinstance(value, Tensor) or value.numel() == 1 < a.numel()
            if one and _comparable(value) != _comparable(other.state.get(b, {}).get(key)):
                return True
    return False


def _twin(optimizer: torch.optim.Optimizer, *, halves: bool = False) -> Any:
    """Return a copy of an optimizer that holds small parameters with gradients; None if it cannot be copied.

    halves: the first half of each, in one dimension.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if not params or any(simulated(param) or param.is_meta for param in params):
        return None
    small = {id(param): _small(param, halves=halves) for param in params}
    own = {key: value for key, value in vars(optimizer).items() if key not in _TORCHS and not callable(value)}
    try:
        kept, groups = copy.deepcopy((own, optimizer.param_groups), {**small})
    except Exception:
        return None
    twin = object.__new__(type(optimizer))
    twin.__dict__.update({**vars(optimizer), **kept})
    twin.state, twin.param_groups = collections.defaultdict(dict), groups
    twin._optimizer_step_pre_hooks = collections.OrderedDict()
    twin._optimizer_step_post_hooks = collections.OrderedDict()
    return twin


def _small(param: Tensor, *, halves: bool) -> nn.Parameter:
    """Return a stand-in for a parameter, with a gradient; as many elements in both halves as vectors of a processor
    have, so that a kernel's rest is no reason for other bits."""
    shape = (SMALL, SMALL, *[1] * (param.dim() - 2)) if param.dim() > 1 else (SMALL * SMALL,) * param.dim()
    values = torch.linspace(-1.0, 1.0, SMALL * SMALL if shape else 1, device=param.device)
    values, slope = (each.to(param.dtype) for each in (values.sin(), values.cos() * 0.01))
    if halves and shape:
        shape, values, slope = (len(values) // 2,), values[: len(values) // 2], slope[: len(slope) // 2]
    made = nn.Parameter(values.reshape(shape).clone(), param.requires_grad)
    made.grad = slope.reshape(shape).clone()
    return made


def _step(twin: Any) -> None:
    compiles = "torch._dynamo" in sys.modules
    with torch.compiler.set_stance("force_eager") if compiles else contextlib.nullcontext(), torch.random.fork_rng([]):
        for _ in range(STEPS):
            type(twin).step(twin)
            with torch.no_grad():  # another gradient, since some keep what changes between two of them
                for param in (each for group in twin.param_groups for each in group["params"]):
                    if param.grad is not None:
                        param.grad.mul_(-0.5).add_(param.to(param.grad.dtype), alpha=0.25)


def _attributes(optimizer: Any) -> dict[str, Any]:
    """Return an optimizer's own attributes, as values that can be compared."""
    own = {key: value for key, value in vars(optimizer).items() if key not in _TORCHS and not callable(value)}
    return {key: _comparable(value) for key, value in own.items()}


def _comparable(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (
            "tensor",
            tuple(value.shape),
            fingerprint(value.detach()) if value.numel() > 1 else ask(value.detach()).tolist(),
        )
    if isinstance(value, Mapping):
        return {key: _comparable(each) for key, each in value.items() if isinstance(key, (str, int))}
    if isinstance(value, (list, tuple)):
        return [_comparable(each) for each in value]
    return value if isinstance(value, (int, float, str, bool, type(None))) else type(value).__name__


# What torch itself and its schedulers keep.
_TORCHS = {*vars(torch.optim.SGD([nn.Parameter(torch.zeros(1, device="cpu"))])), "_opt_called", "_step_count"}
