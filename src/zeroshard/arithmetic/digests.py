"""Digests of tensors: xxHash, against damage and not against forgery; 20 to 30 GB/s where zlib does 6."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy
import torch
import xxhash
from torch import Tensor

from .sums import simulated

_MIX = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9  # odd, and without a pattern
_COLUMNS, _ROWS = 1 << 14, 1 << 6  # of words, as a device weighs them; so many rows at a time take 8 MiB of scratch


def raw(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, without a copy."""
    tensor = tensor.resolve_conj().resolve_neg()  # a copy only if it is a conjugated or negated view
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy() if tensor.numel() else numpy.empty(0, numpy.uint8)
    return memoryview(array)


def fingerprint(tensor: Tensor, *, anywhere: bool = False) -> bytes | Tensor | None:
    """Return 16 bytes that tell a contiguous tensor's content from any other; None if it is not in the CPU's memory.

    It is the cheapest way to notice that the program wrote to a tensor behind torch's version counters.

    anywhere: on a device too, where it is the sum of 16-bit words times odd weights, modulo 2^64. A difference in
    one word always changes it; of differences in several words all but one in 2^48 do. The sum stays on the device.
    """
    if simulated(tensor):
        return None
    if tensor.device.type != "cpu":
        return _weighed(tensor) if anywhere else None
    content = ctypes.c_char * (tensor.numel() * tensor.itemsize)  # .numpy() would pin the storage's size
    return xxhash.xxh3_128_digest(content.from_address(tensor.data_ptr()))


def differ(a: bytes | Tensor | None, b: bytes | Tensor | None) -> bool | Tensor:
    """Tell if two fingerprints are unequal. On a device the answer stays there. Two that are None are equal."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a != b
    return isinstance(a, Tensor) or isinstance(b, Tensor) or a != b


def _weighed(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's words, each times the weights of its column and its row in a table of such width."""
    words = tensor.view(torch.int16)
    rows, columns = words.numel() // _COLUMNS, _odd(0, min(words.numel(), _COLUMNS), words.device)
    last = words[rows * _COLUMNS :]
    total = (last * columns[: last.numel()]).sum()
    if rows:
        table = words[: rows * _COLUMNS].view(rows, _COLUMNS)
        sums = torch.cat([(part * columns).sum(1) for part in table.split(_ROWS)])
        total += (sums * _odd(_COLUMNS, _COLUMNS + rows, words.device)).sum()
    return total


def _odd(start: int, stop: int, device: torch.device) -> Tensor:
    """Return odd numbers without a pattern, the same for the same places."""
    weights = torch.arange(start, stop, device=device) * _MIX[0]
    return (weights ^ (weights >> 31)) * _MIX[1] | 1
