"""Step: every stage on one device, with its states on it, in host memory and in files.

Where the device steps, the bits are plain torch's there, in every tier. Where the CPU steps what rests elsewhere, its
AdamW has other bits: those are stage 0's in the same tier.
"""

from __future__ import annotations

from functools import cache, partial

from zeroshard import Comm, Layout
from zeroshard.layout.stage import STAGES

from . import training
from .record import Record, each


def run(record: Record) -> None:
    for dtype in training.DTYPES:
        record.ranks(f"{dtype}, on the device as plain torch", 1, on_the_device, dtype)
        record.ranks(
            f"{dtype}, in other tiers as plain torch, or as stage 0 there", 1, elsewhere, dtype, record.place.full
        )


def on_the_device(kind: str, dtype: str) -> dict[str, str]:
    want = training.plain(kind, dtype, backwards=2)

    def trial(stage: int, overlap: bool, recompute: bool) -> None:
        layout = Layout(bucket_mib=0.02, recompute=recompute)
        got = training.sharded(kind, dtype, stage, 2, layout=layout, comm=Comm(overlap=overlap))
        training.compare(got, want)

    return each(
        {
            f"stage {stage}{', overlap' * overlap}{', recompute' * recompute}": partial(
                trial, stage, overlap, recompute
            )
            for stage in STAGES
            for overlap, recompute in ((True, False), (False, True))
        }
    )


def elsewhere(kind: str, dtype: str, all_stages: bool) -> dict[str, str]:
    """States beside the device, against plain PyTorch where the device steps, and against stage 0 where the host does.

    all_stages: a rehearsal takes stage 3 alone.
    """
    want = training.plain(kind, dtype)

    def there(stage: int, tier: str) -> None:
        training.compare(training.in_tier(kind, dtype, stage, tier), want)

    @cache
    def first(tier: str) -> training.Run:
        return training.in_tier(kind, dtype, 0, tier, step="host")

    def on_the_host(stage: int, tier: str) -> None:
        training.compare(training.in_tier(kind, dtype, stage, tier, step="host"), first(tier))

    stages = (1, 2, 3) if all_stages else (3,)
    return each(
        {
            f"stage {stage}, {tier}{name}": partial(trial, stage, tier)
            for name, trial in {"": there, ", stepped on the host": on_the_host}.items()
            for stage in stages
            for tier in ("cpu", "nvme")
        }
    )
