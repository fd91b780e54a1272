"""The logs of a run, read and checked. Reading executes no code, and needs no torch."""

from __future__ import annotations

import json
import math
import re
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import UserError

FORMAT, VERSION = "zeroshard run log", 1
_INTEGERS = {
    "float32": ("<f", "<i", 0),
    "bfloat16": ("<f", "<i", 16),
    "float64": ("<d", "<q", 0),
    "float16": ("<e", "<h", 0),
}
_FILE = re.compile(r"rank\d{5}\.jsonl")


class Told(NamedTuple):
    """A whole tensor: the digest of its bits, its dtype, norm, and some elements."""

    digest: str
    dtype: str
    norm: float
    samples: list[float]


class Backward(NamedTuple):
    """One micro-batch: its loss, and what it has added to the logged elements of each gradient."""

    loss: float
    added: dict[str, list[float]]


class Value(NamedTuple):
    """A tensor of a trace: as of `Told`, with its number of elements."""

    digest: str
    dtype: str
    numel: int
    samples: list[float]


class Call(NamedTuple):
    """One call of a module, in a trace. Of a backward, outputs are the gradient of one of its outputs."""

    direction: str  # forward, backward
    module: str
    kind: str  # its class
    call: int  # of its module in this step, from 0
    output: int  # of a backward: whose gradient it is; else 0
    inputs: list[str]  # digests
    outputs: list[Value]

    @property
    def key(self) -> tuple[str, str, int, int]:
        return self.direction, self.module, self.call, self.output


@dataclass
class Step:
    weights: dict[str, Told] | None = None  # before it
    backwards: list[Backward] = field(default_factory=list)
    gradients: dict[str, Told] | None = None  # that it used
    calls: list[Call] = field(default_factory=list)  # of modules, if they were traced


@dataclass
class Log:
    """One rank's."""

    rank: int
    ranks: int
    samples: int
    shapes: dict[str, tuple[int, ...]]
    processor: str = ""  # the instructions that kernels use, as torch names them
    steps: list[Step] = field(default_factory=list)


@dataclass
class Run:
    folder: str
    logs: list[Log]  # by rank

    @property
    def first(self) -> Log:
        return self.logs[0]

    @property
    def closed(self) -> bool:
        """Tell if the weights that its last step has made are in every log: `RunLog.close` writes them."""
        return all(log.steps and log.steps[-1].gradients is None for log in self.logs)


def read(folder: Path) -> Run:
    """Read a folder of logs. Raises `UserError` for what is none, or not of one run."""
    files = sorted(path for path in folder.glob("*.jsonl") if _FILE.fullmatch(path.name)) if folder.is_dir() else []
    if not files:
        raise UserError("no run log here", where=str(folder), expected="rank00000.jsonl", instead="RunLog(folder, ...)")
    logs = [_log(path) for path in files]
    whole = [file_of(rank) for rank in range(logs[0].ranks)] == [path.name for path in files]
    if not whole or any((log.rank, log.ranks) != (rank, len(logs)) for rank, log in enumerate(logs)):
        ranks = [f"{log.rank} of {log.ranks}" for log in logs]
        raise UserError("this is not the log of one run", where=str(folder), expected="a file of every rank", got=ranks)
    return Run(str(folder), logs)


def _log(path: Path) -> Log:
    log: Log | None = None
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, text in enumerate(lines, start=1):
        try:
            line = json.loads(text)
            if log is None:
                if (line["format"], line["version"]) != (FORMAT, VERSION):
                    raise ValueError(f"{line['format']} {line['version']}"[:80])
                shapes = {str(name): tuple(map(int, shape)) for name, shape, _ in line["parameters"]}
                log = Log(
                    int(line["rank"]), int(line["ranks"]), int(line["samples"]), shapes, str(line.get("processor", ""))
                )
                continue
            _add(log, line)
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            if number == len(lines) and log is not None:  # the run is writing it, or was killed while it wrote
                break
            where, got = f"{path}, line {number}", f"{type(error).__name__}: {error}"[:200]
            raise UserError("a line of the run's log cannot be read", where=where, got=got) from error
    if log is None:
        raise UserError("the run's log is empty", where=str(path))
    return log


def _add(log: Log, line: dict[str, Any]) -> None:
    at = line["step"]
    if type(at) is not int or not 0 <= at <= len(log.steps):
        raise ValueError(f"step {at!r}")
    if at == len(log.steps):
        log.steps.append(Step())
    step = log.steps[at]
    if "loss" in line:
        added = {str(name): [*map(float, values)] for name, values in line["added"].items()}
        step.backwards.append(Backward(float(line["loss"]), added))
    elif "calls" in line:
        step.calls += map(_call, line["calls"])
    elif "weights" in line:
        step.weights = _told(line["weights"])
    else:
        step.gradients = _told(line["gradients"])


def _call(told: list[Any]) -> Call:
    direction, module, kind, call, output, inputs, outputs = told
    values = [
        Value(str(found), str(dtype), int(numel), [*map(float, samples)]) for found, dtype, numel, samples in outputs
    ]
    return Call(str(direction), str(module), str(kind), int(call), int(output), [*map(str, inputs)], values)


def _told(table: dict[str, Any]) -> dict[str, Told]:
    return {
        str(name): Told(str(found), str(dtype), float(norm), [*map(float, samples)])
        for name, (found, dtype, norm, samples) in table.items()
    }


def file_of(rank: int) -> str:
    return f"rank{rank:05}.jsonl"


def places(numel: int, samples: int) -> list[int]:
    """Return which elements of a tensor are logged: the first, the last, and others evenly between them."""
    count = min(numel, samples)
    return [at * (numel - 1) // (count - 1) if count > 1 else 0 for at in range(count)]


def ulps_between(x: float, y: float, dtype: str) -> int | None:
    """Count the numbers of a dtype between two of them; None for a dtype without such, or for no numbers."""
    if dtype not in _INTEGERS or not (math.isfinite(x) and math.isfinite(y)):
        return None
    number, integer, shift = _INTEGERS[dtype]

    def place(value: float) -> int:
        (bits,) = struct.unpack(integer, struct.pack(number, value))
        bits = int(bits)
        return (bits if bits >= 0 else -(bits & (1 << (8 * struct.calcsize(integer) - 1)) - 1)) >> shift

    return abs(place(x) - place(y))
