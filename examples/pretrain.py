"""Pretrain a GPT: from a folder of tokens to weights that Hugging Face's tools read. Copy this file, and change it.

python examples/pretrain.py                                       10 M parameters on Python's own documentation
torchrun --nproc-per-node 8 examples/pretrain.py --layers 12 --width 768 --vocab 50304 --data tokens/    124 M
torchrun --nproc-per-node 8 examples/pretrain.py --layers 32 --width 4096 --recompute ...                6.6 B

A folder of tokens has one-dimensional .npy files, or .bin files of 16-bit numbers, as nanoGPT writes them. Run it again
with the same --out, on any number of ranks: it goes on from the newest checkpoint, with the same bits. Under SLURM, on
each node: srun torchrun --nnodes $SLURM_NNODES --nproc-per-node 8 --rdzv-endpoint $HOST:29500 examples/pretrain.py ...
"""

# /// script
# requires-python = ">=3.11"
# dependencies = ["zeroshard[torch]"]
# [tool.uv.sources]
# zeroshard = { path = "..", editable = true }
# ///

import argparse
import inspect
import itertools
import math
import os
import pydoc_data.topics
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import zeroshard

parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--data", type=Path, help="a folder of tokens; none: the bytes of Python's documentation")
parser.add_argument("--out", type=Path, default=Path("run"), help="checkpoints, and the weights at the end")
parser.add_argument("--layers", type=int, default=6)
parser.add_argument("--width", type=int, default=384)
parser.add_argument("--vocab", type=int, default=256)
parser.add_argument("--context", type=int, default=128, help="tokens of a sequence")
parser.add_argument("--sequences", type=int, default=4, help="of a micro-batch")
parser.add_argument("--micro-batches", type=int, default=8, help="of a step, on all ranks together")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--lr", type=float, default=6e-4, help="of AdamW")
parser.add_argument("--muon-lr", type=float, default=0.02, help="of Muon, which updates the blocks' matrices")
parser.add_argument("--warm-up", type=int, default=20, help="steps until the rates are whole; they end at a tenth")
parser.add_argument("--stage", type=int, default=3)
parser.add_argument("--fp32", action="store_true", help="on a GPU too; the CPU computes in fp32 anyway")
parser.add_argument("--recompute", action="store_true", help="compute activations again in backward")
parser.add_argument("--every", type=int, default=100, help="steps between validations, and between checkpoints")
parser.add_argument("--peak", type=float, help="the GPU's FLOP/s, for MFU; none: those of a large matrix product")
args = parser.parse_args()


# --- the model -------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.between = nn.LayerNorm(args.width, bias=False), nn.LayerNorm(args.width, bias=False)
        self.qkv = nn.Linear(args.width, 3 * args.width, bias=False)
        self.out = nn.Linear(args.width, args.width, bias=False)
        self.up = nn.Linear(args.width, 4 * args.width, bias=False)
        self.down = nn.Linear(4 * args.width, args.width, bias=False)

    def forward(self, x):
        q, k, v = self.qkv(self.before(x)).unflatten(2, (3, -1, 64)).permute(2, 0, 3, 1, 4)  # heads of 64
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.between(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(args.vocab, args.width), nn.Embedding(args.context, args.width)
        self.blocks = nn.ModuleList(Block() for _ in range(args.layers))
        self.norm = nn.LayerNorm(args.width, bias=False)

    def forward(self, x):
        hidden = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            hidden = block(hidden)
        return F.linear(self.norm(hidden), self.tokens.weight)  # tied: the embedding is the head


def init(module):
    """Initialise one module, when its weights are made."""
    if isinstance(module, nn.LayerNorm):
        module.reset_parameters()
    elif isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)


def loss_of(model, window):
    logits = model(window[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), window[:, 1:].flatten())


def optimizers_of(model):
    matrices = [param for param in model.blocks.parameters() if param.dim() == 2]
    others = [param for name, param in model.named_parameters() if param.dim() != 2 or not name.startswith("blocks")]
    muon = torch.optim.Muon(matrices, lr=args.muon_lr, weight_decay=0.01)
    return [muon, torch.optim.AdamW(others, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.01, fused=True)]


# --- the data --------------------------------------------------------------------------------------------------------


