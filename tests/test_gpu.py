"""The engine with its states on a CUDA device: `make gpu`, on a machine that has one.

What can be asked of the CPU too is asked of it in the normal suite, by the same body; so a body that is wrong is found.
"""

from __future__ import annotations

import os
from functools import partial

import pytest
import torch

import models
import ranks
import reference
import zeroshard
from zeroshard import Comm, Layout, Offload, Precision

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
GPT = {"hidden": 24, "layers": 3}
STAGES = (0, 1, 2, 3)
STATES = ("parameters", "gradients", "optimizer")
ALLOCATED = 512  # bytes that CUDA's allocator rounds up to


def start(device, stage, tier="device", *, folder=None, dtype=torch.float32, overlap=True):
    if device != "cpu":  # or the backwards of embeddings and of attention are other sums each time
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    model = models.build("gpt", **GPT).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    zero = zeroshard.shard(
        model,
        optimizer,
        stage=stage,
        precision=Precision(param_dtype=None if dtype == torch.float32 else dtype),
        offload=Offload(**dict.fromkeys(STATES, tier), path=folder if tier == "nvme" else None),
        layout=Layout(bucket_mib=0.005),
        comm=Comm(overlap=overlap),
    )
    return model, optimizer, zero


def step(device, model, optimizer, zero, number):
    losses = []
    for turn in range(2):
        batch = models.batch("gpt", number, turn * zero.world_size + zero.rank)
        batch = torch.utils._pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), batch)
        loss = models.loss("gpt", model, batch)
        (loss / 2).backward()
        losses.append(loss.item())
    losses.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
    optimizer.step()
    optimizer.zero_grad()
    return losses


def trained(device, stage, tier="device", **options):
    model, optimizer, zero = start(device, stage, tier, **options)
    losses = [step(device, model, optimizer, zero, number) for number in range(3)]
    with zero.gathered():
        return losses, reference.weights(model)


def like_stage_0(device, folder, tier, dtype):
    """With its states in the same tier, where that is stepped by another processor: their AdamW are other arithmetic."""
    want = trained(device, 0, "device" if device == "cpu" else tier, folder=folder, dtype=dtype)
    for stage in STAGES:
        for overlap in (True, False):
            got = trained(device, stage, tier, folder=folder, dtype=dtype, overlap=overlap)
            assert got[0] == want[0], f"losses and norms at stage {stage}"
            reference.assert_same(got[1], want[1])


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("tier", ["device", "cpu", "nvme"])
@pytest.mark.parametrize("device", DEVICES)
def test_every_stage_has_the_same_bits(device, tier, dtype, tmp_path):
    """One rank, with its states on the device, in host memory (pinned, where the device is a GPU) and in files."""
    ranks.run(1, like_stage_0, device, str(tmp_path), tier, dtype)


@pytest.mark.full
@pytest.mark.parametrize("device", DEVICES)
def test_ranks_on_one_device_have_the_same_bits(device, tmp_path):
    """Two ranks share the device; gloo takes what they send through host memory."""
    ranks.run(2, partial(like_stage_0, device, str(tmp_path), "device", torch.bfloat16))


@pytest.mark.gpu
@pytest.mark.parametrize("stage", STAGES)
def test_the_allocator_holds_what_the_ledger_says(stage):
    """At rest, to the bytes that CUDA's allocator adds to each tensor."""
    ranks.run(1, held, stage)


def held(stage):
    torch.ones(1, device="cuda")
    before = torch.cuda.memory_allocated()
    model, optimizer, zero = start("cuda", stage, dtype=torch.bfloat16)
    for number in range(2):
        step("cuda", model, optimizer, zero, number)
    torch.cuda.synchronize()
    said = sum(zero.ledger().tiers["device"].values())
    tensors = 8 * len(zero.partition.buckets) + 4 * len(list(model.parameters())) + 64
    assert said <= torch.cuda.memory_allocated() - before <= said + ALLOCATED * tensors
