"""Bytes of host memory that the host's own operators read and write: what a device copies by itself is not counted.

An operator counts if all its tensors are on the CPU and it was called by the program's threads. Kernels of the device
are the CPU's operators too, but run on a thread of the device's.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from . import sites

_TORCH, _HERE = (os.path.dirname(os.path.abspath(path)) + os.sep for path in (torch.__file__, __file__))
ONLY_WRITTEN = {"copy_", "fill_", "zero_", "_to_copy", "clone"}  # their first argument, or their result


class Touched(TorchDispatchMode):
    """with Touched() as touched: ...; touched.nbytes: read and written, by (site, operator)."""

    of_zeroshard = True  # let it see the engine's own operators too

    def __init__(self, least: int = 64) -> None:
        """least: the bytes of a tensor from which on it counts: counts of steps and factors do not."""
        super().__init__()
        self.nbytes: Counter[tuple[str, str]] = Counter()
        self._least = least

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if _of_the_device(sys._getframe(1)):
            return result
        schema = func._schema
        written = {each.name for each in schema.arguments if each.alias_info is not None and each.alias_info.is_write}
        if not written and any(each.alias_info is not None for each in schema.returns):
            return result  # a view
        name = schema.name.partition("::")[2]
        given = dict(zip((each.name for each in schema.arguments), args, strict=False)) | (kwargs or {})
        found = [(key in written, each) for key, value in given.items() for each in _tensors(value)]
        found += [] if written else [(True, each) for each in _tensors(result)]
        if any(each.device.type != "cpu" for _, each in found):
            return result
        for at, (writes, each) in enumerate(found):
            nbytes = each.numel() * each.itemsize
            # The optimizer's kernel may write gradients if it unscales them, and does not otherwise.
            times = 1 + (writes and at in _updated(name, args, written) and name not in ONLY_WRITTEN)
            if nbytes >= self._least:
                self.nbytes[sites.site(), name] += nbytes * times
        return result


def _updated(name: str, args: Any, written: set[str]) -> range | set[int]:
    """The places, among an operator's tensors, of those that it reads as well as writes."""
    if not name.startswith("_fused_adam"):
        return range(len(args)) if written else range(0)
    each = len(args[0])
    return {at for at in range(6 * each) if at // each != 1}


def _of_the_device(frame: FrameType | None) -> bool:
    """Did the emulator itself call? It fills memory that was freed, for one."""
    while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_HERE)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [each for each in value if isinstance(each, Tensor)] if isinstance(value, (list, tuple)) else []
