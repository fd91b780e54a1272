"""The engine with its states on a CUDA device: `make gpu`, on a machine that has one.

What can be asked of the CPU too is asked of it in the normal suite, by the same body; so a body that is wrong is found.
"""

from __future__ import annotations

import os
from functools import partial

import pytest
import torch

import ranks
import reference
import training
from zeroshard import Comm, Offload, Precision

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
GPT = {"hidden": 24, "layers": 3}
STAGES = (0, 1, 2, 3)
STATES = ("parameters", "gradients", "optimizer")
ALLOCATED = 512  # bytes that CUDA's allocator rounds up to


def how(device, tier="device", *, folder=None, dtype=torch.float32, overlap=True):
    if device != "cpu":  # or the backwards of embeddings and of attention are other sums each time
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    return {
        "device": device, "options": GPT, "optimizer": partial(training.ADAMW, fused=True),
        "precision": Precision(param_dtype=None if dtype == torch.float32 else dtype),
        "offload": Offload(**dict.fromkeys(STATES, tier), path=folder if tier == "nvme" else None),
        "comm": Comm(overlap=overlap),
    }  # fmt: skip


def on(device, stage, tier="device", **options):
    return training.trained(stage, backwards=2, **how(device, tier, **options))


def like_stage_0(device, folder, tier, dtype):
    """With its states in the same tier, where that is stepped by another processor: their AdamW are other arithmetic."""
    want = on(device, 0, "device" if device == "cpu" else tier, folder=folder, dtype=dtype)
    for stage in STAGES:
        for overlap in (True, False):
            got = on(device, stage, tier, folder=folder, dtype=dtype, overlap=overlap)
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
    model, optimizer, zero = training.sharded(stage, **how("cuda", dtype=torch.bfloat16))
    for number in range(2):
        training.step(model, optimizer, zero, number, backwards=2)
    torch.cuda.synchronize()
    said = sum(zero.ledger().tiers["device"].values())
    tensors = 8 * len(zero.partition.buckets) + 4 * len(list(model.parameters())) + 64
    assert said <= torch.cuda.memory_allocated() - before <= said + ALLOCATED * tensors
