"""A rank that dies, stops answering or raises is named by all others, with where they were; and what remains goes on.

The time-out of the process group is longer than a run may last: an error that came by time-out fails the test as hung.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import pages
import ranks as rank_processes
import reference
import zeroshard
from zeroshard.checkpoint import saving
from zeroshard.comm.process_group import ProcessGroup
from zeroshard.engine.gradients import sums
from zeroshard.engine.gradients.sums import Sums
from zeroshard.engine.weights.bucket import Bucket
from zeroshard.errors import PeerError
from zeroshard.layout import mesh

PATIENT = {"group_timeout": 100.0, "timeout": 30.0, "expect_errors": True}
DYING = 3  # the step in which it happens


def three(stage: int, *, optimizer=torch.optim.AdamW):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16))
    made = optimizer(model.parameters(), lr=0.01)
    return model, made, zeroshard.shard(model, made, stage=stage)


def x(index: int):
    return torch.randn(3, 16, generator=torch.Generator().manual_seed(index))


def step(model, optimizer, index: int) -> None:
    optimizer.zero_grad()
    model(x(index)).square().sum().backward()
    optimizer.step()


def before(owner, name: str, act) -> None:
    """Do `act` first whenever the method is called. For workers that do not outlive the test."""
    original = getattr(owner, name)

    def first(*args, **kwargs):
        act()
        return original(*args, **kwargs)

    setattr(owner, name, first)


def arm(where: str, model, optimizer, act) -> None:
    """From now on, `act` happens in the middle of `where`."""
    if where == "forward":
        model[1].register_forward_pre_hook(lambda *_: act())
    elif where == "backward":
        model[1].register_forward_hook(lambda _, __, out: (out.register_hook(lambda grad: act()), None)[1])
    elif where == "gather":
        before(Bucket, "gather", act)
    elif where == "reduce":
        before(Sums, "send", act)
    elif where == "fold":  # once backward has ended, while sums are still under way
        engine = model._zeroshard_engine
        before(sums, "fold", lambda: act() if engine.ledger.phase == "reduce" else None)
    elif where == "step":
        optimizer.register_step_post_hook(lambda *_: act())
    elif where == "save":
        before(saving, "_write_own", act)


def loses_a_rank(where: str, stage: int, how: int, folder: str, pids: str | None = None) -> None:
    rank, last = rank_processes.rank(), rank_processes.world() - 1
    model, optimizer, zero = three(stage)
    for index in range(DYING - 1):
        step(model, optimizer, index)
    zero.save(f"{folder}/ckpt")
    if rank == last:
        arm(where, model, optimizer, lambda: os.kill(os.getpid(), how))
    step(model, optimizer, DYING - 1)
    if where in ("step", "save", "gather"):  # these three end after the step, or show only then
        zero.save(f"{folder}/ckpt")
        step(model, optimizer, DYING)


def continued(stage: int, path: str):
    """What one rank that loads the checkpoint has after one step more, and what it would have without any of this."""
    model, optimizer, zero = three(stage)
    zero.load(path)
    step(model, optimizer, DYING - 1)
    with zero.gathered():
        return reference.weights(model)


# the phases in which the others may be when they find out, at stages 1 and 3
SEEN = {
    "forward": ("forward", "the loop, waiting for backward 3"),
    "backward": ("backward", "reduce"),  # a rank far ahead waits at the end of backward already
    "gather": ("forward", "step", "the loop, waiting for saving 2"),
    "reduce": ("backward", "reduce"),
    "step": ("step", "forward", "the loop, waiting for saving 2"),
    "save": ("save",),
}


def check_named(outcomes, where: str, what: str) -> None:
    last = len(outcomes) - 1
    for rank, outcome in enumerate(outcomes[:-1]):
        assert outcome.type == PeerError.__name__, outcome
        assert f"a collective did not complete: rank {last} {what}" in outcome.message, outcome.message
        place = outcome.message.split("where: ")[1].splitlines()[0]
        assert place.startswith(f"rank {rank}: step ") and "waiting for " in place, place
        assert int(place.split("step ")[1].split(",")[0]) in (DYING, DYING + 1), place
        assert any(f"in {phase}" in place for phase in SEEN[where]), place


@pytest.mark.row(1)
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("where", SEEN)
def test_a_killed_rank_is_named_and_what_remains_goes_on(ranks, tmp_path, where, stage):
    """kill -9 in every phase: rank, phase and step are named at once; the last checkpoint loads and continues."""
    outcomes = ranks.run(2, loses_a_rank, where, stage, signal.SIGKILL, str(tmp_path), **PATIENT)
    assert outcomes[-1].type == "Died" and "SIGKILL" in outcomes[-1].message
    check_named(outcomes, where, "is gone: its process has ended")
    (after,) = ranks.run(1, continued, stage, str(tmp_path / "ckpt"), group=False)
    assert reference.first_difference(after, unbroken(DYING)) == ""  # each rank was given the same batch


@pytest.mark.full
def test_the_page_shows_what_the_other_ranks_say(ranks, tmp_path):
    """docs/trust.md, of another step and unit."""
    first, *_ = ranks.run(3, loses_a_rank, "gather", 3, signal.SIGKILL, str(tmp_path), **PATIENT)
    block = pages.shown("trust.md", "zeroshard.errors.PeerError").replace("zeroshard.errors.PeerError: ", "")
    own = "in backward, waiting for gather of unit '.*?', turn . of . of the script", pages.DIGITS
    assert pages.is_shown(block, first.message, *own), first.message


def lost_before_it_connects(named: int) -> None:
    """The last rank ends behind the others' rows, before they have sent each other anything in the group of all."""
    mesh.LONGEST_AXIS = 2  # so that four ranks have a grid, and that group is connected lazily
    if rank_processes.rank() == named:
        before(ProcessGroup, "_texts", lambda: os.kill(os.getpid(), signal.SIGKILL))
    three(3)


