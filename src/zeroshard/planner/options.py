"""The options of commands that are fields of a policy: one table. Imports no torch.

A command makes its policies from it, an error about a field is said in options by it, and `plan` tells from it what to
write instead of an argument that it once had.
"""

from __future__ import annotations

OPTIONS = {  # the option, as Python spells it, and (policy, field)
    "align": ("Layout", "align"),
    "bounds": ("Layout", "bounds"),
    "bucket_mib": ("Layout", "bucket_mib"),
    "checkpoint": ("Layout", "recompute"),
    "experts": ("Layout", "along"),
    "fp8": ("Precision", "fp8"),
    "grad_dtype": ("Precision", "grad_dtype"),
    "hosts": ("Comm", "hosts"),
    "matrices": ("Layout", "matrices"),
    "optimizer_over": ("Comm", "optimizer"),
    "overlap": ("Comm", "overlap"),
    "prefetch": ("Comm", "prefetch"),
    "reduce": ("Comm", "reduce"),
    "replicas": ("Comm", "replicas"),
    "timeout": ("Comm", "timeout"),
    "transport": ("Comm", "transport"),
    "whole": ("Layout", "whole"),
}
ARGUMENTS = ("optimizer_in_backward",)  # flags that are arguments of `shard` themselves
# What an option's policy takes, where it is no value of the option itself.
VALUES = {
    "checkpoint": "True",
    "experts": '{"*.experts.*": "edp"}',
    "fp8": "True",
    "matrices": '{"*.qkv.weight": 3}',
    "optimizer_over": '"all"',
    "whole": '["*.weight"]',
}
# Fields of which the option has another name, and what else an error may name.
OTHERS = {f"{policy}.{field}": name for name, (policy, field) in OPTIONS.items() if name != field}
OTHERS |= {"Offload.parameters": "offload", "Offload.activations": "--offload-activations"}
OTHERS |= {"Comm(optimizer=": "Comm(optimizer_over="}
OTHERS |= {"Machine.cluster": "Machine.machine", "Machine(cluster=": "Machine(machine="}
OTHERS |= {"Step.seconds": "Step.step_time", "Step(seconds=": "Step(step_time="}
# Fields that a plan of shapes or of a number counts, or that change no byte; a job's plan counts all.
OF_SHAPES = {
    "Layout": ("bounds", "bucket_mib", "align", "along", "whole", "matrices", "buffers", "recompute"),
    "Comm": ("prefetch", "overlap", "replicas", "hosts", "transport", "optimizer", "timeout", "reduce"),
}


def in_policies(option: str) -> str:
    """Write the argument of `shard` that an option is: "comm=Comm(replicas=...)"."""
    policy, field = OPTIONS[option]
    return f"{policy.lower()}={policy}({field}={VALUES.get(option, '...')})"
