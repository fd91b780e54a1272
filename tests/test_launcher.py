"""What the environment says of a launch: all of it, or an error that names what is missing. And ranks that never come."""

from __future__ import annotations

import itertools
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref

import pytest
import torch
from torch import nn

import ranks as rank_processes
import zeroshard
from zeroshard import Comm
from zeroshard.comm import groups, launcher, watch
from zeroshard.comm.launcher import ranks_to_join
from zeroshard.errors import PeerError, UserError

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
    "the shell of salloc": (SHELL, "this process is none of them", "WORLD_SIZE=1 where"),
    "the script of sbatch": (SHELL | {"SLURM_PROCID": "0"}, "this process is none of them", "torchrun once on each node"),
    "SLURM_NTASKS alone": ({"SLURM_NTASKS": "2"}, "SLURM_NTASKS says that there are 2 tasks", "WORLD_SIZE=1 where"),
    "Open MPI's count alone": ({"OMPI_COMM_WORLD_SIZE": "2"}, "this process is none of them", "WORLD_SIZE=1 where"),
    "a local world alone": ({"LOCAL_WORLD_SIZE": "4"}, "LOCAL_WORLD_SIZE=4, but not WORLD_SIZE", "torchrun"),
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
    "the shell of salloc, alone": (SHELL | {"WORLD_SIZE": "1"}, 1),
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


def beside_a_launcher(said):
    """In a process group that exists the variables do not matter."""
    os.environ.update(said)
    return sharded().world_size


@pytest.mark.row(76)
def test_a_process_group_that_exists_counts_more_than_the_environment(ranks):
    assert ranks.run(2, beside_a_launcher, {"RANK": "1", **SRUN}) == [2, 2]


@pytest.mark.row(76)
def test_a_host_that_nobody_knows_is_named_in_seconds(environment, monkeypatch):
    monkeypatch.setattr(launcher, "RESOLVES", 0.1)
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


def test_ranks_that_torchrun_started_again_are_told_where_they_met_before():
    again = TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "3"}
    refused = RuntimeError("Gloo connectFullMesh failed: Connection refused")
    assert "torchrun itself with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in str(launcher.could_not_meet(again, refused))
    once = again | {"TORCHELASTIC_MAX_RESTARTS": "0"}
    assert "SHARE_RDZV" not in str(launcher.could_not_meet(once, refused))


def test_two_ranks_on_one_gpu_are_told_what_to_start():
    """NCCL says no more of them than that its usage is invalid."""
    refused = RuntimeError("NCCL error in: NCCLUtils.cpp:93, invalid usage (run with NCCL_DEBUG=WARN for details)")
    told = launcher.could_not_meet(TORCHRUN, refused)
    assert "one process for each GPU: torchrun --nproc-per-node gpu" in str(told) and "MASTER_PORT can" not in str(told)


# --- ranks that never come ------------------------------------------------------------------------------------------------


def left_alone(how: str) -> int:
    """The last rank does not come to `shard`, or not through it."""
    last = rank_processes.rank() == rank_processes.world() - 1
    if last and how == "dies before":
        time.sleep(0.5)  # the others may still be connecting to it in `init_process_group`, which is not ours
        os._exit(1)
    if last and how == "dies later":
        time.sleep(1.5)
        os.kill(os.getpid(), signal.SIGKILL)
    if last and how == "dies inside":
        groups._new_group = lambda **_: os._exit(1)
    if last and how == "raises inside":

        def fail(**_):
            raise RuntimeError("Too many open files")

        groups._new_group = fail
    return sharded().world_size


@pytest.mark.row(77)
@pytest.mark.parametrize("world", [2, 3], ids=lambda world: f"ranks{world}")
@pytest.mark.parametrize("how", ["dies before", "dies later", "dies inside", "raises inside"])
def test_a_rank_lost_on_its_way_through_shard_is_named(ranks, how, world):
    """By all others, long before the time-out: by those too that wait for somebody alive."""
    outcomes = ranks.run(world, left_alone, how, group_timeout=100.0, timeout=30.0, expect_errors=True)
    said = "gave up: Too many open files" if how == "raises inside" else "is gone: its process has ended"
    if how == "dies before":  # on a busy machine also before another one has come
        said = f"({said}|has not come to shard\\(...\\), and one that has not has ended)"
    for outcome in outcomes[:-1]:
        assert outcome.type == "PeerError", outcome
        assert re.search(f"the ranks could not come together: .*rank {world - 1} {said}", outcome.message), (
            outcome.message
        )


