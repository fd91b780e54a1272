"""A run that goes on when a node is lost, and when one comes back. On one node or two, where `out` is one folder:

TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes 1:2 --nproc-per-node 2 --max-restarts 3 \\
    --rdzv-id run42 --rdzv-backend c10d --rdzv-endpoint node0:29500 examples/elastic.py out
"""

import sys
from pathlib import Path

import torch
from torch import nn

import zeroshard

STEPS, MICRO_BATCHES = 300, 4  # of a step, whatever the number of ranks that divide them
folder = Path(sys.argv[1])

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
zero = zeroshard.shard(model, optimizer, stage=3)
turns, rest = divmod(MICRO_BATCHES, zero.world_size)
assert not rest, f"{zero.world_size} ranks do not divide {MICRO_BATCHES} micro-batches"

newest = zero.latest(folder)  # the newest whole one: what a lost rank has left half is passed over
start = zero.load(newest).extra["step"] if newest else 0
if zero.rank == 0:
    print(f"from step {start} on, {zero.world_size} ranks, {turns} micro-batches each", flush=True)
for step in range(start, STEPS):
    for turn in range(turns):
        with zero.micro_batch_rng(step, turn * zero.world_size + zero.rank):  # data and dropout of this micro-batch
            x = torch.randn(8, 16)
            loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)) / turns
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if (step + 1) % 10 == 0:
        zero.save(folder / f"step-{step + 1:04}", {"step": step + 1}, asynchronous=True, keep=3)
