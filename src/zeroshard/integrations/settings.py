"""`zeroshard.settings(config)`: arguments of `shard`, read from a config of DeepSpeed's or Accelerate's.

The file is read as data, JSON or YAML, and nothing in it is executed. `config_keys` says what becomes of each key.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..errors import UserError, check_local, nearest
from ..policies.comm import Comm
from ..policies.layout import Layout
from ..policies.offload import Offload
from ..policies.precision import Precision
from .config_keys import ACCELERATE, DEEPSPEED
from .config_values import AUTO, Draft, Key

LIMIT = 1 << 20  # bytes of a config
POLICIES = {"precision": Precision, "offload": Offload, "layout": Layout, "comm": Comm}
YAML = {".yaml", ".yml"}
OF_ACCELERATE = {"compute_environment", "distributed_type", "fsdp_config", "deepspeed_config", "num_processes"}


class Settings(dict[str, Any]):
    """Keyword arguments of `shard`, as `settings` returns them. Only what the config decides is in it.

    shard: {argument of `shard`: value}.
    loop: what the training loop does itself, as far as the config says: `accumulate`, `clip`, `micro_batch`, `batch`,
        `optimizer` and `scheduler` (a name and arguments), `autocast` (a dtype), `scaler` (arguments of a
        `torch.amp.GradScaler`), `loss_scale`, `ranks`, `machines`.
    notes: one line for each key that a trainer fills in ("auto"), or that is taken in another way than it says.
    ignored: {key: why nothing becomes of it}.

    Examples:
        >>> zeroshard.settings({"zero_optimization": {"stage": 2}})["stage"]
        2
    """

    def __init__(
        self, shard: Mapping[str, Any], loop: dict[str, Any], notes: list[str], ignored: dict[str, str]
    ) -> None:
        super().__init__(shard)
        self.loop, self.notes, self.ignored = loop, notes, ignored


def settings(config: str | os.PathLike[str] | Mapping[str, Any]) -> Settings:
    """Read the stage and policies that a config of DeepSpeed's or Accelerate's asks for, for `shard`.

    config: a file (DeepSpeed's JSON; Accelerate's YAML or JSON, with its section for FSDP or DeepSpeed), or what one
        holds, as a dict.

    Every key is mapped, ignored for a reason, or refused: `UserError` names the key, and what to write instead. What
    the loop does itself, such as clipping, is in `.loop`; read it there, or your loop does not do it. Reading executes
    nothing; YAML needs PyYAML (the extra `yaml`, or `hf`). Raises `UserError` too for what is no config.

    Examples:
        >>> settings = zeroshard.settings({"zero_optimization": {"stage": 2}, "gradient_clipping": 1.0})
        >>> settings.loop
        {'clip': 1.0}
        >>> zero = zeroshard.shard(model, optimizer, **settings)
    """
    if isinstance(config, Mapping):
        return _read("the config", dict(config))
    if not isinstance(config, (str, os.PathLike)):
        raise UserError(
            "settings() takes a config: a file, or what one holds", expected="a path or a dict", got=repr(config)[:200],
            instead='zeroshard.settings("ds_config.json")',
        )  # fmt: skip
    return _read(os.fspath(config), _content(Path(config)))


def _content(path: Path) -> dict[str, Any]:
    check_local(path)
    try:
        if path.stat().st_size > LIMIT:
            raise UserError("this is too long for a config", where=str(path), expected=f"at most {LIMIT:,} bytes")
        words = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError("a config cannot be read", where=str(path), got=error) from error
    found = _yaml(path, words) if path.suffix.lower() in YAML else _json(path, words)
    if not isinstance(found, dict):
        raise UserError("a config is a map of keys and values", where=str(path), got=type(found).__name__)
    return found


def _json(path: Path, words: str) -> Any:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        if twice := [key for key in dict.fromkeys(keys) if keys.count(key) > 1]:
            raise UserError("a key is there twice", where=str(path), got=twice[0], instead="one of the two")
        return dict(pairs)

    try:
        return json.loads(words, object_pairs_hook=once)
    except (json.JSONDecodeError, RecursionError) as error:
        instead = "JSON without comments; a YAML file ends in .yaml"
        raise UserError("a config is not JSON", where=str(path), got=error, instead=instead) from error


def _yaml(path: Path, words: str) -> Any:
    try:
        import yaml  # type: ignore[import-untyped, unused-ignore]
    except ModuleNotFoundError as error:
        instead = "pip install pyyaml, or the same settings as a .json file"
        raise UserError("a YAML file needs PyYAML", where=str(path), instead=instead) from error
    try:
        return yaml.safe_load(words)
    except (yaml.YAMLError, RecursionError) as error:
        raise UserError("a config is not plain YAML", where=str(path), got=error) from error


def _read(where: str, content: dict[str, Any]) -> Settings:
    draft, ignored = Draft(where), {}
    accelerate = bool(OF_ACCELERATE & content.keys())
    if not accelerate and isinstance(content.get("zero_optimization"), bool):  # an old spelling
        content = {**content, "zero_optimization": {"stage": int(content["zero_optimization"])}}
    table, kind = (ACCELERATE, "Accelerate") if accelerate else (DEEPSPEED, "DeepSpeed")
    draft.facts["kind"] = "none" if accelerate else "deepspeed"
    ignored.update(_walk(draft, table, kind, content))
    if (file := draft.facts.pop("file", None)) not in (None, "none"):  # named in Accelerate's config
        inner = _content(Path(file))
        draft.where = file
        ignored.update(_walk(draft, DEEPSPEED, "DeepSpeed", inner))
    return _finish(draft, ignored)


def _walk(
    draft: Draft, table: Mapping[str, Key], kind: str, content: Mapping[str, Any], into: str = ""
) -> dict[str, str]:
    """Take every key; returns {key: why} of those ignored."""
    ignored: dict[str, str] = {}
    for word, value in content.items():
        key = f"{into}{word}"
        entry = table.get(key)
        if entry is None and any(known.startswith(f"{key}.") for known in table):
            if isinstance(value, Mapping):
                ignored |= _walk(draft, table, kind, value, f"{key}.")
            elif value is not None:
                raise UserError("a section is a map", where=f"{key} in {draft.where}", got=repr(value)[:200])
        elif entry is None:
            known = [each[len(into) :].split(".")[0] for each in table if each.startswith(into)]
            close = nearest(word, dict.fromkeys(known)).partition(" (one of")[0]
            raise UserError(
                f"no key of {kind}'s that is known here", where=draft.where, got=key,
                instead=close if close.startswith("did you") else "leave it out",
            )  # fmt: skip
        elif entry.how == "ignored":
            ignored[key] = entry.says
        elif value == AUTO and entry.auto:
            draft.notes.append(f'{key} is "auto": the trainer fills it in, and nothing is read here')
        elif value == AUTO and entry.how == "mapped":
            raise UserError(
                'a key is "auto", and no trainer fills it in', where=f"{key} in {draft.where}", instead="its value"
            )
        elif entry.take is not None:
            entry.take(draft, key, value)
    return ignored


# --- what keys say together -------------------------------------------------------------------------------------------


def _finish(draft: Draft, ignored: dict[str, str]) -> Settings:
    facts = draft.facts
    _stages(draft)
    _precision(draft)
    _offload(draft)
    _buckets(draft)
    _units(draft)
    for name in ("optimizer", "scheduler"):
        if kind := facts.get(f"{name}_type"):
            draft.loop[name] = {"type": kind, **facts.get(f"{name}_params", {})}
    shard: dict[str, Any] = {} if draft.stage is None else {"stage": draft.stage}
    for name, kind in POLICIES.items():
        if draft.policies[name]:
            shard[name] = kind(**draft.policies[name])
    return Settings(shard, draft.loop, draft.notes, ignored)


def _stages(draft: Draft) -> None:
    facts, comm = draft.facts, draft.policies["comm"]
    draft.stage = {"deepspeed": facts.get("stage", 0), "fsdp": 3}.get(facts["kind"], 0)
    if facts["kind"] == "fsdp":
        draft.stage, releases, per_machine = facts.get("strategy", (3, True, False))
        if not releases:
            comm["release_after_forward"] = False
        machines = draft.loop.get("machines", 1)
        if per_machine and machines > 1:
            comm["replicas"] = machines
    elif "strategy" in facts or "classes" in facts:
        raise UserError(
            "a section for FSDP, and another kind of run", where=draft.where, instead="distributed_type: FSDP"
        )
    if facts.get("replicas", 1) > 1:
        comm["replicas"] = facts["replicas"]


def _precision(draft: Draft) -> None:
    facts, precision = draft.facts, draft.policies["precision"]
    low = {torch.bfloat16: facts.get("bf16"), torch.float16: facts.get("fp16")}
    mixed = facts.get("mixed")
    if mixed is not None and facts["kind"] == "deepspeed":
        low[mixed] = True
    elif mixed is not None and facts["kind"] == "fsdp":
        low[mixed] = True
        precision.update(reduce_dtype=mixed, cast_inputs="units")
    elif mixed is not None:
        draft.loop["autocast"] = mixed
    chosen = [dtype for dtype, on in low.items() if on]
    if len(chosen) > 1:
        raise UserError("bf16 and fp16 are both switched on", where=draft.where, instead="one of the two")
    for dtype in chosen:
        precision.setdefault("param_dtype", dtype)
        if facts.get("low_masters"):
            precision.update(master_dtype=dtype, grad_dtype=precision.get("grad_dtype", dtype))
    if facts.get("low_states") and not (chosen and facts.get("low_masters")):
        raise UserError(
            "an optimizer's states have the dtype of its masters", where=f"bf16_optimizer_states in {draft.where}",
            expected="bf16_master_weights_and_grads: true", got="fp32 masters", instead="leave it out",
        )  # fmt: skip
    if chosen and facts.get("low_masters") and facts.get("low_states") is False:
        draft.notes.append("the optimizer's states are in the dtype of its masters, which is the lower one")
    if facts.get("fp16_casts") and chosen == [torch.float16]:
        precision["cast_inputs"] = True
    if torch.float16 in (*chosen, draft.loop.get("autocast")):
        _scaler(draft)
    if facts.get("autocast"):
        draft.loop["autocast"] = facts.get("autocast_dtype", torch.bfloat16)


def _scaler(draft: Draft) -> None:
    if scale := draft.facts.get("loss_scale"):
        draft.loop["loss_scale"] = scale
        return
    found = {"init_scale": 2.0 ** draft.facts.get("scale_power", 16), "growth_interval": 2000}
    if draft.facts["kind"] == "deepspeed":
        found["growth_interval"] = draft.facts.get("scale_window", 1000)
    draft.loop["scaler"] = found


def _offload(draft: Draft) -> None:
    facts, offload = draft.facts, draft.policies["offload"]
    if facts.get("all"):
        offload.update(parameters="cpu", gradients="cpu", optimizer="cpu")
        return
    for state in ("parameters", "optimizer"):
        tier = facts.get(state, "device")
        if tier != "device":
            offload[state] = tier
            if state == "optimizer":  # DeepSpeed brings gradients to the host, too, for the step there
                offload["gradients"] = "cpu"
        if tier == "nvme":
            path = facts.get(f"{state}_path")
            if not path:
                raise UserError(
                    f"{state} rest in files, and no folder is named", where=draft.where, instead="nvme_path"
                )
            if offload.setdefault("path", path) != path:
                raise UserError(
                    "states rest in two folders", where=draft.where, expected="one", got=[offload["path"], path],
                    instead="one nvme_path for both; each rank makes a folder of its own in it",
                )  # fmt: skip
    if (ratio := facts.get("ratio", 1.0)) < 1 and offload.get("optimizer") == "cpu":
        offload["optimizer"] = ratio


def _buckets(draft: Draft) -> None:
    given = [draft.facts[name] for name in ("reduce_elements", "gather_elements") if draft.facts.get(name)]
    if given:
        dtype = draft.policies["precision"].get("param_dtype", torch.float32)
        draft.policies["layout"]["bucket_mib"] = min(given) * dtype.itemsize / (1 << 20)


def _units(draft: Draft) -> None:
    wrap, classes = draft.facts.get("wrap"), draft.facts.get("classes")
    if classes and wrap in (None, "TRANSFORMER_BASED_WRAP"):
        draft.policies["layout"]["units"] = classes
    elif wrap == "NO_WRAP":
        draft.policies["layout"]["units"] = []
