"""Write the table of docs/choose-a-stage.md: the fastest way in which models of usual sizes fit usual machines.

`python docs/fits.py` asks `zeroshard.plan` for each cell, which takes a minute or two.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import zeroshard
from zeroshard import Machine
from zeroshard.events import DEVICE, NVME
from zeroshard.planner.fitting import Fit, Fitting, Found

PAGE = Path(__file__).parent / "choose-a-stage.md"
MODELS = ("7B", "13B", "30B")
GPUS = {"t4": "16 GB (T4)", "4090": "24 GB (4090)", "a6000": "48 GB (A6000)", "h100-80": "80 GB (H100)"}
MACHINES = (("32GiB", None), ("64GiB", None), ("128GiB", None), ("64GiB", "1TB"))
BEGIN, END = "<!-- docs/fits.py -->\n", "<!-- end of docs/fits.py -->\n"


def answer(model: str, gpu: str, host: str, disk: str | None) -> Fitting:
    """What fits a machine with one GPU."""
    found = zeroshard.plan(model, Machine(gpu=gpu, host_mem=host, disk=disk)).fitting
    assert found is not None
    return found


def cell(found: Fitting) -> str:
    """What fits, with the numbers that were asked for or with others."""
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


def line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |\n"


def head() -> str:
    machines = (host.replace("GiB", " GiB") + " and a disk of 1 TB" * bool(disk) for host, disk in MACHINES)
    return line("model", "GPU", *machines) + line(*["---"] * (2 + len(MACHINES)))


def row(model: str, gpu: str, found: Sequence[Fitting]) -> str:
    """One line of the table, in Markdown. found: the answer for each of `MACHINES`."""
    return line(model.replace("B", " B"), GPUS[gpu], *map(cell, found))


def table() -> str:
    rows = ((model, gpu, [answer(model, gpu, *machine) for machine in MACHINES]) for model in MODELS for gpu in GPUS)
    return head() + "".join(row(*each) for each in rows)


if __name__ == "__main__":
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}{table()}{END}{rest.partition(END)[2]}")
