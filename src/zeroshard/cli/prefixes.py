"""Tensors of a checkpoint by the prefixes of their names: as a tree that fits a screen, or those of one prefix.

blocks.0.attn.weight, blocks.1.attn.weight, head.weight  ->  blocks.*  2 tensors    head.weight  1 tensor
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from rich.markup import escape
from rich.table import Table

from zeroshard.cli import screen
from zeroshard.cli.config import InputError

SCREEN = 24  # rows; of more tensors their tree is shown
Parts = tuple[str, ...]


class PrefixSums(NamedTuple):
    """Tensors, elements and bytes under one prefix."""

    tensors: int = 0
    numel: int = 0
    nbytes: int = 0

    def plus(self, other: PrefixSums) -> PrefixSums:
        return PrefixSums(*(a + b for a, b in zip(self, other, strict=True)))


def under(prefix: str, names: Sequence[str]) -> bool:
    """Tell if one of a tensor's names is below a prefix, whose parts may be patterns: "blocks.*.attn"."""
    parts = prefix.rstrip(".").split(".")
    return any(
        len(name) >= len(parts) and all(map(fnmatchcase, name, parts)) for name in (each.split(".") for each in names)
    )


def only(facts: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Leave parameters and buffers below a prefix in what `describe` says. Raises `InputError` where there are none."""
    parameters = [each for each in facts["parameters"] if under(prefix, each["names"])]
    buffers = [each for each in facts["buffers"] if under(prefix, [each["name"]])]
    if not parameters and not buffers:
        names = [each["name"] for each in (*facts["parameters"], *facts["buffers"])]
        known = sorted(".".join(parts) for parts in tree({name: PrefixSums(1) for name in names}))
        close = ", ".join(get_close_matches(prefix, known, 3, cutoff=0.0))
        raise InputError(f"{facts['path']}: no tensor's name begins with {prefix!r}; instead: {close}")
    return {**facts, "prefix": prefix, "parameters": parameters, "buffers": buffers}


def tree(tensors: Mapping[str, PrefixSums]) -> dict[Parts, PrefixSums]:
    """Sum tensors by prefix, as deep as fits a screen. All numbers of layers are one row, "*"; a chain is one, too."""
    layers: dict[Parts, set[str]] = {}
    for parts in map(_parts, tensors):
        for at, part in enumerate(parts):
            layers.setdefault(parts[:at], set()).update({part} if part.isdecimal() else ())
    sums: dict[Parts, PrefixSums] = {}
    for name, held in tensors.items():
        parts = _parts(name)
        starred = tuple("*" if part in layers[parts[:at]] and len(layers[parts[:at]]) > 1 else part
                        for at, part in enumerate(parts))  # fmt: skip
        for depth in range(1, len(parts) + 1):
            sums[starred[:depth]] = sums.get(starred[:depth], PrefixSums()).plus(held)
    rows: dict[Parts, PrefixSums] = {}
    for depth in range(1, 1 + max(map(len, sums), default=0)):
        deeper = {parts: held for parts, held in sums.items() if len(parts) <= depth}
        chained = {parts[:-1] for parts, held in deeper.items() if sums.get(parts[:-1]) == held}
        deeper = {parts: held for parts, held in deeper.items() if parts not in chained}
        if rows and len(deeper) > SCREEN:
            break
        rows = deeper
    return rows


def _parts(name: str) -> Parts:
    return tuple(name.split("."))


def table_of(title: str, tensors: Mapping[str, PrefixSums]) -> Table:
    """Make the table of a tree."""
    table = screen.new_table(title, "name", "tensors", "parameters", "bytes")
    for parts, held in tree(tensors).items():
        table.add_row(escape(".".join(parts)), *(f"{number:,}" for number in held))
    return table
