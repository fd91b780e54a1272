"""What a plan is asked of: a model, a machine, and what is known of a step. Imports no torch.

Each refuses what it cannot be as it is made; what does not go together with another, or with a policy, `plan` refuses.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import UserError
from . import gpus, quantities
from .disk import check_speeds
from .quantities import COUNT, whole

UNITS_LIMIT = 1 << 12
COUNTED = 1 << 30  # the most backwards of a step, sequences, and tokens of one
KINDS = "params", "shapes", "job"  # of models: one of them is given
SHAPES = ".json", ".safetensors"  # names of files of shapes end so, an index too
FORMS = 'plan("7B"), of so many parameters; plan("model.safetensors"), of shapes; or plan("train:job"), of a job'


@dataclass(frozen=True)
class Model:
    """A model to plan: one of `params`, `shapes` and `job`, and what its bytes are.

    params: how many parameters: 7e9, "7B".
    shapes: a JSON, safetensors or Hugging Face file or folder.
    job: "module:function" or the function (see `planner.job`), run as it is on tensors without memory.
    preset: bytes per parameter by name: "zeroshard", as the engine holds them, or "paper", ... Not of a job.
    bytes: a formula instead of a preset: "parameters=2,gradients=2,master=4,m=4,v=4". Not of a job.
    optimizer: another optimizer's states in the preset, by a preset's name or as a class of torch.optim. Not of a job.
    units: with `params`, the number of equal blocks, for the peaks of a step. On a machine of which `gpu` or `gpu_mem`
        is known None is the usual depth of a transformer of so many parameters.

    Raises `UserError` for other than one of the first three, and for whatever does not go with it.

    Examples:
        >>> zeroshard.plan(zeroshard.Model("7B", preset="paper"), zeroshard.Machine(ranks=8), stage=3).stages[0].total
        14000000000
    """

    params: str | float | None = None
    shapes: str | os.PathLike[str] | None = None
    job: str | Callable[[], Any] | None = None
    preset: str | None = None
    bytes: str | None = None
    optimizer: str | None = None
    units: int | None = None

    def __post_init__(self) -> None:
        given = [name for name in KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            raise UserError(
                "Model takes one of params, shapes and job", got=" and ".join(given) or "none of them",
                instead='Model(params=7e9), Model(shapes="model.safetensors") or Model(job="train:job")',
            )  # fmt: skip
        if self.params is not None:
            quantities.count(self.params, "Model.params")
        _check_path("Model.shapes", self.shapes)
        if self.job is not None and not (isinstance(self.job, str) or callable(self.job)):
            raise UserError(
                "Model.job is a function, or its name", got=repr(self.job), instead='Model(job="train:job")'
            )
        kept = {name: value for name in ("preset", "bytes", "optimizer") if (value := getattr(self, name)) is not None}
        for name, value in kept.items():
            if not isinstance(value, str):
                raise UserError(f"Model.{name} is a text", got=repr(value), instead=f"leave {name} out")
        if self.job is not None and kept:
            told = " and ".join(f"Model.{name}" for name in kept)
            raise UserError(f"{told}: a job says itself what it holds", instead="leave it out")
        if self.preset is not None and self.bytes is not None:
            raise UserError(
                "Model.preset and Model.bytes both say how many bytes a parameter takes", instead="one of the two"
            )
        if self.units is not None:
            whole("Model.units", self.units, UNITS_LIMIT)
            if self.params is None:
                raise UserError(
                    "Model.units stand for shapes that are not known", got="a job or shapes", instead="leave it out"
                )

    @classmethod
    def of(cls, model: object) -> Model:
        """Return the model that `plan` is given: a `Model`, or one of its three forms by what it looks like.

        A number, or a string that is a quantity ("7B"), counts parameters. A path that exists, or whose name is of a
        file of shapes, has shapes. A function, or any other string with a colon, is a job. Raises `UserError` for
        anything else.
        """
        if isinstance(model, Model):
            return model
        form = form_of(model)
        if form is None:
            raise UserError(
                "plan takes a model: how many parameters, a path to its shapes that exists, or a job",
                got=spelled(model), instead=FORMS,
            )  # fmt: skip
        return cls(**{form: model})  # type: ignore[arg-type]


def form_of(model: object) -> str | None:
    """Return which field of `Model` this is: "params", "shapes" or "job"; None where it looks like none of them."""
    if isinstance(model, (int, float)):
        return None if isinstance(model, bool) else "params"
    if isinstance(model, os.PathLike):
        return "shapes"
    if not isinstance(model, str):
        return "job" if callable(model) else None
    if COUNT.fullmatch(model):
        return "params"
    if model.endswith(SHAPES) or (model and os.path.exists(model)):
        return "shapes"
    return "job" if ":" in model else None


@dataclass(frozen=True)
class Machine:
    """What a model is trained on. Whatever is None is not known, and nothing is said of it.

    ranks: how many ranks share the states.
    gpu: a GPU by name, such as "h100-80": does it fit into what a process can fill of its memory (`gpus.py`), and which
        way is the fastest that does (`fitting`)?
    gpu_mem: the same of a budget in bytes with a unit, such as "80GiB".
    host_mem: a budget for one rank's share of host memory, such as "200GiB".
    disk: the size of one rank's share of a disk, such as "1TB".
    disk_read, disk_write: what the disk reads and writes in GB/s, as `fio` measures it; assumed if only `disk` is told.
    gpus_per_node: GPUs of a node, to plan what one GPU's links inside and between nodes carry.
    cluster: a cluster by name, or a JSON file of its numbers (`machines.Cluster`): which `Comm.replicas` and
        `Comm.optimizer` take least time on it, of those that fit into its memory, or `gpu_mem`.
    ep: among how many ranks the parameters of `Layout.along` are divided; a job's model has one rank's.

    Raises `UserError` for a number that is none, for a GPU or a budget that cannot be read, and for `gpu` beside
    `gpu_mem`.

    Examples:
        >>> machine = zeroshard.Machine(ranks=8, gpu_mem="24GB", host_mem="64GiB")
        >>> found = zeroshard.plan("7B", machine)
    """

    ranks: int = 1
    gpu: str | None = None
    gpu_mem: str | None = None
    host_mem: str | None = None
    disk: str | None = None
    disk_read: float | None = None
    disk_write: float | None = None
    gpus_per_node: int | None = None
    cluster: str | None = None
    ep: int | None = None

    def __post_init__(self) -> None:
        whole("Machine.ranks", self.ranks, sys.maxsize)  # how many are too many depends on the model
        if self.gpu is not None and self.gpu_mem is not None:
            raise UserError(
                "Machine.gpu and Machine.gpu_mem both say how much memory there is",
                got=f"gpu={self.gpu!r}, gpu_mem={self.gpu_mem!r}", instead="one of the two",
            )  # fmt: skip
        if self.gpu is not None:
            gpus.named(self.gpu)
        for name in ("gpu_mem", "host_mem", "disk"):
            if (value := getattr(self, name)) is not None:
                quantities.budget(value, f"Machine.{name}")
        check_speeds(self.disk_read, self.disk_write)
        for name in ("gpus_per_node", "ep"):
            if (value := getattr(self, name)) is not None:
                whole(f"Machine.{name}", value, sys.maxsize)
        if self.cluster is not None and not isinstance(self.cluster, str):
            raise UserError(
                "Machine.cluster is a name, or a .json file", got=repr(self.cluster), instead='Machine(cluster="h100")'
            )

    @property
    def limit(self) -> int | None:
        """Return the bytes of the device's memory that are asked about, if any are."""
        if self.gpu is not None:
            return gpus.usable(self.gpu, self.ranks, self.gpus_per_node)
        return None if self.gpu_mem is None else quantities.budget(self.gpu_mem, "Machine.gpu_mem")


