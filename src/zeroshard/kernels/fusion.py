"""The form of all kernels: how they are asked for and launched, and what they are compared on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..arithmetic.sums import LOW, fold, simulated
from ..device import Launcher
from ..layout.partition import BLOCK

LIMIT = 1 << 30  # elements: the kernels count in 32 bits
WARP = 32
COUNT = BLOCK * 40  # numbers that each kernel is compared on
WORDS = {torch.float32: "float", torch.float64: "double", torch.bfloat16: "bf16", torch.float16: "fp16"}
READ = (torch.float32, *LOW)
Function = Callable[..., Any]


class Case(NamedTuple):
    """kernels: those that a call launches. twin: what they stand in for. made: runs a function, returns its results."""

    kernels: list[str]
    twin: Function
    made: Callable[[Function], list[Tensor]]


class Kernels:
    """The kernels of one source. A method named like a twin takes the twin's arguments, and may return DECLINED."""

    text = ""  # the file of their text, in this folder
    lines: Sequence[str] = ()  # macros that define some
    names: Sequence[str] = ()
    twins: Sequence[Function] = ()

    def __init__(self, launch: Launcher, usable: set[str]) -> None:
        """launch: takes a kernel's name, its number of threads, its arguments, and how many of these it writes.

        usable: the names of kernels, of all texts, that were compiled and have not been refused.
        """
        self._launch, self.usable = launch, usable

    @staticmethod
    def cases(device: torch.device) -> Iterator[Case]:
        """Yield calls that use each kernel, on numbers of all kinds."""
        yield from ()

    def run(self, name: str, threads: int, *args: Any, writes: int = 1) -> None:
        self._launch(name, threads, args, writes)

    def takes(self, name: str, tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype] = ()) -> bool:
        """Tell if a kernel may be used, and can read these tensors as runs of numbers of these dtypes, if given."""
        device = tensors[0].device
        return (
            name in self.usable
            and not simulated(tensors[0])
            and all(each.device == device and each.numel() < LIMIT and each.is_contiguous() for each in tensors)
            and (not dtypes or [each.dtype for each in tensors] == [*dtypes])
        )


def fold_name(total: str, start: str, piece: str) -> str:
    """Return the name of a sum's kernel, from the words for the dtypes of the sum, its start and its contributions."""
    return f"fold_{total}_{start}_{piece}"


def fold_line(total: str, start: str, piece: str) -> str:
    return f"FOLD({fold_name(total, start, piece)}, {total}, {start}, {piece})"


# 16-bit numbers are summed in fp32: if contributions take several launches, the first sums are in fp32.
STARTS = [("float", "float"), *((low, at) for low in ("bf16", "fp16") for at in (low, "float"))]
STARTS += [("float", "bf16"), ("float", "fp16")]
FOLDS = [(total, start, piece) for total, start in STARTS for piece in ("float", "bf16", "fp16")]
FOLDS += [("double", "double", "double")]


def fold_cases(folds: Sequence[tuple[str, str, str]], made: Callable[[str, int], Any]) -> Iterator[Case]:
    """Yield calls of these sums. made: makes numbers, from a dtype's word and a seed."""
    for how in ((1, False, 1, 1), (3, False, 1, 3), (2, True, 4, 4), (11, True, 3, 6), (10, False, 1, 5)):
        for kinds in folds:  # the last two take two launches
            yield Case([fold_name(*kinds)], fold, partial(_folded, kinds, how, made))


def _folded(kinds: tuple[str, str, str], how: tuple[int, bool, int, int], made: Any, call: Function) -> list[Tensor]:
    pieces, begun, times, over = how
    total, start = made(kinds[0], 0), made(kinds[1], 1)
    sent = [made(kinds[2], 2 + number) for number in range(pieces)]
    if begun and kinds[0] == kinds[1]:
        start = total  # like a sum that continues where it rests
    if not begun and kinds[0] == kinds[2]:
        sent[-1] = total  # as a contribution that lies where the sum will
    call(total, sent, start=start if begun else None, times=times, over=over)
    return [total]


@functools.lru_cache(maxsize=64)
def _drawn(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(count, generator=generator, dtype=torch.float32, device="cpu")
    drawn *= torch.exp2(torch.randint(-20, 12, (count,), generator=generator, device="cpu").to(torch.float32))
    drawn[::5] *= 2.0**-127
    bits = [0x7F800000, -0x800000, 0x7FC00001, -0x3FFFFF, -0x80000000, 0, 0x7F7FFFFF, 1, 0x3F808000, 0x3F818000]
    special = torch.tensor(bits, dtype=torch.int32, device="cpu").view(torch.float32).roll(seed)
    places = drawn[: count // 2 : 131]
    places.copy_(special.repeat(len(places) // len(bits) + 1)[: len(places)])
    return drawn


def numbers(count: int, device: torch.device, seed: int) -> Tensor:
    """Return fp32 of many magnitudes, of which some are subnormal, infinite, halfway between two bfloat16, or NaN."""
    return _drawn(count, seed).to(device, copy=True)
