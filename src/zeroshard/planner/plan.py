"""`plan`: what a model takes per rank at every stage, whether it fits, and what to change if not.

plan(params=...)            the closed form: three numbers and a recipe (`from_number`)
plan(shapes=...)            the engine's own layout of those shapes, and the instants of a step (`from_shapes`)
plan("module:function")     the user's own job (`from_job`)

Here a question is checked. The answer is `answer.Plan`.
"""

from __future__ import annotations

import dataclasses
import math
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Never

from ..engine.refused import Settings, refuse, settings
from ..errors import UserError
from ..events import NVME
from ..layout import Layout
from ..ranks.comm import Comm
from ..stage import STAGES, STATES, seat
from . import formats, from_number, from_shapes, gpus, machines, quantities, recipes, ways
from .answer import Plan
from .asked import Asked
from .disk import told as told_disk
from .experts import check_experts
from .fitting import Fitting, fitting
from .machines import Machine
from .options import OF_SHAPES, OPTIONS, in_policies
from .quantities import whole
from .recipes import Recipe

if TYPE_CHECKING:
    from ..numerics import Precision
    from ..tiers.offload import Offload

UNITS_LIMIT = 1 << 12
POLICIES = {"precision": "Precision", "layout": "Layout", "comm": "Comm", "offload": "Offload"}


