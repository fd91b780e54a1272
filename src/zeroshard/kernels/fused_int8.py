"""The kernels of gradients as codes of 8 bits: making them, and sums that read them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor

from ..arithmetic import int8
from ..arithmetic.kernel_dispatch import DECLINED
from ..layout.partition import BLOCK
from .fusion import COUNT, STARTS, WARP, WORDS, Case, Function, Kernels, fold_cases, fold_line, fold_name, numbers

_FOLDS = [(total, start, int8.Coded.kernel_word) for total, start in STARTS]


class CodeKernels(Kernels):
    text = "fused_int8.cu"
    names = ("encode_", *(fold_name(*kinds) for kinds in _FOLDS))
    lines = tuple(fold_line(*kinds) for kinds in _FOLDS)
    twins = (int8.encode_blocks,)

    def encode_blocks(self, rows: Tensor, values: Tensor, seeds: Tensor, places: Tensor) -> Any:
        dtypes = [int8.BYTE, torch.float32, torch.int32, torch.int32]
        if not self.takes("encode_", [rows, values, seeds, places], dtypes):
            return DECLINED
        self.run("encode_", rows.shape[0] * WARP, rows, values, seeds, places, rows.shape[0])
        return None

    @staticmethod
    def cases(device: torch.device) -> Iterator[Case]:
        dtypes = {word: dtype for dtype, word in WORDS.items()}

        def made(word: str, seed: int) -> Any:
            if word in dtypes:
                return numbers(COUNT, device, seed).to(dtypes[word])
            (rows,) = _coded(device, seed, unwrap(int8.encode_blocks))
            rows[BLOCK // 4, 5] = 0x80  # no valid code beside a positive scale, but read like any other
            return int8.Coded(rows.view(-1))

        yield Case(["encode_"], int8.encode_blocks, partial(_coded, device, 7))
        yield from fold_cases(_FOLDS, made)


def _coded(device: torch.device, seed: int, call: Function) -> list[Tensor]:
    rows = torch.zeros(COUNT // BLOCK, int8.BYTES, dtype=int8.BYTE, device=device)
    values = numbers(COUNT, device, seed).view(-1, BLOCK)
    seeds = torch.arange(rows.shape[0], dtype=torch.int32, device=rows.device).mul_(0x3C6EF372)[:, None]
    places = torch.arange(BLOCK, dtype=torch.int32, device=rows.device).mul_(0x1E3779B9)
    call(rows, values, seeds, places)
    return [rows]


KERNELS = CodeKernels
