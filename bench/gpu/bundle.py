"""All that the steps have left, as one page of Markdown and one tar."""

from __future__ import annotations

import json
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .. import report
from .record import FAILED, MEASURED

PAGE = "gpu.md"
LINE = 300  # characters of what a row has found


def results(folder: Path) -> list[dict[str, Any]]:
    """By step."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("[0-9][0-9]-*.json"))]
    return [each for each in found if each]


def write(folder: Path) -> str:
    """Returns what to say of it. The tar has its time in its name, so that a later run leaves it."""
    page, tar = folder / PAGE, folder / f"gpu-{time.strftime('%Y%m%d-%H%M%S')}.tar.gz"
    page.write_text("\n".join(_page(results(folder))) + "\n")
    with tarfile.open(tar, "w:gz") as archive:
        for path in sorted(folder.iterdir()):
            if path.is_file() and not path.name.endswith((".part", ".tar.gz")):
                archive.add(path, arcname=f"gpu/{path.name}")
    return f"{page}, and all of it in {tar}"


def _page(found: list[dict[str, Any]]) -> Iterator[str]:
    kinds = sorted({f"{each['devices']} x {each['device']}" for each in found})
    yield f"# On {', '.join(kinds)}, {time.strftime('%Y-%m-%d %H:%M')}\n"
    if found:
        rows = [
            {"step": each["step"], "name": each["name"], "verdict": each["verdict"], "seconds": each["seconds"],
             "cases": len(each["rows"]), "failed": sum(row["verdict"] == FAILED for row in each["rows"]),
             "decides": each["decides"]}
            for each in found
        ]  # fmt: skip
        yield report.table(rows)
    for each in found:
        told = [row for row in each["rows"] if row["verdict"] in (FAILED, MEASURED)]
        if told or "output" in each:
            yield f"\n## {each['step']} {each['name']}: {each['asks']}\n"
        yield from (f"- {row['verdict']}: {row['case']}: {_short(row['found'], row['verdict'])}" for row in told)
        if "output" in each:
            yield f"- {each['ended']}: {_short(each['output'], FAILED)}"


def _short(found: Any, verdict: str) -> str:
    """In one line: of an error its end, of numbers their beginning, of a tool's lines how many there are."""
    if isinstance(found, list):
        return f"{len(found)} lines"
    text = " ".join((found if isinstance(found, str) else json.dumps(found)).split())
    return text[-LINE:] if verdict == FAILED else text[:LINE]
