"""What a step moves: passes of the parameters, bytes of one rank, what each kind of link carries, and replicas of the
optimizer.

One flat vector of parameters, padded to a multiple of the ranks, or the buckets of a layout: both count with `moved`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from ..errors import UserError
from ..stage import Placements
from .closed import share
from .quantities import plain
from .recipes import Bytes, Recipe


class Moved(NamedTuple):
    """Bytes of one rank in one step, in the three conventions of the literature."""

    logical: int  # the size of the messages themselves
    sent: int  # (N-1)/N of them, on a ring or by direct exchange
    sent_and_received: int

    def times(self, count: int) -> Moved:
        return Moved(*(count * nbytes for nbytes in self))


NOTHING = Moved(0, 0, 0)


def _added(*parts: Moved) -> Moved:
    return Moved(*map(sum, zip(*parts, strict=True)))


@dataclass(frozen=True)
class Traffic:
    """What a step moves: passes of the whole parameters, and what recomputation gathers once more, apart.

    between: of `reduce` what K instances of the optimizer add up among their groups, after each has inside.
    """

    reductions: float  # a job that does not use or train all of itself takes less than whole passes
    gathers: float
    reduce: Moved
    gather: Moved
    recompute: Moved
    between: Moved = NOTHING

    @property
    def passes(self) -> float:
        return self.reductions + self.gathers

    @property
    def total(self) -> Moved:
        return _added(self.reduce, self.gather, self.recompute)

    def json(self) -> dict[str, object]:
        moved = {"reduce": self.reduce, "gather": self.gather, "recompute": self.recompute, "total": self.total}
        return {"passes": self.passes, **{verb: nbytes._asdict() for verb, nbytes in moved.items()}}


def passes(place: Placements, *, accumulate: int = 1, no_sync: bool = False) -> tuple[int, int]:
    """(reductions, gathers) of the whole model in a step of `accumulate` backwards.

    Every backward is reduced by itself, unless `no_sync` adds up on the rank first. Sharded parameters are gathered
    for each forward and each backward, replicated ones once, after the step. The most, that is: backward does not
    gather what autograd needs no weights of (an embedding; a first layer whose input needs no gradient).
    """
    return (1 if no_sync else accumulate), (2 * accumulate if place.parameters else 1)


def widths(place: Placements, recipe: Recipe, *, no_sync: bool = False) -> tuple[Bytes, Bytes]:
    """(reduced, gathered) bytes per element.

    What `no_sync` has added up travels in the dtype it was added in. Where the optimizer's state is replicated, the
    averaged gradients are gathered in place of parameters, in that dtype too.
    """
    added = max(recipe.gradients, recipe.reduced)
    return (added if no_sync else recipe.reduced), (recipe.parameters if place.optimizer else added)


def moved(numel: int, own: int, ranks: int, nbytes: Bytes) -> tuple[Moved, Moved]:
    """(reduction, gather) of one flat vector of which this rank owns `own` elements."""
    whole, part = math.ceil(numel * nbytes), math.ceil(own * nbytes)
    to_owners, from_owner = whole - part, part * (ranks - 1)
    return (
        Moved(whole, to_owners, to_owners + from_owner),
        Moved(whole, from_owner, from_owner + to_owners),
    )


def per_step(
    numel: int,
    ranks: int,
    place: Placements,
    recipe: Recipe,
    *,
    accumulate: int = 1,
    no_sync: bool = False,
    recompute: int = 0,
    instances: int = 1,
) -> Traffic:
    """Bytes moved per step and rank. `recompute`: elements that recomputation gathers once more, in the whole step.

    Each of K instances reduces and gathers among its N/K ranks; each shard is then all-reduced, two passes, among K.
    """
    reductions, gathers = passes(place, accumulate=accumulate, no_sync=no_sync)
    reduced, gathered = widths(place, recipe, no_sync=no_sync)

    group = ranks // instances

    def once(elements: int, nbytes: Bytes, among: int = group) -> tuple[Moved, Moved]:
        part = share(elements, among)
        return moved(part * among, part, among, nbytes)

    inside = once(numel, reduced)[0].times(reductions)
    between = NOTHING
    if instances > 1:
        between = _added(*once(share(numel, group), reduced, instances)).times(reductions)
    return Traffic(
        reductions,
        gathers,
        _added(inside, between),
        once(numel, gathered)[1].times(gathers),
        once(recompute, recipe.parameters)[1],
        between,
    )


class Links(NamedTuple):
    """Bytes that one GPU sends in a step over its link inside a node, and over its own network card."""

    inside: int
    between: int


def links(moved: Traffic, ranks: int, gpus_per_node: int, instances: int = 1) -> Links:
    """A gather is a ring over all ranks, which leaves each node once and shares the node's cards; a reduction is an
    exchange, in which each card carries whatever its own GPU sends to other nodes.

    Of K instances each is so among its own ranks, which follow one another: a node holds whole groups, or a group whole
    nodes. Between groups a shard is all-reduced on a ring.
    """
    group, near = ranks // instances, min(ranks // instances, gpus_per_node)
    ring, exchange = moved.gather.logical + moved.recompute.logical, moved.reduce.logical - moved.between.logical
    inside = Fraction(group - 1, group) * ring + Fraction(near - 1, group) * exchange
    outside = Fraction()
    if group > near:
        outside = Fraction(group - 1, group * near) * ring + Fraction(group - near, group) * exchange
    groups = min(max(gpus_per_node // group, 1), instances)  # in a node
    among = Fraction(instances - 1, instances) * moved.between.logical
    return Links(
        math.ceil(inside + (among if groups > 1 else 0)),
        math.ceil(outside + (among / groups if instances > groups else 0)),
    )


class Instances(NamedTuple):
    """K copies of the sharded optimizer in N ranks: groups of N/K ranks shard, and reduce among the K groups.

    Elements each rank sends per step, and how much less crosses the slow link than with one instance.
    """

    replicas: int  # K
    optimizer: Bytes  # bytes per parameter and rank: K/N of the recipe's
    reduce_inside: Fraction
    reduce_between: Fraction
    gather_inside: Fraction
    saved_per_rank: Fraction  # of the slow link, where every rank has a network card of its own
    saved_per_node: Fraction  # where a group is a node with one card, and one ring over all ranks enters it once

    @property
    def total(self) -> Fraction:
        return self.reduce_inside + self.reduce_between + self.gather_inside

    def json(self) -> dict[str, object]:
        named = {key: plain(value) for key, value in self._asdict().items()}
        return {**named, "total": plain(self.total)}


def instances(numel: int, ranks: int, count: int, recipe: Recipe) -> Instances:
    """Reduce-scatter inside, all-reduce between, all-gather inside: P[(1-K/N) + 2(K-1)/N] + P(1-K/N).

    That is 2(N-1)/N P for every K from 1 to N: only the place of the bytes changes, and the memory.
    """
    if count < 1 or ranks % count:
        divisors = [str(k) for k in range(1, ranks + 1) if ranks % k == 0]
        raise UserError(
            "instances must divide the ranks", got=f"instances={count}, ranks={ranks}",
            instead=f"one of {', '.join(divisors[:12])}",
        )  # fmt: skip
    inside = numel * (1 - Fraction(count, ranks))
    between = numel * Fraction(2 * (count - 1), ranks)
    ring = Fraction(2 * (ranks - 1), ranks) * numel  # one instance: every element of it may cross the slow link
    group = ranks // count
    return Instances(
        count,
        sum(recipe.optimizer.values(), Fraction()) * Fraction(count, ranks),
        inside,
        between,
        inside,
        1 - between / ring if ring else Fraction(),
        1 - group * between / ring if ring else Fraction(),
    )
