"""What a step costs beside compute and bytes: the same elements in 100 to 20,000 tensors, `python -m bench.tensors`.

Processor time of a step beyond that of plain PyTorch, per tensor, beside DDP's and FSDP2's. All have fused AdamW, and
take turns. By default there is one process, so that nothing is sent; several ranks send messages, and each number is
their mean. Writes a table and a plot, and a table of steps that clip their gradients.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import zeroshard

from . import report
from .ranks import Ranks

NUMEL = 4_096_000  # elements of all tensors together
COUNTS = [100, 300, 1000, 3000, 10000, 20000]
PER_UNIT = 50  # tensors
QUICK = [400]
STAGES = {f"stage {stage}": stage for stage in range(4)}
PEERS = ("DDP", "FSDP2")
ONCE = ("stage 1", "stage 3")  # of which the table has what sharding takes
COLOURS = ("#888", "#1b7837", "#2166ac", "#762a83", "#b2182b", "#e08214", "#000")


class Case(NamedTuple):
    """count: tensors, of which a unit has `per_unit`. clip: does a step clip its gradients?"""

    count: int
    per_unit: int
    clip: bool


class Scales(nn.Module):
    """A unit: its tensors multiply the input one after the other."""

    def __init__(self, numel: int, tensors: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(numel)) for _ in range(tensors))

    def forward(self, x: Tensor) -> Tensor:
        for scale in self.scales:
            x = x * scale
        return x


def make(case: Case, way: str) -> tuple[Callable[[], None], float]:
    """A function that trains one step, and what sharding took."""
    torch.manual_seed(0)
    numel = NUMEL // case.count
    model: nn.Module = nn.Sequential(*(Scales(numel, case.per_unit) for _ in range(case.count // case.per_unit)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    started = time.process_time()
    if way in STAGES:
        zeroshard.shard(model, optimizer, stage=STAGES[way], comm=zeroshard.Comm(transport="gloo"))
    elif way == "DDP":
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    elif way == "FSDP2":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for unit in (*model.children(), model):
            fully_shard(unit, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    took = time.process_time() - started
    x, params = torch.ones(numel), [*model.parameters()]

    def step() -> None:
        model(x).sum().backward()
        if case.clip:
            torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step, took


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    """A group of this process alone, which the peers need, if there is none."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def measure(case: Case, rounds: int) -> dict[str, float]:
    """Microseconds per tensor of a step, plain and what each way adds, least of the rounds; and of sharding, once."""
    make(case._replace(count=case.per_unit), "stage 3")  # what only the first does
    gc.collect()  # what an earlier case has left is not to be freed while a step, or sharding, is timed
    made = {way: make(case, way) for way in ("plain", *STAGES)}  # before there is a group: one process sends nothing
    with process_group():
        made |= {way: make(case, way) for way in PEERS}
        once = {f"shard, {way}": 1e6 * made[way][1] / case.count for way in ONCE}
        times: dict[str, list[float]] = {way: [] for way in made}
        for number in range(rounds + 2):  # the first makes optimizer state, the second finds what the first left
            for way, (step, _) in made.items():
                started = time.process_time()
                step()
                if number > 1:
                    times[way].append(time.process_time() - started)
        made.clear()
    least = {way: 1e6 * min(seconds) / case.count for way, seconds in times.items()}
    return {way: cost - least["plain"] if way != "plain" else cost for way, cost in least.items()} | once


class Held:
    """One rank of several, that measures with the others."""

    def measure(self, case: Case, rounds: int) -> dict[str, float]:
        return measure(case, rounds)


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
    for name, colour in zip(names, COLOURS, strict=False):  # earlier results have fewer names
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
    parser.add_argument("--counts", nargs="+", type=int, help="multiples of the tensors of a unit")
    parser.add_argument("--per-unit", type=int, default=PER_UNIT, help="tensors of a unit")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK[0]} tensors alone")
    parser.add_argument("--out", type=Path, default=report.RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    counts = sorted(options.counts or (QUICK if options.quick else COUNTS))
    held = Ranks(options.ranks, Held) if options.ranks > 1 else None
    name = "tensors" + f"-{options.ranks}-ranks" * (options.ranks > 1) + "-quick" * options.quick
    notes = [
        f"Microseconds of processor time per tensor and step, least of {options.rounds} interleaved rounds.",
        "plain: all of PyTorch's step. The others: what they take beyond it; with few tensors, mostly copies of "
        "elements.",
        f"FSDP2 has units of {options.per_unit} tensors; zeroshard chooses its own.",
        "shard: what the call of `zeroshard.shard` takes, once, per tensor.",
    ]
    for clip in (False, True):
        rows: list[dict[str, Any]] = []
        for count in counts:
            given = Case(count, options.per_unit, clip), options.rounds
            found = held("measure", *given) if held else [measure(*given)]
            means = {way: round(statistics.fmean(rank[way] for rank in found), 1) for way in found[0]}
            rows.append({"tensors": count, **means})
        setup = {"numel": NUMEL, "per unit": options.per_unit, "ranks": options.ranks, "clipped": clip}
        report.write(options.out, name + "-clipped" * clip, setup, rows, notes)
        if not clip:
            (options.out / f"{name}.svg").write_text(plot(rows))
    if held:
        held.close()


if __name__ == "__main__":
    main()
