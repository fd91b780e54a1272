"""Step: 2, 3, 4 and 8 ranks, every stage, replicas and accumulation, against one process of plain torch."""

from __future__ import annotations

from functools import partial

from zeroshard import Comm
from zeroshard.layout.stage import STAGES

from . import training
from .record import Record, each

Case = tuple[int, int, int]  # stage, replicas, backwards


def run(record: Record) -> None:
    for world in record.place.worlds:
        full = record.place.kind == "cuda"
        for dtype in training.DTYPES:
            if full or (dtype == "bf16") == (world == 2):
                record.ranks(f"{world} ranks, {dtype}", world, trained, dtype, cases(world, full))


def cases(world: int, full: bool) -> list[Case]:
    """All; or every stage on two ranks, and of more ranks the last stage with what only they have."""
    copies = [count for count in (1, 2, 4) if world % count == 0]
    if full:
        return [(stage, count, backwards) for stage in STAGES for count in copies for backwards in (1, 3)]
    stages = STAGES if world == 2 else (3,)
    return [(stage, copies[-1] if world > 2 else 1, 2) for stage in stages]


def trained(kind: str, dtype: str, wanted: list[Case]) -> dict[str, str]:
    plain = {
        backwards: training.plain(kind, dtype, training.ranks.world(), backwards)
        for backwards in sorted({backwards for _, _, backwards in wanted})
    }

    def trial(stage: int, replicas: int, backwards: int) -> None:
        got = training.sharded(kind, dtype, stage, backwards, comm=Comm(replicas=replicas))
        training.compare(got, plain[backwards])

    return each({f"stage {s}, replicas {r}, {b} backwards": partial(trial, s, r, b) for s, r, b in wanted})
