"""A checkpoint's files, byte for byte, whatever the filesystem can do."""

import errno
import fcntl
import os

import pytest
import safetensors.torch
import torch

from zeroshard.arithmetic import digests, hashing
from zeroshard.checkpoint import files
from zeroshard.checkpoint.files import BLOCK

REAL = fcntl.fcntl, os.pwrite


def no_direct_files(monkeypatch):
    def refuse(descriptor, command, argument):
        raise OSError(errno.EINVAL, "no O_DIRECT here")

    monkeypatch.setattr(fcntl, "fcntl", refuse)


def no_direct_writes(monkeypatch):
    def pwrite(descriptor, data, at):
        if REAL[0](descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "larger pages")
        return REAL[1](descriptor, data, at)

    monkeypatch.setattr(os, "pwrite", pwrite)


def short_writes(monkeypatch):
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, at: REAL[1](descriptor, data[: 3 << 16], at))


def tensors(numel):
    """Some of every kind, `numel` bytes the most of them: the file's length changes with it, one by one."""
    generator = torch.Generator().manual_seed(0)
    return {
        "matrix": torch.randn(300, 200, generator=generator).t(),
        "number": torch.tensor(3.0, dtype=torch.float64),
        "nothing": torch.empty(0, 5),
        "low": torch.randn(77, generator=generator).bfloat16(),
        "bytes": torch.randint(256, (numel,), dtype=torch.uint8, generator=generator),
        "end": torch.tensor([True, False]),
    }


@pytest.mark.parametrize("way", [lambda patch: None, no_direct_files, no_direct_writes, short_writes])
@pytest.mark.parametrize("numel", [0, 5, 2 * BLOCK - 240_000, 3 * BLOCK + 1])
def test_a_file_holds_exactly_its_tensors(tmp_path, monkeypatch, way, numel):
    way(monkeypatch)
    given = tensors(numel)
    written = files.write_tensors(tmp_path / "file", given)
    data = (tmp_path / "file").read_bytes()
    assert written.nbytes == len(data)
    assert written.digests == [hashing.digest(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK)]
    read = safetensors.torch.load_file(tmp_path / "file")
    assert read.keys() == given.keys()
    for name, tensor in given.items():
        assert (read[name].dtype, read[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(read[name], tensor)
        raw = digests.raw(tensor.contiguous())
        assert data[written.offsets[name] : written.offsets[name] + raw.nbytes] == bytes(raw)


def test_a_file_ends_where_a_block_does(tmp_path):
    small = files.write_tensors(tmp_path / "small", {"bytes": torch.zeros(0, dtype=torch.uint8)})
    header = len((tmp_path / "small").read_bytes())
    spare = BLOCK - header - 16  # the header grows by the digits of the size
    exact = next(
        n for n in range(spare, spare + 32)
        if files.write_tensors(tmp_path / f"{n}", {"bytes": torch.zeros(n, dtype=torch.uint8)}).nbytes == BLOCK
    )  # fmt: skip
    assert len(small.digests) == 1
    assert (tmp_path / f"{exact}").stat().st_size == BLOCK


def test_a_full_disk_is_an_error_and_not_a_short_file(tmp_path, monkeypatch):
    def pwrite(descriptor, data, at):
        if at:
            raise OSError(errno.ENOSPC, "No space left on device")
        return REAL[1](descriptor, data, at)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(OSError, match="No space left"):
        files.write_tensors(tmp_path / "file", tensors(BLOCK))
