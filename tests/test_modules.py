"""Any module: whatever it looks like, the same bits as plain PyTorch accumulating the same micro-batches."""

from __future__ import annotations

import re
import threading
import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import models
import ranks as rank_processes
import reference
import zeroshard
from zeroshard import Comm, Layout, Offload
from zeroshard.engine.weights.bucket import Bucket
from zeroshard.errors import StateError, UserError

PLAIN = {
    "gpt": {},
    "gpt-tied": {"tied": True},
    "gpt-linear-head": {"tied": "linear"},
    "gpt-frozen": {"frozen": ("embed", "blocks.0")},
    "gpt-checkpoint": {"checkpoint": "nonreentrant"},
    "gpt-reentrant": {"checkpoint": "reentrant"},
    "gpt-tied-reentrant": {"tied": True, "checkpoint": "reentrant"},
    "mlp": {},
    "tiny": {},
    "degenerate": {},
    "integers": {},
    "scales": {},
    "scales-checkpoint": {"checkpoint": "nonreentrant"},
    "views": {},
    "mha": {},
    "lstm": {},
    "shared": {},
    "shared-checkpoint": {"checkpoint": "nonreentrant"},
    "aliased": {},
    "outside": {},
    "penalty": {},
    "lora": {},
    "unused": {},
    "layerdrop": {},
    "layerdrop-checkpoint": {"checkpoint": "nonreentrant"},
    "layerdrop-reentrant": {"checkpoint": "reentrant"},
    "branches": {},
    "auxiliary": {},
    **{f"outputs-{kind}": {"kind": kind} for kind in models.OUTPUTS},
}
STEPS = 3


def make(case: str) -> nn.Module:
    return models.build(case.split("-")[0], **PLAIN.get(case, {}))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def train(rank: int, world: int, case: str, stage: int, backwards: int = 2, **options):
    """A plain loop on a sharded model; returns the full weights."""
    name = case.split("-")[0]
    model = make(case)
    optimizer = adamw(model)
    zero = zeroshard.shard(model, optimizer, stage=stage, **options)
    assert (zero.rank, zero.world_size) == (rank, world)
    reference.loop(
        model, optimizer, partial(models.batch, name), partial(models.loss, name), rank, world, backwards, steps=STEPS
    )
    held = zero.ledger().held
    assert held.get("gather", 0) == 0 or case == "views", held
    with zero.gathered():
        return reference.weights(model)


def plain(case: str, world: int, backwards: int = 2):
    name = case.split("-")[0]
    model = make(case)
    reference.accumulate(
        model, adamw(model), partial(models.batch, name), partial(models.loss, name), world, backwards, steps=STEPS
    )
    return reference.weights(model)


SETTINGS = {  # every stage, and beside each another way to lay out or to send
    "stage0-tensors": [{"stage": 0}, {"stage": 2, "layout": Layout(bounds="tensor", bucket_mib=1e-3)}],
    "stage1-model": [{"stage": 1}, {"stage": 3, "layout": Layout(bounds="model"), "comm": Comm(prefetch=3)}],
    "stage2-small": [{"stage": 2}, {"stage": 3, "layout": Layout(bucket_mib=1e-3), "comm": Comm(overlap=False)}],
    "stage3-kept": [{"stage": 3}, {"stage": 3, "comm": Comm(release_after_forward=False)}],
}


def every_setting(world: int, case: str, settings: str) -> list[str]:
    """First difference from plain PyTorch, per setting."""
    rank = torch.distributed.get_rank() if world > 1 else 0
    want = plain(case, world)
    return [
        f"{setting}: {difference}"
        for setting in SETTINGS[settings]
        if (difference := reference.first_difference(train(rank, world, case, **setting), want))
    ]


