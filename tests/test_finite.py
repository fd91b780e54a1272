"""Not a number: the first one is named by rank, step, micro-batch, parameter and element, and all ranks decide alike."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from torch import nn

import ranks as rank_processes
import reference
import zeroshard
from zeroshard import Comm, Layout, Precision
from zeroshard.errors import NotFiniteError, UserError

ACCUMULATE = 2


def three(stage: int, nonfinite: str, *, dtype=torch.float32, optimizer=torch.optim.AdamW, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(13, 13), nn.Linear(13, 13), nn.Linear(13, 13)).to(dtype)
    made = optimizer(model.parameters(), lr=0.01)
    precision = Precision(nonfinite=nonfinite)
    return model, made, zeroshard.shard(model, made, stage=stage, precision=precision, **options)


def x(index: int, dtype=torch.float32):
    return torch.randn(3, 13, generator=torch.Generator().manual_seed(index)).to(dtype)


class Spoil:
    """Puts `value` into one element of one parameter's gradient, on one rank, in one backward."""

    def __init__(self, param, element: int, value: float) -> None:
        self.armed, self.element, self.value = False, element, value
        param.register_hook(self)

    def __call__(self, grad):
        if self.armed:
            grad = grad.clone()
            grad.view(-1)[self.element] = self.value
        return grad


def spoiled(stage, nonfinite, at, value, dtype, options):
    """at: (rank, step, micro-batch, parameter, element). What the run had to say, and its weights."""
    rank, wanted_step, micro_batch, name, element = at
    model, optimizer, zero = three(stage, nonfinite, dtype=dtype, **options)
    spoil = Spoil(dict(model.named_parameters())[name], element, value)
    said = []
    for step in range(1, 5):
        optimizer.zero_grad()
        for a in range(1, ACCUMULATE + 1):
            spoil.armed = (rank_processes.rank(), step, a) == (rank, wanted_step, micro_batch)
            model(x(10 * step + a, dtype)).float().square().sum().backward()
        with zero.gathered():
            before = reference.weights(model)
        try:
            optimizer.step()
        except NotFiniteError as error:
            said.append(str(error))
            with zero.gathered():
                assert reference.first_difference(reference.weights(model), before) == ""
    with zero.gathered():
        return said, zero.skipped, zero.nonfinite, reference.weights(model)


def without(dtype, step_left_out: int):
    """Plain PyTorch on two ranks' equal batches, one step left out."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(13, 13), nn.Linear(13, 13), nn.Linear(13, 13)).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(1, 5):
        optimizer.zero_grad()
        for a in range(1, ACCUMULATE + 1):
            for _ in range(2):
                model(x(10 * step + a, dtype)).float().square().sum().backward()
        for param in model.parameters():
            param.grad.div_(2)
        if step != step_left_out:
            optimizer.step()
    return reference.weights(model)


PLACES = [  # rank, step, micro-batch, parameter, element: the last of a tensor, which lies before padding, among them
    ((1, 2, 2, "1.weight", 168), math.nan),
    ((0, 3, 1, "2.bias", 12), math.inf),
    ((1, 1, 1, "0.weight", 0), -math.inf),
]


@pytest.mark.row(12)
@pytest.mark.parametrize("stage", [0, 1, pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize(("at", "value"), PLACES, ids=["nan", "inf", "minus-inf"])
def test_the_first_nan_is_named_and_raised_on_every_rank(ranks, stage, at, value):
    """Rank, step, micro-batch, parameter and element, without a second run; nothing was updated on any rank."""
    rank, step, micro_batch, name, element = at
    where = (
        f"element {element} of parameter {name!r} is {value} in the gradient of micro-batch {micro_batch}"
        f" of step {step}, on rank {rank}"
    )
    for said, skipped, last, _ in ranks.run(2, spoiled, stage, "raise", at, value, torch.float32, {}):
        assert len(said) == 1 and where in said[0] and skipped == 0
        assert (last.rank, last.step, last.micro_batch, last.parameter, last.element) == at


@pytest.mark.row(12)
@pytest.mark.parametrize(("stage", "bounds"), [(0, "unit"), (2, "tensor"), (3, "model")])
def test_a_skipped_step_is_as_if_it_had_never_been(ranks, stage, bounds):
    """All ranks skip it, count it and go on with the bits of plain PyTorch without that step."""
    at, value = PLACES[0]
    outcomes = ranks.run(2, spoiled, stage, "skip", at, value, torch.float32, {"layout": Layout(bounds=bounds)})
    for said, skipped, last, weights in outcomes:
        assert (said, skipped, last.parameter, last.rank) == ([], 1, "1.weight", 1)
        assert reference.first_difference(weights, without(torch.float32, 2)) == ""


@pytest.mark.row(12)
@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("options", [{}, {"comm": Comm(reduce="native")}, {"comm": Comm(overlap=False)}], ids=str)
def test_at_other_precisions_and_reductions(ranks, stage, dtype, options):
    """Every decision is the same; only the rank is unknown where the backend adds up."""
    at, value = PLACES[0]
    for said, skipped, last, _ in ranks.run(2, spoiled, stage, "skip", at, value, dtype, options):
        assert (said, skipped, last.parameter, last.element) == ([], 1, "1.weight", 168)
        assert last.rank == (-1 if "comm" in options and options["comm"].reduce == "native" else 1)


def forgiven(stage: int):
    """Gradients cleared, or mended in place, before the step: no error, and the next one found is the next one's."""
    model, optimizer, _ = three(stage, "raise")
    spoil = Spoil(model[1].weight, 5, math.nan)
    other = Spoil(model[2].weight, 7, math.nan)
    for how in ("cleared", "mended"):
        spoil.armed = True
        model(x(0)).square().sum().backward()
        spoil.armed = False
        if how == "cleared":
            optimizer.zero_grad()
            model(x(0)).square().sum().backward()
        else:
            for param in model.parameters():
                param.grad.nan_to_num_()
        optimizer.step()
        optimizer.zero_grad()
    spoil.armed = True
    model(x(0)).square().sum().backward()
    spoil.armed, other.armed = False, True
    optimizer.zero_grad()
    model(x(0)).square().sum().backward()
    with pytest.raises(NotFiniteError, match=r"element 7 of parameter '2\.weight'.*rank 0"):
        optimizer.step()
    return True


