"""Tables of a plan's messages: passes, links, replicas, and the ways that take least time."""

from __future__ import annotations

from rich.markup import escape
from rich.table import Table

from zeroshard.cli import screen
from zeroshard.cli.screen import Amount
from zeroshard.planner.answer import Plan
from zeroshard.planner.quantities import number
from zeroshard.planner.traffic import Moved
from zeroshard.planner.ways import Ways


def traffic(found: Plan, amount: Amount) -> None:
    """Print what a step moves, and over which links."""
    backwards = f"{found.accumulate} backward" + ("s" if found.accumulate > 1 else "")
    how = f"{backwards}, no_sync" if found.no_sync else backwards
    table = screen.new_table(
        f"Moved per step and rank, in {amount.unit} ({how})", "stage", "passes", "logical", "sent", "sent + received"
    )
    for stage in found.stages:
        total = stage.traffic.total
        table.add_row(str(stage.stage), f"{stage.traffic.passes:g}", *map(amount, total))
        if stage.traffic.recompute != Moved(0, 0, 0):
            table.add_row("", "recompute", *map(amount, stage.traffic.recompute))
        for verb, part in {"relay": stage.traffic.relay, "share": stage.traffic.share}.items():
            if part != Moved(0, 0, 0):
                table.add_row("", f"of it {verb}", *map(amount, part))
    screen.wide(table)
    if any(stage.links for stage in found.stages):
        table = screen.new_table(
            f"What one rank sends over each link, in {amount.unit}",
            "stage", "inside its node", "between nodes", "inside, gloo", "between, gloo",
        )  # fmt: skip
        for stage in found.stages:
            if stage.links is not None and stage.links_gloo is not None:
                table.add_row(str(stage.stage), *map(amount, (*stage.links, *stage.links_gloo)))
        screen.wide(table)
        screen.say(
            "  [dim]NCCL, by formula: gathers are rings, whose node crossings all of a node's cards share. A ring's "
            "bytes are on both links: together they can be more than what is sent. gloo, as the kernel counts: gathers "
            "are broadcasts in trees. Both: reductions go to each owner, sums from replica to replica, on average[/dim]"
        )


def replicas(found: Plan, amount: Amount) -> None:
    """Print what several replicas hold and send, compared with one."""
    copies = found.replicas
    assert copies is not None
    rows, over = "replica", ", the optimizer over all" if copies.share_between else ""
    if copies.hosts > 1:
        rows, over = "host", ""
    named = screen.many(copies.replicas, rows)
    title = f"{named} of {found.ranks // copies.replicas} ranks{over}, for one backward"
    when = "for each gather at stage 3" if copies.hosts > 1 else "after the step"
    table = screen.new_table(title, "what", "amount")
    table.add_row("optimizer, bytes per parameter and rank", number(copies.optimizer))
    for what, elements in {
        f"reduced inside a {rows}, P sent per rank": copies.reduce_inside,
        "handed on and back between them": copies.reduce_between,
        f"gathered once inside a {rows}": copies.gather_inside,
        **({f"shared between them {when}": copies.share_between} if copies.share_between else {}),
        "total" if copies.share_between else "total of elements, the same for every K": copies.total,
    }.items():
        table.add_row(what, number(elements / found.parameters))
    for stage in found.stages:
        nbytes = stage.traffic.total.sent / found.parameters
        table.add_row(f"in bytes per parameter, a step at stage {stage.stage}", f"{nbytes:.4g}")
    screen.wide(table)
    compared = [(stage.stage, stage.slow_link) for stage in found.stages if stage.slow_link is not None]
    if compared:
        node = compared[0][1].gpus_per_node
        table = screen.new_table(
            f"Sent between nodes of {node}, bytes of one rank in a step",
            "stage", "over", named + over, "1 replica", "less",
        )  # fmt: skip
        for number_of_stage, link in compared:
            for backend, *sent, less in (
                ("NCCL", link.sent, link.with_one, link.saved),
                ("gloo", link.sent_gloo, link.with_one_gloo, link.saved_gloo),
            ):
                at = str(number_of_stage) if backend == "NCCL" else ""
                table.add_row(at, backend, *(f"{nbytes:,}" for nbytes in sent), f"{float(100 * less):.1f} %")
        screen.wide(table)
    screen.say(
        "  [dim]P per rank: elements, on average. Bytes grow with K where weights have 16 bits: sums go on in fp32, so "
        "that K changes no bit. Between nodes: as this engine sends, each rank with a network card of its own. "
        "NCCL's gathers are rings whose crossings a node's cards share: by formula. gloo's are broadcasts in trees: as "
        "the kernel counts. Reductions go straight to each owner, running sums from replica to replica. The "
        "answers of other assumptions are on the page that `zeroshard explain` writes, at text B[/dim]"
    )


def table_of_ways(found: Plan, compared: Ways, amount: Amount) -> Table:
    """Make the table of the ways in which ranks can share the model."""
    machine, nodes = compared.machine, compared.nodes
    what = "at rest" if found.stages[0].peak is None else "at the peak"
    table = screen.new_table(
        f"On {screen.many(nodes, 'node')} of {machine.gpus} GPUs ({machine.name}), {amount.unit} of one GPU",
        "stage", "replicas", "optimizer over", f"memory {what}", "between nodes", "inside", "messages, host", "",
    )  # fmt: skip
    best = compared.recommended
    for way in compared.shown:
        verdict = "[green]least[/green]" if way == best else "" if way.fits else "[red]does not fit[/red]"
        over = "-" if way.stage == 0 else "all" if way.over == "all" or way.plain else "a replica"
        sizes = map(amount, (way.nbytes, way.between, way.inside))
        copies = f"1 on {way.hosts} hosts" if way.hosts > 1 else str(way.replicas)
        table.add_row(str(way.stage), copies, over, *sizes, f"{way.seconds:.3g} s", verdict)
    return table


def ways(found: Plan, compared: Ways, amount: Amount) -> None:
    """Print these ways, which is recommended, and why."""
    screen.wide(table_of_ways(found, compared, amount))
    screen.say(
        f"  [dim]{len(compared.ways)} ways compared; shown: those that no other beats in memory and time, and one "
        "replica. Time of a step: messages one after the other, none behind compute, and what the host launches and "
        "agrees on. Latencies and the host's times are assumed. Activations come on top "
        "of memory[/dim]"
    )
    for reason in compared.because:
        screen.say(escape(f"  - {reason}"), 4)
