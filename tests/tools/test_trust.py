"""docs/trust.md and the suite say the same: every row has tests that exist, or a limit that is stated."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "trust.md"
ROWS = range(1, 108)


@functools.cache
def marked() -> dict[int, set[str]]:
    """Row -> the tests that prove it, as `file.test`: by a name with rowN in it, or by `@pytest.mark.row(N, ...)`."""
    found: dict[int, set[str]] = {row: set() for row in ROWS}
    for path in (ROOT / "tests").rglob("test_*.py"):
        for node in ast.parse(path.read_text()).body:
            if not (isinstance(node, ast.FunctionDef) and node.name.startswith("test_")):
                continue
            rows = {int(number) for number in re.findall(r"row_?(\d+)(?=_)", node.name)}
            for decorator in node.decorator_list:
                if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.row":
                    rows |= {argument.value for argument in decorator.args}
            for row in rows:
                found[row].add(f"{path.stem}.{node.name}")
    return found


def told() -> dict[int, str]:
    """Row -> its line in the page."""
    return {int(line.split("|")[1]): line for line in PAGE.read_text().splitlines() if re.match(r"\| \d+ \|", line)}


@pytest.mark.parametrize("row", ROWS)
def test_the_page_names_the_tests_of_every_row_and_no_others(row):
    """What the last column lists is what the suite has; where it has nothing, the row says `limit:` and why."""
    line = told()[row]
    named = set(re.findall(r"`(test_\w+\.test_\w+)`", line))
    assert named == marked()[row]
    assert named or "limit:" in line, f"row {row} has neither a test nor a limit"


def test_the_rows_are_those_of_the_table_in_order():
    assert list(told()) == list(ROWS)


def test_the_readme_says_how_many_there_are():
    assert f"{len(ROWS)} faults and promises" in (ROOT / "README.md").read_text()
