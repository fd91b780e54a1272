"""Write lists into documents: files from their docstrings, settings that do not go together. `make docs` runs it."""

from __future__ import annotations

import ast
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "zeroshard"
ARCHITECTURE, CONTRIBUTING = ROOT / "docs" / "architecture.md", ROOT / "CONTRIBUTING.md"
GUIDE = ROOT / "docs" / "guide.md"
FEATURES = ": features"

# The core, in the order in which to read it: a file imports only what stands above it.
ORDER = (
    "errors.py", "features.py", "fields.py", "ended.py", "events.py", "coordinates.py", "stage.py", "strips.py",
    "owners.py", "layout.py", "matrices.py", "headroom.py", "flow.py", "nvrtc.py", "device.py", "resting.py",
    "twins.py", "numerics.py", "reference.py", "bins.py", "fp8.py", "int8.py", "halves.py", "hashing.py", "digests.py",
    "ranks/launcher.py", "ranks/left.py", "ranks/watch.py", "ranks/at_once.py", "ranks/calls.py", "ranks/comm.py",
    "ranks/transport.py", "ranks/agreement.py", "ranks/together.py", "ranks/streams.py", "ranks/ending.py",
    "ranks/neighbours.py", "ranks/shared_memory.py", "ranks/groups.py", "ranks/link.py", "ranks/process_team.py",
    "ranks/column.py", "ranks/levels.py", "ranks/process_group.py", "ranks/mesh.py", "ranks/own_collectives.py",
    "tiers/offload.py", "tiers/pool.py", "tiers/tier.py", "tiers/once.py", "tiers/nvme.py", "engine/refused.py",
    "engine/codec.py", "engine/flat.py", "engine/modes.py", "engine/tracing.py", "engine/guard.py",
    "engine/gathered.py", "engine/edits.py", "engine/buffer.py", "engine/publish.py", "engine/fusion.py",
    "engine/fused.py", "engine/fused_fp8.py", "engine/fused_int8.py", "engine/kernels.py", "engine/unit.py",
    "engine/quantised.py", "engine/coded.py", "engine/accumulator.py", "engine/scaler.py",
    "engine/sharded_grad.py", "engine/norms.py", "engine/gradient.py",
    "engine/transaction.py", "engine/subscriber.py", "engine/finite.py",
    "engine/contribution.py", "engine/apart.py", "engine/sums.py", "engine/relay.py", "engine/reduction.py",
    "engine/script.py", "engine/backward.py", "engine/forward.py", "engine/schedule.py", "engine/activations.py",
    "engine/recompute.py", "engine/fragment.py", "engine/averages.py", "engine/hooks.py", "engine/alone.py",
    "engine/options.py", "engine/membership.py",
    "engine/optim.py", "engine/moving.py", "engine/unsaved.py", "engine/accepted.py",
    "engine/experts.py", "engine/split.py", "engine/fused_split.py", "engine/in_backward.py",
    "engine/tensor_parallel.py", "engine/rejoined.py", "engine/preflight.py", "engine/alike.py", "engine/undo.py",
    "engine/assembly.py", "checkpoint/staging.py", "checkpoint/dtypes.py", "checkpoint/others.py",
    "checkpoint/files.py", "checkpoint/parts.py", "checkpoint/manifest.py", "checkpoint/listed.py",
    "checkpoint/content.py", "checkpoint/replicas.py", "checkpoint/saving.py", "checkpoint/on_signal.py",
    "checkpoint/loading.py", "batches.py", "replay.py", "sharded.py", "api.py",
)  # fmt: skip
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


def rooms() -> list[str]:
    """The core's folders, in reading order."""
    return list(dict.fromkeys(name.split("/")[0] for name in ORDER if "/" in name))


def every_file() -> str:
    """The core's files under their rooms, a clause each."""
    lines, room = [], None
    for name in ORDER:
        folder = name.rpartition("/")[0]
        if folder != room:
            room = folder
            about = first_sentence(PACKAGE / folder / "__init__.py") if folder else ""
            lines += ["", f"**`{folder}/`** {about}" if folder else "**On top**", ""]
        entry = f"- [`{name}`](../src/zeroshard/{name}): {first_sentence(PACKAGE / name)}"
        lines.append(textwrap.fill(entry, 130, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False))
    return "\n".join([*lines[1:], ""])


def every_room() -> str:
    """The whole repository in a screen: the core's rooms, those around it, and what is not in the package."""
    top = [name for name in ORDER if "/" not in name]
    inside = [(name, first_sentence(PACKAGE / name)) for name in top]
    inside += [(f"{room}/", first_sentence(PACKAGE / room / "__init__.py")) for room in (*rooms(), *AROUND)]
    wide = max(len(name) for name, _ in inside) + 2
    lines = ["```", "src/zeroshard/", *(f"  {name:{wide}}{about}" for name, about in inside)]
    return "\n".join([*lines, *(f"{name + '/':{wide + 2}}{about}" for name, about in OUTSIDE.items()), "```", ""])


def written(page: Path, content: str, what: str = "") -> str:
    """The page with this between its marks. what: which list, of a page that has two."""
    before, begin, rest = page.read_text().partition(f"<!-- docs/tree.py{what} -->\n")
    _, end, after = rest.partition(f"<!-- end of docs/tree.py{what} -->")
    assert begin and end, page
    return f"{before}{begin}{content}{end}{after}"


def every_feature() -> str:
    """The features that can be taken out, from their manifests: file, how to ask for it, where it hooks in."""
    sys.path.insert(0, str(PACKAGE.parent))
    from zeroshard.features import FILES, Feature, features

    lines = ["| feature | file | asked for by | hooks |", "|---|---|---|---|"]
    for (name, (words, _)), feature in zip(FILES.items(), features(), strict=True):
        own = {*vars(type(feature))}
        hooks = ", ".join(f"`{hook}`" for hook, asked in vars(Feature).items() if hook in own and callable(asked))
        page = f"[{feature.name}]({feature.page})"
        file = f"{name.replace('.', '/')}.py"
        lines.append(f"| {page} | [`{file}`](../src/zeroshard/{file}) | {f'`{words}`' if words else ''} | {hooks} |")
    return "\n".join([*lines, ""])


def every_refusal() -> str:
    """The settings that do not go together, from the engine's own table."""
    sys.path.insert(0, str(PACKAGE.parent))
    from zeroshard.engine.refused import table

    return table()


if __name__ == "__main__":
    for page, content in ((ARCHITECTURE, every_file()), (CONTRIBUTING, every_room()), (GUIDE, every_refusal())):
        page.write_text(written(page, content))
    ARCHITECTURE.write_text(written(ARCHITECTURE, every_feature(), FEATURES))
