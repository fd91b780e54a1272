"""Bytes known before they are held, from the same layout and stage table that the engine runs on.

The question and its answer:

    plan         the question, checked; the answer for each stage
    quantities   numbers as people write them and as they are shown
    recipes      bytes per parameter of each state, by name
    advice       what would make it fit

Three numbers, and no layout:

    closed       bytes at rest
    traffic      bytes sent in a step, over which links, and replicas of the optimizer

A layout, from shapes in a file or from a model:

    shapes       names and shapes from a file
    states       bytes at rest; and what a built engine will hold
    instants     what passes through beside the states, and when it is most
    files        what a step reads from files and writes to them
    disk         how long that takes on a disk that was measured

A job of the user's, through the engine itself on tensors without memory:

    job          the user's own model, optimizer, batch and loss, by name
    simulate     one rank of any number
    machines     what a cluster can do, in a few numbers
    timeline     a simulated step on a clock
    own          the plan of a job

And `texts`: the numbers of five published texts, recomputed.

Only a job, and what is asked of a built engine, need torch.
"""

from __future__ import annotations

from .states import predict_states, predict_tiers

__all__ = ["predict_states", "predict_tiers"]
