"""The kernels of sums, averages and norms, launched once before a device waits for messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..arithmetic.exact_norms import BlockMap, add_to_bins, block_sums, empty_bins, sums_from_bins, sums_in
from ..arithmetic.sums import average_, fold, reseed_, running_dtype, simulated
from ..device import asynchronous
from ..hooks import Feature
from ..layout.partition import BLOCK

if TYPE_CHECKING:
    from ..engine.engine import Engine


def launch_once(like: Tensor, sent: torch.dtype, master: torch.dtype, ranks: int, order: float = 2.0) -> None:
    """Launch each kernel that sums, averages and norms are made of once, on a few numbers.

    like: of the device, in a sum's dtype. CUDA loads a kernel at its first launch, and may then wait for all that
    is queued on the device: in a backward this may include a message whose sender waits for this host.
    """
    total, pieces = like.new_zeros(2 * BLOCK), [like.new_zeros(2 * BLOCK, dtype=sent)] * 2
    running = like.new_zeros(2 * BLOCK, dtype=running_dtype(like.dtype))
    for into, start in ((total, None), (total, total), (running, running), (total, running), (running, total)):
        fold(into, pieces, start=start, times=ranks, over=ranks)
    average_(total, ranks)
    total.mul_(ranks)
    blocks = BlockMap(2 * BLOCK, BLOCK, [(0, 0, BLOCK + 1)], like.device)
    bins = empty_bins(1, like.device, sums_in(order))
    add_to_bins(bins, blocks.owner, block_sums(total, blocks, ranks, order))
    sums_from_bins(bins)
    like.new_zeros(1, dtype=master).copy_(total[:1])  # the average as the optimizer takes it
    reseed_(like.new_zeros(1, dtype=master), pieces[0][:1], asked=False)
    pieces[0].copy_(total).copy_(pieces[0].clone()).zero_()  # the cast of a master, and a gradient as it is sent


class WarmUpFeature(Feature):
    name = "kernels loaded before messages wait for them"
    page = "gpus.md"

    def ready(self, engine: Engine) -> None:
        group = engine.group
        if not asynchronous(group.device):
            return
        buckets = [accumulator.bucket for accumulator in engine.gradients.accumulators]
        for sums, sent, master in sorted({(b.grad_dtype, b.reduce_dtype, b.formats.master) for b in buckets}, key=str):
            like = torch.empty(0, dtype=sums, device=group.device)
            if not simulated(like):
                launch_once(like, sent, master, group.sources)


FEATURE = WarmUpFeature()
