"""Text A, "ZeRO-1: A Concrete Walkthrough": 260 parameters on 2 GPUs, 7B on 8."""

from __future__ import annotations

from fractions import Fraction

from zeroshard.layout.stage import STAGES
from zeroshard.planner import traffic

from . import tiny
from .arithmetic import bf16
from .lines import (
    CUT_7B,
    FULL_7B,
    GB,
    IN_BACKWARD,
    PAPER,
    Line,
    Table,
    Text,
    held,
    line,
    message_lines,
    row,
    saving,
    stage_lines,
    table,
)  # fmt: skip

OPTIMIZER = sum(PAPER.optimizer.values(), Fraction())
AVERAGED = (
    "0.020, -0.018, 0.038, -0.0105", "-0.020, 0.030, -0.0125, 0.010", "0.020, -0.021, 0.0275, -0.020",
    "-0.018, 0.0125, -0.0165, 0.0325",
)  # fmt: skip
UPDATED = (
    "0.119, 0.341, -0.211, 0.051", "-0.149, 0.219, 0.111, -0.081", "0.299, -0.099, 0.179, 0.271",
    "-0.049, 0.139, -0.329, 0.089",
)  # fmt: skip


def text() -> Text:
    return Text(
        "A",
        "ZeRO-1: A Concrete Walkthrough",
        (
            table("The model", tiny.model_lines(), tiny.shape_lines(), _steps()),
            table("All parameters", tiny.numel_lines()),
            _bytes_per_parameter(),
            _on_two(),
            _owners(),
            _forward(),
            _step(),
            table(
                "Messages per step",
                message_lines("all-reduce", 0, ("520", "520", "1040")),
                message_lines("ZeRO-1", 1, ("520", "520", "1040")),
                [line(f"stage {stage}: passes", None, sum(traffic.passes(STAGES[stage]))) for stage in STAGES],
            ),
            table(
                "7B parameters on 8 GPUs",
                stage_lines(0, 7 * GB, 8, FULL_7B, ("GB", GB)),
                stage_lines(1, 7 * GB, 8, {**CUT_7B, "total": "38.5"}, ("GB", GB)),
                line("stage 1: saved", "65.6", saving(1, 7 * GB, 8), "%"),
            ),
            table(
                "The formula",
                line("stage 1, bytes per parameter", "4 + 12/N", PAPER.formula(STAGES[1])),
                line("N = 8", "5.5", held(1, 8, 8, 8)["total"], "B"),
                line("N = 64", "4.2", held(1, 64, 64, 64)["total"], "B"),
                line("N = 64: saved", "73.8", saving(1, 64, 64), "%"),
                line("N to infinity", "4", PAPER.parameters + PAPER.gradients, "B"),
            ),
        ),
        _corrections(),
    )


def _steps() -> Line:
    """Count the steps of an iteration: forward with backward, Adam, and stage 1's two passes of messages."""
    return line("steps of an iteration", "4", 2 + sum(traffic.passes(STAGES[1])))


def _bytes_per_parameter() -> Table:
    return table(
        "Bytes per parameter",
        line("parameter", "2", PAPER.parameters, "B"),
        line("gradient", "2", PAPER.gradients, "B"),
        [line(state, "4", nbytes, "B") for state, nbytes in PAPER.optimizer.items()],
        line("total", "16", PAPER.total, "B"),
        line("of which optimizer", "12", OPTIMIZER, "B"),
        line("of which Adam stores", "16", OPTIMIZER, "B"),
        line("the optimizer's share", "75", 100 * OPTIMIZER / PAPER.total, "%"),
    )


def _on_two() -> Table:
    return table(
        "260 parameters on 2 GPUs",
        line("stage 0: total", "4160", held(0, 260, 2)["total"], "B"),
        stage_lines(1, 260, 2, {**dict.fromkeys(held(1, 260, 2), "520"), "total": "2600"}, ("B", 1)),
        line("stage 1: optimizer slice", "1560", 130 * OPTIMIZER, "B"),
        line("stage 1: saved", "37.5", saving(1, 260, 2), "%"),
    )


