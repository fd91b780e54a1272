"""Bytes known before they are held, from the same layout and stage table that the engine runs on.

The question and its answer:

    plan         the question, checked: from here to one of from_number, from_shapes and from_job
    question     a model, a machine and a step: what is asked about
    asked        the question, once it is checked
    options      the options of commands that are fields of a policy
    experts      which parameters are divided among ranks, checked
    answer       the answer for each stage
    quantities   numbers as people write them and as they are shown
    recipes      bytes per parameter of each state, by name
    fitting      the fastest way that fits a machine: a search over what the engine can do
    clock        how long a step takes on a GPU by name, with states in any tier
    line         the call of `shard` that does it
    ways         how ranks can share it on a cluster, and which way takes the least time

Three numbers, and no layout:

    from_number  the plan of a number of parameters
    closed       bytes at rest
    transformer  the usual depth of so many parameters, and activations by a formula
    traffic      bytes sent in a step, over which links, and replicas of the optimizer

A layout, from shapes in a file or from a model:

    from_shapes  the plan of shapes
    shapes       names and shapes from a file
    states       bytes at rest
    instants     what passes through beside the states, and when it is most
    files        what a step reads from files and writes to them
    disk         how long that takes on a disk

A job of the user's, through the engine itself on tensors without memory:

    from_job     the plan of a job
    fits_job     what fits, of a job
    built        what a built engine will hold
    optimizers   what an optimizer keeps of a parameter, by asking it
    job          the user's own model, optimizer, batch and loss, by name
    simulate     one rank of any number
    machines     what a cluster can do, in a few numbers
    timeline     a simulated step on a clock

And `texts`: the numbers of five published texts, recomputed.

Only a job, and what is asked of a built engine, need torch.
"""

from __future__ import annotations

from .built import predict_states, predict_tiers

__all__ = ["predict_states", "predict_tiers"]
