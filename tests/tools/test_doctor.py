"""`zeroshard doctor`: what it says of a machine, and of claims that hold on it, do not, or cannot be tried there."""

from __future__ import annotations

import json
import os
import resource
from types import SimpleNamespace

import pytest
import torch

import emulated
from zeroshard import device
from zeroshard.cli import claims, machine, processor

TRIED = [
    "every test runs on this release of torch",
    "stages 0 to 3 have the bits of plain torch, on the CPU",
    "each rank holds the bytes that are predicted",
    "a checkpoint loads with its bits, at another stage",
    "states in files have the bits of states in memory",
    "ranks of this host may share memory",
]


@pytest.fixture
def imagined(tmp_path, monkeypatch):
    """A machine of files: one processor, two nodes, a driver, and a container's limit."""
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Some Processor\nflags\t\t: fpu avx512_bf16\n\n")
    for node, cores in {"node0": "0-3\n", "node1": "4-7\n"}.items():
        (tmp_path / "nodes" / node).mkdir(parents=True)
        (tmp_path / "nodes" / node / "cpulist").write_text(cores)
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.1\nGCC version: 13\n")
    number = os.stat(tmp_path).st_dev
    place = f"{os.major(number)}:{os.minor(number)}"
    (tmp_path / "mounts").write_text(
        f"1 2 9:9 / / rw - proc proc rw\n30 25 {place} / /scratch rw - xfs /dev/nvme0n1 rw\n"
    )
    monkeypatch.setattr(processor, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(machine, "NODES", tmp_path / "nodes")
    monkeypatch.setattr(machine, "DRIVER", tmp_path / "version")
    monkeypatch.setattr(machine, "MOUNTS", tmp_path / "mounts")
    monkeypatch.setattr(machine.launch, "memory_of_machine", lambda: 64 << 30)
    monkeypatch.setattr(machine, "_available", lambda: 48 << 30)
    limits = {resource.RLIMIT_MEMLOCK: resource.RLIM_INFINITY, resource.RLIMIT_NOFILE: 1024}
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limits.get(which, 77), 0))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(6)})
    room = SimpleNamespace(f_blocks=1 << 20, f_bavail=1 << 19, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda _: room)
    monkeypatch.setattr(machine, "_direct", lambda _: True)
    for name in [*os.environ]:
        if name in machine.VARIABLES or name.startswith(machine.PREFIXES):
            monkeypatch.delenv(name)
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    return tmp_path


def with_gpus(monkeypatch, count=2):
    """As if torch saw such GPUs. Nothing is tried on them."""
    there = [torch.device("cuda", at) for at in range(count)]
    told = {"name": "Some GPU", "capability": [9, 0], "memory": 80 << 30, "free": 79 << 30}
    monkeypatch.setattr(device, "accelerators", lambda: there)
    monkeypatch.setattr(device, "hardware", lambda _: told)
    monkeypatch.setattr(device, "peers", lambda devices: [[a != b for b in devices] for a in devices])
    monkeypatch.setattr(device, "nccl", lambda: "2.28.9")
    for name in ("_stages", "_bytes", "_checkpoint", "_files", "_arithmetic"):  # tried by the other tests
        monkeypatch.setattr(claims, name, lambda *_: "tried")
    monkeypatch.setattr(device, "pin", lambda *_: None)


def test_what_a_machine_says_of_itself(imagined, monkeypatch):
    with_gpus(monkeypatch)
    monkeypatch.setattr(machine, "_said", lambda words: f"\x1b[4m{words[0]}\x1b[0m\t{' '.join(words[1:])}")
    found = machine.facts(imagined)
    assert found["processor"] | {"kind": 0, "instructions": 0} == {
        "name": "Some Processor",
        "kind": 0,
        "instructions": 0,
        "computes bf16": True,
        "cores": 6,
        "threads": torch.get_num_threads(),
        "NUMA nodes": {"node0": "0-3", "node1": "4-7"},
    }
    room = {"size": 4 << 30, "free": 2 << 30}
    assert found["memory"] == {
        "limit": 64 << 30,
        "available": 48 << 30,
        "shared": room,
        "locked": None,
        "open files": 1024,
        "processes": 77,
    }
    assert found["accelerators"] == {
        "kind": "cuda",
        "devices": 2 * [{"name": "Some GPU", "capability": [9, 0], "memory": 80 << 30, "free": 79 << 30}],
        "peers": [[False, True], [True, False]],
        "driver": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.1",
        "topology": "nvidia-smi      topo -m",  # no colours, no tabs
    }
    assert found["disk"] | {"rotates": 0, "scheduler": 0} == {
        "folder": str(imagined),
        "file system": "xfs",
        "device": "/dev/nvme0n1",
        "room": room,
        "direct": True,
        "rotates": 0,
        "scheduler": 0,
    }
    assert found["environment"] == {"NCCL_DEBUG": "INFO"}
    assert found["torch"]["version"] == torch.__version__ and found["torch"]["NCCL"] == "2.28.9"
    said = dict(machine.lines(found))
    assert said["cuda:1"] == "Some GPU, capability 9.0, 79.00 GiB free of 80.00 GiB"
    assert said["peers"] == "all read each other's memory"
    assert said["memory"] == "48.00 GiB free of 64.00 GiB, shared 4.00 GiB, locked without limit, open files 1,024"
    assert said["disk"] == f"{imagined}, xfs, 2.00 GiB free, past the page cache"


