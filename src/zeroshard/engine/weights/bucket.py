"""One bucket on one rank: its states at rest, and the copy of its parameters that modules compute with.

parameters   the elements at rest on this rank: its shard, or all          a `Flat`
master       what the optimizer updates, if in another dtype or memory     a `Flat`; without one it updates `parameters`
gradients    the running sum                                               a `Flat`
gathered     the whole bucket, for as long as it is used                   a `Gathered`
codec        turns the parameters at rest into the gathered copy           a `Plain`, or another codec
edits        evidence that the program wrote into the gathered copy        an `Edits`
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn

from ...comm.agreement import Group
from ...comm.transport import Work
from ...device import asynchronous, users
from ...errors import StateError, UserError
from ...events import ends
from ...hooks import features, first
from ...layout.partition import BucketPlan, Slot
from ...layout.shard_dim import Among
from ...layout.stage import SAVED, STATES, Degree, Placements
from ...layout.states import Master, master_of
from ...policies.precision import Precision
from ...tiers.tier import DeviceTier, Tier
from .codec import Cast, Plain
from .edits import Edits, increment_versions
from .flat import Flat
from .gathered import Gathered, GatheredState, alias, home
from .guard import SavedTensors, unflip


class Gatherer(Protocol):
    """The part of the engine that gathers a bucket when it is read."""

    def touch(self, bucket: Bucket, position: int) -> None:
        """Open a guarded parameter that Python reads, or raise `ReleasedError` if it cannot be gathered."""

    def fetch(self, bucket: Bucket) -> None:
        """Gather a bucket of which autograd needs a saved weight."""

    def moved(self, bucket: Bucket) -> None:
        """Point the optimizers' fragments at the memory in which the bucket's parameters rest now."""


class Place:
    """Attached to every managed parameter as `_zeroshard`: which bucket, which slot, and what a touch does."""

    def __init__(self, bucket: Bucket, position: int) -> None:
        self.bucket = bucket
        self.position = position
        self.apart: Tensor | None = None  # gradients of each source, left by `apart`'s backward until taken

    @property
    def name(self) -> str:
        return self.bucket.plan.slots[self.position].name

    @property
    def view(self) -> Tensor:
        """The parameter's view of the gathered bucket; its shape and strides are right even while released."""
        return self.bucket.gathered.views[self.position]

    def touch(self, param: nn.Parameter) -> None:
        """Open the parameter, or raise `ReleasedError` if it cannot be gathered."""
        self.bucket.reader.touch(self.bucket, self.position)
        if self.bucket.gathered.state is GatheredState.OPEN:
            unflip(param)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise StateError(
            "a sharded parameter cannot be pickled, as by torch.save",
            where=f"parameter {self.name!r}",
            instead="with zero.gathered(): copies = {n: p.detach().clone() for n, p in model.named_parameters()}   "
            "(on every rank)",
        )


