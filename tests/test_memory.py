"""Memory is what the layout says: counted by walking the storages that are really alive."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import statistics
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import models
import ranks as rank_processes
import reference
import zeroshard
from zeroshard import Comm, Layout, Offload, Precision
from zeroshard.engine.gradients.sharded_grad import ShardedGrad
from zeroshard.engine.weights.gathered import placeholder
from zeroshard.planner import predict_states


def live() -> dict[int, int]:
    """Bytes of every live storage, by its address."""
    time.sleep(0.06)  # gloo's threads drop the tensors of a finished collective a moment later
    gc.collect()
    # 16 bytes for all models of the process: there before anything is counted, and frozen once a run has ended.
    storages = {placeholder(torch.device("cpu")).untyped_storage()._cdata: 16}
    with torch._C.DisableTorchFunctionSubclass():
        for tensor in gc.get_objects():
            if issubclass(type(tensor), torch.Tensor) and type(tensor) is not ShardedGrad and not tensor.is_meta:
                storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
    return storages


def since(before: dict[int, int]) -> int:
    return sum(nbytes for address, nbytes in live().items() if address not in before)


class Wide(nn.Module):
    """Sizes that divide by 128 x 12, so that no layout up to four ranks pads anything."""

    def __init__(self, layers: int = 4, width: int = 96) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def states(world: int, stage: int, case: str, options: dict, optimizer_name: str):
    """(live bytes at rest, after backward, held, predicted), all model states of this rank."""
    rank = torch.distributed.get_rank() if world > 1 else 0
    before = live()
    if case == "wide":
        model = Wide()
        forward = lambda: model(torch.ones(2, 96, dtype=options["precision"].param_dtype)).float().square().sum()  # noqa: E731
    else:
        model = models.build(case)
        forward = lambda: models.loss(case, model, models.batch(case, 0, rank))  # noqa: E731
    make = {
        "adamw": partial(torch.optim.AdamW, lr=1e-3),
        "amsgrad": partial(torch.optim.Adam, lr=1e-3, amsgrad=True),
        "sgd": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
        "groups": lambda params: torch.optim.AdamW(
            [{"params": [p], "lr": 1e-3 * (i + 1)} for i, p in enumerate(params)]
        ),
    }[optimizer_name]
    optimizer = make(model.parameters())
    zero = zeroshard.shard(model, optimizer, stage=stage, **options)
    for _ in range(2):
        forward().backward()
        after_backward = since(before)
        optimizer.step()
        optimizer.zero_grad()
    if stage != 3:
        list(map(torch.Tensor.sum, model.parameters()))  # wait for what the last step sent
    held = {state: nbytes for state, nbytes in zero.ledger().held.items() if nbytes}
    return since(before), after_backward, held, predict_states(zero)


def check(ranks, world, stage, case, options, optimizer="adamw"):
    results = ranks.run(world, states, world, stage, case, options, optimizer)
    for at_rest, after_backward, held, predicted in results:
        assert held == predicted
        assert at_rest == after_backward == sum(predicted.values())
    return results


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("case", "world"),
    [("gpt", 1), ("gpt", 2), ("gpt", 3), ("gpt", 4), ("degenerate", 3), ("lora", 2), ("tiny", 4)],
    ids=lambda value: value if isinstance(value, str) else f"ranks{value}",
)
def test_live_bytes_are_the_layouts_arithmetic(ranks, world, stage, case, dtype):
    """At rest and after backward: live storages == ledger == prediction, for odd sizes, frozen parts, empty shards."""
    options = {"precision": Precision(param_dtype=dtype)}
    if dtype is not None:
        options["precision"] = Precision(param_dtype=dtype, cast_inputs=case != "gpt")
    check(ranks, world, stage, case, options)


@pytest.mark.parametrize("optimizer", ["amsgrad", "sgd", "groups"])
@pytest.mark.parametrize("bounds", ["unit", "model", "tensor"])
def test_live_bytes_with_other_optimizers_and_bounds(ranks, optimizer, bounds):
    """Prediction asks the optimizer itself what it keeps per element and per parameter."""
    check(ranks, 3, 3, "gpt", {"layout": Layout(bounds=bounds)}, optimizer)


@pytest.mark.parametrize(
    ("precision", "per_parameter"),
    [
        ({}, [lambda n: 18, lambda n: 6 + 12 / n, lambda n: 2 + 16 / n, lambda n: 16 / n]),
        (
            {"grad_dtype": torch.bfloat16},
            [lambda n: 16, lambda n: 4 + 12 / n, lambda n: 2 + 14 / n, lambda n: 14 / n],
        ),
        (
            {"grad_dtype": torch.bfloat16, "store_params": True},  # as the paper counts
            [lambda n: 16, lambda n: 4 + 12 / n, lambda n: 2 + 14 / n, lambda n: 16 / n],
        ),
    ],
    ids=["default", "grad_dtype=bfloat16", "store_params"],
)
def test_bytes_per_parameter(ranks, world, stage, precision, per_parameter):
    """bf16 AdamW: the documented bytes per parameter; step counters are 4 bytes per slot and rank, beside."""
    parameters = 4 * 96 * 96
    options = {"precision": Precision(param_dtype=torch.bfloat16, **precision)}
    for _, _, held, _ in check(ranks, world, stage, "wide", options):
        counters = held.pop("step")
        assert counters == 4 * 4
        assert sum(held.values()) == per_parameter[stage](world) * parameters


def transient(prefetch: int):
    """The most gathered weights and unreduced contributions at once, and what is left of them."""
    model = Wide(layers=8)
    zero = zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), comm=Comm(prefetch=prefetch))
    for _ in range(3):
        out = model(torch.ones(2, 96, requires_grad=True))
        gathered_between = zero.ledger().held["gather"]
        out.sum().backward()
        del out
    peak = zero.ledger().peak
    return gathered_between, peak["gather"], peak["reduce"], zero.ledger().held["gather"], zero.ledger().held["reduce"]


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_nothing_full_sized_outlives_its_unit(ranks, prefetch):
    """Stage 3, 8 equal blocks: at most the unit in use, the prefetched ones and the one just left are gathered."""
    unit = 96 * 96 * 4
    for between, gathered, reduced, at_rest, reduced_at_rest in ranks.run(2, transient, prefetch):
        assert (between, at_rest, reduced_at_rest) == (0, 0, 0)
        # A construction holds one unit; a run: the one in use, prefetch more, and in backward the one before.
        assert gathered <= (2 + prefetch) * unit
        # Contributions and what arrives for them: at most two under way and one being put together.
        assert reduced <= 2 * 4 * unit


def seen_from_inside():
    """Bytes of full weights that are alive while each block runs, by walking storages (not by the ledger)."""
    model = Wide(layers=6)
    zero = zeroshard.shard(model, None, comm=Comm(prefetch=0))
    seen = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda *_: seen.append(sum(n == 96 * 96 * 4 for n in live().values())))
    with torch.no_grad():
        model(torch.ones(2, 96))
    assert zero.ledger().held["gather"] == 0
    return seen


def test_one_unit_is_alive_at_a_time(ranks):
    """Without prefetch exactly one block's full weight exists while a block runs."""
    assert ranks.run(2, seen_from_inside) == [[1] * 6] * 2


