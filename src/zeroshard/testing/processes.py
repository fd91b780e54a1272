"""`ranks(2, processes=True)`: a test's body on ranks that are processes, forked from one that has imported all.

    pytest --socket--> nursery --fork--> rank 0, rank 1, ...   (new ones for each test)

The nursery is forked from pytest's process when all tests are collected and none has run: it has all modules of tests
in memory, and no thread of torch's. It forks the ranks of a test in some milliseconds, waits for them, and answers what
became of each. What a test is given, `pickle` takes there. The nursery ends, and its ranks with it, when its socket to
pytest does, however pytest ended.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import pickle
import random
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import UserError
from .asked import Asked
from .failures import NO_FAILURES, Raised, RankFailure

GRACE = 3.0  # seconds that other ranks have to end by themselves after one failed
STACKS = 0.3  # seconds for the signal handlers that write stacks; a stopped process writes none
PAUSE = 0.005  # seconds between two looks at the ranks
LONGEST = 20_000  # characters of what a rank printed
STOP = b"stop"


class Ran(NamedTuple):
    """The end of a test's body on its ranks. error: what the test raises; says: what is shown beside it."""

    error: BaseException | None
    says: str


class Nursery:
    """The process that forks ranks, seen from pytest's."""

    def __init__(self) -> None:
        if not hasattr(os, "fork"):
            raise UserError("ranks(..., processes=True) forks its ranks", expected="Linux", got=sys.platform)
        ours, theirs = socket.socketpair()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                ours.close()
                _serve(Connection(theirs.detach()))
            finally:
                os._exit(70)
        theirs.close()
        self._connection = Connection(ours.detach())

    def run(self, ranks: int, body: Callable[..., Any], arguments: Mapping[str, Any], asked: Asked) -> Ran:
        """Call `body(**arguments)` on each rank. Raises `UserError` for an argument that no process can be given."""
        call = _pickled(body, arguments)
        job = {
            "ranks": ranks, "timeout": asked.timeout, "group": asked.group, "cwd": os.getcwd(),
            "environment": dict(os.environ), "path": [*sys.path], "filters": [*warnings.filters], "call": call,
        }  # fmt: skip
        try:
            self._connection.send_bytes(pickle.dumps(job))
            outcomes, order, outputs = pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            raise UserError("the process that forks ranks has ended", got=f"pid {self.pid}") from None
        except BaseException:  # Ctrl-C, or a time-out of the test: the ranks go first, then the answer is read
            with suppress(EOFError, OSError):
                self._connection.send_bytes(STOP)
                self._connection.recv_bytes()
            raise
        for rank, output in enumerate(outputs):
            for line in output.splitlines():
                print(f"[rank {rank}] {line}")
        return _ended(outcomes, order)

    def close(self) -> None:
        self._connection.close()
        with suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


def _pickled(body: Callable[..., Any], arguments: Mapping[str, Any]) -> bytes:
    for name, value in arguments.items():
        try:
            pickle.dumps(value)
        except Exception as error:
            raise UserError(
                f"the fixture {name!r} gives ranks what no other process can be given",
                got=f"{type(value).__name__}: {error}",
                expected="what pickle takes, by value or as the function of a module",
                instead="build it inside the test, or leave processes=True out",
            ) from None
    try:
        return pickle.dumps((body, dict(arguments)))
    except Exception as error:
        raise UserError(
            "ranks in processes cannot be given this test", got=str(error),
            expected="a function of a module, or a method of a class that pickle takes",
        ) from None  # fmt: skip


