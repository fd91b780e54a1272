"""A plan from the names and shapes in a file: the engine's own layout of them, and the instants of a step."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from ..events import DEVICE, NVME
from ..layout.partition import Partition, Spec, partition, together
from ..layout.stacked import stacked
from ..layout.stage import Degree, Placements
from ..policies.layout import Layout
from ..policies.offload import NAMES
from . import files, formats, instants, recipes, shapes, states, traffic, transformer, units
from .answer import Plan, StagePlan, finish
from .asked import Asked
from .balance import balance
from .recipes import Recipe
from .traffic import Traffic
from .transformer import Body

RANKS_LIMIT = 1 << 13  # a layout writes down every rank's bounds


class LaidOut:
    """A model whose names and shapes are known, laid out as the engine does it: planned as often as is asked.

    body: what its activations depend on.
    """

    def __init__(
        self, specs: Callable[[Asked], list[Spec]], names: Sequence[str], body: Body, several: Any = ()
    ) -> None:
        """specs: of a question. names: of the units. several: numbers of units of several modules."""
        self._specs, self._names, self._several, self.body = specs, names, several, body
        self._made: dict[tuple[Fraction, str], list[Spec]] = {}
        self._cuts: dict[tuple[int, Fraction, str], tuple[Partition, list[states.Owned]]] = {}

    def specs(self, asked: Asked) -> list[Spec]:
        key = (asked.recipe.parameters, _key(asked.layout))
        if key not in self._made:
            self._made[key] = self._specs(asked)
        return self._made[key]

    def cut_among(self, group: int, asked: Asked) -> tuple[Partition, list[states.Owned]]:
        key = (group, asked.recipe.parameters, _key(asked.layout))
        if key not in self._cuts:
            laid_out = partition(self.specs(asked), asked.layout, group, group // asked.ep)
            formats.check_codes(laid_out, asked.recipe)
            self._cuts[key] = laid_out, states.owned(laid_out, asked.along(0, group))
        return self._cuts[key]

    def planned(self, stage: int, asked: Asked, *, bytes_alone: bool = False, rank: int | None = None) -> StagePlan:
        """Plan a stage, without activations. bytes_alone: and without what it moves and what a save copies. rank: whose
        bytes; None is the rank that holds most."""
        ranks, copies, recipe, shares = asked.ranks, asked.copies, asked.recipe, asked.shared
        eighths = _in_8_bits(self.specs(asked))
        cut, owned = self.cut_among(ranks // copies, asked)
        placements = asked.placements(stage)
        if rank is None:
            rank = _fullest(cut, owned, placements, recipe.averaged(eighths), copies)
        resting = asked.resting(cut)
        along = asked.along(rank, ranks)
        there = asked.stepped_there
        holding = states.of_recipe(cut, placements, rank, recipe, resting, replicas=copies, along=along, there=there)
        tiers = holding.tiers(padding_row=True)
        at_rest = states.together(tiers)
        how: dict[str, Any] = {"accumulate": asked.accumulate, "no_sync": asked.no_sync, "replicas": copies}
        how |= {"along": along}
        shown: dict[str, Any] = {"names": self._names, "several": self._several, "resting": resting, "shares": shares}
        shown |= {"prefetch": asked.comm.prefetch, "in_flight": asked.in_flight, "staged": asked.accelerator, **how}
        shown |= {"rooms": instants.rooms_of(holding)}
        sizes = instants.item_sizes(recipe)
        found = instants.instants(cut, placements, sizes, rank, **shown)
        peak, peak_at = instants.peak(tiers.get(DEVICE, {}), found)
        whole = recipes.with_masters(recipes.cast_here(recipe.averaged(eighths), asked.fractions), asked.fractions)
        beside = {} if resting is None else _filed(holding)
        if resting is not None:
            beside["pinned"] = holding.pinned() if asked.accelerator else 0
            beside["pinned"] += instants.most_decoded(
                cut, placements, sizes, holding.seats, resting, there=there, host=True
            )
        moved = traffic.STILL
        if not bytes_alone:
            moved = states.recipe_traffic(cut, placements, rank, recipe, shares=shares, **how)
            beside["snapshot"] = holding.snapshot()
            if resting is not None:
                beside["moves"] = files.recipe_moves(cut, placements, rank, recipe, resting, **how)
        return StagePlan(
            stage, rank, whole.formula(placements, copies), at_rest, 0.0, moved, tuple(found), peak, peak_at,
            tiers=tiers, buckets=len(cut.buckets),
            slots=sum(len(bucket.slots) for bucket in cut.buckets), **beside,
        )  # fmt: skip

    def whole(self, stage: int, asked: Asked) -> StagePlan:
        """Plan a stage with the activations of a micro-batch."""
        return with_activations(self.planned(stage, asked), asked, self.body)


def with_activations(found: StagePlan, asked: Asked, body: Body) -> StagePlan:
    """Return the plan with what a micro-batch keeps, if it is known how many tokens that has."""
    if asked.tokens_at_once is None:
        return found
    held = asked.activations(body)
    away = "device" if asked.offload is None else asked.offload.activations
    tiers, filed = {tier: dict(states) for tier, states in found.tiers.items()}, found.files
    if held.away:
        tier = NAMES[away]
        tiers[tier] = {**tiers.get(tier, {}), "activations": held.away}
        filed += held.away * (tier == NVME)
    return replace(found, activations=held.kept, working=held.device, tiers=tiers, files=filed)


def _key(layout: Layout) -> str:
    """Return what of a layout decides how a model is cut."""
    return repr(replace(layout, recompute=False))


def of_file(path: str | os.PathLike[str]) -> tuple[shapes.Shapes, LaidOut]:
    """Read a model's shapes; return them, and the model laid out."""
    model = shapes.read(path)
    names, several = units.unit_names(model.parameters), units.units_of_several(model.parameters)
    body = transformer.of(model.numel, *units.layers(model.parameters))
    return model, LaidOut(lambda asked: _specs(model, asked, asked.layout), names, body, several)


def plan_shapes(path: str | os.PathLike[str], asked: Asked) -> Plan:
    model, laid = of_file(path)
    recipe, layout = asked.recipe, asked.layout
    specs = laid.specs(asked)
    given, asked = asked, asked._replace(recipe=recipe.averaged(_in_8_bits(specs)))

    def alone(stage: int) -> Traffic:
        cut, owned = laid.cut_among(asked.ranks, given)
        placements = asked.alone.placements(stage)
        rank = states.fullest_rank(owned, placements, asked.recipe)
        return states.recipe_traffic(
            cut, placements, rank, recipe, accumulate=asked.accumulate, no_sync=asked.no_sync, shares=asked.shared
        )

    def of(stage: int) -> StagePlan:
        return laid.whole(stage, given)

    of(max(asked.stages))
    laid_out = laid.cut_among(asked.ranks // asked.copies, given)[0]
    notes = _notes(model, specs, laid_out, asked)
    return finish(model.source, model.numel, asked, layout, of, notes, alone, balance(laid_out, asked.copies))


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
