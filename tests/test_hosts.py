"""Several hosts: network namespaces of this machine, each with an address of its own, joined by a bridge.

A test makes its own namespaces and removes them; its traffic stays inside them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
TIMEOUT = 6  # seconds, of the process group

PROGRAM = """
import hashlib, json, os, sys, time, traceback
import torch, zeroshard
folder, rank = sys.argv[1], int(os.environ["RANK"])
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
outcome = {}
try:
    zero = zeroshard.shard(model, optimizer, stage=3, comm=zeroshard.Comm(timeout=float(sys.argv[3])))
    for step in range(int(sys.argv[2])):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(100 * step + rank))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        open(f"{folder}/step-{rank}", "w").write(str(step))
        time.sleep(0.02)
    with zero.gathered():
        outcome["weights"] = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
except zeroshard.Error as error:
    outcome["error"] = str(error)
open(f"{folder}/outcome-{rank}.part", "w").write(json.dumps(outcome))
os.rename(f"{folder}/outcome-{rank}.part", f"{folder}/outcome-{rank}")
time.sleep(4)  # a process that ends takes its connections with it: here the others have to find out by themselves
os._exit(0)
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20)


def cannot() -> str:
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    if shutil.which("ip") is None:
        return "making network namespaces needs ip (iproute2)"
    try:
        ip("netns", "add", f"zs-try-{os.getpid()}")
        ip("netns", "del", f"zs-try-{os.getpid()}")
    except subprocess.CalledProcessError as error:
        return f"this machine makes no network namespaces: {error.stderr.strip()}"
    return ""


class Hosts:
    """Namespaces `name-0`, `name-1`, ... with addresses 10.77.0.1, ..., and one more that holds the bridge."""

    def __init__(self, count: int, folder: Path) -> None:
        self.name, self.count, self.folder = f"zs{os.getpid()}", count, folder
        self.processes: list[subprocess.Popen] = []
        self.made: list[str] = []

    def __enter__(self):
        try:
            self.add("b")
            ip("-n", f"{self.name}-b", "link", "add", "bridge", "type", "bridge")
            ip("-n", f"{self.name}-b", "link", "set", "bridge", "up")
            for host in range(self.count):
                self.add(str(host))
                space = f"{self.name}-{host}"
                ip(
                    "-n",
                    space,
                    "link",
                    "add",
                    "eth",
                    "type",
                    "veth",
                    "peer",
                    "name",
                    f"port{host}",
                    "netns",
                    f"{self.name}-b",
                )
                ip("-n", f"{self.name}-b", "link", "set", f"port{host}", "master", "bridge", "up")
                ip("-n", space, "addr", "add", f"10.77.0.{host + 1}/24", "dev", "eth")
                ip("-n", space, "link", "set", "eth", "up")
                ip("-n", space, "link", "set", "lo", "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def add(self, what: str) -> None:
        ip("netns", "add", f"{self.name}-{what}")
        self.made.append(f"{self.name}-{what}")

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.wait()
        for space in reversed(self.made):
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True, timeout=20)

    def start(self, steps: int, timeout: float = TIMEOUT) -> None:
        program = self.folder / "program.py"
        program.write_text(PROGRAM)
        for rank in range(self.count):
            environment = os.environ | {
                "RANK": str(rank), "WORLD_SIZE": str(self.count), "LOCAL_RANK": "0", "MASTER_ADDR": "10.77.0.1",
                "MASTER_PORT": "29555", "GLOO_SOCKET_IFNAME": "eth", "OMP_NUM_THREADS": "1",
            }  # fmt: skip
            command = ["ip", "netns", "exec", f"{self.name}-{rank}", sys.executable, str(program)]
            self.processes.append(
                subprocess.Popen([*command, str(self.folder), str(steps), str(timeout)], env=environment)
            )

    def until_step(self, step: int) -> None:
        files = [self.folder / f"step-{rank}" for rank in range(self.count)]
        while not all(file.exists() and int(file.read_text() or 0) >= step for file in files):
            assert all(process.poll() is None for process in self.processes), "a rank ended early"
            time.sleep(0.05)

    def outcomes(self) -> list[dict]:
        files = [self.folder / f"outcome-{rank}" for rank in range(self.count)]
        while not all(file.exists() for file in files):
            time.sleep(0.05)
        return [json.loads(file.read_text()) for file in files]


