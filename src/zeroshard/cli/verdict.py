"""The verdict of a plan: which stage fits, in a sentence, and the line of a program that shards like that."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from zeroshard.cli import screen
from zeroshard.cli.config import PLACED
from zeroshard.cli.fits import fits_sentence, show_line
from zeroshard.cli.policies import comm_of, layout_of, precision_of
from zeroshard.cli.screen import Amount
from zeroshard.layout.stage import STAGES
from zeroshard.planner import fitting
from zeroshard.planner.answer import Plan, StagePlan
from zeroshard.planner.fitting import PATH
from zeroshard.planner.line import Call, Word, changed, policy, shard
from zeroshard.planner.options import ARGUMENTS, OPTIONS
from zeroshard.planner.recipes import Recipe
from zeroshard.planner.ways import Way


def show_verdict(found: Plan, options: Mapping[str, Any], given: Collection[str], amount: Amount) -> bool:
    """Print the verdict, and the line where this engine holds what is planned. Return whether a search has given it.

    options: the command's, without those of tiers. given: names of options on the command line.
    """
    stage = _chosen(found)
    fits = stage is not None
    stage = stage or found.stages[-1]
    screen.console.print()
    if found.fitting is not None and (not fits or not asked_for_one(given)):
        screen.say(fits_sentence(found, found.fitting, amount))
        show_line(found.fitting.best, options)
        return True
    screen.say(_sentence(found, stage, amount, fits=fits))
    line = pasted(found, stage, options, given) if fits else None
    if line is not None:
        screen.console.print()
        screen.console.print(line, markup=False, style="cyan", soft_wrap=True)
    return False


def asked_for_one(given: Collection[str]) -> bool:
    """Tell if the question is about settings that a search would choose. given: names of options."""
    tiers = {"offload", *(f"offload_{what}" for what in PLACED)}
    return bool({"stage", "optimizer_in_backward", "checkpoint", "config", *tiers} & {*given})


def _fits(found: Plan, stage: StagePlan) -> bool:
    return stage.fits is not False and (found.host_mem is None or stage.host <= found.host_mem)


def _chosen(found: Plan) -> StagePlan | None:
    """Return the lowest stage that fits a budget, or takes least time on a machine; without either the highest."""
    if found.ways is not None:
        best = found.ways.recommended
        return next((stage for stage in found.stages if best and stage.stage == best.stage), None)
    if found.gpu_mem is None and found.host_mem is None:
        return found.stages[-1]
    return next((stage for stage in found.stages if _fits(found, stage)), None)


def _sentence(found: Plan, stage: StagePlan, amount: Amount, *, fits: bool) -> str:
    unit, per = amount.unit, f"on each of {found.ranks:,} ranks" if found.ranks > 1 else "on one rank"
    if found.ways is not None:
        if found.ways.recommended is None:
            return "[bold red]None of the ways fits[/bold red]: the reasons are below."
        best = found.ways.recommended
        return (
            f"[bold green]{str(best).capitalize()}: least time[/bold green] of what fits, {best.seconds:.3g} s for the "
            f"messages of a step{_late(best)}, {amount(best.nbytes)} {unit} on each GPU."
        )
    when = "at rest" if stage.peak is None else "at the peak of a step"
    if found.gpu_mem is None:
        said = f"[bold]Stage {stage.stage} holds {_held(stage, amount)}[/bold] {per} at rest"
        if found.host_mem is not None:
            return f"{said}; host memory {'suffices' if fits else 'does not suffice'}."
        where = " on the device" if stage.host or stage.files else ""
        less = f", {1 / (1 - stage.saved):.3g} times less{where} than stage 0" if 0 < stage.saved < 1 else ""
        return f"{said}{less}. --gpu h100-80 says what fits."
    limit, spare = f"{amount(found.gpu_mem)} {unit}", amount(abs(found.gpu_mem - stage.most))
    if fits:
        lowest = ", the lowest that does" if len(found.stages) > 1 else ""
        room = "activations included" if stage.working else "the rest is for activations"
        if stage.peak is None:
            room = "gathered weights and activations come on top"
        return (
            f"[bold green]Stage {stage.stage} fits[/bold green]{lowest}: {amount(stage.most)} of {limit} {per} {when}, "
            f"{spare} to spare; {room}."
        )
    none = "No stage fits" if len(found.stages) > 1 else f"Stage {stage.stage} does not fit"
    if stage.most <= found.gpu_mem:
        return f"[bold red]{none}[/bold red]: host memory does not suffice."
    return (
        f"[bold red]{none}[/bold red]: stage {stage.stage} takes {amount(stage.most)} {unit} {per} {when}, {spare} "
        "more than there is."
    )


def _late(way: Way) -> str:
    """Say how much of a way's time comes after backward, where it is much: a chain of many replicas."""
    return f" ({way.chain:.3g} s of it from replica to replica, after backward)" if 10 * way.chain > way.seconds else ""


def _held(stage: StagePlan, amount: Amount) -> str:
    parts = {"on the device": stage.device, "in host memory": stage.host, "in files": stage.files}
    named = [f"{amount(nbytes)} {amount.unit} {where}" for where, nbytes in parts.items() if nbytes]
    return ", ".join(named) if stage.host or stage.files else f"{amount(stage.total)} {amount.unit}"


def pasted(found: Plan, stage: StagePlan, options: Mapping[str, Any], given: Collection[str]) -> str | None:
    """Write the call of `shard` that holds what a stage's plan says; None where the options do not tell all of it.

    A mesh of the program's own, as experts need, is none of them, nor is a recipe of another system's bytes.
    """
    if options.get("config") is not None:
        # Of a number and of shapes the bytes are a recipe's, which the config may not ask for.
        tiers = {"offload", *(f"offload_{what}" for what in PLACED)}
        alone = not {*OPTIONS, *ARGUMENTS, *tiers, "precision", "stage"} & {*given} and options.get("job") is not None
        return shard(f"**zeroshard.settings({json.dumps(options['config'])})") if alone else None
    precision = _precision(found.recipe, options, sharded=stage.stage == max(STAGES))
    if options.get("ep") is not None or precision is None:
        return None
    best = found.ways.recommended if found.ways is not None else None
    comm = changed(comm_of(options)) | (best.comm if best else {})
    offload = changed(found.offload) if found.offload is not None else {}
    if offload.get("path"):
        offload["path"] = PATH
    arguments: list[str | Call] = [f"stage={stage.stage}"]
    for name, told in (("Precision", precision), ("Layout", changed(layout_of(options))), ("Comm", comm)):
        if told:
            arguments.append(policy(name, told))
    if offload:
        arguments.append(policy("Offload", offload))
    return shard(*arguments, *(f"{name}=True" for name in ARGUMENTS if options.get(name)))


def _precision(recipe: Recipe, options: Mapping[str, Any], *, sharded: bool) -> dict[str, Any] | None:
    """Return the fields of `Precision`: by its options, else by what a recipe has beside masters.

    sharded: are parameters? Then masters may stand for them, and a recipe that keeps both asks for it.
    """
    if options.get("job") is not None or options.get("precision") is not None or options.get("fp8") is not None:
        made = precision_of(options.get("precision"), options.get("grad_dtype"), options.get("fp8"))
        return {} if made is None else changed(made)
    told = fitting.precision_of(recipe, stored=sharded)
    return None if told is None else {name: Word(text) for name, text in told.items()}
