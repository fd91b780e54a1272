"""Text D, "ZeRO-2: A Concrete Walkthrough": 260 parameters on 2 GPUs, frame by frame; 7B on 8."""

from __future__ import annotations

from fractions import Fraction

from zeroshard.layout.stage import STAGES
from zeroshard.planner import traffic
from zeroshard.planner.plan import plan
from zeroshard.planner.question import Machine, Model

from ..frames import backward_frames
from . import tiny
from .arithmetic import bf16
from .lines import (
    CUT_7B,
    FULL_7B,
    GB,
    IN_BACKWARD,
    PAPER,
    Table,
    Text,
    backward_lines,
    held,
    line,
    message_lines,
    row,
    saving,
    stage_lines,
    table,
)  # fmt: skip

AVERAGED = (
    "0.020, -0.018, 0.038, -0.011", "-0.020, 0.030, -0.013, 0.010", "0.020, -0.021, 0.028, -0.020",
    "-0.018, 0.013, -0.017, 0.033",
)  # fmt: skip


def text() -> Text:
    return Text(
        "D",
        "ZeRO-2: A Concrete Walkthrough with Actual Numbers",
        (
            table("The model", tiny.model_lines()),
            table("All parameters", tiny.numel_lines()),
            _on_two(),
            _owners(),
            _frames(),
            table(
                "Bytes in the first backward, reduced module by module as here",
                backward_lines(tiny.cut_260(modules=True), 260),
            ),
            _step(),
            _messages(),
            _large(),
            table(
                "Formulas, bytes per parameter",
                line("stage 1", "4 + 12/N", PAPER.formula(STAGES[1])),
                line("stage 2", "2 + 14/N", PAPER.formula(STAGES[2])),
            ),
        ),
        _corrections(),
    )


def _on_two() -> Table:
    end = {"parameters": "520", "gradients": "260", "master": "520", "m": "520", "v": "520", "total": "2340"}
    gradients = [held(stage, 260, 2)["gradients"] for stage in (1, 2)]
    return table(
        "260 parameters on 2 GPUs",
        [
            line(f"stage {stage}: total", said, held(stage, 260, 2)["total"], "B")
            for stage, said in ((0, "4160"), (1, "2600"), (3, None))
        ],
        line("stage 2: saved", "43.8", saving(2, 260, 2), "%"),
        line("stage 1: gradients", "520", gradients[0], "B"),
        stage_lines(2, 260, 2, end, ("B", 1)),
        line("stage 2: less than stage 1", "260", gradients[0] - gradients[1], "B"),
    )


def _owners() -> Table:
    cut = tiny.cut_260()
    return table(
        "Who owns what: elements",
        line("GPU-0: W1", "50", tiny.own(cut, 0, "W1")),
        line("GPU-1: W1", "14", tiny.own(cut, 1, "W1")),
        [line(f"GPU-{rank}: all", "130", cut.buckets[0].shard_numel(rank)) for rank in (0, 1)],
    )


def _frames() -> Table:
    cut = tiny.cut_260()
    singly = [backward_frames(cut, rank) for rank in (0, 1)]
    peaks = {
        how: [max(frame.transient for frame in backward_frames(cut, rank, groups)) for rank in (0, 1)]
        for how, groups in (("tensor by tensor", None), ("module by module", tiny.MODULES_260))
    }
    return table(
        "Gradient elements held in backward",
        row("ZeRO-1, from W_vocab to gamma1", None, [frame.whole for frame in singly[0]]),
        [row(f"ZeRO-2, GPU-{rank}, the same", None, [frame.kept for frame in singly[rank]]) for rank in (0, 1)],
        line("ZeRO-1: peak", "260", singly[0][-1].whole),
        [line(f"ZeRO-2, GPU-{rank}: at rest", "130", cut.buckets[0].shard_numel(rank)) for rank in (0, 1)],
        [
            line(f"ZeRO-2, GPU-{rank}: peak, {how}", "130", most[rank])
            for how, most in peaks.items()
            for rank in (0, 1)
        ],
    )  # fmt: skip


def _step() -> Table:
    return table(
        "One step",
        tiny.average_lines(AVERAGED),
        tiny.adam_lines(),
        row("W_q[0,0] after, in bf16", "0.1191", [bf16(float(tiny.first().weight))]),
    )


