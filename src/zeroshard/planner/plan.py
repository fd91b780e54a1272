"""`plan`: what a model takes per rank at every stage, whether it fits, and what to change if not.

plan(params=...)            the closed form: three numbers and a recipe
plan(shapes=...)            the engine's own layout of those shapes, and the instants of a step
plan("module:function")     the user's own job
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from ..errors import UserError, nearest
from ..events import DEVICE, HOST, NVME
from ..headroom import BUFFERS, PREFETCH, aligned
from ..layout import Bounds, Layout, Partition, Spec, partition
from ..stage import STAGES, Placements
from . import advice, closed, disk, files, instants, quantities, recipes, shapes, states, traffic
from .advice import Change
from .disk import Disk, load
from .files import STILL, Moves
from .quantities import plain
from .recipes import Recipe
from .traffic import Links, Replicas, SlowLink, Traffic

if TYPE_CHECKING:
    from ..tier import Offload

RANKS_LIMIT = 1 << 20  # of the closed form
LAYOUT_RANKS_LIMIT = 1 << 13  # of a layout, which writes down every rank's bounds
UNITS_LIMIT = 1 << 12
ADVISED_RANKS_LIMIT = 1 << 10  # of a layout, where several are tried


@dataclass(frozen=True)
class StagePlan:
    """One stage. All bytes are those of `rank`, which holds most; of equals the last.

    states: at rest, by state, padding apart. tiers: the same by where they rest; files have buffers, "staging", in host
    memory. rounding: what whole pages of pinned memory take beside. files: on the disk, in whole pages. moves: read
    from files and written to them in a step. instants, peak: what passes through the device beside what rests there,
    and the most of both together (None in the closed form, which knows no units). activations: what a job's forward
    keeps for backward; working: the most alive at once of what its operators make, activations included. It has to fit
    beside the peak, though it need not be at the same moment. links: what one GPU sends over each kind of link in a
    step, where a size of node was given. largest: the most parameters whose states alone fit. snapshot: host memory
    that a save behind the training takes until it is written.
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
    snapshot: int = 0
    tiers: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    rounding: int = 0
    files: int = 0
    moves: Moves = STILL

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
        """What has to fit the device: the peak, or what is known of it."""
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
    slow_link: SlowLink | None = None
    gpu_mem: int | None = None
    advice: tuple[Change, ...] = ()
    notes: tuple[str, ...] = ()
    offload: Offload | None = None
    host_mem: int | None = None
    disk: Disk | None = None
    step_time: float | None = None
    tokens: int | None = None

    def seconds(self, stage: StagePlan) -> float | None:
        """The least that a step's files take on the disk that was measured."""
        return None if self.disk is None else self.disk.seconds(stage.moves)

    def wear(self, stage: StagePlan) -> int | None:
        """Bytes a rank writes to its disk in a day: of steps of `step_time`, else as long as the disk takes."""
        step = self.step_time or self.seconds(stage)
        return disk.wear(stage.moves, step) if step else None

    def tokens_per_second(self, stage: StagePlan) -> float | None:
        """What the disk allows, if nothing else took longer."""
        seconds = self.seconds(stage)
        return self.tokens / seconds if self.tokens and seconds else None

    def json(self) -> dict[str, Any]:
        """The same as plain numbers, strings, lists and dicts; all bytes are integers."""
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
            "instances": self.replicas and self.replicas.json(),
            "slow_link": self.slow_link and self.slow_link.json(),
            "advice": [change.json() for change in self.advice],
            "notes": list(self.notes),
            "offload": self.offload and {kind: self.offload.tiers(kind) for kind in states.KINDS},
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