@pytest.mark.row(1)
def test_a_rank_that_is_killed_before_it_is_connected_is_named(ranks):
    """Gloo would wait for it until the group's time-out, or for ever: the ranks ask each other."""
    *left, killed = ranks.run(4, lost_before_it_connects, 3, **PATIENT)
    assert killed.type == "Died" and "SIGKILL" in killed.message
    for outcome in left:
        assert outcome.type == PeerError.__name__, outcome
        assert "a collective did not complete: rank 3 is gone: its process has ended" in outcome.message


def unbroken(steps: int):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for index in range(steps):
        step(model, optimizer, index)
    return reference.weights(model)


@pytest.mark.row(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "stage"),
    # at stage 0 no weight is gathered
    [(where, stage) for where in SEEN for stage in (0, 1, 2, 3) if (where, stage) != ("gather", 0)],
)
def test_a_killed_rank_is_named_by_all_of_three(ranks, tmp_path, where, stage):
    """Also by ranks that wait for somebody who lives."""
    outcomes = ranks.run(4, loses_a_rank, where, stage, signal.SIGKILL, str(tmp_path), **PATIENT)
    check_named(outcomes, where, "is gone: its process has ended")


@pytest.mark.row(60)
@pytest.mark.slow
@pytest.mark.parametrize("where", SEEN)
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGHUP], ids=lambda how: how.name)
def test_a_rank_that_a_signal_ends_in_any_phase_is_named(ranks, tmp_path, where, how):
    """As row 1, by the signals with which schedulers end programs; nothing is left beside the checkpoints."""
    outcomes = ranks.run(2, loses_a_rank, where, 3, how, str(tmp_path), **PATIENT)
    assert outcomes[-1].type == "Died" and how.name in outcomes[-1].message
    check_named(outcomes, where, "is gone: its process has ended")
    assert os.listdir(tmp_path) == ["ckpt"]


def stopped(stage: int, where: str, folder: str) -> None:
    Path(folder, f"pid{rank_processes.rank()}").write_text(str(os.getpid()))
    loses_a_rank(where, stage, signal.SIGSTOP, folder)


def wake(pid_file: Path, after: float) -> None:
    """Some seconds after the rank has stopped."""

    def state() -> str:
        pid = pid_file.read_text() if pid_file.exists() else ""
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] if pid else ""

    rank_processes.until(lambda: state() == "T", 40)
    time.sleep(after)
    os.kill(int(pid_file.read_text()), signal.SIGCONT)


@pytest.mark.row(2)
@pytest.mark.parametrize(
    ("stage", "where"),
    [
        (3, "forward"),
        pytest.param(1, "backward", marks=pytest.mark.slow),
        pytest.param(2, "save", marks=pytest.mark.full),  # which waits for as long as it takes for ranks that write
    ],
)
def test_a_stopped_rank_is_named_and_harms_nothing_when_it_wakes(ranks, tmp_path, stage, where):
    """Within the time-out and two seconds, or seven, the others say who is silent; once awake it is told of it."""
    waker = threading.Thread(target=wake, args=(tmp_path / "pid1", 7.0 if where != "save" else 16.0))
    waker.start()
    outcomes = ranks.run(2, stopped, stage, where, str(tmp_path), group_timeout=3.0, timeout=60.0, expect_errors=True)
    waker.join()
    check_named(outcomes, where, "is silent: it is stopped")
    assert outcomes[1].type == PeerError.__name__, outcomes[1]


