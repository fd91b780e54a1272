"""Write docs/commands.md from the commands themselves, and docs/glossary.md from the package. `make docs` runs it."""

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
from zeroshard.cli.main import app

DOCS = Path(__file__).parent
MADE = "<!-- python docs/commands.py writes this page from the code. -->\n\n"
HEAD = f"""# Commands

{MADE}What `zeroshard COMMAND --help` says. After `zeroshard --install-completion` the Tab key completes commands and
options.
Exit codes: 0 done, 1 failed, 2 the input cannot be used, 130 interrupted, 141 the reader of the output has left.
"""
WORDS = f"""# Glossary

{MADE}The words that documents, errors and code use for the engine's parts.
[Architecture](architecture.md#the-words) has more.

| word | meaning |
|---|---|
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


PAGES = {"commands.md": commands, "glossary.md": glossary}

if __name__ == "__main__":
    for name, made in PAGES.items():
        (DOCS / name).write_text(made())