def plan(
    job: str | Callable[[], Any] | None = None,
    *,
    params: str | float | None = None,
    shapes: str | os.PathLike[str] | None = None,
    ranks: int = 1,
    stage: int | None = None,
    precision: Precision | None = None,
    layout: Layout | None = None,
    comm: Comm | None = None,
    offload: Offload | None = None,
    optimizer_in_backward: bool = False,
    accumulate: int = 1,
    no_sync: bool = False,
    ep: int | None = None,
    preset: str | None = None,
    bytes: str | None = None,
    optimizer: str | None = None,
    units: int | None = None,
    batch: int | None = None,
    seq: int | None = None,
    gpu: str | None = None,
    gpu_mem: str | None = None,
    host_mem: str | None = None,
    gpus_per_node: int | None = None,
    machine: str | None = None,
    disk: str | os.PathLike[str] | None = None,
    step_time: float | None = None,
    tokens: str | float | None = None,
    **moved: Never,
) -> Plan:
    """Plan the bytes per rank of a model's states, at rest and at the worst instant, at one stage or all four.

    Give one of `job`, `params` and `shapes`. The policies are those of `shard`.

    job: "module:function" or the function (see `planner.job`), run as it is on tensors without memory.
    params: how many parameters: 7e9, "7B".
    shapes: a JSON, safetensors or Hugging Face file or folder.
    ranks: how many ranks share the states.
    stage: 0 to 3 (None: all four; without 0 where it does not go with the policies).
    precision: of a job; of a number or shapes in place of `preset`: this engine's bytes, of parameters in fp32 unless
        `param_dtype` says otherwise. A number does not tell what `fp8` names.
    layout: of shapes and jobs. Buckets without a size are as on the CPU; with `machine`, and of a job whose model is
        on an accelerator, as on one.
    comm: without a `group`, which only a run has. With `machine` numbers of replicas are compared, and none is given.
    offload: where states rest.
    optimizer_in_backward: each bucket is stepped as its gradients come, which rest nowhere then; as `shard`'s.
    accumulate: backwards per step.
    no_sync: gradients are added up on the rank before one reduction.
    ep: among how many ranks the parameters of `Layout.along` are divided; a job's model has one rank's.
    preset: bytes per parameter by name: "zeroshard", as the engine holds them, or "paper", ...
    bytes: a formula instead of a preset: "parameters=2,gradients=2,master=4,m=4,v=4".
    optimizer: another optimizer's states in the preset, by a preset's name or as a class of torch.optim.
    units: with params, the number of equal blocks, for the peaks of a step. With `gpu` or `gpu_mem` None is the usual
        depth of a transformer of so many parameters.
    batch, seq: of params and shapes, the sequences of a micro-batch and the tokens of each: activations are counted by
        a formula (`transformer.py`). Of either alone the other is 1, or 2048.
    gpu: a GPU by name, such as "h100-80": does it fit into what a process can fill of its memory (`gpus.py`), and which
        way is the fastest that does (`fitting`)?
    gpu_mem: the same of a budget such as "80GiB".
    host_mem: a budget for one rank's share of host memory, such as "200GiB".
    gpus_per_node: GPUs of a node, to plan what one GPU's links inside and between nodes carry.
    machine: a cluster by name, or a JSON file of its numbers: which `Comm.replicas` and `Comm.optimizer` take least
        time on it, of those that fit into its memory, or `gpu_mem`.
    disk: a file that `zeroshard io-bench` wrote; or the size of one rank's share of a disk, such as "1TB", whose speed
        is assumed.
    step_time: seconds of a step, for the disk's wear.
    tokens: tokens in one rank's step, for the tokens per second that the disk allows.

    Raises `UserError` for whatever cannot be answered.
    """
    # Long by its settings alone: each stands here twice, as an argument and in what is asked.
    _refuse_moved(moved)
    _exactly_one(job=job, params=params, shapes=shapes)
    _check_policies(precision=precision, layout=layout, comm=comm, offload=offload)
    made, talk = layout or Layout(), comm or Comm()
    if job is None and precision is not None and not _changed(precision):
        precision = None  # it asks for nothing
    _check_recipe(preset, bytes, optimizer, precision, job=job)
    most = from_number.RANKS_LIMIT if params is not None else from_shapes.RANKS_LIMIT
    _check_numbers(ranks, most, accumulate, gpus_per_node, talk)
    _check_units(units, known=params is None)
    _check_stage(stage)
    _check_batch(batch, seq, known=job is not None)
    limit = _limit(gpu, gpu_mem)
    _check_files(offload, disk, step_time, tokens, searched=limit is not None)
    together = _compatible(
        stage, accumulate, no_sync=bool(no_sync), precision=precision, layout=made, comm=talk, offload=offload,
        optimizer_in_backward=bool(optimizer_in_backward),
    )  # fmt: skip
    check_experts(made, ep, ranks, replicas=talk.rows, gpus_per_node=gpus_per_node, params=params, machine=machine)
    cluster = _cluster(machine, gpus_per_node, talk, once=together.once)
    _check_links(gpus_per_node, talk)
    if job is None:
        counted = batch is not None or seq is not None
        _refuse_what_jobs_alone_count(
            precision, made, talk, offload, early=bool(optimizer_in_backward), counted=counted
        )
    if params is not None and made != Layout():
        changed = {f"Layout.{name}": value for name, value in _changed(made).items()}
        _refuse("a number of parameters has no layout", "shapes, or leave it out", **changed)
    chosen = _recipe(preset or "zeroshard", bytes, optimizer, precision, talk)
    asked = Asked(
        ranks=ranks,
        stages=_stages(stage, together),
        recipe=dataclasses.replace(chosen, in_backward=bool(optimizer_in_backward)),
        layout=made if cluster is None and (job is not None or limit is None) else made.on(accelerator=True),
        comm=talk,
        precision=precision,
        offload=offload,
        gpu_mem=limit,
        accumulate=accumulate,
        no_sync=bool(no_sync),
        units=units,
        gpus_per_node=gpus_per_node,
        host_mem=None if host_mem is None else quantities.budget(host_mem, "host_mem"),
        disk=None if disk is None else told_disk(disk),
        step_time=step_time,
        tokens=None if tokens is None else quantities.count(tokens, "tokens"),
        ep=ep or 1,
        batch=batch,
        seq=seq,
        gpu=gpu,
        accelerator=job is None and cluster is None and limit is not None,
    )
    if job is None:
        asked = asked._replace(layout=asked.layout.on(accelerator=False))

    def planned(asked: Asked) -> Plan:
        if job is not None:
            return _plan_job(job, asked)
        if params is not None:
            formats.check_number(asked.precision)
            return from_number.plan_params(quantities.count(params), asked)
        assert shapes is not None
        return from_shapes.plan_shapes(shapes, asked)

    found = _compared(planned, asked, cluster)
    if job is None and cluster is None and limit is not None and ranks <= from_shapes.RANKS_LIMIT:
        found = dataclasses.replace(found, fitting=_fitting(params, shapes, asked))
    return found if gpu is None else dataclasses.replace(found, notes=(gpus.note(gpu), *found.notes))


