"""One step of the 260-parameter transformer at every stage, run on two ranks and told in the words of `web/DATA.md`.

`capture` runs on each rank and returns what JSON can hold; `assemble` puts the ranks together, and refuses to where the
stages do not agree in every bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

import zeroshard

from ..cli.reference import accumulate
from ..engine.reduction import UNHURRIED
from ..layout import Layout
from ..numerics import Precision
from ..planner import predict_states, traffic
from ..planner.recipes import PRESETS
from ..planner.simulate import STEPS as SETTLED
from ..stage import STAGES
from . import transformer260
from .document import matrix, numbers, plain
from .frames import backward_frames
from .observe import Observer, ticking
from .recording import layout_json, peak_of, together, traffic_of
from .transformer260 import TENSORS

MODULES = ("norm1", "attention", "norm2", "feed_forward", "head")
BY_MODULE = Layout(bounds="model", align=1, units=MODULES)
SINGLY = Layout(bounds="model", align=1, bucket_mib=2.0**-20)  # a limit of one byte: every tensor has its own bucket
GROUPINGS = {"tensor": SINGLY, "module": BY_MODULE}
BF16 = Precision(param_dtype=torch.bfloat16, grad_dtype=torch.bfloat16, store_params=True)  # as the texts count
LEARNING_RATE = 1e-3
STEPS = 2  # of the comparison with plain PyTorch

TITLES = {
    "start": "Before the step",
    "forward": "Forward",
    "backward": "Backward, with its reductions",
    "gathered gradients": "The averages go to every rank",
    "stepped": "Adam",
    "gathered parameters": "The new parameters go to every rank",
    "rest": "After the step",
}


def capture() -> dict[str, Any]:
    """All runs of this rank. Collective, on two ranks."""
    return {
        "bf16": {stage: observed_step(stage, BF16, torch.float32, BY_MODULE) for stage in STAGES},
        "float64": {stage: observed_step(stage, Precision(), torch.float64, BY_MODULE) for stage in STAGES},
        "singly": observed_step(2, BF16, torch.float32, SINGLY),
        "trained": {stage: trained(stage) for stage in STAGES},
        "unsent": unsent(),
        "later": {stage: later(stage) for stage in STAGES},
    }


def later(stage: int) -> dict[str, Any]:
    """The most this rank holds in each phase from the second step on: Adam has m and v, gathers run ahead of use."""
    rank = torch.distributed.get_rank()
    model = transformer260.Transformer260()
    transformer260.inject(model, rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    zero = zeroshard.shard(model, optimizer, stage=stage, precision=BF16, layout=BY_MODULE)
    zero._engine.reduction.patience = UNHURRIED
    batch = transformer260.batches(torch.bfloat16)[rank]
    for _ in range(SETTLED):  # no phase of the first step holds as much as the same phase later
        transformer260.loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = zero.ledger().phases
    return {
        phase: {"total": found[phase].total, "held": found[phase].held} for phase in ("forward", "backward", "step")
    }


def unsent() -> dict[str, Any]:
    """After a backward under `no_sync` at stage 1: what this rank has of its own gradients, and what it has sent."""
    rank = torch.distributed.get_rank()
    model = transformer260.Transformer260()
    transformer260.inject(model, rank)
    own: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda gradient, name=name: own.__setitem__(name, numbers(gradient)))
    zero = zeroshard.shard(model, torch.optim.Adam(model.parameters()), stage=1, precision=BF16, layout=BY_MODULE)
    with zero.no_sync():
        transformer260.loss(model, transformer260.batches(torch.bfloat16)[rank]).backward()
        ledger = zero.ledger()
        sums = [accumulator.sum for accumulator in zero._engine.gradients.accumulators]
        held = [value for each in sums for value in numbers(each.tensor)]
    assert held == [value for entry in TENSORS for value in own[entry.name]]
    moved = ledger.traffic.get("reduce")
    return {
        "elements": len(held),
        "gradients": ledger.held["gradients"],
        "beside": ledger.held.get("reduce", 0),
        "sent": moved.sent if moved else 0,
    }


def observed_step(stage: int, precision: Precision, dtype: torch.dtype, layout: Layout) -> dict[str, Any]:
    """One step with the texts' gradients of W_q, looked at before, between and after its phases."""
    with ticking():
        rank = torch.distributed.get_rank()
        model = transformer260.Transformer260(dtype)
        transformer260.inject(model, rank)
        gradients: dict[str, list[Any]] = {}
        for name, parameter in model.named_parameters():
            parameter.register_hook(lambda gradient, name=name: gradients.__setitem__(name, numbers(gradient)))
        before = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
        zero = zeroshard.shard(model, optimizer, stage=stage, precision=precision, layout=layout)
        observer = Observer(zero)
        batch = transformer260.batches(precision.param(dtype))[rank]

        observer.look("start")
        trace = model(batch.x)
        loss = torch.nn.functional.cross_entropy(trace.logits, batch.targets)
        observer.look("forward")
        loss.backward()
        observer.look("backward")
        sums = [numbers(accumulator.sum.own) for accumulator in zero._engine.gradients.accumulators]
        with observer.watching_gathers():
            optimizer.step()
        observer.land()
        observer.look("gathered parameters" if "stepped" in observer.seen else "stepped")
        averages = [numbers(accumulator.sum.own) for accumulator in zero._engine.gradients.accumulators]
        optimizer.zero_grad()
        observer.look("rest")

        told = observer.told()
        held = {state: nbytes for state, nbytes in zero.ledger().held.items() if nbytes}
        kept = _kept(zero, optimizer)
        dtypes = zero.dtypes(zero.partition.buckets[0])
        with zero.gathered():
            after = [value for parameter in model.parameters() for value in numbers(parameter)]
        return {
            "told": told,
            "held": held,
            "predicted": predict_states(zero),
            "layout": layout_json(zero.partition, told["unit_names"]),
            "shards": [bucket.shard(rank) for bucket in zero.partition.buckets],
            "forward": {name: matrix(value) for name, value in trace._asdict().items()} | {"loss": plain(loss.item())},
            "gradients": [value for entry in TENSORS for value in gradients[entry.name]],
            "sums": sums,
            "averages": averages,
            "before": numbers(before),
            "after": after,
            "kept": kept,
            "dtypes": {
                "parameters": _name(dtypes.param), "gradients": _name(dtypes.grad), "master": _name(dtypes.master)
            },
        }  # fmt: skip


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _kept(zero: zeroshard.Zero, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Of every fragment that this rank updates: its name, its elements, m, v and the new master."""
    found = []
    for fragment in zero._engine.bindings[0].fragments:
        if fragment.param.numel():
            part = fragment.slot.within(*fragment.buffer.updated)
            state = optimizer.state[fragment.param]
            found.append(
                {
                    "name": fragment.slot.name, "start": part.start, "master": numbers(fragment.param),
                    "exp_avg": numbers(state["exp_avg"]), "exp_avg_sq": numbers(state["exp_avg_sq"]),
                }
            )  # fmt: skip
    return found


def trained(stage: int) -> list[float]:
    """The weights after some steps in float64 without injected gradients, to be compared with `plain_weights`."""
    rank = torch.distributed.get_rank()
    model = transformer260.Transformer260(torch.float64)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    zero = zeroshard.shard(model, optimizer, stage=stage, layout=BY_MODULE)
    batch = transformer260.batches(torch.float64)[rank]
    for _ in range(STEPS):
        transformer260.loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    with zero.gathered():
        return [value for parameter in model.parameters() for value in parameter.detach().flatten().tolist()]


def plain_weights() -> list[float]:
    """The same steps in one process without zeroshard: both micro-batches added up in order, divided once."""
    model = transformer260.Transformer260(torch.float64)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    batches = transformer260.batches(torch.float64)
    accumulate(model, optimizer, lambda step, index: batches[index], transformer260.loss, len(batches), steps=STEPS)
    return [value for parameter in model.parameters() for value in parameter.detach().flatten().tolist()]


def digest(weights: Sequence[float]) -> str:
    return hashlib.sha256(torch.tensor(weights, dtype=torch.float64).numpy().tobytes()).hexdigest()


# ------------------------------------------------------------------------------------------------ of both ranks


def assemble(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The `Transformer` document from what `capture` returned on each rank."""
    runs = {name: [by_stage(rank[name]) for rank in ranks] for name in ("bf16", "float64")}
    values = {name: _values(run) for name, run in runs.items()}
    layout = runs["bf16"][0][0]["layout"]
    cuts = _cuts(layout)
    own = [(cuts[rank], cuts[rank + 1]) for rank in range(len(ranks))]
    starts = _starts(layout)
    stages = [_stage(stage, [rank[stage] for rank in runs["bf16"]], own, values["bf16"]) for stage in STAGES]
    whole = stages[0]["nbytes"]
    later = [by_stage(rank["later"]) for rank in ranks]
    for stage in stages:
        stage["saved"] = 1 - stage["nbytes"] / whole
        stage["later"] = [rank[stage["stage"]] for rank in later]
    trained_at = [by_stage(rank["trained"]) for rank in ranks]
    plain_result = plain_weights()
    difference = max(
        abs(a - b) for rank in trained_at for stage in STAGES for a, b in zip(rank[stage], plain_result, strict=True)
    )
    batches = transformer260.batches(torch.float64)
    return {
        "title": "260 parameters on two ranks",
        "ranks": len(ranks),
        "numel": cuts[-1],
        "layout": layout,
        "dims": {
            "width": transformer260.WIDTH, "heads": transformer260.HEADS, "inner": transformer260.INNER,
            "words": transformer260.WORDS, "tokens": transformer260.TOKENS,
        },
        "tensors": [
            {
                "symbol": entry.symbol, "name": entry.name, "layer": entry.layer, "shape": list(entry.shape),
                "start": start, "numel": stop - start, "origin": entry.origin,
                "owners": [
                    [rank, max(low, start) - start, min(high, stop) - start]
                    for rank, (low, high) in enumerate(own)
                    if low < stop and start < high
                ],
            }
            for entry, (start, stop) in zip(TENSORS, starts, strict=True)
        ],
        "cuts": cuts,
        "optimizer": {"name": "Adam", "lr": LEARNING_RATE, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8},
        "batches": [
            {
                "micro_batch": "AB"[rank], "rank": rank, "x": matrix(batch.x), "x_origin": batch.x_origin,
                "targets": batch.targets.tolist(), "targets_origin": batch.targets_origin,
            }
            for rank, batch in enumerate(batches)
        ],
        "injected": ["W_q"],
        "runs": values,
        "stages": stages,
        "backward": {
            how: _grouping([rank["singly"] if how == "tensor" else by_stage(rank["bf16"])[2] for rank in ranks])
            for how in GROUPINGS
        },
        "plain": {"steps": STEPS, "equal": difference == 0, "max_difference": difference},
        "timing": [row for stage in STAGES for row in _timing(stage, runs["bf16"][0][stage])],
        "unsent": one_of([rank["unsent"] for rank in ranks], "local gradients"),
        "unchanged": [
            at
            for at, (old, new) in enumerate(
                zip(values["bf16"]["parameters"], values["bf16"]["parameters_after"], strict=True)
            )
            if old == new
        ],
        "corrections": _corrections(values["float64"], values["bf16"], cuts, starts, ranks[0]["unsent"]),
    }  # fmt: skip


def by_stage(found: dict[Any, Any]) -> dict[int, Any]:
    """JSON has turned the stages into strings."""
    return {int(stage): value for stage, value in found.items()}


def _cuts(layout: dict[str, Any]) -> list[int]:
    """Where the ranks' parts begin and end in the flat vector of all buckets end to end (none is padded)."""
    sizes = [bucket["numel"] for bucket in layout["buckets"]]
    cuts = [0]
    for rank in range(layout["ranks"]):
        cuts.append(cuts[-1] + sum(_bounds(bucket, rank + 1) - _bounds(bucket, rank) for bucket in layout["buckets"]))
    assert cuts[-1] == sum(sizes)
    return cuts


def _bounds(bucket: dict[str, Any], rank: int) -> int:
    return int(bucket["bounds"][rank]) if "bounds" in bucket else int(bucket["share"]) * rank


def _starts(layout: dict[str, Any]) -> list[tuple[int, int]]:
    """[start, stop) of every slot in the flat vector."""
    found = []
    base = 0
    for bucket in layout["buckets"]:
        for _, shape, start in layout["slots"][bucket["first"] : bucket["last"]]:
            numel = int(torch.Size(shape).numel())
            found.append((base + start, base + start + numel))
        base += bucket["numel"]
    return found


def _flat(layout: dict[str, Any], ranks: Sequence[Sequence[Sequence[Any]]]) -> list[Any]:
    """A flat vector from the ranks' shards of every bucket."""
    return [value for bucket in range(len(layout["buckets"])) for rank in ranks for value in rank[bucket]]


def one_of(values: Sequence[Any], what: str) -> Any:
    """What all of them are. Raises `AssertionError` where one differs: then the page would lie."""
    for value in values[1:]:
        if value != values[0]:
            raise AssertionError(f"{what} differ between stages or ranks")
    return values[0]


def _values(ranks: Sequence[dict[int, dict[str, Any]]]) -> dict[str, Any]:
    """One set of values for all four stages, which must agree in every one of them."""
    layout = ranks[0][0]["layout"]
    starts = {slot[0]: start for slot, (start, _) in zip(layout["slots"], _starts(layout), strict=True)}

    def kept(stage: int, what: str) -> list[Any]:
        flat: list[Any] = [None] * layout_numel(layout)
        for rank in ranks:
            for fragment in rank[stage]["kept"]:
                first = starts[fragment["name"]] + fragment["start"]
                flat[first : first + len(fragment[what])] = fragment[what]
        return flat

    at = {what: one_of([kept(stage, what) for stage in STAGES], what) for what in ("master", "exp_avg", "exp_avg_sq")}
    first = [rank[0] for rank in ranks]
    sums = one_of([_flat(layout, [rank[stage]["sums"] for rank in ranks]) for stage in STAGES], "sums")
    averages = one_of([_flat(layout, [rank[stage]["averages"] for rank in ranks]) for stage in STAGES], "averages")
    return {
        "dtype": first[0]["dtypes"],
        "forward": [one_of([rank[stage]["forward"] for stage in STAGES], "forward values") for rank in ranks],
        "parameters": first[0]["told"]["seen"]["start"]["parameters"],
        "master": one_of([rank[stage]["before"] for stage in STAGES for rank in ranks], "masters"),
        "gradients": [one_of([rank[stage]["gradients"] for stage in STAGES], "gradients") for rank in ranks],
        "sum": sums,
        "average": averages,
        "exp_avg": at["exp_avg"],
        "exp_avg_sq": at["exp_avg_sq"],
        "step": 1,
        "master_after": at["master"],
        "parameters_after": one_of([rank[stage]["after"] for stage in STAGES for rank in ranks], "new parameters"),
    }


def layout_numel(layout: dict[str, Any]) -> int:
    return sum(bucket["numel"] for bucket in layout["buckets"])


def _stage(
    stage: int, ranks: Sequence[dict[str, Any]], own: Sequence[tuple[int, int]], values: dict[str, Any]
) -> dict[str, Any]:
    place, numel = STAGES[stage], own[-1][1]
    told = [rank["told"] for rank in ranks]
    nbytes = [sum(n for state, n in rank["held"].items() if state != "step") for rank in ranks]
    sharded = place.sharded()
    recording = together(told, told[0]["unit_names"], clock="tick")
    return {
        "stage": stage,
        "placements": sharded,
        "formula": PRESETS["paper"].formula(place),
        "predicted": [rank["predicted"] for rank in ranks],
        "held": [rank["held"] for rank in ranks],
        "nbytes": one_of(nbytes, "bytes"),
        "owners": {
            state: [[rank, *(span if cut else (0, numel)), "device"] for rank, span in enumerate(own)]
            for state, cut in sharded.items()
        },
        "traffic": [traffic_of(rank["moves"], rank["span"][0]) for rank in told],
        "moments": _moments(stage, ranks, own, values),
        "recording": recording,
    }


def _moments(
    stage: int, ranks: Sequence[dict[str, Any]], own: Sequence[tuple[int, int]], values: dict[str, Any]
) -> list[dict[str, Any]]:
    names = [name for name, _ in ranks[0]["told"]["moments"]]
    ticks = [dict(rank["told"]["moments"]) for rank in ranks]
    spread = [_end_of(rank["told"], "gradients") for rank in ranks]
    if all(spread):  # where the optimizer's state is replicated, the averages travel inside the step
        names.insert(names.index("backward") + 1, "gathered gradients")
        for found, at in zip(ticks, spread, strict=True):
            found["gathered gradients"] = at
    origin = min(rank["told"]["span"][0] for rank in ranks)
    return [
        {
            "key": name,
            "title": TITLES[name],
            "says": _says(stage, name),
            "ranks": [
                _moment(stage, name, rank["told"], ticks[number], names, own[number], own[-1][1], origin, values)
                for number, rank in enumerate(ranks)
            ],
        }
        for name in names
    ]


def _end_of(told: dict[str, Any], state: str) -> int:
    """When the last gather of that state had arrived; 0 where there was none."""
    return max((move[8] for move in told["moves"] if move[0] == "gather" and move[1] == state), default=0)


def _moment(
    stage: int,
    name: str,
    told: dict[str, Any],
    ticks: dict[str, int],
    names: Sequence[str],
    own: tuple[int, int],
    numel: int,
    origin: int,
    values: dict[str, Any],
) -> dict[str, Any]:
    at = ticks[name]
    before = ticks[names[names.index(name) - 1]] if names.index(name) else at
    held: dict[str, int] = {}
    for when, _, state, nbytes in told["held"]:
        if when <= at:
            held[state] = nbytes
    since = [change for change in told["held"] if change[0] <= at]
    passed = [change for change in since if change[0] > before]
    start = {(tier, state): nbytes for when, tier, state, nbytes in since if when <= before}
    window = [[before, *place, nbytes] for place, nbytes in start.items()] + passed
    peak = peak_of(window, (before, at), told["phases"], told["units"], told["moves"])
    if peak is not None:
        names_of = told["unit_names"]
        unit = -1 if peak["unit"] is None else names_of.index(peak["unit"])
        peak = {**peak, "at": peak["at"] - origin, "unit": unit}
    moves = [number for number, move in enumerate(told["moves"]) if before < move[7] <= at]
    found = {
        "at": at - origin,
        "held": {state: nbytes for state, nbytes in held.items() if nbytes},
        "peak": peak,
        "parameters": _parameters(stage, name, own, numel),
        "gradients": _gradients(stage, name, own, numel),
        "optimizer": _optimizer(stage, name, own, numel),
        "moves": [moves[0], moves[-1] + 1] if moves else [0, 0],
    }
    if name in told["seen"]:
        _check(found, told["seen"][name], own, values, told["rank"], stage)
    return found


def _parameters(stage: int, name: str, own: tuple[int, int], numel: int) -> list[list[Any]]:
    """Intervals of the flat vector that this rank has of the parameters, and whether they are from after the step."""
    place = STAGES[stage]
    if name in ("gathered parameters", "rest") or (name == "stepped" and not place.optimizer):
        return [[*own, "new"]] if place.parameters else [[0, numel, "new"]]
    if name == "stepped":
        new = [*own, "new"]
        if place.parameters:
            return [new]
        around: list[list[Any]] = [[0, own[0], "old"], new, [own[1], numel, "old"]]
        return [interval for interval in around if interval[0] < interval[1]]
    return [[*own, "old"]] if place.parameters else [[0, numel, "old"]]


def _gradients(stage: int, name: str, own: tuple[int, int], numel: int) -> list[list[Any]]:
    place = STAGES[stage]
    if name in ("start", "forward", "rest"):
        return []
    if not place.optimizer and name != "backward":
        return [[0, numel, "average"]]
    mine = [*own, "sum" if name == "backward" else "average"]
    if place.gradients:
        return [mine]
    around: list[list[Any]] = [[0, own[0], "own"], mine, [own[1], numel, "own"]]
    return [interval for interval in around if interval[0] < interval[1]]


def _optimizer(stage: int, name: str, own: tuple[int, int], numel: int) -> list[list[int]]:
    if name not in ("stepped", "gathered parameters", "rest"):
        return []
    return [[*own]] if STAGES[stage].optimizer else [[0, numel]]


def _check(
    moment: dict[str, Any],
    seen: dict[str, list[Any]],
    own: tuple[int, int],
    values: dict[str, Any],
    rank: int,
    stage: int,
) -> None:
    """The intervals are told by the layout; the tensors that were there must say the same."""
    vectors = {
        "old": values["parameters"], "new": values["parameters_after"], "own": values["gradients"][rank],
        "sum": values["sum"], "average": values["average"],
    }  # fmt: skip
    for state in ("parameters", "gradients"):
        if not moment[state]:
            continue
        first = own[0] if getattr(STAGES[stage], state) else 0
        for start, stop, what in moment[state]:
            if seen[state][start - first : stop - first] != vectors[what][start:stop]:
                raise AssertionError(f"stage {stage}, rank {rank}: {state} [{start}, {stop}) are not {what!r}")


def _grouping(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Backward, reduction by reduction, in the order of the run; elements by layout, bytes by the engine's ledger."""
    layout = ranks[0]["layout"]
    symbols = {entry.name: entry.symbol for entry in TENSORS}
    specs = [
        zeroshard.layout.Spec(slot[0], tuple(slot[1]), "bfloat16", 2, number, True)
        for number, bucket in enumerate(layout["buckets"])
        for slot in layout["slots"][bucket["first"] : bucket["last"]]
    ]
    laid_out = zeroshard.layout.partition(specs, Layout(bounds="model", align=1), layout["ranks"])
    reductions = [[move for move in rank["told"]["moves"] if move[0] == "reduce"] for rank in ranks]
    order = one_of([[move[2] for move in moves] for moves in reductions], "the order of reductions")
    groups = [[slot[0] for slot in layout["slots"][bucket["first"] : bucket["last"]]] for bucket in layout["buckets"]]
    assert order == list(range(len(groups)))[::-1], order  # `backward_frames` goes through the model backwards
    frames = [backward_frames(laid_out, rank, groups) for rank in range(layout["ranks"])]
    found = []
    for number, per_rank in enumerate(zip(*frames, strict=True)):
        at = [moves[number][7] for moves in reductions]
        found.append(
            {
                "names": list(per_rank[0].names),
                "symbols": [symbols[name] for name in per_rank[0].names],
                "ranks": [
                    {
                        "whole": frame.whole, "transient": frame.transient, "kept": frame.kept,
                        "engine": {
                            state: _held_at(ranks[rank]["told"]["held"], state, at[rank])
                            for state in ("gradients", "reduce")
                        },
                    }
                    for rank, frame in enumerate(per_rank)
                ],
            }
        )  # fmt: skip
    columns = ("whole", "transient", "kept")
    peak = {
        column: [max(frame["ranks"][rank][column] for frame in found) for rank in range(layout["ranks"])]
        for column in columns
    }
    return {"frames": found, "peak": peak}


def _held_at(held: Sequence[Sequence[Any]], state: str, at: int) -> int:
    return next((nbytes for when, _, name, nbytes in reversed(held) if name == state and when <= at), 0)


def _timing(stage: int, rank: dict[str, Any]) -> list[dict[str, Any]]:
    """In which phase of the step each verb moved what, on rank 0."""
    told = rank["told"]
    rows: dict[tuple[str, str, str], dict[str, Any]] = {}
    for verb, state, _, _, logical, sent, _, start, *_ in told["moves"]:
        if verb in ("gather", "reduce"):
            phase = next((p[0] for p in told["phases"] if p[1] <= start < p[2]), "between")
            row = rows.setdefault(
                (verb, state, phase),
                {"stage": stage, "verb": verb, "state": state, "phase": phase, "calls": 0, "logical": 0, "sent": 0},
            )
            row["calls"] += 1
            row["logical"] += logical
            row["sent"] += sent
    return list(rows.values())


# ----------------------------------------------------------------------------------------------------- in words


def _says(stage: int, name: str) -> str:
    place = STAGES[stage]
    if name == "start":
        weights = "its half of the bf16 parameters" if place.parameters else "all parameters in bf16"
        masters = "of its half" if place.optimizer else "of all of them"
        return f"Each rank has {weights} and fp32 masters {masters}. Adam has no m and v yet: they begin as zeros."
    if name == "forward":
        if place.parameters:
            return (
                "Each rank runs its own micro-batch. Before a module computes, its weights are gathered into a buffer "
                "that has room for all of them, also where a rank owns them all. After it they are released. In this "
                "first step nothing is gathered ahead. From the second step on the order is known, and the next "
                "module's weights are prefetched while one computes."
            )
        return "Each rank runs the whole model on its own micro-batch. Nothing is sent."
    if name == "backward":
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
        more = (
            " In this tiny model stage 2 holds more in backward than stage 1: the buffers of its reductions are larger "
            "than the gradients that it does not keep."
            if place.gradients and not place.parameters
            else ""
        )
        return (
            "As soon as a module has its gradients their reduction starts: each rank receives the other rank's "
            "gradients for the part it owns, and adds up both in rank order. Up to three reductions are under way at "
            f"a time. {keeps}{more}{gathers}"
        )
    if name == "gathered gradients":
        return "The sums are divided by the number of ranks, and gathered: every rank is to update everything."
    if name == "stepped":
        if not place.optimizer:
            return "Both ranks update all parameters, and do the same work twice. This is what stage 1 ends."
        if place.parameters:
            return (
                "The sums are divided by the number of ranks, and each rank updates its own part. Nothing has to be "
                "sent: its shard is all it keeps."
            )
        return (
            "The sums are divided by the number of ranks. Each rank has updated its own part and nothing else. For "
            "this moment the model is half new and half old, and the halves differ between the ranks."
        )
    if name == "gathered parameters":
        return "Each rank sends its new part to the other. Now both have the whole new model."
    return "The gradients are cleared; their memory stays reserved for the next backward. m, v and masters stay."


def _corrections(
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

    def note(text: str, at: str, says: str, right: str) -> dict[str, str]:
        return {"text": text, "at": at, "says": says, "right": right}

    passes = [sum(traffic.passes(STAGES[stage], accumulate=4)) for stage in (1, 2)]
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
        note("A", "traffic", "All-reduce: send 520 B + receive 520 B = 1,040 bytes",
             "Two passes of 520 logical bytes each. A rank sends (N-1)/N of each, 260 bytes; that send + receive "
             "gives the same 1,040 is an accident of N = 2."),
        note("D", "traffic", "Identical communication volume",
             f"For one micro-batch. With four, reduced one by one, it is {passes[1]} passes at stage 2; a stage 1 that "
             f"adds up first and reduces once takes 2. Here stages 0 to 2 take {passes[0]}, or 2 under no_sync(), "
             "for which stage 2 takes the full-size gradient buffer that stage 1 has."),
        note("D", "traffic", "Always use ZeRO-2: the memory savings are free", "For one micro-batch per step, yes."),
        note("A", "memory", "0.119 in BF16", f"bf16 has no 0.119; the nearest is {bf16['parameters_after'][w_q]!r}."),
        note("A", "memory", "Master copy of parameter: FP32, 4 bytes",
             "Its first value is the fp32 weight from before rounding. Seeded from the bf16 copy, "
             f"{bf16['parameters'][w_q]!r}, the same update gives {bf16['parameters'][w_q] - 1e-3:.6f}."),
        note("D", "memory", "Averaged gradients: avg_g[0:130], BF16",
             "Adam does not see that: in the step it gets an fp32 copy, 4 bytes for each element of the bucket it "
             "updates, which the text's bytes leave out."),
        note("A", "memory", "ZeRO-1 is the default in DeepSpeed", "Its configuration's default is stage 0: disabled."),
    ]  # fmt: skip
