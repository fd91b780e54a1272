"""Warm rank processes: `ranks.run(world, fn, *args)` calls `fn` on every rank and returns what each returned.

    pytest --socket--> nursery (torch imported, one thread) --fork--> worker 0, worker 1, ...   (one per rank)
                                                            --fork--> python -m zeroshard ...   (`ranks.command`)

The nursery pays for the imports once; a fork takes some milliseconds. Workers are forked when first needed, and the next
run reuses them, whatever its world size. A run that fails in any way costs its workers: they are killed and forked
anew, so nothing of a broken run can leak into the next test. The nursery ends when its socket to pytest does (however pytest
ended) and kills its workers by pid; each worker also asks the kernel to die with the nursery.

Rejected: `torch.multiprocessing.spawn` per test and restarting workers from scratch after a failure (4 s each); one
process group kept per world size (a test's subgroups would pile up; a fresh group costs some twenty milliseconds).
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import functools
import gc
import json
import os
import pickle
import random
import resource
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

GROUP_TIMEOUT = 20.0  # seconds a collective waits for its peers
RUN_TIMEOUT = 60.0  # seconds before a run counts as hung
PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
GRACE = 3.0  # seconds the other ranks get to end by themselves after one failed


class Raised(NamedTuple):
    """How one rank failed. `type` is the exception's class name, or Died (the process ended) or Hung (it never did)."""

    type: str
    message: str
    traceback: str = ""
    bases: tuple[str, ...] = ()  # the class names of the exception's whole tree, itself included

    def isa(self, name: str) -> bool:
        return name in self.bases


class RankFailure(AssertionError):
    """Raised in the test when any rank failed; `.outcomes[rank]` is a `Raised` or the value that the rank returned."""

    def __init__(self, headline: str, outcomes: list[Any]) -> None:
        super().__init__(headline)
        self.outcomes = outcomes

    @property
    def failures(self) -> dict[int, Raised]:
        return {rank: outcome for rank, outcome in enumerate(self.outcomes) if isinstance(outcome, Raised)}

    def __str__(self) -> str:
        parts = [self.args[0]]
        for rank, outcome in enumerate(self.outcomes):
            if isinstance(outcome, Raised):
                parts.append(f"---- rank {rank}: {outcome.type}: {outcome.message}\n{outcome.traceback}".rstrip())
            else:
                parts.append(f"---- rank {rank}: returned")
        return "\n".join(parts)


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


# ---------------------------------------------------------------------------------------------- in the test's process


def run(
    world: int,
    fn: Callable[..., Any],
    *args: Any,
    group: bool | str = True,
    backend: str = "gloo",
    group_timeout: float = GROUP_TIMEOUT,
    timeout: float = RUN_TIMEOUT,
    expect_errors: bool = False,
    **kwargs: Any,
) -> list[Any]:
    """Call the module-level function `fn(*args, **kwargs)` on ranks 0..world-1 and return their values in rank order.

    group: True makes a default process group first; False makes none; "env" makes none and sets the environment
        that torchrun would (RANK, WORLD_SIZE, MASTER_ADDR, ...), for code that initialises the group itself.
    expect_errors: a rank that raised or died has a `Raised` record in the list instead of failing the test. The other
        ranks then get the whole `timeout` to notice. A hang fails the test in any case.

    Bind arguments of fn that are named like these with functools.partial.
    """
    __tracebackhide__ = True
    name = getattr(fn, "__name__", repr(fn))
    call = pickle.dumps((fn, args, kwargs))  # by reference: fn must be reachable as module.name
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
        if not failed:  # every rank has returned, so none can leave another alone in a collective
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
    if failed:
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


