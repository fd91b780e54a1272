"""The verbs along the replicate axis: between the ranks of one position in all replicas, or hosts, a *column*.

    hand on      a shard's running sum to the next replica        broadcast between two ranks
    hand back    the average, from the last to all others         broadcast among the column
    exchange     parts of a shard, from all to the first, or      all_to_all_single among the column, in which only the
                 from the last to all                             first, or the last, receives, or sends
    share        each replica's part of a shard to the others     K broadcasts in place among the column

The backend's all-reduce fixes no order, and its order may change with the number of ranks: sums are handed on instead.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..layout.partition import BucketPlan
from ..layout.stage import Seat
from .collectives import Link, dtype_name, exchange
from .groups import Wanted
from .launch_log import Stream
from .process_team import ProcessTeam
from .transport import Team, Work, count

log = logging.getLogger("zeroshard")
_ONE_CONNECTION = "CUDA_DEVICE_MAX_CONNECTIONS"


def wanted(sits: Seat, ranks: int, backend: str) -> list[Wanted]:
    """List the process groups that a rank is in along the axis, in an order that is the same on every rank."""
    if sits.summed == 1:
        return []
    members = range(ranks)[sits.position :: sits.size]
    found = [Wanted("pair", backend, [members[at] for at in pair], sums=True) for pair in _pairs(sits)]
    found.append(Wanted("copies", backend, members, sums=True, exchanges=sits.by_part))
    found += [Wanted("starts", backend, members, sums=True, exchanges=True)] * sits.by_part
    return found + [Wanted("first", backend, members)] * sits.hosts


def _pairs(sits: Seat) -> list[list[int]]:
    """Return the pairs of neighbouring replicas that a rank is in, the pair that begins with an even one first.

    torch names a group by how many groups a process has, so all ranks make equally many: a rank without a pair makes
    a group of itself alone.
    """
    found = []
    for first in range(min(sits.replicas - 1, 2)):
        at = sits.replica - (sits.replica - first) % 2
        found.append([at, at + 1] if 0 <= at < sits.replicas - 1 else [sits.replica])
    return found


class Column:
    """One rank's handle on its column, and the counts of its bytes. Like `Team`, this class itself sends nothing."""

    def __init__(self, team: Team) -> None:
        self._of = weakref.ref(team)  # owns this one

    def share(self, shard: Tensor, plan: BucketPlan, state: str, *, gathers: bool = False) -> Work:
        """Share a 1-D shard between replicas in place: each replica's part of it arrives at all other replicas.

        gathers: this is a gather's first level, which may be under way at the same time as sums.
        """
        team = self._of()
        assert team is not None
        seat, wait, first = team.seat, team.wait, plan.shard(team.position)[0]
        cuts = [0, *((last - first) * shard.itemsize for _, last in plan.portions(seat))]
        nbytes, own = cuts[-1], cuts[seat.replica + 1] - cuts[seat.replica]
        sent, received = own * (seat.replicas - 1), nbytes - own
        event = count(team.ledger, seat.replicas, "share", nbytes, sent, received, state, plan.index)
        handles = self._share(shard.view(torch.uint8), cuts, gathers)
        return Work(handles, event, lambda handle: wait("share", plan.index, handle))

    def _share(self, raw: Tensor, cuts: Sequence[int], gathers: bool) -> list[Any]:
        return []

    def hand_on(self, running: Tensor, source: int) -> list[Any]:
        """Send the sum from the rank in replica `source` to the one in the next replica."""
        return []

    def hand_back(self, average: Tensor) -> list[Any]:
        """Send the average from the rank in the last replica to those in all others."""
        return []

    def exchange(self, shard: Tensor, part: Tensor, numels: Sequence[int], *, out: bool) -> list[Any]:
        """Send each replica's `part` of a shard to the first replica, which gets the whole `shard`.

        numels: the elements of each part. out: send each replica its part from the last one, which has the shard.
        """
        return []


class ProcessColumn(Column):
    """The verbs over `torch.distributed`."""

    def __init__(self, team: ProcessTeam, link: Link) -> None:
        super().__init__(team)
        named, sits = link.groups.named, team.seat
        self._link = link
        self._copies = link.groups.ranks[sits.position :: sits.size]  # by their number in the program
        (self._stream,) = named["copies"]
        (self._starts,) = named["starts"] or named["copies"]
        (self._firsts,) = named["first"] or named["copies"]
        # Keyed by the first of the two replicas.
        self._pairs = {each.members[0] // sits.size: each for each in named["pair"] if len(each.members) == 2}
        if team.queued and os.environ.get(_ONE_CONNECTION) == "1" and link.rank == 0:
            log.warning(
                "%s=1 puts kernels that wait for other replicas before those that these wait for", _ONE_CONNECTION
            )

    # A broadcast, and not a message: gloo breaks the connection when one has waited for a message for a while.
    def hand_on(self, running: Tensor, source: int) -> list[Any]:
        return self._hand(self._pairs[source], running, self._copies[source])

    def hand_back(self, average: Tensor) -> list[Any]:
        return self._hand(self._stream, average, self._copies[-1])

    def _hand(self, stream: Stream, tensor: Tensor, source: int) -> list[Any]:
        raw = tensor.view(torch.uint8)
        return [self._link.broadcast(stream, raw, source, (-1, "", raw.numel()), 0)]

    def _share(self, raw: Tensor, cuts: Sequence[int], gathers: bool) -> list[Any]:
        stream, what = self._firsts if gathers else self._stream, (-1, "", raw.numel())
        return [
            self._link.broadcast(stream, raw[low:high], source, what, low)
            for source, (low, high) in zip(self._copies, pairwise(cuts), strict=True)
            if high > low
        ]

    def exchange(self, shard: Tensor, part: Tensor, numels: Sequence[int], *, out: bool) -> list[Any]:
        link, stream = self._link, self._stream if out else self._starts
        what = "exchange", link.engine, -1, dtype_name(part.dtype), [*numels], out
        return [link.launch(stream, what, *exchange(stream, link.rank, shard, part, [*numels], out=out))]
