"""Gradients: what is added to what, in which order, whoever has one, and what happens when ranks disagree.

A scenario is a function of one rank and one step: it runs forwards and backwards through an engine. `Sharded` is
zeroshard; `Plain` is the definition: it keeps the sum of each backward, adds these sums in rank order, backward after
backward, and divides once. Both must end with gradients, weights and absences that are equal with `==`.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import models
import ranks
import reference
import zeroshard
from zeroshard import Comm, Layout, Precision
from zeroshard.comm.transport import Work
from zeroshard.engine.gradients import reduction
from zeroshard.errors import PeerError, StateError

STAGES = (0, 1, 2, 3)
BUCKETS = {"one": Layout(units=()), "units": Layout(), "many": Layout(bucket_mib=0.0005)}
STEPS = 3
WHERE = {  # rank count -> the stages and buckets that every scenario runs with
    1: [(0, "units"), (3, "units")],
    2: [(0, "many"), (1, "one"), (3, "one"), (3, "many")],
    3: [(1, "many"), (2, "many"), (3, "units")],
    4: [(1, "units"), (3, "units")],
}


# ------------------------------------------------------------------------------------------------------------ scenarios


SCENARIOS = {}


def scenario(name, **options):
    """Register a scenario on the model `name` built with `options`."""

    def register(run):
        SCENARIOS[run.__name__] = (name, options, run)
        return run

    return register


def loss_of(name, model, step, index):
    return models.loss(name, model, models.batch(name, step, index))


@scenario("gpt", hidden=12, layers=2)
def three_backwards(engine, model, step, rank, world):
    """Several backwards before one step accumulate."""
    for a in range(3):
        engine.backward(loss_of("gpt", model, step, a * world + rank))


@scenario("gpt", hidden=12, layers=2)
def a_shorter_last_batch(engine, model, step, rank, world):
    """The last micro-batch has fewer rows, on some ranks even fewer tokens."""
    engine.backward(loss_of("gpt", model, step, rank))
    tokens, targets = models.batch("gpt", step, world + rank)
    length = 3 + rank
    engine.backward(models.loss("gpt", model, (tokens[:1, :length], targets[:1, :length])))


@scenario("gpt", hidden=12, layers=2)
def the_same_graph_twice(engine, model, step, rank, world):
    """backward(retain_graph=True), then the same backward again: each is reduced by itself."""
    loss = loss_of("gpt", model, step, rank)
    engine.backward(loss, retain_graph=True)
    engine.backward(loss)


@scenario("gpt", hidden=12, layers=2, checkpoint="nonreentrant")
def the_same_graph_twice_recomputed(engine, model, step, rank, world):
    """The same under activation checkpointing, then a fresh graph."""
    loss = loss_of("gpt", model, step, rank)
    engine.backward(loss, retain_graph=True)
    engine.backward(loss)
    engine.backward(loss_of("gpt", model, step, world + rank))


@scenario("gpt", hidden=12, layers=2)
def two_losses_of_one_forward(engine, model, step, rank, world):
    """Two losses from the same logits, each with its own backward."""
    tokens, targets = models.batch("gpt", step, rank)
    logits = model(tokens)
    engine.backward(F.cross_entropy(logits.flatten(0, 1), targets.flatten()), retain_graph=True)
    engine.backward(0.1 * logits.square().mean())


@scenario("auxiliary")
def two_losses_of_different_weights(engine, model, step, rank, world):
    """Most parameters have a gradient from one of the two losses only."""
    features, targets = models.batch("auxiliary", step, rank)
    main = F.mse_loss(model(features), targets)
    engine.backward(sum(block.auxiliary for block in model.blocks), retain_graph=True)
    engine.backward(main)


@scenario("auxiliary")
def losses_that_the_model_does_not_return(engine, model, step, rank, world):
    """Backwards that meet no output of the model first: they begin with a gradient that comes, and add to others."""
    features, targets = models.batch("auxiliary", step, rank)
    main = F.mse_loss(model(features), targets)
    auxiliary = sum(block.auxiliary for block in model.blocks)
    engine.backward(auxiliary, retain_graph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch's, of a cycle through p.grad
        engine.backward(0.5 * auxiliary, retain_graph=True, create_graph=True)
    engine.backward(main, retain_graph=True)
    engine.backward(auxiliary.square())


@scenario("gpt", hidden=12, layers=2)
def two_forwards_then_two_backwards(engine, model, step, rank, world):
    """Both graphs exist before the first backward runs."""
    first, second = (loss_of("gpt", model, step, a * world + rank) for a in range(2))
    engine.backward(first)
    engine.backward(second)


@scenario("gpt", hidden=12, layers=2)
def two_forwards_then_one_backward(engine, model, step, rank, world):
    """One backward through two forwards: autograd adds both up before it hands over a gradient."""
    engine.backward(loss_of("gpt", model, step, rank) + loss_of("gpt", model, step, world + rank))


@scenario("unused")
def no_gradient_on_any_rank(engine, model, step, rank, world):
    """A layer nobody uses: its gradient stays None, and the optimizer leaves it alone."""
    engine.backward(loss_of("unused", model, step, rank))


@scenario("branches")
def a_gradient_on_one_rank_only(engine, model, step, rank, world):
    """Only rank `step` uses expert 3: elsewhere it counts as zero; the others use expert 0."""
    features, targets, _ = models.batch("branches", step, rank)
    keep = [True, True, True, True] if rank == step % world else [False, False, True, False]
    engine.backward(models.loss("branches", model, (features, targets, keep)))


@scenario("branches")
def a_gradient_in_one_backward_only(engine, model, step, rank, world):
    """Expert 0 on all ranks, then expert 3 on all: each keeps what one of the two backwards gave."""
    for a, expert in enumerate((False, True)):
        features, targets, _ = models.batch("branches", step, a * world + rank)
        engine.backward(models.loss("branches", model, (features, targets, [expert, expert, True, True])))


@scenario("branches")
def branches(engine, model, step, rank, world):
    """Every rank takes an expert, and an order of the other layers, of its own."""
    for a in range(2):
        engine.backward(loss_of("branches", model, step, a * world + rank))


@scenario("layerdrop")
def layerdrop(engine, model, step, rank, world):
    """Every rank drops layers of its own."""
    for a in range(2):
        engine.backward(loss_of("layerdrop", model, step, a * world + rank))


@scenario("layerdrop", checkpoint="reentrant")
def layerdrop_reentrant(engine, model, step, rank, world):
    """The same, recomputed in nested backwards."""
    layerdrop(engine, model, step, rank, world)


@scenario("layerdrop", checkpoint="nonreentrant")
def layerdrop_nonreentrant(engine, model, step, rank, world):
    """The same, recomputed when saved tensors are unpacked."""
    layerdrop(engine, model, step, rank, world)


@scenario("layerdrop")
def every_layer_dropped_on_one_rank(engine, model, step, rank, world):
    """One rank uses no block at all while the others use all of them, by turns."""
    features, targets, _ = models.batch("layerdrop", step, rank)
    engine.backward(models.loss("layerdrop", model, (features, targets, [rank != step % world] * 4)))


@scenario("shared", checkpoint="reentrant")
def three_segments_share_a_weight(engine, model, step, rank, world):
    """Each segment hands in a gradient of its own: added up on the rank, in autograd's order, before any reduction."""
    for a in range(2):
        engine.backward(loss_of("shared", model, step, a * world + rank))


