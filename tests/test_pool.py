"""What lives a moment of each step lies in memory that is kept: no step of a steady run asks for more."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import ranks
import zeroshard
from zeroshard import Layout
from zeroshard.tiers.pool import KEPT, SMALLEST, Pool

WIDE = SMALLEST // 4  # float32 elements of the smallest block that is kept


def test_a_block_comes_back_for_what_nearly_fills_it():
    """The same memory for the same size, for nine tenths of it, in any dtype; not for less, and not while it is used."""
    pool = Pool()
    first = pool.take(2 * WIDE, torch.float32)
    other = pool.take(2 * WIDE, torch.float32)
    assert first.data_ptr() != other.data_ptr()
    pool.give_back(first)
    assert pool.take(WIDE, torch.float32).data_ptr() != first.data_ptr()
    again = pool.take(4 * WIDE * 9 // 10, torch.float16)
    assert (again.data_ptr(), again.numel(), again.dtype) == (first.data_ptr(), 4 * WIDE * 9 // 10, torch.float16)


def test_the_smallest_block_that_fits_is_taken():
    pool = Pool()
    blocks = [pool.take(numel, torch.uint8) for numel in (1250 << 10, 1100 << 10, 1 << 20)]
    for block in blocks:
        pool.give_back(block)
    taken = [pool.take(numel, torch.uint8) for numel in (1 << 20, 1 << 20, 1 << 20)]
    assert [block.data_ptr() for block in taken] == [block.data_ptr() for block in reversed(blocks)]


def test_little_things_are_malloc_s():
    pool = Pool()
    pool.give_back(pool.take(WIDE - 1, torch.float32))
    assert pool._idle == []


def test_what_is_kept_is_bounded():
    """The blocks idle longest go first."""
    pool = Pool()
    blocks = [pool.take((KEPT // 4) + (1 << 16) * at, torch.uint8) for at in range(5)]  # never touched: no real memory
    for block in blocks:
        pool.give_back(block)
    assert [len(block) for block in pool._idle] == [block.numel() for block in blocks[2:]]


def test_memory_lives_as_long_as_a_tensor_of_it():
    """A pool that is gone does not take back what is still read."""
    held = Pool().take(WIDE, torch.float32).fill_(7.0)[5:]
    Pool().take(WIDE, torch.float32).fill_(8.0)
    assert held.eq(7.0).all()


@pytest.mark.parametrize("stage", [1, 3])
def test_a_steady_step_takes_no_new_memory(stage):
    """Blocks of the first two steps serve all later ones: gathers, send and receive buffers of 1 MiB and more."""
    for early, late in ranks.run(2, partial(blocks_after, stage)):
        assert early
        assert late == early


def blocks_after(stage):
    """Addresses of the idle blocks after two steps, and after five."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(900, 900) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero = zeroshard.shard(model, optimizer, stage=stage, layout=Layout(bucket_mib=4))
    found = []
    for step in range(5):
        model(torch.full((2, 900), float(step))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in (1, 4):
            with zero.gathered():
                pass
            found.append(
                sorted(torch.frombuffer(block, dtype=torch.uint8).data_ptr() for block in zero._engine.tier._pool._idle)
            )
    return found
