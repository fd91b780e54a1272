"""`python -m bench.golden`: what the page's calculator is made of and tested against, written to web/fixtures.

planner.json        the planner's tables: stages, recipes, optimizers, GPUs, machines, how masters rest. For the page.
plan-golden.json    a few hundred random questions and the planner's answers
"""

from __future__ import annotations

import importlib
import json
import random
from pathlib import Path
from typing import Any
from unittest.mock import patch

import zeroshard
from zeroshard import Layout, Offload
from zeroshard.cli.policies import NAMES, comm_of
from zeroshard.events import DEVICE, HOST, NVME
from zeroshard.layout import limits
from zeroshard.layout.partition import BUCKET_MIB
from zeroshard.layout.stage import STAGES, STATES
from zeroshard.layout.states import masters
from zeroshard.planner import from_number, gpus, quantities, recipes
from zeroshard.planner.answer import Plan
from zeroshard.planner.asked import Asked
from zeroshard.planner.machines import MACHINES
from zeroshard.planner.question import from_flat

planning = importlib.import_module("zeroshard.planner.plan")
TIERS = (DEVICE, HOST, NVME)
TARGET = Path(__file__).parents[1] / "web" / "fixtures"
SEED, CASES, OFFLOADED = 8, 300, 120
PRESETS_ON_THE_PAGE = (
    {"params": 7_000_000_000, "preset": "paper", "ranks": 8, "gpu_mem": "80GiB"},
    {"params": 7_500_000_000, "preset": "paper", "ranks": 64, "gpu_mem": "32GiB"},
    {"params": 1_342_382_080, "preset": "paper", "ranks": 4, "gpu_mem": "16GB"},
)
CUSTOM = ("parameters=2,gradients=2,master=4,m=4,v=4", "parameters=2,gradients=4,master=4,momentum=4",
          "parameters=1,gradients=2,master=4,m=1/2,v=1/2", "parameters=4,gradients=4")  # fmt: skip


def questions() -> list[dict[str, Any]]:
    """Options of `zeroshard plan`, those left at their defaults not named. The same at every call."""
    draw = random.Random(SEED)
    asked: list[dict[str, Any]] = [dict(case) for case in PRESETS_ON_THE_PAGE]
    while len(asked) < CASES:
        ranks = draw.choice([1, 2, 3, 4, 6, 7, 8, 12, 16, 64, 100, 512, 1024, 4096])
        question: dict[str, Any] = {"params": _size(draw), "ranks": ranks}
        kind = draw.random()
        if kind < 0.15:
            question["bytes"] = draw.choice(CUSTOM)
        elif kind < 0.85:
            question["preset"] = draw.choice(list(recipes.PRESETS))
        else:
            question["preset"] = "paper"
        if "bytes" not in question and draw.random() < 0.5:
            question["optimizer"] = draw.choice(list(recipes.OPTIMIZERS))
        if draw.random() < 0.4:
            question["accumulate"] = draw.choice([2, 3, 4, 8, 32])
        if draw.random() < 0.3:
            question["no_sync"] = True
        if draw.random() < 0.5:
            question["gpu_mem"] = draw.choice(["16GiB", "24GB", "32GiB", "40GB", "80GiB", "141GB", "512MiB", "1.5TiB"])
        if draw.random() < 0.3:
            question["gpus_per_node"] = draw.choice([1, 2, 4, 8, 16])
        if draw.random() < 0.2:
            question["replicas"] = draw.choice([k for k in range(1, min(ranks, 64) + 1) if ranks % k == 0])
        if draw.random() < 0.2:
            question["stage"] = draw.choice(list(STAGES))
        asked.append(question)
    return asked + [_offloaded(draw) for _ in range(OFFLOADED)]


