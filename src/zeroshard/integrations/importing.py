"""Import of other systems' checkpoints: `zeroshard ckpt import`."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import UserError
from . import foreign_dcp, foreign_deepspeed
from .foreign import Found, Hints, write


def import_checkpoint(
    source: str | os.PathLike[str], target: str | os.PathLike[str], hints: Hints, *, weights: bool = False
) -> Found:
    """Read what DeepSpeed, DCP or torch.save wrote, and write it as a checkpoint that `zero.load` reads.

    weights: leave the optimizer's states out.
    """
    path = Path(source)
    if path.is_file():
        found = foreign_dcp.read_file(path, hints)
    elif (path / ".metadata").is_file():
        found = foreign_dcp.read_folder(path, hints)
    elif folder := foreign_deepspeed.folder(path):
        found = foreign_deepspeed.read(folder, hints)
    else:
        raise UserError(
            "no checkpoint that is known here", where=str(path),
            expected="DeepSpeed's folder (*_model_states.pt), DCP's (.metadata), or a .pt file",
        )  # fmt: skip
    if weights:
        found.states, found.plain, found.groups = {}, {}, []
    write(found, target, hints)
    return found
