"""A Lightning Fabric loop, sharded: the strategy's name is all that is not Fabric's.

torchrun --nproc-per-node 2 examples/fabric_loop.py [stage]
"""

import sys

import lightning
import torch
from torch import nn

import zeroshard.integrations.fabric  # noqa: F401  # it registers zeroshard_stage_0 to zeroshard_stage_3

stage = sys.argv[1] if len(sys.argv) > 1 else "3"
fabric = lightning.Fabric(strategy=f"zeroshard_stage_{stage}", accelerator="auto", devices=2)
fabric.launch()
fabric.seed_everything(0)
rows = torch.randn(128, 16)
loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(rows, batch_size=8, shuffle=True))
model = nn.Sequential(nn.Linear(16, 256), nn.GELU(), nn.Linear(256, 1))
model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))

for epoch in range(3):
    loader.sampler.set_epoch(epoch)
    for number, x in enumerate(loader):
        more = number % 2 == 0
        with fabric.no_backward_sync(model, enabled=more):
            loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
            fabric.backward(loss / 2)
        if not more:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
    fabric.print(f"epoch {epoch}  loss {fabric.all_reduce(loss.detach()).item():.6f}")
    fabric.save(
        "state", {"model": model, "optimizer": optimizer, "epoch": epoch}
    )  # loads at any stage and number of ranks
