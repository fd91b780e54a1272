"""Facts about this machine, as far as its files and tools tell them; a fact without its file or tool is None.

Nothing here is measured, and nothing raises: `zeroshard doctor` shows it beside the claims that it tries.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import resource
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zeroshard import device
from zeroshard.cli import launch, processor

TOOL = 10.0  # seconds that a tool of the system gets
VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_MODULE_LOADING", "CUDA_VISIBLE_DEVICES",
    "GLOO_SOCKET_IFNAME", "MKL_NUM_THREADS", "NVIDIA_TF32_OVERRIDE", "OMP_NUM_THREADS", "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF", "TORCH_GLOO_LAZY_INIT",
)  # fmt: skip
PREFIXES = ("NCCL_", "TORCH_NCCL_")
MOUNTS = Path("/proc/self/mountinfo")
NODES = Path("/sys/devices/system/node")
SHARED = Path("/dev/shm")
DRIVER = Path("/proc/driver/nvidia/version")


def facts(folder: Path) -> dict[str, dict[str, Any]]:
    """Collect all facts. folder: on the disk that is asked about."""
    return {
        "torch": torch_build(),
        "processor": cpu(),
        "memory": memory(),
        "accelerators": accelerators(),
        "disk": disk(folder),
        "flags": device.flags(),
        "environment": environment(),
    }


def torch_build() -> dict[str, Any]:
    known = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available, "mpi": dist.is_mpi_available}
    return {
        "version": torch.__version__,
        "commit": torch.version.git_version,
        "python": platform.python_version(),
        "CUDA": torch.version.cuda,
        "HIP": torch.version.hip,
        "NCCL": device.nccl(),
        "backends": [name for name, there in known.items() if there()],
    }


def cpu() -> dict[str, Any]:
    """Describe the processor. kind: equal on two machines whose libraries choose the same kernels."""
    nodes = {path.name: _text(path / "cpulist") for path in sorted(NODES.glob("node[0-9]*"))}
    return {
        "name": _name(),
        "kind": processor.kind() or None,
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "computes bf16": processor.computes_bf16(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "NUMA nodes": nodes or None,
    }


def _name() -> str | None:
    lines = (_text(processor.CPUINFO) or "").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)


def memory() -> dict[str, Any]:
    """Describe the memory. limit: what a container may take, or memory and swap. None for a limit: there is none."""
    return {
        "limit": _tried(launch.memory_of_machine),
        "available": _available(),
        "shared": _room(SHARED),
        "locked": _limit(resource.RLIMIT_MEMLOCK),
        "open files": _limit(resource.RLIMIT_NOFILE),
        "processes": _limit(resource.RLIMIT_NPROC),
    }


def _available() -> int | None:
    found: int | None = _tried(lambda: launch.memory_told()["MemAvailable"])
    return found


def _limit(which: int) -> int | None:
    limit, _ = resource.getrlimit(which)
    return None if limit == resource.RLIM_INFINITY else limit


def _room(folder: Path) -> dict[str, int] | None:
    found = _tried(lambda: os.statvfs(folder))
    return None if found is None else {"size": found.f_blocks * found.f_frsize, "free": found.f_bavail * found.f_frsize}


def accelerators() -> dict[str, Any]:
    """Describe the accelerators. topology: their connections as the driver's own tool draws them."""
    found = device.accelerators()
    return {
        "kind": found[0].type if found else None,
        "devices": [device.hardware(each) for each in found],
        "peers": device.peers(found),
        "driver": (_text(DRIVER) or "").partition("\n")[0] or None,
        "topology": _drawn(_said(["nvidia-smi", "topo", "-m"])) if found and found[0].type == "cuda" else None,
    }


def _drawn(said: str | None) -> str | None:
    """Return a tool's table without its colours, and with spaces in place of tabs."""
    return said and re.sub(r"\x1b\[[0-9;]*m", "", said).strip("\n").expandtabs()


def disk(folder: Path) -> dict[str, Any]:
    """Describe a folder's disk. direct: does its file system take reads and writes past the page cache?"""
    kind, source = _mount(folder)
    block = Path("/sys/dev/block", _number(folder) or "")
    queue = next((path for path in (block / "queue", block.resolve().parent / "queue") if path.is_dir()), None)
    return {
        "folder": str(folder),
        "file system": kind,
        "device": source,
        "room": _room(folder),
        "direct": _direct(folder),
        "rotates": None if queue is None else _text(queue / "rotational") == "1",
        "scheduler": None if queue is None else _text(queue / "scheduler"),
    }


