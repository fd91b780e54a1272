"""Export of our settings as a config of DeepSpeed's or Accelerate's, or as calls of FSDP2's.

What the other system cannot say is listed field by field: every field that an exporter does not take is reported.
"""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import torch

from ..errors import UserError
from ..layout.partition import BUCKET_MIB
from .config_values import DTYPES
from .settings import Settings, sections

SYSTEMS = ("deepspeed", "accelerate", "fsdp2")
ALL_CPU = {"parameters": "cpu", "gradients": "cpu", "optimizer": "cpu"}


class _Told:
    """Settings that an exporter takes one by one, and those that it has left."""

    def __init__(self, found: Settings) -> None:
        self.stage = found.get("stage", 3)
        self.loop = dict(found.loop)
        self.early = bool(found.get("optimizer_in_backward"))
        self.unsaid: list[str] = []
        self._left: dict[tuple[str, str], tuple[Any, Any]] = {}
        for name, policy in sections(found):
            defaults = type(policy)()
            for field in dataclasses.fields(policy):
                self._left[name, field.name] = getattr(policy, field.name), getattr(defaults, field.name)

    def see(self, policy: str, field: str) -> Any:
        return self._left[policy, field][0]

    def say(self, policy: str, field: str) -> Any:
        """Return a field's value, which counts as exported from now on."""
        value, _ = self._left[policy, field]
        self._left[policy, field] = value, value
        return value

    def rest(self, system: str) -> list[str]:
        """List in words what the export cannot say: fields that were not taken, and notes of the exporter."""
        left = [(key, value) for key, (value, default) in self._left.items() if value != default]
        fields = [f"{policy.capitalize()}({field}={value!r})" for (policy, field), value in left]
        fields += ["optimizer_in_backward=True"] * self.early
        loop = [f"{name} {value!r}, which the loop does" for name, value in self.loop.items()]
        return [*(f"{each}: {system} has no word for it" for each in (*fields, *loop)), *self.unsaid]


def export(system: str, found: Settings) -> tuple[str, list[str]]:
    """Return (the text of a config, or of a program; what it cannot say, a line each)."""
    told = _Told(found)
    if system == "deepspeed":
        return json.dumps(_deepspeed(told), indent=2) + "\n", told.rest("DeepSpeed")
    if system == "accelerate":
        return _yaml(_accelerate(told)), told.rest("Accelerate's config")
    if system == "fsdp2":
        return _fsdp2(told), told.rest("fully_shard")
    raise UserError("no system that is known here", got=repr(system), expected=", ".join(SYSTEMS))


def _word(dtype: torch.dtype) -> str:
    return DTYPES[dtype][0] if dtype in DTYPES else str(dtype)


# --- DeepSpeed --------------------------------------------------------------------------------------------------------


def _deepspeed(told: _Told) -> dict[str, Any]:
    itemsize = (told.see("precision", "param_dtype") or torch.float32).itemsize
    elements = round((told.say("layout", "bucket_mib") or BUCKET_MIB) * (1 << 20) / itemsize)
    zero: dict[str, Any] = {"stage": told.stage, "overlap_comm": told.say("comm", "overlap")}
    zero |= {"reduce_bucket_size": elements, "allgather_bucket_size": elements}
    if told.stage == 3 and told.see("comm", "prefetch") == 0:
        zero["stage3_prefetch_bucket_size"] = told.say("comm", "prefetch")
    for key, device, path, ratio in _tiers(told):
        zero[key] = {"device": device, **({"nvme_path": path} if path else {}), **({"ratio": ratio} if ratio else {})}
    config: dict[str, Any] = {"zero_optimization": zero}
    _low(told, config)
    for ours, theirs in (("micro_batch", "train_micro_batch_size_per_gpu"), ("batch", "train_batch_size"),
                         ("accumulate", "gradient_accumulation_steps")):  # fmt: skip
        if ours in told.loop:
            config[theirs] = told.loop.pop(ours)
    if not {"train_micro_batch_size_per_gpu", "train_batch_size"} & config.keys():
        config["train_micro_batch_size_per_gpu"] = 1
        told.unsaid.append("the micro-batch is not known, and DeepSpeed wants one: train_micro_batch_size_per_gpu is 1")
    config["gradient_clipping"] = told.loop.pop("clip", 0.0)
    for name in ("optimizer", "scheduler"):
        if name in told.loop:
            options = dict(told.loop.pop(name))
            config[name] = {"type": options.pop("type"), "params": options}
    if "autocast" in told.loop:
        config["torch_autocast"] = {"enabled": True, "dtype": _word(told.loop.pop("autocast"))}
    for name in ("ranks", "machines"):
        if name in told.loop:
            told.unsaid.append(f"{name}: {told.loop.pop(name)}, which the launcher says")
    return config


