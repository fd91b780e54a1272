"""However late a rank, its messages or what it does with them: the optimizer in backward has the bits of the plainest run.

Jobs are drawn from a seed: Rprop, whose updates are of one size whatever the gradient, so that nothing stays small; masters
of bf16 parameters, of which a half rests on the host; resharded or loaded by other ranks between, and then partly frozen.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import random
import time

import pytest
import torch

import models
import ranks
import reference
import test_delays
import zeroshard
from zeroshard import Comm, Layout, Offload, Precision
from zeroshard.comm.reduce_pipeline import Flow
from zeroshard.engine.gradients.sums import Sums
from zeroshard.engine.step.bucket_step import Alone
from zeroshard.engine.step.fragment import States
from zeroshard.engine.weights.bucket import Bucket
from zeroshard.engine.weights.edits import Edits
from zeroshard.features.nvme import FileRest
from zeroshard.features.optimizer_in_backward import InBackward, Passing
from zeroshard.tiers.tier import Rest

SIZES = (7, 40, 33, 21, 5)
STEPS = 3
PLACES = [
    (Alone, "step"), (Alone, "write_back"),
    (Bucket, "gather"), (Bucket, "land"), (Bucket, "release"), (Bucket, "publish"), (Edits, "follow"),
    (InBackward, "averaged"), (InBackward, "next"), (InBackward, "ended"),
    (Flow, "_land_oldest"), (Flow, "_store"), (Sums, "send"),
    (States, "present"), (Rest, "here"), (Passing, "clear"), (FileRest, "here"),
]  # fmt: skip


def drawn(seed):
    draw = random.Random(seed)

    def settings():
        stage, offload = (
            draw.randrange(4),
            draw.choice([{"optimizer": 0.5}] * 3 + [{"optimizer": 0.5, "parameters": 0.5}]),
        )
        return {
            "stage": stage,
            "offload": offload | draw.choice([{}, {}, {"optimizer": {"nvme": 0.4, "cpu": 0.3}}]),
            "layout": {
                "bounds": draw.choice(["unit", "model", "tensor"]),
                "bucket_mib": draw.choice([0.002, 0.004, 24]),
            },
            "comm": {"overlap": draw.random() < 0.7, "prefetch": draw.randrange(3)},
            "early": draw.random() < 0.8,
        }

    return {
        "worlds": (draw.choice([2, 2, 3]), draw.choice([1, 2, 2, 3])),
        "phases": [settings() for _ in range(3)],  # the second after unshard, the third where it was loaded
        "between": draw.choice(["freeze", "freeze", "freeze and unfreeze"]),
        "frozen": draw.sample(range(2 * (len(SIZES) - 1)), draw.choice([1, 2, 3])),
        "kind": draw.choice(["Rprop", "Rprop", "AdamW"]),
    }


@contextlib.contextmanager
def late(seed):
    """Pauses before each collective, as in test_delays, and before and after whatever is done with what came."""
    draw = random.Random(f"{seed} at {ranks.rank()}")
    before = [(owner, name, vars(owner)[name]) for owner, name in PLACES]

    def paused(function):
        @functools.wraps(function)
        def call(*args, **options):
            if draw.random() < 0.2:
                time.sleep(draw.random() * 0.002)
            if draw.random() < 0.01:
                gc.collect()
            return function(*args, **options)

        return call

    try:
        for owner, name, function in before:
            setattr(owner, name, paused(function))
        with test_delays.delays(seed):
            yield
    finally:
        for owner, name, function in before:
            setattr(owner, name, function)


def sharded(job, model, optimizer, phase, path, *, plainest):
    each = job["phases"][phase]
    precision = Precision(param_dtype=torch.bfloat16, cast_inputs=True)
    if plainest:
        return zeroshard.shard(model, optimizer, stage=0, precision=precision)
    in_files = "nvme" in str(each["offload"])
    return zeroshard.shard(
        model, optimizer, stage=each["stage"], precision=precision, comm=Comm(**each["comm"]),
        layout=Layout(**each["layout"]), optimizer_in_backward=each["early"],
        offload=Offload(**each["offload"], path=str(path) if in_files else None),
    )  # fmt: skip


def train(job, model, optimizer, zero, first):
    params = list(model.parameters())
    for step in range(first, first + STEPS):
        if first >= STEPS:  # partly frozen, after the first phase
            thawed = job["between"] == "freeze and unfreeze" and step == first + STEPS - 1
            for at in job["frozen"]:
                params[at].requires_grad_(thawed)
        models.loss("mlp", model, models.batch("mlp", step, zero.rank)).backward()
        optimizer.step()
        optimizer.zero_grad()


def made(job):
    model = models.build("mlp", sizes=SIZES)
    return model, {"Rprop": torch.optim.Rprop, "AdamW": torch.optim.AdamW}[job["kind"]](model.parameters(), lr=0.003)


def first_two(job, path, plainest, seed):
    """Train, reshard, train on partly frozen, save."""
    model, optimizer = made(job)
    with late(seed) if seed is not None else contextlib.nullcontext():
        zero = sharded(job, model, optimizer, 0, path, plainest=plainest)
        train(job, model, optimizer, zero, 0)
        if not plainest:
            zero.unshard()
            zero = sharded(job, model, optimizer, 1, path, plainest=plainest)
        train(job, model, optimizer, zero, STEPS)
        zero.save(path / "saved")
        with zero.gathered():
            return reference.weights(model)


def last(job, path, plainest, seed):
    """Load, with whatever ranks, and train on."""
    model, optimizer = made(job)
    with late(seed) if seed is not None else contextlib.nullcontext():
        zero = sharded(job, model, optimizer, 2, path, plainest=plainest)
        zero.load(path / "saved")
        train(job, model, optimizer, zero, 2 * STEPS)
        with zero.gathered():
            return reference.weights(model)


def check(seed, folder):
    job = drawn(seed)
    found = {}
    for name, plainest, delays in (("plain", True, None), ("drawn", False, seed)):
        path = folder / name
        path.mkdir()
        found[name] = [
            ranks.run(job["worlds"][0], first_two, job, path, plainest, delays),
            ranks.run(job["worlds"][1], last, job, path, plainest, delays),
        ]
    for mine, its in zip(found["drawn"], found["plain"], strict=True):
        for got, want in zip(mine, its, strict=True):
            assert not (text := reference.first_difference(got, want)), (text, job)


@pytest.mark.row(106)
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(2, 9))])
def test_a_late_thread_or_message_changes_no_bit(tmp_path, seed):
    check(seed, tmp_path)
