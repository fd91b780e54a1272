"""Step: two ranks and three over the device's own backend: each verb, and each way to have a group that users have.

A rank that is late before each broadcast must end nothing; what rests on the host must travel where the group takes no
tensors of the host; a subgroup must not wait for ranks that are not in it.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import zeroshard
from zeroshard import Comm, Layout, Offload
from zeroshard.layout.stage import STAGES

from . import counts, training
from .place import GROUPS, Place, ranks, synchronize, verbs
from .record import Record, Wrong, each

SIZES = (5, 1 << 18)


def run(record: Record) -> None:
    place, late = record.place, 1.0 if record.place.kind == "cuda" else 0.3
    for world in (2, 3):
        if world <= place.count:
            record.ranks(f"{world} ranks, each verb", world, each_verb)
    for group in ("both", "own"):
        record.ranks(
            f"2 ranks, a group of {'two backends' if group == 'both' else 'one'}", 2, engine, late, group=group
        )
    beside = str(record.path.parent.absolute())
    for stage in (*STAGES, *[None] * (place.kind == "cuda")):
        name = "FSDP2" if stage is None else f"stage {stage}"
        record.measure(f"2 ranks, {name}, one step", lambda stage=stage: place.run(2, counts.counted, stage, beside)[0])
    for device_id in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            store = os.path.join(folder, "store")
            name = f"3 ranks of which 2 shard, device_id {'given' if device_id else 'left out'}"
            if place.count < 3:
                record.skip(name, "it takes 3 devices")
            else:
                record.ranks(name, 3, of_a_subgroup, place, store, device_id, group=None)


# --- verbs ----------------------------------------------------------------------------------------------------------


def each_verb(kind: str) -> dict[str, str]:
    kinds = {"gather": _gather, "exchange": _exchange, "uneven exchange": _uneven, "broadcast": _broadcast,
             "sum": _sum, "reduce-scatter": _scatter, "send and receive": _chain}  # fmt: skip
    return each(
        {f"{name}, {numel:,} elements": partial(call, kind, numel) for name, call in kinds.items() for numel in SIZES}
    )


def _of(kind: str, rank: int, numel: int) -> Tensor:
    """What a rank sends: whole numbers, which any order adds up alike."""
    return (torch.arange(numel, device=kind) % 97 + 100 * rank).float()


def _same(what: str, got: Tensor, want: Tensor) -> None:
    if not torch.equal(got, want):
        raise Wrong(f"{what}: {int((got != want).sum())} of {want.numel()} elements are others")


def _gather(kind: str, numel: int) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    whole = torch.zeros(world * numel, device=kind)
    own = whole[rank * numel : (rank + 1) * numel]
    own.copy_(_of(kind, rank, numel))
    verbs.all_gather_single(whole, own, async_op=True).wait()
    _same("in place", whole, torch.cat([_of(kind, each, numel) for each in range(world)]))


def _exchange(kind: str, numel: int) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    sent = torch.cat([_of(kind, rank, numel) + 10_000 * to for to in range(world)])
    got = torch.zeros_like(sent)
    dist.all_to_all_single(got, sent, async_op=True).wait()
    _same("received", got, torch.cat([_of(kind, source, numel) + 10_000 * rank for source in range(world)]))


def _uneven(kind: str, numel: int) -> None:
    """Rank 0 receives nothing."""
    rank, world = dist.get_rank(), dist.get_world_size()
    parts = [0 if to == 0 else numel + to for to in range(world)]
    sent = torch.cat([_of(kind, rank, part) for part in parts])
    got = torch.zeros(world * parts[rank], device=kind)
    dist.all_to_all_single(got, sent, [parts[rank]] * world, parts, async_op=True).wait()
    _same("received", got, torch.cat([_of(kind, source, parts[rank]) for source in range(world)]))


def _broadcast(kind: str, numel: int) -> None:
    for source in range(dist.get_world_size()):
        tensor = _of(kind, dist.get_rank(), numel)
        dist.broadcast(tensor, source, async_op=True).wait()
        _same(f"of rank {source}", tensor, _of(kind, source, numel))


def _sum(kind: str, numel: int) -> None:
    tensor = _of(kind, dist.get_rank(), numel)
    dist.all_reduce(tensor)
    _same("the sum", tensor, sum(_of(kind, rank, numel) for rank in range(dist.get_world_size())))  # type: ignore[arg-type]


def _scatter(kind: str, numel: int) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    got, sent = torch.zeros(numel, device=kind), torch.cat([_of(kind, rank, numel)] * world)
    verbs.reduce_scatter_single(got, sent)
    _same("the sum", got, sum(_of(kind, each, numel) for each in range(world)))  # type: ignore[arg-type]


def _chain(kind: str, numel: int) -> None:
    """Each rank sends to the next one, in their order."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank > 0:
        got = torch.zeros(numel, device=kind)
        dist.recv(got, rank - 1)
        _same(f"of rank {rank - 1}", got, _of(kind, rank - 1, numel))
    if rank < world - 1:
        dist.send(_of(kind, rank, numel), rank + 1)


