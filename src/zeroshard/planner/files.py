"""Reads and writes of a step's files: the engine's order of uses, replayed on buffers without memory.

    gather     the parameters of a unit are read, for each forward and each backward
    backward   a reduction is written; added to an earlier one, that is read before
    step       gradients, masters and optimizer states are read; masters, states and parameters written
    8 bits     masters are read again, for what rests of their parameters, which is written
    publish    parameters that every rank has a copy of, updated by their owners: read and written once more

What is still in one of a file's buffers is not read again, so a model of few buckets reads less than its bytes say.
For a model that uses its units one after the other, all of them in forward and backward, with one optimizer, and
gradients that the program never looks at: clipping reads them twice more and writes them once more.
A step averages gradients in memory and leaves the sum in the file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ..events import DEVICE
from ..headroom import BUFFERS
from ..layout import Partition
from ..resting import Master
from ..stage import ALONE, Placements, Seat
from .built import holding
from .recipes import Recipe
from .states import At, File, Holding, of_recipe

if TYPE_CHECKING:
    from ..api import Zero


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
        if len(self.rooms) == BUFFERS:
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


def moves(
    partition: Partition,
    placements: Placements,
    resting: At,
    files: Mapping[str, File],
    mastered: Sequence[bool],
    *,
    accumulate: int = 1,
    no_sync: bool = False,
    first: bool = True,
) -> Moves:
    """Count the bytes of a step of `accumulate` backwards: of the third, when everything was written before.

    mastered: has each bucket masters? first: is the rank of the first replica, which adds to the gradients that it
    has? The other replicas replace theirs by the sum that arrives.
    """
    found = {state: _Buffers(file.slots) for state, file in files.items()}
    parameters, gradients = found.get("parameters", _Buffers({})), found.get("gradients", _Buffers({}))
    kept = [found[state] for state, file in files.items() if file.kind == "optimizer"]
    forward = sorted(partition.buckets, key=lambda bucket: bucket.unit)
    backward = sorted(forward, key=lambda bucket: -bucket.unit if bucket.unit else -len(forward))  # the root leads
    trained = [bucket for bucket in partition.buckets if bucket.trainable]
    alone = [bucket.index for bucket in trained if set(resting[bucket.index].values()) != {DEVICE}]
    bytewise, masters = [b.index for b in trained if b.fp8 and b.index in alone], found.get("master", _Buffers({}))
    updating = {True: kept, False: [parameters, *kept]}
    before = STILL
    for _ in range(3):  # in the third everything has been written before
        before = _total(found)
        for turn in range(accumulate):
            for bucket in (*forward, *backward):
                parameters.use(bucket.index, changed=False)
            if not no_sync or turn == accumulate - 1:
                for bucket in reversed(trained):
                    gradients.use(bucket.index, fresh=no_sync or turn == 0 or not first)
                    gradients.behind(bucket.index)
        for at, number in enumerate(alone):
            for coming in alone[at : at + 2]:
                for file in (*updating[mastered[coming]], gradients):
                    file.ahead(coming)
            for file in updating[mastered[number]]:
                file.use(number)
            gradients.use(number, changed=False)
            if mastered[number] and number not in bytewise:
                parameters.use(number, fresh=placements.together)
            for file in (parameters, *kept):
                file.behind(number)
            gradients.forget(number)
        for number in bytewise:
            masters.use(number, changed=False)
            parameters.use(number, fresh=placements.together)
            for file in (masters, parameters):
                file.behind(number)
        if placements.optimizer and not placements.parameters:
            for number in alone:
                parameters.use(number)
                parameters.behind(number)
    after = _total(found)
    return Moves(after.read - before.read, after.written - before.written)


def _total(found: Mapping[str, _Buffers]) -> Moves:
    return Moves(sum(file.read for file in found.values()), sum(file.written for file in found.values()))


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
    return _moves(holding, accumulate=accumulate, no_sync=no_sync)


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
    published = placements.optimizer and not placements.parameters
    read = whole * (2 * accumulate + (not (mastered and placements.parameters)) + published)
    written = whole * (1 + published)
    return Moves(read + kept + added * (backwards if first else 1), written + kept + added * backwards)


def predict_moves(zero: Zero, *, accumulate: int = 1, no_sync: bool = False) -> Moves:
    """Predict the bytes that this rank moves in a step, as `zero.ledger().traffic` counts "read" and "write"."""
    return _moves(holding(zero), accumulate=accumulate, no_sync=no_sync)


def _moves(found: Holding, *, accumulate: int, no_sync: bool) -> Moves:
    # A split master is joined with its parameters, so a step reads and writes both, as without masters.
    masters = [found.resting(bucket).master for bucket in found.partition.buckets]
    return moves(
        found.partition, found.placements, [*map(found.tier, found.partition.buckets)], found.files(),
        [master not in (Master.NONE, Master.SPLIT) for master in masters], accumulate=accumulate, no_sync=no_sync,
        first=found.sits.replica == 0,
    )  # fmt: skip