@pytest.mark.row(10, 11, 18, 21, 22, 23, 24)
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("case", PLAIN)
@pytest.mark.parametrize("world", [1, 2, pytest.param(3, marks=pytest.mark.slow)], ids="ranks{}".format)
def test_any_module_equals_plain_pytorch(ranks, world, case, settings):
    """Stages 0-3, several layouts: after 3 steps of 2 micro-batches the weights equal one process's, with ==."""
    for differences in ranks.run(world, every_setting, world, case, settings):
        assert differences == []


@pytest.mark.full
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize(
    ("world", "case"),
    [
        pytest.param(
            world,
            case,
            id=f"ranks{world}-{case}",
            marks=[pytest.mark.slow] * (world == 4 and case not in {"gpt-reentrant", "branches"}),
        )
        for world in (3, 4)
        for case in ("gpt-tied", "gpt-reentrant", "layerdrop", "branches", "degenerate", "unused", "tiny")
    ],
)
def test_any_module_at_more_ranks(ranks, world, case, settings):
    """The same at three and four ranks, for the cases that depend on ranks most."""
    for differences in ranks.run(world, every_setting, world, case, settings):
        assert differences == []


def same_everywhere(world: int, case: str) -> list[str]:
    rank = torch.distributed.get_rank() if world > 1 else 0
    first = train(rank, world, case, 0)
    return [
        difference
        for stage in (1, 2, 3)
        if (difference := reference.first_difference(train(rank, world, case, stage), first))
    ]


@pytest.mark.parametrize("case", ["mixed", "batchnorm"])
@pytest.mark.parametrize("world", [1, 2, 3], ids="ranks{}".format)
def test_stages_agree_where_plain_pytorch_computes_something_else(ranks, world, case):
    """Masters of 16-bit parameters, and rank 0's running statistics, are zeroshard's own; stages agree with ==."""
    for differences in ranks.run(world, same_everywhere, world, case):
        assert differences == []


# --- buffers -----------------------------------------------------------------------------------------------------------


def buffers_after(buffers: str, stage: int):
    rank = torch.distributed.get_rank()
    model = models.build("batchnorm")
    optimizer = adamw(model)
    zeroshard.shard(model, optimizer, stage=stage, layout=Layout(buffers=buffers))
    seen = []
    for step in range(2):
        x, y = models.batch("batchnorm", step, rank)
        model.register_forward_pre_hook(lambda module, args: seen.append(module.layers[1].running_mean.clone()))
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return seen[-1], model.layers[1].running_mean.clone()


def test_buffers_are_rank_0s_before_each_training_forward(ranks, stage):
    """As in DDP; `Layout(buffers="local")` leaves each rank its own."""
    (before_0, after_0), (before_1, after_1) = ranks.run(2, buffers_after, "broadcast", stage)
    assert torch.equal(before_0, before_1) and not torch.equal(after_0, after_1)
    (before_0, _), (before_1, _) = ranks.run(2, buffers_after, "local", stage)
    assert not torch.equal(before_0, before_1)


def buffers_evaluated(buffers: str, stage: int):
    """What an evaluation after a training step sees, without gradients and in eval mode with them."""
    rank = torch.distributed.get_rank()
    model = models.build("batchnorm")
    optimizer = adamw(model)
    zeroshard.shard(model, optimizer, stage=stage, layout=Layout(buffers=buffers))
    x, y = models.batch("batchnorm", 0, rank)
    F.mse_loss(model(x), y).backward()
    optimizer.step()
    seen = []
    model.eval()
    for grad in (False, True):
        model.layers[1].running_mean += rank
        with torch.set_grad_enabled(grad):
            model(x)
        seen.append(model.layers[1].running_mean.clone())
    return seen


@pytest.mark.parametrize("stage", [1, 3])
def test_buffers_sent_always_are_rank_0s_in_evaluations_too(ranks, stage):
    """So with DDP, whose first forward after a training step sends them; by default each rank evaluates with its own."""
    first, second = ranks.run(2, buffers_evaluated, "always", stage)
    assert all(map(torch.equal, first, second))
    first, second = ranks.run(2, buffers_evaluated, "broadcast", stage)
    assert not any(map(torch.equal, first, second))


