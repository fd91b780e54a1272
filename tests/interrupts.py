"""Training that exceptions interrupt at drawn waits, on drawn ranks, and that tries again: the machine of test_interrupts.

    python -m interrupts --cases 2000 --out figures.json        (in tests/)

A case is training of a few steps in which each rank tries again what an exception ended, as a program would: the step
from `zero_grad()`, or the one call that it was; after three failures, or where the error says so, from the newest
checkpoint. It ends with the bits of the run that was left alone, and holds as many bytes of each state; or with a
named error on every rank.
"""

from __future__ import annotations

import argparse
import collections
import json
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import ranks
import zeroshard
from zeroshard import Comm, Layout, Precision
from zeroshard.arithmetic.hashing import digest
from zeroshard.comm.collectives import Link

STEPS = 3
TRIES = 12  # of one thing, before the program gives up
KINDS = ("KeyboardInterrupt", "MemoryError", "a handler that saves")
MOMENTS = ("before it is launched", "while it waits", "once it is through")


class Interrupts:
    """Exceptions at drawn launches and waits of this rank. Counts them where it has none to raise."""

    def __init__(self) -> None:
        self.plan: dict[int, tuple[str, str]] = {}  # ordinal of a wait -> kind and moment
        self.seen = 0
        self.raised: list[str] = []
        self.handler = lambda: None
        launch, wait = Link.launch, Link._wait_in_slices

        def launching(link, *args):
            self.strike(link, MOMENTS[0])
            return launch(link, *args)

        def waiting(link, handle, *, levelling=False, **kwargs):
            drawn = not (levelling or link.behind)
            self.seen += drawn
            if drawn:
                self.strike(link, MOMENTS[1])
            wait(link, handle, levelling=levelling, **kwargs)
            if drawn:
                self.strike(link, MOMENTS[2])

        Link.launch, Link._wait_in_slices = launching, waiting
        self._undo = lambda: (setattr(Link, "launch", launch), setattr(Link, "_wait_in_slices", wait))

    def strike(self, link, moment):
        kind, at = self.plan.get(self.seen, ("", ""))
        if at != moment or link.behind:
            return
        del self.plan[self.seen]
        self.raised.append(f"{kind} {moment}: {link.doing()}")
        if kind == KINDS[0]:
            signal.raise_signal(signal.SIGINT)
        elif kind == KINDS[1]:
            raise MemoryError("drawn")
        else:
            self.handler()

    def close(self):
        self._undo()


def batch(step: int, micro: int, rank: int):
    return torch.randn(3, 8, generator=torch.Generator().manual_seed(1000 * step + 10 * micro + rank))


