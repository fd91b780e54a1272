"""Fragments: this rank's part of each parameter for an optimizer, their optimizer states, and where these rest.

The state is in `optimizer.state`, as always, by the optimizer's own names. For a state that rests in a file there is a
tensor without memory (on meta) until its bucket is present for a step.
"""

from __future__ import annotations

import collections
import contextlib
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...arithmetic.sums import simulated
from ...comm.agreement import Group
from ...errors import UserError
from ...events import DEVICE, HOST, NVME
from ...layout.partition import Slot
from ...layout.shard_dim import Elements
from ...layout.stage import STATES
from ...tiers.tier import Part, Steps
from ..weights.bucket import Bucket, Place
from ..weights.flat import Flat

Shapes = Mapping[str, set[tuple[int, ...]]]  # by an optimizer's own name of a state


class Member(NamedTuple):
    """A parameter that an optimizer updates, on whichever rank, and the group it is in."""

    place: Place
    group: dict[str, Any]


class Fragment(NamedTuple):
    """Elements of one parameter that one optimizer on this rank updates together. shape: in which it sees them."""

    param: nn.Parameter
    bucket: Bucket
    position: int
    elements: Elements  # of its slot
    shape: tuple[int, ...]

    @property
    def slot(self) -> Slot:
        return self.bucket.plan.slots[self.position]

    @property
    def saved(self) -> Elements:
        """Those of its elements that this rank writes to a checkpoint."""
        start, stop = self.slot.start + self.elements.start, self.slot.start + self.elements.stop
        first, last = self.bucket.saves
        return self.slot.within(max(start, first), min(stop, last))

    @property
    def own(self) -> slice:
        """Its elements as indices into a tensor of all that this rank updates of the bucket."""
        if not self.elements.numel:
            return slice(0, 0)
        first = self.slot.start - self.bucket.updated[0]
        return slice(first + self.elements.start, first + self.elements.stop)

    def view(self, *, inside: bool = False) -> Tensor:
        """Return a view of its elements at rest. Those not always in memory are NaN, unless `inside` their here()."""
        if self.bucket.updating.on_demand and not inside:
            return self.bucket.absent(self.elements.numel).view(self.shape)
        return self.bucket.target[self.own].view(self.shape)


