"""One bucket's storage: the flat memory its parameters are views of, this rank's shard, its masters and its gradients.

    state      parameters' class   memory beside the shard     who moves it there
    RELEASED   guarded             none (see `nowhere`)        release
    ARRIVING   guarded             full, being written         gather
    GUARDED    guarded             full                        land, close
    OPEN       plain               full                        open

Parameters that are replicated on the device (`resident`) start OPEN and leave it only while an updated copy is
arriving. All others, sharded or resting in another tier, are gathered for use and released after it.

Note *memory is given back when nobody holds it*: gathering takes memory from the tier and makes the parameters views of
it, releasing gives it back for others to write to. Hence only when nothing but our own views holds the storage (its use
count is the baseline) and nobody holds a parameter that did not before (reference counts). Memory kept for that reason
counts as not gathered: the next use gathers again, into the same place.

Note *no way leads to memory that is gone*: some of torch's C++ asks no Python class first. So the parameters themselves
point at `nowhere` while released; the guard answers for their strides.
"""

from __future__ import annotations

import enum
import functools
import operator
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .agreement import Group
from .errors import StateError, TierError, UserError
from .events import DEVICE, ends
from .guard import flip, unflip
from .layout import Bucket, slot_at
from .numerics import Precision, digest, reseed_, simulated
from .stage import Placements
from .tier import STATES, DeviceTier, Part, Rest, Tier
from .transport import Work


class State(enum.Enum):
    RELEASED = enum.auto()
    ARRIVING = enum.auto()
    GUARDED = enum.auto()
    OPEN = enum.auto()


_LEGAL = {
    (State.RELEASED, State.ARRIVING),
    (State.ARRIVING, State.GUARDED),
    (State.GUARDED, State.ARRIVING),
    (State.GUARDED, State.OPEN),
    (State.GUARDED, State.RELEASED),
    (State.OPEN, State.GUARDED),
}


class Place:
    """Attached to every managed parameter as `_zeroshard`: which buffer, which slot, and what a touch does."""

    def __init__(self, buffer: Buffer, position: int) -> None:
        self.buffer = buffer
        self.position = position

    @property
    def name(self) -> str:
        return self.buffer.bucket.slots[self.position].name

    @property
    def view(self) -> Tensor:
        """Where the parameter lies when it is gathered: right in shape and strides at any time."""
        return self.buffer.views[self.position]

    def touch(self, param: nn.Parameter) -> None:
        """Open the parameter, or raise `ReleasedError` where it cannot be gathered."""
        self.buffer.on_touch(self.buffer, self.position)


def _references(params: list[Any]) -> list[int]:
    """Python references to parameters. torch adds one of its own while C++ (a graph, say) holds the tensor too."""
    return [sys.getrefcount(param) - (_CPP_COUNTS and param._use_count() > 1) for param in params]


def _cpp_counts() -> bool:
    probe = nn.Parameter(torch.zeros(1))
    alone = sys.getrefcount(probe)
    graph = probe * 2
    counted = sys.getrefcount(probe) > alone
    del graph
    return counted


_CPP_COUNTS = _cpp_counts()


@functools.cache
def nowhere(device: torch.device) -> Tensor:
    """The bytes that every element of every released parameter lies at: NaN in any floating dtype."""
    return _nowhere(device)


def _nowhere(device: torch.device) -> Tensor:
    return torch.full((16,), 0xFF, dtype=torch.uint8, device=device)


def _home(full: Tensor, device: torch.device) -> Tensor:
    # A simulation's tensors must not outlive it, so it has a nowhere of its own.
    return (_nowhere if simulated(full) else nowhere)(device)


def _alias(flat: Tensor) -> Tensor:
    """The same memory under another storage object, which does not count as somebody holding the first.

    A process group's threads drop their tensors a moment after they report completion; counted, that moment would
    keep a released bucket's memory now and then.
    """
    if simulated(flat):
        return flat
    storage = flat.untyped_storage()
    other: Any = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), flat.device, storage.nbytes())
    return torch.empty(0, dtype=flat.dtype, device=flat.device).set_(other, 0, flat.shape, flat.stride())


