"""ZeRO-1 from nothing but torch, in three layers: a buffer, a data-parallel module, a distributed optimizer.

    Buffer                     contiguous memory: views into it, a rank's shard of it, what is sent of it
    DistributedDataParallel    buffers of parameters and of gradients for each kind and dtype: reduce_scatter_grads,
                               allgather_params, get_grad_shard, write_param_shard
    DistributedOptimizer       fp32 masters of this rank's shard, and an Adam that knows of nothing else

One step, on each of N ranks:

    forward     with all parameters, views of the parameter buffer
    backward    p.grad is added to p.main_grad, a view of the gradient buffer; a bucket that is full is reduce-scattered
    step        the shard's gradient in fp32, Adam, the new shard written back, bucket by bucket gathered again
    forward     waits, module by module, for the bucket it needs

    torchrun --standalone --nproc-per-node 2 examples/three_layers.py

It is for reading: zeroshard does the same at stage 1, and tests/tools/test_three_layers.py holds it against this file,
bit by bit and byte by byte, on two ranks. What it leaves out, and zeroshard has: sums that are alike at any number of
ranks, stages 2 and 3, clipping, checkpoints, edits, and errors that name a rank.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

# Their older names, before torch 2.13, warn where there are these.
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# --- the model ------------------------------------------------------------------------------------------------------


class MLP(nn.Module):
    def __init__(self, hidden_dim):
        super().__init__()
        self.fc1 = nn.Linear(hidden_dim, hidden_dim * 4, dtype=torch.bfloat16)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden_dim * 4, hidden_dim, dtype=torch.bfloat16)

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))


class Experts(nn.Module):
    def __init__(self, hidden_dim, count):
        super().__init__()
        self.all = nn.ModuleList(MLP(hidden_dim) for _ in range(count))

    def forward(self, x, best):
        return sum((best == number) * expert(x) for number, expert in enumerate(self.all))


class MoE(nn.Module):
    """Every token to its best expert, all of which each rank has. The router is fp32, the rest bf16."""

    def __init__(self, hidden_dim, count=2):
        super().__init__()
        self.router = nn.Linear(hidden_dim, count)
        self.experts = Experts(hidden_dim, count)

    def forward(self, x):
        chances, best = self.router(x.float()).softmax(-1).max(-1, keepdim=True)
        return chances.to(x.dtype) * self.experts(x, best)


class ToyModel(nn.Module):
    def __init__(self, hidden_dim=13, num_layers=3):
        super().__init__()
        kinds = (MoE if number == 1 else MLP for number in range(num_layers))
        self.layers = nn.ModuleList(kind(hidden_dim) for kind in kinds)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


def kind_of(name):
    """Where experts are spread over ranks they are averaged over fewer of them, so their buffers are their own."""
    return "expert" if ".experts." in name else "dense"


# --- layer 1: the buffer --------------------------------------------------------------------------------------------


@dataclass
class Bucket:
    """Elements [start, start + padded_numel) of a buffer, in N equal shards: what one message moves."""

    start: int
    numel: int = 0
    padded_numel: int = 0
    shard_numel: int = 0
    _local_shard: torch.Tensor | None = None  # a view into the buffer


@dataclass
class Fragment:
    """The part of a tensor that lies in this rank's shard of its bucket: [start, stop) of the shard, or nothing."""

    bucket: int
    start: int
    stop: int


class Buffer:
    """Tensors end to end in one run of memory, bucket by bucket. A bucket's end is padded to a multiple of N.

    Shards are cut evenly and respect no tensor's bounds: of a tensor a rank may own a part.
    """

    def __init__(self, tensors, rank, world_size, dtype, device=None, bucket_numel=None):
        self.rank, self.world_size = rank, world_size
        self.buckets = [Bucket(0)]
        places = []  # of each tensor: its bucket, and where it begins in it
        for tensor in tensors:
            bucket = self.buckets[-1]
            if bucket.numel and bucket_numel and bucket.numel + tensor.numel() > bucket_numel:
                self._close(bucket)
                bucket = Bucket(bucket.start + bucket.padded_numel)
                self.buckets.append(bucket)
            places.append((len(self.buckets) - 1, bucket.numel))
            bucket.numel += tensor.numel()
        self._close(self.buckets[-1])
        self._data = torch.zeros(self.buckets[-1].start + self.buckets[-1].padded_numel, dtype=dtype, device=device)
        for bucket in self.buckets:
            start = bucket.start + rank * bucket.shard_numel
            bucket._local_shard = self._data[start : start + bucket.shard_numel]  # no more memory
        self._views, self.fragments = [], []
        for tensor, (number, offset) in zip(tensors, places, strict=True):
            start = self.buckets[number].start + offset
            self._views.append(self._data[start : start + tensor.numel()].view(tensor.shape))
            size = self.buckets[number].shard_numel
            cut = (min(max(at - rank * size, 0), size) for at in (offset, offset + tensor.numel()))
            self.fragments.append(Fragment(number, *cut))

    def _close(self, bucket):
        bucket.padded_numel = math.ceil(bucket.numel / self.world_size) * self.world_size
        bucket.shard_numel = bucket.padded_numel // self.world_size

    def get_views(self):
        return self._views

    def get_local_shard(self, number):
        return self.buckets[number]._local_shard

    def get_shard(self, index):
        """What this rank owns of a tensor."""
        fragment = self.fragments[index]
        return self.buckets[fragment.bucket]._local_shard[fragment.start : fragment.stop]

    def reduce_scatter(self, number, group=None):
        """Each rank gets the sum of its shard. In place: what lies outside the shard means nothing afterwards."""
        return reduce_scatter_single(self.buckets[number]._local_shard, self._whole(number), group=group, async_op=True)

    def all_gather(self, number, group=None):
        """Every rank gets every shard."""
        return all_gather_single(self._whole(number), self.buckets[number]._local_shard, group=group, async_op=True)

    def _whole(self, number):
        bucket = self.buckets[number]
        return self._data[bucket.start : bucket.start + bucket.padded_numel]

    def zero(self):
        self._data.zero_()

    @property
    def nbytes(self):
        return self._data.nbytes


