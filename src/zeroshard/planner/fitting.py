"""The ways in which a model fits a machine: a search over what the engine can do, the fastest first.

A *way* is a stage, a tier for each state, or a share of it in each, and what else changes memory but no bits: split
masters, the optimizer in backward, recomputation, activations in a tier, smaller messages. Each way has its bytes by
the plan of the layout, as any question does, and its time by `clock`. Ways are looked at in the order of their time, so
that the first that fits is the fastest. What cannot fit by its states alone is passed over before it is planned.

Numbers are never changed silently. Ways that keep them come first; 16-bit gradients, 8-bit states and 16-bit masters
follow, each by itself. Nothing is tried that `shard` refuses. Imports no torch.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ..errors import UserError
from ..events import DEVICE, HOST, NVME
from ..layout.stage import STAGES, STATES
from ..policies.incompatible import Settings, refuse
from ..policies.offload import Offload
from . import disk, recipes, transformer
from .answer import StagePlan
from .asked import Asked
from .clock import GPUS, Clock, Times
from .from_shapes import LaidOut, with_activations
from .gpus import usable
from .instants import CAST, peak
from .quantities import size
from .question import spelled
from .recipes import Recipe
from .transformer import Body

if TYPE_CHECKING:
    from ..policies.precision import Precision

Words = Mapping[str, str]  # fields of a policy, as Python text
At = Mapping[str, Mapping[str, int]]  # {kind of states: {tier: twentieths of its bytes}}
PARTS = 20  # a state is shared between tiers in so many parts
SHOWN = 3  # of the ways that keep the numbers
QUARTER = PARTS // 4
WORTH = 0.9  # of the time of the numbers before: with more, no others are worth a mention
TRIED = 60  # ways that fit, until some have been found that differ
BF16 = "torch.bfloat16"
PATH = "/a/local/disk"  # where a plan does not ask for the folder of files
WORDS = {DEVICE: "device", HOST: "cpu", NVME: "nvme"}  # tiers as `Offload` takes them


class Numbers(NamedTuple):
    """The formats of a way. heading: what is different about its numbers, "" for those that were asked for.

    precision: fields of `Precision`; None where no `Precision` is known for the recipe. optimizer: the one that the
    program has to use, if that is another than it had.
    """

    heading: str
    recipe: Recipe
    precision: Words | None
    optimizer: str | None = None


class Way(NamedTuple):
    """The settings of `shard` that are tried. at: for each kind of states the parts of it in each tier, of `PARTS`."""

    stage: int
    numbers: Numbers
    at: At
    in_backward: bool = False
    recompute: bool = False
    activations: Literal["device", "cpu", "nvme"] = "device"
    small: bool = False  # are messages a quarter of a unit, and no unit gathered ahead?
    step: Literal["device", "host"] | None = None  # where states that leave are stepped, beside an accelerator

    def share(self, kind: str, tier: str) -> float:
        return self.at[kind].get(tier, 0) / PARTS

    @property
    def fractions(self) -> Mapping[str, Mapping[str, float]]:
        return {kind: {tier: part / PARTS for tier, part in found.items()} for kind, found in self.at.items()}

    @property
    def offload(self) -> Offload | None:
        """The `Offload` of this way; None where everything stays on the device."""
        told = {kind: _where(self.at[kind]) for kind in STATES}
        files = self.activations == "nvme" or any(self.at[kind].get(NVME) for kind in STATES)
        if all(where == "device" for where in told.values()) and self.activations == "device":
            return None
        step = None if self.step == "device" else self.step  # which is the default
        return Offload(**told, step=step, activations=self.activations, path=PATH if files else None)

    def layout(self, unit_nbytes: int) -> Words:
        """Return fields of `Layout`. unit_nbytes: of a unit's parameters, of which small messages are a quarter."""
        told = {"recompute": "True"} if self.recompute else {}
        return told | ({"bucket_mib": f"{quarter(unit_nbytes)}"} if self.small else {})

    @property
    def comm(self) -> Words:
        return {"prefetch": "0"} if self.small else {}

    def asked(self, base: Asked, unit_nbytes: int) -> Asked:
        """Return the question of this way's plan."""
        layout = replace(base.layout, recompute=self.recompute)
        comm = base.comm
        if self.small:
            layout, comm = replace(layout, bucket_mib=float(quarter(unit_nbytes))), replace(comm, prefetch=0)
        recipe = replace(self.numbers.recipe, in_backward=self.in_backward)
        return base._replace(stages=(self.stage,), recipe=recipe, offload=self.offload, layout=layout, comm=comm)

    def __str__(self) -> str:
        return ", ".join([f"stage {self.stage}", *self._elsewhere(), *self._else()])

    def _elsewhere(self) -> Iterator[str]:
        names = {"parameters": "parameters", "gradients": "gradients", "optimizer": "optimizer states"}
        where = {HOST: "host memory", NVME: "files"}
        rests: dict[str, list[str]] = {}
        for kind in ("optimizer", "gradients", "parameters"):
            if kind == "gradients" and self.in_backward:
                continue
            for tier, part in self.at[kind].items():
                if part and tier != DEVICE:
                    share = "" if part == PARTS else f"{100 * part // PARTS} % of "
                    rests.setdefault(where[tier], []).append(f"{share}{names[kind]}")
        if self.activations != "device":
            rests.setdefault(where[{"cpu": HOST, "nvme": NVME}[self.activations]], []).append("activations")
        if not rests:
            yield "all on the device"
        for tier, held in rests.items():
            yield f"{' and '.join(held)} in {tier}"

    def _else(self) -> Iterator[str]:
        if self.step is not None and not self.numbers.recipe.split:  # which steps where it rests
            yield f"the {self.step} steps"
        if self.numbers.recipe.split:
            yield "split masters"
        if self.in_backward:
            yield "the optimizer in backward"
        if self.recompute:
            yield "layers recomputed"
        if self.small:
            yield "small messages"


