"""Small models, their batches and their losses, by name: one peculiarity each.

    model = models.build("gpt", hidden=12, tied=True)      # the same weights every time
    batch = models.batch("gpt", step, index)               # micro-batch `index` of step `step`
    models.loss("gpt", model, batch).backward()

`build` takes a seed and the model's options, `batch` and `loss` take none: they fit every option.
`functools.partial(models.batch, name)` is the batch function that `reference.accumulate` wants.
"""

from __future__ import annotations

import zlib
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as _checkpoint

from zeroshard.engine.gradients import reduction

PAUSE = reduction.PAUSE
MODELS: dict[str, Callable[..., nn.Module]] = {}
_BATCHES: dict[str, Callable[[torch.Generator, int, int], Any]] = {}
_LOSSES: dict[str, Callable[[nn.Module, Any], Tensor]] = {}


def reset() -> None:
    """As if no model had been built in this process."""
    reduction.PAUSE = PAUSE


def build(name: str, seed: int = 0, **options: Any) -> nn.Module:
    if name == "layerdrop":  # its ranks wait for each other in vain, once per engine: here not for long
        reduction.PAUSE = PAUSE / 10
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return MODELS[name](**options)


def batch(name: str, step: int, index: int) -> Any:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name}/{step}/{index}".encode()))
    return _BATCHES.get(name, _features)(generator, step, index)


def loss(name: str, model: nn.Module, batch: Any) -> Tensor:
    return _LOSSES.get(name, _squares)(model, batch)


def names() -> list[str]:
    return list(MODELS)


