"""The content of a checkpoint: a value per parameter, optimizer states, options, buffers, random states.

Every rank owns some elements under the layout; of each parameter it saves the *value* (the master where there is one,
else the parameter) and each optimizer state. What is replicated is split the same way, so everything is written once.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ..arithmetic.digests import raw
from ..arithmetic.hashing import digest
from ..arithmetic.sums import dense
from ..comm.agreement import Group
from ..engine.build.supported_optimizers import block_of, check_named
from ..engine.step.fragment import Fragment, fixed_shapes, is_like, per_element
from ..engine.step.optim import Binding
from ..engine.weights.bucket import Bucket
from ..engine.weights.flat import Flat
from ..engine.weights.unit import Managed
from ..errors import CheckpointError
from ..layout.partition import BucketPlan, Slot, plain_name
from ..layout.shard_dim import ONE_STRIP, Elements, Strips
from ..layout.states import placements
from ..policies.precision import Precision
from ..tiers.tier import DeviceTier, OnDevice, Part
from ..validation import python_number
from .dtypes import DTYPES
from .listed import Here, relist
from .manifest import AVERAGE, VALUE, Saved, own_name, state_name

if TYPE_CHECKING:
    from ..engine.engine import Engine


@dataclass
class ModelState:
    """All of a running model that `save` reads and `load` writes: parameters, buckets, optimizers, counters."""

    model: nn.Module
    managed: list[Managed]
    buckets: list[Bucket]
    bindings: list[Binding]
    group: Group
    stage: int
    seed: int
    records: list[Managed] = field(default_factory=list)  # the managed parameters, then the ignored ones
    alone: dict[int, Bucket] = field(default_factory=dict)  # ignored parameters by id, each as a bucket of its own
    places: dict[str, tuple[Bucket, Slot]] = field(default_factory=dict)  # parameter -> its bucket and slot

    def __post_init__(self) -> None:
        found = {id(record.param): record for record in self.managed}
        for name, param in self.model.named_parameters(remove_duplicate=False):
            record = found.setdefault(id(param), Managed(param, [], [], -1))
            if record.unit < 0:
                record.names.append(plain_name(name))
                self.alone[id(param)] = _alone(record, self.group)
        self.records = list(found.values())
        for bucket in (*self.buckets, *self.alone.values()):
            for slot in bucket.plan.slots:
                self.places[slot.name] = bucket, slot

    moving: Any = None  # the average of the weights, if there is one
    batches: Any = None  # the micro-batches of a run, if zeroshard gives them out
    place: dict[str, int] | None = None  # the run's place in these
    no_sync: int = 0  # how many ranks each added up gradients by itself, under no_sync, since weights were loaded
    kinds: list[Kinds] | None = None  # what all ranks have agreed upon, while they save
    own_buffers: bool = False  # does each rank have buffers of its own (`Layout.buffers`)? Else rank 0's count

    def shape(self, record: Managed) -> tuple[int, ...]:
        """Return the shape of the whole parameter, of which this rank may hold only some rows."""
        bucket, slot = self.places[record.name]
        return bucket.among(slot).shape

    @contextlib.contextmanager
    def saved_in(self, folder: Path) -> Iterator[Saved]:
        """Open a checkpoint, with its lists of experts under the names that they have in this model."""
        rows = [(bucket, slot) for bucket in self.buckets if bucket.plan.axis for slot in bucket.plan.slots]
        with Saved.open(folder, alone=self.group.ranks == 1) as saved:
            here = {slot.name: Here(bucket.among(slot).shape, bucket.team.seat.parts) for bucket, slot in rows}
            relist(saved, {name: each for name, each in here.items() if self.strips(name) == ONE_STRIP})
            yield saved

    def strips(self, name: str) -> Strips:
        """Return how a parameter's parts lie in the whole tensor, row by row."""
        bucket, slot = self.places[name]
        return bucket.among(slot).strips

    def fragments(self, binding: Binding) -> list[Fragment]:
        """Return the optimizer's fragments on this rank, with each of its ignored parameters as one whole fragment."""
        params = [param for group in binding.optimizer.param_groups for param in group["params"]]
        alone = [(p, self.alone[id(p)]) for p in params if id(p) in self.alone]
        return [*binding.fragments, *(Fragment(p, b, 0, Elements(0, p.numel()), tuple(p.shape)) for p, b in alone)]


