"""The `zeroshard` command: options, help, and one line for every mistake.

Exit codes: 0 done, 1 failed, 2 the input cannot be used, 130 interrupted.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import signal
import sys
import time
from typing import Annotated, Any

import typer

from zeroshard.cli import launch
from zeroshard.cli.config import (
    SIZES,
    Device,
    FloatingPoint,
    GradDtype,
    InputError,
    Launch,
    Precision,
    RunConfig,
    Size,
    offload_of,
    one_line,
    places,
    planned_offload,
)
from zeroshard.errors import Error, UserError, visible

app = typer.Typer(
    help="ZeRO stages 0-3 for PyTorch from one line, with the same bits in every configuration.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)

# What tables and bars are drawn with, where a terminal or a pipe knows no more than ASCII; the rest becomes escapes.
PLAIN = {"█": "@", "▓": "%", "▒": "+", "░": "-", "━": "=", "─": "-", "…": "...", "µ": "u"}
SPEAKER = 5.0  # seconds that one rank gets to say for all of them what is wrong
DATA, RUN, MODEL = "Data", "Sharding and run", "Model and training"
WHAT, BYTES, ANSWER = "What is planned", "Bytes and messages", "The answer"
GRID = "What to compare"


def _option(panel: str, text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, **more)


Steps = Annotated[int, _option(MODEL, "Optimizer steps.")]
Seed = Annotated[int, _option(MODEL, "Of the weights and of the micro-batches.")]
Out = Annotated[
    str, _option(RUN, "Where the run's files go; an earlier run's there move to earlier-1 in it.", metavar="RUN_DIR")
]
# What follows the first file of `--data *.txt` arrives as arguments: an option of a command line takes one value.
Data = Annotated[
    list[str] | None,
    _option(
        DATA,
        "UTF-8 text to train on: --data a.txt b.txt, or --data *.md. Without it: the Python files of this Python's "
        "own standard library.",
        metavar="FILES...",
        show_default=False,
    ),
]
MoreData = Annotated[list[str] | None, typer.Argument(metavar="FILES", hidden=True)]
Stage = Annotated[
    int, _option(RUN, "What is sharded: 0 nothing, 1 optimizer state, 2 also gradients, 3 also parameters.")
]
Ranks = Annotated[
    int | None, _option(RUN, "Local processes to start. [dim]\\[default: 1, or torchrun's][/dim]", show_default=False)
]
Where = Annotated[Device, _option(RUN, "auto: a GPU for every rank where there are enough, else the CPU.")]
Report = Annotated[bool, _option(RUN, "Print the tables of bytes at the end.")]
Batch = Annotated[int, _option(MODEL, "Sequences in one micro-batch of one rank.")]
Accumulate = Annotated[int, _option(MODEL, "Micro-batches each rank adds up in one step.")]
Bits = Annotated[Precision, _option(MODEL, "bf16 computes and sends in bfloat16 and keeps fp32 masters.")]
Sums = Annotated[GradDtype, _option(MODEL, "What gradients are added up in; bf16 takes two bytes per parameter less.")]
GradDtypeOfJob = Annotated[
    GradDtype | None,
    _option(
        RUN, "What a job's gradients are added up in. [dim]\\[default: fp32 of 16-bit ones][/dim]", show_default=False
    ),
]
Again = Annotated[
    bool, _option(RUN, "Every block runs again in backward and keeps only its inputs.", "--recompute/--no-recompute")
]
Place = Annotated[
    str,
    _option(
        RUN,
        "Where all states rest: cpu (host memory) or nvme (files). [dim]\\[default: on the device][/dim]",
        metavar="cpu|nvme",
        show_default=False,
    ),
]


def _where(state: str) -> Any:
    text = f"Where {state} rest: device, cpu, nvme, or the fraction of them in host memory."
    return _option(RUN, text, metavar="device|cpu|nvme|FRACTION", show_default=False)


PlaceOfParameters = Annotated[str, _where("parameters")]
PlaceOfGradients = Annotated[str, _where("gradients")]
PlaceOfOptimizer = Annotated[str, _where("masters and optimizer states")]
OffloadPath = Annotated[
    str, _option(RUN, "A folder on a local disk, for what rests in files.", metavar="DIR", show_default=False)
]
Scale = Annotated[Size, _option(MODEL, "0.7 M, 11 M or 86 M parameters.")]
Rate = Annotated[
    float | None, _option(MODEL, "Highest learning rate. [dim]\\[default: the size's own][/dim]", show_default=False)
]
SaveEvery = Annotated[int, _option(RUN, "Steps between two checkpoints; 0: only one, at the end.")]
Keep = Annotated[int, _option(RUN, "How many checkpoints stay; older ones are removed.")]
Resume = Annotated[
    str,
    _option(
        RUN,
        "Go on where a run stopped, from its newest complete checkpoint or from a given one; with its settings, on as "
        "many ranks as you like. RUN_DIR's files are continued.",
        metavar="RUN_DIR|CHECKPOINT",
        show_default=False,
    ),
]


@app.command()
def train(
    context: typer.Context,
    files: MoreData = None,
    data: Data = None,
    stage: Stage = 3,
    ranks: Ranks = None,
    device: Where = "auto",
    out: Out = "run/train",
    report: Report = True,
    steps: Steps = 1000,
    batch: Batch = 16,
    accumulate: Accumulate = 1,
    precision: Bits = "fp32",
    grad_dtype: Sums = "fp32",
    size: Scale = "tiny",
    lr: Rate = None,
    seed: Seed = 0,
    recompute: Again = False,
    save_every: SaveEvery = 0,
    keep: Keep = 2,
    resume: Resume = "",
    offload: Place = "",
    offload_parameters: PlaceOfParameters = "",
    offload_gradients: PlaceOfGradients = "",
    offload_optimizer: PlaceOfOptimizer = "",
    offload_path: OffloadPath = "",
) -> None:
    """Train a byte-level GPT on text, sharded over ranks.

    It starts its own local ranks, or is one of torchrun's:

      zeroshard train --ranks 2 --data *.txt
      torchrun --standalone --nproc-per-node 2 -m zeroshard train --data *.txt

    The run leaves in RUN_DIR:

      [bold]run.json[/bold]           settings, hash of the data, versions
      [bold]metrics.jsonl[/bold]      a line per step: loss, gradient norm, learning rate, tokens/s
      [bold]ledger.json[/bold]        bytes of every rank, predicted and held, and bytes sent
      [bold]explain.json[/bold]       one step of every rank, for `zeroshard explain RUN_DIR`
      [bold]model.safetensors[/bold]  the full weights
      [bold]checkpoints/[/bold]       what --resume RUN_DIR goes on from

    A run that was resumed has the losses and weights of one that never stopped, bit for bit, also on another number
    of ranks if both are powers of two and the micro-batches of a step are as many.
    """
    place = Launch.from_environment()
    if place and ranks is not None and ranks != place.ranks:
        raise InputError(f"--ranks {ranks}, but torchrun started {place.ranks} ranks; leave --ranks out under torchrun")
    options: dict[str, Any] = {
        "out": out, "data": (*(data or ()), *(files or ())), "stage": stage, "steps": steps, "batch": batch,
        "accumulate": accumulate, "precision": precision, "grad_dtype": grad_dtype, "size": size,
        "lr": SIZES[size].lr if lr is None else lr, "seed": seed, "device": device, "report": report,
        "save_every": save_every, "keep": keep, "resume": resume, "recompute": recompute,
        "offload_parameters": offload_parameters or offload, "offload_gradients": offload_gradients or offload,
        "offload_optimizer": offload_optimizer or offload, "offload_path": offload_path,
    }  # fmt: skip
    ranks = place.ranks if place else ranks
    if resume:
        from zeroshard.cli.resume import TIERS, settle

        given = {name for name in options if (how := context.get_parameter_source(name)) and how.name != "DEFAULT"}
        given |= {"data"} if files else set()
        given |= set(TIERS) if offload else set()
        options = settle(resume, options, frozenset(given), ranks)
    else:
        options["ranks"] = 1 if ranks is None else ranks
    config = RunConfig(**options)
    raise typer.Exit(run_training(config, place))


@app.command()
def demo(
    steps: Steps = 250,
    ranks: Annotated[int, _option(RUN, "Local processes to start.")] = 2,
    seed: Seed = 0,
    out: Out = "run/demo",
) -> None:
    """Train at stage 3, again at stage 0, resume on fewer ranks, and compare every bit. No GPU, no download.

    A small byte-level GPT learns from the Python files of the standard library on local CPU ranks, in about a minute
    and a half. The demo prints the bytes each rank was predicted to hold and holds, the bytes sent, whether both runs
    ended with the same weights and losses, whether a run that went on from a checkpoint, on half the ranks, did too,
    and what the model writes. Exit code 1 if any bit differs.
    """
    from zeroshard.cli.demo import demo as run_demo

    raise typer.Exit(run_demo(steps=steps, ranks=ranks, seed=seed, out=out))


@app.command("explain")
def explain_run(
    run_dir: Annotated[
        str | None, typer.Argument(metavar="RUN_DIR", help="A folder of `zeroshard train`.", show_default=False)
    ] = None,
    out: Annotated[
        str | None,
        _option(ANSWER, "The page. [dim]\\[default: RUN_DIR/zero.html, or ./zero.html][/dim]", show_default=False),
    ] = None,
    text: Annotated[bool, _option(ANSWER, "Print it here instead.", "--text")] = False,
    element: Annotated[
        str | None,
        _option(
            ANSWER,
            "With --text, without RUN_DIR: which parameter to follow. [dim]\\[default: W_q\\[0,0]][/dim]",
            metavar="SYMBOL[ROW,COLUMN]",
            show_default=False,
        ),
    ] = None,
    browse: Annotated[
        bool, _option(ANSWER, "Show the page in a browser, or only write it.", "--open/--open-nothing")
    ] = False,
) -> None:
    """ZeRO number by number, and a run of yours beside it: one HTML page, or text.

      zeroshard explain                  a transformer of 260 parameters through one step of each stage
      zeroshard explain run/mine         and who held what, and waited for what, in a step of that run
      zeroshard explain run/mine --text

    The page needs no network and no server. Its numbers come from runs of the engine and the planner's formulas.
    """
    from zeroshard.cli.explain import explain

    explain(run_dir, out=out, text=text, element=element, browse=browse)


@app.command()
def plan(
    context: typer.Context,
    job: Annotated[str | None, typer.Argument(metavar="MODULE:FUNCTION", show_default=False)] = None,
    params: Annotated[str | None, _option(WHAT, "How many parameters: 7B, 350M, 7e9.", show_default=False)] = None,
    shapes: Annotated[
        str | None,
        _option(
            WHAT,
            "Names and shapes from a file or folder: JSON, .safetensors, or a Hugging Face config.json.",
            metavar="FILE_OR_FOLDER",
            show_default=False,
        ),
    ] = None,
    text: Annotated[
        str | None,
        _option(
            WHAT, "The tables of one of five published texts, recomputed.", metavar="A|B|C|D|E", show_default=False
        ),
    ] = None,
    ranks: Annotated[int, _option(RUN, "Over which the states are sharded.")] = 1,
    stage: Annotated[
        int | None, _option(RUN, "One stage. [dim]\\[default: all four][/dim]", show_default=False)
    ] = None,
    accumulate: Annotated[int, _option(RUN, "Backwards per step.")] = 1,
    no_sync: Annotated[bool, _option(RUN, "Added up on the rank first, reduced once.", "--no-sync")] = False,
    replicas: Annotated[
        int | None,
        _option(
            RUN,
            "K copies of the sharded optimizer, each over 1/K of the ranks.",
            "--replicas",
            "--instances",
            show_default=False,
        ),
    ] = None,
    units: Annotated[
        int | None, _option(RUN, "With --params: how many equal blocks, for the peaks of a step.", show_default=False)
    ] = None,
    bounds: Annotated[
        str | None, _option(RUN, "Where shards are cut: unit, model or tensor (shapes, jobs).", show_default=False)
    ] = None,
    align: Annotated[
        int | None, _option(RUN, "Elements no cut falls inside (shapes, jobs).", show_default=False)
    ] = None,
    bucket_mib: Annotated[
        float | None, _option(RUN, "The most one message moves (shapes, jobs).", show_default=False)
    ] = None,
    prefetch: Annotated[int, _option(RUN, "Units gathered ahead of use.")] = 1,
    gpus_per_node: Annotated[
        int | None, _option(RUN, "What a GPU's links inside and between such nodes carry.", show_default=False)
    ] = None,
    preset: Annotated[
        str | None,
        _option(
            BYTES,
            "Bytes per parameter by name: paper, zeroshard, zeroshard-bf16-grads, fp32, deepspeed, megatron-bf16, "
            "megatron-fp16. [dim]\\[default: paper, with shapes zeroshard][/dim]",
            show_default=False,
        ),
    ] = None,
    optimizer: Annotated[
        str | None,
        _option(
            BYTES,
            "Its states instead of the preset's: adamw, sgd, sgd-momentum, muon, adam-8bit, adamw-24bit-master, "
            "pure-bf16, or any class of torch.optim.",
            show_default=False,
        ),
    ] = None,
    bytes: Annotated[
        str | None,
        _option(BYTES, "Your own: parameters=2,gradients=2,master=4,m=4,v=4.", metavar="FORMULA", show_default=False),
    ] = None,
    gpu_mem: Annotated[
        str | None,
        _option(ANSWER, "80GiB, 80GB, 24576MiB: does it fit, what would?", metavar="BUDGET", show_default=False),
    ] = None,
    precision: Annotated[
        str | None,
        _option(
            RUN, "Of a job: fp32, its own dtypes, or bf16 with fp32 masters.", metavar="fp32|bf16", show_default=False
        ),
    ] = None,
    grad_dtype: GradDtypeOfJob = None,
    checkpoint: Annotated[
        bool, _option(RUN, "Every unit of a job runs again in backward.", "--recompute", "--checkpoint")
    ] = False,
    offload: Place = "",
    offload_parameters: PlaceOfParameters = "",
    offload_gradients: PlaceOfGradients = "",
    offload_optimizer: PlaceOfOptimizer = "",
    host_mem: Annotated[
        str | None,
        _option(ANSWER, "A rank's share of host memory: does that suffice?", metavar="BUDGET", show_default=False),
    ] = None,
    disk: Annotated[
        str | None,
        _option(ANSWER, "What zeroshard io-bench wrote: how long files take.", metavar="FILE", show_default=False),
    ] = None,
    step_time: Annotated[
        float | None, _option(ANSWER, "Seconds of a step, for what files write in a day.", show_default=False)
    ] = None,
    tokens: Annotated[
        str | None, _option(ANSWER, "A rank's tokens per step: tokens/s that the disk allows.", show_default=False)
    ] = None,
    check: Annotated[
        bool, _option(ANSWER, "Run the job on local ranks too: exit code 1 unless held = predicted.", "--check")
    ] = False,
    as_json: Annotated[bool, _option(ANSWER, "As JSON, bytes as integers.", "--json")] = False,
) -> None:
    """What each rank holds and sends at every stage, before anything is built.

      zeroshard plan --params 7B --ranks 8 --gpu-mem 80GiB
      zeroshard plan --shapes path/to/Llama-3-8B --ranks 64
      zeroshard plan train:job --ranks 8 --gpu-mem 80GiB
      zeroshard plan train:job --ranks 2 --check

    --params is arithmetic on three numbers; --shapes lays the model out as the engine does, to the byte, with padding
    and the peak of a step; a job's own model, optimizer and loss run through the engine itself on tensors without
    memory. --check then runs them on local ranks and compares every byte.
    """
    from zeroshard.cli import plan as command

    settings = dict(context.params)  # every option above, by its name; as_json and text are not the planner's
    as_json, text, checked = settings.pop("as_json"), settings.pop("text"), settings.pop("check")
    if checked:
        raise typer.Exit(command.check_plan(as_json=as_json, text=text, **settings))
    if text is None:
        command.show_plan(as_json=as_json, **settings)
        return
    sources = {name: context.get_parameter_source(name) for name in settings}
    given = [name.replace("_", "-") for name, source in sources.items() if source and source.name != "DEFAULT"]
    if given:
        raise InputError(f"--text shows a text's own models; leave {', '.join(given)} out")
    command.show_text(text, as_json=as_json)


@app.command()
def verify(
    context: typer.Context,
    job: Annotated[
        str | None,
        typer.Argument(
            metavar="MODULE:FUNCTION",
            help="train:job, or path/to/train.py:job. Without it: three scenarios of a published text.",
            show_default=False,
        ),
    ] = None,
    ranks: Annotated[str, _option(GRID, "Numbers of local processes to run it on.")] = "2,3,4",
    stage: Annotated[str, _option(GRID, "Stages.")] = "0,1,2,3",
    bucket_mib: Annotated[str, _option(GRID, "Bucket sizes; small: that of the median tensor.")] = "24,small",
    steps: Annotated[int, _option(GRID, "Optimizer steps, each compared.")] = 4,
    accumulate: Annotated[int, _option(GRID, "Micro-batches each rank adds up in one step.")] = 2,
    precision: Annotated[
        Precision, _option(GRID, "fp32: the model's own dtypes; bf16: bfloat16 weights and inputs, fp32 masters.")
    ] = "fp32",
    clip: Annotated[
        float | None, _option(GRID, "Clip gradients to this norm. [dim]\\[default: no][/dim]", show_default=False)
    ] = None,
    seed: Annotated[int, _option(GRID, "Of the weights, and of what is drawn in batches and losses.")] = 0,
    timeout: Annotated[float, _option(GRID, "Seconds after which a silent rank is an error.")] = 300.0,
    offload: Annotated[
        str,
        _option(GRID, "And all states in these tiers, at each stage: cpu,nvme.", metavar="TIERS", show_default=False),
    ] = "",
    offload_path: OffloadPath = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.", rich_help_panel=GRID)] = False,
) -> None:
    """Run your own model, optimizer and batches at every stage and compare every bit.

    MODULE:FUNCTION names a function that returns a dict:

      [bold]model[/bold]                     an nn.Module
      [bold]optimizer(params)[/bold]         a torch.optim optimizer
      [bold]batch(step, index)[/bold]        micro-batch `index` of a step: turn * ranks + rank
      [bold]loss(model, batch)[/bold]        a scalar

    The reference has no zeroshard in it: one process that runs the same
    micro-batches one after the other. Stages, bucket sizes and overlap on and off
    then run on local ranks, and with --offload each stage with its states in host
    memory and in files; losses and all parameters are compared with == after
    every step. Each cell of the grid says "equal", or the first step, parameter,
    element and rank that differ. Fewer ranks with more micro-batches are compared
    too, where two of the numbers of ranks are powers of two.

    Every rank holds the whole model while it is compared, and the temporary
    folder takes a copy of it per step and number of ranks.

    Without a job it runs the tests of a text on ZeRO-1 in three layers, its own
    MLP in bf16 on micro-batches that are alike on all ranks: on 2 ranks, on more,
    and with parameters that the ranks do not divide, at every stage.

    Exit code 0: all equal. 1: something differs. 2: the input cannot be used.
    """
    from zeroshard.cli.question import Question, bucket_sizes, whole_numbers, words
    from zeroshard.cli.verify import verify as run_verify
    from zeroshard.cli.verify import verify_scenarios

    given = {name for name in context.params if (how := context.get_parameter_source(name)) and how.name != "DEFAULT"}
    if job is None and "precision" not in given:
        precision = "bf16"
    question = Question(
        job=job or "",
        ranks=whole_numbers("--ranks", ranks),
        stages=whole_numbers("--stage", stage),
        buckets=bucket_sizes(bucket_mib),
        steps=steps,
        accumulate=accumulate,
        precision=precision,
        clip=clip,
        seed=seed,
        timeout=timeout,
        tiers=words(offload),
        offload_path=offload_path,
    )
    if job is None:
        own = question.ranks if "ranks" in given else None
        raise typer.Exit(verify_scenarios(question, ranks=own, as_json=as_json))
    raise typer.Exit(run_verify(question, as_json=as_json))


@app.command()
def simulate(
    job: Annotated[str, typer.Argument(metavar="MODULE:FUNCTION", help="train:job, or path/to/train.py:job.")],
    ranks: Annotated[int, _option(RUN, "How many there would be.")] = 8,
    rank: Annotated[str, _option(RUN, "Which of them to simulate: 0, or 0,511,1023.")] = "0",
    stage: Stage = 3,
    accumulate: Annotated[int, _option(RUN, "Backwards per step.")] = 1,
    precision: Annotated[
        Precision, _option(RUN, "fp32: the job's own dtypes; bf16: bfloat16 weights and inputs, fp32 masters.")
    ] = "fp32",
    grad_dtype: GradDtypeOfJob = None,
    checkpoint: Annotated[
        bool, _option(RUN, "Every unit runs again in backward.", "--recompute", "--checkpoint")
    ] = False,
    bucket_mib: Annotated[float, _option(RUN, "The most one message moves.")] = 24.0,
    prefetch: Annotated[int, _option(RUN, "Units gathered ahead of use.")] = 1,
    reduce: Annotated[
        str, _option(RUN, "ordered: the same bits at every stage; native: the backend's sum.")
    ] = "ordered",
    offload: Place = "",
    offload_parameters: PlaceOfParameters = "",
    offload_gradients: PlaceOfGradients = "",
    offload_optimizer: PlaceOfOptimizer = "",
    machine: Annotated[str, _option(ANSWER, "dgx-2, a100, a100-ethernet or h100.")] = "a100",
    trace: Annotated[
        str | None, _option(ANSWER, "Write what happened as a Chrome trace.", metavar="FILE", show_default=False)
    ] = None,
    as_json: Annotated[bool, _option(ANSWER, "As JSON, bytes as integers.", "--json")] = False,
) -> None:
    """One rank of any number, on this machine, without the others and without memory.

      zeroshard simulate train:job --ranks 1024 --rank 0,511,1023 --machine h100

    The engine itself runs the job for three steps on tensors that have shapes but no memory, as one rank of many. It
    says what that rank holds at rest and at its peak, every message, how evenly the layout shares the model, and, from
    the machine's bandwidths, how long a step takes and how much of it waits for messages. With states in host memory or
    in files: what each tier holds and what files move; no file is made, and the clock leaves these tiers out.
    """
    from zeroshard.cli.question import whole_numbers
    from zeroshard.cli.simulate import show_simulation

    given = {"parameters": offload_parameters, "gradients": offload_gradients, "optimizer": offload_optimizer}
    show_simulation(
        job, ranks=ranks, rank=whole_numbers("--rank", rank), stage=stage, accumulate=accumulate,
        precision=precision, grad_dtype=grad_dtype, checkpoint=checkpoint, bucket_mib=bucket_mib, prefetch=prefetch,
        reduce=reduce,
        offload=planned_offload(places(offload, **given)), on=machine, trace=trace, as_json=as_json,
    )  # fmt: skip


@app.command("io-bench")
def io_bench(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="A folder on the disk to measure.")],
    size: Annotated[str, _option(GRID, "Of the file that is read and written.")] = "1GiB",
    block: Annotated[str, _option(GRID, "What one system call moves.")] = "4MiB",
    depth: Annotated[int, _option(GRID, "System calls at once.")] = 4,
    direct: Annotated[
        bool, _option(GRID, "Past the page cache (O_DIRECT), or through it.", "--direct/--buffered")
    ] = True,
    rounds: Annotated[int, _option(GRID, "Of each pattern, in turn; the median counts.")] = 3,
    params: Annotated[str | None, _option(WHAT, "A model's parameters: 7B, 7e9.", show_default=False)] = None,
    ranks: Annotated[int, _option(RUN, "Over which its states are sharded.")] = 1,
    stage: Stage = 3,
    sharing: Annotated[int, _option(RUN, "Ranks that use this disk at once.")] = 1,
    tokens: Annotated[
        str | None, _option(RUN, "A rank's tokens per backward: the tokens/s allowed.", show_default=False)
    ] = None,
    offload: Place = "",
    offload_parameters: PlaceOfParameters = "",
    offload_gradients: PlaceOfGradients = "",
    offload_optimizer: PlaceOfOptimizer = "",
    out: Annotated[
        str | None, _option(ANSWER, "Leave it as JSON, for plan --disk.", metavar="FILE", show_default=False)
    ] = None,
    as_json: Annotated[bool, _option(ANSWER, "As JSON.", "--json")] = False,
) -> None:
    """What a disk moves in the engine's own pattern, and what that allows a model.

      zeroshard io-bench /scratch --out disk.json
      zeroshard io-bench /scratch --params 7e9 --ranks 8 --tokens 16384
      zeroshard plan --params 7e9 --ranks 8 --offload-optimizer nvme --disk disk.json

    Reads, writes and both at once through the engine's files, beside the same system calls without it. Of a model: how
    long a step's files take, the tokens/s that allows, and what would lift it. Without --offload: the optimizer's
    states in files, gradients in host memory. The file is removed at the end.
    """
    from zeroshard.cli.iobench import Model, Setup
    from zeroshard.cli.iobench import io_bench as run
    from zeroshard.planner.quantities import budget, count

    model = None
    given = {"parameters": offload_parameters, "gradients": offload_gradients, "optimizer": offload_optimizer}
    try:
        setup = Setup(folder, budget(size, "size"), budget(block, "block"), depth, direct, rounds)
        if params is not None:
            asked = places(offload, **given) or {"gradients": "cpu", "optimizer": "nvme"}
            if "nvme" not in asked.values():
                raise InputError("--offload: nothing of this model rests in files; try --offload-optimizer nvme")
            per_rank = None if tokens is None else count(tokens, "tokens")
            model = Model(params, ranks, stage, per_rank, offload_of(asked, folder), sharing)
        elif tokens is not None or offload or any(given.values()):
            raise InputError("--tokens and --offload are about a model; say how large: --params 7e9")
    except InputError:
        raise
    except UserError as error:
        raise InputError(one_line(error)) from error
    run(setup, model, out=out, as_json=as_json)


ckpt = typer.Typer(
    help="Look into checkpoints, check, compare and export them: as files, without a model or ranks.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
app.add_typer(ckpt, name="ckpt")
Checkpoint = Annotated[str, typer.Argument(metavar="CHECKPOINT", help="A folder that zero.save(...) was given.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@ckpt.command("inspect")
def inspect_checkpoint(
    path: Annotated[str, typer.Argument(metavar="FOLDER", help="A checkpoint, or a folder of several.")],
    as_json: AsJson = False,
) -> None:
    """What is in a checkpoint, and what wrote it; or which checkpoints are in a folder, whole, damaged or left over.

    Reads manifests and sizes only; `zeroshard ckpt verify` reads every byte.
    """
    from zeroshard.cli.checkpoints import inspect

    inspect(path, as_json=as_json)


@ckpt.command("verify")
def verify_checkpoints(
    paths: Annotated[list[str], typer.Argument(metavar="CHECKPOINT...", help="One or several.")],
    as_json: AsJson = False,
) -> None:
    """Read every byte and check every digest. Exit code 1 if one is wrong, with its file and block."""
    from zeroshard.cli.checkpoints import verify

    raise typer.Exit(verify(paths, as_json=as_json))


@ckpt.command("diff")
def diff_checkpoints(a: Checkpoint, b: Checkpoint, as_json: AsJson = False) -> None:
    """In what two checkpoints differ, bit for bit, however each was sharded. Exit code 0: in nothing, 1: in something.

    Parameters, what optimizers keep and their options, buffers, what was saved along. Not who wrote it and when, and
    not the random states, which are each rank's own.
    """
    from zeroshard.cli.difference import diff

    raise typer.Exit(diff(a, b, as_json=as_json))


@ckpt.command("export")
def export_checkpoint(
    path: Checkpoint,
    out: Annotated[str, typer.Argument(metavar="OUT", help="The folder to write.")],
    dtype: Annotated[
        FloatingPoint | None,
        typer.Option(help="Of all floating-point tensors. [dim]\\[default: each one's own][/dim]", show_default=False),
    ] = None,
    file_size: Annotated[str, typer.Option(help="The most bytes of tensors in one file.")] = "5GB",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a folder that is not an export.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint's weights as the safetensors files that Hugging Face's tools read, a block at a time.

    --dtype casts from the fp32 masters where there are any. The same files as zero.export(OUT) on the running model.
    """
    from zeroshard.cli.checkpoints import export
    from zeroshard.planner.quantities import budget

    try:
        file_nbytes = budget(file_size, "file_size")
    except UserError as error:
        raise InputError(one_line(error)) from error
    export(path, out, dtype=dtype, file_nbytes=file_nbytes, overwrite=overwrite, as_json=as_json)


