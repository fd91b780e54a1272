"""Text C, stages 1 to 3 by hand with four weights on 2 GPUs; 7.5B on 64."""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

from zeroshard.layout.partition import Partition, Spec, partition
from zeroshard.layout.stage import STAGES
from zeroshard.planner import traffic
from zeroshard.policies.layout import Layout

from .arithmetic import Adam, adam, fp16, fp32
from .lines import GB, PAPER, Line, Table, Text, backward_lines, held, line, row, table

WEIGHTS = (Fraction(2), Fraction(-3), Fraction(1), Fraction(1, 2))
SAMPLES = (((1, 3), 5), ((2, 1), 7))  # of each GPU: x, and what y should be
LEARNING_RATE = Fraction(1, 10)
TINY = 1e-8  # a gradient of 0.00001 times a learning rate of 0.001


class Pass(NamedTuple):
    """Forward and backward of one GPU."""

    h: Fraction
    a: Fraction
    y: Fraction
    loss: Fraction
    dy: Fraction
    da: Fraction
    dh: Fraction
    gradients: tuple[Fraction, ...]


def run(weights: tuple[Fraction, ...], x: tuple[int, int], wanted: int) -> Pass:
    w1, w2, w3, w4 = weights
    h = w1 * x[0] + w2 * x[1]
    a = max(h, Fraction())
    y = w3 * a + w4
    dy = y - wanted
    da = dy * w3
    dh = da * (h > 0)
    return Pass(h, a, y, dy**2 / 2, dy, da, dh, (dh * x[0], dh * x[1], dy * a, dy))


def text() -> Text:
    return Text(
        "C",
        "ZeRO implemented by hand, with four weights, as of 2 August 2025",
        (_published(), _owners(), *_walk(), _in_backward(), _tiny_update(), _messages()),
        _corrections(),
    )


