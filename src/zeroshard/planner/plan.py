"""`plan`: what a model takes per rank at every stage, whether it fits, and what to change if not.

plan("7B")                  the closed form: three numbers and a recipe (`from_number`)
plan("model.safetensors")   the engine's own layout of those shapes, and the instants of a step (`from_shapes`)
plan("module:function")     the user's own job (`from_job`)

Here a question, of `question`'s parts and the policies, is checked as a whole. The answer is `answer.Plan`.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Never

from ..errors import Error, UserError, one_line
from ..events import NVME
from ..layout.stage import STAGES, STATES, seat
from ..policies.comm import Comm
from ..policies.incompatible import Settings, refuse, settings
from ..policies.layout import Layout
from . import formats, from_number, from_shapes, gpus, machines, quantities, question, recipes, ways
from .answer import Plan
from .asked import Asked
from .disk import told as told_disk
from .experts import check_experts
from .fitting import Fitting, fitting
from .machines import Cluster
from .options import OF_SHAPES, OPTIONS, in_policies
from .quantities import whole
from .question import Machine, Model, Step
from .recipes import Recipe

if TYPE_CHECKING:
    from ..policies.offload import Offload
    from ..policies.precision import Precision

# What each argument is, and a value of it to write.
ARGUMENTS = {
    "machine": ("Machine", "Machine(ranks=8)"),
    "precision": ("Precision", "Precision(param_dtype=torch.bfloat16)"),
    "layout": ("Layout", "Layout()"),
    "comm": ("Comm", "Comm()"),
    "offload": ("Offload", 'Offload(optimizer="cpu")'),
    "step": ("Step", "Step(accumulate=4)"),
}


def plan(
    model: str | os.PathLike[str] | float | Callable[[], Any] | Model | None = None,
    machine: Machine | None = None,
    *,
    stage: int | None = None,
    precision: Precision | None = None,
    layout: Layout | None = None,
    comm: Comm | None = None,
    offload: Offload | None = None,
    optimizer_in_backward: bool = False,
    step: Step | None = None,
    **moved: Never,
) -> Plan:
    """Plan the bytes per rank of a model's states, at rest and at the worst instant, at one stage or all four.

    The policies are those of `shard`.

    model: how many parameters (7e9, "7B"), a path to its shapes ("model.safetensors"), a job ("train:job", or the
        function), or a `Model`, which also says what its bytes are.
    machine: how many ranks there are, and what is known of what they run on; None: one rank, and nothing.
    stage: 0 to 3 (None: all four; without 0 where it does not go with the policies).
    precision: of a job; of a number or shapes in place of `Model.preset`: this engine's bytes, of parameters in fp32
        unless `param_dtype` says otherwise. A number does not tell what `fp8` names.
    layout: of shapes and jobs. Buckets without a size are as on the CPU; with `Machine.cluster`, and of a job whose
        model is on an accelerator, as on one.
    comm: without a `group`, which only a run has. With `Machine.cluster` numbers of replicas are compared, and none is
        given.
    offload: where states rest.
    optimizer_in_backward: each bucket is stepped as its gradients come, which rest nowhere then; as `shard`'s.
    step: what is known of a training step; None: one backward, and nothing.

    moved: arguments of earlier versions, which raise.

    Raises `UserError` for whatever cannot be answered, and for arguments of earlier versions, with what to write now.

    Examples:
        >>> found = zeroshard.plan("7B", zeroshard.Machine(ranks=8, gpu_mem="80GiB"))
        >>> [stage.total for stage in found.stages]
        [126000000000, 52500000000, 28000000000, 14000000000]
        >>> [stage.fits for stage in found.stages]
        [False, True, True, True]
    """
    policies = {"precision": precision, "layout": layout, "comm": comm, "offload": offload}
    early = bool(optimizer_in_backward)
    _refuse_moved(moved, model, machine, step, stage=stage, **policies, optimizer_in_backward=early or None)
    _check_kinds(machine=machine, step=step, **policies)
    of, on, per = Model.of(model), machine or Machine(), step or Step()
    made, talk = layout or Layout(), comm or Comm()
    if of.job is None and precision is not None and not _changed(precision):
        precision = None  # it asks for nothing
    _check_recipe(of, precision)
    most = from_number.RANKS_LIMIT if of.params is not None else from_shapes.RANKS_LIMIT
    _check_numbers(on.ranks, most, on.gpus_per_node, talk)
    _check_stage(stage)
    _check_batch(per, known=of.job is not None)
    _check_files(offload, on, per)
    together = _compatible(
        stage, per.accumulate, no_sync=per.no_sync, precision=precision, layout=made, comm=talk, offload=offload,
        optimizer_in_backward=early,
    )  # fmt: skip
    _check_experts(of, on, made, talk)
    cluster = _cluster(on, talk, once=together.once)
    _check_links(on, talk)
    if of.job is None:
        _refuse_what_jobs_alone_count(precision, made, talk, offload, early=early, counted=_counted(per))
    if of.params is not None and made != Layout():
        changed = {f"Layout.{name}": value for name, value in _changed(made).items()}
        _refuse("a number of parameters has no layout", "shapes, or leave it out", **changed)
    chosen = dataclasses.replace(_recipe(of, precision, talk), in_backward=early)
    searched = of.job is None and cluster is None and on.limit is not None
    asked = Asked(
        stages=_stages(stage, together), recipe=chosen, comm=talk, precision=precision, offload=offload, units=of.units,
        layout=_cut(made, accelerator=searched or cluster is not None, job=of.job is not None), accelerator=searched,
        **_known(on), **_told(per),
    )  # fmt: skip
    found = _compared(lambda asked: _planned(of, asked), asked, cluster)
    if searched and on.ranks <= from_shapes.RANKS_LIMIT:
        found = dataclasses.replace(found, fitting=_fitting(of, asked))
    elif of.job is not None and cluster is None and on.limit is not None:
        found = _with_fits_of_job(found, of.job, asked)
    if on.gpu is None:
        return found
    return dataclasses.replace(found, notes=(gpus.note(on.gpu, on.ranks, on.gpus_per_node), *found.notes))


def _known(machine: Machine) -> dict[str, Any]:
    """Return what is known of a machine, by the fields of `Asked`."""
    host, disk = (
        None if text is None else quantities.budget(text, f"Machine.{name}")
        for name, text in (("host_mem", machine.host_mem), ("disk", machine.disk))
    )
    return {
        "ranks": machine.ranks,
        "gpu": machine.gpu,
        "gpu_mem": machine.limit,
        "host_mem": host,
        "disk": told_disk(disk, machine.disk_read, machine.disk_write),
        "gpus_per_node": machine.gpus_per_node,
        "ep": machine.ep or 1,
    }


def _told(step: Step) -> dict[str, Any]:
    """Return what is told of a step, by the fields of `Asked`."""
    return {
        "accumulate": step.accumulate,
        "no_sync": step.no_sync,
        "batch": step.batch,
        "seq": step.seq,
        "step_time": step.seconds,
        "tokens": None if step.tokens is None else quantities.count(step.tokens, "Step.tokens"),
    }


def _planned(model: Model, asked: Asked) -> Plan:
    """Answer a checked question of a model."""
    if model.job is not None:
        return _plan_job(model.job, asked)
    if model.params is not None:
        formats.check_number(asked.precision)
        return from_number.plan_params(quantities.count(model.params), asked)
    assert model.shapes is not None
    return from_shapes.plan_shapes(model.shapes, asked)


def _fitting(model: Model, asked: Asked) -> Fitting:
    """Search for what fits, with the model laid out."""
    if model.params is not None:
        numel = quantities.count(model.params)
        return fitting(asked, numel, from_number.laid_out(numel, asked))
    assert model.shapes is not None
    shapes, laid = from_shapes.of_file(model.shapes)
    return fitting(asked, shapes.numel, laid)


def _with_fits_of_job(found: Plan, job: str | Callable[[], Any], asked: Asked) -> Plan:
    """Add what fits to a job's plan, or a note on why there is no search of it."""
    from .fits_job import fits_job
    from .from_job import runner

    try:
        _refuse_what_jobs_alone_count(
            asked.precision, asked.layout, asked.comm, asked.offload, early=asked.recipe.in_backward, counted=True
        )
        return dataclasses.replace(found, fitting=fits_job(runner(job, asked), asked))
    except Error as error:  # a job that does not run at stage 3 too
        return dataclasses.replace(found, notes=(f"no search for what fits: {one_line(error)}", *found.notes))


