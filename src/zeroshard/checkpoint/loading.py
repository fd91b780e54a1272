"""Loading, in two halves: every rank finds and checks all it needs; if all could, all of them read it into place."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..arithmetic.hashing import digest
from ..arithmetic.sums import unrepeated
from ..comm.agreement import Group
from ..comm.all_or_none import Together, problem_of
from ..engine.step.fragment import Fragment, by_parameter, fresh_states, made_of, planes, rests_away
from ..engine.step.optim import Binding
from ..engine.weights.bucket import Bucket
from ..errors import CheckpointError, PeerError
from ..layout.partition import Slot
from ..layout.shard_dim import ONE_STRIP, Strips
from ..rng import Rng, parsed_rng, restore_rng
from ..tiers.tier import Part, present
from ..validation import check_flag
from .content import ModelState, options, persistent
from .dtypes import TORCH_DTYPES
from .files import MANIFEST, absolute, canonical
from .manifest import AVERAGE, VALUE, Saved, Stored, numel, own_name, siblings, unplain
from .others import other

log = logging.getLogger("zeroshard")


class Loaded(NamedTuple):
    """The answer of `zero.load`. extra: what was saved along. skipped: differences that `strict=False` passed over.

    ranks: the number of ranks that saved it; random states are restored where this run has as many. batches: its place
    in `zero.batches`, if it had one. buffers: what was saved of buffers that loading left as they were, because another
    number of ranks saved them (`Layout(buffers="local")`), or because this rank's have another shape or dtype: each
    rank's, on the CPU, or None where it had none.
    """

    extra: dict[str, Any]
    skipped: list[str]
    ranks: int
    batches: dict[str, int] | None = None
    buffers: Mapping[str, list[Tensor | None]] = {}


class Cut(NamedTuple):
    """Elements [start, stop) of a saved state, left in their files until they are read into place, to save memory."""

    saved: Saved
    key: tuple[str, str]
    start: int
    stop: int
    strips: Strips  # elements count in these

    def numel(self) -> int:
        return self.stop - self.start

    def into(self, place: Tensor, *, later: bool) -> None:
        self.saved.fill(self.key, self.start, place, self.strips, later=later)


@dataclass
class Staged:
    """All that this rank is going to change, checked, before anything is changed."""

    values: dict[str, Tensor | Cut] = field(default_factory=dict)  # parameter -> the elements that rest on this rank
    masters: dict[str, Tensor | Cut] = field(default_factory=dict)
    states: list[tuple[Binding, nn.Parameter, dict[str, Any]]] = field(default_factory=list)
    fills: list[tuple[Tensor | Part, Tensor | Cut]] = field(default_factory=list)  # (place in the states, its content)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    differing: dict[str, list[Tensor | None]] = field(default_factory=dict)  # see `Loaded.buffers`
    groups: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    later: list[str] = field(default_factory=list)  # options that only the checkpoint has, by group
    steps: list[tuple[Binding, int]] = field(default_factory=list)  # how many each optimizer had done
    rounded: dict[str, torch.dtype] = field(default_factory=dict)  # states that rest here in a narrower dtype
    extra: dict[str, Any] = field(default_factory=dict)
    rng: Rng | None = None


def load(running: ModelState, path: str | os.PathLike[str], *, strict: bool) -> Loaded:
    """Check and agree; then change everything, on all ranks."""
    # Also called in inference mode: its tensors could not be trained on.
    running.group.same("zero.load(...)", lambda: _asked(path, strict))
    with contextlib.ExitStack() as opened, torch.inference_mode(False):
        return _load(running, absolute(path), opened, strict=strict)


def _asked(path: object, strict: object) -> dict[str, Any]:
    check_flag("strict", strict)
    absolute(path)  # which may differ: ranks may have copies of one checkpoint
    return {"strict": strict}


def _load(running: ModelState, folder: Path, opened: contextlib.ExitStack, *, strict: bool) -> Loaded:
    group = running.group
    problem, differences, staged, saved = None, [], Staged(), None
    try:
        saved = opened.enter_context(running.saved_in(folder))
        differences = _differences(running, saved)
        if not (differences and strict):
            staged = _stage(running, saved)
    except Exception as error:  # the other ranks must hear of it, whatever it is
        problem = problem_of(error)
    seen = None if saved is None else digest(canonical(saved.manifest))
    mine = {"at": str(folder), "problem": problem, "differences": differences, "manifest": seen}
    everyone = group.describe(mine)
    for rank, told in enumerate(everyone):
        if told["problem"]:
            other = next((other for other, each in enumerate(everyone) if each["at"] != told["at"]), None)
            elsewhere = "" if other is None else f"; rank {other} loads {everyone[other]['at']}"
            raise CheckpointError(
                "the checkpoint was not loaded; nothing was changed", where=f"rank {rank}{elsewhere}",
                got=told["problem"],
            )  # fmt: skip
        if strict and told["differences"]:
            raise CheckpointError(
                "the checkpoint is of another model or optimizer; nothing was changed", where=str(folder),
                got="".join(f"\n    {each}" for each in told["differences"]),
                instead="load(..., strict=False) skips these, and says so",
            )  # fmt: skip
        if told["manifest"] != everyone[0]["manifest"]:
            raise PeerError(
                "the ranks see different checkpoints", where=f"rank {rank}", expected=str(folder), got="another one",
                instead="a path on a file system that all ranks have mounted, or equal copies of the folder",
            )  # fmt: skip
    assert saved is not None
    group.torn = "a load did not get to its end: the model holds only some of it"

    def wrong(told: list[str]) -> CheckpointError:
        return CheckpointError(
            "the checkpoint was right and then changed, or failed, while it was read: the model holds only some of it",
            where=str(folder), got=told[0], instead="load again, this one or another, before going on",
        )  # fmt: skip

    with Together(group, wrong):
        commit(running, staged)
        saved.reader.finish()
        renew(running)
        saved.reader.unchanged()
    if group.rank == 0 and staged.later:
        log.info("%s: options that only the checkpoint had were taken: %s", folder, "; ".join(staged.later))
    if group.rank == 0 and staged.rounded:
        kinds = ", ".join(f"{state} to {dtype}" for state, dtype in staged.rounded.items())
        log.info("%s: states rest in a narrower format here, and were rounded to nearest even: %s", folder, kinds)
    running.seed, running.no_sync = saved.manifest["seed"], saved.manifest.get("no_sync", 0)
    if running.moving and saved.manifest.get("average"):
        running.moving.updates = saved.manifest["average"]["updates"]
    place = saved.manifest.get("batches")
    if running.batches is not None and place and not running.batches.differences(place):
        running.batches.load_state_dict(place)
    if staged.rng is not None:
        restore_rng(staged.rng, running.group.device)
    return Loaded(staged.extra, differences, saved.manifest["ranks"], place, staged.differing)


def warn_of_order(saved: ModelState, path: object) -> None:
    """Say on rank 0 that the run whose checkpoint was loaded would go on with different bits."""
    group, before = saved.group, saved.no_sync
    if group.rank == 0 and before not in (0, group.sources):
        warnings.warn(
            f"{path} was trained under no_sync(), where each of {before} ranks adds up its gradients by itself: with "
            f"{group.sources} they are added in another order, and training goes on with different bits than with "
            f"{before}. Without no_sync() these are the same on 1, 2, 4, 8 ... ranks (docs/guide.md, Accumulation)",
            stacklevel=4,
        )


def _differences(running: ModelState, saved: Saved) -> list[str]:
    """Describe everything in which the checkpoint and this model differ."""
    found = []
    mine = {record.name: record for record in running.records}
    for name, record in mine.items():
        entry = saved.parameters.get(name)
        if entry is None:
            found.append(f"parameter {name!r} is not in the checkpoint")
        elif entry.shape != running.shape(record):
            found.append(f"parameter {name!r} has shape {running.shape(record)}, saved was {entry.shape}")
        elif sorted(entry.names) != sorted(record.names):
            found.append(f"parameter {name!r} is tied as {record.names}, saved was {entry.names}")
    found += [f"saved parameter {name!r} is not in the model" for name in saved.parameters if name not in mine]
    buffers, here, before = dict(persistent(running.model)), running.group, saved.manifest["ranks"]
    apart, theirs = _apart(running, saved), saved.buffers_for(here.rank, here.ranks)
    found += [
        f"buffer {name!r} is another one on each of the {before} ranks that saved it, and {here.ranks} load: "
        "strict=False leaves this model's, and has all of theirs in its answer's `buffers`"
        for name in apart
    ]
    found += [f"buffer {name!r} is not in the checkpoint" for name in buffers if not (name in theirs or name in apart)]
    for name, stored in theirs.items():
        if name not in buffers:
            found.append(f"saved buffer {name!r} is not in the model")
        elif not _fits(stored, buffers[name]):
            have = f"{tuple(buffers[name].shape)} {buffers[name].dtype}"
            found.append(
                f"buffer {name!r} is {have}, saved was {stored.shape} {stored.dtype}: give the model one of that kind "
                f"before the load, torch.empty({stored.shape}, dtype={stored.dtype}); or strict=False leaves this "
                "model's, and has each rank's in its answer's `buffers`"
            )
    decays = running.moving and running.moving.decay, (saved.manifest.get("average") or {}).get("decay")
    if decays[0] != decays[1]:
        found.append("the average of the weights has decay {}, saved was {}".format(*decays))
    if running.batches is not None:
        found += running.batches.differences(saved.manifest.get("batches"))
    return found + _group_differences(running, saved)


def _apart(running: ModelState, saved: Saved) -> Mapping[str, list[Stored | None]]:
    """Return each saving rank's copy of the buffers that differ, if another number of ranks loads; else {}."""
    return saved.differing if saved.manifest["ranks"] != running.group.ranks else {}


