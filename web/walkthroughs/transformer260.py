"""The transformer of 260 parameters from "ZeRO-1: A Concrete Walkthrough" and "ZeRO-2: A Concrete Walkthrough".

d = 4, two heads of two, a feed-forward layer of 16 with ReLU, 8 words, 3 tokens:

    LN1 - attention - residual - LN2 - feed-forward - residual - W_vocab - softmax - cross-entropy

The texts print W_q, W_k, W_v, W_vocab, the input of GPU-0 and two tables of W_q gradients. They omit the rest, so
their loss cannot be reproduced and the printed gradients do not follow from the printed weights: `inject` puts those
in by a hook, for a run that says so. `Entry.origin` tells which value comes from where.
"""

from __future__ import annotations

import math
import random
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, INNER, WORDS, TOKENS = 4, 2, 16, 8, 3
SEED = 260  # of everything the texts omit

Origin = Literal["text", "convention", "seed"]


class Entry(NamedTuple):
    """One tensor of the texts' table, in their flat order."""

    symbol: str  # as the texts write it
    name: str  # the parameter's name in `Transformer260`
    shape: tuple[int, ...]
    layer: str  # the texts' heading
    origin: Origin  # "convention": gamma 1 and beta 0, which the traced forward pass implies


TENSORS = (
    Entry("gamma1", "norm1.gamma", (WIDTH,), "LayerNorm 1", "convention"),
    Entry("beta1", "norm1.beta", (WIDTH,), "LayerNorm 1", "convention"),
    Entry("W_q", "attention.W_q", (WIDTH, WIDTH), "Attention", "text"),
    Entry("W_k", "attention.W_k", (WIDTH, WIDTH), "Attention", "text"),
    Entry("W_v", "attention.W_v", (WIDTH, WIDTH), "Attention", "text"),
    Entry("W_o", "attention.W_o", (WIDTH, WIDTH), "Attention", "seed"),
    Entry("gamma2", "norm2.gamma", (WIDTH,), "LayerNorm 2", "convention"),
    Entry("beta2", "norm2.beta", (WIDTH,), "LayerNorm 2", "convention"),
    Entry("W1", "feed_forward.W1", (WIDTH, INNER), "FFN", "seed"),
    Entry("b1", "feed_forward.b1", (INNER,), "FFN", "seed"),
    Entry("W2", "feed_forward.W2", (INNER, WIDTH), "FFN", "seed"),
    Entry("b2", "feed_forward.b2", (WIDTH,), "FFN", "seed"),
    Entry("W_vocab", "head.W_vocab", (WIDTH, WORDS), "Output head", "text"),
)

TEXT: dict[str, list[list[float]]] = {
    "W_q": [
        [0.12, 0.34, -0.21, 0.05],
        [-0.15, 0.22, 0.11, -0.08],
        [0.30, -0.10, 0.18, 0.27],
        [-0.05, 0.14, -0.33, 0.09],
    ],
    "W_k": [
        [0.20, -0.11, 0.07, 0.15],
        [0.03, 0.28, -0.14, 0.10],
        [-0.22, 0.06, 0.31, -0.05],
        [0.17, -0.09, 0.02, 0.24],
    ],
    "W_v": [
        [0.08, 0.19, -0.12, 0.25],
        [-0.07, 0.33, 0.04, -0.16],
        [0.21, -0.03, 0.15, 0.11],
        [-0.14, 0.08, 0.26, -0.02],
    ],
    "W_vocab": [
        [0.11, -0.05, 0.18, 0.03, -0.14, 0.22, -0.09, 0.07],
        [-0.06, 0.13, 0.02, -0.17, 0.08, 0.04, 0.20, -0.11],
        [0.15, -0.02, 0.09, 0.21, -0.08, 0.12, -0.03, 0.16],
        [-0.10, 0.07, -0.13, 0.05, 0.19, -0.06, 0.14, 0.01],
    ],
    "x": [[0.5, -0.3, 0.8, 0.1], [0.2, 0.7, -0.1, 0.4], [-0.6, 0.3, 0.5, -0.2]],
}

# d loss / d W_q on GPU-0 (micro-batch A) and GPU-1 (micro-batch B), as printed
W_Q_GRADIENTS = (
    [
        [0.023, -0.011, 0.045, -0.008],
        [-0.031, 0.019, -0.007, 0.014],
        [0.012, -0.028, 0.033, -0.005],
        [-0.016, 0.009, -0.021, 0.038],
    ],
    [
        [0.017, -0.025, 0.031, -0.013],
        [-0.009, 0.041, -0.018, 0.006],
        [0.028, -0.014, 0.022, -0.035],
        [-0.020, 0.016, -0.012, 0.027],
    ],
)


class Batch(NamedTuple):
    """One micro-batch: x [TOKENS, WIDTH], already embedded, and targets [TOKENS]."""

    x: Tensor
    targets: Tensor
    x_origin: Origin
    targets_origin: Origin


class Attended(NamedTuple):
    """Attention's result and intermediate tensors: [TOKENS, ...], but scores and weights [HEADS, TOKENS, TOKENS]."""

    out: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    scores: Tensor
    weights: Tensor  # softmax of the scores
    mixed: Tensor  # the heads' results side by side, before W_o


class Fed(NamedTuple):
    """The feed-forward layer's result, and the activations between its matrices, after ReLU."""

    out: Tensor
    hidden: Tensor


class Trace(NamedTuple):
    """All tensors of the forward pass, in its order: [TOKENS, ...], but scores and weights [HEADS, TOKENS, TOKENS]."""

    mu: Tensor
    sigma: Tensor
    x1: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    scores: Tensor
    weights: Tensor
    mixed: Tensor
    attended: Tensor
    middle: Tensor  # x + attended
    x2: Tensor
    hidden: Tensor
    fed: Tensor
    last: Tensor  # middle + fed
    logits: Tensor
    probabilities: Tensor


