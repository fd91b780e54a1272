"""Write the table of docs/choose-a-stage.md: the fastest way in which models of usual sizes fit usual machines.

`python docs/fits.py` asks `zeroshard.plan` for each cell, which takes a minute or two.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import zeroshard
from zeroshard.events import DEVICE, NVME
from zeroshard.planner.fitting import Fit, Found

PAGE = Path(__file__).parent / "choose-a-stage.md"
MODELS = ("7B", "13B", "30B")
GPUS = {"t4": "16 GB (T4)", "4090": "24 GB (4090)", "a6000": "48 GB (A6000)", "h100-80": "80 GB (H100)"}
MACHINES = (("32GiB", None), ("64GiB", None), ("128GiB", None), ("64GiB", "1TB"))
BEGIN, END = "<!-- docs/fits.py -->\n", "<!-- end of docs/fits.py -->\n"


def cell(model: str, gpu: str, host: str, disk: str | None) -> str:
    """What fits, with the numbers that were asked for or with others; or by how much nothing does."""
    found = zeroshard.plan(params=model, gpu=gpu, host_mem=host, disk=disk).fitting
    assert found is not None
    best = found.best
    if best is None:
        return "nothing"
    return f"{rests(best)}{numbers(found.found[0])}, {seconds(best.times.middle)} s"


def rests(fit: Fit) -> str:
    """The slowest tier that the optimizer's states rest in, for a reader who looks for the price."""
    at = fit.way.at["optimizer"]
    return "files" if at.get(NVME) else "device" if at.get(DEVICE) == sum(at.values()) else "host"


def numbers(same: Found) -> str:
    return "" if same.fits else ", bf16"


def seconds(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"


def table() -> str:
    """The table, in Markdown."""
    machines = (host.replace("GiB", " GiB") + " and a disk of 1 TB" * bool(disk) for host, disk in MACHINES)
    head = ["model", "GPU", *machines]
    lines = [head, ["---"] * len(head)]
    lines += [
        [model.replace("B", " B"), name, *(cell(model, gpu, *machine) for machine in MACHINES)]
        for model in MODELS
        for gpu, name in GPUS.items()
    ]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}{table()}{END}{rest.partition(END)[2]}")
