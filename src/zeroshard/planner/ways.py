"""Ways to share a model among the ranks of a cluster: one replica or several, the optimizer over each or over all,
or one copy whose messages between hosts go by two levels.

Each way has its figures: bytes of a rank, bytes between nodes, and how long the messages of a step take, one after the
other and none behind compute, by the same arithmetic as a simulated clock (`machines`), with what the engine asks of
the host (`overheads`). Of the ways that fit, the one that takes least time is recommended, and these figures are the
only reasons. The backend's own reduction is compared too and never recommended: it gives up equal bits.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ..policies.comm import Over, Reduce
from .asked import Asked
from .machines import Cluster
from .overheads import Facts, step
from .recipes import Bytes
from .traffic import Moved, Traffic, links

if TYPE_CHECKING:
    from .answer import Plan, StagePlan


class Way(NamedTuple):
    """A stage, and over which ranks its states are sharded.

    nbytes: what has to fit the device of the rank that holds most: at the peak, or at rest where no units are known.
    inside, between: what one GPU sends in a step over its link and over its network card. seconds: of all messages, and
    beside them the `overhead`: launches, waits for the device and meetings. chain: how many of them the last bucket's
    sum takes through all replicas, and its average back, which no backward is left to hide.
    """

    stage: int
    replicas: int
    over: Over
    nbytes: int
    inside: int
    between: int
    seconds: float
    fits: bool
    overhead: float = 0.0
    reduce: Reduce = "ordered"
    hosts: int = 1  # that one copy is on, if its messages between them go by two levels
    chain: float = 0.0

    @property
    def plain(self) -> bool:
        """True for one replica whose ranks send each other messages directly."""
        return self.replicas == self.hosts == 1

    def __str__(self) -> str:
        copies = "one replica" if self.replicas == 1 else f"{self.replicas} replicas"
        if self.hosts > 1:
            return f"stage {self.stage}, {copies} by two levels over {self.hosts} hosts"
        return f"stage {self.stage}, {copies}" + ", the optimizer over all" * (self.over == "all")

    @property
    def comm(self) -> dict[str, Any]:
        """Fields of `Comm` that choose this way."""
        told = {name: getattr(self, name) for name in ("replicas", "hosts") if getattr(self, name) > 1}
        told |= {"optimizer": self.over} if self.replicas > 1 and self.over == "all" else {}
        return told | ({"reduce": self.reduce} if self.reduce != "ordered" else {})

    @property
    def settings(self) -> str:
        """Arguments of `shard` that choose this way."""
        told = ", ".join(f"{name}={json.dumps(value)}" for name, value in self.comm.items())
        return f"stage={self.stage}" + (f", comm=Comm({told})" if told else "")

    def better(self, other: Way) -> bool:
        """Tell whether this way is no worse in memory and time, and better in one of them."""
        mine, theirs = (self.seconds, self.nbytes), (other.seconds, other.nbytes)
        return mine != theirs and all(a <= b for a, b in zip(mine, theirs, strict=True))


class Ways(NamedTuple):
    """All ways that were compared, those that take least time first."""

    machine: Cluster
    nodes: int
    limit: int  # bytes of one device
    ways: tuple[Way, ...]
    native: tuple[Way, ...] = ()  # the same with the backend's own reduction

    @property
    def recommended(self) -> Way | None:
        """The way that takes least time of those that fit; of equals the one that holds least. None if none fits."""
        return next((way for way in self.ways if way.fits), None)

    @property
    def shown(self) -> list[Way]:
        """Ways that no other beats in memory and time together, and one replica at every stage."""
        return [way for way in self.ways if way.plain or not any(each.better(way) for each in self.ways)]

    @property
    def because(self) -> list[str]:
        """Reasons for what is recommended, in figures."""
        best = self.recommended
        if best is None:
            least = min(self.ways, key=lambda way: way.nbytes)
            return [f"none of {len(self.ways)} ways fits; the smallest is {least}: {self._figures(least)}"]
        fitting = sum(way.fits for way in self.ways)
        said = [f"{fitting} of {len(self.ways)} ways fit; of these it takes least time: {self._figures(best)}"]
        if best.chain:
            hops = best.replicas * best.hosts - 1
            said.append(
                f"{best.chain:.3g} s of that come after backward: the last bucket's sum goes from replica to replica, "
                f"hop by hop ({hops}), and its average back"
            )
        if self.nodes == 1:
            said.append("all ranks are on one node, so no byte of any way crosses a slower link")
        one = next((way for way in self.ways if way.plain and way.stage == best.stage), None)
        if one is not None and one != best:
            times = f", {one.seconds / best.seconds:.2f} times as long" if best.seconds else ""
            said.append(f"beside it {one}: {self._figures(one)}{times}" + ", which does not fit" * (not one.fits))
        faster = self.ways[: self.ways.index(best)]
        if faster:
            least = min(faster, key=lambda way: way.nbytes)
            what = f"less time, but too much memory: {len(faster)}"
            said.append(f"{what}; the smallest is {least}: {self._figures(least)}")
        return [*said, *self._of_native(best)]

    def _of_native(self, best: Way) -> list[str]:
        """Say if the backend's own reduction is faster here, and by how much."""
        other = next((way for way in self.native if way.fits), None)
        if other is None or not best.seconds:
            return []
        if other.seconds >= best.seconds:
            return ['reduce="native", whose sums have an order of their own, is no faster here']
        return [
            f'reduce="native" is {best.seconds / other.seconds:.2f} times as fast, {other.settings}: '
            f"{self._figures(other)}; its sums, sent in the accumulator's dtype, "
            "have an order of their own: bits depend on stage, buckets and ranks"
        ]

    def _figures(self, way: Way) -> str:
        sent = f"{way.between:,} bytes between nodes"
        return f"{way.seconds:.3g} s a step, {sent} and {way.nbytes:,} bytes of memory, per GPU"

    def json(self) -> dict[str, Any]:
        best = self.recommended
        return {
            "machine": self.machine.name,
            "nodes": self.nodes,
            "limit": self.limit,
            "ways": [way._asdict() for way in self.ways],
            "native": [way._asdict() for way in self.native],
            "recommended": best and {**best._asdict(), "settings": best.settings},
            "because": self.because,
        }


