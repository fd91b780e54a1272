"""`zeroshard train` and `zeroshard demo`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from zeroshard.cli.commands.options import (
    COMMON,
    MODEL,
    RUN,
    Bits,
    Hosts,
    LocalRanks,
    OffloadPath,
    Out,
    Over,
    Replicas,
    Seed,
    Spread,
    Stage,
    Steps,
    Sums,
    Tiers,
    Where,
    option,
    takes,
    unset,
)
from zeroshard.cli.config import SIZES, GradDtype, InputError, Launch, RunConfig, Size
from zeroshard.layout.stage import STATES

# What follows the first file of `--data *.txt` arrives as arguments: an option of a command line takes one value.
MoreData = Annotated[list[str] | None, typer.Argument(metavar="FILES", hidden=True)]


class Training:
    data: Annotated[
        list[str] | None,
        unset(
            COMMON,
            "UTF-8 text to train on: --data a.txt b.txt, or --data *.md. Without it: the Python files of this "
            "Python's own standard library.",
            "FILES...",
        ),
    ] = None
    stage: Stage = 3
    ranks: LocalRanks = None
    size: Annotated[Size, option(COMMON, "0.7 M, 2.4 M, 11 M or 86 M parameters.")] = "tiny"
    steps: Annotated[int, option(COMMON, "Optimizer steps.")] = 1000
    out: Out = "run/train"
    resume: Annotated[
        str,
        unset(
            COMMON,
            "Continue a stopped run from its newest complete checkpoint, or from a given one, with its settings and "
            "on as many ranks as you like.",
            "RUN_DIR",
        ),
    ] = ""
    replicas: Replicas = 1
    hosts: Hosts = 1
    optimizer_over: Spread = "team"
    transport: Over = "auto"
    reduce: Sums = "ordered"
    report: Annotated[bool, option(RUN, "Print the tables of bytes at the end.")] = False
    device: Where = "auto"
    save_every: Annotated[int, option(RUN, "Steps between two checkpoints; 0: only one, at the end.")] = 0
    keep: Annotated[int, option(RUN, "How many checkpoints stay; older ones are removed.")] = 2
    batch: Annotated[int, option(MODEL, "Sequences in one micro-batch of one rank.")] = 16
    accumulate: Annotated[int, option(MODEL, "Micro-batches that each rank adds up in one step.")] = 1
    precision: Bits = "fp32"
    grad_dtype: Annotated[
        GradDtype, option(MODEL, "What gradients are added up in; bf16 takes two bytes per parameter less.")
    ] = "fp32"
    recompute: Annotated[
        bool,
        option(RUN, "Every block runs again in backward and keeps only its inputs.", "--recompute/--no-recompute"),
    ] = False
    lr: Annotated[float | None, unset(MODEL, "Highest learning rate. [dim]\\[default: the size's own][/dim]")] = None
    seed: Seed = 0
    timeout: Annotated[
        float, option(RUN, "Seconds after which a silent rank is an error; one that has ended is one at once.")
    ] = 1800.0


class Files:
    offload_path: OffloadPath = ""


class Demo:
    steps: Steps = 60
    ranks: Annotated[int, option(COMMON, "Local processes to start.")] = 2
    seed: Annotated[int, option(COMMON, "The seed of the weights and of the micro-batches.")] = 0
    out: Out = "run/demo"
    verbose: Annotated[
        bool, option(COMMON, "Every predicted byte beside what was held, and more samples.", "--verbose")
    ] = False


@takes(Training, Tiers, Files)
def train(context: typer.Context, files: MoreData = None, **options: Any) -> None:
    """Train a byte-level GPT on text, sharded over ranks.

    It starts its own local ranks, or is one of torchrun's:

      zeroshard train --ranks 2 --data *.txt
      torchrun --standalone --nproc-per-node 2 -m zeroshard train --data *.txt

    The run leaves in RUN_DIR:

      [bold]run.json[/bold]           settings, hash of the data, versions
      [bold]metrics.jsonl[/bold]      a line per step: loss, gradient norm, rate, tokens/s
      [bold]ledger.json[/bold]        bytes of every rank, predicted and held, and bytes sent
      [bold]explain.json[/bold]       one step of every rank, for `zeroshard explain RUN_DIR`
      [bold]model.safetensors[/bold]  the full weights
      [bold]checkpoints/[/bold]       what --resume RUN_DIR continues from

    A resumed run has the losses and weights of a run that never stopped, bit for bit. This holds on another number of
    ranks too, if both numbers are powers of two and a step has the same number of micro-batches.
    """
    from zeroshard.cli.start import run_training

    place, ranks = Launch.from_environment(), options.pop("ranks")
    if place and ranks is not None and ranks != place.ranks:
        raise InputError(f"--ranks {ranks}, but torchrun started {place.ranks} ranks; leave --ranks out under torchrun")
    ranks = place.ranks if place else ranks
    everywhere = options.pop("offload")
    options |= {name: options[name] or everywhere for name in (f"offload_{state}" for state in STATES)}
    options["data"] = (*(options["data"] or ()), *(files or ()))
    options["lr"] = SIZES[options["size"]].lr if options["lr"] is None else options["lr"]
    if options["resume"]:
        from zeroshard.cli.resume import merge

        given = {name for name in options if (how := context.get_parameter_source(name)) and how.name != "DEFAULT"}
        given |= {"data"} if files else set()
        given |= {f"offload_{state}" for state in STATES} if everywhere else set()
        options = merge(options["resume"], options, frozenset(given), ranks)
    else:
        options["ranks"] = 1 if ranks is None else ranks
    raise typer.Exit(run_training(RunConfig(**options), place))


@takes(Demo)
def demo(**options: Any) -> None:
    """Train at stage 3, again at stage 0, resume on fewer ranks, and compare every bit. No GPU, no download.

    A small byte-level GPT learns from the Python files of the standard library on local CPU ranks, in a minute. Six
    lines at the end say what rank 0 holds at stage 3 and at stage 0, whether both runs ended with the same weights and
    losses, whether a run that continued from a checkpoint on half the ranks did too, whether every rank held what was
    predicted, what the model writes, and where the page is that compares the runs. Exit code 1 if any bit or byte
    differs.
    """
    from zeroshard.cli.demo import demo as run_demo

    raise typer.Exit(run_demo(**options))
