"""Options that several commands share, and how a command gets its options from classes that list them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from zeroshard.cli.config import Device, GradDtype, OptimizerOver, Precision, Reduce, Transport

COMMON = None  # the panel that a help shows first
RUN, MODEL = "Sharding and run", "Model and training"
BYTES, ANSWER, WHERE = "Bytes and messages", "The answer", "Where states rest"
GRID = "What to compare"
Command = TypeVar("Command", bound=Callable[..., Any])


def option(panel: str | None, text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, **more)


def unset(panel: str | None, text: str, metavar: str | None = None, *names: str, **more: Any) -> Any:
    """Make an option without a default to show."""
    return option(panel, text, *names, metavar=metavar, show_default=False, **more)


def takes(*groups: type) -> Callable[[Command], Command]:
    """Give a command the options that these classes list, in their order, where it says `**options`."""

    def decorate(command: Command) -> Command:
        own = inspect.signature(command, eval_str=True).parameters.values()
        parameters = [each for each in own if each.kind is not inspect.Parameter.VAR_KEYWORD]
        for group in groups:
            for name, kind in get_type_hints(group, include_extras=True).items():
                parameters.append(
                    inspect.Parameter(
                        name, inspect.Parameter.KEYWORD_ONLY, default=getattr(group, name), annotation=kind
                    )
                )
        command.__dict__["__signature__"] = inspect.Signature(parameters)
        command.__annotations__ = {each.name: each.annotation for each in parameters}
        command.__doc__ = unwrapped(command.__doc__ or "")
        return command

    return decorate


def unwrapped(text: str) -> str:
    """Unwrap a docstring's sentences, for a terminal of any width; indented lines stay lines."""
    return re.sub(r"(?<=[^\n])\n(?=[^\s])", " ", inspect.cleandoc(text))


class Tiers:
    """Options for where states rest, for every command that trains, plans or simulates."""

    offload: Annotated[
        str, unset(COMMON, "All states rest in host memory (cpu) or in files (nvme), not on the device.", "cpu|nvme")
    ] = ""
    offload_parameters: Annotated[
        str,
        unset(
            WHERE,
            "Parameters: device, cpu, nvme, shared (by ranks of a host), or a fraction in host memory. "
            "[dim]\\[default: device, or --offload][/dim]",
            "WHERE",
        ),
    ] = ""
    offload_gradients: Annotated[str, unset(WHERE, "Gradients, likewise.", "WHERE")] = ""
    offload_optimizer: Annotated[str, unset(WHERE, "Masters and optimizer states, likewise.", "WHERE")] = ""
    offload_activations: Annotated[
        str, unset(WHERE, "What forward saves for backward; --offload leaves it on the device.", "device|cpu|nvme")
    ] = ""
    offload_step: Annotated[
        str,
        unset(
            WHERE, "Which steps states that rest beside a GPU: the GPU, or the host, whose bits differ.", "host|device"
        ),
    ] = ""


def tiers_of(options: dict[str, Any]) -> dict[str, str]:
    """Take the options of `Tiers` out of `options`; return {state: where it rests}."""
    from zeroshard.cli.config import PLACED, places

    return places(options.pop("offload"), **{what: options.pop(f"offload_{what}") for what in PLACED})


HOW = "How CPU ranks exchange data: gloo's messages, or memory that ranks of one host share. auto: if they can."
SENT = "Gradients as they are, or sent as int8 codes: a quarter of the bytes, and bits of its own."
BITS = (
    "fp32: the model's own dtypes; bf16: bfloat16 weights and inputs, fp32 masters, which bf16-split splits; "
    "fp32-fp8, bf16-fp8: linear weights in 8 bits; ...-states16: optimizer states in 16 bits, rounded to nearest, or "
    "at random with -drawn."
)
Steps = Annotated[int, option(COMMON, "Optimizer steps.")]
Seed = Annotated[int, option(MODEL, "The seed of the weights and of the micro-batches.")]
Out = Annotated[
    str,
    option(COMMON, "The run's folder. An earlier run there moves to RUN_DIR/earlier-1.", metavar="RUN_DIR"),
]
Stage = Annotated[
    int, option(COMMON, "What is sharded: 0 nothing, 1 optimizer state, 2 also gradients, 3 also parameters.")
]
LocalRanks = Annotated[int | None, unset(COMMON, "Local processes to start. [dim]\\[default: 1, or torchrun's][/dim]")]
Over = Annotated[
    Transport,
    option(
        RUN,
        HOW,
    ),
]
Sums = Annotated[
    Reduce,
    option(RUN, SENT),
]
Replicas = Annotated[int, option(RUN, "Copies of what is sharded, each over 1/K of the ranks: the same bits.")]
Hosts = Annotated[
    int,
    option(RUN, "Hosts that the ranks are on: one copy of the model, sent between them by two levels. The same bits."),
]
Spread = Annotated[
    OptimizerOver,
    option(RUN, "Which ranks share its states and masters: each replica's, or all replicas'. The same bits."),
]
Stacked = Annotated[
    str | None,
    unset(
        RUN,
        'Matrices that a parameter stacks: "*.qkv.weight=3" or "*.experts.*=first" (shapes, jobs).',
        "PATTERN=N|first",
    ),
]
Where = Annotated[Device, option(RUN, "auto: one GPU per rank if there are enough, else the CPU.")]
Bits = Annotated[Precision, option(MODEL, BITS, metavar="FORMAT")]
GradDtypeOfJob = Annotated[
    GradDtype | None,
    unset(RUN, "What a job's gradients are added up in. [dim]\\[default: fp32 of 16-bit ones][/dim]"),
]
InBackward = Annotated[
    bool,
    option(
        RUN,
        "Each bucket is stepped in backward, as its gradients come; they rest nowhere then.",
        "--optimizer-in-backward",
    ),
]
OffloadPath = Annotated[str, unset(WHERE, "The folder on a local disk for states in files.", "DIR")]
Job = Annotated[str, typer.Argument(metavar="MODULE:FUNCTION", help="train:job, or path/to/train.py:job.")]
AsJson = Annotated[bool, option(ANSWER, "Print one JSON object, with bytes as integers.", "--json")]
