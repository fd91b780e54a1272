"""The closed form: bytes per rank and bytes sent from three numbers and a recipe. Imports neither torch nor a model.

    state         bytes per parameter, one rank holds
    replicated    b * P
    sharded       b * ceil(P / N): one flat vector, padded to a multiple of the ranks N, cut evenly

Rule of padding: every rank reserves ceil(P / N) elements of whatever is sharded, and what no parameter fills lies at
the end, on the last rank. So it is the last rank that is shown, with padding as a row of its own; totals are equal on
all ranks. Which states are sharded is read from `stage.STAGES`.

A *recipe* says how many bytes per parameter each state takes. Texts and tools disagree on it, so it has a name, and
the name is always printed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from types import MappingProxyType
from typing import NamedTuple

from ..errors import UserError, nearest
from ..stage import STAGES, Placements

PADDING = "padding"
Bytes = Fraction  # per parameter; 8-bit optimizers keep scales per block, so it need not be whole


@dataclass(frozen=True)
class Recipe:
    """Bytes per parameter of each state.

    sent: bytes of one gradient element on its way to the reduction (None: the parameters').
    cast: fraction of the parameters that, where they are sharded, are cast from masters and not kept beside them.
    per_tensor: bytes per parameter tensor and rank, whatever its size: step counters. Only a layout knows how many.
    """

    name: str
    parameters: Bytes
    gradients: Bytes
    optimizer: Mapping[str, Bytes]
    sent: Bytes | None = None
    per_tensor: Mapping[str, int] = field(default_factory=dict)
    says: str = ""
    cast: Fraction = Fraction()

    @property
    def total(self) -> Bytes:
        return self.parameters + self.gradients + sum(self.optimizer.values(), Fraction())

    @property
    def reduced(self) -> Bytes:
        """Bytes of one gradient element in a reduction."""
        return self.parameters if self.sent is None else self.sent

    @property
    def updated(self) -> Bytes:
        """Bytes of one element of what the optimizer updates: the master, or the parameter itself."""
        return self.optimizer.get("master", self.parameters)

    @property
    def saved(self) -> Bytes:
        """Bytes of one element in a checkpoint: its value and what the optimizer keeps of it."""
        return self.updated + sum((n for state, n in self.optimizer.items() if state != "master"), Fraction())

    def states(self, place: Placements) -> Iterator[tuple[str, Bytes, bool]]:
        """(state, bytes per parameter, sharded?), in the order they are shown."""
        yield "parameters", self.parameters * (1 - self.cast * place.parameters), place.parameters
        yield "gradients", self.gradients, place.gradients
        for state, nbytes in self.optimizer.items():
            yield state, nbytes, place.optimizer

    def formula(self, place: Placements) -> str:
        """`6 + 12/N`: bytes per parameter and rank."""
        whole, cut = (sum((n for _, n, cut in self.states(place) if cut == of), Fraction()) for of in (False, True))
        return " + ".join(part for part in (number(whole) if whole else "", f"{number(cut)}/N" if cut else "") if part)

    def json(self) -> dict[str, object]:
        states = {"parameters": self.parameters, "gradients": self.gradients, **self.optimizer}
        return {
            "name": self.name,
            "bytes_per_parameter": {state: plain(nbytes) for state, nbytes in states.items()},
            "total": plain(self.total),
            "sent": plain(self.reduced),
            "cast": plain(self.cast),
        }


def _recipe(
    name: str, says: str, *, p: int, g: int, sent: int | None = None, own: bool = False, step: bool = False,
    **optimizer: int | Fraction,
) -> Recipe:  # fmt: skip
    per_tensor = {"step": 4} if step else {}
    kept = MappingProxyType({state: Fraction(nbytes) for state, nbytes in optimizer.items()})
    reduced = None if sent is None else Fraction(sent)
    return Recipe(name, Fraction(p), Fraction(g), kept, reduced, per_tensor, says, Fraction(own))


PRESETS: Mapping[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        _recipe("paper", "16-bit parameters and gradients, fp32 master, m and v", p=2, g=2, master=4, m=4, v=4),
        _recipe("zeroshard", "this engine: bf16 parameters, cast from masters where sharded, fp32 gradients",
                p=2, g=4, sent=2, own=True, step=True, master=4, m=4, v=4),
        _recipe("zeroshard-bf16-grads", "this engine with Precision(grad_dtype=torch.bfloat16)",
                p=2, g=2, sent=2, own=True, step=True, master=4, m=4, v=4),
        _recipe("fp32", "everything in fp32, no master", p=4, g=4, m=4, v=4, step=True),
        _recipe("deepspeed", "its stage-3 estimate: fp32 gradients at the step (its stage 2 adds 2 of 16-bit ones)",
                p=2, g=4, sent=2, master=4, m=4, v=4),
        _recipe("megatron-bf16", "bf16 parameters, fp32 gradients, reduced in fp32", p=2, g=4, sent=4,
                master=4, m=4, v=4),
        _recipe("megatron-fp16", "fp16 parameters and gradients, fp32 gradients beside the optimizer", p=2, g=2,
                fp32_gradients=4, master=4, m=4, v=4),
    )
}  # fmt: skip

# Beside a master of `master` bytes; pure bf16 and the recipes without a master have none.
OPTIMIZERS: Mapping[str, Mapping[str, Bytes]] = {
    "adamw": {"m": Fraction(4), "v": Fraction(4)},
    "sgd": {},
    "sgd-momentum": {"momentum": Fraction(4)},
    "muon": {"momentum": Fraction(4)},
    # One byte per element and one fp32 scale per 256 of them, for each of the two moments.
    "adam-8bit": {"m": Fraction(1), "v": Fraction(1), "scales": Fraction(2 * 4, 256)},
    # The bf16 parameter and one more byte make a 24-bit master; moments of 8 bits, their scales not counted.
    "adamw-24bit-master": {"master": Fraction(1), "m": Fraction(1), "v": Fraction(1)},
    "pure-bf16": {"master": Fraction(0), "m": Fraction(2), "v": Fraction(2)},
}


def recipe(preset: str = "paper", *, optimizer: str | None = None, custom: str | None = None) -> Recipe:
    """A preset, with another optimizer's states if one is named; or the bytes that `custom` lists.

    custom: "parameters=2,gradients=2,master=4,m=4,v=4", numbers or fractions; any other name is optimizer state.
    """
    if preset not in PRESETS:
        raise UserError("no such preset of bytes per parameter", got=repr(preset), instead=nearest(preset, PRESETS))
    if custom is not None:
        if optimizer is not None:
            raise UserError("bytes and optimizer both say what the optimizer keeps", instead="one of the two")
        return _custom(custom)
    chosen = PRESETS[preset]
    if optimizer is None:
        return chosen
    if optimizer not in OPTIMIZERS:
        return _of_torch(chosen, optimizer)
    beside = {key: chosen.optimizer[key] for key in ("fp32_gradients", "master") if key in chosen.optimizer}
    kept = {**beside, **OPTIMIZERS[optimizer]}
    if "master" not in beside:  # what is fp32 already needs none
        kept.pop("master", None)
    kept = {state: nbytes for state, nbytes in kept.items() if nbytes}
    return _keeping(chosen, optimizer, kept)


def _keeping(chosen: Recipe, optimizer: str, kept: Mapping[str, Bytes]) -> Recipe:
    """The recipe with those states; only masters that hold all of a parameter can stand for it."""
    cast = chosen.cast if kept.get("master", 0) > chosen.parameters else Fraction()
    name = f"{chosen.name}, {optimizer}"
    return replace(chosen, name=name, optimizer=MappingProxyType(dict(kept)), cast=cast, says="")


def _of_torch(chosen: Recipe, optimizer: str) -> Recipe:
    """The states of a class of torch.optim, which is asked itself: the one question of a recipe that needs torch."""
    from .states import of_torch

    found = of_torch(optimizer)
    if found is None:
        raise UserError(
            "no such optimizer, neither a preset nor one of torch.optim",
            got=repr(optimizer),
            instead=nearest(optimizer, OPTIMIZERS),
        )
    beside = {key: chosen.optimizer[key] for key in ("fp32_gradients", "master") if key in chosen.optimizer}
    kept = {**beside, **{state: Fraction(nbytes) for state, nbytes in found[0].items()}}
    return replace(_keeping(chosen, optimizer, kept), per_tensor=found[1])


def _custom(text: str) -> Recipe:
    states: dict[str, Bytes] = {}
    for word in text.split(","):
        state, equals, amount = (part.strip() for part in word.partition("="))
        try:
            nbytes = Fraction(amount)
        except (ValueError, ZeroDivisionError):
            nbytes = Fraction(-1)
        if not equals or not state.isidentifier() or nbytes < 0 or state in states or state == PADDING:
            raise UserError(
                "bytes lists state=number once each, in bytes per parameter",
                got=repr(word.strip()),
                instead="parameters=2,gradients=2,master=4,m=4,v=4",
            )
        states[state] = nbytes
    for needed in ("parameters", "gradients"):
        if needed not in states:
            raise UserError(
                f"bytes does not say how many the {needed} take", got=repr(text), instead=f"{needed}=2,{text}"
            )
    parameters, gradients = states.pop("parameters"), states.pop("gradients")
    if not parameters:
        raise UserError("a parameter takes more than no bytes", got=repr(text), instead="parameters=2")
    return Recipe(f"custom ({text})", parameters, gradients, MappingProxyType(states))


def cast_here(recipe: Recipe, shares: Mapping[str, Bytes]) -> Recipe:
    """Off the device a copy is kept beside the masters. shares: what of each state rests on the device.

    Of which buckets both do, only a layout knows: so many at least.
    """
    return replace(recipe, cast=recipe.cast * max(shares["parameters"] + shares["optimizer"] - 1, Fraction()))


def part(recipe: Recipe, shares: Mapping[str, Bytes], *, device: bool) -> Recipe:
    """The bytes of a recipe that rest in one tier. shares: fraction of "parameters", "gradients" and "optimizer"."""
    kept = {state: nbytes * shares["optimizer"] for state, nbytes in recipe.optimizer.items()}
    whole = shares["parameters"]
    return replace(
        recipe,
        cast=cast_here(recipe, shares).cast / whole if device and whole else Fraction(),
        parameters=recipe.parameters * whole,
        gradients=recipe.gradients * shares["gradients"],
        optimizer=MappingProxyType(kept),
    )


# ------------------------------------------------------------------------------------------------------------ at rest


def share(numel: int, ranks: int) -> int:
    """Elements each rank reserves of a vector that is padded to a multiple of the ranks."""
    return -(-numel // ranks)


def at_rest(numel: int, ranks: int, place: Placements, recipe: Recipe) -> dict[str, int]:
    """{state: bytes} of the last rank, which holds the padding. Equal sums on all ranks."""
    reserved = share(numel, ranks)
    own = max(numel - (ranks - 1) * reserved, 0)
    held: dict[str, int] = {}
    padding = 0
    for state, nbytes, sharded in recipe.states(place):
        held[state] = math.ceil((own if sharded else numel) * nbytes)
        padding += math.ceil(reserved * nbytes) - held[state] if sharded else 0
    if padding:
        held[PADDING] = padding
    return held


def total(numel: int, ranks: int, place: Placements, recipe: Recipe) -> int:
    """Bytes that every rank holds at rest."""
    return sum(at_rest(numel, ranks, place, recipe).values())


# ------------------------------------------------------------------------------------------------------------ traffic


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


def traffic(
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


# ---------------------------------------------------------------------------------------------------------- instances


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


# ------------------------------------------------------------------------------------------------------------ answers

UNITS = {
    **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", start=1)},
    **{f"{letter}B": 1000**power for power, letter in enumerate("KMGT", start=1)},
}


def budget(text: str) -> int:
    """`80GiB` -> 85899345920. Units are KiB, MiB, GiB, TiB (powers of 1024) and KB, MB, GB, TB (powers of 1000)."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", str(text))
    amount, unit = match.groups() if match else ("80", "")
    if match and unit in ("", "B"):
        raise UserError(
            "a budget of memory is a number and a unit", got=repr(text),
            instead=f"{float(amount) / 2**30:.6g}GiB" if float(amount) >= 2**20 else f"{amount}GiB, or {amount}GB",
        )  # fmt: skip
    if not match or unit not in UNITS:
        letter = unit[:1].upper()
        letter = letter if letter in "KMGT" and letter else "G"
        meant = [f"{amount}{letter}iB", f"{amount}{letter}B"]
        if len(unit) == 2:
            meant.reverse()
        raise UserError(
            "a budget of memory is a number and a unit",
            got=repr(text),
            instead=f"{meant[0]}, or {meant[1]} ({letter}iB = 1024^{'KMGT'.index(letter) + 1} bytes, "
            f"{letter}B = 1000^{'KMGT'.index(letter) + 1})",
        )
    nbytes = int(Fraction(amount) * UNITS[unit])
    if nbytes < 1:
        raise UserError("a budget of memory must be at least one byte", got=repr(text), instead="80GiB")
    return nbytes