class Need(NamedTuple):
    """Bytes of one rank: on the device at most, in host memory, and in files."""

    device: int
    host: int
    files: int

    def within(self, most: Need) -> bool:
        return all(mine <= there for mine, there in zip(self, most, strict=True))


@dataclass(frozen=True)
class Fit:
    """A way that was planned. written: bytes that a rank writes to its disk in a day of such steps."""

    way: Way
    need: Need
    times: Times
    plan: StagePlan
    written: int
    unit_nbytes: int

    def json(self) -> dict[str, Any]:
        offload = self.way.offload
        return {
            "way": str(self.way),
            "stage": self.way.stage,
            "numbers": self.way.numbers.heading,
            "optimizer": self.way.numbers.optimizer,
            "precision": self.way.numbers.precision and dict(self.way.numbers.precision),
            "layout": dict(self.way.layout(self.unit_nbytes)),
            "comm": dict(self.way.comm),
            "offload": offload and {
                **{kind: getattr(offload, kind) for kind in STATES}, "step": self.way.step,
                "activations": offload.activations,
            },
            "optimizer_in_backward": self.way.in_backward,
            "need": self.need._asdict(),
            "times": self.times.json(),
            "written_per_day": self.written,
        }  # fmt: skip


class Found(NamedTuple):
    """The answer for one kind of numbers. fits: the fastest of each kind of way, in order. fastest: of all, if it does
    not fit. proof, buys: where none fits, why none can, and what would help."""

    heading: str
    fits: tuple[Fit, ...]
    fastest: Fit | None = None
    proof: str | None = None
    buys: tuple[tuple[str, Fit], ...] = ()

    def json(self) -> dict[str, Any]:
        return {
            "heading": self.heading,
            "fits": [fit.json() for fit in self.fits],
            "fastest": self.fastest and self.fastest.json(),
            "proof": self.proof,
            "buys": [{"what": what, "then": fit.json()} for what, fit in self.buys],
        }


class Fitting(NamedTuple):
    """All answers: of the numbers that were asked for, then of others. most: what there is.

    tokens: at once; None for those of a job's own micro-batch. told: did anybody tell them? Else they are assumed.
    """

    most: Need
    tokens: int | None
    told: bool
    found: tuple[Found, ...]

    @property
    def best(self) -> Fit | None:
        """The fastest way that fits, with the numbers that were asked for if any does."""
        return next((found.fits[0] for found in self.found if found.fits), None)

    def json(self) -> dict[str, Any]:
        return {
            "most": self.most._asdict(),
            "tokens": self.tokens,
            "tokens_told": self.told,
            "found": [found.json() for found in self.found],
        }