@app.command(hidden=True)
def check_rank(folder: str) -> None:
    """One rank of `zeroshard plan --check`, started by it."""
    from zeroshard.cli.check import check_rank as run_rank

    run_rank(folder)


@app.command(hidden=True)
def explain_rank(folder: str) -> None:
    """One rank of `python -m zeroshard.explain.build`, started by it."""
    from zeroshard.explain.build import capture_rank

    capture_rank(folder)


@app.command(hidden=True)
def verify_rank(folder: str) -> None:
    """One rank of `zeroshard verify`, started by it."""
    from zeroshard.cli.verify import verify_rank as run_rank

    run_rank(folder)


def run_training(config: RunConfig, place: Launch | None) -> int:
    """As one of torchrun's ranks, as the only rank, or by starting ranks that come back here as torchrun's."""
    from zeroshard.cli.data import make_writable, read_corpus  # numpy, which `plan` does not wait for

    corpus = read_corpus(config.data, context=config.shape.context)
    if place is None or place.rank == 0:
        make_writable(config.out)
    if place is None and config.ranks > 1:
        return launch.start_ranks(config.command(), config.ranks)

    launch.end_at_once_when_told(launched=place is not None)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch reads it; see start_ranks
    from zeroshard.cli.train import train as train_rank

    train_rank(config, place or Launch(rank=0, ranks=1, local_rank=0, local_ranks=1), corpus)
    return 0


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # alike, and also where a shell's `&` has turned SIGINT off
        signal.signal(number, signal.default_int_handler)
    codecs.register_error("zeroshard", _plain)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # which may know no more than ASCII
            stream.reconfigure(errors="zeroshard")
    place = None
    with contextlib.suppress(UserError):  # which a command says that needs to know
        place = Launch.from_environment()
    try:
        code = app(standalone_mode=False)
    except InputError as error:
        if place is not None and place.local_rank != 0:
            time.sleep(SPEAKER)  # a rank that ends makes torchrun end the others, and one of them is about to speak
        code = _say(error if place is None or place.local_rank == 0 else "", launch.BAD_INPUT)
    except typer.TyperException as error:  # an option that does not exist, a value of the wrong type
        code = _say(error.format_message(), launch.BAD_INPUT)
    except Error as error:
        who = f"rank {place.rank}: " if place else ""
        code = _say(f"{who}{error}", launch.BAD_INPUT if isinstance(error, UserError) else launch.FAILED)
    except KeyboardInterrupt:
        code = launch.INTERRUPTED
    if code == launch.INTERRUPTED and place is None:
        _say("interrupted; all ranks have ended", code)
    sys.exit(code or 0)


def _plain(error: UnicodeError) -> tuple[str | bytes, int]:
    if isinstance(error, UnicodeEncodeError) and error.object[error.start] in PLAIN:
        return PLAIN[error.object[error.start]], error.start + 1
    return codecs.backslashreplace_errors(error)


def _say(what: object, code: int) -> int:
    if str(what):  # empty where the help has been shown instead
        print(f"zeroshard: {visible(one_line(what))}", file=sys.stderr)
    return code
