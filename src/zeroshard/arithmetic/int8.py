"""Gradients that travel as codes of 8 bits with a scale for each block: the only place that makes and reads these.

    a block           128 elements of one parameter, counted from its first: no cut falls inside one
    its scale         the largest magnitude in it / 127, fp32; at least 2^-126
    an element        floor(gradient / scale + u), from -127 to 127; u, between 0 and 1, is drawn for each element
    what it stands for  code * scale, in fp32

u is a hash of the parameter's name, the block's number in it, the mantissa of the largest magnitude, the element's
place in the block and gradient / scale. So a block's bytes follow from these and from nothing else: not from the stage,
the bucket, the rank, the step or a generator's state; and a loss times a power of two has the same codes. On average
over u what arrives is what was sent, and a zero stays zero.

In a block with NaN or infinities, the scale is that of the other elements. It is sent negative, and codes of -128 are
then read as NaN. So each owner sees where a gradient is NaN, and an infinity arrives as NaN.
"""

from __future__ import annotations

import zlib
from dataclasses import replace

import torch
from torch import Tensor

from ..device import ask, chunk, divisor
from ..layout.partition import BLOCK, BucketPlan
from .kernel_dispatch import twin
from .sums import simulated

BYTE = torch.uint8
BYTES = BLOCK + 4  # of a block: its codes, then its scale
_TENSORS = 4  # temporary ones, each of the elements handled at a time, that encoding a gradient makes
_MOST, _NO_NUMBER, _LEAST, _MANTISSA = 127, -128, 2.0**-126, 0x7FFFFF


def nbytes(numel: int) -> int:
    """Return the bytes of a message of so many elements, which are whole blocks."""
    return numel // BLOCK * BYTES


def coded(bucket: BucketPlan) -> BucketPlan:
    """Return a bucket whose elements are the bytes of its messages, with bounds to match."""
    return replace(bucket, numel=nbytes(bucket.numel), bounds=tuple(map(nbytes, bucket.bounds)))


def _mixed(bits: Tensor) -> Tensor:
    """Hash 32-bit integers in place: each bit of the result depends on all bits of the input."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - (1 << 32))):
        bits.bitwise_xor_((bits >> shift).bitwise_and_((1 << 32 - shift) - 1)).mul_(factor)
    return bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF))


def _seeds(bucket: BucketPlan, device: torch.device) -> Tensor:
    """Return int32 [blocks]: a hash of the parameter's name and of the block's number in it; 0 for padding."""
    seeds = torch.zeros(bucket.numel // BLOCK, dtype=torch.int32, device="cpu")
    for slot in bucket.slots:
        first, last = slot.start // BLOCK, -(-slot.stop // BLOCK)
        name = zlib.crc32(slot.name.encode())
        numbers = torch.arange(last - first, dtype=torch.int32, device="cpu")
        seeds[first:last] = _mixed(_mixed(numbers) ^ (name - (name >> 31 << 32)))
    return seeds.to(device, non_blocking=True)  # else the host would wait for all the device's work


def encode_(message: Tensor, values: Tensor, bucket: BucketPlan) -> None:
    """Set message = a bucket's gradients in 8 bits, as bytes. Both are 1-D; padding in `values` becomes zero."""
    if simulated(message):
        return
    end = 0
    for slot in (*bucket.slots, None):
        start = bucket.numel if slot is None else slot.start
        if start > end:
            values[end:start].zero_()  # one kernel, where an assignment takes two
        end = start if slot is None else slot.stop
    seeds, places = _seeds(bucket, values.device), _mixed(torch.arange(BLOCK, dtype=torch.int32, device=values.device))
    blocks, rows = values.view(-1, BLOCK), message.view(-1, BYTES)
    step = chunk(values) // BLOCK // _TENSORS
    for at in range(0, rows.shape[0], step):
        where = slice(at, at + step)
        encode_blocks(rows[where], blocks[where].to(torch.float32, copy=True), seeds[where, None], places)


@twin
def encode_blocks(rows: Tensor, values: Tensor, seeds: Tensor, places: Tensor) -> None:
    """rows = these blocks in 8 bits; `values` is overwritten."""
    largest = values.abs().amax(1, keepdim=True)
    finite = None
    if not values.is_cpu or not ask(largest.isfinite().all()):  # elsewhere asking would wait for the device
        finite = values.isfinite()
        values = torch.where(finite, values, 0.0)
        largest = values.abs().amax(1, keepdim=True)
    scales = (largest / divisor(_MOST, largest)).clamp_(min=_LEAST)
    values.div_(scales)
    drawn = _mixed(values.view(torch.int32) ^ (seeds ^ _mixed(largest.view(torch.int32) & _MANTISSA)) ^ places)
    drawn = drawn.bitwise_and_(0xFFFF).to(torch.float32).add_(0.5).mul_(2.0**-16)
    codes = values.add_(drawn).floor_().clamp_(-_MOST, _MOST)
    if finite is not None:
        codes = torch.where(finite, codes, float(_NO_NUMBER))
        scales = torch.where(finite.all(1, keepdim=True), scales, -scales)
    rows[:, :BLOCK].view(torch.int8).copy_(codes)
    rows[:, BLOCK:].view(torch.float32).copy_(scales)


class Coded:
    """A rank's contribution to a shard, as bytes arrived. A slice of it decodes to fp32, in memory of its own."""

    dtype = torch.float32
    kernel_word = "code"  # in `kernels/fused_int8.cu`

    def __init__(self, message: Tensor) -> None:
        self.raw = message

    def data_ptr(self) -> int:
        return self.raw.data_ptr()

    def to(self, device: torch.device) -> Coded:
        return Coded(self.raw.to(device))

    def __getitem__(self, where: slice) -> Tensor:
        first = where.start // BLOCK
        rows = self.raw.view(-1, BYTES)[first : -(-where.stop // BLOCK)]
        codes, scales = rows[:, :BLOCK].view(torch.int8), rows[:, BLOCK:].view(torch.float32)
        values = codes.to(torch.float32).mul_(scales.abs())
        if not rows.is_cpu or ask((scales < 0).any()):
            values.masked_fill_((codes == _NO_NUMBER) & (scales < 0), torch.nan)
        return values.view(-1)[where.start - first * BLOCK : where.stop - first * BLOCK]
