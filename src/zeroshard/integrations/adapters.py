"""Adapters of PEFT: the parameters of one, their names in its file, and its configuration.

`zero.export` of a `PeftModel` writes the active adapter alone, as `PeftModel.save_pretrained` does:

    adapter_model.safetensors
    adapter_config.json

`zeroshard.load` fills the base below an adapter from a folder of the base's own names.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import UserError

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def is_adapted(model: nn.Module) -> bool:
    """Tell whether a model is a `PeftModel`, by name: peft is imported only where it has made the model."""
    kinds = ((kind.__module__.partition(".")[0], kind.__name__) for kind in type(model).__mro__)
    return ("peft", "PeftModel") in kinds


_AROUND = re.compile(r"^base_model\.model\.|\.(base_layer|original_module|modules_to_save\.[^.]+)(?=\.)")


def base_name(name: str) -> str:
    """Return the name, in the base model, of a tensor that an adapter lies around, or has a copy of."""
    return _AROUND.sub("", name)


def own(model: Any) -> set[str]:
    """Return the names of the tensors that a `PeftModel`'s adapters have, and its base does not."""
    every = (name for adapter in model.peft_config for name in names(model, adapter, embeddings=False))
    return {name for name in every if "modules_to_save." not in name}


class FirstValues:
    """First values for what a `PeftModel` has on meta: of LoRA's matrices by PEFT, of all else as `base` says."""

    def __init__(self, model: Any, base: Any) -> None:
        """base: an `Initialiser`. Raises `UserError` if first values of an adapter on meta follow from its base's."""
        self._base = base
        self._of: dict[int, tuple[Any, str, Any]] = {}  # by a part's id, its layer, adapter, and kind of first values
        meta = {name for name in own(model) if model.get_parameter(name).is_meta}
        for path, layer in model.named_modules():
            here = {name for name in meta if name.startswith(f"{path}.lora_")}
            for adapter, config in model.peft_config.items() if here else ():
                kind = getattr(config, "init_lora_weights", None)
                if kind not in (True, "gaussian") or config.use_dora:
                    continue
                inner = (layer.lora_A, layer.lora_B), (layer.lora_embedding_A, layer.lora_embedding_B)
                parts = [found[adapter] for found in inner[0] if adapter in found] or inner[1]
                self._of |= dict.fromkeys(map(id, parts), (layer, adapter, kind))
                meta -= {name for name in here if f".{adapter}." in f"{name}."}
        if meta:
            raise UserError(
                "an adapter on meta has first values that PEFT does not give it alone", got=sorted(meta)[:3],
                expected='LoRA with init_lora_weights=True or "gaussian"',
                instead="get_peft_model(model, config) of a model that is not on meta",
            )  # fmt: skip

    def knows(self, module: nn.Module) -> bool:
        return id(module) in self._of or bool(self._base.knows(module))

    def __call__(self, module: nn.Module) -> None:
        layer, adapter, kind = self._of.get(id(module), (None, None, None))
        if layer is None:
            self._base(module)
        elif not any(p.is_meta for name, p in layer.named_parameters() if f".{adapter}." in f"{name}."):  # A, and B
            layer.reset_lora_parameters(adapter, kind)


def names(model: Any, adapter: str | None = None, *, embeddings: bool | str = "auto") -> dict[str, list[str]]:
    """Return {a tensor's name: its names in the adapter's file}. PEFT picks the tensors, and renames them.

    adapter: its name; by default the active one's. embeddings: as PEFT's `save_embedding_layers`.
    """
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
    chosen = get_peft_model_state_dict(
        model, state_dict=state, adapter_name=adapter or model.active_adapter, save_embedding_layers=embeddings
    )
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
