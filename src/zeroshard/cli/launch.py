"""The start of local ranks through torch's elastic launcher, and their end.

    zeroshard train --ranks 2            this process: checks the input, then is torch's elastic agent
      ├─ python -m zeroshard train ...   rank 0: the same command under torchrun's environment
      └─ python -m zeroshard train ...   rank 1

A rank cannot tell whether `zeroshard`, `torchrun` or a second machine's `torchrun` started it.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from zeroshard.cli.config import InputError, one_line
from zeroshard.errors import Error

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

FAILED, BAD_INPUT = 1, 2
INTERRUPTED = 130  # 128 + SIGINT, what a shell reports for Ctrl-C
READER_LEFT = 141  # 128 + SIGPIPE, likewise
RANK_NBYTES = 100 << 20  # of memory that no other process shares: an interpreter with torch takes 140 MiB
LAUNCHER = "ZEROSHARD_LAUNCHER_PID"
LINGER = 0.5  # seconds that a rank told to end stays, for its peers to be told too: else they report it as gone
_told = threading.Event()  # this rank was told to end, and another thread is about to end it
# The exception that ended a launch holds the agent, hence its rendezvous. torch does not shut that down after a signal,
# and if its own keep-alive thread drops the last reference, it tries to join itself and Python prints a traceback.
_interruptions: list[BaseException] = []


def _known(*names: str) -> tuple[signal.Signals, ...]:
    return tuple(signal.Signals[name] for name in names if name in signal.Signals.__members__)  # Windows lacks most


HANDLED_BY_AGENT = _known("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1")  # sent on to ranks
PREEMPTING = _known("SIGTERM", "SIGUSR1")  # a rank that trains saves on these, and ends
_noted: set[int] = set()  # signals with handlers that end the rank in their own time


def check_ranks(ranks: int) -> None:
    """Refuse more local processes than this machine can hold, before the first is started."""
    import resource  # where there is one

    memory = memory_of_machine()
    processes, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    limits = {
        f"{memory:,} bytes of memory, and a rank takes at least {RANK_NBYTES:,}": memory // RANK_NBYTES,
        f"{processes:,} processes of one user (ulimit -u)": processes,
    }
    what, most = min(((what, most) for what, most in limits.items() if most > 0), key=lambda each: each[1])
    if ranks > most:
        raise InputError(
            f"--ranks {ranks}: this machine starts at most {most}, of {what}; instead: --ranks {most} or fewer, or "
            f"torchrun on several machines"
        )


def memory_told() -> dict[str, int]:
    """Read this machine's memory as Linux tells it: {name in /proc/meminfo: bytes}."""
    with open("/proc/meminfo", encoding="ascii") as file:
        told = dict(line.split(":") for line in file)
    return {name: int(words.split()[0]) * 1024 for name, words in told.items()}


def memory_of_machine() -> int:
    """Return the bytes of memory and swap, free or not; or what a container may take, where that is less."""
    told = memory_told()
    found = [told["MemTotal"] + told["SwapTotal"]]
    for limit in ("memory.max", "memory/memory.limit_in_bytes"):  # of the two kinds of cgroups
        with suppress(OSError, ValueError):  # the other kind; "max"
            found.append(int(Path("/sys/fs/cgroup", limit).read_text(encoding="ascii")))
    return min(found)


def start_ranks(command: Sequence[str], ranks: int, module: str = "zeroshard") -> int:
    """Run `python -m module *command` on `ranks` local processes; return the exit code of the whole."""
    check_ranks(ranks)
    # One thread per rank unless the user says otherwise: ranks share the cores, and the bits of a matrix product
    # depend on the number of threads.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    with ExitStack() as stack:
        os.environ[LAUNCHER] = str(os.getpid())
        stack.callback(os.environ.pop, LAUNCHER)  # other processes that this one starts have another launcher
        stack.enter_context(_quiet_and_restored())
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            signals_to_handle=",".join(number.name for number in HANDLED_BY_AGENT),
            logs_specs=DefaultLogsSpecs(log_dir=stack.enter_context(tempfile.TemporaryDirectory(prefix="zeroshard-"))),
        )
        try:
            elastic_launch(config, sys.executable)("-m", module, *command)
        except (SignalException, KeyboardInterrupt) as interruption:
            _interruptions.append(interruption)
            return INTERRUPTED
        except ChildFailedError as error:
            return _explain(*error.get_first_failure())
    return 0


