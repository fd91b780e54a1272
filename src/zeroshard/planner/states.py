"""Model-state bytes of one rank at rest, as arithmetic on the layout: nothing here looks at a tensor that is held."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

from ..events import DEVICE, HOST, NVME
from ..layout.limits import PIECES, ROOMS, STAGING_ROOMS, aligned
from ..layout.partition import BucketPlan, Partition, Slot
from ..layout.stage import ALONE, SAVED, STATES, Degree, Placements, Seat, seat
from ..layout.states import TIERS, Master, Resting, Row, resting
from .recipes import PADDING, Recipe, exact, formats
from .traffic import NOTHING, Moved, Traffic, moved, passes, relayed, running, shared, split, widths

# An optimizer's states of one slot: {state: (bytes, elements that they are for; 0: the whole tensor)}
Kept = Mapping[str, tuple[Fraction | int, int]]
At = Sequence[Mapping[str, str]]  # for each bucket the tier of "parameters", "gradients" and "optimizer"
Tiers = dict[str, dict[str, int]]  # {tier: {state: bytes}}

STAGING = "staging"
ZERO = Fraction()
DEVICE_ALONE = dict.fromkeys(STATES, DEVICE)


class Reserved(NamedTuple):
    """The reservation of one bucket, or of an optimizer for one slot of it, for a state on one rank."""

    tier: str
    kind: str
    state: str
    numel: int
    padding: int  # elements of these that no parameter fills
    itemsize: Fraction | int

    @property
    def nbytes(self) -> int:
        return math.ceil(self.numel * self.itemsize)


def reserved(
    bucket: BucketPlan,
    placements: Placements,
    sits: Seat,
    rows: Sequence[Row],
    kept: Callable[[BucketPlan, Slot], Kept],
    tier: str = DEVICE,
    *,
    passing: bool = False,
) -> Iterator[Reserved]:
    """Yield what is reserved for each state of a bucket. tier: of the optimizer's states. passing: are they in memory,
    on the device, or in the format that the optimizer computes in, for a step only?

    A bucket stores its padding with each state. An optimizer sees fragments, which have none. But where states pass, as
    from a file, a state per element has room for the whole bucket; the optimizer's other states then rest in host
    memory.
    """

    def store(row: Row) -> Reserved:
        if row.numel is not None:
            return Reserved(row.tier, row.kind, row.state, row.numel, 0, row.itemsize)
        first, last = bucket.held(sits, row.degree)
        filled = sum(slot.within(first, last).numel for slot in bucket.slots)
        return Reserved(row.tier, row.kind, row.state, last - first, last - first - filled, row.itemsize)

    yield from map(store, rows)
    if not bucket.trainable:
        return
    filed: dict[str, Fraction | int] = {}
    updated = bucket.held(sits, placements.optimizer)
    for slot in bucket.slots:
        held = slot.within(*updated).numel
        numel = math.prod(slot.matrix) if slot.matrix else held
        for _ in range(held // numel if numel else 0):  # else the optimizer has no state of it on this rank
            for state, (itemsize, grows) in kept(bucket, slot).items():
                if grows == 1 and passing:
                    filed[state] = itemsize
                else:
                    beside = HOST if tier == NVME else tier
                    yield Reserved(beside, "optimizer", state, -(-numel // grows) if grows else 1, 0, itemsize)
    for state, itemsize in filed.items():
        yield store(Row(state, "optimizer", itemsize, placements.optimizer, tier))


def together(tiers: Tiers) -> dict[str, int]:
    """Add up {state: bytes} over the tiers; padding last."""
    states = list(dict.fromkeys(state for held in tiers.values() for state in held))
    order = {"parameters": -2, "gradients": -1, STAGING: 1, PADDING: 2}
    states.sort(key=lambda state: order.get(state, 0))
    return {state: sum(held.get(state, 0) for held in tiers.values()) for state in states}


class File(NamedTuple):
    """One file of states. slots: {bucket: bytes}, those that are not empty. largest: bytes of each of its buffers."""

    kind: str
    slots: dict[int, int]
    largest: int

    @property
    def nbytes(self) -> int:
        """On the disk."""
        return sum(map(aligned, self.slots.values()))

    @property
    def buffers(self) -> int:
        """Bytes of its buffers in host memory."""
        return min(STAGING_ROOMS, len(self.slots)) * self.largest


class Seats(NamedTuple):
    """The seats of one rank: among all that shard, and among those of the axis that some buckets are sharded along."""

    everyone: Seat
    along: Seat = ALONE

    def of(self, bucket: BucketPlan) -> Seat:
        return self.along if bucket.axis else self.everyone


class Holding(NamedTuple):
    """One rank of a layout and the bytes of what it holds: by a recipe (`of_recipe`), or in a built engine (`built`).

    The bytes of a layout are added up here, and nowhere else. kept: bytes per element of an optimizer's states of a
    slot. at: None where everything is on the device.
    """

    partition: Partition
    placements: Placements
    seats: Seats
    resting: Callable[[BucketPlan], Resting]
    kept: Callable[[BucketPlan, Slot], Kept]
    at: At | None = None
    accumulated: bool = True
    seen: dict[int, list[Reserved]] | None = None  # what was reserved for each bucket, where that stays as it is
    there: bool = False  # are states that rest elsewhere stepped on the device?
    narrow: Callable[[BucketPlan], bool] = lambda bucket: False  # may states of its optimizer rest in 16 bits?

    def tier(self, bucket: BucketPlan) -> Mapping[str, str]:
        """Return the tier of each kind of a bucket's states."""
        return self.at[bucket.index] if self.at else DEVICE_ALONE

    def reserved(self, bucket: BucketPlan) -> Iterable[Reserved]:
        if self.seen is None:
            return self._reserved(bucket)
        if bucket.index not in self.seen:
            self.seen[bucket.index] = list(self._reserved(bucket))
        return self.seen[bucket.index]

    def _reserved(self, bucket: BucketPlan) -> Iterator[Reserved]:
        rows, tier = self.resting(bucket).rows, self.tier(bucket)["optimizer"]
        passing = tier == NVME or (self.there and tier != DEVICE) or self.narrow(bucket)
        return reserved(bucket, self.placements, self.seats.of(bucket), rows, self.kept, tier, passing=passing)

    def tiers(self, *, padding_row: bool = False) -> Tiers:
        """Count {tier: {state: bytes}} at rest.

        What rests in files is counted without the rounding to pages; their buffers are "staging", in host memory.
        padding_row: padding is counted not in its states but in a row of its own, "padding".
        """
        held: Tiers = {tier: {} for tier in TIERS}

        def add(tier: str, state: str, nbytes: Fraction | int) -> None:
            if nbytes:
                held[tier][state] = held[tier].get(state, 0) + math.ceil(nbytes)

        for bucket in self.partition.buckets:
            for each in self.reserved(bucket):
                add(each.tier, each.state, (each.numel - each.padding * padding_row) * each.itemsize)
                add(each.tier, PADDING, each.padding * padding_row * each.itemsize)
        add(HOST, STAGING, sum(file.buffers for file in self.files().values()))
        for states in held.values():
            if PADDING in states:
                states[PADDING] = states.pop(PADDING)  # last, where it is shown
        return {tier: states for tier, states in held.items() if states}

    def states(self, *, padding_row: bool = False) -> dict[str, int]:
        """Count {state: bytes} at rest, in all tiers together."""
        return together(self.tiers(padding_row=padding_row))

    def files(self) -> dict[str, File]:
        """Return {state: its file}; a file's buffers hold the largest bucket that has the state from the start."""
        slots: dict[str, tuple[str, dict[int, int]]] = {}
        largest = dict.fromkeys(STATES, 0)
        for bucket in self.partition.buckets if self.at else ():
            rests, at = self.resting(bucket), self.tier(bucket)
            for kind, size in rests.largest(bucket, self.seats.of(bucket), self.placements, at, NVME).items():
                largest[kind] = max(largest[kind], size)
            for each in self.reserved(bucket):
                if each.tier == NVME and each.nbytes:
                    slots.setdefault(each.state, (each.kind, {}))[1][bucket.index] = each.nbytes
        return {
            state: File(kind, sizes, aligned(max(largest[kind], *sizes.values())))
            for state, (kind, sizes) in slots.items()
        }

    def rounding(self) -> int:
        """Count the bytes of whole pinned pages beyond what rests in them. An optimizer's own states are pinned if they
        come to the device for each step, or are decoded for it."""
        return sum(
            aligned(each.nbytes) - each.nbytes
            for bucket in self.partition.buckets
            for each in self.reserved(bucket)
            if each.tier == HOST
            and (each.state in ("parameters", "gradients", "master") or each.state in self._filed(bucket))
        )

    def _filed(self, bucket: BucketPlan) -> set[str]:
        """Return the names of the optimizer's own states of a bucket that rest as a tensor each, off the device."""
        if not bucket.trainable or self.tier(bucket)["optimizer"] == DEVICE or not (self.there or self.narrow(bucket)):
            return set()
        return {state for slot in bucket.slots for state, (_, grows) in self.kept(bucket, slot).items() if grows == 1}

    def _passing(self, bucket: BucketPlan) -> list[Reserved]:
        """List the states of a bucket that come to the device for each step, and rest elsewhere."""
        if not (self.there and bucket.trainable) or self.tier(bucket)["optimizer"] == DEVICE:
            return []
        kept = self._filed(bucket)
        kept.add("parameters" if self.resting(bucket).master is Master.NONE else "master")
        return [each for each in self.reserved(bucket) if each.state in kept and each.numel]

    def rooms(self, most: int = ROOMS) -> dict[str, int]:
        """Count the bytes of the rooms of the device through which states pass on their way to a step: {state: bytes},
        for so many buckets at once."""
        passing: dict[str, list[int]] = {}
        for bucket in self.partition.buckets:
            for each in self._passing(bucket):
                passing.setdefault(each.state, []).append(math.ceil(each.nbytes))
        return {state: min(most, len(each)) * max(each) for state, each in passing.items()}

    def pinned(self) -> int:
        """Return the most that the pieces take through which an accelerator's states and sums are cast on the host."""
        each = [0]
        for bucket in self.partition.buckets:
            at, formats = self.tier(bucket), self.resting(bucket).formats
            first, last = bucket.held(self.seats.of(bucket), self.placements.optimizer)
            there = self.there or at["optimizer"] == DEVICE
            same = formats.gradients.itemsize == formats.master.itemsize
            come = at["gradients"] == HOST and same and self.placements.optimizer is not Degree.RANK
            if bucket.trainable and there and at["gradients"] != DEVICE and self.accumulated and not come:
                each.append(math.ceil((last - first) * formats.master.itemsize))  # averages, for the device's optimizer
            if bucket.trainable and not there:
                # Sums that are used as they come pass too, in the format of what they update.
                sums = formats.master.itemsize if not self.accumulated else 0
                updates = formats.parameters.itemsize if at["parameters"] == DEVICE else 0
                each.append(math.ceil((last - first) * max(sums, updates)))
        return PIECES * aligned(max(each)) if max(each) else 0

    def snapshot(self) -> int:
        """Count the bytes that a save behind the training copies: each value and state that the rank writes.

        The model's buffers and what is saved along come on top.
        """
        total: Fraction | int = 0
        for bucket in self.partition.buckets:
            value = self.resting(bucket).formats.of("optimizer" if bucket.trainable else "parameters").itemsize
            for slot in bucket.slots:
                part = slot.within(*bucket.held(self.seats.of(bucket), SAVED))
                total += value * part.numel
                if bucket.trainable and part.numel:
                    for nbytes, grows in self.kept(bucket, slot).values():
                        first = part.start == 0 and not self.seats.of(bucket).part
                        blocks = -(-part.stop // grows) - -(-part.start // grows) if grows else first
                        total += nbytes * blocks
        return math.ceil(total)


def of_recipe(
    partition: Partition,
    placements: Placements,
    rank: int,
    recipe: Recipe,
    at: At | None = None,
    *,
    replicas: int = 1,
    along: Seat = ALONE,
    there: bool = False,
) -> Holding:
    """Return a rank's `Holding` by a recipe, on a GPU. As in the engine, only trainable buckets have gradients.

    there: are states that rest elsewhere stepped on the GPU?
    """
    rest_as = {fp8: formats(recipe.in_8_bits if fp8 and recipe.in_8_bits else recipe) for fp8 in (False, True)}
    kept: dict[str, tuple[Fraction | int, int]] = {
        **{state: (exact(nbytes), 1) for state, nbytes in recipe.optimizer.items() if state != "master"},
        **{state: (nbytes, 0) for state, nbytes in recipe.per_tensor.items()},
    }

    alike: dict[tuple[object, ...], Resting] = {}  # of buckets of 16 bits and more, which differ in size only

    def rests(bucket: BucketPlan) -> Resting:
        where, accumulated = at[bucket.index] if at else DEVICE_ALONE, not recipe.in_backward
        key = (bucket.index if bucket.fp8 else None, bucket.trainable, *where.values())
        if key not in alike:
            alike[key] = resting(
                bucket, rest_as[bucket.fp8], placements, where, one_memory=False, accumulated=accumulated,
                scales=_scales(bucket, recipe.scaling),
            )  # fmt: skip
        return alike[key]

    seats = Seats(seat(rank, partition.ranks * replicas, replicas), along)
    accumulated = not recipe.in_backward

    def narrow(bucket: BucketPlan) -> bool:
        return bucket.trainable and bool(recipe.of(bucket).narrow)

    return Holding(partition, placements, seats, rests, lambda bucket, slot: kept, at, accumulated, {}, there, narrow)


def _scales(bucket: BucketPlan, scaling: str) -> int:
    """Return the bytes of the scales of a bucket's tensors."""
    if not bucket.fp8:
        return 0
    from ..arithmetic.fp8 import grids  # loads torch, which whoever asks for 8 bits has loaded

    return sum(tiles.number for tiles in grids(bucket, scaling))


class Owned(NamedTuple):
    """A position's share of a partition: elements of its shards, those that parameters fill, and fragments."""

    shard: int
    numel: int
    fragments: int


def owned(partition: Partition, along: Seat = ALONE) -> list[Owned]:
    """Return every position's share. Walks bounds and slots side by side: a large model has thousands of either.

    along: any rank's seat among those of the axis that some buckets are sharded along.
    """
    found = [[0, 0, 0] for _ in range(partition.ranks)]
    for bucket in partition.buckets:
        shares = found if not bucket.axis else [[0, 0, 0] for _ in range(bucket.size)]
        first = 0  # the first slot that can reach into this shard
        for position in range(bucket.size):
            low, high = bucket.shard(position)
            mine = shares[position]
            mine[0] += high - low
            while first < len(bucket.slots) and bucket.slots[first].stop <= low:
                first += 1
            for slot in bucket.slots[first:]:
                if slot.start >= high:
                    break
                if numel := slot.within(low, high).numel:
                    mine[1] += numel
                    mine[2] += 1
        if bucket.axis:
            for rank, whole in enumerate(found):
                whole[:] = map(sum, zip(whole, shares[along.position_of(rank)], strict=True))
    return [Owned(*mine) for mine in found]


def updated(partition: Partition, replicas: int) -> list[Owned]:
    """Return what every rank of all replicas updates of trained buckets, the optimizer sharded over all of them."""
    found = []
    for rank in range(partition.ranks * replicas):
        sits = seat(rank, partition.ranks * replicas, replicas)
        parts = [(bucket, *bucket.held(sits, Degree.ALL)) for bucket in partition.buckets if bucket.trainable]
        pieces = [slot.within(first, last).numel for bucket, first, last in parts for slot in bucket.slots]
        numels = list(filter(None, pieces))
        found.append(Owned(sum(last - first for _, first, last in parts), sum(numels), len(numels)))
    return found


def fullest_rank(
    ranks: Sequence[Owned], placements: Placements, recipe: Recipe, parts: Sequence[Owned] | None = None
) -> int:
    """Return the position that holds most at rest; of equals the last, where the padding lies.

    parts: what each rank of all replicas updates, if the optimizer is sharded over them: a rank is returned then.
    """
    cast = recipe.cast * placements.together
    stored = recipe.parameters * (1 - cast) * bool(placements.parameters)
    sums = recipe.kept_gradients * bool(placements.gradients)
    master = sum((nbytes for state, nbytes, degree in recipe.states(placements) if degree and state == "master"), ZERO)
    kept = sum((nbytes for state, nbytes in recipe.optimizer.items() if state != "master"), Fraction())
    each = sum(recipe.per_tensor.values())

    def held(rank: int) -> tuple[Fraction, int]:
        mine, own = ranks[rank % len(ranks)], ranks[rank] if parts is None else parts[rank]
        filled = own.shard if recipe.padded else own.numel  # those rest with padding, as files do
        beside = (kept * filled + each * own.fragments) * bool(placements.optimizer)
        summed = own if placements.gradients is Degree.ALL else mine
        rests = own if placements.parameters is Degree.ALL else mine
        return stored * rests.shard + sums * summed.shard + master * own.shard + beside, rank

    return max(range(len(parts or ranks)), key=held)


def recipe_traffic(
    partition: Partition,
    placements: Placements,
    rank: int,
    recipe: Recipe,
    *,
    accumulate: int = 1,
    no_sync: bool = False,
    replicas: int = 1,
    along: Seat = ALONE,
    shares: bool = False,
) -> Traffic:
    """Count the bytes that one rank moves in a step, by bucket. Recomputation finds its unit gathered already."""
    on, back, share = 0, 0, NOTHING
    seats = Seats(seat(rank, partition.ranks * replicas, replicas), along)
    reductions, gathers = passes(placements, accumulate=accumulate, no_sync=no_sync)
    totals = [Moved(0, 0, 0), Moved(0, 0, 0)]
    for bucket in partition.buckets:
        own, made = bucket.shard_numel(seats.of(bucket).position), recipe.of(bucket)
        reduced, gathered = widths(placements, made, no_sync=no_sync)
        if bucket.trainable:
            on += reductions * math.ceil(own * running(made))
            back += reductions * math.ceil(own * made.gradients)
        if placements.two_levels or (bucket.trainable and placements.by_part):
            first, last = bucket.held(seats.everyone, Degree.ALL)
            part, whole = (math.ceil(numel * made.parameters) for numel in (last - first, own))
            times = gathers if placements.two_levels else 1
            share = Moved(*map(sum, zip(share, split(whole, part, replicas).times(times), strict=True)))
        both = (
            moved(bucket.numel, own, bucket.size, reduced)[0].times(reductions if bucket.trainable else 0),
            moved(bucket.numel, own, bucket.size, gathered)[1].times(
                gathers if bucket.trainable or placements.parameters else 0
            ),
        )
        totals = [Moved(*map(sum, zip(*pair, strict=True))) for pair in zip(totals, both, strict=True)]
    found = Traffic(
        reductions, gathers, totals[0], totals[1], NOTHING,
        relayed(on, back, replicas, reductions, by_part=placements.by_part), share, placements.by_part,
        placements.two_levels,
    )  # fmt: skip
    return shared(found) if shares else found
