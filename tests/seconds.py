"""The processor seconds of each test file and test function: `--seconds FILE` writes them, largest first, as JSON.

    pytest -n 3 --dist loadfile --seconds=run/ci/seconds.json

Counted is user and system time of pytest and of all its descendants: rank processes, commands, browsers. A process that is
killed after its parent is not counted, and what starts once for a session (the imports of the ranks' nursery) counts as the
first test's that needs it. Importing and collecting is counted apart. Wall time says little on a busy machine; processor time says what a test costs on any.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

TICKS = os.sysconf("SC_CLK_TCK")


def spent() -> float:
    """Processor seconds of this process and its descendants so far, those included that ended and were waited for."""
    todo, total = [os.getpid()], 0
    while todo:
        pid = todo.pop()
        with suppress(OSError):  # it ended meanwhile, and its parent has its time
            after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += sum(map(int, after_name[11:15]))  # utime, stime and those of children that were waited for
            for task in os.listdir(f"/proc/{pid}/task"):
                todo += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    return total / TICKS


def pytest_addoption(parser: Any) -> None:
    parser.addoption("--seconds", metavar="FILE", help="write the processor seconds of each test file there, as JSON")


def pytest_configure(config: Any) -> None:
    if config.getoption("--seconds"):
        config.pluginmanager.register(Seconds(Path(config.getoption("--seconds"))))


class Seconds:
    """Counts in each process that runs tests; the process that the user started writes the file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.files, self.functions, self.tests = Counter[str](), Counter[str](), Counter[str]()
        self.collecting = Counter[str]()

    def pytest_collection_finish(self) -> None:
        self.collecting["seconds"] = spent()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: Any) -> Any:
        before = spent()
        result = yield
        file, function = item.nodeid.partition("::")[0], item.nodeid.partition("[")[0]
        seconds = spent() - before
        self.files[file] += seconds
        self.functions[function] += seconds
        self.tests[file] += 1
        return result

    def pytest_testnodedown(self, node: Any) -> None:
        """One of xdist's workers ended: add what it counted. A worker that crashed counted in vain."""
        for name, counted in getattr(node, "workeroutput", {}).get("seconds", {}).items():
            getattr(self, name).update(counted)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: Any) -> None:
        counted = {"files": self.files, "functions": self.functions, "tests": self.tests, "collecting": self.collecting}
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["seconds"] = {name: dict(counter) for name, counter in counted.items()}
            return
        text = {
            "selection": session.config.option.markexpr,
            "seconds": round(self.files.total(), 1),
            "collecting": round(self.collecting["seconds"], 1),
            "tests": self.tests.total(),
            "files": {
                file: {"seconds": round(s, 2), "tests": self.tests[file]} for file, s in self.files.most_common()
            },
            "functions": {name: round(s, 2) for name, s in self.functions.most_common()},
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(text, indent=1) + "\n")

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.write_line(
            f"processor seconds: {self.files.total():.0f} of tests, {self.collecting.total():.0f} of collecting: {self._path}"
        )