def late(seconds: float):
    if rank_processes.rank() == 1:
        time.sleep(seconds)
        return
    torch.manual_seed(0)
    zeroshard.shard(nn.Linear(4, 4), None, comm=Comm(timeout=1.0))


@pytest.mark.row(77)
def test_a_rank_that_does_not_come_in_time_is_named(ranks):
    """It may live: then all that can be said is that it did not come."""
    outcomes = ranks.run(2, late, 4.0, timeout=30.0, expect_errors=True)
    assert outcomes[0].type == "PeerError" and outcomes[1] is None
    assert "the ranks could not come together: rank 1 has not come to shard(...)" in outcomes[0].message


def with_descriptors(spare: int) -> str:
    """`shard` where rank 0 is left so many descriptors more than needed, and once more with as many as it likes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = groups.DESCRIPTORS + 3 * (rank_processes.world() + 3)
    if rank_processes.rank() == 0:
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + needed + spare, hard))
    try:
        zero = sharded()
        zero.model(torch.ones(2, 4)).sum().backward()
        return "trained"
    except (UserError, PeerError) as error:
        said = error
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert sharded().world_size == rank_processes.world()
    return f"{type(said).__name__}: {said}"


@pytest.mark.row(77)
@pytest.mark.parametrize("world", [2, 3], ids=lambda world: f"ranks{world}")
def test_too_few_descriptors_are_counted_before_any_is_taken(ranks, world):
    """One fewer than needed is an error on every rank, with the remedy; as many as needed are enough."""
    assert ranks.run(world, with_descriptors, 0, group_timeout=100.0, timeout=30.0) == ["trained"] * world
    own, *others = ranks.run(world, with_descriptors, -1, group_timeout=100.0, timeout=30.0)
    assert own.startswith("UserError: too few file descriptors") and "ulimit -n" in own
    for told in others:
        assert told.startswith(
            "PeerError: another rank cannot shard its model\n  got: rank 0: too few file descriptors"
        )


def not_heard_at_once(unheard: int) -> int:
    """Rank 1 takes its time, and the first answers that rank 0 asks it for are lost on their way."""
    if rank_processes.rank() == 1:
        new_group = groups._new_group

        def slowly(**options):
            time.sleep(1.5)
            return new_group(**options)

        groups._new_group = slowly
    else:
        ask, asked = watch._ask, itertools.count()

        def asking(places, message):
            answers = ask(places, message)
            return {rank: watch.Answer(watch.SILENT) for rank in answers} if next(asked) < unheard else answers

        watch._ask = asking
    return sharded().world_size


@pytest.mark.row(77)
@pytest.mark.full
def test_one_answer_that_is_lost_on_its_way_through_shard_is_no_lost_rank(ranks):
    assert ranks.run(2, not_heard_at_once, 2, timeout=60.0) == [2, 2]


STOPS = """
import os, signal, sys, torch, zeroshard
from zeroshard.comm import groups
if os.environ["RANK"] == "1":
    groups._new_group = lambda **_: os.kill(os.getpid(), signal.SIGSTOP)
model = torch.nn.Linear(4, 4)
try:
    zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3, comm=zeroshard.Comm(timeout=600))
except zeroshard.Error as error:
    print(error)
    sys.exit(3)
"""


@pytest.mark.row(77)
@pytest.mark.slow
def test_a_rank_that_stops_on_its_way_through_shard_is_named_and_the_other_ends(tmp_path):
    """With its own exit code and long before the time-out, though a thread of its still waits in torch."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    place = TORCHRUN | {"MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    log, both = tmp_path / "log", []
    with log.open("w") as output:
        for rank in range(2):
            environment = os.environ | place | {"RANK": f"{rank}"}
            both.append(subprocess.Popen([sys.executable, "-c", STOPS], env=environment, stdout=output, stderr=output))
    try:
        both[0].wait(120)
    finally:
        for process in both:
            process.kill()
            process.wait()
    assert both[0].returncode == 3
    assert "rank 1 is silent" in log.read_text()


# --- ranks that wait for others who do not come, and leave when others have left ----------------------------------------


