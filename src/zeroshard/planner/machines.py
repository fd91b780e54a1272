"""A cluster in a few numbers, and the time that a collective takes on it. No torch.

The model is the usual one (Hockney; Thakur et al. 2005): a collective costs its hops times a latency, and its bytes
over the bandwidth of the narrowest link it crosses. A ring over several nodes enters and leaves each node once per
step, and all of a node's network cards carry rings at once, so it runs at the lesser of one GPU's link and the whole
node's network. An exchange in which every rank sends to every other (the ordered reduction) has no partial sums to
carry on: each rank's own network card takes everything that leaves the node.

A host costs too: it launches kernels, now and then waits until the device is through with all of them, and meets the
others. `overheads` counts how often.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path

from ..errors import UserError, nearest
from ..layout.mesh import messages
from .gpus import GIB, GPUS


@dataclass(frozen=True)
class Cluster:
    """One kind of cluster. Bandwidths are bytes per second, one way, per GPU; latencies seconds per hop.

    flops: dense 16-bit peak of one GPU. efficiency: the part of it that whole training steps reach without any
    communication. memory: bytes of one GPU, as torch reports them. memory_bandwidth: of that memory. gpus: in one node.
    link: between GPUs of a node. network: between nodes. link_latency, network_latency: per hop. source: where the
    numbers are from.
    launch: seconds of the host for one kernel. kernel: the least that one takes on the device. drain: seconds until the
    host hears that all has run, and is ahead again. message: one message of a meeting of all ranks, over gloo; a
    meeting takes its messages one after the other. These four have defaults for any host: `KNOWN_BY` says how each
    number is known.
    """

    name: str
    flops: float
    efficiency: float
    memory: int
    memory_bandwidth: float
    gpus: int
    link: float
    network: float
    link_latency: float
    network_latency: float
    source: str
    launch: float = 5e-6
    kernel: float = 2.5e-6
    drain: float = 40e-6
    message: float = 57e-6

    def ring_seconds(self, nbytes: float, ranks: int) -> float:
        """Return the time of an all-gather or reduce-scatter of `nbytes` in all over `ranks` ranks."""
        nodes = -(-ranks // self.gpus)
        narrowest = self.link if nodes == 1 else min(self.link, self.gpus * self.network)
        hops = (ranks - nodes) * self.link_latency + (nodes if nodes > 1 else 0) * self.network_latency
        return (ranks > 1) * hops + (ranks - 1) / ranks * nbytes / narrowest

    def exchange_seconds(self, nbytes: float, ranks: int) -> float:
        """Return the time of an exchange in which every rank sends every other its part of `nbytes`."""
        near = min(ranks, self.gpus)
        inside = (near - 1) / ranks * nbytes / self.link
        outside = (ranks - near) / ranks * nbytes / self.network
        return (ranks > 1) * (self.link_latency if ranks <= self.gpus else self.network_latency) + max(inside, outside)

    def meeting_seconds(self, ranks: int) -> float:
        """Return the time of one meeting of all ranks: the messages along the axes of a grid, one after the other."""
        return messages(ranks) * self.message

    def relay_seconds(self, on: float, back: float, replicas: int, group: int) -> tuple[float, float]:
        """Return (time of a relay, how long of that one rank's link is busy).

        A shard's running sum goes through `replicas` replicas of `group` ranks, and the average back to all of them.
        The replicas run a hop apart. With several nodes every hop is as slow as one between them.
        """
        near = replicas * group <= self.gpus
        link, latency = (self.link, self.link_latency) if near else (self.network, self.network_latency)
        hop, return_ = latency + on / link, latency + back / link
        return (replicas - 1) * (hop + latency) + back / link, hop + return_


KNOWN_BY: Mapping[str, str] = {
    "flops, memory, memory_bandwidth, link, network": "quoted, from data sheets that the source and `gpus.GPUS` name",
    "efficiency": "quoted, from a training run that the source names, or assumed where the source says so",
    "link_latency, network_latency": "assumed, in the range of published measurements",
    "launch": "assumed: 5 us, common for eager PyTorch",
    "kernel": "assumed: 2.5 us, what an empty kernel takes where the next one is queued",
    "drain": "computed from assumed: 10 us to hear of it, and 5 us for each of six kernels that the device waits for",
    "message": "assumed: 57 us for a small TCP message that hosts wait for: a meeting of 8 ranks takes 7, 0.4 ms",
}
_GB = 10**9


def _cluster(
    name: str, gpu: str, efficiency: float, gpus: int, link: float, network: float, hop: float, far: float, source: str
) -> Cluster:
    """Return a cluster of GPUs of `gpus.GPUS`. link, network: GB/s. hop, far: latencies, in microseconds."""
    one = GPUS[gpu]
    speeds = link * _GB, network * _GB, hop / 1e6, far / 1e6
    return Cluster(name, one.flops, efficiency, int(one.gib * GIB), one.bandwidth, gpus, *speeds, source)


MACHINES: Mapping[str, Cluster] = {
    machine.name: machine
    for machine in (
        _cluster(
            "dgx-2", "v100-32", 0.30, 16, 150, 6.25, 3, 8,
            "16 V100, NVSwitch, 8 x 100 Gb/s (NVIDIA DGX-2 data sheet); 39 TFLOP/s on one GPU (Shoeybi et al. 2019)",
        ),
        _cluster(
            "a100", "a100-80", 0.57, 8, 300, 25, 2, 6,
            "DGX A100: NVLink 3, 8 x 200 Gb/s (NVIDIA data sheet); 57 % of peak (Korthikanti et al. 2022, table 5)",
        ),
        _cluster(
            "h100", "h100-80", 0.42, 8, 450, 50, 2, 6,
            "DGX H100: NVLink 4, 8 x 400 Gb/s (NVIDIA data sheet); 42 % of peak (MosaicML llm-foundry, bf16 table)",
        ),
        _cluster(
            "h200", "h200", 0.42, 8, 450, 50, 2, 6,
            "DGX H200: NVLink 4, 8 x 400 Gb/s (NVIDIA data sheet); 42 % of peak assumed, as on the H100, the same chip",
        ),
        _cluster(
            "b200", "b200", 0.35, 8, 900, 50, 2, 6,
            "DGX B200: NVLink 5, 8 x 400 Gb/s (NVIDIA data sheet); 35 % of peak assumed in bf16, as in fp8: Llama 3 "
            "8B, 1576 TFLOP/s (NVIDIA Megatron Bridge, performance summary, 25.11)",
        ),
        _cluster(
            "mi300x", "mi300x", 0.23, 8, 448, 50, 2, 6,
            "8 MI300X, each with 7 links of 64 GB/s (AMD data sheet), 8 x 400 Gb/s (Azure ND MI300X v5); 23 % of peak "
            "computed: an H200 trains 8 B parameters 1.36 times as fast (alpharomercoma/MI300X-vs-H200, report)",
        ),
        _cluster(
            "a100-ethernet", "a100-80", 0.57, 8, 300, 6.25, 2, 20,
            "AWS p4de.24xlarge: NVLink 3 inside, 4 x 100 Gb/s between (AWS instance page)",
        ),
    )
}  # fmt: skip


def machine(name: str) -> Cluster:
    """Return one of `MACHINES`, by its own name or its GPU's, or what a JSON file of `Cluster`'s fields describes.

    Raises `UserError`.
    """
    if name.endswith(".json"):
        return _described(Path(name))
    kind = MACHINES.get(name.partition("-")[0])
    if kind is not None and name in GPUS and kind.memory == int(GPUS[name].gib * GIB):
        return kind
    if name not in MACHINES:
        raise UserError("no such machine", got=repr(name), instead=nearest(name, MACHINES) + ", or a .json file")
    return MACHINES[name]


def _described(path: Path) -> Cluster:
    wanted = {field.name: str if field.name in ("name", "source") else float for field in fields(Cluster)}
    optional = {field.name for field in fields(Cluster) if field.default is not MISSING}
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError("the machine's file cannot be read", where=str(path), got=str(error)) from error
    if not isinstance(told, dict) or not wanted.keys() - optional <= told.keys() <= wanted.keys():
        given = sorted(told) if isinstance(told, dict) else type(told).__name__
        raise UserError(
            f"a machine has just these fields; {', '.join(sorted(optional))} may be left out",
            where=str(path),
            expected=sorted(wanted),
            got=given,
        )
    for key, value in told.items():
        kind = wanted[key]
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < float("inf")
        if (kind is str and not isinstance(value, str)) or (kind is float and not number):
            expected = "text" if kind is str else "a number, not negative"
            raise UserError(
                "a machine's field is of another kind", where=f"{path}: {key}", expected=expected, got=repr(value)
            )
    for key in ("flops", "efficiency", "memory_bandwidth", "gpus", "link", "network"):
        if not told[key]:
            raise UserError("this field of a machine cannot be 0", where=f"{path}: {key}")
    return Cluster(**told | {"gpus": int(told["gpus"]), "memory": int(told["memory"])})
