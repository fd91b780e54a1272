"""`zeroshard plan`: the planner's answers as tables and bars, or as JSON. Imports torch for jobs and tiers only."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from rich.markup import escape
from rich.text import Text as Styled

from zeroshard.cli import screen
from zeroshard.cli.brief import show_brief
from zeroshard.cli.config import PLACED, InputError, in_options, places, planned_offload
from zeroshard.cli.fits import show_fits
from zeroshard.cli.policies import NAMES, policies
from zeroshard.cli.screen import Amount
from zeroshard.cli.sent import replicas, traffic, ways
from zeroshard.cli.verdict import show_verdict
from zeroshard.cli.working import Working
from zeroshard.errors import UserError
from zeroshard.events import HOST, NVME, SHARED
from zeroshard.planner.answer import Plan, StagePlan
from zeroshard.planner.plan import plan, stages_of_runs
from zeroshard.planner.quantities import number
from zeroshard.planner.question import from_flat
from zeroshard.planner.recipes import PADDING

BAR = 24  # characters of the longest bar
PASSING = "passing at the peak"
# Told apart without colours too, in a log.
LOOKS = {"parameters": ("█", "cyan"), "gradients": ("▓", "yellow"), PADDING: ("x", "red"), PASSING: ("·", "white")}
MORE_LOOKS = (("▒", "magenta"), ("░", "green"), ("#", "blue"), ("=", "bright_magenta"), ("+", "bright_green"))


def show_plan(
    *,
    as_json: bool,
    exact: bool = False,
    full: bool = False,
    config: str | None = None,
    given: Collection[str] = (),
    **settings: Any,
) -> None:
    """Plan and print. Raises `InputError`, one line, for what cannot be planned.

    full: all tables and notes, and not one. config: the file that settings come from. given: names of options on the
    command line.
    """
    _one_model(settings)
    with Working(("planning", None), lines=not as_json):
        found = _planned(settings)
    if as_json:
        print(json.dumps(found.json(), indent=2))
        return
    amount = Amount(0 if exact else max(stage.total for stage in found.stages))
    searched = show_verdict(found, {**settings, "config": config}, given, amount)
    if not full:
        show_brief(found, amount, searched=searched)
        return
    _head(found)
    _bars(found, amount)
    _states(found, amount)
    if found.offload is not None:
        _tiers(found, amount)
        _files(found, amount)
    if any(stage.instants for stage in found.stages):
        _peaks(found, amount)
    traffic(found, amount)
    if found.replicas is not None:
        replicas(found, amount)
    if found.ways is not None:
        ways(found, found.ways, amount)
    if found.gpu_mem is not None:
        _answers(found, found.gpu_mem, settings, amount)
    for note in found.notes[:8]:
        screen.say(f"  [dim]{escape(note)}[/dim]")
    if len(found.notes) > 8:
        screen.say(f"  [dim]and {len(found.notes) - 8} more notes in --json[/dim]")


def _planned(options: dict[str, Any]) -> Plan:
    offload = planned_offload(_places(options))
    rest = {name: value for name, value in options.items() if name not in NAMES}
    # Of a number and of shapes there is a preset of it, as fp32 is all policies' default.
    if options.get("job") is None and options.get("precision") == "fp32" and policies(options)["precision"] is None:
        if rest.get("preset") not in (None, "fp32"):
            raise InputError("--preset and --precision both say how many bytes a parameter takes; one of the two")
        rest["preset"] = "fp32"
    try:
        model, machine, step, rest = from_flat(rest)
        return plan(model, machine, step=step, **rest, **policies(options), offload=offload)
    except UserError as error:
        raise InputError(in_options(error, (*options, "offload"))) from error


def _one_model(settings: dict[str, Any]) -> None:
    models = {"--params": "params", "--shapes": "shapes", "MODULE:FUNCTION": "job"}
    named = [option for option, name in models.items() if settings.get(name) is not None]
    if len(named) != 1:
        raise InputError(
            f"plan takes one of --params, --shapes and MODULE:FUNCTION; got: {' and '.join(named) or 'none of them'}; "
            f"instead: --params 7B, --shapes model.safetensors, or train:job"
        )


def _places(settings: dict[str, Any]) -> dict[str, str]:
    """Take --offload and its like out of the settings; return {state: where it rests}."""
    return places(settings.pop("offload", ""), **{what: settings.pop(f"offload_{what}", "") for what in PLACED})


def check_plan(*, as_json: bool, **settings: Any) -> int:
    """Run `--check`; return its exit code. Refuses options that a run does not have."""
    from zeroshard.cli.check import Check, check

    job, stage = settings["job"], settings["stage"]
    run, policy = ("ranks", "accumulate", "no_sync"), NAMES - {"experts", "fp8", "whole"}
    offload = _places(settings)
    other = {name: value for name, value in settings.items() if name not in (*run, *policy, "job", "stage") and value}
    if job is None or other:
        what = ", ".join(f"--{name.replace('_', '-')}" for name in other) or "a job"
        raise InputError(f"--check runs a job; {'leave out ' + what if other else 'name one: train:job'}")
    ranks, accumulate, no_sync = (settings[name] for name in run)
    options = {name: settings[name] for name in sorted(policy) if settings.get(name) is not None}
    how = {"accumulate": accumulate, "no_sync": no_sync}
    try:
        stages = stages_of_runs(ranks, stage, **policies(options), offload=planned_offload(offload), **how)
    except UserError as error:
        raise InputError(in_options(error, settings)) from error
    return check(Check(job, ranks, stages, accumulate, no_sync, offload, options), as_json=as_json)


def _head(found: Plan) -> None:
    recipe = found.recipe
    states = {"parameters": recipe.parameters, "gradients": recipe.kept_gradients, **recipe.optimizer}
    facts = {
        "model": f"{found.parameters:,} parameters" + ("" if found.layout is None else f" in {escape(found.source)}"),
        "ranks": f"{found.ranks:,}; the bytes below are {_whose(found)}'s, which holds most",
        "recipe": f"[bold]{escape(recipe.name)}[/bold]: "
        + " + ".join(f"{number(nbytes)} {state}" for state, nbytes in states.items())
        + f" = {number(recipe.total)} bytes per parameter",
    }
    if recipe.says:
        facts[""] = recipe.says
    screen.opening("Plan", facts)


def _whose(found: Plan) -> str:
    shown = {stage.stage: f"rank {stage.rank:,}" for stage in found.stages}
    if len(set(shown.values())) == 1:
        return next(iter(shown.values()))
    return ", ".join(f"{rank} (stage {stage})" for stage, rank in shown.items())


def _looks(found: Plan) -> dict[str, tuple[str, str]]:
    names = dict.fromkeys(state for stage in found.stages for state in stage.states)
    spare = iter(MORE_LOOKS * (1 + len(names)))
    looks = {name: LOOKS[name] if name in LOOKS else next(spare) for name in names}
    if any(stage.most > stage.device for stage in found.stages):
        looks[PASSING] = LOOKS[PASSING]
    return looks


def _bar(stage: StagePlan, looks: dict[str, tuple[str, str]], longest: int) -> Styled:
    """Draw characters in proportion to bytes. Each state ends where its running sum does, so the total is right."""
    bar, nbytes, drawn = Styled(), 0, 0
    for state, more in {**stage.states, PASSING: stage.most - stage.device}.items():
        nbytes += more
        upto = round(BAR * nbytes / longest)
        glyph, colour = looks.get(state, LOOKS[PASSING])
        bar.append(glyph * (upto - drawn), style=colour)
        drawn = upto
    return bar


def _bars(found: Plan, amount: Amount) -> None:
    looks = _looks(found)
    longest = max(stage.total + stage.most - stage.device for stage in found.stages)
    where = "" if found.offload is None else " in all tiers; saved: on the device"
    table = screen.new_table(
        f"Model state per rank, at rest{where}", "stage", "bytes/param", "", *amount.units, "saved"
    )
    table.columns[2].justify = "left"
    for stage in found.stages:
        cells = amount.both(stage.total)
        table.add_row(
            str(stage.stage), stage.formula, _bar(stage, looks, longest), *cells, f"{100 * stage.saved:.1f} %"
        )
    screen.wide(table)
    legend = Styled("  ")
    for state, (glyph, colour) in looks.items():
        legend.append(f"{glyph * 2} ", style=colour).append(f"{state}  ")
    screen.console.print(legend, soft_wrap=True)


def _states(found: Plan, amount: Amount) -> None:
    columns = [f"stage {stage.stage}" for stage in found.stages]
    table = screen.new_table(f"State by state, in {amount.unit}", "state", *columns)
    for state in dict.fromkeys(state for stage in found.stages for state in stage.states):
        table.add_row(state, *(amount(stage.states.get(state, 0)) for stage in found.stages))
    table.add_row("[bold]total[/bold]", *(f"[bold]{amount(stage.total)}[/bold]" for stage in found.stages))
    screen.wide(table)


def _tiers(found: Plan, amount: Amount) -> None:
    columns = ["device", "host", "of it buffers", "of it pages", "files", "on the disk"]
    once = any(SHARED in stage.tiers for stage in found.stages)
    table = screen.new_table(f"Where it rests, in {amount.unit}", "stage", *columns, *["shared, once per host"] * once)
    for stage in found.stages:
        host = stage.tiers.get(HOST, {})
        filed, shared = (sum(stage.tiers.get(tier, {}).values()) for tier in (NVME, SHARED))
        cells = (stage.device, stage.host, host.get("staging", 0), stage.rounding, filed, stage.files, shared)
        table.add_row(str(stage.stage), *map(amount, cells[: len(columns) + once]))
    screen.wide(table)
    if found.host_mem is not None:
        table = screen.new_table(
            f"Into {_budget(found.host_mem, amount)} of host memory per rank", "stage", "fits", "to spare"
        )
        for stage in found.stages:
            spare = found.host_mem - stage.host
            verdict = "[green]fits[/green]" if spare >= 0 else "[red]does not fit[/red]"
            table.add_row(str(stage.stage), verdict, amount(spare))
        screen.wide(table)


def _files(found: Plan, amount: Amount) -> None:
    if not any(stage.files for stage in found.stages):
        return
    columns = ["stage", "read", "written"]
    columns += ["seconds"] * (found.disk is not None) + ["tokens/s of a rank"] * (found.tokens is not None)
    table = screen.new_table(f"Files, {amount.unit} per step and rank", *columns)
    if worn := found.disk is not None or found.step_time is not None:
        table.add_column("written in a day", justify="right")
    for stage in found.stages:
        cells = [amount(nbytes) for nbytes in stage.moves]
        if found.disk is not None:
            cells.append(f"{found.seconds(stage):.3g}")
        if found.tokens is not None:
            cells.append(f"{found.tokens_per_second(stage) or 0:,.0f}")
        if worn:
            cells.append(amount(found.wear(stage) or 0))
        table.add_row(str(stage.stage), *cells)
    screen.wide(table)
    if worn:
        how = "as fast as the disk goes" if found.step_time is None else f"of {found.step_time:g} seconds"
        screen.say(f"  [dim]written in a day: of steps {how}[/dim]")


def _peaks(found: Plan, amount: Amount) -> None:
    where = "" if found.offload is None else " on the device"
    table = screen.new_table(
        f"At rest and passing{where}, at the peak of a step", "stage", *amount.units, "passing", "at"
    )
    kept = any(stage.activations for stage in found.stages)
    if kept:
        for column in ("activations", "most of operators"):
            table.add_column(column, justify="right")
    for stage in found.stages:
        assert stage.peak is not None
        cells = (*amount.both(stage.peak), amount(stage.peak - stage.device), escape(str(stage.peak_at)))
        table.add_row(str(stage.stage), *cells, *([amount(stage.activations), amount(stage.working)] if kept else []))
    screen.wide(table)
    if kept:
        screen.say("  [dim]passing: the engine's own; what operators make, activations included, comes on top[/dim]")
    else:
        screen.say("  [dim]an upper bound for units used one after the other; activations come on top[/dim]")


def _budget(nbytes: int, amount: Amount) -> str:
    """Write a budget: `85.90 GB (80.00 GiB)`."""
    here, binary = amount.both(nbytes)
    return f"{here} {amount.unit} ({binary} {amount.units[1]})"


def _answers(found: Plan, limit: int, options: dict[str, Any], amount: Amount) -> None:
    what = "at rest, without activations" if found.stages[0].peak is None else "at the peak, without activations"
    if any(stage.activations for stage in found.stages):
        what = "at the peak, with the most of operators beside it"
    table = screen.new_table(
        f"Into {_budget(limit, amount)} per rank",
        "stage",
        "fits",
        "to spare",
        amount.units[1],
        "largest by states alone",
    )
    for stage in found.stages:
        spare = limit - stage.most
        verdict = "[green]fits[/green]" if stage.fits else "[red]does not fit[/red]"
        largest = "-" if stage.largest is None else f"{stage.largest:,}"
        table.add_row(str(stage.stage), verdict, *amount.both(spare), largest)
    screen.wide(table)
    screen.say(f"  [dim]fits: {what}; largest: by states at rest alone[/dim]")
    if found.fitting is not None:
        show_fits(found, found.fitting, options, amount)
        return
    if not any(stage.fits for stage in found.stages):
        screen.say("  no stage that was asked for fits")
    screen.console.print()
