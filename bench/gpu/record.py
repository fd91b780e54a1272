"""What a step leaves: one file of JSON, written anew after each of its rows, so that none is lost with a later one."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .place import Place

PASSED, FAILED, SKIPPED, MEASURED, UNDER_WAY = "passed", "failed", "skipped", "measured", "under way"
SHOWN = 20_000  # characters of what an error says: the end is what matters


class Wrong(AssertionError):
    """A case that ran, and found what it should not."""


def each(cases: Mapping[str, Callable[[], Any]]) -> dict[str, str]:
    """On a rank: what is wrong with each case, or nothing; whatever one raises, the next is run."""
    found = {}
    for name, call in cases.items():
        try:
            call()
            found[name] = ""
        except Exception as error:
            found[name] = (str(error) if isinstance(error, Wrong) else traceback.format_exc())[-SHOWN:]
    return found


class Record:
    """One step's file. `verdict` is that of its rows: failed if one failed, skipped if all were."""

    def __init__(self, path: Path, place: Place, **facts: Any) -> None:
        self.path, self.place, self.facts = path, place, facts
        self.rows: list[dict[str, Any]] = []
        self.begun = time.time()
        self.write(UNDER_WAY)

    def case(self, name: str, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """A row: what `call` returns, or what it raises; then None, and the next case is run all the same."""
        return self._row(PASSED, name, call, args, options)

    def measure(self, name: str, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """The same of numbers that nothing is claimed of."""
        return self._row(MEASURED, name, call, args, options)

    def ranks(self, name: str, world: int, body: Callable[..., dict[str, str]], *args: Any, **options: Any) -> None:
        """A row for each of the cases that `body` answers with, see `each`; one row in all where it ends early."""
        begun = time.monotonic()
        try:
            found = self.place.run(world, body, *args, **options)
        except Exception:
            self._add({"case": name, "verdict": FAILED, "found": traceback.format_exc()[-SHOWN:]})
            return
        seconds = round((time.monotonic() - begun) / max(len(found[0]), 1), 3)
        for case in found[0]:
            wrong = [f"rank {rank}: {told[case]}" for rank, told in enumerate(found) if told[case]]
            row = {"case": f"{name}: {case}", "verdict": FAILED if wrong else PASSED, "found": "\n".join(wrong)}
            self._add(row | {"seconds": seconds})

    def skip(self, name: str, why: str) -> None:
        self._add({"case": name, "verdict": SKIPPED, "found": why})

    def _row(self, verdict: str, name: str, call: Callable[..., Any], args: Any, options: Any) -> Any:
        begun, found = time.monotonic(), None
        try:
            found = call(*args, **options)
            row = {"case": name, "verdict": verdict, "found": found}
        except Exception as error:
            said = str(error) if isinstance(error, Wrong) else traceback.format_exc()
            row = {"case": name, "verdict": FAILED, "found": said[-SHOWN:]}
        self._add(row | {"seconds": round(time.monotonic() - begun, 3)})
        return found

    def _add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        print(f"  {row['verdict']:<9} {row['case']}", flush=True)
        self.write(UNDER_WAY)

    def write(self, verdict: str = "", **more: Any) -> None:
        told = {
            **self.facts,
            **self.place.facts,
            "verdict": verdict or self.verdict,
            "seconds": round(time.time() - self.begun, 1),
            **more,
            "rows": self.rows,
        }
        whole = self.path.with_suffix(".part")
        whole.write_text(json.dumps(told, indent=2, default=str) + "\n")
        whole.replace(self.path)

    @property
    def verdict(self) -> str:
        found = [row["verdict"] for row in self.rows]
        if FAILED in found:
            return FAILED
        return SKIPPED if all(each == SKIPPED for each in found) else PASSED
