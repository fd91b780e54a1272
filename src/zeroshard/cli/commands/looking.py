"""`zeroshard explain`, `verify`, `diff` and `ckpt`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from zeroshard.cli.commands.options import (
    BITS,
    COMMON,
    GRID,
    HOW,
    RUN,
    SENT,
    AsJson,
    InBackward,
    OffloadPath,
    option,
    takes,
    unset,
)
from zeroshard.cli.config import FloatingPoint, InputError, Precision, Reduce, Transport, in_options
from zeroshard.errors import UserError


class Shown:
    out: Annotated[
        str | None, unset(COMMON, "The page. [dim]\\[default: RUN_DIR/zero.html, or ./zero.html][/dim]", "FILE")
    ] = None
    browse: Annotated[bool, option(COMMON, "Show the page in a browser, or only write it.", "--open/--no-open")] = False
    as_json: Annotated[bool, option(COMMON, "Print what the page is made of, as one JSON object.", "--json")] = False


def named(panel: str | None, text: str, alone: str, beside: str, metavar: str | None = None) -> Any:
    """Make an option of a setting, of which gate 4 takes other values where the command line names no setting."""
    return unset(panel, f"{text} [dim]\\[default: {beside}; {alone} where no setting is named][/dim]", metavar)


QUICK: dict[str, Any] = {"ranks": "2", "stage": "0,3", "bucket_mib": "24", "steps": 2}  # of verify --quick


class Grid:
    ranks: Annotated[str, named(COMMON, "Numbers of local processes to run it on.", "1 to 4", "2,3,4", "NUMBERS")] = (
        "2,3,4"
    )
    stage: Annotated[str, option(COMMON, "Stages.")] = "0,1,2,3"
    replicas: Annotated[
        str,
        named(
            GRID,
            "And with that many copies of the sharded model, where they divide the ranks: 1,2,4.",
            "1,2",
            "1",
            "NUMBERS",
        ),
    ] = "1"
    hosts: Annotated[
        str,
        named(
            GRID,
            "And one copy of the model on that many hosts, where they divide the ranks: 1,2,4.",
            "1,2",
            "1",
            "NUMBERS",
        ),
    ] = "1"
    optimizer_in_backward: InBackward = False
    optimizer_over: Annotated[
        str,
        named(
            GRID,
            "Which ranks share its states: each replica's (team), all replicas' (all), or both.",
            "team,all",
            "team",
            "WORDS",
        ),
    ] = "team"
    transport: Annotated[Transport, named(RUN, HOW, "all", "auto")] = "auto"
    reduce: Annotated[Reduce, named(RUN, SENT, "both", "ordered")] = "ordered"
    bucket_mib: Annotated[str, option(GRID, "Bucket sizes; small: that of the median tensor.")] = "24,small"
    steps: Annotated[
        int, unset(COMMON, "Optimizer steps, each compared. [dim]\\[default: 4; 2 of the pairs of gate 4][/dim]")
    ] = 4
    accumulate: Annotated[int, option(COMMON, "Micro-batches that each rank adds up in one step.")] = 2
    precision: Annotated[
        Precision,
        named(
            COMMON,
            BITS,
            "all but ...-states16",
            "fp32, without a job bf16",
            "FORMAT",
        ),
    ] = "fp32"
    clip: Annotated[float | None, unset(GRID, "Clip gradients to this norm. [dim]\\[default: no][/dim]")] = None
    seed: Annotated[int, option(GRID, "The seed of the weights, and of what is drawn in batches and losses.")] = 0
    timeout: Annotated[float, option(GRID, "Seconds after which a silent rank is an error.")] = 300.0
    offload: Annotated[
        str, named(COMMON, "Compare with all states in these tiers too.", "cpu,nvme", "none", "TIERS")
    ] = ""
    offload_path: OffloadPath = ""
    full: Annotated[bool, option(COMMON, "1 to 8 ranks, and all values of settings that are not named.", "--full")] = (
        False
    )
    quick: Annotated[
        bool,
        option(COMMON, "This machine, and a few runs: 2 steps on 2 ranks at stages 0 and 3, or as named.", "--quick"),
    ] = False
    out: Annotated[str, unset(COMMON, "Write verify.json there.", "FOLDER")] = ""
    as_json: AsJson = False


@takes(Shown)
def explain(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN_DIR [RUN_DIR]]", help="One or two folders of `zeroshard train`.", show_default=False
        ),
    ] = None,
    **options: Any,
) -> None:
    """ZeRO number by number, a run of yours beside it, or two runs compared: one HTML page.

    Without a run, with one, and with two:

      zeroshard explain                      260 parameters, a step of each stage
      zeroshard explain run/mine             who held what, and waited for what
      zeroshard explain run/mine run/other   peaks, losses, whether bits are equal

    The page needs no network and no server. Its numbers come from runs of the engine and from the planner's formulas.
    """
    from zeroshard.cli.explain import explain as show

    show(tuple(runs or ()), **options)


@takes(Grid)
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
    **options: Any,
) -> None:
    """Try four gates on your own model, optimizer and batches, and compare every bit.

    The gates, each with what is compared:

      1  fixed-environment repeatability   the same run twice
      2  baseline equivalence              sharded, and one process without
      3  restart replay                    resumed, and never stopped
      4  configuration independence        ranks, stages, tiers, transports ...

    MODULE:FUNCTION names a function that returns a dict:

      [bold]model[/bold]                an nn.Module
      [bold]optimizer(params)[/bold]    a torch.optim optimizer
      [bold]batch(step, index)[/bold]   micro-batch `index` of a step: turn * ranks + rank
      [bold]loss(model, batch)[/bold]   a scalar

    Or a Trainer of Hugging Face's, or a LightningModule, alone or with its loader: model, optimizer and loss are its
    own.

    The reference has no zeroshard in it: one process that runs the same micro-batches one after the other, in the same
    format. Losses and all parameters are compared with == after every step, and the first step, parameter, element and
    rank that differ are named.

    Without options that name settings, gate 4 takes 1 to 4 ranks and any two values of two settings together; with
    --full 1 to 8 ranks and all combinations. Where some are named, it takes all combinations of these and no others.
    With --quick it first prints what a report of a bug should say of this machine, and tries a few runs.
    What was not tried is listed, with the reason.

    Every rank holds the whole model while it is compared, and the temporary folder takes a copy of it per step and
    number of ranks.

    Without a job it runs the tests of a text on ZeRO-1 in three layers: its own MLP in bf16, on micro-batches that are
    the same on all ranks. It runs them on 2 ranks, on more, and with parameters that the ranks do not divide, at every
    stage; with --quick the first of them.

    Exit code 0: all gates that ran hold. 1: one fails. 2: the input cannot be used.
    """
    from zeroshard.cli.question import Question, bucket_sizes, whole_numbers, words
    from zeroshard.cli.verify import verify as run_verify
    from zeroshard.cli.verify import verify_scenarios

    given = {name for name in options if (how := context.get_parameter_source(name)) and how.name != "DEFAULT"}
    if job is None and "precision" not in given:
        options["precision"] = "bf16"
    as_json, full, quick, out = (options.pop(name) for name in ("as_json", "full", "quick", "out"))
    if job is None and full:
        raise InputError("--full is of a job of yours: zeroshard verify MODULE:FUNCTION --full")
    if quick and full:
        raise InputError("--quick tries little, and --full all; one of the two")
    if quick:
        options |= {name: value for name, value in QUICK.items() if name not in given}
        given |= {*QUICK}
    question = Question(
        job=job or "",
        ranks=whole_numbers("--ranks", options.pop("ranks")),
        stages=whole_numbers("--stage", options.pop("stage")),
        buckets=bucket_sizes(options.pop("bucket_mib")),
        tiers=words(options.pop("offload")),
        replicas=whole_numbers("--replicas", options.pop("replicas")),
        hosts=whole_numbers("--hosts", options.pop("hosts")),
        optimizer_over=words(options.pop("optimizer_over")),
        **options,
    )
    if job is None:
        own = question.ranks if "ranks" in given else None
        raise typer.Exit(verify_scenarios(question, ranks=own, quick=quick, as_json=as_json, out=out))
    raise typer.Exit(run_verify(question, given, full=full, quick=quick, as_json=as_json, out=out))


@takes()
def diff(
    first: Annotated[str, typer.Argument(metavar="RUN", help="A folder that RunLog wrote.", show_default=False)],
    second: Annotated[str, typer.Argument(metavar="OTHER", help="Of the other run.", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Find the first step, tensor and element in which two runs differ, and of what kind the difference is.

    The runs are of any engine: plain PyTorch, DDP, FSDP2, zeroshard. Two lines around and in a loop log one:

      with zeroshard.RunLog("runs/a", model, optimizer) as log:   # around the loop
          log.backward(loss)                              # after loss.backward()

    Exit code 0 says that all logged steps have the same bits; 1 that they part.
    """
    from zeroshard.cli.diff import diff as run_diff

    raise typer.Exit(run_diff(first, second, as_json=as_json))


