"""Descriptions of the fields of settings: the values that each takes, and the error for any other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, get_args

from .errors import UserError, nearest


class Field(NamedTuple):
    """One field: which values it takes, and how a user hears that a value is none of them."""

    takes: Callable[[Any], bool]
    says: str  # the error's first line: this after the field's name
    expected: str | None = None
    instead: Callable[[Any], str | None] = lambda given: None

    def check(self, name: str, given: Any) -> None:
        """Raise `UserError` for a value that the field of this name does not take."""
        if not self.takes(given):
            what = f"{name} {self.says}"
            raise UserError(what, expected=self.expected, got=repr(given), instead=self.instead(given))

    def or_none(self) -> Field:
        """Return this field with None allowed too, which means that nothing was asked."""
        return self._replace(takes=lambda given: given is None or self.takes(given))


FLAG = Field(lambda given: type(given) is bool, "must be True or False", "True or False")


def one_of(kind: Any, says: str = "has no such value") -> Field:
    """Make a field that takes one of the words of a `Literal`."""
    words: tuple[str, ...] = get_args(kind)
    return Field(
        lambda given: isinstance(given, str) and given in words, says, instead=lambda given: nearest(given, words)
    )


def count(least: int, says: str, instead: str, expected: str | None = None) -> Field:
    """Make a field that takes whole numbers from `least` on."""
    expected = expected or f"{least}, {least + 1}, {least + 2}, ..."
    return Field(lambda given: type(given) is int and given >= least, says, expected, lambda _: instead)


def number(above: float, most: float, says: str, instead: str) -> Field:
    """Make a field that takes numbers greater than `above`, up to `most`."""

    def takes(given: Any) -> bool:
        return isinstance(given, (int, float)) and not isinstance(given, bool) and above < given <= most

    return Field(takes, says, instead=lambda _: instead)


def is_patterns(given: Any) -> bool:
    """Tell a list or tuple of names and patterns from anything else."""
    return isinstance(given, (list, tuple)) and all(isinstance(each, str) for each in given)


def python_number(value: Any) -> Any:
    """Return a number of NumPy's as Python's; anything else as it is."""
    return value.item() if type(value).__module__ == "numpy" and getattr(value, "shape", None) == () else value


def check_fields(settings: object, fields: Mapping[str, Field]) -> None:
    """Raise `UserError` for the first field of some settings whose value it does not take."""
    for name, field in fields.items():
        field.check(f"{type(settings).__name__}.{name}", getattr(settings, name))


def check_flag(name: str, given: object) -> None:
    """Raise `UserError` for an argument that is neither True nor False."""
    FLAG.check(f"{name}=", given)