def everything_freed(stage: int):
    before = live()
    model = models.build("gpt", checkpoint="nonreentrant")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    zeroshard.shard(model, optimizer, stage=stage)
    for step in range(2):
        models.loss("gpt", model, models.batch("gpt", step, 0)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    during = since(before)
    del model, optimizer
    return during > 0, since(before)


def test_deleting_model_and_optimizer_frees_everything(ranks, stage):
    """With the gradients still there, nobody else's reference keeps a byte."""
    assert ranks.run(2, everything_freed, stage) == [(True, 0)] * 2


def growth(rounds: int, body) -> tuple[int, int, int]:
    def now():
        gc.collect()
        return (
            sum(live().values()),
            len(os.listdir("/proc/self/fd")),
            threading.active_count() + len(os.listdir("/proc/self/task")),
        )

    for _ in range(3):
        body()
    start = now()
    for _ in range(rounds):
        body()
    # What an earlier test left in this process may end meanwhile; and the last round's sockets once the peer has ended it.
    until = time.monotonic() + 10
    while any(more := tuple(max(b - a, 0) for a, b in zip(start, now(), strict=True))) and time.monotonic() < until:
        time.sleep(0.05)
    return more


def created_and_destroyed(stage: int):
    def body():
        model = models.build("mlp")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        zeroshard.shard(model, optimizer, stage=stage)
        models.loss("mlp", model, models.batch("mlp", 0, 0)).backward()
        optimizer.step()
        del model, optimizer
        gc.collect(0)

    return growth(200, body)


@pytest.mark.full
@pytest.mark.row(36)
@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_two_hundred_engines_leak_nothing(ranks, stage):
    """Created, used once and dropped: live bytes, descriptors and threads stay constant."""
    assert ranks.run(2, created_and_destroyed, stage) == [(0, 0, 0)] * 2


def many_steps(stage: int, steps: int):
    model = models.build("mlp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    zeroshard.shard(model, optimizer, stage=stage)
    count = iter(range(10_000))

    def body():
        models.loss("mlp", model, models.batch("mlp", next(count), rank_processes.rank())).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return growth(steps, body)


@pytest.mark.full
@pytest.mark.row(35)
@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_hundreds_of_steps_leak_nothing(ranks, stage):
    """Live bytes, descriptors and threads after 200 steps are those after three."""
    assert ranks.run(2, many_steps, stage, 200) == [(0, 0, 0)] * 2


WARM, LONG, EVERY = 500, 2500, 50  # steps: before memory is looked at, in all, between two looks


def resident() -> int:
    """Bytes of memory that this process holds, without the pages of libraries, which come as their code is first used.

    Arenas that malloc keeps for later are handed back first.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    status = Path("/proc/self/status").read_text()
    return 1024 * sum(int(re.search(rf"{kind}:\s+(\d+) kB", status)[1]) for kind in ("RssAnon", "RssShmem"))


def slope(values: list[int]) -> float:
    """Bytes per step, by least squares."""
    return statistics.linear_regression(range(0, EVERY * len(values), EVERY), values).slope


def long_run(stage: int, offload: Offload | None):
    """(slope of resident memory; tensors, their bytes, descriptors, threads and shared memory before and after)."""
    model = models.build("mlp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    zeroshard.shard(model, optimizer, stage=stage, offload=offload)

    def held():
        tensors = live()
        return (
            len(tensors),
            sum(tensors.values()),
            len(os.listdir("/proc/self/fd")),
            len(os.listdir("/proc/self/task")),
            sorted(os.listdir("/dev/shm")),
        )

    seen = []
    for index in range(LONG):
        if index == WARM:
            before = held()
        if index >= WARM and index % EVERY == 0:
            seen.append(resident())
        models.loss("mlp", model, models.batch("mlp", index, rank_processes.rank())).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return slope(seen), before, held()


@pytest.mark.row(35)
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("stage", "where"), [(0, None), (3, None), (0, "nvme"), (3, "nvme")])
def test_two_thousand_steps_grow_nothing(ranks, tmp_path, stage, where):
    """Resident memory by less than a kilobyte a step; tensors, descriptors, threads and shared memory not at all."""
    offload = where and Offload(parameters=where, gradients=where, optimizer=where, path=str(tmp_path))
    for grown, before, after in ranks.run(2, long_run, stage, offload, timeout=800):
        print(f"stage {stage}, {where or 'memory'}: {grown:+.0f} bytes a step")
        assert before == after
        assert grown < 1000


def weights_intact():
    model = models.build("mlp")
    with torch.no_grad():
        zero = zeroshard.shard(model, None)
        x = models.batch("mlp", 0, 0)[0]
        got = model(x)
        want = models.build("mlp")(x)
    assert {state for state, n in zero.ledger().held.items() if n} == {"parameters", "gradients"}
    reference.assert_same({"y": got}, {"y": want})
    return True


def test_without_an_optimizer(ranks):
    """`shard(model, None)` is for evaluation and frozen models."""
    assert ranks.run(2, weights_intact) == [True, True]


def predicted_with_a_scheduler():
    model = Wide()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)  # binds optimizer.step
    zero = zeroshard.shard(model, optimizer)
    model(torch.ones(2, 96)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with zero.gathered():
        before = reference.weights(model)
    predicted = predict_states(zero)
    with zero.gathered():
        assert reference.first_difference(before, reference.weights(model)) == ""
    return {state: n for state, n in zero.ledger().held.items() if n} == predicted


def test_a_prediction_asks_a_twin_and_never_steps_the_optimizer(ranks):
    """Also where a scheduler has put a bound `step` on the optimizer itself."""
    assert ranks.run(2, predicted_with_a_scheduler) == [True, True]
