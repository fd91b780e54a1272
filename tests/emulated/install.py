"""Making the device known to torch, in a process that will have it to its end."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from . import emu, emuccl, guard
from .device import Device, set_device
from .kernels import FUSED, Operators
from .streams import PATIENCE, Order

_kept: list[Any] = []  # libraries: torch forgets what was registered by one that is gone


def install(
    seed: int | None = None,
    *,
    style: str | None = None,
    slots: int = 8,
    patience: float = PATIENCE,
    detect: bool = True,
    elsewhere: bool = False,
    syncs_every: int = 0,
    folder: str | None = None,
) -> Device:
    """Make the device type "emu" and the backend "emuccl" in this process, which has to end by `os._exit`.

    seed, style: of the order in which kernels run, see `Order`. slots: messages under way that leave no room for
    kernels. patience: seconds in which nothing can run before a wait is given up. detect: races are errors. elsewhere: threads are on a
    second device, which has streams and no tensors, unless they name the first. syncs_every:
    so many allocations, after which one waits for the whole device, as `cudaFree` does. folder: of what the ranks send.
    """
    made = Device(Order(seed, style), slots, patience, detect, elsewhere=elsewhere)
    made.syncs_every = syncs_every
    set_device(made)
    assert not _kept, "one device in a process: torch's own teardown knows none in Python"
    _setup_privateuseone_for_python_backend("emu", backend_module=emu, device_guard=guard.Guard())
    _register(Operators(made))
    torch.UntypedStorage.clone = _clone(torch.UntypedStorage.clone)  # type: ignore[method-assign]
    torch.autograd.graph._engine_run_backward = guard.run_backward(torch.autograd.graph._engine_run_backward)
    torch.autograd._engine_run_backward = torch.autograd.graph._engine_run_backward  # type: ignore[attr-defined]
    emuccl.register(made, folder)
    return made


def _register(operators: Operators) -> None:
    everything, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    _kept.extend((everything, aten))
    everything.fallback(operators, "PrivateUse1")
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::") and (name.startswith(FUSED) or _own_on_the_cpu(name)):
            base, _, overload = name.removeprefix("aten::").partition(".")
            op = getattr(getattr(torch.ops.aten, base), overload or "default")
            aten.impl(name.removeprefix("aten::"), partial(operators, op), "PrivateUse1")


def _own_on_the_cpu(name: str) -> bool:
    """Has the CPU a kernel of its own for it, where another device without one would get a composite?"""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return has(name, "CPU") and (has(name, "CompositeExplicitAutograd") or has(name, "CompositeImplicitAutograd")
                                 or has(name, "CompositeExplicitAutogradNonFunctional"))  # fmt: skip


def _clone(plain: Any) -> Any:
    """`copy.deepcopy` of a model copies storages, which torch cannot allocate on a device in Python."""

    def clone(storage: torch.UntypedStorage) -> torch.UntypedStorage:
        if storage.device.type != "emu":
            return plain(storage)
        made = torch.empty(0, dtype=torch.uint8, device="emu").set_(storage)
        return made.clone().untyped_storage()

    return clone
