"""Whatever ends between any two instructions of the program, nothing under way is changed: see `finalizers.py`."""

from __future__ import annotations

import builtins
import contextlib
import gc
import random
import sys
import threading
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

import ranks as rank_processes
import reference
import zeroshard
from zeroshard import events
from zeroshard.comm import (
    agreement,
    collectives,
    groups,
    host_peers,
    launch_log,
    process_group,
    process_team,
    shared_memory,
    transport,
)
from zeroshard.comm.agreement import Progress
from zeroshard.comm.collectives import Link
from zeroshard.comm.frames import Call
from zeroshard.comm.process_group import ProcessGroup
from zeroshard.comm.transport import LENT, Work
from zeroshard.events import Ledger

MODULES = (
    agreement, events, groups, collectives, host_peers, process_group, process_team, shared_memory, launch_log, transport
)  # fmt: skip
COPIES = ("all", "any", "dict", "list", "max", "min", "set", "sorted", "sum", "tuple")


@contextlib.contextmanager
def collections_drawn(seed: int, often: float):
    """What these modules copy or walk is looked through by the collector, drawn, before each of its items."""
    draw, before = random.Random(seed), gc.get_threshold()

    class Drawing:
        def __init__(self, name):
            self.real = getattr(builtins, name)

        def __call__(self, *args, **kwargs):
            if len(args) != 1 or hasattr(args[0], "keys"):
                return self.real(*args, **kwargs)
            return self.real(items(iter(args[0])), **kwargs)

        def __getitem__(self, of):  # list[int]
            return self.real[of]

    def items(them):
        while True:
            if draw.random() < often:
                gc.collect()
            try:
                item = next(them)
            except StopIteration:
                return
            yield item

    for module in MODULES:
        for name in COPIES:
            setattr(module, name, Drawing(name))
    gc.set_threshold(1)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        for module in MODULES:
            for name in COPIES:
                delattr(module, name)


def sums(transport: str):
    """A thousand launches and more, before each of which another model has ended: of so many gathers, what came."""
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 4)
    zero = zeroshard.shard(model, None, stage=3, comm=zeroshard.Comm(transport=transport))
    group, bucket = zero._engine.group, zero._engine.buckets[0].plan
    own, found = group._link, []
    launched = group.launched[0]

    def gathered(number):
        ended = ProcessGroup(group.team, Link(own.groups, own.ledger, own.progress), None)
        ended.itself = ended  # so that only the collector finds its end
        full = torch.full((bucket.numel,), float(number * (zero.rank + 1)))
        return full, group.team.gather(full, bucket, "")

    with collections_drawn(zero.rank, 0.02):
        while group.launched[0] < launched + 1000:
            under_way = [gathered(len(found) + turn) for turn in range(4)]
            for full, work in under_way:
                work.wait()
                found.append(int(full.sum()))
    gc.collect()
    held = own.ledger.snapshot().held.get(LENT, 0)
    wanted = [sum(bucket.shard_numel(rank) * number * (rank + 1) for rank in range(zero.world_size))
              for number in range(len(found))]  # fmt: skip
    return found == wanted, held, sum(len(stream.under_way) for stream in own.groups.levelling)


@pytest.mark.row(36)
@pytest.mark.parametrize("transport", ["gloo", "shared"])
def test_a_thousand_launches_while_models_end(ranks, transport):
    """The collector finds their ends inside every copy of what is under way, and nothing of that is changed."""
    assert ranks.run(2, sums, transport) == [(True, 0, 0)] * 2


def one_after_the_other(seed: int | None, stages, transport: str):
    """The weights of models trained one after the other, as a search over settings does; the last one's ends first."""
    comm, found = zeroshard.Comm(transport=transport), {}
    drawn = contextlib.nullcontext() if seed is None else collections_drawn(seed + rank_processes.rank(), 0.002)
    with drawn:
        for number, stage in enumerate(stages):
            torch.manual_seed(number)
            model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            zero = zeroshard.shard(model, optimizer, stage=stage, comm=comm)
            for step in range(2):
                optimizer.zero_grad()
                model(torch.ones(2, 8) * (step + rank_processes.rank())).square().sum().backward()
                optimizer.step()
            with zero.gathered():
                found |= {f"{number}.{name}": weight for name, weight in reference.weights(model).items()}
    return found


