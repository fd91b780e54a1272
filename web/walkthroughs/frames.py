"""Gradient elements that a rank holds while backward goes through the model: arithmetic on a layout, no engine.

The frame-by-frame table of "ZeRO-2: A Concrete Walkthrough", with the column it leaves out. The text's peak counts
what stays; for a moment a rank also has whole, unreduced gradients of tensors it does not own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from zeroshard.layout.partition import Partition


class Frame(NamedTuple):
    """One reduction in backward."""

    names: tuple[str, ...]  # the parameters whose gradients it reduces
    whole: int  # elements held so far where gradients are replicated (ZeRO-1)
    transient: int  # elements alive just before this reduction where they are sharded: kept so far + this frame's own
    kept: int  # elements held after it (ZeRO-2)


def backward_frames(partition: Partition, rank: int, groups: Sequence[Sequence[str]] | None = None) -> list[Frame]:
    """List `rank`'s frames, last group first. `groups`: names reduced together, in model order (None: singly)."""
    if groups is None:
        groups = [[slot.name] for bucket in partition.buckets for slot in bucket.slots]
    frames: list[Frame] = []
    whole = kept = 0
    for names in reversed(groups):
        places = [partition.find(name) for name in names]
        produced = sum(slot.numel for _, slot in places)
        whole, transient = whole + produced, kept + produced
        kept += sum(bucket.fragment(slot, rank).numel for bucket, slot in places)
        frames.append(Frame(tuple(names), whole, transient, kept))
    return frames
