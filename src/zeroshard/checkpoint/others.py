"""Checkpoints and weights of other systems, told by the names of their files, and what reads each of them.

Nothing of them is opened: a name is enough to say which command or call was meant.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

OURS = re.compile(r"rank[0-9]{5}\.(safetensors|json)")  # a file that a rank wrote: see `files`
_SHARDS_OF_DEEPSPEED = re.compile(r"(mp|zero_pp|bf16_zero_pp)_rank_\d+.*\.pt")
_IMPORT = "zeroshard ckpt import {path} imported, and then zero.load('imported')"
_LOAD = "zeroshard.load(model, {path}, optimizer, ...) in the place of shard(...)"
_ADAPTER = "PeftModel.from_pretrained(model, {path}, is_trainable=True) before shard(...)"


class Other(NamedTuple):
    """What lies at a path that is no checkpoint of ours.

    instead: the call or command that reads it. run: is it of a run that could go on, and not weights alone?
    """

    what: str
    instead: str
    run: bool = False


def other(path: Path) -> Other | None:
    """Return what lies at a path, if it is a checkpoint or weights of another system; None if it is nothing known."""
    quoted = repr(os.fspath(path))
    if path.is_file():
        if path.suffix in (".pt", ".pth", ".bin", ".ckpt"):
            return Other("this is a file of torch.save", _IMPORT.format(path=path))
        if path.suffix == ".safetensors":
            return Other("these are weights", _LOAD.format(path=quoted))
        return None
    try:
        names = {name for name in os.listdir(path) if not OURS.fullmatch(name)}  # a save that never ended has ours
    except OSError:
        return None
    if any(map(_SHARDS_OF_DEEPSPEED.fullmatch, names)) or ("latest" in names and _tagged(path)):
        return Other("this is a checkpoint of DeepSpeed", _IMPORT.format(path=path), run=True)
    if ".metadata" in names:
        ours = f'; or, of what dcp.save({{"app": zero}}) wrote, dcp.load({{"app": zero}}, checkpoint_id={quoted})'
        return Other("this is a checkpoint of torch.distributed.checkpoint", _IMPORT.format(path=path) + ours, run=True)
    if "adapter_config.json" in names:
        return Other("this is an adapter of PEFT", _ADAPTER.format(path=quoted))
    if any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names):
        run = "trainer_state.json" in names
        return Other("these are weights as Hugging Face writes them", _LOAD.format(path=quoted), run=run)
    if pickled := sorted(name for name in names if re.fullmatch(r"pytorch_model.*\.bin|.*\.(pt|pth)", name)):
        return Other("this is a folder of torch.save's files", _IMPORT.format(path=path / pickled[0]))
    return None


def _tagged(path: Path) -> bool:
    """Tell if `latest` in a folder names another folder in it, as DeepSpeed writes it."""
    try:
        tag = (path / "latest").read_text(encoding="utf-8", errors="replace")[:256].strip()
        return bool(tag) and (path / tag).is_dir()
    except (OSError, ValueError):
        return False
