"""One rank calls the model without grad inside `gathered()`, as to sample from it, while the others wait to leave."""

from __future__ import annotations

import os
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ranks as rank_processes
import reference
import zeroshard
from zeroshard import Comm, Layout, Offload
from zeroshard.comm import groups
from zeroshard.errors import PeerError


class Block(nn.Module):
    def __init__(self, position: nn.Embedding) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.BatchNorm1d(16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.shared = position  # of another unit

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x) + self.shared.weight[0])))


class Speaker(nn.Module):
    """A language model in small: a head tied to the embedding, read outside its module; buffers; a shared module."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(11, 16), nn.Embedding(4, 16)
        self.blocks = nn.ModuleList(Block(self.position) for _ in range(3))
        self.register_buffer("scale", torch.ones(1))

    def forward(self, tokens):
        x = self.embedding(tokens) + self.position.weight[1]
        for block in self.blocks:
            x = block(x)
        return F.linear(x * self.scale, self.embedding.weight)

    @torch.no_grad()
    def generate(self, tokens, count):
        for _ in range(count):
            tokens = self(tokens).argmax(-1)
        return tokens.tolist()


def speaker(stage: int, **settings):
    torch.manual_seed(0)
    model = Speaker()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer, zeroshard.shard(model, optimizer, stage=stage, **settings)


def step(model, optimizer, index: int) -> None:
    tokens = torch.randint(11, (5,), generator=torch.Generator().manual_seed(index))
    optimizer.zero_grad()
    F.cross_entropy(model(tokens).float(), tokens).backward()
    optimizer.step()


def sampled(stage: int, who: str, settings: dict):
    """What a rank sampled between steps, and the weights after them; of rank 0, of each in turn, of all, or of none."""
    rank, (model, optimizer, zero) = rank_processes.rank(), speaker(stage, **settings)
    said = []
    for index in range(4):
        step(model, optimizer, index)
        model.eval()
        with zero.gathered():
            if who == "all" or rank == {"first": 0, "in turn": index % 2}.get(who):
                said.append(model.generate(torch.arange(5), 3))
                with torch.no_grad():
                    said.append(model.blocks[1](torch.ones(2, 16)).argmax().item())  # a part of it, by itself
        model.train()
    with zero.gathered():
        return said, reference.weights(model)


SETTINGS = {
    "fp32": {},
    "on the host": {"offload": Offload(parameters="cpu")},
    "shared memory": {"comm": Comm(transport="shared")},
    "whole units": {"layout": Layout(units=["blocks.*", "embedding"])},
}


@pytest.mark.row(25)
@pytest.mark.parametrize("what", SETTINGS)
def test_any_rank_samples_inside_gathered(ranks, stage, what):
    """It hears what all would, and training goes on with the bits of one in which nobody had sampled."""
    settings = SETTINGS[what]
    (everyone, weights), _ = ranks.run(2, sampled, stage, "all", settings)
    assert reference.first_difference(ranks.run(2, sampled, stage, "nobody", settings)[1][1], weights) == ""
    for who, kept in (("first", (slice(None), slice(0))), ("in turn", (slice(0, None, 4), slice(2, None, 4)))):
        for rank, (said, got) in enumerate(ranks.run(2, sampled, stage, who, settings)):
            alike = [each for at in range(0, 8, 4) for each in everyone[at + 2 * rank : at + 2 * rank + 2]]
            assert said == (alike if who == "in turn" else everyone[kept[rank]])
            assert reference.first_difference(got, weights) == ""


def partly(stage: int, who: str):
    """Part of the model is gathered, in two blocks; what ranks hear, and the weights of a step more."""
    rank, (model, optimizer, zero) = rank_processes.rank(), speaker(stage)
    plain = Speaker()
    step(model, optimizer, 0)
    model.eval()
    with zero.gathered():
        plain.load_state_dict(model.state_dict())
    plain.eval()
    told, said, want = "", [], []
    try:
        with zero.gathered(model.blocks[0], model.position), zero.gathered(model.blocks[1]), torch.no_grad():
            if rank == 0:  # all of what this needs is here
                x = torch.ones(2, 16)
                said.append(model.blocks[1](model.blocks[0](x)))
                want.append(plain.blocks[1](plain.blocks[0](x)))
            if rank == 0 or who == "all":
                said.append(model.blocks[2](torch.ones(2, 16)))
                want.append(plain.blocks[2](torch.ones(2, 16)))
    except PeerError as error:
        told = f"{error}; after {error.__context__}"
    model.train()
    optimizer.zero_grad()
    step(model, optimizer, 1)
    with zero.gathered():
        return told, all(map(torch.equal, said, want)), reference.weights(model)


@pytest.mark.row(25)
def test_what_is_not_gathered_needs_all_ranks(ranks, stage):
    """Where all call it, it is gathered; where one does, all are told whose weights that are, once, and train on."""
    together = ranks.run(2, partly, stage, "all")
    assert [(told, right) for told, right, _ in together] == [("", True)] * 2
    for rank, (told, right, weights) in enumerate(ranks.run(2, partly, stage, "one")):
        assert right
        assert reference.first_difference(weights, together[rank][2]) == ""
        if stage < 3:
            assert told == ""
            continue
        assert told.endswith("; after None")
        assert "rank 0 is at forward without grad" in told and "rank 1 is at leaving gathered()" in told
        assert "rank 0: this rank's forward needs the weights of 'blocks.2'" in told
        assert "with zero.gathered(): ... any of them, without grad, what it gathers" in told


def unfinished(stage: int):
    """Rank 0 samples outside gathered(), where rank 1's program has come to its normal end."""
    rank, (model, optimizer, zero) = rank_processes.rank(), speaker(stage)
    step(model, optimizer, 0)
    if rank == 1:
        groups._last_words(weakref.ref(zero._engine.group._link.groups))
        os._exit(0)
    try:
        with zero.gathered():
            pass
    except PeerError as error:
        return f"{error}"


@pytest.mark.row(25)
def test_a_program_that_has_ended_normally_is_no_crash(ranks):
    said, gone = ranks.run(2, unfinished, 3, expect_errors=True, timeout=60.0, group_timeout=100.0)
    assert gone.type == "Died"
    assert "rank 1 has ended: its program came to its end" in said
    assert "every rank calls the model" in said.split("instead:")[1]
    assert "first error" not in said
