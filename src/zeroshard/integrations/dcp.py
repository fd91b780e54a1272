"""`torch.distributed.checkpoint`: what `zero.state_dict()` and `zero.load_state_dict()` exchange with it.

    dcp.save({"app": zero}, checkpoint_id="folder")
    dcp.load({"app": zero}, checkpoint_id="folder")

The keys are those of torch's own `get_state_dict(model, optimizer)`: {"model": {name: ...}, "optim": {"state": {name:
{state: ...}}, "param_groups": [...]}}, so FSDP2 and plain tensors read what is written here, and the other way round.
A rank's piece of a tensor is a flat interval; DCP knows boxes, so an interval is given as the boxes that make it up.
Nothing is gathered to save. A parameter's value is its master where it has one.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from ..checkpoint.content import ModelState, options, persistent
from ..checkpoint.loading import Staged, alike, commit, renew
from ..comm.all_or_none import Together
from ..engine.build.supported_optimizers import block_of
from ..engine.step.fragment import Fragment, Shapes, fixed_shapes, per_element, rests_away
from ..engine.step.optim import Binding
from ..engine.weights.bucket import Bucket
from ..errors import CheckpointError, UserError
from ..layout.partition import Slot
from ..planner.optimizers import Shown, asked_with, probe
from .boxes import Box, boxes


class Sharded(Tensor):
    """A tensor's shape, the interval of it that this rank writes, and the wider one that it reads, once DCP asks."""

    writes: tuple[int, int]
    reads: tuple[int, int]
    own: Tensor  # 1-D, the elements it writes: the model's own memory, not a copy
    loaded: Tensor | None  # 1-D, the elements it reads

    @staticmethod
    def __new__(cls, shape: Sequence[int], own: Tensor, writes: tuple[int, int], reads: tuple[int, int]) -> Sharded:
        made: Sharded = torch.Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=own.dtype)
        made.own, made.writes, made.reads, made.loaded = own, writes, reads, None
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Sharded(shape={tuple(self.shape)}, elements={self.writes})"

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if function is torch.ops.aten.new_empty.default and tuple(args[1]) == tuple(args[0].shape):
            # dcp.async_save copies a tensor so: a new one, into which it then copies all attributes, `own` too.
            blank = args[0].own.new_empty(0, device="cpu")
            return cls(args[0].shape, blank, args[0].writes, args[0].reads)
        raise UserError(
            "zero.state_dict() holds this rank's pieces, for torch.distributed.checkpoint to read and write",
            where=f"{function}",
            instead="dcp.save({'app': zero}, checkpoint_id=...); or zero.save(...), or zero.gathered() for tensors",
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UserError(
            "zero.state_dict() holds this rank's pieces, which go into no pickle and no other process",
            instead="dcp.async_save({'app': zero}, ...) with a thread, its default; or zero.save(asynchronous=True)",
        )

    def _written(self) -> list[Box]:
        return list(boxes(self.shape, *self.writes))

    def _read(self) -> list[Box]:
        """List the boxes to read. What is written has boxes of its own, so that an offset names one box."""
        (low, high), (start, stop) = self.writes, self.reads
        if low == high:
            return list(boxes(self.shape, start, stop))
        return [*boxes(self.shape, start, low), *self._written(), *boxes(self.shape, high, stop)]

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                MetadataIndex(fqn, torch.Size(box.offsets)),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(_chunk(box), properties, torch.Size(self.shape)),
            )
            for box in self._written()
        ]

    @torch.inference_mode(False)
    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        self.loaded = torch.empty(self.reads[1] - self.reads[0], dtype=self.dtype, device="cpu")
        return [_chunk(box) for box in self._read()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        flat, first = (self.own, self.writes[0]) if self.loaded is None else (self.loaded, self.reads[0])
        for box in self._written() if self.loaded is None else self._read():
            if torch.Size(box.offsets) == index.offset:
                return flat[box.start - first : box.stop - first].view(box.sizes)
        raise AssertionError(f"no box of {index}")


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))


# --- out ------------------------------------------------------------------------------------------------------------


