"""Published throughputs beside simulated ones: `python bench/published.py` writes bench/results/published.json.

The machines' efficiencies are from other publications than the rows here (see `planner.machines`), and nothing is
adjusted to meet a row. What a publication does not say (the micro-batch of the ZeRO paper's figure) is marked assumed.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zeroshard import Comm, Layout
from zeroshard.planner.machines import MACHINES, Cluster
from zeroshard.planner.simulate import facts, simulate
from zeroshard.planner.timeline import replay

RESULTS = Path(__file__).parent / "results" / "published.json"


class Block(nn.Module):
    """A transformer block: LLaMA's (gated feed-forward, grouped heads, no biases) or GPT's."""

    def __init__(self, width: int, inner: int, heads: int, shared: int, gated: bool) -> None:
        super().__init__()
        self.heads, self.shared, self.gated = heads, shared, gated
        norm: Callable[[int], nn.Module] = nn.RMSNorm if gated else nn.LayerNorm
        self.norm_1, self.norm_2 = norm(width), norm(width)
        self.query = nn.Linear(width, width, bias=not gated)
        self.key, self.value = (nn.Linear(width, width * shared // heads, bias=not gated) for _ in range(2))
        self.out = nn.Linear(width, width, bias=not gated)
        self.up, self.down = nn.Linear(width, inner, bias=not gated), nn.Linear(inner, width, bias=not gated)
        if gated:
            self.gate = nn.Linear(width, inner, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        y = self.norm_1(x_BTD)
        q, k, v = (
            part(y).unflatten(-1, (count, -1)).transpose(1, 2)
            for part, count in ((self.query, self.heads), (self.key, self.shared), (self.value, self.shared))
        )
        k, v = (part.repeat_interleave(self.heads // self.shared, dim=1) for part in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x_BTD = x_BTD + self.out(y)
        y = self.norm_2(x_BTD)
        return x_BTD + self.down(F.silu(self.gate(y)) * self.up(y) if self.gated else F.gelu(self.up(y)))


class Transformer(nn.Module):
    def __init__(self, words: int, width: int, blocks: int, **shape: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width, **shape) for _ in range(blocks))
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x = self.embed(tokens_BT)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def job(words: int, context: int, batch: int, **shape: Any) -> Callable[[], dict[str, Any]]:
    def parts() -> dict[str, Any]:
        return {
            "model": Transformer(words, **shape).to(torch.bfloat16),
            "optimizer": torch.optim.AdamW,
            "batch": lambda step, index: torch.randint(words, (batch, context)),
            "loss": lambda model, tokens: F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()),
        }

    return parts


class Published(NamedTuple):
    what: str
    source: str
    job: Callable[[], dict[str, Any]]
    machine: Cluster
    ranks: int
    stage: int
    unit: str  # "tokens/s" or "TFLOP/s", of one GPU; recomputation counts as operations
    value: float
    assumed: str = ""


A100 = MACHINES["a100"]
ROWS = (
    Published(
        "13B, stage 2, 128 V100", "ZeRO paper (Rajbhandari et al. 2020), figure 4: over 40",
        job(50_000, 1024, 2, width=4096, blocks=62, inner=16_384, heads=32, shared=32, gated=False),
        MACHINES["dgx-2"], 128, 2, "TFLOP/s", 40, "micro-batch 2",
    ),
    Published(
        "GPT-175B, 128 A100, micro-batch 1", "FSDP paper (Zhao et al. 2023), section 5.4; 2 Tb/s per node",
        job(50_000, 2048, 1, width=12_288, blocks=96, inner=49_152, heads=96, shared=96, gated=False),
        dataclasses.replace(A100, network=31.25e9), 128, 3, "TFLOP/s", 173,
    ),
    Published(
        "GPT-175B, 128 A100, micro-batch 2", "the same",
        job(50_000, 2048, 2, width=12_288, blocks=96, inner=49_152, heads=96, shared=96, gated=False),
        dataclasses.replace(A100, network=31.25e9), 128, 3, "TFLOP/s", 186,
    ),
    Published(
        "Llama 3 70B, 64 A100", "torchtitan, docs/performance.md: 323 (FSDP2, full recomputation)",
        job(128_256, 8192, 1, width=8192, blocks=80, inner=28_672, heads=64, shared=8, gated=True),
        A100, 64, 3, "tokens/s", 323, "200 Gb/s per GPU",
    ),
    Published(
        "Llama 34B, 128 A100, 400 Gb/s per node", "fms-fsdp, README: 700 (FSDP, full recomputation, micro-batch 2)",
        job(32_000, 4096, 2, width=8192, blocks=48, inner=22_016, heads=64, shared=8, gated=True),
        MACHINES["a100-ethernet"], 128, 3, "tokens/s", 700,
    ),
)  # fmt: skip


def measure(row: Published) -> dict[str, Any]:
    started = time.perf_counter()
    # What these publications ran: one message per block, the backend's reduce-scatter, two blocks ahead at most.
    run = simulate(
        row.job, ranks=row.ranks, stage=row.stage,
        comm=Comm(reduce="native"), layout=Layout(bucket_mib=1 << 20, recompute=True),
    )  # fmt: skip
    states = ("parameters", "gradients", "master", "exp_avg", "exp_avg_sq")
    updated = sum(run.ledger.held.get(state, 0) for state in states)
    line = replay(
        run.events, row.machine, ranks=row.ranks, updated_nbytes=updated, ordered=False, facts=facts(run.zero)
    )
    value = run.tokens / line.step if row.unit == "tokens/s" else run.flops / line.step / 1e12
    return {
        "what": row.what,
        "source": row.source,
        "assumed": row.assumed,
        "unit": row.unit,
        "published": row.value,
        "simulated": round(value, 1),
        "error_percent": round(100 * (value / row.value - 1), 1),
        "step_s": round(line.step, 3),
        "exposed_s": round(line.exposed, 3),
        "overhead_s": round(line.overhead, 3),
        "simulation_s": round(time.perf_counter() - started, 1),
    }


def main() -> None:
    rows = [measure(row) for row in ROWS]
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps({"date": time.strftime("%Y-%m-%d"), "rows": rows}, indent=2) + "\n")
    json.dump(rows, sys.stdout, indent=2)


if __name__ == "__main__":
    main()
