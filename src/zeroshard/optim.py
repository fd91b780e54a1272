"""The user's own `torch.optim` object, bound to this rank's fragments.

The optimizer never learns that anything is sharded. Its `param_groups` keep their options and order; in place of each
parameter they hold this rank's *fragment* of it: a parameter that is a view of the fp32 master, or of the resting
parameter where none is needed. Everything elementwise just works, and its state is sharded because the fragments are.

Roads not taken: an optimizer of our own (the user's class, options and kernels would be lost); one flat tensor per
shard (per-group options would be lost, and fused kernels give other bits than on whole tensors); subclassing the
user's class (schedulers and scalers hold the object they were given).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .buffer import Buffer, Place
from .comm import Group
from .errors import StateError, UserError
from .events import ends
from .gradient import Entry, Gradients, ShardedGrad
from .layout import Slot
from .schedule import Schedule, stack_depth

SCALARS = {"step", "mu_product", "eta", "mu"}  # per-parameter state that is one number, whatever the parameter's shape


class Member(NamedTuple):
    """A parameter that an optimizer updates, on whichever rank, and the group it is in."""

    place: Place
    group: int


class Fragment(NamedTuple):
    """What one optimizer on this rank holds of one parameter."""

    param: nn.Parameter
    buffer: Buffer
    position: int

    @property
    def slot(self) -> Slot:
        return self.buffer.bucket.slots[self.position]


class Binding:
    """One optimizer's hooks, fragments and place in a step."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        number: int,
        buffers: list[Buffer],
        gradients: Gradients,
        schedule: Schedule,
        group: Group,
        *,
        whole: bool,
    ) -> None:
        self.optimizer = optimizer
        self.number = number
        self.buffers = buffers
        self.gradients = gradients
        self.schedule = schedule
        self.group = group
        self.whole = whole  # no tensor is cut: fragments keep their parameter's shape
        self.fragments: list[Fragment] = []
        self.members: list[Member] = []  # every parameter this optimizer updates, on whichever rank
        self.before_step: Callable[[], None] = lambda: None
        self._steps = 0
        self._updated: list[Buffer] = []  # what the running step updates
        self._bound: dict[int, Tensor] = {}  # by fragment's id, the gradient that it was given
        self._depth = 0  # of the Python stack at the running step
        self._counted: dict[str, int] = {}  # bytes of optimizer state that the ledger knows of, by torch's names
        self._stateful = 0  # parameters that had state then
        self.adopt(broadcast_state=True)
        self._stay_last(optimizer, optimizer.register_step_pre_hook(self._before).id)
        handle = optimizer.register_step_post_hook(self._after)
        # The user's post hooks, also earlier ones, see the updated parameters.
        optimizer._optimizer_step_post_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]
        optimizer.register_state_dict_pre_hook(functools.partial(_refuse, "optimizer.state_dict()"))
        optimizer.register_load_state_dict_pre_hook(functools.partial(_refuse, "optimizer.load_state_dict()"))
        optimizer.zero_grad = functools.partial(self._zero_grad, optimizer.zero_grad)  # type: ignore[method-assign]

    @staticmethod
    def _stay_last(optimizer: Any, ours: int) -> None:
        # What a pre hook of the user's does to gradients, weights or the closure counts, also when registered later.
        register = optimizer.register_step_pre_hook

        def register_before_ours(hook: Any) -> Any:
            handle = register(hook)
            optimizer._optimizer_step_pre_hooks.move_to_end(ours)
            return handle

        optimizer.register_step_pre_hook = register_before_ours

    # --- fragments in place of parameters ---------------------------------------------------------------------------

    def adopt(self, *, broadcast_state: bool = False) -> None:
        """Replace whatever full parameters the groups hold (all at construction, later those of `add_param_group`)."""
        for number, group in enumerate(self.optimizer.param_groups):
            params: list[nn.Parameter] = group["params"]
            if not any(hasattr(param, "_zeroshard") for param in params):
                continue
            made = [
                self._fragment(param, number, broadcast_state) if hasattr(param, "_zeroshard") else None
                for param in params
            ]
            kept = [
                (params[at] if fragment is None else fragment, at)
                for at, fragment in enumerate(made)
                if fragment is None or fragment.numel()
            ]
            # A group must not be empty: schedulers, scalers and some step functions look at its first parameter.
            kept = kept or [(next(fragment for fragment in made if fragment is not None), 0)]
            if "param_names" in group:
                group["param_names"] = [group["param_names"][at] for _, at in kept]
            params[:] = [param for param, _ in kept]  # in place: LBFGS, for one, keeps this very list
        held = {id(param) for group in self.optimizer.param_groups for param in group["params"]}
        self.fragments = [fragment for fragment in self.fragments if id(fragment.param) in held]
        for fragment in self.fragments:
            entry = self.entry(fragment)
            if entry is not None:
                known = self.gradients.fragments.setdefault(entry.number, [])
                if not any(param is fragment.param for param in known):
                    known.append(fragment.param)
                    if self.gradients.has_gradient(entry):
                        self.gradients.show(entry)
        entries = [entry for entry in (self.entry(member.place) for member in self.members) if entry is not None]
        self.gradients.updaters |= {entry.number: self.number for entry in entries}
        if self.fragments:
            self.gradients.stand_ins[self.number] = self.fragments[0].param

    def _fragment(self, param: nn.Parameter, group: int, broadcast_state: bool) -> nn.Parameter:
        place: Place = param._zeroshard  # type: ignore[attr-defined]
        with torch._C.DisableTorchFunctionSubclass():
            fragment = nn.Parameter(self._view(place.buffer, place.position), requires_grad=param.requires_grad)
        self.fragments.append(Fragment(fragment, place.buffer, place.position))
        self.members.append(Member(place, group))
        state = self.optimizer.state.pop(param, None)
        if state:
            kept = {key: self._cut(place, group, key, value, fragment, broadcast_state) for key, value in state.items()}
            if fragment.numel():
                self.optimizer.state[fragment] = kept
        return fragment

    def _view(self, buffer: Buffer, index: int) -> Tensor:
        slot = buffer.bucket.slots[index]
        first, last = buffer.updated
        part = slot.within(first, last)
        flat = (
            buffer.target[slot.start + part.start - first : slot.start + part.stop - first]
            if part.numel
            else buffer.target[:0]
        )
        return flat.view(slot.shape) if self.whole and part.numel == slot.numel else flat

    def _cut(
        self, place: Place, group: int, key: str, value: Any, fragment: nn.Parameter, broadcast_state: bool
    ) -> Any:
        slot = place.buffer.bucket.slots[place.position]
        if not isinstance(value, Tensor):
            return value
        options, home = self.optimizer.param_groups[group], value.device
        value = value.detach().to(fragment.device, copy=True).contiguous()
        if broadcast_state:
            self.group.broadcast(value.view(-1))
        if key in SCALARS or (value.dim() == 0 and slot.shape):
            return value if options.get("fused") or options.get("capturable") else value.to(home)
        if tuple(value.shape) != slot.shape:
            raise UserError(
                "the optimizer already has state that cannot be cut",
                where=f"{type(self.optimizer).__name__}.state of {slot.name!r}, key {key!r}",
                expected=f"shape {slot.shape} or a scalar",
                got=tuple(value.shape),
                instead="shard before the first step",
            )
        part = slot.within(*place.buffer.updated)
        value = value.reshape(-1)[part.start : part.stop].view(fragment.shape)
        # As load_state_dict does it: state goes along in the dtype of what is updated.
        return value.to(fragment.dtype if value.is_floating_point() else value.dtype, copy=True)

    def retarget(self, buffer: Buffer) -> None:
        """A bucket got masters: its fragments become views of them."""
        for fragment in self.fragments:
            if fragment.buffer is buffer:
                fragment.param.data = self._view(buffer, fragment.position)

    def entry(self, of: Fragment | Place) -> Entry | None:
        """The gradient of a parameter; None while its bucket is frozen."""
        first = self.gradients.first_number.get(of.buffer.bucket.index)
        return None if first is None else self.gradients.entries[first + of.position]

    # --- a step -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _before(
        self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self._nested(stack_depth()):
            return None
        self._depth = stack_depth()
        self.group.ledger.end("step")  # of a step that an exception left
        self.group.ledger.begin("step")
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        self._begin()
        if closure is None:
            self._bind()
            return None

        def bound(*inner: Any, **options: Any) -> Any:
            with torch.no_grad():
                self._write_back()
                for fragment in self.fragments:
                    self._show(fragment)
            loss = closure(*inner, **options)
            with torch.no_grad():
                self.gradients.settle()
                self._bind()
            return loss

        return ((args[0], bound, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": bound})

    def _nested(self, depth: int) -> bool:
        """Is this a step that a running step of the same optimizer calls? (`super().step()`: torch hooks both.)"""
        running = any(fragment.param.grad is self._bound.get(id(fragment.param), self) for fragment in self.fragments)
        return running and depth > self._depth

    def _begin(self) -> None:
        self._steps += 1
        self.schedule.before_step()
        self.group.meet("step", self._steps, self.number)
        self.gradients.settle()
        self.before_step()
        for buffer in self.buffers:
            buffer.land()
            buffer.rebind()
            if buffer.seed_master():
                buffer.changed()

    def _bind(self) -> None:
        """Give every fragment its averaged gradient."""
        works = [accumulator.spread_average() for accumulator in self.gradients.accumulators if accumulator.filled]
        for work in works:
            work.wait()
        self._updated = self._to_be_updated()
        bound, self._bound = self._bound, {}
        for fragment in self.fragments:
            entry, shown = self.entry(fragment), fragment.param.grad
            if not (shown is None or isinstance(shown, ShardedGrad) or shown is bound.get(id(fragment.param))):
                raise StateError(
                    "a gradient in optimizer.param_groups was replaced by a tensor",
                    where=f"parameter {fragment.buffer.bucket.slots[fragment.position].name!r}",
                    instead="edit p.grad of the model's parameter in place",
                )
            # An empty fragment only stands in for a group: Muon, for one, refuses its shape.
            fragment.param.grad = None
            if entry is None or shown is None or not fragment.param.numel() or not self.gradients.has_gradient(entry):
                continue
            grad = entry.accumulator.updating(fragment.position)
            grad = grad[: fragment.param.numel()] if fragment.param.numel() < grad.numel() else grad
            fragment.param.grad = grad.to(fragment.param.dtype).view(fragment.param.shape)
            self._bound[id(fragment.param)] = fragment.param.grad

    @torch.no_grad()
    def _after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._nested(stack_depth()):
            return
        updated = self._write_back()
        for buffer in updated:
            if not buffer.place.parameters and buffer.place.optimizer:
                buffer.expect()
                work = buffer.gather()
                if not self.schedule.settings.overlap:
                    work.wait()
                    buffer.open()
        self.schedule.after_step()
        bound, self._bound = self._bound, {}
        for fragment in self.fragments:
            if id(fragment.param) in bound or not fragment.param.numel():
                self._show(fragment)
        if len(self.optimizer.state) != self._stateful:
            self.count_state()
        self.group.ledger.end("step")

    def count_state(self) -> None:
        """Tell the ledger what the optimizer keeps on this rank, by its own names for it."""
        self._stateful = len(self.optimizer.state)
        now: dict[str, int] = {}
        for state in self.optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    now[key] = now.get(key, 0) + value.numel() * value.itemsize
        for key in dict.fromkeys([*now, *self._counted]):
            self.group.ledger.hold(key, now.get(key, 0) - self._counted.get(key, 0))
        self._counted = now

    def _to_be_updated(self) -> list[Buffer]:
        """Buffers that have gradients for this optimizer on any rank, in order."""
        entries = [entry for entry in (self.entry(member.place) for member in self.members) if entry is not None]
        updated = {id(e.accumulator.buffer) for e in entries if e.accumulator.filled and self.gradients.has_gradient(e)}
        return [buffer for buffer in self.buffers if id(buffer) in updated]

    def _write_back(self) -> list[Buffer]:
        """Masters become parameters again, where this step had gradients: the step itself may have cleared them."""
        for buffer in self._updated:
            if buffer.master is not None:
                nbytes = buffer.stored.numel() * buffer.dtype.itemsize
                copied = self.group.ledger.note("copy", state="master", bucket=buffer.bucket.index, logical=nbytes)
                buffer.write_back()
                ends(copied)
            buffer.changed()
        return self._updated

    def _show(self, fragment: Fragment) -> None:
        entry = self.entry(fragment)
        if entry is None:
            return
        fragment.param.grad = None
        if self.gradients.has_gradient(entry):
            self.gradients.show(entry)

    def _zero_grad(self, original: Callable[..., None], set_to_none: bool = True) -> None:
        original(set_to_none=set_to_none)
        if set_to_none:
            for entry in (self.entry(member.place) for member in self.members):
                if entry is not None:
                    self.gradients.hide(entry)


def _refuse(what: str, *_: Any) -> None:
    raise StateError(
        f"{what} of a sharded optimizer holds only this rank's fragments",
        instead="zero.save(path) and zero.load(path); with zero.gathered(): model.state_dict() for the weights alone",
    )