def _alone(record: Managed, group: Group) -> Bucket:
    """Put a parameter of `Layout.ignore` into a bucket of its own: whole on every rank, saved by rank 0."""
    param, numel = record.param, record.param.numel()
    writable(f"parameter {record.name!r}", param)
    slot, kind = Slot(record.name, tuple(param.shape), 0, numel), (str(param.dtype), param.itemsize)
    key, bounds = (-1, *kind, param.requires_grad), (0, *[numel] * group.team.size)
    plan = BucketPlan(*key, index=-1, slots=(slot,), numel=numel, bounds=bounds)
    bucket = Bucket(plan, [param], 1, placements(0), Precision(), group, DeviceTier(param.device, group.ledger))
    bucket.gathered.full = param.detach().reshape(-1)
    bucket.parameters = Flat(plan, group, OnDevice(bucket.full), param.dtype, bucket.placements.parameters)
    return bucket


def writable(where: str, tensor: Tensor | Part) -> str:
    """Return safetensors' name of a tensor's dtype. Raises `CheckpointError` for a tensor that a file cannot hold."""
    layout = tensor.layout if isinstance(tensor, Tensor) else torch.strided
    if tensor.dtype not in DTYPES or layout is not torch.strided or (isinstance(tensor, Tensor) and not dense(tensor)):
        raise CheckpointError(
            "this kind of tensor cannot be saved", where=where, got=f"{tensor.dtype}, {layout}",
            expected="a dense tensor of real numbers", instead="real numbers, or a buffer with persistent=False",
        )  # fmt: skip
    return DTYPES[tensor.dtype]


def model_state(engine: Engine) -> ModelState:
    """Return the parts of an engine that a checkpoint is made of, and is loaded into."""
    parts = engine.managed, engine.buckets, engine.bindings, engine.group, engine.stage, engine.seed
    sources = engine.group.sources if engine.schedule.backward.was_local else 0
    place = engine.position if engine.batches is None else engine.batches.state_dict()
    own = {"moving": engine.moving, "batches": engine.batches, "place": place}
    own["own_buffers"] = engine.layout.buffers == "local"
    return ModelState(engine.model, *parts, **own, no_sync=sources)


def ignored_digests(running: ModelState) -> dict[str, str]:
    """Digest ignored parameters and their optimizer states, which no engine averages, so ranks' may differ."""
    found = {}
    for bucket in running.alone.values():
        states = [binding.optimizer.state.get(bucket.params[0], {}) for binding in running.bindings]
        for key, value in [(VALUE, bucket.full), *(item for state in states for item in state.items())]:
            content = raw(value.detach().cpu().contiguous()) if isinstance(value, Tensor) else repr(value)
            found[f"{key} of parameter {bucket.plan.slots[0].name!r}"] = digest(content)
    return found


class Piece(NamedTuple):
    """Elements [start, stop) of one state of one parameter, 1-D; or, with start None, a tensor of its own shape.

    grain: of how many of the parameter's elements the state has one. computed: the dtype that the optimizer computes
    in, as safetensors spells it, if the state rests in a narrower one; else "".
    """

    parameter: str
    state: str
    start: int | None
    stop: int | None
    tensor: Tensor | Part
    grain: int = 1
    computed: str = ""


@dataclass
class Kinds:
    """The kinds of an optimizer's states, told by the shapes that all ranks see: an element per element of the
    parameter, one per block of elements, or a state of the parameter as a whole.

    A rank alone cannot always tell. It may hold one element of a parameter, whose states are all of one element there;
    or 10 of 138, where each parameter has a history of 10 numbers.
    """

    fixed: dict[str, set[tuple[int, ...]]]  # see `fixed_shapes`
    parts: dict[str, dict[str, Any]]  # the states of each cut parameter: as `_told` says, or `_agreed`
    grains: dict[str, int]  # block size, in elements, of each state with one element per block

    def grain(self, fragment: Fragment, key: str, value: Any) -> int:
        """Return how many elements of the parameter share one of the state; 0: all, the state is of the whole."""
        agreed = self.parts.get(fragment.slot.name, {}).get(key)
        if isinstance(value, Part) or (per_element(fragment, key, value, self.fixed) if agreed is None else agreed):
            return 1
        return self.grains.get(key, 0)