def _low(told: _Told, config: dict[str, Any]) -> None:
    param = told.see("precision", "param_dtype")
    masters = param is not None and told.see("precision", "master_dtype") == param == told.see(
        "precision", "grad_dtype"
    )
    if param in (torch.bfloat16, torch.float16):
        told.say("precision", "param_dtype")
        word = _word(param)
        config[word] = {"enabled": True}
        if masters:
            told.say("precision", "master_dtype"), told.say("precision", "grad_dtype")
            config[word][f"{word}_master_weights_and_grads"] = True
            if word == "bf16":
                config[word]["bf16_optimizer_states"] = True
        if word == "bf16" and told.see("precision", "nonfinite") != "raise":
            config[word]["check_grad_overflow"] = told.say("precision", "nonfinite") == "skip"
        if word == "fp16":
            config[word]["auto_cast"] = told.see("precision", "cast_inputs") is True
            if config[word]["auto_cast"]:
                told.say("precision", "cast_inputs")
            config[word] |= _scale(told)
    for field, key in (("reduce_dtype", "communication_data_type"), ("grad_dtype", "data_types")):
        dtype = told.see("precision", field)
        if dtype in DTYPES and not (masters and field == "grad_dtype"):
            told.say("precision", field)
            config[key] = _word(dtype) if field == "reduce_dtype" else {"grad_accum_dtype": _word(dtype)}


def _scale(told: _Told) -> dict[str, Any]:
    if scale := told.loop.pop("loss_scale", None):
        return {"loss_scale": scale}
    scaler = told.loop.pop("scaler", {"init_scale": 2.0**16, "growth_interval": 1000})
    power = math.log2(scaler["init_scale"])
    return {"loss_scale": 0, "initial_scale_power": power, "loss_scale_window": scaler["growth_interval"]}


def _tiers(told: _Told) -> list[tuple[str, str, Any, Any]]:
    """List (key, device, folder, ratio) of what DeepSpeed can move; note what it does otherwise."""
    found: list[tuple[str, str, Any, Any]] = []
    optimizer, gradients = told.see("offload", "optimizer"), told.see("offload", "gradients")
    if optimizer in ("cpu", "nvme") or (isinstance(optimizer, (int, float)) and 0 < optimizer <= 1):
        told.say("offload", "optimizer")
        if gradients == "cpu":
            told.say("offload", "gradients")
        elif gradients == "device":
            told.unsaid.append("gradients on the device: DeepSpeed takes them to host memory with the optimizer")
        ratio = None if isinstance(optimizer, str) else float(optimizer)
        device = optimizer if isinstance(optimizer, str) else "cpu"
        found.append(("offload_optimizer", device, told.say("offload", "path") if device == "nvme" else None, ratio))
    if told.stage == 3 and (device := told.see("offload", "parameters")) in ("cpu", "nvme"):
        told.say("offload", "parameters")
        found.append(("offload_param", device, told.say("offload", "path") if device == "nvme" else None, None))
    return [(key, device, None if path is None else str(path), ratio) for key, device, path, ratio in found]


# --- Accelerate -------------------------------------------------------------------------------------------------------