class LayerNorm(nn.Module):
    """(x - mean) / population deviation * gamma + beta. No epsilon: the texts have none."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(WIDTH))
        self.beta = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mu = x.mean(-1, keepdim=True)
        sigma = (x - mu).square().mean(-1, keepdim=True).sqrt()
        return (x - mu) / sigma * self.gamma + self.beta, mu, sigma


class Attention(nn.Module):
    """Two heads, no mask. Weights multiply from the right, as printed: Q = x W_q."""

    def __init__(self) -> None:
        super().__init__()
        self.W_q = nn.Parameter(torch.empty(WIDTH, WIDTH))
        self.W_k = nn.Parameter(torch.empty(WIDTH, WIDTH))
        self.W_v = nn.Parameter(torch.empty(WIDTH, WIDTH))
        self.W_o = nn.Parameter(torch.empty(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Attended:
        made = q, k, v = x @ self.W_q, x @ self.W_k, x @ self.W_v
        heads = [y.view(TOKENS, HEADS, WIDTH // HEADS).transpose(0, 1) for y in made]
        scores = heads[0] @ heads[1].transpose(1, 2) / math.sqrt(WIDTH // HEADS)
        weights = scores.softmax(-1)
        mixed = (weights @ heads[2]).transpose(0, 1).reshape(TOKENS, WIDTH)
        return Attended(mixed @ self.W_o, *_seen(q, k, v, scores, weights, mixed))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.W1 = nn.Parameter(torch.empty(WIDTH, INNER))
        self.b1 = nn.Parameter(torch.empty(INNER))
        self.W2 = nn.Parameter(torch.empty(INNER, WIDTH))
        self.b2 = nn.Parameter(torch.empty(WIDTH))

    def forward(self, x: Tensor) -> Fed:
        hidden = torch.relu(x @ self.W1 + self.b1)
        return Fed(hidden @ self.W2 + self.b2, *_seen(hidden))


def _seen(*values: Tensor) -> tuple[Tensor, ...]:
    """Detach values that are only looked at: the loss does not depend on them, so no gradient goes through them."""
    return tuple(value.detach() for value in values)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.W_vocab = nn.Parameter(torch.empty(WIDTH, WORDS))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.W_vocab


class Transformer260(nn.Module):
    """The texts' model: submodules, and the tensors in them, are registered in the texts' flat order."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.norm1 = LayerNorm()
        self.attention = Attention()
        self.norm2 = LayerNorm()
        self.feed_forward = FeedForward()
        self.head = Head()
        self.to(dtype)
        with torch.no_grad():
            for entry, value in zip(TENSORS, _values(), strict=True):
                self.get_parameter(entry.name).copy_(value)

    def forward(self, x: Tensor) -> Trace:
        x1, mu, sigma = self.norm1(x)
        attended, *inside = self.attention(x1)
        q, k, v, scores, weights, mixed = inside
        middle = x + attended
        x2, _, _ = self.norm2(middle)
        fed = self.feed_forward(x2)
        last = middle + fed.out
        logits = self.head(last)
        probabilities = logits.detach().softmax(-1)
        return Trace(
            mu, sigma, x1, q, k, v, scores, weights, mixed, attended, middle,
            x2, fed.hidden, fed.out, last, logits, probabilities,
        )  # fmt: skip


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean cross-entropy over the three tokens."""
    return F.cross_entropy(model(batch.x).logits, batch.targets)


def batches(dtype: torch.dtype = torch.float32, ranks: int = 2) -> tuple[Batch, ...]:
    """Return a micro-batch for each rank: A (x from the text), B and the rest (all of them from the seed)."""
    draw = random.Random(SEED + 1)
    targets = [_targets(draw), _targets(draw)]
    xs = [TEXT["x"], _x(draw)]
    for _ in range(ranks - 2):
        targets.append(_targets(draw))
        xs.append(_x(draw))
    return tuple(
        Batch(torch.tensor(x, dtype=dtype), torch.tensor(target), "seed" if rank else "text", "seed")
        for rank, (x, target) in enumerate(zip(xs, targets, strict=True))
    )


def _targets(draw: random.Random) -> list[int]:
    return [draw.randrange(WORDS) for _ in range(TOKENS)]


def _x(draw: random.Random) -> list[list[float]]:
    flat = _draw(draw, TOKENS * WIDTH, 0.8)
    return [flat[at : at + WIDTH] for at in range(0, len(flat), WIDTH)]


def inject(model: Transformer260, rank: int) -> None:
    """Replace this rank's gradient of W_q by the printed table from now on, whatever backward computes."""
    table = torch.tensor(W_Q_GRADIENTS[rank], dtype=torch.float64)
    model.attention.W_q.register_hook(lambda gradient: table.to(gradient))


def _values() -> list[Tensor]:
    """Return every tensor in float64. Seeded ones have two decimals, as the printed ones do."""
    draw = random.Random(SEED)  # Python's generator, which no release of torch changes
    values = []
    for entry in TENSORS:
        if entry.origin == "text":
            value = torch.tensor(TEXT[entry.symbol], dtype=torch.float64)
        elif entry.origin == "convention":
            value = torch.full(entry.shape, float(entry.symbol.startswith("gamma")), dtype=torch.float64)
        else:
            value = torch.tensor(_draw(draw, math.prod(entry.shape), 0.35), dtype=torch.float64).view(entry.shape)
        values.append(value)
    return values


def _draw(draw: random.Random, count: int, limit: float) -> list[float]:
    return [round(draw.uniform(-limit, limit), 2) for _ in range(count)]