@scenario("shared", checkpoint="nonreentrant")
def three_segments_share_a_weight_nonreentrant(engine, model, step, rank, world):
    """The same without nested backwards."""
    for a in range(2):
        engine.backward(loss_of("shared", model, step, a * world + rank))


@scenario("gpt", hidden=12, layers=2, tied=True, checkpoint="reentrant")
def tied_and_recomputed(engine, model, step, rank, world):
    """The embedding is also the head, with re-entrant segments between the two."""
    for a in range(2):
        engine.backward(loss_of("gpt", model, step, a * world + rank))


@scenario("gpt", hidden=12, layers=2)
def no_sync_then_sync(engine, model, step, rank, world):
    """Two backwards add up locally, the third sends the sum of all three."""
    with engine.no_sync():
        for a in range(2):
            engine.backward(loss_of("gpt", model, step, a * world + rank))
    engine.backward(loss_of("gpt", model, step, 2 * world + rank))


@scenario("gpt", hidden=12, layers=2)
def no_sync_alone(engine, model, step, rank, world):
    """Nothing but local backwards: whoever asks for gradients, or steps, sends them."""
    with engine.no_sync():
        for a in range(2):
            engine.backward(loss_of("gpt", model, step, a * world + rank))


@scenario("gpt", hidden=12, layers=2)
def no_sync_between_syncs(engine, model, step, rank, world):
    """A reduced sum is there already when local backwards begin."""
    engine.backward(loss_of("gpt", model, step, rank))
    with engine.no_sync():
        engine.backward(loss_of("gpt", model, step, world + rank))
    engine.backward(loss_of("gpt", model, step, 2 * world + rank))


@scenario("layerdrop")
def no_sync_with_layerdrop(engine, model, step, rank, world):
    """Layers that only the local backwards used are sent with the next backward that is not local, whatever it uses."""
    features, targets, _ = models.batch("layerdrop", step, rank)
    with engine.no_sync():
        engine.backward(models.loss("layerdrop", model, (features, targets, [True, rank == 0, False, False])))
    for a, keep in ((1, [False, False, True, True]), (2, [True, True, False, rank == 0])):
        features, targets, _ = models.batch("layerdrop", step, a * world + rank)
        engine.backward(models.loss("layerdrop", model, (features, targets, keep)))


@scenario("shared", checkpoint="reentrant")
def no_sync_with_shared_segments(engine, model, step, rank, world):
    """Three gradients of one weight in one local backward, then three more in the backward that sends."""
    with engine.no_sync():
        engine.backward(loss_of("shared", model, step, rank))
    engine.backward(loss_of("shared", model, step, world + rank))


# -------------------------------------------------------------------------------------------------------- two engines


class Sharded:
    """A scenario's forwards and backwards on a sharded model."""

    def __init__(self, zero):
        self.no_sync = zero.no_sync

    def backward(self, loss, **options):
        loss.backward(**options)