def rotary_twice(stage: int):
    """Two forwards before one backward, with a constant buffer that autograd saves."""

    class Rotary(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.linspace(0, 1, 5))
            self.linear = nn.Linear(5, 5)

        def forward(self, x):
            return self.linear(x) * self.table

    torch.manual_seed(0)
    model = Rotary()
    zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage)
    (model(torch.ones(2, 5)).sum() + model(torch.ones(2, 5)).sum()).backward()
    return True


def test_equal_buffers_are_not_written(ranks, stage):
    """Broadcasting a constant buffer between two forwards must not look like an edit to autograd."""
    assert ranks.run(2, rotary_twice, stage) == [True, True]


# --- freezing -------------------------------------------------------------------------------------------------------------


def toggled(world: int, stage: int):
    rank = torch.distributed.get_rank() if world > 1 else 0
    batches, loss = partial(models.batch, "gpt"), partial(models.loss, "gpt")

    def script(model, loop, *more):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        engine = zeroshard.shard(model, optimizer, stage=stage) if more else None
        for phase in range(4):
            model.blocks[0].requires_grad_(phase in (0, 2))
            model.blocks[2].requires_grad_(phase != 2)
            model.norm.requires_grad_(phase > 1)
            loop(model, optimizer, batches, loss, *more, world, 1, steps=2, first_step=2 * phase)
        return engine

    want = models.build("gpt", frozen=("norm", "blocks.0"))
    script(want, reference.accumulate)
    model = models.build("gpt", frozen=("norm", "blocks.0"))
    zero = script(model, reference.loop, rank)
    with zero.gathered():
        return reference.first_difference(reference.weights(model), reference.weights(want))


@pytest.mark.row(26)
@pytest.mark.parametrize("world", [1, 2, 3], ids="ranks{}".format)
def test_parts_frozen_and_unfrozen_in_mid_run(ranks, world, stage):
    """Parts frozen at construction and trained later, trained first and frozen later, and back: as in plain PyTorch."""
    assert ranks.run(world, toggled, world, stage) == [""] * world


# --- calls that are not the plain loop ---------------------------------------------------------------------------------------


def two_forwards(world: int, stage: int, separate: bool):
    rank = torch.distributed.get_rank() if world > 1 else 0

    def step(model, optimizer, index):
        losses = [models.loss("gpt", model, models.batch("gpt", s, index)) for s in (0, 1)]
        for loss in losses if separate else [sum(losses)]:
            loss.backward()

    want = models.build("gpt")
    optimizer = adamw(want)
    for index in range(world):
        step(want, optimizer, index)
    for p in want.parameters():
        p.grad.div_(world)
    optimizer.step()
    model = models.build("gpt")
    optimizer = adamw(model)
    zero = zeroshard.shard(model, optimizer, stage=stage)
    step(model, optimizer, rank)
    optimizer.step()
    with zero.gathered():
        return reference.first_difference(reference.weights(model), reference.weights(want))


@pytest.mark.row(23)
@pytest.mark.parametrize("world", [1, 2])
def test_two_forwards_before_one_backward(ranks, world, stage):
    """The sum of two losses, backward once: as in plain PyTorch."""
    assert ranks.run(world, two_forwards, world, stage, False) == [""] * world


@pytest.mark.full
def test_two_forwards_before_two_backwards_at_one_rank(ranks, stage):
    """Each backward is reduced by itself; at one rank that is plain PyTorch."""
    assert ranks.run(1, two_forwards, 1, stage, True) == [""]


