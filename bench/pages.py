"""`python -m bench.pages`: recorded runs as the page's own tests open them, written to web/fixtures.

    run        a small GPT, two ranks, stage 3, with loss and norm curves
    run-1000   1,000 tensors on four ranks, stage 3: is it still small, and does it still scroll?
    hostile    modules whose names are HTML
    tiers      half of the parameters in host memory, the gradients too, the optimizer's state in files
    experts    four experts, two on each of four ranks
    replicas   two replicas of two ranks, the optimizer over all four

Their times are of the machine that ran them, so they differ from run to run; nothing compares them.
"""

from __future__ import annotations

import json
import sys
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zeroshard
from zeroshard.cli.config import Shape
from zeroshard.cli.model import GPT
from zeroshard.explain import reading, run
from zeroshard.explain.document import document

from .ranks import Ranks

TARGET = Path(__file__).parents[1] / "web" / "fixtures"
WORLDS = {"run": 2, "run-1000": 4, "hostile": 2, "tiers": 2, "experts": 4, "replicas": 4}
WARM_UP = 3  # steps before the one that is shown
HOSTILE = (  # a module's name may hold anything but a dot
    "</script><script>document['title']='gone'</script>", "<img src=x onerror=\"document['title']='gone'\">",
    "<!--<script>", "a\"b'c&amp;", "\u2028{{constructor}}",
)  # fmt: skip


class Block(nn.Module):
    """Eight tensors: two layer norms and two linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.norm2(self.down(torch.relu(self.up(self.norm1(x)))))
        return x + hidden


class Experts(nn.Module):
    """Two of four experts. Every token goes through all that are here: who has which rows is what is shown."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, width, width) / width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.einsum("td,edf->tf", x, self.weight)


def named_like_markup() -> nn.Module:
    model = nn.Sequential()
    for name in HOSTILE:
        model.add_module(name, nn.Linear(16, 16))
    return model


class Watched:
    """One rank's run of one example, from start to end."""

    def __init__(self, name: str) -> None:
        self.name = name

    def told(self) -> dict[str, Any] | None:
        torch.manual_seed(0)
        if self.name == "run":
            return self._train(GPT(Shape(context=64, blocks=4, heads=4, hidden=96, lr=1e-3)), steps=60)
        if self.name in ("tiers", "replicas"):
            model: nn.Module = nn.Sequential(*(Block(16) for _ in range(4)))
        elif self.name == "experts":
            model = nn.Sequential(nn.Linear(16, 16), nn.Sequential(OrderedDict(experts=Experts(16))), nn.Linear(16, 16))
        else:
            model = named_like_markup() if self.name == "hostile" else nn.Sequential(*(Block(16) for _ in range(125)))
        return self._train(model, steps=WARM_UP + 1)

    def _train(self, model: nn.Module, steps: int) -> dict[str, Any] | None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        offload = zeroshard.Offload()
        if self.name == "tiers":
            offload = zeroshard.Offload(parameters=0.5, gradients="cpu", optimizer="nvme", path="run/scratch")
        layout, comm = zeroshard.Layout(), zeroshard.Comm(transport="gloo")  # messages, which the page shows
        if self.name == "run-1000":
            layout = zeroshard.Layout(units=[Block])  # small ones would join, and there would be little to show
        if self.name == "experts":
            layout = zeroshard.Layout(along={"*experts*": "edp"})
            comm = replace(comm, group=init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep")))
        if self.name == "replicas":
            comm = replace(comm, replicas=2, optimizer="all")
        zero = zeroshard.shard(model, optimizer, stage=3, offload=offload, layout=layout, comm=comm)
        metrics = []
        for step in range(steps):
            if step == steps - 2:
                zero.record()
            loss = self._loss(model, zero.rank, step)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            metrics.append({"step": step + 1, "loss": loss.item(), "grad_norm": norm.item()})
        told = run.gather(zero) | {"curves": reading.curves(metrics)}
        return told if zero.rank == 0 else None

    def _loss(self, model: nn.Module, rank: int, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(97 * step + rank)
        if self.name == "run":  # bytes that count up: something a small model learns in a few steps
            tokens = (torch.randint(0, 64, (8, 1), generator=generator) + torch.arange(65)) % 64
            loss: Tensor = model(tokens[:, :-1], tokens[:, 1:])
            return loss
        return model(torch.randn(8, 16, generator=generator)).square().mean()


def main() -> None:
    """Write those that the command line names, or all."""
    for name, world in WORLDS.items():
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        ranks = Ranks(world, Watched, name)
        told = ranks("told")[0]
        ranks.close()
        path = TARGET / f"{name}.json"
        page = document(walkthroughs=None, run=told)
        path.write_text(json.dumps(page, ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n", "utf-8")
        print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
