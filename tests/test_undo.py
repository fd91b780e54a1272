"""A `shard` that ends by an exception, at whatever moment, has changed nothing, and can be called again."""

from __future__ import annotations

import gc
import inspect
import linecache
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import ranks as rank_processes
import reference
import zeroshard
from zeroshard import Offload, Precision
from zeroshard.arithmetic import sums
from zeroshard.engine import engine
from zeroshard.errors import PeerError

PACKAGE = str(Path(zeroshard.__file__).parent)
CONSTRUCTION = {"connect", "__post_init__", "_policy", "_device"}


class Boom(Exception):
    pass


class Net(nn.Module):
    """Tied and frozen weights, a buffer, a recurrent layer, hooks of the user's."""

    def __init__(self, device=None):
        super().__init__()
        self.first = nn.Linear(6, 6, device=device)
        self.blocks = nn.ModuleList(nn.Linear(6, 6, device=device) for _ in range(2))
        self.recurrent = nn.GRU(6, 6, device=device)
        self.norm = nn.BatchNorm1d(6, device=device)
        self.last = nn.Linear(6, 6, bias=False, device=device)
        self.last.weight = self.first.weight
        self.blocks[0].bias.requires_grad_(False)

    def forward(self, x):
        for block in (self.first, *self.blocks):
            x = block(x).tanh()
        return self.last(self.norm(self.recurrent(x)[0]))