def _grains(running: ModelState, binding: Binding) -> dict[str, list[int]]:
    """Return for each state the block sizes that fit it on every fragment of this rank; {} if its optimizer has no
    blocks."""
    together = block_of(binding.optimizer) or 1
    blocks = [block for block in range(2, together + 1) if together % block == 0]
    found: dict[str, list[int]] = {}
    for fragment in running.fragments(binding) if blocks else ():
        for key, value in binding.states.kept(fragment).items():
            flat, numel = isinstance(value, Tensor) and value.dim() == 1, fragment.param.numel()
            fits = [block for block in found.get(key, blocks) if flat and -(-numel // block) == value.numel()]
            found[key] = fits
    return found


def told_kinds(running: ModelState) -> list[Any]:
    """Describe this rank's states for the others, JSON-able: of each optimizer the fixed shapes, the states of cut
    parameters, the block sizes that fit, and the groups that hold parts."""
    found = []
    for binding in running.bindings:
        check_named(binding.optimizer)
        parts: dict[str, list[dict[str, Any]]] = {}
        for fragment in running.fragments(binding):
            if 0 < fragment.param.numel() < math.prod(fragment.bucket.among(fragment.slot).shape):
                kept, name = binding.states.kept(fragment), fragment.slot.name
                told = {state_name(name, key): _told(fragment, key, value) for key, value in kept.items()}
                parts.setdefault(name, []).append(told)
        fixed = {f"{key}": sorted(shapes) for key, shapes in fixed_shapes(binding.optimizer).items()}
        found.append([fixed, parts, _grains(running, binding), _holding(binding)])
    return found


def _holding(binding: Binding) -> dict[str, int]:
    """Return the number of the group that holds this rank's part, by name of each parameter that is cut; -1: none."""
    groups = {id(p): number for number, group in enumerate(binding.optimizer.param_groups) for p in group["params"]}
    held = {(id(each.bucket), each.position): groups.get(id(each.param), -1) for each in binding.fragments}
    found = {}
    for place in (member.place for member in binding.members):
        bucket, slot = place.bucket, place.bucket.plan.slots[place.position]
        if 0 < slot.within(*bucket.updated).numel < math.prod(bucket.among(slot).shape):
            found[slot.name] = held.get((id(bucket), place.position), -1)
    return found


def _told(fragment: Fragment, key: str, value: Any) -> list[Any]:
    """Describe one state of a fragment: [has it the fragment's shape?, its shape if a tensor, else None; its digest or
    repr if it has not the fragment's shape]."""
    if isinstance(value, Part) or is_like(key, value, fragment.param.shape, {}):
        return [True, list(value.shape), ""]
    if isinstance(value, Tensor):
        return [False, list(value.shape), digest(raw(value.detach().cpu().contiguous()))]
    return [False, None, repr(value)]


def agreed_kinds(everyone: Sequence[list[Any]]) -> list[Kinds]:
    """Merge every rank's `told_kinds` into one verdict. Raises `CheckpointError` for states that no load could cut."""
    found = []
    for ranks in zip(*everyone, strict=True):
        _check_holding([holding for *_, holding in ranks])
        kinds = Kinds({}, {}, _common([grains for *_, grains, _ in ranks]))
        for fixed, *_ in ranks:
            for key, shapes in fixed.items():
                kinds.fixed.setdefault(key, set()).update(map(tuple, shapes))
        for name in dict.fromkeys(name for _, parts, *_ in ranks for name in parts):
            there = [each for _, parts, *_ in ranks for each in parts.get(name, ())]
            for state in dict.fromkeys(state for each in there for state in each):
                like = _agreed(name, own_name(state), [each.get(state) for each in there], kinds)
                kinds.parts.setdefault(name, {})[own_name(state)] = like
        found.append(kinds)
    return found


def _check_holding(ranks: Sequence[Mapping[str, int]]) -> None:
    """Raise where a fragment was taken out of its group, or put into another, on some of the ranks that have parts."""
    for name in dict.fromkeys(name for holding in ranks for name in holding):
        told = {rank: holding[name] for rank, holding in enumerate(ranks) if name in holding}
        if len(set(told.values())) > 1:
            raise CheckpointError(
                "only some ranks' parts of a parameter are in one group of the optimizer, which updates it in part",
                where=f"parameter {name!r}", expected="the parts of all ranks in one group, or in none",
                got="; ".join(f"rank {rank}: {'none' if at < 0 else f'group {at}'}" for rank, at in told.items()),
                instead="model.get_parameter(name).requires_grad_(False), not to train it; or other groups before "
                "shard(...), which knows whose parts are whose",
            )  # fmt: skip


def _common(ranks: Sequence[dict[str, list[int]]]) -> dict[str, int]:
    """Return the largest block size that all ranks found of each state; states without one are left out."""
    found = {}
    for key in dict.fromkeys(key for grains in ranks for key in grains):
        if common := set.intersection(*(set(grains[key]) for grains in ranks if key in grains)):
            found[key] = max(common)
    return found


def _agreed(name: str, key: str, told: Sequence[Any], kinds: Kinds) -> bool:
    """Decide if a cut parameter's state has an element for each of its elements. told: each rank's `_told`, or None."""
    shapes = {tuple(each[1]) for each in told if each is not None and each[1] is not None}
    if all(each is not None and each[0] for each in told):
        return len(shapes) > 1 or not shapes & kinds.fixed.get(key, set())
    if key in kinds.grains:
        return False
    if len({str(each and each[1:]) for each in told if each is None or not each[0]}) > 1 or len(shapes) > 1:
        raise CheckpointError(
            "an optimizer keeps something else of each rank's part of a parameter, and other parts could not get it",
            where=f"state {key!r} of parameter {name!r}", expected="an element for each of the part's, or all the same",
            got="; ".join("nothing" if each is None else f"{each[2]} {each[1] or ''}".strip() for each in told),
            instead='Layout(bounds="tensor"), which cuts no parameter',
        )  # fmt: skip
    return False


def pieces(running: ModelState) -> Iterator[Piece]:
    for bucket in (*running.buckets, *running.alone.values()):
        for slot in bucket.plan.slots:
            own, at = slot.within(*bucket.saves), bucket.among(slot).offset
            if own.numel:
                value = bucket.updating.part(slot.start + own.start, slot.start + own.stop)
                wide = bucket.tiers["optimizer"].decodes if bucket.gradients is not None else None
                computed = "" if wide is None else DTYPES[wide]
                yield Piece(slot.name, VALUE, at + own.start, at + own.stop, value.plain(), computed=computed)
                mean = None if running.moving is None else running.moving.part(bucket, slot, own.start, own.stop)
                if mean is not None:
                    yield Piece(slot.name, AVERAGE, at + own.start, at + own.stop, mean.plain())
    for name, key, value, held, own, grain in _kept(running):
        if isinstance(value, Part):
            part = value.cut(own.start - held, own.stop - held)
            kept = part.rest.at_rest(part) if part.rest.coded else part
            computed = "" if kept.dtype == part.dtype else DTYPES[part.dtype]
            yield Piece(name, key, own.start, own.stop, kept, computed=computed)
        elif grain:
            first, last = -(-own.start // grain), -(-own.stop // grain)  # the owner of a block's first element saves it
            flat = value.detach().reshape(-1)[first - held // grain : last - held // grain]
            if last > first:
                yield Piece(name, key, first, last, flat, grain)
        elif (
            isinstance(value, Tensor) and own.start == 0
        ):  # one number, or a shape of its own: element 0's owner saves it
            yield Piece(name, key, None, None, value.detach())


def values(running: ModelState) -> Iterator[list[Any]]:
    """Yield [parameter, state, number] of what optimizers keep besides tensors."""
    for name, key, value, _held, own, _grain in _kept(running):
        if not isinstance(value, (Tensor, Part)) and own.start == 0:
            finite = not isinstance(value, float) or math.isfinite(value)
            if not isinstance(value, (int, float, str, bool, type(None))) or not finite:
                raise CheckpointError(
                    "an optimizer keeps something that is neither a tensor nor a number",
                    where=f"state {key!r} of parameter {name!r}",
                    got=type(value).__name__ if finite else repr(value), instead="a tensor of one element",
                )  # fmt: skip
            yield [name, key, value]


def _kept(running: ModelState) -> Iterator[tuple[str, str, Any, int, Elements, int]]:
    """Yield (parameter, state, its value on this rank, the first element that the value covers, the elements that this
    rank writes, and how many elements share one of the state; 0: all). Elements count in the whole tensor."""
    local = [Kinds(fixed_shapes(each.optimizer), {}, _common([_grains(running, each)])) for each in running.bindings]
    for binding, kinds in zip(running.bindings, running.kinds or local, strict=True):
        for fragment in running.fragments(binding):
            part, own = fragment.elements, fragment.saved
            at = fragment.bucket.among(fragment.slot).offset
            if part.numel and own.numel:
                for key, value in binding.states.kept(fragment).items():
                    grain = kinds.grain(fragment, key, value)
                    name = fragment.slot.name
                    yield (
                        name,
                        state_name(name, key),
                        value,
                        at + part.start,
                        Elements(at + own.start, at + own.stop),
                        grain,
                    )


def persistent(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for path, module in model.named_modules():
        for name, tensor in module._buffers.items():
            if tensor is not None and name not in module._non_persistent_buffers_set:
                yield plain_name(f"{path}.{name}" if path else name), tensor


def told_buffers(running: ModelState) -> dict[str, list[Any]]:
    """Describe this rank's saved buffers for the others where each rank has its own, else {}: name -> [shape, dtype,
    digest]."""
    if not running.own_buffers or running.group.ranks == 1:
        return {}
    return {
        name: [list(each.shape), writable(f"buffer {name!r}", each), digest(raw(each.detach().cpu().contiguous()))]
        for name, each in persistent(running.model)
    }


def local_buffers(everyone: Sequence[dict[str, list[Any]]]) -> list[str]:
    """Return the names of the buffers that are not the same on all ranks. everyone: each rank's `told_buffers`."""
    names = {name for told in everyone for name in told}
    return [name for name in sorted(names) if any(told.get(name) != everyone[0].get(name) for told in everyone)]


def options(running: ModelState, binding: Binding) -> dict[str, Any]:
    """Return an optimizer's class name, the number of its steps where formats round by it, and of each group the names
    of its parameters and its options."""
    groups = []
    members: dict[int, list[str]] = {}  # by group, the names of what it updates
    for member in binding.members:
        members.setdefault(id(member.group), []).append(member.place.name)
    for group in binding.optimizer.param_groups:
        told = {}
        for key, value in group.items():
            if key not in ("params", "param_names"):
                told[key] = _option(value)
        names = members.get(id(group), [])
        names += [running.alone[id(p)].plan.slots[0].name for p in group["params"] if id(p) in running.alone]
        made = {k: [list(v.shape), DTYPES[v.dtype]] for k, v in group.items() if isinstance(v, Tensor)}
        groups.append({"parameters": names, "options": told} | ({"tensors": made} if made else {}))
    steps = binding.states.steps
    counted = {"steps": steps.done} if steps.saved else {}
    return {"class": type(binding.optimizer).__name__, **counted, "groups": groups}


def _option(value: Any) -> Any:
    """Convert an option: a tensor or a number of NumPy's to Python's number, a tuple to a list."""
    if isinstance(value, (list, tuple)):
        return [_option(each) for each in value]
    if isinstance(value, dict):
        return {key: _option(each) for key, each in value.items()}
    return float(value) if isinstance(value, Tensor) else python_number(value)
