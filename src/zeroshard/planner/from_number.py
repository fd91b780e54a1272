"""A plan from a number of parameters: the closed form, tier by tier."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

from ..events import DEVICE, HOST, NVME
from ..layout.limits import STAGING_ROOMS, aligned
from ..layout.partition import BUCKET_MIB, Partition, Spec, partition
from ..layout.stage import Placements
from . import closed, files, instants, recipes, states, traffic, transformer
from .answer import Plan, StagePlan, finish
from .asked import Asked
from .from_shapes import RANKS_LIMIT as LAID_OUT_LIMIT
from .from_shapes import LaidOut, with_activations
from .recipes import Recipe

RANKS_LIMIT = 1 << 20


def plan_params(numel: int, asked: Asked) -> Plan:
    ranks, recipe, copies = asked.ranks, asked.recipe, asked.copies
    group = ranks // copies  # among which a state is cut

    def moved(stage: int, asked: Asked = asked) -> traffic.Traffic:
        backwards, no_sync = asked.accumulate, asked.no_sync
        moves = traffic.per_step(
            numel, ranks, asked.placements(stage), recipe, accumulate=backwards, no_sync=no_sync, replicas=asked.copies
        )
        return traffic.shared(moves) if asked.shared else moves

    units = asked.units or _usual_units(numel, asked)
    cut = None if units is None else _equal_units(numel, asked, units)
    body = transformer.of(numel, units)

    def of(stage: int) -> StagePlan:
        placements, whole = asked.placements(stage), recipes.with_masters(recipe, asked.fractions)
        tiers = _shared_out(numel, group, placements, recipe, asked)
        at_rest = states.together(tiers)
        found = () if cut is None else tuple(_instants(cut, asked, placements))
        peak, peak_at = instants.peak(tiers.get(DEVICE, {}), found) if found else (None, None)
        on_disk = tiers.get(NVME, {})
        rests = recipes.with_masters(recipes.cast_here(recipe, asked.fractions), asked.fractions)
        made = StagePlan(
            stage,
            ranks - 1,
            rests.formula(placements, copies),
            at_rest,
            0.0,
            moved(stage),
            found,
            peak,
            peak_at,
            snapshot=math.ceil(recipe.saved * -(-closed.share(numel, group) // copies)),
            tiers=tiers,
            files=sum(on_disk.values()),
            moves=files.closed_moves(
                on_disk, placements, mastered="master" in whole.optimizer and not recipe.split,
                accumulate=asked.accumulate, no_sync=asked.no_sync, first=copies == 1 or placements.by_part,
            ),
            buckets=-(-math.ceil(numel * recipe.parameters) // int(_bucket_nbytes(numel, asked, units))),
        )  # fmt: skip
        return with_activations(made, asked, body)

    notes = []
    if units is None:
        notes.append("at rest; for peaks give shapes, a job, or --units: into how many equal blocks")
    elif asked.units is None:
        notes.append(f"assumed: {units} equal blocks, the usual depth of so many parameters; --units says another")
    if recipe.per_tensor:
        notes.append("step counters, 4 bytes per parameter tensor and rank, come on top; shapes count them")
    if asked.offload is not None:
        notes.append("tiers approximate: in full buckets, without rounding to pages; shapes and jobs are exact")

    return finish("parameters", numel, asked, None, of, notes, lambda stage: moved(stage, asked.alone))


def _usual_units(numel: int, asked: Asked) -> int | None:
    """Return the usual depth, where an accelerator is asked about and the layout of its ranks can be written down."""
    return transformer.depth(numel) if asked.accelerator and asked.ranks <= LAID_OUT_LIMIT else None


def laid_out(numel: int, asked: Asked) -> LaidOut:
    """Lay out a transformer of so many parameters: as many equal blocks as are asked for, or as are usual."""
    units = asked.units or transformer.depth(numel)
    names = ["root", *(f"units.{number}" for number in range(units))]
    return LaidOut(lambda asked: _equal_specs(numel, asked, units), names, transformer.of(numel, units))


def _bucket_nbytes(numel: int, asked: Asked, units: int | None) -> float:
    """Return the bytes of a bucket's parameters: a unit's, if a bucket is one and their number is known."""
    if asked.by_unit and units is not None:
        return max(math.ceil(-(-numel // units) * asked.recipe.parameters), 1)
    return BUCKET_MIB * 2**20


def _shared_out(numel: int, ranks: int, placements: Placements, recipe: Recipe, asked: Asked) -> states.Tiers:
    """Return {tier: {state: bytes}} by the closed form; a file's buffers hold one message each."""
    fractions = asked.fractions
    tiers = {
        tier: closed.at_rest(numel, ranks, placements, recipes.part(recipe, fractions, tier), asked.copies)
        for tier in fractions
    }
    message = int(_bucket_nbytes(numel, asked, asked.units or _usual_units(numel, asked)) / recipe.parameters)
    buffers = 0
    reserved = closed.reserves(min(message, numel), ranks, asked.copies)
    uncast = replace(recipes.with_masters(recipe, fractions), cast=Fraction())
    for state, itemsize, degree in uncast.states(placements):
        slot = aligned(math.ceil(reserved[degree][0] * itemsize))
        buffers += min(STAGING_ROOMS * slot, aligned(tiers[NVME].get(state, 0)))
    if buffers:
        tiers[HOST][states.STAGING] = buffers
    held = {tier: {state: n for state, n in found.items() if n} for tier, found in tiers.items()}
    return {tier: found for tier, found in held.items() if found}


def _equal_units(numel: int, asked: Asked, units: int) -> Partition:
    """Lay out a model of so many equal units, cut into buckets."""
    return partition(_equal_specs(numel, asked, units), asked.layout, asked.ranks // asked.copies)


def _equal_specs(numel: int, asked: Asked, units: int) -> list[Spec]:
    """Return parameters of so many equal units, each as large as a message at most."""
    itemsize = max(round(asked.recipe.parameters), 1)
    unit = -(-numel // units)
    assert asked.layout.bucket_mib is not None
    message = min(unit, int(asked.layout.bucket_mib * 2**20) // itemsize)
    sizes = [message] * (unit // message) + [unit % message] * (unit % message > 0)
    return [
        Spec(f"units.{number}.{part}", (size,), "element", itemsize, number + 1, True)
        for number in range(units)
        for part, size in enumerate(sizes)
    ]


def _instants(cut: Partition, asked: Asked, placements: Placements) -> list[instants.Instant]:
    names = ["root", *dict.fromkeys(bucket.slots[0].name.rpartition(".")[0] for bucket in cut.buckets)]
    return instants.instants(
        cut, placements, instants.item_sizes(asked.recipe), asked.ranks - 1, prefetch=asked.comm.prefetch,
        accumulate=asked.accumulate, no_sync=asked.no_sync, names=names, resting=asked.resting(cut),
        replicas=asked.copies, shares=asked.shared, in_flight=asked.in_flight, staged=asked.accelerator,
    )  # fmt: skip
