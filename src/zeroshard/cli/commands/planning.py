"""`zeroshard plan` and `zeroshard simulate`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from zeroshard.cli.commands.options import (
    ANSWER,
    BITS,
    BYTES,
    COMMON,
    RUN,
    AsJson,
    GradDtypeOfJob,
    Hosts,
    InBackward,
    Job,
    Over,
    Replicas,
    Spread,
    Stacked,
    Stage,
    Sums,
    Tiers,
    option,
    takes,
    tiers_of,
    unset,
)
from zeroshard.cli.config import InputError, Precision, in_options, planned_offload
from zeroshard.errors import UserError

OF_BUCKETS = "[dim]\\[default: 24 on a CPU][/dim]"


class Question:
    """The options that most questions need."""

    params: Annotated[str | None, unset(COMMON, "How many parameters: 7B, 350M, 7e9.", "NUMBER")] = None
    shapes: Annotated[
        str | None,
        unset(
            COMMON,
            "Names and shapes from a file or folder: JSON, .safetensors, or a Hugging Face config.json.",
            "FILE",
        ),
    ] = None
    ranks: Annotated[int, option(COMMON, "Ranks that share the states.")] = 1
    stage: Annotated[int | None, unset(COMMON, "One stage. [dim]\\[default: all four][/dim]")] = None
    gpu: Annotated[
        str | None, unset(COMMON, "h100-80, a100-40, l4, ...: does it fit, and if not, what would?", "NAME")
    ] = None
    gpu_mem: Annotated[str | None, unset(COMMON, "Or a GPU by its memory: 80GiB, 80GB, 24576MiB.", "BUDGET")] = None
    host_mem: Annotated[str | None, unset(COMMON, "A rank's share of host memory: what fits into both?", "BUDGET")] = (
        None
    )
    disk: Annotated[str | None, unset(COMMON, "A rank's share of a disk: 1TB.", "BUDGET")] = None
    preset: Annotated[
        str | None,
        unset(
            COMMON,
            "Bytes per parameter by name: paper, zeroshard, zeroshard-bf16-grads, fp32, deepspeed, megatron-bf16, "
            "megatron-fp16, trainer-bf16. [dim]\\[default: zeroshard][/dim]",
            "NAME",
        ),
    ] = None
    check: Annotated[
        bool, option(COMMON, "Run the job on local ranks too. Exit code 1 unless held = predicted.", "--check")
    ] = False


class Sharding:
    config: Annotated[
        str | None,
        unset(RUN, "Stage, tiers and the rest from a config: DeepSpeed's JSON or Accelerate's YAML.", "FILE"),
    ] = None
    accumulate: Annotated[int, option(RUN, "Backwards per step.")] = 1
    optimizer_in_backward: InBackward = False
    no_sync: Annotated[bool, option(RUN, "Gradients are added up on the rank and reduced once.", "--no-sync")] = False
    precision: Annotated[
        str | None,
        unset(
            RUN,
            f"{BITS} Of a number and of shapes in place of --preset. [dim]\\[default: fp32][/dim]",
            "FORMAT",
        ),
    ] = None
    fp8: Annotated[
        str | None, unset(RUN, 'Parameters that rest in 8 bits: "*.mlp.*.weight" (shapes, jobs).', "PATTERNS")
    ] = None
    grad_dtype: GradDtypeOfJob = None
    checkpoint: Annotated[
        bool, option(RUN, "Every unit of a job runs again in backward.", "--recompute", "--checkpoint")
    ] = False
    units: Annotated[
        int | None, unset(RUN, "With --params: equal blocks, for a step's peaks. [dim]\\[with --gpu: usual][/dim]")
    ] = None
    batch: Annotated[
        int | None,
        unset(RUN, "Sequences of a micro-batch, for activations (numbers, shapes). [dim]\\[default: 1][/dim]"),
    ] = None
    seq: Annotated[int | None, unset(RUN, "Tokens of a sequence, likewise. [dim]\\[default: 2048][/dim]")] = None
    bounds: Annotated[
        str | None, unset(RUN, "Where shards are cut (shapes, jobs). [dim]\\[default: unit][/dim]", "unit|model|tensor")
    ] = None
    align: Annotated[
        str | None,
        unset(
            RUN,
            'Elements that no cut falls inside (shapes, jobs); of some parameters: "*.w=256". '
            "[dim]\\[default: 128][/dim]",
            "NUMBER|PATTERN=N",
        ),
    ] = None
    bucket_mib: Annotated[float | None, unset(RUN, f"The most that one message moves (shapes, jobs). {OF_BUCKETS}")] = (
        None
    )
    prefetch: Annotated[int, option(RUN, "Units gathered ahead of use.")] = 1
    gpus_per_node: Annotated[
        int | None, unset(RUN, "GPUs in a node: what one GPU sends inside its node and between nodes.")
    ] = None
    replicas: Annotated[
        int | None,
        unset(
            RUN, "Copies of what is sharded, each over 1/K of the ranks. [dim]\\[default: 1][/dim]", None, "--replicas"
        ),
    ] = None
    hosts: Annotated[
        int | None,
        unset(
            RUN,
            "Hosts that one copy of the model is on: messages between them go by two levels. [dim]\\[default: 1][/dim]",
        ),
    ] = None
    optimizer_over: Spread = "team"
    machine: Annotated[
        str | None,
        unset(
            RUN,
            "Which replicas take least time on dgx-2, a100, h100, h200, b200, mi300x, a100-ethernet, or a FILE.json?",
            "NAME|FILE",
        ),
    ] = None
    transport: Over = "auto"
    reduce: Sums = "ordered"
    experts: Annotated[
        str | None, unset(RUN, 'Parameters that are divided among --ep ranks: "*.experts.*" (shapes, jobs).', "PATTERN")
    ] = None
    ep: Annotated[int | None, unset(RUN, "Ranks that divide --experts; a job's model has one rank's part.")] = None
    whole: Annotated[
        str | None,
        unset(RUN, 'Parameters that are never cut: "*.attn.*,*.mlp.*" (shapes, jobs).', "PATTERNS"),
    ] = None
    matrices: Stacked = None


class Bytes:
    optimizer: Annotated[
        str | None,
        unset(
            BYTES,
            "This optimizer's states instead of the preset's: adamw, sgd, sgd-momentum, muon, adam-8bit, "
            "adamw-24bit-master, pure-bf16, or any class of torch.optim.",
            "NAME",
        ),
    ] = None
    bytes: Annotated[str | None, unset(BYTES, "Your own: parameters=2,gradients=2,master=4,m=4,v=4.", "FORMULA")] = None


class Answer:
    full: Annotated[bool, option(COMMON, "All tables and notes, and not the one that answers.", "--full")] = False
    exact: Annotated[bool, option(ANSWER, "Every byte to the last digit, instead of GB.", "--exact")] = False
    as_json: AsJson = False
    disk_read: Annotated[
        float | None, unset(ANSWER, "GB/s that the disk reads, as fio measures it. [dim]\\[default: 3][/dim]")
    ] = None
    disk_write: Annotated[float | None, unset(ANSWER, "GB/s that it writes. [dim]\\[default: 2][/dim]")] = None
    tokens: Annotated[
        str | None, unset(ANSWER, "A rank's tokens per step: the tokens/s that the disk allows.", "NUMBER")
    ] = None
    step_time: Annotated[float | None, unset(ANSWER, "Seconds of a step, for what is written in a day.")] = None


class Simulated:
    ranks: Annotated[int, option(COMMON, "How many ranks there would be.")] = 8
    rank: Annotated[str, option(COMMON, "Which of them to simulate: 0, or 0,511,1023.", metavar="RANKS")] = "0"
    stage: Stage = 3
    machine: Annotated[
        str,
        option(COMMON, "dgx-2, a100, h100, h200, b200, mi300x, a100-ethernet, or a FILE.json.", metavar="NAME|FILE"),
    ] = "a100"
    accumulate: Annotated[int, option(RUN, "Backwards per step.")] = 1
    optimizer_in_backward: InBackward = False
    precision: Annotated[
        Precision,
        option(
            RUN,
            BITS,
            metavar="FORMAT",
        ),
    ] = "fp32"
    grad_dtype: GradDtypeOfJob = None
    checkpoint: Annotated[bool, option(RUN, "Every unit runs again in backward.", "--recompute", "--checkpoint")] = (
        False
    )
    bucket_mib: Annotated[float | None, unset(RUN, f"The most that one message moves. {OF_BUCKETS}")] = None
    prefetch: Annotated[int, option(RUN, "Units gathered ahead of use.")] = 1
    replicas: Replicas = 1
    hosts: Hosts = 1
    optimizer_over: Spread = "team"
    transport: Over = "auto"
    experts: Annotated[
        str | None, unset(RUN, 'Parameters that are divided among --ep ranks: "*.experts.*".', "PATTERN")
    ] = None
    ep: Annotated[int | None, unset(RUN, "Ranks that divide --experts; the job's model has one rank's part.")] = None
    matrices: Stacked = None
    reduce: Annotated[
        str,
        option(
            RUN,
            "ordered: the same bits at every stage; native: the backend's sum; the last: 8 bits each.",
            metavar="ordered|native|int8",
        ),
    ] = "ordered"
    trace: Annotated[str | None, unset(ANSWER, "Write what happened as a Chrome trace.", "FILE")] = None
    as_json: AsJson = False


@takes(Question, Tiers, Sharding, Bytes, Answer)
def plan(
    context: typer.Context,
    job: Annotated[
        str | None,
        typer.Argument(metavar="MODULE:FUNCTION", help="train:job, or path/to/train.py:job.", show_default=False),
    ] = None,
    **options: Any,
) -> None:
    """Plan what each rank holds and sends at every stage, before anything is built.

    A number of parameters, a file of shapes, or your own job:

      zeroshard plan --params 7B --gpu 4090 --host-mem 64GiB
      zeroshard plan --shapes path/to/Llama-3-8B --ranks 64
      zeroshard plan train:job --ranks 8 --gpu-mem 80GiB
      zeroshard plan train:job --ranks 2 --check
      zeroshard plan --params 7B --ranks 8 --config ds_config.json

    It prints a verdict, the line that makes it so, and a table; with --full all that it has counted and assumed.

    With --gpu it searches for the fastest way that fits, and prints its line. --params is arithmetic on three numbers.
    --shapes lays the model out as the engine does, to the byte, with padding and the peak of a step. A job's own model,
    optimizer and loss run through the engine on tensors without memory. --check then runs them on local ranks and
    compares every byte.
    """
    from zeroshard.cli import plan as command

    as_json, exact, full = (options.pop(name) for name in ("as_json", "exact", "full"))
    settings = {"job": job, **options}
    sources = {name: context.get_parameter_source(name) for name in settings}
    given = [name for name, source in sources.items() if source and source.name != "DEFAULT"]
    if (config := settings.pop("config")) is not None:
        from zeroshard.cli.configs import configured

        configured(config, settings, given)
    if settings.pop("check"):
        raise typer.Exit(command.check_plan(as_json=as_json, exact=exact, full=full, **settings))
    command.show_plan(as_json=as_json, exact=exact, full=full, config=config, given=given, **settings)


@takes(Simulated, Tiers)
def simulate(job: Job, **options: Any) -> None:
    """Simulate one rank of any number on this machine, without the others and without memory.

    For example rank 0, one in the middle and the last of 1,024:

      zeroshard simulate train:job --ranks 1024 --rank 0,511,1023 --machine h100

    The engine itself runs the job for three steps, as one rank of many, on tensors that have shapes but no memory. It
    says what that rank holds at rest and at its peak, every message, how evenly the layout shares the model, and, from
    the machine's bandwidths, how long a step takes and how much of it waits for messages. With states in host memory or
    in files it says what each tier holds and what files move; no file is made, and the clock leaves these tiers out.
    """
    from zeroshard.cli.question import whole_numbers
    from zeroshard.cli.working import Working

    with Working(("importing torch", None), lines=not options["as_json"]):
        from zeroshard.cli.simulate import show_simulation

    offload, rank = planned_offload(tiers_of(options)), whole_numbers("--rank", options.pop("rank"))
    try:
        show_simulation(job, rank=rank, offload=offload, on=options.pop("machine"), **options)
    except InputError:
        raise
    except UserError as error:
        raise InputError(in_options(error, (*options, "rank", "machine"))) from error
