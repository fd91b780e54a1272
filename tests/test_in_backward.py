"""The optimizer in backward: the bits of the ordinary step, with the gradients of one bucket at a time."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
import weakref
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

import models
import ranks
import test_delays
import zeroshard
from zeroshard import Comm, Layout, Offload, Precision
from zeroshard.comm import groups
from zeroshard.engine.gradients.contribution import second_gradient
from zeroshard.engine.gradients.reduction import REDUCED
from zeroshard.engine.step import bucket_step
from zeroshard.errors import PeerError, StateError, TierError, UserError
from zeroshard.features.optimizer_in_backward import InBackward

STAGES = (0, 1, 2, 3)
SMALL = Layout(bucket_mib=0.002)
BF16 = Precision(param_dtype=torch.bfloat16, cast_inputs=True)
SPLIT = Precision(param_dtype=torch.bfloat16, cast_inputs=True, split_master=True)


def adamw(model):
    return [torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)]


def muon_and_sgd(model):
    """Two optimizers, which share buckets; one of them needs whole tensors."""
    named = [(param.ndim == 2 and "blocks" in name, param) for name, param in model.named_parameters()]
    matrices, others = ([param for is_matrix, param in named if is_matrix is wanted] for wanted in (True, False))
    return [torch.optim.Muon(matrices, lr=1e-2), torch.optim.SGD(others, lr=1e-2, momentum=0.9)]


def sharded(early=True, name="gpt", options=None, make=adamw, **settings):
    model = models.build(name, **(options or {}))
    optimizers = make(model)
    return model, optimizers, zeroshard.shard(model, optimizers, optimizer_in_backward=early, **settings)


def train(model, optimizers, zero, name="gpt", steps=3, first=0, schedules=()):
    losses = []
    for step in range(first, first + steps):
        loss = models.loss(name, model, models.batch(name, step, zero.rank))
        loss.backward()
        for each in (*optimizers, *schedules):
            each.step()
        for each in optimizers:
            each.zero_grad()
        losses.append(loss.item())
    return losses


def everything(model, optimizers, zero):
    """Weights, and what this rank keeps of the optimizers' states in memory."""
    params = [param for each in optimizers for group in each.param_groups for param in group["params"]]
    kept = [sorted(each.state.get(param, {}).items()) for each in optimizers for param in params]
    states = [value for states in kept for _, value in states]
    with zero.gathered():
        weights = [param.detach().clone() for param in model.parameters()]
    return [*weights, *(value.clone() for value in states if isinstance(value, torch.Tensor) and not value.is_meta)]


def with_schedules(early, name, options, make, settings):
    """Of three steps with schedules: losses, weights and states."""
    parts = sharded(early, name, options, make, **settings)
    schedules = [torch.optim.lr_scheduler.LambdaLR(each, lambda step: 1 / (1 + step)) for each in parts[1]]
    losses = train(*parts, name, schedules=schedules)
    return losses, everything(*parts)


# What is no choice in tests/claims: name of the model, its optimizers, settings of `shard`.
WAYS = {
    "layers dropped": ("layerdrop", adamw, {"layout": SMALL}),
    "two optimizers": ("gpt", muon_and_sgd, {"layout": SMALL}),
    "nothing on some": ("gpt", adamw, {"precision": BF16, "layout": Layout(bounds="tensor", bucket_mib=0.002)}),
}


@pytest.mark.row(106)
@pytest.mark.parametrize("way", WAYS)
def test_bits_of_the_ordinary_step(way, world, stage):
    name, make, settings = WAYS[way]
    early, ordinary = (
        ranks.run(world, with_schedules, each, name, {}, make, settings | {"stage": stage}) for each in (True, False)
    )
    for (losses, tensors), (want, others) in zip(early, ordinary, strict=True):
        assert losses == want
        assert [torch.equal(a, b) for a, b in zip(tensors, others, strict=True)] == [True] * len(others)


REPLICAS = {
    "a team each": Comm(replicas=2),
    "spread over all": Comm(replicas=2, optimizer="all"),
    "hosts": Comm(hosts=2),
    "one rank each": Comm(replicas=4),
}


def adafactor(model):
    return [torch.optim.Adafactor(model.parameters(), lr=0.05, weight_decay=0.01)]


