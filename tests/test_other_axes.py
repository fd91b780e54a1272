"""Beside pipeline and context parallelism over another axis of the mesh, of which zeroshard sees only its own part.

The references are plain torch on the ranks of the other axis: with the same micro-batches, or with gradients added up
by hand.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import zeroshard
from zeroshard import Comm

WIDTH, CHUNKS = 8, 4


def half_of(pp):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(*layers[2 * pp : 2 * pp + 2])


def batch(step, chunk):
    generator = torch.Generator().manual_seed(100 * step + chunk)
    return torch.randn(2, WIDTH, generator=generator), torch.randn(2, WIDTH, generator=generator)


def piped(dp, schedule, scale, stage=None):
    """Ranks are dp * 2 + pp. stage: None is without zeroshard, where one data rank sees the chunks of all."""
    mesh = init_device_mesh("cpu", (dp if stage is not None else 1, 2), mesh_dim_names=("dp", "pp"))
    pp = mesh.get_local_rank("pp")
    model = half_of(pp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    zero = None if stage is None else zeroshard.shard(model, optimizer, stage=stage, comm=Comm(group=mesh["dp"]))
    mine = range(CHUNKS * dp) if zero is None else range(zero.rank, CHUNKS * dp, dp)
    cut = PipelineStage(model, pp, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    run = schedule(cut, n_microbatches=len(mine), loss_fn=lambda y, t: (y - t).square().mean(), scale_grads=scale)
    for step in range(3):
        x, target = (torch.cat(each) for each in zip(*(batch(step, chunk) for chunk in mine), strict=True))
        if pp == 0:
            run.step(x)
        else:
            run.step(target=target)
        for p in model.parameters() if zero is None and not scale else ():  # else by all chunks already
            p.grad.div_(dp)
        optimizer.step()
        optimizer.zero_grad()
    return weights(model, zero)


def weights(model, zero):
    with contextlib.nullcontext() if zero is None else zero.gathered():
        return [p.detach().clone() for p in model.parameters()]


@pytest.mark.row(100)
@pytest.mark.parametrize(("schedule", "scale"), [(ScheduleGPipe, True), (Schedule1F1B, False)], ids=["GPipe", "1F1B"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_pipelines_stages_are_sharded_each_over_its_own_ranks(ranks, schedule, scale, stage):
    """Each chunk's backward is one of the step: the bits are those of a pipeline that gets the chunks of all ranks."""
    want = ranks.run(2, piped, 2, schedule, scale)
    for rank, found in enumerate(ranks.run(4, piped, 2, schedule, scale, stage)):
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, want[rank % 2], strict=True))


class Attention(nn.Module):
    """Of the positions of one rank, to those of all ranks of its group."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.group = None

    def forward(self, x):
        keys, values = (all_gather_tensor_autograd(each(x).contiguous(), 0, self.group) for each in (self.k, self.v))
        return x + (self.q(x) @ keys.T).softmax(-1) @ values


def in_context(stage):
    """Ranks are dp * 2 + cp, and each has half of the positions of its data rank's sequence."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    torch.manual_seed(0)
    model = nn.Sequential(*(Attention() for _ in range(2)))
    for layer in model:
        layer.group = mesh.get_group("cp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    zero = None
    if stage is not None:
        zero = zeroshard.shard(model, optimizer, stage=stage, comm=Comm(group=mesh["dp", "cp"]._flatten("dp_cp")))
    for step in range(3):
        x, target = (
            each.repeat(3, 1).chunk(2)[mesh.get_local_rank("cp")] for each in batch(step, dist.get_rank() // 2)
        )
        (model(x) - target).square().mean().backward()
        for p in model.parameters() if zero is None else ():
            everyone = [torch.empty_like(p.grad) for _ in range(4)]
            dist.all_gather(everyone, p.grad)
            total = everyone[0]
            for each in everyone[1:]:
                total = total + each
            p.grad = total / 4
        optimizer.step()
        optimizer.zero_grad()
    return weights(model, zero)


@pytest.mark.processes
@pytest.mark.row(100)
@pytest.mark.parametrize("stage", [0, 3])
def test_an_axis_of_the_context_counts_as_one_of_the_data(ranks, stage):
    """Flattened with that, all its ranks shard, and gradients are added up in rank order."""
    want = ranks.run(4, in_context, None)
    for mine, theirs in zip(ranks.run(4, in_context, stage), want, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
