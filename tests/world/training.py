"""The job of drawn cases: a few steps of a small model under drawn settings, which tries again what an exception ended.

A program would do so: the step from `zero_grad()`, or the one call that it was; after three failures, or where the error
says so, from the newest checkpoint. It ends with the bits of the run that was left alone and as many bytes of each state, or
with a named error.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import ranks
import zeroshard
from interrupts import BF16, FORMATS
from zeroshard import Comm, Layout, Offload, Precision
from zeroshard.worlds.schedule import here

STEPS = 2
TRIES = 12  # of one thing, before the program gives up
CONFIGS = 96  # settings: so few that each one's run that was left alone is kept


class Settings(NamedTuple):
    """Of one job; a number says them."""

    number: int
    ranks: int
    stage: int
    comm: dict[str, Any]
    precision: dict[str, Any]
    layout: dict[str, Any]
    offload: dict[str, Any]
    in_backward: bool
    asynchronous: bool
    keep: int | None
    verbs: tuple[str, ...]  # what is done beside each step

    @staticmethod
    def of(number: int) -> Settings:
        draw = random.Random(f"settings {number}")
        size, stage = draw.choice((2, 2, 2, 3, 4)), draw.randrange(4)
        in_backward = draw.random() < 0.25
        comm: dict[str, Any] = {"reduce": draw.choice(["ordered", "ordered", "int8", "native"])}
        if size % 2 == 0 and comm["reduce"] != "native" and draw.random() < 0.4:
            comm["replicas"] = 2
        bounds = "unit" if comm["reduce"] == "native" else draw.choice(["unit", "unit", "model", "tensor"])
        layout = {"bounds": bounds, **draw.choice([{}, {"bucket_mib": 0.0002}])}
        formats = [{}, BF16] if in_backward else [each for each in FORMATS if stage < 3 or "split_master" not in each]
        precision = draw.choice(formats)
        offload: dict[str, Any] = draw.choice([{}, {}, {"optimizer": "cpu"}, {"optimizer": "nvme"}])
        if offload and not in_backward and draw.random() < 0.5:
            offload["gradients"] = offload["optimizer"]
        if offload and stage == 3 and "fp8" not in precision and draw.random() < 0.5:
            offload["parameters"] = offload["optimizer"]
        parts = "replicas" in comm and stage and bounds != "tensor" and "split_master" not in precision
        if parts and random.Random(f"over {number}").random() < 0.5:  # of its own: no other draw changes by it
            comm["optimizer"] = "all"
        hosts = "replicas" in comm and bounds != "tensor"
        if hosts and random.Random(f"hosts {number}").random() < 0.4:
            comm = {"reduce": comm["reduce"], "hosts": comm["replicas"]}
        verbs = ["gathered", "export", "evaluate", "write"] + ["full", "no_sync"] * (not in_backward)
        return Settings(
            number, size, stage, comm, precision, layout, offload, in_backward, draw.random() < 0.5,
            draw.choice((None, 1, 2)), tuple(draw.choice(verbs) for _ in range(STEPS)),
        )  # fmt: skip

    def built(self, folder: str) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        torch.manual_seed(0)
        model = Branches()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        files = {"path": f"{folder}/states"} if "nvme" in self.offload.values() else {}
        zero = zeroshard.shard(
            model, optimizer, stage=self.stage, comm=Comm(**self.comm), precision=Precision(**self.precision),
            layout=Layout(**self.layout), offload=Offload(**self.offload, **files), optimizer_in_backward=self.in_backward,
        )  # fmt: skip
        return model, optimizer, zero

    def __str__(self) -> str:
        told = [f"{self.ranks} ranks, stage {self.stage}"]
        told += [
            f"{name}={value}" for name, value in self._asdict().items() if name not in ("ranks", "stage") and value
        ]
        return ", ".join(told)


class Branches(nn.Module):
    """Units that all ranks use, and two that differ from rank to rank and from batch to batch."""

    def __init__(self) -> None:
        super().__init__()
        self.all = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.some = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor, which: int) -> Tensor:
        x = self.all[0](x)
        if which < 2:
            x = x + self.some[which](x).tanh()
        y: Tensor = self.norm(self.all[1](x))
        return y


def batch(step: int, micro: int, rank: int) -> tuple[Tensor, int]:
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    return torch.randn(3, 8, generator=generator), (rank + step + micro) % 3


def earlier() -> None:
    """A model that ends somewhere in what follows: the collector finds its end."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero = zeroshard.shard(model, optimizer, stage=3)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    model.zero = zero  # only the collector ends what refers to itself


