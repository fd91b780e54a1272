"""Helps of commands: common options first, all by --help-all; no name is cut and no word broken, however narrow.

zeroshard plan --help        the options that most questions need, and how many more there are
zeroshard plan --help-all    all of them, in sections
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from zeroshard.cli import screen
from zeroshard.cli.commands.options import COMMON

ASKED = {
    "help_option_names": ["--help", "--help-all"]
}  # the settings of the outermost group; the others take them over
ALL = "zeroshard.cli.help"  # in `Context.meta`: was it --help-all?
LONGEST = 120  # longer lines are hard to read
NAMES = 26  # columns of names; the words about a longer one begin on the next line
WORDS = {"<int>": "N", "<float>": "NUMBER", "<str>": "TEXT", "<list[str]>": "TEXT"}
Row = tuple[str, Text]


class _Helped:
    """Shows its own help, in place of Rich's boxes: these cut long names, and leave half of a line to words."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        ctx.meta[ALL] = "--help-all" in args
        return super().parse_args(ctx, args)  # type: ignore[misc]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        show(ctx)


class Command(_Helped, TyperCommand):
    """A command."""


class Group(_Helped, TyperGroup):
    """A command that has commands."""


def asked(words: Sequence[str]) -> bool:
    """Tell if a command line asks for help."""
    return any(word in words for word in ASKED["help_option_names"])


def show(ctx: Any) -> None:
    """Print the help of a context's command."""
    arguments = [each for each in ctx.command.params if each.param_type_name == "argument" and not each.hidden]
    inside = {name: each for name, each in getattr(ctx.command, "commands", {}).items() if not each.hidden}
    pieces = ["COMMAND [ARGS]..."] if inside else map(_usage, arguments)
    _lines(Text(" ".join([f"Usage: {ctx.command_path} [OPTIONS]", *pieces]), style="bold"), len("Usage: "))
    _lines(Text())
    for line in (ctx.command.help or "").splitlines():
        _lines(Text.from_markup(line, overflow="ignore" if line.startswith("  ") else "fold"))
    sections = {"Arguments": [(each.display_name_raw, Text.from_markup(each.help or "")) for each in arguments]}
    sections |= _options(ctx)
    sections["Commands"] = [
        (name, Text.from_markup((each.help or "").partition("\n\n")[0])) for name, each in inside.items()
    ]
    wide = min(max(len(name) for rows in sections.values() for name, _ in rows), NAMES)
    for title, rows in sections.items():
        if rows:
            _lines(Text())
            _lines(Text(title, style="bold"))
        for row in rows:
            _row(row, wide)


def _usage(argument: Any) -> str:
    name: str = argument.display_name_raw
    return name if argument.required or name.startswith("[") else f"[{name}]"


def _options(ctx: Any) -> dict[str, list[Row]]:
    """Make the rows of a command's options, by section: the common ones, and all if that is asked or none is common."""
    panels: dict[str | None, list[Row]] = {COMMON: []}
    for each in ctx.command.params:
        if each.param_type_name == "option" and not each.hidden:
            panels.setdefault(each.rich_help_panel, []).append(_option(each, ctx))
    common = panels.pop(COMMON)
    more = sum(map(len, panels.values()))
    about = [("--help", Text("Show this message and exit."))]
    if common and more:
        about.append(("--help-all", Text(f"Show {screen.many(more, 'more option')}.")))
    rest = {str(panel): rows for panel, rows in panels.items() if ctx.meta[ALL] or not common}
    return {"Options": [*common, *about], **rest} if common else {**rest, "Options": about}


def _option(option: Any, ctx: Any) -> Row:
    """Make the row of an option: `--reduce ordered|int8`, and its help with its default."""
    takes = "" if option.is_flag else option.metavar or option.display_type(ctx)
    names = ", ".join([*option.opts, *option.secondary_opts])
    _, told = option.get_help_record(ctx)
    words = Text.from_markup(option.help)
    words.append(told[len(option.help) :].replace("  ", " ", 1), style="dim")
    return f"{names} {WORDS.get(takes, takes.strip('<>'))}".rstrip(), words


def _row(row: Row, wide: int) -> None:
    name, words = row
    head = Text(f"  {name}", style="cyan")
    if len(name) > wide:
        _lines(head)
        head = Text()
    head.pad_right(wide + 4 - len(head))
    _lines(Text.assemble(head, words), wide + 4)


def _lines(text: Text, indent: int = 0) -> None:
    """Print a text, wrapped between words; its lines after the first begin at `indent`."""
    if text.overflow == "ignore":  # as its author broke it
        screen.console.print(text, soft_wrap=True)
    else:
        screen.wrapped(text, min(screen.console.width, LONGEST), indent)
