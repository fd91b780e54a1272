"""TorchElastic: a run of torchrun's that loses a node, or gets one more, goes on with the bits of a run that had neither."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ranks import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(290)]

EXAMPLE = Path(__file__).parents[1] / "examples" / "elastic.py"
PATIENCE = 240.0  # seconds: each start loads torch, and torchrun waits for nodes that do not come
STARTED = re.compile(r"^from step (\d+) on, (\d+) ranks", re.MULTILINE)


class Nodes:
    """torchrun's agents on this machine, as on nodes of their own; the first holds the store in which they meet."""

    def __init__(self, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.folder, self.agents = folder, []

    def start(self) -> None:
        number = len(self.agents)
        words = f"""--nnodes 1:2 --nproc-per-node 2 --max-restarts 3 --local-addr 127.0.0.1 --rdzv-backend c10d --rdzv-id x \
            --rdzv-endpoint 127.0.0.1:{self.port} --rdzv-conf is_host={int(number == 0)},last_call_timeout=5"""
        command = [sys.executable, "-m", "torch.distributed.run", *words.split(), EXAMPLE, self.folder / "out"]
        environment = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        with self.log(number).open("w") as output:
            agent = subprocess.Popen(command, stdout=output, stderr=output, env=environment, cwd=self.folder)
        self.agents.append(agent)

    def log(self, number: int) -> Path:
        return self.folder / f"log-{number}"

    def lose(self, number: int) -> None:
        """As a node that loses power: the agent and its ranks, which torchrun has started in sessions of their own."""
        agent = self.agents[number]
        tasks = Path(f"/proc/{agent.pid}/task").glob("*/children")
        ranks = [int(pid) for task in tasks for pid in task.read_text().split()]
        for pid in (agent.pid, *ranks):
            os.kill(pid, signal.SIGKILL)
        agent.wait()

    def starts(self) -> list[tuple[int, int]]:
        """(from which step, on how many ranks) each start went on."""
        told = "".join(self.log(number).read_text() for number in range(len(self.agents)))
        return [(int(step), int(ranks)) for step, ranks in STARTED.findall(told)]

    def until_saved(self, step: int) -> None:
        def saved() -> bool:
            assert all(agent.poll() in (None, -signal.SIGKILL) for agent in self.agents), self.log(0).read_text()
            return any(int(path.name[5:]) >= step for path in (self.folder / "out").glob("step-*"))

        until(saved, PATIENCE)


@pytest.fixture
def nodes(tmp_path):
    made = Nodes(tmp_path)
    yield made
    for number, agent in enumerate(made.agents):
        if agent.poll() is None:
            made.lose(number)


def test_the_example_is_short():
    assert len(EXAMPLE.read_text().splitlines()) < 40


def test_a_run_that_loses_a_node_has_the_bits_of_one_that_does_not(nodes, tmp_path, command):
    """Four ranks on two nodes; one node is killed; two ranks go on from the newest whole checkpoint, with twice the
    micro-batches each. The last checkpoint is that of one rank alone, which nobody disturbed."""
    nodes.start()
    nodes.start()
    nodes.until_saved(20)
    nodes.lose(1)
    nodes.agents[0].wait(PATIENCE)
    assert nodes.agents[0].returncode == 0, nodes.log(0).read_text()
    (before, four), (after, two) = nodes.starts()
    assert (before, four, two) == (0, 4, 2) and after >= 20 and after % 10 == 0

    alone = [sys.executable, str(EXAMPLE), str(tmp_path / "alone")]
    subprocess.run(alone, check=True, capture_output=True, timeout=PATIENCE, cwd=tmp_path)
    code, told, _ = command("ckpt", "diff", tmp_path / "out" / "step-0300", tmp_path / "alone" / "step-0300")
    assert code == 0, told
