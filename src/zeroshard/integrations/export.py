"""Weights for other programs: a folder of safetensors files as Hugging Face's tools write and read it.

    weights/
      model-00001-of-00002.safetensors   or one model.safetensors, and then no index
      model-00002-of-00002.safetensors
      model.safetensors.index.json       {"metadata": {"total_size": bytes}, "weight_map": {name: file}}
      config.json                        where the model has a configuration that can write itself

Names, shapes and dtypes say where every byte lies before the first is known, so pieces are written as they come: a
block of a checkpoint, a gathered bucket of a running model. Both give the same files; neither needs a whole model.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..arithmetic.digests import raw
from ..checkpoint.content import ModelState, local_buffers, persistent, told_buffers
from ..checkpoint.dtypes import DTYPES
from ..checkpoint.files import absolute, publish
from ..checkpoint.manifest import VALUE, Saved, by_number, numel
from ..checkpoint.staging import clean, discard, owner, place_beside, temporary
from ..comm.agreement import Group
from ..comm.all_or_none import Together
from ..engine.weights.bucket import Bucket
from ..errors import CheckpointError, UserError
from ..layout.partition import Slot, plain_name
from ..layout.shard_dim import ONE_STRIP, Strips
from ..layout.stage import Degree
from ..validation import check_flag
from . import adapters

INDEX, CONFIG = "model.safetensors.index.json", "config.json"
WEIGHTS = re.compile(r"(adapter_)?model(-\d{5}-of-\d{5})?\.safetensors")
EXPORTED = "exported"  # a state: what is gathered to be written, never the copy that modules compute with
METADATA = {"format": "pt", "made_by": "zeroshard"}  # "made_by": such an export may be replaced
HEADER_LIMIT = 100_000_000  # bytes; the library's own


@dataclass(frozen=True)
class Wanted:
    """Settings of an export; see `Zero.export`."""

    file_nbytes: int
    dtype: torch.dtype | None
    overwrite: bool

    def __post_init__(self) -> None:
        check_flag("overwrite", self.overwrite)
        if type(self.file_nbytes) is not int or self.file_nbytes < 1:
            raise UserError("file_nbytes counts bytes", got=repr(self.file_nbytes), instead="file_nbytes=5_000_000_000")
        known = isinstance(self.dtype, torch.dtype) and self.dtype in DTYPES and _plain_float(self.dtype)
        if self.dtype is not None and not known:
            floating = ", ".join(str(dtype) for dtype in DTYPES if _plain_float(dtype))
            raise UserError(
                "weights are exported as floating-point numbers", expected=floating, got=repr(self.dtype),
                instead="dtype=torch.bfloat16, or none, for that of each parameter",
            )  # fmt: skip

    def cast(self, name: str, values: Tensor, own: torch.dtype) -> Tensor:
        """Convert `values` to the dtype that is written for a tensor of dtype `own`."""
        cast = values.to(self.of(own))
        if self.dtype is not None and _plain_float(cast.dtype) and bool((cast.isinf() & ~values.isinf()).any()):
            raise UserError(
                "a value is too large for the dtype", where=name, expected=f"at most {torch.finfo(cast.dtype).max}",
                got=float(values[values.isfinite()].abs().max()), instead="another dtype, or none",
            )  # fmt: skip
        return cast

    def of(self, own: torch.dtype) -> torch.dtype:
        return self.dtype if self.dtype is not None and _plain_float(own) else own


def _plain_float(dtype: torch.dtype) -> bool:
    """Tell whether a dtype's numbers are values by themselves: floats of 8 bits need a scale, which is not exported."""
    return dtype.is_floating_point and dtype.itemsize > 1


