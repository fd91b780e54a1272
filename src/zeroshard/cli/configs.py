"""`zeroshard plan --config` and `--export`: settings of DeepSpeed's and Accelerate's, as a plan's, and back."""

from __future__ import annotations

import sys
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch

from zeroshard.cli.config import PLACED, places, planned_offload
from zeroshard.cli.policies import given_of, precision_of
from zeroshard.integrations.config_export import SYSTEMS, export
from zeroshard.integrations.settings import Settings, settings
from zeroshard.planner.options import ARGUMENTS
from zeroshard.planner.recipes import recipe
from zeroshard.policies.comm import Comm
from zeroshard.policies.layout import Layout
from zeroshard.policies.precision import Precision

WORDS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "bf16"}  # fp16 has as many bytes as bf16


def _word(precision: Precision | None, field: str) -> str | None:
    dtype: torch.dtype | None = getattr(precision, field, None)
    return None if dtype is None else WORDS.get(dtype)


def say(line: str) -> None:
    """Print a line on standard error: the answer itself may go into a file or another program."""
    print(f"zeroshard: {line}", file=sys.stderr)


def configured(path: str, options: dict[str, Any], given: Collection[str]) -> Settings:
    """Fill in the options that a config answers and that were not `given`; say what a plan leaves out."""
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
        if where != "device" and "offload" not in given:
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
        say(f"{path}: {note}")
    return found


def show_export(system: str, options: dict[str, Any], found: Settings | None, given: Collection[str]) -> None:
    """Print the other system's config on standard output, and a line for what it cannot say on standard error."""
    text, unsaid = export(system, _settings(options, found or Settings({}, {}, [], {}), given))
    print(text, end="")
    for line in unsaid:
        say(line)


def _settings(options: dict[str, Any], found: Settings, given: Collection[str]) -> Settings:
    """Return what is planned as arguments of `shard`: a config's settings, and those that options override."""
    shard: dict[str, Any] = {**found, "stage": 3 if options["stage"] is None else options["stage"]}
    asked = {name: value for name, value in options.items() if value is not False}  # a flag that is not given
    layout = _fields(found.get("layout")) | given_of("Layout", asked)
    comm = _fields(found.get("comm")) | given_of("Comm", asked)
    shard |= {name: True for name in ARGUMENTS if options[name]}
    offload = planned_offload(places(options["offload"], **{what: options[f"offload_{what}"] for what in PLACED}))
    if offload is not None:
        path = getattr(found.get("offload"), "path", None)
        fields = _fields(offload)
        shard["offload"] = type(offload)(**fields | ({"path": path} if path and fields["path"] else {}))
    else:
        shard.pop("offload", None)
    if "precision" not in found or {"precision", "grad_dtype", "preset", "bytes"} & set(given):
        shard["precision"] = _precision(options)
    loop = {**found.loop, "ranks": options["ranks"]}
    if options["accumulate"] > 1:
        loop["accumulate"] = options["accumulate"]
    if loop["ranks"] == 1 and "ranks" not in found.loop and "ranks" not in given:
        del loop["ranks"]
    return Settings({**shard, "layout": Layout(**layout), "comm": Comm(**comm)}, loop, [], {})


def _fields(policy: Any) -> dict[str, Any]:
    return {} if policy is None else dict(vars(policy))


def _precision(options: dict[str, Any]) -> Precision:
    """Make the `Precision` of a job by --precision, that of a number or shapes by their recipe's bytes."""
    made = precision_of(options["precision"], options["grad_dtype"], options.get("fp8")) or Precision()
    param = made.param_dtype
    if options["precision"] is None and (options["params"] is not None or options["shapes"] is not None):
        default = "zeroshard"
        chosen = recipe(options["preset"] or default, optimizer=options["optimizer"], custom=options["bytes"])
        half = torch.float16 if "fp16" in chosen.name else torch.bfloat16
        param = half if chosen.parameters == 2 else None
    return replace(made, param_dtype=param, cast_inputs=False)


__all__ = ["SYSTEMS", "configured", "show_export"]
