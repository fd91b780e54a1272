"""zeroshard: ZeRO stages 0-3 for PyTorch from one line, with the same bits in every configuration.

unit       submodule whose parameters are gathered and released together, usually one transformer block
bucket     one flat tensor of a unit's parameters with one dtype, all trained or all frozen; one collective moves one
slot       one parameter's place in a bucket
shard      a rank's contiguous piece of a bucket
fragment   the part of a slot inside a shard; what the optimizer sees
block      128 elements from a slot's start; no cut falls inside one
placement  for each state (parameters, gradients, optimizer): sharded or replicated
tier       where a state rests: the device, host memory, files on NVMe
gather     make a unit's full parameters present
reduce     sum the ranks' gradients, in rank order, at each shard's owner
publish    send every rank the weights that their owners have updated
release    give a unit's full parameters' memory back
script     the order of gathers that all ranks follow
ledger     bytes held now, by state, and bytes moved, by operation
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import Zero as Zero
    from .api import shard as shard
    from .errors import Error as Error
    from .features.per_source_gradients import apart as apart
    from .integrations.settings import settings as settings
    from .integrations.weights import load as load
    from .planner.plan import plan as plan
    from .planner.question import Machine as Machine
    from .planner.question import Model as Model
    from .planner.question import Step as Step
    from .policies.comm import Comm as Comm
    from .policies.layout import Layout as Layout
    from .policies.offload import Offload as Offload
    from .policies.precision import Precision as Precision
    from .runlog.record import RunLog as RunLog
    from .worlds.world import world as world

ANYWHERE = "Comm", "Error", "Layout", "Machine", "Model", "Offload", "Step", "plan"  # without torch, and off Linux
EXTRA = "torch", "numpy", "safetensors"  # what `pip install ".[torch]"` in a clone brings

_HOME = {
    "Comm": "policies.comm",
    "Error": "errors",
    "Layout": "policies.layout",
    "Machine": "planner.question",
    "Model": "planner.question",
    "Offload": "policies.offload",
    "Precision": "policies.precision",
    "RunLog": "runlog.record",
    "Step": "planner.question",
    "Zero": "api",
    "apart": "features.per_source_gradients",
    "load": "integrations.weights",
    "plan": "planner.plan",
    "settings": "integrations.settings",
    "shard": "api",
    "world": "worlds.world",
}

__all__ = [
    "Comm",
    "Error",
    "Layout",
    "Machine",
    "Model",
    "Offload",
    "Precision",
    "RunLog",
    "Step",
    "Zero",
    "apart",
    "load",
    "plan",
    "settings",
    "shard",
    "world",
]
__version__ = "0.1.0"
OLDEST = 2, 11  # torch, as in pyproject.toml


def check_place(what: str) -> None:
    """Raise `ImportError` for what trains where nothing can be trained: off Linux, or without a torch that it knows."""
    if sys.platform != "linux":  # files, processes and memory are asked for in Linux' own ways
        looks = ", and `ckpt inspect` and `ckpt verify`" * (sys.platform == "darwin")
        here = f"`zeroshard plan` and `explain` work here{looks}"
        raise ImportError(f"{what} runs on Linux only, and this is {sys.platform}; {here}")
    if any(importlib.util.find_spec(each) is None for each in EXTRA):
        raise ImportError(missing(what))
    import torch

    found = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if found < OLDEST:
        raise ImportError(f"{what} needs torch {'.'.join(map(str, OLDEST))} or newer, and this is {torch.__version__}")


def missing(what: str) -> str:
    """Return the text that says what cannot be imported, and what brings it."""
    absent = [each for each in EXTRA if importlib.util.find_spec(each) is None]
    return f"{what} needs {' and '.join(absent)}: pip install '.[torch]' in a clone of zeroshard"


def __getattr__(name: str) -> Any:
    # Loaded on first use, so that `zeroshard --help` does not wait for torch.
    if name in _HOME:
        home = f"{__name__}.{_HOME[name]}"
        if name not in ANYWHERE:
            check_place(f"{__name__}.{name}")
        try:
            return getattr(importlib.import_module(home), name)
        except ModuleNotFoundError as error:
            if error.name == home:  # a feature that was taken out
                raise AttributeError(f"this build of {__name__} is without {name}: it has no {home}") from error
            raise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
