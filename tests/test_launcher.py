"""What the environment says of a launch: all of it, or an error that names what is missing. And ranks that never come."""

from __future__ import annotations

import logging
import os
import socket

import pytest
import torch
from torch import nn

import ranks as rank_processes
import zeroshard
from zeroshard import launcher
from zeroshard.errors import UserError
from zeroshard.launcher import ranks_to_join, unused_tasks

TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
SRUN = {
    "SLURM_JOB_ID": "7",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
}
SHELL = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_NPROCS": "2"}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3"}

PARTIAL = {
    "a rank without a world": ({"RANK": "1"}, "RANK=1, but not WORLD_SIZE", "WORLD_SIZE=1 where"),
    "rank 0 without a world": ({"RANK": "0"}, "RANK=0, but not WORLD_SIZE", "WORLD_SIZE=1 where"),
    "a local rank without a world": ({"LOCAL_RANK": "3"}, "LOCAL_RANK=3, but not WORLD_SIZE", "torchrun"),
    "a world without a rank": (
        {"WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
        "WORLD_SIZE=2, but not RANK",
        "torchrun",
    ),
    "no place to meet": ({"RANK": "0", "WORLD_SIZE": "2"}, "but not MASTER_ADDR and MASTER_PORT", "torchrun"),
    "an empty port": (TORCHRUN | {"MASTER_PORT": ""}, "but not MASTER_PORT", "torchrun"),
    "a rank that is no number": (TORCHRUN | {"RANK": "first"}, "RANK='first'", "torchrun"),
    "a negative rank": (TORCHRUN | {"RANK": "-1"}, "RANK='-1'", "torchrun"),
    "a rank too many": (TORCHRUN | {"RANK": "2"}, "from 0 to 1 (WORLD_SIZE=2)", "torchrun"),
    "rank 1 of a world of one": ({"RANK": "1", "WORLD_SIZE": "1"}, "from 0 to 0 (WORLD_SIZE=1)", "torchrun"),
    "a world of none": (TORCHRUN | {"WORLD_SIZE": "0"}, "WORLD_SIZE='0'", "torchrun"),
    "a world that is no number": (TORCHRUN | {"WORLD_SIZE": "2.0"}, "WORLD_SIZE='2.0'", "torchrun"),
    "a port that is no number": (TORCHRUN | {"MASTER_PORT": "http"}, "MASTER_PORT='http'", "torchrun"),
    "a port that is none": (TORCHRUN | {"MASTER_PORT": "65536"}, "MASTER_PORT='65536'", "torchrun"),
    "srun": (SRUN, "srun has started 2 processes", "torchrun once on each node"),
    "an older srun": (
        {k: v for k, v in SRUN.items() if k != "SLURM_STEP_NUM_TASKS"}, "srun has started 2 processes", "torchrun once on each node",
    ),
    "Open MPI": (OPEN_MPI, "mpirun (Open MPI) has started 4 processes", "WORLD_SIZE=$OMPI_COMM_WORLD_SIZE"),
    "PMI": ({"PMI_SIZE": "2", "PMI_RANK": "0"}, "mpiexec (PMI) has started 2 processes", "RANK=$PMI_RANK"),
    "MVAPICH": ({"MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_RANK": "0"}, "has started 2 processes", "WORLD_SIZE=1"),
}  # fmt: skip
WHOLE = {
    "no launcher": ({}, 1),
    "torchrun": (TORCHRUN, 2),
    "a world of one": ({"WORLD_SIZE": "1"}, 1),
    "torchrun with one rank": (TORCHRUN | {"WORLD_SIZE": "1"}, 1),
    "local rank 0, as debuggers set it": ({"LOCAL_RANK": "0"}, 1),
    "srun torchrun": (SRUN | TORCHRUN | {"WORLD_SIZE": "16", "RANK": "9"}, 16),
    "srun of runs of their own": (SRUN | {"WORLD_SIZE": "1"}, 1),
    "srun of one task": (SRUN | {"SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, 1),
    "one task in a shell of several": (SRUN | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, 1),
    "the shell of salloc": (SHELL, 1),
    "the script of sbatch": (SHELL | {"SLURM_PROCID": "0"}, 1),
    "mpirun with one process": (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}, 1),
    "mpirun that sets all": (OPEN_MPI | TORCHRUN | {"WORLD_SIZE": "4", "RANK": "3"}, 4),
}


@pytest.mark.row(76)
@pytest.mark.parametrize("case", PARTIAL)
def test_part_of_a_launch_is_an_error_that_says_what_to_set(case):
    environment, said, instead = PARTIAL[case]
    with pytest.raises(UserError) as caught:
        ranks_to_join(environment)
    assert said in str(caught.value)
    assert instead in str(caught.value).split("instead: ")[1]


@pytest.mark.row(76)
@pytest.mark.parametrize("case", WHOLE)
def test_what_says_all_of_a_launch_is_believed(case):
    environment, wanted = WHOLE[case]
    assert ranks_to_join(environment) == wanted


def test_a_shell_with_room_for_more_tasks_is_told_from_a_task():
    assert [unused_tasks(each) for each in (SHELL, SHELL | {"SLURM_PROCID": "0"}, SRUN, {})] == ["2", "2", None, None]


def sharded():
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    return zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3)


@pytest.fixture
def environment(monkeypatch):
    """Nothing of a launch but what the test sets."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", *SRUN, *SHELL, *OPEN_MPI):
        monkeypatch.delenv(name, raising=False)
    return lambda said: [monkeypatch.setenv(name, value) for name, value in said.items()]


@pytest.mark.row(76)
@pytest.mark.parametrize("said", [{"RANK": "1"}, SRUN, OPEN_MPI], ids=["RANK", "srun", "mpirun"])
def test_shard_does_not_train_alone_by_mistake(environment, said):
    environment(said)
    with pytest.raises(UserError, match="would train alone"):
        sharded()


@pytest.mark.row(76)
def test_a_shell_of_salloc_trains_alone_and_says_so(environment, caplog):
    environment(SHELL)
    with caplog.at_level(logging.WARNING, "zeroshard"):
        assert sharded().world_size == 1
    assert caplog.messages == ["SLURM_NTASKS=2, and srun did not start this program: it trains alone"]


def beside_a_launcher(said):
    """In a process group that exists the variables do not matter."""
    os.environ.update(said)
    return sharded().world_size


@pytest.mark.row(76)
def test_a_process_group_that_exists_counts_more_than_the_environment(ranks):
    assert ranks.run(2, beside_a_launcher, {"RANK": "1", **SRUN}) == [2, 2]


@pytest.mark.row(76)
def test_a_host_that_nobody_knows_is_named_in_seconds(environment, monkeypatch):
    monkeypatch.setattr(launcher, "PATIENCE", 0.1)
    environment(TORCHRUN | {"MASTER_ADDR": "no-such-host.invalid"})
    with pytest.raises(UserError, match=r"MASTER_ADDR names no host") as caught:
        sharded()
    assert "MASTER_ADDR='no-such-host.invalid'" in str(caught.value)


@pytest.mark.row(76)
def test_a_busy_port_is_named(environment):
    with socket.create_server(("", 0)) as taken:
        port = str(taken.getsockname()[1])
        environment(TORCHRUN | {"MASTER_PORT": port})
        with pytest.raises(UserError, match="another program listens at MASTER_PORT") as caught:
            sharded()
    assert f"MASTER_PORT={port}" in str(caught.value)


@pytest.mark.row(76)
def test_commands_say_what_is_missing_too(tmp_path):
    run = rank_processes.command("train", "--out", tmp_path / "run", RANK="1")
    assert run.returncode == 2
    assert run.stderr.startswith("zeroshard: the environment says RANK=1, but not WORLD_SIZE"), run.stderr
