"""Memory of messages, taken again and again: contributions on their way out, and what other ranks send."""

from __future__ import annotations

import torch
from torch import Tensor

from ..headroom import POOLED
from ..tiers.tier import MessageMemory


class Scratch:
    """Memory of messages on the device, kept for the next one of its size and counted under one name."""

    def __init__(self, tier: MessageMemory, state: str) -> None:
        self._tier = tier
        self._state = state
        self._kept: list[Tensor] = []  # the longest kept first
        self._taken: list[Tensor] = []  # and not given back

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return 1-D memory with arbitrary content: every element that is read must be written first."""
        fitting = [at for at, each in enumerate(self._kept) if each.numel() == numel and each.dtype == dtype]
        if fitting:
            taken = self._tier.again(self._kept[fitting[0]])
            self._kept.pop(fitting[0])
        else:
            taken = self._tier.reserve(self._state, numel, dtype, zeroed=False)
        if numel:
            self._taken.append(taken)
        return taken

    def give_back(self, tensor: Tensor | None) -> None:
        """Return memory that was taken here; foreign tensors and second returns are ignored."""
        if taken := [at for at, each in enumerate(self._taken) if each is tensor]:
            self._kept.append(self._taken.pop(taken[0]))
            self.trim(POOLED)  # more would pile up where no two buckets are of one size

    def give_back_all(self) -> None:
        for tensor in [*self._taken]:
            self.give_back(tensor)

    def trim(self, keep: int = 0) -> None:
        """Give unused memory back to the tier, but for the last `keep` messages."""
        while len(self._kept) > keep:
            self._tier.give_back(self._state, self._kept.pop(0))
