"""Step: the engine's own arithmetic on the device and on the CPU, bit by bit.

What is equal here may be said to have the same bits on both. Subnormal numbers, and infinities and what is no number,
have rows of their own; a NaN equals a NaN, whatever else its bits say.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zeroshard.arithmetic import exact_norms, fp8, int8, split_bits, sums
from zeroshard.cli import reference
from zeroshard.kernels import fused
from zeroshard.layout.partition import Spec, partition
from zeroshard.policies.layout import Layout

from .place import compiler_of
from .record import Record, Wrong, each

RANKS = 17  # numbers of contributions, of which 3, 6 and 12 are no powers of two
NUMEL = 128 * 300
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def run(record: Record) -> None:
    record.ranks("on the device as on the CPU", 1, compared)
    record.ranks("kernels of our own as torch's operations", 1, kernels)


def kernels(kind: str) -> dict[str, str]:
    """Compile them as `ZEROSHARD_KERNELS=1` does, and compare each."""
    compiler_of(kind)
    place = torch.empty(0, device=kind).device
    made = fused.build(place)
    made.compare(place)
    return {
        name: "" if name not in made.refused else "its bits are not those of torch's operations"
        for name in sorted(fused.text()[1])
    }


def numbers(which: str, count: int = NUMEL, seed: int = 0) -> Tensor:
    """fp32 on the CPU: "usual" of many magnitudes, "subnormal", or "special", which has infinities, NaNs and zeros."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(count, generator=generator)
    if which == "usual":
        return drawn * torch.exp2(torch.randint(-12, 12, (count,), generator=generator).float())
    if which == "subnormal":
        return drawn * 2.0**-133
    bits = torch.tensor([0x7F800000, -0x800000, 0x7FC00001, 0x7F800001, -0x3FFFFF, -0x80000000, 0, 0x7F7FFFFF, 1])
    drawn[::7] = bits.to(torch.int32).view(torch.float32)[torch.arange(len(drawn[::7])) % len(bits)]
    return drawn


def compared(kind: str) -> dict[str, str]:
    cases: dict[str, Callable[[], None]] = {}
    for which in ("usual", "subnormal", "special"):
        for name, call in _operations(which).items():
            cases[f"{name}, {which} numbers"] = partial(_compare, kind, call)
    cases["quotients by 1 to 4,096, of a number in a tensor"] = partial(_compare, kind, _quotients)
    return each(cases)


def _compare(kind: str, call: Callable[[Callable[..., Tensor]], dict[str, Tensor]]) -> None:
    """call: makes named results of tensors that it puts on a device by what it is given."""
    want, got = call(lambda tensor: tensor.clone()), call(lambda tensor: tensor.to(kind))
    for name, tensor in want.items():
        if found := reference.first_unequal(got[name].cpu(), tensor):
            at, mine, theirs, count = found
            raise Wrong(f"{name}: {count}, first at {at}: {mine} on {kind}, {theirs} on the CPU")


def _operations(which: str) -> dict[str, Callable[..., dict[str, Tensor]]]:
    found: dict[str, Callable[..., dict[str, Tensor]]] = {}
    for name, dtype in DTYPES.items():
        found[f"sums and averages of {name}"] = partial(_folds, which, dtype)
        found[f"a cast to {name} and back"] = partial(_casts, which, dtype)
    found["norms"] = partial(_norms, which)
    found["masters that are split and joined"] = partial(_split, which)
    found["masters that follow an edit"] = partial(_reseed, which)
    if which == "usual":
        found["weights of 8 bits"] = _fp8
        found["gradients as codes of 8 bits"] = _int8
    return found


def _folds(which: str, dtype: torch.dtype, put: Any) -> dict[str, Tensor]:
    found, pieces = {}, [numbers(which, seed=seed).to(dtype) for seed in range(RANKS)]
    for ranks in range(1, RANKS + 1):
        there = [put(piece) for piece in pieces[:ranks]]
        total, more = put(torch.zeros(NUMEL)), put(numbers("usual", seed=99))
        sums.fold(total, there, start=None, over=ranks)
        sums.fold(more, there, start=more, times=ranks, over=ranks)
        found[f"average of {ranks}"], found[f"average of {ranks} and more"] = total, more
    return found


def _casts(which: str, dtype: torch.dtype, put: Any) -> dict[str, Tensor]:
    low = put(numbers(which)).to(dtype)
    return {"cast": low, "back": low.float()}


def _norms(which: str, put: Any) -> dict[str, Tensor]:
    found, device = {}, put(torch.zeros(1)).device
    blocks = exact_norms.BlockMap(NUMEL, 128, [(0, 0, 20_001), (1, 20_096, NUMEL - 5)], device)
    for order in (1.0, 2.0, 3.0, math.inf):
        for ranks in (1, 3, 8):
            found[f"order {order} of the average of {ranks}"] = exact_norms.block_sums(
                put(numbers(which)), blocks, ranks, order
            )
    return found


def _split(which: str, put: Any) -> dict[str, Tensor]:
    master = put(numbers(which))
    lower, ties = put(torch.empty(NUMEL, dtype=torch.int16)), put(torch.empty(NUMEL // 8, dtype=torch.uint8))
    split_bits.split_(master, lower, ties)
    joined = put(torch.empty(NUMEL))
    split_bits.join_(joined, master.bfloat16(), lower, ties)
    return {"lower": lower, "ties": ties, "joined": joined}


def _reseed(which: str, put: Any) -> dict[str, Tensor]:
    master, seen = put(numbers(which)), put(numbers(which).bfloat16())
    seen[77::5000] = 2.0
    sums.reseed_(master, seen)
    return {"master": master}


def _fp8(put: Any) -> dict[str, Tensor]:
    values, found = numbers("usual", 384 * 100), {}
    for scaling in ("tensor", "128x128"):
        tiles = fp8.grid((384, 100), scaling)  # type: ignore[arg-type]
        there = put(values)
        scales = fp8.scales_of(there, tiles)
        raw, back = put(torch.empty(len(values), dtype=torch.uint8)), put(torch.empty(len(values)))
        fp8.quantise_(raw, there, fp8.as_fp32(scales), tiles)
        fp8.dequantise_(back, raw, fp8.as_fp32(scales), tiles)
        found |= {f"scales by {scaling}": scales, f"codes by {scaling}": raw, f"numbers by {scaling}": back}
    return found


def _int8(put: Any) -> dict[str, Tensor]:
    (bucket,) = partition([Spec("w", (300, 128), "float32", 4, 0, True)], Layout(bucket_mib=64), 1).buckets
    message = put(torch.zeros(int8.nbytes(bucket.numel), dtype=torch.uint8))
    int8.encode_(message, put(numbers("usual", bucket.numel)), bucket)
    return {"message": message}


def _quotients(put: Any) -> dict[str, Tensor]:
    """By a Python number CUDA multiplies by the rounded reciprocal: by a tensor it divides."""
    return {
        f"by {by}": put(numbers("usual")).div_(put(torch.tensor(float(by)))) for by in (3, 5, 6, 7, 12, 24, 1000, 4096)
    }