class Plain:
    """The definition, for one rank: `sums` holds what each backward (with the local ones before it) left in p.grad."""

    def __init__(self, model):
        self.model, self.sums, self.local, self.pending = model, [], False, False

    @contextlib.contextmanager
    def no_sync(self):
        self.local = True
        yield
        self.local = False

    def backward(self, loss, **options):
        loss.backward(**options)
        self.pending = True
        if not self.local:
            self.send()

    def send(self):
        self.sums.append({name: p.grad for name, p in self.model.named_parameters() if p.grad is not None})
        self.model.zero_grad()
        self.pending = False


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, foreach=False)


@functools.cache
def defined(case, world):
    """Per step, the gradients by the definition and the weights after it."""
    name, options, run = SCENARIOS[case]
    model = models.build(name, **options)
    optimizer = optimizer_of(model)
    history = []
    for step in range(STEPS):
        plains = [Plain(model) for _ in range(world)]
        for rank, plain in enumerate(plains):
            run(plain, model, step, rank, world)
            if plain.pending:
                plain.send()
        total = {}
        for sums in zip(*(plain.sums for plain in plains), strict=True):
            for each in sums:
                for key, gradient in each.items():
                    total[key] = total[key] + gradient if key in total else gradient
        gradients = {key: gradient / world for key, gradient in total.items()}
        for key, parameter in model.named_parameters():
            parameter.grad = gradients.get(key)
        optimizer.step()
        optimizer.zero_grad()
        history.append((gradients, reference.weights(model)))
    return history


def difference(case, where, want):
    """On this rank: the first thing that differs."""
    stage, layout = where[0], BUCKETS[where[1]]
    name, options, run = SCENARIOS[case]
    model = models.build(name, **options)
    optimizer = optimizer_of(model)
    zero = zeroshard.shard(model, optimizer, stage=stage, layout=layout)
    for step, (gradients, weights) in enumerate(want):
        run(Sharded(zero), model, step, ranks.rank(), ranks.world())
        # Asking is a collective too, which sends what no_sync kept: ask at every other step only.
        if step % 2 == 0:
            got = {key: p.grad.full_tensor() for key, p in model.named_parameters() if p.grad is not None}
            if text := reference.first_difference(got, gradients):
                return f"step {step}, gradient of {text}"
        optimizer.step()
        optimizer.zero_grad()
        with zero.gathered():
            if text := reference.first_difference(reference.weights(model), weights):
                return f"step {step}, weight {text}"
    held = zero.ledger().held
    return "".join(
        f"{held[state]} bytes of {state} are still held" for state in ("gather", "reduce") if held.get(state)
    )


@pytest.mark.row(10, 11, 24, 30)
@pytest.mark.parametrize("case", SCENARIOS)
@pytest.mark.parametrize(
    ("world", "where"),
    [
        pytest.param(
            world, where, id=f"ranks{world}-stage{where[0]}-{where[1]}", marks=[pytest.mark.slow] * (world == 3)
        )
        for world in (1, 2, 3)
        for where in WHERE[world]
    ],
)
def test_gradients_are_what_the_definition_says(case, world, where):
    """At stages 0-3 with one, some and many buckets: equal gradients, equal absences, equal weights, three steps."""
    assert ranks.run(world, difference, case, where, defined(case, world)) == [""] * world


@pytest.mark.parametrize("case", ["three_backwards", "branches", "layerdrop_reentrant", "no_sync_then_sync"])
@pytest.mark.parametrize("where", WHERE[4], ids=lambda where: f"stage{where[0]}-{where[1]}")
def test_gradients_on_four_ranks(case, where):
    """The same on four ranks, for the cases in which ranks differ most."""
    assert ranks.run(4, difference, case, where, defined(case, 4)) == [""] * 4


PLAIN_TORCH = ("three_backwards", "a_shorter_last_batch", "layerdrop", "branches", "no_gradient_on_any_rank")


@pytest.mark.parametrize("case", [*PLAIN_TORCH, "three_segments_share_a_weight_nonreentrant"])
@pytest.mark.parametrize("world", [1, 2, 3, 4], ids=lambda world: f"ranks{world}")
def test_the_definition_is_plain_torch(case, world):
    """The definition equals one process whose p.grad just accumulates: micro-batch after micro-batch, divided once."""
    name, options, run = SCENARIOS[case]
    model = models.build(name, **options)
    optimizer = optimizer_of(model)
    for step, (gradients, weights) in enumerate(defined(case, world)):
        losses = [[] for _ in range(world)]
        for rank in range(world):
            run(_Collect(losses[rank]), model, step, rank, world)
        for a in range(len(losses[0])):
            for rank in range(world):
                losses[rank][a].backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(world)
        got = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
        reference.assert_same(got, gradients)
        optimizer.step()
        optimizer.zero_grad()
        reference.assert_same(reference.weights(model), weights)


class _Collect:
    """Keeps the losses, so that their backwards can run in another order."""

    def __init__(self, losses):
        self.losses = losses

    def backward(self, loss):
        self.losses.append(loss)


