"""The engine's own recipe by a `Precision` and `Comm.reduce`, for shapes and for a number of parameters.

shapes          all formats that a job's plan counts, to the byte; 8 bits for the parameters that patterns name, or
                for the weights of linear layers where a config tells which these are
a number        split masters and gradients in 8 bits, as a share of every parameter
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ..errors import UserError, nearest
from ..layout.partition import BLOCK, Partition
from ..policies.comm import Comm
from . import recipes
from .recipes import WHOLE_MASTER, Recipe

if TYPE_CHECKING:
    import torch

    from ..policies.precision import Precision

# Where a recipe has shorter names for states than torch's optimizers: {its name: theirs}.
STATES = {"m": "exp_avg", "v": "exp_avg_sq", "momentum": "momentum_buffer"}
NARROW, WIDE = 2, 4  # bytes of dtypes: with masters of another one, and the widest that recipes have

# Fields of `Precision` that say how many bytes a parameter takes, or that change none; a job's plan counts all.
COUNTED = (
    "param_dtype", "reduce_dtype", "grad_dtype", "store_params", "cast_inputs", "split_master", "fp8", "scaling",
    "states", "rounding",
)  # fmt: skip


def engines(precision: Precision, optimizer: str | None) -> Recipe:
    """Return the bytes per parameter of this engine with a `Precision`. Parameters without `param_dtype` are fp32."""
    import torch

    param = precision.param(torch.float32)
    narrow = param.itemsize == 2
    chosen = recipes.recipe("zeroshard" if narrow else "fp32", optimizer=optimizer)
    name = str(param).removeprefix("torch.") + (f", {optimizer}" if optimizer is not None else "")
    plain = replace(
        chosen, name=f"zeroshard in {name}", says="", parameters=Fraction(param.itemsize),
        gradients=Fraction(precision.grad(param).itemsize), sent=Fraction(precision.reduce(param).itemsize),
        cast=chosen.cast * precision.casts(param),
    )  # fmt: skip
    if (precision.split_master or precision.fp8) and narrow and chosen.optimizer.get("master") != WHOLE_MASTER:
        raise UserError(
            "masters that are split, or rounded to 8 bits, are fp32", got=f"optimizer={optimizer!r}",
            instead='Model(..., optimizer="adamw")',
        )  # fmt: skip
    if precision.narrow_states:
        plain = _with_narrow_states(plain, precision)
    if precision.splits(param):
        plain = recipes.with_split_masters(plain)
    return _in_8_bits(plain, precision) if precision.fp8 else plain


def of_model(
    dtypes: Iterable[torch.dtype],
    kinds: Iterable[str],
    precision: Precision,
    comm: Comm,
    *,
    along: bool,
    who: str,
    instead: str,
) -> Recipe:
    """Return the bytes per parameter of a model's formats and its optimizer's states, as a search takes them.

    dtypes: of trained parameters. kinds: names of the optimizers' classes. along: are parameters divided along an axis?
    Raises `UserError` for a model or optimizers of which no recipe is known. who, instead: of its words, who asks, and
    what else there is.
    """
    told, named = sorted(set(dtypes), key=str), sorted(set(kinds))
    several: dict[str, Sequence[object]] = {"dtypes of parameters": told, "optimizers": named}
    for what, found in several.items():
        if len(found) > 1:
            raise UserError(f"{who} counts {what} of one kind", got=", ".join(map(str, found)), instead=instead)
    if precision.rounds_updates:
        raise UserError(
            f"{who} counts parameters in the dtype in which they are updated",
            got=f"master_dtype={precision.master_dtype}, rounding={precision.rounding!r}", instead=instead,
        )  # fmt: skip
    if precision.narrow_states and precision.keep:
        raise UserError(
            f"{who} counts the states of all parameters in the same formats",
            got=f"keep={precision.keep!r}, and states={dict(precision.states)!r}", instead=instead,
        )  # fmt: skip
    if along:
        raise UserError(f"{who} does not count parameters along an axis", got="Layout(along=...)", instead=instead)
    if told and told[0].itemsize > WIDE and precision.param_dtype is None:
        raise UserError(f"{who} counts parameters of at most 32 bits", got=told[0], instead=instead)
    if told and told[0].itemsize <= NARROW and precision.param_dtype is None:
        precision = replace(precision, param_dtype=told[0])  # which they have by themselves
    try:
        recipe = engines(precision, named[0] if named else None)
    except UserError as error:
        what = f"{who} does not know the states of this optimizer"
        raise UserError(what, got=f"{named[0]}: {error}", instead=instead) from error
    return sent_by(recipe, comm)


def _with_narrow_states(plain: Recipe, precision: Precision) -> Recipe:
    """Give a recipe the states that a `Precision` names in 16 bits."""
    import torch

    from ..policies.precision import OTHERS

    wide = {
        STATES.get(state, state): state
        for state, nbytes in plain.optimizer.items()
        if state != "master" and nbytes == recipes.WIDE_STATE
    }
    if plain.updated != WHOLE_MASTER:
        raise UserError(
            "states rest in 16 bits of parameters that the optimizer updates in float32",
            got=f"{plain.name}, and states={dict(precision.states)!r}", instead="Precision() without states",
        )  # fmt: skip
    for name in precision.states:
        if name not in wide and not (name == OTHERS and wide):
            raise UserError(
                "Precision.states names a state that the optimizer does not keep for each element of a parameter",
                expected=f"one of {sorted(wide)}" if wide else "an optimizer that keeps a state in float32",
                got=repr(name), instead=nearest(name, sorted(wide)) if wide else "Precision() without states",
            )  # fmt: skip
    narrow = (state for name, state in wide.items() if precision.state(name) is not torch.float32)
    return recipes.with_narrow_states(plain, frozenset(narrow))


def _in_8_bits(plain: Recipe, precision: Precision) -> Recipe:
    """Give a recipe that of the buckets whose parameters rest in 8 bits beside fp32 masters."""
    kept = MappingProxyType({"master": WHOLE_MASTER, **plain.optimizer})
    eighths = replace(
        plain, parameters=Fraction(1), optimizer=kept, cast=Fraction(), computed=plain.parameters,
        scaling=precision.scaling,
    )  # fmt: skip
    return replace(plain, name=f"{plain.name}, weights in 8 bits", in_8_bits=eighths, scaling=precision.scaling)


def sent_by(recipe: Recipe, comm: Comm) -> Recipe:
    """Return the recipe with gradients sent as codes of 8 bits, if `Comm.reduce` asks for these."""
    if comm.reduce != "int8":
        return recipe
    eighths = recipe.in_8_bits and replace(recipe.in_8_bits, coded=True)
    return replace(recipe, name=f"{recipe.name}, gradients in 8 bits", coded=True, in_8_bits=eighths)


def check_number(precision: Precision | None) -> None:
    """Refuse 8 bits of some parameters of a number of them."""
    if precision is not None and precision.fp8:
        raise UserError(
            "a number of parameters does not tell which of them are the weights that rest in 8 bits",
            got=f"Precision(fp8={precision.fp8!r})", instead="shapes, or a job",
        )  # fmt: skip


def named(parameters: Sequence[str], linear: Sequence[str] | None, precision: Precision | None) -> set[str]:
    """Return the names of the parameters that rest in 8 bits.

    linear: of the weights of linear layers, without routers; None where only names and shapes are known.
    """
    if precision is None or not precision.fp8:
        return set()
    if precision.fp8 is True:
        if linear is None:
            raise UserError(
                "names and shapes do not tell which parameters are weights of linear layers",
                got="Precision(fp8=True)",
                instead='Precision(fp8=["*.mlp.*.weight"]), with patterns of these; or a config.json, or a job',
            )
        if not linear:
            raise UserError("there is no weight of a linear layer to rest in 8 bits", got="Precision(fp8=True)")
        return set(linear)
    found: set[str] = set()
    for pattern in precision.fp8:
        names = fnmatch.filter(parameters, pattern)
        if not names:
            raise UserError(
                "Precision.fp8 matches no parameter", got=repr(pattern), instead=nearest(pattern, [*parameters][:40])
            )
        found.update(names)
    return found


def check_codes(cut: Partition, recipe: Recipe) -> None:
    """Refuse layouts whose gradients cannot be sent in 8 bits, as `shard` does, if they are to be."""
    for bucket in cut.buckets if recipe.coded else ():
        if bucket.axis or any(bound % BLOCK for bound in bucket.bounds):
            what = "an expert" if bucket.axis else f"a cut that is no multiple of {BLOCK} elements"
            raise UserError(
                "gradients of 8 bits are those of parameters that all ranks shard, cut between blocks",
                where=f"parameter {bucket.slots[0].name!r}", got=what, instead='Comm(reduce="ordered")',
            )  # fmt: skip


def uncounted(precision: Precision | None, *, early: bool) -> Mapping[str, Any]:
    """Return the settings of a `Precision` that only a job's plan counts.

    early: is the optimizer stepped in backward?
    """
    if precision is None:
        return {}
    plain = type(precision)()
    changed = {name: value for name, value in vars(precision).items() if value != getattr(plain, name)}
    if set(changed) == {"grad_dtype"}:  # of which parameters?
        return changed
    joined = {"split_master"} if early else set()  # masters of several buckets may be joined at once
    return {name: value for name, value in changed.items() if name not in COUNTED or name in joined}
