"""A run that was recorded, read from its folder. Imports no torch, so that a page can be made anywhere."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import UserError
from .shape import check

CURVE_POINTS = 2_000
RECORDED, METRICS = "explain.json", "metrics.jsonl"  # in a run's folder
FORMAT, VERSION = "zeroshard-run", 3


def read(folder: Path) -> dict[str, Any]:
    """Read the `Run` that `record_step` wrote, with the curves of metrics.jsonl. Raises `UserError` for other files."""
    path = folder / RECORDED
    try:
        found = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except OSError as error:
        raise UserError(
            "there is no recorded step to explain",
            where=str(path),
            got=error.strerror,
            instead='a folder that `zeroshard train --out` wrote; in a program of yours zero.explain("page.html")',
        ) from error
    except (ValueError, RecursionError) as error:
        raise UserError("this is not a recorded step", where=str(path), got=str(error)) from error
    check(found, str(path), FORMAT, VERSION)
    run: dict[str, Any] = found["run"]
    run["curves"] = curves(_metrics(folder / METRICS)) if (folder / METRICS).exists() else None
    return run


def _metrics(path: Path) -> list[dict[str, Any]]:
    rows = []
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            if number == len(lines):  # the run is being written, or was killed while it wrote
                break
            raise UserError("a line of the metrics cannot be read", where=f"{path}, line {number}") from error
        if not isinstance(row, dict):
            raise UserError("a line of the metrics is not a step", where=f"{path}, line {number}", got=line[:40])
        rows.append(row)
    return rows


def _refuse_constant(word: str) -> float:
    raise ValueError(f"{word} is not a number of bytes or seconds")


def curves(metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Make columns of numbers, one row per step; of a long run evenly spaced rows, the first and the last included."""
    rows = [
        {key: value for key, value in row.items() if type(value) in (int, float)}
        for row in metrics
    ]  # fmt: skip
    columns = list(dict.fromkeys(key for row in rows for key in row))
    if not columns:
        return None
    kept, note = rows, None
    if len(rows) > CURVE_POINTS:
        last = len(rows) - 1
        kept = [rows[round(number * last / (CURVE_POINTS - 1))] for number in range(CURVE_POINTS)]
        note = f"{CURVE_POINTS:,} of {len(rows):,} steps"
    finite = [[_finite(row.get(column)) for column in columns] for row in kept]
    return {"columns": columns, "rows": finite, "note": note}


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
