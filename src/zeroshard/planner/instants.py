"""Bytes that a rank holds beside its states, when they are most: arithmetic on a layout, no engine.

    init                  one unit at a time is put together, one bucket of it in the masters' dtype
    forward of unit k     the root, unit k, and `prefetch` units after it; the one just left, if it has several modules
    backward of unit k    the root, unit k, the one just left and `prefetch` units before it, and the reductions
    reduce of bucket j    its contributions and what arrives for them, `in_flight` buckets under way before it, and the
                          running sums of those that K replicas hand on, up to K more
    step                  one bucket's gradients in the masters' dtype, where that is another; its split masters,
                          joined; masters on their way to the parameters' dtype, if either rests elsewhere; states that
                          rest elsewhere and are stepped here: of three buckets; one bucket's states of 16 bits, in fp32
    gather                after the step, into the replicated parameters' own memory: nothing

    peak = states at rest + the most of these

For a model that uses its units one after the other. An upper bound: prefetched units count as arrived at once, every
reduction as finished as late as the engine allows, the root as gathered all the way, and a rank's gradients of one
parameter, which belong to autograd until they land, with the activations, which are not counted here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

from ..comm.reduce_pipeline import Flow, Memory
from ..events import DEVICE, SHARED
from ..layout.limits import IN_FLIGHT, LEAVING, PREFETCH, room
from ..layout.partition import BucketPlan, Partition
from ..layout.stage import ALONE, Placements, Seat, seat
from .recipes import CODED, Recipe, exact
from .states import STAGING, At, Holding, Seats

GATHER, REDUCE, UPCAST, BUILD, LENT, GRADIENTS = "gather", "reduce", "upcast", "build", "lent", "gradients"
JOINED, CAST, DECODED = "joined", "cast", "decoded"


class Rooms(NamedTuple):
    """Bytes of the device's memory through which states pass on their way to a step and back.

    most: in a step; one: of one bucket, as with the optimizer in backward; updated: of what its optimizer updates.
    """

    most: int
    one: int
    updated: int


class ItemSizes(NamedTuple):
    """Bytes per element. `updated`: of what the optimizer updates (the master, or the parameter itself)."""

    parameters: Fraction | int
    gradients: Fraction | int
    reduced: Fraction | int
    updated: Fraction | int
    in_backward: bool = False  # is a gradient there only until its bucket is updated, in backward?
    computed: Fraction | int | None = None  # as modules compute with it, if that is not as parameters rest
    coded: bool = False  # are gradients sent as codes of 8 bits?
    split: bool = False  # are masters joined for a step, wherever parameters rest beside them?
    in_8_bits: ItemSizes | None = None  # of buckets whose parameters rest in 8 bits
    decoded: Fraction | int = 0  # of states in 16 bits, while they are fp32

    def of(self, bucket: BucketPlan) -> ItemSizes:
        """Return the item sizes of a bucket."""
        return self.in_8_bits if bucket.fp8 and self.in_8_bits is not None else self

    def filled(self, *, no_sync: bool) -> Fraction | int:
        """Return the bytes per element of a contribution until it is sent."""
        return self.gradients if no_sync else self.reduced

    def arriving(self, numel: int, *, no_sync: bool) -> tuple[int, Fraction | int]:
        """Return the elements that so many arrive as, and the bytes of each."""
        return (_nbytes(numel, CODED), 1) if self.coded else (numel, self.filled(no_sync=no_sync))

    @property
    def gathered(self) -> Fraction | int:
        """Bytes per element of a gathered bucket."""
        return self.parameters if self.computed is None else self.computed

    @property
    def running(self) -> Fraction | int:
        """Bytes per element of a sum that replicas hand on: 16-bit gradients are summed in fp32."""
        return max(self.gradients, 4)


class Instant(NamedTuple):
    """Bytes that pass through, by state, at one moment; the states at rest are not in it."""

    name: str
    nbytes: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.nbytes.values())

    def json(self) -> dict[str, object]:
        return {"name": self.name, "nbytes": dict(self.nbytes), "total": self.total}


def rooms_of(holding: Holding) -> Rooms | None:
    """Return the rooms of a rank that steps states on the device which rest elsewhere; None without any."""
    if not (most := holding.rooms()):
        return None
    one = holding.rooms(most=1)
    return Rooms(sum(most.values()), sum(one.values()), max(one.get("master", 0), one.get("parameters", 0)))


def item_sizes(recipe: Recipe) -> ItemSizes:
    """Take the item sizes from a recipe."""
    eighths = recipe.in_8_bits
    return ItemSizes(
        exact(recipe.parameters), exact(recipe.gradients), exact(recipe.reduced), exact(recipe.updated),
        recipe.in_backward, None if recipe.computed is None else exact(recipe.computed),
        recipe.coded, recipe.split, None if eighths is None else item_sizes(eighths), exact(recipe.decoded),
    )  # fmt: skip


def instants(
    partition: Partition,
    placements: Placements,
    sizes: ItemSizes,
    rank: int,
    *,
    prefetch: int = PREFETCH,
    in_flight: int = IN_FLIGHT,
    accumulate: int = 1,
    no_sync: bool = False,
    names: Sequence[str] = (),
    several: Collection[int] = (),
    resting: At | None = None,
    replicas: int = 1,
    along: Seat = ALONE,
    shares: bool = False,
    staged: bool = False,
    rooms: Rooms | None = None,
) -> list[Instant]:
    """List all named instants of a step on the device, in their order. `names[k]` is shown for unit k, if given.

    several: numbers of units of several modules, which a forward holds on to until the next but one.

    shares: do ranks read each other's memory? Then each lends the others a copy of its shard of what they gather.
    staged: are sums made on an accelerator wherever they rest? Then some are still on their way from it.
    rooms: of states that rest elsewhere and are stepped on the device; None without any.
    """
    seats = Seats(seat(rank, partition.ranks * replicas, replicas), along)
    units = _in_units(partition.buckets)

    brought = _brought(partition, placements, sizes, resting)
    whole = {
        unit: sum(_nbytes(b.numel, sizes.of(b).gathered) for b in units[unit] if b.index in brought) for unit in units
    }
    order = [unit for unit in units if unit != 0]  # the root runs around them all
    shown = {unit: names[unit] if unit < len(names) else f"unit {unit}" for unit in units}

    def gathered(at: int, behind: int, ahead: int) -> dict[str, int]:
        if not brought:
            return {}
        window = [unit for unit in (0, *_window(order, whole, at, behind, ahead)) if unit in units]
        buckets = [bucket for unit in window for bucket in units[unit] if bucket.index in brought]
        return _some({GATHER: sum(whole[unit] for unit in window)}, lent(buckets, "parameters"))

    def lent(buckets: Iterable[BucketPlan], kind: str) -> dict[str, int]:
        found = [(b.shard_numel(seats.of(b).position), getattr(sizes.of(b), kind)) for b in buckets if b.size > 1]
        return {LENT: sum(_nbytes(*each) for each in found) * shares}

    reduced = _under_way(
        partition, placements, sizes, seats, in_flight, fresh=accumulate == 1, no_sync=no_sync and accumulate > 1,
        resting=resting, shares=shares, staged=staged, rooms=rooms,
    )  # fmt: skip
    found = [_init(units, whole, sizes, rooms), *_forwards(order, shown, several, gathered, prefetch)]
    for at in reversed(range(len(order))):
        unit = order[at]
        most = max((reduced.get(bucket.index, {}) for bucket in units[unit]), key=_total, default={})
        found.append(Instant(f"backward of {shown[unit]}", _some(gathered(at, prefetch, 1), most)))
        found += _each_bucket(units[unit], reduced, gathered(at, prefetch, 1))
    if 0 in units:
        found += _each_bucket(units[0], reduced, gathered(0, 0, 1))
    trained = [bucket for bucket in partition.buckets if bucket.trainable]
    averages = [] if placements.optimizer or sizes.in_backward else trained
    stepped = {} if sizes.in_backward else _step(partition, placements, sizes, seats, resting, rooms)
    found.append(Instant("step", _some(stepped, lent(averages, "gradients"))))
    spread = trained if placements.optimizer and not (placements.parameters or _once(resting)) else []
    passing = {GATHER: _published(trained, placements, sizes, resting)}
    found.append(Instant("gather", _some(passing, lent(spread, "parameters"))))
    return found


def _forwards(
    order: Sequence[int],
    shown: Mapping[int, str],
    several: Collection[int],
    gathered: Callable[[int, int, int], dict[str, int]],
    prefetch: int,
) -> Iterator[Instant]:
    """Yield the forwards of all units. gathered: by place in the order, units behind and units ahead."""
    for at, unit in enumerate(order):
        behind = at > 0 and order[at - 1] in several
        yield Instant(f"forward of {shown[unit]}", gathered(at, int(behind), prefetch))
    if not order:
        yield Instant(f"forward of {shown.get(0, 'the root')}", gathered(0, 0, 0))


def _published(trained: Sequence[BucketPlan], placements: Placements, sizes: ItemSizes, resting: At | None) -> int:
    """Return the bytes of replicated parameters that rest elsewhere, as they go through the device bucket by bucket."""
    if placements.parameters or not placements.optimizer:
        return 0
    away = [bucket for bucket in trained if not _on_device(resting, bucket, "parameters")]
    return max((_nbytes(bucket.numel, sizes.of(bucket).parameters) for bucket in away), default=0)


def _window(order: Sequence[int], whole: Mapping[int, int], at: int, behind: int, ahead: int) -> Sequence[int]:
    """Return the unit in turn, those just left, and those gathered ahead, which pass over what needs no gather."""
    there = [unit for unit in order if whole[unit]]
    place = sum(1 for unit in order[:at] if whole[unit])
    return there[max(place - behind, 0) : place + ahead + 1]


def _under_way(
    partition: Partition, placements: Placements, sizes: ItemSizes, seats: Seats, in_flight: int, *, fresh: bool,
    no_sync: bool, resting: At | None, shares: bool, staged: bool, rooms: Rooms | None,
) -> Mapping[int, dict[str, int]]:  # fmt: skip
    """Return {bucket: {state: bytes}} of reductions, and of sums that leave an accelerator if they are made there."""
    found = _reductions(
        partition, placements, sizes, seats, in_flight, fresh=fresh, no_sync=no_sync, resting=resting, shares=shares,
        rooms=rooms,
    )  # fmt: skip
    joined = 0
    if sizes.in_backward and sizes.split:  # one bucket's masters while it is updated, as the next one lands
        each = (_joined(b, placements, sizes.of(b), seats.of(b), resting) for b in partition.buckets if b.trainable)
        joined = max(each, default=0)
    there = rooms is not None
    cast = _most_cast(partition, placements, sizes, seats, resting, there=there) if sizes.in_backward else 0
    decoded = most_decoded(partition, placements, sizes, seats, resting, there=there) if sizes.in_backward else 0
    found = {at: _some(table, {JOINED: joined, CAST: cast, DECODED: decoded}) for at, table in found.items()}
    if sizes.in_backward and rooms is not None:
        found = {at: {**table, STAGING: rooms.one} for at, table in found.items()}
    return _leaving(partition, sizes, seats, resting, found) if staged else found


def _leaving(
    partition: Partition, sizes: ItemSizes, seats: Seats, resting: At | None, reduced: Mapping[int, dict[str, int]]
) -> dict[int, dict[str, int]]:
    """Add to reductions the sums that leave the device: the last to land, and those that go before it."""
    if seats.everyone.replicas > 1:
        return dict(reduced)  # whose averages are counted
    kind, goes = (
        ("optimizer", 1) if sizes.in_backward else ("gradients", LEAVING + 1)
    )  # one, where each is used at once
    sums = [
        0 if _on_device(resting, b, kind)
        else _nbytes(b.shard_numel(seats.of(b).position), sizes.of(b).gradients)
        for b in partition.buckets if b.trainable
    ]  # fmt: skip
    most = max((sum(sums[at : at + goes]) for at in range(len(sums))), default=0)
    return {bucket: {**table, REDUCE: table.get(REDUCE, 0) + most} for bucket, table in reduced.items()}


def _brought(partition: Partition, placements: Placements, sizes: ItemSizes, resting: At | None) -> set[int]:
    """Return the buckets whose modules compute with other memory than rests on the device."""
    if placements.parameters:
        return {bucket.index for bucket in partition.buckets}
    here = {b.index for b in partition.buckets if _on_device(resting, b, "parameters")}
    return {b.index for b in partition.buckets if b.index not in here or sizes.of(b).computed is not None}


def _on_device(resting: At | None, bucket: BucketPlan, kind: str) -> bool:
    return resting is None or resting[bucket.index][kind] in (DEVICE, SHARED)


def _once(resting: At | None) -> bool:
    """Tell whether one copy of the parameters serves all ranks, so that none lends or brings any."""
    return any(at["parameters"] == SHARED for at in resting or ())


def peak(at_rest: Mapping[str, int], found: Iterable[Instant]) -> tuple[int, str]:
    """Return (bytes, name of the instant): states at rest plus the most that passes through."""
    worst = max(found, key=lambda instant: instant.total)
    return sum(at_rest.values()) + worst.total, worst.name


def _nbytes(numel: int, itemsize: Fraction | int) -> int:
    return math.ceil(numel * itemsize)


def _some(*tables: Mapping[str, int]) -> dict[str, int]:
    return {state: nbytes for table in tables for state, nbytes in table.items() if nbytes}


def _init(
    units: Mapping[int, list[BucketPlan]], whole: Mapping[int, int], sizes: ItemSizes, rooms: Rooms | None
) -> Instant:
    """Return the instant of building a unit: gathered, beside one bucket of it in the dtype of what is updated."""
    gathered = max(whole.values(), default=0)
    build = max(
        (_nbytes(bucket.numel, sizes.of(bucket).updated) for run in units.values() for bucket in run), default=0
    )
    return Instant("init", _some({GATHER: gathered, BUILD: build, STAGING: rooms.updated if rooms is not None else 0}))


def _step(
    partition: Partition, placements: Placements, sizes: ItemSizes, seats: Seats, resting: At | None,
    rooms: Rooms | None,
) -> dict[str, int]:  # fmt: skip
    """Return the most that a bucket's gradients take once they are in the dtype of what the optimizer updates."""
    trained = [bucket for bucket in partition.buckets if bucket.trainable]
    joined = [_joined(b, placements, sizes.of(b), seats.of(b), resting) for b in trained]
    there = rooms is not None
    upcast = max((_upcast(b, placements, sizes, seats.of(b), resting, there=there) for b in trained), default=0)
    cast = _most_cast(partition, placements, sizes, seats, resting, there=there)
    passing = {UPCAST: upcast} if upcast > cast else {CAST: cast}  # a bucket's averages go before its masters come
    decoded = most_decoded(partition, placements, sizes, seats, resting, there=there)
    staged = rooms.most if rooms is not None else 0
    return {**passing, JOINED: max(joined, default=0), DECODED: decoded, STAGING: staged}