def build(how: str):
    torch.manual_seed(rank_processes.rank())  # other weights on each rank
    waits = how == "meta" or (how == "waiting" and rank_processes.rank() > 0)
    model = Net("meta" if waits else None)
    if not waits:
        with torch.no_grad():
            model.norm.running_mean.fill_(rank_processes.rank() + 1.0)
        model.first.register_forward_hook(lambda *_: None)
        model.blocks[1].weight.register_post_accumulate_grad_hook(lambda param: None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer.register_step_post_hook(lambda *_: None)
    if how == "stepped":
        train(model, optimizer)
    return model, optimizer


def train(model, optimizer, steps: int = 2):
    generator = torch.Generator().manual_seed(3)
    for _ in range(steps):
        model(torch.randn(4, 6, generator=generator)).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def fields(owner):
    """Attributes by identity, and what is in the tables among them."""
    return {
        key: (id(value), [(name, id(each)) for name, each in value.items()]) if isinstance(value, dict) else id(value)
        for key, value in owner.__dict__.items()
        if not (key.startswith("_flat_weight") and owner.weight_hh_l0.is_meta)  # made anew, of the same weights
    }


def tensor_facts(tensor):
    content = None if tensor.is_meta else tensor.detach().contiguous().view(-1).view(torch.uint8).tolist()
    hooks = dict(tensor._post_accumulate_grad_hooks or {})
    return type(tensor), str(tensor.device), tensor.stride(), tensor.dtype, tensor.requires_grad, content, hooks


def facts(model, optimizer):
    """All that a user can see of a model and its optimizer."""
    groups = [{**group, "params": [id(param) for param in group["params"]]} for group in optimizer.param_groups]
    state = {
        id(param): {key: (id(value), value.tolist()) for key, value in kept.items()}
        for param, kept in optimizer.state.items()
    }
    tensors = {name: tensor_facts(each) for name, each in (*model.named_parameters(), *model.named_buffers())}
    attributes = {name: dict(param.__dict__) for name, param in model.named_parameters()}
    modules = [fields(module) for module in model.modules()]
    rng = torch.get_rng_state().tolist()
    return tensors, attributes, modules, groups, state, fields(optimizer), rng


class Tripwire:
    """Raises at the n-th line or call of the package that runs inside `shard` once the model is being assembled."""

    def __init__(self, at: int, event: str, error: type[BaseException] = Boom) -> None:
        self.at, self.event, self.error, self.seen = at, event, error, 0

    def __call__(self, frame, event, _):
        if not frame.f_code.co_filename.startswith(PACKAGE) or frame.f_code.co_name in ("restore", "give_up"):
            return None
        # A generator is resumed, or closed, where an exception is ignored. A `with` whose body is through comes to its
        # line once more, and what is raised there skips its end: torch's functions would stay off for other tests.
        passed = (
            frame.f_code.co_flags & inspect.CO_GENERATOR
            if event == "call"
            else linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with ")
        )
        if event == self.event and not passed:
            self.seen += 1
            if self.seen == self.at:
                sys.settrace(None)
                raise self.error("injected")
        return self

    def __enter__(self):
        gc.disable()  # what is raised in a finaliser of others' garbage is lost
        sys.settrace(self)
        return self

    def __exit__(self, *_):
        sys.settrace(None)
        gc.enable()


def armed(model, optimizer, wire, **options):
    """`shard` with the tripwire on while the model is assembled."""
    plan = engine.Assembly.plan

    def planned(self, *args):
        plan(self, *args)
        wire.__enter__()

    engine.Assembly.plan = planned
    try:
        return zeroshard.shard(model, optimizer, **options)
    finally:
        wire.__exit__()
        engine.Assembly.plan = plan


KINDS = {
    "stage 0": ("plain", {"stage": 0}),
    "stage 1": ("plain", {"stage": 1}),
    "stage 3": ("plain", {"stage": 3}),
    "stage 2, after steps": ("stepped", {"stage": 2}),
    "stage 3, after steps": ("stepped", {"stage": 3}),
    "mixed precision": ("plain", {"stage": 3, "precision": Precision(param_dtype=torch.bfloat16, cast_inputs=True)}),
    "mixed precision, stage 0": (
        "plain",
        {"stage": 0, "precision": Precision(param_dtype=torch.bfloat16, cast_inputs=True)},
    ),
    "offloaded": ("stepped", {"stage": 3, "offload": Offload(optimizer="cpu", parameters="cpu")}),
    "meta": ("meta", {"stage": 3}),
    "meta, stage 1": ("meta", {"stage": 1}),
}
ON_RANKS = KINDS | {"meta but on rank 0": ("waiting", {"stage": 3})}


def moments(kind: str, event: str, every: int) -> list[int]:
    """Of the assembly's events those at which to raise; the last few come only while nothing is cached."""
    how, options = ON_RANKS[kind]
    armed(*build(how), Tripwire(0, event), **options)
    wire = Tripwire(0, event)
    armed(*build(how), wire, **options)
    return list(range(1, wire.seen - 20, every))


def undone(kind: str, event: str, every: int):
    """A model of which nothing has changed at any of the moments, and its optimizer."""
    how, options = KINDS[kind]
    where = moments(kind, event, every)
    model, optimizer = build(how)
    before = facts(model, optimizer)
    assert len(where) > 20
    for at in where:
        with pytest.raises(Boom):
            armed(model, optimizer, Tripwire(at, event), **options)
        for what, now in zip(before, facts(model, optimizer), strict=True):
            assert what == now, f"{event} {at}"
    return model, optimizer


def check_undone(kind: str, event: str, every: int) -> None:
    model, optimizer = undone(kind, event, every)
    how, options = KINDS[kind]
    if how == "meta":
        zeroshard.shard(model, optimizer, **options)
        train(model, optimizer)
        return
    other, its = build(how)
    train(model, optimizer)
    train(other, its)
    reference.assert_same(reference.weights(model), reference.weights(other))


@pytest.mark.heavy
@pytest.mark.row(78)
@pytest.mark.parametrize("kind", KINDS)
def test_a_shard_that_an_exception_ends_has_changed_nothing(kind):
    """At moments all over the assembly; what is trained then, without zeroshard, has the bits of plain PyTorch."""
    check_undone(kind, "line", every=97)


class WithAView(Tripwire):
    """Raises where a frame of the package has a view of a buffer that came to life: such a tensor cannot be swapped."""

    def __call__(self, frame, event, _):
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip()
        viewed = frame.f_code is sums.as_bytes.__code__ and line.startswith("return ")
        if viewed and frame.f_back.f_code.co_name == "_place_buffers":
            sys.settrace(None)
            raise self.error("injected")
        return self


def test_a_view_in_a_frame_that_an_exception_left_keeps_nothing_from_being_undone():
    model, optimizer = build("meta")
    before = facts(model, optimizer)
    with pytest.raises(Boom):
        armed(model, optimizer, WithAView(0, "line"), stage=3)
    assert facts(model, optimizer) == before
    zeroshard.shard(model, optimizer, stage=3)
    train(model, optimizer)


@pytest.mark.slow
@pytest.mark.row(78)
@pytest.mark.parametrize("kind", KINDS)
def test_a_shard_that_an_exception_ends_at_any_call_has_changed_nothing(kind):
    check_undone(kind, "call", every=1)


def on_one_rank(kind: str, parts: int, error: type[BaseException]):
    """The last rank raises at several moments; all ranks are as before, are told, and shard once more."""
    rank, last = rank_processes.rank(), rank_processes.world() - 1
    how, options = ON_RANKS[kind]
    every = moments(kind, "line", 1)
    model, optimizer = build(how)
    before, told = facts(model, optimizer), []
    for part in range(parts):
        wire = Tripwire(every[len(every) * part // parts] if rank == last else 0, "line", error)
        try:
            armed(model, optimizer, wire, **options)
        except (error, PeerError) as raised:
            told.append(f"{type(raised).__name__}: {raised}".splitlines()[0])
        for what, now in zip(before, facts(model, optimizer), strict=True):
            assert what == now, f"moment {wire.at}"
    zero = zeroshard.shard(model, optimizer, **options)
    train(model, optimizer)
    with zero.gathered():
        return told, reference.weights(model)


def on_all_ranks(kind: str):
    how, options = ON_RANKS[kind]
    moments(kind, "line", 1)
    model, optimizer = build(how)
    zero = zeroshard.shard(model, optimizer, **options)
    train(model, optimizer)
    with zero.gathered():
        return reference.weights(model)


@pytest.mark.processes
@pytest.mark.row(78)
@pytest.mark.parametrize("world", [2, 3], ids=lambda world: f"ranks{world}")
@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("stage 1", Boom),
        ("stage 3", KeyboardInterrupt),
        ("stage 2, after steps", MemoryError),
        ("meta", Boom),
        ("meta but on rank 0", Boom),
    ],
)
def test_a_shard_that_fails_on_one_rank_is_undone_on_all(ranks, kind, error, world):
    """The others are told who gave up and why; the next attempt has the bits of a first."""
    outcomes = ranks.run(world, on_one_rank, kind, 4, error, group_timeout=100.0, timeout=60.0)
    said = f"PeerError: a collective did not complete: rank {world - 1} gave up: {error.__name__}: injected"
    wanted = ranks.run(world, on_all_ranks, kind)
    for rank, (told, weights) in enumerate(outcomes):
        assert told == [f"{error.__name__}: injected" if rank == world - 1 else said] * 4
        reference.assert_same(weights, wanted[rank])


def raising_in_preflight():
    """A class of the user's that raises on one rank where the model is looked at."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    if rank_processes.rank() == 1:
        model.named_buffers = lambda *_: [].pop()
    try:
        zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    except (IndexError, PeerError) as error:
        told = f"{type(error).__name__}: {error}"
    model.__dict__.pop("named_buffers", None)
    assert zeroshard.shard(model, None).world_size == rank_processes.world()
    return told


@pytest.mark.row(78)
def test_what_raises_before_anything_is_built_is_told_to_all(ranks):
    others, own = ranks.run(2, raising_in_preflight, group_timeout=100.0, timeout=30.0)
    assert own == "IndexError: pop from empty list"
    assert others.startswith("PeerError: another rank cannot shard its model\n  where: rank 1")
    assert "got: IndexError: pop from empty list" in others
