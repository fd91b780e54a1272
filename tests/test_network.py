"""A network that loses, doubles, reorders, delays and falls apart, between two namespaces: nothing but time changes.

`zeroshard train` runs on a rank in each namespace; packets between them go through bench/link.py, in this process.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from bench import link

import ranks as rank_processes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
HOSTS = ("10.79.0.1", "10.79.0.2")

# `zeroshard train` waits for half an hour where its process group does.
TRAIN = """
import functools, sys, zeroshard
zeroshard.Comm = functools.partial(zeroshard.Comm, timeout=float(sys.argv.pop(1)))
from zeroshard.cli.main import main
sys.exit(main())
"""
FAULTS = {
    "loss, doubles, another order": {"loss": 0.03, "duplicate": 0.03, "reorder": 0.05, "delay": 0.001},
    "200 ms each way": {"delay": 0.2},
    "all at once": {"loss": 0.01, "duplicate": 0.01, "reorder": 0.02, "delay": 0.05},
}


class Network:
    """Two namespaces, the link between them, and the ranks that were started in them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.spaces = folder, [f"zs-net-{os.getpid()}-{at}" for at in range(2)]
        self.processes: list[subprocess.Popen] = []
        self.lives = 0

    def __enter__(self) -> Network:
        try:
            for space in self.spaces:
                link.ip("netns", "add", space)
            self.link = link.Link(*zip(self.spaces, HOSTS, strict=True), seed=21)
            self.link.__enter__()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        self.link.__exit__()
        self._remove()

    def _remove(self) -> None:
        for space in self.spaces:
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True, timeout=20)

    def train(self, *words: str, timeout: float = 200.0) -> None:
        """Start `zeroshard train` as rank 0 of one namespace and rank 1 of the other."""
        self.processes.clear()
        self.lives += 1
        for rank, space in enumerate(self.spaces):
            environment = os.environ | {
                "RANK": f"{rank}", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": HOSTS[0],
                "MASTER_PORT": f"{29560 + self.lives}", "GLOO_SOCKET_IFNAME": self.link.devices[rank], "OMP_NUM_THREADS": "1",
            }  # fmt: skip
            command = ["ip", "netns", "exec", space, sys.executable, "-c", TRAIN, str(timeout), "train", *words]
            with self._log(rank).open("w") as log:
                self.processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))

    def _log(self, rank: int) -> Path:
        return self.folder / f"life-{self.lives}-rank-{rank}"

    def ended(self, seconds: float) -> list[int]:
        rank_processes.until(lambda: all(process.poll() is not None for process in self.processes), seconds)
        return [process.returncode for process in self.processes]

    def said(self) -> list[str]:
        return [self._log(rank).read_text() for rank in range(2)]

    def until_saved(self, out: Path, step: int, seconds: float) -> None:
        manifest = out / "checkpoints" / f"step-{step:08d}" / "manifest.json"
        rank_processes.until(lambda: manifest.exists() or any(process.poll() for process in self.processes), seconds)
        assert manifest.exists(), self.said()


@pytest.fixture
def network(tmp_path):
    if reason := link.cannot():
        pytest.skip(reason)
    with Network(tmp_path) as made:
        yield made


def options_of(stage: int, out: Path, steps: int) -> list[str]:
    return [
        "--stage",
        f"{stage}",
        "--data",
        __file__,
        "--batch",
        "2",
        "--save-every",
        "2",
        "--steps",
        f"{steps}",
        "--out",
        f"{out}",
    ]


def alone(stage: int, out: Path, steps: int) -> bytes:
    """The weights of a run of two ranks that talk over the loopback."""
    command = [sys.executable, "-m", "zeroshard", "train", "--ranks", "2", *options_of(stage, out, steps)]
    done = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    return (out / "model.safetensors").read_bytes()


@pytest.mark.row(93)
@pytest.mark.parametrize(
    ("stage", "faults"),
    [(stage, faults) for faults in FAULTS for stage in ((0, 1, 2, 3) if "doubles" in faults else (1, 3))],
)
def test_lost_doubled_reordered_and_late_packets_change_nothing_but_time(network, tmp_path, stage, faults):
    """Training, a save that a signal asks of one rank, a load and the rest of the run: the bits of an undisturbed run."""
    wanted, out = alone(stage, tmp_path / "alone", 6), tmp_path / "run"
    network.link.set(**FAULTS[faults])
    network.train(*options_of(stage, out, 6))
    network.until_saved(out, 2, 300.0)
    network.processes[1].send_signal(signal.SIGTERM)
    codes = network.ended(300.0)
    assert codes == [130, 130] and re.search(r"SIGTERM: saved .*step-0000000[3-5] ", network.said()[0]), network.said()
    network.train("--resume", str(out))
    assert network.ended(400.0) == [0, 0], network.said()
    assert "resumed from" in network.said()[0]
    assert (out / "model.safetensors").read_bytes() == wanted
    if "loss" in FAULTS[faults]:
        assert min(network.link.counted[what] for what in ("lost", "doubled", "reordered")) > 0, network.link.counted
    print(faults, stage, dict(network.link.counted))


@pytest.mark.row(93)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_partition_that_heals_in_time_changes_nothing(network, tmp_path, stage):
    wanted, out = alone(stage, tmp_path / "alone", 30), tmp_path / "run"
    network.train(*options_of(stage, out, 30))
    for step in (2, 10, 20):
        network.until_saved(out, step, 120.0)
        network.link.set(cut=True)
        time.sleep(3)
        network.link.set()
    assert network.ended(200.0) == [0, 0], network.said()
    assert network.link.counted["cut off"] > 0
    assert (out / "model.safetensors").read_bytes() == wanted


@pytest.mark.row(93)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_partition_that_lasts_is_named_on_both_sides_and_the_run_goes_on_from_its_checkpoint(
    network, tmp_path, stage
):
    wanted, out = alone(stage, tmp_path / "alone", 30), tmp_path / "run"
    network.train(*options_of(stage, out, 30), timeout=6.0)
    network.until_saved(out, 10, 120.0)
    network.link.set(cut=True)
    assert network.ended(30.0) == [1, 1], network.said()
    for rank, said in enumerate(network.said()):
        assert f"a collective did not complete: rank {1 - rank} " in said, said
    network.link.set()
    network.train("--resume", str(out), timeout=60.0)
    assert network.ended(200.0) == [0, 0], network.said()
    assert (out / "model.safetensors").read_bytes() == wanted
