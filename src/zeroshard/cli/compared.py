"""Whether the bits of two runs of `zeroshard train` are equal: their losses, norms of gradients and weights."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from zeroshard.cli.config import InputError


def compared(one: Path, other: Path) -> dict[str, Any]:
    """Make a `Compared` of web/DATA.md from two runs' folders, beside the two recorded steps."""
    journals = [journal(run) for run in (one, other)]
    both = min(map(len, journals))
    first = next((at for at in range(both) if journals[0][at] != journals[1][at]), None)
    digests = [_digest(run) for run in (one, other)]
    return {
        "names": [str(one), str(other)],
        "steps": [len(journal) for journal in journals],
        "compared": both,
        "differs": None if first is None else {
            "step": first + 1, "losses": [journal[first][0] for journal in journals],
        },
        "weights": digests,
        "equal": first is None and len(journals[0]) == len(journals[1]) and digests[0] is not None
        and digests[0] == digests[1],
    }  # fmt: skip


def journal(run: Path) -> list[tuple[Any, Any]]:
    """Read (loss, gradient norm) of every step."""
    # JSON keeps every bit of a float: Python writes the shortest text that reads back as the same number.
    try:
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        return [(line["loss"], line["grad_norm"]) for line in lines]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{run}: its losses cannot be read ({error}); give a RUN_DIR of zeroshard train") from error


def _digest(run: Path) -> str | None:
    """Return the SHA-256 of a run's full weights; None where it has not ended."""
    path = run / "model.safetensors"
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else None


def verdict(found: dict[str, Any]) -> str:
    """Say in a sentence that the bits are equal, or what differs first."""
    if found["equal"]:
        return f"[bold green]The bits are equal:[/bold green] {found['compared']} losses and norms, and all weights."
    if found["differs"] is not None:
        a, b = found["differs"]["losses"]
        return f"[bold red]The bits differ[/bold red] from step {found['differs']['step']} on: losses {a} and {b}."
    if None in found["weights"]:
        return f"The bits of {found['compared']} losses and norms are equal; a run that has not ended has no weights."
    weights = "equal" if found["weights"][0] == found["weights"][1] else "different"
    steps = " and ".join(map(str, found["steps"]))
    return (
        f"{found['compared']} losses and norms are equal, the runs have {steps} steps, and the weights are {weights}."
    )
