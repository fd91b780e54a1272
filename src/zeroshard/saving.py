"""Saving: every rank writes what it owns, beside; rank 0 adds the manifest and publishes all of it, or nobody saves."""

from __future__ import annotations

import os
import platform
import shutil
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .checkpoint import Engine, options, persistent, pieces, rng_states, values
from .comm import Group
from .errors import CheckpointError, UserError
from .files import DTYPES, clean, publish, write_manifest, write_tensors
from .manifest import FORMAT, VERSION, plain

EXTRA = "extra"  # tensors among what the user saves along


def save(engine: Engine, path: str | os.PathLike[str], extra: Mapping[str, Any] | None) -> None:
    """Write a checkpoint at `path`, or leave everything as it is and raise on every rank."""
    target, group = Path(path).absolute(), engine.group
    outcome = group.describe({"token": uuid.uuid4().hex, "path": target.name})
    beside = target.parent / f".{target.name}.saving-{outcome[0]['token']}"
    facts: dict[str, Any] = {"problem": None}
    tensors: dict[str, Tensor] = {}
    told = None
    try:
        told = plain("extra", dict(extra or {}), tensors)
        if group.rank == 0:
            target.parent.mkdir(parents=True, exist_ok=True)
            clean(target.parent, target.name)
            beside.mkdir()
    except (OSError, UserError) as error:
        facts["problem"] = f"{error}"
    _agree(group, facts["problem"], target)
    try:
        facts |= _write_own(engine, beside, tensors)
    except (OSError, CheckpointError) as error:
        facts["problem"] = f"{error}"
    everyone = group.describe(facts)
    problems = [f"rank {rank}: {told['problem']}" for rank, told in enumerate(everyone) if told["problem"]]
    published = None
    if group.rank == 0 and not problems:
        try:
            write_manifest(beside, _manifest(engine, everyone, told))
            publish(beside, target)
        except (OSError, ValueError) as error:
            published = f"{error}"
    if group.rank == 0 and (problems or published):
        shutil.rmtree(beside, ignore_errors=True)
    _agree(group, "; ".join(problems) or published, target)


def _agree(group: Group, problem: str | None, target: Path) -> None:
    """Raise on every rank if one has a problem."""
    told = [f"rank {rank}: {each}" for rank, each in enumerate(group.describe(problem)) if each]
    if told:
        raise CheckpointError(
            "the checkpoint was not saved; the one before it and the training are as they were",
            where=str(target), got=told[0], instead="make room or name another folder, and save again",
        )  # fmt: skip


def _write_own(engine: Engine, beside: Path, extra: dict[str, Tensor]) -> dict[str, Any]:
    """This rank's file, and what the manifest has to say of it."""
    name = f"rank{engine.group.rank:05d}.safetensors"
    own = list(pieces(engine))
    tensors = {piece.key: piece.tensor for piece in own}
    buffers: dict[str, dict[str, Any]] = {}
    if engine.group.rank == 0:
        for key, tensor in persistent(engine.model):
            buffers[key] = {"file": name, "shape": list(tensor.shape), "dtype": DTYPES[tensor.dtype]}
            tensors[f"buffer/{key}"] = tensor
        tensors |= {f"{EXTRA}/{key}": tensor for key, tensor in extra.items()}
    written = write_tensors(beside / name, tensors)
    for key, entry in buffers.items():
        entry["offset"] = written.offsets[f"buffer/{key}"]
    return {
        "file": name,
        "nbytes": written.nbytes,
        "digests": written.digests,
        "fragments": [
            [*p[:4], DTYPES[p.tensor.dtype], list(p.tensor.shape), written.offsets[p.key]] for p in own
        ],
        "values": list(values(engine)),
        "buffers": buffers,
        "extra": [
            [key, list(t.shape), DTYPES[t.dtype], written.offsets[f"{EXTRA}/{key}"]] for key, t in extra.items()
        ] * (engine.group.rank == 0),
        "rng": rng_states(),
    }  # fmt: skip


def _manifest(engine: Engine, everyone: Sequence[dict[str, Any]], extra: Any) -> dict[str, Any]:
    fragments = [[*entry, told["file"]] for told in everyone for entry in told["fragments"]]
    return {
        "format": FORMAT,
        "version": VERSION,
        "ranks": engine.group.ranks,
        "stage": engine.stage,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "parameters": {
            record.name: {
                "shape": list(record.param.shape),
                "dtype": DTYPES[record.param.dtype],
                "names": record.names,
            }
            for record in engine.managed
        },
        "fragments": fragments,
        "values": [value for told in everyone for value in told["values"]],
        "files": {told["file"]: {"nbytes": told["nbytes"], "digests": told["digests"]} for told in everyone},
        "buffers": everyone[0]["buffers"],
        "optimizers": [options(binding) for binding in engine.bindings],
        "extra": extra,
        "extra_tensors": everyone[0]["extra"],
        "extra_file": everyone[0]["file"],
        "rng": [told["rng"] for told in everyone],
    }
