"""How long a step takes on a GPU by name, part by part, with states in any tier. No torch.

    compute   6 operations per parameter and token, 8 where layers are recomputed
    bus       sums and weights to the host, updates and parameters to the device, activations both ways
    host      the CPU's AdamW, and what is copied there: bytes over the bandwidth of host memory
    disk      the reads and writes of a step's files (`disk`)
    network   messages, one after the other, and the engine's launches (`ways`)
    update    the device's optimizer: its states read and written

The bus and the network work beside compute; what the host, the disk and the device's optimizer do comes after one
another, as on the one machine that was measured (docs/gpus.md: 0.78 s a step with everything in host memory, where this
clock says 0.67). The least of a range takes the fast constants and lets all that can go on at once; the most takes the
slow ones and lets nothing. Between stands the middle, by which ways are compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from ..events import DEVICE, NVME
from ..layout.stage import Placements
from . import closed, files, gpus, traffic, ways
from .disk import ASSUMED
from .files import Moves
from .machines import Cluster
from .recipes import Recipe

if TYPE_CHECKING:
    from .asked import Asked

GB = 10**9
PCIE_3, PCIE_4, PCIE_5 = 12 * GB, 25 * GB, 50 * GB  # of 16 lanes, one way, as pinned copies reach


class Card(NamedTuple):
    """One GPU. flops: dense 16-bit peak. memory, bus, link: bytes per second; link: to another GPU of its host."""

    flops: float
    memory: float
    bus: float
    link: float


# Of each GPU of `gpus.GPUS`, its bus and its link, by the vendors' data sheets; a card without a link of its own sends
# over the bus.
_LINKS: Mapping[str, tuple[float, float]] = {
    "b200": (PCIE_5, 900 * GB),
    "h200": (PCIE_5, 450 * GB),
    "h100-80": (PCIE_5, 450 * GB),
    "a100-80": (PCIE_4, 300 * GB),
    "a100-40": (PCIE_4, 300 * GB),
    "mi300x": (PCIE_5, 448 * GB),
    "a6000": (PCIE_4, PCIE_4),
    "l40s": (PCIE_4, PCIE_4),
    "l4": (PCIE_4, PCIE_4),
    "a10g": (PCIE_4, PCIE_4),
    "v100-32": (PCIE_3, 150 * GB),
    "v100-16": (PCIE_3, 150 * GB),
    "t4": (PCIE_3, PCIE_3),
    "5090": (PCIE_5, PCIE_5),
    "4090": (PCIE_4, PCIE_4),
    "3090": (PCIE_4, PCIE_4),
}
CARDS: Mapping[str, Card] = {
    name: Card(gpus.GPUS[name].flops, gpus.GPUS[name].bandwidth, *links) for name, links in _LINKS.items()
}
UNNAMED = "a100-80"  # whose speed stands for that of a GPU of which only the memory is told
GPUS = 8  # of one host


class Pace(NamedTuple):
    """Constants of one estimate. efficiency: the part of the peak that compute reaches; bus, disk: of their rates.

    host: bytes per second of host memory in the CPU's AdamW: 47 to 54 GB/s on two quiet cores (docs/offload.md), 128
    GB/s on the 16 cores beside an H100 (docs/gpus.md). alone: does each part wait for the one before?
    """

    efficiency: float
    bus: float
    host: float
    disk: float
    at_once: bool = False
    alone: bool = False


FAST = Pace(0.55, 1.0, 128 * GB, 1.5, at_once=True)
MIDDLE = Pace(0.40, 0.9, 80 * GB, 1.0)
SLOW = Pace(0.25, 0.6, 40 * GB, 0.5, alone=True)
SPLIT = 3.5  # times that an update of split masters takes (docs/precision.md)


class Times(NamedTuple):
    """Seconds of a step. binds: the part that takes most of the middle; parts: seconds of each there."""

    least: float
    middle: float
    most: float
    binds: str
    parts: Mapping[str, float]

    def json(self) -> dict[str, object]:
        return self._asdict() | {"parts": dict(self.parts)}


class Work(NamedTuple):
    """What a step does on one rank, in bytes, operations and seconds; as `work` counts it."""

    operations: float
    to_host: float  # in forward and backward
    to_device: float
    stepped: float  # over the bus, in the step itself, the way that more goes
    host: float
    update: float
    moves: Moves
    network: float


def card(gpu: str | None) -> Card:
    """Return a GPU by its name in `gpus.GPUS`, or what stands for one of which only the memory is told."""
    return CARDS.get(gpus.named(gpu) if gpu is not None else UNNAMED, CARDS[UNNAMED])


@cache
def cluster(gpu: str | None) -> Cluster:
    """Return the host of this GPU and seven more as a machine, for messages between ranks."""
    mine = card(gpu)
    network = 12.5 * GB
    return Cluster(
        gpu or UNNAMED, mine.flops, MIDDLE.efficiency, 0, mine.memory, GPUS, mine.link, network, 3e-6, 8e-6, "clock"
    )


class Clock:
    """The clock of one stage and recipe on a machine. What does not depend on tiers is counted once."""

    def __init__(self, asked: Asked, stage: int, numel: int, gpu: str | None, tokens: int) -> None:
        """tokens: of one micro-batch of a rank."""
        self.asked, self.gpu, self.numel, self.tokens = asked, gpu, numel, tokens
        self.recipe: Recipe = asked.recipe
        self.placed: Placements = asked.placements(stage)
        self.disk = asked.disk or ASSUMED
        group, copies = asked.ranks // asked.copies, asked.copies
        each = {degree: reserved for degree, (reserved, _) in closed.reserves(numel, group, copies).items()}
        self.parameters, self.gradients, self.updated = (each[degree] for degree in self.placed)
        self.sums = each[self.placed.owned]
        moved = traffic.per_step(
            numel, asked.ranks, self.placed, self.recipe, accumulate=asked.accumulate, no_sync=asked.no_sync,
            replicas=copies,
        )  # fmt: skip
        self.moved, self.stage = moved, stage
        self.near = min(asked.ranks, GPUS)
        self._networks: dict[int, float] = {}
        # Bytes of an element, as floats: a search asks for them some thousand times.
        self.width, self.summed = float(self.recipe.parameters), float(self.recipe.gradients)
        self.kept = float(sum(self.recipe.optimizer.values()))

    def network(self, buckets: int) -> float:
        """Return the seconds of messages and launches, of so many buckets."""
        if buckets not in self._networks:
            asked, machine = self.asked, cluster(self.gpu)
            plan = _Counted(self.stage, self.moved, buckets, buckets)
            beside = ways.overhead(plan, machine, asked.copies, "ordered", asked)  # type: ignore[arg-type]
            moving = ways.seconds(self.moved, machine, asked.ranks, asked.copies, buckets)
            self._networks[buckets] = moving + beside
        return self._networks[buckets]

    def work(
        self, at: Mapping[str, Mapping[str, float]], *, there: bool, recompute: bool, away: Mapping[str, int],
        buckets: int,
    ) -> Work:  # fmt: skip
        """Count a step. at: {kind of states: {tier: its fraction}}. there: does the device step states that rest beside
        it? away: bytes of activations in other tiers."""
        asked, recipe = self.asked, self.recipe
        off = {kind: 1 - found.get(DEVICE, 0.0) for kind, found in at.items()}
        width, summed, kept = self.width, self.summed, self.kept or self.summed
        backwards = 1 if asked.no_sync else asked.accumulate
        hosts = 0.0 if there else off["optimizer"]  # the part that the host steps
        moved = max(off["gradients"], hosts) if not recipe.in_backward else hosts
        out = summed * self.sums * (moved + (backwards - 1) * off["gradients"])
        back = summed * self.sums * (backwards - 1) * off["gradients"]
        brought = width * self.parameters * off["parameters"] * 2 * asked.accumulate
        gone = sum(away.values()) * asked.accumulate
        stepped = self.updated * hosts
        casts = not recipe.split and recipe.updated != recipe.parameters  # does the device make the parameters' format?
        edits = width * stepped * off["parameters"]  # weights that come back before they are released
        news = float(recipe.updated) * stepped if casts else width * stepped * (1 - off["parameters"])
        cast = width * stepped * off["parameters"] * casts
        passing = self.updated * there * (kept * off["optimizer"] + width * off["parameters"])  # as much comes back
        back += summed * self.sums * off["gradients"] * there
        slower = SPLIT if recipe.split else 1.0
        host = stepped * (2 * kept + summed) * slower
        host += gone + brought / 2  # what leaves or arrives is copied there
        update = 2 * kept * self.updated * (1 - hosts) * slower
        return Work(
            (8 if recompute else 6) * self.numel * self.tokens * asked.accumulate,
            out + gone, back + brought + gone, max(news, edits + cast) + passing, host, update, self._moves(at, away),
            self.network(buckets),
        )  # fmt: skip

    def _moves(self, at: Mapping[str, Mapping[str, float]], away: Mapping[str, int]) -> Moves:
        recipe, asked = self.recipe, self.asked
        if not any(NVME in found for found in at.values()) and NVME not in away:
            return files.STILL
        rows = {"parameters": float(recipe.parameters) * self.parameters * at["parameters"].get(NVME, 0.0)}
        rows["gradients"] = float(recipe.kept_gradients) * self.gradients * at["gradients"].get(NVME, 0.0)
        for state, nbytes in recipe.optimizer.items():
            rows[state] = float(nbytes) * self.updated * at["optimizer"].get(NVME, 0.0)
        held = {state: round(nbytes) for state, nbytes in rows.items() if nbytes}
        gone = away.get(NVME, 0) * asked.accumulate
        found = files.closed_moves(
            held, self.placed, mastered="master" in recipe.optimizer and not recipe.split, accumulate=asked.accumulate,
            no_sync=asked.no_sync, first=asked.copies == 1 or self.placed.by_part,
        )  # fmt: skip
        return Moves(found.read + gone, found.written + gone)

    def times(self, work: Work, *, prefetch: bool) -> Times:
        """Put a step on the clock. prefetch: are units gathered ahead of use?"""
        found = {pace: self._parts(work, pace) for pace in (FAST, MIDDLE, SLOW)}
        parts = found[MIDDLE]
        least, middle, most = (_together(found[pace], pace, prefetch=prefetch) for pace in found)
        return Times(least, middle, most, max(parts, key=lambda name: parts[name]), parts)

    def middle(self, work: Work, *, prefetch: bool) -> float:
        """Return the middle alone, by which ways are compared."""
        return _together(self._parts(work, MIDDLE), MIDDLE, prefetch=prefetch)

    def _parts(self, work: Work, pace: Pace) -> dict[str, float]:
        mine = card(self.gpu)
        bus = mine.bus * pace.bus
        return {
            "device": work.operations / (mine.flops * pace.efficiency),
            "bus": max(work.to_host, work.to_device) / bus,
            "network": work.network,
            "host AdamW": work.host / (pace.host / self.near),
            "updates over the bus": work.stepped / bus,
            "disk": self.disk.seconds(work.moves) / pace.disk,
            "device's optimizer": work.update / mine.memory,
        }


class _Counted(NamedTuple):
    """The part of a stage's plan that decides how often the engine launches."""

    stage: int
    traffic: traffic.Traffic
    buckets: int
    slots: int


def _together(parts: Mapping[str, float], pace: Pace, *, prefetch: bool) -> float:
    """Add up what waits for each other, and take the longest of what goes on at once."""
    if pace.alone:
        return sum(parts.values())
    passes = [parts["device"], parts["bus"], parts["network"]]
    ends = [parts["host AdamW"], parts["updates over the bus"], parts["disk"]]
    both = max(passes) if prefetch else parts["device"] + max(passes[1:])
    return both + (max(ends) if pace.at_once else sum(ends)) + parts["device's optimizer"]
