"""Bytes per parameter of each state: *recipes*.

Texts and tools disagree on how many bytes a parameter takes, so a recipe has a name, and the name is always printed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from types import MappingProxyType
from typing import NamedTuple

from ..errors import UserError, nearest
from ..events import DEVICE
from ..layout.partition import BucketPlan
from ..layout.stage import STAGES, Degree, Placements
from ..layout.states import SPLIT_BITS, Formats, Master, masters
from .quantities import number, plain

PADDING = "padding"
Fractions = Mapping[str, Mapping[str, Fraction]]  # {tier: {"parameters", "gradients", "optimizer": the fraction there}}
CODED = Fraction(132, 128)  # bytes of an element that is sent in 8 bits: codes, and a scale for each 128
SPLIT_MASTER, WHOLE_MASTER = Fraction(SPLIT_BITS, 8), Fraction(4)
NARROW_STATE, WIDE_STATE = Fraction(2), Fraction(4)  # of an optimizer's state, per element
Bytes = Fraction  # per parameter; 8-bit optimizers keep scales per block, so it need not be whole


@dataclass(frozen=True)
class Recipe:
    """Bytes per parameter of each state.

    sent: bytes of one gradient element on its way to the reduction (None: the parameters').
    cast: fraction of the parameters that, where they are sharded, are cast from masters and not kept beside them.
    in_backward: is each bucket stepped in backward? Then gradients take their bytes in passing, and rest nowhere.
    split: do masters rest as the bits that parameters lack, wherever these rest beside them?
    coded: are gradients sent as codes of 8 bits?
    computed: bytes of one element as modules compute with it (None: the parameters').
    in_8_bits, scaling: of buckets whose parameters rest in 8 bits, the recipe, and how large a tile of one scale is.
    per_tensor: bytes per parameter tensor and rank, whatever its size: step counters. Only a layout knows how many.
    narrow: the optimizer's states that rest in 16 bits, and are fp32 while a bucket is stepped.
    padded: do the optimizer's states rest with their buckets' padding, since some of a bucket is decoded for a step?
    """

    name: str
    parameters: Bytes
    gradients: Bytes
    optimizer: Mapping[str, Bytes]
    sent: Bytes | None = None
    per_tensor: Mapping[str, int] = field(default_factory=dict)
    says: str = ""
    cast: Fraction = Fraction()
    in_backward: bool = False
    split: bool = False
    coded: bool = False
    computed: Bytes | None = None
    in_8_bits: Recipe | None = None
    scaling: str = "tensor"
    narrow: frozenset[str] = frozenset()
    padded: bool = False

    def of(self, bucket: BucketPlan) -> Recipe:
        """Return the recipe of a bucket."""
        return self.in_8_bits if bucket.fp8 and self.in_8_bits is not None else self

    def averaged(self, part: Fraction) -> Recipe:
        """Return the mean of both recipes where this part of the parameters rests in 8 bits."""
        other = self.in_8_bits
        if other is None or not part:
            return self

        def mean(mine: Bytes, theirs: Bytes) -> Bytes:
            return mine * (1 - part) + theirs * part

        states = {**self.optimizer, **other.optimizer}
        kept = {each: mean(self.optimizer.get(each, Bytes()), other.optimizer.get(each, Bytes())) for each in states}
        parameters = mean(self.parameters, other.parameters)
        return replace(
            self, parameters=parameters, gradients=mean(self.gradients, other.gradients),
            sent=mean(self.reduced, other.reduced), optimizer=MappingProxyType(kept), in_8_bits=None,
            cast=mean(self.parameters * self.cast, other.parameters * other.cast) / parameters,
        )  # fmt: skip

    @property
    def message(self) -> Bytes:
        """Bytes of one gradient element on its way: of codes and their scales, or as it is reduced."""
        return CODED if self.coded else self.reduced

    @property
    def kept_gradients(self) -> Bytes:
        """Bytes of one element of a gradient at rest."""
        return self.gradients * (not self.in_backward)

    @property
    def total(self) -> Bytes:
        return self.parameters + self.kept_gradients + sum(self.optimizer.values(), Fraction())

    @property
    def reduced(self) -> Bytes:
        """Bytes of one gradient element in a reduction."""
        return self.parameters if self.sent is None else self.sent

    @property
    def updated(self) -> Bytes:
        """Bytes of one element of what the optimizer updates: the master, or the parameter itself."""
        return WHOLE_MASTER if self.split else self.optimizer.get("master", self.parameters)

    @property
    def decoded(self) -> Bytes:
        """Bytes per element that narrow states take beside their own while a bucket is stepped."""
        return WIDE_STATE * len(self.narrow)

    @property
    def saved(self) -> Bytes:
        """Bytes of one element in a checkpoint: its value and what the optimizer keeps of it."""
        return self.updated + sum((n for state, n in self.optimizer.items() if state != "master"), Fraction())

    def states(self, placements: Placements) -> Iterator[tuple[str, Bytes, Degree]]:
        """Yield (state, bytes per parameter, over which ranks it is sharded), in the order they are shown."""
        yield "parameters", self.parameters * (1 - self.cast * placements.together), placements.parameters
        yield "gradients", self.kept_gradients, placements.gradients
        for state, nbytes in self.optimizer.items():
            yield state, nbytes * (self._whole(placements) if state == "master" else 1), placements.optimizer

    def _whole(self, placements: Placements) -> Fraction:
        """Return how much larger masters are than by the recipe: split ones are whole where they rest alone."""
        return 1 + self.split * self.cast * placements.together * (WHOLE_MASTER / SPLIT_MASTER - 1)

    def formula(self, placements: Placements, replicas: int = 1) -> str:
        """Write bytes per parameter and rank: `6 + 12/N`; with K replicas of N/K ranks, `6 + 12*K/N`."""
        each: dict[Degree, Bytes] = {}
        for _, nbytes, degree in self.states(placements):
            each[degree] = each.get(degree, Fraction()) + nbytes
        over = {Degree.RANK: "", Degree.TEAM: "/N" if replicas == 1 else f"*{replicas}/N", Degree.ALL: "/N"}
        return " + ".join(f"{number(each[degree])}{over[degree]}" for degree in over if each.get(degree))

    def json(self) -> dict[str, object]:
        states = {"parameters": self.parameters, "gradients": self.kept_gradients, **self.optimizer}
        return {
            "name": self.name,
            "bytes_per_parameter": {state: plain(nbytes) for state, nbytes in states.items()},
            "total": plain(self.total),
            "sent": plain(self.message),
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


SAME_AS: Mapping[str, tuple[str, str]] = {  # by what a user asks for: the preset that has these bytes, and why
    "trainer-bf16": ("fp32", "bf16=True of a Trainer: autocast, over weights, gradients and moments in fp32"),
}


def recipe(preset: str = "zeroshard", *, optimizer: str | None = None, custom: str | None = None) -> Recipe:
    """Return a preset, with another optimizer's states if one is named; or the bytes that `custom` lists.

    custom: "parameters=2,gradients=2,master=4,m=4,v=4", numbers or fractions; any other name is optimizer state.
    """
    if preset not in PRESETS and preset not in SAME_AS:
        names = [*PRESETS, *SAME_AS]
        raise UserError("no such preset of bytes per parameter", got=repr(preset), instead=nearest(preset, names))
    if custom is not None:
        if optimizer is not None:
            raise UserError(
                "Model.bytes and Model.optimizer both say what the optimizer keeps", instead="one of the two"
            )
        return _custom(custom)
    same, says = SAME_AS.get(preset, (preset, ""))
    chosen = replace(PRESETS[same], name=preset, says=says) if says else PRESETS[same]
    if optimizer is None:
        return chosen
    if optimizer not in OPTIMIZERS:
        return _of_torch(chosen, optimizer)
    beside = {key: chosen.optimizer[key] for key in ("fp32_gradients", "master") if key in chosen.optimizer}
    kept = {**beside, **OPTIMIZERS[optimizer]}
    if "master" not in beside:  # fp32 parameters need none
        kept.pop("master", None)
    kept = {state: nbytes for state, nbytes in kept.items() if nbytes}
    return _keeping(chosen, optimizer, kept)


def with_narrow_gradients(recipe: Recipe) -> Recipe | None:
    """Return the recipe with gradients added up in the parameters' 16 bits; None where they are no wider."""
    if not recipe.parameters == 2 < recipe.gradients:
        return None
    eighths = recipe.in_8_bits and replace(recipe.in_8_bits, gradients=recipe.parameters)
    name = f"{recipe.name}, bf16 gradients"
    return replace(recipe, name=name, gradients=recipe.parameters, in_8_bits=eighths)


def with_split_masters(recipe: Recipe) -> Recipe:
    """Return the recipe with the bits that parameters lack in place of whole masters."""
    kept = MappingProxyType({**recipe.optimizer, "master": SPLIT_MASTER})
    return replace(recipe, name=f"{recipe.name}, split masters", optimizer=kept, split=True)


def with_narrow_states(recipe: Recipe, narrow: frozenset[str]) -> Recipe:
    """Return the recipe with these of the optimizer's states in 16 bits."""
    kept = {state: NARROW_STATE if state in narrow else nbytes for state, nbytes in recipe.optimizer.items()}
    name = f"{recipe.name}, optimizer states in 16 bits"
    return replace(recipe, name=name, optimizer=MappingProxyType(kept), narrow=narrow, padded=bool(narrow))


def with_optimizer(recipe: Recipe, optimizer: str) -> Recipe:
    """Return the recipe with the states of one of `OPTIMIZERS`."""
    beside = {"master": recipe.optimizer["master"]} if "master" in recipe.optimizer else {}
    kept = {**beside, **OPTIMIZERS[optimizer]}
    return _keeping(recipe, optimizer, {state: nbytes for state, nbytes in kept.items() if nbytes})


def _keeping(chosen: Recipe, optimizer: str, kept: Mapping[str, Bytes]) -> Recipe:
    """Return the recipe with those states; only masters wider than the parameters can stand for them."""
    cast = chosen.cast if kept.get("master", 0) > chosen.parameters else Fraction()
    name = f"{chosen.name}, {optimizer}"
    return replace(chosen, name=name, optimizer=MappingProxyType(dict(kept)), cast=cast, says="")


def _of_torch(chosen: Recipe, optimizer: str) -> Recipe:
    """Return the recipe with the states of a torch.optim class, found by a step: only this needs torch."""
    from .optimizers import of_torch

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
                f"Model.bytes does not say how many the {needed} take", got=repr(text), instead=f"{needed}=2,{text}"
            )
    parameters, gradients = states.pop("parameters"), states.pop("gradients")
    if not parameters:
        raise UserError("a parameter takes more than no bytes", got=repr(text), instead="parameters=2")
    return Recipe(f"custom ({text})", parameters, gradients, MappingProxyType(states))


class Width(NamedTuple):
    """The format of a state of which only its bytes per element are known."""

    state: str
    itemsize: Bytes | int


def exact(nbytes: Bytes | int) -> Bytes | int:
    """Return whole numbers as such, with which arithmetic is many times as fast."""
    return int(nbytes) if nbytes == int(nbytes) else nbytes


def formats(recipe: Recipe) -> Formats[Width]:
    """Return the formats of a bucket's states by a recipe."""
    parameters = Width("parameters", exact(recipe.parameters))
    computed = parameters if recipe.computed is None else Width("computed", exact(recipe.computed))
    master = Width("master", exact(recipe.updated)) if recipe.optimizer.get("master") else parameters
    gradients = Width("gradients", exact(recipe.gradients))
    return Formats(computed, parameters, gradients, master, bool(recipe.cast), recipe.split)


def _where(recipe: Recipe, how: Master) -> list[tuple[str, str]]:
    """List (tier of parameters, tier of the optimizer) where masters rest so on a GPU, if parameters are sharded."""
    return [tiers for tiers, master in masters(formats(recipe), STAGES[3]).items() if master is how]


def cast_here(recipe: Recipe, fractions: Fractions) -> Recipe:
    """Lower `cast` to the parameters of which only masters rest: elsewhere a copy is kept beside these.

    Only a layout knows which buckets have both in the tiers that this takes: this is the least that can.
    """
    alone = (
        max(fractions[here]["parameters"] + fractions[there]["optimizer"] - 1, Fraction())
        for here, there in _where(recipe, Master.ALONE)
    )
    return replace(recipe, cast=recipe.cast * sum(alone))


def with_masters(recipe: Recipe, fractions: Fractions) -> Recipe:
    """Give a recipe without masters those of parameters that are updated in another memory than they rest in."""
    if "master" in recipe.optimizer:
        return recipe
    beside = sum(
        fractions[here]["parameters"] * fractions[there]["optimizer"] for here, there in _where(recipe, Master.BESIDE)
    )
    return replace(recipe, optimizer={"master": recipe.parameters * beside, **recipe.optimizer}) if beside else recipe


def part(recipe: Recipe, fractions: Fractions, tier: str) -> Recipe:
    """Return the recipe of what rests in a tier."""
    whole, mine = with_masters(recipe, fractions), fractions[tier]
    kept = {state: nbytes * mine["optimizer"] for state, nbytes in whole.optimizer.items()}
    here = mine["parameters"]
    return replace(
        whole,
        cast=cast_here(whole, fractions).cast / here if here and tier == DEVICE else Fraction(),
        parameters=whole.parameters * here,
        gradients=whole.gradients * mine["gradients"],
        optimizer=MappingProxyType(kept),
    )
