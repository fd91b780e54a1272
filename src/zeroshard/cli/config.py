"""Settings of one training run, from a command line.

Imports neither torch nor numpy: bad input and `--help` are answered before anything slow is loaded.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, NamedTuple

from zeroshard.comm.launcher import ranks_to_join
from zeroshard.errors import UserError
from zeroshard.errors import one_line as one_line
from zeroshard.layout.stage import STATES
from zeroshard.planner.options import OTHERS


class InputError(UserError):
    """The command line or a file it names cannot be used; the message is one line, the exit code 2.

    All ranks of a machine meet it, so the first of them speaks for the others.
    """


FIELD = "\0"  # stands before the name of a field while an error is rewritten


def in_options(error: object, names: Iterable[str]) -> str:
    """Write an error of the Python call on one line, in a command's options: `gpu_mem="80GiB"` is `--gpu-mem 80GiB`.

    An argument is meant where it stands before `=`, at the beginning, or has an underscore; a field of a plan's
    `Model`, `Machine` or `Step` wherever it is named.
    """
    named = "|".join(sorted(map(re.escape, names), key=len, reverse=True))

    def option(match: re.Match[str]) -> str:
        return "--" + match[0].lstrip(FIELD).replace("_", "-")

    def valued(match: re.Match[str]) -> str:
        value = match[2].strip("\"'")
        return f"--{match[1].replace('_', '-')}" + (f" {value}" if value else "")

    text = one_line(error)
    for field, name in OTHERS.items():
        text = text.replace(field, name)
    text = re.sub(r'\b(?:Layout)\((?:\w+)=\{("[^"]*"): "edp"\}\)', r"experts=\1", text)
    text = re.sub(r"\bLayout\((align|matrices)=\{([^{}]*)\}\)", _by_pattern, text)
    text = re.sub(rf"\b(?:Layout|Comm|Offload|Precision)\.(?=(?:{named})\b)", "", text)
    text = re.sub(rf"\b(?:Model|Machine|Step)\.(?=(?:{named})\b)", FIELD, text)
    text = re.sub(rf"\b(?:Layout|Comm|Model|Machine|Step)\((?:\.\.\., )?((?:{named})=[^()]*)\)", r"\1", text)
    beginning = re.match(rf"(?:{FIELD}?(?:{named})(?:, | and )?)+(?=[\s:;]|$)", text)
    end = beginning.end() if beginning else 0
    head = re.sub(rf"\b(?:{named})\b", option, text[:end])
    rest = re.sub(rf"{FIELD}({named})\b", option, text[end:])
    rest = re.sub(rf"(?<![\w./-])({named})=([^\s,;)]*)", valued, rest)
    return head.replace(FIELD, "") + re.sub(rf"(?<![\w./-])(?=\w*_)(?:{named})\b(?!\.)", option, rest)


def _by_pattern(match: re.Match[str]) -> str:
    """Write a dict of patterns as an option takes it: `matrices=*.qkv.weight=3`."""
    return f"{match[1]}=" + re.sub(r"""['"]([^'"]*)['"]: ['"]?(\w+)['"]?(?:, (?=.))?""", r"\1=\2,", match[2]).rstrip(
        ","
    )


Precision = Literal[
    "fp32", "bf16", "bf16-split", "fp32-fp8", "bf16-fp8",
    "fp32-states16", "bf16-states16", "fp32-states16-drawn", "bf16-states16-drawn",
]  # fmt: skip
GradDtype = Literal["fp32", "bf16"]
FloatingPoint = Literal["fp64", "fp32", "bf16", "fp16"]
Size = Literal["tiny", "deep", "small", "medium"]
Device = Literal["auto", "cpu", "cuda"]
Transport = Literal["auto", "gloo", "shared"]
OptimizerOver = Literal["team", "all"]
Reduce = Literal["ordered", "int8"]


class Shape(NamedTuple):
    """One size of the model. Larger ones want smaller steps, so the default learning rate is part of the row."""

    blocks: int
    hidden: int
    heads: int
    context: int  # bytes the model sees at once
    lr: float

    @property
    def numel(self) -> int:
        """Number of parameters of a model of this size."""
        of_block = 12 * self.hidden**2 + 9 * self.hidden  # weights; two norms, and the biases of the two linears
        return self.blocks * of_block + (2 * 256 + self.context + 2) * self.hidden


SIZES: Mapping[Size, Shape] = {
    "tiny": Shape(blocks=3, hidden=128, heads=4, context=64, lr=6e-3),  # 0.7 M parameters
    "deep": Shape(blocks=12, hidden=128, heads=4, context=64, lr=3e-3),  # 2.4 M, in blocks small beside the whole
    "small": Shape(blocks=6, hidden=384, heads=6, context=256, lr=1e-3),  # 11 M
    "medium": Shape(blocks=12, hidden=768, heads=12, context=512, lr=4e-4),  # 86 M
}


PLACED = (*STATES, "activations", "step")  # what --offload-... names; --offload alone is for states


def places(offload: str, **given: str) -> dict[str, str]:
    """Return {state: where it rests} by --offload and --offload-STATE, without what stays on the device, and "step":
    the processor that --offload-step names.

    given: of the names in `PLACED`.
    """
    if offload not in ("", "cpu", "nvme"):
        raise InputError(f"--offload must be cpu or nvme, got {offload!r}; for one state --offload-optimizer and so on")
    found = {what: given.get(what) or (offload if what in STATES else "") for what in PLACED}
    return {what: where for what, where in found.items() if where and (what == "step" or where != "device")}