def _owners() -> Table:
    cut = tiny.cut_260()
    everything = [name for name, _ in tiny.TENSORS_260]
    return table(
        "Who owns what: elements",
        line("GPU-0: gamma1, beta1", "8", tiny.own(cut, 0, "gamma1", "beta1")),
        [line(f"GPU-0: {name}", "16", tiny.own(cut, 0, name)) for name in ("W_q", "W_k", "W_v", "W_o")],
        line("GPU-0: gamma2, beta2", "8", tiny.own(cut, 0, "gamma2", "beta2")),
        line("GPU-0: W1", "32", tiny.own(cut, 0, "W1")),
        line("GPU-0: sum of these rows", "112", tiny.own(cut, 0, *everything)),
        line("GPU-1: W1", "32", tiny.own(cut, 1, "W1")),
        [
            line(f"GPU-1: {name}", says, tiny.own(cut, 1, name))
            for name, says in (("b1", "16"), ("W2", "64"), ("b2", "4"), ("W_vocab", "32"))
        ],
        line("GPU-1: sum of these rows", "148", tiny.own(cut, 1, *everything)),
        [line(f"GPU-{rank}: m, v and p each", "130", cut.buckets[0].shard_numel(rank)) for rank in (0, 1)],
    )


def _forward() -> Table:
    mu, sigma, x1, q = tiny.forward()
    return table(
        "Forward on GPU-0, first token",
        line("mu", "0.275", mu),
        row("sigma", "0.398", [sigma]),
        row("x1[0]", "0.565, -1.445, 1.319, -0.439", x1),
        row("Q[0]", "0.703, -0.319, ...", q),
    )


def _step() -> Table:
    return table(
        "One step",
        tiny.average_lines(AVERAGED),
        tiny.adam_lines(),
        [
            row(f"W_q after, row {number}", said, values)
            for number, (said, values) in enumerate(zip(UPDATED, tiny.updated(), strict=True))
        ],
        [
            row(f"W_q after, row {number}, bf16 copy on both GPUs", said, [bf16(float(value)) for value in values])
            for number, (said, values) in enumerate(zip(UPDATED, tiny.updated(), strict=True))
        ],
    )


def _corrections() -> tuple[str, ...]:
    from_bf16 = bf16(0.12) - 0.001
    return (
        "Owners: the text's rows sum to 112 and 148, its cut is at 130. It falls inside W1, at flat index 50: 50 "
        "elements (three rows and two elements of the fourth) are GPU-0's, 14 are GPU-1's.",
        "sigma: 0.398 is neither the population's deviation, 0.41458, which LayerNorm takes, nor the sample's, "
        "0.47871.",
        "x1[0] follows from sigma: [0.5427, -1.3870, 1.2663, -0.4221]. With the text's own sigma its last value would "
        "be -0.440, not -0.439.",
        "Q[0] follows from x1: [0.6742, -0.3063, 0.1007, 0.4420]. From the text's own x1 it would begin with 0.7022.",
        "0.119 is the fp32 master: bf16 has no such number, and the parameter becomes 0.119140625. The table of W_q "
        "after the step is of bf16 parameters on both GPUs. None of its 16 numbers is one of bf16, and two differ in "
        "the third digit: 0.341 is 0.341796875 and -0.329 is -0.328125.",
        f"The master has to begin as the fp32 weight. From the bf16 copy of 0.12 the same step gives {from_bf16:.6f}.",
        "Messages: 1,040 bytes as send 520 + receive 520 and as reduce-scatter 520 + all-gather 520 are equal only "
        "because N = 2. Sent per rank is 2(N-1)/N of 520: 520 bytes here.",
        f"Steps 1 and 2, backward and then the reduce-scatter: {IN_BACKWARD} So three steps follow one another, not "
        "four. Under no_sync() a rank has all 260 of its own gradients first, as in the text.",
        "For each parameter Adam stores 16 bytes: 12 of the 16 are the optimizer's, of these 8 Adam's own m and v. The "
        "other 4 are the parameter and its gradient in bf16.",
        "Unlike ZeRO-2/3 every GPU keeps the full parameters, so that forward and backward send nothing more: of "
        "ZeRO-2 neither is right. It keeps all parameters as well and takes as many passes, 2; what it cuts is "
        "gradients. Only stage 3 cuts parameters, and gathers them in forward and backward: 3 passes.",
        "Cited, not computed: ZeRO-1 is not DeepSpeed's default. The default in deepspeed/runtime/zero/config.py is "
        "stage 0, disabled.",
    )
