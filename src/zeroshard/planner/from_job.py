"""A plan of the user's own job: the engine's layout, its simulated ledger, and what forward keeps for backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

from ..events import DEVICE, HOST
from ..layout.stage import STAGES, Degree
from ..layout.states import Master, master_of
from . import built, optimizers, recipes, states, traffic
from .answer import Plan, StagePlan, finish
from .asked import Asked
from .balance import balance
from .files import Moves
from .instants import Instant
from .simulate import RECORDED, Simulation, moments, simulate


def runner(job: str | Callable[[], dict[str, Any]], asked: Asked) -> Callable[..., Simulation]:
    """Return what simulates the job at a stage, as (stage, rank, **other settings of `simulate`). A rank of None is the
    one that holds most."""

    def run(stage: int, rank: int | None, **changes: Any) -> Simulation:
        settings: dict[str, Any] = {
            "ranks": asked.ranks,
            "accumulate": asked.accumulate,
            "no_sync": asked.no_sync,
            "layout": asked.layout,
            "precision": asked.precision,
            "comm": asked.talk(stage),
            "offload": asked.offload,
            "optimizer_in_backward": asked.recipe.in_backward,
        } | changes
        settings["mesh"] = asked.axes(settings["ranks"])
        simulated = simulate(job, stage=stage, rank=rank or 0, **settings)
        fullest = _fullest(simulated)
        return simulated if rank is not None or fullest == 0 else run(stage, fullest, **changes)

    return run


def plan_job(job: str | Callable[[], dict[str, Any]], asked: Asked) -> Plan:
    """Simulate the job at every stage asked for, as the rank that holds most there."""
    layout, run = asked.layout, runner(job, asked)
    least = min(asked.stages) if asked.once else min(STAGES)
    runs = {stage: run(stage, None) for stage in dict.fromkeys((least, *asked.stages))}
    recipe = _recipe(runs[least])
    one = runs[asked.stages[0]]
    kept, again = (
        one if layout.recompute is each else run(one.stage, one.rank, layout=replace(layout, recompute=each))
        for each in (False, True)
    )
    notes = [
        f"activations kept for backward: {kept.activations:,} bytes as the job is, "
        f"{again.activations:,} with every unit recomputed",
        "what operators take while they run, and the optimizer inside its step, comes on top: measured, not planned",
    ]
    if one.zero._engine.group.team.shares:
        notes.append('as ranks of one host, which share memory; elsewhere: Comm(transport="gloo")')
    masters = {bucket.masters for stage in asked.stages for bucket in runs[stage].zero._engine.buckets}
    if asked.precision and asked.precision.split_master and Master.ALONE in masters:
        notes.append("stage 3: masters alone rest of sharded parameters on the device, and nothing is split there")
    if asked.offload is not None and one.zero._engine.device.type == "cpu":
        rooms = max(sum(built.holding(each.zero, beside=True).rooms().values()) for each in runs.values())
        notes.append(
            "as on a CPU: a GPU pins host memory in whole pages, and fp32 weights updated elsewhere have masters"
            + (f"; states that it steps pass through up to {rooms:,} bytes of its own memory" if rooms else "")
        )
    return finish(
        one.job,
        sum(param.numel() for param in one.zero.model.parameters()),
        asked._replace(recipe=recipe),
        one.zero._engine.layout,
        lambda stage: _stage(runs[stage], _recipe(runs[stage])),
        notes,
        balance=balance(runs[max(asked.stages)].zero.partition, asked.copies),
        job=True,
    )


def _fullest(run: Simulation) -> int:
    """Return the rank that holds most at rest; of equals the first, which is in the first replica."""
    if run.ranks == 1:
        return 0
    recipe, placements, cut = _recipe(run), run.zero.placements, run.zero.partition
    owned = states.owned(cut, run.zero._engine.group.axis_team.seat)
    parts = states.updated(cut, built.rows(run.zero)) if placements.optimizer is Degree.ALL else None
    fullest = states.fullest_rank(owned, placements, recipe, parts)
    same = owned[0] == owned[fullest % len(owned)] and (parts is None or parts[0] == parts[fullest])
    return 0 if same else fullest


def _recipe(run: Simulation) -> recipes.Recipe:
    """Average the bytes of the job's states over its parameters. Frozen ones have no gradients and optimizer states."""
    zero = run.zero
    buckets = zero.partition.buckets
    numel = {bucket.index: bucket.numel - bucket.padding for bucket in buckets}
    total = sum(numel.values()) or 1
    sums: dict[str, Fraction] = {}

    def add(state: str, nbytes: Fraction | int) -> None:
        sums[state] = sums.get(state, Fraction()) + nbytes

    cast, alone = 0, STAGES[max(STAGES)]  # where masters rest alone, if anywhere
    resting, one_memory = built.holding(zero).resting, zero._engine.device.type == "cpu"
    for bucket, at in zip(buckets, zero._engine.resting, strict=True):
        formats, _, rows = resting(bucket)
        each = {row.state: row.itemsize for row in rows}
        add("parameters", numel[bucket.index] * formats.parameters.itemsize)
        if bucket.trainable:
            add("gradients", numel[bucket.index] * formats.gradients.itemsize)
            if formats.master != formats.parameters:
                add("master", numel[bucket.index] * each["master"])
            if master_of(formats, alone, at, one_memory=one_memory) is Master.ALONE:
                cast += numel[bucket.index] * formats.computed.itemsize
    per_tensor: dict[str, int] = {}
    padded = False
    for optimizer, group, places in zero._engine.optimizer_members():
        for bucket, slot in places:
            if bucket.trainable:
                shape = optimizers.asked_with(optimizer, slot.shape)
                precision = zero._engine.precision.of_bucket(bucket)
                master = zero._engine.formats(bucket).master
                stepped = precision.stepped(master)
                found = optimizers.probe(optimizer, group, stepped, shape)
                for state, asked in found.items():
                    nbytes, grows = asked.at_rest(precision.state(state)).kept(slot.shape)
                    if grows:
                        add(state, -(-slot.numel // grows) * nbytes)
                        padded |= precision.decodes(master)
                    elif asked.sides:
                        add(state, nbytes)
                    else:
                        per_tensor[state] = nbytes
    share = Fraction(cast, sums["parameters"] or 1) if cast else Fraction()
    parameters, gradients = (Fraction(sums.pop(state, 0), total) for state in ("parameters", "gradients"))
    optimizer_states = {state: Fraction(nbytes, total) for state, nbytes in sums.items()}
    early = zero._engine.asked.in_backward
    kept = parameters, gradients, optimizer_states
    return recipes.Recipe("the job's own", *kept, None, per_tensor, cast=share, in_backward=early, padded=padded)


def _stage(run: Simulation, recipe: recipes.Recipe) -> StagePlan:
    placements = run.zero.placements
    holding = built.holding(run.zero)
    tiers = holding.tiers()
    at_rest = states.together(tiers)
    elsewhere = sum(sum(held.values()) for tier, held in tiers.items() if tier != DEVICE)
    found = [
        Instant(
            name, {state: held[state] - at_rest.get(state, 0) for state in held if held[state] > at_rest.get(state, 0)}
        )
        for name, held in moments(run)
    ]
    peak_at, peak = max(
        ((phase, most.total) for phase, most in run.ledger.phases.items() if phase != "between"),
        key=lambda item: item[1],
    )
    named = max(moments(run), key=lambda moment: sum(moment[1].values()))
    if sum(named[1].values()) - elsewhere == peak:
        peak_at = named[0]
    last = [event for event in run.events if event.verb == "step"][-1 - run.steps].end
    moves = (sum(e.logical for e in run.events if e.verb == verb and e.start > last) for verb in ("read", "write"))
    formula = recipe.formula(placements, built.rows(run.zero))
    for tier, nbytes in run.away.items():  # as forward ends
        if buffers := run.ledger.tiers.get(HOST, {}).get("staged activations", 0):  # those of their file
            host = tiers.get(HOST, {})
            tiers[HOST] = {**host, "staging": host.get("staging", 0) + buffers}
        tiers[tier] = {**tiers.get(tier, {}), "activations": nbytes}
    away: Any = run.zero._engine.tiers.get("activations")
    return StagePlan(
        run.stage, run.rank, formula, at_rest, 0.0, _traffic(run), tuple(found), peak, peak_at,
        activations=run.activations, working=run.working,
        snapshot=holding.snapshot(), tiers=tiers, moves=Moves(*moves),
        files=sum(file.nbytes for file in holding.files().values()) + (away.nbytes if away else 0),
        buckets=len(run.zero.partition.buckets),
        slots=sum(len(bucket.slots) for bucket in run.zero.partition.buckets),
    )  # fmt: skip


def _traffic(run: Simulation) -> traffic.Traffic:
    moved = {verb: [e for e in run.events if e.verb == verb and e.logical] for verb in ("reduce", "gather", "share")}
    reduced, gathered, shared = (
        traffic.Moved(
            *(
                sum(column) // RECORDED
                for column in zip(*((e.logical, e.sent, e.sent + e.received) for e in events), strict=True)
            )
        )
        if events
        else traffic.NOTHING
        for events in moved.values()
    )
    model = sum(
        bucket.numel * run.zero._engine.formats(bucket).parameters.itemsize for bucket in run.zero.partition.buckets
    )
    passes = round(gathered.logical / model, 2) if model else 0.0
    codecs = [each.codec for each in run.zero._engine.reduction.contributions.values()]
    trained = sum(codec.plan.numel * codec.dtype.itemsize for codec in codecs)
    relays = [event for event in run.events if event.verb == "relay"]
    summed = {each.plan.index: each.sum for each in run.zero._engine.gradients.accumulators}
    averages = [summed[e.bucket] for e in relays if e.bucket is not None]
    backs = [each.plan.shard_numel(each.team.position) * each.dtype.itemsize for each in averages]
    on, back = (sum(column) // RECORDED for column in ([e.logical for e in relays], backs))
    by_part = run.zero.placements.by_part
    reductions = len(relays) // max(len({each.bucket for each in relays}) * RECORDED, 1)
    return traffic.Traffic(
        round(reduced.logical / trained, 2) if trained else 0.0, passes, reduced, gathered, traffic.NOTHING,
        traffic.relayed(on, back, built.rows(run.zero), max(reductions, 1), by_part=by_part), shared, by_part,
        run.zero.placements.two_levels,
    )  # fmt: skip
