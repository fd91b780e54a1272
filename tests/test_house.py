"""The house rules that a machine can check; `make check` runs this file beside ruff and mypy."""

import ast
import re
import subprocess
import sys
import tokenize
import zipfile
from pathlib import Path

import pytest

import zeroshard

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "zeroshard"
PUBLIC = ["Comm", "Error", "Layout", "Offload", "Precision", "Zero", "load", "plan", "shard"]
CAPS = {"core": 5300, "storage": 2200}  # lines: see docs/decisions/core-size.md
STORAGE = {"workplace", "files", "manifest", "checkpoint", "saving", "loading", "tier", "nvme"}
NOT_LAYERS = {"__init__", "__main__"}


def reading_order():
    """The core's files, top layer of the imports first, as CONTRIBUTING lists them for people."""
    listed = (ROOT / "CONTRIBUTING.md").read_text().split("which is also the order to read it in:")[1]
    return re.findall(r"`(\w+)\.py`", listed)


ORDER = reading_order()


def imported(path):
    """Every module that `path` imports, functions included, type-checking blocks not: {"torch", "zeroshard.comm"}."""
    tree = ast.parse(path.read_text())
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    names = set()
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = "zeroshard." * bool(node.level) + (node.module or "")
            names |= {base} if node.module else {base + alias.name for alias in node.names}
    return names


def code_lines(path):
    """Lines of a file that hold code: comments, blank lines and docstrings do not count."""
    prose = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    with path.open("rb") as file:
        tokens = [token for token in tokenize.tokenize(file.readline) if token.type not in prose | {tokenize.ENCODING}]
    lines = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(path.read_text())):
        documented = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        if documented and ast.get_docstring(node) is not None:
            lines -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(lines)


def test_the_reading_order_names_every_file_of_the_core():
    assert sorted(path.stem for path in PACKAGE.glob("*.py") if path.stem not in NOT_LAYERS) == sorted(ORDER)


@pytest.mark.parametrize("name", ORDER)
def test_a_layer_imports_only_what_stands_above_it(name):
    ours = {module.removeprefix("zeroshard.") for module in imported(PACKAGE / f"{name}.py") if "zeroshard" in module}
    outside = {"integrations", "explain"} if name == "api" else set()  # imported by the methods of Zero that need them
    assert ours - set(ORDER[: ORDER.index(name)]) - outside == set()


def test_one_file_calls_torch_distributed():
    users = {name for name in ORDER if any("distributed" in module for module in imported(PACKAGE / f"{name}.py"))}
    assert users == {"process_group"}


def test_layout_is_pure():
    """It imports nothing but the standard library and the exceptions."""
    assert {name.split(".")[0] for name in imported(PACKAGE / "layout.py")} <= sys.stdlib_module_names | {"zeroshard"}


@pytest.mark.parametrize("part", CAPS)
def test_size_cap(part):
    counts = {name: code_lines(PACKAGE / f"{name}.py") for name in ORDER if (name in STORAGE) == (part == "storage")}
    assert sum(counts.values()) <= CAPS[part], counts


def test_public_names():
    """What users may rely on grows only with a decision note."""
    assert sorted(zeroshard.__all__) == PUBLIC == sorted(dir(zeroshard))
    assert all(getattr(zeroshard, name).__name__ == name for name in PUBLIC)


@pytest.mark.parametrize("module", ["zeroshard", "zeroshard.layout", "zeroshard.planner.plan", "zeroshard.cli.main"])
def test_importing_does_not_load_torch(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_a_stage_is_data():
    """No name of that kind outside the table, the public call and what prints it."""
    for name in set(ORDER) - {"stage", "api", "assembly", "preflight", "checkpoint", "saving"}:
        nodes = ast.walk(ast.parse((PACKAGE / f"{name}.py").read_text()))
        names = {getattr(node, field, None) for node in nodes for field in ("id", "attr", "arg")}
        assert "stage" not in names, name


def test_nothing_is_left_unfinished_and_no_path_is_one_machines():
    unfinished = re.compile(
        r"\b(TO" + r"DO|FIX" + r"ME|X" + r"XX|NotImpl" + r"emented\w*)\b|(?<!\w)/(root|home|work)/\w"
    )
    folders = [PACKAGE, *(ROOT / name for name in ("tests", "examples", "docs", ".ci"))]
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in {".py", ".md", ""}]
    for path in [*files, *(path for path in ROOT.glob("*.*") if path.name != ".git"), ROOT / "Makefile"]:
        if (
            path.is_file()
            and "__pycache__" not in path.parts
            and not any(part.endswith("_cache") for part in path.parts)
        ):
            assert unfinished.findall(path.read_text()) == [], path


def test_the_wheel_is_pure_and_typed(tmp_path):
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, timeout=60, check=True, capture_output=True)
    (wheel,) = tmp_path.iterdir()
    assert wheel.name == f"zeroshard-{zeroshard.__version__}-py3-none-any.whl"
    packed = set(zipfile.ZipFile(wheel).namelist())
    assert {f"zeroshard/{path.relative_to(PACKAGE)}" for path in PACKAGE.rglob("*.py")} <= packed
    assert {"zeroshard/py.typed", "zeroshard/explain/page.html", "zeroshard/explain/walkthroughs.json"} <= packed