def test_shared_segments_are_added_one_by_one_in_plain_torch():
    """With one rank and one backward nothing is reordered: three re-entrant segments equal plain torch."""
    want = _plain_segments()
    assert ranks.run(1, sharded_segments) == [[""] * 4]
    assert want


def _plain_segments():
    model = models.build("shared", checkpoint="reentrant")
    optimizer = optimizer_of(model)
    reference.accumulate(model, optimizer, partial(models.batch, "shared"), partial(models.loss, "shared"), steps=3)
    return reference.weights(model)


def sharded_segments():
    found, want = [], _plain_segments()
    for stage in STAGES:
        model = models.build("shared", checkpoint="reentrant")
        optimizer = optimizer_of(model)
        zero = zeroshard.shard(model, optimizer, stage=stage)
        reference.loop(model, optimizer, partial(models.batch, "shared"), partial(models.loss, "shared"), steps=3)
        with zero.gathered():
            found.append(reference.first_difference(reference.weights(model), want))
    return found


# ---------------------------------------------------------------------------------------------------- several steps


@pytest.mark.row(30)
@pytest.mark.parametrize(
    ("side", "set_to_none"),
    [
        ("model", True),
        ("optimizer", False),
        pytest.param("model", False, marks=pytest.mark.slow),
        pytest.param("optimizer", True, marks=pytest.mark.slow),
    ],
)
def test_cleared_gradients_start_again(side, set_to_none):
    """zero_grad from either side, to None or to zero, between backwards and between steps, as plain torch has it."""
    want = _cleared(None, side, set_to_none, 3)
    assert ranks.run(3, cleared, side, set_to_none, want) == [[""] * 4] * 3


def cleared(side, set_to_none, want):
    return [reference.first_difference(_cleared(stage, side, set_to_none, 3), want) for stage in STAGES]


def _cleared(stage, side, set_to_none, world):
    model = models.build("layerdrop")
    optimizer = optimizer_of(model)
    zero = zeroshard.shard(model, optimizer, stage=stage) if stage is not None else None
    mine = range(world) if zero is None else [ranks.rank()]
    for step in range(3):
        for a in range(3):
            if a == 1:
                (model if side == "model" else optimizer).zero_grad(set_to_none=set_to_none)
            for rank in mine:
                loss_of("layerdrop", model, step, a * world + rank).backward()
        if zero is None:
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.div_(world)
        optimizer.step()
        (model if side == "model" else optimizer).zero_grad(set_to_none=set_to_none)
    with zero.gathered() if zero else contextlib.nullcontext():
        return reference.weights(model)


@pytest.mark.parametrize("world", [2, 3], ids=lambda world: f"ranks{world}")
def test_gradients_kept_over_a_step_are_equal_over_stages(world):
    """Without zero_grad the next backward adds to what the step used; at two ranks that is plain torch's sum too."""
    runs = ranks.run(world, kept_over_steps)
    for stage, found in enumerate(runs[0][1:], 1):
        assert not reference.first_difference(found, runs[0][0]), stage
    if world == 2:
        model = models.build("mlp")
        optimizer = optimizer_of(model)
        for step in range(3):
            kept = {name: p.grad for name, p in model.named_parameters()}
            model.zero_grad()
            for name, parameter in model.named_parameters():
                parameter.grad = None if kept[name] is None else kept[name] * world
            for rank in range(world):
                loss_of("mlp", model, step, rank).backward()
            for parameter in model.parameters():
                parameter.grad.div_(world)
            optimizer.step()
        reference.assert_same(runs[0][0], reference.weights(model))


def kept_over_steps():
    found = []
    for stage in STAGES:
        model = models.build("mlp")
        optimizer = optimizer_of(model)
        zero = zeroshard.shard(model, optimizer, stage=stage)
        for step in range(3):
            loss_of("mlp", model, step, ranks.rank()).backward()
            optimizer.step()
        with zero.gathered():
            found.append(reference.weights(model))
    return found


@pytest.mark.full
def test_reading_a_gradient_does_not_round_it():
    """Norms, full_tensor and to_local between two backwards divide a copy: (a / 3) * 3 is not a."""
    assert ranks.run(3, read_between, defined("three_backwards", 3)[0]) == [[""] * 4] * 3


def read_between(want):
    found = []
    for stage in STAGES:
        model = models.build("gpt", hidden=12, layers=2)
        optimizer = optimizer_of(model)
        zero = zeroshard.shard(model, optimizer, stage=stage)
        for a in range(3):
            loss_of("gpt", model, 0, a * 3 + ranks.rank()).backward()
            for parameter in model.parameters():
                parameter.grad.norm()
                parameter.grad.full_tensor()
                parameter.grad.to_local()
        got = {key: p.grad.full_tensor() for key, p in model.named_parameters()}
        difference = reference.first_difference(got, want[0])
        optimizer.step()
        with zero.gathered():
            found.append(difference or reference.first_difference(reference.weights(model), want[1]))
    return found


# ------------------------------------------------------------------------------- questions inside a backward, and later