class Buffer:
    """The memory of one bucket on one rank."""

    def __init__(
        self,
        bucket: Bucket,
        params: list[nn.Parameter],
        align: int,
        place: Placements,
        precision: Precision,
        group: Group,
        tier: DeviceTier,
        tiers: Mapping[str, Tier] | None = None,
    ) -> None:
        """tiers: where "parameters", "gradients" and "optimizer" (here: the master) rest; else on the device."""
        self.bucket = bucket
        self.align = align
        self.params = params
        self.place = place
        self.group = group
        self.tier = tier
        self.tiers: Mapping[str, Tier] = tiers or dict.fromkeys(STATES, tier)
        self.resident = not place.parameters and self.tiers["parameters"].name == DEVICE
        self.dtype = precision.param(params[0].dtype)
        self.grad_dtype = precision.grad(self.dtype)
        self.reduce_dtype = precision.reduce(self.dtype)
        self.master_dtype = precision.master(self.dtype)
        self._may_cast = precision.casts(self.dtype)
        self.generation = 0
        self.state = State.OPEN
        self.edited = False  # do the resting parameters hold an edit that the master has not followed?
        self.fresh = True  # is what the storage holds what a gather would bring?
        self.on_touch: Callable[[Buffer, int], None] = lambda buffer, index: None
        self.on_storage: Callable[[Buffer], None] = lambda buffer: None  # the parameters lie in a new one
        self.on_no_storage: Callable[[Buffer], None] = lambda buffer: None  # and now in none
        self.on_fetch: Callable[[Buffer], None] = lambda buffer: None
        # The parameters at rest: this rank's shard, or all of them where they are replicated; see `casts`.
        self.shard: Rest
        self.master: Rest | None = None
        self.gradients: Rest | None = None
        self._work: list[Work] = []
        self._counted = "gather"  # what the ledger calls the gathered copy
        self._opened = True  # could anybody have edited the gathered copy since its gather?
        self._written = 0  # version of the gathered copy as it came
        self._agreed: bytes | None = None  # digest of the parameters here when they were last the masters' cast
        self._refs: list[int] = []
        self._uses = 0
        self._first, self._last = bucket.shard(group.team.position)
        self._starts = [slot.start for slot in bucket.slots]
        self.strides = [torch.empty(slot.shape, device="meta").stride() for slot in bucket.slots]

    # --- construction -----------------------------------------------------------------------------------------------

    def adopt(self, flat: Tensor | None = None) -> None:
        """Move the parameters into flat storage: rank 0's values, converted; masters seeded before converting.

        After this every parameter is a view of `full`; with sharded parameters it is released. `flat` is storage that
        the parameters are views of already, in their own dtype.
        """
        bucket, owned = self.bucket, slice(*self.updated)
        needs_master = bucket.trainable and self.wants_master
        source_dtype = self.master_dtype if needs_master else self.dtype
        if flat is not None and flat.dtype == source_dtype:
            source = flat
        else:
            source = torch.zeros(bucket.numel, dtype=source_dtype, device=self.tier.device)
            for param, slot in zip(self.params, bucket.slots, strict=True):
                source[slot.start : slot.stop].copy_(param.detach().reshape(-1))
        del flat
        ledger, staged = self.tier.ledger, bucket.numel * source_dtype.itemsize
        ledger.hold("staging", staged)
        self.group.broadcast(source)
        if not self.resident:
            if not (needs_master and self._masters_suffice):
                first, last = self._resting
                self.shard = self.tiers["parameters"].rest("parameters", bucket.index, last - first, self.dtype)
                with self.shard.here(fresh=True) as shard:
                    shard.copy_(source[first:last])
                self.shard.behind()
            if source.dtype == self.dtype:
                ledger.rename("staging", "gather", staged)
                self.full, staged = source, 0
            else:
                ledger.hold("gather", bucket.numel * self.dtype.itemsize)
                self.full = source.to(self.dtype)
        else:
            self.full = self.tier.reserve("parameters", bucket.numel, self.dtype)
            self.full.copy_(source)
            self.shard = Rest(DEVICE, self.full)
        if needs_master:
            self._make_master(source[owned])
        del source
        ledger.hold("staging", -staged)
        self._nbytes = bucket.numel * self.dtype.itemsize
        self._nowhere = _home(self.full, self.full.device)
        absent = self._nowhere.view(self.dtype)[0]
        self._absent = [absent.expand(slot.shape) for slot in bucket.slots]
        self._shapes = self._views_of(torch.empty(bucket.numel, dtype=self.dtype, device="meta"))
        self.views = self._views_of(self.full)
        self._point(self.views)
        if bucket.trainable:
            self.reserve_gradients()
        if not self.resident:
            self._baseline()
            self.close()
            self.release()

    @property
    def wants_master(self) -> bool:
        """Is what the optimizer updates another dtype than the parameters, or in another device's memory?"""
        return self.master_dtype != self.dtype or self.elsewhere

    @property
    def casts(self) -> bool:
        """Are the masters all that rests of the parameters? A gather casts them then; no copy is kept beside them."""
        return self.shard is self.master

    @property
    def _masters_suffice(self) -> bool:
        # Off the device the copy stays: fewer bytes to bring for every gather count more there than room.
        on_device = all(self.tiers[state].name == DEVICE for state in ("parameters", "optimizer"))
        return self.place.parameters and on_device and self._may_cast

    @property
    def elsewhere(self) -> bool:
        return self.tiers["optimizer"].device != self.tiers["parameters"].device

    def _make_master(self, values: Tensor) -> None:
        tier = self.tiers["optimizer"]
        self.master = tier.rest("master", self.bucket.index, values.numel(), self.master_dtype)
        with self.master.here(fresh=True) as master:
            master.copy_(values)
        self.master.behind()
        if self._masters_suffice:
            self.shard = self.master

    @property
    def offloaded(self) -> bool:
        """Does any of its states rest in another tier than the device?"""
        return any(tier.name != DEVICE for tier in self.tiers.values())

    @property
    def upcast(self) -> bool:
        """Has what the optimizer updates another dtype than the gradients? A step then needs a copy of these."""
        return self.gradients is not None and self.grad_dtype != self._target_dtype

    def absent(self, numel: int) -> Tensor:
        """What stands for elements of the master's kind that are not in memory: NaN, and no memory at all."""
        return _home(self.full, self.tiers["optimizer"].device).view(self._target_dtype)[0].expand(numel)

    def reserve_gradients(self) -> None:
        """The accumulator of averaged gradients: full-size where gradients are replicated, else the shard."""
        if self.gradients is None:
            numel = self.bucket.shard_numel(self.group.team.position) if self.place.gradients else self.bucket.numel
            tier = self.tiers["gradients"]
            self.gradients = tier.rest("gradients", self.bucket.index, numel, self.grad_dtype)

    def reserve_master(self) -> None:
        """Masters for a bucket that was frozen at construction: seeded from the parameters themselves."""
        if self.master is None and self.wants_master:
            shard = self.shard
            with shard.here(changed=False):
                self._make_master(self.stored)
            if self.casts:
                self.tier.give_back("parameters", shard.tensor)

    # --- which part is whose ----------------------------------------------------------------------------------------

    @property
    def owned(self) -> tuple[int, int]:
        """Bucket elements [first, last) of this rank's shard."""
        return self._first, self._last

    @property
    def updated(self) -> tuple[int, int]:
        """Bucket elements that this rank's optimizer updates: its shard, or everything where state is replicated."""
        return self.owned if self.place.optimizer else (0, self.bucket.numel)

    @property
    def _resting(self) -> tuple[int, int]:
        """Bucket elements that rest on this rank as parameters."""
        return self.owned if self.place.parameters else (0, self.bucket.numel)

    @property
    def _mine(self) -> Tensor:
        """Of the gathered copy what rests on this rank."""
        return self.full[slice(*self._resting)]

    @property
    def stored(self) -> Tensor:
        """The resting parameters that this rank's optimizer updates, 1-D; inside here()."""
        return self.shard.tensor if self.place.parameters else self.shard.tensor[slice(*self.updated)]

    @property
    def updating(self) -> Rest:
        """Where `target` rests: what the optimizer updates."""
        return self.shard if self.master is None else self.master

    @property
    def target(self) -> Tensor:
        """What the optimizer's fragments are views of: the master, or the parameters themselves; inside here()."""
        return self.stored if self.master is None else self.master.tensor

    @property
    def _target_dtype(self) -> torch.dtype:
        return self.dtype if self.master is None else self.master_dtype

    @property
    def total(self) -> Tensor:
        """This rank's shard of the gradient accumulator, 1-D; inside here()."""
        assert self.gradients is not None
        return self.gradients.tensor if self.place.gradients else self.gradients.tensor[self._first : self._last]

    def part(self, start: int, stop: int) -> Part:
        """Bucket elements [start, stop) of what the optimizer updates here, wherever that rests."""
        first = self.updated[0] if self.master is not None else self._resting[0]
        return Part(self.updating, start - first, stop - first, (stop - start,), self._target_dtype)

    def resting(self, start: int, stop: int) -> Part:
        """Bucket elements [start, stop) of the resting parameters, where these are more than their masters."""
        assert not self.casts
        first = self._resting[0]
        return Part(self.shard, start - first, stop - first, (stop - start,), self.dtype)

    # --- the four moves ---------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Are the weights here, or on their way?"""
        return self.state is not State.RELEASED and self.fresh

    def gather(self, *, ahead: bool = False) -> Work:
        """Launch the gather of this bucket into its own storage; `ahead` of its use it counts as prefetched.

        A rank that cannot, for want of memory say, tells the others: they would wait for its part.
        """
        try:
            return self._gather(ahead)
        except BaseException as error:
            self.group.give_up(error)
            raise

    def _gather(self, ahead: bool) -> Work:
        with torch.inference_mode(False), torch.no_grad():
            if not self.resident:
                self._opened = self.state is not State.RELEASED
                if self.state is State.RELEASED:
                    self._counted = "prefetch" if ahead else "gather"
                    self.full = self.tier.reserve(self._counted, self.bucket.numel, self.dtype, zeroed=False)
                    self.views = self._views_of(self.full)
                    self._point(self.views)
                    self._baseline()
                    self.on_storage(self)
                self.land()
                self._bring(self._mine)
                self._agreed = digest(self._mine) if self.casts and self._opened else None
                self._written = self.full._version
            if self.state is not State.OPEN:
                self._move(State.ARRIVING)
            self.fresh = True
            if not (self.resident or self.place.parameters):
                return Work()  # all of them rest here
            work = self.group.team.gather(
                self.full if self.resident else _alias(self.full), self.bucket.bounds, "parameters", self.bucket.index
            )
            if not self.resident:
                work.hold(self.full)  # the alias does not
        self._work.append(work)
        return work

    def _bring(self, mine: Tensor) -> None:
        """What rests here goes to its place in the gathered copy."""
        try:
            with self.shard.here(changed=False) as shard:
                nbytes = mine.numel() * self.dtype.itemsize
                copied = self.tier.ledger.note("copy", state="parameters", bucket=self.bucket.index, logical=nbytes)
                mine.copy_(shard)
                ends(copied)
        except TierError as error:
            self.group.report(error)  # the peers wait for these elements
            mine.fill_(torch.nan)

    def publish(self) -> Work:
        """What the owners updated of replicated parameters goes to every rank."""
        if self.resident:
            return self.gather()
        self.fresh = False
        with torch.no_grad(), self.shard.here() as whole:
            moved = whole.to(self.tier.device)  # itself, where host and device are one
            self.group.team.gather(moved, self.bucket.bounds, "parameters", self.bucket.index).wait()
            if moved is not whole:
                whole.copy_(moved)
        self.shard.behind()
        return Work()

    def claim(self) -> None:
        """What was prefetched is used."""
        if self._counted == "prefetch":
            self._counted = "gather"
            if self.state is not State.RELEASED:
                self.tier.ledger.rename("prefetch", "gather", self._nbytes)

    def expect(self) -> None:
        """Replicated weights are about to be replaced: guard them until they have landed."""
        if self.state is State.OPEN:
            self.close()

    def land(self) -> None:
        """Wait for whatever is arriving."""
        while self._work:
            self._work[0].wait()
            self._work.pop(0)
        if self.state is State.ARRIVING:
            self._move(State.GUARDED)

    def open(self) -> None:
        """Plain parameters, data present."""
        self.land()
        if self.state is State.GUARDED:
            self._move(State.OPEN)
            if self.casts and not self._opened:
                written = self.full._version != self._written  # by a backward, into a weight that it had saved
                self._agreed = None if written else digest(self._mine)
            self._opened = True
            for param in self.params:
                unflip(param)

    def close(self) -> None:
        """Guard the parameters; the data stays."""
        if self.state is State.OPEN:
            self.land()
            self._move(State.GUARDED)
            for param in self.params:
                flip(param)

    def release(self) -> bool:
        """Give the memory back, unless somebody still holds it. Returns whether it is gone."""
        if self.state is State.RELEASED:
            return True
        self.land()
        self._opened |= self.full._version != self._written
        self.keep_edits()
        self.fresh = False
        if torch._C._storage_Use_Count(self.full.untyped_storage()._cdata) > self._uses:
            return False
        references = _references(self.params)
        if references != self._refs and any(map(operator.gt, references, self._refs)):
            return False
        self._move(State.RELEASED)
        self._point(self._absent)
        self._nowhere.fill_(0xFF)  # torch lets `fill_` through where every element is the same one
        self.on_no_storage(self)
        self.tier.give_back(self._counted, self.full)
        self.full, self.views = self._nowhere.view(self.dtype)[:1], self._shapes
        ends(self.tier.ledger.note("release", state="parameters", bucket=self.bucket.index, logical=self._nbytes))
        return True

    def _views_of(self, flat: Tensor) -> list[Tensor]:
        """The parameters in a tensor of the whole bucket, at the start of its storage."""
        laid_out = zip(self.bucket.slots, self.strides, strict=True)
        return [flat.as_strided(slot.shape, strides, slot.start) for slot, strides in laid_out]

    def _point(self, tensors: list[Tensor]) -> None:
        """The parameters' memory becomes that of `tensors`."""
        with torch._C.DisableTorchFunctionSubclass():
            for param, tensor in zip(self.params, tensors, strict=True):
                param.data = tensor

    def _move(self, state: State) -> None:
        assert state is self.state or (self.state, state) in _LEGAL, (self.state, state)
        self.state = state

    def _baseline(self) -> None:
        # Counted while nothing is gathered: whoever holds a parameter now did so before anybody could compute with it.
        self._uses = torch._C._storage_Use_Count(self.full.untyped_storage()._cdata)
        self._refs = _references(self.params)

    # --- edits ------------------------------------------------------------------------------------------------------

    def rebind(self) -> None:
        """A parameter whose `.data` was replaced gets the new values copied into its slot and is a view again."""
        if self.state is State.RELEASED or simulated(self.full):
            return
        with torch._C.DisableTorchFunctionSubclass():
            for param, view, slot in zip(self.params, self.views, self.bucket.slots, strict=True):
                if param.data_ptr() == view.data_ptr():
                    continue
                data = param.data
                if data.shape != slot.shape or data.dtype != self.dtype or data.device != self.full.device:
                    raise UserError(
                        "a sharded parameter's data was replaced by something of another kind",
                        where=f"parameter {slot.name!r}",
                        expected=f"{slot.shape} {self.dtype} on {self.full.device}",
                        got=f"{tuple(data.shape)} {data.dtype} on {data.device}",
                        instead="convert or move the model before zeroshard.shard(...), or pass precision= and device=",
                    )
                view.copy_(data)
                param.data = view

    def keep_edits(self) -> bool:
        """Edits of the gathered copy become what rests. Says whether there were any."""
        if self.resident or not (self.ready and self._opened):
            return False  # nothing gathered, only a copy that the last step made old, or one that nobody could reach
        with torch.inference_mode(False), torch.no_grad():
            self.rebind()
            mine = self._mine
            if self.casts:
                return self._reseed(mine)
            try:
                if self.shard.same_as(mine):
                    return False
                with self.shard.here(fresh=True) as shard:
                    shard.copy_(mine)
            except TierError as error:
                self.group.report(error)
            self.edited = True
            return True

    def seed_master(self) -> bool:
        """Masters follow edited parameters. Says whether anything was edited."""
        if self.master is None or self.casts or not (self.resident or self.edited):
            return False
        self.edited = False
        with self.shard.here(changed=False):
            return self._reseed(self.stored)

    def _reseed(self, params: Tensor) -> bool:
        assert self.master is not None
        with self.master.here(changed=False) as master:
            now = digest(params)
            edited = (now is None or now != self._agreed) and reseed_(master, params.to(master.device))
            self._agreed = now
            with self.master.here(changed=edited):
                return edited

    def write_back(self) -> None:
        """The resting parameters, where these are more than their masters, become the cast of those; inside here()."""
        assert self.master is not None and not self.casts
        # Cast where the master is: then the fewer bytes travel.
        master = self.master.tensor
        self.stored.copy_(master.to(self.dtype) if self.elsewhere else master)
        self._agreed = digest(self.stored) if self.resident else None

    def follow_edits(self) -> None:
        """Shard, masters and generation follow what was edited in the gathered copy."""
        edited = self.keep_edits()
        if self.seed_master() or edited:
            self.changed()

    def changed(self) -> None:
        """New weights: saved tensors of older ones must not be used."""
        self.generation += 1
        if self.resident:
            with torch._C.DisableTorchFunctionSubclass():
                torch.autograd.graph.increment_version(self.params)

    # --- what saved notes ask ---------------------------------------------------------------------------------------

    def slot_at(self, element: int) -> int:
        return slot_at(self._starts, element)

    def version_of(self, slot: int) -> int:
        with torch._C.DisableTorchFunctionSubclass():
            return self.params[slot]._version

    def name_of(self, slot: int) -> str:
        return self.bucket.slots[slot].name

    def fetch(self) -> None:
        """Make the data present for autograd."""
        self.on_fetch(self)
        if not self.ready:
            raise StateError(
                "a weight needed by backward could not be gathered",
                where=f"parameter {self.bucket.slots[0].name!r}",
                instead="run backward on every rank",
            )
        self.land()
