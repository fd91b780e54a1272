"""Sums for norms, exact whatever the cut: squares by blocks in fp32, and sums of blocks as integers.

Squares are added per block of 128 elements in a fixed tree, in fp32; the block sums are then added as integers, which
no order or cut can change (`empty_bins`). Powers other than the first and second are taken and added in fp64.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

import torch
from torch import Tensor

from ..device import ask, blank, chunk
from .kernel_dispatch import twin
from .sums import average_

_BINS = {torch.float32: 32, torch.float64: 264}  # of eight exponents each; then one for inf, one for NaN
_LOWEST = 1104  # a fp64 bin's unit is 2^(8 * bin - this)


class BlockMap:
    """The blocks of a shard: the slot that each belongs to, and the elements of each that are padding.

    Blocks are `size` elements, from the shard's start on; slots begin at block boundaries. Built once per bucket.
    """

    def __init__(self, numel: int, size: int, spans: Sequence[tuple[int, int, int]], device: torch.device) -> None:
        """spans: (slot number, start, stop) of each fragment, in shard elements."""
        self.size = size
        self.count = numel // size
        owner = torch.full((self.count,), -1, dtype=torch.int64, device="cpu")
        partial: list[int] = []
        lengths: list[int] = []
        for slot, start, stop in spans:
            owner[start // size : -(-stop // size)] = slot
            if stop % size and stop > start:
                partial.append(stop // size)
                lengths.append(stop % size)
        self.dense = bool(ask((owner >= 0).all()))
        self.used = (
            torch.empty(0, dtype=torch.int64, device="cpu")
            if self.dense
            else ask(owner >= 0).nonzero().flatten().to(device)
        )
        self.owner = owner[owner >= 0].to(device)
        self.ends = partial  # ascending, as slots are
        self.partial = torch.tensor(partial, dtype=torch.int64, device=device)
        self.hidden = (
            torch.arange(size, device="cpu")[None, :] >= torch.tensor(lengths, dtype=torch.int64, device="cpu")[:, None]
        ).to(device)

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.itemsize for t in (self.used, self.owner, self.partial, self.hidden))


@twin
def block_sums(shard: Tensor, blocks: BlockMap, ranks: int, order: float) -> Tensor:
    """Return [blocks in use]: each block's sum (for order inf, maximum) of |x|^order; x = shard / ranks, as fp32.

    The sum inside a block is a fixed tree of halvings, whatever the number of blocks handled at a time. It is in fp32
    for the orders 1, 2 and inf, in fp64 for others.
    """
    out = blank(blocks.count, sums_in(order), shard.device)
    step = max(chunk(shard) // blocks.size, 1)
    for at in range(0, blocks.count, step):
        some = shard[at * blocks.size : (at + step) * blocks.size]
        part = blank(some.numel(), torch.float32, some.device).copy_(some).view(-1, blocks.size)
        average_(part, ranks)
        first, last = (bisect_left(blocks.ends, end) for end in (at, at + part.shape[0]))
        if first != last:
            rows = blocks.partial[first:last] - at
            part[rows] = part[rows].masked_fill(blocks.hidden[first:last], 0.0)
        part = part.square_() if order == 2.0 else _power(part.abs_(), order)
        while part.shape[1] > 1:
            half = part.shape[1] // 2
            low, high = part[:, :half], part[:, half:]
            part = torch.maximum(low, high) if order == torch.inf else low + high
        out[at : at + step] = part[:, 0]
    return out if blocks.dense else out[blocks.used]


def sums_in(order: float) -> torch.dtype:
    """Return the dtype that sums of |x|^order are taken in."""
    return torch.float32 if order in (1.0, 2.0, torch.inf) else torch.float64


def _power(x: Tensor, order: float) -> Tensor:
    """Return x^order of non-negative numbers in fp64; for the orders that `sums_in` takes in fp32, x itself.

    By products and square roots alone, which processors round correctly: `pow` gives different bits at the end of a
    vector than inside it, and where that is depends on cuts. Any float is a sum of powers of two, so these suffice.
    """
    if sums_in(order) is torch.float32:
        return x
    whole, fraction = int(order), order % 1.0
    result, factor = None, x.to(torch.float64)
    root = factor
    while whole:
        if whole & 1:
            result = factor if result is None else result * factor
        whole >>= 1
        factor = factor * factor if whole else factor
    while fraction:
        root, fraction = root.sqrt(), fraction * 2
        if fraction >= 1:
            result, fraction = root if result is None else result * root, fraction - 1
    assert result is not None, order
    return result


def empty_bins(slots: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return int64 [slots, bins]: an exact sum of non-negative numbers per slot. Bins of several ranks simply add."""
    return torch.zeros(slots, _BINS[dtype] + 2, dtype=torch.int64, device=device)


