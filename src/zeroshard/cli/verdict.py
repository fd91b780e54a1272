"""The verdict of a plan: which stage fits, in a sentence, and the line of a program that shards like that."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any, NamedTuple

from rich.markup import escape

from zeroshard.cli import screen
from zeroshard.cli.config import PLACED
from zeroshard.cli.policies import comm_of, layout_of, precision_of
from zeroshard.cli.screen import Amount
from zeroshard.planner.answer import Plan, StagePlan
from zeroshard.planner.options import ARGUMENTS, OPTIONS
from zeroshard.planner.recipes import Recipe
from zeroshard.stage import STAGES

LONGEST = 80  # columns of a line to paste
PATH = "/a/local/disk"  # where a plan does not ask for the folder of files
BF16, HALF = "torch.bfloat16", 2  # and its bytes


def show_verdict(found: Plan, options: Mapping[str, Any], given: Collection[str], amount: Amount) -> None:
    """Print the verdict, and the line where this engine holds what is planned.

    options: the command's, without those of tiers. given: names of options on the command line.
    """
    stage = _chosen(found)
    fits = stage is not None
    stage = stage or found.stages[-1]
    screen.console.print()
    screen.say(_sentence(found, stage, amount, fits=fits))
    line = pasted(found, stage, options, given) if fits else None
    if line is not None:
        screen.console.print()
        screen.console.print(line, markup=False, style="cyan", soft_wrap=True)


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
            f"messages of a step, {amount(best.nbytes)} {unit} on each GPU."
        )
    when = "at rest" if stage.peak is None else "at the peak of a step"
    if found.gpu_mem is None:
        said = f"[bold]Stage {stage.stage} holds {_held(stage, amount)}[/bold] {per} at rest"
        if found.host_mem is not None:
            return f"{said}; host memory {'suffices' if fits else 'does not suffice'}."
        whose = "of it on the device " if stage.host or stage.files else ""
        less = f", {whose}{1 / (1 - stage.saved):.3g} times less than stage 0" if 0 < stage.saved < 1 else ""
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
    would = [
        f"{change.what.removeprefix('and ')} ({amount(change.nbytes)} {unit})" for change in found.advice if change.fits
    ]
    if stage.most <= found.gpu_mem:
        return f"[bold red]{none}[/bold red]: host memory does not suffice."
    advice = f"What would fit: {escape(', '.join(would))}." if would else "Nothing tried would fit."
    return (
        f"[bold red]{none}[/bold red]: stage {stage.stage} takes {amount(stage.most)} {unit} {per} {when}, {spare} "
        f"more than there is. {advice}"
    )


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
        return _shard(f"**zeroshard.settings({json.dumps(options['config'])})") if alone else None
    precision = _precision(found.recipe, options, sharded=stage.stage == max(STAGES))
    if options.get("ep") is not None or precision is None:
        return None
    best = found.ways.recommended if found.ways is not None else None
    comm = _changed(comm_of(options)) | (best.comm if best else {})
    offload = _changed(found.offload) if found.offload is not None else {}
    if offload.get("path"):
        offload["path"] = PATH
    arguments: list[str | _Call] = [f"stage={stage.stage}"]
    for name, changed in (("Precision", precision), ("Layout", _changed(layout_of(options))), ("Comm", comm)):
        if changed:
            arguments.append(_policy(name, changed))
    if offload:
        arguments.append(_policy("Offload", offload))
    return _shard(*arguments, *(f"{name}=True" for name in ARGUMENTS if options.get(name)))


def _precision(recipe: Recipe, options: Mapping[str, Any], *, sharded: bool) -> dict[str, Any] | None:
    """Return the fields of `Precision`: by its options, else by what a recipe has beside masters.

    sharded: are parameters? Then masters may stand for them, and a recipe that keeps both asks for it.
    """
    if options.get("job") is not None or options.get("precision") is not None or options.get("fp8") is not None:
        made = precision_of(options.get("precision"), options.get("grad_dtype"), options.get("fp8"))
        return {} if made is None else _changed(made)
    if recipe.parameters == 2 * HALF and recipe.gradients == 2 * HALF and "master" not in recipe.optimizer:
        return {}
    if recipe.parameters != HALF or recipe.optimizer.get("master") != 2 * HALF or "fp32_gradients" in recipe.optimizer:
        return None
    narrow: dict[str, Any] = {"grad_dtype": _Word(BF16)} if recipe.gradients == HALF else {}
    if recipe.reduced == 2 * HALF:
        narrow["reduce_dtype"] = _Word("torch.float32")
    if sharded and not recipe.cast:
        narrow["store_params"] = True
    return {"param_dtype": _Word(BF16), **narrow, "cast_inputs": True}


class _Word(str):
    """Python text that stands for itself: torch is not loaded for plans of numbers."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _changed(policy: Any) -> dict[str, Any]:
    """Return the fields of a policy that are not its defaults."""
    plain = type(policy)()
    told = {each.name: getattr(policy, each.name) for each in fields(policy)}
    return {name: value for name, value in told.items() if value != getattr(plain, name)}


class _Call(NamedTuple):
    """A call to write: `name(argument, ...)`, whose arguments are texts, or calls with what stands before them."""

    name: str
    arguments: list[Any]

    def on_one_line(self) -> str:
        inside = (each.on_one_line() if isinstance(each, _Call) else each for each in self.arguments)
        return f"{self.name}({', '.join(inside)})"

    def lines(self, indent: str = "", end: str = "") -> list[str]:
        """Write it: on one line, or where that is too long with as many arguments on each as fit."""
        if len(line := f"{indent}{self.on_one_line()}{end}") <= LONGEST:
            return [line]
        inside, told = indent + "    ", [f"{indent}{self.name}("]
        for each in self.arguments:
            whole = each.on_one_line() if isinstance(each, _Call) else each
            if len(told) > 1 and len(told[-1]) + 2 + len(whole) <= LONGEST:
                told[-1] += f" {whole},"
            else:
                told += each.lines(inside, ",") if isinstance(each, _Call) else [f"{inside}{whole},"]
        return [*told, f"{indent}){end}"]


def _policy(name: str, changed: Mapping[str, Any]) -> _Call:
    values = {field: json.dumps(value) if type(value) is str else repr(value) for field, value in changed.items()}
    return _Call(f"{name.lower()}=zeroshard.{name}", [f"{field}={value}" for field, value in values.items()])


def _shard(*arguments: str | _Call) -> str:
    return "\n".join(_Call("zero = zeroshard.shard", ["model", "optimizer", *arguments]).lines())
