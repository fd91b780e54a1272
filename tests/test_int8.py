"""Gradients sent in 8 bits: other bits than without, the same ones everywhere, and plain PyTorch's that rounds alike."""

import functools
import math
from functools import partial

import pytest
import torch

import models
import ranks
import reference
import zeroshard
from zeroshard import Comm, Layout, Offload, Precision
from zeroshard.cli.reference import in_codes, total_norm
from zeroshard.errors import NotFiniteError, UserError
from zeroshard.planner.simulate import simulate

GPT = {"hidden": 24, "layers": 2}


def start(stage, *, precision=None, layout=None, offload=None, **comm):
    model = models.build("gpt", **GPT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    zero = zeroshard.shard(
        model, optimizer, stage=stage, precision=precision or Precision(), layout=layout or Layout(bucket_mib=0.005),
        comm=Comm(**{"timeout": 60, "reduce": "int8"} | comm), offload=offload or Offload(),
    )  # fmt: skip
    return model, optimizer, zero


def steps(model, optimizer, zero, numbers, *, every, no_sync=False):
    losses = []
    for number in numbers:
        backwards = every // zero.world_size
        for turn in range(backwards):
            loss = models.loss("gpt", model, models.batch("gpt", number, turn * zero.world_size + zero.rank))
            if no_sync and turn < backwards - 1:
                with zero.no_sync():
                    (loss / backwards).backward()
            else:
                (loss / backwards).backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def trained(stage, every=4, *, no_sync=False, **settings):
    model, optimizer, zero = start(stage, **settings)
    losses = steps(model, optimizer, zero, range(3), every=every, no_sync=no_sync)
    with zero.gathered():
        return losses, reference.weights(model)


def as_they_are(name, grad):
    return grad


def all_trained(every, cases):
    return [trained(stage, every, **settings) for stage, settings in cases]


@functools.cache
def plain(dtype=None, *, world=1, every=4, sent=in_codes):
    model = models.build("gpt", **GPT)
    history, _ = reference.accumulate_with_masters(
        model, partial(torch.optim.AdamW, lr=1e-2), partial(models.batch, "gpt"), partial(models.loss, "gpt"),
        world, every // world, dtype=dtype, steps=3, clip=0.5, norm=total_norm, average=True, sent=sent,
    )  # fmt: skip
    return history.losses, reference.weights(model)


@pytest.mark.row(105)
@pytest.mark.parametrize(
    ("stage", "settings"),
    [
        *(pytest.param(stage, {}, marks=[pytest.mark.full] * (stage != 2), id=f"{stage}") for stage in range(4)),
        pytest.param(3, {"layout": Layout(bucket_mib=1.0), "overlap": False}, id="3-large-buckets-no-overlap"),
        pytest.param(1, {"layout": Layout(bounds="model")}, marks=pytest.mark.full, id="1-bounds-of-the-model"),
    ],
)
@pytest.mark.parametrize("world", [*(pytest.param(each, marks=pytest.mark.full) for each in (1, 3, 4)), 2])
def test_every_stage_has_the_bits_of_plain_pytorch_that_rounds_alike(world, stage, settings):
    every = 3 if world == 3 else 4
    losses, weights = plain(world=world, every=every)
    found = ranks.run(world, trained, stage, every, timeout=120, **settings)
    for rank, (mine, theirs) in enumerate(found):
        assert mine == [loss for step in losses for loss in step[rank::world]]
        reference.assert_same(theirs, weights)
    assert reference.first_difference(plain(world=world, every=every, sent=as_they_are)[1], weights)


@pytest.mark.row(105)
@pytest.mark.full
def test_other_settings_change_no_bit():
    """bf16, tiers, buckets, a sum under no_sync, replicas; each beside stage 0, or beside plain PyTorch."""
    bf16 = Precision(param_dtype=torch.bfloat16)
    cpu = Offload(parameters="cpu", gradients="cpu", optimizer="cpu")
    cases = [(stage, {"precision": bf16}) for stage in (0, 2)]
    cases += [(3, {"precision": bf16, "layout": Layout(bucket_mib=1.0, align=256), "overlap": False})]
    cases += [(3, {"offload": cpu}), (2, {"layout": Layout(bounds="tensor")}), (1, {"replicas": 2})]
    cases += [(stage, {"no_sync": True}) for stage in range(4)]
    first, *_ = ranks.run(2, all_trained, 4, cases, timeout=120)
    low, whole = plain(torch.bfloat16, world=2)[1], plain(world=2)[1]
    for theirs in first[:3]:
        reference.assert_same(theirs[1], low)
    for theirs in first[3:6]:
        reference.assert_same(theirs[1], whole)
    for theirs in first[6:]:
        reference.assert_same(theirs[1], first[6][1])
    assert reference.first_difference(first[6][1], whole)


@pytest.mark.full
@pytest.mark.row(105)
def test_fewer_ranks_with_more_micro_batches_have_the_same_bits():
    """One rank rounds as well: a micro-batch's gradient is rounded alike wherever it is computed."""
    found = [ranks.run(world, trained, 3, 4, timeout=60)[0][1] for world in (1, 2, 4)]
    for weights in found:
        reference.assert_same(weights, found[0])


def stepped(in_backward):
    model = models.build("gpt", **GPT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    zero = zeroshard.shard(
        model, optimizer, stage=2, layout=Layout(bucket_mib=0.005), comm=Comm(timeout=60, reduce="int8"),
        optimizer_in_backward=in_backward,
    )  # fmt: skip
    for step in range(3):
        models.loss("gpt", model, models.batch("gpt", step, zero.rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    with zero.gathered():
        return reference.weights(model)


@pytest.mark.row(105)
def test_buckets_stepped_in_backward_have_the_same_bits():
    reference.assert_same(ranks.run(2, stepped, True, timeout=60)[1], ranks.run(2, stepped, False, timeout=60)[0])


def saved(folder):
    model, optimizer, zero = start(3)
    steps(model, optimizer, zero, range(2), every=4)
    zero.save(folder)
    steps(model, optimizer, zero, range(2, 4), every=4)
    with zero.gathered():
        return reference.weights(model)


def resumed(folder):
    model, optimizer, zero = start(1)
    zero.load(folder)
    steps(model, optimizer, zero, range(2, 4), every=4)
    with zero.gathered():
        return reference.weights(model)


@pytest.mark.row(105)
def test_a_checkpoint_goes_on_with_the_same_bits(tmp_path):
    """No generator's state is in it, and none is missing: on other ranks, at another stage."""
    want = ranks.run(2, saved, str(tmp_path / "saved"), timeout=60)[0]
    reference.assert_same(ranks.run(1, resumed, str(tmp_path / "saved"), timeout=60)[0], want)


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
    model, optimizer, zero = start(stage)
    for step in range(3):
        models.loss("gpt", model, models.batch("gpt", step, zero.rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    ledger = zero.ledger()
    traffic = {verb: each.logical for verb, each in ledger.traffic.items() if verb != "control"}
    return (
        ledger.held,
        traffic,
        ledger.peak,
        ledger.traffic["reduce"].sent,
        sum(b.numel for b in zero.partition.buckets),
    )


def job():
    model = models.build("gpt", **GPT)
    return {
        "model": model,
        "optimizer": lambda params: torch.optim.AdamW(params, lr=1e-2),
        "batch": partial(models.batch, "gpt"),
        "loss": partial(models.loss, "gpt"),
    }


@pytest.mark.row(105)
@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.full), 3])
def test_a_quarter_of_the_bytes_is_sent_counted_and_simulated(stage):
    """33 bytes of 32 elements, where fp32 has 128: 128 codes and a scale for each block."""
    for rank, (held, traffic, peak, sent, numel) in enumerate(ranks.run(2, moved, stage, timeout=60)):
        assert traffic["reduce"] == 3 * numel * 33 // 32
        assert sent == traffic["reduce"] // 2
        run = simulate(job, ranks=2, rank=rank, stage=stage, layout=Layout(bucket_mib=0.005), comm=Comm(reduce="int8"))
        told = run.ledger
        assert {s: n for s, n in told.held.items() if n} == {s: n for s, n in held.items() if n}
        assert {v: m.logical for v, m in told.traffic.items() if v != "control"} == traffic
        assert told.peak == peak


@pytest.mark.full
@pytest.mark.row(105)
def test_a_plan_of_a_job_says_what_is_sent_and_held():
    """For a number of parameters and for shapes it is refused so far."""
    (found,) = zeroshard.plan(job, ranks=2, stage=3, bucket_mib=0.005, reduce="int8").stages
    run = simulate(job, ranks=2, stage=3, layout=Layout(bucket_mib=0.005), comm=Comm(reduce="int8"))
    numel = sum(bucket.numel for bucket in run.zero.partition.buckets)
    assert (found.traffic.reductions, found.traffic.reduce.logical) == (1.0, numel * 33 // 32)
    assert found.peak == max(most.total for phase, most in run.ledger.phases.items() if phase != "between")
    with pytest.raises(UserError, match="reduce: for jobs only"):
        zeroshard.plan(params="7B", ranks=8, reduce="int8")


# --------------------------------------------------------------------------------------------------- what is no number


def spoiled(stage, value, nonfinite):
    """One element of one gradient on rank 1 is no number: what `step` said, and which elements of the gradient are."""
    model, optimizer, zero = start(stage, precision=Precision(nonfinite=nonfinite))
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
    model, optimizer, zero = start(stage)
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
        start(2, **options)


def test_beside_shared_memory_it_is_refused():
    with pytest.raises(UserError, match="with shared memory none are sent"):
        Comm(reduce="int8", transport="shared")
    with pytest.raises(UserError, match="with shared memory none are sent"):
        start(1, offload=Offload(parameters="shared"))