def faults(*, strike: bool) -> None:
    """Faults are drawn from here on, or not any more."""
    if (task := here()) is not None:
        task.schedule.draws.armed = strike
        task.schedule.trace_lines()


def tell(words: str) -> None:
    if (task := here()) is not None:
        task.schedule.tell(words)


def train(settings: Settings, folder: str, saved: dict[int, int], *, resume: bool = False) -> dict[str, Any]:
    """What became of the job on this rank. saved: gets the last step that this rank knows to be in a checkpoint.

    resume: go on after what another run has left.
    """
    rank, checkpoints = ranks.rank(), f"{folder}/saved"
    done, errors, loads = 0, [], 0
    under_way: list[Any] = []

    def wait() -> None:
        while under_way:
            step, saving = under_way.pop()
            saving.wait()
            saved[rank] = step

    def save(number: int, *, asynchronous: bool) -> None:
        saving = zero.save(f"{checkpoints}/{number}", extra={"step": number}, asynchronous=asynchronous,
                           keep=settings.keep)  # fmt: skip
        under_way.append((number, saving))
        if not asynchronous:
            wait()

    try:
        earlier()
        model, optimizer, zero = settings.built(folder)
        if not resume:
            save(0, asynchronous=False)
        elif (path := zero.latest(checkpoints)) is not None:
            done = zero.load(path).extra["step"]
    except zeroshard.Error as error:
        return {"ended": [f"{type(error).__name__}: {error}"], "raised": []}
    begun = done
    faults(strike=True)

    def step() -> None:
        optimizer.zero_grad()
        for micro in range(1 if settings.in_backward else 2):
            if settings.verbs[done] == "no_sync" and micro == 0:
                with zero.no_sync():
                    model(*batch(done, micro, rank)).square().sum().backward()
            else:
                model(*batch(done, micro, rank)).square().sum().backward()
        if not settings.in_backward:
            zero.clip_grad_norm_(1.0)
        optimizer.step()

    def other() -> None:
        verb = settings.verbs[done]
        if verb == "full":
            model(*batch(done, 0, rank)).square().sum().backward()
            next(model.parameters()).grad.full_tensor()  # type: ignore[union-attr]
            optimizer.zero_grad()
        elif verb == "gathered":
            with zero.gathered():
                next(model.parameters()).detach().clone()
        elif verb == "write":
            with zero.gathered("all.0.*", write_from=0), torch.no_grad():
                next(model.parameters()).fill_(0.125 * done)
        elif verb == "export":
            zero.export(f"{folder}/weights", overwrite=True)
        elif verb == "evaluate":
            with torch.no_grad():
                model.eval()(*batch(done, 5, rank))
            model.train()
        wait()
        save(done + 1, asynchronous=settings.asynchronous)

    def again() -> None:
        nonlocal done, loads
        loads += 1
        path = zero.latest(checkpoints)
        done = zero.load(path).extra["step"]

    def end() -> None:
        wait()
        with zero.gathered():
            weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        bits.update(weights)

    bits: dict[str, Tensor] = {}
    todo: list[Callable[[], None]] = [step, other] if done < STEPS else [end]
    tries = 0
    while not bits:
        act = todo[0]
        tell(f"begins {act.__name__} after {done} steps")
        try:
            act()
        except (KeyboardInterrupt, MemoryError, zeroshard.Error) as error:
            errors.append(f"{type(error).__name__}: {error}")
            tell(f"catches {type(error).__name__} in {act.__name__}")
            tries += 1
            if tries == TRIES or "a collective did not complete" in errors[-1]:
                return {"ended": errors, "raised": []}
            if act is again or tries % 4 == 0 or "zero.load" in errors[-1]:
                todo = [again]
            continue
        if act is other:
            done, tries = done + 1, 0
        todo = todo[1:]
        if act is again or not todo:
            todo = [step, other] if done < STEPS else [end]
    faults(strike=False)
    held = {state: nbytes for state, nbytes in zero.ledger().held.items() if nbytes}
    return {"bits": bits, "held": held, "loads": loads, "errors": errors, "begun": begun}
