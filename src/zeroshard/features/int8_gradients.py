"""Gradients that travel in 8 bits: the codec of contributions. `arithmetic/int8.py` has the arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..arithmetic import int8
from ..errors import UserError
from ..hooks import Feature
from ..layout.partition import BLOCK, BucketPlan, Partition
from ..policies.incompatible import Settings
from ..policies.precision import COMPUTED

if TYPE_CHECKING:
    from ..engine.build.assembly import Assembly


def _check(partition: Partition) -> None:
    """Refuse, by name, what 8-bit gradients cannot be combined with."""
    trained = [plan for plan in partition.buckets if plan.trainable]
    if partition.align % BLOCK or any(bound % BLOCK for plan in trained for bound in plan.bounds):
        raise UserError(
            f"gradients of 8 bits have a scale for each {BLOCK} elements of a parameter, and no cut may fall inside",
            got=f'Layout(align={partition.align}), Comm(reduce="int8")',
            instead=f"Layout(align={BLOCK}), the default",
        )
    for plan in trained:
        parts = plan.axis or any(slot.cut is not None for slot in plan.slots)
        if parts or plan.dtype not in map(str, COMPUTED):
            raise UserError(
                "gradients of 8 bits are those of real parameters of 16 or 32 bits that all ranks shard",
                where=f"parameter {plan.slots[0].name!r}",
                got="an expert, or a part beside tensor parallelism" if parts else plan.dtype,
                instead='Comm(reduce="ordered")',
            )


class Codes:
    """The format of contributions that travel as codes: see `codec.py`."""

    def __init__(self, plan: BucketPlan) -> None:
        self._values = plan
        self.plan = int8.coded(plan)
        self.dtype = int8.BYTE

    def encode(self, values: Tensor, take: Callable[[int, torch.dtype], Tensor]) -> Tensor:
        message = take(self.plan.numel, int8.BYTE)
        int8.encode_(message, values, self._values)
        return message

    def decode(self, piece: Tensor) -> int8.Coded:
        return int8.Coded(piece)


class Int8GradientsFeature(Feature):
    name = "gradients in 8 bits"
    page = "precision.md#gradients-in-8-bits"
    kernels = "fused_int8"

    def check(self, assembly: Assembly, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        if assembly.asked.reduce == "int8":
            _check(assembly.partition)

    def message(self, plan: BucketPlan, settings: Settings) -> Codes | None:
        return Codes(plan) if settings.reduce == "int8" else None


FEATURE = Int8GradientsFeature()
