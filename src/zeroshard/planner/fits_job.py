"""What fits, of a job: the search of `fitting` over the engine's own layout, with what the job's micro-batch keeps.

The layout is that of a simulated run at the highest stage, so units, ties, frozen parameters and whole tensors are the
job's. Activations are not a formula's: the micro-batch is simulated as it is and with every unit recomputed, in the
formats of the job and, where numbers of 16 bits are looked at, once more in these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ..errors import Error
from ..layout.partition import Partition, Spec
from ..layout.stage import STAGES
from ..policies.layout import Layout
from ..policies.precision import Precision
from . import formats
from .asked import Asked
from .fitting import Fitting, fitting
from .from_shapes import LaidOut
from .simulate import Simulation
from .transformer import Held

HALF = 2  # bytes


class Measured(NamedTuple):
    """What a micro-batch of a job keeps. of: {(bytes of an element, is each unit recomputed?): its two sizes}."""

    layers: int  # units that rest in pieces: all but the root
    of: Mapping[tuple[int, bool], tuple[int, int]]  # kept for backward, and the most at once; bytes

    def held(self, tokens: int, *, itemsize: float, recompute: bool, moved: bool) -> Held:
        """Return what it holds at most. moved: does all but the last of the layers' share rest in another tier?"""
        width = HALF if (HALF, recompute) in self.of and itemsize <= HALF else max(each for each, _ in self.of)
        kept, most = self.of[width, recompute]
        away = kept * (self.layers - 1) // self.layers if moved else 0
        here = kept * max(self.layers - 2, 0) // self.layers if moved else 0  # one more is on its way
        return Held(kept - away, most - here, away)


def fits_job(run: Callable[..., Simulation], asked: Asked) -> Fitting:
    """Search for what fits. run: simulates a rank, as (stage, rank, **settings of `simulate`).

    Raises `UserError` for a model or optimizers of which the search knows no recipe.
    """
    one = run(max(STAGES), 0)
    zero = one.zero
    precision = asked.precision or Precision()
    recipe = formats.of_model(
        [torch_dtype(bucket.dtype) for bucket in zero.partition.buckets if bucket.trainable],
        [type(optimizer).__name__ for optimizer, *_ in zero._engine.optimizer_members()],
        precision, asked.comm, along=bool(asked.experts), who="it",
        instead="what each stage takes as it is, above",
    )  # fmt: skip
    specs, own = [*specs_of_partition(zero.partition, zero._engine.layout)], round(recipe.parameters)
    names = [unit.name or "the root" for unit in zero._engine.units]
    body = Measured(max(len(names) - 1, 1), dict(_measured(run, one, asked, own)))

    def specs_of(question: Asked) -> list[Spec]:
        itemsize = max(round(question.recipe.parameters), 1)
        return [_as_wide(spec, itemsize) if itemsize != own and spec.trainable else spec for spec in specs]

    several = {unit.index for unit in zero._engine.units if unit.joined}
    numel = sum(spec.numel for spec in specs)
    question = asked._replace(
        recipe=recipe, layout=asked.layout.on(accelerator=True), accelerator=True, offload=None,
        precision=None if precision == Precision() else precision,
    )  # fmt: skip
    tokens = max(one.flops // (6 * numel * asked.accumulate), 1)
    return fitting(question, numel, LaidOut(specs_of, names, body, several), tokens)


def torch_dtype(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name.removeprefix("torch."))
    return found


def specs_of_partition(laid_out: Partition, layout: Layout) -> Iterator[Spec]:
    """Yield the facts of each parameter, from which `partition` makes the same layout, for any number of ranks."""
    for bucket in laid_out.buckets:
        block = 1 if bucket.block == layout.base else bucket.block  # else a short tensor would be kept whole
        for slot in bucket.slots:
            yield Spec(
                slot.name, slot.shape, bucket.dtype, bucket.itemsize, bucket.unit, bucket.trainable, bucket.axis,
                bucket.kept, block, slot.cut, bucket.fp8, slot.matrix,
            )  # fmt: skip


def _as_wide(spec: Spec, itemsize: int) -> Spec:
    return spec._replace(dtype=f"float{8 * itemsize}", itemsize=itemsize)


def _measured(
    run: Callable[..., Simulation], one: Simulation, asked: Asked, own: int
) -> Iterator[tuple[tuple[int, bool], tuple[int, int]]]:
    """Yield what a micro-batch keeps, in the job's own formats and in those of 16 bits that it can be cast to."""
    narrow = replace(asked.precision or Precision(), param_dtype=torch.bfloat16, cast_inputs=True)
    kinds: dict[int, dict[str, Any]] = {own: {}} | ({} if own <= HALF else {HALF: {"precision": narrow}})
    for itemsize, formats_ in kinds.items():
        for recompute in (False, True):
            layout = replace(asked.layout, recompute=recompute)
            try:
                found = run(max(STAGES), 0, layout=layout, offload=None, **formats_)
            except Error:
                if itemsize == own:
                    raise
                return  # it has no forward in 16 bits: what it keeps in its own stands for that
            yield (itemsize, recompute), (found.activations, found.working)
