"""Tensors that are never cut: how evenly their owners hold and work, and how many replicas leave no rank idle."""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import NamedTuple

from ..layout.balance import work
from ..layout.partition import Partition
from . import states


class Balance(NamedTuple):
    """The balance of tensors that are never cut over a team of ranks.

    tensors: how many are never cut; of a stack of matrices each. idle: ranks that own none of them. elements:
    parameters that the fullest rank owns, over the mean. work: multiplications of the busiest rank's optimizer for
    these tensors, over the mean. replicas: the fewest with which no rank is idle.
    """

    tensors: int
    ranks: int
    idle: int
    elements: float
    work: float
    replicas: int

    def said(self) -> list[str]:
        """Describe the balance, for a plan's notes."""
        notes = [
            f"never cut: {self.tensors:,} tensors, over {self.ranks:,} ranks; the fullest rank holds "
            f"{self.elements:.2f} of the mean, the busiest has {self.work:.2f} of the mean work on matrices"
        ]
        if self.idle:
            notes.append(
                f"{self.idle:,} of {self.ranks:,} ranks own no such tensor and wait while others update theirs: "
                f"--replicas {self.replicas}, Comm(replicas={self.replicas}), leaves none without"
            )
        return notes


def balance(partition: Partition, replicas: int = 1) -> Balance | None:
    """Measure the balance of a team, without experts; None if every tensor may be cut. replicas: how many teams."""
    works, tensors = [0] * partition.ranks, 0
    for bucket in (bucket for bucket in partition.buckets if not bucket.axis):
        for slot in (slot for slot in bucket.slots if slot.numel and (bucket.whole or slot.matrix)):
            for start in range(slot.start, slot.stop, math.prod(slot.together)):
                works[bisect_right(bucket.bounds, start) - 1] += work(slot.together)
                tensors += 1
    if not tensors:
        return None
    held = [each.numel for each in states.owned(partition)]
    everyone = partition.ranks * replicas
    fewest = next(k for k in range(replicas, everyone + 1) if everyone % k == 0 and everyone // k <= tensors)

    def unevenness(each: list[int]) -> float:
        return max(each) * len(each) / sum(each)

    return Balance(tensors, partition.ranks, works.count(0), unevenness(held), unevenness(works), fewest)
