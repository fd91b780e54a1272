"""torch's fully_shard, block by block; in bfloat16 by its MixedPrecisionPolicy, gradients reduced in bfloat16 too, or
(wide) in fp32, as its users set it on GPUs.

With replicas it is what torch calls hybrid sharding (HSDP): a mesh of two axes, of which the first replicates.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from . import Trainer, optimizers_of, plain


def build(
    model: nn.Module, *, low: bool, reshard: bool, replicas: int = 1, wide: bool = False, muon: bool = False
) -> Trainer:
    shape = (replicas, dist.get_world_size() // replicas)
    mesh = init_device_mesh(next(model.parameters()).device.type, shape, mesh_dim_names=("replicate", "shard"))
    mesh = mesh if replicas > 1 else mesh["shard"]
    dtype = torch.bfloat16 if low else None
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if wide else dtype)
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    return plain(model, *optimizers_of(model, muon=muon))