def command(
    *words: object, timeout: float = RUN_TIMEOUT, cwd: str | os.PathLike[str] | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """What `python -m zeroshard *words` prints and exits with, as a process of its own that need not import torch.

    environment: variables beside pytest's own; those that say who is which rank are left out unless given here. The
    ranks that the command itself starts are cold, as a user's are.
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
        self._socket.settimeout(180)
        environment = {name: value for name, value in os.environ.items() if name not in PLACE} | {
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "RES_OPTIONS": "timeout:1",
        }
        here = os.path.dirname(os.path.abspath(__file__))
        path = [here, *(entry for entry in sys.path if entry != here)]
        code = (
            f"import sys; sys.path[:] = {path!r}; import ranks; ranks._nursery({theirs.fileno()}, {self._files.name!r})"
        )
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        self._nursery = subprocess.Popen(
            [sys.executable, *flags, "-c", code],
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


# ---------------------------------------------------------------------------------------------------- in the nursery


def _nursery(fd: int, files: str) -> None:
    """Import what every rank needs, then fork and reap workers on request until the socket to pytest closes."""
    parent = os.getppid()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    import hypothesis  # noqa: F401
    import numpy  # noqa: F401
    import torch
    import torch._dynamo  # the first optimizer step imports it
    import torch.distributed
    import torch.utils.checkpoint

    import models  # noqa: F401
    import zeroshard

    for name in zeroshard.__all__:  # each imports its module
        getattr(zeroshard, name)
    torch.set_num_threads(1)
    _rewrite_asserts()
    gc.collect()
    gc.freeze()  # collecting in a worker then walks only what its test made
    sock = socket.socket(fileno=fd)
    children: set[int] = set()
    with suppress(OSError):  # pytest went away between a question and its answer
        while os.getppid() == parent:
            if not select.select([sock], [], [], 1.0)[0]:
                continue
            message, fds, _, _ = socket.recv_fds(sock, 4096, 2)
            if not message:
                break
            request = json.loads(message)
            if request["verb"] == "fork":
                answer = _fork_worker(sock, fds)
                children.add(answer)
            elif request["verb"] == "command":
                answer = _fork_command(sock, request["files"])
                children.add(answer)
            else:
                answer = _reap(request["pid"], request["patience"])
                children.discard(request["pid"])
            sock.send(str(answer).encode())
    for pid in children:
        _reap(pid, 0.0)
    shutil.rmtree(files, ignore_errors=True)  # pytest does it too, unless it was killed
    os._exit(0)


def _fork_worker(sock: socket.socket, fds: list[int]) -> int:
    nursery, pid = os.getpid(), os.fork()
    if pid == 0:
        try:
            sock.close()
            _lead_a_group(nursery)
            _worker(*fds)
        finally:
            os._exit(70)  # never on into the nursery's loop
    with suppress(OSError):
        os.setpgid(pid, pid)
    for passed in fds:
        os.close(passed)
    return pid


def _fork_command(sock: socket.socket, files: list[str]) -> int:
    nursery, pid = os.getpid(), os.fork()
    if pid == 0:
        try:
            sock.close()
            _lead_a_group(nursery)
            _command(*files)
        finally:
            os._exit(70)
    with suppress(OSError):
        os.setpgid(pid, pid)
    return pid


def _command(call: str, out: str, error: str) -> None:
    """What Python does with `-m zeroshard`, imports apart."""
    for fd, path in enumerate((os.devnull, out, error)):
        os.dup2(os.open(path, os.O_CREAT | os.O_RDWR | os.O_APPEND, 0o600), fd)
    asked = json.loads(Path(call).read_text())
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.chdir(asked["cwd"])
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", buffering=1, closefd=False)
    sys.path[0] = asked["cwd"]  # in place of the tests' folder
    sys.argv = ["zeroshard", *asked["words"]]
    code: Any = 1
    try:
        runpy.run_module("zeroshard", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


def _lead_a_group(nursery: int) -> None:
    os.setpgid(0, 0)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: go when the nursery goes
    if os.getppid() != nursery:  # it went before that was said
        os._exit(70)


def _reap(pid: int, patience: float) -> int:
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # a worker leads a group of its own, so its children go too
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _rewrite_asserts() -> None:
    """Let a plain `assert a == b` inside a rank's function show a and b, as it does in the test itself."""
    with suppress(Exception):  # private parts of pytest; without them a bare AssertionError is all one sees
        from _pytest.assertion import install_importhook
        from _pytest.config import get_config

        install_importhook(get_config())


# ----------------------------------------------------------------------------------------------------- in the workers

_place = (0, 1)


def rank() -> int:
    """The rank this function runs on, with or without a process group."""
    return _place[0]


def world() -> int:
    """The number of ranks of the current run."""
    return _place[1]


def _worker(fd: int, log_fd: int) -> None:
    """A rank: take a call, answer it, clean up, for as long as the test's process lives."""
    os.dup2(log_fd, 1)
    os.dup2(log_fd, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(2)  # a segmentation fault leaves its stack in the log
    faulthandler.register(signal.SIGUSR1, 2, all_threads=True)  # works while the interpreter is stuck in C++
    connection = Connection(fd)
    environment = dict(os.environ)
    _reset()
    try:
        while True:
            job, call = pickle.loads(connection.recv_bytes()), connection.recv_bytes()
            answer = _answer(job, call)
            connection.send_bytes(answer)
            if connection.recv_bytes() == b"close":
                connection.send_bytes(_close(environment))
    except (EOFError, OSError):
        os._exit(0)


def _report(error: BaseException) -> dict[str, Any]:
    return {
        "type": type(error).__name__,
        "message": str(error),
        "traceback": traceback.format_exc(),
        "bases": tuple(cls.__name__ for cls in type(error).__mro__),
    }


def _answer(job: dict[str, Any], call: bytes) -> bytes:
    global _place
    _place = (job["rank"], job["world"])
    try:
        os.chdir(job["cwd"])
        sys.path[:] = job["path"]
        for hook in sys.meta_path:
            if hasattr(hook, "_must_rewrite"):  # pytest's; mark_rewrite() would warn about what is imported already
                hook._must_rewrite.add(job["module"])
                hook._marked_for_rewrite_cache.clear()
        _open(job)
        fn, args, kwargs = pickle.loads(call)
        return pickle.dumps(("value", pickle.dumps(fn(*args, **kwargs))))
    except BaseException as error:  # SystemExit and pytest's outcomes are answers too
        return pickle.dumps(("error", _report(error)))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _open(job: dict[str, Any]) -> None:
    import torch.distributed as dist

    rank, world, (path, port) = job["rank"], job["world"], job["store"]
    if job["group"] == "env":  # as torchrun does, its agent's store included
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world), GROUP_RANK="0",
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="ranks",
            TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0",
        )  # fmt: skip
    elif job["group"]:
        limit = timedelta(seconds=job["group_timeout"])
        store = dist.FileStore(path, world)  # the last rank to drop it deletes the file
        dist.init_process_group(job["backend"], store=store, rank=rank, world_size=world, timeout=limit)


