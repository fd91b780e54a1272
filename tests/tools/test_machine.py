"""The facts of a machine that `zeroshard verify` writes, and `--quick` prints."""

from __future__ import annotations

import os
import resource
from types import SimpleNamespace

import pytest
import torch

from zeroshard import device
from zeroshard.cli import machine, processor


@pytest.fixture
def imagined(tmp_path, monkeypatch):
    """A machine of files: its processor, a container's memory and limits, and one variable that matters."""
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Some Processor\nflags\t\t: fpu avx512_bf16\n\n")
    monkeypatch.setattr(processor, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(machine.launch, "memory_of_machine", lambda: 64 << 30)
    monkeypatch.setattr(machine.launch, "memory_told", lambda: {"MemAvailable": 48 << 30})
    limits = {resource.RLIMIT_MEMLOCK: resource.RLIM_INFINITY, resource.RLIMIT_NOFILE: 1024}
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limits[which], 0))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(6)})
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_blocks=1 << 14, f_frsize=4096))
    monkeypatch.setattr(device, "accelerators", list)
    for name in [*os.environ]:
        if name.startswith(machine.PREFIXES):
            monkeypatch.delenv(name)
    monkeypatch.setenv("NCCL_DEBUG", "[bold]INFO\x1b[1m")
    return tmp_path


def shown(capsys):
    machine.show(machine.facts())
    title, *lines = capsys.readouterr().out.strip().splitlines()
    assert title == f"This machine, for zeroshard {machine.zeroshard.__version__}"
    return dict(line.split(maxsplit=1) for line in lines)


def test_what_a_machine_says_of_itself(imagined, monkeypatch, capsys):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    found = machine.facts()
    same = ("processor_name", "computes_bf16", "cores", "threads", "memory", "free_memory", "dev_shm", "locked_memory")
    assert [found[name] for name in same] == ["Some Processor", True, 6, 3, 64 << 30, 48 << 30, 64 << 20, None]
    assert (found["torch"], found["open_files"], found["devices"]) == (torch.__version__, 1024, [])
    assert found["variables"] == {"NCCL_DEBUG": "[bold]INFO\x1b[1m", "OMP_NUM_THREADS": "3"}
    told = shown(capsys)
    capability = torch.backends.cpu.get_cpu_capability()
    assert told["cpu"] == f"Some Processor, 6 cores, {capability}, bf16"
    memory = "48.00 GiB free of 64.00 GiB, /dev/shm 64.00 MiB, locked without limit, open files 1,024"
    assert told["memory"] == memory
    assert told["gpu"] == "none that torch sees"
    assert told["set"] == "NCCL_DEBUG=[bold]INFO\\x1b[1m OMP_NUM_THREADS=3"  # no colour, and no terminal's command


def test_the_gpus_of_a_machine(imagined, monkeypatch, capsys):
    told = {"name": "Some GPU", "capability": [9, 0], "memory": 80 << 30, "free": 79 << 30}
    monkeypatch.setattr(device, "accelerators", lambda: [torch.device("cuda", at) for at in range(2)])
    monkeypatch.setattr(device, "hardware", lambda _: told)
    monkeypatch.setattr(device, "describe", lambda _: {"CUDA": "13.0", "deterministic algorithms": "False"})
    monkeypatch.setattr(device, "nccl", lambda: "2.28.9")
    each = {**told, "CUDA": "13.0", "deterministic algorithms": "False"}
    assert machine.facts()["devices"] == [each, each]
    machine.show(machine.facts())
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert [line for line in lines if line.startswith("gpu")] == [
        "gpu 0  Some GPU, 80.00 GiB",
        "gpu 1  Some GPU, 80.00 GiB",
    ]
    assert lines[2].endswith("NCCL 2.28.9")


def test_nothing_that_is_missing_is_an_error(imagined, monkeypatch, capsys):
    def absent(*_):
        raise FileNotFoundError

    monkeypatch.setattr(processor, "CPUINFO", imagined / "nowhere")
    monkeypatch.setattr(machine.launch, "memory_of_machine", absent)
    monkeypatch.setattr(machine.launch, "memory_told", dict)
    monkeypatch.setattr(os, "statvfs", absent)
    monkeypatch.delenv("NCCL_DEBUG")
    found = machine.facts()
    assert {found[name] for name in ("processor_name", "computes_bf16", "memory", "free_memory", "dev_shm")} == {None}
    told = shown(capsys)
    assert told["memory"].startswith("unknown free of unknown, /dev/shm absent, ")
    assert told["cpu"] == f"6 cores, {torch.backends.cpu.get_cpu_capability()}"
    assert told["set"] == "nothing that matters"