def most_decoded(
    partition: Partition, placements: Placements, sizes: ItemSizes, seats: Seats, resting: At | None, *, there: bool,
    host: bool = False,
) -> int:  # fmt: skip
    """Return the most that a bucket's states of 16 bits take while they are fp32, on the device or on the host."""

    def nbytes(bucket: BucketPlan) -> int:
        first, last = bucket.held(seats.of(bucket), placements.optimizer)
        on_host = not (there or _on_device(resting, bucket, "optimizer"))
        return _nbytes(last - first, sizes.of(bucket).decoded) * (on_host is host)

    return max((nbytes(bucket) for bucket in partition.buckets if bucket.trainable), default=0)


def _most_cast(
    partition: Partition, placements: Placements, sizes: ItemSizes, seats: Seats, resting: At | None, *, there: bool
) -> int:
    """Return the most that the masters of a bucket take on the device while they are cast there, and their cast."""

    def nbytes(bucket: BucketPlan) -> int:
        first, last = bucket.held(seats.of(bucket), placements.optimizer)
        stepped = there or _on_device(resting, bucket, "optimizer")
        come = 0 if stepped else _nbytes(last - first, sizes.updated)
        return come + (0 if _on_device(resting, bucket, "parameters") else _nbytes(last - first, sizes.parameters))

    if sizes.split or sizes.parameters == sizes.updated:
        return 0
    return max((nbytes(bucket) for bucket in partition.buckets if bucket.trainable and not bucket.fp8), default=0)


