"""The documents as a site, which Zensical builds by mkdocs.yml. `make docs` runs it.

A page may link to a file outside of docs/, as to examples/job.py. On the site that file lies as text under source/, so
that links work without the address of any repository, and from the disk. The files of `BESIDE` are pages of the site.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS, SITE = ROOT / "docs", ROOT / "site"
BESIDE = {  # pages of the site that lie outside of docs/, and their names there
    "CONTRIBUTING.md": "contributing.md",
    "tests/trust-table.md": "trust-table.md",  # the page of a step links it: web/src/views/Faults.svelte
    "tests/world/README.md": "worlds.md",
}
LINK = re.compile(r"\]\(([^)#\s]+)(#[^)\s]*)?\)")
LOADED = re.compile(
    r"<(?:script|img|iframe|source)\b[^>]*\ssrc(?:set)?=[\"']?(?:https?:)?//[^>]*>"
    r"|<link\b[^>]*href=[\"']?(?:https?:)?//[^>]*>"
)
UNSEARCHED = "---\nsearch:\n  exclude: true\n---\n\n"  # of decisions: a search finds the pages that users need
IMPORTED = re.compile(r"(?:@import\s+|url\()[\"']?(?:https?:)?//[^)\"']*")


def place(path: Path) -> Path:
    """Where a file of the repository lies on the site."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS)
    name = path.relative_to(ROOT)
    text = "" if path.suffix in {".svg", ".html"} else ".txt"
    return Path(BESIDE.get(str(name), f"source/{name}{text}"))


def rewritten(page: Path, site: Path) -> str:
    """The text of a page, with links as the site has them. A linked file outside of docs/ is copied into `site`."""

    def link(match: re.Match[str]) -> str:
        path = Path(os.path.normpath(page.parent / match[1]))
        if "://" in match[1] or not path.is_relative_to(ROOT) or not path.is_file():
            return match[0]
        target, fragment = place(path), match[2] or ""
        if target.parts[0] == "source":
            fragment = ""  # it is shown as text
            (site / target).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, site / target)
        return f"]({os.path.relpath(target, place(page).parent)}{fragment})"

    return LINK.sub(link, page.read_text())


def gathered(folder: Path) -> None:
    """Put all that the site shows into a folder."""
    shutil.copytree(DOCS, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__", "shapes"))
    for page in [*DOCS.rglob("*.md"), *(ROOT / name for name in BESIDE)]:
        copy = place(page)
        (folder / copy).write_text((UNSEARCHED if copy.parts[0] == "decisions" else "") + rewritten(page, folder))


def from_elsewhere(site: Path) -> list[str]:
    """Every script, style, picture or frame that a page would load from another machine."""
    found = []
    for path in site.rglob("*"):
        if path.suffix in {".html", ".css", ".svg"}:
            pattern = IMPORTED if path.suffix == ".css" else LOADED
            found += [f"{path.relative_to(site)}: {match[0][:120]}" for match in pattern.finditer(path.read_text())]
    return found


def build(site: Path = SITE) -> None:
    """Build it anew. Ends with an error for a link that leads nowhere, and for anything loaded from elsewhere."""
    shutil.rmtree(site, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=ROOT, prefix=".site-") as folder:
        pages, settings = Path(folder, "pages"), Path(folder, "mkdocs.yml")
        gathered(pages)
        text = (ROOT / "mkdocs.yml").read_text()
        for name, path in (
            ("docs_dir: docs", "pages"),
            ("[src]", f"[{ROOT / 'src'}]"),
            ("docs/fields.py", DOCS / "fields.py"),
        ):
            assert text.count(name) == 1, name
            text = text.replace(name, f"docs_dir: {path}" if "docs_dir" in name else str(path))
        settings.write_text(text)
        command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean", "--config-file", str(settings)]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(re.sub(r"\x1b\[[0-9;]*m", "", done.stdout + done.stderr))
        shutil.move(Path(folder, "site"), site)
    if loaded := from_elsewhere(site):
        sys.exit("loaded from elsewhere:\n" + "\n".join(loaded))
    print(f"{site}/index.html")


if __name__ == "__main__":
    build(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else SITE)