def _number(folder: Path) -> str | None:
    found: str | None = _tried(lambda: f"{os.major(folder.stat().st_dev)}:{os.minor(folder.stat().st_dev)}")
    return found


def _mount(folder: Path) -> tuple[str | None, str | None]:
    """Return the kind of a folder's file system, and the device that it lies on."""
    number = _number(folder)
    for line in (_text(MOUNTS) or "").splitlines():
        words, _, more = line.partition(" - ")
        if words.split()[2] == number:
            kind, source = more.split()[:2]
            return kind, source
    return None, None


def _direct(folder: Path) -> bool:
    try:
        os.close(os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT, 0o600))
    except OSError:  # or it has no files without names
        return False
    return True


def environment() -> dict[str, str]:
    return {name: os.environ[name] for name in sorted(os.environ) if name in VARIABLES or name.startswith(PREFIXES)}


def _text(path: Path) -> str | None:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text().strip()
    return None


def _tried(ask: Callable[[], Any]) -> Any:
    with contextlib.suppress(OSError, ValueError, KeyError):
        return ask()
    return None


def _said(words: list[str]) -> str | None:
    """Return what a tool prints; None where it is not there, fails or hangs."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(words, capture_output=True, text=True, timeout=TOOL, check=True).stdout.rstrip()
    return None


def lines(found: dict[str, dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield the facts as (section, words), for people; unknown ones are left out."""
    from zeroshard.cli.screen import many, nbytes_text

    build, cpus, held, there, disks = (found[name] for name in ("torch", "processor", "memory", "accelerators", "disk"))
    with_ = [f"{name} {build[name]}" for name in ("CUDA", "HIP", "NCCL") if build[name]]
    yield "torch", ", ".join([build["version"], f"Python {build['python']}", *with_, f"{'/'.join(build['backends'])}"])
    bf16 = {True: "bf16", False: "no bf16", None: ""}[cpus["computes bf16"]]
    words = [cpus["name"], many(cpus["cores"], "core"), many(cpus["threads"], "thread"), cpus["instructions"], bf16]
    yield "cpu", ", ".join(filter(None, [*words, cpus["NUMA nodes"] and many(len(cpus["NUMA nodes"]), "NUMA node")]))
    room = held["shared"]
    words = [
        held["available"] and f"{nbytes_text(held['available'])} free",
        held["limit"] and f"of {nbytes_text(held['limit'])}",
    ]
    yield "memory", ", ".join([
        " ".join(filter(None, words)) or "unknown",
        f"shared {nbytes_text(room['size'])}" if room else "none shared",
        f"locked {'without limit' if held['locked'] is None else 'up to ' + nbytes_text(held['locked'])}",
        f"open files {'without limit' if held['open files'] is None else format(held['open files'], ',')}",
    ])  # fmt: skip
    for at, each in enumerate(there["devices"]):
        size = each["memory"] and f"{nbytes_text(each['free'])} free of {nbytes_text(each['memory'])}"
        capability = each["capability"] and "capability " + ".".join(map(str, each["capability"]))
        yield f"{there['kind']}:{at}", ", ".join(filter(None, [each["name"], capability, size]))
    if there["peers"] and len(there["peers"]) > 1:
        apart = [f"{a}-{b}" for a, row in enumerate(there["peers"]) for b, one in enumerate(row) if a != b and not one]
        yield "peers", "all read each other's memory" if not apart else f"not between {', '.join(apart)}"
    if there["driver"]:
        yield "driver", there["driver"]
    if not there["devices"]:
        yield "gpu", "none that torch sees"
    room, direct = disks["room"], "past the page cache" if disks["direct"] else "no O_DIRECT"
    free = room and f"{nbytes_text(room['free'])} free"
    yield "disk", ", ".join(filter(None, [disks["folder"], disks["file system"], free, direct]))
    if there["devices"]:
        yield "flags", ", ".join(f"{name}: {value}" for name, value in found["flags"].items())
    yield (
        "set",
        " ".join(f"{name}={value}" for name, value in found["environment"].items()) or "nothing that matters here",
    )
