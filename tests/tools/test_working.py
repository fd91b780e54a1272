"""No silence: what a command is doing until it answers, live on a terminal and in plain lines elsewhere."""

from __future__ import annotations

import io
import re
import threading

import pytest
from rich.console import Console

from zeroshard.cli import working
from zeroshard.cli.working import Working


@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.setattr(working, "FIRST", 0.0)
    monkeypatch.setattr(working, "EVERY", 0.0)
    monkeypatch.setattr(working, "LOOK", 0.01)


def looked(times):
    """A function to call now and then, and an event that says it was called so often."""
    left, enough = [times], threading.Event()

    def look():
        left[0] -= 1
        if left[0] == 0:
            enough.set()

    return look, enough


def test_plain_lines_say_what_is_done_how_much_of_it_and_how_long_yet(at_once, capsys):
    look, enough = looked(4)
    with Working(("ranks to simulate", 3), ("others", 5), look=look) as counts:
        counts.now("rank 511", 1)
        enough.wait()
    told = capsys.readouterr()
    assert told.out == ""
    assert re.fullmatch(r" +\d+ s: ranks to simulate \(rank 511\) 1 of 3, about \d+ s left", told.err.splitlines()[-1])


def test_a_count_of_nothing_names_what_is_done_alone(at_once, capsys):
    look, enough = looked(4)
    with Working(("planning", None), look=look):
        enough.wait()
    assert re.fullmatch(r" +\d+ s: planning", capsys.readouterr().err.splitlines()[-1])


def test_what_takes_less_than_two_seconds_says_nothing(capsys):
    with Working(("planning", None)):
        pass
    assert capsys.readouterr() == ("", "")


def test_an_object_for_a_program_comes_without_lines(at_once, capsys):
    look, enough = looked(4)
    with Working(("planning", None), lines=False, look=look) as counts:
        counts.say("gate 1 holds")
        enough.wait()
    assert capsys.readouterr() == ("", "")


def test_a_terminal_has_a_live_line_for_each_count_and_none_in_the_end(monkeypatch):
    file = io.StringIO()
    file.isatty = lambda: True
    monkeypatch.setattr(working, "Console", lambda **_: Console(file=file, force_terminal=True, width=120))
    with Working(("repeatability", 3), ("baseline", 2)) as counts:
        counts.now("2 ranks, stage 3", 1)
        counts.say("stays in a log alone")
        counts._bars.refresh()
    drawn = file.getvalue()
    assert all(each in drawn for each in ("repeatability", "baseline", "1 of 3", "0 of 2", "2 ranks, stage 3"))
    assert "stays in a log alone" not in drawn
    assert drawn.endswith("\x1b[2K")  # the lines are erased


@pytest.mark.parametrize("setting", ["FORCE_COLOR", "TTY_COMPATIBLE"])
def test_what_makes_a_log_colourful_makes_no_line_live(monkeypatch, capsys, setting):
    monkeypatch.setenv(setting, "1")
    with Working(("planning", None)):
        pass
    assert capsys.readouterr() == ("", "")


def test_an_error_ends_the_lines(at_once):
    with pytest.raises(ValueError, match="broken"), Working(("planning", None)) as counts:
        raise ValueError("broken")
    assert not counts._thread.is_alive()