def _aside(running: ModelState, saved: Saved) -> dict[str, list[Stored | None]]:
    """Return each saving rank's copy of buffers that this rank cannot take: `_apart`, and those that do not fit."""
    ranks, own = saved.manifest["ranks"], dict(persistent(running.model))
    theirs = saved.buffers_for(running.group.rank, running.group.ranks)
    other = [name for name, stored in theirs.items() if name in own and not _fits(stored, own[name])]
    return {**_apart(running, saved), **{name: [saved.buffer(name, rank) for rank in range(ranks)] for name in other}}


def _fits(stored: Stored, tensor: Tensor) -> bool:
    return stored.shape == tuple(tensor.shape) and stored.dtype == tensor.dtype


def _group_differences(running: ModelState, saved: Saved) -> list[str]:
    if not running.bindings:
        return []
    theirs = saved.optimizers
    if len(theirs) != len(running.bindings):
        return [f"{len(running.bindings)} optimizers, saved were {len(theirs)}"]
    found = []
    for number, (binding, told) in enumerate(zip(running.bindings, theirs, strict=True)):
        if told["class"] != (kind := type(binding.optimizer).__name__):
            found.append(f"optimizer {number} is {kind}, saved was {told['class']}")
            continue
        for at, match in enumerate(_matches(running, binding, told)):
            where = f"optimizer {number}, group {at}"
            if match.saved is None:
                found.append(f"{where}: no saved group holds just what it does, {match.names[:3]}")
                continue
            if other := sorted((match.mine.keys() ^ match.saved.keys()) - _later(binding, match)):
                found.append(f"{where}: options {other} are only on one side")
            for key in match.mine.keys() & match.saved.keys():
                mine, theirs = match.mine[key], match.saved[key]
                if not alike(mine, theirs):
                    found.append(f"{where}: option {key!r} is {mine!r}, saved was {theirs!r:.100}")
            for fragment in match.fragments:
                found += [f"{where}: {each}" for each in _state_differences(binding, fragment, match, saved)]
    return found


