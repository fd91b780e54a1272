"""What commands print, on terminals of any width and in logs: nothing is cut, and no word broken."""

import math
from itertools import pairwise

import pytest

from zeroshard.cli import output, screen

SENTENCE = "  [dim]two reductions of blocks.0.attention.qkv.weight are under way while blocks.1 is computed[/dim]"
NAMES = ["blocks.0.attention.qkv.weight", "blocks.0.attention.out.weight"]


@pytest.fixture
def printed(monkeypatch, capsys):
    """The lines that a call prints on a terminal of that many columns; None: in a log."""

    def shown(columns, call, *arguments):
        monkeypatch.setenv("COLUMNS", str(columns or ""))
        call(*arguments)
        return capsys.readouterr().out.splitlines()

    return shown


def table(*columns, rows=8):
    made = screen.new_table("A title", "name", *columns)
    for number in range(rows):
        made.add_row(NAMES[number % 2], *(f"{column}-{number}" for column in columns))
    return made


@pytest.mark.parametrize("columns", [30, 40, 80, 120])
def test_sentences_are_wrapped_between_words(printed, columns):
    lines = printed(columns, screen.say, SENTENCE)
    assert " ".join(lines).split() == SENTENCE.replace("[dim]", "").replace("[/dim]", "").split()
    assert all(line.startswith("  ") and line == line.rstrip() for line in lines)
    words = max(map(len, SENTENCE.split()))
    assert max(map(len, lines)) <= max(columns, words + 2)
    for line, after in pairwise(lines):
        assert len(line) + 1 + len(after.split()[0]) > columns


def test_a_log_keeps_its_lines_whole(printed):
    assert printed(None, screen.say, SENTENCE * 3) == [SENTENCE.replace("[dim]", "").replace("[/dim]", "") * 3]
    wide = [f"column{number}" for number in range(20)]
    assert len(printed(None, screen.show, table(*wide))) == 2 + 8


@pytest.mark.parametrize("columns", [40, 80, 120])
@pytest.mark.parametrize("others", [1, 4, 12])
def test_tables_lose_no_cell(printed, columns, others):
    """Within the terminal where words of the last column can be wrapped, and else whole rows, which it wraps itself."""
    names = [f"column{number}" for number in range(others)]
    lines = printed(columns, screen.show, table(*names))
    words = "\n".join(lines).split()
    for number in range(8):
        assert all(words.count(f"{name}-{number}") == 1 for name in names)
    assert words.count(NAMES[0]) == words.count(NAMES[1]) == 4 and len(lines) == 2 + 8


def test_a_curve_is_bars_of_the_means_between_the_least_and_the_largest():
    assert screen.curve([8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0]) == "█▇▆▅▄▃▂▁"
    assert screen.curve([float(number) for number in range(64)]) == "".join(
        screen.BARS[round(at / 31 * 7)] for at in range(32)
    )
    assert screen.curve([3.0, math.nan, 2.0, math.inf]) == "█ ▁ "
    assert screen.curve([2.5]) == screen.curve([math.nan] * 2 + [2.5]).strip() == "▁"
    assert screen.curve([]) == ""
    assert {*screen.BARS} <= {*output.PLAIN}  # a pipe that knows ASCII alone has them too


def test_a_long_last_column_of_words_is_wrapped_beside_its_row(printed):
    made = screen.new_table("Saved along", "name", "n", "what")
    made.add_row("short name", "1", "5")
    made.add_row("blocks.0.attention", "1,234", "word " * 9)
    lines = printed(40, screen.show, made)
    assert max(map(len, lines)) <= 40
    beside = ["blocks.0.attention  1,234  word word", *[" " * 27 + "word word"] * 3, " " * 27 + "word"]
    assert [line.rstrip() for line in lines] == [
        "Saved along", "name                    n  what", "short name              1  5", *beside
    ]  # fmt: skip
