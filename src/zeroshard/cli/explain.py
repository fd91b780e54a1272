"""`zeroshard explain`: the page of a run, of two, or of the walkthroughs alone; or its document, as JSON."""

from __future__ import annotations

import json
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zeroshard.cli import screen
from zeroshard.cli.config import InputError, one_line
from zeroshard.cli.working import Working
from zeroshard.errors import UserError

PAGE = "zero.html"
LETTERS = ("A", "B", "C", "D", "E")  # of the published texts


def explain(runs: tuple[str, ...], *, out: str | None, browse: bool, as_json: bool = False) -> None:
    """Write the page, and say where and whether two runs' bits are equal; or print what the page is made of."""
    if len(runs) > 2:
        raise InputError(f"explain shows one run, or compares two; got {len(runs)} folders")
    if as_json and (out is not None or browse):
        raise InputError("--json prints here and writes no page; leave --out and --open out")
    with Working(("making the page", None), lines=not as_json):
        document = made_of(runs)
        path = None if as_json else _write(document, runs, out)
    if path is None:
        print(json.dumps(document))
        return
    screen.say(f"{path}   {screen.nbytes_text(path.stat().st_size)}, opens without a network")
    if document.get("compared"):
        from zeroshard.cli.compared import verdict

        screen.say(verdict(document["compared"]))
    if browse and not webbrowser.open(path.absolute().as_uri()):
        raise InputError(f"there is no browser to open {path} with")


def write(runs: Sequence[str | Path], out: str | None = None) -> Path:
    """Write the page of a run's folder, of two, or of the walkthroughs alone; returns its path."""
    return _write(made_of(runs), runs, out)


def _write(document: dict[str, Any], runs: Sequence[str | Path], out: str | None) -> Path:
    from zeroshard.explain.document import Page

    path = Path(out) if out is not None else Path(runs[0] if runs else ".") / PAGE
    try:
        Page(document).write(path)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from error
    return path


def made_of(runs: Sequence[str | Path]) -> dict[str, Any]:
    """Return the page's document: the walkthroughs, and of one run or two what they recorded and how they compare."""
    from zeroshard.explain.document import built_in, document

    told = [_read(run) for run in runs]
    return document(
        walkthroughs=built_in(),
        run=told[0] if told else None,
        other=told[1] if len(told) == 2 else None,
        compared=_compared(runs) if len(told) == 2 else None,
    )


def _compared(runs: Sequence[str | Path]) -> dict[str, Any]:
    from zeroshard.cli.compared import compared

    return compared(*map(Path, runs))


def _read(run_dir: str | Path) -> dict[str, Any]:
    from zeroshard.explain.reading import read

    letter = str(run_dir).upper()
    if letter in LETTERS and not Path(run_dir).exists():
        raise InputError(
            f"explain shows runs, and there is no folder {run_dir}; the page that `zeroshard explain` writes checks "
            f'text {letter}, in its view "Check the texts"'
        )
    try:
        return read(Path(run_dir))
    except UserError as error:
        raise InputError(one_line(error)) from error
