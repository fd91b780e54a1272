"""`python -m walkthroughs.build` in web/: run the walkthroughs on local ranks and write what the page shows of them.

The engine computes every number. What it writes depends on no clock, so it is the same at every run with the same torch
on the same kind of processor: a test builds it anew and compares.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zeroshard import explain
from zeroshard.cli import launch, processor
from zeroshard.cli.config import InputError, Launch
from zeroshard.explain.document import document

RANKS, PROFILED, WIDEST = 2, 4, 8
TARGET = Path(explain.__file__).with_name("walkthroughs.json")


def capture() -> dict[str, Any]:
    """Run the walkthroughs on this rank and return its part, JSON-able. Collective, on two ranks."""
    from . import run260, walk4, walk_layers, walk_tiers

    return {
        "transformer": run260.capture(), "four": walk4.capture(), "layers": walk_layers.capture(),
        "tiers": walk_tiers.capture(),
    }  # fmt: skip


def profiled() -> dict[str, Any]:
    """Return what this rank held of the scaled profile, and the runs to play, JSON-able. Collective, on four ranks."""
    from . import profile, run260, walk_runs

    return {"profile": profile.capture(), "runs": walk_runs.capture(), "transformer": run260.wider()}


def widest() -> dict[str, Any]:
    """Return this rank's part of the runs on eight, JSON-able. Collective, on eight ranks."""
    from . import run260

    return {"transformer": run260.wider()}


def assemble(
    ranks: Sequence[dict[str, Any]], four: Sequence[dict[str, Any]], eight: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Make the whole document of what every rank captured, of two (`ranks`), four and eight."""
    import torch

    from . import faults260, overview, played260, profile, walk4, walk260, walk_layers, walk_runs, walk_tiers
    from .texts import text

    read, four, eight = json.loads(
        json.dumps([ranks, four, eight])
    )  # a capture that no file carried becomes as one from a file
    of = {part: [rank[part] for rank in read] for part in read[0]}
    transformer = walk260.assemble(of["transformer"])
    wider = [[rank["transformer"] for rank in team] for team in (four, eight)]
    transformer |= played260.assemble(of["transformer"], wider, transformer["runs"])
    walkthroughs = {
        # Kernels are chosen by processor, and the last bits of a sum with them.
        "made": {
            "torch": str(torch.__version__),
            "cpu": torch.backends.cpu.get_cpu_capability(),
            "processor": processor.kind(),
        },
        "transformer": transformer,
        "four": walk4.assemble(of["four"]),
        "layers": walk_layers.assemble(of["layers"])
        | {"profile": profile.assemble([rank["profile"] for rank in four])},
        "runs": walk_runs.assemble([rank["runs"] for rank in four]) + walk_tiers.assemble(of["tiers"]),
        "faults": faults260.record(),
        "overview": overview.assemble(transformer, of["transformer"]),
        "texts": {letter: text(letter).json() for letter in "ABCDE"},
    }
    return document(walkthroughs=walkthroughs, run=None)


CAPTURES = {RANKS: capture, PROFILED: profiled, WIDEST: widest}  # by the number of ranks that each is run on


def written(document: dict[str, Any]) -> str:
    """Write a document so that its diffs can be read: one line for every list of numbers or words, and every key."""
    return _lines(document, "") + "\n"


def _lines(value: Any, indent: str) -> str:
    inner = indent + " "
    whole = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    if len(whole) <= 120 or not isinstance(value, (dict, list)):
        return whole
    if isinstance(value, dict):
        parts = [f"{json.dumps(key, ensure_ascii=False)}:{_lines(part, inner)}" for key, part in value.items()]
        return "{\n" + ",\n".join(inner + part for part in parts) + "}"
    if not any(isinstance(part, (dict, list)) for part in value):
        return whole
    return "[\n" + ",\n".join(inner + _lines(part, inner) for part in value) + "]"


def main() -> int:
    captured: list[list[dict[str, Any]]] = []
    for ranks in CAPTURES:
        with tempfile.TemporaryDirectory(prefix="zeroshard-explain-") as folder:
            if code := launch.start_ranks([folder], ranks, "walkthroughs.build"):
                return code
            files = [Path(folder) / f"rank{rank}.json" for rank in range(ranks)]
            captured.append([json.loads(file.read_text("utf-8")) for file in files])
    TARGET.write_text(written(assemble(*captured)), encoding="utf-8")
    print(f"{TARGET}: {TARGET.stat().st_size:,} bytes")
    return 0


def capture_rank(folder: str) -> None:
    """Run one rank, started by `main`."""
    place = Launch.from_environment()
    if place is None or place.ranks not in CAPTURES:
        raise InputError("a folder is given to the ranks that `python -m walkthroughs.build` starts; run that")
    launch.end_at_once_when_told(launched=True)
    launch.alone(_capture, Path(folder), place)


def _capture(folder: Path, place: Launch) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    captured = json.dumps(CAPTURES[place.ranks](), allow_nan=False)
    (folder / f"rank{place.rank}.json").write_text(captured, encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) == 2:
        capture_rank(sys.argv[1])
    else:
        sys.exit(main())