def _close(environment: dict[str, str]) -> bytes:
    """End the run's process group (all ranks have returned) and forget what the run left behind."""
    import torch.distributed as dist

    try:
        gc.collect()  # an engine that owns subgroups goes before the default group does
        if dist.is_initialized():
            dist.barrier()  # the slowest rank's last bytes are through: leaving a gloo group early aborts the others
            dist.destroy_process_group()
        os.environ.clear()
        os.environ.update(environment)
        _reset()
        return pickle.dumps(("value", b""))
    except BaseException as error:
        return pickle.dumps(("error", _report(error)))


def _reset() -> None:
    """Every run starts from the same global state."""
    reset_global_state()
    for number in (signal.SIGTERM, signal.SIGHUP):  # under nohup a process inherits that it ignores one
        signal.signal(number, signal.SIG_DFL)
    if "models" in sys.modules:
        sys.modules["models"].reset()
    gc.collect()
    gc.freeze()  # modules that the run was the first to import


def reset_global_state(seed: int = 0) -> None:
    """Seeds, default dtype and device, determinism, threads, grad mode: as a fresh process with one thread has them."""
    import numpy
    import torch

    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_num_threads(1)
    torch.set_grad_enabled(True)
    torch.set_anomaly_enabled(False)
    torch.set_flush_denormal(False)
    torch.set_float32_matmul_precision("highest")
    torch.use_deterministic_algorithms(False)
    torch.set_deterministic_debug_mode(0)
