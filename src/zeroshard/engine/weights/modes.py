"""The program's modes and transforms, which the engine's own operations are hidden from.

A dispatch mode or function mode of the program sees each operation on its thread: it counts them, saves some of them
(selective activation checkpointing), or changes them. It must see only the operations of the model, the optimizer and
the program, as in plain PyTorch. A transform of `torch.func` wraps every tensor that is made inside it: a tensor that
the engine makes there would be such a wrapper, and gone with the transform.

torch's own modes without values (`FakeTensorMode`, tracing) stay, and so does a mode that says `of_zeroshard = True`.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from ...errors import PeerError, StateError

_PROXY = torch._C._TorchDispatchModeKey.PROXY
_transforms, _mode = torch._C._functorch.peek_interpreter_stack, torch._C._get_dispatch_mode
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack


class _Hidden(threading.local):
    """The program's modes that are hidden on this thread, outermost first."""

    dispatch: tuple[Any, ...] = ()
    function: tuple[Any, ...] = ()


_hidden = _Hidden()


def outside(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function of the engine to run outside of the program's modes and of all transforms of `torch.func`."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:  # as `without_own_lines` does, and `transformed`: every hook comes here
            if not (_dispatch_modes() or _function_modes() or _transforms() is not None or _mode(_PROXY) is not None):
                return function(*args, **kwargs)
            with unseen(), untransformed() if transformed() else contextlib.nullcontext():
                return function(*args, **kwargs)
        except PeerError as error:
            raise error.with_traceback(None) from error.__cause__

    return call


def transformed() -> bool:
    """Tell if a transform of `torch.func` runs (grad, vmap, jvp, ...), or one that records operations (linearize)."""
    return _transforms() is not None or _mode(_PROXY) is not None


@contextlib.contextmanager
def untransformed() -> Iterator[None]:
    """Leave all transforms of `torch.func` for the block."""
    with temporarily_clear_interpreter_stack(), disable_proxy_modes_tracing():
        yield


@contextlib.contextmanager
def unseen() -> Iterator[None]:
    """Hide the block's operations from the program's modes."""
    before = _hidden.dispatch, _hidden.function
    try:  # around all of it: an interrupt may come at any moment
        _hidden.dispatch, _hidden.function = (*before[0], *_own(_DISPATCH)), (*before[1], *_own(_FUNCTION))
        _take(_DISPATCH)
        _take(_FUNCTION)
        yield
    finally:
        now = _hidden.dispatch, _hidden.function
        _hidden.dispatch, _hidden.function = before
        _put_back(_DISPATCH, now[0][len(before[0]) :])
        _put_back(_FUNCTION, now[1][len(before[1]) :])


@contextlib.contextmanager
def seen() -> Iterator[None]:
    """Show the block's operations to the program's modes again: they are the program's, inside a call of the engine.

    The modes that are there when the block ends, which the program may have changed, are hidden after it.
    """
    shown = _hidden.dispatch, _hidden.function
    try:
        _put_back(_DISPATCH, shown[0])
        _put_back(_FUNCTION, shown[1])
        _hidden.dispatch = _hidden.function = ()
        yield
    finally:
        _hidden.dispatch, _hidden.function = _own(_DISPATCH), _own(_FUNCTION)
        _take(_DISPATCH)
        _take(_FUNCTION)


# The functions of a stack of modes: their number, the mode at an index, pop, and push. One stack is of dispatch modes,
# one of function modes. torch keeps its own dispatch modes without values below all others.
_Stack = tuple[Callable[[], int], Callable[[int], Any], Callable[[], Any], Callable[[Any], None]]
_DISPATCH: _Stack = (
    _dispatch_modes,
    torch._C._get_dispatch_stack_at,
    lambda: torch._C._pop_torch_dispatch_stack(None),
    torch._C._push_on_torch_dispatch_stack,
)
_FUNCTION: _Stack = (
    _function_modes,
    torch._C._get_function_stack_at,
    torch._C._pop_torch_function_stack,
    torch._C._push_on_torch_function_stack,
)


def _own(stack: _Stack) -> tuple[Any, ...]:
    """Return the program's modes that are on a stack, the outermost first."""
    return tuple(each for each in (stack[1](index) for index in range(stack[0]())) if not _stays(each))


def _take(stack: _Stack) -> None:
    """Take the program's modes off a stack."""
    number, at, pop, push = stack
    modes = [at(index) for index in range(number())]
    lowest = next((index for index, each in enumerate(modes) if not _stays(each)), len(modes))
    for _ in modes[lowest:]:
        pop()
    for each in modes[lowest:]:
        if _stays(each):
            push(each)


def _put_back(stack: _Stack, modes: Iterable[Any]) -> None:
    """Put modes on a stack, but for those that an interrupt has left there."""
    there = {id(stack[1](index)) for index in range(stack[0]())}
    for each in modes:
        if id(each) not in there:
            stack[3](each)


def _stays(mode: Any) -> bool:
    return getattr(mode, "_mode_key", None) is not None or getattr(mode, "of_zeroshard", False)


def refuse_inside(what: str) -> None:
    """Refuse, inside a transform, a call of the user's that moves memory between ranks: none can be differentiated."""
    if transformed():
        raise StateError(
            f"{what} inside a transform of torch.func",
            instead="call it around the transform, as with zero.gathered(): ...",
        )
