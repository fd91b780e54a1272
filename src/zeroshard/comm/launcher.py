"""The environment variables by which a launcher tells a process its ranks, and errors for incomplete ones.

    WORLD_SIZE, RANK, MASTER_ADDR, MASTER_PORT    torchrun's, or set by hand: one of several ranks; nothing else counts
    WORLD_SIZE=1                                  one rank, whatever started it
    none of them, but SLURM's or mpirun's         an error: several processes that would each train alone
    none at all                                   one rank

A rank that wrongly takes itself for the only one trains alone and says nothing, so whatever is partial or contradictory
is an error.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping

from ..errors import UserError

RESOLVES = 10.0  # seconds for a name server to learn of MASTER_ADDR: hosts of one job may come up in any order

# Variables that say how many processes the launcher has started, and which of them this is. A second launcher inside
# the first (`srun torchrun`) sets WORLD_SIZE.
_LAUNCHERS = (
    ("srun", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"), "SLURM_PROCID"),
    ("mpirun (Open MPI)", ("OMPI_COMM_WORLD_SIZE",), "OMPI_COMM_WORLD_RANK"),
    ("mpiexec (PMI)", ("PMI_SIZE",), "PMI_RANK"),
    ("mpirun (MVAPICH)", ("MV2_COMM_WORLD_SIZE",), "MV2_COMM_WORLD_RANK"),
)
_ALL_OF_THEM = "torchrun --nproc-per-node ... program.py, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
_ALONE = "unset it, or set WORLD_SIZE=1 where this process is to train alone"


def ranks_to_join(environment: Mapping[str, str]) -> int:
    """Return the number of ranks that this process was started as one of. Raises `UserError` for partial settings."""
    said = {name: value for name, value in environment.items() if value}
    if "WORLD_SIZE" not in said:
        _refuse_part_of_a_world(said)
        return 1
    ranks = _number(said, "WORLD_SIZE", 1, None)
    if "RANK" in said:
        _number(said, "RANK", 0, ranks - 1)
    if ranks > 1:
        missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in said]
        if missing:
            raise UserError(
                f"the environment says WORLD_SIZE={ranks}, but not {' and '.join(missing)}",
                expected="all of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or none",
                instead=f"{_ALL_OF_THEM}; unset WORLD_SIZE where this process is to train alone",
            )
        _number(said, "MASTER_PORT", 1, 65535)
    return ranks


def _refuse_part_of_a_world(said: Mapping[str, str]) -> None:
    for name in ("RANK", "LOCAL_RANK"):
        if said.get(name, "0") != "0" or (name == "RANK" and name in said):
            raise UserError(
                f"the environment says {name}={said[name]}, but not WORLD_SIZE: this rank would train alone",
                expected="all of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or none",
                instead=f"{_ALL_OF_THEM}; or {_ALONE}",
            )
    if said.get("LOCAL_WORLD_SIZE", "1") != "1":
        raise UserError(
            f"the environment says LOCAL_WORLD_SIZE={said['LOCAL_WORLD_SIZE']}, but not WORLD_SIZE: "
            "this rank would train alone",
            expected="all of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or none",
            instead=f"{_ALL_OF_THEM}; or {_ALONE}",
        )
    for launcher, counts, own in _LAUNCHERS:
        count = next((name for name in counts if name in said), None)
        if count is None or said[count] == "1":
            continue
        # salloc and sbatch say how many tasks there is room for, and srun which of them this is.
        started = own in said and (launcher != "srun" or "SLURM_STEP_ID" in said)
        raise UserError(
            f"{launcher} has started {said[count]} processes, and nothing tells them of each other: "
            "each would train alone"
            if started
            else f"{count} says that there are {said[count]} tasks, and this process is none of them: "
            "it would train alone",
            where=f"{own}={said[own]}" if own in said else None,
            expected="RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in the environment",
            got=f"{count}={said[count]}",
            instead=f"torchrun once on each node (docs/clusters.md); or RANK=${own} WORLD_SIZE=${count} and a "
            "MASTER_ADDR and MASTER_PORT for each process; or WORLD_SIZE=1 where each is a run of its own",
        )


def _number(said: Mapping[str, str], name: str, least: int, most: int | None) -> int:
    text = said[name].strip()
    number = int(text) if text.isdecimal() and text.isascii() and len(text) < 10 else -1
    if number < least or (most is not None and number > most):
        bounds = f"a whole number from {least}" + ("" if most is None else f" to {most}")
        world = f" (WORLD_SIZE={said['WORLD_SIZE']})" if name == "RANK" else ""
        raise UserError(
            f"{name} in the environment is no such number",
            expected=bounds + world,
            got=f"{name}={said[name]!r}",
            instead=_ALL_OF_THEM,
        )
    return number


def find_master(environment: Mapping[str, str]) -> None:
    """Raise `UserError` if no name server knows MASTER_ADDR: connecting would be tried until the group's time-out."""
    host, deadline = environment["MASTER_ADDR"], time.monotonic() + RESOLVES
    while True:
        try:
            socket.getaddrinfo(host, None)
            return
        except (OSError, UnicodeError) as error:
            if time.monotonic() > deadline:
                raise UserError(
                    "MASTER_ADDR names no host that can be found",
                    where=f"rank {environment['RANK']}",
                    got=f"MASTER_ADDR={host!r}: {error}",
                    instead="the name or address of the host of rank 0, as this host knows it",
                ) from None
            time.sleep(0.5)


def could_not_meet(environment: Mapping[str, str], error: Exception) -> UserError:
    """Make the error for a process group that could not be made, with what to do about it."""
    said = str(error).splitlines()[0] if str(error) else type(error).__name__
    rank, host, port = (environment[name] for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"))
    if "EADDRINUSE" in said or "address already in use" in said.lower():
        return UserError(
            "another program listens at MASTER_PORT, where the ranks are to meet",
            where=f"rank {rank}",
            got=f"MASTER_PORT={port}: {said}",
            instead="a free port, the same on every rank; torchrun --standalone finds one",
        )
    instead = "see that rank 0 runs at MASTER_ADDR, that MASTER_PORT can be reached, and GLOO_SOCKET_IFNAME"
    if "too many open files" in said.lower():
        instead = "ulimit -n 65536 before the program starts: every rank holds connections to every other"
    elif "NCCL" in said:  # NCCL says no more of two ranks on one device
        instead = "start one process for each GPU: torchrun --nproc-per-node gpu; NCCL_DEBUG=WARN says what it refuses"
    elif environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and environment["TORCHELASTIC_MAX_RESTARTS"] != "0":
        instead += (
            "; and torchrun itself with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: ranks that start again find in its "
            "store where those before them were"
        )
    return UserError(
        "the ranks could not meet",
        where=f"rank {rank} of {environment['WORLD_SIZE']}, MASTER_ADDR={host} MASTER_PORT={port}",
        got=said,
        instead=instead,
    )
