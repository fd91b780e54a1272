"""Two hosts of two ranks, and a slow link between them: `python -m bench.links`, as root, on Linux; ten minutes.

A host is a network namespace; the link is a pair of virtual devices whose rate `tc` limits (a token bucket). Ranks of
one host talk over its loopback, which nothing limits. At every rate all back-ends train the same model in turn, a step
each, round after round, and the next round begins with the next of them. With `--delays 1 10` (milliseconds each way)
packets go through `bench/link.py` instead, which takes processor time for it, and the result is called links-delays.

step s          time of a step, waiting at both ends: the median over the rounds
over hybrid     that over the step of FSDP2's hybrid sharding in the same round: the median, least and most
sent MB         what the TCP connections of one rank have sent to the other host in a step, by the kernel: the most
predicted MB    payload by the ledger: of zeroshard with two replicas the relay crosses, and what they share
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import statistics
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
from .link import Link, ip
from .model import GPT, SIZES, batch
from .train import connections, sent_by

HOSTS, PER_HOST = ("10.77.0.1", "10.77.0.2"), 2
RATES = {"100 Mbit/s": "100mbit", "1 Gbit/s": "1gbit", "as it is": None}
MTU = 9000  # bytes of a packet that is delayed: a thread of Python carries each


def links(delays: list[float]) -> dict[str, tuple[str | None, float]]:
    """By name: its rate, for tc, and the milliseconds that it delays a packet."""
    if not delays:
        return {name: (rate, 0.0) for name, rate in RATES.items()}
    return {f"{name}, {delay:g} ms": (rate, delay) for name, rate in RATES.items() if rate for delay in delays}


BACKENDS: dict[str, Callable[..., Trainer]] = {
    # Below stage 3 what a step gathers is under way until the next forward: in turns it would be another back-end's.
    "zeroshard 3, 1 replica": functools.partial(ours.build, stage=3),
    "zeroshard 3, 2 replicas": functools.partial(ours.build, stage=3, replicas=2),
    "zeroshard 3, 2 hosts": functools.partial(ours.build, stage=3, hosts=2),
    "zeroshard 3, 2 replicas, all": functools.partial(ours.build, stage=3, replicas=2, over="all"),
    "FSDP2": functools.partial(fsdp2.build, reshard=True),
    "FSDP2, hybrid 2 x 2": functools.partial(fsdp2.build, reshard=True, replicas=2),
}
HYBRID = [*BACKENDS][-1]
COLOURS = ("#0969da", "#54aeff", "#8250df", "#0a3069", "#6e7781", "#afb8c1")


def crossed(own: str) -> int:
    """Bytes that this process has sent to another host."""
    total = 0
    for connection in connections():
        with contextlib.suppress(OSError), connection:  # one without a peer only listens
            if connection.getpeername()[0].removeprefix("::ffff:") != own:
                total += sent_by(connection)
    return total


def relayed(model: nn.Module) -> int:
    """Bytes of payload that this rank has handed on and shared so far."""
    engine: Any = getattr(model, "_zeroshard_engine", None)
    traffic = {} if engine is None else engine.ledger.snapshot().traffic
    return sum(traffic[verb].sent for verb in ("relay", "share") if verb in traffic)


class Held:
    """One rank of one back-end: its model, and what its steps have cost at the rate that is set."""

    def __init__(self, name: str, size: str) -> None:
        torch.manual_seed(0)
        self.size = SIZES[size]
        self.model = GPT(self.size)
        self._train = BACKENDS[name](self.model, low=False)
        self._steps = 0
        self.loss = 0.0

    def step(self) -> None:
        tokens_BT = batch(self.size, self._steps, dist.get_rank(), dist.get_world_size())
        self._steps += 1
        self.loss = self._train.backward(tokens_BT).item()
        self._train.update()

    def timed(self, own: str) -> tuple[float, int, int, float]:
        """Seconds from all ready to all done, bytes sent to the other host, bytes handed on, the loss."""
        dist.barrier()
        started, before, payload = time.perf_counter(), crossed(own), relayed(self.model)
        self.step()
        dist.barrier()
        seconds = time.perf_counter() - started
        sent = -1
        while (now := crossed(own)) != sent:  # nothing more is sent behind the step's back
            sent = now
            time.sleep(0.2)
        return seconds, sent - before, relayed(self.model) - payload, self.loss


def rank(folder: Path, size: str, rounds: int, names_of_links: list[str]) -> None:
    """One rank of one host: every back-end in turn, round after round, once for each rate that the parent sets."""
    number, own = int(os.environ["RANK"]), os.environ["HOST"]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    held = {name: Held(name, size) for name in BACKENDS}
    for one in held.values():
        one.step()  # the first has optimizers make their state, and libraries their connections
    names = [*BACKENDS]
    for at_link, rate in enumerate(names_of_links):
        dist.barrier()
        if number == 0:
            (folder / "ask.part").write_text(rate)
            (folder / "ask.part").rename(folder / "ask")
        while not (folder / f"set {at_link}").exists():
            time.sleep(0.05)
        mine: dict[str, list[Any]] = {name: [] for name in names}
        for turn in range(rounds):
            for at in range(len(names)):
                name = names[(turn + at) % len(names)]
                mine[name].append(held[name].timed(own))
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, mine)
        if number == 0:
            with (folder / "rows").open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in _rows(rate, told))
    dist.barrier()
    dist.destroy_process_group()


def _rows(rate: str, told: list[dict[str, list[Any]]]) -> list[dict[str, Any]]:
    """Of all ranks' steps at one rate: a row for each back-end."""
    steps = {
        name: [max(one[0] for one in turn) for turn in zip(*(each[name] for each in told), strict=True)]
        for name in BACKENDS
    }
    rows = []
    for name, seconds in steps.items():
        ratios = [mine / its for mine, its in zip(seconds, steps[HYBRID], strict=True)]
        sent, payload = (
            max(statistics.median(step[at] for step in each[name]) for each in told) / 1e6 for at in (1, 2)
        )
        rows.append({
            "link": rate, "back-end": name, "step s": round(statistics.median(seconds), 3),
            "over hybrid": report.spread(ratios), "sent MB": round(sent, 3),
            "predicted MB": round(payload, 3) if payload else "-",
            "losses": [[step[3] for step in each[name]] for each in told],
        })  # fmt: skip
    return rows