def asked_inside(stage, late):
    """A gradient that no_sync has left is asked for in a backward, once all of this one's have come; and a step."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero = zeroshard.shard(model, optimizer, stage=stage)
    fragment, told = optimizer.param_groups[0]["params"][0], []

    def backward(x, ask):
        x = x.requires_grad_() * 1
        if ask:
            x.register_hook(lambda _: told.append(fragment.grad.to_local().clone()))
        model(x).square().sum().backward()

    x = torch.arange(12.0).view(2, 6) / 12
    with zero.no_sync():
        backward(x.clone(), ask=False)
        backward(x.clone(), ask=not late)
    if late:
        backward(x.clone(), ask=False)
    with zero.no_sync():  # what was sent meanwhile is added to
        backward(x.clone(), ask=False)
    optimizer.step()
    with zero.gathered():
        return len(told), reference.weights(model)


@pytest.mark.parametrize("world", [1, 2])
def test_a_question_inside_a_backward_under_no_sync_sends_it_and_training_goes_on(ranks, world, stage):
    """The next backward begins anew: the contribution is in the sum then, and has nothing to keep."""
    for asked, weights in ranks.run(world, asked_inside, stage, False):
        assert asked == 1
        _, want = ranks.run(world, asked_inside, stage, True)[0]
        assert [*weights] == [*want] and all(tensor.isfinite().all() for tensor in weights.values())


def edited_after_clearing():
    """A gradient that the program kept, and cleared, is edited after a backward that does not use its bucket."""
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero = zeroshard.shard(model, optimizer, stage=0, layout=Layout(units=["*"]))
    (model[0](torch.ones(2, 4)).sum() + model[1](torch.ones(2, 4)).sum()).backward()
    kept = optimizer.param_groups[0]["params"][0].grad
    optimizer.zero_grad()
    model[1](torch.ones(2, 4)).sum().backward()
    if zero.rank == 0:
        kept.mul_(2.0)
    optimizer.step()
    return [accumulator.filled for accumulator in zero._engine.gradients.accumulators]


@pytest.mark.parametrize("world", [1, 2])
def test_an_edit_of_a_cleared_gradient_makes_no_sum_of_it(ranks, world):
    """Or one rank alone would gather its average in the step."""
    assert ranks.run(world, edited_after_clearing) == [[False, True]] * world


# ----------------------------------------------------------------------------------------------- no_sync has its price


@pytest.mark.parametrize("world", [2, 3])
def test_no_sync_adds_up_in_the_resident_sum_or_in_one_of_its_size_and_saves_passes(world, stage):
    """Stages 0 and 1 hold nothing beside their full-size gradients; 2 and 3, which have none, one full-size fp32 sum."""
    assert "full-size" in zeroshard.Zero.no_sync.__doc__
    ranks.run(world, no_sync_price, stage)


def no_sync_price(stage):
    for precision in (Precision(), Precision(param_dtype=torch.bfloat16), Precision(nonfinite="raise")):
        model = models.build("gpt", hidden=12, layers=2)
        optimizer = optimizer_of(model)
        zero = zeroshard.shard(model, optimizer, stage=stage, precision=precision)
        full = 4 * sum(bucket.numel for bucket in zero.partition.buckets)
        own = 4 * sum(bucket.shard_numel(ranks.rank()) for bucket in zero.partition.buckets)
        for earlier in (False, True):  # is there a reduced sum already when local backwards begin?
            if earlier:
                loss_of("gpt", model, 0, 4).backward()
            before = zero.ledger()
            # What a rank has of that sum goes aside; so does the contribution that must outlive the sum.
            aside = own if earlier or precision.nonfinite == "raise" else 0
            with zero.no_sync():
                for a in range(3):
                    loss_of("gpt", model, 0, a).backward()
                    inside = zero.ledger()
                    assert inside.traffic.get("reduce", before.traffic.get("reduce")) == before.traffic.get("reduce")
                    assert inside.held.get("reduce", 0) == (full if stage >= 2 else aside)
                    assert {k: v for k, v in inside.held.items() if v and k != "reduce"} == {
                        k: v for k, v in before.held.items() if v and k != "reduce"
                    }
            calls = before.traffic["reduce"].calls if earlier else 0
            loss_of("gpt", model, 0, 3).backward()
            after = zero.ledger()
            assert after.traffic["reduce"].calls - calls == len(zero.partition.buckets)
            assert after.held["reduce"] == 0
            if not earlier:
                assert after.traffic["reduce"].logical == full
            optimizer.step()
            optimizer.zero_grad()


def no_sync_in_replicas(stage, replicas, nonfinite, earlier):
    """Weights after two steps of local backwards, with or without a reduced sum before them, and one that sends."""
    model = models.build("gpt", hidden=12, layers=2)
    optimizer = optimizer_of(model)
    zero = zeroshard.shard(
        model, optimizer, stage=stage, comm=Comm(replicas=replicas), precision=Precision(nonfinite=nonfinite)
    )
    for step in range(2):
        if earlier:
            loss_of("gpt", model, step, ranks.rank()).backward()
        with zero.no_sync():
            for a in (1, 2):
                loss_of("gpt", model, step, 4 * a + ranks.rank()).backward()
        loss_of("gpt", model, step, 12 + ranks.rank()).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert zero.ledger().held["reduce"] == 0
    with zero.gathered():
        return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.full
@pytest.mark.parametrize("nonfinite", ["ignore", "raise"])
@pytest.mark.parametrize("earlier", [False, True], ids=["", "earlier"])
def test_no_sync_in_replicas_has_the_bits_of_one_copy(nonfinite, earlier):
    """Also where the running sum comes from another replica to where local backwards have added up."""
    want = ranks.run(4, no_sync_in_replicas, 2, 1, nonfinite, earlier)[0]
    for stage, replicas in ((0, 2), (1, 2), (1, 4), (2, 2)):
        for weights in ranks.run(4, no_sync_in_replicas, stage, replicas, nonfinite, earlier):
            assert all(torch.equal(a, b) for a, b in zip(weights, want, strict=True)), (stage, replicas)


# ------------------------------------------------------------------------------------------------- when ranks disagree


class Run:
    """A model on this rank, and the things a loop does, one by one."""

    def __init__(self, stage, comm=None):
        self.model = models.build("mlp")
        self.optimizer = optimizer_of(self.model)
        self.zero = zeroshard.shard(
            self.model, self.optimizer, stage=stage, layout=Layout(bucket_mib=0.0001), comm=comm
        )
        self.losses = []

    def forward(self):
        self.losses.append(loss_of("mlp", self.model, 0, ranks.rank()))

    def backward(self):
        self.losses.pop().backward()

    def local(self):
        with self.zero.no_sync():
            self.backward()

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()

    def norm(self):
        self.zero.clip_grad_norm_(1.0)

    def gathered(self):
        with self.zero.gathered():
            pass

    def evaluate(self):
        with torch.no_grad():
            self.forward()

    def do(self, actions):
        for action in actions.split():
            getattr(self, action)()


ONE_STEP = "forward backward step "
DISAGREEMENTS = {  # what rank 1 does, and what all others do
    "one-forward-more": ("forward forward backward", "forward backward forward"),
    "one-backward-less": ("forward step", "forward backward step"),
    "one-backward-more": ("forward forward backward backward step", "forward forward backward step"),
    "one-micro-batch-less": ("forward backward step", "forward backward forward backward step"),
    "one-micro-batch-more": ("forward backward forward backward step", "forward backward step"),
    "one-step-less": ("forward backward forward", "forward backward step"),
    "one-step-more": ("forward backward step step", "forward backward step forward"),
    "no-sync-on-one": ("forward local step", "forward backward step"),
    "one-clips": ("forward backward norm step", "forward backward step"),
    "one-gathers": ("forward backward gathered step", "forward backward step"),
    "one-ends-early": ("gathered", "forward backward step gathered"),
}


@pytest.mark.row(6)
@pytest.mark.parametrize("warm", [pytest.param(False, marks=pytest.mark.slow), True], ids=["first-step", "later-step"])
@pytest.mark.parametrize("case", DISAGREEMENTS)
def test_ranks_that_do_different_things_are_named_on_every_rank(case, warm):
    """A different number of forwards, backwards, steps or questions: PeerError at once, saying where each rank is."""
    for stage in STAGES:
        for outcome in ranks.run(3, disagree, case, stage, warm):
            assert outcome is None, outcome


def disagree(case, stage, warm):
    run = Run(stage)
    if warm:
        run.do(ONE_STEP * 2)
    try:
        run.do(DISAGREEMENTS[case][0 if ranks.rank() == 1 else 1])
    except PeerError as error:
        text = str(error)
        missing = [rank for rank in range(3) if f"rank {rank} is at" not in text]
        return None if not missing else f"ranks {missing} are not named: {text}"
    return f"rank {ranks.rank()} noticed nothing"


@pytest.mark.full
@pytest.mark.row(6)
@pytest.mark.parametrize("stage", [2, 3], ids=lambda stage: f"stage{stage}")
def test_a_rank_that_stops_is_an_error_within_the_time_out(stage):
    """A rank that ends its loop early without a word: the others raise PeerError after Comm(timeout=...), not later."""
    for rank, text in enumerate(ranks.run(3, stop_early, stage)):
        assert rank == 1 or "did not complete" in text, (rank, text)


def stop_early(stage):
    run = Run(stage, Comm(timeout=4.0))
    run.do(ONE_STEP)
    text = ""
    if ranks.rank() != 1:
        try:
            run.do(ONE_STEP)
        except PeerError as error:
            text = str(error)
    return text


@pytest.mark.row(25)
def test_evaluating_on_one_rank_is_an_error_only_where_weights_must_be_gathered():
    """Stages 0-2 hold all weights, so one rank may evaluate alone; at stage 3 every rank is named at once."""
    for stage in STAGES:
        outcomes = ranks.run(3, evaluate_alone, stage)
        assert outcomes == (
            [None] * 3 if stage == 3 else ["rank 0 noticed nothing", "rank 1 noticed nothing", "rank 2 noticed nothing"]
        )


def evaluate_alone(stage):
    DISAGREEMENTS["evaluate"] = ("evaluate " + ONE_STEP, ONE_STEP)
    return disagree("evaluate", stage, False)


# -------------------------------------------------------------------- a weight changed between forward and backward


def step_between(run):
    """An optimizer step that follows another backward."""
    run.do("forward forward backward step backward")


def edit_between(run):
    """An edit in place, inside gathered() where there is one."""
    run.forward()
    with run.zero.gathered() if run.zero else contextlib.nullcontext(), torch.no_grad():
        for parameter in run.model.parameters():
            parameter.mul_(0.5)
    run.backward()


def load_between(run):
    """load_state_dict between forward and backward."""
    state = models.build("mlp", seed=1).state_dict()
    run.forward()
    with run.zero.gathered() if run.zero else contextlib.nullcontext():
        run.model.load_state_dict(state)
    run.backward()


class PlainRun(Run):
    """The same actions without zeroshard."""

    def __init__(self):
        self.model = models.build("mlp")
        self.optimizer = optimizer_of(self.model)
        self.zero, self.losses = None, []


@pytest.mark.row(28)
@pytest.mark.parametrize("world", [1, 2], ids=lambda world: f"ranks{world}")
@pytest.mark.parametrize("change", [step_between, edit_between, load_between])
def test_a_weight_changed_between_forward_and_backward_raises(change, world):
    """As in plain torch: RuntimeError, "modified by an inplace operation", on every rank; the next step is as usual."""
    with pytest.raises(RuntimeError, match="inplace operation"):
        change(PlainRun())
    for per_rank in ranks.run(world, change_between, change):
        assert all("inplace operation" in text for text in per_rank), per_rank


def change_between(change):
    texts = []
    for stage in STAGES:
        run = Run(stage)
        run.do(ONE_STEP)
        try:
            change(run)
            texts.append("nothing raised")
        except RuntimeError as error:
            texts.append(str(error))
        # The failed backward is forgotten: from the same weights on, a step is what it is elsewhere.
        run.losses.clear()
        run.optimizer.zero_grad()
        with run.zero.gathered():
            run.model.load_state_dict(models.build("mlp").state_dict())
        run.optimizer.state.clear()
        run.do(ONE_STEP)
        fresh = Run(stage)
        fresh.do(ONE_STEP)
        with run.zero.gathered(), fresh.zero.gathered():
            reference.assert_same(reference.weights(run.model), reference.weights(fresh.model))
    return texts


# ------------------------------------------------------------------------------------------------- what p.grad is, held


def given_before_backward(stage, other_first):
    """A user's own tensor in p.grad before backward; `other_first`: another bucket holds a sum already."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False))
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.arange(16.0).view(4, 4))
    zero = zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=1.0), stage=stage, layout=Layout(units=["*"]))
    x = torch.full((1, 4), 1.0 + zero.rank)
    if other_first:
        model[1](x).sum().backward()
    model[0].weight.grad = torch.full((4, 4), 8.0 * (1 + zero.rank))
    model(x).sum().backward()
    return model[0].weight.grad.full_tensor().tolist()