def _fitting(params: str | float | None, shapes: str | os.PathLike[str] | None, asked: Asked) -> Fitting:
    """Search for what fits, with the model laid out."""
    if params is not None:
        numel = quantities.count(params)
        return fitting(asked, numel, from_number.laid_out(numel, asked))
    assert shapes is not None
    model, laid = from_shapes.of_file(shapes)
    return fitting(asked, model.numel, laid)


def _limit(gpu: str | None, gpu_mem: str | None) -> int | None:
    """Return the bytes of the device's memory that are asked about, if any are."""
    if gpu is not None and gpu_mem is not None:
        raise UserError(
            "gpu and gpu_mem both say how much memory there is", got=f"gpu={gpu!r}, gpu_mem={gpu_mem!r}",
            instead="one of the two",
        )  # fmt: skip
    return gpus.usable(gpu) if gpu is not None else None if gpu_mem is None else quantities.budget(gpu_mem, "gpu_mem")


def stages_of_runs(ranks: int, stage: int | None, accumulate: int, **rest: Any) -> tuple[int, ...]:
    """List the stages at which a job is to run; refuse what no run can have. rest: as `_compatible` takes it."""
    _check_numbers(ranks, sys.maxsize, accumulate, None, rest["comm"])  # the machine has its own limit
    _check_stage(stage)
    return _stages(stage, _compatible(stage, accumulate, **rest))


def _compatible(
    stage: int | None, accumulate: int, *, no_sync: bool, precision: Precision | None, layout: Layout, comm: Comm,
    offload: Offload | None, optimizer_in_backward: bool,
) -> Settings:  # fmt: skip
    """Refuse what does not go with something else; return what was looked at. Arguments: as of `plan`."""
    highest, copies = 3 if stage is None else stage, comm.rows or 1
    found = settings(
        highest, precision, layout, comm, offload, replicas=copies, in_backward=optimizer_in_backward,
        accumulate=accumulate, no_sync=no_sync,
    )  # fmt: skip
    refuse(found)
    return found


def _stages(stage: int | None, together: Settings) -> tuple[int, ...]:
    """List the stages that are asked for: one, or all that go with the policies."""
    if stage is not None:
        return (stage,)
    return tuple(each for each in STAGES if each or not (together.once or together.spread))


def _changed(policy: Any) -> dict[str, Any]:
    """Return the fields of a policy that are not as by default."""
    plain = type(policy)()
    return {name: value for name, value in vars(policy).items() if value != getattr(plain, name)}


def _cluster(name: str | None, gpus: int | None, comm: Comm, *, once: bool) -> Machine | None:
    """Find the cluster that `machine` names, with nodes of `gpus` GPUs; refuse settings that it does not go with."""
    if name is None:
        return None
    compared: dict[str, Any] = {"Comm.hosts": comm.hosts, "Comm.replicas": comm.replicas}
    compared |= {"Comm.optimizer": None if comm.optimizer == "team" else comm.optimizer}
    _refuse("machine compares them itself", "leave it out", **compared)
    shared = {"Comm.transport": "shared" if comm.transport == "shared" else None}
    shared |= {"Offload.parameters": "shared" if once else None}
    _refuse("machine asks for the links of GPUs, which share no memory", "leave it out", **shared)
    _refuse("machine compares the sums in order and the backend's", "leave it out", **{"Comm.reduce": _sums(comm)})
    found = machines.machine(name)
    return found if gpus is None else dataclasses.replace(found, gpus=gpus)