def _model(name: str, batch: Callable | None = None, loss: Callable | None = None) -> Callable:
    def register(make: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
        MODELS[name] = make
        if batch:
            _BATCHES[name] = batch
        if loss:
            _LOSSES[name] = loss
        return make

    return register


# ------------------------------------------------------------------------------------------------ batches and losses

FEATURES, TARGETS, ROWS = 7, 5, 3  # most models map [3, 7] to [3, 5]
VOCABULARY, LENGTH = 61, 11


def _features(generator: torch.Generator, step: int, index: int) -> tuple[Tensor, Tensor]:
    return torch.randn(ROWS, FEATURES, generator=generator), torch.randn(ROWS, TARGETS, generator=generator)


def _tokens(generator: torch.Generator, step: int, index: int) -> tuple[Tensor, Tensor]:
    text = torch.randint(VOCABULARY, (2, LENGTH + 1), generator=generator)
    return text[:, :-1], text[:, 1:]


def _sequences(generator: torch.Generator, step: int, index: int) -> tuple[Tensor, Tensor]:
    return torch.randn(ROWS, 6, FEATURES, generator=generator), torch.randn(ROWS, TARGETS, generator=generator)


def _routed(generator: torch.Generator, step: int, index: int) -> tuple[Tensor, Tensor, list[bool]]:
    """Features, targets, and which of four layers run: different for each micro-batch, hence for each rank."""
    keep = (torch.rand(4, generator=generator) < 0.6).tolist()
    return *_features(generator, step, index), keep


def _squares(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    features, targets = batch
    return F.mse_loss(model(features).float(), targets)


def _cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    tokens, targets = batch
    return F.cross_entropy(model(tokens).float().flatten(0, 1), targets.flatten())


def _routed_squares(model: nn.Module, batch: tuple[Tensor, Tensor, list[bool]]) -> Tensor:
    features, targets, keep = batch
    return F.mse_loss(model(features, keep), targets)


def _recompute(mode: str | None, function: Callable[..., Tensor], x: Tensor) -> Tensor:
    """Call `function(x)`, under activation checkpointing if `mode` says so: None, "reentrant" or "nonreentrant"."""
    if mode is None or not torch.is_grad_enabled():
        return function(x)
    if mode == "reentrant" and not x.requires_grad:
        x = x.detach().requires_grad_()  # a re-entrant segment without such an input gets no gradients at all
    return _checkpoint(function, x, use_reentrant={"reentrant": True, "nonreentrant": False}[mode])


# -------------------------------------------------------------------------------------------------------------- GPT


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int, bias: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.norm1 = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=bias)
        self.proj = nn.Linear(hidden, hidden, bias=bias)
        self.norm2 = nn.LayerNorm(hidden)
        self.mlp = nn.Sequential(
            nn.Linear(hidden, 4 * hidden, bias=bias), nn.GELU(), nn.Linear(4 * hidden, hidden, bias=bias)
        )

    def forward(self, x: Tensor) -> Tensor:
        rows, length, hidden = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(rows, length, 3, self.heads, hidden // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(rows, length, hidden))
        return x + self.dropout(self.mlp(self.norm2(x)))


@_model("gpt", _tokens, _cross_entropy)
class GPT(nn.Module):
    """hidden 20 and a vocabulary of 61: no size is a multiple of 128 or of 3.

    tied: False, True (head.weight is embed.weight) or "linear" (no head: F.linear reads embed.weight in the root).
    frozen: prefixes of parameter names that get requires_grad=False, such as ("embed", "blocks.0").
    positions: True adds embeddings read as `self.position[:length]`, a view of a bare parameter.
    dropout: the chance that what a block's MLP adds is dropped.
    """

    def __init__(
        self,
        hidden: int = 20,
        layers: int = 3,
        heads: int = 2,
        tied: bool | str = False,
        frozen: tuple[str, ...] = (),
        checkpoint: str | None = None,
        bias: bool = True,
        positions: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.checkpoint = checkpoint
        self.embed = nn.Embedding(VOCABULARY, hidden)
        self.position = nn.Parameter(0.1 * torch.randn(LENGTH + 2, hidden)) if positions else None
        self.blocks = nn.ModuleList(Block(hidden, heads, bias, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = None if tied == "linear" else nn.Linear(hidden, VOCABULARY, bias=False)
        if tied is True:
            self.head.weight = self.embed.weight
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(not name.startswith(tuple(frozen)))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        if self.position is not None:
            x = x + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = _recompute(self.checkpoint, block, x)
        x = self.norm(x)
        return F.linear(x, self.embed.weight) if self.head is None else self.head(x)


# ------------------------------------------------------------------------------------------------- sizes and dtypes


@_model("mlp")
def mlp(sizes: tuple[int, ...] = (FEATURES, 13, 11, TARGETS)) -> nn.Sequential:
    """Prime sizes."""
    layers: list[nn.Module] = []
    for size, following in pairwise(sizes):
        layers += [nn.Linear(size, following), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


@_model("tiny")
class Tiny(nn.Module):
    """One trainable element: fewer than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :TARGETS] * self.scale


@_model("degenerate")
class Degenerate(nn.Module):
    """Parameters of no elements, of no dimensions and of one element, beside a common one."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.scalar = nn.Parameter(torch.tensor(0.7))
        self.one = nn.Parameter(torch.randn(1, 1))
        self.linear = nn.Linear(FEATURES, TARGETS)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scalar + self.one + self.empty.sum()


@_model("mixed")
class Mixed(nn.Module):
    """fp32, bf16 and fp64 parameters in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 13)
        self.second = nn.Linear(13, 11, dtype=torch.bfloat16)
        self.third = nn.Linear(11, TARGETS, dtype=torch.float64)
        self.gain = nn.Parameter(torch.randn(11, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(torch.tanh(self.first(x)).bfloat16()) * self.gain
        return self.third(x.double())


@_model("integers")
class Integers(nn.Module):
    """int and bool parameters and buffers beside float ones; the int buffer counts forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, TARGETS)
        self.shift = nn.Parameter(torch.tensor([3, -1, 0, 2, 5]), requires_grad=False)
        self.mask = nn.Parameter(torch.tensor([True, False, True, True, True]), requires_grad=False)
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("allowed", torch.tensor([True, True, False, True, True]))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x) * self.mask * self.allowed + self.shift


@_model("batchnorm")
class BatchNorm(nn.Module):
    """Running statistics and a counter in buffers, and a buffer that is not persistent."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(FEATURES, 13), nn.BatchNorm1d(13), nn.ReLU(), nn.Linear(13, TARGETS))
        self.register_buffer("scale", torch.full((1,), 0.5), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) * self.scale


# ----------------------------------------------------------------------- weights that autograd or the forward keeps


class Scaled(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(size)
        self.linear = nn.Linear(size, size)
        self.act = nn.PReLU(size)
        self.gain = nn.Parameter(torch.randn(size))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.act(self.linear(self.norm(x))) * self.gain


@_model("scales")
class Scales(nn.Module):
    """RMSNorm, PReLU and `x * gain`: autograd saves these weights themselves for backward."""

    def __init__(self, layers: int = 2, checkpoint: str | None = None) -> None:
        super().__init__()
        self.checkpoint = checkpoint
        self.gain = nn.Parameter(torch.randn(FEATURES))
        self.blocks = nn.ModuleList(Scaled(FEATURES) for _ in range(layers))
        self.out = nn.Linear(FEATURES, TARGETS)

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.gain
        for block in self.blocks:
            x = _recompute(self.checkpoint, block, x)
        return self.out(x)


class Viewing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(13, FEATURES))
        self.stash: Tensor | None = None

    def forward(self, rows: int) -> Tensor:
        self.stash = self.weight[1:3]
        return self.weight[:rows]


@_model("views")
class Views(nn.Module):
    """A submodule returns a view of its weight and stashes another."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Viewing()
        self.out = nn.Linear(FEATURES, TARGETS)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.table(len(x))
        return self.out(x * self.table.stash.sum())


# ------------------------------------------------------------------------------------------------- layers of torch


@_model("mha", _sequences)
class Attention(nn.Module):
    """nn.MultiheadAttention reads out_proj.weight outside out_proj's forward."""

    def __init__(self, heads: int = 3) -> None:
        super().__init__()
        self.inp = nn.Linear(FEATURES, 12)
        self.attention = nn.MultiheadAttention(12, heads, batch_first=True)
        self.out = nn.Linear(12, TARGETS)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        return self.out((x + self.attention(x, x, x, need_weights=False)[0]).mean(1))


@_model("lstm", _sequences)
class Recurrent(nn.Module):
    """Two LSTM layers; the weights are also in a flat list inside the module."""

    def __init__(self, hidden: int = 11, layers: int = 2) -> None:
        super().__init__()
        self.lstm = nn.LSTM(FEATURES, hidden, layers, batch_first=True)
        self.out = nn.Linear(hidden, TARGETS)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(x)[0][:, -1])


# ------------------------------------------------------------------------------------ one weight, used several times


@_model("shared")
class Shared(nn.Module):
    """One layer called `times` times, in one checkpointed segment per call if asked."""

    def __init__(self, times: int = 3, checkpoint: str | None = None) -> None:
        super().__init__()
        self.times, self.checkpoint = times, checkpoint
        self.inp = nn.Linear(FEATURES, 11)
        self.layer = nn.Linear(11, 11)
        self.out = nn.Linear(11, TARGETS)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for _ in range(self.times):
            x = _recompute(self.checkpoint, lambda x: torch.tanh(self.layer(x)), x)
        return self.out(x)


@_model("aliased")
class Aliased(nn.Module):
    """The same module under two names in a list, and a weight tied three ways across modules."""

    def __init__(self) -> None:
        super().__init__()
        first, second = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.layers = nn.ModuleList([first, second, first])
        self.third = nn.Linear(FEATURES, FEATURES)
        second.weight = first.weight
        self.third.weight = first.weight
        self.out = nn.Linear(FEATURES, TARGETS)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.out(self.third(x))


@_model("outside")
class Outside(nn.Module):
    """Weights read outside their module's forward, by F.linear and F.conv1d, before and after that forward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(FEATURES, 11), nn.Linear(11, FEATURES)])
        self.conv = nn.Conv1d(1, 1, 3, padding=1)
        self.out = nn.Linear(FEATURES, TARGETS)

    def forward(self, x: Tensor) -> Tensor:
        early = F.linear(x, self.blocks[1].weight.t())
        x = self.blocks[1](torch.tanh(self.blocks[0](x) + early))
        x = x + F.conv1d(x[:, None], self.conv.weight, self.conv.bias, padding=1)[:, 0]
        return self.out(x) + F.linear(x, self.blocks[0].weight)[:, :TARGETS]


@_model("penalty")
class Penalty(nn.Module):
    """The root's forward reads every parameter for a weight penalty that it adds to its output."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) + 0.01 * sum(parameter.square().sum() for parameter in self.parameters())


# ------------------------------------------------------------------------------------- frozen parts and unused parts


@_model("lora")
class Lora(nn.Module):
    """A frozen base with a trainable low-rank path beside each of its layers."""

    def __init__(self, low_rank: int = 2) -> None:
        super().__init__()
        self.base = nn.ModuleList([nn.Linear(FEATURES, 13), nn.Linear(13, TARGETS)]).requires_grad_(False)
        self.down = nn.ModuleList(nn.Linear(layer.in_features, low_rank, bias=False) for layer in self.base)
        self.up = nn.ModuleList(nn.Linear(low_rank, layer.out_features, bias=False) for layer in self.base)

    def forward(self, x: Tensor) -> Tensor:
        for base, down, up in zip(self.base, self.down, self.up, strict=True):
            x = torch.tanh(base(x) + up(down(x)))
        return x


@_model("unused")
class Unused(nn.Module):
    """A layer that no forward uses: no gradient on any rank."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(3))
        self.out = nn.Linear(FEATURES, TARGETS)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.blocks[0](x)) + torch.tanh(self.blocks[2](x)))


@_model("layerdrop", _routed, _routed_squares)
class LayerDrop(nn.Module):
    """Which of four layers run is part of the batch: ranks differ, sometimes none or all run."""

    def __init__(self, checkpoint: str | None = None) -> None:
        super().__init__()
        self.checkpoint = checkpoint
        self.inp = nn.Linear(FEATURES, 11)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(11, 13), nn.Tanh(), nn.Linear(13, 11)) for _ in range(4))
        self.out = nn.Linear(11, TARGETS)

    def forward(self, x: Tensor, keep: list[bool]) -> Tensor:
        x = self.inp(x)
        for block, kept in zip(self.blocks, keep, strict=True):
            if kept:
                x = x + _recompute(self.checkpoint, block, x)
        return self.out(x)


@_model("branches", _routed, _routed_squares)
class Branches(nn.Module):
    """Each micro-batch goes through one expert, and through the rest in an order of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(4))
        self.rest = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(2))
        self.out = nn.Linear(FEATURES, TARGETS)

    def forward(self, x: Tensor, keep: list[bool]) -> Tensor:
        x = torch.tanh(self.experts[2 * keep[0] + keep[1]](x))
        for block in self.rest if keep[2] else reversed(self.rest):
            x = torch.tanh(block(x))
        return self.out(x)


# ----------------------------------------------------------------------------------------- what a forward gives back

Pair = namedtuple("Pair", "y extra")


@dataclass
class Record:
    y: Tensor
    extra: Any


class Unknown:
    """An output class that no pytree library knows."""

    __slots__ = ("extra", "y")

    def __init__(self, y: Tensor, extra: Any) -> None:
        self.y, self.extra = y, extra


OUTPUTS: dict[str, tuple[Callable[[Tensor, Any], Any], Callable[[Any], Tensor]]] = {  # wrap, and read back
    "dict": (lambda y, extra: {"extra": extra, "y": y}, lambda out: out["y"]),
    "tuple": (lambda y, extra: (extra, y), lambda out: out[1]),
    "dataclass": (Record, lambda out: out.y),
    "namedtuple": (Pair, lambda out: out.y),
    "unknown": (Unknown, lambda out: out.y),
    "nested": (lambda y, extra: [{"deep": (None, [Unknown(y, extra)])}], lambda out: out[0]["deep"][1][0].y),
}


class Wrapping(nn.Module):
    def __init__(self, size: int, following: int, kind: str) -> None:
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(size, following)

    def forward(self, x: Tensor) -> Any:
        return OUTPUTS[self.kind][0](torch.tanh(self.linear(x)), {"step": 3, "none": None})


def _read_outputs(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(OUTPUTS[model.kind][1](model(batch[0])), batch[1])


@_model("outputs", loss=_read_outputs)
class Outputs(nn.Module):
    """Blocks and root return `kind`: dict, tuple, dataclass, namedtuple, unknown (class) or nested."""

    def __init__(self, kind: str = "dict") -> None:
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList([Wrapping(FEATURES, 11, kind), Wrapping(11, 13, kind), Wrapping(13, TARGETS, kind)])

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks[:-1]:
            x = OUTPUTS[self.kind][1](block(x))
        return self.blocks[-1](x)


class Balanced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gate = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, 3)
        self.auxiliary: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.auxiliary = self.gate(x).softmax(-1).mean(0).square().sum()
        return torch.tanh(self.linear(x))


def _with_auxiliary(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    main = _squares(model, batch)
    return main + 0.1 * sum(block.auxiliary for block in model.blocks)


@_model("auxiliary", loss=_with_auxiliary)
class Auxiliary(nn.Module):
    """Each block leaves a second loss in an attribute; its gradient does not pass through the block's output."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Balanced() for _ in range(2))
        self.out = nn.Linear(FEATURES, TARGETS)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(x)
