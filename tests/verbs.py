"""Collectives by the names of today, on every release of torch: 2.11 has them under older ones."""

from __future__ import annotations

import torch.distributed as dist

NAMES = {
    new: new if hasattr(dist, new) else old
    for new, old in {
        "all_gather_single": "all_gather_into_tensor",
        "reduce_scatter_single": "reduce_scatter_tensor",
    }.items()
}
all_gather_single = getattr(dist, NAMES["all_gather_single"])
reduce_scatter_single = getattr(dist, NAMES["reduce_scatter_single"])
