"""A rank: it takes a call, answers it, cleans up, and waits for the next one."""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import random
import signal
import sys
import threading
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

_place = (0, 1)
_thread = threading.local()  # where ranks are threads, each has its place here


def rank() -> int:
    """The rank this function runs on, with or without a process group."""
    return getattr(_thread, "place", _place)[0]


def world() -> int:
    """The number of ranks of the current run."""
    return getattr(_thread, "place", _place)[1]


def sit(rank: int, world: int) -> None:
    """This thread is a rank from now on."""
    _thread.place = rank, world


def serve(fd: int, log_fd: int) -> None:
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
    """Every run starts from the same global state, and exchanges messages where it does not say how."""
    from zeroshard.policies import comm

    reset_global_state()
    comm.AUTO = "gloo"
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
