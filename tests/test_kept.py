"""What an optimizer of other packages keeps, wherever: in options that its first step makes, under names among its states,
in another optimizer inside. It is saved and loaded, or refused by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ranks as rank_processes
import reference
import zeroshard
from zeroshard.errors import CheckpointError, UserError


class Counting(torch.optim.Optimizer):
    """It makes options in its first step, as most of pytorch_optimizer's do."""

    elementwise = True

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            group.setdefault("last", [0.0, 1.0])[0] = group["lr"] / group["step"]
            group.setdefault("norm", torch.zeros(1, dtype=torch.float64)).add_(1.5)
            for p in group["params"]:
                if p.grad is not None:
                    half = torch.zeros_like(p, dtype=torch.bfloat16)
                    self.state[p].setdefault("half", half).lerp_(p.grad.bfloat16(), 0.25)
                    self.state[p].setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, 0.5)
                    p.sub_(self.state[p]["mean"], alpha=group["last"][0]).sub_(self.state[p]["half"], alpha=0.01)


class Named(Counting):
    """It keeps a state that is no parameter's, as MADGRAD does: from its first step on, or before."""

    def __init__(self, params, early):
        super().__init__(params)
        if early:
            self.state["k"] = 0

    def step(self, closure=None):
        super().step()
        self.state["k"] = torch.ones(1)


class Half(torch.optim.Optimizer):
    """It sets some of the fields that torch's class has, and calls none of its methods, as pytorch_optimizer's Magma."""

    elementwise = True

    def __init__(self, inner):
        self.param_groups, self.state, self.defaults = inner.param_groups, inner.state, inner.defaults
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}


def build(kind=Counting, *args):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 5))
    return model, kind(model.parameters(), *args)