def stages_of_runs(ranks: int, stage: int | None, accumulate: int, **rest: Any) -> tuple[int, ...]:
    """List the stages at which a job is to run; refuse what no run can have. rest: as `_compatible` takes it."""
    whole("Step.accumulate", accumulate, question.COUNTED)
    _check_numbers(ranks, sys.maxsize, None, rest["comm"])  # the machine has its own limit
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


def _cluster(machine: Machine, comm: Comm, *, once: bool) -> Cluster | None:
    """Find the cluster that is named, with as many GPUs in a node; refuse settings that it does not go with."""
    if machine.cluster is None:
        return None
    compared: dict[str, Any] = {"Comm.hosts": comm.hosts, "Comm.replicas": comm.replicas}
    compared |= {"Comm.optimizer": None if comm.optimizer == "team" else comm.optimizer}
    _refuse("Machine.cluster compares them itself", "leave it out", **compared)
    shared = {"Comm.transport": "shared" if comm.transport == "shared" else None}
    shared |= {"Offload.parameters": "shared" if once else None}
    _refuse("Machine.cluster asks for the links of GPUs, which share no memory", "leave it out", **shared)
    _refuse(
        "Machine.cluster compares the sums in order and the backend's", "leave it out", **{"Comm.reduce": _sums(comm)}
    )
    found, gpus = machines.machine(machine.cluster), machine.gpus_per_node
    return found if gpus is None else dataclasses.replace(found, gpus=gpus)


