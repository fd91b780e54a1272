"""SIGTERM and SIGINT in any phase, to one rank, to all, or to the launcher: every process ends, and nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

import test_lost_ranks
from ranks import alive, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(170)]

PROGRAM = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import torch, zeroshard
from test_lost_ranks import arm, step
folder, where = Path(sys.argv[2]), sys.argv[3]
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(3)))
optimizer = torch.optim.AdamW(model.parameters())
offload = zeroshard.Offload(optimizer="nvme", path=folder / "scratch")
zero = zeroshard.shard(model, optimizer, offload=offload)
step(model, optimizer, 0)

def stay():
    (folder / f"pid{zero.rank}").write_text(str(os.getpid()))
    time.sleep(600)

arm(where, model, optimizer, stay)
step(model, optimizer, 1)
zero.save(folder / "saved" / "ckpt")
"""


@pytest.mark.row(60)
@pytest.mark.parametrize("where", test_lost_ranks.SEEN)
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT], ids=lambda how: how.name)
@pytest.mark.parametrize("whom", ["one rank", "all ranks", "the launcher"])
def test_a_signal_in_any_phase_ends_every_process_and_leaves_nothing(tmp_path, where, how, whom):
    """Two ranks of torchrun stand still in the phase. No process, swap file, shared memory or half a checkpoint stays."""
    launch = "--rdzv-backend c10d --rdzv-endpoint 127.0.0.1:0 --local-addr 127.0.0.1 --nproc-per-node 2 --no-python"
    command = [sys.executable, "-m", "torch.distributed.run", *launch.split()]
    command += [sys.executable, "-c", PROGRAM, os.path.dirname(__file__), str(tmp_path), where]
    log = tmp_path / "log"
    with log.open("w") as output:
        launcher = subprocess.Popen(command, stdout=output, stderr=output, env=os.environ | {"OMP_NUM_THREADS": "1"})
    files, pids = [tmp_path / "pid0", tmp_path / "pid1"], []
    try:
        until(lambda: launcher.poll() is not None or all(file.exists() and file.read_text() for file in files), 120.0)
        assert launcher.poll() is None, log.read_text()
        pids = [int(file.read_text()) for file in files]
        sent = time.monotonic()
        for pid in {"one rank": pids[1:], "all ranks": pids, "the launcher": [launcher.pid]}[whom]:
            os.kill(pid, how)
        until(lambda: not any(map(alive, pids)), 60.0)
        ranks_gone = time.monotonic() - sent
        until(lambda: launcher.poll() is not None, 60.0)
        print(f"{where}, {how.name} to {whom}: ranks {ranks_gone:.1f} s, launcher {time.monotonic() - sent:.1f} s")
    finally:
        launcher.terminate()  # and it its ranks, where they have not said who they are
        launcher.wait()
        for pid in filter(alive, pids):
            os.kill(pid, signal.SIGKILL)
    assert launcher.returncode != 0
    assert list((tmp_path / "scratch").iterdir()) == []
    assert [name for name in os.listdir("/dev/shm") if any(str(pid) in name for pid in pids)] == []
    saved = tmp_path / "saved"
    assert not saved.exists() or os.listdir(saved) == []