# --- an exception on one rank ---------------------------------------------------------------------------------------------


class Boom(Exception):
    pass


def retried(where: str, stage: int, victim: int | None):
    """Training in which `where` raises once, on one rank or on all; every rank tries the step again until it works."""
    rank = rank_processes.rank()
    model, optimizer, zero = three(stage, optimizer=torch.optim.SGD)
    raised: list[str] = []
    armed = victim in (rank, None)

    def boom():
        nonlocal armed
        if armed and index == 2:
            armed = False
            raise Boom("only once")

    if where == "hook":
        next(model[1].parameters()).register_hook(lambda grad: boom())
    elif where == "step":
        optimizer.register_step_pre_hook(lambda *_: boom())
    else:
        arm(where, model, optimizer, boom)
    for index in range(4):
        while True:
            try:
                step(model, optimizer, index)
                break
            except (Boom, PeerError) as error:
                raised.append(f"{type(error).__name__}: {error}")
    held = zero.ledger().held.get("gather", 0)
    with zero.gathered():
        return reference.weights(model), raised, held


def plain_steps(steps: int):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for index in range(steps):
        step(model, optimizer, index)
    return reference.weights(model)


PLACES = ["forward", "backward", "hook", "fold", "step"]


@pytest.mark.row(3)
@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("where", PLACES)
def test_an_exception_on_one_rank_reaches_the_others_and_the_step_can_be_tried_again(ranks, where, stage):
    """All ranks are told at once, by name and message; each tries again until it works; the bits are plain PyTorch's."""
    outcomes = ranks.run(2, retried, where, stage, 1, group_timeout=100.0, timeout=30.0)
    for weights, _, held in outcomes:
        assert reference.first_difference(weights, plain_steps(4)) == ""
        assert held == 0
    said = {
        "forward": "rank 1: forward 3 raised Boom: only once",
        "step": "rank 0 is at step 3; rank 1 is at forward 4",
    }
    (first, second) = (outcomes[0][1], outcomes[1][1])
    assert second[0] == "Boom: only once" and len(first) == 1
    if where in said:  # found where rank 1 comes again, by both
        assert len(second) == 2
        for error in (first[0], second[1]):
            assert error.startswith("PeerError: the ranks are not doing the same thing"), error
            assert said[where] in error, error
    else:  # rank 1 calls all to end what is under way
        assert len(second) == 1
        assert first[0].startswith("PeerError: a rank was interrupted"), first
        assert "rank 1: an exception ended backward 3" in first[0], first


def accumulated(stage: int):
    """The forward of a step's second micro-batch raises on rank 1; only that micro-batch is tried again."""
    model, optimizer, zero = three(stage, optimizer=torch.optim.SGD)
    armed = rank_processes.rank() == 1

    def boom():
        nonlocal armed
        if armed and index == 1:
            armed = False
            raise Boom("only once")

    arm("forward", model, optimizer, boom)
    for index in range(3):
        while True:
            try:
                model(x(index)).square().sum().backward()
                break
            except (Boom, PeerError):
                pass
    optimizer.step()
    with zero.gathered():
        return reference.weights(model)


@pytest.mark.row(3)
@pytest.mark.parametrize("stage", [1, 3])
def test_gradients_of_earlier_micro_batches_stay_on_all_ranks_alike(ranks, stage):
    """A forward that raised has touched no gradient, on the rank where it did or on another."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for index in range(3):
        for _ in range(2):  # both ranks have the same batch; their sum is divided by two
            model(x(index)).square().sum().backward()
    for param in model.parameters():
        param.grad.div_(2)
    optimizer.step()
    for weights in ranks.run(2, accumulated, stage, group_timeout=100.0, timeout=30.0):
        assert reference.first_difference(weights, reference.weights(model)) == ""


@pytest.mark.row(4)
@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("where", PLACES)
def test_an_exception_on_all_ranks_leaves_nothing_behind(ranks, where, stage):
    """Caught everywhere, the step is tried again: the bits of a clean run, and nothing stays gathered."""
    for weights, raised, held in ranks.run(2, retried, where, stage, None, group_timeout=100.0, timeout=30.0):
        assert raised == ["Boom: only once"] and held == 0
        assert reference.first_difference(weights, plain_steps(4)) == ""
