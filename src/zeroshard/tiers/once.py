"""One copy of the parameters for all ranks of a host, which compute with it in place, as on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..errors import UserError
from ..events import SHARED, Ledger
from ..features import Feature
from ..ranks.transport import Team
from .tier import OnDevice, Rest, Tier


class OnceTier(Tier):
    """Memory that all ranks of a team read, and of which each owner writes its shard."""

    name = SHARED
    on_device = True

    def __init__(self, team: Team, ledger: Ledger) -> None:
        self._team = team
        self.device = team.device
        self.ledger = ledger

    def rest(self, state: str, bucket: int, numel: int, dtype: torch.dtype) -> Rest:
        rest = OnDevice(self._team.one_copy(bucket, numel, dtype))
        self.ledger.hold(state, numel * dtype.itemsize, SHARED)
        return rest


class _Manifest(Feature):
    name = "one copy per host"
    page = "offload.md"

    def check(self, assembly: Any, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Refuse it if several teams have parts of the parameters, or off the CPU."""
        if not assembly.offload.once:
            return
        group, buckets = assembly.group, assembly.partition.buckets
        apart = any(group.team_of(bucket) is not group.team for bucket in buckets)
        if apart or group.device.type != "cpu":
            parts = "parameters along an axis of the mesh" if apart else f"on {group.device}"
            raise UserError(
                "one copy of the parameters for a host is for the CPU, and for parameters that all ranks shard",
                got=f"Offload(parameters='shared'), {parts}",
                instead="Offload()",
            )

    def tier(self, name: str, assembly: Any, largest: dict[str, int], nbytes: int) -> OnceTier | None:
        return OnceTier(assembly.group.team, assembly.group.ledger) if name == SHARED else None


FEATURE = _Manifest()
