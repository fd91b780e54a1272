"""The memory that a rank holds beside its states: messages under way, memory kept for the next one, rooms of files.

The engine keeps to these numbers, and the planner counts with them. Imports neither torch nor anything distributed.
"""

from __future__ import annotations

import mmap

PREFETCH = 1  # units gathered ahead of use, unless `Comm.prefetch` says otherwise
IN_FLIGHT = 2  # reductions under way before backward pauses for the oldest
LEAVING = 2  # sums, and edited weights, on their way from an accelerator to where they rest, kept until they are there
ROOMS = 3  # of a state that is stepped on the device and rests beside it: one arrives, one is stepped, one leaves
PIECES = 2  # of pinned memory, from which values cast on the host are sent: one on its way, one being filled
POOLED = 2 * IN_FLIGHT  # used messages kept for the next of their size: enough for those under way
# In an exchange NCCL connects each two ranks by so many channels, by default up to 32. Each takes a multiprocessor, and
# for each peer CHANNEL bytes of the device, 10 + 2 + 2 MiB: the first exchange of 8 H100 took 3.28 GB, which are 7
# peers by 32 channels (NVIDIA/nccl issue 1685).
CHANNELS, CHANNEL = 16, 14 << 20
STAGING_ROOMS = 3  # of a file of states: one to compute with, one coming, one going


def room(ranks: int) -> int:
    """Return how many own shards fit in the memory that a reduction receives into. The same on every rank.

    Among more than two ranks a rank in the middle also receives a copy of its own contribution (`Team.arriving`), and
    all reserve as much as it does.
    """
    return ranks if ranks > 2 else ranks - 1


def aligned(nbytes: int) -> int:
    """Round bytes up to whole pages, which direct I/O moves and pinned memory takes."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
