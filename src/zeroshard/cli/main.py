"""The `zeroshard` command: its commands, and one line for every mistake.

Exit codes: 0 done, 1 failed, 2 the input cannot be used, 130 interrupted, 141 the reader of the output has left.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import platform
import signal
import sys
import time
from collections.abc import Sequence
from typing import Annotated, Any

import typer

import zeroshard
from zeroshard.cli import launch, output
from zeroshard.cli.commands import looking, planning, training
from zeroshard.cli.config import InputError, Launch, one_line
from zeroshard.cli.output import OutputError
from zeroshard.errors import Error, UserError, visible
from zeroshard.explain.document import links

app = typer.Typer(
    help="ZeRO stages 0-3 for PyTorch from one line, with the same bits in every configuration.",
    no_args_is_help=True,
    epilog=f"Documents: {links().get('Documentation', 'docs/README.md in a clone')}",
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
for command in (
    training.train,
    training.demo,
    looking.explain,
    planning.plan,
    looking.verify,
    looking.diff,
    planning.simulate,
):
    app.command()(command)
app.add_typer(looking.ckpt, name="ckpt")
COMMANDS = {each.name or each.callback.__name__ for each in app.registered_commands if each.callback}
COMMANDS |= {str(each.name) for each in app.registered_groups}

# Functions of the ranks that a command starts: not commands for users, so that no suggestion names them.
RANKS = {
    "check-rank": "zeroshard.cli.check:check_rank",
    "verify-rank": "zeroshard.cli.verify:verify_rank",
}
SPEAKER = 5.0  # seconds that one rank gets to say for all of them what is wrong


def _version(asked: bool) -> None:
    if asked:
        try:
            torch = f"torch {importlib.metadata.version('torch')}"
        except importlib.metadata.PackageNotFoundError:
            torch = "no torch"
        print(f"zeroshard {zeroshard.__version__}, {torch}, Python {platform.python_version()}, {platform.platform()}")
        raise typer.Exit


@app.callback()
def _everywhere(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the versions that run here, and exit.", callback=_version, is_eager=True),
    ] = False,
) -> None:
    pass


def main() -> None:
    for number in (signal.SIGINT, *launch.PREEMPTING):  # alike, and also where a shell's `&` has turned SIGINT off
        signal.signal(number, signal.default_int_handler)
    place = None
    with contextlib.suppress(UserError):  # raised again by a command that needs the place
        place = Launch.from_environment()
    try:
        output.take_over()
        code = _run(sys.argv[1:])
    except InputError as error:
        if place is not None and place.local_rank != 0:
            time.sleep(SPEAKER)  # a rank that ends makes torchrun end the others, and one of them is about to speak
        code = _say(error if place is None or place.local_rank == 0 else "", launch.BAD_INPUT)
    except typer.TyperException as error:  # an option that does not exist, a value of the wrong type
        code = _say(error.format_message().replace(": Value error, ", ": "), launch.BAD_INPUT)
    except Error as error:
        launch.say_nothing_when_told()
        who = f"rank {place.rank}: " if place else ""
        code = _left(error) or _say(
            f"{who}{error}", launch.BAD_INPUT if isinstance(error, UserError) else launch.FAILED
        )
    except KeyboardInterrupt:
        code = launch.INTERRUPTED
    if code == launch.INTERRUPTED and place is None and "zeroshard.cli.train" not in sys.modules:
        _say("interrupted; all ranks have ended", code)
    try:
        output.flush()
    except OutputError as error:  # where nothing else went wrong, this is the exit code
        code = code or _left(error) or _say(error, launch.FAILED)
    sys.exit(code or 0)


def _run(words: list[str]) -> Any:
    """Run a command, or one rank of it; return its exit code."""
    if len(words) == 2 and words[0] in RANKS:
        module, name = RANKS[words[0]].split(":")
        return getattr(importlib.import_module(module), name)(words[1])
    _refuse_empty(words)
    command = f"zeroshard {words[0]}" if words and words[0] in COMMANDS else ""
    try:
        if command and sys.platform != "linux" and not _works_here(words) and "--help" not in words:
            zeroshard.check_place(command)
        return app(standalone_mode=False)
    except ImportError as error:
        absent = isinstance(error, ModuleNotFoundError) and error.name in zeroshard.EXTRA
        if not command or (sys.platform == "linux" and not absent):
            raise  # a job's own, say
        what = f"{command} for this" if words[0] == "plan" else command
        raise InputError(zeroshard.missing(what) if absent else str(error)) from error


def _works_here(words: Sequence[str]) -> bool:
    """Tell if a command runs off Linux: what computes, and on macOS what reads files as Linux does."""
    looks = words[0] == "ckpt" and words[1:2] in (["inspect"], ["verify"])
    return words[0] in ("plan", "explain") or (looks and sys.platform == "darwin")


def _refuse_empty(words: Sequence[str]) -> None:
    """Refuse empty arguments, as from an unset shell variable: `--out "$RUN"` would be this folder."""
    for before, word in zip(("", *words), words, strict=False):
        option, given, value = word.partition("=")
        if not word or (word.startswith("--") and given and not value):
            name = option or (before if before.startswith("--") and "=" not in before else "")
            raise InputError(f"{name} is empty; leave it out, or give it a value" if name else "an argument is empty")


def _left(error: Error) -> int:
    """Return `READER_LEFT` where a pipe's reader has read enough, which is no failure and not reported; else 0."""
    return launch.READER_LEFT if isinstance(error, OutputError) and error.left else 0


def _say(what: object, code: int) -> int:
    with contextlib.suppress(OutputError):
        if str(what):  # empty where the help has been shown instead
            print(f"zeroshard: {visible(one_line(what))}", file=sys.stderr)
    return code
