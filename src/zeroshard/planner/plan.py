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
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

from ..engine.refused import Settings, refuse
from ..errors import UserError, nearest
from ..events import NVME
from ..headroom import PREFETCH
from ..layout import Bounds, Layout
from ..ranks.comm import Comm, Over, Reduce, Transport
from ..stage import STAGES, STATES, seat
from . import from_number, from_shapes, machines, quantities, recipes, ways
from .answer import Plan
from .asked import Asked, check_in_backward
from .disk import load
from .machines import Machine
from .quantities import whole

if TYPE_CHECKING:
    from ..tiers.tier import Offload

UNITS_LIMIT = 1 << 12
DTYPES = ("fp32", "bf16")


def plan(
    job: str | Callable[[], Any] | None = None,
    *,
    params: str | float | None = None,
    shapes: str | os.PathLike[str] | None = None,
    ranks: int = 1,
    stage: int | None = None,
    preset: str | None = None,
    bytes: str | None = None,
    optimizer: str | None = None,
    gpu_mem: str | None = None,
    accumulate: int = 1,
    no_sync: bool = False,
    optimizer_in_backward: bool = False,
    replicas: int | None = None,
    instances: int | None = None,
    units: int | None = None,
    align: int | Mapping[str, int] | None = None,
    bounds: str | None = None,
    bucket_mib: float | None = None,
    prefetch: int = PREFETCH,
    gpus_per_node: int | None = None,
    precision: Literal["fp32", "bf16", "bf16-split", "fp32-fp8", "bf16-fp8"] | None = None,
    grad_dtype: Literal["fp32", "bf16"] | None = None,
    checkpoint: bool = False,
    offload: Offload | None = None,
    host_mem: str | None = None,
    disk: str | os.PathLike[str] | None = None,
    step_time: float | None = None,
    tokens: str | float | None = None,
    experts: str | None = None,
    ep: int | None = None,
    whole: str | None = None,
    transport: Transport = "auto",
    optimizer_over: Over = "team",
    reduce: Reduce = "ordered",
    machine: str | None = None,
) -> Plan:
    """Plan the bytes per rank of a model's states, at rest and at the worst instant, at one stage or all four.

    Give one of `job`, `params` and `shapes`.

    job: "module:function" or the function (see `planner.job`), run as it is on tensors without memory.
    params: how many parameters: 7e9, "7B".
    shapes: a JSON, safetensors or Hugging Face file or folder.
    ranks: how many ranks share the states.
    stage: 0 to 3 (None: all four).
    preset: bytes per parameter by name ("paper" for params, "zeroshard" for shapes).
    optimizer: another optimizer's states in the preset, by a preset's name or as a class of torch.optim.
    bytes: a formula instead of a preset: "parameters=2,gradients=2,master=4,m=4,v=4".
    gpu_mem: a budget such as "80GiB": does it fit, and what would? With `offload`, about what stays on the device.
    accumulate: backwards per step.
    no_sync: gradients are added up on the rank before one reduction.
    optimizer_in_backward: each bucket is stepped as its gradients come, which rest nowhere then; as `shard`'s.
    replicas: as `Comm`'s, K copies of what is sharded, each over 1/K of the ranks.
    instances: an older name of replicas.
    units: with params, the number of equal blocks, for the peaks of a step.
    align: for shapes and jobs, as `Layout`'s.
    bounds: for shapes and jobs, as `Layout`'s.
    bucket_mib: for shapes and jobs, as `Layout`'s. None: as on the CPU; with `machine`, and of a job whose model is on
        an accelerator, as on one.
    prefetch: units gathered ahead of use, as `Comm`'s.
    gpus_per_node: GPUs of a node, to plan what one GPU's links inside and between nodes carry.
    precision: "fp32", a job's own dtypes; "bf16" with fp32 masters, or "bf16-split" with masters that are split;
        "fp32-fp8" and "bf16-fp8" with the weights of linear layers in 8 bits.
    grad_dtype: what a job's gradients are added up in.
    checkpoint: every unit of a job recomputes in backward.
    offload: where states rest, as `shard`'s.
    host_mem: a budget for one rank's share of host memory, such as "200GiB".
    disk: a file that `zeroshard io-bench` wrote.
    tokens: tokens in one rank's step, for the tokens per second that the disk allows.
    step_time: seconds of a step, for the disk's wear.
    experts: for shapes and jobs, a name pattern of parameters of which a rank has some rows, as in `Layout.along`.
    ep: among how many ranks these rows are divided; a job's model has one rank's.
    whole: for shapes and jobs, name patterns of parameters that are never cut, comma between them, as `Layout`'s. What
        a job's optimizer needs whole need not be named.
    transport: as `Comm`'s: "shared" for ranks of one host, on the CPU, that read each other's memory.
    optimizer_over: as `Comm.optimizer`: "all" shards it over the ranks of all replicas. Stage 0 is left out then.
    reduce: as `Comm`'s, for jobs: "int8" sends gradients as codes of 8 bits.
    machine: a cluster by name, or a JSON file of its numbers: which `replicas` and `optimizer_over` take least time on
        it, of those that fit into its memory, or `gpu_mem`.

    Raises `UserError` for whatever cannot be answered.
    """
    # Long by its settings alone: each stands here three times, as an argument, in words, and in what is asked.
    _exactly_one(job=job, params=params, shapes=shapes)
    _check_words(preset=preset, bytes=bytes, precision=precision, grad_dtype=grad_dtype)
    replicas = _one_name(replicas, instances)
    most = from_number.RANKS_LIMIT if params is not None else from_shapes.RANKS_LIMIT
    _check_numbers(ranks, most, accumulate, prefetch, gpus_per_node, replicas)
    _check_units(units, known=params is None)
    _check_stage(stage)
    _check_files(offload, disk, step_time, tokens)
    once = offload is not None and offload.once
    if optimizer_over not in get_args(Over):
        raise UserError(
            "optimizer_over says over which ranks its states are sharded",
            got=repr(optimizer_over),
            instead=nearest(optimizer_over, get_args(Over)),
        )
    together = Settings(
        stage=3 if stage is None else stage,
        replicas=replicas or 1,
        bounds=str(bounds),
        reduce=reduce,
        transport=transport,
        over=optimizer_over,
        split_master=precision == "bf16-split",
        once=once,
    )
    refuse(together)
    over = None if optimizer_over == "team" else optimizer_over
    others = {"replicas": replicas, "optimizer_over": over, "experts": experts}
    sums = None if reduce == "ordered" else reduce
    if job is None or machine is not None:
        _refuse("for jobs only, and without machine", "leave it out", reduce=sums)
    cluster = _cluster(machine, gpus_per_node, transport=transport, once=once, **others)
    if transport == "shared" and gpus_per_node is not None:
        raise UserError(
            "gpus_per_node asks for the links of GPUs, and memory is shared between ranks on the CPU",
            got=f"gpus_per_node={gpus_per_node}, transport='shared'",
            instead="one of the two",
        )
    check_experts(experts, ep, ranks, replicas=replicas, gpus_per_node=gpus_per_node, params=params)
    check_in_backward(accumulate, offload, no_sync=bool(no_sync), asked=bool(optimizer_in_backward))
    asked = Asked(
        ranks=ranks,
        stages=tuple(each for each in STAGES if each or not (once or together.spread)) if stage is None else (stage,),
        recipe=dataclasses.replace(
            recipes.recipe(
                preset or ("paper" if params is not None else "zeroshard"), optimizer=optimizer, custom=bytes
            ),
            in_backward=bool(optimizer_in_backward),
        ),
        gpu_mem=None if gpu_mem is None else quantities.budget(gpu_mem, "gpu_mem"),
        accumulate=accumulate,
        no_sync=bool(no_sync),
        replicas=replicas,
        units=units,
        prefetch=prefetch,
        gpus_per_node=gpus_per_node,
        precision=precision or "fp32",
        grad_dtype=grad_dtype,
        checkpoint=bool(checkpoint),
        offload=offload,
        host_mem=None if host_mem is None else quantities.budget(host_mem, "host_mem"),
        disk=None if disk is None else load(disk),
        step_time=step_time,
        tokens=None if tokens is None else quantities.count(tokens, "tokens"),
        experts=experts or "",
        ep=ep or 1,
        reduce=reduce,
        shared=Comm(transport=transport, optimizer=optimizer_over, reduce=reduce).sharing(once=once).wanted == "shared",
        over=optimizer_over,
        by_unit=cluster is not None,
    )
    along = {experts: "edp"} if experts else None
    patterns = None if whole is None else tuple(whole.split(","))
    layout = _given(along=along, align=align, bounds=bounds, bucket_mib=bucket_mib, whole=patterns)
    made = _layout(layout)
    made = made if cluster is None else made.on(accelerator=True)
    if job is not None:
        _refuse("a job says itself what it holds", "leave it out", preset=preset, bytes=bytes, optimizer=optimizer)
        return _compared(lambda asked: _plan_job(job, asked, made), asked, cluster, bounds)
    instead = 'name a job, module:function; for bytes per parameter preset="zeroshard-bf16-grads" and the like'
    _refuse("for jobs only", instead, precision=precision, checkpoint=checkpoint or None, grad_dtype=grad_dtype)
    if params is not None:
        _refuse("a number of parameters has no layout", "shapes, or leave it out", **layout)
        return _compared(lambda asked: from_number.plan_params(quantities.count(params), asked), asked, cluster, bounds)
    assert shapes is not None
    made = made.on(accelerator=False)
    return _compared(lambda asked: from_shapes.plan_shapes(shapes, asked, made), asked, cluster, bounds)


