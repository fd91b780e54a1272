"""Kernels that do a sum, a norm or a format in one or two launches instead of many of torch's operations.

Their source is `fused.cu`; features have sources of their own. A kernel replaces its twin
(`arithmetic/kernel_dispatch.py`) only on a device on which both gave the same bits, for numbers of all magnitudes,
subnormals, infinities and NaN. Kernels are compiled and compared when the first model is sharded, before messages are
under way. One that differs is not used, and the log says so.

They have not run on a GPU yet, so they are off: ZEROSHARD_KERNELS=1 turns them on.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from inspect import unwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..arithmetic.exact_norms import BlockMap, add_to_bins, block_sums, empty_bins
from ..arithmetic.kernel_dispatch import DECLINED, stand_ins
from ..arithmetic.sums import fold, running_dtype, same_bits, simulated
from ..device import Launcher, architecture, asynchronous, blank, chunk, compiled
from ..errors import UserError
from ..hooks import Feature, features
from ..layout.partition import BLOCK
from .fusion import COUNT, FOLDS, READ, WARP, WORDS, Case, Function, Kernels, fold_cases, fold_line, fold_name, numbers

if TYPE_CHECKING:
    from ..engine.build.assembly import Assembly
    from ..engine.engine import Engine

log = logging.getLogger("zeroshard")
VARIABLE = "ZEROSHARD_KERNELS"
RAN: frozenset[str] = frozenset()  # architectures on which `make gpu` has passed with them: there they are on
_MOST = 8  # contributions that one launch adds
_FIRST = ("float", "bf16", "fp16")
_devices: set[torch.device] = set()  # those on which kernels were compared, or could not be


class SumKernels(Kernels):
    """Sums of contributions; squares of blocks, and exact sums of these, for norms."""

    text = "fused.cu"
    names = (
        *(fold_name(*kinds) for kinds in FOLDS),
        *(f"squares_{word}{some}" for word in _FIRST for some in ("", "_some")),
        "add_to_bins",
    )
    lines = (
        *(fold_line(*kinds) for kinds in FOLDS),
        *(f"SQUARES(squares_{word}, {word})" for word in _FIRST),
    )
    twins = (fold, block_sums, add_to_bins)

    def fold(self, total: Tensor, pieces: Sequence[Any], *, start: Tensor | None, times: int = 1, over: int = 1) -> Any:
        """pieces: tensors, or objects with their bytes in `raw` and, in `kernel_word`, how to read them."""
        words = {getattr(each, "kernel_word", None) or WORDS.get(each.dtype, "") for each in pieces}
        read = [getattr(each, "raw", each) for each in pieces]
        rounds = [read[at : at + _MOST] for at in range(0, len(read), _MOST)]
        running, dtype = total, running_dtype(total.dtype)
        if len(rounds) > 1 and (dtype != total.dtype or any(each.data_ptr() == total.data_ptr() for each in read)):
            if total.numel() > chunk(total):
                return DECLINED  # scratch is no larger than that
            running = blank(total.numel(), dtype, total.device)
        targets, begins = ([*[running] * (len(rounds) - 1), total], [start, *[running] * (len(rounds) - 1)])
        names = [
            fold_name(WORDS.get(to.dtype, ""), WORDS.get((to if of is None else of).dtype, ""), "".join(words))
            for to, of in zip(targets, begins, strict=True)
        ]
        tensors = [total, *read, *([] if start is None else [start])]
        if not all(self.takes(name, tensors) for name in names):
            return DECLINED
        for number, (name, into, begin, some) in enumerate(zip(names, targets, begins, rounds, strict=True)):
            self.run(
                name, total.numel(),
                into, into if begin is None else begin, *some, *[some[0]] * (_MOST - len(some)),
                total.numel(), len(some), int(begin is not None),
                times if number == 0 else 1, over if number == len(rounds) - 1 else 1,
            )  # fmt: skip
        return None

    def block_sums(self, shard: Tensor, blocks: BlockMap, ranks: int, order: float) -> Any:
        name = f"squares_{WORDS.get(shard.dtype)}"
        known = order == 2.0 and blocks.size == BLOCK and blocks.count * BLOCK == shard.numel() and shard.dtype in READ
        if not known or not self.takes(name, [shard]):
            return DECLINED
        sums = blank(blocks.count, torch.float32, shard.device)
        self.run(name, blocks.count * WARP, sums, shard, blocks.count, ranks)
        if some := blocks.partial.numel():
            self.run(f"{name}_some", some * WARP, sums, shard, blocks.partial, blocks.hidden, some, ranks)
        return sums if blocks.dense else sums[blocks.used]

    def add_to_bins(self, tally: Tensor, owner: Tensor, sums: Tensor) -> Any:
        if not self.takes("add_to_bins", [tally, owner, sums], [torch.int64, torch.int64, torch.float32]):
            return DECLINED
        self.run("add_to_bins", len(sums), tally, owner, sums, len(sums), tally.shape[1])
        return None

    @staticmethod
    def cases(device: torch.device) -> Iterator[Case]:
        dtypes = {word: dtype for dtype, word in WORDS.items()}
        yield from fold_cases(FOLDS, lambda word, seed: numbers(COUNT, device, seed).to(dtypes[word]))
        for dtype in READ:
            name = f"squares_{WORDS[dtype]}"
            for ranks in (1, 3, 4):
                yield Case([name], block_sums, partial(_summed, dtype, ranks, True, device))
                yield Case([name, f"{name}_some"], block_sums, partial(_summed, dtype, ranks, False, device))
        yield Case(["add_to_bins"], add_to_bins, partial(_binned, device))


def _summed(dtype: torch.dtype, ranks: int, dense: bool, device: torch.device, call: Function) -> list[Tensor]:
    spans = [(0, 0, COUNT)] if dense else [(0, 0, 1001), (1, 1152, COUNT - 700)]
    return [call(numbers(COUNT, device, 3).to(dtype), BlockMap(COUNT, BLOCK, spans, device), ranks, 2.0)]


def _binned(device: torch.device, call: Function) -> list[Tensor]:
    tally, owner = empty_bins(3, device), torch.arange(COUNT, dtype=torch.int64, device=device) % 3
    call(tally, owner, numbers(COUNT, device, 4).abs())
    return [tally]


# --- the comparison ---------------------------------------------------------------------------------------------------


def _equal(got: Tensor, want: Tensor) -> bool:
    """Compare bit by bit; all NaNs count as equal."""
    if got.is_floating_point():
        got, want = (torch.where(each.isnan(), torch.nan, each) for each in (got, want))
    return same_bits(got, want)


class Fused:
    """All kernels of a device."""

    def __init__(self, launch: Launcher, names: Iterable[str]) -> None:
        self.refused: set[str] = set()  # those whose bits are not their twins'
        self._usable = {*names}
        self._kinds = [kind(launch, self._usable) for kind in every()]
        self.stand_ins = {twin.__name__: getattr(kind, twin.__name__) for kind in self._kinds for twin in kind.twins}

    def compare(self, device: torch.device) -> None:
        """Refuse the kernels that do not have their twins' bits."""
        for names, twin, made in self.cases(device):
            if self._usable.issuperset(names):
                own = unwrap(twin)
                got, want = made(partial(self._stood_in, own)), made(own)
                if not all(map(_equal, got, want)):
                    self._usable.difference_update(names)
                    self.refused.update(names)

    def cases(self, device: torch.device) -> Iterator[Case]:
        for kind in self._kinds:
            yield from kind.cases(device)

    def _stood_in(self, twin: Function, *args: Any, **kwargs: Any) -> Any:
        found = self.stand_ins[twin.__name__](*args, **kwargs)
        if found is not DECLINED:
            return found
        assert self.refused, twin.__name__  # it needs another kernel, which was refused
        return twin(*args, **kwargs)


