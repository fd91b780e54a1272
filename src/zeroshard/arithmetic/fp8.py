"""Numbers of 8 bits with a scale for each tensor, or for each tile of it: the only place that rounds to them.

    a weight that modules compute with   fp8(master / scale) * scale, in the dtype that they compute in
    scale                                2^e, the least with which no master of the tile is above 448 * scale

The largest magnitude is that of the current masters, and its maximum over ranks is exact. A division by a
power of two is exact as well, so a weight is rounded once, from fp32, to the nearest of 8 bits and ties to even; going
over bfloat16 would round twice. Reading it back is exact but where a 16-bit dtype has no such small number.

A scale is a byte, e + 127. For a tile with a NaN or infinite master it is 255: then the whole tile is read as NaN,
because 8 bits have no infinity and would turn it into the largest number. The scale of several magnitudes is the
largest of their scales, so ranks send each other bytes.

A tile is the whole tensor, or a block of some rows and columns. A rank's part of a tensor may begin and end inside
tiles and inside rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..device import blank, chunk
from ..layout.partition import BucketPlan
from .kernel_dispatch import twin
from .sums import simulated

BYTE, FORMAT = torch.uint8, torch.float8_e4m3fn
NO_NUMBER = 255  # as a scale
_INFINITE, _MANTISSA = 0x7F800000, 23  # the bits of fp32's infinity; how many below the exponent
_CARRY = 0x1FFFFF  # added to the mantissa of what is above 1.75 * 2^k, it makes k one more: 448 is 1.75 * 2^8


class TileGrid(NamedTuple):
    """The tiles of a tensor of `rows` x `columns`, each `tall` x `wide`; at the ends they are smaller."""

    rows: int
    columns: int
    tall: int
    wide: int

    @property
    def across(self) -> int:
        return -(-self.columns // self.wide)

    @property
    def number(self) -> int:
        """The number of tiles, and so of scales, which are in order row by row."""
        return -(-self.rows // self.tall) * self.across

    def pieces(self, first: int, numel: int, step: int) -> Iterator[TilePiece]:
        """Yield `numel` elements of the tensor, from element `first` on, in pieces of whole tiles side by side, or of a
        part of one tile. A piece has at most `step` elements, so that what is made of it stays in the cache."""
        for start in range(first, first + numel, step):
            yield from self._pieces(start, min(start + step, first + numel))

    def _pieces(self, first: int, last: int) -> Iterator[TilePiece]:
        while first < last:
            row, column = divmod(first, self.columns)
            rows = 1 if column else max((last - first) // self.columns, 1)
            at, end = column, min(self.columns, column + last - first)
            while at < end:
                split = at % self.wide or end - at < self.wide
                width = min(self.wide - at % self.wide, end - at) if split else (end - at) // self.wide * self.wide
                tiles = 1 if split else width // self.wide
                yield TilePiece(first + at - column, row, rows, at // self.wide, tiles, width // tiles, self)
                at += width
            first += rows * (end - column)


class TilePiece(NamedTuple):
    """Elements of a tensor: `rows` rows from `row` on, and in each row `tiles` tiles side by side from `tile` on.

    start: the flat index of the first element. width: the elements of one row in each tile.
    """

    start: int
    row: int
    rows: int
    tile: int
    tiles: int
    width: int
    grid: TileGrid

    def of(self, flat: Tensor, first: int) -> Tensor:
        """Return this piece of `flat` as a view [rows, tiles, width]. flat: the tensor's elements from `first` on."""
        shape, strides = (self.rows, self.tiles, self.width), (self.grid.columns, self.width, 1)
        return flat.as_strided(shape, strides, flat.storage_offset() + self.start - first)

    def bands(self, like: Tensor) -> Tensor:
        """Return [rows]: the row of tiles that each row of elements lies in."""
        return torch.arange(self.row, self.row + self.rows, device=like.device) // self.grid.tall

    def beside(self, scales: Tensor) -> Tensor:
        """Return a view [rows of tiles, tiles] of the scales of this piece's columns of tiles, in all rows of tiles."""
        return scales.view(-1, self.grid.across)[:, self.tile : self.tile + self.tiles]


TILES = {"tensor": None, "1x128": (1, 128), "128x128": (128, 128)}  # Precision.scaling: rows and columns of a tile


def grids(bucket: BucketPlan, scaling: str) -> list[TileGrid]:
    """Return the tiles of each tensor of a bucket, as one rank has it.

    Experts are stacked on the first dimension, and each counts as a tensor of its own: so they have the same scales
    however many of them a rank holds.
    """
    return [grid(s.shape, scaling, stacked=bool(bucket.axis) and s.cut is None) for s in bucket.slots]


