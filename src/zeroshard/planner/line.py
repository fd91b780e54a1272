"""The call of `shard` that does what a plan says, as text to paste. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, NamedTuple

from .question import spelled

if TYPE_CHECKING:
    from .fitting import Fit

LONGEST = 80  # columns of a line to paste


class Word(str):
    """Python text that stands for itself: torch is not loaded for plans of numbers."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def changed(policy: Any) -> dict[str, Any]:
    """Return the fields of a policy that are not its defaults."""
    plain = type(policy)()
    told = {each.name: getattr(policy, each.name) for each in fields(policy)}
    return {name: value for name, value in told.items() if value != getattr(plain, name)}


class Call(NamedTuple):
    """A call to write: `name(argument, ...)`, whose arguments are texts, or calls with what stands before them."""

    name: str
    arguments: list[Any]

    def on_one_line(self) -> str:
        inside = (each.on_one_line() if isinstance(each, Call) else each for each in self.arguments)
        return f"{self.name}({', '.join(inside)})"

    def lines(self, indent: str = "", end: str = "") -> list[str]:
        """Write it: on one line, or where that is too long with as many arguments on each as fit."""
        if len(line := f"{indent}{self.on_one_line()}{end}") <= LONGEST:
            return [line]
        inside, told = indent + "    ", [f"{indent}{self.name}("]
        for each in self.arguments:
            whole = each.on_one_line() if isinstance(each, Call) else each
            if len(told) > 1 and len(told[-1]) + 2 + len(whole) <= LONGEST:
                told[-1] += f" {whole},"
            else:
                told += each.lines(inside, ",") if isinstance(each, Call) else [f"{inside}{whole},"]
        return [*told, f"{indent}){end}"]


def policy(name: str, told: Mapping[str, Any]) -> Call:
    """Write a policy as an argument: `offload=zeroshard.Offload(...)`."""
    values = {field: value if isinstance(value, Word) else spelled(value) for field, value in told.items()}
    return Call(f"{name.lower()}=zeroshard.{name}", [f"{field}={value}" for field, value in values.items()])


def shard(*arguments: str | Call) -> str:
    """Write the call with these arguments beside model and optimizer."""
    return "\n".join(Call("zero = zeroshard.shard", ["model", "optimizer", *arguments]).lines())


def of_fit(fit: Fit, layout: Mapping[str, Any], comm: Mapping[str, Any]) -> str | None:
    """Write the call that makes a way that fits; None where no `Precision` is known for its numbers.

    layout, comm: fields of these policies that the question has. An optimizer that the way needs stands before it.
    """
    way = fit.way
    if way.numbers.precision is None:
        return None
    offload = {} if way.offload is None else changed(way.offload)
    told = {
        "Precision": _words(way.numbers.precision),
        "Layout": {**layout, **_words(way.layout(fit.unit_nbytes))},
        "Comm": {**comm, **_words(way.comm)},
        "Offload": offload,
    }
    arguments: list[str | Call] = [f"stage={way.stage}", *(policy(name, each) for name, each in told.items() if each)]
    if way.in_backward:
        arguments.append("optimizer_in_backward=True")
    before = [] if way.numbers.optimizer is None else [f"optimizer = {way.numbers.optimizer}"]
    return "\n".join([*before, shard(*arguments)])


def _words(told: Mapping[str, str]) -> dict[str, Word]:
    return {name: Word(text) for name, text in told.items()}
