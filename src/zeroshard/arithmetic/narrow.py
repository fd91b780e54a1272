"""fp32 numbers that rest as bfloat16: rounded to the nearest one, or up or down at random.

    fp32       seeeeeeeemmmmmmm llllllllllllllll
    bfloat16   seeeeeeeemmmmmmm                    what is nearest; or the next one away from zero, with the
                                                   probability of the lower half / 65,536: on average, the number itself

A number that bfloat16 has stays as it is, whatever is drawn, and so does an infinity. A NaN stays NaN. The largest
numbers may become infinite, as they do when they are rounded to the nearest.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..device import ask, chunk
from .hashing import digest
from .philox import EACH, bits16, bits16_at
from .sums import simulated

_TENSORS = 4  # the temporary tensors are as many bytes as so many of the values handled at a time


def key_of(seed: int, state: str, parameter: str) -> int:
    """Return the key of 64 bits of all that is drawn for one state of one parameter."""
    return int(digest(f"{seed} {state} {parameter}")[:16], 16)


def round_(out: Tensor, values: Tensor, key: int, step: int, elements: Tensor | int) -> None:
    """Set out = the fp32 `values`, rounded up or down by the bits that are drawn for their elements. Both are 1-D.

    elements: the number of the first element, if those after it have the next numbers; else the number of each.
    """
    if simulated(values):
        return
    size = max(chunk(values) // _TENSORS // EACH, 1) * EACH
    for at in range(0, values.numel(), size):
        part = values[at : at + size]
        if isinstance(elements, Tensor):
            drawn = bits16_at(key, step, elements[at : at + size])
        else:
            drawn = bits16(key, step, elements + at, part.numel(), values.device)
        _round_by(out[at : at + size], part, drawn)


def _round_by(out: Tensor, values: Tensor, drawn: Tensor) -> None:
    """Round by 16 random bits for each element, which are overwritten."""
    upper = drawn.add_(values.view(torch.int32)).bitwise_right_shift_(16)
    out.view(torch.int16).copy_(upper)
    if not values.is_cpu or not ask(values.isfinite().all()):  # elsewhere asking would wait for the device
        torch.where(values.isfinite(), out, values.to(torch.bfloat16), out=out)
