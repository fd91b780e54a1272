"""`Layout(recompute=...)`: forwards that run again in backward, without a line in the model."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ranks
import selection
import zeroshard
from zeroshard import Layout
from zeroshard.errors import UserError
from zeroshard.planner.simulate import simulate

STAGES = (0, 1, 2, 3)


class Block(nn.Module):
    """Dropout makes it draw the same numbers again; `by_hand` is what a model does without `Layout(recompute=...)`."""

    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.wide, self.narrow, self.by_hand = nn.Linear(24, 96), nn.Linear(96, 24), by_hand

    def body(self, x):
        return self.narrow(F.dropout(F.gelu(self.wide(x)), 0.2))

    def forward(self, x, *, scale):
        return x + scale * self.body(x)


class Blocks(nn.Module):
    def __init__(self, by_hand: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(by_hand) for _ in range(4))
        self.head = nn.Linear(24, 1)

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, scale=0.5, use_reentrant=False) if block.by_hand else block(x, scale=0.5)
        return self.head(x).square().mean()


def blocks(by_hand: bool = False):
    torch.manual_seed(0)
    return {
        "model": Blocks(by_hand),
        "optimizer": lambda params: torch.optim.AdamW(params, lr=1e-2),
        "batch": lambda step, index: torch.randn(32, 24, generator=torch.Generator().manual_seed(100 * step + index)),
        "loss": lambda model, x: model(x),
    }


def recomputed(stage, recompute, by_hand=False):
    """Weights and losses after three steps, and what the last one did: recomputations, gathers, bytes sent, peaks."""
    parts = blocks(by_hand)
    model, optimizer = parts["model"], parts["optimizer"](parts["model"].parameters())
    zero = zeroshard.shard(model, optimizer, stage=stage, layout=Layout(recompute=recompute))
    torch.manual_seed(7 + ranks.rank())
    losses = []
    for step in range(3):
        if step == 2:
            zero.record()
        loss = parts["loss"](model, parts["batch"](step, ranks.rank()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    events = zero.events()
    with torch.no_grad():
        model(parts["batch"](0, 0))  # nothing to recompute
    with zero.gathered():
        weights = [parameter.detach().clone() for parameter in model.parameters()]
    found = [(event.verb, event.unit, event.logical) for event in events if event.verb in ("recompute", "gather")]
    return losses, weights, found, {phase: peak.total for phase, peak in zero.ledger().phases.items()}


@pytest.mark.parametrize("stage", selection.STAGES)
def test_the_same_bits_messages_and_peaks_as_with_torchs_own_checkpoint_around_each_block(stage):
    for rank, plain in enumerate(ranks.run(2, recomputed, stage, False)):
        again, by_hand = (ranks.run(2, recomputed, stage, *how)[rank] for how in ((True,), (False, True)))
        assert again[0] == plain[0] == by_hand[0]
        assert all(torch.equal(a, b) for a, b in zip(again[1], plain[1], strict=True))
        assert again[2:] == by_hand[2:]
        done = [unit for verb, unit, _ in again[2] if verb == "recompute"]
        assert done == [f"blocks.{number}" for number in (3, 2, 1, 0)]
        assert not [verb for verb, *_ in plain[2] if verb == "recompute"]


class Plain(nn.Module):
    """A block that adds nothing to what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(24, 96), nn.Linear(96, 24)

    def forward(self, x):
        return self.narrow(torch.tanh(self.wide(x)))