class States:
    """One optimizer's state of its fragments on this rank."""

    def __init__(self, optimizer: torch.optim.Optimizer, number: int, group: Group) -> None:
        self.optimizer = optimizer
        self.number = number
        self.group = group
        self.steps = Steps()
        self._fragments: dict[int, list[Fragment]] = {}  # by bucket
        self._rests: dict[int, dict[str, Flat]] = {}  # by bucket and name, a place in a file
        self._counters: dict[int, Tensor] = {}  # by bucket, a tensor that has its fragments' version counter
        self._versions: dict[int, int] = {}  # by bucket, its count when all writes were last known
        self._addresses: dict[int, int] = {}  # by fragment's id, where its memory is
        self._counted: dict[tuple[str, str], int] = {}  # bytes in the ledger, by tier and name
        self._stateful = 0  # parameters that had state then

    def follow(self, fragments: Sequence[Fragment]) -> None:
        """Set the fragments that the optimizer holds now."""
        self._fragments = {}
        for fragment in fragments:
            self._fragments.setdefault(fragment.bucket.plan.index, []).append(fragment)

    def of(self, bucket: Bucket) -> list[Fragment]:
        return self._fragments.get(bucket.plan.index, [])

    # --- what is written to fragments outside a step ----------------------------------------------------------------

    def fragments(self, place: Place, *, requires_grad: bool) -> list[Fragment]:
        """Make fragments for the optimizer to update: one, or one for each stacked matrix. Those of a bucket share a
        version counter, which is theirs alone."""
        bucket = place.bucket
        if bucket.plan.index not in self._counters:
            first, last = bucket.updated
            flat = bucket.absent(last - first) if bucket.updating.on_demand else bucket.target
            self._counters[bucket.plan.index] = flat.data
            self._versions[bucket.plan.index] = 0
        flat = self._counters[bucket.plan.index]
        made = []
        for part, shape in parts_of(bucket, place.position):
            blank = Fragment(nn.Parameter(), bucket, place.position, part, shape)
            param = nn.Parameter(flat[blank.own].view(shape), requires_grad=requires_grad)
            self._addresses[id(param)] = _address(param)
            made.append(blank._replace(param=param))
        return made

    def point(self, fragment: Fragment, *, inside: bool = False) -> None:
        """Point a fragment at where its elements are now."""
        fragment.param.data = fragment.view(inside=inside)
        self._addresses[id(fragment.param)] = _address(fragment.param)

    def retarget(self, bucket: Bucket) -> None:
        """Make a bucket's fragments views of its masters, which it has just got."""
        if bucket.plan.index in self._counters:
            self._counters[bucket.plan.index].data = bucket.absent(0) if bucket.updating.on_demand else bucket.target
        for fragment in self.of(bucket):
            self.point(fragment)

    def written(self) -> list[Bucket]:
        """Return buckets whose fragments were written to since `followed`."""
        return [
            fragments[0].bucket
            for index, fragments in self._fragments.items()
            if self._counters[index]._version != self._versions[index]
        ]

    def followed(self, only: Bucket | None = None) -> None:
        """Take note that all writes to fragments so far are known; `only`: those to one bucket's."""
        known = {index: counter._version for index, counter in self._counters.items()}
        self._versions = known if only is None else self._versions | {only.plan.index: known[only.plan.index]}

    def replaced(self, fragments: Sequence[Fragment], *, inside: bool = False) -> list[Bucket]:
        """Copy replaced `.data` of fragments into their buckets, make them views again, and return these buckets.

        Raises `UserError` for data of another shape, dtype or device.
        """
        found: dict[int, Bucket] = {}
        for fragment in fragments:
            param, bucket = fragment.param, fragment.bucket
            if _address(param) == self._addresses[id(param)]:
                continue
            data, mine = param.data, fragment.view(inside=inside)
            self.point(fragment, inside=inside)
            if (data.shape, data.dtype, data.device) != (mine.shape, mine.dtype, mine.device):
                raise UserError(
                    "the data of what an optimizer holds of a parameter was replaced by something of another kind",
                    where=f"optimizer {self.number}, parameter {fragment.slot.name!r}, rank {self.group.rank}",
                    expected=f"{tuple(mine.shape)} {mine.dtype} on {mine.device}",
                    got=f"{tuple(data.shape)} {data.dtype} on {data.device}",
                    instead="edit it in place",
                )
            if inside or not bucket.updating.on_demand:
                mine.copy_(data)
            found[bucket.plan.index] = bucket
        return list(found.values())

    # --- what optimizers keep ---------------------------------------------------------------------------------------

    def cut(
        self, fragment: Fragment, key: str, value: Any, options: dict[str, Any], *, fixed: Shapes, broadcast: bool
    ) -> Any:
        """Return this rank's part of a whole parameter's state, moved to where it rests. fixed: see `fixed_shapes`."""
        if not isinstance(value, Tensor):
            return value
        slot, home, like = fragment.slot, value.device, fragment.param
        value = value.detach().to(like.device, copy=True).contiguous()
        if broadcast:
            self.group.broadcast(value.view(-1))
        if 0 < like.numel() < slot.numel:
            check_cut(self.optimizer, slot.name, slot.shape, key, value)
        if not is_like(key, value, slot.shape, fixed):
            return value if options.get("fused") or options.get("capturable") else value.to(home)
        value = value.reshape(-1)[fragment.elements.start : fragment.elements.stop].view(like.shape)
        # Cast as load_state_dict does it: to the dtype of what is updated.
        value = value.to(fragment.bucket.stepped if value.is_floating_point() else value.dtype, copy=True)
        return self._put_away(fragment, key, value, fixed) if rests_away(fragment.bucket) else value

    def count(self, *, changed: bool = False) -> None:
        """Tell the ledger the bytes of states; `changed`: only if more or fewer parameters have state than before."""
        if changed and len(self.optimizer.state) == self._stateful:
            return
        stateful = len(self.optimizer.state)
        now: dict[tuple[str, str], int] = {}
        held = [each for fragments in self._fragments.values() for each in fragments]
        tiers = {id(each.param): each.bucket.tiers["optimizer"].name for each in held}
        for param, state in by_parameter(self.optimizer):
            tier = HOST if tiers.get(id(param)) == NVME else tiers.get(id(param), DEVICE)
            for key, value in planes(state).items():
                if isinstance(value, Tensor) and not value.is_meta:
                    now[tier, key] = now.get((tier, key), 0) + value.numel() * value.itemsize
        for at in dict.fromkeys([*now, *self._counted]):
            self.group.ledger.hold(at[1], now.get(at, 0) - self._counted.get(at, 0), at[0])
        self._counted, self._stateful = now, stateful

    # --- in files ---------------------------------------------------------------------------------------------------

    def kept(self, fragment: Fragment) -> dict[str, Any]:
        """Return the states of a fragment; one that rests in a file as its part of that."""
        state = planes(self.optimizer.state.get(fragment.param, {}))
        return {
            key: self.part(fragment, key, value) if isinstance(value, Tensor) and value.is_meta else value
            for key, value in state.items()
        }

    def part(self, fragment: Fragment, key: str, like: Tensor) -> Part:
        """Return the part of a file in which one state of a fragment rests. The file is reserved at the first call."""
        bucket, slot = fragment.bucket, fragment.slot
        rests = self._rests.setdefault(bucket.plan.index, {})
        if key not in rests:
            name = file_name(key, self.number)
            tier, degree = bucket.tiers["optimizer"].of(key, self.steps), bucket.placements.optimizer
            rests[key] = Flat.reserve(name, bucket.plan, self.group, tier, like.dtype, degree)
        part = fragment.elements
        return rests[key].part(slot.start + part.start, slot.start + part.stop)._replace(shape=tuple(like.shape))

    def _put_away(self, fragment: Fragment, key: str, value: Any, fixed: Shapes) -> Any:
        """Write one state into its file, and return a tensor without memory (on meta) in its place. Return the state
        itself if it is on meta already, or is not per element."""
        if not per_element(fragment, key, value, fixed) or value.is_meta:
            return value
        with self.part(fragment, key, value).here(changed=True) as place:
            if place.untyped_storage()._cdata != value.untyped_storage()._cdata:
                place.copy_(value)
        return torch.empty_like(value, device="meta")

    def moving(self, bucket: Bucket) -> list[Flat]:
        """Return the parts of a bucket that a step brings to memory and changes there."""
        return [bucket.updating, *self._rests.get(bucket.plan.index, {}).values()]

    def ahead(self, bucket: Bucket) -> None:
        """Prefetch from files what a bucket needs to be stepped soon."""
        bucket.updating.ahead()
        if bucket.gradients is not None:
            bucket.gradients.ahead()
        for rest in self.moving(bucket)[1:]:
            rest.ahead()

    @contextlib.contextmanager
    def present(self, bucket: Bucket) -> Iterator[None]:
        """Bring fragments and states of one bucket to memory for the block, where the user's `step` finds them."""
        fragments = self.of(bucket)
        with contextlib.ExitStack() as here:
            self.steps.running = True
            here.callback(setattr, self.steps, "running", False)  # last, once all is encoded
            for rest in self.moving(bucket):
                here.enter_context(rest.here())
            if bucket.gradients is not None and not bucket.sums_come:
                here.enter_context(bucket.gradients.here(changed=False))
            for fragment in fragments:
                if bucket.updating.on_demand:
                    self.point(fragment, inside=True)
                for key, part in self.kept(fragment).items():
                    if isinstance(part, Part):
                        tensor = part.rest.tensor[part.start : part.stop].view(part.shape)
                        self.optimizer.state[fragment.param][key] = tensor
            try:
                yield
            finally:
                tiny = rests_away(bucket) and any(fragment.param.numel() == 1 for fragment in fragments)
                fixed = fixed_shapes(self.optimizer) if tiny else {}  # for larger ones the shape alone decides
                for fragment in fragments:
                    if rests_away(bucket) and fragment.param.numel():
                        state = self.optimizer.state.get(fragment.param, {})
                        state.update({key: self._put_away(fragment, key, value, fixed) for key, value in state.items()})
                    if bucket.updating.on_demand:
                        self.point(fragment)
        for rest in filter(None, (*self.moving(bucket), bucket.parameters, bucket.gradients)):
            rest.behind()

    @contextlib.contextmanager
    def decoded(self, bucket: Bucket) -> Iterator[None]:
        """Show the optimizer what it updates in the dtype in which it computes, if that rests in a narrower one; inside
        `present`. After the block all that rests is rounded."""
        tier, fragments = bucket.tiers["optimizer"], self.of(bucket)
        if tier.decodes is None:
            yield
            return
        try:
            with tier.decoded(bucket.target, self.steps) as bucket.decoded:
                for fragment in fragments:
                    self.point(fragment, inside=True)
                yield
        finally:
            bucket.decoded = None
            for fragment in fragments:
                self.point(fragment, inside=True)