def train(model, optimizer, steps):
    for step in steps:
        model(torch.ones(2, 9) * (step + 1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def saves(path, stage, steps):
    model, optimizer = build()
    zero = zeroshard.shard(model, optimizer, stage=stage)
    train(model, optimizer, range(steps))
    zero.save(path)


def goes_on(path, stage):
    model, optimizer = build()
    zero = zeroshard.shard(model, optimizer, stage=stage)
    assert zero.load(path).skipped == []
    made = optimizer.param_groups[0]["step"], optimizer.param_groups[0]["norm"].tolist()
    train(model, optimizer, range(2, 4))
    with zero.gathered():
        return made, reference.weights(model)


@pytest.mark.row(45)
@pytest.mark.parametrize("world", [1, 4])  # powers of two: each rank has the same batch, whose average is exact
def test_options_that_a_first_step_makes_are_loaded(tmp_path, stage, world):
    """As by torch's own load_state_dict, into an optimizer that has still to make them, tensors as tensors; and states in
    a dtype that is not the parameter's stay in it: the run goes on bit for bit."""
    model, optimizer = build()
    train(model, optimizer, range(4))
    rank_processes.run(2, saves, tmp_path / "a", 3, 2)
    found = rank_processes.run(world, goes_on, tmp_path / "a", stage) if world > 1 else [goes_on(tmp_path / "a", stage)]
    for made, weights in found:
        assert made == (2, [3.0])
        reference.assert_same(weights, reference.weights(model))


def stepped_already(path):
    model, optimizer = build()
    zero = zeroshard.shard(model, optimizer, stage=2)
    train(model, optimizer, range(1))
    del optimizer.param_groups[0]["last"]
    with pytest.raises(CheckpointError, match=r"options \['last'\] are only on one side"):
        zero.load(path)


@pytest.mark.row(45)
def test_options_that_only_a_checkpoint_has_are_told_once(tmp_path, caplog):
    """By the log, with the optimizer's group: which they are, and that they were taken."""
    caplog.set_level("INFO", logger="zeroshard")

    def sharded():
        model = nn.Linear(6, 4)
        optimizer = Counting(model.parameters())
        return model, optimizer, zeroshard.shard(model, optimizer, stage=2)

    def saved_then_loaded():
        model, optimizer, zero = sharded()
        model(torch.ones(1, 6)).sum().backward()
        optimizer.step()
        zero.save(tmp_path / "a")
        _, other, again = sharded()
        again.load(tmp_path / "a")
        return other.param_groups[0]["step"]

    with zeroshard.world(2) as world:
        assert world.run(saved_then_loaded) == [1, 1]
    told = [each.getMessage() for each in caplog.records if "only the checkpoint had" in each.getMessage()]
    assert len(told) == 1 and "optimizer 0, group 0, ['last', 'norm', 'step']" in told[0]


def test_an_optimizer_that_has_stepped_refuses_options_that_it_lacks(ranks, tmp_path):
    ranks.run(2, saves, tmp_path / "a", 3, 2)
    ranks.run(2, stepped_already, tmp_path / "a")


@pytest.mark.parametrize("early", [True, False], ids=["there", "of the first step"])
def test_a_state_under_a_name_is_refused_by_name(stage, early):
    """At `shard`, where it is there and where the first step would make it."""
    model, optimizer = build(Named, early)
    with pytest.raises(UserError, match=r"(?s)Named.*state\['k'\].*option of"):
        zeroshard.shard(model, optimizer, stage=stage)


def test_a_class_that_sets_some_of_torchs_fields_is_refused_by_name(stage):
    model, optimizer = build()
    with pytest.raises(UserError, match=r"(?s)Half.*super\(\)\.__init__"):
        zeroshard.shard(model, Half(optimizer), stage=stage)


class Beside(torch.optim.SGD):
    """SGD with a tensor for each parameter (or for each matrix alone) in an attribute: masks of pruning, or momentum."""

    whole = True

    def __init__(self, params, what):
        super().__init__(params, 0.1)
        self.held = [p for group in self.param_groups for p in group["params"] if what != "matrices" or p.dim() > 1]
        made = [torch.rand_like(p) if what == "masks" else torch.zeros_like(p) for p in self.held]
        self.beside = {"of each": dict(enumerate(made))} if what == "momentum" else [made]
        del self.held

    def tensors(self):
        return list(self.beside["of each"].values()) if isinstance(self.beside, dict) else self.beside[0]

    @torch.no_grad()
    def step(self, closure=None):
        held = [p for group in self.param_groups for p in group["params"]]
        held = held if len(self.tensors()) == len(held) else [p for p in held if p.dim() > 1]
        for p, tensor in zip(held, self.tensors(), strict=False):
            if p.grad is not None and isinstance(self.beside, dict):
                p.grad.copy_(tensor.mul_(0.5).add_(p.grad))
        super().step()
        for p, tensor in zip(held, self.tensors(), strict=False):
            if not isinstance(self.beside, dict):
                p.mul_(tensor)


def wide(what):
    """A model whose tensors are larger than a trial's, and such an optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(9, 70), nn.Tanh(), nn.Linear(70, 70), nn.Linear(70, 5))
    return model, Beside(model.parameters(), what)


def said_at_shard(build, stage, *args):
    with pytest.raises(UserError) as error:
        zeroshard.shard(*build(*args), stage=stage)
    return str(error.value)


@pytest.mark.parametrize("what", ["masks", "matrices", "momentum"])
@pytest.mark.parametrize("sharded", [1, 2, 3])
def test_a_tensor_for_each_parameter_in_an_attribute_is_refused_where_ranks_hold_parts(sharded, what):
    """The list would be paired with this rank's parts, which begin with another parameter."""
    with zeroshard.world(2) as world:
        for said in world.run(said_at_shard, wide, sharded, what):
            assert "an optimizer keeps a tensor for each parameter in an attribute" in said
            assert "Beside, optimizer 0, attribute 'beside'" in said
            assert "self.state[p]['beside'] = its tensor" in said


def test_momentum_in_an_attribute_is_refused_where_ranks_hold_all():
    """No checkpoint would have it, although the tensors are larger than a trial's."""
    said = said_at_shard(wide, 0, "momentum")
    assert "keeps what a step changes in an attribute" in said and "self.state[p]['beside'] = its tensor" in said


def test_masks_in_an_attribute_work_where_ranks_hold_all():
    model, optimizer = wide("masks")
    train(model, optimizer, range(2))
    sharded, same = wide("masks")
    zeroshard.shard(sharded, same, stage=0)
    train(sharded, same, range(2))
    reference.assert_same(reference.weights(sharded), reference.weights(model))


class Projected(Counting):
    """Its states are objects, as GaLore's projectors, which a step makes or `__init__`."""

    def __init__(self, params, early):
        super().__init__(params)
        if early:
            for p in self.param_groups[0]["params"]:
                self.state[p]["projector"] = Projector()

    def step(self, closure=None):
        super().step()
        for p in self.param_groups[0]["params"]:
            self.state[p]["projector"] = Projector()


class Projector:
    def __init__(self):
        self.rank = 2


@pytest.mark.parametrize("early", [True, False], ids=["there", "of the first step"])
def test_a_state_that_is_an_object_is_refused_by_name(stage, early):
    said = said_at_shard(build, stage, Projected, early)
    assert "keeps a state that is neither a tensor nor a number or text" in said
    assert "Projected, optimizer 0, optimizer.state[param]['projector']" in said
    assert "Projector with ['rank']" in said and "self.state[p]['projector_rank']" in said


class AtParameters(Counting):
    """Its momentum is an attribute of the parameter, made in its first step; one that it only reads is no state."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.momentum = getattr(p, "momentum", 0) * getattr(p, "decay", 0.5) + p.grad
                p.sub_(p.momentum, alpha=0.1)


class Forgetting(AtParameters):
    unsaved = ("momentum",)


def test_what_a_step_keeps_in_an_attribute_of_parameters_is_refused_by_name(stage):
    said = said_at_shard(build, stage, AtParameters)
    assert "AtParameters, optimizer 0, attribute 'momentum' of a parameter" in said
    assert "got: None before a trial's steps, of shape (8, 8) after" in said
    assert "self.state[p]['momentum'] in place of p.momentum" in said


def test_an_attribute_of_parameters_that_a_resumed_run_does_not_need_works(stage):
    model, optimizer = build(Forgetting)
    model[0].weight.decay = torch.full((7, 9), 0.25)
    train(model, optimizer, range(2))
    sharded, same = build(Forgetting)
    sharded[0].weight.decay = torch.full((7, 9), 0.25)
    zero = zeroshard.shard(sharded, same, stage=stage)
    train(sharded, same, range(2))
    with zero.gathered():
        reference.assert_same(reference.weights(sharded), reference.weights(model))


class Listing(Counting):
    """It walks a list of its own, and not its groups."""

    def __init__(self, params):
        super().__init__(params)
        self.pairs = [("a name", p) for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        for _, p in self.pairs:
            if p.grad is not None:
                p.sub_(p.grad, alpha=0.1)


def test_an_optimizer_that_walks_a_list_of_its_own_hears_of_its_groups(stage):
    said = said_at_shard(build, stage, Listing)
    assert "Listing, optimizer 0, attribute 'pairs'" in said
    assert "walk self.param_groups in step(): these are this rank's parts" in said


class Masking(torch.optim.SGD):
    """The cure of a list of masks: each is a state, made in `__init__`, which the trial has too."""

    elementwise = True

    def __init__(self, params):
        super().__init__(params, 0.1)
        for p in self.param_groups[0]["params"]:
            self.state[p]["mask"] = torch.arange(p.numel()).view(p.shape) % 3 > 0

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for p in self.param_groups[0]["params"]:
            p.mul_(self.state[p]["mask"])


class Norming(Masking):
    """It says that it is elementwise, and is not."""

    def step(self, closure=None):
        super().step()
        for p in self.param_groups[0]["params"]:
            p.data.div_(p.norm())


def of_kind(kind, stage):
    model, optimizer = build(kind)
    zero = zeroshard.shard(model, optimizer, stage=stage)
    train(model, optimizer, range(3))
    with zero.gathered():
        return reference.weights(model)


def test_states_made_at_construction_are_tried_and_cut(stage):
    model, optimizer = build(Masking)
    train(model, optimizer, range(3))
    with zeroshard.world(2) as world:
        for weights in world.run(of_kind, Masking, stage):
            reference.assert_same(weights, reference.weights(model))
        if stage:
            for said in world.run(said_at_shard, build, stage, Norming):
                assert "updates the half of a tensor otherwise than the whole" in said
