"""Step: what ends a rank, and what the others do then: in which time every rank has said why, and is gone.

Two ranks train at stage 3. One is killed, runs out of memory in a forward, is interrupted in a backward, or is told to
end. Who is lost must be named by the other; after what a rank survives, both try the step again and have plain torch's
bits.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from zeroshard import Comm, Error
from zeroshard.errors import PeerError

from . import training
from .place import ranks
from .record import Record, Wrong

AGAIN = 5  # times that a step is tried
LIMIT = 20.0  # seconds of Comm(timeout=...)
DRAWN = 12  # interrupts, one in each step
LOST = {"kill -9": signal.SIGKILL, "SIGTERM": signal.SIGTERM}


def run(record: Record) -> None:
    for name, number in LOST.items():
        record.case(f"{name} between forward and backward", _lost, record, int(number))
    record.case("out of memory in a forward, and the step again", _survived, record, "memory")
    record.case("Ctrl-C in a backward, and the step again", _survived, record, "interrupt")
    for stage in (3, 1):
        record.case(f"Ctrl-C in {DRAWN} drawn places at stage {stage}", _interrupted, record, stage)


def _lost(record: Record, number: int) -> dict[str, Any]:
    """Rank 1 is ended by a signal in its second step."""
    with tempfile.TemporaryDirectory() as folder:
        outcomes = record.place.run(2, one_ends, number, folder, timeout=120.0, expect_errors=True)
        at, told = float(Path(folder, "ended").read_text()), Path(folder, "told")
        gone = time.monotonic() - at
        left, lost = outcomes
        if lost.type != "Died":
            raise Wrong(f"rank 1 was to end, and: {lost}")
        if not told.exists():
            raise Wrong(f"rank 0 has not said why it ends: {left}")
        said, seconds = told.read_text().split("\n", 1)[1], float(told.read_text().split("\n")[0]) - at
    if "rank 1" not in said:
        raise Wrong(f"rank 0 does not name rank 1: {said}")
    return {"seconds until rank 0 said why": round(seconds, 2), "until both were gone": round(gone, 2), "said": said}


def one_ends(kind: str, number: int, folder: str) -> None:
    model, optimizer, _ = training.shard(kind, "bf16", 3, comm=Comm(timeout=LIMIT))
    _step(kind, model, optimizer, 0)

    def end(logits: torch.Tensor) -> torch.Tensor:
        if ranks.rank() == 1:
            signal.signal(number, signal.SIG_DFL) if number != signal.SIGKILL else None
            Path(folder, "ended").write_text(f"{time.monotonic()}")
            os.kill(os.getpid(), number)
            time.sleep(60)
        return logits

    model.trip = end
    try:
        for step in range(1, 20):
            _step(kind, model, optimizer, step)
    except Error as error:
        Path(folder, "told").write_text(f"{time.monotonic()}\n{error}")
        raise


def _survived(record: Record, what: str) -> dict[str, Any]:
    found = record.place.run(2, tries_again, what, timeout=180.0)
    if found[1]["raised"][:1] != [{"memory": "OutOfMemoryError", "interrupt": "KeyboardInterrupt"}[what]]:
        raise Wrong(f"rank 1 was to raise, and: {found[1]}")
    if found[0]["raised"][:1] != ["PeerError"]:
        raise Wrong(f"rank 0 was to be told, and: {found[0]}")
    return {f"rank {rank}": each for rank, each in enumerate(found)}


def tries_again(kind: str, what: str) -> dict[str, Any]:
    """What was raised here, and the seconds until the step that was tried again was done."""
    model, optimizer, zero = training.shard(kind, "bf16", 3, comm=Comm(timeout=LIMIT))
    _step(kind, model, optimizer, 0)
    armed = [ranks.rank() == 1]

    def fail() -> None:
        if armed[0]:
            armed[0] = False
            if what == "memory":
                raise torch.OutOfMemoryError("played: this device has no room for it")
            raise KeyboardInterrupt

    def trip(logits: torch.Tensor) -> torch.Tensor:
        if what == "memory":
            fail()
        else:
            logits.register_hook(lambda _: fail())
        return logits

    model.trip = trip
    raised, begun = [], time.monotonic()
    for _ in range(AGAIN):
        try:
            optimizer.zero_grad()
            _step(kind, model, optimizer, 1)
            break
        except (torch.OutOfMemoryError, KeyboardInterrupt, PeerError) as error:
            raised.append(type(error).__name__)
    else:
        raise Wrong(f"the step was tried {AGAIN} times: {raised}")
    seconds = time.monotonic() - begun
    want = training.plain(kind, "bf16", ranks.world())
    with zero.gathered():
        got = {name: each.cpu() for name, each in training.reference.weights(model).items()}
    if different := training.reference.first_difference(got, want.weights):
        raise Wrong(f"after it was tried again: {different}")
    return {"raised": raised, "seconds": round(seconds, 2)}


def _interrupted(record: Record, stage: int) -> dict[str, Any]:
    found = record.place.run(2, in_drawn_places, stage, timeout=240.0)
    return {f"rank {rank}": each for rank, each in enumerate(found)}


def in_drawn_places(kind: str, stage: int) -> list[str]:
    """One rank is interrupted behind a module's forward, or where its gradient comes, in every step; then it is tried
    again until it is through. Returns what was raised on this rank, step by step."""
    model, optimizer, zero = training.shard(kind, "bf16", stage, comm=Comm(timeout=LIMIT))
    draw, raised, armed = random.Random(stage), [], [False]
    modules = [module for module in model.modules() if not [*module.children()]]

    def fail() -> None:
        if armed[0]:
            armed[0] = False
            raise KeyboardInterrupt

    for step in range(DRAWN):
        module, behind_forward, struck = draw.choice(modules), draw.random() < 0.4, draw.randrange(ranks.world())

        def trip(_: Any, __: Any, output: torch.Tensor, behind_forward: bool = behind_forward) -> None:
            fail() if behind_forward else output.register_hook(lambda _: fail())

        hook, armed[0] = module.register_forward_hook(trip), ranks.rank() == struck
        for attempt in range(AGAIN):
            try:
                optimizer.zero_grad()
                _step(kind, model, optimizer, step)
                break
            except (KeyboardInterrupt, PeerError) as error:
                raised.append(f"{step}: {type(error).__name__}")
                if attempt == AGAIN - 1:
                    raise Wrong(f"step {step} was tried {AGAIN} times: {raised}") from error
        hook.remove()
    want = training.plain(kind, "bf16", ranks.world(), steps=DRAWN)
    with zero.gathered():
        got = {name: each.cpu() for name, each in training.reference.weights(model).items()}
    if different := training.reference.first_difference(got, want.weights):
        raise Wrong(f"after {raised}: {different}")
    return raised


def _step(kind: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    training.loss_of(model, training.batches(kind)(number, ranks.rank())).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), training.CLIP)
    optimizer.step()
    optimizer.zero_grad()
