"""GPUs by name, and the part of their memory that a training process can fill with tensors. No torch.

Of the memory that torch reports (`torch.cuda.get_device_properties(0).total_memory`, rounded down here) a process does
not have all:

    TAKEN      bytes of the CUDA context and of the libraries' workspaces, some 0.5 GiB, and of NCCL's rings: 0.53 to
               0.67 GiB for each communicator (NVIDIA/nccl issue 964), of which zeroshard has two, and the program one
    exchanged  what NCCL takes for exchanges of gradients, by the number of peers in the same node: some memory for each
               of the channels to each (`limits.CHANNEL`). Peers in other nodes have one or two channels, and then those
               in this node have no more: so a second node is counted as adding nothing
    ALLOCATOR  the part of the rest that torch's allocator has reserved and cannot use, in pieces too small

All are assumptions: `nvidia-smi` and `torch.cuda.memory_reserved()` say what they are on a machine, and `shard` logs
what its groups took. The memory of a row is what torch's out-of-memory errors call the total capacity of such a GPU;
its other numbers are from its source.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import UserError, nearest
from ..layout.limits import CHANNEL, CHANNELS

GIB = 1 << 30
TAKEN = 5 * GIB // 2
ALLOCATOR = 0.03
NODE = 8  # GPUs of a node, if nothing is told


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU.

    gib: GiB of its memory, as torch reports them, rounded down. flops: dense peak of products of 16 bits, added up in
    fp32, per second. bandwidth: bytes per second of its memory. source: where flops and bandwidth are from.
    """

    gib: float
    flops: float
    bandwidth: float
    source: str


GPUS: Mapping[str, Gpu] = {
    "b200": Gpu(178.3, 2250e12, 7700e9, "NVIDIA HGX platform page: 4.5 PFLOP/s with sparsity, 7.7 TB/s"),
    "h200": Gpu(139.8, 989e12, 4800e9, "NVIDIA H200 data sheet, SXM"),
    "h100-80": Gpu(79.1, 989e12, 3350e9, "NVIDIA H100 data sheet, SXM"),
    "a100-80": Gpu(79.1, 312e12, 2039e9, "NVIDIA A100 data sheet, SXM"),
    "a100-40": Gpu(39.4, 312e12, 1555e9, "NVIDIA A100 data sheet, SXM"),
    "mi300x": Gpu(191.5, 1307e12, 5300e9, "AMD Instinct MI300X data sheet"),
    "a6000": Gpu(47.4, 155e12, 768e9, "NVIDIA RTX A6000 data sheet: 310 TFLOP/s with sparsity"),
    "l40s": Gpu(44.4, 362e12, 864e9, "NVIDIA L40S data sheet"),
    "l4": Gpu(22.0, 121e12, 300e9, "NVIDIA L4 data sheet: 242 TFLOP/s with sparsity"),
    "a10g": Gpu(22.0, 70e12, 600e9, "NVIDIA A10G data sheet"),
    "v100-32": Gpu(31.7, 125e12, 900e9, "NVIDIA V100 data sheet, SXM2; fp16 only"),
    "v100-16": Gpu(15.7, 125e12, 900e9, "NVIDIA V100 data sheet, SXM2; fp16 only"),
    "t4": Gpu(14.5, 65e12, 300e9, "NVIDIA T4 data sheet; fp16 only"),
    "5090": Gpu(31.3, 209e12, 1792e9, "NVIDIA RTX Blackwell architecture paper: 419 TFLOP/s with sparsity"),
    "4090": Gpu(23.5, 165e12, 1008e9, "NVIDIA Ada architecture paper: 330 TFLOP/s with sparsity"),
    "3090": Gpu(23.6, 71e12, 936e9, "NVIDIA Ampere GA102 architecture paper: 142 TFLOP/s with sparsity"),
}


def named(name: str) -> str:
    """Return the name in `GPUS` of a GPU that is named so, or by the only one of its sizes. Raises `UserError` if none
    is."""
    if not isinstance(name, str):
        raise UserError("a GPU is named", got=repr(name), instead='Machine(gpu="h100-80"), or Machine(gpu_mem="80GiB")')
    found = [each for each in GPUS if name.lower() == each or each.startswith(f"{name.lower()}-")]
    if len(found) != 1:
        instead = " or ".join(found) or f'{nearest(name.lower(), GPUS)}, or Machine(gpu_mem="80GiB")'
        raise UserError("no such GPU", got=repr(name), instead=instead)
    return found[0]


def exchanged(ranks: int, node: int | None = None) -> int:
    """Return the bytes that NCCL takes on each of so many ranks for exchanges. node: GPUs of a node."""
    return (min(ranks, node or NODE) - 1) * CHANNELS * CHANNEL


def usable(name: str, ranks: int = 1, node: int | None = None) -> int:
    """Return the bytes of a GPU's memory for tensors of one of so many ranks. node: GPUs of a node."""
    return int((GPUS[named(name)].gib * GIB - TAKEN - exchanged(ranks, node)) * (1 - ALLOCATOR))


def note(name: str, ranks: int = 1, node: int | None = None) -> str:
    """Return in words how much of its memory is left, and why."""
    all_of_it, left = GPUS[named(name)].gib, usable(name, ranks, node) / GIB
    peers = exchanged(ranks, node)
    words = f", {peers / GIB:.2f} for exchanges between GPUs of a node," if peers else ""
    return (
        f"{named(name)}: {all_of_it} GiB, of which tensors get {left:.1f}: {TAKEN / GIB:g} GiB are assumed for CUDA's "
        f"context and NCCL's buffers{words} and {ALLOCATOR:.0%} of the rest for what the allocator cannot use"
    )