def _cluster(name: str | None, gpus: int | None, *, transport: str, once: bool, **others: object) -> Machine | None:
    """Find the cluster that `machine` names, with nodes of `gpus` GPUs; refuse settings that it does not go with."""
    if name is None:
        return None
    _refuse("machine compares them itself", "leave it out", **others)
    shared = {"transport": "shared" if transport == "shared" else None, "offload": "parameters" if once else None}
    _refuse("machine asks for the links of GPUs, which share no memory", "leave it out", **shared)
    found = machines.machine(name)
    return found if gpus is None else dataclasses.replace(found, gpus=gpus)


def _compared(plan_of: Callable[[Asked], Plan], asked: Asked, cluster: Machine | None, bounds: object) -> Plan:
    """Return the plan, and on a cluster the ways in which its ranks can share the model.

    The optimizer over all ranks cuts tensors and splits no masters: these ways are left out for bounds="tensor" and
    split masters.
    """
    spread = bounds != "tensor" and asked.precision != "bf16-split"
    found = plan_of(asked)
    return (
        found
        if cluster is None
        else dataclasses.replace(found, ways=ways.compare(plan_of, asked, cluster, spread=spread))
    )


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


def _check_words(*, preset: object, bytes: object, **dtypes: object) -> None:
    if preset is not None and bytes is not None:
        raise UserError("preset and bytes both say how many bytes a parameter takes", instead="one of the two")
    for name, value in dtypes.items():
        words = (*DTYPES, "bf16-split", "fp32-fp8", "bf16-fp8") if name == "precision" else DTYPES
        if value not in (None, *words):
            raise UserError(f"no such {name}", got=repr(value), instead=nearest(value, words))


