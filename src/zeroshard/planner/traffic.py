"""Messages of a step: passes of the parameters, bytes of one rank, what each kind of link carries, and replicas.

One flat vector of parameters, padded to a multiple of the ranks, or the buckets of a layout: both count with `moved`.
Of N ranks in K replicas each N/K gather and reduce among themselves, and hand running sums on (`relayed`). Where the
optimizer is sharded over all N, the ranks of one position send each other what they have updated of a shard (`split`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import NamedTuple

from ..layout.stage import Placements, seat
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
    """The messages of a step, as passes of the whole parameters and as bytes.

    recompute: what recomputation gathers once more. relay: what K replicas hand on to each other, on average: the first
    sends no averages, the last no sums. share: what they send each other of a shard after the step, where each has
    updated a part of it; or before each gather, if it has `two_levels`. straight: do averages go to the one replica
    each that keeps them?
    """

    reductions: float  # a job that does not use or train all of itself takes less than whole passes
    gathers: float
    reduce: Moved
    gather: Moved
    recompute: Moved
    relay: Moved = NOTHING
    share: Moved = NOTHING
    straight: bool = False
    two_levels: bool = False

    @property
    def times_shared(self) -> float:
        return self.gathers if self.two_levels else 1

    @property
    def passes(self) -> float:
        return self.reductions + self.gathers

    @property
    def total(self) -> Moved:
        return _added(self.reduce, self.gather, self.recompute, self.relay, self.share)

    def json(self) -> dict[str, object]:
        verbs = ("reduce", "gather", "recompute", "relay", *["share"] * (self.share != NOTHING), "total")
        return {"passes": self.passes, **{verb: getattr(self, verb)._asdict() for verb in verbs}}


STILL = Traffic(0, 0, NOTHING, NOTHING, NOTHING)


def passes(placements: Placements, *, accumulate: int = 1, no_sync: bool = False) -> tuple[int, int]:
    """Count (reductions, gathers) of the whole model in a step of `accumulate` backwards, at most.

    Every backward is reduced by itself, unless `no_sync` adds up on the rank first. Sharded parameters are gathered
    for each forward and each backward, replicated ones once, after the step. At most, because backward does not gather
    weights that autograd does not need (an embedding's; a first layer's whose input needs no gradient).
    """
    return (1 if no_sync else accumulate), (2 * accumulate if placements.parameters else 1)


def widths(placements: Placements, recipe: Recipe, *, no_sync: bool = False) -> tuple[Bytes, Bytes]:
    """Return (reduced, gathered) bytes per element.

    What `no_sync` has added up travels in the dtype it was added in, unless it is coded. Where the optimizer's state is
    replicated, the averaged gradients are gathered in place of parameters, in that dtype too.
    """
    reduced = recipe.gradients if no_sync and not recipe.coded else recipe.message
    return reduced, (recipe.parameters if placements.optimizer else recipe.gradients)


def moved(numel: int, own: int, ranks: int, nbytes: Bytes) -> tuple[Moved, Moved]:
    """Return (reduction, gather) of one flat vector of which this rank owns `own` elements."""
    whole, part = math.ceil(numel * nbytes), math.ceil(own * nbytes)
    to_owners, from_owner = whole - part, part * (ranks - 1)
    return (
        Moved(whole, to_owners, to_owners + from_owner),
        Moved(whole, from_owner, from_owner + to_owners),
    )


def shared(moves: Traffic) -> Traffic:
    """Return the traffic where ranks that shard together read each other's memory, and send each other nothing."""
    reduce, gather, recompute = (Moved(each.logical, 0, 0) for each in (moves.reduce, moves.gather, moves.recompute))
    return replace(moves, reduce=reduce, gather=gather, recompute=recompute)


def running(recipe: Recipe) -> Bytes:
    """Return the bytes of one element of a running sum: gradients narrower than fp32 are summed in fp32."""
    return max(recipe.gradients, Bytes(4))


