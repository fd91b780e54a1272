"""What grows with the number of ranks beside the training itself: a table for `docs/clusters.md`.

    python -m bench.scale

No more than one rank of each number is there. Messages are counted by the engine's own ledger in a simulated step,
sockets by the engine's own list of process groups, checkpoints by `bench.manifests`. Seconds are one core's.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zeroshard
from zeroshard import Comm, Machine, Model
from zeroshard.checkpoint import parts
from zeroshard.comm import agreement, groups, watch
from zeroshard.layout.stage import seat
from zeroshard.policies.comm import Simulated

from . import manifests

RANKS = 8, 64, 1024, 4096
NONE, SECONDS = "-", "rank 0's seconds"


def messages(ranks: int, stage: int) -> int:
    """Messages of agreement that a rank sends in a step: one forward, one backward, one step of the optimizer."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero = zeroshard.shard(model, optimizer, stage=stage, comm=Comm(group=Simulated(0, ranks)))
    sent = [0, 0]
    for at in range(2):  # the first step negotiates what it gathers
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        sent[at] = zero.ledger().traffic["control"].sent
    return (sent[1] - sent[0]) // (8 * agreement.ROW)


def sockets(ranks: int, backend: str) -> list[int]:
    """The most sockets that each process group of a rank takes which is over gloo."""
    return [each.sockets for each in groups._wanted(0, ranks, seat(0, ranks), None, backend) if each.backend == "gloo"]


def questions(ranks: int) -> str:
    return f"{ranks - 1:,}, {min(ranks - 1, watch.AT_ONCE)} at once"


def checkpoint(ranks: int) -> dict[str, Any]:
    """Figures of `bench.manifests`, where ranks write parts."""
    if ranks <= parts.INLINE:
        return {}
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as made:
        found = manifests.write(Path(made), ranks)
        for among in (ranks, 8):
            answers = context.SimpleQueue()
            process = context.Process(target=manifests.read, args=(Path(made), 1, among, answers))
            process.start()
            found[among] = answers.get()
            process.join()
    return found


def count(found: dict[str, Any], what: str) -> str:
    return f"{found[what]:,}" if found else NONE


def plan(ranks: int) -> str:
    since = time.process_time()
    zeroshard.plan(Model(70e9, units=80), Machine(ranks=ranks, gpus_per_node=8))
    return f"{time.process_time() - since:.2f} s"


def rows() -> Iterable[tuple[str, str, Callable[[int, dict[str, Any]], str]]]:
    """(What, how it was found, its text for a number of ranks and for `checkpoint`'s answer)."""
    yield "messages of agreement per step, stages 0-2", "counted", lambda n, _: f"{messages(n, 1)}"
    yield "the same, stage 3", "counted", lambda n, _: f"{messages(n, 3)}"
    yield "process groups for agreement", "counted", lambda n, _: f"{len(sockets(n, 'nccl'))}"
    yield "sockets at most, data over NCCL", "counted", lambda n, _: f"{sum(sockets(n, 'nccl'))}"
    yield "sockets at most, data over gloo", "counted", lambda n, _: f"{sum(sockets(n, 'gloo')):,}"
    yield "questions of each rank once one is lost", "counted", lambda n, _: questions(n)
    yield "manifest of 70 B, bytes", "written", lambda n, c: count(c, "manifest's bytes")
    yield "largest part of it, bytes", "written", lambda n, c: count(c, "largest part's bytes")
    yield "told by all ranks in a save, bytes", "written", lambda n, c: count(c, "all tell")
    yield "rank 0's own work in a save", "measured", lambda n, c: f"{c[SECONDS]:.2f} s" if c else NONE
    yield "a load by as many ranks: parts read", "measured", lambda n, c: f"{c[n][1]}, {c[n][0]:.2f} s" if c else NONE
    yield "a load by 8 ranks: parts read", "measured", lambda n, c: f"{c[8][1]}, {c[8][0]:.1f} s" if c else NONE
    yield "memory that takes", "measured", lambda n, c: f"{c[8][2] / 1e6:.0f} MB" if c else NONE
    yield "`plan` for 70 B in 80 blocks", "measured", lambda n, _: plan(n)


def main() -> None:
    found = {ranks: checkpoint(ranks) for ranks in RANKS}
    print("| each rank | how | " + " | ".join(f"{ranks:,} ranks" for ranks in RANKS) + " |")
    print("|---|---|" + "---|" * len(RANKS))
    for what, how, text in rows():
        print(f"| {what} | {how} | " + " | ".join(text(ranks, found[ranks]) for ranks in RANKS) + " |", flush=True)


if __name__ == "__main__":
    main()
