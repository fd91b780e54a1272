"""zeroshard, with its defaults; with gradients that rest in bfloat16, as all the peers keep them; with replicas
or hosts; over memory that ranks share, for messages, or for one copy of the parameters too; with parameters or masters
in other formats; with Muon.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import nn

import zeroshard

from . import Trainer, optimizers_of, plain


def build(
    model: nn.Module,
    *,
    low: bool,
    stage: int,
    low_gradients: bool = False,
    replicas: int = 1,
    over: Literal["team", "all"] = "team",
    hosts: int = 1,
    transport: Literal["gloo", "shared"] = "gloo",
    once: bool = False,
    formats: Mapping[str, Any] | None = None,
    muon: bool = False,
) -> Trainer:
    """formats: more fields of `Precision`."""
    optimizers = optimizers_of(model, muon=muon)
    dtype = torch.bfloat16 if low else None
    precision = zeroshard.Precision(param_dtype=dtype, grad_dtype=dtype if low_gradients else None, **(formats or {}))
    # An older tree, which `bench.trees` compares with, has no hosts.
    more = {} if hosts == 1 else {"hosts": hosts}
    comm = zeroshard.Comm(replicas=replicas, optimizer=over, transport=transport, **more)
    offload = zeroshard.Offload(parameters="shared") if once else zeroshard.Offload()
    zeroshard.shard(model, optimizers, stage=stage, precision=precision, comm=comm, offload=offload)
    return plain(model, *optimizers)