# --- layer 2: the data-parallel module ------------------------------------------------------------------------------


@dataclass
class Group:
    """The parameters of one kind and dtype, and their two buffers."""

    params: list
    param_buffer: Buffer
    grad_buffer: Buffer


class DistributedDataParallel:
    """Parameters and gradients become views of buffers; full buckets are sent while backward goes on."""

    def __init__(self, module, rank, world_size, process_group=None, device=None, bucket_numel=None):
        self.module, self.process_group = module, process_group
        by_kind = {}
        for name, param in module.named_parameters():
            by_kind.setdefault((kind_of(name), param.dtype), []).append(param)
        self.groups, self._place = [], {}  # of a parameter: its group, and its index in that
        for (_, dtype), params in by_kind.items():
            buffers = [Buffer(params, rank, world_size, dtype, device, bucket_numel) for _ in range(2)]
            for index, param in enumerate(params):
                self._place[param] = len(self.groups), index
            self.groups.append(Group(params, *buffers))
        self._init_buffers()
        # In the order in which forward needs them; gradients come in the opposite one.
        self._order = [(group, number) for group in self.groups for number in range(len(group.param_buffer.buckets))]
        self._gathers, self._reductions, self._waiting, self._synced = {}, {}, {}, True
        for param in self._place:
            param.register_post_accumulate_grad_hook(self._on_gradient)
        for part in module.modules():
            own = list(part.parameters(recurse=False))
            if own:
                part.register_forward_pre_hook(lambda part, args, own=own: self._wait_for(own))

    def _init_buffers(self):
        for group in self.groups:
            views = zip(group.params, group.param_buffer.get_views(), group.grad_buffer.get_views(), strict=True)
            for param, p_view, g_view in views:
                p_view.copy_(param.data)
                param.data = p_view
                param.main_grad = g_view

    # gradients

    def _on_gradient(self, param):
        """Autograd has written p.grad, a tensor of its own. It is added: another micro-batch must not replace it."""
        param.main_grad.add_(param.grad)
        param.grad = None
        key = self._bucket_of(param)
        if self._synced:
            if not self._waiting:
                self._begin_waiting()
            self._waiting[key].discard(param)
            self.reduce_scatter_grads()

    def _bucket_of(self, param):
        group, index = self._place[param]
        return group, self.groups[group].param_buffer.fragments[index].bucket

    def _begin_waiting(self):
        for param in self._place:
            self._waiting.setdefault(self._bucket_of(param), set()).add(param)

    def reduce_scatter_grads(self, *, all_of_them=False):
        """Launch that of each bucket that is full.

        Last bucket first, in the same order on all ranks, whatever order gradients come in.
        """
        for key in sorted(self._waiting, reverse=True):
            if key not in self._reductions:
                if self._waiting[key] and not all_of_them:
                    return
                group, number = key
                self._reductions[key] = self.groups[group].grad_buffer.reduce_scatter(number, self.process_group)

    @contextlib.contextmanager
    def no_sync(self):
        """Backwards inside add up in the buffer and send nothing."""
        self._synced = False
        try:
            yield
        finally:
            self._synced = True

    def sync_grads(self):
        """After backward: send what is not full (without a gradient there are zeros), and wait for all of it."""
        self._begin_waiting()
        self.reduce_scatter_grads(all_of_them=True)
        for work in self._reductions.values():
            work.wait()
        self._reductions.clear()
        self._waiting.clear()

    def zero_grad_buffer(self):
        """Before the next step: nothing of the last one's is to be reduced once more."""
        for group in self.groups:
            group.grad_buffer.zero()

    def get_grad_shard(self, param):
        group, index = self._place[param]
        return self.groups[group].grad_buffer.get_shard(index)

    # parameters

    def get_param_shard(self, param):
        group, index = self._place[param]
        return self.groups[group].param_buffer.get_shard(index)

    def write_param_shard(self, param, data):
        self.get_param_shard(param).copy_(data)

    def allgather_params(self):
        """Launch that of the first bucket; each one that is waited for launches the next."""
        self._gathers.clear()
        self._launch(0)

    def _launch(self, at):
        if at < len(self._order) and at not in self._gathers:
            group, number = self._order[at]
            self._gathers[at] = group.param_buffer.all_gather(number, self.process_group)

    def _wait_for(self, params):
        """Before a module's forward: its buckets, and those before them, have arrived; the next is on its way."""
        if self._gathers:
            first = [0]
            for group in self.groups:
                first.append(first[-1] + len(group.param_buffer.buckets))
            last = max(first[group] + number for group, number in map(self._bucket_of, params))
            for at in range(last + 1):
                self._launch(at)
                self._gathers[at].wait()
                self._launch(at + 1)

    def sync_params(self):
        """All parameters are here: for whoever looks at them outside of forward."""
        self._wait_for(self._place)

    def __call__(self, *args):
        return self.module(*args)