def evaluated(stage: int, evaluate: bool):
    rank = torch.distributed.get_rank()
    model = models.build("gpt", tied="linear")
    optimizer = adamw(model)
    zero = zeroshard.shard(model, optimizer, stage=stage)
    for step in range(4):
        models.loss("gpt", model, models.batch("gpt", step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if evaluate:
            tokens = models.batch("gpt", 100 + step, rank)[0]
            model.eval()
            with torch.no_grad():
                model(tokens)
            with torch.inference_mode():
                model(tokens)
            # Generation: greedy, both ranks the same number of tokens, as the collectives ask.
            with torch.no_grad():
                start = tokens[:, :1]
                for _ in range(3):
                    start = torch.cat([start, model(start)[:, -1:].argmax(-1)], dim=1)
            assert zero.ledger().held.get("gather", 0) == 0
            model.train()
            model(tokens)  # a forward in grad mode that nobody follows up
    with zero.gathered():
        return reference.weights(model)


@pytest.mark.row(25)
def test_evaluation_between_steps_leaves_the_bits_unchanged(ranks, stage):
    """`no_grad`, `inference_mode`, `eval`, generation and a forward without backward change nothing of the next step."""
    for with_it, without in zip(
        ranks.run(2, evaluated, stage, True), ranks.run(2, evaluated, stage, False), strict=True
    ):
        reference.assert_same(with_it, without)


def direct_calls(stage: int):
    class Direct(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)])

        def forward(self, x):
            return self.blocks[1](self.blocks[0].forward(x))

    torch.manual_seed(0)
    plain_model = Direct()
    torch.manual_seed(0)
    model = Direct()
    zero = zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage)
    x = torch.ones(2, 5)
    assert torch.equal(model(x), plain_model(x))
    with pytest.raises(zeroshard.Error, match=r"(?s)blocks\.0\.weight.*call the Linear itself.*zero\.gathered"):
        model.blocks[0].forward(x)
    with pytest.raises(zeroshard.Error, match=r"(?s)call the Direct itself, as module\(\.\.\.\)"):
        model.forward(x)
    # Called as a module, a unit is its own root, also outside the model's forward.
    assert torch.equal(model.blocks[0](x), plain_model.blocks[0](x))
    with zero.gathered():
        return bool(torch.equal(model.blocks[0].forward(x), plain_model.blocks[0].forward(x)))


@pytest.mark.row(22)
def test_forward_called_directly(ranks):
    """`layer.forward(...)` works inside the root's forward and raises, naming parameter and remedy, outside."""
    assert ranks.run(2, direct_calls, 3) == [True, True]


def penalised(world: int, stage: int, inside: bool):
    """A penalty over all parameters under gathered(), with the backward inside or outside of it."""
    rank = torch.distributed.get_rank() if world > 1 else 0

    def penalty(model):
        return 0.01 * sum(p.square().sum() for p in model.parameters())

    want = models.build("mlp")
    optimizer = adamw(want)
    for index in range(world):
        (models.loss("mlp", want, models.batch("mlp", 0, index)) + penalty(want)).backward()
    for p in want.parameters():
        p.grad.div_(world)
    optimizer.step()

    model = models.build("mlp")
    optimizer = adamw(model)
    zero = zeroshard.shard(model, optimizer, stage=stage)
    loss = models.loss("mlp", model, models.batch("mlp", 0, rank))
    with zero.gathered():
        loss = loss + penalty(model)
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    optimizer.step()
    with zero.gathered():
        return reference.first_difference(reference.weights(model), reference.weights(want))


@pytest.mark.parametrize("inside", [True, False], ids=["backward inside", "backward outside"])
@pytest.mark.parametrize("world", [1, 2])
def test_penalty_under_gathered(ranks, world, stage, inside):
    """Autograd through weights read under gathered() works, also when backward runs after leaving it."""
    assert ranks.run(world, penalised, world, stage, inside) == [""] * world


