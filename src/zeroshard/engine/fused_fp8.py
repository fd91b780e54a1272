"""The kernels of parameters in 8 bits: the magnitudes that scales are made of, rounding, and reading."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import fp8
from ..twins import DECLINED
from .fusion import COUNT, LIMIT, READ, WARP, WORDS, Case, Function, Kernels, numbers

_DEQUANTISE = [f"dequantise_{WORDS[dtype]}" for dtype in READ]


class Eighths(Kernels):
    text = "fused_fp8.cu"
    names = ("largest", "quantise_", *_DEQUANTISE)
    lines = tuple(f"DEQUANTISE({name}, {WORDS[dtype]})" for name, dtype in zip(_DEQUANTISE, READ, strict=True))
    twins = (fp8.magnitudes, fp8.quantise_, fp8.dequantise_)

    def magnitudes(self, masters: Tensor, tiles: fp8.Grid, first: int) -> Any:
        last = first + masters.numel()
        if masters.dtype != torch.float32 or last >= LIMIT or not self.takes("largest", masters):
            return DECLINED
        most = torch.zeros(tiles.number, dtype=torch.int32, device=masters.device)
        self.run(
            "largest", -(-masters.numel() // 1024) * WARP, most, masters,
            first, masters.numel(), tiles.columns, tiles.tall, tiles.wide, tiles.across,
        )  # fmt: skip
        return most

    def quantise_(self, raw: Tensor, masters: Tensor, scales: Tensor, tiles: fp8.Grid, first: int = 0) -> Any:
        known = masters.dtype == scales.dtype == torch.float32 and first + raw.numel() < LIMIT
        if not known or not self.takes("quantise_", raw, masters, scales):
            return DECLINED
        where = (tiles.columns, tiles.tall, tiles.wide, tiles.across)
        self.run("quantise_", raw.numel(), raw, masters, scales, first, raw.numel(), *where)
        return None

    def dequantise_(self, values: Tensor, raw: Tensor, scales: Tensor, tiles: fp8.Grid) -> Any:
        name = f"dequantise_{WORDS.get(values.dtype)}"
        known = values.dtype in READ
        if not known or not self.takes(name, values, raw, scales):
            return DECLINED
        raw = raw.clone()  # it may lie where `values` does
        where = (tiles.columns, tiles.tall, tiles.wide, tiles.across)
        self.run(name, raw.numel(), values, raw, scales, raw.numel(), *where)
        return None

    @staticmethod
    def cases(device: torch.device) -> Iterator[Case]:
        for scaling in fp8.TILES:
            yield Case(["largest"], fp8.magnitudes, partial(_eighths, scaling, "magnitudes", torch.float32, device))
            yield Case(["quantise_"], fp8.quantise_, partial(_eighths, scaling, "quantise_", torch.float32, device))
            for dtype, name in zip(READ, _DEQUANTISE, strict=True):
                yield Case([name], fp8.dequantise_, partial(_eighths, scaling, "dequantise_", dtype, device))


def _eighths(scaling: str, what: str, dtype: torch.dtype, device: torch.device, call: Function) -> list[Tensor]:
    """Take the magnitudes of a part of a tensor, round it to 8 bits, or read all of it."""
    tiles, values = fp8.grid((COUNT // 160, 160), scaling), numbers(COUNT, device, 5)
    if what == "magnitudes":
        return [call(values[77:-99], tiles, 77).clamp(max=0x7F800000)]  # what is above it is NaN, whatever its bits say
    values = values.nan_to_num(1.0, 2.0, 3.0).clamp(-1e6, 1e6)
    scales = fp8.as_fp32(fp8.scales_of(values, tiles))
    raw = torch.zeros(COUNT, dtype=fp8.BYTE, device=device)
    if what == "quantise_":
        call(raw[77:-99], values[77:-99], scales, tiles, 77)
        return [raw]
    raw.copy_(torch.arange(COUNT, device=device).remainder_(256))
    memory = torch.zeros(COUNT, dtype=dtype, device=device)
    memory.view(fp8.BYTE)[-COUNT:].copy_(raw)  # the bytes rest at the end of what is read
    call(memory, memory.view(fp8.BYTE)[-COUNT:], scales, tiles)
    return [memory]


KERNELS = Eighths
