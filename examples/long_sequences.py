"""A GPT over sequences that several ranks divide: each has a piece of the tokens, and some heads in attention.

torchrun --standalone --nproc-per-node 4 examples/long_sequences.py --sp 4

Everything but attention looks at one token at a time, so a rank needs its own tokens only. Before attention an
all-to-all gives each rank all tokens of some heads, and after it another one gives the tokens back (DeepSpeed-Ulysses,
Jacobs et al. 2023). What looks at one token runs tile by tile, and again in backward: of the inner activations of an
MLP, and of the logits, there is one tile's at a time.

zeroshard shards over all ranks: those that divide a sequence count as data ranks. The loss of a rank is the mean over
its own tokens, and the mean over ranks that of all tokens.
"""

# /// script
# requires-python = ">=3.11"
# dependencies = ["zeroshard[torch]"]
# [tool.uv.sources]
# zeroshard = { path = "..", editable = true }
# ///

import argparse
import functools
import inspect
import os
import pydoc_data.topics
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import zeroshard

DEVICE = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
CONTEXT, HIDDEN, HEADS, BLOCKS, TILES = 256, 64, 4, 2, 4  # tiles of a whole sequence


# --- tile by tile -----------------------------------------------------------------------------------------------------


class Tiled(torch.autograd.Function):
    """A function of tokens and weights, tile by tile along dimension 1; backward computes each tile again.

    Of its activations one tile's are alive at a time, forward and backward. The gradients of its weights are added up
    in the order of the tiles, as those of ranks with a tile each are.
    """

    @staticmethod
    def forward(ctx, function, tiles, tokens, *tensors):
        """tensors: so many along whose dimension 1 tokens lie, and then weights."""
        ctx.function, ctx.tiles, ctx.tokens = function, tiles, tokens
        ctx.save_for_backward(*tensors)
        pieces = [each.chunk(tiles, 1) for each in tensors[:tokens]]
        return torch.cat([function(*inputs, *tensors[tokens:]) for inputs in zip(*pieces, strict=True)], 1)

    @staticmethod
    def backward(ctx, gradient):
        tensors = ctx.saved_tensors
        weights = [each.detach().requires_grad_() for each in tensors[ctx.tokens :]]
        pieces = [each.detach().chunk(ctx.tiles, 1) for each in tensors[: ctx.tokens]]
        found, sums = [], None
        for inputs, mine in zip(zip(*pieces, strict=True), gradient.chunk(ctx.tiles, 1), strict=True):
            inputs = [each.detach().requires_grad_(each.is_floating_point()) for each in inputs]
            wanted = [each for each in inputs if each.requires_grad]
            with torch.enable_grad():
                output = ctx.function(*inputs, *weights)
            gradients = torch.autograd.grad(output, [*wanted, *weights], mine)
            found.append(gradients[: len(wanted)])
            own = gradients[len(wanted) :]
            sums = own if sums is None else [total.add_(each) for total, each in zip(sums, own, strict=True)]
        whole = (torch.cat(each, 1) for each in zip(*found, strict=True))
        of_tokens = [next(whole) if each.is_floating_point() else None for each in tensors[: ctx.tokens]]
        return None, None, None, *of_tokens, *sums


def tiled(function, tiles, tokens, *tensors):
    """tiles: 0 is plain autograd, which keeps all that the function makes."""
    return Tiled.apply(function, tiles, tokens, *tensors) if tiles else function(*tensors)


def embedded(text, places, table, positions):
    return F.embedding(text, table) + F.embedding(places, positions)


def asked(x, gain, bias, weight):
    """Queries, keys and values."""
    return F.linear(F.layer_norm(x, (HIDDEN,), gain, bias), weight)


def answered(x, mixed, out, gain, bias, up, down):
    """What attention has mixed, and the MLP."""
    x = x + F.linear(mixed, out)
    return x + F.linear(F.gelu(F.linear(F.layer_norm(x, (HIDDEN,), gain, bias), up)), down)


def lost(x, targets, gain, bias, head):
    """The loss of each token."""
    logits = F.linear(F.layer_norm(x, (HIDDEN,), gain, bias), head).float()
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)


# --- between the ranks of a sequence ----------------------------------------------------------------------------------


class Pretended(NamedTuple):
    """Ranks that exist only in arithmetic, for a plan: nothing is sent, and all shapes are right."""

    ranks: int


def ranks_of(group):
    if isinstance(group, Pretended):
        return group.ranks
    return 1 if group is None else dist.get_world_size(group)


