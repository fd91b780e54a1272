"""What a step costs beside compute and bytes: the same elements in 100 to 20,000 tensors, `python -m bench.tensors`.

One process, so that nothing is sent; processor time of a step beyond that of plain PyTorch, per tensor. Both have
fused AdamW. Writes a table and a plot.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zeroshard

from . import report

NUMEL = 4_096_000  # elements of all tensors together
COUNTS = [100, 300, 1000, 3000, 10000, 20000]
PER_UNIT = 50  # tensors
STAGES = (0, 1, 2, 3)
ONCE = ("stage 1", "stage 3")  # of which the table has what sharding takes
COLOURS = ("#888", "#1b7837", "#2166ac", "#762a83", "#b2182b")


class Scales(nn.Module):
    """A unit: its tensors multiply the input one after the other."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(numel)) for _ in range(PER_UNIT))

    def forward(self, x: Tensor) -> Tensor:
        for scale in self.scales:
            x = x * scale
        return x


def make(count: int, stage: int | None) -> tuple[Callable[[], None], float]:
    """A function that trains one step, and what `shard` took; `stage` None is plain PyTorch."""
    torch.manual_seed(0)
    numel = NUMEL // count
    model = nn.Sequential(*(Scales(numel) for _ in range(count // PER_UNIT)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    started = time.process_time()
    if stage is not None:
        zeroshard.shard(model, optimizer, stage=stage)
    took = time.process_time() - started
    x = torch.ones(numel)

    def step() -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, took


def measure(count: int, rounds: int) -> dict[str, float]:
    """Microseconds per tensor of a step, plain and what each stage adds, least of the rounds; and of sharding, once."""
    make(PER_UNIT, 3)  # what only the first does
    made = {"plain": make(count, None), **{f"stage {stage}": make(count, stage) for stage in STAGES}}
    steps = {name: step for name, (step, _) in made.items()}
    once = {f"shard, {name}": 1e6 * took / count for name, (_, took) in made.items() if name in ONCE}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 2):  # the first makes optimizer state, the second finds what the first left
        for name, step in steps.items():
            started = time.process_time()
            step()
            if number > 1:
                times[name].append(time.process_time() - started)
    least = {name: 1e6 * min(seconds) / count for name, seconds in times.items()}
    return {name: cost - least["plain"] if name != "plain" else cost for name, cost in least.items()} | once


def plot(rows: list[dict[str, Any]]) -> str:
    """An SVG of 640 x 320: tensors across, on a logarithmic scale, microseconds up."""
    names = [name for name in rows[0] if name != "tensors" and not name.startswith("shard")]
    top = 20 * math.ceil(max(row[name] for row in rows for name in names) / 20)
    left, right, foot, height = 50, 540, 280, 250
    low, high = math.log(rows[0]["tensors"]), math.log(rows[-1]["tensors"])

    def at(row: dict[str, Any], name: str) -> tuple[float, float]:
        across = (math.log(row["tensors"]) - low) / max(high - low, 1e-9)
        return left + (right - left) * across, foot - height * row[name] / top

    text = []
    for value in range(0, top + 1, 20):
        y = foot - height * value / top
        text.append(f'<path d="M{left} {y:.1f}H{right}" stroke="#ddd"/><text x="8" y="{y + 4:.1f}">{value}</text>')
    for row in rows:
        x, _ = at(row, "plain")
        text.append(f'<text x="{x:.1f}" y="{foot + 18}" text-anchor="middle">{row["tensors"]}</text>')
    for name, colour in zip(names, COLOURS, strict=True):
        points = [at(row, name) for row in rows]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        text.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        x, y = points[-1]
        text.append(f'<text x="{x + 6:.1f}" y="{y + 4:.1f}" fill="{colour}">{name}</text>')
    text.append(f'<text x="{left}" y="20">microseconds per tensor and step; stages: beyond plain PyTorch</text>')
    text.append(f'<text x="{(left + right) // 2}" y="312" text-anchor="middle">tensors of {NUMEL:,} elements</text>')
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 320" font-family="sans-serif" font-size="12">'
        '<rect width="640" height="320" fill="white"/>' + "".join(text) + "</svg>\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--counts", nargs="+", type=int, default=COUNTS, help=f"multiples of {PER_UNIT}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=report.RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for count in sorted(options.counts):
        rows.append({"tensors": count, **{k: round(cost, 1) for k, cost in measure(count, options.rounds).items()}})
    notes = [
        f"Microseconds of processor time per tensor and step, least of {options.rounds} interleaved rounds.",
        "plain: all of PyTorch's step. stages: what they take beyond it; with few tensors, mostly copies of elements.",
        "shard: what the call of `zeroshard.shard` takes, once, per tensor.",
    ]
    report.write(options.out, "tensors", {"numel": NUMEL, "per unit": PER_UNIT}, rows, notes)
    (options.out / "tensors.svg").write_text(plot(rows))


if __name__ == "__main__":
    main()
