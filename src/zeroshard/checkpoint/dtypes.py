"""The dtypes of what checkpoints hold, by safetensors' names. Where torch is not installed they are sizes alone, with
which a checkpoint can be looked at and checked, and not loaded."""

from __future__ import annotations

import importlib.util
from typing import Any, NamedTuple

_NAMED = {  # torch's name: safetensors', and bytes of an element
    "float64": ("F64", 8), "float32": ("F32", 4), "float16": ("F16", 2), "bfloat16": ("BF16", 2), "int64": ("I64", 8),
    "int32": ("I32", 4), "int16": ("I16", 2), "int8": ("I8", 1), "uint8": ("U8", 1), "bool": ("BOOL", 1),
    "complex64": ("C64", 8), "float8_e4m3fn": ("F8_E4M3", 1), "float8_e5m2": ("F8_E5M2", 1),
}  # fmt: skip


class Size(NamedTuple):
    """Stands for a dtype of torch's."""

    name: str
    itemsize: int


def _named() -> dict[str, Any]:
    if importlib.util.find_spec("torch") is None:
        return {name: Size(*told) for name, told in _NAMED.items()}
    import torch

    return {name: getattr(torch, name) for name in _NAMED}


TORCH_DTYPES: dict[str, Any] = {_NAMED[name][0]: dtype for name, dtype in _named().items()}
DTYPES: dict[Any, str] = {dtype: name for name, dtype in TORCH_DTYPES.items()}