def _one_name(replicas: int | None, instances: int | None) -> int | None:
    if instances is not None and replicas is not None:
        raise UserError("replicas and instances are two names of one thing", instead=f"replicas={replicas!r}")
    return instances if replicas is None else replicas


def _check_units(units: object, *, known: bool) -> None:
    if units is not None:
        whole("units", units, UNITS_LIMIT)
        if known:
            raise UserError("units stand for shapes that are not known", got="a job or shapes", instead="leave it out")


def _check_numbers(
    ranks: object, most: int, accumulate: object, prefetch: object, gpus_per_node: object, replicas: object
) -> None:
    whole("ranks", ranks, most)
    whole("accumulate", accumulate, 1 << 30)
    if type(prefetch) is not int or prefetch < 0:
        raise UserError("prefetch counts units", expected="0, 1, 2, ...", got=repr(prefetch), instead="prefetch=1")
    if gpus_per_node is not None:
        whole("gpus_per_node", gpus_per_node, from_number.RANKS_LIMIT)
    if replicas is not None:
        assert type(ranks) is int
        whole("replicas", replicas, ranks)
        assert type(replicas) is int
        seat(0, ranks, replicas)  # says which numbers divide


def check_experts(experts: str | None, ep: int | None, ranks: int, **others: object) -> None:
    """Refuse `experts` and `ep` that do not go together, or not with the ranks. others: settings without experts."""
    if (experts is None) != (ep is None):
        raise UserError("experts and ep belong together", instead='experts="*.experts.*", ep=8')
    if ep is not None:
        _refuse("not planned for experts", "leave it out", **others)
        whole("ep", ep, ranks)
        if ranks % ep:
            raise UserError("ep must divide the ranks", got=f"ep={ep}, ranks={ranks}")


def _check_stage(stage: object) -> None:
    if stage is not None and (type(stage) is not int or stage not in STAGES):
        raise UserError("no such ZeRO stage", expected="0, 1, 2 or 3", got=repr(stage), instead="stage=3")


def _check_files(offload: Offload | None, disk: object, step_time: object, tokens: object) -> None:
    """Refuse a `step_time` that is no time, an `offload` that is none, and questions about files without files."""
    if step_time is not None and not (isinstance(step_time, (int, float)) and 0 < step_time < math.inf):
        raise UserError("step_time counts seconds", got=repr(step_time), instead="step_time=2.5")
    if offload is not None and not hasattr(offload, "tiers"):
        raise UserError("offload= is an Offload", got=repr(offload), instead='offload=Offload(optimizer="cpu")')
    on_disk = offload is not None and any(NVME in offload.tiers(kind) for kind in STATES)
    for name, value in {"disk": disk, "step_time": step_time, "tokens": tokens}.items():
        if value is not None and not on_disk:
            raise UserError(f"{name} is about files, and nothing rests in any", instead='offload="nvme"')
    if tokens is not None and disk is None:
        raise UserError("tokens need to know what the disk moves", instead="disk=, from zeroshard io-bench DIR")


def _plan_job(job: str | Callable[[], Any], asked: Asked, layout: Layout) -> Plan:
    from .from_job import plan_job  # the only plan that needs torch

    return plan_job(job, asked, layout)


def _layout(settings: dict[str, Any]) -> Layout:
    if settings.get("bounds", "unit") not in get_args(Bounds):
        raise UserError(
            "no such bounds", got=repr(settings["bounds"]), instead=nearest(settings["bounds"], get_args(Bounds))
        )
    return Layout(**settings)
