"""`zero.stream(...)`: weights for another program in this process, whole, by name, one bucket alive at a time."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import test_export
import zeroshard
from zeroshard import Comm, Layout, Precision
from zeroshard.errors import StateError, UserError


def streams(job, path):
    """What comes on this rank, and what was said of it before; and an export of the same moment."""
    zero, optimizer, loss = test_export.sharded_as(job, path)
    for number in range(2):
        loss(number).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = zero.stream(dtype=job["dtype"])
    told = {name: (kind.shape, kind.dtype) for name, kind in weights.tensors.items()}
    came = [(name, tensor.clone()) for name, tensor in weights]
    zero.export(path / "live", dtype=job["dtype"])
    return told, came, len(weights), zero.ledger().held.get("gather", 0)


FIRST = (2, 7)  # of `make test`: one copy for all ranks; another mesh


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[pytest.mark.full] * (seed not in FIRST)) for seed in range(40)]
)
def test_what_comes_is_what_an_export_writes(ranks, tmp_path, seed):
    """To the bit, on every rank, in the order that was told: of drawn stages, tiers, meshes, formats and experts."""
    job, path = test_export.drawn(seed), tmp_path / str(seed)
    path.mkdir()
    outcomes = ranks.run(job["world"], streams, job, path)
    written = test_export.weights_in(path / "live")
    for told, came, count, _ in outcomes:
        assert [*told] == [name for name, _ in came] and {*told} == {*written} and count == len(told)
        for name, tensor in came:
            assert (
                told[name] == (tuple(written[name].shape), written[name].dtype) == (tuple(tensor.shape), tensor.dtype)
            )
            assert torch.equal(tensor, written[name]), (name, job)
    assert job["stage"] == 3 or {held for *_, held in outcomes} == {0}


def sharded(stage=3, **settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 16), nn.Linear(16, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer, zeroshard.shard(model, optimizer, stage=stage, **settings)


def trained(model, optimizer, zero, number):
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * number + zero.rank))
    model(x).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def leaves_early(stage):
    model, optimizer, zero = sharded(stage)
    trained(model, optimizer, zero, 0)
    weights, took = zero.stream(), 0
    for _ in weights:
        took += 1
        if zero.rank == 1:
            break
    trained(model, optimizer, zero, 1)
    assert torch.is_grad_enabled()
    again = {}
    for name, tensor in weights:
        assert torch.is_grad_enabled()  # the loop's body is the program's
        again[name] = tensor.clone()
    with zero.gathered():
        return took, again, {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("stage", [0, 3])
def test_a_rank_that_leaves_early_keeps_no_other_waiting(ranks, stage):
    """It gathers the rest for them. Iterated over again the stream gives the weights of then, and rank 0's buffers."""
    (took, again, shown), (other, its, own) = ranks.run(2, leaves_early, stage)
    everything = 2 * 4 + 3  # weights and biases, and the buffers of a batch norm
    assert (took, other) == (everything, 1)
    assert not torch.equal(shown["1.running_mean"], own["1.running_mean"])
    for came in (again, its):
        assert came.keys() == shown.keys() and all(torch.equal(came[name], tensor) for name, tensor in shown.items())


def held():
    model, optimizer, zero = sharded(3, layout=Layout(bucket_mib=0.001))
    trained(model, optimizer, zero, 0)
    most = {}
    for _ in zero.stream(dtype=torch.float64):
        now = zero.ledger().held["gather"]
        most[now] = most.get(now, 0) + 1
    largest = max(bucket.numel for bucket in zero.partition.buckets) * 8
    return max(most), largest, zero.ledger().phases["export"].held["gather"], zero.ledger().held.get("gather", 0)


def test_one_bucket_is_alive_at_a_time(ranks):
    """By the ledger, to the byte; and nothing once it has ended."""
    for most, largest, phase, after in ranks.run(2, held):
        assert most == largest == phase and after == 0


