"""Where the steps run: on CUDA devices, on the emulated device of tests/emulated, or on the CPU."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))  # ranks, emulated

import ranks  # noqa: E402
import verbs  # noqa: E402, F401 (steps import it from here, as they do ranks)

REHEARSED = 4  # devices of a rehearsal
GROUPS = {"cuda": "cpu:gloo,cuda:nccl", "emu": "cpu:gloo,emu:emuccl", "cpu": "gloo"}
ENVIRONMENT = {  # of every process: no network, one thread, and what cuBLAS needs for the same bits again
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}


@dataclass(frozen=True)
class Place:
    """kind: of the devices. count: how many ranks at most, each with a device of its own unless they share.

    share: do ranks take turns on the devices? NCCL refuses two ranks of one host on one device, so each rank says that
    it is a host of its own, and what they send goes through sockets. It proves bits, order and recovery; its times are
    of no worth.
    """

    kind: str
    count: int
    share: bool = False

    @classmethod
    def of(cls, kind: str, shared_by: int = 0) -> Place:
        if kind != "cuda":
            return cls(kind, REHEARSED)
        devices = torch.cuda.device_count()
        return cls(kind, devices and max(devices, shared_by), share=0 < devices < shared_by)

    @property
    def facts(self) -> dict[str, Any]:
        """What a record says of it: fewer devices than ranks, where they share them."""
        devices = torch.get_device_module(self.kind).device_count() if self.share else self.count
        return {"device": self.kind, "devices": devices, "ranks": self.count}

    @property
    def full(self) -> bool:
        """Are sizes and repeats those of the real hour?"""
        return self.kind == "cuda" and not self.share

    def own(self, rank: int) -> torch.device:
        """Return a rank's device."""
        return torch.device(self.kind, rank % torch.get_device_module(self.kind).device_count())

    @property
    def worlds(self) -> list[int]:
        """Numbers of ranks that it has devices for."""
        return [ranks for ranks in (2, 3, 4, 8) if ranks <= self.count]

    def run(
        self,
        world: int,
        body: Callable[..., Any],
        *args: Any,
        group: str | None = "both",
        timeout: float = 300.0,
        deterministic: bool = True,
        expect_errors: bool = False,
    ) -> list[Any]:
        """What `body(kind, *args)` returns on each of `world` ranks, each with a device of its own.

        group: "both" is a process group of gloo and the device's own backend, "own" of the latter alone; None: the body
        makes one, or needs none.
        """
        backend = {"both": GROUPS[self.kind], "own": GROUPS[self.kind].rpartition(":")[2], None: None}[group]
        if self.kind == "emu":
            import emulated

            return emulated.run(
                world, body, "emu", *args,
                seed=1, group=backend, timeout=timeout, expect_errors=expect_errors, patience=60.0,
            )  # fmt: skip
        with tempfile.TemporaryDirectory(prefix="bench-gpu-") as folder:
            meeting = (backend, os.path.join(folder, "store"))
            return ranks.run(
                world, _on_rank, self, body, args, meeting, deterministic,
                group=False, timeout=timeout, expect_errors=expect_errors, spent=True,
            )  # fmt: skip


def compiler_of(kind: str) -> None:
    """On a rank: make g++ the compiler of the emulated device's kernels, and of the CPU's."""
    from emulated import compiler
    from zeroshard import device

    device.compilers |= {"emu": compiler.compiled, "cpu": compiler.on_the_host}


def _on_rank(
    place: Place, body: Callable[..., Any], args: tuple[Any, ...], meeting: tuple[str | None, str], deterministic: bool
) -> Any:
    import torch.distributed as dist

    kind, rank, world, (backend, path) = place.kind, ranks.rank(), ranks.world(), meeting
    if kind == "cuda":
        torch.cuda.set_device(place.own(rank))
        if place.share:
            os.environ["NCCL_HOSTID"] = f"rank {rank}"
        torch.use_deterministic_algorithms(deterministic)
        torch.utils.deterministic.fill_uninitialized_memory = False  # a kernel for each gather, and no bit of ours
    if backend is not None and world > 1:
        store = dist.FileStore(path, world)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timedelta(minutes=5))
    answer = body(kind, *args)
    synchronize(kind)
    return answer


def synchronize(kind: str) -> None:
    if kind != "cpu":
        torch.get_device_module(kind).synchronize()
