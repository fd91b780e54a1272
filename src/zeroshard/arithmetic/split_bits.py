"""Split fp32 numbers into the bits that their bfloat16 casts lack, 17 for each, and join both again.

An fp32 number's 32 bits are 65,536 times an upper half, plus a lower half from -32,768 to 32,767. For all numbers that
round to one bfloat16, the upper half is that bfloat16. The exception is a tie: a number right between two bfloat16,
whose lower half is -32,768. If its cast, which goes to the even one, went up, the upper half is that bfloat16; if the
cast went down, the upper half is one more. So 16 bits beside the bfloat16 are not enough, and 17 are. A NaN stays NaN,
with another payload.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..device import ask, chunk
from .kernel_dispatch import twin
from .sums import simulated

_SPREAD, _EACH, _GATHER = 0x0101010101010101, 0x8040201008040201 - (1 << 64), 0x0102040810204080  # of eight bits
_TIE, _ROW = -32768, 1024  # a lower half; how many elements are looked through together


def _bits(packed: Tensor) -> Tensor:
    """Unpack bytes into their bits, as bool."""
    return (packed.to(torch.int64) * _SPREAD & _EACH).view(torch.uint8) != 0


def _packed(bits: Tensor) -> Tensor:
    """Pack bits into bytes, eight to one; the last byte is filled with zeros."""
    filled = bits.new_zeros(-(-bits.numel() // 8) * 8)
    filled[: bits.numel()] = bits
    return (filled.view(torch.int64).mul(_GATHER) >> 56).to(torch.uint8)


def _tied(bits: Tensor, lower: Tensor) -> Tensor:
    """Mark the numbers right between two bfloat16 whose upper half is even, so that the cast goes down."""
    return (lower == _TIE) & (bits.bitwise_and(1 << 16) == 0)


@twin
def join_(master: Tensor, param: Tensor, lower: Tensor, ties: Tensor) -> None:
    """Set master = the fp32 numbers that `split_` took apart, from their casts `param` and its results. All are 1-D.

    ties: a bit for each, eight to a byte.
    """
    step = chunk(master)
    for at in range(0, 0 if simulated(master) else master.numel(), step):
        own, packed = master[at : at + step], ties[at // 8 : (at + step) // 8]
        own.copy_(param[at : at + step])
        bits = own.view(torch.int32).add_(lower[at : at + step])
        if not master.is_cpu:  # here asking for the few ties would wait for the device
            bits.add_(_bits(packed)[: bits.numel()].to(torch.int32) << 16)
        elif (some := ask(packed).nonzero()).numel():
            where = (some * 8 + torch.arange(8, device=bits.device)).view(-1)
            bits[where[_bits(packed[some[:, 0]])]] += 1 << 16


@twin
def split_(master: Tensor, lower: Tensor, ties: Tensor) -> None:
    """Take fp32 numbers apart into what `join_` needs beside their bfloat16 cast: lower halves, and packed bits of
    ties."""
    step = chunk(master)
    for at in range(0, 0 if simulated(master) else master.numel(), step):
        bits, packed = master[at : at + step].view(torch.int32), ties[at // 8 : (at + step) // 8]
        half = lower[at : at + step].copy_(bits)  # keeps the lower 16 bits
        rows = bits.numel() // _ROW if master.is_cpu else 0  # several times faster where few are tied
        packed[: rows * _ROW // 8] = 0
        packed[rows * _ROW // 8 :] = _packed(_tied(bits[rows * _ROW :], half[rows * _ROW :]))
        by_row = (half[: rows * _ROW].view(-1, _ROW), bits[: rows * _ROW].view(-1, _ROW))
        if rows and (some := ask(by_row[0].amin(1) == _TIE).nonzero()[:, 0]).numel():
            found = _tied(by_row[1][some], by_row[0][some])
            packed[: rows * _ROW // 8].view(rows, -1)[some] = _packed(found.view(-1)).view(len(some), -1)
