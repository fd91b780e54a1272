"""Training over memory that ranks of a host share, killed at drawn waits, round after round.

    python -m bench.soak_shared --rounds 500 --out shared.json
    python -m bench.soak_shared --rounds 20 --stops --out stopped.json

A *round* is a life of two or three ranks: it goes on from the newest checkpoint, at a stage and with a tier of its own,
and one rank ends itself by kill -9 (or stops itself) at a wait, or at a notice, that was drawn: before it or after. A
*run* is so many steps, over as many rounds as it takes; its weights are compared, bit by bit, with those of as many
ranks that send messages and were left alone. Ranks are forked from this process, which has imported everything.

Each of the others has to name the dead rank, long before the time-out, and the stopped one soon after it. It must hold
no descriptor of shared memory then; no process of a round may be left, and nothing of zeroshard in /dev/shm.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import faulthandler
import json
import math
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zeroshard
from zeroshard.comm import host_peers
from zeroshard.comm.collectives import Link
from zeroshard.comm.host_peers import Neighbours
from zeroshard.comm.shared_memory import Flight, Host
from zeroshard.features.shared_parameters import Pages

STEPS, MICRO, EVERY = 12, 2, 2  # of a run; micro-batches of a step on each rank; steps between two checkpoints
SILENT, STOPPED = 60.0, 3.0  # seconds that a rank may be silent; where one of them is to be
SOON = 10.0  # seconds in which the others must have named who is gone, beyond the time-out where it is silent
LONGEST = 120.0  # seconds of a round
MOST, MEETING = 300, 2  # calls of one function among which one is drawn, early ones more often; while ranks meet
POINTS = [
    (Link, "wait"),
    (Flight, "wait"),
    (Flight, "post"),
    (Flight, "copy"),
    (Neighbours, "listen"),
    (Neighbours, "tell"),
    (Host, "take"),
    (Host, "read"),
    (Pages, "forget"),
    (host_peers, "_exchange"),
    (host_peers, "_call"),
    (host_peers, "_accept"),
]


def arm(at: tuple[int, str, int], how: int, note: str) -> None:
    """This process ends, or stops, before a call of one of the points, or after it: the call of that number."""
    point, side, left = at
    owner, name = POINTS[point]
    original = getattr(owner, name)

    def strike(here: str) -> None:
        if not left and here == side:
            Path(note).write_text(f"{time.monotonic()} {side} {owner.__name__.split('.')[-1]}.{name}")
            os.kill(os.getpid(), how)

    def passed(*args, **kwargs):
        nonlocal left
        left -= 1
        strike("before")
        answer = original(*args, **kwargs)
        strike("after")
        return answer

    setattr(owner, name, passed)


def warm() -> None:
    """What the first step of any optimizer imports, so that ranks need not."""
    torch.set_num_threads(1)
    weight = nn.Parameter(torch.zeros(2))
    weight.grad = torch.zeros(2)
    torch.optim.AdamW([weight]).step()


def train(
    folder: str, stage: int, once: bool, closure: bool, edits: str, out: str, timeout: float, transport: str = "shared"
) -> None:
    """To the end of a run, from its newest checkpoint."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(40, 40), nn.GELU()) for _ in range(3)), nn.LayerNorm(40))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    comm = zeroshard.Comm(timeout=timeout, transport=transport)
    offload = zeroshard.Offload(parameters="shared") if once else None
    zero = zeroshard.shard(model, optimizer, stage=stage, comm=comm, offload=offload)
    path = zero.latest(folder)
    done = zero.load(path).extra["done"] if path else 0

    def backwards() -> torch.Tensor:
        optimizer.zero_grad()
        for turn in range(MICRO):
            seed = (MICRO * done + turn) * zero.world_size + zero.rank
            x = torch.randn(4, 40, generator=torch.Generator().manual_seed(seed))
            (model(x).square().sum() / MICRO).backward()
        return torch.zeros(())

    while done < STEPS:
        if closure:
            optimizer.step(backwards)
        else:
            backwards()
            optimizer.step()
        done += 1
        if done % 3 == 0:  # the same edit, said by all, or by one that others then hear
            writer = None if edits == "all" else zero.world_size - 1
            with zero.gathered(write_from=writer), torch.no_grad():
                for param in model.parameters() if writer in (None, zero.rank) else ():
                    param.mul_(0.75)
        if done % EVERY == 0:
            zero.save(f"{folder}/step-{done}", extra={"done": done}, keep=2)
    with zero.gathered():
        if zero.rank == 0:
            torch.save({name: tensor.clone() for name, tensor in model.state_dict().items()}, out + ".part")
            os.replace(out + ".part", out)


