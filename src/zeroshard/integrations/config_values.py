"""Readers of values in other systems' configs, and what may become of a key: the table is `config_keys.py`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch

from ..errors import UserError, nearest

AUTO = "auto"
DTYPES = {
    torch.float32: ("fp32", "float32", "float", "torch.float32"),
    torch.bfloat16: ("bf16", "bfloat16", "torch.bfloat16"),
    torch.float16: ("fp16", "float16", "half", "torch.float16"),
}


@dataclass
class Draft:
    """Settings read so far. Policies are built at the end, since keys depend on each other."""

    where: str
    stage: int | None = None
    policies: dict[str, dict[str, Any]] = field(
        default_factory=lambda: {"precision": {}, "offload": {}, "layout": {}, "comm": {}}
    )
    loop: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)  # values that settings are decided from once all keys are read
    notes: list[str] = field(default_factory=list)


class Key(NamedTuple):
    """One key: `says` is its line in the documents, `take` reads its value."""

    how: Literal["mapped", "ignored", "refused"]
    says: str
    take: Callable[[Draft, str, Any], None] | None = None
    auto: bool = True  # may a trainer fill it in?


# --- values -----------------------------------------------------------------------------------------------------------


def wrong(draft: Draft, key: str, value: object, expected: str, instead: str | None = None) -> UserError:
    return UserError(
        "a setting has a value that it cannot have", where=f"{key} in {draft.where}", expected=expected,
        got=repr(value)[:200], instead=instead,
    )  # fmt: skip


def flag(draft: Draft, key: str, value: Any) -> bool:
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if type(value) is not bool:
        raise wrong(draft, key, value, "true or false")
    return value


def number(draft: Draft, key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise wrong(draft, key, value, "a number, 0 or more")
    return float(value)


def count(draft: Draft, key: str, value: Any) -> int:
    """Read a whole number of 0 or more, which DeepSpeed also writes as 5e8."""
    if number(draft, key, value) != int(value):
        raise wrong(draft, key, value, "a whole number")
    return int(value)


def positive(draft: Draft, key: str, value: Any) -> int:
    if count(draft, key, value) < 1:
        raise wrong(draft, key, value, "1, 2, ...")
    return int(value)


def text(draft: Draft, key: str, value: Any) -> str:
    if not isinstance(value, str):
        raise wrong(draft, key, value, "text")
    return value


def dtype(draft: Draft, key: str, value: Any) -> torch.dtype | None:
    if value is None:
        return None
    found = [kind for kind, names in DTYPES.items() if value in names]
    if not found:
        raise wrong(draft, key, value, ", ".join(names[0] for names in DTYPES.values()))
    return found[0]


def one_of(draft: Draft, key: str, value: Any, choices: Mapping[str, Any]) -> Any:
    if not isinstance(value, str) or value not in choices:
        raise wrong(draft, key, value, " or ".join(choices), nearest(value, choices))
    return choices[value]


# --- what becomes of a key --------------------------------------------------------------------------------------------


def policy(name: str, setting: str, read: Callable[[Draft, str, Any], Any], says: str) -> Key:
    """Map a key to one field of a policy; null leaves the field's default."""

    def take(draft: Draft, key: str, value: Any) -> None:
        if value is not None:
            draft.policies[name][setting] = read(draft, key, value)

    return Key("mapped", says, take)


def loop(name: str, read: Callable[[Draft, str, Any], Any], says: str) -> Key:
    """Map a key to something that the training loop does itself."""

    def take(draft: Draft, key: str, value: Any) -> None:
        if value is not None:
            draft.loop[name] = read(draft, key, value)

    return Key("mapped", says, take)


def fact(name: str, read: Callable[[Draft, str, Any], Any], says: str, *, auto: bool = True) -> Key:
    """Map a key to a fact, from which settings are decided once all keys are read."""

    def take(draft: Draft, key: str, value: Any) -> None:
        if value is not None:
            draft.facts[name] = read(draft, key, value)

    return Key("mapped", says, take, auto)


def ignored(why: str) -> Key:
    return Key("ignored", why)


def refused(what: str, instead: str, *off: Any) -> Key:
    """Make a key an error, unless its value is null, empty, not enabled or one of `off`."""

    def take(draft: Draft, key: str, value: Any) -> None:
        empty = isinstance(value, Mapping) and (not value or value.get("enabled", True) is False)
        if value is None or empty or any(value == each and type(value) is type(each) for each in off):
            return
        raise UserError(what, where=f"{key} in {draft.where}", got=repr(value)[:200], instead=instead)

    return Key("refused", f"{what}. {instead}", take, auto=False)
