"""Gathers in two levels: parts of a shard come together between hosts, and then shards inside each host.

The second level needs what the first one brings. On a device that queues collectives, a separate stream waits for that.
Elsewhere the program waits: all ranks launch second levels in the order of the first ones, and before anything later in
the group of gathers, so that this group has one order on all ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

from torch import Tensor

from ..comm.process_team import ProcessTeam
from ..comm.transport import Team, Work
from ..device import behind
from ..hooks import Feature
from ..layout.partition import BucketPlan

BETWEEN_HOSTS = "between hosts"  # a stream of the device


class Levels:
    """The second levels, of one group of gathers, that are not launched yet."""

    def __init__(self) -> None:
        self.waiting: deque[Later] = deque()
        self._settling = False

    def settle(self, last: Later | None = None) -> None:
        """Launch all that wait, or those up to `last`, in order. Each launch calls this again, without effect."""
        if self._settling:
            return
        self._settling = True
        try:
            while self.waiting and (last is None or last.waits):
                self.waiting[0].launch()
                self.waiting.popleft()
        finally:
            self._settling = False

    def drop(self) -> None:
        """Launch none of them any more: nothing that was under way will be used."""
        while self.waiting:
            self.waiting.popleft().waits = False


class Later(Work):
    """A gather's two levels: the first under way, the second launched after it."""

    def __init__(self, first: Work, launch: Callable[[], Work], levels: Levels | None = None) -> None:
        """levels: the second level is launched later, among these; None: at once, to come after the first."""
        super().__init__()
        self._first, self._launch, self._levels = first, launch, levels
        self._second = None if levels is not None else launch()
        self.waits = levels is not None
        if levels is not None:
            levels.waiting.append(self)

    def launch(self) -> None:
        self._first.wait()
        self._second, self.waits = self._launch(), False

    def done(self) -> bool:
        # The second level is not launched here: some ranks would ask, and others would never launch it.
        return not self.waits and (self._second is None or self._second.done())

    def wait(self) -> None:
        if self._levels is not None:
            self._levels.settle(self)
            assert not self.waits, "a gather is waited for inside the launch of another one"
        elif self._second is not None:
            self._first.wait()
        if self._second is not None:
            self._second.wait()
        super().wait()


class TwoLevelFeature(Feature):
    name = "hosts"
    page = "hosts.md"

    def gathers(self, team: Team) -> Callable[[Team, Tensor, BucketPlan, str], Work] | None:
        if not team.seat.hosts:
            return None
        streams = team.gathering if isinstance(team, ProcessTeam) and not team.queued else []
        levels = (streams[0].levels or Levels()) if streams else None
        for stream in streams:
            stream.levels = levels
        return partial(_gather, levels)


def _gather(levels: Levels | None, team: Team, full: Tensor, plan: BucketPlan, state: str) -> Work:
    """Gather, in place, a bucket of whose shards each rank has a part; `full` holds this rank's part."""
    first = team.column.share(full[slice(*plan.shard(team.position))], plan, state, gathers=True)

    def launch() -> Work:
        return team.gather(full, plan, state)

    if not team.queued:
        return Later(first, launch, levels)
    with behind(BETWEEN_HOSTS, team.device):
        first.wait()
        return launch()


FEATURE = TwoLevelFeature()