def _published() -> Table:
    says = ("120", "31.4", "16.6", "1.9")
    return table(
        "7.5B parameters on 64 GPUs, and bytes per parameter",
        [
            line(f"stage {stage}: total", said, held(stage, 75 * GB // 10, 64, GB)["total"], "GB")
            for stage, said in zip(STAGES, says, strict=True)
        ],
        line("fp16 parameters", "2", PAPER.parameters, "B/param"),
        line("master, m and v", "12", sum(PAPER.optimizer.values(), Fraction()), "B/param"),
    )


def _cut() -> Partition:
    specs = [Spec(name, (1,), "float32", 4, 0, True) for name in ("w1", "w2", "w3", "w4")]
    return partition(specs, Layout(bounds="tensor", align=1), 2)


def _owners() -> Table:
    cut = _cut()
    return table(
        "Four weights on 2 GPUs, a layer each",
        line("GPU 0 owns w1, w2", "2", Fraction(cut.buckets[0].shard_numel(0)), "elements"),
        line("GPU 1 owns w3, w4", "2", Fraction(cut.buckets[0].shard_numel(1)), "elements"),
    )


SAID_PASS = (
    {"h": "-7.0", "a": "0", "y": "0.5", "loss": "10.125", "dy": "-4.5", "da": "-4.5", "dh": "0",
     "gradients": "0, 0, 0, -4.5"},
    {"h": "1.0", "a": "1.0", "y": "1.5", "loss": "15.125", "dy": "-5.5", "da": "-5.5", "dh": "-5.5",
     "gradients": "-11.0, -5.5, -5.5, -5.5"},
)  # fmt: skip
SHOWN = {"dy": "dL/dy", "da": "dL/da", "dh": "dL/dh", "gradients": "gradients of w1 to w4"}
SAID_STEP = {
    "m": "-0.55, -0.275, -0.275, -0.5", "v": "0.03025, 0.0075625, 0.0075625, 0.025",
    "m_hat": "-5.5, -2.75, -2.75, -5.0", "v_hat": "30.25, 7.5625, 7.5625, 25", "weight": "2.1, -2.9, 1.1, 0.6",
}  # fmt: skip
SHOWN_STEP = {
    "m": "m", "v": "v", "m_hat": "m, bias corrected", "v_hat": "v, bias corrected", "weight": "fp32 masters after",
}  # fmt: skip


def _walk() -> tuple[Table, Table]:
    both = [run(WEIGHTS, x, wanted) for x, wanted in SAMPLES]
    averages = tuple(sum(pair, Fraction()) / 2 for pair in zip(*(each.gradients for each in both), strict=True))
    steps: list[Adam] = [adam(w, g, LEARNING_RATE) for w, g in zip(WEIGHTS, averages, strict=True)]
    copies = [fp16(float(step.weight)) for step in steps]
    after = tuple(step.weight for step in steps)
    old = [float(weight) for weight in WEIGHTS]
    forward = table(
        "Forward and backward",
        [
            row(f"GPU {rank}: {SHOWN.get(name, name)}", says, value if isinstance(value, tuple) else (value,))
            for rank, (each, said) in enumerate(zip(both, SAID_PASS, strict=True))
            for (name, says), value in zip(said.items(), each, strict=True)
        ],
        row("average of both", "-5.5, -2.75, -2.75, -5.0", averages),
        [
            row(f"GPU {rank}: averages it receives", said, averages[slice(*_cut().buckets[0].shard(rank))])
            for rank, said in enumerate(("-5.5, -2.75", "-2.75, -5.0"))
        ],
    )
    step = table(
        "One step of Adam",
        [row(SHOWN_STEP[name], SAID_STEP[name], (getattr(each, name) for each in steps)) for name in SHOWN_STEP],
        row("fp16 parameters after", "2.1, -2.9, 1.1, 0.6", copies),
        row("GPU 0, half updated", "2.1, -2.9, 1.0, 0.5", [*copies[:2], *old[2:]]),
        row("GPU 1, half updated", "2.0, -3.0, 1.1, 0.6", [*old[:2], *copies[2:]]),
        [row(f"GPU {rank}: loss after", None, [run(after, x, t).loss]) for rank, (x, t) in enumerate(SAMPLES)],
    )
    return forward, _exactly(step)


def _exactly(found: Table) -> Table:
    """Compare fp16 numbers exactly, without rounding: 2.0996 is not 2.1."""
    exact = {"fp16 parameters after", "GPU 0, half updated", "GPU 1, half updated"}
    return Table(found.title, tuple(each._replace(exact=each.what in exact) for each in found.lines))


def _in_backward() -> Table:
    specs = [Spec(f"w{number + 1}", (1,), "float16", 2, number // 2, True) for number in range(4)]
    cut = partition(specs, Layout(bounds="tensor", align=1), 2)
    return table("Bytes in the first backward, reduced layer by layer as here", backward_lines(cut, 4))


def _sent(verb: str) -> str:
    """Return the formula of what a rank sends in a collective over all parameters, checked for several ranks."""
    for ranks in (2, 4, 8, 64):
        moved = getattr(traffic.per_step(64, ranks, STAGES[1], PAPER), verb)
        assert Fraction(moved.sent, moved.logical) == Fraction(ranks - 1, ranks)
    return "(N-1)/N * #params"


def _tiny_update() -> Table:
    def changes(weight: float) -> Line:
        moved = fp32(fp32(weight) + fp32(TINY)) != fp32(weight)
        return line(f"fp32: {weight:g} + 1e-8", "changes", "changes" if moved else "does not change")

    return table(
        "An update of 0.00001 * 0.001",
        row("fp16(1e-8)", "0", [fp16(TINY)]),
        [changes(weight) for weight in (0.125, 0.25, *map(float, reversed(WEIGHTS)))],
    )


def _messages() -> Table:
    # Layer 1 is gathered for forward, for recomputation and for backward; layer 2 for forward and backward.
    moved = traffic.per_step(4, 2, STAGES[3], PAPER, recompute=2)
    plain, width = traffic.per_step(4, 2, STAGES[3], PAPER), PAPER.parameters
    return table(
        "Messages per step, in parameters",
        line("reduce-scatter, sent per rank", "(N-1)/N * #params", _sent("reduce")),
        line("all-gather, sent per rank", "#params", _sent("gather")),
        line(
            "stage 3: gathered, logical",
            None,
            (moved.gather.logical + moved.recompute.logical) / width,
            "elements of 4",
        ),
        line("stage 3: of these, for recomputation", None, moved.recompute.logical / width, "elements of 4"),
        line("stage 3: reduced, logical", None, moved.reduce.logical / width, "elements of 4"),
        line("stage 3: total, as the text gathers", None, moved.total.logical / width / 4, "Psi"),
        line("stage 3: total, without recomputation", None, plain.total.logical / width / 4, "Psi"),
    )


def _corrections() -> tuple[str, ...]:
    return (
        "w1'_fp16 = 2.1 and the three others are the fp32 masters. fp16 has none of the four: the copies are "
        "2.099609375, -2.900390625, 1.099609375 and 0.60009765625, and the half-updated models have those.",
        "Grad_avg, the synchronized gradient tensor on both GPUs: neither has it, as the text itself says a sentence "
        "later, and it lists it among what both hold in step 3. GPU 0 receives the averages of w1 and w2, GPU 1 those "
        "of w3 and w4.",
        "fp32 can add 0.00000001 to an existing weight: only below 0.25. Of the text's own 2, -3, 1 and 0.5 none "
        "changes. What fp32 does keep is the update itself, which fp16 rounds to zero.",
        "The all-gather costs (N-1)/N of the parameters per rank, as the reduce-scatter does.",
        "With its activation checkpointing stage 3 gathers layer 1 three times and layer 2 twice: 10 gathered and "
        "4 reduced elements, 3.5 Psi. The usual 3 Psi counts no recomputation. Here recomputation and backward share a "
        "gather, and the run takes 3 Psi with it; without it 2.5, as the gradients of layer 1 need x and not its "
        "weights.",
        "Lower peak memory at stage 2: at rest it is, 36 bytes against 40. In the first backward stage 2 peaks at 32 "
        "and stage 1 at 28: stage 2's reductions take buffers of their own, which here are the whole model.",
        "It keeps a after layer 1 and then says that no intermediate activation is held. Both can be done: with each "
        "layer a segment of its own a is kept, with the whole network as one it is recomputed.",
        "With whole layers as shards its reduce-scatter is a reduction to the owner, its all-gather a broadcast.",
    )
