"""Ranks that make different numbers of forwards without grad, inside `zero.generating()`."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

import emulated
import ranks as rank_processes
import reference
import zeroshard
from test_alone import SETTINGS, Speaker, speaker, step
from zeroshard import Layout
from zeroshard.errors import PeerError, StateError

LENGTHS = (1, 50, 0, 7)  # by rank


def generated(stage: int, settings: dict, lengths=LENGTHS):
    """What a rank generates before, between and after steps, alone and of whole weights; and weights after them."""
    rank, (model, optimizer, zero) = rank_processes.rank(), speaker(stage, **settings)
    plain, said, want = Speaker(), [], []
    for index in range(3):
        model.eval()
        with zero.gathered():
            plain.load_state_dict(model.state_dict())
            if rank == index % 2:
                said.append(model.generate(torch.arange(5), 2))
                want.append(plain.eval().generate(torch.arange(5), 2))
        with zero.generating():
            said.append(model.generate(torch.arange(5) + index, lengths[(rank + index) % len(lengths)]))
        want.append(plain.eval().generate(torch.arange(5) + index, lengths[(rank + index) % len(lengths)]))
        model.train()
        step(model, optimizer, 10 * index + rank)
    with zero.gathered():
        return said == want, reference.weights(model), zero.ledger().held


def trained(stage: int, settings: dict):
    model, optimizer, zero = speaker(stage, **settings)
    for index in range(3):
        step(model, optimizer, 10 * index + rank_processes.rank())
    with zero.gathered():
        return reference.weights(model), zero.ledger().held


@pytest.mark.parametrize("what", SETTINGS)
def test_texts_of_different_lengths_have_the_bits_of_plain_torch(world, stage, what):
    """Training goes on with the bits and the bytes of one in which nobody had generated."""
    quiet = rank_processes.run(world, trained, stage, SETTINGS[what])
    for (right, *found), (weights, held) in zip(
        rank_processes.run(world, generated, stage, SETTINGS[what]), quiet, strict=True
    ):
        assert right and found[1] == held
        assert reference.first_difference(found[0], weights) == ""


class Dropping(Speaker):
    def forward(self, tokens, without=-1):
        x = self.embedding(tokens)
        for at, block in enumerate(self.blocks):
            x = x if at == without else block(x)
        return x


def layers_dropped(stage: int):
    rank = rank_processes.rank()
    torch.manual_seed(0)
    model, plain = Dropping(), Dropping()
    plain.load_state_dict(model.state_dict())
    zero = zeroshard.shard(model, None, stage=stage)
    model.eval()
    plain.eval()
    found = []
    with zero.generating(), torch.no_grad():
        for token in range(4 * rank):
            found.append(model(torch.arange(5), (token + rank) % 4))
    with torch.no_grad():
        return all(torch.equal(each, plain(torch.arange(5), (at + rank) % 4)) for at, each in enumerate(found))


def test_ranks_may_drop_other_layers_too(ranks, stage):
    assert ranks.run(3, layers_dropped, stage) == [True] * 3


class Deep(nn.Module):
    """Forty units of one size; a forward may be interrupted."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(40))
        self.interrupted = False

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        if self.interrupted:
            raise KeyboardInterrupt
        return x


def deep():
    torch.manual_seed(0)
    model = Deep()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, zeroshard.shard(model, optimizer, stage=3, layout=Layout(units=["blocks.*"]))


def peaks(known: bool):
    """The most bytes of gathered weights that a rank used, and had ahead, in the block where one rank generates; in
    units."""
    model, _, zero = deep()
    if known:
        with torch.no_grad():
            model(torch.ones(2, 64))
    zero.ledger().peak.clear()
    with zero.generating(), torch.no_grad():
        for _ in range(2 * rank_processes.rank()):
            model(torch.ones(2, 64))
    peak = zero.ledger().peak
    unit = zero.partition.buckets[0].numel * 4
    return peak.get("gather", 0) / unit, peak.get("prefetch", 0) / unit


@pytest.mark.parametrize("known", [True, False])
def test_a_rank_that_is_through_holds_no_more_weights_than_one_that_generates(ranks, known):
    """Also where no rank knows yet in which order units are gathered."""
    waits, generates = ranks.run(2, peaks, known)
    assert (waits, generates) == ((1, 2), (1, 1))  # two units at once: one that is given back counts as used


def raising(where: str, around: bool):
    """What each rank is told where one raises, and the weights of two steps that all make afterwards."""
    rank, (model, optimizer, zero) = rank_processes.rank(), speaker(3)
    told = ""
    model.eval()
    try:
        gathered = zero.gathered(model.blocks[0]) if around else contextlib.nullcontext()
        with gathered, zero.generating(), torch.no_grad():
            for token in range(3 + rank):
                if rank == 1 and token == 2 and where != "inside":
                    raise KeyboardInterrupt if where == "interrupt" else ValueError("no such token")
                model(torch.arange(5) + (100 * (rank == 1 and token == 2 and where == "inside")))
    except BaseException as error:
        told = f"{type(error).__name__}: {error}"
    model.train()
    for index in range(2):
        optimizer.zero_grad()
        step(model, optimizer, index)
    with zero.gathered():
        return told, reference.weights(model)