@twin
def add_to_bins(bins: Tensor, owner: Tensor, sums: Tensor) -> None:
    """Add block sums to their slots' bins.

    A float is m * 2^(max(e, 1) - 150); with e = 8 * bin + shift it adds m << shift to its bin, exactly. A double is
    rounded to as many bits first.
    """
    if sums.dtype == torch.float32:
        bits = _magnitude(sums).to(torch.int64)
        exponent = bits >> 23
        mantissa = bits & 0x7FFFFF
        subnormal = exponent == 0
        value = torch.where(subnormal, mantissa, mantissa | 0x800000)
        exponent = torch.where(subnormal, 1, exponent)
    else:
        fraction, power = torch.frexp(sums)
        value = (fraction * 2.0**24).round().nan_to_num(0.0, 0.0).to(torch.int64)
        exponent = power.to(torch.int64) + (_LOWEST - 24)
    special = ~sums.isfinite()
    value = torch.where(special, 1, value << exponent % 8)
    last = bins.shape[1] - 2
    column = torch.where(special, torch.where(sums.isnan(), last + 1, last), exponent // 8)
    bins.view(-1).index_add_(0, owner * bins.shape[1] + column, value)


def sums_from_bins(bins: Tensor) -> Tensor:
    """Return fp64 [slots]: the sums of floats; inf or NaN where one was added."""
    # 2^(8 * bin - 150), made from its bits on the device: numbers from the host would have to be waited for.
    scale = (torch.arange(32, device=bins.device) * 8 + (1023 - 150) << 52).view(torch.float64)
    total = (bins[:, :32].to(torch.float64) * scale).sum(dim=1)
    return total.masked_fill_(bins[:, 32] > 0, torch.inf).masked_fill_(bins[:, 33] > 0, torch.nan)


def roots_from_bins(bins: Tensor, order: float) -> Tensor:
    """Return fp64 [slots], on the CPU: the norms, from bins of fp64 sums."""
    return torch.tensor([_root(row, order) for row in ask(bins).tolist()], dtype=torch.float64, device="cpu")


def _root(row: list[int], order: float) -> float:
    """Return the norm of one slot from its bins, in plain Python: a vector's `pow` would depend on the slot's place."""
    *parts, infinite, undefined = row
    if infinite or undefined:
        return math.nan if undefined else math.inf
    total = sum(part << 8 * at for at, part in enumerate(parts) if part)
    try:
        return float((total / (1 << _LOWEST)) ** (1.0 / order))
    except OverflowError:
        return math.inf


def add_to_maxima(maxima: Tensor, owner: Tensor, sums: Tensor) -> None:
    """Add to int32 [slots]: non-negative floats compare like their bits, NaN above inf, so their maximum is exact."""
    maxima.scatter_reduce_(0, owner, _magnitude(sums), reduce="amax")


def _magnitude(sums: Tensor) -> Tensor:
    """Return sums' bits without the sign, which only a NaN can have: inf - inf is a negative NaN on most processors."""
    return sums.view(torch.int32) & 0x7FFFFFFF
