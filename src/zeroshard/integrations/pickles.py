"""Readers of other systems' pickles as data: what is not known to be harmless is refused, and none of it is called.

Objects that a file names come back as `Named`: their class is not imported, only their contents are kept.
"""

from __future__ import annotations

import collections
import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError

METADATA_LIMIT = 1 << 28  # bytes of a .metadata file: some million tensors
OF_DCP = {  # the classes in a .metadata
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    "pathlib._local": {"Path", "PosixPath", "PurePosixPath"},
}  # fmt: skip


class Named:
    """An object of a class that is not imported: its constructor's arguments in `args`, and its attributes."""

    def __new__(cls, *args: Any) -> Named:
        made = object.__new__(cls)
        made.__dict__["args"] = args
        return made

    def __setstate__(self, state: Any) -> None:
        self.__dict__["state"] = state
        if isinstance(state, dict):
            self.__dict__.update(state)


def _named(name: str) -> type[Named]:
    """Make a class in place of `name`, a fresh one for each file, so that no file can leave anything behind."""
    return type(name.rpartition(".")[2], (Named,), {})


def refused(where: object, got: object) -> CheckpointError:
    return CheckpointError(
        "a file holds more than data, and is not read", where=str(where), got=got,
        expected="tensors, numbers, text, lists and dicts", instead="save it again without such objects",
    )  # fmt: skip


class _Metadata(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, where: Path) -> None:
        super().__init__(file)
        self._where = where
        self._made: dict[str, type[Named]] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Find a class in this table alone: import nothing, and look up no attribute of anything but torch's dtypes."""
        if module == "torch" and isinstance(found := vars(torch).get(name), torch.dtype):
            return found
        if (module, name) == ("torch", "Size"):
            return torch.Size
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if name in OF_DCP.get(module, ()):
            return self._made.setdefault(f"{module}.{name}", _named(name))
        raise refused(self._where, f"{module}.{name}")


def read_metadata(path: Path) -> Any:
    """Read DCP's .metadata, its objects as `Named`. Raises `CheckpointError`."""
    try:
        if path.stat().st_size > METADATA_LIMIT:
            raise refused(path, f"{path.stat().st_size:,} bytes")
        return _Metadata(io.BytesIO(path.read_bytes()), path).load()
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        raise refused(path, f"{type(error).__name__}: {error}") from error


def read_torch(file: Path | bytes, where: Path) -> Any:
    """Read a file of `torch.save` by `weights_only=True`, DeepSpeed's objects as `Named`. Raises `CheckpointError`."""
    source: Any = io.BytesIO(file) if isinstance(file, bytes) else str(file)
    try:
        if isinstance(file, Path) and not zipfile.is_zipfile(file):
            raise refused(where, "no file of torch.save, or one of before 2020")
        names = torch.serialization.get_unsafe_globals_in_checkpoint(source)
        if others := [name for name in names if not name.startswith("deepspeed.")]:
            raise refused(where, ", ".join(others))
        made: list[Any] = [(_named(name), name) for name in names]
        if isinstance(source, io.BytesIO):
            source.seek(0)
        with torch.serialization.safe_globals(made):
            return torch.load(source, map_location="cpu", weights_only=True, mmap=isinstance(source, str))
    except CheckpointError:
        raise
    except Exception as error:  # a damaged file can raise anything
        raise refused(where, f"{type(error).__name__}: {str(error)[:300]}") from error