@pytest.fixture
def hosts(tmp_path, request):
    if reason := cannot():
        pytest.skip(reason)
    with Hosts(request.param, tmp_path) as made:
        yield made


@pytest.mark.row(61)
@pytest.mark.parametrize("hosts", [2, 4], indirect=True)
def test_training_over_namespaces(hosts):
    """Ranks at addresses of their own train, and hold the same weights."""
    hosts.start(10)
    weights = [outcome.get("weights") or outcome for outcome in hosts.outcomes()]
    assert len(set(map(str, weights))) == 1 and "error" not in str(weights[0])


@pytest.mark.row(61)
@pytest.mark.parametrize("hosts", [2, 4], indirect=True)
def test_a_cut_cable_is_named_on_both_sides(hosts):
    """The last host's interface goes down: the others name its rank, and it names theirs."""
    hosts.start(100_000)
    hosts.until_step(5)
    last = hosts.count - 1
    ip("-n", f"{hosts.name}-{last}", "link", "set", "eth", "down")
    outcomes = hosts.outcomes()
    for rank, outcome in enumerate(outcomes[:-1]):
        assert f"did not complete: rank {last} " in outcome["error"], (rank, outcome)
    assert "did not complete: " in outcomes[last]["error"]
    for rank in range(last):
        assert f"rank {rank} cannot be reached" in outcomes[last]["error"], outcomes[last]


@pytest.mark.row(61)
@pytest.mark.parametrize("hosts", [2], indirect=True)
def test_a_slow_link_is_only_slow(hosts, tmp_path):
    """Four megabits a second, with full queues that drop packets: the bits of a run without."""
    if shutil.which("tc") is None:
        pytest.skip("slowing a link needs tc (iproute2)")
    hosts.start(8, timeout=60)
    wanted = hosts.outcomes()[0]["weights"]
    for file in hosts.folder.glob("*-?"):
        file.unlink()
    for host in range(2):
        command = ["ip", "netns", "exec", f"{hosts.name}-{host}", "tc", "qdisc", "add", "dev", "eth", "root", "tbf"]
        done = subprocess.run(
            [*command, "rate", "4mbit", "burst", "16kb", "latency", "400ms"],
            check=False,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            pytest.skip(f"this kernel slows no link: {done.stderr.strip()}")
    for process in hosts.processes:
        process.wait()
    hosts.processes.clear()
    hosts.start(8, timeout=60)
    assert [outcome["weights"] for outcome in hosts.outcomes()] == [wanted, wanted]
    for host in range(2):
        command = ["ip", "netns", "exec", f"{hosts.name}-{host}", "tc", "-s", "qdisc", "show", "dev", "eth"]
        told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        assert int(re.search(r"overlimits (\d+)", told)[1]) > 0, told  # packets that had to wait


@pytest.mark.row(61)
@pytest.mark.parametrize("hosts", [2, 4], indirect=True)
def test_a_reset_ends_all_ranks_at_once(hosts):
    """All connections of one host are reset: an error on every rank, long before any time-out."""
    hosts.start(100_000, timeout=250)
    hosts.until_step(5)
    command = ["ip", "netns", "exec", f"{hosts.name}-1", "ss", "-K", "dst", "10.77.0.0/24"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode or "10.77" not in done.stdout:
        pytest.skip(f"this kernel resets no connections: {done.stderr.strip() or 'ss -K closed none'}")
    for outcome in hosts.outcomes():
        assert "did not complete" in outcome["error"], outcome
