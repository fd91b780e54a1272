"""Hugging Face Accelerate: `ZeroAccelerator` trains as the plain `Accelerator` with DDP does, to the bit.

Loops are written once and run under both. Two ranks: with more, DDP's all-reduce adds in an order of its own.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ranks
import zeroshard
from trainers import LIMIT, fresh, run_example
from zeroshard.errors import StateError, UserError

accelerate = pytest.importorskip("accelerate")
pytestmark = pytest.mark.trainers

STAGES = (0, 1, 2, 3)


def accelerator(stage, **options):
    """Plain Accelerate where there is no stage."""
    from zeroshard.integrations.accelerate import ZeroAccelerator

    fresh()
    return (
        accelerate.Accelerator(cpu=True, **options)
        if stage is None
        else ZeroAccelerator(cpu=True, stage=stage, **options)
    )


class Model(nn.Module):
    """Tied weights, a buffer that training changes, dropout."""

    def __init__(self, *, alike=False):
        """alike: what it computes does not depend on the number of ranks."""
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 48), nn.GELU(), nn.Linear(48, 16)) for _ in range(2))
        self.norm = nn.Identity() if alike else nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.0 if alike else 0.1)
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = hidden + self.drop(block(hidden))
        return self.head(self.norm(hidden.transpose(1, 2)).transpose(1, 2))


def prepared(made, *, alike=False, separately=False):
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 32, (24, 9), generator=generator)
    loader = torch.utils.data.DataLoader(tokens, batch_size=2, shuffle=True)
    model = Model(alike=alike)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 4))
    if separately:
        return made.prepare(model), made.prepare(optimizer), made.prepare(loader), made.prepare(scheduler)
    return made.prepare(model, optimizer, loader, scheduler)


def train(made, model, optimizer, loader, scheduler, *, clip=None, first=0, last=2):
    """Losses of epochs `first` to `last`, gathered from all ranks."""
    losses = []
    for epoch in range(first, last):
        loader.set_epoch(epoch)
        for batch in loader:
            with made.accumulate(model):
                with made.autocast():
                    loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
                made.backward(loss)
                if clip and made.sync_gradients:
                    made.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses += made.gather(loss.detach().reshape(1)).tolist()
    return losses


def weights(made, model):
    return {name: tensor.tolist() for name, tensor in made.get_state_dict(model).items()}


def runs(stages, options, **how):
    found = []
    for stage in stages:
        made = accelerator(stage, **options)
        parts = prepared(made, separately=how.get("separately", False))
        losses = train(made, *parts, clip=how.get("clip"))
        state = weights(made, parts[0])
        found.append((losses, parts[3].get_last_lr(), state if ranks.rank() == 0 else None))
        if stage is not None:
            assert made.zero.stage == stage and made.unwrap_model(parts[0]) is parts[0]
            assert bool(state) == (ranks.rank() == 0)
    return found


OPTIONS = {
    "plain": ({}, {}),
    "accumulation": ({"gradient_accumulation_steps": 3}, {"separately": True}),
    "bf16": ({"mixed_precision": "bf16", "gradient_accumulation_steps": 2}, {}),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_the_bits_are_those_of_ddp(name):
    """Losses of every step on every rank, learning rates, final weights and buffers: equal at stages 0-3."""
    options, how = OPTIONS[name]
    for rank, (plain, *sharded) in enumerate(
        ranks.run(2, runs, (None, *STAGES), options, group="env", timeout=LIMIT, **how)
    ):
        assert len(plain[0]) == 24 and (rank or len(plain[2]) == 15)
        for found in sharded:
            assert found == plain


def clipped(stages):
    found = []
    for stage in stages:
        made = accelerator(stage)
        model, optimizer, loader, _ = prepared(made)
        norms = []
        for batch in loader:
            made.backward(model(batch).logsumexp(-1).square().sum())
            norms.append(made.clip_grad_norm_(model.parameters(), 0.5).item())
            optimizer.step()
            optimizer.zero_grad()
        found.append((norms, weights(made, model)))
    return found


def test_clipping_is_alike_at_all_stages():
    """By norms that are exact sums, so that of DDP they differ in the last bits."""
    for plain, *sharded in ranks.run(2, clipped, (None, *STAGES), group="env", timeout=LIMIT):
        assert all(found == sharded[0] for found in sharded)
        assert sharded[0][0][0] == pytest.approx(plain[0][0], rel=1e-6)  # later weights differ a little, too
        assert sharded[0][0] == pytest.approx(plain[0], rel=1e-3)
        assert min(sharded[0][0]) > 0.5


def half_a_run(folder, stage, first, last, accumulation, saves):
    """Epochs `first` to `last` of a run whose checkpoint, if it is not the first half, is in the folder."""
    order = accelerate.utils.DataLoaderConfiguration(use_seedable_sampler=True, data_seed=7)  # by epoch alone
    options = {"gradient_accumulation_steps": accumulation, "dataloader_config": order}
    if folder is not None:
        naming = accelerate.utils.ProjectConfiguration(folder, automatic_checkpoint_naming=True)
        options["project_config"] = naming
    made = accelerator(stage, **options)
    model, optimizer, loader, _ = prepared(made, alike=True)
    extra = Counted()
    made.register_for_checkpointing(extra)
    if first:
        made.load_state()
        assert extra.number == 7
    losses = train(made, model, optimizer, loader, Still(), first=first, last=last)
    if saves:
        extra.number = 7
        made.save_state()
    return losses, weights(made, model)


class Counted:
    number = 0

    def state_dict(self):
        return {"number": self.number}

    def load_state_dict(self, state):
        self.number = state["number"]


class Still:
    """A scheduler that leaves rates alone: Accelerate steps one as often as there are ranks."""

    def step(self):
        pass


def test_a_run_goes_on_from_save_state(tmp_path):
    """Saved on two ranks at stage 3: on two ranks at stage 1, and on one that accumulates two micro-batches, the second
    half has the bits of a run that never stopped."""
    whole = ranks.run(2, half_a_run, None, 2, 0, 2, 1, False, group="env", timeout=LIMIT)[0]
    first = ranks.run(2, half_a_run, tmp_path, 3, 0, 1, 1, True, group="env", timeout=LIMIT)[0]
    again = ranks.run(2, half_a_run, tmp_path, 1, 1, 2, 1, False, group="env", timeout=LIMIT)[0]
    alone = ranks.run(1, half_a_run, tmp_path, 0, 1, 2, 2, False, group="env", timeout=LIMIT)[0]
    assert first[0] + again[0] == whole[0] == first[0] + alone[0]
    assert again[1] == whole[1] == alone[1]


def saved_whole(folder):
    made = accelerator(3)
    model = prepared(made)[0]
    state = made.get_state_dict(model)
    made.save_model(model, folder)
    return {name: tensor.tolist() for name, tensor in state.items()}, len({id(tensor) for tensor in state.values()})


def test_whole_weights(tmp_path):
    """On rank 0, with ties as they are; and `save_model` writes what Accelerate's own loader reads."""
    (state, tensors), other = ranks.run(2, saved_whole, tmp_path, group="env", timeout=LIMIT)
    assert other == ({}, 0)
    assert tensors == len(state) - 1  # the head is the embedding
    model = Model()
    accelerate.load_checkpoint_in_model(model, str(tmp_path))
    assert {name: tensor.tolist() for name, tensor in model.state_dict().items()} == state