@pytest.mark.parametrize("other_first", [False, True], ids=["", "beside-a-sum"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_users_tensor_in_p_grad_is_added_to(stage, other_first):
    """As in plain PyTorch, on every rank to its own; the average counts all. Whatever other buckets hold."""
    columns = torch.arange(16.0).view(4, 4).sum(0)  # d(sum of outputs) / d(inputs of the second layer)
    want = torch.stack([8.0 * rank + columns[:, None].expand(4, 4) * rank for rank in (1.0, 2.0)]).mean(0)
    assert ranks.run(2, given_before_backward, stage, other_first) == [want.tolist()] * 2


def identities(stage):
    """Whether p.grad is the same object from backward to backward: left alone, kept, kept over autograd.grad, added to."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zeroshard.shard(model, optimizer, stage=stage)

    def backward():
        optimizer.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        return id(model.weight.grad)

    alone = backward() == backward()
    kept = model.weight.grad
    new = backward() != id(kept)
    with pytest.raises(StateError, match="cleared, or another backward"):
        kept.full_tensor()
    kept = model.weight.grad
    loss = model(torch.ones(1, 4)).sum()
    (only,) = torch.autograd.grad(loss, [loss])
    still = model.weight.grad is kept
    value = kept.full_tensor().tolist()
    del kept
    before = id(model.weight.grad)
    model(torch.ones(1, 4)).sum().backward()
    return alone, new, still, only.item(), value == [[1.0] * 4] * 4, id(model.weight.grad) == before


@pytest.mark.parametrize("stage", STAGES)
def test_p_grad_is_made_once_unless_somebody_keeps_it(stage):
    """A kept gradient must not speak for a later backward; one that nobody keeps need not be made again."""
    assert ranks.run(1, identities, stage) == [(True, True, True, 1.0, True, True)]


def unreturned(stage, scale, fail, late):
    """Gradients of two losses that the model does not return: with hooks of the user's own, after a backward that failed.

    late: the hooks are registered after `shard`.
    """
    model = models.build("auxiliary")
    features, _ = models.batch("auxiliary", 0, 0)
    model(features)
    sum(block.auxiliary for block in model.blocks).backward()
    want = {name: param.grad * 2 * scale for name, param in model.named_parameters() if param.grad is not None}
    model.zero_grad()

    def edit(param):
        param.grad.mul_(scale)

    params = list(model.parameters())
    for param in params if not late else ():
        param.register_post_accumulate_grad_hook(edit)
    optimizer = torch.optim.SGD(params, lr=0.1)
    zeroshard.shard(model, optimizer, stage=stage)
    for param in params if late else ():
        param.register_post_accumulate_grad_hook(edit)
    if late:
        model(features).sum().backward()  # one that the model returned; from then on our hooks are the last
        model.zero_grad()
    if fail:
        model(features).sum().backward()  # what failed drops this too
    out = model(features)
    losses = [block.auxiliary for block in model.blocks]
    if fail:
        out.register_hook(lambda grad: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            out.sum().backward()
    for _ in range(2):
        sum(losses).backward(retain_graph=True)
    got = {name: param.grad.full_tensor() for name, param in model.named_parameters() if param.grad is not None}
    return reference.first_difference(got, want)


@pytest.mark.row(4)
@pytest.mark.parametrize("fail", [False, True], ids=["", "after-one-that-failed"])
@pytest.mark.parametrize(
    ("scale", "late"), [(1, False), (2, False), (2, True)], ids=["", "hooks-that-edit", "hooks-registered-late"]
)
@pytest.mark.parametrize("stage", STAGES)
def test_a_backward_that_a_gradient_begins(stage, scale, late, fail):
    """A hook of the user's edits what comes, as in any other backward; and none of it is lost."""
    assert ranks.run(1, unreturned, stage, scale, fail, late) == [""]


def hooked_late(stage):
    """Hooks that were registered after `shard`, and one before it: what each finds in `p.grad`, and the gradients."""
    rank = ranks.rank()
    model, found = models.build("mlp"), []
    params = list(model.parameters())

    def scale(by, param):
        param.grad.mul_(by)

    params[0].register_post_accumulate_grad_hook(partial(scale, 2))
    zeroshard.shard(model, torch.optim.SGD(params, lr=0.1), stage=stage)
    for param in params:
        param.register_post_accumulate_grad_hook(lambda param: found.append(type(param.grad)))
        param.register_post_accumulate_grad_hook(partial(scale, 4))
    models.loss("mlp", model, models.batch("mlp", 0, rank)).backward()
    got = [param.grad.full_tensor() for param in params]
    plain = models.build("mlp")
    for index in range(2):
        models.loss("mlp", plain, models.batch("mlp", 0, index)).backward()
    averages = [param.grad / 2 for param in plain.parameters()]
    want = [averages[0] * 8, *(average * 4 for average in averages[1:])]
    assert found == [torch.Tensor] * len(params)
    return all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("stage", STAGES)
def test_hooks_see_the_gradient_whenever_they_were_registered(stage):
    """Ours is always the last: gradients that hooks have multiplied, averaged over two ranks."""
    assert ranks.run(2, hooked_late, stage) == [True, True]


def twice_differentiable(stage):
    """Backward with create_graph: what arrives carries a graph, what is sent and summed does not."""
    model = models.build("mlp", sizes=(3, 5, 2))
    zero = zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage)
    with zero.gathered():
        model(torch.ones(2, 3)).square().sum().backward(create_graph=True)
    return [param.grad.full_tensor().requires_grad for param in model.parameters()], [
        param.grad.full_tensor().sum().item() for param in model.parameters()
    ]


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_gradients_that_carry_a_graph_land_without_it(stage):
    model = models.build("mlp", sizes=(3, 5, 2))
    model(torch.ones(2, 3)).square().sum().backward()
    want = [param.grad.sum().item() for param in model.parameters()]
    assert ranks.run(2, twice_differentiable, stage) == [([False] * len(want), want)] * 2


class Chain(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(5))

    def forward(self, x, skip):
        for block in self.blocks[skip:]:
            x = block(x)
        return x


def patience_after(skips):
    """How long backward would wait for a reduction, after some in which every reduction was late: in each the ranks
    leave out so many blocks of the model."""
    usual, done = reduction.PAUSE, Work.done
    reduction.PAUSE = 0.016
    try:
        torch.manual_seed(0)
        model = Chain()
        zero = zeroshard.shard(model, None, stage=2, layout=Layout(bucket_mib=0.0001))
        Work.done = lambda self: False
        for skip in skips[ranks.rank()]:
            model(torch.ones(1, 8), skip=skip).sum().backward()
        reduction_ = zero._engine.reduction
        return reduction_.pause / reduction_._shortened
    finally:
        reduction.PAUSE, Work.done = usual, done


@pytest.mark.processes  # each rank replaces `Work.done`
@pytest.mark.parametrize(
    ("skips", "want"),
    [([[0], [0]], 0.016), ([[1, 1], [1, 1]], 0.016), ([[0, 0, 0], [1, 1, 1]], 0.002), ([[0, 1], [1, 1]], 0.016)],
    ids=["only slow", "only slow, with an unused block", "ranks differ", "ranks differed once"],
)
def test_who_was_only_slow_is_waited_for_as_long_again(ranks, skips, want):
    """Also where some parameters got no gradient on any rank; and ranks that differ are waited for an eighth of it."""
    assert ranks.run(2, patience_after, skips) == [want, want]
