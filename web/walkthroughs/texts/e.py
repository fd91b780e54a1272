"""Text E, an overview of the stages, Offload and Infinity: bytes per parameter, 64 GPUs, 10B on 8."""

from __future__ import annotations

from fractions import Fraction

from zeroshard.layout.stage import STAGES
from zeroshard.planner import closed, files, traffic
from zeroshard.planner.plan import plan
from zeroshard.planner.question import Machine, Model

from .lines import GB, PAPER, PASSES, Table, Text, held, line, table


def text() -> Text:
    return Text(
        "E",
        "ZeRO: Zero Redundancy Optimizer, an overview",
        (_bytes_per_parameter(), _on_64(), _messages(), _ten_billion(), _in_files()),
        (
            "At 64 GPUs the reductions are 3.82x and 7.21x; 4x and 8x are the limits for N to infinity. Only 64x is "
            "exact.",
            PASSES,
            "Flat slices [i Psi/N, (i+1) Psi/N) need padding where N does not divide Psi.",
            "Without stage 3 you simply cannot train: 10B parameters on 8 GPUs take 37.5 GB per GPU at stage 2 and "
            "55 GB at stage 1, which fit a card of 80 GB at rest, with 42.5 and 25 GB to spare for activations and "
            "messages. Stage 3 is needed where 2 bytes per parameter alone do not fit.",
            "Limited only by disk space: a GPU still holds the layers that are gathered, the one in use and its "
            "neighbours, gradients on their way, and activations. Of 10B parameters in 32 equal layers on 8 GPUs that "
            "is 2.62 GB without activations. And in each step a rank reads 22.5 GB from its files and writes 20 GB, so "
            "that time limits it too.",
            "Cited, not computed: a single DGX-2 node does not hold tens of trillions of parameters. ZeRO-Infinity's "
            "authors report 1T on one node and 32T on 32 nodes (512 GPUs).",
            "Cited, not computed: reference [1] names Rabe, O. among the authors of arXiv:1910.02054. They are "
            "Rajbhandari, Rasley, Ruwase and He; references [2] and [3] have Ruwase, O.",
        ),
    )


def _bytes_per_parameter() -> Table:
    optimizer = sum(PAPER.optimizer.values(), Fraction())
    return table(
        "Bytes per parameter",
        [
            line(f"stage {stage}", said, PAPER.formula(STAGES[stage]))
            for stage, said in zip(STAGES, ("16", "4 + 12/N", "2 + 14/N", "16/N"), strict=True)
        ],
        line("optimizer", "12", optimizer, "B"),
        line("the optimizer's share", "75", 100 * optimizer / PAPER.total, "%"),
    )


def _on_64() -> Table:
    per_parameter = {stage: held(stage, 64, 64, 64)["total"] for stage in STAGES}
    return table(
        "64 GPUs",
        [
            line(f"stage {stage}", said, per_parameter[stage], "B/param")
            for stage, said in ((1, "4.2"), (2, "2.2"), (3, "0.25"))
        ],
        [
            line(f"stage {stage}: reduction", said, per_parameter[0] / per_parameter[stage], "x", exact=True)
            for stage, said in ((1, "4"), (2, "8"), (3, "64"))
        ],
        line("stage 1: its limit", None, PAPER.total / (PAPER.parameters + PAPER.gradients), "x"),
        line("stage 2: its limit", None, PAPER.total / PAPER.parameters, "x"),
    )


def _messages() -> Table:
    sends = {stage: traffic.per_step(64, 64, STAGES[stage], PAPER) for stage in STAGES}
    return table(
        "Messages per step",
        [
            line(f"stage {stage}: passes of Psi", said, int(sends[stage].passes))
            for stage, said in zip(STAGES, ("2", "2", "2", "3"), strict=True)
        ],
        line(
            "stage 3, beside standard data parallelism",
            "1.5",
            Fraction(sends[3].passes) / Fraction(sends[0].passes),
            "x",
        ),
        [
            line(f"stage {stage}: sent per rank, 64 GPUs", None, Fraction(sends[stage].total.sent, 64 * 2), "Psi")
            for stage in STAGES
        ],
    )


def _ten_billion() -> Table:
    return table(
        "10B parameters on 8 GPUs",
        line("fp16 parameters", "20", held(0, 10 * GB, 8, GB)["parameters"], "GB"),
        line("stage 3: parameters", "2.5", held(3, 10 * GB, 8, GB)["parameters"], "GB"),
        [line(f"stage {stage}: total at rest", None, held(stage, 10 * GB, 8, GB)["total"], "GB") for stage in STAGES],
    )


def _in_files() -> Table:
    """Count what a rank's GPU holds and its files move in a step of stage 3 where nothing rests on the GPU."""
    (found,) = plan(Model(10 * GB, preset="paper", units=32), Machine(ranks=8), stage=3).stages
    passing = max(sum(each.nbytes.values()) for each in found.instants)
    moves = files.closed_moves(closed.at_rest(10 * GB, 8, STAGES[3], PAPER), STAGES[3], mastered=True)
    return table(
        "10B parameters in 32 layers on 8 GPUs, all states in files",
        line("GPU: a layer's parameters", None, Fraction(10 * PAPER.parameters, 32), "GB"),
        line("GPU: most in a step, without activations", None, Fraction(passing, GB), "GB"),
        line("files: at rest", None, held(3, 10 * GB, 8, GB)["total"], "GB"),
        line("files: read in a step", None, Fraction(moves.read, GB), "GB"),
        line("files: written in a step", None, Fraction(moves.written, GB), "GB"),
    )