def most_gathered():
    """Bytes of gathered weights when they are most, in a backward that computes each block again."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Plain() for _ in range(6)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    layout = Layout(units=["?"], recompute=True)
    zero = zeroshard.shard(model, optimizer, stage=3, layout=layout)
    for step in range(3):
        model(torch.randn(8, 24, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    held = zero.ledger().phases["backward"].held
    return held.get("gather", 0) + held.get("prefetch", 0)


def test_backward_holds_three_gathered_units():
    """The one computed again, the one before it in backward, and one gathered ahead."""
    nbytes = 4 * 4864  # of 4,728 elements, rounded up for two ranks
    assert ranks.run(2, most_gathered) == [3 * nbytes] * 2


def test_only_the_units_named_run_again():
    (losses, _, found, _), _ = ranks.run(2, recomputed, 3, ("blocks.[02]",))
    assert [unit for verb, unit, _ in found if verb == "recompute"] == ["blocks.2", "blocks.0"]
    assert losses == ranks.run(2, recomputed, 3, False)[0][0]


@pytest.mark.full
def test_activations_are_planned_as_with_torchs_own_checkpoint():
    plain, again, by_hand = (
        simulate(make, ranks=2, layout=Layout(recompute=recompute))
        for make, recompute in ((blocks, False), (blocks, True), (lambda: blocks(by_hand=True), False))
    )
    assert again.activations == by_hand.activations < plain.activations / 3
    assert again.ledger.phases == by_hand.ledger.phases
    assert again.flops == by_hand.flops > plain.flops


def test_what_names_no_unit_is_refused():
    with pytest.raises(UserError, match=r"(?s)Layout.recompute matches no unit.*blokcs.*did you mean 'blocks"):
        zeroshard.shard(Blocks(), None, stage=0, layout=Layout(recompute=["blokcs.0"]))
    with pytest.raises(UserError, match=r"Layout.recompute takes a sequence"):
        Layout(recompute="blocks.*")


def test_a_shard_that_fails_leaves_the_forward_as_it_was():
    model = Blocks()
    with pytest.raises(UserError):
        zeroshard.shard(model, torch.optim.LBFGS(model.parameters()), stage=3, layout=Layout(recompute=True))
    assert all("forward" not in block.__dict__ for block in model.blocks)


def with_tensors_of_its_own(stage):
    """The gradients of tensors that `functional_call` puts in place of all weights, by plain PyTorch and sharded."""
    found = []
    for sharded in (False, True):
        model = blocks()["model"].eval()
        if sharded:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            zeroshard.shard(model, optimizer, stage=stage, layout=Layout(recompute=True))
        torch.manual_seed(1)
        own = {name: torch.randn(each.shape).requires_grad_() for name, each in model.named_parameters()}
        torch.func.functional_call(model, own, (torch.ones(2, 24),)).backward()
        found.append({name: each.grad for name, each in own.items()})
    return {name: torch.equal(grad, found[1][name]) for name, grad in found[0].items()}


@pytest.mark.parametrize("stage", STAGES)
def test_a_call_with_other_tensors_for_weights_keeps_its_activations(stage):
    for equal in ranks.run(2, with_tensors_of_its_own, stage):
        assert all(equal.values()), equal


def evaluated_between(stage, recompute):
    """Weights after two steps, in which `eval()` and `train()` come between each forward and its backward."""
    parts = blocks()
    model, optimizer = parts["model"], parts["optimizer"](parts["model"].parameters())
    zero = zeroshard.shard(model, optimizer, stage=stage, layout=Layout(recompute=recompute))
    modes = []
    for step in range(2):
        model.train()
        torch.manual_seed(step)
        loss = model(parts["batch"](step, 0))
        model.eval()
        loss.backward()
        modes += [each.training for each in model.modules()]
        optimizer.step()
    with zero.gathered():
        return [each.detach().clone() for each in model.parameters()], any(modes)


@pytest.mark.row(24)
@pytest.mark.parametrize("stage", STAGES)
def test_a_forward_runs_again_in_the_mode_that_it_ran_in(stage):
    (kept, _), (again, training) = (ranks.run(2, evaluated_between, stage, recompute)[0] for recompute in (False, True))
    assert all(map(torch.equal, kept, again)) and not training


class Writing(nn.Module):
    """What it writes in one call it reads in the next: a center, a counter, a large table, statistics of a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(24, 24), nn.BatchNorm1d(24)
        self.register_buffer("center", torch.zeros(24))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.zeros(3000, 24))
        self.register_buffer("large", torch.ones(3000, 24))  # which no call writes

    def forward(self, x):
        y = self.norm(self.linear(x))
        with torch.no_grad():
            self.center.lerp_(y.mean(0), 0.5)
            self.table[:7].add_(y.mean(0))
            self.calls += 1
        return torch.tanh(y - self.center) * self.calls + self.table[3] * self.large[0]


class Mixed(nn.Module):
    """It tells its arguments apart by whether they are one tensor, as `nn.MultiheadAttention` does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.attend = nn.Linear(24, 24), nn.MultiheadAttention(24, 2, batch_first=True)

    def forward(self, query, *, key):
        return self.linear(query) * (2.0 if key is query else 1.0) + self.attend(query, key, key)[0]


class Kept(nn.Module):
    def __init__(self, kind) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x) if isinstance(block, Writing) else block(x, key=x)
        return x


def kept(kind, stage, recompute, offload):
    """All weights and buffers after three steps of two backwards."""
    torch.manual_seed(0)
    model = Kept(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    layout = Layout(recompute=recompute, units=[kind])
    zero = zeroshard.shard(model, optimizer, stage=stage, layout=layout, offload=offload)
    for _ in range(3):
        for _ in range(2):
            loss = model(torch.randn(5, 24) if kind is Writing else torch.randn(2, 5, 24)).square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with zero.gathered():
        return {name: each.detach().clone() for name, each in [*model.named_parameters(), *model.named_buffers()]}


@pytest.mark.row(24)
@pytest.mark.parametrize("offload", [None, zeroshard.Offload(activations="cpu")], ids=["device", "host"])
@pytest.mark.parametrize("kind", [Writing, Mixed])
@pytest.mark.parametrize("stage", STAGES)
def test_a_call_finds_buffers_and_arguments_as_it_found_them(stage, kind, offload):
    once, again = (ranks.run(2, kept, kind, stage, recompute, offload)[0] for recompute in (False, True))
    assert [name for name, each in once.items() if not torch.equal(each, again[name])] == []
