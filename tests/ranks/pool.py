"""In pytest's process: calls of functions on ranks, and the nursery and workers that serve them."""

from __future__ import annotations

import atexit
import functools
import json
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from zeroshard.testing.failures import Raised, RankFailure

GROUP_TIMEOUT = 20.0  # seconds a collective waits for its peers
RUN_TIMEOUT = 60.0  # seconds before a run counts as hung
PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
GRACE = 3.0  # seconds the other ranks get to end by themselves after one failed
instead: Callable[..., list[Any] | None] | None = None  # runs what it can in place of processes: pytest's --worlds


def run(
    world: int,
    fn: Callable[..., Any],
    *args: Any,
    group: bool | str = True,
    backend: str = "gloo",
    group_timeout: float = GROUP_TIMEOUT,
    timeout: float = RUN_TIMEOUT,
    expect_errors: bool = False,
    spent: bool = False,
    **kwargs: Any,
) -> list[Any]:
    """Call the module-level function `fn(*args, **kwargs)` on ranks 0..world-1 and return their values in rank order.

    group: True makes a default process group first; False makes none; "env" makes none and sets the environment
        that torchrun would (RANK, WORLD_SIZE, MASTER_ADDR, ...), for code that initialises the group itself.
    expect_errors: a rank that raised or died has a `Raised` record in the list instead of failing the test. The other
        ranks then get the whole `timeout` to notice. A hang fails the test in any case.
    spent: the function changes its process for good, so the processes begin and end with the run.

    Bind arguments of fn that are named like these with functools.partial.
    """
    __tracebackhide__ = True
    if instead is not None:
        how = {"group": group, "group_timeout": group_timeout, "timeout": timeout, "expect_errors": expect_errors}
        found = instead(world, fn, *args, backend=backend, spent=spent, kwargs=kwargs, **how)
        if found is not None:
            return found
    name = getattr(fn, "__name__", repr(fn))
    call = pickle.dumps((fn, args, kwargs))  # by reference: fn must be reachable as module.name
    workers = _pool.workers(world)
    if spent:  # what ran in them before may have set up torch's threads for the devices that there were
        _pool.discard(workers)
        workers = _pool.workers(world)
    job = {
        "world": world,
        "group": group,
        "backend": backend,
        "group_timeout": group_timeout,
        "store": _pool.store(group),
        "module": getattr(_innermost(fn), "__module__", ""),
        "path": sys.path,
        "cwd": os.getcwd(),
    }
    started = time.monotonic()
    try:
        for rank, worker in enumerate(workers):
            worker.send(pickle.dumps(job | {"rank": rank}), call)
        outcomes = _collect(workers, started + timeout, None if expect_errors else GRACE)
        outputs = [worker.output() for worker in workers]
        failed = any(isinstance(outcome, Raised) for outcome in outcomes)
        if not failed and not spent:  # every rank has returned, so none can leave another alone in a collective
            for worker in workers:
                worker.send(b"close")
            closed = _collect(workers, time.monotonic() + 2 * group_timeout + 5, GRACE)
            if any(isinstance(outcome, Raised) for outcome in closed):
                raise RankFailure(f"{name} returned on {world} rank(s), but ending its process group failed", closed)
    except BaseException:  # Ctrl-C, the test's own time-out, RankFailure: the workers' state is unknown
        _pool.discard(workers)
        raise
    finally:
        with suppress(OSError):
            os.unlink(job["store"][0])
    if failed or spent:
        _pool.discard(workers)
    hung = any(isinstance(outcome, Raised) and outcome.type == "Hung" for outcome in outcomes)
    if failed and (hung or not expect_errors):
        ranks = ", ".join(str(rank) for rank, outcome in enumerate(outcomes) if isinstance(outcome, Raised))
        verb = "hung" if hung else "failed"
        raise RankFailure(
            f"{name} {verb} on rank {ranks} of {world} after {time.monotonic() - started:.1f} s", outcomes
        )
    for rank, output in enumerate(outputs):
        if output:
            print(f"[rank {rank}] {output}")
    return [outcome if isinstance(outcome, Raised) else pickle.loads(outcome) for outcome in outcomes]


def untimed(error: str) -> str:
    """What a command printed on standard error, without the lines of `cli.working`, which come by the clock."""
    return re.sub(r"^ *\d+ s: .*\n", "", error, flags=re.MULTILINE)


