"""Write lists into docs/architecture.md: rooms from docstrings, features from manifests. `make docs` runs it."""

from __future__ import annotations

import ast
import functools
import graphlib
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "zeroshard"
ARCHITECTURE = ROOT / "docs" / "architecture.md"
FEATURES = ": features"

# The core's rooms, from the bottom up: a file imports from its own room and from those before it. "" has files on top.
ROOMS = (
    "", "layout", "arithmetic", "policies", "comm", "tiers", "kernels",
    "engine/weights", "engine/gradients", "engine/step", "engine/build", "engine", "features", "checkpoint",
)  # fmt: skip
ABOVE = {"reference.py": "engine", "api.py": "checkpoint"}  # files on top that use the rooms up to this one
AROUND = (
    "planner",
    "explain",
    "integrations",
    "cli",
    "worlds",
    "runlog",
    "testing",
)  # rooms that use the core; nothing in it uses them
OUTSIDE = {
    "web": "The page's source, in Svelte; `make web` builds it into the package.",
    "examples": "Programs to copy.",
    "tests": "Claims of the engine, each with its test; in tools/ those of all that stands around it.",
    "bench": "What is measured and compared, with its results.",
    "docs": "These documents; `docs/decisions/` says why it is the way it is.",
}


def first_sentence(path: Path) -> str:
    """What a module says of itself first."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return " ".join(text.split("\n\n")[0].split())


@functools.cache
def imported(path: Path) -> set[str]:
    """What `path` imports, in functions too, type-checking blocks not: {"torch", "zeroshard.comm.mesh"}."""
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
            base = (
                ["zeroshard", *path.relative_to(PACKAGE).parts[:-1]][: -(node.level - 1) or None] if node.level else []
            )
            module = ".".join([*base, *([node.module] if node.module else [])])
            names |= {name for alias in node.names if (name := f"{module}.{alias.name}") and module_file(name)} or {
                module
            }
    return names


def module_file(name: str) -> str | None:
    """The file of one of our modules, below the package; None for anything else."""
    path = name.removeprefix("zeroshard.").replace(".", "/") + ".py"
    return path if name.startswith("zeroshard.") and (PACKAGE / path).is_file() else None


def files(room: str) -> list[str]:
    """A room's files; each stands below what it imports."""
    here = {str(path.relative_to(PACKAGE)): path for path in sorted((PACKAGE / room).glob("*.py"))}
    here = {name: path for name, path in here.items() if not path.name.startswith("__")}
    graph = {name: sorted({*map(module_file, imported(path))} & {*here}) for name, path in here.items()}
    return [*graphlib.TopologicalSorter(graph).static_order()]


def core() -> list[str]:
    """The core's files, room by room; those on top that use the rooms come last."""
    below = [name for name in files("") if name not in ABOVE]
    return [*below, *(name for room in ROOMS[1:] for name in files(room)), *ABOVE]


def every_room() -> str:
    """The repository as a table: the core's rooms their files in reading order, the rooms around it, and the rest."""
    top = "What every room uses; last the reference engine and what users call."
    rooms = {"": top, **{f"{room}/": first_sentence(PACKAGE / room / "__init__.py") for room in (*ROOMS[1:], *AROUND)}}
    lines = ["| room | what it holds | files |", "|---|---|---|"]
    for room, about in rooms.items():
        names = [name for name in core() if name.rpartition("/")[0] == room.rstrip("/")]
        linked = ", ".join(f"[`{Path(name).name}`](../src/zeroshard/{name})" for name in names)
        lines.append(f"| {f'`{room}`' if room else 'on top'} | {about} | {linked} |")
    lines += [f"| `{name}/`, beside the package | {about} | |" for name, about in OUTSIDE.items()]
    return "\n".join([*lines, ""])


def written(page: Path, content: str, what: str = "") -> str:
    """The page with this between its marks. what: which list, of a page that has two."""
    before, begin, rest = page.read_text().partition(f"<!-- docs/tree.py{what} -->\n")
    _, end, after = rest.partition(f"<!-- end of docs/tree.py{what} -->")
    assert begin and end, page
    return f"{before}{begin}{content}{end}{after}"


def every_feature() -> str:
    """The features that can be taken out, from their manifests: file, how to ask for it, where it hooks in."""
    sys.path.insert(0, str(PACKAGE.parent))
    from zeroshard.hooks import FILES, Feature, features

    lines = ["| feature | file | asked for by | hooks |", "|---|---|---|---|"]
    for (name, (words, _)), feature in zip(FILES.items(), features(), strict=True):
        own = {*vars(type(feature))}
        hooks = ", ".join(f"`{hook}`" for hook, asked in vars(Feature).items() if hook in own and callable(asked))
        page = f"[{feature.name}]({feature.page})"
        file = f"{name.replace('.', '/')}.py"
        lines.append(f"| {page} | [`{file}`](../src/zeroshard/{file}) | {f'`{words}`' if words else ''} | {hooks} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    ARCHITECTURE.write_text(written(ARCHITECTURE, every_room()))
    ARCHITECTURE.write_text(written(ARCHITECTURE, every_feature(), FEATURES))