def file_name(key: str, number: int) -> str:
    """Return the name of a state's file: different for each optimizer, and never one of the engine's own names."""
    return f"{key} of optimizer {number}" if number or key in (*STATES, "master") else key


def planes(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter's optimizer state with tensor subclasses split into their inner tensors (codes, scales)."""
    found: dict[str, Any] = {}
    for key, value in state.items():
        inner = made_of(value)
        found |= {f"{key}.{name}": getattr(value, name) for name in inner} if inner else {key: value}
    return found


def made_of(value: Any) -> list[str]:
    """Return the names of a tensor subclass' inner tensors; none for a plain tensor."""
    own = isinstance(value, Tensor) and not simulated(value) and hasattr(value, "__tensor_flatten__")
    return list(value.__tensor_flatten__()[0]) if own else []


def by_parameter(optimizer: Any) -> list[tuple[Tensor, Any]]:
    """Return (parameter, its state) of an optimizer's state, without what some classes keep there under names."""
    return [(param, state) for param, state in optimizer.state.items() if is_state(param, state)]


def is_state(param: Any, state: Any) -> bool:
    return isinstance(param, Tensor) and isinstance(state, Mapping)


def fresh_states(optimizer: Any, group: dict[str, Any], param: nn.Parameter, kind: Any = None) -> dict[str, Any]:
    """Return `param`'s state after one step of a twin of `optimizer` (its class, or `kind`), with this group's options.

    The optimizer itself is not touched. The step updates `param`, with a gradient of zeros if it has none.
    """
    param.grad = torch.zeros_like(param) if param.grad is None else param.grad
    kind = type(optimizer) if kind is None else kind
    twin = twin_of(optimizer, [{**group, "params": [param]}], kind)
    with uncompiled():
        kind.step(twin)  # not twin.step: a scheduler has bound that of the optimizer itself
    return dict(twin.state[param])


def twin_of(optimizer: Any, groups: list[dict[str, Any]], kind: Any) -> Any:
    """Return an optimizer of this kind with another one's attributes, but its own groups, no states and no hooks."""
    twin = object.__new__(kind)
    twin.__dict__.update(optimizer.__dict__)
    twin.state, twin.param_groups = collections.defaultdict(dict), groups
    twin._optimizer_step_pre_hooks = collections.OrderedDict()
    twin._optimizer_step_post_hooks = collections.OrderedDict()
    return twin


def uncompiled() -> contextlib.AbstractContextManager[Any]:
    """Compile nothing in the block: to compile a twin's step takes a minute, and to ask whether to takes a second."""
    compiles = "torch._dynamo" in sys.modules
    return torch.compiler.set_stance("force_eager") if compiles else contextlib.nullcontext()


def updated(optimizer: Any) -> list[Any]:
    """Return the parameters in an optimizer's groups; none for what is no optimizer of torch's."""
    groups = optimizer.param_groups if isinstance(optimizer, torch.optim.Optimizer) else []
    return [param for group in groups for param in group["params"]]


def check_cut(optimizer: Any, name: str, shape: tuple[int, ...], key: str, value: Any) -> None:
    """Refuse state of a whole parameter that a rank cannot keep its part of."""
    if isinstance(value, Tensor) and value.numel() != 1 and tuple(value.shape) != shape:
        raise UserError(
            "the optimizer already has state that cannot be cut",
            where=f"{type(optimizer).__name__}.state of {name!r}, key {key!r}",
            expected=f"shape {shape} or a scalar",
            got=tuple(value.shape),
            instead="shard before the first step",
        )


def parts_of(bucket: Bucket, position: int) -> list[tuple[Elements, tuple[int, ...]]]:
    """Return the pieces of a parameter that an optimizer on this rank updates: the elements and the shape of each.

    A piece is 1-D if the parameter is cut. Else it has the parameter's shape on the rank that updates the parameter,
    and is empty on all others, with as many dimensions (`_nothing_of`). Of stacked matrices (`Layout.matrices`) each
    is a piece. A parameter without dimensions is a piece of one dimension: so its states differ in shape from a count
    of steps, which has none.
    """
    slot = bucket.plan.slots[position]
    held = slot.within(*bucket.updated)
    if slot.matrix and slot.numel:
        numel = math.prod(slot.matrix)
        each = [(Elements(at, at + numel), slot.matrix) for at in range(0, slot.numel, numel)]
        return [
            (p, s) if held.start <= p.start and p.stop <= held.stop else (Elements(0, 0), _nothing_of(s))
            for p, s in each
        ]
    if slot.shape and held.numel in (0, slot.numel) and not bucket.plan.cuts(slot):
        return [(held, slot.shape if held.numel else _nothing_of(slot.shape))]
    return [(held, slot.shape if slot.shape and held.numel == slot.numel else (held.numel,))]


def _nothing_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return this shape with a last dimension of 0: that of an empty tensor, on which a rank runs its optimizer's step
    if it updates nothing of a group. Optimizers of matrices call `view(len(p), -1)`, which such a tensor takes."""
    return *shape[:-1], 0


def _address(param: Tensor) -> int:
    return 0 if simulated(param) else param.data_ptr()


def rests_away(bucket: Bucket) -> bool:
    """Tell if optimizer states of this bucket are in memory for the optimizer only while it is stepped."""
    return bucket.tiers["optimizer"].on_demand


def fixed_shapes(optimizer: Any) -> dict[str, set[tuple[int, ...]]]:
    """Return for each state the shapes that differ from their parameter's: a count of steps has (), for any parameter.

    A parameter may happen to have that very shape, as one of one element does: the state is still not per element.
    """
    found: dict[str, set[tuple[int, ...]]] = {}
    for param, state in optimizer.state.items():
        for key, value in planes(state).items() if isinstance(param, Tensor) and isinstance(state, Mapping) else ():
            if isinstance(value, Tensor) and value.shape != param.shape:
                found.setdefault(key, set()).add(tuple(value.shape))
    return found


def is_like(key: str, value: Any, shape: Sequence[int], fixed: Shapes) -> bool:
    """Tell if a state has an element for each of its parameter's: not a step count, or Adafactor's rows and columns."""
    found = tuple(value.shape) if isinstance(value, Tensor) else None
    return found == tuple(shape) and found not in fixed.get(key, ())


def per_element(fragment: Fragment, key: str, value: Any, fixed: Shapes) -> bool:
    """Apply `is_like` to a fragment. If it is a part of more than one element, its shape cannot match by chance."""
    held = fragment.param
    return is_like(key, value, held.shape, {} if 1 < held.numel() < fragment.slot.numel else fixed)
