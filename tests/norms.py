"""zeroshard's definition of gradient norms, on plain tensors and with exact Python arithmetic instead of integer bins.

The norm of one tensor: pad it with zeros to blocks of 128 elements, add each block's |x|^order in fp32 by halving (the
first half plus the second, until one number is left), add the blocks' sums exactly, take the root in fp64, round to
fp32. The norm of several tensors is torch's own norm of their norms.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

BLOCK = 128


def of_tensor(gradient: Tensor, order: float = 2.0, block: int = BLOCK) -> Tensor:
    flat = gradient.detach().reshape(-1).to(torch.float32)
    rows = torch.nn.functional.pad(flat, (0, -flat.numel() % block)).view(-1, block)
    rows = rows * rows if order == 2.0 else rows.abs()
    while rows.shape[1] > 1:
        low, high = rows.chunk(2, dim=1)
        rows = torch.maximum(low, high) if order == math.inf else low + high
    sums = rows[:, 0].tolist()
    if order == math.inf:
        total = math.nan if any(map(math.isnan, sums)) else max(sums, default=0.0)
    else:
        total = math.fsum(sums)
    return torch.tensor(math.sqrt(total) if order == 2.0 else total, dtype=torch.float64).to(torch.float32)


def total(gradients: Iterable[Tensor], order: float = 2.0, block: int = BLOCK) -> Tensor:
    """The global norm; what `reference` takes as its `norm`."""
    return torch.linalg.vector_norm(torch.stack([of_tensor(gradient, order, block) for gradient in gradients]), order)
