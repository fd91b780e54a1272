"""A plan from the names and shapes in a file: the engine's own layout of them, and the instants of a step."""

from __future__ import annotations

import os
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from ..events import DEVICE
from ..layout import Layout, Partition, Spec, partition, together
from ..matrices import stacked
from ..stage import Degree, Placements
from . import advice, files, formats, instants, recipes, shapes, states, units
from .advice import Change
from .answer import Plan, StagePlan, finish
from .asked import Asked
from .balance import balance
from .recipes import Recipe
from .traffic import Traffic

RANKS_LIMIT = 1 << 13  # a layout writes down every rank's bounds
ADVISED_RANKS_LIMIT = 1 << 10  # where several are tried


def plan_shapes(path: str | os.PathLike[str], asked: Asked) -> Plan:
    model = shapes.read(path)
    recipe, layout = asked.recipe, asked.layout
    specs = _specs(model, asked, layout)
    eighths = _in_8_bits(specs)
    asked = asked._replace(recipe=recipe.averaged(eighths))
    names, several = units.unit_names(model.parameters), units.units_of_several(model.parameters)

    cuts: dict[int, tuple[Partition, list[states.Owned]]] = {}

    def cut_among(group: int) -> tuple[Partition, list[states.Owned]]:
        if group not in cuts:
            laid_out = partition(specs, layout, group, group // asked.ep)
            formats.check_codes(laid_out, recipe)
            cuts[group] = laid_out, states.owned(laid_out, asked.along(0, group))
        return cuts[group]

    copies, shares = asked.copies, asked.shared

    def alone(stage: int) -> Traffic:
        cut, owned = cut_among(asked.ranks)
        placements = asked.alone.placements(stage)
        rank = states.fullest_rank(owned, placements, asked.recipe)
        return states.recipe_traffic(
            cut, placements, rank, recipe, accumulate=asked.accumulate, no_sync=asked.no_sync, shares=shares
        )

    def planned(stage: int, ranks: int, other: Recipe) -> StagePlan:
        cut, owned = cut_among(ranks // copies)
        placements = asked.placements(stage)
        rank = _fullest(cut, owned, placements, other.averaged(eighths), copies)
        resting = asked.resting(cut)
        along = asked.along(rank, ranks)
        holding = states.of_recipe(cut, placements, rank, other, resting, replicas=copies, along=along)
        tiers = holding.tiers(padding_row=True)
        at_rest = states.together(tiers)
        how: dict[str, Any] = {"accumulate": asked.accumulate, "no_sync": asked.no_sync, "replicas": copies}
        how |= {"along": along}
        moved = states.recipe_traffic(cut, placements, rank, other, shares=shares, **how)
        shown: dict[str, Any] = {"names": names, "several": several, "resting": resting, "shares": shares} | how
        shown |= {"prefetch": asked.comm.prefetch, "in_flight": asked.in_flight}
        found = instants.instants(cut, placements, instants.item_sizes(other), rank, **shown)
        peak, peak_at = instants.peak(tiers.get(DEVICE, {}), found)
        formula = recipes.cast_here(other.averaged(eighths), asked.fractions).formula(placements, copies)
        beside = {} if resting is None else _filed(holding)
        if resting is not None:
            beside["moves"] = files.recipe_moves(cut, placements, rank, other, resting, **how)
        return StagePlan(
            stage, rank, formula, at_rest, 0.0, moved, tuple(found), peak, peak_at,
            snapshot=holding.snapshot(), tiers=tiers, buckets=len(cut.buckets),
            slots=sum(len(bucket.slots) for bucket in cut.buckets), **beside,
        )  # fmt: skip

    def of(stage: int) -> StagePlan:
        return planned(stage, asked.ranks, recipe)

    def nbytes_of(stage: int, ranks: int, other: Recipe) -> int:
        return planned(stage, ranks, other).most

    of(max(asked.stages))
    laid_out = cut_among(asked.ranks // copies)[0]
    notes = _notes(model, specs, laid_out, asked)

    def advise(limit: int) -> list[Change]:
        return advice.changes(max(asked.stages), asked.ranks, recipe, limit, nbytes_of, ADVISED_RANKS_LIMIT, copies)

    return finish(model.source, model.numel, asked, layout, of, advise, notes, alone, balance(laid_out, copies))


def _in_8_bits(specs: Sequence[Spec]) -> Fraction:
    """Return the part of the parameters that rests in 8 bits."""
    return Fraction(sum(spec.numel for spec in specs if spec.fp8), sum(spec.numel for spec in specs))


def _filed(holding: states.Holding) -> dict[str, Any]:
    """Return what a plan says of files and of pinned pages."""
    return {"files": sum(file.nbytes for file in holding.files().values()), "rounding": holding.rounding()}


def _fullest(cut: Partition, owned: list[states.Owned], placements: Placements, recipe: Recipe, replicas: int) -> int:
    """Return the rank of all replicas that holds most; of equals the last, which is in the last replica."""
    if placements.optimizer is Degree.ALL:
        return states.fullest_rank(owned, placements, recipe, states.updated(cut, replicas))
    return cut.ranks * (replicas - 1) + states.fullest_rank(owned, placements, recipe)


def _specs(model: shapes.Shapes, asked: Asked, layout: Layout) -> list[Spec]:
    # Buckets are cut by the parameters' bytes in training, not in the file: whole ones, even if a recipe says 1.5.
    fp8 = formats.named([*model.parameters], model.linear, asked.precision)
    specs = model.specs(max(round(asked.recipe.parameters), 1), asked.experts, asked.ep, fp8)
    parameters = {spec.name: ([spec.name], spec.shape) for spec in specs}
    stacks = stacked(parameters, layout)
    blocks = together(parameters, layout, stacks)
    return [spec._replace(block=blocks.get(spec.name, 1), matrix=stacks.get(spec.name, ())) for spec in specs]


def _notes(model: shapes.Shapes, specs: Sequence[Spec], laid_out: Partition, asked: Asked) -> list[str]:
    padding = sum(bucket.padding for bucket in laid_out.buckets)
    where = "a replica" if asked.copies > 1 else "all ranks"
    notes = [f"padding over {where}: {padding:,} elements"] if padding else []
    if asked.experts:
        local = sum(spec.numel for spec in specs if spec.axis)
        notes += [
            f"experts: {local * asked.ep:,} parameters in {asked.ep} parts, each over {asked.ranks // asked.ep} ranks; "
            "all other parameters over all ranks. Tokens that are sent to them are not counted"
        ]
    notes += [f"{name} is {shared}, counted once" for name, shared in model.ties.items()]
    notes += [f"{name} left out: {why}" for name, why in model.left_out.items()]
    return notes
