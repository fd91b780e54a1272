"""Step: what the machine is, as `zeroshard doctor` and the driver's own tool say it."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from typing import Any

from .record import Record, Wrong

TOOLS = {
    "driver": ["nvidia-smi", "-q"],
    "topology": ["nvidia-smi", "topo", "-m"],
    "clocks": [
        "nvidia-smi",
        "--query-gpu=clocks.sm,clocks.mem,clocks.max.sm,power.limit,temperature.gpu",
        "--format=csv",
    ],
    "nodes": ["numactl", "--hardware"],
    "packages": [sys.executable, "-m", "pip", "list", "--format=freeze"],
}


def run(record: Record) -> None:
    record.case("zeroshard doctor", _doctor)
    for name, words in TOOLS.items():
        try:
            said = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout
        except (OSError, subprocess.SubprocessError) as error:
            record.skip(name, f"{words[0]}: {error}")
        else:
            record.measure(name, said.splitlines)


def _doctor() -> dict[str, Any]:
    words = [sys.executable, "-m", "zeroshard", "doctor", tempfile.gettempdir(), "--json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode not in (0, 1):
        raise Wrong(done.stderr)
    told: dict[str, Any] = json.loads(done.stdout)
    failed = [f"{each['claim']}: {each['why']}" for each in told["claims"] if each["verdict"] == "does not hold"]
    if failed:
        raise Wrong("; ".join(failed))
    return told
