"""Numbers as people write them, `7B` parameters and `80GiB` of memory, and as they are shown."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from fractions import Fraction

from ..errors import UserError

UNITS = {
    **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", start=1)},
    **{f"{letter}B": 1000**power for power, letter in enumerate("KMGT", start=1)},
}


def budget(text: str) -> int:
    """`80GiB` -> 85899345920. Units are KiB, MiB, GiB, TiB (powers of 1024) and KB, MB, GB, TB (powers of 1000)."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", str(text))
    amount, unit = match.groups() if match else ("80", "")
    if match and unit in ("", "B"):
        raise UserError(
            "a budget of memory is a number and a unit", got=repr(text),
            instead=f"{float(amount) / 2**30:.6g}GiB" if float(amount) >= 2**20 else f"{amount}GiB, or {amount}GB",
        )  # fmt: skip
    if not match or unit not in UNITS:
        letter = unit[:1].upper()
        letter = letter if letter in "KMGT" and letter else "G"
        meant = [f"{amount}{letter}iB", f"{amount}{letter}B"]
        if len(unit) == 2:
            meant.reverse()
        raise UserError(
            "a budget of memory is a number and a unit",
            got=repr(text),
            instead=f"{meant[0]}, or {meant[1]} ({letter}iB = 1024^{'KMGT'.index(letter) + 1} bytes, "
            f"{letter}B = 1000^{'KMGT'.index(letter) + 1})",
        )
    nbytes = int(Fraction(amount) * UNITS[unit])
    if nbytes < 1:
        raise UserError("a budget of memory must be at least one byte", got=repr(text), instead="80GiB")
    return nbytes


def count(text: str | float, name: str = "params") -> int:
    """A number of parameters: `7e9`, `6738415616`, 7_000_000. Raises `UserError` unless positive and whole."""
    try:
        amount = Decimal(str(text).strip())
    except InvalidOperation:
        amount = Decimal("NaN")
    # A limit far beyond any model: `1e999999999` would otherwise be written out digit by digit.
    if not amount.is_finite() or not 0 < amount < Decimal("1e24") or amount != amount.to_integral_value():
        raise UserError(f"{name} must be a positive whole number", got=repr(text), instead=_meant(str(text)))
    return int(amount)


def _meant(text: str) -> str:
    match = re.fullmatch(r"\s*([0-9.]*[0-9])\s*([kKmMbBgGtT])\w*\s*", text)
    powers = {"k": 3, "m": 6, "b": 9, "g": 9, "t": 12}
    return f"{match[1]}e{powers[match[2].lower()]}" if match else "7e9"


def plain(value: Fraction | int) -> int | float:
    """For JSON: an integer where it is one."""
    return int(value) if value == int(value) else float(value)


def number(value: Fraction | int) -> str:
    """`12`, `4.1875`: exact where six decimals are enough for that, else six digits."""
    for decimals in range(7):
        if (value * 10**decimals).denominator == 1:
            return f"{float(value):.{decimals}f}"
    return f"{float(value):.6g}"
