"""An emulated accelerator: a device type of torch in Python that is late, and a communication library with NCCL's rules.

    import emulated

    def late():                                         # a function of a module; it runs on every rank
        x = torch.ones(3, device="emu")
        y = x * 2                                       # queued: no kernel runs before somebody waits
        return y.tolist()                               # the host waits here

    assert emulated.run(1, late, seed=7) == [[2.0, 2.0, 2.0]]

Programs see `device="emu"` and `torch.emu`, which is to it what `torch.cuda` is to CUDA: streams, events, memory,
random states. Autograd runs its backward on a thread of the device's. Per rank there are

    streams     what was launched and has not run; who runs next is drawn from a seed, and all else stays late
    memory      blocks by address; freed memory is filled with 0xFF in the order of its stream
    kernels     torch's operators: shaped at once, computed late, by the CPU's kernels
    races       who touched which bytes last, and what orders that: a race is an error that names both sides
    pages       pinned memory of the host, locked against the host while a copy uses it
    counts      launches, waits of the host, allocations and bytes by the line of the program that asks
    sites       which line that is
    emu         `torch.emu`
    device      all of that, as one object
    emuccl      a backend of torch.distributed: what NCCL does with streams, time-outs, aborts and connections
    wire        its messages between ranks
    guard       torch's guard of a device, and what hooks raise in backward
    install     makes all of it known to torch
    runner      `run`, as `ranks.run`

What it proves, in every order that is drawn: no read before its wait, no use after free, no missing event between
streams, no stream of another device (`run(..., elsewhere=True)`), memory given back in the order of its stream; which tensors a group refuses, what a time-out or an abort does
to a group, in which order groups are made and connected, the same collectives on all ranks, and a deadlock of kernels
that are posted before what they wait for can run; how often the host waits, and how many kernels it launches.

What it does not: a GPU's arithmetic (the numbers are the CPU's), NCCL's own progress and memory, fragmentation, speed,
graphs, torch.compile's kernels, and autograd on other streams than the default one (its own switching between streams is not
to be had from Python). The host counts as one thread. An order is drawn anew by the same seed, but where ranks wait for
each other it also depends on when they come. So one says of what passes here "on an emulated accelerator", and never
"on GPUs".

Its own tests are test_emulated.py, test_emuccl.py and test_races.py. Rejected: torch's openreg (C++ to be built, and its
operators wait), mocks of `torch.cuda` (nothing is late), a fake mode (no numbers), gloo below emuccl (it cannot abort).
"""

from .counts import Counts, counted
from .runner import run

__all__ = ["Counts", "counted", "run"]
