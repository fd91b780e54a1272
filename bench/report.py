"""A result as dated JSON and as a Markdown table, in bench/results/. `python -m bench.report` quotes it in docs/."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
QUOTED_CASE = {"model": "69M", "dtype": "bf16", "ranks": 2}
QUOTED = ("back-end", "over the limit", "CPU over the limit", "wire B/param", "peak B/param")
OPENING, CLOSING = "<!-- bench/results/train.json -->\n", "<!-- end -->\n"


def spread(values: Sequence[float]) -> str:
    """The median, with the least and the most."""
    return f"{statistics.median(values):.2f} [{min(values):.2f}, {max(values):.2f}]"


def machine() -> dict[str, Any]:
    with open("/proc/cpuinfo") as file:
        model = next((line.split(":")[1].strip() for line in file if line.startswith("model name")), platform.machine())
    return {"cpu": model, "cores": len(os.sched_getaffinity(0)), "torch": torch.__version__}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows of one set of keys as Markdown."""
    keys = list(rows[0])
    lines = [keys, ["---"] * len(keys), *([row[key] for key in keys] for row in rows)]
    return "\n".join("| " + " | ".join(f"{cell}" for cell in line) + " |" for line in lines)


def page(whole: dict[str, Any]) -> str:
    """What NAME.md says of all that is in NAME.json."""
    where = ", ".join(f"{value} {key}" if key == "cores" else f"{value}" for key, value in whole["machine"].items())
    notes = "\n".join(f"- {note}" for note in whole["notes"])
    return f"{whole['date']}, {where}.\n\n{table(whole['rows'])}\n\n{notes}\n"


def write(folder: Path, name: str, facts: dict[str, Any], rows: Sequence[dict[str, Any]], notes: Sequence[str]) -> None:
    """`name`.json with everything, and `name`.md with a table of `rows`, which is printed as well."""
    folder.mkdir(parents=True, exist_ok=True)
    whole = {"date": time.strftime("%Y-%m-%d"), "machine": machine(), **facts, "rows": rows, "notes": notes}
    (folder / f"{name}.json").write_text(json.dumps(whole, indent=2) + "\n")
    (folder / f"{name}.md").write_text(page(whole))
    print(page(whole))


def quote(page: str, rows: Sequence[dict[str, Any]]) -> str:
    """`page` with the columns QUOTED of one case among `rows` between the two comments."""
    rows = [row for row in rows if QUOTED_CASE.items() <= row.items()]
    before, _, rest = page.partition(OPENING)
    _, _, after = rest.partition(CLOSING)
    return before + OPENING + table([{key: row[key] for key in QUOTED} for row in rows]) + "\n" + CLOSING + after


if __name__ == "__main__":
    PAGE.write_text(quote(PAGE.read_text(), json.loads((RESULTS / "train.json").read_text())["rows"]))