def test_nothing_that_is_missing_is_an_error(imagined, monkeypatch, command):
    """No file of the system's, no tool: what they would say is not known, and the command goes on."""
    nowhere = imagined / "nowhere"
    for name in ("NODES", "DRIVER", "MOUNTS"):
        monkeypatch.setattr(machine, name, nowhere)
    monkeypatch.setattr(processor, "CPUINFO", nowhere)
    monkeypatch.setattr(machine, "_available", lambda: None)
    monkeypatch.setenv("PATH", str(nowhere))
    with_gpus(monkeypatch, 1)
    code, out, error = command("doctor", imagined, "--json")
    told = json.loads(out)
    assert (code, error) == (0, "")
    unknown = (told["processor"]["name"], told["processor"]["kind"], told["processor"]["computes bf16"])
    assert unknown == (None, None, None)
    assert (told["accelerators"]["driver"], told["accelerators"]["topology"]) == (None, None)
    assert (told["disk"]["file system"], told["memory"]["available"]) == (None, None)


def test_a_machine_without_accelerators(tmp_path, monkeypatch, command):
    """Each claim with what was seen of it, and for what takes more the command that tries it."""
    monkeypatch.setattr(device, "accelerators", list)
    monkeypatch.setattr(claims, "TESTED", torch.__version__)  # of make oldest and make newest too
    code, out, error = command("doctor", tmp_path, "--json")
    told = json.loads(out)
    assert (code, error, told["format"]) == (0, "", "zeroshard doctor 1")
    assert [each["claim"] for each in told["claims"] if each["verdict"] == "holds"] == TRIED
    rest = {each["claim"]: each["instead"] for each in told["claims"] if each["verdict"] == "not tested here"}
    assert rest == {
        "any number of ranks has these bits": "zeroshard verify",
        "accelerators have these bits too": "zeroshard doctor on a machine with one",
    }
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("nccl", [True, False])
def test_a_machine_with_gpus(tmp_path, monkeypatch, command, nccl):
    with_gpus(monkeypatch)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: nccl)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    code, out, _ = command("doctor", tmp_path, "--json")
    found = {each["claim"]: (each["verdict"], each["why"]) for each in json.loads(out)["claims"]}
    assert code == 1
    assert found["stages 0 to 3 have the bits of plain torch, on cuda"] == ("holds", "tried")
    assert found["offloaded states rest in pinned memory"] == ("holds", "1 MiB was pinned and released")
    assert found["replicas hand on their sums while kernels run"][0] == "does not hold"
    verdict, why = found["a run on accelerators has the same bits again"]
    assert verdict == "not tested here"
    assert "deterministic algorithms is False, CUBLAS_WORKSPACE_CONFIG is None" in why
    assert found["ranks on several accelerators have these bits"] == (
        ("not tested here", "2 accelerators, and it takes processes")
        if nccl
        else ("does not hold", "this build of torch has no NCCL")
    )


def test_a_claim_that_fails_says_where_and_ends_with_1(tmp_path, monkeypatch, command):
    plain = claims._plain

    def another(on):
        found = plain(on)
        found["0.weight"].view(-1)[11] += 1
        return found

    monkeypatch.setattr(device, "accelerators", list)
    monkeypatch.setattr(claims, "_plain", another)
    code, out, _ = command("doctor", tmp_path)
    said = " ".join(out.split())
    assert code == 1
    assert (
        "does not hold stages 0 to 3 have the bits of plain torch, on the CPU stage 0: element 11 of '0.weight' is"
        in said
    )
    assert "in plain torch; instead: report it, with zeroshard doctor --json" in said


def on_the_emulated_one(folder):
    from pathlib import Path

    return [(each.claim, each.verdict) for each in claims.claims(Path(folder))]


@pytest.mark.full
def test_claims_are_tried_on_an_accelerator(tmp_path):
    """Stages and sums on its late kernels; one device, so no ranks."""
    (found,) = emulated.run(1, on_the_emulated_one, str(tmp_path), seed=3)
    assert found[7:] == [
        ("stages 0 to 3 have the bits of plain torch, on emu", "holds"),
        ("sums, averages and casts on emu are the CPU's", "holds"),
        ("a run on accelerators has the same bits again", "not tested here"),
        ("offloaded states rest in pinned memory", "not tested here"),
        ("ranks on several accelerators have these bits", "not tested here"),
        ("replicas hand on their sums while kernels run", "not tested here"),
    ]


@pytest.mark.parametrize("folder", ["none", "/proc"])
def test_a_folder_that_takes_no_files_is_refused(folder, command):
    code, out, error = command("doctor", folder)
    assert (code, out) == (2, "")
    assert error == (
        f"zeroshard: {folder!r} takes no files: No such file or directory; name a folder on the disk that files would go to\n"
    )


def test_it_does_not_run_as_one_of_several_ranks(command, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    code, _, error = command("doctor")
    assert (code, error) == (
        2, "zeroshard: doctor looks at one machine, in one process; run it without torchrun\n"
    )  # fmt: skip
