"""Saving and loading beside safetensors and torch's distributed checkpoint: `python -m bench.checkpoint`.

One run, interleaved: in each round every way saves the same tensors to a folder of its own and has them on the disk
(fsync), then loads them twice into memory that is there already, once with the files in the page cache ("hot") and
once without ("cold": dropped by posix_fadvise). Each load is checked by digests of every tensor, outside the clock.
A time is that of the slowest rank, from a barrier; a ratio compares two ways in one round; reported are medians.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import zeroshard
from zeroshard.arithmetic.digests import raw
from zeroshard.arithmetic.hashing import digest
from zeroshard.checkpoint.content import model_state, pieces

from . import report
from .ranks import Ranks

WIDTH = 2048
LAYER = 4 * 3 * (WIDTH * WIDTH + WIDTH)  # bytes of a layer's parameters and AdamW's two states, in fp32
WAYS = ("zeroshard", "safetensors", "safetensors, checked", "dcp")


class Held:
    """A sharded model with its optimizer's state, and four ways to bring its tensors to a disk and back."""

    def __init__(self, layers: int) -> None:
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
        optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.zero = zeroshard.shard(self.model, optimizer, stage=3)
        self.model(torch.randn(1, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def tensors(self) -> dict[str, Tensor]:
        """Exactly what zeroshard writes on this rank, under names of the rank's own."""
        found = pieces(model_state(self.zero._engine))
        return {f"{self.zero.rank}/{each.parameter}/{each.state}/{each.start}": each.tensor for each in found}

    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def save(self, way: str, folder: Path) -> float:
        return _timed(lambda: self._way("save", way)(folder))

    def load(self, way: str, folder: Path) -> float:
        """Seconds. Raises AssertionError where a tensor is not what was saved."""
        saved = {name: digest(raw(tensor)) for name, tensor in self.tensors().items()}
        for tensor in self.tensors().values():
            tensor.zero_()
        seconds = _timed(lambda: self._way("load", way)(folder))
        assert saved == {name: digest(raw(tensor)) for name, tensor in self.tensors().items()}, way
        return seconds

    def _way(self, move: str, way: str) -> Callable[[Path], None]:
        return getattr(self, f"_{move}_{way.replace(', ', '_')}")  # type: ignore[no-any-return]

    def _save_zeroshard(self, folder: Path) -> None:
        self.zero.save(folder)

    def _load_zeroshard(self, folder: Path) -> None:
        self.zero.load(folder)

    def _file(self, folder: Path) -> Path:
        return folder / f"{self.zero.rank}.safetensors"

    def _save_safetensors(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        safetensors.torch.save_file(self.tensors(), self._file(folder))
        descriptor = os.open(self._file(folder), os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)

    def _load_safetensors(self, folder: Path) -> None:
        loaded = safetensors.torch.load_file(self._file(folder))
        for name, tensor in self.tensors().items():
            tensor.copy_(loaded[name])

    def _save_safetensors_checked(self, folder: Path) -> None:
        self._save_safetensors(folder)
        self._digests = {name: digest(raw(tensor)) for name, tensor in self.tensors().items()}

    def _load_safetensors_checked(self, folder: Path) -> None:
        """What zeroshard's load does, by hand: nothing is changed before every byte is known to be right."""
        loaded = safetensors.torch.load_file(self._file(folder))
        assert self._digests == {name: digest(raw(tensor)) for name, tensor in loaded.items()}
        dist.barrier()
        for name, tensor in self.tensors().items():
            tensor.copy_(loaded[name])

    def _save_dcp(self, folder: Path) -> None:
        dcp.save(self.tensors(), storage_writer=dcp.FileSystemWriter(folder))  # its default is to fsync

    def _load_dcp(self, folder: Path) -> None:
        dcp.load(self.tensors(), storage_reader=dcp.FileSystemReader(folder))


@torch.no_grad()
def _timed(call: Callable[[], None]) -> float:
    dist.barrier()
    started = time.perf_counter()
    call()
    dist.barrier()
    return time.perf_counter() - started


def warm(folder: Path) -> None:
    """Have a folder's files in the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb", buffering=0) as file:
                while file.read(1 << 20):
                    pass


def forget(folder: Path) -> None:
    """Drop a folder's files, which are on the disk, from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def measure(world: int, mib: int, rounds: int, where: Path) -> dict[str, Any]:
    """Per way and move: the median seconds, and the median over the rounds of zeroshard's speed relative to it."""
    layers = max(round(mib * 2**20 / LAYER), 1)
    ranks = Ranks(world, Held, layers)
    nbytes = sum(ranks("nbytes"))
    seconds: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory(dir=where, prefix="bench-") as temporary:
        for number in range(rounds):
            for at in range(len(WAYS)):
                way = WAYS[(number + at) % len(WAYS)]
                folder = Path(temporary) / way
                os.sync()  # the round before left nothing to be written during this one
                seconds.setdefault((way, "save"), []).append(max(ranks("save", way, folder)))
                warm(folder)
                seconds.setdefault((way, "load, hot"), []).append(max(ranks("load", way, folder)))
                forget(folder)
                seconds.setdefault((way, "load, cold"), []).append(max(ranks("load", way, folder)))
                shutil.rmtree(folder)
    ranks.close()
    rows = [
        {
            "ranks": world,
            "move": move,
            "way": way,
            "seconds": round(statistics.median(times), 3),
            "GB/s": round(nbytes / statistics.median(times) / 1e9, 2),
            "zeroshard's speed over it": report.spread(
                [theirs / ours for theirs, ours in zip(times, seconds["zeroshard", move], strict=True)]
            ),
        }
        for (way, move), times in seconds.items()
    ]
    rows.sort(key=lambda row: (row["move"] != "save", row["move"], WAYS.index(row["way"])))
    return {"nbytes": nbytes, "rounds": rounds, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=1920, help="size of the checkpoint")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--where", type=Path, default=Path(tempfile.gettempdir()), help="a folder on the disk to measure"
    )
    parser.add_argument("--out", type=Path, default=report.RESULTS)
    options = parser.parse_args()
    runs = [measure(world, options.mib, options.rounds, options.where) for world in options.ranks]
    rows = [row for run in runs for row in run["rows"]]
    facts = {"nbytes": runs[0]["nbytes"], "rounds": options.rounds}
    notes = [
        f"{runs[0]['nbytes'] / 1e9:.2f} GB in fp32, {options.rounds} rounds: medians, least and most.",
        "zeroshard: `zero.save` and `zero.load`: digests checked, all ranks or none.",
        "safetensors: `save_file` and fsync, a file per rank; `load_file` and a copy into place.",
        "safetensors, checked: the same, with a digest of every tensor (xxh3-128) as it is saved, compared on "
        "all ranks after `load_file` and before any copy.",
        "dcp: `torch.distributed.checkpoint` with its defaults, which fsync, and check no digests.",
    ]
    report.write(options.out, "checkpoint", facts, rows, notes)


if __name__ == "__main__":
    main()
