"""Four weights by hand, run on two ranks: one step at every stage, with activation checkpointing, in fp16.

`capture` runs on each rank; `assemble` puts the ranks together and refuses to where stages disagree in a bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch

import zeroshard
from zeroshard.explain.document import numbers
from zeroshard.explain.recording import MESSAGES, layout_json, together, totals, traffic_of
from zeroshard.layout.stage import STAGES
from zeroshard.planner import predict_states
from zeroshard.policies.layout import Layout
from zeroshard.policies.precision import Precision

from . import four_weights
from .four_weights import LEARNING_RATE, SAMPLES, WEIGHTS
from .observe import Observer, ticking
from .walk260 import by_stage, one_of

Checkpointing = Literal["none", "layers", "whole"]
OWNERS = Layout(bounds="tensor", align=1, units=["layer1", "layer2"])  # a layer each
FP16 = Precision(param_dtype=torch.float16, grad_dtype=torch.float16, store_params=True)
BETAS = (0.9, 0.999)
STEPS = 4  # of the comparison with an optimizer without memory

WAYS: dict[Checkpointing, str] = {
    "none": "Nothing is recomputed: h and a are kept from forward to backward.",
    "layers": "Each layer is recomputed by itself (Layout(recompute=True)); only a is kept.",
    "whole": "The whole network is one segment: neither h nor a is kept.",
}


def capture() -> dict[str, Any]:
    """Make all runs of this rank. Collective, on two ranks."""
    return {
        "float16": {stage: observed_step(stage, torch.float16, FP16, "whole") for stage in STAGES},
        "float64": {stage: observed_step(stage, torch.float64, Precision(), "whole") for stage in STAGES},
        "ways": {how: observed_step(3, torch.float16, FP16, how) for how in get_args(Checkpointing)},
    }


def observed_step(stage: int, dtype: torch.dtype, precision: Precision, checkpointing: Checkpointing) -> dict[str, Any]:
    """Run one step on this rank, observed, and compute the loss after it.

    dtype: of the sample, so of what forward computes. The weights that are given to `shard` are fp32 or wider.
    """
    with ticking():
        rank = torch.distributed.get_rank()
        model = four_weights.FourWeights(checkpointing).to(torch.promote_types(dtype, torch.float32))
        local: dict[str, list[Any]] = {}
        for name, parameter in model.named_parameters():
            parameter.register_hook(lambda gradient, name=name: local.__setitem__(name, numbers(gradient)))
        before = [value for parameter in model.parameters() for value in numbers(parameter)]
        optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
        zero = zeroshard.shard(model, optimizer, stage=stage, precision=precision, comm=MESSAGES, layout=OWNERS)
        with zero.gathered():
            start = [value for parameter in model.parameters() for value in numbers(parameter)]
        observer = Observer(zero)
        zero.record()

        observer.look("start")
        loss = four_weights.loss(model, SAMPLES[rank], dtype)
        forward = list(model.seen)
        model.seen.clear()
        loss.backward()
        recomputed = list(model.seen)
        with observer.watching_gathers():
            optimizer.step()
        observer.land()
        averages = [numbers(accumulator.sum.own) for accumulator in zero._engine.gradients.accumulators]
        optimizer.zero_grad()
        observer.look("rest")

        told = observer.told()
        held = {state: nbytes for state, nbytes in zero.ledger().held.items() if nbytes}
        kept = []
        for fragment in zero._engine.bindings[0].fragments:
            if fragment.param.numel():
                state = optimizer.state[fragment.param]
                kept.append(
                    [
                        fragment.slot.name,
                        *(numbers(t)[0] for t in (fragment.param, state["exp_avg"], state["exp_avg_sq"])),
                    ]
                )
        masters = torch.tensor([row[1] for row in kept], dtype=torch.float64)
        with zero.gathered():
            after = [value for parameter in model.parameters() for value in numbers(parameter)]
        return {
            "told": told,
            "held": held,
            "predicted": predict_states(zero),
            "layout": layout_json(zero.partition, told["unit_names"]),
            "forward": forward,
            "recomputed": recomputed,
            "flow": [[name, model.flow.gradients[name] + 0.0] for name in ("y", "a", "h")],
            "stepped": observer.seen["stepped"]["parameters"] if "stepped" in observer.seen else None,
            "loss": loss.item(),
            "gradients": [value for name in WEIGHTS for value in local[name]],
            "averages": averages,
            "before": before,
            "start": start,
            "after": after,
            "kept": kept,
            "bf16": dict(zip([row[0] for row in kept], numbers(masters.bfloat16()), strict=True)),
            "loss after": four_weights.loss(model, SAMPLES[rank], dtype).item(),
        }


# ------------------------------------------------------------------------------------------------ of both ranks


def assemble(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Make the `FourWeights` document from what `capture` returned on each rank."""
    runs = {name: [by_stage(rank[name]) for rank in ranks] for name in ("float16", "float64")}
    values = {name: _values(run) for name, run in runs.items()}
    stages = [_stage(stage, [rank[stage] for rank in runs["float16"]]) for stage in STAGES]
    ways = [_way(how, [rank["ways"][how] for rank in ranks]) for how in get_args(Checkpointing)]
    tiny = _tiny()
    most = {
        phase: [max(most_in(rank[stage]["told"], phase) for rank in runs["float16"]) for stage in (1, 2)]
        for phase in ("backward", "step")
    }
    return {
        "title": "Four weights by hand",
        "ranks": len(ranks),
        "layout": runs["float16"][0][0]["layout"],
        "names": [name.split(".")[1] for name in WEIGHTS],
        "learning_rate": LEARNING_RATE,
        "optimizer": {"name": "Adam", "lr": LEARNING_RATE, "beta1": BETAS[0], "beta2": BETAS[1], "eps": 1e-8},
        "samples": [{"x": list(sample.x), "t": sample.t} for sample in SAMPLES],
        "values": values["float16"],
        "decimals": values["float64"],
        "stages": stages,
        "checkpointing": ways,
        "tiny": tiny,
        "memory": _memory(),
        "corrections": _corrections(values["float16"], stages, most, ways, tiny),
    }


