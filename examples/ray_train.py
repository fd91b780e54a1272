"""Ray Train: a killed worker starts again from what was reported last. python examples/ray_train.py /shared/folder"""

# /// script
# requires-python = ">=3.11"
# dependencies = ["zeroshard[ray]"]
# [tool.uv.sources]
# zeroshard = { path = "..", editable = true }
# ///

import sys
from pathlib import Path

import torch
from ray import train
from ray.train.torch import TorchTrainer, get_device
from torch import nn

import zeroshard


def loop(config):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    device = get_device()  # Ray's choice for this worker: a GPU with ScalingConfig(use_gpu=True)
    zero = zeroshard.shard(model, optimizer, stage=config["stage"], device=device)  # over the group that Ray has made
    start = zero.load(train.get_checkpoint().path).extra["step"] if train.get_checkpoint() else 0
    for step in range(start, config["steps"]):
        for turn in range(turns := 4 // zero.world_size):  # four micro-batches a step, on 1, 2 or 4 workers
            with zero.micro_batch_rng(step, turn * zero.world_size + zero.rank):  # data and dropout of this one
                x = torch.randn(8, 16).to(device)
                (nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)) / turns).backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 10 == 0:
            path = Path(train.get_context().get_storage().experiment_fs_path, f"step-{step + 1:04}")
            zero.save(path, {"step": step + 1})  # to where Ray would copy it
            done = {"step": step + 1}, train.Checkpoint.from_directory(path)
            train.report(*done, checkpoint_upload_mode=train.CheckpointUploadMode.NO_UPLOAD)


if __name__ == "__main__":
    run = train.RunConfig("run", storage_path=sys.argv[1], failure_config=train.FailureConfig(max_failures=3))
    workers = train.ScalingConfig(num_workers=2)  # another number goes on where this name is the same
    TorchTrainer(loop, train_loop_config={"steps": 100, "stage": 3}, scaling_config=workers, run_config=run).fit()