def _sums(comm: Comm) -> str | None:
    return None if comm.reduce == "ordered" else comm.reduce


def _compared(plan_of: Callable[[Asked], Plan], asked: Asked, cluster: Machine | None) -> Plan:
    """Return the plan, and on a cluster the ways in which its ranks can share the model.

    The optimizer over all ranks cuts tensors and splits no masters: it is left out for bounds="tensor" and for split
    masters. Hosts of one copy cut tensors; masters alone rest there, and none is split.
    """
    cuts = asked.layout.bounds != "tensor"
    spread = cuts and not (asked.precision and asked.precision.split_master)
    found = plan_of(asked)
    if cluster is None:
        return found
    return dataclasses.replace(found, ways=ways.compare(plan_of, asked, cluster, spread=spread, hosts=cuts))


def _given(**settings: Any) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value is not None}


def _refuse(why: str, instead: str, **settings: object) -> None:
    if told := _given(**settings):
        raise UserError(f"{' and '.join(told)}: {why}", instead=instead)


def _exactly_one(**models: object) -> None:
    named = [name for name, value in models.items() if value is not None]
    if len(named) != 1:
        raise UserError(
            "plan takes one of params, shapes and module:function",
            got=" and ".join(named) or "none of them",
            instead="params=7e9, or shapes='model.safetensors'",
        )


def _refuse_moved(moved: dict[str, Any]) -> None:
    """Refuse arguments of earlier versions, with the policy that has them now, and any that never were."""
    for name in moved:
        if name not in OPTIONS:
            raise TypeError(f"plan() got an unexpected keyword argument {name!r}")
        raise UserError(f"plan takes the policies of shard, and no {name}", got=f"{name}=", instead=in_policies(name))


def _check_policies(**policies: object) -> None:
    for name, policy in policies.items():
        kind = POLICIES[name]
        if policy is not None and type(policy).__name__ != kind:
            article = "an" if kind[0] in "AEIO" else "a"
            instead = {"precision": "Precision(param_dtype=torch.bfloat16)", "offload": 'Offload(optimizer="cpu")'}
            raise UserError(
                f"{name}= is {article} {kind}", got=repr(policy), instead=f"{name}={instead.get(name, f'{kind}()')}"
            )
    if getattr(policies["offload"], "automatic", False):
        raise UserError(
            "a plan lists what fits by itself",
            got=repr(policies["offload"]),
            instead="gpu_mem= and host_mem=, and no offload",
        )
    if getattr(policies["comm"], "group", None) is not None:
        raise UserError(
            "Comm.group is of a run, and a plan has none",
            got=repr(policies["comm"]),
            instead="ranks=, how many there are",
        )


def _check_recipe(preset: object, bytes: object, optimizer: object, precision: object, *, job: object) -> None:
    said = [*_given(preset=preset, bytes=bytes, precision=precision)]
    if (job is None and len(said) > 1) or "bytes" in said[1:]:
        raise UserError(f"{said[0]} and {said[1]} both say how many bytes a parameter takes", instead="one of the two")
    if job is not None:
        _refuse("a job says itself what it holds", "leave it out", preset=preset, bytes=bytes, optimizer=optimizer)


def _recipe(preset: str, bytes: str | None, optimizer: str | None, precision: Precision | None, comm: Comm) -> Recipe:
    """Return the bytes per parameter that are asked for; of a job they are not looked at."""
    if precision is not None:
        return formats.sent_by(formats.engines(precision, optimizer), comm)
    return formats.sent_by(recipes.recipe(preset, optimizer=optimizer, custom=bytes), comm)


