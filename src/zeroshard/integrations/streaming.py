"""Weights for another program in this process, an inference engine say: whole tensors by name, a bucket at a time."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..arithmetic.sums import as_bytes
from ..checkpoint.content import ModelState, model_state, persistent
from ..comm.all_or_none import Together
from ..engine.weights.bucket import Bucket
from ..engine.weights.modes import seen, unseen
from ..errors import Error, StateError, UserError
from .export import Kind, Wanted, each_part, gathered, held_whole, place

if TYPE_CHECKING:
    from ..api import Zero

log = logging.getLogger("zeroshard")


class WeightStream:
    """The weights of a running model, gathered while they are iterated over, on every rank: (name, whole tensor).

    Names, shapes and dtypes are known before (`tensors`). Iterated over again, it gives the weights as they are then.
    """

    def __init__(self, zero: Zero, dtype: torch.dtype | None) -> None:
        """dtype: see `Zero.stream`. Collective."""
        engine = zero._engine
        engine.group.same("zero.stream(...)", lambda: {"dtype": str(dtype)})
        self._zero, self._wanted = zero, Wanted(1, dtype, overwrite=False)
        running, of = model_state(engine), self._wanted.of
        found = {r.name: Kind(running.shape(r), of(r.param.dtype), r.names) for r in running.managed}
        found |= {name: Kind(tuple(each.shape), of(each.dtype), [name]) for name, each in held_whole(running).items()}
        # In the order in which they come.
        order = [slot.name for bucket in running.buckets for slot in bucket.plan.slots]
        self.tensors: Mapping[str, Kind] = {name: found[name] for name in dict.fromkeys([*order, *found])}

    def __len__(self) -> int:
        return len(self.tensors)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Gather bucket by bucket. A rank that leaves the loop early gathers the rest for the others."""
        with unseen():
            yield from self._each()

    def _each(self) -> Iterator[tuple[str, Tensor]]:
        engine = self._zero._engine
        engine.refuse_within()
        with engine.group.as_one():
            engine.meet_for_checkpoint("streaming")
        running, steps, left = model_state(engine), engine.group.progress.steps, False
        together = Together(engine.group, lambda told: UserError("the weights were not streamed", got="; ".join(told)))
        with engine.ledger.during("export"):
            for bucket in [*running.buckets, None]:
                if engine.group.progress.steps != steps and not left:
                    raise StateError(
                        "the model was trained while its weights were streamed",
                        got=f"{engine.group.progress.steps - steps} steps between two of its buckets",
                        instead="the step after the loop over zero.stream(...)",
                    )
                with contextlib.ExitStack() as holding:
                    try:
                        with engine.group.as_one(), torch.no_grad():
                            if bucket is not None:
                                whole = _bucket(running, bucket, self._wanted, together, holding)
                            else:
                                whole = _copied(running, self._wanted, together)
                    except Error as error:
                        if not left:
                            raise
                        log.warning("this rank had left its loop over zero.stream(...) when it ended: %s", error)
                        return
                    try:
                        for name in [] if left else [*whole]:
                            with seen():
                                yield name, whole.pop(name)  # so that no reference stays here
                    except GeneratorExit:
                        left = True
                    whole.clear()


class _Room:
    """Memory for whole tensors of which the ranks have parts."""

    def __init__(self, memory: Tensor, shapes: Mapping[str, torch.Size]) -> None:
        parts = memory.split([shape.numel() for shape in shapes.values()])
        self.tensors = dict(zip(shapes, parts, strict=True))

    def write(self, name: str, start: int, values: Tensor) -> None:
        self.tensors[name][start : start + values.numel()] = values


def _bucket(
    running: ModelState, bucket: Bucket, wanted: Wanted, together: Together, holding: contextlib.ExitStack
) -> dict[str, Tensor]:
    """Gather the whole tensors of a bucket: views of it, or put together, where other ranks have other parts of them.

    holding: gives their memory back as it is closed.
    """
    slots, tier = bucket.plan.slots, bucket.tier
    shapes = {slot.name: torch.Size(bucket.among(slot).shape) for slot in slots}
    if all(shapes[slot.name] == slot.shape for slot in slots):
        own = holding.enter_context(gathered(bucket, wanted, together))
        with together:
            pass  # a rank may have found a value that the dtype cannot hold
        return {slot.name: own[slot.start : slot.stop].view(slot.shape) for slot in slots}
    memory = tier.reserve("gather", sum(shape.numel() for shape in shapes.values()), wanted.of(bucket.dtype))
    holding.callback(tier.give_back, "gather", memory)
    room = _Room(memory, shapes)
    with gathered(bucket, wanted, together) as own:
        for part, flat in each_part(bucket, own, running.group):
            for slot in slots:
                place(room, slot.name, bucket, slot, part, flat[slot.start : slot.stop])
        with together:
            pass
    return {name: room.tensors[name].view(shape) for name, shape in shapes.items()}


def _copied(running: ModelState, wanted: Wanted, together: Together) -> dict[str, Tensor]:
    """Copy what every rank holds whole, buffers for one: rank 0's, as an export has them, or each rank's own."""
    found, own = {}, dict(persistent(running.model)) if running.own_buffers else {}
    for name, tensor in held_whole(running).items():
        copy = torch.zeros(tensor.shape, dtype=wanted.of(tensor.dtype), device=tensor.device)
        with together.noting():
            copy.copy_(wanted.cast(name, tensor.detach(), tensor.dtype))
        if name not in own:
            sent = as_bytes(copy).to(running.group.device)
            running.group.broadcast(sent)
            as_bytes(copy).copy_(sent)
        found[name] = copy
    with together:
        pass
    return found
