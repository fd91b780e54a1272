"""verl 7493: fsdp_size=1 makes FSDP1's HYBRID_SHARD over groups of one rank, and ranks never add up their gradients."""

import shared
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

import zeroshard


def theirs(folder, rank):
    mesh = init_device_mesh("cpu", (shared.RANKS, 1), mesh_dim_names=("ddp", "fsdp"))  # verl's create_device_mesh
    model = FullyShardedDataParallel(
        shared.build(), device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        use_orig_params=True, device_id=torch.device("cpu"),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with zeroshard.RunLog(folder, model, optimizer) as log:
        for step, count in enumerate(shared.MICRO):
            for index in range(rank, count, shared.RANKS):
                loss = shared.mse(model, step, index)
                (loss * shared.RANKS / count).backward()
                log.backward(loss)
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    shared.run(theirs, "torch==2.13.0")