def built(stage: int, settings: dict):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)), nn.LayerNorm(8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer, zeroshard.shard(model, optimizer, stage=stage, **settings)


BF16 = {"param_dtype": torch.bfloat16, "cast_inputs": True}
FORMATS = [{}, {"nonfinite": "raise"}, BF16, BF16 | {"split_master": True}, BF16 | {"fp8": True}]


def plain(draw: random.Random, stage: int) -> dict:
    """Settings of `shard`."""
    precision = draw.choice([None, Precision(nonfinite="raise")])
    return {"precision": precision, "layout": draw.choice([None, Layout(bucket_mib=0.0002)])}


def formats(draw: random.Random, stage: int) -> dict:
    """The same, of all that decides which messages there are, and of which size."""
    comm = {"reduce": draw.choice(["ordered", "int8", "native"])}
    if ranks.world() % 2 == 0 and comm["reduce"] != "native" and draw.random() < 0.5:
        comm["replicas"] = 2
    bounds = "unit" if comm["reduce"] == "native" else draw.choice(["unit", "model", "tensor"])
    layout = Layout(bounds=bounds, **draw.choice([{}, {"bucket_mib": 0.0002}]))
    precision = draw.choice([each for each in FORMATS if stage < 3 or "split_master" not in each])
    return {"comm": Comm(**comm), "precision": Precision(**precision), "layout": layout}


def train(stage: int, seed: int, interrupts: Interrupts, folder: str, settings: Callable) -> dict:
    """What became of one case on this rank."""
    rank, draw = ranks.rank(), random.Random(seed)
    plan, interrupts.plan = interrupts.plan, {}  # `shard` has tests of its own
    try:
        model, optimizer, zero = built(stage, settings(draw, stage))
    except zeroshard.Error as error:
        return {"ended": [f"{type(error).__name__}: {error}"], "raised": []}
    verbs = [draw.choice(["full", "gathered", "save", "export", "evaluate", "no_sync", "write"]) for _ in range(STEPS)]
    zero.save(f"{folder}/0", extra={"step": 0})
    interrupts.handler = lambda: zero.save(f"{folder}/handler", extra={"step": -1})
    interrupts.plan, interrupts.seen, begun = plan, 0, time.monotonic()
    done, loads, errors = 0, 0, []

    def step():
        optimizer.zero_grad()
        for micro in range(2):
            if verbs[done] == "no_sync" and micro == 0:
                with zero.no_sync():
                    model(batch(done, micro, rank)).square().sum().backward()
            else:
                model(batch(done, micro, rank)).square().sum().backward()
        zero.clip_grad_norm_(1.0)
        optimizer.step()

    def other():
        if verbs[done] == "full":
            model(batch(done, 0, rank)).square().sum().backward()
            next(model.parameters()).grad.full_tensor()
            optimizer.zero_grad()
        elif verbs[done] == "gathered":
            with zero.gathered():
                digest(bytes(next(model.parameters()).detach().view(-1).view(torch.uint8)))
        elif verbs[done] == "write":
            with zero.gathered("0.*", write_from=0), torch.no_grad():
                next(model.parameters()).fill_(0.125 * done)
        elif verbs[done] == "export":
            zero.export(f"{folder}/weights", overwrite=True)
        elif verbs[done] == "evaluate":
            with torch.no_grad():
                model.eval()(batch(done, 5, rank))
            model.train()
        zero.save(f"{folder}/{done + 1}", extra={"step": done + 1})

    def again():
        nonlocal done, loads
        loads += 1
        path = zero.latest(folder)
        done = zero.load(path).extra["step"]

    def read():
        with zero.gathered():
            weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        bits.update(weights)

    bits: dict = {}
    todo, tries = [step, other], 0
    while not bits:
        act = todo[0]
        try:
            act()
        except (KeyboardInterrupt, MemoryError, zeroshard.Error) as error:
            errors.append(f"{type(error).__name__}: {error}")
            tries += 1
            if tries == TRIES or "a collective did not complete" in errors[-1]:
                return {"ended": errors, "raised": interrupts.raised, "seconds": time.monotonic() - begun}
            if act is again or tries % 4 == 0 or "zero.load(" in errors[-1]:
                todo = [again]
            continue
        if act is other:
            done, tries = done + 1, 0
        todo = todo[1:] or ([step, other] if done < STEPS else [read])
        if act is again:
            todo = [step, other] if done < STEPS else [read]
    interrupts.plan.clear()
    held = {state: nbytes for state, nbytes in zero.ledger().held.items() if nbytes}
    return {"bits": bits, "held": held, "waits": interrupts.seen, "loads": loads, "errors": errors,
            "raised": interrupts.raised, "seconds": time.monotonic() - begun}  # fmt: skip


def several(stage: int, seeds: list[int], folder: str, settings: Callable = formats) -> list[dict]:
    """Cases one after the other, each after the run that was left alone; without the bits where they are the same."""
    loggers = [logging.getLogger(name) for name in ("zeroshard", "torch")]
    levels, before = [each.level for each in loggers], signal.signal(signal.SIGINT, signal.default_int_handler)
    for each in loggers:
        each.setLevel(logging.ERROR)
    interrupts, found = Interrupts(), []
    try:
        for seed in seeds:
            place = Path(folder, str(seed))
            interrupts.plan, interrupts.raised = {}, []
            if not found:
                alone = train(stage, seeds[0], interrupts, str(place / "alone"), settings)
                assert "bits" in alone, alone
            draw = random.Random(f"interrupts of {seed}")
            for _ in range(draw.choice([1, 1, 1, 2, 3])):
                whom = draw.choice([*range(ranks.world()), "all"])
                at = draw.randrange(1, alone["waits"] + 1), draw.choice(KINDS), draw.choice(MOMENTS)
                if whom in (ranks.rank(), "all"):
                    interrupts.plan[at[0]] = at[1:]
            interrupts.raised = []
            case = train(stage, seeds[0], interrupts, str(place / "case"), settings)
            if "bits" in case:
                got, want = case.pop("bits"), alone["bits"]
                held, least = case.pop("held"), alone["held"]
                case["leaks"] = [(what, held.get(what), least.get(what)) for what in {*held, *least}
                                 if held.get(what) != least.get(what)]  # fmt: skip
                case["differs"] = [name for name in want if not torch.equal(got[name], want[name])]
            found.append(case)
            if "ended" in case:  # this group is lost, and a program would end now
                Path(folder, f"ended-{seed}-{ranks.rank()}").write_text(json.dumps(found))
                os._exit(3)
            if ranks.rank() == 0:
                shutil.rmtree(place, ignore_errors=True)
    finally:  # this process is the next test's
        interrupts.close()
        signal.signal(signal.SIGINT, before)
        for each, level in zip(loggers, levels, strict=True):
            each.setLevel(level)
    return found


def ended(folder: str, rank: int, outcome):
    """What a rank whose program ended has left."""
    files = sorted(Path(folder).glob(f"ended-*-{rank}"))
    if isinstance(outcome, list) or not files:
        return outcome if isinstance(outcome, list) else [{"ended": [f"{outcome.type}: {outcome.message}"]}]
    found = json.loads(files[0].read_text())
    files[0].unlink()
    return found


def judged(cases: list[dict]) -> tuple[str, str]:
    """What became of a case on all ranks: "the same bits", "... after a load", "named" or a violation; and in words."""
    words = json.dumps(cases, indent=1, default=str)
    if any(case.get("differs") for case in cases):
        return "different bits", words
    if any(case.get("leaks") for case in cases):
        return "different bytes held", words
    if any("ended" in case for case in cases):
        errors = [case["ended"][-1] for case in cases if "ended" in case]
        named = all(
            error.split(":")[0] in ("PeerError", "StateError", "CheckpointError", "TierError") for error in errors
        )
        if len(errors) < len(cases):  # the others had all they wanted, and are gone
            return "named, after the others' end" if named else "not named", words
        return "named on every rank" if named else "not named", words
    return "the same bits, from a checkpoint" if any(case["loads"] for case in cases) else "the same bits", words


def run(world: int, stage: int, seeds: list[int], folder: str, timeout: float = 120.0, cases=several):
    """(seed, outcome, words) of each case; those that a lost group left over are run in a new one."""
    results, left = [], list(seeds)
    while left:
        try:
            outcomes = ranks.run(
                world, cases, stage, left, folder, group_timeout=30.0, timeout=timeout, expect_errors=True
            )
            died = [rank for rank, each in enumerate(outcomes) if not isinstance(each, list)]
            if died:
                outcomes = [ended(folder, rank, each) for rank, each in enumerate(outcomes)]
        except ranks.RankFailure as failure:
            return [*results, (left[0], "hung, aborted or raised something else", str(failure))]
        together = list(zip(*outcomes, strict=False))
        results += [(seed, *judged(list(each))) for seed, each in zip(left, together, strict=False)]
        left = left[len(together) :]
    return results


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--each", type=int, default=10)
    parser.add_argument("--out", default="")
    parser.add_argument("--show", default="", help="print the cases that end so: named")
    asked = parser.parse_args()
    counted: collections.Counter[str] = collections.Counter()
    violations, begun, seed = [], time.monotonic(), asked.first
    while sum(counted.values()) < asked.cases:
        world, stage = (2, 3)[seed // asked.each % 2], seed // asked.each // 2 % 4
        seeds = list(range(seed, seed + asked.each))
        seed += asked.each
        with tempfile.TemporaryDirectory() as folder:
            found = run(world, stage, seeds, folder)
        for which, outcome, words in found:
            counted[outcome] += 1
            if asked.show in outcome.split(",")[0].split() and asked.show:
                print(f"--- seed {which}, {world} ranks, stage {stage}: {outcome}\n{words}", flush=True)
            if not outcome.startswith(("the same bits", "named")):
                violations.append({"seed": which, "ranks": world, "stage": stage, "outcome": outcome})
                print(f"--- seed {which}, {world} ranks, stage {stage}: {outcome}\n{words}", flush=True)
        figures = {"cases": sum(counted.values()), **counted, "violations": violations,
                   "seconds": round(time.monotonic() - begun)}  # fmt: skip
        print(seed, dict(counted), figures["seconds"], flush=True)
        if asked.out:
            Path(asked.out).write_text(json.dumps(figures, indent=2) + "\n")
    sys.exit(bool(violations))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import interrupts  # ranks call functions of a module

    interrupts.main()
