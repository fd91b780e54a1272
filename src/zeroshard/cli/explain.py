"""`zeroshard explain`: the page of a run, or of the walkthroughs alone; or the same in the terminal."""

from __future__ import annotations

import webbrowser
from pathlib import Path

from zeroshard.cli import screen
from zeroshard.cli.config import InputError, one_line
from zeroshard.errors import UserError

PAGE = "zero.html"


def explain(run_dir: str | None, *, out: str | None, text: bool, element: str | None, browse: bool) -> None:
    """Write the page and say where, or print it."""
    if element is not None and (not text or run_dir is not None):
        raise InputError("--element says which parameter the walkthrough in the terminal follows: --text, no RUN_DIR")
    if text:
        if out is not None or browse:
            raise InputError("--text prints here and writes no page; leave --out and --open out")
        _print(run_dir, element or "W_q[0,0]")
        return
    path = write(run_dir, out)
    screen.say(f"{path}   {screen.nbytes_text(path.stat().st_size)}, opens without a network")
    if browse and not webbrowser.open(path.absolute().as_uri()):
        raise InputError(f"there is no browser to open {path} with")


def write(run_dir: str | Path | None, out: str | None = None) -> Path:
    """Write the page of a run's folder (None: of the walkthroughs alone); returns its path."""
    from zeroshard.explain.document import Page, built_in, document

    path = Path(out) if out is not None else Path(run_dir or ".") / PAGE
    page = Page(document(walkthroughs=built_in(), run=_run(run_dir)))
    try:
        page.write(path)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from error
    return path


def _run(run_dir: str | Path | None) -> dict[str, object] | None:
    if run_dir is None:
        return None
    from zeroshard.explain.run import read

    try:
        return read(Path(run_dir))
    except UserError as error:
        raise InputError(one_line(error)) from error


def _print(run_dir: str | None, element: str) -> None:
    from zeroshard.cli import walk
    from zeroshard.explain.document import built_in

    if run_dir is None:
        walk.walkthroughs(built_in(), element)
    else:
        walk.run(_run(run_dir) or {})
