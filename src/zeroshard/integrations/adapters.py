"""Adapters of PEFT: the parameters of one, their names in its file, and its configuration.

`zero.export` of a `PeftModel` writes the active adapter alone, as `PeftModel.save_pretrained` does:

    adapter_model.safetensors
    adapter_config.json
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def is_adapted(model: nn.Module) -> bool:
    """Tell whether a model is a `PeftModel`, by name: peft is imported only where it has made the model."""
    kinds = ((kind.__module__.partition(".")[0], kind.__name__) for kind in type(model).__mro__)
    return ("peft", "PeftModel") in kinds


def names(model: Any) -> dict[str, list[str]]:
    """Return {a tensor's name: its names in the adapter's file}. PEFT picks the tensors, and renames them."""
    from peft import get_peft_model_state_dict

    every: dict[int, str] = {}
    state: dict[str, torch.Tensor] = {}
    first: dict[int, torch.Tensor] = {}
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in tensors:
        with torch._C.DisableTorchFunctionSubclass():
            marker = first.setdefault(id(tensor), torch.empty(tuple(tensor.shape), device="meta"))
        every.setdefault(id(marker), name)
        state[name] = marker
    chosen = get_peft_model_state_dict(model, state_dict=state, adapter_name=model.active_adapter)
    found: dict[str, list[str]] = {}
    for key, marker in chosen.items():
        found.setdefault(every[id(marker)], []).append(key)
    return found


def write_config(model: Any, folder: Path) -> None:
    """Write the active adapter's configuration as `PeftModel.save_pretrained` does."""
    config = copy.copy(model.peft_config[model.active_adapter])
    base = model.base_model if config.is_prompt_learning else model.base_model.model
    config.base_model_name_or_path = config.base_model_name_or_path or base.__dict__.get("name_or_path") or None
    config.inference_mode, mapping = True, None
    if config.task_type is None:
        kind = model._get_base_model_class(is_prompt_tuning=config.is_prompt_learning)
        mapping = {"base_model_class": kind.__name__, "parent_library": kind.__module__}
    config.save_pretrained(str(folder), auto_mapping_dict=mapping)