def opened() -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return [path for path in found if "memfd:zeroshard" in path]


def rank_of_a_round(rank: int, ranks: int, store: str, answer: str, *what: Any) -> None:
    """What this rank says at its end, in a file: when, its error, and the shared memory it still has."""
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    said = ""
    os.environ |= {"RANK": f"{rank}", "WORLD_SIZE": f"{ranks}", "LOCAL_RANK": f"{rank}"}
    try:
        left = dist.FileStore(store, ranks)
        dist.init_process_group("gloo", store=left, rank=rank, world_size=ranks)
        train(*what)
    except (zeroshard.Error, RuntimeError) as error:
        said = f"{type(error).__name__}: {error}"
        if not isinstance(error, zeroshard.Error):
            traceback.print_exc()
    at, descriptors = time.monotonic(), opened()
    if not said:  # a gloo process that leaves at once can abort peers that still read from it
        deadline = time.monotonic() + SOON
        left.add("left", 1)
        while left.add("left", 0) < ranks and time.monotonic() < deadline:
            time.sleep(0.01)
        dist.destroy_process_group()
    Path(answer).write_text(json.dumps({"at": at, "said": said, "open": descriptors}))


def fork(log: str, function, *args) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setpgid(0, 0)
            target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(target, 1)
            os.dup2(target, 2)
            function(*args)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return pid


class Round:
    """The processes of one round, and what came of them."""

    def __init__(self, place: str, ranks: int, how: int, victim: int, at: tuple[int, str, int], what: tuple) -> None:
        self.place, self.ranks, self.victim, self.how = place, ranks, victim, how
        self.note, self.log = f"{place}/struck", f"{place}/log"
        for path in Path(place).iterdir():
            if path.name.startswith(("answer", "struck", "store", "log")):
                path.unlink()
        self.pids = [fork(self.log, self._rank, rank, at, what) for rank in range(ranks)]
        self.codes: dict[int, int] = {}

    def _rank(self, rank: int, at: tuple[int, str, int], what: tuple) -> None:
        if rank == self.victim:
            arm(at, self.how, self.note)
        rank_of_a_round(rank, self.ranks, f"{self.place}/store", f"{self.place}/answer{rank}", *what)

    def wait(self) -> None:
        deadline, woken = time.monotonic() + LONGEST, self.how != signal.SIGSTOP
        while len(self.codes) < self.ranks and time.monotonic() < deadline:
            for rank, pid in enumerate(self.pids):
                if rank not in self.codes and os.waitpid(pid, os.WNOHANG) != (0, 0):
                    self.codes[rank] = 0
            others = all(rank in self.codes for rank in range(self.ranks) if rank != self.victim)
            if others and not woken and Path(self.note).exists():
                woken = True
                os.kill(self.pids[self.victim], signal.SIGCONT)
            time.sleep(0.005)

    def problems(self) -> tuple[list[str], float, str]:
        """What is wrong; after how many seconds the last of the others had named who is gone; where it was."""
        found, latest = [], 0.0
        struck, _, where = Path(self.note).read_text().partition(" ") if Path(self.note).exists() else ("", "", "")
        for rank, pid in enumerate(self.pids):
            if rank not in self.codes:
                found.append(f"rank {rank} hangs")
                os.kill(pid, signal.SIGUSR1)
                time.sleep(0.5)
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, 0)
                found.append(f"rank {rank} has left a process")
            if rank == self.victim and struck:
                continue
            answer = Path(f"{self.place}/answer{rank}")
            if not answer.exists():
                found.append(f"rank {rank} has ended without an answer")
                continue
            told = json.loads(answer.read_text())
            if told["open"]:
                found.append(f"rank {rank} still has open {told['open']}")
            if struck and told["said"]:
                found += self._named(rank, told["said"])
                latest = max(latest, told["at"] - float(struck))
            elif told["said"]:
                found.append(f"rank {rank}, where nobody was struck: {told['said']}")
        allowed = SOON + (STOPPED if self.how == signal.SIGSTOP else 0)
        if latest > allowed:
            found.append(f"named after {latest:.1f} s")
        found += [f"/dev/shm has {name}" for name in os.listdir("/dev/shm") if "zeroshard" in name]
        return found, latest, where

    def _named(self, rank: int, said: str) -> list[str]:
        gone = (f"rank {self.victim} is gone", f"rank {self.victim} is silent", f"rank {self.victim} ended")
        return [] if any(words in said for words in gone) else [f"rank {rank} does not name {self.victim}: {said}"]