ckpt = typer.Typer(
    help="Look into checkpoints, check, compare, export and import them: as files, without a model or ranks.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
Checkpoint = Annotated[str, typer.Argument(metavar="CHECKPOINT", help="A folder that zero.save(...) was given.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@ckpt.command("inspect")
@takes()
def inspect_checkpoint(
    path: Annotated[str, typer.Argument(metavar="FOLDER", help="A checkpoint, or a folder of several.")],
    prefix: Annotated[
        str | None,
        typer.Argument(
            metavar="PREFIX",
            help='Only tensors whose names begin so: blocks.3, or "blocks.*.attn".',
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what is in a checkpoint and what wrote it, or which checkpoints a folder has: whole, damaged or left over.

    Of more than 24 tensors it shows the tree of their names, with counts and bytes; with PREFIX the tensors below it.

    Reads manifests and sizes only; `zeroshard ckpt verify` reads every byte.
    """
    from zeroshard.cli.checkpoints import inspect

    inspect(path, prefix, as_json=as_json)


@ckpt.command("verify")
@takes()
def verify_checkpoints(
    paths: Annotated[list[str], typer.Argument(metavar="CHECKPOINT...", help="One or several.")],
    as_json: Json = False,
) -> None:
    """Read every byte and check every digest. Exit code 1 if one is wrong, with its file and block."""
    from zeroshard.cli.checkpoints import verify

    raise typer.Exit(verify(paths, as_json=as_json))


@ckpt.command("diff")
@takes()
def diff_checkpoints(a: Checkpoint, b: Checkpoint, as_json: Json = False) -> None:
    """Compare two checkpoints bit for bit, however each was sharded. Exit code 0: they are equal, 1: they differ.

    Compares parameters, optimizers' states and options, buffers, and what was saved along. Does not compare what wrote
    them and when, nor the random states, which are each rank's own.
    """
    from zeroshard.cli.difference import diff

    raise typer.Exit(diff(a, b, as_json=as_json))


@ckpt.command("export")
@takes()
def export_checkpoint(
    path: Checkpoint,
    out: Annotated[str, typer.Argument(metavar="OUT", help="The folder to write.")],
    dtype: Annotated[
        FloatingPoint | None,
        typer.Option(help="Of all floating-point tensors. [dim]\\[default: each one's own][/dim]", show_default=False),
    ] = None,
    file_size: Annotated[str, typer.Option(help="The most bytes of tensors in one file.")] = "5GB",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a folder that is not an export.")] = False,
    as_json: Json = False,
) -> None:
    """Write a checkpoint's weights as the safetensors files that Hugging Face's tools read, a block at a time.

    --dtype casts from the fp32 masters where there are any. The files are those that zero.export(OUT) writes.
    """
    from zeroshard.cli.checkpoints import export
    from zeroshard.planner.quantities import budget

    try:
        file_nbytes = budget(file_size, "file_size")
    except UserError as error:
        raise InputError(in_options(error, ("file_size",))) from error
    export(path, out, dtype=dtype, file_nbytes=file_nbytes, overwrite=overwrite, as_json=as_json)


@ckpt.command("import")
@takes()
def import_checkpoint(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="A folder of DeepSpeed's or DCP's, or a .pt file of torch.save.")
    ],
    path: Annotated[str, typer.Argument(metavar="CHECKPOINT", help="The folder to write.")],
    optimizer: Annotated[
        str | None,
        typer.Option(help="The optimizer's class. [dim]\\[default: told by its states][/dim]", show_default=False),
    ] = None,
    weights: Annotated[bool, typer.Option("--weights", help="Leave the optimizer's states out.")] = False,
    buffer: Annotated[
        list[str] | None,
        typer.Option(help="A name or pattern of buffers, where the source does not tell them.", show_default=False),
    ] = None,
    tied: Annotated[
        list[str] | None,
        typer.Option(metavar="ALIAS=NAME", help="Two names of one parameter, likewise.", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a checkpoint of DeepSpeed's, FSDP2's or torch's as one that zero.load reads, at any ranks and stage.

    For example ZeRO 1 to 3 as save_checkpoint writes them, or DeepSpeed's universal format; what dcp.save writes of
    FSDP2's state; and a whole state dict:

      zeroshard ckpt import ds_run run/imported
      zeroshard ckpt import dcp/step-100 run/imported
      zeroshard ckpt import model.pt run/imported --weights

    It takes weights in full precision, the optimizer's states, step counts and options, buffers, and what else is plain
    data. Nothing in the source is executed: files that hold anything but data are refused. One tensor at a time is in
    memory.
    """
    from zeroshard.cli.checkpoints import import_foreign

    import_foreign(source, path, optimizer, weights, buffer or [], tied or [], as_json=as_json)
