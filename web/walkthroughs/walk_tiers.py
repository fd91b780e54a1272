"""Steps of the 260 parameters that the page plays with states in host memory, in files, and in 8 bits.

They are recorded on two ranks as a user's run is, but on a clock of ticks, so that every run is the same. What of
that depends on a disk is left out: the thread that asks for a transfer makes it (`Here`), before it goes on.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import torch

import zeroshard
from zeroshard.api import Zero
from zeroshard.engine.gradients.reduction import UNHURRIED
from zeroshard.explain import run
from zeroshard.explain.recording import MESSAGES
from zeroshard.features.nvme import NvmeTier
from zeroshard.policies.offload import Offload

from . import transformer260
from .observe import ticking
from .run260 import BF16, BY_LAYER, LEARNING_RATE
from .walk260 import one_of

STEPS = 2  # the second is shown: Adam has m and v
SAYS = {
    "offload": (
        'ZeRO-Offload: stage 2 with Offload(gradients="cpu", optimizer="cpu"), which puts both into host memory. '
        "Each sum of gradients goes down to it, most of them while backward runs. Adam runs there, and the new "
        "parameters come up to the device."
    ),
    "infinity": (
        'ZeRO-Infinity: stage 3 with Offload(parameters="nvme", gradients="cpu", optimizer="nvme"). Parameters and '
        "optimizer states are in files, gradients in host memory. Forward and backward read a module before they "
        "gather it. The step goes from module to module: states are read, updated and written back, and those of "
        "the next are read ahead."
    ),
    "fp8": (
        'Parameters in 8 bits: stage 3 with Precision(fp8=["*.W*"]), which names all matrices. Of these a parameter '
        "rests and travels as one byte, with a scale for each matrix, and modules compute with bf16 numbers made of "
        "it. After Adam each owner rounds its fp32 masters to new bytes. All states rest on the device."
    ),
}


class Here:
    """Stands in for the threads of a tier of files: a call has been made when `submit` returns."""

    def submit(self, call: Callable[..., Any], *given: Any) -> Future[Any]:
        made: Future[Any] = Future()
        try:
            made.set_result(call(*given))
        except Exception as error:
            made.set_exception(error)
        return made

    def shutdown(self) -> None:
        pass


def capture() -> dict[str, Any]:
    """Make and record the three runs. Collective, on two ranks."""
    # Files have no names: nothing stays in the folder.
    files = Offload(parameters="nvme", gradients="cpu", optimizer="nvme", path=tempfile.gettempdir())
    return {
        "offload": _recorded(2, Offload(gradients="cpu", optimizer="cpu")),
        "infinity": _recorded(3, files),
        "fp8": _recorded(3, Offload(), fp8=["*.W*"]),
    }


def _recorded(stage: int, offload: Offload, fp8: Sequence[str] = ()) -> dict[str, Any]:
    """Return the run, and the bytes that this rank's ledger has counted of its files in the step that is shown."""
    with ticking():
        model = transformer260.Transformer260()
        optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
        zero = zeroshard.shard(
            model, optimizer, stage=stage, precision=replace(BF16, fp8=fp8), comm=MESSAGES, layout=BY_LAYER,
            offload=offload,
        )  # fmt: skip
        zero._engine.reduction.pause = UNHURRIED
        for tier in {tier for bucket in zero._engine.buckets for tier in bucket.tiers.values()}:
            if isinstance(tier, NvmeTier):
                tier.quiesce()
                stands_in: Any = Here()
                tier.threads = stands_in
        batch = transformer260.batches(torch.bfloat16)[zero.rank]
        for step in range(STEPS):
            if step == STEPS - 1:
                for bucket in zero._engine.buckets:
                    bucket.land()
                zero.record()
                before = _moved(zero)
            transformer260.loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        moved = {verb: nbytes - before[verb] for verb, nbytes in _moved(zero).items()}
        return {"run": run.gather(zero, clock="tick"), "moved": moved}


def _moved(zero: Zero) -> dict[str, int]:
    traffic = zero.ledger().traffic
    return {verb: traffic[verb].logical if verb in traffic else 0 for verb in ("read", "write")}


def assemble(ranks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """List the runs, each with its name and what it shows, from what `capture` returned on each rank."""
    found = []
    for name, says in SAYS.items():
        shown = one_of([rank[name]["run"] for rank in ranks], f"runs of {name}")
        for rank, one in enumerate(ranks):
            _check(shown, rank, one[name]["moved"])
        found.append({"name": name, "says": says, "run": shown})
    return found


def _check(shown: dict[str, Any], rank: int, moved: dict[str, int]) -> None:
    """Check what files moved against the ledger. Raises `AssertionError`: the page would be false."""
    recording = shown["recording"]
    found = dict.fromkeys(moved, 0)
    for verb, _, _, _, logical, *_ in recording["ranks"][rank]["moves"]:
        if recording["verbs"][verb] in found:
            found[recording["verbs"][verb]] += logical
    if found != moved:
        raise AssertionError(f"rank {rank}: files moved {moved} by the ledger, {found} by the record")