class Kind(NamedTuple):
    """A tensor to be written. names: its own, and those of its ties, which other programs find in a file's metadata."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    names: Sequence[str]

    @property
    def nbytes(self) -> int:
        return numel(self.shape) * self.dtype.itemsize


class Weights:
    """The files of an export, laid out and reserved, to be filled in any order."""

    def __init__(self, folder: Path, tensors: Mapping[str, Kind], file_nbytes: int, *, adapter: bool = False) -> None:
        for name, kind in tensors.items():
            _check_names(name, kind.names)
        self.folder = folder
        self.kinds = tensors
        files: list[list[str]] = [[]]
        total = held = 0
        for name in sorted(tensors, key=by_number):  # a block's tensors stay together
            if files[-1] and held + tensors[name].nbytes > file_nbytes:
                files.append([])
                held = 0
            files[-1].append(name)
            held, total = held + tensors[name].nbytes, total + tensors[name].nbytes
        several = len(files) > 1
        if adapter and several:
            raise UserError(
                "an adapter is one file",
                got=f"{total} bytes, file_nbytes={file_nbytes}",
                instead=f"file_nbytes={total}",
            )
        self.files = [f"model-{at:05d}-of-{len(files):05d}.safetensors" for at in range(1, len(files) + 1)]
        self.files = self.files if several else [adapters.WEIGHTS if adapter else "model.safetensors"]
        self._open: dict[str, int] = {}
        self._places: dict[str, tuple[str, int]] = {}
        try:
            for file, names in zip(self.files, files, strict=True):
                self._begin(file, names)
            if several:
                where = {name: self._places[name][0] for name in sorted(tensors)}
                index = {"metadata": {"total_size": total}, "weight_map": where}
                (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        except BaseException:
            self.close()
            raise

    def _begin(self, file: str, names: Sequence[str]) -> None:
        header: dict[str, Any] = {}
        metadata: dict[str, str] = {}
        at = 0
        for name in sorted(names, key=lambda name: -self.kinds[name].dtype.itemsize):  # so all are aligned
            kind = self.kinds[name]
            place = [at, at + kind.nbytes]
            header[name] = {"dtype": DTYPES[kind.dtype], "shape": list(kind.shape), "data_offsets": place}
            metadata |= {tied: name for tied in kind.names if tied != name}
            at += kind.nbytes
        text = json.dumps({"__metadata__": metadata | METADATA, **header}, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        if len(text) > HEADER_LIMIT:
            raise UserError("too many tensors for one file", got=len(names), instead="a smaller file_nbytes")
        self._places |= {name: (file, 8 + len(text) + header[name]["data_offsets"][0]) for name in names}
        self._open[file] = os.open(self.folder / file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        os.posix_fallocate(self._open[file], 0, 8 + len(text) + at)  # a full disk says so now
        _write(self._open[file], len(text).to_bytes(8, "little") + text, 0)

    def write(self, name: str, start: int, values: Tensor) -> None:
        """Write elements of a tensor from `start` on, counted flat. values: in its dtype, on the CPU."""
        file, offset = self._places[name]
        _write(self._open[file], raw(values), offset + start * values.itemsize)

    def close(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()


def _check_names(name: str, ties: Sequence[str]) -> None:
    """Refuse names that the format keeps for itself, and names that other programs cannot read."""
    kept = [each for each in (name, *ties) if each == "__metadata__" or (each != name and each in METADATA)]
    broken = [each for each in (name, *ties) if any("\ud800" <= character <= "\udfff" for character in each)]
    if kept or broken:
        raise UserError(
            "safetensors files cannot hold a tensor of this name", where=repr((kept or broken)[0]),
            got="a name that the format keeps for itself" if kept else "half of a character",
            instead="another name for the parameter or buffer; zero.save takes any",
        )  # fmt: skip


def _write(descriptor: int, data: Any, offset: int) -> None:
    view = memoryview(data)
    while view.nbytes:
        taken = os.pwrite(descriptor, view, offset)
        view, offset = view[taken:], offset + taken


class Folder:
    """The folder of an export: written beside `target`, put there by one rename. A failed export leaves nothing."""

    def __init__(self, target: Path, owner: str) -> None:
        self.target = target
        self.beside = place_beside(target, owner)
        self._others: Callable[[Path], list[str]] = lambda folder: []  # lists files that must not be replaced

    def begin(self, wanted: Wanted, tensors: Mapping[str, Kind], *, config: bool, adapter: bool = False) -> Weights:
        if not wanted.overwrite:
            self._others = functools.partial(_foreign, config=config)
        foreign = self._others(self.target) if self.target.is_dir() else []
        if foreign or (self.target.exists() and not self.target.is_dir()):
            raise UserError(
                "an export would replace what is no export", where=str(self.target), got=foreign[:3] or "a file",
                instead="another folder" + ", or overwrite to replace all of it" * bool(foreign),
            )  # fmt: skip
        self.target.parent.mkdir(parents=True, exist_ok=True)
        clean(self.target.parent)
        temporary(self.beside).mkdir()
        return Weights(self.beside, tensors, wanted.file_nbytes, adapter=adapter)

    def publish(self) -> None:
        """Wait until everything is on the disk, and rename the folder to its target."""
        for path in (*self.beside.iterdir(), self.beside):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        publish(self.beside, self.target, self._others)

    def drop(self) -> None:
        discard(self.beside)


def _foreign(folder: Path, *, config: bool) -> list[str]:
    """List the names in a folder that no export wrote, or that this export would not write anew."""
    names = sorted(os.listdir(folder))
    plain = {name for name in names if (folder / name).is_file() and not (folder / name).is_symlink()}
    weights = [name for name in names if name in plain and WEIGHTS.fullmatch(name) and _made_here(folder / name)]
    mine = {*weights, INDEX, *([CONFIG, adapters.CONFIG] if config else [])} if weights else set()
    return [name for name in names if name not in mine & plain]


def _made_here(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            header = json.loads(file.read(min(int.from_bytes(file.read(8), "little"), HEADER_LIMIT)))
        return bool(header["__metadata__"]["made_by"] == METADATA["made_by"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


# --- from a checkpoint ----------------------------------------------------------------------------------------------


def export_saved(saved: Saved, target: Path, wanted: Wanted) -> list[tuple[str, int]]:
    """Write the weights of a checkpoint, block by block in the order of its files. Returns (file, bytes)."""
    folder = Folder(absolute(target), owner())
    tensors = {name: Kind(each.shape, wanted.of(each.dtype), each.names) for name, each in saved.parameters.items()}
    tensors |= {name: Kind(stored.shape, wanted.of(stored.dtype), [name]) for name, stored in saved.buffers.items()}
    parts = [(name, part) for (name, state), cut in saved.cut.items() if state == VALUE for part in cut]
    parts += saved.buffers.items()
    _warn_of_local(saved.differing)
    try:
        weights = folder.begin(wanted, tensors, config=False)
        try:
            for name, part in sorted(parts, key=lambda each: (each[1].file, each[1].offset)):
                own = saved.parameters[name].dtype if name in saved.parameters else part.dtype
                strips = saved.parameters[name].strips if name in saved.parameters else ONE_STRIP
                for start, values in saved.blocks(part):
                    _write_strips(weights, name, start, wanted.cast(name, values, own), strips)
        finally:
            weights.close()
        folder.publish()
    except OSError as error:
        raise CheckpointError("the weights were not exported", where=str(target), got=f"{error}") from error
    finally:
        folder.drop()
    return [(file, os.path.getsize(folder.target / file)) for file in weights.files]


def _warn_of_local(names: Collection[str]) -> None:
    """Say which buffers are each rank's own (`Layout.buffers`), of which an export holds one."""
    if names:
        warnings.warn(
            f"zeroshard exports rank 0's of buffers that differ between ranks: {', '.join(map(repr, names))}. To "
            "export something else give it to all ranks before, as by dist.all_reduce(buffer); zero.save keeps all",
            stacklevel=4,
        )