def _ended(outcomes: list[Any], order: list[int]) -> Ran:
    """Judge the ranks. order: in which they ended."""
    ranks, says = len(outcomes), f"on {len(outcomes)} processes"
    failed = [rank for rank in order if isinstance(outcomes[rank], Raised)]
    failed.sort(key=lambda rank: outcomes[rank].type != "Died")  # which others may have noticed first
    if not failed:
        return Ran(None, says)
    first, *others = failed
    kinds = {outcomes[rank].type for rank in failed}
    if len(failed) == ranks and len(kinds) == 1 and kinds < {*NO_FAILURES}:
        return Ran(_outcome(outcomes[first]), says)
    if skips := [rank for rank in failed if outcomes[rank].type in NO_FAILURES]:
        says = f"rank {skips[0]} of {ranks} skips the test, and not all do: {outcomes[skips[0]].message}"
    else:
        says = f"failed on rank {first} of {ranks}" + f", then on {_named(others)}" * bool(others)
        if kinds == {"Hung"}:
            says = f"hung on {_named(failed)} of {ranks}"
    return Ran(RankFailure(says, outcomes), says)


def _named(ranks: list[int]) -> str:
    return f"rank {', '.join(map(str, sorted(ranks)))}"


def _outcome(raised: Raised) -> BaseException:
    import pytest

    try:
        (pytest.skip if raised.type == "Skipped" else pytest.xfail)(raised.message)
    except BaseException as error:
        return error


# --- in the nursery ---------------------------------------------------------------------------------------------------


def _serve(connection: Connection) -> None:
    os.setsid()  # Ctrl-C in the terminal is pytest's to handle
    _into(os.devnull)
    import torch
    import torch._dynamo  # the first step of an optimizer imports it
    import torch.distributed

    from .. import api  # noqa: F401

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # else collecting in a rank would copy all of it
    try:
        while True:
            job = connection.recv_bytes()
            if job == STOP:  # came when the ranks had ended already
                continue
            connection.send_bytes(pickle.dumps(_perform(pickle.loads(job), connection)))
    except (EOFError, OSError):
        os._exit(0)


def _into(path: str) -> None:
    """Let what this process prints go into a file."""
    for fd in (1, 2):
        opened = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        os.dup2(opened, fd)
        os.close(opened)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def _perform(job: dict[str, Any], connection: Connection) -> tuple[list[Any], list[int], list[str]]:
    """Fork the ranks of one test and wait for them; return what became of each, None where it returned, in which order,
    and what each printed."""
    with tempfile.TemporaryDirectory(prefix="zeroshard-ranks-", ignore_cleanup_errors=True) as name:
        folder, pids = Path(name), {}
        job["port"] = _free_port()
        for rank in range(job["ranks"]):
            pids[rank] = _fork(job, rank, folder)
        try:
            outcomes = _watched(job, pids, folder, connection)
        finally:
            for pid in pids.values():  # those that are left
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)
                with suppress(ChildProcessError):
                    os.waitpid(pid, 0)
        outputs = [_printed(folder, rank) for rank in range(job["ranks"])]
    return [outcomes.get(rank) for rank in range(job["ranks"])], [*outcomes], outputs


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _fork(job: dict[str, Any], rank: int, folder: Path) -> int:
    nursery, pid = os.getpid(), os.fork()
    if pid:
        with suppress(OSError):
            os.setpgid(pid, pid)
        return pid
    try:
        os.setpgid(0, 0)
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: go when the nursery goes
        if os.getppid() == nursery:
            _rank(job, rank, folder)
    finally:
        os._exit(70)


def _watched(job: dict[str, Any], pids: dict[int, int], folder: Path, connection: Connection) -> dict[int, Any]:
    """Wait until all ranks have ended, or no longer. `pids` keeps those that have not."""
    deadline, reason = time.monotonic() + job["timeout"], f"no end within {job['timeout']:g} s"
    kind, found = "Hung", dict[int, Any]()
    while pids and time.monotonic() < deadline and not connection.poll(PAUSE):
        ended = {rank: os.waitpid(pid, os.WNOHANG) for rank, pid in pids.items()}
        answered = {rank: path for rank in pids if (path := folder / f"answer-{rank}").exists() and rank not in found}
        for rank, path in sorted(answered.items(), key=lambda each: each[1].stat().st_mtime_ns):
            found[rank] = pickle.loads(path.read_bytes())
        for rank, (done, status) in ended.items():
            if done and rank not in found:
                code = os.waitstatus_to_exitcode(status)
                how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
                message = f"the process ended without an answer: {how} (pid {pids[rank]})"
                found[rank] = Raised("Died", message, _printed(folder, rank), ("Died",))
            if done:
                del pids[rank]
        failed = [rank for rank, each in found.items() if isinstance(each, Raised)]
        if failed and kind == "Hung":
            kind, reason = "Waiting", f"still running {GRACE:g} s after rank {failed[0]} failed"
            deadline = min(deadline, time.monotonic() + GRACE)
    late = {rank: pid for rank, pid in pids.items() if not isinstance(found.get(rank), Raised)}
    for pid in late.values():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
    if late:
        time.sleep(STACKS)
    for rank, pid in late.items():
        if rank in found:  # it has returned, and waits for the others to end
            continue
        found[rank] = Raised(kind, f"{reason} (pid {pid})", _stack(folder / f"stack-{rank}"), (kind,))
    return found


