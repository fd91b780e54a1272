"""The kernels of split masters: joining them with their parameters, and taking them apart."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor

from ..arithmetic.kernel_dispatch import DECLINED
from ..arithmetic.split_bits import join_, split_
from .fusion import COUNT, Case, Function, Kernels, numbers


class Halves(Kernels):
    text = "fused_split.cu"
    names = ("join_", "split_")
    twins = (join_, split_)

    def join_(self, master: Tensor, param: Tensor, lower: Tensor, ties: Tensor) -> Any:
        dtypes = [torch.float32, torch.bfloat16, torch.int16, torch.uint8]
        if not self.takes("join_", [master, param, lower, ties], dtypes):
            return DECLINED
        self.run("join_", master.numel(), master, param, lower, ties, master.numel())
        return None

    def split_(self, master: Tensor, lower: Tensor, ties: Tensor) -> Any:
        if not self.takes("split_", [master, lower, ties], [torch.float32, torch.int16, torch.uint8]):
            return DECLINED
        self.run("split_", -(-master.numel() // 8), lower, ties, master, master.numel(), writes=2)
        return None

    @staticmethod
    def cases(device: torch.device) -> Iterator[Case]:
        yield Case(["join_"], join_, partial(_halves, "join_", device))
        yield Case(["split_"], split_, partial(_halves, "split_", device))


def _halves(what: str, device: torch.device, call: Function) -> list[Tensor]:
    master = numbers(COUNT - 3, device, 6)
    lower = torch.zeros(COUNT - 3, dtype=torch.int16, device=device)
    ties = torch.zeros(COUNT // 8, dtype=torch.uint8, device=device)
    if what == "split_":
        call(master, lower, ties)
        return [lower, ties]
    unwrap(split_)(master, lower, ties)
    joined = torch.zeros_like(master)
    call(joined, master.bfloat16(), lower, ties)
    return [joined.view(torch.int32)]


KERNELS = Halves