def _sums(comm: Comm) -> str | None:
    return None if comm.reduce == "ordered" else comm.reduce


def _compared(plan_of: Callable[[Asked], Plan], asked: Asked, cluster: Cluster | None) -> Plan:
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


def _refuse_moved(moved: dict[str, Any], model: object, machine: object, step: object, **same: object) -> None:
    """Refuse arguments of earlier versions, with what to write now, and any that never were.

    same: the arguments that are as they were; None where one is not given.
    """
    for name in moved:
        if name in OPTIONS:
            what = f"plan takes the policies of shard, and no {name}"
            raise UserError(what, got=f"{name}=", instead=in_policies(name))
        if name not in question.PLACES:
            raise TypeError(f"plan() got an unexpected keyword argument {name!r}")
    if isinstance(machine, str):
        moved = {**moved, "machine": machine}
    if moved:
        form = question.form_of(model)
        given = question.flat(model, machine, step) | ({} if form is None else {form: model}) | moved
        rest = {name: _written(value) for name, value in same.items() if value is not None}
        raise UserError(
            "plan takes a model, a machine and a step", got=", ".join(f"{name}=" for name in moved),
            instead=question.call(given, rest),
        )  # fmt: skip


def _written(argument: object) -> str:
    """Write an argument of `plan` as in a call."""
    kind = type(argument).__name__
    if kind in {name for name, _ in ARGUMENTS.values()}:
        return question.written(kind, _changed(argument))
    return question.spelled(argument)


def _check_kinds(**arguments: Any) -> None:
    for name, value in arguments.items():
        kind, instead = ARGUMENTS[name]
        if value is not None and type(value).__name__ != kind:
            article = "an" if kind[0] in "AEIO" else "a"
            raise UserError(f"{name}= is {article} {kind}", got=repr(value), instead=f"{name}={instead}")
    if getattr(arguments["offload"], "automatic", False):
        raise UserError(
            "a plan lists what fits by itself",
            got=repr(arguments["offload"]),
            instead='Machine(gpu_mem="24GB", host_mem="64GiB"), and no offload',
        )
    if getattr(arguments["comm"], "group", None) is not None:
        raise UserError(
            "Comm.group is of a run, and a plan has none",
            got=repr(arguments["comm"]),
            instead="Machine(ranks=8), how many there are",
        )


def _check_recipe(model: Model, precision: object) -> None:
    told = model.job is None and precision is not None
    for name in ("preset", "bytes") if told else ():
        if getattr(model, name) is not None:
            what = f"Model.{name} and precision both say how many bytes a parameter takes"
            raise UserError(what, instead="one of the two")