@dataclass(frozen=True)
class Step:
    """What is known of a training step of one rank.

    accumulate: backwards per step.
    no_sync: gradients are added up on the rank before one reduction.
    batch, seq: of a number and of shapes, the sequences of a micro-batch and the tokens of each: activations are
        counted by a formula (`transformer.py`). Of either alone the other is 1, or 2048.
    seconds: how long a step takes, for the disk's wear.
    tokens: tokens in one rank's step, for the tokens per second that the disk allows.

    Raises `UserError` for a number that is none.

    Examples:
        >>> step = zeroshard.Step(accumulate=4)
        >>> [stage.traffic.passes for stage in zeroshard.plan("7B", zeroshard.Machine(ranks=8), step=step).stages]
        [5, 5, 5, 12]
    """

    accumulate: int = 1
    no_sync: bool = False
    batch: int | None = None
    seq: int | None = None
    seconds: float | None = None
    tokens: str | float | None = None

    def __post_init__(self) -> None:
        whole("Step.accumulate", self.accumulate, COUNTED)
        if not isinstance(self.no_sync, bool):
            raise UserError("Step.no_sync is True or False", got=repr(self.no_sync), instead="Step(no_sync=True)")
        for name in ("batch", "seq"):
            if (value := getattr(self, name)) is not None:
                whole(f"Step.{name}", value, COUNTED)
        took = self.seconds
        if took is not None and not (isinstance(took, (int, float)) and 0 < took < math.inf):
            raise UserError("Step.seconds counts seconds", got=repr(took), instead="Step(seconds=2.5)")
        if self.tokens is not None:
            quantities.count(self.tokens, "Step.tokens")


