"""Drawn schedules and faults: ranks as threads of this process, of which one runs at a time, and a seed that says it all.

    import world

    def total(value):
        tensor = torch.full((3,), value)
        dist.all_reduce(tensor)
        return tensor[0].item()

    assert world.run(3, total, 2.0) == [6.0, 6.0, 6.0]      # what each rank returned, in rank order

The ranks are those of `zeroshard.worlds`. Time is virtual: it passes when no rank can go on, so a time-out takes no time,
and ranks that wait for each other are found at once: the failure says who waits for what.

    world.run(3, total, 2.0, strict=True)     # what has not landed yet is NaN, and what is under way may not be changed
    world.run(3, total, 2.0, seed=7)          # the schedule is drawn from the seed, and from the same seed again the same

`run` is called as `ranks.run` is, and fails as it does: with a `RankFailure`. Under pytest, `--worlds` runs in worlds what
`ranks.run` would run in processes; `--worlds=strict` and `--worlds=7` so.

    faults     where a seed brings a fault about: files, allocations, copies of containers
    disk       files: calls that fail or fall short, and what a loss of power leaves
    running    `run`
    training   a small job of many settings, that tries again what an exception ended
    drawn      that job under drawn schedules and faults; in tests/, `python -m world` runs seeds, and one seed again
    planted    bugs put into copies of the engine, to see how many schedules find them
    instead    pytest's `--worlds`

What stays with processes: kill -9 and the files it leaves, sockets and networks, signals, fork, bytes that a process
holds, and gloo itself.
"""

from zeroshard.worlds.draws import Odds
from zeroshard.worlds.schedule import here

from .running import Ran, run

__all__ = ["Odds", "Ran", "here", "run"]
