"""Numbers of 8 bits with a scale for each tensor: the only place that rounds to them, and reads them.

    a weight that modules compute with   fp8(master / scale) * scale, in the dtype that they compute in
    scale                                2^e, the least with which no master of the tensor is above 448 * scale

The largest magnitude is taken now, of the masters themselves, and its maximum over ranks is exact. A division by a
power of two is exact as well, so a weight is rounded once, from fp32, to the nearest of 8 bits and ties to even; going
over bfloat16 would round twice. Reading it back is exact but where a 16-bit dtype has no such small number.

A scale is a byte, e + 127. Of a tensor with a master that is no number, or infinite, it is 255: then all of that tensor
is read as NaN, since 8 bits know no infinity and would make the largest number of it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .numerics import CHUNK, simulated

BYTE, FORMAT = torch.uint8, torch.float8_e4m3fn
NO_NUMBER = 255  # as a scale
_INFINITE, _MANTISSA = 0x7F800000, 23  # the bits of fp32's infinity; how many below the exponent
_CARRY = 0x1FFFFF  # added to the mantissa of what is above 1.75 * 2^k, it makes k one more: 448 is 1.75 * 2^8


def largest(masters: Tensor) -> Tensor:
    """int32, no dimension: the bits of the largest magnitude, of which a maximum is one of magnitudes; NaN is above."""
    low, high = torch.aminmax(masters)
    return torch.maximum(-low, high).view(torch.int32) & 0x7FFFFFFF


def scales_for(bits: Tensor) -> Tensor:
    """uint8: of magnitudes by `largest` the scales."""
    found = (((bits.clamp(max=_INFINITE) + _CARRY) >> _MANTISSA) - 8).clamp(min=1)
    return torch.where(bits >= _INFINITE, NO_NUMBER, found).to(BYTE)


def as_fp32(scales: Tensor) -> Tensor:
    """What scales stand for."""
    exponents = scales.to(torch.int32)
    return ((exponents << _MANTISSA) | (exponents == NO_NUMBER).to(torch.int32) << _MANTISSA - 1).view(torch.float32)


def quantise_(raw: Tensor, masters: Tensor, scale: Tensor) -> None:
    """raw = fp8(masters / scale), as bytes. Both are 1-D; scale: fp32, no dimension."""
    for at in range(0, 0 if simulated(raw) else raw.numel(), CHUNK):
        raw[at : at + CHUNK] = (masters[at : at + CHUNK] / scale).to(FORMAT).view(BYTE)


def _numbers(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """What each byte stands for: to look it up is several times faster than torch's cast, and has its bits."""
    every = torch.arange(256, dtype=BYTE, device=scale.device)
    return (every.view(FORMAT).to(torch.float32) * scale).to(dtype)


def dequantised(raw: Tensor, scale: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """What bytes stand for, a piece after the other, in memory of its own: (where, the numbers)."""
    numbers = _numbers(scale, dtype)
    for at in range(0, 0 if simulated(raw) else raw.numel(), CHUNK):
        where = slice(at, at + CHUNK)
        yield where, numbers.index_select(0, raw[where].to(torch.int32))


def dequantise_(values: Tensor, raw: Tensor, scale: Tensor) -> None:
    """values = what the bytes stand for, which may be the last ones of the memory that is written to."""
    numbers, numel = _numbers(scale, values.dtype), 0 if simulated(raw) else raw.numel()
    places = torch.empty(min(numel, CHUNK), dtype=torch.int32, device=raw.device)
    for at in range(0, numel, CHUNK):
        part = raw[at : at + CHUNK]
        found = places[: part.numel()].copy_(part)  # then the bytes may be overwritten
        torch.index_select(numbers, 0, found, out=values[at : at + CHUNK])