def offload_of(places: Mapping[str, str], path: str) -> Any:
    """Make the `Offload` of a command line. Raises `InputError` for what it cannot be."""
    for what, text in places.items():
        if text == "nvme" and not path:
            raise InputError(f"--offload-{what} nvme needs a folder on a disk: --offload-path DIR")
    from zeroshard.policies.offload import Offload

    def where(text: str) -> str | float:
        try:
            return float(text)
        except ValueError:
            return text

    try:
        return Offload(**{what: where(text) for what, text in places.items()}, path=path or None)  # type: ignore[arg-type]
    except UserError as error:
        said = one_line(error).replace("Offload.path", "--offload-path")
        for what in PLACED:
            said = said.replace(f"Offload.{what}", f"--offload-{what}")
        others = {"--offload-activations": "device, cpu or nvme", "--offload-step": "host or device"}
        tiers = others.get(said.partition(" ")[0], "device, cpu, nvme or a fraction")
        raise InputError(f"{said.partition('; instead: ')[0]}; instead: {tiers}") from error


def planned_offload(places: Mapping[str, str]) -> Any:
    """Make the `Offload` of a command that makes no files; None where all states stay on the device."""
    return offload_of(places, "." if "nvme" in places.values() else "") if places else None


# Limits of options: far beyond any run, and within 64-bit counters and seeds.
MOST = {"steps": 10**12, "batch": 2**16, "accumulate": 2**20, "seed": 2**63 - 1, "depth": 2**10, "rounds": 10**6}


def within(name: str, value: int, least: int) -> None:
    """Refuse a number below the least of its option, or above its `MOST`."""
    option = f"--{name.replace('_', '-')}"
    if value < least:
        raise InputError(f"{option} must be at least {least}, got {value}")
    if value > MOST.get(name, value):
        raise InputError(f"{option} must be at most {MOST[name]}, got {value}")


@dataclass(frozen=True)
class RunConfig:
    """The settings of `zeroshard train`, one field per option, as the ranks get them and as `run.json` records them."""

    out: str
    data: tuple[str, ...]  # empty: the Python files of the standard library
    stage: int
    ranks: int
    steps: int
    batch: int
    accumulate: int
    precision: Precision
    size: Size
    lr: float
    seed: int
    device: Device
    report: bool
    save_every: int  # steps; 0: only at the end
    keep: int  # checkpoints
    resume: str  # a run's folder or a checkpoint; empty: a new run
    grad_dtype: GradDtype = "fp32"
    recompute: bool = False
    offload_parameters: str = ""  # device, cpu, nvme or the fraction in host memory; empty: on the device
    offload_gradients: str = ""
    offload_optimizer: str = ""
    offload_activations: str = ""  # device, cpu or nvme
    offload_step: str = ""  # host or device
    offload_path: str = ""
    replicas: int = 1
    timeout: float = 1800.0  # seconds
    transport: Transport = "auto"
    hosts: int = 1
    optimizer_over: OptimizerOver = "team"
    reduce: Reduce = "ordered"

    def __post_init__(self) -> None:
        # Here rather than in the option parser, whose refusals do not say what they got.
        if self.stage not in range(4):
            raise InputError(f"--stage must be 0, 1, 2 or 3, got {self.stage}")
        least_of = {"ranks": 1, "steps": 1, "batch": 1, "accumulate": 1, "seed": 0, "save_every": 0, "keep": 1}
        for name, least in least_of.items():
            within(name, getattr(self, name), least)
        for name in ("replicas", "hosts"):
            count = getattr(self, name)
            if count < 1 or self.ranks % count:
                fewest = max(count, 1)
                raise InputError(
                    f"--{name} must divide --ranks {self.ranks}, got {count}; "
                    f"instead: --ranks {-(-self.ranks // fewest) * fewest}, or --{name} 1"
                )
        if self.optimizer_over == "all" and self.stage == 0:
            raise InputError("--optimizer-over all takes --stage 1, 2 or 3: at stage 0 every rank keeps all states")
        if not 0 < self.timeout <= 1e9:
            raise InputError(f"--timeout must be a positive number of seconds, up to a billion, got {self.timeout}")
        if not (self.lr > 0 and math.isfinite(self.lr)):
            raise InputError(f"--lr must be a number above 0, got {self.lr}; for {self.size!r} try {self.shape.lr}")

    @property
    def offload(self) -> Any:
        """The `Offload` that is asked for. Raises `InputError`."""
        given = {what: getattr(self, f"offload_{what}") for what in PLACED}
        return offload_of(places("", **given), self.offload_path)

    @property
    def shape(self) -> Shape:
        return SIZES[self.size]

    def command(self) -> list[str]:
        """Write the settings as a command line: `["train", "--out", "run", "--stage", "3", ..., "--report"]`."""
        words = ["train"]
        for field in fields(self):
            value, name = getattr(self, field.name), field.name.replace("_", "-")
            if isinstance(value, bool):
                words.append(f"--{name}" if value else f"--no-{name}")
            elif value != "":
                for one in value if isinstance(value, tuple) else (value,):
                    words += [f"--{name}", str(one)]
        return words

    def record(self) -> dict[str, object]:
        return {**asdict(self), "model": self.shape._asdict()}


class Launch(NamedTuple):
    """This process's place among the ranks, as torchrun's environment tells it; one rank where there is none."""

    rank: int
    ranks: int
    local_rank: int
    local_ranks: int

    @classmethod
    def from_environment(cls) -> Launch | None:
        """Read torchrun's environment; None without a launcher. Raises `UserError` where only a part of it is set."""
        ranks = ranks_to_join(os.environ)
        if not (os.environ.get("RANK") and os.environ.get("WORLD_SIZE")):
            return None
        rank = int(os.environ["RANK"])
        return cls(rank, ranks, int(os.environ.get("LOCAL_RANK", rank)), int(os.environ.get("LOCAL_WORLD_SIZE", ranks)))
