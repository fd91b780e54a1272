"""Optimizer states that rest in 16 bits, and are fp32 for as long as the optimizer steps them.

    at rest      bfloat16, 2 bytes an element, in any tier; checkpoints have these numbers too
    in a step    fp32, of one bucket: decoded before the optimizer's own step, and rounded after it

To the rest of the engine such a state has to be brought to memory, as one in a file has. So buckets are stepped one
after the other. States that have no element for each of the parameter's, such as counts of steps, stay as they are.

Parameters that have no masters (`Precision(master_dtype=torch.bfloat16, rounding="stochastic")`) are decoded for the
step in the same way, and rounded at random. So small updates are not lost.

A step rounds to the nearest number, or up or down at random. The random bits are those of `arithmetic/philox.py`: their
key is the seed with the names of the state and the parameter, their counter the number of the step and the element's
place in the parameter. All else that writes states rounds to the nearest number: a load, and `shard` of an optimizer
that has stepped before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..arithmetic.narrow import key_of, round_
from ..device import blank, chunk
from ..engine.build.supported_optimizers import block_of, check_by_bucket
from ..engine.gradients.subscriber import Subscriber
from ..engine.step.fragment import fresh_states, planes
from ..errors import UserError, nearest
from ..events import HOST
from ..hooks import Feature
from ..layout.partition import WHOLE, BucketPlan
from ..layout.shard_dim import Among
from ..layout.stage import Seat
from ..policies.precision import OTHERS, Precision
from ..tiers.tier import DeviceTier, Part, Rest, Steps, Tier

if TYPE_CHECKING:
    from ..engine.build.assembly import Assembly
    from ..engine.engine import Engine

DECODED = "decoded"  # in the ledger: what of a bucket is fp32 for the optimizer's step
UPDATED = "parameter"  # what bits are drawn for: parameters without masters
SCRATCH = 32  # so many times the memory of its values is used to draw bits of elements that do not follow each other
PRIMES = (5, 7, 11, 13, 17)  # the shape of a tiny parameter that shows which states an optimizer keeps


def elements(among: Among, start: int, stop: int, device: torch.device) -> Tensor | int:
    """Return the numbers in the whole tensor of elements [start, stop) of a team's part: the first one's if the others
    follow it, else each one's, int64 on the device."""
    first, last, (rows, run, parts) = among.offset + start, among.offset + stop, among.strips
    if parts == 1:
        return first
    at = torch.arange(first, last, dtype=torch.int64, device=device)
    part, rest = at // (rows * run), at % (rows * run)
    return (rest // run * parts + part) * run + rest % run


class Narrow(Rest):
    """One state of one bucket that rests as bfloat16 in another rest, and is fp32 inside `here()`."""

    on_demand = coded = True

    def __init__(self, home: Rest, of: NarrowTier, key: str, steps: Steps, numel: int) -> None:
        """home: where it rests. key: the optimizer's name of the state."""
        self.home, self.on_device = home, of.decodes_there
        self._of, self._key, self._steps, self._numel = of, key, steps, numel
        self._decoded: Tensor | None = None
        self._dirty = False

    @property
    def tensor(self) -> Tensor:  # type: ignore[override]
        if self._decoded is None:
            raise AssertionError(f"{self._key} of bucket {self._of.plan.index} is not decoded")
        return self._decoded

    def at_rest(self, part: Part) -> Part:
        return part._replace(rest=self.home, dtype=torch.bfloat16)

    @contextlib.contextmanager
    def here(self, *, changed: bool = True, fresh: bool = False) -> Iterator[Tensor]:
        """Decode the state for the block, and round it again if it was changed, after an exception too: then an
        optimizer's states are as far as its parameters, as in plain PyTorch."""
        if self._decoded is not None:
            yield self._decoded
            self._dirty |= changed
            return
        with self.home.here(changed=False, fresh=fresh) as stored, self._of.memory(self._numel) as self._decoded:
            self._dirty, counts = changed, not fresh
            try:
                if not fresh:
                    self._decoded.copy_(stored)
                yield self._decoded
                counts = True
            finally:
                if self._dirty and counts:
                    with self.home.here(fresh=True):
                        self._of.round(stored, self._decoded, 0, self._key, self._steps)
                self._decoded = None

    @contextlib.contextmanager
    def some(self, start: int, stop: int, *, changed: bool) -> Iterator[Tensor]:
        if self._decoded is not None:
            yield self._decoded[start:stop]
            self._dirty |= changed
            return
        with self.home.some(start, stop, changed=changed) as stored, self._of.memory(stop - start) as decoded:
            yield decoded.copy_(stored)
            if changed:
                self._of.round(stored, decoded, start, self._key, self._steps)

    def ahead(self) -> None:
        self.home.ahead()

    def behind(self) -> None:
        self.home.behind()


class NarrowTier(Tier):
    """Another tier, in which some states of one bucket's optimizers rest in 16 bits."""

    on_demand = True

    def __init__(
        self, home: Tier, memory: DeviceTier, precision: Precision, seed: int, plan: BucketPlan, seat: Seat, first: int
    ) -> None:
        """memory: the device's. first: the bucket element at which what this rank updates begins."""
        self.home, self.name, self.meets = home, home.name, home.meets
        self.device, self.ledger, self.on_device = home.device, home.ledger, home.on_device
        self._device_tier, self.precision, self.seed = memory, precision, seed
        self.plan, self.seat, self.first = plan, seat, first
        self.draws = precision.rounding == "stochastic"
        master = precision.formats(plan).master
        self.decodes = None if precision.stepped(master) is master else precision.stepped(master)
        self.decodes_there = home.on_device or home.device.type != "cpu"  # what is not is host memory

    def rest(self, state: str, bucket: int, numel: int, dtype: torch.dtype) -> Rest:
        return self.home.rest(state, bucket, numel, dtype)

    def of(self, key: str, steps: Steps) -> Tier:
        return self if self.precision.state(key) is torch.float32 else _OneState(self, key, steps)

    def give_up(self, state: str, rests: Sequence[Rest]) -> None:
        self.home.give_up(state, [rest.home if isinstance(rest, Narrow) else rest for rest in rests])

    @contextlib.contextmanager
    def renewed(self) -> Iterator[None]:
        with self.home.renewed():
            yield

    @contextlib.contextmanager
    def memory(self, numel: int) -> Iterator[Tensor]:
        """Take memory for so many fp32 numbers for the block, with arbitrary content."""
        tier = self._device_tier
        if self.decodes_there:
            decoded = tier.reserve(DECODED, numel, torch.float32, zeroed=False)
        else:
            decoded = blank(numel, torch.float32, self.device)
            tier.ledger.hold(DECODED, numel * 4, HOST)  # not before there is memory
        try:
            yield decoded
        finally:
            if self.decodes_there:
                tier.give_back(DECODED, decoded)
            else:
                tier.ledger.hold(DECODED, -numel * 4, HOST)

    @contextlib.contextmanager
    def decoded(self, updated: Tensor, steps: Steps) -> Iterator[Tensor]:
        with self.memory(updated.numel()) as decoded:
            try:
                yield decoded.copy_(updated)
            finally:
                self.round(updated, decoded, 0, UPDATED, steps)

    def round(self, stored: Tensor, decoded: Tensor, start: int, key: str, steps: Steps) -> None:
        """Store fp32 numbers in 16 bits. start: the place of the first among those that this rank updates of the
        bucket. key: the name of the state that they are."""
        if not (self.draws and steps.running):
            stored.copy_(decoded)
            return
        first = self.first + start
        last, end = first + decoded.numel(), 0
        for slot in self.plan.slots:
            part, where = slot.within(first, last), slot.slice_of(first, last)
            if part.numel:
                stored[end : where.start].copy_(decoded[end : where.start])  # padding
                among, drawn = slot.among(self.seat), key_of(self.seed, key, slot.name)
                new, old = stored[where], decoded[where]
                step = part.numel if among.strips.parts == 1 else max(chunk(old) // SCRATCH, 1)
                for at in range(0, part.numel, step):
                    stop = min(at + step, part.numel)
                    numbers = elements(among, part.start + at, part.start + stop, old.device)
                    round_(new[at:stop], old[at:stop], drawn, steps.done, numbers)
                end = where.stop
        stored[end:].copy_(decoded[end:])


class _OneState(Tier):
    """A tier in which one state of one optimizer rests in 16 bits."""

    def __init__(self, of: NarrowTier, key: str, steps: Steps) -> None:
        self._of, self._key, self._steps = of, key, steps
        self.name, self.device, self.ledger = of.name, of.device, of.ledger

    def rest(self, state: str, bucket: int, numel: int, dtype: torch.dtype) -> Rest:
        home = self._of.home
        if dtype is not torch.float32:  # a format that the optimizer's class has chosen
            return home.rest(state, bucket, numel, dtype)
        return Narrow(home.rest(state, bucket, numel, torch.bfloat16), self._of, self._key, self._steps, numel)


class _Seeds(Subscriber):
    """Has rounding follow the seed of a loaded checkpoint."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def loaded(self) -> None:
        for bucket in self._engine.buckets:
            if isinstance(tier := bucket.tiers["optimizer"], NarrowTier):
                tier.seed = self._engine.seed


def shapes_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> list[tuple[int, ...]]:
    """Return the shapes of tiny parameters that show all kinds of states which an optimizer keeps of a group."""
    block = block_of(optimizer)
    if block == WHOLE:  # it may keep other states of a vector than of a matrix
        return [PRIMES[:dims] for dims in dict.fromkeys(max(param.dim(), 1) for param in group["params"])]
    return [(max(block or 1, PRIMES[0]),)]


def kept_by(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], shape: tuple[int, ...]) -> dict[str, Any]:
    """Return an optimizer's states after a step on a tiny fp32 parameter of this shape, with this group's options.

    Raises `UserError` if the optimizer cannot step on it.
    """
    param = nn.Parameter(torch.zeros(shape, device=next((p.device for p in group["params"] if not p.is_meta), "cpu")))
    param.grad = torch.ones_like(param)
    try:
        return planes(fresh_states(optimizer, dict(group), param))
    except Exception as error:
        raise UserError(
            "the optimizer could not be asked which states it keeps",
            where=f"{type(optimizer).__name__}.step() on a parameter of shape {shape}, for Precision.states",
            got=f"{type(error).__name__}: {error}",
            instead="an optimizer that steps without a closure, or Precision() without states",
        ) from error


def _check_names(precision: Precision, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Refuse names of states that no optimizer keeps in fp32 for each element of a parameter."""
    fits: dict[str, str] = {}
    others: dict[str, str] = {}
    for optimizer in optimizers:
        asked = [(group, shape) for group in optimizer.param_groups for shape in shapes_of(optimizer, group)]
        for group, shape in asked:
            for key, value in kept_by(optimizer, group, shape).items():
                like = isinstance(value, Tensor) and tuple(value.shape) == shape and value.dtype is torch.float32
                said = f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else "a number"
                (fits if like else others)[f"{key}"] = f"{said} for a parameter of shape {shape}"
    kinds = ", ".join(dict.fromkeys(type(each).__name__ for each in optimizers)) or "no optimizer"
    for name in precision.states:
        if name in fits or (name == OTHERS and (fits or precision.states[name] is torch.float32)):
            continue
        raise UserError(
            "Precision.states names a state that the optimizer does not keep for each element of a parameter",
            where=kinds,
            expected=f"one of {sorted(fits)}"
            if fits
            else "an optimizer that keeps a state in float32 for each element",
            got=f"{name!r}" + (f", which is {others[name]}" if name in others else ""),
            instead=nearest(name, sorted(fits)) if fits else "Precision() without states",
        )


class StateFormatsFeature(Feature):
    name = "optimizer states in 16 bits"
    page = "precision.md#optimizer-states-in-16-bits"

    def check(self, assembly: Assembly, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        precision = assembly.precision
        check_by_bucket(optimizers if precision.narrow else ())
        for plan in assembly.partition.buckets:
            own = precision.formats(plan)
            if plan.trainable and own.master is torch.bfloat16 is not own.parameters and precision.rounds_updates:
                raise UserError(
                    "bfloat16 masters are rounded at random only where parameters are bfloat16, and have no masters",
                    where=f"parameter {plan.slots[0].name!r}",
                    got=f"{own.parameters}, and master_dtype=torch.bfloat16",
                    instead='Precision(param_dtype=torch.bfloat16, master_dtype=torch.bfloat16, rounding="stochastic")',
                )
        if not precision.states:
            return
        for plan in assembly.partition.buckets:
            master = precision.stepped(precision.formats(plan).master)
            if plan.trainable and precision.of_bucket(plan).narrow_states and master is not torch.float32:
                raise UserError(
                    "states rest in 16 bits of parameters that the optimizer updates in float32",
                    where=f"parameter {plan.slots[0].name!r}",
                    got=f"{master}, and states={dict(precision.states)!r}",
                    instead='master_dtype=None or torch.float32 beside states=..., rounding="stochastic" for '
                    "bfloat16 parameters without masters, or Precision() without states",
                )
        _check_names(precision, optimizers)

    def tiers(self, assembly: Assembly, plan: BucketPlan, at: dict[str, Tier]) -> dict[str, Tier]:
        precision = assembly.precision.of_bucket(plan)
        if not precision.decodes(precision.formats(plan).master):
            return {}
        seat = assembly.group.team_of(plan).seat
        first, _ = plan.held(seat, assembly.placements.optimizer)
        made = NarrowTier(at["optimizer"], assembly.tier, precision, assembly.seed, plan, seat, first)
        return {"optimizer": made}

    def ready(self, engine: Engine) -> None:
        for binding in engine.bindings:
            binding.states.steps.saved = engine.precision.rounding == "stochastic"

    def subscriber(self, engine: Engine) -> _Seeds | None:
        return _Seeds(engine) if engine.precision.narrow else None


FEATURE = StateFormatsFeature()
