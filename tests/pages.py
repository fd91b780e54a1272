"""What the documents show of a program's output, and how it is compared with what the program prints today."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
DIGITS = r"-?\d[\d,.]*(?:e-?\d+)?"


def blocks(page):
    """The fenced blocks of a page, each with its language."""
    return BLOCK.findall(page.read_text())


def shown(page, first):
    """The one block of docs/`page` that begins so."""
    (found,) = (text for _, text in blocks(DOCS / page) if text.startswith(first))
    return found


def is_shown(text, printed, *own):
    """Is this what a page shows, wherever lines are broken? "..." stands for anything.

    own: patterns of what is the machine's or the run's own.
    """
    parts = re.split("|".join([r"\.\.\.", *own]), " ".join(text.split()))
    return re.search(".*?".join(map(re.escape, parts)), " ".join(printed.split())) is not None
