"""Every stage with its states in every tier: bits, bytes predicted and held, and what a step takes.

    python -m bench.tiers DIR [--size 10M --ranks 2 --steps 6]

Each row is a run of its own on local ranks; weights are compared with the first run's, bytes with the planner's.
Step times are the median's ratio to the device's at that stage, of runs one after the other: on a machine that does
other things they scatter, bits and bytes do not.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from bench.model import GPT, SIZES
from torch.nn import functional as F

import zeroshard
from zeroshard import Offload
from zeroshard.planner import predict_tiers
from zeroshard.planner.built import holding
from zeroshard.planner.files import moves

PLACES: dict[str, dict[str, str]] = {
    "device": {},
    "optimizer cpu": {"optimizer": "cpu"},
    "all cpu": {"optimizer": "cpu", "gradients": "cpu", "parameters": "cpu"},
    "optimizer nvme": {"optimizer": "nvme"},
    "all nvme": {"optimizer": "nvme", "gradients": "nvme", "parameters": "nvme"},
}


def train(size: str, stage: int, place: str, steps: int, folder: str) -> dict[str, object]:
    """One run on this rank: the digest of its weights, bytes by tier, bytes moved, seconds of its median step."""
    torch.manual_seed(0)
    shape = SIZES[size]
    model = GPT(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    offload = Offload(**PLACES[place], path=folder if "nvme" in place else None)
    zero = zeroshard.shard(model, optimizer, stage=stage, offload=offload)
    generator, took, moved = torch.Generator().manual_seed(zero.rank), [], [0, 0]
    for _ in range(steps):
        tokens = torch.randint(shape.vocabulary, (1, shape.tokens + 1), generator=generator)
        before = [zero.ledger().traffic[verb].logical if verb in zero.ledger().traffic else 0 for verb in VERBS]
        start = time.perf_counter()
        logits = model(tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        took.append(time.perf_counter() - start)
        traffic = zero.ledger().traffic
        moved = [traffic[verb].logical - old if verb in traffic else 0 for verb, old in zip(VERBS, before, strict=True)]
    held = {tier: sum(states.values()) for tier, states in zero.ledger().tiers.items() if any(states.values())}
    said = {tier: sum(states.values()) for tier, states in predict_tiers(zero).items()}
    planned = list(moves(holding(zero)))
    with zero.gathered():
        weights = b"".join(param.detach().numpy().tobytes() for param in model.parameters())
    return {
        "weights": hashlib.sha256(weights).hexdigest(), "held": held, "predicted": said, "moved": moved,
        "planned": planned, "seconds": statistics.median(took[2:]),
    }  # fmt: skip


VERBS = ("read", "write")


def rank_main(asked: argparse.Namespace) -> None:
    rows = []
    for stage in range(4):
        for place in PLACES:
            rows.append({"stage": stage, "place": place, **train(asked.size, stage, place, asked.steps, asked.folder)})
            if dist.is_initialized():
                dist.barrier()
    if int(os.environ.get("RANK", "0")) == 0:
        Path(asked.out).write_text(json.dumps(rows))


def table(rows: list[dict[str, object]]) -> list[str]:
    lines = [
        "| stage | states | bits | device | host | files | predicted | read + written | step time |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        base = next(r for r in rows if r["stage"] == row["stage"] and r["place"] == "device")
        held: dict[str, int] = row["held"]  # type: ignore[assignment]
        moved: list[int] = row["moved"]  # type: ignore[assignment]
        exact = row["held"] == row["predicted"]
        cells = (f"{held.get(tier, 0):,}" for tier in ("device", "host", "nvme"))
        ratio = float(row["seconds"]) / float(base["seconds"])  # type: ignore[arg-type]
        lines.append(
            f"| {row['stage']} | {row['place']} | {'equal' if row['weights'] == rows[0]['weights'] else 'DIFFER'} | "
            f"{' | '.join(cells)} | {'= held' if exact else 'DIFFERS'} | {sum(moved):,} | {ratio:.2f} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", help="a folder on the disk for files")
    parser.add_argument("--size", default="10M", choices=SIZES)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--out", default="")
    asked = parser.parse_args()
    if asked.out:
        rank_main(asked)
        return
    with tempfile.TemporaryDirectory() as name:
        out = str(Path(name) / "rows.json")
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(asked.ranks)]
        mine = ["-m", "bench.tiers", asked.folder, "--size", asked.size, "--steps", str(asked.steps), "--out", out]
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        subprocess.run([*launcher, *mine], env=environment, check=True)
        print("\n".join(table(json.loads(Path(out).read_text()))))


if __name__ == "__main__":
    main()
