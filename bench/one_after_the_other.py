"""Fourteen trainings one after the other in a process, as a search over settings makes them, many times over.

    python -m bench.one_after_the_other --runs 200 --out runs.json

A model is dropped in the middle of the next one's steps, and ends where Python's collector finds it. Every run is of
new processes, 2 ranks and 3 in turn, with the collector as Python sets it in half of them; in the others it looks
through everything after a drawn number of allocations.
Counted: runs that ended with the weights of the first of as many ranks. Anything else is printed, and a violation.
"""

from __future__ import annotations

import argparse
import atexit
import collections
import gc
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch
from torch import nn

import zeroshard

from .soak import port

TRAININGS, BLOCKS = 14, 12  # so many messages are under way that a copy of them is new memory, where Python may collect
LONGEST = 300.0  # seconds of a run


def trained(number: int, before: list[object]) -> bytes:
    """One training's weights. Its stage, transport and optimizer are those of its number. before: what it drops."""
    torch.manual_seed(number)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)) for _ in range(BLOCKS)))
    kind = (torch.optim.SGD, torch.optim.AdamW)[number % 2]
    optimizer = kind(model.parameters(), lr=0.01)
    comm = zeroshard.Comm(transport="shared" if number % 3 == 2 else "gloo", timeout=60)
    zero = zeroshard.shard(model, optimizer, stage=3 - number % 4, comm=comm)
    for step in range(4):
        if step == 1:
            before.clear()
        optimizer.zero_grad()
        for micro in range(2):
            generator = torch.Generator().manual_seed(100 * step + 10 * micro + zero.rank)
            model(torch.randn(4, 16, generator=generator)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    before += [model, optimizer, zero]
    with zero.gathered():
        return b"".join(param.detach().numpy().tobytes() for param in model.parameters())


def rank_of_a_run(out: Path, often: bool, seed: str) -> None:
    draw = random.Random(seed)
    torch.set_num_threads(1)
    if often:
        gc.freeze()
    weights, before = [], list[object]()
    for number in range(TRAININGS):
        if often:
            gc.set_threshold(draw.randrange(1, 100), 1, 1)
        weights.append(trained(number, before))
    out.write_text(hashlib.sha256(b"".join(weights)).hexdigest())


def forked(place: dict[str, str], out: Path, often: bool, seed: int) -> int:
    """A rank forked from this process, which has imported what it needs; what it says is in a file beside."""
    pid = os.fork()
    if pid == 0:
        said = os.open(f"{out}.said", os.O_WRONLY | os.O_CREAT)
        os.dup2(said, 1)
        os.dup2(said, 2)
        os.environ.update(place)
        code = 1
        try:
            rank_of_a_run(out, often, f"{seed} {place['RANK']}")
            code = 0
        except BaseException as error:
            sys.last_value = error  # as where a program ends by it
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        atexit._run_exitfuncs()
        os._exit(code)
    return pid


def run(ranks: int, often: bool, folder: Path, seed: int) -> tuple[list[int], list[str]]:
    """Exit codes, and of each rank the digest of its weights, or what it said."""
    place = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port())}
    outs = [folder / f"{rank}" for rank in range(ranks)]
    pids = [
        forked({**place, "RANK": str(rank), "LOCAL_RANK": str(rank)}, out, often, seed) for rank, out in enumerate(outs)
    ]
    codes, deadline = dict.fromkeys(pids, -1), time.monotonic() + LONGEST
    left = set(pids)
    while left:
        for pid in [*left]:
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                codes[pid] = os.waitstatus_to_exitcode(status)
                left.discard(pid)
            elif time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    said = [(out if out.exists() else Path(f"{out}.said")).read_text() for out in outs]
    return [codes[pid] for pid in pids], said


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--out", default="")
    asked = parser.parse_args()
    counted: collections.Counter[str] = collections.Counter()
    digests: dict[int, str] = {}
    begun = time.monotonic()
    for number in range(asked.runs):
        ranks, often = 2 + number % 2, number // 2 % 2 == 1
        folder = tempfile.mkdtemp()  # a TemporaryDirectory would go where a rank forked from here ends
        codes, said = run(ranks, often, Path(folder), number)
        shutil.rmtree(folder)
        fine = not any(codes) and {*said} == {digests.setdefault(ranks, said[0])}
        counted["the same weights" if fine else "something else"] += 1
        counted[f"on {ranks} ranks"] += 1
        if not fine:
            print(f"--- run {number}, {ranks} ranks, often={often}: exit codes {codes}", *said, sep="\n", flush=True)
        figures = {**counted, "seconds": round(time.monotonic() - begun), "load": os.getloadavg()[0]}
        print(number + 1, figures, flush=True)
        if asked.out:
            Path(asked.out).write_text(json.dumps(figures, indent=2) + "\n")
    sys.exit(bool(counted["something else"]))


if __name__ == "__main__":
    main()