def _accelerate(told: _Told) -> dict[str, Any]:
    """Choose FSDP at stage 3, DeepSpeed where FSDP has no word for the stage or the tiers, and DDP at stage 0."""
    config: dict[str, Any] = {"compute_environment": "LOCAL_MACHINE"}
    tiers = {state: told.see("offload", state) for state in ALL_CPU}
    moved = {state for state, tier in tiers.items() if tier != "device"}
    if told.stage == 3 and (not moved or tiers == ALL_CPU):
        config |= {"distributed_type": "FSDP", "mixed_precision": _mixed(told, "fsdp"), "fsdp_config": _fsdp(told)}
    elif told.stage == 0 and not moved:
        config |= {"distributed_type": "MULTI_GPU", "mixed_precision": _mixed(told, "ddp")}
    else:
        section: dict[str, Any] = {"zero_stage": told.stage}
        for key, device, path, ratio in _tiers(told):
            section[f"{key}_device"] = device
            if path:
                section[f"{key}_nvme_path"] = path
            if ratio not in (None, 1.0):
                told.unsaid.append(f"{ratio} of the optimizer in host memory: all of it is")
        for ours, theirs in (("accumulate", "gradient_accumulation_steps"), ("clip", "gradient_clipping")):
            if ours in told.loop:
                section[theirs] = told.loop.pop(ours)
        mixed = _mixed(told, "deepspeed")
        config |= {"distributed_type": "DEEPSPEED", "mixed_precision": mixed, "deepspeed_config": section}
    ranks = told.loop.pop("ranks", None)
    if (replicas := told.see("comm", "replicas")) and ranks and config["distributed_type"] == "FSDP":
        told.say("comm", "replicas")
        sizes = {"dp_replicate_size": replicas, "dp_shard_size": ranks // replicas}
        config["parallelism_config"] = {f"parallelism_config_{key}": size for key, size in sizes.items()}
    config |= {"num_processes": ranks} if ranks else {}
    config |= {"num_machines": told.loop.pop("machines", 1)}
    return config


def _mixed(told: _Told, kind: str) -> str:
    if kind == "ddp":
        low = told.loop.pop("autocast", None)
    else:
        low = told.see("precision", "param_dtype")
    if low not in (torch.bfloat16, torch.float16):
        return "no"
    if kind != "ddp":
        told.say("precision", "param_dtype")
    if kind == "fsdp":
        for field, theirs in (("reduce_dtype", low), ("cast_inputs", "units")):
            if told.see("precision", field) == theirs:
                told.say("precision", field)
            else:
                told.unsaid.append(f"Precision({field}={told.see('precision', field)!r}): Accelerate has {theirs!r}")
                told.say("precision", field)
    if low == torch.float16 and told.loop.get("scaler") is not None:
        told.loop.pop("scaler")  # it makes one of its own
    return _word(low)


def _fsdp(told: _Told) -> dict[str, Any]:
    section: dict[str, Any] = {"fsdp_version": 2}
    section["fsdp_reshard_after_forward"] = told.say("comm", "release_after_forward")
    section["fsdp_offload_params"] = told.see("offload", "parameters") == "cpu"
    for state in ALL_CPU:
        told.say("offload", state)
    units = told.see("layout", "units")
    names = _classes(units)
    section["fsdp_auto_wrap_policy"] = "NO_WRAP" if units is not None and not units else "TRANSFORMER_BASED_WRAP"
    if names is not None:
        told.say("layout", "units")
        if names:
            section["fsdp_transformer_layer_cls_to_wrap"] = ",".join(names)
    section["fsdp_activation_checkpointing"] = told.see("layout", "recompute") is True
    if section["fsdp_activation_checkpointing"]:
        told.say("layout", "recompute")
    return section


def _classes(units: Any) -> list[str] | None:
    """Return `units` as names of classes; None if one is a module's name: in lower case, or with a dot or a star."""
    found = [each if isinstance(each, str) else each.__name__ for each in units or ()]
    return found if units is not None and all(name.isidentifier() and name != name.lower() for name in found) else None


def _yaml(value: dict[str, Any], indent: str = "") -> str:
    """Write maps of texts, numbers and truths as YAML, which reads a JSON scalar as it is."""
    lines = []
    for key, inner in value.items():
        if isinstance(inner, dict):
            lines.append(f"{indent}{key}:\n{_yaml(inner, indent + '  ')}")
        else:
            lines.append(f"{indent}{key}: {json.dumps(inner)}\n")
    return "".join(lines)


# --- FSDP2 ------------------------------------------------------------------------------------------------------------


def _fsdp2(told: _Told) -> str:
    if told.stage != 3:
        raise UserError(
            "fully_shard is stage 3", got=f"stage {told.stage}", instead="--export deepspeed, or accelerate"
        )
    options = {"reshard_after_forward": repr(told.say("comm", "release_after_forward"))}
    dtypes = {}
    for field in ("param_dtype", "reduce_dtype"):
        if (dtype := told.say("precision", field)) is not None:
            dtypes[field] = repr(dtype)
    cast = told.see("precision", "cast_inputs")
    if cast == "units":
        told.say("precision", "cast_inputs")
    if dtypes:
        words = ", ".join(
            f"{key}={value}" for key, value in (dtypes | {"cast_forward_inputs": cast == "units"}).items()
        )
        options["mp_policy"] = f"MixedPrecisionPolicy({words})"
    if {state: told.see("offload", state) for state in ALL_CPU} == ALL_CPU:
        for state in ALL_CPU:
            told.say("offload", state)
        options["offload_policy"] = "CPUOffloadPolicy()"
    mesh, replicas = "", told.see("comm", "replicas")
    ranks = told.loop.pop("ranks", None)
    if replicas and ranks:
        told.say("comm", "replicas")
        mesh = (
            '    kind = "cuda" if torch.cuda.is_available() else "cpu"\n'
            f"    sizes = {replicas}, {ranks // replicas}\n"
            '    mesh = init_device_mesh(kind, sizes, mesh_dim_names=("replicate", "shard"))\n'
        )
        options["mesh"] = "mesh"
    names = _classes(told.see("layout", "units"))
    if names is not None:
        told.say("layout", "units")
        blocks = f"[module for module in model.modules() if type(module).__name__ in {names!r}]"
    else:
        told.unsaid.append("which modules are units is found here: name your blocks in the program")
        blocks = "[module for each in model.modules() if isinstance(each, torch.nn.ModuleList) for module in each]"
    told.loop.pop("machines", None)
    words = "".join(f"        {key}={value},\n" for key, value in options.items())
    return f"""\
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard


def shard(model):
    \"\"\"Shard it in place, before the optimizer is made.\"\"\"
{mesh}    options = dict(
{words}    )
    for block in {blocks}:
        fully_shard(block, **options)
    return fully_shard(model, **options)
"""