def failing_forward(stage: int, where: str):
    """An exception in a user's forward on all ranks, caught; the same step again must equal a clean run's."""
    rank = torch.distributed.get_rank()

    def run(fail: bool):
        model = models.build("gpt", checkpoint="nonreentrant" if where == "recompute" else None)
        optimizer = adamw(model)
        zero = zeroshard.shard(model, optimizer, stage=stage)
        armed = {"left": 2 if where == "recompute" else 1, "on": False}

        def bomb(module, args, output=None):
            if armed["on"]:
                armed["left"] -= 1
                if armed["left"] == 0:
                    raise ValueError("user's own")

        target = {
            "embed": model.embed,
            "block": model.blocks[1].mlp[0],
            "head": model.head,
            "recompute": model.blocks[1].mlp[0],
        }[where]
        target.register_forward_hook(bomb)
        for step in range(3):
            if fail and step == 1:
                armed.update(on=True)
                with pytest.raises(ValueError, match="user's own"):
                    models.loss("gpt", model, models.batch("gpt", step, rank)).backward()
                armed.update(on=False)
                optimizer.zero_grad()
            models.loss("gpt", model, models.batch("gpt", step, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert zero.ledger().held.get("gather", 0) == 0
        with zero.gathered():
            return reference.weights(model)

    return reference.first_difference(run(True), run(False))


@pytest.mark.row(4)
@pytest.mark.parametrize("where", ["embed", "block", "head", "recompute"])
def test_exception_in_forward_leaves_everything_usable(ranks, stage, where):
    """Retried after a caught exception, in forward or in a recomputation inside backward, the step has the same bits."""
    assert ranks.run(2, failing_forward, stage, where) == ["", ""]


def forces(stage: int):
    """A model that differentiates inside its own forward, with a graph for the outer backward."""
    rank = torch.distributed.get_rank()

    class Energy(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = models.mlp((7, 13, 1))

        def forward(self, x):
            x = x.requires_grad_()
            return torch.autograd.grad(self.layers(x).sum(), x, create_graph=True)[0]

    def step(model, index):
        generator = torch.Generator().manual_seed(index)
        model(torch.randn(3, 7, generator=generator)).square().sum().backward()

    torch.manual_seed(0)
    want = Energy()
    optimizer = adamw(want)
    for _ in range(2):
        for index in range(2):
            step(want, index)
        for p in want.parameters():
            if p.grad is not None:
                p.grad.div_(2)
        optimizer.step()
        optimizer.zero_grad()
    torch.manual_seed(0)
    model = Energy()
    optimizer = adamw(model)
    zero = zeroshard.shard(model, optimizer, stage=stage)
    for _ in range(2):
        step(model, rank)
        optimizer.step()
        optimizer.zero_grad()
    with zero.gathered():
        return reference.first_difference(reference.weights(model), reference.weights(want))


@pytest.mark.row(23)
def test_gradients_of_gradients_inside_forward(ranks, stage):
    """`autograd.grad(..., create_graph=True)` inside forward: double backward through sharded weights is exact."""
    assert ranks.run(2, forces, stage) == ["", ""]


class Recursive(nn.Module):
    """Calls itself, and its one block, `depth` times."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(7, 7)])

    def forward(self, x, depth=3):
        x = torch.tanh(self.blocks[0](x))
        return x if depth == 0 else self(x, depth - 1)


def interrupted(stage: int):
    """A KeyboardInterrupt inside a forward of a model that calls itself, caught as a notebook does."""
    rank = torch.distributed.get_rank()

    def run(interrupt: bool, sharded: bool = True):
        torch.manual_seed(0)
        model = Recursive()
        optimizer = adamw(model)
        zero = zeroshard.shard(model, optimizer, stage=stage) if sharded else None
        armed = []

        def stop(module, args):
            if armed:
                raise KeyboardInterrupt

        model.blocks[0].register_forward_pre_hook(stop)
        for step in range(3):
            if interrupt and step == 1:
                armed.append(True)
                with pytest.raises(KeyboardInterrupt):
                    model(torch.ones(2, 7))
                armed.clear()
            for index in [rank] if sharded else range(2):
                x = torch.randn(2, 7, generator=torch.Generator().manual_seed(10 * step + index))
                model(x).square().sum().backward()
            if not sharded:
                for p in model.parameters():
                    p.grad.div_(2)
            optimizer.step()
            optimizer.zero_grad()
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        if zero is None:
            return reference.weights(model)
        with zero.gathered():
            return reference.weights(model)

    clean = run(False)
    return reference.first_difference(run(True), clean), reference.first_difference(clean, run(False, sharded=False))


def interrupted_while_opening(stage: int, at: int):
    """A KeyboardInterrupt in the `at`-th opening of a bucket, on both ranks, then two steps."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
    optimizer = adamw(model)
    zero = zeroshard.shard(model, optimizer, stage=stage, layout=Layout(units=["*"]))
    opened, really = [], Bucket.open

    def stop(bucket):
        opened.append(bucket)
        if len(opened) == at:
            raise KeyboardInterrupt
        really(bucket)

    with pytest.MonkeyPatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Bucket, "open", stop)
        model(torch.ones(2, 16))
    for _ in range(2):
        model(torch.ones(2, 16)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert zero.ledger().phase == "between"
    if stage == 3:
        for layer in model:
            with pytest.raises(zeroshard.errors.ReleasedError):
                layer.weight.sum()


@pytest.mark.processes
@pytest.mark.full
@pytest.mark.row(4)
@pytest.mark.parametrize("at", [1, 2, 3])
def test_an_interrupt_while_a_unit_is_opened(ranks, stage, at):
    """Nothing stays open: a weight that is read outside is refused, never an old one."""
    ranks.run(2, interrupted_while_opening, stage, at)


@pytest.mark.row(4, 23)
def test_recursion_and_an_interrupt(ranks, stage):
    """A model that calls itself equals plain PyTorch, and a Ctrl-C inside its forward leaves nothing behind."""
    assert ranks.run(2, interrupted, stage) == [("", "")] * 2


class OnAThread(nn.Module):
    """A forward that has a part of itself computed by another thread, and waits for it."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            found = []
            thread = threading.Thread(target=lambda block=block, x=x, found=found: found.append(block(x)))
            thread.start()
            thread.join()
            x = torch.tanh(found[0])
        return x


def on_a_thread(stage):
    torch.manual_seed(0)
    plain, model = OnAThread(), OnAThread()
    model.load_state_dict(plain.state_dict())
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    zero = zeroshard.shard(model, optimizers[1], stage=stage)
    for _ in range(2):
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            each(torch.ones(2, 8)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    with zero.gathered():
        return reference.first_difference(reference.weights(model), reference.weights(plain))


@pytest.mark.processes
def test_a_part_of_a_forward_on_another_thread(ranks, stage):
    """The outer forward is not taken for one that an interrupt left."""
    assert ranks.run(2, on_a_thread, stage) == ["", ""]


def heads() -> nn.ModuleDict:
    return nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), "c": nn.Tanh()})


CONTAINERS = {
    "the model itself": (heads, ["", "a", "b"]),
    "a child of the model": (lambda: nn.Sequential(heads()), ["", "0"]),
    "beside a list": (
        lambda: _of(heads=heads(), blocks=nn.ModuleList([nn.Linear(3, 3)])),
        ["", "heads.a", "heads.b", "blocks.0"],
    ),
    "around a list": (
        lambda: nn.ModuleDict({"h": nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)]), "last": nn.Linear(3, 3)}),
        ["", "h.0", "h.1"],
    ),
}


def _of(**children):
    module = nn.Module()
    for name, child in children.items():
        module.add_module(name, child)
    return module


@pytest.mark.parametrize("case", CONTAINERS)
def test_units_are_found_in_dictionaries_of_modules_too(case):
    """Unless there is a list of blocks inside, as in nanoGPT's; parts of the model may be called from the loop then."""
    build, wanted = CONTAINERS[case]
    model = build()
    zero = zeroshard.shard(model, None, stage=3)
    assert [unit.name for unit in zero._engine.units] == wanted
    if case == "the model itself":
        assert model["b"](model["a"](torch.ones(1, 3))).shape == (1, 3)


class Attending(nn.Module):
    """A torch encoder below, and its attention alone beside."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder, self.attention = nn.TransformerEncoder(layer, 2), nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x, mask):
        return self.encoder(x, src_key_padding_mask=mask), self.attention(x, x, x, need_weights=False)[0]


class Bare(nn.Module):
    """Layers of such an encoder, without it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(2))

    def forward(self, x, mask):
        found = []
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=mask)
            found.append(x)
        return found


def attending(stage, settings, build=Attending):
    """The evaluation, in the fast path of torch's attention, right after a step."""
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if stage is not None:
        zeroshard.shard(model, optimizer, stage=stage, **settings)
    x, mask, found = torch.randn(3, 5, 8), torch.zeros(3, 5, dtype=torch.bool), []
    mask[0, 3:] = True
    model.eval()
    for _ in range(2):
        sum(each.square().sum() for each in model(x, mask)).backward()  # no dropout, which has other numbers per rank
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The PyTorch API of nested tensors")
            found += model(x, mask)
    return found


FAST = {
    "whole": {},
    "layers in parts": {"layout": Layout(units=["encoder.layers.*.linear1", "attention"])},
    "offloaded": {"offload": Offload(parameters="cpu", optimizer="cpu")},
}


@pytest.mark.row(69)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("settings", FAST)
def test_torchs_attention_takes_its_fast_path_wherever_a_plain_one_does(ranks, stage, settings):
    """With a mask of padding it leaves other numbers there, so that a slow path would show. At every stage, where
    parameters are guarded until their unit is called, or still arriving after a step."""
    want = attending(None, {})
    for found in ranks.run(2, attending, stage, FAST[settings]):
        for got, wanted in zip(found, want, strict=True):
            assert torch.equal(got, wanted)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_layers_without_hooks_keep_their_fast_path(ranks, stage):
    """torch refuses a layer its own where anything in it has a hook; as units, layers have hooks at every stage."""
    for units, want in (([], attending(None, {}, Bare)), (["layers.*"], None)):
        settings = {"layout": Layout(units=units)}
        for found in ranks.run(2, attending, stage, settings, Bare):
            want = want or ranks.run(1, attending, 0, settings, Bare)[0]
            for got, wanted in zip(found, want, strict=True):
                assert torch.equal(got, wanted)


@pytest.mark.row(69)
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_rows_that_a_forward_edits_are_refused(kind):
    """`max_norm` edits what each rank looks up; ignored by `Layout`, the module is the program's own affair."""
    model = nn.Sequential(kind(5, 3, max_norm=0.5), nn.Linear(3, 2))
    for stage in (0, 1, 2, 3):
        with pytest.raises(UserError, match=rf"(?s)parameter '0\.weight', {kind.__name__}\(max_norm=0\.5\).*renorm"):
            zeroshard.shard(model, None, stage=stage)
    zeroshard.shard(model, None, layout=Layout(ignore=["0.weight"]))


KEPT = {  # a weight's memory by another way, and the name of that
    "w": lambda model: setattr(model, "w", model.weight.detach()),
    "w[1]": lambda model: setattr(model, "w", [None, model.weight.data[:2]]),
    "w['tied']": lambda model: setattr(model, "w", {"tied": model.weight.data.T}),
}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", KEPT)
def test_an_attribute_in_a_weights_memory_is_refused(name, stage):
    """A forward that reads it would read what the weight was, without a word; the parameter itself, in a list too, and
    a weight that spectral norm makes anew before each forward are none."""
    model = nn.Linear(4, 4)
    KEPT[name](model)
    with pytest.raises(
        UserError, match=rf"(?s)attribute {re.escape(repr(f'1.{name}'))} and parameter '1\.weight'.*clone"
    ):
        zeroshard.shard(nn.Sequential(nn.Linear(4, 4), model), None, stage=stage)
    model.w = [model.weight, torch.zeros(4), "a word"]
    normed = nn.utils.spectral_norm(nn.Linear(4, 4)), nn.utils.spectral_norm(nn.LSTM(4, 4), "weight_hh_l0")
    zeroshard.shard(nn.Sequential(*normed, model), None, stage=stage)


def test_the_remedy_for_rows_that_a_forward_edits_bounds_them():
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 2))
    zero = zeroshard.shard(model, None)
    with zero.gathered("0.weight"), torch.no_grad():
        model[0].weight.copy_(model[0].weight.renorm(2.0, 0, 0.5))
    with zero.gathered():
        assert model[0].weight.norm(dim=1).max() <= 0.5 + 1e-6  # torch rounds as it divides


