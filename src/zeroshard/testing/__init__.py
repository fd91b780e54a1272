"""Tests on several ranks: pytest's mark `ranks`, equal bits asserted, and runs compared with recorded ones.

plugin      pytest's hooks: `@pytest.mark.ranks(2, 3)`, `--ranks-seed`, `--ranks-record`
asked       what a mark asks for, and the fixtures that reach no rank
threads     a test's body on ranks that are threads of pytest's process
processes   a test's body on ranks that are processes, `ranks(2, processes=True)`
bits        `assert_same_bits`
recorded    the fixture `recorded`: a run compared with a log in the repository
failures    what a rank that failed looks like from the test
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .bits import assert_same_bits as assert_same_bits
    from .recorded import Recorded as Recorded

_HOME = {
    "Recorded": "recorded",
    "assert_same_bits": "bits",
}

__all__ = ["Recorded", "assert_same_bits"]


def __getattr__(name: str) -> Any:
    # On first use: pytest loads the plug-in in every project of an environment, and torch takes seconds.
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
