"""The kernels of parameters in 8 bits: the magnitudes that scales are made of, rounding, and reading."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..arithmetic import fp8
from ..arithmetic.kernel_dispatch import DECLINED
from ..device import chunk
from .fusion import LIMIT, READ, WARP, WORDS, Case, Function, Kernels, numbers

_ROWS, _COLUMNS = 300, 160  # of the tensor that kernels are compared on: three rows of tiles, two of them across
_DEQUANTISE = [f"dequantise_{WORDS[dtype]}" for dtype in READ]


class Eighths(Kernels):
    text = "fused_fp8.cu"
    names = ("largest", "quantise_", *_DEQUANTISE)
    lines = tuple(f"DEQUANTISE({name}, {WORDS[dtype]})" for name, dtype in zip(_DEQUANTISE, READ, strict=True))
    twins = (fp8.magnitudes, fp8.quantise_, fp8.dequantise_)

    def magnitudes(self, masters: Tensor, tiles: fp8.TileGrid, first: int) -> Any:
        if not self._fits(tiles) or not self.takes("largest", [masters], [torch.float32]):
            return DECLINED
        most = torch.zeros(tiles.number, dtype=torch.int32, device=masters.device)
        self.run(
            "largest", -(-masters.numel() // 1024) * WARP, most, masters, first, masters.numel(), *_numbers(tiles),
        )  # fmt: skip
        return most

    def quantise_(self, raw: Tensor, masters: Tensor, scales: Tensor, tiles: fp8.TileGrid, first: int = 0) -> Any:
        tensors, dtypes = [raw, masters, scales], [fp8.BYTE, torch.float32, torch.float32]
        if not self._fits(tiles) or not self.takes("quantise_", tensors, dtypes):
            return DECLINED
        self.run("quantise_", raw.numel(), *tensors, first, raw.numel(), *_numbers(tiles))
        return None

    def dequantise_(self, values: Tensor, raw: Tensor, scales: Tensor, tiles: fp8.TileGrid) -> Any:
        name, tensors = f"dequantise_{WORDS.get(values.dtype)}", [values, raw, scales]
        if not self._fits(tiles) or not self.takes(name, tensors, [values.dtype, fp8.BYTE, torch.float32]):
            return DECLINED
        inside = values.untyped_storage()._cdata == raw.untyped_storage()._cdata
        step = chunk(raw)
        for at in range(0, raw.numel(), step):
            part = raw[at : at + step]
            part = part.clone() if inside else part  # the bytes may lie where numbers are written
            self.run(name, part.numel(), values[at : at + step], part, scales, at, part.numel(), *_numbers(tiles))
        return None

    @staticmethod
    def _fits(tiles: fp8.TileGrid) -> bool:
        return tiles.rows * tiles.columns < LIMIT  # counts the whole tensor, of which this rank may have a part

    @staticmethod
    def cases(device: torch.device) -> Iterator[Case]:
        for scaling in fp8.TILES:
            for spoiled in (False, True):
                how = partial(_eighths, scaling, spoiled)
                yield Case(["largest"], fp8.magnitudes, partial(how, "magnitudes", torch.float32, device))
                yield Case(["quantise_"], fp8.quantise_, partial(how, "quantise_", torch.float32, device))
                for dtype, name in zip(READ, _DEQUANTISE, strict=True):
                    yield Case([name], fp8.dequantise_, partial(how, "dequantise_", dtype, device))


def _numbers(tiles: fp8.TileGrid) -> tuple[int, ...]:
    return tiles.columns, tiles.tall, tiles.wide, tiles.across


def _eighths(
    scaling: str, spoiled: bool, what: str, dtype: torch.dtype, device: torch.device, call: Function
) -> list[Tensor]:
    """Take the magnitudes of a part of a tensor, round it to 8 bits, or read all of it.

    spoiled: numbers include NaN and infinity, whose tiles read as NaN.
    """
    tiles, numel = fp8.grid((_ROWS, _COLUMNS), scaling), _ROWS * _COLUMNS
    part, values = slice(77, 77 + 46 * 1024 + 9), numbers(numel, device, 5)  # its last warp has nine elements
    if not spoiled:
        values = values.nan_to_num(1.0, 2.0, 3.0).clamp(-1e6, 1e6)
    if what == "magnitudes":
        return [call(values[part], tiles, 77).clamp(max=0x7F800000)]  # what is above it is NaN, whatever its bits say
    scales = fp8.as_fp32(fp8.scales_of(values, tiles))
    raw = torch.zeros(numel, dtype=fp8.BYTE, device=device)
    if what == "quantise_":
        call(raw[part], values[part], scales, tiles, 77)
        return [torch.where(raw & 0x7F == 0x7F, 0x7F, raw)]  # NaN has 2 codes
    raw.copy_(torch.arange(numel, device=device).remainder_(256))
    memory = torch.zeros(numel, dtype=dtype, device=device)
    memory.view(fp8.BYTE)[-numel:].copy_(raw)  # the bytes rest at the end of what is read
    call(memory, memory.view(fp8.BYTE)[-numel:], scales, tiles)
    return [memory]


KERNELS = Eighths
