"""Whenever a message arrives, the bits are the same: a pause of its own before every asynchronous operation.

A pause comes before each collective is launched, and each says that it is done only a number of questions later, both
drawn per rank from a seed. So backward gives up waiting for a reduction, or folds it early or late; prefetched units arrive
before or after their use; and ranks run apart as far as the collectives let them.
"""

from __future__ import annotations

import random
import time
from contextlib import contextmanager
from functools import partial

import pytest

import ranks
import test_bits
from zeroshard import Comm
from zeroshard.comm.process_group import ProcessGroup, ProcessTeam
from zeroshard.comm.transport import Work
from zeroshard.engine.gradients import reduction

STAGES = (0, 1, 2, 3)
LONGEST = 0.002  # seconds of a pause
CHECKPOINTS = (None, "nonreentrant", "reentrant")


@contextmanager
def delays(seed):
    """Pauses before every collective of this rank, and late answers from every one under way."""
    draw = random.Random(f"{seed} of {ranks.rank()}")
    verbs = {
        (owner, name): getattr(owner, name)
        for owner, names in {
            ProcessTeam: ("_gather", "_reduce"),
            ProcessGroup: ("_broadcast", "_exchange", "_all_reduce"),
        }.items()
        for name in names
    }
    done, patience = Work.done, reduction.PAUSE
    paused = []

    def pausing(verb):
        def call(self, *args, **kwargs):
            if draw.random() < 0.5:
                paused.append(verb)
                time.sleep(draw.random() * LONGEST)
            return verb(self, *args, **kwargs)

        return call

    for (owner, name), verb in verbs.items():
        setattr(owner, name, pausing(verb))
    Work.done = lambda self: draw.random() < 0.2 and done(self)
    reduction.PAUSE = 0.01 * draw.random()  # some give up on a reduction that is late
    try:
        yield paused
    finally:
        for (owner, name), verb in verbs.items():
            setattr(owner, name, verb)
        Work.done, reduction.PAUSE = done, patience


def under_delays(seeds, want):
    """{(seed, configuration): what differs from plain PyTorch} on this rank, and how often it paused at the least."""
    found, pauses = {}, []
    for seed in seeds:
        draw = random.Random(seed)  # the same configuration on every rank
        for stage in STAGES:
            comm = Comm(prefetch=draw.randrange(4), release_after_forward=draw.random() < 0.5)
            each = (stage, draw.choice(list(test_bits.BUCKETS)), draw.choice(CHECKPOINTS), "loop")
            with delays((seed, stage)) as paused:
                trained = test_bits.train(*each, precision="fp32", backwards=2, steps=2, comm=comm)
            pauses.append(len(paused))
            if text := test_bits.difference(trained, want):
                found[seed, each, comm] = text
    return found, min(pauses)


def check(world, seeds, **options):
    want = test_bits.plain(world, "fp32", "loop", 2, 2)
    for found, pauses in ranks.run(world, partial(under_delays, seeds, want), **options):
        assert found == {}
        assert pauses > 0


@pytest.mark.full
def test_late_messages_change_no_bit():
    """Three seeds at 3 ranks and every stage: prefetch, buckets and checkpointing vary with the seed."""
    check(3, range(3))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_late_messages_change_no_bit_of_many_seeds(world):
    """Fifty seeds."""
    check(world, range(50), timeout=850.0)
