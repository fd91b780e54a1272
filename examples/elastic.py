"""A run that goes on when a node is lost, and when one comes back. On one node or two, where `out` is one folder:

TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes 1:2 --nproc-per-node 2 --max-restarts 3 \\
    --rdzv-id run42 --rdzv-backend c10d --rdzv-endpoint node0:29500 examples/elastic.py out
"""

import sys
from pathlib import Path

import torch
from torch import nn

import zeroshard

folder = Path(sys.argv[1])
device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
data = torch.randn(300 * 6 * 8, 16, generator=torch.Generator().manual_seed(1))

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
zero = zeroshard.shard(model, optimizer, stage=3, device=device)
batches = zero.batches(data, per_step=6, size=8)  # the same 6 micro-batches of 8 samples on any number of ranks

newest = zero.latest(folder)  # the newest whole one: what a lost rank has left half is passed over
if newest:
    zero.load(newest)
if zero.rank == 0:
    print(f"from step {batches.step} on, {zero.world_size} ranks", flush=True)
for step in batches:
    for x in step:
        x = x.to(device)
        nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
    optimizer.step()
    optimizer.zero_grad()
    if batches.step % 10 == 0:
        zero.save(folder / f"step-{batches.step:04}", asynchronous=True, keep=3)
