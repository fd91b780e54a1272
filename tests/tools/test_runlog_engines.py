"""Logs of runs of DeepSpeed and Accelerate, where these are installed, beside the log of a plain loop."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import ranks
import zeroshard
from test_runlog import MICRO, STEPS, batch, build, plain
from zeroshard.runlog.parting import part
from zeroshard.runlog.read import read

WORLD = 2
SHARE = MICRO // WORLD  # micro-batches of a rank


@pytest.fixture(scope="module")
def right(tmp_path_factory):
    folder = tmp_path_factory.mktemp("right") / "run"
    plain(folder)
    return folder


def with_deepspeed(folder, stage, mistake):
    os.environ["DS_ACCELERATOR"] = "cpu"  # read as it is imported
    import deepspeed
    import torch.distributed as dist

    deepspeed.init_distributed("gloo")
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    settings = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": SHARE,  # by which it divides losses
        "zero_optimization": {"stage": stage},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, dist_init_required=False)
    with zeroshard.RunLog(folder, engine.module) as log:
        for step in range(STEPS):
            for turn in range(SHARE):
                x, y = batch(step, turn * WORLD + dist.get_rank())
                loss = F.mse_loss(engine(x), y)
                engine.backward(loss * (SHARE if mistake else 1))
                log.backward(loss)
                if engine.is_gradient_accumulation_boundary():
                    log.gradients()
                engine.step()
    dist.destroy_process_group()


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
@pytest.mark.parametrize("mistake", ["", "factor"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_deepspeeds_run_has_the_log_of_a_plain_one(right, tmp_path, stage, mistake):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(WORLD), __file__]
    path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    told = subprocess.run(
        [*torchrun, tmp_path / "theirs", str(stage), mistake],
        capture_output=True, text=True, timeout=240, check=False, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert told.returncode == 0, told.stderr[-3000:]
    found = part(read(right), read(tmp_path / "theirs"))
    if mistake:
        assert found.kind == "factor" and f"{SHARE} times" in found.says
    else:
        assert found is None or (found.kind == "order of a sum" and found.ulps < 100)


def with_accelerate(folder, mistake):
    import accelerate

    from trainers import fresh

    fresh()
    made = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=SHARE)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    model, optimizer = made.prepare(model, optimizer)
    with zeroshard.RunLog(folder, model, optimizer) as log:
        for step in range(STEPS):
            for turn in range(SHARE):
                x, y = batch(step, turn * WORLD + ranks.rank())
                with made.accumulate(model):
                    loss = F.mse_loss(model(x), y)
                    made.backward(loss * (SHARE if mistake else 1))
                    log.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()


@pytest.mark.trainers
@pytest.mark.parametrize("mistake", ["", "factor"])
def test_accelerates_run_has_the_log_of_a_plain_one(right, tmp_path, mistake):
    pytest.importorskip("accelerate")
    ranks.run(WORLD, with_accelerate, tmp_path / "theirs", mistake, group="env", timeout=200)
    found = part(read(right), read(tmp_path / "theirs"))
    if mistake:
        assert found.kind == "factor" and f"{SHARE} times" in found.says
    else:
        assert found is None or (found.kind == "order of a sum" and found.ulps < 100)


if __name__ == "__main__":
    with_deepspeed(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