@torch.inference_mode(False)  # some of its tensors become the optimizer's
def state_dict(running: ModelState) -> dict[str, Any]:
    """Return this rank's part of the model and its optimizers, by reference."""
    if any(rest.on_demand for bucket in running.buckets for rest in (bucket.parameters, bucket.updating)) or any(
        rests_away(bucket) for binding in running.bindings for bucket in running.buckets
    ):
        raise UserError(
            "torch.distributed.checkpoint wants all states in memory, and some rest in files, in halves, in 16 bits, "
            "or beside the device that steps them",
            expected='no state in "nvme", states that the host steps, Offload(step="host"), no split_master, no '
            "Precision.states and no Precision.rounding",
            instead="zero.save(folder), which reads them bucket by bucket",
        )  # fmt: skip
    if cut := [slot.name for bucket in running.buckets for slot in bucket.plan.slots if slot.cut]:
        raise UserError(
            "state_dict() knows parts of a tensor that are some of its rows, and tensor parallelism cut one otherwise",
            where=f"parameter {cut[0]!r}", instead="zero.save(folder), zero.load(folder)",
        )  # fmt: skip
    _warn()
    if running.own_buffers and running.group.ranks > 1 and (own := [name for name, _ in persistent(running.model)]):
        _warn_of_local(own[0])
    model: dict[str, Any] = {}
    for record in running.records:
        model |= dict.fromkeys(record.names, _value(*running.places[record.name]))
    model |= {name: tensor.detach().clone() for name, tensor in persistent(running.model)}
    if not running.bindings:
        return {"model": model}
    slots = [slot for bucket in running.buckets for slot in bucket.plan.slots]
    if stacked := [slot.name for slot in slots if slot.matrix not in ((), slot.shape)]:  # on all ranks, whoever has one
        raise UserError(
            "torch.distributed.checkpoint has one place for a parameter's states, and its matrices have several",
            where=f"parameter {stacked[0]!r}, in Layout.matrices",
            instead="zero.save(path), which loads with and without Layout.matrices",
        )
    states: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    for binding in running.bindings:
        fixed = fixed_shapes(binding.optimizer)
        for fragment, kept in _states(running, binding):
            states[fragment.slot.name] = {key: _state(fragment, key, value, fixed) for key, value in kept.items()}
        groups += [{"params": group["parameters"], **group["options"]} for group in options(running, binding)["groups"]]
    return {"model": model, "optim": {"state": states, "param_groups": groups}}


@functools.cache
def _warn() -> None:
    warnings.warn(
        "torch.distributed.checkpoint keeps its metadata as a pickle: load only what you trust. "
        "zero.save and zero.load read no pickle.",
        stacklevel=4,
    )


@functools.cache
def _warn_of_local(name: str) -> None:
    warnings.warn(
        f"torch.distributed.checkpoint keeps one rank's of each buffer, {name!r} for one, and with "
        'Layout(buffers="local") each rank has its own. zero.save keeps all that differ.',
        stacklevel=3,
    )


def _value(bucket: Bucket, slot: Slot) -> Any:
    own, resting = slot.within(*bucket.saves), slot.within(*bucket.rests)
    at, rows = slot.start + own.start - bucket.updated[0], bucket.among(slot).offset
    if not slot.numel:
        return torch.empty(slot.shape, dtype=bucket.target.dtype, device="cpu")
    written, read = ((rows + part.start, rows + part.stop) for part in (own, resting))
    return Sharded(bucket.among(slot).shape, bucket.target[at : at + own.numel].detach(), written, read)


def _states(running: ModelState, binding: Binding) -> Iterator[tuple[Fragment, Mapping[str, Any]]]:
    """Yield this rank's fragments with their optimizer states; before the first step, with zeros of the same shapes.

    DCP loads in place, so the tensors must exist.
    """
    if (block_of(binding.optimizer) or 1) > 1:
        raise UserError(
            "torch.distributed.checkpoint has no place for states with one number for a block of elements",
            where=type(binding.optimizer).__name__,
            instead="zero.save(path), which any number of ranks loads",
        )
    asked: dict[tuple[int, torch.dtype, tuple[int, ...]], dict[str, Shown]] = {}
    numbers = {id(p): number for number, group in enumerate(binding.optimizer.param_groups) for p in group["params"]}
    for fragment in running.fragments(binding):
        slot, param = fragment.slot, fragment.param
        if not param.numel():
            continue
        kept = binding.optimizer.state.get(param)
        if not kept:
            number = numbers[id(param)]
            key = number, param.dtype, asked_with(binding.optimizer, slot.together)
            if key not in asked:
                asked[key] = probe(binding.optimizer, binding.optimizer.param_groups[number], key[1], key[2])
            shape = tuple(param.shape)
            kept = {
                state: torch.zeros(
                    like.shape(shape), dtype=like.dtype, device=param.device if like.sides is None else None
                )
                for state, like in asked[key].items()
            }
        yield fragment, kept