def quarter(unit_nbytes: int) -> int:
    """Return MiB of a quarter of a unit's parameters, at least 1."""
    return max(unit_nbytes // 4 >> 20, 1)


def _where(parts: Mapping[str, int]) -> Any:
    """Write where a state rests as `Offload` takes it: a word, or fractions without what stays on the device."""
    rest = {tier: part for tier, part in parts.items() if part}
    if len(rest) == 1:
        return WORDS[next(iter(rest))]
    return {WORDS[tier]: part / PARTS for tier, part in rest.items() if tier != DEVICE}


# -------------------------------------------------------------------------------------------------------------- answer

UNTOLD = 1 << 62  # bytes of host memory of which nobody has told how much there is
HOSTS = tuple(size << 30 for size in (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096))
DISKS = tuple(int(size * 10**12) for size in (0.25, 0.5, 1, 2, 4, 8, 16, 32))


def fitting(base: Asked, numel: int, laid: LaidOut, alike: int | None = None) -> Fitting:
    """Search for the fastest ways that fit what a question tells of a machine, for each kind of numbers.

    alike: tokens that take as many operations as a job's micro-batch, whatever that consists of.
    """
    assert base.gpu_mem is not None
    told = base.tokens_at_once is not None
    if alike is not None:
        base = base._replace(batch=1, seq=alike)
    base = base._replace(
        offload=None, recipe=replace(base.recipe, in_backward=False), layout=replace(base.layout, recompute=False),
        batch=base.batch or transformer.BATCH, seq=base.seq or transformer.SEQ,
    )  # fmt: skip
    most = Need(base.gpu_mem or 0, base.host_mem or UNTOLD, 0 if base.disk is None else base.disk.size or UNTOLD)
    tokens = base.tokens_at_once or 0
    search = Search(Machines(base, numel, laid.body, laid.planned, most, tokens))
    kinds: dict[str, list[Numbers]] = {}
    for numbers in numbers_of(base.recipe, base.precision):
        kinds.setdefault(numbers.heading, []).append(numbers)
    found: list[Found] = []
    for heading, each in kinds.items():
        fits = search.fastest(each, 1 if heading else SHOWN)
        before = min((kind.fits[0].times.middle for kind in found if kind.fits), default=None)
        if fits and before is not None and fits[0].times.middle > WORTH * before:
            continue
        if fits:
            faster = None if heading else _faster(search, each, fits[0])
            found.append(Found(heading, tuple(fits), faster))
        elif not heading:
            found.append(Found(heading, (), None, _proof(search, each), tuple(_bought(search, each))))
    if len(kinds) > 1 and not any(each.fits for each in found):
        every = [*kinds.values()][-1]  # which take least
        found.append(Found(every[0].heading, (), None, _proof(search, every), tuple(_bought(search, every))))
    return Fitting(most, None if alike is not None else tokens, told, tuple(found))


def _faster(search: Search, numbers: list[Numbers], fit: Fit) -> Fit | None:
    """Return the fastest way of all, if it does not fit."""
    (fastest,) = search.with_most(Need(UNTOLD, UNTOLD, search.of.most.files)).fastest(numbers, 1)
    return fastest if fastest.times.middle < fit.times.middle else None


def _proof(search: Search, numbers: list[Numbers]) -> str:
    """Say in a line why no way fits: what cannot be smaller, and by how much it is over."""
    most = search.of.most
    free = search.with_most(Need(UNTOLD, UNTOLD, UNTOLD if most.files else 0))
    needs = [(free.need(way), way) for way in free.least(numbers)]
    device = min(needs, key=lambda found: found[0].device)
    if device[0].device > most.device:
        over = device[0].device - most.device
        return f"the device holds {size(device[0].device)} at least ({device[1]}), {size(over)} more than there is"
    total = min(needs, key=lambda found: sum(found[0]))
    room = most.device + most.host + most.files
    if sum(total[0]) > room:
        over = sum(total[0]) - room
        return (
            f"all that a rank holds is {size(sum(total[0]))} at least ({total[1]}), and there are {size(room)} "
            f"in all: {size(over)} too little"
        )
    nearest = min(search.tried(numbers), key=lambda found: _over(found[0], most))
    need, way = nearest
    where = {"the device": need.device - most.device, "host memory": need.host - most.host}
    where["files"] = need.files - most.files
    short = max(where, key=lambda name: where[name])
    return f"of every way the nearest ({way}) takes {size(where[short])} more of {short} than there is"


def _over(need: Need, most: Need) -> int:
    return sum(max(mine - there, 0) for mine, there in zip(need, most, strict=True))


def _bought(search: Search, numbers: list[Numbers]) -> Iterator[tuple[str, Fit]]:
    """Yield the least host memory, disk and number of cards with which a way fits, each alone."""
    most, base = search.of.most, search.of.base
    needs = [search.need(way) for way in search.with_most(Need(UNTOLD, UNTOLD, UNTOLD)).least(numbers)]
    least = min(map(sum, needs))
    if all(need.device > most.device for need in needs):
        most = most._replace(host=UNTOLD, files=UNTOLD)  # of neither is there too little

    def first(choices: Iterable[tuple[str, Search]]) -> Iterator[tuple[str, Fit]]:
        for what, other in choices:
            if other.could(numbers) and (fits := other.fastest(numbers, 1)):
                yield what, fits[0]
                return

    yield from first(
        (f"{host >> 30} GiB of host memory for each rank", search.with_most(most._replace(host=host)))
        for host in HOSTS
        if host > most.host and most.device + host + most.files >= least
    )
    yield from first(
        (f"a disk of {files / 10**12:g} TB for each rank", search.with_most(most._replace(files=files)))
        for files in DISKS
        if files > most.files and most.device + most.host + files >= least
    )
    if not base.experts:
        yield from first(_with_more(search))


def _with_more(search: Search) -> Iterator[tuple[str, Search]]:
    """Yield the search with one card more in the same host, two more, and so on: its memory has more to share it."""
    most, base = search.of.most, search.of.base
    usual = [count for count in (2, 3, 4, 6, GPUS, 2 * base.ranks) if count > base.ranks]
    for ranks in [count for count in usual if count % base.copies == 0]:
        share = most.host if most.host == UNTOLD else most.host * base.ranks // ranks
        more, count = base._replace(ranks=ranks), ranks - base.ranks
        what = f"{'one more GPU' if count == 1 else f'{count} more GPUs'} in the same host, {ranks} ranks"
        device = most.device if base.gpu is None else usable(base.gpu, ranks, base.gpus_per_node)
        yield what, Search(search.of._replace(base=more, most=most._replace(device=device, host=share)))


# ------------------------------------------------------------------------------------------------------------- numbers


def numbers_of(recipe: Recipe, precision: Precision | None = None) -> list[Numbers]:
    """List the formats to try: those of a recipe, whole and split, and then others, each with what is different.

    precision: what the recipe is of, if a `Precision` was given.
    """
    asked = precision_of(recipe, stored=True)
    if precision is not None:
        plain = type(precision)()
        asked = {name: spelled(value) for name, value in vars(precision).items() if value != getattr(plain, name)}
    found = list(_whole_and_split("", recipe, asked))
    if asked is None or recipe.narrow:
        return found
    adam = {"m": 4, "v": 4}
    wide = recipe.parameters == 4 and recipe.gradients == 4
    if wide and {**recipe.optimizer} == adam:
        recipe = recipes.PRESETS["zeroshard"]
        found += _whole_and_split("bf16 parameters with fp32 masters", recipe, precision_of(recipe))
    if not recipe.cast or recipe.optimizer.get("master") not in (recipes.WHOLE_MASTER, recipes.SPLIT_MASTER):
        return found
    narrow = recipes.with_narrow_gradients(recipe)
    if narrow is not None:
        found += _whole_and_split("16-bit gradients", narrow, precision_of(narrow))
    states = {state: nbytes for state, nbytes in recipe.optimizer.items() if state != "master"}
    if states == adam and not recipe.split:
        eighths = "torchao.optim.AdamW8bit(model.parameters())"
        for heading, each in {
            "8-bit optimizer states": recipe,
            "16-bit gradients, 8-bit optimizer states": narrow,
        }.items():
            if each is not None:
                found.append(Numbers(heading, recipes.with_optimizer(each, "adam-8bit"), precision_of(each), eighths))
    if states == adam:
        pure = recipes.with_optimizer(narrow or recipe, "pure-bf16")
        pure = replace(
            pure, optimizer={state: n for state, n in pure.optimizer.items() if state != "master"}, cast=pure.cast * 0
        )
        found.append(Numbers("everything in bf16, masters too", replace(pure, split=False), precision_of(pure)))
    return found


def _whole_and_split(heading: str, recipe: Recipe, precision: Words | None) -> Iterator[Numbers]:
    yield Numbers(heading, recipe, precision)
    if (
        precision is not None
        and recipe.cast
        and not recipe.split
        and recipe.optimizer.get("master") == recipes.WHOLE_MASTER
    ):
        yield Numbers(heading, recipes.with_split_masters(recipe), {**precision, "split_master": "True"})


def precision_of(recipe: Recipe, *, stored: bool = False) -> Words | None:
    """Return the fields of the `Precision` that holds a recipe; None where this engine has none that does.

    stored: do parameters rest beside masters that could stand for them?
    """
    wide, half = 4, 2
    master = recipe.optimizer.get("master", recipes.Bytes())
    beside = {nbytes for state, nbytes in recipe.optimizer.items() if state != "master"}
    if recipe.in_8_bits is not None or recipe.coded or "fp32_gradients" in recipe.optimizer:
        return None
    if recipe.parameters == wide and recipe.gradients == wide and (not master or beside <= {recipes.Bytes(wide)}):
        return {}  # masters are of parameters that rest elsewhere
    if recipe.parameters != half or recipe.gradients not in (half, wide):
        return None
    told: dict[str, str] = {"param_dtype": BF16}
    if recipe.gradients == half:
        told["grad_dtype"] = BF16
    if master <= half and beside == {recipes.Bytes(half)}:
        told["master_dtype"] = BF16
    elif master not in (wide, recipes.SPLIT_MASTER):
        return None
    if recipe.reduced == wide:
        told["reduce_dtype"] = "torch.float32"
    if stored and master == wide and not recipe.cast:
        told["store_params"] = "True"
    told["cast_inputs"] = "True"
    return told | ({"split_master": "True"} if recipe.split else {})


# ---------------------------------------------------------------------------------------------------------------- ways

D, H, F = DEVICE, HOST, NVME
WHOLE = ({D: PARTS}, {H: PARTS}, {F: PARTS})
QUARTERS = tuple({D: PARTS - at, H: at} for at in range(QUARTER, PARTS, QUARTER))


def frames(base: Asked, numbers: Numbers, *, filed: bool, tell: bool) -> Iterator[tuple[Way, tuple[str, ...]]]:
    """Yield each way without the shares of the optimizer's states, and the tiers that these are shared among.

    filed: may anything rest in files? tell: are activations counted, so that they may move?
    """
    stages = tuple(stage for stage in STAGES if stage or not base.spread(1))
    if base.ranks == base.copies:
        stages = tuple(stage for stage in stages if stage in (0, 3) or 0 not in stages)  # 1 and 2 are 0 on one rank
    eighths = numbers.optimizer is not None
    moves: list[Any] = ["device", *(["cpu", *["nvme"] * filed] if tell else [])]
    for stage, early in itertools.product(stages, (False, True)):
        if early and (base.accumulate > 1 or base.no_sync or eighths):
            continue  # torchao's optimizers step all buckets at once
        for tiers, mix in places(early=early, filed=filed):
            at = tiers["parameters"]
            if base.ranks == base.copies and stage and not (D in mix and D in at):
                continue  # one rank shards nothing: only masters that stand for parameters are another way
            if eighths and (mix != (D,) or D not in at or len(at) > 1):
                continue  # torchao's states rest on the device
            for recompute, away, small, step in itertools.product(
                (False, True), moves, (False, True), steps(base, numbers, mix)
            ):
                yield Way(stage, numbers, tiers, early, recompute, away, small, step), mix


def steps(base: Asked, numbers: Numbers, mix: tuple[str, ...]) -> tuple[Literal["device", "host"] | None, ...]:
    """Return the processors that can step states of these tiers. Split masters are stepped where they rest."""
    if mix == (D,) or not base.accelerator:
        return (None,)
    return ("host",) if numbers.recipe.split else ("device", "host")


def places(*, early: bool, filed: bool) -> Iterator[tuple[At, tuple[str, ...]]]:
    """Yield each choice of tiers, and those that the optimizer's states are shared among, without their shares.

    early: does the optimizer step in backward? filed: may anything rest in files?
    """
    parameters = [*WHOLE[:2], *QUARTERS, *[WHOLE[2]] * filed]
    mixes: list[tuple[str, ...]] = [(D,), (H,), (D, H)]
    mixes += [(F,), (H, F), (D, F), (D, H, F)] * filed
    for at, mix in itertools.product(parameters, mixes):
        for kept in [WHOLE[0]] if early or mix == (D,) else [*WHOLE[:2], *[WHOLE[2]] * filed]:
            yield {"parameters": at, "gradients": kept, "optimizer": dict.fromkeys(mix, 0)}, mix


def allowed(way: Way, base: Asked) -> bool:
    """Tell if `shard` takes these settings together."""
    gradients = "device" if way.at["gradients"].get(DEVICE) == PARTS else "cpu"
    asked = Settings(
        way.stage, base.copies, in_backward=way.in_backward, over=base.comm.optimizer, hosts=base.comm.hosts or 1,
        transport=base.comm.transport, reduce=base.comm.reduce, bounds=base.layout.bounds, recompute=way.recompute,
        split_master=way.numbers.recipe.split, gradients=gradients, activations=way.activations,
        accumulate=base.accumulate, no_sync=base.no_sync,
    )  # fmt: skip
    try:
        refuse(asked)
    except UserError:
        return False
    return True


class Machines(NamedTuple):
    """What is searched: a question, the model laid out for any number of ranks, and what there is.

    tokens: of a micro-batch. counts: are its activations? gpu: by name, for the clock.
    """

    base: Asked
    numel: int
    body: Body
    planned: Callable[..., StagePlan]
    most: Need
    tokens: int

    @property
    def unit_nbytes(self) -> int:
        return int(self.numel // self.body.layers * self.base.recipe.parameters)


class Search:
    """A search of the ways on one machine. What it has planned it keeps, whatever the budget."""

    def __init__(self, of: Machines) -> None:
        self.of = of
        self._plans: dict[tuple[Any, ...], StagePlan] = {}
        self._planned: dict[tuple[Any, ...], Way] = {}
        self._least: dict[tuple[Any, ...], int] = {}
        self._passing: dict[tuple[Any, ...], StagePlan] = {}
        self._clocks: dict[tuple[int, str, bool], Clock] = {}

    def with_most(self, most: Need) -> Search:
        """Return the same search with another budget."""
        other = Search(self.of._replace(most=most))
        other._plans, other._clocks, other._planned = self._plans, self._clocks, self._planned
        other._least, other._passing = self._least, self._passing
        return other

    # --- one way ----------------------------------------------------------------------------------------------------

    def need(self, way: Way) -> Need:
        """Plan a way; return what it takes."""
        asked = way.asked(self.of.base, self.of.unit_nbytes)
        key = (way.stage, way.numbers.recipe.name, _key(way.at), way.in_backward, way.small, way.step)
        if key not in self._plans:
            self._planned[key] = way
            self._plans[key] = self.of.planned(way.stage, asked, bytes_alone=True)
        plan = with_activations(self._plans[key], asked, self.of.body)
        away = plan.tiers.get(HOST, {}).get("activations", 0)
        assert away == 0 or way.activations == "cpu"
        return Need(plan.most, plan.host + plan.pinned, plan.files)

    def clock(self, way: Way) -> Clock:
        key = (way.stage, way.numbers.recipe.name, way.in_backward)
        if key not in self._clocks:
            recipe = replace(way.numbers.recipe, in_backward=way.in_backward)
            asked = self.of.base._replace(recipe=recipe)
            self._clocks[key] = Clock(asked, way.stage, self.of.numel, self.of.base.gpu, self.of.tokens)
        return self._clocks[key]

    def seconds(self, way: Way) -> float:
        """Return the time by which ways are compared."""
        return self.clock(way).middle(self._work(way), prefetch=not way.small)

    def fit(self, way: Way) -> Fit:
        need = self.need(way)
        asked = way.asked(self.of.base, self.of.unit_nbytes)
        plan = with_activations(self.of.planned(way.stage, asked), asked, self.of.body)
        clock, work = self.clock(way), self._work(way)
        times = clock.times(work, prefetch=not way.small)
        written = plan.moves.written + plan.tiers.get(NVME, {}).get("activations", 0) * self.of.base.accumulate
        return Fit(way, need, times, plan, round(written * disk.DAY / times.middle), self.of.unit_nbytes)

    def _work(self, way: Way) -> Any:
        units = self.of.body.layers * (4 if way.small else 1)
        return self.clock(way).work(
            way.fractions, there=way.step == "device", recompute=way.recompute, away=self._away(way), buckets=units
        )

    def _away(self, way: Way) -> Mapping[str, int]:
        if way.activations == "device":
            return {}
        held = self.of.body.held(
            self.of.tokens, itemsize=float(way.numbers.recipe.parameters), recompute=way.recompute, moved=True
        )
        return {HOST if way.activations == "cpu" else NVME: held.away}

    # --- all of them ------------------------------------------------------------------------------------------------

    def fastest(self, numbers: list[Numbers], count: int) -> list[Fit]:
        """Return the fastest ways that fit, of `count` kinds, in order."""
        found: list[tuple[Way, Need]] = []
        for way in itertools.islice(self._in_order(numbers), TRIED if count > 1 else 1):
            need = self.need(way)
            if all(_less(need, other) for _, other in found):
                found.append((way, need))
            if len(found) == count:
                break
        return [self.fit(way) for way, _ in found]

    def ways(self, numbers: list[Numbers]) -> Iterator[tuple[Way, tuple[str, ...]]]:
        """Yield every way that `shard` takes, without the shares of the optimizer's states."""
        filed, taken = self.of.most.files > 0, dict[str, bool]()
        for each in numbers:
            for way, mix in frames(self.of.base, each, filed=filed, tell=True):
                key = (
                    way.stage,
                    way.at["gradients"],
                    way.in_backward,
                    way.recompute,
                    way.activations,
                    each.recipe.split,
                )
                if repr(key) not in taken:
                    taken[repr(key)] = allowed(way, self.of.base)
                if taken[repr(key)]:
                    yield way, mix

    def _in_order(self, numbers: list[Numbers]) -> Iterator[Way]:
        """Yield ways that fit, in the order of their time.

        A way that shares the optimizer's states between tiers begins with as much in the faster ones as its states
        alone allow. If its plan does not fit, a share moves to the slower one, and it waits for its turn again.
        """
        turns: list[tuple[float, int, Way, tuple[str, ...], bool]] = []
        count = itertools.count()

        def wait(way: Way | None, mix: tuple[str, ...], *, fits: bool = False) -> None:
            if way is not None:
                heapq.heappush(turns, (self.seconds(way), next(count), way, mix, fits))

        for way, mix in self.ways(numbers):
            wait(self._shared(way, mix, PARTS), mix)
        while turns:
            _, _, way, mix, fits = heapq.heappop(turns)
            if fits:
                yield way
                continue
            need, here = self.need(way), way.at["optimizer"].get(D, 0)
            if need.within(self.of.most):
                wait(way, mix, fits=True)
                continue
            if D in mix and len(mix) > 1 and here > 1:
                wait(self._shared(way, mix, here - 1), mix)
            if need.device <= self.of.most.device and need.host > self.of.most.host:
                wait(self._lower(way, mix), mix)

    def _lower(self, way: Way, mix: tuple[str, ...]) -> Way | None:
        """Return the way with one part less in host memory and one more in files, where both have some."""
        there = way.at["optimizer"].get(H, 0)
        if not (H in mix and F in mix) or there <= 1:
            return None
        parts = dict(way.at["optimizer"])
        parts[H], parts[F] = there - 1, parts[F] + 1
        return way._replace(at={**way.at, "optimizer": parts})

    def least(self, numbers: list[Numbers]) -> Iterator[Way]:
        """Yield the ways that can take least: all states in one tier, layers recomputed, small messages."""
        for way, mix in self.ways(numbers):
            kinds = STATES[:1] if way.in_backward else STATES[:2]
            whole = len(mix) == 1 and all(way.at[kind] == {mix[0]: PARTS} for kind in kinds)
            if whole and way.recompute and way.small and way.activations != "nvme":
                yield way._replace(at={**way.at, "optimizer": {mix[0]: PARTS}})

    def tried(self, numbers: list[Numbers]) -> Iterator[tuple[Need, Way]]:
        """Yield what every way that has been planned takes, with the layers recomputed."""
        for way in self._planned.values():
            if way.numbers in numbers:
                each = way._replace(recompute=True)
                yield self.need(each), each

    def could(self, numbers: list[Numbers]) -> bool:
        """Tell if the states of any way can fit by their bytes alone."""
        return any(self._shared(way, mix, PARTS, states_alone=True) for way, mix in self.ways(numbers))

    # --- bounds -----------------------------------------------------------------------------------------------------

    def _least_on_device(self, way: Way) -> int:
        """Return what a way holds on the device where no state rests there, which is no more than where one does.

        Weights that units gather are no more than those that rest. Sums that leave are not counted: some may stay. Nor
        are masters that come to be cast: those that rest on the device are counted with its states.
        """
        key = (way.stage, way.numbers.recipe.name, way.in_backward, way.small, way.recompute, way.activations)
        if key not in self._least:
            away = way._replace(at={kind: {H: PARTS} for kind in STATES}, step="host")
            asked = away.asked(self.of.base, self.of.unit_nbytes)._replace(accelerator=False)
            if key[:4] not in self._passing:
                self._passing[key[:4]] = _without_casts(self.of.planned(way.stage, asked, bytes_alone=True))
            least = with_activations(self._passing[key[:4]], asked, self.of.body).most
            self._least[key] = least if way.numbers.optimizer is None else 0  # whose states do not leave the device
        return self._least[key]

    def _part(self, way: Way) -> int:
        """Return the bytes of one part of the optimizer's states, at least."""
        clock = self.clock(way)
        return int(clock.kept * clock.updated / PARTS)

    def _shared(
        self, way: Way, mix: tuple[str, ...], here: int, at_least: int = 1, *, states_alone: bool = False
    ) -> Way | None:
        """Return the way with the optimizer's states shared out: `here` parts on the device, or as many as can fit.

        None where its states do not fit beside the least that passes, or states_alone.
        """
        most, clock, part = self.of.most, self.clock(way), self._part(way)
        kept = 0 if way.in_backward else int(clock.summed * clock.gradients)
        stored = int(clock.width * clock.parameters)
        alone = bool(clock.recipe.cast) and clock.placed.together
        # Buckets are not shared: a share may be less by one of them.
        bucket = self.of.body.layers * (4 if way.small else 1)
        spare = part * PARTS // bucket if len(mix) > 1 else 0
        spare += stored // bucket if len(way.at["parameters"]) > 1 else 0
        passing = 0
        gathered = stored if clock.placed.parameters else 0  # beside what rests

        def device(parts: int) -> float:
            share = way.share("parameters", D)
            cast = min(share, parts / PARTS) if alone else 0.0
            rests = stored * (share - cast) + kept * way.share("gradients", D)
            return max(rests, passing + gathered * (share - cast)) + part * parts - spare

        rest = PARTS
        parts: dict[str, int] = {}
        if device(PARTS if mix == (D,) else int(D in mix)) > most.device:
            return None
        if not states_alone:
            passing = self._least_on_device(way)
        if D in mix:
            most_here = PARTS if mix == (D,) else PARTS - (len(mix) - 1)
            here = min(here, most_here)
            while here >= at_least and device(here) > most.device:
                here -= 1
            if here < at_least or (mix == (D,) and here < PARTS):
                return None
            parts[D], rest = here, PARTS - here
        elif device(0) > most.device:
            return None
        room = most.host + spare - stored * way.share("parameters", H) - kept * way.share("gradients", H)
        if room < 0:
            return None
        if H in mix:
            there = min(rest - (F in mix), int(room // part) if part else rest)
            if there < 1 or (F not in mix and there < rest):
                return None
            parts[H], rest = there, rest - there
        if F in mix:
            parts[F] = rest
        if rest < (F in mix) or (
            stored * way.share("parameters", F) + kept * way.share("gradients", F) + part * parts.get(F, 0)
            > most.files + spare
        ):  # fmt: skip
            return None
        return way._replace(at={**way.at, "optimizer": parts})


def _without_casts(plan: StagePlan) -> StagePlan:
    """Return the plan of states that all rest elsewhere, but for masters that come to the device to be cast there."""
    left = [each._replace(nbytes={**each.nbytes, CAST: 0}) for each in plan.instants]
    return replace(plan, peak=peak(plan.tiers.get(DEVICE, {}), left)[0])


def _less(need: Need, other: Need) -> bool:
    """Tell if a slower way is worth showing beside another: it takes less of something, by a twentieth at least."""
    return any(PARTS * mine < (PARTS - 1) * theirs for mine, theirs in zip(need, other, strict=True))


def _key(at: At) -> tuple[Any, ...]:
    return tuple(tuple(sorted((tier, part) for tier, part in at[kind].items() if part)) for kind in STATES)
