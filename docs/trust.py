"""Write into tests/trust-table.md which tests prove each row, by `@pytest.mark.row(N)`. `make docs` runs it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "tests" / "trust-table.md"
ROWS = range(1, 112)
NAMED = re.compile(r"`test_\w+\.test_\w+`(, )?")


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
                    rows |= {ast.literal_eval(argument) for argument in decorator.args}
            for row in rows:
                found[row].add(f"{path.stem}.{node.name}")
    return found


def told(page: str) -> dict[int, str]:
    """Row -> its line in the page."""
    return {int(line.split("|")[1]): line for line in page.splitlines() if re.match(r"\| \d+ \|", line)}


def written(page: str) -> str:
    """The page, its last column as the suite has it."""
    tests = marked()
    for row, line in told(page).items():
        cells, last = line[:-2].rsplit("| ", 1)
        beside = NAMED.sub("", last).strip()
        names = ", ".join(f"`{name}`" for name in sorted(tests[row]))
        page = page.replace(line, f"{cells}| {' '.join(filter(None, (names, beside)))} |")
    return page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
