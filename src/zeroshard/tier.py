"""Where a shard rests. A tier reserves storage for a state and accounts for it in the ledger.

Today there is one: the device the model computes on. Host memory and NVMe files join behind the same two verbs.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from dataclasses import dataclass, fields
from typing import Protocol

import torch
from torch import Tensor

from .errors import UserError
from .events import DEVICE, Ledger
from .numerics import simulated
from .pool import Pool


@dataclass(frozen=True)
class Offload:
    """In which tier each state rests: "device" for all of them, until host and NVMe tiers exist."""

    parameters: str = "device"
    gradients: str = "device"
    optimizer: str = "device"

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) != "device":
                raise UserError(
                    f"Offload.{field.name} names a tier that does not exist yet",
                    expected="'device'",
                    got=repr(getattr(self, field.name)),
                    instead="Offload()",
                )


class Tier(Protocol):
    """Storage for states: zero-filled when reserved, unless said otherwise, counted by state until given back."""

    name: str
    device: torch.device
    ledger: Ledger

    def reserve(self, state: str, numel: int, dtype: torch.dtype, *, zeroed: bool = True) -> Tensor: ...

    def give_back(self, state: str, tensor: Tensor) -> None: ...


@functools.cache
def keep_freed_memory() -> None:
    """Have malloc keep what is freed for the next step, up to 256 MiB: see docs/decisions/freed-memory.md.

    Only glibc's, and not where the environment says what malloc is to do.
    """
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return
    trim_threshold, mmap_threshold = -1, -3  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD in malloc.h
    with contextlib.suppress(AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(mmap_threshold, 32 << 20)  # the most it takes; more than any bucket on the CPU
        libc.mallopt(trim_threshold, 256 << 20)


class DeviceTier:
    """Plain tensors on the compute device."""

    name = DEVICE

    def __init__(self, device: torch.device, ledger: Ledger) -> None:
        if device.type == "cpu":
            keep_freed_memory()
        self.device = device
        self.ledger = ledger
        own = device.type == "cpu" and not simulated(torch.empty(0))  # elsewhere torch's own allocator keeps memory
        self._pool = Pool() if own else None

    def reserve(self, state: str, numel: int, dtype: torch.dtype, *, zeroed: bool = True) -> Tensor:
        """1-D tensor of `numel` zeros, or of whatever is there, counted under `state`."""
        self.ledger.hold(state, numel * dtype.itemsize)
        if zeroed:
            return torch.zeros(numel, dtype=dtype, device=self.device)
        return self._pool.take(numel, dtype) if self._pool else torch.empty(numel, dtype=dtype, device=self.device)

    def give_back(self, state: str, tensor: Tensor) -> None:
        """Stop counting. Nobody may use the tensor any more; the memory goes when the caller drops it, or is kept."""
        self.ledger.hold(state, -tensor.numel() * tensor.itemsize)
        if self._pool:
            self._pool.give_back(tensor)
