"""The article's profile, 10 layers of 4,096 on four ranks: planned whole, and at an eighth of its width also run.

`capture` runs on each of the four ranks; `assemble` puts them beside what was planned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

import zeroshard
from zeroshard.engine.gradients.reduction import UNHURRIED
from zeroshard.explain import stacked_mlp
from zeroshard.explain.recording import MESSAGES
from zeroshard.planner.simulate import PASSING, STEPS, simulate
from zeroshard.policies.precision import Precision

RANKS, STAGE = 4, 1
BF16 = Precision(param_dtype=torch.bfloat16, grad_dtype=torch.bfloat16, cast_inputs=True)  # with fp32 masters
COMMAND = "zeroshard plan zeroshard.explain.stacked_mlp:scaled --ranks 4 --stage 1 --precision bf16 --grad-dtype bf16"
PHASES = ("forward", "backward", "step")


def capture() -> dict[str, Any]:
    """Train a few steps; return what this rank held at rest and at most in each phase. Collective, on four ranks."""
    torch.manual_seed(0)
    job = stacked_mlp.scaled()
    optimizer = job["optimizer"](job["model"].parameters())
    zero = zeroshard.shard(job["model"], optimizer, stage=STAGE, precision=BF16, comm=MESSAGES)
    zero._engine.reduction.pause = UNHURRIED
    for step in range(STEPS):
        job["loss"](job["model"], job["batch"](step, zero.rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return _told(zero.ledger())


def _told(ledger: Any) -> dict[str, Any]:
    return {
        "rest": {state: nbytes for state, nbytes in ledger.held.items() if nbytes and state not in PASSING},
        "peaks": {phase: ledger.phases[phase].total for phase in PHASES},
    }


def assemble(held: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Make the `Profile` document from what `capture` returned on each rank."""
    return {
        "ranks": RANKS,
        "stage": STAGE,
        "command": COMMAND + " --check",
        "whole": _planned(stacked_mlp.profile, [0]),
        "scaled": _planned(stacked_mlp.scaled, range(RANKS)) | {"held": list(held)},
    }


def _planned(job: Callable[[], dict[str, Any]], ranks: Sequence[int]) -> dict[str, Any]:
    runs = [simulate(job, ranks=RANKS, rank=rank, stage=STAGE, precision=BF16, comm=MESSAGES) for rank in ranks]
    found = [_told(run.ledger) for run in runs]
    rest, counters = found[0]["rest"], found[0]["rest"].get("step", 0)
    # The article's baseline: one GPU, whose gradients are not there at rest, and are in the step.
    baseline = sum(n * (1 if state in ("parameters", "gradients") else RANKS) for state, n in rest.items())
    baseline -= counters * RANKS
    gradients, most = rest["gradients"], max(found[0]["peaks"].values())
    at_rest = sum(rest.values()) - counters
    return {
        "parameters": sum(param.numel() for param in runs[0].zero.model.parameters()),
        "predicted": found,
        "baseline": {"rest": baseline - gradients, "peak": baseline},
        "saved": {"rest": 1 - at_rest / (baseline - gradients), "peak": 1 - (most - counters) / baseline},
    }
