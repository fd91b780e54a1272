"""Names and shapes of any model that Hugging Face's transformers can build, from its config alone: built on meta.

Only where transformers is installed, and only its own classes: code that a config names elsewhere is not run.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import UserError

NUMBER_LIMIT, LAYERS_LIMIT = 1 << 31, 4096  # of a config's: layers are built one by one


def installed() -> bool:
    return importlib.util.find_spec("transformers") is not None


def tensors(where: Path, table: Mapping[str, Any]) -> tuple[dict[str, tuple[int, ...]], dict[str, str], list[str]]:
    """Return (shapes by name, each parameter once; {other name of a tied one: the name that is counted}; the weights of
    linear layers that are no routers)."""
    import torch
    import transformers

    _check_numbers(where, table)
    try:
        config = transformers.AutoConfig.for_model(**table)
        with torch.device("meta"):
            model = _class_of(transformers, table, config)._from_config(config)
    except Exception as error:
        raise UserError(
            "transformers builds no model from this config", where=where, got=f"{type(error).__name__}: {error}"[:200],
            instead="a config.json that save_pretrained wrote, or a folder with its *.safetensors",
        ) from error  # fmt: skip
    names: dict[int, str] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    ties: dict[str, str] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if id(param) in names:
            ties[name] = names[id(param)]
        else:
            names[id(param)], shapes[name] = name, tuple(param.shape)
    layers = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    weights = {f"{name}.weight" for name in layers if name.rpartition(".")[2] not in ("router", "gate")}
    named = {*shapes, *ties} & weights
    other = {ties.get(each, each) for each in {*shapes, *ties} - named}
    return shapes, ties, [name for name in shapes if name in named and name not in other]


def _class_of(transformers: Any, table: Mapping[str, Any], config: Any) -> Any:
    """Return the class that the config names first, if it is one of the library's; else its causal language model."""
    named = (table.get("architectures") or [""])[0]
    found = getattr(transformers, named, None) if isinstance(named, str) else None
    if inspect.isclass(found) and issubclass(found, transformers.PreTrainedModel):
        return found
    known = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    return known[type(config)] if type(config) in known else transformers.MODEL_MAPPING[type(config)]


def _check_numbers(where: Path, table: Mapping[str, Any]) -> None:
    for key, value in table.items():
        if isinstance(value, dict):
            _check_numbers(where, value)
        limit = LAYERS_LIMIT if "layer" in key or key in ("depth", "depths") else NUMBER_LIMIT
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, (int, float)) and abs(number) > limit:
                raise UserError(
                    "a number in a config is too large", where=where, expected=f"{key}: at most {limit}", got=number
                )
