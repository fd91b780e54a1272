"""Random bits by a counter: Philox 4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").

    key       64 bits, say what the bits are for
    counter   128 bits: the number of a block of eight elements, then the number of a step
    result    128 bits: 16 for each element of the block

The bits of an element follow from key, step and the element's number, and from nothing else. So it does not matter
which rank draws them, how many elements it draws at once, or what was drawn before. No state of torch's generators is
read or changed. A device computes the same bits, because all operations are those of 64-bit integers.
"""

from __future__ import annotations

import torch
from torch import Tensor

EACH = 8  # elements that share one counter
_FACTORS, _KEYS, _ROUNDS = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85), 10
_WORD = 0xFFFFFFFF


def philox_(words: Tensor, key: tuple[int, int]) -> Tensor:
    """Turn counters into random bits in place. words: int64 [4, counters], 32 bits in each."""
    a, b, c, d = words
    left, right = torch.empty_like(words[:2])
    for turn in range(_ROUNDS):
        first, second = ((word + turn * add) & _WORD for word, add in zip(key, _KEYS, strict=True))
        torch.mul(a, _FACTORS[0], out=left)  # the lower 64 bits, which are all that a product of 32-bit numbers has
        torch.mul(c, _FACTORS[1], out=right)
        torch.bitwise_right_shift(right, 32, out=a).bitwise_and_(_WORD).bitwise_xor_(b).bitwise_xor_(first)
        torch.bitwise_right_shift(left, 32, out=c).bitwise_and_(_WORD).bitwise_xor_(d).bitwise_xor_(second)
        torch.bitwise_and(right, _WORD, out=b)
        torch.bitwise_and(left, _WORD, out=d)
    return words


def bits16(key: int, step: int, start: int, numel: int, device: torch.device) -> Tensor:
    """Return 16 random bits for each of the elements [start, start + numel), as int32 from 0 to 65,535.

    key: of 64 bits. start: the first element's number, below 2^63.
    """
    first, last = start // EACH, -(-(start + numel) // EACH)
    drawn = _blocks(key, step, torch.arange(first, last, dtype=torch.int64, device=device))
    return drawn.view(-1)[start - first * EACH :][:numel]


def bits16_at(key: int, step: int, elements: Tensor) -> Tensor:
    """Return what `bits16` gives for the elements of these numbers, int64 [n]: eight times the work for each."""
    drawn = _blocks(key, step, elements // EACH)
    return drawn.gather(1, (elements % EACH)[:, None]).view(-1)


def _blocks(key: int, step: int, blocks: Tensor) -> Tensor:
    """Return int32 [blocks, EACH]: of each word the lower half, then the upper half."""
    words = blocks.new_empty(4, blocks.numel())
    for word, value in zip(words, (blocks & _WORD, blocks >> 32, step & _WORD, step >> 32), strict=True):
        word.copy_(value) if isinstance(value, Tensor) else word.fill_(value)
    philox_(words, (key & _WORD, key >> 32))
    drawn = torch.empty(blocks.numel(), 4, 2, dtype=torch.int32, device=blocks.device)
    drawn.copy_(words.view(torch.int16).view(4, -1, 4)[:, :, :2].permute(1, 0, 2))  # little-endian, as every device is
    return drawn.bitwise_and_(0xFFFF).view(-1, EACH)
