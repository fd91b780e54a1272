"""The 260 parameters, trained on two ranks: what each rank sees, at every moment of a step."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

import zeroshard
from zeroshard.cli.reference import accumulate
from zeroshard.engine.gradients.reduction import UNHURRIED
from zeroshard.explain.document import matrix, numbers, plain
from zeroshard.explain.recording import MESSAGES, layout_json
from zeroshard.layout.stage import STAGES
from zeroshard.planner import predict_states
from zeroshard.planner.simulate import STEPS as SETTLED
from zeroshard.policies.layout import Layout
from zeroshard.policies.precision import Precision

from . import transformer260
from .observe import Observer, ticking
from .transformer260 import TENSORS

MODULES = ("norm1", "attention", "norm2", "feed_forward", "head")
BY_MODULE = Layout(bounds="model", align=1, units=MODULES)
BY_LAYER = Layout(align=1, units=MODULES)
SINGLY = Layout(bounds="model", align=1, bucket_mib=2.0**-20)  # a limit of one byte: every tensor has its own bucket
CUTS = {
    "layers": BY_LAYER,
    "model": BY_MODULE,
}  # each module cut evenly, as the engine does; the whole model, as the texts
GROUPINGS = {"tensor": SINGLY, "module": BY_MODULE}
BF16 = Precision(param_dtype=torch.bfloat16, grad_dtype=torch.bfloat16, store_params=True)  # as the texts count
LEARNING_RATE = 1e-3
STEPS = 2  # of the comparison with plain PyTorch


def capture() -> dict[str, Any]:
    """Make all runs of this rank. Collective, on two ranks."""
    return {
        "bf16": {stage: observed_step(stage, BF16, torch.float32, BY_MODULE) for stage in STAGES},
        "float64": {stage: observed_step(stage, Precision(), torch.float64, BY_MODULE) for stage in STAGES},
        "singly": observed_step(2, BF16, torch.float32, SINGLY),
        "trained": {stage: trained(stage) for stage in STAGES},
        "unsent": unsent(),
        "later": {stage: later(stage) for stage in STAGES},
        "played": {
            how: {
                step: {stage: observed_step(stage, BF16, torch.float32, cut, step) for stage in STAGES}
                for step in steps
            }
            for (how, cut), steps in zip(CUTS.items(), ((2, 1), (2,)), strict=True)
        },
        "second": {stage: observed_step(stage, Precision(), torch.float64, BY_MODULE, 2) for stage in STAGES},
    }


def wider() -> dict[str, Any]:
    """Record the second step on more ranks than the texts have, for either cut. Collective."""
    return {how: {stage: recorded_step(stage, cut) for stage in STAGES} for how, cut in CUTS.items()}


def recorded_step(stage: int, layout: Layout) -> dict[str, Any]:
    """Record the second step of this rank: its bytes and messages, without the values."""
    with ticking():
        rank = torch.distributed.get_rank()
        model = transformer260.Transformer260()
        optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
        zero = zeroshard.shard(model, optimizer, stage=stage, precision=BF16, comm=MESSAGES, layout=layout)
        batch = transformer260.batches(torch.bfloat16, torch.distributed.get_world_size())[rank]
        observer = Observer(zero)
        for step in (1, 2):
            if step == 2:
                observer.land()
                zero.record()
                observer.look("start")
            transformer260.loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        observer.land()
        observer.look("rest")
        told = observer.told()
        return {
            "told": {key: value for key, value in told.items() if key != "seen"},
            "held": {state: nbytes for state, nbytes in zero.ledger().held.items() if nbytes},
            "predicted": predict_states(zero),
            "layout": layout_json(zero.partition, told["unit_names"]),
        }


def later(stage: int) -> dict[str, Any]:
    """Return the most that this rank holds in a phase after the first step: Adam has m and v, gathers run ahead."""
    rank = torch.distributed.get_rank()
    model = transformer260.Transformer260()
    transformer260.inject(model, rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    zero = zeroshard.shard(model, optimizer, stage=stage, precision=BF16, comm=MESSAGES, layout=BY_MODULE)
    zero._engine.reduction.pause = UNHURRIED
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
    """Run a backward under `no_sync` at stage 1; return this rank's bytes of its own gradients, and what it sent."""
    rank = torch.distributed.get_rank()
    model = transformer260.Transformer260()
    transformer260.inject(model, rank)
    own: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda gradient, name=name: own.__setitem__(name, numbers(gradient)))
    optimizer = torch.optim.Adam(model.parameters())
    zero = zeroshard.shard(model, optimizer, stage=1, precision=BF16, comm=MESSAGES, layout=BY_MODULE)
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


def observed_step(
    stage: int, precision: Precision, dtype: torch.dtype, layout: Layout, number: int = 1
) -> dict[str, Any]:
    """Run steps with the texts' gradients of W_q, and look at the last before, between and after its phases."""
    with ticking():
        rank = torch.distributed.get_rank()
        model = transformer260.Transformer260(dtype)
        transformer260.inject(model, rank)
        gradients: dict[str, list[Any]] = {}
        for name, parameter in model.named_parameters():
            parameter.register_hook(lambda gradient, name=name: gradients.__setitem__(name, numbers(gradient)))
        before = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
        zero = zeroshard.shard(model, optimizer, stage=stage, precision=precision, comm=MESSAGES, layout=layout)
        batch = transformer260.batches(precision.param(dtype))[rank]
        observer = Observer(zero)
        for _ in range(number - 1):
            transformer260.loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        observer.land()
        kept_before = _kept(zero, optimizer) if number > 1 else []

        zero.record()
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
        dtypes = zero._engine.formats(zero.partition.buckets[0])
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
            "kept_before": kept_before,
            "dtypes": {
                "parameters": _name(dtypes.computed), "gradients": _name(dtypes.gradients),
                "master": _name(dtypes.master),
            },
        }  # fmt: skip


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _kept(zero: zeroshard.Zero, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """List every fragment that this rank updates: its name, its first element, the new master, m and v."""
    found = []
    for fragment in zero._engine.bindings[0].fragments:
        if fragment.param.numel():
            state = optimizer.state[fragment.param]
            found.append(
                {
                    "name": fragment.slot.name, "start": fragment.elements.start, "master": numbers(fragment.param),
                    "exp_avg": numbers(state["exp_avg"]), "exp_avg_sq": numbers(state["exp_avg_sq"]),
                }
            )  # fmt: skip
    return found


def trained(stage: int) -> list[float]:
    """Train some steps in float64 without injected gradients; return the weights, to compare with `plain_weights`."""
    rank = torch.distributed.get_rank()
    model = transformer260.Transformer260(torch.float64)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    zero = zeroshard.shard(model, optimizer, stage=stage, comm=MESSAGES, layout=BY_MODULE)
    batch = transformer260.batches(torch.float64)[rank]
    for _ in range(STEPS):
        transformer260.loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    with zero.gathered():
        return [value for parameter in model.parameters() for value in parameter.detach().flatten().tolist()]


def plain_weights() -> list[float]:
    """Train the same steps in one process without zeroshard: both micro-batches added up in order, divided once."""
    model = transformer260.Transformer260(torch.float64)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    batches = transformer260.batches(torch.float64)
    accumulate(model, optimizer, lambda step, index: batches[index], transformer260.loss, len(batches), steps=STEPS)
    return [value for parameter in model.parameters() for value in parameter.detach().flatten().tolist()]


def digest(weights: Sequence[float]) -> str:
    return hashlib.sha256(torch.tensor(weights, dtype=torch.float64).numpy().tobytes()).hexdigest()


# ------------------------------------------------------------------------------------------------ of both ranks
