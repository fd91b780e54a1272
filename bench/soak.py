"""Training that is killed, stopped, interrupted and preempted at random, and resumed on other ranks and stages.

    python -m bench.soak --minutes 40 --out soak.json
    python -m bench.soak --minutes 40 --out soak.json --ranks 3

A *run* is so many steps of a small model, over as many *lives* as it takes: each life has ranks and a stage of its
own, goes on from the newest checkpoint, and ends by its last step, by a signal, or because a rank is lost. At a run's
end its weights are compared, bit by bit, with those of a run that was left alone. Counted: faults injected; those after
which the ranks went on; ranks that ended with an error that says why. Anything else is a violation.
"""

from __future__ import annotations

import argparse
import atexit
import collections
import json
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch
from torch import nn

import zeroshard

STEPS, MICRO, EVERY = 40, 4, 4  # of a run; micro-batches of a step, over all ranks; steps between two checkpoints
BEGINS = "begins to train"  # what a rank says then
DONE, NAMED, PREEMPTED = 0, 3, 4  # exit codes
LONGEST = 150.0  # seconds that ranks may take to end, once one of them has


def rank_of_a_life(folder: str, stage: int, out: str, slowly: bool) -> int:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)), nn.LayerNorm(32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    done, todo, tries = 0, "start", 0
    zero = zeroshard.shard(model, optimizer, stage=stage, comm=zeroshard.Comm(timeout=25))
    zero.save_on(signal.SIGTERM, None)
    print(BEGINS, flush=True)
    share = MICRO // zero.world_size

    def step() -> None:
        optimizer.zero_grad()
        for turn in range(share):
            index = turn * zero.world_size + zero.rank
            x = torch.randn(8, 32, generator=torch.Generator().manual_seed(MICRO * done + index))
            (model(x).square().sum() / share).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    while True:
        try:
            if todo in ("start", "load"):
                path = zero.latest(folder)
                if path is None:
                    zero.save(f"{folder}/step-0", extra={"done": 0})
                else:
                    done = zero.load(path).extra["done"]
                todo = "step"
            elif todo == "step":
                if done == STEPS:
                    with zero.gathered():
                        weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
                    if zero.rank == 0:
                        torch.save(weights, out + ".part")
                        os.replace(out + ".part", out)
                    return DONE
                step()
                done, todo, tries = done + 1, "save" if (done + 1) % EVERY == 0 else "step", 0
                if zero.signalled:
                    zero.save(f"{folder}/step-{done}", extra={"done": done}, keep=3)
                    return PREEMPTED
            else:
                zero.save(f"{folder}/step-{done}", extra={"done": done}, keep=3)
                todo = "step"
            if slowly:
                time.sleep(0.1)
        except (KeyboardInterrupt, zeroshard.Error) as error:
            said = f"{type(error).__name__}: {error}"
            print(f"rank {zero.rank}, {todo} after {done}: {said}", flush=True)
            tries += 1
            if zero.world_size == 1 and todo == "step":
                todo = "load"  # as in plain PyTorch: nobody else knows whether the weights were updated before it came
            if "did not complete" in said or "could not come together" in said or tries > 12:
                return NAMED
            if "zero.load(" in said or tries % 4 == 0:
                todo = "load"


def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Rank:
    """A rank forked from this process, which has imported what it needs."""

    def __init__(self, said, place: dict[str, str], folder: str, stage: int, out: str, slowly: bool) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                os.dup2(said.fileno(), 1)
                os.dup2(said.fileno(), 2)
                os.environ.update(place)
                code = rank_of_a_life(folder, stage, out, slowly)
            except BaseException as error:
                sys.last_value = error  # as where a program ends by it
                traceback.print_exc()
            finally:
                atexit._run_exitfuncs()
                os._exit(code)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def wait(self) -> None:
        while self.poll() is None:
            time.sleep(0.05)


def life(folder: str, ranks: int, stage: int, out: str, draw: random.Random | None, counted, log: Path) -> list[str]:
    """One life; what went wrong in it that should not."""
    place = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port())}
    with log.open("w") as said:
        processes = [
            Rank(said, place | {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}"}, folder, stage, out, draw is not None)
            for rank in range(ranks)
        ]
        killed, told, ended, interrupted, deadline = set(), set(), 0.0, 0, time.monotonic() + 600
        early = draw is not None and draw.random() < 0.2  # while ranks start, or once all of them train
        following = time.monotonic() + draw.uniform(1, 5) if draw and early else 1e9
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
            time.sleep(0.05)
            if draw and following == 1e9 and log.read_text().count(BEGINS) == ranks:
                following = time.monotonic() + draw.uniform(0.2, 3)
            if not ended and any(process.poll() is not None for process in processes):
                ended = time.monotonic()
                deadline = min(deadline, ended + LONGEST)
            if draw and not ended and time.monotonic() > following and "after" not in killed:
                following = time.monotonic() + draw.uniform(0.2, 3)
                kind = draw.choices(["interrupt", "interrupt all", "stop", "kill", "preempt"], [8, 2, 3, 1, 1])[0]
                counted[f"injected: {kind}"] += 1
                victim = draw.randrange(ranks)
                chosen = processes if kind == "interrupt all" else [processes[victim]]
                if kind == "stop":
                    chosen[0].send_signal(signal.SIGSTOP)
                    time.sleep(draw.uniform(0.1, 4))
                    chosen[0].send_signal(signal.SIGCONT)
                else:
                    number = {"kill": signal.SIGKILL, "preempt": signal.SIGTERM}.get(kind, signal.SIGINT)
                    for process in chosen:
                        process.send_signal(number)
                    if kind == "preempt":
                        told.add(victim)
                    if kind == "kill":
                        killed.add(victim)
                        killed.add("after")
                    interrupted += kind.startswith("interrupt")
    problems = []
    for rank, process in enumerate(processes):
        if process.poll() is None:
            problems.append(f"rank {rank} of {ranks} at stage {stage} hangs")
            process.send_signal(signal.SIGKILL)
            process.wait()
        elif rank in killed and process.returncode == -signal.SIGKILL:
            counted["ranks killed"] += 1
        elif rank in told and process.returncode == -signal.SIGTERM and log.read_text().count(BEGINS) < ranks:
            counted["ranks ended by a preemption while they started"] += 1
        elif process.returncode in (DONE, NAMED, PREEMPTED):
            counted[
                "ranks "
                + {DONE: "done", NAMED: "named an error and ended", PREEMPTED: "saved and ended"}[process.returncode]
            ] += 1
        else:
            said = log.read_text()
            starting = "KeyboardInterrupt" in said and "Traceback" in said  # before the loop that tries again
            if starting or any(
                words in said for words in ("could not come together", "could not meet", "did not complete")
            ):
                counted["ranks ended by an interrupt or a named error outside the loop"] += 1
            else:
                problems.append(f"rank {rank} of {ranks} at stage {stage} ended with {process.returncode}")
    said = log.read_text()
    counted["interrupts that a rank caught"] += said.count(": KeyboardInterrupt: ")
    counted["times all ranks went on"] += said.count("all ranks have ended the same collectives")
    if problems:
        shutil.copy(log, f"{log}.violation-{time.time_ns()}")
    return problems


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="soak.json")
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[1, 2, 4], help="of a life; powers of two, or one number"
    )
    asked = parser.parse_args()
    torch.set_num_threads(1)
    draw, counted, violations = random.Random(asked.seed), collections.Counter(), []
    begun, end = time.monotonic(), time.monotonic() + 60 * asked.minutes
    place = tempfile.mkdtemp()  # no TemporaryDirectory: ranks, which are forked, would remove it as they end
    try:
        alone = f"{place}/alone.pt"
        log = Path(asked.out + ".log")
        assert not life(
            f"{place}/alone", asked.ranks[len(asked.ranks) // 2], 1, alone, None, collections.Counter(), log
        ), log.read_text()
        wanted = torch.load(alone)
        while time.monotonic() < end:
            counted["runs begun"] += 1
            folder, out = f"{place}/run", f"{place}/run.pt"
            shutil.rmtree(folder, ignore_errors=True)
            Path(out).unlink(missing_ok=True)
            while not Path(out).exists() and time.monotonic() < end:
                counted["lives"] += 1
                violations += life(folder, draw.choice(asked.ranks), draw.randrange(4), out, draw, counted, log)
            if Path(out).exists():
                got = torch.load(out)
                if all(torch.equal(got[name], wanted[name]) for name in wanted):
                    counted["runs ended with the same bits"] += 1
                else:
                    violations.append(f"run {counted['runs begun']} has other bits")
            figures = {"hours": round((time.monotonic() - begun) / 3600, 3), **counted, "violations": violations}
            Path(asked.out).write_text(json.dumps(figures, indent=2) + "\n")
            print(json.dumps(figures), flush=True)
    finally:
        shutil.rmtree(place)
    sys.exit(bool(violations))


if __name__ == "__main__":
    main()