class Match(NamedTuple):
    """A group of an optimizer's, its parameters by name, its options now and as saved, and what it holds here."""

    group: dict[str, Any]
    names: list[str]
    mine: Mapping[str, Any]
    saved: Mapping[str, Any] | None
    fragments: list[Fragment]
    tensors: Mapping[str, Any] = {}  # of the saved options those that were tensors: their shapes and dtypes


def _matches(running: ModelState, binding: Binding, told: Mapping[str, Any]) -> Iterator[Match]:
    by_names = {tuple(sorted(each["parameters"])): each for each in reversed(told["groups"])}
    held = {id(each.param): each for each in running.fragments(binding)}
    for group, mine in zip(binding.optimizer.param_groups, options(running, binding)["groups"], strict=True):
        names, here = mine["parameters"], [held[id(p)] for p in group["params"] if id(p) in held]
        saved = by_names.get(tuple(sorted(names)), {})
        yield Match(group, names, mine["options"], saved.get("options"), here, saved.get("tensors", {}))


def alike(mine: Any, theirs: Any) -> bool:
    """Tell if an option that is `mine` can become `theirs`. None stands for a bool or a text that was not chosen."""
    if isinstance(mine, list) and isinstance(theirs, list):
        return len(mine) == len(theirs) and all(map(alike, mine, theirs))
    if isinstance(mine, dict) and isinstance(theirs, dict):
        return mine.keys() == theirs.keys() and all(alike(mine[key], theirs[key]) for key in mine)
    if type(theirs) is int and not -(1 << 63) <= theirs < 1 << 63:
        return False
    kinds = {float if type(each) is int else type(each) for each in (mine, theirs)}
    return len(kinds) == 1 or kinds in ({bool, type(None)}, {str, type(None)})