# Of some buckets a rank has no part, or another one than the others have.
UNEQUAL = {
    "tensor": (adamw, Layout(bounds="tensor", bucket_mib=0.002)),
    "model": (adamw, Layout(bounds="model", bucket_mib=0.002)),
    "whole": (adamw, Layout(whole=["*.weight"], bucket_mib=0.002)),
    "Muon": (muon_and_sgd, SMALL),
    "Adafactor": (adafactor, SMALL),
}


def drawn_late(seed, *args):
    with test_delays.delays(seed):
        return with_schedules(*args)


MEETING = [(which, at, "a team each") for at in STAGES for which in UNEQUAL]
MEETING += [("model", at, "spread over all") for at in STAGES[1:]]  # the others are not to be cut between replicas


@pytest.mark.row(106)
@pytest.mark.parametrize(
    ("which", "at", "how"), [MEETING[0], *(pytest.param(*each, marks=pytest.mark.full) for each in MEETING[1:])]
)
@pytest.mark.parametrize("late", [False, True], ids=["", "late"])
@pytest.mark.processes  # what comes late replaces verbs of each rank
def test_replicas_of_unequal_shards_meet_in_one_order(which, at, how, late):
    """Whoever has no part of a bucket has nothing to hand on, and comes to what follows as late as the others."""
    make, layout = UNEQUAL[which]
    settings = {"stage": at, "comm": replace(REPLICAS[how], timeout=20.0), "layout": layout}
    want = ranks.run(4, with_schedules, False, "gpt", {}, make, settings)
    early = partial(drawn_late, 1, True) if late else partial(with_schedules, True)
    for (losses, tensors), (its, others) in zip(ranks.run(4, early, "gpt", {}, make, settings), want, strict=True):
        assert losses == its
        assert [torch.equal(a, b) for a, b in zip(tensors, others, strict=True)] == [True] * len(others)


# -------------------------------------------------------------------------------------------------------------- memory


def most_gradients(stage):
    """The ledger's gradients at rest and at most, and the largest that a bucket's are on this rank."""
    model, optimizers, zero = sharded(stage=stage, layout=SMALL)
    held = []
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda _: held.append(zero.ledger().held.get("gradients", 0)))
    train(model, optimizers, zero)
    buckets = zero.partition.buckets
    parts = sorted(4 * (b.shard_numel(zero.rank) if zero.placements.gradients else b.numel) for b in buckets)
    ledger = zero.ledger()
    return ledger.held["gradients"], ledger.peak["gradients"], held[-1], parts


def test_a_rank_holds_the_gradients_of_one_bucket(stage):
    """And at stage 0 those of a second, whose averages come while the first are used."""
    for rest, most, between, parts in ranks.run(2, most_gradients, stage):
        assert rest == 0
        assert most == parts[-1] if stage else parts[-1] < most <= parts[-1] + parts[-2]
        assert between == 0 if stage else between <= parts[-1]
        assert sum(parts) > 3 * most


# ------------------------------------------------------------------------------------------------------------ refusals


def backward(model, step=0, index=0):
    models.loss("gpt", model, models.batch("gpt", step, index)).backward()


def unsynced(model, optimizer, zero):
    with zero.no_sync():
        backward(model)


def scaled(model, optimizer, zero):
    loss = models.loss("gpt", model, models.batch("gpt", 0, 0))
    torch.amp.GradScaler("cpu").scale(loss).backward()


def scaled_beside_another(model, optimizer, zero):
    """As where a second thread trains another model: its backward begins while this one's goes on."""
    scaler = torch.amp.GradScaler("cpu")

    def another(grad):
        with torch.enable_grad():
            scaler.scale(torch.ones((), requires_grad=True) * 2).backward()

    loss = models.loss("gpt", model, models.batch("gpt", 0, 0))
    between = loss * 1.0
    between.register_hook(another)
    scaler.scale(between).backward()


def rated(model, optimizer, zero):
    backward(model)
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.step()


def swapped(model, optimizer, zero):
    average = zero.average(0.5)
    average.update()
    with average.swapped():
        backward(model)


def after_backward(act):
    def done(model, optimizer, zero):
        backward(model)
        act(model, optimizer, zero)

    return done


def first_gradient(model):
    return next(model.parameters()).grad