@pytest.mark.row(36)
@pytest.mark.parametrize("transport", ["gloo", "shared"])
def test_models_trained_one_after_the_other(ranks, transport):
    """Each ends in the middle of a later one's steps; the bits are those of a quiet run."""
    stages = [3, 1, 3, 2, 3, 0, 3]
    quiet, _ = ranks.run(2, one_after_the_other, None, stages, transport)
    for weights in ranks.run(2, one_after_the_other, 1, stages, transport):
        assert reference.first_difference(weights, quiet) == ""


def test_memory_lent_that_ends_while_the_ledger_counts():
    """Its end is noted: under the ledger's own lock, nobody could count it."""
    ledger = Ledger()

    class Collecting(defaultdict):
        def __setitem__(self, state, nbytes):
            gc.collect()
            super().__setitem__(state, nbytes)

    work = Work()
    work.lends(ledger, 8)
    work.itself = work
    ledger.held = Collecting(int, ledger.held)
    del work
    counting = threading.Thread(target=ledger.hold, args=("gather", 4), daemon=True)
    counting.start()
    counting.join(30)
    assert not counting.is_alive()
    assert {state: nbytes for state, nbytes in ledger.snapshot().held.items() if nbytes} == {"gather": 4}
    other = Work()
    other.lends(ledger, 8)
    other.wait()
    del other
    assert ledger.held[LENT] == 0


def test_a_gather_whose_model_has_ended_is_let_go_of_once_it_is_through():
    through = SimpleNamespace(is_completed=lambda: True)
    dropped, later = Work([through]), Work([SimpleNamespace(is_completed=lambda: False)])
    dropped.hold(torch.zeros(1))
    later.hold(torch.zeros(1))
    try:
        assert dropped not in transport._holding
        assert later in transport._holding
    finally:
        transport._holding.pop(later)


class Passing:
    """An attribute that another thread sets to None as soon as it was read."""

    def __set_name__(self, owner, name):
        self.name = f"_{name}"

    def __get__(self, instance, owner):
        value, instance.__dict__[self.name] = instance.__dict__.get(self.name), None
        return value

    def __set__(self, instance, value):
        instance.__dict__[self.name] = value


def test_what_the_watch_is_asked_while_the_program_goes_on():
    """Its thread answers for this rank, and what it reads may be another thing the moment after."""

    class Going(Progress):
        awaited = Passing()

    progress = Going()
    progress.awaited = ("gather", None)
    assert progress.words("forward") == "step 1, in forward, waiting for gather"
    assert "not waiting for other ranks" in progress.words("forward")

    class Shared:
        call = Passing()

    shared = Shared()
    shared.call = Call()
    asked = SimpleNamespace(groups=shared)
    assert [Link.interrupted.fget(asked) for _ in range(2)] == [False, False]

    class Ending(list):
        def __bool__(self):
            self.clear()
            return True

    ledger = Ledger()
    ledger._running = Ending([("forward", None)])
    assert ledger.phase == "forward"


def test_a_call_of_another_thread_runs_however_that_goes_on(monkeypatch):
    """What is on its stack is looked for again where it has gone on meanwhile."""
    ready, over, calls = threading.Event(), threading.Event(), []

    def runs():
        calls.append(Call())
        ready.set()
        over.wait(30)

    thread = threading.Thread(target=runs)
    thread.start()
    ready.wait(30)

    def left():
        return sys._getframe()

    frames, current = iter([{thread.ident: left()}]), sys._current_frames
    monkeypatch.setattr(sys, "_current_frames", lambda: next(frames, None) or current())
    assert calls[0].running()
    over.set()
    thread.join()
    assert not calls[0].running()
