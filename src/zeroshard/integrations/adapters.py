"""Adapters of PEFT: the parameters of one, their names in its file, and its configuration.

`zero.export` of a `PeftModel` writes the active adapter alone, as `PeftModel.save_pretrained` does:

    adapter_model.safetensors
    adapter_config.json

`zeroshard.load` fills the base below an adapter from a folder of the base's own names.
"""

from __future__ import annotations

import copy
import math
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def is_adapted(model: nn.Module) -> bool:
    """Tell whether a model is a `PeftModel`, by name: peft is imported only where it has made the model."""
    kinds = ((kind.__module__.partition(".")[0], kind.__name__) for kind in type(model).__mro__)
    return ("peft", "PeftModel") in kinds


_AROUND = re.compile(r"\.(base_layer|original_module|modules_to_save\.[^.]+)(?=\.)")
_COPY = re.compile(r"\.modules_to_save\.[^.]+\.")


def candidates(model: Any) -> dict[str, list[str]]:
    """Return {a tensor's name: its names in a folder of the base's weights}, ties and originals of copies included."""
    prompts = any(config.is_prompt_learning for config in model.peft_config.values())
    prefix = "base_model." if prompts else "base_model.model."
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    tied: dict[int, list[str]] = {}
    for name, tensor in tensors:
        tied.setdefault(id(tensor), []).append(name)
    by_name = {name: id(tensor) for name, tensor in tensors}

    def base(name: str) -> str:
        return _AROUND.sub("", name.removeprefix(prefix))

    found = {}
    for name, tensor in tensors:
        original = by_name.get(_COPY.sub(".original_module.", name), id(tensor))
        found[name] = [name, *map(base, tied[id(tensor)]), *map(base, tied[original])]
    return found


def own(model: Any) -> set[str]:
    """Return the names of the parameters that a `PeftModel`'s adapters have beside its base's."""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    found = {name for name in names if not name.startswith("base_model.")}  # of prompts
    for path, layer in model.named_modules():
        places = tuple(f"{path}.{each}." for each in getattr(layer, "adapter_layer_names", ()))
        found |= {name for name in names if places and f"{name}.".startswith(places)}
    return found


class FirstValues:
    """First values for what a `PeftModel` has on meta: of LoRA's matrices as PEFT draws them, else as `base` says.

    Each matrix is filled by itself, since by the next one's turn it may be sharded.
    """

    def __init__(self, model: Any, base: Any) -> None:
        """base: an `Initialiser`, which knows no adapter."""
        self._base = base
        self._of: dict[int, list[tuple[nn.Parameter, float | None]]] = {}  # by module: what to fill, and how
        for layer in model.modules():
            for adapter, config in model.peft_config.items():
                kind = getattr(config, "init_lora_weights", None)
                if config.peft_type == "LORA" and kind in (True, "gaussian") and not config.use_dora:
                    self._note(layer, adapter, kind)

    def _note(self, layer: Any, adapter: str, kind: Any) -> None:
        """Note one layer's matrices: zeros (None), uniform as in a linear layer (0), or normal of such a width."""
        if adapter in getattr(layer, "lora_A", ()):
            width = 0.0 if kind is True else 1 / layer.r[adapter]
            self._of[id(layer.lora_A[adapter])] = [(layer.lora_A[adapter].weight, width)]
            self._of[id(layer.lora_B[adapter])] = [(each, None) for each in layer.lora_B[adapter].parameters()]
        if adapter in getattr(layer, "lora_embedding_A", ()):  # all adapters' in one module
            for inner, how in ((layer.lora_embedding_A, None), (layer.lora_embedding_B, 1.0)):
                self._of.setdefault(id(inner), []).append((inner[adapter], how))

    def knows(self, module: nn.Module) -> bool:
        return id(module) in self._of or bool(self._base.knows(module))

    def __call__(self, module: nn.Module) -> None:
        if id(module) not in self._of:
            self._base(module)
        for param, width in self._of.get(id(module), ()):
            if width is None:
                nn.init.zeros_(param)
            elif width:
                nn.init.normal_(param, std=width)
            else:
                nn.init.kaiming_uniform_(param, a=math.sqrt(5))


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
