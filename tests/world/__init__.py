"""Ranks as threads of this process, of which one runs at a time: a tool of the tests, for schedules that can be run again.

    import world

    def total(value):
        tensor = torch.full((3,), value)
        dist.all_reduce(tensor)
        return tensor[0].item()

    assert world.run(3, total, 2.0) == [6.0, 6.0, 6.0]      # what each rank returned, in rank order

A rank runs until it must wait for another one, and hands on the baton then. Nothing is sent: a message is a copy in
memory, with gloo's bits. zeroshard runs unchanged above it, and so does the test's own `torch.distributed`. Time is
virtual: it passes when no rank can go on, so a time-out takes no time, and ranks that wait for each other are found at
once: the failure says who waits for what.

    world.run(3, total, 2.0, strict=True)     # what has not landed yet is NaN, and what is under way may not be changed
    world.run(3, total, 2.0, seed=7)          # the schedule is drawn from the seed, and from the same seed again the same

`run` is called as `ranks.run` is, and fails as it does: with a `RankFailure`. Under pytest, `--worlds` runs in worlds what
`ranks.run` would run in processes; `--worlds=strict` and `--worlds=7` so.

    schedule   threads that hand on a baton, the virtual clock, and who waits for what when nobody can go on
    disk       files: calls that fail or fall short, and what a loss of power leaves
    draws      what a seed decides, and the digest of what it decided
    messages   collectives under way: what each rank put in, and when it lands where
    group      `torch.distributed` between the ranks: a process group, and the store in which they meet
    rank       what a process has one of, and each rank here one of its own
    install    what of torch and zeroshard asks which rank it is, for as long as a world runs
    running    `run`
    training   a small job of many settings, that tries again what an exception ended
    drawn      that job under drawn schedules and faults; in tests/, `python -m world` runs seeds, and one seed again
    planted    bugs put into copies of the engine, to see how many schedules find them
    instead    pytest's `--worlds`

What stays with processes: kill -9 and the files it leaves, sockets and networks, signals, fork, bytes that a process
holds, and gloo itself.
"""

from .draws import Odds
from .running import Ran, run
from .schedule import here

__all__ = ["Odds", "Ran", "here", "run"]