def _values(ranks: Sequence[dict[int, dict[str, Any]]]) -> dict[str, Any]:
    sharded = [stage for stage, place in STAGES.items() if place.optimizer]
    replicated = [stage for stage in sharded if not STAGES[stage].parameters]  # there a gather follows the step

    def same(what: str, rank: dict[int, dict[str, Any]], stages: Sequence[int] = tuple(STAGES)) -> Any:
        return one_of([rank[stage][what] for stage in stages], what)

    def kept(stage: int, column: int) -> list[Any]:
        found = {row[0]: row[column] for rank in ranks for row in rank[stage]["kept"]}
        return [found[name] for name in WEIGHTS]

    masters, exp_avg, exp_avg_sq = (
        one_of([kept(stage, column) for stage in STAGES], "the optimizer's state") for column in (1, 2, 3)
    )
    copies = {name: value for rank in ranks for name, value in rank[0]["bf16"].items()}
    average = one_of(
        [
            [value for bucket in range(2) for rank in ranks for value in rank[stage]["averages"][bucket]]
            for stage in sharded
        ],
        "averages",
    )
    return {
        "forward": [same("forward", rank) for rank in ranks],
        "loss": [same("loss", rank) for rank in ranks],
        "recomputed": [same("recomputed", rank) for rank in ranks],
        "flow": [same("flow", rank) for rank in ranks],
        "gradients": [same("gradients", rank) for rank in ranks],
        "average": average,
        "exp_avg": exp_avg,
        "exp_avg_sq": exp_avg_sq,
        "exp_avg_corrected": [value / (1 - BETAS[0]) for value in exp_avg],
        "exp_avg_sq_corrected": [value / (1 - BETAS[1]) for value in exp_avg_sq],
        "half_updated": [same("stepped", rank, replicated) for rank in ranks],
        "states": [same("kept", rank, sharded) for rank in ranks],
        "master": one_of([same("before", rank) for rank in ranks], "masters"),
        "master_after": masters,
        "parameters": one_of([same("start", rank) for rank in ranks], "parameters"),
        "parameters_after": one_of([same("after", rank) for rank in ranks], "new parameters"),
        "bf16_after": [copies[name] for name in WEIGHTS],
        "loss_after": [same("loss after", rank) for rank in ranks],
    }