def _write_strips(weights: Any, name: str, start: int, values: Tensor, strips: Strips) -> None:
    """Write values of elements from `start` on, counted along a parameter's strips."""
    at = 0
    for low, high in strips.rows_of(start, start + values.numel()):
        weights.write(name, low, values[at : at + high - low])
        at += high - low


# --- from a running model -------------------------------------------------------------------------------------------


@torch.no_grad()
def export(running: ModelState, path: str | os.PathLike[str], **asked: Any) -> None:
    """Gather bucket by bucket, from masters where there are any; rank 0 writes. Raises on every rank or on none.

    asked: the fields of `Wanted`.
    """
    group = running.group
    group.same("zero.export(...)", lambda: {"folder": absolute(path).name, **asdict(Wanted(**asked))})
    target, wanted = absolute(path), Wanted(**asked)
    folder, weights = Folder(target, group.describe(owner())[0]), None
    lost = "the weights were not exported; what was there before is as it was"
    together = Together(group, lambda told: CheckpointError(lost, where=str(target), got="; ".join(told)))
    whole, adapted, local = held_whole(running), adapters.is_adapted(running.model), list[str]()
    try:
        if running.own_buffers:
            with together:
                together.answer = told_buffers(running)
            local = local_buffers(together.answers)
        with together:
            together.answer = adapters.names(running.model) if adapted and group.rank == 0 else {}
        chosen = together.answers[0]
        with together:
            tensors = {r.name: Kind(running.shape(r), wanted.of(r.param.dtype), r.names) for r in running.managed}
            tensors |= {name: Kind(tuple(each.shape), wanted.of(each.dtype), [name]) for name, each in whole.items()}
            if adapted:  # each under the first of its names in the adapter's file
                tensors = {keys[0]: tensors[name]._replace(names=keys) for name, keys in chosen.items()}
            if group.rank == 0:
                config = adapted or _config_writer(running.model) is not None
                weights = folder.begin(wanted, tensors, config=config, adapter=adapted)
        for bucket in running.buckets:
            slots = [slot for slot in bucket.plan.slots if not adapted or slot.name in chosen]
            if not slots:
                continue
            with gathered(bucket, wanted, together) as own:
                for part, flat in each_part(bucket, own, group):
                    with together.noting():
                        if weights is not None and not together.failed:
                            for slot in slots:
                                name, values = chosen.get(slot.name, [slot.name])[0], flat[slot.start : slot.stop].cpu()
                                place(weights, name, bucket, slot, part, values)
        with together:
            if weights is not None and not together.failed:
                for name, tensor in whole.items():
                    if not adapted or name in chosen:
                        values = wanted.cast(name, tensor.detach().cpu().contiguous(), tensor.dtype)
                        weights.write(chosen.get(name, [name])[0], 0, values)
                write = adapters.write_config if adapted else _write_config
                write(running.model, folder.beside)
        with together:
            if group.rank == 0:
                folder.publish()
    except BaseException as error:  # Ctrl-C too
        if group.rank == 0:
            folder.drop()
        if isinstance(error, CheckpointError):  # else a peer is gone, and would not answer
            group.describe(None)  # no rank raises before rank 0 has dropped what it wrote
        raise
    finally:
        if weights is not None:
            weights.close()
    if group.rank == 0:
        _warn_of_local([name for name in local if not adapted or name in chosen])


