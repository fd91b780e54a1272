"""A small GPT whose blocks have experts, divided among groups of ranks, on the text of Python's own library.

torchrun --standalone --nproc-per-node 4 examples/moe.py --ep 2

Each of EP ranks in a row holds E/EP experts and gets their tokens from all of them. All else is sharded over all ranks.
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
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import zeroshard
from zeroshard import Comm, Layout, Precision

DEVICE = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
CONTEXT, HIDDEN, EXPERTS, TOP = 32, 64, 4, 2


class Experts(nn.Module):
    """This rank's experts: rows of tensors that have one row for each expert. group: the ranks that have the others."""

    def __init__(self, group=None, apart=True):
        super().__init__()
        self.group, self.apart = group, apart
        self.ranks = 1 if group is None else dist.get_world_size(group)
        local = EXPERTS // self.ranks
        mine = slice(0, local) if group is None else slice(*(local * (dist.get_rank(group) + i) for i in (0, 1)))
        # Every rank draws all experts, so that those it keeps do not depend on how many it keeps.
        self.up = nn.Parameter((torch.randn(EXPERTS, 4 * HIDDEN, HIDDEN) / 8)[mine].clone())
        self.down = nn.Parameter((torch.randn(EXPERTS, HIDDEN, 4 * HIDDEN) / 16)[mine].clone())

    def forward(self, tokens, counts):
        """tokens: those of this rank, in the order of their experts. counts: of each expert, how many."""
        asked = counts.view(self.ranks, -1)  # by the rank that has the expert
        came = asked
        if self.group is not None:
            came = torch.empty_like(asked)  # of each source how many for each expert here
            dist.all_to_all_single(came, asked, group=self.group)
            tokens = self.exchange(tokens, asked, came)
        pieces = list(tokens.split(came.flatten().tolist()))  # [source, expert]
        local = came.shape[1]
        if self.apart:
            # Each source's tokens are multiplied apart: the same products, and so the same bits, at any EP.
            up, down = (zeroshard.apart(weight, self.ranks) for weight in (self.up, self.down))
            out = [self.expert(p, up[i // local, i % local], down[i // local, i % local]) for i, p in enumerate(pieces)]
        else:
            # One product for each expert: fewer and larger ones, with other last bits at another EP.
            out = [None] * len(pieces)
            for at in range(local):
                product = self.expert(torch.cat(pieces[at::local]), self.up[at], self.down[at])
                out[at::local] = product.split(came[:, at].tolist())
        tokens = torch.cat(out)
        return tokens if self.group is None else self.exchange(tokens, came, asked)

    @staticmethod
    def expert(tokens, up, down):
        return F.linear(F.gelu(F.linear(tokens, up)), down)

    def exchange(self, tokens, sent, came):
        """Tokens to the ranks that have their experts, or back; their gradients go the other way."""
        counts = (each.sum(1).tolist() for each in (came, sent))
        return all_to_all_single_autograd(tokens, *counts, self.group).view_as(tokens.new_empty(came.sum(), HIDDEN))


class Block(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.first, self.second = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.mix, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = Experts(**options)

    def forward(self, x):
        heads = self.mix(self.first(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        tokens = self.second(x).flatten(0, 1)
        share, chosen = self.router(tokens.float()).softmax(-1).topk(TOP)  # in fp32, whatever the tokens are in
        order = chosen.flatten().argsort(stable=True)
        answers = self.experts(tokens[order // TOP], chosen.flatten().bincount(minlength=EXPERTS))
        back = torch.empty_like(answers).index_copy(0, order, answers).unflatten(0, (-1, TOP))
        return x + (back * share.to(back.dtype)[..., None]).sum(1).view_as(x)


class GPT(nn.Module):
    def __init__(self, blocks=2, **options):
        super().__init__()
        self.bytes = nn.Embedding(256, HIDDEN)
        self.places = nn.Parameter(torch.randn(CONTEXT, HIDDEN) * 0.1)
        self.blocks = nn.ModuleList(Block(**options) for _ in range(blocks))
        self.head = nn.Linear(HIDDEN, 256)

    def forward(self, x, y):
        hidden = self.bytes(x) + self.places
        for block in self.blocks:
            hidden = block(hidden)
        return F.cross_entropy(self.head(hidden).float().flatten(0, 1), y.flatten())


TEXT = torch.tensor(list(inspect.getsource(pydoc_data.topics).encode()))


def batch(step, rank):
    """Every rank its own micro-batches."""
    draw = torch.Generator().manual_seed(1000 * step + rank)
    window = TEXT[torch.randint(len(TEXT) - CONTEXT, (8, 1), generator=draw) + torch.arange(CONTEXT + 1)]
    return window[:, :-1], window[:, 1:]


def sharded(ep, stage, *, apart=True, bf16=False, layout=None):
    """The model of this rank, its optimizer, and what `shard` answers."""
    mesh = init_device_mesh(DEVICE.type, (dist.get_world_size() // ep, ep), mesh_dim_names=("edp", "ep"))
    torch.manual_seed(0)
    model = GPT(group=mesh.get_group("ep"), apart=apart)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    zero = zeroshard.shard(
        model,
        optimizer,
        stage=stage,
        device=DEVICE,
        comm=Comm(group=mesh),
        layout=Layout(along={"*.experts.*": "edp"}, apart=apart, **(layout or {})),
        precision=Precision(param_dtype=torch.bfloat16, keep=["*.router.*"]) if bf16 else None,
    )
    return model, optimizer, zero


def train(model, optimizer, zero, steps, first=1):
    """The plain loop; the loss of the last step, on this rank."""
    for step in range(first, first + steps):
        loss = model(*(each.to(DEVICE) for each in batch(step, zero.rank)))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # every expert counts once
        optimizer.step()
        optimizer.zero_grad()
        if zero.rank == 0 and step % 10 == 0:
            print(f"step {step}  loss {loss.item():.3f}  held {sum(zero.ledger().held.values()):,} bytes", flush=True)
    return loss.item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--ep", type=int, default=2, help="ranks that divide the experts among themselves")
    parser.add_argument("--grouped", action="store_true", help="one product for each expert: faster; bits depend on EP")
    parser.add_argument("--bf16", action="store_true")
    args = parser.parse_args()
    dist.init_process_group()  # NCCL for what is on GPUs, and gloo
    train(*sharded(args.ep, args.stage, apart=not args.grouped, bf16=args.bf16), args.steps)
    dist.destroy_process_group()