def _messages() -> Table:
    passes = {stage: traffic.passes(STAGES[stage], accumulate=4) for stage in (1, 2)}
    return table(
        "Messages per step",
        message_lines("all-reduce", 0, ("520", "520", "1040")),
        message_lines("ZeRO-1", 1, ("520", "520", "1040")),
        message_lines("ZeRO-2", 2, ("520", "520", "1040")),
        [line(f"stage {stage}, 4 micro-batches: passes", None, sum(both)) for stage, both in passes.items()],
        line("the same under no_sync", None, sum(traffic.passes(STAGES[2], accumulate=4, no_sync=True))),
    )


def _large() -> Table:
    gradients = [held(stage, 7 * GB, 8, GB)["gradients"] for stage in (0, 2)]
    return table(
        "7B parameters on 8 GPUs",
        stage_lines(0, 7 * GB, 8, FULL_7B, ("GB", GB)),
        stage_lines(1, 7 * GB, 8, {**CUT_7B, "total": "38.5"}, ("GB", GB)),
        line("stage 1: saved", "65.6", saving(1, 7 * GB, 8), "%"),
        stage_lines(2, 7 * GB, 8, {**CUT_7B, "gradients": "1.75", "total": "26.25"}, ("GB", GB)),
        line("stage 2: saved", "76.6", saving(2, 7 * GB, 8), "%"),
        line("stage 2: gradients saved at rest", "12.25", Fraction(gradients[0] - gradients[1]), "GB"),
        line("stage 2: gradients and their buffers at the peak", "1.75", gradients[1] + _buffers(2), "GB"),
        line("stage 2: saved at the peak", "12.25", gradients[0] + _buffers(1) - gradients[1] - _buffers(2), "GB"),
        stage_lines(3, 7 * GB, 8, {}, ("GB", GB)),
    )


def _buffers(stage: int) -> Fraction:
    """Plan the GB of reductions' buffers at the peak of backward: 7B parameters in 32 equal blocks on 8 GPUs."""
    (found,) = plan(Model(7 * GB, preset="paper", units=32), Machine(ranks=8), stage=stage).stages
    return Fraction(max(each.nbytes.get("reduce", 0) for each in found.instants), GB)


def _corrections() -> tuple[str, ...]:
    return (
        "Peak of ~130 gradients is at rest. Reduced tensor by tensor, GPU-1 holds 180 for a moment (116 of its own "
        "and W1's 64); module by module it is 148 and 194.",
        "On this model stage 2's peak in backward, 2,080 bytes, is above stage 1's, 1,820. Stage 1 puts contributions "
        "together in its full-size gradients and needs room only for what arrives, 260 bytes. Stage 2 holds half of "
        "the gradients, and beside them the buffers of its reductions, 780 bytes: three are on their way (norm2, "
        "attention, norm1: 240 bytes), and two are done, whose buffers wait for a next one of their size (head and "
        "feed_forward: 540 bytes). Here that is the whole model. Where layers have one size it is three layers.",
        "14 GB to 1.75 GB, saving 12.25 GB, is at rest. With 32 equal blocks the buffers of reductions take 0.55 GB "
        "more at stage 2's peak, and 0.09 GB at stage 1's: the peak falls by 11.79 GB.",
        f"Stage 1's reduce-scatter is a step of its own after backward: {IN_BACKWARD} What differs is what stays: all "
        "260 of a rank's own gradients, or the 130 averages of its part.",
        "Standard all-reduce, after backward: DistributedDataParallel sends during backward too, bucket by bucket. So "
        "does stage 0 here; only the averages go to every rank after backward.",
        "Stage 3's cost is called an all-gather in forward. That one takes the place of the all-gather after the step. "
        "What comes on top is the one in backward.",
        "Averages are rounded to three digits: -0.011 is -0.0105.",
        "Volumes are identical for one micro-batch. With A of them, stage 2 as DeepSpeed does it reduces each: "
        "(A+1) Psi against 2 Psi for its stage 1. Here stages 0 to 2 take A+1 passes, or 2 under no_sync(). That "
        "adds up in stage 1's gradients, which rest in full size already; stage 2 takes a buffer of that size for it, "
        "so that always using stage 2 is not free.",
        "Averaged gradients in BF16 are what rests. In the step Adam gets an fp32 copy, 4 bytes for each element of "
        "the bucket it updates, which the text's bytes leave out.",
    )
