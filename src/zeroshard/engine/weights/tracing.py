"""What `torch.compile` is told: it traces none of the engine's code, and no parameter that is not gathered.

A compiled function of the program's may clear gradients, clip them or enter `gathered()`. The engine then runs between
two graphs, as it runs without any: it talks to ranks, and acts differently from call to call.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

PACKAGE = Path(__file__).parents[2]


@functools.cache
def untraced() -> None:
    """Let a graph end before each call of the package's code. The code runs as it is, and so does what it calls of
    torch's; a module of the program's that it calls is compiled as elsewhere."""
    from torch._dynamo import trace_rules

    trace_rules.add(PACKAGE.name)


def traced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function of the package that is to be traced all the same."""
    from torch._dynamo import dont_skip_tracing

    traced: Callable[..., Any] = dont_skip_tracing(function)
    traced.__module__ = function.__module__  # by which `unshard` knows it as the engine's
    return traced


def backward_is_compiled() -> bool:
    """Tell if torch compiles the backward that runs (compiled autograd), where hooks of gradients see no values."""
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")  # not imported: compiled autograd is not used
    return compiled is not None and bool(compiled.in_compiled_autograd_region or compiled.compiled_autograd_enabled)


def end_graph(what: str, instead: str) -> None:
    """Break the graph that `torch.compile` is making on this thread, if any: the code here runs uncompiled.

    what: what a graph cannot have. instead: advice for the error if a break is not allowed (`fullgraph=True`).
    """
    if torch._guards.TracingContext.try_get() is not None:
        from torch._dynamo.exc import unimplemented

        unimplemented(gb_type="of zeroshard", context=what, explanation=what, hints=[instead])