def plan(
    job: str | Callable[[], Any] | None = None,
    *,
    params: str | float | None = None,
    shapes: str | os.PathLike[str] | None = None,
    ranks: int = 1,
    stage: int | None = None,
    preset: str | None = None,
    bytes: str | None = None,
    optimizer: str | None = None,
    gpu_mem: str | None = None,
    accumulate: int = 1,
    no_sync: bool = False,
    replicas: int | None = None,
    instances: int | None = None,
    units: int | None = None,
    align: int | None = None,
    bounds: str | None = None,
    bucket_mib: float | None = None,
    prefetch: int = PREFETCH,
    gpus_per_node: int | None = None,
    precision: Literal["fp32", "bf16"] | None = None,
    checkpoint: bool = False,
    offload: Offload | None = None,
    host_mem: str | None = None,
    disk: str | os.PathLike[str] | None = None,
    step_time: float | None = None,
    tokens: str | float | None = None,
) -> Plan:
    """Bytes per rank of a model's states, at rest and at the worst instant, at one stage or all four.

    One of: job, "module:function" or the function (see `planner.job`), run as it is on tensors without memory; params,
    how many parameters (7e9, "7B"); shapes, a JSON, safetensors or Hugging Face file or folder.

    ranks: over which states are sharded. stage: 0 to 3 (None: all). preset: bytes per parameter by name ("paper" for
    params, "zeroshard" for shapes); optimizer: another optimizer's states in it, by a preset's name or as a class of
    torch.optim; bytes: a formula instead, "parameters=2,gradients=2,master=4,m=4,v=4". gpu_mem: "80GiB". accumulate:
    backwards per step. no_sync: added up on the rank before one reduction. replicas: K copies of the sharded optimizer
    (instances: an older name for it). units: params in that many equal blocks, for the peaks of a step. align, bounds,
    bucket_mib: as `Layout`'s, for shapes and jobs; prefetch: units gathered ahead of use, as `Comm`'s. gpus_per_node:
    what one GPU's links inside and between nodes of that size carry. precision: "fp32", a job's own dtypes, or "bf16"
    with fp32 masters. checkpoint: every unit of a job recomputes in backward. offload: where states rest, as `shard`'s;
    gpu_mem is then about what stays on the device, host_mem ("200GiB") about one rank's share of host memory. disk: a
    file that `zeroshard io-bench` wrote; tokens: of one rank's step, for what that disk allows; step_time: seconds, for
    its wear.

    Raises `UserError` for whatever cannot be answered.
    """
    given = {"job": job, "params": params, "shapes": shapes}
    named = [name for name, value in given.items() if value is not None]
    if len(named) != 1:
        raise UserError(
            "plan takes one of params, shapes and module:function",
            got=" and ".join(named) or "none of them",
            instead="params=7e9, or shapes='model.safetensors' (in a terminal --params and --shapes)",
        )
    if preset is not None and bytes is not None:
        raise UserError("preset and bytes both say how many bytes a parameter takes", instead="one of the two")
    if precision not in (None, *get_args(Literal["fp32", "bf16"])):
        raise UserError("no such precision", got=repr(precision), instead=nearest(precision, ("fp32", "bf16")))
    _whole("ranks", ranks, RANKS_LIMIT if params is not None else LAYOUT_RANKS_LIMIT)
    _whole("accumulate", accumulate, 1 << 30)
    if type(prefetch) is not int or prefetch < 0:
        raise UserError("prefetch counts units", expected="0, 1, 2, ...", got=repr(prefetch), instead="prefetch=1")
    if gpus_per_node is not None:
        _whole("gpus_per_node", gpus_per_node, RANKS_LIMIT)
    if instances is not None and replicas is not None:
        raise UserError("replicas and instances are two names of one thing", instead=f"replicas={replicas!r}")
    replicas = instances if replicas is None else replicas
    if replicas is not None:
        _whole("replicas", replicas, ranks)
    if units is not None:
        _whole("units", units, UNITS_LIMIT)
        if params is None:
            raise UserError("units stand for shapes that are not known", got="a job or shapes", instead="leave it out")
    if replicas is not None and replicas > 1 and stage not in (None, 1):
        raise UserError("replicas of the optimizer are a matter of stage 1", got=f"stage={stage}", instead="stage=1")
    if stage is not None and (type(stage) is not int or stage not in STAGES):
        raise UserError("no such ZeRO stage", expected="0, 1, 2 or 3", got=repr(stage), instead="stage=3")
    if step_time is not None and not (isinstance(step_time, (int, float)) and 0 < step_time < math.inf):
        raise UserError("step_time counts seconds", got=repr(step_time), instead="step_time=2.5")
    if offload is not None and not hasattr(offload, "tiers"):
        raise UserError("offload= is an Offload", got=repr(offload), instead='offload=Offload(optimizer="cpu")')
    on_disk = offload is not None and any(NVME in offload.tiers(kind) for kind in states.KINDS)
    for name, value in {"disk": disk, "step_time": step_time, "tokens": tokens}.items():
        if value is not None and not on_disk:
            raise UserError(f"{name} is about files, and nothing rests in any", instead='offload="nvme"')
    if tokens is not None and disk is None:
        raise UserError("tokens per second need what the disk moves", instead="disk=, from zeroshard io-bench DIR")
    if offload is not None and replicas is not None:
        raise UserError("replicas are planned on the device", got="offload", instead="one of the two")
    asked = Asked(
        ranks=ranks,
        stages=(1,) if (replicas or 1) > 1 else tuple(STAGES) if stage is None else (stage,),
        recipe=recipes.recipe(
            preset or ("paper" if params is not None else "zeroshard"), optimizer=optimizer, custom=bytes
        ),
        gpu_mem=None if gpu_mem is None else quantities.budget(gpu_mem, "gpu_mem"),
        accumulate=accumulate,
        no_sync=bool(no_sync),
        replicas=replicas,
        units=units,
        prefetch=prefetch,
        gpus_per_node=gpus_per_node,
        precision=precision or "fp32",
        checkpoint=bool(checkpoint),
        offload=offload,
        host_mem=None if host_mem is None else quantities.budget(host_mem, "host_mem"),
        disk=None if disk is None else load(disk),
        step_time=step_time,
        tokens=None if tokens is None else quantities.count(tokens, "tokens"),
    )
    of_layout = {"align": align, "bounds": bounds, "bucket_mib": bucket_mib}
    of_layout = {name: value for name, value in of_layout.items() if value is not None}
    if job is not None:
        closed_form = {"preset": preset, "bytes": bytes, "optimizer": optimizer, "replicas": replicas}
        if told := [name for name, value in closed_form.items() if value is not None]:
            raise UserError(f"{' and '.join(told)}: a job says itself what it holds", instead="leave it out")
        return _plan_job(job, asked, _layout(of_layout))
    if precision is not None or checkpoint:
        raise UserError("precision and checkpoint are for jobs", instead='plan("module:function", ...)')
    if params is not None:
        if of_layout:
            raise UserError(
                f"{' and '.join(of_layout)}: a number of parameters has no layout", instead="shapes, or leave it out"
            )
        return _plan_params(quantities.count(params), asked)
    assert shapes is not None
    if replicas is not None:
        raise UserError("replicas are answered in the closed form", got="shapes", instead="params=...")
    return _plan_shapes(shapes, asked, _layout(of_layout))


