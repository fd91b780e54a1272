"""A job for the commands that ask for one by name: a small GPT, AdamW, random tokens.

zeroshard verify examples/job.py:job --ranks 1,2 --stage 3
"""

import torch
from torch import nn
from torch.nn import functional as F

TOKENS, CONTEXT, HIDDEN = 61, 16, 32


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, HIDDEN)
        self.places = nn.Parameter(torch.randn(CONTEXT, HIDDEN) * 0.1)
        block = nn.TransformerEncoderLayer(HIDDEN, 4, 4 * HIDDEN, 0.1, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, 2, nn.LayerNorm(HIDDEN), enable_nested_tensor=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT))

    def forward(self, x):
        hidden = self.blocks(self.tokens(x) + self.places, mask=self.mask, is_causal=True)
        return F.linear(hidden, self.tokens.weight)  # tied: the embedding is the head


def batch(step, index):
    """Micro-batch `index` of a step: the same on every rank and in every run."""
    generator = torch.Generator().manual_seed(1000 * step + index)
    window = torch.randint(TOKENS, (4, CONTEXT + 1), generator=generator)
    return window[:, :-1], window[:, 1:]


def job():
    return {
        "model": GPT(),
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        "batch": batch,
        "loss": lambda model, batch: F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten()),
    }