class Exchange(torch.autograd.Function):
    """Send part j of dimension 0 to rank j, and get part i of this rank from rank i; gradients go back."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group, x, came = group, x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
        if isinstance(group, Pretended):
            return came.copy_(x)
        dist.all_to_all_single(came, x, group=group)
        return came

    @staticmethod
    def backward(ctx, gradient):
        return Exchange.apply(gradient, ctx.group), None


def to_heads(x_BtF, group):
    """This rank's tokens of all heads become all tokens of its heads."""
    ranks = ranks_of(group)
    if ranks == 1:
        return x_BtF
    parts_RBtf = torch.stack(x_BtF.unflatten(-1, (3, ranks, -1)).unbind(-2)).flatten(3)
    return torch.cat(Exchange.apply(parts_RBtf, group).unbind(0), 1)


def to_tokens(x_BTf, group):
    """All tokens of this rank's heads become its tokens of all heads."""
    ranks = ranks_of(group)
    if ranks == 1:
        return x_BTf
    return torch.cat(Exchange.apply(torch.stack(x_BTf.chunk(ranks, 1)), group).unbind(0), -1)


# --- the model --------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, group, tiles):
        super().__init__()
        self.group, self.tiles = group, tiles
        self.first, self.second = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.ask, self.out = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False), nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN, bias=False), nn.Linear(4 * HIDDEN, HIDDEN, bias=False)

    def forward(self, x):
        first, second = (norm.weight for norm in (self.first, self.second))
        heads = tiled(asked, self.tiles, 1, x, first, self.first.bias, self.ask.weight)
        heads = to_heads(heads, self.group).unflatten(-1, (3, -1, HIDDEN // HEADS)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        mixed = to_tokens(mixed, self.group)
        weights = self.out.weight, second, self.second.bias, self.up.weight, self.down.weight
        return tiled(answered, self.tiles, 2, x, mixed, *weights)


class GPT(nn.Module):
    """group: the ranks that divide each sequence; None: this one has all of it."""

    def __init__(self, group=None, tiles=TILES):
        super().__init__()
        self.tiles = tiles // ranks_of(group)  # of a piece
        self.table = nn.Parameter(torch.randn(256, HIDDEN) * 0.1)
        self.positions = nn.Parameter(torch.randn(CONTEXT, HIDDEN) * 0.1)
        self.blocks = nn.ModuleList(Block(group, self.tiles) for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 256, bias=False)

    def forward(self, text, targets, places):
        x = tiled(embedded, self.tiles, 2, text, places, self.table, self.positions)
        for block in self.blocks:
            x = block(x)
        weights = self.norm.weight, self.norm.bias, self.head.weight
        return tiled(lost, self.tiles, 2, x, targets, *weights).mean()


TEXT = torch.tensor(list(inspect.getsource(pydoc_data.topics).encode()))


def batch(step, sequence, piece=0, pieces=1):
    """A piece of the tokens, the targets and the places of some sequences."""
    draw = torch.Generator().manual_seed(1000 * step + sequence)
    window = TEXT[torch.randint(len(TEXT) - CONTEXT, (2, 1), generator=draw) + torch.arange(CONTEXT + 1)]
    whole = window[:, :-1], window[:, 1:], torch.arange(CONTEXT).expand(2, -1)
    return tuple(each.chunk(pieces, 1)[piece].contiguous() for each in whole)


def sharded(sp, stage, tiles=TILES):
    """The model of this rank, its optimizer, what `shard` answers, and this rank's batches."""
    mesh = init_device_mesh(DEVICE.type, (dist.get_world_size() // sp, sp), mesh_dim_names=("dp", "sp"))
    torch.manual_seed(0)
    model = GPT(mesh.get_group("sp") if sp > 1 else None, tiles)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    zero = zeroshard.shard(model, optimizer, stage=stage, device=DEVICE)  # over all ranks
    mine = {"sequence": mesh.get_local_rank("dp"), "piece": mesh.get_local_rank("sp"), "pieces": sp}
    return model, optimizer, zero, functools.partial(batch, **mine)


def train(model, optimizer, zero, batches, steps):
    """The plain loop; this rank's loss in each step."""
    losses = []
    for step in range(1, steps + 1):
        loss = model(*(each.to(DEVICE) for each in batches(step)))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if zero.rank == 0 and step % 10 == 0:
            print(f"step {step}  loss {losses[-1]:.3f}", flush=True)
    return losses


def job():
    """For a plan of one rank of SP=4: SP=4 zeroshard simulate examples/long_sequences.py:job --ranks 4"""
    sp, tiles = int(os.environ.get("SP", "1")), int(os.environ.get("TILES", TILES))
    return {
        "model": GPT(Pretended(sp), tiles),
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
        "batch": lambda step, index: batch(step, index // sp, index % sp, sp),
        "loss": lambda model, given: model(*given),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--sp", type=int, default=2, help="ranks that divide each sequence among themselves")
    args = parser.parse_args()
    dist.init_process_group()  # NCCL for what is on GPUs, and gloo
    train(*sharded(args.sp, args.stage), args.steps)
    dist.destroy_process_group()
