"""Count lines of code, without prose and blank lines: `python docs/lines.py` prints them room by room."""

from __future__ import annotations

import ast
import collections
import io
import tokenize
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "zeroshard"


def code(path: Path) -> dict[int, str]:
    """The lines of a file that hold code: number to text, without comments, docstrings and blank lines."""
    text = path.read_text()
    prose, lines, comments = set(), set(), {}
    for node in ast.walk(ast.parse(text)):
        documented = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        if documented and ast.get_docstring(node) is not None:
            prose |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    silent = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER, tokenize.COMMENT}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            comments[token.start[0]] = token.start[1]
        elif token.type not in silent:
            lines |= set(range(token.start[0], token.end[0] + 1))
    whole = text.split("\n")
    return {number: whole[number - 1][: comments.get(number)] for number in sorted(lines - prose)}


def main() -> None:
    rooms: collections.Counter[str] = collections.Counter()
    for path in PACKAGE.rglob("*.py"):
        within = path.relative_to(PACKAGE).parts
        rooms[within[0] if len(within) > 1 else "top"] += len(code(path))
    for room, lines in sorted(rooms.items(), key=lambda each: -each[1]):
        print(f"{lines:7,}  {room}")
    print(f"{rooms.total():7,}  all")


if __name__ == "__main__":
    main()
