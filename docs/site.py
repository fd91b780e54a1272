"""The documents as a site. `make docs` runs it; MkDocs calls the two `on_` functions.

A page may link to a file outside of docs/, as to examples/job.py. On the site that file lies as text under source/, so
that links work without the address of any repository, and from the disk.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOCS, SITE = ROOT / "docs", ROOT / "site"
LINK = re.compile(r"\]\(([^)#\s]+)(#[^)\s]*)?\)")
LOADED = re.compile(
    r"<(?:script|img|iframe|source)\b[^>]*\ssrc(?:set)?=[\"']?(?:https?:)?//[^>]*>"
    r"|<link\b[^>]*href=[\"']?(?:https?:)?//[^>]*>"
)
IMPORTED = re.compile(r"(?:@import\s+|url\()[\"']?(?:https?:)?//[^)\"']*")


def outside(page: Path, target: str) -> Path | None:
    """The file that a page in docs/ links to, where it is not in docs/; None for any other link."""
    path = Path(os.path.normpath(page.parent / target))
    inside = path.is_relative_to(DOCS) or not path.is_relative_to(ROOT)
    return None if "://" in target or inside or not path.is_file() else path


def on_files(files: Any, config: Any) -> Any:
    """The files that pages link to, as text; a picture as itself."""
    from mkdocs.structure.files import File

    linked = set()
    for page in DOCS.rglob("*.md"):
        for target, _ in LINK.findall(page.read_text()):
            if path := outside(page, target):
                linked.add(path)
    for path in sorted(linked):
        files.append(File.generated(config, place(path), abs_src_path=str(path)))
    return files


def place(path: Path) -> str:
    """Where a file outside of docs/ lies on the site."""
    return f"source/{path.relative_to(ROOT)}" + ("" if path.suffix in {".svg", ".html"} else ".txt")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links to files outside of docs/ lead to their copies."""
    here = Path(page.file.abs_src_path)

    def rewritten(match: re.Match[str]) -> str:
        path = outside(here, match[1])
        if path is None:
            return match[0]
        return f"]({os.path.relpath(DOCS / place(path), here.parent)})"

    return LINK.sub(rewritten, markdown)


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
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(site)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "DISABLE_MKDOCS_2_WARNING": "true"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    if loaded := from_elsewhere(site):
        sys.exit("loaded from elsewhere:\n" + "\n".join(loaded))
    print(f"{site}/index.html")


if __name__ == "__main__":
    build(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else SITE)