def held_whole(running: ModelState) -> dict[str, Tensor]:
    """Return what every rank holds whole: buffers, and parameters that zeroshard was told to leave alone."""
    managed = {record.name for record in running.managed}
    named = ((plain_name(name), param) for name, param in running.model.named_parameters())
    return dict(persistent(running.model)) | {name: param for name, param in named if name not in managed}


def place(into: Any, name: str, bucket: Bucket, slot: Slot, part: int, values: Tensor) -> None:
    """Write one part of a parameter, of those that `each_part` yields, to where it lies in the whole one."""
    _write_strips(into, name, part * slot.numel, values, bucket.among(slot).strips)


@contextlib.contextmanager
def gathered(bucket: Bucket, wanted: Wanted, together: Together) -> Iterator[Tensor]:
    """Gather a bucket on every rank as it is written: each casts what it owns, or the part of it that it updates."""
    flat = bucket.tier.reserve("gather", bucket.plan.numel, wanted.of(bucket.dtype))
    low, high = bucket.plan.shard(bucket.team.position)
    first, last = max(low, bucket.updating.first), min(high, bucket.updating.last)
    try:
        with together.noting():
            where = f"a parameter from {bucket.plan.slots[0].name!r} on"
            with bucket.updating.part(first, last).here() as own:
                flat[first:last] = wanted.cast(where, own, bucket.dtype)
        if bucket.updating.degree is Degree.ALL:
            bucket.team.column.share(flat[low:high], bucket.plan, EXPORTED).wait()
        bucket.team.gather(flat, bucket.plan, EXPORTED).wait()
        yield flat
    finally:  # after an interrupt it may still be arriving: the ranks recover before anything takes this memory
        bucket.tier.give_back("gather", flat)


def each_part(bucket: Bucket, own: Tensor, group: Group) -> Iterator[tuple[int, Tensor]]:
    """Yield (part, gathered bucket) on every rank; along an axis each team's in turn, since each holds other rows."""
    if not bucket.plan.axis:
        yield 0, own
        return
    theirs = bucket.tier.reserve("gather", own.numel(), own.dtype)
    try:
        for part, team in enumerate(bucket.team.seat.teams()):
            theirs.copy_(own)
            group.broadcast(theirs, team[0])
            yield part, theirs
    finally:
        bucket.tier.give_back("gather", theirs)


def _config_writer(model: nn.Module) -> Callable[[Path], Any] | None:
    """Return what writes the model's configuration into a folder; None if it has none like Hugging Face's models."""
    config: Any = getattr(model, "config", None)
    if callable(getattr(config, "save_pretrained", None)):
        return lambda folder: config.save_pretrained(folder)
    if callable(getattr(config, "to_json_file", None)):
        return lambda folder: config.to_json_file(folder / CONFIG)
    return None


def _write_config(model: nn.Module, folder: Path) -> None:
    write = _config_writer(model)
    if write is None:
        return
    write(folder)
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    if not config.get("architectures"):  # by which other programs find the model's class
        config["architectures"] = [type(model).__name__]
        (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