# --- the engine over them -------------------------------------------------------------------------------------------


def engine(kind: str, late: float) -> dict[str, str]:
    return each(
        {
            "one is late before each broadcast": partial(_late, kind, late),
            "a model on meta": partial(_on_meta, kind),
            "an optimizer in host memory, after a step": partial(_stepped_before, kind),
            "native sums": partial(_native, kind),
            **{f"stage {stage}, the engine asks nothing": partial(counts.quiet, kind, stage) for stage in STAGES},
        }
    )


def _late(kind: str, seconds: float) -> None:
    """Of the buffer that is sent at shard and before a forward, and of all that rank 0 gives at shard."""
    real: Callable[..., Any] = dist.broadcast

    def after_a_while(*args: Any, **options: Any) -> Any:
        if dist.get_rank() == 0:
            time.sleep(seconds)
        return real(*args, **options)

    dist.broadcast = after_a_while
    try:
        got = training.sharded(kind, "fp32", 3)
    finally:
        dist.broadcast = real
    training.compare(got, training.plain(kind, "fp32", dist.get_world_size()))


def _alike(kind: str, model: torch.nn.Module) -> None:
    """Every rank has finite weights, and the same."""
    content = torch.cat([each.detach().reshape(-1) for each in model.parameters()])
    if not content.isfinite().all():
        raise Wrong("weights are not finite")
    first = content.clone()
    dist.broadcast(first, 0)
    _same("weights", content, first)


def _on_meta(kind: str) -> None:
    with torch.device("meta"):
        model = training.WithBuffer()
    zero = zeroshard.shard(model, training.adam(model.parameters()), stage=3, device=kind)
    training.loss_of(model, training.batches(kind)(0, ranks.rank())).backward()
    with zero.gathered():
        _alike(kind, model)


def _stepped_before(kind: str) -> None:
    model = training.build(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batch = training.batches(kind)
    training.loss_of(model, batch(0, 0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    zero = zeroshard.shard(model, optimizer, stage=3, offload=Offload(optimizer="cpu"), layout=Layout(bucket_mib=0.02))
    training.loss_of(model, batch(1, ranks.rank())).backward()
    optimizer.step()
    with zero.gathered():
        _alike(kind, model)


def _native(kind: str) -> None:
    """The backend's own sums: alike on all ranks, whatever their order."""
    model, optimizer, zero = training.shard(kind, "fp32", 3, comm=Comm(reduce="native"))
    training.loss_of(model, training.batches(kind)(0, ranks.rank())).backward()
    optimizer.step()
    with zero.gathered():
        _alike(kind, model)


# --- a subgroup -----------------------------------------------------------------------------------------------------


def of_a_subgroup(kind: str, place: Place, store: str, device_id: bool) -> dict[str, str]:
    rank, world = ranks.rank(), ranks.world()
    own = place.own(rank) if device_id and kind != "cpu" else None
    dist.init_process_group(
        GROUPS[kind], store=dist.FileStore(store, world), rank=rank, world_size=world,
        timeout=timedelta(seconds=60), device_id=own,
    )  # fmt: skip
    team = dist.new_group([*range(world - 1)], backend=GROUPS[kind])
    found = (
        each({"two of them train": partial(_train_in, kind, team)}) if rank < world - 1 else {"two of them train": ""}
    )
    synchronize(kind)
    return found


def _train_in(kind: str, team: Any) -> None:
    world = dist.get_world_size(team)
    training.compare(
        training.sharded(kind, "fp32", 3, comm=Comm(group=team)), training.plain(kind, "fp32", world), world
    )