class Asked(NamedTuple):
    """The settings of a plan, checked."""

    ranks: int
    stages: tuple[int, ...]
    recipe: Recipe
    gpu_mem: int | None
    accumulate: int
    no_sync: bool
    replicas: int | None
    units: int | None
    prefetch: int
    gpus_per_node: int | None
    precision: Literal["fp32", "bf16"]
    checkpoint: bool
    offload: Offload | None = None
    host_mem: int | None = None
    disk: Disk | None = None
    step_time: float | None = None
    tokens: int | None = None

    def resting(self, cut: Partition) -> states.Resting | None:
        """For each bucket the tier of each state."""
        return None if self.offload is None else self.offload.buckets(cut.buckets)

    def shares(self, tier: str) -> dict[str, Fraction]:
        """{state: fraction of its bytes in a tier}."""
        if self.offload is None:
            return dict.fromkeys(states.KINDS, Fraction(tier == DEVICE))
        parts = {kind: self.offload.tiers(kind).get(tier, 0.0) for kind in states.KINDS}
        return {kind: Fraction(part).limit_denominator(10**6) for kind, part in parts.items()}


def _plan_job(job: str | Callable[[], Any], asked: Asked, layout: Layout) -> Plan:
    from .own import plan_job  # the only plan that needs torch

    return plan_job(job, asked, layout)


