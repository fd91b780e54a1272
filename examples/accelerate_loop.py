"""An Accelerate loop, sharded: `ZeroAccelerator` is the only name in it that is not Accelerate's or torch's.

torchrun --nproc-per-node 2 examples/accelerate_loop.py
"""

# /// script
# requires-python = ">=3.11"
# dependencies = ["zeroshard[hf]"]
# [tool.uv.sources]
# zeroshard = { path = "..", editable = true }
# ///

import torch
from torch import nn

from zeroshard.integrations.accelerate import ZeroAccelerator

accelerator = ZeroAccelerator(stage=3, gradient_accumulation_steps=2, cpu=not torch.cuda.is_available())

torch.manual_seed(0)
rows = torch.randn(128, 16)
loader = torch.utils.data.DataLoader(list(zip(rows, rows.sum(1, True), strict=True)), batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(16, 256), nn.GELU(), nn.Linear(256, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

for epoch in range(3):
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    accelerator.print(f"epoch {epoch}  loss {accelerator.gather(loss.detach().reshape(1)).mean():.4f}")
    accelerator.save_state("state")  # goes on anywhere: accelerator.load_state("state") on any number of ranks
accelerator.save_model(model, "weights")
