"""A transformer of so many parameters: its usual depth, and what it keeps of activations by a published formula.

Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022), section 4, in bytes of a
layer, for s tokens in each of b sequences, hidden size h, vocabulary v, and activations of 16 bits:

    34 s b h        kept for backward, where attention keeps no scores, as torch's scaled_dot_product_attention does
    2 s b h         of a layer that is recomputed: its input (table 2, full recomputation)
    4 s b v         of the logits, in fp32, and as much of their gradients

A number of parameters tells neither depth nor width. `DEPTHS` has the depths of published models, and a layer has
12 h^2 parameters. Both are assumptions, and every answer that rests on them says so. Imports no torch.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

# (parameters up to, layers): GPT-2 and GPT-3 (Brown et al. 2020, table 2.1), LLaMA and Llama 2 and 3, PaLM.
DEPTHS = (
    (2 * 10**8, 12), (6 * 10**8, 24), (2 * 10**9, 24), (5 * 10**9, 32), (10 * 10**9, 32), (20 * 10**9, 40),
    (50 * 10**9, 60), (120 * 10**9, 80), (300 * 10**9, 96), (700 * 10**9, 126),
)  # fmt: skip
DEEPEST = 128
VOCABULARY = 32_000  # of Llama 2
KEPT, INPUT, LOGIT = 34, 2, 4  # bytes, above
BATCH, SEQ = 1, 2048  # of a micro-batch that nobody has told


class Held(NamedTuple):
    """Bytes of activations of one micro-batch. kept: for backward. device: the most at once. away: in another tier."""

    kept: int
    device: int
    away: int = 0


class Body(Protocol):
    """What a model's micro-batch keeps of activations."""

    @property
    def layers(self) -> int: ...

    def held(self, tokens: int, *, itemsize: float, recompute: bool, moved: bool) -> Held: ...


class Transformer(NamedTuple):
    """The numbers of a transformer on which its activations depend."""

    layers: int
    hidden: int
    vocabulary: int = VOCABULARY

    def held(self, tokens: int, *, itemsize: float, recompute: bool, moved: bool) -> Held:
        """Return what a micro-batch of so many tokens holds at most, and what of it rests elsewhere.

        itemsize: bytes of an element of activations. recompute: is each layer computed again in backward? Then the one
        at work holds all that it keeps. moved: do activations rest in another tier? Then the last layer's stay, and
        those of one more are on their way.
        """
        narrow = itemsize / 2
        kept, of_input = (math.ceil(each * narrow * tokens * self.hidden) for each in (KEPT, INPUT))
        logits = 2 * LOGIT * tokens * self.vocabulary
        each = of_input if recompute else kept
        at_work = kept if recompute else 0
        here = min(2, self.layers) if moved else self.layers
        away = (self.layers - 1) * each if moved else 0
        return Held(self.layers * each - away + logits // 2, here * each + at_work + logits, away)


def depth(numel: int) -> int:
    """Return the usual number of layers of a transformer of so many parameters."""
    return min(next((layers for most, layers in DEPTHS if numel <= most), DEEPEST), numel)


def of(numel: int, layers: int | None = None, vocabulary: int = VOCABULARY) -> Transformer:
    """Return the transformer of so many parameters. layers: their number, if it is known."""
    layers = layers or depth(numel)
    hidden = math.isqrt(numel // (12 * layers))
    return Transformer(layers, max(-(-hidden // 16) * 16, 16), vocabulary)