def every() -> list[type[Kernels]]:
    """Return the kernels of sums and norms, and those of features."""
    files = (feature.kernels for feature in features() if feature.kernels)
    return [SumKernels, *(importlib.import_module(f"{__package__}.{name}").KERNELS for name in files)]


def text() -> tuple[str, frozenset[str]]:
    """Return the text of all kernels, and their names."""
    kinds, folder = every(), Path(__file__).parent
    parts = [(folder / each.text).read_text() for each in kinds]
    lines = [line for each in kinds for line in each.lines]
    return "\n".join([*parts, *lines, ""]), frozenset(name for each in kinds for name in each.names)


def _told() -> str:
    told = os.environ.get(VARIABLE, "")
    if told not in ("", "0", "1"):
        raise UserError(
            f"the environment variable {VARIABLE} turns kernels on or off",
            expected='"0" or "1"',
            got=repr(told),
            instead=f"{VARIABLE}=1",
        )
    return told


def build(device: torch.device) -> Fused:
    """Compile all kernels for a device. Raises what `device.compiled` raises."""
    words, names = text()
    return Fused(compiled(words, sorted(names), device), names)


def _made(device: torch.device) -> Fused | None:
    """Compile and compare all kernels. None if that cannot be done, which the log says."""
    try:
        made = build(device)
        made.compare(device)
    except (RuntimeError, OSError, AttributeError) as error:  # no compiler, no memory, a torch without a loader
        log.warning("kernels are not used on %s, but torch's operations: %s", device, error)
        return None
    if made.refused:
        log.warning(
            "on %s these kernels are not used, since their bits are not those of torch's operations: %s",
            device,
            ", ".join(sorted(made.refused)),
        )
    return made


class FusedFeature(Feature):
    name = "fused kernels"
    page = "gpus.md"

    def check(self, assembly: Assembly, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        _told()

    def ready(self, engine: Engine) -> None:
        device, told = engine.group.device, _told()
        wanted = asynchronous(device) and (told == "1" or (not told and architecture(device) in RAN))
        if not wanted or device in _devices or simulated(torch.empty(0, device=device)):
            return
        _devices.add(device)
        if (made := _made(device)) is not None:
            stand_ins.update({(name, device): call for name, call in made.stand_ins.items()})


FEATURE = FusedFeature()