def _state(fragment: Fragment, key: str, value: Any, fixed: Shapes) -> Any:
    if not isinstance(value, Tensor):
        return value
    part, own = fragment.elements, fragment.saved
    if not per_element(fragment, key, value, fixed):
        return value.detach().clone()  # a copy, since DCP loads in place, and perhaps not on every rank
    flat = value.detach().reshape(-1)[own.start - part.start : own.stop - part.start]
    rows = fragment.bucket.among(fragment.slot).offset
    written, read = ((rows + each.start, rows + each.stop) for each in (own, part))
    return Sharded(fragment.bucket.among(fragment.slot).shape, flat, written, read)


# --- in -------------------------------------------------------------------------------------------------------------


@torch.inference_mode(False)
def load_state_dict(running: ModelState, state: Mapping[str, Any]) -> None:
    """Take what DCP has put into a `state_dict()`, on all ranks or none."""
    staged = Staged()
    wrong = "this state cannot be loaded; nothing was changed"
    with Together(
        running.group,
        lambda told: CheckpointError(wrong, got="; ".join(told)),
        said=lambda error: f"{type(error).__name__}: {error}",
    ):
        if not isinstance(state, Mapping):
            raise UserError("a state is a dict", got=type(state).__name__, instead="zero.state_dict()")
        _stage(running, state, staged)
    commit(running, staged)
    renew(running)


def _stage(running: ModelState, state: Mapping[str, Any], staged: Staged) -> None:
    for record in running.records:
        bucket, slot = running.places[record.name]
        if slot.numel:
            value = _loaded(record.name, state["model"][record.name])
            staged.values[record.name] = value
            if bucket.master is not None:
                updated = slot.within(*bucket.updated)
                first = state["model"][record.name].reads[0] - bucket.among(slot).offset
                staged.masters[record.name] = value[updated.start - first : updated.stop - first]
    staged.buffers = {name: state["model"][name] for name, _ in persistent(running.model)}
    if not running.bindings:
        return
    saved = [(sorted(group["params"]), group) for group in state["optim"]["param_groups"]]
    for binding in running.bindings:
        for group, mine in zip(binding.optimizer.param_groups, options(running, binding)["groups"], strict=True):
            match = next((theirs for names, theirs in saved if names == sorted(mine["parameters"])), None)
            if match is None:
                raise CheckpointError(
                    "no saved group holds just these parameters", got=mine["parameters"][:5],
                    instead="the groups that were saved; or zero.load(path, strict=False) of a checkpoint of zero.save",
                )  # fmt: skip
            theirs = {key: match[key] for key in mine["options"] if key in match}
            if odd := [key for key, value in theirs.items() if not alike(mine["options"][key], value)]:
                raise CheckpointError(
                    "options are of another kind", where=str(odd), got=str([match[k] for k in odd])[:100],
                    instead="the optimizer's options as they were saved, and others after the load",
                )  # fmt: skip
            staged.groups.append((group, theirs))
        for fragment, _ in _states(running, binding):
            name = fragment.slot.name
            found = state["optim"]["state"][name]
            loaded = {
                key: _loaded(f"{key} of {name}", value).to(fragment.param.device).view(fragment.param.shape)
                if isinstance(value, Sharded)
                else value
                for key, value in found.items()
            }
            fresh = not binding.optimizer.state.get(fragment.param)
            if fresh and all(isinstance(v, Tensor) and not v.any() for v in loaded.values()):
                continue  # these zeros were saved before the first step, which begins without states
            staged.states.append((binding, fragment.param, loaded))


def _loaded(name: str, value: Any) -> Tensor:
    if not isinstance(value, Sharded) or value.loaded is None:
        raise UserError(
            "this state was not read by torch.distributed.checkpoint", where=repr(name), got=type(value).__name__,
            instead='dcp.load({"app": zero}, checkpoint_id=...)',
        )  # fmt: skip
    return value.loaded
