"""Write commands.md from the commands, errors.md and glossary.md from the package, in docs/. `make docs` runs it."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import typer
from rich.text import Text

import zeroshard
from zeroshard import errors
from zeroshard.cli.main import app
from zeroshard.policies import incompatible

DOCS = Path(__file__).parent
MADE = "<!-- python docs/commands.py writes this page from the code. -->\n\n"
HEAD = f"""# Commands

{MADE}What `zeroshard COMMAND --help` says. After `zeroshard --install-completion` the Tab key completes commands and
options.
Exit codes: 0 done, 1 failed, 2 the input cannot be used, 130 interrupted, 141 the reader of the output has left.
"""
WORDS = f"""# Glossary

{MADE}The words that documents, errors and code use for the engine's parts.
[Architecture](architecture.md#the-words) explains more words.

| word | meaning |
|---|---|
"""
ERRORS = f"""# Errors

{MADE}All that zeroshard raises on purpose is a `zeroshard.Error`. Its message has a line for each fact: what failed,
`where` (rank, parameter, file), what was `expected`, what it `got`, and what to write `instead`. Where several ranks
report an error, read the first one. [Troubleshooting](troubleshooting.md) has the usual causes; the classes are in
`zeroshard.errors`.

| error | also a | what it says |
|---|---|---|
"""
TOGETHER = """
## What does not go together

Each of these raises `UserError` from `shard` on every rank, and from `zeroshard plan` where it has the setting.

"""


def plain(text: str) -> str:
    text = re.sub(r"(?<!\\)\[(?=default:|required)", r"\\[", text)  # typer's own, which is no markup
    return Text.from_markup(text).plain.strip()


def every(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield (words, command) of all commands, in the order of the help."""
    for word, each in getattr(command, "commands", {}).items():
        yield f"{name} {word}", each
        yield from every(each, f"{name} {word}")


def told(text: str) -> str:
    """Make Markdown of a docstring: indented lines are shown as they stand."""
    parts = []
    for part in plain(text).replace("\b", "").split("\n\n"):
        if part.startswith("  "):
            parts.append(f"```text\n{part}\n```")
        else:
            parts.append(textwrap.fill(" ".join(part.split()), 120, break_on_hyphens=False))
    return "\n\n".join(parts)


def cell(text: str) -> str:
    return " ".join(plain(text).split()).replace("|", "\\|")


def options(command: Any, words: str) -> str:
    context = typer.Context(command, info_name=words)
    rows = [param.get_help_record(context) for param in command.get_params(context)]
    lines = ["| option or argument | meaning |", "|---|---|"]
    for names, text in filter(None, rows):
        lines.append(f"| `{cell(names)}` | {cell(text).replace(' *', f' {chr(92)}*')} |")
    return "\n".join(lines)


def commands() -> str:
    parts = [HEAD]
    for words, command in every(typer.main.get_command(app), "zeroshard"):
        parts.append(f"## {words}\n\n{told(command.help or '')}\n")
        if not hasattr(command, "commands"):
            parts.append(f"{options(command, words)}\n")
    return "\n".join(parts)


def glossary() -> str:
    lines = (zeroshard.__doc__ or "").partition("\n\n")[2].splitlines()
    pairs = (line.split(maxsplit=1) for line in lines if line)
    return WORDS + "".join(f"| {word} | {meaning} |\n" for word, meaning in pairs)


def raised() -> str:
    found = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, errors.Error)]
    rows = []
    for each in found[1:]:
        bases = ", ".join(f"`{base.__name__}`" for base in each.__bases__ if base is not errors.Error)
        about = " ".join((each.__doc__ or "").split("\n\n")[0].split())
        rows.append(f"| `{each.__name__}` | {bases} | {about} |\n")
    return ERRORS + "".join(rows) + TOGETHER + incompatible.table()


PAGES = {"commands.md": commands, "errors.md": raised, "glossary.md": glossary}

if __name__ == "__main__":
    for name, made in PAGES.items():
        (DOCS / name).write_text(made())
