"""The ways that fit a machine, as `zeroshard plan` shows them: the fastest, what others give up, and what to buy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.markup import escape

from zeroshard.cli import screen
from zeroshard.cli.policies import comm_of, layout_of
from zeroshard.cli.screen import Amount
from zeroshard.planner.answer import Plan
from zeroshard.planner.fitting import UNTOLD, Fit, Fitting, Found, Need
from zeroshard.planner.line import changed, of_fit


def fits_sentence(found: Plan, fitting: Fitting, amount: Amount) -> str:
    """Return the answer in a sentence: the fastest way that fits, or why none does."""
    best, per = fitting.best, f"on each of {found.ranks:,} ranks" if found.ranks > 1 else "on one rank"
    first = fitting.found[0]
    if best is None:
        buys = " or ".join(what for what, _ in first.buys) or "a larger GPU"
        return f"[bold red]Nothing fits[/bold red] {per}: {escape(str(first.proof))}. What would help: {escape(buys)}."
    unit, way = amount.unit, str(best.way)
    numbers = ""
    if not first.fits:
        numbers = f"With other numbers only, {best.way.numbers.heading}: "
        way = way[0].lower() + way[1:]
    return (
        f"[bold green]{escape(numbers)}{escape(way[0].upper() + way[1:] if not numbers else way)}[/bold green]: the "
        f"fastest that fits {per}, {within(best)} a step, bound by {best.times.binds}; "
        f"{amount(best.need.device)} of {amount(fitting.most.device)} {unit} on the device"
        f"{_there(best.need, amount)}, with activations of {_tokens(fitting)}."
    )


def show_line(fit: Fit | None, options: Mapping[str, Any]) -> None:
    """Print the call of `shard` that makes a way, where one is known."""
    line = None if fit is None else of_fit(fit, changed(layout_of(options)), changed(comm_of(options)))
    if line is not None:
        screen.console.print()
        screen.console.print(line, markup=False, style="cyan", soft_wrap=True)


def show_fits(found: Plan, fitting: Fitting, options: Mapping[str, Any], amount: Amount) -> None:
    """Print all that was found: ways with the same numbers, then with others, each with its line."""
    most = fitting.most
    there = [f"{amount(most.device)} {amount.unit} of the device"]
    if most.host != UNTOLD:
        there.append(f"{amount(most.host)} of host memory")
    if 0 < most.files < UNTOLD:
        there.append(f"{amount(most.files)} of a disk")
    screen.say(f"[bold]What fits into {_and(there)}, for each rank[/bold]")
    for each in fitting.found:
        _show_kind(each, fitting, options, amount)
    for note in _assumed(found, fitting):
        screen.say(f"  [dim]{escape(note)}[/dim]")
    screen.console.print()


def _show_kind(each: Found, fitting: Fitting, options: Mapping[str, Any], amount: Amount) -> None:
    same = "the numbers that were asked for" if not each.heading else f"other numbers: {each.heading}"
    screen.say(f"\n[bold]{same[0].upper() + same[1:]}[/bold]")
    for fit in each.fits:
        first = each.fits[0]
        screen.say(f"  {escape(str(fit.way))}", 4)
        more = "" if fit is first else _later(fit.times.middle - first.times.middle)
        written = f"; {fit.written / 1e12:.3g} TB written in a day" if fit.written else ""
        screen.say(
            f"    {within(fit)} a step{more}, bound by {fit.times.binds}; {amount(fit.need.device)} {amount.unit} on "
            f"the device{_there(fit.need, amount)}{written}",
            6,
        )
        if fit is not fitting.best:
            show_line(fit, options)
            screen.console.print()
    if each.fastest is not None:
        over = _lacking(each.fastest.need, fitting.most, amount)
        screen.say(
            f"  faster ways do not fit: the fastest, {escape(str(each.fastest.way))}, takes "
            f"{_digits(each.fastest.times.middle)} s a step and {over}",
            4,
        )
    if each.proof is not None:
        screen.say(f"  nothing fits: {escape(each.proof)}", 4)
        for what, fit in each.buys:
            screen.say(f"  with {what}: {escape(str(fit.way))}, {within(fit)} a step", 4)
        if not each.buys:
            screen.say("  no host memory, disk or few more GPUs would help: a larger GPU, or a smaller model")


def _assumed(found: Plan, fitting: Fitting) -> list[str]:
    told = "" if fitting.told else ", assumed: --batch and --seq say others"
    formula = f"{told}; by the formula of Korthikanti et al. 2022, with attention that keeps no scores"
    said = [
        f"activations of {_tokens(fitting)} at once{', simulated' if fitting.tokens is None else formula}",
        "times: from the least to the most by assumed constants of this GPU, its bus, host memory and the disk",
    ]
    if fitting.most.host == UNTOLD:
        said.append("host memory is taken to suffice: --host-mem says how much there is")
    if not fitting.most.files:
        said.append("no disk is told: --disk 1TB lets states rest in files")
    elif found.disk is not None:
        known = "assumed; --disk-read and --disk-write say others" if found.disk.assumed else "as it is told"
        rates = f"{found.disk.read / 1e9:.3g} GB/s read, {found.disk.write / 1e9:.3g} written"
        said.append(f"the disk's speed, {rates}: {known}")
    best = fitting.best
    if best is not None and best.way.step == "host":
        said.append(
            "the host steps: the CPU's AdamW rounds otherwise than the GPU's, so bits are equal at every stage, "
            "but not those of states on the device"
        )
    if any(fit.way.in_backward for each in fitting.found for fit in each.fits):
        said.append("with the optimizer in backward nothing is clipped, and a step has one backward")
    return said


def _tokens(fitting: Fitting) -> str:
    return "the job's micro-batch" if fitting.tokens is None else f"{fitting.tokens:,} tokens"


def _lacking(need: Need, most: Need, amount: Amount) -> str:
    parts = {"on the device": (need.device, most.device), "of host memory": (need.host, most.host)}
    parts["in files"] = need.files, most.files
    return _and([
        f"{amount(mine)} {amount.unit} {where} where there are {amount(there)}"
        for where, (mine, there) in parts.items() if mine > there
    ])  # fmt: skip


def _there(need: Need, amount: Amount) -> str:
    parts = {"in host memory": need.host, "in files": need.files}
    return "".join(f", {amount(nbytes)} {where}" for where, nbytes in parts.items() if nbytes)


def within(fit: Fit) -> str:
    """Write the range of a step's time: `0.16 to 0.41 s`."""
    return f"{_digits(fit.times.least)} to {_digits(fit.times.most)} s"


def _later(seconds: float) -> str:
    return f", {_digits(seconds)} s more than the first" if seconds else ", as the first"


def _digits(seconds: float) -> str:
    """Write two digits, and more where they stand before the point."""
    return f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.2g}"


def _and(words: list[str]) -> str:
    return " and ".join(words)
