"""The answer to a plan: each stage's bytes, and what every plan has beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from html import escape
from typing import TYPE_CHECKING, Any

from ..events import DEVICE, HOST, NVME
from ..layout.stage import STAGES, STATES
from ..policies.layout import Layout
from . import closed, disk, instants, recipes, states, traffic
from .asked import Asked
from .balance import Balance
from .disk import Disk
from .files import STILL, Moves
from .quantities import plain
from .recipes import Recipe
from .traffic import Links, Replicas, SlowLink, Traffic
from .ways import Ways

if TYPE_CHECKING:
    from ..policies.offload import Offload
    from .fitting import Fitting


@dataclass(frozen=True)
class StagePlan:
    """The plan of one stage, in bytes of `rank`, the rank that holds most.

    states: at rest, by state; padding has a row of its own, but in a job's plan is part of each state. tiers: the same
    by where they rest; files have buffers, "staging", in host memory. rounding: what whole pages of pinned memory take
    beyond that. pinned: what pieces of it take at most through which sums and weights pass, and states of 16 bits while
    the host steps them in fp32. files: on the disk, in whole pages. moves: read from files and written to them a step.
    instants, peak: what passes through the device beside what rests there, and the most of both together (None in the
    closed form, which knows no units). activations: what a job's forward keeps for backward. working: the most alive at
    once of what its operators make, activations included; it has to fit beside the peak, though both need not come at
    the same moment. links, links_gloo: what one rank sends over each kind of link in a step, over NCCL and over gloo,
    where a size of node was given. slow_link: between nodes, compared with one replica. largest: the most parameters
    whose states alone fit. snapshot: host memory that a save behind the training takes until it is written.
    """

    stage: int
    rank: int
    formula: str
    states: Mapping[str, int]
    saved: float  # fraction of stage 0's total
    traffic: Traffic
    instants: tuple[instants.Instant, ...] = ()
    peak: int | None = None
    peak_at: str | None = None
    fits: bool | None = None
    largest: int | None = None
    activations: int = 0
    working: int = 0
    links: Links | None = None
    links_gloo: Links | None = None
    slow_link: SlowLink | None = None
    snapshot: int = 0
    tiers: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    rounding: int = 0
    pinned: int = 0
    files: int = 0
    moves: Moves = STILL
    buckets: int = 1  # each is a message of every pass
    slots: int = 1  # parameters in them, as far as they are known

    @property
    def total(self) -> int:
        """Bytes at rest, in all tiers."""
        return sum(self.states.values())

    @property
    def device(self) -> int:
        """Bytes at rest on the device."""
        return sum(self.tiers[DEVICE].values()) if DEVICE in self.tiers else 0 if self.tiers else self.total

    @property
    def host(self) -> int:
        """Bytes at rest in host memory, pages and buffers included."""
        return sum(self.tiers.get(HOST, {}).values()) + self.rounding

    @property
    def most(self) -> int:
        """Bytes that must fit the device: working memory, and the peak, or what rests there where no peak is known."""
        return self.working + (self.device if self.peak is None else self.peak)

    def json(self) -> dict[str, Any]:
        return {
            "stage": self.stage,
            "rank": self.rank,
            "bytes_per_parameter": self.formula,
            "states": dict(self.states),
            "total": self.total,
            "saved": self.saved,
            "traffic": self.traffic.json(),
            "instants": [instant.json() for instant in self.instants],
            "peak": self.peak,
            "peak_at": self.peak_at,
            "activations": self.activations,
            "working": self.working,
            "links": self.links and self.links._asdict(),
            "links_gloo": self.links_gloo and self.links_gloo._asdict(),
            "slow_link": self.slow_link and self.slow_link.json(),
            "fits": self.fits,
            "largest": self.largest,
            "snapshot": self.snapshot,
            "tiers": {tier: dict(held) for tier, held in self.tiers.items()},
            "rounding": self.rounding,
            "files": self.files,
            "moves": self.moves._asdict(),
        }


@dataclass(frozen=True)
class Plan:
    """The answer for the stages asked for."""

    source: str
    parameters: int
    ranks: int
    recipe: Recipe
    accumulate: int
    no_sync: bool
    stages: tuple[StagePlan, ...]
    layout: Layout | None = None
    replicas: Replicas | None = None
    gpu_mem: int | None = None
    notes: tuple[str, ...] = ()
    offload: Offload | None = None
    host_mem: int | None = None
    disk: Disk | None = None
    step_time: float | None = None
    tokens: int | None = None
    whole: Balance | None = None
    ways: Ways | None = None
    fitting: Fitting | None = None

    def _repr_html_(self) -> str:
        """Render a table for notebooks: each stage's bytes per rank at rest, and whether they fit."""
        names = dict.fromkeys(state for stage in self.stages for state in stage.states)
        fits = {True: "fits", False: "too much", None: ""}
        rows: list[list[str]] = [["bytes per rank at rest", *names, "total", ""]]
        for stage in self.stages:
            held = (stage.states.get(name, 0) for name in names)
            rows.append([f"stage {stage.stage}", *(f"{n:,}" for n in held), f"{stage.total:,}", fits[stage.fits]])
        lines = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
        return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"

    def seconds(self, stage: StagePlan) -> float | None:
        """Return the fewest seconds that a step's files take on the disk that is told; None without one."""
        return None if self.disk is None else self.disk.seconds(stage.moves)

    def wear(self, stage: StagePlan) -> int | None:
        """Return the bytes a rank writes to its disk in a day, in steps of `step_time`, else of the disk's time."""
        step = self.step_time or self.seconds(stage)
        return disk.wear(stage.moves, step) if step else None

    def tokens_per_second(self, stage: StagePlan) -> float | None:
        """Return the tokens per second that the disk allows if nothing else takes longer; None if either is unknown."""
        seconds = self.seconds(stage)
        return self.tokens / seconds if self.tokens and seconds else None

    def json(self) -> dict[str, Any]:
        """Return the plan as plain numbers, strings, lists and dicts; all bytes are integers."""
        layout = self.layout and {name: getattr(self.layout, name) for name in ("bounds", "bucket_mib", "align")}
        return {
            "source": self.source,
            "parameters": self.parameters,
            "ranks": self.ranks,
            "recipe": self.recipe.json(),
            "accumulate": self.accumulate,
            "no_sync": self.no_sync,
            "layout": layout,
            "gpu_mem": self.gpu_mem,
            "stages": [stage.json() for stage in self.stages],
            "replicas": self.replicas and self.replicas.json(),
            "notes": list(self.notes),
            **({"whole": self.whole._asdict()} if self.whole else {}),
            **({"ways": self.ways.json()} if self.ways else {}),
            **({"fitting": self.fitting.json()} if self.fitting else {}),
            "offload": self.offload and {kind: self.offload.tiers(kind) for kind in STATES},
            "host_mem": self.host_mem,
            "disk": self.disk and self.disk.json(),
            "files": [
                {
                    "stage": stage.stage,
                    "seconds": self.seconds(stage),
                    "wear_per_day": self.wear(stage),
                    "tokens_per_second": self.tokens_per_second(stage),
                }
                for stage in self.stages
                if stage.files
            ],
        }