def _check_links(gpus_per_node: int | None, comm: Comm) -> None:
    if comm.transport == "shared" and gpus_per_node is not None:
        raise UserError(
            "gpus_per_node asks for the links of GPUs, and memory is shared between ranks on the CPU",
            got=f"gpus_per_node={gpus_per_node}, transport='shared'",
            instead="one of the two",
        )


def _refuse_what_jobs_alone_count(
    precision: Precision | None, layout: Layout, comm: Comm, offload: Offload | None, *, early: bool, counted: bool
) -> None:
    moved = None if offload is None or offload.activations == "device" else offload.activations
    native = "native" if comm.reduce == "native" else None
    _refuse("for jobs only", "leave it out", **{"Comm.reduce": native})
    if not counted:
        why = "it is about activations, of jobs, or of so many tokens"
        again = layout.recompute or None
        _refuse(why, "batch= and seq= beside it, or a job", **{"Layout.recompute": again, "Offload.activations": moved})
    if layout.recompute and layout.recompute is not True:
        _refuse("of a number and of shapes all units are alike", "True", **{"Layout.recompute": layout.recompute})
    instead = 'name a job, module:function; for bytes per parameter preset="zeroshard-bf16-grads" and the like'
    told = {
        f"{kind}.{name}": value
        for kind, policy in {"Layout": layout, "Comm": comm}.items()
        for name, value in _changed(policy).items()
        if name not in OF_SHAPES[kind]
    }
    told |= {f"Precision.{name}": value for name, value in formats.uncounted(precision, early=early).items()}
    _refuse("for jobs only", instead, **told)


def _check_numbers(ranks: object, most: int, accumulate: object, gpus_per_node: object, comm: Comm) -> None:
    whole("ranks", ranks, most)
    whole("accumulate", accumulate, 1 << 30)
    if gpus_per_node is not None:
        whole("gpus_per_node", gpus_per_node, from_number.RANKS_LIMIT)
    if comm.rows is not None:
        assert type(ranks) is int
        whole("hosts" if comm.two_levels else "replicas", comm.rows, ranks)
        seat(0, ranks, comm.rows, hosts=comm.two_levels)  # says which numbers divide


def _check_units(units: object, *, known: bool) -> None:
    if units is not None:
        whole("units", units, UNITS_LIMIT)
        if known:
            raise UserError("units stand for shapes that are not known", got="a job or shapes", instead="leave it out")


def _check_batch(batch: object, seq: object, *, known: bool) -> None:
    for name, value in {"batch": batch, "seq": seq}.items():
        if value is not None:
            whole(name, value, 1 << 30)
            if known:
                raise UserError(f"{name} stands for a job, which has batches of its own", instead="leave it out")


def _check_stage(stage: object) -> None:
    if stage is not None and (type(stage) is not int or stage not in STAGES):
        raise UserError("no such ZeRO stage", expected="0, 1, 2 or 3", got=repr(stage), instead="stage=3")


def _check_files(offload: Offload | None, disk: object, step_time: object, tokens: object, *, searched: bool) -> None:
    """Refuse a `step_time` that is no time, and questions about files without files.

    searched: may ways be found that have files on the disk?
    """
    if step_time is not None and not (isinstance(step_time, (int, float)) and 0 < step_time < math.inf):
        raise UserError("step_time counts seconds", got=repr(step_time), instead="step_time=2.5")
    on_disk = offload is not None and any(NVME in offload.tiers(kind) for kind in STATES)
    about = {"disk": None if searched else disk, "step_time": step_time, "tokens": tokens}
    for name, value in about.items():
        if value is not None and not on_disk:
            raise UserError(f"{name} is about files, and nothing rests in any", instead='offload="nvme"')
    if tokens is not None and disk is None:
        raise UserError("tokens need to know what the disk moves", instead="disk=, from zeroshard io-bench DIR")


def _plan_job(job: str | Callable[[], Any], asked: Asked) -> Plan:
    from .from_job import plan_job  # the only plan that needs torch

    return plan_job(job, asked)