def count(text: str | float, name: str = "params") -> int:
    """A number of parameters: `7e9`, `6738415616`, 7_000_000. Raises `UserError` unless positive and whole."""
    try:
        amount = Decimal(str(text).strip())
    except InvalidOperation:
        amount = Decimal("NaN")
    # A limit far beyond any model: `1e999999999` would otherwise be written out digit by digit.
    if not amount.is_finite() or not 0 < amount < Decimal("1e24") or amount != amount.to_integral_value():
        raise UserError(f"{name} must be a positive whole number", got=repr(text), instead=_meant(str(text)))
    return int(amount)


def _meant(text: str) -> str:
    match = re.fullmatch(r"\s*([0-9.]*[0-9])\s*([kKmMbBgGtT])\w*\s*", text)
    powers = {"k": 3, "m": 6, "b": 9, "g": 9, "t": 12}
    return f"{match[1]}e{powers[match[2].lower()]}" if match else "7e9"


def largest(ranks: int, place: Placements, recipe: Recipe, limit: int) -> int:
    """The most parameters whose states fit into `limit` bytes per rank at rest (0: none)."""
    each = sum(nbytes for _, nbytes, _ in recipe.states(place))
    if not each:
        return 0
    low, high = 0, math.ceil(limit * ranks / each) + ranks
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if total(middle, ranks, place, recipe) <= limit else (low, middle - 1)
    return low


