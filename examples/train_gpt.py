"""A small GPT on the text of Python's own library: a plain PyTorch loop, and one line that shards it.

python examples/train_gpt.py
torchrun --standalone --nproc-per-node 2 examples/train_gpt.py --steps 200
"""

# /// script
# requires-python = ">=3.11"
# dependencies = ["zeroshard[torch]"]
# [tool.uv.sources]
# zeroshard = { path = "..", editable = true }
# ///

import argparse
import inspect
import pydoc_data.topics

import torch
from torch import nn
from torch.nn import functional as F

import zeroshard

CONTEXT = 64


class GPT(nn.Module):
    def __init__(self, hidden=128, blocks=3, heads=4):
        super().__init__()
        self.bytes = nn.Embedding(256, hidden)
        nn.init.normal_(self.bytes.weight, std=0.1)
        self.places = nn.Parameter(torch.randn(CONTEXT, hidden) * 0.1)
        block = nn.TransformerEncoderLayer(hidden, heads, 4 * hidden, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, blocks, nn.LayerNorm(hidden), enable_nested_tensor=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT))

    def forward(self, x, y):
        hidden = self.blocks(self.bytes(x) + self.places, mask=self.mask, is_causal=True)
        logits = F.linear(hidden, self.bytes.weight)  # tied: the embedding is the head
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--stage", type=int, default=3)
args = parser.parse_args()

device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
text = torch.tensor(list(inspect.getsource(pydoc_data.topics).encode()))
torch.manual_seed(0)
model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
zero = zeroshard.shard(model, optimizer, stage=args.stage, device=device)  # the one new line
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
draw = torch.Generator().manual_seed(zero.rank)  # every rank its own micro-batches
for step in range(1, args.steps + 1):
    starts = torch.randint(len(text) - CONTEXT, (16, 1), generator=draw)
    window = text[starts + torch.arange(CONTEXT + 1)].to(device)
    loss = model(window[:, :-1], window[:, 1:])
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    if zero.rank == 0 and (step % 10 == 0 or step == args.steps):
        print(f"step {step}  loss {loss.item():.3f}  held {sum(zero.ledger().held.values()):,} bytes")
