"""`zeroshard train --resume`: the settings that a run goes on with. No torch, so that bad input is answered at once.

A checkpoint of `zeroshard train` keeps its run's settings. What decides the losses stays as it was, and an option that
says otherwise is refused: the model's size, the data, the seed, the batch, the rate, the precision, what gradients are
added up in and sent as. What must not change a bit may change: ranks, replicas, over which ranks the optimizer is
sharded, stage, device, where files go. So may the number of steps, which the learning rate falls over: that is said.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zeroshard.cli.config import PLACED, InputError

CHECKPOINTS = "checkpoints"  # in a run's folder
MANIFEST = "manifest.json"
FIXED = ("size", "precision", "grad_dtype", "reduce", "batch", "lr", "seed")
KEPT = ("stage", "steps", "save_every", "keep", "data", "recompute")  # unless given anew
ALIKE = {"bf16", "bf16-split"}  # precisions of the same bits
TIERS = tuple(f"offload_{what}" for what in PLACED)  # and these


def run_of(resume: str) -> Path | None:
    """Find the run's folder that --resume names or that its checkpoint lies in."""
    path = Path(resume)
    if (path / CHECKPOINTS).is_dir():
        return path
    return path.absolute().parent.parent if path.absolute().parent.name == CHECKPOINTS else None


def read(resume: str) -> dict[str, Any]:
    """Read the settings in a checkpoint, or in the newest one of a run that has any."""
    path = Path(resume)
    if (path / MANIFEST).exists():
        found = [path]
    elif (path / CHECKPOINTS).is_dir():
        found = [each for each in (path / CHECKPOINTS).iterdir() if (each / MANIFEST).exists()]
    else:
        what = "neither a run with checkpoints nor a checkpoint" if path.is_dir() else "no such folder"
        raise InputError(
            f"--resume {resume}: {what}; expected the RUN_DIR of zeroshard train, or RUN_DIR/checkpoints/..."
        )
    readable = [settings for each in found if (settings := _settings(each)) is not None]
    if not readable:
        raise InputError(f"--resume {resume}: no checkpoint of zeroshard train in it that can be read")
    return max(readable, key=lambda each: each[0])[1]


def _settings(folder: Path) -> tuple[tuple[int, int], dict[str, Any]] | None:
    """Return (key to sort by age, train's settings); None if unreadable. Ranks check every byte as they load it."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["manifest"]
        settings: dict[str, Any] = _unplain(dict(manifest["extra"]["map"])["run"])
        return ((int(manifest.get("number", 0)), int(manifest["saved"])), settings) if int(settings["step"]) else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _unplain(told: Any) -> Any:
    """Rebuild dicts and lists from a manifest's {"map": [[key, value], ...]} and {"list": [...]}."""
    if not isinstance(told, dict):
        return told
    ((kind, inner),) = told.items()
    return {key: _unplain(each) for key, each in inner} if kind == "map" else [_unplain(each) for each in inner]


def merge(resume: str, options: Mapping[str, Any], given: frozenset[str], ranks: int | None) -> dict[str, Any]:
    """Merge the stopped run's settings with those `given`. ranks: those of torchrun or of --ranks; None: as before."""
    before: dict[str, Any] = {"grad_dtype": "fp32", "reduce": "ordered", "recompute": False} | read(resume)
    for name in FIXED:
        if name in given and not {options[name], before[name]} <= ALIKE and options[name] != before[name]:
            option = f"--{name.replace('_', '-')}"
            raise InputError(
                f"{option} {options[name]}: the run in {resume} has {before[name]}; leave {option} out to go on with "
                f"it, or start a new run without --resume"
            )
    settled = {**options, **{name: before[name] for name in FIXED}}
    settled["precision"] = options["precision"] if "precision" in given else before["precision"]
    settled |= {name: before[name] for name in KEPT if name not in given}
    settled["data"] = tuple(settled["data"])
    settled |= {name: before.get(name, "") for name in (*TIERS, "offload_path") if name not in given}
    if "offload_path" not in given and "nvme" not in {settled[name] for name in TIERS}:
        settled["offload_path"] = ""
    settled["ranks"] = before["ranks"] if ranks is None else ranks
    if "replicas" not in given:
        kept = 1 if options.get("hosts", 1) > 1 else before.get("replicas", 1)
        settled["replicas"] = 1 if settled["ranks"] % kept else kept
    if "hosts" not in given:
        kept = 1 if settled["replicas"] > 1 else before.get("hosts", 1)
        settled["hosts"] = 1 if settled["ranks"] % kept else kept
    if "optimizer_over" not in given:
        settled["optimizer_over"] = before.get("optimizer_over", "team") if settled["stage"] else "team"
    if "accumulate" not in given:
        every = before["ranks"] * before["accumulate"]
        settled["accumulate"] = before["accumulate"] if every % settled["ranks"] else every // settled["ranks"]
    if "out" not in given and (run := run_of(resume)) is not None:
        settled["out"] = str(run)
    return settled
