"""Norms of whole gradients: exact sums, the same on every rank, at every stage, and for all parameters at once."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...arithmetic.exact_norms import (
    BlockMap,
    add_to_bins,
    add_to_maxima,
    block_sums,
    empty_bins,
    roots_from_bins,
    sums_from_bins,
    sums_in,
)
from ...device import asynchronous
from ...layout.partition import BLOCK
from .accumulator import Accumulator

if TYPE_CHECKING:
    from .gradient import Gradients

# Sums of blocks, of several buckets, that are added up in one go: on a device a launch costs more than memory.
_TOGETHER, _TOGETHER_HERE = 1 << 20, 1 << 12


def norms(book: Gradients, order: float) -> Tensor:
    """Return the norm of each parameter's averaged gradient, 1-D fp32, on the parameters' device. Collective."""
    device, group, count = book.entries[0].param.device, book.group, len(book.entries)
    add = add_to_maxima if order == math.inf else add_to_bins
    together = _TOGETHER if asynchronous(device) else _TOGETHER_HERE
    tallies = {device: _tally(count, order, device)}  # sums that rest in host memory have one there
    found: dict[torch.device, list[tuple[Tensor, Tensor]]] = {}  # (owners, block sums) not yet added up

    def tally_up(accumulator: Accumulator) -> None:
        blocks = _blocks(accumulator)
        counted = accumulator.sum.of(*accumulator.bucket.saves)
        sums = block_sums(counted, blocks, 1 if accumulator.averaged else accumulator.divisor, order)
        at = sums.device
        if at not in tallies:
            tallies[at] = _tally(count, order, at)
        found.setdefault(at, []).append((blocks.owner, sums))
        if sums.numel() * len(found[at]) > together:
            add(tallies[at], *_joined(found.pop(at)))

    for accumulator in _filled(book):
        book.hold(accumulator, functools.partial(tally_up, accumulator), changed=False)
    for at, left in found.items():
        add(tallies[at], *_joined(left))
    tally = tallies.pop(device)
    for other in tallies.values():
        tally = torch.maximum(tally, other.to(device)) if order == math.inf else tally.add_(other.to(device))
    if order == math.inf:
        return group.maximum(tally).view(torch.float32).to(device)
    agreed = group.total(tally)
    if sums_in(order) is torch.float64:
        return roots_from_bins(agreed, order).to(torch.float32).to(device)
    sums = sums_from_bins(agreed)
    return (sums.sqrt() if order == 2.0 else sums).to(torch.float32).to(device)


def _blocks(accumulator: Accumulator) -> BlockMap:
    """Return the map from the blocks of a rank's shard to entries of the book of gradients, made once."""
    if accumulator.blocks is None:
        bucket = accumulator.bucket
        first, last = bucket.saves
        parts = (slot.slice_of(first, last) for slot in accumulator.plan.slots)
        spans = [(e.number, p.start, p.stop) for e, p in zip(accumulator.entries, parts, strict=True) if p.stop]
        made = BlockMap(last - first, min(BLOCK, bucket.align), spans, accumulator.sum.tensor.device)
        bucket.tier.ledger.hold_while(made, "norms", made.nbytes)
        accumulator.blocks = made
    found: BlockMap = accumulator.blocks
    return found


def _tally(count: int, order: float, device: torch.device) -> Tensor:
    """Make each parameter's tally: bins, to which block sums are added exactly, or for order inf the maximum so far."""
    if order == math.inf:
        return torch.zeros(count, dtype=torch.int32, device=device)
    return empty_bins(count, device, sums_in(order))


def _filled(book: Gradients) -> Iterator[Accumulator]:
    """Yield filled accumulators of which this rank counts elements that no other rank counts; prefetch the next one."""
    having = [each for each in book.accumulators if each.filled]
    found = [each for each in having if operator.lt(*each.bucket.saves)]
    for accumulator, after in zip(found, [*found[1:], None], strict=False):
        with book.reporting():
            accumulator.sum.ahead()
            if after is not None:
                after.sum.ahead()
        yield accumulator


def _joined(found: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Concatenate owners and sums of all pairs, and clear the list."""
    owner, sums = found[0] if len(found) == 1 else map(torch.cat, zip(*found, strict=True))
    found.clear()
    return owner, sums
