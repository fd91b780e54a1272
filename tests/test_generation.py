"""Ranks that make different numbers of forwards without grad, inside `zero.generating()`."""

from __future__ import annotations

import pytest
import torch

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


def raising(stage: int, where: str):
    """What each rank is told where one raises, and the weights of a step that all make afterwards."""
    rank, (model, optimizer, zero) = rank_processes.rank(), speaker(stage)
    told = ""
    model.eval()
    try:
        with zero.generating(), torch.no_grad():
            for token in range(3 + rank):
                if rank == 1 and token == 2 and where == "between":
                    raise ValueError("no such token")
                model(torch.arange(5) + (100 * (rank == 1 and token == 2 and where == "inside")))
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
    model.train()
    optimizer.zero_grad()
    step(model, optimizer, 1)
    with zero.gathered():
        return told, reference.weights(model)


@pytest.mark.parametrize("where", ["between", "inside"])
def test_a_rank_that_raises_is_named_and_all_train_on(ranks, where):
    (first, weights), (second, others) = ranks.run(2, raising, 3, where)
    assert second.startswith("ValueError: no such token" if where == "between" else "IndexError: ")
    assert first.startswith("PeerError: ") and "rank 1" in first
    assert ("generating() raised ValueError: no such token" if where == "between" else "raised IndexError") in first
    assert reference.first_difference(weights, others) == ""


def refused():
    """The errors of what cannot be inside, on one rank alone and on all."""
    model, optimizer, zero = speaker(3)
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
            model(torch.arange(5))

    def parts():
        with zero.generating(), torch.no_grad():
            (model.blocks[0] if rank_processes.rank() else model.blocks[1])(torch.ones(2, 16))

    def without():
        model.eval()
        model.generate(torch.arange(5), 1 + rank_processes.rank())
        step(model, optimizer, 0)

    for call in (nested, in_grad_mode, parts, without):
        hear(call)
        model.train()
    step(model, optimizer, 1)
    return told


def test_what_cannot_be_inside_is_refused_by_name(ranks):
    for nested, grad, parts, without in ranks.run(2, refused):
        assert "generating() inside another one" in nested
        assert "in grad mode" in grad and "with torch.no_grad(): ... around them" in grad
        assert "different parts of the model" in parts and "'blocks.0', 'blocks.1'" in parts
        assert "with zero.generating(): ... each as often as it needs to" in without


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