class Windows(torch.utils.data.Dataset):
    """Sequences of tokens, each with the token that comes after it."""

    def __init__(self, files):
        self.files = files
        self.ends = np.cumsum([(len(each) - 1) // args.context for each in files])

    def __len__(self):
        return int(self.ends[-1])

    def __getitem__(self, at):
        file = int(np.searchsorted(self.ends, at, side="right"))
        start = (at - (int(self.ends[file - 1]) if file else 0)) * args.context
        return torch.from_numpy(self.files[file][start : start + args.context + 1].astype(np.int64))


def tokens():
    """Return what is trained on, and the last twentieth, which is not."""
    if args.data is None:
        files = [np.frombuffer(inspect.getsource(pydoc_data.topics).encode(), np.uint8)]
    else:
        paths = sorted(path for path in args.data.iterdir() if path.suffix in (".npy", ".bin"))
        files = [np.load(p, "r") if p.suffix == ".npy" else np.memmap(p, np.uint16, "r") for p in paths]
    *first, last = files
    cut = len(last) * 19 // 20
    return Windows([*first, last[:cut]]), Windows([last[cut:]])


# --- before the first step -------------------------------------------------------------------------------------------

device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
low = device.type != "cpu" and not args.fp32
settings = {
    "stage": args.stage,
    "precision": zeroshard.Precision(param_dtype=torch.bfloat16) if low else None,
    "layout": zeroshard.Layout(recompute=args.recompute, matrices={"*.qkv.weight": 3}),  # Muon sees q, k and v
}
train, held_out = tokens()


def job():
    """What `zeroshard.plan` counts, on tensors without memory: this program's own model and optimizers."""
    model = GPT()
    return {
        "model": model,
        "optimizer": lambda _: optimizers_of(model),
        "batch": lambda step, index: torch.zeros(args.sequences, args.context + 1, dtype=torch.int64),
        "loss": loss_of,
    }


if int(os.environ.get("RANK", 0)) == 0:
    world = int(os.environ.get("WORLD_SIZE", 1))
    (planned,) = zeroshard.plan(job, zeroshard.Machine(ranks=world), **settings).stages
    print(f"planned for a rank of {world}: {planned.total:,} bytes between steps, {planned.peak:,} bytes at most")

torch.manual_seed(0)
with torch.device("meta"):  # no rank ever holds the whole model
    model = GPT()
muon, adamw = optimizers = optimizers_of(model)
zero = zeroshard.shard(model, optimizers, device=device, init=init, **settings)
numel = sum(param.numel() for param in model.parameters())
batches = zero.batches(train, per_step=args.micro_batches, size=args.sequences, drop_last=True)
if newest := zero.latest(args.out):
    zero.load(newest)
print(f"rank {zero.rank} of {zero.world_size}: {numel / 1e6:.1f} M parameters, {len(train):,} sequences", flush=True)


def rate(step):
    """The part of the learning rates in this step: a line up, and half a cosine down to a tenth."""
    down = (step - args.warm_up) / max(args.steps - args.warm_up, 1)
    return min((step + 1) / max(args.warm_up, 1), 0.55 + 0.45 * math.cos(math.pi * max(down, 0)))


def validated():
    """The loss of sequences that are not trained on. Every rank computes all of them, so each has the same number."""
    every = max(len(held_out) // 16, 1)
    windows = torch.stack([held_out[at] for at in range(0, len(held_out), every)][:16]).to(device)
    with torch.no_grad():
        return torch.stack([loss_of(model, part) for part in windows.split(args.sequences)]).mean().item()


def fastest():
    """FLOP/s of a large matrix product here, in the dtype that the model computes in."""
    a = torch.ones(2048, 2048, device=device, dtype=torch.bfloat16 if low else torch.float32)
    ends = [(time.perf_counter(), (a @ a)[0, 0].item())[0] for _ in range(6)]  # item() waits for the device
    return 2 * 2048**3 / min(after - before for before, after in itertools.pairwise(ends))


# --- train -----------------------------------------------------------------------------------------------------------

peak = args.peak or fastest()
per_token = 6 * numel + 12 * args.layers * args.width * args.context  # operations (Chowdhery et al. 2022, appendix B)
losses, done = [], batches.epoch * len(batches) + batches.step
while done < args.steps:
    for step in batches:
        began, parts = time.perf_counter(), []
        for optimizer, lr in ((muon, args.muon_lr), (adamw, args.lr)):
            for group in optimizer.param_groups:
                group["lr"] = lr * rate(done)
        for window in step:
            loss = loss_of(model, window.to(device))
            loss.backward()
            parts.append(loss.detach())
        zero.clip_grad_norm_(1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        done += 1
        losses.append(torch.stack(parts).mean().item())  # of this rank; waits for the device
        speed = args.micro_batches * args.sequences * args.context / (time.perf_counter() - began)
        if zero.rank == 0:
            mfu = speed * per_token / (peak * zero.world_size)
            print(f"step {done}  loss {losses[-1]:.4f}  {speed:,.0f} tokens/s  MFU {mfu:.1%}", flush=True)
        if done % args.every == 0 or done == args.steps:
            found = validated()
            if zero.rank == 0:
                print(f"step {done}  validation loss {found:.4f}", flush=True)
            zero.save(args.out / f"step-{done:07}", asynchronous=True, keep=2)
        if done == args.steps:
            break

# --- afterwards ------------------------------------------------------------------------------------------------------

zero.export(args.out / "weights", dtype=torch.bfloat16 if low else None, overwrite=True)
if zero.rank == 0 and losses:
    least, most, bars = min(losses), max(losses), "▁▂▃▄▅▆▇█"
    shown = losses[:: max(len(losses) // 60, 1)]
    print("".join(bars[round(7 * (each - least) / max(most - least, 1e-9))] for each in shown), end="  ")
    print(f"loss {losses[0]:.4f} to {losses[-1]:.4f}")
    print("rank 0 holds", ", ".join(f"{n:,} bytes of {state}" for state, n in zero.ledger().held.items() if n))
with zero.gathered(), torch.no_grad():  # whole weights on every rank: leave this out for a model that does not fit
    if zero.rank == 0:
        text, draw = held_out[0][None, : args.context // 4], torch.Generator().manual_seed(0)
        for _ in range(100):
            logits = model(text[:, -args.context :].to(device))[0, -1].float().cpu()
            text = torch.cat([text, torch.multinomial((logits / 0.8).softmax(0), 1, generator=draw)[None]], 1)
        print(bytes(text[0].tolist()).decode(errors="replace") if args.vocab == 256 else text[0].tolist())