def plot(rows: list[dict[str, Any]]) -> str:
    """An SVG of bars: seconds of a step for each back-end, a group for each link."""
    names, links = (list(dict.fromkeys(row[key] for row in rows)) for key in ("back-end", "link"))
    left, line, scale = 190, 18, 380 / max(row["step s"] for row in rows)
    text, y = ['<text x="8" y="20">seconds of a step; shorter is better</text>'], 44
    for link in links:
        text.append(f'<text x="8" y="{y}" font-weight="600">{link}</text>')
        y += 8
        for row in (row for row in rows if row["link"] == link):
            long = scale * row["step s"]
            text.append(f'<text x="{left - 8}" y="{y + 13}" text-anchor="end">{row["back-end"]}</text>')
            colour = COLOURS[names.index(row["back-end"]) % len(COLOURS)]
            text.append(f'<rect x="{left}" y="{y + 2}" width="{long:.1f}" height="{line - 4}" fill="{colour}"/>')
            text.append(f'<text x="{left + long + 6:.1f}" y="{y + 13}">{row["step s"]:g}</text>')
            y += line
        y += 26
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 {y}" font-family="sans-serif" font-size="12">'
    return head + f'<rect width="640" height="{y}" fill="white"/>' + "".join(text) + "</svg>\n"