def _offloaded(draw: random.Random) -> dict[str, Any]:
    """A question about tiers, or about the peak of a step, or both; fractions are whole percents."""
    question: dict[str, Any] = {"params": _size(draw), "ranks": draw.choice([1, 2, 3, 4, 7, 8, 64, 100, 1024])}
    if draw.random() < 0.2:
        question["bytes"] = draw.choice(CUSTOM)
    else:
        question["preset"] = draw.choice(list(recipes.PRESETS))
        if draw.random() < 0.5:
            question["optimizer"] = draw.choice(list(recipes.OPTIMIZERS))
    if draw.random() < 0.8:
        question["offload"] = {kind: _resting(draw) for kind in STATES}
    if "offload" not in question or draw.random() < 0.6:
        question["units"] = draw.choice([1, 2, 3, 7, 12])
        question["params"] = min(question["params"], 10**9 + 1)
    if draw.random() < 0.4:
        question["accumulate"] = draw.choice([2, 3, 8])
    if draw.random() < 0.3:
        question["no_sync"] = True
    question["gpu_mem"] = draw.choice(["512MiB", "16GiB", "80GiB"])
    if draw.random() < 0.3:
        question["replicas"] = draw.choice([k for k in range(1, question["ranks"] + 1) if question["ranks"] % k == 0])
    return question


def _resting(draw: random.Random) -> str | dict[str, float]:
    """As `Offload` takes it: a tier, or fractions by tier."""
    if draw.random() < 0.6:
        return draw.choice(["device", "cpu", "nvme"])
    host = draw.randrange(0, 101)
    parts = {"cpu": host / 100, "nvme": draw.randrange(0, 101 - host) / 100}
    return {tier: part for tier, part in parts.items() if part}


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    """`zeroshard plan --json` of one question; of many instants, those that are no peak left out.

    The page's calculator searches for nothing that fits, and assumes no units.
    """
    settings = dict(asked)
    if resting := settings.pop("offload", None):
        on_disk = any(where == "nvme" or "nvme" in where for where in resting.values())
        settings["offload"] = Offload(**resting, path="/scratch" if on_disk else None)
    rest = {name: value for name, value in settings.items() if name not in NAMES}
    model, machine, step, more = from_flat(rest)
    number = from_number.plan_params

    def at_rest(numel: int, asked: Asked) -> Plan:
        return number(numel, asked._replace(accelerator=False, layout=Layout().on(accelerator=False)))

    with patch.object(from_number, "plan_params", at_rest), patch.object(planning, "_fitting", lambda *_: None):
        plan = zeroshard.plan(model, machine, step=step, **more, comm=comm_of(settings)).json()
    for stage in plan["stages"]:
        shown = [instant for instant in stage["instants"] if not instant["name"].startswith(("forward", "reduce"))]
        stage["instants"] = shown[:3] + shown[-2:] if len(shown) > 5 else shown
    return plan


def _size(draw: random.Random) -> int:
    """From one parameter to a trillion, most of them not round."""
    size = int(10 ** draw.uniform(0, 12))
    return round(size, -max(len(str(size)) - 2, 0)) if draw.random() < 0.3 else size


def case(asked: dict[str, Any]) -> dict[str, Any]:
    return {"asked": asked, "plan": answer(asked)}


def tables() -> dict[str, Any]:
    """What the calculator offers to choose from, and the bytes behind it."""
    return {
        "format": "zeroshard-planner",
        "version": 1,
        "stages": [{"stage": stage, "placements": place.sharded()} for stage, place in STAGES.items()],
        "recipes": [
            {**recipe.json(), "says": recipe.says, "per_tensor": dict(recipe.per_tensor)}
            for recipe in recipes.PRESETS.values()
        ],
        "optimizers": {
            name: {state: quantities.plain(nbytes) for state, nbytes in kept.items()}
            for name, kept in recipes.OPTIMIZERS.items()
        },
        # How masters rest where parameters are sharded, {tier of these: {tier of the optimizer: how}}: of recipes that
        # name no master, and of those whose gathers may cast it.
        "masters": {
            name: {here: {there: found[here, there].name.lower() for there in TIERS} for here in TIERS}
            for name, found in (
                ("none", masters(recipes.formats(recipes.PRESETS["fp32"]), STAGES[3])),
                ("cast", masters(recipes.formats(recipes.PRESETS["zeroshard"]), STAGES[3])),
            )
        },
        "constants": {
            "message": int(BUCKET_MIB * 2**20),
            "align": Layout().align,
            "page": limits.aligned(1),
            "buffers": limits.STAGING_ROOMS,
            "in_flight": limits.IN_FLIGHT,
            "prefetch": limits.PREFETCH,
            "exchanged": round(gpus.exchanged(2) * (1 - gpus.ALLOCATOR)),
        },
        "gpus": [{"name": name, "gib": gpu.gib, "usable": gpus.usable(name)} for name, gpu in gpus.GPUS.items()],
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
