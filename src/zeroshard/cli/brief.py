"""What `zeroshard plan` prints without --full, after the verdict and the line to paste: one table, on one screen."""

from __future__ import annotations

from collections.abc import Callable

from rich.markup import escape

from zeroshard.cli import screen
from zeroshard.cli.fits import within
from zeroshard.cli.screen import Amount
from zeroshard.cli.sent import table_of_ways
from zeroshard.planner.answer import Plan, StagePlan
from zeroshard.planner.fitting import Fitting


def show_brief(found: Plan, amount: Amount, *, searched: bool) -> None:
    """Print what answers the question: the ways that were found, or what each stage takes. searched: for ways."""
    if found.ways is not None:
        screen.wide(table_of_ways(found, found.ways, amount))
    elif searched and found.fitting is not None:
        _fits(found.fitting, amount)
    else:
        _stages(found, amount)
    screen.say("  [dim]--full says more: of each state, the peak, messages, and what is assumed[/dim]")


def _stages(found: Plan, amount: Amount) -> None:
    """Print each stage's bytes: at rest, in which tier, at the peak, beside a budget, and on their way."""
    columns: dict[str, Callable[[StagePlan], int]] = {"at rest": lambda stage: stage.total}
    if found.offload is not None:
        columns |= {
            "on the device": lambda stage: stage.device,
            "host": lambda stage: stage.host,
            "files": lambda stage: stage.files,
        }
    if any(stage.peak is not None for stage in found.stages):
        columns["at the peak"] = lambda stage: stage.most
    columns["sent a step"] = lambda stage: stage.traffic.total.sent
    if (limit := found.gpu_mem) is not None:
        columns["to spare"] = lambda stage: limit - stage.most
    title = f"A rank's {amount.unit}" + (f", of {amount(limit)}" if limit is not None else "")
    table = screen.new_table(title, "stage", "bytes/param", *columns, *["fits"] * (limit is not None))
    for stage in found.stages:
        verdict = [] if limit is None else ["[green]fits[/green]" if stage.fits else "[red]does not fit[/red]"]
        cells = (amount(nbytes(stage)) for nbytes in columns.values())
        table.add_row(str(stage.stage), stage.formula, *cells, *verdict)
    screen.wide(table)


def _fits(fitting: Fitting, amount: Amount) -> None:
    table = screen.new_table(f"A rank's {amount.unit}", "s a step", "device", "host", "files", "way")
    table.columns[-1].justify = "left"
    named = [(each.heading, fit) for each in fitting.found for fit in each.fits]
    for before, fit in named or [(f"with {what}", fit) for what, fit in fitting.found[0].buys]:
        way = f"{before}: {fit.way}" if before else str(fit.way)
        table.add_row(within(fit), *map(amount, fit.need), escape(way))
    screen.wide(table)