def _check_path(name: str, path: object) -> None:
    if path is not None and not isinstance(path, (str, os.PathLike)):
        field = name.rpartition(".")[2]
        raise UserError(f"{name} is a path", got=repr(path), instead=f'{name.partition(".")[0]}({field}="file.json")')


# Where each setting is that the command line, and `plan` of earlier versions, has by one name: {name: (class, field)}.
PLACES: Mapping[str, tuple[type, str]] = {
    **{name: (Model, name) for name in Model.__dataclass_fields__},
    **{name: (Machine, name) for name in Machine.__dataclass_fields__ if name != "cluster"},
    **{name: (Step, name) for name in Step.__dataclass_fields__ if name != "seconds"},
    "machine": (Machine, "cluster"),
    "step_time": (Step, "seconds"),
}


def from_flat(settings: Mapping[str, Any]) -> tuple[Model, Machine, Step, dict[str, Any]]:
    """Make the model, machine and step of settings by the names of the command line's options; None is as left out.

    Returns the settings of none of them too, as they are. Raises `UserError` as the three do.
    """
    made: dict[type, dict[str, Any]] = {Model: {}, Machine: {}, Step: {}}
    rest = {}
    for name, value in settings.items():
        if name not in PLACES:
            rest[name] = value
        elif value is not None:
            kind, field = PLACES[name]
            made[kind][field] = value
    return Model(**made[Model]), Machine(**made[Machine]), Step(**made[Step]), rest


def call(settings: Mapping[str, Any], rest: Mapping[str, str]) -> str:
    """Write the call of `plan` that flat settings are: `plan("7B", Machine(ranks=8), stage=3)`.

    settings: as of `from_flat`, unchecked. rest: {argument: its text}. Without a model "7B" stands for one.
    """
    told: dict[type, dict[str, Any]] = {Model: {}, Machine: {}, Step: {}}
    for name, value in settings.items():
        if value is not None:
            kind, field = PLACES[name]
            told[kind][field] = value
    of = told[Model]
    if not (models := {name: of[name] for name in KINDS if name in of}):
        models = {"params": "7B"}
    if len(models) > 1:
        Model(**models)  # says that it is one of them
    ((form, value),) = models.items()
    alone = of.keys() <= {form} and form_of(os.fspath(value) if isinstance(value, os.PathLike) else value) == form
    words = [spelled(value) if alone else written("Model", models | of)]
    words += [written("Machine", told[Machine])] if told[Machine] else []
    words += [f"step={written('Step', told[Step])}"] if told[Step] else []
    return f"plan({', '.join([*words, *(f'{name}={text}' for name, text in rest.items())])})"


def flat(*parts: object) -> dict[str, Any]:
    """Return what models, machines and steps say, by the names of the command line's options, without defaults."""
    return {
        name: value
        for name, (kind, field) in PLACES.items()
        for part in parts
        if isinstance(part, kind) and (value := getattr(part, field)) != getattr(kind, field)
    }


def written(kind: str, fields: Mapping[str, Any]) -> str:
    """Write a call: `Machine(ranks=8, gpu="h100-80")`."""
    return f"{kind}({', '.join(f'{name}={spelled(value)}' for name, value in fields.items())})"


def spelled(value: object) -> str:
    """Write a value as in a call: text and paths in double quotes, functions by name."""
    if isinstance(value, (str, os.PathLike)):
        return json.dumps(os.fspath(value), ensure_ascii=False)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{spelled(key)}: {spelled(each)}" for key, each in value.items()) + "}"
    name = getattr(value, "__name__", None)
    return repr(value) if name is None else "function" if "<" in name else name  # a lambda has no name
