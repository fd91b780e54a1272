"""Numbers as people write them, `7B` parameters and `80GiB` of memory, and as they are shown."""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction

from ..errors import UserError

UNITS = {
    **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", start=1)},
    **{f"{letter}B": 1000**power for power, letter in enumerate("KMGT", start=1)},
}


def budget(text: str, name: str = "gpu_mem") -> int:
    """Parse `80GiB` -> 85899345920. Units are KiB, MiB, GiB, TiB (powers of 1024) and KB, MB, GB, TB (powers of 1000).

    name: of the argument, for the error.
    """
    what = f"{name}: a budget of memory is a number and a unit"
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", str(text))
    amount, unit = match.groups() if match else ("80", "")
    if match and not Fraction(amount):
        raise UserError(f"{name}: a budget of memory is at least one byte", got=repr(text), instead="80GiB")
    if match and unit in ("", "B"):
        gib = float(amount) / 2**30  # 2**20 or more can only be bytes: nobody has so many GiB
        binary = f"{gib:.6f}".rstrip("0").rstrip(".") + "GiB"
        raise UserError(
            what, got=repr(text), instead=binary if gib >= 2**-10 else f"{amount}GiB, or {amount}GB"
        )  # fmt: skip
    if not match or unit not in UNITS:
        letter = unit[:1].upper()
        letter = letter if letter in "KMGT" and letter else "G"
        meant = [f"{amount}{letter}iB", f"{amount}{letter}B"]
        if len(unit) == 2:
            meant.reverse()
        raise UserError(
            what,
            got=repr(text),
            instead=f"{meant[0]}, or {meant[1]} ({letter}iB = 1024^{'KMGT'.index(letter) + 1} bytes, "
            f"{letter}B = 1000^{'KMGT'.index(letter) + 1})",
        )
    nbytes = int(Fraction(amount) * UNITS[unit])
    if nbytes < 1:
        raise UserError(f"{name}: a budget of memory is at least one byte", got=repr(text), instead="80GiB")
    return nbytes


POWERS = {"": 0, "k": 3, "m": 6, "b": 9, "t": 12}
COUNT_LIMIT = Decimal("1e24")  # far beyond any model, and what is shown stays on a line
COUNT = re.compile(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?(?:e[+-]?[0-9]{1,3})?)\s*([kmbt]?)\s*", re.IGNORECASE)


def count(text: str | float, name: str = "params") -> int:
    """Parse `7B`, `7e9` or `7_000_000_000` -> 7000000000. Raises `UserError` unless positive and whole.

    K, M, B and T are 10^3, 10^6, 10^9 and 10^12, in either case. name: of the argument, for the error.
    """
    match = COUNT.fullmatch(str(text))
    amount = Decimal(match[1]).scaleb(POWERS[match[2].lower()]) if match else Decimal()
    if not 0 < amount < COUNT_LIMIT or amount != amount.to_integral_value():
        giga = re.fullmatch(r"\s*([0-9.]*[0-9])\s*[gG]\w*\s*", str(text))
        raise UserError(
            f"{name}: a positive whole number is wanted",
            expected=f"below {COUNT_LIMIT:.0e}" if amount >= COUNT_LIMIT else None,
            got=repr(text),
            instead=f"{giga[1]}B" if giga else "7B, 350M, 7e9 or 7_000_000_000",
        )
    return int(amount)


def whole(name: str, value: object, most: int) -> None:
    """Refuse a value that is no whole number from 1 to `most`. name: of an argument, or a field: "Machine.ranks"."""
    kind, _, field = name.rpartition(".")
    before, after = (f"{kind}({field}=", ")") if kind else (f"{name}=", "")
    if type(value) is not int or value < 1:
        instead = f"{before}1{after}"
        raise UserError(f"{name} must be a whole number of at least 1", got=repr(value), instead=instead)
    if value > most:
        raise UserError(f"{name} must be at most {most}", got=repr(value), instead=f"{before}{most}{after}")


def size(nbytes: int) -> str:
    """Format `15.85 GB`, and `7.00 MB` of less than a gigabyte."""
    return f"{nbytes / 10**9:,.2f} GB" if nbytes >= 10**9 else f"{nbytes / 10**6:,.2f} MB"


def plain(value: Fraction | int) -> int | float:
    """Return an integer where the value is one, else a float, for JSON."""
    return int(value) if value == int(value) else float(value)


def number(value: Fraction | int) -> str:
    """Format `12`, `4.1875`: exactly where six decimals are enough for that, else to six digits."""
    for decimals in range(7):
        if (value * 10**decimals).denominator == 1:
            return f"{float(value):.{decimals}f}"
    return f"{float(value):.6g}"
