"""The same bits at every stage, bucketing, kernel and recomputation, and the bits of plain PyTorch.

Weights, masters, optimizer state and norms are compared with `==` after 20 steps with clipping. What they must equal is
computed once, in this process and without zeroshard, by `reference`; each rank says what differs.
"""

from __future__ import annotations

import functools
import itertools
from functools import partial

import pytest
import torch

import models
import norms
import ranks
import reference
import zeroshard
from zeroshard import Comm, Layout, Precision

STEPS = 20
STAGES = (0, 1, 2, 3)
BATCHES, LOSS = partial(models.batch, "gpt"), partial(models.loss, "gpt")
GPT = {"hidden": 12, "layers": 2}
BUCKETS = {
    "one": Layout(units=()),  # the whole model is one unit and one bucket
    "units": Layout(),
    "many": Layout(bucket_mib=0.003),  # two or three per block
}
CHECKPOINTS = (None, "reentrant", "nonreentrant")
KERNELS = {
    "loop": {"foreach": False, "fused": False},
    "foreach": {"foreach": True, "fused": False},
    "fused": {"foreach": False, "fused": True},
}
PRECISIONS = {"fp32": Precision(), "bf16": Precision(param_dtype=torch.bfloat16)}
ALL = tuple(itertools.product(STAGES, BUCKETS, CHECKPOINTS, KERNELS))
# Twelve of the 108: every stage with every kind of checkpointing, every two kernels, buckets and checkpoints together.
SOME = tuple(
    (stage, list(BUCKETS)[(stage + 2 * at) % 3], checkpoint, list(KERNELS)[(stage + at) % 3])
    for stage, (at, checkpoint) in itertools.product(STAGES, enumerate(CHECKPOINTS))
)


def limit(micro_batches):
    """Near the middle of the norms that occur, which shrink as more is averaged: some steps clip and some do not."""
    return 0.87 / micro_batches**0.5


def adamw(parameters, kernel):
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, **KERNELS[kernel])


@functools.cache
def plain(world, precision, kernel="loop", backwards=1, steps=STEPS, block=norms.BLOCK):
    """Weights, masters, state and norms of plain PyTorch; `precision` is a key of PRECISIONS."""
    model = models.build("gpt", **GPT)
    made = []

    def make(parameters):
        made.append(adamw(parameters, kernel))
        return made[0]

    norm = partial(norms.total, block=block)
    options = {"steps": steps, "clip": limit(world * backwards), "average": True, "norm": norm}
    common = (BATCHES, LOSS, world, backwards)
    if precision == "fp32":
        history = reference.accumulate(model, make(model.parameters()), *common, **options)
        masters = dict(model.named_parameters())
    else:
        history, masters = reference.accumulate_with_masters(model, make, *common, **options)
    trained = dict(zip(dict(model.named_parameters()), made[0].param_groups[0]["params"], strict=True))
    if steps == STEPS:
        assert {bool(norm > limit(world * backwards)) for norm in history.norms} == {True, False}
    return {
        "weights": reference.weights(model),
        "masters": {name: tensor.detach().clone() for name, tensor in masters.items()},
        "exp_avg": {name: made[0].state[p]["exp_avg"] for name, p in trained.items()},
        "exp_avg_sq": {name: made[0].state[p]["exp_avg_sq"] for name, p in trained.items()},
        "norms": torch.stack(history.norms),
    }


def train(stage, buckets, checkpoint, kernel, *, precision, backwards=1, steps=STEPS, layout=None, **options):
    """The user's loop on this rank; what `plain` returns, of which masters and state are this rank's fragments."""
    model = models.build("gpt", checkpoint=checkpoint, **GPT)
    optimizer = adamw(model.parameters(), kernel)
    layout = layout or BUCKETS[buckets]
    zero = zeroshard.shard(model, optimizer, stage=stage, precision=PRECISIONS[precision], layout=layout, **options)
    history = reference.loop(
        model, optimizer, BATCHES, LOSS,
        ranks.rank(), ranks.world(), backwards, steps=steps, clip=limit(ranks.world() * backwards), average=True,
    )  # fmt: skip
    with zero.gathered():
        found = {"weights": reference.weights(model), "norms": torch.stack(history.norms)}
    return found | fragments(zero, model, optimizer)


def fragments(zero, model, optimizer):
    """This rank's masters and optimizer state: name -> (first element, values)."""
    held = iter(optimizer.param_groups[0]["params"])
    found = {"masters": {}, "exp_avg": {}, "exp_avg_sq": {}}
    for name, _ in model.named_parameters():
        for own in (owner for owner in zero.owners(name) if owner.rank == zero.rank):
            fragment = next(held)
            assert fragment.numel() == own.stop - own.start
            found["masters"][name] = own.start, fragment.detach().reshape(-1).clone()
            for key in ("exp_avg", "exp_avg_sq"):
                found[key][name] = own.start, optimizer.state[fragment][key].reshape(-1).clone()
    return found


def difference(found, want):
    """Empty, or one line on the first thing that differs."""
    if text := reference.first_difference({"norms": found["norms"]}, {"norms": want["norms"]}):
        return text
    for key in ("masters", "exp_avg", "exp_avg_sq"):
        cut = {n: want[key][n].reshape(-1)[first : first + v.numel()] for n, (first, v) in found[key].items()}
        if text := reference.first_difference({n: v for n, (_, v) in found[key].items()}, cut):
            return f"{key} {text}"
    return reference.first_difference(found["weights"], want["weights"])