class Change(NamedTuple):
    """One thing to do differently, and the bytes per rank it would lead to."""

    what: str
    nbytes: int
    fits: bool

    def json(self) -> dict[str, object]:
        return self._asdict()


Total = Callable[[int, int, Recipe], int]  # (stage, ranks, recipe) -> bytes per rank


def advice(stage: int, ranks: int, recipe: Recipe, limit: int, nbytes_of: Total, most_ranks: int) -> list[Change]:
    """What would make it fit, cheapest first: a higher stage, 16-bit gradients, more ranks; all of them if none does.

    More ranks means the smallest power of two that fits, up to `most_ranks`.
    """
    changes = [
        _change(f"stage {higher}", nbytes_of(higher, ranks, recipe), limit) for higher in STAGES if higher > stage
    ]
    thin = _thin(recipe)
    if thin is not None:
        changes.append(_change("bf16 gradients", nbytes_of(stage, ranks, thin), limit))
    changes += _more_ranks(stage, ranks, recipe, limit, nbytes_of, most_ranks, "")
    if any(change.fits for change in changes):
        return changes
    last, words = max(STAGES), []
    if last != stage:
        words.append(f"stage {last}")
    if thin is not None:
        words.append("bf16 gradients")
    if words:
        both = " and ".join(words)
        if len(words) > 1:  # one alone has been tried
            changes.append(_change(both, nbytes_of(last, ranks, thin or recipe), limit))
        if not changes[-1].fits:
            changes += _more_ranks(last, ranks, thin or recipe, limit, nbytes_of, most_ranks, f"{both} and ")
    return changes