def grid(shape: Sequence[int], scaling: str, *, stacked: bool = False) -> TileGrid:
    """Return the tiles of a tensor: its last dimension counts columns, all others rows.

    stacked: True if a tensor of three dimensions or more is a stack of tensors, each with one scale.
    """
    tile, numel = TILES[scaling], math.prod(shape)
    if tile is None and numel and stacked and len(shape) > 2:
        return TileGrid(shape[0], numel // shape[0], 1, numel // shape[0])
    if tile is None or not numel:
        return TileGrid(1, max(numel, 1), 1, max(numel, 1))
    columns = shape[-1] if shape else 1
    return TileGrid(numel // columns, columns, *tile)


@twin
def magnitudes(masters: Tensor, tiles: TileGrid, first: int) -> Tensor:
    """Return the bits of each tile's largest magnitude, int32. masters: the tensor's, from element `first` on."""
    bits = torch.zeros(tiles.number, dtype=torch.int32, device=masters.device)
    for piece in () if simulated(masters) else tiles.pieces(first, masters.numel(), chunk(masters)):
        most = piece.of(masters, first).abs().amax(2).view(torch.int32)  # magnitudes compare like their bits
        piece.beside(bits).scatter_reduce_(0, piece.bands(bits)[:, None].expand_as(most), most, "amax")
    return bits


def scales_of(masters: Tensor, tiles: TileGrid, first: int = 0) -> Tensor:
    """Return each tile's scale, uint8, from the tensor's masters from element `first` on; the least for other tiles."""
    bits = magnitudes(masters, tiles, first)
    found = (((bits.clamp(max=_INFINITE) + _CARRY) >> _MANTISSA) - 8).clamp(min=1)
    return torch.where(bits >= _INFINITE, NO_NUMBER, found).to(BYTE)


def as_fp32(scales: Tensor) -> Tensor:
    """Convert scales from bytes to the fp32 numbers that they stand for: 2^e, and NaN for `NO_NUMBER`."""
    exponents = scales.to(torch.int32)
    return ((exponents << _MANTISSA) | (exponents == NO_NUMBER).to(torch.int32) << _MANTISSA - 1).view(torch.float32)


@twin
def quantise_(raw: Tensor, masters: Tensor, scales: Tensor, tiles: TileGrid, first: int = 0) -> None:
    """Set raw = fp8(masters / scale), as bytes. Both are 1-D, from element `first` on; scales: fp32, of all tiles."""
    for piece in () if simulated(raw) else tiles.pieces(first, raw.numel(), chunk(raw)):
        by = piece.beside(scales)[piece.bands(scales)].unsqueeze(2)
        piece.of(raw, first).copy_((piece.of(masters, first) / by).to(FORMAT).view(BYTE))


def _numbers(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers that all 256 bytes stand for: a lookup is several times faster than torch's cast, and has its
    bits."""
    every = torch.arange(256, dtype=BYTE, device=scale.device)
    return (every.view(FORMAT).to(torch.float32) * scale).to(dtype)


def dequantised(
    raw: Tensor, scales: Tensor, tiles: TileGrid, dtype: torch.dtype, first: int = 0
) -> Iterator[tuple[slice, Tensor]]:
    """Yield (slice of `raw`, the numbers its bytes stand for), chunk by chunk, in memory of their own."""
    one = tiles.number == 1
    numbers = _numbers(scales[0], dtype) if one else _numbers(torch.ones_like(scales[0]), torch.float32)
    step = chunk(raw)
    for at in range(0, 0 if simulated(raw) else raw.numel(), step):
        found = numbers.index_select(0, raw[at : at + step].to(torch.int32))
        for piece in () if one else tiles.pieces(first + at, found.numel(), step):
            piece.of(found, first + at).mul_(piece.beside(scales)[piece.bands(scales)].unsqueeze(2))
        yield slice(at, at + found.numel()), found.to(dtype)


@twin
def dequantise_(values: Tensor, raw: Tensor, scales: Tensor, tiles: TileGrid) -> None:
    """Set values = the numbers that the bytes stand for; `raw` may be the last bytes of `values`' memory."""
    if tiles.number > 1:
        for where, found in dequantised(raw, scales, tiles, values.dtype):
            values[where] = found
        return
    numbers, numel = _numbers(scales[0], values.dtype), 0 if simulated(raw) else raw.numel()
    step = chunk(raw)
    places = blank(min(numel, step), torch.int32, raw.device)
    for at in range(0, numel, step):
        part = raw[at : at + step]
        found = places[: part.numel()].copy_(part)  # then the bytes may be overwritten
        torch.index_select(numbers, 0, found, out=values[at : at + step])
