"""Functions on ranks that have the emulated device, as `ranks.run` runs them on the CPU."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import ranks

GROUP = "cpu:gloo,emu:emuccl"


def run(
    world: int,
    fn: Callable[..., Any],
    *args: Any,
    seed: int | None = None,
    group: str | None = GROUP,
    group_timeout: float = ranks.GROUP_TIMEOUT,
    timeout: float = ranks.RUN_TIMEOUT,
    expect_errors: bool = False,
    **options: Any,
) -> list[Any]:
    """What `fn(*args)` returned on each of `world` ranks, in rank order; each is a process with a device of its own.

    seed: of the order in which kernels run, another on each rank. group: the backends of its process group; None: it
    makes one itself, or needs none. options: as `install` takes them.
    """
    __tracebackhide__ = True
    with tempfile.TemporaryDirectory(prefix="emulated-") as folder:
        return ranks.run(
            world,
            _on_rank,
            fn,
            args,
            seed,
            (group, os.path.join(folder, "store"), group_timeout),
            options,
            group=False,
            timeout=timeout,
            expect_errors=expect_errors,
            spent=True,
        )


def _on_rank(
    fn: Callable[..., Any], args: tuple[Any, ...], seed: int | None, meeting: tuple[Any, ...], options: dict[str, Any]
) -> Any:
    import torch.distributed as dist

    from .install import install

    rank, world, (group, path, limit) = ranks.rank(), ranks.world(), meeting
    device = install(None if seed is None else 1000 * seed + rank, folder=os.path.dirname(path), **options)
    if group is not None and world > 1:
        store = dist.FileStore(path, world)
        dist.init_process_group(group, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=limit))
    answer = fn(*args)
    device.synchronize()  # and what nobody has waited for is seen to work
    return answer
