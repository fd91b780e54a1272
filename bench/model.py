"""What every back-end trains: one GPT, one loss, one stream of random tokens.

Shape suffixes: B sequences, T tokens, D hidden, H heads, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Size(NamedTuple):
    blocks: int
    hidden: int
    heads: int
    vocabulary: int
    sequences: int  # of a step, over all ranks
    tokens: int = 128


SIZES = {
    "69M": Size(8, 768, 12, 8192, sequences=4),
    "10M": Size(4, 384, 6, 4096, sequences=8),
    "tiny": Size(1, 32, 2, 64, sequences=4, tokens=16),
}
LEARNING_RATE = 3e-4


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x_BTD: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm_1(x_BTD)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x_BTD = x_BTD + self.out(y)
        return x_BTD + self.down(F.gelu(self.up(self.norm_2(x_BTD))))


class GPT(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = nn.Embedding(size.vocabulary, size.hidden)
        self.places = nn.Parameter(torch.randn(size.tokens, size.hidden) * 0.02)
        self.blocks = nn.ModuleList(Block(size.hidden, size.heads) for _ in range(size.blocks))
        self.norm = nn.LayerNorm(size.hidden)
        self.head = nn.Linear(size.hidden, size.vocabulary, bias=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTD = self.embed(tokens_BT) + self.places
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(self.norm(x_BTD))


def batch(size: Size, step: int, rank: int, ranks: int) -> Tensor:
    """This rank's sequences of a step, [B, T + 1]; all ranks together have the same at any number of ranks."""
    generator = torch.Generator().manual_seed(step)
    tokens_BT = torch.randint(size.vocabulary, (size.sequences, size.tokens + 1), generator=generator)
    return tokens_BT.chunk(ranks)[rank]


def loss_of(model: nn.Module, tokens_BT: Tensor) -> Tensor:
    logits_BTV = model(tokens_BT[:, :-1])
    return F.cross_entropy(logits_BTV.float().flatten(0, 1), tokens_BT[:, 1:].flatten())