def relayed(on: int, back: int, replicas: int, reductions: int = 1, *, by_part: bool = False) -> Moved:
    """Count what reductions of a shard send between K replicas, per rank and on average; rounded up.

    on: bytes of its running sums, which go from each replica to the next. back: of its averages, which go from the last
    one to all others. A ring that adds up K shards sends as many elements.
    by_part: of these each gets a part. Of several `reductions` each goes on from the one before, whose parts go to the
    first replica.
    """
    if replicas == 1:
        return NOTHING
    if by_part:
        back = -(-(back + back * (reductions - 1) // reductions) // replicas)
    sent = -(-(replicas - 1) * (on + back) // replicas)
    return Moved(on, sent, 2 * sent)


def split(shard: int, own: int, replicas: int) -> Moved:
    """Count what a rank sends the others of its position, K in all, of a shard of which it updated `own` bytes."""
    sent = own * (replicas - 1)
    return Moved(shard, sent, sent + shard - own)


def per_step(
    numel: int,
    ranks: int,
    placements: Placements,
    recipe: Recipe,
    *,
    accumulate: int = 1,
    no_sync: bool = False,
    recompute: int = 0,
    replicas: int = 1,
) -> Traffic:
    """Count the bytes moved per step and rank. recompute: elements of a step that recomputation gathers once more.

    Each of K replicas gathers and reduces among its N/K ranks.
    """
    reductions, gathers = passes(placements, accumulate=accumulate, no_sync=no_sync)
    reduced, gathered = widths(placements, recipe, no_sync=no_sync)

    group = ranks // replicas

    def once(elements: int, nbytes: Bytes) -> tuple[Moved, Moved]:
        part = share(elements, group)
        return moved(part * group, part, group, nbytes)

    own, by_part = share(numel, group), placements.by_part
    part = math.ceil(share(own, replicas) * recipe.parameters)
    on, back = (reductions * math.ceil(own * nbytes) for nbytes in (running(recipe), recipe.gradients))
    relay, split_up = relayed(on, back, replicas, reductions, by_part=by_part), split(part * replicas, part, replicas)
    again = once(recompute, recipe.parameters)[1]
    if placements.two_levels:
        part = share(share(again.logical, group), replicas)
        split_up = _added(split_up.times(gathers), split(part * replicas, part, replicas))
    return Traffic(
        reductions,
        gathers,
        once(numel, reduced)[0].times(reductions),
        once(numel, gathered)[1].times(gathers),
        again,
        relay,
        split_up if by_part else NOTHING,
        by_part,
        placements.two_levels,
    )


class Links(NamedTuple):
    """Bytes that one rank sends in a step over its link inside a node, and over its own network card."""

    inside: int
    between: int


def in_trees(ranks: int, near: int) -> Fraction:
    """Count the shards that a rank sends to other nodes, of `near` ranks, in a gather of `ranks` broadcasts.

    gloo broadcasts in a binomial tree: counted from the root, rank v < d sends to v + d, for d = 1, 2, 4 and so on.
    Over all roots each of these messages starts once at every rank.
    """
    found, distance = Fraction(), 1
    while distance < ranks and near < ranks:
        beside = max(near - distance, 0) + max(near - (ranks - distance), 0)  # a node's ranks whose messages stay in it
        found += min(distance, ranks - distance) * (1 - Fraction(beside, near))
        distance *= 2
    return found


def from_the_last(replicas: int, beside: int) -> int:
    """Count the crossings between nodes of `beside` replicas in the last replica's broadcast, in gloo's tree."""
    parents = {child: child - (1 << child.bit_length() - 1) for child in range(1, replicas)}  # counted from the root
    node = [((replica - 1) % replicas) // beside for replica in range(replicas)]
    return sum(node[child] != node[parent] for child, parent in parents.items())


def links(
    moved: Traffic, ranks: int, gpus_per_node: int, replicas: int = 1, *, gloo: bool = False, native: bool = False
) -> Links:
    """Count the bytes that a rank sends over each kind of link, on average.

    NCCL's gathers are rings over all ranks, which leave each node once and share the node's cards; gloo's are a
    broadcast from each rank, in a tree. A reduction is an exchange over both, in which each card carries whatever its
    own GPU sends to other nodes; native: the backend's own, a ring too.

    Each of K replicas gathers and reduces among its own ranks, which follow one another: a node holds whole replicas,
    or a replica whole nodes. Sums are handed on along the replicas, in K-1 hops; those between nodes share the cards of
    a node's replicas. Averages go back as far: along the ring, or in gloo's tree; parts of them go straight to
    their owners. The average is over the replicas, of which the first and the last send less. What the ranks of one
    position share is gathered over the replicas.
    """
    group, near = ranks // replicas, min(ranks // replicas, gpus_per_node)
    beside = min(replicas, max(gpus_per_node // group, 1))  # replicas in a node

    def gathered(nbytes: int, among: int, within: int) -> tuple[Fraction, Fraction]:
        """Return (inside, between) of one gather."""
        if gloo:
            crossing = in_trees(among, within)
            return (among - 1 - crossing) * Fraction(nbytes, among), crossing * Fraction(nbytes, among)
        sent = Fraction(among - 1, among) * nbytes
        return sent, sent / within * (among > within)

    inside, outside = gathered(moved.gather.logical + moved.recompute.logical, group, near)
    reduced = Fraction(near - 1, group) * moved.reduce.logical, Fraction(group - near, group) * moved.reduce.logical
    if native:
        reduced = gathered(moved.reduce.logical, group, near)
    inside, outside = inside + reduced[0], outside + reduced[1]
    if replicas > 1:
        shared_inside, shared_outside = gathered(moved.share.logical, replicas, beside)
        inside += shared_inside * (gloo or beside > 1)
        outside += shared_outside
        crossed = -(-replicas // beside) - 1  # of K-1 hops
        of_averages = replicas - beside if moved.straight else from_the_last(replicas, beside) if gloo else crossed
        averages = Fraction(of_averages - crossed, replicas) * back(moved.relay, replicas)
        outside += Fraction(crossed, replicas - 1) * moved.relay.sent + averages
        inside += Fraction(replicas - 1 - crossed, replicas - 1) * moved.relay.sent - averages
    return Links(math.ceil(inside), math.ceil(outside))


def back(relay: Moved, replicas: int) -> Fraction:
    """Count the bytes of averages that come back through a relay."""
    return Fraction(replicas, replicas - 1) * relay.sent - relay.logical


class Replicas(NamedTuple):
    """K replicas of what is sharded in N ranks: groups of N/K ranks shard, and hand sums on between the K groups.

    Counts are elements that each rank sends per reduction and gather, on average. The total is 2(N-1)/N P for every K.
    With the optimizer over all N ranks averages go to one replica each, and parts are shared: (K-1)/KN P more.
    """

    replicas: int  # K
    ranks: int  # N
    optimizer: Bytes  # bytes per parameter and rank: K/N of the recipe's, or over all ranks 1/N
    reduce_inside: Fraction
    reduce_between: Fraction
    gather_inside: Fraction
    share_between: Fraction = Fraction()
    hosts: int = 1  # that are the rows, if all ranks shard one copy

    @property
    def total(self) -> Fraction:
        return self.reduce_inside + self.reduce_between + self.gather_inside + self.share_between

    @property
    def saved_per_rank(self) -> Fraction:
        """Fraction that a rank sends less over a slow link between groups than with one replica.

        Assumes that gathers and reductions are rings, that every rank has a network card of its own, and that with one
        replica all that a rank sends crosses the slow link.
        """
        return self._saved(1)

    @property
    def saved_per_node(self) -> Fraction:
        """The same fraction for a node that is a group and has one card: with one replica the ring enters it once."""
        return self._saved(self.ranks // self.replicas)

    def _saved(self, cards_worth: int) -> Fraction:
        if self.replicas == 1 or not self.total:
            return Fraction()  # it is one replica
        return 1 - cards_worth * self.reduce_between / self.total

    def json(self) -> dict[str, object]:
        shared = ["share_between"] * bool(self.share_between) + ["hosts"] * (self.hosts > 1)
        each = ("optimizer", "reduce_inside", "reduce_between", "gather_inside", *shared, "total")
        return {"replicas": self.replicas, **{key: plain(getattr(self, key)) for key in each}}


def replicas(
    numel: int, ranks: int, count: int, recipe: Recipe, *, spread: bool = False, hosts: bool = False
) -> Replicas:
    """Count reductions inside, sums and averages between, gathers inside: P[(1-K/N) + 2(K-1)/N] + P(1-K/N).

    That is 2(N-1)/N P for every K from 1 to N: only the place of the bytes changes, and the memory. spread: the
    optimizer is sharded over all ranks. hosts: `count` hosts have one copy together.
    """
    seat(0, ranks, count)  # says which numbers divide
    inside = numel * (1 - Fraction(count, ranks))
    on = numel * Fraction(count - 1, ranks)
    between = on + on / (count if spread else 1)
    optimizer = sum(recipe.optimizer.values(), Fraction()) * Fraction(1 if spread else count, ranks)
    return Replicas(count, ranks, optimizer, inside, between, inside, on * spread, count if hosts else 1)


class SlowLink(NamedTuple):
    """Bytes that one rank sends between nodes in a step, with K replicas and with one: over NCCL, and over gloo.

    This is how this engine sends, if every rank has a network card of its own: NCCL gathers in rings, whose crossings
    all of a node's cards share, gloo by broadcasts in trees; a reduction goes from each rank straight to each owner.
    See `links`. gloo's bytes are what the kernel counts (tests/test_collectives.py); NCCL's are by formula.
    """

    gpus_per_node: int
    sent: int
    with_one: int
    sent_gloo: int
    with_one_gloo: int

    @property
    def saved(self) -> Fraction:
        return 1 - Fraction(self.sent, self.with_one) if self.with_one else Fraction()

    @property
    def saved_gloo(self) -> Fraction:
        return 1 - Fraction(self.sent_gloo, self.with_one_gloo) if self.with_one_gloo else Fraction()

    def json(self) -> dict[str, object]:
        return {**self._asdict(), "saved": plain(self.saved), "saved_gloo": plain(self.saved_gloo)}


def slow_link(ranks: int, count: int, with_count: Traffic, with_one: Traffic, gpus_per_node: int) -> SlowLink:
    """Compare `count` replicas with one. gpus_per_node: ranks of a node, which follow one another."""
    return SlowLink(
        gpus_per_node,
        *(
            between
            for gloo in (False, True)
            for between in (
                links(with_count, ranks, gpus_per_node, count, gloo=gloo).between,
                links(with_one, ranks, gpus_per_node, gloo=gloo).between,
            )
        ),
    )
