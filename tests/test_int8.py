"""Gradients sent in 8 bits: other bits than without, the same ones everywhere, and plain PyTorch's that rounds alike."""

import functools
import math
from functools import partial

import pytest
import torch

import models
import ranks
import reference
import training
import zeroshard
from zeroshard import Comm, Layout, Machine, Offload, Precision
from zeroshard.cli.reference import in_codes
from zeroshard.errors import NotFiniteError, UserError
from zeroshard.planner.simulate import simulate
from zeroshard.reference import total_norm

INT8 = Comm(timeout=60, reduce="int8")


def as_they_are(name, grad):
    return grad


def all_trained(cases):
    return [training.trained(stage, comm=INT8, **settings)[1] for stage, settings in cases]


@functools.cache
def plain(dtype=None, *, world=1, every=4, sent=in_codes):
    model = models.build("gpt", **training.GPT)
    history, _ = reference.accumulate_with_masters(
        model, partial(torch.optim.AdamW, lr=1e-2), partial(models.batch, "gpt"), partial(models.loss, "gpt"),
        world, every // world, dtype=dtype, steps=3, clip=0.5, norm=total_norm, average=True, sent=sent,
    )  # fmt: skip
    return history.losses, reference.weights(model)


@pytest.mark.row(105)
@pytest.mark.full
def test_what_is_summed_under_no_sync_is_rounded_once_at_every_stage():
    """So the bits are other ones than those of micro-batches that are rounded one by one, which cuts do not change."""
    cases = [(3, {"layout": Layout(bucket_mib=1.0, align=256)}), *((stage, {"no_sync": True}) for stage in range(4))]
    cut, *sums = ranks.run(2, all_trained, cases, timeout=120)[0]
    reference.assert_same(cut, plain(world=2)[1])
    for got in sums:
        reference.assert_same(got, sums[0])
    assert reference.first_difference(sums[0], cut)
    assert reference.first_difference(plain(world=2, sent=as_they_are)[1], cut)


# --------------------------------------------------------------------------------------------------------- the numbers


@pytest.mark.row(105)
def test_what_arrives_is_what_was_sent_on_average():
    """Each element by at most a step of its block's scale, and the mean of 4,096 blocks of the same by far less."""
    one = torch.linspace(-1, 0.9, 128) ** 3
    values = one.repeat(4096, 1)
    arrived = in_codes("a", values)
    step = 1 / 127
    assert (arrived - values).abs().max() < step
    assert (arrived.mean(0) - values[0]).abs().max() < 5 * step / 2 / 4096**0.5
    assert (arrived - values).std() > 0.2 * step
    assert torch.equal(in_codes("a", torch.zeros(300)), torch.zeros(300))
    assert not torch.equal(in_codes("a", one), in_codes("b", one))


# ----------------------------------------------------------------------------------------------------------- the bytes


def moved(stage):
    """Bytes of reductions, those sent by this rank, and elements."""
    model, optimizer, zero = training.sharded(stage, comm=INT8)
    for step in range(3):
        models.loss("gpt", model, models.batch("gpt", step, zero.rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = zero.ledger().traffic["reduce"]
    return found.logical, found.sent, sum(bucket.numel for bucket in zero.partition.buckets)


def gpt():
    return training.job(**training.GPT)


@pytest.mark.row(105)
@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.full), 3])
def test_a_quarter_of_the_bytes_is_sent_and_counted(stage):
    """33 bytes of 32 elements, where fp32 has 128: 128 codes and a scale for each block."""
    for reduced, sent, numel in ranks.run(2, moved, stage, timeout=60):
        assert reduced == 3 * numel * 33 // 32 == 2 * sent


