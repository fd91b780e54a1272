"""Reads and writes of a step's files: the engine's order of uses, replayed on buffers without memory.

    gather     the parameters of a unit are read, for each forward and each backward
    backward   a reduction is written; added to an earlier one, that is read before
    step       gradients, masters and optimizer states are read; masters, states and parameters written
    8 bits     masters are read again, for what rests of their parameters, which is written
    publish    parameters of which a rank holds more than it updates: read and written once more

What is still in one of a file's buffers is not read again, so a model of few buckets reads less than its bytes say.
For a model that uses its units one after the other, all of them in forward and backward, with one optimizer, and
gradients that the program never looks at: clipping reads them twice more and writes them once more.
A step averages gradients in memory and leaves the sum in the file. Where none rest it takes the last bucket first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ..events import DEVICE
from ..layout.limits import STAGING_ROOMS
from ..layout.partition import BucketPlan, Partition
from ..layout.stage import ALONE, Placements, Seat
from ..layout.states import Master
from .recipes import Recipe
from .states import At, Holding, of_recipe


class Moves(NamedTuple):
    """Bytes of one rank in one step."""

    read: int
    written: int


STILL = Moves(0, 0)


class _Buffers:
    """The buffers of one file: the buckets in them, the one filled longest ago first, and whether each has changed."""

    def __init__(self, slots: Mapping[int, int]) -> None:
        self.slots = slots
        self.rooms: dict[int, bool] = {}
        self.read = self.written = 0

    def ahead(self, bucket: int, *, fresh: bool = False) -> None:
        if bucket not in self.slots or bucket in self.rooms:
            return
        if len(self.rooms) == STAGING_ROOMS:
            left = min(self.rooms, key=lambda each: self.rooms[each])  # rather one that need not be written
            self.behind(left)
            del self.rooms[left]
        self.rooms[bucket] = False
        self.read += 0 if fresh else self.slots[bucket]

    def use(self, bucket: int, *, changed: bool = True, fresh: bool = False) -> None:
        self.ahead(bucket, fresh=fresh)
        if bucket in self.slots:
            self.rooms[bucket] |= changed

    def forget(self, bucket: int) -> None:
        self.rooms.pop(bucket, None)

    def behind(self, bucket: int) -> None:
        if self.rooms.get(bucket):
            self.rooms[bucket] = False
            self.written += self.slots[bucket]


class _Step:
    """A step's parts, by what they do to the buffers of a rank's files. Buckets are by number."""

    def __init__(self, found: Holding) -> None:
        rests = {bucket.index: found.resting(bucket) for bucket in found.partition.buckets}
        trained = [bucket for bucket in found.partition.buckets if bucket.trainable]
        self.placements = found.placements
        files = found.files()
        self.files = {state: _Buffers(file.slots) for state, file in files.items()}
        self.parameters, self.gradients, self.masters = map(self._of, ("parameters", "gradients", "master"))
        self.kept = [self.files[state] for state, file in files.items() if file.kind == "optimizer"]
        self.elsewhere = [bucket.index for bucket in trained if set(found.tier(bucket).values()) != {DEVICE}]
        self.bytewise = [bucket.index for bucket in trained if bucket.fp8 and bucket.index in self.elsewhere]
        # A split master is joined with its parameters, so a step reads and writes both, as without masters.
        self.mastered = {at for at, each in rests.items() if each.master not in (Master.NONE, Master.SPLIT)}
        self.at_once = not any(row.kind == "gradients" for each in rests.values() for row in each.rows)
        # A rank without a shard of a bucket adds up no gradients of it. Of replicas the first adds to the gradients
        # that it has; the others replace theirs by the sum that arrives. Where each keeps a part all of them read it.
        by_part = found.placements.by_part
        self.adds = {
            b.index: by_part or found.seats.of(b).replica == 0
            for b in trained
            if b.shard_numel(found.seats.of(b).position)
        }
        made = [bucket.index for bucket in trained if bucket.index in self.masters.slots][-STAGING_ROOMS:]
        self.masters.rooms = dict.fromkeys(made, False)  # they were made from the parameters

    def _of(self, state: str) -> _Buffers:
        return self.files.get(state, _Buffers({}))

    @property
    def total(self) -> Moves:
        """Bytes so far."""
        return Moves(*(sum(getattr(file, each) for file in self.files.values()) for each in Moves._fields))

    def gather(self, buckets: Iterable[BucketPlan]) -> None:
        for bucket in buckets:
            self.parameters.use(bucket.index, changed=False)

    def add(self, *, fresh: bool) -> None:
        """Add sums to the gradients of all buckets, or begin them; backward sums the last bucket first."""
        for bucket, first in reversed(self.adds.items()):
            self.gradients.use(bucket, fresh=fresh or not first)
            self.gradients.behind(bucket)

    def optimize(self) -> None:
        """Step buckets in order while the next one is read; where no gradients rest each by itself, from the last."""
        for at, bucket in enumerate(reversed(self.elsewhere) if self.at_once else self.elsewhere):
            for coming in () if self.at_once else self.elsewhere[at : at + 2]:
                for file in (*self._updated(coming), self.gradients):
                    file.ahead(coming, fresh=file is self.gradients and coming not in self.adds)
            for file in self._updated(bucket):
                file.use(bucket)
            self.gradients.use(bucket, changed=False, fresh=bucket not in self.adds)
            if bucket in self.mastered and bucket not in self.bytewise:
                self.parameters.use(bucket, fresh=self.placements.together)
            for file in (self.parameters, *self.kept):
                file.behind(bucket)
            self.gradients.forget(bucket)

    def _updated(self, bucket: int) -> Sequence[_Buffers]:
        return self.kept if bucket in self.mastered else (self.parameters, *self.kept)

    def encode(self) -> None:
        """Make 8 bits of masters."""
        for bucket in self.bytewise:
            self.masters.use(bucket, changed=False)
            self.parameters.use(bucket, fresh=self.placements.together)
            for file in (self.masters, self.parameters):
                file.behind(bucket)

    def distribute(self) -> None:
        """Send parameters from who updated them to who has more of them."""
        if self.placements.optimizer and not self.placements.together:
            for bucket in self.elsewhere:
                self.parameters.use(bucket)
                if not self.placements.parameters:  # what replicas share stays in a buffer
                    self.parameters.behind(bucket)


def moves(found: Holding, *, accumulate: int = 1, no_sync: bool = False, releases: bool = True) -> Moves:
    """Count the bytes of a step of `accumulate` backwards: of the third, when everything was written before.

    releases: is a unit released after its forward, so that backward gathers it again?
    """
    step, buckets = _Step(found), found.partition.buckets
    forward = sorted(buckets, key=lambda bucket: bucket.unit)
    backward = sorted(forward, key=lambda bucket: -bucket.unit if bucket.unit else -len(forward))  # the root leads
    before = STILL
    for _ in range(3):  # in the third everything has been written before
        before = step.total
        for turn in range(accumulate):
            step.gather(forward)
            step.gather(backward if releases else ())
            if not no_sync or turn == accumulate - 1:
                step.add(fresh=no_sync or turn == 0)
        step.optimize()
        step.encode()
        step.distribute()
    return Moves(*(after - was for after, was in zip(step.total, before, strict=True)))


def recipe_moves(
    partition: Partition,
    placements: Placements,
    rank: int,
    recipe: Recipe,
    resting: At,
    *,
    accumulate: int = 1,
    no_sync: bool = False,
    replicas: int = 1,
    along: Seat = ALONE,
) -> Moves:
    """Count `moves` with the bytes of a recipe."""
    holding = of_recipe(partition, placements, rank, recipe, resting, replicas=replicas, along=along)
    return moves(holding, accumulate=accumulate, no_sync=no_sync)


def closed_moves(
    held: Mapping[str, int],
    placements: Placements,
    *,
    mastered: bool,
    accumulate: int = 1,
    no_sync: bool = False,
    first: bool = True,
) -> Moves:
    """Count `moves` of a model with so many buckets that no buffer is used again. held: {state: bytes} in files."""
    whole, added = held.get("parameters", 0), held.get("gradients", 0)
    kept = sum(held.values()) - whole - added
    backwards = 1 if no_sync else accumulate
    # A shard cast from masters is only written; a full copy, and what is updated in place, is read before.
    published = bool(placements.optimizer) and not placements.together
    read = whole * (2 * accumulate + (not (mastered and placements.together)) + published)
    written = whole * (1 + published)
    return Moves(read + kept + added * (backwards if first else 1), written + kept + added * backwards)
