"""A device "emu" for a process of its own: memory of the host's under another name, with the CPU's kernels.

It is what CI has of an accelerator: a tensor of it and one of the CPU do not meet in one operation, and nothing that is
written for the CPU alone runs on it. Import it before anything is computed; a process keeps it.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch.utils._pytree import tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

MODULE = types.SimpleNamespace(
    is_initialized=lambda: True,
    is_available=lambda: True,
    current_device=lambda: 0,
    device_count=lambda: 1,
    _is_in_bad_fork=lambda: False,
    manual_seed_all=lambda seed: None,
    synchronize=lambda *_: None,
    get_rng_state=lambda *_: torch.zeros(16, dtype=torch.uint8),
    set_rng_state=lambda *_: None,
    get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
)
_setup_privateuseone_for_python_backend("emu", backend_module=MODULE)
CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
SET = torch.ops.aten.set_.source_Storage_storage_offset
KEPT: dict[int, torch.Tensor] = {}  # what storages of the device lie in, by address: nothing is ever freed


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the device with the memory of one of the CPU."""
    storage = tensor.untyped_storage()
    KEPT[storage.data_ptr()] = tensor
    other = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), torch.device("emu:0"), storage.nbytes())
    blank = torch._C._acc.create_empty_tensor([0], tensor.dtype)
    return SET.redispatch(CPU, blank, other, tensor.storage_offset(), [*tensor.size()], [*tensor.stride()])


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor of the CPU. A number in a tensor of the CPU is welcome anywhere, as in torch."""
    if tensor.device.type == "cpu":
        assert tensor.dim() == 0, "a tensor of the CPU and one of the device in one operation"
        return tensor
    if not tensor.numel():  # it may be written to, and get its size by that
        return torch.empty(tensor.size(), dtype=tensor.dtype)
    at = tensor.untyped_storage()
    at = torch._C._construct_storage_from_data_pointer(at.data_ptr(), torch.device("cpu"), at.nbytes())
    return torch.empty(0, dtype=tensor.dtype).set_(at, tensor.storage_offset(), tensor.size(), tensor.stride())


def fallback(op: Any, *args: Any, **kw: Any) -> Any:
    name, schema = op._schema.name.split("::")[1], op._schema.arguments
    if name == "_copy_from":  # the only one between devices
        source, target = (t if t.device.type == "cpu" else on_host(t) for t in args[:2])
        target.copy_(source)
        return args[1]
    if name in ("set_", "detach", "alias", "_unsafe_view") or any(
        each.alias_info is not None and not each.alias_info.is_write for each in schema
    ):
        return op.redispatch(CPU, *args, **kw)  # a view
    given: dict[int, torch.Tensor] = {}  # what is returned of these is the tensor that was given
    sized: list[tuple[torch.Tensor, torch.Tensor]] = []

    def host(tensor: torch.Tensor) -> torch.Tensor:
        given[id(own := on_host(tensor))] = tensor
        sized.append((own, tensor))
        return own

    values = [
        torch.tensor(value) if isinstance(value, (bool, int, float)) and str(each.type) == "Tensor" else value
        for each, value in zip(schema, args, strict=False)
    ]
    kw = {key: torch.device("cpu") if key == "device" else value for key, value in kw.items()}
    results = op(*tree_map_only(torch.Tensor, host, values), **tree_map_only(torch.Tensor, host, kw))
    for own, tensor in sized:
        if own.size() != tensor.size():
            made = on_device(own)
            SET.redispatch(CPU, tensor, made.untyped_storage(), 0, [*made.size()], [*made.stride()])
    return tree_map_only(torch.Tensor, lambda own: given[id(own)] if id(own) in given else on_device(own), results)


EVERYTHING = torch.library.Library("_", "IMPL")
EVERYTHING.fallback(fallback, "PrivateUse1")