def _recipe(model: Model, precision: Precision | None, comm: Comm) -> Recipe:
    """Return the bytes per parameter that are asked for; of a job they are not looked at."""
    if precision is not None and model.job is not None:
        precision = dataclasses.replace(precision, states={}, rounding="nearest")  # its optimizers are asked
    if precision is not None:
        return formats.sent_by(formats.engines(precision, model.optimizer), comm)
    chosen = recipes.recipe(model.preset or "zeroshard", optimizer=model.optimizer, custom=model.bytes)
    return formats.sent_by(chosen, comm)


def _cut(layout: Layout, *, accelerator: bool, job: bool) -> Layout:
    """Return the layout with the size of its buckets; of a job off accelerators its model says where it is."""
    return layout if job and not accelerator else layout.on(accelerator=accelerator)


def _check_experts(model: Model, machine: Machine, layout: Layout, comm: Comm) -> None:
    beside: dict[str, object] = {"Comm.replicas": comm.rows, "Machine.gpus_per_node": machine.gpus_per_node}
    beside |= {"Model.params": model.params, "Machine.cluster": machine.cluster}
    check_experts(layout, machine.ep, machine.ranks, **beside)


def _check_links(machine: Machine, comm: Comm) -> None:
    if comm.transport == "shared" and machine.gpus_per_node is not None:
        raise UserError(
            "Machine.gpus_per_node asks for the links of GPUs, and memory is shared between ranks on the CPU",
            got=f"gpus_per_node={machine.gpus_per_node}, transport='shared'",
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
        _refuse(
            why,
            "Step(batch=1, seq=2048) beside it, or a job",
            **{"Layout.recompute": again, "Offload.activations": moved},
        )
    if layout.recompute and layout.recompute is not True:
        _refuse("of a number and of shapes all units are alike", "True", **{"Layout.recompute": layout.recompute})
    instead = (
        'name a job, module:function; for bytes per parameter Model(..., preset="zeroshard-bf16-grads") and the like'
    )
    told = {
        f"{kind}.{name}": value
        for kind, policy in {"Layout": layout, "Comm": comm}.items()
        for name, value in _changed(policy).items()
        if name not in OF_SHAPES[kind]
    }
    told |= {f"Precision.{name}": value for name, value in formats.uncounted(precision, early=early).items()}
    _refuse("for jobs only", instead, **told)


def _check_numbers(ranks: object, most: int, gpus_per_node: object, comm: Comm) -> None:
    whole("Machine.ranks", ranks, most)
    if gpus_per_node is not None:
        whole("Machine.gpus_per_node", gpus_per_node, from_number.RANKS_LIMIT)
    if comm.rows is not None:
        assert type(ranks) is int
        whole("Comm.hosts" if comm.two_levels else "Comm.replicas", comm.rows, ranks)
        seat(0, ranks, comm.rows, hosts=comm.two_levels)  # says which numbers divide


def _check_batch(step: Step, *, known: bool) -> None:
    for name in ("batch", "seq"):
        if known and getattr(step, name) is not None:
            raise UserError(f"Step.{name} stands for a job, which has batches of its own", instead="leave it out")


def _counted(step: Step) -> bool:
    """Are activations of a number or of shapes counted?"""
    return step.batch is not None or step.seq is not None


def _check_stage(stage: object) -> None:
    if stage is not None and (type(stage) is not int or stage not in STAGES):
        raise UserError("no such ZeRO stage", expected="0, 1, 2 or 3", got=repr(stage), instead="stage=3")


def _check_files(offload: Offload | None, machine: Machine, step: Step) -> None:
    """Refuse questions about files without files. Where a device's memory is known, ways with files may be found."""
    on_disk = offload is not None and any(NVME in offload.tiers(kind) for kind in STATES)
    about = {"Step.seconds": step.seconds, "Step.tokens": step.tokens}
    if machine.limit is None:
        about |= {"Machine.disk": machine.disk, "Machine.disk_read": machine.disk_read}
    for name, value in about.items():
        if value is not None and not on_disk:
            raise UserError(f"{name} is about files, and nothing rests in any", instead='offload="nvme"')
    if step.tokens is not None and machine.disk is None and machine.disk_read is None:
        what = "Step.tokens need to know what the disk moves"
        raise UserError(what, instead="Machine(disk_read=3.2, disk_write=2.1), in GB/s")


def _plan_job(job: str | Callable[[], Any], asked: Asked) -> Plan:
    from .from_job import plan_job  # the only plan that needs torch

    return plan_job(job, asked)