def _wired(spaces: list[str]) -> list[str]:
    """The two ends of a pair of devices that delay nothing."""
    devices = [f"zsl{os.getpid() % 10000}{at}" for at in "ab"]
    ip("link", "add", devices[0], "type", "veth", "peer", "name", devices[1])
    for space, device, host in zip(spaces, devices, HOSTS, strict=True):
        ip("link", "set", device, "netns", space)
        ip("-n", space, "addr", "add", f"{host}/24", "dev", device)
        ip("-n", space, "link", "set", device, "up")
        ip("-n", space, "link", "set", "lo", "up")
    return devices


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="10M")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--delays", type=float, nargs="+", default=[], help="milliseconds each way")
    parser.add_argument("--out", type=Path, default=report.RESULTS)
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank(options.rank, options.size, options.rounds, [*links(options.delays)])
        return
    folder = Path(tempfile.mkdtemp(prefix="links-"))
    spaces = [f"zs-link-{os.getpid()}-{at}" for at in range(len(HOSTS))]
    try:
        for space in spaces:
            ip("netns", "add", space)
        if options.delays:
            one, other = zip(spaces, HOSTS, strict=True)
            with Link(one, other, mtu=MTU) as link:
                _train(folder, spaces, link.devices, options, lambda ms: link.set(delay=ms / 1e3))
        else:
            _train(folder, spaces, _wired(spaces), options, lambda ms: None)
    finally:
        for space in spaces:
            subprocess.run(["ip", "netns", "del", space], check=False, timeout=20)
    rows = [json.loads(line) for line in (folder / "rows").read_text().splitlines()]
    first: dict[tuple[str, str], Any] = {}
    for row in rows:
        of_one = first.setdefault((row["link"], row["back-end"][:5]), row["losses"])  # its library's first row
        row["losses"] = "same bits" if row["losses"] == of_one else "other bits"
    notes = [
        f"{len(HOSTS)} network namespaces of {PER_HOST} ranks, fp32, {options.size} parameters.",
        f"{options.rounds} interleaved rounds of a step each; ratios: median, least and most.",
        "The rate is limited by tc's token bucket at both ends. "
        + (
            f"Delayed each way by bench/link.py on tun devices, in packets of {MTU} bytes: the kernel has no netem."
            if options.delays
            else "No delay: the kernel here has no netem."
        ),
        "sent: by the kernel, what one rank's TCP connections send to the other host in a step, the most of all ranks. "
        "predicted: payload of the relay and of what replicas share, all that crosses with two. all: the optimizer is "
        "sharded over all ranks.",
        "losses: of all steps at this rate, on each rank, against those of the first row there of the same library.",
    ]
    name = "links-delays" if options.delays else "links"
    report.write(options.out, name, {"size": options.size, "rounds": options.rounds}, rows, notes)
    (options.out / f"{name}.svg").write_text(plot(rows))


def _train(
    folder: Path,
    spaces: list[str],
    devices: list[str],
    options: argparse.Namespace,
    delay: Callable[[float], None],
) -> None:
    processes = []
    for number in range(len(HOSTS) * PER_HOST):
        at = number // PER_HOST
        environment = os.environ | {
            "RANK": f"{number}", "WORLD_SIZE": f"{len(HOSTS) * PER_HOST}", "LOCAL_RANK": f"{number % PER_HOST}",
            "MASTER_ADDR": HOSTS[0], "MASTER_PORT": "29577", "GLOO_SOCKET_IFNAME": devices[at], "HOST": HOSTS[at],
            "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        command = ["ip", "netns", "exec", spaces[at], sys.executable, "-m", "bench.links", "--rank", str(folder)]
        command += ["--size", options.size, "--rounds", str(options.rounds)]
        command += ["--delays", *map(str, options.delays)] if options.delays else []
        processes.append(subprocess.Popen(command, env=environment))
    asked, wanted = "", links(options.delays)
    while any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes):
            for process in processes:
                process.terminate()
            raise SystemExit("a rank failed")
        rate = (folder / "ask").read_text() if (folder / "ask").exists() else ""
        if rate and rate != asked:
            for space, device in zip(spaces, devices, strict=True):
                subprocess.run(["tc", "-n", space, "qdisc", "del", "dev", device, "root"], check=False, stderr=-3)
                if limited := wanted[rate][0]:
                    limit = ["tbf", "rate", limited, "burst", "256kbit", "latency", "400ms"]
                    subprocess.run(["tc", "-n", space, "qdisc", "add", "dev", device, "root", *limit], check=True)
            delay(wanted[rate][1])
            (folder / f"set {[*wanted].index(rate)}").touch()
            asked = rate
        time.sleep(0.05)


if __name__ == "__main__":
    main()