def _later(binding: Binding, match: Match) -> set[str]:
    """Return the saved options that an optimizer's class makes in its first step, which this one has still to do, or
    that a scheduler adds."""
    stepped = any(state for _, state in by_parameter(binding.optimizer))
    return set() if stepped else (match.saved or {}).keys() - match.mine.keys() - {"params", "param_names"}


def _state_differences(binding: Binding, fragment: Fragment, match: Match, saved: Saved) -> list[str]:
    """Describe where loading would change the kind (dtype, shape, presence) of a state that an optimizer has."""
    name = fragment.slot.name
    mine, theirs = {}, {}
    states = {own_name(state): (name, state) for state in saved.states.get(name, ())}
    for key, value in planes(binding.optimizer.state.get(fragment.param, {})).items():
        grain = saved.grains.get(states.get(key, ("", "")), 1)
        blocks = grain > 1 and isinstance(value, Tensor) and value.numel() == -(-fragment.param.numel() // grain)
        like = states.get(key) in saved.cut and isinstance(value, Tensor)
        like = like and (blocks or (grain == 1 and value.shape == fragment.param.shape))
        mine[key] = _kind(value.dtype, None if like else value.shape) if isinstance(value, Tensor) else "a number"
    for key, at in states.items():
        if at in saved.cut:
            theirs[key] = _kind(saved.dtypes[at], None)
        else:
            theirs[key] = _kind(saved.whole[at].dtype, saved.whole[at].shape) if at in saved.whole else "a number"
        if at in saved.whole and 1 < fragment.slot.numel == numel(saved.whole[at].shape) > fragment.param.numel() > 0:
            mine.setdefault(key, "an element for each of a part's")  # which nobody knows how to cut
    keys = mine.keys() | theirs.keys()
    if match.saved is None or any(bool(match.mine.get(key)) != bool(value) for key, value in match.saved.items()):
        keys = mine.keys() & theirs.keys()  # options, such as amsgrad or momentum, decide which states there are
    return [
        f"state {key!r} of {name!r} is {mine.get(key, 'not kept')}, saved was {theirs.get(key, 'none')}"
        for key in (sorted(keys) if mine and theirs else ())
        if mine.get(key) != theirs.get(key)
    ]


def _kind(dtype: torch.dtype, shape: Sequence[int] | None) -> str:
    return f"{'floating' if dtype.is_floating_point else dtype} {'per element' if shape is None else list(shape)}"


def _stage(running: ModelState, saved: Saved) -> Staged:
    staged, manifest = Staged(), saved.manifest
    saved.reader.check_share(running.group.rank, running.group.ranks)
    fitting = dict.fromkeys(  # in the order of the buckets: what rests in a file comes to memory once
        record.name
        for record in sorted(running.records, key=lambda record: running.places[record.name][0].plan.index)
        if record.name in saved.parameters and saved.parameters[record.name].shape == running.shape(record)
    )
    for name in fitting:
        _stage_value(running, saved, name, staged)
    optimizers = saved.optimizers
    paired = len(running.bindings) == len(optimizers)
    for number, (binding, told) in enumerate(zip(running.bindings, optimizers if paired else [], strict=False)):
        alike_kind = told["class"] == type(binding.optimizer).__name__
        if alike_kind:
            staged.steps.append((binding, told.get("steps", 0)))
        for at, match in enumerate(_matches(running, binding, told) if alike_kind else ()):
            theirs = (match.saved or {}).items()
            later = _later(binding, match)
            if later:
                staged.later.append(f"optimizer {number}, group {at}, {sorted(later)}")
            fit = {key: value for key, value in theirs if key in later or key in match.mine}
            fit = {key: value for key, value in fit.items() if key in later or alike(match.mine[key], value)}
            for key in later & match.tensors.keys():
                shape, dtype = match.tensors[key]
                device = match.group["params"][0].device
                fit[key] = torch.full(shape, fit[key], dtype=TORCH_DTYPES[dtype], device=device)
            staged.groups.append((match.group, fit))
            for fragment in match.fragments:
                name = fragment.slot.name
                fits = name in fitting and not _state_differences(binding, fragment, match, saved)
                if fits and fragment.param.numel():
                    staged.states.append((binding, fragment.param, _states(staged, saved, binding, fragment, match)))
    buffers = saved.buffers_for(running.group.rank, running.group.ranks)
    for name, tensor in persistent(running.model):
        if name in buffers and _fits(buffers[name], tensor):
            staged.buffers[name] = saved.read(buffers[name])
    for name, each in _aside(running, saved).items():
        staged.differing[name] = [stored and saved.read(stored) for stored in each]
    staged.extra = unplain(manifest["extra"], {key: saved.read(stored) for key, stored in saved.extra.items()})
    if manifest["ranks"] == running.group.ranks:
        staged.rng = parsed_rng(saved.rng(running.group.rank), running.group.device)
    saved.reader.check_wanted()
    return staged


def _stage_value(running: ModelState, saved: Saved, name: str, staged: Staged) -> None:
    bucket, slot = running.places[name]
    updated, key, alone = slot.within(*bucket.updated), (name, VALUE), bucket.codec.of_masters
    staged.values[name] = value = _wanted(saved, key, bucket, slot, *(updated if alone else resting(running, name)))
    mean = running.moving.part(bucket, slot, *updated) if running.moving and (name, AVERAGE) in saved.cut else None
    if mean is not None:
        staged.fills.append((mean, _wanted(saved, (name, AVERAGE), bucket, slot, *updated)))
    own = bucket.updating.dtype
    if bucket.gradients is not None and bucket.tiers["optimizer"].decodes and saved.dtypes[key].itemsize > own.itemsize:
        staged.rounded["parameters"] = own
    if bucket.master is not None:
        staged.masters[name] = value if alone else _wanted(saved, key, bucket, slot, *updated)


def _wanted(saved: Saved, key: tuple[str, str], bucket: Bucket, slot: Slot, start: int, stop: int) -> Cut:
    """Register elements [start, stop) of a slot with the reader, and return them as a `Cut`.

    Of a state with one element per block it is those of the blocks that hold these elements.
    """
    among, grain = bucket.among(slot), saved.grains.get(key, 1)
    at, strips = among.offset, among.strips if grain == 1 else ONE_STRIP
    cut = Cut(saved, key, (at + start) // grain, -(-(at + stop) // grain), strips)
    saved.want(*cut[1:])
    return cut


def _states(staged: Staged, saved: Saved, binding: Binding, fragment: Fragment, match: Match) -> dict[str, Any]:
    """Return an optimizer's new state of a fragment, with places for what was saved. Tensors of several planes come
    from a step of a twin optimizer: loading makes no object by a name that it reads."""
    name, kept = fragment.slot.name, binding.optimizer.state.get(fragment.param, {})
    told = {own_name(state): state for state in saved.states.get(name, ())}
    if not kept and any("." in state for state in told):
        kept = fresh_states(binding.optimizer, match.group, nn.Parameter(torch.zeros_like(fragment.param)))
    states: dict[str, Any] = {key: value for key, value in kept.items() if made_of(value)}
    inside = {plane: place for plane, place in planes(states).items() if plane in told}
    for state, stored in told.items():
        if state not in inside:
            states[state] = _state(staged, saved, stored, binding, fragment, match)
        elif (name, stored) in saved.cut:
            wanted = _wanted(saved, (name, stored), fragment.bucket, fragment.slot, *fragment.elements)
            staged.fills.append((inside[state].view(-1), wanted))
        else:
            staged.fills.append((inside[state], saved.read(saved.whole[name, stored])))
    return states


def _state(staged: Staged, saved: Saved, stored: str, binding: Binding, fragment: Fragment, match: Match) -> Any:
    name, state, like, group = fragment.slot.name, own_name(stored), fragment.param, match.group
    key = name, stored
    if key in saved.values:
        return saved.values[key]
    if key in saved.cut:
        dtype, grain = saved.computed.get(key, saved.dtypes[key]), saved.grains.get(key, 1)
        place = binding.optimizer.state.get(like, {}).get(state)
        value = saved.computed.get((name, VALUE), saved.dtypes[name, VALUE])
        if dtype.is_floating_point and grain == 1 and dtype == value:
            dtype = fragment.bucket.stepped  # else the optimizer's class chose a dtype of its own
        if dtype.is_floating_point and isinstance(place, Tensor) and grain == 1:
            dtype = place.dtype
        bucket, slot, part = fragment.bucket, fragment.slot, fragment.elements
        if rests_away(bucket) and grain == 1:
            blank = torch.empty(like.shape, dtype=dtype, device="meta")
            rest = binding.states.part(fragment, state, blank)
            if (narrow := rest.rest.at_rest(rest).dtype).itemsize < saved.dtypes[key].itemsize and narrow != dtype:
                staged.rounded[state] = narrow
            staged.fills.append((rest.cut(0, rest.numel()), _wanted(saved, key, bucket, slot, *part)))
            return blank
        shape = like.shape if grain == 1 else torch.Size([-(-part.stop // grain) - part.start // grain])
        wanted = shape, dtype, like.device
        if not (
            isinstance(place, Tensor) and place.is_contiguous() and (place.shape, place.dtype, place.device) == wanted
        ):
            place = torch.empty(shape, dtype=dtype, device=like.device)
        staged.fills.append((place.view(-1), _wanted(saved, key, bucket, slot, *part)))
        return place
    tensor = saved.read(saved.whole[key])
    on_device = group.get("fused") or group.get("capturable") or tensor.dim()
    return tensor.to(like.device) if on_device else tensor


@torch.no_grad()
def commit(running: ModelState, staged: Staged) -> None:
    """Write all that was staged into the model. What is still in files arrives with the reader's `finish`; then call
    `renew`."""
    for name, value in staged.values.items():
        put(running, name, value, staged.masters.get(name))
    for place, cut in staged.fills:
        _put(place, cut)
    for binding, param, states in staged.states:
        if states:
            binding.optimizer.state[param] = states
        else:
            binding.optimizer.state.pop(param, None)
    for binding, steps in staged.steps:
        binding.states.steps.done = steps
    for group, told in staged.groups:
        for key, value in told.items():
            group[key] = _as_it_was(group.get(key), value)
    for name, tensor in persistent(running.model):
        if name in staged.buffers:
            unrepeated(tensor).copy_(unrepeated(staged.buffers[name], tensor))


def _as_it_was(mine: Any, saved: Any) -> Any:
    """Return a saved option in the tensor, tuple or dict that holds it now: JSON knows no tuples and no tensors."""
    if isinstance(mine, Tensor):
        return mine.fill_(saved)
    if isinstance(mine, (list, tuple)) and isinstance(saved, list):
        found = [_as_it_was(own, each) for own, each in zip(mine, saved, strict=True)]
        return tuple(found) if isinstance(mine, tuple) else found
    if isinstance(mine, dict) and isinstance(saved, dict):
        return {key: _as_it_was(mine[key], each) for key, each in saved.items()}
    return saved


def resting(running: ModelState, name: str) -> tuple[int, int]:
    """Return (first, end) of a parameter's elements that rest on this rank."""
    bucket, slot = running.places[name]
    part = slot.within(*bucket.rests)
    return part.start, part.stop


@torch.no_grad()
def put(running: ModelState, name: str, value: Tensor | Cut, master: Tensor | Cut | None) -> None:
    """Write the elements of one parameter that rest on this rank, and those of its master that it updates."""
    bucket, slot = running.places[name]
    at = slot.start + resting(running, name)[0]
    if not bucket.codec.of_masters:  # else they are made of the masters
        _put(bucket.parameters.part(at, at + value.numel()), value)
    if master is not None and bucket.master is not None:
        at = slot.start + slot.within(*bucket.updated).start
        _put(bucket.updating.part(at, at + master.numel()), master)


def _put(place: Tensor | Part, value: Tensor | Cut) -> None:
    place = place.plain() if isinstance(place, Part) else place
    with present(place, changed=True) as here:
        # Later, unless the place is in memory for this moment only.
        value.into(here, later=here is place) if isinstance(value, Cut) else here.copy_(value)


def renew(running: ModelState) -> None:
    """Make parameters show the loaded weights: gathered copies and noted edits of the ones before are dropped."""
    for bucket in running.alone.values():
        param = bucket.params[0]
        param.detach().copy_(bucket.full.view_as(param))  # the same memory, unless the parameter is not contiguous
        param.grad = None
    for bucket in running.buckets:
        bucket.gathered.current &= bucket.resident
        bucket.edits.mark_followed()
        bucket.changed()
        bucket.parameters.settle()


def _no_folder_of_checkpoints(path: Path) -> tuple[str, str] | None:
    """Return what lies at a path without checkpoints below it, and what reads that; None if it may still get some."""
    if (path / MANIFEST).is_file():
        return (
            "this is a checkpoint itself",
            f"zero.load({os.fspath(path)!r}); or zero.latest({os.fspath(path.parent)!r})",
        )
    found = other(path)
    return None if found is None else (found.what, found.instead)


def latest(group: Group, path: str | os.PathLike[str]) -> Path | None:
    """Return the checkpoint saved last in a folder of which every byte is right; each rank checks its share of them."""
    group.same("zero.latest(...)", lambda: {"folder": absolute(path).name})
    folder = absolute(path)
    names = [each.name for each in siblings(folder)] if group.rank == 0 and folder.is_dir() else []
    wrong = _no_folder_of_checkpoints(folder) if group.rank == 0 and folder.exists() and not names else None
    everyone = group.describe([str(folder), folder.is_dir(), names, wrong])
    if len({there for _, there, *_ in everyone}) > 1:
        raise CheckpointError(
            "the ranks look into different folders",
            expected="one on a file system that all ranks have mounted",
            got="; ".join(
                f"rank {rank}: {at}{'' if there else ', which is not there'}"
                for rank, (at, there, *_) in enumerate(everyone)
            ),
            instead="an absolute path, and a folder that is made before any rank looks into it",
        )
    if wrong := everyone[0][3]:
        raise CheckpointError(
            "zero.latest(...) looks into a folder for checkpoints of zeroshard, and this is none",
            where=everyone[0][0],
            got=wrong[0],
            instead=wrong[1],
        )
    for name in everyone[0][2]:
        problem = None
        try:
            with Saved.open(folder / name, alone=group.ranks == 1) as saved:
                saved.reader.check_share(group.rank, group.ranks)
        except CheckpointError as error:
            problem = f"{error}"
        told = group.problems(problem)
        if not told:
            return folder / str(name)
        if group.rank == 0:
            warnings.warn(f"zeroshard passes over a damaged checkpoint. {told[0]}", stacklevel=3)
    if group.rank == 0 and (below := _of_other_runs(folder)):
        warnings.warn(f"zero.latest({str(folder)!r}) finds no checkpoint of zeroshard, but {below}", stacklevel=3)
    return None


def _of_other_runs(folder: Path) -> str:
    """Return in words what another system's run has left in a folder, by its last name; "" if there is nothing."""
    inside = sorted(folder.iterdir(), reverse=True) if folder.is_dir() else []
    for path in inside:
        if path.is_dir() and not path.name.startswith(".") and (found := other(path)) is not None and found.run:
            return f"in {path.name!r}: {found.what}. To go on from it: {found.instead}"
    return ""