def _change(what: str, nbytes: int, limit: int) -> Change:
    return Change(what, nbytes, nbytes <= limit)


def _thin(recipe: Recipe) -> Recipe | None:
    """The recipe with gradients added up in the parameters' 16 bits, where they are wider."""
    if not recipe.parameters == 2 < recipe.gradients:
        return None
    return replace(recipe, name=f"{recipe.name}, bf16 gradients", gradients=recipe.parameters)


def _more_ranks(
    stage: int, ranks: int, recipe: Recipe, limit: int, nbytes_of: Total, most_ranks: int, before: str
) -> list[Change]:
    more = 1 << ranks.bit_length()
    while more <= most_ranks:
        change = _change(f"{before}{more} ranks", nbytes_of(stage, more, recipe), limit)
        if change.fits:
            return [change]
        more *= 2
    return []


# -------------------------------------------------------------------------------------------------------------- shown


def plain(value: Fraction | int) -> int | float:
    """For JSON: an integer where it is one."""
    return int(value) if value == int(value) else float(value)


def number(value: Fraction | int) -> str:
    """`12`, `4.1875`: exact where six decimals are enough for that, else six digits."""
    for decimals in range(7):
        if (value * 10**decimals).denominator == 1:
            return f"{float(value):.{decimals}f}"
    return f"{float(value):.6g}"
