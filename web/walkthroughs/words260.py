"""The 260 parameters in words: what each moment of a step is, and where the texts slip."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from zeroshard.layout.stage import STAGES, Placements
from zeroshard.planner import traffic
from zeroshard.planner.quantities import number
from zeroshard.planner.recipes import PRESETS

from . import transformer260
from .transformer260 import TENSORS

PAPER = PRESETS["paper"]
TITLES = {
    "start": "Before the step",
    "forward": "Forward",
    "backward": "Backward, with its reductions",
    "gathered gradients": "The averages go to every rank",
    "stepped": "Adam",
    "gathered parameters": "The new parameters go to every rank",
    "rest": "After the step",
}


def says(stage: int, name: str, step: int = 1, ranks: int = 2) -> str:
    """Say what happens in one phase of a step, on a number of ranks."""
    place = STAGES[stage]
    part = "half" if ranks == 2 else "part"
    if name == "start":
        weights = f"its {part} of the bf16 parameters" if place.parameters else "all parameters in bf16"
        masters = f"of its {part}" if place.optimizer else "of all of them"
        if step > 1:
            return f"Each rank has {weights}. It has fp32 masters, and Adam's m and v, {masters}."
        return f"Each rank has {weights} and fp32 masters {masters}. Adam has no m and v yet: they begin as zeros."
    if name == "forward":
        if place.parameters:
            ahead = (
                "The order is known from the first step, so the next module's weights are prefetched while one "
                "computes."
                if step > 1
                else "In this first step nothing is gathered ahead. From the second step on the order is known, and "
                "the next module's weights are prefetched while one computes."
            )
            return (
                "Each rank runs its own micro-batch. Before a module computes, its weights are gathered into a buffer "
                f"that has room for all of them, also where a rank owns them all. After it they are released. {ahead}"
            )
        return "Each rank runs the whole model on its own micro-batch. Nothing is sent."
    if name == "backward":
        return _backward(place, ranks)
    if name == "gathered gradients":
        return "The sums are divided by the number of ranks, and gathered: every rank is to update everything."
    if name == "stepped":
        if not place.optimizer:
            work = "Both ranks update all parameters, and do the same work twice"
            if ranks > 2:
                work = f"All ranks update all parameters, and do the same work {ranks} times"
            return f"{work}. This is what stage 1 ends."
        if place.parameters:
            return (
                "The sums are divided by the number of ranks, and each rank updates its own part. Nothing has to be "
                "sent: its shard is all it keeps."
            )
        mixed = (
            "the model is half new and half old, and the halves differ between the ranks"
            if ranks == 2
            else f"the model on each rank is 1/{ranks} new, and the new part differs between the ranks"
        )
        return (
            "The sums are divided by the number of ranks. Each rank has updated its own part and nothing else. For "
            f"this moment {mixed}."
        )
    if name == "gathered parameters":
        if ranks > 2:
            return "Each rank sends its new part to all others. Now each has the whole new model."
        return "Each rank sends its new part to the other. Now both have the whole new model."
    return "The gradients are cleared; their memory stays reserved for the next backward. m, v and masters stay."


def _backward(place: Placements, ranks: int) -> str:
    gathers = (
        " Weights are gathered once more, module by module, and released later than in forward. When a module has "
        "its gradients, torch still holds its parameters. So a rank keeps the last two modules, and releases one "
        "when backward asks for the weights of the second module after it, or ends."
        if place.parameters
        else ""
    )
    keeps = (
        "What a rank does not own is sent to its owner and not kept."
        if place.gradients
        else "The full-size buffer stays: outside its own part a rank has only what its own micro-batch gave."
    )
    others = "the other rank's" if ranks == 2 else "the other ranks'"
    more = (
        " In this tiny model stage 2 holds more in backward than stage 1: the buffers of its reductions are larger "
        "than the gradients that it does not keep."
        if place.gradients and not place.parameters and ranks == 2
        else ""
    )
    return (
        f"As soon as a module has its gradients their reduction starts: each rank receives {others} "
        f"gradients for the part it owns, and adds up {'both' if ranks == 2 else 'all'} in rank order. Up to three "
        f"reductions are under way at a time. {keeps}{more}{gathers}"
    )


def note(text: str, at: str, says: str, right: str) -> dict[str, str]:
    return {"text": text, "at": at, "says": says, "right": right}


def corrections(
    exact: dict[str, Any],
    bf16: dict[str, Any],
    cuts: Sequence[int],
    starts: Sequence[tuple[int, int]],
    unsent: dict[str, Any],
) -> list[dict[str, str]]:
    symbols = [entry.symbol for entry in TENSORS]
    w1, w_q = starts[symbols.index("W1")], starts[symbols.index("W_q")][0]
    first = cuts[1] - w1[0]
    trace = exact["forward"][0]
    sigma, x1, q = (trace[name]["values"] for name in ("sigma", "x1", "q"))
    row = transformer260.WIDTH

    def listed(values: Sequence[float], digits: int = 4) -> str:
        return ", ".join(f"{value:.{digits}f}" for value in values)

    optimizer = sum(PAPER.optimizer.values(), Fraction())
    return [
        note("A", "ownership", "GPU-0: W₁ (first 2 rows), 32 elements; GPU-1: W₁ (rows 3\N{EN DASH}4), 32 elements",
             f"The cut is at {cuts[1]}, inside W1 at its element {first}: {first} elements (three rows and "
             f"{first % transformer260.INNER} of the fourth) are rank 0's, {w1[1] - cuts[1]} are rank 1's. The text's "
             f"own rows add up to {w1[0] + 32} and {cuts[-1] - w1[1] + 32}, not {cuts[1]} and {cuts[2] - cuts[1]}."),
        note("A", "forward", "\N{GREEK SMALL LETTER SIGMA} = √var ≈ 0.398",
             f"The population's deviation is {sigma[0]:.5f}."),
        note("A", "forward", "x₁[0] = [0.565, -1.445, 1.319, -0.439]", f"x1[0] = [{listed(x1[:row])}]"),
        note("A", "forward", "Q[0] = [0.703, -0.319, ...]", f"Q[0] = [{listed(q[:row])}]"),
        note("A", "backward", "Step 1: both GPUs now hold 260 gradient values. Step 2: Reduce-Scatter",
             "Here stage 1 sends its gradients during backward, bucket by bucket, as stage 2 does; the texts put it "
             f"after. Under no_sync() a rank has all {unsent['elements']} of its own first: {unsent['gradients']} "
             f"bytes, in the buffer that rests there, {unsent['beside']} beside it, {unsent['sent']} sent."),
        note("D", "backward", "Peak gradient memory: ~130 values",
             "130 is what stays. For a moment a rank also has the whole gradients of what is being reduced: see "
             "the column \"at most\", on both ranks."),
        *_of_traffic(),
        note("A", "memory", "For each parameter, Adam stores 16 bytes",
             f"{number(optimizer)} of the 16 are the optimizer's, and {number(optimizer - PAPER.optimizer['master'])} "
             "of these Adam's own m and v. The others are the parameter and its gradient in bf16."),
        note("A", "memory", "0.119 in BF16", f"bf16 has no 0.119; the nearest is {bf16['parameters_after'][w_q]!r}."),
        note("A", "memory", "Master copy of parameter: FP32, 4 bytes",
             "Its first value is the fp32 weight from before rounding. Seeded from the bf16 copy, "
             f"{bf16['parameters'][w_q]!r}, the same update gives {bf16['parameters'][w_q] - 1e-3:.6f}."),
        note("D", "memory", "Averaged gradients: avg_g[0:130], BF16",
             "Adam does not see that: in the step it gets an fp32 copy, 4 bytes for each element of the bucket it "
             "updates, which the text's bytes leave out."),
        note("A", "memory", "ZeRO-1 is the default in DeepSpeed", "Its configuration's default is stage 0: disabled."),
    ]  # fmt: skip


def _of_traffic() -> list[dict[str, str]]:
    passes = [sum(traffic.passes(STAGES[stage], accumulate=4)) for stage in (1, 2)]
    return [
        note("A", "traffic", "All-reduce: send 520 B + receive 520 B = 1,040 bytes",
             "Two passes of 520 logical bytes each. A rank sends (N-1)/N of each, 260 bytes; that send + receive "
             "gives the same 1,040 is an accident of N = 2."),
        note("A", "traffic", "Unlike ZeRO-2/3, every GPU keeps the full parameters: no extra communication during "
             "forward/backward",
             "ZeRO-2 keeps them too, and cuts gradients. It takes as many passes as stage 1, "
             f"{sum(traffic.passes(STAGES[2]))}; only stage 3 gathers parameters, and takes "
             f"{sum(traffic.passes(STAGES[3]))}."),
        note("D", "traffic", "Standard all-reduce: after backward",
             "DistributedDataParallel sends during backward too, bucket by bucket. So does stage 0 here; only the "
             "averages go to every rank after it. And so does stage 1, which the text has after backward."),
        note("D", "traffic", "Identical communication volume",
             f"For one micro-batch. With four, reduced one by one, it is {passes[1]} passes at stage 2; a stage 1 that "
             f"adds up first and reduces once takes 2. Here stages 0 to 2 take {passes[0]}, or 2 under no_sync(), "
             "for which stage 2 takes the full-size gradient buffer that stage 1 has."),
        note("D", "traffic", "Always use ZeRO-2: the memory savings are free", "For one micro-batch per step, yes."),
    ]  # fmt: skip
