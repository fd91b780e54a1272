"""`Offload("auto")`: `shard` chooses where states rest, by what memory there is (`choosing.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..hooks import Feature

if TYPE_CHECKING:
    import torch

    from ..engine.build.assembly import Assembly
    from ..policies.offload import Offload


class _Automatic(Feature):
    name = "tiers that shard chooses"
    page = "offload.md#chosen-by-shard"

    # The planner is loaded where it is asked for, and not by each `shard`.

    def budgets(self, assembly: Assembly) -> dict[str, Any] | None:
        if not assembly.offload.automatic:
            return None
        from ..planner.choosing import budgets

        return budgets(assembly)

    def offload(
        self, assembly: Assembly, optimizers: Sequence[torch.optim.Optimizer], told: Sequence[dict[str, Any]]
    ) -> Offload | None:
        if not assembly.offload.automatic:
            return None
        from ..planner.choosing import chosen

        return chosen(assembly, optimizers, told)


FEATURE = _Automatic()
