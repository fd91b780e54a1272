"""Warm rank processes for tests: a tool of its own, which of zeroshard knows only what to import and how it is started.

    import ranks

    def total(value):                       # a function of a module; it runs on every rank, in its process group
        tensor = torch.full((3,), value)
        dist.all_reduce(tensor)
        return tensor[0].item()

    assert ranks.run(3, total, 2.0) == [6.0, 6.0, 6.0]      # what each rank returned, in rank order

`run` calls a function on ranks 0 to N-1, `command` is `python -m zeroshard ...` in a process that need not import torch,
`rank()` and `world()` say inside the function where it runs, and `RankFailure` tells the test what every rank did
when one raised, died or hung: its exception with traceback, its signal, or the stack of where it stuck.

    pytest --socket--> nursery (torch imported, one thread) --fork--> worker 0, worker 1, ...   (one per rank)
       `pool`          `nursery`                            --fork--> python -m zeroshard ...   `worker`

The nursery pays for the imports once; a fork takes some milliseconds. Workers are forked when first needed, and the next
run reuses them, whatever its world size. A run that fails in any way costs its workers: they are killed and forked
anew, so nothing of a broken run can leak into the next test. The nursery ends when its socket to pytest does (however
pytest ended) and kills its workers by pid; each worker also asks the kernel to die with the nursery.

    pool        in pytest's process: `run`, `command`, and who is alive; failures are those of `zeroshard.testing`
    nursery     forks and reaps
    worker      a rank: takes a call, answers it, and forgets what the call left behind

Its own tests are test_harness.py. Rejected: `torch.multiprocessing.spawn` per test and restarting workers from scratch
after a failure (4 s each); one process group kept per world size (a test's subgroups would pile up; a fresh group costs
some twenty milliseconds).
"""

from zeroshard.testing.failures import Raised, RankFailure

from .pool import GROUP_TIMEOUT, RUN_TIMEOUT, alive, command, pids, run, shutdown, until, untimed
from .worker import rank, reset_global_state, world

__all__ = [
    "GROUP_TIMEOUT",
    "RUN_TIMEOUT",
    "Raised",
    "RankFailure",
    "alive",
    "command",
    "pids",
    "rank",
    "reset_global_state",
    "run",
    "shutdown",
    "until",
    "untimed",
    "world",
]
