"""`zeroshard plan --config`: settings of DeepSpeed's and Accelerate's, as a plan's options."""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Any

import torch

from zeroshard.cli.config import PLACED
from zeroshard.integrations.settings import settings
from zeroshard.policies.comm import Comm
from zeroshard.policies.layout import Layout
from zeroshard.policies.precision import Precision

WORDS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "bf16"}  # fp16 has as many bytes as bf16


def _word(precision: Precision | None, field: str) -> str | None:
    dtype: torch.dtype | None = getattr(precision, field, None)
    return None if dtype is None else WORDS.get(dtype)


def configured(path: str, options: dict[str, Any], given: Collection[str]) -> None:
    """Fill in the options that a config answers and that were not `given`; say on stderr what a plan leaves out."""
    found = settings(path)
    precision, layout, comm = found.get("precision"), found.get("layout") or Layout(), found.get("comm") or Comm()
    answers: dict[str, Any] = {
        "stage": found.get("stage"),
        "ranks": found.loop.get("ranks"),
        "accumulate": found.loop.get("accumulate"),
        "prefetch": comm.prefetch if comm.prefetch != 1 else None,
        "replicas": comm.replicas,
    }
    for what in PLACED:
        where = getattr(found.get("offload"), what, "device")
        if where not in ("device", None) and "offload" not in given:
            answers[f"offload_{what}"] = str(where)
    if options["params"] is None:
        answers["bucket_mib"] = layout.bucket_mib
    notes = list(found.notes)
    if options["job"] is not None:
        answers["precision"] = (
            "bf16-split" if getattr(precision, "split_master", False) else _word(precision, "param_dtype")
        )
        answers["grad_dtype"] = _word(precision, "grad_dtype")
        answers["checkpoint"] = layout.recompute is True or None
        if getattr(precision, "param_dtype", None) == torch.float16:
            notes.append("fp16 is planned as bf16, which has as many bytes")
    elif not {"preset", "bytes", "optimizer", "precision"} & set(given):
        unknown = any("16.enabled" in note for note in notes)
        answers["preset"] = "fp32" if precision is None and not unknown else None
    if not comm.release_after_forward:
        notes.append("planned as if weights were released after forward: at their peak there is more")
    kind = found.loop.get("optimizer", {}).get("type", "AdamW")
    if kind not in ("Adam", "AdamW") and options["job"] is None and "optimizer" not in given:
        notes.append(f"planned with two states of fp32, as of AdamW, and not {kind}: --optimizer says another")
    for name, value in answers.items():
        if value is not None and name not in given:
            options[name] = value
    for note in notes:
        print(f"zeroshard: {path}: {note}", file=sys.stderr)