@pytest.mark.row(12)
@pytest.mark.parametrize("stage", [1, 3])
def test_gradients_that_were_cleared_or_mended_are_forgiven(ranks, stage):
    assert ranks.run(2, forgiven, stage) == [True, True]


def updated(stage: int):
    """An update that spoils a parameter: told at the next step, as what it was."""
    model, optimizer, zero = three(stage, "skip", optimizer=torch.optim.SGD)
    for index in range(2):
        optimizer.zero_grad()
        model(x(index)).square().sum().backward()
        if index == 0:
            optimizer.param_groups[0]["lr"] = 3e38
            for param in model.parameters():
                param.grad.mul_(1e3)
        try:
            optimizer.step()
        except NotFiniteError as error:
            return index, str(error), zero.nonfinite.micro_batch, zero.skipped
    return None


@pytest.mark.row(12)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_parameter_that_an_update_spoiled(ranks, stage):
    """No gradient was at fault, so no step is skipped: the error names the update, on every rank alike."""
    first, second = ranks.run(2, updated, stage)
    assert first == second and first is not None
    index, error, micro_batch, skipped = first
    assert (index, micro_batch, skipped) == (1, 0, 0) and "since before step 2, by an update" in error


def overflowing(stage: int):
    """Every loss overflows: 25 steps with a GradScaler, then 12 with our own switch."""
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("zeroshard").addHandler(handler)
    try:
        model, optimizer, zero = three(stage, "skip", optimizer=torch.optim.SGD)
        with zero.gathered():
            before = reference.weights(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
        scales = []
        for index in range(25):
            optimizer.zero_grad()
            scaler.scale(model(x(index)).square().sum() * 1e37).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        by_scaler = zero.skipped
        for index in range(12):
            optimizer.zero_grad()
            (model(x(index)).square().sum() * 1e38 * 1e10).backward()
            optimizer.step()
        with zero.gathered():
            unmoved = reference.first_difference(reference.weights(model), before)
        return by_scaler, zero.skipped, unmoved, all(math.isfinite(s) and s > 0 for s in scales), records
    finally:
        logging.getLogger("zeroshard").removeHandler(handler)


@pytest.mark.processes
@pytest.mark.row(13)
@pytest.mark.parametrize("stage", [1, 3])
def test_overflow_at_every_step_is_reported_each_time(ranks, stage):
    """Each skipped step is counted on every rank and logged on rank 0, every ten in a row once more; no weight moves."""
    zero_, one = ranks.run(2, overflowing, stage)
    for by_scaler, skipped, unmoved, scale_is_a_number, _ in (zero_, one):
        assert by_scaler == 25 and skipped == 37 and unmoved == "" and scale_is_a_number
    assert one[-1] == []
    assert [line for line in zero_[-1] if "in a row" in line] == [
        f"{n} steps in a row were skipped: this model is not training" for n in (10, 20, 30)
    ]
    assert len([line for line in zero_[-1] if "was skipped: " in line]) == 37


@pytest.mark.row(64)
def test_an_answer_that_is_not_known_is_refused_with_the_nearest():
    with pytest.raises(UserError, match="did you mean 'raise'"):
        Precision(nonfinite="rise")