def _explain(rank: int, failure: ProcessFailure) -> int:
    if failure.exitcode in (INTERRUPTED, -signal.SIGINT, -signal.SIGTERM):
        return INTERRUPTED
    if failure.exitcode in (BAD_INPUT, READER_LEFT):  # the rank has said what is wrong, or its reader has left
        return failure.exitcode
    how = f"by signal {-failure.exitcode}" if failure.exitcode < 0 else f"with exit code {failure.exitcode}"
    print(f"zeroshard: rank {rank} ended {how}; all ranks were ended", file=sys.stderr)
    return FAILED


@contextmanager
def _quiet_and_restored() -> Iterator[None]:
    """Silence torch's agent, which logs what we say in one line, and restore the signal handlers that it replaces."""
    handlers = {number: signal.getsignal(number) for number in HANDLED_BY_AGENT}
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def end_at_once_when_told(launched: bool) -> None:
    """Make SIGINT, SIGTERM and SIGUSR1 end this rank even while its main thread waits for a peer inside a collective.

    Python runs signal handlers between two bytecodes of the main thread, which a rank that waits in C++ never
    reaches. So the interpreter's C-level handler writes to a pipe, and a thread that reads it ends the process.
    The same thread notices a launcher that was killed outright: its ranks would otherwise train on, unseen.
    """
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    for number in (signal.SIGINT, *PREEMPTING):
        signal.signal(number, _leave_it_to_the_watch)
    # Told by number where possible: a launcher killed while this rank was still starting is not its parent any more.
    launcher = int(os.environ.get(LAUNCHER, os.getppid())) if launched else None

    def watch() -> None:
        while launcher is None or os.getppid() == launcher:
            # Python writes the numbers of the signals into the pipe.
            if select.select([read_end], [], [], 1.0)[0] and not set(os.read(read_end, 64)) <= _noted:
                break
        _told.set()
        with suppress(OSError):
            if sys.stdout.isatty():  # the progress bar hides the cursor
                os.write(sys.stdout.fileno(), b"\x1b[?25h\n")
            if not launched:
                os.write(sys.stderr.fileno(), b"zeroshard: interrupted\n")
        if launched:
            time.sleep(LINGER)
        try:
            if "zeroshard.checkpoint.staging" in sys.modules:  # else there is no checkpoint half written
                sys.modules["zeroshard.checkpoint.staging"].abandon()
        finally:
            os._exit(INTERRUPTED)

    threading.Thread(target=watch, name="end-at-once", daemon=True).start()


def leave_to_handlers(numbers: Sequence[int]) -> None:
    """Leave these signals to the program's own handlers from now on, which end the rank in their own time."""
    _noted.update(numbers)


def say_nothing_when_told() -> None:
    """Wait for the end of this rank where it is being ended: what fails then, a save or a message, is no news."""
    if _told.is_set():
        threading.Event().wait()


def alone(work: Callable[..., None], *args: Any) -> None:
    """Do one rank's work; if it fails, say so and end at once, for other ranks may be waiting for this one."""
    try:
        work(*args)
    except InputError:
        raise
    except Exception as error:
        say_nothing_when_told()
        if isinstance(error, Error):
            print(f"zeroshard: rank {os.environ.get('RANK', '0')}: {one_line(error)}", file=sys.stderr, flush=True)
        else:
            traceback.print_exc()
            sys.stderr.flush()
        os._exit(FAILED)


def _leave_it_to_the_watch(number: int, frame: FrameType | None) -> None:
    """Do nothing: Python only writes to the wake-up pipe for signals that have a handler."""
