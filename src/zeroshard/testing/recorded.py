"""A test's run, compared with the log of an earlier one that is kept beside the test, in the user's repository."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UserError

if TYPE_CHECKING:
    from ..runlog.record import RunLog

FOLDER, OPTION = "recorded", "--ranks-record"
MACHINE = "machine.json"


@dataclass(frozen=True)
class Recorded:
    """The fixture `recorded`: writes the log of this run, and knows the one that it is compared with after the test.

    kept: the folder in the repository. now: this run's, for as long as the test lasts.
    """

    kept: str
    now: str

    def log(self, model: Any, optimizer: Any = None, *, zero: Any = None, samples: int | None = None) -> RunLog:
        """Make the `zeroshard.RunLog` of this rank, in the test's own folder. Collective.

        model, optimizer, zero, samples: as in `RunLog`.

        Raises `UserError` where this rank has a log already.

        Examples:
            >>> with recorded.log(model, optimizer) as log:
            ...     loss = model(batch).square().mean()
            ...     loss.backward()
            ...     log.backward(loss)
            ...     optimizer.step()
        """
        from ..runlog.record import SAMPLES, RunLog

        made = RunLog(self.now, model, optimizer, zero=zero, samples=SAMPLES if samples is None else samples)
        if made.rank == 0:
            (Path(self.now) / MACHINE).write_text(json.dumps(machine(), indent=1) + "\n")
        return made

    def compare(self, *, anew: bool) -> str | None:
        """Tell how this run's log differs from the kept one, and what to do about it; None where all bits are the same.

        anew: keep this run's where it differs, or where none is kept yet. Raises `UserError` for a test that logs
        nothing.
        """
        from ..runlog.read import read
        from .bits import parted

        now, kept = Path(self.now), Path(self.kept)
        if not now.is_dir():
            raise UserError(
                "the test takes the fixture 'recorded', and logs nothing",
                instead="with recorded.log(model, optimizer) as log: ..., on each rank",
            )
        run, says = read(now), None
        if not kept.is_dir():
            says = f"no log is recorded in {shown(kept)}"
        elif parts := _parted(parted, lambda: read(kept), run):
            says = "\n".join([f"a bit moved: {parts}", *_machines(kept, now)])
        if says is None:
            return None
        if anew:
            shutil.rmtree(kept, ignore_errors=True)
            shutil.copytree(now, kept)
            return None
        return f"{says}\n  kept in {shown(kept)}; where this run is right, pytest {OPTION} writes it anew"


def _parted(parted: Any, read_kept: Callable[[], Any], run: Any) -> str | None:
    run.folder = "this run"
    try:
        kept = read_kept()
        kept.folder = "the recorded run"
        says: str | None = parted(kept, run)
    except UserError as error:  # damaged, other tensors, or other elements of them
        return str(error)
    return says


def machine() -> dict[str, Any]:
    """Return what bits depend on beside the program."""
    import torch

    processor = torch.backends.cpu.get_cpu_capability()
    return {
        "torch": torch.__version__, "machine": platform.machine(), "processor": processor,
        "threads": torch.get_num_threads(),
    }  # fmt: skip


def _machines(kept: Path, now: Path) -> list[str]:
    try:
        then, here = (json.loads((folder / MACHINE).read_text()) for folder in (kept, now))
    except (OSError, ValueError):
        return [f"  {shown(kept / MACHINE)} cannot be read, so nothing is known of where it was recorded"]
    if then == here:
        return []
    return [f"  recorded with {then}, and run with {here}: the difference may be theirs, and not the program's"]


def folder_of(path: Path, nodeid: str) -> Path:
    """Return where the log of a test is kept: beside its file, by the names of the file and of the test."""
    name = nodeid.partition("::")[2].replace("::", ".").replace("[", "-").replace("]", "")
    plain = re.sub(r"[^\w.=-]", "_", name)
    if plain != name or len(plain) > 100:  # else two tests could have one folder
        plain = f"{plain[:100]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    return path.parent / FOLDER / path.stem / plain


def shown(path: Path) -> str:
    """Return a path from here, where it is not longer so."""
    return min(os.path.relpath(path), str(path), key=len)
