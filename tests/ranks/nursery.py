"""The process that has imported what every rank needs: it forks and reaps on request, until its socket to pytest closes."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import runpy
import select
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from . import worker


def serve(fd: int, files: str) -> None:
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

    for name in zeroshard.__all__:  # each imports its module, if it is there: see test_rings
        with suppress(AttributeError):
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
                answer = _fork(sock, worker.serve, *fds)
                children.add(answer)
                for passed in fds:
                    os.close(passed)
            elif request["verb"] == "command":
                answer = _fork(sock, _command, *request["files"])
                children.add(answer)
            else:
                answer = _reap(request["pid"], request["patience"])
                children.discard(request["pid"])
            sock.send(str(answer).encode())
    for pid in children:
        _reap(pid, 0.0)
    shutil.rmtree(files, ignore_errors=True)  # pytest does it too, unless it was killed
    os._exit(0)


def _fork(sock: socket.socket, serve: Callable[..., None], *args: Any) -> int:
    """Call `serve(*args)` in a child that leads a process group of its own, and never on into the nursery's loop."""
    nursery, pid = os.getpid(), os.fork()
    if pid == 0:
        try:
            sock.close()
            _lead_a_group(nursery)
            serve(*args)
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