def _joined(bucket: BucketPlan, placements: Placements, sizes: ItemSizes, sits: Seat, resting: At | None) -> int:
    """Return the bytes of a bucket's split masters while they are joined; on the device."""
    alone = placements.together and _on_device(resting, bucket, "parameters")  # then nothing is split
    if not sizes.split or alone or not _on_device(resting, bucket, "optimizer"):
        return 0
    first, last = bucket.held(sits, placements.optimizer)
    return _nbytes(last - first, sizes.updated)


def _upcast(
    bucket: BucketPlan, placements: Placements, sizes: ItemSizes, sits: Seat, resting: At | None, *, there: bool
) -> int:
    """Return a bucket's bytes of gradients that are copied for the device's optimizer, in the dtype of what it updates.

    there: does the device step states that rest elsewhere?
    """
    sizes = sizes.of(bucket)
    steps = there or _on_device(resting, bucket, "optimizer")
    lie_there = sizes.in_backward or _on_device(resting, bucket, "gradients")
    if not steps or (sizes.gradients == sizes.updated and (lie_there or not there)):
        return 0
    first, last = bucket.held(sits, placements.optimizer)
    return _nbytes(last - first, sizes.updated)


def _total(table: Mapping[str, int]) -> int:
    return sum(table.values())


class _Updates:
    """Averages for the optimizer in backward, from when they land until their bucket is updated.

    A rank that updates all of a bucket waits for the other ranks' shards of its average, while the next one lands.
    """

    def __init__(
        self, placements: Placements, sizes: ItemSizes, seat: Callable[[BucketPlan], Seat], resting: At | None,
        allowed: int, *, there: bool,
    ) -> None:  # fmt: skip
        """Begin with nothing landed."""
        self._asked, self._there = (placements, sizes, seat, resting), there
        self._here: list[BucketPlan] = []  # the oldest first
        self._waits = 0 if placements.optimizer else min(allowed, 1)
        self._most: dict[str, int] = {}

    def land(self, bucket: BucketPlan) -> None:
        """Let an average land. One that rests is not counted here."""
        if self._asked[1].in_backward:
            self._here.append(bucket)
            self.use(self._waits if bucket.size > 1 else 0)

    def most(self) -> dict[str, int]:
        """Return the most held since the last call."""
        most, self._most = self._most, {}
        return most

    def use(self, waits: int) -> None:
        """Use up averages that have landed, oldest first, until `waits` are left."""
        placements, sizes, seat, resting = self._asked
        self._most = max(self._most, self._held(0), key=_total)
        while len(self._here) > waits:
            copied = _upcast(self._here[0], placements, sizes, seat(self._here[0]), resting, there=self._there)
            self._most = max(self._most, self._held(copied), key=_total)
            self._here.pop(0)

    def _held(self, copied: int) -> dict[str, int]:
        placements, sizes, seat, _ = self._asked
        held = [(*each.held(seat(each), placements.gradients), sizes.of(each).gradients) for each in self._here]
        return {GRADIENTS: sum(_nbytes(last - first, each) for first, last, each in held), UPCAST: copied}


