"""Weights for another program in this process, an inference engine say: whole tensors by name, a bucket at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..checkpoint.content import ModelState
from ..engine.buffer import Buffer
from ..errors import UserError
from ..ranks.together import Together
from .export import Kind, Wanted, each_part, gathered, held_whole, place

if TYPE_CHECKING:
    from ..sharded import Engine


class WeightStream:
    """The weights of a running model, gathered while they are iterated over, on every rank: (name, whole tensor).

    Names, shapes and dtypes are known before (`tensors`). It can be iterated over again, and gives the weights of then.
    """

    def __init__(self, engine: Engine, dtype: torch.dtype | None) -> None:
        """dtype: see `Zero.stream`. Collective."""
        engine.group.same("zero.stream(...)", lambda: {"dtype": str(dtype)})
        self._engine, self._wanted = engine, Wanted(1, dtype, overwrite=False)
        running, of = engine.model_state(), self._wanted.of
        found = {r.name: Kind(running.shape(r), of(r.param.dtype), r.names) for r in running.managed}
        found |= {name: Kind(tuple(each.shape), of(each.dtype), [name]) for name, each in held_whole(running).items()}
        # In the order in which they come.
        order = [slot.name for buffer in running.buffers for slot in buffer.bucket.slots]
        self.tensors: Mapping[str, Kind] = {name: found[name] for name in dict.fromkeys([*order, *found])}

    def __len__(self) -> int:
        return len(self.tensors)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Gather. A rank that leaves the loop early gathers the rest for the others, without a word."""
        engine = self._engine
        engine.meet_for_checkpoint("streaming")
        running, wanted, taken = engine.model_state(), self._wanted, True
        together = Together(engine.group, lambda told: UserError("the weights were not streamed", got="; ".join(told)))
        with engine.ledger.during("export"):
            for buffer in running.buffers:
                with torch.no_grad(), _held(running, buffer, wanted, together) as whole:
                    try:
                        for name, tensor in whole.items() if taken else ():
                            yield name, tensor
                    except GeneratorExit:
                        taken = False
            for name, tensor in held_whole(running).items() if taken else ():
                yield name, wanted.cast(name, tensor.detach(), tensor.dtype)


class _Room:
    """Memory for whole tensors of which the ranks have parts."""

    def __init__(self, memory: Tensor, shapes: Mapping[str, torch.Size]) -> None:
        parts = memory.split([shape.numel() for shape in shapes.values()])
        self.tensors = dict(zip(shapes, parts, strict=True))

    def write(self, name: str, start: int, values: Tensor) -> None:
        self.tensors[name][start : start + values.numel()] = values


@contextlib.contextmanager
def _held(running: ModelState, buffer: Buffer, wanted: Wanted, together: Together) -> Iterator[dict[str, Tensor]]:
    """Hold the whole tensors of a bucket: views of it, or put together, where other ranks have other parts of them."""
    slots, tier = buffer.bucket.slots, buffer.tier
    shapes = {slot.name: torch.Size(buffer.among(slot).shape) for slot in slots}
    with gathered(buffer, wanted, together) as own:
        with together:
            pass  # a rank may have found a value that the dtype cannot hold
        if all(shapes[slot.name] == slot.shape for slot in slots):
            yield {slot.name: own[slot.start : slot.stop].view(slot.shape) for slot in slots}
            return
        memory = tier.reserve("gather", sum(shape.numel() for shape in shapes.values()), own.dtype)
        try:
            room = _Room(memory, shapes)
            for part, flat in each_part(buffer, own, running.group):
                for slot in slots:
                    place(room, slot.name, buffer, slot, part, flat[slot.start : slot.stop])
            yield {name: room.tensors[name].view(shape) for name, shape in shapes.items()}
        finally:
            tier.give_back("gather", memory)