def _whole(name: str, value: object, most: int) -> None:
    if type(value) is not int or value < 1:
        raise UserError(f"{name} must be a whole number of at least 1", got=repr(value), instead=f"{name}=1")
    if value > most:
        raise UserError(f"{name} must be at most {most}", got=repr(value), instead=f"{name}={most}")


def _layout(settings: dict[str, Any]) -> Layout:
    if settings.get("bounds", "unit") not in get_args(Bounds):
        raise UserError(
            "no such bounds", got=repr(settings["bounds"]), instead=nearest(settings["bounds"], get_args(Bounds))
        )
    return Layout(**settings)


# -------------------------------------------------------------------------------------------------------- closed form


def _plan_params(numel: int, asked: Asked) -> Plan:
    ranks, recipe, copies = asked.ranks, asked.recipe, asked.replicas or 1
    if ranks % copies:
        traffic.replicas(numel, ranks, copies, recipe)  # says which numbers divide

    def sharing(stage: int, among: int) -> int:
        """Ranks among which a state is cut: each of K replicas of the optimizer is cut among N/K of them."""
        return among // copies if stage == 1 and among % copies == 0 else among

    def of(stage: int) -> StagePlan:
        place = STAGES[stage]
        tiers = _shared_out(numel, sharing(stage, ranks), place, recipe, asked)
        at_rest = states.together(tiers)
        found = tuple(_of_equal_units(numel, asked, place))
        peak, peak_at = instants.peak(tiers.get(DEVICE, {}), found) if found else (None, None)
        on_disk = tiers.get(NVME, {})
        formula = recipes.cast_here(recipe, asked.shares(DEVICE)).formula(place)
        return StagePlan(
            stage,
            ranks - 1,
            formula.replace("/N", f"*{copies}/N" if sharing(stage, ranks) < ranks else "/N"),
            at_rest,
            0.0,
            traffic.per_step(
                numel, ranks, place, recipe, accumulate=asked.accumulate, no_sync=asked.no_sync,
                replicas=ranks // sharing(stage, ranks),
            ),
            found,
            peak,
            peak_at,
            snapshot=math.ceil(recipe.saved * -(-numel // ranks)),
            tiers=tiers,
            files=sum(on_disk.values()),
            moves=files.closed_moves(
                on_disk, place, mastered="master" in _with_copies(recipe, asked).optimizer,
                accumulate=asked.accumulate, no_sync=asked.no_sync,
            ),
        )  # fmt: skip

    def nbytes_of(stage: int, more_ranks: int, other: Recipe) -> int:
        mine = recipes.part(_with_copies(other, asked), asked.shares(DEVICE), device=True)
        return closed.total(numel, sharing(stage, more_ranks), STAGES[stage], mine)

    notes = []
    if asked.units is None:
        notes.append("at rest; for peaks give shapes, a job, or --units: into how many equal blocks")
    if recipe.per_tensor:
        notes.append("step counters, 4 bytes per parameter tensor and rank, come on top; shapes count them")
    if asked.offload is not None:
        notes.append("tiers approximate: in full buckets, without rounding to pages; shapes and jobs are exact")

    def advise(limit: int) -> list[Change]:
        return advice.changes(max(asked.stages), ranks, recipe, limit, nbytes_of, RANKS_LIMIT)

    return finish("parameters", numel, asked, None, of, advise, notes, sharing)


def _with_copies(recipe: Recipe, asked: Asked) -> Recipe:
    """On a GPU, parameters that are updated elsewhere than they rest have a master in their own dtype."""
    shares = asked.shares(DEVICE)
    here, there = shares["parameters"], shares["optimizer"]
    copied = recipe.parameters * (here * (1 - there) + there * (1 - here))
    if "master" in recipe.optimizer or not copied:
        return recipe
    return replace(recipe, optimizer={"master": copied, **recipe.optimizer})


def _shared_out(numel: int, ranks: int, place: Placements, recipe: Recipe, asked: Asked) -> states.Tiers:
    """The closed form, tier by tier; files have buffers of one message."""
    whole = _with_copies(recipe, asked)
    parts = {tier: recipes.part(whole, asked.shares(tier), device=tier == DEVICE) for tier in (DEVICE, HOST, NVME)}
    tiers = {tier: closed.at_rest(numel, ranks, place, mine) for tier, mine in parts.items()}
    message = int(Layout().bucket_mib * 2**20 / recipe.parameters)
    buffers = 0
    for state, itemsize, sharded in replace(whole, cast=Fraction()).states(place):  # in files nothing is cast
        slot = aligned(math.ceil(closed.share(min(message, numel), ranks if sharded else 1) * itemsize))
        buffers += min(BUFFERS * slot, aligned(tiers[NVME].get(state, 0)))
    if buffers:
        tiers[HOST][states.STAGING] = buffers
    held = {tier: {state: n for state, n in found.items() if n} for tier, found in tiers.items()}
    return {tier: found for tier, found in held.items() if found}


def _of_equal_units(numel: int, asked: Asked, place: Placements) -> list[instants.Instant]:
    """The instants of a model of that many equal units, in messages of the default size; none if it was not said."""
    if asked.units is None:
        return []
    itemsize = max(round(asked.recipe.parameters), 1)
    unit = -(-numel // asked.units)
    message = min(unit, int(Layout().bucket_mib * 2**20) // itemsize)
    sizes = [message] * (unit // message) + [unit % message] * (unit % message > 0)
    specs = [
        Spec(f"units.{number}.{part}", (size,), "element", itemsize, number + 1, True)
        for number in range(asked.units)
        for part, size in enumerate(sizes)
    ]
    names = ["root", *(f"units.{number}" for number in range(asked.units))]
    cut = partition(specs, Layout(), asked.ranks)
    return instants.instants(
        cut, place, instants.item_sizes(asked.recipe), asked.ranks - 1, prefetch=asked.prefetch,
        accumulate=asked.accumulate, no_sync=asked.no_sync, names=names, resting=asked.resting(cut),
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- shapes


def _plan_shapes(path: str | os.PathLike[str], asked: Asked, layout: Layout) -> Plan:
    model = shapes.read(path)
    recipe = asked.recipe
    # Buckets are cut by the parameters' bytes in training, not in the file. A recipe may say 1.5; bytes are whole.
    specs = model.specs(max(round(recipe.parameters), 1))
    names = shapes.unit_names(model.parameters)

    cuts: dict[int, tuple[Partition, list[states.Owned]]] = {}

    def planned(stage: int, ranks: int, other: Recipe) -> StagePlan:
        if ranks not in cuts:
            laid_out = partition(specs, layout, ranks)
            cuts[ranks] = laid_out, states.owned(laid_out)
        cut, owned = cuts[ranks]
        place = STAGES[stage]
        rank = states.fullest_rank(owned, place, other)
        resting = asked.resting(cut)
        tiers = states.recipe_tiers(cut, place, rank, other, resting=resting)
        at_rest = states.together(tiers)
        backwards, no_sync = asked.accumulate, asked.no_sync
        moved = states.recipe_traffic(cut, place, rank, other, accumulate=backwards, no_sync=no_sync)
        sizes = instants.item_sizes(other)
        found = instants.instants(
            cut, place, sizes, rank, prefetch=asked.prefetch, accumulate=backwards, no_sync=no_sync, names=names,
            resting=resting,
        )  # fmt: skip
        peak, peak_at = instants.peak(tiers.get(DEVICE, {}), found)
        formula = recipes.cast_here(other, asked.shares(DEVICE)).formula(place)
        beside: dict[str, Any] = {}
        if resting is not None:
            filed = states.recipe_files(cut, place, rank, other, resting)
            beside["files"] = sum(file.nbytes for file in filed.values())
            beside["rounding"] = states.recipe_rounding(cut, place, rank, other, resting)
            beside["moves"] = files.recipe_moves(
                cut, place, rank, other, resting, accumulate=backwards, no_sync=no_sync
            )
        return StagePlan(
            stage, rank, formula, at_rest, 0.0, moved, tuple(found), peak, peak_at,
            snapshot=states.recipe_snapshot(cut, rank, other), tiers=tiers, **beside,
        )  # fmt: skip

    def of(stage: int) -> StagePlan:
        return planned(stage, asked.ranks, recipe)

    def nbytes_of(stage: int, ranks: int, other: Recipe) -> int:
        return planned(stage, ranks, other).most

    of(max(asked.stages))
    padding = sum(bucket.padding for bucket in cuts[asked.ranks][0].buckets)
    notes = [f"padding over all ranks: {padding:,} elements"] if padding else []
    notes += [f"{name} is {shared}, counted once" for name, shared in model.ties.items()]
    notes += [f"{name} left out: {why}" for name, why in model.left_out.items()]

    def advise(limit: int) -> list[Change]:
        return advice.changes(max(asked.stages), asked.ranks, recipe, limit, nbytes_of, ADVISED_RANKS_LIMIT)

    return finish(model.source, model.numel, asked, layout, of, advise, notes)


# ---------------------------------------------------------------------------------------------------------- both alike


def finish(
    source: str,
    numel: int,
    asked: Asked,
    layout: Layout | None,
    of: Callable[[int], StagePlan],
    advise: Callable[[int], list[Change]],
    notes: list[str],
    sharing: Callable[[int, int], int] = lambda stage, ranks: ranks,
) -> Plan:
    """What every plan has beside its bytes: savings, whether it fits, the largest that would, advice."""
    ranks, recipe, limit = asked.ranks, asked.recipe, asked.gpu_mem
    lowest = of(min(STAGES))
    whole = lowest.total - lowest.states.get(states.STAGING, 0)
    stages = []
    for stage in asked.stages:
        found = of(stage)
        found = replace(
            found,
            saved=float(plain(1 - recipes.Bytes(found.device, whole))),
            fits=None if limit is None else found.most <= limit,
            largest=_largest(sharing(stage, ranks), STAGES[stage], asked, limit),
            links=None
            if asked.gpus_per_node is None
            else traffic.links(found.traffic, ranks, asked.gpus_per_node, ranks // sharing(stage, ranks)),
        )
        stages.append(found)
    copied = max(found.snapshot for found in stages)
    notes = [
        *notes,
        *_of_files(asked),
        f"an asynchronous save takes {copied:,} bytes of host memory until it is written",
    ]
    advice: list[Change] = []
    if limit is not None and not any(found.fits for found in stages):
        advice = advise(limit)
    return Plan(
        source,
        numel,
        ranks,
        recipe,
        asked.accumulate,
        asked.no_sync,
        tuple(stages),
        layout,
        None if asked.replicas is None else traffic.replicas(numel, ranks, asked.replicas, recipe),
        None if asked.replicas is None else _slow_link(numel, asked),
        limit,
        tuple(advice),
        tuple(notes),
        asked.offload,
        asked.host_mem,
        asked.disk,
        asked.step_time,
        asked.tokens,
    )


def _slow_link(numel: int, asked: Asked) -> SlowLink | None:
    """Of nodes as large as was said, else as a group of ranks that shards: one replica then has no link between."""
    replicas = asked.replicas or 1
    node = asked.gpus_per_node or asked.ranks // replicas
    if replicas == 1 and asked.gpus_per_node is None:
        return None
    return traffic.slow_link(
        numel, asked.ranks, replicas, STAGES[1], asked.recipe, gpus_per_node=node, accumulate=asked.accumulate,
        no_sync=asked.no_sync,
    )  # fmt: skip


def _of_files(asked: Asked) -> list[str]:
    if asked.offload is None or not any(NVME in asked.offload.tiers(kind) for kind in states.KINDS):
        return []
    said = []
    if NVME in asked.offload.tiers("gradients"):
        said.append("files: gradients that are clipped are read twice more and written once more")
    if asked.disk is None:
        said.append(
            "how long they take on a disk of yours: zeroshard io-bench DIR --out disk.json, then --disk disk.json"
        )
    return said


def _largest(ranks: int, place: Placements, asked: Asked, limit: int | None) -> int | None:
    """The most parameters whose states alone fit the device; None where none of them rest there, or nobody asked."""
    mine = recipes.part(_with_copies(asked.recipe, asked), asked.shares(DEVICE), device=True)
    return None if limit is None or not mine.total else closed.largest(ranks, place, mine, limit)