REFUSED = {
    "clipped": (after_backward(lambda m, o, z: nn.utils.clip_grad_norm_(m.parameters(), 1.0)), "a gradient is gone"),
    "clipped by us": (after_backward(lambda m, o, z: z.clip_grad_norm_(1.0)), "a gradient is gone"),
    "clipped by value": (
        after_backward(lambda m, o, z: nn.utils.clip_grad_value_(m.parameters(), 1.0)),
        "a gradient is gone",
    ),
    "read": (after_backward(lambda m, o, z: first_gradient(m).full_tensor()), "a gradient is gone"),
    "edited": (after_backward(lambda m, o, z: first_gradient(m).mul_(2)), "a gradient is gone"),
    "zeroed": (after_backward(lambda m, o, z: o.zero_grad(set_to_none=False)), "zero_grad() with set_to_none=True"),
    "backward twice": (after_backward(lambda m, o, z: backward(m)), "a second backward in one step"),
    "not cleared": (after_backward(lambda m, o, z: (o.step(), backward(m))), "gradients were not cleared"),
    "under no_sync": (unsynced, "no_sync() adds up gradients"),
    "by a closure": (lambda m, o, z: o.step(lambda: backward(m)), "a closure asks for more than one backward"),
    "a scaled loss": (scaled, "a GradScaler scaled this loss"),
    "a scaled loss beside another": (scaled_beside_another, "a GradScaler scaled this loss"),
    "beside averages": (swapped, "the weights are the averages"),
    "another rate": (rated, "the options of an optimizer changed between backward and step()"),
    "step twice": (after_backward(lambda m, o, z: (o.step(), o.step())), "a second step() after one backward"),
    "saved in a step": (after_backward(lambda m, o, z: z.save("never")), "saving between backward"),
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("stage", [0, 3])
def test_what_cannot_be_done_any_more_is_refused(stage, what):
    model, (optimizer,), zero = sharded(stage=stage)
    train(model, [optimizer], zero, steps=1)
    act, said = REFUSED[what]
    with pytest.raises(StateError) as error:
        act(model, optimizer, zero)
    assert said in str(error.value)
    assert "without optimizer_in_backward=True" in str(error.value) or what == "saved in a step"


class Unknown(torch.optim.SGD):
    pass


SETTINGS = {
    "an optimizer that goes over all": (lambda m: [torch.optim.LBFGS(m.parameters())], {"stage": 0}, "LBFGS"),
    "an optimizer nobody knows": (lambda m: [Unknown(m.parameters())], {"stage": 0}, "Unknown"),
    "no optimizer": (lambda m: [], {}, "nothing is stepped"),
    "numbers looked at": (adamw, {"precision": Precision(nonfinite="skip")}, "nonfinite='skip'"),
    "gradients elsewhere": (adamw, {"offload": Offload(gradients="cpu")}, "gradients rest nowhere"),
    "one copy": (adamw, {"offload": Offload(parameters="shared")}, "read by others while a rank updates them"),
}


@pytest.mark.parametrize("what", SETTINGS)
def test_what_needs_all_gradients_is_refused_at_once(what):
    make, settings, said = SETTINGS[what]
    model = models.build("gpt")
    kinds = [type(param) for param in model.parameters()]
    with pytest.raises(UserError) as error:
        zeroshard.shard(model, make(model), optimizer_in_backward=True, **settings)
    assert said in str(error.value) and "optimizer_in_backward=True" in str(error.value)
    assert [type(param) for param in model.parameters()] == kinds
    with pytest.raises(UserError, match="must be True or False"):
        zeroshard.shard(model, adamw(model), optimizer_in_backward="yes")


def one_rank_differs(what, stage):
    """What each rank hears, then the weights of two more steps as if nothing had been."""
    model, (optimizer,), zero = sharded(stage=stage)
    train(model, [optimizer], zero, steps=1)
    try:
        if what == "accumulates":
            with zero.no_sync() if zero.rank else contextlib.nullcontext():
                backward(model)
        else:
            optimizer.param_groups[0]["lr"] = 0.25 if zero.rank else 0.5
            backward(model)
    except (StateError, PeerError) as error:
        told = str(error)
    optimizer.param_groups[0]["lr"] = 1e-2
    train(model, [optimizer], zero, steps=2, first=1)
    return told, everything(model, [optimizer], zero)


def undisturbed(stage):
    parts = sharded(stage=stage)
    train(*parts)
    return everything(*parts)


@pytest.mark.row(106)
@pytest.mark.parametrize("what", ["accumulates", "has another rate"])
def test_what_one_rank_does_all_ranks_refuse_before_anything_is_updated(what, stage):
    told, wanted = ranks.run(2, one_rank_differs, what, stage), ranks.run(2, undisturbed, stage)
    for (said, got), want in zip(told, wanted, strict=True):
        assert ("no_sync" if what == "accumulates" else "'lr': 0.25") in said
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


# ---------------------------------------------------------------------------------------------------------- exceptions


def struck(stage, after, folder):
    """In step 2 rank 1 fails in backward, before or after buckets were updated: what each rank hears when it goes on,
    and what it has after a checkpoint was loaded where it was told to."""
    model, optimizers, zero = sharded(stage=stage, layout=SMALL)
    train(model, optimizers, zero, steps=1)
    zero.save(folder / "1")
    loss, told = models.loss("gpt", model, models.batch("gpt", 1, zero.rank)), ""

    def fail(_):
        raise RuntimeError("struck")

    if zero.rank == 1 and after:
        handle = model.embed.weight.register_post_accumulate_grad_hook(fail)
    elif zero.rank == 1:
        handle = loss.register_hook(fail)
    for attempt in range(4):
        try:
            if attempt == 0:
                loss.backward()
            train(model, optimizers, zero, steps=2, first=1)
            break
        except (StateError, PeerError) as error:
            told += str(error)
            if "zero.load(...) the last checkpoint" in str(error):
                zero.load(folder / "1")
        except RuntimeError:
            handle.remove()
        optimizers[0].zero_grad()
    return told, everything(model, optimizers, zero)


@pytest.mark.row(106)
@pytest.mark.parametrize("after", [True, False], ids=["some updated", "none updated"])
def test_an_exception_in_backward_is_said_where_it_left_weights_of_no_step(tmp_path, stage, after):
    wanted = ranks.run(2, undisturbed_in_small_buckets, stage)
    for (told, got), want in zip(ranks.run(2, struck, stage, after, tmp_path), wanted, strict=True):
        assert ("an exception ended step 2 while it updated the weights" in told) == after
        assert ("zero.load(...) the last checkpoint" in told) == after
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def unwritten(stage, folder):
    """As above, where rank 1 cannot update the last bucket, of which no rank hears before the step."""
    model, optimizers, zero = sharded(stage=stage, layout=SMALL)
    step, fails, calls, told = bucket_step.Alone.step, 0, [], ""

    def count(self, *args):
        calls.append(self)
        if zero.rank == 1 and len(calls) == fails:
            raise TierError("the disk is gone")
        step(self, *args)

    bucket_step.Alone.step = count
    try:
        train(model, optimizers, zero, steps=1)
        zero.save(folder / "1")
        fails = 2 * len(calls)
        for _ in range(4):
            try:
                train(model, optimizers, zero, steps=2, first=1)
                break
            except (StateError, PeerError, TierError) as error:
                told += str(error)
                if "zero.load(...) the last checkpoint" in str(error):
                    zero.load(folder / "1")
            optimizers[0].zero_grad()
    finally:
        bucket_step.Alone.step = step
    return told, everything(model, optimizers, zero)


@pytest.mark.full
@pytest.mark.row(106)
def test_an_update_that_fails_last_is_an_exception_too(tmp_path, stage):
    wanted = ranks.run(2, undisturbed_in_small_buckets, stage)
    for (told, got), want in zip(ranks.run(2, unwritten, stage, tmp_path), wanted, strict=True):
        assert "an exception ended step 2 while it updated the weights" in told
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def undisturbed_in_small_buckets(stage):
    parts = sharded(stage=stage, layout=SMALL)
    train(*parts)
    return everything(*parts)


@pytest.mark.row(106)
@pytest.mark.parametrize("stage", [0, 3])
def test_one_rank_goes_on_and_says_so(stage, caplog):
    model, optimizers, zero = sharded(stage=stage, layout=SMALL)

    def fail(_):
        raise RuntimeError("struck")

    handle = model.embed.weight.register_post_accumulate_grad_hook(fail)
    with pytest.raises(RuntimeError, match="struck"):
        backward(model)
    handle.remove()
    optimizers[0].zero_grad()
    with caplog.at_level(logging.WARNING):
        train(model, optimizers, zero, steps=1)
    assert "an exception ended step 1 while it updated the weights: one rank goes on" in caplog.text


# -------------------------------------------------------------------------------------------------------- in other code


def evaluated_and_edited(early, stage):
    """Weights are those of the next step right after backward; edits count, and so does what is frozen and thawed."""
    model, optimizers, zero = sharded(early, stage=stage, layout=SMALL)
    losses = []
    for step in range(4):
        for param in model.blocks[0].parameters():
            param.requires_grad_(step != 1)
        backward(model, step, zero.rank)
        if not early:
            optimizers[0].step()
        with torch.no_grad():
            losses.append(models.loss("gpt", model, models.batch("gpt", 9, zero.rank)).item())
        if early:
            optimizers[0].step()
        optimizers[0].zero_grad()
        with zero.gathered(), torch.no_grad():
            model.head.weight.mul_(0.9)
    return losses, everything(model, optimizers, zero)


def penalised(early, stage):
    model, optimizers, zero = sharded(early, name="mlp", stage=stage, layout=SMALL)
    for step in range(2):
        batch = models.batch("mlp", step, zero.rank)
        inputs = batch[0].clone().requires_grad_()
        found = torch.autograd.grad(model(inputs).sum(), inputs)[0]
        (models.loss("mlp", model, batch) * found.norm()).backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
    return everything(model, optimizers, zero)


def test_derivatives_of_the_inputs_update_nothing(stage):
    early, ordinary = (ranks.run(2, penalised, each, stage) for each in (True, False))
    for mine, theirs in zip(early, ordinary, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_weights_between_backward_and_step_are_the_new_ones(stage):
    early, ordinary = (ranks.run(2, evaluated_and_edited, each, stage) for each in (True, False))
    for (losses, tensors), (want, others) in zip(early, ordinary, strict=True):
        assert losses == want
        assert all(torch.equal(a, b) for a, b in zip(tensors, others, strict=True))


def test_a_second_gradient_is_refused_without_saying_that_the_step_can_be_repeated():
    """The optimizer has used the first: waiting for the end would not bring it back."""
    early, late = (str(second_gradient(["w"], *told)) for told in (InBackward.second, REDUCED))
    assert "used by the optimizer in backward" in early and "without optimizer_in_backward=True" in early
    assert "repeat the step" in late and "repeat" not in early


def refused_where_the_program_ends(stage):
    """What each rank hears of a second backward of a kept graph, where rank 1's program ends by it at once."""
    model, (optimizer,), zero = sharded(stage=stage)
    train(model, [optimizer], zero, steps=1)
    link = zero._engine.group._link
    posted = link._posted

    def late(*what):
        if zero.rank == 0:
            time.sleep(0.5)
        return posted(*what)

    link._posted = late
    loss = models.loss("gpt", model, models.batch("gpt", 0, zero.rank))
    loss.backward(retain_graph=True)
    try:
        loss.backward()
    except (StateError, PeerError) as error:
        if zero.rank == 1:
            sys.last_value = error
            groups._last_words(weakref.ref(link.groups))
            del sys.last_value
        return f"{type(error).__name__}: {error}"


@pytest.mark.row(106)
def test_a_refusal_is_every_ranks_also_where_it_ends_a_program(stage):
    """A rank that leaves with it has not left before all others could hear of it."""
    told = ranks.run(2, refused_where_the_program_ends, stage)
    for rank, said in enumerate(told):
        assert said.startswith("StateError: a second backward in one step") and f"rank {rank}, backward" in said, said


def updated_by_hand(takes, given):
    """A hook that updates the weight by its gradient, or looks at it, where an optimizer is given or none."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1) if given else None, stage=0)

    def hook(param):
        if takes:
            with torch.no_grad():
                param.data.add_(param.grad, alpha=-0.1)
            param.grad = None

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(hook)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()


@pytest.mark.parametrize(("takes", "given", "times"), [(True, False, 1), (False, False, 0), (True, True, 0)])
def test_an_update_by_hand_inside_backward_is_warned_of_once(caplog, takes, given, times):
    """Each rank would update by its own gradient: where no optimizer has the parameter, and the hook drops the gradient."""
    caplog.set_level("WARNING", logger="zeroshard")
    with zeroshard.world(2) as world:
        world.run(updated_by_hand, takes, given)
    told = [each.getMessage() for each in caplog.records if "away inside backward" in each.getMessage()]
    assert len(told) == 2 * times  # one on each rank
    assert all("parameter '1." in each and "optimizer_in_backward=True" in each for each in told)
