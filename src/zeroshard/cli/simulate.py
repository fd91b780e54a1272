"""`zeroshard simulate`: a rank of a run that does not exist, its bytes, its messages, and its step on a clock."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from rich.markup import escape

from zeroshard.api import Zero
from zeroshard.checkpoint.content import model_state, pieces
from zeroshard.checkpoint.staging import put
from zeroshard.cli import screen
from zeroshard.cli.policies import policies
from zeroshard.cli.working import Working
from zeroshard.errors import UserError
from zeroshard.events import DEVICE, HOST, NVME, SHARED, Ledger
from zeroshard.integrations.chrome_trace import MADE_BY
from zeroshard.planner import predict_states, timeline
from zeroshard.planner.experts import check_experts
from zeroshard.planner.machines import Cluster, machine
from zeroshard.planner.overheads import CLIP, clipped, total
from zeroshard.planner.simulate import PASSING, RECORDED, Simulation, facts, simulate
from zeroshard.planner.states import owned
from zeroshard.policies.comm import Comm
from zeroshard.policies.offload import Offload

BAR = 40  # characters of a whole step


def show_simulation(
    job: str,
    *,
    ranks: int,
    rank: Sequence[int],
    stage: int,
    accumulate: int,
    ep: int | None,
    offload: Offload | None,
    on: str,
    trace: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Simulate each of the ranks, and print. Raises `UserError` for what cannot be simulated.

    options: those of the policies.
    """
    cluster = machine(on)
    if trace is not None and not Path(trace).absolute().parent.is_dir():
        raise UserError("there is no folder for the trace", got=repr(trace))
    made = policies(options)
    layout, comm = made["layout"], made["comm"]
    replicas, ordered = comm.rows or 1, comm.reduce != "native"
    check_experts(layout, ep, ranks, replicas=None if replicas == 1 else replicas)
    made["layout"] = layout.on(accelerator=True)
    # As the clock is one of GPUs: messages, unless ranks have one copy of the parameters.
    made["comm"] = (offload.reached_by(comm) if offload else comm).on_accelerators()
    comparable = comm.reduce == "ordered" and replicas == 1 and not ep and comm.transport != "shared"
    found = []
    with Working(("ranks simulated", len(rank)), lines=not as_json) as counts:
        for done, one in enumerate(rank):
            counts.now(f"rank {one:,}", done)
            run = simulate(
                job,
                ranks=ranks,
                rank=one,
                stage=stage,
                accumulate=accumulate,
                mesh={layout.axis: ranks // ep, "ep": ep} if ep else None,
                offload=offload,
                **made,
            )
            line = clock(run, cluster, ordered=ordered)
            found.append(_told(run, cluster, line, offload, comparable=comparable))
            if trace is not None:
                put(trace if len(rank) == 1 else f"{trace}.rank{one}", json.dumps(timeline.chrome(line, one)), MADE_BY)
    if as_json:
        asked = {
            "job": job,
            "ranks": ranks,
            "replicas": comm.replicas or 1,
            "hosts": comm.hosts or 1,
            "optimizer_over": options["optimizer_over"],
            "stage": stage,
        }
        print(json.dumps(asked | {"machine": on, "simulated": found}, indent=2))
        return
    over = ", the optimizer over all of them" if options["optimizer_over"] == "all" and replicas > 1 else ""
    _open(job, f"{ranks:,} at stage {stage}{_copies(ranks, comm)}{over}", cluster)
    for each in found:
        _show(each)


def _open(job: str, ranks: str, cluster: Cluster) -> None:
    facts = {
        "job": escape(job),
        "ranks": f"{ranks}; nothing runs, nothing is sent",
        "on": f"{cluster.name}: {escape(cluster.source)}",
        "clock": f"{100 * cluster.efficiency:.0f} % of {cluster.flops / 1e12:,.0f} TFLOP/s, its 16-bit peak; any dtype",
    }
    screen.opening("Simulation", facts)


def _copies(ranks: int, comm: Comm) -> str:
    rows, name = comm.rows or 1, "hosts" if comm.two_levels else "replicas"
    return f", {'on' if comm.two_levels else 'in'} {rows:,} {name} of {ranks // rows:,}" if rows > 1 else ""


def clock(run: Simulation, cluster: Cluster, *, ordered: bool) -> timeline.Timeline:
    """Put a simulated step on the clock."""
    # Only what the device holds: the CPU updates states that rest elsewhere, and no clock here knows how fast.
    held = {state: n for state, n in run.ledger.tiers.get(DEVICE, {}).items() if state not in (*PASSING, "parameters")}
    sits = run.zero._engine.group.team.seat
    return timeline.replay(
        run.events, cluster, ranks=sits.size, updated_nbytes=sum(held.values()), ordered=ordered, steps=run.steps,
        replica=sits.replica, replicas=sits.replicas,
        along={b.index: run.zero._engine.group.axis_team.seat for b in run.zero.partition.buckets if b.axis},
        facts={at: replace(of, native=not ordered) for at, of in facts(run.zero).items()},
    )  # fmt: skip


def natively(run: Simulation, cluster: Cluster) -> timeline.Timeline:
    """Put the step on the clock as if the backend added: reductions travel in the accumulator's dtype then."""
    wider = {
        plan.index: Fraction(bucket.grad_dtype.itemsize, bucket.reduce_dtype.itemsize)
        for plan, bucket in zip(run.zero.partition.buckets, run.zero._engine.buckets, strict=True)
    }
    events = [
        replace(event, logical=math.ceil(event.logical * max(wider.get(event.bucket, 1), 1)))
        if event.verb == "reduce" and event.bucket is not None else event
        for event in run.events
    ]  # fmt: skip
    return clock(replace(run, events=events), cluster, ordered=False)


def _told(
    run: Simulation, cluster: Cluster, line: timeline.Timeline, offload: Offload | None, *, comparable: bool
) -> dict[str, Any]:
    """Report on one rank, with its tiers if offloaded. comparable: could it have the backend's own reduction too?"""
    tiers: dict[str, Any] = {} if offload is None else {"tiers": at_rest(run.ledger), "files": moved(run)}
    for tier, nbytes in run.away.items():  # as forward ends
        tiers["tiers"][tier]["activations"] = nbytes
    return report(run, cluster, line, natively(run, cluster) if comparable else None) | tiers


def report(
    run: Simulation, cluster: Cluster, line: timeline.Timeline, native: timeline.Timeline | None
) -> dict[str, Any]:
    """Report on one rank in plain numbers; bytes are integers, times seconds.

    native: the same step with the backend's own reduction, where it could have it.
    """
    ledger, zero = run.ledger, run.zero
    held = {state: nbytes for state, nbytes in ledger.held.items() if nbytes and state not in PASSING}
    peak_phase, peak = max(ledger.phases.items(), key=lambda item: item[1].total if item[0] != "init" else 0)
    moved = [event for event in run.events if event.verb in timeline.TRAVELS and event.logical]
    asked = [event for event in run.events if event.verb == "control"]
    return {
        "rank": run.rank,
        "predicted": predict_states(zero),
        "held": held,
        "peak": {"phase": peak_phase, "total": peak.total, "held": peak.held},
        "activations": run.activations,
        "working": run.working,
        "fits": peak.total + run.working <= cluster.memory,
        "memory": cluster.memory,
        "flops": run.flops,
        "collectives": [
            {"verb": verb, "logical": logical, "per_step": count / RECORDED}
            for (verb, logical), count in sorted(Counter((e.verb, e.logical) for e in moved).items())
        ],
        "traffic": {
            verb: {
                "calls": sum(e.verb == verb for e in moved) / RECORDED,
                "logical": sum(e.logical for e in moved if e.verb == verb) // RECORDED,
                "sent": sum(e.sent for e in moved if e.verb == verb) // RECORDED,
                "sent_and_received": sum(e.sent + e.received for e in moved if e.verb == verb) // RECORDED,
            }
            for verb in timeline.TRAVELS
        },
        "control": {
            "calls": len(asked) / RECORDED,
            "sent": sum(event.sent for event in asked) / RECORDED,
        },
        "layout": balance(zero),
        "checkpoint": saved(zero),
        "time": {
            "step": line.step,
            "compute": line.compute,
            "summing": line.summing,
            "optimizer": line.optimizer,
            "exposed": line.exposed,
            "moving": line.moving,
            "overhead": line.overhead,
            "tokens_per_second": line.tokens_per_second(run.tokens) if run.tokens else None,
        },
        "host": {
            "launches": line.asked.launches,
            "drains": line.asked.drains,
            "meetings": line.meetings,
            "launches_of_a_clip": (total(map(clipped, facts(zero).values())) + CLIP).launches,
        },
        "native": None if native is None else native.step,
    }


def at_rest(ledger: Ledger) -> dict[str, dict[str, int]]:
    """Return {tier: {state: bytes}}, with the buffers through which files are read and written."""
    passing = set(PASSING) - {"staging"}
    return {
        tier: {state: n for state, n in ledger.tiers.get(tier, {}).items() if n and state not in passing}
        for tier in (DEVICE, HOST, NVME, *[SHARED] * (SHARED in ledger.tiers))
    }


def moved(run: Simulation) -> dict[str, int]:
    """Count the bytes that the last step read from files and wrote to them."""
    before = [event for event in run.events if event.verb == "step"][-1 - run.steps]
    last = [event for event in run.events if event.start > before.end]
    return {verb: sum(event.logical for event in last if event.verb == verb) for verb in ("read", "write")}


def saved(zero: Zero) -> dict[str, int]:
    """Count what `zero.save` would write: files in all, this rank's tensors and their bytes, without headers."""
    sizes = [piece.tensor.numel() * piece.tensor.itemsize for piece in pieces(model_state(zero._engine))]
    return {"files": zero.world_size + 1, "tensors": len(sizes), "bytes": sum(sizes)}


def balance(zero: Zero) -> dict[str, Any]:
    """Measure how evenly the layout shares the model: padding, the fullest and emptiest rank, empty shards."""
    buckets = zero.partition.buckets
    elements = [mine.shard for mine in owned(zero.partition, zero._engine.group.axis_team.seat)]
    padding = sum(bucket.padding * zero._engine.formats(bucket).computed.itemsize for bucket in buckets)
    total = sum(bucket.numel * zero._engine.formats(bucket).computed.itemsize for bucket in buckets)
    return {
        "buckets": len(buckets),
        "padding_bytes": padding,
        "padding_fraction": padding / total if total else 0.0,
        "fullest_rank_elements": max(elements, default=0),
        "emptiest_rank_elements": min(elements, default=0),
        "empty_shards": sum(not bucket.shard_numel(position) for bucket in buckets for position in range(bucket.size)),
    }


def _both(nbytes: int) -> tuple[str, str]:
    return f"{nbytes:,}", f"{nbytes / 2**30:.3f}"


def _show(found: dict[str, Any]) -> None:
    screen.say(f"\n[bold]Rank {found['rank']:,}[/bold]")
    table = screen.new_table("Held, in bytes", "state", "at rest", "GiB", "at the peak", "GiB")
    peak = found["peak"]
    for state in dict.fromkeys([*found["held"], *peak["held"]]):
        table.add_row(state, *_both(found["held"].get(state, 0)), *_both(peak["held"].get(state, 0)))
    table.add_row("[bold]total[/bold]", *_both(sum(found["held"].values())), *_both(peak["total"]))
    table.add_row("[dim]activations, beside[/dim]", "", "", *_both(found["activations"]))
    screen.show(table)
    screen.say(f"  [dim]the peak is in {peak['phase']}; activations are what forward keeps for backward[/dim]")
    most, verdict = peak["total"] + found["working"], "fits in" if found["fits"] else "[red]does not fit in[/red]"
    screen.say(
        f"  {most:,} bytes with the most that operators hold at once: {verdict} {found['memory'] / 2**30:,.0f} GiB\n"
    )
    if "tiers" in found:
        _show_tiers(found["tiers"], found["files"])
    table = screen.new_table("Collectives of one step", "verb", "calls", "logical", "sent", "sent + received")
    for verb, moved in found["traffic"].items():
        if verb in ("relay", "share") and not moved["calls"]:
            continue  # there is one replica
        cells = (f"{moved[column]:,}" for column in ("logical", "sent", "sent_and_received"))
        table.add_row(verb, f"{moved['calls']:g}", *cells)
    screen.show(table)
    control = found["control"]
    screen.say(
        f"  [dim]beside it {control['calls']:g} agreements of all ranks, {control['sent']:,.0f} bytes sent[/dim]"
    )
    share = found["layout"]
    screen.say(
        f"  [dim]{share['buckets']:,} buckets; padding {share['padding_bytes']:,} bytes "
        f"({100 * share['padding_fraction']:.2f} %); elements per rank {share['emptiest_rank_elements']:,} to "
        f"{share['fullest_rank_elements']:,}; {share['empty_shards']:,} empty shards[/dim]\n"
    )
    kept = found["checkpoint"]
    screen.say(
        f"  [dim]a checkpoint: {kept['files']:,} files; this rank's has {kept['tensors']:,} tensors, "
        f"{kept['bytes']:,} bytes, beside rank 0's buffers[/dim]\n"
    )
    _show_clock(found)


def _show_clock(found: dict[str, Any]) -> None:
    clock = found["time"]
    table = screen.new_table("A step on the clock, its parts put together one after the other", "what", "time", "")
    table.columns[-1].justify = "left"
    rows = {
        "compute": "compute",
        "summing": "summing gradients in rank order",
        "optimizer": "optimizer",
        "exposed": "waiting for collectives",
        "overhead": "launches, waits of the host, meetings",
        "step": "[bold]step[/bold]",
    }
    before = 0.0
    for key, what in rows.items():
        first = 0.0 if key == "step" else before
        before = first + clock[key]
        start, end = (round(BAR * seconds / clock["step"]) for seconds in (first, before))
        table.add_row(what, _seconds(clock[key]), f"[cyan]{' ' * start}{'█' * (end - start)}[/cyan]")
    screen.show(table)
    hidden = max(clock["moving"] - clock["exposed"], 0.0)
    screen.say(f"  [dim]{_seconds(clock['moving'])} of collectives, {_seconds(hidden)} of them behind compute[/dim]")
    host = found["host"]
    screen.say(
        f"  [dim]the engine's part: {host['launches']:,} launches, {host['drains']:,} waits for the whole device, "
        f"{host['meetings']:,} meetings; a norm with clipping adds {host['launches_of_a_clip']:,} launches and a "
        "meeting. How long each takes is assumed[/dim]"
    )
    if found["native"] is not None:
        times = clock["step"] / found["native"]
        faster = f"{times:.2f} times as fast, in an order of its own" if times >= 1.005 else "no faster"
        screen.say(f'  [dim]with reduce="native" {_seconds(found["native"])}: {faster}[/dim]')
    if clock["tokens_per_second"] is not None:
        screen.say(f"  [bold]{clock['tokens_per_second']:,.0f} tokens/s[/bold] per GPU")


def _show_tiers(tiers: dict[str, dict[str, int]], files: dict[str, int]) -> None:
    table = screen.new_table("Where it rests, in bytes", "state", *tiers)
    for state in dict.fromkeys(state for held in tiers.values() for state in held):
        table.add_row(state, *(f"{held.get(state, 0):,}" for held in tiers.values()))
    table.add_row("[bold]total[/bold]", *(f"{sum(held.values()):,}" for held in tiers.values()))
    screen.show(table)
    screen.say(f"  [dim]files, in a step: {files['read']:,} bytes read, {files['write']:,} written[/dim]")
    screen.say("  [dim]not on the clock: moves between tiers, and what the CPU updates[/dim]\n")


def _seconds(seconds: float) -> str:
    """Write seconds: `0.00123` -> `1.23 ms`."""
    factor, unit = (1, "s") if seconds >= 1 else (1e3, "ms") if seconds >= 1e-3 else (1e6, "us")
    return f"{seconds * factor:.4g} {unit}"