def _stage(stage: int, ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    told = [rank["told"] for rank in ranks]
    nbytes = [sum(n for state, n in rank["held"].items() if state != "step") for rank in ranks]
    return {
        "stage": stage,
        "checkpointing": "whole",
        "placements": STAGES[stage].sharded(),
        "predicted": [rank["predicted"] for rank in ranks],
        "held": [rank["held"] for rank in ranks],
        "nbytes": one_of(nbytes, "bytes"),
        "traffic": [traffic_of(rank["moves"], rank["span"][0]) for rank in told],
        "recording": together(told, told[0]["unit_names"], clock="tick"),
        "story": [story(rank, ranks[0]["layout"]) for rank in told],
    }


def story(told: dict[str, Any], layout: dict[str, Any]) -> list[dict[str, Any]]:
    """List what happened on one rank, in order, without agreements and copies.

    A checkpoint recomputes inside the backward that asks for it: backward first reaches such a unit, and computes its
    gradients after the recomputation. Adam has a line for each unit that this rank updates, before the first gather of
    new parameters.
    """
    origin = told["span"][0]
    lines = [
        {
            "verb": verb, "unit": unit, "state": state, "phase": "", "logical": logical, "sent": sent,
            "received": received, "truth": _truth(verb, layout["buckets"][bucket], layout["ranks"]), "at": start,
        }
        for verb, state, bucket, unit, logical, sent, received, start, *_ in told["moves"]
        if verb in ("gather", "reduce", "release")
    ] + [
        {
            "verb": verb, "unit": unit, "state": "", "phase": "", "logical": 0, "sent": 0, "received": 0,
            "truth": "", "at": start,
        }
        for verb, unit, start, _ in told["units"]
    ]  # fmt: skip
    lines += _adam(told, layout)
    for line in lines:
        line["phase"] = next((p[0] for p in reversed(told["phases"]) if p[1] <= line["at"] < p[2]), "between")
    found = [line | {"at": line["at"] - origin} for line in sorted(lines, key=lambda line: line["at"])]
    for line in [line for line in found if line["verb"] == "backward"]:
        again = [
            one
            for one in found
            if one["verb"] == "recompute" and one["unit"] == line["unit"] and one["at"] > line["at"]
        ]
        if again:
            found.insert(found.index(again[0]) + 1, line | {"at": again[0]["at"]})
            line["verb"] = "reach"
    return found


def _adam(told: dict[str, Any], layout: dict[str, Any]) -> list[dict[str, Any]]:
    _, start, stop = next(phase for phase in told["phases"] if phase[0] == "step")
    kept = {told["unit_names"][layout["buckets"][bucket]["unit"]] for bucket in _updated(told, layout)}
    published = [m[7] for m in told["moves"] if m[0] == "gather" and m[1] == "parameters" and start <= m[7] < stop]
    at = min(published, default=stop) - 1
    return [
        {
            "verb": "step", "unit": unit, "state": "master", "phase": "", "logical": 0, "sent": 0, "received": 0,
            "truth": "", "at": at,
        }
        for unit in told["unit_names"]
        if unit in kept
    ]  # fmt: skip


def _updated(told: dict[str, Any], layout: dict[str, Any]) -> list[int]:
    """List the buckets that this rank updates: all of them where the averages of gradients were gathered."""
    everything = any(move[0] == "gather" and move[1] == "gradients" for move in told["moves"])
    rank = told["rank"]
    return [
        number
        for number, bucket in enumerate(layout["buckets"])
        if everything or bucket["bounds"][rank + 1] > bucket["bounds"][rank]
    ]


def _truth(verb: str, bucket: dict[str, Any], ranks: int) -> str:
    """Name the collective that a gather or reduction over unequal shards comes down to."""
    bounds = bucket.get("bounds") or [rank * bucket["share"] for rank in range(ranks + 1)]
    owners = [rank for rank in range(ranks) if bounds[rank + 1] > bounds[rank]]
    if len(owners) > 1 or verb == "release":
        return {"gather": "all-gather", "reduce": "reduce-scatter"}.get(verb, "")
    return f"broadcast by rank {owners[0]}" if verb == "gather" else f"reduction to rank {owners[0]}"


def _way(how: Checkpointing, ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    moves = [move for move in ranks[0]["told"]["moves"] if move[0] in ("gather", "reduce")]
    gathered = [move[3] for move in moves if move[0] == "gather"]
    by_verb = {verb: sum(move[4] for move in moves if move[0] == verb) // 2 for verb in ("gather", "reduce")}  # fp16
    elements = sum(by_verb.values())
    return {
        "how": how,
        "says": WAYS[how],
        "gathered": gathered,
        "recomputed": [what for what, _ in ranks[0]["recomputed"]],
        "gathered_elements": by_verb["gather"],
        "reduced_elements": by_verb["reduce"],
        "elements": elements,
        "passes": elements / len(WEIGHTS),
    }


def _tiny() -> dict[str, Any]:
    """Add the article's smallest update to weights of several sizes."""
    update = 1e-3 * 1e-5
    weights = [0.01, 0.1, 0.2499, 0.25, 0.5, 1.0, 2.0, -3.0]

    def changes(weight: float, dtype: torch.dtype) -> bool:
        before = torch.tensor(weight, dtype=dtype)
        return bool(before + torch.tensor(update, dtype=dtype) != before)

    return {
        "update": update,
        "fp16": torch.tensor(update, dtype=torch.float16).item(),
        "weights": [
            {
                "weight": weight,
                "fp32_changes": changes(weight, torch.float32),
                "fp16_changes": changes(weight, torch.float16),
            }
            for weight in weights
        ],
    }


def _memory() -> list[dict[str, Any]]:
    """Run some steps in float64: how far Adam moves each weight, and how far it would without its m and v."""
    model = four_weights.FourWeights("none").double()
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for sample in SAMPLES:
            (four_weights.loss(model, sample, torch.float64) / len(SAMPLES)).backward()
        parameters = list(model.parameters())
        before = [parameter.detach().clone() for parameter in parameters]
        gradients = [parameter.grad.clone() for parameter in parameters if parameter.grad is not None]
        anew = [torch.nn.Parameter(value.clone()) for value in before]
        for parameter, gradient in zip(anew, gradients, strict=True):
            parameter.grad = gradient
        torch.optim.Adam(anew, lr=LEARNING_RATE).step()
        optimizer.step()
        found.append(
            {
                "step": step + 1,
                "gradient": [gradient.item() for gradient in gradients],
                "kept": [(now.detach() - then).item() for now, then in zip(parameters, before, strict=True)],
                "forgotten": [(now.detach() - then).item() for now, then in zip(anew, before, strict=True)],
            }
        )
    return found


def _corrections(
    values: dict[str, Any],
    stages: Sequence[dict[str, Any]],
    most: dict[str, list[int]],
    ways: Sequence[dict[str, Any]],
    tiny: dict[str, Any],
) -> list[dict[str, str]]:
    def note(at: str, says: str, right: str) -> dict[str, str]:
        return {"text": "C", "at": at, "says": says, "right": right}

    copies = ", ".join(repr(value) for value in values["parameters_after"])
    moved = [row["weight"] for row in tiny["weights"] if row["fp32_changes"]]
    lost = [row["weight"] for row in tiny["weights"] if not row["fp32_changes"]]
    one, two = (stages[number] for number in (1, 2))
    backward, step = most["backward"], most["step"]
    if not (backward[0] < backward[1] and step[0] > step[1]):
        raise AssertionError(f"stages 1 and 2 hold {backward} in backward and {step} in the step")
    by_way = {way["how"]: way for way in ways}
    theirs = 3 * 2 + 2 * 2 + 4  # layer 1 three times, layer 2 twice, two weights each, and all four reduced
    return [
        note("values", "w1'_fp16 = 2.1, w2'_fp16 = -2.9, w3'_fp16 = 1.1, w4'_fp16 = 0.6",
             f"These are the fp32 masters. fp16 has none of the four; the copies are {copies}."),
        note("values", "The synchronized gradient tensor on both GPUs is: Grad_avg = [-5.5, -2.75, -2.75, -5.0]",
             f"Neither GPU has it. GPU 0 receives {values['average'][:2]}, GPU 1 {values['average'][2:]}; the text "
             "says so itself a sentence later, and then lists the whole among what both hold."),
        note("fp32", "You can add 0.00000001 to an existing weight and the value will actually change",
             f"In fp32 that holds below 0.25: {', '.join(map(str, moved))} change, {', '.join(map(str, lost))} do not. "
             "What fp32 does keep is the update itself, which fp16 rounds to zero."),
        note("volume", "All gather the parameters - incur #params communication cost",
             "(N-1)/N of them are sent per rank, as in the reduce-scatter beside it: half of them at N = 2."),
        note("checkpointing", "The weights [w1=2.0, w2=-3.0] are gathered again for the gradient calculation",
             f"Layer 1 three times, layer 2 twice: {theirs - 4} gathered and 4 reduced elements, {theirs / 4} times "
             "the model, where stage 3 is said to cost 3. Here recomputation and backward share a gather: "
             f"{by_way['whole']['elements']} elements, {by_way['whole']['passes']}; the gradients of layer 1 need x "
             f"and not its weights, so without checkpointing it is {by_way['none']['passes']}."),
        note("checkpointing", "They also discard h, only keeping a. At the end no GPU holds intermediate activations",
             "Both are possible: with each layer a segment a is kept, with the whole network as one it is recomputed."),
        note("stage 3", "GPU 1 has no parameters for this layer, so it contributes an empty tensor",
             "With whole layers as shards this is a broadcast by the owner, and the reduce-scatter a reduction to it."),
        note("stage 3", "Stage 2 achieves the exact same numerical outcome ... with a lower peak memory footprint",
             f"In backward it is higher here: {backward[0]} bytes at stage 1, {backward[1]} at stage 2. The buffers of "
             "its reductions are larger than the gradients that it does not keep. It is lower at rest, "
             f"{two['nbytes']} against {one['nbytes']} bytes, and in the optimizer's step."),
    ]  # fmt: skip


def most_in(rank: dict[str, Any], phase: str) -> int:
    """Return the most bytes that a rank held on the device while a phase of the loop ran. `rank`: from `one_step`."""
    spans = [(start, end) for name, start, end in rank["phases"] if name == phase]
    return max(
        nbytes
        for begins, ends, nbytes, _ in totals(rank["held"])
        for start, end in spans
        if begins < end and max(ends, begins + 1) > start
    )