@pytest.mark.row(77)
def test_who_waits_in_shard_says_for_whom_and_how_long(monkeypatch, caplog):
    monkeypatch.setattr(watch, "PATIENCE", 0.1)
    own, store = watch.Watch(0, "127.0.0.1", dict), torch.distributed.HashStore()
    store.set("place/2", json.dumps([["127.0.0.1", 1, ""], ""]))
    with pytest.raises(PeerError) as caught:
        watch.come_together(own, store, "place", 4, lambda: False, 0.4)
    own.close()
    assert [record.getMessage() for record in caplog.records] == [
        "rank 0 waits in shard(...) for ranks [1, 3], 0.4 s at most (Comm(timeout=...)): they have not come to it"
    ]
    assert "rank 2 is gone" in str(caught.value) and "End a rank that has not come" in str(caught.value)


class Counting:
    """A store that counts the keys that are asked for and read."""

    def __init__(self, store):
        self.store, self.asked, self.read = store, 0, 0

    def __getattr__(self, name):
        return getattr(self.store, name)

    def check(self, keys):
        self.asked = max(self.asked, len(keys))
        return self.store.check(keys)

    def get(self, key):
        self.read += 1
        return self.store.get(key)


def test_many_ranks_come_together_by_one_text():
    """The last to come reads what each has set, and writes it as one; the others ask for one key and read one."""
    ranks, store = 48, torch.distributed.HashStore()
    seen = [Counting(store) for _ in range(ranks)]
    watches = [watch.Watch(rank, "127.0.0.1", dict) for rank in range(ranks)]
    came = [
        threading.Thread(target=watch.come_together, args=(own, each, "place", ranks, lambda: False, 30.0))
        for own, each in zip(watches, seen, strict=True)
    ]
    for thread in came:
        thread.start()
    for thread in came:
        thread.join()
    addresses = {rank: own.address for rank, own in enumerate(watches)}
    assert all(own.peers == addresses for own in watches)
    assert sorted(each.read for each in seen) == [1] * (ranks - 1) + [ranks + 1]
    assert {each.asked for each in seen} == {1}
    for own in watches:
        own.close()


@pytest.mark.row(77)
def test_who_waits_for_the_process_group_says_so(monkeypatch, caplog):
    """Nobody can be asked there. Once it is made, nothing is said."""
    made, told = threading.Event(), threading.Event()
    monkeypatch.setattr(groups, "PATIENCE", 0.05)
    monkeypatch.setattr(groups, "find_master", lambda environment: None)
    monkeypatch.setattr(groups.atexit, "register", lambda finish: made.set())
    monkeypatch.setattr(groups.log, "warning", lambda *said: (caplog.records.append(said), told.set()))
    for name, value in (("RANK", "3"), ("WORLD_SIZE", "8")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(groups.dist, "init_process_group", lambda *_, **__: told.wait(30))
    groups.start(zeroshard.Comm(timeout=7.0), torch.device("cpu"))
    (said,) = caplog.records
    assert made.is_set() and (said[0] % said[1:]).startswith(
        "rank 3 of 8 waits for the others in torch.distributed.init_process_group, 7 s at most (Comm(timeout=...))"
    )
    monkeypatch.setattr(groups, "PATIENCE", 1e6)
    monkeypatch.setattr(groups.dist, "init_process_group", lambda *_, **__: None)
    before = threading.active_count()
    groups.start(zeroshard.Comm(), torch.device("cpu"))
    assert len(caplog.records) == 1
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.join(30)
    assert threading.active_count() <= before


def leaves(how: str):
    """Rank 0 comes to its normal end, where rank 1's has come already, by an exception that only rank 0 has caught."""
    groups._made.clear()  # of earlier runs in these processes, which have not ended
    model = nn.Linear(4, 4)
    zero = zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=1)
    own, longest, groups.LEAVING = zero._engine.group._link.groups, groups.LEAVING, 1e6
    if zero.rank == 1:
        if how == "raises":
            sys.last_value = ArithmeticError("only here")
        groups._last_words(weakref.ref(own))
        if how == "killed":
            os._exit(0)
        sys.__dict__.pop("last_value", None)
        groups.LEAVING = longest
        return True
    groups._leave_together()
    groups.LEAVING = longest
    return True


@pytest.mark.row(1)
@pytest.mark.parametrize("how", ["raises", "ends", "killed"])
def test_who_ends_waits_for_none_that_has_ended(ranks, how):
    """However that came to its end: it counts itself only where it waits too."""
    outcomes = ranks.run(2, leaves, how, timeout=60.0, expect_errors=True)
    assert outcomes[0] is True, outcomes
