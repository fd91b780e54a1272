"""Numbers of 32 and 16 bits, and one step of Adam, in plain Python: the texts' walks need no torch."""

from __future__ import annotations

import math
import struct
from fractions import Fraction
from typing import NamedTuple


def fp32(value: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def fp16(value: float) -> float:
    return float(struct.unpack("<e", struct.pack("<e", value))[0])


def bf16(value: float) -> float:
    """Round to the nearest bf16 number, halves to even, by way of fp32."""
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    bits += 0x7FFF + (bits >> 16 & 1)
    return float(struct.unpack("<f", struct.pack("<I", bits & 0xFFFF0000))[0])


class Adam(NamedTuple):
    """Adam's first step of one weight."""

    m: Fraction
    v: Fraction
    m_hat: Fraction
    v_hat: Fraction
    weight: Fraction


def adam(weight: Fraction, gradient: Fraction, lr: Fraction) -> Adam:
    """Take Adam's first step from states of zero, with betas 0.9 and 0.999 and eps 1e-8."""
    m, v = gradient / 10, gradient**2 / 1000
    m_hat, v_hat = m * 10, v * 1000
    moved = lr * m_hat / (Fraction(math.sqrt(v_hat)) + Fraction(1, 10**8))
    return Adam(m, v, m_hat, v_hat, weight - moved)


def spoiled(ranks: int) -> int:
    """Count the values, of bf16's 128 from 1 to 2, that a bf16 sum of `ranks` equal parts does not give back.

    The loss is divided, and it is bf16 as the model's output is: backward multiplies by a rounded 1/ranks.
    """
    found = 0
    for at in range(128):
        g = 1 + at / 128
        total, part = 0.0, bf16(fp32(g * bf16(fp32(1 / ranks))))
        for _ in range(ranks):
            total = bf16(fp32(total + part))
        found += total != g
    return found


def spoiled_here(ranks: int) -> int:
    """Count the same where the sum is in fp32, of undivided parts, and is divided once."""
    found = 0
    for at in range(128):
        g, total = 1 + at / 128, 0.0
        for _ in range(ranks):
            total = fp32(total + g)
        found += fp32(total / ranks) != g
    return found