# --- layer 3: the distributed optimizer -----------------------------------------------------------------------------


class DistributedOptimizer:
    """fp32 masters of what this rank owns; Adam sees 1-D tensors and nothing of the distribution.

    A shard that is fp32 already is its own master.
    """

    def __init__(self, ddp, lr=1e-3, betas=(0.9, 0.999), eps=1e-8):
        self.ddp = ddp
        self.shards = []  # (parameter, shard_main_param): fragments that are not empty
        self.masters = []  # of each bucket, this rank's shard in fp32
        for group in ddp.groups:
            buffer = group.param_buffer
            shards = [buffer.get_local_shard(number) for number in range(len(buffer.buckets))]
            shard_fp32 = [shard.float() for shard in shards]  # the shard itself, where it is fp32
            self.masters += [main for main, shard in zip(shard_fp32, shards, strict=True) if main is not shard]
            for param, fragment in zip(group.params, buffer.fragments, strict=True):
                if fragment.start < fragment.stop:
                    own = shard_fp32[fragment.bucket][fragment.start : fragment.stop]
                    self.shards.append((param, nn.Parameter(own, requires_grad=False)))
        self.adam = torch.optim.Adam([main for _, main in self.shards], lr=lr, betas=betas, eps=eps)

    def step(self):
        self.ddp.sync_params()  # a bucket that no forward has asked for
        for param, shard_main_param in self.shards:
            shard_main_param.grad = self.ddp.get_grad_shard(param).float()
        self.adam.step()
        for param, shard_main_param in self.shards:
            shard_main_param.grad = None
            self.ddp.write_param_shard(param, shard_main_param.data.to(param.dtype))
        self.ddp.allgather_params()

    def zero_grad(self):
        self.ddp.zero_grad_buffer()

    def nbytes(self):
        """Bytes at rest on this rank, by state."""
        found = {
            "parameters": sum(group.param_buffer.nbytes for group in self.ddp.groups),
            "gradients": sum(group.grad_buffer.nbytes for group in self.ddp.groups),
            "master": sum(master.nbytes for master in self.masters),
        }
        for state in self.adam.state.values():
            for name, tensor in state.items():
                found[name] = found.get(name, 0) + tensor.nbytes
        return found


# --- a run ----------------------------------------------------------------------------------------------------------


def batch(step, index, hidden_dim=13):
    """Micro-batch `index` of a step: the same on whichever rank computes it."""
    generator = torch.Generator().manual_seed(1000 * step + index)
    return torch.randn(6, hidden_dim, generator=generator).bfloat16()


def train(steps=3, accumulate=2, bucket_numel=600):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    ddp = DistributedDataParallel(ToyModel(), rank, world_size, bucket_numel=bucket_numel)
    optimizer = DistributedOptimizer(ddp)
    for step in range(steps):
        for turn in range(accumulate):
            with contextlib.nullcontext() if turn == accumulate - 1 else ddp.no_sync():
                # The sum over the ranks of a loss that is divided already is the average.
                loss = ddp(batch(step, turn * world_size + rank)).sum() / world_size
                loss.backward()
        ddp.sync_grads()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step}: loss of rank 0's last micro-batch {loss.item():.4f}")
    ddp.sync_params()
    return ddp, optimizer


if __name__ == "__main__":
    dist.init_process_group("gloo")
    _, optimizer = train()
    held = [None] * dist.get_world_size()
    dist.all_gather_object(held, optimizer.nbytes())
    if dist.get_rank() == 0:  # one rank prints: several would write into each other's lines
        for rank, nbytes in enumerate(held):
            print(f"rank {rank} holds {nbytes}")
    dist.destroy_process_group()