@pytest.mark.row(27)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("call", ["forward", "step", "save"])
def test_a_parameter_that_was_swapped_is_named(stage, call, tmp_path):
    """As `module.to(...)` does under `set_swap_module_params_on_conversion(True)`."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero = zeroshard.shard(model, optimizer, stage=stage)
    torch.utils.swap_tensors(model.weight, nn.Parameter(torch.ones(4, 4)))
    calls = {
        "forward": lambda: model(torch.ones(1, 4)),
        "step": optimizer.step,
        "save": lambda: zero.save(tmp_path / "x"),
    }
    with pytest.raises(StateError, match=r"(?s)swapped.*'weight'.*set_swap_module_params_on_conversion"):
        calls[call]()


@pytest.mark.row(67)
def test_an_expanded_parameter_is_sharded():
    """One that is frozen, and shows one number many times."""
    for stage in (0, 1, 2, 3):
        model = nn.Linear(4, 4)
        model.bias = nn.Parameter(torch.full((1,), 3.0).expand(4), requires_grad=False)
        zero = zeroshard.shard(model, torch.optim.SGD([model.weight], lr=0.1), stage=stage)
        with zero.gathered():
            assert model.bias.tolist() == [3.0] * 4


@pytest.mark.row(81)
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("transform", ["vmap", "grad", "jacrev"])
def test_transforms_of_a_model_that_is_recomputed(stage, transform):
    """Have the bits of the plain model: inside a transform nothing is recomputed, which torch's checkpoint cannot do."""
    found = []
    for sharded in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        if sharded:
            zeroshard.shard(model, None, stage=stage, layout=Layout(recompute=True, units=["*"]))
        function = model if transform == "vmap" else lambda x, model=model: model(x).sum()
        found.append(
            getattr(torch.func, transform)(function)(torch.ones(2, 4) if transform == "vmap" else torch.ones(4))
        )
    assert torch.equal(*found)


@pytest.mark.parametrize("sources", [0, -1, "2", None, True, 2.0])
def test_apart_takes_a_number_of_sources(sources):
    with pytest.raises(UserError, match=r"(?s)a number from 1.*apart\(weight"):
        zeroshard.apart(nn.Parameter(torch.ones(3)), sources)


@pytest.mark.parametrize("config", [None, [], 5])
def test_settings_take_a_config(config):
    with pytest.raises(UserError, match=r"(?s)a path or a dict.*ds_config"):
        zeroshard.settings(config)


def in_no_mesh():
    from torch.distributed.device_mesh import DeviceMesh

    rank = rank_processes.rank()
    unnamed = DeviceMesh("cpu", [[0, 1], [2, 3]])
    said = "not in the DeviceMesh" if rank == 4 else "without names"
    with pytest.raises(UserError, match=said):
        zeroshard.shard(nn.Linear(2, 2), None, comm=Comm(group=unnamed))


def test_a_mesh_without_names_and_a_rank_outside_of_it(ranks):
    ranks.run(5, in_no_mesh)
