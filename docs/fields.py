"""For the API reference: the fields that a docstring explains, `name: what it is` line by line, as a table.

A field begins a line, and the lines that go on with it are indented. `stage, layout: as in shard` is a row for each.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

FIELD = re.compile(r"(?m)^(\w+(?:, \w+)*): .*(?:\n +.*)*\n?")


class Fields(griffe.Extension):
    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        self._table(cls, {parameter.name for parameter in cls.parameters} | set(cls.members))

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        self._table(func, {parameter.name for parameter in func.parameters})

    def _table(self, told: griffe.Object, names: set[str]) -> None:
        """Put the fields under `Arguments:`, which the page renders as a table, where the first of them stands."""
        if not told.docstring:
            return
        text = told.docstring.value
        found = [each for each in FIELD.finditer(text) if {*each[1].split(", ")} <= names]
        if not found:
            return
        rows = [(name, each[0].partition(": ")[2]) for each in found for name in each[1].split(", ")]
        table = "".join(f"{name}: {about.rstrip()}\n" for name, about in rows)
        table = "".join(f"    {line}\n" for line in table.splitlines())
        for each in reversed(found):
            text = text[: each.start()] + "\0" * (each is found[0]) + text[each.end() :]
        told.docstring.value = text.replace("\0", f"\nArguments:\n{table}\n")
