"""Programs with streams of their own, on the emulated accelerator: each comes after the weights that it uses."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import emulated
import ranks
import reference
import zeroshard
from zeroshard import Comm, Layout

WIDTH = 16


class Beside(nn.Module):
    """Its second block computes in a stream of its own, which waits for the input alone, and joins at the end."""

    def __init__(self, aside, twice):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.aside, self.twice = aside, twice

    def forward(self, x):
        first, second, *more = self.blocks
        main = torch.emu.current_stream()
        side = torch.emu.Stream("side") if self.aside else main
        x = first(x)
        side.wait_stream(main)
        y = second(x) if self.twice else x
        with torch.emu.stream(side):
            z = second(x)
        for block in more:
            y = block(y)
        main.wait_stream(side)
        z.record_stream(main)
        return y + z


def beside_another_stream(stage, aside, twice, comm):
    torch.manual_seed(0)
    model = Beside(aside, twice).to("emu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    zero = zeroshard.shard(model, optimizer, stage=stage, layout=Layout(bucket_mib=0.001), comm=comm)
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + ranks.rank())
        x = torch.randn(4, WIDTH, generator=generator).to("emu")
        with torch.no_grad():
            model(x)
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with zero.gathered():
        return {name: weight.cpu() for name, weight in reference.weights(model).items()}


CASES = [
    (2, 3, False, Comm()),  # gathered ahead in one stream, used and released in the other
    pytest.param(2, 3, True, Comm(release_after_forward=False), marks=pytest.mark.full),  # landed in one, used in both
    (2, 1, True, Comm()),  # replicated weights that a step has sent
    pytest.param(1, 3, False, Comm(), marks=pytest.mark.full),
]


@pytest.mark.parametrize(("world", "stage", "twice", "comm"), CASES)
def test_a_unit_in_a_stream_of_its_own_comes_after_its_weights(world, stage, twice, comm):
    """The detector finds no race, and the bits are those of one stream."""
    found = emulated.run(world, beside_another_stream, stage, True, twice, comm, seed=3)
    want = emulated.run(world, beside_another_stream, stage, False, twice, comm, seed=4)
    for got, plain in zip(found, want, strict=True):
        reference.assert_same(got, plain)
