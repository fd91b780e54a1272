"""GPUs by name, and the part of their memory that a training process can fill with tensors. No torch.

Of the memory that torch reports (`torch.cuda.get_device_properties(0).total_memory`, rounded down here) a process does
not have all:

    TAKEN      bytes of the CUDA context and of the libraries' workspaces, some 0.5 GiB, and of NCCL's buffers: 0.53 to
               0.67 GiB for each communicator (NVIDIA/nccl issue 964), of which zeroshard has two, and the program one
    ALLOCATOR  the part of the rest that torch's allocator has reserved and cannot use, in pieces too small

Both are assumptions: `nvidia-smi` and `torch.cuda.memory_reserved()` say what they are on a machine.
"""

from __future__ import annotations

from ..errors import UserError, nearest

GIB = 1 << 30
TAKEN = 5 * GIB // 2
ALLOCATOR = 0.03
# GiB of one GPU.
GPUS = {
    "b200": 178.3, "h200": 139.8, "h100-80": 79.1, "a100-80": 79.1, "a100-40": 39.4, "mi300x": 191.5, "a6000": 47.4,
    "l40s": 44.4, "l4": 22.0, "a10g": 22.0, "v100-32": 31.7, "v100-16": 15.7, "t4": 14.5, "4090": 23.5, "3090": 23.6,
}  # fmt: skip


def named(name: str) -> str:
    """Return the name in `GPUS` of a GPU that is named so, or by the only one of its sizes. Raises `UserError` if none
    is."""
    if not isinstance(name, str):
        raise UserError("a GPU is named", got=repr(name), instead='gpu="h100-80", or gpu_mem="80GiB"')
    found = [each for each in GPUS if name.lower() == each or each.startswith(f"{name.lower()}-")]
    if len(found) != 1:
        instead = " or ".join(found) or f"{nearest(name.lower(), GPUS)}, or gpu_mem="
        raise UserError("no such GPU", got=repr(name), instead=instead)
    return found[0]


def usable(name: str) -> int:
    """Return the bytes of a GPU's memory for tensors."""
    return int((GPUS[named(name)] * GIB - TAKEN) * (1 - ALLOCATOR))


def note(name: str) -> str:
    """Return in words how much of its memory is left, and why."""
    all_of_it, left = GPUS[named(name)], usable(name) / GIB
    return (
        f"{named(name)}: {all_of_it} GiB, of which tensors get {left:.1f}: {TAKEN / GIB:g} GiB are assumed for CUDA's "
        f"context and NCCL's buffers, and {ALLOCATOR:.0%} of the rest for what the allocator cannot use"
    )