@pytest.mark.full
@pytest.mark.row(105)
def test_a_plan_of_a_job_says_what_is_sent_and_held():
    """As for shapes (test_planned_formats)."""
    (found,) = zeroshard.plan(
        gpt, Machine(ranks=2), stage=3, layout=Layout(bucket_mib=0.005), comm=Comm(reduce="int8")
    ).stages
    run = simulate(gpt, ranks=2, stage=3, layout=Layout(bucket_mib=0.005), comm=Comm(reduce="int8"))
    numel = sum(bucket.numel for bucket in run.zero.partition.buckets)
    assert (found.traffic.reductions, found.traffic.reduce.logical) == (1.0, numel * 33 // 32)
    assert found.peak == max(most.total for phase, most in run.ledger.phases.items() if phase != "between")


# --------------------------------------------------------------------------------------------------- what is no number


def spoiled(stage, value, nonfinite):
    """One element of one gradient on rank 1 is no number: what `step` said, and which elements of the gradient are."""
    model, optimizer, zero = training.sharded(stage, comm=INT8, precision=Precision(nonfinite=nonfinite))
    weight = model.blocks[1].mlp[0].weight
    loss = models.loss("gpt", model, models.batch("gpt", 0, zero.rank))

    def spoil(grad):
        grad = grad.clone()
        grad.view(-1)[777] = value
        return grad

    if zero.rank == 1:
        weight.register_hook(spoil)
    loss.backward()
    norms = [float(torch.linalg.vector_norm(param.grad)) for param in (weight, model.blocks[0].mlp[0].weight)]
    try:
        optimizer.step()
        said = ""
    except NotFiniteError as error:
        said = str(error)
    with zero.gathered():
        bad = {name: (~each.isfinite()).nonzero().tolist() for name, each in model.named_parameters()}
    return norms, said, {name: where for name, where in bad.items() if where}


@pytest.mark.row(105)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_value_that_is_no_number_is_seen_by_every_rank_where_it_is(value, stage):
    """An infinity arrives as NaN, in its own element and in no other of the block."""
    for norms, _, bad in ranks.run(2, spoiled, stage, value, "ignore", timeout=60):
        assert math.isnan(norms[0]) and math.isfinite(norms[1])
        assert bad == {"blocks.1.mlp.0.weight": [[777 // 24, 777 % 24]]}
    for _, said, bad in ranks.run(2, spoiled, stage, value, "raise", timeout=60):
        assert "element 777 of parameter 'blocks.1.mlp.0.weight' is nan" in said and "rank 1" in said
        assert not bad


def scaled(stage):
    """A GradScaler; on rank 1 alone one gradient of the second step is infinite. Its scales, and the weights."""
    model, optimizer, zero = training.sharded(stage, comm=INT8)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=100)
    weight, scales = model.blocks[0].qkv.weight, []
    for number in range(3):
        loss = models.loss("gpt", model, models.batch("gpt", number, zero.rank))
        spoils = number == zero.rank == 1
        hook = weight.register_hook(lambda grad: grad.clone().fill_(math.inf)) if spoils else None
        scaler.scale(loss).backward()
        if hook is not None:
            hook.remove()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    with zero.gathered():
        return scales, reference.weights(model)


@pytest.mark.row(105)
def test_a_grad_scaler_skips_alike_on_every_rank():
    runs = [run for stage in (0, 3) for run in ranks.run(2, scaled, stage, timeout=60)]
    for scales, weights in runs:
        assert scales == [2.0**10, 2.0**9, 2.0**9]
        reference.assert_same(weights, runs[0][1])
        assert all(each.isfinite().all() for each in weights.values())


# ------------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"layout": Layout(align=1)}, "no cut may fall inside"),
        ({"layout": Layout(align=64)}, "no cut may fall inside"),
        ({"precision": Precision(reduce_dtype=torch.float32)}, "both say what gradients are sent as"),
        ({"precision": Precision(param_dtype=torch.float64)}, "real parameters of 16 or 32 bits"),
    ],
)
def test_what_it_does_not_go_with_is_refused_by_name(options, says):
    with pytest.raises(UserError, match=says):
        training.sharded(2, comm=INT8, **options)


def test_beside_shared_memory_it_is_refused():
    with pytest.raises(UserError, match="with shared memory none are sent"):
        Comm(reduce="int8", transport="shared")
    with pytest.raises(UserError, match="with shared memory none are sent"):
        training.sharded(1, comm=INT8, offload=Offload(parameters="shared"))