def _each_bucket(
    buckets: Sequence[BucketPlan], reduced: Mapping[int, Mapping[str, int]], gathered: Mapping[str, int]
) -> list[Instant]:
    return [
        Instant(f"reduce of bucket {bucket.index}", _some(gathered, reduced[bucket.index]))
        for bucket in reversed(buckets)
        if bucket.index in reduced
    ]


class _Counted(Memory[tuple[int]]):
    """Memory of messages that is only counted: a piece of it is its number of bytes."""

    def __init__(self) -> None:
        self.nbytes = 0

    def reserve(self, state: str, numel: int, itemsize: Fraction | int, *, zeroed: bool = True) -> tuple[int]:
        self.nbytes += (nbytes := _nbytes(numel, itemsize))
        return (nbytes,)

    def give_back(self, state: str, piece: tuple[int]) -> None:
        self.nbytes -= piece[0]


class _Sent(NamedTuple):
    """One bucket's sum on its way. Each is a piece of counted memory, or None where it needs none."""

    bucket: BucketPlan
    contribution: tuple[int] | None
    receive: tuple[int] | None
    running: tuple[int] | None
    average: tuple[int] | None
    beside: list[tuple[int]]


class _Sums(Flow[_Sent, tuple[int]]):
    """The engine's sums, of which only memory is counted."""

    def __init__(
        self, memory: _Counted, sends: _Counted | None, waiting: int, averaged: Callable[[BucketPlan], None]
    ) -> None:
        """averaged: called with each bucket whose average is there."""
        super().__init__(memory, sends, waiting)
        self._averaged = averaged

    def landed(self, each: _Sent) -> None:
        self.sends.give_back(each.contribution)

    def store(self, each: _Sent) -> None:
        self.scratch.give_back(each.average)
        for piece in each.beside:
            self.scratch.give_back(piece)
        self._averaged(each.bucket)