def command(
    *words: object, timeout: float = RUN_TIMEOUT, cwd: str | os.PathLike[str] | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """What `python -m zeroshard *words` prints and exits with, as a process of its own that need not import torch.

    environment: variables beside pytest's own; those that say who is which rank are left out unless given here. The
    ranks that the command itself starts are cold, as a user's are. Its standard error is `untimed`.
    """
    inherited = {name: value for name, value in os.environ.items() if name not in PLACE}
    place = {"cwd": os.fspath(cwd or os.getcwd()), "environment": inherited | environment}
    return _pool.command({"words": [str(word) for word in words]} | place, timeout)


def pids(world: int) -> list[int]:
    """The process ids of the workers that the next run on `world` ranks will use (started if they are not yet)."""
    return [worker.pid for worker in _pool.workers(world)]


def shutdown() -> None:
    """End all workers and the nursery. The next run starts new ones."""
    _pool.close()


def alive(pid: int) -> bool:
    """Whether the process runs; one that ended but was not waited for yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    """Wait for it. Raises AssertionError where it does not come about in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not in time: something hangs"
        time.sleep(0.02)


def _innermost(fn: Any) -> Any:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return fn


def _collect(workers: list[_Worker], deadline: float, grace: float | None) -> list[Any]:
    """One answer of every worker: its pickled value, or a Raised. After a failure wait only `grace` seconds more."""
    outcomes: list[Any] = [None] * len(workers)
    pending = {worker.connection: rank for rank, worker in enumerate(workers)}
    reason = "no answer within the time limit"
    while pending:
        ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for connection in ready:
            rank = pending.pop(connection)  # type: ignore[arg-type]
            outcomes[rank] = workers[rank].receive()
            if isinstance(outcomes[rank], Raised) and grace is not None and deadline > time.monotonic() + grace:
                deadline, reason = time.monotonic() + grace, f"still running {grace:.0f} s after rank {rank} failed"
    late = sorted(pending.values())
    for rank in late:
        workers[rank].dump_stacks()
    if late:
        time.sleep(0.3)  # faulthandler writes from the signal handler; a stopped process writes nothing
    for rank in late:
        kind = "Hung" if reason.startswith("no answer") else "Waiting"
        outcomes[rank] = Raised(kind, f"{reason} (pid {workers[rank].pid})", workers[rank].output(), (kind,))
    return outcomes


class _Worker:
    """One rank's process, seen from the test's process."""

    def __init__(self, pid: int, connection: Connection, log: str, pool: _Pool) -> None:
        self.pid, self.connection, self.log, self.pool = pid, connection, log, pool
        self.exit_code: int | None = None  # negative: the signal that killed it

    def send(self, *messages: bytes) -> None:
        if messages != (b"close",):
            with suppress(FileNotFoundError):
                os.truncate(self.log, 0)
        with suppress(BrokenPipeError, ConnectionResetError):  # if it died: receive() finds out how it died
            for message in messages:
                self.connection.send_bytes(message)

    def receive(self) -> bytes | Raised:
        try:
            kind, value = pickle.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            code = self.pool.reap(self, patience=2.0)
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            return Raised(
                "Died", f"the process ended without an answer: {how} (pid {self.pid})", self.output(), ("Died",)
            )
        if kind == "value":
            return value
        output = self.output()
        return Raised(
            value["type"],
            value["message"],
            value["traceback"] + (f"output:\n{output}\n" if output else ""),
            value["bases"],
        )

    def output(self) -> str:
        with suppress(FileNotFoundError), open(self.log, errors="replace") as file:
            return file.read()[-20_000:].strip()
        return ""

    def dump_stacks(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR1)


class _Pool:
    """The nursery and the workers it forked. Everything starts when it is first needed."""

    def __init__(self) -> None:
        self._number = 0
        self._forget()

    def _forget(self) -> None:
        self._nursery: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._server: Any = None
        self._workers: list[_Worker] = []
        self._files: tempfile.TemporaryDirectory[str] | None = None

    def store(self, group: bool | str) -> tuple[str, int]:
        """Where the ranks of one run meet, never that of an earlier run: a file; under "env" the port of a store here.

        A file because each new TCPStore connection asks the name server who 127.0.0.1 is, and where that server drops
        a packet now and then (seen: every 50th) the connection takes 5 s.
        """
        assert self._files is not None
        self._number += 1
        if group == "env":
            from torch.distributed import TCPStore

            self._server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return os.path.join(self._files.name, f"store-{self._number}"), self._server.port if self._server else 0

    def workers(self, world: int) -> list[_Worker]:
        for _ in range(2):
            try:
                return self._living(world)
            except (OSError, EOFError) as error:  # the nursery died under us
                self.close()
                reason = error
        raise reason

    def _living(self, world: int) -> list[_Worker]:
        if self._nursery is None or self._nursery.poll() is not None:
            self.close()
            self._start()
        for worker in self._workers[:world]:
            if worker.exit_code is None and worker.connection.poll():  # an idle worker says nothing: it has died
                self.reap(worker, patience=2.0)
        for slot in range(len(self._workers[:world])):
            if self._workers[slot].exit_code is not None:
                self._workers[slot] = self._fork(slot)
        for slot in range(len(self._workers), world):
            self._workers.append(self._fork(slot))
        return self._workers[:world]

    def discard(self, workers: list[_Worker]) -> None:
        for worker in workers:
            self.reap(worker, patience=0.0)
            worker.connection.close()
            with suppress(FileNotFoundError):
                os.unlink(worker.log)

    def reap(self, worker: _Worker, patience: float) -> int:
        """Give the process `patience` seconds to end, kill it and its children if it did not, return its exit code."""
        if worker.exit_code is None:
            try:
                worker.exit_code = self._ask({"verb": "reap", "pid": worker.pid, "patience": patience})
            except (OSError, EOFError):  # the nursery is gone, and the workers with it
                worker.exit_code = -signal.SIGKILL
                self.close()
        return worker.exit_code

    def command(self, call: dict[str, Any], timeout: float) -> subprocess.CompletedProcess[str]:
        """Fork a process for the call, and read what it prints until it has ended."""
        if self._nursery is None or self._nursery.poll() is not None:
            self.close()
            self._start()
        assert self._files is not None
        self._number += 1
        said = [os.path.join(self._files.name, f"command-{self._number}-{name}") for name in ("call", "out", "error")]
        Path(said[0]).write_text(json.dumps(call))
        for path in said[1:]:
            Path(path).touch()
        pid = self._ask({"verb": "command", "files": said})
        code = self._ask({"verb": "reap", "pid": pid, "patience": timeout})
        _, out, error = (Path(path).read_text() for path in said)
        error = untimed(error)
        for path in said:
            os.unlink(path)
        if code == -signal.SIGKILL:
            what = f"zeroshard {' '.join(call['words'])}"
            raise AssertionError(f"{what} was killed, or ran for {timeout:.0f} s\n{out}\n{error}")
        return subprocess.CompletedProcess(call["words"], code, out, error)

    def close(self) -> None:
        nursery, sock = self._nursery, self._socket
        if sock is not None:
            sock.close()
        if nursery is not None:
            with suppress(subprocess.TimeoutExpired):
                nursery.wait(5)
            nursery.kill()
            nursery.wait()
        if self._files is not None:
            self._files.cleanup()
        self._forget()

    def _fork(self, slot: int) -> _Worker:
        assert self._files is not None
        log = os.path.join(self._files.name, f"worker-{slot}-{time.monotonic_ns()}.log")
        log_fd = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        ours, theirs = socket.socketpair()
        try:
            pid = self._ask({"verb": "fork"}, [theirs.fileno(), log_fd])
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(log_fd)
        return _Worker(pid, Connection(ours.detach()), log, self)

    def _start(self) -> None:
        self._files = tempfile.TemporaryDirectory(prefix="zeroshard-ranks-", ignore_cleanup_errors=True)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {name: value for name, value in os.environ.items() if name not in PLACE} | {
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "RES_OPTIONS": "timeout:1",
        }
        here = str(Path(__file__).resolve().parents[1])  # where tests import each other from
        path = [here, *(entry for entry in sys.path if entry != here)]
        serve = f"from ranks import nursery; nursery.serve({theirs.fileno()}, {self._files.name!r})"
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        flags += ["-O"] * bool(os.environ.get("RANKS_OPTIMIZED"))  # without asserts in ranks, while tests keep theirs
        self._nursery = subprocess.Popen(
            [sys.executable, *flags, "-c", f"import sys; sys.path[:] = {path!r}; {serve}"],
            pass_fds=[theirs.fileno()],
            env=environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in the terminal is pytest's to handle
        )
        theirs.close()

    def _ask(self, message: dict[str, Any], fds: list[int] | None = None) -> int:
        if self._socket is None:
            raise EOFError("no nursery")
        try:
            self._socket.settimeout(180 + message.get("patience", 0))
            socket.send_fds(self._socket, [json.dumps(message).encode()], fds or [])
            answer = self._socket.recv(100)
        except (
            BaseException
        ):  # a test's time-out or Ctrl-C too: the answer would be taken for that of the next question
            self.close()
            raise
        if not answer:
            raise EOFError("the nursery of the rank processes ended")
        return int(answer)


_pool = _Pool()
atexit.register(_pool.close)