def _links(found: StagePlan, asked: Asked, *, gloo: bool = False) -> Links | None:
    if asked.gpus_per_node is None:
        return None
    return traffic.links(found.traffic, asked.ranks, asked.gpus_per_node, asked.copies, gloo=gloo)


def finish(
    source: str,
    numel: int,
    asked: Asked,
    layout: Layout | None,
    of: Callable[[int], StagePlan],
    notes: list[str],
    alone: Callable[[int], Traffic] | None = None,
    balance: Balance | None = None,
    *,
    job: bool = False,
) -> Plan:
    """Complete a plan: savings, whether each stage fits, the largest model that would, links and notes.

    of: the plan of a stage's bytes. alone: what one replica of as many ranks moves at a stage. balance: of tensors that
    are never cut. job: is it of a job, whose recipe has the masters that a choice of tiers makes?
    """
    ranks, recipe, limit, copies = asked.ranks, asked.recipe, asked.gpu_mem, asked.copies
    node = asked.gpus_per_node or (ranks // copies if copies > 1 else None)  # else as large as a replica
    lowest = of(min(asked.stages) if asked.once else min(STAGES))
    whole = lowest.total - lowest.states.get(states.STAGING, 0)
    stages = []
    for stage in asked.stages:
        found = of(stage)
        found = replace(
            found,
            saved=float(plain(1 - recipes.Bytes(found.device, whole))),
            fits=None if limit is None else found.most <= limit,
            largest=_largest(asked, stage, limit),
            links=_links(found, asked),
            links_gloo=_links(found, asked, gloo=True),
            slow_link=None
            if asked.comm.rows is None or node is None or alone is None
            else traffic.slow_link(ranks, copies, found.traffic, alone(stage), node),
        )
        stages.append(found)
    copied = max(found.snapshot for found in stages)
    notes = [*(balance.said() if balance else []), *notes, *_of_one_copy(asked), *_of_files(asked)]
    notes.append(f"an asynchronous save takes {copied:,} bytes of host memory until it is written")
    return Plan(
        source,
        numel,
        ranks,
        _whole(recipe, asked, job=job),
        asked.accumulate,
        asked.no_sync,
        tuple(stages),
        layout,
        _replicas(numel, asked),
        limit,
        tuple(notes),
        asked.offload,
        asked.host_mem,
        asked.disk,
        asked.step_time,
        asked.tokens,
        balance,
    )


def _replicas(numel: int, asked: Asked) -> Replicas | None:
    if asked.comm.rows is None:
        return None
    spread = asked.spread(max(asked.stages))
    return traffic.replicas(numel, asked.ranks, asked.copies, asked.recipe, spread=spread, hosts=asked.comm.two_levels)


def _whole(recipe: Recipe, asked: Asked, *, job: bool) -> Recipe:
    """Return the recipe with the masters that a choice of tiers makes, which a job's has."""
    return recipe if job else recipes.with_masters(recipe, asked.fractions)


def _of_one_copy(asked: Asked) -> list[str]:
    once = "parameters lie once on a host, in memory that its ranks share; of the proportional set size each has 1/N"
    return [once] if asked.once else []


def _of_files(asked: Asked) -> list[str]:
    if asked.offload is None or not any(NVME in asked.offload.tiers(kind) for kind in STATES):
        return []
    said = []
    if NVME in asked.offload.tiers("gradients"):
        said.append("files: gradients that are clipped are read twice more and written once more")
    if asked.disk is None:
        said.append("how long they take on a disk of yours: --disk-read and --disk-write, in GB/s")
    return said


def _largest(asked: Asked, stage: int, limit: int | None) -> int | None:
    """Return the most parameters whose states alone fit `limit`; None without one, or if none rest on the device."""
    mine = recipes.part(asked.recipe, asked.fractions, DEVICE)
    if limit is None or not mine.total:
        return None
    return closed.largest(asked.ranks // asked.copies, asked.placements(stage), mine, limit, asked.copies)