class Bucket:
    """The memory of one bucket on one rank.

    It has more names than other classes: half of them are facts of one bucket that many files ask for (dtypes, tiers,
    which elements are whose), in a line each.
    """

    reader: Gatherer  # set by the schedule, before a parameter can be read

    def __init__(
        self,
        plan: BucketPlan,
        params: list[nn.Parameter],
        align: int,
        placements: Placements,
        precision: Precision,
        group: Group,
        tier: DeviceTier,
        tiers: Mapping[str, Tier] | None = None,
        saved: SavedTensors | None = None,
        *,
        codec: Callable[[Bucket], Plain] = Plain,
        native: bool = False,
    ) -> None:
        """tiers: the tier of "parameters", "gradients" and "optimizer" (here: the master); by default the device.

        saved: the registry that keeps notes in place of tensors that autograd saves of this bucket.
        codec: makes the codec of the parameters; `Cast` replaces it if only masters rest.
        native: True if the backend adds up gradients itself, in the dtype that is sent.
        """
        self.plan, self.params, self.align, self.placements = plan, params, align, placements
        self._among: dict[Slot, Among] = {}
        self.group = group
        self.team, self.tier = group.team_of(plan), tier
        self.tiers: Mapping[str, Tier] = tiers or dict.fromkeys(STATES, tier)
        self._saved = saved or SavedTensors()
        self.formats = precision.formats(plan)
        self.dtype, self.grad_dtype = self.formats.computed, self.formats.gradients
        precision = precision.of_bucket(plan)
        self.reduce_dtype = self.grad_dtype if native and not precision.reduce_dtype else precision.reduce(self.dtype)
        self.generation = 0  # of the weights: a saved tensor of an older one must not be used
        self.unnoted = False  # may graphs hold parameters themselves, instead of notes?
        self.gathered = Gathered(plan, params, self.dtype, tier)
        at = {state: resting.name for state, resting in self.tiers.items()}
        self._off_device = not all(tier.on_device for tier in self.tiers.values())
        self._meets = any(tier.meets for tier in self.tiers.values())
        self.decoded: Tensor | None = None  # what the optimizer updates, in a step that updates it in a wider dtype
        self.masters = master_of(self.formats, placements, at, one_memory=tier.device.type == "cpu")  # once trained
        self.parameters: Flat  # at rest; is `master` itself if only masters rest: `Cast`
        self.master: Flat | None = None
        self.edits = Edits(self)
        self.gradients: Flat | None = None
        self.codec = codec(self)
        self.resident = self.codec.resident and not placements.parameters and self.tiers["parameters"].on_device
        self._work: list[Work] = []
        self.users = users(tier.device)  # of the gathered copy
        self.starts = [slot.start for slot in plan.slots]

    # --- construction -----------------------------------------------------------------------------------------------

    def adopt(self, flat: Tensor | None, givers: Sequence[int]) -> None:
        """Move the parameters into flat storage, converted; masters are seeded from the values before that.

        Afterwards every parameter is a view of `full`; a bucket that is not `resident` is then released. flat: storage
        that the parameters are views of already, in their own dtype. givers: for each slot, the rank that sends its
        values to all others.
        """
        plan = self.plan
        source_dtype = self.formats.master if plan.trainable else self.dtype
        if flat is not None and flat.dtype == source_dtype:
            source = flat
        else:
            source = torch.zeros(plan.numel, dtype=source_dtype, device=self.tier.device)
            for param, slot in zip(self.params, plan.slots, strict=True):
                source[slot.start : slot.stop].copy_(param.detach().reshape(-1))
        del flat
        ledger, staged = self.tier.ledger, plan.numel * source_dtype.itemsize
        ledger.hold("staging", staged)
        if len(set(givers)) == 1:
            self.group.give_all(source, plan, givers[0])
        else:  # some were on meta on some ranks, which parameters along an axis never are
            for slot, giver in zip(plan.slots, givers, strict=True):
                self.group.broadcast(source[slot.start : slot.stop], giver)
        if not self.resident:
            if not (plan.trainable and self.masters is Master.ALONE):
                self.parameters = self.reserve("parameters", self.formats.parameters, self.placements.parameters)
                with self.parameters.here(fresh=True) as resting:
                    self.codec.encode(resting, source)
                self.parameters.behind()
            if source.dtype == self.dtype:
                ledger.rename("staging", "gather", staged)
                full, staged = source, 0
            else:
                ledger.hold("gather", plan.numel * self.dtype.itemsize)
                full = source.to(self.dtype)
        else:
            self.parameters = self.reserve("parameters", self.dtype, self.placements.parameters)
            full = self.parameters.tensor.copy_(source)
        if plan.trainable and self.masters is not Master.NONE:
            self._make_master(source[slice(*self.updated)])
        del source
        ledger.hold("staging", -staged)
        self.gathered.place(full)
        del full
        if plan.trainable:
            self.reserve_gradients()
        if not self.resident:
            self.gathered.note_holders()
            self.close()
            self.release()

    def reserve(self, state: str, dtype: torch.dtype, degree: Degree) -> Flat:
        tier = self.tiers.get(state, self.tiers["optimizer"])
        return Flat.reserve(state, self.plan, self.group, tier, dtype, degree)

    def _make_master(self, values: Tensor) -> None:
        degree = self.placements.optimizer
        if (found := first(each.masters(self, values) for each in features())) is not None:
            self.codec, rest = found
            self.master = Flat(self.plan, self.group, rest, self.formats.master, degree, "master")
            self.edits.mark_followed()
            return
        self.master = self.reserve("master", self.formats.master, degree)
        with self.master.here(fresh=True) as master:
            master.copy_(values)
        self.master.behind()
        if self.masters is Master.ALONE:
            self.parameters, self.codec = self.master, Cast(self)

    def reserve_gradients(self) -> None:
        """Reserve the accumulator of averaged gradients: full-size if gradients are replicated, else what is owned."""
        if self.gradients is None:
            self.gradients = self.reserve("gradients", self.grad_dtype, self.placements.gradients)
            self.gradients.owned, self.gradients.by_part = self.owned, self.placements.by_part

    def reserve_master(self) -> None:
        """Make masters for a bucket that was frozen at construction, seeded from the parameters themselves."""
        if self.master is None and self.masters is not Master.NONE:
            resting = self.parameters
            with resting.here(changed=False):
                self._make_master(resting.of(*self.updated))
            if self.codec.of_masters:
                self.tier.give_back("parameters", resting.tensor)

    # --- what kind of bucket this is --------------------------------------------------------------------------------

    @property
    def by_itself(self) -> bool:
        """True if the bucket is stepped separately: a state rests off the device, or is there for a step only."""
        return self.codec.alone or self._off_device or self.tiers["optimizer"].on_demand

    @property
    def upcast(self) -> bool:
        """True if gradients have another dtype than the optimizer steps in, so that a step needs a copy."""
        return self.gradients is not None and self.grad_dtype != self.stepped

    @property
    def sums_come(self) -> bool:
        """True if the device steps the bucket and brings its gradients from host memory by itself, to divide them."""
        sums, there = self.gradients, self.tiers["optimizer"].device == self.tier.device
        sharded = self.placements.optimizer is not Degree.RANK  # else the average is gathered where it rests
        return sums is not None and sums.pinned and not sums.on_demand and there and sharded and not self.upcast

    # --- which part is whose ----------------------------------------------------------------------------------------

    @functools.cached_property
    def owned(self) -> tuple[int, int]:
        """Bucket elements [first, last) whose averaged gradient this rank has at every stage: its shard, or a part."""
        return self.plan.held(self.team.seat, self.placements.owned)

    def among(self, slot: Slot) -> Among:
        """Return where this team's part of a slot lies in the whole tensor; other teams may hold other parts."""
        if slot not in self._among:
            self._among[slot] = slot.among(self.team.seat)
        return self._among[slot]

    @functools.cached_property
    def rests(self) -> tuple[int, int]:
        """Bucket elements of the parameters that rest on this rank."""
        return self.plan.held(self.team.seat, self.placements.parameters)

    @functools.cached_property
    def saves(self) -> tuple[int, int]:
        """Bucket elements that this rank writes to a checkpoint: every element is written by one rank."""
        return self.plan.held(self.team.seat, SAVED)

    @functools.cached_property
    def updated(self) -> tuple[int, int]:
        """Bucket elements that this rank's optimizer updates: its shard, or everything if state is replicated."""
        return self.plan.held(self.team.seat, self.placements.optimizer)

    @property
    def updating(self) -> Flat:
        """The state that the optimizer updates: the master, or the parameters themselves."""
        return self.parameters if self.master is None else self.master

    @property
    def target(self) -> Tensor:
        """The elements that the optimizer's fragments are views of, 1-D; inside updating.here()."""
        return self.updating.of(*self.updated) if self.decoded is None else self.decoded

    @property
    def stepped(self) -> torch.dtype:
        """The dtype in which the optimizer updates and keeps its elements."""
        return self.tiers["optimizer"].decodes or self.formats.master

    def absent(self, numel: int) -> Tensor:
        """Return a stand-in for target elements that are not in memory: one NaN, expanded to `numel` elements."""
        return home(self.full, self.tiers["optimizer"].device).view(self.updating.dtype)[0].expand(numel)

    # --- the gathered copy ------------------------------------------------------------------------------------------

    @property
    def full(self) -> Tensor:
        """All parameters, 1-D, while they are gathered."""
        return self.gathered.full

    @property
    def ready(self) -> bool:
        """True if the current weights are gathered, or on their way."""
        return self.gathered.ready

    @property
    def mine(self) -> Tensor:
        """The elements of the gathered copy that also rest on this rank."""
        return self.full[self.parameters.first : self.parameters.last]

    def gather(self, *, ahead: bool = False) -> Work:
        """Launch the gather of this bucket into its own storage. ahead: its memory counts as prefetched until used."""
        with torch.inference_mode(False), torch.no_grad():
            if not self.resident:
                kept = not self.gathered.released
                if not kept:
                    self.gathered.take_memory(ahead=ahead)
                    self._saved.watch(self)
                self.users.begin(fresh=not kept)
                self.land()
                self._work.append(Work())  # before anything is on its way: an interrupt may come anytime
                # Autograd must not see this write (`alias`): saved views of unchanged weights stay valid.
                landing = self.codec.landing(in_use=kept)
                work = self.parameters.redistribute(alias(landing))
                self.edits.came(self.full, self.codec.arriving, kept=kept)
                work.hold(landing)  # alias does not own it
            else:
                self.users.begin(fresh=False)
                work = self.parameters.redistribute()
            self._work.append(work)
            self.users.filled()
            self.gathered.arriving()
        return work

    def send(self) -> Work:
        """Launch the gather that brings owners' updates of replicated parameters to every rank."""
        if self.resident:
            return self.gather()
        self.gathered.current = False
        with torch.no_grad():
            self._work.append(self.parameters.redistribute())
        self.parameters.behind()
        return self._work[-1]

    @property
    def meets(self) -> bool:
        """True if every rank must wait at the end of a step of this bucket until all ranks are there."""
        return self.codec.agrees or self._meets

    def publish(self, *, overlap: bool) -> None:
        """Bring owners' updates of replicated parameters to every rank. overlap: do not wait for them to arrive."""
        self.parameters.share(self.placements.optimizer)
        if self.placements.optimizer and not self.placements.parameters:
            self.close()  # guarded until they have landed
            work = self.send()
            if not overlap:
                work.wait()
                self.open()

    def published(self) -> None:
        """Land now if landing drops this rank's own writes: later it would drop the program's writes to fragments."""
        if self.parameters.rest.lands_at_once:
            self.land()

    def land(self) -> None:
        """Wait for gathers under way, in the current stream too; then decode them."""
        for work in self._work:
            work.wait()
        self.users.join()
        if self._work:
            self.users.filled()
            self.gathered.landed()
            self.codec.decode()
            self._work.clear()

    def open(self) -> None:
        """Wait for the weights and make the parameters plain: no guard."""
        self.land()
        if self.gathered.open():
            self.edits.opened(self.full, self.codec.opened)

    def close(self) -> None:
        """Guard the parameters; the data stays."""
        if self.gathered.state is GatheredState.OPEN:
            self.land()
            self.gathered.close()

    def release(self) -> bool:
        """Give the memory back, unless something still refers to it. Returns if it is gone."""
        if self.gathered.released:
            return True
        self.land()
        self.edits.look_at(self.full)
        self.edits.keep(asked=False)
        self.gathered.current = False
        if self.gathered.held() or (self.unnoted and self.gathered.in_graphs()):
            return False
        self._saved.forget(self)
        with self.users.end():
            self.gathered.give_back_memory()
        nbytes = self.gathered.nbytes
        ends(self.tier.ledger.note("release", state="parameters", bucket=self.plan.index, logical=nbytes))
        return True

    # --- replaced by the user -----------------------------------------------------------------------------------------

    def rebind(self) -> None:
        """Copy tensors that the program set as parameters' `.data` into the bucket; make parameters its views again.

        Raises `UserError` for data of another kind, and if the program holds old memory that must be overwritten.
        """
        if not (replaced := self.gathered.replaced()):
            return
        if not self.gathered.kept(replaced):
            self.gathered.rebind(replaced)
        elif self.resident:
            self._move_resident(replaced)
        else:
            name = self.gathered.counted
            full = self.tier.reserve(name, self.plan.numel, self.dtype, zeroed=False)
            self._saved.forget(self)
            self.tier.leave(name, self.full)
            follow = self.gathered.move(full, replaced)
            self._saved.watch(self)
            follow()

    def _move_resident(self, replaced: Sequence[int]) -> None:
        tier = self.tiers["parameters"]
        if tier is not self.tier:
            raise UserError(
                "a parameter's data was replaced, and the program keeps the memory that it had, which ranks share",
                where=f"parameter {self.plan.slots[replaced[0]].name!r}, rank {self.group.rank}",
                instead="keep param.data.clone() before param.data = ...",
            )
        rest = tier.rest("parameters", self.plan.index, self.plan.numel, self.dtype)
        self.tier.leave("parameters", self.full)
        follow = self.gathered.move(rest.tensor, replaced)
        self.parameters.rest = rest
        self.reader.moved(self)
        follow()

    # --- new weights ------------------------------------------------------------------------------------------------

    def write_back(self) -> None:
        """Cast the masters to the parameters that rest in addition to them; inside here().

        An accelerator casts, wherever either rests: on the host it would be one more pass over memory.
        """
        assert self.master is not None
        stored, master = self.parameters.of(*self.updated), self.master.tensor
        if not (asynchronous(self.tier.device) and (stored.is_cpu or master.is_cpu)):
            stored.copy_(master)
        elif not stored.is_cpu and master.dtype == self.dtype:
            self.master.rest.give(0, stored)
        else:
            self._cast_on_device(stored, self.master)
        self.edits.agree(stored if self.resident or self.edits.evidence is not None else None)
        self.codec.wrote(stored)

    def _cast_on_device(self, stored: Tensor, master: Flat) -> None:
        """Cast masters to parameters on the device, in the order of its stream, if either rests in host memory."""
        held = []

        def reserve(dtype: torch.dtype) -> Tensor:
            held.append(self.tier.reserve("cast", stored.numel(), dtype, zeroed=False))
            return held[-1]

        values = master.tensor
        if values.is_cpu:
            master.rest.give(0, values := reserve(values.dtype))
        if stored.is_cpu:
            cast = values if values.dtype == self.dtype else reserve(self.dtype).copy_(values)
            # Wait in the stream: the next update writes to the masters, or another cast to this one's memory.
            self.parameters.rest.take(self.updated[0] - self.parameters.first, cast, fresh=False).wait()
        else:
            stored.copy_(values)
        for each in held:
            self.tier.give_back("cast", each)

    def changed(self) -> None:
        """Count a new generation of weights: tensors saved of older ones must not be used."""
        self.generation += 1
        if not self.gathered.released:
            increment_versions(self.params)
            if not self.resident:  # invalidate views of the gathered copy too: the program may hold some
                torch.autograd.graph.increment_version(self.full)
                self.edits.not_an_edit()


def publish(buckets: Sequence[Bucket], *, overlap: bool, outside: bool = False) -> None:
    """Send updated parameters to every rank: the same buckets on all ranks. Codecs encode them before.

    outside: no step made the update.
    """
    for bucket in buckets if outside else ():
        bucket.codec.forget()
        bucket.changed()
        bucket.gathered.current &= bucket.resident
    agreeing = [bucket.codec for bucket in buckets if bucket.codec.agrees]
    for kind in dict.fromkeys(type(codec) for codec in agreeing):
        kind.agree(agreeing)
    for bucket in buckets:
        bucket.publish(overlap=overlap)
    for bucket in buckets:
        bucket.published()
