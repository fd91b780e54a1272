"""Two runs on four ranks that the page plays: K = 2 replicas of the optimizer, and experts that are spread over ranks.

They are recorded as a user's run is, but on a clock of ticks, so that every run is the same. `capture` runs on each of
the four ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zeroshard
from zeroshard.engine.gradients.reduction import UNHURRIED
from zeroshard.explain import run
from zeroshard.explain.recording import MESSAGES
from zeroshard.explain.stacked_mlp import MLP, StackedMLP
from zeroshard.policies.comm import Comm
from zeroshard.policies.layout import Layout
from zeroshard.policies.precision import Precision

from .observe import ticking
from .walk260 import one_of

RANKS, REPLICAS, EXPERTS, EP, STAGE = 4, 2, 4, 2, 1
HIDDEN, DEPTH, ROWS, STEPS = 16, 2, 4, 3
SAYS = {
    "replicas": "K = 2 replicas of the optimizer on four ranks (Comm(replicas=2)). Ranks 0 and 1 shard one copy of the "
    "optimizer states, ranks 2 and 3 the other. A gradient is reduced inside a replica; its running sum goes on to the "
    "other replica, and the average comes back. Parameters are gathered inside a replica.",
    "experts": "Four experts, two on each rank (EP = 2, Layout(along=...)). Ranks 0 and 2 have the first two, ranks 1 "
    "and 3 the others, and each pair shards its own. All else is sharded over all four ranks: the dense layer, and the "
    "router, which is fp32 and so has a buffer of its own.",
}  # fmt: skip


class Experts(nn.Module):
    """This rank's experts. Every token goes through all of them: only their placement is shown."""

    def __init__(self, hidden: int, here: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(here, hidden, hidden) / hidden)

    def forward(self, x: Tensor, shares: Tensor) -> Tensor:
        return torch.einsum("td,edf,te->tf", x, self.weight, shares)


class MoE(nn.Module):
    def __init__(self, hidden: int, here: int) -> None:
        super().__init__()
        self.router = nn.Linear(hidden, here)
        self.experts = Experts(hidden, here)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.experts(x, self.router(x.float()).softmax(-1).to(x.dtype))  # type: ignore[no-any-return]


class DenseAndExperts(nn.Module):
    """A model of one dense layer and one layer of experts."""

    def __init__(self, hidden: int, here: int) -> None:
        super().__init__()
        self.dense, self.moe = MLP(hidden), MoE(hidden, here)

    def forward(self, x: Tensor) -> Tensor:
        return self.moe(self.dense(x))  # type: ignore[no-any-return]


def capture() -> dict[str, Any]:
    """Make and record both runs. Collective, on four ranks."""
    mesh = init_device_mesh("cpu", (RANKS // EP, EP), mesh_dim_names=("edp", "ep"))
    torch.manual_seed(0)
    stack, moe = StackedMLP(HIDDEN, DEPTH), DenseAndExperts(HIDDEN, EXPERTS // EP)
    rows = Layout(align=1, along={"*.experts.*": "edp"})
    return {
        "replicas": _recorded(stack, replace(MESSAGES, replicas=REPLICAS), Layout(align=1)),
        "experts": _recorded(moe, replace(MESSAGES, group=mesh), rows, keep=["*.router.*"]),
    }


def _recorded(model: nn.Module, comm: Comm, layout: Layout, keep: Sequence[str] = ()) -> dict[str, Any]:
    with ticking():
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        precision = Precision(param_dtype=torch.bfloat16, keep=keep)
        zero = zeroshard.shard(model, optimizer, stage=STAGE, precision=precision, comm=comm, layout=layout)
        zero._engine.reduction.pause = UNHURRIED
        for step in range(STEPS):
            if step == STEPS - 2:  # the last whole step is shown, and the record must begin before it
                zero.record()
            generator = torch.Generator().manual_seed(1000 * step + zero.rank)
            model(torch.randn(ROWS, HIDDEN, generator=generator).bfloat16()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return run.gather(zero, clock="tick")


def assemble(ranks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """List the runs, each with its name and what it shows, from what `capture` returned on each rank."""
    return [
        {"name": name, "says": says, "run": one_of([rank[name] for rank in ranks], f"runs of {name}")}
        for name, says in SAYS.items()
    ]
