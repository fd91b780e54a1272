"""The manifest for Kubernetes against the schemas of its parts, and its script against the command that it calls."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml")
pytestmark = pytest.mark.trainers
MANIFEST = Path(__file__).parents[2] / "examples" / "jobset.yaml"


@pytest.fixture
def jobset():
    return yaml.safe_load(MANIFEST.read_text())


def pods(jobset):
    (job,) = jobset["spec"]["replicatedJobs"]
    return job["template"]["spec"]


def test_the_jobset_is_one(jobset):
    """By the models that Kubeflow generates from JobSet's schema: each key is known, and each value of its kind."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    assert models.JobsetV1alpha2JobSet.from_dict(jobset).to_dict() == jobset


def test_its_job_is_one(jobset):
    """By Kubernetes' own schema, where no key may be unknown."""
    validate = pytest.importorskip("kubernetes_validate")
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "node"}, "spec": pods(jobset)}
    validate.validate(job, validate.latest_version(), strict=True)
    with pytest.raises(validate.ValidationError):
        validate.validate(job | {"spec": {**job["spec"], "paralelism": 2}}, validate.latest_version(), strict=True)


@pytest.mark.parametrize("resumed", [False, True], ids=["first", "resumed"])
def test_its_script_starts_or_goes_on(jobset, tmp_path, resumed):
    """What the container runs, with a torchrun that says what it was called with."""
    (tmp_path / "torchrun").write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    (tmp_path / "torchrun").chmod(0o755)
    if resumed:
        (tmp_path / "mine" / "checkpoints").mkdir(parents=True)
    (container,) = pods(jobset)["template"]["spec"]["containers"]
    script = container["args"][0].replace("/runs/", f"{tmp_path}/")
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "JOB_COMPLETION_INDEX": "1"}
    done = subprocess.run([*container["command"], script], env=environment, capture_output=True, text=True, check=True)
    said = done.stdout.splitlines()
    assert said[said.index("--node-rank") + 1] == "1"
    assert said[said.index("zeroshard") - 1 :][:3] == ["--no-python", "zeroshard", "train"]
    wanted = ["--resume", f"{tmp_path}/mine"] if resumed else ["--out", f"{tmp_path}/mine", "--steps", "100000"]
    assert said[said.index("train") + 1 :] == [*wanted, "--save-every", "500"]