class Mesh(NamedTuple):
    """A way to put ranks together."""

    replicas: int = 1
    over: Over = "team"
    hosts: int = 1

    def stages(self, asked: tuple[int, ...]) -> tuple[int, ...]:
        """Return those at which it is no other mesh: hosts at stages 1 and 2 are replicas, the optimizer over all."""
        least = 3 if self.hosts > 1 else 1 if self.over == "all" else 0
        return tuple(stage for stage in asked if stage >= least)


def meshes(ranks: int, gpus: int, *, spread: bool, hosts: bool) -> list[Mesh]:
    """List how ranks can be put together. Several replicas are each made of whole nodes.

    spread: may the optimizer be sharded over the ranks of several replicas? hosts: may all that a stage shards?
    """
    several = [count for count in range(2, ranks // gpus + 1) if ranks % (count * gpus) == 0]
    overs: tuple[Over, ...] = ("team", "all") if spread else ("team",)
    one = [Mesh(over="all", hosts=ranks // gpus)] if hosts and ranks // gpus in several else []
    return [Mesh(), *(Mesh(count, over) for count in several for over in overs), *one]


def meetings(*, sharded: bool, backwards: int, clips: bool = False) -> int:
    """Return the meetings of a step; the engine records them as "control". sharded: do parameters rest in shards?

    clips: a norm's sum over all ranks. From the second step on the norm is agreed upon where backward ends.
    """
    return 1 + (3 + sharded) * backwards + clips


def overhead(plan: StagePlan, machine: Cluster, replicas: int, reduce: Reduce, asked: Asked) -> float:
    """Estimate the seconds of a step that go to the engine's launches, waits for the device, and meetings."""
    placed, recipe, moved = asked.placements(plan.stage), asked.recipe, plan.traffic
    ranks, backwards = asked.ranks, asked.accumulate
    wide = max(recipe.gradients, Bytes(4)) == recipe.gradients
    facts = Facts(
        -(-plan.slots // plan.buckets), ranks // replicas, replicas, 0, bool(placed.parameters),
        cast="master" in recipe.optimizer, in_place=not placed.gradients and recipe.gradients == recipe.reduced,
        narrow=not wide, divided=wide and recipe.reduced == 2 and ranks & (ranks - 1) == 0, native=reduce == "native",
        by_part=placed.by_part, two_levels=placed.two_levels,
    )  # fmt: skip
    forwards = backwards * (2 if moved.recompute.logical else 1)
    one = step(facts, gathers=round(moved.gathers), reductions=round(moved.reductions), forwards=forwards)
    busy = one.launches * max(machine.launch, machine.kernel) + one.drains * machine.drain
    met = 0 if ranks == 1 else meetings(sharded=bool(placed.parameters), backwards=backwards)
    return plan.buckets * busy + met * machine.meeting_seconds(ranks)


def seconds(
    moved: Traffic, machine: Cluster, ranks: int, replicas: int, buckets: int, reduce: Reduce = "ordered"
) -> float:
    """Estimate the seconds of a step's messages on one rank, one after the other: each bucket's once for each pass."""
    group = ranks // replicas
    found = 0.0
    if group > 1:
        found += _each(
            moved.gather.logical + moved.recompute.logical, moved.gathers * buckets, group, machine.ring_seconds
        )
        time_of = machine.ring_seconds if reduce == "native" else machine.exchange_seconds
        found += _each(moved.reduce.logical, moved.reductions * buckets, group, time_of)
    if replicas > 1:
        whole, busy = chain(moved, machine, ranks, replicas, buckets)
        found += whole + (max(moved.reductions * buckets, 1) - 1) * busy
        apart = replace(machine, gpus=max(machine.gpus // group, 1))  # a replica lies between two of these ranks
        found += _each(moved.share.logical, buckets * moved.times_shared, replicas, apart.ring_seconds)
    return found


def chain(moved: Traffic, machine: Cluster, ranks: int, replicas: int, buckets: int) -> tuple[float, float]:
    """Return the seconds of one bucket's sum through all replicas and its average's back, and how long of that a rank's
    link is busy. Sums follow one another a hop apart, so only the last one's way is waited for as a whole."""
    count, group = max(moved.reductions * buckets, 1), ranks // replicas
    back = moved.relay.sent * replicas / (replicas - 1) - moved.relay.logical
    on, last = moved.relay.logical / count, back * (replicas - 1 if moved.straight else 1) / count
    whole = machine.relay_seconds(on, last, replicas, group)[0]
    return whole, machine.relay_seconds(on, back / count, replicas, group)[1]


def _each(nbytes: int, messages: float, ranks: int, time_of: Callable[[float, int], float]) -> float:
    return messages * time_of(nbytes / messages, ranks) if nbytes and messages else 0.0


def compare(plan_of: Callable[[Asked], Plan], asked: Asked, machine: Cluster, *, spread: bool, hosts: bool) -> Ways:
    """Plan every mesh at every stage asked for, and sort the ways by time.

    plan_of: the plan of a question. spread, hosts: see `meshes`.
    """
    limit = asked.gpu_mem or machine.memory
    found: dict[Reduce, list[Way]] = {"ordered": [], "native": []}
    for mesh in meshes(asked.ranks, machine.gpus, spread=spread, hosts=hosts):
        stages, rows = mesh.stages(asked.stages), mesh.replicas * mesh.hosts
        if not stages:
            continue
        over = "team" if mesh.hosts > 1 else mesh.over
        comm = replace(asked.comm, replicas=mesh.replicas, hosts=mesh.hosts, optimizer=over)
        other = asked._replace(comm=comm, stages=stages, gpu_mem=None, gpus_per_node=machine.gpus)
        for plan in plan_of(other).stages:
            fits = plan.most <= limit and (asked.host_mem is None or plan.host <= asked.host_mem)
            for reduce in found:
                moved = plan.traffic if reduce == "ordered" else _added_by_the_backend(plan.traffic, asked)
                sent = links(moved, asked.ranks, machine.gpus, rows, native=reduce == "native")
                beside = overhead(plan, machine, rows, reduce, asked)
                took = seconds(moved, machine, asked.ranks, rows, plan.buckets, reduce) + beside
                figures = plan.most, sent.inside, sent.between, took, fits, beside
                late = chain(moved, machine, asked.ranks, rows, plan.buckets)[0] if rows > 1 else 0.0
                found[reduce].append(Way(plan.stage, mesh.replicas, mesh.over, *figures, reduce, mesh.hosts, late))
    for ways in found.values():
        ways.sort(key=lambda way: (way.seconds, way.nbytes, way.stage))
    return Ways(machine, -(-asked.ranks // machine.gpus), limit, tuple(found["ordered"]), tuple(found["native"]))


def _added_by_the_backend(moved: Traffic, asked: Asked) -> Traffic:
    """Widen reductions to the accumulator's dtype: what the backend adds on the way travels in it."""
    wider = asked.recipe.gradients / asked.recipe.reduced
    if asked.no_sync or wider <= 1:
        return moved
    return replace(moved, reduce=Moved(*(math.ceil(nbytes * wider) for nbytes in moved.reduce)))