def _stack(path: Path) -> str:
    """Read the stacks that a rank has left, without what lies below the test's own body."""
    kept, below = [], False
    for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
        below = (below and line.startswith("  ")) or f'"{__file__}"' in line
        if not below:
            kept.append(line)
    return "\n".join(kept)


def _printed(folder: Path, rank: int) -> str:
    path = folder / f"printed-{rank}"
    return path.read_text(errors="replace")[-LONGEST:].strip() if path.exists() else ""


# --- on a rank --------------------------------------------------------------------------------------------------------


def _rank(job: dict[str, Any], rank: int, folder: Path) -> None:
    """Run the test's body on this rank and leave its answer; then end, with all others if it returned."""
    _into(str(folder / f"printed-{rank}"))
    faulthandler.enable(2)
    stacks = os.open(folder / f"stack-{rank}", os.O_CREAT | os.O_WRONLY, 0o600)
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)  # also while it is inside C++
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    failed = None
    try:
        _launched(job, rank, folder)
        body, arguments = pickle.loads(job["call"])
        body(**arguments)
    except BaseException as error:  # SystemExit and pytest's outcomes are answers too
        failed = _report(error)
    sys.stdout.flush()
    sys.stderr.flush()
    (folder / f"answer-{rank}.part").write_bytes(pickle.dumps(failed))
    os.replace(folder / f"answer-{rank}.part", folder / f"answer-{rank}")
    if failed is None:
        _close()
    os._exit(0)


def _launched(job: dict[str, Any], rank: int, folder: Path) -> None:
    """Find this process as torchrun starts one, with a process group and random numbers of its own."""
    import numpy
    import torch
    import torch.distributed as dist

    os.environ.clear()
    os.environ.update(
        job["environment"], RANK=f"{rank}", LOCAL_RANK=f"{rank}", WORLD_SIZE=f"{job['ranks']}",
        LOCAL_WORLD_SIZE=f"{job['ranks']}", GROUP_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=f"{job['port']}",
    )  # fmt: skip
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.chdir(job["cwd"])
    sys.path[:] = job["path"]
    warnings.filters = job["filters"]
    warnings.catch_warnings().__enter__()  # which lets `warnings` know that they have changed
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    if job["group"]:
        store = dist.FileStore(str(folder / "store"), job["ranks"])  # type: ignore[attr-defined]
        limit = timedelta(seconds=2 * job["timeout"] + 10)  # the nursery notices first, and has the stacks
        dist.init_process_group("gloo", store=store, rank=rank, world_size=job["ranks"], timeout=limit)


def _close() -> None:
    """Leave the group with all others: a rank that goes early would abort their last messages."""
    import torch.distributed as dist

    gc.collect()  # an engine that owns groups of its own goes before this one
    with suppress(Exception):  # the others have failed, and say so themselves
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()


def _report(error: BaseException) -> Raised:
    shown = error.__traceback__
    while shown is not None and shown.tb_frame.f_code.co_filename == __file__:
        shown = shown.tb_next  # from the test's own lines on
    lines = traceback.format_exception(type(error), error, shown)
    bases = tuple(each.__name__ for each in type(error).__mro__)
    return Raised(type(error).__name__, str(error), "".join(lines), bases)