def compare(configurations, want, **options):
    """{configuration: what differs from want[its kernel]} on this rank, for those that differ."""
    found = {each: difference(train(*each, **options), want[each[3]]) for each in configurations}
    return {each: text for each, text in found.items() if text}


def check(world, configurations, precision, *, backwards=1, steps=STEPS, timeout=170.0, **options):
    """Every configuration on `world` ranks equals plain PyTorch running the same micro-batches in one process."""
    kernels = {each[3] for each in configurations}
    want = {kernel: plain(world, precision, kernel, backwards, steps) for kernel in kernels}
    run = partial(compare, precision=precision, backwards=backwards, steps=steps, **options)
    assert ranks.run(world, partial(run, configurations, want), timeout=timeout) == [{}] * world


# ------------------------------------------------------------------------------------------------------- the whole grid


@pytest.mark.row(34)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_same_bits_as_plain_torch(world, precision, stage):
    """20 clipped steps on different data per rank: stages x buckets x checkpointing x AdamW kernels equal plain torch.

    Twelve combinations, six of them in each precision; every combination is `test_every_combination_has_the_same_bits`.
    """
    half = SOME[list(PRECISIONS).index(precision) :: 2]
    check(world, [each for each in half if each[0] == stage], precision)


@pytest.mark.row(34)
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_combination_has_the_same_bits(world, precision, kernel):
    """All of stages x {one, unit, many buckets} x checkpointing, per rank count, precision and AdamW kernel."""
    check(world, [each for each in ALL if each[3] == kernel], precision, timeout=350.0)


@pytest.mark.heavy
@pytest.mark.full
@pytest.mark.row(30)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_several_micro_batches_are_added_in_order(world, precision):
    """The micro-batches `a * W + rank` one after the other, divided once: plain torch's sum, at every W and stage."""
    check(world, [(stage, "units", None, "loop") for stage in STAGES], precision, backwards=3, steps=3)


@pytest.mark.heavy
@pytest.mark.row(34)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_fewer_ranks_with_more_micro_batches_have_the_same_bits(precision, stage):
    """4 ranks x 1, 2 x 2, 1 x 4 micro-batches end with the same weights, masters, state and norms, at every stage."""
    want = {"loop": plain(1, precision, "loop", 4, 4)}
    for each in ("weights", "norms"):
        for world in (2, 4):
            other = plain(world, precision, "loop", 4 // world, 4)
            assert not reference.first_difference(_as_dict(other[each]), _as_dict(want["loop"][each]))
    configuration = (stage, "one" if stage == 1 else "many", None, "loop")
    for world in (1, 2, 4):
        run = partial(compare, [configuration], want, precision=precision, backwards=4 // world, steps=4)
        assert ranks.run(world, run) == [{}] * world


def _as_dict(value):
    return value if isinstance(value, dict) else {"": value}


# ---------------------------------------------------------------------------------------- whatever else may vary


@pytest.mark.heavy
@pytest.mark.full
@pytest.mark.parametrize("bounds", ["unit", "model"])
def test_cuts_at_any_element_change_no_bit(bounds):
    """`align=1`, as in the papers: cuts fall anywhere, inside vector registers too; norms then add single elements."""
    want = {kernel: plain(3, "fp32", kernel, 1, 5, block=1) for kernel in ("loop", "foreach")}
    configurations = [(stage, None, None, kernel) for stage in STAGES for kernel in want]
    run = partial(compare, configurations, want, precision="fp32", steps=5, layout=Layout(bounds=bounds, align=1))
    assert ranks.run(3, run) == [{}] * 3


@pytest.mark.heavy
@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [{"precision": Precision(param_dtype=torch.bfloat16, grad_dtype=torch.bfloat16)}, {"comm": Comm(reduce="native")}],
    ids=["bf16-gradients", "native-reduction"],
)
def test_what_gives_up_the_order_of_sums_is_still_equal_over_stages(options):
    """A bf16 accumulator and the backend's own reduction differ over rank counts, never over stages."""
    for found in ranks.run(3, over_stages, options):
        assert found == [""] * 3


def over_stages(options):
    runs = []
    for stage in STAGES:
        model = models.build("gpt", **GPT)
        optimizer = adamw(model.parameters(), "loop")
        zero = zeroshard.shard(model, optimizer, stage=stage, **options)
        history = reference.loop(
            model, optimizer, BATCHES, LOSS,
            ranks.rank(), ranks.world(), 2, steps=3, clip=0.3, average=True,
        )  # fmt: skip
        with zero.gathered():
            runs.append(reference.weights(model) | {"norms": torch.stack(history.norms)})
    return [reference.first_difference(run, runs[0]) for run in runs[1:]]


def test_every_rank_holds_the_same_weights_after_the_step():
    """Rank 0's initial weights count, and the ranks' copies never drift apart: bits equal across ranks, stages 0-3."""
    for per_stage in zip(*ranks.run(3, own_seed), strict=True):
        for weights in per_stage:
            reference.assert_same(weights, per_stage[0])


def own_seed():
    found = []
    for stage in STAGES:
        model = models.build("gpt", seed=ranks.rank(), **GPT)
        optimizer = adamw(model.parameters(), "loop")
        zero = zeroshard.shard(model, optimizer, stage=stage)
        reference.loop(model, optimizer, BATCHES, LOSS, ranks.rank(), 3, steps=2)
        with zero.gathered():
            found.append(reference.weights(model))
    first = reference.weights(models.build("gpt", seed=0, **GPT))
    assert all(reference.first_difference(weights, found[0]) == "" for weights in found)
    assert reference.first_difference(found[0], first)
    return found
