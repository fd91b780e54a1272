"""What a rank does in a case: one training in which every claim is put to the test, each at its own step."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import reference
import training
import zeroshard
from zeroshard.engine.gradients.reduction import PAUSE, UNHURRIED
from zeroshard.errors import PeerError
from zeroshard.planner import predict_tiers
from zeroshard.planner.built import holding
from zeroshard.planner.files import Moves, moves

from .features import Case
from .plain import BATCHES, CLIP, LOSS, SEED, adamw

STEPS = 3  # those of a simulation; then one with a fault, and one after an edit
EDITED = "blocks.1.mlp.0.weight"


class Ledger(NamedTuple):
    """Bytes after `STEPS` steps."""

    held: dict[str, dict[str, int]]  # tier -> state
    peaks: dict[str, int]  # phase
    moved: dict[str, tuple[int, int]]  # verb -> of all ranks that take part, sent by this one


class Outcome(NamedTuple):
    """What one rank saw: weights after each part of the scenario, and what it was told."""

    losses: list[float]
    trained: dict[str, Tensor]
    ledger: Ledger
    predicted: dict[str, dict[str, int]]  # at rest, by tier and state
    files: tuple[Moves, Moves]  # what a step reads and writes, as predicted, and what the last of `STEPS` did
    errors: list[str]
    norm: float
    repeated: dict[str, Tensor]
    edited: dict[str, Tensor]
    loaded: tuple[dict[str, Tensor], dict[str, Tensor]]  # of another case's checkpoint; and after a step from there


def job_of(case: Case) -> dict[str, Any]:
    """The parts of a job, as `simulate` takes them."""
    return training.job(optimizer=lambda parameters: adamw(case.kernel, parameters), **case.options)


class Run:
    """A case's model on this rank, in its loop."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case, parts = case, job_of(case)
        torch.manual_seed(SEED)  # by which some states are rounded
        self.model = parts["model"]
        self.optimizer = parts["optimizer"](self.model.parameters())
        self.zero = zeroshard.shard(self.model, self.optimizer, **case.settings(folder))
        self.zero._engine.reduction.pause = UNHURRIED  # or what is held would depend on how busy the machine is

    def step(self, number: int, *, clips: bool = False) -> tuple[list[float], float]:
        """Losses of this rank and the norm."""
        losses, norm = [], 0.0
        for turn in range(self.case.micro):
            batch = BATCHES(number, turn * self.zero.world_size + self.zero.rank)
            loss = LOSS(self.model, batch)
            (loss / self.case.micro).backward()
            losses.append(loss.item())
        if clips and not self.case.early:
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP).item()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return losses, norm

    def weights(self) -> dict[str, Tensor]:
        with self.zero.gathered():
            return reference.weights(self.model)

    def ledger(self) -> Ledger:
        self.zero._engine.reduction.pause = PAUSE
        for bucket in self.zero._engine.buckets:  # until here memory may be lent to other ranks
            bucket.land()
        return told(self.zero, self.zero.ledger().tiers)


def told(zero: Any, tiers: dict[str, dict[str, int]]) -> Ledger:
    """Read the ledger of a run or of a simulation. How often ranks must agree depends on what they find."""
    ledger = zero.ledger()
    return Ledger(
        {tier: found for tier, held in tiers.items() if (found := {s: n for s, n in held.items() if n})},
        {phase: most.total for phase, most in ledger.phases.items()},
        {verb: (each.logical, each.sent) for verb, each in ledger.traffic.items() if verb != "control"},
    )


def run(case: Case, folder: Path, source: Path) -> Outcome:
    """The scenario. source: a checkpoint that a case of the same model wrote after `STEPS` steps."""
    this = Run(case, folder / "files")
    losses, moved = [], [Moves(0, 0)]
    for number in range(STEPS):
        losses += this.step(number)[0]
        traffic = this.zero.ledger().traffic
        moved.append(Moves(*(traffic[verb].logical if verb in traffic else 0 for verb in ("read", "write"))))
    predicted = predict_tiers(this.zero)
    last = Moves(*(after - before for before, after in zip(*moved[-2:], strict=True)))
    releases = this.zero._engine.schedule.settings.release_after_forward
    files = moves(holding(this.zero), accumulate=case.micro, releases=releases), last
    ledger = this.ledger()
    trained = this.weights()
    this.zero.save(folder / "saved")
    errors, norm = _repeated(this, STEPS)
    repeated = this.weights()
    with this.zero.gathered(), torch.no_grad():
        for name, parameter in this.model.named_parameters():
            edit(name, parameter)
    this.step(STEPS + 1, clips=True)
    edited = this.weights()
    this.zero.load(source)
    loaded = this.weights()
    this.step(STEPS, clips=True)
    return Outcome(losses, trained, ledger, predicted, files, errors, norm, repeated, edited, (loaded, this.weights()))


def _repeated(this: Run, number: int) -> tuple[list[str], float]:
    """Take a step in whose backward the last rank raises, and again until it works: what was raised, and the norm."""
    culprit = this.zero.rank == this.case.ranks - 1 and not this.case.early  # or weights would be those of no step
    hooks = [this.model.norm.register_full_backward_hook(_raises)] if culprit else []
    errors: list[str] = []
    while len(errors) < 3:
        try:
            return errors, this.step(number, clips=True)[1]
        except (ArithmeticError, PeerError) as error:
            errors.append(type(error).__name__)
            this.optimizer.zero_grad()
            while hooks:
                hooks.pop().remove()
    return errors, 0.0


def edit(name: str, weight: Tensor) -> None:
    if name == EDITED:
        weight.mul_(1.5)


def _raises(*_: Any) -> None:
    raise ArithmeticError("on this rank alone")