def test_the_optimizer_inside_accelerates_wrapper_is_sharded():
    """`shard` takes what `Accelerator.prepare` has made of an optimizer."""
    ends = []
    for wrap in (False, True):
        made = accelerator(None)
        model = Model(alike=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        optimizer = made.prepare(optimizer) if wrap else optimizer
        zero = zeroshard.shard(model, optimizer, stage=3)
        model(torch.arange(8).reshape(2, 4)).square().sum().backward()
        optimizer.step()
        with zero.gathered():
            ends.append({name: tensor.tolist() for name, tensor in model.state_dict().items()})
    assert ends[0] == ends[1]


def test_a_model_on_meta_is_prepared():
    """Its own `reset_parameters` runs, on the accelerator's device."""
    made = accelerator(3)
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    model, optimizer = made.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    made.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    assert made.get_state_dict(model)["weight"].device.type == "cpu"


def test_what_cannot_work_is_refused():
    with pytest.raises(UserError, match=r"(?s)ZeroAccelerator takes no such argument.*did you mean stage=1\?"):
        accelerator(3, stge=1)
    plugin = accelerate.utils.DistributedDataParallelKwargs()
    with pytest.raises(UserError, match=r"(?s)no DistributedDataParallel.*Layout"):
        accelerator(3, kwargs_handlers=[plugin])
    made = accelerator(3)
    model = made.prepare(Model(alike=True))
    with pytest.raises(StateError, match=r"(?s)0.*prepare\(model, optimizer\)"):
        _ = made.zero
    assert made.get_state_dict(model).keys() == Model(alike=True).state_dict().keys()  # it is not sharded
    loss = model(torch.arange(8).reshape(2, 4)).sum()
    with pytest.raises(StateError, match=r"(?s)model Model.*prepare\(model, optimizer\)"):
        made.backward(loss)
    with pytest.raises(UserError, match="zero.join"), made.join_uneven_inputs([model], even_batches=False):
        pass
    with made.join_uneven_inputs([model]):
        pass
    for register in (made.register_save_state_pre_hook, made.register_load_state_pre_hook):
        with pytest.raises(UserError, match="register_for_checkpointing"):
            register(print)


def test_the_example_is_short_and_runs(tmp_path):
    run_example("accelerate_loop", tmp_path)
