"""Two hosts of two ranks, and a slow link between them: `python -m bench.links`, as root, on Linux; ten minutes.

A host is a network namespace; the link is a pair of virtual devices whose rate `tc` limits (a token bucket). Ranks of
one host talk over its loopback, which nothing limits. Every back-end trains the same model in turn, at every rate.

step s          time of a step, waiting at both ends of several
sent MB         what the TCP connections of one rank have sent to the other host in a step, by the kernel: the most
predicted MB    payload by the ledger: of zeroshard with two replicas all that crosses is the relay
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from . import report
from .backends import Trainer, fsdp2, ours
from .model import GPT, SIZES, batch
from .train import connections, sent_by

HOSTS, PER_HOST = ("10.77.0.1", "10.77.0.2"), 2
RATES = {"100 Mbit/s": "100mbit", "1 Gbit/s": "1gbit", "as it is": None}


BACKENDS: dict[str, Callable[..., Trainer]] = {
    **{
        f"zeroshard {stage}, {replicas} replica{'s' * (replicas > 1)}": functools.partial(
            ours.build, stage=stage, replicas=replicas
        )
        for stage in (1, 2, 3)
        for replicas in (1, 2)
    },
    "FSDP2": functools.partial(fsdp2.build, reshard=True),
    "FSDP2, hybrid 2 x 2": functools.partial(fsdp2.build, reshard=True, replicas=2),
}


def crossed(own: str) -> int:
    """Bytes that this process has sent to another host."""
    total = 0
    for connection in connections():
        with contextlib.suppress(OSError), connection:  # one without a peer only listens
            if connection.getpeername()[0].removeprefix("::ffff:") != own:
                total += sent_by(connection)
    return total


def relayed(model: nn.Module) -> int:
    """Bytes of payload that this rank has handed on so far."""
    engine: Any = getattr(model, "_zeroshard_engine", None)
    traffic = {} if engine is None else engine.ledger.snapshot().traffic
    return traffic["relay"].sent if "relay" in traffic else 0


def rank(folder: Path, size: str, steps: int) -> None:
    """One rank of one host: every back-end in turn, once for each rate that the parent sets."""
    number, own = int(os.environ["RANK"]), os.environ["HOST"]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for rate in RATES:
        dist.barrier()
        if number == 0:
            (folder / "ask").write_text(rate)
        while not (folder / f"set {RATES[rate]}").exists():
            time.sleep(0.05)
        for name, build in BACKENDS.items():
            torch.manual_seed(0)
            model = GPT(SIZES[size])
            train = build(model, low=False)
            losses: list[float] = []
            started = before = payload = 0.0
            for step in range(steps + 1):
                if step == 1:  # the first has optimizers make their state
                    dist.barrier()
                    started, before, payload = time.perf_counter(), crossed(own), relayed(model)
                losses.append(train.backward(batch(SIZES[size], step, number, dist.get_world_size())).item())
                train.update()
            dist.barrier()
            seconds = (time.perf_counter() - started) / steps
            time.sleep(0.2)  # nothing more is sent behind the step's back
            told: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(told, (crossed(own) - before, relayed(model) - payload, losses[-1]))
            if number == 0:
                sent, predicted = (max(each[at] for each in told) / steps / 1e6 for at in (0, 1))
                row = {
                    "link": rate, "back-end": name, "step s": round(seconds, 3), "sent MB": round(sent, 3),
                    "predicted MB": round(predicted, 3) if predicted else "-", "losses": [each[2] for each in told],
                }  # fmt: skip
                with (folder / "rows").open("a") as file:
                    file.write(json.dumps(row) + "\n")
            del model, train
    dist.barrier()
    dist.destroy_process_group()


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, timeout=20)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="10M")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", type=Path, default=report.RESULTS)
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank(options.rank, options.size, options.steps)
        return
    folder = Path(tempfile.mkdtemp(prefix="links-"))
    spaces = [f"zs-link-{os.getpid()}-{at}" for at in range(len(HOSTS))]
    devices = [f"zsl{os.getpid() % 10000}{at}" for at in "ab"]
    try:
        for space in spaces:
            ip("netns", "add", space)
        ip("link", "add", devices[0], "type", "veth", "peer", "name", devices[1])
        for space, device, host in zip(spaces, devices, HOSTS, strict=True):
            ip("link", "set", device, "netns", space)
            ip("-n", space, "addr", "add", f"{host}/24", "dev", device)
            ip("-n", space, "link", "set", device, "up")
            ip("-n", space, "link", "set", "lo", "up")
        _train(folder, spaces, devices, options)
    finally:
        for space in spaces:
            subprocess.run(["ip", "netns", "del", space], check=False, timeout=20)
    rows = [json.loads(line) for line in (folder / "rows").read_text().splitlines()]
    first = rows[0]["losses"]
    for row in rows:
        row["losses"] = "same bits" if row["losses"] == first else "other bits"
    notes = [
        f"{len(HOSTS)} network namespaces of {PER_HOST} ranks, fp32, {options.size} parameters, {options.steps} steps.",
        "The rate is limited by tc's token bucket at both ends. No delay: the kernel here has no netem.",
        "losses: of the last step, on each rank, against the first row's.",
    ]
    report.write(options.out, "links", {"size": options.size, "steps": options.steps}, rows, notes)


def _train(folder: Path, spaces: list[str], devices: list[str], options: argparse.Namespace) -> None:
    processes = []
    for number in range(len(HOSTS) * PER_HOST):
        at = number // PER_HOST
        environment = os.environ | {
            "RANK": f"{number}", "WORLD_SIZE": f"{len(HOSTS) * PER_HOST}", "LOCAL_RANK": f"{number % PER_HOST}",
            "MASTER_ADDR": HOSTS[0], "MASTER_PORT": "29577", "GLOO_SOCKET_IFNAME": devices[at], "HOST": HOSTS[at],
            "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        command = ["ip", "netns", "exec", spaces[at], sys.executable, "-m", "bench.links", "--rank", str(folder)]
        command += ["--size", options.size, "--steps", str(options.steps)]
        processes.append(subprocess.Popen(command, env=environment))
    asked = ""
    while any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes):
            for process in processes:
                process.terminate()
            raise SystemExit("a rank failed")
        rate = (folder / "ask").read_text() if (folder / "ask").exists() else ""
        if rate and rate != asked:
            for space, device in zip(spaces, devices, strict=True):
                subprocess.run(["tc", "-n", space, "qdisc", "del", "dev", device, "root"], check=False, stderr=-3)
                if RATES[rate]:
                    limit = ["tbf", "rate", RATES[rate], "burst", "256kbit", "latency", "400ms"]
                    subprocess.run(["tc", "-n", space, "qdisc", "add", "dev", device, "root", *limit], check=True)
            (folder / f"set {RATES[rate]}").touch()
            asked = rate
        time.sleep(0.05)


if __name__ == "__main__":
    main()
