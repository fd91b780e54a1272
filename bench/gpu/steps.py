"""The steps, in their order: what each asks, what its answer decides, and what it needs.

`python -m bench.gpu.steps` brings the table in docs/gpus.md up to date.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import NamedTuple

from .. import report
from .place import ROOT
from .record import Record

PAGE = ROOT / "docs" / "gpus.md"
OPENING, CLOSING = "<!-- bench/gpu/steps.py -->\n", "<!-- end -->\n"


class Step(NamedTuple):
    """name: of its module and its file. minutes: on eight devices, after twice which it is ended. least: devices."""

    name: str
    minutes: int
    least: int
    asks: str
    decides: str

    @property
    def number(self) -> int:
        return STEPS.index(self)

    @property
    def file(self) -> str:
        return f"{self.number:02}-{self.name}.json"

    def load(self) -> Callable[[Record], None]:
        run: Callable[[Record], None] = importlib.import_module(f"{__package__}.{self.name}").run
        return run


STEPS = [
    Step("machine", 2, 1, "versions, topology, peers, clocks, disk, nodes", "is the machine sane"),
    Step("arithmetic", 3, 1, "sums, averages, norms, casts, 8 bits, split masters: device and CPU, bit by bit",
         "what the same bits may mean across processors"),
    Step("one_rank", 6, 1, "stages, dtypes, overlap, tiers against plain torch", "the claim for one GPU"),
    Step("suite", 4, 1, "the tests that are marked gpu", "is anything broken that a test knows"),
    Step("nccl", 5, 2, "each verb; late ranks, meta, states on the host; groups of two backends, split, part of all",
         "does a job on two GPUs live"),
    Step("grid", 8, 2, "2 to 8 ranks, stages, replicas, accumulation", "the main claim: the same bits"),
    Step("counts", 3, 1, "kernels launched and waits of the host in a step; torch's sanitizer; a trace a stage",
         "does the host run ahead of the device"),
    Step("speed", 8, 1, "one rank beside plain torch: stages, clipped, compiled, offloaded", "what the engine costs"),
    Step("peers", 12, 2, "1B and 7B on all GPUs: ordered, native, replicas, FSDP2, DDP; three lengths, clipped or not",
         "who is faster, and where the memory goes"),
    Step("links", 5, 1, "host and device, folds and norms, collectives by size; machine.json",
         "what the planner should believe"),
    Step("faults", 4, 2, "kill -9, SIGTERM, out of memory, Ctrl-C: who says what, how soon, and the step again",
         "does a loss end a job in seconds"),
    Step("settings", 6, 2, "8 bits, split masters, a scaler, Muon, in backward, compiled, checkpoints, meshes",
         "the same bits of what else is switched on"),
]  # fmt: skip


def table() -> str:
    """As Markdown."""
    return report.table(
        [
            {"step": step.number, "file": f"`{step.file}`", "minutes": step.minutes, "GPUs": step.least,
             "asks": step.asks, "decides": step.decides}
            for step in STEPS
        ]
    )  # fmt: skip


def written(page: str) -> str:
    """`page` with the table between the two comments."""
    before, _, rest = page.partition(OPENING)
    _, _, after = rest.partition(CLOSING)
    return before + OPENING + table() + "\n" + CLOSING + after


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
