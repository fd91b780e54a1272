"""For the API reference: the fields that a policy's docstring explains, `name: what it is` line by line, as a list."""

from __future__ import annotations

import re
from typing import Any

import griffe

FIELD = re.compile(r"^(\w+): ", re.MULTILINE)


class Fields(griffe.Extension):
    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        if "dataclass" in cls.labels:
            self._list(cls, set(cls.members))

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        self._list(func, {parameter.name for parameter in func.parameters})

    def _list(self, told: griffe.Object, names: set[str]) -> None:
        if told.docstring:
            told.docstring.value = FIELD.sub(
                lambda match: f"\n- **`{match[1]}`**: " if match[1] in names else match[0], told.docstring.value
            )