def too_large():
    model, optimizer, zero = sharded(3)
    with zero.gathered(), torch.no_grad():
        model[3].weight.view(-1)[-1] = 1e6
    try:
        for _ in zero.stream(dtype=torch.float16):
            pass
    except UserError as error:
        trained(model, optimizer, zero, 0)
        return str(error)


def test_a_value_that_the_dtype_cannot_hold_is_an_error_on_every_rank(ranks):
    for said in ranks.run(2, too_large):
        assert "the weights were not streamed" in said and "a value is too large for the dtype" in said


def steps_inside():
    model, optimizer, zero = sharded(3)
    trained(model, optimizer, zero, 0)
    try:
        for _ in zero.stream():
            trained(model, optimizer, zero, 1)
    except StateError as error:
        trained(model, optimizer, zero, 2)
        return str(error)


def test_a_step_inside_the_loop_is_refused_on_every_rank(ranks):
    """Later buckets would have other weights."""
    for said in ranks.run(2, steps_inside):
        assert "the model was trained while its weights were streamed" in said and "got: " in said


def too_large_for_others():
    _, _, zero = sharded(3, layout=Layout(bucket_mib=0.001))
    with zero.gathered(), torch.no_grad():
        for parameter in zero.model[3].parameters():
            parameter.view(-1)[:] = 1e6
    said, handler = [], logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("zeroshard").addHandler(handler)
    try:
        for _ in zero.stream(dtype=torch.float16):
            if zero.rank == 1:
                break
    except UserError as error:
        return str(error)
    return said[0]


def test_a_rank_that_has_left_logs_what_ended_the_others_loop(ranks):
    first, second = ranks.run(2, too_large_for_others)
    assert first.startswith("the weights were not streamed")
    assert second.startswith("this rank had left its loop over zero.stream(...) when it ended: the weights were not")


def asked(**settings):
    _, _, zero = sharded(2)
    try:
        zero.stream(**settings)
    except UserError as error:
        return str(error)


def test_what_it_is_asked_for_is_checked():
    assert "weights are exported as floating-point numbers" in asked(dtype=torch.int32)
    assert "weights are exported as floating-point numbers" in asked(dtype="bf16")


def inside():
    _, _, zero = sharded(3)
    weights = zero.stream()
    with pytest.raises(StateError, match="streaming inside forward, backward or gathered"), zero.gathered():
        next(iter(weights))
    return True


def test_it_is_refused_inside_gathered(ranks):
    assert ranks.run(2, inside) == [True, True]


def frozen_in_16_bits():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[0].requires_grad_(requires_grad=False)
    zero = zeroshard.shard(
        model, torch.optim.SGD(model[1].parameters(), lr=0.1), stage=3,
        precision=Precision(param_dtype=torch.bfloat16), comm=Comm(),
    )  # fmt: skip
    own = {name: tensor.dtype for name, tensor in zero.stream()}
    wide = {name: tensor.clone() for name, tensor in zero.stream(dtype=torch.float32)}
    with zero.gathered():
        shown = {name: tensor.detach().float().clone() for name, tensor in model.named_parameters()}
    return {*own.values()}, all(torch.equal(wide[name].bfloat16().float(), tensor) for name, tensor in shown.items())


def test_without_a_dtype_each_tensor_has_its_own_and_else_masters_are_cast(ranks):
    assert ranks.run(2, frozen_in_16_bits) == [({torch.bfloat16}, True)] * 2


EXAMPLE = Path(__file__).parents[2] / "examples" / "generate.py"


def test_the_example_trains_on_what_its_own_generation_scores():
    """A generator in the same process takes the weights after each step, and what it makes gets better."""
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", str(EXAMPLE)]
    told = subprocess.run(run, capture_output=True, text=True, timeout=120, check=False)
    assert told.returncode == 0, told.stderr
    scores = [float(line.split()[-1]) for line in told.stdout.splitlines() if line.startswith("step")]
    assert len(scores) == 20 and scores[-1] > scores[0] + 0.3
