"""What the ranks of an engine wait for and compare as they meet for a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..comm.agreement import Group
from ..engine.weights.bucket import Bucket
from .content import model_state
from .replicas import check_replicas
from .saving import Saving, wait_for_all_saves

if TYPE_CHECKING:
    from ..engine.engine import Engine


class Meeting:
    """The engine's `Checkpoints`: the engine gets one at construction, and imports nothing of this package."""

    def unfinished(self) -> int:
        """Count this rank's asynchronous saves that nobody has waited for."""
        return len(Saving.untold())

    def wait(self, group: Group) -> None:
        """Wait for these saves on all ranks. Raises `CheckpointError` on every rank if one was lost."""
        wait_for_all_saves(group)

    def compare(self, engine: Engine, buckets: Sequence[Bucket]) -> None:
        """Compare what several ranks hold of these buckets. Raises `PeerError` on every rank where they differ."""
        check_replicas(model_state(engine), buckets, engine.group.numbers["checkpoint"])