def alone(place: str, ranks: int, edits: str) -> dict[str, torch.Tensor]:
    """What a run ends with where nobody is struck, and messages are sent."""
    folder, out = f"{place}/alone", f"{place}/alone.pt"
    what = (folder, 1, False, False, edits, out, SILENT, "gloo")
    each = Round(place, ranks, signal.SIGKILL, -1, (0, "", 0), what)
    each.wait()
    found, _, _ = each.problems()
    assert not found, found
    shutil.rmtree(folder)
    return torch.load(out)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=20, help="in which a rank was struck")
    parser.add_argument("--stops", action="store_true", help="stop the rank, and let it go on when it was named")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="soak-shared.json")
    asked = parser.parse_args()
    draw, counted, violations, seconds = random.Random(asked.seed), collections.Counter(), [], []
    how, timeout = (signal.SIGSTOP, STOPPED) if asked.stops else (signal.SIGKILL, SILENT)
    warm()
    begun, place = time.monotonic(), tempfile.mkdtemp()
    try:
        kinds = [(ranks, edits) for ranks in (2, 3) for edits in ("all", "one")]
        wanted = {kind: alone(place, *kind) for kind in kinds}
        folder, out = f"{place}/run", f"{place}/run.pt"
        ranks, edits = kinds[0]
        while counted["rounds"] < asked.rounds:
            stage = draw.randrange(4)
            once, closure = stage > 0 and draw.random() < 0.5, draw.random() < 0.3
            point, side, victim = draw.randrange(len(POINTS)), draw.choice(["before", "after"]), draw.randrange(ranks)
            most = MEETING if POINTS[point][0] is host_peers else MOST
            at = point, side, round(math.exp(draw.uniform(0, math.log(most))))
            what = (folder, stage, once, closure, edits, out, timeout)
            each = Round(place, ranks, how, victim, at, what)
            each.wait()
            found, latest, where = each.problems()
            counted["lives"] += 1
            if where:
                counted["rounds"] += 1
                counted[f"struck {where}"] += 1
                seconds.append(latest)
            if found:
                violations += [
                    f"life {counted['lives']}, {ranks} ranks, {what[1:5]}, {where or 'unstruck'}: {words}"
                    for words in found
                ]
                shutil.copy(each.log, f"{asked.out}.log-{counted['lives']}")
            if Path(out).exists():
                same = all(torch.equal(tensor, wanted[ranks, edits][name]) for name, tensor in torch.load(out).items())
                counted["runs ended with the same bits"] += same
                violations += [] if same else [f"life {counted['lives']} ended a run with other bits"]
                Path(out).unlink()
                shutil.rmtree(folder)
                ranks, edits = draw.choice(kinds)
            named = sorted(seconds) or [0.0]
            spread = {"median": round(named[len(named) // 2], 2), "longest": round(named[-1], 2)}
            figures = {"minutes": round((time.monotonic() - begun) / 60, 1), **counted, "seconds to a name": spread}
            Path(asked.out).write_text(json.dumps(figures | {"violations": violations}, indent=2) + "\n")
        print(json.dumps(figures | {"violations": violations}), flush=True)
    finally:
        shutil.rmtree(place)
    sys.exit(bool(violations))


if __name__ == "__main__":
    main()
