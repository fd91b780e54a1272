"""tests/trust-table.md and the suite say the same: every row has tests that exist, or a limit that is stated."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("trust", ROOT / "docs" / "trust.py")
TRUST = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(TRUST)
PAGE = TRUST.PAGE.read_text()


@pytest.mark.parametrize("row", TRUST.ROWS)
def test_every_row_has_tests_or_a_limit(row):
    """Where the suite has nothing, the row says `limit:` and why."""
    line = TRUST.told(PAGE)[row]
    assert re.search(r"`test_\w+\.test_\w+`", line) or "limit:" in line


def test_the_page_names_the_tests_of_every_row_and_no_others():
    assert TRUST.written(PAGE) == PAGE, "python docs/trust.py"


def test_the_rows_are_those_of_the_table_in_order():
    assert list(TRUST.told(PAGE)) == list(TRUST.ROWS)


def test_the_readme_says_how_many_there_are():
    assert f"{len(TRUST.ROWS)} faults and promises" in (ROOT / "README.md").read_text()
