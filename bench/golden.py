"""`python -m bench.golden`: what the page's calculator is made of and tested against, written to web/fixtures.

planner.json        the tables of the planner: stages, recipes, optimizers, machines. The page is built with it.
plan-golden.json    a few hundred random questions and the planner's answers
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import zeroshard
from zeroshard.planner import closed
from zeroshard.planner.machines import MACHINES
from zeroshard.stage import STAGES

TARGET = Path(__file__).parents[1] / "web" / "fixtures"
SEED, CASES = 8, 300
PRESETS_ON_THE_PAGE = (
    {"params": 7_000_000_000, "ranks": 8, "gpu_mem": "80GiB"},
    {"params": 7_500_000_000, "ranks": 64, "gpu_mem": "32GiB"},
    {"params": 1_342_382_080, "ranks": 4, "gpu_mem": "16GB"},
)
CUSTOM = ("parameters=2,gradients=2,master=4,m=4,v=4", "parameters=2,gradients=4,master=4,momentum=4",
          "parameters=1,gradients=2,master=4,m=1/2,v=1/2", "parameters=4,gradients=4")  # fmt: skip


def questions() -> list[dict[str, Any]]:
    """Arguments of `zeroshard.plan`, those left at their defaults not named. The same at every call."""
    draw = random.Random(SEED)
    asked: list[dict[str, Any]] = [dict(case) for case in PRESETS_ON_THE_PAGE]
    while len(asked) < CASES:
        ranks = draw.choice([1, 2, 3, 4, 6, 7, 8, 12, 16, 64, 100, 512, 1024, 4096])
        question: dict[str, Any] = {"params": _size(draw), "ranks": ranks}
        kind = draw.random()
        if kind < 0.15:
            question["bytes"] = draw.choice(CUSTOM)
        elif kind < 0.85:
            question["preset"] = draw.choice(list(closed.PRESETS))
        if "bytes" not in question and draw.random() < 0.5:
            question["optimizer"] = draw.choice(list(closed.OPTIMIZERS))
        if draw.random() < 0.4:
            question["accumulate"] = draw.choice([2, 3, 4, 8, 32])
        if draw.random() < 0.3:
            question["no_sync"] = True
        if draw.random() < 0.5:
            question["gpu_mem"] = draw.choice(["16GiB", "24GB", "32GiB", "40GB", "80GiB", "141GB", "512MiB", "1.5TiB"])
        if draw.random() < 0.3:
            question["gpus_per_node"] = draw.choice([1, 2, 4, 8, 16])
        if draw.random() < 0.2:
            question["instances"] = draw.choice([k for k in range(1, min(ranks, 64) + 1) if ranks % k == 0])
        elif draw.random() < 0.2:
            question["stage"] = draw.choice(list(STAGES))
        asked.append(question)
    return asked


def _size(draw: random.Random) -> int:
    """From one parameter to a trillion, most of them not round."""
    size = int(10 ** draw.uniform(0, 12))
    return round(size, -max(len(str(size)) - 2, 0)) if draw.random() < 0.3 else size


def case(asked: dict[str, Any]) -> dict[str, Any]:
    return {"asked": asked, "plan": zeroshard.plan(**asked).json()}


def tables() -> dict[str, Any]:
    """What the calculator offers to choose from, and the bytes behind it."""
    return {
        "format": "zeroshard-planner",
        "version": 1,
        "stages": [{"stage": stage, "placements": place._asdict()} for stage, place in STAGES.items()],
        "recipes": [
            {**recipe.json(), "says": recipe.says, "per_tensor": dict(recipe.per_tensor)}
            for recipe in closed.PRESETS.values()
        ],
        "optimizers": {
            name: {state: closed.plain(nbytes) for state, nbytes in kept.items()}
            for name, kept in closed.OPTIMIZERS.items()
        },
        "machines": [
            {"name": machine.name, "memory": machine.memory, "gpus": machine.gpus, "source": machine.source}
            for machine in MACHINES.values()
        ],
    }


def golden() -> dict[str, Any]:
    return {"format": "zeroshard-plan-golden", "version": 1, "cases": [case(asked) for asked in questions()]}


def main() -> None:
    lines = ",\n".join(json.dumps(one, separators=(",", ":")) for one in golden()["cases"])
    text = f'{{"format":"zeroshard-plan-golden","version":1,"cases":[\n{lines}\n]}}\n'
    for name, content in (("planner", json.dumps(tables(), indent=1) + "\n"), ("plan-golden", text)):
        path = TARGET / f"{name}.json"
        path.write_text(content, "utf-8")
        print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
