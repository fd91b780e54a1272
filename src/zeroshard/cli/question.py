"""The question to `zeroshard verify`, and the grid of configurations that follows from it.

Imports no torch: bad input and `--help` are answered before anything slow is loaded.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, get_args

from zeroshard.cli.config import InputError, OptimizerOver, Precision, Reduce, Transport, within
from zeroshard.errors import nearest
from zeroshard.layout.stage import STAGES
from zeroshard.layout.states import placements

SMALL = "small"


class Difference(NamedTuple):
    """The first thing that is not equal. Steps count from 1, ranks, micro-batches and (flat) elements from 0."""

    step: int
    order: int  # losses first, then parameters as the model lists them
    what: str  # a parameter's name, or "loss of micro-batch 5"
    rank: int
    element: int | None
    got: str
    want: str
    extent: str
    owner: int | None = None

    @property
    def place(self) -> str:
        element = "" if self.element is None else f"[{self.element}]"
        return f"step {self.step}, {self.what}{element}, rank {self.rank}"

    @property
    def values(self) -> str:
        return f"{self.got} instead of {self.want} ({self.extent})"


class Configuration(NamedTuple):
    """One way to shard, and the number of ranks whose plain run it must equal."""

    stage: int
    bucket: str
    overlap: bool
    accumulate: int
    plain: int
    tier: str = "device"  # where all states rest
    replicas: int = 1
    over: str = "team"  # which ranks the optimizer is sharded over; "hosts": replicas are hosts, which have one copy
    transport: Transport = "auto"

    def __str__(self) -> str:
        size = self.bucket if self.bucket == SMALL else f"{self.bucket} MiB"
        where = "" if self.tier == "device" else f", all states in {self.tier}"
        copies = "" if self.replicas == 1 else f", {self.replicas} replicas"
        copies = f", {self.replicas} hosts" if self.over == "hosts" else copies
        copies += ", optimizer over all" if self.over == "all" else ""
        copies += "" if self.transport == "auto" else f", transport {self.transport}"
        return f"stage {self.stage}, buckets {size}, overlap {'on' if self.overlap else 'off'}{where}{copies}"

    @property
    def rows(self) -> dict[str, Any]:
        """The options that say how ranks are put together, and how they exchange data."""
        hosts = self.over == "hosts"
        replicas, over = (1, "team") if hosts else (self.replicas, self.over)
        count = self.replicas if hosts else 1
        return {"replicas": replicas, "hosts": count, "optimizer_over": over, "transport": self.transport}


@dataclass(frozen=True)
class Question:
    """The settings of `zeroshard verify`, one field per option; the plain run finds `buffers`."""

    job: str
    ranks: tuple[int, ...]
    stages: tuple[int, ...]
    buckets: tuple[str, ...]  # MiB, or "small"
    steps: int
    accumulate: int
    precision: Precision
    clip: float | None
    seed: int
    timeout: float
    buffers: tuple[str, ...] = ()
    tiers: tuple[str, ...] = ()  # of cpu and nvme, beside the device
    offload_path: str = ""
    replicas: tuple[int, ...] = (1,)
    transport: Transport = "auto"
    hosts: tuple[int, ...] = (1,)
    optimizer_over: tuple[str, ...] = ("team",)
    optimizer_in_backward: bool = False
    reduce: Reduce = "ordered"

    def __post_init__(self) -> None:
        for stage in self.stages:
            if stage not in range(4):
                raise InputError(f"--stage must be of 0, 1, 2 and 3, got {stage}")
        for name, least in {"steps": 1, "accumulate": 1, "seed": 0}.items():
            within(name, getattr(self, name), least)
        for tier in self.tiers:
            if tier not in ("cpu", "nvme"):
                raise InputError(f"--offload must be of cpu and nvme, got {tier!r}")
        if ("nvme" in self.tiers) != bool(self.offload_path):
            raise InputError("--offload nvme and --offload-path DIR go together: its files are in a folder there")
        for count in self.ranks:
            if count < 1:
                raise InputError(f"--ranks must be at least 1 each, got {count}")
        for count in self.replicas:
            if count < 1 or all(ranks % count for ranks in self.ranks):
                raise InputError(f"--replicas must divide one of --ranks each, got {count} for {list(self.ranks)}")
        for count in self.hosts:
            if count < 1 or all(ranks % count for ranks in self.ranks):
                raise InputError(f"--hosts must divide one of --ranks each, got {count} for {list(self.ranks)}")
        for ranks in self.ranks:
            if all(ranks % count for count in self.hosts):
                raise InputError(f"--hosts: one must divide {ranks} of --ranks, got {list(self.hosts)}")
            if not self.copies(ranks):
                raise InputError(f"--replicas: one must divide {ranks} of --ranks, got {list(self.replicas)}")
        if self.optimizer_in_backward and (self.accumulate > 1 or self.clip is not None):
            given = f"--accumulate {self.accumulate}" if self.accumulate > 1 else f"--clip {self.clip}"
            raise InputError(
                f"--optimizer-in-backward uses gradients as they come; with {given} it cannot. Try --accumulate 1"
            )
        for over in self.optimizer_over or ("",):
            if over not in get_args(OptimizerOver):
                raise InputError(f"--optimizer-over must be of team and all, got {over!r}")
        for ranks in self.ranks:
            if not self.meshes(ranks):
                raise InputError(
                    f"--optimizer-over all takes several --replicas and --stage 1, 2 or 3; on {ranks} ranks got "
                    f"{self.copies(ranks)} replicas and stages {list(self.stages)}; instead: --optimizer-over team,all"
                )
        for name in ("clip", "timeout"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise InputError(f"--{name} must be a number above 0, got {value}")

    # --- the grid ---------------------------------------------------------------------------------------------------

    def copies(self, ranks: int) -> list[int]:
        """List the numbers of replicas that divide so many ranks."""
        return [count for count in self.replicas if ranks % count == 0]

    def meshes(self, ranks: int) -> list[tuple[int, int, str]]:
        """List (stage, replicas, over which ranks the optimizer is sharded); and hosts of one copy, as replicas are.

        Over all is left out where it is no different: with one replica, and at stage 0. Several hosts have one replica.
        Where no single host is asked for, only several replicas stand beside them.
        """
        counts = [count for count in self.hosts if ranks % count == 0]
        hosts = [(stage, count, "hosts") for count in counts for stage in self.stages if count > 1]
        return hosts + [
            (stage, count, over)
            for count in self.copies(ranks)
            if count > 1 or 1 in counts
            for over in self.optimizer_over
            for stage in self.stages
            if over == "team" or (count > 1 and STAGES[stage].optimizer)
        ]

    def configurations(self, ranks: int) -> list[Configuration]:
        """List what `ranks` ranks run, in the order of the grid's rows; the last may be the elastic one."""
        meshes = self.meshes(ranks)
        grid = [
            self._one(ranks, stage, count, over, bucket, overlap)
            for stage, count, over in meshes
            for bucket in self.buckets
            for overlap in (True, False)
        ]
        # In the smallest buckets asked for: then there are more buckets than a file of states has buffers.
        grid += [
            self._one(ranks, stage, count, over, self.buckets[-1], True)._replace(tier=tier)
            for tier in self.tiers
            for stage, count, over in meshes
        ]
        most = self.elastic
        if most is not None and ranks < most and _is_power_of_two(ranks):
            more = self.accumulate * most // ranks
            grid.append(self.first_of(ranks)._replace(bucket=self.buckets[0], accumulate=more, plain=most))
        return grid

    def first_of(self, ranks: int) -> Configuration:
        """Return the configuration of other gates: the highest stage, with the fewest replicas or hosts."""
        stage, count, over = max(self.meshes(ranks), key=lambda mesh: (mesh[0], -mesh[1]))
        return self._one(ranks, stage, count, over, self.buckets[-1], True)

    def _one(self, ranks: int, stage: int, count: int, over: str, bucket: str, overlap: bool) -> Configuration:
        return Configuration(stage, bucket, overlap, self.accumulate, ranks, "device", count, over, self.transport)

    def masters_alone(self, configuration: Configuration) -> bool:
        """Tell whether only masters rest of sharded parameters on the device, so that nothing is split."""
        over = configuration.over
        place = placements(configuration.stage, spread=over == "all", hosts=over == "hosts")
        return place.together and configuration.tier == "device"

    @property
    def elastic(self) -> int | None:
        """The most ranks that fewer ranks with more micro-batches must equal; None where no two counts can.

        Sums are in one order at any rank count; dividing them by N and losses by A is exact for powers of two only.
        """
        counts = [count for count in self.ranks if _is_power_of_two(count)]
        if self.optimizer_in_backward or self.buffers:
            return None
        return max(counts) if len(counts) > 1 and _is_power_of_two(self.accumulate) else None

    @property
    def format(self) -> str:
        """Name the formats that its bits are those of: "fp32", "bf16-split", "fp32 with int8 gradients"."""
        return self.precision + " with int8 gradients" * (self.reduce == "int8")

    @property
    def baseline(self) -> Configuration:
        """The configuration that others are compared with where one plain process is no reference."""
        return self._one(0, 0, 1, "team", self.buckets[0], False)

    def reference(self, ranks: int) -> str:
        """Name the reference: stage 0 if training changes buffers, which one process cannot share as ranks do."""
        return "stage 0" if self.buffers and ranks > 1 else "plain PyTorch"

    # --- the folder the driver and its ranks share ------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        (folder / "question.json").write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> Question:
        fields = json.loads((folder / "question.json").read_text(encoding="utf-8"))
        known: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()}
        return cls(**known)

    def folder_of(self, folder: Path, ranks: int) -> Path:
        """Return the folder of the losses and weights that `ranks` ranks must arrive at, step by step."""
        return folder / f"plain-{ranks}"

    def results(self, folder: Path, ranks: int) -> Path:
        return folder / f"results-{ranks}.jsonl"


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def words(text: str) -> tuple[str, ...]:
    """Split `"cpu,nvme"` -> ("cpu", "nvme"), each once."""
    return tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def whole_numbers(option: str, text: str) -> tuple[int, ...]:
    """Parse `"2,3,4"` -> (2, 3, 4), each once."""
    found: list[int] = []
    for word in text.split(","):
        try:
            found.append(int(word))
        except ValueError:
            raise InputError(f"{option} takes whole numbers between commas, as in 1,2,3; got {text!r}") from None
    return tuple(dict.fromkeys(found))


def bucket_sizes(text: str) -> tuple[str, ...]:
    """Check and split `"24,small"` -> ("24", "small"), each once."""
    found: list[str] = []
    for word in text.split(","):
        word = word.strip()
        try:
            good = word == SMALL or 0 < float(word) < math.inf
        except ValueError:
            raise InputError(f"--bucket-mib: {word!r} is no size; {nearest(word, (SMALL, '24', '0.5'))}") from None
        if not good:
            raise InputError(f"--bucket-mib must be above 0 MiB, got {word}")
        found.append(word)
    return tuple(dict.fromkeys(found))
