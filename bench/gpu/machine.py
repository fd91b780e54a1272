"""Step: what the machine is, as zeroshard and the driver's own tools say it."""

from __future__ import annotations

import subprocess
import sys

from zeroshard.cli import machine

from .record import Record

TOOLS = {
    "driver": ["nvidia-smi", "-q"],
    "topology": ["nvidia-smi", "topo", "-m"],
    "peers": ["nvidia-smi", "topo", "-p2p", "r"],
    "disk": ["df", "-T"],
    "clocks": [
        "nvidia-smi",
        "--query-gpu=clocks.sm,clocks.mem,clocks.max.sm,power.limit,temperature.gpu",
        "--format=csv",
    ],
    "nodes": ["numactl", "--hardware"],
    "packages": [sys.executable, "-m", "pip", "list", "--format=freeze"],
}


def run(record: Record) -> None:
    record.measure("facts", machine.facts)
    for name, words in TOOLS.items():
        try:
            said = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout
        except (OSError, subprocess.SubprocessError) as error:
            record.skip(name, f"{words[0]}: {error}")
        else:
            record.measure(name, said.splitlines)
