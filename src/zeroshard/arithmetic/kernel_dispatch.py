"""Functions that a kernel may replace on a device, once its bits have been seen to equal the function's.

A function decorated with `twin` is the reference: it runs wherever no kernel replaces it. Kernels and their
comparison are a feature (`kernels/fused.py`); without it every function runs itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

F = TypeVar("F", bound=Callable[..., Any])

DECLINED = object()  # what a kernel returns for arguments that it does not take
# By the function's name and the first tensor's device: the kernel's call, with the function's arguments.
stand_ins: dict[tuple[str, torch.device], Callable[..., Any]] = {}


def twin(function: F) -> F:
    """Let a kernel stand in for a function whose first argument is a tensor."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if stand_ins:
            found = _stood_in(function.__name__, args, kwargs)
            if found is not DECLINED:
                return found
        return function(*args, **kwargs)

    return cast(F, call)


def _stood_in(name: str, args: Any, kwargs: Any) -> Any:
    first = args[0]
    kernel = stand_ins.get((name, first.device)) if isinstance(first, Tensor) else None
    return DECLINED if kernel is None else kernel(*args, **kwargs)