def _encoded(sums: _Sums, bucket: BucketPlan, contribution: tuple[int] | None) -> tuple[int]:
    """Return the codes that take a contribution's place."""
    message = sums.sends.take(_nbytes(bucket.numel, CODED), 1)
    sums.sends.give_back(contribution)
    return message


def _in_units(buckets: Iterable[BucketPlan]) -> dict[int, list[BucketPlan]]:
    """Return {unit: its buckets}, in their order."""
    units: dict[int, list[BucketPlan]] = {}
    for bucket in buckets:
        units.setdefault(bucket.unit, []).append(bucket)
    return units


def _reductions(
    partition: Partition,
    placements: Placements,
    sizes: ItemSizes,
    seats: Seats,
    in_flight: int,
    *,
    fresh: bool,
    no_sync: bool,
    resting: At | None,
    shares: bool = False,
    rooms: Rooms | None = None,
) -> dict[int, dict[str, int]]:
    """Return {bucket: {state: bytes} of reductions once the bucket has been sent}, last bucket first.

    With the optimizer in backward they include the gradients that land then, and the copy of them that it updates with.

    The engine's own order of sums (`flow.Flow`), every one as late as allowed, moves numbers of bytes: a send buffer of
    the bucket's size and a buffer for what arrives (`headroom.room`). The unit's other buckets may have begun their
    send buffers, which count too. Under `no_sync` all send buffers exist already, full-size, in the gradients' dtype.
    Replicated gradients are their own send buffer then, and in the first backward (`fresh`) if they have the dtype that
    is sent.

    Where ranks read each other's memory (`shares`) nothing arrives, and gradients are no send buffers, since other
    ranks cannot read them.

    With replicas each sum has a running sum of the own shard beside it, and an average where gradients do not rest on
    the device. Where each replica keeps a part of a shard, the last holds all of its average for as long, and from the
    second backward on the first holds what the one before left, unless the running sum has the gradients' dtype and
    serves for it; and each holds its part of that, where gradients do not rest on the device.
    """
    trainable = [bucket for bucket in partition.buckets if bucket.trainable]
    kept = not (shares or sizes.in_backward or placements.gradients)
    replicas = seats.everyone.replicas
    updates = _Updates(placements, sizes, seats.of, resting, in_flight, there=rooms is not None)
    messages = _Counted()
    contributions = _Counted() if shares else None
    sums = _Sums(messages, contributions, replicas, updates.land)
    begun: dict[int, tuple[int] | None] = {}  # contributions, by bucket
    units = _in_units(trainable)

    def begin(buckets: Iterable[BucketPlan]) -> None:
        for bucket in (each for each in buckets if each.index not in begun):
            own = sizes.of(bucket)
            in_place = kept and (no_sync or (fresh and own.gradients == own.reduced))
            there = in_place and _on_device(resting, bucket, "gradients")
            begun[bucket.index] = None if there else sums.sends.take(bucket.numel, own.filled(no_sync=no_sync))

    def sent(bucket: BucketPlan) -> _Sent:
        seat, rests = seats.of(bucket), _on_device(resting, bucket, "gradients")
        own_sizes = sizes.of(bucket)
        if own_sizes.coded:
            begun[bucket.index] = _encoded(sums, bucket, begun[bucket.index])
        comes = own_sizes.arriving(bucket.shard_numel(seat.position) * room(bucket.size), no_sync=no_sync)
        receive = None if shares and bucket.size > 1 else sums.scratch.take(*comes)
        running, average, beside, again = None, None, [], placements.by_part and not (fresh or no_sync)
        if replicas > 1 and (own := bucket.shard_numel(seats.everyone.position)):
            running = sums.scratch.take(own, own_sizes.running)
            first, last = bucket.held(seats.everyone, placements.owned)
            ends = seat.replica == replicas - 1 or (again and seat.replica == 0)
            if placements.by_part and ends and own_sizes.running != own_sizes.gradients:
                beside.append(sums.scratch.take(own, own_sizes.gradients))
            if again and not rests:
                beside.append(sums.scratch.take(last - first, own_sizes.gradients))
            average = sums.scratch.take(last - first, own_sizes.gradients) if sizes.in_backward or not rests else None
        return _Sent(bucket, begun[bucket.index], receive, running, average, beside)

    begin(trainable if no_sync else [])
    most: dict[int, dict[str, int]] = {}
    for bucket in reversed(trainable):
        begin(other for other in units[bucket.unit] if other.index <= bucket.index)
        sums.begin(sent(bucket))
        reduce = messages.nbytes + (contributions.nbytes if contributions else 0)
        while found := sums.oldest(in_flight):
            found[1]()
        if bucket is trainable[0]:  # the end of backward: everything that is still to come lands
            while sums.under_way:
                sums.next()
            updates.use(0)
        most[bucket.index] = {REDUCE: reduce} | updates.most()
    return most