@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize(("where", "said"), [("between", "ValueError: no such token"), ("inside", "IndexError")])
def test_a_rank_that_raises_is_named_and_all_train_on(ranks, where, said, around):
    (first, weights), (second, others) = ranks.run(2, raising, where, around)
    assert second.startswith(said)
    assert first.startswith("PeerError: ") and f"rank 1: {said}" in first
    assert reference.first_difference(weights, others) == ""


def test_an_interrupt_of_one_rank_is_heard_by_the_others(ranks):
    (first, _), (second, _) = ranks.run(2, raising, "interrupt", False)
    assert second.startswith("KeyboardInterrupt") and "generating() raised KeyboardInterrupt" in first


def interrupted(how: str):
    """Blocks after an interrupt that went past every hook of a forward, in the block or in a training forward; a step."""
    rank, (model, optimizer, zero) = rank_processes.rank(), deep()
    for each in (False, True, False, False):
        model.interrupted = each
        with contextlib.suppress(KeyboardInterrupt):
            if each and how == "training":
                model(torch.ones(1, 64))
            elif each:
                with zero.generating(), torch.no_grad():
                    model(torch.ones(1, 64))
        model.interrupted = False
        with zero.generating(), torch.no_grad():
            for _ in range(3 * rank):
                model(torch.ones(1, 64))
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    known = zero._engine.schedule.gather_order._known
    return sorted(known), [known[kind] for kind in sorted(known)]


@pytest.mark.parametrize("how", ["generating", "training"])
def test_after_an_interrupt_ranks_generate_again_and_know_one_order(ranks, how):
    first, second = ranks.run(2, interrupted, how)
    assert first == second


def refused():
    """The errors of what cannot be inside; a step comes through after each."""
    rank, (model, optimizer, zero) = rank_processes.rank(), speaker(3)
    told = []

    def hear(call):
        try:
            call()
        except (PeerError, StateError) as error:
            told.append(f"{type(error).__name__}: {error}")

    def nested():
        with zero.generating(), zero.generating():
            pass

    def in_grad_mode():
        with zero.generating():
            if rank == 0:
                hear(lambda: model(torch.arange(5)))
            else:
                model.generate(torch.arange(5), 3)

    def without():
        model.eval()
        model.generate(torch.arange(5), 1 + rank)
        step(model, optimizer, 0)

    for call in (nested, in_grad_mode, without):
        model.eval()
        hear(call)
        model.train()
        optimizer.zero_grad()
        step(model, optimizer, 1)
    return told


def test_what_cannot_be_inside_is_refused_by_name(ranks):
    for rank, told in enumerate(ranks.run(2, refused)):
        assert "generating() inside another one" in told[0]
        assert "with zero.generating(): ... each as often as it needs to" in told[-1]
        if rank == 0:
            assert "a forward in grad mode" in told[1] and "with torch.no_grad(): ... around them" in told[1]


def parts():
    """Ranks call parts of the model, of their own, in an order of their own."""
    rank, (model, _, zero) = rank_processes.rank(), speaker(3)
    plain = Speaker()
    with zero.gathered():
        plain.load_state_dict(model.state_dict())
    model.eval()
    plain.eval()
    found, x = [], torch.ones(2, 16)
    with zero.generating(), torch.no_grad():
        for at in ([0, 1, 0], [2], [1, 1, 0, 2])[rank]:
            found.append((at, model.blocks[at](x)))
    with torch.no_grad():
        return all(torch.equal(got, plain.blocks[at](x)) for at, got in found)


def test_ranks_may_call_different_parts(ranks):
    assert ranks.run(3, parts) == [True] * 3


def with_buffers():
    model, _, zero = speaker(3, layout=Layout(buffers="always"))
    try:
        with zero.generating(), torch.no_grad():
            model(torch.arange(5))
    except StateError as error:
        return str(error)


def test_buffers_that_every_forward_sends_are_refused():
    assert 'instead: Layout(buffers="broadcast")' in with_buffers()


def on_a_device(stage: int):
    torch.manual_seed(0)
    model, plain = Speaker().to("emu"), Speaker().to("emu")
    plain.load_state_dict(model.state_dict())
    zero = zeroshard.shard(model, None, stage=stage)
    count = LENGTHS[rank_processes.rank()] % 10
    tokens = torch.arange(5, device="emu")
    with zero.generating():
        said = model.eval().generate(tokens, count)
    return said == plain.eval().generate(tokens, count)


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.full), 3])
def test_on_a_device(stage):
    assert emulated.run(2, on_a_device, stage) == [True, True]
