"""Ray Train on a local cluster of three nodes: a killed worker, another number of workers, and the bits of neither."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.trainers, pytest.mark.timeout(900), pytest.mark.filterwarnings("default")]

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_train.py"


@pytest.fixture
def cluster(monkeypatch):
    from ray.cluster_utils import Cluster

    places = [str(EXAMPLE.parent), str(EXAMPLE.parents[1] / "src"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", ":".join(filter(None, places)))  # of the workers
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))
    node = {"num_cpus": 1, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args=node)
    made.add_node(num_cpus=1)
    made.add_node(num_cpus=1)
    ray.init(address=made.address, log_to_driver=False)
    yield made
    ray.shutdown()
    made.shutdown()


def fit(folder: Path, workers: int, steps: int, stage: int):
    import ray_train

    restarts = ray.train.FailureConfig(max_failures=1)
    run = ray.train.RunConfig(name="run", storage_path=str(folder), failure_config=restarts)
    scaling = ray.train.ScalingConfig(num_workers=workers, placement_strategy="SPREAD")
    trained = ray_train.TorchTrainer(
        ray_train.loop, train_loop_config={"steps": steps, "stage": stage}, scaling_config=scaling, run_config=run
    ).fit()
    assert trained.metrics["step"] == steps and trained.checkpoint.path.endswith(f"run/step-{steps:04}")


def workers() -> list[int]:
    """The processes in which Ray's workers train."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if (place / "cmdline").read_bytes().startswith(b"ray::") and b"RayTrainWorker" in (
                place / "cmdline"
            ).read_bytes():
                found.append(int(place.name))
        except OSError:  # it has ended
            continue
    return found


def test_rays_example_is_short():
    assert len([line for line in EXAMPLE.read_text().splitlines() if not line.startswith("# ")]) < 40


def test_rays_example_has_the_same_bits_at_stages_1_to_3(cluster, tmp_path):
    for stage in (1, 2, 3):
        fit(tmp_path / f"stage {stage}", 2, 10, stage)
    for stage in (1, 2):
        paths = [tmp_path / f"stage {each}" / "run" / "step-0010" for each in (stage, 3)]
        compare = [sys.executable, "-m", "zeroshard", "ckpt", "diff", *paths]  # another test may have left this a rank
        done = subprocess.run(compare, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_a_killed_worker_and_another_number_of_workers_keep_the_bits(cluster, tmp_path, command):
    """Two workers on two nodes, one is killed after a report, and both start again from it; then one worker goes on, each at another stage.
    The last checkpoint is that of one worker that trained from the first step to the last."""
    run, killed = tmp_path / "disturbed" / "run", []
    reported = run / "checkpoint_manager_snapshot.json"  # by Ray's controller: of what it has heard

    def written(name: str) -> int:
        return (run / name / "manifest.json").stat().st_ino

    def kill_one() -> None:
        while not (reported.exists() and (names := re.findall(r"step-\d+", reported.read_text()))):
            time.sleep(0.02)
        killed.append((max(names), written(max(names))))
        for pid in sorted(workers())[-1:]:
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)

    killer = threading.Thread(target=kill_one, daemon=True)
    killer.start()
    fit(tmp_path / "disturbed", 2, 100, stage=1)
    killer.join()
    (name, before), *pids = killed
    assert len(pids) == 1 and written(name) == before  # the restart did not write it again
    fit(tmp_path / "disturbed", 1, 120, stage=2)
    fit(tmp_path / "straight", 1, 120, stage=3)
    paths = [tmp_path / name / "run" / "step-0120" for name in ("disturbed", "straight")]
    code, told, _ = command("ckpt", "diff", *paths)
    assert code == 0, told
