"""Many ranks in one process: for notebooks, lessons, debuggers and tests; `zeroshard.world` is its door.

A rank is a thread, and exactly one runs at a time: it hands on the baton where it must wait for another rank. Messages
are copies in memory, with gloo's bits. The engine runs unchanged above them, as does the program's own
`torch.distributed`.

    schedule   threads that hand on a baton, the virtual clock, and who waits for what when no rank can go on
    draws      what a seed decides, and the digest of what it decided
    messages   collectives under way: what each rank put in, and when it lands where
    group      `torch.distributed` between the ranks: a process group, and the store in which they meet
    rank       what a process has one of, and each rank here one of its own
    install    names of torch, Python and zeroshard that answer for the rank that asks
    output     lines that begin with the rank that printed them
    world      the ranks, and functions called on all of them
"""
