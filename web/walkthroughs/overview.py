"""The stages side by side, why they equal data parallelism, and where states rest beyond the device."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from zeroshard.layout.stage import STAGES
from zeroshard.planner import closed, files, traffic
from zeroshard.planner.plan import plan
from zeroshard.planner.quantities import number, plain
from zeroshard.planner.question import Machine, Model
from zeroshard.planner.recipes import PRESETS

from .run260 import STEPS, digest, plain_weights
from .walk260 import by_stage

PAPER = PRESETS["paper"]
RANKS_SHOWN = (2, 8, 64, 1024)
LARGE = 10 * 10**9  # parameters, on this many ranks:
RANKS, LAYERS = 8, 32
OPTIMIZER = tuple(PAPER.optimizer)

# Which states leave the device, and for where.
TIERS: tuple[tuple[str, int, dict[str, str], str], ...] = (
    ("ZeRO-2", 2, {}, "Everything is on the device."),
    ("ZeRO-Offload", 2, {"gradients": "host", **dict.fromkeys(OPTIMIZER, "host")},
     "Gradients and optimizer state are in host memory, and the step runs there. Forward and backward stay on the "
     "device; new parameters are copied back to it. Its authors report 13 billion parameters on one V100, and an Adam "
     "on the CPU 5 to 7 times as fast as PyTorch's."),
    ("ZeRO-3", 3, {}, "All three states are sharded, and on the device."),
    ("ZeRO-Infinity", 3, {"parameters": "host", "gradients": "host", **dict.fromkeys(OPTIMIZER, "nvme")},
     "Every state has a tier of its own: device, host memory or NVMe. Here parameters and gradients are in host memory "
     "and optimizer state is on NVMe. What is needed next is read ahead, while the device computes."),
)  # fmt: skip


def assemble(transformer: dict[str, Any], ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Make the `Overview` document from the `Transformer` document and what `run260.capture` returned on each rank."""
    trained = by_stage(ranks[0]["trained"])
    plain = plain_weights()
    return {
        "title": "Three stages",
        "stages": [_stage(stage, transformer) for stage in STAGES],
        "equality": {
            "precision": "float64",
            "steps": STEPS,
            "plain": digest(plain),
            "stages": [
                {"stage": stage, "weights": digest(trained[stage]), "equal": trained[stage] == plain}
                for stage in STAGES
            ],
        },
        "tiers": [_tier(*row) for row in TIERS],
        "corrections": _corrections(),
    }


def _stage(stage: int, transformer: dict[str, Any]) -> dict[str, Any]:
    place = STAGES[stage]
    moved = transformer["stages"][stage]["traffic"][0]
    logical = sum(row["logical"] for row in moved if row["verb"] in ("gather", "reduce"))
    return {
        "stage": stage,
        "placements": place.sharded(),
        "formula": PAPER.formula(place),
        "passes": sum(traffic.passes(place)),
        "counted": {"logical": logical, "passes": logical / (2 * transformer["numel"])},
        "at": [
            {
                "ranks": ranks,
                "bytes_per_parameter": plain(_per_parameter(stage, ranks)),
                "times": plain(_per_parameter(0, ranks) / _per_parameter(stage, ranks)),
            }
            for ranks in RANKS_SHOWN
        ],
    }


def _per_parameter(stage: int, ranks: int) -> Fraction:
    return Fraction(closed.total(ranks, ranks, STAGES[stage], PAPER), ranks)  # nothing is padded


def _tier(name: str, stage: int, moved: dict[str, str], says: str) -> dict[str, Any]:
    rests: dict[str, dict[str, int]] = {"device": {}, "host": {}, "nvme": {}}
    for state, nbytes in closed.at_rest(LARGE, RANKS, STAGES[stage], PAPER).items():
        rests[moved.get(state, "device")][state] = nbytes
    return {"name": name, "says": says, "parameters": LARGE, "ranks": RANKS, "stage": stage, **rests}


def _corrections() -> list[dict[str, str]]:
    def note(at: str, says: str, right: str) -> dict[str, str]:
        return {"text": "E", "at": at, "says": says, "right": right}

    def times(stage: int, ranks: int) -> str:
        return number(round(_per_parameter(0, ranks) / _per_parameter(stage, ranks), 2))

    large = {stage: number(LARGE * _per_parameter(stage, RANKS) / 10**9) for stage in (1, 2)}
    (found,) = plan(Model(LARGE, preset="paper", units=LAYERS), Machine(ranks=RANKS), stage=3).stages
    passing = max(sum(each.nbytes.values()) for each in found.instants) / 10**9
    moves = files.closed_moves(closed.at_rest(LARGE, RANKS, STAGES[3], PAPER), STAGES[3], mastered=True)
    read, written = (number(Fraction(nbytes, 10**9)) for nbytes in moves)
    limits = {stage: 16 / sum(n for _, n, cut in PAPER.states(STAGES[stage]) if not cut) for stage in (1, 2)}
    return [
        note("stages", "Without Stage 3 you simply cannot train the model with pure data parallelism",
             f"10 B parameters on {RANKS} ranks rest in {large[1]} GB at stage 1 and {large[2]} GB at stage 2. "
             "Both fit a card of 80 GB."),
        note("limits", "With 64 GPUs: [stage 1] a 4x reduction, [stage 2] an 8x reduction",
             f"{times(1, 64)}x and {times(2, 64)}x at 64. {limits[1]}x and {limits[2]}x are what they tend to; only "
             f"stage 3's {times(3, 64)}x is exact."),
        note("traffic", "2\N{GREEK CAPITAL LETTER PSI} per GPU; 3\N{GREEK CAPITAL LETTER PSI} at stage 3",
             f"Every pass sends (N-1)/N of it per rank: {number(Fraction(2 * 63, 64))} and "
             f"{number(Fraction(3 * 63, 64))} at N = 64."),
        note("flat", "Flat partitioning gives perfect load balance",
             "Where N does not divide the number of parameters the vector is padded, and the last rank has less."),
        note("infinity", "You can train models limited only by disk space",
             "A GPU still holds the layers that are gathered, the one in use and its neighbours, gradients on their "
             f"way, and activations. Of 10 B parameters in {LAYERS} equal layers on {RANKS} ranks that is "
             f"{passing:.2f} GB without activations. And in each step a rank reads {read} GB from its files and writes "
             f"{written}."),
        note("infinity", "On a single DGX-2 node, models with tens of trillions of parameters",
             "Its authors report one trillion on one DGX-2 node, and 32 trillion on 32 nodes (512 GPUs)."),
    ]  # fmt: skip
